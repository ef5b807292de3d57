//! The classifier: softmax, cross-entropy loss and its gradient.

use super::file;
use super::softmax::log_sum_exp;
use crate::registry::{Family, Kernel};
use crate::session::{Session, Tolerance, blocks, shared_bytes};
use crate::values::tokens;
use anyhow::Result;
use cuda_std::{Global, GlobalMut, bf16};
use kernels_gpu::classifier;

pub const FAMILY: Family = Family {
    name: "classifier",
    problem: "losses (rows) += the cross-entropy of logits (rows, Vp), which their gradient replaces.",
    kernels: &[
        Kernel::new(
            40,
            "classifier_unfused",
            file!("classifier/unfused.rs"),
            "Softmax, loss and gradient as three kernels, with the probabilities in memory.",
            unfused,
        ),
        Kernel::new(
            41,
            "classifier_fused",
            file!("classifier/fused.rs"),
            "One kernel recomputes each probability, and none is stored.",
            |s| {
                let Problem { logits, losses, targets, rows, v, vp } = problem(s)?;
                let launch = classifier::fused::classifier_fused(logits, losses, targets, DLOSS, v as u32, vp as u32);
                s.launch(launch, blocks(rows, 1), shared_bytes(classifier::unfused::shared));
                Ok(())
            },
        ),
        Kernel::new(
            42,
            "classifier_online",
            file!("classifier/online.rs"),
            "Online softmax over packets: two passes of three.",
            |s| {
                let Problem { logits, losses, targets, rows, v, vp } = problem(s)?;
                let launch = classifier::online::classifier_online(logits, losses, targets, DLOSS, v as u32, vp as u32);
                s.launch(launch, blocks(rows, 1), shared_bytes(classifier::unfused::shared));
                Ok(())
            },
        ),
        Kernel::new(
            43,
            "classifier_staged",
            file!("classifier/staged.rs"),
            "The row is copied to shared memory asynchronously, and is read from memory once.",
            |s| {
                let Problem { logits, losses, targets, rows, v, vp } = problem(s)?;
                let launch = classifier::staged::classifier_staged(logits, losses, targets, DLOSS, v as u32, vp as u32);
                s.launch(launch, blocks(rows, 1), shared_bytes(|layout| classifier::staged::shared(layout, vp)));
                Ok(())
            },
        ),
        Kernel::new(
            44,
            "classifier_production",
            "gpu/src/classifier.rs",
            "Fewer instructions, and arithmetic starts when half of the row has arrived.",
            production,
        ),
    ],
};

/// The gradient of each loss.
const DLOSS: f32 = 0.25;

struct Problem {
    logits: GlobalMut<bf16>,
    losses: GlobalMut<f32>,
    targets: Global<i32>,
    rows: usize,
    v: usize,
    vp: usize,
}

fn problem(s: &mut Session) -> Result<Problem> {
    let [rows, v, vp] = s.pick([5, 1003, 1024], [2048, 50257, 50304]);
    let (logits, x) = s.noisy_buffer::<bf16>("logits", rows * vp, 4.0)?;
    let (losses, old) = s.noisy_buffer::<f32>("losses", rows, 1.0)?;
    let of_row = tokens("targets", rows, v);
    let targets = s.input("targets", &of_row)?;
    s.work.bytes = 4 * rows * vp + 12 * rows;
    let (y, targets_of_rows) = (x.clone(), of_row.clone());
    s.expect("logits", logits, rows * vp, Tolerance::BF16, move |i| {
        let (row, column) = (i / vp, i % vp);
        let onehot = f64::from(u8::from(column == of_row[row] as usize));
        let probability = (x.at(i) - log_sum_exp(&x, row * vp, v)).exp();
        if column < v { (probability - onehot) * f64::from(DLOSS) } else { 0.0 }
    });
    s.expect("losses", losses, rows, Tolerance::F32, move |row| {
        old.at(row) + log_sum_exp(&y, row * vp, v) - y.at(row * vp + targets_of_rows[row] as usize)
    });
    Ok(Problem { logits, losses, targets, rows, v, vp })
}

fn unfused(s: &mut Session) -> Result<()> {
    use classifier::unfused::{classifier_gradient, classifier_loss, classifier_softmax, shared};
    let Problem { logits, losses, targets, rows, v, vp } = problem(s)?;
    let probs = s.output::<f32>("probs", rows * v)?;
    let (vocabulary, padded) = (v as u32, vp as u32);
    s.launch(classifier_softmax(probs, logits.reader(), vocabulary, padded), blocks(rows, 1), shared_bytes(shared));
    let probs = probs.reader();
    s.launch(classifier_loss(losses, probs, targets, rows as u32, vocabulary), blocks(rows, 128), 0);
    s.launch(classifier_gradient(logits, probs, targets, DLOSS, vocabulary, padded), blocks(rows, 1), 0);
    Ok(())
}

fn production(s: &mut Session) -> Result<()> {
    use gpu::classifier::{Scalars, classifier, shared, staged};
    /// Shared memory of a block, in bytes: two blocks fit on an SM of Hopper, one on an SM of Ampere.
    const SHARED_BYTES: usize = 112 << 10;
    let Problem { logits, losses, targets, rows, v, vp } = problem(s)?;
    let staged = staged::<bf16>(vp, SHARED_BYTES);
    let scalars = Scalars { dloss: DLOSS, vocabulary: v as u32, padded: vp as u32, staged: staged as u32 };
    let launch = classifier::<false, bf16>(logits, losses, targets, scalars, 1, 0.0);
    s.launch(launch, blocks(rows, 1), shared_bytes(|layout| shared::<bf16>(layout, staged)));
    Ok(())
}
