//! The loss curve in the terminal, which follows a log while the run continues.

mod screen;

use anyhow::{Context, Result, ensure};
use metrics::axis::{AxisScale, short_count};
use metrics::curves::{Points, Positions, XAxis, default_smoothing, reduce, smooth, visible_range};
use metrics::figure::FigureOptions;
use metrics::report::Summary;
use metrics::run::RunLog;
use screen::{DIM, PLAIN, Screen, Style, Terminal};
use std::env;
use std::io::{IsTerminal, Write, stdout};
use std::time::{Duration, Instant};

/// Minimum time between two reads of the log.
const INTERVAL: Duration = Duration::from_secs(1);
/// Blue, yellow, green, magenta, cyan and red.
const COLORS: [Style; 6] = ["34", "33", "32", "35", "36", "31"];
const GRAY: Style = "90";
/// The bytes of Control-C and of Escape.
const INTERRUPT: u8 = 3;
const ESCAPE: u8 = 0x1b;
/// Columns of dots that a curve is reduced to. A cell has two of them.
const COLUMNS: f64 = 400.0;

/// The settings that keys change.
struct View {
    log_x: bool,
    log_y: bool,
    /// `None`: [`default_smoothing`] of each run.
    smoothing: Option<f64>,
    colors: bool,
}

/// A curve of the chart, in values whose axes are linear.
struct Curve {
    style: Style,
    points: Points,
    /// Whether a line connects the points.
    connected: bool,
}

/// Draws the logs that `read` returns until the user quits, and then prints their final values.
pub fn run(read: &dyn Fn() -> Result<Vec<RunLog>>, options: &FigureOptions) -> Result<()> {
    ensure!(stdout().is_terminal(), "--live: expected a terminal, found a file or pipe; use --out FILE");
    let mut runs = read()?;
    let mut view = View {
        log_x: options.log_x,
        log_y: options.log_y,
        smoothing: options.smoothing,
        colors: env::var_os("NO_COLOR").is_none_or(|value| value.is_empty()),
    };
    let mut terminal = Terminal::open().context("cannot draw in this terminal; use --out FILE")?;
    let mut interval = INTERVAL;
    loop {
        let curves = curves(&runs, options.x, &view)?;
        draw(terminal.size()?, &runs, &curves, options.x, &view).show()?;
        let Some(bytes) = terminal.bytes(interval)? else { break };
        if bytes.is_empty() {
            let started = Instant::now();
            // A run that starts again has an empty log for a moment.
            if let Ok(newer) = read() {
                runs = newer;
            }
            // Reading a long log takes at most a fifth of the time.
            interval = INTERVAL.max(4 * started.elapsed());
        }
        if bytes == [ESCAPE] {
            break;
        }
        // Arrows and other keys begin with Escape.
        let keys = bytes.split(|byte| *byte == ESCAPE).next().unwrap_or_default();
        if keys.iter().any(|key| matches!(*key, b'q' | INTERRUPT)) {
            break;
        }
        for key in keys {
            match key {
                b'x' => view.log_x = !view.log_x,
                b'y' => view.log_y = !view.log_y,
                b's' => view.smoothing = if view.smoothing == Some(0.0) { None } else { Some(0.0) },
                _ => {}
            }
        }
    }
    drop(terminal);
    for run in &runs {
        writeln!(stdout(), "{}", status(run))?;
    }
    Ok(())
}

/// Returns the newest values of a run on one line.
fn status(run: &RunLog) -> String {
    let summary = Summary::new(run);
    let mut text = format!("{}: step {}", run.name, summary.steps);
    let loss = |loss: f64| format!("{loss:.4}");
    let values = [
        ("train", summary.train_loss.map(loss)),
        ("val", summary.val_loss.map(loss)),
        ("tok/s", summary.tokens_per_second.map(short_count)),
    ];
    for (name, value) in values.into_iter().filter_map(|(name, value)| Some((name, value?))) {
        text.extend([" | ", name, " ", &value]);
    }
    text
}

