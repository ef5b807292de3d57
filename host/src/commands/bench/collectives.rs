//! `bench collectives`: times the collectives of a run with several ranks.

use super::table::{Cell, Column, Json, Spread, Table};
use crate::commands::resources::Hardware;
use crate::commands::train::{Launch, multi_rank};
use anyhow::ensure;
use checkpoint::preflight::{self, RankInfo};
use distributed::tcp_group::Reduction;
use distributed::{Ranks, Scope};
use engine::plan::{Group, Plan};
use engine::tensor::{DType, Sharded, Tensor};
use engine::{Engine, Result};
use serde_json::{Map, json};
use std::io::{Write, stdout};
use system::progress::{self, Unit};

/// Time all-reduce, reduce-scatter and all-gather of f32 values for a range of sizes. Start it like `train`, with two or more
/// ranks
#[derive(Clone, Debug, clap::Args)]
pub struct Collectives {
    /// Smallest size in bytes; K, M and G are powers of 1024
    #[arg(long, value_name = "BYTES", default_value = "1K", value_parser = bytes)]
    min_bytes: usize,
    /// Largest size in bytes
    #[arg(long, value_name = "BYTES", default_value = "1G", value_parser = bytes)]
    max_bytes: usize,

    #[command(flatten)]
    launch: Launch,

    #[command(flatten)]
    hardware: Hardware,

    #[command(flatten)]
    pub(super) json: Json,
}

const COLUMNS: &[Column] = &[
    Column::text("operation", "operation", 14),
    Column::number("bytes", "bytes", 10, 0),
    Column::number("repetitions", "times", 5, 0),
    Column::number("us", "us", 9, 1),
    Column::number("us_least", "min", 9, 1),
    Column::number("us_most", "max", 9, 1),
    Column::number("algorithm_gb_per_second", "GB/s", 8, 2),
    Column::number("bus_gb_per_second", "bus GB/s", 8, 2),
];

/// Measurements of one operation and size. The median counts.
const SAMPLES: usize = 5;
/// Bytes that one measurement moves, unless its number of repetitions is at a limit.
const BYTES_OF_SAMPLE: usize = 1 << 28;

/// Returns the number of collectives that one measurement launches.
fn repetitions(bytes: usize) -> usize {
    (BYTES_OF_SAMPLE / bytes).clamp(2, 50)
}

/// Parses a number of bytes.
fn bytes(text: &str) -> Result<usize, String> {
    let expected = || format!("expected a number of bytes, at least 4, such as 64K or 1G, found {text:?}");
    let (number, unit) = match text.trim_end_matches(['K', 'M', 'G']) {
        number if text.len() - number.len() <= 1 => (number, &text[number.len()..]),
        _ => return Err(expected()),
    };
    let shift = ["", "K", "M", "G"].iter().position(|known| *known == unit).ok_or_else(expected)? * 10;
    let number: usize = number.parse().map_err(|_| expected())?;
    number.checked_mul(1 << shift).filter(|bytes| *bytes >= 4).ok_or_else(expected)
}

/// Runs the command.
pub fn run(options: &Collectives) -> Result<()> {
    ensure!(
        options.min_bytes <= options.max_bytes,
        "--max-bytes: expected at least --min-bytes ({}), found {}",
        options.min_bytes,
        options.max_bytes
    );
    let (mut ranks, local_rank) = multi_rank::connect(&options.launch)?;
    ensure!(
        ranks.world_size() > 1,
        "bench collectives: expected two or more ranks, found one; start it like `train`, such as with mpirun -np 2"
    );
    // An error on this rank must end the other ranks.
    bench(options, &mut ranks, local_rank).map_err(|error| {
        let cause = ranks.failure_cause(error, "bench collectives");
        ranks.abort_collectives();
        ranks.abort(cause)
    })
}

fn bench(options: &Collectives, ranks: &mut Ranks, local_rank: usize) -> Result<()> {
    let gpu = multi_rank::gpu_of(local_rank, false, options.hardware.device)?;
    let mut engine = options.hardware.open_quietly_on(gpu)?;
    let (engine, world_size) = (&mut *engine, ranks.world_size());
    let sizes = sizes(options.min_bytes, options.max_bytes, world_size);
    let largest = sizes.last().map_or(0, |bytes| bytes / DType::F32.bytes());
    let mut plan = Plan::new();
    let whole = plan.add(Group::Workspace, "whole", &[largest], DType::F32);
    let shard = plan.add(Group::Workspace, "shard", &[largest / world_size], DType::F32);
    let clock = plan.add(Group::Workspace, "clock", &[1], DType::F32);
    engine.allocate(&plan)?;
    let on_gpu = engine.device_tensor(whole)?.is_some();
    let settings = [("min-bytes", options.min_bytes), ("max-bytes", options.max_bytes)];
    let settings: Map<_, _> = settings.into_iter().map(|(name, value)| (name.to_owned(), json!(value))).collect();
    if let Some(group) = ranks.tcp_group() {
        let gpu = on_gpu.then(|| cuda_driver::device_uuid(gpu)).transpose()?;
        preflight::check_ranks(group, &RankInfo::without_data(settings, gpu)?)?;
    }
    ranks.init_communicator(engine, whole, world_size)?;
    ranks.end_startup();

    let mut table = Table::new("collectives", COLUMNS, engine, &options.json);
    table.note("ranks", world_size);
    table.note("transport", ranks.describe());
    if ranks.is_first() {
        writeln!(stdout(), "{world_size} ranks, connected by {}", ranks.describe().unwrap_or_default())?;
        table.print_heading()?;
    }
    let progress = progress::start("timing", Unit::Count, (Operation::ALL.len() * sizes.len()) as u64);
    for operation in Operation::ALL {
        for &bytes in &sizes {
            let elements = bytes / DType::F32.bytes();
            let of = Sharded { whole: whole.slice(0, elements), shard: shard.slice(0, elements / world_size) };
            let seconds = time(operation, of, clock, engine, ranks)?;
            progress.add(1);
            if let Some(seconds) = seconds {
                table.row(&cells(operation, bytes, seconds, world_size))?;
            }
        }
    }
    let first = ranks.is_first();
    ranks.close()?;
    if first { table.finish_rows() } else { Ok(()) }
}

