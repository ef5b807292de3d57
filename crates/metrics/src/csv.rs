//! The logs of runs as a table in CSV.

use crate::run::{Evaluation, RunLog, Step};
use anyhow::Result;
use std::io::Write;

/// Columns of the table. One with the validation loss of each data source follows. A cell is empty if the log has no value, or none that is
/// finite.
pub const COLUMNS: [&str; 13] = [
    "run",
    "step",
    "tokens",
    "time",
    "loss",
    "lr",
    "norm",
    "ms",
    "tokens_per_second",
    "mfu",
    "val_loss",
    "hellaswag",
    "core",
];

/// Writes one row for each step of each run. Evaluations before a step are in its row; tokens and time are those of the training
/// step, or of the evaluation in a row without one.
pub fn write(runs: &[RunLog], to: impl Write) -> Result<()> {
    let mut table = ::csv::Writer::from_writer(to);
    let mut sources: Vec<&str> = Vec::new();
    for name in runs.iter().flat_map(|run| &run.sources).map(|source| &source.name) {
        if !sources.contains(&name.as_str()) {
            sources.push(name);
        }
    }
    let of_source = sources.iter().map(|name| format!("val_loss of {name}"));
    table.write_record(COLUMNS.map(str::to_owned).into_iter().chain(of_source))?;
    for run in runs {
        let mut steps: Vec<u64> = run.steps.iter().map(|step| step.step).collect();
        steps.extend(run.validations.iter().chain(&run.hellaswag).chain(&run.core).map(|evaluation| evaluation.step));
        steps.sort_unstable();
        steps.dedup();
        for number in steps {
            let step = find(&run.steps, number, |step: &Step| step.step);
            let validation = find(&run.validations, number, |evaluation: &Evaluation| evaluation.step);
            let score = find(&run.hellaswag, number, |evaluation: &Evaluation| evaluation.step);
            let core = find(&run.core, number, |evaluation: &Evaluation| evaluation.step);
            let evaluation = validation.or(score).or(core);
            let tokens = step.map_or_else(|| evaluation?.tokens, |step| step.tokens);
            let time = step.map(|step| step.time).or(evaluation.map(|evaluation| evaluation.time));
            let value = |value: fn(&Step) -> f32| step.map_or_else(String::new, |step| cell(value(step)));
            let result = |found: Option<&Evaluation>| found.map_or_else(String::new, |found| cell(found.value));
            let losses = sources.iter().map(|name| {
                let source = run.sources.iter().find(|source| source.name == *name);
                result(source.and_then(|source| find(&source.losses, number, |loss| loss.step)))
            });
            let columns = [
                run.name.clone(),
                number.to_string(),
                tokens.map_or_else(String::new, |tokens| tokens.to_string()),
                time.filter(|time| time.is_finite()).map_or_else(String::new, |time| format!("{time:.3}")),
                value(|step| step.loss),
                value(|step| step.lr),
                value(|step| step.norm),
                value(|step| step.ms),
                value(|step| step.tokens_per_second),
                value(|step| step.mfu),
                result(validation),
                result(score),
                result(core),
            ];
            table.write_record(columns.into_iter().chain(losses))?;
        }
    }
    Ok(table.flush()?)
}

fn find<T>(records: &[T], number: u64, step: impl Fn(&T) -> u64) -> Option<&T> {
    records.binary_search_by_key(&number, step).ok().map(|at| &records[at])
}

/// Formats a finite number with as many digits as are needed to read the same number again.
fn cell(value: impl Into<f64> + std::fmt::Display + Copy) -> String {
    if value.into().is_finite() { value.to_string() } else { String::new() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_have_columns() {
        let lines = [
            r#"{"step":0,"val_loss":5.5,"sources":[{"name":"web","val_loss":5.0},{"name":"code","val_loss":6.0}]}"#,
            r#"{"step":9,"val_loss":4.5,"sources":[{"name":"books","val_loss":4.25}]}"#,
        ];
        let log = |line: &str| RunLog { name: "a".to_owned(), ..RunLog::parse(line.as_bytes()).unwrap() };
        let mut table = Vec::new();
        write(&lines.map(log), &mut table).unwrap();
        let table = String::from_utf8(table).unwrap();
        let ends: Vec<&str> = table
            .lines()
            .map(|line| line.rsplitn(5, ',').last().map_or("", |start| &line[start.len() + 1..]))
            .collect();
        assert_eq!(ends, ["core,val_loss of web,val_loss of code,val_loss of books", ",5,6,", ",,,4.25"]);
    }

    #[test]
    fn a_row_joins_a_step_and_the_evaluations_before_it() {
        let text = r#"{"step":0,"val_loss":5.5,"tokens":0,"time":10.0}
{"step":0,"loss":null,"lr":0.0006,"norm":1.5,"ms":250.0,"tokens_per_second":256.0,"tokens":64,"time":11.5}
{"step":1,"val_loss":4.5,"tokens":64,"time":12.0}
{"step":1,"hellaswag":0.25,"tokens":64,"time":12.5}
{"step":2,"core":0.125,"tokens":128,"time":13.5}
"#;
        let log = RunLog { name: "a,b".to_owned(), ..RunLog::parse(text.as_bytes()).unwrap() };
        let mut table = Vec::new();
        write(&[log], &mut table).unwrap();
        assert_eq!(
            String::from_utf8(table).unwrap(),
            "run,step,tokens,time,loss,lr,norm,ms,tokens_per_second,mfu,val_loss,hellaswag,core\n\
             \"a,b\",0,64,11.500,,0.0006,1.5,250,256,,5.5,,\n\
             \"a,b\",1,64,12.000,,,,,,,4.5,0.25,\n\
             \"a,b\",2,128,13.500,,,,,,,,,0.125\n"
        );
    }
}
