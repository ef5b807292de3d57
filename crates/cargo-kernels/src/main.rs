//! `cargo kernels`: creates, builds, tests and inspects crates with GPU kernels.

mod doctor;
mod new;
mod project;
mod setup;

use anyhow::Result;
use clap::{Parser, Subcommand};
use std::ffi::OsString;
use std::process::ExitCode;

/// Create, build, test and inspect crates with GPU kernels in Rust
#[derive(Parser)]
#[command(name = "cargo kernels", bin_name = "cargo kernels", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Create a crate with a kernel, tests in the emulator, and a launch on a GPU
    New(new::New),
    /// Show which tools are installed, and how to install the missing ones
    Doctor,
    /// Install the device toolchain, ptxas, cuobjdump and nvdisasm
    Setup,
    /// Build the crate and its kernels, and list the kernels' resources
    Build(Passed),
    /// Run the crate's tests, which run kernels in the emulator
    Test(Passed),
    /// Show the resources, the PTX or the machine code of the crate's kernels
    Inspect(kernel_inspect::Inspect),
    /// Run the crate's benchmark `kernels` on a GPU
    Bench(Bench),
}

/// Arguments for cargo.
#[derive(clap::Args)]
struct Passed {
    /// Arguments for cargo, such as --release or a test's name
    #[arg(value_name = "ARGUMENTS", trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<OsString>,
}

#[derive(clap::Args)]
struct Bench {
    /// Run only kernels whose name contains this text
    #[arg(value_name = "NAME")]
    kernel: Option<OsString>,
}

fn main() -> ExitCode {
    match run(&Cli::parse_from(arguments(std::env::args_os())).command) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Returns the arguments for clap. Cargo passes the name of the subcommand as the first one. A `--` directly after `test` is for cargo,
/// but clap would remove it, so it is doubled.
fn arguments(given: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let kernels = given.enumerate().filter(|(i, argument)| *i != 1 || argument != "kernels");
    let mut arguments: Vec<OsString> = kernels.map(|(_, argument)| argument).collect();
    if arguments.get(1).is_some_and(|command| command == "test") && arguments.get(2).is_some_and(|next| next == "--") {
        arguments.insert(2, "--".into());
    }
    arguments
}

fn run(command: &Command) -> Result<ExitCode> {
    match command {
        Command::New(options) => new::run(options)?,
        Command::Doctor => return doctor::run(),
        Command::Setup => setup::run()?,
        Command::Build(passed) => {
            let code = project::cargo("build", &passed.arguments)?;
            if code != ExitCode::SUCCESS {
                return Ok(code);
            }
            project::inspect(&kernel_inspect::Inspect::default())?;
        }
        Command::Test(passed) => return project::cargo("test", &passed.arguments),
        Command::Inspect(options) => project::inspect(options)?,
        Command::Bench(options) => {
            // Names the reason at once, instead of after a build.
            cuda_driver::device_count()?;
            let mut arguments: Vec<OsString> = ["--bench", "kernels", "--"].map(Into::into).into();
            arguments.extend(options.kernel.clone());
            return project::cargo("bench", &arguments);
        }
    }
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_get_the_arguments_after_two_dashes() {
        let passed = |line: &str| {
            let cli = Cli::parse_from(arguments(line.split(' ').map(OsString::from)));
            let Command::Test(passed) = cli.command else { panic!("expected test") };
            passed.arguments
        };
        assert_eq!(passed("cargo-kernels kernels test -- --nocapture"), ["--", "--nocapture"]);
        assert_eq!(passed("cargo-kernels kernels test --release -- --nocapture"), ["--release", "--", "--nocapture"]);
        assert_eq!(passed("cargo-kernels test saxpy"), ["saxpy"]);
    }
}
