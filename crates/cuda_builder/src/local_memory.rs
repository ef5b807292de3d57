//! Finds the arrays in local memory, in optimized textual LLVM IR with debug information.
//!
//! Local memory is part of the device's memory. An array is in registers only if each of its indices is a constant after optimization.
//! The arrays that remain are the `alloca` instructions of a function.

use std::collections::{BTreeMap, HashSet};

use crate::lines::{Lines, debug_location};

/// The debug information of a function with local memory or register spills.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Function {
    /// The file and line of its declaration, or of a call, in the device crate.
    pub place: Option<String>,
    pub arrays: Vec<Array>,
    /// The largest variable of the device crate.
    pub largest: Option<Variable>,
}

/// An array in local memory.
#[derive(Debug, PartialEq, Eq)]
pub struct Array {
    /// `None` for one that the device crate does not declare.
    pub variable: Option<Variable>,
    /// The file and line of the use that keeps the array in memory, otherwise of the first use.
    pub place: Option<String>,
    pub cause: Cause,
}

/// A variable of the device crate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Variable {
    pub name: String,
    pub place: String,
    pub bytes: u64,
}

/// The reason why an array is in local memory, the most certain first.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Cause {
    /// `gpu_println!` passes its values in memory.
    Print,
    /// A call passes its address to this function, which is not inlined.
    Call(String),
    Index,
    Unknown,
}

/// Returns the functions of a module by their demangled names without hashes.
pub fn find(ir: &str, lines: &Lines) -> BTreeMap<String, Function> {
    let mut functions = BTreeMap::new();
    let mut rest = ir;
    while let Some(start) = rest.find("\ndefine ") {
        let body = &rest[start + 1..];
        let end = body.find("\n}").unwrap_or(body.len());
        rest = &body[end..];
        let body = &body[..end];
        let (header, body) = body.split_once('\n').unwrap_or((body, ""));
        let Some(symbol) = symbol(header) else { continue };
        let place = lines.function(header).or_else(|| call_of(ir, symbol, lines));
        let arrays = body.lines().filter_map(allocation).map(|pointer| array(pointer, body, lines)).collect();
        functions.insert(demangle(symbol), Function { place, arrays, largest: largest(body, lines) });
    }
    functions
}

pub fn demangle(name: &str) -> String {
    format!("{:#}", rustc_demangle::demangle(name))
}

/// Returns the name in `… @NAME(…` or `… @"NAME"(…`.
fn symbol(line: &str) -> Option<&str> {
    let (_, rest) = line.split_once('@')?;
    match rest.strip_prefix('"') {
        Some(quoted) => quoted.split('"').next(),
        None => rest.split('(').next(),
    }
}

/// Returns the place of the first call of a function whose own lines are unknown.
fn call_of(ir: &str, symbol: &str, lines: &Lines) -> Option<String> {
    let (plain, quoted) = (format!("@{symbol}("), format!("@\"{symbol}\"("));
    let mut calls =
        ir.lines().filter(|line| line.contains("call ") && (line.contains(&plain) || line.contains(&quoted)));
    calls.find_map(|line| lines.place(debug_location(line)?))
}

/// Returns `%x` for `%x = alloca …`.
fn allocation(line: &str) -> Option<&str> {
    let (name, instruction) = line.trim_start().split_once(" = ")?;
    instruction.starts_with("alloca ").then_some(name)
}

