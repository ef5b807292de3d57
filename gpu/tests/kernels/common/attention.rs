//! An f64 reference of causal attention, and checks of properties that hold for every implementation.

use super::{noise, rounded, wide};
use cuda_std::Element;
use cuda_std::emulate::Memory;
use cuda_std::mma::TensorCore;
use gpu::attention::launch::{AttentionSizes, Documents, Mask};
use gpu::attention_wgmma::TILE;

/// Denotes the queries, the first NH heads of qkv.
pub const Q: usize = 0;
/// Denotes the keys, the next KV heads.
pub const K: usize = 1;
/// Denotes the values, the last KV heads.
pub const V: usize = 2;
/// Denotes the gradient of the output, a tensor of its own.
pub const DOUT: usize = 3;

/// Returns a shape of multi-head attention: one key-value head for each query head.
pub fn multi_head(b: usize, t: usize, nh: usize, hs: usize) -> AttentionSizes {
    AttentionSizes { b, t, nh, kv: nh, hs }
}

/// Returns the number of query heads of a key-value head.
fn group(shape: AttentionSizes) -> usize {
    shape.nh / shape.kv
}

/// Lengths of documents: of one token, of a tile or a multiple of one, one more or less, one for the whole sequence, and others.
pub const DOCUMENTS: [&[usize]; 9] =
    [&[1], &[32], &[64], &[128], &[63, 65, 1], &[1000], &[2, 1, 129, 5], &[127, 3, 62, 70, 11], &[33, 31, 1, 95, 97]];

/// The indices of a row: (sequence, position, head). The head of K and V, and of their gradients, is a key-value head.
pub type Place = [usize; 3];

/// Returns the indices of all rows of a part.
pub fn places(AttentionSizes { b, t, nh, kv, .. }: AttentionSizes, part: usize) -> impl Iterator<Item = Place> {
    let heads = if part == K || part == V { kv } else { nh };
    (0..b).flat_map(move |b| (0..t).flat_map(move |t| (0..heads).map(move |h| [b, t, h])))
}

/// qkv (B,T,NH+2KV,HS) and dout (B,T,NH,HS).
#[derive(Clone)]
pub struct Inputs {
    pub shape: AttentionSizes,
    pub qkv: Vec<f64>,
    pub dout: Vec<f64>,
    /// The first position of the document at each position (B, T), if there are documents.
    pub documents: Option<Vec<u32>>,
    /// Number of keys that a query attends to at most.
    pub window: Option<u32>,
}

impl Inputs {
    /// Divides the sequences into documents of these lengths, repeated. A document ends at the end of a sequence.
    pub fn with_documents(mut self, lengths: &[usize]) -> Self {
        let (mut first_keys, mut lengths) = (Vec::new(), lengths.iter().cycle());
        for _ in 0..self.shape.b {
            let mut first = 0;
            while first < self.shape.t {
                let length = (*lengths.next().unwrap()).min(self.shape.t - first);
                first_keys.resize(first_keys.len() + length, first as u32);
                first += length;
            }
        }
        self.documents = Some(first_keys);
        self
    }

    /// Limits the keys of a query.
    pub fn with_window(self, window: u32) -> Self {
        Self { window: Some(window), ..self }
    }

    /// Returns the first key that a query attends to.
    fn first_key(&self, b: usize, query: usize) -> usize {
        let document = self.documents.as_ref().map_or(0, |first_keys| first_keys[b * self.shape.t + query]);
        document.max((query as u32 + 1).saturating_sub(self.window.unwrap_or(u32::MAX))) as usize
    }

