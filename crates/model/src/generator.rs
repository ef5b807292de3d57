//! Text generation with a KV cache: several sequences at a time, one new token for each of them in a step.
//!
//! A prompt runs through [`Decoder::forward`], with the kernels of training, which computes the keys and values of all its tokens but
//! the last. Then each step embeds the newest token of every sequence, computes all layers for these B rows, and chooses the next
//! tokens. The step reads tokens and positions from device memory and writes the next ones there, so a GPU runs it as one CUDA
//! graph, and the host may queue a step before it knows the tokens of the previous one.
//!
//! A prompt may begin with tokens that the slot holds already, from an earlier text or a copy of another slot. Then only the rest runs
//! through [`Decoder::forward_after`], and [`Generator::reusable`] states which tokens a slot can provide.
//!
//! Keys and values of a layer are (B, KV, T, HS) each, in the engine's float type. Attention reads the positions of a head one after
//! another, and a sequence is one range per layer, which prompts fill and copies of a prompt duplicate. A layer with a window keeps
//! only the last tokens, in a ring: T is the size of the window, and position p is at p mod T.

use super::Unit;
use super::decoder::{Cache, DecodePass, Decoder, Rows};
use super::descriptor::Descriptor;
use super::fit;
use super::fp8_weights::WeightFormat;
use super::memory_plan::PlanOptions;
use super::params::Param;
use super::sharding::{LayerHooks, Unsharded};
use anyhow::ensure;
use engine::ops::{
    CacheFill, CacheRead, Classifier, DecodeEmbed, DecodeMatmul, DecodeStepShape, MatmulForward, MatmulShape,
    SampleTokens, Slot, SlotSampling, decode_splits,
};
use engine::plan::{Group, Plan};
use engine::tensor::{DType, Tensor};
use engine::{BatchLayout, Engine, GraphKey, PendingRead, Result, StepRecorder, Tuning};

/// Prompts are padded to a multiple of this length, so that an engine sees few shapes of GEMMs.
const PADDING: usize = 64;

/// A model with a cache for several sequences, its slots.
#[derive(Debug)]
pub struct Generator {
    /// The model.
    pub decoder: Decoder,
    cache: Cache,
    graph: GraphKey,
}

/// A step in progress.
#[derive(Debug)]
pub struct Step {
    /// The chosen token of each slot, once it is complete.
    pub tokens: PendingRead,
    /// States why the step could not be captured as a CUDA graph; it ran nevertheless.
    pub warning: Option<String>,
}

impl Cache {
    fn plan(plan: &mut Plan, d: &Descriptor, slots: usize, capacity: usize, dtype: DType) -> Self {
        let mut add = |name, shape: &[usize], dtype| plan.add(Group::Activations, name, shape, dtype);
        let positions = (0..d.layers).map(|layer| cached_positions(d, layer, capacity)).sum();
        let cache = [slots, d.kv_heads, positions, d.head_size];
        let splits = decode_splits(slots, d.kv_heads, capacity);
        let vp = d.padded_vocab();
        Self {
            slot_count: slots,
            capacity,
            keys: add("cached keys", &cache, dtype),
            values: add("cached values", &cache, dtype),
            partials: add("partial attention", &[slots, d.heads, splits, d.head_size + 2], DType::F32),
            slots: add("slots", &[slots, Slot::WORDS], DType::I32),
            seen: add("seen tokens", &[slots, vp], DType::I32),
            sampled: add("sampled tokens", &[slots], DType::F32),
            scratch: add("scores", &[slots, vp], DType::F32),
            exchange: add("results of sampling", &[SampleTokens::exchange_len(slots, vp)], DType::I32),
            step: None,
        }
    }

    /// Returns how many positions of a sequence a layer keeps.
    pub(super) fn positions(&self, d: &Descriptor, layer: usize) -> usize {
        cached_positions(d, layer, self.capacity)
    }

