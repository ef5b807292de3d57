//! Extraction of the files of published tar archives.

use crate::header::read_available;
use crate::local_files::is_hidden;
use anyhow::{Context, Result, bail, ensure};
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use tar::Archive;

const BUFFER_BYTES: usize = 64 << 10;

/// Extracts the files that `wanted` accepts into `directory`, which is created. Returns their paths, sorted by name.
///
/// `name` is the archive in messages, and `expected` what it should be.
pub fn extract(
    archive: impl Read,
    name: &str,
    expected: &str,
    directory: &Path,
    wanted: impl Fn(&Path) -> bool,
) -> Result<Vec<PathBuf>> {
    let damaged = || format!("{name}: expected {expected}");
    atomic_file::create_directory(directory)?;
    let mut entries = Archive::new(archive);
    let mut files = Vec::new();
    let mut buffer = vec![0; BUFFER_BYTES];
    for entry in entries.entries().with_context(damaged)? {
        let mut entry = entry.with_context(damaged)?;
        let path = entry.path().with_context(damaged)?.into_owned();
        // Only the last part of the path is used, so no entry is written outside of the directory.
        let Some(last) = path.file_name().filter(|_| !is_hidden(&path)) else { continue };
        let kind = entry.header().entry_type();
        if kind.is_dir() || !wanted(&path) {
            continue;
        }
        ensure!(
            kind.is_file(),
            "{name}: expected a regular file {}, found a link or a special file; extract the archive and pass the directory",
            path.display()
        );
        let to = directory.join(last);
        let cannot_write = || format!("cannot write {}", to.display());
        let mut out = match File::create_new(&to) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                bail!("{name}: expected one file {}, found two", last.display())
            }
            created => created.with_context(cannot_write)?,
        };
        loop {
            let len = read_available(&mut entry, &mut buffer).with_context(damaged)?;
            if len == 0 {
                break;
            }
            out.write_all(&buffer[..len]).with_context(cannot_write)?;
        }
        files.push(to);
    }
    ensure!(!files.is_empty(), "{name}: expected {expected}, found none of its files");
    files.sort();
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mmlu::{self, Split};
    use std::fs;
    use tar::{Builder, Header};

    /// Returns an archive with these files, which contain their names.
    fn archive(names: &[&str]) -> Vec<u8> {
        let mut builder = Builder::new(Vec::new());
        for name in names {
            let mut header = Header::new_gnu();
            // `set_path` rejects `..`, which damaged archives may contain.
            header.as_old_mut().name[..name.len()].copy_from_slice(name.as_bytes());
            header.set_size(name.len() as u64);
            header.set_mode(0o644);
            header.set_cksum();
            builder.append(&header, name.as_bytes()).unwrap();
        }
        builder.into_inner().unwrap()
    }

    fn find(bytes: &[u8]) -> Result<Vec<String>> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("data.tar");
        fs::write(&path, bytes).unwrap();
        let files = mmlu::find(&path, Split::Val, &dir.path().join("extracted"))?;
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2, "files outside of the directory");
        Ok(files.iter().map(|file| fs::read_to_string(file).unwrap()).collect())
    }

    #[test]
    fn only_the_files_of_the_split_are_extracted() {
        let names = ["data/val/b_val.csv", "data/val/._b_val.csv", "data/README.txt", "data/test/a_test.csv"];
        assert_eq!(find(&archive(&names)).unwrap(), ["data/val/b_val.csv"]);
        let names = ["data/val/b_val.csv", "../val/a_val.csv"];
        assert_eq!(find(&archive(&names)).unwrap(), ["../val/a_val.csv", "data/val/b_val.csv"]);
    }

    #[test]
    fn a_link_is_an_error() {
        let mut builder = Builder::new(Vec::new());
        let mut header = Header::new_gnu();
        header.set_entry_type(tar::EntryType::Link);
        header.set_size(0);
        builder.append_link(&mut header, "data/val/b_val.csv", "data/val/a_val.csv").unwrap();
        let message = find(&builder.into_inner().unwrap()).unwrap_err().to_string();
        assert!(message.contains("data.tar: expected a regular file data/val/b_val.csv, found a link"), "{message}");
    }

    #[test]
    fn damaged_archives_are_errors_that_name_the_archive() {
        let error = |bytes: &[u8]| {
            let message = format!("{:#}", find(bytes).unwrap_err());
            assert!(message.contains("data.tar: expected "), "{message}");
            message
        };
        let whole = archive(&["data/val/b_val.csv"]);
        assert!(error(&whole[..515]).contains("a complete .tar archive with files val/*_val.csv"));
        assert!(error(&[b'x'; 2000]).contains("a complete .tar archive"));
        assert!(error(&archive(&["data/test/a_test.csv"])).contains("found none of its files"));
        assert!(error(&archive(&["val/b_val.csv", "data/val/b_val.csv"])).contains("one file b_val.csv, found two"));
    }
}
