//! Collectives between GPUs with NCCL, on a separate CUDA stream.

use super::communicator::{Communicator, Transfer};
use super::flight_recorder::Operation;
use super::scope::Scope;
use super::tcp_group::{Reduction, TcpGroup};
use super::watchdog::DeviceMonitor;
use anyhow::{Context, bail};
use cuda_driver::{Event, Gpu, Stream};
use engine::cuda::Profile;
use engine::tensor::{DType, Sharded, Tensor};
use engine::{DeviceTensor, Engine, Interval, Result};
use half::bf16;
use nccl_rs::{Buffer, Element, Monitor, UniqueId};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

/// Timeout for connecting the GPUs of all ranks and for queueing an operation.
const TIMEOUT: Duration = Duration::from_mins(2);

/// Collectives on tensors in GPU memory.
pub struct Nccl {
    group: TcpGroup,
    world: nccl_rs::Communicator,
    /// The communicators of the other scopes, if shard groups have more than one rank and fewer than all.
    split: Option<Split>,
    stream: Stream,
    /// Recorded on the engine's stream. Collectives wait for it.
    engine_event: Event,
    /// Recorded on the communication stream. The engine waits for it.
    collectives_event: Event,
    /// Whether the engine has not yet been told to wait for the latest operations.
    pending: bool,
    /// A profile of the communication stream in progress.
    profile: Option<Profile>,
}

struct Split {
    shard_group: nccl_rs::Communicator,
    replicas: nccl_rs::Communicator,
}

impl Nccl {
    /// Connects the GPUs of all ranks, and those of shard groups and of replicas.
    pub fn new(mut group: TcpGroup, gpu: &Gpu) -> Result<Self> {
        let id = if group.rank == 0 { UniqueId::new()?.to_bytes().to_vec() } else { Vec::new() };
        let id = group.broadcast_message(id)?.try_into().ok().context("rank 0 sent no valid NCCL id")?;
        let world = nccl_rs::Communicator::new(gpu, UniqueId::from_bytes(id), group.rank, group.world_size, TIMEOUT)?;
        group.monitor_device(Arc::new(Monitors(vec![world.monitor()])));
        let groups = group.shard_groups();
        let split = |scope| {
            let (part, index) = (groups.part(scope, group.rank), groups.index(scope, group.rank));
            world.split(part, index, groups.size(scope))
        };
        let split = match groups.communicators() {
            3 => Some(Split { shard_group: split(Scope::ShardGroup)?, replicas: split(Scope::Replicas)? }),
            _ => None,
        };
        let (engine_event, collectives_event) = (Event::new(gpu)?, Event::new(gpu)?);
        let stream = Stream::new(gpu)?;
        let nccl = Self { group, world, split, stream, engine_event, collectives_event, pending: false, profile: None };
        nccl.group.monitor_device(Arc::new(nccl.monitors()));
        Ok(nccl)
    }

    /// Returns all communicators. Those that depend on others come first.
    fn communicators(&self) -> impl Iterator<Item = &nccl_rs::Communicator> {
        let split = self.split.iter().flat_map(|split| [&split.replicas, &split.shard_group]);
        split.chain([&self.world])
    }

    fn monitors(&self) -> Monitors {
        Monitors(self.communicators().map(nccl_rs::Communicator::monitor).collect())
    }

    /// Returns the communicator of a scope, which has more than one rank.
    fn communicator(&self, scope: Scope) -> &nccl_rs::Communicator {
        match (self.group.shard_groups().simplified(scope), &self.split) {
            (Scope::ShardGroup, Some(split)) => &split.shard_group,
            (Scope::Replicas, Some(split)) => &split.replicas,
            _ => &self.world,
        }
    }

    /// Makes the communication stream wait for the engine's queued work. Returns the address of `tensor`.
    fn begin(&mut self, engine: &dyn Engine, tensor: Tensor) -> Result<u64> {
        let DeviceTensor { stream, address } = on_device(engine, tensor)?;
        self.engine_event.record(stream)?;
        self.stream.wait(&self.engine_event)?;
        self.pending = true;
        Ok(address)
    }

    /// Like [`begin`](Self::begin). Returns the addresses of the whole and of the part.
    fn begin_sharded(&mut self, engine: &dyn Engine, Sharded { whole, shard: part }: Sharded) -> Result<(u64, u64)> {
        let DeviceTensor { address, .. } = on_device(engine, part)?;
        Ok((self.begin(engine, whole)?, address))
    }

    /// Launches a collective of `bytes` bytes and records it: in the flight recorder, and between two timed events if there is a
    /// profile.
    fn launch(
        &mut self,
        (operation, scope): (Operation, Scope),
        bytes: usize,
        queue: impl FnOnce(&Self) -> Result<()>,
    ) -> Result<()> {
        let begin = self.profile.as_ref().map(|profile| profile.begin(&self.stream)).transpose()?;
        let scope = self.group.shard_groups().simplified(scope);
        let recorder = self.group.recorder();
        recorder.begin(operation, scope, bytes);
        let outcome = queue(self);
        recorder.end(outcome.is_ok(), true);
        outcome?;
        match (&mut self.profile, begin) {
            (Some(profile), Some(begin)) => profile.end(operation.to_string(), begin, &self.stream),
            _ => Ok(()),
        }
    }

