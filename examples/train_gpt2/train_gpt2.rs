//! Trains GPT-2 on a CPU: one file, the standard library only.
//!
//! ```text
//! cargo run --release -p train_gpt2                      or    rustc -O train_gpt2.rs && ./train_gpt2
//! cargo run --release -p train_gpt2 -- MODEL TRAIN VAL         continue from a model file, on token files
//! cargo run --release -p train_gpt2 -- test MODEL STATE [LOSSES]   compare with a reference
//! ```
//!
//! It reads the files of llm.c: a model (`gpt2_124M.bin`), a tokenizer (`gpt2_tokenizer.bin`), token files, and the debug state of
//! `test`. Without arguments it reads them where llm.c has them. If there is no model, it trains a small one of bytes on the Rust and
//! Markdown files below the current directory. With `RUSTFLAGS='-C target-cpu=native'`, a step takes a third of the time.
//!
//! Letters in shapes: B sequences, T tokens of a sequence, C channels, NH heads of HS = C / NH channels, L layers, V tokens of the
//! vocabulary, Vp the same rounded up to a multiple of 128. Every tensor is a row-major array: in (B, T, C), c varies fastest.
//!
//! The model is `forward`, its derivative `backward`; below most `NAME_forward` is a `NAME_backward`. The loop, `train`, is at the end.
//!
//! Invariants:
//! - All tensors are allocated before the first step. Only the copies that a matrix multiplication makes are not.
//! - A tensor `dx` is the derivative of the mean loss with respect to `x`. Gradients of parameters are added (`+=`) to what is there:
//!   a parameter may be used twice, as wte is. Gradients of activations are overwritten, except for that of the residual stream.
//! - Threads share work by rows or columns of what they compute. No result depends on their number.

use std::io::Write;
use std::path::Path;
use std::time::Instant;
use std::{fs, thread};

type Result<T> = std::result::Result<T, String>;

/// Prints a line. Ends the program if nothing reads its output anymore.
macro_rules! say {
    ($($text:tt)*) => { if writeln!(std::io::stdout(), $($text)*).is_err() { std::process::exit(1) } };
}

// -------- The model: sizes, tensors, forward and backward pass --------

/// The sizes of a model, and of the batches that it reads.
#[derive(Clone, Copy)]
struct Sizes {
    b: usize,
    t: usize,
    c: usize,
    nh: usize,
    l: usize,
    v: usize,
    vp: usize,
    /// Maximum number of tokens in a sequence.
    max_t: usize,
}

