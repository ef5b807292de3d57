//! What can go wrong between the processes of a run.

use std::time::Duration;

/// Exit code of a rank of a run that ended because its ranks did not come together, did not agree, or one of them failed.
pub const EXIT_CODE: u8 = 3;

#[derive(Clone, Debug, thiserror::Error)]
pub enum Fault {
    /// Rank 0 has told it already; there is nothing to add.
    #[error("{0}")]
    Told(String),

    /// The ranks cannot begin.
    #[error("{0}")]
    Start(String),

    #[error("{who} failed: {text}")]
    Failed { who: String, text: String },

    #[error("{who} has ended, or the connection to it; {during}")]
    Gone { who: String, during: String },

    #[error("nothing came from {who} in {:.0} s; {during}", waited.as_secs_f64())]
    Silent { who: String, waited: Duration, during: String },

    #[error("{who} stands still for {:.0} s; {during}", waited.as_secs_f64())]
    Hangs { who: String, waited: Duration, during: String },

    #[error("{what} is not the same on {who} as on rank 0: memory or a GPU there may be faulty, or this program is")]
    Apart { who: String, what: String },

    #[error(
        "{who} is at another point of the run: expected {expected}, found {found}; the ranks have gone different ways"
    )]
    OutOfStep { who: String, expected: String, found: String },
}
