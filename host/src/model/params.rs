//! The 16 parameter tensors and where they lie in memory.
//!
//! One contiguous block per layer, so that a layer's gradients can be reduced, or its parameters gathered, in one call:
//! `[wte wpe] [layer 0] … [layer L-1] [lnfw lnfb]`. In a layer's block the matrices (weight-decayed) come first. llm.c's
//! files hold the tensors in [`Param::ALL`] order with all layers of one tensor together; [`Params::file_order`] is the way
//! from one to the other.

use super::Descriptor;
use crate::tensor::Tensor;
use std::ops::Range;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Param {
    Wte,
    Wpe,
    Ln1w,
    Ln1b,
    Qkvw,
    Qkvb,
    Attprojw,
    Attprojb,
    Ln2w,
    Ln2b,
    Fcw,
    Fcb,
    Fcprojw,
    Fcprojb,
    Lnfw,
    Lnfb,
}

use Param::{Attprojb, Attprojw, Fcb, Fcprojb, Fcprojw, Fcw, Ln1b, Ln1w, Ln2b, Ln2w, Lnfb, Lnfw, Qkvb, Qkvw, Wpe, Wte};

impl Param {
    /// In the order of llm.c's files.
    pub const ALL: [Self; 16] =
        [Wte, Wpe, Ln1w, Ln1b, Qkvw, Qkvb, Attprojw, Attprojb, Ln2w, Ln2b, Fcw, Fcb, Fcprojw, Fcprojb, Lnfw, Lnfb];

    const LAYER_MATRICES: [Self; 4] = [Qkvw, Attprojw, Fcw, Fcprojw];
    const LAYER_VECTORS: [Self; 8] = [Ln1w, Ln1b, Qkvb, Attprojb, Ln2w, Ln2b, Fcb, Fcprojb];

    /// As llm.c names it.
    pub const fn name(self) -> &'static str {
        match self {
            Wte => "wte",
            Wpe => "wpe",
            Ln1w => "ln1w",
            Ln1b => "ln1b",
            Qkvw => "qkvw",
            Qkvb => "qkvb",
            Attprojw => "attprojw",
            Attprojb => "attprojb",
            Ln2w => "ln2w",
            Ln2b => "ln2b",
            Fcw => "fcw",
            Fcb => "fcb",
            Fcprojw => "fcprojw",
            Fcprojb => "fcprojb",
            Lnfw => "lnfw",
            Lnfb => "lnfb",
        }
    }

    /// Whether every layer has one.
    pub const fn layered(self) -> bool {
        !matches!(self, Wte | Wpe | Lnfw | Lnfb)
    }

    /// (rows, columns) of a matrix, (1, length) of a vector; of one layer.
    pub const fn shape(self, d: &Descriptor) -> (usize, usize) {
        let c = d.channels;
        match self {
            Wte => (d.padded_vocab(), c),
            Wpe => (d.max_seq_len, c),
            Qkvw => (3 * c, c),
            Attprojw => (c, c),
            Fcw => (4 * c, c),
            Fcprojw => (c, 4 * c),
            Qkvb => (1, 3 * c),
            Fcb => (1, 4 * c),
            Ln1w | Ln1b | Attprojb | Ln2w | Ln2b | Fcprojb | Lnfw | Lnfb => (1, c),
        }
    }

    pub const fn len(self, d: &Descriptor) -> usize {
        let (rows, cols) = self.shape(d);
        rows * cols
    }
}

/// Parameters begin at multiples of this many elements: 16-byte packets and cuBLASLt want aligned rows.
const ALIGNMENT: usize = 64;

/// Where each tensor of each layer lies, in elements from the start of the parameter block. Gradients, moments and master
/// weights are laid out alike.
#[derive(Clone, Debug)]
pub struct Params {
    descriptor: Descriptor,
    layer_elements: usize,
    layers_at: usize,
    last_at: usize,
    elements: usize,
}

/// A stretch of the parameter block that AdamW treats alike.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DecayRange {
    pub elements: Range<usize>,
    pub decayed: bool,
}

impl Params {
    pub fn new(descriptor: Descriptor) -> Self {
        let total = |params: &[Param]| params.iter().map(|p| p.len(&descriptor).next_multiple_of(ALIGNMENT)).sum();
        let layers_at: usize = total(&[Wte, Wpe]);
        let layer_elements: usize = total(&Param::LAYER_MATRICES) + total(&Param::LAYER_VECTORS);
        let last_at = layers_at + descriptor.layers * layer_elements;
        let elements = last_at + total(&[Lnfw, Lnfb]);
        Self { descriptor, layer_elements, layers_at, last_at, elements }
    }

    /// Elements of the whole block, gaps included.
    pub fn elements(&self) -> usize {
        self.elements
    }

    /// Elements of `param` in layer `layer` (0 for tensors that are not layered).
    pub fn range(&self, param: Param, layer: usize) -> Range<usize> {
        let block: Vec<Param> = match param {
            Wte | Wpe => vec![Wte, Wpe],
            Lnfw | Lnfb => vec![Lnfw, Lnfb],
            _ => [&Param::LAYER_MATRICES[..], &Param::LAYER_VECTORS[..]].concat(),
        };
        let block_at = match param {
            Wte | Wpe => 0,
            Lnfw | Lnfb => self.last_at,
            _ => self.layers_at + layer * self.layer_elements,
        };
        let before = block.iter().take_while(|p| **p != param);
        let start: usize =
            block_at + before.map(|p| p.len(&self.descriptor).next_multiple_of(ALIGNMENT)).sum::<usize>();
        start..start + param.len(&self.descriptor)
    }

    /// All tensors of a layer; the last one's end with what follows it.
    pub fn layer(&self, layer: usize) -> Range<usize> {
        let start = self.layers_at + layer * self.layer_elements;
        if layer + 1 == self.descriptor.layers { start..self.elements } else { start..start + self.layer_elements }
    }

    /// wte and wpe.
    pub fn embeddings(&self) -> Range<usize> {
        0..self.layers_at
    }

    /// `param` of `layer` in a tensor laid out like the parameters.
    pub fn of(&self, block: Tensor, param: Param, layer: usize) -> Tensor {
        let range = self.range(param, layer);
        block.slice(range.start, range.len())
    }

    /// Every (tensor, layer) in the order of llm.c's files.
    pub fn file_order(&self) -> impl Iterator<Item = (Param, usize)> {
        let layers = self.descriptor.layers;
        Param::ALL.into_iter().flat_map(move |p| (0..if p.layered() { layers } else { 1 }).map(move |l| (p, l)))
    }

    /// The block cut where weight decay changes: it applies to matrices and embeddings only.
    pub fn decay_ranges(&self) -> Vec<DecayRange> {
        let mut ranges = vec![DecayRange { elements: 0..self.layers_at, decayed: true }];
        for layer in 0..self.descriptor.layers {
            let start = self.layers_at + layer * self.layer_elements;
            let vectors = self.range(Param::LAYER_VECTORS[0], layer).start;
            ranges.push(DecayRange { elements: start..vectors, decayed: true });
            ranges.push(DecayRange { elements: vectors..start + self.layer_elements, decayed: false });
        }
        ranges.push(DecayRange { elements: self.last_at..self.elements, decayed: false });
        ranges
    }
}
