//! The text of `--version`. The build script records the commit, the profile and the target.

use engine::cuda::EMBEDDED;
use std::sync::LazyLock;

/// Short hash of the commit, with `-dirty` if tracked files differed from it; `unknown` outside a git checkout.
///
/// The build script runs again when the checked-out commit changes, not at every edit.
const COMMIT: &str = env!("LLM_RS_COMMIT");

/// Returns one line: version and commit.
pub fn short() -> &'static str {
    concat!(env!("CARGO_PKG_VERSION"), " (", env!("LLM_RS_COMMIT"), ")")
}

/// Returns several lines: version, commit, build profile and target, and the architectures of the embedded GPU kernels.
pub fn long() -> &'static str {
    static TEXT: LazyLock<String> = LazyLock::new(|| {
        format!(
            "{}\ncommit: {COMMIT}\nbuild: {}, {}\nGPU kernels: {}",
            env!("CARGO_PKG_VERSION"),
            env!("LLM_RS_PROFILE"),
            env!("LLM_RS_TARGET"),
            kernels()
        )
    });
    &TEXT
}

fn kernels() -> String {
    if EMBEDDED.modules.is_empty() {
        return format!("none ({})", EMBEDDED.missing.unwrap_or("built without a device toolchain"));
    }
    let describe = |module: &cuda_builder::Module| {
        let code = if module.cubin.is_some() { "PTX and cubin" } else { "PTX" };
        format!("{} ({code})", module.arch)
    };
    EMBEDDED.modules.iter().map(describe).collect::<Vec<_>>().join(", ")
}
