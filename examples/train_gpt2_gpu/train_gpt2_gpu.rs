//! Trains GPT-2 on an NVIDIA GPU in fp32: this file and the kernels in `kernels/src/lib.rs`. GEMMs are cuBLASLt's.
//!
//! ```text
//! cargo run --release -p train_gpt2_gpu -- [-b B] [-t T] [MODEL TRAIN VAL]       continue from a model file, on token files
//! cargo run --release -p train_gpt2_gpu -- test MODEL STATE [LOSSES]              compare with a reference
//! ```
//!
//! It is the counterpart of llm.c's `train_gpt2_fp32.cu` and reads the same files: a model (`gpt2_124M.bin`), a tokenizer
//! (`gpt2_tokenizer.bin`), token files, and the debug state of `test`. Without file arguments it reads them where llm.c has them. The
//! defaults are llm.c's: B = 4, T = 1024. Training uses TF32 tensor cores, `test` does not. `examples/train_gpt2` is the same program
//! for a CPU.
//!
//! Letters in shapes: B sequences, T tokens of a sequence, C channels, NH heads of HS = C / NH channels, L layers, V tokens of the
//! vocabulary, Vp padded V. Every tensor is a row-major array: in (B, T, C), c varies fastest.
//!
//! The model is `forward`, `loss`, `backward` and `update`. Each operation that they call is a function that launches kernels and GEMMs.
//! The loop, `train`, is at the end.
//!
//! Invariants:
//! - All device memory is one block, allocated before the first step and initially zero.
//! - All work runs on one stream, in order. The host waits only where it reads results.
//! - A tensor `dx` is the derivative of the mean loss with respect to `x`. Gradients of parameters are added (`+=`) to what is there, because a
//!   parameter may be used twice, as wte is. Gradients of activations are overwritten, except for that of the residual stream.
//! - Sums have a fixed order, so the same program, GPU and libraries compute the same bits.
//!
//! The operations reach the GPU through the trait `Device`. Tests implement it with the emulator of `cuda_std` and a GEMM on the CPU.

use cublaslt::{GemmOperands, Handle, Matmuls, StridedBatch};
use cuda_builder::ModuleChoice;
use cuda_driver::{DeviceMemory, Function, Gpu, LaunchConfig, Module, Pod, Stream};
use cuda_std::launch::Launch;
use cuda_std::{Global, GlobalMut};
use gpu::matmul::gemm::{Batching, Gemm, GemmEpilogue, GemmLayout, GemmPrecision};
use std::collections::HashMap;
use std::io::Write;
use std::marker::PhantomData;
use std::time::Instant;
use std::{fmt, fs};
use train_gpt2_kernels as kernels;

/// Output of the build script: the compiled `MODULES`, or in `MODULES_MISSING` the reason why there are none.
mod compiled {
    include!(concat!(env!("OUT_DIR"), "/kernels.rs"));
}

pub type Result<T> = std::result::Result<T, String>;

/// Prints a line. Ends the program if nothing reads its output anymore. `println` would panic, but tests can capture its output.
macro_rules! say {
    ($($text:tt)*) => {
        if cfg!(test) {
            println!($($text)*);
        } else if writeln!(std::io::stdout(), $($text)*).is_err() {
            std::process::exit(1)
        }
    };
}

// ---------------------------------------------------------------------------------------------------------------------------------
// The device

/// `len` elements of device memory from `address` on. The address is a multiple of 256.
pub struct Tensor<T = f32> {
    pub address: u64,
    pub len: usize,
    element: PhantomData<T>,
}

impl<T> Clone for Tensor<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Tensor<T> {}

impl<T> Tensor<T> {
    /// Returns the view for a kernel that reads the tensor.
    fn read(self) -> Global<T> {
        Global::from_address(self.address)
    }

    /// Returns the view for a kernel that writes the tensor.
    fn write(self) -> GlobalMut<T> {
        GlobalMut::from_address(self.address)
    }

    /// Returns the `len` elements from element `start` on.
    fn part(self, start: usize, len: usize) -> Self {
        Self { address: self.address + (start * size_of::<T>()) as u64, len, ..self }
    }
}

/// Divides a block of memory into tensors, from the address `next` on.
struct Memory {
    next: u64,
}

impl Memory {
    fn tensor<T>(&mut self, len: usize) -> Tensor<T> {
        let tensor = Tensor { address: self.next, len, element: PhantomData };
        self.next += ((len * size_of::<T>()) as u64).next_multiple_of(256);
        tensor
    }
}

/// A GEMM: out (M, N) = op(a) op(b), in which `layout` states what is transposed in memory: Nt a (M, K) b (N, K), Nn a (M, K) b (K, N),
/// Tn a (K, M) b (K, N).
#[derive(Clone, Copy)]
pub struct GemmCall {
    pub layout: GemmLayout,
    /// M, N, K
    pub size: [usize; 3],
    pub a: Tensor,
    pub b: Tensor,
    pub out: Tensor,
    /// A bias (N) that is added to each row.
    pub bias: Option<Tensor>,
    /// Whether the GEMM is added to what is in `out`. Not together with a bias.
    pub accumulate: bool,
    /// The number of matrices, and the distances between them, multiples of [`cublaslt::BATCH_ALIGNMENT`].
    pub batch: Option<StridedBatch>,
}

/// A GPU, or the emulator. Work is queued and runs in order.
pub trait Device {
    /// Allocates `bytes` bytes of zeros and returns their address, a multiple of 256. They live as long as the device.
    fn allocate(&mut self, bytes: usize) -> Result<u64>;
    /// Runs a kernel with `grid` blocks. The tensors in its arguments must have the shapes that the kernel states.
    fn launch(&mut self, launch: &Launch, grid: [u32; 3]) -> Result<()>;
    /// Runs a GEMM. Its tensors must have the sizes that it states.
    fn gemm(&mut self, call: &GemmCall) -> Result<()>;
    /// Copies `from` to the start of `to`.
    fn upload<T: Pod>(&mut self, to: Tensor<T>, from: &[T]) -> Result<()>;
    /// Waits for all work and returns the elements of `from`.
    fn download(&mut self, from: Tensor) -> Result<Vec<f32>>;
    /// Fills a tensor with zeros.
    fn zero(&mut self, tensor: Tensor) -> Result<()>;
    /// Waits for all work.
    fn synchronize(&mut self) -> Result<()>;
}

fn text(error: impl fmt::Display) -> String {
    error.to_string()
}

struct Cuda {
    matmuls: Matmuls,
    precision: GemmPrecision,
    functions: HashMap<&'static str, Function>,
    stream: Stream,
    gpu: Gpu,
    memory: Vec<DeviceMemory>,
}

