//! The tensors that each operation writes.

use super::{
    DecodeEmbed, Dequantize, Epilogue, Fp8Scale, MatmulBackward, MatmulForward, Operation, Orthogonalize, Quantize,
    Scaling, SquareRoot, SquaredSum, Sum,
};
use crate::tensor::Tensor;

/// The written tensors by field, without those that are absent.
type Outputs = Vec<Option<(&'static str, Tensor)>>;

impl Operation<'_> {
    /// Returns the tensors that the operation writes and that later operations may read, by field.
    pub fn outputs(&self) -> Vec<(&'static str, Tensor)> {
        let some = |name, tensor| Some((name, tensor));
        let outputs: Outputs = match self {
            Self::EncoderForward(op) => vec![some("out", op.out)],
            Self::EncoderBackward(op) => vec![some("dwte", op.dwte), named("dwpe", op.dwpe)],
            Self::NormForward(op) => {
                let statistics = [named("mean", op.mean), some("rstd", op.rstd)];
                let out = written(op.out, op.quantized.as_ref());
                [out].into_iter().chain(statistics).chain(op.quantized.iter().flat_map(quantize)).collect()
            }
            Self::NormBackward(op) => {
                let sums = [("dweight", op.dweight), ("dbias", op.dbias), ("column_sums", op.column_sums)];
                let sums = sums.map(|(name, tensor)| named(name, tensor));
                [some("dinp", op.dinp)].into_iter().chain(sums).collect()
            }
            Self::RotaryForward(op) => vec![some("qkv", op.qkv), named("saved", op.saved)],
            Self::RotaryBackward(op) => {
                let [query, key] = [0, 1].map(|i| op.dweights.map(|weights| ("dweights", weights[i])));
                vec![some("dqkv", op.dqkv), query, key]
            }
            Self::MatmulForward(op) => matmul_forward(op),
            Self::MatmulBackward(op) => matmul_backward(op),
            Self::Activate(op) => vec![some("out", op.out)],
            Self::ActivateBackward(op) => vec![some("dinp", op.dinp)],
            Self::ScaleBlocks(op) => vec![some("values", op.values)],
            Self::Mix(op) => vec![some("out", op.out)],
            Self::MixBackward(op) => {
                let dout = op.scale.map(|_| ("dout", op.dout));
                vec![
                    dout,
                    some("dadded", op.dadded),
                    named("dscale", op.dscale),
                    named("dadded_scale", op.dadded_scale),
                ]
            }
            Self::Smear(op) => vec![some("out", op.out), some("gates", op.gates)],
            Self::SmearBackward(op) => {
                vec![some("dinp", op.dinp), named("dweight", op.dweight), named("dscale", op.dscale)]
            }
            Self::ValueEmbed(op) => vec![some("qkv", op.qkv)],
            Self::ValueEmbedBackward(op) => {
                vec![some("drows", op.drows), some("dgates", op.dgates), named("dweight", op.dweight)]
            }
            Self::GateInputBackward(op) => vec![some("dinp", op.dinp)],
            Self::Route(op) => vec![
                some("experts", op.experts),
                some("weights", op.weights),
                some("positions", op.positions),
                some("sources", op.sources),
                some("groups", op.groups),
            ],
            Self::ChoiceGradients(op) => vec![some("gradients of choices", op.out)],
            Self::RouteBackward(op) => vec![some("dlogits", op.dlogits)],
            // Rows after the last expert's are undefined, so a trace shows the operations that read the others.
            Self::Dispatch(_) => Vec::new(),
            Self::Combine(op) => vec![some("out", op.out)],
            Self::AttentionForward(op) => {
                let outputs = [some("out", op.out), some("lse", op.lse)];
                outputs.into_iter().chain(op.quantized.iter().flat_map(quantize)).collect()
            }
            Self::AttentionBackward(op) => vec![some("dqkv", op.dqkv)],
            Self::Classifier(op) => {
                let logits = op.dloss.filter(|_| op.fp8.is_none()).map(|_| ("logits", op.logits));
                let gradient = op.fp8.iter().flat_map(|fp8| {
                    [some("gradient", fp8.out), some("transposed gradient", fp8.transposed), some("scale", fp8.scale)]
                });
                [some("losses", op.losses), logits].into_iter().chain(gradient).collect()
            }
            Self::MostLikely(op) => vec![some("hits", op.hits)],
            Self::Sum(Sum { out, .. })
            | Self::SquaredSum(SquaredSum { out, .. })
            | Self::SquareRoot(SquareRoot { out, .. })
            | Self::Orthogonalize(Orthogonalize { out, .. })
            | Self::Dequantize(Dequantize { out, .. })
            | Self::DecodeEmbed(DecodeEmbed { out, .. }) => vec![some("out", *out)],
            Self::GlobalNorm(op) => vec![some("norm", op.norm)],
            Self::AdamWUpdate(op) => {
                let master = named("master", op.master.tensor());
                vec![some("params", op.params), some("m", op.m), some("v", op.v), master]
            }
            Self::MuonMomentum(op) => vec![some("update", op.update), some("m", op.m)],
            Self::MuonVariance(op) => vec![some("update", op.update), some("second", op.second)],
            Self::MuonApply(op) => vec![some("params", op.params), named("master", op.master.tensor())],
            Self::Quantize(op) => quantize(op),
            Self::Fp8Scales(op) => vec![some("scales", op.scales), some("amaxes", op.amaxes)],
            Self::DecodeMatmul(op) => matmul_forward(&op.matmul),
            Self::DecodeAttention(op) => {
                vec![some("out", op.out), some("keys", op.keys), some("values", op.values)]
            }
            Self::DecodeStep(op) => {
                let individual = op.operations.iter().map(|&operation| Operation::from(operation));
                return individual.flat_map(|operation| operation.outputs()).collect();
            }
            Self::CacheFill(op) => vec![some("keys", op.keys), some("values", op.values)],
            Self::CacheRead(op) => vec![some("qkv", op.qkv)],
            Self::SampleTokens(op) => {
                vec![some("sampled", op.sampled), some("slots", op.slots), some("seen", op.seen)]
            }
        };
        outputs.into_iter().flatten().collect()
    }
}

