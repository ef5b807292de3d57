//! The number of tokens of each expert, for the log.

use super::decoder::Decoder;
use engine::tensor::DType;
use engine::{Engine, PendingRead, Result};

impl Decoder {
    /// Begins to read the groups of experts of the last micro-batch, which [`expert_loads`](Self::expert_loads) interprets. Returns nothing for
    /// a model without experts.
    pub fn read_groups(&self, engine: &mut dyn Engine) -> Result<Option<PendingRead>> {
        let groups = self.training()?.expert_groups;
        groups.map(|groups| engine.read_async(groups.reinterpret(groups.len, DType::F32))).transpose()
    }

    /// Returns the loads of the experts in each layer: the numbers of tokens that chose them.
    pub fn expert_loads(&self, groups: &[f32]) -> Vec<Vec<u32>> {
        let count = self.descriptor.expert_count();
        let loads = |of_layer: &[f32]| of_layer[count + 1..][..count].iter().map(|word| word.to_bits()).collect();
        groups.chunks_exact(groups.len() / self.descriptor.layers).map(loads).collect()
    }
}
