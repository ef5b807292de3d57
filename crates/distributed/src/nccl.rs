//! Collective operations on GPUs, by NCCL, on a stream beside the engine's.

use super::communicator::Communicator;
use super::star::{Reduction, Star};
use super::watchdog::Device;
use anyhow::{Context, bail};
use cuda_driver::{Event, Gpu, Stream};
use engine::tensor::{DType, Sharded, Tensor};
use engine::{DeviceTensor, Engine, Result};
use half::bf16;
use nccl_rs::{Buffer, Element, Monitor, UniqueId};
use std::sync::Arc;
use std::time::Duration;

/// How long ranks that have met may take to connect their GPUs, or to queue an operation.
const PATIENCE: Duration = Duration::from_mins(2);

pub struct Nccl {
    star: Star,
    communicator: nccl_rs::Communicator,
    stream: Stream,
    /// How far the engine is, for the operations; and they, for the engine.
    engine: Event,
    operations: Event,
    /// Whether there are operations that the engine does not wait for yet.
    under_way: bool,
}

impl Nccl {
    /// Connects the ranks' GPUs.
    pub fn new(mut star: Star, gpu: &Gpu) -> Result<Self> {
        let id = if star.rank == 0 { UniqueId::new()?.to_bytes().to_vec() } else { Vec::new() };
        let id = star.tell(id)?.try_into().ok().context("rank 0 told no NCCL id")?;
        let communicator = nccl_rs::Communicator::new(gpu, UniqueId::from_bytes(id), star.rank, star.ranks, PATIENCE)?;
        star.watch_device(Arc::new(communicator.monitor()));
        let (engine, operations) = (Event::new(gpu)?, Event::new(gpu)?);
        Ok(Self { star, communicator, stream: Stream::new(gpu)?, engine, operations, under_way: false })
    }

    /// Has the operations wait for the engine; the tensor's address.
    fn begin(&mut self, engine: &dyn Engine, tensor: Tensor) -> Result<u64> {
        let Some(DeviceTensor { stream, address }) = engine.device_tensor(tensor)? else {
            bail!("NCCL is for tensors on a GPU, this one is on {}", engine.describe())
        };
        self.engine.record(stream)?;
        self.stream.wait(&self.engine)?;
        self.under_way = true;
        Ok(address)
    }

    fn reduce<T: Element>(&self, address: u64, len: usize, reduction: Reduction) -> Result<()> {
        let buffer = Buffer::<T>::new(address, len);
        // SAFETY: the engine has checked that the tensor lies in its memory, which lasts until its stream has passed what it
        // was given; by the trait's contract nothing uses the tensor before `settle` has the engine's stream wait.
        Ok(unsafe { self.communicator.all_reduce(buffer, buffer, of(reduction), &self.stream) }?)
    }

    fn scatter<T: Element>(&self, whole: u64, part: u64, len: usize, reduction: Reduction) -> Result<()> {
        let (whole, part) = (Buffer::<T>::new(whole, self.star.ranks * len), Buffer::new(part, len));
        // SAFETY: as above.
        Ok(unsafe { self.communicator.reduce_scatter(part, whole, of(reduction), &self.stream) }?)
    }

    fn gather<T: Element>(&self, whole: u64, part: u64, len: usize) -> Result<()> {
        let (whole, part) = (Buffer::<T>::new(whole, self.star.ranks * len), Buffer::new(part, len));
        // SAFETY: as above.
        Ok(unsafe { self.communicator.all_gather(whole, part, &self.stream) }?)
    }

    /// Addresses of the whole and of the part.
    fn begin_divided(&mut self, engine: &dyn Engine, Sharded { whole, shard: part }: Sharded) -> Result<(u64, u64)> {
        let Some(DeviceTensor { address, .. }) = engine.device_tensor(part)? else {
            bail!("NCCL is for tensors on a GPU, this one is on {}", engine.describe())
        };
        Ok((self.begin(engine, whole)?, address))
    }

    fn send<T: Element>(&self, address: u64, len: usize) -> Result<()> {
        // SAFETY: as above.
        Ok(unsafe { self.communicator.broadcast(Buffer::<T>::new(address, len), 0, &self.stream) }?)
    }
}

impl Device for Monitor {
    fn check(&self) -> Result<()> {
        Ok(Self::check(self)?)
    }

    fn abort(&self) {
        Self::abort(self);
    }
}

const fn of(reduction: Reduction) -> nccl_rs::Reduction {
    match reduction {
        Reduction::Sum => nccl_rs::Reduction::Sum,
        Reduction::Mean => nccl_rs::Reduction::Mean,
    }
}

impl Communicator for Nccl {
    fn who(&self) -> (usize, usize) {
        (self.star.rank, self.star.ranks)
    }

    fn star(&mut self) -> &mut Star {
        &mut self.star
    }

    fn all_reduce(&mut self, engine: &mut dyn Engine, tensor: Tensor, reduction: Reduction) -> Result<()> {
        let address = self.begin(engine, tensor)?;
        match tensor.dtype {
            DType::F32 => self.reduce::<f32>(address, tensor.len, reduction),
            DType::Bf16 => self.reduce::<bf16>(address, tensor.len, reduction),
            DType::I32 => bail!("floats can be reduced over ranks, the tensor is i32"),
        }
    }

    fn broadcast(&mut self, engine: &mut dyn Engine, tensor: Tensor) -> Result<()> {
        let address = self.begin(engine, tensor)?;
        match tensor.dtype {
            DType::F32 | DType::I32 => self.send::<f32>(address, tensor.len),
            DType::Bf16 => self.send::<bf16>(address, tensor.len),
        }
    }

    fn reduce_scatter(&mut self, engine: &mut dyn Engine, of: Sharded, reduction: Reduction) -> Result<()> {
        let of = of.over(self.star.ranks)?;
        let (from, to) = self.begin_divided(engine, of)?;
        match of.shard.dtype {
            DType::F32 => self.scatter::<f32>(from, to, of.shard.len, reduction),
            DType::Bf16 => self.scatter::<bf16>(from, to, of.shard.len, reduction),
            DType::I32 => bail!("floats can be reduced over ranks, the tensor is i32"),
        }
    }

    fn all_gather(&mut self, engine: &mut dyn Engine, of: Sharded) -> Result<()> {
        let of = of.over(self.star.ranks)?;
        let (to, from) = self.begin_divided(engine, of)?;
        match of.shard.dtype {
            DType::F32 | DType::I32 => self.gather::<f32>(to, from, of.shard.len),
            DType::Bf16 => self.gather::<bf16>(to, from, of.shard.len),
        }
    }

    fn settle(&mut self, engine: &mut dyn Engine) -> Result<()> {
        if std::mem::take(&mut self.under_way) {
            self.operations.record(&self.stream)?;
            engine.wait_for_event(&self.operations)?;
        }
        Ok(())
    }

    fn check(&self) -> Result<()> {
        Ok(self.communicator.check()?)
    }

    fn close(self: Box<Self>) -> Result<()> {
        self.stream.synchronize()?;
        Ok(self.communicator.close()?)
    }

    fn abandon(self: Box<Self>) -> Star {
        self.communicator.abort();
        self.star
    }

    fn describe(&self) -> String {
        nccl_rs::find().map_or_else(|error| error.to_string(), |(_, version)| format!("NCCL {version}"))
    }
}
