//! The file with the settings of a run, `config.toml`.
//!
//! Each key is a flag of `train`, so the file can be passed to `--config`.

use anyhow::Result;
use std::io::{Read, Write};
use std::path::Path;

/// Name of the file in the directory of a run.
pub const FILE: &str = "config.toml";

/// First line of the file.
const HEADER: &str = "# The settings of this run, for `train --config`. Flags override them.\n";

/// Writes settings in TOML into the directory of a run.
pub fn save(directory: &Path, settings: &str) -> Result<()> {
    atomic_file::write(&directory.join(FILE), |file| {
        file.write_all(HEADER.as_bytes())?;
        Ok(file.write_all(settings.as_bytes())?)
    })
}

/// Returns whether the `config.toml` of a directory begins like one that a run has saved.
pub fn is_saved(directory: &Path) -> bool {
    let mut start = [0; HEADER.len()];
    let read = bounded_file::open_of_run(&directory.join(FILE)).and_then(|mut file| file.read_exact(&mut start));
    read.is_ok() && start == *HEADER.as_bytes()
}

/// Returns a setting of the run in a directory. `None` if it is not set, or if no run has saved its settings there.
pub fn saved(directory: &Path, key: &str) -> Option<toml::Value> {
    let path = directory.join(FILE);
    let text = bounded_file::read_to_string(&path, bounded_file::SETTINGS).ok().filter(|_| is_saved(directory))?;
    toml::from_str::<toml::Table>(&text).ok()?.remove(key)
}