    /// Returns the kernels' mask, with its arrays in `memory`. Tiles are in an arbitrary order.
    pub fn mask(&self, memory: &mut Memory) -> Mask {
        let AttentionSizes { b, t, .. } = self.shape;
        let documents = self.documents.as_ref().map(|first_keys| {
            let last =
                |at: usize| (at..(at / t + 1) * t).take_while(|&i| first_keys[i] == first_keys[at]).last().unwrap() % t;
            let last_queries: Vec<_> = (0..b * t).map(|at| last(at) as u32).collect();
            let tiles = t.div_ceil(TILE as usize) as u32;
            let order = |start: u32| -> Vec<_> {
                (0..b as u32).flat_map(|b| (0..tiles).map(move |i| (start + b + i) % tiles)).collect()
            };
            Documents {
                first_keys: memory.input("first keys", first_keys),
                last_queries: memory.input("last queries", &last_queries),
                query_tiles: memory.input("order of queries", &order(1)),
                key_tiles: memory.input("order of keys", &order(2)),
            }
        });
        Mask { documents, window: self.window }
    }

    /// Returns random Q, K and V in ±`range` and dout in ±1, all representable in `T`.
    pub fn random<T: Element>(shape: AttentionSizes, range: f64, seed: u32) -> Self {
        let zeros = Self::zeros(shape);
        let qkv: Vec<_> = noise(zeros.qkv.len(), seed).iter().map(|x| range * x).collect();
        let exact = |values: &[f64]| wide(&rounded::<T>(values));
        Self { qkv: exact(&qkv), dout: exact(&noise(zeros.dout.len(), seed ^ 0xd0)), ..zeros }
    }

    /// Returns inputs of zeros.
    pub fn zeros(shape: AttentionSizes) -> Self {
        let elements = |heads: usize| vec![0.0; shape.b * shape.t * heads * shape.hs];
        let (qkv, dout) = (elements(shape.nh + 2 * shape.kv), elements(shape.nh));
        Self { shape, qkv, dout, documents: None, window: None }
    }

    /// Returns the same attention with a copy of K and V for each query head.
    pub fn replicated(&self) -> Self {
        let AttentionSizes { b, t, nh, hs, .. } = self.shape;
        let mut copies = Self { dout: self.dout.clone(), ..Self::zeros(multi_head(b, t, nh, hs)) };
        for place in places(copies.shape, Q) {
            copies.row_mut(Q, place).copy_from_slice(self.row(Q, place));
            for part in [K, V] {
                copies.row_mut(part, place).copy_from_slice(self.row(part, key_place(self.shape, place)));
            }
        }
        copies
    }

    /// Returns a row of Q, K, V or dout.
    pub fn row(&self, part: usize, place: Place) -> &[f64] {
        let at = element(self.shape, part, place);
        let values = if part == DOUT { &self.dout } else { &self.qkv };
        &values[at..][..self.shape.hs]
    }

    /// Returns a mutable row of Q, K, V or dout.
    pub fn row_mut(&mut self, part: usize, place: Place) -> &mut [f64] {
        let at = element(self.shape, part, place);
        let values = if part == DOUT { &mut self.dout } else { &mut self.qkv };
        &mut values[at..][..self.shape.hs]
    }
}

/// Returns the indices of the keys and values that a query head reads at its own position.
fn key_place(shape: AttentionSizes, [b, t, h]: Place) -> Place {
    [b, t, h / group(shape)]
}

/// Returns the index of the first element of a row in qkv or dout.
fn element(AttentionSizes { t: length, nh, kv, hs, .. }: AttentionSizes, part: usize, [b, t, h]: Place) -> usize {
    let row = b * length + t;
    match part {
        DOUT => (row * nh + h) * hs,
        _ => (row * (nh + 2 * kv) + [0, nh, nh + kv][part] + h) * hs,
    }
}

/// A result of the forward or backward pass.
#[derive(Clone, Copy, Debug)]
pub enum Tensor {
    Out,
    Lse,
    DQ,
    DK,
    DV,
}

impl Tensor {
    /// Returns the part of the inputs with the same heads.
    fn part(self) -> usize {
        match self {
            Self::Out | Self::Lse | Self::DQ => Q,
            Self::DK => K,
            Self::DV => V,
        }
    }
}

