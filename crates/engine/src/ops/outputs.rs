//! The tensors that each operation writes.

use super::{Epilogue, Fp8Scale, Master, MatmulBackward, MatmulForward, Operation, Quantize, Scaling};
use crate::tensor::Tensor;

impl Operation<'_> {
    /// Returns the name of the operation and the tensors that it writes and that later operations may read, by field.
    pub fn outputs(&self) -> (&'static str, Vec<(&'static str, Tensor)>) {
        let master = |master: Master| master.tensor().map(|tensor| ("master", tensor));
        let (name, always, optional): (_, Vec<_>, Outputs) = match self {
            Self::EncoderForward(op) => ("EncoderForward", vec![("out", op.out)], vec![]),
            Self::EncoderBackward(op) => {
                ("EncoderBackward", vec![("dwte", op.dwte)], vec![op.dwpe.map(|dwpe| ("dwpe", dwpe))])
            }
            Self::LayerNormForward(op) => {
                let statistics = [("mean", op.mean), ("rstd", op.rstd)];
                ("LayerNormForward", vec![], normed(op.out, &statistics, op.quantized.as_ref()))
            }
            Self::LayerNormBackward(op) => (
                "LayerNormBackward",
                vec![("dinp", op.dinp), ("dweight", op.dweight), ("dbias", op.dbias)],
                vec![op.column_sums.map(|sums| ("column_sums", sums))],
            ),
            Self::RmsNormForward(op) => {
                ("RmsNormForward", vec![], normed(op.out, &[("rstd", op.rstd)], op.quantized.as_ref()))
            }
            Self::RmsNormBackward(op) => {
                ("RmsNormBackward", vec![("dinp", op.dinp)], vec![op.dweight.map(|dweight| ("dweight", dweight))])
            }
            Self::RotaryForward(op) => {
                ("RotaryForward", vec![("qkv", op.qkv)], vec![op.qk_norm.map(|norm| ("saved", norm.saved))])
            }
            Self::RotaryBackward(op) => {
                let [query, key] = [0, 1].map(|i| op.dweights.map(|weights| ("dweights", weights[i])));
                ("RotaryBackward", vec![("dqkv", op.dqkv)], vec![query, key])
            }
            Self::MatmulForward(op) => ("MatmulForward", vec![], matmul_forward(op)),
            Self::MatmulBackward(op) => ("MatmulBackward", vec![], matmul_backward(op)),
            Self::AttentionForward(op) => {
                let quantized = op.quantized.as_ref().map_or_else(Vec::new, quantize);
                ("AttentionForward", vec![("out", op.out), ("lse", op.lse)], quantized)
            }
            Self::AttentionBackward(op) => ("AttentionBackward", vec![("dqkv", op.dqkv)], vec![]),
            Self::Classifier(op) => {
                let gradient = op.dloss.map(|_| ("logits", op.logits));
                ("Classifier", vec![("losses", op.losses)], vec![gradient])
            }
            Self::Sum(op) => ("Sum", vec![("out", op.out)], vec![]),
            Self::GlobalNorm(op) => ("GlobalNorm", vec![("norm", op.norm)], vec![]),
            Self::SquaredSum(op) => ("SquaredSum", vec![("out", op.out)], vec![]),
            Self::SquareRoot(op) => ("SquareRoot", vec![("out", op.out)], vec![]),
            Self::AdamWUpdate(op) => {
                ("AdamWUpdate", vec![("params", op.params), ("m", op.m), ("v", op.v)], vec![master(op.master)])
            }
            Self::MuonMomentum(op) => ("MuonMomentum", vec![("update", op.update), ("m", op.m)], vec![]),
            Self::Orthogonalize(op) => ("Orthogonalize", vec![("out", op.out)], vec![]),
            Self::MuonApply(op) => ("MuonApply", vec![("params", op.params)], vec![master(op.master)]),
            Self::Quantize(op) => ("Quantize", vec![], quantize(op)),
            Self::Fp8Scales(op) => ("Fp8Scales", vec![("scales", op.scales), ("amaxes", op.amaxes)], vec![]),
            Self::DecodeEmbed(op) => ("DecodeEmbed", vec![("out", op.out)], vec![]),
            Self::DecodeMatmul(op) => ("DecodeMatmul", vec![], matmul_forward(&op.matmul)),
            Self::DecodeAttention(op) => {
                ("DecodeAttention", vec![("out", op.out), ("keys", op.keys), ("values", op.values)], vec![])
            }
            Self::CacheFill(op) => ("CacheFill", vec![("keys", op.keys), ("values", op.values)], vec![]),
            Self::SampleTokens(op) => {
                ("SampleTokens", vec![("sampled", op.sampled), ("slots", op.slots), ("seen", op.seen)], vec![])
            }
        };
        (name, always.into_iter().chain(optional.into_iter().flatten()).collect())
    }
}

type Outputs = Vec<Option<(&'static str, Tensor)>>;

fn normed(out: Tensor, statistics: &[(&'static str, Tensor)], quantized: Option<&Quantize>) -> Outputs {
    // An engine may leave an output unwritten that it quantizes.
    let out = quantized.is_none().then_some(("out", out));
    let quantized = quantized.into_iter().flat_map(quantize);
    [out].into_iter().chain(statistics.iter().copied().map(Some)).chain(quantized).collect()
}

fn matmul_forward(op: &MatmulForward) -> Outputs {
    let preactivation = match op.epilogue {
        Epilogue::Activation(_, preactivation) => Some(("preactivation", preactivation)),
        Epilogue::None | Epilogue::Residual(_) => None,
    };
    let Some(fp8) = &op.fp8 else { return vec![Some(("out", op.out)), preactivation] };
    // An engine may leave an output unwritten that it quantizes.
    let mut outputs = vec![fp8.out.is_none().then_some(("out", op.out)), preactivation];
    outputs.extend(fp8.out.iter().flat_map(quantize));
    outputs
}

fn matmul_backward(op: &MatmulBackward) -> Outputs {
    let gradients = [Some(("dweight", op.dweight)), op.dbias.map(|dbias| ("dbias", dbias))];
    let Some(fp8) = &op.fp8 else { return [Some(("dinp", op.dinp))].into_iter().chain(gradients).collect() };
    let mut outputs = Vec::new();
    if !fp8.dout_is_quantized {
        outputs.extend([("quantized dout", fp8.dout[0]), ("transposed dout", fp8.dout[1])].map(Some));
        outputs.extend(scale(&fp8.dout_scale, fp8.scaling));
    }
    outputs.push(fp8.dinp.is_none().then_some(("dinp", op.dinp)));
    outputs.extend(gradients);
    outputs.extend(fp8.dinp.iter().flat_map(quantize));
    outputs
}

fn quantize(op: &Quantize) -> Outputs {
    let mut outputs = vec![
        op.out.map(|out| ("quantized", out)),
        op.transposed.map(|transposed| ("transposed", transposed)),
        op.column_sums.map(|sums| ("column_sums", sums)),
    ];
    outputs.extend(scale(&op.scale, op.scaling));
    outputs
}

fn scale(scale: &Fp8Scale, scaling: Scaling) -> Outputs {
    let [computes_scale, computes_amax] = match scaling {
        Scaling::Current | Scaling::Calibrate => [true; 2],
        Scaling::Delayed => [false, true],
        Scaling::Given => [false; 2],
    };
    vec![computes_scale.then_some(("scale", scale.scale)), computes_amax.then_some(("amax", scale.amax))]
}
