//! The command line: the commands, and the rules that hold for every flag.

use crate::chat_template::renderer;
use crate::commands::{
    bench, chat, data, doctor, eval, export, inspect, log, plan, plot, sample, selftest, serve, shell, simulate, sweep,
    tokenizer, train, verify,
};
use crate::config_file::ConfigFile;
use crate::terminal;
use crate::version;
use anyhow::{Context, Result};
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command, CommandFactory, FromArgMatches, Parser, Subcommand};
use std::ffi::OsString;
use std::path::PathBuf;
use system::thread;

/// Pretrains language models in pure Rust, GPU kernels included
///
/// Models: GPT-2, GPT-3, Llama 3, Qwen2.5, Qwen3 and nanochat's, from scratch or from Hugging Face weights.
///
/// `llm-rs train` without flags trains a small model. It needs no data and no GPU, and takes less than a minute.
#[derive(Debug, Parser)]
#[command(name = "llm-rs", version = version::short(), long_version = version::long())]
#[command(max_term_width = 110)]
pub struct Cli {
    #[command(subcommand)]
    command: Subcommands,

    /// Print only warnings and results
    #[arg(long, global = true)]
    quiet: bool,

    /// Whether the command prints or writes JSON.
    #[arg(skip)]
    json: bool,
}

#[derive(Debug, Subcommand)]
enum Subcommands {
    Train(Box<train::TrainOptions>),
    Sweep(sweep::Sweep),
    Eval(Box<eval::Eval>),
    Sample(sample::Sample),
    Chat(chat::Chat),
    Export(export::Export),
    Plan(Box<plan::Plan>),
    Plot(plot::Plot),
    Serve(serve::Serve),
    Log(log::Log),
    Data(data::Data),
    Tokenizer(tokenizer::Tokenizer),
    Doctor(doctor::Doctor),
    Inspect(inspect::Inspect),
    Verify(verify::Verify),
    Selftest(selftest::Selftest),
    Simulate(simulate::Simulate),
    #[command(subcommand)]
    Bench(bench::Bench),
    Completions(shell::Completions),
    Man(shell::Man),
}

/// llm.c's two-letter flags, which clap would read as a one-letter flag and its value.
const TWO_LETTER_FLAGS: [(&str, &str); 6] = [
    ("-ge", "--gelu-fusion"),
    ("-lg", "--gpu-info-every"),
    ("-nk", "--keep"),
    ("-nm", "--major-every"),
    ("-sg", "--skip-norm-z"),
    ("-sl", "--skip-loss-z"),
];

impl Cli {
    /// Parses the command line, and the file that `train --config` names.
    ///
    /// Invalid flags are a [`clap::Error`]; so are `--help` and `--version`.
    pub fn from_arguments(arguments: impl IntoIterator<Item = OsString>) -> Result<Self> {
        let mut arguments: Vec<OsString> = arguments.into_iter().map(long_flag).collect();
        let command = parser();
        reject_hellaswag_switch(&command, &arguments)?;
        // The file of --config resolves no conflict of the flags. Conflicts are reported before its flags are added.
        if let Err(error) = command.clone().try_get_matches_from(&arguments)
            && error.kind() == ErrorKind::ArgumentConflict
        {
            return Err(repeated_flag(command, error).into());
        }
        let partial = command.clone().ignore_errors(true).try_get_matches_from(&arguments).unwrap_or_default();
        let train = partial.subcommand().filter(|(name, _)| *name == "train");
        let path = |given: &ArgMatches| given.get_one::<PathBuf>("config").cloned();
        let Some((name, given, path)) = train.and_then(|(name, given)| Some((name, given, path(given)?))) else {
            return Ok(parse(command, &arguments)?);
        };
        let file = ConfigFile::read(&path)?;
        let subcommand = command.find_subcommand(name).context("train is a command")?;
        let flags = file.arguments(subcommand, given)?;
        let after = arguments.iter().position(|argument| argument == name).map_or(arguments.len(), |at| at + 1);
        arguments.splice(after..after, flags);
        parse(command, &arguments).map_err(|error| file.explain(error).unwrap_or_else(anyhow::Error::from))
    }

    /// Runs the command.
    pub fn run(&self) -> Result<()> {
        thread::check_variables().map_err(anyhow::Error::msg)?;
        terminal::configure(self.quiet, self.json);
        match &self.command {
            Subcommands::Train(args) => train::run(args),
            Subcommands::Sweep(args) => sweep::run(args),
            Subcommands::Eval(args) => eval::run(args),
            Subcommands::Sample(args) => sample::run(args),
            Subcommands::Chat(args) => chat::run(args),
            Subcommands::Export(args) => export::run(args),
            Subcommands::Plan(args) => plan::run(args),
            Subcommands::Plot(args) => plot::run(args),
            Subcommands::Serve(args) => serve::run(args),
            Subcommands::Log(args) => log::run(args),
            Subcommands::Data(args) => data::run(args),
            Subcommands::Tokenizer(args) => tokenizer::run(args),
            Subcommands::Doctor(args) => doctor::run(args),
            Subcommands::Inspect(args) => inspect::run(args),
            Subcommands::Verify(args) => verify::run(args),
            Subcommands::Selftest(args) => selftest::run(args),
            Subcommands::Simulate(args) => simulate::run(args),
            Subcommands::Bench(args) => bench::run(args),
            Subcommands::Completions(args) => shell::completions(args),
            Subcommands::Man(args) => shell::man(args),
        }
    }

