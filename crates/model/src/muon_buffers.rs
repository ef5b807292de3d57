//! The matrices that Muon updates, and the memory of their update.

use super::params::{Param, Params, Unit};
use super::update::Muon;
use engine::ops::Orthogonalize;
use engine::plan::Wanted;
use engine::tensor::{DType, Tensor};
use std::ops::Range;

/// A matrix that Muon updates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Matrix {
    pub(super) rows: usize,
    pub(super) cols: usize,
    /// Elements of the parameter block.
    pub(super) elements: Range<usize>,
}

impl Matrix {
    pub(super) fn flops(&self) -> usize {
        Orthogonalize::flops(self.rows, self.cols)
    }

    /// Returns the factor of the update: a matrix with more rows than columns needs a larger one for outputs of the same size.
    pub(super) fn scale(&self) -> f32 {
        (self.rows as f32 / self.cols as f32).max(1.0).sqrt()
    }

    /// Returns the elements of v with the running means of its rows, or of its columns if there are more of them.
    pub(super) fn means(&self) -> Range<usize> {
        self.elements.start..self.elements.start + self.rows.max(self.cols)
    }
}

/// Returns the matrices of a layer, without the experts of other ranks if ranks share them. Queries, keys and values are matrices of their
/// own, as are up and gate of a gated activation, of each expert. Layers have the same matrices at the same positions, but some layers may
/// have more of them.
pub(super) fn matrices(layout: &Params, layer: usize) -> Vec<Matrix> {
    let d = layout.descriptor();
    let mut matrices = Vec::new();
    let others = [Param::Router, Param::ValueGate].into_iter();
    let others = others.filter(|other| other.is_in(d) && other.is_in_layer(d, layer) && d.has(*other));
    for param in Param::linear(d).chain(others) {
        let (_, cols) = param.shape(d);
        let mut start = layout.range(param, layer).start;
        for rows in param.matrices(d) {
            let elements = start..start + rows * cols;
            start = elements.end;
            let unit = layout.unit_of(param, layer);
            if !unit.is_of_experts() || layout.own(unit).contains(&elements.start) {
                matrices.push(Matrix { rows, cols, elements });
            }
        }
    }
    matrices
}

/// Returns the layer with the most matrices, and these.
pub(super) fn fullest_layer(layout: &Params) -> (usize, Vec<Matrix>) {
    let layers = (0..layout.descriptor().layers).map(|layer| (layer, matrices(layout, layer)));
    layers.max_by_key(|(_, matrices)| matrices.len()).unwrap_or_default()
}

/// Returns the elements of a layer's part of [`MuonBuffers::update`]: the largest layer, and this rank's experts of one layer if ranks
/// share them.
fn layer_elements(layout: &Params) -> usize {
    let experts = [Unit::ExpertsFc(0), Unit::ExpertsFcproj(0)].map(|unit| layout.own(unit).len());
    layout.largest_layer() + experts.iter().sum::<usize>()
}

/// Returns the index of an element of a unit in its layer's part of [`MuonBuffers::update`].
pub(super) fn index(layout: &Params, unit: Unit, element: usize) -> usize {
    let (own, layer) = (layout.own(unit), layout.largest_layer());
    match unit {
        Unit::ExpertsFc(_) => layer + element - own.start,
        Unit::ExpertsFcproj(of) => layer + layout.own(Unit::ExpertsFc(of)).len() + element - own.start,
        _ => element - layout.unit(unit).start,
    }
}

/// Tiles of 128 x 128 on and above the diagonal of a batch of symmetric matrices that fill a large GPU: eight for each of 132 SMs.
/// Larger batches take more memory and gain little.
const BATCH_TILES: usize = 1056;

/// Returns the most matrices of this shape that a batch should have.
fn largest_batch(matrix: &Matrix) -> usize {
    let tiles = matrix.rows.min(matrix.cols).div_ceil(128);
    BATCH_TILES.div_ceil(tiles * (tiles + 1) / 2)
}

/// Returns the matrices of several layers by shape: the layer and the position of those with the same rows and columns. Equal positions in
/// all layers are neighbors.
pub(super) fn shapes(layers: &[impl AsRef<[Matrix]>]) -> Vec<Vec<(usize, usize)>> {
    let mut shapes: Vec<Vec<(usize, usize)>> = Vec::new();
    let positions = layers.iter().map(|layer| layer.as_ref().len()).max().unwrap_or(0);
    let places = (0..positions).flat_map(|position| (0..layers.len()).map(move |layer| (layer, position)));
    for (layer, position) in places {
        let Some(&Matrix { rows, cols, .. }) = layers[layer].as_ref().get(position) else { continue };
        let same = |places: &&mut Vec<(usize, usize)>| {
            let other = &layers[places[0].0].as_ref()[places[0].1];
            (other.rows, other.cols) == (rows, cols)
        };
        match shapes.iter_mut().find(same) {
            Some(places) => places.push((layer, position)),
            None => shapes.push(vec![(layer, position)]),
        }
    }
    shapes
}

