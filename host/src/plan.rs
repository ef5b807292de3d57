//! What memory a run needs, decided before any of it is allocated.

use crate::tensor::{DType, Tensor};
use std::fmt;

/// What a buffer is for; the printed table sums over each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Group {
    Parameters,
    Gradients,
    Optimizer,
    Activations,
    Workspace,
    Batch,
}

impl Group {
    const ALL: [Self; 6] =
        [Self::Parameters, Self::Gradients, Self::Optimizer, Self::Activations, Self::Workspace, Self::Batch];
}

/// One named buffer of the arena.
#[derive(Clone, Debug)]
pub struct Entry {
    pub group: Group,
    pub name: String,
    pub shape: Vec<usize>,
    pub tensor: Tensor,
}

/// Every buffer of a run, laid out one after another in one arena.
#[derive(Clone, Debug, Default)]
pub struct Plan {
    entries: Vec<Entry>,
    bytes: usize,
}

/// Buffers begin at multiples of this, which suits vector loads, TMA and cuBLASLt.
const ALIGNMENT: usize = 1024;

impl Plan {
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a buffer of the given shape and returns its handle.
    pub fn add(&mut self, group: Group, name: impl Into<String>, shape: &[usize], dtype: DType) -> Tensor {
        let tensor = Tensor { offset: self.bytes, len: shape.iter().product(), dtype };
        self.bytes += tensor.bytes().next_multiple_of(ALIGNMENT);
        self.entries.push(Entry { group, name: name.into(), shape: shape.to_vec(), tensor });
        tensor
    }

    /// Size of the arena.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Bytes of the buffers of one group.
    pub fn group_bytes(&self, group: Group) -> usize {
        self.entries.iter().filter(|e| e.group == group).map(|e| e.tensor.bytes()).sum()
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = |bytes: usize| bytes as f64 / (1 << 20) as f64;
        for group in Group::ALL {
            let of_group = self.entries.iter().filter(|e| e.group == group);
            for (i, e) in of_group.enumerate() {
                if i == 0 {
                    writeln!(f, "{:<44} {:>21.1} MiB", format!("{group:?}"), mib(self.group_bytes(group)))?;
                }
                let shape = e.shape.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
                writeln!(
                    f,
                    "  {:<20} {:<28} {:<4} {:>9.1} MiB",
                    e.name,
                    format!("({shape})"),
                    e.tensor.dtype.name(),
                    mib(e.tensor.bytes())
                )?;
            }
        }
        write!(f, "{:<44} {:>21.1} MiB", "Total", mib(self.bytes))
    }
}
