//! Safetensors files: a header that lists tensors, and their data.
//!
//! A file consists of the length of the header (u64), the header (JSON), and the data of all tensors without gaps. The
//! `safetensors` crate reads only from memory, and its errors do not name the tensor. This reader leaves the data in the file
//! and uses `pread`, so a file that is truncated meanwhile is an error.

use crate::element::{Element, NewTensor};
use crate::entries::Entries;
use crate::tensor_file::{TensorFile, TensorInfo};
use anyhow::{Context, Result, ensure};
use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Limit of the format for the header.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// Key of the header that is not a tensor.
const METADATA: &str = "__metadata__";

/// The beginning of a file that Git stores in place of a large one: `version https://git-lfs…`.
const GIT_LFS: &[u8; 8] = b"version ";

/// Opens a file, and checks its header and its size.
pub fn open(path: &Path) -> Result<TensorFile> {
    let name = path.display();
    let file = bounded_file::open(path).with_context(|| format!("cannot open {name}"))?;
    let size = file.metadata().with_context(|| format!("cannot read {name}"))?.len();
    let (data_at, tensors) = read_header(&file, size).with_context(|| name.to_string())?;
    Ok(TensorFile { path: path.to_owned(), file, data_at, tensors })
}

/// Returns the position of the data and the tensors.
fn read_header(file: &File, size: u64) -> Result<(u64, BTreeMap<String, TensorInfo>)> {
    ensure!(size >= 8, "not a safetensors file: expected at least 8 bytes, found {size}; download it again");
    let mut length = [0; 8];
    file.read_exact_at(&mut length, 0)?;
    ensure!(
        length != *GIT_LFS,
        "not a safetensors file: expected its contents, found a pointer of Git LFS; run `git lfs pull` in the directory"
    );
    let length = u64::from_le_bytes(length);
    let most = MAX_HEADER_BYTES.min(size - 8);
    ensure!(
        length <= most,
        "not a safetensors file: expected a header of at most {most} bytes, found {length}; download it again"
    );
    let mut header = vec![0; length as usize];
    file.read_exact_at(&mut header, 8)?;
    let header: Entries<Value> = serde_json::from_slice(&header).context("header: expected a JSON object")?;
    let header = header.distinct().context("header: tensor")?;
    let mut tensors = BTreeMap::new();
    for (name, value) in header.into_iter().filter(|(name, _)| name != METADATA) {
        let info: TensorInfo = serde_json::from_value(value).with_context(|| format!("header: tensor {name}"))?;
        tensors.insert(name, info);
    }
    check_offsets(&tensors, size - 8 - length)?;
    Ok((8 + length, tensors))
}

/// Checks that the tensors cover `bytes` bytes of data without gaps, and that sizes of known types match their shapes.
fn check_offsets(tensors: &BTreeMap<String, TensorInfo>, bytes: u64) -> Result<()> {
    let mut in_order: Vec<_> = tensors.iter().collect();
    in_order.sort_by_key(|(_, info)| info.data_offsets);
    let mut end = 0;
    for (name, info) in in_order {
        let (start, stop) = info.data_offsets;
        ensure!(
            start == end && stop >= start,
            "tensor {name}: expected data that begins at byte {end}, found {start}..{stop}"
        );
        end = stop;
        let elements = info.shape.iter().try_fold(1u64, |product, &extent| product.checked_mul(extent));
        let Some(element) = Element::named(&info.dtype) else { continue };
        let expected = elements.and_then(|elements| elements.checked_mul(element.bytes() as u64));
        ensure!(
            expected == Some(stop - start),
            "tensor {name}: expected {} bytes for {}, found {}",
            expected.map_or("a smaller number of".to_owned(), |bytes| bytes.to_string()),
            info.describe(),
            stop - start
        );
    }
    ensure!(
        end == bytes,
        "{}: expected {end} bytes of data as in the header, found {bytes}; download the file again",
        if bytes < end { "truncated" } else { "too long" }
    );
    Ok(())
}

/// The value of a key of the header.
#[derive(Serialize)]
#[serde(untagged)]
enum Entry {
    Tensor(TensorInfo),
    Metadata(BTreeMap<&'static str, &'static str>),
}

