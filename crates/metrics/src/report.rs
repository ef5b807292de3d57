//! A page in HTML with a table of runs and their figure. It contains everything it needs and requests nothing.

use crate::axis::short_count;
use crate::curves::training_loss;
use crate::figure::{Figure, FigureOptions};
use crate::run::{RunLog, SourceLog};
use crate::svg::{dark_mode, escape};
use anyhow::Result;
use std::fmt::Write;

const STYLE: &str = include_str!("report.css");
/// A script that defines `showValues(figure, panels)`, which shows the values of the curves nearest to the pointer. `figure` is the
/// element that contains the SVG, `panels` are those of [`Figure`].
pub const TOOLTIP: &str = include_str!("tooltip.js");

/// Final values of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct Summary {
    /// Number of training steps up to the last one.
    pub steps: u64,
    /// Tokens trained on.
    pub tokens: Option<u64>,
    /// Moving average of the training loss at the end: the end of the curve with default smoothing.
    pub train_loss: Option<f64>,
    /// Last validation loss.
    pub val_loss: Option<f64>,
    /// Lowest validation loss and its step.
    pub best_val_loss: Option<(f64, u64)>,
    /// Last HellaSwag accuracy.
    pub hellaswag: Option<f64>,
    /// Last value of CORE.
    pub core: Option<f64>,
    /// Median throughput in tokens per second.
    pub tokens_per_second: Option<f64>,
    /// Seconds of all training steps.
    pub seconds: Option<f64>,
    /// Steps without a finite loss.
    pub not_finite: usize,
}

impl Summary {
    /// Returns the final values of a log.
    pub fn new(run: &RunLog) -> Self {
        let losses: Vec<f32> = run.steps.iter().map(|step| step.loss).collect();
        let last = |values: &mut dyn DoubleEndedIterator<Item = f64>| values.rev().find(|value| value.is_finite());
        let finite = run.validations.iter().filter(|validation| validation.value.is_finite());
        let best = finite.min_by(|a, b| a.value.total_cmp(&b.value));
        let mut speeds: Vec<f32> =
            run.steps.iter().map(|step| step.tokens_per_second).filter(|x| x.is_finite()).collect();
        speeds.sort_unstable_by(f32::total_cmp);
        let times = || run.steps.iter().map(|step| f64::from(step.ms)).filter(|ms| ms.is_finite());
        Self {
            steps: run.steps.last().map_or(0, |step| step.step.saturating_add(1)),
            tokens: run.steps.iter().rev().find_map(|step| step.tokens),
            train_loss: training_loss(&losses),
            val_loss: last(&mut run.validations.iter().map(|validation| validation.value)),
            best_val_loss: best.map(|best| (best.value, best.step)),
            hellaswag: last(&mut run.hellaswag.iter().map(|score| score.value)),
            core: last(&mut run.core.iter().map(|core| core.value)),
            tokens_per_second: speeds.get(speeds.len() / 2).map(|speed| f64::from(*speed)),
            seconds: times().next().map(|_| times().sum::<f64>() / 1e3),
            not_finite: losses.iter().filter(|loss| !loss.is_finite()).count(),
        }
    }

    /// Returns names and values for a table.
    pub fn cells(&self) -> [(&'static str, String); 9] {
        let number = |value: Option<f64>, format: &dyn Fn(f64) -> String| value.map_or_else(|| "–".to_owned(), format);
        let loss = |value| number(value, &|loss| format!("{loss:.4}"));
        let train_loss = match self.not_finite {
            0 => loss(self.train_loss),
            n => format!("{} ({n} not finite)", loss(self.train_loss)),
        };
        let best = self.best_val_loss.map_or_else(|| "–".to_owned(), |(loss, step)| format!("{loss:.4} at {step}"));
        [
            ("steps", self.steps.to_string()),
            ("tokens", number(self.tokens.map(|tokens| tokens as f64), &short_count)),
            ("training loss", train_loss),
            ("validation loss", loss(self.val_loss)),
            ("lowest validation loss", best),
            ("HellaSwag", number(self.hellaswag, &|score| format!("{:.1} %", 100.0 * score))),
            ("CORE", number(self.core, &|core| format!("{core:.4}"))),
            ("tokens/s", number(self.tokens_per_second, &short_count)),
            ("training time", number(self.seconds, &duration)),
        ]
    }
}

/// Formats seconds with two units.
pub fn duration(seconds: f64) -> String {
    let whole = seconds.max(0.0).round() as u64;
    let (days, hours, minutes) = (whole / 86_400, whole / 3600 % 24, whole / 60 % 60);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds:.1} s"),
        (0, 0, _) => format!("{minutes} min {:02} s", whole % 60),
        (0, _, _) => format!("{hours} h {minutes:02} min"),
        _ => format!("{days} d {hours:02} h"),
    }
}