    fn queue_all_reduce<T: Element>(&self, scope: Scope, at: (u64, usize), reduction: Reduction) -> Result<()> {
        let buffer = Buffer::<T>::new(at.0, at.1);
        // SAFETY: the engine checked that the tensor lies in its memory. That memory stays allocated until the engine's
        // stream has finished. By the contract of `Communicator`, nothing uses the tensor before `wait_on_stream` makes the
        // engine's stream wait for this operation.
        Ok(unsafe { self.communicator(scope).all_reduce(buffer, buffer, to_nccl(reduction), &self.stream) }?)
    }

    fn queue_reduce_scatter<T: Element>(&self, whole: u64, part: u64, len: usize, reduction: Reduction) -> Result<()> {
        let communicator = self.communicator(Scope::ShardGroup);
        let (whole, part) = (Buffer::<T>::new(whole, communicator.world_size() * len), Buffer::new(part, len));
        // SAFETY: as in `queue_all_reduce`, for both tensors.
        Ok(unsafe { communicator.reduce_scatter(part, whole, to_nccl(reduction), &self.stream) }?)
    }

    fn queue_all_gather<T: Element>(&self, whole: u64, part: u64, len: usize) -> Result<()> {
        let communicator = self.communicator(Scope::ShardGroup);
        let (whole, part) = (Buffer::<T>::new(whole, communicator.world_size() * len), Buffer::new(part, len));
        // SAFETY: as in `queue_all_reduce`, for both tensors.
        Ok(unsafe { communicator.all_gather(whole, part, &self.stream) }?)
    }

    fn queue_broadcast<T: Element>(&self, at: (u64, usize)) -> Result<()> {
        // SAFETY: as in `queue_all_reduce`.
        Ok(unsafe { self.world.broadcast(Buffer::<T>::new(at.0, at.1), 0, &self.stream) }?)
    }

    /// Sends a tensor to a rank of the shard group, or receives it from there.
    fn queue_transfer<T: Element>(&self, at: (u64, usize), peer: Peer) -> Result<()> {
        let (communicator, buffer) = (self.communicator(Scope::ShardGroup), Buffer::<T>::new(at.0, at.1));
        // SAFETY: as in `queue_all_reduce`.
        Ok(unsafe {
            match peer {
                Peer::Receiver(rank) => communicator.send(buffer, rank, &self.stream),
                Peer::Sender(rank) => communicator.receive(buffer, rank, &self.stream),
            }
        }?)
    }
}

/// The other rank of a transfer.
#[derive(Clone, Copy)]
enum Peer {
    Receiver(usize),
    Sender(usize),
}

/// Returns the stream and the address of a tensor on a GPU.
fn on_device(engine: &dyn Engine, tensor: Tensor) -> Result<DeviceTensor<'_>> {
    let device = engine.device_tensor(tensor)?;
    device.with_context(|| format!("NCCL: expected a tensor in GPU memory, found one of {}", engine.describe()))
}

/// The monitors of all communicators of a rank.
struct Monitors(Vec<Monitor>);

impl DeviceMonitor for Monitors {
    fn check(&self) -> Result<()> {
        Ok(self.0.iter().try_for_each(Monitor::check)?)
    }

    /// Aborts all communicators at the same time: one of them may wait for the device, on which a collective of another is pending.
    fn abort(&self) {
        if let [monitor] = &self.0[..] {
            return monitor.abort();
        }
        thread::scope(|scope| {
            for monitor in &self.0 {
                let abort = || monitor.abort();
                if thread::Builder::new().spawn_scoped(scope, abort).is_err() {
                    abort();
                }
            }
        });
    }
}

const fn to_nccl(reduction: Reduction) -> nccl_rs::Reduction {
    match reduction {
        Reduction::Sum => nccl_rs::Reduction::Sum,
        Reduction::Mean => nccl_rs::Reduction::Mean,
        Reduction::Max => nccl_rs::Reduction::Max,
    }
}

impl Communicator for Nccl {
    fn rank(&self) -> usize {
        self.group.rank
    }

    fn world_size(&self) -> usize {
        self.group.world_size
    }

    fn tcp_group(&mut self) -> &mut TcpGroup {
        &mut self.group
    }

    fn all_reduce(
        &mut self,
        engine: &mut dyn Engine,
        scope: Scope,
        tensor: Tensor,
        reduction: Reduction,
    ) -> Result<()> {
        let at = (self.begin(engine, tensor)?, tensor.len);
        self.launch((Operation::AllReduce, scope), tensor.bytes(), |nccl| match tensor.dtype {
            DType::F32 => nccl.queue_all_reduce::<f32>(scope, at, reduction),
            DType::Bf16 => nccl.queue_all_reduce::<bf16>(scope, at, reduction),
            DType::I32 | DType::U16 | DType::Fp8 | DType::Block8 { .. } => {
                bail!("reduction over ranks: expected a tensor of f32 or bf16, found {}", tensor.dtype.name())
            }
        })
    }

