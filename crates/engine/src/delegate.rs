//! Methods of [`Engine`](crate::Engine) that an engine around another one leaves to it.

/// Defines all methods except those that launch work, in terms of `self.engine`. Methods that copy or wait call `self.before()` first.
macro_rules! delegate_to_engine {
    () => {
        delegate_to_engine! {
            allocate(&mut self, plan: &$crate::plan::Plan) -> ();
            write(&mut self, to: $crate::tensor::Tensor, values: &[f32]) -> ();
            read(&mut self, from: $crate::tensor::Tensor) -> Vec<f32>;
            read_bytes(&mut self, from: $crate::tensor::Tensor, to: &mut [u8]) -> ();
            write_bytes(&mut self, to: $crate::tensor::Tensor, bytes: &[u8]) -> ();
            read_async(&mut self, from: $crate::tensor::Tensor) -> $crate::PendingRead;
            wait(&mut self, read: $crate::PendingRead) -> $crate::ReadResult;
            load_batch(&mut self, to: $crate::tensor::Tensor, layout: $crate::BatchLayout, words: $crate::HostBuffer)
                -> Option<$crate::HostBuffer>;
            digest(&mut self, tensor: $crate::tensor::Tensor, first: u64) -> u64;
            tune(&mut self, retune: bool, pass: &mut dyn FnMut(&mut dyn $crate::Engine) -> $crate::Result<()>)
                -> $crate::Tuning;
            start_profile(&mut self) -> ();
            profile(&mut self) -> Vec<$crate::Interval>;
            wait_for_event(&mut self, event: &cuda_driver::Event) -> ();
            --
            describe(&self) -> String;
            dtype(&self) -> $crate::tensor::DType;
            fp8_dtype(&self) -> Option<$crate::tensor::DType>;
            free_memory(&self) -> $crate::Result<usize>;
            free_host_memory(&self) -> Option<usize>;
            reserved_memory(&self, communicators: usize) -> usize;
            peak(&self) -> Option<$crate::Peak>;
            gelu_fusion(&self) -> $crate::GeluFusion;
            fuses_column_sums(&self, c: usize) -> bool;
            decode_step_memory(&self, shape: &$crate::ops::DecodeStepShape) -> [usize; 2];
            check(&self, workload: &$crate::Workload) -> $crate::Result<()>;
            host_buffer(&self, len: usize) -> $crate::Result<$crate::HostBuffer>;
            algorithms(&self) -> Option<$crate::Algorithms>;
            emulated(&self) -> Option<Box<dyn $crate::Engine>>;
        }

        fn plan(&mut self, plan: &mut $crate::plan::Plan, workload: &$crate::Workload) {
            self.engine.plan(plan, workload);
        }

        fn adopt_algorithms(&mut self, algorithms: &$crate::Algorithms) -> bool {
            self.engine.adopt_algorithms(algorithms)
        }

        fn device_tensor(&self, tensor: $crate::tensor::Tensor) -> $crate::Result<Option<$crate::DeviceTensor<'_>>> {
            self.engine.device_tensor(tensor)
        }
    };
    ($($name:ident(&mut self $(, $argument:ident: $type:ty)*) -> $result:ty;)* --
     $($shared:ident(&self $(, $shared_argument:ident: $shared_type:ty)*) -> $shared_result:ty;)*) => {
        $(fn $name(&mut self $(, $argument: $type)*) -> $crate::Result<$result> {
            self.before()?;
            self.engine.$name($($argument),*)
        })*
        $(fn $shared(&self $(, $shared_argument: $shared_type)*) -> $shared_result {
            self.engine.$shared($($shared_argument),*)
        })*
    };
}
