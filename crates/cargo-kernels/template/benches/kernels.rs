//! Times each kernel on the first GPU: cargo kernels bench [NAME]

use std::process::ExitCode;

use cuda_driver::{Buffer, CheckedModule, Error, Gpu, Stopwatch, Stream};
use cuda_std::launch::CheckedLaunch;
use {{ident}}_kernels::{block_sums, grid, saxpy};

const N: usize = 1 << 26;
const RUNS: u32 = 100;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Error> {
    // Cargo adds an argument of its own, --bench.
    let only = std::env::args().skip(1).find(|argument| !argument.starts_with('-')).unwrap_or_default();
    let gpu = Gpu::open(0)?;
    let stream = Stream::new(&gpu)?;
    let module = CheckedModule::load(&gpu, &{{ident}}::KERNELS)?;
    let x = Buffer::<f32>::zeroed(&stream, N)?;
    let (mut y, mut sums) = (Buffer::zeroed(&stream, N)?, Buffer::zeroed(&stream, grid(N)[0] as usize)?);

    // The bytes are those that a kernel must read and write.
    let time = |launch: &CheckedLaunch, bytes: usize| {
        let name = launch.unchecked().name();
        if !name.contains(&only) {
            return Ok(());
        }
        let run = || module.launch(&stream, grid(N), launch);
        let stopwatch = Stopwatch::new(&stream)?;
        stopwatch.time(&stream, RUNS / 10, run)?; // warm up
        let milliseconds: f32 = stopwatch.time(&stream, RUNS, run)?;
        println!("{name:16} {:8.1} us {:8.1} GB/s", 1e3 * milliseconds, bytes as f32 / milliseconds / 1e6);
        Ok(())
    };
    time(&saxpy(y.slice_mut(), x.slice(), 2.0), 3 * 4 * N)?;
    time(&block_sums(sums.slice_mut(), x.slice()), 4 * N)
}
