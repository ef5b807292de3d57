//! `eval` and `data mmlu` as users run them: every metric in text and JSON, and weights that are not finite.

use crate::common::{fail, llm_rs, succeed, text};
use data::tokens;
use safetensors::SafeTensors;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// A directory with token files, evaluation files, and an untrained model with GPT-2's vocabulary.
struct Fixture {
    directory: TempDir,
    val: String,
    hellaswag: String,
    mmlu: String,
    model: PathBuf,
}

/// The documents of the validation data: 3 marks, 12 tokens of text.
const VAL: [u16; 15] = [50256, 15496, 11, 995, 0, 50256, 5962, 22307, 25, 198, 8421, 50256, 15496, 11, 995];

impl Fixture {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
        let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data");
        let (val, hellaswag, mmlu, out) = (path("val.bin"), path("hellaswag.bin"), path("mmlu.bin"), path("run"));
        tokens::write(Path::new(&val), &VAL, tokens::Width::U16).unwrap();
        succeed(&["data", "hellaswag", "--from", text(&data.join("hellaswag.jsonl")), "--out", &hellaswag]);
        let printed = succeed(&["data", "mmlu", "--from", text(&data.join("mmlu")), "--out", &mmlu]);
        assert!(printed.starts_with("read 5 questions in 2 files\nwrote 5 examples to "), "{printed}");
        assert!(printed.contains(&format!("eval --model FILE --mmlu {mmlu}")), "{printed}");
        let shape = ["--layers", "2", "--heads", "2", "--channels", "8", "--batch", "1", "--seq", "64"];
        let train = path("train.bin");
        tokens::write(Path::new(&train), &VAL.repeat(10), tokens::Width::U16).unwrap();
        let run = ["train", "--device", "cpu", "--train", &train, "--steps", "2", "--sample-every", "0", "--out", &out];
        succeed(&[&run[..], &shape].concat());
        let model = directory.path().join("run/model_00000002.bin");
        Self { directory, val, hellaswag, mmlu, model }
    }

    /// Returns arguments that evaluate on everything.
    fn all(&self) -> Vec<&str> {
        let model = ["eval", "--device", "cpu", "--model", text(&self.model), "--batch", "2", "--seq", "7"];
        [&model[..], &["--val", &self.val]].concat()
    }
}

fn integer(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("expected an integer, found {value}"))
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("expected a number, found {value}"))
}

#[test]
fn eval_reports_every_metric_in_text_and_json() {
    let fixture = Fixture::new();
    let json = fixture.directory.path().join("results.json");
    let printed = succeed(&[&fixture.all()[..], &["--json", text(&json)]].concat());
    let file: Value = serde_json::from_slice(&fs::read(&json).unwrap()).unwrap();
    let validation = &file["validation"];
    // One batch of 2 x 7 targets: all tokens but the first. Two of them are document marks.
    let spelled = ["Hello", ",", " world", "!", "First", " Citizen", ":", "\n", "Before", "Hello", ",", " world"];
    let bytes: usize = spelled.iter().map(|token| token.len()).sum();
    assert_eq!((integer(&validation["tokens"]), integer(&validation["bytes"])), (14, bytes as u64));
    let (loss, bits) = (number(&validation["loss"]), number(&validation["bits_per_byte"]));
    assert!((number(&validation["perplexity"]) / loss.exp() - 1.0).abs() < 1e-9, "{validation}");
    // The predictions of an untrained model are almost uniform.
    let uniform = 50257f64.ln();
    assert!((loss - uniform).abs() < 0.3, "{loss}");
    assert!((bits - 12.0 * uniform / 2f64.ln() / bytes as f64).abs() < 0.2, "{bits}");
    let line = format!(
        "val loss {loss:.6} | perplexity {:.2} | {bits:.4} bits per byte | 14 tokens, {bytes} bytes, batches of 2 x 7\n",
        loss.exp()
    );
    assert_eq!(printed, line);
    assert_eq!(file["batch"], serde_json::json!([2, 7]));
    assert_eq!((&file["model"], &file["precision"]), (&text(&fixture.model).into(), &"f32".into()));
    assert!(file["machine"].as_str().unwrap().starts_with("CPU") && file.get("mmlu").is_none(), "{file}");

    let sets = ["eval", "--device", "cpu", "--model", text(&fixture.model), "--hellaswag", &fixture.hellaswag];
    let sets = [&sets[..], &["--mmlu", &fixture.mmlu, "--mmlu-examples", "4", "--json"]].concat();
    let printed = succeed(&sets);
    let printed: Value = serde_json::from_str(&printed).unwrap();
    assert_eq!(integer(&printed["hellaswag"]["examples"]), 4);
    let mmlu = &printed["mmlu"];
    assert_eq!((integer(&mmlu["examples"]), &mmlu["data"]), (4, &fixture.mmlu.as_str().into()));
    assert!((number(&mmlu["accuracy"]) - integer(&mmlu["correct"]) as f64 / 4.0).abs() < 1e-9, "{mmlu}");
    assert!(printed.get("validation").is_none(), "{printed}");
    let in_text = succeed(&sets[..sets.len() - 1]);
    let lines: Vec<&str> = in_text.lines().collect();
    assert!(lines.len() == 2 && lines[0].starts_with("HellaSwag: ") && lines[0].contains("/4 = "), "{in_text}");
    assert!(lines[1].starts_with(&format!("MMLU: {}/4 = ", mmlu["correct"])), "{in_text}");
}

