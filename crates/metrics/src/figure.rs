//! A figure of the curves of runs: one panel for each metric that the logs contain, and a legend.

use crate::axis::{AxisScale, Unit};
use crate::curves::{Metric, Points, Positions, XAxis, default_smoothing, reduce, smooth, visible_range};
use crate::drawing::{Anchor, Color, Dash, Drawing, Stroke, shorten, text_width};
use crate::png;
use crate::references::Reference;
use crate::run::RunLog;
use crate::svg::document;
use anyhow::{Result, ensure};
use serde::Serialize;
use std::fmt::Write;

/// Maximum number of runs in a figure.
pub const MAX_RUNS: usize = 64;

/// The settings of a figure.
#[derive(Clone, Debug)]
pub struct FigureOptions {
    /// Horizontal axis of all panels.
    pub x: XAxis,
    /// Whether the horizontal axis is logarithmic.
    pub log_x: bool,
    /// Whether loss, learning rate and gradient norm have logarithmic axes.
    pub log_y: bool,
    /// Factor of the exponential moving average, from 0 (no smoothing) to below 1. `None`: [`default_smoothing`] of each run.
    pub smoothing: Option<f64>,
    /// Metrics to draw, each of which every log must have in at least one run. Empty: those that the logs have.
    pub metrics: Vec<Metric>,
    /// Published models whose results are drawn as lines. `None`: in the HellaSwag panel those near the curves.
    pub references: Option<Vec<Reference>>,
    /// Width of the figure in pixels, at least 300. Below [`SINGLE_COLUMN`] panels are not placed next to each other.
    pub width: f64,
}

impl Default for FigureOptions {
    fn default() -> Self {
        Self {
            x: XAxis::Steps,
            log_x: false,
            log_y: false,
            smoothing: None,
            metrics: Vec::new(),
            references: None,
            width: DEFAULT_WIDTH,
        }
    }
}

impl FigureOptions {
    /// Returns the factor of the exponential moving average for a run.
    pub fn smoothing_of(&self, run: &RunLog) -> f64 {
        self.smoothing.unwrap_or_else(|| default_smoothing(run.steps.len()))
    }
}

/// A drawn figure.
#[derive(Clone, Debug)]
pub struct Figure {
    body: Drawing,
    width: f64,
    height: f64,
    description: String,
    /// The panels, for tooltips.
    pub panels: Vec<PanelData>,
}

/// Position and values of a panel, for tooltips.
#[derive(Clone, Debug, Serialize)]
pub struct PanelData {
    /// Left, top, width and height of the plot area in the figure's units.
    pub area: [f64; 4],
    /// Values at the left and right end of the area, and whether the axis is logarithmic.
    pub x: (f64, f64, bool),
    /// Values at the bottom and top of the area, and whether the axis is logarithmic.
    pub y: (f64, f64, bool),
    /// Name of the horizontal axis.
    pub x_name: String,
    /// Whether values are fractions that are shown in percent.
    pub percent: bool,
    /// Name, number of the color, and points of each curve.
    pub curves: Vec<(String, usize, Points)>,
}

pub(crate) const DEFAULT_WIDTH: f64 = 1000.0;
/// Width below which every panel has a row of its own.
pub const SINGLE_COLUMN: f64 = 600.0;
pub(crate) const MARGIN: f64 = 18.0;
const GAP: f64 = 22.0;
pub(crate) const WIDE_HEIGHT: f64 = 400.0;
const NARROW_HEIGHT: f64 = 240.0;
/// Font sizes.
pub(crate) const TITLE: f64 = 17.0;
const HEADING: f64 = 13.0;
pub(crate) const LABEL: f64 = 11.0;
/// Maximum number of evaluations that are drawn as dots.
const MAX_DOTS: usize = 60;
/// Opacity of raw values behind a smoothed curve.
const RAW_OPACITY: f64 = 0.25;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Raw,
    Curve,
    Evaluations,
}

/// A curve of a panel.
struct Line {
    kind: Kind,
    color: usize,
    dash: Dash,
    name: String,
    points: Points,
}

