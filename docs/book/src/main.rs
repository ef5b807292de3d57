//! Writes the listings of the chapters and builds the book. `cargo run --release -p book` writes it to `target/book`.

use clap::Parser;
use std::path::PathBuf;
use std::process::ExitCode;

/// Update the listings in the chapters and build the book
#[derive(Debug, Parser)]
#[command(name = "book", version)]
struct Cli {
    /// Directory to write the HTML files to
    #[arg(long, value_name = "DIR", default_value = "target/book")]
    out: PathBuf,
    /// Address before the paths of linked source files, such as https://github.com/me/llm.rs/blob/main [default: the files of this
    /// checkout]
    #[arg(long, value_name = "URL")]
    repository: Option<String>,
}

fn main() -> ExitCode {
    let Cli { out, repository } = Cli::parse();
    match book::update_listings().and_then(|updated| {
        for place in updated {
            println!("updated {place}");
        }
        book::build(&out, repository.as_deref())
    }) {
        Ok(()) => {
            println!("{}", out.join("index.html").display());
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
