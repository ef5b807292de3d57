//! The loss curve in the terminal, which follows a log while the run continues.

use anyhow::{Context, Result, ensure};
use metrics::axis::{Scale, short_count};
use metrics::curves::{Points, Positions, XAxis, reduce, smooth, visible_range};
use metrics::figure::Options;
use metrics::report::Summary;
use metrics::run::RunLog;
use ratatui::Frame;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Color, Style};
use ratatui::symbols::Marker;
use ratatui::text::{Line, Span};
use ratatui::widgets::{Axis, Chart, Dataset, GraphType, Paragraph};
use std::env;
use std::io::{IsTerminal, Write, stdout};
use std::time::{Duration, Instant};

/// Shortest time between two reads of the log.
const INTERVAL: Duration = Duration::from_secs(1);
const COLORS: [Color; 6] = [Color::Blue, Color::Yellow, Color::Green, Color::Magenta, Color::Cyan, Color::Red];
/// Columns of dots that a curve is reduced to. A cell has two of them.
const COLUMNS: f64 = 400.0;

/// The settings that keys change.
struct View {
    log_x: bool,
    log_y: bool,
    smoothing: f64,
    colors: bool,
}

/// A curve of the chart, in values whose axes are linear.
struct Curve {
    name: String,
    style: Style,
    points: Points,
    marker: Marker,
}

/// Draws the logs that `read` returns until the user quits, and then prints their final values.
pub fn run(read: &dyn Fn() -> Result<Vec<RunLog>>, options: &Options) -> Result<()> {
    ensure!(stdout().is_terminal(), "--live: expected a terminal, found a file or pipe; use --out FILE");
    let mut runs = read()?;
    let mut view = View {
        log_x: options.log_x,
        log_y: options.log_y,
        smoothing: options.smoothing,
        colors: env::var_os("NO_COLOR").is_none_or(|value| value.is_empty()),
    };
    let mut terminal = ratatui::try_init().context("cannot draw in this terminal; use --out FILE")?;
    let mut interval = INTERVAL;
    let mut follow = || -> Result<()> {
        loop {
            let curves = curves(&runs, options.x, &view)?;
            terminal.draw(|frame| draw(frame, &runs, &curves, options.x, &view))?;
            if !event::poll(interval)? {
                let started = Instant::now();
                // A run that starts again has an empty log for a moment.
                if let Ok(newer) = read() {
                    runs = newer;
                }
                // Reading a long log takes at most a fifth of the time.
                interval = INTERVAL.max(4 * started.elapsed());
                continue;
            }
            let Event::Key(key) = event::read()? else { continue };
            let interrupt = key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL);
            match key.code {
                _ if key.kind == KeyEventKind::Release => {}
                KeyCode::Char('q') | KeyCode::Esc => return Ok(()),
                _ if interrupt => return Ok(()),
                KeyCode::Char('x') => view.log_x = !view.log_x,
                KeyCode::Char('y') => view.log_y = !view.log_y,
                KeyCode::Char('s') => view.smoothing = if view.smoothing > 0.0 { 0.0 } else { 0.9 },
                _ => {}
            }
        }
    };
    let followed = follow();
    ratatui::restore();
    followed?;
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
        let color = |at: usize| if view.colors { Style::new().fg(COLORS[at % COLORS.len()]) } else { Style::new() };
        let faint = if view.colors { Style::new().fg(Color::DarkGray) } else { Style::new().dim() };
        let validation_color = color(if runs.len() == 1 { 1 } else { i });
        let mut add = |layer: usize, name: &str, style, points, marker| {
            curves[layer].push(Curve { name: name.to_owned(), style, points, marker });
        };
        if view.smoothing > 0.0 {
            add(1, &run.name, color(i), smooth(&losses, view.smoothing), Marker::Braille);
            add(0, "", faint, losses, Marker::Braille);
        } else {
            add(1, &run.name, color(i), losses, Marker::Braille);
        }
        add(2, "", validation_color, validations, Marker::Dot);
    }
    Ok(curves.into_iter().flatten().collect())
}

