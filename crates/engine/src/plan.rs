//! The memory plan of a run: every buffer of the arena, laid out before anything is allocated.

use crate::tensor::{DType, Tensor};
use std::fmt;
use std::sync::{Arc, LazyLock};

/// The purpose of a buffer. Printed tables have a subtotal for each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Group {
    /// Parameters of the model.
    Parameters,
    /// Gradients of the parameters.
    Gradients,
    /// Optimizer state: AdamW's m and v, and master weights.
    Optimizer,
    /// Values that the forward pass keeps for the backward pass.
    Activations,
    /// Temporary buffers of operations.
    Workspace,
    /// Tokens and targets.
    Batch,
}

impl Group {
    const ALL: [Self; 6] =
        [Self::Parameters, Self::Gradients, Self::Optimizer, Self::Activations, Self::Workspace, Self::Batch];
}

/// The memory that holds a buffer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Location {
    /// The engine's memory: on a GPU, that of the GPU.
    #[default]
    Device,
    /// Memory of the host that the GPU reads and writes over PCIe.
    Host,
}

/// The offset of the first buffer in the host's memory.
pub const HOST_OFFSET: usize = 1 << 63;

/// One named buffer of the arena.
#[derive(Clone, Debug)]
pub struct Entry {
    /// Name in the printed table.
    pub name: String,
    /// Extent of each dimension.
    pub shape: Vec<usize>,
    /// Place and storage type.
    pub tensor: Tensor,
}

/// A requested buffer: name, shape and storage type.
pub type Wanted<'a> = (&'a str, &'a [usize], DType);

/// Returns the bytes of these buffers as one phase of [`Plan::share`].
pub fn bytes(buffers: &[Wanted]) -> usize {
    let place = |end: usize, &(_, shape, dtype): &Wanted| {
        end.next_multiple_of(ALIGNMENT) + shape.iter().product::<usize>() * dtype.bytes()
    };
    buffers.iter().fold(0, place)
}

/// Memory for one buffer, or for several that are never in use at the same time.
#[derive(Clone, Debug)]
pub struct Block {
    /// Purpose of the memory.
    pub group: Group,
    /// Offset in the arena, in bytes: at least [`HOST_OFFSET`] in the host's memory.
    pub offset: usize,
    /// Size in bytes.
    pub bytes: usize,
    /// The buffers.
    pub entries: Vec<Entry>,
    /// Whether entries overlap. The phases of a step use them one after another.
    pub shared: bool,
}

impl Block {
    /// Reports whether the block is in the host's memory.
    pub fn is_on_host(&self) -> bool {
        self.offset >= HOST_OFFSET
    }

    /// Returns the names of the entries, separated by bars.
    pub fn name(&self) -> String {
        self.entries.iter().map(|entry| entry.name.as_str()).collect::<Vec<_>>().join(" | ")
    }
}

/// Every buffer of a run, laid out one after another in one arena for each [`Location`].
#[derive(Clone, Debug, Default)]
pub struct Plan {
    /// In ascending order of their offsets.
    blocks: Vec<Block>,
    bytes: usize,
    host_bytes: usize,
    constants: Vec<Constant>,
}

/// A buffer with fixed values.
#[derive(Clone, Debug)]
pub struct Constant {
    /// The buffer.
    pub tensor: Tensor,
    values: Arc<LazyLock<Arc<[f32]>, Compute>>,
}

/// Computes the values of a constant.
type Compute = Box<dyn FnOnce() -> Arc<[f32]> + Send>;

impl Constant {
    /// Returns the values. They are computed at the first call.
    pub fn values(&self) -> &[f32] {
        &self.values
    }
}

/// Alignment of buffers in bytes. It satisfies vector loads, TMA and cuBLASLt.
const ALIGNMENT: usize = 1024;

impl Plan {
    /// Creates an empty plan.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a buffer of the given shape and returns its handle.
    pub fn add(&mut self, group: Group, name: impl Into<String>, shape: &[usize], dtype: DType) -> Tensor {
        self.add_in(Location::Device, group, name, shape, dtype)
    }

    /// Adds a buffer in this memory and returns its handle.
    pub fn add_in(
        &mut self,
        location: Location,
        group: Group,
        name: impl Into<String>,
        shape: &[usize],
        dtype: DType,
    ) -> Tensor {
        let offset = match location {
            Location::Device => self.bytes,
            Location::Host => HOST_OFFSET + self.host_bytes,
        };
        let tensor = Tensor { offset, len: shape.iter().product(), dtype };
        let entry = Entry { name: name.into(), shape: shape.to_vec(), tensor };
        self.push(Block { group, offset, bytes: tensor.bytes(), entries: vec![entry], shared: false });
        tensor
    }

    /// Adds an f32 buffer that has these values from its allocation on. No operation may change it. The values are computed when
    /// they are needed, so that a plan that is only measured costs nothing.
    pub fn add_constant(
        &mut self,
        name: impl Into<String>,
        shape: &[usize],
        values: impl FnOnce() -> Arc<[f32]> + Send + 'static,
    ) -> Tensor {
        let tensor = self.add(Group::Workspace, name, shape, DType::F32);
        let values: Compute = Box::new(values);
        self.constants.push(Constant { tensor, values: Arc::new(LazyLock::new(values)) });
        tensor
    }

    /// Returns the constants.
    pub fn constants(&self) -> &[Constant] {
        &self.constants
    }

