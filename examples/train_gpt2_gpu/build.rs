//! Compiles `kernels/` to PTX, which is embedded in the program.

fn main() -> Result<(), cuda_builder::Error> {
    cuda_builder::CudaBuilder::new("kernels").arch("sm_80").build()?;
    Ok(())
}
