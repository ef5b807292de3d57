//! Memory and traffic of the ZeRO stages.

/// Parameters of a model, in the parts that are sharded differently.
#[derive(Clone, Copy, Debug)]
pub struct Model {
    /// Elements of wte, wpe and the head.
    pub embeddings: usize,
    /// Elements of all layers, with the final norm.
    pub layers: usize,
    /// Elements of the largest layer.
    pub largest_layer: usize,
}

/// The elements that a rank stores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stored {
    /// Elements of the parameters.
    pub parameters: usize,
    /// Elements of the gradients.
    pub gradients: usize,
    /// Elements of m, of v and of the master weights.
    pub optimizer: usize,
}

/// Returns what a rank stores if `n` ranks shard with a stage. The elements are assumed to divide evenly.
///
/// Sharded layers pass through two buffers of a whole layer. The embeddings, which a pass uses from its first to its last operation, stay
/// whole, except for their optimizer state.
pub fn stored(model: Model, stage: u8, n: usize) -> Stored {
    let Model { embeddings, layers, largest_layer } = model;
    let whole = embeddings + layers;
    let buffered = embeddings + layers / n + 2 * largest_layer;
    Stored {
        parameters: if stage >= 3 { buffered } else { whole },
        gradients: if stage >= 2 { buffered } else { whole },
        optimizer: if stage >= 1 { whole / n } else { whole },
    }
}

/// Returns the bytes that a rank sends in a step with ring algorithms: inside its shard group of `n` ranks, and to the other `groups`.
/// `bytes` are those of all parameters, `k` is the number of micro-batches.
pub fn sent(stage: u8, bytes: f64, n: usize, groups: usize, k: usize) -> (f64, f64) {
    let part = |ranks: usize| (ranks - 1) as f64 / ranks as f64;
    let collectives = match stage {
        0 => return (0.0, 2.0 * bytes * part(n * groups)),
        1 => 2,
        2 => k + 1,
        _ => 3 * k,
    };
    (collectives as f64 * bytes * part(n), 2.0 * bytes / n as f64 * part(groups))
}

#[cfg(test)]
mod tests {
    use super::*;

    const D48: Model = Model { embeddings: 82_124_800, layers: 1_475_561_600, largest_layer: 30_744_000 };

    fn mib(elements: usize, bytes: usize) -> String {
        format!("{:.1}", (elements * bytes) as f64 / 1_048_576.0)
    }

    /// The table that `train` prints for d48 and 8 ranks (docs/internals/distributed.md).
    #[test]
    fn memory_of_d48_on_eight_ranks() {
        let row = |stage| {
            let Stored { parameters, gradients, optimizer } = stored(D48, stage, 8);
            [mib(parameters, 2), mib(gradients, 2), mib(optimizer, 12)]
        };
        assert_eq!(row(0), ["2971.1", "2971.1", "17826.3"]);
        assert_eq!(row(1), ["2971.1", "2971.1", "2228.3"]);
        assert_eq!(row(2), ["2971.1", "625.7", "2228.3"]);
        assert_eq!(row(3), ["625.7", "625.7", "2228.3"]);
    }

    #[test]
    fn stage_1_sends_what_stage_0_sends() {
        assert_eq!(sent(0, 8.0, 4, 1, 5), (0.0, 12.0));
        assert_eq!(sent(1, 8.0, 4, 1, 5), (12.0, 0.0));
        assert_eq!(sent(2, 8.0, 4, 1, 5), (36.0, 0.0));
        assert_eq!(sent(3, 8.0, 4, 1, 5), (90.0, 0.0));
    }

    #[test]
    fn groups_send_an_nth_over_the_network() {
        let (inside, across) = sent(3, 8.0, 4, 2, 1);
        assert_eq!((inside, across), (18.0, 2.0));
    }
}