impl Cuda {
    /// Opens the first GPU and loads the kernels.
    fn open(precision: GemmPrecision) -> Result<Self> {
        let advice = |error| {
            format!("{error}\ntrain_gpt2_gpu needs an NVIDIA GPU; on a CPU, run `cargo run --release -p train_gpt2`")
        };
        let gpu = Gpu::open(0).map_err(text).map_err(advice)?;
        let (name, capability) = (&gpu.info().name, gpu.info().compute_capability);
        let choice = ModuleChoice::newest(compiled::MODULES, capability, None).ok_or_else(|| {
            let missing = compiled::MODULES_MISSING.unwrap_or("it needs compute capability 8.0 or later");
            format!("this program has no kernels for {name}: {missing}")
        })?;
        let module = Module::load(&gpu, "train_gpt2_kernels", choice.image()).map_err(text)?;
        let functions = choice.module().kernels.iter().map(|kernel| {
            let name: &'static str = &kernel.name;
            Ok((name, module.function(name).map_err(text)?))
        });
        let functions = functions.collect::<Result<_>>()?;
        let matmuls = Matmuls::new(Handle::new(&gpu).map_err(text)?).map_err(text)?;
        Ok(Self { matmuls, precision, functions, stream: Stream::new(&gpu).map_err(text)?, gpu, memory: Vec::new() })
    }
}

impl Device for Cuda {
    fn allocate(&mut self, bytes: usize) -> Result<u64> {
        let memory = DeviceMemory::new(&self.gpu, bytes).map_err(text)?;
        let address = memory.address();
        // SAFETY: the memory has this size and is not used yet.
        unsafe { self.stream.fill(address, 0, bytes) }.map_err(text)?;
        self.memory.push(memory);
        Ok(address)
    }

    fn launch(&mut self, launch: &Launch, grid: [u32; 3]) -> Result<()> {
        let function = self.functions.get(launch.name()).ok_or_else(|| format!("no kernel {}", launch.name()))?;
        let config = LaunchConfig { grid, block: launch.block(), shared_bytes: launch.shared_bytes() as u32 };
        // SAFETY: the functions are compiled from the crate that created the launch, so the arguments match. The operations pass tensors
        // of this device's memory with the shapes that the kernels state, and the memory lives as long as the device.
        let launched = launch.with_arguments(|arguments| unsafe { function.launch(&self.stream, &config, arguments) });
        launched.map_err(text)
    }

    fn gemm(&mut self, call: &GemmCall) -> Result<()> {
        let GemmCall { layout, size: [m, n, k], a, b, out, bias, accumulate, batch } = *call;
        let epilogue = match (bias, accumulate) {
            (Some(_), _) => GemmEpilogue::BIAS,
            (None, true) => GemmEpilogue::RESIDUAL,
            (None, false) => GemmEpilogue::NONE,
        };
        let batching = if batch.is_some() { Batching::Strided } else { Batching::One };
        let gemm = Gemm { m, n, k, layout, precision: self.precision, batching, epilogue };
        let bias = bias.map(|bias| bias.address);
        let operands =
            GemmOperands { a: a.address, b: b.address, out: out.address, bias, batch, ..GemmOperands::default() };
        // SAFETY: the operations pass tensors of this device's memory with these sizes, and outputs that overlap no operand. All work is
        // ordered by one stream.
        unsafe { self.matmuls.run(&self.stream, &gemm, &operands) }.map_err(text)
    }

    fn upload<T: Pod>(&mut self, to: Tensor<T>, from: &[T]) -> Result<()> {
        assert!(from.len() <= to.len);
        // SAFETY: the tensor is device memory of at least this size, and all work is ordered by the stream. The slice is not pinned, so
        // the driver has read it when the call returns.
        unsafe { self.stream.upload(to.address, from) }.map_err(text)
    }

    fn download(&mut self, from: Tensor) -> Result<Vec<f32>> {
        let mut values = vec![0.0; from.len];
        // SAFETY: the tensor has this length. The vector is not used before the stream has completed the copy.
        unsafe { self.stream.download(&mut values, from.address) }.map_err(text)?;
        self.synchronize()?;
        Ok(values)
    }

    fn zero(&mut self, tensor: Tensor) -> Result<()> {
        // SAFETY: the tensor is device memory, and all work is ordered by the stream.
        unsafe { self.stream.fill(tensor.address, 0, tensor.len * size_of::<f32>()) }.map_err(text)
    }

    fn synchronize(&mut self) -> Result<()> {
        self.stream.synchronize().map_err(text)
    }
}

// ---------------------------------------------------------------------------------------------------------------------------------
// The model: sizes, tensors, forward and backward pass, update

/// The sizes of a model, and of the batches that it reads.
#[derive(Clone, Copy)]
pub struct Sizes {
    b: usize,
    t: usize,
    c: usize,
    nh: usize,
    l: usize,
    v: usize,
    vp: usize,
    /// Maximum sequence length.
    max_t: usize,
}

impl Sizes {
    fn with_batch(self, b: usize, t: usize) -> Result<Self> {
        if b == 0 || t == 0 || t > self.max_t {
            let max_t = self.max_t;
            return Err(format!("batch: expected B of at least 1 and T from 1 to {max_t}, found B = {b}, T = {t}"));
        }
        // Kernels count positions, rows and groups of 4 channels in 32 bits.
        match b.checked_mul(t).and_then(|bt| bt.checked_mul(4 * self.c)) {
            Some(n) if n < 1 << 31 => Ok(Self { b, t, ..self }),
            _ => Err(format!("batch: expected B T 4 C below 2^31, found B = {b}, T = {t}, C = {}", self.c)),
        }
    }

    fn bt(self) -> usize {
        self.b * self.t
    }

    /// Returns the elements from the start of a head's matrix (T, HS) to that of the next.
    fn head_stride(self) -> usize {
        (self.t * (self.c / self.nh)).next_multiple_of(cublaslt::BATCH_ALIGNMENT)
    }

    /// Returns the elements from the start of a head's matrix (T, T) to that of the next.
    fn score_stride(self) -> usize {
        (self.t * self.t).next_multiple_of(cublaslt::BATCH_ALIGNMENT)
    }
}

