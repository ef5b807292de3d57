//! Checkpoints of remainders and bf16 moments on the emulated GPU, for several world sizes and ZeRO stages.

use crate::threads::TIMEOUT;
use checkpoint::RunState;
use checkpoint::directory::{DirectoryLock, Retention};
use checkpoint::resume::Checkpoint;
use checkpoint::sidecar::Identity;
use checkpoint::writer::CheckpointWriter;
use data::loader::Position;
use distributed::Ranks;
use distributed::tcp_group::TcpGroup;
use engine::Engine;
use engine::cuda::{EmulatedGpu, Precision, emulated};
use engine::tensor::Tensor;
use model::{Decoder, Descriptor, MasterWeights, Moments, Param, PlanOptions, Shard, Store, WeightStore, Zero};
use std::path::Path;
use std::thread;

const STEP: usize = 7;

/// A run: its world size, its ZeRO stage, the number of ranks that shard together (0: all), and the storage of its optimizer state.
#[derive(Clone, Copy, Debug)]
struct Layout {
    ranks: usize,
    stage: u8,
    shard_size: usize,
    master_weights: MasterWeights,
    moments: Moments,
}

const EXACT: Layout =
    Layout { ranks: 1, stage: 0, shard_size: 0, master_weights: MasterWeights::F32, moments: Moments::F32 };
const EIGHT_BIT: Layout = Layout { moments: Moments::EightBit, ..COMPACT };
const COMPACT: Layout = Layout { master_weights: MasterWeights::Remainder, moments: Moments::Bf16, ..EXACT };

/// The tensors that a rank keeps: the name, the first element, and the bytes.
type Kept = Vec<(String, usize, Vec<u8>)>;

const VOCAB: usize = 60;
const CHANNELS: usize = 64;

/// Returns a master weight or, for `k` of 1 and 2, a moment that bf16 represents. Files do not contain the rows that pad the
/// vocabulary, which are zero.
fn value(param: Param, layer: usize, k: u32, i: usize) -> f32 {
    if param == Param::Wte && i >= VOCAB * CHANNELS {
        return 0.0;
    }
    let noise = gpu::noise::squirrel5(i as u32, 100 * param as u32 + 10 * layer as u32 + k) as f32 / u32::MAX as f32;
    if k == 0 { noise - 0.5 } else { half::bf16::from_f32(noise).to_f32() }
}

fn fill(model: &Decoder, engine: &mut dyn Engine) {
    let training = model.training.unwrap();
    let moments = |tensor| vec![WeightStore::whole(model.state_store(tensor))];
    for (k, stores) in [model.weight_stores(), moments(training.m), moments(training.v)].into_iter().enumerate() {
        for (param, layer) in model.layout.file_order() {
            for store in &stores {
                let Some((elements, to)) = store.held(param, layer) else { continue };
                let values: Vec<f32> = elements.map(|i| value(param, layer, k as u32, i)).collect();
                store.write(engine, to, &values).unwrap();
            }
        }
    }
}

fn kept(model: &Decoder, engine: &mut dyn Engine) -> Kept {
    let training = model.training.unwrap();
    let stores: Vec<Store> = training.state().into_iter().map(|(_, tensor)| model.state_store(tensor)).collect();
    let mut all = Vec::new();
    for (k, store) in [model.param_store()].into_iter().chain(stores).enumerate() {
        for (param, layer) in model.layout.file_order() {
            let Some((elements, tensor)) = store.held(param, layer) else { continue };
            let mut bytes = vec![0; Tensor::bytes(tensor)];
            engine.read_bytes(tensor, &mut bytes).unwrap();
            all.push((format!("tensor {k}, {} of layer {layer}", param.name()), elements.start, bytes));
        }
    }
    all
}