    /// Returns the keys or values (B, KV, T, HS) of a layer.
    pub(super) fn of_layer(&self, cache: Tensor, d: &Descriptor, layer: usize) -> Tensor {
        let row = self.slot_count * d.kv_heads * d.head_size;
        let before: usize = (0..layer).map(|layer| self.positions(d, layer)).sum();
        cache.slice(before * row, self.positions(d, layer) * row)
    }
}

/// Returns the sizes of a generation step: the embedding, four linear layers and the attention of each layer, and the head.
fn step_shape(d: &Descriptor, rows: usize) -> DecodeStepShape {
    let (c, attended) = (d.channels, d.heads * d.head_size);
    let layer = [attended + 2 * d.kv_heads * d.head_size, attended, c, d.mlp_channels, c];
    let columns = [c].into_iter().chain(layer.repeat(d.layers)).chain([d.padded_vocab()]).collect();
    DecodeStepShape { rows, columns, attentions: d.layers, heads: [d.heads, d.kv_heads, d.head_size] }
}

fn cached_positions(d: &Descriptor, layer: usize, capacity: usize) -> usize {
    d.window(layer, capacity).unwrap_or(capacity)
}

/// Copies keys and values of the rest of a prompt to a slot, and those of its first `past` tokens from it.
struct Fill<'a> {
    generator: &'a Generator,
    slot: usize,
    past: usize,
    tokens: usize,
}

/// The positions of a slot's cache.
#[derive(Clone, Copy, Debug)]
pub struct Held {
    /// Number of positions that have been written, from position 0 on.
    pub written: usize,
    /// Number of first positions that hold the tokens of the text. A later position may hold another token.
    pub valid: usize,
}

impl LayerHooks for Fill<'_> {
    fn gather_parameters(&mut self, engine: &mut dyn Engine, layer: usize, next: Option<usize>) -> Result<()> {
        Unsharded.gather_parameters(engine, layer, next)
    }

    fn begin_gradients(&mut self, engine: &mut dyn Engine, layer: usize) -> Result<()> {
        Unsharded.begin_gradients(engine, layer)
    }

    fn gradients_ready(&mut self, engine: &mut dyn Engine, unit: Unit) -> Result<()> {
        Unsharded.gradients_ready(engine, unit)
    }

    fn parameters_updated(&mut self, engine: &mut dyn Engine, unit: Unit) -> Result<()> {
        Unsharded.parameters_updated(engine, unit)
    }

    fn qkv_computed(&mut self, engine: &mut dyn Engine, layer: usize, qkv: Tensor) -> Result<()> {
        let Self { generator: Generator { decoder, cache, .. }, slot, past, tokens } = *self;
        let d = &decoder.descriptor;
        let (row, capacity) = (d.qkv_channels(), cache.positions(d, layer));
        let [keys, values] = [cache.keys, cache.values].map(|cache| self.generator.of_slot(cache, layer, slot));
        // A ring is read before the new tokens replace the oldest ones.
        if past > 0 {
            let shape = d.attention(1, past);
            engine.run(CacheRead { qkv: qkv.slice(0, past * row), keys, values, shape, capacity })?;
        }
        let (qkv, shape) = (qkv.slice(past * row, tokens * row), d.attention(1, tokens));
        engine.run(CacheFill { keys, values, qkv, shape, first: past, capacity })
    }
}