    /// Adds memory that the phases of a step use one after another, sized for the largest phase.
    ///
    /// The buffers of one phase do not overlap. Writing the buffers of a phase overwrites those of the other phases.
    pub fn share<const N: usize>(&mut self, group: Group, phases: [&[Wanted]; N]) -> [Vec<Tensor>; N] {
        let (start, mut end, mut entries) = (self.bytes, self.bytes, Vec::new());
        let tensors = phases.map(|buffers| {
            let mut offset = start;
            let mut place = |&(name, shape, dtype): &Wanted| {
                let tensor = Tensor { offset, len: shape.iter().product(), dtype };
                end = end.max(offset + tensor.bytes());
                offset += tensor.bytes().next_multiple_of(ALIGNMENT);
                entries.push(Entry { name: name.to_owned(), shape: shape.to_vec(), tensor });
                tensor
            };
            buffers.iter().map(&mut place).collect()
        });
        self.push(Block { group, offset: start, bytes: end - start, entries, shared: true });
        tensors
    }

    fn push(&mut self, block: Block) {
        let end = if block.is_on_host() { &mut self.host_bytes } else { &mut self.bytes };
        *end += block.bytes.next_multiple_of(ALIGNMENT);
        let at = self.blocks.partition_point(|other| other.offset <= block.offset);
        self.blocks.insert(at, block);
    }

    /// Returns the size of the buffers in the engine's memory, in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the size of the buffers in the host's memory, in bytes.
    pub fn host_bytes(&self) -> usize {
        self.host_bytes
    }

    /// Returns the blocks in ascending order of their offsets.
    pub fn blocks(&self) -> &[Block] {
        &self.blocks
    }

    /// Returns the size of one group's buffers in the engine's memory, in bytes.
    pub fn group_bytes(&self, group: Group) -> usize {
        self.blocks.iter().filter(|block| block.group == group && !block.is_on_host()).map(|block| block.bytes).sum()
    }

    /// Returns a table with one row for each group and one for the total. `Display` lists every buffer.
    pub fn summary(&self) -> String {
        let row = |name: &str, bytes| format!("{name:<20} {:>9.1} MiB\n", mib(bytes));
        let groups = Group::ALL.map(|group| (format!("{group:?}").to_lowercase(), self.group_bytes(group)));
        let rows = groups.iter().filter(|(_, bytes)| *bytes > 0).map(|(name, bytes)| row(&format!("  {name}"), *bytes));
        let host = if self.host_bytes > 0 { row("  on the host", self.host_bytes) } else { String::new() };
        format!("memory\n{}{}{host}", rows.collect::<String>(), row("  total", self.bytes))
    }
}

fn mib(bytes: usize) -> f64 {
    bytes as f64 / (1 << 20) as f64
}

impl Entry {
    fn row(&self, indent: usize) -> String {
        let Self { name, shape, tensor } = self;
        let name = if tensor.offset >= HOST_OFFSET { &format!("{name} on host") } else { name };
        let shape = shape.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        let name = format!("{:indent$}{name}", "");
        let (shape, dtype) = (format!("({shape})"), tensor.dtype.name());
        format!("{name:<22} {shape:<28} {dtype:<4} {:>9.1} MiB", mib(tensor.bytes()))
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for group in Group::ALL {
            let of_group = self.blocks.iter().filter(|block| block.group == group);
            for (i, block) in of_group.enumerate() {
                if i == 0 {
                    writeln!(f, "{:<44} {:>21.1} MiB", format!("{group:?}"), mib(self.group_bytes(group)))?;
                }
                if block.shared {
                    writeln!(f, "  {:<54} {:>9.1} MiB", "shared by phases of a step", mib(block.bytes))?;
                }
                for entry in &block.entries {
                    writeln!(f, "{}", entry.row(if block.shared { 4 } else { 2 }))?;
                }
            }
        }
        write!(f, "{:<44} {:>21.1} MiB", "Total", mib(self.bytes))?;
        if self.host_bytes > 0 {
            write!(f, "\n{:<44} {:>21.1} MiB", "Total on the host", mib(self.host_bytes))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_of_different_phases_overlap_and_those_of_one_phase_do_not() {
        let mut plan = Plan::new();
        let before = plan.add(Group::Activations, "before", &[3], DType::F32);
        let [one, two] = plan.share(
            Group::Activations,
            [
                &[("a", &[2, 300], DType::F32), ("b", &[7], DType::Bf16)],
                &[("c", &[5], DType::I32), ("d", &[100], DType::F32)],
            ],
        );
        let after = plan.add(Group::Activations, "after", &[1], DType::F32);
        assert_eq!((before.offset, one[0].offset, two[0].offset), (0, 1024, 1024));
        // 2400 bytes of a, then b; 20 bytes of c, then d.
        assert_eq!((one[1].offset, two[1].offset), (1024 + 3072, 1024 + 1024));
        assert_eq!((after.offset, plan.bytes()), (1024 + 4096, 1024 + 4096 + 1024));
        let block = &plan.blocks()[1];
        assert_eq!((block.offset, block.bytes, block.shared), (1024, 3072 + 14, true));
        assert_eq!(block.name(), "a | b | c | d");
        assert_eq!(plan.group_bytes(Group::Activations), 12 + 3072 + 14 + 4);
        let text = plan.to_string();
        assert!(text.contains("\n  shared by phases of a step ") && text.contains("\n    a       "), "{text}");
        let width = text.lines().next().unwrap().len();
        assert!(text.lines().all(|line| line.len() == width), "{text}");
        let summary = plan.summary();
        assert!(summary.starts_with("memory\n  activations ") && !summary.contains("workspace"), "{summary}");
        assert!(summary.lines().count() == 3 && summary.ends_with(" MiB\n"), "{summary}");
    }
}
