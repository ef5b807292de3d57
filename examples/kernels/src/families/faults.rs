//! Kernels with a planted fault, which run in the emulator only.

use super::file;
use crate::registry::{Family, Kernel};
use crate::session::{blocks, shared_bytes};
use cuda_std::bf16;
use cuda_std::emulate::Fault;
use cuda_std::hopper::Extents;
use kernels_gpu::faults;

pub const FAMILY: Family = Family {
    name: "faults",
    problem: "Kernels with a planted fault. They run in the emulator only, and show its report.",
    kernels: &[
        Kernel::new(
            72,
            "fault_missing_barrier",
            file!("faults/missing_barrier.rs"),
            "A tree reduction without the barrier between its steps: a data race.",
            |s| {
                let (inp, out) = (s.noise::<f32>("inp", 512, 1.0)?, s.output("out", 2)?);
                let launch = faults::missing_barrier::fault_missing_barrier(out, inp.view);
                s.launch(launch, [2, 1, 1], shared_bytes(faults::missing_barrier::shared));
                Ok(())
            },
        )
        .planted(Fault::DataRace),
        Kernel::new(
            73,
            "fault_missing_bound",
            file!("faults/missing_bound.rs"),
            "A vectorized tail that reads past the end: an out-of-bounds access.",
            |s| {
                let (inp, out) = (s.noise::<f32>("inp", 1030, 1.0)?, s.output("out", 1030)?);
                s.launch(faults::missing_bound::fault_missing_bound(out, inp.view, 1030), blocks(1030, 1024), 0);
                Ok(())
            },
        )
        .planted(Fault::OutOfBounds),
        Kernel::new(
            74,
            "fault_cp_async_without_wait",
            file!("faults/cp_async_without_wait.rs"),
            "A read of shared memory before its cp.async has arrived.",
            |s| {
                let (inp, out) = (s.noise::<f32>("inp", 512, 1.0)?, s.output("out", 512)?);
                let launch = faults::cp_async_without_wait::fault_cp_async_without_wait(out, inp.view);
                s.launch(launch, [1, 1, 1], shared_bytes(faults::cp_async_without_wait::shared));
                Ok(())
            },
        )
        .planted(Fault::AsyncCopy),
        Kernel::new(
            75,
            "fault_tma_without_wait",
            file!("faults/tma_without_wait.rs"),
            "A read of a tile before its TMA load has arrived: no wait for the mbarrier.",
            |s| {
                let (inp, out) = (s.noise::<bf16>("inp", 64 * 64, 1.0)?, s.output("out", 64 * 64)?);
                let map = s.tensor_map(inp.view, Extents::Matrix([64, 64]), (64, 64))?;
                let launch = faults::tma_without_wait::fault_tma_without_wait(out, map);
                s.launch(launch, [1, 1, 1], shared_bytes(faults::tma_without_wait::shared));
                Ok(())
            },
        )
        .hopper()
        .planted(Fault::AsyncCopy),
        Kernel::new(
            76,
            "fault_histogram_without_atomics",
            file!("faults/histogram_without_atomics.rs"),
            "A histogram with ordinary additions: a data race.",
            |s| {
                let values: Vec<u32> = (0..200).map(|i| i * 7 % 16).collect();
                let (inp, counts) = (s.input("inp", &values)?, s.zeroed("counts", 16)?);
                let launch = faults::histogram_without_atomics::fault_histogram_without_atomics(counts, inp, 200);
                s.launch(launch, blocks(200, 128), shared_bytes(faults::histogram_without_atomics::shared));
                Ok(())
            },
        )
        .planted(Fault::DataRace),
        Kernel::new(
            77,
            "fault_divergent_barrier",
            file!("faults/divergent_barrier.rs"),
            "A barrier inside of a condition: a part of a warp never reaches it.",
            |s| {
                let (inp, out) = (s.noise::<f32>("inp", 200, 1.0)?, s.output("out", 200)?);
                let launch = faults::divergent_barrier::fault_divergent_barrier(out, inp.view, 200);
                s.launch(launch, blocks(200, 128), shared_bytes(faults::divergent_barrier::shared));
                Ok(())
            },
        )
        .planted(Fault::Deadlock),
        Kernel::new(
            78,
            "fault_shuffle_without_sync",
            file!("faults/shuffle_without_sync.rs"),
            "Lanes that exchange data through shared memory without warp::sync: a data race.",
            |s| {
                let (inp, out) = (s.noise::<f32>("inp", 64, 1.0)?, s.output("out", 64)?);
                let launch = faults::shuffle_without_sync::fault_shuffle_without_sync(out, inp.view);
                s.launch(launch, [2, 1, 1], shared_bytes(faults::shuffle_without_sync::shared));
                Ok(())
            },
        )
        .planted(Fault::DataRace),
    ],
};
