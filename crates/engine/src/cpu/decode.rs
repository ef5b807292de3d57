//! Text generation with a KV cache, and matmuls of few rows.

use super::arena::{Arena, optional};
use super::{activation, encoder, matmul as linear, norm, quantize, rotary};
use crate::Result;
use crate::ops::{
    AttentionShape, CacheFill, CacheRead, DecodeAttention, DecodeEmbed, DecodeMatmul, Epilogue, MatmulForward,
    MatmulShape, SampleTokens, Slot, SlotSampling,
};
use anyhow::ensure;
use rayon::prelude::*;

/// Maximum number of rows of a matmul that reads the weights once for all rows. More rows amortize the copies of a blocked GEMM.
const FEW_ROWS: usize = 16;

/// Output channels of one task of a matmul of few rows.
const CHANNELS: usize = 32;

/// Sums that a dot product computes side by side: enough vectors to hide the latency of additions.
const SUMS: usize = 32;

/// Reads the slots of a tensor's words.
fn slots(words: &[f32]) -> impl Iterator<Item = Slot> {
    words.as_chunks::<{ Slot::WORDS }>().0.iter().map(|words| Slot::of_words(words.map(|x| x.to_bits().cast_signed())))
}

/// Returns a slot's position if it is below `most`. An idle slot has none.
fn position(slot: &Slot, most: usize) -> Result<Option<usize>> {
    let position = usize::try_from(slot.position).ok();
    ensure!(
        position.is_none_or(|position| position < most),
        "slot: expected a position below {most}, found {}",
        slot.position
    );
    Ok(position)
}

pub(super) fn embed(arena: &mut Arena, op: DecodeEmbed) -> Result<()> {
    let DecodeEmbed { out, slots: words, wte, wpe, c } = op;
    let b = words.len / Slot::WORDS;
    let vocab = encoder::embedding_rows("wte", wte, c)?;
    let positions = wpe.map_or(Ok(0), |wpe| encoder::embedding_rows("wpe", wpe, c))?;
    let operands = [
        ("out", out, b * c),
        ("slots", words, b * Slot::WORDS),
        ("wte", wte, wte.len),
        optional("wpe", wpe, positions * c),
    ];
    let [out, words, wte, wpe] = arena.split("decode_embed", operands)?;
    for (out, slot) in out.chunks_mut(c).zip(slots(words)) {
        encoder::check_tokens(&[slot.token], vocab)?;
        out.copy_from_slice(&wte[slot.token as usize * c..][..c]);
        if positions > 0 {
            let row = &wpe[position(&slot, positions)?.unwrap_or(0) * c..][..c];
            out.iter_mut().zip(row).for_each(|(out, pe)| *out += pe);
        }
    }
    Ok(())
}

pub(super) fn matmul(arena: &mut Arena, op: &DecodeMatmul) -> Result<()> {
    if let Some(of_input) = &op.norm {
        norm::forward(arena, of_input)?;
    }
    let scale = op.weight_scale.map(|scale| quantize::scalar(arena, "scale", scale)).transpose()?;
    if scale.is_none() && op.matmul.shape.rows > FEW_ROWS {
        return linear::forward(arena, &op.matmul);
    }
    few_rows(arena, &op.matmul, scale.unwrap_or(1.0))
}

