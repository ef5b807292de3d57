//! Generation steps: a kernel for each operation or one launch, whichever is faster.

use super::decode::{all_heads_norm, attention_operands, embed_operands, may_be_gemm, normed_operands};
use super::gemm_cache::digest;
use super::{Cuda, Float};
use crate::ops::{DecodeOperation, DecodeStep, DecodeStepShape, Slot};
use crate::tensor::Tensor;
use crate::{Engine, GraphKey, Result, StepKind, Tuning};
use cuda_std::{Global, GlobalMut};
use gpu::decode::step::launch::{self, Operation, Program, StepMemory};
use gpu::launch::KernelLaunch;
use std::time::Instant;

/// Smallest number of operations that is worth a program.
const MIN_OPERATIONS: usize = 8;
/// Steps of a timing, and the number of timings.
const TIMED_STEPS: usize = 16;
const TIMINGS: usize = 5;

/// The program of the generation step.
pub struct Steps<T> {
    /// The program whose table is in memory.
    program: Option<Program<T>>,
    /// The fastest kind. A step that one launch does not support has separate kernels.
    pub(super) kind: StepKind,
    /// The step of the last tuning pass, for which no kind has been chosen yet.
    found: Option<Found>,
}

/// A generation step, and the kinds that compute it.
struct Found {
    /// The digest of its operations.
    digest: u64,
    kinds: Vec<StepKind>,
}

impl<T> Default for Steps<T> {
    fn default() -> Self {
        Self { program: None, kind: StepKind::OneLaunch, found: None }
    }
}

impl<T> Steps<T> {
    /// Forgets the program after memory has been allocated or overwritten.
    pub fn invalidate(&mut self) {
        self.program = None;
    }
}

/// Returns the lengths of the i32 tensors for a step.
pub(super) fn memory<T: Float>(cuda: &Cuda<T>, shape: &DecodeStepShape) -> [usize; 2] {
    let gpu = cuda.executor.emulation();
    if !gpu.hopper
        || !cuda.executor.runs_blocks_together()
        || shape.rows > gpu::decode::launch::MAX_ROWS
        || shape.columns.len() < MIN_OPERATIONS
    {
        return [0; 2];
    }
    let DecodeStepShape { rows, ref columns, attentions, heads } = *shape;
    launch::memory::<T>(rows, columns, attentions, heads, gpu.sm_count).map(|words| 2 * words)
}

/// Computes a step in one launch, or its operations one by one.
pub(super) fn step<T: Float>(cuda: &mut Cuda<T>, op: DecodeStep) -> Result<()> {
    // The autotuner times the GEMMs of separate operations.
    if !cuda.gemms.is_collecting()
        && cuda.steps.kind == StepKind::OneLaunch
        && let Some(kernel) = kernel(cuda, &op)?
    {
        return cuda.launch_kernel(&kernel);
    }
    if cuda.gemms.is_collecting() {
        let may_be_gemm =
            |operation: &DecodeOperation| matches!(operation, DecodeOperation::Matmul(op) if may_be_gemm(op));
        let supported = [
            (StepKind::Kernels, true),
            (StepKind::Gemms, op.operations.iter().any(may_be_gemm)),
            (StepKind::OneLaunch, program(cuda, &op)?.is_some()),
        ];
        let kinds = supported.into_iter().filter_map(|(kind, supported)| supported.then_some(kind)).collect();
        cuda.steps.found = Some(Found { digest: digest(format!("{:?}", op.operations).as_bytes()), kinds });
    }
    op.operations.iter().try_for_each(|&operation| cuda.execute(operation.into()))
}

fn slots_of(operation: &DecodeOperation) -> Option<Tensor> {
    match operation {
        DecodeOperation::Embed(op) => Some(op.slots),
        DecodeOperation::Attention(op) => Some(op.slots),
        DecodeOperation::Matmul(_) => None,
    }
}