    /// Returns the flags of `train`, or `None` for another command.
    pub fn into_train(self) -> Option<train::TrainOptions> {
        match self.command {
            Subcommands::Train(options) => Some(*options),
            _ => None,
        }
    }
}

/// Does the work of a process that another process of this program has started to help it. Returns `None` in any other process.
pub fn run_helper() -> Option<Result<()>> {
    renderer::is_requested().then(renderer::run)
}

/// Returns the parser: the derived one, with negative numbers accepted as values, and `train --help` in sections.
///
/// A negative number has to reach the parser of its flag: only that parser can say which values the flag takes.
pub fn parser() -> Command {
    let help = Arg::new("help").short('h').long("help").action(ArgAction::Help).help_heading(train::GENERAL);
    let help = help.help("Print help");
    // The built-in flag would form a section of its own before all others.
    let in_sections = |train: Command| train.disable_help_flag(true).arg(help.clone());
    let narrow = terminal::columns() < 80;
    // Beside the flags, there would be room for one word in a line.
    let command = Cli::command().next_line_help(narrow);
    // `mut_subcommand` would move the command to the end of the list.
    let of_train = |command: Command| if command.get_name() == "train" { in_sections(command) } else { command };
    accept_negative_numbers(command).mut_subcommands(of_train)
}

fn accept_negative_numbers(command: Command) -> Command {
    let accept = |arg: Arg| {
        let takes_value = arg.get_action().takes_values() && !arg.is_positional();
        if takes_value { arg.allow_negative_numbers(true) } else { arg }
    };
    command.mut_args(accept).mut_subcommands(accept_negative_numbers)
}

fn parse(command: Command, arguments: &[OsString]) -> Result<Cli, clap::Error> {
    let matches = command.try_get_matches_from(arguments)?;
    let mut cli = Cli { json: has_json(&matches), ..Cli::from_arg_matches(&matches)? };
    if let Subcommands::Train(options) = &mut cli.command {
        options.spelled_for_llm_c = is_spelled_for_llm_c(arguments);
    }
    Ok(cli)
}

/// Returns whether flags of `train` are spelled as for llm.c: some by their one-letter names, and none of the learning rate's by its
/// long name.
fn is_spelled_for_llm_c(arguments: &[OsString]) -> bool {
    const LONG: [&str; 3] = ["--lr", "--schedule", "--warmup"];
    let flags = || arguments.iter().filter_map(|argument| argument.to_str());
    let is_short =
        |flag: &str| flag.strip_prefix('-').is_some_and(|name| name.starts_with(|c: char| c.is_ascii_alphabetic()));
    let is_long = |flag: &str| {
        LONG.iter().any(|name| flag.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with('=')))
    };
    flags().any(is_short) && !flags().any(is_long)
}

/// Rewrites the error for a flag that was given twice. Returns any other conflict unchanged.
fn repeated_flag(mut command: Command, error: clap::Error) -> clap::Error {
    let argument = match (error.get(ContextKind::InvalidArg), error.get(ContextKind::PriorArg)) {
        (Some(ContextValue::String(argument)), Some(ContextValue::String(prior))) if argument == prior => argument,
        _ => return error,
    };
    let hint =
        if argument.ends_with("<GLOB>") { "quote one pattern that matches all files" } else { "keep one of them" };
    let message = format!("{argument}: expected this flag once, found it several times; {hint}");
    command.error(ErrorKind::ArgumentConflict, message)
}

/// Returns whether the command line has the flag `--json` of a command.
fn has_json(matches: &ArgMatches) -> bool {
    let given = || matches.value_source("json") == Some(ValueSource::CommandLine);
    matches.try_contains_id("json").is_ok_and(|_| given())
        || matches.subcommand().is_some_and(|(_, matches)| has_json(matches))
}

fn long_flag(argument: OsString) -> OsString {
    TWO_LETTER_FLAGS.iter().find(|(short, _)| argument == *short).map_or(argument, |(_, long)| OsString::from(long))
}

