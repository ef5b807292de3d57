//! The operations of training, and the two engines that carry them out.
//!
//! Operations take [`Tensor`] handles into the engine's one arena, which [`Engine::allocate`] makes from a [`Plan`].
//! "float" below is the engine's storage type: f32, or bf16 on CUDA. Statistics, losses and optimizer state are f32.
//! Weights are (OC, C) row-major as in llm.c. Parameter gradients accumulate (+=); activation gradients are overwritten,
//! except the residual stream's, to which `layernorm_backward` adds.
//!
//! An engine may run ahead of the caller: an operation returns once it is queued, and only [`Engine::read`] and
//! [`Engine::wait`] wait for results.

pub mod cpu;
pub mod cuda;
pub mod open;

use crate::plan::Plan;
use crate::tensor::{DType, Tensor};
use anyhow::ensure;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::ops::{DerefMut, Range};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Before what is compared with others is timed: none inherits the clock that the one before it has left.
pub const REST: Duration = Duration::from_millis(100);

pub type Result<T, E = anyhow::Error> = std::result::Result<T, E>;

/// Host memory that batches are put together in; page-locked where the engine copies from it while the host goes on.
pub type HostBuffer = Box<dyn DerefMut<Target = [i32]> + Send>;

/// Where the parts of a batch of `b` x `t` tokens lie, as i32 words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchLayout {
    pub b: usize,
    pub t: usize,
}

impl BatchLayout {
    const fn tokens(self) -> usize {
        self.b * self.t
    }

    /// Words of a whole batch.
    pub const fn words(self) -> usize {
        4 * self.tokens() + 1
    }

    /// (B, T): what the model reads.
    pub fn inputs(self) -> Range<usize> {
        0..self.tokens()
    }

    /// (B, T): what it should say next.
    pub fn targets(self) -> Range<usize> {
        self.tokens()..2 * self.tokens()
    }

    /// (B*T): positions of `inputs`, stably sorted by token: equal tokens form a run.
    pub fn order(self) -> Range<usize> {
        2 * self.tokens()..3 * self.tokens()
    }

    /// (B*T): the tokens of `inputs` in that order.
    pub fn sorted(self) -> Range<usize> {
        3 * self.tokens()..4 * self.tokens()
    }

    /// (1): what drives stochastic rounding in the backward pass, a u32.
    pub fn seed(self) -> Range<usize> {
        4 * self.tokens()..self.words()
    }

    /// Fills in `seed`.
    pub fn set_seed(self, words: &mut [i32], seed: u32) {
        words[self.seed()][0] = seed.cast_signed();
    }

    /// Fills in `order` and `sorted` from `inputs`.
    pub fn sort(self, words: &mut [i32]) {
        let (inputs, rest) = words.split_at_mut(self.tokens());
        let (order, rest) = rest[self.tokens()..].split_at_mut(self.tokens());
        for (i, position) in order.iter_mut().enumerate() {
            *position = i as i32;
        }
        order.sort_by_key(|&i| inputs[i as usize]);
        for (token, &position) in rest.iter_mut().zip(&*order) {
            *token = inputs[position as usize];
        }
    }

    /// A part of the batch in the arena.
    pub fn tensor(self, batch: Tensor, part: Range<usize>) -> Tensor {
        batch.slice(part.start, part.len())
    }
}

/// What the GPU could do at best, for the model FLOPs utilisation.
#[derive(Clone, Debug)]
pub struct Peak {
    /// TFLOP/s in the engine's storage type on its matrix units.
    pub tflops: f64,
    /// Not from a table but from the number of multiprocessors and the clock.
    pub estimated: bool,
}

/// Which GELUs are part of a matrix product instead of passes of their own. As numbers, llm.c's.
///
/// A product applies GELU before it rounds, a pass after: in bf16 the results differ by a rounding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(into = "u8", try_from = "u8")]
pub enum GeluFusion {
    None,
    Forward,
    Both,
}

impl GeluFusion {
    pub const ALL: [Self; 3] = [Self::None, Self::Forward, Self::Both];
}

impl From<GeluFusion> for u8 {
    fn from(fusion: GeluFusion) -> Self {
        fusion as Self
    }
}

impl TryFrom<u8> for GeluFusion {
    type Error = &'static str;

    fn try_from(number: u8) -> Result<Self, Self::Error> {
        Self::ALL.get(usize::from(number)).copied().ok_or("expected 0, 1 or 2")
    }
}

