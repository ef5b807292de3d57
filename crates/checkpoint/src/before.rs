//! Where a run can go back to when nothing is right any more.

use std::path::PathBuf;

/// The checkpoints around a step from which on all went wrong.
#[derive(Debug)]
pub struct Before {
    /// The last one whose weights were good for a step: it, and its model file.
    pub good: Option<(usize, PathBuf)>,
    /// Mark of the newest, if that is later: its weights may be why.
    pub suspect: Option<PathBuf>,
}

/// How to go on with a run that ended because no step was finite any more, by what it has kept: nothing without a directory.
pub fn way_on(kept: Option<&Before>) -> String {
    let Some(Before { good, suspect }) = kept else {
        return "start again with a lower --lr or with --precision fp32, and with --out, so that something is kept"
            .to_owned();
    };
    let suspect = suspect.as_deref().map(|mark| mark.display());
    let Some((step, file)) = good else {
        let which = suspect.map_or("there is no checkpoint".to_owned(), |mark| {
            format!("there is no good checkpoint, that of {mark} has the weights that failed")
        });
        return format!("{which}; start again in another --out with a lower --lr or with --precision fp32");
    };
    let first =
        suspect.map_or(String::new(), |mark| format!("; the one after it has the weights that failed: delete {mark}"));
    format!(
        "the last good checkpoint is {}{first}; go on after step {step} with the same command and --resume and, if it ends \
         here again, with a lower --lr and --force-resume, or with --precision fp32",
        file.display()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_way_on_names_what_there_is() {
        let of = |good: Option<usize>, suspect: Option<&str>| {
            way_on(Some(&Before {
                good: good.map(|step| (step, format!("run/model_{step}.bin").into())),
                suspect: suspect.map(PathBuf::from),
            }))
        };
        assert!(of(Some(5), None).starts_with("the last good checkpoint is run/model_5.bin; go on after step 5 with"));
        let doubtful = of(Some(5), Some("run/DONE_7"));
        assert!(doubtful.contains("weights that failed: delete run/DONE_7; go on after step 5 with"), "{doubtful}");
        assert!(of(None, None).starts_with("there is no checkpoint; start again"));
        assert!(of(None, Some("run/DONE_7")).contains("that of run/DONE_7 has the weights that failed; start again"));
        assert!(way_on(None).contains("with --out"));
    }
}
