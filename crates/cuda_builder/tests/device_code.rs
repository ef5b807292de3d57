//! Builds device crates and checks the PTX and the reported resources.
//!
//! The tests need a device toolchain; without one they fail with the command that installs it. Checks that need `ptxas` are
//! skipped without it.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

use cuda_builder::{Built, BuiltModule, CudaBuilder, Error, Kernel, LaunchBounds, Toolchain, find_cuda_tool};

const ARCHS: [&str; 2] = ["sm_80", "sm_90a"];

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

fn build(name: &str, archs: &[&str]) -> Result<Built, Error> {
    let out_dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}", archs.join("-")));
    let builder = CudaBuilder::new(fixture(name)).out_dir(out_dir).cubins(true);
    // The other fixtures have no views: their kernels access memory through pointers.
    let checked = ["unchecked", "unsafe_code", "address", "features", "shared_memory"].contains(&name);
    let builder = if checked { builder } else { builder.allow_unchecked() };
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
fn multiply_add_is_contracted() {
    assert_count("contraction", &["fma.rn.f32"], 1);
    assert_count("contraction", &["mul.", "add."], 0);
}

#[test]
fn division_is_exact_unless_the_builder_makes_it_approximate() {
    assert_count("division", &["div.rn.f32"], 1);
    assert_count("division", &["div.approx.", "div.full", "rcp."], 0);
    let out_dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("probes-approximate");
    let builder = CudaBuilder::new(fixture("probes")).out_dir(out_dir).cubins(false).arch("sm_80");
    let built = builder.approximate_division().allow_unchecked().build().unwrap_or_else(|error| panic!("{error}"));
    let body = entry(&ptx(&built.modules[0]), "division");
    let count = |instructions: &[&str]| -> usize { instructions.iter().map(|i| body.matches(i).count()).sum() };
    assert_eq!((count(&["div.approx.", "rcp.approx."]), count(&["div.rn", "div.full"])), (1, 0), "{body}");
}

/// An approximate division would be off by a whole divisor: 0.5 % 0.1.
#[test]
fn remainders_call_an_exact_function() {
    for (kernel, function) in
        [("remainder", "cuda_builder_remainder_f32"), ("remainder_f64", "cuda_builder_remainder_f64")]
    {
        assert_count(kernel, &[function], 1);
        assert_count(kernel, &["div.", "cvt.rzi"], 0);
    }
}

