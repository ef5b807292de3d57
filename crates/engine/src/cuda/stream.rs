use super::{Cuda, Float};
use crate::Result;
use crate::ops::{Mix, MixBackward, Smear, SmearBackward};

pub(super) fn mix<T: Float>(_cuda: &mut Cuda<T>, _op: Mix) -> Result<()> {
    anyhow::bail!("mix: not implemented yet")
}
pub(super) fn mix_backward<T: Float>(_cuda: &mut Cuda<T>, _op: MixBackward) -> Result<()> {
    anyhow::bail!("mix_backward: not implemented yet")
}
pub(super) fn smear<T: Float>(_cuda: &mut Cuda<T>, _op: Smear) -> Result<()> {
    anyhow::bail!("smear: not implemented yet")
}
pub(super) fn smear_backward<T: Float>(_cuda: &mut Cuda<T>, _op: SmearBackward) -> Result<()> {
    anyhow::bail!("smear_backward: not implemented yet")
}
