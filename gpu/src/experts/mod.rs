//! Experts: the choice of each token's experts, and the copies between the order of tokens and that of experts.
//!
//! A token has K choices, and entry token · K + choice is one of them. In the order of experts, the entries of an expert are a group of
//! consecutive rows, in the order of the tokens. The groups are those of a grouped GEMM ([`Groups`]), so the last block of each is filled up with
//! rows of zeros. Nothing depends on the order in which threads run. If GPUs share the experts, each has the rows of its own ([`Local`]).
//!
//! `route` chooses the experts and computes the order, `rows` copies rows, and `route_backward` computes the gradients of the choices and
//! of the router.

use cuda_std::device;

mod route;
mod route_backward;
mod rows;

pub use route::{
    ENTRIES, MAX_EXPERTS, chunks, route_choose, route_choose_grid, route_count, route_groups, route_place, shared,
};
pub use route_backward::{BIAS_GRADIENT, BackwardSizes, choice_gradients, route_backward, route_bias_backward};
pub use rows::{combine, dispatch, dispatch_to_fp8, grid};

/// The rows of a block: a group of a grouped GEMM consists of blocks. A group that is summed over has at least one. Rows that fill up a block are
/// zeros.
pub const GROUP_BLOCK: usize = 128;

/// The layout of the device memory that describes the groups of a grouped GEMM, in words of 32 bits:
/// * the first row of each group, and the end of the last group
/// * the number of rows of each group that are not filled up
/// * the group of each block of [`GROUP_BLOCK`] rows
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Groups {
    /// The number of groups.
    pub count: usize,
    /// An upper limit of the rows of all groups.
    pub rows: usize,
}

impl Groups {
    /// Returns the layout for at most `used` rows that are not filled up.
    pub const fn new(count: usize, used: usize) -> Self {
        Self { count, rows: (used / GROUP_BLOCK + count) * GROUP_BLOCK }
    }

    /// Returns the index of the number of rows of the first group.
    pub const fn sizes(self) -> usize {
        self.count + 1
    }

    /// Returns the index of the group of the first block.
    pub const fn blocks(self) -> usize {
        self.sizes() + self.count
    }

    /// Returns the number of words.
    pub const fn words(self) -> usize {
        self.blocks() + self.rows / GROUP_BLOCK
    }
}

/// The experts whose entries have a row in the order of experts. Passed to kernels by value.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Local {
    /// The first one.
    pub first: u32,
    /// Their number.
    pub count: u32,
}

#[device]
impl Local {
    /// Returns the number of an expert among these, if it is less than their number. Otherwise the expert is not one of them.
    fn index(self, expert: u32) -> u32 {
        expert.wrapping_sub(self.first)
    }
}

/// The router. Passed to kernels by value.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Router {
    /// The number of experts (E).
    pub experts: u32,
    /// The number of experts of a token (K).
    pub active: u32,
    /// 1 if a score is the sigmoid of a logit, 0 if scores are the softmax of the logits.
    pub sigmoid: u32,
    /// 1 if the weights of a token are its scores divided by their sum, 0 if they are the scores.
    pub normalized: u32,
}
