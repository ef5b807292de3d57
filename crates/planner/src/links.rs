//! The time of a collective: latency plus bytes over bandwidth, for rings and trees.
//!
//! The number of bytes that each rank sends comes from nccl-tests
//! (<https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md>): S (n - 1) / n for reduce-scatter and all-gather of S bytes
//! over n ranks, and twice that for an all-reduce. The numbers of hops, the latencies, and the part of the bandwidth that each of
//! NCCL's protocols uses are those of the model by which NCCL selects an algorithm (NCCL 2.28, `src/graph/tuning.cc`). As in NCCL, the
//! fastest combination counts.
//!
//! Not modeled: NVLink SHARP and network reductions, and NCCL's PAT for communicators with one rank per node. They are faster.

use crate::cluster::Members;
use serde::Serialize;

/// A collective operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
#[expect(missing_docs, reason = "the names are those of the field")]
pub enum Operation {
    AllReduce,
    ReduceScatter,
    AllGather,
    Exchange,
}

impl Operation {
    /// The operations of a measured sweep.
    pub const MEASURED: [Self; 3] = [Self::AllReduce, Self::ReduceScatter, Self::AllGather];

    /// Returns the name in files and tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all-reduce",
            Self::ReduceScatter => "reduce-scatter",
            Self::AllGather => "all-gather",
            Self::Exchange => "exchange",
        }
    }

    /// Returns the bytes that each rank sends with a ring, as a multiple of the size.
    pub fn bus_factor(self, ranks: usize) -> f64 {
        let once = (ranks - 1) as f64 / ranks as f64;
        match self {
            Self::AllReduce => 2.0 * once,
            Self::ReduceScatter | Self::AllGather => once,
            // Each rank sends to each other rank its part of what it has.
            Self::Exchange => once / ranks as f64,
        }
    }
}

/// An algorithm of NCCL.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Algorithm {
    /// Every rank sends to the next one.
    Ring,
    /// Two binary trees between nodes, chains inside them.
    Tree,
}

/// A protocol of NCCL.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Protocol {
    /// LL: a flag beside each 4 bytes.
    LowLatency,
    /// LL128: a flag in each 128 bytes.
    LowLatency128,
    /// A barrier after each chunk.
    Simple,
}

/// The combinations of NCCL, with their latencies in microseconds.
const COSTS: [Cost; 6] = [
    Cost { algorithm: Algorithm::Ring, protocol: Protocol::LowLatency, base: 6.6, nvlink: 0.6, network: 2.7 },
    Cost { algorithm: Algorithm::Ring, protocol: Protocol::LowLatency128, base: 14.0, nvlink: 1.9, network: 4.0 },
    Cost { algorithm: Algorithm::Ring, protocol: Protocol::Simple, base: 8.4, nvlink: 3.4, network: 14.0 },
    Cost { algorithm: Algorithm::Tree, protocol: Protocol::LowLatency, base: 6.8, nvlink: 0.6, network: 5.0 },
    Cost { algorithm: Algorithm::Tree, protocol: Protocol::LowLatency128, base: 14.0, nvlink: 1.25, network: 8.5 },
    Cost { algorithm: Algorithm::Tree, protocol: Protocol::Simple, base: 8.4, nvlink: 4.0, network: 14.0 },
];

struct Cost {
    algorithm: Algorithm,
    protocol: Protocol,
    base: f64,
    /// Latency of each hop inside a node.
    nvlink: f64,
    /// Latency of each hop between nodes.
    network: f64,
}

impl Cost {
    /// Returns the latency in seconds.
    fn latency(&self, operation: Operation, of: Members) -> f64 {
        let (ranks, nodes) = (of.ranks as f64, of.nodes as f64);
        let (inside, between) = match self.algorithm {
            Algorithm::Ring => {
                let rounds = if operation == Operation::AllReduce { 2.0 } else { 1.0 };
                let between = rounds * (nodes - 1.0);
                (rounds * (ranks - 1.0) - between, between)
            }
            Algorithm::Tree => (2.0 * (ranks / nodes - 1.0), 2.0 * nodes.log2().floor()),
        };
        // Without other ranks of the node, the latency of the network is not hidden: NCCL takes the tree's.
        let alone = self.algorithm == Algorithm::Ring && of.per_node == 1;
        let network = match self.protocol {
            Protocol::LowLatency if alone => 5.0,
            Protocol::LowLatency128 if alone => 8.5,
            _ => self.network,
        };
        1e-6 * (self.base + inside * self.nvlink + between * network)
    }