struct Panel {
    title: &'static str,
    unit: Unit,
    /// Whether the axis begins at 0.
    from_zero: bool,
    log: bool,
    lines: Vec<Line>,
    references: Vec<(&'static str, f64)>,
}

/// The horizontal axis of all panels.
struct Horizontal {
    scale: AxisScale,
    name: String,
}

impl Figure {
    /// Draws the logs of one or more runs.
    pub fn new(runs: &[RunLog], options: &FigureOptions) -> Result<Self> {
        ensure!(
            (1..=MAX_RUNS).contains(&runs.len()),
            "runs: expected 1 to {MAX_RUNS}, found {}; draw fewer runs in one figure",
            runs.len()
        );
        let positions = runs.iter().map(|run| Positions::new(run, options.x)).collect::<Result<Vec<_>>>()?;
        let mut panels = Vec::new();
        let metrics = if options.metrics.is_empty() { &Metric::ALL[..] } else { &options.metrics };
        for &metric in metrics {
            let panel = Panel::new(metric, runs, &positions, options);
            let has_values = panel.lines.iter().any(|line| line.points.iter().any(|(_, y)| y.is_finite()));
            ensure!(
                has_values || options.metrics.is_empty(),
                "{}: expected values in a log, found none; draw other metrics",
                panel.title
            );
            panels.extend(has_values.then_some(panel));
        }
        ensure!(
            !panels.is_empty(),
            "{}: expected finite losses, learning rates, gradient norms or scores, found none; check why the run diverged",
            runs[0].path.display()
        );
        let horizontal = horizontal_axis(&mut panels, options);
        Ok(Self::lay_out(&panels, &horizontal, runs, options))
    }

    fn lay_out(panels: &[Panel], horizontal: &Horizontal, runs: &[RunLog], options: &FigureOptions) -> Self {
        let names: Vec<&str> = runs.iter().map(|run| run.name.as_str()).collect();
        let description = format!("Training curves of {}", names.join(", "));
        let width = options.width.max(300.0);
        let mut figure = Self { body: Drawing::default(), width, height: 0.0, description, panels: Vec::new() };
        let mut y = figure.header(panels, runs, options);
        let inner = width - 2.0 * MARGIN;
        let half = (inner - GAP) / 2.0;
        let (columns, first_height) = if width < SINGLE_COLUMN { (1, NARROW_HEIGHT) } else { (2, WIDE_HEIGHT) };
        let (first, rest) = panels.split_first().expect("there is a panel");
        figure.panel(first, horizontal, [MARGIN, y, inner, first_height]);
        y += first_height + GAP;
        for row in rest.chunks(columns) {
            let width = if row.len() == 1 { inner } else { half };
            for (panel, x) in row.iter().zip([MARGIN, MARGIN + half + GAP]) {
                figure.panel(panel, horizontal, [x, y, width, NARROW_HEIGHT]);
            }
            y += NARROW_HEIGHT + GAP;
        }
        figure.height = y - GAP + MARGIN;
        figure
    }

