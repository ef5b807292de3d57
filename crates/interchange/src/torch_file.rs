//! Files of `torch.save`: a ZIP archive with a pickle that describes tensors, and an uncompressed file for the elements of each.
//!
//! The pickle is read without running code, which `torch.load` does only with `weights_only=True`.

use crate::tensor_file::{TensorFile, TensorInfo};
use anyhow::{Context, Result, bail, ensure};
use pickle::{Pickle, Value};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufReader, Read};
use std::ops::Range;
use std::path::Path;
use zip::{CompressionMethod, ZipArchive};

/// The end of the name of the pickle, which follows the name of the archive.
const PICKLE: &str = "/data.pkl";

/// Limit of the pickle, which has about 300 bytes for each tensor.
const MAX_PICKLE_BYTES: u64 = 100_000_000;

/// Types of storages: their classes in `torch`, names in safetensors files, and bytes of an element.
const STORAGES: [(&str, &str, u64); 10] = [
    ("FloatStorage", "F32", 4),
    ("BFloat16Storage", "BF16", 2),
    ("HalfStorage", "F16", 2),
    ("DoubleStorage", "F64", 8),
    ("LongStorage", "I64", 8),
    ("IntStorage", "I32", 4),
    ("ShortStorage", "I16", 2),
    ("CharStorage", "I8", 1),
    ("ByteStorage", "U8", 1),
    ("BoolStorage", "BOOL", 1),
];

/// The elements of tensors in the archive.
type Storages = BTreeMap<String, Range<u64>>;

/// Opens a file that contains a dictionary of tensors.
pub fn open(path: &Path) -> Result<TensorFile> {
    let name = path.display();
    let file = bounded_file::open(path).with_context(|| format!("cannot open {name}"))?;
    let tensors = read_tensors(&file).with_context(|| name.to_string())?;
    Ok(TensorFile { path: path.to_owned(), file, data_at: 0, tensors })
}

fn read_tensors(file: &File) -> Result<BTreeMap<String, TensorInfo>> {
    let mut archive = ZipArchive::new(BufReader::new(file)).context(
        "expected a file of torch.save, which is a ZIP archive, found another or a truncated file; download it again, or load a file \
         of a version of PyTorch before 1.6 and save it again",
    )?;
    let (mut storages, mut pickle) = (Storages::new(), None);
    for index in 0..archive.len() {
        let mut entry = archive.by_index(index)?;
        let name = entry.name()?.into_owned();
        if name.ends_with(PICKLE) {
            ensure!(
                entry.size() <= MAX_PICKLE_BYTES,
                "{name}: expected at most {MAX_PICKLE_BYTES} bytes, found {}",
                entry.size()
            );
            let mut bytes = Vec::new();
            entry.by_ref().take(MAX_PICKLE_BYTES).read_to_end(&mut bytes).with_context(|| name.clone())?;
            pickle = Some(Pickle::read(&bytes).with_context(|| name)?);
        } else if let Some((_, key)) = name.split_once("/data/") {
            ensure!(
                entry.compression() == CompressionMethod::Stored,
                "{name}: expected uncompressed data, as torch.save writes it, found {}",
                entry.compression()
            );
            let start = entry.data_start().with_context(|| format!("{name}: expected data, found none"))?;
            storages.insert(key.to_owned(), start..start + entry.size());
        }
    }
    let pickle = pickle.with_context(|| format!("expected an entry that ends with {PICKLE}, found none"))?;
    let entries = pickle.root().entries().context("expected a dictionary of tensors, found another value")?;
    let mut tensors = BTreeMap::new();
    for [key, value] in entries {
        let key = key.text().context("expected a dictionary of tensors, found a key that is not text")?;
        let tensor = tensor(value, &storages).with_context(|| format!("tensor {key}"))?;
        ensure!(tensors.insert(key.to_owned(), tensor).is_none(), "tensor {key}: expected one, found two");
    }
    Ok(tensors)
}

/// Returns the place of a tensor, which PyTorch rebuilds from its storage, the offset in it, the extents and the strides.
fn tensor(value: Value<'_>, storages: &Storages) -> Result<TensorInfo> {
    let (function, arguments) = value.call().context("expected a tensor, found another value")?;
    match (function, &arguments[..]) {
        ("torch._utils._rebuild_parameter", &[data, ..]) => tensor(data, storages),
        ("torch._utils._rebuild_tensor_v2", &[storage, offset, size, stride, ..]) => {
            let (dtype, bytes, range) = storage_of(storage, storages).context("expected a storage of PyTorch")?;
            let numbers = |value: Value<'_>| -> Option<Vec<u64>> {
                value.elements()?.into_iter().map(|value| u64::try_from(value.int()?).ok()).collect()
            };
            let shape = numbers(size).context("expected the extents of the dimensions, found another value")?;
            let stride = numbers(stride).context("expected the strides of the dimensions, found another value")?;
            ensure!(
                is_contiguous(&shape, &stride),
                "expected contiguous elements, found {shape:?} with strides {stride:?}; save .contiguous()"
            );
            let elements = shape.iter().try_fold(bytes, |product, &extent| product.checked_mul(extent));
            let start = offset
                .int()
                .and_then(|offset| u64::try_from(offset).ok()?.checked_mul(bytes)?.checked_add(range.start));
            let end = start.zip(elements).and_then(|(start, length)| start.checked_add(length));
            let (Some(start), Some(end)) = (start, end.filter(|&end| end <= range.end)) else {
                bail!(
                    "expected {dtype} {shape:?} in its storage of {} bytes, which is shorter; download the file again",
                    range.end - range.start
                );
            };
            Ok(TensorInfo { dtype: dtype.to_owned(), shape, data_offsets: (start, end) })
        }
        (other, _) => bail!("expected a tensor, found the result of {other}"),
    }
}

