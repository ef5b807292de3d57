//! The operating system as ranks use it: files, sockets, clock, threads and channels.
//!
//! Outside a simulation every call is that of the standard library. A thread of a [`simulation`] gets a simulated disk, network and
//! clock instead, with faults that one seed determines. The code of a rank is the same in both cases.
//!
//! * [`fs`]: files and directories. In a simulation, those below [`simulation::ROOT`] are on the simulated disk; all others are real.
//! * [`net`]: TCP. [`time`]: the clock. [`thread`] and [`sync`]: threads, channels, and locks that are held while a thread waits.
//! * [`random`]: unpredictable numbers, which the seed determines in a simulation.
//! * [`process`]: the number of a process, its end, and its error messages. [`progress`]: the progress of long work.
//!
//! Only calls that block, or that other ranks or a power failure can observe, belong here. A short critical section uses
//! `std::sync::Mutex`.

#![warn(missing_docs)]

pub mod fs;
pub mod net;
pub mod process;
pub mod progress;
pub mod random;
pub mod simulation;
pub mod sync;
pub mod thread;
pub mod time;
