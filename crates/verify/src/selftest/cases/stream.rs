//! Additions to the residual stream, value embeddings and their gates.

use super::{Case, UNIT, accumulated, case, encoder_backward, exact, f32, i32, if_present, input, output, workload};
use crate::selftest::case::{Init, Operand, Work};
use crate::selftest::compare::Tolerance;
use engine::ops::{
    AttentionShape, GateInputBackward, Mix, MixBackward, RowTokens, Slot, Smear, SmearBackward, ValueEmbed,
    ValueEmbedBackward, ValueGate,
};
use engine::tensor::Tensor;
use engine::{BatchLayout, Workload};

/// Returns every operation at small and odd sizes, with and without each optional operand.
pub(super) fn edge_cases() -> Vec<Case> {
    let mut cases: Vec<Case> = [8, 1000, 12_344].into_iter().flat_map(mixes).collect();
    for (b, t, c, channels) in [(1, 1, 64, 1), (3, 7, 80, 24), (2, 33, 200, 12)] {
        cases.extend(smears(SmearShape { b, t, c, channels, has_documents: false }));
        cases.extend(smears(SmearShape { b, t, c, channels, has_documents: true }));
    }
    for (b, t, heads, kv_heads, head_size, c, channels) in
        [(1, 1, 1, 1, 16, 64, 1), (2, 9, 14, 2, 80, 80, 12), (3, 5, 40, 40, 32, 200, 40), (1, 77, 4, 4, 256, 64, 24)]
    {
        let attention = AttentionShape { b, t, heads, kv_heads, head_size };
        for (has_norm_weight, in_slots) in [(false, false), (true, true)] {
            cases.extend(value_embeddings(ValueShape { attention, c, channels, has_norm_weight, in_slots }));
        }
    }
    // The rows of a value embedding's table may be longer than C.
    let mut table = encoder_backward(4, 300, 80, 37, false);
    table.workload.channels = 8;
    table.shape += " of values";
    cases.push(table);
    cases
}

/// Returns every operation at sizes of nanochat.
pub(super) fn model_cases() -> Vec<Case> {
    let (b, t, c) = (4, 1024, 1536);
    let mut cases = mixes(b * t * c);
    cases.extend(smears(SmearShape { b, t, c, channels: 24, has_documents: false }));
    cases.extend(smears(SmearShape { b, t, c, channels: 24, has_documents: true }));
    let attention = AttentionShape { b, t, heads: 12, kv_heads: 12, head_size: 128 };
    cases.extend(value_embeddings(ValueShape { attention, c, channels: 12, has_norm_weight: false, in_slots: false }));
    cases
}

/// A workload of this many elements in packets of channels.
fn elements_workload(n: usize) -> Workload {
    workload(1, n / 8, 8, 1, 128, 0)
}

/// Returns the scaled sum and its gradient in all forms.
fn mixes(n: usize) -> Vec<Case> {
    let (both, second) = ([true; 2], [false, true]);
    let forms = [(both, false, false), (both, true, true), (second, false, true), ([false; 2], false, false)];
    let mut cases: Vec<_> =
        forms.into_iter().map(|(scales, same, subtracts)| mix(n, scales, same, subtracts)).collect();
    for form in [
        MixForm { is_scaled: true, adds_inp: false, gradients: [true; 2] },
        MixForm { is_scaled: true, adds_inp: true, gradients: [true; 2] },
        MixForm { is_scaled: false, adds_inp: false, gradients: [false, true] },
        MixForm { is_scaled: true, adds_inp: false, gradients: [true, false] },
        MixForm { is_scaled: true, adds_inp: false, gradients: [false; 2] },
    ] {
        cases.push(mix_backward(n, form));
    }
    cases
}

const SCALE: Init = Init::Uniform { mean: 1.0, spread: 0.25 };