    /// Returns the bytes over the bus as a multiple of the size, where a bus is a ring's connections.
    fn bus_factor(&self, operation: Operation, of: Members) -> f64 {
        match self.algorithm {
            Algorithm::Ring => operation.bus_factor(of.ranks),
            Algorithm::Tree => 2.0,
        }
    }

    /// Returns the part of the bandwidth that carries data, and the largest bandwidth.
    fn efficiency(&self, of: Members) -> (f64, f64) {
        let low_latency = match of.nodes {
            1 => 141e9,
            2 => 45e9,
            _ => 35e9,
        };
        match (self.algorithm, self.protocol) {
            (Algorithm::Ring, Protocol::LowLatency) => (0.5, low_latency),
            (Algorithm::Ring, Protocol::LowLatency128) | (Algorithm::Tree, Protocol::Simple) => (0.92, f64::INFINITY),
            (Algorithm::Ring, Protocol::Simple) => (1.0, f64::INFINITY),
            (Algorithm::Tree, Protocol::LowLatency) => (0.92 / 3.8, low_latency),
            (Algorithm::Tree, Protocol::LowLatency128) if of.nodes == 1 => (0.92 * 7.0 / 9.0, f64::INFINITY),
            (Algorithm::Tree, Protocol::LowLatency128) => (0.92 * 120.0 / 128.0, f64::INFINITY),
        }
    }
}

/// The bus bandwidths of a cluster in bytes per second, for each operation of [`Operation::MEASURED`].
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Links {
    /// Inside a node.
    pub intra: [f64; 3],
    /// Between nodes, of one GPU.
    pub inter: [f64; 3],
}

/// The predicted time of a collective.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Estimate {
    /// The time in seconds.
    pub seconds: f64,
    /// The fastest algorithm.
    pub algorithm: Algorithm,
    /// Its fastest protocol.
    pub protocol: Protocol,
}

/// The time of a candidate: latency + bytes / bandwidth, or bytes over the bandwidth of a protocol.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Terms {
    /// Seconds before and between the hops.
    pub latency: f64,
    /// Bytes over the bus, if they are limited by its bandwidth.
    pub bus_bytes: f64,
    /// Seconds of the bytes, if they are limited by the protocol.
    pub fixed: f64,
    algorithm: Algorithm,
    protocol: Protocol,
}

impl Terms {
    pub(crate) fn seconds(&self, bandwidth: f64) -> f64 {
        self.latency + self.bus_bytes / bandwidth + self.fixed
    }
}

/// Returns the terms of the fastest candidate at a bus bandwidth.
pub(crate) fn fastest(operation: Operation, bytes: f64, of: Members, bandwidth: f64) -> Terms {
    let candidates = COSTS.iter().filter(|cost| cost.algorithm == Algorithm::Ring || operation == Operation::AllReduce);
    let terms = candidates.map(|cost| {
        let (efficiency, most) = cost.efficiency(of);
        let bus_bytes = bytes * cost.bus_factor(operation, of);
        let limited = bandwidth * efficiency > most;
        Terms {
            latency: cost.latency(operation, of),
            bus_bytes: if limited { 0.0 } else { bus_bytes / efficiency },
            fixed: if limited { bus_bytes / most } else { 0.0 },
            algorithm: cost.algorithm,
            protocol: cost.protocol,
        }
    });
    let fastest = terms.min_by(|a, b| a.seconds(bandwidth).total_cmp(&b.seconds(bandwidth)));
    fastest.unwrap_or_else(|| unreachable!("rings support every operation"))
}

impl Links {
    /// Creates connections with the same bandwidth for all operations.
    pub fn new(intra: f64, inter: f64) -> Self {
        Self { intra: [intra; 3], inter: [inter; 3] }
    }

