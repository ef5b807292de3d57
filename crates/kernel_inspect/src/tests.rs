//! Tests with a small module.

use super::*;
use cuda_builder::{LaunchBounds, Resources};
use std::borrow::Cow;

const PTX: &str = "\
.version 8.8
.visible .entry scale_f32(
    .param .u64 scale_f32_param_0
)
.maxntid 256, 1, 1                      // @scale_f32
.minnctapersm 2
{
    { nested; }
    ret;
}
// next
.visible .entry scale(.param .u64 p)
{
    ret;
}
";

fn kernels() -> [Kernel; 2] {
    let kernel = |name, resources| Kernel {
        name: Cow::Borrowed(name),
        bounds: LaunchBounds { threads: Some([256, 1, 1]), blocks_per_sm: Some(2), ..LaunchBounds::default() },
        resources,
        signature: None,
    };
    let used =
        Resources { registers: 40, stack: 16, spill_stores: 24, spill_loads: 8, static_shared: 128, barriers: 1 };
    [kernel("scale", None), kernel("scale_f32", Some(used))]
}

fn shown_of(options: &Inspect, ptx: &str) -> Result<String> {
    let kernels = kernels();
    let codes = ["sm_80", "sm_90a"].map(|arch| Code { arch, ptx, cubin: None, kernels: &kernels });
    let mut out = Vec::new();
    inspect(options, &codes, &|_| None, &mut out)?;
    Ok(String::from_utf8(out)?)
}

fn shown(options: &Inspect) -> Result<String> {
    shown_of(options, PTX)
}

#[test]
fn the_table_lists_resources_of_every_architecture() {
    let text = shown(&Inspect::default()).unwrap();
    let row = text.lines().find(|line| line.starts_with("scale_f32")).unwrap();
    assert_eq!(row.split_whitespace().collect::<Vec<_>>(), ["scale_f32", "256", "2", "40", "128", "16", "32", "1"]);
    let row = text.lines().find(|line| line.starts_with("scale ")).unwrap();
    assert_eq!(row.split_whitespace().collect::<Vec<_>>()[3..], ["-", "-", "-", "-", "-"]);
    assert!(text.contains("sm_80") && text.contains("sm_90a"), "{text}");
    let one = shown(&Inspect { arch: Some("sm_80".into()), ..Inspect::default() }).unwrap();
    assert!(!one.contains("sm_90a"), "{one}");
}

#[test]
fn ptx_of_one_kernel_is_its_entry_only() {
    assert_eq!(find_entry(PTX, "scale").unwrap(), ".visible .entry scale(.param .u64 p)\n{\n    ret;\n}");
    let text = find_entry(PTX, "scale_f32").unwrap();
    assert!(text.starts_with(".visible .entry scale_f32(") && text.ends_with("ret;\n}"), "{text}");
    assert!(find_entry(PTX, "scal").is_none());
    assert_eq!(shown(&Inspect { ptx: true, ..Inspect::default() }).unwrap(), PTX);
    let both = shown(&Inspect { ptx: true, kernel: Some("scale".into()), ..Inspect::default() }).unwrap();
    assert_eq!(both.matches(".entry").count(), 2);
}

#[test]
fn entry_points_and_their_bounds_are_read_from_ptx() {
    assert_eq!(entries(PTX), ["scale_f32", "scale"]);
    let expected = LaunchBounds { threads: Some([256, 1, 1]), blocks_per_sm: Some(2), registers: None };
    assert_eq!(bounds(find_entry(PTX, "scale_f32").unwrap()), expected);
    assert_eq!(bounds(find_entry(PTX, "scale").unwrap()), LaunchBounds::default());
}

/// Returns the module with line information, and its source file.
fn with_lines() -> (String, tempfile::NamedTempFile) {
    let mut source = tempfile::Builder::new().suffix(".rs").tempfile().unwrap();
    writeln!(source, "fn scale() {{\n    first();\n    second();\n}}").unwrap();
    let body = "{\n\t.loc\t3 1 0\n$L__tmp0:\n\t.loc\t3 3 5\n\tadd;\n\t.loc\t3 0 5\n\tld;\n\t.loc\t3 3 9\n\tmul;\n}";
    let ptx = PTX.replace("{\n    ret;\n}", body) + &format!("\t.file\t3 \"{}\"\n", source.path().display());
    (ptx, source)
}

#[test]
fn ptx_and_the_table_name_source_lines() {
    let (ptx, source) = with_lines();
    let options = Inspect { ptx: true, kernel: Some("scale".into()), ..Inspect::default() };
    let text = shown_of(&options, &ptx).unwrap();
    let path = source.path().display();
    let body = format!("{{\n\t// {path}:1  fn scale() {{\n\t// {path}:3  second();\n\tadd;\n\tld;\n\tmul;\n}}");
    assert!(text.contains(&body), "{text}");
    let table = shown_of(&Inspect::default(), &ptx).unwrap();
    let row = table.lines().find(|line| line.starts_with("scale ")).unwrap();
    assert!(row.ends_with(&format!("  {path}:1")), "{row}");
}

#[test]
fn machine_code_of_one_kernel_has_source_lines() {
    let (_, source) = with_lines();
    let path = source.path().display();
    let sass = format!(
        "\t.target\tsm_80\n//-------- .text.other\n\t.section\t.text.other,\"ax\"\n other\n//----- .text.scale\n\
         \t.section\t.text.scale,\"ax\"\n\t//## File \"{path}\", line 2\n   FADD ;\n"
    );
    let mut out = Vec::new();
    with_source(&sass, |name| name == "scale", &mut out).unwrap();
    let expected = format!("\t.section\t.text.scale,\"ax\"\n\t// {path}:2  first();\n   FADD ;\n");
    assert_eq!(String::from_utf8(out).unwrap(), expected);
}

#[test]
fn errors_name_what_is_missing() {
    let error = |options| shown(&options).unwrap_err().to_string();
    let text = error(Inspect { kernel: Some("gelu".into()), ..Inspect::default() });
    assert_eq!(
        text,
        "gelu: expected a part of a kernel name, found no such kernel for sm_80, sm_90a; list all names with `inspect`"
    );
    let text = error(Inspect { arch: Some("sm_75".into()), ..Inspect::default() });
    assert_eq!(text, "--arch sm_75: expected one of the built architectures sm_80, sm_90a, found another");
    let text = error(Inspect { sass: true, ..Inspect::default() });
    assert!(text.contains("expected machine code for sm_90a") && text.contains("scripts/setup"), "{text}");
}

/// Two device crates of one build script: the kernel is in the first one, which has no kernels for the newest architecture.
#[test]
fn ptx_is_that_of_the_newest_architecture_with_the_kernel() {
    let kernels = kernels();
    let code = |arch, kernels| Code { arch, ptx: PTX, cubin: None, kernels };
    let codes = [code("sm_80", &kernels[1..]), code("sm_80", &kernels[..1]), code("sm_90a", &kernels[..1])];
    let shown = |kernel: &str| {
        let (options, mut out) = (Inspect { kernel: Some(kernel.into()), ptx: true, ..Inspect::default() }, Vec::new());
        inspect(&options, &codes, &|_| None, &mut out).unwrap();
        String::from_utf8(out).unwrap()
    };
    assert!(shown("scale_f32").starts_with(".visible .entry scale_f32("), "{}", shown("scale_f32"));
}
