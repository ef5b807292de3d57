//! `data`: converts text and named data sets to token files, and shows and checks them.

mod chat;
mod check;
mod climbmix;
mod core;
mod download;
mod evaluation;
mod fineweb;
mod hellaswag;
pub mod input;
mod mmlu;
pub mod output;
mod show;
mod small_world;
mod suggestion;
mod text;
mod tinyshakespeare;
mod tinystories;

use anyhow::{Result, anyhow};
use std::thread::available_parallelism;
use system::thread;

/// Convert text and named data sets to token files (.bin), and show and check them
#[derive(Debug, clap::Args)]
pub struct Data {
    #[command(subcommand)]
    source: Source,
}

#[derive(Debug, clap::Subcommand)]
enum Source {
    Text(text::Text),
    Chat(chat::Chat),
    SmallWorld(small_world::SmallWorld),
    Tinyshakespeare(tinyshakespeare::Tinyshakespeare),
    Tinystories(tinystories::Tinystories),
    Fineweb(fineweb::Fineweb),
    Climbmix(climbmix::Climbmix),
    Hellaswag(hellaswag::Hellaswag),
    Mmlu(mmlu::Mmlu),
    Core(core::Core),
    Check(check::Check),
    Show(show::Show),
}

/// Checks that the threads that read and tokenize documents can be started.
pub fn check_threads() -> Result<()> {
    // One thread reads, one writes, and rayon's threads tokenize.
    let wanted =
        std::env::var("RAYON_NUM_THREADS").ok().and_then(|number| number.parse().ok()).filter(|&number| number > 0);
    let workers = wanted.unwrap_or_else(|| available_parallelism().map_or(1, usize::from));
    thread::check(2 + workers).map_err(|error| anyhow!("{error}, or set RAYON_NUM_THREADS to a smaller number"))
}

/// Converts, shows or checks data.
pub fn run(args: &Data) -> Result<()> {
    check_threads()?;
    match &args.source {
        Source::Text(args) => text::run(args),
        Source::Chat(args) => chat::run(args),
        Source::SmallWorld(args) => small_world::run(args),
        Source::Tinyshakespeare(args) => tinyshakespeare::run(args),
        Source::Tinystories(args) => tinystories::run(args),
        Source::Fineweb(args) => fineweb::run(args),
        Source::Climbmix(args) => climbmix::run(args),
        Source::Hellaswag(args) => hellaswag::run(args),
        Source::Mmlu(args) => mmlu::run(args),
        Source::Core(args) => core::run(args),
        Source::Check(args) => check::run(args),
        Source::Show(args) => show::run(args),
    }
}
