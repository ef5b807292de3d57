//! The table of a sweep: one row for each run, the lowest validation loss first.

use super::outcome::{Outcome, Results};
use super::runs::{Axis, Run};
use crate::output::{self, Kind, Mark};
use anyhow::Result;
use std::io::Write;
use std::path::Path;

/// File name of the table as comma-separated values.
pub const CSV: &str = "sweep.csv";
/// File name of the table as Markdown.
pub const MARKDOWN: &str = "sweep.md";

/// Headings after those of the flags.
const HEADINGS: [&str; 6] = ["val loss", "train loss", "tokens/s", "seconds", "status", "directory"];

/// Fails if one of the files exists and is not a table of a sweep.
pub fn check(out: &Path) -> Result<()> {
    let kind = Kind { name: "a table of sweep", mark: Mark::Contains(HEADINGS[0]) };
    [CSV, MARKDOWN].into_iter().try_for_each(|name| output::check_existing(&out.join(name), kind))
}

/// Writes both files.
pub fn save(out: &Path, axes: &[Axis], outcomes: &[(&Run, Outcome)]) -> Result<()> {
    atomic_file::write(&out.join(CSV), |file| {
        let mut writer = csv::Writer::from_writer(file);
        for row in rows(axes, outcomes) {
            writer.write_record(row)?;
        }
        Ok(writer.flush()?)
    })?;
    atomic_file::write(&out.join(MARKDOWN), |file| Ok(file.write_all(markdown(axes, outcomes).as_bytes())?))
}

/// Returns the table as Markdown with aligned columns.
pub fn markdown(axes: &[Axis], outcomes: &[(&Run, Outcome)]) -> String {
    let mut rows = rows(axes, outcomes);
    rows.iter_mut().flatten().for_each(|cell| *cell = cell.replace('|', "\\|"));
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..rows[0].len()).map(width).collect();
    let line = |row: &[String]| {
        let cells = row.iter().zip(&widths).map(|(cell, &width)| format!(" {cell:<width$} |"));
        format!("|{}\n", cells.collect::<String>())
    };
    let rule: Vec<String> = widths.iter().map(|&width| "-".repeat(width)).collect();
    let body: String = rows[1..].iter().map(|row| line(row)).collect();
    line(&rows[0]) + &line(&rule) + &body
}

/// Returns the headings and the rows.
fn rows(axes: &[Axis], outcomes: &[(&Run, Outcome)]) -> Vec<Vec<String>> {
    let mut sorted: Vec<&(&Run, Outcome)> = outcomes.iter().collect();
    sorted.sort_by(|(_, a), (_, b)| {
        let ((a_ended, a_val, a_train), (b_ended, b_val, b_train)) = (a.rank(), b.rank());
        a_ended.cmp(&b_ended).then(a_val.total_cmp(&b_val)).then(a_train.total_cmp(&b_train))
    });
    let headings = axes.iter().map(|axis| axis.flag.as_str()).chain(HEADINGS).map(str::to_owned).collect();
    let row = |(run, outcome): &(&Run, Outcome)| {
        let measured = match outcome {
            Outcome::Finished(results) => numbers(results),
            Outcome::Stopped(_) | Outcome::Failed(_) => <[String; 4]>::default(),
        };
        let ending = [outcome.status().to_owned(), run.directory.display().to_string()];
        run.values.iter().cloned().chain(measured).chain(ending).collect()
    };
    [headings].into_iter().chain(sorted.into_iter().map(row)).collect()
}

fn numbers(results: &Results) -> [String; 4] {
    let &Results { val_loss, train_loss, seconds, tokens } = results;
    let val_loss = val_loss.map(|loss| format!("{loss:.4}")).unwrap_or_default();
    [val_loss, format!("{train_loss:.4}"), format!("{:.0}", tokens as f64 / seconds), format!("{seconds:.1}")]
}

#[cfg(test)]
mod tests {
    use super::super::runs::{axis, combinations};
    use super::*;

    #[test]
    fn runs_are_sorted_by_validation_loss_and_failed_runs_are_last() {
        let dir = tempfile::tempdir().unwrap();
        let axes = [axis("lr=1,2,3,4").unwrap()];
        let runs = combinations(&axes, Path::new("out"), &[]).unwrap();
        let finished = |val_loss| {
            Outcome::Finished(Results { val_loss: Some(val_loss), train_loss: 5.0, seconds: 2.0, tokens: 100 })
        };
        let outcomes =
            [Outcome::Failed("failed: a, \"b\" | c".to_owned()), finished(f64::NAN), finished(4.5), finished(4.25)];
        let outcomes: Vec<_> = runs.iter().zip(outcomes).collect();
        save(dir.path(), &axes, &outcomes).unwrap();
        let read = |name| std::fs::read_to_string(dir.path().join(name)).unwrap();
        assert_eq!(
            read(CSV),
            "lr,val loss,train loss,tokens/s,seconds,status,directory\n\
             4,4.2500,5.0000,50,2.0,finished,out/lr=4\n\
             3,4.5000,5.0000,50,2.0,finished,out/lr=3\n\
             2,NaN,5.0000,50,2.0,finished,out/lr=2\n\
             1,,,,,\"failed: a, \"\"b\"\" | c\",out/lr=1\n"
        );
        let table = read(MARKDOWN);
        let lines: Vec<&str> = table.lines().collect();
        assert_eq!(lines.len(), 6);
        assert_eq!(lines[0], "| lr | val loss | train loss | tokens/s | seconds | status              | directory |");
        assert_eq!(lines[2], "| 4  | 4.2500   | 5.0000     | 50       | 2.0     | finished            | out/lr=4  |");
        assert_eq!(
            lines[5],
            "| 1  |          |            |          |         | failed: a, \"b\" \\| c | out/lr=1  |"
        );
    }
}