/// Describes the array at `pointer` from the uses of its address.
fn array(pointer: &str, body: &str, lines: &Lines) -> Array {
    let mut addresses = HashSet::from([pointer]);
    // The first use that has a place, for each cause.
    let mut uses: BTreeMap<Cause, Option<String>> = BTreeMap::new();
    let mut variable = None;
    for line in body.lines() {
        let instruction = line.trim_start();
        if let Some(declaration) = instruction.strip_prefix("#dbg_declare(ptr ") {
            let mut operands = declaration.split(", ");
            if operands.next() == Some(pointer) {
                variable = variable.or_else(|| lines.variable(operands.next()?));
            }
            continue;
        }
        if instruction.starts_with('#') || !words(instruction).any(|word| addresses.contains(word)) {
            continue;
        }
        let (result, instruction) = match instruction.split_once(" = ") {
            Some((result, instruction)) if result.starts_with('%') => (Some(result), instruction),
            _ => (None, instruction),
        };
        let opcode = instruction.split(' ').next().unwrap_or_default();
        let cause = match opcode {
            "getelementptr" => {
                addresses.extend(result);
                // The operands after the type and the base are indices.
                let indices = instruction.split(", ").skip(2).filter(|operand| !operand.starts_with('!'));
                if indices.clone().any(|index| index.contains('%')) { Cause::Index } else { Cause::Unknown }
            }
            "phi" | "select" => {
                addresses.extend(result);
                Cause::Index
            }
            "addrspacecast" | "alloca" => {
                addresses.extend(result);
                continue;
            }
            _ if instruction.contains("@llvm.") => Cause::Unknown,
            _ if instruction.contains("@vprintf(") => Cause::Print,
            _ if instruction.contains("call ") && !instruction.contains(" asm ") => {
                symbol(instruction).map_or(Cause::Unknown, |name| Cause::Call(demangle(name)))
            }
            _ => Cause::Unknown,
        };
        let place = debug_location(line).and_then(|location| lines.place(location));
        uses.entry(cause).and_modify(|known| *known = known.take().or_else(|| place.clone())).or_insert(place);
    }
    let (cause, place) = uses.pop_first().unwrap_or((Cause::Unknown, None));
    Array { variable, place, cause }
}

/// Returns the largest variable of a function, or `None` if it is smaller than 16 bytes.
fn largest(body: &str, lines: &Lines) -> Option<Variable> {
    let records = body.lines().filter_map(|line| line.trim_start().strip_prefix("#dbg_"));
    let ids: HashSet<&str> =
        records.filter_map(|record| record.split(", ").find(|part| part.starts_with('!'))).collect();
    let variables = ids.into_iter().filter_map(|id| lines.variable(id)).filter(|variable| variable.bytes >= 16);
    variables.max_by(|a, b| (a.bytes, &b.place, &b.name).cmp(&(b.bytes, &a.place, &a.name)))
}

/// Returns the local values in an instruction.
fn words(instruction: &str) -> impl Iterator<Item = &str> {
    instruction.split([' ', ',', '(', ')', '[', ']', '{', '}']).filter(|word| word.starts_with('%'))
}

impl Function {
    /// Returns ` (FILE:LINE)`, or nothing.
    pub fn at(&self) -> String {
        at(self.place.as_deref())
    }

    /// Returns the arrays with their lines, and how to avoid each, or nothing if there is none.
    pub fn describe_arrays(&self) -> String {
        let mut described: Vec<String> = self.arrays.iter().map(Array::describe).collect();
        described.sort();
        described.dedup();
        described.join("; ")
    }
}

impl Array {
    fn describe(&self) -> String {
        let name = match &self.variable {
            Some(Variable { name, place, .. }) => format!("`{name}` ({place})"),
            None => "an array".to_owned(),
        };
        let used = at(self.place.as_deref());
        match (&self.cause, &self.variable) {
            (Cause::Print, _) => format!("the values that gpu_println! prints{used}"),
            (Cause::Call(function), _) => {
                format!(
                    "{name} is passed by reference to {function}{used}; mark that function #[inline(always)], or pass values"
                )
            }
            (Cause::Index, Some(_)) => {
                format!(
                    "{name} is indexed at run time{used}; index it by constants, or unroll the loop that indexes it"
                )
            }
            // The code that indexes it is not in the device crate.
            (Cause::Index, None) => format!("an array of a function that is called{used} is indexed at run time"),
            (Cause::Unknown, Some(_)) => format!("{name} is used{used}"),
            (Cause::Unknown, None) => format!("a temporary value{used}"),
        }
    }
}

