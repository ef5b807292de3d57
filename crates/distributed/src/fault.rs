//! Failures of communication between ranks, and their exit codes.

use std::time::Duration;

/// Exit code of a rank after a permanent failure: restarting the run would fail the same way.
pub const PERMANENT_EXIT_CODE: u8 = 3;

/// Exit code of a rank after the loss of a rank, a GPU or a connection: the run can resume from its last checkpoint.
pub const RECOVERABLE_EXIT_CODE: u8 = 4;

/// A failure that ends the run on all ranks. `activity` is the step and the operation at the time of the failure.
#[derive(Clone, Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the error messages document the fields")]
pub enum Fault {
    /// Rank 0 ended the run and prints the message. This rank prints nothing.
    #[error("{text}")]
    ReportedByRank0 { text: String, recoverable: bool },

    /// The run cannot start.
    #[error("{0}")]
    Startup(String),

    /// A rank did not come, but the run can start without it.
    #[error("{0}")]
    Absent(String),

    /// Another rank ended the run because of an error.
    #[error("{peer} failed: {text}")]
    RankFailed { peer: String, text: String, recoverable: bool },

    /// The GPU driver or NCCL failed on this rank.
    #[error("{text}; during {activity}")]
    Device { text: String, activity: String },

    /// The connection to a rank was closed.
    #[error(
        "{peer} disconnected during {activity}: its process ended or the network failed; see the output of that rank"
    )]
    Disconnected { peer: String, activity: String },

    /// No heartbeat and no message arrived from a rank.
    #[error("{peer} timed out: no message for {:.0} s during {activity}; check that host and its network", waited.as_secs_f64())]
    TimedOut { peer: String, waited: Duration, activity: String },

    /// A rank sends heartbeats but makes no progress.
    #[error("{peer} made no progress for {:.0} s during {activity}; see the output of that rank", waited.as_secs_f64())]
    Stalled { peer: String, waited: Duration, activity: String },

    /// A GPU computed or stored a wrong value.
    #[error("{0}")]
    Hardware(String),

    /// Replicated tensors differ between ranks.
    #[error(
        "{tensor}: expected the same values on {peer} as on rank {expected}, found other values; check the memory and the GPU of \
         that host"
    )]
    ReplicaMismatch { peer: String, expected: usize, tensor: String },

    /// Ranks called different collectives.
    #[error(
        "{peer}: expected {expected}, found {found}; the ranks called different collectives, which is a bug in this \
         program"
    )]
    CollectiveMismatch { peer: String, expected: String, found: String },
}

impl Fault {
    /// Returns whether the run can resume from its last checkpoint. Otherwise a restart would fail the same way.
    pub fn is_recoverable(&self) -> bool {
        match self {
            Self::ReportedByRank0 { recoverable, .. } | Self::RankFailed { recoverable, .. } => *recoverable,
            Self::Device { .. }
            | Self::Disconnected { .. }
            | Self::TimedOut { .. }
            | Self::Stalled { .. }
            | Self::Absent(_) => true,
            Self::Startup(_) | Self::Hardware(_) | Self::ReplicaMismatch { .. } | Self::CollectiveMismatch { .. } => {
                false
            }
        }
    }

    /// Returns the exit code of a process that ends with this fault.
    pub fn exit_code(&self) -> u8 {
        if self.is_recoverable() { RECOVERABLE_EXIT_CODE } else { PERMANENT_EXIT_CODE }
    }
}

/// Returns whether `error` is a recoverable [`Fault`].
pub fn is_recoverable(error: &anyhow::Error) -> bool {
    error.downcast_ref().is_some_and(Fault::is_recoverable)
}

/// Converts `error` into a [`Fault::Device`] if the CUDA driver or NCCL caused it. Returns other errors unchanged.
pub fn from_device_error(error: anyhow::Error, activity: &str) -> anyhow::Error {
    let device = error.chain().any(|cause| cause.is::<cuda_driver::Error>() || cause.is::<nccl_rs::Error>());
    if device { Fault::Device { text: format!("{error:#}"), activity: activity.to_owned() }.into() } else { error }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_lost_ranks_and_connections_are_recoverable() {
        let disconnected = Fault::Disconnected { peer: "rank 1".into(), activity: "step 3 of 9".into() };
        assert_eq!((disconnected.is_recoverable(), disconnected.exit_code()), (true, RECOVERABLE_EXIT_CODE));
        let startup = Fault::Startup("two ranks on one GPU".into());
        assert_eq!((startup.is_recoverable(), startup.exit_code()), (false, PERMANENT_EXIT_CODE));
        for recoverable in [true, false] {
            let text = || "text".to_owned();
            assert_eq!(Fault::ReportedByRank0 { text: text(), recoverable }.is_recoverable(), recoverable);
            assert_eq!(Fault::RankFailed { peer: text(), text: text(), recoverable }.is_recoverable(), recoverable);
        }
    }

    #[test]
    fn driver_and_nccl_errors_become_device_faults() {
        let driver = cuda_driver::Error::NoDevice;
        let nccl = nccl_rs::Error::Call { call: "NCCL".into(), status: 6, detail: "closed".into() };
        for (error, text) in [(anyhow::Error::from(driver), "loss: the CUDA driver"), (nccl.into(), "loss: NCCL: nccl")]
        {
            let error = from_device_error(error.context("loss"), "step 3 of 9");
            assert!(is_recoverable(&error) && error.to_string().starts_with(text), "{error:#}");
            assert!(error.to_string().ends_with("; during step 3 of 9"), "{error:#}");
        }
        let disk = from_device_error(anyhow::anyhow!("disk full"), "step 3 of 9");
        assert!(!is_recoverable(&disk) && disk.to_string() == "disk full");
    }
}
