//! Checkpoints in the format of llm.c, written by the independent `scripts/llmc_checkpoint.py`. They are read correctly, and
//! writing them again gives the same bytes.

use checkpoint::directory::{DirectoryLock, Retention};
use checkpoint::resume::{FoundCheckpoint, find_newest};
use checkpoint::sidecar::Identity;
use checkpoint::writer::CheckpointWriter;
use checkpoint::{Progress, RunState};
use data::{Batches, Geometry, Loader, Tokens};
use distributed::Ranks;
use engine::Engine;
use engine::cpu::Cpu;
use engine::cuda::{EmulatedGpu, Precision, emulated};
use engine::ops::Master;
use engine::tensor::Tensor;
use model::{Decoder, MasterWeights, Moments, PlanOptions};
use std::fs;
use std::path::{Path, PathBuf};

const STEP: usize = 9;
const VOCAB: usize = 60;
const TOTAL_BATCH: usize = 8;

/// The block that a value belongs to.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Values {
    Params,
    M,
    V,
    Masters,
}

fn directory(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/llmc").join(name)
}

/// Returns the value that the script writes for element `i`.
fn value(values: Values, i: usize) -> f32 {
    let wrapped = (i as u64 * 2_654_435_761 + values as u64 * 97) % (1 << 32);
    (wrapped as f64 / 2f64.powi(32) - 0.5) as f32
}

fn truncated(value: f32) -> f32 {
    f32::from_bits(value.to_bits() & 0xffff_0000)
}

fn loader(shuffles: bool) -> Loader {
    let shard = |(i, n): (usize, usize)| Tokens::in_memory(format!("shard {i}"), vec![1; n]);
    let shards = [41, 70, 55].into_iter().enumerate().map(shard).collect();
    Loader::new(shards, Geometry::single(2, 4), VOCAB, shuffles.then_some(42)).unwrap()
}

struct Loaded {
    engine: Box<dyn Engine>,
    model: Decoder,
    state: RunState,
    notes: Vec<String>,
}

impl Loaded {
    fn new(name: &str, engine: Box<dyn Engine>, master_weights: bool) -> Self {
        Self::with_options(
            name,
            engine,
            PlanOptions { master_weights: master_weights.into(), ..PlanOptions::training(1, 8) },
        )
    }

    fn with_options(name: &str, mut engine: Box<dyn Engine>, options: PlanOptions) -> Self {
        let FoundCheckpoint { checkpoint, mut notes } = find_newest(&directory(name)).unwrap();
        let checkpoint = checkpoint.unwrap();
        assert_eq!(checkpoint.step, STEP);
        assert!(notes[0].contains("has no run_00000009.json (llm.c writes none)"), "{notes:?}");
        let (model, plan) = Decoder::plan(checkpoint.descriptor(), options, &mut *engine);
        engine.allocate(&plan).unwrap();
        let mut loader = Batches::from(loader(name != "fp32"));
        let state = checkpoint.load(&model, &mut *engine, &mut loader, TOTAL_BATCH, false, &mut notes).unwrap();
        Self { engine, model, state, notes }
    }

    /// Checks all elements of a block.
    fn assert_holds(&mut self, block: Tensor, expected: impl Fn(usize) -> f32) {
        let descriptor = self.model.descriptor;
        let padding = VOCAB * descriptor.channels..descriptor.padded_vocab() * descriptor.channels;
        let mut i = 0;
        for (param, layer) in self.model.layout.file_order() {
            for got in self.engine.read(self.model.layout.of(block, param, layer)).unwrap() {
                let expected = if padding.contains(&i) { 0.0 } else { expected(i) };
                assert_eq!(
                    got.to_bits(),
                    expected.to_bits(),
                    "{} of layer {layer}, element {i} of the block",
                    param.name()
                );
                i += 1;
            }
        }
        assert_eq!(i, descriptor.parameters());
    }
}

#[test]
fn every_value_is_read_from_its_position_in_llm_c_files() {
    for (name, precision, masters) in [
        ("bf16", Precision::Bf16, true),
        ("bf16_without_masters", Precision::Bf16, false),
        ("fp32", Precision::Fp32, true),
    ] {
        let mut loaded = Loaded::new(name, emulated(EmulatedGpu::new(false), precision, None, false), masters);
        let (model, bf16) = (loaded.model.clone(), precision == Precision::Bf16);
        let training = model.training.unwrap();
        loaded.assert_holds(model.params, |i| {
            let value = value(Values::Params, i);
            if bf16 { truncated(value) } else { value }
        });
        loaded.assert_holds(training.m, |i| value(Values::M, i));
        loaded.assert_holds(training.v, |i| value(Values::V, i));
        assert_eq!(training.master.tensor().is_some(), bf16 && masters);
        if let Some(master) = training.master.tensor() {
            loaded.assert_holds(master, |i| value(Values::Masters, i));
        }
        let RunState { step, rounding, rounding_before_update, progress, .. } = &loaded.state;
        assert_eq!((*step, rounding.state, rounding_before_update.state), (9, 0x0123456789abcdef, 0xfedcba9876543210));
        let expected = Progress { evaluated: true, tokens: 9 * TOTAL_BATCH as u64, ..Progress::default() };
        assert_eq!(*progress, expected);
        assert_eq!(loaded.notes.len(), 1, "{:?}", loaded.notes);
    }
}