/// Declares structs of tensors by their shapes.
macro_rules! tensors {
    ($($(#[$doc:meta])* $name:ident($sizes:ident: $pattern:pat) {
        $($(#[$tensor_doc:meta])* $tensor:ident: $shape:expr,)*
    })*) => {$(
        $(#[$doc])*
        struct $name {
            $($(#[$tensor_doc])* $tensor: Tensor,)*
        }

        impl $name {
            fn new(memory: &mut Memory, $sizes: Sizes) -> Self {
                let $pattern = $sizes;
                Self { $($tensor: memory.tensor($shape.iter().product()),)* }
            }

            /// Returns each tensor with its name, in the order of the declaration.
            #[allow(dead_code, reason = "not used for every struct")]
            fn tensors(&self) -> Vec<(&'static str, Tensor)> {
                vec![$((stringify!($tensor), self.$tensor),)*]
            }
        }
    )*};
}

tensors! {
    /// Embeddings and the last LayerNorm. `wte` is also the weight of the head.
    OuterParameters(s: Sizes { c, vp, max_t, .. }) {
        wte: [vp, c], wpe: [max_t, c],
        lnfw: [c], lnfb: [c],
    }

    LayerParameters(s: Sizes { c, .. }) {
        ln1w: [c], ln1b: [c],
        qkvw: [3 * c, c], qkvb: [3 * c],
        attprojw: [c, c], attprojb: [c],
        ln2w: [c], ln2b: [c],
        fcw: [4 * c, c], fcb: [4 * c],
        fcprojw: [c, 4 * c], fcprojb: [c],
    }

    /// The activations of a layer that its backward pass reads.
    LayerActivations(s: Sizes { b, t, c, nh, .. }) {
        ln1: [b, t, c],
        /// Mean and 1 / standard deviation.
        ln1_mean: [b, t], ln1_rstd: [b, t],
        /// Queries, keys and values: (3, B, NH, T, HS), with padding after each head.
        qkvr: [3, b, nh, s.head_stride()],
        /// The attention weights (B, NH, T, T), with padding after each head. Elements above the diagonal stay 0.
        att: [b, nh, s.score_stride()],
        atty: [b, t, c],
        /// The residual stream after attention.
        residual2: [b, t, c],
        ln2: [b, t, c], ln2_mean: [b, t], ln2_rstd: [b, t],
        fch: [b, t, 4 * c], fch_gelu: [b, t, 4 * c],
        /// The residual stream after the MLP.
        residual3: [b, t, c],
    }

    /// The activations before the first layer and after the last one.
    OuterActivations(s: Sizes { b, t, c, vp, .. }) {
        encoded: [b, t, c],
        lnf: [b, t, c], lnf_mean: [b, t], lnf_rstd: [b, t],
        /// The logits, which `loss` replaces by their gradient.
        logits: [b, t, vp],
        losses: [b, t],
    }

    /// Gradients of activations. Layers use the same memory one after another.
    ActivationGradients(s: Sizes { b, t, c, .. }) {
        /// Gradient of the residual stream, from the last layer to the first.
        residual: [b, t, c],
        /// Gradient of the output of a LayerNorm.
        ln: [b, t, c],
        qkv: [b, t, 3 * c], atty: [b, t, c],
        fch: [b, t, 4 * c], fch_gelu: [b, t, 4 * c],
    }

    /// Temporary data of operations.
    Scratch(s: Sizes { b, t, c, nh, .. }) {
        /// The output of the qkv GEMM.
        qkv: [b, t, 3 * c],
        /// The output of a projection before it is added to the residual stream.
        projection: [b, t, c],
        /// Attention scores before the softmax, and the gradient of attention weights.
        scores: [b, nh, s.score_stride()],
        /// Gradient of the scores. Elements above the diagonal stay 0.
        dscores: [b, nh, s.score_stride()],
        /// The output of attention or its gradient: (B, NH, T, HS), with padding after each head.
        heads: [b, nh, s.head_stride()],
        /// Gradient of `qkvr`.
        dqkvr: [3, b, nh, s.head_stride()],
        /// Sums over chunks of rows: those of a bias of up to 4 C elements, or of the weight and bias of a LayerNorm.
        partials: [(b * t).div_ceil(kernels::CHUNK), 4 * c],
    }
}

/// The parameters, or one number for each of them, such as the gradient.
struct Parameters {
    outer: OuterParameters,
    layers: Vec<LayerParameters>,
    /// All of them, with padding between tensors, which is 0.
    all: Tensor,
}

impl Parameters {
    fn new(memory: &mut Memory, s: Sizes) -> Self {
        let start = memory.next;
        let outer = OuterParameters::new(memory, s);
        let layers = (0..s.l).map(|_| LayerParameters::new(memory, s)).collect();
        let len = (memory.next - start) as usize / size_of::<f32>();
        Self { outer, layers, all: Tensor { address: start, len, element: PhantomData } }
    }

    /// Returns each parameter with its name, in the order of llm.c's files: all layers of one tensor together.
    fn tensors(&self) -> Vec<(&'static str, Tensor)> {
        let mut layers: Vec<_> = self.layers.iter().flat_map(|p| p.tensors().into_iter().enumerate()).collect();
        layers.sort_by_key(|(order, _)| *order);
        let mut tensors = self.outer.tensors();
        let last = tensors.split_off(2);
        tensors.into_iter().chain(layers.into_iter().map(|(_, tensor)| tensor)).chain(last).collect()
    }
}

/// The token ids of a batch.
struct Batch {
    /// (B, T)
    tokens: Tensor<u16>,
    /// (B, T): for each token the one that follows.
    targets: Tensor<u16>,
    /// Positions (B T) sorted by token, and the start of each distinct token's positions. See `kernels::wte_backward`.
    order: Tensor<u32>,
    starts: Tensor<u32>,
}

/// A model with the memory of a training step.
struct Gpt2 {
    sizes: Sizes,
    params: Parameters,
    grads: Parameters,
    m: Parameters,
    v: Parameters,
    layers: Vec<LayerActivations>,
    outer: OuterActivations,
    dacts: ActivationGradients,
    scratch: Scratch,
    batch: Batch,
}

/// The device, sizes and temporary memory of operations.
struct Context<'a, D> {
    device: &'a mut D,
    sizes: Sizes,
    scratch: &'a Scratch,
}

impl Gpt2 {
    /// Allocates memory and copies the parameters to it.
    fn new(device: &mut impl Device, file: &ModelFile, sizes: Sizes) -> Result<Self> {
        let mut memory = Memory { next: 0 };
        Self::plan(&mut memory, sizes);
        let bytes = memory.next as usize;
        let next = device.allocate(bytes).map_err(|error| format!("{error}; -b and -t set a smaller batch"))?;
        let gpt2 = Self::plan(&mut Memory { next }, sizes);
        let mut rest = &file.parameters[..];
        for (_, tensor) in gpt2.params.tensors() {
            device.upload(tensor, &take_floats(&file.path, &mut rest, tensor.len)?)?;
        }
        Ok(gpt2)
    }

    /// Divides memory into all tensors.
    fn plan(memory: &mut Memory, s: Sizes) -> Self {
        let (n, mut parameters) = (s.bt(), || Parameters::new(memory, s));
        let (params, grads, m, v) = (parameters(), parameters(), parameters(), parameters());
        Self {
            sizes: s,
            params,
            grads,
            m,
            v,
            layers: (0..s.l).map(|_| LayerActivations::new(memory, s)).collect(),
            outer: OuterActivations::new(memory, s),
            dacts: ActivationGradients::new(memory, s),
            scratch: Scratch::new(memory, s),
            batch: Batch {
                tokens: memory.tensor(n),
                targets: memory.tensor(n),
                order: memory.tensor(n),
                starts: memory.tensor(n + 1),
            },
        }
    }

    /// Computes the logits of the token that follows each of `tokens` (B, T).
    fn forward(&self, device: &mut impl Device, tokens: &[u16]) -> Result<()> {
        device.upload(self.batch.tokens, tokens)?;
        let Self { sizes, params, layers, outer: o, scratch, .. } = self;
        let cx = &mut Context { device, sizes: *sizes, scratch };
        encoder_forward(cx, o.encoded, self.batch.tokens, params.outer.wte, params.outer.wpe)?;
        let mut residual = o.encoded;
        for (p, a) in params.layers.iter().zip(layers) {
            layernorm_forward(cx, a.ln1, [a.ln1_mean, a.ln1_rstd], residual, p.ln1w, p.ln1b)?;
            matmul_forward(cx, scratch.qkv, a.ln1, p.qkvw, Some(p.qkvb))?;
            attention_forward(cx, a.atty, a.qkvr, a.att, scratch.qkv)?;
            matmul_forward(cx, scratch.projection, a.atty, p.attprojw, Some(p.attprojb))?;
            residual_forward(cx, a.residual2, residual, scratch.projection)?;
            layernorm_forward(cx, a.ln2, [a.ln2_mean, a.ln2_rstd], a.residual2, p.ln2w, p.ln2b)?;
            matmul_forward(cx, a.fch, a.ln2, p.fcw, Some(p.fcb))?;
            gelu_forward(cx, a.fch_gelu, a.fch)?;
            matmul_forward(cx, scratch.projection, a.fch_gelu, p.fcprojw, Some(p.fcprojb))?;
            residual_forward(cx, a.residual3, a.residual2, scratch.projection)?;
            residual = a.residual3;
        }
        layernorm_forward(cx, o.lnf, [o.lnf_mean, o.lnf_rstd], residual, params.outer.lnfw, params.outer.lnfb)?;
        matmul_forward(cx, o.logits, o.lnf, params.outer.wte, None)
    }

    /// Returns the mean loss of the last forward pass and replaces the logits by its gradient.
    fn loss(&self, device: &mut impl Device, targets: &[u16]) -> Result<f32> {
        device.upload(self.batch.targets, targets)?;
        let cx = &mut Context { device, sizes: self.sizes, scratch: &self.scratch };
        fused_classifier(cx, self.outer.logits, self.outer.losses, self.batch.targets)?;
        let losses = device.download(self.outer.losses)?;
        Ok((losses.iter().map(|&loss| f64::from(loss)).sum::<f64>() / losses.len() as f64) as f32)
    }

    /// Adds the gradients of the last loss, whose forward pass read `tokens`, to `grads`.
    fn backward(&self, device: &mut impl Device, tokens: &[u16]) -> Result<()> {
        let Self { sizes: s, params, grads, layers, outer: o, dacts: d, scratch, .. } = self;
        let cx = &mut Context { device, sizes: *s, scratch };
        matmul_backward(cx, d.ln, grads.outer.wte, None, o.logits, o.lnf, params.outer.wte)?;
        cx.device.zero(d.residual)?;
        let (dparams, stats) = ([grads.outer.lnfw, grads.outer.lnfb], [o.lnf_mean, o.lnf_rstd]);
        layernorm_backward(cx, d.residual, dparams, d.ln, layers[s.l - 1].residual3, params.outer.lnfw, stats)?;
        for i in (0..s.l).rev() {
            let (p, g, a) = (&params.layers[i], &grads.layers[i], &layers[i]);
            // d.residual is the gradient of residual3.
            matmul_backward(cx, d.fch_gelu, g.fcprojw, Some(g.fcprojb), d.residual, a.fch_gelu, p.fcprojw)?;
            gelu_backward(cx, d.fch, a.fch, d.fch_gelu)?;
            matmul_backward(cx, d.ln, g.fcw, Some(g.fcb), d.fch, a.ln2, p.fcw)?;
            let (dparams, stats) = ([g.ln2w, g.ln2b], [a.ln2_mean, a.ln2_rstd]);
            layernorm_backward(cx, d.residual, dparams, d.ln, a.residual2, p.ln2w, stats)?;
            // Now it is the gradient of residual2.
            matmul_backward(cx, d.atty, g.attprojw, Some(g.attprojb), d.residual, a.atty, p.attprojw)?;
            attention_backward(cx, d.qkv, d.atty, a.qkvr, a.att)?;
            matmul_backward(cx, d.ln, g.qkvw, Some(g.qkvb), d.qkv, a.ln1, p.qkvw)?;
            let residual = if i == 0 { o.encoded } else { layers[i - 1].residual3 };
            let (dparams, stats) = ([g.ln1w, g.ln1b], [a.ln1_mean, a.ln1_rstd]);
            layernorm_backward(cx, d.residual, dparams, d.ln, residual, p.ln1w, stats)?;
        }
        encoder_backward(cx, grads.outer.wte, grads.outer.wpe, d.residual, &self.batch, tokens)
    }

    fn zero_grad(&self, device: &mut impl Device) -> Result<()> {
        device.zero(self.grads.all)
    }

    /// Updates the parameters by their gradients. `step` counts from 1.
    fn update(&self, device: &mut impl Device, optimizer: &AdamW, step: i32) -> Result<()> {
        let &AdamW { learning_rate, beta1, beta2, eps, decay } = optimizer;
        let (correction1, correction2) = (1.0 - beta1.powi(step), 1.0 - beta2.powi(step));
        let settings = kernels::AdamW { learning_rate, beta1, beta2, correction1, correction2, eps, decay };
        let (p, g, m, v) = (self.params.all, self.grads.all, self.m.all, self.v.all);
        let launch = kernels::adamw(p.write(), g.read(), m.write(), v.write(), settings, p.len as u64);
        device.launch(&launch, threads(p.len.div_ceil(4)))
    }
}

/// The settings of AdamW. The formula is that of `kernels::adamw`.
struct AdamW {
    learning_rate: f32,
    beta1: f32,
    beta2: f32,
    eps: f32,
    decay: f32,
}

// ---------------------------------------------------------------------------------------------------------------------------------
// Operations. The formulas of kernels are in kernels/src/lib.rs.

/// Returns the grid of a kernel that needs `n` threads.
fn threads(n: usize) -> [u32; 3] {
    [n.div_ceil(kernels::THREADS) as u32, 1, 1]
}

/// Returns the grid of a kernel that computes one of `n` rows in each warp.
fn warps(n: usize) -> [u32; 3] {
    [n.div_ceil(kernels::WARPS) as u32, 1, 1]
}

fn encoder_forward(
    cx: &mut Context<impl Device>,
    out: Tensor,
    tokens: Tensor<u16>,
    wte: Tensor,
    wpe: Tensor,
) -> Result<()> {
    let Sizes { t, c, .. } = cx.sizes;
    let bt = cx.sizes.bt();
    let (out, tokens, wte, wpe) = (out.write(), tokens.read(), wte.read(), wpe.read());
    let launch = kernels::encoder_forward(out, tokens, wte, wpe, bt as u32, t as u32, c as u32);
    cx.device.launch(&launch, threads(bt * c.div_ceil(4)))
}

/// The host sorts the positions of the batch by token, so that the sum for each row of wte has a fixed order.
fn encoder_backward(
    cx: &mut Context<impl Device>,
    dwte: Tensor,
    dwpe: Tensor,
    dout: Tensor,
    batch: &Batch,
    tokens: &[u16],
) -> Result<()> {
    let Sizes { b, t, c, .. } = cx.sizes;
    let launch = kernels::wpe_backward(dwpe.write(), dout.read(), b as u32, t as u32, c as u32);
    cx.device.launch(&launch, threads((t * c).div_ceil(4)))?;
    let mut order: Vec<u32> = (0..tokens.len() as u32).collect();
    order.sort_by_key(|&position| tokens[position as usize]);
    let token = |i: usize| tokens[order[i] as usize];
    let mut starts: Vec<u32> =
        (0..order.len()).filter(|&i| i == 0 || token(i) != token(i - 1)).map(|i| i as u32).collect();
    let distinct = starts.len();
    starts.push(order.len() as u32);
    cx.device.upload(batch.order, &order)?;
    cx.device.upload(batch.starts, &starts)?;
    let (tokens, order, starts) = (batch.tokens.read(), batch.order.read(), batch.starts.read());
    let launch = kernels::wte_backward(dwte.write(), dout.read(), tokens, order, starts, c as u32);
    cx.device.launch(&launch, [distinct as u32, c.div_ceil(kernels::THREADS) as u32, 1])
}

/// `stats` are the mean and 1 / standard deviation of each row.
fn layernorm_forward(
    cx: &mut Context<impl Device>,
    out: Tensor,
    stats: [Tensor; 2],
    inp: Tensor,
    weight: Tensor,
    bias: Tensor,
) -> Result<()> {
    let (rows, [mean, rstd]) = (cx.sizes.bt(), stats.map(Tensor::write));
    let (inp, weight, bias, c) = (inp.read(), weight.read(), bias.read(), weight.len);
    let launch = kernels::layernorm_forward(out.write(), mean, rstd, inp, weight, bias, rows as u32, c as u32);
    cx.device.launch(&launch, warps(rows))
}

/// `dparams` are the gradients of weight and bias.
fn layernorm_backward(
    cx: &mut Context<impl Device>,
    dinp: Tensor,
    dparams: [Tensor; 2],
    dout: Tensor,
    inp: Tensor,
    weight: Tensor,
    stats: [Tensor; 2],
) -> Result<()> {
    let (rows, c, [mean, rstd]) = (cx.sizes.bt(), weight.len, stats.map(Tensor::read));
    let (dout, inp, partials) = (dout.read(), inp.read(), cx.scratch.partials);
    let (dinp, weight) = (dinp.write(), weight.read());
    let launch = kernels::layernorm_backward_input(dinp, dout, inp, weight, mean, rstd, rows as u32, c as u32);
    cx.device.launch(&launch, warps(rows))?;
    let chunks = rows.div_ceil(kernels::CHUNK);
    let launch = kernels::layernorm_backward_params(partials.write(), dout, inp, mean, rstd, rows as u32, c as u32);
    cx.device.launch(&launch, [c.div_ceil(kernels::COLUMNS) as u32, chunks as u32, 1])?;
    for (which, dparam) in dparams.into_iter().enumerate() {
        add_partials(cx, dparam, partials.part(which * chunks * c, chunks * c))?;
    }
    Ok(())
}

/// out (columns) += the sum of the rows of partials (chunks, columns)
fn add_partials(cx: &mut Context<impl Device>, out: Tensor, partials: Tensor) -> Result<()> {
    let (chunks, columns) = ((partials.len / out.len) as u32, out.len);
    let launch = kernels::add_partials(out.write(), partials.read(), chunks, columns as u32);
    cx.device.launch(&launch, threads(columns))
}

/// out (B T, OC) = inp (B T, C) weight^T + bias, with weight (OC, C)
fn matmul_forward(
    cx: &mut Context<impl Device>,
    out: Tensor,
    inp: Tensor,
    weight: Tensor,
    bias: Option<Tensor>,
) -> Result<()> {
    let bt = cx.sizes.bt();
    let size = [bt, out.len / bt, inp.len / bt];
    let (a, b) = (inp, weight);
    cx.device.gemm(&GemmCall { layout: GemmLayout::Nt, size, a, b, out, bias, accumulate: false, batch: None })
}

/// dinp = dout weight,  dweight += dout^T inp,  dbias += the sum of the rows of dout
fn matmul_backward(
    cx: &mut Context<impl Device>,
    dinp: Tensor,
    dweight: Tensor,
    dbias: Option<Tensor>,
    dout: Tensor,
    inp: Tensor,
    weight: Tensor,
) -> Result<()> {
    let bt = cx.sizes.bt();
    let (c, oc) = (inp.len / bt, dout.len / bt);
    let gemm = GemmCall {
        layout: GemmLayout::Nn,
        size: [bt, c, oc],
        a: dout,
        b: weight,
        out: dinp,
        bias: None,
        accumulate: false,
        batch: None,
    };
    cx.device.gemm(&gemm)?;
    let (layout, size) = (GemmLayout::Tn, [oc, c, bt]);
    cx.device.gemm(&GemmCall { layout, size, b: inp, out: dweight, accumulate: true, ..gemm })?;
    if let Some(dbias) = dbias {
        let chunks = bt.div_ceil(kernels::CHUNK);
        let partials = cx.scratch.partials.part(0, chunks * oc);
        let launch = kernels::column_sums(partials.write(), dout.read(), bt as u32, oc as u32);
        cx.device.launch(&launch, [oc.div_ceil(kernels::COLUMNS) as u32, chunks as u32, 1])?;
        add_partials(cx, dbias, partials)?;
    }
    Ok(())
}

/// out (B, NH, T, HS) = inp (B, T, C), or with `parts` = 3, out (3, B, NH, T, HS) = inp (B, T, 3 C)
fn permute(cx: &mut Context<impl Device>, out: Tensor, inp: Tensor, parts: usize) -> Result<()> {
    let (heads, grid) = heads(cx.sizes, parts);
    cx.device.launch(&kernels::permute(out.write(), inp.read(), heads), grid)
}

/// The inverse of `permute`.
fn unpermute(cx: &mut Context<impl Device>, out: Tensor, inp: Tensor, parts: usize) -> Result<()> {
    let (heads, grid) = heads(cx.sizes, parts);
    cx.device.launch(&kernels::unpermute(out.write(), inp.read(), heads), grid)
}

fn heads(s: Sizes, parts: usize) -> (kernels::Heads, [u32; 3]) {
    let (hs, stride) = (s.c / s.nh, s.head_stride() as u32);
    let (b, t, nh) = (s.b as u32, s.t as u32, s.nh as u32);
    let heads = kernels::Heads { b, t, parts: parts as u32, nh, hs: hs as u32, stride };
    (heads, threads(s.bt() * parts * s.nh * hs.div_ceil(4)))
}

/// Computes a GEMM for each head: out (T, T) = a (T, HS) b (T, HS)^T if the layout is Nt, otherwise out (T, HS) = op(a (T, T)) b (T, HS).
fn head_gemm(cx: &mut Context<impl Device>, layout: GemmLayout, out: Tensor, a: Tensor, b: Tensor) -> Result<()> {
    let s = cx.sizes;
    let (hs, head, score) = (s.c / s.nh, s.head_stride(), s.score_stride());
    let (size, a_stride, out_stride) =
        if layout == GemmLayout::Nt { ([s.t, s.t, hs], head, score) } else { ([s.t, hs, s.t], score, head) };
    let batch = Some(StridedBatch { count: s.b * s.nh, a: a_stride, b: head, out: out_stride });
    cx.device.gemm(&GemmCall { layout, size, a, b, out, bias: None, accumulate: false, batch })
}

/// Causal self-attention: position t reads the values of the positions t2 <= t of its sequence.
///
/// scores = q k^T,  att = softmax(scores / sqrt(HS)),  out = att v, for each head
fn attention_forward(cx: &mut Context<impl Device>, out: Tensor, qkvr: Tensor, att: Tensor, qkv: Tensor) -> Result<()> {
    let Scratch { scores, heads, .. } = *cx.scratch;
    permute(cx, qkvr, qkv, 3)?;
    let [q, k, v] = thirds(qkvr);
    head_gemm(cx, GemmLayout::Nt, scores, q, k)?;
    let (scale, rows, t, stride) = softmax_sizes(cx.sizes);
    let launch = kernels::softmax_forward(att.write(), scores.read(), scale, rows, t, stride);
    cx.device.launch(&launch, warps(rows as usize))?;
    head_gemm(cx, GemmLayout::Nn, heads, att, v)?;
    unpermute(cx, out, heads, 1)
}

/// datt = dout v^T,  dv = att^T dout,  dscores = the gradient of the softmax,  dq = dscores k,  dk = dscores^T q, for each head
fn attention_backward(
    cx: &mut Context<impl Device>,
    dqkv: Tensor,
    dout: Tensor,
    qkvr: Tensor,
    att: Tensor,
) -> Result<()> {
    let Scratch { scores: datt, dscores, heads, dqkvr, .. } = *cx.scratch;
    let ([q, k, v], [dq, dk, dv]) = (thirds(qkvr), thirds(dqkvr));
    permute(cx, heads, dout, 1)?;
    head_gemm(cx, GemmLayout::Nt, datt, heads, v)?;
    head_gemm(cx, GemmLayout::Tn, dv, att, heads)?;
    let (scale, rows, t, stride) = softmax_sizes(cx.sizes);
    let launch = kernels::softmax_backward(dscores.write(), datt.read(), att.read(), scale, rows, t, stride);
    cx.device.launch(&launch, warps(rows as usize))?;
    head_gemm(cx, GemmLayout::Nn, dq, dscores, k)?;
    head_gemm(cx, GemmLayout::Tn, dk, dscores, q)?;
    unpermute(cx, dqkv, dqkvr, 3)
}

/// Returns queries, keys and values.
fn thirds(qkvr: Tensor) -> [Tensor; 3] {
    let len = qkvr.len / 3;
    [0, 1, 2].map(|which| qkvr.part(which * len, len))
}

/// Returns 1 / sqrt(HS), the rows of all heads, T, and the distance of heads.
fn softmax_sizes(s: Sizes) -> (f32, u32, u32, u32) {
    let scale = 1.0 / ((s.c / s.nh) as f32).sqrt();
    (scale, (s.b * s.nh * s.t) as u32, s.t as u32, s.score_stride() as u32)
}

fn residual_forward(cx: &mut Context<impl Device>, out: Tensor, a: Tensor, b: Tensor) -> Result<()> {
    let launch = kernels::residual_forward(out.write(), a.read(), b.read(), out.len as u64);
    cx.device.launch(&launch, threads(out.len.div_ceil(4)))
}

fn gelu_forward(cx: &mut Context<impl Device>, out: Tensor, inp: Tensor) -> Result<()> {
    let launch = kernels::gelu_forward(out.write(), inp.read(), out.len as u64);
    cx.device.launch(&launch, threads(out.len.div_ceil(4)))
}

fn gelu_backward(cx: &mut Context<impl Device>, dinp: Tensor, inp: Tensor, dout: Tensor) -> Result<()> {
    let launch = kernels::gelu_backward(dinp.write(), inp.read(), dout.read(), dinp.len as u64);
    cx.device.launch(&launch, threads(dinp.len.div_ceil(4)))
}

/// losses = -ln(softmax(logits)[target]); logits = the gradient of their mean
fn fused_classifier(cx: &mut Context<impl Device>, logits: Tensor, losses: Tensor, targets: Tensor<u16>) -> Result<()> {
    let Sizes { v, vp, .. } = cx.sizes;
    let launch = kernels::classifier(logits.write(), losses.write(), targets.read(), v as u32, vp as u32);
    cx.device.launch(&launch, [cx.sizes.bt() as u32, 1, 1])
}

// ---------------------------------------------------------------------------------------------------------------------------------
// Files: little-endian, with a header of 256 integers of 32 bits

/// Explains how to get a file that does not exist.
const MODEL_SOURCE: &str = "llm.c's starter pack contains it (dev/download_starter_pack.sh), or convert a model: \
    llm-rs export --format llmc --dtype fp32 MODEL gpt2_124M.bin";
const TOKENS_SOURCE: &str = "llm.c's starter pack contains it (dev/download_starter_pack.sh), or make token files: \
    llm-rs data tinyshakespeare";
const STATE_SOURCE: &str = "llm.c's starter pack contains it (dev/download_starter_pack.sh)";

/// Reads a file whose header begins with `magic` and one of the `versions`. Returns the header, and the bytes after it.
fn read_file(path: &str, magic: u32, versions: &[u32], source: &str) -> Result<(Vec<u32>, Vec<u8>)> {
    let mut bytes = fs::read(path).map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => format!("{path}: {error}; {source}"),
        _ => format!("{path}: {error}"),
    })?;
    if bytes.len() < 1024 {
        return Err(format!("{path}: expected a header of 1024 bytes, found a file of {} bytes", bytes.len()));
    }
    let body = bytes.split_off(1024);
    let header: Vec<u32> = words(&bytes).collect();
    if header[0] != magic || !versions.contains(&header[1]) {
        let found = format!("{} and {}", header[0], header[1]);
        return Err(format!("{path}: expected magic number {magic} and version {versions:?}, found {found}"));
    }
    Ok((header, body))
}

fn words(bytes: &[u8]) -> impl Iterator<Item = u32> {
    bytes.chunks_exact(4).map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]]))
}