/// All results.
pub const ALL: [Tensor; 5] = [Tensor::Out, Tensor::Lse, Tensor::DQ, Tensor::DK, Tensor::DV];

/// out (B,T,NH,HS), lse (B,NH,T), dqkv (B,T,NH+2KV,HS).
pub struct Results {
    pub shape: AttentionSizes,
    pub out: Vec<f64>,
    pub lse: Vec<f64>,
    pub dqkv: Vec<f64>,
}

impl Results {
    /// Returns a row of a tensor.
    pub fn row(&self, tensor: Tensor, place: Place) -> &[f64] {
        let (shape, [b, t, h]) = (self.shape, place);
        let packed = |part| &self.dqkv[element(shape, part, place)..][..shape.hs];
        match tensor {
            Tensor::Out => &self.out[element(shape, DOUT, place)..][..shape.hs],
            Tensor::Lse => &self.lse[(b * shape.nh + h) * shape.t + t..][..1],
            Tensor::DQ => packed(Q),
            Tensor::DK => packed(K),
            Tensor::DV => packed(V),
        }
    }

    /// Returns all rows of a tensor, concatenated.
    pub fn all(&self, tensor: Tensor) -> Vec<f64> {
        places(self.shape, tensor.part()).flat_map(|place| self.row(tensor, place)).copied().collect()
    }
}

/// Computes softmax(Q Kᵀ / sqrt(HS) + mask) V and its derivatives.
pub fn reference(inputs: &Inputs) -> Results {
    let shape = inputs.shape;
    let AttentionSizes { b, t, nh, hs, .. } = shape;
    let zeros = Inputs::zeros(shape);
    let mut results = Results { shape, out: zeros.dout, lse: vec![0.0; b * nh * t], dqkv: zeros.qkv };
    let scale = 1.0 / (hs as f64).sqrt();
    let dot = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(x, y)| x * y).sum::<f64>();
    for place in places(shape, Q) {
        let [b, query, h] = place;
        let place = |part, t| match part {
            K | V => key_place(shape, [b, t, h]),
            _ => [b, t, h],
        };
        let row = |part, t| inputs.row(part, place(part, t));
        let first = inputs.first_key(b, query);
        let scores: Vec<_> = (first..=query).map(|key| dot(row(Q, query), row(K, key)) * scale).collect();
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = scores.iter().map(|s| (s - max).exp()).sum();
        results.lse[(b * nh + h) * t + query] = max + sum.ln();
        let p: Vec<_> = scores.iter().map(|s| (s - max).exp() / sum).collect();
        let dp: Vec<_> = (first..=query).map(|key| dot(row(DOUT, query), row(V, key))).collect();
        let mean = dot(&p, &dp);
        for key in first..=query {
            let p = p[key - first];
            let ds = p * (dp[key - first] - mean) * scale;
            let at = |part, t| element(shape, part, place(part, t));
            for i in 0..hs {
                results.out[at(DOUT, query) + i] += p * row(V, key)[i];
                results.dqkv[at(Q, query) + i] += ds * row(K, key)[i];
                results.dqkv[at(K, key) + i] += ds * row(Q, query)[i];
                results.dqkv[at(V, key) + i] += p * row(DOUT, query)[i];
            }
        }
    }
    results
}

/// Allowed errors, relative to the root mean square of the expected tensor.
#[derive(Clone, Copy)]
pub struct Errors {
    /// Allowed root mean square of the errors.
    pub mean: f64,
    /// Allowed error of one element. It is relative to the expected element if that exceeds the root mean square.
    pub worst: f64,
}

/// A storage type of the attention kernels.
pub trait Precision: super::Tolerance + TensorCore {
    /// Allowed errors of the kernels.
    const ERRORS: Errors;
}

impl Precision for f32 {
    const ERRORS: Errors = Errors { mean: 2e-6, worst: 2e-5 };
}

impl Precision for cuda_std::bf16 {
    const ERRORS: Errors = Errors { mean: 5e-3, worst: 5e-2 };
}

