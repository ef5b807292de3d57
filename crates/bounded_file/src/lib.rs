//! Reads of files whose kind and size are checked first. A pipe would block a program for ever, and a device such as `/dev/zero`
//! has no end.

#![warn(missing_docs)]

use std::fs::{self, File, FileType};
use std::io::{self, Error, ErrorKind, Read};
use std::path::Path;

/// Limit of files that people write: settings, lists of losses.
pub const SETTINGS: u64 = 1 << 20;

/// Limit of descriptions that programs write: sidecars, indices, `config.json`.
pub const DESCRIPTION: u64 = 64 << 20;

/// Limit of texts that are read as a whole: tokenizers, evaluation sets, small corpora.
pub const TEXT: u64 = 1 << 30;

/// Opens a file for reading. Directories, pipes, sockets and devices are an error.
pub fn open(path: &Path) -> io::Result<File> {
    check(path)?;
    File::open(path)
}

/// Opens a file of a run for reading, which may be on a simulated disk. Otherwise like [`open`].
pub fn open_of_run(path: &Path) -> io::Result<system::fs::File> {
    if !system::fs::is_simulated(path) {
        check(path)?;
    }
    system::fs::File::open(path)
}

/// Reads a file of at most `limit` bytes.
pub fn read(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let file = open_of_run(path)?;
    let size = file.size()?;
    if size > limit {
        return Err(too_large(limit, size));
    }
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(usize::try_from(size).unwrap_or(usize::MAX)).map_err(|_| ErrorKind::OutOfMemory)?;
    // The size of some files, such as those in /proc, is 0.
    file.take(limit + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > limit {
        return Err(too_large(limit, bytes.len() as u64));
    }
    Ok(bytes)
}

/// Reads a file of at most `limit` bytes as UTF-8.
pub fn read_to_string(path: &Path, limit: u64) -> io::Result<String> {
    // The error of `fs::read_to_string`, which names no position either.
    String::from_utf8(read(path, limit)?)
        .map_err(|_| Error::new(ErrorKind::InvalidData, "stream did not contain valid UTF-8"))
}

fn too_large(limit: u64, size: u64) -> Error {
    Error::new(ErrorKind::FileTooLarge, format!("expected at most {limit} bytes, found {size}"))
}

/// Checks that opening a path does not block and that its end will come.
fn check(path: &Path) -> io::Result<()> {
    let found = fs::metadata(path)?.file_type();
    let problem = match kind(found) {
        _ if found.is_dir() => "a directory; name a file".to_owned(),
        Some(kind) => format!("{kind}; copy it to a file"),
        None => return Ok(()),
    };
    Err(Error::new(ErrorKind::InvalidInput, format!("expected a regular file, found {problem}")))
}

/// Returns the name of a kind of file without a known end.
fn kind(found: FileType) -> Option<&'static str> {
    #[cfg(unix)]
    {
        use std::os::unix::fs::FileTypeExt;
        if found.is_fifo() {
            return Some("a pipe");
        }
        if found.is_socket() {
            return Some("a socket");
        }
        if found.is_char_device() || found.is_block_device() {
            return Some("a device");
        }
    }
    (!found.is_file()).then_some("another kind of file")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn files_are_read_up_to_their_limit() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        fs::write(&path, "12345").unwrap();
        assert_eq!(read(&path, 5).unwrap(), b"12345");
        assert_eq!(read_to_string(&path, 5).unwrap(), "12345");
        let error = read(&path, 4).unwrap_err();
        assert_eq!(
            (error.kind(), error.to_string()),
            (ErrorKind::FileTooLarge, "expected at most 4 bytes, found 5".into())
        );
        fs::write(&path, b"\xff").unwrap();
        assert_eq!(read_to_string(&path, 5).unwrap_err().kind(), ErrorKind::InvalidData);
        assert_eq!(read(&dir.path().join("none"), 5).unwrap_err().kind(), ErrorKind::NotFound);
        // Nothing of a sparse file is read.
        File::create(&path).unwrap().set_len(8 << 30).unwrap();
        assert!(read(&path, TEXT).unwrap_err().to_string().contains("found 8589934592"));
    }

    #[test]
    fn files_without_a_size_are_read_up_to_their_limit() {
        let path = Path::new("/proc/self/status");
        assert!(read(path, 1 << 20).is_ok_and(|bytes| bytes.len() > 100));
        assert_eq!(read(path, 10).unwrap_err().to_string(), "expected at most 10 bytes, found 11");
    }

    #[test]
    fn pipes_devices_and_directories_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let pipe = dir.path().join("pipe");
        assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let expected = "expected a regular file, found a pipe; copy it to a file";
        assert_eq!(open(&pipe).unwrap_err().to_string(), expected);
        assert_eq!(read(&pipe, TEXT).unwrap_err().to_string(), expected);
        assert!(open(Path::new("/dev/zero")).unwrap_err().to_string().contains("found a device"));
        let expected = "expected a regular file, found a directory; name a file";
        assert_eq!(open(dir.path()).unwrap_err().to_string(), expected);
        assert_eq!(read(dir.path(), TEXT).unwrap_err().to_string(), expected);
    }
}