/// What an engine needs to know of a run to plan memory of its own.
#[derive(Clone, Copy, Debug)]
pub struct Scope {
    pub b: usize,
    pub t: usize,
    pub channels: usize,
    pub heads: usize,
    pub padded_vocab: usize,
    /// Elements of the parameter block.
    pub parameters: usize,
    /// Tensors at most that a norm is taken over.
    pub parts: usize,
    /// Ranges at most that AdamW updates in a step.
    pub ranges: usize,
    pub training: bool,
}

/// Rows and columns of a linear layer: out (rows, oc) = inp (rows, c) · weight (oc, c)^T.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Linear {
    pub rows: usize,
    pub c: usize,
    pub oc: usize,
}

/// Shape of the attention: qkv (b, t, 3, heads, head_size).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Heads {
    pub b: usize,
    pub t: usize,
    pub heads: usize,
    pub head_size: usize,
}

/// Settings of one AdamW update.
#[derive(Clone, Copy, Debug)]
pub struct AdamW {
    pub learning_rate: f32,
    pub beta1: f32,
    pub beta2: f32,
    pub eps: f32,
    /// Of the ranges that decay.
    pub weight_decay: f32,
    /// 1 for the first update.
    pub step: u32,
    /// Gradients are scaled by `clip / norm` where their norm exceeds `clip`.
    pub clip: f32,
    /// Drives stochastic rounding to bf16, together with each range's own.
    pub seed: u32,
}

/// Elements that AdamW treats alike.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UpdateRange {
    /// Of what is [`Optimized`].
    pub elements: Range<usize>,
    pub decayed: bool,
    /// Added to [`AdamW::seed`]: elements that are as far from their ranges' starts draw alike if these agree.
    pub seed: u32,
}

/// The optimizer's view of parameters; all of one length.
#[derive(Clone, Copy, Debug)]
pub struct Optimized {
    /// float
    pub params: Tensor,
    /// float
    pub grads: Tensor,
    /// f32, first moment
    pub m: Tensor,
    /// f32, second moment
    pub v: Tensor,
    /// f32 copy of the parameters the update is applied to; none where `params` is f32 already.
    pub master: Option<Tensor>,
}

impl Optimized {
    /// Fails unless the ranges ascend, do not overlap, lie in the tensors and begin where AdamW's kernel can.
    fn ensure_holds(&self, ranges: &[UpdateRange]) -> Result<()> {
        let mut end = 0;
        for Range { start, end: next } in ranges.iter().map(|range| range.elements.clone()) {
            ensure!(
                end <= start && start <= next && next <= self.params.len,
                "adamw: range {start}..{next} after {end}, of {} parameters: ranges must ascend and lie in them",
                self.params.len
            );
            let alignment = gpu::adamw::Range::ALIGNMENT;
            ensure!(
                start.is_multiple_of(alignment),
                "adamw: range {start}..{next} does not begin at a multiple of {alignment} elements"
            );
            end = next;
        }
        Ok(())
    }
}

/// What a linear layer makes of its sums (rows, oc). The tensors are of that shape and not `out`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// out = sum
    Sum,
    /// out = this + sum
    Residual(Tensor),
    /// this = sum, out = gelu(sum)
    Gelu(Tensor),
}

/// That a linear layer's inp (rows, c) is a GELU.
#[derive(Clone, Copy)]
pub struct GeluInput {
    /// What it is the GELU of (rows, c).
    pub pre_gelu: Tensor,
    /// Where inp is not kept: what made it and `pre_gelu`. It is written again, bit for bit, before it is read.
    pub again: Option<GeluForward>,
}

/// Operands of an [`Engine::matmul_forward`] that ends in GELU.
#[derive(Clone, Copy)]
pub struct GeluForward {
    pub inp: Tensor,
    pub weight: Tensor,
    pub bias: Option<Tensor>,
    pub shape: Linear,
}

/// What [`Engine::tune`] found.
#[derive(Clone, Debug, Default)]
pub struct Tuning {
    /// Of each product that was timed.
    pub timings: Vec<Timing>,
    pub seconds: f64,
    /// Why the next run will time them again.
    pub not_kept: Option<String>,
}

/// What was found for a product.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    pub library: cublaslt::Timing,
    /// The fastest Rust kernel, where there is one, and its milliseconds.
    pub kernel: Option<(KernelTiling, f32)>,
    /// Milliseconds of Rust kernels that do one after the other what that one does at once, where there are some.
    pub apart: Option<f32>,
}

