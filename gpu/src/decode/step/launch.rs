//! Host side: turns a list of operations into the table of a step, and returns the launch.
//!
//! 1. List the operations of a step in order, from the embedding to the head, with the operands of the separate kernels.
//! 2. Call [`program`] for each number of slots. If it returns an error, launch the separate kernels instead.
//! 3. Copy [`Program::table`] to device memory. Allocate [`Program::scratch`] words, the most of all programs, and set them to 0 once.
//! 4. Launch [`step`], then `sample_tokens`. Both may be captured in a CUDA graph, also several times.
//!
//! The table contains addresses: a program is invalid when weights or cache move.

use super::kernel::{self, Sizes};
use super::plan;
use super::table::{ATTENTION, EMBED, ENTRY, Field, INPUT, MATVEC, NONE};
use super::words;
use crate::activation::Activation;
use crate::decode::launch::{AttentionOperands, Fp8Weight, InputNorm, MAX_ROWS, MatvecOperands, MatvecSize};
use crate::decode::{attention, matvec};
use crate::launch::{KernelLaunch, shared_bytes};
use cuda_std::mma::TensorCore;
use cuda_std::{E4m3, Element, Global, GlobalMut, bf16};
use std::collections::{HashMap, HashSet};
use std::marker::PhantomData;

/// The operands of [`decode_embed`](crate::decode::embed::decode_embed).
#[derive(Clone, Copy)]
pub struct EmbedOperands<T> {
    /// (B, C)
    pub out: GlobalMut<T>,
    /// (Vp, C)
    pub wte: Global<T>,
    /// (max T, C) or null
    pub wpe: Global<T>,
    /// C
    pub channels: usize,
}

/// An operation of a step, with the operands of the kernel that computes it separately.
///
/// An input or residual is the output of the latest earlier operation that has the same address. If there is none, it is read from memory.
/// An output that a later operation reads is kept in scratch memory, and the memory at its address does not change. Other outputs, such as
/// the logits, are stored.
#[derive(Clone, Copy)]
pub enum Operation<T> {
    /// The embedding of the newest token of each slot.
    Embed(EmbedOperands<T>),
    /// Values (B, C) in memory and C, before the first operation that reads them. [`program`] adds it.
    Input(Global<T>, usize),
    /// A linear layer. The number of SMs of its size has no effect.
    Matvec(MatvecOperands<T>, MatvecSize),
    /// Attention over the cache. The slots and partial results of its operands, and the splits of its sizes, have no effect.
    Attention(AttentionOperands<T>, attention::Sizes),
}

/// A step: its table, and the sizes of its memory.
#[derive(Clone, Debug)]
pub struct Program<T> {
    /// The table, which the caller copies to device memory. It contains addresses of weights and cache.
    pub table: Vec<u64>,
    /// Words of scratch memory (u64).
    ///
    /// The caller sets scratch memory to 0 when it is allocated. Programs with the same number of blocks may share it, if their launches
    /// are ordered: a program needs its first `scratch` words. A launch that did not end leaves it invalid: it must be set to 0 again.
    pub scratch: usize,
    /// Blocks of the launch.
    pub blocks: usize,
    sizes: Sizes,
    group: usize,
    in_fp8: bool,
    element: PhantomData<T>,
}

/// The device memory of a step.
#[derive(Clone, Copy)]
pub struct StepMemory {
    /// [`Program::table`].
    pub table: Global<u64>,
    /// [`Program::scratch`] words.
    pub scratch: GlobalMut<u64>,
    /// (B, 8), as for the separate kernels.
    pub slots: Global<i32>,
}

/// Returns upper limits of the words of table and scratch memory of a step of `rows` slots: the outputs of its operations have `columns`
/// columns, and `attentions` of them are attention of [NH, KV, HS] heads.
pub fn memory<T: TensorCore>(
    rows: usize,
    columns: &[usize],
    attentions: usize,
    [heads, kv_heads, head_size]: [usize; 3],
    sm_count: usize,
) -> [usize; 2] {
    let mut scratch = words::HEADER;
    for columns in columns {
        take(&mut scratch, words::count::<T>(rows * columns));
    }
    let splits = (sm_count / (rows * kv_heads).max(1)).clamp(1, MAX_SPLITS);
    for _ in 0..attentions {
        take(&mut scratch, rows * heads * (head_size + 2) * splits);
    }
    // Values in memory that precede the operations may take the place of the embedding.
    [columns.len() * ENTRY, scratch]
}