/// Writes the header of a file. The data of `tensors`, which are sorted by name and have one type, must follow in this order.
///
/// The header has the bytes of the Python library's `safetensors.torch.save_file`, as transformers calls it.
pub fn write_header(out: &mut impl Write, tensors: &[NewTensor]) -> Result<()> {
    debug_assert!(tensors.is_sorted_by(|a, b| a.name < b.name && a.element == b.element));
    let metadata = Entry::Metadata([("format", "pt")].into());
    let mut header = BTreeMap::from([(METADATA, metadata)]);
    let mut start = 0;
    for tensor in tensors {
        let stop = start + tensor.bytes();
        let shape = tensor.shape.iter().map(|&extent| extent as u64).collect();
        let info = TensorInfo { dtype: tensor.element.name().to_owned(), shape, data_offsets: (start, stop) };
        header.insert(&tensor.name, Entry::Tensor(info));
        start = stop;
    }
    let mut text = serde_json::to_vec(&header)?;
    text.resize(text.len().next_multiple_of(8), b' ');
    out.write_all(&(text.len() as u64).to_le_bytes())?;
    Ok(out.write_all(&text)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use safetensors::tensor::{Dtype, TensorView, serialize};
    use std::collections::HashMap;
    use std::fs;
    use std::ops::Range;

    fn file(header: &str, data: &[u8]) -> Vec<u8> {
        [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat()
    }

    fn open(bytes: &[u8]) -> Result<TensorFile> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("model.safetensors");
        fs::write(&path, bytes).unwrap();
        super::open(&path)
    }

    #[test]
    fn files_of_the_safetensors_crate_are_read_and_written_alike() {
        let data: Vec<u8> = (0..40).collect();
        let view =
            |shape: &[usize], range: Range<usize>| TensorView::new(Dtype::F32, shape.to_vec(), &data[range]).unwrap();
        let tensors = [("b", view(&[2, 3], 8..32)), ("a", view(&[2], 0..8)), ("c.10", view(&[1, 1, 2], 32..40))];
        let metadata = Some(HashMap::from([("format".to_owned(), "pt".to_owned())]));
        let expected = serialize(tensors, metadata).unwrap();
        let opened = open(&expected).unwrap();
        assert_eq!(opened.tensors().keys().collect::<Vec<_>>(), ["a", "b", "c.10"]);
        let b = &opened.tensors()["b"];
        assert_eq!((b.describe(), b.data_offsets), ("F32 [2, 3]".to_owned(), (8, 32)));
        let mut bytes = [0; 4];
        opened.read(b, 20, &mut bytes).unwrap();
        assert_eq!(bytes, [28, 29, 30, 31]);

        let new =
            |name: &str, shape: &[usize]| NewTensor { name: name.into(), shape: shape.into(), element: Element::F32 };
        let mut written = Vec::new();
        write_header(&mut written, &[new("a", &[2]), new("b", &[2, 3]), new("c.10", &[1, 1, 2])]).unwrap();
        written.extend(&data);
        assert_eq!(written, expected);
    }

    #[test]
    fn invalid_files_are_rejected_with_their_name_and_the_tensor() {
        let tensor = |dtype: &str, shape: &str, range: &str| {
            format!(r#"{{"x": {{"dtype": "{dtype}", "shape": {shape}, "data_offsets": {range}}}}}"#)
        };
        let two = r#"{"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
            "y": {"dtype": "F32", "shape": [1], "data_offsets": [2, 6]}}"#;
        for (bytes, expected) in [
            (Vec::new(), "not a safetensors file: expected at least 8 bytes, found 0"),
            (vec![1; 7], "expected at least 8 bytes, found 7"),
            (vec![9, 0, 0, 0, 0, 0, 0, 0, b'{', b'}'], "expected a header of at most 2 bytes, found 9"),
            (vec![0xff; 100], "expected a header of at most 92 bytes, found 18446744073709551615"),
            (file("", &[]), "header: expected a JSON object"),
            (file("[]", &[]), "header: expected a JSON object"),
            (file(r#"{"x": 1}"#, &[]), "header: tensor x: invalid type"),
            (file(r#"{"x": {"dtype": "F32", "shape": [1]}}"#, &[]), "header: tensor x: missing field `data_offsets`"),
            (file(&tensor("F32", "[-1]", "[0, 4]"), &[0; 4]), "header: tensor x: invalid value"),
            (file(&tensor("F32", "[2]", "[0, 4]"), &[0; 4]), "tensor x: expected 8 bytes for F32 [2], found 4"),
            (
                file(&tensor("BF16", "[4294967296, 4294967296]", "[0, 4]"), &[0; 4]),
                "tensor x: expected a smaller number of bytes for BF16 [4294967296, 4294967296], found 4",
            ),
            (
                file(&tensor("F32", "[1]", "[4, 0]"), &[0; 4]),
                "tensor x: expected data that begins at byte 0, found 4..0",
            ),
            (
                file(&tensor("F32", "[1]", "[4, 8]"), &[0; 8]),
                "tensor x: expected data that begins at byte 0, found 4..8",
            ),
            (file(two, &[0; 6]), "tensor y: expected data that begins at byte 4, found 2..6"),
            (
                file(&tensor("F32", "[2]", "[0, 8]"), &[0; 7]),
                "truncated: expected 8 bytes of data as in the header, found 7",
            ),
            (
                file(&tensor("F32", "[1]", "[0, 4]"), &[0; 5]),
                "too long: expected 4 bytes of data as in the header, found 5",
            ),
            (file("{}", &[0]), "too long: expected 0 bytes"),
            (
                file(
                    r#"{"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
                    "x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}"#,
                    &[0; 4],
                ),
                "header: tensor: x: expected one entry, found two",
            ),
            (
                b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n".to_vec(),
                "expected its contents, found a pointer of Git LFS; run `git lfs pull`",
            ),
        ] {
            let message = format!("{:#}", open(&bytes).unwrap_err());
            assert!(message.contains("model.safetensors: ") && message.contains(expected), "{expected}: {message}");
        }
        // The size of types that this program does not read is not checked.
        let other = open(&file(&tensor("F8_E4M3", "[3]", "[0, 3]"), &[0; 3])).unwrap();
        assert_eq!(other.tensors()["x"].describe(), "F8_E4M3 [3]");
    }

    #[test]
    fn a_file_truncated_after_opening_is_an_error() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("model.safetensors");
        fs::write(&path, file(r#"{"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}"#, &[0; 8])).unwrap();
        let opened = super::open(&path).unwrap();
        fs::write(&path, [0; 4]).unwrap();
        let message = format!("{:#}", opened.read(&opened.tensors()["x"], 0, &mut [0; 8]).unwrap_err());
        assert!(message.contains("cannot read ") && message.contains("model.safetensors"), "{message}");
    }
}
