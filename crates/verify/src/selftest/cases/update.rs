//! The cases of the optimizers.

use super::{Case, UNIT, accumulated, case, exact, f32, input, output, workload};
use crate::selftest::case::{Init, Operand, Work};
use crate::selftest::compare::Tolerance;
use engine::Workload;
use engine::ops::{
    AdamW, AdamWUpdate, Master, MuonAdditions, MuonApply, MuonCoefficients, MuonMomentum, MuonVariance, Orthogonalize,
    UpdateRange,
};
use engine::tensor::{DType, Tensor};
use model::{MasterWeights, Moments, Muon};

/// All additions to Muon.
const ALL: MuonAdditions = MuonAdditions { equilibrate: true, renormalize: true, variance: true, cautious_decay: true };

/// Returns every operation at small and odd sizes.
pub(super) fn edge_cases() -> Vec<Case> {
    let mut cases: Vec<Case> = [8, 1000, 12_344].into_iter().flat_map(adamw_forms).collect();
    // Matrices need not divide into vectors.
    cases.extend([8, 1001, 12_344].into_iter().flat_map(muon_forms));
    // More than one tile of 128 x 128 or 128 x 192.
    let kind = MuonCoefficients::PolarExpress;
    for (rows, cols) in [(136, 456), (520, 200)] {
        cases.extend([MuonAdditions::default(), ALL].map(|additions| orthogonalize(2, rows, cols, kind, additions)));
    }
    for (rows, cols) in [(8, 40), (96, 24), (16, 72)] {
        let kinds = [MuonCoefficients::PolarExpress, MuonCoefficients::Classic];
        cases.extend(kinds.map(|kind| orthogonalize(3, rows, cols, kind, MuonAdditions::default())));
        cases.push(orthogonalize(3, rows, cols, kind, ALL));
    }
    // One kernel for small matrices with rows of any length.
    for (rows, cols) in [(1, 12), (2, 12), (12, 33), (32, 12)] {
        cases.extend([MuonAdditions::default(), ALL].map(|additions| orthogonalize(3, rows, cols, kind, additions)));
    }
    for (rows, cols) in [(1, 12), (136, 456), (520, 200)] {
        cases.extend([Moments::F32, Moments::Bf16].map(|moments| muon_variance(rows, cols, moments)));
    }
    cases
}

/// Returns every operation at sizes of GPT-2.
pub(super) fn model_cases() -> Vec<Case> {
    let mut cases: Vec<Case> = [1 << 20, 7_087_872].into_iter().flat_map(adamw_forms).collect();
    cases.extend(muon_forms(1 << 20));
    for (rows, cols) in [(768, 3072), (3072, 768)] {
        let of = |additions| orthogonalize(4, rows, cols, MuonCoefficients::PolarExpress, additions);
        cases.extend([MuonAdditions::default(), ALL].map(of));
        cases.push(muon_variance(rows, cols, Moments::F32));
    }
    cases
}

/// Returns AdamW with each storage of the optimizer state.
fn adamw_forms(n: usize) -> Vec<Case> {
    let compact = COMPACT.map(|(masters, moments)| compact_adamw(update_ranges(n), masters, moments));
    [adamw(update_ranges(n))].into_iter().chain(compact).collect()
}

/// Returns the elementwise operations of Muon with each storage of the optimizer state.
fn muon_forms(n: usize) -> Vec<Case> {
    let masters = [MasterWeights::None, MasterWeights::F32, MasterWeights::Remainder];
    let moments = [Moments::F32, Moments::Bf16].map(|moments| muon_momentum(n, moments));
    moments.into_iter().chain(masters.map(|masters| muon_apply(n, masters))).collect()
}

/// Partitions `n` elements into ranges of 8, 24, 72, ... elements, with weight decay for every other range.
fn update_ranges(n: usize) -> Vec<UpdateRange> {
    let (mut ranges, mut start, mut len) = (Vec::new(), 0, 8);
    while start < n {
        let elements = start..n.min(start + len);
        (start, len) = (elements.end, 3 * len);
        ranges.push(UpdateRange { elements, decayed: ranges.len() % 2 == 0, seed: 5 * start as u32 });
    }
    ranges
}

