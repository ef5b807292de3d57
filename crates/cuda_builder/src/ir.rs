//! Annotates LLVM's textual IR with attributes that rustc does not generate.
//!
//! Convergence: rustc marks functions convergent, but not inline-asm calls. LLVM may then duplicate a barrier into both arms
//! of a branch, or sink a shuffle into one. A warp that diverges there hangs or computes wrong values. This step marks each
//! asm call with side effects and each function; a repeated attribute is harmless. LLVM removes the attribute from functions
//! that do not need it.
//!
//! Dynamic shared memory: it is a global of address space 3, which Rust cannot name. Calls of `dynamic_shared_memory` and
//! `dynamic_shared_address` are replaced by its generic pointer and its address. LLVM then knows which accesses are shared.
//!
//! Architecture: the dependencies of the device crate are compiled once for all architectures, so each function gets the
//! `target-cpu` of the module here. LLVM inlines only between functions with the same one.
//!
//! Atomics: LLVM's NVPTX back end ignores the ordering of `atomicrmw`. Fences are added for it.
//!
//! Remainders: the back end computes `frem` with an approximate division. It becomes a call of an exact function
//! (`remainder.ll`).
//!
//! Launch bounds: `#[kernel]` writes them as `// @launch KERNEL KEY=VALUE…` lines of module asm, which become function
//! attributes. In a kernel of one-dimensional blocks, the index and the number of threads in y and z become constants.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use crate::error::Error;
use crate::module::LaunchBounds;

/// The functions that compute remainders. They are added to a module that uses them.
const REMAINDER: &str = include_str!("remainder.ll");

/// Prefix of the names of functions that return the shared memory of a kernel. `#[kernel]` generates them.
const SHARED_BYTES: &str = "__cuda_shared_bytes_";

const LAUNCH: &str = "module asm \"// @launch ";

/// An annotated module.
#[derive(Debug, Default)]
pub struct Marked {
    pub ir: String,
    /// The declarations of the kernels, by name.
    pub kernels: BTreeMap<String, Declared>,
    /// The functions that return the shared memory of a kernel.
    pub shared_bytes: Vec<String>,
}

/// The declarations in the `// @launch` line of a kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Declared {
    pub bounds: LaunchBounds,
    /// The hash of a checked kernel's source.
    pub signature: Option<u64>,
}

/// Marks asm calls and functions convergent, sets the architecture of functions, and adds launch bounds to kernels. `registers` limits
/// the registers of kernels whose bounds do not.
pub fn mark(ir: &str, arch: &str, registers: Option<u32>) -> Result<Marked, Error> {
    let mut launches = BTreeMap::new();
    for line in ir.lines().filter_map(|line| line.strip_prefix(LAUNCH)) {
        let (name, declared) = parse_launch(line.trim_end_matches('"'))?;
        launches.insert(name, declared);
    }
    let mut marked = Marked { ir: String::with_capacity(ir.len() + ir.len() / 16), ..Marked::default() };
    let mut has_remainders = false;
    for line in ir.lines() {
        if line.starts_with(LAUNCH) {
            continue;
        }
        let remainder = remainder(line);
        has_remainders |= remainder.is_some();
        let replacement = remainder.or_else(|| ordered_atomic(line)).or_else(|| shared_memory(line));
        if let Some(replacement) = replacement.or_else(|| target_cpu(line, arch)) {
            marked.ir.push_str(&replacement);
            marked.ir.push('\n');
            continue;
        }
        let insertion = match function(line) {
            Some(Function { name, end, is_kernel }) => {
                let mut attributes = " convergent".to_owned();
                if name.starts_with(SHARED_BYTES) {
                    marked.shared_bytes.push(name.to_owned());
                }
                if is_kernel {
                    let mut declared = launches.remove(name).unwrap_or_default();
                    if declared.bounds.registers.is_none() && declared.bounds.blocks_per_sm.is_none() {
                        declared.bounds.registers = registers;
                    }
                    attributes += &declared.bounds.attributes();
                    marked.kernels.insert(name.to_owned(), declared);
                }
                Some((end, attributes))
            }
            None => asm_call(line).map(|end| (end, " convergent".to_owned())),
        };
        match insertion {
            Some((at, attributes)) => {
                let (before, after) = line.split_at(at);
                marked.ir.extend([before, &attributes, after]);
            }
            None => marked.ir.push_str(line),
        }
        marked.ir.push('\n');
    }
    if has_remainders {
        marked.ir.push_str(REMAINDER);
    }
    match launches.into_keys().next() {
        Some(kernel) => Err(Error::NoSuchKernel { kernel }),
        None => Ok(marked),
    }
}