fn at(place: Option<&str>) -> String {
    place.map_or_else(String::new, |place| format!(" ({place})"))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    const IR: &str = r#"
define ptx_kernel void @k(ptr %p, i64 %n) #0 !dbg !3 {
start:
  %counts = alloca [64 x i8], align 4
  %1 = addrspacecast ptr %counts to ptr addrspace(5)
  %args = alloca [8 x i8], align 8
  %row = alloca [32 x i8], align 8
  %inner = alloca [32 x i8], align 8
    #dbg_declare(ptr %counts, !20, !DIExpression(), !30)
    #dbg_declare(ptr %row, !21, !DIExpression(), !30)
    #dbg_value(float 0.0, !22, !DIExpression(DW_OP_LLVM_fragment, 0, 32), !30)
  call void @llvm.memset.p5.i64(ptr addrspace(5) align 4 %1, i8 0, i64 64, i1 false), !dbg !30
  %2 = getelementptr inbounds [4 x i8], ptr addrspace(5) %1, i64 3, !dbg !30
  %3 = getelementptr inbounds [4 x i8], ptr addrspace(5) %1, i64 %n, !dbg !31
  store i32 1, ptr addrspace(5) %3, align 4, !dbg !31
  %4 = call i32 @vprintf(ptr @text, ptr %args), !dbg !31
  call void @_RNvCsc1GdXTGTPSD_1a6helper(ptr %row), !dbg !31
  %5 = getelementptr [4 x i8], ptr %inner, i64 %n, !dbg !32
  ret void
}
define internal void @_RNvCsc1GdXTGTPSD_1a6helper(ptr %row) {
  ret void
}
!1 = !DIFile(filename: "kernels/src/lib.rs", directory: "/own")
!2 = !DIFile(filename: "src/math.rs", directory: "/deps/cuda_std")
!3 = distinct !DISubprogram(name: "k", scope: !9, file: !1, line: 5, unit: !8)
!4 = distinct !DISubprogram(name: "sin", scope: !9, file: !2, line: 88, unit: !8)
!20 = !DILocalVariable(name: "counts", scope: !3, file: !1, line: 6, type: !23)
!21 = !DILocalVariable(name: "row", scope: !3, file: !1, line: 7, type: !25)
!22 = !DILocalVariable(name: "sums", scope: !3, file: !1, line: 8, type: !24)
!23 = !DICompositeType(tag: DW_TAG_array_type, baseType: !26, size: 512, align: 32, elements: !27)
!24 = !DICompositeType(tag: DW_TAG_array_type, baseType: !26, size: 2048, align: 32, elements: !27)
!25 = !DICompositeType(tag: DW_TAG_array_type, baseType: !26, size: 256, align: 32, elements: !27)
!30 = !DILocation(line: 6, column: 9, scope: !3)
!31 = !DILocation(line: 9, column: 9, scope: !3)
!32 = !DILocation(line: 91, column: 1, scope: !4, inlinedAt: !33)
!33 = !DILocation(line: 10, column: 1, scope: !3)
"#;

    #[test]
    fn arrays_have_their_variable_their_line_and_only_advice_that_fits() {
        let functions = find(IR, &Lines::new(IR, Path::new("/own/kernels")));
        let kernel = &functions["k"];
        assert_eq!(kernel.place.as_deref(), Some("src/lib.rs:5"));
        let largest = Variable { name: "sums".to_owned(), place: "src/lib.rs:8".to_owned(), bytes: 256 };
        assert_eq!(kernel.largest, Some(largest));
        let described: Vec<String> = kernel.arrays.iter().map(Array::describe).collect();
        assert_eq!(
            described,
            [
                "`counts` (src/lib.rs:6) is indexed at run time (src/lib.rs:9); index it by constants, or unroll the loop that indexes it",
                "the values that gpu_println! prints (src/lib.rs:9)",
                "`row` (src/lib.rs:7) is passed by reference to a::helper (src/lib.rs:9); mark that function #[inline(always)], or pass \
                 values",
                "an array of a function that is called (src/lib.rs:10) is indexed at run time",
            ]
        );
        // A function without lines of its own has those of its call.
        assert_eq!(functions["a::helper"].at(), " (src/lib.rs:9)");
    }
}