impl Generator {
    /// Plans a model with `slots` sequences of up to `capacity` tokens each. If its memory exceeds the engine's, the error states by
    /// how much.
    pub fn plan(
        descriptor: Descriptor,
        slots: usize,
        capacity: usize,
        weights: WeightFormat,
        engine: &mut dyn Engine,
    ) -> Result<(Self, Plan)> {
        ensure!(slots > 0 && capacity > 0, "generation: expected at least one sequence of one token");
        // One prompt at a time, and one row for each slot.
        let rows = PlanOptions::inference(slots.div_ceil(capacity), capacity);
        let rows = PlanOptions { logit_rows: slots, ..rows }.with_weights(weights, &descriptor, engine)?;
        let (decoder, mut plan) = fit::plan(descriptor, rows, engine)?;
        let mut cache = Cache::plan(&mut plan, &descriptor, slots, capacity, engine.dtype());
        let lengths = engine.decode_step_memory(&step_shape(&descriptor, slots));
        // A step of a model with experts has other operations too.
        if !lengths.contains(&0) && descriptor.experts.is_none() {
            let names = ["table of a step", "values of a step"];
            let mut add = |i: usize| plan.add(Group::Workspace, names[i], &[lengths[i]], DType::I32);
            cache.step = Some([add(0), add(1)]);
        }
        let (needed, free) = (plan.bytes().saturating_add(engine.reserved_memory(0)), engine.free_memory()?);
        ensure!(
            needed <= free,
            "the cache does not fit: {slots} sequences of {capacity} tokens take {} MiB with the model, found {} MiB free on {}; \
             use fewer or shorter sequences",
            needed >> 20,
            free >> 20,
            engine.describe()
        );
        Ok((Self { decoder, cache, graph: GraphKey::new() }, plan))
    }

    /// Returns the number of slots.
    pub fn slots(&self) -> usize {
        self.cache.slot_count
    }

    /// Returns the most tokens of a sequence in the cache.
    pub fn capacity(&self) -> usize {
        self.cache.capacity
    }

    /// Returns how many of the first `common` tokens of a text need not be computed again if a slot holds them, where `common` is at most
    /// the number of valid positions.
    ///
    /// A layer with a window of N tokens holds the last N written positions. The token at `common` reads the N - 1 positions before it. All
    /// of them are there if nothing has been replaced yet, or if at most one position has been written from `common` on: the one that
    /// replaces the position N before it, which the token does not read.
    pub fn reusable(&self, held: Held, common: usize) -> usize {
        let d = &self.decoder.descriptor;
        let ring = (0..d.layers).map(|layer| self.cache.positions(d, layer)).min().unwrap_or(self.cache.capacity);
        if held.written <= ring || common + 1 >= held.written { common.min(held.valid) } else { 0 }
    }

    /// Returns the part (KV, T, HS) of keys or values that belongs to a slot of a layer.
    fn of_slot(&self, cache: Tensor, layer: usize, slot: usize) -> Tensor {
        self.cache.of_layer(cache, &self.decoder.descriptor, layer).part(slot, self.cache.slot_count)
    }

    /// Makes all slots idle. It must precede the first step after an allocation.
    pub fn clear(&self, engine: &mut dyn Engine) -> Result<()> {
        if let Some(before) = self.decoder.stream.before() {
            engine.zero(before)?;
        }
        engine.zero(self.cache.seen)?;
        engine.zero(self.cache.exchange)?;
        engine.write_i32(self.cache.slots, &Slot::IDLE.words().repeat(self.cache.slot_count))
    }

    /// Makes a slot idle: steps do not change its cache until it begins again.
    pub fn park(&self, engine: &mut dyn Engine, slot: usize) -> Result<()> {
        engine.write_i32(self.cache.slots.slice(slot * Slot::WORDS, Slot::WORDS), &Slot::IDLE.words())
    }

    /// Begins a sequence in a slot with a prompt of 1 to `capacity` tokens. The next step chooses its first new token.
    ///
    /// The slot holds the first `past` tokens, fewer than the prompt has: see [`reusable`](Self::reusable). Only the rest is computed. Its
    /// keys and values may differ in the last bits from those of a prompt that is computed as a whole.
    pub fn begin(
        &self,
        engine: &mut dyn Engine,
        slot: usize,
        past: usize,
        prompt: &[u32],
        seed: u32,
        sampling: SlotSampling,
    ) -> Result<()> {
        self.check_prompt(slot, prompt)?;
        ensure!(
            past < prompt.len(),
            "generation: expected fewer cached tokens than the {} of the prompt, found {past}",
            prompt.len()
        );
        let before = &prompt[..prompt.len() - 1];
        self.extend(engine, slot, past, before)?;
        self.set_text_before(engine, slot, before)?;
        self.set_slot(engine, slot, prompt, seed, sampling)
    }

