//! Compiles `gpu/` to PTX and, with `LLM_RS_CUBINS=1`, to machine code. Both are embedded in the program.

fn main() -> Result<(), cuda_builder::Error> {
    cuda_builder::CudaBuilder::new("gpu").arch("sm_80").arch("sm_90a").build()?;
    Ok(())
}