/// How many layers are updated at a time, and how many of their matrices are orthogonalized at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Batches {
    pub(super) layers: usize,
    /// Maximum number of matrices in a batch. Large matrices have smaller batches, see [`largest_batch`].
    matrices: usize,
}

impl Batches {
    /// Returns the matrices of a batch, of a shape that the layers of an update have `count` times.
    pub(super) fn of(self, matrix: &Matrix, count: usize) -> usize {
        count.min(self.matrices).min(largest_batch(matrix))
    }

    /// Returns the matrices of a batch, of a shape that each layer has at most `per_layer` times.
    pub(super) fn largest(self, matrix: &Matrix, per_layer: usize) -> usize {
        self.of(matrix, self.layers * per_layer)
    }
}

/// Memory of the update of several layers.
#[derive(Clone, Copy, Debug)]
pub(super) struct MuonBuffers {
    pub(super) batches: Batches,
    /// (layers, largest layer and its shared experts) float: the updates, at the [`index`] of the layers' parameters
    pub(super) update: Tensor,
    /// (largest batch) float: orthogonalized matrices
    out: Tensor,
    /// (largest batch) float
    next: Tensor,
    /// (matrices, s, s) float of the largest batch for the shorter side s
    gram: Tensor,
    polynomial: Tensor,
    /// (matrices, sums of squares) f32
    pub(super) partials: Tensor,
    /// (layers, running means of a layer), of the type of v: the means that ranks send and receive; empty if they do not shard them
    means: Tensor,
}

/// The sizes of [`MuonBuffers`].
pub(super) struct MuonSizes {
    batches: Batches,
    update: [usize; 2],
    batch: [usize; 1],
    square: [usize; 1],
    partials: [usize; 2],
    means: [usize; 2],
    moments: DType,
}

impl MuonSizes {
    /// Returns the sizes for as many layers as possible in `free` bytes, or the smallest sizes. `dtype` is that of the parameters,
    /// `moments` that of v.
    pub(super) fn new(layout: &Params, [dtype, moments]: [DType; 2], free: usize) -> Self {
        let (_, matrices) = fullest_layer(layout);
        let layers = Muon::most_layers(layout.descriptor().layers, layout.shard());
        let most = matrices.len();
        let whole = (1..=layers).rev().map(|layers| Batches { layers, matrices: usize::MAX });
        let parts = (1..most).rev().map(|matrices| Batches { layers: 1, matrices });
        let mut sizes = whole.chain(parts).map(|batches| Self::of(layout, &matrices, batches, moments));
        let fitting = sizes.find(|sizes| sizes.bytes(dtype) <= free);
        fitting.unwrap_or_else(|| Self::of(layout, &matrices, Batches { layers: 1, matrices: 1 }, moments))
    }

    fn of(layout: &Params, matrices: &[Matrix], batches: Batches, moments: DType) -> Self {
        let shapes = shapes(&[matrices]);
        let largest = |elements: fn(&Matrix) -> usize| {
            let of = |shape: &Vec<(usize, usize)>| {
                let matrix = &matrices[shape[0].1];
                batches.largest(matrix, shape.len()) * Orthogonalize::stride(elements(matrix))
            };
            shapes.iter().map(of).max().unwrap_or(0)
        };
        let means = matrices.iter().map(|matrix| matrix.means().len()).sum();
        let count = shapes.iter().map(|shape| batches.largest(&matrices[shape[0].1], shape.len())).max().unwrap_or(0);
        Self {
            batches,
            update: [batches.layers, layer_elements(layout)],
            batch: [largest(|matrix| matrix.elements.len())],
            square: [largest(|matrix| matrix.rows.min(matrix.cols).pow(2))],
            // Also the sums of squares of one matrix's rows or columns.
            partials: [
                count,
                matrices.iter().map(|matrix| Orthogonalize::partials(matrix.means().len())).max().unwrap_or(0),
            ],
            means: [batches.layers, if layout.shard().ranks > 1 { means } else { 0 }],
            moments,
        }
    }

    /// Returns the buffers to plan, in the order that [`MuonBuffers::new`] takes them.
    pub(super) fn wanted(&self, dtype: DType) -> [Wanted<'_>; 7] {
        [
            ("muon update", &self.update, dtype),
            ("muon out", &self.batch, dtype),
            ("muon next", &self.batch, dtype),
            ("muon gram", &self.square, dtype),
            ("muon polynomial", &self.square, dtype),
            ("muon partials", &self.partials, DType::F32),
            ("muon means", &self.means, self.moments),
        ]
    }

    fn bytes(&self, dtype: DType) -> usize {
        engine::plan::bytes(&self.wanted(dtype))
    }
}

impl MuonBuffers {
    /// Creates the handles of planned buffers.
    pub(super) fn new(sizes: &MuonSizes, [update, out, next, gram, polynomial, partials, means]: [Tensor; 7]) -> Self {
        Self { batches: sizes.batches, update, out, next, gram, polynomial, partials, means }
    }

