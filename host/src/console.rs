//! Output of a run: lines on standard output and, in a terminal, a progress bar below them.

use crate::evaluate::multiple_choice::Score;
use crate::gpu_info::{GpuErrors, GpuInfo};
use crate::log::{LineFile, Step};
use anyhow::{Context, Result, anyhow};
use atomic_file::{create_directory, parent};
use indicatif::{ProgressBar, ProgressStyle};
use std::cell::{Cell, RefCell};
use std::fs::File;
use std::io::{self, IsTerminal, Write, stderr, stdout};
use std::path::PathBuf;

/// Prints the progress of a run.
pub struct Console {
    steps: usize,
    /// The GPU whose state is printed, and the interval in steps.
    gpu: Option<(GpuInfo, usize)>,
    errors: Option<GpuErrors>,
    /// `None` outside a terminal, where each step prints a line instead.
    bar: Option<ProgressBar>,
    output: RefCell<Output>,
    last_train_loss: Cell<Option<f32>>,
}

/// The destination of lines.
enum Output {
    /// Standard output and, if it is closed during the run, the file that replaces it.
    Stdout(Option<PathBuf>),
    File(LineFile),
    Discard,
}

impl Output {
    /// Writes a line. If standard output is closed, writes to the file that replaces it from here on.
    ///
    /// A file that cannot be written, as on a full disk, does not end a run: its lines wait in memory.
    fn line(&mut self, text: &str) -> Result<()> {
        match self {
            Self::Stdout(replacement) => {
                let Err(error) = writeln!(stdout(), "{text}") else { return Ok(()) };
                *self = Self::replacing_stdout(replacement.take(), &error)?;
                self.line(text)
            }
            Self::File(file) => {
                let _ = file.line(text);
                Ok(())
            }
            Self::Discard => Ok(()),
        }
    }

    /// Opens the file that replaces standard output, and warns. Without a file, nobody would see the results of the run, so
    /// this is an error.
    fn replacing_stdout(path: Option<PathBuf>, error: &io::Error) -> Result<Self> {
        let path = path.ok_or_else(|| {
            // The reason as text: a run that loses its results must not end like `head` closing a pipe.
            anyhow!("standard output: expected an open file or pipe, found a closed one ({error}); keep it open, or give --out DIR")
        })?;
        create_directory(parent(&path))?;
        let mut file = LineFile::open(path.clone())?;
        let warning = format!("warning: standard output is closed ({error}): output continues in {}", path.display());
        let _ = file.line(&warning);
        // Standard error may be closed too.
        let _ = writeln!(stderr(), "{warning}");
        Ok(Self::File(file))
    }
}

impl Console {
    /// Creates a console for a run of `steps` steps that prints to standard output. If that is closed during the run, the output
    /// continues in the file `replacement`; without one, it is an error.
    pub fn new(steps: usize, replacement: Option<PathBuf>) -> Self {
        let bar = (stdout().is_terminal() && stderr().is_terminal()).then(|| {
            let style = ProgressStyle::with_template("{bar:30} {pos}/{len} | {msg} | {eta} left")
                .expect("the template is valid")
                .progress_chars("=> ");
            ProgressBar::new(steps as u64).with_style(style)
        });
        Self { bar, ..Self::with_output(steps, Output::Stdout(replacement)) }
    }

    /// Creates a console for a rank other than 0, which prints to a file, or nowhere without a path.
    ///
    /// `append` continues an existing file instead of replacing it.
    pub fn to_file(steps: usize, path: Option<PathBuf>, append: bool) -> Result<Self> {
        let Some(path) = path else { return Ok(Self::with_output(steps, Output::Discard)) };
        if !append {
            File::create(&path).with_context(|| format!("cannot write {}", path.display()))?;
        }
        Ok(Self::with_output(steps, Output::File(LineFile::open(path)?)))
    }

    fn with_output(steps: usize, output: Output) -> Self {
        Self {
            steps,
            gpu: None,
            errors: None,
            bar: None,
            output: RefCell::new(output),
            last_train_loss: Cell::new(None),
        }
    }

