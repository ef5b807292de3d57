//! The other processes of a run, as the training loop sees them.

use super::communicator::{self, Communicator};
use super::fault::{self, Fault};
use super::star::{Reduction, Star};
use super::timed::{Timed, Waits};
use anyhow::bail;
use engine::tensor::{Sharded, Tensor};
use engine::{Engine, Result};
use serde::Serialize;
use serde::de::DeserializeOwned;
use xxhash_rust::xxh3::Xxh3;

/// All of them; or none, and then every call does nothing at once.
#[derive(Default)]
pub enum Ranks {
    #[default]
    Alone,
    /// Before there are tensors.
    Met(Star),
    /// Ready for collective operations.
    Joined(Box<dyn Communicator>),
}

/// Bytes that are read at a time to be compared.
const PIECE: usize = 64 << 20;

impl Ranks {
    /// 0 is the one that prints, logs and keeps.
    pub fn rank(&self) -> usize {
        self.who().0
    }

    pub fn count(&self) -> usize {
        self.who().1
    }

    pub fn is_first(&self) -> bool {
        self.rank() == 0
    }

    fn who(&self) -> (usize, usize) {
        match self {
            Self::Alone => (0, 1),
            Self::Met(star) => (star.rank, star.ranks),
            Self::Joined(communicator) => communicator.who(),
        }
    }

    pub fn star(&mut self) -> Option<&mut Star> {
        match self {
            Self::Alone => None,
            Self::Met(star) => Some(star),
            Self::Joined(communicator) => Some(communicator.star()),
        }
    }

    /// Gets ready for collective operations on the engine's tensors, of which `on` is one.
    pub fn join(&mut self, engine: &dyn Engine, on: Tensor) -> Result<()> {
        match std::mem::take(self) {
            Self::Met(star) => *self = Self::Joined(communicator::for_engine(star, engine, on)?),
            other => *self = other,
        }
        Ok(())
    }

    /// Measures from now on where the engine waits for the others. `mark` is a small f32 tensor of it.
    pub fn time(&mut self, mark: Tensor) -> Waits {
        let waits = Waits::default();
        match std::mem::take(self) {
            Self::Joined(inner) => *self = Self::Joined(Box::new(Timed::new(inner, mark, waits.clone()))),
            other => *self = other,
        }
        waits
    }

    fn joined(&mut self) -> Option<&mut dyn Communicator> {
        match self {
            Self::Joined(communicator) => Some(&mut **communicator),
            _ => None,
        }
    }

    /// By what ranks are connected.
    pub fn describe(&self) -> Option<String> {
        match self {
            Self::Joined(communicator) => Some(communicator.describe()),
            _ => None,
        }
    }

    /// Says what the run is doing, for messages.
    pub fn note(&mut self, during: impl FnOnce() -> String) {
        if let Some(star) = self.star() {
            star.note(during());
        }
    }

    /// Says which operation of that comes now.
    pub fn doing(&mut self, operation: &str) {
        if let Some(star) = self.star() {
            star.doing(operation);
        }
    }

    /// The first step begins.
    pub fn begin(&mut self) {
        if let Some(star) = self.star() {
            star.begin();
        }
    }

    /// What has been found to be wrong with the run beside the loop.
    pub fn check(&mut self) -> Result<()> {
        self.star().map_or(Ok(()), |star| star.check())
    }

    /// Why the run ends: what the watchdog has found, or else `error`, which came in `stage`.
    pub fn cause(&mut self, error: anyhow::Error, stage: &str) -> anyhow::Error {
        match self.check() {
            Err(fault) => fault,
            Ok(()) => fault::of_device(error, &self.star().map_or_else(|| stage.to_owned(), |star| star.during())),
        }
    }

    /// Whether it is so on any rank.
    pub fn any(&mut self, here: bool) -> Result<bool> {
        if let Self::Joined(communicator) = self {
            communicator.check()?;
        }
        self.star().map_or(Ok(here), |star| star.any(here))
    }

    /// Sums over the ranks.
    pub fn sum(&mut self, values: &mut [f64]) -> Result<()> {
        self.doing("adding up losses");
        self.star().map_or(Ok(()), |star| star.sum(values))
    }