    /// Computes the keys and values of a part of a prompt in an idle slot: those of `text` after its first `past` tokens, which the slot holds.
    /// [`begin`](Self::begin) computes the rest.
    pub fn extend(&self, engine: &mut dyn Engine, slot: usize, past: usize, text: &[u32]) -> Result<()> {
        self.set_text_before(engine, slot, &text[..past])?;
        self.prefill(engine, slot, past, &text[past..])
    }

    /// Copies the first `tokens` positions, or all that the rings hold of them, from slot `from` to another one.
    pub fn copy_slot(&self, engine: &mut dyn Engine, [slot, from]: [usize; 2], tokens: usize) -> Result<()> {
        let slots = self.cache.slot_count;
        ensure!(
            slot < slots && from < slots && from != slot,
            "generation: expected two slots below {slots}, found {slot} and {from}"
        );
        let d = &self.decoder.descriptor;
        let heads = if tokens > 0 { d.kv_heads } else { 0 };
        for layer in 0..d.layers {
            let copied = tokens.min(self.cache.positions(d, layer)) * d.head_size;
            for cache in [self.cache.keys, self.cache.values] {
                let [to, from] = [slot, from].map(|slot| self.of_slot(cache, layer, slot));
                for head in 0..heads {
                    engine.copy(to.part(head, heads).slice(0, copied), from.part(head, heads).slice(0, copied))?;
                }
            }
        }
        Ok(())
    }

    fn check_prompt(&self, slot: usize, prompt: &[u32]) -> Result<()> {
        ensure!(
            slot < self.cache.slot_count,
            "generation: expected a slot below {}, found {slot}",
            self.cache.slot_count
        );
        ensure!(
            (1..=self.cache.capacity).contains(&prompt.len()),
            "prompt: expected 1 to {} tokens, found {}",
            self.cache.capacity,
            prompt.len()
        );
        let vocab = self.decoder.descriptor.vocab;
        match prompt.iter().find(|&&token| token as usize >= vocab) {
            Some(token) => anyhow::bail!("prompt: expected tokens below {vocab}, found {token}"),
            None => Ok(()),
        }
    }

    /// Computes the keys and values of tokens from position `past` on.
    fn prefill(&self, engine: &mut dyn Engine, slot: usize, past: usize, tokens: &[u32]) -> Result<()> {
        if tokens.is_empty() {
            return Ok(());
        }
        let layout = self.layout_of(tokens.len(), past);
        let mut words = engine.host_buffer(layout.words())?;
        words.fill(0);
        // Attention is causal, so the padding after the text does not affect it.
        words[..tokens.len()].iter_mut().zip(tokens).for_each(|(word, &token)| *word = token as i32);
        layout.sort(&mut words);
        engine.load_batch(self.decoder.batch.slice(0, layout.words()), layout, words)?;
        let mut fill = Fill { generator: self, slot, past, tokens: tokens.len() };
        let stream = self.decoder.stream.after_sequence(slot, self.decoder.descriptor.channels);
        let model = Decoder { stream, ..self.decoder.clone() };
        model.forward_after(engine, past, layout, &mut fill)
    }

    fn set_slot(
        &self,
        engine: &mut dyn Engine,
        slot: usize,
        text: &[u32],
        seed: u32,
        sampling: SlotSampling,
    ) -> Result<()> {
        self.mark_seen(engine, slot, text)?;
        let (token, position) = (text[text.len() - 1] as i32, text.len() as i32 - 1);
        let words = Slot { token, position, seed, sampling }.words();
        engine.write_i32(self.cache.slots.slice(slot * Slot::WORDS, Slot::WORDS), &words)
    }