/// Returns the type, the bytes of an element, and the place of a storage.
fn storage_of(storage: Value<'_>, storages: &Storages) -> Option<(&'static str, u64, Range<u64>)> {
    let parts = storage.persistent()?.elements()?;
    let [_, class, key, ..] = &parts[..] else { return None };
    let class = class.global()?.strip_prefix("torch.")?;
    let (_, dtype, bytes) = STORAGES.into_iter().find(|(name, ..)| *name == class)?;
    Some((dtype, bytes, storages.get(key.text()?)?.clone()))
}

/// Returns whether the elements follow each other in the order of their indices.
fn is_contiguous(shape: &[u64], stride: &[u64]) -> bool {
    let mut expected = 1u64;
    let follows = |(&extent, &stride): (&u64, &u64)| {
        let matches = stride == expected || extent == 1;
        expected = expected.saturating_mul(extent);
        matches
    };
    shape.len() == stride.len() && shape.iter().zip(stride).rev().all(follows)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::io::{Cursor, Write};
    use zip::ZipWriter;
    use zip::write::SimpleFileOptions;

    /// Returns an archive of `torch.save` with these files.
    fn archive(files: &[(&str, &[u8])]) -> Vec<u8> {
        let mut writer = ZipWriter::new(Cursor::new(Vec::new()));
        let stored = SimpleFileOptions::default().compression_method(CompressionMethod::Stored);
        for (name, bytes) in files {
            writer.start_file(format!("model/{name}"), stored).unwrap();
            writer.write_all(bytes).unwrap();
        }
        writer.finish().unwrap().into_inner()
    }

    fn open(bytes: &[u8]) -> Result<TensorFile> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("model_000000.pt");
        fs::write(&path, bytes).unwrap();
        super::open(&path)
    }

    /// Returns the pickle of `{"x": tensor}` as PyTorch writes it, with the extents and strides of two dimensions.
    fn pickle(class: &str, offset: u8, shape: [u8; 2], stride: [u8; 2]) -> Vec<u8> {
        let text = |text: &str| [&b"X"[..], &(text.len() as u32).to_le_bytes(), text.as_bytes()].concat();
        let pair = |[a, b]: [u8; 2]| vec![b'K', a, b'K', b, 0x86];
        [
            b"\x80\x02}".to_vec(),
            text("x"),
            b"ctorch._utils\n_rebuild_tensor_v2\n((".to_vec(),
            text("storage"),
            format!("ctorch\n{class}\n").into_bytes(),
            text("0"),
            text("cpu"),
            b"K\x06tQ".to_vec(),
            vec![b'K', offset],
            pair(shape),
            pair(stride),
            b"\x89ccollections\nOrderedDict\n)RtRs.".to_vec(),
        ]
        .concat()
    }

    #[test]
    fn tensors_lie_where_the_archive_has_their_storages() {
        let data: Vec<u8> = (0..24).collect();
        let pickle = pickle("FloatStorage", 2, [2, 2], [2, 1]);
        let file = open(&archive(&[("data.pkl", &pickle), ("byteorder", b"little"), ("data/0", &data)])).unwrap();
        let tensor = &file.tensors()["x"];
        assert_eq!(tensor.describe(), "F32 [2, 2]");
        let mut found = [0; 16];
        file.read(tensor, 0, &mut found).unwrap();
        assert_eq!(found, data[8..]);
    }

    #[test]
    fn damaged_and_unusual_files_are_errors() {
        let of = |pickle: &[u8]| archive(&[("data.pkl", pickle), ("data/0", &[0; 24])]);
        let good = pickle("FloatStorage", 0, [2, 3], [3, 1]);
        for (bytes, expected) in [
            (Vec::new(), "expected a file of torch.save, which is a ZIP archive"),
            (of(&good)[..100].to_vec(), "expected a file of torch.save"),
            (archive(&[("data/0", &[0; 24])]), "expected an entry that ends with /data.pkl, found none"),
            (archive(&[("data.pkl", &good)]), "tensor x: expected a storage of PyTorch"),
            (of(&pickle("OtherStorage", 0, [2, 3], [3, 1])), "tensor x: expected a storage of PyTorch"),
            (
                of(&pickle("FloatStorage", 1, [2, 3], [3, 1])),
                "tensor x: expected F32 [2, 3] in its storage of 24 bytes",
            ),
            (of(&pickle("FloatStorage", 0, [2, 3], [1, 2])), "with strides [1, 2]; save .contiguous()"),
            (of(b"\x80\x02]."), "expected a dictionary of tensors, found another value"),
            (of(b"\x80\x02}X\x01\x00\x00\x00xK\x01s."), "tensor x: expected a tensor, found another value"),
            (
                of(b"\x80\x02}X\x01\x00\x00\x00xcos\nsystem\nX\x02\x00\x00\x00ls\x85Rs."),
                "tensor x: expected a tensor, found the result of os.system",
            ),
            (of(b"\x80\x02}"), "data.pkl: not a pickle that llm-rs reads: byte 3"),
        ] {
            let message = format!("{:#}", open(&bytes).unwrap_err());
            assert!(message.contains("model_000000.pt: ") && message.contains(expected), "{expected}: {message}");
        }
    }
}
