//! State files (`state_SSSSSSSS_RRRRR.bin`): optimizer, data loader and random numbers of one rank, as llm.c has them.
//!
//! A header of 256 little-endian i32, zeros but for: [0] magic 20240527, [1] version 1, [2] ranks, [3] rank, [4] whether there
//! are master weights, [5] whether the loader shuffles, [10] step, and as u64 [20] the generator of rounding, [22] the same
//! before the last update, [30] the loader's shard, [32] its sample. Then m, v and perhaps master weights, f32, as
//! [`tensors`](super::tensors) lays them out. Then, if it shuffles: u64 n, i32 (n) shards, u64 n, i32 (n) samples, and the
//! generator: u64 seed (llm.c leaves it uninitialised), i32 left, u32 next, u32 (624) state, u32 (2) constants.
//!
//! Where ranks divide the optimizer's state there is a file of each, with its share of every tensor of every layer: of n elements
//! those from rank * ceil(n / ranks) on, as many, or as there are left. Whether it is so follows from a file's size.

use super::RunState;
use super::directory::state_name;
use super::tensors::{self, Shape};
use anyhow::{Context, Result, ensure};
use data::loader::{Position, Shuffle};
use engine::Engine;
use engine::tensor::DType;
use model::{Gpt2, Params, Shard, Store};
use rng::{Mt19937, XorShift};
use std::fs::File;
use std::io::{BufReader, Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::sync::Arc;

const MAGIC: i32 = 20240527;
const VERSION: i32 = 1;
const HEADER_BYTES: usize = 1024;
const RNG_BYTES: usize = 2520;
/// What the generator's step mixes in, by the lowest bit.
const RNG_CONSTANTS: [u32; 2] = [0, 0x9908_b0df];

/// Where the header has what.
mod word {
    pub const RANKS: usize = 2;
    pub const RANK: usize = 3;
    pub const MASTERS: usize = 4;
    pub const SHUFFLE: usize = 5;
    pub const STEP: usize = 10;
    pub const ROUNDING: usize = 20;
    pub const ROUNDING_BEFORE_UPDATE: usize = 22;
    pub const SHARD: usize = 30;
    pub const SAMPLE: usize = 32;
}

/// Optimizer state as the bytes of f32 blocks: laid out like the parameters, or this rank's share of each tensor, in the order
/// of the file.
#[derive(Clone, Copy)]
pub struct Moments<'a> {
    pub m: &'a [u8],
    pub v: &'a [u8],
    pub master: Option<&'a [u8]>,
}

pub fn write(out: &mut impl Write, share: Shard, state: &RunState, layout: &Params, moments: Moments) -> Result<()> {
    let shuffle = state.data.shuffle.as_deref();
    let mut header = [0; HEADER_BYTES];
    let mut set = |word: usize, bytes: &[u8]| header[4 * word..4 * word + bytes.len()].copy_from_slice(bytes);
    let words = [
        (0, MAGIC),
        (1, VERSION),
        (word::RANKS, share.ranks as i32),
        (word::RANK, share.rank as i32),
        (word::MASTERS, moments.master.is_some().into()),
        (word::SHUFFLE, shuffle.is_some().into()),
        (word::STEP, state.step as i32),
    ];
    for (at, value) in words {
        set(at, &value.to_le_bytes());
    }
    let wide = [
        (word::ROUNDING, state.rounding.state),
        (word::ROUNDING_BEFORE_UPDATE, state.rounding_before_update.state),
        (word::SHARD, state.data.shard as u64),
        (word::SAMPLE, state.data.sample as u64),
    ];
    for (at, value) in wide {
        set(at, &value.to_le_bytes());
    }
    out.write_all(&header)?;
    for block in [Some(moments.m), Some(moments.v), moments.master].into_iter().flatten() {
        if share == Shard::UNSHARDED {
            tensors::write(out, layout, block, size_of::<f32>())?;
        } else {
            out.write_all(block)?;
        }
    }
    let Some(Shuffle { rng, shards, samples }) = shuffle else { return Ok(()) };
    for order in [shards, samples] {
        out.write_all(&(order.len() as u64).to_le_bytes())?;
        out.write_all(bytemuck::cast_slice(order))?;
    }
    out.write_all(&0u64.to_le_bytes())?;
    for words in [&[rng.left, rng.next][..], &rng.state, &RNG_CONSTANTS] {
        out.write_all(bytemuck::cast_slice(words))?;
    }
    Ok(())
}