/// The storage of the optimizer state beside bf16 parameters, except the default.
const COMPACT: [(MasterWeights, Moments); 7] = [
    (MasterWeights::None, Moments::F32),
    (MasterWeights::None, Moments::Bf16),
    (MasterWeights::Remainder, Moments::F32),
    (MasterWeights::Remainder, Moments::Bf16),
    (MasterWeights::None, Moments::EightBit),
    (MasterWeights::F32, Moments::EightBit),
    (MasterWeights::Remainder, Moments::EightBit),
];

const ADAMW: AdamW =
    AdamW { learning_rate: 0.05, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, step: 3, clip: 1.0, seed: 77 };

/// The factor of the gradients, as if a fifth of the targets were masked.
const GRAD_FACTOR: f32 = 1.25;

/// Returns AdamW updates of all elements of the ranges with other storage of the optimizer state. Remainders start at 0, so they
/// affect the parameters from the second update on.
pub(super) fn compact_adamw(ranges: Vec<UpdateRange>, master_weights: MasterWeights, moments: Moments) -> Case {
    let n = ranges.iter().map(|range| range.elements.len()).sum();
    let remainder = master_weights == MasterWeights::Remainder;
    let tolerance = match moments {
        Moments::F32 => Tolerance::REDUCTION,
        Moments::Bf16 => Tolerance::STOCHASTIC,
        // One step of three bits of mantissa.
        Moments::EightBit => Tolerance { f32: 0.126, bf16: 0.126 },
    };
    let moment = |name, init, signed| {
        let dtype = match moments {
            Moments::F32 => Some(DType::F32),
            Moments::Bf16 => None,
            Moments::EightBit => Some(DType::Block8 { signed }),
        };
        Operand { dtype, init, ..accumulated(name, n, tolerance) }
    };
    let [m, v] = [moment("m", UNIT, true), moment("v", Init::Uniform { mean: 1.0, spread: 0.9 }, false)];
    let operands = vec![
        Operand { checked: Some(Tolerance::STOCHASTIC), ..input("params", n, UNIT) },
        input("grads", n, UNIT),
        m,
        v,
        match master_weights {
            MasterWeights::None => input("master", 8, Init::Zero),
            MasterWeights::F32 => f32(input("master", n, UNIT)),
            MasterWeights::Remainder => input("remainder", n, Init::Zero),
        },
        f32(input("stats", 2, Init::Values(vec![7.0, 2.5]))),
    ];
    let updates = if remainder && moments == Moments::F32 { 4 } else { 1 };
    let (bf16_moments, moment_bytes) = match moments {
        Moments::F32 => (0, 16),
        Moments::Bf16 => (4, 0),
        Moments::EightBit => (0, 4),
    };
    let (bf16_masters, master_bytes) = match master_weights {
        MasterWeights::None => (1, 0),
        MasterWeights::F32 => (0, 8),
        MasterWeights::Remainder => (3, 0),
    };
    let (bf16s, bytes) = (2 + bf16_masters + bf16_moments, moment_bytes + master_bytes);
    let work = Work { floats: bf16s * n * updates, bytes: bytes * n * updates, flops: 0 };
    let workload = Workload { update_ranges: ranges.len(), ..workload(1, 1, 8, 1, 128, n) };
    let name = format!("{n}, masters {master_weights}, moments {}", moments.name());
    exact(case("adamw", name, workload, operands, work, move |e, x| {
        let [params, grads, m, v, stats] = [x[0], x[1], x[2], x[3], x[5]];
        let master = match e.dtype() {
            DType::Bf16 if remainder => Master::Remainder(Tensor { dtype: DType::U16, ..x[4] }),
            DType::Bf16 if master_weights == MasterWeights::F32 => {
                e.cast(x[4], params)?;
                Master::F32(x[4])
            }
            _ => Master::None,
        };
        for update in 0..updates as u32 {
            let settings = AdamW { step: ADAMW.step + update, seed: ADAMW.seed + update, ..ADAMW };
            e.run(AdamWUpdate {
                params,
                grads,
                m,
                v,
                master,
                ranges: &ranges,
                stats,
                grad_factor: GRAD_FACTOR,
                settings,
            })?;
        }
        Ok(())
    }))
}

