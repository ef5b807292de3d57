//! The data sources of a run: `--train` and `--val`, or the `[[data]]` tables of the `--config` file.

use super::TrainOptions;
use crate::datasets::Datasets;
use anyhow::{Result, anyhow, ensure};
use data::Tokens;
use data::mixture::{self, Packing, Source};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// A `[[data]]` table. One without `train` is only validated on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SourceTable {
    /// Name in the log and in the plots.
    pub name: String,
    /// Token files to train on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub train: Option<String>,
    /// Token files for validation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub val: Option<String>,
    /// Share of the sequences, relative to the other sources. Without weights, the shares are those of the tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight: Option<f64>,
    /// Number of epochs after which the other sources take the share of this one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_epochs: Option<u32>,
}

/// Parses a `[[data]]` table that is written inline.
pub fn source_table(text: &str) -> Result<SourceTable, String> {
    #[derive(Deserialize)]
    struct File {
        data: SourceTable,
    }
    let parsed = toml::from_str::<File>(&format!("data = {text}"));
    let table = parsed.map_err(|error| error.message().trim_end().to_owned())?.data;
    let SourceTable { name, train, val, weight, max_epochs } = &table;
    if train.is_none() && val.is_none() {
        return Err(format!("{name}: expected train or val, found neither"));
    }
    if train.is_none() && weight.is_some() {
        return Err(format!("{name}: expected a weight only with train, found one without"));
    }
    if *max_epochs == Some(0) {
        return Err(format!("{name}: max_epochs: expected at least 1, found 0; use weight = 0 to leave a source out"));
    }
    Ok(table)
}

/// Returns the data sources of a run; none for the built-in text.
pub fn tables(options: &TrainOptions) -> Result<Vec<SourceTable>> {
    if !options.data.is_empty() {
        ensure!(
            options.data.iter().any(|table| table.train.is_some()),
            "[[data]]: expected a table with train, found none; add one"
        );
        return Ok(options.data.clone());
    }
    let train: Vec<(&str, Option<f64>)> = options.train.iter().map(|text| split_weight(text)).collect();
    let patterns = train.iter().map(|(pattern, _)| *pattern).chain(options.val.iter().map(String::as_str));
    let names = names(&patterns.collect::<Vec<_>>(), train.len());
    let paired = options.train.len() == options.val.len();
    let mut tables: Vec<SourceTable> = train
        .into_iter()
        .zip(&names)
        .enumerate()
        .map(|(i, ((pattern, weight), name))| SourceTable {
            name: name.clone(),
            train: Some(pattern.to_owned()),
            val: options.val.get(i).filter(|_| paired).cloned(),
            weight,
            max_epochs: None,
        })
        .collect();
    let only_val = |(val, name): (&String, &String)| SourceTable {
        name: name.clone(),
        train: None,
        val: Some(val.clone()),
        weight: None,
        max_epochs: None,
    };
    if !paired {
        tables.extend(options.val.iter().zip(&names[options.train.len()..]).map(only_val));
    }
    Ok(tables)
}

/// Splits `GLOB=WEIGHT`. The name of an existing file has no weight.
fn split_weight(text: &str) -> (&str, Option<f64>) {
    let split = text.rsplit_once('=').and_then(|(pattern, weight)| Some((pattern, weight.trim().parse().ok()?)));
    match split {
        Some((pattern, weight)) if !Path::new(text).exists() => (pattern, Some(weight)),
        _ => (text, None),
    }
}

/// Returns names for patterns: the directories of the files or, if two of `train` patterns have the same one, the patterns.
fn names(patterns: &[&str], train: usize) -> Vec<String> {
    let directory = |pattern: &&str| {
        let name = Path::new(pattern).parent().and_then(Path::file_name)?;
        Some(name.to_string_lossy().into_owned())
    };
    let [train, val] = [&patterns[..train], &patterns[train..]].map(|patterns| {
        let found: Vec<String> = patterns.iter().filter_map(directory).collect();
        let distinct = found.len() == patterns.len() && (1..found.len()).all(|i| !found[..i].contains(&found[i]));
        if distinct { found } else { patterns.iter().map(|&pattern| pattern.to_owned()).collect() }
    });
    // A validation source of the same directory must have another name.
    let val = val.into_iter().map(|name| if train.contains(&name) { format!("{name}-val") } else { name });
    [train.clone(), val.collect()].concat()
}