impl Timing {
    /// The Rust kernel is faster, than the library by more than noise.
    pub fn kernel_wins(&self) -> bool {
        self.kernel.is_some_and(|(_, milliseconds)| {
            let is_apart_slower = self.apart.is_none_or(|apart| milliseconds < apart);
            milliseconds < self.library.best * cublaslt::MARGIN && is_apart_slower
        })
    }
}

/// A kernel or product in a profile. Seconds from the profile's start.
#[derive(Clone, Debug)]
pub struct Interval {
    pub name: String,
    pub begin: f64,
    pub end: f64,
}

/// How an engine computes matrix products, as [`Engine::tune`] decided.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Algorithms {
    /// GPU and versions that this is valid for.
    pub machine: String,
    pub choices: Vec<Choice>,
}

/// How a product is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Choice {
    #[serde(flatten)]
    pub library: cublaslt::Choice,
    /// The fastest Rust kernel, where there is one.
    #[serde(flatten)]
    pub kernel: Option<KernelTiling>,
    /// Whether that is faster than the library.
    #[serde(default)]
    pub kernel_wins: bool,
}

/// How a Rust kernel divides a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelTiling {
    /// Of a tile.
    #[serde(default = "KernelTiling::first_rows")]
    pub rows: u32,
    #[serde(rename = "kernel")]
    pub columns: u32,
    /// Parts of K, whose sums are added in their order.
    #[serde(default = "KernelTiling::whole")]
    pub splits: u32,
}

impl KernelTiling {
    /// Where only columns were kept.
    fn first_rows() -> u32 {
        128
    }

    fn whole() -> u32 {
        1
    }
}

impl fmt::Display for KernelTiling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} x {}", self.rows, self.columns)?;
        if self.splits > 1 { write!(f, ", {} parts", self.splits) } else { Ok(()) }
    }
}

/// A read under way, see [`Engine::read_later`].
#[derive(Debug)]
pub struct Ticket(pub u64);

/// What a read gave.
#[derive(Clone, Debug)]
pub struct Reading {
    pub values: Vec<f32>,
    /// When the engine had done everything queued before the read, on a clock of its own.
    pub at: Duration,
}

/// Names work that comes again and again, for [`Engine::repeat`]; each is another.
#[derive(Debug, PartialEq, Eq)]
pub struct Recurring(u64);

impl Recurring {
    pub fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

impl Default for Recurring {
    fn default() -> Self {
        Self::new()
    }
}

/// A tensor in the memory of a GPU.
pub struct OnDevice<'a> {
    /// What the engine queues its work on.
    pub stream: &'a cuda_driver::Stream,
    pub address: u64,
}

pub trait Engine {
    /// For the banner: `CPU, 2 threads` or `NVIDIA H200, sm_90a`.
    fn describe(&self) -> String;

    /// Storage type of parameters, gradients and activations.
    fn float(&self) -> DType;

    /// Memory that [`allocate`](Self::allocate) could take, in bytes.
    fn memory_free(&self) -> Result<usize>;

    /// `None` where MFU makes no sense (a CPU).
    fn peak(&self) -> Option<Peak>;

    fn gelu_fusion(&self) -> GeluFusion {
        GeluFusion::None
    }