/// Bytes of a state file of so many parameters.
pub fn bytes(parameters: usize, masters: bool, data: &Position) -> u64 {
    let blocks = if masters { 3 } else { 2 };
    let loader = data.shuffle.as_ref().map_or(0, |s| 16 + 4 * (s.shards.len() + s.samples.len()) + RNG_BYTES);
    (HEADER_BYTES + blocks * parameters * size_of::<f32>() + loader) as u64
}

/// The state files of a step, whose headers, sizes and loader parts have been found right.
#[derive(Debug)]
pub struct StateFiles {
    paths: String,
    /// One of each rank, if they divide the tensors; else rank 0's, which has all.
    files: Vec<BufReader<File>>,
    shape: Shape,
    masters: bool,
    /// Of the run that has written them, as llm.c has it: one that divides nothing may say that it was alone.
    pub ranks: usize,
    pub step: usize,
    pub rounding: XorShift,
    pub rounding_before_update: XorShift,
    /// Rank 0's.
    pub data: Position,
}

impl StateFiles {
    /// `shape` is that of the model file of the same step.
    pub fn open(directory: &Path, step: usize, shape: Shape) -> Result<Self> {
        let open = |rank| StateFile::open(&directory.join(state_name(step, rank)), step, rank, shape);
        let StateFile { file, masters, share, divided, rounding, rounding_before_update, data } = open(0)?;
        let mut files = vec![file];
        let ranks = share.ranks;
        for rank in (1..ranks).filter(|_| divided) {
            let next = open(rank)?;
            ensure!(
                (next.share.ranks, next.masters, next.divided) == (ranks, masters, true),
                "{} is of another run than that of rank 0",
                state_name(step, rank)
            );
            files.push(next.file);
        }
        let paths = directory.join(state_name(step, 0)).display().to_string();
        Ok(Self { paths, files, shape, masters, ranks, step, rounding, rounding_before_update, data })
    }

    /// Whether they hold master weights.
    pub fn masters(&self) -> bool {
        self.masters
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.files.len()
    }

    /// Reads what a model in training keeps of m and v, and of the master weights, if there are some, into `masters`.
    pub fn load(&mut self, model: &Gpt2, masters: Option<Store>, engine: &mut dyn Engine) -> Result<()> {
        let training = model.training.context("this model was planned for inference only")?;
        let (m, v) = (model.state_store(training.m), model.state_store(training.v));
        let blocks = [Some(vec![m]), Some(vec![v]), self.masters.then(|| masters.into_iter().collect())];
        for stores in blocks.into_iter().flatten() {
            tensors::read(&mut self.files, self.shape, DType::F32, &stores, engine)
                .with_context(|| format!("cannot load {}", self.paths))?;
        }
        Ok(())
    }
}

/// One of them, at the beginning of its tensors.
struct StateFile {
    file: BufReader<File>,
    masters: bool,
    share: Shard,
    /// Whether it has that share of every tensor only.
    divided: bool,
    rounding: XorShift,
    rounding_before_update: XorShift,
    data: Position,
}

impl StateFile {
    fn open(path: &Path, step: usize, rank: usize, shape: Shape) -> Result<Self> {
        let file = File::open(path).with_context(|| format!("cannot open state file {}", path.display()))?;
        Self::parse(BufReader::new(file), step, rank, shape)
            .with_context(|| format!("{} cannot be used", path.display()))
    }

