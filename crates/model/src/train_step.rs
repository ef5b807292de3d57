//! One optimizer step: forward pass, loss, backward pass, gradient reduction, clipping and update.

use super::data_parallel::{DataParallel, LayerBuffers, StopRequest};
use super::decoder::Decoder;
use super::fp8::Fp8Counts;
use super::nvtx::Range;
use super::sharding::LayerHooks;
use super::update::Update;
use anyhow::bail;
use distributed::Ranks;
use engine::tensor::Tensor;
use engine::trace::BitFlip;
use engine::{BatchLayout, Engine, GraphKey, Result};

/// Copies the next micro-batch, with its seed, to the model's batch. Returns the number of its targets that are not masked.
pub type LoadBatch<'a> = dyn FnMut(&mut dyn Engine) -> Result<usize> + 'a;

/// Receives loss and gradient norm before the update. Returns its hyperparameters, or `None` to skip the update.
pub type DecideUpdate<'a> = dyn FnMut(&mut dyn Engine, StepStats) -> Result<Option<Update>> + 'a;

/// Loss and gradient norm of a step on all ranks.
///
/// The passes divide each loss gradient by the number of tokens. The number of targets that are not masked is known only afterwards, so
/// the update multiplies the gradients by the quotient. If all targets are masked, the step has a loss of 0 and gradients of 0: AdamW's
/// moments and weight decay, and Muon's momentum, still apply.
#[derive(Clone, Copy, Debug)]
pub struct StepStats {
    /// (2) f32: sum of the losses, and norm of the gradients that the passes computed
    pub tensor: Tensor,
    /// Number of tokens.
    pub tokens: usize,
    /// Number of targets that are not masked.
    pub targets: usize,
}

impl StepStats {
    /// Returns the mean loss of the targets that are not masked, and the norm of its gradient, from the values of the tensor.
    pub fn loss_and_norm(self, values: &[f32]) -> Result<[f32; 2]> {
        let [loss_sum, norm] = *values else { bail!("stats: expected 2 values, found {}", values.len()) };
        Ok([loss_sum / self.targets.max(1) as f32, norm * self.grad_factor()])
    }

    /// Returns the factor of the gradients that the passes computed: exactly 1 if no target is masked.
    fn grad_factor(self) -> f32 {
        (self.tokens as f64 / self.targets.max(1) as f64) as f32
    }
}

/// The verification of a micro-batch.
#[derive(Clone, Copy, Debug)]
pub struct Verification {
    /// Number of verifications before. It selects the rank that computes the micro-batch of another.
    pub number: usize,
    /// A fault to inject into the first computation.
    pub flip: Option<BitFlip>,
}

/// Runs the optimizer steps of one rank. Training, benchmarks, verification and tests all use it.
pub struct TrainStep {
    pub(super) model: Decoder,
    pub(super) layout: BatchLayout,
    pub(super) grad_accum: usize,
    pub(super) buffers: LayerBuffers,
    /// The verification of the next step's first micro-batch, if it is due.
    pub(super) verification: Option<Verification>,
    /// Whether targets may be masked, on any rank.
    masks_targets: bool,
    /// Number of targets of this rank that are not masked, in the step in progress.
    targets: usize,
    /// Set if the passes of a micro-batch are captured as a CUDA graph.
    graph: Option<GraphKey>,
    /// Whether the next step counts the values that FP8 loses.
    count_fp8: bool,
    /// Whether the step in progress has changed statistics of FP8.
    statistics_changed: bool,
}

impl TrainStep {
    /// Creates a step over `grad_accum` micro-batches of `layout` on each rank.
    pub fn new(model: &Decoder, layout: BatchLayout, grad_accum: usize) -> Self {
        Self {
            model: model.for_training_steps(),
            layout,
            grad_accum,
            buffers: LayerBuffers::default(),
            verification: None,
            masks_targets: false,
            targets: 0,
            graph: None,
            count_fp8: false,
            statistics_changed: false,
        }
    }