    /// Sets the tokens that count as seen for the repetition penalty. A sequence that continues in another window of its text
    /// has seen more than its prompt.
    pub fn mark_seen(&self, engine: &mut dyn Engine, slot: usize, text: &[u32]) -> Result<()> {
        let vp = self.decoder.descriptor.padded_vocab();
        let mut seen = vec![0; vp];
        for &token in text {
            seen[token as usize] = 1;
        }
        engine.write_i32(self.cache.seen.slice(slot * vp, vp), &seen)
    }

    /// Begins to compute the next token of every slot.
    ///
    /// The token of an idle slot is 0. A slot stays at the last position of the cache, which it then writes again: its tokens are meaningless
    /// after the one that follows `capacity` tokens.
    pub fn step(&self, engine: &mut dyn Engine) -> Result<Step> {
        let warning = engine.capture_or_replay(&self.graph, &mut |engine| self.decode(engine))?;
        Ok(Step { tokens: engine.read_async(self.cache.sampled)?, warning })
    }

    /// Computes the logits (V) of each position of a text but its last, before softcap, and the loss of the token that follows, and
    /// passes them to `each` in order. The sequences in the slots do not change.
    pub fn score(&self, engine: &mut dyn Engine, text: &[u32], each: &mut dyn FnMut(&[f32], f32)) -> Result<()> {
        let Some((_, inputs)) = text.split_last() else { return Ok(()) };
        if inputs.is_empty() {
            return Ok(());
        }
        ensure!(
            inputs.len() <= self.cache.capacity,
            "text: expected at most {} tokens, found {}",
            self.cache.capacity + 1,
            text.len()
        );
        let (model, d) = (&self.decoder, &self.decoder.descriptor);
        let (v, vp, softcap) = (d.vocab, d.padded_vocab(), d.softcap);
        let layout = self.layout_of(inputs.len(), 0);
        let mut words = engine.host_buffer(layout.words())?;
        words.fill(0);
        let set =
            |to: &mut [i32], tokens: &[u32]| to.iter_mut().zip(tokens).for_each(|(to, &token)| *to = token as i32);
        set(&mut words, inputs);
        set(&mut words[layout.targets()], &text[1..]);
        layout.sort(&mut words);
        engine.load_batch(model.batch.slice(0, layout.words()), layout, words)?;
        model.forward(engine, layout, &mut Unsharded)?;
        engine.zero(model.losses.slice(0, layout.t))?;
        let targets = layout.tensor(model.batch, layout.targets());
        for first in (0..inputs.len()).step_by(model.logit_rows()) {
            let rows = model.logit_rows().min(inputs.len() - first);
            let logits = model.logits(engine, first..first + rows)?;
            let values = engine.read(logits)?;
            let (losses, targets) = (model.losses.slice(first, rows), targets.slice(first, rows));
            engine.run(Classifier { logits, losses, targets, v, vp, dloss: None, softcap, fp8: None })?;
            for (row, loss) in values.chunks_exact(vp).zip(engine.read(losses)?) {
                each(&row[..v], loss);
            }
        }
        Ok(())
    }

    /// Returns the layout of `tokens` tokens after `past` ones.
    fn layout_of(&self, tokens: usize, past: usize) -> BatchLayout {
        BatchLayout::new(1, tokens.next_multiple_of(PADDING).min(self.cache.capacity - past))
    }

    /// Lets the engine time the GEMMs of a step, and the step in one launch and with separate kernels, and choose the fastest
    /// implementation of each.
    ///
    /// The memory is zero afterwards, parameters included: load the model after it.
    pub fn tune(&self, engine: &mut dyn Engine) -> Result<Tuning> {
        engine.tune(false, &mut |engine| self.decode(engine))
    }

    /// Returns the logits (B, Vp) of the last step, before softcap, penalty and temperature.
    pub fn logits(&self) -> Tensor {
        self.decoder.logits.slice(0, self.cache.slot_count * self.decoder.descriptor.padded_vocab())
    }

