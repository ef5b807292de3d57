//! The CUDA engine on the emulator against the CPU engine. Every kernel runs with the launch configuration of a GPU.

mod cuda_graphs;
mod dispatch;
mod memory;
mod operations;
mod training;
mod updates;
