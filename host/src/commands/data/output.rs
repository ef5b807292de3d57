//! Summary and next command of the commands that write shards.

use super::suggestion::{self, Amounts, Machine};
use crate::hints::Invocation;
use crate::terminal::{self, counted};
use crate::version;
use anyhow::Result;
use data::dataset::{ShardNames, Split};
use data::text::Summary;
use std::io::{Write, stdout};
use std::path::{Path, PathBuf};

/// Returns the name and the version of this program, for the description of a data set.
pub fn program() -> String {
    format!("llm-rs {}", version::short())
}

/// Prints the amounts of data and everything that was left out or changed.
pub fn print_summary(directory: &Path, names: ShardNames, written: &Summary) -> Result<()> {
    print_input(names, written)?;
    print_splits(directory, names, [&written.train, &written.val])
}

/// Prints the tokens and the files of the training and the validation split.
pub fn print_splits(directory: &Path, names: ShardNames, splits: [&Split; 2]) -> Result<()> {
    for (name, part) in ["train", "val"].into_iter().zip(splits) {
        if part.shards > 0 {
            let (shards, files) = (counted(part.shards, "shard"), directory.join(names.pattern(name)));
            writeln!(stdout(), "wrote {} tokens for {name}, {shards}: {}", part.tokens, files.display())?;
        }
    }
    Ok(())
}

/// Prints the amount of text and everything that was left out or changed.
pub fn print_input(names: ShardNames, written: &Summary) -> Result<()> {
    let mut out = stdout();
    let input = &written.input;
    let [documents, files] = [(input.documents, "document"), (input.files, "file")].map(|(n, noun)| counted(n, noun));
    writeln!(out, "read {documents}, {} bytes, from {files}", input.bytes)?;
    if written.skipped.total() > 0 {
        writeln!(out, "{}", written.skipped)?;
    }
    if input.empty_documents > 0 {
        // Documents of named data sets are never left out.
        let skipped = if names == ShardNames::TEXT { "skipped " } else { "" };
        writeln!(out, "{skipped}empty documents: {}", input.empty_documents)?;
    }
    if input.invalid_utf8 > 0 {
        let name = |(path, count): &(PathBuf, usize)| format!("{} ({count})", path.display());
        let files: Vec<String> = written.invalid_utf8.iter().take(3).map(name).collect();
        let more = if written.invalid_utf8.len() > files.len() { ", …" } else { "" };
        writeln!(
            out,
            "warning: expected UTF-8, found {} in {}: {}{more}; each became U+FFFD",
            counted(input.invalid_utf8, "invalid sequence"),
            counted(written.invalid_utf8.len(), "file"),
            files.join(", ")
        )?;
    }
    if written.forced_cuts > 0 {
        writeln!(
            out,
            "warning: long documents were split at {} where the tokens may differ from those of the whole document",
            counted(written.forced_cuts, "place")
        )?;
    }
    Ok(())
}

/// Suggests to train on the data set, with settings that fit this machine. With the tokenizer of a model, suggests to fine-tune it.
pub fn print_next(directory: &Path, names: ShardNames, amounts: &Amounts) -> Result<()> {
    if terminal::is_quiet() {
        return Ok(());
    }
    let Some(settings) = suggestion::settings(Machine::current(), amounts) else { return Ok(()) };
    let data = |name: &str| [format!("--{name}"), directory.join(names.pattern(name)).to_string_lossy().into_owned()];
    let val = if amounts.has_validation() { data("val").to_vec() } else { Vec::new() };
    let next = [vec!["train".to_owned()], data("train").to_vec(), val, settings].concat();
    writeln!(stdout(), "\nnext: {}", Invocation::current().command(next.iter().map(String::as_str)))?;
    Ok(())
}