/// Returns the loss curves of the runs: raw values first, so that others are drawn over them.
fn curves(runs: &[RunLog], x: XAxis, view: &View) -> Result<Vec<Curve>> {
    let mut curves: [Vec<Curve>; 3] = Default::default();
    for (i, run) in runs.iter().enumerate() {
        let positions = Positions::new(run, x)?;
        let losses = positions.of_steps(run, |step| step.loss);
        let validations = positions.of_evaluations(run, &run.validations);
        let color = |at: usize| if view.colors { COLORS[at % COLORS.len()] } else { PLAIN };
        let faint = if view.colors { GRAY } else { DIM };
        let validation_color = color(if runs.len() == 1 { 1 } else { i });
        let mut add = |layer: usize, style, points, connected| curves[layer].push(Curve { style, points, connected });
        let smoothing = view.smoothing.unwrap_or_else(|| default_smoothing(run.steps.len()));
        if smoothing > 0.0 {
            add(1, color(i), smooth(&losses, smoothing), true);
            add(0, faint, losses, true);
        } else {
            add(1, color(i), losses, true);
        }
        add(2, validation_color, validations, false);
    }
    Ok(curves.into_iter().flatten().collect())
}

/// Draws the newest values of the runs, the chart, and a line with the keys.
fn draw(size: (usize, usize), runs: &[RunLog], curves: &[Curve], x: XAxis, view: &View) -> Screen {
    let mut screen = Screen::new(size);
    let (width, height) = size;
    let header = runs.len().min(height / 3);
    for (i, run) in runs.iter().enumerate().take(header) {
        screen.text(0, i, &status(run), if view.colors { COLORS[i % COLORS.len()] } else { PLAIN });
    }
    screen.text(0, height.saturating_sub(1), "q quit  y log loss  x log axis  s smoothing", DIM);

    let points = || curves.iter().flat_map(|curve| &curve.points);
    let shown = |value: f64, log: bool| value.is_finite() && (value > 0.0 || !log);
    let xs = || points().filter(|(x, y)| shown(*x, view.log_x) && y.is_finite()).map(|(x, _)| *x);
    let low = xs().fold(f64::INFINITY, f64::min);
    let Some((bottom, top)) = visible_range(points().map(|(_, y)| *y).filter(|y| shown(*y, view.log_y))) else {
        screen.text(0, header, "no finite loss yet", PLAIN);
        return screen;
    };
    let low = if low.is_finite() { low } else { 1.0 };
    let horizontal = AxisScale::new(low, xs().fold(low, f64::max), view.log_x);
    let vertical = AxisScale::new(bottom, top, view.log_y).padded(0.04, 0.04);
    let left = labels(&vertical, 8).iter().map(String::len).max().unwrap_or(0).max(6);
    // Below the chart are its axis, the labels of the axis, and the keys.
    let Some(rows) = height.checked_sub(header + 3).filter(|rows| *rows > 0 && width > left + 1) else {
        return screen;
    };
    let area = Area { left: left + 1, top: header, width: width - left - 1, height: rows };
    area.axes(&mut screen, &horizontal, &vertical, x);
    for curve in curves {
        let place = |&(x, y): &(f64, f64)| (horizontal.position(x), vertical.position(y));
        let placed: Points = curve.points.iter().map(place).collect();
        let visible = |(x, y): &(f64, f64)| (0.0..=1.0).contains(x) && (0.0..=1.0).contains(y);
        let points: Points = reduce(&placed, 1.0 / COLUMNS).into_iter().filter(visible).collect();
        area.curve(&mut screen, &points, curve);
    }
    screen
}

/// The cells of the chart, without its axes.
struct Area {
    left: usize,
    top: usize,
    width: usize,
    height: usize,
}

