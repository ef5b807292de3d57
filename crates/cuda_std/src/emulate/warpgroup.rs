//! wgmma state of a warpgroup: the instructions that are not computed yet, and their accumulators.

use super::LANES;
use super::order::Clock;
use super::report::Site;
use crate::fp8::Fp8Format;
use std::collections::{BTreeMap, VecDeque};

/// Threads in a warpgroup.
pub const THREADS: usize = 128;
/// Rows of A and D.
pub const M: usize = 64;
/// Bytes of K in an instruction.
pub const K_BYTES: usize = 32;
/// Columns of A and rows of B in bf16.
pub const K: usize = Format::Bf16.k();
/// Signaling NaN in place of pending accumulators. The low bits hold the index of the source line of the first wgmma.
pub const PENDING: u32 = 0x7fad_c000;
pub const LINES: u32 = 1 << 12;
/// The bit of a NaN that arithmetic sets.
pub const QUIET: u32 = 1 << 22;

/// wgmma state of a warpgroup.
pub struct Warpgroup {
    /// Number of the oldest group that has not been computed.
    pub first: usize,
    /// The groups from that one on.
    pub groups: VecDeque<Group>,
    /// Pending sets of accumulators.
    pub accumulators: VecDeque<Accumulators>,
    /// Number of the first of these sets.
    pub first_accumulators: usize,
    pub threads: Vec<Thread>,
    pub waiting: Vec<usize>,
    /// Joined clocks of the computed groups.
    pub clock: Clock,
    /// The same up to each computed group, of the groups from number `first_clock` on.
    pub clocks: VecDeque<Clock>,
    pub first_clock: usize,
    /// Source lines of the wgmma instructions.
    pub lines: Vec<Site>,
}

#[derive(Clone, Default)]
pub struct Thread {
    /// Number of committed groups.
    pub groups: usize,
    /// Number of instructions in the open group.
    pub issued: usize,
    /// Number of groups that have been waited for.
    pub done: usize,
    /// Pending sets of accumulators: address and number.
    pub pending: Vec<(usize, usize)>,
    /// Number of the next set.
    pub next: usize,
    /// Number of `wgmma::fence` calls.
    pub fences: usize,
    /// For each accumulator address, the number of fences and the line when it was last completed.
    pub completed: BTreeMap<usize, (usize, Site)>,
    /// A operands loaded into registers since the last fence.
    pub loaded: Vec<([u32; 4], Site)>,
}

/// Instructions between two commits.
#[derive(Default)]
pub struct Group {
    pub instructions: Vec<Instruction>,
    /// Number of threads that have committed the group.
    pub committed: usize,
    pub clock: Clock,
}

/// One wgmma of the warpgroup.
pub struct Instruction {
    pub operands: Operands,
    /// Each thread's fragment of A, if A is in registers.
    pub a_registers: Vec<[u32; 4]>,
    /// Number of the set of accumulators.
    pub accumulators: usize,
    pub at: Site,
}

/// The type of an operand.
#[derive(Clone, Copy, PartialEq)]
pub enum Format {
    Bf16,
    Fp8(Fp8Format),
}

impl Format {
    pub const fn bytes(self) -> usize {
        match self {
            Self::Bf16 => 2,
            Self::Fp8(_) => 1,
        }
    }

    /// Returns the columns of A and rows of B.
    pub const fn k(self) -> usize {
        K_BYTES / self.bytes()
    }

    /// Appends the elements that `bytes` holds to `values`.
    pub fn decode(self, bytes: &[u8], values: &mut Vec<f32>) {
        let bf16 = |pair: &[u8]| f32::from_bits(u32::from(u16::from_le_bytes([pair[0], pair[1]])) << 16);
        match self {
            Self::Bf16 => values.extend(bytes.chunks_exact(2).map(bf16)),
            Self::Fp8(format) => values.extend(bytes.iter().map(|&bits| format.decode(bits))),
        }
    }
}

/// Operands that must be equal in all threads of the warpgroup.
#[derive(Clone, Copy, PartialEq)]
pub struct Operands {
    pub n: usize,
    /// Types of A and B, which have the same size.
    pub formats: [Format; 2],
    /// Descriptor of A, or `None` if A is in registers.
    pub a: Option<u64>,
    /// Descriptor of B.
    pub b: u64,
    /// Whether A is MN-major.
    pub a_mn_major: bool,
    /// Whether B is MN-major.
    pub b_mn_major: bool,
    pub accumulate: bool,
}

/// Accumulators of the warpgroup while they are pending.
pub struct Accumulators {
    pub n: usize,
    /// M x n values.
    pub values: Vec<f32>,
    /// Newest group with an instruction that accumulates into these.
    pub group: usize,
    /// Number of threads that have read them back.
    pub completed: usize,
    /// Source line of the first instruction.
    pub at: Site,
}

impl Default for Warpgroup {
    fn default() -> Self {
        Self {
            first: 0,
            groups: VecDeque::new(),
            accumulators: VecDeque::new(),
            first_accumulators: 0,
            threads: vec![Thread::default(); THREADS],
            waiting: Vec::new(),
            clock: Clock::default(),
            clocks: VecDeque::new(),
            first_clock: 0,
            lines: Vec::new(),
        }
    }
}

