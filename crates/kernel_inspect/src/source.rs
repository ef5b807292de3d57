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
        let path = plain(path);
        let lines = self.0.entry(path.clone()).or_insert_with(|| {
            let text = fs::read_to_string(&path).unwrap_or_default();
            text.lines().map(|line| line.trim().to_owned()).collect()
        });
        let text = (line as usize).checked_sub(1).and_then(|index| lines.get(index));
        let text = text.map_or(String::new(), |text| format!("  {text}"));
        format!("{}:{line}{text}", short(&path))
    }
}

/// Returns a path of PTX or machine code relative to the working directory if it is below it.
pub fn short(path: &str) -> String {
    let (path, current) = (plain(path), std::env::current_dir().unwrap_or_default());
    Path::new(&path).strip_prefix(current).ok().and_then(Path::to_str).map_or(path.clone(), str::to_owned)
}

/// Returns a path of PTX as it is. PTX is ASCII, so LLVM writes the bytes of other letters as octal numbers: `\303\274`.
fn plain(path: &str) -> String {
    let (mut bytes, mut rest) = (Vec::new(), path);
    while let Some((before, after)) = rest.split_once('\\') {
        bytes.extend_from_slice(before.as_bytes());
        let byte = after.get(..3).and_then(|digits| u8::from_str_radix(digits, 8).ok());
        bytes.push(byte.unwrap_or(b'\\'));
        rest = if byte.is_some() { &after[3..] } else { after };
    }
    bytes.extend_from_slice(rest.as_bytes());
    String::from_utf8(bytes).unwrap_or_else(|_| path.to_owned())
}

#[cfg(test)]
mod tests {
    use super::{Sources, plain};

    #[test]
    fn paths_with_letters_that_are_not_ascii_are_found() {
        assert_eq!(plain(r"/tmp/mit \303\274/lib.rs"), "/tmp/mit ü/lib.rs");
        assert_eq!(plain(r"/a\b"), r"/a\b");
        let file = std::env::temp_dir().join(format!("kernel_inspect-ü-{}.rs", std::process::id()));
        std::fs::write(&file, "fn f() {\n    g();\n}\n").unwrap();
        let escaped = file.display().to_string().replace('ü', r"\303\274");
        let described = Sources::default().describe(&escaped, 2);
        std::fs::remove_file(&file).unwrap();
        assert_eq!(described, format!("{}:2  g();", file.display()));
    }
}