#[test]
fn eval_writes_the_logits_and_losses_of_all_tokens() {
    let fixture = Fixture::new();
    let path = fixture.directory.path().join("logits.safetensors");
    let printed = succeed(&[&fixture.all()[..], &["--logits", text(&path)]].concat());
    let bytes = fs::read(&path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let floats = |name: &str, shape: &[usize]| -> Vec<f64> {
        let tensor = file.tensor(name).unwrap();
        assert_eq!(tensor.shape(), shape, "{name}");
        tensor.data().as_chunks().0.iter().map(|&bytes| f64::from(f32::from_le_bytes(bytes))).collect()
    };
    let (logits, losses) = (floats("logits", &[14, 50257]), floats("losses", &[14]));
    for ((row, loss), target) in logits.chunks(50257).zip(&losses).zip(&VAL[1..]) {
        let sum: f64 = row.iter().map(|logit| logit.exp()).sum();
        let expected = sum.ln() - row[usize::from(*target)];
        assert!((loss - expected).abs() < 1e-5, "{loss}, expected {expected}");
    }
    let mean = losses.iter().sum::<f64>() / 14.0;
    let found: f64 = printed.split(' ').nth(2).unwrap().parse().unwrap();
    assert!((found - mean).abs() < 1e-6, "{printed}, mean {mean}");
    let model = ["eval", "--device", "cpu", "--model", text(&fixture.model)];
    fail(&[&model[..], &["--mmlu", &fixture.mmlu, "--logits", text(&path)]].concat(), &["--val <GLOB>"]);
    fail(&[&fixture.all()[..], &["--logits", "/nowhere/x"]].concat(), &["cannot write /nowhere/x"]);
}

/// The model accepts longer sequences, and the questions of HellaSwag need them.
#[test]
fn a_run_is_evaluated_with_the_sequences_of_its_training() {
    let fixture = Fixture::new();
    let [run, train] = ["short", "train.bin"].map(|name| fixture.directory.path().join(name));
    let shape = ["--model", "d6", "--layers", "1", "--heads", "2", "--channels", "8", "--batch", "2", "--seq", "7"];
    let flags =
        ["train", "--device", "cpu", "--train", text(&train), "--val", &fixture.val, "--steps", "1", "--lr", "0"];
    let printed = succeed(&[&flags[..], &shape, &["--sample-every", "0", "--out", text(&run)]].concat());
    let loss = printed.lines().find_map(|line| Some(line.split_once("val loss ")?.1)).unwrap();
    let eval = ["eval", "--device", "cpu", text(&run), "--val", &fixture.val, "--batch", "2"];
    let printed = succeed(&[&eval[..], &["--hellaswag", &fixture.hellaswag]].concat());
    let line = printed.lines().next().unwrap();
    assert!(
        line.starts_with(&format!("val loss {loss} ")) && line.ends_with(" bytes, batches of 2 x 7"),
        "{loss}: {printed}"
    );
    let results: Value = serde_json::from_str(&succeed(&[&eval[..], &["--json"]].concat())).unwrap();
    assert_eq!(results["batch"], serde_json::json!([2, 7]));
    assert!(succeed(&[&eval[..], &["--seq", "3"]].concat()).ends_with("batches of 2 x 3\n"));
}

/// More batches than the data has are those of one epoch, also in the validation of a run.
#[test]
fn evaluation_ends_at_the_end_of_the_data() {
    let fixture = Fixture::new();
    let val = fixture.directory.path().join("long.bin");
    let ids: Vec<u16> = (0..5 * 14 + 9).map(|i| VAL[i % VAL.len()]).collect();
    tokens::write(&val, &ids, tokens::Width::U16).unwrap();
    let eval = [&fixture.all()[..9], &["--val", text(&val), "--json"]].concat();
    let all: Value = serde_json::from_str(&succeed(&eval)).unwrap();
    assert_eq!(integer(&all["validation"]["tokens"]), 5 * 14);
    let output = llm_rs(&[&eval[..], &["--val-batches", "100"]].concat());
    let bounded: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(bounded["validation"], all["validation"]);
    let err = String::from_utf8_lossy(&output.stderr);
    assert!(err.contains("note: --val-batches 100: the data has 5 batches; all of them are used"), "{err}");

    let out = fixture.directory.path().join("bounded");
    let losses = ["100", "5", "-1"].map(|batches| {
        let train = ["train", "--device", "cpu", "--model", text(&fixture.model), "--train", text(&val), "--val"];
        let more = [text(&val), "-b", "2", "-t", "7", "--steps", "1", "--sample-every", "0", "--val-batches", batches];
        let printed = succeed(&[&train[..], &more, &["--out", text(&out)]].concat());
        fs::remove_dir_all(&out).unwrap();
        let noted = printed.contains("--val-batches 100: the data has 5 batches; all of them are used");
        assert_eq!(noted, batches == "100", "{printed}");
        printed.lines().find_map(|line| Some(line.split_once("val loss ")?.1.to_owned())).unwrap()
    });
    assert!(losses.iter().all(|loss| *loss == losses[0]), "{losses:?}");
}

#[test]
fn eval_names_invalid_sets_and_files() {
    let fixture = Fixture::new();
    let model = ["eval", "--device", "cpu", "--model", text(&fixture.model)];
    let with = |rest: &[&str], parts: &[&str]| fail(&[&model[..], rest].concat(), parts);
    with(&["--mmlu", &fixture.mmlu, "--seq", "16"], &["mmlu.bin, example ", "--seq of at least"]);
    with(&["--mmlu", &fixture.val], &["val.bin", "magic 20240522"]);
    with(&["--mmlu", "none.bin"], &["none.bin"]);
    let shape = ["-b", "2", "-t", "7", "--val", &fixture.val];
    with(&[&shape[..], &["--json", "/nowhere/results.json"]].concat(), &["cannot write /nowhere/results.json"]);
    let here = text(fixture.directory.path());
    with(&[&shape[..], &["--json", here]].concat(), &["cannot write ", "the name of a file, found a directory"]);
    with(&["--mmlu-examples", "3", "--val", &fixture.val], &["--mmlu <FILE>"]);
    with(&[], &["required arguments"]);
    let from = |rest: &[&str], parts: &[&str]| fail(&[&["data", "mmlu", "--from"], rest].concat(), parts);
    let nowhere = fixture.directory.path().join("out.bin");
    from(&[text(fixture.directory.path())], &["expected files *_test.csv", "extract data.tar"]);
    from(&[&fixture.val, "--out", text(&nowhere)], &["val.bin, line 1: expected 6 columns"]);
    from(&["x", "--split", "train"], &["--split <NAME>", "expected dev, val or test"]);
    assert!(!nowhere.exists());
}

#[test]
fn bits_per_byte_are_left_out_without_a_tokenizer_or_text() {
    let fixture = Fixture::new();
    let marks = fixture.directory.path().join("marks.bin");
    tokens::write(&marks, &[50256u16; 15], tokens::Width::U16).unwrap();
    let printed = succeed(&[&fixture.all()[..9], &["--val", text(&marks)]].concat());
    assert!(
        printed.contains(" | no bits per byte: all tokens are special | 14 tokens, 0 bytes, batches of 2 x 7\n"),
        "{printed}"
    );
    let json = succeed(&[&fixture.all()[..9], &["--val", text(&marks), "--json"]].concat());
    let json: Value = serde_json::from_str(&json).unwrap();
    assert_eq!((&json["validation"]["bits_per_byte"], integer(&json["validation"]["bytes"])), (&Value::Null, 0));

    // A model with a vocabulary of 200 tokens, which has no tokenizer.
    let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/tiny.bin");
    let low = fixture.directory.path().join("low.bin");
    tokens::write(&low, &[1u16; 15], tokens::Width::U16).unwrap();
    let printed =
        succeed(&["eval", "--device", "cpu", "--model", text(&tiny), "--val", text(&low), "-b", "2", "-t", "7"]);
    assert!(
        printed.ends_with(" | no bits per byte: the vocabulary has no tokenizer | 14 tokens, batches of 2 x 7\n"),
        "{printed}"
    );
}

/// Before this check, `eval` printed garbage and exited with 0.
#[test]
fn weights_that_are_not_finite_are_an_error_that_names_the_tensor() {
    let fixture = Fixture::new();
    let mut bytes = fs::read(&fixture.model).unwrap();
    // wte (50304, 8), wpe (64, 8), ln1w (2, 8), ln1b (2, 8), then qkvw (2, 24, 8), all in f32.
    let qkvw = 50304 * 8 + 64 * 8 + 2 * 8 + 2 * 8;
    for element in [qkvw + 24 * 8, qkvw + 24 * 8 + 5] {
        bytes[1024 + 4 * element..][..4].copy_from_slice(&f32::NAN.to_le_bytes());
    }
    let damaged = fixture.directory.path().join("damaged.bin");
    fs::write(&damaged, bytes).unwrap();
    let expected = [
        "damaged.bin: qkvw of layer 1: expected finite values, found 2 NaN values; the file is damaged",
        "use an earlier checkpoint",
    ];
    let model = text(&damaged);
    fail(&["eval", "--model", model, "--val", &fixture.val, "-b", "1", "-t", "7", "--device", "cpu"], &expected);
    fail(&["sample", "--model", model, "--device", "cpu"], &expected);
    fail(&["train", "--model", model, "--train", &fixture.val, "-b", "1", "-t", "7", "--device", "cpu"], &expected);
    let output = llm_rs(&["eval", "--model", model, "--val", &fixture.val, "-t", "7", "-b", "1", "--json"]);
    assert!(output.stdout.is_empty() && output.status.code() == Some(1));
}
