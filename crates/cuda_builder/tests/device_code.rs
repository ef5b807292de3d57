//! Builds device crates and checks the PTX and the reported resources.
//!
//! The tests need a device toolchain; without one they fail with the command that installs it. Checks that need `ptxas` are
//! skipped without it.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

use cuda_builder::{Built, BuiltModule, CudaBuilder, Error, Kernel, LaunchBounds, find_cuda_tool};

const ARCHS: [&str; 2] = ["sm_80", "sm_90a"];

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

fn build(name: &str, archs: &[&str]) -> Result<Built, Error> {
    let out_dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}", archs.join("-")));
    let builder = CudaBuilder::new(fixture(name)).out_dir(out_dir).cubins(true);
    let built = archs.iter().fold(builder, |builder, arch| builder.arch(arch)).build();
    if let Ok(Built { missing: Some(missing), .. }) = &built {
        panic!("this test compiles device code; {missing}");
    }
    built
}

static PROBES: LazyLock<Built> =
    LazyLock::new(|| build("probes", &ARCHS).unwrap_or_else(|error| panic!("the probes do not build: {error}")));

fn ptx(module: &BuiltModule) -> String {
    std::fs::read_to_string(&module.ptx).unwrap_or_else(|error| panic!("{}: {error}", module.ptx.display()))
}

/// Returns the PTX from `.entry kernel(` to the end of its body.
fn entry(ptx: &str, kernel: &str) -> String {
    let start = ptx.find(&format!(".entry {kernel}(")).unwrap_or_else(|| panic!("no entry {kernel} in\n{ptx}"));
    let end = ptx[start..].find("\n}").unwrap_or_else(|| panic!("entry {kernel} has no end"));
    ptx[start..start + end].to_owned()
}

fn assert_count(kernel: &str, instructions: &[&str], expected: usize) {
    for module in &PROBES.modules {
        let body = entry(&ptx(module), kernel);
        let count: usize = instructions.iter().map(|instruction| body.matches(instruction).count()).sum();
        assert_eq!(count, expected, "{instructions:?} in {kernel} of {}:\n{body}", module.arch);
    }
}

#[test]
fn a_barrier_between_two_branches_is_not_duplicated() {
    for kernel in ["barrier_by_asm", "barrier_by_core", "barrier_by_intrinsic"] {
        assert_count(kernel, &["bar.sync", "barrier.sync", "barrier.cta.sync"], 1);
    }
}

#[test]
fn the_shuffles_of_a_warp_reduction_between_two_branches_are_not_duplicated() {
    for kernel in ["sum_by_asm", "sum_by_intrinsic"] {
        assert_count(kernel, &["shfl.sync"], 5);
    }
}

#[test]
fn a_shuffle_is_not_sunk_into_the_branch_that_uses_it() {
    for module in &PROBES.modules {
        for kernel in ["shuffle_by_asm", "shuffle_by_intrinsic"] {
            let body = entry(&ptx(module), kernel);
            let shuffle = body.find("shfl.sync").unwrap_or_else(|| panic!("no shuffle:\n{body}"));
            let branch = body.find("bra").unwrap_or_else(|| panic!("no branch:\n{body}"));
            assert!(shuffle < branch, "{kernel} of {} shuffles in a branch:\n{body}", module.arch);
        }
    }
}

#[test]
fn multiply_add_is_contracted_and_division_is_approximate() {
    assert_count("contraction", &["fma.rn.f32"], 1);
    assert_count("contraction", &["mul.", "add."], 0);
    assert_count("division", &["div.approx.", "rcp.approx."], 1);
    assert_count("division", &["div.rn", "div.full"], 0);
}

#[test]
fn tensor_maps_are_aligned_to_64_bytes() {
    assert_count("tensor_map", &[".param .align 64 .b8 tensor_map_param_1[128]"], 1);
}

