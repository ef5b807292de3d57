//! Listings: parts of a chapter between two comments, which the program writes from code, measurements and reports.
//!
//! The first comment says what the listing shows, such as `<!-- code PATH ITEM -->`. The second one, such as `<!-- /code -->`, ends it.

use crate::{item, kernel, links, measured};
use anyhow::{Context, Result, bail, ensure};
use similar::TextDiff;
use std::fs;
use std::path::Path;

/// Unchanged lines around a change of a diff.
const CONTEXT: usize = 3;
/// Characters of a line of a report.
const MAX_WIDTH: usize = 120;

/// Writes the listings of all chapters again from their sources. Returns the place and the first comment of each that has changed.
///
/// # Errors
/// A comment or its source is wrong, or a file cannot be read or written.
pub fn update_listings() -> Result<Vec<String>> {
    for_each_chapter(|path, text| fs::write(path, text).with_context(|| format!("cannot write {}", path.display())))
}

/// Compares the listings of all chapters with their sources.
///
/// # Errors
/// A listing differs from its source, or a comment or its source is wrong.
pub fn check_listings() -> Result<()> {
    let changed = for_each_chapter(|_, _| Ok(()))?.join("\n");
    ensure!(
        changed.is_empty(),
        "these listings differ from their sources:\n{changed}\nTo update them, run `cargo run --release -p book`."
    );
    Ok(())
}

fn for_each_chapter(f: impl Fn(&Path, &str) -> Result<()>) -> Result<Vec<String>> {
    let root = crate::repository_root()?;
    let mut changed = Vec::new();
    for path in links::files(&root.join("docs/book/chapters/*.md"))? {
        let name = path.strip_prefix(&root)?.display().to_string();
        let (text, lines) = update(&root, &name, &links::read(&path)?)?;
        if !lines.is_empty() {
            f(&path, &text)?;
        }
        changed.extend(lines);
    }
    Ok(changed)
}

/// Returns the chapter `name` with new listings, and the place and the first comment of each that has changed.
fn update(root: &Path, name: &str, text: &str) -> Result<(String, Vec<String>)> {
    let (mut out, mut changed) = (String::with_capacity(text.len()), Vec::new());
    let mut lines = (1..).zip(text.split_inclusive('\n'));
    while let Some((number, line)) = lines.next() {
        out += line;
        let Some(comment) = line.strip_prefix("<!-- ").and_then(|line| line.trim_end().strip_suffix(" -->")) else {
            continue;
        };
        let place = format!("{name}:{number}: {comment}");
        let words: Vec<_> = comment.split_whitespace().collect();
        let new = listing(root, &words).with_context(|| place.clone())?;
        let end = format!("<!-- /{} -->", words[0]);
        let mut old = String::new();
        loop {
            let (_, line) = lines.next().with_context(|| format!("{place}: expected {end} after it, found none"))?;
            if line.trim_end() == end {
                break;
            }
            old += line;
        }
        if new != old {
            changed.push(place);
        }
        out += &(new + &end + "\n");
    }
    Ok((out, changed))
}

fn listing(root: &Path, words: &[&str]) -> Result<String> {
    let read = |path: &str| links::read(&root.join(path));
    let find = |path: &str, name: &str| item::find(&read(path)?, name).with_context(|| path.to_owned());
    let text = match *words {
        ["code", path] => {
            let language = if Path::new(path).extension() == Some("py".as_ref()) { "python" } else { "text" };
            linked(path, language, &read(path)?)
        }
        ["code", path, name] => linked(path, "rust", &find(path, name)?),
        ["diff", old_path, old_name, path, name] => {
            linked(path, "diff", &diff(&find(old_path, old_name)?, &find(path, name)?))
        }
        ["kernels", family, ref range @ ..] => measured::times(root, family, range)?,
        ["profile", ref entries @ ..] => measured::profiles(root, entries)?,
        ["report", name] => fenced("text", &wrapped(&kernel::report(name)?)),
        ["ptx", name] => fenced("text", &kernel::ptx(name)?),
        ["sass", name] => fenced("text", &kernel::sass(root, name)?),
        _ => bail!(
            "expected code PATH [ITEM], diff PATH ITEM PATH ITEM, kernels FAMILY [FIRST LAST], profile ENTRY..., report KERNEL, \
             ptx KERNEL or sass KERNEL, found another comment"
        ),
    };
    Ok(text)
}

/// Returns a code block below a link to its source.
fn linked(path: &str, language: &str, text: &str) -> String {
    format!("[{path}](../../../{path})\n\n{}", fenced(language, text))
}

fn fenced(language: &str, text: &str) -> String {
    format!("```{language}\n{}\n```\n", text.trim_end())
}

/// Breaks lines at spaces, because GitHub does not wrap code blocks.
fn wrapped(text: &str) -> String {
    let mut out = String::new();
    let mut width = 0;
    for word in text.split(' ') {
        width += word.len() + 1;
        if width > MAX_WIDTH {
            out.push('\n');
            width = word.len() + 1;
        } else if !out.is_empty() {
            out.push(' ');
        }
        out += word;
    }
    out
}

/// Returns a unified diff without file names and line numbers. A line of three dots separates groups of changes.
fn diff(old: &str, new: &str) -> String {
    let diff = TextDiff::from_lines(old, new);
    let groups = diff.grouped_ops(CONTEXT).into_iter().map(|group| {
        let changes = group.iter().flat_map(|op| diff.iter_changes(op));
        changes.map(|change| format!("{}{change}", change.tag())).collect::<Vec<_>>().concat()
    });
    groups.collect::<Vec<_>>().join(" ...\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn updated(text: &str) -> Result<(String, Vec<String>)> {
        update(&crate::repository_root().unwrap(), "a.md", text)
    }

    #[test]
    fn listings_that_differ_from_their_sources_are_named_and_replaced() {
        let comment = "code docs/book/src/listing.rs CONTEXT";
        let (text, changed) = updated(&format!("a\n<!-- {comment} -->\nold\n<!-- /code -->\nb\n")).unwrap();
        assert_eq!(changed, [format!("a.md:2: {comment}")]);
        let listing = "[docs/book/src/listing.rs](../../../docs/book/src/listing.rs)\n\n```rust\n\
                       /// Unchanged lines around a change of a diff.\nconst CONTEXT: usize = 3;\n```\n";
        assert_eq!(text, format!("a\n<!-- {comment} -->\n{listing}<!-- /code -->\nb\n"));
        assert_eq!(updated(&text).unwrap(), (text, Vec::new()));
    }

    #[test]
    fn wrong_comments_are_errors_with_a_line() {
        for (comment, expected) in [
            ("code gpu/src/nothing.rs", "cannot read"),
            ("code gpu/src/activation/gelu.rs nothing", "expected an item nothing"),
            ("code gpu/src/activation/gelu.rs gelu", "expected <!-- /code --> after it"),
            ("kernels nothing", "expected a family"),
            ("report gelu_naive", "expected a kernel with a planted fault"),
            ("profile gelu_fast", "expected entry point gelu_fast"),
            ("codes", "found another comment"),
        ] {
            let error = format!("{:#}", updated(&format!("text\n<!-- {comment} -->\n")).unwrap_err());
            assert!(error.starts_with("a.md:2: ") && error.contains(expected), "{error}");
        }
    }
}
