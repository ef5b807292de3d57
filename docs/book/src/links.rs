//! Checks of links: in the HTML of the book, in the Markdown files of the repository, and of chapters and figures that nothing names.

use anyhow::{Context, Result, bail, ensure};
use pulldown_cmark::{Event, Options, Parser, Tag, TagEnd};
use scraper::{Html, Selector};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Component, Path, PathBuf};

/// Requires that `SUMMARY.md` names each chapter, and that a chapter shows each figure.
pub fn check_listed(chapters: &Path) -> Result<()> {
    let mut text = String::new();
    for path in files(&chapters.join("*.md"))? {
        text += &read(&path)?;
    }
    let summary = read(&chapters.join("SUMMARY.md"))?;
    let check = |path: PathBuf, text: &str| {
        let name = path.strip_prefix(chapters).unwrap_or(&path).to_string_lossy().into_owned();
        ensure!(text.contains(&format!("({name})")), "{}: expected a link to it, found none", path.display());
        Ok(())
    };
    for path in files(&chapters.join("*.md"))?.into_iter().filter(|path| !path.ends_with("SUMMARY.md")) {
        check(path, &summary)?;
    }
    for path in files(&chapters.join("figures/*"))? {
        check(path, &text)?;
    }
    Ok(())
}

/// Checks the links and images of the HTML files in `out`, which must not leave it.
pub fn check_html(out: &Path) -> Result<()> {
    let selector = |text: &str| Selector::parse(text).map_err(|error| anyhow::anyhow!("{text}: {error}"));
    let (targets, identified) = (selector("a[href], img[src]")?, selector("[id]")?);
    let mut identifiers = BTreeMap::new();
    let mut links = Vec::new();
    for path in files(&out.join("*.html"))? {
        let html = Html::parse_document(&read(&path)?);
        let ids: BTreeSet<_> =
            html.select(&identified).filter_map(|element| element.attr("id")).map(str::to_owned).collect();
        for element in html.select(&targets) {
            links.extend(element.attr("href").or(element.attr("src")).map(|link| (path.clone(), link.to_owned())));
        }
        identifiers.insert(path, ids);
    }
    let mut dead = BTreeSet::new();
    for (path, link) in links {
        let is_alive = resolve(&path, &link).is_none_or(|(file, anchor)| {
            let has_anchor = |ids: &BTreeSet<String>| anchor.is_empty() || ids.contains(&anchor);
            file.starts_with(out) && file.exists() && identifiers.get(&file).is_none_or(has_anchor)
        });
        if !is_alive {
            dead.insert(format!("{}: {link}", path.file_name().unwrap_or_default().display()));
        }
    }
    report(&dead)
}

/// Checks the links of all Markdown files of the repository, except in hidden directories and in `target`.
///
/// # Errors
/// A link leads to no file of the repository, or to no heading of a Markdown file.
pub fn check_markdown(root: &Path) -> Result<()> {
    let mut outlines = BTreeMap::new();
    for path in markdown_files(root)? {
        let outline = outline(&read(&path)?);
        outlines.insert(path, outline);
    }
    let mut dead = BTreeSet::new();
    for (path, (_, links)) in &outlines {
        for link in links {
            let Some((file, anchor)) = resolve(path, link) else { continue };
            let has_anchor = anchor.is_empty() || outlines.get(&file).is_none_or(|(ids, _)| ids.contains(&anchor));
            if !file.starts_with(root) || !file.exists() || !has_anchor {
                dead.insert(format!("{}: {link}", path.strip_prefix(root).unwrap_or(path).display()));
            }
        }
    }
    report(&dead)
}

fn markdown_files(directory: &Path) -> Result<Vec<PathBuf>> {
    let mut out = Vec::new();
    for entry in fs::read_dir(directory).with_context(|| format!("cannot read {}", directory.display()))? {
        let entry = entry?;
        let (path, name) = (entry.path(), entry.file_name());
        if entry.file_type()?.is_dir() {
            if !name.as_encoded_bytes().starts_with(b".") && name != "target" {
                out.extend(markdown_files(&path)?);
            }
        } else if path.extension() == Some("md".as_ref()) {
            out.push(path);
        }
    }
    Ok(out)
}

fn report(dead: &BTreeSet<String>) -> Result<()> {
    if dead.is_empty() {
        return Ok(());
    }
    let list: Vec<_> = dead.iter().map(String::as_str).collect();
    bail!("expected links to existing files and headings, found {} others:\n{}", dead.len(), list.join("\n"))
}