fn named(name: &'static str, tensor: Option<Tensor>) -> Option<(&'static str, Tensor)> {
    tensor.map(|tensor| (name, tensor))
}

/// Returns `out`. An engine may leave an output unwritten that it quantizes.
fn written(out: Tensor, quantized: Option<&Quantize>) -> Option<(&'static str, Tensor)> {
    quantized.is_none().then_some(("out", out))
}

fn matmul_forward(op: &MatmulForward) -> Outputs {
    if op.groups.is_some() {
        return Vec::new();
    }
    let preactivation = match op.epilogue {
        Epilogue::Activation(_, preactivation) => Some(("preactivation", preactivation)),
        Epilogue::None | Epilogue::Residual(_) => None,
    };
    let quantized = op.fp8.as_ref().and_then(|fp8| fp8.out.as_ref());
    let outputs = [written(op.out, quantized), preactivation];
    outputs.into_iter().chain(quantized.into_iter().flat_map(quantize)).collect()
}

fn matmul_backward(op: &MatmulBackward) -> Outputs {
    let gradients = [named("dweight", op.dweight), named("dbias", op.dbias)];
    let dinp = op.groups.is_none().then_some(("dinp", op.dinp));
    let Some(fp8) = &op.fp8 else { return [dinp].into_iter().chain(gradients).collect() };
    let mut outputs = Vec::new();
    if !fp8.dout_is_quantized {
        outputs.extend([Some(("quantized dout", fp8.dout[0])), op.dweight.map(|_| ("transposed dout", fp8.dout[1]))]);
        outputs.extend(scale(&fp8.dout_scale, fp8.scaling));
    }
    outputs.push(fp8.dinp.is_none().then_some(("dinp", op.dinp)));
    outputs.extend(gradients);
    outputs.extend(fp8.dinp.iter().flat_map(quantize));
    outputs
}

fn quantize(op: &Quantize) -> Outputs {
    let tensors = [("quantized", op.out), ("transposed", op.transposed), ("column_sums", op.column_sums)];
    let outputs = tensors.map(|(name, tensor)| named(name, tensor));
    outputs.into_iter().chain(scale(&op.scale, op.scaling)).collect()
}

fn scale(scale: &Fp8Scale, scaling: Scaling) -> Outputs {
    let [computes_scale, computes_amax] = match scaling {
        Scaling::Current | Scaling::Calibrate => [true; 2],
        Scaling::Delayed => [false, true],
        Scaling::Given => [false; 2],
    };
    vec![computes_scale.then_some(("scale", scale.scale)), computes_amax.then_some(("amax", scale.amax))]
}
