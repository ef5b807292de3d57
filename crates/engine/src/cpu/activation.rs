//! Activations between the two linear layers of an MLP, fused into the matmuls.

use super::CHUNK;
use super::arena::{Arena, optional};
use crate::Result;
use crate::ops::{Activate, ActivateBackward, Activation};
use gpu::activation::{ActivationFunction, Visitor};
use rayon::prelude::*;

pub(super) fn activate(arena: &mut Arena, op: Activate) -> Result<()> {
    let Activate { activation, out, preactivation, columns } = op;
    let operands = [("out", out, out.len), ("preactivation", preactivation, out.len * activation.inputs())];
    let [out, preactivation] = arena.split("activate", operands)?;
    forward(activation, out, preactivation, columns);
    Ok(())
}

pub(super) fn activate_backward(arena: &mut Arena, op: ActivateBackward) -> Result<()> {
    let ActivateBackward { activation, dinp, dout, preactivation, columns } = op;
    let operands = [
        ("dinp", dinp, preactivation.len),
        optional("dout", dout, preactivation.len / activation.inputs()),
        ("preactivation", preactivation, preactivation.len),
    ];
    let [dinp, dout, preactivation] = arena.split("activate_backward", operands)?;
    backward(activation, dinp, dout, preactivation, columns);
    Ok(())
}

/// Computes out = activation(preactivation). out has rows of `columns` elements.
pub(super) fn forward(activation: Activation, out: &mut [f32], preactivation: &[f32], columns: usize) {
    activation.visit(ForwardVisitor { out, preactivation, columns });
}

struct ForwardVisitor<'a> {
    out: &'a mut [f32],
    preactivation: &'a [f32],
    columns: usize,
}

impl Visitor for ForwardVisitor<'_> {
    type Output = ();

    fn visit<A: ActivationFunction>(self) {
        let Self { out, preactivation, columns } = self;
        if A::INPUTS == 1 {
            out.par_chunks_mut(CHUNK).zip(preactivation.par_chunks(CHUNK)).for_each(|(out, x)| {
                for (out, &x) in out.iter_mut().zip(x) {
                    *out = A::reference_value([x, 0.0]);
                }
            });
            return;
        }
        let rows = out.par_chunks_mut(columns).zip(preactivation.par_chunks(2 * columns));
        rows.with_min_len(4).for_each(|(out, x)| {
            let (up, gate) = x.split_at(columns);
            for ((out, &up), &gate) in out.iter_mut().zip(up).zip(gate) {
                *out = A::reference_value([up, gate]);
            }
        });
    }
}

/// Computes dinp, the gradient of the preactivation, given that of the activation (rows, columns): `dout` if the activation is
/// gated, otherwise `dinp`, which is overwritten.
pub(super) fn backward(activation: Activation, dinp: &mut [f32], dout: &[f32], preactivation: &[f32], columns: usize) {
    activation.visit(BackwardVisitor { dinp, dout, preactivation, columns });
}

struct BackwardVisitor<'a> {
    dinp: &'a mut [f32],
    dout: &'a [f32],
    preactivation: &'a [f32],
    columns: usize,
}

impl Visitor for BackwardVisitor<'_> {
    type Output = ();

    fn visit<A: ActivationFunction>(self) {
        let Self { dinp, dout, preactivation, columns } = self;
        if A::INPUTS == 1 {
            dinp.par_chunks_mut(CHUNK).zip(preactivation.par_chunks(CHUNK)).for_each(|(grad, x)| {
                for (grad, &x) in grad.iter_mut().zip(x) {
                    *grad = A::reference_gradients(*grad, [x, 0.0])[0];
                }
            });
            return;
        }
        let rows =
            dinp.par_chunks_mut(2 * columns).zip(dout.par_chunks(columns).zip(preactivation.par_chunks(2 * columns)));
        rows.with_min_len(4).for_each(|(dinp, (dout, x))| {
            let ((dup, dgate), (up, gate)) = (dinp.split_at_mut(columns), x.split_at(columns));
            for (i, &dout) in dout.iter().enumerate() {
                [dup[i], dgate[i]] = A::reference_gradients(dout, [up[i], gate[i]]);
            }
        });
    }
}