/// Takes the next `n` numbers from the bytes of a file.
fn take_floats(path: &str, bytes: &mut &[u8], n: usize) -> Result<Vec<f32>> {
    let Some((taken, rest)) = bytes.split_at_checked(n * 4) else {
        return Err(format!("{path}: expected {} more bytes, found {}; the file is incomplete", n * 4, bytes.len()));
    };
    *bytes = rest;
    Ok(words(taken).map(f32::from_bits).collect())
}

/// A model file in fp32, without its header.
struct ModelFile {
    path: String,
    /// The sizes of the model, with a batch of one token.
    sizes: Sizes,
    parameters: Vec<u8>,
}

impl ModelFile {
    fn read(path: &str) -> Result<Self> {
        let (header, parameters) = read_file(path, 20_240_326, &[3], MODEL_SOURCE)?;
        let [max_t, v, l, nh, c, vp] = std::array::from_fn(|i| header[2 + i] as usize);
        if [max_t, v, l, nh, c].contains(&0) || c % nh != 0 || v > vp || v > 1 << 16 {
            return Err(format!("{path}: expected the sizes of a GPT-2, found {:?}", &header[2..8]));
        }
        let wide = c as u128;
        let count = wide * (vp + max_t + 2) as u128 + l as u128 * (12 * wide * wide + 13 * wide);
        if count * 4 != parameters.len() as u128 {
            return Err(format!("{path}: expected {} bytes of parameters, found {}", count * 4, parameters.len()));
        }
        Ok(Self { path: path.to_owned(), sizes: Sizes { b: 1, t: 1, c, nh, l, v, vp, max_t }, parameters })
    }
}

