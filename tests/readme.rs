//! The README's commands from text to a Hugging Face directory, as written there, at a smaller size.

use std::fs;
use std::path::Path;
use std::process::Command;

/// Flags of the README with values that make the training run small.
const SMALL: &[(&str, &str)] = &[
    ("--layers", "1"),
    ("--batch", "2"),
    ("--seq", "16"),
    ("--steps", "4"),
    ("--warmup", "1"),
    ("--val-every", "4"),
    ("--val-batches", "2"),
];

/// Returns the commands of the README's section for the CPU: the indented lines after it, with continuations joined.
fn commands(readme: &str) -> Vec<Vec<String>> {
    let section = readme.split("**On a CPU**").nth(1).expect("the README has a section for the CPU");
    let lines =
        section.lines().skip_while(|line| !line.starts_with("    ")).take_while(|line| line.starts_with("    "));
    let block = lines.collect::<Vec<_>>().join("\n").replace("\\\n", " ");
    block.lines().map(|line| shlex::split(line).expect("a shell command")).collect()
}

#[test]
fn commands_from_text_to_a_hugging_face_directory_work() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let directory = tempfile::tempdir().unwrap();
    // A part of the text that the README names.
    for name in ["docs", "crates"] {
        fs::create_dir(directory.path().join(name)).unwrap();
    }
    fs::copy(root.join("docs/testing.md"), directory.path().join("docs/testing.md")).unwrap();
    fs::copy(root.join("crates/rng/src/lib.rs"), directory.path().join("crates/rng.rs")).unwrap();

    let mut commands = commands(&fs::read_to_string(root.join("README.md")).unwrap());
    assert_eq!(commands.len(), 4, "{commands:?}");
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

    let out = commands[3].last().unwrap();
    for file in ["config.json", "model.safetensors", "tokenizer.json", "generation_config.json"] {
        assert!(directory.path().join(out).join(file).is_file(), "{out}/{file}");
    }
}
