//! Attributes instructions to lines of the device crate, in optimized textual LLVM IR with line information.
//!
//! Most instructions of a kernel come from functions of `cuda_std` and `core` that LLVM has inlined. PTX has one line for each
//! instruction, so a profiler would show few lines of the kernel. An inlined instruction gets the line of the device crate that calls the
//! function.

use std::collections::HashMap;
use std::path::Path;

use crate::local_memory::Variable;

/// The debug information of a module.
pub struct Lines<'a> {
    /// The metadata nodes, by number.
    nodes: HashMap<&'a str, &'a str>,
    /// The directory of the device crate.
    krate: &'a Path,
}

/// Returns the module with the lines of its instructions in the files below `krate`, where they come from there.
pub fn attribute(ir: &str, krate: &Path) -> String {
    let lines = Lines::new(ir, krate);
    let mut attributed = String::with_capacity(ir.len());
    for line in ir.lines() {
        match line.strip_prefix('!').and_then(|node| node.split_once(" = ")) {
            Some((name, node)) if is_location(node) => {
                let own = lines.own_location(node).unwrap_or(node);
                let distinct = if node.starts_with("distinct ") { "distinct " } else { "" };
                attributed.extend(["!", name, " = ", distinct, own.trim_start_matches("distinct ")]);
            }
            _ => attributed.push_str(line),
        }
        attributed.push('\n');
    }
    attributed
}

impl<'a> Lines<'a> {
    pub fn new(ir: &'a str, krate: &'a Path) -> Self {
        let nodes = ir.lines().filter_map(|line| line.strip_prefix('!')?.split_once(" = ")).collect();
        Self { nodes, krate }
    }

    /// Returns the file and line in the device crate of the location `!12`, such as `src/lib.rs:3`.
    pub fn place(&self, location: &str) -> Option<String> {
        let location = self.own_location(self.node(location)?)?;
        self.place_in(&self.file_of_scope(reference(location, "scope")?)?, location)
    }

    /// Returns the place of the function in a line `define … !dbg !12 {`.
    pub fn function(&self, header: &str) -> Option<String> {
        self.declaration(self.node(debug_location(header.trim_end_matches(" {"))?)?)
    }

    /// Returns the place of the static in a line `@NAME = … global …, !dbg !12`.
    pub fn global(&self, line: &str) -> Option<String> {
        let expression = self.node(debug_location(line)?)?;
        self.declaration(self.nodes.get(reference(expression, "var")?)?)
    }

    /// Returns the variable `!12` if the device crate declares it.
    pub fn variable(&self, id: &str) -> Option<Variable> {
        let variable = self.node(id)?;
        let kind = self.nodes.get(reference(variable, "type")?)?;
        let bits: u64 = field(kind, "size")?.split([',', ')']).next()?.parse().ok()?;
        Some(Variable { name: text(variable, "name")?, place: self.declaration(variable)?, bytes: bits.div_ceil(8) })
    }

    fn node(&self, id: &str) -> Option<&'a str> {
        self.nodes.get(id.strip_prefix('!')?).copied()
    }

    /// Returns the place of a node with a file and a line.
    fn declaration(&self, node: &str) -> Option<String> {
        self.place_in(&self.file(reference(node, "file")?)?, node)
    }

    /// Returns the line of a node in a file of the device crate.
    fn place_in(&self, file: &str, node: &str) -> Option<String> {
        let line = field(node, "line")?.split([',', ')']).next()?;
        Some(format!("{}:{line}", Path::new(file).strip_prefix(self.krate).ok()?.display()))
    }

    /// Returns the innermost location in the device crate of a chain of inlined calls.
    fn own_location(&self, mut node: &'a str) -> Option<&'a str> {
        loop {
            let file = self.file_of_scope(reference(node, "scope")?);
            if file.is_some_and(|file| Path::new(&file).starts_with(self.krate)) {
                return Some(node);
            }
            node = self.nodes.get(reference(node, "inlinedAt")?)?;
        }
    }

    /// Returns the absolute path of the file of a function or block.
    fn file_of_scope(&self, scope: &str) -> Option<String> {
        self.file(reference(self.nodes.get(scope)?, "file")?)
    }

    fn file(&self, file: &str) -> Option<String> {
        let file = self.nodes.get(file)?;
        let (name, directory) = (text(file, "filename")?, text(file, "directory")?);
        Some(if name.starts_with('/') { name } else { format!("{directory}/{name}") })
    }
}

fn is_location(node: &str) -> bool {
    node.trim_start_matches("distinct ").starts_with("!DILocation(")
}

/// Returns `!12` for a line with `!dbg !12`.
pub fn debug_location(line: &str) -> Option<&str> {
    let (_, location) = line.rsplit_once("!dbg ")?;
    location.split([',', ' ']).next()
}

/// Returns `12` for `key: !12`.
fn reference<'a>(node: &'a str, key: &str) -> Option<&'a str> {
    let value = field(node, key)?.strip_prefix('!')?;
    Some(&value[..value.find(|c: char| !c.is_ascii_digit()).unwrap_or(value.len())])
}

/// Returns `a` for `key: "a"`. LLVM writes quotes, backslashes and the bytes of letters that are not ASCII in hexadecimal: `\C3\BC`.
fn text(node: &str, key: &str) -> Option<String> {
    let mut rest = field(node, key)?.strip_prefix('"')?.split('"').next()?;
    let mut bytes = Vec::new();
    while let Some((before, after)) = rest.split_once('\\') {
        bytes.extend_from_slice(before.as_bytes());
        bytes.push(u8::from_str_radix(after.get(..2)?, 16).ok()?);
        rest = &after[2..];
    }
    bytes.extend_from_slice(rest.as_bytes());
    String::from_utf8(bytes).ok()
}

fn field<'a>(node: &'a str, key: &str) -> Option<&'a str> {
    let starts = |before: &str| before.ends_with(['(', ' ']);
    node.match_indices(key).find_map(|(at, _)| {
        let value = node[at + key.len()..].strip_prefix(": ")?;
        starts(&node[..at]).then_some(value)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_inlined_instruction_gets_the_line_of_the_device_crate() {
        let ir = "\
  %1 = load float, ptr %p, align 4, !dbg !10
!1 = !DIFile(filename: \"kernels/src/lib.rs\", directory: \"/work/own\")
!2 = !DIFile(filename: \"src/global.rs\", directory: \"/deps/cuda_std\")
!3 = distinct !DISubprogram(name: \"k\", scope: !9, file: !1, line: 5, unit: !8)
!4 = distinct !DISubprogram(name: \"at\", scope: !9, file: !2, line: 88, unit: !8)
!5 = !DILexicalBlock(scope: !3, file: !1, line: 6, column: 5)
!10 = !DILocation(line: 89, column: 18, scope: !4, inlinedAt: !11)
!11 = distinct !DILocation(line: 7, column: 9, scope: !5)
!12 = !DILocation(line: 91, column: 1, scope: !4)
";
        let expected = ir.replace(
            "!10 = !DILocation(line: 89, column: 18, scope: !4, inlinedAt: !11)",
            "!10 = !DILocation(line: 7, column: 9, scope: !5)",
        );
        assert_eq!(attribute(ir, Path::new("/work/own/kernels")), expected);
        assert_eq!(attribute(ir, Path::new("/elsewhere")), ir);
        let escaped = |ir: &str| ir.replace("/work/own", "/work/mit \\C3\\BC");
        assert_eq!(attribute(&escaped(ir), Path::new("/work/mit ü/kernels")), escaped(&expected));
    }
}
