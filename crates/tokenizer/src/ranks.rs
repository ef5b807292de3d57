//! Merges that follow from ranks.

use rustc_hash::FxHashMap;

/// Returns the two tokens of the last merge of each token, in the order of their ranks. `tokens` are ordered by rank. Bytes have no
/// merge, and neither have tokens that no merges lead to: Llama 3 has such tokens, which only a whole word becomes.
pub fn merges_of_ranks(tokens: &[Vec<u8>]) -> impl Iterator<Item = [&[u8]; 2]> {
    let ranks: FxHashMap<&[u8], usize> = tokens.iter().enumerate().map(|(rank, token)| (&token[..], rank)).collect();
    let merged = tokens.iter().enumerate().filter(|(_, token)| token.len() > 1);
    merged.filter_map(move |(rank, token)| Some(token.split_at(last_merge(token, rank, &ranks)?).into()))
}

/// Returns the position in `token` at which its last merge joins two tokens. Applies all merges with a lower rank.
fn last_merge(token: &[u8], own: usize, ranks: &FxHashMap<&[u8], usize>) -> Option<usize> {
    // Starts of the parts, and the end.
    let mut cuts: Vec<usize> = (0..=token.len()).collect();
    while cuts.len() > 3 {
        let rank = |i: usize| ranks.get(&token[cuts[i - 1]..cuts[i + 1]]).copied().filter(|&rank| rank < own);
        let (_, i) = (1..cuts.len() - 1).filter_map(|i| rank(i).map(|rank| (rank, i))).min()?;
        cuts.remove(i);
    }
    Some(cuts[1])
}