/// Compiles the function for this machine and compares it with that of the C library, bit for bit.
#[test]
fn the_remainder_function_is_that_of_the_c_library() {
    const PROGRAM: &str = r#"
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
float cuda_builder_remainder_f32(float, float);
double cuda_builder_remainder_f64(double, double);
static uint64_t state = 88172645463325252u;
static uint64_t next(void) { state ^= state << 13; state ^= state >> 7; return state ^= state << 17; }
int main(void) {
    static const uint64_t special[] = {0, 1, 2, 0x7fffff, 0x800000, 0x3f800000, 0x7f7fffff, 0x7f800000, 0x7fc00000, 0x80000000,
        0x3dcccccd, 0x3f000000, 0xfffffffffffff, 0x10000000000000, 0x3ff0000000000000, 0x7fefffffffffffff, 0x7ff0000000000000,
        0x7ff8000000000000, 0x8000000000000000, 0x3fb999999999999a};
    const int n = sizeof special / sizeof *special;
    for (long i = 0; i < 4000000; i++) {
        uint64_t a = i < n * n ? special[i / n] : next(), b = i < n * n ? special[i % n] : next();
        // Half of the pairs have similar exponents.
        if (i % 2 && i >= n * n) b = (a & 0xfff0000000000000u) + (b & 0xfffffffffffff) - ((b & 15) << 52);
        uint32_t af = i % 4 < 2 ? a : a >> 32, bf = i % 4 < 2 ? b : b >> 32;
        float x, y; double u, v;
        memcpy(&x, &af, 4); memcpy(&y, &bf, 4); memcpy(&u, &a, 8); memcpy(&v, &b, 8);
        float got = cuda_builder_remainder_f32(x, y), want = fmodf(x, y);
        double got64 = cuda_builder_remainder_f64(u, v), want64 = fmod(u, v);
        if (memcmp(&got, &want, 4) && !(isnan(got) && isnan(want))) { printf("%a %% %a: expected %a, found %a\n", x, y, want, got); return 1; }
        if (memcmp(&got64, &want64, 8) && !(isnan(got64) && isnan(want64))) { printf("%a %% %a: expected %a, found %a\n", u, v, want64, got64); return 1; }
    }
    return 0;
}
"#;
    let toolchain = Toolchain::find().unwrap_or_else(|error| panic!("this test needs LLVM: {error}"));
    let scratch = tempfile::tempdir().expect("a temporary directory");
    let at = |name: &str| scratch.path().join(name);
    let run = |command: &mut Command| {
        let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
        let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{command:?}: {text}");
    };
    let functions = include_str!("../src/remainder.ll").replace("define internal", "define");
    std::fs::write(at("remainder.ll"), functions).expect("a file");
    std::fs::write(at("main.c"), PROGRAM).expect("a file");
    let mut llc = Command::new(toolchain.llvm_bin.join("llc"));
    run(llc
        .args(["-O2", "-mtriple=x86_64-unknown-linux-gnu", "-filetype=obj", "-relocation-model=pic", "-o"])
        .arg(at("remainder.o"))
        .arg(at("remainder.ll")));
    run(Command::new("cc").args(["-O1", "-o"]).arg(at("compare")).args([at("main.c"), at("remainder.o")]).arg("-lm"));
    run(&mut Command::new(at("compare")));
}

#[test]
fn atomics_have_the_fences_of_their_ordering() {
    for (kernel, sequential, others) in
        [("relaxed", 0, 0), ("acquires_and_releases", 0, 2), ("sequentially_consistent", 1, 1)]
    {
        assert_count(kernel, &["atom.", "red."], 1);
        assert_count(kernel, &["fence.sc."], sequential);
        assert_count(kernel, &["fence.acq_rel.", "fence.acquire.", "fence.release."], others);
    }
}

#[test]
fn the_name_of_a_crate_may_begin_with_lib() {
    let built = build("libprobe", &["sm_80"]).unwrap_or_else(|error| panic!("{error}"));
    assert!(kernel(&built.modules[0], "writes").is_some());
}

#[test]
fn error_of_llvm_names_the_kernels() {
    let error = build("unlowerable", &["sm_80"]).expect_err("it must not build").to_string();
    assert!(error.starts_with("kernels converts_128_bits, takes_a_sine: lowering to PTX for sm_80 failed"), "{error}");
}

/// Run by the next test in the environments of build scripts.
#[test]
#[ignore = "run by builders_do_not_build_the_package_that_calls_them"]
fn prints_the_error_of_a_builder_for_this_directory() {
    let error = CudaBuilder::new(".").arch("sm_80").out_dir(env!("CARGO_TARGET_TMPDIR")).build().expect_err("an error");
    println!("error: {error:?}");
}

#[test]
fn builders_do_not_build_the_package_that_calls_them() {
    let test = std::env::current_exe().expect("a test has a path");
    for (variable, expected) in [
        ("OUT_DIR", "expected a package other than the one that builds it, found the same package"),
        ("CUDA_BUILDER_RUNNING", "expected device crates without a build script that calls CudaBuilder"),
    ] {
        let mut command = Command::new(&test);
        command.args(["--exact", "prints_the_error_of_a_builder_for_this_directory", "--ignored", "--nocapture"]);
        let output = command.env(variable, env!("CARGO_TARGET_TMPDIR")).output().expect("the test starts");
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains(expected), "{variable}: {text}");
    }
}

