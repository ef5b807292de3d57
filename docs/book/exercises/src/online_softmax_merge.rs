//! Merging the attention of a query to two sets of keys.
//!
//! With few queries and many keys, one block for each query leaves most SMs without work. The keys can be split: each block
//! computes the attention to a part of them, and the results are merged.

/// The attention of a query to a set of keys.
#[derive(Clone, PartialEq, Debug)]
pub struct Partial {
    /// The largest score, or minus infinity if the set is empty.
    pub max: f64,
    /// The sum of e^(score - max).
    pub sum: f64,
    /// The sum of e^(score - max) times the value, not divided by `sum`.
    pub out: Vec<f64>,
}

/// Returns the attention to the keys of both sets. Either set, or both, may be empty.
pub fn merge(a: &Partial, b: &Partial) -> Partial {
    unimplemented!("exercise online_softmax_merge")
}