    /// Returns the bus bandwidth of a communicator. Between nodes, its ranks of a node share the load, up to the bandwidth inside.
    pub fn bandwidth(&self, operation: Operation, members: Members) -> f64 {
        // An exchange is not measured: like an all-gather, it only copies.
        let at = Operation::MEASURED.iter().position(|known| *known == operation).unwrap_or(2);
        if members.spans_nodes() {
            (self.inter[at] * members.per_node as f64).min(self.intra[at])
        } else {
            self.intra[at]
        }
    }

    /// Returns the time of a collective of `bytes` bytes: of the whole, not of a shard.
    pub fn time(&self, operation: Operation, bytes: f64, members: Members) -> Estimate {
        let bandwidth = self.bandwidth(operation, members);
        let terms = fastest(operation, bytes, members, bandwidth);
        Estimate { seconds: terms.seconds(bandwidth), algorithm: terms.algorithm, protocol: terms.protocol }
    }
}

#[cfg(test)]
#[expect(clippy::float_cmp, reason = "these results are exact")]
mod tests {
    use super::*;
    use crate::Cluster;

    fn close(found: f64, expected: f64) {
        assert!((found / expected - 1.0).abs() < 1e-9, "{found} instead of {expected}");
    }

    #[test]
    fn a_ring_sends_every_part_but_one() {
        assert_eq!(Operation::AllReduce.bus_factor(4), 1.5);
        assert_eq!(Operation::ReduceScatter.bus_factor(4), 0.75);
        assert_eq!(Operation::AllGather.bus_factor(8), 0.875);
        assert_eq!(Operation::Exchange.bus_factor(4), 0.1875);
        // 1 GB over 8 GPUs at 400 GB/s: base 8.4 us and 7 hops of 3.4 us.
        let links = Links::new(400e9, 50e9);
        let node = Cluster::new(8, 8).unwrap().world();
        let found = links.time(Operation::AllGather, 1e9, node);
        close(found.seconds, 0.875e9 / 400e9 + 32.2e-6);
        assert_eq!((found.algorithm, found.protocol), (Algorithm::Ring, Protocol::Simple));
        let found = links.time(Operation::AllReduce, 1e9, node);
        close(found.seconds, 1.75e9 / 400e9 + (8.4 + 14.0 * 3.4) * 1e-6);
    }

    #[test]
    fn small_messages_use_the_low_latency_protocol() {
        let links = Links::new(400e9, 50e9);
        let found = links.time(Operation::AllReduce, 1024.0, Cluster::new(8, 8).unwrap().world());
        assert_eq!(found.protocol, Protocol::LowLatency);
        // 14 hops of 0.6 us; 141 GB/s is the most that the protocol reaches.
        close(found.seconds, 15e-6 + 1.75 * 1024.0 / 141e9);
    }

    #[test]
    fn many_nodes_reduce_with_a_tree() {
        let links = Links::new(400e9, 50e9);
        let world = Cluster::new(1024, 8).unwrap().world();
        let small = links.time(Operation::AllReduce, 1e6, world);
        assert_eq!(small.algorithm, Algorithm::Tree);
        // Rings have latencies in proportion to the number of ranks: 1023 hops, 127 of them between nodes.
        let ring = links.time(Operation::AllGather, 1e9, world);
        // LL128 has the shorter latencies and 92 % of the bandwidth.
        close(ring.seconds, (14.0 + 896.0 * 1.9 + 127.0 * 4.0) * 1e-6 + 1e9 * (1023.0 / 1024.0) / (0.92 * 400e9));
        assert_eq!((ring.algorithm, ring.protocol), (Algorithm::Ring, Protocol::LowLatency128));
    }

    #[test]
    fn the_ranks_of_a_node_share_the_network() {
        let links = Links::new(450e9, 50e9);
        let cluster = Cluster::new(64, 8).unwrap();
        let bandwidth = |members| links.bandwidth(Operation::AllReduce, members);
        assert_eq!(bandwidth(cluster.replicas(8)), 50e9);
        assert_eq!(bandwidth(cluster.replicas(4)), 100e9);
        assert_eq!(bandwidth(cluster.world()), 400e9);
        assert_eq!(bandwidth(cluster.shard_group(8)), 450e9);
        // The ring passes through the GPUs of a node, so it is not faster than their connections.
        assert_eq!(Links::new(300e9, 50e9).bandwidth(Operation::AllReduce, cluster.world()), 300e9);
    }
}