    /// Returns the memory of the update of layer number `i` of a group.
    pub(super) fn layer(&self, i: usize) -> Tensor {
        self.update.part(i, self.batches.layers)
    }

    /// Returns the memory of the running means of layer number `i` of a group, if ranks exchange them.
    pub(super) fn means(&self, i: usize) -> Option<Tensor> {
        (self.means.len > 0).then(|| self.means.part(i, self.batches.layers))
    }

    /// Returns the operation that orthogonalizes matrices of the shape of `matrix`.
    pub(super) fn orthogonalize<'a>(&self, matrices: &'a [Tensor], matrix: &Matrix, muon: &Muon) -> Orthogonalize<'a> {
        let Self { out, next, gram, polynomial, partials, .. } = *self;
        let Matrix { rows, cols, .. } = *matrix;
        let Muon { coefficients, additions, .. } = *muon;
        Orthogonalize { matrices, out, next, gram, polynomial, partials, rows, cols, coefficients, additions }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Descriptor;
    use engine::ops::Activation;

    #[test]
    fn matrices_cover_the_layers_matrices_and_split_queries_keys_and_values() {
        let descriptor = Descriptor::gpt2(3, 2, 24, 10, 60).unwrap();
        let layout = Params::new(descriptor);
        let of = |layer| matrices(&layout, layer);
        let shapes: Vec<_> = of(1).iter().map(|matrix| (matrix.rows, matrix.cols)).collect();
        assert_eq!(shapes, [(24, 24), (24, 24), (24, 24), (24, 24), (96, 24), (24, 96)]);
        assert_eq!(of(1)[0].elements.start, layout.range(Param::Qkvw, 1).start);
        assert_eq!(of(1)[2].elements.end, layout.range(Param::Qkvw, 1).end);
        assert_eq!(of(2)[5].elements, layout.range(Param::Fcprojw, 2));
        assert_eq!([4, 5].map(|i| of(0)[i].scale().to_bits()), [2.0f32, 1.0].map(f32::to_bits));
    }

    #[test]
    fn matrices_of_one_shape_form_a_batch() {
        let gpt2 = Descriptor::gpt2(3, 2, 24, 10, 60).unwrap();
        let layers = |layout: &Params, count| (0..count).map(|layer| matrices(layout, layer)).collect::<Vec<_>>();
        let of_one = |descriptor| {
            let shapes = shapes(&layers(&Params::new(descriptor), 1)).into_iter();
            shapes.map(|shape| shape.into_iter().map(|(_, position)| position).collect()).collect::<Vec<Vec<_>>>()
        };
        assert_eq!(of_one(gpt2), [vec![0, 1, 2, 3], vec![4], vec![5]]);
        let gated = Descriptor { activation: Activation::SwiGlu, kv_heads: 1, ..gpt2 };
        assert_eq!(of_one(gated), [vec![0, 3], vec![1, 2], vec![4, 5], vec![6]]);
        // Some layers have one matrix more.
        let mut layers = layers(&Params::new(gpt2), 3);
        let gate = Matrix { rows: 2, cols: 12, elements: 0..24 };
        for layer in [0, 2] {
            layers[layer].push(gate.clone());
        }
        let found = shapes(&layers);
        let squares: Vec<_> = (0..4).flat_map(|position| [0, 1, 2].map(|layer| (layer, position))).collect();
        let once = |position| vec![(0, position), (1, position), (2, position)];
        assert_eq!(found, [squares, once(4), once(5), vec![(0, 6), (2, 6)]]);
        let square = |side| Matrix { rows: side, cols: 4 * side, elements: 0..0 };
        assert_eq!([64, 768, 2048, 8192].map(|side| largest_batch(&square(side))), [1056, 51, 8, 1]);
    }

    /// Less memory leads to fewer layers at a time, then to smaller batches.
    #[test]
    fn batches_fit_in_the_memory_that_is_free() {
        let layout = Params::new(Descriptor::gpt2(12, 12, 768, 1024, 50257).unwrap());
        let sizes = |free| MuonSizes::new(&layout, [DType::Bf16, DType::F32], free);
        let all = sizes(usize::MAX);
        assert_eq!(all.batches, Batches { layers: 12, matrices: usize::MAX });
        assert_eq!((all.update, all.batch, all.partials[0]), ([12, layout.largest_layer()], [12 * 3072 * 768], 48));
        let mut previous = all;
        let mut seen = Vec::new();
        while previous.batches.matrices > 1 {
            let next = sizes(previous.bytes(DType::Bf16) - 1);
            assert!(next.bytes(DType::Bf16) < previous.bytes(DType::Bf16));
            seen.push((next.batches.layers, next.batches.matrices.min(99)));
            previous = next;
        }
        let layers = (1..12).rev().map(|layers| (layers, 99));
        assert!(seen.starts_with(&layers.collect::<Vec<_>>()), "{seen:?}");
        assert_eq!(seen.last(), Some(&(1, 1)));
        assert_eq!(sizes(0).batches, previous.batches);
    }
}