impl Warpgroup {
    /// Returns the NaN that pending accumulators hold. It encodes `at`, the source line of their first wgmma.
    fn placeholder(&mut self, at: Site) -> f32 {
        let known = self.lines.iter().position(|line| *line == at);
        let number = known.unwrap_or_else(|| {
            self.lines.push(at);
            self.lines.len() - 1
        });
        f32::from_bits(PENDING | (number as u32).min(LINES - 1))
    }

    /// Returns the first thread with a pending wgmma and the line of the wgmma. `group` is the index of this warpgroup
    /// in its block.
    pub fn pending(&self, group: usize) -> Option<(usize, Site)> {
        let (thread, number) = self
            .threads
            .iter()
            .enumerate()
            .find_map(|(thread, state)| state.pending.first().map(|&(_, number)| (thread, number)))?;
        Some((group * THREADS + thread, self.accumulators.get(number - self.first_accumulators)?.at))
    }

    /// Returns the number of the pending set of accumulators that thread `index` holds in `d`. If there is none, moves
    /// the values of `d` into a new set.
    pub fn pending_accumulators(
        &mut self,
        index: usize,
        d: &mut [f32],
        operands: Operands,
        at: Site,
    ) -> Result<usize, IssueError> {
        let address = d.as_ptr().addr();
        let thread = &mut self.threads[index];
        let known = thread.pending.iter().find(|(known, _)| *known == address).map(|(_, number)| *number);
        let completed = thread.completed.get(&address).copied();
        if known.is_none() && completed.map_or(0, |(fences, _)| fences) == thread.fences {
            return Err(IssueError::Unfenced(completed.map(|(_, at)| at)));
        }
        let number = known.unwrap_or_else(|| {
            thread.pending.push((address, thread.next));
            thread.next += 1;
            thread.next - 1
        });
        let i = number - self.first_accumulators;
        if self.accumulators.len() == i {
            let values = vec![0.0; M * operands.n];
            self.accumulators.push_back(Accumulators { n: operands.n, values, group: 0, completed: 0, at });
        }
        let accumulators = &mut self.accumulators[i];
        if accumulators.n != operands.n {
            return Err(IssueError::Mismatch(accumulators.at));
        }
        if known.is_some() != is_pending(d) {
            return Err(IssueError::Modified(accumulators.at));
        }
        if known.is_none() {
            for (i, d) in d.iter().enumerate() {
                let (row, column) = position(index, i);
                accumulators.values[row * operands.n + column] = *d;
            }
            d.fill(self.placeholder(at));
        }
        Ok(number)
    }

    /// Records the instruction in the open group of thread `index`, or compares it with the one that another thread has
    /// recorded. `number` is the number of the set of accumulators.
    pub fn record(
        &mut self,
        index: usize,
        number: usize,
        a_registers: [u32; 4],
        operands: Operands,
        at: Site,
    ) -> Result<(), IssueError> {
        let thread = &mut self.threads[index];
        let (group, i) = (thread.groups - self.first, thread.issued);
        thread.issued += 1;
        self.accumulators[number - self.first_accumulators].group = self.first + group;
        if self.groups.len() == group {
            self.groups.push_back(Group::default());
        }
        let instructions = &mut self.groups[group].instructions;
        if instructions.len() == i {
            let a_registers = vec![[0; 4]; if operands.a.is_none() { THREADS } else { 0 }];
            instructions.push(Instruction { operands, a_registers, accumulators: number, at });
        }
        let instruction = &mut instructions[i];
        if instruction.operands != operands || instruction.accumulators != number || instruction.at != at {
            return Err(IssueError::Mismatch(instruction.at));
        }
        if operands.a.is_none() {
            instruction.a_registers[index] = a_registers;
        }
        Ok(())
    }
}

impl Operands {
    /// Returns the number of rows of B in shared memory and their length in bytes.
    pub fn b_shape(self) -> (usize, usize) {
        if self.b_mn_major { (self.k(), self.n * self.formats[1].bytes()) } else { (self.n, K_BYTES) }
    }

    /// Returns the number of rows of A in shared memory and their length in bytes.
    pub fn a_shape(self) -> (usize, usize) {
        if self.a_mn_major { (self.k(), M * self.formats[0].bytes()) } else { (M, K_BYTES) }
    }

    /// Returns the columns of A and rows of B.
    pub fn k(self) -> usize {
        self.formats[0].k()
    }
}

/// An invalid wgmma.
pub enum IssueError {
    /// The operands differ from those of the warpgroup's other threads.
    Mismatch(Site),
    /// The thread has modified pending accumulators.
    Modified(Site),
    /// The registers have been accessed since the last fence, at this line if known.
    Unfenced(Option<Site>),
}

/// Returns (row, column) in D of a thread's accumulator `i`.
#[inline(always)]
pub fn position(thread: usize, i: usize) -> (usize, usize) {
    let lane = thread % LANES;
    (thread / LANES * 16 + lane / 4 + i / 2 % 2 * 8, i / 4 * 8 + lane % 4 * 2 + i % 2)
}

/// Returns whether `d` holds only placeholders of pending accumulators.
pub fn is_pending(d: &[f32]) -> bool {
    d.iter().all(|d| d.to_bits() & !(LINES - 1) == PENDING)
}
