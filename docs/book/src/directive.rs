//! Directives: lines of a chapter that stand for code, diffs, tables, PTX and reports.

use crate::{diff, examples, item, links, profile};
use anyhow::{Context, Result, bail, ensure};
use std::fmt::Write;
use std::fs;
use std::path::PathBuf;

/// The sources that directives show.
pub struct Sources {
    root: PathBuf,
    /// The address before the path of a linked source file.
    base: String,
}

impl Sources {
    /// Returns the sources below `root`, which links reach through `base`.
    pub fn new(root: PathBuf, base: String) -> Self {
        Self { root, base }
    }

    /// Replaces the directives of a chapter. Lines in code blocks stay as they are.
    pub fn expand(&self, text: &str) -> Result<String> {
        let mut out = String::with_capacity(2 * text.len());
        let mut fence = None;
        for (number, line) in (1..).zip(text.lines()) {
            let start = line.trim_start();
            let marker = ["```", "~~~"].into_iter().find(|marker| start.starts_with(marker));
            match (fence, marker) {
                (None, Some(_)) => fence = marker,
                (Some(open), Some(close)) if open == close => fence = None,
                _ => {}
            }
            let directive = line.strip_prefix("{{#").and_then(|rest| rest.trim_end().strip_suffix("}}"));
            match directive.filter(|_| fence.is_none()) {
                Some(directive) => {
                    out += &self.one(directive).with_context(|| format!("line {number}: {{{{#{directive}}}}}"))?;
                }
                None => out += line,
            }
            out.push('\n');
        }
        ensure!(fence.is_none(), "expected the end of every code block, found the end of the file");
        Ok(out)
    }

    fn one(&self, directive: &str) -> Result<String> {
        let words: Vec<_> = directive.split_whitespace().collect();
        match words[..] {
            ["code", path] => {
                let text = self.read(path)?;
                let language = match path.rsplit_once('.').map(|(_, extension)| extension) {
                    Some("rs") => "rust",
                    Some("py") => "python",
                    Some("toml") => "toml",
                    _ => "text",
                };
                self.block(path, 1, &text, language)
            }
            ["code", path, name] => {
                let item = item::find(&self.read(path)?, name).with_context(|| path.to_owned())?;
                self.block(path, item.line, &item.text, "rust")
            }
            ["diff", old_path, old_name, path, name] => {
                let old = item::find(&self.read(old_path)?, old_name).with_context(|| old_path.to_owned())?;
                let new = item::find(&self.read(path)?, name).with_context(|| path.to_owned())?;
                self.block(path, new.line, &diff::lines(&old.text, &new.text), "diff")
            }
            ["kernels", family] => examples::table(&self.root, family, None),
            ["kernels", family, first, last] => examples::table(&self.root, family, Some([first, last])),
            ["profile", ref entries @ ..] if !entries.is_empty() => profile::table(&self.root, entries),
            ["report", kernel] => Ok(fenced(&examples::report(kernel)?, "text")),
            ["ptx", kernel] => Ok(fenced(&examples::ptx(kernel)?, "text")),
            ["sass", kernel] => Ok(fenced(&examples::sass(&self.root, kernel)?, "text")),
            _ => bail!(
                "expected code PATH [ITEM], diff PATH ITEM PATH ITEM, kernels FAMILY [FIRST LAST], profile ENTRY..., report KERNEL, \
                 ptx KERNEL or sass KERNEL, found another directive"
            ),
        }
    }

    /// Returns the address of a file of the repository, which must exist.
    pub fn address(&self, path: &str) -> Result<String> {
        let (file, anchor) = path.split_once('#').unwrap_or((path, ""));
        let file = self.root.join(file);
        ensure!(file.exists(), "repo:{path}: expected a path from the root of the repository, found no such file");
        links::check_anchor(&file, anchor).with_context(|| format!("repo:{path}"))?;
        Ok(format!("{}/{path}", self.base))
    }

    fn read(&self, path: &str) -> Result<String> {
        fs::read_to_string(self.root.join(path))
            .with_context(|| format!("{path}: expected a text file of the repository, relative to its root"))
    }

    /// Returns a code block under a link to its source.
    fn block(&self, path: &str, line: usize, text: &str, language: &str) -> Result<String> {
        let mut out = String::new();
        writeln!(out, "<p class=\"source\"><a href=\"{}\">{path}</a>, line {line}</p>\n", self.address(path)?)?;
        Ok(out + &fenced(text, language))
    }
}

/// Returns a code block whose fence does not occur in the text.
fn fenced(text: &str, language: &str) -> String {
    format!("`````{language}\n{}\n`````\n", text.trim_end())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sources() -> Sources {
        Sources::new(crate::build::repository_root().unwrap(), "base".into())
    }

    #[test]
    fn directives_in_code_blocks_stay() {
        let text = "```\n{{#code nothing}}\n```\n";
        assert_eq!(sources().expand(text).unwrap(), text);
    }

    #[test]
    fn wrong_directives_are_errors_with_a_line() {
        for (directive, expected) in [
            ("{{#code gpu/src/nothing.rs}}", "gpu/src/nothing.rs: expected a text file"),
            ("{{#code gpu/src/activation/gelu.rs nothing}}", "expected an item nothing"),
            ("{{#kernels nothing}}", "expected a family"),
            ("{{#report gelu_naive}}", "expected a kernel with a planted fault"),
            ("{{#profile gelu_fast}}", "expected entry point gelu_fast"),
            ("{{#profile}}", "found another directive"),
            ("{{#codes}}", "found another directive"),
        ] {
            let error = format!("{:#}", sources().expand(&format!("text\n{directive}\n")).unwrap_err());
            assert!(error.starts_with("line 2: ") && error.contains(expected), "{error}");
        }
    }
}