/// A text near the beginning of every page.
pub const MARK: &str = " - llm.rs</title>";

/// Width of the figure for phones, with one panel below the other.
const NARROW: f64 = 380.0;

/// Returns the page of runs with their settings as text, if these are known. It has a figure for wide screens and one for phones.
pub fn page(runs: &[RunLog], settings: &[Option<String>], options: &FigureOptions) -> Result<String> {
    let names: Vec<&str> = runs.iter().map(|run| run.name.as_str()).collect();
    let title = escape(&names.join(", "));
    let mut rows = String::new();
    let mut settings_of_runs = String::new();
    let mut header = String::new();
    for (i, (run, text)) in runs.iter().zip(settings).enumerate() {
        let cells = Summary::new(run).cells();
        if i == 0 {
            header = format!("<th>{}</th>", cells.each_ref().map(|(name, _)| *name).join("</th><th>"));
        }
        let name = escape(&run.name);
        let cells = format!("<td>{}</td>", cells.map(|(_, value)| escape(&value)).join("</td><td>"));
        let _ = writeln!(rows, "<tr><th scope=\"row\"><i class=\"k{}\"></i>{name}</th>{cells}</tr>", i % 8);
        if let Some(text) = text {
            let _ = writeln!(
                settings_of_runs,
                "<details><summary>Settings of {name}</summary><pre>{}</pre></details>",
                escape(text)
            );
        }
    }
    let sources = sources_table(runs);
    let (mut figures, mut scripts) = (String::new(), String::new());
    for (class, width) in [("wide", options.width), ("narrow", NARROW)] {
        let figure = Figure::new(runs, &FigureOptions { width, ..options.clone() })?;
        // Within a script, only `<` could end it.
        let data = serde_json::to_string(&figure.panels)?.replace('<', "\\u003c");
        let _ = writeln!(figures, "<div class=\"figure {class}\">\n{}</div>", figure.to_svg(false));
        let _ = writeln!(scripts, "showValues(document.querySelector(\".{class}\"), {data});");
    }
    let dark = dark_mode();
    Ok(format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n<title>{title}{MARK}\n\
         <style>\n{STYLE}{dark}\n</style>\n</head>\n<body>\n<h1>{title}</h1>\n<div class=\"scroll\">\n<table>\n<thead><tr>\
         <th>run</th>{header}</tr></thead>\n<tbody>\n{rows}</tbody>\n</table>\n</div>\n{sources}{figures}\
         {settings_of_runs}<script>\n{TOOLTIP}{scripts}</script>\n</body>\n</html>\n"
    ))
}