#[test]
fn atomics_and_fences_of_core_and_mutable_statics_are_refused_with_their_lines() {
    let error = build("unchecked", &["sm_80"]).expect_err("it must not build").to_string();
    for part in [
        "src/lib.rs:12: counts_in_a_static uses an atomic of core: use the atomics of cuda_std's views",
        "src/lib.rs:8: unchecked::COUNT is a mutable static",
        "src/lib.rs:23: fences uses a fence of core: use cuda_std::fence::device",
        "CudaBuilder::allow_unchecked",
    ] {
        assert!(error.contains(part), "{error:?} lacks {part:?}");
    }
    assert!(!error.contains("is_checked"), "{error}");
}

#[test]
fn the_error_about_unsafe_code_names_the_ways_out() {
    let error = build("unsafe_code", &["sm_80"]).expect_err("it must not build").to_string();
    assert!(error.contains("usage of an `unsafe` block") && error.contains("src/lib.rs:8"), "{error}");
    for way_out in ["the methods of the views", "#[allow(unsafe_code)]", "CudaBuilder::allow_unchecked"] {
        assert!(error.contains(way_out), "{error:?} lacks {way_out:?}");
    }
}

#[test]
fn allow_unchecked_allows_unsafe_code_in_kernels() {
    let out_dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("unsafe_code-allowed");
    let builder = CudaBuilder::new(fixture("unsafe_code")).out_dir(out_dir).cubins(false).arch("sm_80");
    let built = builder.allow_unchecked().build().unwrap_or_else(|error| panic!("{error}"));
    assert!(ptx(&built.modules[0]).contains(".entry reads_a_pointer("));
}

#[test]
fn kernels_cannot_make_views_of_addresses() {
    let error = build("address", &["sm_80"]).expect_err("it must not build").to_string();
    assert!(error.contains("from_address") && error.contains("src/lib.rs:8"), "{error}");
}

