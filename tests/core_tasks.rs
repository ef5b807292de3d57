//! CORE: the answers to every question of invented tasks against those of `scripts/core_reference.py`, and the command's output and errors.

use crate::common::{fail, llm_rs, succeed, text};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};

/// A GPT-2 with 1 layer, a vocabulary of 448 and a context of 128, trained on sentences like those of the questions.
fn model() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/core/model")
}

fn bundle() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/core/bundle")
}

fn eval<'a>(model: &'a Path, bundle: &'a Path) -> Vec<&'a str> {
    vec!["eval", "core", text(model), "--device", "cpu", "--bundle", text(bundle)]
}

fn lines(path: &Path) -> Vec<Value> {
    fs::read_to_string(path).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Asserts that answers equal those of the reference.
fn assert_answers(found: &[Value], expected: &[Value]) {
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        for field in ["task", "line", "choice", "correct"] {
            assert_eq!(found[field], expected[field], "{field}: {found}, expected {expected}");
        }
        let [found_scores, scores] = [found, expected].map(|answer| answer["scores"].as_array().unwrap());
        assert_eq!(found_scores.len(), scores.len(), "{found}");
        for (found_score, score) in found_scores.iter().zip(scores) {
            match (found_score.as_f64(), score.as_f64()) {
                (Some(found_score), Some(score)) => assert!((found_score - score).abs() < 1e-4, "{found}: {score}"),
                // No token is scored.
                (found_score, score) => assert_eq!(found_score, score, "{found}: {expected}"),
            }
        }
    }
}

#[test]
fn every_answer_equals_the_reference() {
    let directory = tempfile::tempdir().unwrap();
    let mut expected = lines(&bundle().join("../answers.jsonl"));
    let core = expected.pop().unwrap()["core"].as_f64().unwrap();
    // The reference has answers of every kind.
    let is = |answer: &Value, kind: &str| answer["task"].as_str().unwrap().starts_with(kind);
    for kind in ["colors", "endings", "pronouns", "last_word", "capitals"] {
        let of_kind = || expected.iter().filter(|answer| is(answer, kind));
        assert!(
            of_kind().any(|answer| answer["correct"] == true) && of_kind().any(|answer| answer["correct"] == false)
        );
    }
    let nulls = |answer: &&Value| answer["scores"].as_array().unwrap().contains(&Value::Null);
    assert!(expected.iter().filter(nulls).count() >= 3, "answers without scored tokens");

    // Batches of one sequence, and of all questions of a task.
    for batch in ["1", "8", "300"] {
        let answers = directory.path().join(format!("answers-{batch}.jsonl"));
        let json = directory.path().join(format!("results-{batch}.json"));
        let more = ["--batch", batch, "--out", text(&answers), "--json", text(&json)];
        let printed = succeed(&[&eval(&model(), &bundle())[..], &more].concat());
        assert_answers(&lines(&answers), &expected);
        let results: Value = serde_json::from_slice(&fs::read(&json).unwrap()).unwrap();
        let found = &results["models"][0];
        assert!((found["core"].as_f64().unwrap() - core).abs() < 1e-6, "{found}");
        let last: Vec<&str> = printed.lines().last().unwrap().split_whitespace().collect();
        assert_eq!(last[..2], ["CORE", &format!("{core:.4}")], "{printed}");
        for (task, row) in found["tasks"].as_array().unwrap().iter().zip(printed.lines().skip(1)) {
            let right = expected.iter().filter(|answer| answer["task"] == task["task"] && answer["correct"] == true);
            assert_eq!(task["correct"], right.count(), "{task}");
            let accuracy = task["correct"].as_f64().unwrap() / task["questions"].as_f64().unwrap();
            let row: Vec<&str> = row.split_whitespace().collect();
            assert_eq!((row[0], row[3]), (task["task"].as_str().unwrap(), &*format!("{accuracy:.4}")), "{printed}");
        }
    }
}

/// Examples are drawn from the kept questions, so that they differ from those of a complete evaluation.
#[test]
fn tasks_and_questions_are_selected() {
    let (model, bundle) = (model(), bundle());
    let few = [&eval(&model, &bundle)[..], &["--tasks", "capitals,colors", "--max-per-task", "9", "--json"]].concat();
    let results: Value = serde_json::from_str(&succeed(&few)).unwrap();
    let tasks = results["models"][0]["tasks"].as_array().unwrap();
    let rows: Vec<_> = tasks.iter().map(|task| (task["task"].as_str().unwrap(), task["questions"].as_u64())).collect();
    // In the order of the bundle.
    assert_eq!(rows, [("colors", Some(9)), ("capitals", Some(9))]);
    assert_eq!((&results["max_per_task"], &tasks[1]["kind"]), (&9.into(), &"language_modeling".into()));
    let centered = tasks.iter().map(|task| task["centered"].as_f64().unwrap()).sum::<f64>() / 2.0;
    assert!((results["models"][0]["core"].as_f64().unwrap() - centered).abs() < 1e-12);
    let accuracy = tasks[0]["accuracy"].as_f64().unwrap();
    assert!((tasks[0]["centered"].as_f64().unwrap() - (accuracy - 0.25) / 0.75).abs() < 1e-12);
}

