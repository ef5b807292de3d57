//! The 16 parameter tensors and where they lie in memory.
//!
//! One contiguous block per layer, so that a layer's gradients can be reduced, or its parameters gathered, in one call:
//! `[wte wpe] [layer 0] … [layer L-1] [lnfw lnfb]`. In a layer's block the matrices (weight-decayed) come first. llm.c's
//! files hold the tensors in [`Param::ALL`] order with all layers of one tensor together; [`Params::file_order`] is the way
//! from one to the other.

use super::Descriptor;
use engine::UpdateRange;
use engine::tensor::Tensor;
use gpu::noise;
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

/// One of several equal shares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    pub rank: usize,
    pub ranks: usize,
}

impl Share {
    /// All there is.
    pub const WHOLE: Self = Self { rank: 0, ranks: 1 };

    /// This share of `n` elements: where they do not divide, the last shares are shorter.
    pub fn of(self, n: usize) -> Range<usize> {
        let part = n.div_ceil(self.ranks);
        n.min(self.rank * part)..n.min((self.rank + 1) * part)
    }
}

/// What is reduced, gathered and divided among ranks at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// wte and wpe.
    Embeddings,
    /// All tensors of a layer; the last one's with lnfw and lnfb.
    Layer(usize),
}

/// Where each tensor of each layer lies, in elements from the start of the parameter block. Gradients, moments and master
/// weights are laid out alike.
///
/// Units lie one after another. Where ranks divide them, each ends with a gap that makes the parts equal, and each part begins
/// at a multiple of 64 elements.
#[derive(Clone, Debug)]
pub struct Params {
    descriptor: Descriptor,
    share: Share,
    /// Of the embeddings, of a layer, of lnfw and lnfb, without gaps at their ends.
    embeddings: usize,
    layer_elements: usize,
    last_norm: usize,
    layers_at: usize,
    /// From one layer to the next.
    stride: usize,
    elements: usize,
}

/// A stretch of the parameter block that AdamW treats alike.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DecayRange {
    pub unit: Unit,
    pub elements: Range<usize>,
    pub decayed: bool,
    /// Where it would begin if no ranks divided the block: tells its draws from those of other ranges.
    pub number: usize,
}

impl DecayRange {
    /// What of it lies in `part`, as a range of that. An element draws alike whatever the part.
    pub fn within(&self, part: &Range<usize>) -> Option<UpdateRange> {
        let (start, end) = (self.elements.start.max(part.start), self.elements.end.min(part.end));
        // Each range has a seed of its own, or elements of equal index would be rounded alike.
        let seed = |start: usize| noise::seed_from(self.number as u32, start - self.elements.start);
        (start < end).then(|| UpdateRange {
            elements: start - part.start..end - part.start,
            decayed: self.decayed,
            seed: seed(start),
        })
    }
}

impl Params {
    pub fn new(descriptor: Descriptor) -> Self {
        Self::shared(descriptor, Share::WHOLE)
    }

    /// As [`new`](Self::new), for ranks that divide each unit.
    pub fn shared(descriptor: Descriptor, share: Share) -> Self {
        let total = |params: &[Param]| params.iter().map(|p| p.len(&descriptor).next_multiple_of(ALIGNMENT)).sum();
        let embeddings: usize = total(&[Wte, Wpe]);
        let layer_elements: usize = total(&Param::LAYER_MATRICES) + total(&Param::LAYER_VECTORS);
        let last_norm: usize = total(&[Lnfw, Lnfb]);
        let divided = |n: usize| n.div_ceil(share.ranks).next_multiple_of(ALIGNMENT) * share.ranks;
        let (layers_at, stride) = (divided(embeddings), divided(layer_elements));
        let elements = layers_at + (descriptor.layers - 1) * stride + divided(layer_elements + last_norm);
        Self { descriptor, share, embeddings, layer_elements, last_norm, layers_at, stride, elements }
    }

    pub fn descriptor(&self) -> &Descriptor {
        &self.descriptor
    }

