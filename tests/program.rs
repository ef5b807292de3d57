//! The program as users run it: complete runs of small models, the command line, and every kind of invalid input.

use crate::common::{fail, llm_rs, succeed, text};
use data::{Tokens, tokens};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

const TINY: &[&str] = &["--layers", "1", "--heads", "2", "--channels", "16", "--batch", "2", "--seq", "16"];

fn write_tokens(dir: &Path, name: &str, ids: &[u16]) -> PathBuf {
    let path = dir.join(name);
    tokens::write(&path, ids, tokens::Width::U16).unwrap();
    path
}

/// Concatenates arguments.
fn with<'a>(first: &[&'a str], rest: &[&'a str]) -> Vec<&'a str> {
    [first, rest].concat()
}

/// Creates a directory with train.bin and val.bin, whose tokens are bytes.
fn data() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let ids = |n: usize| (0..n).map(|i| b"to be, or not to be; "[i % 21].into()).collect::<Vec<u16>>();
    write_tokens(dir.path(), "train.bin", &ids(2000));
    write_tokens(dir.path(), "val.bin", &ids(500));
    dir
}

fn entries(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn selftest_determinism_reports_identical_runs() {
    let printed = succeed(&["selftest", "--determinism", "--steps", "1", "--device", "cpu"]);
    for group in ["losses", "gradients", "gradient norm", "m", "v", "weights"] {
        let row = printed.lines().find(|line| line.starts_with(&format!("{group:<16} ")));
        assert!(row.is_some_and(|row| row.ends_with("  identical")), "{group}: {printed}");
    }
    assert!(printed.contains("CPU, ") && printed.contains("\nidentical\n"), "{printed}");
    let output = llm_rs(&["selftest", "--determinism", "--small"]);
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn a_run_writes_logs_and_a_model_for_evaluation_sampling_and_training() {
    let dir = data();
    let out = dir.path().join("run");
    let (train, val) = (dir.path().join("train.bin"), dir.path().join("val.bin"));
    let run =
        ["train", "--device", "cpu", "--steps", "6", "--out", text(&out), "--checkpoint-every", "4", "--lr", "0.01"];
    let from = |data: &[&str]| succeed(&with(&with(&run, TINY), data));
    let printed = from(&["--val-every", "3", "--total-batch", "64", "--warmup", "0"]);
    assert!(printed.contains("step    6/6 | loss ") && printed.contains("step    3/6 | val loss "), "{printed}");
    assert_eq!(
        entries(&out),
        [
            ".llm-rs-run",
            "DONE_00000004",
            "DONE_00000006",
            "config.toml",
            "main.jsonl",
            "main.log",
            "model_00000004.bin",
            "model_00000006.bin",
            "plots.svg",
            "report.html",
            "run_00000004.json",
            "run_00000006.json",
            "samples.jsonl",
            "state_00000004_00000.bin",
            "state_00000006_00000.bin"
        ]
    );
    let log = fs::read_to_string(out.join("main.log")).unwrap();
    let heads: Vec<&str> = log.lines().map(|line| line.rsplit_once(':').unwrap().0).collect();
    let kinds: Vec<String> = heads
        .iter()
        .map(|h| h.split(' ').take(2).map(|w| w.split(':').next().unwrap()).collect::<Vec<_>>().join(" "))
        .collect();
    assert_eq!(kinds, ["s tel", "s trl", "s trl", "s trl", "s tel", "s trl", "s trl", "s trl", "s tel"]);
    let records: Vec<serde_json::Value> = fs::read_to_string(out.join("main.jsonl"))
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(records.iter().filter(|r| r["loss"].is_f64()).count(), 6);
    assert_eq!(records[7]["tokens"], 6 * 64);
    let losses: Vec<f64> = records.iter().filter_map(|r| r["val_loss"].as_f64()).collect();
    assert!(losses[2] < losses[0] - 0.05, "{losses:?}");

    // Training that starts from the model file begins with its loss, and `eval` computes the same loss.
    let model = out.join("model_00000006.bin");
    let on = |lr| {
        let args = ["train", "--model", text(&model), "--train", text(&train), "--val", text(&val), "--out", "none"];
        let args = with(&args, &["--device", "cpu"]);
        succeed(&with(&args, &["--batch", "2", "--seq", "16", "--steps", "1", "--val-batches", "3", "--lr", lr]))
    };
    let resumed = on("0");
    let evaluated =
        succeed(&["eval", "--model", text(&model), "--val", text(&val), "--batch", "2", "--seq", "16", "-m", "3"]);
    let loss = evaluated.split(' ').nth(2).unwrap();
    assert_eq!(resumed.matches(&format!("val loss {loss}\n")).count(), 2, "{loss}: {resumed}");
    assert_eq!(on("0.01").matches(&format!("val loss {loss}\n")).count(), 1);

    let sample = |seed: &str| {
        succeed(&[
            "sample",
            "--model",
            text(&model),
            "--prompt",
            "to be",
            "-g",
            "30",
            "--seed",
            seed,
            "--device",
            "cpu",
        ])
    };
    assert!(sample("1").starts_with("to be"));
    assert_eq!(sample("1"), sample("1"));
    assert_ne!(sample("1"), sample("2"));
}

#[test]
fn hellaswag_is_scored_during_and_after_training() {
    let dir = data();
    let out = dir.path().join("run");
    let (train, set) = (dir.path().join("train.bin"), dir.path().join("sets/hellaswag.bin"));
    let jsonl = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/hellaswag.jsonl");
    let printed = succeed(&["data", "hellaswag", "--from", text(&jsonl), "--out", text(&set)]);
    assert!(printed.contains("wrote 4 examples") && printed.contains("next: "), "{printed}");
    assert!(fs::read(&set).unwrap() == include_bytes!("data/hellaswag.bin"));

    let shape = ["--layers", "1", "--heads", "2", "--channels", "16", "--batch", "1", "--seq", "48"];
    let run = ["train", "--device", "cpu", "--train", text(&train), "--hellaswag", text(&set)];
    let settings = ["--out", text(&out), "--steps", "5", "--val-every", "2", "--hellaswag-examples", "3"];
    let printed = succeed(&with(&with(&run, &shape), &settings));
    let scores: Vec<&str> = printed.lines().filter_map(|line| Some(line.split_once("| HellaSwag: ")?.1)).collect();
    assert!(scores.len() == 3 && scores.iter().all(|s| s.contains("/3 = 0.") || s.contains("3/3 = 1.")), "{printed}");
    let log = fs::read_to_string(out.join("main.log")).unwrap();
    let logged: Vec<(&str, &str)> = log.lines().filter_map(|line| line.split_once(" eval:")).collect();
    assert_eq!(logged.iter().map(|(step, _)| *step).collect::<Vec<_>>(), ["s:2", "s:4", "s:5"]);
    for (score, (_, accuracy)) in scores.iter().zip(&logged) {
        let expected: f64 = score.split_once(" = ").unwrap().1.parse().unwrap();
        assert_eq!(*accuracy, format!("{expected:.4}"));
    }

    let model = out.join("model_00000005.bin");
    let eval = ["eval", "--model", text(&model), "--device", "cpu", "--hellaswag", text(&set)];
    for batch in ["1", "3", "8"] {
        let printed = succeed(&with(&eval, &["--hellaswag-examples", "3", "--batch", batch, "--seq", "48"]));
        assert_eq!(printed, format!("HellaSwag: {}\n", scores[2]));
    }
    let printed = succeed(&with(&eval, &["--val", text(&train)]));
    assert!(printed.contains("val loss ") && printed.contains("HellaSwag: ") && printed.contains("/4 = "), "{printed}");
    fail(&with(&eval, &["--seq", "16"]), &["hellaswag.bin, example 0", "--seq of at least 48"]);
    fail(&with(&run, TINY), &["hellaswag.bin, example 0", "--seq of at least 48"]);
    fail(&["train", "--device", "cpu", "--hellaswag", text(&set)], &["hellaswag.bin, example 0", "--seq of at least"]);
    fail(&["eval", "--model", text(&model), "--hellaswag", text(&train)], &["train.bin", "magic 20240522"]);
    fail(&["data", "hellaswag", "--from", text(&train), "--out", text(&set)], &["train.bin"]);
}

#[test]
fn tokenized_text_can_be_trained_on() {
    let dir = tempfile::tempdir().unwrap();
    let play = dir.path().join("play.txt");
    fs::write(&play, "All the world's a stage,\nAnd all the men and women merely players.\n".repeat(40)).unwrap();
    let out = dir.path().join("shards");
    let printed = succeed(&["data", "text", text(&play), "--out", text(&out), "--val-fraction", "0.2"]);
    assert!(printed.contains("next: "), "{printed}");
    assert!(printed.contains("validation split: expected at least 4097 tokens"), "{printed}");
    assert_eq!(entries(&out), ["dataset.json", "train_000000.bin", "val_000000.bin"]);
    let (train, val) = (out.join("train_*.bin"), out.join("val_*.bin"));
    assert!(Tokens::open_all(text(&train)).unwrap()[0].len() > 400);
    let args = ["train", "--device", "cpu", "--train", text(&train), "--val", text(&val), "--steps", "2", "-m", "-1"];
    let printed = succeed(&with(&with(&args, TINY), &["--out", "none"]));
    // Untrained, the model predicts the 50257 tokens of GPT-2 almost uniformly.
    let first = printed.lines().find_map(|line| line.strip_prefix("step    0/2 | val loss ")).unwrap();
    assert!((first.parse::<f64>().unwrap() - 50257f64.ln()).abs() < 0.1, "{first}");
    fail(&["data", "text", text(&play), "--out", text(&out)], &["train_000000.bin", "--overwrite"]);
    let split = dir.path().join("split");
    let extensions = ["data", "text", text(dir.path()), "--out", text(&split), "--extensions", ".tex"];
    fail(&extensions, &["expected input files with extension .tex, found none; skipped files with other extensions: "]);
    let printed = succeed(&["data", "text", text(&play), "--out", text(&split), "--separator", "<|x|>"]);
    assert!(printed.contains("expected '<|x|>' in each text file, found 1 without it"), "{printed}");
    // Special tokens that are not encoded as such are counted.
    fs::write(&play, "one<|endoftext|>two<|endoftext|>").unwrap();
    for (flags, noted) in [(&[][..], true), (&["--allow-special"], false), (&["--separator", "<|endoftext|>"], false)] {
        let output = llm_rs(&with(&["data", "text", text(&play), "--out", text(&split), "--overwrite"], flags));
        let err = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && err.contains("became ordinary text: 2; ") == noted, "{flags:?}: {err}");
    }
    let smaller = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/tiny.bin");
    let args = ["train", "--device", "cpu", "--train", text(&train), "--model", text(&smaller), "-b", "2", "-t", "7"];
    fail(&args, &["gpt2 with 50257", "at most 97", "--model", "tiny.bin"]);
}

#[test]
fn errors_name_invalid_token_files() {
    let dir = data();
    let run = |path: &Path, parts: &[&str]| {
        let out = dir.path().join("out");
        let args = ["train", "--device", "cpu", "--train", text(path), "--steps", "2", "--out", text(&out)];
        fail(&with(&args, TINY), &with(parts, &[path.file_name().unwrap().to_str().unwrap()]));
        assert!(!out.join("model_00000002.bin").exists());
    };
    run(&dir.path().join("none.bin"), &["no file matches"]);
    let good = fs::read(dir.path().join("train.bin")).unwrap();
    let bad = |name: &str, bytes: &[u8]| {
        let path = dir.path().join(name);
        fs::write(&path, bytes).unwrap();
        path
    };
    run(
        &bad("cut.bin", &good[..2000]),
        &["truncated", "expected 5024 bytes for the 2000 tokens in the header, found 2000"],
    );
    run(&bad("magic.bin", &[&[1], &good[1..]].concat()), &["magic 20240520"]);
    run(&write_tokens(dir.path(), "short.bin", &[1; 20]), &["20 tokens", "at least 33", "--batch"]);
    run(&write_tokens(dir.path(), "beyond.bin", &[60000; 100]), &["token 60000", "below 50257"]);
}

#[test]
fn errors_name_invalid_models_and_settings() {
    let dir = data();
    let train = dir.path().join("train.bin");
    let base = ["train", "--device", "cpu", "--train", text(&train)];
    let rejects = |rest: &[&str], parts: &[&str]| fail(&with(&base, rest), parts);
    rejects(&["--model", "d13"], &["--model", "d13", "gpt2-medium", "d12"]);
    rejects(&["--model", "none.bin"], &["none.bin", "No such file"]);
    rejects(&["--model", text(&train)], &["train.bin", "expected magic 20240326, found 20240520"]);
    rejects(&with(TINY, &["--total-batch", "1000"]), &["--total-batch 1000", "2 x 16 = 32"]);
    rejects(&["--model", "d12", "--seq", "2048"], &["--seq 2048", "1024"]);
    rejects(&["--layers", "1", "--heads", "3", "--channels", "16", "-b", "1", "-t", "16"], &["16 channels, found 3"]);
    rejects(&with(TINY, &["--precision", "bf16"]), &["--precision: expected fp32", "found bf16"]);
    rejects(&with(TINY, &["--val", "/nowhere/*.bin"]), &["--val", "/nowhere/*.bin"]);
    rejects(&with(TINY, &["--out", "/proc/nothing/here"]), &["/proc/nothing/here"]);
    fail(
        &["train", "--device", "cpu", "--model", "gpt3:c12288"],
        &["does not fit", "more than the ", "not even --batch 1 fits"],
    );
    fail(&["sample", "--model", text(&train)], &["train.bin", "magic"]);
    fail(&["eval", "--model", "none.bin", "--val", text(&train)], &["none.bin"]);
    fail(&["data", "tinyshakespeare", "--from", "none.txt"], &["none.txt"]);
    fail(&["data", "text", "none.txt", "--out", text(dir.path())], &["none.txt"]);
}

#[test]
fn sizes_beyond_the_limits_are_rejected() {
    let most = "2147483647";
    let plan = ["train", "--device", "cpu", "--dry-run"];
    let shape = |l, c| ["--layers", l, "--heads", "1", "--channels", c];
    let rejects = |rest: &[&str], parts: &[&str]| fail(&with(&plan, rest), parts);
    rejects(&shape(most, "64"), &["--layers", "at most 8192, found 2147483647"]);
    rejects(&shape("1", most), &["--channels", "larger than any address space"]);
    rejects(&with(&shape("8192", "2048"), &["--batch", "16", "--seq", "64"]), &["does not fit"]);
    rejects(&["--batch", "33554431", "--seq", "64"], &["built-in corpus", "--batch"]);
    rejects(&["--batch", most, "--seq", "64"], &["--batch 2147483647 x --seq 64", "2147483647 tokens at once"]);
    rejects(&with(&shape("1", "64"), &["--batch", most, "--seq", most]), &["--batch 2147483647 x --seq 2147483647"]);
    rejects(&["--total-batch", most], &["--total-batch 2147483647", "multiple of batch x seq = 8 x 64"]);
    let all =
        ["--total-batch", "2147483136", "--steps", most, "-m", most, "-g", most, "--warmup", "18446744073709551615"];
    succeed(&with(&plan, &all));

    let dir = data();
    let (out, train) = (dir.path().join("run"), dir.path().join("train.bin"));
    succeed(&with(&["train", "--device", "cpu", "--train", text(&train), "--steps", "1", "--out", text(&out)], TINY));
    let model = out.join("model_00000001.bin");
    let eval = ["eval", "--model", text(&model), "--val", text(&train), "--device", "cpu"];
    fail(&with(&eval, &["--batch", "134217727", "--seq", "16"]), &["train.bin holds 2000 tokens", "--batch"]);
    fail(&with(&eval, &["--batch", most, "--seq", "16"]), &["--batch 2147483647 x --seq 16", "tokens at once"]);
}

#[test]
fn errors_name_invalid_flags() {
    for (args, part) in [
        (&["train", "--batch", "0"][..], "'0' for '--batch <B>': expected a whole number from 1 to 2147483647"),
        (&["train", "--batch", "2147483648"], "'2147483648' for '--batch <B>'"),
        (&["train", "--lr", "-1"], "'-1' for '--lr <LR>': expected a finite number of at least 0"),
        (&["train", "-l", "-0.001"], "'-0.001' for '--lr <LR>'"),
        (&["train", "--lr", "nan"], "'nan' for '--lr <LR>': expected a finite number of at least 0"),
        (&["train", "--keep", "-2"], "'-2' for '--keep <N>': expected a whole number of at least 0"),
        (&["train", "--zero-stage", "4"], "'4' for '--zero-stage <0|1|2|3>': expected 0, 1, 2 or 3"),
        (&["train", "--shard-size", "0"], "'0' for '--shard-size <N>': expected a whole number from 1 to"),
        (&["sample", "--model", "x.bin", "--seed", "-1"], "'-1' for '--seed <N>': expected a whole number from 0"),
        (
            &["data", "text", "x", "-o", "y", "--val-fraction", "2"],
            "'2' for '--val-fraction <X>': expected a number from 0",
        ),
        (
            &["data", "text", "x", "-o", "y", "--format", "xml"],
            "'xml' for '--format <text|jsonl|parquet|csv>': expected text, jsonl, parquet or csv",
        ),
        (&["train", "--final-fraction", "5"], "'5' for '--final-fraction <X>': expected a number from 0 to 1"),
        (&["train", "--kernels", "sm_1"], "[possible values: sm_80, sm_89, sm_90a]"),
        (&["train", "-h", "1"], "--hellaswag FILE"),
        (&["train", "-h", "0"], "--hellaswag FILE"),
        (&["train", "--val", "x.bin"], "--train"),
        (&["eval", "--model", "x.bin"], "--val"),
        (&["train", "--hellaswag-examples", "5"], "--hellaswag"),
        (&["nothing"], "nothing"),
    ] {
        let output = llm_rs(args);
        let err = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {err}");
        assert!(err.contains(part) && !err.contains("found a panic"), "{args:?}: {err}");
    }
}

/// Runs the program while nobody reads its output. Returns its exit code and its standard error.
fn with_closed_output(args: &[&str]) -> (Option<i32>, String) {
    use std::process::Stdio;
    let mut command = Command::new(env!("CARGO_BIN_EXE_llm-rs"));
    let mut child = command.args(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn a_closed_pipe_ends_commands_as_sigpipe_does() {
    let dir = data();
    let train = dir.path().join("train.bin");
    let show = ["data", "show", text(&train), "--tokenizer", "bytes"];
    assert_eq!(with_closed_output(&show), (Some(141), String::new()));
    let (code, err) = with_closed_output(&["selftest", "--determinism", "--steps", "1", "--device", "cpu"]);
    assert!(code == Some(141) && !err.contains("found a panic"), "{err}");
}

#[test]
fn training_without_output_and_directory_is_an_error() {
    let (code, err) = with_closed_output(&with(&["train", "--device", "cpu", "--out", "none", "--steps", "20"], TINY));
    assert_eq!(code, Some(1), "{err}");
    assert!(
        err.starts_with("error: ")
            && err.contains("standard output: expected an open file or pipe, found a closed one"),
        "{err}"
    );
    assert!(err.contains("--out DIR") && !err.contains("found a panic"), "{err}");
}

#[test]
fn settings_without_effect_are_reported() {
    let plan = ["train", "--device", "cpu", "--dry-run", "--steps", "20"];
    let noted = |flags: &[&str]| -> Vec<String> {
        let printed = succeed(&with(&with(&plan, TINY), flags));
        printed.lines().filter_map(|line| line.strip_prefix("note: ")).map(str::to_owned).collect()
    };
    for (flags, note) in [
        (&["--matmul", "rust"][..], "--matmul has no effect: the run uses the CPU"),
        (&["--kernels", "sm_80"], "--kernels has no effect: the run uses the CPU"),
        (&["--tf32", "1"], "--tf32 has no effect: the run uses the CPU"),
        (&["--local-rank", "9"], "--local-rank has no effect: the run uses the CPU"),
        (&["--gpu-info-every", "9"], "--gpu-info-every has no effect: the run uses the CPU"),
        (
            &["--warmup", "21"],
            "--warmup never reaches the peak learning rate: the run ends after 20 steps, during the warmup",
        ),
        (
            &["-k", "constant", "--warmup", "2"],
            "--warmup has no effect: --schedule constant has no learning rate other than the peak",
        ),
        (&["--zero-stage", "2"], "--zero-stage has no effect: the run has one rank"),
        (&["--shard-size", "2"], "--shard-size has no effect: the run has one rank"),
        (&["--check-ranks", "2"], "--check-ranks has no effect: the run has one rank"),
        (&["-s", "0", "-g", "7"], "--sample-length has no effect: --sample-every is 0"),
        (&["--val-every", "0", "--val-batches", "3"], "--val-batches has no effect: --val-every is 0"),
        (&["--lr", "0"], "--lr 0 has no effect: it leaves the weights unchanged"),
        (&["--master-weights", "0"], "--master-weights has no effect: parameters are f32"),
        (&["--hash-every", "21"], "--hash-every has no effect: the run ends after 20 steps"),
        (
            &["--skip-loss-z", "3"],
            "--skip-loss-z has no effect: the run ends after 20 steps, and the first z-score is that of step 129",
        ),
        (
            &["--out", "unused", "--major-every", "2", "--checkpoint-minutes", "0"],
            "--major-every has no effect: --keep is 0, so that all checkpoints are kept",
        ),
    ] {
        assert_eq!(noted(flags), [note], "{flags:?}");
    }
    assert!(noted(&["--lr", "0", "--embedding-lr", "0.1"]).is_empty());
    assert!(noted(&["--warmup", "20", "--final-fraction", "0.5", "--matmul", "auto"]).is_empty());
}

#[test]
fn tables_and_tests_that_compare_nothing_are_errors() {
    fail(
        &["selftest", "no such operation", "--small"],
        &["expected at least one case, found none; nothing was compared"],
    );
    fail(&["selftest", "--device", "cpu"], &["--device: expected a GPU or its emulator, found cpu"]);
    fail(&["bench", "gemm", "--device", "cpu", "-e", "d6", "-b", "1", "-t", "16"], &["expected a GPU, found CPU"]);
    let kernels = "bench kernels nothing --device cpu -e d6 -b 1 -t 32 --copy 1000 --gemm 16";
    fail(&kernels.split(' ').collect::<Vec<_>>(), &["expected an operation whose name contains 'nothing', found none"]);
    fail(&["selftest", "--report", "report.json", "--small"], &["'--report <FILE>' cannot be used with '--small'"]);
    fail(&["selftest", "--report", "report.json"], &["--report: expected a GPU, found none"]);
    fail(&["simulate", "--seeds", "0"], &["invalid value '0' for '--seeds <N>': expected a whole number from 1"]);
    // Without a GPU, the kernels run in the emulator.
    let printed = succeed(&["selftest", "global_norm"]);
    assert!(printed.contains("against CPU") && !printed.contains("\n0 cases passed"), "{printed}");
    let printed = succeed(&["selftest", "fp8 current"]);
    assert!(printed.contains("against CPU") && !printed.contains("\n0 cases passed"), "{printed}");
}

/// GPUs without cubins of their own run the PTX for sm_80 or sm_89. No such GPU was at hand, so at least its assembler accepts the kernels.
#[test]
#[ignore = "slow: scripts/nightly runs it"]
fn kernels_assemble_for_every_supported_gpu() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let ptxas = cuda_builder::find_cuda_tool("ptxas", Some(&root)).expect("scripts/setup installs ptxas");
    let dir = tempfile::tempdir().unwrap();
    let modules = engine::cuda::EMBEDDED.modules().unwrap();
    let archs: Vec<_> = modules.iter().map(|module| module.arch).collect();
    assert_eq!(archs, ["sm_80", "sm_89", "sm_90a"], "expected a program built with LLM_RS_CUBINS=all");
    for module in modules {
        let ptx = dir.path().join(module.arch).with_extension("ptx");
        fs::write(&ptx, module.ptx).unwrap();
        let others: &[&str] = match module.arch {
            "sm_80" => &["sm_86", "sm_89", "sm_90", "sm_100", "sm_120"],
            "sm_89" => &["sm_90", "sm_100", "sm_120"],
            _ => &[],
        };
        for arch in [module.arch].iter().chain(others) {
            let assembled = Command::new(&ptxas)
                .args(["-O1", "-arch", arch, "-o"])
                .arg(dir.path().join("cubin"))
                .arg(&ptx)
                .output();
            let assembled = assembled.unwrap();
            assert!(assembled.status.success(), "{arch}: {}", String::from_utf8_lossy(&assembled.stderr));
        }
    }
}

/// The losses of a fixed run. Those of GPUs are compared by the same script on a machine with one.
#[test]
fn losses_are_those_that_were_stored() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let dir = tempfile::tempdir().unwrap();
    let stored = fs::read_to_string(root.join("tests/golden/cpu-fp32.txt")).unwrap();
    // A loss that differs by one percent is found, and only that.
    let change = |line: &str| match line.split_once(' ') {
        Some(("37", loss)) => format!("37 {}", loss.parse::<f64>().unwrap() * 1.01),
        _ => line.to_owned(),
    };
    fs::write(dir.path().join("cpu-fp32.txt"), stored.lines().map(change).collect::<Vec<_>>().join("\n") + "\n")
        .unwrap();
    let mut command = Command::new(root.join("scripts/golden_losses"));
    command.arg(env!("CARGO_BIN_EXE_llm-rs")).args(["--device", "cpu"]).env("GOLDEN", dir.path());
    let output = command.output().unwrap();
    let printed = String::from_utf8_lossy(&output.stdout);
    let differences: Vec<_> = printed.lines().filter(|line| line.contains("expected")).collect();
    assert!(matches!(differences[..], [line] if line.starts_with("step 37: expected loss ")), "{printed}");
    assert!(!output.status.success() && printed.contains("cpu-fp32: 52 losses, "), "{printed}");
}

#[test]
fn bench_kernels_compares_operations_with_the_roofline() {
    let dir = tempfile::tempdir().unwrap();
    let json = dir.path().join("kernels.json");
    let args = "bench kernels layernorm --device cpu -e d12,d24 -b 1 -t 32 --copy 100000 --gemm 64 --json";
    let output = Command::new(env!("CARGO_BIN_EXE_llm-rs")).args(args.split(' ')).arg(&json).output().unwrap();
    let printed = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{printed}{}", String::from_utf8_lossy(&output.stderr));
    let json: serde_json::Value = serde_json::from_slice(&fs::read(&json).unwrap()).unwrap();
    let rows = json["rows"].as_array().unwrap();
    let names: Vec<_> = rows.iter().map(|row| row["operation"].as_str().unwrap()).collect();
    let norms = ["layernorm_forward", "layernorm_backward"];
    assert_eq!(names, [&["copy", "gemm"][..], &norms, &norms].concat());
    for (row, line) in rows.iter().zip(printed.lines().skip(1)) {
        let number = |key: &str| row[key].as_f64().unwrap();
        assert!(number("us") > 0.0 && number("us_least") <= number("us") && number("us") <= number("us_most"), "{row}");
        assert!(line.contains(&format!("{:.1}", number("us"))), "{row} is not in {line}");
        let (rate, share) =
            if row["operation"] == "gemm" { ("tflops", "percent_of_product") } else { ("gbs", "percent_of_copy") };
        assert!(number(rate) > 0.0 && number(share) > 0.0, "{row}");
    }
    assert_eq!((&rows[2]["model"], &rows[5]["model"]), (&"d12".into(), &"d24".into()));
    // LayerNorm forward moves 4 bytes for each of 2 x 32 x 768 floats, and 8 bytes for each row.
    let row = &rows[2];
    let bytes = row["gbs"].as_f64().unwrap() * row["us"].as_f64().unwrap() * 1e3;
    assert!((bytes - f64::from(2 * 32 * 768 * 4 + 32 * 8)).abs() < 1.0, "{bytes}");
}

/// Runs the program as if the user had started it directly rather than through cargo.
fn directly(args: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_llm-rs")).args(args).env_remove("CARGO").output().unwrap();
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn version_names_commit_build_and_kernels() {
    let printed = directly(&["--version"]);
    assert!(printed.starts_with(concat!("llm-rs ", env!("CARGO_PKG_VERSION"), "\n")), "{printed}");
    let value = |name: &str| printed.lines().find_map(|line| line.strip_prefix(name)).map(str::to_owned).unwrap();
    let hash = value("commit: ");
    let hash = hash.strip_suffix("-dirty").unwrap_or(&hash);
    assert!(hash == "unknown" || hash.chars().all(|c| c.is_ascii_hexdigit()), "{printed}");
    assert!(value("build: ").starts_with(if cfg!(debug_assertions) { "debug, " } else { "release, " }), "{printed}");
    let kernels = value("GPU kernels: ");
    assert!(kernels.contains("sm_90a") || kernels.starts_with("none ("), "{printed}");
    assert_eq!(directly(&["-V"]).lines().count(), 1);
}

#[test]
fn hints_repeat_the_command_as_it_was_called() {
    let program = env!("CARGO_BIN_EXE_llm-rs");
    let next = |printed: &str| printed.lines().find_map(|line| line.strip_prefix("next: ")).unwrap().to_owned();
    let plan = with(&["train", "--device", "cpu", "--dry-run"], TINY);
    assert_eq!(next(&directly(&plan)), format!("{program} train --device cpu {}", TINY.join(" ")));

    let dir = data();
    let train = dir.path().join("tr*n.bin");
    let run = with(&["train", "--device", "cpu", "--out", "none", "--steps", "1", "--train", text(&train)], TINY);
    let expected = format!("{program} train --device cpu --steps 1 --train '{}' {}", text(&train), TINY.join(" "));
    assert_eq!(next(&directly(&run)), expected);
    let through_cargo =
        Command::new(program).args(&plan).env("CARGO", "cargo").env("CARGO_PKG_NAME", "host").output().unwrap();
    let hint = next(&String::from_utf8(through_cargo.stdout).unwrap());
    assert!(hint.starts_with("cargo run ") && hint.contains(" -p host -- train --device cpu"), "{hint}");
}

#[test]
fn a_repeated_flag_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("run.toml");
    fs::write(&config, "train = 'c.bin'\nlr = 1\nkeep = 3\nverbose = true\n").unwrap();
    let from_file = ["--config", text(&config)];
    let check = |arguments: &[&str], flag: &str, hint: &str| {
        let output = llm_rs(arguments);
        let err = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {err}");
        let start = format!("error: {flag}");
        assert!(err.starts_with(&start) && err.contains("expected this flag once") && err.contains(hint), "{err}");
    };
    for (flags, flag) in [
        (&["-l", "1", "--batch", "2", "--lr", "1"][..], "--lr <LR>"),
        (&["-nk", "3", "--out", "o", "--keep", "3"], "--keep <N>"),
        (&["-y", "--out", "o", "--resume"], "--resume"),
        (&["--verbose", "--verbose"], "--verbose"),
    ] {
        for config in [&[][..], &from_file] {
            check(&with(&with(&["train"], config), flags), flag, "keep one of them");
        }
    }
    let glob = "quote one pattern that matches all files";
    check(&["eval", "-e", "a", "-jb.bin", "--val", "c.bin"], "--val <GLOB>", glob);
}

#[test]
fn train_help_starts_with_the_data_and_ends_with_examples() {
    let printed = succeed(&["train", "--help"]);
    let headings: Vec<&str> =
        printed.lines().filter(|line| !line.starts_with([' ', 'U']) && line.ends_with(':')).collect();
    assert_eq!((headings[0], headings[1]), ("Data:", "Model:"), "{printed}");
    assert_eq!(headings[headings.len() - 2..], ["Detection of faulty hardware:", "Examples:"], "{printed}");
    assert!(
        !headings.contains(&"Options:") && printed.contains("gpt2-medium") && printed.contains("--help"),
        "{printed}"
    );
}

#[test]
fn the_model_accepts_the_names_of_gpt2() {
    for (name, layers) in [("gpt2", 12), ("gpt2-medium", 24), ("gpt2-large", 36), ("gpt2-xl", 48)] {
        let printed = succeed(&["train", "--device", "cuda", "--dry-run", "--model", name]);
        assert!(printed.contains(&format!("{name}: {layers} layers")), "{printed}");
    }
}

/// Returns the value of a row of the table that `train` prints first.
fn row<'a>(printed: &'a str, name: &str) -> &'a str {
    let row = printed.lines().find_map(|line| line.strip_prefix(&format!("{name:<20} ")));
    row.unwrap_or_else(|| panic!("no row {name}: {printed}"))
}