/// Computes a linear layer of few rows, with the weight times `scale`. It reads each weight once, which is all that takes time.
fn few_rows(arena: &mut Arena, op: &MatmulForward, scale: f32) -> Result<()> {
    let MatmulForward { out, inp, weight, bias, epilogue, shape: MatmulShape { rows, c, oc }, .. } = *op;
    let (residual, activation) = match epilogue {
        Epilogue::None => (None, None),
        Epilogue::Residual(residual) => (Some(residual), None),
        Epilogue::Activation(activation, _) => (None, Some(activation)),
    };
    let columns = oc / activation.map_or(1, crate::ops::Activation::inputs);
    let operands = [
        ("out", out, rows * columns),
        ("inp", inp, rows * c),
        ("weight", weight, oc * c),
        optional("bias", bias, oc),
        optional("residual", residual, rows * oc),
    ];
    let [out, inp, weight, bias, residual] = arena.split("decode_matmul", operands)?;
    // (OC, rows), so that a task writes contiguous memory.
    let mut sums = vec![0.0f32; oc * rows];
    sums.par_chunks_mut(CHANNELS * rows).zip(weight.par_chunks(CHANNELS * c)).for_each(|(sums, weight)| {
        for (sums, weight) in sums.chunks_mut(rows).zip(weight.chunks(c)) {
            for (sum, inp) in sums.iter_mut().zip(inp.chunks(c)) {
                *sum = dot(weight, inp) * scale;
            }
        }
    });
    let value = |row: usize, column: usize| sums[column * rows + row] + bias.get(column).copied().unwrap_or(0.0);
    for (row, out) in out.chunks_mut(columns).enumerate() {
        let Some(activation) = activation else {
            for (column, out) in out.iter_mut().enumerate() {
                *out = value(row, column) + residual.get(row * oc + column).copied().unwrap_or(0.0);
            }
            continue;
        };
        let preactivation: Vec<f32> = (0..oc).map(|column| value(row, column)).collect();
        activation::forward(activation, out, &preactivation, columns);
    }
    Ok(())
}

/// Returns Σ a · b, in an order that depends on the length only.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<SUMS>(), b.as_chunks::<SUMS>());
    let mut sums = [0.0f32; SUMS];
    for (a, b) in a.iter().zip(b) {
        for i in 0..SUMS {
            sums[i] += a[i] * b[i];
        }
    }
    let rest: f32 = a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum();
    let mut width = SUMS / 2;
    while width > 0 {
        for i in 0..width {
            sums[i] += sums[i + width];
        }
        width /= 2;
    }
    sums[0] + rest
}

pub(super) fn cache_fill(arena: &mut Arena, op: CacheFill) -> Result<()> {
    let CacheFill { keys, values, qkv, shape, first: first_position, capacity } = op;
    let AttentionShape { b, t, heads, kv_heads, head_size: hs } = shape;
    shape.check()?;
    ensure!(
        b == 1 && capacity > 0,
        "cache: expected one sequence and a position of the cache, found {b} and {capacity}"
    );
    let (row, len) = (shape.packed_heads() * hs, kv_heads * capacity * hs);
    let operands = [("keys", keys, len), ("values", values, len), ("qkv", qkv, t * row)];
    let [keys, values, qkv] = arena.split("cache_fill", operands)?;
    for (first, cache) in [(heads, keys), (heads + kv_heads, values)] {
        cache.par_chunks_mut(capacity * hs).enumerate().for_each(|(head, cache)| {
            for (token, row) in qkv.chunks(row).enumerate().skip(t.saturating_sub(capacity)) {
                let place = (first_position + token) % capacity;
                cache[place * hs..][..hs].copy_from_slice(&row[(first + head) * hs..][..hs]);
            }
        });
    }
    Ok(())
}

pub(super) fn cache_read(arena: &mut Arena, op: CacheRead) -> Result<()> {
    let CacheRead { qkv, keys, values, shape, capacity } = op;
    let AttentionShape { b, t, heads, kv_heads, head_size: hs } = shape;
    shape.check()?;
    ensure!(
        b == 1 && capacity > 0,
        "cache: expected one sequence and a position of the cache, found {b} and {capacity}"
    );
    let (row, len) = (shape.packed_heads() * hs, kv_heads * capacity * hs);
    let operands = [("qkv", qkv, t * row), ("keys", keys, len), ("values", values, len)];
    let [qkv, keys, values] = arena.split("cache_read", operands)?;
    let (keys, values) = (&*keys, &*values);
    qkv.par_chunks_mut(row).enumerate().with_min_len(16).for_each(|(position, row)| {
        row.fill(0.0);
        if t - position > capacity {
            return;
        }
        for (first, cache) in [(heads, keys), (heads + kv_heads, values)] {
            for (head, cache) in cache.chunks(capacity * hs).enumerate() {
                row[(first + head) * hs..][..hs].copy_from_slice(&cache[position % capacity * hs..][..hs]);
            }
        }
    });
    Ok(())
}

