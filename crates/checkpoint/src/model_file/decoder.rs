//! safetensors files of any decoder.
//!
//! The tensors have llm.c's names and are (layers, rows, columns), in [`Params::file_order`](model::Params::file_order). The metadata
//! entry `descriptor` has the model's [`Descriptor`] as JSON.

use super::Header;
use crate::tensors::{FileShape, Order};
use anyhow::{Context, Result, ensure};
use engine::tensor::DType;
use model::{Descriptor, Param};
use serde_json::{Map, Value, json};
use std::io::Write;
use system::fs::File;

/// Key of the descriptor in the metadata.
const DESCRIPTOR: &str = "descriptor";
const METADATA: &str = "__metadata__";

/// Limit of the format for the header.
const MAX_HEADER_BYTES: u64 = 100_000_000;

const fn dtype_name(dtype: DType) -> &'static str {
    match dtype {
        DType::Bf16 => "BF16",
        DType::F32 | DType::I32 | DType::U16 | DType::Fp8 | DType::Block8 { .. } => "F32",
    }
}

/// Reports whether a file begins like a safetensors file: a length of the header below its limit, and a brace.
pub(super) fn begins(file: &File) -> bool {
    let mut start = [0; 9];
    let length = |start: [u8; 9]| u64::from_le_bytes(start[..8].try_into().expect("eight bytes"));
    file.read_exact_at(&mut start, 0).is_ok() && start[8] == b'{' && length(start) <= MAX_HEADER_BYTES
}

pub(super) fn read_header(file: &File, size: u64) -> Result<Header> {
    let mut length = [0; 8];
    file.read_exact_at(&mut length, 0)?;
    let length = u64::from_le_bytes(length);
    ensure!(length <= size - 8, "truncated: expected a header of {length} bytes, found {}", size - 8);
    let mut header = vec![0; length as usize];
    file.read_exact_at(&mut header, 8)?;
    let found: Map<String, Value> = serde_json::from_slice(&header).context("header: expected a JSON object")?;
    let descriptor = found.get(METADATA).and_then(|metadata| metadata.get(DESCRIPTOR)).and_then(Value::as_str);
    let descriptor = descriptor.context(
        "expected a model file of llm-rs, found another safetensors file; pass the Hugging Face directory that contains it",
    )?;
    let descriptor: Descriptor = serde_json::from_str(descriptor).context("header: descriptor")?;
    let descriptor = descriptor.checked().context("header: descriptor")?;
    let first = descriptor.params().next().map_or("", Param::name);
    let dtype = match found.get(first).and_then(|tensor| tensor.get("dtype")).and_then(Value::as_str) {
        Some("F32") => DType::F32,
        Some("BF16") => DType::Bf16,
        other => anyhow::bail!("header: {first}: expected F32 or BF16, found {}", other.unwrap_or("none")),
    };
    // The tensors are those of the descriptor, in its order, so the header must be the one that this program writes.
    let expected = entries(&descriptor, dtype)?;
    for (name, value) in expected.iter().filter(|(name, _)| *name != METADATA) {
        let tensor = found.get(name);
        ensure!(
            tensor == Some(value),
            "header: tensor {name}: expected {value}, found {}",
            tensor.map_or_else(|| "none".to_owned(), ToString::to_string)
        );
    }
    let unknown = found.keys().find(|name| !expected.contains_key(*name));
    ensure!(unknown.is_none(), "header: expected only the model's tensors, found {}", unknown.map_or("", |name| name));
    let shape = FileShape { descriptor, padded_vocab: descriptor.padded_vocab(), order: Order::Params };
    Ok(Header { shape, dtype, tensors_at: 8 + length })
}

/// Returns the entries of the header.
fn entries(descriptor: &Descriptor, dtype: DType) -> Result<Map<String, Value>> {
    let mut entries = Map::new();
    let metadata = json!({ "format": "llm.rs", DESCRIPTOR: serde_json::to_string(descriptor)? });
    entries.insert(METADATA.to_owned(), metadata);
    let mut at = 0;
    for param in descriptor.params() {
        let (rows, columns) = param.shape(descriptor);
        let mut shape = if param.is_matrix() { vec![rows, columns] } else { vec![columns] };
        if param.layered() {
            shape.insert(0, param.layers(descriptor).count());
        }
        let end = at + shape.iter().product::<usize>() * dtype.bytes();
        entries.insert(
            param.name().to_owned(),
            json!({ "dtype": dtype_name(dtype), "shape": shape, "data_offsets": [at, end] }),
        );
        at = end;
    }
    Ok(entries)
}

/// Writes the header. All tensors must follow in the order of [`Params::file_order`](model::Params::file_order), with the
/// vocabulary padded to [`Descriptor::padded_vocab`] rows.
pub fn write_header(out: &mut impl Write, descriptor: Descriptor, dtype: DType) -> Result<()> {
    let mut text = serde_json::to_vec(&entries(&descriptor, dtype)?)?;
    // Spaces align the data to 8 bytes, as the format recommends.
    text.resize(text.len().next_multiple_of(8), b' ');
    out.write_all(&(text.len() as u64).to_le_bytes())?;
    Ok(out.write_all(&text)?)
}
