//! Output of a run: lines on standard output and, in a terminal, a progress bar below them.

use crate::evaluate::multiple_choice::Score;
use crate::gpu_info::{GpuErrors, GpuInfo};
use crate::log::{LineFile, Step, closed_stdout};
use crate::style::{Tone, is_colored, paint};
use crate::terminal;
use crate::train::SourceLoss;
use anyhow::{Context, Result};
use atomic_file::{create_directory, parent};
use indicatif::{ProgressBar, ProgressStyle};
use metrics::curves::training_loss;
use std::cell::RefCell;
use std::io::{self, Write, stderr, stdout};
use std::path::{Path, PathBuf};
use std::time::Duration;
use system::fs::File;
use system::process::{self, print_error_within, print_within};

/// The standard output of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Verbosity {
    /// Settings, every step or a progress bar, and results.
    #[default]
    Normal,
    /// Warnings and results.
    Quiet,
    /// The lines of `main.jsonl`, which the log prints. Other lines, except those of steps and evaluations, go to standard error.
    Json,
}

/// Prints the progress of a run.
pub struct Console {
    steps: usize,
    verbosity: Verbosity,
    /// The GPU whose state is printed, and the interval in steps.
    gpu: Option<(GpuInfo, usize)>,
    errors: Option<GpuErrors>,
    /// `None` outside a terminal, where each step prints a line instead.
    bar: Option<ProgressBar>,
    output: RefCell<Output>,
    /// The losses of the steps of this process.
    losses: RefCell<Vec<f32>>,
    /// Interval of the steps that print a line, if there is no progress bar.
    log_every: usize,
    /// The line of the last step, unless it was printed.
    unprinted: RefCell<Option<String>>,
}

/// The destination of lines.
enum Output {
    /// Standard output and, if it is closed during the run, the file that replaces it.
    Stdout(Option<PathBuf>),
    /// Standard error and, if it is closed during the run, the file that replaces it.
    Stderr(Option<PathBuf>),
    File(LineFile),
    Discard,
}

/// Time after which a reader that reads nothing no longer delays a run. A scheduler kills a run 30 s after SIGTERM.
pub(crate) const STALL: Duration = Duration::from_secs(10);

/// Returns in words that a stream cannot be written.
pub(crate) fn unusable(error: &io::Error) -> String {
    let state = if error.kind() == io::ErrorKind::TimedOut { "stalls" } else { "is closed" };
    format!("{state} ({error})")
}

impl Output {
    /// Writes a line. If the stream is closed, writes to the file that replaces it from here on.
    ///
    /// A file that cannot be written, as on a full disk, does not end a run: its lines wait in memory.
    fn line(&mut self, text: &str) -> Result<()> {
        match self {
            Self::Stdout(replacement) => {
                // Without a file, the run waits for its reader, because nobody would see its results.
                let print = |text| if replacement.is_some() { print_within(text, STALL) } else { process::print(text) };
                let Err(error) = print(text) else { return Ok(()) };
                let Some(path) = replacement.take() else { return Err(closed_stdout(&error)) };
                *self = Self::replacing("standard output", &path, &error)?;
                self.line(text)
            }
            Self::Stderr(replacement) => {
                let print = |text| match replacement {
                    Some(_) => print_error_within(text, STALL),
                    None => writeln!(stderr(), "{text}"),
                };
                let Err(error) = print(text) else { return Ok(()) };
                let path = replacement.take();
                *self = path.map_or(Ok(Self::Discard), |path| Self::replacing("standard error", &path, &error))?;
                self.line(text)
            }
            Self::File(file) => {
                let _ = file.line(text);
                Ok(())
            }
            Self::Discard => Ok(()),
        }
    }

    /// Opens the file that replaces a closed stream, and warns.
    fn replacing(stream: &str, path: &Path, error: &io::Error) -> Result<Self> {
        create_directory(parent(path))?;
        let mut file = LineFile::open(path.to_owned())?;
        let warning = format!("warning: {stream} {}: output continues in {}", unusable(error), path.display());
        let _ = file.line(&warning);
        let _ = print_error_within(&warning, Duration::from_secs(1));
        Ok(Self::File(file))
    }
}