fn mix(n: usize, scales: [bool; 2], adds_inp: bool, subtracts: bool) -> Case {
    let operands = vec![
        output("out", n, Tolerance::REDUCTION),
        input("inp", n, UNIT),
        input("added", n, UNIT),
        input("scale", 1, SCALE),
        input("added_scale", 1, SCALE),
    ];
    let name = format!(
        "{n}{}{}{}{}",
        if scales[0] { " scaled" } else { "" },
        if scales[1] { "" } else { " plain" },
        if adds_inp { " inp" } else { "" },
        if subtracts { " subtracts" } else { "" }
    );
    let work = Work { floats: n * if adds_inp { 2 } else { 3 }, bytes: 0, flops: 0 };
    exact(case("mix", name, elements_workload(n), operands, work, move |e, x| {
        let added = if adds_inp { x[1] } else { x[2] };
        let [scale, added_scale] = [3, 4].map(|i| scales[i - 3].then_some(x[i]));
        e.run(Mix { out: x[0], inp: x[1], added, scale, added_scale, subtracts })
    }))
}

/// The form of a gradient of a scaled sum.
#[derive(Clone, Copy)]
struct MixForm {
    is_scaled: bool,
    adds_inp: bool,
    /// Whether the gradients of both scales are computed.
    gradients: [bool; 2],
}

fn mix_backward(n: usize, form: MixForm) -> Case {
    let MixForm { is_scaled, adds_inp, gradients } = form;
    let operands = vec![
        accumulated("dout", n, Tolerance::REDUCTION),
        accumulated("dadded", n, Tolerance::REDUCTION),
        accumulated("dscale", 1, Tolerance::REDUCTION),
        accumulated("dadded_scale", 1, Tolerance::REDUCTION),
        // Means other than 0 keep the sums away from it.
        input("inp", n, Init::Uniform { mean: 0.5, spread: 1.0 }),
        input("added", n, Init::Uniform { mean: -0.5, spread: 1.0 }),
        input("scale", 1, SCALE),
        input("added_scale", 1, SCALE),
    ];
    let mut operands = operands;
    operands[0].init = Init::Uniform { mean: 0.5, spread: 1.0 };
    let sums = if adds_inp { usize::from(gradients.contains(&true)) } else { gradients.iter().filter(|x| **x).count() };
    let work = Work { floats: n * (3 + usize::from(is_scaled) + sums), bytes: 0, flops: 0 };
    let name = format!(
        "{n}{}{}{}",
        if is_scaled { " scaled" } else { "" },
        if adds_inp { " inp" } else { "" },
        [" frozen", " scale", " added scale", " both scales"]
            [usize::from(gradients[0]) + 2 * usize::from(gradients[1])]
    );
    case("mix_backward", name, elements_workload(n), operands, work, move |e, x| {
        e.run(MixBackward {
            dout: x[0],
            dadded: x[1],
            dscale: gradients[0].then_some(x[2]),
            dadded_scale: gradients[1].then_some(x[3]),
            inp: x[4],
            added: if adds_inp { x[4] } else { x[5] },
            scale: is_scaled.then_some(x[6]),
            added_scale: (!adds_inp).then_some(x[7]),
            subtracts: !is_scaled,
        })
    })
}

/// The sizes of a smear.
#[derive(Clone, Copy)]
struct SmearShape {
    b: usize,
    t: usize,
    c: usize,
    /// Channels of the gate.
    channels: usize,
    has_documents: bool,
}

impl SmearShape {
    fn layout(self) -> BatchLayout {
        BatchLayout::new(self.b, self.t).with_documents()
    }

    fn name(self) -> String {
        let Self { b, t, c, channels, has_documents } = self;
        format!("B{b} T{t} C{c} G{channels}{}", if has_documents { " documents" } else { "" })
    }

    fn workload(self) -> Workload {
        workload(self.b, self.t, self.c, 1, 128, 0)
    }

    /// Returns a batch with documents of different lengths.
    fn batch(self) -> Operand {
        let layout = self.layout();
        let mut words = vec![0; layout.words()];
        let begins: Vec<_> = (0..self.b * self.t).map(|i| matches!(i % 11, 0 | 1 | 5)).collect();
        layout.set_documents(&mut words, &begins);
        i32(input("batch", words.len(), Init::Words(words)))
    }
}