#[test]
fn several_models_have_a_column_each() {
    let (model, bundle) = (model(), bundle());
    let again = model.join("model.safetensors");
    let arguments = ["eval", "core", text(&model), text(&again), "--device", "cpu", "--bundle", text(&bundle)];
    let printed = succeed(&[&arguments[..], &["--tasks", "colors,last_word"]].concat());
    let rows: Vec<Vec<&str>> = printed.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(rows[0][..2], ["model", "1:"], "{printed}");
    let row = |name: &str| rows.iter().find(|row| row.first() == Some(&name)).unwrap();
    assert_eq!(row("colors")[1..3], ["0", "14"], "{printed}");
    assert_eq!(row("colors")[3], row("colors")[4], "{printed}");
    assert_eq!((row("CORE").len(), row("CORE")[1]), (3, row("CORE")[2]), "{printed}");
}

#[test]
fn errors_name_the_flag_or_the_file() {
    let (model, bundle) = (model(), bundle());
    let with = |more: &[&str], parts: &[&str]| fail(&[&eval(&model, &bundle)[..], more].concat(), parts);
    with(
        &["--tasks", "colors,tastes"],
        &["--tasks: expected tasks of ", "core.yaml, found 'tastes'; its tasks are colors, "],
    );
    with(&["--max-per-task", "7"], &["endings.jsonl: expected more than 7 questions", "--max-per-task"]);
    with(&["--seq", "129"], &["--seq 129: expected at most 128"]);
    with(&["--seq", "10"], &["jsonl, line ", "expected an answer of fewer than 10 tokens", "use a longer --seq"]);
    with(&["--tokenizer", "gpt2"], &["--tokenizer: expected a tokenizer with at most 448 ids"]);
    with(&["--out", "x.jsonl", text(&model)], &["--out: expected one model, found 2"]);
    with(&["--out", "/nowhere/x.jsonl"], &["cannot write /nowhere/x.jsonl"]);
    let data = bundle.join("eval_data");
    fail(
        &eval(&model, &data),
        &["cannot read ", "core.yaml: expected an evaluation bundle; llm-rs data core downloads one"],
    );
    fail(&["eval", "core"], &["required arguments", "<MODEL>"]);
    // Without a command, the first argument is a model.
    fail(&["eval", text(&model)], &["required arguments"]);
    fail(&["eval", "./core", "--mmlu", "none.bin"], &["core"]);
}

#[test]
fn data_core_writes_a_bundle_that_eval_core_reads() {
    let directory = tempfile::tempdir().unwrap();
    let out = directory.path().join("data/core");
    let printed = succeed(&["data", "core", "--from", text(&bundle()), "--out", text(&out)]);
    assert!(printed.starts_with("wrote 7 tasks with 90 questions to "), "{printed}");
    assert!(printed.contains(&format!("eval core MODEL --bundle {}", text(&out))), "{printed}");
    let results = |bundle: &Path| {
        let printed = succeed(&[&eval(&model(), bundle)[..], &["--json"]].concat());
        let mut results: Value = serde_json::from_str(&printed).unwrap();
        for task in results["models"][0]["tasks"].as_array_mut().unwrap() {
            task["seconds"].take();
        }
        results["models"][0]["tasks"].take()
    };
    assert_eq!(results(&out), results(&bundle()));
    // The directory itself is only checked.
    succeed(&["data", "core", "--from", text(&out), "--out", text(&out)]);

    // Nothing is written if a file is wrong.
    let broken = directory.path().join("broken");
    succeed(&["data", "core", "--from", text(&out), "--out", text(&broken)]);
    let file = broken.join("eval_data/facts/colors.jsonl");
    fs::write(&file, fs::read_to_string(&file).unwrap().replacen("\"gold\": 1", "\"gold\": 9", 1)).unwrap();
    let other = directory.path().join("other");
    let message = "colors.jsonl, line 1: gold: expected the index of one of 3 choices, from 0, found 9";
    fail(&["data", "core", "--from", text(&broken), "--out", text(&other)], &[message]);
    assert!(!other.exists());
    // A file of another program.
    fs::create_dir(&other).unwrap();
    fs::write(other.join("core.yaml"), "my settings").unwrap();
    fail(&["data", "core", "--from", text(&out), "--out", text(&other)], &["core.yaml", "found another file"]);
    assert_eq!(fs::read_to_string(other.join("core.yaml")).unwrap(), "my settings");
}