/// Creates the program of a step of `rows` slots for a GPU with `sm_count` SMs.
///
/// # Errors
/// If the kernel does not support the operations, with the reason. The separate kernels then compute them: more than [`MAX_ROWS`] slots,
/// inputs that shared memory cannot hold, values in memory that an operation overwrites, rows of weights that are not multiples of 64 bytes,
/// weights in FP8 beside others, an odd number of output columns, or an unsupported head size.
pub fn program<T: TensorCore>(operations: &[Operation<T>], rows: usize, sm_count: usize) -> Result<Program<T>, String> {
    if !(1..=MAX_ROWS).contains(&rows) || sm_count == 0 || operations.is_empty() {
        return Err(format!("expected 1 to {MAX_ROWS} slots and an operation, found {rows} slots"));
    }
    let operations = with_inputs(operations);
    let mut values = Values::default();
    let shapes = operations.iter().map(|operation| shape(operation, rows)).collect::<Result<Vec<_>, _>>()?;
    for (operation, shape) in operations.iter().zip(&shapes) {
        values.add(operation, shape, rows)?;
    }
    let is_stored = |out: Global<T>| {
        let stored = operations.iter().zip(&values.all).filter(|(operation, value)| {
            !value.is_read
                && !matches!(operation, Operation::Input(..))
                && operation.values().0.pointer() == out.pointer()
        });
        stored.count() > 0
    };
    if operations.iter().any(|operation| matches!(operation, Operation::Input(view, _) if is_stored(*view))) {
        return Err("expected outputs in other memory than the inputs".to_owned());
    }
    let in_fp8 = operations.iter().any(|operation| operation.weight_in_fp8() == Some(true));
    if in_fp8 && operations.iter().any(|operation| operation.weight_in_fp8() == Some(false)) {
        return Err("expected the weights of all linear layers in FP8, or none".to_owned());
    }
    let group = if shapes.iter().any(|shape| shape.group > 1) { 4 } else { 1 };
    let mut scratch = words::HEADER;
    let places: Vec<_> = (values.all.iter())
        .map(
            |value| {
                if value.is_read { take(&mut scratch, words::count::<T>(rows * value.columns)) } else { NONE.into() }
            },
        )
        .collect();
    let mut table = vec![0; operations.len() * ENTRY];
    for (i, operation) in operations.iter().enumerate() {
        let mut entry = Entry(&mut table[i * ENTRY..(i + 1) * ENTRY]);
        let place = |value: Option<usize>| value.map_or(NONE.into(), |value| places[value]);
        entry.set(Field::OutWords, places[i]);
        entry.set(Field::Input, place(values.all[i].input));
        entry.set(Field::Residual, place(values.all[i].residual));
        let pairs = values.all[i].columns / 2;
        entry.set(Field::Share, (pairs / sm_count) as u64);
        entry.set(Field::Rest, (pairs % sm_count) as u64);
        match operation {
            Operation::Embed(operands) => entry.embed(operands)?,
            Operation::Input(view, columns) => {
                entry.set(Field::Kind, INPUT);
                entry.set(Field::Columns, *columns as u64);
                entry.view(Field::Weight, *view)?;
            }
            Operation::Matvec(operands, size) => entry.matvec(operands, size)?,
            Operation::Attention(operands, sizes) => {
                let tasks = rows * sizes.kv_heads as usize * shapes[i].group.div_ceil(group);
                let splits = (sm_count / tasks).clamp(1, MAX_SPLITS);
                let partials = rows * (sizes.heads * (sizes.head_size + 2)) as usize * splits;
                entry.set(Field::Partials, take(&mut scratch, if splits > 1 { partials } else { 0 }));
                entry.attention(operands, attention::Sizes { splits: splits as u32, ..*sizes })?;
            }
        }
    }
    let most = |of: fn(&Shape) -> usize| shapes.iter().map(of).max().unwrap_or(0) as u32;
    let sizes = Sizes {
        rows: rows as u32,
        operations: operations.len() as u32,
        stages: 0,
        channels: most(|shape| shape.channels),
        norm_channels: most(|shape| shape.norm_channels),
        head_size: most(|shape| shape.head_size),
    };
    let stages = (1..=kernel::MAX_STAGES / kernel::MIN_STAGES)
        .rev()
        .map(|n| n * kernel::MIN_STAGES)
        .find(|&stages| bytes::<T>(Sizes { stages, ..sizes }, group) <= MAX_SHARED)
        .ok_or_else(|| format!("shared memory cannot hold {rows} rows of {} channels", sizes.channels))?;
    let sizes = Sizes { stages, ..sizes };
    Ok(Program { table, scratch, blocks: sm_count, sizes, group, in_fp8, element: PhantomData })
}

