//! State files (`state_SSSSSSSS_RRRRR.bin`): optimizer, data loader and random number generator of one rank, in the format of
//! llm.c.
//!
//! The parts of a file are, all little endian:
//! 1. A header of 256 i32. Index 0 is the magic 20240527, 1 the version 1, 2 the world size, 3 the rank, 4 a flag for master
//!    weights, 5 a flag for shuffling, 10 the step. As u64: index 20 is the generator of stochastic rounding, 22 its state
//!    before the last update, 30 the shard of the loader, 32 its sample. All other words are 0.
//! 2. The f32 blocks m, v and, if flagged, the master weights, in the layout of the `tensors` module. They are f32 also if the
//!    run stores bf16 moments or remainders, so a run with other types can resume from the file.
//! 3. If the loader shuffles: u64 n, n i32 (order of the shards), u64 n, n i32 (order of the samples), then the generator: u64
//!    seed (uninitialized in llm.c), i32 left, u32 next, 624 u32 state, 2 u32 constants.
//!
//! If the optimizer state is sharded, each rank has a file with its share of every tensor of every layer. Of n elements rank r
//! of R has ceil(n / R) elements from r * ceil(n / R), or as many as there are. The file size shows whether it is sharded.

use super::RunState;
use super::directory::state_name;
use super::tensors::{self, FileShape};
use anyhow::{Context, Result, ensure};
use data::loader::{Position, Shuffle};
use engine::Engine;
use engine::tensor::DType;
use gpu::remainder;
use half::bf16;
use model::{Decoder, Params, Shard, WeightStore};
use rng::{Mt19937, XorShift};
use std::io::{BufReader, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use system::fs::File;

const MAGIC: i32 = 20240527;
const VERSION: i32 = 1;
const HEADER_BYTES: usize = 1024;
const RNG_BYTES: usize = 2520;
/// The twist constants of MT19937, selected by the lowest bit.
const RNG_CONSTANTS: [u32; 2] = [0, 0x9908_b0df];

/// Indices of the header words.
mod word {
    pub const WORLD_SIZE: usize = 2;
    pub const RANK: usize = 3;
    pub const MASTERS: usize = 4;
    pub const SHUFFLE: usize = 5;
    pub const STEP: usize = 10;
    pub const ROUNDING: usize = 20;
    pub const ROUNDING_BEFORE_UPDATE: usize = 22;
    pub const SHARD: usize = 30;
    pub const SAMPLE: usize = 32;
}

/// The optimizer state in the layout of the parameters. If sharded, in file order instead, with this rank's share of each
/// tensor.
#[derive(Clone, Copy)]
pub struct OptimizerState<'a> {
    /// First moments.
    pub m: Values<'a>,
    /// Second moments.
    pub v: Values<'a>,
    /// Master weights.
    pub master: Option<Values<'a>>,
}

/// Values of the optimizer state, as bytes. Files contain them as f32, which is exact.
#[derive(Clone, Copy)]
pub enum Values<'a> {
    /// f32.
    F32(&'a [u8]),
    /// bf16.
    Bf16(&'a [u8]),
    /// f32 in two parts: bf16 parameters and u16 remainders ([`gpu::remainder`]).
    Remainder {
        /// The parameters.
        params: &'a [u8],
        /// The remainders.
        remainders: &'a [u8],
    },
}

/// Number of elements that are converted to f32 at a time.
const CHUNK: usize = 1 << 16;

impl Values<'_> {
    /// Returns the number of elements.
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::F32(bytes) => bytes.len() / 4,
            Self::Bf16(bytes) | Self::Remainder { remainders: bytes, .. } => bytes.len() / 2,
        }
    }

    /// Writes some elements as f32.
    fn write(&self, out: &mut impl Write, elements: Range<usize>) -> Result<()> {
        let of = |bytes: &[u8], chunk: &Range<usize>| bytes[2 * chunk.start..2 * chunk.end].as_chunks().0.to_vec();
        let mut written = Vec::new();
        for start in elements.clone().step_by(CHUNK) {
            let chunk = start..elements.end.min(start + CHUNK);
            match self {
                Self::F32(bytes) => {
                    out.write_all(&bytes[4 * chunk.start..4 * chunk.end])?;
                    continue;
                }
                Self::Bf16(bytes) => {
                    written.extend(of(bytes, &chunk).into_iter().map(|b| bf16::from_le_bytes(b).to_f32()));
                }
                Self::Remainder { params, remainders } => {
                    let (params, remainders) = (of(params, &chunk), of(remainders, &chunk));
                    let join =
                        |(param, low)| remainder::join(bf16::from_le_bytes(param).to_f32(), u16::from_le_bytes(low));
                    written.extend(params.into_iter().zip(remainders).map(join));
                }
            }
            out.write_all(bytemuck::cast_slice(&written))?;
            written.clear();
        }
        Ok(())
    }
}