/// Returns the bytes of shared memory of each kernel, from the optimized functions that return them. A kernel whose bytes are not
/// constant is left out.
pub fn shared_bytes(ir: &str) -> BTreeMap<String, u64> {
    let mut bytes = BTreeMap::new();
    let mut kernel = None;
    for line in ir.lines() {
        if line.starts_with("define ") {
            kernel = function(line).and_then(|function| function.name.strip_prefix(SHARED_BYTES));
        } else if let (Some(kernel), Some(value)) = (kernel, line.trim_start().strip_prefix("ret i64 ")) {
            let value = value.split(',').next().unwrap_or(value);
            bytes.extend(value.parse().ok().map(|value| (kernel.to_owned(), value)));
        }
    }
    bytes
}

/// Returns the replacement of a line that declares or calls one of the two functions for dynamic shared memory. The alignment
/// of 1024 bytes is required by TMA's 128-byte swizzle.
fn shared_memory(line: &str) -> Option<String> {
    let (pointer, address) = (line.contains("@dynamic_shared_memory()"), line.contains("@dynamic_shared_address()"));
    if !pointer && !address {
        return None;
    }
    if line.starts_with("declare ") {
        let global = "@dynamic_shared = external addrspace(3) global [0 x i8], align 1024";
        return Some(if pointer { global.to_owned() } else { String::new() });
    }
    let (result, _) = line.split_once(" = ")?;
    Some(if pointer {
        format!("{result} = addrspacecast ptr addrspace(3) @dynamic_shared to ptr")
    } else {
        format!("{result} = ptrtoint ptr addrspace(3) @dynamic_shared to i32")
    })
}

/// Returns a call of the exact function in place of `%r = frem FLAGS TYPE %x, %y`, or `None` for another line.
fn remainder(line: &str) -> Option<String> {
    let (result, operands) = line.split_once(" = frem ")?;
    let (function, operands) = [("float", "f32"), ("double", "f64")].into_iter().find_map(|(kind, name)| {
        let (_, operands) =
            format!(" {operands}").split_once(&format!(" {kind} ")).map(|(a, b)| (a.to_owned(), b.to_owned()))?;
        Some(((kind, name), operands))
    })?;
    let (kind, name) = function;
    let (x, y) = operands.split_once(", ")?;
    let (y, metadata) = y.find(", !").map_or((y, ""), |at| y.split_at(at));
    // A call keeps its source line. Other metadata, such as the accuracy of the result, is for floating-point instructions only.
    let line = metadata.find(", !dbg !").map_or("", |at| {
        let end = metadata[at + 2..].find(", ").map_or(metadata.len(), |length| at + 2 + length);
        &metadata[at..end]
    });
    Some(format!("{result} = call {kind} @cuda_builder_remainder_{name}({kind} {x}, {kind} {y}){line}"))
}

/// Returns an `atomicrmw` between the fences that its ordering requires, or `None` for another line. The ordering of the
/// instruction itself becomes relaxed.
fn ordered_atomic(line: &str) -> Option<String> {
    let indent = &line[..line.len() - line.trim_start().len()];
    let instruction = line.trim_start();
    let instruction = match instruction.strip_prefix('%') {
        Some(assignment) => assignment.split_once(" = ")?.1,
        None => instruction,
    };
    if !instruction.starts_with("atomicrmw ") {
        return None;
    }
    let (ordering, before, after) = [
        ("seq_cst", Some("seq_cst"), Some("acquire")),
        ("acq_rel", Some("release"), Some("acquire")),
        ("release", Some("release"), None),
        ("acquire", None, Some("acquire")),
    ]
    .into_iter()
    .find(|(ordering, ..)| line.contains(&format!(" {ordering}")))?;
    // The fences have the scope of the instruction, such as `syncscope("block")`.
    let scope = line.find("syncscope(").and_then(|at| Some(&line[at..=at + line[at..].find(')')?]));
    let scope = scope.map_or_else(String::new, |scope| format!("{scope} "));
    let fence = |ordering: Option<&str>| ordering.map(|ordering| format!("{indent}fence {scope}{ordering}"));
    let relaxed = line.replacen(&format!(" {ordering}"), " monotonic", 1);
    let lines: Vec<String> = fence(before).into_iter().chain([relaxed]).chain(fence(after)).collect();
    Some(lines.join("\n"))
}