    pub fn share(&self) -> Share {
        self.share
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
            Lnfw | Lnfb => self.last_norm_at(),
            _ => self.layers_at + layer * self.stride,
        };
        let before = block.iter().take_while(|p| **p != param);
        let start: usize =
            block_at + before.map(|p| p.len(&self.descriptor).next_multiple_of(ALIGNMENT)).sum::<usize>();
        start..start + param.len(&self.descriptor)
    }

    fn last_norm_at(&self) -> usize {
        self.layers_at + (self.descriptor.layers - 1) * self.stride + self.layer_elements
    }

    /// In the order of the block.
    pub fn units(&self) -> impl Iterator<Item = Unit> + use<> {
        std::iter::once(Unit::Embeddings).chain((0..self.descriptor.layers).map(Unit::Layer))
    }

    pub fn unit_of(&self, param: Param, layer: usize) -> Unit {
        match param {
            Wte | Wpe => Unit::Embeddings,
            Lnfw | Lnfb => Unit::Layer(self.descriptor.layers - 1),
            _ => Unit::Layer(layer),
        }
    }

    /// Elements of a unit and of the gap after it.
    pub fn unit(&self, unit: Unit) -> Range<usize> {
        match unit {
            Unit::Embeddings => 0..self.layers_at,
            Unit::Layer(layer) => {
                let start = self.layers_at + layer * self.stride;
                start..if layer + 1 == self.descriptor.layers { self.elements } else { start + self.stride }
            }
        }
    }

    /// This rank's part of a unit.
    pub fn own(&self, unit: Unit) -> Range<usize> {
        let unit = self.unit(unit);
        let part = unit.len() / self.share.ranks;
        let start = unit.start + self.share.rank * part;
        start..start + part
    }

    /// Elements of the largest layer.
    pub fn largest_layer(&self) -> usize {
        let last = self.unit(Unit::Layer(self.descriptor.layers - 1));
        last.len().max(self.stride)
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

    /// Every (tensor, layer) of a unit, in the order of llm.c's files.
    pub fn tensors_of(&self, unit: Unit) -> impl Iterator<Item = (Param, usize)> {
        self.file_order().filter(move |&(param, layer)| self.unit_of(param, layer) == unit)
    }

    /// The block cut where weight decay changes, without gaps between units: it applies to matrices and embeddings only.
    pub fn decay_ranges(&self) -> Vec<DecayRange> {
        let range =
            |unit, start, len, decayed, number| DecayRange { unit, elements: start..start + len, decayed, number };
        let mut ranges = vec![range(Unit::Embeddings, 0, self.embeddings, true, 0)];
        for layer in 0..self.descriptor.layers {
            let (unit, start) = (Unit::Layer(layer), self.layers_at + layer * self.stride);
            let number = self.embeddings + layer * self.layer_elements;
            let matrices = self.range(Param::LAYER_VECTORS[0], layer).start - start;
            ranges.push(range(unit, start, matrices, true, number));
            ranges.push(range(unit, start + matrices, self.layer_elements - matrices, false, number + matrices));
        }
        let layers = self.descriptor.layers;
        let number = self.embeddings + layers * self.layer_elements;
        ranges.push(range(Unit::Layer(layers - 1), self.last_norm_at(), self.last_norm, false, number));
        ranges
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_equal_or_shorter_at_the_end() {
        let shares = |n, ranks| (0..ranks).map(|rank| Share { rank, ranks }.of(n)).collect::<Vec<_>>();
        assert_eq!(shares(12, 3), [0..4, 4..8, 8..12]);
        assert_eq!(shares(10, 4), [0..3, 3..6, 6..9, 9..10]);
        assert_eq!(shares(4, 3), [0..2, 2..4, 4..4]);
    }

    #[test]
    fn parts_of_ranks_cover_every_tensor_once() {
        let descriptor = Descriptor::new(3, 2, 24, 10, 60).unwrap();
        for ranks in 1..6 {
            let layouts = (0..ranks).map(|rank| Params::shared(descriptor, Share { rank, ranks }));
            let layouts: Vec<Params> = layouts.collect();
            let mut seen = vec![0; layouts[0].elements()];
            for layout in &layouts {
                for unit in layout.units() {
                    let own = layout.own(unit);
                    assert!(own.start.is_multiple_of(ALIGNMENT) && own.len().is_multiple_of(ALIGNMENT));
                    seen[own].iter_mut().for_each(|n| *n += 1);
                }
            }
            assert!(seen.iter().all(|&n| n == 1), "{ranks} ranks");
            let mut used = vec![0; seen.len()];
            for (param, layer) in layouts[0].file_order() {
                let (range, unit) = (layouts[0].range(param, layer), layouts[0].unit(layouts[0].unit_of(param, layer)));
                assert!(unit.start <= range.start && range.end <= unit.end, "{} of layer {layer}", param.name());
                used[range].iter_mut().for_each(|n| *n += 1);
            }
            assert!(used.iter().all(|&n| n <= 1));
            assert_eq!(used.iter().sum::<usize>(), descriptor.parameters());
            // What decays and draws is the same, however the block is divided.
            let alone = Params::new(descriptor);
            for (range, whole) in layouts[0].decay_ranges().into_iter().zip(alone.decay_ranges()) {
                assert_eq!((range.number, range.elements.len()), (whole.elements.start, whole.elements.len()));
                assert_eq!((range.unit, range.decayed), (whole.unit, whole.decayed));
            }
        }
    }
}