#[test]
fn sharded_state_files_of_two_ranks_are_assembled() {
    let mut loaded = Loaded::new("two_ranks", emulated(EmulatedGpu::new(false), Precision::Bf16, None, false), true);
    let (model, training) = (loaded.model.clone(), loaded.model.training.unwrap());
    loaded.assert_holds(model.params, |i| truncated(value(Values::Params, i)));
    loaded.assert_holds(training.m, |i| value(Values::M, i));
    loaded.assert_holds(training.v, |i| value(Values::V, i));
    loaded.assert_holds(training.master.tensor().unwrap(), |i| value(Values::Masters, i));
    assert_eq!(loaded.state.step, STEP);
    assert!(loaded.notes[1].starts_with("the world size was 2 and is now 1"), "{:?}", loaded.notes);
    // Each state file has half of the tensors of an unsharded one.
    let size =
        |name: &str, rank| fs::metadata(directory(name).join(format!("state_00000009_0000{rank}.bin"))).unwrap().len();
    assert!(size("two_ranks", 0) == size("two_ranks", 1) && size("two_ranks", 0) < size("bf16", 0) * 3 / 5);
}

#[test]
fn the_precision_may_change_when_resuming() {
    // f32 parameters come from the master weights, which are more precise than the bf16 weights.
    let mut loaded = Loaded::new("bf16", Box::new(Cpu::new()), true);
    let params = loaded.model.params;
    loaded.assert_holds(params, |i| value(Values::Masters, i));
    // Without master weights the bf16 weights are widened.
    let mut loaded = Loaded::new("bf16_without_masters", Box::new(Cpu::new()), true);
    let params = loaded.model.params;
    loaded.assert_holds(params, |i| truncated(value(Values::Params, i)));
    // f32 weights are rounded to nearest bf16, and become the master weights.
    let mut loaded = Loaded::new("fp32", emulated(EmulatedGpu::new(false), Precision::Bf16, None, false), true);
    let (params, master) = (loaded.model.params, loaded.model.training.unwrap().master.tensor().unwrap());
    loaded.assert_holds(params, |i| half::bf16::from_f32(value(Values::Params, i)).to_f32());
    loaded.assert_holds(master, |i| value(Values::Params, i));
}

#[test]
fn master_weights_may_be_enabled_or_disabled_when_resuming() {
    let mut loaded =
        Loaded::new("bf16_without_masters", emulated(EmulatedGpu::new(false), Precision::Bf16, None, false), true);
    let master = loaded.model.training.unwrap().master.tensor().unwrap();
    loaded.assert_holds(master, |i| truncated(value(Values::Params, i)));
    assert!(loaded.notes[1].contains("no master weights"), "{:?}", loaded.notes);
    let mut loaded = Loaded::new("bf16", emulated(EmulatedGpu::new(false), Precision::Bf16, None, false), false);
    let params = loaded.model.params;
    loaded.assert_holds(params, |i| truncated(value(Values::Params, i)));
}

/// Writes a checkpoint into a new directory.
fn write_checkpoint(model: &Decoder, engine: &mut dyn Engine, state: RunState) -> tempfile::TempDir {
    let out = tempfile::tempdir().unwrap();
    let identity = Identity {
        program: String::new(),
        engine: String::new(),
        config: serde_json::Map::new(),
        train: Vec::new(),
        val: None,
        ranks: 1,
    };
    let lock = DirectoryLock::acquire(out.path()).unwrap();
    let mut checkpoints = CheckpointWriter::new(lock, Retention::default(), identity, None);
    let ranks = &mut Ranks::Single;
    checkpoints.begin(model, engine, ranks, state, Ok(Vec::new()), &[]).unwrap();
    checkpoints.wait(ranks).unwrap().unwrap().result.unwrap();
    out
}

