//! Compiles `kernels/` for Hopper: waits for mbarriers need it.

fn main() -> Result<(), cuda_builder::Error> {
    cuda_builder::CudaBuilder::new("kernels").arch("sm_90a").line_info(true).only_for_local_gpus().build()?;
    Ok(())
}