    /// Every rank's bytes, in order, on rank 0; nothing on the others.
    pub fn gather(&mut self, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>> {
        match self.star() {
            Some(star) => star.gather(&bytes),
            None => Ok(vec![bytes]),
        }
    }

    /// What rank 0 says, on all.
    pub fn tell<T: Serialize + DeserializeOwned>(&mut self, what: T) -> Result<T> {
        let Some(star) = self.star() else { return Ok(what) };
        let bytes = if star.rank == 0 { serde_json::to_vec(&what)? } else { Vec::new() };
        let bytes = star.tell(bytes)?;
        if star.rank == 0 { Ok(what) } else { Ok(serde_json::from_slice(&bytes)?) }
    }

    /// `tensor` = its mean over the ranks, after [`settle`](Self::settle).
    pub fn average(&mut self, engine: &mut dyn Engine, tensor: Tensor) -> Result<()> {
        self.doing("averaging gradients");
        self.joined().map_or(Ok(()), |ranks| ranks.all_reduce(engine, tensor, Reduction::Mean))
    }

    /// `tensor` = its sum over the ranks, after [`settle`](Self::settle).
    pub fn total(&mut self, engine: &mut dyn Engine, tensor: Tensor) -> Result<()> {
        self.doing("adding up losses");
        self.joined().map_or(Ok(()), |ranks| ranks.all_reduce(engine, tensor, Reduction::Sum))
    }

    /// The part = this rank's part of the reduction of every rank's whole, after [`settle`](Self::settle).
    pub fn reduce_scatter(&mut self, engine: &mut dyn Engine, of: Sharded, reduction: Reduction) -> Result<()> {
        self.doing("adding up gradients");
        self.joined().map_or(Ok(()), |ranks| ranks.reduce_scatter(engine, of, reduction))
    }

    /// The whole = every rank's part, one after another, after [`settle`](Self::settle).
    pub fn all_gather(&mut self, engine: &mut dyn Engine, of: Sharded) -> Result<()> {
        self.doing("gathering what ranks divide");
        self.joined().map_or(Ok(()), |ranks| ranks.all_gather(engine, of))
    }

    /// Each of the tensors = rank 0's.
    pub fn share(&mut self, engine: &mut dyn Engine, tensors: &[Tensor]) -> Result<()> {
        self.doing("sharing the model");
        let Some(ranks) = self.joined() else { return Ok(()) };
        tensors.iter().try_for_each(|tensor| ranks.broadcast(engine, *tensor))?;
        ranks.settle(engine)
    }

    /// What the engine is given from here on comes after what the ranks did together so far.
    pub fn settle(&mut self, engine: &mut dyn Engine) -> Result<()> {
        self.joined().map_or(Ok(()), |ranks| ranks.settle(engine))
    }

    /// Compares tensors that must have the same bits on all ranks.
    pub fn check_same(&mut self, engine: &mut dyn Engine, tensors: &[(&str, Tensor)]) -> Result<()> {
        self.doing("comparing ranks");
        let Some(star) = self.star() else { return Ok(()) };
        let mut sums = Vec::new();
        for (_, tensor) in tensors {
            sums.push(checksum(engine, *tensor)?);
        }
        let all = star.gather(bytemuck::cast_slice(&sums))?;
        for (rank, theirs) in all.iter().enumerate() {
            let here = sums.iter().flat_map(|sum| sum.to_ne_bytes());
            if let Some(byte) = here.zip(theirs).position(|(ours, theirs)| ours != *theirs) {
                let (name, who) = (tensors[byte / size_of::<u64>()].0, star.who(rank));
                bail!(Fault::Apart { who, what: format!("{name} of {}", star.stage()) });
            }
        }
        // Nobody goes on before all are found the same.
        star.any(false).map(|_| ())
    }

    /// Ends it in good order, once all ranks have come to this.
    pub fn close(&mut self) -> Result<()> {
        self.any(false)?;
        if let Some(star) = self.star() {
            star.end();
        }
        match std::mem::take(self) {
            Self::Joined(communicator) => communicator.close(),
            _ => Ok(()),
        }
    }

    /// Ends collective operations that may be under way, because the run has failed: the engine may wait for them.
    pub fn abandon(&mut self) {
        match std::mem::take(self) {
            Self::Joined(communicator) => *self = Self::Met(communicator.abandon()),
            other => *self = other,
        }
    }

    /// Ends the run on all ranks because of an error on this one; what is left to say here.
    pub fn give_up(&mut self, error: anyhow::Error) -> anyhow::Error {
        match self.star() {
            Some(star) => star.give_up(error),
            None => error,
        }
    }
}

fn checksum(engine: &mut dyn Engine, tensor: Tensor) -> Result<u64> {
    let (mut hash, mut bytes) = (Xxh3::new(), Vec::new());
    let piece = PIECE / tensor.dtype.bytes();
    for first in (0..tensor.len).step_by(piece) {
        let part = tensor.slice(first, piece.min(tensor.len - first));
        bytes.resize(part.bytes(), 0);
        engine.read_bytes(part, &mut bytes)?;
        hash.update(&bytes);
    }
    Ok(hash.digest())
}
