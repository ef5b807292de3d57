//! Model files (`.bin`).
//!
//! The header consists of 256 little-endian i32: magic 20240326, version, maxT, V, L, NH, C, Vp, zeros. The parameter tensors
//! follow in [`Param::ALL`](model::Param::ALL) order without gaps, all layers of a tensor together. Their type is f32 in
//! version 3 and bf16 in version 5.

use super::tensors::{self, FileShape};
use anyhow::{Context, Result, bail, ensure};
use engine::Engine;
use engine::tensor::DType;
use model::{Descriptor, Gpt2, Param, Params};
use std::fs::File;
use std::io::{BufReader, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

const MAGIC: i32 = 20240326;
const HEADER_BYTES: usize = 1024;

const fn version_of(dtype: DType) -> i32 {
    match dtype {
        DType::Bf16 => 5,
        DType::F32 | DType::I32 => 3,
    }
}

/// An open model file. Its header has been checked against its size.
#[derive(Debug)]
pub struct ModelFile {
    path: PathBuf,
    file: BufReader<File>,
    shape: FileShape,
    dtype: DType,
}

impl ModelFile {
    /// Opens a file and checks its header and size.
    pub fn open(path: &Path) -> Result<Self> {
        let name = path.display();
        let mut file = File::open(path).with_context(|| format!("cannot open model file {name}"))?;
        let size = file.metadata().with_context(|| format!("cannot read {name}"))?.len();
        ensure!(
            size >= HEADER_BYTES as u64,
            "{name} is not a model file: expected a header of {HEADER_BYTES} bytes, found {size} bytes"
        );
        let mut header = [0; HEADER_BYTES];
        file.read_exact(&mut header).with_context(|| format!("cannot read {name}"))?;
        let word = |i: usize| i32::from_le_bytes(header[4 * i..4 * i + 4].try_into().expect("four bytes"));
        ensure!(word(0) == MAGIC, "{name} is not a model file: expected magic {MAGIC}, found {}", word(0));
        let dtype = match word(1) {
            3 => DType::F32,
            5 => DType::Bf16,
            other => bail!("{name}: expected model file version 3 (fp32) or 5 (bf16), found {other}"),
        };
        let [max_seq_len, vocab, layers, heads, channels, padded_vocab] =
            [2, 3, 4, 5, 6, 7].map(|i| word(i).max(0) as usize);
        let descriptor = Descriptor::new(layers, heads, channels, max_seq_len, vocab)
            .with_context(|| format!("{name}: invalid header"))?;
        ensure!(
            padded_vocab >= vocab,
            "{name}: expected a padded vocabulary of at least {vocab}, found {padded_vocab}"
        );
        let shape = FileShape { descriptor, padded_vocab };
        let expected = HEADER_BYTES as u128 + shape.elements() * dtype.bytes() as u128;
        ensure!(
            u128::from(size) == expected,
            "{name} is {}: expected {expected} bytes for a model with {descriptor}, found {size}",
            if u128::from(size) < expected { "truncated" } else { "too long" }
        );
        Ok(Self { path: path.to_owned(), file: BufReader::new(file), shape, dtype })
    }

    /// Returns the path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the shape of the model.
    pub fn descriptor(&self) -> Descriptor {
        self.shape.descriptor
    }

    /// Returns the number of rows of wte in the file.
    pub fn padded_vocab(&self) -> usize {
        self.shape.padded_vocab
    }

    /// Returns the type of the parameters.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the tensor shapes of the file.
    pub fn shape(&self) -> FileShape {
        self.shape
    }

    /// Reads the little-endian elements of a tensor of one layer, without padding of the vocabulary.
    pub fn read_tensor(&self, param: Param, layer: usize) -> Result<Vec<u8>> {
        let (before, len) = self.shape.place(param, layer);
        let size = self.dtype.bytes();
        let mut bytes = vec![0; len * size];
        self.file
            .get_ref()
            .read_exact_at(&mut bytes, HEADER_BYTES as u64 + before * size as u64)
            .with_context(|| format!("cannot read {} of {}", param.name(), self.path.display()))?;
        Ok(bytes)
    }

    /// Reads the parameters that this rank keeps into `model`, and into its master weights if it has them. The model must have
    /// been planned for [`descriptor`](Self::descriptor). Values are widened or rounded to nearest if the types differ.
    pub fn load(mut self, model: &Gpt2, engine: &mut dyn Engine) -> Result<()> {
        self.load_tensors(model, engine)
    }

    pub(super) fn load_tensors(&mut self, model: &Gpt2, engine: &mut dyn Engine) -> Result<()> {
        assert_eq!(model.descriptor, self.shape.descriptor, "the model was planned for another file");
        let master = model.training.and_then(|t| t.master).map(|master| model.state_store(master));
        let stores: Vec<_> = [Some(model.param_store()), master].into_iter().flatten().collect();
        tensors::read(std::slice::from_mut(&mut self.file), self.shape, self.dtype, &stores, engine)
            .with_context(|| format!("cannot load {}", self.path.display()))
    }
}

/// Writes a model file. `params` contains the parameters, of type `dtype` (f32 or bf16), in `layout`.
pub fn write(out: &mut impl Write, descriptor: Descriptor, layout: &Params, params: &[u8], dtype: DType) -> Result<()> {
    write_header(out, descriptor, dtype)?;
    tensors::write(out, layout, params, dtype.bytes())
}

/// Writes the header of a model file. All tensors must follow in the order of [`Params::file_order`], with the vocabulary padded
/// to [`Descriptor::padded_vocab`] rows.
pub fn write_header(out: &mut impl Write, descriptor: Descriptor, dtype: DType) -> Result<()> {
    let Descriptor { layers, heads, channels, max_seq_len, vocab } = descriptor;
    let words = [max_seq_len, vocab, layers, heads, channels, descriptor.padded_vocab()].map(|word| word as i32);
    let mut header = [0; HEADER_BYTES];
    for (slot, word) in
        header.as_chunks_mut::<4>().0.iter_mut().zip([MAGIC, version_of(dtype)].into_iter().chain(words))
    {
        *slot = word.to_le_bytes();
    }
    Ok(out.write_all(&header)?)
}

/// Returns the size of a model file in bytes.
pub fn file_bytes(descriptor: Descriptor, dtype: DType) -> u64 {
    HEADER_BYTES as u64 + descriptor.parameters() as u64 * dtype.bytes() as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use engine::cpu::Cpu;
    use half::bf16;
    use model::{Param, PlanOptions, init};
    use std::fs;

    fn save(path: &Path, model: &Gpt2, engine: &mut dyn Engine, dtype: DType) -> Result<()> {
        let values = engine.read(model.params)?;
        let bytes: Vec<u8> = match dtype {
            DType::Bf16 => values.iter().flat_map(|&v| bf16::from_f32(v).to_le_bytes()).collect(),
            DType::F32 | DType::I32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        };
        let mut out = File::create(path)?;
        write(&mut out, model.descriptor, &model.layout, &bytes, dtype)
    }

    fn planned(descriptor: Descriptor) -> (Gpt2, Cpu) {
        let mut engine = Cpu::new();
        let capacity = PlanOptions::inference(1, 8);
        let (model, plan) = Gpt2::plan(descriptor, capacity, &mut engine);
        engine.allocate(&plan).unwrap();
        (model, engine)
    }

    fn initialized() -> (Gpt2, Cpu) {
        let (model, mut engine) = planned(Descriptor::new(2, 2, 8, 16, 200).unwrap());
        // Distinct values of various magnitudes.
        let mut next = 0.0f32;
        init::generate(&model.descriptor, 1, |param, layer, values| {
            let values: Vec<f32> = values
                .iter()
                .map(|v| {
                    next += 1.0;
                    if param == Param::Wte && *v == 0.0 { 0.0 } else { v + next * 1e-3 }
                })
                .collect();
            engine.write(model.layout.of(model.params, param, layer), &values)
        })
        .unwrap();
        (model, engine)
    }

    fn loaded(path: &Path) -> Vec<f32> {
        let file = ModelFile::open(path).unwrap();
        let (model, mut engine) = planned(file.descriptor());
        file.load(&model, &mut engine).unwrap();
        engine.read(model.params).unwrap()
    }

    #[test]
    fn both_versions_round_trip() {
        let dir = tempfile::tempdir().unwrap();
        let (model, mut engine) = initialized();
        let params = engine.read(model.params).unwrap();
        let path = dir.path().join("v3.bin");
        save(&path, &model, &mut engine, DType::F32).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().len(), 1024 + 4 * model.descriptor.parameters() as u64);
        assert_eq!(loaded(&path), params);
        let path = dir.path().join("v5.bin");
        save(&path, &model, &mut engine, DType::Bf16).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().len(), 1024 + 2 * model.descriptor.parameters() as u64);
        let rounded: Vec<f32> = params.iter().map(|&p| bf16::from_f32(p).to_f32()).collect();
        assert_eq!(loaded(&path), rounded);
    }

    #[test]
    fn the_file_has_the_layout_of_llm_c() {
        let dir = tempfile::tempdir().unwrap();
        let (model, mut engine) = initialized();
        let path = dir.path().join("model.bin");
        save(&path, &model, &mut engine, DType::F32).unwrap();
        let bytes = fs::read(&path).unwrap();
        let words: Vec<i32> = bytes[..1024].as_chunks().0.iter().map(|&b| i32::from_le_bytes(b)).collect();
        assert_eq!(words[..9], [20240326, 3, 16, 200, 2, 2, 8, 256, 0]);
        let mut at = 1024;
        for param in Param::ALL {
            for layer in 0..if param.layered() { 2 } else { 1 } {
                let values = engine.read(model.layout.of(model.params, param, layer)).unwrap();
                for value in values {
                    assert_eq!(bytes[at..at + 4], value.to_le_bytes(), "{} of layer {layer}", param.name());
                    at += 4;
                }
            }
        }
        assert_eq!(at, bytes.len());
    }

    #[test]
    fn a_file_with_other_padding_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let (model, mut engine) = initialized();
        let path = dir.path().join("model.bin");
        save(&path, &model, &mut engine, DType::F32).unwrap();
        assert_tensors_are_read(&path, &model, &mut engine);
        let mut bytes = fs::read(&path).unwrap();
        bytes[28..32].copy_from_slice(&200i32.to_le_bytes());
        bytes.drain(1024 + 4 * 200 * 8..1024 + 4 * 256 * 8);
        fs::write(&path, bytes).unwrap();
        assert_eq!(loaded(&path), engine.read(model.params).unwrap());
        assert_tensors_are_read(&path, &model, &mut engine);
    }

    /// Asserts that single tensors have the values of the model, without padding of the vocabulary.
    fn assert_tensors_are_read(path: &Path, model: &Gpt2, engine: &mut dyn Engine) {
        let file = ModelFile::open(path).unwrap();
        for (param, layer) in model.layout.file_order() {
            let mut values = engine.read(model.layout.of(model.params, param, layer)).unwrap();
            if param == Param::Wte {
                values.truncate(200 * 8);
            }
            let bytes: Vec<u8> = values.into_iter().flat_map(f32::to_le_bytes).collect();
            assert_eq!(file.read_tensor(param, layer).unwrap(), bytes, "{} of layer {layer}", param.name());
        }
    }

    #[test]
    fn non_finite_weights_are_an_error_that_names_the_tensor() {
        let dir = tempfile::tempdir().unwrap();
        let (model, mut engine) = initialized();
        let path = dir.path().join("model.bin");
        for dtype in [DType::F32, DType::Bf16] {
            save(&path, &model, &mut engine, dtype).unwrap();
            let good = fs::read(&path).unwrap();
            let load_with = |changes: &[(usize, f32)]| {
                let mut bytes = good.clone();
                for &(element, value) in changes {
                    let at = 1024 + element * dtype.bytes();
                    match dtype {
                        DType::Bf16 => bytes[at..at + 2].copy_from_slice(&bf16::from_f32(value).to_le_bytes()),
                        DType::F32 | DType::I32 => bytes[at..at + 4].copy_from_slice(&value.to_le_bytes()),
                    }
                }
                fs::write(&path, bytes).unwrap();
                let (model, mut engine) = planned(model.descriptor);
                ModelFile::open(&path).unwrap().load(&model, &mut engine).map_err(|error| format!("{error:#}"))
            };
            // wte (256, 8), wpe (16, 8), ln1w (2, 8), ln1b (2, 8), then qkvw (2, 24, 8).
            let qkvw = 256 * 8 + 16 * 8 + 2 * 8 + 2 * 8;
            let layer = 24 * 8;
            let message = load_with(&[(qkvw + layer, f32::NAN), (qkvw + 2 * layer - 1, f32::NAN)]).unwrap_err();
            assert!(message.contains("model.bin: qkvw of layer 1: expected finite values, found 2 NaN"), "{message}");
            let message = load_with(&[(qkvw + layer - 1, f32::NEG_INFINITY)]).unwrap_err();
            assert!(message.contains("qkvw of layer 0: expected finite values, found 1 infinite"), "{message}");
            let message = load_with(&[(0, f32::NAN)]).unwrap_err();
            assert!(message.contains("model.bin: wte: expected"), "{message}");
            // The rows of wte beyond the vocabulary are not used.
            assert_eq!(load_with(&[(200 * 8, f32::NAN)]), Ok(()));
        }
    }

    #[test]
    fn invalid_files_are_rejected_when_opened() {
        let dir = tempfile::tempdir().unwrap();
        let (model, mut engine) = initialized();
        let path = dir.path().join("model.bin");
        save(&path, &model, &mut engine, DType::F32).unwrap();
        let good = fs::read(&path).unwrap();
        let error_of = |bytes: &[u8]| {
            fs::write(&path, bytes).unwrap();
            let message = format!("{:#}", ModelFile::open(&path).unwrap_err());
            assert!(message.contains("model.bin"), "{message}");
            message
        };
        let with = |word: usize, value: i32| {
            let mut bytes = good.clone();
            bytes[4 * word..4 * word + 4].copy_from_slice(&value.to_le_bytes());
            error_of(&bytes)
        };
        assert!(error_of(&good[..10]).contains("found 10 bytes"));
        assert!(error_of(&good[..good.len() - 4]).contains("truncated"));
        assert!(error_of(&[&good[..], &[0; 4]].concat()).contains("too long"));
        assert!(with(0, 20240520).contains("expected magic 20240326, found 20240520"));
        assert!(with(1, 4).contains("version 3 (fp32) or 5 (bf16), found 4"));
        assert!(with(4, -1).contains("layers must be at least 1"));
        assert!(with(5, 3).contains("3 heads do not divide 8 channels"));
        assert!(with(6, 10_000).contains("truncated"));
        assert!(with(6, i32::MAX - 1).contains("beyond what any memory holds"));
        assert!(with(4, i32::MAX).contains("layers must be at most 8192"));
        assert!(with(7, 199).contains("at least 200, found 199"));
    }
}
