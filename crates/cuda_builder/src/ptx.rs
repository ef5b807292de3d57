//! Inspects and corrects the PTX that llc writes.

use std::collections::BTreeMap;

use crate::error::Unresolved;

/// The size of a tensor map, in PTX syntax. Each by-value parameter of this size is one.
const TENSOR_MAP_BYTES: &str = "[128]";
const TENSOR_MAP_ALIGN: u32 = 64;

/// Device functions that the driver defines.
const DRIVER_FUNCTIONS: [&str; 4] = ["vprintf", "malloc", "free", "__assertfail"];

/// Raises the alignment of 128-byte parameters of entry points to the 64 bytes that tensor maps need. rustc cannot express it.
pub fn align_tensor_maps(ptx: &str) -> String {
    let mut in_header = false;
    let mut aligned = String::with_capacity(ptx.len());
    for line in ptx.lines() {
        in_header |= line.contains(".entry ");
        match tensor_map_align(line) {
            Some((before, after)) if in_header => {
                aligned.extend([before, &TENSOR_MAP_ALIGN.to_string(), after]);
            }
            _ => aligned.push_str(line),
        }
        aligned.push('\n');
        in_header &= !line.contains(')');
    }
    aligned
}

/// Splits `.param .align 8 .b8 name[128]` around the alignment if it is below 64.
fn tensor_map_align(line: &str) -> Option<(&str, &str)> {
    const ALIGN: &str = ".param .align ";
    let number = line.find(ALIGN)? + ALIGN.len();
    let length = line[number..].find(' ')?;
    let (digits, after) = line[number..].split_at(length);
    let is_map = after.starts_with(" .b8 ") && after.trim_end_matches([',', ')']).ends_with(TENSOR_MAP_BYTES);
    (is_map && digits.parse::<u32>().ok()? < TENSOR_MAP_ALIGN).then(|| (&line[..number], after))
}

/// A function or entry point with its body.
struct Function<'a> {
    name: &'a str,
    body: Vec<&'a str>,
}

/// Returns the functions that are declared `.extern .func` but not defined, with their callers.
pub fn unresolved(ptx: &str) -> Vec<Unresolved> {
    let declared = ptx.lines().filter_map(|line| function_name(line.trim_start().strip_prefix(".extern .func")?));
    let missing: Vec<&str> = declared.filter(|name| !DRIVER_FUNCTIONS.contains(name)).collect();
    if missing.is_empty() {
        return Vec::new();
    }
    let functions = functions(ptx);
    let unresolved = |name: &str| {
        let calls = |function: &&Function| function.body.iter().any(|line| words(line).any(|word| word == name));
        let callers = functions.iter().filter(calls).map(|function| function.name.to_owned()).collect();
        Unresolved { name: name.to_owned(), callers }
    };
    missing.into_iter().map(unresolved).collect()
}

/// Returns the bytes of local memory that each function and entry point declares.
pub fn local_memory(ptx: &str) -> BTreeMap<String, u64> {
    declared(ptx, ".local ")
}

/// Returns the bytes of static shared memory that each function and entry point declares.
pub fn static_shared(ptx: &str) -> BTreeMap<String, u64> {
    declared(ptx, ".shared ")
}

/// Returns the bytes that functions and entry points declare in a state space, such as `.local .align 4 .b8 name[100];`. Inline assembly
/// may declare a variable anywhere in a line.
fn declared(ptx: &str, space: &str) -> BTreeMap<String, u64> {
    let bytes = |line: &&str| {
        let (_, declaration) = line.split_once(space)?;
        let (element, rest) = declaration.split_once('[')?;
        let (bits, _) = element.rsplit_once(".b")?.1.split_once([' ', '\t'])?;
        let count: u64 = rest.split_once(']')?.0.parse().ok()?;
        Some(bits.parse::<u64>().ok()?.div_ceil(8).saturating_mul(count))
    };
    let all = functions(ptx).into_iter();
    let all = all.map(|function| (function.name.to_owned(), function.body.iter().filter_map(&bytes).sum()));
    all.filter(|(_, bytes)| *bytes > 0).collect()
}

fn functions(ptx: &str) -> Vec<Function<'_>> {
    let mut functions: Vec<Function> = Vec::new();
    let mut in_body = false;
    for line in ptx.lines() {
        match line {
            "{" => in_body = true,
            "}" => in_body = false,
            _ if in_body => functions.iter_mut().last().into_iter().for_each(|function| function.body.push(line)),
            _ => {
                let declaration = line.split_once(".entry ").or_else(|| line.split_once(".func "));
                if let Some(name) = declaration.and_then(|(_, declaration)| function_name(declaration)) {
                    functions.push(Function { name, body: Vec::new() });
                }
            }
        }
    }
    functions
}

/// Returns the name in `  (.param .b32 result) name(` or `name(`.
fn function_name(declaration: &str) -> Option<&str> {
    let declaration = declaration.trim_start();
    let name = match declaration.strip_prefix('(') {
        Some(result) => result.split_once(')')?.1,
        None => declaration,
    };
    words(name).next()
}

/// Splits a line into words of the characters of PTX names.
fn words(line: &str) -> impl Iterator<Item = &str> {
    line.split(|c: char| !c.is_ascii_alphanumeric() && !matches!(c, '_' | '$' | '%')).filter(|word| !word.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_128_byte_parameters_of_entry_points_are_realigned() {
        let ptx = "\
.visible .entry copy(
\t.param .align 8 .b8 copy_param_0[128],
\t.param .align 128 .b8 copy_param_1[128],
\t.param .align 8 .b8 copy_param_2[64],
\t.param .align 4 .b8 copy_param_3[128]
)
.func helper(
\t.param .align 8 .b8 helper_param_0[128]
)
";
        let expected = ptx
            .replace(".align 8 .b8 copy_param_0", ".align 64 .b8 copy_param_0")
            .replace(".align 4 .b8 copy_param_3", ".align 64 .b8 copy_param_3");
        assert_eq!(align_tensor_maps(ptx), expected);
    }

    #[test]
    fn undefined_functions_are_returned_with_their_callers() {
        let ptx = "\
.extern .func  (.param .b32 func_retval0) expf
(
\t.param .b32 expf_param_0
)
;
.extern .func  (.param .b32 func_retval0) vprintf
(
\t.param .b64 vprintf_param_0
)
;
.visible .entry softmax(
\t.param .u64 softmax_param_0
)
{
\tcall.uni (retval0), expf, (param0);
}
.visible .entry copy()
{
\tcall.uni (retval0), expf_fast, (param0);
}
";
        let expected = Unresolved { name: "expf".to_owned(), callers: vec!["softmax".to_owned()] };
        assert_eq!(unresolved(ptx), [expected]);
    }

    #[test]
    fn static_shared_memory_is_summed_by_function() {
        let ptx = "\
.extern .shared .align 1024 .b8 dynamic_shared[];
.visible .entry a()
{
\t.shared .align 4 .b8 \tsums[40];
\t{ .shared .b32 more[3]; }
\tld.shared.b32 \t%r1, [dynamic_shared+64];
}
.visible .entry b()
{
}
";
        assert_eq!(static_shared(ptx), [("a".to_owned(), 52)].into());
    }

    #[test]
    fn functions_with_local_memory_are_returned() {
        let ptx = ".visible .entry a()\n{\n\t.local .align 4 .b8 \t__local_depot0[40];\n}\n.visible .entry b()\n{\n}\n";
        assert_eq!(local_memory(ptx), [("a".to_owned(), 40)].into());
    }
}
