//! An engine that collects the operations of a generation step, so that another one can compute them in one kernel.

use crate::ops::{DecodeOperation, DecodeStep};
use crate::tensor::Tensor;
use crate::{Engine, GraphKey, Operation, Result};

/// Passes consecutive operations of a generation step on as one [`DecodeStep`], and everything else unchanged, in the same order.
///
/// [`finish`](Self::finish) must be called at the end.
pub struct StepRecorder<'a> {
    engine: &'a mut dyn Engine,
    memory: Option<[Tensor; 2]>,
    operations: Vec<DecodeOperation>,
}

impl<'a> StepRecorder<'a> {
    /// Creates a recorder for the longest list of operations, which uses `memory`. Without memory, operations are passed on one by one.
    pub fn new(engine: &'a mut dyn Engine, memory: Option<[Tensor; 2]>) -> Self {
        Self { engine, memory, operations: Vec::new() }
    }

    /// Passes on what has been collected.
    pub fn finish(mut self) -> Result<()> {
        self.before()
    }

    /// Passes on what has been collected before other work.
    fn before(&mut self) -> Result<()> {
        let operations = std::mem::take(&mut self.operations);
        match (&operations[..], self.memory) {
            ([], _) => Ok(()),
            (operations, Some(memory)) => self.engine.run(DecodeStep { operations, memory }),
            (operations, None) => operations.iter().try_for_each(|&operation| self.engine.run(operation)),
        }
    }
}

impl Engine for StepRecorder<'_> {
    delegate_to_engine!();

    fn execute(&mut self, operation: Operation) -> Result<()> {
        let operation = match operation {
            Operation::DecodeEmbed(operation) => DecodeOperation::Embed(operation),
            Operation::DecodeMatmul(operation) => DecodeOperation::Matmul(operation),
            Operation::DecodeAttention(operation) => DecodeOperation::Attention(operation),
            other => {
                self.before()?;
                return self.engine.execute(other);
            }
        };
        self.operations.push(operation);
        Ok(())
    }

    fn zero(&mut self, tensor: Tensor) -> Result<()> {
        self.before()?;
        self.engine.zero(tensor)
    }

    fn copy(&mut self, to: Tensor, from: Tensor) -> Result<()> {
        self.before()?;
        self.engine.copy(to, from)
    }

    fn cast(&mut self, to: Tensor, from: Tensor) -> Result<()> {
        self.before()?;
        self.engine.cast(to, from)
    }

    fn capture_or_replay(
        &mut self,
        key: &GraphKey,
        work: &mut dyn FnMut(&mut dyn Engine) -> Result<()>,
    ) -> Result<Option<String>> {
        self.before()?;
        self.engine.capture_or_replay(key, work)
    }
}
