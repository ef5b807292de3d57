//! Exercise: sort positions by token in linear time.
//!
//! The gradient of the embedding needs all positions sorted by token and, for equal tokens, by position. A comparison sort takes
//! O(n log n). A counting sort takes O(n + V): count each token, turn the counts into the index where the token's run begins (an
//! exclusive prefix sum), and put each position into the next free place of its token's run.

/// Returns all positions sorted by token, and positions of one token in ascending order. Tokens are below `vocabulary`.
pub fn token_order(tokens: &[u32], vocabulary: usize) -> Vec<u32> {
    unimplemented!("exercise token_order")
}

/// Returns for each token the index in the sorted positions where its run begins. The last element is the number of positions, so that
/// the run of token i is `starts[i]..starts[i + 1]`.
pub fn run_starts(tokens: &[u32], vocabulary: usize) -> Vec<usize> {
    unimplemented!("exercise token_order")
}
