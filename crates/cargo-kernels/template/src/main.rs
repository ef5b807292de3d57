//! Runs the kernels on the first GPU.

use std::process::ExitCode;

use cuda_driver::{Buffer, CheckedModule, Error, Gpu, Stream};
use {{ident}}_kernels::{block_sums, grid, saxpy};

const N: usize = 1_000_003;

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
    let gpu = Gpu::open(0)?;
    let stream = Stream::new(&gpu)?;
    let module = CheckedModule::load(&gpu, &{{ident}}::KERNELS)?;

    let x: Vec<f32> = (0..N).map(|i| (i % 100) as f32).collect();
    let x = Buffer::from_slice(&stream, &x)?;
    let mut y = Buffer::from_slice(&stream, &[1.0; N])?;
    let mut sums = Buffer::zeroed(&stream, grid(N)[0] as usize)?;
    module.launch(&stream, grid(N), &saxpy(y.slice_mut(), x.slice(), 2.0))?;
    module.launch(&stream, grid(N), &block_sums(sums.slice_mut(), y.slice()))?;

    let wrong = y.read()?.iter().enumerate().filter(|&(i, y)| *y != 2.0 * (i % 100) as f32 + 1.0).count();
    let sum: f64 = sums.read()?.into_iter().map(f64::from).sum();
    println!("{}, {}: {N} elements, {wrong} of them wrong, sum {sum}", gpu.info().name, module.architecture());
    Ok(())
}