/// Returns the launch of a step. All blocks must be resident at the same time: one block per SM.
///
/// The logits are complete when the launch has ended, and so are the new keys and values in the cache. `sample_tokens` then chooses the
/// next tokens. The launch and its arguments do not change from step to step, so that a CUDA graph may contain several steps.
pub fn step<T: TensorCore>(program: &Program<T>, memory: StepMemory) -> KernelLaunch {
    let StepMemory { table, scratch, slots } = memory;
    let Program { sizes, group, in_fp8, .. } = *program;
    let (elements, floats) = (GlobalMut::null(), Global::null());
    let launch = kernel::decode_step_select::<T>((in_fp8, group), scratch, table, elements, floats, slots, sizes)
        .expect("a kernel for each group of heads");
    KernelLaunch { launch, grid: [program.blocks as u32, 1, 1], shared_bytes: bytes::<T>(sizes, group) }
}

impl<T> Program<T> {
    /// Returns the number of stages in the ring of a block.
    pub fn stages(&self) -> u32 {
        self.sizes.stages
    }
}

/// Shared memory of a block on compute capability 9.0, in bytes.
const MAX_SHARED: usize = 227 << 10;
/// Maximum number of splits of a slot's positions.
const MAX_SPLITS: usize = 32;

fn bytes<T: TensorCore>(sizes: Sizes, group: usize) -> usize {
    shared_bytes(|layout| kernel::Storage::<T>::new(layout, sizes, group))
}

/// Takes `count` words, and more until the next multiple of 4: rows are read in packets.
fn take(scratch: &mut usize, count: usize) -> u64 {
    let first = *scratch;
    *scratch += count.next_multiple_of(4);
    first as u64
}

/// The sizes that an operation needs.
#[derive(Default)]
struct Shape {
    /// Columns of the output.
    columns: usize,
    /// Columns of the input.
    channels: usize,
    /// Columns of the input if it is normalized.
    norm_channels: usize,
    head_size: usize,
    /// Query heads of a key-value head.
    group: usize,
}

