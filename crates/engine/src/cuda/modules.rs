//! Selection of the kernel module that a GPU runs.

use crate::Result;
use anyhow::{Context, ensure};
use cuda_builder::{Module, ModuleChoice};
use cuda_driver::DeviceInfo;
use std::fmt;

/// The code that a GPU loads.
#[derive(Clone, Copy, Debug)]
pub struct KernelCode<'a> {
    /// The module.
    pub module: &'a Module,
    /// Machine code. The driver compiles the module's PTX if there is none.
    pub cubin: Option<&'a [u8]>,
    /// The architecture of faster kernels that this GPU cannot run, because the program was built without their cubins.
    pub missing_cubin: Option<&'static str>,
}

impl KernelCode<'_> {
    /// Returns true if the module has kernels that use TMA and wgmma.
    pub fn is_hopper(&self) -> bool {
        cuda_builder::has_feature(self.module.arch, "wgmma")
    }

    /// Returns true if the module has the kernels for FP8 GEMMs with mma.sync.
    pub fn has_mma_fp8(&self) -> bool {
        cuda_builder::has_feature(self.module.arch, "fp8") && !self.is_hopper()
    }

    /// Returns the code.
    pub fn image(&self) -> &[u8] {
        self.cubin.unwrap_or(self.module.ptx.as_bytes())
    }
}

impl fmt::Display for KernelCode<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { module: Module { arch, .. }, cubin, missing_cubin } = self;
        write!(f, "{arch} {}", if cubin.is_some() { "cubin" } else { "PTX" })?;
        if let Some(missing) = missing_cubin {
            write!(f, " (slow: built without the cubins of {missing}, see LLM_RS_CUBINS in README.md)")?;
        }
        Ok(())
    }
}

/// The output of the build script.
mod built {
    include!(concat!(env!("OUT_DIR"), "/kernels.rs"));
}

/// All embedded modules, or the reason why there are none.
pub static EMBEDDED: EmbeddedKernels = EmbeddedKernels { modules: built::MODULES, missing: built::MODULES_MISSING };

/// The kernels that a program was built with: one module per architecture.
#[derive(Clone, Copy, Debug)]
pub struct EmbeddedKernels {
    /// Empty if the build found no device toolchain.
    pub modules: &'static [Module],
    /// The reason why `modules` is empty.
    pub missing: Option<&'static str>,
}

impl EmbeddedKernels {
    /// Returns the modules, or an error that names the reason why there are none.
    pub fn modules(&self) -> Result<&'static [Module]> {
        ensure!(!self.modules.is_empty(), "{}", self.missing.unwrap_or("this program was built without GPU kernels"));
        Ok(self.modules)
    }
}