    /// Draws title and legend. Returns the height that they take.
    fn header(&mut self, panels: &[Panel], runs: &[RunLog], options: &FigureOptions) -> f64 {
        let mut y = MARGIN + TITLE;
        if let [only] = runs {
            let title = shorten(&only.name, TITLE, self.width - 2.0 * MARGIN);
            self.body.text((MARGIN, y), Anchor::Start, TITLE, Color::Ink, &title);
            y += 10.0;
        } else {
            y -= TITLE;
        }
        let key = |kind, color, dash, name: &str| {
            (kind, color, dash, shorten(name, 12.0, 420.0_f64.min(self.width - 2.0 * MARGIN - 48.0)))
        };
        let mut entries: Vec<_> = match runs {
            [_] => panels
                .iter()
                .filter(|panel| [LOSS, SOURCES, EXPERTS].contains(&panel.title))
                .flat_map(|panel| &panel.lines)
                .filter(|line| line.kind != Kind::Raw)
                .map(|line| key(line.kind, line.color, line.dash, &line.name))
                .collect(),
            _ => runs.iter().enumerate().map(|(i, run)| key(Kind::Curve, i, dash_of(i), &run.name)).collect(),
        };
        let mut note = String::new();
        if runs.len() > 1 && panels.iter().any(|panel| panel.lines.iter().any(|line| line.kind == Kind::Evaluations)) {
            note.push_str("thin with dots: evaluation; ");
        }
        let factors = || runs.iter().map(|run| options.smoothing_of(run));
        let (low, high) = (factors().fold(1.0, f64::min), factors().fold(0.0, f64::max));
        if high > 0.0 {
            let range = if low < high { format!("{low} to {high}") } else { high.to_string() };
            let _ = write!(note, "smoothed (EMA {range}), raw values faint");
        }
        let note = note.trim_end_matches("; ").to_owned();
        let mut x = MARGIN;
        y += 12.0;
        for (kind, color, dash, name) in entries.drain(..) {
            let width = 30.0 + text_width(&name, 12.0) + 18.0;
            if x + width > self.width - MARGIN && x > MARGIN {
                (x, y) = (MARGIN, y + 19.0);
            }
            let stroke = Stroke { dash, ..Stroke::solid(Color::Run(color), 2.2) };
            self.body.line((x, y - 4.0), (x + 22.0, y - 4.0), stroke);
            if kind == Kind::Evaluations {
                self.body.dot((x + 11.0, y - 4.0), 3.2, Color::Run(color));
            }
            self.body.text((x + 28.0, y), Anchor::Start, 12.0, Color::Ink, &name);
            x += width;
        }
        if !note.is_empty() {
            if x + text_width(&note, LABEL) > self.width - MARGIN {
                (x, y) = (MARGIN, y + 19.0);
            }
            self.body.text((x, y), Anchor::Start, LABEL, Color::Muted, &note);
        }
        y + GAP
    }

    /// Draws a panel into a box of left, top, width and height.
    fn panel(&mut self, panel: &Panel, horizontal: &Horizontal, [left, top, width, height]: [f64; 4]) {
        let scale = panel.scale(&horizontal.scale);
        let y_ticks = scale.ticks(if height > 300.0 { 7 } else { 5 }, panel.unit);
        let widest =
            |texts: &mut dyn Iterator<Item = &str>| texts.map(|text| text_width(text, LABEL)).fold(0.0_f64, f64::max);
        let margin_left = widest(&mut y_ticks.iter().map(|tick| tick.label.as_str())).max(28.0) + 10.0;
        let labels: Vec<String> =
            panel.references.iter().map(|(name, value)| panel.reference_label(name, *value)).collect();
        let margin_right = if labels.is_empty() { 8.0 } else { widest(&mut labels.iter().map(String::as_str)) + 10.0 };
        let (x0, y0) = (left + margin_left, top + 24.0);
        let (w, h) = (width - margin_left - margin_right, height - 24.0 - 36.0);
        let place = |(x, y): (f64, f64)| (x0 + w * horizontal.scale.position(x), y0 + h * (1.0 - scale.position(y)));
        self.body.text((x0, top + HEADING), Anchor::Start, HEADING, Color::Ink, panel.title);
        for tick in &y_ticks {
            let y = y0 + h * (1.0 - tick.at);
            let weight = if tick.label.is_empty() { 0.5 } else { 1.0 };
            self.body.line((x0, y), (x0 + w, y), Stroke::solid(Color::Grid, weight));
            self.body.text((x0 - 7.0, y + 4.0), Anchor::End, LABEL, Color::Muted, &tick.label);
        }
        for tick in horizontal.scale.ticks((w / 85.0) as usize, Unit::Number) {
            let x = x0 + w * tick.at;
            let length = if tick.label.is_empty() { 3.0 } else { 5.0 };
            self.body.line((x, y0 + h), (x, y0 + h + length), Stroke::solid(Color::Muted, 1.0));
            self.body.text((x, y0 + h + 17.0), Anchor::Middle, LABEL, Color::Muted, &tick.label);
        }
        self.body.line((x0, y0 + h), (x0 + w, y0 + h), Stroke::solid(Color::Muted, 1.0));
        self.body.text((x0 + w / 2.0, y0 + h + 32.0), Anchor::Middle, LABEL, Color::Muted, &horizontal.name);
        let mut curves = Drawing::default();
        for (_, value) in &panel.references {
            let y = place((horizontal.scale.low, *value)).1;
            curves.line((x0, y), (x0 + w, y), Stroke { dash: Dash::Dotted, ..Stroke::solid(Color::Muted, 1.2) });
        }
        for kind in [Kind::Raw, Kind::Curve, Kind::Evaluations] {
            for line in panel.lines.iter().filter(|line| line.kind == kind) {
                line.draw(&mut curves, &place);
            }
        }
        // Half of a line or dot at the edge is visible, too.
        self.body.clipped((x0 - 4.0, y0 - 4.0), (w + 8.0, h + 8.0), curves);
        self.reference_labels(panel, &labels, x0 + w + 6.0, (y0, y0 + h), |value| place((1.0, value)).1);
        self.panels.push(PanelData {
            area: [x0, y0, w, h],
            x: (horizontal.scale.low, horizontal.scale.high, horizontal.scale.log),
            y: (scale.low, scale.high, scale.log),
            x_name: horizontal.name.clone(),
            percent: panel.unit == Unit::Percent,
            curves: panel.tooltips(&horizontal.scale),
        });
    }

