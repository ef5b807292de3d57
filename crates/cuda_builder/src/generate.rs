//! Generates `kernels.rs`.

use std::fmt::Write as _;
use std::path::Path;

use crate::error::{Error, at};
use crate::module::{Kernel, LaunchBounds, Resources, shared_limit};
use crate::{Built, BuiltModule};

/// Writes `out_dir/kernels.rs`, and creates the directory. The files of the modules are below `out_dir`.
pub fn write(out_dir: &Path, built: &Built) -> Result<(), Error> {
    let modules: String = built.modules.iter().map(|module| module_literal(out_dir, module)).collect();
    let missing = built.missing.as_deref();
    let text = format!(
        "pub static MODULES: &[::cuda_builder::Module] = &[{modules}];\n\
         pub static MODULES_MISSING: Option<&str> = {missing:?};\n\
         #[allow(dead_code, reason = \"a program uses either the modules or the kernels\")]\n\
         // SAFETY: the builder has compiled the modules.\n\
         pub static KERNELS: ::cuda_builder::Kernels = unsafe {{ ::cuda_builder::Kernels::new(MODULES, MODULES_MISSING) }};\n"
    );
    at(out_dir, std::fs::create_dir_all(out_dir))?;
    let path = out_dir.join("kernels.rs");
    at(&path, std::fs::write(&path, text))
}

fn module_literal(out_dir: &Path, module: &BuiltModule) -> String {
    // Relative to kernels.rs, so that the file contains no absolute path.
    let include = |path: &Path| path.strip_prefix(out_dir).unwrap_or(path).display().to_string();
    let cubin = module.cubin.as_deref().map(|path| format!("include_bytes!({:?})", include(path)));
    let cubin = cubin.map_or("None".to_owned(), |cubin| format!("Some({cubin})"));
    let kernels = module.kernels.iter().fold(String::new(), |mut text, kernel| {
        let _ = write!(text, "\n        {},", kernel_literal(kernel));
        text
    });
    format!(
        "\n    ::cuda_builder::Module {{ arch: {:?}, ptx: include_str!({:?}), cubin: {cubin}, shared_limit: {:?}, \
         kernels: &[{kernels}] }},\n",
        module.arch,
        include(&module.ptx),
        shared_limit(&module.arch),
    )
}

fn kernel_literal(Kernel { name, bounds, resources, signature }: &Kernel) -> String {
    let LaunchBounds { threads, blocks_per_sm, registers } = bounds;
    let bounds = format!(
        "::cuda_builder::LaunchBounds {{ threads: {threads:?}, blocks_per_sm: {blocks_per_sm:?}, \
         registers: {registers:?} }}"
    );
    let resources = match resources {
        None => "None".to_owned(),
        Some(Resources { registers, stack, spill_stores, spill_loads, static_shared, barriers }) => format!(
            "Some(::cuda_builder::Resources {{ registers: {registers}, stack: {stack}, spill_stores: {spill_stores}, \
             spill_loads: {spill_loads}, static_shared: {static_shared}, barriers: {barriers} }})"
        ),
    };
    format!(
        "::cuda_builder::Kernel {{ name: ::std::borrow::Cow::Borrowed({name:?}), bounds: {bounds}, \
         resources: {resources}, signature: {signature:?} }}"
    )
}