/// A struct parameter is one PTX parameter with the C layout, which is how the host passes it.
#[test]
fn struct_parameters_are_passed_by_value_with_the_c_layout() {
    assert_count("scalars", &[".param .align 8 .b8 scalars_param_1[16]"], 1);
    // The two 4-byte fields at 8 and 12 are loaded together or separately.
    for field in ["[scalars_param_1]", "[scalars_param_1+8]"] {
        assert_count("scalars", &[field], 1);
    }
}

#[test]
fn launch_bounds_are_in_the_ptx_and_in_the_module() {
    assert_count("bounded", &[".maxntid 384", ".minnctapersm 1"], 2);
    let [ampere, hopper] = &PROBES.modules[..] else { panic!("two modules") };
    let hopper_only = entry(&ptx(hopper), "hopper_only");
    assert!(hopper_only.contains(".maxntid 128"), "{hopper_only}");
    let bounds = |module: &BuiltModule, name| kernel(module, name).map(|kernel| kernel.bounds);
    let bounded = LaunchBounds { threads: Some([384, 1, 1]), blocks_per_sm: Some(1), ..LaunchBounds::default() };
    let hopper_only = LaunchBounds { threads: Some([128, 1, 1]), ..LaunchBounds::default() };
    assert_eq!([bounds(ampere, "bounded"), bounds(hopper, "bounded")], [Some(bounded); 2]);
    assert_eq!([bounds(ampere, "hopper_only"), bounds(hopper, "hopper_only")], [None, Some(hopper_only)]);
}

fn kernel<'a>(module: &'a BuiltModule, name: &str) -> Option<&'a Kernel> {
    module.kernels.iter().find(|kernel| kernel.name == name)
}

#[test]
fn each_module_targets_its_architecture() {
    let archs: Vec<&str> = PROBES.modules.iter().map(|module| module.arch.as_str()).collect();
    assert_eq!(archs, ARCHS);
    for (module, marker) in PROBES.modules.iter().zip(["80;", "90;"]) {
        let text = ptx(module);
        assert!(text.contains(&format!(".target {}\n", module.arch)) && text.contains(".version 8.0\n"), "{text}");
        let body = entry(&text, "bounded");
        assert!(body.contains(marker), "cuda_arch is not {}:\n{body}", module.arch);
        assert!(!text.contains("// @launch"), "launch lines are left in the PTX");
    }
}

#[test]
fn watched_paths_are_the_compiled_crates_and_exist() {
    let fixtures = fixture("probes").canonicalize().expect("the fixture exists");
    let primitives = fixture("primitives").canonicalize().expect("the fixture exists");
    for path in
        [fixtures.join("Cargo.toml"), fixtures.join("src"), primitives.join("Cargo.toml"), primitives.join("src")]
    {
        assert!(PROBES.watched.contains(&path), "{} is not watched: {:?}", path.display(), PROBES.watched);
    }
    assert!(PROBES.watched.iter().all(|path| path.exists()), "{:?}", PROBES.watched);
}

#[test]
fn clean_kernels_cause_no_warning() {
    assert!(PROBES.warnings.is_empty(), "{:?}", PROBES.warnings);
}

#[test]
fn generated_file_defines_the_modules() {
    let out_dir = PROBES.modules[0].ptx.parent().expect("the module lies in a directory");
    let generated = std::fs::read_to_string(out_dir.join("kernels.rs")).expect("kernels.rs is written");
    for module in &PROBES.modules {
        assert!(generated.contains(&format!("include_str!(\"{}.ptx\")", module.arch)), "{generated}");
        let cubin = format!("include_bytes!(\"{}.cubin\")", module.arch);
        assert_eq!(generated.contains(&cubin), module.cubin.is_some(), "{generated}");
    }
    assert!(generated.contains("MODULES_MISSING: Option<&str> = None;"), "{generated}");
}

