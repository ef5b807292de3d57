//! Statements of the documents about the program: the commands of docs/train.md from text to a Hugging Face directory, at a smaller
//! size, the budget of packages in CONTRIBUTING.md, and the order of crates in docs/internals/architecture.md.

use std::collections::{BTreeMap, BTreeSet};
use std::env;
use std::fs;
use std::path::Path;
use std::process::Command;

/// Flags of the guide with values that make the training run small.
const SMALL: &[(&str, &str)] = &[
    ("--layers", "1"),
    ("--batch", "2"),
    ("--seq", "16"),
    ("--steps", "4"),
    ("--warmup", "1"),
    ("--val-every", "4"),
    ("--val-batches", "2"),
];

/// Returns the commands of the guide's section for the CPU: its first indented lines, with continuations joined.
fn commands(guide: &str) -> Vec<Vec<String>> {
    let section = guide.split("## All steps on a CPU\n").nth(1).expect("docs/train.md has a section for the CPU");
    let lines =
        section.lines().skip_while(|line| !line.starts_with("    ")).take_while(|line| line.starts_with("    "));
    let block = lines.collect::<Vec<_>>().join("\n").replace("\\\n", " ");
    block.lines().map(|line| shlex::split(line).expect("a shell command")).collect()
}

#[test]
fn commands_from_text_to_a_hugging_face_directory_work() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let directory = tempfile::tempdir().unwrap();
    // A part of the text that the guide names.
    for name in ["docs", "crates"] {
        fs::create_dir(directory.path().join(name)).unwrap();
    }
    fs::copy(root.join("docs/internals/architecture.md"), directory.path().join("docs/architecture.md")).unwrap();
    fs::copy(root.join("crates/rng/src/lib.rs"), directory.path().join("crates/rng.rs")).unwrap();

    let mut commands = commands(&fs::read_to_string(root.join("docs/train.md")).unwrap());
    assert_eq!(commands.len(), 6, "{commands:?}");
    for command in &mut commands {
        if command[1] == "train" {
            for (flag, value) in SMALL {
                let at = command.iter().position(|word| word == flag).unwrap();
                (*value).clone_into(&mut command[at + 1]);
            }
        }
        let (program, arguments) = command.split_first().unwrap();
        assert_eq!(program, "llm-rs");
        let mut run = Command::new(env!("CARGO_BIN_EXE_llm-rs"));
        run.args(arguments).current_dir(directory.path());
        if arguments[0] == "sample" {
            run.args(["--tokens", "4"]);
        }
        let output = run.output().unwrap();
        assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    }

    let out = commands[5].last().unwrap();
    for file in ["config.json", "model.safetensors", "tokenizer.json", "generation_config.json"] {
        assert!(directory.path().join(out).join(file).is_file(), "{out}/{file}");
    }
}

/// Returns the packages that the program depends on, as `name version`.
fn packages(root: &Path) -> BTreeSet<String> {
    let arguments =
        "tree --locked --offline --edges normal,build --package host --prefix none --target x86_64-unknown-linux-gnu";
    let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo).args(arguments.split(' ')).current_dir(root).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let lines = String::from_utf8(output.stdout).unwrap();
    // Behind name and version are the path, the kind, and a mark of a package that was listed before.
    lines.lines().map(|line| line.split(' ').take(2).collect::<Vec<_>>().join(" ")).collect()
}

#[test]
fn the_program_has_no_more_packages_than_contributing_allows() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let text = fs::read_to_string(root.join("CONTRIBUTING.md")).unwrap();
    let section = text.split("## Dependencies\n").nth(1).and_then(|rest| rest.split("\n## ").next()).unwrap();
    let budget = section.split("at most ").nth(1).and_then(|rest| rest.split(' ').next()).unwrap();
    let budget: usize = budget.parse().unwrap();
    let packages = packages(root);
    assert!(
        packages.len() <= budget,
        "packages of the program: expected at most {budget}, found {}; use fewer dependencies or change the number in CONTRIBUTING.md",
        packages.len()
    );
    // The table has only packages that the program still has.
    let rows = section.lines().filter(|line| line.starts_with("| `"));
    let named: Vec<&str> = rows.flat_map(|row| row.split('|').nth(1).unwrap().split('`').skip(1).step_by(2)).collect();
    assert!(named.len() > 5, "{named:?}");
    for name in named {
        let begins = |package: &String| package.split(' ').next() == Some(name);
        assert!(packages.iter().any(begins), "CONTRIBUTING.md, Dependencies: {name} is not a package of the program");
    }
}

/// Returns the manifest of a directory.
fn manifest(directory: &Path) -> toml::Table {
    fs::read_to_string(directory.join("Cargo.toml")).unwrap().parse().unwrap()
}

#[test]
fn crates_depend_only_on_those_above_them_in_the_architecture() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let text = fs::read_to_string(root.join("docs/internals/architecture.md")).unwrap();
    let section = text.split("### Crate dependencies\n").nth(1).and_then(|rest| rest.split("\n### ").next()).unwrap();
    let rows = section.lines().filter(|line| line.starts_with("| `"));
    // Crates in one row may depend on each other.
    let mut rank = BTreeMap::new();
    for (row, line) in rows.enumerate() {
        rank.extend(line.split('|').nth(1).unwrap().split('`').skip(1).step_by(2).map(|name| (name.to_owned(), row)));
    }
    let listed = |path: &str| {
        *rank.get(path).unwrap_or_else(|| panic!("docs/internals/architecture.md: no crate {path} in the list"))
    };

    let workspace = manifest(root)["workspace"]["dependencies"].as_table().unwrap().clone();
    let path_of = |name: &str| workspace.get(name)?.get("path")?.as_str().map(str::to_owned);
    let mut edges = 0;
    for directory in rank.keys() {
        let manifest = manifest(&root.join(directory));
        let tables =
            ["dependencies", "build-dependencies"].into_iter().filter_map(|table| manifest.get(table)?.as_table());
        for path in tables.flat_map(|table| table.keys()).filter_map(|name| path_of(name)) {
            assert!(
                listed(&path) <= listed(directory),
                "docs/internals/architecture.md: {directory} depends on {path}, which is below it"
            );
            edges += 1;
        }
    }
    assert!(edges > 50, "found {edges} dependencies");
    for entry in fs::read_dir(root.join("crates")).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        // A replacement of a dependency, not a part of the program.
        if name != "find_cuda_helper" {
            listed(&format!("crates/{name}"));
        }
    }
}