/// Allowed errors of lse, which is f32 for every storage type.
const LSE: Errors = Errors { mean: 2e-6, worst: 2e-5 };

fn root_mean_square(values: impl Iterator<Item = f64>) -> f64 {
    let (mut sum, mut count) = (0.0, 0);
    for x in values {
        sum += x * x;
        count += 1;
    }
    (sum / f64::from(count)).sqrt()
}

/// Fails if `got` exceeds the allowed errors. They are relative to `least` if the root mean square of `want` is
/// smaller.
#[track_caller]
pub fn assert_near(what: &str, got: &[f64], want: &[f64], least: f64, errors: Errors) {
    assert_eq!(got.len(), want.len(), "{what}");
    let scale = root_mean_square(want.iter().copied()).max(least);
    let error = || got.iter().zip(want).map(|(x, y)| x - y);
    let mean = root_mean_square(error()) / scale;
    let (at, worst) = error()
        .zip(want)
        .map(|(e, want)| if e.is_nan() { f64::INFINITY } else { e.abs() / scale.max(want.abs()) })
        .enumerate()
        .fold((0, 0.0), |worst, (i, e)| if e > worst.1 { (i, e) } else { worst });
    assert!(
        mean <= errors.mean && worst <= errors.worst,
        "{what}: mean error {mean:.2e} (allowed {:.0e}), worst {worst:.2e} (allowed {:.0e}): element {at} is {}, expected {}",
        errors.mean,
        errors.worst,
        got[at],
        want[at],
    );
}

/// Fails unless `got` agrees with the reference. If a gradient vanishes, as dQ and dK do for T = 1, errors are
/// absolute.
#[track_caller]
pub fn assert_agrees(inputs: &Inputs, got: &Results, errors: Errors) {
    let want = reference(inputs);
    for tensor in ALL {
        let (errors, got, want) = match tensor {
            Tensor::Lse => (LSE, got.all(tensor), want.all(tensor)),
            _ => (errors, got.all(tensor), want.all(tensor)),
        };
        let least = if root_mean_square(want.iter().copied()) < 1e-9 { 1.0 } else { 0.0 };
        assert_near(&format!("{tensor:?} of {:?}", inputs.shape), &got, &want, least, errors);
    }
}

/// Fails unless each row of these tensors is bit-identical to the row of `want` at the index that `from` returns for the
/// row's part and index, if any. All NaNs are considered equal.
#[track_caller]
pub fn assert_rows_from(
    got: &Results,
    want: &Results,
    tensors: &[Tensor],
    from: impl Fn(usize, Place) -> Option<Place>,
) {
    for &tensor in tensors {
        for place in places(got.shape, tensor.part()) {
            let Some(origin) = from(tensor.part(), place) else { continue };
            let (got_row, want_row) = (got.row(tensor, place), want.row(tensor, origin));
            let same = |(x, y): (&f64, &f64)| x.to_bits() == y.to_bits() || x.is_nan() && y.is_nan();
            let differs = got_row.iter().zip(want_row).position(|pair| !same(pair));
            assert!(
                differs.is_none(),
                "{tensor:?} of {:?} at (sequence, position, head) {place:?} is {:?}, expected {:?} as at {origin:?}",
                got.shape,
                differs.map(|i| got_row[i]),
                differs.map(|i| want_row[i]),
            );
        }
    }
}

/// Same as [`assert_rows_from`], where the index in `want` is the same for each part.
#[track_caller]
pub fn assert_rows_same(got: &Results, want: &Results, tensors: &[Tensor], from: impl Fn(Place) -> Option<Place>) {
    assert_rows_from(got, want, tensors, |_, place| from(place));
}

/// An implementation of attention, forward and backward.
pub trait Attend: Fn(&Inputs) -> Results {}

impl<F: Fn(&Inputs) -> Results> Attend for F {}