fn shape<T: TensorCore>(operation: &Operation<T>, rows: usize) -> Result<Shape, String> {
    let shape = match operation {
        Operation::Embed(operands) => Shape { columns: operands.channels, ..Shape::default() },
        Operation::Input(_, columns) => Shape { columns: *columns, ..Shape::default() },
        Operation::Matvec(operands, MatvecSize { rows: own, channels, outputs, activation, .. }) => {
            let inputs = activation.map_or(1, Activation::inputs);
            if *own != rows {
                return Err(format!("expected {rows} rows in each linear layer, found {own}"));
            }
            // Consumer warps multiply four packets of weight at a time.
            let block = 4 * operands.fp8.map_or(T::PACKET, |_| E4m3::PACKET);
            if *channels == 0 || !channels.is_multiple_of(block) || !outputs.is_multiple_of(inputs) {
                return Err(format!("expected a multiple of {block} channels, found {channels}"));
            }
            if operands.fp8.is_some() && size_of::<T>() != size_of::<bf16>() {
                return Err("expected activations in bf16 beside weights in FP8".to_owned());
            }
            let normed = !matches!(operands.norm, InputNorm::None);
            let norm_channels = if normed { *channels } else { 0 };
            Shape { columns: outputs / inputs, channels: *channels, norm_channels, ..Shape::default() }
        }
        Operation::Attention(_, sizes) => {
            let [heads, kv_heads, head_size] = [sizes.heads, sizes.kv_heads, sizes.head_size].map(|size| size as usize);
            if !attention::supports(head_size) || kv_heads == 0 || !heads.is_multiple_of(kv_heads) || heads == 0 {
                return Err(format!("expected heads of 16 to 128 channels, found {heads} of {head_size}"));
            }
            Shape { columns: heads * head_size, head_size, group: heads / kv_heads, ..Shape::default() }
        }
    };
    if shape.columns == 0 || !shape.columns.is_multiple_of(2) {
        return Err(format!("expected an even number of output columns, found {}", shape.columns));
    }
    Ok(shape)
}

/// The outputs of the operations, in order.
#[derive(Default)]
struct Values {
    all: Vec<Value>,
    /// The latest output at each address.
    latest: HashMap<usize, usize>,
}

struct Value {
    columns: usize,
    is_read: bool,
    /// The outputs that its operation reads.
    input: Option<usize>,
    residual: Option<usize>,
}

impl Values {
    fn add<T: TensorCore>(&mut self, operation: &Operation<T>, shape: &Shape, rows: usize) -> Result<(), String> {
        let (out, reads) = operation.values();
        let mut read = |view: Option<Rows<T>>| -> Result<Option<usize>, String> {
            let Some((view, columns)) = view else { return Ok(None) };
            let found = self.latest.get(&view.pointer().addr()).copied();
            let index = found.ok_or("expected inputs in memory")?;
            if self.all[index].columns != columns {
                let found = self.all[index].columns;
                return Err(format!("expected an input of {rows} x {columns} values, found {rows} x {found}"));
            }
            self.all[index].is_read = true;
            Ok(Some(index))
        };
        let [input, residual] = reads;
        let (input, residual) = (read(input)?, read(residual)?);
        self.latest.insert(out.pointer().addr(), self.all.len());
        self.all.push(Value { columns: shape.columns, is_read: false, input, residual });
        Ok(())
    }
}

/// Rows of values that an operation reads, and the number of their columns.
type Rows<T> = (Global<T>, usize);

impl<T> Operation<T> {
    /// Returns the output, the input and the residual.
    fn values(&self) -> (Global<T>, [Option<Rows<T>>; 2]) {
        match self {
            Self::Embed(operands) => (operands.out.reader(), [None; 2]),
            Self::Input(view, _) => (*view, [None; 2]),
            Self::Matvec(operands, size) => {
                let columns = size.outputs / size.activation.map_or(1, Activation::inputs);
                let residual = (!operands.residual.is_null()).then_some((operands.residual, columns));
                (operands.out.reader(), [Some((operands.inp, size.channels)), residual])
            }
            Self::Attention(operands, sizes) => {
                let columns = (sizes.heads + 2 * sizes.kv_heads) * sizes.head_size;
                (operands.out.reader(), [Some((operands.qkv, columns as usize)), None])
            }
        }
    }
}

impl<T> Operation<T> {
    /// Returns whether the weight of a linear layer is in FP8.
    fn weight_in_fp8(&self) -> Option<bool> {
        match self {
            Self::Matvec(operands, _) => Some(operands.fp8.is_some()),
            _ => None,
        }
    }
}

/// Returns the operations, with the values in memory that they read.
fn with_inputs<T: TensorCore>(operations: &[Operation<T>]) -> Vec<Operation<T>> {
    let (mut all, mut known) = (Vec::new(), HashSet::new());
    for operation in operations {
        let (out, reads) = operation.values();
        for (view, columns) in reads.into_iter().flatten() {
            if known.insert(view.pointer().addr()) {
                all.push(Operation::Input(view, columns));
            }
        }
        known.insert(out.pointer().addr());
        all.push(*operation);
    }
    all
}

