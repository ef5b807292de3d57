//! The runs of a sweep: every combination of flag values, each with its directory.

use crate::commands::json;
use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use std::collections::HashSet;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::slice;

/// The file in a run's directory that marks the run as finished.
const FINISHED: &str = "sweep.json";

/// Flags that the sweep sets itself.
const RESERVED: [&str; 2] = ["out", "resume"];

/// A flag and the values to try.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Axis {
    /// Name without dashes.
    pub flag: String,
    pub values: Vec<String>,
}

/// Parses `lr=1e-4,3e-4`.
pub fn axis(text: &str) -> Result<Axis, String> {
    let expected = "expected a flag of train and values, such as lr=1e-4,3e-4";
    let (flag, values) = text.split_once('=').ok_or(expected)?;
    let flag = flag.trim_start_matches('-');
    let values: Vec<String> = values.split(',').map(str::to_owned).collect();
    if flag.is_empty() || values.iter().any(String::is_empty) {
        return Err(expected.to_owned());
    }
    if RESERVED.contains(&flag) {
        return Err(format!("expected a flag other than {flag}, which the sweep sets for each run"));
    }
    Ok(Axis { flag: flag.to_owned(), values })
}

/// A combination of values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Run {
    /// One value of each axis.
    pub values: Vec<String>,
    pub directory: PathBuf,
    /// Flags of `train`, without the directory.
    flags: Vec<String>,
}

/// The contents of the file that marks a run as finished.
#[derive(Debug, Serialize, Deserialize)]
struct Finished {
    flags: Vec<String>,
}

/// Returns every combination of values. `common` are the flags of all runs, which come before those of the axes.
pub fn combinations(axes: &[Axis], out: &Path, common: &[String]) -> Result<Vec<Run>> {
    let mut flags = HashSet::new();
    for Axis { flag, .. } in axes {
        ensure!(
            flags.insert(flag),
            "--flag {flag}: expected each flag once, found it twice; list all values in one --flag"
        );
    }
    let mut rows: Vec<Vec<String>> = vec![Vec::new()];
    for axis in axes {
        let with_each = |row: &Vec<String>| -> Vec<_> {
            axis.values.iter().map(|value| [&row[..], slice::from_ref(value)].concat()).collect()
        };
        rows = rows.iter().flat_map(with_each).collect();
    }
    let run = |values: Vec<String>| {
        let settings: Vec<String> =
            axes.iter().zip(&values).map(|(axis, value)| format!("{}={value}", axis.flag)).collect();
        let flags = common.iter().cloned().chain(settings.iter().map(|setting| format!("--{setting}"))).collect();
        Run { values, directory: out.join(directory_name(&settings)), flags }
    };
    let runs: Vec<Run> = rows.into_iter().map(run).collect();
    let mut directories = HashSet::new();
    for run in &runs {
        let name = run.directory.display();
        ensure!(
            directories.insert(&run.directory),
            "{name}: expected different values for each run, found two runs with this directory"
        );
    }
    Ok(runs)
}

/// Returns a name without characters that need quotes in a shell.
fn directory_name(settings: &[String]) -> String {
    let safe = |c: char| if c.is_alphanumeric() || "=,.+-_".contains(c) { c } else { '-' };
    settings.join(",").chars().map(safe).collect()
}

impl Run {
    /// Returns the arguments of `train`.
    pub fn arguments(&self) -> impl Iterator<Item = OsString> {
        let directory = ["--out".into(), self.directory.clone().into(), "--resume=auto".into()];
        self.flags.iter().map(OsString::from).chain(directory)
    }

    /// Returns the values in words: `lr=1e-4, warmup=10`.
    pub fn settings(&self, axes: &[Axis]) -> String {
        let settings = axes.iter().zip(&self.values).map(|(axis, value)| format!("{}={value}", axis.flag));
        settings.collect::<Vec<_>>().join(", ")
    }

    fn marker(&self) -> PathBuf {
        self.directory.join(FINISHED)
    }

    /// Returns whether an earlier sweep finished this run.
    pub fn is_finished(&self) -> bool {
        self.marker().exists()
    }

    pub fn mark_finished(&self) -> Result<()> {
        json::write(&self.marker(), &Finished { flags: self.flags.clone() })
    }