impl Area {
    fn axes(&self, screen: &mut Screen, horizontal: &AxisScale, vertical: &AxisScale, x: XAxis) {
        let Self { left, top, width, height } = *self;
        (top..top + height).for_each(|row| screen.text(left - 1, row, "│", DIM));
        screen.text(left - 1, top + height, &format!("└{}", "─".repeat(width)), DIM);
        let values = labels(vertical, height / 4);
        let last = values.len() - 1;
        for (i, label) in values.iter().enumerate() {
            let row = top + (height - 1) * (last - i) / last;
            screen.text((left - 1).saturating_sub(label.len()), row, label, DIM);
        }
        let values = labels(horizontal, width / 16);
        let last = values.len() - 1;
        for (i, label) in values.iter().enumerate() {
            let at = left + (width - 1) * i / last;
            let start = at.saturating_sub(label.len() / 2).min((left + width).saturating_sub(label.len()));
            screen.text(start, top + height + 1, label, DIM);
        }
        let name = match x {
            XAxis::Steps => "step",
            XAxis::Tokens => "tokens",
            XAxis::Time => "seconds",
        };
        screen.text(left + 1, top, "loss", DIM);
        screen.text((left + width).saturating_sub(name.len()), top + height - 1, name, DIM);
    }

    /// Draws points between 0 and 1.
    fn curve(&self, screen: &mut Screen, points: &Points, curve: &Curve) {
        let at = |&(x, y): &(f64, f64), columns: usize, rows: usize| {
            let (left, top) = (columns * self.left, rows * self.top);
            let (right, bottom) = (columns * self.width - 1, rows * self.height - 1);
            (left as f64 + x * right as f64, top as f64 + (1.0 - y) * bottom as f64)
        };
        if !curve.connected {
            for (x, y) in points.iter().map(|point| at(point, 1, 1)) {
                screen.text(x.round() as usize, y.round() as usize, "•", curve.style);
            }
            return;
        }
        for (i, point) in points.iter().enumerate() {
            screen.line(at(&points[i.saturating_sub(1)], 2, 4), at(point, 2, 4), curve.style);
        }
    }
}

/// Returns labels at equal distances, which is where the terminal shows them.
fn labels(scale: &AxisScale, count: usize) -> Vec<String> {
    let last = count.clamp(2, 8) - 1;
    let value = |i: usize| {
        let at = i as f64 / last as f64;
        if scale.log {
            scale.low * (scale.high / scale.low).powf(at)
        } else {
            scale.low + at * (scale.high - scale.low)
        }
    };
    let is_wide = scale.high - scale.low >= 20.0;
    let format = |value: f64| if is_wide { short_count(value) } else { format!("{value:.2}") };
    (0..=last).map(|i| format(value(i))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn screen(text: &str, size: (usize, usize), view: &View) -> String {
        let runs = [RunLog { name: "run".to_owned(), ..RunLog::parse(text.as_bytes()).unwrap() }];
        let curves = curves(&runs, XAxis::Steps, view).unwrap();
        draw(size, &runs, &curves, XAxis::Steps, view).to_text()
    }

    #[test]
    fn the_curve_falls_and_small_terminals_are_accepted() {
        let text = (0..200)
            .map(|i| format!("s:{i} trl:{} lr:1 norm:1\n", 10.0 - f64::from(i) / 25.0))
            .collect::<Vec<_>>()
            .concat();
        let mut view = View { log_x: false, log_y: false, smoothing: Some(0.0), colors: false };
        let shown = screen(&text, (60, 20), &view);
        let is_dot = |c: char| ('\u{2801}'..='\u{28ff}').contains(&c);
        let columns: Vec<usize> = shown.lines().filter_map(|line| line.chars().position(is_dot)).collect();
        assert!(columns.len() > 10 && columns.is_sorted(), "{shown}");
        assert!(shown.contains("step 200 | train") && shown.contains("q quit") && shown.contains("1.72"), "{shown}");
        for (log, size) in
            [(true, (40, 10)), (false, (3, 2)), (true, (1, 1)), (false, (0, 0)), (true, (8, 5)), (false, (200, 60))]
        {
            (view.log_x, view.log_y) = (log, log);
            view.smoothing = Some(0.9);
            screen(&text, size, &view);
        }
        assert!(screen("s:0 trl:nan\n", (60, 10), &view).contains("no finite loss yet"));
    }
}
