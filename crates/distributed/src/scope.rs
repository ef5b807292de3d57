//! Which ranks take part in a collective.
//!
//! Sharded values have one copy in each shard group. A group consists of consecutive ranks, so that it lies on one host if the
//! number of ranks per host is a multiple of its size.

use anyhow::ensure;
use engine::Result;

/// The ranks that take part in a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// All ranks of the run.
    World,
    /// The ranks of this rank's shard group. Together they have all shards.
    ShardGroup,
    /// The ranks with the same shard as this one: one of each shard group.
    Replicas,
}

/// The shard groups of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShardGroups {
    world_size: usize,
    shard_size: usize,
}

impl ShardGroups {
    /// Divides `world_size` ranks into groups of `shard_size`.
    pub fn new(world_size: usize, shard_size: usize) -> Result<Self> {
        let divisors = || (1..=world_size).filter(|&n| world_size.is_multiple_of(n)).map(|n| n.to_string());
        ensure!(
            shard_size > 0 && world_size.is_multiple_of(shard_size),
            "--shard-size: expected a divisor of the world size {world_size}, found {shard_size}; use one of {}",
            divisors().collect::<Vec<_>>().join(", ")
        );
        Ok(Self { world_size, shard_size })
    }

    /// Returns the smallest possible size of a group that is at least `shard_size`, or the largest possible size.
    pub fn smallest_size(world_size: usize, shard_size: usize) -> usize {
        (shard_size..world_size).find(|&n| world_size.is_multiple_of(n)).unwrap_or(world_size)
    }

    /// Returns the number of ranks in a group.
    pub fn shard_size(self) -> usize {
        self.shard_size
    }

    /// Returns the number of communicators that the scopes of more than one rank need.
    pub fn communicators(self) -> usize {
        match self {
            Self { world_size: 1, .. } => 0,
            Self { world_size, shard_size } if (2..world_size).contains(&shard_size) => 3,
            _ => 1,
        }
    }

    /// Returns the number of ranks of a scope.
    pub fn size(self, scope: Scope) -> usize {
        match scope {
            Scope::World => self.world_size,
            Scope::ShardGroup => self.shard_size,
            Scope::Replicas => self.world_size / self.shard_size,
        }
    }

    /// Returns [`Scope::World`] if a scope has all ranks, otherwise the scope.
    pub(crate) fn simplified(self, scope: Scope) -> Scope {
        if self.size(scope) == self.world_size { Scope::World } else { scope }
    }

    /// Returns the number of collectives that run side by side if all ranks call one with a scope.
    pub(crate) fn parts(self, scope: Scope) -> usize {
        self.world_size / self.size(scope)
    }

    /// Returns the part of the ranks to which a rank belongs, see [`parts`](Self::parts).
    pub(crate) fn part(self, scope: Scope, rank: usize) -> usize {
        match scope {
            Scope::World => 0,
            Scope::ShardGroup => rank / self.shard_size,
            Scope::Replicas => rank % self.shard_size,
        }
    }

    /// Returns the index of a rank within its part.
    pub fn index(self, scope: Scope, rank: usize) -> usize {
        match scope {
            Scope::World => rank,
            Scope::ShardGroup => rank % self.shard_size,
            Scope::Replicas => rank / self.shard_size,
        }
    }

    /// Returns the rank with an index within a part.
    pub(crate) fn rank(self, scope: Scope, part: usize, index: usize) -> usize {
        match scope {
            Scope::World => index,
            Scope::ShardGroup => part * self.shard_size + index,
            Scope::Replicas => index * self.shard_size + part,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scopes_divide_the_ranks_into_groups_and_replicas() {
        let groups = ShardGroups::new(6, 3).unwrap();
        let parts = |scope| -> Vec<Vec<usize>> {
            let ranks = |part| (0..groups.size(scope)).map(|index| groups.rank(scope, part, index)).collect();
            (0..groups.parts(scope)).map(ranks).collect()
        };
        assert_eq!(parts(Scope::World), [[0, 1, 2, 3, 4, 5]]);
        assert_eq!(parts(Scope::ShardGroup), [[0, 1, 2], [3, 4, 5]]);
        assert_eq!(parts(Scope::Replicas), [[0, 3], [1, 4], [2, 5]]);
        for scope in [Scope::World, Scope::ShardGroup, Scope::Replicas] {
            for rank in 0..6 {
                let place = (groups.part(scope, rank), groups.index(scope, rank));
                assert_eq!(groups.rank(scope, place.0, place.1), rank, "{scope:?}");
            }
        }
    }

    #[test]
    fn scopes_of_all_ranks_need_no_communicator_of_their_own() {
        let communicators = |ranks, shard| ShardGroups::new(ranks, shard).unwrap().communicators();
        assert_eq!([(1, 1), (4, 1), (4, 4), (4, 2)].map(|(ranks, shard)| communicators(ranks, shard)), [0, 1, 1, 3]);
        let simplified = |shard, scope| ShardGroups::new(4, shard).unwrap().simplified(scope);
        assert_eq!(simplified(4, Scope::ShardGroup), Scope::World);
        assert_eq!(simplified(1, Scope::Replicas), Scope::World);
        assert_eq!(simplified(2, Scope::Replicas), Scope::Replicas);
    }

    #[test]
    fn the_smallest_size_divides_the_ranks() {
        let sizes = [(4, 2), (3, 2), (6, 4), (15, 8), (7, 2), (2, 4), (1, 4)];
        let smallest = sizes.map(|(ranks, size)| ShardGroups::smallest_size(ranks, size));
        assert_eq!(smallest, [2, 3, 6, 15, 7, 2, 1]);
    }

    #[test]
    fn a_size_that_does_not_divide_the_ranks_is_rejected() {
        for size in [0, 4, 12] {
            let text = ShardGroups::new(6, size).unwrap_err().to_string();
            let expected = "--shard-size: expected a divisor of the world size 6, found ";
            assert_eq!(text, format!("{expected}{size}; use one of 1, 2, 3, 6"));
        }
    }
}
