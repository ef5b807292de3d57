//! Build script of `engine`: compiles the GPU kernels.
//!
//! Most crates depend on `engine`, so cargo starts the device build early. It is the longest step of a build. At the end of the
//! build it would leave a core idle.

use std::process::ExitCode;

fn main() -> ExitCode {
    match cuda_builder::CudaBuilder::new("gpu").arch("sm_80").arch("sm_90a").approximate_division().build() {
        Ok(_) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