/// Returns the file and the anchor of a link, or `None` if it is an address.
fn resolve(from: &Path, link: &str) -> Option<(PathBuf, String)> {
    if link.contains("://") || link.starts_with("mailto:") {
        return None;
    }
    let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
    let file = if file.is_empty() { from.to_path_buf() } else { normal(&from.parent()?.join(file)) };
    Some((file, anchor.to_owned()))
}

/// Returns a path without `.` and `..`.
pub fn normal(path: &Path) -> PathBuf {
    let mut out = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => {
                out.pop();
            }
            Component::CurDir => {}
            part => out.push(part),
        }
    }
    out
}

/// Returns the anchors of the headings, as GitHub names them, and the links of a Markdown text.
fn outline(text: &str) -> (BTreeSet<String>, Vec<String>) {
    let (mut anchors, mut links) = (BTreeSet::new(), Vec::new());
    let mut counts = BTreeMap::new();
    let mut heading: Option<String> = None;
    for event in Parser::new_ext(text, Options::ENABLE_TABLES) {
        match event {
            Event::Start(Tag::Heading { .. }) => heading = Some(String::new()),
            Event::End(TagEnd::Heading(_)) => {
                let slug = slug(&heading.take().unwrap_or_default());
                let count = counts.entry(slug.clone()).or_insert(0);
                anchors.insert(if *count == 0 { slug } else { format!("{slug}-{count}") });
                *count += 1;
            }
            // A directive of mdBook, which GitHub would show as it is.
            Event::Text(part) if part.starts_with("{{#") => links.push(part.into_string()),
            Event::Text(part) | Event::Code(part) => {
                if let Some(text) = &mut heading {
                    *text += &part;
                }
            }
            Event::Start(Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. }) => {
                links.push(dest_url.into_string());
            }
            _ => {}
        }
    }
    (anchors, links)
}

/// Returns the anchor of a heading: lower case, without punctuation, with hyphens for spaces.
fn slug(text: &str) -> String {
    let kept =
        text.to_lowercase().chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_')).collect::<String>();
    kept.replace(' ', "-")
}

pub fn files(pattern: &Path) -> Result<Vec<PathBuf>> {
    let paths = glob::glob(&pattern.to_string_lossy()).with_context(|| pattern.display().to_string())?;
    Ok(paths.collect::<Result<_, _>>()?)
}

pub fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dead_links_of_html_are_reported() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path().canonicalize().unwrap();
        let out = root.join("out");
        fs::create_dir(&out).unwrap();
        fs::write(out.join("b.html"), "<p id=\"here\">").unwrap();
        fs::write(root.join("outside"), "").unwrap();
        let alive = "<a href=\"b.html#here\"></a><a href=\"https://x.y\"></a><a href=\"#\"></a>";
        fs::write(out.join("a.html"), alive).unwrap();
        check_html(&out).unwrap();
        let dead = "<a href=\"b.html#there\"></a><img src=\"c.svg\"><a href=\"../outside\">";
        fs::write(out.join("a.html"), dead).unwrap();
        let error = check_html(&out).unwrap_err().to_string();
        assert!(error.ends_with("found 3 others:\na.html: ../outside\na.html: b.html#there\na.html: c.svg"), "{error}");
    }

    #[test]
    fn dead_links_of_markdown_are_reported() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path().canonicalize().unwrap();
        fs::create_dir(root.join("docs")).unwrap();
        fs::write(root.join("docs/b.md"), "# Title\n\n## A `code`, twice\n\n## A code twice\n").unwrap();
        fs::write(root.join("a.md"), "[x](docs/b.md#a-code-twice) [y](docs/b.md#a-code-twice-1) [z](docs)\n").unwrap();
        check_markdown(&root).unwrap();
        fs::write(root.join("a.md"), "[y](c.md) `[z](d.md)`\n\n{{#include b.md}}\n").unwrap();
        fs::write(root.join("docs/c.md"), "[x](b.md#nothing) [y](../../a.md)\n").unwrap();
        let error = check_markdown(&root).unwrap_err().to_string();
        assert!(
            error.ends_with(
                "found 4 others:\na.md: c.md\na.md: {{#include b.md}}\ndocs/c.md: ../../a.md\ndocs/c.md: b.md#nothing"
            ),
            "{error}"
        );
    }
}