/// An entry of the table.
struct Entry<'a>(&'a mut [u64]);

impl Entry<'_> {
    fn set(&mut self, field: Field, value: u64) {
        self.0[field as usize] = value;
    }

    /// Sets the index of the element at the start of `view`, counted from address 0.
    fn view<V>(&mut self, field: Field, view: Global<V>) -> Result<(), String> {
        let address = view.pointer().addr();
        if !address.is_multiple_of(16) {
            return Err(format!("expected operands at multiples of 16 bytes, found address {address:#x}"));
        }
        self.set(field, (address / size_of::<V>()) as u64);
        Ok(())
    }

    fn embed<T>(&mut self, operands: &EmbedOperands<T>) -> Result<(), String> {
        self.set(Field::Kind, EMBED);
        self.set(Field::Columns, operands.channels as u64);
        self.view(Field::Out, operands.out.reader())?;
        self.view(Field::Weight, operands.wte)?;
        self.view(Field::Bias, operands.wpe)
    }

    fn matvec<T>(&mut self, operands: &MatvecOperands<T>, size: &MatvecSize) -> Result<(), String> {
        let (code, weight, bias, eps) = match operands.norm {
            InputNorm::None => (matvec::PLAIN, Global::null(), Global::null(), 0.0),
            InputNorm::LayerNorm(weight, bias) => (matvec::LAYERNORM, weight, bias, matvec::LAYERNORM_EPS),
            InputNorm::RmsNorm(weight, eps) => (matvec::RMSNORM, weight, Global::null(), eps),
        };
        let inputs = size.activation.map_or(1, Activation::inputs);
        self.set(Field::Kind, MATVEC);
        self.set(Field::Channels, size.channels as u64);
        self.set(Field::Columns, (size.outputs / inputs) as u64);
        self.set(Field::Activation, size.activation.map_or(0, |activation| activation.code().into()));
        self.set(Field::Norm, code.into());
        self.set(Field::Eps, eps.to_bits().into());
        self.view(Field::Out, operands.out.reader())?;
        match operands.fp8 {
            Some(Fp8Weight { weight, scale }) => {
                // The kernel copies two numbers as an element of T.
                self.view(Field::Weight, Global::<T>::new(weight.pointer().cast()))?;
                self.set(Field::Scale, (scale.pointer().addr() / size_of::<f32>()) as u64);
            }
            None => self.view(Field::Weight, operands.weight)?,
        }
        self.view(Field::Bias, operands.bias)?;
        self.view(Field::NormWeight, weight)?;
        self.view(Field::NormBias, bias)
    }

    fn attention<T: Element>(
        &mut self,
        operands: &AttentionOperands<T>,
        sizes: attention::Sizes,
    ) -> Result<(), String> {
        self.set(Field::Kind, ATTENTION);
        let scalars = [
            (Field::Group, sizes.group()),
            (Field::KvHeads, sizes.kv_heads),
            (Field::HeadSize, sizes.head_size),
            (Field::Capacity, sizes.capacity.max(1)),
            (Field::Splits, sizes.splits),
            (Field::Positions, plan::stage_positions::<T>(sizes.head_size)),
            (Field::Rotation, sizes.rotation),
            (Field::QkNorm, sizes.qk_norm),
            (Field::Eps, sizes.eps.to_bits()),
            (Field::Gain, sizes.gain.to_bits()),
        ];
        for (field, value) in scalars {
            self.set(field, value.into());
        }
        self.view(Field::Out, operands.out.reader())?;
        self.view(Field::Keys, operands.keys.reader())?;
        self.view(Field::Values, operands.values.reader())?;
        self.view(Field::Rotations, operands.table)?;
        self.view(Field::QueryWeight, operands.q_weight)?;
        self.view(Field::KeyWeight, operands.k_weight)
    }
}
