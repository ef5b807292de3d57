//! Modules: loaded device code.

use crate::error::{Result, from_cust};
use crate::in_context::InContext;
use crate::{Error, Function, Gpu, beyond_cust};
use cust::error::CudaError;
use std::sync::Arc;

/// Loaded kernels. Clones share the module. It is unloaded with the last clone and the last [`Function`].
#[derive(Clone)]
pub struct Module(Arc<Inner>);

struct Inner {
    module: InContext<cust::module::Module>,
    name: String,
}

impl Module {
    /// Loads a cubin, a fatbinary, or PTX, which the driver compiles. Error messages use `name` for the module.
    pub fn load(gpu: &Gpu, name: &str, image: &[u8]) -> Result<Self> {
        let load = || {
            // The driver recognizes PTX, cubins and fatbinaries by their first bytes, so this loads each of them.
            cust::module::Module::from_cubin(image, &[])
                .map_err(|error| beyond_cust::jit::load_error(error, name, image))
        };
        Ok(Self(Arc::new(Inner { module: InContext::create(gpu, load)?, name: name.into() })))
    }

    /// Returns the GPU that the module is loaded on.
    pub fn gpu(&self) -> &Gpu {
        self.0.module.gpu()
    }

    /// Returns the kernel with the entry point `kernel`.
    pub fn function(&self, kernel: &str) -> Result<Function> {
        let absent = || Error::NoKernel { module: self.0.name.clone(), kernel: kernel.into() };
        if kernel.contains('\0') {
            return Err(absent());
        }
        let function = self.0.module.get_function(kernel).map_err(|error| match error {
            CudaError::NotFound => absent(),
            error => from_cust(error, format!("cuModuleGetFunction({kernel})")),
        })?;
        Function::new(function, kernel, self)
    }
}
