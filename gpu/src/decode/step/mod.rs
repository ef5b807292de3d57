//! A generation step in one launch: a persistent kernel computes a list of operations.
//!
//! The host describes the step as a list of [`launch::Operation`]s with the operands of the separate kernels (embedding, linear layers
//! with norm, activation and residual, attention over the cache, head). [`launch::program`] turns the list into a table in device memory,
//! and [`launch::step`] returns the launch. There is one block per SM. Every block walks the table in the same order and computes its part
//! of each operation: the outputs of a linear layer are divided evenly, and so are the (slot, key-value head, split) tasks of attention.
//!
//! * [`table`]: the format of the table.
//! * [`plan`]: the part of an operation that a block computes.
//! * [`words`]: intermediate values, which carry their own flag.
//! * [`ring`]: the producer warps, which stream weights, keys and values through a ring of stages in shared memory.
//! * [`matvec`] and [`attention`]: the operations, computed by the consumer warps.
//! * [`kernel`]: the kernel and its shared memory.
//! * [`launch`]: the host side.
//!
//! # Invariants
//!
//! 1. *Values.* An intermediate value is a 64-bit word of scratch memory: 32 bits of data (one f32 or two bf16), and the number of the
//!    launch as a tag. The block that computes the value stores the word with one relaxed 64-bit write. A reader polls the word until the
//!    tag is that of this launch. Data and tag are one access, so no fence or barrier is needed.
//! 2. *Single assignment.* A launch writes each word at most once, and no launch writes a word whose readers may still run: the launches
//!    that share scratch memory are ordered by their stream.
//! 3. *Tags.* Scratch memory begins with a counter, to which each block adds 1 when it ends. A block reads it before its first barrier.
//!    Counter / grid is the number of launches before this one, whichever blocks of this launch have ended. Tags of earlier launches differ
//!    from it, and so does 0, the initial value. Programs with the same number of blocks may therefore share scratch memory.
//! 4. *Order.* A block waits only for values of earlier operations, or of the same attention after its own tasks of it. All blocks are
//!    resident, because the grid is not larger than the number of SMs. So some block can always continue.
//! 5. *Ring.* Producer and consumers derive the same sequence of stages from the table and the positions. Weights, and the keys and values
//!    of earlier positions, do not depend on values of this launch. The producers are therefore ahead by as many bytes as the ring holds.
//! 6. *Cache.* The new key and value are stored by the block with the last split, at a place that no block reads in this launch.

pub mod attention;
pub mod kernel;
#[cfg(not(target_arch = "nvptx64"))]
pub mod launch;
pub mod matvec;
pub mod plan;
pub mod ring;
pub mod table;
pub mod words;