    /// Reports errors of a GPU after each step.
    pub fn report_errors(&mut self, errors: Option<GpuErrors>) {
        self.errors = errors;
    }

    /// Prints the state of the GPU after every `every` steps.
    pub fn report_gpu(&mut self, gpu: GpuInfo, every: usize) {
        self.gpu = Some((gpu, every));
    }

    /// Prints a line, above the progress bar if there is one.
    pub fn line(&self, text: &str) -> Result<()> {
        let write = || self.output.borrow_mut().line(text);
        match &self.bar {
            Some(bar) if !bar.is_finished() => bar.suspend(write),
            _ => write(),
        }
    }

    /// Prints a training step; `rate` is the smoothed number of tokens per second.
    ///
    /// In a terminal, the step updates the progress bar instead of printing a line.
    pub fn step(&self, step: &Step, rate: f64) -> Result<()> {
        self.last_train_loss.set(Some(step.loss));
        if let Some(bar) = &self.bar {
            bar.set_position(step.step as u64 + 1);
            bar.set_message(format!("loss {:.4} | {rate:.0} tok/s", step.loss));
        } else {
            self.line(&step_line(step, self.steps, rate))?;
        }
        for error in self.errors.iter().flat_map(GpuErrors::take) {
            self.line(&format!("warning: {error}"))?;
        }
        match &self.gpu {
            // An error of NVML does not end the run.
            Some((gpu, every)) if (step.step + 1).is_multiple_of(*every) => {
                self.line(&gpu.line().unwrap_or_else(|error| format!("GPU: {error:#}")))
            }
            _ => Ok(()),
        }
    }

    /// Prints the validation loss after `step` steps.
    pub fn validation(&self, step: usize, loss: f64) -> Result<()> {
        self.line(&format!("step {step:4}/{} | val loss {loss:.6}", self.steps))
    }

    /// Prints the HellaSwag score after `step` steps.
    pub fn hellaswag(&self, step: usize, score: Score) -> Result<()> {
        self.line(&format!("step {step:4}/{} | HellaSwag: {score}", self.steps))
    }

    /// Returns the loss of the last training step that was printed.
    pub fn last_train_loss(&self) -> Option<f32> {
        self.last_train_loss.get()
    }

    /// Removes the progress bar. Lines printed from here on stay on the screen.
    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// Formats a step as llm.c does, without the z-scores while their window is not full.
fn step_line(step: &Step, steps: usize, rate: f64) -> String {
    let z = |z: Option<f64>| z.map_or(" ".to_owned(), |z| format!(" ({z:+.2}z)"));
    let mfu = step.mfu.map_or(String::new(), |mfu| format!(" {:.1}% MFU |", 100.0 * mfu));
    format!(
        "step {:4}/{steps} | loss {:7.6}{}| norm {:6.4}{}| lr {:.2e} | {:.2} ms |{mfu} {rate:.0} tok/s",
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
    fn step_lines_have_the_format_of_llm_c() {
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
            "step    1/10 | loss 5.270007 | norm 2.5000 | lr 1.00e-4 | 10.00 ms | 50.0% MFU | 25600 tok/s"
        );
        // llm.c's script that checks losses reads these columns.
        assert_eq!(&line[20..28], "5.270007");
        let verdict = Verdict { loss_z: Some(1.234), norm_z: Some(-0.5), skipped: None };
        let line = step_line(&Step { verdict, ..step }, 10, 25_600.0);
        assert!(line.contains("| loss 5.270007 (+1.23z)| norm 2.5000 (-0.50z)| lr"), "{line}");
    }

    #[test]
    fn evaluations_name_their_step() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("rank-1.log");
        let console = Console::to_file(100, Some(path.clone()), false).unwrap();
        console.validation(20, 3.25).unwrap();
        console.hellaswag(20, Score { correct: 3, examples: 4 }).unwrap();
        console.finish();
        let printed = std::fs::read_to_string(&path).unwrap();
        assert_eq!(printed, "step   20/100 | val loss 3.250000\nstep   20/100 | HellaSwag: 3/4 = 0.750000\n");
    }
}