pub(super) fn attention(arena: &mut Arena, op: &DecodeAttention) -> Result<()> {
    let DecodeAttention { out, qkv, keys, values, slots: words, rotation, shape, .. } = *op;
    let AttentionShape { b, t, heads, kv_heads, head_size: hs } = shape;
    shape.check()?;
    let cache = b * kv_heads * t * hs;
    let table = rotation.map(|rotation| rotation.table);
    let most = table.map_or(usize::MAX, |table| table.len / hs);
    let [q_weight, k_weight] = rotary::split(rotation.and_then(|rotation| rotation.weights()));
    let [q_len, k_len] = rotation.map_or([0; 2], |rotation| rotation.weight_lengths(shape));
    let operands = [
        ("out", out, b * heads * hs),
        ("qkv", qkv, b * shape.packed_heads() * hs),
        ("keys", keys, cache),
        ("values", values, cache),
        ("slots", words, b * Slot::WORDS),
        optional("table", table, table.map_or(0, |table| table.len)),
        optional("q weight", q_weight, q_len),
        optional("k weight", k_weight, k_len),
    ];
    let [out, qkv, keys, values, words, table, q_weight, k_weight] = arena.split("decode_attention", operands)?;
    let positions = slots(words).map(|slot| position(&slot, most)).collect::<Result<Vec<_>>>()?;
    for (row, &position) in qkv.chunks_mut(shape.packed_heads() * hs).zip(&positions) {
        let Some(rotation) = rotation else { break };
        let Some(position) = position else { continue };
        rotary::forward_row(row, &table[position * hs..][..hs], [q_weight, k_weight], &rotation, shape);
    }
    let (qkv, group) = (&*qkv, heads / kv_heads);
    let caches = keys.par_chunks_mut(t * hs).zip(values.par_chunks_mut(t * hs));
    out.par_chunks_mut(group * hs).zip(caches).enumerate().for_each(|(i, (out, (keys, values)))| {
        let (row, kv) = (&qkv[i / kv_heads * shape.packed_heads() * hs..], i % kv_heads);
        let Some(position) = positions[i / kv_heads] else { return out.fill(0.0) };
        let head = |h: usize| &row[h * hs..][..hs];
        let (at, len) = (position % t * hs, (position + 1).min(t) * hs);
        keys[at..][..hs].copy_from_slice(head(heads + kv));
        values[at..][..hs].copy_from_slice(head(heads + kv_heads + kv));
        for (g, out) in out.chunks_mut(hs).enumerate() {
            attend(out, head(kv * group + g), &keys[..len], &values[..len]);
        }
    });
    Ok(())
}

/// Computes the attention of one query over keys and values (positions, HS).
fn attend(out: &mut [f32], query: &[f32], keys: &[f32], values: &[f32]) {
    let scale = 1.0 / (query.len() as f32).sqrt();
    let mut weights: Vec<f32> = keys.chunks(query.len()).map(|key| dot(query, key) * scale).collect();
    let max = weights.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut sum = 0.0f64;
    for weight in &mut weights {
        *weight = (*weight - max).exp();
        sum += f64::from(*weight);
    }
    let normalizer = (1.0 / sum) as f32;
    out.fill(0.0);
    for (weight, value) in weights.iter().zip(values.chunks(query.len())) {
        let weight = weight * normalizer;
        out.iter_mut().zip(value).for_each(|(out, value)| *out += weight * value);
    }
}