/// Writes the state file of one rank. `layout` is that of the optimizer state, if it is not sharded.
pub fn write(
    out: &mut impl Write,
    share: Shard,
    state: &RunState,
    layout: &Params,
    optimizer: OptimizerState,
) -> Result<()> {
    let shuffle = state.data.shuffle.as_deref();
    let mut header = [0; HEADER_BYTES];
    let mut set = |word: usize, bytes: &[u8]| header[4 * word..4 * word + bytes.len()].copy_from_slice(bytes);
    let words = [
        (0, MAGIC),
        (1, VERSION),
        (word::WORLD_SIZE, share.ranks as i32),
        (word::RANK, share.rank as i32),
        (word::MASTERS, optimizer.master.is_some().into()),
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
    for block in [Some(optimizer.m), Some(optimizer.v), optimizer.master].into_iter().flatten() {
        if share == Shard::UNSHARDED {
            let ranges = layout.file_order().map(|(param, layer)| layout.range(param, layer));
            ranges.into_iter().try_for_each(|range| block.write(out, range))?;
        } else {
            block.write(out, 0..block.len())?;
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

/// Returns the size in bytes of a state file with a number of parameters.
pub fn file_bytes(parameters: usize, masters: bool, data: &Position) -> u64 {
    let blocks = if masters { 3 } else { 2 };
    let loader = data.shuffle.as_ref().map_or(0, |s| 16 + 4 * (s.shards.len() + s.samples.len()) + RNG_BYTES);
    (HEADER_BYTES + blocks * parameters * size_of::<f32>() + loader) as u64
}

/// The open state files of a step. Their headers, sizes and loader parts have been checked.
#[derive(Debug)]
pub struct StateFiles {
    /// Path of the first file, for messages.
    path: String,
    /// The files of all ranks if the state is sharded, otherwise that of rank 0.
    files: Vec<BufReader<File>>,
    shape: FileShape,
    has_master_weights: bool,
    /// World size in the header. Without sharding it may be 1 although there were more ranks, as in llm.c.
    pub world_size: usize,
    /// Number of completed optimizer steps.
    pub step: usize,
    /// Random number generator that seeds stochastic rounding.
    pub rounding: XorShift,
    /// The state of `rounding` before the last optimizer step.
    pub rounding_before_update: XorShift,
    /// Position of rank 0 in the training data.
    pub data: Position,
}

impl StateFiles {
    /// Opens and checks the state files of a step. `shape` is that of its model file.
    pub fn open(directory: &Path, step: usize, shape: FileShape) -> Result<Self> {
        let open = |rank| StateFile::open(&directory.join(state_name(step, rank)), step, rank, &shape);
        let StateFile { file, has_master_weights, share, sharded, rounding, rounding_before_update, data } = open(0)?;
        let mut files = vec![file];
        let world_size = share.ranks;
        // Without sharding, no loop over the world size: it is any number in a damaged header.
        for rank in 1..if sharded { world_size } else { 1 } {
            let next = open(rank)?;
            ensure!(
                (next.share.ranks, next.has_master_weights, next.sharded) == (world_size, has_master_weights, true),
                "{}: expected the world size and master weights of rank 0, found others; it belongs to another run",
                state_name(step, rank)
            );
            files.push(next.file);
        }
        let path = directory.join(state_name(step, 0)).display().to_string();
        Ok(Self { path, files, shape, has_master_weights, world_size, step, rounding, rounding_before_update, data })
    }

    /// Returns whether the files contain master weights.
    pub fn has_master_weights(&self) -> bool {
        self.has_master_weights
    }

    /// Returns the number of files.
    pub fn count(&self) -> usize {
        self.files.len()
    }

    /// Reads the shares of m, v and the master weights that the model keeps, in its types. Values are rounded to nearest if they
    /// come from a run with more precise ones.
    pub fn load(&mut self, model: &Decoder, engine: &mut dyn Engine) -> Result<()> {
        let training = model.training.context("the model was planned for inference only")?;
        let [m, v] = [training.m, training.v].map(|moments| vec![WeightStore::whole(model.state_store(moments))]);
        let blocks = [("m", m), ("v", v), ("master weights", model.master_stores())];
        for (name, stores) in blocks.into_iter().take(if self.has_master_weights { 3 } else { 2 }) {
            tensors::read(&mut self.files, self.shape, DType::F32, &stores, engine)
                .with_context(|| format!("cannot load {name} of {}", self.path))?;
        }
        Ok(())
    }
}

/// An open state file, positioned at the beginning of its tensors.
struct StateFile {
    file: BufReader<File>,
    has_master_weights: bool,
    share: Shard,
    /// Whether the file contains only this share of every tensor.
    sharded: bool,
    rounding: XorShift,
    rounding_before_update: XorShift,
    data: Position,
}

impl StateFile {
    fn open(path: &Path, step: usize, rank: usize, shape: &FileShape) -> Result<Self> {
        let file =
            bounded_file::open_of_run(path).with_context(|| format!("cannot open state file {}", path.display()))?;
        Self::parse(BufReader::new(file), step, rank, shape)
            .with_context(|| format!("invalid state file {}", path.display()))
    }

    /// Reads everything except the tensors, then seeks to their beginning.
    fn parse(mut file: BufReader<File>, step: usize, rank: usize, shape: &FileShape) -> Result<Self> {
        let size = file.get_ref().size()?;
        ensure!(size >= HEADER_BYTES as u64, "expected a header of {HEADER_BYTES} bytes, found {size} bytes");
        let mut header = [0; HEADER_BYTES];
        file.read_exact(&mut header)?;
        let int = |word: usize| i32::from_le_bytes(header[4 * word..4 * word + 4].try_into().expect("four bytes"));
        let wide = |word: usize| u64::from_le_bytes(header[4 * word..4 * word + 8].try_into().expect("eight bytes"));
        let flag = |name, word| match int(word) {
            0 => Ok(false),
            1 => Ok(true),
            other => anyhow::bail!("{name} flag: expected 0 or 1, found {other}"),
        };
        ensure!(int(0) == MAGIC, "expected magic {MAGIC}, found {}", int(0));
        ensure!(int(1) == VERSION, "expected state file version {VERSION}, found {}", int(1));
        let ranks = usize::try_from(int(word::WORLD_SIZE)).ok().filter(|&ranks| ranks > rank);
        let ranks = ranks
            .with_context(|| format!("world size: expected at least {}, found {}", rank + 1, int(word::WORLD_SIZE)))?;
        ensure!(int(word::RANK) as i64 == rank as i64, "rank: expected {rank}, found {}", int(word::RANK));
        ensure!(int(word::STEP) as i64 == step as i64, "step: expected {step}, found {}", int(word::STEP));
        let (has_master_weights, shuffles) = (flag("master weights", word::MASTERS)?, flag("shuffle", word::SHUFFLE)?);
        let blocks = if has_master_weights { 3 } else { 2 };
        let mut read_loader = |share| {
            let at = HEADER_BYTES as u128 + blocks * shape.shard_elements(share) * size_of::<f32>() as u128;
            read_shuffle(&mut file, at, size, shuffles)
        };
        let share = Shard { rank, ranks };
        let (sharded, shuffle) = match read_loader(Shard::UNSHARDED) {
            Err(_) if ranks > 1 => (true, read_loader(share)?),
            whole => (false, whole?),
        };
        file.seek(SeekFrom::Start(HEADER_BYTES as u64))?;
        let index =
            |name, word| usize::try_from(wide(word)).with_context(|| format!("invalid {name} index {}", wide(word)));
        let data = Position {
            shard: index("shard", word::SHARD)?,
            sample: index("sample", word::SAMPLE)?,
            shuffle,
            mixture: None,
        };
        let rounding = XorShift { state: wide(word::ROUNDING) };
        let rounding_before_update = XorShift { state: wide(word::ROUNDING_BEFORE_UPDATE) };
        Ok(Self { file, has_master_weights, share, sharded, rounding, rounding_before_update, data })
    }
}

/// Reads the loader part of a file of `size` bytes, from `at` to the end. It is empty unless the loader `shuffles`.
fn read_shuffle(file: &mut BufReader<File>, at: u128, size: u64, shuffles: bool) -> Result<Option<Arc<Shuffle>>> {
    let fixed = if shuffles { 16 + RNG_BYTES } else { 0 };
    let left = u128::from(size).checked_sub(at + fixed as u128);
    let left =
        left.with_context(|| format!("truncated: expected at least {} bytes, found {size}", at + fixed as u128))?;
    let mut orders = 0;
    let shuffle = if shuffles {
        file.seek(SeekFrom::Start(at as u64))?;
        let shards = read_order(file, "shards", left as usize / 4)?;
        let samples = read_order(file, "samples", left as usize / 4 - shards.len())?;
        orders = 4 * (shards.len() + samples.len()) as u128;
        Some(Arc::new(Shuffle { rng: read_generator(file)?, shards, samples }))
    } else {
        None
    };
    ensure!(left == orders, "too long: expected {} bytes, found {size}", u128::from(size) - (left - orders));
    Ok(shuffle)
}

/// Reads a permutation that is preceded by its length, which must be at most `max_len`.
fn read_order(file: &mut impl Read, name: &str, max_len: usize) -> Result<Vec<u32>> {
    let mut len = [0; 8];
    file.read_exact(&mut len)?;
    let len = u64::from_le_bytes(len);
    let n = usize::try_from(len).ok().filter(|&n| n <= max_len);
    let n = n.with_context(|| format!("truncated: expected an order of {len} {name}, found at most {max_len}"))?;
    let mut words = vec![0u32; n];
    file.read_exact(bytemuck::cast_slice_mut(&mut words))?;
    Ok(words)
}

fn read_generator(file: &mut impl Read) -> Result<Mt19937> {
    let mut seed = [0; 8];
    file.read_exact(&mut seed)?;
    let mut words = [0u32; RNG_BYTES / 4 - 2];
    file.read_exact(bytemuck::cast_slice_mut(&mut words))?;
    let [left, next, ref state @ .., _, _] = words;
    let fresh = (left, next) == (1, 0);
    ensure!(
        fresh || (left >= 1 && next >= 1 && left.checked_add(next) == Some(625)),
        "random number generator: expected left + next = 625, found left {left} and next {next}"
    );
    Ok(Mt19937 { left, next, state: *state })
}
