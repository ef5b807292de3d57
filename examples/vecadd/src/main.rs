//! Adds two vectors on the first GPU and verifies the result.

use anyhow::{Context, Result, ensure};
use cuda_driver::{DeviceMemory, Gpu, LaunchConfig, Module, Stream};
use cuda_std::shared::Layout;
use cuda_std::{Global, GlobalMut};

/// Output of the build script: the compiled `MODULES`, or in `MODULES_MISSING` the reason why there are none.
mod kernels {
    include!(concat!(env!("OUT_DIR"), "/kernels.rs"));
}

const N: usize = 1_000_003;

fn main() -> Result<()> {
    let ptx =
        kernels::MODULES.first().with_context(|| kernels::MODULES_MISSING.unwrap_or("no kernels were built"))?.ptx;
    let gpu = Gpu::open(0)
        .context("vecadd needs an NVIDIA GPU; to run the kernel in the emulator instead, use cargo test -p vecadd")?;
    let stream = Stream::new(&gpu)?;
    let function = Module::load(&gpu, "vecadd", ptx.as_bytes())?.function("vecadd")?;

    let a: Vec<f32> = (0..N).map(|i| (i % 100) as f32).collect();
    let b: Vec<f32> = (0..N).map(|i| (i % 7) as f32).collect();
    let grid = vecadd_kernel::grid(N);
    let (mut out, mut sums) = (vec![0.0; N], vec![0.0; grid[0] as usize]);
    let memory = |elements: usize| DeviceMemory::new(&gpu, elements * size_of::<f32>());
    let (out_memory, sums_memory, a_memory, b_memory) = (memory(N)?, memory(sums.len())?, memory(N)?, memory(N)?);

    let launch = vecadd_kernel::vecadd(
        GlobalMut::from_address(out_memory.address()),
        GlobalMut::from_address(sums_memory.address()),
        Global::from_address(a_memory.address()),
        Global::from_address(b_memory.address()),
        N as u64,
    );
    let mut layout = Layout::new();
    vecadd_kernel::shared(&mut layout);
    let config = LaunchConfig { grid, block: launch.block(), shared_bytes: layout.bytes() as u32 };
    // SAFETY: each allocation has the length of its slice, and the kernel accesses n elements and one sum per block.
    // All operations are on one stream, which is synchronized before the slices are used.
    unsafe {
        stream.upload(a_memory.address(), &a)?;
        stream.upload(b_memory.address(), &b)?;
        launch.with_arguments(|arguments| function.launch(&stream, &config, arguments))?;
        stream.download(&mut out, out_memory.address())?;
        stream.download(&mut sums, sums_memory.address())?;
    }
    stream.synchronize()?;

    // Sums of small integers are exact in any order.
    let expected: Vec<f32> = a.iter().zip(&b).map(|(a, b)| a + b).collect();
    let expected_sums: Vec<f32> = expected.chunks(vecadd_kernel::THREADS).map(|part| part.iter().sum()).collect();
    ensure!(out == expected, "out: expected the sums of a and b, found other elements");
    ensure!(sums == expected_sums, "sums: expected the sum of each block's elements, found other values");
    println!("{N} elements added on {}", gpu.info().name);
    Ok(())
}