pub(super) fn sample(arena: &mut Arena, op: SampleTokens) -> Result<()> {
    let SampleTokens { sampled, slots: words, seen, logits, v, vp, capacity, softcap, .. } = op;
    let b = sampled.len;
    ensure!(0 < v && v <= vp, "sample: expected a vocabulary of at most {vp} tokens, found {v}");
    let operands = [
        ("sampled", sampled, b),
        ("slots", words, b * Slot::WORDS),
        ("seen", seen, b * vp),
        ("logits", logits, b * vp),
    ];
    let [sampled, words, seen, logits] = arena.split("sample_tokens", operands)?;
    let rows = logits.par_chunks(vp).zip(seen.par_chunks_mut(vp)).zip(words.par_chunks_mut(Slot::WORDS)).zip(sampled);
    rows.for_each(|(((logits, seen), words), sampled)| {
        let Some(mut slot) = slots(words).next() else { return };
        *sampled = 0.0;
        if slot.position < 0 {
            return;
        }
        let mut scores: Vec<f32> =
            logits[..v].iter().map(|&x| softcap.map_or(x, |cap| cap * (x / cap).tanh())).collect();
        let token = choose(&mut scores, |token| seen[token].to_bits() != 0, &slot);
        (slot.token, slot.position) = (token as i32, (slot.position + 1).min(capacity as i32 - 1));
        seen[token] = f32::from_bits(1);
        *sampled = token as f32;
        for (word, new) in words.iter_mut().zip(slot.words()) {
            *word = f32::from_bits(new.cast_unsigned());
        }
    });
    Ok(())
}

/// Returns the index of the largest score, the first of several, or 0 if none is a number.
fn argmax(scores: impl Iterator<Item = f32>) -> usize {
    scores.enumerate().fold((0, f32::NEG_INFINITY), |best, (i, x)| if x > best.1 { (i, x) } else { best }).0
}