/// Returns the optimized module in which one-dimensional kernels contain constants for the other two dimensions. Functions that accept
/// blocks of any dimension are then as fast in these kernels as functions for one dimension.
pub fn with_constant_dimensions(ir: &str, kernels: &BTreeMap<String, Declared>) -> String {
    let mut is_one_dimensional = false;
    let line = |line: &str| {
        if line.starts_with("define ") {
            let threads = function(line).and_then(|function| kernels.get(function.name)?.bounds.threads);
            is_one_dimensional = matches!(threads, Some([_, 1, 1]));
        }
        let constant = || {
            let (result, call) = line.split_once(" = ")?;
            let register = call.split_once(" @llvm.nvvm.read.ptx.sreg.")?.1;
            match register.split_once('(')?.0 {
                "tid.y" | "tid.z" => Some(format!("{result} = add i32 0, 0\n")),
                "ntid.y" | "ntid.z" => Some(format!("{result} = add i32 0, 1\n")),
                _ => None,
            }
        };
        is_one_dimensional.then(constant).flatten().unwrap_or_else(|| line.to_owned())
    };
    ir.split_inclusive('\n').map(line).collect()
}

/// Returns the module without the fences of `compiler_fence`, which order nothing after optimization. The back end rejects them.
pub fn without_compiler_fences(ir: &str) -> String {
    let is_kept = |line: &&str| !line.trim_start().starts_with("fence syncscope(\"singlethread\")");
    ir.split_inclusive('\n').filter(is_kept).collect()
}

/// Returns a group of function attributes with `arch` as its `target-cpu`, or `None` for another line.
fn target_cpu(line: &str, arch: &str) -> Option<String> {
    const KEY: &str = "\"target-cpu\"=\"";
    if !line.starts_with("attributes #") {
        return None;
    }
    let (before, value) = line.split_once(KEY)?;
    let (_, after) = value.split_once('"')?;
    Some(format!("{before}{KEY}{arch}\"{after}"))
}

/// Parses `NAME KEY=VALUE…`.
fn parse_launch(line: &str) -> Result<(String, Declared), Error> {
    let mut words = line.split_whitespace();
    let kernel = words.next().unwrap_or_default().to_owned();
    let mut declared = Declared::default();
    let bounds = &mut declared.bounds;
    for word in words {
        let bad = || Error::BadBounds { kernel: kernel.clone(), found: word.to_owned() };
        let (key, value) = word.split_once('=').ok_or_else(bad)?;
        if key == "signature" {
            declared.signature = Some(u64::from_str_radix(value, 16).map_err(|_| bad())?);
            continue;
        }
        let [x, y, z] = extent(value).ok_or_else(bad)?;
        match key {
            "maxntid" => bounds.threads = Some([x, y, z]),
            "minctasm" if (y, z) == (1, 1) => bounds.blocks_per_sm = Some(x),
            "maxnreg" if (y, z) == (1, 1) => bounds.registers = Some(x),
            _ => return Err(bad()),
        }
    }
    Ok((kernel, declared))
}

/// Parses up to three positive numbers. The default of each is 1.
fn extent(value: &str) -> Option<[u32; 3]> {
    let mut extent = [1; 3];
    for (i, number) in value.split(',').enumerate() {
        *extent.get_mut(i)? = number.parse().ok().filter(|&n| n > 0)?;
    }
    Some(extent)
}

impl LaunchBounds {
    /// Returns the function attributes of LLVM's NVPTX back end.
    fn attributes(&self) -> String {
        let mut attributes = String::new();
        let single = |n: u32| n.to_string();
        let triple = |[x, y, z]: [u32; 3]| format!("{x},{y},{z}");
        let values = [
            ("nvvm.maxntid", self.threads.map(triple)),
            ("nvvm.minctasm", self.blocks_per_sm.map(single)),
            ("nvvm.maxnreg", self.registers.map(single)),
        ];
        for (name, value) in values {
            if let Some(value) = value {
                let _ = write!(attributes, " \"{name}\"=\"{value}\"");
            }
        }
        attributes
    }
}

struct Function<'a> {
    name: &'a str,
    /// The position at which function attributes may be inserted.
    end: usize,
    is_kernel: bool,
}

