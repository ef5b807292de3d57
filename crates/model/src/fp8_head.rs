//! The head in FP8: the logits, and the gradients of its weight and of its input.
//!
//! Each chunk of rows has its own scales. Inputs and the weight have current scaling. The gradient of a logit is at most that of the
//! loss, so its scale needs no statistics. Passes outside of training steps, and models with adapters, keep the head in the engine's type.

use super::decoder::Decoder;
use super::descriptor::Descriptor;
use super::fp8::Fp8Options;
use super::params::Param;
use engine::ops::{Fp8Backward, Fp8Format, Fp8Forward, Fp8Logits, Fp8Scale, MatmulShape, Quantize, Scaling};
use engine::plan::{Group, Plan};
use engine::tensor::{DType, Tensor};
use engine::{Engine, Result};

/// The number of buffers of a chunk of rows.
pub(super) const BUFFERS: usize = 3;

/// Returns names and shapes of the buffers of chunks of `rows` rows, which exist beside the logits.
pub(super) fn buffers(d: &Descriptor, rows: usize) -> [(&'static str, [usize; 2]); BUFFERS] {
    let (c, vp) = (d.channels, d.padded_vocab());
    [("FP8 head input", [rows, c]), ("FP8 head input transposed", [c, rows]), ("FP8 d logits", [rows, vp])]
}

/// FP8 operands of the head.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fp8Head {
    options: Fp8Options,
    /// (Vp, C) and (C, Vp)
    weight: [Tensor; 2],
    /// (chunk rows, C) and (C, chunk rows)
    inp: [Tensor; 2],
    /// (chunk rows, Vp)
    dlogits: Tensor,
    weight_scale: Fp8Scale,
    inp_scale: Fp8Scale,
    gradient_scale: Fp8Scale,
}

impl Fp8Head {
    pub(super) fn plan(
        plan: &mut Plan,
        options: Fp8Options,
        d: &Descriptor,
        [inp, inp_transposed, dlogits]: [Tensor; BUFFERS],
    ) -> Self {
        let (vp, c) = Param::Wte.shape(d);
        let mut add = |name: &str, shape: &[usize], dtype| plan.add(Group::Workspace, name, shape, dtype);
        let weight = [("FP8 head", [vp, c]), ("FP8 head transposed", [c, vp])];
        let weight = weight.map(|(name, shape)| add(name, &shape, options.dtype()));
        let statistics = ["FP8 head scales", "FP8 head amaxes"].map(|name| add(name, &[3], DType::F32));
        let [weight_scale, inp_scale, gradient_scale] = [0, 1, 2].map(|i| {
            let [scale, amax] = statistics.map(|tensor| tensor.slice(i, 1));
            Fp8Scale { scale, amax, counts: None }
        });
        let inp = [inp, inp_transposed];
        Self { options, weight, inp, dlogits, weight_scale, inp_scale, gradient_scale }
    }

    /// Returns the quantization of the weight (Vp, C).
    pub(super) fn quantize_weight(&self, weight: Tensor, shape: [usize; 2]) -> Quantize {
        quantize(self.weight, weight, self.weight_scale, shape)
    }

    /// Returns the quantization of the input (rows, C) of a chunk.
    pub(super) fn quantize_input(&self, inp: Tensor, MatmulShape { rows, c, .. }: MatmulShape) -> Quantize {
        quantize(self.inp.map(|to| to.slice(0, rows * c)), inp, self.inp_scale, [rows, c])
    }

    /// Returns the operands of a chunk's logits.
    pub(super) fn forward(&self, MatmulShape { rows, c, .. }: MatmulShape) -> Fp8Forward {
        Fp8Forward {
            inp: self.inp[0].slice(0, rows * c),
            inp_scale: self.inp_scale.scale,
            out: None,
            weight: self.weight[0],
            weight_scale: self.weight_scale.scale,
            accumulation: self.options.accumulation,
        }
    }

    /// Returns where the gradient of a chunk's logits is written. Its transpose overwrites the logits.
    pub(super) fn gradient(&self, logits: Tensor) -> Fp8Logits {
        let [out, transposed] = self.gradients(logits);
        Fp8Logits { out, transposed, scale: self.gradient_scale.scale }
    }

    fn gradients(&self, logits: Tensor) -> [Tensor; 2] {
        [self.dlogits.slice(0, logits.len), logits.reinterpret(logits.len, self.dlogits.dtype)]
    }

    /// Returns the operands of a chunk's backward pass.
    pub(super) fn backward(&self, logits: Tensor, MatmulShape { rows, c, .. }: MatmulShape) -> Fp8Backward {
        Fp8Backward {
            dout: self.gradients(logits),
            dout_is_quantized: true,
            dout_scale: self.gradient_scale,
            dout_is_of_logits: true,
            scaling: Scaling::Given,
            inp_transposed: self.inp[1].slice(0, rows * c),
            inp_is_quantized: true,
            inp_scale: self.inp_scale,
            weight_transposed: self.weight[1],
            weight_scale: self.weight_scale.scale,
            accumulation: self.options.accumulation,
            dinp: None,
        }
    }
}

/// Returns the quantization of a tensor to both layouts, with current scaling.
fn quantize([out, transposed]: [Tensor; 2], inp: Tensor, scale: Fp8Scale, shape: [usize; 2]) -> Quantize {
    Quantize {
        out: Some(out),
        transposed: Some(transposed),
        ..Quantize::new(inp, shape, Fp8Format::E4m3, scale, Scaling::Current)
    }
}

impl Decoder {
    /// Returns the head's FP8 operands, if it multiplies in FP8.
    pub(super) fn fp8_head(&self) -> Option<Fp8Head> {
        self.fp8?.head
    }

    /// Quantizes the weight of the head.
    pub(super) fn quantize_head(&self, engine: &mut dyn Engine) -> Result<()> {
        let Some(head) = self.fp8_head() else { return Ok(()) };
        let (vp, c) = Param::Wte.shape(&self.descriptor);
        engine.run(head.quantize_weight(self.param(self.head_param(), 0), [vp, c]))
    }
}
