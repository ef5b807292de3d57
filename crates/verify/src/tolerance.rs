//! How far an engine may lie from a reference in fp32 or better.

/// Logits and gradients: relative to the largest value of the tensor. Losses: absolute.
#[derive(Clone, Copy, Debug)]
pub struct Tolerance {
    pub logits: f32,
    pub loss: f32,
    pub gradient: f32,
    pub step_loss: f32,
}

impl Tolerance {
    /// Sums of some thousand products in another order: 1e-6 and less of the largest value, and through the layers of a
    /// model some ten times that; 6e-6 in GPT-2 124M. AdamW divides gradients near zero by their own size, so that an update
    /// may have the other sign, but such weights hardly matter: ten steps leave losses within 1e-6. llm.c: 1e-5.
    const FP32: Self = Self { logits: 1e-4, loss: 1e-5, gradient: 1e-4, step_loss: 1e-5 };

    /// bf16 keeps 8 bits, so each stored activation is off by up to 2^-9, 0.2 %, and a layer stores some ten of them one
    /// after the other; errors of different elements are independent and add up as a random walk: with 12 layers some
    /// 2^-9 · sqrt(120), 2 % of a typical value, and of the largest one, to which these bounds are relative, less: GPT-2 124M
    /// on a GPU has logits within 0.9 % and gradients within 0.4 to 1.7 % (docs/bench/verify-d12.txt). llm.c allows
    /// logits to be 25.0 off (20 % of GPT-2's), and gradients 7.9 % of each value and 0.004 to 0.5 on top, there from
    /// 60 % of a tensor's largest gradient to eighty times it.
    const BF16: Self = Self {
        logits: 2e-2,
        // A mean over tokens: their errors cancel. llm.c: 0.05.
        loss: 2e-2,
        gradient: 5e-2,
        // Stochastic rounding of the weights comes on top, and losses that a model which learns a batch by heart brings down
        // tenfold in ten steps. llm.c: 0.05.
        step_loss: 5e-2,
    };

    pub fn of(bf16: bool) -> Self {
        if bf16 { Self::BF16 } else { Self::FP32 }
    }
}