/// Returns the function of a `define` or `declare` line. Intrinsics are excluded: LLVM knows their attributes.
fn function(line: &str) -> Option<Function<'_>> {
    if !line.starts_with("define ") && !line.starts_with("declare ") {
        return None;
    }
    let name_start = line.find('@')? + 1;
    let rest = &line[name_start..];
    let (name, open) = if let Some(quoted) = rest.strip_prefix('"') {
        let length = quoted.find('"')?;
        (&quoted[..length], name_start + length + 2)
    } else {
        let length = rest.find('(')?;
        (&rest[..length], name_start + length)
    };
    if name.starts_with("llvm.") {
        return None;
    }
    let mut end = after_parentheses(line, open)?;
    for keyword in [" unnamed_addr", " local_unnamed_addr"] {
        if line[end..].starts_with(keyword) {
            end += keyword.len();
        }
    }
    Some(Function { name, end, is_kernel: line[..name_start].contains(" ptx_kernel ") })
}

/// Returns the position at which attributes of the asm call on this line may be inserted. The syntax is
/// `call T asm FLAGS "TEMPLATE", "CONSTRAINTS"(ARGUMENTS)`.
fn asm_call(line: &str) -> Option<usize> {
    let instruction = line.trim_start();
    let instruction = match instruction.strip_prefix('%') {
        Some(assignment) => assignment.split_once(" = ")?.1,
        None => instruction,
    };
    if !["call ", "tail call ", "notail call ", "callbr "].iter().any(|opcode| instruction.starts_with(opcode)) {
        return None;
    }
    let asm = line.find(" asm sideeffect ")?;
    let template = asm + line[asm..].find('"')?;
    let template_end = after_quotes(line, template)?;
    let constraints = template_end + line[template_end..].find('"')?;
    let open = after_quotes(line, constraints)?;
    after_parentheses(line, open)
}

/// Returns the position after the string that starts at `open`. The next quote ends it, because quotes inside are written `\22`.
fn after_quotes(line: &str, open: usize) -> Option<usize> {
    Some(open + 1 + line[open + 1..].find('"')? + 1)
}

