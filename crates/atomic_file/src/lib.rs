//! Files that appear whole or not at all.

use anyhow::{Context, Result};
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::Path;

/// How names begin of files and directories that are not whole yet.
pub const UNFINISHED: &str = ".unfinished-";

/// Writes a file under a temporary name beside `path`, makes it durable, and only then gives it its name. On error nothing
/// of it is left.
pub fn write<T>(path: &Path, fill: impl FnOnce(&mut BufWriter<File>) -> Result<T>) -> Result<T> {
    let cannot = || format!("cannot write {}", path.display());
    let directory = path.parent().filter(|d| !d.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut builder = tempfile::Builder::new();
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        // As `File::create` has it; the process' umask still applies.
        builder.permissions(fs::Permissions::from_mode(0o666));
    }
    let temporary = builder.prefix(UNFINISHED).tempfile_in(directory).with_context(cannot)?;
    let mut writer = BufWriter::with_capacity(1 << 20, temporary.as_file().try_clone().with_context(cannot)?);
    let result = fill(&mut writer).with_context(cannot)?;
    writer.flush().with_context(cannot)?;
    drop(writer);
    temporary.as_file().sync_all().with_context(cannot)?;
    temporary.persist(path).with_context(cannot)?;
    sync_directory(directory)?;
    Ok(result)
}

/// Makes the names in a directory durable: files alone are not found again after a power cut.
pub fn sync_directory(path: &Path) -> Result<()> {
    File::open(path)
        .and_then(|directory| directory.sync_all())
        .with_context(|| format!("cannot write {}", path.display()))
}

/// Makes a directory and its parents.
pub fn create_directory(path: &Path) -> Result<()> {
    fs::create_dir_all(path).with_context(|| format!("cannot create directory {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::bail;

    #[test]
    fn a_failed_write_leaves_the_old_file_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.bin");
        write(&path, |w| Ok(w.write_all(b"old")?)).unwrap();
        let failed: Result<()> = write(&path, |w| {
            w.write_all(b"half of the n")?;
            bail!("disk on fire")
        });
        let message = format!("{:#}", failed.unwrap_err());
        assert!(message.contains("x.bin") && message.contains("disk on fire"), "{message}");
        assert_eq!(fs::read(&path).unwrap(), b"old");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}
