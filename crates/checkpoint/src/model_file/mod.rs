//! Model files: the parameters of a model without optimizer state.
//!
//! * [`gpt2`]: llm.c's `.bin` of GPT-2 models, the format of their checkpoints.
//! * [`llama`]: the `.bin` of llm.c's branch `llama3`, for import and export.
//! * [`decoder`]: safetensors files, the format of the checkpoints of all other models.
//!
//! [`ModelFile::open`] recognizes the format by its first bytes.

pub mod decoder;
pub mod gpt2;
pub mod llama;

use super::directory;
use super::tensors::{self, FileShape};
use anyhow::{Context, Result, bail, ensure};
use engine::Engine;
use engine::tensor::DType;
use model::{Decoder, Descriptor, Param, Params};
use std::io::{BufReader, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use system::fs::File;

/// An open model file. Its header has been checked against its size.
#[derive(Debug)]
pub struct ModelFile {
    path: PathBuf,
    file: BufReader<File>,
    header: Header,
}

/// The contents of a header.
#[derive(Clone, Copy, Debug)]
struct Header {
    shape: FileShape,
    dtype: DType,
    /// Position of the first tensor, in bytes.
    tensors_at: u64,
}

/// The format of a checkpoint's model file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// llm.c's format for GPT-2
    Gpt2,
    /// safetensors, for all other models
    Decoder,
}

impl Format {
    /// Returns the format of a model's checkpoints.
    pub fn of(descriptor: &Descriptor) -> Self {
        if descriptor.is_gpt2() { Self::Gpt2 } else { Self::Decoder }
    }

    /// Returns the name of the model file of a step.
    pub fn name(self, step: usize) -> String {
        match self {
            Self::Gpt2 => directory::model_name(step),
            Self::Decoder => directory::decoder_name(step),
        }
    }
}

impl ModelFile {
    /// Opens a file and checks its header and size.
    pub fn open(path: &Path) -> Result<Self> {
        let name = path.display();
        let mut file = bounded_file::open_of_run(path).with_context(|| format!("cannot open model file {name}"))?;
        let size = file.size().with_context(|| format!("cannot read {name}"))?;
        let mut start = [0; 8];
        let read = file.read_at(&mut start, 0).with_context(|| format!("cannot read {name}"))?;
        let magic = i32::from_le_bytes(start[..4].try_into().expect("four bytes"));
        let header = match magic {
            llama::MAGIC if read == start.len() => llama::read_header(&file, &name.to_string())?,
            _ if decoder::begins(&file) => decoder::read_header(&file, size).with_context(|| name.to_string())?,
            _ => gpt2::read_header(&mut file, size, &name.to_string())?,
        };
        let Header { shape, dtype, tensors_at } = header;
        let expected = u128::from(tensors_at) + shape.elements() * dtype.bytes() as u128;
        ensure!(
            u128::from(size) == expected,
            "{name} is {}: expected {expected} bytes for a model with {}, found {size}",
            if u128::from(size) < expected { "truncated" } else { "too long" },
            shape.descriptor
        );
        Ok(Self { path: path.to_owned(), file: BufReader::new(file), header })
    }

    /// Returns the path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the shape of the model.
    pub fn descriptor(&self) -> Descriptor {
        self.header.shape.descriptor
    }

    /// Returns the number of rows of wte in the file.
    pub fn padded_vocab(&self) -> usize {
        self.header.shape.padded_vocab
    }

    /// Returns the type of the parameters.
    pub fn dtype(&self) -> DType {
        self.header.dtype
    }

    /// Returns the tensor shapes of the file.
    pub fn shape(&self) -> FileShape {
        self.header.shape
    }

    /// Reads the little-endian elements of a tensor of one layer, without padding of the vocabulary.
    pub fn read_tensor(&self, param: Param, layer: usize) -> Result<Vec<u8>> {
        self.read_experts(param, layer, 0..param.experts(&self.header.shape.descriptor))
    }

    /// Reads the part of a tensor that belongs to some experts, like [`read_tensor`](Self::read_tensor). Other tensors belong to expert 0.
    pub fn read_experts(&self, param: Param, layer: usize, experts: Range<usize>) -> Result<Vec<u8>> {
        let (before, len) = self.header.shape.place(param, layer);
        let of_expert = len / param.experts(&self.header.shape.descriptor);
        let size = self.header.dtype.bytes();
        let mut bytes = vec![0; experts.len() * of_expert * size];
        let start = before + (experts.start * of_expert) as u64;
        self.file
            .get_ref()
            .read_exact_at(&mut bytes, self.header.tensors_at + start * size as u64)
            .with_context(|| format!("cannot read {} of {}", param.name(), self.path.display()))?;
        Ok(bytes)
    }

