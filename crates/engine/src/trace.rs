//! An engine that records a digest of each tensor that an operation writes, to compare two runs of the same operations.

use crate::plan::Plan;
use crate::tensor::{DType, Tensor};
use crate::{
    Algorithms, BatchLayout, DeviceTensor, Engine, GeluFusion, GraphKey, HostBuffer, Interval, Operation, Peak,
    PendingRead, ReadResult, Result, Tuning, Workload,
};
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

/// Defines methods that call those of the traced engine.
macro_rules! delegate {
    ($($name:ident(&mut self $(, $argument:ident: $type:ty)*) -> $result:ty;)* --
     $($shared:ident(&self $(, $shared_argument:ident: $shared_type:ty)*) -> $shared_result:ty;)*) => {
        $(fn $name(&mut self $(, $argument: $type)*) -> $result {
            self.engine.$name($($argument),*)
        })*
        $(fn $shared(&self $(, $shared_argument: $shared_type)*) -> $shared_result {
            self.engine.$shared($($shared_argument),*)
        })*
    };
}

impl Engine for Tracer<'_> {
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

    fn tune(&mut self, retune: bool, pass: &mut dyn FnMut(&mut dyn Engine) -> Result<()>) -> Result<Tuning> {
        self.engine.tune(retune, pass)
    }

    fn device_tensor(&self, tensor: Tensor) -> Result<Option<DeviceTensor<'_>>> {
        self.engine.device_tensor(tensor)
    }

    fn emulated(&self) -> Option<Box<dyn Engine>> {
        self.engine.emulated()
    }

    delegate! {
        plan(&mut self, plan: &mut Plan, workload: &Workload) -> ();
        allocate(&mut self, plan: &Plan) -> Result<()>;
        write(&mut self, to: Tensor, values: &[f32]) -> Result<()>;
        read(&mut self, from: Tensor) -> Result<Vec<f32>>;
        read_bytes(&mut self, from: Tensor, to: &mut [u8]) -> Result<()>;
        write_bytes(&mut self, to: Tensor, bytes: &[u8]) -> Result<()>;
        read_async(&mut self, from: Tensor) -> Result<PendingRead>;
        wait(&mut self, read: PendingRead) -> Result<ReadResult>;
        load_batch(&mut self, to: Tensor, layout: BatchLayout, words: HostBuffer) -> Result<Option<HostBuffer>>;
        digest(&mut self, tensor: Tensor, first: u64) -> Result<u64>;
        adopt_algorithms(&mut self, algorithms: &Algorithms) -> bool;
        start_profile(&mut self) -> Result<()>;
        profile(&mut self) -> Result<Vec<Interval>>;
        wait_for_event(&mut self, event: &cuda_driver::Event) -> Result<()>;
        --
        describe(&self) -> String;
        dtype(&self) -> DType;
        fp8_dtype(&self) -> Option<DType>;
        free_memory(&self) -> Result<usize>;
        reserved_memory(&self, communicators: usize) -> usize;
        peak(&self) -> Option<Peak>;
        gelu_fusion(&self) -> GeluFusion;
        fuses_column_sums(&self, c: usize) -> bool;
        check(&self, workload: &Workload) -> Result<()>;
        host_buffer(&self, len: usize) -> Result<HostBuffer>;
        algorithms(&self) -> Option<Algorithms>;
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
