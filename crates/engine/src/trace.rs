//! An engine that records a digest of each tensor that an operation writes, to compare two runs of the same operations.

use crate::tensor::Tensor;
use crate::{Engine, GraphKey, Operation, Result};
use anyhow::ensure;
use serde::{Deserialize, Serialize};
use std::cell::RefCell;
use std::fmt;
use std::str::FromStr;

/// One written tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// Part of the model, for example `layer 3`.
    pub place: String,
    /// Name of the operation, for example `MatmulForward`.
    pub operation: String,
    /// Name of the operation's field.
    pub output: String,
    /// Digest of the tensor after the operation.
    pub digest: u64,
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` of {} in {}", self.output, self.operation, self.place)
    }
}

/// A bit that is flipped after an operation has written it, as faulty hardware could, to test its detection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BitFlip {
    /// Index of the optimizer step.
    pub step: usize,
    /// Index of the rank.
    pub rank: usize,
    /// Index of the tensor among those that are written while a micro-batch is verified.
    pub output: usize,
    /// Index of the element, modulo the length of the tensor.
    pub element: usize,
    /// Index of the bit of the element, modulo its size.
    pub bit: usize,
}

impl FromStr for BitFlip {
    type Err = anyhow::Error;

    /// Parses `STEP:RANK:OUTPUT:ELEMENT:BIT`.
    fn from_str(text: &str) -> Result<Self> {
        let numbers: Vec<usize> = text.split(':').map(str::parse).collect::<Result<_, _>>().unwrap_or_default();
        ensure!(numbers.len() == 5, "expected STEP:RANK:OUTPUT:ELEMENT:BIT, found {text:?}");
        let [step, rank, output, element, bit] = numbers[..] else { unreachable!("there are five") };
        Ok(Self { step, rank, output, element, bit })
    }
}

/// Runs operations on another engine and records what they write. CUDA graphs are not used, so that each operation is recorded.
pub struct Tracer<'a> {
    engine: &'a mut dyn Engine,
    place: &'a RefCell<String>,
    flip: Option<BitFlip>,
    entries: Vec<Entry>,
}

impl<'a> Tracer<'a> {
    /// Creates a tracer. `place` is the part of the model to which the next operations belong.
    pub fn new(engine: &'a mut dyn Engine, place: &'a RefCell<String>, flip: Option<BitFlip>) -> Self {
        Self { engine, place, flip, entries: Vec::new() }
    }

    /// Returns the entries in the order of the operations.
    pub fn finish(self) -> Vec<Entry> {
        self.entries
    }

    #[expect(clippy::unused_self, clippy::unnecessary_wraps, reason = "`delegate_to_engine` calls it")]
    fn before(&mut self) -> Result<()> {
        Ok(())
    }

    fn record(&mut self, operation: &str, outputs: &[(&'static str, Tensor)]) -> Result<()> {
        for &(output, tensor) in outputs {
            if let Some(flip) = self.flip.filter(|flip| flip.output == self.entries.len()) {
                self.apply(flip, tensor)?;
            }
            let digest = self.engine.digest(tensor, 0)?;
            let (place, operation) = (self.place.borrow().clone(), operation.to_owned());
            self.entries.push(Entry { place, operation, output: output.to_owned(), digest });
        }
        Ok(())
    }

    fn apply(&mut self, flip: BitFlip, tensor: Tensor) -> Result<()> {
        let (element, size) = (tensor.slice(flip.element % tensor.len, 1), tensor.dtype.bytes());
        let mut bytes = vec![0; size];
        self.engine.read_bytes(element, &mut bytes)?;
        bytes[flip.bit / 8 % size] ^= 1 << (flip.bit % 8);
        self.engine.write_bytes(element, &bytes)
    }
}

impl Engine for Tracer<'_> {
    delegate_to_engine!();

    fn execute(&mut self, operation: Operation) -> Result<()> {
        let (name, outputs) = (operation.name(), operation.outputs());
        self.engine.execute(operation)?;
        self.record(name, &outputs)
    }

    fn zero(&mut self, tensor: Tensor) -> Result<()> {
        self.engine.zero(tensor)?;
        self.record("zero", &[("tensor", tensor)])
    }

    fn copy(&mut self, to: Tensor, from: Tensor) -> Result<()> {
        self.engine.copy(to, from)?;
        self.record("copy", &[("to", to)])
    }

    fn cast(&mut self, to: Tensor, from: Tensor) -> Result<()> {
        self.engine.cast(to, from)?;
        self.record("cast", &[("to", to)])
    }

    fn capture_or_replay(
        &mut self,
        _: &GraphKey,
        work: &mut dyn FnMut(&mut dyn Engine) -> Result<()>,
    ) -> Result<Option<String>> {
        work(self).map(|()| None)
    }
}

#[cfg(test)]
mod tests {
    use super::BitFlip;

    #[test]
    fn bit_flips_are_parsed() {
        let flip = BitFlip { step: 3, rank: 0, output: 17, element: 5, bit: 30 };
        assert_eq!("3:0:17:5:30".parse::<BitFlip>().unwrap(), flip);
        for wrong in ["", "3:0:17:5", "3:0:17:5:x", "3:0:17:5:1:1"] {
            assert!(wrong.parse::<BitFlip>().unwrap_err().to_string().contains("STEP:RANK:OUTPUT:ELEMENT:BIT"));
        }
    }
}