    /// Reads the parameters that this rank keeps into `model`, and into its master weights if it has them. The model must have
    /// been planned for [`descriptor`](Self::descriptor). Values are widened or rounded to nearest if the types differ.
    pub fn load(mut self, model: &Decoder, engine: &mut dyn Engine) -> Result<()> {
        self.load_tensors(model, engine)
    }

    pub(super) fn load_tensors(&mut self, model: &Decoder, engine: &mut dyn Engine) -> Result<()> {
        let Header { shape, dtype, tensors_at } = self.header;
        assert_eq!(model.descriptor, shape.descriptor, "the model was planned for another file");
        let stores = model.weight_stores();
        let cannot = || format!("cannot load {}", self.path.display());
        self.file.seek(SeekFrom::Start(tensors_at)).with_context(cannot)?;
        tensors::read(std::slice::from_mut(&mut self.file), shape, dtype, &stores, engine).with_context(cannot)
    }
}

/// Writes the model file of a checkpoint. `params` contains the parameters, of type `dtype` (f32 or bf16), in `layout`.
pub fn write(out: &mut impl Write, descriptor: Descriptor, layout: &Params, params: &[u8], dtype: DType) -> Result<()> {
    write_header(out, descriptor, dtype)?;
    tensors::write(out, layout, params, dtype.bytes())
}

/// Writes the header of a checkpoint's model file. All tensors must follow in the order of [`Params::file_order`], with the
/// vocabulary padded to [`Descriptor::padded_vocab`] rows.
pub fn write_header(out: &mut impl Write, descriptor: Descriptor, dtype: DType) -> Result<()> {
    match Format::of(&descriptor) {
        Format::Gpt2 => gpt2::write_header(out, descriptor, dtype),
        Format::Decoder => decoder::write_header(out, descriptor, dtype),
    }
}

/// Returns the size of a checkpoint's model file in bytes.
pub fn file_bytes(descriptor: Descriptor, dtype: DType) -> Result<u64> {
    let mut header = Vec::new();
    write_header(&mut header, descriptor, dtype)?;
    Ok(header.len() as u64 + descriptor.parameters() as u64 * dtype.bytes() as u64)
}

/// Returns the version of llm.c's headers for a type.
const fn version_of(dtype: DType) -> i32 {
    match dtype {
        DType::Bf16 => 5,
        DType::F32 | DType::I32 | DType::U16 | DType::Fp8 | DType::Block8 { .. } => 3,
    }
}

/// Returns the type of a version in llm.c's headers.
fn dtype_of(version: i32, name: &str) -> Result<DType> {
    match version {
        3 => Ok(DType::F32),
        5 => Ok(DType::Bf16),
        other => bail!("{name}: expected model file version 3 (fp32) or 5 (bf16), found {other}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use engine::cpu::Cpu;
    use half::bf16;
    use model::{Param, PlanOptions, init};
    use std::fs;

    fn save(path: &Path, model: &Decoder, engine: &mut dyn Engine, dtype: DType) -> Result<()> {
        let values = engine.read(model.params)?;
        let bytes: Vec<u8> = match dtype {
            DType::Bf16 => values.iter().flat_map(|&v| bf16::from_f32(v).to_le_bytes()).collect(),
            DType::F32 | DType::I32 | DType::U16 | DType::Fp8 | DType::Block8 { .. } => {
                values.iter().flat_map(|v| v.to_le_bytes()).collect()
            }
        };
        let mut out = File::create(path)?;
        write(&mut out, model.descriptor, &model.layout, &bytes, dtype)
    }

    fn planned(descriptor: Descriptor) -> (Decoder, Cpu) {
        let mut engine = Cpu::new();
        let capacity = PlanOptions::inference(1, 8);
        let (model, plan) = Decoder::plan(descriptor, capacity, &mut engine);
        engine.allocate(&plan).unwrap();
        (model, engine)
    }

    fn initialized() -> (Decoder, Cpu) {
        let (model, mut engine) = planned(Descriptor::gpt2(2, 2, 8, 16, 200).unwrap());
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
        for param in model.descriptor.params() {
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
    fn assert_tensors_are_read(path: &Path, model: &Decoder, engine: &mut dyn Engine) {
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
                        DType::F32 | DType::I32 | DType::U16 | DType::Fp8 | DType::Block8 { .. } => {
                            bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
                        }
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
        assert!(with(4, -1).contains("layers: expected at least 1, found 0"));
        assert!(with(5, 3).contains("heads: expected a divisor of the 8 channels, found 3"));
        assert!(with(6, 10_000).contains("truncated"));
        assert!(with(6, i32::MAX - 1).contains("larger than any address space"));
        assert!(with(4, i32::MAX).contains("layers: expected at most 8192"));
        assert!(with(7, 199).contains("at least 200, found 199"));
    }
}