/// Returns the smear with and without a row before it, and the gradient.
fn smears(shape: SmearShape) -> Vec<Case> {
    vec![smear(shape, false), smear(shape, true), smear_backward(shape, false), smear_backward(shape, true)]
}

fn smear(shape: SmearShape, has_before: bool) -> Case {
    let SmearShape { b, t, c, channels, has_documents } = shape;
    let n = b * t * c;
    let operands = vec![
        shape.batch(),
        output("out", n, Tolerance::REDUCTION),
        f32(output("gates", b * t, Tolerance::REDUCTION)),
        input("inp", n, UNIT),
        input("before", b * c, UNIT),
        input("weight", channels, UNIT),
        input("scale", 1, SCALE),
    ];
    let name = shape.name() + if has_before { " before" } else { "" };
    let work = Work { floats: 2 * n, bytes: 4 * b * t * (1 + usize::from(has_documents)), flops: 0 };
    case("smear", name, shape.workload(), operands, work, move |e, x| {
        e.run(Smear {
            out: x[1],
            gates: x[2],
            inp: x[3],
            before: has_before.then_some(x[4]),
            weight: x[5],
            scale: x[6],
            documents: if has_documents { shape.layout().documents_of(x[0]) } else { None },
            t,
            c,
        })
    })
}

fn smear_backward(shape: SmearShape, is_frozen: bool) -> Case {
    let SmearShape { b, t, c, channels, has_documents } = shape;
    let n = b * t * c;
    let operands = vec![
        shape.batch(),
        output("dinp", n, Tolerance::REDUCTION),
        accumulated("dweight", channels, Tolerance::CHAIN),
        accumulated("dscale", 1, Tolerance::CHAIN),
        // Means other than 0 keep the sums away from it.
        input("dout", n, Init::Uniform { mean: 0.3, spread: 1.0 }),
        f32(input("gates", b * t, Init::Uniform { mean: 0.5, spread: 0.4 })),
        input("inp", n, Init::Uniform { mean: 0.3, spread: 1.0 }),
        input("weight", channels, UNIT),
        input("scale", 1, SCALE),
    ];
    let name = shape.name() + if is_frozen { " frozen" } else { "" };
    let work = Work { floats: 3 * n, bytes: 4 * b * t * (1 + usize::from(has_documents)), flops: 0 };
    case("smear_backward", name, shape.workload(), operands, work, move |e, x| {
        e.run(SmearBackward {
            dinp: x[1],
            dweight: (!is_frozen).then_some(x[2]),
            dscale: (!is_frozen).then_some(x[3]),
            dout: x[4],
            gates: x[5],
            inp: x[6],
            weight: x[7],
            scale: x[8],
            documents: if has_documents { shape.layout().documents_of(x[0]) } else { None },
            t,
            c,
        })
    })
}

/// The sizes of a value embedding.
#[derive(Clone, Copy)]
struct ValueShape {
    attention: AttentionShape,
    c: usize,
    /// Channels of the gate.
    channels: usize,
    has_norm_weight: bool,
    /// Whether the tokens are in the slots of text generation.
    in_slots: bool,
}

/// Rows of a table.
const VOCAB: usize = 53;

impl ValueShape {
    fn rows(self) -> usize {
        self.attention.b * self.attention.t
    }

    /// Returns the elements of the values of a row.
    fn width(self) -> usize {
        self.attention.kv_heads * self.attention.head_size
    }

    fn qkv(self) -> usize {
        self.rows() * self.attention.packed_heads() * self.attention.head_size
    }

    fn stride(self) -> usize {
        if self.in_slots { Slot::WORDS } else { 1 }
    }

    fn name(self) -> String {
        let Self { attention: AttentionShape { b, t, heads, kv_heads, head_size }, c, channels, .. } = self;
        format!(
            "B{b} T{t} NH{heads} KV{kv_heads} HS{head_size} C{c} G{channels}{}{}",
            if self.has_norm_weight { " norm weight" } else { "" },
            if self.in_slots { " slots" } else { "" }
        )
    }