/// Each primitive compiles to its instruction, and the kernels are accepted by ptxas.
#[test]
fn primitives_outside_of_gpu_compile_to_their_instructions() {
    let built = build("features", &["sm_80", "sm_90", "sm_90a"]).unwrap_or_else(|error| panic!("{error}"));
    let expected: &[(&str, &[(&str, usize)])] = &[
        ("dimensions", &[(".maxntid 16, 4, 2", 1), ("%laneid", 1), ("%tid.y", 1), ("%tid.z", 1)]),
        ("shuffles", &[("shfl.sync.bfly", 2), ("shfl.sync.up", 1)]),
        ("masks", &[("activemask.b32", 1), ("bar.warp.sync", 1), ("vote.sync.ballot", 1), ("shfl.sync.idx", 1)]),
        (
            "reductions",
            &[
                ("match.any.sync.b32", 1),
                ("match.all.sync.b32", 1),
                ("redux.sync.add.u32", 1),
                ("redux.sync.min.u32", 1),
                ("redux.sync.max.u32", 1),
                ("redux.sync.add.s32", 1),
                ("redux.sync.min.s32", 1),
                ("redux.sync.max.s32", 1),
                ("redux.sync.and.b32", 1),
                ("redux.sync.or.b32", 1),
                ("redux.sync.xor.b32", 1),
            ],
        ),
        ("scans", &[("bar.sync", 2), ("shfl.sync.up", 11), ("%tid.y", 1)]),
        ("sorts", &[("bar.sync", 9), ("vote.sync.ballot", 20), ("shfl.sync.up", 22), ("%tid.y", 0), ("%ntid.y", 0)]),
        ("barriers", &[("bar.red.or.pred", 1), ("bar.red.and.pred", 1), ("bar.red.popc.u32", 1)]),
        (
            "atomics",
            &[
                ("atom.add.relaxed.cta.shared.u32", 1),
                ("atom.min.relaxed.cta.shared.u32", 1),
                ("atom.cas.relaxed.cta.shared.b32", 1),
                ("atom.add.relaxed.cta.shared.f64", 1),
                ("atom.max.relaxed.gpu.global.s32", 1),
                ("atom.exch.relaxed.gpu.global.b32", 1),
                ("atom.add.relaxed.gpu.global.u64", 1),
                ("atom.add.relaxed.gpu.global.f64", 1),
            ],
        ),
        (
            "checked_views",
            &[
                ("cp.async.cg.shared.global", 1),
                ("trap;", 5), // 4 without the check of the copy
                ("atom.exch.relaxed.gpu.global.b32", 1),
                ("atom.max.relaxed.gpu.global.u32", 1),
            ],
        ),
        (
            "merged_reads",
            &[("ld.global.v4", 1), ("ld.global.b32", 1), ("ld.shared.v4", 1), ("volatile", 0), ("st.shared.v4", 1)],
        ),
        (
            "ordered",
            &[
                ("ld.relaxed.gpu.global.u32", 1),
                ("ld.acquire.gpu.global.u32", 2),
                ("st.relaxed.gpu.global.u32", 1),
                ("st.release.gpu.global.u32", 1),
                ("ld.relaxed.cta.shared.u32", 1),
                ("ld.acquire.cta.shared.u32", 1),
                ("st.relaxed.cta.shared.u32", 1),
                ("st.release.cta.shared.u32", 1),
                ("ld.relaxed.gpu.global.u64", 1),
                ("ld.acquire.gpu.global.u64", 1),
                ("st.relaxed.gpu.global.u64", 1),
                ("st.release.gpu.global.u64", 1),
                ("atom.and.relaxed.gpu.global.b32", 1),
                ("atom.or.relaxed.gpu.global.b32", 1),
                ("atom.xor.relaxed.gpu.global.b64", 1),
                ("fence.acq_rel.cta;", 1),
                ("fence.acq_rel.gpu;", 1),
                ("fence.acq_rel.sys;", 1),
                ("fence.sc.cta;", 1),
                ("fence.sc.gpu;", 1),
                ("fence.sc.sys;", 1),
                ("red.release.gpu.global.add.u32", 1),
            ],
        ),
        ("copies_of_mutable", &[("cp.async.cg.shared.global", 1), ("trap;", 3)]), // 2 without the check of the source
        ("halves", &[("cvt.rn.f16x2.f32", 4), ("cvt.f32.f16", 8)]),
        ("functions", &[("sqrt.rn.f64", 1)]),
        ("approximations", &[("sin.approx.ftz.f32", 1), ("cos.approx.ftz.f32", 1), ("nanosleep.u32", 1)]),
        ("prints", &[("vprintf", 1), ("trap;", 1), ("%clock64", 1), ("%globaltimer", 1)]),
        ("large_parameter", &[("large_parameter_param_1[2008]", 1)]),
        ("divides_128_bits", &[("call", 0)]),
        ("orders_its_own_accesses", &[("st.global", 2), ("fence", 0)]),
    ];
    for module in &built.modules {
        let text = ptx(module);
        for (kernel, instructions) in expected {
            let body = entry(&text, kernel);
            for (instruction, count) in *instructions {
                let found = body.lines().filter(|line| line.contains(instruction)).count();
                assert_eq!(found, *count, "{instruction} in {kernel} of {}:\n{body}", module.arch);
            }
        }
    }
    let names = |name| built.modules.iter().map(|module| kernel(module, name).is_some()).collect::<Vec<_>>();
    assert_eq!((names("with_tma"), names("with_wgmma")), (vec![false, true, true], vec![false, false, true]));
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
fn kernels_with_more_shared_memory_than_an_architecture_has_are_refused() {
    let error = build("shared_memory", &["sm_80"]).expect_err("it must not build").to_string();
    for part in [
        "sm_80: kernel needs_200_000_bytes: expected at most 166912 bytes of shared memory per block, found 200000; ",
        "kernel tiled_large: expected at most 166912 bytes of shared memory per block, found 174080; use smaller",
    ] {
        assert!(error.contains(part), "{error:?} lacks {part:?}");
    }
    for other in ["fits_everywhere", "tiled_small", "depends_on_an_argument"] {
        assert!(!error.contains(other), "{error}");
    }
    let built = build("shared_memory", &["sm_90"]).unwrap_or_else(|error| panic!("{error}"));
    let text = ptx(&built.modules[0]);
    assert!(text.contains(".entry needs_200_000_bytes(") && !text.contains("__cuda_shared_bytes"), "{text}");
}

#[test]
fn static_shared_memory_beyond_its_limit_is_refused_without_ptxas() {
    let out_dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("shared_memory-fixed");
    let builder = CudaBuilder::new(fixture("shared_memory")).out_dir(out_dir).cubins(false).arch("sm_90");
    let error = builder.allow_unchecked().features(["fixed"]).build().expect_err("it must not build").to_string();
    let expected = "kernel declares_50_000_bytes: expected at most 49152 bytes of static shared memory, found 50000; ";
    assert!(error.contains(expected), "{error}");
}

#[test]
fn warnings_report_local_memory_and_spills_with_variables_and_lines() {
    let built = build("local_memory", &["sm_80"]).unwrap_or_else(|error| panic!("{error}"));
    let about = |kernel: &str| built.warnings.iter().filter(|warning| warning.contains(kernel)).collect::<Vec<_>>();
    let [warning] = about("indexes_at_run_time")[..] else { panic!("one warning: {:?}", built.warnings) };
    let expected = "sm_80: kernel indexes_at_run_time (src/lib.rs:10) uses 64 bytes of local memory per thread: `counts` \
                    (src/lib.rs:11) is indexed at run time (src/lib.rs:13); index it by constants, or unroll the loop that indexes it";
    assert_eq!(warning, expected);
    assert!(about("is_modest").is_empty(), "{:?}", built.warnings);
    let module = &built.modules[0];
    let resources = |name| kernel(module, name).and_then(|kernel| kernel.resources);
    if module.cubin.is_some() {
        let [warning] = about("keeps_too_much")[..] else { panic!("one warning: {:?}", built.warnings) };
        for part in [
            "keeps_too_much (src/lib.rs:21) spills at 32 registers",
            "its largest variable is `sums` (src/lib.rs:22) of 256 bytes; raise its limit of registers",
        ] {
            assert!(warning.contains(part), "{warning:?} lacks {part:?}");
        }
        assert!(!warning.contains("index"), "{warning}");
        let spilling = resources("keeps_too_much").expect("ptxas reports each kernel");
        assert!(spilling.registers <= 32 && spilling.spill_stores > 0 && spilling.spill_loads > 0, "{spilling:?}");
        assert!(resources("indexes_at_run_time").is_some_and(|resources| resources.stack >= 64));
    } else {
        assert_eq!(resources("is_modest"), None);
    }
}

/// The second build reuses the module with debug information. Without ptxas, the PTX has the local memory.
#[test]
fn warnings_about_local_memory_need_no_ptxas_and_fit_their_cause() {
    let build = |out_dir: &str| {
        let out_dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(out_dir);
        let builder = CudaBuilder::new(fixture("features")).out_dir(out_dir).cubins(false).arch("sm_89");
        builder.build().unwrap_or_else(|error| panic!("{error}")).warnings
    };
    let warnings = build("features-ptx");
    let about = |kernel: &str| warnings.iter().find(|warning| warning.contains(&format!("kernel {kernel} ")));
    let line = |code: &str| {
        let lines = include_str!("fixtures/features/src/lib.rs").lines().collect::<Vec<_>>();
        lines.iter().position(|line| line.contains(code)).unwrap_or_else(|| panic!("no line has {code}")) + 1
    };
    let prints = format!("the values that gpu_println! prints (src/lib.rs:{})", line("gpu_println!("));
    for (kernel, place) in [("prints", prints), ("functions", format!("(src/lib.rs:{})", line("math::pow")))] {
        let warning = about(kernel).unwrap_or_else(|| panic!("no warning about {kernel}: {warnings:?}"));
        assert!(warning.contains(&place) && !warning.contains("unroll"), "{place}: {warning}");
    }
    assert_eq!(build("features-ptx-again"), warnings);
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
    assert!(!error.contains("the emulator cannot check"), "{error}");
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
