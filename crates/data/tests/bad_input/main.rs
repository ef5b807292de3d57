//! Kinds of bad input of every reader of data files. Each gives an error that names the file and what is wrong, keeps an existing
//! data set as it was, leaves no temporary file, and prints nothing to standard error.

mod core_tasks;
mod csv;
mod evaluation;
mod files;
mod jsonl;
mod kinds;
mod named;
mod parquet;
mod tokenizers;
mod tokens;

use kinds::Kinds;
use std::env;
use std::process::Command;

/// Fewer kinds are an error of the test.
const MIN_KINDS: usize = 60;

#[test]
fn every_kind_gives_a_clear_error_and_loses_nothing() {
    let mut total = 0;
    for (group, run) in [
        ("text files and paths", files::run as fn(&mut Kinds)),
        ("JSON lines", jsonl::run),
        ("CSV", csv::run),
        ("parquet", parquet::run),
        ("token files", tokens::run),
        ("tokenizers", tokenizers::run),
        ("HellaSwag and MMLU", evaluation::run),
        ("CORE", core_tasks::run),
        ("TinyStories and FineWeb", named::run),
    ] {
        let mut kinds = Kinds::new();
        run(&mut kinds);
        let count = kinds.finish();
        println!("{group}: {count} kinds");
        total += count;
    }
    println!("{total} kinds");
    assert!(total >= MIN_KINDS, "{total}");
}

/// Runs the test above in a process of its own. The readers of parquet catch panics of the parquet crate.
#[test]
fn nothing_reaches_standard_error() {
    let test = "every_kind_gives_a_clear_error_and_loses_nothing";
    let output = Command::new(env::current_exe().unwrap()).args([test, "--exact", "--nocapture"]).output().unwrap();
    let printed = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{printed}{}", String::from_utf8_lossy(&output.stderr));
    assert!(printed.contains("1 passed") && printed.contains("parquet: "), "{printed}");
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
}

/// Catches a panic of the parquet crate, then panics within the reader of parquet, in the code that receives its documents.
#[test]
#[ignore = "panics; real_panics_are_printed runs it"]
fn panics_after_a_caught_panic() {
    parquet::catch_a_panic();
    parquet::panic_while_reading("a real panic");
}

#[test]
fn real_panics_are_printed() {
    let test = "panics_after_a_caught_panic";
    let args = [test, "--exact", "--ignored", "--nocapture"];
    let output = Command::new(env::current_exe().unwrap()).args(args).env("RUST_BACKTRACE", "0").output().unwrap();
    let printed = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    assert!(printed.contains("a real panic"), "{printed}");
    assert_eq!(printed.matches("panicked at").count(), 1, "{printed}");
}