/// Returns an AdamW update of all elements of the ranges.
pub(super) fn adamw(ranges: Vec<UpdateRange>) -> Case {
    let n = ranges.iter().map(|range| range.elements.len()).sum();
    let operands = vec![
        Operand { checked: Some(Tolerance::STOCHASTIC), ..input("params", n, UNIT) },
        input("grads", n, UNIT),
        f32(accumulated("m", n, Tolerance::REDUCTION)),
        f32(Operand { init: Init::Uniform { mean: 1.0, spread: 0.9 }, ..accumulated("v", n, Tolerance::REDUCTION) }),
        f32(accumulated("master", n, Tolerance::REDUCTION)),
        f32(input("stats", 2, Init::Values(vec![7.0, 2.5]))),
    ];
    let settings = ADAMW;
    let work = Work { floats: 2 * n, bytes: 24 * n, flops: 0 };
    let workload = Workload { update_ranges: ranges.len(), ..workload(1, 1, 8, 1, 128, n) };
    exact(case("adamw", format!("{n}"), workload, operands, work, move |e, x| {
        // An f32 engine has no master weights. Copying keeps the values of both engines equal.
        if e.dtype() == DType::F32 {
            e.cast(x[0], x[4])?;
        }
        let master = if e.dtype() == DType::F32 { Master::None } else { Master::F32(x[4]) };
        let [params, grads, m, v, stats] = [x[0], x[1], x[2], x[3], x[5]];
        e.run(AdamWUpdate { params, grads, m, v, master, ranges: &ranges, stats, grad_factor: GRAD_FACTOR, settings })?;
        if e.dtype() == DType::F32 {
            e.cast(x[4], x[0])?;
        }
        Ok(())
    }))
}

/// Returns a momentum update of `n` elements.
fn muon_momentum(n: usize, moments: Moments) -> Case {
    let in_f32 = moments == Moments::F32;
    let m = if in_f32 {
        f32(accumulated("m", n, Tolerance::ELEMENTWISE))
    } else {
        accumulated("m", n, Tolerance::STOCHASTIC)
    };
    let operands = vec![
        output("update", n, Tolerance::ELEMENTWISE),
        m,
        input("grads", n, UNIT),
        f32(input("stats", 2, Init::Values(vec![7.0, 2.5]))),
    ];
    let (floats, bytes) = if in_f32 { (2 * n, 8 * n) } else { (4 * n, 0) };
    let work = Work { floats, bytes, flops: 0 };
    let name = format!("{n}, m {}", moments.name());
    exact(case("muon_momentum", name, workload(1, 1, 8, 1, 128, n), operands, work, |e, x| {
        let [update, m, grads, stats] = [x[0], x[1], x[2], x[3]];
        e.run(MuonMomentum { update, m, grads, stats, grad_factor: GRAD_FACTOR, momentum: 0.95, clip: 1.0, seed: 77 })
    }))
}

/// Returns a scaling of a matrix by the running means of its rows or columns.
fn muon_variance(rows: usize, cols: usize, moments: Moments) -> Case {
    let (elements, n) = (rows * cols, rows.max(cols));
    let means = Operand { init: Init::Uniform { mean: 1.0, spread: 0.9 }, ..input("second", n, UNIT) };
    let means = if moments == Moments::F32 {
        f32(Operand { checked: Some(Tolerance::REDUCTION), ..means })
    } else {
        Operand { checked: Some(Tolerance::STOCHASTIC), ..means }
    };
    let operands = vec![
        accumulated("update", elements, Tolerance::CHAIN),
        means,
        f32(input("sums", n, Init::Poison)),
        f32(input("stats", 2, Init::Values(vec![7.0, 2.5]))),
    ];
    let work = Work { floats: 3 * elements, bytes: 0, flops: 0 };
    let name = format!("{rows}x{cols}, means {}", moments.name());
    case("muon_variance", name, workload(1, 1, 8, 1, 128, elements), operands, work, move |e, x| {
        let [update, second, sums, stats] = [x[0], x[1], x[2], x[3]];
        let (beta2, grad_factor, seed) = (Muon::BETA2, GRAD_FACTOR, 77);
        e.run(MuonVariance { update, second, sums, stats, rows, cols, beta2, grad_factor, seed })
    })
}

