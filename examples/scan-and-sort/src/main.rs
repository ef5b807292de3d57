//! Checks the scan and the sort on the first GPU, and times them and CUB alternately.
//!
//!     scan-and-sort [--cub PROGRAM] [--json FILE]
//!
//! PROGRAM is `cub.cu`, compiled.

mod cub;
mod device;

use cub::Cub;
use device::{Device, Operation};
use scan_and_sort::{SCAN_TILE, SORT_TILE, random_key};
use std::error::Error;
use std::fmt::Write;
use std::process::ExitCode;
use std::thread;

/// Sizes that are timed.
const SIZES: [usize; 3] = [1 << 20, 1 << 24, 1 << 28];
/// Sizes that are checked: some around a tile, and some of many tiles.
const CHECKED: [usize; 15] = [
    0,
    1,
    2,
    33,
    3071,
    4097,
    SORT_TILE - 1,
    SORT_TILE,
    SORT_TILE + 1,
    SCAN_TILE,
    SCAN_TILE + 1,
    2 * SCAN_TILE + 1,
    100_003,
    1_000_003,
    5_000_000,
];
/// A large size that is checked with random values.
const LARGE: usize = (1 << 26) + 12_345;
/// Rounds of a measurement. The median counts.
const ROUNDS: usize = 9;
/// Seconds of an operation in a round, at least one run.
const ROUND_SECONDS: f64 = 0.01;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