/// Without a network, the error has the address.
#[test]
fn data_core_names_the_address_of_the_bundle() {
    let directory = tempfile::tempdir().unwrap();
    let proxies = ["http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"];
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_llm-rs"));
    // A proxy that does not exist makes every machine one without a network.
    command.args(["data", "core"]).current_dir(directory.path()).envs(proxies.map(|name| (name, "http://127.0.0.1:1")));
    let output = command.output().unwrap();
    let message = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    let address = "https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip";
    assert!(message.contains(&format!("cannot download {address}")), "{message}");
    assert!(message.contains("--from FILE or --from DIR"), "{message}");
    assert!(llm_rs(&["data", "core", "--help"]).status.success());
}

/// The last value is that of `eval core` with the last checkpoint.
#[test]
fn core_is_computed_during_and_after_training() {
    let directory = tempfile::tempdir().unwrap();
    let [train, run] = ["train.bin", "run"].map(|name| directory.path().join(name));
    let ids: Vec<u16> = (0..2000u16).map(|i| i * 7 % 447).collect();
    data::tokens::write(&train, &ids, data::tokens::Width::U16).unwrap();
    let (model, bundle) = (model(), bundle());
    let start = ["train", "--device", "cpu", "--train", text(&train), "--model", text(&model), "--batch", "2"];
    let settings = ["--seq", "96", "--steps", "5", "--lr", "1e-3", "--sample-every", "0", "--out", text(&run)];
    let core = ["--core", text(&bundle), "--core-every", "2", "--core-max-per-task", "9"];
    let printed = succeed(&[&start[..], &settings, &core].concat());
    assert!(printed.contains("every 2 steps, 7 tasks, 63 questions"), "{printed}");
    let values: Vec<&str> = printed.lines().filter_map(|line| Some(line.split_once("| CORE: ")?.1)).collect();
    assert_eq!(values.len(), 3, "{printed}");
    let log = fs::read_to_string(run.join("main.log")).unwrap();
    let logged: Vec<(&str, &str)> = log.lines().filter_map(|line| line.split_once(" core:")).collect();
    assert_eq!(logged.iter().map(|(step, _)| *step).collect::<Vec<_>>(), ["s:2", "s:4", "s:5"]);
    let records = lines(&run.join("main.jsonl"));
    let records: Vec<&Value> = records.iter().filter(|record| record.get("core").is_some()).collect();
    for ((value, (_, short)), record) in values.iter().zip(&logged).zip(&records) {
        let value: f64 = value.parse().unwrap();
        assert_eq!(*short, format!("{value:.4}"));
        assert!((record["core"].as_f64().unwrap() - value).abs() < 1e-6, "{record}");
    }
    let eval = ["eval", "core", text(&run), "--device", "cpu", "--bundle", text(&bundle), "--max-per-task", "9"];
    let printed = succeed(&[&eval[..], &["--seq", "96", "--json"]].concat());
    let results: Value = serde_json::from_str(&printed).unwrap();
    assert_eq!(results["models"][0]["core"], records[2]["core"]);
    for task in results["models"][0]["tasks"].as_array().unwrap() {
        assert_eq!(records[2]["core_tasks"][task["task"].as_str().unwrap()], task["accuracy"], "{task}");
    }
    let table = succeed(&["log", text(&run), "--csv"]);
    assert!(table.lines().next().unwrap().ends_with(",hellaswag,core"), "{table}");
    let cells = table.lines().filter(|line| !line.ends_with(',')).count();
    assert_eq!(cells, 4, "{table}");
    assert!(fs::read_to_string(run.join("plots.svg")).unwrap().contains(">CORE<"));

    let with =
        |more: &[&str], parts: &[&str]| fail(&[&start[..], &settings[..8], &["--out", "none"], more].concat(), parts);
    with(
        &["--core", text(&directory.path().join("none"))],
        &["--core: ", "none: expected the directory of an evaluation bundle"],
    );
    with(&["--core-every", "2"], &["--core <DIR>"]);
    with(
        &["--core", text(&bundle), "--core-max-per-task", "7"],
        &["--core: ", "endings.jsonl: expected more than 7 questions"],
    );
}
