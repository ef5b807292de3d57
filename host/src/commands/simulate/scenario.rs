//! A run and its faults, drawn from a seed.

use std::time::Duration;
use system::simulation::{Fault, ROOT, Random, Trigger};

/// Optimizer steps of a run.
pub const STEPS: usize = 6;

/// A training run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ScenarioShape {
    pub ranks: usize,
    pub zero_stage: u8,
    /// Number of ranks that shard together. All, if nothing is sharded.
    pub shard_size: usize,
    pub shuffle: bool,
}

/// A training run with faults.
#[derive(Clone, Debug)]
pub struct Scenario {
    pub shape: ScenarioShape,
    rendezvous: Option<&'static str>,
    checkpoint_every: usize,
    keep: usize,
    check_ranks: usize,
    verify_every: usize,
    hash_every: usize,
    /// Tokens in a step.
    total_batch: usize,
    /// The rank that is lost for good, if any.
    pub removal: Option<Removal>,
    /// The kind of its faults, for the tally.
    pub kind: &'static str,
    /// The faults of each start of the run. The last start has none.
    pub faults: Vec<Vec<(Trigger, Fault)>>,
}

/// The permanent loss of a rank of a run with `--min-ranks`.
#[derive(Clone, Copy, Debug)]
pub struct Removal {
    pub rank: usize,
    min_ranks: usize,
    /// Whether a process with this rank is there again after a second fault.
    pub returns: bool,
}

/// Sequences of 8 tokens, which are the micro-batches.
const SEQUENCE: usize = 8;

/// Numbers of operations of an undisturbed run: all, and those on the disk.
pub type Operations = (u64, u64);

/// The kinds of faults.
const KINDS: [&str; 15] = [
    "none",
    "killed rank",
    "lost host",
    "frozen rank",
    "frozen rank, full sockets",
    "slow rank",
    "isolated rank",
    "reset connection",
    "delayed and reordered messages",
    "dropped messages",
    "power loss",
    "full disk",
    "failing disk",
    "slow disk",
    "several",
];

impl Scenario {
    /// Draws the scenario of a seed. `operations` returns those of an undisturbed run.
    pub fn new(
        seed: u64,
        operations: impl FnOnce(ScenarioShape) -> anyhow::Result<Operations>,
    ) -> anyhow::Result<Self> {
        let random = &mut Random::new(seed);
        let ranks = 1 + random.below(4) as usize;
        let zero_stage = if ranks > 1 { random.below(4) as u8 } else { 0 };
        // The order of the samples makes state files large.
        let shape = ScenarioShape {
            ranks,
            zero_stage,
            shard_size: shard_size(seed, ranks, zero_stage),
            shuffle: random.below(4) == 0,
        };
        let operations = operations(shape)?;
        let kind = random.choose(&KINDS);
        let mut scenario = Self {
            shape,
            rendezvous: random.choose(&[None, Some("tcp://127.0.0.1:29400"), Some("file:///simulated")]),
            checkpoint_every: 1 + random.below(3) as usize,
            keep: random.below(3) as usize,
            check_ranks: random.below(2) as usize,
            verify_every: random.below(3) as usize,
            hash_every: random.below(3) as usize,
            // Two micro-batches in a step.
            total_batch: 2 * SEQUENCE * ranks,
            removal: None,
            kind,
            faults: Vec::new(),
        };
        let starts = if kind == "none" { 0 } else { 1 + u64::from(random.below(4) == 0) };
        for _ in 0..starts {
            let mut faults = Vec::new();
            if kind == "several" {
                for _ in 0..2 + random.below(3) {
                    let kind = random.choose(&KINDS[1..KINDS.len() - 1]);
                    faults.extend(scenario.draw(kind, operations, random));
                }
            } else {
                faults.extend(scenario.draw(kind, operations, random));
            }
            scenario.faults.push(faults);
        }
        scenario.remove_rank(seed, operations);
        Ok(scenario)
    }

    /// Makes the loss of a rank permanent, in half of the seeds with such a fault. It uses random numbers of its own, so that the other
    /// seeds do not depend on it.
    fn remove_rank(&mut self, seed: u64, (all, _): Operations) {
        let random = &mut Random::new(!seed.rotate_left(32));
        let ranks = self.shape.ranks;
        let first = self.faults.first().and_then(|faults| faults.first()).copied();
        let Some((_, Fault::Kill(rank) | Fault::LoseHost(rank))) = first else { return };
        if self.kind == "several" || ranks == 1 || random.below(2) == 0 {
            return;
        }
        self.kind = "removed rank";
        self.total_batch = SEQUENCE * random.choose(&[2 * ranks, 12]);
        let min_ranks = 1 + random.below(ranks as u64) as usize;
        self.removal = Some(Removal { rank, min_ranks, returns: false });
        self.faults.truncate(1);
        // Spare ranks would continue by themselves after a second fault.
        let returns = self.world_size(ranks - 1) == Some(ranks - 1) && random.below(2) == 0;
        if returns {
            let lost = random.below(ranks as u64 - 1) as usize;
            self.faults.push(vec![(Trigger::Operation(1 + random.below(all)), Fault::Kill(lost))]);
        }
        self.removal = Some(Removal { rank, min_ranks, returns });
    }

    /// Returns a run of another shape without faults, whose number of ranks is fixed. A step has the same batch.
    pub fn with_shape(&self, shape: ScenarioShape) -> Self {
        Self { shape, removal: None, faults: Vec::new(), ..self.clone() }
    }

    /// Returns the number of ranks with which a run with `--min-ranks` continues if so many have come, or `None` if they are too few.
    pub fn world_size(&self, present: usize) -> Option<usize> {
        let min_ranks = self.removal?.min_ranks;
        (min_ranks..=present).rev().find(|&ranks| (self.total_batch / SEQUENCE).is_multiple_of(ranks))
    }

