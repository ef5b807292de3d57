//! The GGUF container, version 3: metadata, descriptions of tensors, and their data.
//!
//! No crate that writes it streams the tensors; the container is small enough to write here.

use crate::element::{Element, NewTensor};
use anyhow::Result;
use std::io::Write;

/// Data of tensors begins at multiples of this number of bytes.
const ALIGNMENT: u64 = 32;

/// A metadata value.
#[derive(Clone, Debug)]
pub enum Value {
    /// 32-bit unsigned integer
    U32(u32),
    /// 32-bit float
    F32(f32),
    /// Boolean
    Bool(bool),
    /// Text
    Text(String),
    /// Array of 32-bit integers
    I32s(Vec<i32>),
    /// Array of texts
    Texts(Vec<String>),
}

impl Value {
    const fn code(&self) -> u32 {
        match self {
            Self::U32(_) => 4,
            Self::F32(_) => 6,
            Self::Bool(_) => 7,
            Self::Text(_) => TEXT,
            Self::I32s(_) | Self::Texts(_) => 9,
        }
    }
}

const TEXT: u32 = 8;
const I32: u32 = 5;

const fn code(element: Element) -> u32 {
    match element {
        Element::F32 => 0,
        Element::F16 => 1,
        Element::Bf16 => 30,
    }
}

/// Writes everything before the data of the tensors. The data follows in the order of `tensors`, each with [`padding`].
pub fn write_header(out: &mut impl Write, metadata: &[(String, Value)], tensors: &[NewTensor]) -> Result<()> {
    let mut header = Vec::new();
    header.extend(b"GGUF");
    header.extend(3u32.to_le_bytes());
    header.extend((tensors.len() as u64).to_le_bytes());
    header.extend((metadata.len() as u64).to_le_bytes());
    for (key, value) in metadata {
        push_text(&mut header, key);
        header.extend(value.code().to_le_bytes());
        push_value(&mut header, value);
    }
    let mut offset = 0u64;
    for tensor in tensors {
        push_text(&mut header, &tensor.name);
        header.extend((tensor.shape.len() as u32).to_le_bytes());
        // GGUF lists the contiguous dimension first.
        header.extend(tensor.shape.iter().rev().flat_map(|&extent| (extent as u64).to_le_bytes()));
        header.extend(code(tensor.element).to_le_bytes());
        header.extend(offset.to_le_bytes());
        offset += tensor.bytes().next_multiple_of(ALIGNMENT);
    }
    header.resize(header.len().next_multiple_of(ALIGNMENT as usize), 0);
    Ok(out.write_all(&header)?)
}

/// Returns the zeros that follow the data of a tensor.
pub fn padding(tensor: &NewTensor) -> Vec<u8> {
    vec![0; (tensor.bytes().next_multiple_of(ALIGNMENT) - tensor.bytes()) as usize]
}

fn push_text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

fn push_value(out: &mut Vec<u8>, value: &Value) {
    match value {
        Value::U32(value) => out.extend(value.to_le_bytes()),
        Value::F32(value) => out.extend(value.to_le_bytes()),
        Value::Bool(value) => out.push((*value).into()),
        Value::Text(text) => push_text(out, text),
        Value::I32s(values) => {
            push_array_header(out, I32, values.len());
            out.extend(values.iter().flat_map(|value| value.to_le_bytes()));
        }
        Value::Texts(texts) => {
            push_array_header(out, TEXT, texts.len());
            for text in texts {
                push_text(out, text);
            }
        }
    }
}

fn push_array_header(out: &mut Vec<u8>, code: u32, len: usize) {
    out.extend(code.to_le_bytes());
    out.extend((len as u64).to_le_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_header_has_the_bytes_of_the_specification() {
        let metadata = [
            ("a".to_owned(), Value::U32(7)),
            ("b".to_owned(), Value::F32(1.0)),
            ("c".to_owned(), Value::Bool(true)),
            ("d".to_owned(), Value::Text("né".to_owned())),
            ("e".to_owned(), Value::I32s(vec![-1, 2])),
            ("f".to_owned(), Value::Texts(vec!["x".to_owned(), String::new()])),
        ];
        let tensor =
            |name: &str, shape: &[usize], element| NewTensor { name: name.to_owned(), shape: shape.to_vec(), element };
        let tensors = [tensor("t", &[3, 5], Element::Bf16), tensor("u", &[9], Element::F32)];
        let mut written = Vec::new();
        write_header(&mut written, &metadata, &tensors).unwrap();
        let mut expected = Vec::new();
        expected.extend(b"GGUF\x03\0\0\0\x02\0\0\0\0\0\0\0\x06\0\0\0\0\0\0\0");
        expected.extend(b"\x01\0\0\0\0\0\0\0a\x04\0\0\0\x07\0\0\0");
        expected.extend(b"\x01\0\0\0\0\0\0\0b\x06\0\0\0\0\0\x80\x3f");
        expected.extend(b"\x01\0\0\0\0\0\0\0c\x07\0\0\0\x01");
        expected.extend(b"\x01\0\0\0\0\0\0\0d\x08\0\0\0\x03\0\0\0\0\0\0\0n\xc3\xa9");
        expected.extend(b"\x01\0\0\0\0\0\0\0e\x09\0\0\0\x05\0\0\0\x02\0\0\0\0\0\0\0\xff\xff\xff\xff\x02\0\0\0");
        expected.extend(b"\x01\0\0\0\0\0\0\0f\x09\0\0\0\x08\0\0\0\x02\0\0\0\0\0\0\0");
        expected.extend(b"\x01\0\0\0\0\0\0\0x\0\0\0\0\0\0\0\0");
        // Dimensions are reversed. The 30 bytes of the first tensor are padded to 32.
        expected.extend(b"\x01\0\0\0\0\0\0\0t\x02\0\0\0\x05\0\0\0\0\0\0\0\x03\0\0\0\0\0\0\0\x1e\0\0\0\0\0\0\0\0\0\0\0");
        expected.extend(b"\x01\0\0\0\0\0\0\0u\x01\0\0\0\x09\0\0\0\0\0\0\0\0\0\0\0\x20\0\0\0\0\0\0\0");
        let unpadded = expected.len();
        expected.resize(unpadded.next_multiple_of(32), 0);
        assert_eq!(written, expected);
        assert!(unpadded < expected.len());
        assert_eq!(tensors.each_ref().map(|tensor| padding(tensor).len()), [2, 28]);
    }
}