    /// Reads all but the tensors, and stops at their beginning.
    fn parse(mut file: BufReader<File>, step: usize, rank: usize, shape: Shape) -> Result<Self> {
        let size = file.get_ref().metadata()?.len();
        ensure!(
            size >= HEADER_BYTES as u64,
            "it is no state file: expected a header of {HEADER_BYTES} bytes, found {size} bytes"
        );
        let mut header = [0; HEADER_BYTES];
        file.read_exact(&mut header)?;
        let int = |word: usize| i32::from_le_bytes(header[4 * word..4 * word + 4].try_into().expect("four bytes"));
        let wide = |word: usize| u64::from_le_bytes(header[4 * word..4 * word + 8].try_into().expect("eight bytes"));
        let flag = |name, word| match int(word) {
            0 => Ok(false),
            1 => Ok(true),
            other => anyhow::bail!("its header's {name} flag is {other}, expected 0 or 1"),
        };
        ensure!(int(0) == MAGIC, "it is no state file: expected magic {MAGIC}, found {}", int(0));
        ensure!(int(1) == VERSION, "expected state file version {VERSION}, found {}", int(1));
        let ranks = usize::try_from(int(word::RANKS)).ok().filter(|&ranks| ranks > rank);
        let ranks =
            ranks.with_context(|| format!("it is of {} ranks, expected {} at least", int(word::RANKS), rank + 1))?;
        ensure!(int(word::RANK) as i64 == rank as i64, "it is of rank {}, expected {rank}", int(word::RANK));
        ensure!(int(word::STEP) as i64 == step as i64, "it is of step {}, expected {step}", int(word::STEP));
        let (masters, shuffles) = (flag("master weights", word::MASTERS)?, flag("shuffle", word::SHUFFLE)?);
        let blocks = if masters { 3 } else { 2 };
        let mut loader = |share| {
            let at = HEADER_BYTES as u128 + blocks * shape.elements_of(share) * size_of::<f32>() as u128;
            shuffle(&mut file, at, size, shuffles)
        };
        let share = Shard { rank, ranks };
        let (divided, shuffle) = match loader(Shard::UNSHARDED) {
            Err(_) if ranks > 1 => (true, loader(share)?),
            whole => (false, whole?),
        };
        file.seek(SeekFrom::Start(HEADER_BYTES as u64))?;
        let place = |name, word| usize::try_from(wide(word)).with_context(|| format!("its {name} is {}", wide(word)));
        let data = Position { shard: place("shard", word::SHARD)?, sample: place("sample", word::SAMPLE)?, shuffle };
        let rounding = XorShift { state: wide(word::ROUNDING) };
        let rounding_before_update = XorShift { state: wide(word::ROUNDING_BEFORE_UPDATE) };
        Ok(Self { file, masters, share, divided, rounding, rounding_before_update, data })
    }
}

/// The loader's part of a file of `size` bytes, from `at` to the end, if it `shuffles`.
fn shuffle(file: &mut BufReader<File>, at: u128, size: u64, shuffles: bool) -> Result<Option<Arc<Shuffle>>> {
    let fixed = if shuffles { 16 + RNG_BYTES } else { 0 };
    let left = u128::from(size).checked_sub(at + fixed as u128);
    let left =
        left.with_context(|| format!("it is truncated: expected at least {} bytes, found {size}", at + fixed as u128))?;
    let mut orders = 0;
    let shuffle = if shuffles {
        file.seek(SeekFrom::Start(at as u64))?;
        let shards = order(file, "shards", left as usize / 4)?;
        let samples = order(file, "samples", left as usize / 4 - shards.len())?;
        orders = 4 * (shards.len() + samples.len()) as u128;
        Some(Arc::new(Shuffle { rng: generator(file)?, shards, samples }))
    } else {
        None
    };
    ensure!(left == orders, "it is too long: {} bytes follow its end", left - orders);
    Ok(shuffle)
}

/// A permutation with its length before it, of at most `most` numbers.
fn order(file: &mut impl Read, name: &str, most: usize) -> Result<Vec<u32>> {
    let mut len = [0; 8];
    file.read_exact(&mut len)?;
    let len = u64::from_le_bytes(len);
    let n = usize::try_from(len).ok().filter(|&n| n <= most);
    let n = n.with_context(|| format!("it is truncated: it orders {len} {name}, and has room for {most}"))?;
    let mut words = vec![0u32; n];
    file.read_exact(bytemuck::cast_slice_mut(&mut words))?;
    Ok(words)
}

fn generator(file: &mut impl Read) -> Result<Mt19937> {
    let mut seed = [0; 8];
    file.read_exact(&mut seed)?;
    let mut words = [0u32; RNG_BYTES / 4 - 2];
    file.read_exact(bytemuck::cast_slice_mut(&mut words))?;
    let [left, next, ref state @ .., _, _] = words;
    let fresh = (left, next) == (1, 0);
    ensure!(
        fresh || (left >= 1 && next >= 1 && left.checked_add(next) == Some(625)),
        "its random number generator has {left} draws left at {next}, which is no state of one"
    );
    Ok(Mt19937 { left, next, state: *state })
}