/// Returns the position after the parenthesis that matches the one at `open`.
fn after_parentheses(line: &str, open: usize) -> Option<usize> {
    let mut depth = 0;
    let mut quoted = false;
    for (i, byte) in line.bytes().enumerate().skip(open) {
        match byte {
            b'"' => quoted = !quoted,
            b'(' if !quoted => depth += 1,
            b')' if !quoted => {
                depth -= 1;
                if depth == 0 {
                    return Some(i + 1);
                }
            }
            _ if depth == 0 => return None,
            _ => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn marked(line: &str) -> String {
        mark(line, "sm_80", None).unwrap_or_else(|error| panic!("{error}")).ir.trim_end().to_owned()
    }

    #[test]
    fn atomics_get_the_fences_of_their_ordering() {
        let atomic = |ordering: &str| format!("  %a = atomicrmw add ptr %p, i32 1 {ordering}, align 4");
        let relaxed = atomic("monotonic");
        assert_eq!(marked(&relaxed), relaxed.trim_end());
        let fenced = |before: &str, after: &str| format!("{before}{relaxed}{after}");
        assert_eq!(marked(&atomic("acquire")), fenced("", "\n  fence acquire"));
        assert_eq!(marked(&atomic("release")), fenced("  fence release\n", ""));
        assert_eq!(marked(&atomic("acq_rel")), fenced("  fence release\n", "\n  fence acquire"));
        assert_eq!(marked(&atomic("seq_cst")), fenced("  fence seq_cst\n", "\n  fence acquire"));
        let scoped = r#"  %a = atomicrmw volatile xchg ptr %p, i64 %x syncscope("block") release, align 8"#;
        let expected = "  fence syncscope(\"block\") release\n".to_owned() + &scoped.replace("release", "monotonic");
        assert_eq!(marked(scoped), expected);
    }

    #[test]
    fn compiler_fences_are_removed_after_optimization() {
        let ir = "  fence syncscope(\"singlethread\") seq_cst, !dbg !3\n  fence seq_cst\n  ret void\n";
        assert_eq!(without_compiler_fences(ir), "  fence seq_cst\n  ret void\n");
    }

    #[test]
    fn remainders_become_calls_of_an_exact_function() {
        for (line, call) in [
            ("  %r = frem float %x, %y", "  %r = call float @cuda_builder_remainder_f32(float %x, float %y)"),
            (
                "  %r = frem nnan double 5.0e-1, %y",
                "  %r = call double @cuda_builder_remainder_f64(double 5.0e-1, double %y)",
            ),
            (
                "  %r = frem float %x, %y, !fpmath !2, !dbg !31, !tbaa !4",
                "  %r = call float @cuda_builder_remainder_f32(float %x, float %y), !dbg !31\n",
            ),
        ] {
            let ir = marked(line);
            assert!(ir.starts_with(call) && ir.contains("define internal float @cuda_builder_remainder_f32"), "{ir}");
        }
        assert!(!marked("  %r = fdiv float %x, %y").contains("cuda_builder_remainder"));
    }

    #[test]
    fn asm_calls_of_every_form_become_convergent() {
        let cases = [
            (
                r#"  call void asm sideeffect "bar.sync 0;", ""(), !srcloc !3"#,
                r#"  call void asm sideeffect "bar.sync 0;", ""() convergent, !srcloc !3"#,
            ),
            (
                r#"  %o = tail call i32 asm sideeffect "shfl (\22)", "=r,r"(i32 noundef %x) #4, !srcloc !5"#,
                r#"  %o = tail call i32 asm sideeffect "shfl (\22)", "=r,r"(i32 noundef %x) convergent #4, !srcloc !5"#,
            ),
            (
                r#"  %1 = call { float, float } asm sideeffect "a", "=r,=r,r"(ptr byval([4 x i8]) %p) #1"#,
                r#"  %1 = call { float, float } asm sideeffect "a", "=r,=r,r"(ptr byval([4 x i8]) %p) convergent #1"#,
            ),
        ];
        for (line, expected) in cases {
            assert_eq!(marked(line), expected);
        }
    }

    #[test]
    fn other_lines_are_unchanged() {
        for line in [
            "  %1 = call float @llvm.fmuladd.f32(float %a, float %b, float %c)",
            r#"@text = constant [9 x i8] c"call asm ""#,
            r#"module asm ".extern .shared .align 1024 .b8 buffer[];""#,
            r#"  %1 = call float asm "ex2.approx.ftz.f32 $0, $1;", "=r,r"(float %x) #4"#,
            "declare i32 @llvm.nvvm.read.ptx.sreg.tid.x() #2",
        ] {
            assert_eq!(marked(line), line);
        }
    }

    #[test]
    fn dynamic_shared_memory_becomes_a_global_of_address_space_3() {
        let cases = [
            (
                "  %base = tail call noundef ptr @dynamic_shared_memory() #7, !noalias !3",
                "  %base = addrspacecast ptr addrspace(3) @dynamic_shared to ptr",
            ),
            (
                "  %4 = call noundef i32 @dynamic_shared_address() #7",
                "  %4 = ptrtoint ptr addrspace(3) @dynamic_shared to i32",
            ),
            (
                "declare noundef ptr @dynamic_shared_memory() unnamed_addr #1",
                "@dynamic_shared = external addrspace(3) global [0 x i8], align 1024",
            ),
        ];
        for (line, expected) in cases {
            assert_eq!(marked(line), expected);
        }
    }

    #[test]
    fn shared_bytes_are_constants_that_functions_return() {
        let ir = "\
define noundef i64 @__cuda_shared_bytes_sums() local_unnamed_addr #0 {
start:
  ret i64 4096, !dbg !12
}
define noundef i64 @__cuda_shared_bytes_varies() local_unnamed_addr #0 {
  %bytes = call i64 @other()
  ret i64 %bytes
}
define internal i64 @other() #0 {
  ret i64 7
}
";
        assert_eq!(shared_bytes(ir), [("sums".to_owned(), 4096)].into());
        let marked = mark(ir, "sm_80", None).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(marked.shared_bytes, ["__cuda_shared_bytes_sums", "__cuda_shared_bytes_varies"]);
    }

    #[test]
    fn functions_get_the_architecture_of_the_module() {
        assert_eq!(
            marked(r#"attributes #0 = { convergent nounwind "target-cpu"="sm_30" "x"="y" }"#),
            r#"attributes #0 = { convergent nounwind "target-cpu"="sm_80" "x"="y" }"#
        );
        let intrinsic = "attributes #1 = { nocallback nofree nosync nounwind }";
        assert_eq!(marked(intrinsic), intrinsic);
    }

    #[test]
    fn functions_become_convergent() {
        assert_eq!(
            marked("define internal void @\"a(b\"(ptr align 4 dereferenceable(16) %p) unnamed_addr #1 {"),
            "define internal void @\"a(b\"(ptr align 4 dereferenceable(16) %p) unnamed_addr convergent #1 {"
        );
        assert_eq!(marked("declare i32 @other(i32)"), "declare i32 @other(i32) convergent");
    }

    #[test]
    fn launch_bounds_become_attributes_of_their_kernel() -> Result<(), Error> {
        let ir = "module asm \"// @launch k maxntid=512 minctasm=2 maxnreg=64\"\n\
                  module asm \"// @launch plain signature=00ff\"\n\
                  define ptx_kernel void @k(ptr %p) unnamed_addr #0 {\n\
                  define ptx_kernel void @plain() {\n";
        let marked = mark(ir, "sm_80", None)?;
        assert_eq!(
            marked.ir,
            "define ptx_kernel void @k(ptr %p) unnamed_addr convergent \"nvvm.maxntid\"=\"512,1,1\" \
             \"nvvm.minctasm\"=\"2\" \"nvvm.maxnreg\"=\"64\" #0 {\n\
             define ptx_kernel void @plain() convergent {\n"
        );
        let bounds = LaunchBounds { threads: Some([512, 1, 1]), blocks_per_sm: Some(2), registers: Some(64) };
        let expected = [
            ("k".to_owned(), Declared { bounds, signature: None }),
            ("plain".to_owned(), Declared { signature: Some(0xff), ..Declared::default() }),
        ];
        assert_eq!(marked.kernels, expected.into());
        Ok(())
    }

    #[test]
    fn kernels_of_one_dimension_have_constants_for_the_others() {
        let bounds =
            |threads| Declared { bounds: LaunchBounds { threads, ..LaunchBounds::default() }, signature: None };
        let kernels = [("line", Some([256, 1, 1])), ("square", Some([16, 16, 1])), ("any", None)];
        let kernels = kernels.map(|(name, threads)| (name.to_owned(), bounds(threads))).into();
        let body = "  %y = tail call i32 @llvm.nvvm.read.ptx.sreg.tid.y()\n  %n = call i32 @llvm.nvvm.read.ptx.sreg.ntid.z()\n  \
                    %x = tail call i32 @llvm.nvvm.read.ptx.sreg.tid.x()\n}\n";
        let constants =
            "  %y = add i32 0, 0\n  %n = add i32 0, 1\n  %x = tail call i32 @llvm.nvvm.read.ptx.sreg.tid.x()\n}\n";
        let module = |bodies: [&str; 4]| {
            let kernels = ["line", "square", "any"].map(|name| format!("define ptx_kernel void @{name}() #0 {{\n"));
            let function = "define internal void @device_function() {\n".to_owned();
            let definitions = kernels.into_iter().chain([function]);
            definitions.zip(bodies).map(|(definition, body)| definition + body).collect::<String>()
        };
        assert_eq!(with_constant_dimensions(&module([body; 4]), &kernels), module([constants, body, body, body]));
    }

    #[test]
    fn the_builders_limit_of_registers_yields_to_the_declaration() -> Result<(), Error> {
        let ir = "module asm \"// @launch a maxntid=32\"\nmodule asm \"// @launch b maxntid=32 minctasm=2\"\n\
                  module asm \"// @launch c maxntid=32 maxnreg=40\"\n\
                  define ptx_kernel void @a() {\ndefine ptx_kernel void @b() {\ndefine ptx_kernel void @c() {\n";
        let registers = mark(ir, "sm_80", Some(64))?.kernels.into_values().map(|declared| declared.bounds.registers);
        assert_eq!(registers.collect::<Vec<_>>(), [Some(64), None, Some(40)]);
        Ok(())
    }

    #[test]
    fn errors_of_invalid_launch_bounds_name_the_kernel() {
        for wrong in ["maxntid=0", "maxntid=1,2,3,4", "minctasm=1,2", "maxntid", "threads=3", "maxnreg=many"] {
            let ir = format!("module asm \"// @launch my_kernel {wrong}\"\ndefine ptx_kernel void @my_kernel() {{\n");
            let error = mark(&ir, "sm_80", None).expect_err(wrong).to_string();
            assert!(error.contains("my_kernel") && error.contains(wrong), "{error}");
        }
        let error =
            mark("module asm \"// @launch nobody maxntid=1\"", "sm_80", None).expect_err("no such kernel").to_string();
        assert!(error.contains("nobody"), "{error}");
    }
}
