//! What can go wrong between the processes of a run.

use std::time::Duration;

/// Exit code of a rank of a run whose ranks did not come together, did not agree, or of which one failed in a way that it
/// would fail again.
pub const EXIT_CODE: u8 = 3;

/// Exit code of a rank of a run that has lost a rank, a GPU, or the connection between GPUs: it can go on from its last
/// checkpoint.
pub const LOST: u8 = 4;

#[derive(Clone, Debug, thiserror::Error)]
pub enum Fault {
    /// Rank 0 has told it already; there is nothing to add.
    #[error("{text}")]
    Told { text: String, lost: bool },

    /// The ranks cannot begin.
    #[error("{0}")]
    Start(String),

    #[error("{who} failed: {text}")]
    Failed { who: String, text: String, lost: bool },

    /// A GPU, or NCCL between GPUs, has failed while the run went on.
    #[error("{text}; {during}")]
    Device { text: String, during: String },

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

impl Fault {
    /// Whether the run could go on from its last checkpoint, rather than end in the same way again.
    pub fn is_loss(&self) -> bool {
        match self {
            Self::Told { lost, .. } | Self::Failed { lost, .. } => *lost,
            Self::Device { .. } | Self::Gone { .. } | Self::Silent { .. } | Self::Hangs { .. } => true,
            Self::Start(_) | Self::Apart { .. } | Self::OutOfStep { .. } => false,
        }
    }

    pub fn exit_code(&self) -> u8 {
        if self.is_loss() { LOST } else { EXIT_CODE }
    }
}

/// As [`Fault::is_loss`].
pub fn is_loss(error: &anyhow::Error) -> bool {
    error.downcast_ref().is_some_and(Fault::is_loss)
}

/// The same error, as a [`Fault::Device`] if the GPU's driver or NCCL is the cause.
pub fn of_device(error: anyhow::Error, during: &str) -> anyhow::Error {
    let device = error.chain().any(|cause| cause.is::<cuda_driver::Error>() || cause.is::<nccl_rs::Error>());
    if device { Fault::Device { text: format!("{error:#}"), during: during.to_owned() }.into() } else { error }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_may_not_come_again_is_a_loss() {
        let during = || "step 3 of 9".to_owned();
        let gone = Fault::Gone { who: "rank 1".into(), during: during() };
        assert_eq!((gone.is_loss(), gone.exit_code()), (true, LOST));
        let start = Fault::Start("two ranks with one GPU".into());
        assert_eq!((start.is_loss(), start.exit_code()), (false, EXIT_CODE));
        for lost in [true, false] {
            let text = || "text".to_owned();
            assert_eq!(Fault::Told { text: text(), lost }.is_loss(), lost);
            assert_eq!(Fault::Failed { who: text(), text: text(), lost }.is_loss(), lost);
        }
    }

    #[test]
    fn a_failure_of_the_driver_or_of_nccl_is_one_of_the_device() {
        let driver = cuda_driver::Error::NoDevice;
        let nccl = nccl_rs::Error::Call { call: "NCCL".into(), status: 6, detail: "closed".into() };
        for (error, text) in [(anyhow::Error::from(driver), "loss: the CUDA driver"), (nccl.into(), "loss: NCCL: nccl")]
        {
            let error = of_device(error.context("loss"), "step 3 of 9");
            assert!(is_loss(&error) && error.to_string().starts_with(text), "{error:#}");
            assert!(error.to_string().ends_with("; step 3 of 9"), "{error:#}");
        }
        let disk = of_device(anyhow::anyhow!("disk full"), "step 3 of 9");
        assert!(!is_loss(&disk) && disk.to_string() == "disk full");
    }
}