/// Starts each rank with the values of `fill`, or with the checkpoint `from`, writes a checkpoint to `to` if given, and returns
/// the tensors of each rank.
fn run(layout: Layout, from: Option<&Path>, to: Option<&Path>) -> Vec<Kept> {
    let rank = |group: TcpGroup| {
        let (rank, ranks) = (group.rank, layout.ranks);
        let engine = &mut *emulated(EmulatedGpu::new(false), Precision::Bf16, None, false);
        // The tensors do not divide evenly among three ranks.
        let descriptor = Descriptor::gpt2(2, 1, CHANNELS, 10, VOCAB).unwrap();
        let shard_size = if layout.shard_size > 0 { layout.shard_size } else { ranks };
        let zero = Zero::new(layout.stage, Shard { rank: rank % shard_size, ranks: shard_size });
        let Layout { master_weights, moments, .. } = layout;
        let options = PlanOptions { master_weights, moments, zero, ..PlanOptions::training(1, 10) };
        let (model, plan) = Decoder::plan(descriptor, options, engine);
        engine.allocate(&plan).unwrap();
        match from {
            Some(from) => {
                let mut notes = Vec::new();
                Checkpoint::open_verified(from, STEP).unwrap().load_tensors(&model, engine, &mut notes).unwrap();
                assert!(notes.is_empty(), "{notes:?}");
            }
            None => fill(&model, engine),
        }
        let mut communicator = if ranks == 1 { Ranks::Single } else { Ranks::Connected(group) };
        communicator.init_communicator(engine, model.params, zero.shard().ranks).unwrap();
        if let Some(to) = to.filter(|_| rank == 0 || zero.is_sharded()) {
            let identity = Identity {
                program: String::new(),
                engine: String::new(),
                config: serde_json::Map::new(),
                train: Vec::new(),
                val: None,
                ranks,
            };
            let mut writer = if rank == 0 {
                CheckpointWriter::new(DirectoryLock::acquire(to).unwrap(), Retention::default(), identity, None)
            } else if rank < shard_size {
                CheckpointWriter::for_other_rank(to.to_owned(), identity, None)
            } else {
                CheckpointWriter::for_replica(to.to_owned(), identity, None)
            };
            let state = RunState {
                step: STEP,
                ..RunState::fresh(Position { shard: 0, sample: 0, shuffle: None, mixture: None })
            };
            writer.begin(&model, engine, &mut communicator, state, Ok(Vec::new()), &[]).unwrap();
            if let Some(outcome) = writer.wait(&mut communicator).unwrap() {
                outcome.result.unwrap();
            }
        }
        kept(&model, engine)
    };
    let groups = TcpGroup::in_process(layout.ranks, TIMEOUT).unwrap();
    thread::scope(|scope| {
        let threads: Vec<_> = groups.into_iter().map(|group| scope.spawn(|| rank(group))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// A checkpoint of any layout restores every bit of any other layout.
#[test]
fn compact_checkpoints_restore_every_layout() {
    let hybrid = Layout { ranks: 6, stage: 3, shard_size: 3, ..COMPACT };
    for writer in [COMPACT, Layout { ranks: 2, stage: 1, ..COMPACT }, Layout { ranks: 3, stage: 3, ..COMPACT }, hybrid]
    {
        let dir = tempfile::tempdir().unwrap();
        let written = run(writer, None, Some(dir.path()));
        assert!(run(writer, Some(dir.path()), None) == written, "{writer:?}");
        let other_hybrid = Layout { ranks: 4, stage: 1, shard_size: 2, ..COMPACT };
        for reader in [COMPACT, Layout { ranks: 2, stage: 2, ..COMPACT }, other_hybrid, EXACT] {
            // Parameters beside f32 master weights come from the model file, where they are rounded otherwise than by `fill`.
            let of = |ranks: Vec<Kept>| -> Vec<Kept> {
                let exact = reader.master_weights == MasterWeights::F32;
                let compared = |kept: Kept| {
                    kept.into_iter().filter(|(name, ..)| !exact || !name.starts_with("tensor 0")).collect()
                };
                ranks.into_iter().map(compared).collect()
            };
            let (got, expected) = (of(run(reader, Some(dir.path()), None)), of(run(reader, None, None)));
            assert!(got == expected, "{writer:?} to {reader:?}");
        }
    }
    // f32 master weights become remainders.
    let dir = tempfile::tempdir().unwrap();
    run(EXACT, None, Some(dir.path()));
    let sharded = Layout { ranks: 2, stage: 3, ..COMPACT };
    assert!(run(sharded, Some(dir.path()), None) == run(sharded, None, None));
}

/// The same for moments in blocks. Shares of a tensor in a file do not begin at the start of a block.
#[test]
fn checkpoints_of_8_bit_moments_restore_every_layout() {
    for writer in [EIGHT_BIT, Layout { ranks: 2, stage: 1, ..EIGHT_BIT }, Layout { ranks: 3, stage: 3, ..EIGHT_BIT }] {
        let dir = tempfile::tempdir().unwrap();
        let written = run(writer, None, Some(dir.path()));
        assert!(run(writer, Some(dir.path()), None) == written, "{writer:?}");
        for reader in
            [EIGHT_BIT, Layout { ranks: 2, stage: 2, ..EIGHT_BIT }, Layout { ranks: 5, stage: 1, ..EIGHT_BIT }]
        {
            assert!(run(reader, Some(dir.path()), None) == run(reader, None, None), "{writer:?} to {reader:?}");
        }
    }
}