    fn workload(self) -> Workload {
        let AttentionShape { b, t, .. } = self.attention;
        Workload { attention: self.attention, ..workload(b, t, self.c, 1, 128, 0) }
    }

    /// Returns the table, the tokens and the operands of the gate.
    fn operands(self) -> Vec<Operand> {
        let (rows, c) = (self.rows(), self.c);
        vec![
            input("table", VOCAB * self.width(), UNIT),
            i32(input("tokens", (rows - 1) * self.stride() + 1, Init::Tokens { below: VOCAB as i32 })),
            input("inp", rows * c, UNIT),
            f32(input("rstd", rows, SCALE)),
            input("norm_weight", c, SCALE),
            input("weight", self.attention.kv_heads * self.channels, Init::Uniform { mean: 0.0, spread: 0.5 }),
        ]
    }

    /// Returns the work of an operation that reads or writes `passes` tensors like the values.
    fn work(self, passes: usize) -> Work {
        let rows = self.rows();
        let of_gate = rows * self.channels + if_present(self.has_norm_weight, self.channels);
        Work { floats: passes * rows * self.width() + of_gate, bytes: 8 * rows, flops: 0 }
    }

    /// Returns the table, the tokens and the gate of [`operands`](Self::operands).
    fn parts(self, x: &[Tensor]) -> (Tensor, RowTokens, ValueGate) {
        let norm_weight = self.has_norm_weight.then_some(x[4]);
        let tokens = RowTokens { tokens: x[1], stride: self.stride() };
        (x[0], tokens, ValueGate { inp: x[2], rstd: x[3], norm_weight, weight: x[5], c: self.c })
    }
}

/// Returns the value embedding and its gradients.
fn value_embeddings(shape: ValueShape) -> Vec<Case> {
    vec![
        value_embed(shape),
        value_embed_backward(shape, false),
        value_embed_backward(shape, true),
        gate_input_backward(shape),
    ]
}

fn value_embed(shape: ValueShape) -> Case {
    let mut operands = shape.operands();
    operands.push(accumulated("qkv", shape.qkv(), Tolerance::REDUCTION));
    case("value_embed", shape.name(), shape.workload(), operands, shape.work(3), move |e, x| {
        let (table, tokens, gate) = shape.parts(x);
        e.run(ValueEmbed { qkv: x[6], table, tokens, gate, shape: shape.attention })
    })
}

fn value_embed_backward(shape: ValueShape, is_frozen: bool) -> Case {
    let (rows, kv_heads) = (shape.rows(), shape.attention.kv_heads);
    let mut operands = shape.operands();
    operands.extend([
        output("drows", rows * shape.width(), Tolerance::REDUCTION),
        f32(output("dgates", rows * kv_heads, Tolerance::CHAIN)),
        accumulated("dweight", kv_heads * shape.channels, Tolerance::CHAIN),
        input("dqkv", shape.qkv(), UNIT),
    ]);
    let name = shape.name() + if is_frozen { " frozen" } else { "" };
    case("value_embed_backward", name, shape.workload(), operands, shape.work(3), move |e, x| {
        let (table, tokens, gate) = shape.parts(x);
        let (drows, dgates, dweight, dqkv) = (x[6], x[7], (!is_frozen).then_some(x[8]), x[9]);
        e.run(ValueEmbedBackward { drows, dgates, dweight, dqkv, table, tokens, gate, shape: shape.attention })
    })
}

fn gate_input_backward(shape: ValueShape) -> Case {
    let (rows, heads, c) = (shape.rows(), shape.attention.kv_heads, shape.c);
    let operands = vec![
        accumulated("dinp", rows * c, Tolerance::REDUCTION),
        f32(input("dgates", rows * heads, UNIT)),
        input("weight", heads * shape.channels, UNIT),
    ];
    let work = Work { floats: 2 * rows * shape.channels, bytes: 4 * rows * heads, flops: 0 };
    case("gate_input_backward", shape.name(), shape.workload(), operands, work, move |e, x| {
        e.run(GateInputBackward { dinp: x[0], dgates: x[1], weight: x[2], heads, c })
    })
}
