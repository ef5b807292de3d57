//! Token and position embedding for the CPU, and its gradient, computed by position and by token.
//!
//! Shapes: tokens (B, T), wte and dwte (V, C), wpe and dwpe (T, C), out and dout (B, T, C).

/// Computes out = `wte[token] + wpe[position]`.
pub fn forward(out: &mut [f32], tokens: &[usize], wte: &[f32], wpe: &[f32], channels: usize) {
    let sequence = wpe.len() / channels;
    for (i, (out, token)) in out.chunks_mut(channels).zip(tokens).enumerate() {
        let (embedding, position) = (&wte[token * channels..], &wpe[i % sequence * channels..]);
        for c in 0..channels {
            out[c] = embedding[c] + position[c];
        }
    }
}

/// Adds the gradients of wte and wpe, one position after the other.
pub fn backward(dwte: &mut [f32], dwpe: &mut [f32], dout: &[f32], tokens: &[usize], channels: usize) {
    let sequence = dwpe.len() / channels;
    for (i, (dout, token)) in dout.chunks(channels).zip(tokens).enumerate() {
        for c in 0..channels {
            dwte[token * channels + c] += dout[c];
            dwpe[i % sequence * channels + c] += dout[c];
        }
    }
}

/// Returns all positions, sorted by token and, for equal tokens, by position.
pub fn sorted_positions(tokens: &[usize]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..tokens.len()).collect();
    // `sort_by_key` is stable: equal tokens keep the order of their positions.
    order.sort_by_key(|&position| tokens[position]);
    order
}

/// Adds the gradient of wte, one run of equal tokens after the other: each row of dwte is written once.
pub fn backward_of_runs(dwte: &mut [f32], dout: &[f32], tokens: &[usize], channels: usize) {
    let order = sorted_positions(tokens);
    for run in order.chunk_by(|&a, &b| tokens[a] == tokens[b]) {
        let token = tokens[run[0]];
        for c in 0..channels {
            let sum: f32 = run.iter().map(|position| dout[position * channels + c]).sum();
            dwte[token * channels + c] += sum;
        }
    }
}

#[cfg(test)]
#[expect(clippy::float_cmp, reason = "these results are exact")]
mod tests {
    use super::*;

    const TOKENS: [usize; 6] = [2, 0, 2, 1, 2, 0];

    /// Returns a line of PyTorch's output.
    fn pytorch(name: &str) -> Vec<f32> {
        let lines = include_str!("../../pytorch/encoder.txt").lines();
        let mut words =
            lines.map(str::split_whitespace).find_map(|mut words| (words.next() == Some(name)).then_some(words));
        words.as_mut().unwrap().map(|word| word.parse().unwrap()).collect()
    }

    #[test]
    fn all_results_are_those_of_pytorch() {
        let (wte, wpe) = ([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]);
        let dout: Vec<f32> = (1..=12).map(|i| i as f32).collect();
        let (mut out, mut dwte, mut dwpe, mut of_runs) = ([0.0; 12], [0.0; 8], [0.0; 6], [0.0; 8]);
        forward(&mut out, &TOKENS, &wte, &wpe, 2);
        backward(&mut dwte, &mut dwpe, &dout, &TOKENS, 2);
        backward_of_runs(&mut of_runs, &dout, &TOKENS, 2);
        assert_eq!(out.to_vec(), pytorch("out"));
        assert_eq!(dwte.to_vec(), pytorch("dwte"));
        assert_eq!(dwpe.to_vec(), pytorch("dwpe"));
        assert_eq!(of_runs, dwte);
    }

    #[test]
    fn sort_is_stable() {
        assert_eq!(sorted_positions(&TOKENS), [1, 5, 3, 0, 2, 4]);
    }

    #[test]
    fn the_order_of_f32_additions_changes_the_sum() {
        let terms = [1e8f32, 1.0, -1e8];
        let reversed: f32 = terms.iter().rev().sum();
        assert_eq!((terms.iter().sum::<f32>(), reversed), (0.0, 0.0));
        let other: f32 = [terms[0], terms[2], terms[1]].iter().sum();
        assert_eq!(other, 1.0);
    }
}