/// Returns the program of a step, or `None` if there is none or no memory for it.
fn program<T: Float>(cuda: &Cuda<T>, op: &DecodeStep) -> Result<Option<Program<T>>> {
    let [table, words] = op.memory;
    let Some(slots) = op.operations.iter().find_map(slots_of).filter(|_| op.operations.len() >= MIN_OPERATIONS) else {
        return Ok(None);
    };
    let has_unsupported_norm = |operation: &DecodeOperation| match operation {
        DecodeOperation::Attention(op) => all_heads_norm(op).is_some(),
        DecodeOperation::Embed(_) | DecodeOperation::Matmul(_) => false,
    };
    if op.operations.iter().any(has_unsupported_norm) {
        return Ok(None);
    }
    let operation = |operation: &DecodeOperation| {
        Ok(match operation {
            DecodeOperation::Embed(op) => Operation::Embed(embed_operands(cuda, op)?),
            DecodeOperation::Matmul(op) => {
                let (operands, size) = normed_operands(cuda, op)?;
                Operation::Matvec(operands, size)
            }
            DecodeOperation::Attention(op) => {
                let (operands, sizes) = attention_operands(cuda, op)?;
                Operation::Attention(operands, sizes)
            }
        })
    };
    let operations = op.operations.iter().map(operation).collect::<Result<Vec<_>>>()?;
    let program = launch::program(&operations, slots.len / Slot::WORDS, cuda.executor.sm_count());
    Ok(program.ok().filter(|program| 2 * program.table.len() <= table.len && 2 * program.scratch <= words.len))
}

/// Returns the launch of a step. Its program is in memory afterwards.
fn kernel<T: Float>(cuda: &mut Cuda<T>, op: &DecodeStep) -> Result<Option<KernelLaunch>> {
    let Some(program) = program(cuda, op)? else { return Ok(None) };
    let [table, words] = op.memory;
    if cuda.steps.program.as_ref().is_none_or(|known| known.table != program.table) {
        if cuda.capturing {
            return Ok(None);
        }
        cuda.write_bytes(table.slice(0, 2 * program.table.len()), bytemuck::cast_slice(&program.table))?;
        cuda.zero(words)?;
    }
    let slots = op.operations.iter().find_map(slots_of).unwrap_or(table);
    let memory = StepMemory {
        table: Global::new(cuda.arena.bytes_of("the table of a step", table)?.cast()),
        scratch: GlobalMut::new(cuda.arena.bytes_of("the values of a step", words)?.cast()),
        slots: cuda.input("slots", slots, slots.len)?,
    };
    let launch = launch::step(&program, memory);
    cuda.steps.program = Some(program);
    Ok(Some(launch))
}

