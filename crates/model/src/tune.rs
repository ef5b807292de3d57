//! Autotuning of the model's GEMMs.

use super::{Decoder, Unsharded};
use engine::{BatchLayout, Engine, Result};

impl Decoder {
    /// Lets the engine time the GEMMs of a training step and choose the fastest implementation of each. Returns a message if
    /// that took time.
    pub fn tune(&self, engine: &mut dyn Engine, layout: BatchLayout) -> Result<Option<String>> {
        let tuning = engine.tune(false, &mut |engine| {
            // Only the shapes of the GEMMs are collected; nothing is computed.
            if self.training.is_some_and(|training| training.fp8.is_some()) {
                // Evaluation does not use FP8.
                self.forward(engine, layout, &mut Unsharded)?;
                self.loss(engine, layout, None)?;
            }
            let model = self.for_training_steps();
            model.forward(engine, layout, &mut Unsharded)?;
            model.loss(engine, layout, Some(1.0))?;
            model.backward(engine, layout, 1.0, &mut Unsharded)?;
            self.tune_muon(engine)
        })?;
        if tuning.timings.is_empty() {
            return Ok(None);
        }
        let (gemms, seconds) = (tuning.timings.len(), tuning.seconds);
        let warning =
            tuning.cache_error.map_or(String::new(), |why| format!("; the result could not be cached: {why}"));
        Ok(Some(format!("autotuned {gemms} GEMMs in {seconds:.2} s{warning}\n")))
    }
}
