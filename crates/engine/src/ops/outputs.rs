//! The tensors that each operation writes.

use super::{Epilogue, Master, Operation};
use crate::tensor::Tensor;

impl Operation<'_> {
    /// Returns the name of the operation and the tensors that it writes and that later operations may read, by field.
    pub fn outputs(&self) -> (&'static str, Vec<(&'static str, Tensor)>) {
        let master = |master: Master| master.tensor().map(|tensor| ("master", tensor));
        let (name, always, optional): (_, Vec<_>, Vec<Option<(_, _)>>) = match self {
            Self::EncoderForward(op) => ("EncoderForward", vec![("out", op.out)], vec![]),
            Self::EncoderBackward(op) => {
                ("EncoderBackward", vec![("dwte", op.dwte)], vec![op.dwpe.map(|dwpe| ("dwpe", dwpe))])
            }
            Self::LayerNormForward(op) => {
                ("LayerNormForward", vec![("out", op.out), ("mean", op.mean), ("rstd", op.rstd)], vec![])
            }
            Self::LayerNormBackward(op) => (
                "LayerNormBackward",
                vec![("dinp", op.dinp), ("dweight", op.dweight), ("dbias", op.dbias)],
                vec![op.column_sums.map(|sums| ("column_sums", sums))],
            ),
            Self::RmsNormForward(op) => ("RmsNormForward", vec![("out", op.out), ("rstd", op.rstd)], vec![]),
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
            Self::MatmulForward(op) => {
                let preactivation = match op.epilogue {
                    Epilogue::Activation(_, preactivation) => Some(("preactivation", preactivation)),
                    Epilogue::None | Epilogue::Residual(_) => None,
                };
                ("MatmulForward", vec![("out", op.out)], vec![preactivation])
            }
            Self::MatmulBackward(op) => (
                "MatmulBackward",
                vec![("dinp", op.dinp), ("dweight", op.dweight)],
                vec![op.dbias.map(|dbias| ("dbias", dbias))],
            ),
            Self::AttentionForward(op) => ("AttentionForward", vec![("out", op.out), ("lse", op.lse)], vec![]),
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
        };
        (name, always.into_iter().chain(optional.into_iter().flatten()).collect())
    }
}
