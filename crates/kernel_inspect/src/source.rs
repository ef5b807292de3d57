//! Lines of source files, as comments between instructions.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

/// The source files that were read, by path. A file that cannot be read has no lines.
#[derive(Default)]
pub struct Sources(HashMap<String, Vec<String>>);

impl Sources {
    /// Returns `path:line` and the text of the line, if the file exists.
    pub fn describe(&mut self, path: &str, line: u32) -> String {
        let lines = self.0.entry(path.to_owned()).or_insert_with(|| {
            let text = fs::read_to_string(path).unwrap_or_default();
            text.lines().map(|line| line.trim().to_owned()).collect()
        });
        let text = (line as usize).checked_sub(1).and_then(|index| lines.get(index));
        let text = text.map_or(String::new(), |text| format!("  {text}"));
        format!("{}:{line}{text}", short(path))
    }
}

/// Returns a path relative to the working directory if it is below it.
pub fn short(path: &str) -> &str {
    let current = std::env::current_dir().unwrap_or_default();
    Path::new(path).strip_prefix(current).ok().and_then(Path::to_str).unwrap_or(path)
}
