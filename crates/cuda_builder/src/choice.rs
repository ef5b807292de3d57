//! Selection of the code that a GPU runs.

use crate::Module;

/// The code that a GPU loads.
#[derive(Clone, Copy, Debug)]
pub enum ModuleChoice<'a> {
    /// Machine code.
    Cubin(&'a Module, &'a [u8]),
    /// PTX, which the driver compiles.
    Ptx(&'a Module),
}

impl<'a> ModuleChoice<'a> {
    /// Returns the newest architecture that a GPU of this compute capability can run, or the `wanted` one.
    ///
    /// A cubin runs on its own major version from its minor version on. PTX runs on every newer architecture. Code for an "a" or "f"
    /// architecture is used on exactly that one, and only as a cubin: the compiler in driver 580 miscompiles large kernels from its PTX
    /// (docs/internals/performance/toolchain.md).
    pub fn newest(modules: &'a [Module], (major, minor): (u32, u32), wanted: Option<&str>) -> Option<Self> {
        let runs = |module: &&Module| {
            Architecture::of(module).is_some_and(|arch| {
                if arch.exact {
                    (arch.major, arch.minor) == (major, minor) && module.cubin.is_some()
                } else {
                    (arch.major, arch.minor) <= (major, minor)
                }
            })
        };
        let chosen = |module: &&Module| wanted.is_none_or(|arch| module.arch == arch);
        let module = modules.iter().filter(runs).filter(chosen).max_by_key(|module| Architecture::of(module))?;
        Some(match module.cubin {
            Some(cubin) if Architecture::of(module).is_some_and(|arch| arch.major == major) => {
                Self::Cubin(module, cubin)
            }
            _ => Self::Ptx(module),
        })
    }

    /// Returns the module made for exactly this compute capability, whether or not the GPU can run it as built.
    pub fn made_for(modules: &'a [Module], (major, minor): (u32, u32)) -> Option<&'a Module> {
        modules.iter().find(|module| {
            Architecture::of(module).is_some_and(|arch| arch.exact && (arch.major, arch.minor) == (major, minor))
        })
    }

    /// Returns the module.
    pub fn module(&self) -> &'a Module {
        let (Self::Cubin(module, _) | Self::Ptx(module)) = *self;
        module
    }

    /// Returns the bytes to load.
    pub fn image(&self) -> &'a [u8] {
        match *self {
            Self::Cubin(_, cubin) => cubin,
            Self::Ptx(module) => module.ptx.as_bytes(),
        }
    }
}

/// `sm_90a`: 9, 0, exact.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Architecture {
    major: u32,
    minor: u32,
    exact: bool,
}

impl Architecture {
    fn of(module: &Module) -> Option<Self> {
        let digits = module.arch.strip_prefix("sm_")?;
        let (digits, exact) = digits.strip_suffix(['a', 'f']).map_or((digits, false), |digits| (digits, true));
        let number: u32 = digits.parse().ok()?;
        Some(Self { major: number / 10, minor: number % 10, exact })
    }
}
