//! Counts of the seeds by kind of fault.

use super::trial::Verdict;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::Duration;

/// Counts by kind of fault.
#[derive(Default)]
pub struct Tally(BTreeMap<&'static str, Counts>);

#[derive(Clone, Copy, Default)]
struct Counts {
    seeds: u64,
    /// Faults that occurred.
    faults: u64,
    /// Runs that ended with the bits of an undisturbed run without a restart.
    undisturbed: u64,
    /// Runs that stopped and ended with these bits after they were resumed.
    resumed: u64,
    failed: u64,
    /// Maximum simulated time from the failure of a rank to the end of the others.
    longest: Duration,
}

impl Tally {
    /// Adds the outcome of a seed.
    pub fn add(&mut self, verdict: &Verdict) {
        let counts = self.0.entry(verdict.kind).or_default();
        counts.seeds += 1;
        counts.faults += verdict.faults;
        counts.longest = counts.longest.max(verdict.end_after_loss);
        match (&verdict.failure, verdict.restarts) {
            (Some(_), _) => counts.failed += 1,
            (None, 0) => counts.undisturbed += 1,
            (None, _) => counts.resumed += 1,
        }
    }

    /// Returns the number of seeds.
    pub fn seeds(&self) -> u64 {
        self.0.values().map(|counts| counts.seeds).sum()
    }

    /// Returns the number of seeds that failed.
    pub fn failed(&self) -> u64 {
        self.0.values().map(|counts| counts.failed).sum()
    }

    /// Returns the counts by kind of fault, and of all kinds.
    fn rows(&self) -> impl Iterator<Item = (&'static str, Counts)> {
        let mut total = Counts::default();
        for counts in self.0.values() {
            total.seeds += counts.seeds;
            total.faults += counts.faults;
            total.undisturbed += counts.undisturbed;
            total.resumed += counts.resumed;
            total.failed += counts.failed;
            total.longest = total.longest.max(counts.longest);
        }
        self.0.iter().map(|(kind, counts)| (*kind, *counts)).chain([("all", total)])
    }

    /// Returns the counts by kind of fault as JSON.
    pub fn json(&self) -> Value {
        let counts = |(kind, counts): (&str, Counts)| {
            let Counts { seeds, faults, undisturbed, resumed, failed, longest } = counts;
            json!({
                "fault": kind,
                "seeds": seeds,
                "faults_that_occurred": faults,
                "same_bits_at_once": undisturbed,
                "same_bits_after_resuming": resumed,
                "failed": failed,
                "longest_end_after_lost_rank_s": longest.as_secs_f64(),
            })
        };
        self.rows().map(counts).collect()
    }

    /// Returns the table in Markdown.
    pub fn table(&self) -> String {
        let mut table = "| fault | seeds | faults that occurred | same bits at once | stopped, same bits after resuming | failed | longest end after a lost rank |\n\
                         |---|---|---|---|---|---|---|\n"
            .to_owned();
        for (kind, counts) in self.rows() {
            let Counts { seeds, faults, undisturbed, resumed, failed, longest } = counts;
            let longest = if longest.is_zero() { String::new() } else { format!("{:.1} s", longest.as_secs_f64()) };
            let row = format!("| {kind} | {seeds} | {faults} | {undisturbed} | {resumed} | {failed} | {longest} |\n");
            table.push_str(&row);
        }
        table
    }
}
