//! Selects input files: files, directories, glob patterns and standard input.

use super::STDIN;
use super::source::without_compression;
use crate::pattern::{self, WILDCARDS};
use anyhow::{Context, Result, bail, ensure};
use std::collections::{BTreeMap, HashSet};
use std::ffi::OsStr;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

/// The reason why a path is not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reason {
    /// The file contains a NUL byte near its beginning.
    Binary,
    /// The file starts with a byte order mark of UTF-16 or UTF-32.
    Utf16,
    /// The file has no bytes.
    Empty,
    /// A symbolic link in a directory; links could form a cycle.
    SymbolicLink,
    /// A directory of a version control system, such as `.git`.
    VersionControl,
    /// The output of this command.
    Output,
    /// Neither a file nor a directory.
    Special,
    /// An extension that was not selected.
    Extension,
    /// The path was given before.
    Repeated,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Binary => "binary files (with a NUL byte)",
            Self::Utf16 => "UTF-16 files (convert them to UTF-8)",
            Self::Empty => "empty files",
            Self::SymbolicLink => "symbolic links",
            Self::VersionControl => "version control directories",
            Self::Output => "files of the output directory",
            Self::Special => "devices, pipes and sockets",
            Self::Extension => "files with other extensions",
            Self::Repeated => "files given twice",
        })
    }
}

/// The paths that are not read, by reason.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Skipped(BTreeMap<Reason, (usize, Vec<PathBuf>)>);

impl Skipped {
    /// Number of paths named for each reason.
    const EXAMPLES: usize = 3;

    /// Adds a path.
    pub fn add(&mut self, reason: Reason, path: &Path) {
        let (count, examples) = self.0.entry(reason).or_default();
        *count += 1;
        if examples.len() < Self::EXAMPLES {
            examples.push(path.to_owned());
        }
    }

    /// Returns the number of paths skipped for a reason.
    pub fn count(&self, reason: Reason) -> usize {
        self.0.get(&reason).map_or(0, |(count, _)| *count)
    }

    /// Returns the number of paths.
    pub fn total(&self) -> usize {
        self.0.values().map(|(count, _)| count).sum()
    }
}

/// One line for each reason, with examples.
impl fmt::Display for Skipped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, (reason, (count, examples))) in self.0.iter().enumerate() {
            let names: Vec<String> = examples.iter().map(|path| path.display().to_string()).collect();
            let more = if *count > names.len() { ", …" } else { "" };
            let separator = if i > 0 { "\n" } else { "" };
            write!(f, "{separator}skipped {reason}: {count} ({}{more})", names.join(", "))?;
        }
        Ok(())
    }
}

/// The selected files, in the order in which they are read.
#[derive(Clone, Debug, Default)]
pub struct Found {
    /// The files; `-` is standard input.
    pub files: Vec<PathBuf>,
    /// The paths in the searched directories that were not selected.
    pub skipped: Skipped,
}

impl Found {
    /// Returns the size of all files, or `None` if one of them is not a regular file.
    pub fn bytes(&self) -> Option<u64> {
        let size = |path: &PathBuf| fs::metadata(path).ok().filter(fs::Metadata::is_file).map(|m| m.len());
        self.files.iter().map(size).sum()
    }
}

/// Returns the files in `paths`: files, directories, glob patterns, and `-` for standard input. Directories are searched
/// recursively, in sorted order.
///
/// Within directories, only files with one of the `extensions` are selected; an empty list selects all files. A directory
/// `out` inside another one is skipped, since it receives the output.
pub fn find(paths: &[PathBuf], extensions: &[String], out: Option<&Path>) -> Result<Found> {
    let out = out.and_then(|out| fs::canonicalize(out).ok());
    let mut search = Search { extensions, out, seen: HashSet::new(), found: Found::default() };
    for path in paths {
        if path == Path::new(STDIN) {
            ensure!(!search.found.files.contains(path), "{STDIN}: expected standard input once, found it twice");
            search.found.files.push(path.clone());
        } else {
            for path in expand(path)? {
                search.add(&path)?;
            }
        }
    }
    let found = search.found;
    ensure!(
        !found.files.is_empty(),
        "{}: expected input files{}, found none{}",
        paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(" "),
        match extensions {
            [] => String::new(),
            some => format!(" with extension .{}", some.join(" or .")),
        },
        if found.skipped.total() > 0 { format!("\n{}", found.skipped) } else { String::new() }
    );
    Ok(found)
}

