//! Several ranks train as one does: threads over both engines, and processes as a launcher starts them.

mod checkpoints;
mod failures;
mod launchers;
mod measured;
mod order;
mod threads;
mod world;