    /// Captures the passes of micro-batches that do not communicate as a CUDA graph.
    pub fn capture_graphs(self) -> Self {
        Self { graph: Some(GraphKey::new()), ..self }
    }

    /// Averages losses and gradients over the targets that are not masked, if `masks_targets`. All ranks must agree.
    pub fn mask_targets(self, masks_targets: bool) -> Self {
        Self { masks_targets, ..self }
    }

    /// Restores the statistics of FP8 after an error that has interrupted a step before its update. Other state has not changed.
    pub fn restore_statistics(&mut self, engine: &mut dyn Engine) -> Result<()> {
        let interrupted = std::mem::take(&mut self.statistics_changed);
        self.model.fp8.filter(|_| interrupted).map_or(Ok(()), |fp8| fp8.restore_statistics(engine))
    }

    /// Makes the next step count the values that quantization to FP8 loses: those of weights, and of its first micro-batch.
    pub fn count_fp8(&mut self) {
        self.count_fp8 = true;
    }

    /// Reads the counts of the last step that counted. Returns nothing for a model without FP8.
    pub fn fp8_counts(&self, engine: &mut dyn Engine) -> Result<Vec<Fp8Counts>> {
        let rows = self.layout.b * self.layout.t;
        self.model.fp8.map_or(Ok(Vec::new()), |fp8| fp8.read_counts(engine, &self.model.descriptor, rows))
    }

    /// Requests the verification of the first micro-batch of the next step.
    pub fn verify_next(&mut self, verification: Verification) {
        self.verification = Some(verification);
    }

    /// Runs one step. Returns its loss and norm, and the reason if a CUDA graph could not be captured, once.
    pub fn run(
        &mut self,
        engine: &mut dyn Engine,
        ranks: &mut Ranks,
        load: &mut LoadBatch,
        decide: &mut DecideUpdate,
    ) -> Result<(StepStats, Option<String>)> {
        let capture_error = self.gradients(engine, ranks, load)?;
        self.measure(engine, ranks)?;
        let stats = self.stats(ranks)?;
        if let Some(update) = decide(engine, stats)? {
            self.update(engine, ranks, &Update { grad_factor: stats.grad_factor(), ..update })?;
        }
        self.statistics_changed = false;
        Ok((stats, capture_error))
    }

    /// Computes loss and gradients of all micro-batches, reduced over the ranks.
    pub fn gradients(
        &mut self,
        engine: &mut dyn Engine,
        ranks: &mut Ranks,
        load: &mut LoadBatch,
    ) -> Result<Option<String>> {
        let mut capture_error = None;
        self.targets = 0;
        engine.zero(self.model.losses)?;
        engine.zero(self.model.training()?.grads)?;
        self.begin_fp8(engine)?;
        for micro_batch in 1..=self.grad_accum {
            let _range = Range::new(format_args!("micro-batch {micro_batch}"));
            self.targets += load(engine)?;
            self.verify_if_requested(engine, ranks)?;
            let last = micro_batch == self.grad_accum;
            capture_error = self.micro_batch(engine, ranks, last)?.or(capture_error);
            self.end_fp8_counts(engine)?;
        }
        self.data_parallel(ranks, true).wait_on_stream(engine)?;
        Ok(capture_error)
    }

    /// In FP8, computes the scales of this step, quantizes the weights, and begins to count if that was requested.
    fn begin_fp8(&mut self, engine: &mut dyn Engine) -> Result<()> {
        let Some(fp8) = &mut self.model.fp8 else { return Ok(()) };
        fp8.keep_statistics(engine)?;
        self.statistics_changed = true;
        fp8.begin_step(engine)?;
        if std::mem::take(&mut self.count_fp8) {
            fp8.set_counting(engine, true)?;
        }
        // The weights of a frozen model do not change.
        let is_done = std::mem::replace(&mut fp8.holds_frozen, self.model.frozen.is_some());
        let is_done = is_done && (!fp8.counting || fp8.staging().is_some());
        if is_done { Ok(()) } else { self.model.quantize_whole_weights(engine) }
    }

