//! `inspect`: shows the embedded GPU kernels as PTX, as machine code, or as a table of their resources.

use super::doctor::workspace;
use anyhow::Result;
use cuda_builder::{Module, find_cuda_tool};
use engine::cuda::EMBEDDED;
use kernel_inspect::Code;

pub use kernel_inspect::Inspect;

/// Prints the kernels.
pub fn run(options: &Inspect) -> Result<()> {
    kernel_inspect::print(options, &codes(EMBEDDED.modules()?), &|name| find_cuda_tool(name, Some(workspace())))
}

fn codes(modules: &'static [Module]) -> Vec<Code<'static>> {
    let code = |&Module { arch, ptx, cubin, kernels, .. }: &Module| Code { arch, ptx, cubin, kernels };
    modules.iter().map(code).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Passes with an explanatory error if the program has no machine code or the tools are missing.
    #[test]
    fn sass_of_an_embedded_kernel_names_the_kernel() {
        let options = Inspect { sass: true, kernel: Some("activation_forward_f32_gelu".into()), ..Inspect::default() };
        let mut out = Vec::new();
        let tool = |name: &str| find_cuda_tool(name, Some(workspace()));
        let shown =
            EMBEDDED.modules().and_then(|modules| kernel_inspect::inspect(&options, &codes(modules), &tool, &mut out));
        match shown {
            Ok(()) => assert!(String::from_utf8(out).unwrap().contains("activation_forward_f32_gelu")),
            Err(error) => assert!(error.to_string().contains("scripts/setup"), "{error:#}"),
        }
    }
}