/// Reads batches one after another from the start of the data, and begins again at its end.
struct DataLoader {
    tokens: Vec<u16>,
    batch: usize,
    position: usize,
}

impl DataLoader {
    fn open(path: &str, s: Sizes) -> Result<Self> {
        let (header, body) = read_file(path, 20_240_520, &[1], TOKENS_SOURCE)?;
        if header[2] as usize * 2 != body.len() {
            return Err(format!("{path}: expected {} tokens, found {} bytes", header[2], body.len()));
        }
        let tokens: Vec<u16> = body.chunks(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]])).collect();
        if let Some(token) = tokens.iter().find(|&&token| usize::from(token) >= s.v) {
            return Err(format!("{path}: expected tokens below {}, found {token}", s.v));
        }
        let batch = s.bt();
        if tokens.len() <= batch {
            let found = tokens.len();
            return Err(format!("{path}: expected more than B T = {batch} tokens, found {found}; reduce -b or -t"));
        }
        Ok(Self { tokens, batch, position: 0 })
    }

    fn num_batches(&self) -> usize {
        (self.tokens.len() - 1) / self.batch
    }

    /// Returns the next batch (B, T), and its targets: for each token the one that follows.
    fn next_batch(&mut self) -> (&[u16], &[u16]) {
        let start = if self.position + self.batch < self.tokens.len() { self.position } else { 0 };
        self.position = start + self.batch;
        (&self.tokens[start..self.position], &self.tokens[start + 1..=self.position])
    }
}

