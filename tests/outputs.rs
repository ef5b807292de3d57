//! Commands replace only files that they have written themselves, never inputs, checkpoints and files of others.

use crate::common::{fail, succeed, text};
use data::tokens;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

const NOTES: &str = "notes that exist nowhere else\n";

/// A small run, its token file, and a text file.
struct Fixture {
    dir: TempDir,
    run: PathBuf,
    model: PathBuf,
    val: PathBuf,
    notes: PathBuf,
}

impl Fixture {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let [run, val, notes] = ["run", "val.bin", "notes.txt"].map(|name| dir.path().join(name));
        tokens::write(&val, &[u16::from(b'x'); 100], tokens::Width::U16).unwrap();
        fs::write(&notes, NOTES).unwrap();
        let shape = ["--layers", "1", "--heads", "2", "--channels", "8", "--batch", "2", "--seq", "16"];
        let train = ["train", "--device", "cpu", "--steps", "1", "--sample-every", "0", "--out", text(&run)];
        succeed(&[&train[..], &shape].concat());
        let model = run.join("model_00000001.bin");
        Self { dir, run, model, val, notes }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Asserts that a command with `file` as its last argument fails, and leaves the file unchanged.
    #[track_caller]
    fn refused(args: &[&str], file: &Path, part: &str) {
        let before = fs::read(file).unwrap();
        fail(&[args, &[text(file)]].concat(), &[&format!("cannot write {}", file.display()), part]);
        assert!(fs::read(file).unwrap() == before, "{args:?} {}", file.display());
    }

    /// Asserts that a command replaces no file of others with its last argument, but its own file.
    #[track_caller]
    fn replaces_only_its_own(&self, args: &[&str], extension: &str) {
        let own = self.at(&format!("own.{extension}"));
        let command = [args, &[text(&own)]].concat();
        succeed(&command);
        succeed(&command);
        // An empty file holds nothing to lose.
        fs::write(&own, "").unwrap();
        succeed(&command);
        let [foreign, link, hard, device] =
            ["foreign", "link", "hard", "device"].map(|name| self.at(&format!("{name}.{extension}")));
        for (i, original) in
            [&self.val, &self.model, &self.notes, &self.run.join("config.toml")].into_iter().enumerate()
        {
            fs::copy(original, &foreign).unwrap();
            Fixture::refused(args, &foreign, "found another file; choose another name, or remove it");
            if i == 0 {
                symlink(original, &link).unwrap();
                Fixture::refused(args, &link, "found another file");
                fs::hard_link(original, &hard).unwrap();
                Fixture::refused(args, &hard, "found another file");
            }
            fs::remove_file(&foreign).unwrap();
        }
        symlink("/dev/null", &device).unwrap();
        fail(&[args, &[text(&device)]].concat(), &["found a device or a pipe"]);
        for path in [link, hard, device, own] {
            fs::remove_file(path).unwrap();
        }
    }
}