    /// Where a tensor is, for who works on it beside the engine; `None` where that is no GPU.
    fn on_device(&self, _tensor: Tensor) -> Result<Option<OnDevice<'_>>> {
        Ok(None)
    }

    /// What is queued from here on comes after `event`, a mark in another stream of the same GPU.
    fn wait_for(&mut self, _event: &cuda_driver::Event) -> Result<()> {
        anyhow::bail!("{} has no stream that could wait for another", self.describe())
    }

    /// An engine that runs this one's kernels, with the same grids, in the emulator; `None` where there are no kernels.
    fn emulated(&self) -> Option<Box<dyn Engine>> {
        None
    }

    /// Decides, by timing, how to compute the matrix products that `pass` queues, where the engine has a choice. What is
    /// known of earlier runs on this machine is timed again only if `anew`. During the pass nothing is computed; afterwards
    /// the arena is zeroed.
    fn tune(&mut self, _anew: bool, _pass: &mut dyn FnMut(&mut dyn Engine) -> Result<()>) -> Result<Tuning> {
        Ok(Tuning::default())
    }

    /// From here on notes when each kernel and product begins and ends.
    fn start_profile(&mut self) -> Result<()> {
        anyhow::bail!("{} does not tell kernels apart: use --device cuda", self.describe())
    }

    /// What has been noted since; nothing is noted any more.
    fn profile(&mut self) -> Result<Vec<Interval>> {
        Ok(Vec::new())
    }

    /// Does `work`, which must be the same operations with the same tensors, shapes and numbers whenever it comes as
    /// `recurring`, and neither copy from or to the host nor wait. So an engine may record what it queues, and queue that
    /// in one piece later, without calling `work`. Recordings last until memory is allocated or products are tuned anew.
    ///
    /// Gives the reason, once, where the engine records but cannot record this: then it is queued like any other work.
    fn repeat(
        &mut self,
        recurring: &Recurring,
        work: &mut dyn FnMut(&mut dyn Engine) -> Result<()>,
    ) -> Result<Option<String>>;

    /// What was decided; `None` where there is no choice.
    fn algorithms(&self) -> Option<Algorithms> {
        None
    }

    /// Computes matrix products by these algorithms from now on, so that they give the same bits. False if they are of another
    /// machine; nothing changes then.
    fn adopt(&mut self, _algorithms: &Algorithms) -> bool {
        false
    }

    /// Adds the engine's own scratch buffers to the plan.
    fn plan(&mut self, plan: &mut Plan, scope: &Scope);

    /// Allocates the arena, zeroed. An earlier arena is dropped.
    fn allocate(&mut self, plan: &Plan) -> Result<()>;

    /// Copies values in, rounding to the tensor's type. `values.len() == to.len`.
    fn write(&mut self, to: Tensor, values: &[f32]) -> Result<()>;

    /// Copies values out, widened, once everything queued before has run.
    fn read(&mut self, from: Tensor) -> Result<Vec<f32>>;

    /// Copies a tensor out as it is stored, once everything queued before has run. `to` is of its size.
    fn read_bytes(&mut self, from: Tensor, to: &mut [u8]) -> Result<()>;

    /// Copies a tensor in as it is stored. `bytes` are of its size, and not page-locked: those would still be read afterwards.
    fn write_bytes(&mut self, to: Tensor, bytes: &[u8]) -> Result<()>;

    /// Copies raw 32-bit integers in.
    fn write_i32(&mut self, to: Tensor, values: &[i32]) -> Result<()>;

    /// Starts copying out an f32 tensor; the engine goes on.
    fn read_later(&mut self, from: Tensor) -> Result<Ticket>;

    /// Waits for a read.
    fn wait(&mut self, ticket: Ticket) -> Result<Reading>;

    /// A buffer of `len` words for [`load_batch`](Self::load_batch).
    fn host_buffer(&self, len: usize) -> Result<HostBuffer>;

    /// Starts copying a batch into `to` and keeps the buffer until it is done; gives back one that is, to be refilled.
    fn load_batch(&mut self, to: Tensor, layout: BatchLayout, words: HostBuffer) -> Result<Option<HostBuffer>>;

    fn zero(&mut self, tensor: Tensor) -> Result<()>;

    /// out (b, t, c) = wte[token] + wpe[position]; `batch` as [`BatchLayout`] has it.
    fn encoder_forward(
        &mut self,
        out: Tensor,
        batch: Tensor,
        layout: BatchLayout,
        wte: Tensor,
        wpe: Tensor,
        c: usize,
    ) -> Result<()>;

    /// dwte[token] += sum of dout over that token's positions, dwpe[position] += sum over b. Both summed in f32 in a fixed
    /// order and rounded stochastically by the batch's seed where float is bf16.
    fn encoder_backward(
        &mut self,
        dwte: Tensor,
        dwpe: Tensor,
        dout: Tensor,
        batch: Tensor,
        layout: BatchLayout,
        c: usize,
    ) -> Result<()>;

    /// out (rows, c) = (inp - mean) rstd weight + bias; mean, rstd (rows).
    fn layernorm_forward(&mut self, op: LayerNorm, inp: Tensor) -> Result<()>;

    /// Whether [`layernorm_backward`](Self::layernorm_backward) over `c` channels has the column sums of dinp for less than
    /// [`matmul_backward`](Self::matmul_backward), which would read it for them.
    fn norm_sums_columns(&self, c: usize) -> bool;

    /// dinp (rows, c) += gradient through the norm; dweight, dbias (c) +=; column_sums (c) += column sums of the new dinp, as
    /// the gradient of a bias that was added to inp.
    fn layernorm_backward(
        &mut self,
        dinp: Tensor,
        dweight: Tensor,
        dbias: Tensor,
        column_sums: Option<Tensor>,
        dout: Tensor,
        inp: Tensor,
        op: LayerNorm,
    ) -> Result<()>;

    /// The sum inp (rows, c) · weight (oc, c)^T + bias (oc), and what `ending` says, to out (rows, oc).
    fn matmul_forward(
        &mut self,
        out: Tensor,
        inp: Tensor,
        weight: Tensor,
        bias: Option<Tensor>,
        ending: Ending,
        shape: Linear,
    ) -> Result<()>;

    /// dinp (rows, c) = dout · weight, where `gelu` is given that of what went into GELU; dweight (oc, c), float or f32, +=
    /// dout^T · inp; dbias (oc) += column sums of dout.
    fn matmul_backward(
        &mut self,
        dinp: Tensor,
        dweight: Tensor,
        dbias: Option<Tensor>,
        dout: Tensor,
        inp: Tensor,
        weight: Tensor,
        gelu: Option<GeluInput>,
        shape: Linear,
    ) -> Result<()>;

    /// Causal attention: out (b, t, heads, head_size), lse (b, heads, t) for the backward.
    fn attention_forward(&mut self, out: Tensor, lse: Tensor, qkv: Tensor, shape: Heads) -> Result<()>;

    /// dqkv (b, t, 3, heads, head_size) overwritten.
    fn attention_backward(
        &mut self,
        dqkv: Tensor,
        dout: Tensor,
        qkv: Tensor,
        out: Tensor,
        lse: Tensor,
        shape: Heads,
    ) -> Result<()>;

    /// losses (rows) += cross-entropy of softmax(logits[.., ..v]) and targets; with `dloss`, logits (rows, vp) become
    /// their gradient times dloss (0 in the padding columns v..vp).
    fn classifier(
        &mut self,
        logits: Tensor,
        losses: Tensor,
        targets: Tensor,
        v: usize,
        vp: usize,
        dloss: Option<f32>,
    ) -> Result<()>;

    /// out (1) = sum of f32 values, in a fixed order.
    fn sum(&mut self, out: Tensor, values: Tensor) -> Result<()>;

    /// norm (1) = L2 norm of grads, in a fixed order.
    fn global_norm(&mut self, norm: Tensor, grads: Tensor) -> Result<()>;

    /// out (1) f32 = sum of the squares of all values, float, in a fixed order.
    fn squared_sum(&mut self, out: Tensor, values: &[Tensor]) -> Result<()>;

    /// out (1) = square root of value (1), f32.
    fn square_root(&mut self, out: Tensor, value: Tensor) -> Result<()>;

    /// One AdamW step on `ranges` of `of`, which ascend, do not overlap and begin at multiples of 8 elements. `stats` (2): sum of
    /// the losses, norm of all gradients; nothing changes unless both are finite.
    fn adamw(&mut self, of: Optimized, ranges: &[UpdateRange], stats: Tensor, settings: &AdamW) -> Result<()>;

    /// Copies a tensor to another of the same type and length, which it does not overlap.
    fn copy(&mut self, to: Tensor, from: Tensor) -> Result<()>;

    /// Copies values of one tensor to another, converting between float and f32.
    fn cast(&mut self, to: Tensor, from: Tensor) -> Result<()>;
}