struct Tokenizer {
    tokens: Vec<Vec<u8>>,
    end_of_text: u16,
}

impl Tokenizer {
    fn read(path: &str) -> Result<Self> {
        let (header, body) = read_file(path, 20_240_328, &[1, 2], "llm.c's starter pack contains it")?;
        let mut rest = &body[..];
        let mut tokens = Vec::new();
        for i in 0..header[2] {
            let token = rest.split_first().and_then(|(&n, bytes)| bytes.split_at_checked(n as usize));
            let (token, bytes) = token.ok_or(format!("{path}: expected {} tokens, found {i}", header[2]))?;
            tokens.push(token.to_vec());
            rest = bytes;
        }
        Ok(Self { tokens, end_of_text: if header[1] == 1 { 50_256 } else { header[3] as u16 } })
    }

    /// Returns the text of a token, which is empty for control characters.
    fn decode(&self, token: u16) -> String {
        match self.tokens.get(token as usize).map_or(&[][..], |bytes| &bytes[..]) {
            &[byte] if byte.is_ascii_control() && !byte.is_ascii_whitespace() => String::new(),
            bytes => String::from_utf8_lossy(bytes).into_owned(),
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------------------
// Sampling

struct Rng(u64); // xorshift64*, as in llm.c

impl Rng {
    /// Returns a number in [0, 1).
    fn uniform(&mut self) -> f32 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        let bits = (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 32) as u32;
        (bits >> 8) as f32 / 16_777_216.0
    }
}

/// Returns the index that `coin`, in [0, 1), selects from softmax(logits).
fn sample_softmax(logits: &[f32], coin: f32) -> usize {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let power = |logit: &f32| f64::from(logit - max).exp();
    let coin = f64::from(coin) * logits.iter().map(power).sum::<f64>();
    let mut sum = 0.0;
    let mut sums = logits.iter().map(|logit| {
        sum += power(logit);
        sum
    });
    sums.position(|sum| coin < sum).unwrap_or(logits.len() - 1)
}

// ---------------------------------------------------------------------------------------------------------------------------------
// Training

/// The files of a training run.
pub struct Files {
    pub model: String,
    pub train: String,
    pub val: String,
}

/// The settings of llm.c's fp32 program.
const LEARNING_RATE: f32 = 3e-4;
const VAL_LOSS_EVERY: usize = 20;
const VAL_MAX_STEPS: usize = 20;
const SAMPLE_EVERY: usize = 20;
const GEN_T: usize = 64;

/// Prints a row of a table of settings, or a line between rows.
fn print_row(row: Option<(&str, &dyn fmt::Display)>) {
    match row {
        Some((name, value)) => say!("| {name:<21} | {:<50} |", value.to_string()),
        None => say!("+-----------------------+----------------------------------------------------+"),
    }
}

fn print_rows(rows: &[(&str, &dyn fmt::Display)]) {
    for &row in rows {
        print_row(Some(row));
    }
    print_row(None);
}

/// A model with its data.
struct Run {
    model: Gpt2,
    train: DataLoader,
    val: DataLoader,
    tokenizer: Option<Tokenizer>,
    rng: Rng,
}

/// Trains for one epoch. `open` returns the device with a description of it, after the files are read.
pub fn train<D: Device>(files: &Files, b: usize, t: usize, open: impl FnOnce() -> Result<(D, String)>) -> Result<()> {
    let file = ModelFile::read(&files.model)?;
    let sizes = file.sizes.with_batch(b, t).map_err(|error| format!("{error}; set them with -b and -t"))?;
    let (train, val) = (DataLoader::open(&files.train, sizes)?, DataLoader::open(&files.val, sizes)?);
    let (mut device, description) = open()?;
    print_row(None);
    print_row(Some(("Parameter", &"Value")));
    print_row(None);
    print_rows(&[
        ("train data pattern", &files.train),
        ("val data pattern", &files.val),
        ("batch size B", &b),
        ("sequence length T", &t),
        ("learning rate", &LEARNING_RATE),
        ("val_loss_every", &VAL_LOSS_EVERY),
        ("val_max_steps", &VAL_MAX_STEPS),
        ("sample_every", &SAMPLE_EVERY),
        ("genT", &GEN_T),
    ]);
    print_rows(&[("device", &description)]);
    let Sizes { max_t, v, vp, l, nh, c, .. } = sizes;
    print_rows(&[
        ("max_sequence_length T", &max_t),
        ("vocab_size V", &v),
        ("padded_vocab_size Vp", &vp),
        ("num_layers L", &l),
        ("num_heads NH", &nh),
        ("channels C", &c),
        ("num_parameters", &(file.parameters.len() / size_of::<f32>())),
    ]);
    print_rows(&[
        ("train_num_batches", &train.num_batches()),
        ("val_num_batches", &val.num_batches().min(VAL_MAX_STEPS)),
    ]);
    let tokenizer = Tokenizer::read("gpt2_tokenizer.bin");
    let tokenizer = tokenizer.map_err(|error| eprintln!("{error}; samples are token numbers")).ok();
    let mut memory = Memory { next: 0 };
    Gpt2::plan(&mut memory, sizes);
    say!("allocating {} MiB of device memory", memory.next >> 20);
    let model = Gpt2::new(&mut device, &file, sizes)?;
    drop(file);
    Run { model, train, val, tokenizer, rng: Rng(1337) }.train(&mut device)
}

impl Run {
    fn train(mut self, device: &mut impl Device) -> Result<()> {
        let optimizer = AdamW { learning_rate: LEARNING_RATE, beta1: 0.9, beta2: 0.999, eps: 1e-8, decay: 0.0 };
        let (steps, mut seconds) = (self.train.num_batches(), 0.0);
        for step in 0..=steps {
            let last = step == steps;
            if step % VAL_LOSS_EVERY == 0 || last {
                say!("val loss {:.6}", self.validate(device)?);
            }
            if (step > 0 && step % SAMPLE_EVERY == 0) || last {
                self.generate(device)?;
            }
            if last {
                break;
            }
            let start = Instant::now();
            let (tokens, targets) = self.train.next_batch();
            self.model.forward(device, tokens)?;
            let loss = self.model.loss(device, targets)?;
            self.model.zero_grad(device)?;
            self.model.backward(device, tokens)?;
            self.model.update(device, &optimizer, step as i32 + 1)?;
            device.synchronize()?;
            let time = start.elapsed().as_secs_f64();
            seconds += time;
            let rate = (self.model.sizes.bt() as f64 / time) as u64;
            say!("step {:4}/{steps}: train loss {loss:.6} ({:.6} ms, {rate} tok/s)", step + 1, time * 1e3);
        }
        say!("total average iteration time: {:.6} ms", seconds / steps as f64 * 1e3);
        Ok(())
    }

    /// Returns the mean loss of the first batches of the validation data.
    fn validate(&mut self, device: &mut impl Device) -> Result<f32> {
        self.val.position = 0;
        let batches = self.val.num_batches().min(VAL_MAX_STEPS);
        let mut sum = 0.0;
        for _ in 0..batches {
            let (tokens, targets) = self.val.next_batch();
            self.model.forward(device, tokens)?;
            sum += self.model.loss(device, targets)?;
        }
        Ok(sum / batches as f32)
    }

    /// Prints a text by the model. It computes the whole batch for every token, without a KV cache, like llm.c.
    fn generate(&mut self, device: &mut impl Device) -> Result<()> {
        let Sizes { t, v, vp, .. } = self.model.sizes;
        let start = self.tokenizer.as_ref().map_or(v as u16 - 1, |tokenizer| tokenizer.end_of_text);
        let mut tokens = vec![start.min((v - 1) as u16); self.model.sizes.bt()];
        say!("generating:\n---");
        for position in 1..GEN_T.min(t) {
            self.model.forward(device, &tokens)?;
            let logits = device.download(self.model.outer.logits.part((position - 1) * vp, v))?;
            tokens[position] = sample_softmax(&logits, self.rng.uniform()) as u16;
            let text = match &self.tokenizer {
                Some(tokenizer) => tokenizer.decode(tokens[position]),
                None => format!("{} ", tokens[position]),
            };
            let mut out = std::io::stdout();
            let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
        }
        say!("\n---");
        Ok(())
    }
}

// ---------------------------------------------------------------------------------------------------------------------------------
// Comparison with a reference

/// Compares logits, loss and gradients with a reference in the format of llm.c's debug state: a header with B and T, tokens (B, T),
/// targets (B, T), logits (B, T, V), the loss, the gradients. Then compares AdamW steps with `losses`, a file with a loss in each line.
pub fn test<D: Device>(model: &str, state: &str, losses: Option<&str>, open: impl FnOnce() -> Result<D>) -> Result<()> {
    let file = ModelFile::read(model)?;
    let (header, body) = read_file(state, 20_240_327, &[2], STATE_SOURCE)?;
    let sizes = file.sizes.with_batch(header[2] as usize, header[3] as usize);
    let sizes = sizes.map_err(|error| format!("{state}: {error}"))?;
    let (Sizes { v, vp, .. }, bt) = (sizes, sizes.bt());
    let Some((ids, mut rest)) = body.split_at_checked(2 * bt * 4) else {
        return Err(format!("{state}: expected {} token numbers, found {} bytes", 2 * bt, body.len()));
    };
    if let Some(id) = words(ids).find(|&id| id as usize >= v) {
        return Err(format!("{state}: expected tokens below {v}, found {id}"));
    }
    let ids: Vec<u16> = words(ids).map(|id| id as u16).collect();
    let (tokens, targets) = ids.split_at(bt);
    let losses = match losses {
        Some(path) => fs::read_to_string(path).map_err(|error| format!("{path}: {error}"))?,
        None => LOSSES.to_owned(),
    };
    let mut next = |n: usize| take_floats(state, &mut rest, n);
    let mut okay = true;
    let mut compare = |name: &str, found: &[f32], expected: &[f32], tolerance: f32| {
        let largest = expected.iter().fold(0.0, |max: f32, x| max.max(x.abs()));
        let agrees = |(a, b): (&f32, &f32)| (a - b).abs() <= tolerance * largest;
        let wrong = found.iter().zip(expected).filter(|pair| !agrees(*pair)).count();
        let differences = found.iter().zip(expected).map(|(a, b)| (a - b).abs());
        let relative = differences.fold(0.0, f32::max) / largest;
        let verdict = if wrong == 0 { "OK" } else { "NOT OK" };
        say!("{verdict:6} {name:8} {wrong} of {} differ; largest difference {relative:.1e}", found.len());
        okay &= wrong == 0;
    };

    let device = &mut open()?;
    let gpt2 = Gpt2::new(device, &file, sizes)?;
    gpt2.forward(device, tokens)?;
    let logits = device.download(gpt2.outer.logits)?;
    let logits: Vec<f32> = logits.chunks(vp).flat_map(|row| &row[..v]).copied().collect();
    compare("logits", &logits, &next(bt * v)?, 1e-4);
    compare("loss", &[gpt2.loss(device, targets)?], &next(1)?, 1e-5);
    gpt2.backward(device, tokens)?;
    for (name, grad) in gpt2.grads.tensors() {
        compare(name, &device.download(grad)?, &next(grad.len)?, 1e-4);
    }
    let optimizer = AdamW { learning_rate: 1e-4, beta1: 0.9, beta2: 0.999, eps: 1e-8, decay: 0.01 };
    for (step, expected) in losses.split_whitespace().flat_map(str::parse).enumerate() {
        gpt2.forward(device, tokens)?;
        compare(&format!("step {step}"), &[gpt2.loss(device, targets)?], &[expected], 1e-5);
        gpt2.zero_grad(device)?;
        gpt2.backward(device, tokens)?;
        gpt2.update(device, &optimizer, step as i32 + 1)?;
    }
    say!("overall okay: {}", i32::from(okay));
    okay.then_some(()).ok_or(format!("{model} does not compute what {state} expects"))
}

/// The losses of GPT-2 124M on the batch of llm.c's debug state, computed by PyTorch.
const LOSSES: &str = "5.270007 4.059707 3.375123 2.800783 2.315382 1.849029 1.394656 0.999147 0.624080 0.376511";

/// Removes a flag and its value from the arguments. Returns the value, or `default` if the flag is absent.
fn take_flag(arguments: &mut Vec<String>, flag: &str, default: usize) -> Result<usize> {
    let Some(at) = arguments.iter().position(|argument| argument == flag) else { return Ok(default) };
    let found = arguments.drain(at..arguments.len().min(at + 2)).nth(1).unwrap_or_default();
    found.parse().map_err(|_| format!("{flag}: expected a number, found {found:?}"))
}

fn run(mut arguments: Vec<String>) -> Result<()> {
    let (b, t) = (take_flag(&mut arguments, "-b", 4)?, take_flag(&mut arguments, "-t", 1024)?);
    let data = "dev/data/tinyshakespeare/tiny_shakespeare";
    let defaults = ["gpt2_124M.bin".to_owned(), format!("{data}_train.bin"), format!("{data}_val.bin")];
    let [model, train_tokens, val] = match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["test", model, state, ref losses @ ..] if losses.len() < 2 => {
            return test(model, state, losses.first().copied(), || Cuda::open(GemmPrecision::F32));
        }
        [model, train, val] => [model, train, val].map(str::to_owned),
        [] => defaults,
        _ => return Err("expected [-b B] [-t T] [MODEL TRAIN VAL], or test MODEL STATE [LOSSES]".to_owned()),
    };
    train(&Files { model, train: train_tokens, val }, b, t, || {
        let cuda = Cuda::open(GemmPrecision::Tf32)?;
        let description = format!("{}, TF32 enabled", cuda.gpu.info().name);
        Ok((cuda, description))
    })
}

fn main() {
    if let Err(error) = run(std::env::args().skip(1).collect()) {
        eprintln!("error: {error}");
        std::process::exit(1);
    }
}
