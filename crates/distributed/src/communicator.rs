//! Collective operations on the tensors of an engine.

use super::flight_recorder::Operation;
use super::nccl::Nccl;
use super::scope::Scope;
use super::tcp_group::{Reduction, TcpGroup};
use engine::tensor::{Sharded, Tensor};
use engine::{Engine, HostProfile, Interval, Result};
use std::time::Instant;

/// A tensor that one rank of a shard group sends to another. All ranks of the group have a tensor of this length and type at this place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// The tensor.
    pub tensor: Tensor,
    /// Index of the sender in the shard group.
    pub from: usize,
    /// Index of another rank, the receiver.
    pub to: usize,
}

/// Collective operations of one rank. All ranks make the same calls in the same order, with the same [`Scope`] and tensors of the
/// same length and type. Each rank takes part in the operation of its own shard group or replicas.
///
/// An operation starts after the work queued on the engine before the call. It may overlap with work queued later.
/// Call [`wait_on_stream`](Self::wait_on_stream) before queueing work that reads a result or overwrites an input.
/// The ranks of an operation receive bitwise identical results.
pub trait Communicator {
    /// Returns the index of this rank.
    fn rank(&self) -> usize;

    /// Returns the number of ranks.
    fn world_size(&self) -> usize;

    /// Returns the TCP connections between the processes, for values in host memory.
    fn tcp_group(&mut self) -> &mut TcpGroup;

    /// Reduces `tensor` over the ranks of a scope, in place.
    fn all_reduce(&mut self, engine: &mut dyn Engine, scope: Scope, tensor: Tensor, reduction: Reduction)
    -> Result<()>;

    /// Copies `tensor` of rank 0 to all ranks.
    fn broadcast(&mut self, engine: &mut dyn Engine, tensor: Tensor) -> Result<()>;

    /// Performs all `transfers` in a shard group. No tensor may be both sent and received, in whole or in part.
    fn exchange(&mut self, engine: &mut dyn Engine, transfers: &[Transfer]) -> Result<()>;

    /// Reduces the whole over the shard group and keeps this rank's part. The rest of the whole is unspecified afterwards.
    fn reduce_scatter(&mut self, engine: &mut dyn Engine, of: Sharded, reduction: Reduction) -> Result<()>;

    /// Concatenates the parts of the shard group into the whole, in rank order.
    fn all_gather(&mut self, engine: &mut dyn Engine, of: Sharded) -> Result<()>;

    /// Makes work that is queued on the engine from now on wait for all operations so far.
    fn wait_on_stream(&mut self, engine: &mut dyn Engine) -> Result<()>;

    /// Returns the error of an asynchronous operation, if one failed on the device or between ranks.
    fn check(&self) -> Result<()>;

    /// Returns whether each operation is complete when its call returns.
    fn is_synchronous(&self) -> bool {
        false
    }

    /// Begins to record the start and end of each operation.
    fn start_profile(&mut self) -> Result<()>;

    /// Waits for all operations, ends the profile and returns its intervals in order.
    fn profile(&mut self) -> Result<Vec<Interval>>;

    /// Shuts down after all operations have finished. All ranks must call it.
    fn close(self: Box<Self>) -> Result<()>;

    /// Aborts all pending operations and returns the TCP connections.
    fn abort(self: Box<Self>) -> TcpGroup;

    /// Returns the name of the transport, for example `NCCL 2.28.3`.
    fn describe(&self) -> String;
}

impl TcpGroup {
    /// Calls `work`, and records its start and end if there is a profile.
    fn profiled(&mut self, name: &str, work: impl FnOnce(&mut Self) -> Result<()>) -> Result<()> {
        let begin = Instant::now();
        work(self)?;
        if let Some(profile) = &mut self.profile {
            profile.record(name, begin);
        }
        Ok(())
    }
}