/// The tensors of a LayerNorm: out (rows, c), mean and rstd (rows) f32, weight and bias (c).
#[derive(Clone, Copy, Debug)]
pub struct LayerNorm {
    pub out: Tensor,
    pub mean: Tensor,
    pub rstd: Tensor,
    pub weight: Tensor,
    pub bias: Tensor,
    pub c: usize,
}

#[cfg(test)]
mod tests {
    use super::*;
    use cublaslt::{Element, Epilogue, Problem};

    #[test]
    fn a_kernel_wins_where_nothing_else_is_faster() {
        let problem = Problem {
            m: 64,
            n: 32,
            k: 16,
            transpose_a: false,
            transpose_b: false,
            element: Element::Bf16,
            epilogue: Epilogue::DGeluAndGelu,
            accumulate: false,
            output: None,
        };
        let library = cublaslt::Timing { problem, candidates: 1, first: 2.0, best: 1.0 };
        let tiling = KernelTiling { rows: 128, columns: 192, splits: 1 };
        let wins = |milliseconds, apart| Timing { library, kernel: Some((tiling, milliseconds)), apart }.kernel_wins();
        assert!(wins(0.98, None) && !wins(0.995, None), "by more than noise");
        assert!(wins(0.8, Some(0.81)) && !wins(0.8, Some(0.79)));
        assert!(!Timing { library, kernel: None, apart: Some(3.0) }.kernel_wins());
    }
}
