//! Attention, also with documents and windows.

use super::{UNIT, case, f32, i32, input, output, workload};
use crate::selftest::case::{Case, Init, Operand, Work};
use crate::selftest::compare::Tolerance;
use engine::ops::{AttentionBackward, AttentionForward, AttentionMask, AttentionShape};
use engine::tensor::Tensor;
use engine::{BatchLayout, Workload};
use rng::Mt19937;

/// The lengths of the documents of a sequence.
#[derive(Clone, Copy, Debug)]
pub enum DocumentLengths {
    /// All documents have this length.
    Equal(usize),
    /// Random lengths with this mean, exponentially distributed.
    Random(usize),
}

/// An attention with a mask.
#[derive(Clone, Copy, Debug)]
pub struct MaskedAttention {
    /// Sizes.
    pub shape: AttentionShape,
    /// The documents; `None` if a sequence is one document.
    pub documents: Option<DocumentLengths>,
    /// Number of keys that a query attends to at most.
    pub window: Option<usize>,
}

impl From<AttentionShape> for MaskedAttention {
    fn from(shape: AttentionShape) -> Self {
        Self { shape, documents: None, window: None }
    }
}

impl MaskedAttention {
    fn layout(&self) -> BatchLayout {
        BatchLayout::new(self.shape.b, self.shape.t).with_documents()
    }

    /// Returns the words of a batch with the documents, or nothing if there are none.
    fn batch(&self) -> Vec<i32> {
        const SEPARATOR: i32 = 0;
        let (layout, Some(lengths)) = (self.layout(), self.documents) else { return Vec::new() };
        let (mut words, mut rng) = (vec![1; layout.words()], Mt19937::new(1));
        for sequence in words[layout.inputs()].chunks_mut(layout.t) {
            let mut start = 0;
            while start < layout.t {
                sequence[start] = SEPARATOR;
                start += match lengths {
                    DocumentLengths::Equal(length) => length,
                    DocumentLengths::Random(mean) => 1 + (-(1.0 - rng.next_f32()).ln() * mean as f32) as usize,
                };
            }
        }
        layout.find_documents(&mut words, SEPARATOR);
        words
    }

    /// Returns the mask of a batch.
    fn mask(&self, batch: Tensor) -> AttentionMask {
        let documents = self.documents.and_then(|_| self.layout().documents_of(batch));
        AttentionMask { documents, window: self.window }
    }

    /// Returns the pairs of a query and a key that it attends to, in all sequences.
    fn pairs(&self, batch: &[i32]) -> usize {
        let AttentionShape { b, t, .. } = self.shape;
        if self.documents.is_none() && self.window.is_none() {
            // The usual count, which omits half of the diagonal.
            return b * t * t / 2;
        }
        let first_keys = batch.get(self.layout().seed().end..).unwrap_or_default();
        let pairs = |i: usize| {
            let document = i % t + 1 - first_keys.get(i).map_or(0, |&first| first as usize);
            document.min(self.window.unwrap_or(t))
        };
        (0..b * t).map(pairs).sum()
    }

    /// Returns the shape for display.
    pub fn name(&self) -> String {
        let AttentionShape { b, t, heads, kv_heads, head_size } = self.shape;
        let kv = if kv_heads == heads { String::new() } else { format!(" KV{kv_heads}") };
        let documents = match self.documents {
            None => String::new(),
            Some(DocumentLengths::Equal(length)) => format!(" D{length}"),
            Some(DocumentLengths::Random(mean)) => format!(" D~{mean}"),
        };
        let window = self.window.map_or_else(String::new, |window| format!(" W{window}"));
        format!("B{b} T{t} NH{heads}{kv} HS{head_size}{documents}{window}")
    }

    fn workload(&self) -> Workload {
        let shape = self.shape;
        Workload { attention: shape, ..workload(shape.b, shape.t, shape.heads * shape.head_size, shape.heads, 128, 0) }
    }
}