/// Checks that each output lies between the smallest and the largest value that its query attends to.
///
/// `slack` is the allowed error, relative to the largest magnitude of these values.
pub fn check_convex(attend: impl Attend, inputs: &Inputs, slack: f64) {
    let got = attend(inputs);
    for place in places(inputs.shape, Q) {
        let [b, query, h] = place;
        for (i, &out) in got.row(Tensor::Out, place).iter().enumerate() {
            let seen = || (0..=query).map(|key| inputs.row(V, key_place(inputs.shape, [b, key, h]))[i]);
            let (low, high) = (seen().fold(f64::INFINITY, f64::min), seen().fold(f64::NEG_INFINITY, f64::max));
            let slack = slack * low.abs().max(high.abs());
            assert!(
                (low - slack..=high + slack).contains(&out),
                "output {i} of {:?} at {place:?} is {out}, expected within {low}..{high}",
                inputs.shape
            );
        }
    }
}

/// Checks causality: later positions do not affect out, lse and dQ of earlier ones, and earlier queries and their dout
/// do not affect dK and dV of later ones.
pub fn check_causal(attend: impl Attend, inputs: &Inputs, other: &Inputs, position: usize) {
    let got = attend(inputs);
    let mix = |parts: &[usize], swap: &dyn Fn(usize) -> bool| {
        let mut mixed = inputs.clone();
        for &part in parts {
            for place in places(inputs.shape, part).filter(|place| swap(place[1])) {
                mixed.row_mut(part, place).copy_from_slice(other.row(part, place));
            }
        }
        attend(&mixed)
    };
    let later = mix(&[Q, K, V, DOUT], &|t| t > position);
    assert_rows_same(&later, &got, &[Tensor::Out, Tensor::Lse, Tensor::DQ], |place| {
        (place[1] <= position).then_some(place)
    });
    let earlier = mix(&[Q, DOUT], &|t| t < position);
    assert_rows_same(&earlier, &got, &[Tensor::DK, Tensor::DV], |place| (place[1] >= position).then_some(place));
}

/// Checks that groups of heads, of all sequences, do not depend on each other or on their position: shifts them by
/// `shift`.
pub fn check_heads(attend: impl Attend, inputs: &Inputs, shift: usize) {
    let AttentionSizes { b, nh, kv, .. } = inputs.shape;
    let origin = |part, [sequence, t, h]: Place| {
        let (heads, shift) = if part == K || part == V { (kv, shift) } else { (nh, shift * group(inputs.shape)) };
        let head = (sequence * heads + h + shift) % (b * heads);
        [head / heads, t, head % heads]
    };
    let mut turned = inputs.clone();
    for part in [Q, K, V, DOUT] {
        for place in places(inputs.shape, part) {
            turned.row_mut(part, place).copy_from_slice(inputs.row(part, origin(part, place)));
        }
    }
    assert_rows_from(&attend(&turned), &attend(inputs), &ALL, |part, place| Some(origin(part, place)));
}

/// Checks that the heads of a group share K and V: out, lse and dQ have the bits of attention with a copy of K and V for
/// each head. dK and dV are the sums over the copies. `part` is their allowed error relative to the sum of magnitudes,
/// each at least the root mean square of the copies' gradients.
pub fn check_groups(attend: impl Attend, inputs: &Inputs, part: f64) {
    let (got, copies) = (attend(inputs), attend(&inputs.replicated()));
    assert_rows_same(&got, &copies, &[Tensor::Out, Tensor::Lse, Tensor::DQ], Some);
    let (shape, group) = (inputs.shape, group(inputs.shape));
    for tensor in [Tensor::DK, Tensor::DV] {
        let scale = root_mean_square(copies.all(tensor).into_iter()).max(1e-3);
        for place @ [b, t, kv_head] in places(shape, K) {
            for (i, &found) in got.row(tensor, place).iter().enumerate() {
                let heads = kv_head * group..(kv_head + 1) * group;
                let copies = || heads.clone().map(|h| copies.row(tensor, [b, t, h])[i]);
                let sum = copies().sum::<f64>();
                let bound = part * copies().map(|copy| copy.abs().max(scale)).sum::<f64>();
                assert!(
                    (found - sum).abs() <= bound,
                    "{tensor:?} of {shape:?}, channel {i} at {place:?} is {found}, the sum over the group {sum}; \
                     allowed error {bound:.2e}"
                );
            }
        }
    }
}