/// Collectives through host memory, for any engine. They are synchronous: each is done when its call returns.
impl Communicator for TcpGroup {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.world_size
    }

    fn tcp_group(&mut self) -> &mut TcpGroup {
        self
    }

    fn all_reduce(
        &mut self,
        engine: &mut dyn Engine,
        scope: Scope,
        tensor: Tensor,
        reduction: Reduction,
    ) -> Result<()> {
        self.profiled("all-reduce", |group| {
            let mut bytes = vec![0; tensor.bytes()];
            engine.read_bytes(tensor, &mut bytes)?;
            group.all_reduce_bytes(scope, &mut bytes, tensor.dtype, reduction)?;
            engine.write_bytes(tensor, &bytes)
        })
    }

    fn broadcast(&mut self, engine: &mut dyn Engine, tensor: Tensor) -> Result<()> {
        self.profiled("broadcast", |group| {
            let mut bytes = vec![0; tensor.bytes()];
            if group.rank == 0 {
                engine.read_bytes(tensor, &mut bytes)?;
            }
            group.broadcast_bytes(Scope::World, &mut bytes, 0)?;
            if group.rank == 0 { Ok(()) } else { engine.write_bytes(tensor, &bytes) }
        })
    }

    /// All ranks of the group receive each tensor, because rank 0 relays it.
    fn exchange(&mut self, engine: &mut dyn Engine, transfers: &[Transfer]) -> Result<()> {
        self.profiled("exchange", |group| {
            let index = group.shard_groups().index(Scope::ShardGroup, group.rank);
            transfers.iter().try_for_each(|&Transfer { tensor, from, to }| {
                let mut bytes = vec![0; tensor.bytes()];
                if index == from {
                    engine.read_bytes(tensor, &mut bytes)?;
                }
                group.broadcast_bytes(Scope::ShardGroup, &mut bytes, from)?;
                if index == to { engine.write_bytes(tensor, &bytes) } else { Ok(()) }
            })
        })
    }

    fn reduce_scatter(&mut self, engine: &mut dyn Engine, of: Sharded, reduction: Reduction) -> Result<()> {
        self.profiled("reduce-scatter", |group| {
            let groups = group.shard_groups();
            let Sharded { whole, shard: part } = of.over(groups.shard_size())?;
            let mut bytes = vec![0; whole.bytes()];
            engine.read_bytes(whole, &mut bytes)?;
            group.reduce_bytes((Operation::ReduceScatter, Scope::ShardGroup), &mut bytes, whole.dtype, reduction)?;
            let index = groups.index(Scope::ShardGroup, group.rank);
            engine.write_bytes(part, &bytes[index * part.bytes()..][..part.bytes()])
        })
    }

    fn all_gather(&mut self, engine: &mut dyn Engine, of: Sharded) -> Result<()> {
        self.profiled("all-gather", |group| {
            let Sharded { whole, shard: part } = of.over(group.shard_groups().shard_size())?;
            let mut bytes = vec![0; part.bytes()];
            engine.read_bytes(part, &mut bytes)?;
            engine.write_bytes(whole, &group.all_gather_bytes(&bytes)?)
        })
    }

    fn wait_on_stream(&mut self, _engine: &mut dyn Engine) -> Result<()> {
        Ok(())
    }

    fn check(&self) -> Result<()> {
        Ok(())
    }

    fn is_synchronous(&self) -> bool {
        true
    }

    fn start_profile(&mut self) -> Result<()> {
        self.profile = Some(HostProfile::start());
        Ok(())
    }

    fn profile(&mut self) -> Result<Vec<Interval>> {
        Ok(self.profile.take().map_or_else(Vec::new, HostProfile::finish))
    }

    fn close(self: Box<Self>) -> Result<()> {
        Ok(())
    }

    fn abort(self: Box<Self>) -> TcpGroup {
        *self
    }

    fn describe(&self) -> String {
        "TCP, through host memory".to_owned()
    }
}

/// Creates the communicator for an engine: NCCL if `tensor`, a tensor of the engine, is on a GPU, otherwise TCP. The shard groups
/// are those of `group`.
pub fn for_engine(group: TcpGroup, engine: &dyn Engine, tensor: Tensor) -> Result<Box<dyn Communicator>> {
    match engine.device_tensor(tensor)? {
        Some(device) => Ok(Box::new(Nccl::new(group, device.stream.gpu())?)),
        None => Ok(Box::new(group)),
    }
}
