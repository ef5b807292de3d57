//! Files with named tensors. The data of a tensor stays in the file until a caller reads it.

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// A tensor in a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorInfo {
    /// Element type, such as `F32`.
    pub dtype: String,
    /// Extent of each dimension.
    pub shape: Vec<u64>,
    /// First byte of the data, and the byte after the last one, relative to the first byte of all data.
    pub data_offsets: (u64, u64),
}

impl TensorInfo {
    /// Describes type and shape: `F32 [3, 4]`.
    pub fn describe(&self) -> String {
        format!("{} {:?}", self.dtype, self.shape)
    }
}

/// An open file with a checked list of tensors.
#[derive(Debug)]
pub struct TensorFile {
    pub(crate) path: PathBuf,
    pub(crate) file: File,
    /// Position of the first byte of all data.
    pub(crate) data_at: u64,
    pub(crate) tensors: BTreeMap<String, TensorInfo>,
}

impl TensorFile {
    /// Returns the path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns all tensors by name.
    pub fn tensors(&self) -> &BTreeMap<String, TensorInfo> {
        &self.tensors
    }

    /// Reads part of the data of a tensor, which begins `start` bytes into it.
    pub fn read(&self, tensor: &TensorInfo, start: u64, out: &mut [u8]) -> Result<()> {
        let at = self.data_at + tensor.data_offsets.0 + start;
        self.file.read_exact_at(out, at).with_context(|| format!("cannot read {}", self.path.display()))
    }
}
