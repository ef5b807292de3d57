//! Builds the book. `cargo run --release -p book` writes it to `target/book`.

use anyhow::Result;
use clap::Parser;
use std::path::PathBuf;

/// Build the book
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

fn main() -> Result<()> {
    let Cli { out, repository } = Cli::parse();
    book::build(&out, repository.as_deref())?;
    println!("{}", out.join("index.html").display());
    Ok(())
}
