//! Progress bars on standard error, and lines beside them.
//!
//! Bars appear for work that takes longer than half a second and vanish when it ends. They are shown in a terminal only, and not with
//! `--quiet` or `--json`.

use anyhow::Result;
use console::Term;
use indicatif::{HumanDuration, MultiProgress, ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};
use rustix::termios::tcgetwinsize;
use std::fmt;
use std::io::{IsTerminal, Write, stderr, stdin, stdout};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, LazyLock};
use std::thread;
use std::time::Duration;
use system::process::Terminal;
use system::progress::{self, Report, Unit};

/// Time after which work is shown.
const DELAY: Duration = Duration::from_millis(500);
/// Interval in which the time left is updated.
const TICK: Duration = Duration::from_millis(250);

/// All bars of this process.
static BARS: LazyLock<MultiProgress> = LazyLock::new(|| MultiProgress::with_draw_target(draw_target()));
static SHOWS_BARS: AtomicBool = AtomicBool::new(false);
static QUIET: AtomicBool = AtomicBool::new(false);

/// Time that a progress bar waits for a terminal that accepts no output.
const STALL: Duration = Duration::from_secs(1);
/// Draws per second at most, indicatif's default.
const RATE: u8 = 20;

/// Returns the terminal of standard error as a draw target. A terminal that accepts no output does not block the program.
fn draw_target() -> ProgressDrawTarget {
    Terminal::of_stderr(STALL).map_or_else(ProgressDrawTarget::stderr, |terminal| {
        ProgressDrawTarget::term(Term::read_write_pair(stdin(), terminal), RATE)
    })
}

/// Sets what the commands of this process print: with `quiet`, only warnings and results; with `json`, no progress bars.
pub fn configure(quiet: bool, json: bool) {
    QUIET.store(quiet, Ordering::Relaxed);
    SHOWS_BARS.store(!quiet && !json && stderr().is_terminal(), Ordering::Relaxed);
    progress::show_with(show);
}

/// Stops showing progress bars: this process is a rank other than 0.
pub fn hide_bars() {
    SHOWS_BARS.store(false, Ordering::Relaxed);
}

/// Returns whether progress bars are shown.
pub fn shows_bars() -> bool {
    SHOWS_BARS.load(Ordering::Relaxed)
}

/// Returns whether only warnings and results are printed.
pub fn is_quiet() -> bool {
    QUIET.load(Ordering::Relaxed)
}

/// Returns a number with its noun, whose plural ends in s.
pub fn counted(number: usize, noun: &str) -> String {
    let plural = if number == 1 { "" } else { "s" };
    format!("{number} {noun}{plural}")
}

/// Returns the width of the terminal, or 80 without one.
pub fn columns() -> usize {
    let size = tcgetwinsize(stderr()).or_else(|_| tcgetwinsize(stdout())).map_or(0, |size| usize::from(size.ws_col));
    if size == 0 { 80 } else { size }
}

/// Adds a bar below those that are shown.
pub fn add(bar: ProgressBar) -> ProgressBar {
    BARS.add(bar)
}

/// Calls a function that prints, without the progress bars.
pub fn suspend<T>(print: impl FnOnce() -> T) -> T {
    BARS.suspend(print)
}

/// Prints a line of the result to standard output, above the progress bars.
pub fn line(text: &str) -> Result<()> {
    Ok(suspend(|| writeln!(stdout(), "{text}"))?)
}

/// Prints a line about the work to standard error, above the progress bars. A quiet command omits it.
pub fn note(text: &str) -> Result<()> {
    if is_quiet() { Ok(()) } else { Ok(suspend(|| writeln!(stderr(), "{text}"))?) }
}

/// A bar that vanishes when it is dropped.
struct Bar {
    bar: ProgressBar,
    /// Tells the thread that would show the bar that the work has ended.
    _ended: Sender<()>,
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

/// Shows work that has begun, after [`DELAY`].
fn show(name: &str, unit: Unit, total: Option<u64>) -> Option<Report> {
    if !shows_bars() {
        return None;
    }
    let style = ProgressStyle::with_template(template(columns(), unit, total.is_some()));
    let style = style.expect("the template is valid").progress_chars("=> ").with_key("left", write_time_left);
    let bar = ProgressBar::with_draw_target(total, ProgressDrawTarget::hidden());
    let bar = bar.with_style(style).with_message(name.to_owned());
    let (ended, end) = channel();
    let shown = bar.clone();
    thread::spawn(move || {
        if end.recv_timeout(DELAY) == Err(RecvTimeoutError::Timeout) {
            add(shown).enable_steady_tick(TICK);
        }
    });
    let bar = Bar { bar, _ended: ended };
    Some(Arc::new(move |amount| bar.bar.inc(amount)))
}

/// Writes the time left, such as 12m. It is unknown before the first part is done.
fn write_time_left(state: &ProgressState, out: &mut dyn fmt::Write) {
    // A failure to format the bar does not end the work.
    let _ = if state.pos() == 0 { write!(out, "?") } else { write!(out, "{:#}", HumanDuration(state.eta())) };
}

/// Returns the template of a bar that fits into a terminal.
fn template(columns: usize, unit: Unit, has_total: bool) -> &'static str {
    match (columns, unit, has_total) {
        (100.., Unit::Bytes, true) => "{msg} {bar:30} {bytes}/{total_bytes} | {bytes_per_sec} | {left} left",
        (100.., Unit::Count, true) => "{msg} {bar:30} {pos}/{len} | {left} left",
        (70.., _, true) => "{msg:20!} {bar:20} {percent:>3}% | {left} left",
        // 40 columns hold "verifying checkpoint 100% | 59m left".
        (_, _, true) => "{msg:20!} {percent:>3}% | {left} left",
        (_, Unit::Bytes, false) => "{msg:20!} {bytes}",
        (_, Unit::Count, false) => "{msg:20!} {pos}",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_fit_into_narrow_terminals() {
        for columns in [40, 69, 70, 99, 100, 200] {
            for (unit, total) in [Unit::Bytes, Unit::Count].into_iter().flat_map(|unit| [(unit, true), (unit, false)]) {
                let template = template(columns, unit, total);
                let name = if columns < 100 { 20 } else { "train-00000-of-00001.parquet".len() };
                let full = template.replace("{msg:20!}", &"n".repeat(name)).replace("{msg}", &"n".repeat(name));
                let full = full.replace("{bar:30}", &"=".repeat(30)).replace("{bar:20}", &"=".repeat(20));
                let full =
                    full.replace("{pos}/{len}", "12345/57220").replace("{percent:>3}", "100").replace("{left}", "59m");
                let full = full.replace("{bytes}/{total_bytes}", "1.2 GiB/12.3 GiB").replace("{bytes}", "123.45 GiB");
                let shown = full.replace("{bytes_per_sec}", "1.2 GiB/s").replace("{pos}", "1234567");
                assert!(!shown.contains('{') && shown.len() <= columns, "{columns}: {shown}");
            }
        }
    }
}