/// Returns a table with the last validation losses of the data sources; empty without sources.
fn sources_table(runs: &[RunLog]) -> String {
    let mut rows = String::new();
    for run in runs {
        for SourceLog { name, losses, bits_per_byte } in &run.sources {
            let loss = losses.last().map_or_else(String::new, |loss| format!("{:.4}", loss.value));
            let bits = bits_per_byte.map_or_else(|| "–".to_owned(), |bits| format!("{bits:.4}"));
            let (run, name) = (escape(&run.name), escape(name));
            let _ =
                writeln!(rows, "<tr><th scope=\"row\">{run}</th><td>{name}</td><td>{loss}</td><td>{bits}</td></tr>");
        }
    }
    if rows.is_empty() {
        return rows;
    }
    format!(
        "<div class=\"scroll\">\n<table>\n<thead><tr><th>run</th><th>source</th><th>validation loss</th><th>bits per byte</th>\
         </tr></thead>\n<tbody>\n{rows}</tbody>\n</table>\n</div>\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(text: &str) -> RunLog {
        RunLog { name: "<run>".to_owned(), ..RunLog::parse(text.as_bytes()).unwrap() }
    }

    #[test]
    fn a_page_has_the_losses_of_data_sources() {
        let text = r#"{"step":0,"loss":5.5,"lr":0.1}
{"step":0,"val_loss":5.5,"sources":[{"name":"<web>","val_loss":5.25,"bits_per_byte":1.5},{"name":"code","val_loss":5.75}]}
"#;
        let page = page(&[run(text)], &[None], &FigureOptions::default()).unwrap();
        for part in ["<td>&lt;web&gt;</td><td>5.2500</td><td>1.5000</td>", "<td>code</td><td>5.7500</td><td>–</td>"] {
            assert!(page.contains(part), "{part}: {page}");
        }
        assert!(page.contains("validation loss by source"));
        let without = super::page(&[run("s:0 trl:5.5\ns:0 tel:5.25\n")], &[None], &FigureOptions::default()).unwrap();
        assert!(!without.contains("by source") && !without.contains("bits per byte"));
    }

    #[test]
    fn the_table_has_final_values() {
        let text = r#"{"step":0,"val_loss":5.5}
{"step":0,"loss":5.0,"lr":0.001,"ms":500.0,"tokens":64,"tokens_per_second":100}
{"step":1,"loss":null,"lr":0.001,"ms":61500.0,"tokens":128000,"tokens_per_second":300}
{"step":2,"val_loss":4.5}
{"step":3,"val_loss":4.75}
{"step":4,"val_loss":null}
"#;
        let summary = Summary::new(&run(text));
        assert_eq!((summary.steps, summary.tokens, summary.not_finite), (2, Some(128_000), 1));
        assert_eq!((summary.val_loss, summary.best_val_loss), (Some(4.75), Some((4.5, 2))));
        let cells = summary.cells().map(|(_, value)| value);
        let expected = ["2", "128k", "5.0000 (1 not finite)", "4.7500", "4.5000 at 2", "–", "–", "300", "1 min 02 s"];
        assert_eq!(cells, expected);
        let durations = [0.25, 3_700.0, 90_000.0].map(duration);
        assert_eq!(durations, ["0.2 s", "1 h 01 min", "1 d 01 h"]);
    }

    #[test]
    fn the_page_contains_everything_and_requests_nothing() {
        let run = run("s:0 trl:5 lr:0.1 norm:1\ns:1 trl:4 lr:0.1 norm:1\n");
        let settings = [Some("model = '</pre><script>'".to_owned())];
        let page = page(&[run], &settings, &FigureOptions::default()).unwrap();
        // The name of the SVG namespace is no request.
        let others = page.replace("http://www.w3.org/2000/svg", "");
        for text in
            ["http:", "https:", "//", "src=", "href=", "@import", "url(http", "<run>", "</pre><script>", "<link"]
        {
            assert!(!others.contains(text), "{text}");
        }
        assert!(page.contains("&lt;run&gt;") && page.contains("<svg ") && page.contains("prefers-color-scheme:dark"));
        assert_eq!(page.matches("<script>").count(), 1);
    }

    #[test]
    fn the_page_has_a_figure_of_its_own_for_phones() {
        let page = page(&[run("s:0 trl:5 lr:0.1 norm:1\n")], &[None], &FigureOptions::default()).unwrap();
        assert!(page.contains("name=\"viewport\"") && page.contains("class=\"scroll\""), "{page}");
        for (class, width) in [("wide", 1000), ("narrow", 380)] {
            let (_, figure) = page.split_once(&format!("<div class=\"figure {class}\">")).unwrap();
            let (start, _) = figure.split_once('>').unwrap();
            assert!(start.contains(&format!("viewBox=\"0 0 {width} ")), "{class}: {start}");
        }
        // Nothing has a width that a phone lacks, and the figures share no names of clip paths.
        assert!(!STYLE.contains("min-width"));
        let ids: Vec<&str> = page.split(" id=\"").skip(1).filter_map(|rest| rest.split('"').next()).collect();
        let different: std::collections::BTreeSet<&str> = ids.iter().copied().collect();
        assert_eq!((ids.len(), ids.is_empty()), (different.len(), false), "{ids:?}");
    }
}