fn draw(frame: &mut Frame, runs: &[RunLog], curves: &[Curve], x: XAxis, view: &View) {
    let header = (runs.len() as u16).min(frame.area().height / 3);
    let areas: [_; 3] =
        Layout::vertical([Constraint::Length(header), Constraint::Min(3), Constraint::Length(1)]).areas(frame.area());
    let colors = |i: usize| if view.colors { Style::new().fg(COLORS[i % COLORS.len()]) } else { Style::new() };
    let lines: Vec<Line> = runs.iter().enumerate().map(|(i, run)| Line::styled(status(run), colors(i))).collect();
    frame.render_widget(Paragraph::new(lines), areas[0]);
    let keys = "q quit  y log loss  x log axis  s smoothing";
    frame.render_widget(Paragraph::new(Span::styled(keys, Style::new().dim())), areas[2]);

    let points = || curves.iter().flat_map(|curve| &curve.points);
    let shown = |value: f64, log: bool| value.is_finite() && (value > 0.0 || !log);
    let xs = || points().filter(|(x, y)| shown(*x, view.log_x) && y.is_finite()).map(|(x, _)| *x);
    let low = xs().fold(f64::INFINITY, f64::min);
    let Some((bottom, top)) = visible_range(points().map(|(_, y)| *y).filter(|y| shown(*y, view.log_y))) else {
        frame.render_widget(Paragraph::new("no finite loss yet"), areas[1]);
        return;
    };
    let low = if low.is_finite() { low } else { 1.0 };
    let horizontal = Scale::new(low, xs().fold(low, f64::max), view.log_x);
    let vertical = Scale::new(bottom, top, view.log_y).padded(0.04, 0.04);
    let place = |points: &Points| {
        let place = |&(x, y): &(f64, f64)| (horizontal.position(x), vertical.position(y));
        let placed: Points = points.iter().map(place).collect();
        let visible = |(x, y): &(f64, f64)| (0.0..=1.0).contains(x) && (0.0..=1.0).contains(y);
        reduce(&placed, 1.0 / COLUMNS).into_iter().filter(visible).collect::<Points>()
    };
    let placed: Vec<Points> = curves.iter().map(|curve| place(&curve.points)).collect();
    let datasets = curves.iter().zip(&placed).map(|(curve, points)| {
        let data =
            Dataset::default().data(points).style(curve.style).marker(curve.marker).graph_type(match curve.marker {
                Marker::Braille => GraphType::Line,
                _ => GraphType::Scatter,
            });
        if runs.len() > 1 && !curve.name.is_empty() { data.name(curve.name.as_str()) } else { data }
    });
    let name = match x {
        XAxis::Steps => "step",
        XAxis::Tokens => "tokens",
        XAxis::Time => "seconds",
    };
    let axis = |scale: &Scale, cells: u16| {
        let labels = labels(scale, cells);
        Axis::default().bounds([0.0, 1.0]).style(Style::new().dim()).labels(labels)
    };
    let chart = Chart::new(datasets.collect())
        .x_axis(axis(&horizontal, areas[1].width / 16).title(name))
        .y_axis(axis(&vertical, areas[1].height / 4).title("loss"));
    frame.render_widget(chart, areas[1]);
}

/// Returns labels at equal distances, which is where the terminal shows them.
fn labels(scale: &Scale, count: u16) -> Vec<String> {
    let last = count.clamp(2, 8) - 1;
    let value = |i: u16| {
        let at = f64::from(i) / f64::from(last);
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
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    fn screen(text: &str, (width, height): (u16, u16), view: &View) -> String {
        let runs = [RunLog { name: "run".to_owned(), ..RunLog::parse(text.as_bytes()).unwrap() }];
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        let curves = curves(&runs, XAxis::Steps, view).unwrap();
        terminal.draw(|frame| draw(frame, &runs, &curves, XAxis::Steps, view)).unwrap();
        terminal.backend().to_string()
    }

    #[test]
    fn the_curve_falls_and_small_terminals_are_accepted() {
        let text = (0..200)
            .map(|i| format!("s:{i} trl:{} lr:1 norm:1\n", 10.0 - f64::from(i) / 25.0))
            .collect::<Vec<_>>()
            .concat();
        let mut view = View { log_x: false, log_y: false, smoothing: 0.0, colors: false };
        let shown = screen(&text, (60, 20), &view);
        let is_dot = |c: char| ('\u{2801}'..='\u{28ff}').contains(&c);
        let columns: Vec<usize> = shown.lines().filter_map(|line| line.chars().position(is_dot)).collect();
        assert!(columns.len() > 10 && columns.is_sorted(), "{shown}");
        assert!(shown.contains("step 200 | train") && shown.contains("q quit") && shown.contains("1.72"), "{shown}");
        for (log, size) in [(true, (40, 10)), (false, (3, 2)), (true, (1, 1)), (false, (200, 60))] {
            (view.log_x, view.log_y) = (log, log);
            view.smoothing = 0.9;
            screen(&text, size, &view);
        }
        assert!(screen("s:0 trl:nan\n", (60, 10), &view).contains("no finite loss yet"));
    }
}
