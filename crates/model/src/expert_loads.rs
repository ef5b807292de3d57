//! The number of tokens of each expert, for the log.

use super::decoder::Decoder;
use engine::tensor::DType;
use engine::{Engine, PendingRead, Result};

impl Decoder {
    /// Begins to read the loads of experts in the last micro-batch, which [`expert_loads`](Self::expert_loads) interprets. Returns nothing for a
    /// model without experts.
    pub fn read_loads(&self, engine: &mut dyn Engine) -> Result<Option<PendingRead>> {
        let loads = self.training()?.expert_loads;
        loads.map(|loads| engine.read_async(loads.reinterpret(loads.len, DType::F32))).transpose()
    }

    /// Returns the loads of the experts in each layer: the numbers of tokens that chose them.
    pub fn expert_loads(&self, words: &[f32]) -> Vec<Vec<u32>> {
        let of_layer = |words: &[f32]| words.iter().map(|word| word.to_bits()).collect();
        words.chunks_exact(self.descriptor.expert_count()).map(of_layer).collect()
    }
}