fn main() -> ExitCode {
    match run() {
        Ok(0) => ExitCode::SUCCESS,
        Ok(wrong) => {
            eprintln!("error: {wrong} results differ from those of the CPU");
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Runs everything, and returns the number of wrong results.
fn run() -> Result<usize> {
    let (mut cub, mut json) = (None, None);
    let mut arguments = std::env::args().skip(1);
    while let Some(option) = arguments.next() {
        let value = arguments.next().ok_or_else(|| format!("{option}: expected a value"))?;
        match option.as_str() {
            "--cub" => cub = Some(Cub::start(&value)?),
            "--json" => json = Some(value),
            _ => return Err(format!("argument: expected --cub or --json, found {option}").into()),
        }
    }
    let largest = SIZES[SIZES.len() - 1];
    let device = Device::open(largest)?;
    let library = cub.as_ref().map_or("without CUB".to_owned(), |cub| cub.version.clone());
    println!("{}, {}, {library}", device.name(), device.architecture());

    // An operation that never ends is the last line.
    for operation in Operation::ALL {
        println!("{}", device.describe(operation));
        device.run(operation, &mut vec![0; 100_003])?;
    }
    let mut wrong = check_small(&device)?;
    println!("{} sizes up to {}, 6 kinds of values: {wrong} wrong", CHECKED.len(), CHECKED[CHECKED.len() - 1]);
    for n in [LARGE, largest] {
        wrong += check_large(&device, n)?;
    }
    println!("{LARGE} and {largest} random values: {wrong} wrong in total\n");

    let copy = device.copy_bandwidth()?;
    println!("copy of {largest} elements: {:.2} TB/s, read and written\n", copy / 1e12);
    let mut rows = Vec::new();
    for n in SIZES {
        for operation in Operation::ALL {
            rows.push(measure(&device, cub.as_mut(), operation, n)?);
        }
    }
    print_table(&rows, copy);
    println!("\nparts of a run of {largest} elements, us: zeros for the counters, then each launch");
    for operation in Operation::ALL {
        device.time_parts(operation, largest)?;
        let parts: Vec<_> =
            device.time_parts(operation, largest)?.iter().map(|seconds| format!("{:.0}", seconds * 1e6)).collect();
        println!("{:<16} {}", operation.name(), parts.join(" "));
    }
    if let Some(path) = json {
        std::fs::write(path, to_json(&rows, copy, device.name(), &library))?;
    }
    Ok(wrong)
}

fn prefix_sums(values: &[u32]) -> Vec<u32> {
    let mut sum = 0u32;
    let add = |value: &u32| {
        sum = sum.wrapping_add(*value);
        sum
    };
    values.iter().map(add).collect()
}

/// Compares the results for small sizes with the CPU, and returns the number of wrong ones.
fn check_small(device: &Device) -> Result<usize> {
    let mut wrong = 0;
    for n in CHECKED {
        let random: Vec<u32> = (0..n as u64).map(random_key).collect();
        let mut sorted = random.clone();
        sorted.sort_unstable();
        let reversed = sorted.iter().rev().copied().collect();
        let few = random.iter().map(|key| (key % 5) << 14).collect();
        for (kind, values) in [
            ("random", random),
            ("sorted", sorted),
            ("reversed", reversed),
            ("few values", few),
            ("zeros", vec![0; n]),
            ("ones", vec![u32::MAX; n]),
        ] {
            device.upload(&values)?;
            for operation in Operation::ALL {
                let expected = match operation {
                    Operation::Scan => prefix_sums(&values),
                    Operation::Sort => {
                        let mut keys = values.clone();
                        keys.sort_unstable();
                        keys
                    }
                };
                let mut found = vec![0; n];
                device.run(operation, &mut found)?;
                if found != expected {
                    println!("{}: WRONG for {n} elements, {kind}", operation.name());
                    wrong += 1;
                }
            }
        }
    }
    Ok(wrong)
}

/// Checks the results for `n` random values, which remain the input, and returns the number of wrong ones. A sort is right if its result
/// is in order and has the same sum of hashes as the values.
fn check_large(device: &Device, n: usize) -> Result<usize> {
    let mut found = vec![0; n];
    in_parallel(&mut found, |first, keys| {
        (first as u64..).zip(keys).for_each(|(i, key)| *key = random_key(i));
        0
    });
    device.upload(&found)?;
    let (sums, hash) = (prefix_sums(&found), hash_sum(&mut found));
    let mut wrong = 0;
    for operation in Operation::ALL {
        device.run(operation, &mut found)?;
        let is_right = match operation {
            Operation::Scan => found == sums,
            Operation::Sort => found.is_sorted() && hash_sum(&mut found) == hash,
        };
        if !is_right {
            println!("{}: WRONG for {n} elements", operation.name());
            wrong += 1;
        }
    }
    Ok(wrong)
}

/// Returns the sum of the hashes of all values, which does not depend on their order.
fn hash_sum(values: &mut [u32]) -> u64 {
    let hash = |value: u32| {
        let x = (u64::from(value) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (x ^ x >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9)
    };
    in_parallel(values, |_, part| part.iter().fold(0, |sum, value| sum.wrapping_add(hash(*value))))
}

/// Calls `work` with parts of the values and their first indices, one for each core. Returns the sum of the results, modulo 2^64.
fn in_parallel(values: &mut [u32], work: impl Fn(usize, &mut [u32]) -> u64 + Sync) -> u64 {
    let part = values.len().div_ceil(thread::available_parallelism().map_or(1, usize::from)).max(1);
    thread::scope(|scope| {
        let work = &work;
        let parts = values.chunks_mut(part).enumerate();
        let threads: Vec<_> = parts.map(|(index, values)| scope.spawn(move || work(index * part, values))).collect();
        threads.into_iter().filter_map(|thread| thread.join().ok()).fold(0, u64::wrapping_add)
    })
}

/// The times of an operation on `n` elements.
struct Row {
    n: usize,
    operation: Operation,
    /// Median seconds of a run.
    seconds: f64,
    /// Those of CUB.
    cub: Option<f64>,
}

impl Row {
    /// Returns the bytes that must be read and written: the scan reads and writes each element once, and the sort four times, after
    /// reading it once for the histogram.
    fn bytes(&self) -> f64 {
        let bytes = match self.operation {
            Operation::Scan => 8.0,
            Operation::Sort => 36.0,
        };
        self.n as f64 * bytes
    }

    /// Prints the line of the table for a run of `seconds`. `copy` is in bytes per second.
    fn print(&self, name: &str, seconds: f64, copy: f64, of_cub: &str) {
        let (rate, of_copy) = (self.n as f64 / seconds / 1e9, 100.0 * self.bytes() / seconds / copy);
        println!("{:>9}  {name:<16} {:>8.1} {rate:>13.1} {of_copy:>11.1} {of_cub:>10}", self.n, seconds * 1e6);
    }
}

/// Times an operation and CUB's alternately.
fn measure(device: &Device, mut cub: Option<&mut Cub>, operation: Operation, n: usize) -> Result<Row> {
    let runs = |once: f64| (ROUND_SECONDS / once).clamp(1.0, 500.0) as u32;
    let own_runs = runs(device.time(operation, n, 3)?);
    let cub_runs = match &mut cub {
        Some(cub) => runs(cub.time(operation.name(), n, 3)?),
        None => 0,
    };
    let (mut times, mut cub_times) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        times.push(device.time(operation, n, own_runs)?);
        if let Some(cub) = &mut cub {
            cub_times.push(cub.time(operation.name(), n, cub_runs)?);
        }
    }
    times.sort_by(f64::total_cmp);
    cub_times.sort_by(f64::total_cmp);
    Ok(Row { n, operation, seconds: times[ROUNDS / 2], cub: cub_times.get(ROUNDS / 2).copied() })
}

fn print_table(rows: &[Row], copy: f64) {
    println!("        n  operation              us   Gelements/s   % of copy   % of CUB");
    for row in rows {
        let of_cub = row.cub.map_or("-".into(), |cub| format!("{:.1}", 100.0 * cub / row.seconds));
        row.print(row.operation.name(), row.seconds, copy, &of_cub);
        if let Some(cub) = row.cub {
            let name = match row.operation {
                Operation::Scan => "CUB InclusiveSum",
                Operation::Sort => "CUB SortKeys",
            };
            row.print(name, cub, copy, "-");
        }
    }
}

fn to_json(rows: &[Row], copy: f64, gpu: &str, library: &str) -> String {
    let mut json =
        format!("{{\"gpu\": {gpu:?}, \"library\": {library:?}, \"copy_bytes_per_second\": {copy:e}, \"times\": [");
    for (i, Row { n, operation, seconds, cub }) in rows.iter().enumerate() {
        let (separator, operation) = (if i == 0 { "" } else { "," }, operation.name());
        let cub = cub.map_or("null".into(), |cub| format!("{cub:e}"));
        let _ = write!(
            json,
            "{separator}\n  {{\"n\": {n}, \"operation\": {operation:?}, \"seconds\": {seconds:e}, \"cub_seconds\": {cub}}}"
        );
    }
    json + "\n]}\n"
}