/// Returns the paths that match a glob pattern, or the path itself if it exists.
fn expand(path: &Path) -> Result<Vec<PathBuf>> {
    let Some(pattern) = path.to_str().filter(|text| text.contains(WILDCARDS)) else {
        return Ok(vec![path.to_owned()]);
    };
    let matches = pattern::paths(pattern)?;
    if matches.is_empty() {
        bail!("no file matches '{pattern}': expected input files; check the pattern");
    }
    Ok(matches)
}

fn is_version_control(name: &OsStr) -> bool {
    [".git", ".hg", ".svn"].iter().any(|known| name == *known)
}

struct Search<'a> {
    extensions: &'a [String],
    out: Option<PathBuf>,
    seen: HashSet<PathBuf>,
    found: Found,
}

impl Search<'_> {
    /// Adds a path that the user named.
    fn add(&mut self, path: &Path) -> Result<()> {
        let kind = fs::metadata(path).with_context(|| format!("cannot read {}", path.display()))?;
        // Patterns such as `*` match these too.
        if self.is_output(path, false) {
            self.found.skipped.add(Reason::Output, path);
            return Ok(());
        }
        if !kind.is_dir() {
            self.add_file(path);
            return Ok(());
        }
        if path.file_name().is_some_and(is_version_control) {
            self.found.skipped.add(Reason::VersionControl, path);
            return Ok(());
        }
        self.walk(path)
    }

    fn add_file(&mut self, path: &Path) {
        // A pipe such as `/dev/fd/63` has no canonical path.
        let real = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        if self.seen.insert(real) {
            self.found.files.push(path.to_owned());
        } else {
            self.found.skipped.add(Reason::Repeated, path);
        }
    }

    fn walk(&mut self, directory: &Path) -> Result<()> {
        let context = || format!("cannot list {}", directory.display());
        let mut entries =
            fs::read_dir(directory).with_context(context)?.collect::<Result<Vec<_>, _>>().with_context(context)?;
        entries.sort_by_key(fs::DirEntry::path);
        for entry in entries {
            let path = entry.path();
            let kind = entry.file_type().with_context(|| format!("cannot read {}", path.display()))?;
            let name = entry.file_name();
            let reason = if kind.is_symlink() {
                Reason::SymbolicLink
            } else if is_version_control(&name) {
                Reason::VersionControl
            } else if self.is_output(&path, kind.is_dir()) {
                Reason::Output
            } else if kind.is_dir() {
                self.walk(&path)?;
                continue;
            } else if !kind.is_file() {
                Reason::Special
            } else if !self.has_extension(&path) {
                Reason::Extension
            } else {
                self.add_file(&path);
                continue;
            };
            self.found.skipped.add(reason, &path);
        }
        Ok(())
    }

    /// Reports whether a path is a file of the data set in the output directory, or that `directory` itself.
    fn is_output(&self, path: &Path, directory: bool) -> bool {
        let Some(out) = &self.out else { return false };
        let Ok(real) = fs::canonicalize(path) else { return false };
        let inside = real.parent() == Some(out) && crate::dataset::is_output(&real);
        inside || (directory && real == *out)
    }

    fn has_extension(&self, path: &Path) -> bool {
        let inner = without_compression(path);
        let matches = |path: &Path| path.extension().is_some_and(|e| self.extensions.iter().any(|x| e == x.as_str()));
        self.extensions.is_empty() || matches(path) || matches(&inner)
    }
}
