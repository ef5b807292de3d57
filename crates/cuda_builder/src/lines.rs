//! Attributes instructions to lines of the device crate, in optimized textual LLVM IR with line information.
//!
//! Most instructions of a kernel come from functions of `cuda_std` and `core` that LLVM has inlined. PTX has one line for each
//! instruction, so a profiler would show few lines of the kernel. An inlined instruction gets the line of the device crate that calls the
//! function.

use std::collections::HashMap;
use std::path::Path;

/// Returns the module with the lines of its instructions in the files below `krate`, where they come from there.
pub fn attribute(ir: &str, krate: &Path) -> String {
    let nodes: HashMap<&str, &str> = ir.lines().filter_map(|line| line.strip_prefix('!')?.split_once(" = ")).collect();
    let mut attributed = String::with_capacity(ir.len());
    for line in ir.lines() {
        match line.strip_prefix('!').and_then(|node| node.split_once(" = ")) {
            Some((name, node)) if is_location(node) => {
                let own = own_location(node, &nodes, krate).unwrap_or(node);
                let distinct = if node.starts_with("distinct ") { "distinct " } else { "" };
                attributed.extend(["!", name, " = ", distinct, own.trim_start_matches("distinct ")]);
            }
            _ => attributed.push_str(line),
        }
        attributed.push('\n');
    }
    attributed
}

fn is_location(node: &str) -> bool {
    node.trim_start_matches("distinct ").starts_with("!DILocation(")
}

/// Returns the innermost location below `krate` of a chain of inlined calls.
fn own_location<'a>(mut node: &'a str, nodes: &HashMap<&str, &'a str>, krate: &Path) -> Option<&'a str> {
    loop {
        if file_of_scope(reference(node, "scope")?, nodes).is_some_and(|file| Path::new(&file).starts_with(krate)) {
            return Some(node);
        }
        node = nodes.get(reference(node, "inlinedAt")?)?;
    }
}

/// Returns the absolute path of the file of a function or block.
fn file_of_scope(scope: &str, nodes: &HashMap<&str, &str>) -> Option<String> {
    let file = nodes.get(reference(nodes.get(scope)?, "file")?)?;
    let (name, directory) = (text(file, "filename")?, text(file, "directory")?);
    Some(if name.starts_with('/') { name } else { format!("{directory}/{name}") })
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
