//! The operations that only low-rank adapters need.

use super::{UNIT, accumulated, case, input, linear_workload, output, workload};
use crate::selftest::case::{Case, Work};
use crate::selftest::compare::Tolerance;
use engine::ops::{
    Activate, ActivateBackward, Activation, Epilogue, MatmulBackward, MatmulForward, MatmulShape, ScaleBlocks,
};

/// Returns the cases at small and odd shapes.
pub fn edge_cases() -> Vec<Case> {
    let mut cases = vec![scale_whole(1, 8), scale_whole(37, 24), scale_blocks([5, 5, 9], 8, [true; 3])];
    cases.push(scale_blocks([64, 80, 96], 16, [true, false, true]));
    cases.extend([(1, 8, 64), (37, 80, 8), (130, 64, 24)].into_iter().flat_map(added_matmuls));
    cases.extend([(1, 8), (37, 80)].into_iter().flat_map(activations));
    cases
}

/// Returns the cases at shapes of Llama 3 8B with a rank of 16.
pub fn model_cases() -> Vec<Case> {
    let mut cases = vec![scale_whole(2048, 48), scale_blocks([4096, 5120, 6144], 16, [true; 3])];
    cases.extend([(1024, 16, 4096), (1024, 4096, 48)].into_iter().flat_map(added_matmuls));
    cases.extend(activations((256, 14_336)));
    cases
}

fn scale(shape: String, op: impl Fn(engine::tensor::Tensor) -> ScaleBlocks + 'static, n: usize) -> Case {
    let operands = vec![accumulated("values", n, Tolerance::ELEMENTWISE)];
    let work = Work { floats: 2 * n, ..Work::default() };
    case("scale_blocks", shape, workload(1, 1, 8, 1, 128, 0), operands, work, move |e, x| e.run(op(x[0])))
}

fn scale_whole(rows: usize, columns: usize) -> Case {
    scale(format!("{rows}x{columns}"), move |values| ScaleBlocks::whole(values, columns, 1.75), rows * columns)
}

fn scale_blocks(ends: [usize; 3], block_columns: usize, kept: [bool; 3]) -> Case {
    let columns = 3 * block_columns;
    let op = move |values| ScaleBlocks { values, columns, factor: 1.0, ends, block_columns, kept };
    scale(format!("{ends:?} {block_columns} {kept:?}"), op, ends[2] * columns)
}

/// Linear layers that add to their outputs, and one whose weight is frozen.
fn added_matmuls((rows, c, oc): (usize, usize, usize)) -> [Case; 3] {
    let shape = MatmulShape { rows, c, oc };
    let name = format!("{rows}x{c}x{oc}");
    let work = Work { floats: rows * (c + 2 * oc) + oc * c, bytes: 0, flops: 2 * rows * c * oc };
    let forward = vec![
        accumulated("out", rows * oc, Tolerance::ACCUMULATED),
        input("inp", rows * c, UNIT),
        input("weight", oc * c, UNIT),
    ];
    let forward =
        case("matmul_forward", format!("{name} added"), linear_workload(shape), forward, work, move |e, x| {
            let (epilogue, bias, fp8) = (Epilogue::Residual(x[0]), None, None);
            e.run(MatmulForward { bias, epilogue, fp8, ..MatmulForward::new([x[0], x[1], x[2]], shape) })
        });
    let backward = |adds: bool| {
        let dinp = if adds { accumulated } else { output }("dinp", rows * c, Tolerance::CHAIN);
        let operands = vec![
            dinp,
            accumulated("dweight", oc * c, Tolerance::ACCUMULATED),
            input("dout", rows * oc, UNIT),
            input("inp", rows * c, UNIT),
            input("weight", oc * c, UNIT),
        ];
        let name = format!("{name} {}", if adds { "added" } else { "frozen" });
        case("matmul_backward", name, linear_workload(shape), operands, work, move |e, x| {
            e.run(MatmulBackward {
                adds_to_dinp: adds,
                ..MatmulBackward::new(x[0], adds.then_some(x[1]), [x[2], x[3], x[4]], shape)
            })
        })
    };
    [forward, backward(true), backward(false)]
}

fn activations((rows, columns): (usize, usize)) -> Vec<Case> {
    let of = |activation: Activation| {
        let (n, sums) = (rows * columns, rows * columns * activation.inputs());
        let shape = format!("{rows}x{columns} {}", activation.name().to_lowercase());
        let work = Work { floats: n + sums, ..Work::default() };
        let workload = || linear_workload(MatmulShape { rows, c: columns, oc: columns });
        let operands = vec![output("out", n, Tolerance::REDUCTION), input("preactivation", sums, UNIT)];
        let forward = case("activate", shape.clone(), workload(), operands, work, move |e, x| {
            e.run(Activate { activation, out: x[0], preactivation: x[1], columns })
        });
        let gated = activation.is_gated();
        let dinp = if gated { output } else { accumulated }("dinp", sums, Tolerance::CHAIN);
        let operands = vec![dinp, input("dout", n, UNIT), input("preactivation", sums, UNIT)];
        let backward = case("activate_backward", shape, workload(), operands, work, move |e, x| {
            let dout = gated.then_some(x[1]);
            e.run(ActivateBackward { activation, dinp: x[0], dout, preactivation: x[2], columns })
        });
        [forward, backward]
    };
    [Activation::Gelu, Activation::SwiGlu, Activation::ReluSquared].into_iter().flat_map(of).collect()
}
