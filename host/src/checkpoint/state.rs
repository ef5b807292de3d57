//! State files (`state_SSSSSSSS_RRRRR.bin`): optimizer, data loader and random numbers of one rank, as llm.c has them.
//!
//! A header of 256 little-endian i32, zeros but for: [0] magic 20240527, [1] version 1, [2] ranks, [3] rank, [4] whether there
//! are master weights, [5] whether the loader shuffles, [10] step, and as u64 [20] the generator of rounding, [22] the same
//! before the last update, [30] the loader's shard, [32] its sample. Then m, v and perhaps master weights, f32, as
//! [`tensors`](super::tensors) lays them out. Then, if it shuffles: u64 n, i32 (n) shards, u64 n, i32 (n) samples, and the
//! generator: u64 seed (llm.c leaves it uninitialised), i32 left, u32 next, u32 (624) state, u32 (2) constants.

use super::RunState;
use super::tensors::{self, Shape};
use crate::data::loader::{Position, Shuffle};
use crate::engine::Engine;
use crate::model::{Gpt2, Params};
use crate::rng::{Mt19937, XorShift};
use crate::tensor::{DType, Tensor};
use anyhow::{Context, Result, ensure};
use std::fs::File;
use std::io::{BufReader, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
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

/// One process of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rank {
    pub rank: usize,
    pub ranks: usize,
}

impl Rank {
    /// A run of one process.
    pub const ONLY: Self = Self { rank: 0, ranks: 1 };
}

/// Optimizer state as the bytes of f32 blocks laid out like the parameters.
#[derive(Clone, Copy)]
pub struct Moments<'a> {
    pub m: &'a [u8],
    pub v: &'a [u8],
    pub master: Option<&'a [u8]>,
}

pub fn write(out: &mut impl Write, rank: Rank, state: &RunState, layout: &Params, moments: Moments) -> Result<()> {
    let shuffle = state.data.shuffle.as_deref();
    let mut header = [0; HEADER_BYTES];
    let mut set = |word: usize, bytes: &[u8]| header[4 * word..4 * word + bytes.len()].copy_from_slice(bytes);
    let words = [
        (0, MAGIC),
        (1, VERSION),
        (word::RANKS, rank.ranks as i32),
        (word::RANK, rank.rank as i32),
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
        tensors::write(out, layout, block, size_of::<f32>())?;
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

/// Bytes of a state file.
pub fn bytes(parameters: usize, masters: bool, data: &Position) -> u64 {
    let blocks = if masters { 3 } else { 2 };
    let loader = data.shuffle.as_ref().map_or(0, |s| 16 + 4 * (s.shards.len() + s.samples.len()) + RNG_BYTES);
    (HEADER_BYTES + blocks * parameters * size_of::<f32>() + loader) as u64
}

/// A state file whose header, size and loader part have been found right.
#[derive(Debug)]
pub struct StateFile {
    path: PathBuf,
    file: BufReader<File>,
    shape: Shape,
    masters: bool,
    pub step: usize,
    pub rounding: XorShift,
    pub rounding_before_update: XorShift,
    pub data: Position,
}

impl StateFile {
    /// `shape` is that of the model file of the same step.
    pub fn open(path: &Path, step: usize, rank: Rank, shape: Shape) -> Result<Self> {
        let file = File::open(path).with_context(|| format!("cannot open state file {}", path.display()))?;
        Self::parse(path.to_owned(), BufReader::new(file), step, rank, shape)
            .with_context(|| format!("{} cannot be used", path.display()))
    }

    /// Reads all but the tensors, and stops at their beginning.
    fn parse(path: PathBuf, mut file: BufReader<File>, step: usize, rank: Rank, shape: Shape) -> Result<Self> {
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
        ensure!(
            (int(word::RANKS), int(word::RANK)) == (rank.ranks as i32, rank.rank as i32),
            "it is of rank {} of {}, expected rank {} of {}: a run goes on with as many GPUs as it began with",
            int(word::RANK),
            int(word::RANKS),
            rank.rank,
            rank.ranks
        );
        ensure!(int(word::STEP) as i64 == step as i64, "it is of step {}, expected {step}", int(word::STEP));
        let (masters, shuffles) = (flag("master weights", word::MASTERS)?, flag("shuffle", word::SHUFFLE)?);
        let blocks = if masters { 3 } else { 2 };
        let loader_at = HEADER_BYTES as u128 + blocks * shape.elements() * size_of::<f32>() as u128;
        let fixed = if shuffles { 16 + RNG_BYTES } else { 0 };
        let left = u128::from(size).checked_sub(loader_at + fixed as u128);
        let left = left.with_context(|| {
            format!("it is truncated: expected at least {} bytes, found {size}", loader_at + fixed as u128)
        })?;
        let mut orders = 0;
        let shuffle = if shuffles {
            file.seek(SeekFrom::Start(loader_at as u64))?;
            let shards = order(&mut file, "shards", left as usize / 4)?;
            let samples = order(&mut file, "samples", left as usize / 4 - shards.len())?;
            orders = 4 * (shards.len() + samples.len()) as u128;
            Some(Arc::new(Shuffle { rng: generator(&mut file)?, shards, samples }))
        } else {
            None
        };
        ensure!(left == orders, "it is too long: {} bytes follow its end", left - orders);
        file.seek(SeekFrom::Start(HEADER_BYTES as u64))?;
        let place = |name, word| usize::try_from(wide(word)).with_context(|| format!("its {name} is {}", wide(word)));
        let data = Position { shard: place("shard", word::SHARD)?, sample: place("sample", word::SAMPLE)?, shuffle };
        let rounding = XorShift { state: wide(word::ROUNDING) };
        let rounding_before_update = XorShift { state: wide(word::ROUNDING_BEFORE_UPDATE) };
        Ok(Self { path, file, shape, masters, step, rounding, rounding_before_update, data })
    }

    /// Whether it holds master weights.
    pub fn masters(&self) -> bool {
        self.masters
    }

    /// Reads m and v into a model in training, and the master weights, if it holds any, into `masters`.
    pub fn load(&mut self, model: &Gpt2, masters: &[Tensor], engine: &mut dyn Engine) -> Result<()> {
        let training = model.training.context("this model was planned for inference only")?;
        let masters = if self.masters { Some(masters) } else { None };
        for blocks in [Some(&[training.m][..]), Some(&[training.v]), masters].into_iter().flatten() {
            tensors::read(&mut self.file, self.shape, DType::F32, &model.layout, blocks, engine)
                .with_context(|| format!("cannot load {}", self.path.display()))?;
        }
        Ok(())
    }
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
