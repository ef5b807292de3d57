//! The file of `--config`: TOML whose keys are the flags of a command.
//!
//! The file is converted into arguments of the command, so that the same parser checks flags and file.

use anyhow::{Context, Result, anyhow, bail, ensure};
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command};
use std::collections::BTreeMap;
use std::error::Error;
use std::ffi::OsString;
use std::ops::Range;
use std::path::{Path, PathBuf};
use toml::{Spanned, Value};

/// Flags that are no keys of a file.
const NOT_KEYS: [&str; 3] = ["config", "help", "version"];

/// A parsed configuration file.
pub struct ConfigFile {
    path: PathBuf,
    entries: BTreeMap<String, Entry>,
}

struct Entry {
    /// Line number, from 1.
    line: usize,
    value: Value,
}

/// Keys that replace sizes of the model, or settings of its routers.
const SIZES: [&str; 14] = [
    "layers",
    "heads",
    "kv-heads",
    "head-size",
    "channels",
    "ffn",
    "window",
    "window-pattern",
    "experts",
    "active-experts",
    "router-scores",
    "router-aux-loss",
    "router-z-loss",
    "router-bias-rate",
];

impl ConfigFile {
    /// Reads and parses a file.
    pub fn read(path: &Path) -> Result<Self> {
        let text = bounded_file::read_to_string(path, bounded_file::SETTINGS)
            .with_context(|| format!("--config {}", path.display()))?;
        let line = |span: Range<usize>| 1 + text[..span.start].matches('\n').count();
        let parsed = toml::from_str::<BTreeMap<Spanned<String>, Value>>(&text).map_err(|error| {
            let place = error.span().map(|span| format!(", line {}", line(span))).unwrap_or_default();
            anyhow!("{}{place}: {}", path.display(), error.message())
        })?;
        let entry = |(key, value): (Spanned<String>, Value)| {
            let line = line(key.span());
            (key.into_inner(), Entry { line, value })
        };
        Ok(Self { path: path.to_owned(), entries: parsed.into_iter().map(entry).collect() })
    }

    /// Returns the file as arguments of `command`.
    ///
    /// Keys that the command line also gives are left out: the command line wins. `--model` there also replaces the sizes in the file.
    pub fn arguments(&self, command: &Command, given: &ArgMatches) -> Result<Vec<OsString>> {
        let is_given = |id: &str| given.value_source(id) == Some(ValueSource::CommandLine);
        let given_data = ["train", "val"].into_iter().find(|id| is_given(id));
        if let Some(key) = ["train", "val"].into_iter().find(|key| self.entries.contains_key(*key))
            && self.entries.contains_key("data")
        {
            bail!("{}: expected either this key or [[data]] tables, found both; move it into a table", self.at(key));
        }
        ensure!(
            given_data != Some("val") || !self.entries.contains_key("data"),
            "--val: expected --train, too, since the [[data]] tables of {} are replaced by both; add it",
            self.path.display()
        );
        let mut arguments = Vec::new();
        for (key, Entry { value, .. }) in &self.entries {
            let arg = self.flag(command, key)?;
            let of_key = self.arguments_of(key, value, arg)?;
            let replaced = (SIZES.contains(&&**key) && is_given("model")) || (key == "data" && given_data.is_some());
            if !is_given(arg.get_id().as_str()) && !replaced {
                arguments.extend(of_key);
            }
        }
        Ok(arguments)
    }

    fn flag<'a>(&self, command: &'a Command, key: &str) -> Result<&'a Arg> {
        let flags = || command.get_arguments().filter_map(|arg| Some((arg.get_long()?, arg)));
        let keys = || flags().filter(|(long, _)| !NOT_KEYS.contains(long));
        if let Some((_, arg)) = keys().find(|(long, _)| *long == key) {
            return Ok(arg);
        }
        let similarity = |long: &str| strsim::jaro_winkler(long, &key.replace('_', "-").to_lowercase());
        let nearest =
            keys().map(|(long, _)| long).max_by(|a, b| similarity(a).total_cmp(&similarity(b))).unwrap_or_default();
        bail!(
            "{}: unknown key: expected a flag of '{}' without its dashes; did you mean '{nearest}'?",
            self.at(key),
            command.get_name()
        )
    }

    fn arguments_of(&self, key: &str, value: &Value, arg: &Arg) -> Result<Vec<OsString>> {
        let is_list = matches!(arg.get_action(), ArgAction::Append);
        let Some(texts) = texts(value).filter(|_| is_list || !value.is_array()) else {
            bail!("{}: expected text, a number, true or false, found {}", self.at(key), value.type_str())
        };
        if arg.get_action().takes_values() {
            return Ok(texts.into_iter().map(|text| format!("--{key}={text}").into()).collect());
        }
        ensure!(value.is_bool(), "{} = {value}: expected true or false", self.at(key));
        Ok((value.as_bool() == Some(true)).then(|| format!("--{key}").into()).into_iter().collect())
    }

    /// Rewrites an error about a value of the file to name its line. Returns any other error unchanged.
    pub fn explain(&self, error: clap::Error) -> Result<anyhow::Error, clap::Error> {
        let key = match error.get(ContextKind::InvalidArg) {
            Some(ContextValue::String(arg)) => {
                arg.trim_start_matches('-').split([' ', '=', '[']).next().unwrap_or_default()
            }
            _ => return Err(error),
        };
        let Some(Entry { value, .. }) = self.entries.get(key) else { return Err(error) };
        // The invalid value may come from the command line, which overrides the file.
        if let Some(ContextValue::String(wrong)) = error.get(ContextKind::InvalidValue)
            && !texts(value).unwrap_or_default().contains(wrong)
        {
            return Err(error);
        }
        let reason = match (error.kind(), error.source(), error.get(ContextKind::ValidValue)) {
            (ErrorKind::InvalidValue, _, Some(ContextValue::Strings(valid))) => {
                format!("expected one of {}", valid.join(", "))
            }
            (_, Some(source), _) => source.to_string(),
            _ => error.to_string().lines().next().unwrap_or_default().trim_start_matches("error: ").to_owned(),
        };
        let shown = if value.is_array() { String::new() } else { format!(" = {value}") };
        Ok(anyhow!("{}{shown}: {reason}", self.at(key)))
    }

    fn at(&self, key: &str) -> String {
        let line = self.entries.get(key).map_or(0, |entry| entry.line);
        format!("{}, line {line}: {key}", self.path.display())
    }
}

/// Formats a value, or each element of an array, as a command-line argument.
fn texts(value: &Value) -> Option<Vec<String>> {
    match value {
        Value::Array(values) => values.iter().map(text).collect(),
        value if value.is_table() => None,
        value => text(value).map(|text| vec![text]),
    }
}

/// Formats a value as a command-line argument. A table is written inline.
fn text(value: &Value) -> Option<String> {
    match value {
        Value::Table(_) => Some(value.to_string()),
        Value::String(text) => Some(text.clone()),
        Value::Integer(number) => Some(number.to_string()),
        // Debug formatting keeps a decimal point or an exponent, so that flags for whole numbers reject the value.
        Value::Float(number) => Some(format!("{number:?}")),
        Value::Boolean(on) => Some(on.to_string()),
        _ => None,
    }
}
