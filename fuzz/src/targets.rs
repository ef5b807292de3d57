//! What each target does with its bytes, and the valid files it begins from.
//!
//! A target goes as far as the program would: what a reader accepts is used. Its only ways to fail are a panic, an overflow,
//! an endless loop and too much memory.

use anyhow::Result;
use host::checkpoint::model::{self, ModelFile};
use host::data::multiple_choice::{self, Example, MultipleChoice};
use host::data::{Geometry, Loader, Tokens, hellaswag, tokens};
use host::engine::Engine;
use host::engine::cpu::Cpu;
use host::model::{Capacity, Descriptor, Gpt2, Params, Recompute};
use host::sample::{self, Sampling};
use host::tensor::DType;
use host::tokenizer::Tokenizer;
use std::fs;
use std::io::Write;
use std::path::Path;
use tempfile::NamedTempFile;

pub struct Target {
    pub name: &'static str,
    /// Whether the bytes were a good file.
    read: fn(&[u8]) -> Result<()>,
    seeds: fn() -> Vec<Vec<u8>>,
}

pub static TOKENS: Target = Target { name: "tokens", read: read_tokens, seeds: token_files };
pub static MODEL: Target = Target { name: "model", read: read_model, seeds: model_files };
pub static EVALUATION: Target = Target { name: "evaluation", read: read_evaluation, seeds: evaluation_files };
pub static HELLASWAG: Target = Target { name: "hellaswag", read: read_hellaswag, seeds: hellaswag_files };
pub static TOKENIZER: Target = Target { name: "tokenizer", read: encode_and_decode, seeds: texts };

impl Target {
    pub fn accepts(&self, data: &[u8]) -> bool {
        (self.read)(data).is_ok()
    }

    /// Small valid files, from the program's own writers.
    pub fn seeds(&self) -> Vec<Vec<u8>> {
        (self.seeds)()
    }
}

/// Hands the bytes over as a file, in TMPDIR.
fn as_file<T>(data: &[u8], read: impl FnOnce(&Path) -> Result<T>) -> Result<T> {
    let mut file = NamedTempFile::new()?;
    file.write_all(data)?;
    read(file.path())
}

/// What a writer that wants a path writes.
fn written(write: impl FnOnce(&Path) -> Result<()>) -> Vec<u8> {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let path = directory.path().join("seed");
    write(&path).expect("the writer takes what it is given");
    fs::read(path).expect("it was just written")
}

fn read_tokens(data: &[u8]) -> Result<()> {
    as_file(data, |path| {
        let mut loader = Loader::new(vec![Tokens::open(path)?], Geometry::single(1, 2), 50_257, Some(42))?;
        let mut words = vec![0; loader.layout().words()];
        for _ in 0..8 {
            loader.next(&mut words)?;
        }
        Ok(())
    })
}

fn token_files() -> Vec<Vec<u8>> {
    vec![written(|path| tokens::write(path, &[50_256, 1, 2, 3])), written(|path| tokens::write(path, &[7; 100]))]
}

/// A model for sequences of up to 8 tokens.
fn planned(descriptor: Descriptor) -> Result<(Gpt2, Cpu)> {
    let mut engine = Cpu::new();
    let capacity = Capacity {
        b: 1,
        t: descriptor.max_seq_len.min(8),
        training: false,
        master_weights: false,
        recompute: Recompute::Nothing,
    };
    let (model, plan) = Gpt2::plan(descriptor, capacity, &mut engine);
    engine.allocate(&plan)?;
    Ok((model, engine))
}

fn read_model(data: &[u8]) -> Result<()> {
    as_file(data, |path| {
        let file = ModelFile::open(path)?;
        let (model, mut engine) = planned(file.descriptor())?;
        file.load(&model, &mut engine)?;
        let sampling = Sampling { top_k: 3, temperature: 1.0, seed: 1 };
        sample::generate(&model, &mut engine, &[0], 2, sampling, |_| Ok(()))
    })
}

fn model_files() -> Vec<Vec<u8>> {
    let file = |descriptor, dtype: DType| {
        let layout = Params::new(descriptor);
        let params = vec![0; layout.elements() * dtype.bytes()];
        let mut file = Vec::new();
        model::write(&mut file, descriptor, &layout, &params, dtype).expect("memory takes it");
        file
    };
    let smallest = Descriptor::new(1, 1, 1, 1, 1).expect("the shape is one");
    let small = Descriptor::new(2, 2, 2, 3, 5).expect("the shape is one");
    vec![file(smallest, DType::F32), file(small, DType::Bf16), file(small, DType::F32)]
}

fn read_evaluation(data: &[u8]) -> Result<()> {
    MultipleChoice::read("set.bin".to_owned(), data)?.check(50_257, 1024)
}

fn evaluation_files() -> Vec<Vec<u8>> {
    let example = |context: &[u16], lengths: [usize; 4], label| Example {
        context: context.to_vec(),
        completions: lengths.map(|n| vec![3; n]),
        label,
    };
    let one = [example(&[1], [1; 4], 0)];
    let three = [example(&[5, 6, 7], [1, 2, 3, 4], 3), example(&[8], [2; 4], 1), example(&[9; 9], [5, 1, 1, 1], 2)];
    vec![written(|path| multiple_choice::write(path, &one)), written(|path| multiple_choice::write(path, &three))]
}

fn read_hellaswag(data: &[u8]) -> Result<()> {
    as_file(data, hellaswag::read).map(drop)
}

fn hellaswag_files() -> Vec<Vec<u8>> {
    let line = r#"{"ind": 1, "ctx": "He", "label": 2, "endings": ["eats.", "sl\u0065eps \ud83d\ude42", "", "né"]}"#;
    vec![line.into(), format!("{line}\n\n{line}\r\n").into()]
}

fn encode_and_decode(data: &[u8]) -> Result<()> {
    let ids: Vec<u16> = data.as_chunks().0.iter().map(|&id| u16::from_le_bytes(id)).collect();
    for tokenizer in [Tokenizer::Gpt2, Tokenizer::Bytes] {
        tokenizer.decode(&ids);
    }
    let text = str::from_utf8(data)?;
    for tokenizer in [Tokenizer::Gpt2, Tokenizer::Bytes] {
        let encoded = tokenizer.encode(text);
        assert!(encoded.iter().all(|&id| usize::from(id) < tokenizer.vocab()));
        assert_eq!(tokenizer.text(&encoded), text);
    }
    Ok(())
}

fn texts() -> Vec<Vec<u8>> {
    let texts = ["It's 7 o'clock, they'll say: <|endoftext|>", "né 日本 \u{1f642}\n\n\t  x", "\u{a0}\u{2028} \r\n"];
    texts.map(|text| text.as_bytes().to_vec()).into()
}