/// Chooses a token by a slot's settings. The scores are lost.
fn choose(scores: &mut [f32], seen: impl Fn(usize) -> bool, slot: &Slot) -> usize {
    let SlotSampling { repetition_penalty, temperature, top_k, top_p, min_p } = slot.sampling;
    for (token, score) in scores.iter_mut().enumerate() {
        if repetition_penalty.to_bits() != 1f32.to_bits() && seen(token) {
            *score = if *score > 0.0 { *score / repetition_penalty } else { *score * repetition_penalty };
        }
    }
    let best = argmax(scores.iter().copied());
    if temperature <= 0.0 || !scores[best].is_finite() {
        return best;
    }
    for score in scores.iter_mut() {
        *score /= temperature;
    }
    let max = scores[best];
    let mut least = f32::NEG_INFINITY;
    let filters = top_k > 0 || top_p < 1.0;
    if filters {
        let mut sorted: Vec<f32> = scores.iter().copied().filter(|score| !score.is_nan()).collect();
        sorted.sort_unstable_by(|a, b| b.total_cmp(a));
        if top_k > 0 {
            least = sorted[(top_k as usize).min(sorted.len()) - 1];
            // Scores equal to the last one are kept.
            sorted.truncate(sorted.partition_point(|&score| score >= least));
        }
        if top_p < 1.0 {
            let weights: Vec<f64> = sorted.iter().map(|score| f64::from(score - max).exp()).collect();
            let target = f64::from(top_p) * weights.iter().sum::<f64>();
            let mut sum = 0.0;
            let enough = weights.iter().position(|weight| {
                sum += weight;
                sum >= target
            });
            least = least.max(sorted[enough.unwrap_or(sorted.len() - 1)]);
        }
    }
    if min_p > 0.0 {
        least = least.max((max + min_p.ln()).min(max));
    }
    let seed = gpu::noise::squirrel5(slot.position as u32, slot.seed);
    argmax(scores.iter().enumerate().map(|(token, &score)| {
        if score >= least { score + gpu::decode::sample::gumbel(token as u32, seed) } else { f32::NEG_INFINITY }
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the relative frequency of each token over many seeds.
    fn frequencies(logits: &[f32], sampling: SlotSampling) -> Vec<f64> {
        let n = 20_000;
        let mut counts = vec![0; logits.len()];
        for seed in 0..n {
            let slot = Slot { token: 0, position: 3, seed, sampling };
            counts[choose(&mut logits.to_vec(), |_| false, &slot)] += 1;
        }
        counts.into_iter().map(|count| f64::from(count) / f64::from(n)).collect()
    }

    fn assert_close(got: &[f64], expected: &[f64]) {
        // Three standard deviations of a frequency are at most 0.011.
        assert!(got.iter().zip(expected).all(|(a, b)| (a - b).abs() < 0.012), "{got:?}, expected {expected:?}");
    }

    #[test]
    fn token_frequencies_match_the_filtered_softmax() {
        let logits = [1.0f32, 3.0, 2.0, 6.0].map(f32::ln);
        let plain = SlotSampling { temperature: 1.0, ..SlotSampling::GREEDY };
        assert_close(&frequencies(&logits, plain), &[1.0 / 12.0, 3.0 / 12.0, 2.0 / 12.0, 6.0 / 12.0]);
        let two = &[0.0, 1.0 / 3.0, 0.0, 2.0 / 3.0];
        assert_close(&frequencies(&logits, SlotSampling { top_k: 2, ..plain }), two);
        // 6/12 are not enough, 9/12 are.
        assert_close(&frequencies(&logits, SlotSampling { top_p: 0.7, ..plain }), two);
        assert_close(&frequencies(&logits, SlotSampling { min_p: 0.4, ..plain }), two);
        assert_close(&frequencies(&logits, SlotSampling { top_p: 0.0, ..plain }), &[0.0, 0.0, 0.0, 1.0]);
        // Of the two most likely tokens, the first has a probability of 2/3.
        assert_close(&frequencies(&logits, SlotSampling { top_k: 2, top_p: 0.6, ..plain }), &[0.0, 0.0, 0.0, 1.0]);
        let half = SlotSampling { temperature: 0.5, ..plain };
        assert_close(&frequencies(&logits, half), &[1.0 / 50.0, 9.0 / 50.0, 4.0 / 50.0, 36.0 / 50.0]);
        assert_close(&frequencies(&logits, SlotSampling::GREEDY), &[0.0, 0.0, 0.0, 1.0]);
        for shift in [2000.0, -2000.0] {
            let shifted = logits.map(|logit| logit + shift);
            assert_close(&frequencies(&shifted, SlotSampling { top_k: 2, ..plain }), two);
        }
    }

    #[test]
    fn the_penalty_makes_seen_tokens_less_likely() {
        let slot = |penalty| {
            let sampling = SlotSampling { repetition_penalty: penalty, ..SlotSampling::GREEDY };
            Slot { token: 0, position: 0, seed: 0, sampling }
        };
        assert_eq!(choose(&mut [2.0, 1.5, -1.0], |token| token == 0, &slot(1.0)), 0);
        assert_eq!(choose(&mut [2.0, 1.5, -1.0], |token| token == 0, &slot(1.4)), 1);
        // A negative logit becomes smaller, too.
        assert_eq!(choose(&mut [-1.0, -1.1, -9.0], |token| token == 0, &slot(1.2)), 1);
    }

    #[test]
    fn non_finite_logits_still_give_a_token() {
        let sampling = SlotSampling { temperature: 1.0, top_k: 2, top_p: 0.9, ..SlotSampling::GREEDY };
        let slot = Slot { token: 0, position: 0, seed: 0, sampling };
        for logits in [[f32::NAN; 3], [f32::NEG_INFINITY; 3], [f32::INFINITY; 3], [f32::NAN, 1.0, 2.0]] {
            assert!(choose(&mut logits.to_vec(), |_| false, &slot) < 3);
        }
    }
}