/// Returns masked attention at small and odd shapes, with boundaries of documents at all kinds of places in a tile.
pub fn masked_edge_cases() -> Vec<MaskedAttention> {
    let mut cases = Vec::new();
    for head_size in [64, 80, 96, 128] {
        let masked = |t, kv_heads, documents, window| {
            let shape = AttentionShape { b: 2, t, heads: 2, kv_heads, head_size };
            MaskedAttention { shape, documents, window }
        };
        for length in [1, 64, 128, 1000] {
            cases.push(masked(200, 2, Some(DocumentLengths::Equal(length)), None));
        }
        for mean in [2, 20, 100] {
            cases.push(masked(277, 1, Some(DocumentLengths::Random(mean)), None));
            cases.push(masked(300, 1, Some(DocumentLengths::Random(mean)), Some(40)));
        }
        for window in [1, 64, 65, 129] {
            cases.push(masked(290, 2, None, Some(window)));
        }
    }
    cases
}

/// Returns masked attention at the shapes of real models.
pub fn masked_model_cases() -> Vec<MaskedAttention> {
    let mut cases = Vec::new();
    for (t, heads, head_size) in [(1024, 12, 64), (2048, 4, 128), (1000, 4, 96)] {
        let shape = AttentionShape { b: 1, t, heads, kv_heads: heads, head_size };
        let documents = Some(DocumentLengths::Random(150));
        cases.push(MaskedAttention { shape, documents, window: None });
        cases.push(MaskedAttention { shape, documents: None, window: Some(256) });
        cases.push(MaskedAttention { shape, documents, window: Some(256) });
    }
    cases
}

/// Appends the operand with the documents.
fn with_batch(mut operands: Vec<Operand>, batch: Vec<i32>) -> Vec<Operand> {
    operands.push(i32(input("batch", batch.len().max(1), Init::Words(if batch.is_empty() { vec![0] } else { batch }))));
    operands
}

pub fn attention_forward(attention: &MaskedAttention) -> Case {
    let (attention, shape, batch) = (*attention, attention.shape, attention.batch());
    let rows = shape.b * shape.t;
    let (c, packed) = (shape.heads * shape.head_size, shape.packed_heads() * shape.head_size);
    // The scores and the values take a multiplication and an addition per visible element.
    let flops = 4 * shape.heads * shape.head_size * attention.pairs(&batch);
    let operands = vec![
        output("out", rows * c, Tolerance::ATTENTION),
        f32(output("lse", rows * shape.heads, Tolerance::CHAIN)),
        input("qkv", rows * packed, UNIT),
    ];
    let work = Work { floats: rows * (c + packed), bytes: 4 * rows * shape.heads, flops };
    let operands = with_batch(operands, batch);
    case("attention_forward", attention.name(), attention.workload(), operands, work, move |e, x| {
        let mask = attention.mask(x[3]);
        e.run(AttentionForward { out: x[0], lse: x[1], qkv: x[2], shape, first_query: 0, mask, quantized: None })
    })
}

pub fn attention_backward(attention: &MaskedAttention) -> Case {
    let (attention, shape, batch) = (*attention, attention.shape, attention.batch());
    let rows = shape.b * shape.t;
    let (c, packed) = (shape.heads * shape.head_size, shape.packed_heads() * shape.head_size);
    let flops = 10 * shape.heads * shape.head_size * attention.pairs(&batch);
    let operands = vec![
        output("dqkv", rows * packed, Tolerance::attention_backward(shape.heads / shape.kv_heads)),
        input("dout", rows * c, UNIT),
        input("qkv", rows * packed, UNIT),
        input("out", rows * c, Init::Zero),
        f32(input("lse", rows * shape.heads, Init::Zero)),
    ];
    let work = Work { floats: 2 * rows * (c + packed), bytes: 4 * rows * shape.heads, flops };
    let operands = with_batch(operands, batch);
    let case = case("attention_backward", attention.name(), attention.workload(), operands, work, move |e, x| {
        let mask = attention.mask(x[5]);
        e.run(AttentionBackward { dqkv: x[0], dout: x[1], qkv: x[2], out: x[3], lse: x[4], shape, mask })
    });
    // The backward pass reads the output of the engine's own forward pass.
    let forward = move |e: &mut dyn engine::Engine, x: &[Tensor]| {
        let mask = attention.mask(x[5]);
        e.run(AttentionForward { out: x[3], lse: x[4], qkv: x[2], shape, first_query: 0, mask, quantized: None })
    };
    Case { before: Some(Box::new(forward)), ..case }
}