    /// Computes one token of every slot: the pass of [`Decoder::forward`] for B rows of different positions.
    fn decode(&self, engine: &mut dyn Engine) -> Result<()> {
        let mut recorder = StepRecorder::new(engine, self.cache.step);
        self.decode_operations(&mut recorder)?;
        recorder.finish()
    }

    fn decode_operations(&self, engine: &mut dyn Engine) -> Result<()> {
        let (model, rows) = (&self.decoder, self.cache.slot_count);
        let pass = DecodePass { model, rows, cache: self.cache };
        let first = self.embed(engine)?;
        let mut residual = first;
        for (l, layer) in model.layers(Rows::new(rows)).iter().enumerate() {
            residual = model.enter_layer(engine, l, [residual, first])?;
            for sublayer in layer {
                sublayer.decode(engine, &pass, residual)?;
                residual = sublayer.output();
            }
            model.leave_layer(engine, l, residual)?;
        }
        let residual = model.leave_layers(engine, residual, residual)?;
        self.sample(engine, residual)
    }

    /// Embeds the newest tokens and returns the residual stream of the first layer.
    fn embed(&self, engine: &mut dyn Engine) -> Result<Tensor> {
        let (model, rows, c) = (&self.decoder, self.cache.slot_count, self.decoder.descriptor.channels);
        let (wte, wpe) = (model.param(Param::Wte, 0), model.optional(Param::Wpe, 0));
        let out = model.encoded.slice(0, rows * c);
        engine.run(DecodeEmbed { out, slots: self.cache.slots, wte, wpe, c })?;
        let embedded = model.norm_embeddings(engine, out)?;
        let Some(before) = model.stream.before() else { return Ok(embedded) };
        let before = before.slice(0, rows * c);
        let first = model.smear(engine, BatchLayout::new(rows, 1), embedded, Some(before))?;
        engine.copy(before, embedded)?;
        Ok(first)
    }

    /// Sets what a smear adds to the token after `text` in a slot: the embedding of the last token of `text`, or 0 if it is empty.
    fn set_text_before(&self, engine: &mut dyn Engine, slot: usize, text: &[u32]) -> Result<()> {
        let (model, c) = (&self.decoder, self.decoder.descriptor.channels);
        let Some(before) = model.stream.before().map(|before| before.slice(slot * c, c)) else { return Ok(()) };
        let Some((&token, earlier)) = text.split_last() else { return engine.zero(before) };
        let layout = BatchLayout::new(1, 1);
        let mut words = engine.host_buffer(layout.words())?;
        words.fill(0);
        words[0] = token as i32;
        layout.sort(&mut words);
        engine.load_batch(model.batch.slice(0, layout.words()), layout, words)?;
        let embedded = model.embed_tokens(engine, earlier.len(), layout)?;
        engine.copy(before, embedded)
    }

    /// Computes the logits and chooses the next tokens.
    fn sample(&self, engine: &mut dyn Engine, residual: Tensor) -> Result<()> {
        let (model, d, rows) = (&self.decoder, &self.decoder.descriptor, self.cache.slot_count);
        let (v, vp, softcap) = (d.vocab, d.padded_vocab(), d.softcap);
        let norm = model.final_norm.rows(rows, d.channels);
        let (weight, weight_scale) = model.decoded_weight(model.head_param(), 0);
        let matmul = MatmulForward::new([self.logits(), norm.out, weight], MatmulShape { rows, c: d.channels, oc: vp });
        engine.run(DecodeMatmul { norm: Some(model.norm_of(&norm, residual, None)), matmul, weight_scale })?;
        let Cache { slots, seen, sampled, scratch, exchange, .. } = self.cache;
        let (logits, capacity) = (self.logits(), self.cache.capacity);
        engine.run(SampleTokens { sampled, slots, seen, scratch, exchange, logits, v, vp, capacity, softcap })
    }
}