/// Returns the newest architecture that the GPU can run, or the `wanted` one.
///
/// [`ModuleChoice::newest`] has the rules.
pub fn select<'a>(modules: &'a [Module], info: &DeviceInfo, wanted: Option<&str>) -> Result<KernelCode<'a>> {
    let (major, minor) = info.compute_capability;
    ensure!(
        major >= 8,
        "{} has compute capability {major}.{minor}; the kernels need 8.0 (Ampere) or later: run with --device cpu",
        info.name
    );
    let best = ModuleChoice::newest(modules, (major, minor), wanted);
    let best = best.with_context(|| {
        let have: Vec<_> = modules.iter().map(|module| module.arch).collect();
        let asked = wanted.map_or(String::new(), |arch| format!(", and --kernels {arch} was requested"));
        format!(
            "{} has compute capability {major}.{minor}{asked}; this program has kernels for {}{}",
            info.name,
            have.join(", "),
            if modules.iter().any(|module| module.cubin.is_none()) {
                ", some without the cubins that sm_90a needs: run scripts/setup and build with LLM_RS_CUBINS=1"
            } else if wanted.is_some_and(|arch| !have.contains(&arch)) {
                ": build with LLM_RS_CUBINS=all"
            } else {
                ""
            }
        )
    })?;
    Ok(match best {
        ModuleChoice::Cubin(module, cubin) => KernelCode { module, cubin: Some(cubin), missing_cubin: None },
        ModuleChoice::Ptx(module) => {
            let faster = ModuleChoice::made_for(modules, (major, minor)).filter(|_| wanted.is_none());
            KernelCode { module, cubin: None, missing_cubin: faster.map(|module| module.arch) }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn module(arch: &'static str, cubin: Option<&'static [u8]>) -> Module {
        Module { arch, ptx: "", cubin, kernels: &[], shared_limit: None }
    }

    fn gpu(compute_capability: (u32, u32)) -> DeviceInfo {
        DeviceInfo {
            index: 0,
            name: "NVIDIA Test".into(),
            pci_bus_id: "00000000:01:00.0".into(),
            compute_capability,
            sm_count: 1,
            clock_khz: 1,
            memory_clock_khz: 1,
            memory_bus_bits: 1,
            memory_bytes: 1,
            l2_bytes: 1,
            shared_per_block: 1,
            shared_per_sm: 1,
            registers_per_sm: 1,
            threads_per_sm: 1,
        }
    }

    #[test]
    fn each_gpu_gets_the_newest_code_that_it_can_run() {
        let both = [module("sm_80", Some(b"80")), module("sm_90a", Some(b"90"))];
        let all = [both[0], module("sm_89", Some(b"89")), both[1]];
        for (capability, without_sm_89, expected) in [
            ((8, 0), "sm_80 cubin", "sm_80 cubin"),
            ((8, 6), "sm_80 cubin", "sm_80 cubin"),
            ((8, 7), "sm_80 cubin", "sm_80 cubin"),
            ((8, 9), "sm_80 cubin", "sm_89 cubin"),
            ((9, 0), "sm_90a cubin", "sm_90a cubin"),
            // Code for sm_90a runs on nothing else, and a cubin does not cross a major version.
            ((10, 0), "sm_80 PTX", "sm_89 PTX"),
            ((12, 0), "sm_80 PTX", "sm_89 PTX"),
        ] {
            let selected = |modules| select(modules, &gpu(capability), None).unwrap().to_string();
            assert_eq!([selected(&both), selected(&all)], [without_sm_89, expected], "{capability:?}");
        }
        assert_eq!(select(&all, &gpu((9, 0)), Some("sm_89")).unwrap().to_string(), "sm_89 PTX");
        let text = select(&both, &gpu((8, 9)), Some("sm_89")).unwrap_err().to_string();
        assert!(text.ends_with("kernels for sm_80, sm_90a: build with LLM_RS_CUBINS=all"), "{text}");
        let text = select(&all, &gpu((8, 6)), Some("sm_89")).unwrap_err().to_string();
        assert!(text.ends_with("kernels for sm_80, sm_89, sm_90a"), "{text}");
        let without_cubins = [module("sm_80", None), module("sm_90a", None)];
        assert_eq!(select(&without_cubins, &gpu((8, 0)), None).unwrap().to_string(), "sm_80 PTX");
        let text = select(&without_cubins, &gpu((9, 0)), None).unwrap().to_string();
        assert!(text.starts_with("sm_80 PTX (slow: built without the cubins of sm_90a"), "{text}");
        assert_eq!(select(&without_cubins, &gpu((9, 0)), Some("sm_80")).unwrap().to_string(), "sm_80 PTX");
        let text = select(&without_cubins, &gpu((9, 0)), Some("sm_90a")).unwrap_err().to_string();
        assert!(text.contains("--kernels sm_90a was requested") && text.contains("scripts/setup"), "{text}");
        assert_eq!(select(&both, &gpu((9, 0)), Some("sm_80")).unwrap().to_string(), "sm_80 PTX");
        let text = select(&both, &gpu((8, 0)), Some("sm_90a")).unwrap_err().to_string();
        assert!(
            text.contains("8.0, and --kernels sm_90a was requested; this program has kernels for sm_80, sm_90a"),
            "{text}"
        );
    }

    #[test]
    fn an_old_gpu_is_named_and_sent_to_the_cpu() {
        let text = select(&[module("sm_80", None)], &gpu((7, 5)), None).unwrap_err().to_string();
        assert!(text.contains("NVIDIA Test has compute capability 7.5") && text.contains("--device cpu"), "{text}");
        let text = select(&[module("sm_90a", None)], &gpu((8, 6)), None).unwrap_err().to_string();
        assert!(text.contains("8.6; this program has kernels for sm_90a"), "{text}");
    }
}