impl Console {
    /// Creates a console for a run of `steps` steps that prints to standard output. If that is closed during the run, the output
    /// continues in the file `replacement`; without one, it is an error.
    pub fn new(steps: usize, replacement: Option<PathBuf>) -> Self {
        Self::with_verbosity(steps, replacement, Verbosity::Normal)
    }

    /// Creates a console that prints as much as `verbosity` states. With [`Verbosity::Json`], the lines go to standard error and are lost if
    /// that is closed during the run and there is no `replacement`.
    pub fn with_verbosity(steps: usize, replacement: Option<PathBuf>, verbosity: Verbosity) -> Self {
        let has_bar = verbosity == Verbosity::Normal && process::prints_to_terminal();
        let bar = has_bar.then(|| {
            let style = ProgressStyle::with_template(bar_template(terminal::columns()))
                .expect("the template is valid")
                .progress_chars("=> ");
            terminal::add(ProgressBar::new(steps as u64).with_style(style))
        });
        let output = match verbosity {
            Verbosity::Json => Output::Stderr(replacement),
            Verbosity::Normal | Verbosity::Quiet => Output::Stdout(replacement),
        };
        Self { verbosity, bar, ..Self::with_output(steps, output) }
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
            verbosity: Verbosity::Normal,
            gpu: None,
            errors: None,
            bar: None,
            output: RefCell::new(output),
            losses: RefCell::default(),
            log_every: 1,
            unprinted: RefCell::new(None),
        }
    }

    /// Prints a line for every `every`-th step, for the first and the last, and before each evaluation. By default, a run prints about
    /// a hundred steps. A progress bar and the files of other ranks show every step.
    pub fn log_every(&mut self, every: Option<usize>) {
        if !matches!(&*self.output.borrow(), Output::File(_) | Output::Discard) {
            self.log_every = every.unwrap_or_else(|| self.steps.div_ceil(LINES).max(1));
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

    /// Prints a line, above the progress bar if there is one. A quiet console prints only warnings.
    pub fn line(&self, text: &str) -> Result<()> {
        let rest = text.strip_prefix(WARNING);
        match rest {
            None if self.verbosity == Verbosity::Quiet => Ok(()),
            None => self.result(text),
            Some(rest) => {
                let colored = match &*self.output.borrow() {
                    Output::Stdout(_) => is_colored(&stdout()),
                    Output::Stderr(_) => is_colored(&stderr()),
                    Output::File(..) | Output::Discard => false,
                };
                self.result(&format!("{}{rest}", paint(WARNING, Tone::Warning, colored)))
            }
        }
    }

    /// Prints a result of the run, also on a quiet console.
    pub fn result(&self, text: &str) -> Result<()> {
        let write = || self.output.borrow_mut().line(text);
        match &self.bar {
            Some(_) => terminal::suspend(write),
            None => write(),
        }
    }

    /// Prints a training step; `rate` is the smoothed number of tokens per second.
    ///
    /// In a terminal, the step updates the progress bar instead of printing a line. Otherwise its line may wait until
    /// [`last_step`](Self::last_step).
    pub fn step(&self, step: &Step, rate: f64) -> Result<()> {
        let first = self.losses.borrow().is_empty();
        self.losses.borrow_mut().push(step.loss);
        if let Some(bar) = &self.bar {
            bar.set_position(step.step as u64 + 1);
            bar.set_message(format!("loss {:.4} | {rate:.0} tok/s", step.loss));
        } else if self.verbosity == Verbosity::Normal {
            let line = step_line(step, self.steps, rate);
            let number = step.step + 1;
            if first || number == self.steps || number.is_multiple_of(self.log_every) {
                self.unprinted.take();
                self.line(&line)?;
            } else {
                self.unprinted.replace(Some(line));
            }
        }
        for error in self.errors.iter().flat_map(GpuErrors::take) {
            let warning = format!("warning: {error}");
            self.line(&warning)?;
            // Ranks other than 0 have no terminal of their own.
            if matches!(&*self.output.borrow(), Output::File(_) | Output::Discard) {
                process::print_error(&warning);
            }
        }
        match &self.gpu {
            // An error of NVML does not end the run.
            Some((gpu, every)) if (step.step + 1).is_multiple_of(*every) => {
                self.line(&gpu.line().unwrap_or_else(|error| format!("GPU: {error:#}")))
            }
            _ => Ok(()),
        }
    }

    /// Prints the last step, unless it was printed.
    pub fn last_step(&self) -> Result<()> {
        self.unprinted.take().map_or(Ok(()), |line| self.line(&line))
    }

    /// Prints the validation loss after `step` steps.
    pub fn validation(&self, step: usize, loss: f64, sources: &[SourceLoss]) -> Result<()> {
        let of_source = |SourceLoss { name, val_loss, bits_per_byte }: &SourceLoss| {
            let bits = bits_per_byte.map_or_else(String::new, |bits| format!(", {bits:.4} bits per byte"));
            format!(" | {name} {val_loss:.6}{bits}")
        };
        let sources: String = sources.iter().map(of_source).collect();
        self.evaluation(&format!("step {step:4}/{} | val loss {loss:.6}{sources}", self.steps))
    }

    /// Prints the HellaSwag score after `step` steps.
    pub fn hellaswag(&self, step: usize, score: Score) -> Result<()> {
        self.evaluation(&format!("step {step:4}/{} | HellaSwag: {score}", self.steps))
    }

    /// Prints CORE after `step` steps.
    pub fn core(&self, step: usize, core: f64) -> Result<()> {
        self.evaluation(&format!("step {step:4}/{} | CORE: {core:.6}", self.steps))
    }

    fn evaluation(&self, text: &str) -> Result<()> {
        // The log has printed the record.
        if self.verbosity == Verbosity::Json { Ok(()) } else { self.line(text) }
    }

    /// Returns the training loss of the steps that were printed.
    pub fn train_loss(&self) -> Option<f64> {
        training_loss(&self.losses.borrow())
    }

    /// Replaces the directory of the file that replaces a closed stream.
    pub fn follow(&self, directory: &Path) {
        if let Output::Stdout(Some(path)) | Output::Stderr(Some(path)) = &mut *self.output.borrow_mut() {
            *path = directory.join(path.file_name().unwrap_or_default());
        }
    }

    /// Removes the progress bar. Lines printed from here on stay on the screen.
    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// Steps of a run that print a line by default.
const LINES: usize = 100;

/// The start of a warning.
const WARNING: &str = "warning:";

/// Returns the template of a progress bar that fits into a terminal.
fn bar_template(columns: usize) -> &'static str {
    match columns {
        100.. => "{bar:30} {pos}/{len} | {msg} | {eta} left",
        70.. => "{bar:10} {pos}/{len} | {msg} | {eta} left",
        // 40 columns hold "123456/572204 | loss 3.2847 | 1d left".
        _ => "{pos}/{len} | {msg:11!} | {eta} left",
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
            experts: None,
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
    fn a_long_run_prints_about_a_hundred_steps() {
        let interval = |output, steps, every| {
            let mut console = Console::with_output(steps, output);
            console.log_every(every);
            console.log_every
        };
        for (steps, expected) in [(1, 1), (100, 1), (101, 2), (20_000, 200)] {
            assert_eq!(interval(Output::Stdout(None), steps, None), expected, "{steps}");
            assert_eq!(interval(Output::Stdout(None), steps, Some(7)), 7, "{steps}");
            // The file of another rank.
            assert_eq!(interval(Output::Discard, steps, None), 1, "{steps}");
        }
    }

    #[test]
    fn the_progress_bar_fits_into_narrow_terminals() {
        for columns in [40, 70, 100, 200] {
            let template = bar_template(columns);
            let full = template.replace("{bar:30}", &"=".repeat(30)).replace("{bar:10}", &"=".repeat(10));
            let full = full.replace("{pos}/{len}", "123456/572204").replace("{msg:11!}", "loss 3.2847");
            let shown = full.replace("{msg}", "loss 3.2847 | 1234567 tok/s").replace("{eta}", "23h");
            assert!(!shown.contains('{') && shown.len() <= columns, "{columns}: {shown}");
        }
    }

    #[test]
    fn evaluations_name_their_step() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("rank-1.log");
        let console = Console::to_file(100, Some(path.clone()), false).unwrap();
        console.validation(20, 3.25, &[]).unwrap();
        console.hellaswag(20, Score { correct: 3, examples: 4 }).unwrap();
        console.finish();
        let printed = std::fs::read_to_string(&path).unwrap();
        assert_eq!(printed, "step   20/100 | val loss 3.250000\nstep   20/100 | HellaSwag: 3/4 = 0.750000\n");
    }
}
