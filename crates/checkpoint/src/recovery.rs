//! Advice on how to continue a run that ended because its losses stopped being finite.

use std::path::PathBuf;

/// The checkpoints before and after the first failing step.
#[derive(Debug)]
pub struct RecoveryPoint {
    /// Step and model file of the last checkpoint from which at least one step succeeded.
    pub last_good: Option<(usize, PathBuf)>,
    /// The DONE file of the newest checkpoint, if it is later. Its weights may be the cause of the failure.
    pub suspect: Option<PathBuf>,
}

/// Returns how to continue the run. `point` is `None` if the run has no output directory.
pub fn recovery_hint(point: Option<&RecoveryPoint>) -> String {
    let Some(RecoveryPoint { last_good, suspect }) = point else {
        return "start again with a lower --lr or with --precision fp32, and with --out to keep checkpoints".to_owned();
    };
    let suspect = suspect.as_deref().map(|done| done.display());
    let Some((step, file)) = last_good else {
        let found = suspect.map_or("there is no checkpoint".to_owned(), |done| {
            format!("there is no good checkpoint: that of {done} has the weights that failed")
        });
        return format!("{found}; start again with another --out and a lower --lr or --precision fp32");
    };
    let delete = suspect
        .map_or(String::new(), |done| format!("; the checkpoint after it has the weights that failed: delete {done}"));
    format!(
        "the last good checkpoint is {}{delete}; resume after step {step} with the same command and --resume, and if the run fails \
         at the same step again, with a lower --lr and --force-resume, or with --precision fp32",
        file.display()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hint_names_the_existing_checkpoints() {
        let hint = |last_good: Option<usize>, suspect: Option<&str>| {
            recovery_hint(Some(&RecoveryPoint {
                last_good: last_good.map(|step| (step, format!("run/model_{step}.bin").into())),
                suspect: suspect.map(PathBuf::from),
            }))
        };
        assert!(
            hint(Some(5), None).starts_with("the last good checkpoint is run/model_5.bin; resume after step 5 with")
        );
        let text = hint(Some(5), Some("run/DONE_7"));
        assert!(text.contains("weights that failed: delete run/DONE_7; resume after step 5 with"), "{text}");
        assert!(hint(None, None).starts_with("there is no checkpoint; start again"));
        assert!(hint(None, Some("run/DONE_7")).contains("that of run/DONE_7 has the weights that failed; start again"));
        assert!(recovery_hint(None).contains("with --out"));
    }
}
