//! Patterns of files.

use anyhow::{Context, Result};
use glob::Pattern;
use std::path::{Path, PathBuf};

/// Characters with a meaning in a pattern.
pub(crate) const WILDCARDS: [char; 3] = ['*', '?', '['];

/// Returns the paths that match a glob pattern, sorted. Its longest existing prefix is taken literally: names may contain wildcards.
pub(crate) fn paths(pattern: &str) -> Result<Vec<PathBuf>> {
    let path = Path::new(pattern);
    let existing = path.ancestors().find(|path| path.exists()).and_then(Path::to_str).unwrap_or_default();
    if existing == pattern {
        return Ok(vec![path.to_owned()]);
    }
    let escaped = match path.strip_prefix(existing) {
        Ok(rest) if existing.contains(WILDCARDS) => Path::new(&Pattern::escape(existing)).join(rest),
        _ => path.to_owned(),
    };
    let found = glob::glob(&escaped.to_string_lossy()).with_context(|| format!("'{pattern}': not a glob pattern"))?;
    found.map(|path| path.with_context(|| format!("cannot read a path that matches '{pattern}'"))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn existing_names_are_no_patterns() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        for name in ["d[1]", "d1", "d*/e"] {
            fs::create_dir_all(at(name)).unwrap();
            for file in ["a_0.bin", "a_1.bin", "a_*.bin"] {
                fs::write(at(name).join(file), "").unwrap();
            }
        }
        let found = |pattern: &str| {
            let found = paths(at(pattern).to_str().unwrap()).unwrap();
            let names = found.iter().map(|path| path.strip_prefix(dir.path()).unwrap().to_str().unwrap().to_owned());
            names.collect::<Vec<String>>()
        };
        assert_eq!(found("d[1]/a_?.bin"), ["d[1]/a_*.bin", "d[1]/a_0.bin", "d[1]/a_1.bin"]);
        assert_eq!(found("d[1]/a_*.bin"), ["d[1]/a_*.bin"]);
        assert_eq!(found("d*/*/a_0.bin"), ["d*/e/a_0.bin"]);
        assert_eq!(found("d[12]/a_0.bin"), ["d1/a_0.bin"]);
        assert_eq!(found("d?/a_[01].bin"), ["d1/a_0.bin", "d1/a_1.bin"]);
        assert!(found("x*").is_empty() && paths("x[").is_err());
    }
}