#[test]
fn a_named_model_is_planned_without_data_at_its_own_size() {
    // The example of the help text.
    let plan = ["train", "--device", "cuda", "--dry-run", "--batch", "8", "--model"];
    let printed = succeed(&with(&plan, &["gpt2-xl"]));
    assert!(row(&printed, "parameters").starts_with("1557686400, "), "{printed}");
    assert_eq!(row(&printed, "batch"), "8 x 1024 tokens x 1 = 8192 per step");
    assert_eq!([row(&printed, "training data"), row(&printed, "steps")], ["none", "one epoch"]);
    assert!(printed.contains("warning: planned without data") && !printed.contains("next: "), "{printed}");
    let printed = succeed(&with(&plan, &["llama3:1b", "--train", "/nowhere/*.bin", "--steps", "7"]));
    assert!(printed.contains("warning: planned without data") && printed.contains("'/nowhere/*.bin'"), "{printed}");
    assert_eq!([row(&printed, "training data"), row(&printed, "steps")], ["/nowhere/*.bin, not opened", "7"]);
    // `plan` has the same defaults.
    let dir = data();
    let train = dir.path().join("train.bin");
    let shape = ["--layers", "1", "--heads", "1", "--channels", "64", "--batch", "1", "--seq", "32"];
    let out = dir.path().join("short");
    let run = ["train", "--device", "cpu", "--train", text(&train), "--steps", "1", "--out", text(&out)];
    succeed(&with(&run, &shape));
    let printed = succeed(&["plan", "--gpus", "1", "--batch", "1", "--model", text(&out)]);
    assert!(printed.contains("sequences of 32"), "{printed}");
    // Data are opened, and their vocabulary is checked.
    let printed = succeed(&with(&plan, &["gpt2", "--train", text(&train), "--seq", "16", "--tokenizer", "bytes"]));
    assert!(row(&printed, "model").ends_with("vocabulary 256") && printed.contains("next: "), "{printed}");
    let run = ["train", "--device", "cpu", "--model", "gpt2", "--train", "/nowhere/*.bin"];
    fail(&run, &["--train: no file matches '/nowhere/*.bin'"]);
}