/// Chooses the kind of the step that a tuning pass contained. The memory is zero afterwards.
pub(super) fn choose<T: Float>(
    cuda: &mut Cuda<T>,
    pass: &mut dyn FnMut(&mut dyn Engine) -> Result<()>,
    tuning: &mut Tuning,
) -> Result<()> {
    cuda.steps.invalidate();
    let found = cuda.steps.found.take().filter(|found| found.kinds.len() > 1 && cuda.executor.stream().is_some());
    let Some(Found { digest, kinds }) = found else { return Ok(()) };
    if let Some(known) = cuda.gemms.cache.as_ref().and_then(|cache| cache.step_kind(digest)) {
        cuda.steps.kind = known;
        return Ok(());
    }
    let mut timings: Vec<_> = kinds.into_iter().map(|kind| (kind, GraphKey::new(), f64::INFINITY)).collect();
    // The first round launches individually and captures the graphs.
    for round in 0..=TIMINGS {
        for (kind, key, seconds) in &mut timings {
            cuda.steps.kind = *kind;
            let start = Instant::now();
            for _ in 0..TIMED_STEPS {
                cuda.capture_or_replay(key, pass)?;
            }
            cuda.executor.stream().map_or(Ok(()), cuda_driver::Stream::synchronize)?;
            if round > 0 {
                *seconds = seconds.min(start.elapsed().as_secs_f64() / TIMED_STEPS as f64);
            }
        }
    }
    tuning.step_seconds = timings.into_iter().map(|(kind, _, seconds)| (kind, seconds)).collect();
    let fastest = tuning.step_seconds.iter().min_by(|a, b| a.1.total_cmp(&b.1));
    cuda.steps.kind = fastest.map_or(StepKind::Kernels, |(kind, _)| *kind);
    cuda.steps.invalidate();
    cuda.executor.invalidate_graphs();
    if let Some(timer) = cuda.executor.gemm_timer() {
        timer.zero_memory()?;
    }
    if let Some(Err(error)) = cuda.gemms.cache.as_ref().map(|cache| cache.save_step(digest, cuda.steps.kind)) {
        tuning.cache_error = Some(format!("{error:#}"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::decode::FEWEST_ROWS_OF_GEMM;
    use super::super::emulated::Emulated;
    use super::super::executor::EmulatedGpu;
    use super::*;
    use crate::ops::{DecodeEmbed, DecodeMatmul, Epilogue, MatmulForward, MatmulShape, NormForward};
    use crate::plan::{Group, Plan};
    use crate::tensor::DType;

    const C: usize = 32;
    const LAYERS: usize = 4;
    const VOCAB: usize = 40;

    /// An embedding, layers of two linear layers, the first with a norm, and a head.
    fn engine_and_step(sm_count: usize, rows: usize) -> (Cuda<f32>, Vec<DecodeOperation>, Option<[Tensor; 2]>, Tensor) {
        let executor = Emulated::new(EmulatedGpu { sm_count, ..EmulatedGpu::new(true) }, true);
        let mut cuda = Cuda::<f32>::new(Box::new(executor), None, None);
        let mut plan = Plan::default();
        let mut add = |name: &str, shape: &[usize]| plan.add(Group::Parameters, name, shape, DType::F32);
        let wte = add("wte", &[VOCAB, C]);
        let weights: Vec<_> = (0..2 * LAYERS).map(|i| add(&format!("weight {i}"), &[C, C])).collect();
        let norm_weight = add("norm", &[C]);
        let values: Vec<_> = (0..=LAYERS).map(|i| add(&format!("residual {i}"), &[rows, C])).collect();
        let [inner, normed, rstd, logits] =
            [("inner", C), ("normed", C), ("rstd", 1), ("logits", VOCAB)].map(|(name, n)| add(name, &[rows, n]));
        let slots = plan.add(Group::Parameters, "slots", &[rows, Slot::WORDS], DType::I32);
        let columns = [C; 2 * LAYERS + 1].into_iter().chain([VOCAB]).collect();
        let shape = DecodeStepShape { rows, columns, attentions: 0, heads: [1, 1, 16] };
        let lengths = cuda.decode_step_memory(&shape);
        let memory =
            (lengths[0] > 0).then(|| lengths.map(|len| plan.add(Group::Workspace, "step", &[len], DType::I32)));
        cuda.allocate(&plan).unwrap();
        for (i, &tensor) in [wte, norm_weight].iter().chain(&weights).enumerate() {
            let values: Vec<_> = (0..tensor.len).map(|j| ((i * 31 + j * 17) % 23) as f32 / 23.0 - 0.4).collect();
            cuda.write(tensor, &values).unwrap();
        }
        let slot = |i: usize| Slot { token: [3, 39][i % 2], position: 0, ..Slot::IDLE };
        let words: Vec<_> = (0..rows).flat_map(|i| slot(i).words()).collect();
        cuda.write_i32(slots, &words).unwrap();
        let linear = |out, inp, weight, epilogue, oc| {
            let shape = MatmulShape { rows, c: C, oc };
            MatmulForward { epilogue, ..MatmulForward::new([out, inp, weight], shape) }
        };
        let mut operations = vec![DecodeOperation::Embed(DecodeEmbed { out: values[0], slots, wte, wpe: None, c: C })];
        for layer in 0..LAYERS {
            let (inp, weight) = (values[layer], Some(norm_weight));
            let norm = NormForward {
                out: normed,
                mean: None,
                rstd,
                inp,
                weight,
                bias: None,
                c: C,
                eps: 1e-5,
                quantized: None,
            };
            let first = linear(inner, normed, weights[2 * layer], Epilogue::None, C);
            let second = linear(values[layer + 1], inner, weights[2 * layer + 1], Epilogue::Residual(inp), C);
            operations.push(DecodeOperation::Matmul(DecodeMatmul {
                norm: Some(norm),
                matmul: first,
                weight_scale: None,
            }));
            operations.push(DecodeOperation::Matmul(DecodeMatmul { norm: None, matmul: second, weight_scale: None }));
        }
        let head = linear(logits, values[LAYERS], wte, Epilogue::None, VOCAB);
        operations.push(DecodeOperation::Matmul(DecodeMatmul { norm: None, matmul: head, weight_scale: None }));
        (cuda, operations, memory, logits)
    }

    #[test]
    fn a_step_in_one_launch_gives_the_results_of_its_operations() {
        let (mut cuda, operations, memory, logits) = engine_and_step(4, 2);
        let memory = memory.unwrap();
        cuda.steps.kind = StepKind::Kernels;
        cuda.execute(DecodeStep { operations: &operations, memory }.into()).unwrap();
        assert!(cuda.steps.program.is_none());
        let separate = cuda.read(logits).unwrap();
        cuda.steps.kind = StepKind::OneLaunch;
        // Twice: the second step uses the program of the first.
        for _ in 0..2 {
            cuda.write(logits, &vec![0.0; logits.len]).unwrap();
            cuda.execute(DecodeStep { operations: &operations, memory }.into()).unwrap();
            assert!(cuda.steps.program.is_some());
            let got = cuda.read(logits).unwrap();
            let most = separate.iter().fold(0.0f32, |most, x| most.max(x.abs()));
            assert!(most > 0.0 && got.iter().zip(&separate).all(|(a, b)| (a - b).abs() < 1e-5 * most), "{got:?}");
        }
        // A graph contains the launch; within a capture no program can be written.
        let key = GraphKey::new();
        for _ in 0..3 {
            let step = &mut |engine: &mut dyn Engine| engine.run(DecodeStep { operations: &operations, memory });
            assert_eq!(cuda.capture_or_replay(&key, step).unwrap(), None);
        }
        // Too few operations, and memory that is too small.
        cuda.steps.invalidate();
        cuda.execute(DecodeStep { operations: &operations[..3], memory }.into()).unwrap();
        cuda.execute(DecodeStep { operations: &operations, memory: [memory[0], memory[1].slice(0, 8)] }.into())
            .unwrap();
        assert!(cuda.steps.program.is_none());
    }

    #[test]
    fn a_step_of_gemms_gives_the_results_of_its_operations() {
        let (mut cuda, operations, memory, logits) = engine_and_step(4, FEWEST_ROWS_OF_GEMM);
        let mut logits = |kind, memory| {
            cuda.steps.kind = kind;
            cuda.write(logits, &vec![0.0; logits.len]).unwrap();
            cuda.execute(DecodeStep { operations: &operations, memory }.into()).unwrap();
            cuda.read(logits).unwrap()
        };
        let memory = memory.unwrap();
        let separate = logits(StepKind::Kernels, memory);
        let most = separate.iter().fold(0.0f32, |most, x| most.max(x.abs()));
        for kind in [StepKind::Gemms, StepKind::OneLaunch] {
            let got = logits(kind, memory);
            assert!(got.iter().zip(&separate).all(|(a, b)| (a - b).abs() < 1e-5 * most), "{kind:?}: {got:?}");
        }
    }

    #[test]
    fn a_tuning_pass_finds_the_kinds_of_a_step() {
        use StepKind::{Gemms, Kernels, OneLaunch};
        let few = FEWEST_ROWS_OF_GEMM;
        for (rows, count, kinds) in [
            (few - 1, usize::MAX, vec![Kernels, OneLaunch]),
            (few, usize::MAX, vec![Kernels, Gemms, OneLaunch]),
            (few, 3, vec![Kernels, Gemms]),
        ] {
            let (mut cuda, operations, memory, _) = engine_and_step(4, rows);
            let operations = &operations[..count.min(operations.len())];
            cuda.gemms.begin_tuning();
            cuda.execute(DecodeStep { operations, memory: memory.unwrap() }.into()).unwrap();
            assert_eq!(cuda.steps.found.take().unwrap().kinds, kinds);
        }
    }

    #[test]
    fn an_emulator_of_a_large_gpu_runs_the_operations() {
        let (mut cuda, operations, memory, logits) = engine_and_step(132, 2);
        assert!(memory.is_none());
        let mut recorder = crate::StepRecorder::new(&mut cuda, memory);
        for &operation in &operations {
            recorder.execute(operation.into()).unwrap();
        }
        recorder.finish().unwrap();
        assert!(cuda.read(logits).unwrap().iter().any(|x| *x != 0.0));
    }
}