    /// In FP8, ends to count after the first micro-batch.
    fn end_fp8_counts(&mut self, engine: &mut dyn Engine) -> Result<()> {
        let Some(fp8) = &mut self.model.fp8 else { return Ok(()) };
        fp8.set_counting(engine, false)
    }

    /// Runs the forward pass, loss and backward pass of the loaded micro-batch. Gradients are reduced during the backward pass: of the
    /// last micro-batch under ZeRO-0 and 1, of every micro-batch under ZeRO-2 and 3.
    fn micro_batch(&mut self, engine: &mut dyn Engine, ranks: &mut Ranks, last: bool) -> Result<Option<String>> {
        let (model, layout) = (&self.model, self.layout);
        let dloss = model.zero.dloss(layout.b * layout.t * self.grad_accum);
        let stop = StopRequest::Never;
        let mut data_parallel = DataParallel { model, ranks, buffers: &mut self.buffers, last, stop };
        // Collectives are not captured, nor are steps that calibrate FP8 or count.
        let repeats = !data_parallel.communicates() && model.fp8.is_none_or(|fp8| fp8.repeats());
        let graph = self.graph.as_ref().filter(|_| repeats);
        let mut passes = |engine: &mut dyn Engine| {
            {
                let _range = Range::new(format_args!("forward"));
                model.forward(engine, layout, &mut data_parallel)?;
            }
            {
                let _range = Range::new(format_args!("loss"));
                model.loss(engine, layout, Some(dloss))?;
            }
            let _range = Range::new(format_args!("backward"));
            model.backward(engine, layout, dloss, &mut data_parallel)
        };
        match graph {
            Some(key) => engine.capture_or_replay(key, &mut passes),
            None => passes(engine).map(|()| None),
        }
    }

    /// Computes the loss sum over all ranks and the gradient norm in the model's stats.
    pub fn measure(&mut self, engine: &mut dyn Engine, ranks: &mut Ranks) -> Result<()> {
        self.data_parallel(ranks, true).measure(engine)
    }

    /// Returns the measured loss and norm, with the number of targets. Ranks communicate only if targets may be masked.
    fn stats(&self, ranks: &mut Ranks) -> Result<StepStats> {
        let tokens = self.layout.targets().len() * self.grad_accum * ranks.world_size();
        let mut targets = [self.targets as f64];
        if self.masks_targets {
            ranks.all_reduce_sum_f64(&mut targets)?;
        }
        let targets = if self.masks_targets { targets[0] as usize } else { tokens };
        Ok(StepStats { tensor: self.model.training()?.stats, tokens, targets })
    }

    /// Clips the measured gradients, updates this rank's shard of the parameters, and gathers the others' shards.
    pub fn update(&mut self, engine: &mut dyn Engine, ranks: &mut Ranks, update: &Update) -> Result<()> {
        let _range = Range::new(format_args!("update"));
        let sharded = self.model.zero.shards_optimizer();
        let mut data_parallel = self.data_parallel(ranks, true);
        data_parallel.model.apply_update(engine, update, &mut data_parallel)?;
        if sharded { data_parallel.wait_on_stream(engine) } else { Ok(()) }
    }

    /// Returns the hooks for passes outside a step, in an evaluation that `stop` may end.
    pub fn hooks<'a>(&'a mut self, ranks: &'a mut Ranks, stop: StopRequest<'a>) -> impl LayerHooks + 'a {
        DataParallel { stop, ..self.data_parallel(ranks, false) }
    }

    fn data_parallel<'a>(&'a mut self, ranks: &'a mut Ranks, last: bool) -> DataParallel<'a> {
        DataParallel { model: &self.model, ranks, buffers: &mut self.buffers, last, stop: StopRequest::Never }
    }
}