/// Whether one source is read in llm.c's order.
pub fn is_single(tables: &[SourceTable], packing: Packing) -> bool {
    let mut train = tables.iter().filter(|table| table.train.is_some());
    let first = train.next();
    packing == Packing::Stream && train.next().is_none() && first.is_none_or(|table| table.max_epochs.is_none())
}

/// Returns the patterns of all sources, each with its flag.
pub fn patterns(tables: &[SourceTable]) -> Vec<(&'static str, &str)> {
    tables
        .iter()
        .flat_map(|table| [("--train", table.train.as_deref()), ("--val", table.val.as_deref())])
        .filter_map(|(flag, pattern)| Some((flag, pattern?)))
        .collect()
}

/// Opens the token files of a pattern.
pub fn open(options: &TrainOptions, datasets: &Datasets, flag: &str, pattern: &str) -> Result<Vec<Tokens>> {
    let found = datasets.tokens(pattern);
    found.map_err(|error| anyhow!("{flag}: {error:#}{}", options.relative_paths()))
}

/// Opens the training data of the sources, and writes the weights into the tables.
pub fn open_sources(options: &TrainOptions, datasets: &Datasets, tables: &mut [SourceTable]) -> Result<Vec<Source>> {
    let mut sources = Vec::new();
    let given = tables.iter().filter(|table| table.weight.is_some()).count();
    for table in tables {
        let Some(pattern) = &table.train else { continue };
        let shards = open(options, datasets, "--train", pattern)?;
        let tokens: usize = shards.iter().map(Tokens::len).sum();
        ensure!(
            given == 0 || table.weight.is_some(),
            "data source {}: expected a weight, as other sources have, found none; give all sources a weight, or none",
            table.name
        );
        let weight = *table.weight.get_or_insert(tokens as f64);
        sources.push(Source { name: table.name.clone(), shards, weight, max_epochs: table.max_epochs });
    }
    mixture::check_sources(&sources)?;
    Ok(sources)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::Cli;

    fn tables_of(flags: &str) -> Vec<SourceTable> {
        let arguments = ["llm-rs", "train"].into_iter().chain(flags.split(' ')).map(Into::into);
        tables(&Cli::from_arguments(arguments).unwrap().into_train().unwrap()).unwrap()
    }

    #[test]
    fn repeated_flags_are_sources_with_names_and_weights() {
        let found = tables_of("--train d/web/*.bin=0.7 --train d/code/*.bin=3e-1 --val d/web/v.bin --val d/code/v.bin");
        let short = |table: &SourceTable| {
            let SourceTable { name, train, val, weight, .. } = table.clone();
            (name, train.unwrap_or_default(), val.unwrap_or_default(), weight)
        };
        let table = |name: &str, train: &str, val: &str, weight| (name.into(), train.into(), val.into(), weight);
        let expected = [
            table("web", "d/web/*.bin", "d/web/v.bin", Some(0.7)),
            table("code", "d/code/*.bin", "d/code/v.bin", Some(0.3)),
        ];
        assert_eq!(found.iter().map(short).collect::<Vec<_>>(), expected);
        // Names in the same directory are the patterns. A single --val is a source of its own.
        let found = tables_of("-i d/a_*.bin -i d/b_*.bin -j d/v.bin");
        let expected = [
            table("d/a_*.bin", "d/a_*.bin", "", None),
            table("d/b_*.bin", "d/b_*.bin", "", None),
            table("d", "", "d/v.bin", None),
        ];
        assert_eq!(found.iter().map(short).collect::<Vec<_>>(), expected);
        // Text that is no number belongs to the pattern.
        assert_eq!(tables_of("-i a=b/*.bin")[0].train.as_deref(), Some("a=b/*.bin"));
        assert!(tables_of("-i a/*.bin=nan")[0].weight.unwrap().is_nan());
        assert!(tables_of("--steps 1").is_empty());
    }

    #[test]
    fn tables_are_checked() {
        let error = |text| source_table(text).unwrap_err();
        assert!(error("{ name = 'a' }").contains("expected train or val"));
        assert!(error("{ name = 'a', train = 'x', max_epochs = 0 }").contains("expected at least 1, found 0"));
        assert!(error("{ name = 'a', train = 'x', max_epochs = -1 }").contains("-1"));
        assert!(error("{ name = 'a', val = 'x', weight = 1.0 }").contains("only with train"));
        assert!(error("{ name = 'a', trains = 'x' }").contains("trains"));
        assert!(error("{ train = 'x' }").contains("name"));
        let table = source_table("{ name = 'a', train = 'x', weight = 1 }").unwrap();
        assert_eq!((table.name.as_str(), table.weight), ("a", Some(1.0)));
    }
}
