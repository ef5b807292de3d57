//! What a person sees of a run: lines on standard output, and on a terminal a progress bar below them.

use crate::gpu_info::GpuInfo;
use crate::log::Step;
use anyhow::{Context, Result};
use indicatif::{ProgressBar, ProgressStyle};
use std::fs::File;
use std::io::{IsTerminal, Write, stderr, stdout};
use std::path::PathBuf;

pub struct Console {
    steps: usize,
    /// Told of every so many steps.
    gpu: Option<(GpuInfo, usize)>,
    /// None where a terminal is missing; each step is a line then.
    bar: Option<ProgressBar>,
    to: To,
}

/// Where lines go.
enum To {
    Output,
    File(File, PathBuf),
    Nowhere,
}

impl Console {
    pub fn new(steps: usize) -> Self {
        let bar = (stdout().is_terminal() && stderr().is_terminal()).then(|| {
            let style = ProgressStyle::with_template("{bar:30} {pos}/{len} | {msg} | {eta} left")
                .expect("the template is well formed")
                .progress_chars("=> ");
            ProgressBar::new(steps as u64).with_style(style)
        });
        Self { steps, gpu: None, bar, to: To::Output }
    }

    /// For a process beside the one that a person watches: into a file, or nowhere. With `append`, the file goes on.
    pub fn aside(steps: usize, path: Option<PathBuf>, append: bool) -> Result<Self> {
        let Some(path) = path else { return Ok(Self { steps, gpu: None, bar: None, to: To::Nowhere }) };
        let file = File::options().create(true).write(true).append(append).truncate(!append).open(&path);
        let file = file.with_context(|| format!("cannot write {}", path.display()))?;
        Ok(Self { steps, gpu: None, bar: None, to: To::File(file, path) })
    }

    /// Tells what the GPU is doing after every `every` steps.
    pub fn tell_of(&mut self, gpu: GpuInfo, every: usize) {
        self.gpu = Some((gpu, every));
    }

    pub fn line(&self, text: &str) -> Result<()> {
        let write = || match &self.to {
            To::Output => writeln!(stdout(), "{text}").context("cannot write to standard output"),
            To::File(file, path) => {
                writeln!(&mut &*file, "{text}").with_context(|| format!("cannot write {}", path.display()))
            }
            To::Nowhere => Ok(()),
        };
        match &self.bar {
            Some(bar) => bar.suspend(write),
            None => write(),
        }
    }

    /// `rate` is the smoothed number of tokens per second.
    pub fn step(&self, step: &Step, rate: f64) -> Result<()> {
        if let Some(bar) = &self.bar {
            bar.set_position(step.step as u64 + 1);
            bar.set_message(format!("loss {:.4} | {rate:.0} tok/s", step.loss));
        } else {
            self.line(&step_line(step, self.steps, rate))?;
        }
        match &self.gpu {
            // A reading that fails is told of; it is no reason to end a run.
            Some((gpu, every)) if (step.step + 1).is_multiple_of(*every) => {
                self.line(&gpu.line().unwrap_or_else(|error| format!("GPU: {error:#}")))
            }
            _ => Ok(()),
        }
    }

    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// llm.c's, z-scores too.
fn step_line(step: &Step, steps: usize, rate: f64) -> String {
    let z = |z: Option<f64>| z.map_or("+nan".to_owned(), |z| format!("{z:+.2}"));
    let mfu = step.mfu.map_or(String::new(), |mfu| format!(" {:.1}% MFU |", 100.0 * mfu));
    format!(
        "step {:4}/{steps} | loss {:7.6} ({}z)| norm {:6.4} ({}z)| lr {:.2e} | {:.2} ms |{mfu} {rate:.0} tok/s",
        step.step + 1,
        step.loss,
        z(step.verdict.loss_z),
        step.norm,
        z(step.verdict.norm_z),
        step.lr,
        step.ms
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use model::guards::Verdict;

    #[test]
    fn the_loss_is_where_llm_cs_checker_reads_it() {
        let step = Step {
            step: 0,
            loss: 5.270_007,
            lr: 1e-4,
            norm: 2.5,
            ms: 10.0,
            tokens_per_second: 25_600.0,
            mfu: Some(0.5),
            tokens: 256,
            verdict: Verdict::default(),
        };
        let line = step_line(&step, 10, 25_600.0);
        assert_eq!(
            line,
            "step    1/10 | loss 5.270007 (+nanz)| norm 2.5000 (+nanz)| lr 1.00e-4 | 10.00 ms | 50.0% MFU | 25600 tok/s"
        );
        assert_eq!(&line[20..28], "5.270007");
        let verdict = Verdict { loss_z: Some(1.234), norm_z: Some(-0.5), skipped: None };
        let line = step_line(&Step { verdict, ..step }, 10, 25_600.0);
        assert!(line.contains("| loss 5.270007 (+1.23z)| norm 2.5000 (-0.50z)| lr"), "{line}");
    }
}