    /// Draws faults of a kind.
    fn draw(&self, kind: &str, (all, on_disk): Operations, random: &mut Random) -> Vec<(Trigger, Fault)> {
        let rank = random.below(self.shape.ranks as u64) as usize;
        let seconds = |random: &mut Random, longest: u64| Duration::from_millis(random.below(1000 * longest));
        let anywhere = Trigger::Operation(1 + random.below(all));
        let at_disk = Trigger::DiskOperation(1 + random.below(on_disk.max(1)));
        let start = Trigger::Time(Duration::ZERO);
        match kind {
            "killed rank" => vec![(anywhere, Fault::Kill(rank))],
            "lost host" => vec![(anywhere, Fault::LoseHost(rank))],
            "frozen rank" => vec![(anywhere, Fault::Freeze(rank, seconds(random, 120)))],
            "frozen rank, full sockets" => {
                let window = 64 + random.below(16 << 10) as usize;
                vec![(start, Fault::SmallSockets(window)), (anywhere, Fault::Freeze(rank, seconds(random, 120)))]
            }
            "slow rank" => vec![(start, Fault::Slow(rank, seconds(random, 1)))],
            "isolated rank" => vec![(anywhere, Fault::Isolate(rank, seconds(random, 60)))],
            "reset connection" => vec![(anywhere, Fault::ResetConnection)],
            "delayed and reordered messages" => vec![(start, Fault::Delay(seconds(random, 1)))],
            "dropped messages" => vec![(start, Fault::Drop(2 + random.below(50) as u32))],
            "power loss" if random.below(2) == 0 => vec![(anywhere, Fault::PowerLoss)],
            "power loss" => vec![(at_disk, Fault::PowerLoss)],
            "full disk" => vec![(at_disk, Fault::DiskFull(random.below(100_000)))],
            "failing disk" => vec![(at_disk, Fault::DiskErrors(1 + random.below(8) as u32))],
            "slow disk" => vec![(start, Fault::SlowDisk(seconds(random, 2)))],
            _ => Vec::new(),
        }
    }

    /// Returns the command line of a rank.
    pub fn arguments(&self, rank: usize) -> Vec<String> {
        let ScenarioShape { ranks, zero_stage, shard_size, shuffle } = self.shape;
        let mut arguments = vec!["llm-rs".to_owned(), "train".to_owned()];
        let flags = [
            ("--device", "cpu".to_owned()),
            ("--layers", "1".to_owned()),
            ("--heads", "1".to_owned()),
            ("--channels", "8".to_owned()),
            ("--batch", "1".to_owned()),
            ("--seq", SEQUENCE.to_string()),
            ("--total-batch", self.total_batch.to_string()),
            ("--steps", STEPS.to_string()),
            ("--val-every", "3".to_owned()),
            ("--val-batches", "1".to_owned()),
            ("--sample-every", "0".to_owned()),
            ("--zero-stage", zero_stage.to_string()),
            ("--shuffle", u8::from(shuffle).to_string()),
            ("--rank", rank.to_string()),
            ("--world-size", ranks.to_string()),
            ("--rendezvous-timeout", "20".to_owned()),
            ("--check-ranks", self.check_ranks.to_string()),
            ("--verify-every", self.verify_every.to_string()),
            ("--hash-every", self.hash_every.to_string()),
            ("--checkpoint-every", self.checkpoint_every.to_string()),
            ("--keep", self.keep.to_string()),
            ("--resume", "auto".to_owned()),
            ("--out", directory().display().to_string()),
        ];
        for (flag, value) in flags {
            arguments.extend([flag.to_owned(), value]);
        }
        if shard_size < ranks {
            arguments.extend(["--shard-size".to_owned(), shard_size.to_string()]);
        }
        if let Some(Removal { min_ranks, .. }) = self.removal {
            let flags = ["--min-ranks".to_owned(), min_ranks.to_string(), "--local-rank".to_owned(), rank.to_string()];
            arguments.extend(flags);
        }
        if let Some(rendezvous) = self.rendezvous {
            arguments.extend(["--rendezvous".to_owned(), rendezvous.to_owned()]);
        }
        arguments
    }

    /// Returns a run that can continue without `rank`.
    #[cfg(test)]
    pub fn without_rank(rank: usize, shape: ScenarioShape) -> Self {
        let removal = Some(Removal { rank, min_ranks: 1, returns: false });
        Self { removal, total_batch: 12 * SEQUENCE, ..Self::undisturbed(shape) }
    }

    /// Returns the undisturbed run of a shape.
    pub fn undisturbed(shape: ScenarioShape) -> Self {
        Self {
            shape,
            rendezvous: None,
            checkpoint_every: 2,
            keep: 0,
            check_ranks: 1,
            verify_every: 0,
            hash_every: 0,
            total_batch: 2 * SEQUENCE * shape.ranks,
            removal: None,
            kind: "none",
            faults: Vec::new(),
        }
    }
}

/// Draws the number of ranks that shard together. It uses random numbers of its own, so that the other draws of a seed do not depend
/// on it.
fn shard_size(seed: u64, ranks: usize, zero_stage: u8) -> usize {
    let sizes: Vec<usize> = (2..=ranks).filter(|&n| ranks.is_multiple_of(n)).collect();
    if zero_stage == 0 || sizes.is_empty() { ranks } else { Random::new(!seed).choose(&sizes) }
}

/// Returns the directory of the run.
pub fn directory() -> std::path::PathBuf {
    [ROOT, "runs", "a"].iter().collect()
}