    /// Writes the names of reference lines at the right of a panel, moved apart where lines are close.
    fn reference_labels(
        &mut self,
        panel: &Panel,
        labels: &[String],
        x: f64,
        (top, bottom): (f64, f64),
        place: impl Fn(f64) -> f64,
    ) {
        let mut places: Vec<(f64, &String)> =
            panel.references.iter().zip(labels).map(|((_, value), label)| (place(*value), label)).collect();
        places.sort_unstable_by(|(a, _), (b, _)| a.total_cmp(b));
        let mut lowest = bottom + 4.0;
        for (y, _) in places.iter_mut().rev() {
            *y = y.min(lowest);
            lowest = *y - 13.0;
        }
        let mut highest = top;
        for (y, label) in places {
            let y = y.max(highest);
            highest = y + 13.0;
            self.body.text((x, y + 4.0), Anchor::Start, LABEL, Color::Muted, label);
        }
    }

    /// Returns an SVG file. With `dark`, viewers that support CSS show it with dark colors in dark mode.
    pub fn to_svg(&self, dark: bool) -> String {
        document(&self.body, (self.width, self.height), &self.description, dark)
    }

    /// Returns a PNG file of twice the resolution of the SVG, with light colors.
    pub fn to_png(&self) -> Result<Vec<u8>> {
        png::render(&self.body, (self.width, self.height), 2.0)
    }
}

const LOSS: &str = "loss";
const SOURCES: &str = "validation loss by source";
const EXPERTS: &str = "largest load of an expert / mean load";

/// Returns the dashes of a run, which tell runs of the same color apart.
fn dash_of(run: usize) -> Dash {
    [Dash::Solid, Dash::Dashed, Dash::Dotted][run / 8 % 3]
}

impl Line {
    fn draw(&self, drawing: &mut Drawing, place: &dyn Fn((f64, f64)) -> (f64, f64)) {
        let pixels: Points = self.points.iter().map(|&point| place(point)).collect();
        let color = Color::Run(self.color);
        let solid = Stroke { dash: self.dash, ..Stroke::solid(color, 1.8) };
        match self.kind {
            Kind::Raw => drawing.curve(&reduce(&pixels, 1.0), Stroke { width: 1.0, opacity: RAW_OPACITY, ..solid }),
            Kind::Curve => drawing.curve(&reduce(&pixels, 1.0), solid),
            Kind::Evaluations => {
                drawing.curve(&reduce(&pixels, 1.0), Stroke { width: 1.3, ..solid });
                if pixels.len() <= MAX_DOTS {
                    let drawn = pixels.iter().filter(|(x, y)| x.is_finite() && y.is_finite());
                    drawn.for_each(|&point| drawing.dot(point, 3.2, color));
                }
            }
        }
    }
}

impl Panel {
    fn new(metric: Metric, runs: &[RunLog], positions: &[Positions], options: &FigureOptions) -> Self {
        let mut lines = Vec::new();
        for (i, (run, positions)) in runs.iter().zip(positions).enumerate() {
            let name = |what: &str| if runs.len() == 1 { what.to_owned() } else { run.name.clone() };
            let mut line = |kind, color, name, points: Points| {
                lines.push(Line { kind, color, dash: dash_of(i), name, points });
            };
            let mut noisy = |name: String, raw: Points, color| {
                let smoothing = options.smoothing_of(run);
                if smoothing > 0.0 {
                    line(Kind::Curve, color, name.clone(), smooth(&raw, smoothing));
                    line(Kind::Raw, color, name, raw);
                } else {
                    line(Kind::Curve, color, name, raw);
                }
            };
            // One run has a color for training and another for evaluation.
            let evaluation_color = if runs.len() == 1 { 1 } else { i };
            match metric {
                Metric::Loss => {
                    noisy(name("training loss"), positions.of_steps(run, |step| step.loss), i);
                    let validations = positions.of_evaluations(run, &run.validations);
                    if !validations.is_empty() {
                        let name =
                            if runs.len() == 1 { name("validation loss") } else { format!("{}, validation", run.name) };
                        line(Kind::Evaluations, evaluation_color, name, validations);
                    }
                }
                Metric::Sources => {
                    for (j, source) in run.sources.iter().enumerate() {
                        let single = runs.len() == 1;
                        // The first two colors are those of training and validation.
                        let color = if single { 2 + j } else { i };
                        let name = if single { source.name.clone() } else { format!("{}, {}", run.name, source.name) };
                        line(Kind::Evaluations, color, name, positions.of_evaluations(run, &source.losses));
                    }
                }
                Metric::Lr => line(Kind::Curve, i, name("learning rate"), positions.of_steps(run, |step| step.lr)),
                Metric::Norm => noisy(name("gradient norm"), positions.of_steps(run, |step| step.norm), i),
                Metric::Speed => noisy(name("tokens/s"), positions.of_steps(run, |step| step.tokens_per_second), i),
                Metric::Experts => {
                    noisy(
                        name("load of experts, mean of the layers"),
                        positions.of_steps(run, |step| step.expert_load[0]),
                        i,
                    );
                    if runs.len() == 1 {
                        let worst = positions.of_steps(run, |step| step.expert_load[1]);
                        noisy(name("load of experts, worst layer"), worst, evaluation_color);
                    }
                }
                Metric::Hellaswag => {
                    let scores = positions.of_evaluations(run, &run.hellaswag);
                    line(Kind::Evaluations, evaluation_color, name("HellaSwag"), scores);
                }
                Metric::Core => {
                    let values = positions.of_evaluations(run, &run.core);
                    line(Kind::Evaluations, evaluation_color, name("CORE"), values);
                }
            }
        }
        let (title, unit, from_zero, can_be_log) = match metric {
            Metric::Loss => (LOSS, Unit::Number, false, true),
            Metric::Sources => (SOURCES, Unit::Number, false, true),
            Metric::Lr => ("learning rate", Unit::Number, true, true),
            Metric::Norm => ("gradient norm", Unit::Number, true, true),
            Metric::Speed => ("tokens per second", Unit::Number, true, false),
            Metric::Experts => (EXPERTS, Unit::Number, true, false),
            Metric::Hellaswag => ("HellaSwag accuracy", Unit::Percent, false, false),
            Metric::Core => ("CORE", Unit::Number, false, false),
        };
        let log = options.log_y && can_be_log;
        let references = references(metric, &lines, options);
        Self { title, unit, from_zero, log, lines, references }
    }

