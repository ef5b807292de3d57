//! Runs every kernel in the emulator with every access checked, and checks the registry, the README and the command line.

use cuda_std::emulate::Report;
use kernels::registry::{self, FAMILIES, Kernel};
use kernels::run::{Cli, emulate};
use rayon::iter::{IntoParallelRefIterator, ParallelIterator};
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Returns a file of the repository.
fn file(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

fn kernels() -> Vec<Kernel> {
    registry::all().map(|(_, kernel)| kernel).collect()
}

#[test]
fn every_kernel_matches_its_reference() {
    let correct: Vec<_> = kernels().into_iter().filter(|kernel| kernel.fault.is_none()).collect();
    assert!(correct.len() >= 45);
    let run = |kernel: &Kernel| emulate(kernel).err().map(|error| format!("{}: {error:#}", kernel.name));
    let failures: Vec<_> = correct.par_iter().filter_map(run).collect();
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn planted_faults_are_reported_with_kernel_line_and_array() {
    // The array that the report names, and whether the marked line is a part of it. A deadlock names no array.
    let arrays = ["sums", "inp", "stage", "SwizzledTile", "counts", "sync_threads", "elements"];
    let planted: Vec<_> = kernels().into_iter().filter(|kernel| kernel.fault.is_some()).collect();
    assert_eq!(planted.len(), arrays.len());
    for (kernel, array) in planted.iter().zip(arrays) {
        let error = emulate(kernel).expect_err(kernel.name);
        let report = error.downcast_ref::<Report>().unwrap_or_else(|| panic!("{}: {error:#}", kernel.name));
        assert_eq!((report.kernel, Some(report.fault)), (kernel.name, kernel.fault));
        let source = std::fs::read_to_string(file(kernel.source)).unwrap();
        let marked = source.lines().position(|line| line.contains("// fault: ")).unwrap() + 1;
        let (text, at) = (report.to_string(), format!("{}:{marked}:", kernel.source));
        assert!(text.contains(&at) && text.contains(array), "{at} {array}: {text}");
    }
}

/// A launch finds its kernel by name in the modules of this example and of training.
#[test]
fn kernel_names_differ_from_those_of_training() {
    let names = |modules: &'static [cuda_builder::Module]| {
        modules.iter().flat_map(|module| module.kernels).map(|kernel| &*kernel.name).collect::<HashSet<_>>()
    };
    let (own, of_training) = (names(kernels::device::modules()), names(engine::cuda::EMBEDDED.modules().unwrap()));
    assert!(
        own.contains("gelu_naive") && of_training.contains("activation_forward_bf16_gelu"),
        "{own:?} {of_training:?}"
    );
    let common: Vec<_> = own.intersection(&of_training).collect();
    assert!(common.is_empty(), "expected different names, found {common:?} twice");
}

#[test]
fn registry_is_consistent() {
    let kernels = kernels();
    let numbers: Vec<_> = kernels.iter().map(|kernel| kernel.number).collect();
    assert_eq!(numbers, (1..=kernels.len() as u32).collect::<Vec<_>>(), "numbers are consecutive");
    let names: HashSet<_> =
        kernels.iter().map(|kernel| kernel.name).chain(FAMILIES.map(|family| family.name)).collect();
    assert_eq!(names.len(), kernels.len() + FAMILIES.len(), "names of kernels and families are unique");
    for Kernel { name, idea, source, .. } in &kernels {
        let text = std::fs::read_to_string(file(source)).unwrap_or_else(|error| panic!("{name}: {source}: {error}"));
        assert!(idea.ends_with('.') && !idea.contains(". "), "{name}: the idea is one sentence: {idea}");
        if source.starts_with("examples/") {
            for part in
                if source.contains("/faults/") { ["Problem", "Fault", "Report"] } else { ["Problem", "Idea", "Limit"] }
            {
                assert!(
                    text.contains(&format!("\n//! {part}: ")),
                    "{source}: expected a paragraph that begins with {part}"
                );
            }
        }
    }
}

/// Every file of the device crate that defines a kernel is in the registry, except those that only help others.
#[test]
fn every_source_file_is_registered() {
    let registered: HashSet<_> = kernels().iter().map(|kernel| kernel.source).collect();
    for family in std::fs::read_dir(file("examples/kernels/gpu/src")).unwrap() {
        let Ok(files) = std::fs::read_dir(family.unwrap().path()) else { continue };
        for path in files.map(|entry| entry.unwrap().path()).filter(|path| !path.ends_with("mod.rs")) {
            let (directory, name) = (path.parent().unwrap().file_name().unwrap(), path.file_name().unwrap());
            let source = format!("examples/kernels/gpu/src/{}/{}", directory.display(), name.display());
            assert!(registered.contains(source.as_str()), "{source}: expected a kernel of the registry, found none");
        }
    }
}

#[test]
fn readme_has_the_tables_of_the_registry() {
    let readme = std::fs::read_to_string(file("examples/kernels/README.md")).unwrap();
    assert!(
        readme.contains(registry::markdown().trim()),
        "README.md: expected the output of `cargo run --release -p kernels -- list --markdown`, found other tables; paste it"
    );
}

#[test]
fn a_wrong_result_is_an_error() {
    let mut session = kernels::session::Session::emulated();
    let gelu = registry::find("gelu_naive").unwrap()[0].1;
    (gelu.setup)(&mut session).unwrap();
    session.emulate().unwrap();
    session.verify().unwrap();
    let out = session.zeroed::<f32>("other", 3).unwrap();
    session.expect("other", out, 3, kernels::session::Tolerance::F32, |i| i as f64);
    let text = session.verify().unwrap_err().to_string();
    assert!(text.starts_with("other[1]: expected 1.000000e0 +- ") && text.contains("found 0.000000e0"), "{text}");
}

/// Runs the program and returns its exit code, standard output and standard error.
fn program(arguments: &[&str]) -> (Option<i32>, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_kernels")).args(arguments).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

#[test]
fn program_runs_kernels_by_number_name_and_family() {
    let directory = tempfile::tempdir().unwrap();
    let json = directory.path().join("out.json");
    let path = json.to_str().unwrap();
    let (code, out, err) = program(&["run", "2", "gelu", "gelu_naive", "--device", "cpu", "--json", path]);
    assert_eq!((code, err.as_str()), (Some(0), ""));
    assert_eq!(out.matches("gelu_bf16").count(), 1, "each kernel runs once: {out}");
    let results: serde_json::Value = serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
    let rows = results["rows"].as_array().unwrap();
    assert_eq!(rows.len(), registry::find("gelu").unwrap().len());
    assert_eq!(
        (&rows[0]["number"], &rows[0]["name"], &rows[0]["checked"]),
        (&2.into(), &"gelu_bf16".into(), &3000.into())
    );
    assert_eq!(results["machine"], "emulator");

    let (code, out, err) = program(&["run", "fault_missing_bound", "gelu_naive", "--device", "cpu", "--json", path]);
    assert_eq!(code, Some(3), "{err}");
    assert!(out.contains("FAILED: kernel fault_missing_bound"), "{out}");
    let results: serde_json::Value = serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
    assert_eq!(results["rows"].as_array().unwrap().len(), 1, "the kernels after a failure run");
    assert!(err.starts_with("error: fault_missing_bound: kernel fault_missing_bound, block (1, 0, 0)"), "{err}");
    let (code, _, err) = program(&["run", "gelu_fast", "--device", "cpu"]);
    assert_eq!(code, Some(1));
    assert!(err.starts_with("error: kernel: expected a number from 1 to ") && err.contains("found gelu_fast"), "{err}");
    let (code, _, err) = program(&["run", "gelu_naive", "--device", "cpu", "--cudnn", path]);
    assert_eq!(code, Some(1));
    assert!(err.contains("expected the output of examples/kernels/cudnn.py"), "{err}");
    assert_eq!(program(&["run"]).0, Some(2));
    let (code, out, _) = program(&["check", "gelu", "fault_missing_bound"]);
    assert_eq!((code, out.lines().count()), (Some(0), 7), "{out}");
    let (code, out, _) = program(&["list"]);
    assert_eq!(code, Some(0));
    assert!(kernels().iter().all(|kernel| out.contains(kernel.name)), "{out}");
}

#[test]
fn arguments_are_valid() {
    <Cli as clap::CommandFactory>::command().debug_assert();
}
