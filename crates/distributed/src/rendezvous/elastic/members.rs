//! Which processes form a run, and which world sizes are possible.

use serde::{Deserialize, Serialize};
use std::time::Duration;

/// The possible world sizes of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorldSizes {
    /// Minimum number of ranks (`--min-ranks`).
    pub min_ranks: usize,
    /// Micro-batches in a step of all ranks together. The world size divides it, so that all ranks compute equally many.
    pub micro_batches: usize,
}

/// The processes of a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Members {
    /// Number of ranks that the launcher starts.
    pub launched: usize,
    /// The launcher's number of each rank of the run, in ascending order.
    pub ranks: Vec<usize>,
    /// The launcher's numbers of the processes that wait for the next restart, because the world size must divide the batch.
    pub spare: Vec<usize>,
}

impl WorldSizes {
    /// Returns the possible world sizes up to `most`, in ascending order. Ignores the least number of ranks.
    fn up_to(self, most: usize) -> Vec<usize> {
        (1..=most).filter(|&size| self.micro_batches.is_multiple_of(size)).collect()
    }

    /// Checks that some number of ranks is possible. Returns the error message otherwise.
    pub fn check(self, launched: usize) -> Result<(), String> {
        let Self { min_ranks, micro_batches } = self;
        let sizes = self.up_to(launched);
        if sizes.iter().any(|&size| size >= min_ranks) {
            return Ok(());
        }
        Err(format!(
            "--min-ranks {min_ranks}: expected a number of ranks from {min_ranks} to {launched} that divides the {micro_batches} \
             micro-batches of a step (total-batch / (batch x seq)), found none; use at most --min-ranks {}, or change --batch or \
             --total-batch",
            sizes.last().copied().unwrap_or(1)
        ))
    }

    /// Selects the ranks of the run from the launcher's numbers of the processes that came, in ascending order. Returns the error
    /// message if there are too few.
    pub fn select(self, launched: usize, present: &[usize], waited: Duration) -> Result<Members, String> {
        let sizes = self.up_to(present.len());
        let largest = sizes.last().copied().unwrap_or(0);
        if largest >= self.min_ranks {
            let (ranks, spare) = present.split_at(largest);
            return Ok(Members { launched, ranks: ranks.to_vec(), spare: spare.to_vec() });
        }
        let Self { min_ranks, micro_batches } = self;
        let missing: Vec<usize> = (0..launched).filter(|rank| !present.contains(rank)).collect();
        let found = format!("found {} ({})", present.len(), numbers(present));
        let again = format!("start {} again with the same command", numbers(&missing));
        Err(if present.len() < min_ranks {
            format!(
                "rendezvous: expected at least {min_ranks} ranks (--min-ranks) within {:.0} s, {found}; {again}, or continue with a \
                 smaller --min-ranks",
                waited.as_secs_f64()
            )
        } else {
            format!(
                "rendezvous: expected a number of ranks from {min_ranks} (--min-ranks) that divides the {micro_batches} micro-batches \
                 of a step, {found}; {again}, or continue with --min-ranks {largest}"
            )
        })
    }
}

impl Members {
    /// Returns the launcher's numbers of the processes that did not come.
    pub fn missing(&self) -> Vec<usize> {
        (0..self.launched).filter(|rank| !self.ranks.contains(rank) && !self.spare.contains(rank)).collect()
    }

    /// Describes the ranks for the user, if some of the launcher's are not among them.
    pub fn describe(&self) -> Option<String> {
        if self.ranks.len() == self.launched {
            return None;
        }
        let mut text = format!("{} of {} ranks take part: {}", self.ranks.len(), self.launched, numbers(&self.ranks));
        if self.ranks.iter().enumerate().any(|(new, old)| new != *old) {
            text = format!("{text}, now numbered from 0 to {}", self.ranks.len() - 1);
        }
        for (which, what) in [(self.missing(), "missing"), (self.spare.clone(), "spare, because of --total-batch")] {
            if !which.is_empty() {
                let verb = if which.len() == 1 { "is" } else { "are" };
                text = format!("{text}; {} {verb} {what}", numbers(&which));
            }
        }
        Some(text + "; others join at the next restart")
    }
}

/// Lists ranks for messages.
pub(super) fn numbers(ranks: &[usize]) -> String {
    let plural = if ranks.len() == 1 { "" } else { "s" };
    format!("rank{plural} {}", ranks.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    const WAITED: Duration = Duration::from_mins(1);

    #[test]
    fn the_largest_world_size_that_divides_the_micro_batches_is_selected() {
        for (min_ranks, micro_batches, present, ranks) in [
            (1, 8, &[0, 1, 2, 3][..], &[0, 1, 2, 3][..]),
            (1, 12, &[0, 2, 3], &[0, 2, 3]),
            (2, 8, &[1, 2, 3], &[1, 2]),
            (1, 7, &[1, 2, 3], &[1]),
            (3, 12, &[0, 1, 2, 3, 4], &[0, 1, 2, 3]),
        ] {
            let members = WorldSizes { min_ranks, micro_batches }.select(5, present, WAITED).unwrap();
            assert_eq!((&*members.ranks, &*members.spare), (ranks, &present[ranks.len()..]), "{present:?}");
        }
    }

    #[test]
    fn too_few_ranks_are_an_error_that_names_what_would_do() {
        let sizes = WorldSizes { min_ranks: 3, micro_batches: 8 };
        assert_eq!(
            sizes.select(4, &[0, 3], WAITED).unwrap_err(),
            "rendezvous: expected at least 3 ranks (--min-ranks) within 60 s, found 2 (ranks 0, 3); start ranks 1, 2 again with the \
             same command, or continue with a smaller --min-ranks"
        );
        assert_eq!(
            sizes.select(4, &[0, 1, 3], WAITED).unwrap_err(),
            "rendezvous: expected a number of ranks from 3 (--min-ranks) that divides the 8 micro-batches of a step, found 3 (ranks \
             0, 1, 3); start rank 2 again with the same command, or continue with --min-ranks 2"
        );
        assert!(sizes.check(4).is_ok());
        let text = sizes.check(3).unwrap_err();
        assert!(
            text.starts_with("--min-ranks 3: expected a number of ranks from 3 to 3 that divides the 8 micro-b"),
            "{text}"
        );
        assert!(text.contains("; use at most --min-ranks 2, "), "{text}");
    }

    #[test]
    fn missing_and_spare_ranks_are_described() {
        let members =
            |ranks: &[usize], spare: &[usize]| Members { launched: 4, ranks: ranks.into(), spare: spare.into() };
        assert_eq!(members(&[0, 1, 2, 3], &[]).describe(), None);
        let describe = |ranks: &[usize], spare: &[usize]| members(ranks, spare).describe().unwrap();
        assert_eq!(
            describe(&[0, 2, 3], &[]),
            "3 of 4 ranks take part: ranks 0, 2, 3, now numbered from 0 to 2; rank 1 is missing; others join at the next restart"
        );
        assert_eq!(
            describe(&[0, 1], &[3]),
            "2 of 4 ranks take part: ranks 0, 1; rank 2 is missing; rank 3 is spare, because of --total-batch; others join at the next \
             restart"
        );
    }
}
