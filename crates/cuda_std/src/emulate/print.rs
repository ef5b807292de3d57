//! Text output of kernels.

use super::block::with;
use std::cell::RefCell;

thread_local! {
    /// The lines of checked launches on this OS thread, if they are collected.
    static COLLECTED: RefCell<Option<Vec<String>>> = const { RefCell::new(None) };
}

/// Prints a line: `text` with `values` in place of `{}`.
pub fn print(text: &str, values: &[String]) {
    // A kernel prints only where there is one.
    with(|_| ());
    let (mut line, mut values) = (String::new(), values.iter());
    let mut rest = text;
    while let Some(at) = rest.find(['{', '}']) {
        line += &rest[..at];
        match &rest[at..at + 2] {
            "{}" => line += values.next().map_or("", String::as_str),
            doubled => line += &doubled[..1],
        }
        rest = &rest[at + 2..];
    }
    line += rest;
    COLLECTED.with_borrow_mut(|collected| match collected {
        Some(lines) => lines.push(line),
        None => println!("{line}"),
    });
}

/// Returns the lines that checked launches print while `run` runs, instead of printing them.
pub fn printed_by<R>(run: impl FnOnce() -> R) -> (R, Vec<String>) {
    let before = COLLECTED.replace(Some(Vec::new()));
    let result = run();
    (result, COLLECTED.replace(before).unwrap_or_default())
}