/// Declares structs of tensors by their shapes.
macro_rules! tensors {
    ($($(#[$doc:meta])* $name:ident($sizes:pat) { $($(#[$tensor_doc:meta])* $tensor:ident: $shape:expr,)* })*) => {$(
        $(#[$doc])*
        struct $name {
            $($(#[$tensor_doc])* $tensor: Vec<f32>,)*
        }

        impl $name {
            fn zeros($sizes: Sizes) -> Self {
                Self { $($tensor: vec![0.0; $shape.iter().product()],)* }
            }

            /// Returns each tensor with its name, in the order of the declaration.
            #[allow(dead_code, reason = "not used for every struct")]
            fn tensors(&mut self) -> Vec<(&'static str, &mut Vec<f32>)> {
                vec![$((stringify!($tensor), &mut self.$tensor),)*]
            }
        }
    )*};
}

tensors! {
    /// Embeddings and the last LayerNorm. `wte` is also the weight of the head.
    OuterParameters(Sizes { c, vp, max_t, .. }) {
        wte: [vp, c], wpe: [max_t, c],
        lnfw: [c], lnfb: [c],
    }

    LayerParameters(Sizes { c, .. }) {
        ln1w: [c], ln1b: [c],
        qkvw: [3 * c, c], qkvb: [3 * c],
        attprojw: [c, c], attprojb: [c],
        ln2w: [c], ln2b: [c],
        fcw: [4 * c, c], fcb: [4 * c],
        fcprojw: [c, 4 * c], fcprojb: [c],
    }

    /// What the forward pass computes in a layer and the backward pass reads.
    LayerActivations(Sizes { b, t, c, nh, .. }) {
        ln1: [b, t, c],
        /// Mean, and 1 / standard deviation.
        ln1_stats: [b, t, 2],
        /// Queries, keys and values, each with its heads one after another.
        qkv: [b, t, 3 * c],
        /// The weights with which each position reads the values up to its own.
        att: [b, t, nh, t],
        atty: [b, t, c],
        /// The residual stream after attention.
        residual2: [b, t, c],
        ln2: [b, t, c], ln2_stats: [b, t, 2],
        fch: [b, t, 4 * c], fch_gelu: [b, t, 4 * c],
        /// The residual stream after the MLP.
        residual3: [b, t, c],
    }

    /// The activations before the first layer and after the last one.
    OuterActivations(Sizes { b, t, c, vp, .. }) {
        encoded: [b, t, c],
        lnf: [b, t, c], lnf_stats: [b, t, 2],
        logits: [b, t, vp], probs: [b, t, vp],
    }

    /// The gradients of activations. Layers use the same memory one after another.
    ActivationGradients(Sizes { b, t, c, nh, vp, .. }) {
        logits: [b, t, vp],
        /// Of the residual stream, from the last layer to the first.
        residual: [b, t, c],
        /// Of the output of a LayerNorm.
        ln: [b, t, c],
        qkv: [b, t, 3 * c], att: [b, t, nh, t], atty: [b, t, c],
        fch: [b, t, 4 * c], fch_gelu: [b, t, 4 * c],
    }
}

/// The parameters, or one number for each of them, such as the gradient.
struct Parameters {
    outer: OuterParameters,
    layers: Vec<LayerParameters>,
}

impl Parameters {
    fn zeros(s: Sizes) -> Self {
        Self { outer: OuterParameters::zeros(s), layers: (0..s.l).map(|_| LayerParameters::zeros(s)).collect() }
    }

    /// Returns each parameter with its name, in the order of llm.c's files: all layers of one tensor together.
    fn tensors(&mut self) -> Vec<(&'static str, &mut Vec<f32>)> {
        let mut layers: Vec<_> = self.layers.iter_mut().flat_map(|p| p.tensors().into_iter().enumerate()).collect();
        layers.sort_by_key(|(order, _)| *order);
        let mut tensors = self.outer.tensors();
        let last = tensors.split_off(2);
        tensors.into_iter().chain(layers.into_iter().map(|(_, tensor)| tensor)).chain(last).collect()
    }

    /// Returns initial parameters as in GPT-2: normal weights with deviation 0.02, or 0.02 / sqrt(2 L) where a layer adds to the residual.
    fn random(s: Sizes) -> Self {
        let mut params = Self::zeros(s);
        let mut rng = Rng(42);
        for (name, tensor) in params.tensors() {
            match name {
                "wte" | "wpe" | "qkvw" | "fcw" => rng.fill_normal(tensor, 0.02),
                "attprojw" | "fcprojw" => rng.fill_normal(tensor, 0.02 / (2.0 * s.l as f32).sqrt()),
                "ln1w" | "ln2w" | "lnfw" => tensor.fill(1.0),
                _ => {}
            }
        }
        params
    }
}

/// A model with the memory of a training step.
struct Gpt2 {
    sizes: Sizes,
    params: Parameters,
    grads: Parameters,
    /// AdamW's mean of the gradients, m, and of their squares, v.
    m: Parameters,
    v: Parameters,
    layers: Vec<LayerActivations>,
    outer: OuterActivations,
    dacts: ActivationGradients,
}

impl Gpt2 {
    fn new(s: Sizes, params: Parameters) -> Self {
        let layers = (0..s.l).map(|_| LayerActivations::zeros(s)).collect();
        let (outer, dacts) = (OuterActivations::zeros(s), ActivationGradients::zeros(s));
        let [grads, m, v] = [(); 3].map(|()| Parameters::zeros(s));
        Self { sizes: s, params, grads, m, v, layers, outer, dacts }
    }

    /// Computes the logits and the probabilities of the token that follows each of `tokens` (B, T).
    fn forward(&mut self, tokens: &[u16]) {
        let Self { sizes: s, params, layers, outer: o, .. } = self;
        let c = s.c;
        encoder_forward(&mut o.encoded, tokens, &params.outer.wte, &params.outer.wpe, *s);
        let mut residual = &o.encoded;
        for (p, a) in params.layers.iter().zip(layers) {
            layernorm_forward(&mut a.ln1, &mut a.ln1_stats, residual, &p.ln1w, &p.ln1b);
            matmul_forward(&mut a.qkv, &a.ln1, &p.qkvw, Some(&p.qkvb), c);
            attention_forward(&mut a.atty, &mut a.att, &a.qkv, *s);
            matmul_forward(&mut a.residual2, &a.atty, &p.attprojw, Some(&p.attprojb), c);
            add_scaled(&mut a.residual2, residual, 1.0);
            layernorm_forward(&mut a.ln2, &mut a.ln2_stats, &a.residual2, &p.ln2w, &p.ln2b);
            matmul_forward(&mut a.fch, &a.ln2, &p.fcw, Some(&p.fcb), c);
            gelu_forward(&mut a.fch_gelu, &a.fch);
            matmul_forward(&mut a.residual3, &a.fch_gelu, &p.fcprojw, Some(&p.fcprojb), 4 * c);
            add_scaled(&mut a.residual3, &a.residual2, 1.0);
            residual = &a.residual3;
        }
        layernorm_forward(&mut o.lnf, &mut o.lnf_stats, residual, &params.outer.lnfw, &params.outer.lnfb);
        matmul_forward(&mut o.logits, &o.lnf, &params.outer.wte, None, c);
        softmax_forward(&mut o.probs, &o.logits, *s);
    }

    /// Adds the gradients of the mean loss of the last forward pass to `grads`: that of wte first as head, at the end as embedding.
    fn backward(&mut self, tokens: &[u16], targets: &[u16]) {
        let Self { sizes: s, params, grads, layers, outer: o, dacts: d, .. } = self;
        let c = s.c;
        crossentropy_softmax_backward(&mut d.logits, &o.probs, targets, *s);
        matmul_backward(&mut d.ln, &mut grads.outer.wte, None, &d.logits, &o.lnf, &params.outer.wte, c);
        d.residual.fill(0.0);
        let (residual, dw, db) = (&layers[s.l - 1].residual3, &mut grads.outer.lnfw, &mut grads.outer.lnfb);
        layernorm_backward(&mut d.residual, dw, db, &d.ln, residual, &params.outer.lnfw, &o.lnf_stats);
        for i in (0..s.l).rev() {
            let (p, g, a) = (&params.layers[i], &mut grads.layers[i], &layers[i]);
            // d.residual is the gradient of residual3. The skip passes it on unchanged; layernorm_backward adds the branch's gradient.
            let dbias = Some(&mut g.fcprojb[..]);
            matmul_backward(&mut d.fch_gelu, &mut g.fcprojw, dbias, &d.residual, &a.fch_gelu, &p.fcprojw, 4 * c);
            gelu_backward(&mut d.fch, &a.fch, &d.fch_gelu);
            matmul_backward(&mut d.ln, &mut g.fcw, Some(&mut g.fcb), &d.fch, &a.ln2, &p.fcw, c);
            let (dw, db) = (&mut g.ln2w, &mut g.ln2b);
            layernorm_backward(&mut d.residual, dw, db, &d.ln, &a.residual2, &p.ln2w, &a.ln2_stats);
            // Now d.residual is the gradient of residual2.
            let dbias = Some(&mut g.attprojb[..]);
            matmul_backward(&mut d.atty, &mut g.attprojw, dbias, &d.residual, &a.atty, &p.attprojw, c);
            attention_backward(&mut d.qkv, &mut d.att, &d.atty, &a.qkv, &a.att, *s);
            matmul_backward(&mut d.ln, &mut g.qkvw, Some(&mut g.qkvb), &d.qkv, &a.ln1, &p.qkvw, c);
            let residual = if i == 0 { &o.encoded } else { &layers[i - 1].residual3 };
            let (dw, db) = (&mut g.ln1w, &mut g.ln1b);
            layernorm_backward(&mut d.residual, dw, db, &d.ln, residual, &p.ln1w, &a.ln1_stats);
        }
        encoder_backward(&mut grads.outer.wte, &mut grads.outer.wpe, &d.residual, tokens, *s);
    }

    fn zero_grad(&mut self) {
        self.grads.tensors().into_iter().for_each(|(_, tensor)| tensor.fill(0.0));
    }

    /// Updates the parameters by their gradients. `step` counts from 1.
    fn update(&mut self, optimizer: &AdamW, step: i32) {
        let (grads, m, v) = (self.grads.tensors(), self.m.tensors(), self.v.tensors());
        for ((((_, param), (_, grad)), (_, m)), (_, v)) in self.params.tensors().into_iter().zip(grads).zip(m).zip(v) {
            optimizer.update(param, grad, m, v, step);
        }
    }
}

// -------- Operations --------

/// Returns how many of `n` things a thread has.
fn part_of(n: usize) -> usize {
    n.div_ceil(thread::available_parallelism().map_or(1, std::num::NonZero::get))
}

/// Calls `f(first row, rows)` for parts of `out`, whose rows have `width` elements. Each thread has one part.
fn parallel(out: &mut [f32], width: usize, f: impl Fn(usize, &mut [f32]) + Sync) {
    let rows = part_of(out.len() / width);
    thread::scope(|scope| {
        let f = &f;
        for (i, part) in out.chunks_mut(rows * width).enumerate() {
            scope.spawn(move || f(i * rows, part));
        }
    });
}

/// encoded[b, t] = wte[token[b, t]] + wpe[t]
fn encoder_forward(out: &mut [f32], tokens: &[u16], wte: &[f32], wpe: &[f32], s: Sizes) {
    for (i, (out, &token)) in out.chunks_mut(s.c).zip(tokens).enumerate() {
        out.copy_from_slice(row(wte, token as usize, s.c));
        add_scaled(out, row(wpe, i % s.t, s.c), 1.0);
    }
}

fn encoder_backward(dwte: &mut [f32], dwpe: &mut [f32], dout: &[f32], tokens: &[u16], s: Sizes) {
    for (i, (dout, &token)) in dout.chunks(s.c).zip(tokens).enumerate() {
        add_scaled(row_mut(dwte, token as usize, s.c), dout, 1.0);
        add_scaled(row_mut(dwpe, i % s.t, s.c), dout, 1.0);
    }
}

/// out = (x - mean) / sqrt(variance + 1e-5) * weight + bias, with the mean and variance of the C channels of one token
fn layernorm_forward(out: &mut [f32], stats: &mut [f32], inp: &[f32], weight: &[f32], bias: &[f32]) {
    let c = weight.len();
    for ((out, x), stats) in out.chunks_mut(c).zip(inp.chunks(c)).zip(stats.chunks_mut(2)) {
        let mean = x.iter().sum::<f32>() / c as f32;
        let variance = x.iter().map(|x| (x - mean) * (x - mean)).sum::<f32>() / c as f32;
        let rstd = 1.0 / (variance + 1e-5).sqrt();
        for i in 0..c {
            out[i] = (x[i] - mean) * rstd * weight[i] + bias[i];
        }
        stats.copy_from_slice(&[mean, rstd]);
    }
}

/// With n = (x - mean) rstd and dn = dout weight:  dx += (dn - mean(dn) - n mean(dn n)) rstd,  dweight += dout n,  dbias += dout
#[rustfmt::skip]
fn layernorm_backward(
    dinp: &mut [f32], dweight: &mut [f32], dbias: &mut [f32], dout: &[f32], inp: &[f32], weight: &[f32], stats: &[f32],
) {
    let c = weight.len();
    for (((dx, dout), x), stats) in dinp.chunks_mut(c).zip(dout.chunks(c)).zip(inp.chunks(c)).zip(stats.chunks(2)) {
        let [mean, rstd] = [stats[0], stats[1]];
        let (mut mean_dn, mut mean_dn_n) = (0.0, 0.0);
        for i in 0..c {
            let (n, dn) = ((x[i] - mean) * rstd, dout[i] * weight[i]);
            mean_dn += dn / c as f32;
            mean_dn_n += dn * n / c as f32;
            dweight[i] += dout[i] * n;
            dbias[i] += dout[i];
        }
        for i in 0..c {
            let (n, dn) = ((x[i] - mean) * rstd, dout[i] * weight[i]);
            dx[i] += (dn - mean_dn - n * mean_dn_n) * rstd;
        }
    }
}

/// out (B T, OC) = inp (B T, C) weight^T + bias, with weight (OC, C)
fn matmul_forward(out: &mut [f32], inp: &[f32], weight: &[f32], bias: Option<&[f32]>, c: usize) {
    let oc = weight.len() / c;
    out.fill(0.0);
    if let Some(bias) = bias {
        out.chunks_mut(oc).for_each(|out| out.copy_from_slice(bias));
    }
    gemm(out, oc, Matrix::new(inp, c), Matrix::new(weight, c).transposed());
}

/// dinp = dout weight,  dweight += dout^T inp,  dbias += the sum of the rows of dout
#[rustfmt::skip]
fn matmul_backward(
    dinp: &mut [f32], dweight: &mut [f32], dbias: Option<&mut [f32]>, dout: &[f32], inp: &[f32], weight: &[f32], c: usize,
) {
    let oc = weight.len() / c;
    dinp.fill(0.0);
    gemm(dinp, c, Matrix::new(dout, oc), Matrix::new(weight, c));
    gemm(dweight, c, Matrix::new(dout, oc).transposed(), Matrix::new(inp, c));
    if let Some(dbias) = dbias {
        dout.chunks(oc).for_each(|dout| add_scaled(dbias, dout, 1.0));
    }
}

/// Returns the query (0), key (1) or value (2) of head `h` at a position of (B, T).
fn part(qkv: &[f32], which: usize, position: usize, h: usize, s: Sizes) -> &[f32] {
    row(qkv, (position * 3 + which) * s.nh + h, s.c / s.nh)
}

/// Causal self-attention: position t reads the values of the positions t2 <= t of its sequence.
///
/// score[t, t2] = q[t] . k[t2] / sqrt(HS),  att[t] = softmax(score[t]),  out[t] = sum over t2 of att[t, t2] v[t2]
fn attention_forward(out: &mut [f32], att: &mut [f32], qkv: &[f32], s: Sizes) {
    let (t, nh, hs) = (s.t, s.nh, s.c / s.nh);
    parallel(att, nh * t, |first, rows| {
        for (i, att) in rows.chunks_mut(t).enumerate() {
            let (position, h) = (first + i / nh, i % nh);
            let start = position - position % t;
            let (att, future) = att.split_at_mut(position - start + 1);
            let q = part(qkv, 0, position, h, s);
            for (t2, score) in att.iter_mut().enumerate() {
                *score = dot(q, part(qkv, 1, start + t2, h, s)) / (hs as f32).sqrt();
            }
            softmax(att);
            future.fill(0.0);
        }
    });
    let att = &*att;
    parallel(out, nh * hs, |first, rows| {
        for (i, out) in rows.chunks_mut(hs).enumerate() {
            let (position, h) = (first + i / nh, i % nh);
            let start = position - position % t;
            out.fill(0.0);
            for (t2, &att) in row(att, position * nh + h, t)[..=position - start].iter().enumerate() {
                add_scaled(out, part(qkv, 2, start + t2, h, s), att);
            }
        }
    });
}

/// With datt[t, t2] = dout[t] . v[t2]:  dscore[t] = att[t] (datt[t] - att[t] . datt[t]), which replaces datt,
/// dq[t] = sum over t2 of dscore[t, t2] k[t2] / sqrt(HS),  dk[t2] = sum over t of dscore[t, t2] q[t] / sqrt(HS),
/// dv[t2] = sum over t of att[t, t2] dout[t]
fn attention_backward(dqkv: &mut [f32], datt: &mut [f32], dout: &[f32], qkv: &[f32], att: &[f32], s: Sizes) {
    let (t, nh, hs) = (s.t, s.nh, s.c / s.nh);
    parallel(datt, nh * t, |first, rows| {
        for (i, datt) in rows.chunks_mut(t).enumerate() {
            let (position, h) = (first + i / nh, i % nh);
            let start = position - position % t;
            let (datt, dout) = (&mut datt[..=position - start], row(dout, position * nh + h, hs));
            for (t2, datt) in datt.iter_mut().enumerate() {
                *datt = dot(dout, part(qkv, 2, start + t2, h, s));
            }
            let att = &row(att, position * nh + h, t)[..datt.len()];
            let sum = dot(att, datt);
            datt.iter_mut().zip(att).for_each(|(datt, att)| *datt = att * (*datt - sum)); // From here on, datt is dscore.
        }
    });
    let dscore = &*datt;
    // Many positions add to the gradient of one key, so a thread has whole sequences.
    parallel(dqkv, t * 3 * nh * hs, |first_sequence, rows| {
        rows.fill(0.0);
        for (b, dqkv) in rows.chunks_mut(t * 3 * nh * hs).enumerate() {
            let start = (first_sequence + b) * t;
            for (query, h) in (0..t).flat_map(|query| (0..nh).map(move |h| (query, h))) {
                let at = (start + query) * nh + h;
                let (dscore, att, dout) = (row(dscore, at, t), row(att, at, t), row(dout, at, hs));
                let q = part(qkv, 0, start + query, h, s);
                let mut add_to = |which, position, vector, factor| {
                    add_scaled(row_mut(dqkv, (position * 3 + which) * nh + h, hs), vector, factor);
                };
                for t2 in 0..=query {
                    let dqk = dscore[t2] / (hs as f32).sqrt();
                    add_to(0, query, part(qkv, 1, start + t2, h, s), dqk);
                    add_to(1, t2, q, dqk);
                    add_to(2, t2, dout, att[t2]);
                }
            }
        }
    });
}

/// exp(x) for x in -87 .. 88, to 2e-7. Unlike that of the standard library, it is inlined and computed for several numbers at once.
fn exp(x: f32) -> f32 {
    // exp(x) = 2^n exp(r), |r| < 0.35. Adding 1.5 * 2^23 rounds x / ln(2) to n, in the low bits of the sum. 2^n is n + 127, shifted by 23.
    let x = x.clamp(-87.0, 88.0);
    let sum = x * std::f32::consts::LOG2_E + 12_582_912.0;
    let n = sum - 12_582_912.0;
    let r = (x - n * 0.693_359_4) + n * 2.121_944_4e-4; // x - n ln(2), in two parts
    let series = 1.0 + r * (1.0 + r * (0.5 + r * (1.0 / 6.0 + r * (1.0 / 24.0 + r * (1.0 / 120.0 + r / 720.0)))));
    series * f32::from_bits(sum.to_bits().wrapping_add(127) << 23)
}

const GELU_SCALE: f32 = 0.797_884_6; // sqrt(2 / pi)

/// tanh(sqrt(2 / pi) (x + 0.044715 x^3))
fn gelu_tanh(x: f32) -> f32 {
    1.0 - 2.0 / (exp(2.0 * GELU_SCALE * (x + 0.044_715 * x * x * x)) + 1.0)
}

/// out = x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2
fn gelu_forward(out: &mut [f32], inp: &[f32]) {
    parallel(out, 1, |first, out| {
        for (out, &x) in out.iter_mut().zip(&inp[first..]) {
            *out = 0.5 * x * (1.0 + gelu_tanh(x));
        }
    });
}

fn gelu_backward(dinp: &mut [f32], inp: &[f32], dout: &[f32]) {
    parallel(dinp, 1, |first, dinp| {
        for ((dinp, &x), dout) in dinp.iter_mut().zip(&inp[first..]).zip(&dout[first..]) {
            let tanh = gelu_tanh(x);
            let slope = GELU_SCALE * (1.0 + 3.0 * 0.044_715 * x * x);
            *dinp = dout * (0.5 * (1.0 + tanh) + 0.5 * x * (1.0 - tanh * tanh) * slope);
        }
    });
}

/// probs = softmax of the first V logits. Padding has the probability 0.
fn softmax_forward(probs: &mut [f32], logits: &[f32], Sizes { v, vp, .. }: Sizes) {
    parallel(probs, vp, |first, rows| {
        for (i, probs) in rows.chunks_mut(vp).enumerate() {
            probs[..v].copy_from_slice(&row(logits, first + i, vp)[..v]);
            softmax(&mut probs[..v]);
            probs[v..].fill(0.0);
        }
    });
}

/// Returns the mean of -ln(probs[target]).
fn crossentropy_forward(probs: &[f32], targets: &[u16], s: Sizes) -> f32 {
    let losses = targets.iter().enumerate().map(|(i, &target)| -row(probs, i, s.vp)[target as usize].ln());
    losses.sum::<f32>() / targets.len() as f32
}

/// dlogits = (probs - 1 for the target) / (B T)
fn crossentropy_softmax_backward(dlogits: &mut [f32], probs: &[f32], targets: &[u16], Sizes { vp, .. }: Sizes) {
    let scale = 1.0 / targets.len() as f32;
    parallel(dlogits, vp, |first, rows| {
        for (i, dlogits) in rows.chunks_mut(vp).enumerate() {
            dlogits.iter_mut().zip(row(probs, first + i, vp)).for_each(|(dlogit, prob)| *dlogit = prob * scale);
            dlogits[targets[first + i] as usize] -= scale;
        }
    });
}

/// Replaces x by exp(x) / sum(exp(x)). Subtracting the maximum first prevents overflow and does not change the result.
fn softmax(x: &mut [f32]) {
    let max = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    for x in &mut *x {
        *x = exp(*x - max);
    }
    let scale = 1.0 / x.iter().sum::<f32>();
    for x in x {
        *x *= scale;
    }
}

fn row(tensor: &[f32], i: usize, width: usize) -> &[f32] {
    &tensor[i * width..(i + 1) * width]
}

fn row_mut(tensor: &mut [f32], i: usize, width: usize) -> &mut [f32] {
    &mut tensor[i * width..(i + 1) * width]
}

fn add_scaled(out: &mut [f32], inp: &[f32], factor: f32) {
    out.iter_mut().zip(inp).for_each(|(out, inp)| *out += inp * factor);
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    // Eight sums, because the compiler may not reorder the additions of one.
    let (a8, b8) = (a.chunks_exact(8), b.chunks_exact(8));
    let rest: f32 = a8.remainder().iter().zip(b8.remainder()).map(|(a, b)| a * b).sum();
    let mut sums = [0.0; 8];
    for (a, b) in a8.zip(b8) {
        for i in 0..8 {
            sums[i] += a[i] * b[i];
        }
    }
    sums.iter().sum::<f32>() + rest
}

// -------- Matrix multiplication: most of the time --------
// Parts of both matrices that fit in a core's cache are copied into the order in which the innermost loop reads them. That loop computes
// MR x NR elements of the result, which stay in registers: each step of K reads MR + NR numbers for MR * NR multiplications.

/// Rows and columns of the result that are in registers. A register has 4 numbers, with AVX 8, with AVX-512 16.
const MR: usize = 6;
const NR: usize = [8, 16, 32][cfg!(target_feature = "avx") as usize + cfg!(target_feature = "avx512f") as usize];
/// Rows of a block of the left matrix, and its depth: 264 KiB, for the L2 cache.
const MC: usize = 44 * MR;
const KC: usize = 256;

/// A matrix: element (i, j) is `data[i * row_stride + j * col_stride]`.
#[derive(Clone, Copy)]
struct Matrix<'a> {
    data: &'a [f32],
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
}

impl<'a> Matrix<'a> {
    fn new(data: &'a [f32], cols: usize) -> Self {
        Self { data, rows: data.len() / cols, cols, row_stride: cols, col_stride: 1 }
    }

    fn transposed(self) -> Self {
        Self { rows: self.cols, cols: self.rows, row_stride: self.col_stride, col_stride: self.row_stride, ..self }
    }

    /// Copies `W` columns of some rows, from `col` on, to `out`. Columns from `end` on are 0.
    fn pack<const W: usize>(self, out: &mut Vec<[f32; W]>, rows: std::ops::Range<usize>, col: usize, end: usize) {
        out.extend(rows.map(|i| {
            let start = i * self.row_stride + col * self.col_stride;
            std::array::from_fn(|j| if j < end - col { self.data[start + j * self.col_stride] } else { 0.0 })
        }));
    }
}

/// Adds the product of a (M, K) and b (K, N) to out (M, N).
fn gemm(out: &mut [f32], n: usize, a: Matrix, b: Matrix) {
    assert!(out.len() == a.rows * n && a.cols == b.rows && b.cols == n);
    // Threads share the rows of the result, or its columns if there are at least as many. A part has a slice for each of its rows.
    let (rows, cols) = if a.rows > n { (part_of(a.rows), n) } else { (a.rows, part_of(n).next_multiple_of(NR)) };
    thread::scope(|scope| {
        for (i, block) in out.chunks_mut(rows * n).enumerate() {
            let mut parts: Vec<Vec<&mut [f32]>> = (0..n).step_by(cols).map(|_| Vec::new()).collect();
            for row in block.chunks_mut(n) {
                parts.iter_mut().zip(row.chunks_mut(cols)).for_each(|(part, row)| part.push(row));
            }
            for (j, part) in parts.into_iter().enumerate() {
                scope.spawn(move || gemm_part(part, a, b, i * rows, j * cols));
            }
        }
    });
}

/// Adds to `out`, a slice for each row, the block of the product that begins at (first_row, col).
fn gemm_part(mut out: Vec<&mut [f32]>, a: Matrix, b: Matrix, first_row: usize, col: usize) {
    let (a_transposed, cols) = (a.transposed(), out[0].len());
    let (mut a_panels, mut b_panel) = (Vec::new(), Vec::new()); // Panels of MR rows, each [k][MR]; and [k][NR].
    for (row, out) in (first_row..).step_by(MC).zip(out.chunks_mut(MC)) {
        for k in (0..b.rows).step_by(KC) {
            let depth = k..(k + KC).min(b.rows);
            a_panels.clear();
            for i in (row..row + out.len()).step_by(MR) {
                a_transposed.pack::<MR>(&mut a_panels, depth.clone(), i, row + out.len());
            }
            for j in (0..cols).step_by(NR) {
                b_panel.clear();
                b.pack::<NR>(&mut b_panel, depth.clone(), col + j, col + cols);
                for (a_panel, out) in a_panels.chunks(depth.len()).zip(out.chunks_mut(MR)) {
                    let (sums, width) = (multiply(a_panel, &b_panel), NR.min(cols - j));
                    out.iter_mut()
                        .zip(&sums)
                        .for_each(|(out, sums)| add_scaled(&mut out[j..j + width], &sums[..width], 1.0));
                }
            }
        }
    }
}

/// Returns the sums over k of a[k][i] b[k][j].
fn multiply(a: &[[f32; MR]], b: &[[f32; NR]]) -> [[f32; NR]; MR] {
    let mut sums = [[0.0; NR]; MR];
    for (a, b) in a.iter().zip(b) {
        for i in 0..MR {
            for j in 0..NR {
                let sum = sums[i][j];
                sums[i][j] = if cfg!(target_feature = "fma") { a[i].mul_add(b[j], sum) } else { a[i] * b[j] + sum };
            }
        }
    }
    sums
}

// -------- AdamW --------

/// m = beta1 m + (1 - beta1) g,  v = beta2 v + (1 - beta2) g^2,  p -= lr (m' / (sqrt(v') + eps) + decay p),
/// with m' = m / (1 - beta1^step) and v' = v / (1 - beta2^step)
struct AdamW {
    learning_rate: f32,
    beta1: f32,
    beta2: f32,
    eps: f32,
    decay: f32,
}

impl AdamW {
    fn update(&self, param: &mut [f32], grad: &[f32], m: &mut [f32], v: &mut [f32], step: i32) {
        let (correction1, correction2) = (1.0 - self.beta1.powi(step), 1.0 - self.beta2.powi(step));
        let part = part_of(param.len());
        let parts = param.chunks_mut(part).zip(grad.chunks(part)).zip(m.chunks_mut(part)).zip(v.chunks_mut(part));
        thread::scope(|scope| {
            for (((param, grad), m), v) in parts {
                scope.spawn(move || {
                    for (((p, &g), m), v) in param.iter_mut().zip(grad).zip(m).zip(v) {
                        *m = self.beta1 * *m + (1.0 - self.beta1) * g;
                        *v = self.beta2 * *v + (1.0 - self.beta2) * g * g;
                        let direction = (*m / correction1) / ((*v / correction2).sqrt() + self.eps);
                        *p -= self.learning_rate * (direction + self.decay * *p);
                    }
                });
            }
        });
    }
}

// -------- Files: little-endian, with a header of 256 integers of 32 bits --------

/// Reads a file whose header begins with `magic` and one of the `versions`. Returns the header, and the bytes after it.
fn read_file(path: &str, magic: u32, versions: &[u32]) -> Result<(Vec<u32>, Vec<u8>)> {
    let mut bytes = fs::read(path).map_err(|error| format!("{path}: {error}"))?;
    if bytes.len() < 1024 {
        return Err(format!("{path}: expected a header of 1024 bytes, found a file of {} bytes", bytes.len()));
    }
    let body = bytes.split_off(1024);
    let header: Vec<u32> = words(&bytes).collect();
    if header[0] != magic || !versions.contains(&header[1]) {
        return Err(format!(
            "{path}: expected magic number {magic} and version {versions:?}, found {:?}",
            &header[..2]
        ));
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

fn read_model(path: &str) -> Result<(Sizes, Parameters)> {
    let (header, body) = read_file(path, 20_240_326, &[3])?;
    let [max_t, v, l, nh, c, vp] = std::array::from_fn(|i| header[2 + i] as usize);
    if [max_t, v, l, nh, c].contains(&0) || c % nh != 0 || v > vp || v > 1 << 16 {
        return Err(format!("{path}: expected the sizes of a GPT-2, found {:?}", &header[2..8]));
    }
    let wide = c as u128; // A damaged header must not overflow.
    let parameters = wide * (vp + max_t + 2) as u128 + l as u128 * (12 * wide * wide + 13 * wide);
    if parameters * 4 != body.len() as u128 {
        return Err(format!("{path}: expected {} bytes of parameters, found {}", parameters * 4, body.len()));
    }
    let sizes = Sizes { b: 4, t: max_t.min(64), c, nh, l, v, vp, max_t };
    let mut params = Parameters::zeros(sizes);
    let mut rest = &body[..];
    for (_, tensor) in params.tensors() {
        *tensor = take_floats(path, &mut rest, tensor.len())?;
    }
    Ok((sizes, params))
}

fn read_tokens(path: &str) -> Result<Vec<u16>> {
    let (header, body) = read_file(path, 20_240_520, &[1])?;
    if header[2] as usize * 2 != body.len() {
        return Err(format!("{path}: expected {} tokens, found {} bytes", header[2], body.len()));
    }
    Ok(body.chunks(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]])).collect())
}

struct Tokenizer {
    tokens: Vec<Vec<u8>>,
    end_of_text: u16,
}

impl Tokenizer {
    fn read(path: &str) -> Result<Self> {
        let (header, body) = read_file(path, 20_240_328, &[1, 2])?;
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

    /// One token for each byte. A newline separates texts.
    fn bytes() -> Self {
        Self { tokens: (0..=255).map(|byte| vec![byte]).collect(), end_of_text: u16::from(b'\n') }
    }

    /// Prints a token at once.
    fn print(&self, token: u16) {
        let bytes = self.tokens.get(token as usize).map_or(&[][..], |bytes| &bytes[..]);
        if !matches!(bytes, &[byte] if byte.is_ascii_control() && !byte.is_ascii_whitespace()) {
            let _ = std::io::stdout().write_all(bytes).and_then(|()| std::io::stdout().flush());
        }
    }
}

/// Reads batches one after another from the start of the data, and begins again at its end.
struct DataLoader {
    tokens: Vec<u16>,
    batch: usize,
    position: usize,
}

impl DataLoader {
    fn new(tokens: Vec<u16>, s: Sizes, name: &str) -> Result<Self> {
        let batch = s.b * s.t;
        if tokens.len() <= batch {
            return Err(format!("{name}: expected more than {batch} tokens, found {}", tokens.len()));
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

// -------- Random numbers --------

struct Rng(u64); // xorshift64*

impl Rng {
    fn next(&mut self) -> u32 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 32) as u32
    }

    /// Returns a number in [0, 1).
    fn uniform(&mut self) -> f32 {
        (self.next() >> 8) as f32 / 16_777_216.0
    }

    /// Fills `out` with numbers of the normal distribution (Box and Muller, 1958).
    fn fill_normal(&mut self, out: &mut [f32], std: f32) {
        for pair in out.chunks_mut(2) {
            let radius = (-2.0 * (1.0 - self.uniform()).ln()).sqrt();
            let (sin, cos) = (std::f32::consts::TAU * self.uniform()).sin_cos();
            pair.iter_mut().zip([cos, sin]).for_each(|(out, part)| *out = radius * part * std);
        }
    }

    /// Returns index i with probability `probs[i]`.
    fn sample(&mut self, probs: &[f32]) -> usize {
        let (mut sum, uniform) = (0.0, self.uniform());
        let index = probs.iter().position(|prob| {
            sum += prob;
            uniform < sum
        });
        index.unwrap_or(probs.len() - 1)
    }
}

// -------- Training --------

struct Run {
    model: Gpt2,
    train: DataLoader,
    val: DataLoader,
    tokenizer: Option<Tokenizer>,
    steps: usize,
    learning_rate: f32,
}

impl Run {
    /// A run that continues from a model file, on token files, with llm.c's settings.
    fn from_files(model: &str, train: &str, val: &str) -> Result<Self> {
        let (sizes, params) = read_model(model)?;
        let load = |path: &str| {
            let tokens = read_tokens(path)?;
            match tokens.iter().find(|&&token| usize::from(token) >= sizes.v) {
                Some(token) => Err(format!("{path}: expected tokens below {}, found {token}", sizes.v)),
                None => DataLoader::new(tokens, sizes, path),
            }
        };
        let (train, val, model) = (load(train)?, load(val)?, Gpt2::new(sizes, params));
        let tokenizer = Tokenizer::read("gpt2_tokenizer.bin");
        let tokenizer = tokenizer.map_err(|error| eprintln!("{error}; samples are token numbers")).ok();
        Ok(Self { model, train, val, tokenizer, steps: 40, learning_rate: 1e-4 })
    }

    /// A run of a small model of bytes, from random parameters, on the text below the current directory.
    fn from_text() -> Result<Self> {
        let mut text = Vec::new();
        collect_text(Path::new("."), &mut text)?;
        say!("no files of llm.c here: training a small model on {} bytes of text in this directory", text.len());
        let sizes = Sizes { b: 8, t: 64, c: 128, nh: 4, l: 4, v: 256, vp: 256, max_t: 64 };
        let mut tokens: Vec<u16> = text.into_iter().map(u16::from).collect();
        let val = DataLoader::new(tokens.split_off(tokens.len() * 9 / 10), sizes, "the text")?;
        let train = DataLoader::new(tokens, sizes, "the text")?;
        let (model, tokenizer) = (Gpt2::new(sizes, Parameters::random(sizes)), Some(Tokenizer::bytes()));
        Ok(Self { model, train, val, tokenizer, steps: 400, learning_rate: 1e-3 })
    }

    fn train(mut self) {
        let Sizes { max_t, v, vp, l, nh, c, .. } = self.model.sizes;
        say!("[GPT-2]\nmax_seq_len: {max_t}\nvocab_size: {v}\npadded_vocab_size: {vp}");
        let total = |tensors: Vec<(_, &mut Vec<f32>)>| tensors.iter().map(|(_, tensor)| tensor.len()).sum::<usize>();
        say!("num_layers: {l}\nnum_heads: {nh}\nchannels: {c}\nnum_parameters: {}", total(self.model.params.tensors()));
        let (train, val) = (self.train.num_batches(), self.val.num_batches());
        say!("train dataset num_batches: {train}\nval dataset num_batches: {val}");
        let layers: usize = self.model.layers.iter_mut().map(|layer| total(layer.tensors())).sum();
        say!("num_activations: {}", layers + total(self.model.outer.tensors()));
        let optimizer = AdamW { learning_rate: self.learning_rate, beta1: 0.9, beta2: 0.999, eps: 1e-8, decay: 0.0 };
        let mut rng = Rng(1337);
        for step in 0..=self.steps {
            if step % (self.steps / 4) == 0 {
                say!("val loss {:.6}", self.validate());
            }
            if step > 0 && step % (self.steps / 2) == 0 {
                self.generate(&mut rng);
            }
            if step == self.steps {
                break;
            }
            let start = Instant::now();
            let (tokens, targets) = self.train.next_batch();
            self.model.forward(tokens);
            let loss = crossentropy_forward(&self.model.outer.probs, targets, self.model.sizes);
            self.model.zero_grad();
            self.model.backward(tokens, targets);
            self.model.update(&optimizer, step as i32 + 1);
            say!("step {step}: train loss {loss:.6} (took {:.6} ms)", start.elapsed().as_secs_f64() * 1e3);
        }
    }

    /// Returns the mean loss of at most the first five batches of the validation data.
    fn validate(&mut self) -> f32 {
        self.val.position = 0;
        let (mut sum, batches) = (0.0, self.val.num_batches().min(5));
        for _ in 0..batches {
            let (tokens, targets) = self.val.next_batch();
            self.model.forward(tokens);
            sum += crossentropy_forward(&self.model.outer.probs, targets, self.model.sizes);
        }
        sum / batches as f32
    }

    /// Prints sampled text, the first of B sequences. It computes the whole context for every token, without a KV cache.
    fn generate(&mut self, rng: &mut Rng) {
        let Sizes { b, t, v, vp, .. } = self.model.sizes;
        let start = self.tokenizer.as_ref().map_or(v as u16 - 1, |tokenizer| tokenizer.end_of_text);
        let mut tokens = vec![start; b * t];
        say!("generating:\n---");
        for position in 1..t {
            self.model.forward(&tokens);
            tokens[position] = rng.sample(&row(&self.model.outer.probs, position - 1, vp)[..v]) as u16;
            match &self.tokenizer {
                Some(tokenizer) => tokenizer.print(tokens[position]),
                None => say!("{}", tokens[position]),
            }
        }
        say!("\n---");
    }
}

/// Appends the Rust and Markdown files of a directory to `text`, in the order of their names.
fn collect_text(directory: &Path, text: &mut Vec<u8>) -> Result<()> {
    let error = |error| format!("{}: {error}", directory.display());
    let mut paths: Vec<_> = fs::read_dir(directory).map_err(error)?.flatten().map(|entry| entry.path()).collect();
    paths.sort();
    for path in paths {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if path.is_dir() && !path.is_symlink() && !name.starts_with('.') && name != "target" {
            collect_text(&path, text)?;
        } else if name.ends_with(".rs") || name.ends_with(".md") {
            text.extend(fs::read(&path).unwrap_or_default());
        }
    }
    Ok(())
}

/// Compares logits, loss and gradients with a reference in the format of llm.c's debug state: a header with B and T, tokens (B, T),
/// targets (B, T), logits (B, T, V), the loss, the gradients. Then compares AdamW steps with `losses`, a file with a loss in each line.
fn test(model: &str, state: &str, losses: Option<&str>) -> Result<()> {
    let (mut sizes, params) = read_model(model)?;
    let (header, body) = read_file(state, 20_240_327, &[2])?;
    (sizes.b, sizes.t) = (header[2] as usize, header[3] as usize);
    let Sizes { b, t, v, vp, max_t, .. } = sizes;
    if b == 0 || t == 0 || t > max_t || b.saturating_mul(8 * t) > body.len() {
        return Err(format!("{state}: expected tokens of at most {max_t} positions, found B = {b}, T = {t}"));
    }
    let (ids, mut rest) = body.split_at(8 * b * t);
    if let Some(id) = words(ids).find(|&id| id as usize >= v) {
        return Err(format!("{state}: expected token numbers below {v}, found {id}"));
    }
    let ids: Vec<u16> = words(ids).map(|id| id as u16).collect();
    let (tokens, targets) = ids.split_at(b * t);
    let mut next = |n: usize| take_floats(state, &mut rest, n);
    let mut okay = true;
    let mut compare = |name: &str, found: &[f32], expected: &[f32], tolerance: f32| {
        let largest = expected.iter().fold(0.0, |max: f32, x| max.max(x.abs()));
        let differences = found.iter().zip(expected).map(|(a, b)| (a - b).abs() / largest);
        let agreeing = differences.clone().filter(|difference| *difference <= tolerance).count();
        let (wrong, relative) = (found.len() - agreeing, differences.fold(0.0, f32::max));
        let verdict = if wrong == 0 { "OK" } else { "NOT OK" };
        say!("{verdict:6} {name:8} {wrong} of {} differ; largest difference {relative:.1e}", found.len());
        okay &= wrong == 0;
    };

    let mut gpt2 = Gpt2::new(sizes, params);
    gpt2.forward(tokens);
    let logits: Vec<f32> = gpt2.outer.logits.chunks(vp).flat_map(|row| &row[..v]).copied().collect();
    compare("logits", &logits, &next(b * t * v)?, 1e-4);
    compare("loss", &[crossentropy_forward(&gpt2.outer.probs, targets, sizes)], &next(1)?, 1e-5);
    gpt2.backward(tokens, targets); // The gradients were zero.
    for (name, grad) in gpt2.grads.tensors() {
        compare(name, grad, &next(grad.len())?, 1e-4);
    }
    let optimizer = AdamW { learning_rate: 1e-4, beta1: 0.9, beta2: 0.999, eps: 1e-8, decay: 0.01 };
    let losses = match losses {
        Some(path) => fs::read_to_string(path).map_err(|error| format!("{path}: {error}"))?,
        None => LOSSES.to_owned(),
    };
    for (step, expected) in losses.split_whitespace().flat_map(str::parse).enumerate() {
        gpt2.forward(tokens);
        compare(&format!("step {step}"), &[crossentropy_forward(&gpt2.outer.probs, targets, sizes)], &[expected], 1e-5);
        gpt2.zero_grad();
        gpt2.backward(tokens, targets);
        gpt2.update(&optimizer, step as i32 + 1);
    }
    say!("overall okay: {}", i32::from(okay));
    okay.then_some(()).ok_or(format!("{model} does not compute what {state} expects"))
}

/// The losses of GPT-2 124M on the batch of llm.c's debug state, computed by PyTorch.
const LOSSES: &str = "5.270007 4.059707 3.375123 2.800783 2.315382 1.849029 1.394656 0.999147 0.624080 0.376511";

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [train, val] = ["train", "val"].map(|part| format!("dev/data/tinyshakespeare/tiny_shakespeare_{part}.bin"));
    let result = match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["test", model, state, ref losses @ ..] if losses.len() < 2 => test(model, state, losses.first().copied()),
        [model, train, val] => Run::from_files(model, train, val).map(Run::train),
        [] if Path::new("gpt2_124M.bin").exists() => Run::from_files("gpt2_124M.bin", &train, &val).map(Run::train),
        [] => Run::from_text().map(Run::train),
        _ => Err("expected MODEL TRAIN VAL, or test MODEL STATE [LOSSES], or nothing".to_owned()),
    };
    if let Err(error) = result {
        eprintln!("error: {error}");
        std::process::exit(1);
    }
}
