//! Compiles `kernels/` for the GPU.

fn main() -> Result<(), cuda_builder::Error> {
    cuda_builder::CudaBuilder::new("kernels").arch("sm_80").line_info(true).build()?;
    Ok(())
}