/// Returns the powers of two times `least` up to `most`, each rounded up to a multiple of the shards of all ranks.
fn sizes(least: usize, most: usize, ranks: usize) -> Vec<usize> {
    let doubled = std::iter::successors(Some(least), |bytes| bytes.checked_mul(2));
    doubled.take_while(|bytes| *bytes <= most).map(|bytes| bytes.next_multiple_of(ranks * DType::F32.bytes())).collect()
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Operation {
    AllReduce,
    ReduceScatter,
    AllGather,
}

impl Operation {
    const ALL: [Self; 3] = [Self::AllReduce, Self::ReduceScatter, Self::AllGather];

    fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all-reduce",
            Self::ReduceScatter => "reduce-scatter",
            Self::AllGather => "all-gather",
        }
    }

    /// Returns the bytes that each connection of a ring carries, as a multiple of the size, by the formula of nccl-tests: each rank
    /// sends every part but one once, and for an all-reduce twice.
    fn bus_factor(self, ranks: usize) -> f64 {
        let once = (ranks - 1) as f64 / ranks as f64;
        if self == Self::AllReduce { 2.0 * once } else { once }
    }

    fn queue(self, of: Sharded, engine: &mut dyn Engine, ranks: &mut Ranks) -> Result<()> {
        match self {
            Self::AllReduce => ranks.all_reduce_sum(engine, Scope::World, of.whole),
            Self::ReduceScatter => ranks.reduce_scatter(engine, of, Reduction::Sum),
            Self::AllGather => ranks.all_gather(engine, of),
        }
    }
}

/// Returns the seconds of a collective on the slowest rank; nothing on the ranks other than 0.
fn time(
    operation: Operation,
    of: Sharded,
    clock: Tensor,
    engine: &mut dyn Engine,
    ranks: &mut Ranks,
) -> Result<Option<Spread>> {
    let times = repetitions(of.whole.bytes());
    let mut own = Vec::new();
    // The first one connects the ranks, and is not counted.
    for sample in 0..=SAMPLES {
        ranks.any_rank(false)?;
        let start = engine.read_async(clock)?;
        for _ in 0..times {
            operation.queue(of, engine, ranks)?;
        }
        ranks.wait_on_stream(engine)?;
        let end = engine.read_async(clock)?;
        let start = engine.wait(start)?.completed_at;
        let elapsed = engine.wait(end)?.completed_at.saturating_sub(start);
        if sample > 0 {
            own.push(elapsed.as_secs_f64() / times as f64);
        }
    }
    let all = ranks.gather(own.iter().flat_map(|seconds| f64::to_le_bytes(*seconds)).collect())?;
    if all.is_empty() {
        return Ok(None);
    }
    let seconds = |bytes: &[u8]| bytes.try_into().map_or(f64::NAN, f64::from_le_bytes);
    let all: Vec<Vec<f64>> = all.iter().map(|bytes| bytes.chunks_exact(8).map(seconds).collect()).collect();
    let slowest = (0..SAMPLES).map(|sample| all.iter().map(|rank| rank[sample]).fold(0.0, f64::max));
    Ok(Some(Spread::of(slowest.collect())))
}

fn cells(operation: Operation, bytes: usize, seconds: Spread, ranks: usize) -> [Cell; 8] {
    let rate = bytes as f64 / seconds.median / 1e9;
    let [median, least, most] = [seconds.median, seconds.least, seconds.most].map(|seconds| Cell::from(1e6 * seconds));
    [
        operation.name().into(),
        bytes.into(),
        repetitions(bytes).into(),
        median,
        least,
        most,
        rate.into(),
        (rate * operation.bus_factor(ranks)).into(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_powers_of_two_that_ranks_can_share() {
        assert_eq!((bytes("4"), bytes("3K"), bytes("1G")), (Ok(4), Ok(3072), Ok(1 << 30)));
        for text in ["", "3", "K", "1KK", "1T", "-4", "1.5M", "99999999999G"] {
            assert!(bytes(text).unwrap_err().contains("expected a number of bytes"), "{text}");
        }
        assert_eq!(sizes(1024, 4096, 2), [1024, 2048, 4096]);
        assert_eq!(sizes(8, 20, 3), [12, 24]);
    }

    #[test]
    fn bus_bandwidth_counts_what_a_ring_sends() {
        let hundredths = Operation::ALL.map(|operation| (100.0 * operation.bus_factor(4)).round() as u32);
        assert_eq!(hundredths, [150, 75, 75]);
    }
}