#[test]
fn error_of_an_undefined_function_names_it_and_its_caller() {
    let error = build("unresolved", &["sm_80"]).expect_err("it must not build").to_string();
    for part in ["sm_80", "defined_nowhere", "called by calls_it)"] {
        assert!(error.contains(part), "{error:?} lacks {part:?}");
    }
}

#[test]
fn warnings_report_local_memory_and_spills_by_kernel() {
    let built = build("local_memory", &["sm_80"]).unwrap_or_else(|error| panic!("{error}"));
    let about = |kernel: &str| built.warnings.iter().filter(|warning| warning.contains(kernel)).collect::<Vec<_>>();
    let [warning] = about("indexes_at_run_time")[..] else { panic!("one warning: {:?}", built.warnings) };
    assert!(warning.contains("local memory") && warning.contains("sm_80"), "{warning}");
    assert!(about("is_modest").is_empty(), "{:?}", built.warnings);
    let module = &built.modules[0];
    let resources = |name| kernel(module, name).and_then(|kernel| kernel.resources);
    if module.cubin.is_some() {
        let [warning] = about("keeps_too_much")[..] else { panic!("one warning: {:?}", built.warnings) };
        assert!(warning.contains("spills at 32 registers"), "{warning}");
        let spilling = resources("keeps_too_much").expect("ptxas reports each kernel");
        assert!(spilling.registers <= 32 && spilling.spill_stores > 0 && spilling.spill_loads > 0, "{spilling:?}");
        assert!(resources("indexes_at_run_time").is_some_and(|resources| resources.stack >= 64));
    } else {
        assert_eq!(resources("is_modest"), None);
    }
}

#[test]
fn every_module_has_a_cubin_if_ptxas_is_found() {
    let found = find_cuda_tool("ptxas", fixture("probes").ancestors().find(|path| path.join(".tools").is_dir()));
    for module in &PROBES.modules {
        assert_eq!(module.cubin.is_some(), found.is_some());
        if let Some(cubin) = &module.cubin {
            let bytes = std::fs::read(cubin).unwrap_or_else(|error| panic!("{}: {error}", cubin.display()));
            assert!(bytes.starts_with(b"\x7fELF"));
        }
        assert!(module.kernels.iter().all(|kernel| kernel.resources.is_some() == found.is_some()));
    }
}

#[test]
fn error_of_device_code_contains_the_compiler_message() {
    let error = build("broken", &["sm_80"]).expect_err("it must not build").to_string();
    for part in ["compiling the device crate", "sm_80", "a_name_that_is_not_there", "src/lib.rs", "command: "] {
        assert!(error.contains(part), "{error:?} lacks {part:?}");
    }
}

#[test]
fn an_invalid_architecture_is_rejected() {
    let error = build("probes", &["hopper"]).expect_err("no such architecture").to_string();
    assert!(error.contains("\"hopper\"") && error.contains("sm_90a"), "{error}");
}

/// Run by the next test in another process with a changed environment.
#[test]
#[ignore = "run by the_environment_of_the_host_build_does_not_affect_the_device_build"]
fn builds_in_the_given_environment() {
    let built = build("probes", &["sm_80"]).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(built.modules.len(), 1);
}

#[test]
fn the_environment_of_the_host_build_does_not_affect_the_device_build() {
    let test = std::env::current_exe().expect("a test has a path");
    let output = Command::new(test)
        .args(["--exact", "builds_in_the_given_environment", "--ignored"])
        .env("RUSTFLAGS", "--no-such-flag")
        .env("CARGO_ENCODED_RUSTFLAGS", "--no-such-flag")
        .env("CARGO_BUILD_RUSTFLAGS", "--no-such-flag")
        .env("RUSTC", "/nonexistent/rustc")
        .env("RUSTC_WRAPPER", "/nonexistent/wrapper")
        .env("RUSTUP_TOOLCHAIN", "no-such-toolchain")
        .env("CARGO_BUILD_TARGET", "no-such-target")
        .env("CARGO_TARGET_DIR", "/nonexistent/target")
        .output()
        .expect("the test starts");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}