#[test]
fn the_memory_table_is_short_unless_verbose() {
    let run = ["train", "--device", "cpu", "--steps", "1", "--val-every", "0", "--sample-every", "0", "--out", "none"];
    let run = with(&run, TINY);
    let short = succeed(&run);
    for group in ["parameters", "gradients", "optimizer", "activations", "workspace", "total"] {
        let rows = short.lines().filter(|line| line.starts_with(&format!("  {group} ")) && line.ends_with(" MiB"));
        assert_eq!(rows.count(), 1, "{group}: {short}");
    }
    assert!(!short.contains("  params "), "{short}");
    for flag in ["--verbose", "--dry-run"] {
        let long = succeed(&with(&run, &[flag]));
        assert!(long.contains("  params ") && long.contains("\nTotal "), "{long}");
    }
}

#[test]
fn a_run_reports_steps_without_z_scores_and_ends_with_losses_and_model() {
    let dir = data();
    let (train, val, out) = (dir.path().join("train.bin"), dir.path().join("val.bin"), dir.path().join("run"));
    let run = ["train", "--device", "cpu", "--steps", "2", "--train", text(&train), "--val", text(&val)];
    let printed = succeed(&with(&with(&run, TINY), &["--out", text(&out)]));
    assert!(!printed.contains("nan"), "{printed}");
    let loss = |line: &str| -> f64 {
        let line = printed.lines().find_map(|l| l.strip_prefix(line)).unwrap();
        line.split(' ').next().unwrap().parse().unwrap()
    };
    let (last, before, after) =
        (loss("step    2/2 | loss "), loss("step    0/2 | val loss "), loss("step    2/2 | val loss "));
    let losses = format!("final train loss {last:.4}, validation loss {after:.4} ({before:.4} before training)");
    assert!(printed.contains(&format!("\n{losses}\n")), "{losses}: {printed}");
    let model = format!("\nmodel: {}\n", out.join("model_00000002.bin").display());
    assert!(printed.contains(&model), "{printed}");
    assert!(
        printed.find(&losses) < printed.find(&model) && printed.find(&model) < printed.find("\nnext: "),
        "{printed}"
    );
}

#[test]
fn the_cpu_fallback_is_explained_in_one_short_line() {
    let printed = succeed(&with(&["train", "--dry-run"], TINY));
    let device = printed.lines().next().unwrap();
    // A machine with a GPU has no fallback to explain.
    if device.contains("CPU") {
        assert!(device.ends_with("; see llm-rs doctor)") && device.len() < 100, "{device}");
        assert_eq!(printed.matches("GPU").count(), 1, "{printed}");
    }
}
