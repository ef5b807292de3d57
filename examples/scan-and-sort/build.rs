//! Compiles `kernels/` for the GPU.

fn main() -> Result<(), cuda_builder::Error> {
    cuda_builder::CudaBuilder::new("kernels").arch("sm_80").arch("sm_90a").only_for_local_gpus().build()?;
    Ok(())
}