/// Checks the sums of dV and dK over keys.
///
/// The probabilities of a query sum to 1 and the gradients of its scores to 0. The sum of dV is therefore the sum of
/// dout over the queries of the group, and the sum of dK is 0. `part` is the allowed error relative to the root mean square of the
/// summands times the square root of their number.
pub fn check_sums(attend: impl Attend, inputs: &Inputs, part: f64) {
    let AttentionSizes { b, t, kv, hs, .. } = inputs.shape;
    let group = group(inputs.shape);
    let got = attend(inputs);
    for (b, h, i) in (0..b).flat_map(|b| (0..kv).flat_map(move |h| (0..hs).map(move |i| (b, h, i)))) {
        let column = |tensor| (0..t).map(|t| got.row(tensor, [b, t, h])[i]).collect::<Vec<_>>();
        let queries = (0..t).flat_map(|t| (h * group..(h + 1) * group).map(move |h| [b, t, h]));
        let dout = queries.map(|place| inputs.row(DOUT, place)[i]).sum::<f64>();
        for (tensor, want) in [(Tensor::DV, dout), (Tensor::DK, 0.0)] {
            let all = root_mean_square(got.all(tensor).into_iter());
            let bound = part * all.max(1e-3) * (t as f64).sqrt();
            let sum = column(tensor).iter().sum::<f64>();
            assert!(
                (sum - want).abs() <= bound,
                "{tensor:?} of {:?}, sequence {b}, head {h}, channel {i} sums to {sum}, expected {want}; allowed error {bound:.2e}",
                inputs.shape
            );
        }
    }
}

/// Checks scores of 0: outputs are running means, and dQ and dK are 0.
pub fn check_zeros(attend: impl Attend, shape: AttentionSizes, errors: Errors) {
    let mut inputs = Inputs::zeros(shape);
    let got = attend(&inputs);
    assert_agrees(&inputs, &got, errors);
    assert!(got.out.iter().chain(&got.dqkv).all(|&x| x == 0.0));
    inputs.dout.fill(1.0);
    let got = attend(&inputs);
    assert_agrees(&inputs, &got, errors);
    assert!([Tensor::DQ, Tensor::DK].iter().all(|&tensor| got.all(tensor).iter().all(|&x| x == 0.0)));
}

/// Checks large scores that are equal for all keys of a query: outputs are running means.
pub fn check_equal_scores<T: Precision>(attend: impl Attend, shape: AttentionSizes) {
    let mut inputs = Inputs::random::<T>(shape, 4.0, 11);
    let key = inputs.row(K, [0, 0, 0]).to_vec();
    for place in places(shape, K) {
        inputs.row_mut(K, place).copy_from_slice(&key);
    }
    let got = attend(&inputs);
    // dQ is the sum of the gradients of the scores, which is 0, times the common key.
    let dq = root_mean_square(got.all(Tensor::DQ).into_iter());
    assert!(dq < 10.0 * T::ROUNDING, "dQ of equal keys is {dq}");
    let want = reference(&inputs);
    for tensor in [Tensor::Out, Tensor::DK, Tensor::DV] {
        assert_near(&format!("{tensor:?} of equal keys"), &got.all(tensor), &want.all(tensor), 0.0, T::ERRORS);
    }
}