    /// Fails if an earlier sweep finished this run with other flags.
    pub fn check_earlier(&self) -> Result<()> {
        if !self.is_finished() {
            return Ok(());
        }
        let path = self.marker();
        let text = bounded_file::read_to_string(&path, bounded_file::DESCRIPTION)
            .with_context(|| format!("cannot read {}", path.display()))?;
        let earlier: Finished = serde_json::from_str(&text).with_context(|| {
            format!("{}: expected the flags of a finished run; delete the file to repeat it", path.display())
        })?;
        ensure!(
            earlier.flags == self.flags,
            "{}: expected the flags of the finished run ({}), found others ({}); use another --out",
            self.directory.display(),
            earlier.flags.join(" "),
            self.flags.join(" ")
        );
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn strings(words: &[&str]) -> Vec<String> {
        words.iter().map(|word| (*word).to_owned()).collect()
    }

    #[test]
    fn axes_are_a_flag_and_values() {
        assert_eq!(axis("lr=1e-4,3e-4"), Ok(Axis { flag: "lr".into(), values: strings(&["1e-4", "3e-4"]) }));
        assert_eq!(axis("--val=a=b").unwrap().values, ["a=b"]);
        for text in ["lr", "=1", "lr=", "lr=1,,2", "--=1"] {
            assert!(axis(text).unwrap_err().contains("such as lr=1e-4,3e-4"), "{text}");
        }
        for text in ["out=a,b", "--resume=1"] {
            assert!(axis(text).unwrap_err().contains("which the sweep sets"), "{text}");
        }
    }

    #[test]
    fn runs_are_all_combinations_and_the_last_flag_varies_first() {
        let axes = [axis("lr=1e-4,3e-4").unwrap(), axis("train=a/b.bin").unwrap(), axis("warmup=1,2").unwrap()];
        let runs = combinations(&axes, Path::new("out"), &strings(&["--steps", "3"])).unwrap();
        let names: Vec<String> = runs.iter().map(|run| run.directory.display().to_string()).collect();
        assert_eq!(
            names,
            [
                "out/lr=1e-4,train=a-b.bin,warmup=1",
                "out/lr=1e-4,train=a-b.bin,warmup=2",
                "out/lr=3e-4,train=a-b.bin,warmup=1",
                "out/lr=3e-4,train=a-b.bin,warmup=2",
            ]
        );
        let arguments: Vec<OsString> = runs[1].arguments().collect();
        let expected =
            ["--steps", "3", "--lr=1e-4", "--train=a/b.bin", "--warmup=2", "--out", &names[1], "--resume=auto"];
        assert_eq!(arguments, expected.map(OsString::from));
        assert_eq!(runs[2].settings(&axes), "lr=3e-4, train=a/b.bin, warmup=1");
    }

    #[test]
    fn repeated_flags_and_equal_directories_are_errors() {
        let error = |axes: &[&str]| {
            let axes: Vec<Axis> = axes.iter().map(|text| axis(text).unwrap()).collect();
            combinations(&axes, Path::new("out"), &[]).unwrap_err().to_string()
        };
        assert!(error(&["lr=1", "lr=2"]).contains("--flag lr: expected each flag once, found it twice"));
        assert!(error(&["lr=1,2,1"]).contains("out/lr=1: expected different values for each run"));
        assert!(error(&["train=a/b,a-b"]).contains("out/train=a-b: expected different values for each run"));
    }

    #[test]
    fn a_finished_run_must_have_the_same_flags() {
        let dir = tempfile::tempdir().unwrap();
        let run =
            |common: &[&str]| combinations(&[axis("lr=1").unwrap()], dir.path(), &strings(common)).unwrap().remove(0);
        let first = run(&["--steps", "3"]);
        assert!(!first.is_finished() && first.check_earlier().is_ok());
        fs::create_dir(&first.directory).unwrap();
        first.mark_finished().unwrap();
        assert!(first.is_finished() && first.check_earlier().is_ok());
        let error = run(&["--steps", "4"]).check_earlier().unwrap_err().to_string();
        assert!(error.contains("finished run (--steps 3 --lr=1), found others (--steps 4 --lr=1)"), "{error}");
        fs::write(first.marker(), "{}").unwrap();
        let error = format!("{:#}", first.check_earlier().unwrap_err());
        assert!(error.contains("sweep.json: expected the flags of a finished run; delete the file"), "{error}");
    }
}