/// Returns an update of `n` weights, or four with remainders: they start at 0, so they affect the parameters from the second on.
fn muon_apply(n: usize, master_weights: MasterWeights) -> Case {
    let masters = input("masters", n, Init::Zero);
    let (masters, moved) = match master_weights {
        MasterWeights::None => (Operand { len: 8, ..masters }, [3, 0]),
        MasterWeights::F32 => (f32(accumulated("masters", n, Tolerance::REDUCTION)), [2, 8]),
        MasterWeights::Remainder => (masters, [5, 0]),
    };
    let operands = vec![
        Operand { checked: Some(Tolerance::STOCHASTIC), ..input("params", n, UNIT) },
        masters,
        input("update", n, UNIT),
        f32(input("stats", 2, Init::Values(vec![7.0, 2.5]))),
    ];
    let updates = if master_weights == MasterWeights::Remainder { 4 } else { 1 };
    let work = Work { floats: moved[0] * n * updates, bytes: moved[1] * n * updates, flops: 0 };
    let name = format!("{n}, masters {master_weights}");
    exact(case("muon_apply", name, workload(1, 1, 8, 1, 128, n), operands, work, move |e, x| {
        let [params, masters, update, stats] = [x[0], x[1], x[2], x[3]];
        // An f32 engine has no master weights. Copying keeps the values of both engines equal.
        let copies = master_weights == MasterWeights::F32 && e.dtype() == DType::F32;
        if copies {
            e.cast(params, masters)?;
        }
        let master = match (e.dtype(), master_weights) {
            (DType::Bf16, MasterWeights::F32) => Master::F32(masters),
            (DType::Bf16, MasterWeights::Remainder) => Master::Remainder(Tensor { dtype: DType::U16, ..masters }),
            _ => Master::None,
        };
        for seed in 0..updates as u32 {
            let (learning_rate, scale, weight_decay) = (0.02, 1.5, 0.1);
            e.run(MuonApply {
                params,
                master,
                update,
                stats,
                grad_factor: GRAD_FACTOR,
                learning_rate,
                scale,
                weight_decay,
                // Odd numbers of weights.
                cautious_decay: n % 2 == 1,
                seed,
            })?;
        }
        if copies { e.cast(masters, params) } else { Ok(()) }
    }))
}

/// Returns an orthogonalization of `count` random matrices as a batch. Matrices that are far from square have no small singular
/// values.
fn orthogonalize(
    count: usize,
    rows: usize,
    cols: usize,
    coefficients: MuonCoefficients,
    additions: MuonAdditions,
) -> Case {
    let (n, side) = (rows * cols, rows.min(cols));
    let (batch, square) = (count * Orthogonalize::stride(n), count * Orthogonalize::stride(side * side));
    let operands = vec![
        input("matrices", count * n, UNIT),
        // The elements between the matrices of a batch are not written.
        output("results", count * n, Tolerance::ORTHOGONALIZED),
        input("out", batch, Init::Poison),
        input("next", batch, Init::Poison),
        input("gram", square, Init::Poison),
        input("polynomial", square, Init::Poison),
        f32(input("partials", count * Orthogonalize::partials(rows), Init::Poison)),
    ];
    let work = Work { floats: 0, bytes: 0, flops: count * Orthogonalize::flops(rows, cols) };
    let added = if additions == MuonAdditions::default() { "" } else { " with additions" };
    let name = format!("{count} of {rows}x{cols} {coefficients:?}{added}");
    case("orthogonalize", name, workload(1, 1, 8, 1, 128, n), operands, work, move |e, x| {
        let [all, results, out, next, gram, polynomial, partials] = [x[0], x[1], x[2], x[3], x[4], x[5], x[6]];
        let matrices: Vec<Tensor> = (0..count).map(|i| all.part(i, count)).collect();
        let matrices = &matrices;
        let op = Orthogonalize { matrices, out, next, gram, polynomial, partials, rows, cols, coefficients, additions };
        e.run(op)?;
        (0..count).try_for_each(|i| e.copy(results.part(i, count), op.result(i)))
    })
}