/// Checks a single key with all the attention of the queries after it, with scores near ±10^4, for which 2^x overflows.
///
/// The outputs of these queries are the key's value, its dV is the sum of their dout, and the gradients of all scores
/// vanish.
pub fn check_dominant_key<T: Precision>(attend: impl Attend, shape: AttentionSizes, key: usize) {
    let mut inputs = Inputs::random::<T>(shape, 2.0, 12);
    let strong = 48.0;
    for place in places(shape, Q) {
        inputs.row_mut(Q, place).fill(strong);
    }
    for place in places(shape, K) {
        inputs.row_mut(K, place).fill(if place[1] == key { strong / 2.0 } else { -strong / 2.0 });
    }
    let got = attend(&inputs);
    let lse = strong * strong / 2.0 * (shape.hs as f64).sqrt();
    assert!((8e3..2e4).contains(&lse));
    for place in places(shape, Q).filter(|place| place[1] >= key) {
        let value = inputs.row(V, key_place(shape, [place[0], key, place[2]]));
        super::assert_close("output", got.row(Tensor::Out, place), value, T::ROUNDING, 0.0);
        let found = got.row(Tensor::Lse, place)[0];
        assert!((found / lse - 1.0).abs() < 1e-6, "lse at {place:?} of {shape:?} is {found}, expected {lse}");
    }
    let want = reference(&inputs);
    // In f32, scores of 10^4 have an error of about 10^-3. The probabilities have the same error, which dQ and dK
    // multiply with keys and queries.
    let errors = Errors { mean: 5e-3, worst: 5e-2 };
    assert_near("dV of a dominant key", &got.all(Tensor::DV), &want.all(Tensor::DV), 0.0, errors);
    for tensor in [Tensor::DQ, Tensor::DK] {
        let what = format!("{tensor:?} of a dominant key");
        assert_near(&what, &got.all(tensor), &want.all(tensor), strong, errors);
    }
}

/// Checks scores near ±10^4, where any key may have the maximum.
pub fn check_large_scores<T: Precision>(attend: impl Attend, shape: AttentionSizes) {
    let inputs = Inputs::random::<T>(shape, 170.0, 9);
    let (got, want) = (attend(&inputs), reference(&inputs));
    assert!(want.lse.iter().any(|&lse| lse > 8e3) && want.lse.iter().any(|&lse| lse < -2e3));
    let errors = Errors { mean: 1e-2, worst: 5e-2 };
    for tensor in [Tensor::Out, Tensor::Lse, Tensor::DV] {
        assert_near(&format!("{tensor:?} of large scores"), &got.all(tensor), &want.all(tensor), 0.0, errors);
    }
    // The gradients of scores nearly vanish: P ∘ (dP - D) is mostly rounding error, which is multiplied with keys near
    // 170.
    let errors = Errors { mean: 1e-2, worst: 0.2 };
    for tensor in [Tensor::DQ, Tensor::DK] {
        assert_near(&format!("{tensor:?} of large scores"), &got.all(tensor), &want.all(tensor), 170.0, errors);
    }
}

/// Checks that NaN and infinity in one key-value head of one sequence and its query heads do not change other groups.
pub fn check_spoilt_head<T: Precision>(attend: impl Attend, shape: AttentionSizes, [b, kv_head]: [usize; 2]) {
    let clean = Inputs::random::<T>(shape, 2.0, 13);
    let want = attend(&clean);
    let in_group = |part, [sequence, _, h]: Place| {
        let kv = if part == K || part == V { h } else { h / group(shape) };
        [sequence, kv] == [b, kv_head]
    };
    for x in [f64::NAN, f64::INFINITY] {
        let mut spoilt = clean.clone();
        for part in [Q, K, V, DOUT] {
            for place in places(shape, part).filter(|&place| in_group(part, place)) {
                spoilt.row_mut(part, place).fill(x);
            }
        }
        let got = attend(&spoilt);
        assert_rows_from(&got, &want, &ALL, |part, place| (!in_group(part, place)).then_some(place));
        for tensor in ALL {
            let part = tensor.part();
            for place in places(shape, part).filter(|&place| place[1] == 0 && in_group(part, place)) {
                assert!(got.row(tensor, place).iter().all(|x| x.is_nan()), "{tensor:?} at {place:?}");
            }
        }
    }
}