    /// Returns the vertical scale: the range of the values that a horizontal scale shows, and of the references.
    fn scale(&self, horizontal: &AxisScale) -> AxisScale {
        let log = self.log;
        let shown = |&(x, y): &(f64, f64)| {
            let position = horizontal.position(x);
            (position.is_finite() && y.is_finite() && (y > 0.0 || !log)).then_some(y)
        };
        let values = self.lines.iter().flat_map(|line| &line.points).filter_map(shown);
        let range = visible_range(values);
        let references = self.references.iter().map(|(_, value)| *value);
        let (low, high) =
            references.fold(range.unwrap_or((1.0, 1.0)), |(low, high), value| (low.min(value), high.max(value)));
        if self.from_zero && !log && low >= 0.0 {
            let high = if high > 0.0 { high } else { 1.0 };
            return AxisScale::new(0.0, high, false).padded(0.0, 0.06);
        }
        AxisScale::new(low, high, log).padded(0.04, 0.04)
    }

    fn reference_label(&self, name: &str, value: f64) -> String {
        match self.unit {
            Unit::Number => format!("{name}: {value:.3}"),
            Unit::Percent => format!("{name}: {:.1} %", 100.0 * value),
        }
    }

    /// Returns the curves for tooltips, with at most a few hundred points each.
    fn tooltips(&self, horizontal: &AxisScale) -> Vec<(String, usize, Points)> {
        const COLUMNS: f64 = 300.0;
        let column = |x: f64| (horizontal.position(x) * COLUMNS).floor();
        let of_line = |line: &Line| {
            let finite: Points =
                line.points.iter().copied().filter(|(x, y)| column(*x).is_finite() && y.is_finite()).collect();
            let last_of_columns =
                finite.chunk_by(|a, b| column(a.0).to_bits() == column(b.0).to_bits()).filter_map(<[_]>::last);
            (line.name.clone(), line.color % 8, last_of_columns.copied().collect())
        };
        self.lines.iter().filter(|line| line.kind != Kind::Raw).map(of_line).collect()
    }
}

/// Returns name and value of the reference lines of a panel.
fn references(metric: Metric, lines: &[Line], options: &FigureOptions) -> Vec<(&'static str, f64)> {
    let value = |reference: &Reference| match metric {
        Metric::Loss => reference.loss,
        Metric::Hellaswag => Some(reference.hellaswag),
        _ => None,
    };
    let named = |reference: Reference| Some((reference.name, value(&reference)?));
    if let Some(references) = &options.references {
        return references.iter().copied().filter_map(named).collect();
    }
    // Losses depend on the data, so they are drawn only on request.
    if metric != Metric::Hellaswag {
        return Vec::new();
    }
    let scores = lines.iter().flat_map(|line| &line.points).map(|(_, y)| *y);
    let Some((low, high)) = visible_range(scores) else { return Vec::new() };
    let near = |(_, value): &(&str, f64)| (low..high + 0.03).contains(value);
    crate::references::REFERENCES.into_iter().filter_map(named).filter(near).collect()
}

/// Returns the horizontal axis over all points, and converts seconds to the axis's unit.
fn horizontal_axis(panels: &mut [Panel], options: &FigureOptions) -> Horizontal {
    let points = || panels.iter().flat_map(|panel| &panel.lines).flat_map(|line| &line.points);
    let xs = || points().filter(|(_, y)| y.is_finite()).map(|(x, _)| *x).filter(|x| x.is_finite());
    let last = xs().fold(0.0_f64, f64::max);
    let (divisor, name) = match options.x {
        XAxis::Steps => (1.0, "step"),
        XAxis::Tokens => (1.0, "tokens"),
        XAxis::Time if last < 180.0 => (1.0, "training time (seconds)"),
        XAxis::Time if last < 3.0 * 3600.0 => (60.0, "training time (minutes)"),
        XAxis::Time if last < 72.0 * 3600.0 => (3600.0, "training time (hours)"),
        XAxis::Time => (86_400.0, "training time (days)"),
    };
    let positive = xs().filter(|x| *x > 0.0).fold(f64::INFINITY, f64::min);
    let log = options.log_x && positive.is_finite();
    let low = if log { positive } else { xs().fold(f64::INFINITY, f64::min) };
    // Long runs begin at 0 rather than at their first step.
    let low = if !log && low < 0.02 * last { low.min(0.0) } else { low };
    let scale = AxisScale::new(low / divisor, last / divisor, log);
    for point in panels.iter_mut().flat_map(|panel| &mut panel.lines).flat_map(|line| &mut line.points) {
        point.0 /= divisor;
    }
    Horizontal { scale, name: name.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn log(name: &str, text: &str) -> RunLog {
        RunLog { name: name.to_owned(), ..RunLog::parse(text.as_bytes()).unwrap() }
    }

    fn llmc(steps: usize) -> String {
        let mut text = String::new();
        for step in 0..steps {
            let _ = writeln!(text, "s:{step} trl:{:.4} lr:0.0006 norm:1.5", 10.0 / (1.0 + step as f64 / 50.0));
            if step % 20 == 0 {
                let _ = writeln!(text, "s:{step} tel:{:.4}\ns:{step} eval:0.29", 11.0 / (1.0 + step as f64 / 50.0));
            }
        }
        text
    }

    #[test]
    fn loads_of_experts_have_a_panel() {
        let line = |step: u64| {
            let (loss, experts) = (5.0 - step as f64 / 9.0, r#"{"max_load":[1.5,2.5],"unused":[0,1]}"#);
            format!("{{\"step\":{step},\"loss\":{loss},\"lr\":0.1,\"experts\":{experts}}}\n")
        };
        let text: String = (0..9).map(line).collect();
        let figure = |runs: &[RunLog]| {
            let options = FigureOptions { metrics: vec![Metric::Experts], ..FigureOptions::default() };
            Figure::new(runs, &options).map(|figure| {
                figure.panels[0].curves.iter().map(|(name, _, points)| (name.clone(), points[0].1)).collect::<Vec<_>>()
            })
        };
        let one =
            [("load of experts, mean of the layers".to_owned(), 2.0), ("load of experts, worst layer".to_owned(), 2.5)];
        assert_eq!(figure(&[log("a", &text)]).unwrap(), one);
        let two = [("a".to_owned(), 2.0), ("b".to_owned(), 2.0)];
        assert_eq!(figure(&[log("a", &text), log("b", &text)]).unwrap(), two);
        assert!(
            figure(&[log("a", &llmc(3))]).unwrap_err().to_string().contains("expected values in a log, found none")
        );
    }

    #[test]
    fn a_figure_has_the_panels_of_the_log_and_is_valid_svg() {
        let figure = Figure::new(&[log("a <b>", &llmc(200))], &FigureOptions::default()).unwrap();
        let svg = figure.to_svg(true);
        for text in
            ["loss", "learning rate", "gradient norm", "HellaSwag accuracy", "validation loss", "a &lt;b&gt;", ">step<"]
        {
            assert!(svg.contains(text), "{text}: {svg}");
        }
        assert!(!svg.contains("tokens per second") && !svg.contains("NaN"));
        assert!(svg.contains("GPT-2 124M: 29.4 %") && !svg.contains("GPT-2 124M: 3.425"));
        assert_eq!(figure.panels.len(), 4);
        let png = figure.to_png().unwrap();
        assert!(png.starts_with(b"\x89PNG") && png.len() > 20_000, "{}", png.len());
    }

    #[test]
    fn a_narrow_figure_has_a_single_column() {
        let lefts = |width| {
            let options = FigureOptions { width, ..FigureOptions::default() };
            let figure = Figure::new(&[log(&"long name ".repeat(20), &llmc(200))], &options).unwrap();
            assert!(figure.to_svg(false).contains(&format!("viewBox=\"0 0 {width} ")));
            assert!(figure.panels.iter().all(|panel| panel.area[0] + panel.area[2] < width), "{:?}", figure.panels);
            figure.panels.iter().filter(|panel| panel.area[0] > width / 3.0).count()
        };
        assert_eq!((lefts(380.0), lefts(1000.0)), (0, 1));
    }

    #[test]
    fn every_axis_and_several_runs_are_drawn() {
        let json = (0..50)
            .map(|i| {
                let loss = if i == 7 { "null".to_owned() } else { (5.0 - f64::from(i) / 20.0).to_string() };
                format!("{{\"step\":{i},\"loss\":{loss},\"lr\":0.1,\"norm\":2,\"ms\":900000,\"tokens_per_second\":123456,\"tokens\":{}}}\n", 1000 * (i + 1))
            })
            .collect::<Vec<_>>()
            .concat();
        let runs = [log("first", &json), log("second", &json.replace("\"loss\":4", "\"loss\":3"))];
        for (x, name) in [(XAxis::Steps, "step"), (XAxis::Tokens, "tokens"), (XAxis::Time, "training time (hours)")] {
            for log in [false, true] {
                let options =
                    FigureOptions { x, log_x: log, log_y: log, smoothing: Some(0.0), ..FigureOptions::default() };
                let svg = Figure::new(&runs, &options).unwrap().to_svg(false);
                assert!(
                    svg.contains(&format!(">{name}<")) && svg.contains(">second<") && !svg.contains("NaN"),
                    "{svg}"
                );
                assert!(svg.contains(">tokens per second<"));
            }
        }
    }

    #[test]
    fn reference_lines_are_drawn_on_request() {
        let references = Some(vec![crate::references::find("gpt2-124m").unwrap()]);
        let options = FigureOptions { references, ..FigureOptions::default() };
        let svg = Figure::new(&[log("a", &llmc(100))], &options).unwrap().to_svg(false);
        assert!(svg.contains("GPT-2 124M: 3.425") && svg.contains("GPT-2 124M: 29.4 %") && !svg.contains("GPT-3"));
    }

    #[test]
    fn logs_without_a_metric_are_an_error_only_if_it_was_asked_for() {
        let runs = [log("a", "s:0 trl:5\ns:1 trl:nan\n")];
        assert_eq!(Figure::new(&runs, &FigureOptions::default()).unwrap().panels.len(), 1);
        let options = FigureOptions { metrics: vec![Metric::Hellaswag], ..FigureOptions::default() };
        assert!(Figure::new(&runs, &options).unwrap_err().to_string().contains("HellaSwag accuracy: expected values"));
        let error = Figure::new(&[log("a", "s:0 trl:nan\n")], &FigureOptions::default()).unwrap_err();
        assert!(error.to_string().contains("check why the run diverged"));
        assert!(Figure::new(&vec![log("a", "s:0 trl:5\n"); MAX_RUNS + 1], &FigureOptions::default()).is_err());
    }

    #[test]
    fn extreme_values_are_drawn() {
        for text in [
            "s:0 trl:5\n",
            "s:18446744073709551615 trl:1e38\ns:0 trl:-1e38\n",
            "s:5 trl:0 lr:0 norm:0\n",
            "s:1 tel:1e300\ns:2 tel:-1e300\n",
            "s:0 eval:0\n",
        ] {
            for log_axes in [false, true] {
                let options = FigureOptions { log_x: log_axes, log_y: log_axes, ..FigureOptions::default() };
                let figure = Figure::new(&[log("x", text)], &options).unwrap();
                let svg = figure.to_svg(true);
                assert!(!svg.contains("NaN") && !svg.contains("inf"), "{text}: {svg}");
                figure.to_png().unwrap();
            }
        }
    }

    fn number() -> impl Strategy<Value = f64> {
        prop_oneof![any::<f64>(), -1e3..1e3, Just(0.0), Just(f64::NAN), Just(f64::MAX), Just(f64::MIN_POSITIVE)]
    }

    proptest! {
        #[test]
        fn any_values_are_drawn_without_nan(
            lines in proptest::collection::vec((any::<u64>(), number(), number(), number(), any::<u64>()), 1..20),
            small_steps: bool,
            log_x: bool,
            log_y: bool,
            tokens: bool,
        ) {
            let mut text = String::new();
            for (step, a, b, c, n) in lines {
                let step = if small_steps { step % 9 } else { step };
                let _ = writeln!(text, r#"{{"step":{step},"loss":{},"norm":{},"tokens":{n}}}"#, json(a), json(b));
                let _ = writeln!(text, r#"{{"step":{step},"val_loss":{},"hellaswag":{},"tokens":{n}}}"#, json(c), json(a));
            }
            let x = if tokens { XAxis::Tokens } else { XAxis::Steps };
            let options = FigureOptions { x, log_x, log_y, ..FigureOptions::default() };
            if let Ok(figure) = Figure::new(&[log("any", &text)], &options) {
                let svg = figure.to_svg(true);
                prop_assert!(!svg.contains("NaN") && !svg.contains("inf"), "{text}: {svg}");
            }
        }
    }

    fn json(value: f64) -> String {
        serde_json::to_string(&value).unwrap()
    }
}
