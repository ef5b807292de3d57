//! Data-parallel training with several ranks: as threads on both engines, and as processes started by launchers.

mod checkpoints;
mod clusters;
mod compact_state;
mod elastic;
mod expert_parallel;
mod failures;
mod hardware;
mod hybrid_sharding;
mod launchers;
mod measurements;
mod mixtures;
mod sequential_data;
mod threads;
mod world;