/// Master weights of a file become parameters and remainders, without loss. bf16 moments are rounded to nearest once.
#[test]
fn remainders_and_bf16_moments_are_read_and_written_in_llm_c_files() {
    let nearest = |value: f32| half::bf16::from_f32(value).to_f32();
    for name in ["bf16", "bf16_without_masters", "fp32", "two_ranks"] {
        for moments in [Moments::F32, Moments::Bf16] {
            let engine = || emulated(EmulatedGpu::new(false), Precision::Bf16, None, false);
            let options =
                PlanOptions { master_weights: MasterWeights::Remainder, moments, ..PlanOptions::training(1, 8) };
            let mut loaded = Loaded::with_options(name, engine(), options);
            let model = loaded.model.clone();
            let training = model.training.unwrap();
            let Master::Remainder(remainders) = training.master else { panic!("{:?}", training.master) };
            let master = |i| match name {
                "bf16_without_masters" => truncated(value(Values::Params, i)),
                _ => value(Values::Masters, i),
            };
            let master = |i| if name == "fp32" { value(Values::Params, i) } else { master(i) };
            loaded.assert_holds(model.params, |i| gpu::remainder::split(master(i)).0);
            let mut bytes = vec![0; remainders.bytes()];
            loaded.engine.read_bytes(remainders, &mut bytes).unwrap();
            let mut i = 0;
            for (param, layer) in model.layout.file_order() {
                for element in model.layout.range(param, layer) {
                    let low = u16::from_le_bytes([bytes[2 * element], bytes[2 * element + 1]]);
                    let padding =
                        VOCAB * model.descriptor.channels..model.descriptor.padded_vocab() * model.descriptor.channels;
                    let expected = if padding.contains(&i) { 0 } else { gpu::remainder::split(master(i)).1 };
                    assert_eq!(low, expected, "{name}, element {i}");
                    i += 1;
                }
            }
            let stored = |value: f32| if moments == Moments::Bf16 { nearest(value) } else { value };
            loaded.assert_holds(training.m, |i| stored(value(Values::M, i)));
            loaded.assert_holds(training.v, |i| stored(value(Values::V, i)));
            if name != "bf16" {
                continue;
            }
            // The state file contains the master weights of the original, and the stored moments.
            let Loaded { mut engine, state, .. } = loaded;
            let out = write_checkpoint(&model, &mut *engine, state);
            let read = |dir: &Path| fs::read(dir.join("state_00000009_00000.bin")).unwrap();
            let (got, expected) = (read(out.path()), read(&directory(name)));
            let n = 4 * model.descriptor.parameters();
            let block = |bytes: &[u8], k: usize| bytes[1024 + k * n..1024 + (k + 1) * n].to_vec();
            assert!(block(&got, 2) == block(&expected, 2), "master weights");
            for k in 0..2 {
                let floats = |bytes: &[u8]| -> Vec<f32> {
                    block(bytes, k).as_chunks().0.iter().map(|&b| f32::from_le_bytes(b)).collect()
                };
                let expected: Vec<f32> = floats(&expected).into_iter().map(stored).collect();
                assert!(floats(&got) == expected, "moments {k}");
            }
        }
    }
}

#[test]
fn checkpoints_round_trip_byte_for_byte() {
    for (name, precision, masters) in [
        ("bf16", Precision::Bf16, true),
        ("bf16_without_masters", Precision::Bf16, false),
        ("fp32", Precision::Fp32, true),
    ] {
        let engine: Box<dyn Engine> = match precision {
            Precision::Fp32 => Box::new(Cpu::new()),
            _ => emulated(EmulatedGpu::new(false), precision, None, false),
        };
        let Loaded { mut engine, model, mut state, .. } = Loaded::new(name, engine, masters);
        let shuffles = name != "fp32";
        if shuffles {
            // The position of a loader after nine batches, instead of that in the file.
            let mut loader = loader(true);
            let mut words = vec![0; loader.layout().words()];
            (0..9).for_each(|_| loader.next(&mut words).unwrap());
            state.data = loader.position();
        }
        let out = write_checkpoint(&model, &mut *engine, state);
        for file in ["model_00000009.bin", "state_00000009_00000.bin", "DONE_00000009"] {
            let mut expected = fs::read(directory(name).join(file)).unwrap();
            let got = fs::read(out.path().join(file)).unwrap();
            if file.starts_with("state") && shuffles {
                // llm.c does not initialize the seed of the generator.
                let seed = expected.len() - 2520..expected.len() - 2512;
                expected[seed].fill(0);
            }
            let first = got.iter().zip(&expected).position(|(a, b)| a != b);
            assert_eq!((first, got.len()), (None, expected.len()), "{name}/{file}");
        }
    }
}