/// Rejects llm.c's `-h 0` and `-h 1`, which would print the help text instead of training.
fn reject_hellaswag_switch(command: &Command, arguments: &[OsString]) -> Result<(), clap::Error> {
    let pairs = arguments.iter().zip(arguments.iter().skip(1).map(Some).chain([None]));
    for (flag, value) in pairs {
        let digit = value.filter(|value| *value == "0" || *value == "1");
        let given = match digit {
            Some(digit) if flag == "-h" => format!("-h {}", digit.display()),
            _ if flag == "-h0" || flag == "-h1" => flag.display().to_string(),
            _ => continue,
        };
        let message = format!(
            "{given}: expected no value, since -h prints help; use --hellaswag FILE to score HellaSwag as llm.c's -h 1 does"
        );
        return Err(command.clone().error(ErrorKind::UnknownArgument, message));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_definition_is_consistent() {
        parser().debug_assert();
    }

    /// Returns the error for a command line.
    fn error(line: &str) -> clap::Error {
        let arguments = line.split(' ').map(OsString::from);
        Cli::from_arguments(arguments).unwrap_err().downcast().unwrap()
    }

    #[test]
    fn the_hellaswag_switch_of_llm_c_is_rejected() {
        for line in ["llm-rs train -h 1", "llm-rs train -h 0", "llm-rs train -x 3 -h1", "llm-rs train -h0"] {
            let error = error(line);
            assert!(error.exit_code() == 2 && error.to_string().contains("--hellaswag FILE"), "{line}: {error}");
        }
        assert_eq!(error("llm-rs train -h").kind(), ErrorKind::DisplayHelp);
    }

    #[test]
    fn the_spelling_of_flags_chooses_between_defaults() {
        for (line, expected) in [
            ("train -i a.bin -x 10", true),
            ("train -l 1e-3 -k linear -u 5", true),
            ("train -l1e-3", true),
            ("train --lr 1e-3", false),
            ("train --lr=1e-3 -b 4 -o run", false),
            ("train --train a.bin --steps 10 --val-batches -1", false),
            ("train --train a.bin --gelu-fusion 1", false),
        ] {
            let arguments: Vec<OsString> = line.split(' ').map(OsString::from).collect();
            assert_eq!(is_spelled_for_llm_c(&arguments), expected, "{line}");
        }
    }

    /// `mut_subcommand` moved `train` to the end.
    #[test]
    fn the_list_of_commands_begins_with_train() {
        let help = parser().render_long_help().to_string();
        let commands = help.split_once("Commands:\n").unwrap().1;
        assert!(commands.trim_start().starts_with("train"), "{help}");
        for family in ["GPT-2", "GPT-3", "Llama 3", "Qwen2.5", "Qwen3", "nanochat"] {
            assert!(help.contains(family), "{family}: {help}");
        }
    }

    #[test]
    fn the_sections_of_train_are_in_the_order_of_the_work() {
        let mut command = parser();
        let help = command.find_subcommand_mut("train").unwrap().render_help().to_string();
        let at = |text: &str| help.find(text).unwrap_or_else(|| panic!("{text}: {help}"));
        let order = [
            "\nData:",
            "--train ",
            "--shuffle ",
            "\nModel:",
            "--model ",
            "\nBatch:",
            "\nOptimizer:",
            "--optimizer ",
            "--lr ",
            "\nDevice and precision:",
            "--device ",
            "--precision ",
            "--fp8-recipe ",
            "\nMemory:",
            "\nEvaluation and reports:",
            "--val-every ",
            "\nOutput and checkpoints:",
            "--out ",
            "--checkpoint-every ",
            "--resume",
            "\nGeneral:",
            "--config ",
            "--dry-run",
            "--help",
            "\nDistributed training:",
            "\nDetection of faulty hardware:",
        ];
        for pair in order.windows(2) {
            assert!(at(pair[0]) < at(pair[1]), "{pair:?}: {help}");
        }
    }

    #[test]
    fn every_command_can_be_quiet() {
        fn check(command: &Command) {
            let has_quiet = command.get_arguments().any(|arg| arg.get_long() == Some("quiet"));
            assert!(has_quiet, "{}", command.get_name());
            command.get_subcommands().filter(|command| command.get_name() != "help").for_each(check);
        }
        let mut command = parser();
        command.build();
        check(&command);
        let cli = |line: &str| Cli::from_arguments(line.split(' ').map(OsString::from)).unwrap();
        for line in
            ["llm-rs doctor --quiet", "llm-rs --quiet doctor", "llm-rs train --quiet", "llm-rs bench step --quiet"]
        {
            assert!(cli(line).quiet, "{line}");
        }
        assert!(cli("llm-rs train --quiet").into_train().unwrap().quiet && !cli("llm-rs train").quiet);
    }

    #[test]
    fn json_is_recognized_in_every_command() {
        let json = |line: &str| Cli::from_arguments(line.split(' ').map(OsString::from)).unwrap().json;
        assert!(json("llm-rs train --json") && json("llm-rs eval -e a -j b --json"));
        assert!(json("llm-rs bench step --json out.json") && json("llm-rs data check a.bin --json"));
        assert!(!json("llm-rs train") && !json("llm-rs eval -e a -j b") && !json("llm-rs bench step"));
    }

    #[test]
    fn every_flag_has_a_help_text() {
        fn check(command: &Command) {
            assert!(command.get_about().is_some(), "{} has no description", command.get_name());
            for arg in command.get_arguments() {
                assert!(arg.get_help().is_some(), "{}: {} has no help text", command.get_name(), arg.get_id());
            }
            command.get_subcommands().for_each(check);
        }
        check(&parser());
    }
}
