//! Nodes with several GPUs, and the ranks of a communicator on them.

use anyhow::{Result, ensure};
use serde::Serialize;

/// A cluster of equal nodes. Rank r is on node r / `gpus_per_node`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Cluster {
    /// Number of GPUs, which is the world size.
    pub gpus: usize,
    /// GPUs on a node.
    pub gpus_per_node: usize,
}

/// The ranks of a communicator. If its parts differ, such as shard groups that begin in the middle of a node, the slowest part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Members {
    /// Number of ranks.
    pub ranks: usize,
    /// Nodes on which they are.
    pub nodes: usize,
    /// Minimum number of them on one node.
    pub per_node: usize,
}

impl Members {
    /// Reports whether they are on several nodes.
    pub fn spans_nodes(self) -> bool {
        self.nodes > 1
    }
}

impl Cluster {
    /// Creates a cluster of full nodes.
    pub fn new(gpus: usize, gpus_per_node: usize) -> Result<Self> {
        ensure!(gpus > 0 && gpus_per_node > 0, "--gpus: expected at least one GPU, found none");
        ensure!(
            gpus.is_multiple_of(gpus_per_node),
            "--gpus: expected a multiple of --gpus-per-node {gpus_per_node}, found {gpus}; use full nodes, such as --gpus {}",
            gpus.next_multiple_of(gpus_per_node)
        );
        Ok(Self { gpus, gpus_per_node })
    }

    /// Returns all ranks.
    pub fn world(self) -> Members {
        Members { ranks: self.gpus, nodes: self.gpus / self.gpus_per_node, per_node: self.gpus_per_node }
    }

    /// Returns the ranks of a shard group: `shard_size` consecutive ranks.
    pub fn shard_group(self, shard_size: usize) -> Members {
        // Groups begin at all multiples of the greatest common divisor within a node.
        let common = greatest_common_divisor(shard_size, self.gpus_per_node);
        let last_start = self.gpus_per_node - common;
        let nodes = (last_start + shard_size).div_ceil(self.gpus_per_node).min(self.gpus / self.gpus_per_node);
        Members { ranks: shard_size, nodes, per_node: if nodes == 1 { shard_size } else { common } }
    }

    /// Returns the ranks that have the same shard, one of each shard group.
    pub fn replicas(self, shard_size: usize) -> Members {
        let ranks = self.gpus / shard_size;
        let nodes = (self.gpus / self.gpus_per_node).min(ranks);
        let per_node = if nodes == 1 { ranks } else { (self.gpus_per_node / shard_size).max(1) };
        Members { ranks, nodes, per_node }
    }
}

fn greatest_common_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn members(ranks: usize, nodes: usize, per_node: usize) -> Members {
        Members { ranks, nodes, per_node }
    }

    #[test]
    fn shard_groups_and_replicas_lie_on_nodes() {
        let cluster = Cluster::new(64, 8).unwrap();
        assert_eq!(cluster.world(), members(64, 8, 8));
        let found = [2, 8, 16, 64].map(|size| (cluster.shard_group(size), cluster.replicas(size)));
        assert_eq!(found[0], (members(2, 1, 2), members(32, 8, 4)));
        assert_eq!(found[1], (members(8, 1, 8), members(8, 8, 1)));
        assert_eq!(found[2], (members(16, 2, 8), members(4, 4, 1)));
        assert_eq!(found[3], (members(64, 8, 8), members(1, 1, 1)));
        // Some groups of six lie on two nodes, with two ranks on one of them.
        let cluster = Cluster::new(48, 8).unwrap();
        assert_eq!(cluster.shard_group(6), members(6, 2, 2));
        let node = Cluster::new(8, 8).unwrap();
        assert_eq!((node.shard_group(2), node.replicas(2)), (members(2, 1, 2), members(4, 1, 4)));
    }

    /// Counts the ranks of every communicator on every node, for all divisors of some cluster sizes.
    #[test]
    fn members_are_those_of_the_slowest_communicator() {
        for (gpus, per_node) in [(64, 8), (48, 8), (24, 4), (12, 6)] {
            let cluster = Cluster::new(gpus, per_node).unwrap();
            for size in (1..=gpus).filter(|size| gpus % size == 0) {
                let nodes = |ranks: &mut dyn Iterator<Item = usize>| {
                    let mut counts = vec![0; gpus / per_node];
                    ranks.for_each(|rank| counts[rank / per_node] += 1);
                    counts.retain(|count| *count > 0);
                    counts
                };
                let groups = (0..gpus / size).map(|group| nodes(&mut (group * size..(group + 1) * size)));
                let groups: Vec<Vec<usize>> = groups.collect();
                let found = cluster.shard_group(size);
                assert_eq!(found.nodes, groups.iter().map(Vec::len).max().unwrap(), "{gpus} {per_node} {size}");
                assert_eq!(found.per_node, *groups.iter().flatten().min().unwrap(), "{gpus} {per_node} {size}");
                let replicas = (0..size).map(|place| nodes(&mut (place..gpus).step_by(size)));
                let replicas: Vec<Vec<usize>> = replicas.collect();
                let found = cluster.replicas(size);
                assert_eq!(found.nodes, replicas.iter().map(Vec::len).max().unwrap(), "{gpus} {per_node} {size}");
                assert_eq!(found.per_node, *replicas.iter().flatten().min().unwrap(), "{gpus} {per_node} {size}");
            }
        }
    }

    #[test]
    fn partial_nodes_are_rejected() {
        let error = Cluster::new(20, 8).unwrap_err().to_string();
        assert_eq!(
            error,
            "--gpus: expected a multiple of --gpus-per-node 8, found 20; use full nodes, such as --gpus 24"
        );
    }
}
