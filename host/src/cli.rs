//! The command line.

use crate::commands::{bench, data, doctor, eval, inspect, sample, selftest, train, verify};
use crate::config_file::ConfigFile;
use anyhow::{Context, Result};
use clap::{ArgMatches, CommandFactory, Parser, Subcommand};
use std::ffi::OsString;
use std::path::PathBuf;

/// Pretrains GPT-2 and GPT-3 models: every line of it, GPU kernels included, is Rust.
///
/// `train` with no argument needs no file and no GPU, and takes less than a minute.
#[derive(Debug, Parser)]
#[command(version, propagate_version = true, max_term_width = 110)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Train(Box<train::Options>),
    Eval(eval::Eval),
    Sample(sample::Sample),
    Data(data::Data),
    Doctor(doctor::Doctor),
    Inspect(inspect::Inspect),
    Verify(verify::Verify),
    Selftest(selftest::Selftest),
    #[command(subcommand)]
    Bench(bench::Bench),
}

/// llm.c's flags of two letters, which would be read as one letter and its value.
const TWO_LETTERS: [(&str, &str); 6] = [
    ("-ge", "--gelu-fusion"),
    ("-lg", "--gpu-info-every"),
    ("-nk", "--keep"),
    ("-nm", "--major-every"),
    ("-sg", "--skip-norm-z"),
    ("-sl", "--skip-loss-z"),
];

impl Cli {
    /// From the command line, and from the file that `train --config` names. What is wrong with the command line itself is a
    /// [`clap::Error`], and so is `--help`.
    pub fn of(arguments: impl IntoIterator<Item = OsString>) -> Result<Self> {
        let mut arguments: Vec<OsString> = arguments.into_iter().map(in_full).collect();
        let command = Self::command();
        let partial = command.clone().ignore_errors(true).try_get_matches_from(&arguments).unwrap_or_default();
        let train = partial.subcommand().filter(|(name, _)| *name == "train");
        let path = |given: &ArgMatches| given.get_one::<PathBuf>("config").cloned();
        let Some((name, given, path)) = train.and_then(|(name, given)| Some((name, given, path(given)?))) else {
            return Ok(Self::try_parse_from(arguments)?);
        };
        let file = ConfigFile::read(&path)?;
        let subcommand = command.find_subcommand(name).context("train is a command")?;
        let flags = file.arguments(subcommand, given)?;
        let after = arguments.iter().position(|argument| argument == name).map_or(arguments.len(), |at| at + 1);
        arguments.splice(after..after, flags);
        Self::try_parse_from(arguments).map_err(|error| file.explain(error).unwrap_or_else(anyhow::Error::from))
    }

    pub fn run(&self) -> Result<()> {
        match &self.command {
            Command::Train(args) => train::run(args),
            Command::Eval(args) => eval::run(args),
            Command::Sample(args) => sample::run(args),
            Command::Data(args) => data::run(args),
            Command::Doctor(args) => doctor::run(args),
            Command::Inspect(args) => inspect::run(args),
            Command::Verify(args) => verify::run(args),
            Command::Selftest(args) => selftest::run(args),
            Command::Bench(args) => bench::run(args),
        }
    }
}

fn in_full(argument: OsString) -> OsString {
    TWO_LETTERS.iter().find(|(short, _)| argument == *short).map_or(argument, |(_, long)| OsString::from(long))
}

/// Most of anything: files count steps and tokens in 31 bits, and products of two such numbers do not overflow.
const MOST: usize = i32::MAX as usize;

/// Parses a whole number of at least 1.
pub fn count(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(n) if (1..=MOST).contains(&n) => Ok(n),
        _ => Err(format!("expected a whole number of 1 to {MOST}")),
    }
}

/// Parses a number that is finite and at least 0.
pub fn non_negative(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(x) if x.is_finite() && x >= 0.0 => Ok(x),
        _ => Err("expected a number of at least 0".to_owned()),
    }
}

/// Parses 0 or 1, or their names.
pub fn switch(text: &str) -> Result<bool, String> {
    match text {
        "1" | "true" | "on" => Ok(true),
        "0" | "false" | "off" => Ok(false),
        _ => Err("expected 1 (true, on) or 0 (false, off)".to_owned()),
    }
}

/// Parses a level that has a number.
pub fn level<L: TryFrom<u8, Error = &'static str>>(text: &str) -> Result<L, &'static str> {
    // No level has so high a number, so that one message serves for what is no number, too.
    L::try_from(text.parse().unwrap_or(u8::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
    }
}