    fn broadcast(&mut self, engine: &mut dyn Engine, tensor: Tensor) -> Result<()> {
        let at = (self.begin(engine, tensor)?, tensor.len);
        self.launch((Operation::Broadcast, Scope::World), tensor.bytes(), |nccl| match tensor.dtype {
            DType::F32 | DType::I32 => nccl.queue_broadcast::<f32>(at),
            DType::Bf16 | DType::U16 => nccl.queue_broadcast::<bf16>(at),
            DType::Block8 { .. } => nccl.queue_broadcast::<f32>((at.0, at.1 / 4)),
            DType::Fp8 => bail!("broadcast: expected a tensor of a type other than fp8"),
        })
    }

    fn exchange(&mut self, engine: &mut dyn Engine, transfers: &[Transfer]) -> Result<()> {
        let Some(first) = transfers.first() else { return Ok(()) };
        self.begin(engine, first.tensor)?;
        let index = self.group.shard_groups().index(Scope::ShardGroup, self.group.rank);
        let (mut own, mut bytes) = (Vec::new(), 0);
        for &Transfer { tensor, from, to } in transfers {
            let peer = match () {
                () if index == from => Peer::Receiver(to),
                () if index == to => Peer::Sender(from),
                () => continue,
            };
            own.push((on_device(engine, tensor)?.address, tensor, peer));
            bytes += tensor.bytes();
        }
        self.launch((Operation::Exchange, Scope::ShardGroup), bytes, |nccl| {
            nccl_rs::group(nccl.communicator(Scope::ShardGroup), || {
                own.into_iter().try_for_each(|(address, tensor, peer)| match tensor.dtype {
                    DType::F32 | DType::I32 => nccl.queue_transfer::<f32>((address, tensor.len), peer),
                    DType::Bf16 | DType::U16 => nccl.queue_transfer::<bf16>((address, tensor.len), peer),
                    DType::Block8 { .. } => nccl.queue_transfer::<f32>((address, tensor.len / 4), peer),
                    DType::Fp8 => bail!("exchange: expected a tensor of a type other than fp8"),
                })
            })
        })
    }

    fn reduce_scatter(&mut self, engine: &mut dyn Engine, of: Sharded, reduction: Reduction) -> Result<()> {
        let of = of.over(self.group.shard_groups().shard_size())?;
        let (from, to) = self.begin_sharded(engine, of)?;
        self.launch((Operation::ReduceScatter, Scope::ShardGroup), of.whole.bytes(), |nccl| match of.shard.dtype {
            DType::F32 => nccl.queue_reduce_scatter::<f32>(from, to, of.shard.len, reduction),
            DType::Bf16 => nccl.queue_reduce_scatter::<bf16>(from, to, of.shard.len, reduction),
            DType::I32 | DType::U16 | DType::Fp8 | DType::Block8 { .. } => {
                bail!("reduction over ranks: expected a tensor of f32 or bf16, found {}", of.shard.dtype.name())
            }
        })
    }

    fn all_gather(&mut self, engine: &mut dyn Engine, of: Sharded) -> Result<()> {
        let of = of.over(self.group.shard_groups().shard_size())?;
        let (to, from) = self.begin_sharded(engine, of)?;
        self.launch((Operation::AllGather, Scope::ShardGroup), of.shard.bytes(), |nccl| match of.shard.dtype {
            DType::F32 | DType::I32 => nccl.queue_all_gather::<f32>(to, from, of.shard.len),
            DType::Bf16 | DType::U16 => nccl.queue_all_gather::<bf16>(to, from, of.shard.len),
            DType::Block8 { .. } => nccl.queue_all_gather::<f32>(to, from, of.shard.len / 4),
            DType::Fp8 => bail!("all-gather: expected a tensor of a type other than fp8"),
        })
    }

    fn wait_on_stream(&mut self, engine: &mut dyn Engine) -> Result<()> {
        if std::mem::take(&mut self.pending) {
            self.collectives_event.record(&self.stream)?;
            engine.wait_for_event(&self.collectives_event)?;
        }
        Ok(())
    }

    fn check(&self) -> Result<()> {
        Ok(self.communicators().try_for_each(nccl_rs::Communicator::check)?)
    }

    fn start_profile(&mut self) -> Result<()> {
        self.profile = Some(Profile::start(self.stream.gpu(), &self.stream)?);
        Ok(())
    }

    fn profile(&mut self) -> Result<Vec<Interval>> {
        self.profile.take().map_or(Ok(Vec::new()), |profile| profile.finish(&self.stream))
    }

    fn close(self: Box<Self>) -> Result<()> {
        self.stream.synchronize()?;
        if let Some(Split { shard_group, replicas }) = self.split {
            replicas.close()?;
            shard_group.close()?;
        }
        Ok(self.world.close()?)
    }

    fn abort(self: Box<Self>) -> TcpGroup {
        self.monitors().abort();
        self.group
    }

    fn describe(&self) -> String {
        nccl_rs::find().map_or_else(|error| error.to_string(), |(_, version)| format!("NCCL {version}"))
    }
}
