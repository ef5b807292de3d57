//! Build script of `engine`: compiles the GPU kernels.
//!
//! Most crates depend on `engine`, so cargo starts the device build early. It is the longest step of a build. At the end of the
//! build it would leave a core idle. A machine without a GPU needs the kernels only to study them (the feature `kernels`).

use std::process::ExitCode;

fn main() -> ExitCode {
    let kernels = cuda_builder::CudaBuilder::new("gpu").arch("sm_80").optional_arch("sm_89").arch("sm_90a");
    let kernels = kernels.approximate_division();
    let kernels = if cfg!(feature = "kernels") { kernels } else { kernels.only_for_local_gpus() };
    match kernels.build() {
        Ok(_) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