/// Checks that NaN and infinity in Q and dout of one query head of one sequence do not change other heads, except dK and
/// dV of its group.
pub fn check_spoilt_query_head<T: Precision>(attend: impl Attend, shape: AttentionSizes, [b, h]: [usize; 2]) {
    let clean = Inputs::random::<T>(shape, 2.0, 15);
    let want = attend(&clean);
    for x in [f64::NAN, f64::INFINITY] {
        let mut spoilt = clean.clone();
        for t in 0..shape.t {
            for part in [Q, DOUT] {
                spoilt.row_mut(part, [b, t, h]).fill(x);
            }
        }
        let got = attend(&spoilt);
        assert_rows_from(&got, &want, &ALL, |part, place| {
            let head = if part == K || part == V { h / group(shape) } else { h };
            ([place[0], place[2]] != [b, head]).then_some(place)
        });
        for tensor in [Tensor::DK, Tensor::DV] {
            let row = got.row(tensor, key_place(shape, [b, 0, h]));
            assert!(row.iter().all(|x| x.is_nan()), "{tensor:?}");
        }
    }
}

/// Checks NaN and infinity at one position, in one of Q, K, V and dout at a time.
///
/// Masked positions must not affect the result, with one exception for positions of the same tile of `tile` positions:
/// V (for out and dQ), K (for dQ), and Q and dout (for dK and dV) are multiplied by probabilities of 0, which gives
/// NaN.
pub fn check_spoilt_position<T: Precision>(attend: impl Attend, shape: AttentionSizes, position: usize, tile: usize) {
    let clean = Inputs::random::<T>(shape, 2.0, 14);
    let want = attend(&clean);
    let (tile_begin, tile_end) = (position / tile * tile, position / tile * tile + tile);
    for (part, x) in [Q, K, V, DOUT].into_iter().flat_map(|part| [(part, f64::NAN), (part, f64::INFINITY)]) {
        let mut spoilt = clean.clone();
        for place in places(shape, part).filter(|place| place[1] == position) {
            spoilt.row_mut(part, place).fill(x);
        }
        let got = attend(&spoilt);
        let same = |tensors: &[Tensor], clean: &dyn Fn(usize) -> bool| {
            assert_rows_same(&got, &want, tensors, |place| clean(place[1]).then_some(place));
        };
        let nowhere_else = |t| t != position;
        let before = |t| t < position;
        let before_tile = |t| t < tile_begin;
        let after_tile = |t| t >= tile_end;
        match part {
            Q => {
                same(&[Tensor::Out, Tensor::Lse, Tensor::DQ], &nowhere_else);
                same(&[Tensor::DK, Tensor::DV], &after_tile);
            }
            K => {
                same(&[Tensor::Out, Tensor::Lse], &before);
                same(&[Tensor::DQ], &before_tile);
            }
            V => {
                same(&[Tensor::Lse], &|_| true);
                same(&[Tensor::Out, Tensor::DQ], &before_tile);
            }
            _ => {
                same(&[Tensor::Out, Tensor::Lse], &|_| true);
                same(&[Tensor::DQ], &nowhere_else);
                same(&[Tensor::DK, Tensor::DV], &after_tile);
            }
        }
        let spoilt: &[Tensor] = match part {
            Q | K => &[Tensor::Out, Tensor::Lse, Tensor::DQ, Tensor::DK, Tensor::DV],
            V => &[Tensor::Out, Tensor::DQ, Tensor::DK],
            _ => &[Tensor::DQ, Tensor::DK, Tensor::DV],
        };
        for &tensor in spoilt {
            let row = got.row(tensor, [0, position, 0]);
            assert!(row.iter().all(|x| !x.is_finite()), "{tensor:?} at {position} with {x} in part {part}: {row:?}");
        }
    }
}
