use super::{Cuda, Float};
use crate::Result;
use crate::ops::{GateInputBackward, ValueEmbed, ValueEmbedBackward};

pub(super) fn forward<T: Float>(_cuda: &mut Cuda<T>, _op: ValueEmbed) -> Result<()> {
    anyhow::bail!("value_embed: not implemented yet")
}
pub(super) fn backward<T: Float>(_cuda: &mut Cuda<T>, _op: ValueEmbedBackward) -> Result<()> {
    anyhow::bail!("value_embed_backward: not implemented yet")
}
pub(super) fn input_backward<T: Float>(_cuda: &mut Cuda<T>, _op: GateInputBackward) -> Result<()> {
    anyhow::bail!("gate_input_backward: not implemented yet")
}
