//! Finds device code that the emulator cannot check, in optimized textual LLVM IR.

use std::fmt;

use crate::lines::{Lines, debug_location};
use crate::local_memory::demangle;

/// Something that the emulator cannot check, and the function or static that has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unchecked {
    /// The function or static, demangled.
    pub name: String,
    /// The problem and its fix, as the predicate of a sentence that begins with the name.
    pub what: &'static str,
    /// The file and line in the device crate, such as `src/lib.rs:12`. `None` if they are unknown.
    pub place: Option<String>,
}

impl fmt::Display for Unchecked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(place) = &self.place {
            write!(f, "{place}: ")?;
        }
        write!(f, "{} {}", self.name, self.what)
    }
}

const ATOMIC: &str = "uses an atomic of core: use the atomics of cuda_std's views";
const FENCE: &str =
    "uses a fence of core: use cuda_std::fence::device between blocks, or fence::block or a barrier in a block";
const STATIC: &str = "is a mutable static: pass memory as an argument";
const CLUSTER: &str = "has an instruction for thread block clusters: launches have no clusters";

/// Instructions and intrinsics that are valid only in a thread block cluster.
const CLUSTER_CODE: [&str; 6] =
    ["barrier.cluster", "mapa.", "%cluster", "multicast::cluster", "getctarank", "ptx.sreg.cluster"];

/// Returns the code that the emulator cannot check. `lines` has the debug information of the module, if there is any.
pub fn find(ir: &str, lines: Option<&Lines>) -> Vec<Unchecked> {
    let mut found: Vec<Unchecked> = Vec::new();
    let mut function = "";
    for line in ir.lines() {
        if let Some(rest) = line.strip_prefix("define ") {
            function = name(rest).unwrap_or_default();
        }
        let what = if let Some(rest) = line.strip_prefix('@') {
            if !is_mutable_static(line) {
                continue;
            }
            let place = lines.and_then(|lines| lines.global(line));
            found.push(Unchecked { name: until(rest, " =").trim_matches('"').to_owned(), what: STATIC, place });
            continue;
        } else if is_atomic(line) {
            ATOMIC
        } else if is_fence(line) {
            FENCE
        } else if line.starts_with("  ") && CLUSTER_CODE.iter().any(|code| line.contains(code)) {
            CLUSTER
        } else {
            continue;
        };
        let place = lines.and_then(|lines| lines.place(debug_location(line)?));
        found.push(Unchecked { name: function.to_owned(), what, place });
    }
    found.dedup();
    for unchecked in &mut found {
        unchecked.name = demangle(&unchecked.name);
    }
    found
}

fn until<'a>(text: &'a str, end: &str) -> &'a str {
    text.split(end).next().unwrap_or(text)
}

/// Returns the name of the function in `ATTRIBUTES @NAME(…`.
fn name(definition: &str) -> Option<&str> {
    let (_, rest) = definition.split_once('@')?;
    Some(match rest.strip_prefix('"') {
        Some(quoted) => until(quoted, "\""),
        None => until(rest, "("),
    })
}

fn is_atomic(line: &str) -> bool {
    let instruction = line.trim_start();
    let instruction = match instruction.strip_prefix('%') {
        Some(assignment) => assignment.split_once(" = ").map_or("", |(_, instruction)| instruction),
        None => instruction,
    };
    ["atomicrmw ", "cmpxchg ", "load atomic ", "store atomic "].iter().any(|opcode| instruction.starts_with(opcode))
}

/// Returns whether a line is a fence between threads. A compiler fence orders accesses of one thread only.
fn is_fence(line: &str) -> bool {
    line.trim_start().strip_prefix("fence ").is_some_and(|fence| !fence.starts_with("syncscope(\"singlethread\")"))
}

/// Returns whether `@NAME = … global …` defines a static that is neither constant nor dynamic shared memory.
fn is_mutable_static(line: &str) -> bool {
    let Some((_, definition)) = line.split_once(" = ") else { return false };
    let keywords = definition.split_whitespace().take_while(|word| !word.starts_with(['[', '{', '<']));
    let mut is_global = false;
    for keyword in keywords {
        match keyword {
            "constant" | "addrspace(3)" | "addrspace(4)" => return false,
            "global" => is_global = true,
            _ => {}
        }
    }
    is_global
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn atomics_fences_mutable_statics_and_cluster_instructions_are_found() {
        let ir = "\
@dynamic_shared = external addrspace(3) global [0 x i8], align 1024
@TABLE = internal unnamed_addr constant [4 x i32] zeroinitializer
@_RNvCsc1GdXTGTPSD_1a5COUNT = internal global [4 x i8] zeroinitializer, align 4
define ptx_kernel void @counts(ptr %p) #0 {
  %1 = atomicrmw add ptr %p, i32 1 monotonic, align 4
  %2 = load i32, ptr %p, align 4
}
define internal void @\"other::f\"() {
  store atomic i32 0, ptr %p seq_cst, align 4
  fence syncscope(\"singlethread\") seq_cst
  call void asm sideeffect \"fence.mbarrier_init.release.cluster;\", \"\"()
  call void asm sideeffect \"barrier.cluster.arrive;\", \"\"()
  fence seq_cst
  fence acquire
}
";
        let expected = [
            ("a::COUNT", STATIC),
            ("counts", ATOMIC),
            ("other::f", ATOMIC),
            ("other::f", CLUSTER),
            ("other::f", FENCE),
        ];
        let expected = expected.map(|(name, what)| Unchecked { name: name.to_owned(), what, place: None });
        assert_eq!(find(ir, None), expected);
    }
}