#[test]
fn eval_replaces_only_results() {
    let fixture = Fixture::new();
    let eval = [
        "eval",
        "--device",
        "cpu",
        "--batch",
        "2",
        "--seq",
        "16",
        "--model",
        text(&fixture.run),
        "--val",
        text(&fixture.val),
    ];
    let with = |flag| [&eval[..], &[flag]].concat();
    fixture.replaces_only_its_own(&with("--json"), "json");
    fixture.replaces_only_its_own(&with("--logits"), "safetensors");
    for input in [&fixture.val, &fixture.model] {
        Fixture::refused(&with("--json"), input, "found another file");
        Fixture::refused(&with("--logits"), input, "found another file");
    }
    // The results of another command are another kind.
    let measured = fixture.at("measured.json");
    fs::write(&measured, r#"{"bench": "gemm", "version": "1", "machine": "x", "rows": []}"#).unwrap();
    Fixture::refused(&with("--json"), &measured, "results of eval to replace, found another file");
    let both = fixture.at("both");
    let twice = [&with("--logits")[..], &[text(&both), "--json", text(&both)]].concat();
    fail(&twice, &["expected different files, found it twice"]);
    assert!(!both.exists());
}

#[test]
fn export_replaces_only_exports_of_its_format() {
    let fixture = Fixture::new();
    let (run, hf, gguf, bin) = (text(&fixture.run), fixture.at("hf"), fixture.at("x.gguf"), fixture.at("x.bin"));
    let export = |format, from, to: &Path, more: &[&'static str]| {
        [&["export", "--format", format, from, text(to)][..], more]
            .concat()
            .into_iter()
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    let run_args = |args: Vec<String>| succeed(&args.iter().map(String::as_str).collect::<Vec<_>>());
    for (format, out) in [("hf", &hf), ("gguf", &gguf), ("llmc", &bin)] {
        run_args(export(format, run, out, &[]));
        run_args(export(format, run, out, &["--overwrite"]));
    }
    // Another run, whose checkpoints are no inputs.
    let other = fixture.at("other");
    fs::create_dir(&other).unwrap();
    for entry in fs::read_dir(&fixture.run).unwrap().map(Result::unwrap) {
        fs::copy(entry.path(), other.join(entry.file_name())).unwrap();
    }
    let link = fixture.at("link.bin");
    symlink(&bin, &link).unwrap();
    let checkpoint = fixture.at("checkpoint.bin");
    symlink(other.join("model_00000001.bin"), &checkpoint).unwrap();
    let weights = hf.join("model.safetensors");
    for (format, from, out, part) in [
        ("gguf", run, &fixture.notes, "a GGUF file to replace, found another file"),
        ("gguf", run, &fixture.model, "the same"),
        ("gguf", run, &bin, "found another file"),
        ("gguf", run, &other.join("model_00000001.bin"), "found another file"),
        ("llmc", run, &fixture.notes, "a model file of llm.c to replace, found another file"),
        ("llmc", run, &fixture.val, "found another file"),
        ("llmc", run, &gguf, "found another file"),
        ("llmc", run, &weights, "found another file"),
        ("llmc", run, &fixture.model, "the same"),
        ("llmc", text(&bin), &bin, "expected a file other than the input"),
        ("llmc", text(&bin), &link, "the same"),
        ("llmc", text(&bin), &other.join("model_00000001.bin"), "found the checkpoint of step 1"),
        ("llmc", text(&bin), &checkpoint, "found the checkpoint of step 1"),
    ] {
        Fixture::refused(&["export", "--format", format, "--overwrite", from], out, part);
        // The error does not advise --overwrite, which would not help.
        Fixture::refused(&["export", "--format", format, from], out, part);
    }
    let in_place = ["export", "--format", "hf", "--dtype", "bf16", "--overwrite", text(&hf), text(&hf)];
    fail(&in_place, &["expected a file other than the input"]);
}

/// The model may be an export itself, and its path may be relative to a directory above the run.
#[test]
fn export_does_not_replace_the_model_from_which_a_run_started() {
    let fixture = Fixture::new();
    let (hf, file, tuned) = (fixture.at("hf"), fixture.at("file.bin"), fixture.at("runs/tuned"));
    succeed(&["export", "--format", "hf", text(&fixture.run), text(&hf)]);
    fs::copy(&fixture.model, &file).unwrap();
    for (format, model, out) in [("hf", "hf", &hf), ("hf", "hf/model.safetensors", &hf), ("llmc", "file.bin", &file)] {
        let train = ["train", "--device", "cpu", "--steps", "1", "--batch", "1", "--seq", "8", "--sample-every", "0"];
        let run = ["--val-every", "0", "--model", model, "--out", "runs/tuned"];
        let mut command = Command::new(env!("CARGO_BIN_EXE_llm-rs"));
        let output = command.current_dir(fixture.dir.path()).args([&train[..], &run].concat()).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let weights = if out.is_dir() { out.join("model.safetensors") } else { out.clone() };
        let before = fs::read(&weights).unwrap();
        let export = ["export", "--format", format, "--overwrite", text(&tuned), text(out)];
        fail(&export, &["expected a path other than the model ", "from which the run started, found the same path"]);
        assert!(fs::read(&weights).unwrap() == before, "{model}");
        fs::remove_dir_all(&tuned).unwrap();
    }
}

#[test]
fn plots_tables_and_pages_replace_only_their_kind() {
    let fixture = Fixture::new();
    let run = text(&fixture.run);
    fixture.replaces_only_its_own(&["plot", run, "-o"], "svg");
    fixture.replaces_only_its_own(&["plot", run, "-o"], "png");
    fixture.replaces_only_its_own(&["plot", run, "--html"], "html");
    fixture.replaces_only_its_own(&["log", run, "--csv"], "csv");
    let questions = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/hellaswag.jsonl");
    fixture.replaces_only_its_own(&["data", "hellaswag", "--from", text(&questions), "--out"], "bin");
    let questions = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/mmlu");
    fixture.replaces_only_its_own(&["data", "mmlu", "--from", text(&questions), "--out"], "bin");
    // A picture that another program has made.
    let picture = fixture.at("picture.png");
    fs::write(&picture, b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0\x01\0\0\0\x01\x08\0\0\0\0\x3a\x7e\x9b\x55").unwrap();
    Fixture::refused(&["plot", run, "-o"], &picture, "found another file");
    let page = fixture.at("page.html");
    fail(&["plot", run, "-o", text(&page), "--html", text(&page)], &["expected different files, found it twice"]);

    let manual = fixture.at("man");
    succeed(&["man", text(&manual)]);
    succeed(&["man", text(&manual)]);
    fs::write(manual.join("llm-rs-train.1"), NOTES).unwrap();
    fail(&["man", text(&manual)], &["llm-rs-train.1", "found another file"]);
    assert_eq!(fs::read_to_string(manual.join("llm-rs-train.1")).unwrap(), NOTES);

    let table = fixture.at("sweep/sweep.md");
    fs::create_dir(fixture.at("sweep")).unwrap();
    fs::write(&table, NOTES).unwrap();
    fail(&["sweep", "--flag", "lr=1e-3", "--out", text(&fixture.at("sweep"))], &["sweep.md", "found another file"]);
    assert_eq!(fs::read_to_string(&table).unwrap(), NOTES);
}

#[test]
fn measurements_replace_only_measurements() {
    let fixture = Fixture::new();
    let step = ["bench", "step", "--device", "cpu", "--model", text(&fixture.model)];
    let step = [&step[..], &["--batch", "1", "--seq", "8", "-x", "1", "-a", "1"]].concat();
    fixture.replaces_only_its_own(&[&step[..], &["--json"]].concat(), "json");
    fixture.replaces_only_its_own(&[&step[..], &["--trace"]].concat(), "trace.json");
}

/// The tokenizer of the run would replace that of the model.
#[test]
fn a_run_does_not_write_into_the_directory_of_its_model() {
    let fixture = Fixture::new();
    let (hf, link) = (fixture.at("hf"), fixture.at("link"));
    succeed(&["export", "--format", "hf", text(&fixture.run), text(&hf)]);
    symlink(&hf, &link).unwrap();
    let train =
        ["train", "--device", "cpu", "--steps", "1", "--batch", "1", "--seq", "8", "--model", text(&hf), "--out"];
    for out in [&hf, &link] {
        fail(&[&train[..], &[text(out)]].concat(), &["--out: expected a directory other than that of the model"]);
    }
    assert!(!hf.join("config.toml").exists() && !hf.join("run.lock").exists());
}
