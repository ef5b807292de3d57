//! Error bounds for an engine against a reference in fp32 or higher precision.

/// Error bounds. Those of logits and gradients are relative to the largest value of the tensor; those of losses are
/// absolute.
#[derive(Clone, Copy, Debug)]
pub struct Tolerance {
    /// Bound for the logits.
    pub logits: f32,
    /// Bound for the loss of the forward pass.
    pub loss: f32,
    /// Bound for the gradient of each parameter tensor.
    pub gradient: f32,
    /// Bound for the losses of optimizer steps.
    pub step_loss: f32,
}

impl Tolerance {
    /// Bounds for fp32.
    ///
    /// Reordering a sum of a few thousand terms changes it by at most 1e-6 of the largest value. The layers of a model
    /// amplify that about tenfold; GPT-2 124M shows 6e-6. AdamW normalizes gradients near zero, so an update may change
    /// its sign. Such weights hardly affect the loss: ten steps agree within 1e-6. llm.c allows 1e-5.
    const FP32: Self = Self { logits: 1e-4, loss: 1e-5, gradient: 1e-4, step_loss: 1e-5 };

    /// Bounds for bf16.
    ///
    /// bf16 has 8 significant bits, so rounding changes a stored activation by up to 2^-9 (0.2 %). A layer stores about
    /// ten activations in sequence. Their errors are independent and accumulate like a random walk: 12 layers give 2^-9
    /// · sqrt(120), or 2 % of a typical value, which is less relative to the largest value. GPT-2 124M on a GPU has
    /// errors of 0.9 % in the logits and 0.4 to 1.7 % in the gradients.
    ///
    /// llm.c's bounds are looser: 25.0 for logits (20 % of GPT-2's largest). For gradients it allows 7.9 % of each
    /// value plus 0.004 to 0.5, which is between 60 % and eighty times a tensor's largest gradient.
    const BF16: Self = Self {
        logits: 2e-2,
        // The errors of different tokens cancel in the mean. llm.c allows 0.05.
        loss: 2e-2,
        gradient: 5e-2,
        // Weights are rounded stochastically, and the loss of the memorized batch falls tenfold in ten steps. llm.c
        // allows 0.05.
        step_loss: 5e-2,
    };

    /// Bounds for fp32 with GEMMs in TF32.
    ///
    /// TF32 has 11 significant bits, and a tensor core ignores the others: an input of a GEMM changes by up to 2^-10, half as much as
    /// by rounding to bf16. Stored activations are not rounded. The bounds are half of those for bf16.
    const TF32: Self = Self {
        logits: Self::BF16.logits / 2.0,
        loss: Self::BF16.loss / 2.0,
        gradient: Self::BF16.gradient / 2.0,
        step_loss: Self::BF16.step_loss / 2.0,
    };

    /// Returns the bounds for an engine that stores activations as bf16, or as fp32 with GEMMs in TF32 or in fp32.
    pub fn of(bf16: bool, tf32: bool) -> Self {
        match (bf16, tf32) {
            (true, _) => Self::BF16,
            (false, true) => Self::TF32,
            (false, false) => Self::FP32,
        }
    }
}
