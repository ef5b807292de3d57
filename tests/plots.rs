//! `plot`, `log`, the plots and event files of runs, shell completions and manual pages, as users run them.

use crate::common::{fail, succeed, text};
use std::fs;
use std::path::{Path, PathBuf};

const TINY: &[&str] = &["--layers", "1", "--heads", "2", "--channels", "16", "--batch", "2", "--seq", "16"];

/// Trains a small model for `steps` steps, and returns what it prints.
fn train(out: &Path, steps: &str, more: &[&str]) -> String {
    let run =
        ["train", "--device", "cpu", "--sample-every", "0", "--val-every", "2", "--steps", steps, "--out", text(out)];
    succeed(&[&run, TINY, more].concat())
}

/// Returns the files of a directory for TensorBoard, oldest first.
fn event_files(dir: &Path) -> Vec<PathBuf> {
    let paths = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let mut found: Vec<PathBuf> = paths.filter(|path| path.to_string_lossy().contains(".tfevents.")).collect();
    found.sort_by_key(|path| path.metadata().unwrap().created().unwrap());
    found
}

/// Returns the data of the records of an event file, whose lengths and checksums must be right.
fn records(path: &Path) -> Vec<Vec<u8>> {
    let file = fs::read(path).unwrap();
    let mut rest = &file[..];
    let mut found = Vec::new();
    let checked = |data: &[u8], checksum: &[u8]| {
        let crc = crc32c::crc32c(data);
        let masked = crc.rotate_right(15).wrapping_add(0xa282_ead8);
        assert_eq!(checksum, masked.to_le_bytes(), "the checksum of {data:?}");
    };
    while !rest.is_empty() {
        checked(&rest[..8], &rest[8..12]);
        let end = 12 + u64::from_le_bytes(rest[..8].try_into().unwrap()) as usize;
        checked(&rest[12..end], &rest[end..end + 4]);
        found.push(rest[12..end].to_vec());
        rest = &rest[end + 4..];
    }
    found
}

fn contains(record: &[u8], text: &str) -> bool {
    record.windows(text.len()).any(|window| window == text.as_bytes())
}

#[test]
fn a_run_draws_its_log_and_writes_event_files_which_a_resumed_run_continues() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("run");
    let printed = train(&out, "4", &["--tensorboard"]);
    let shown = out.display();
    assert!(printed.contains(&format!("plots: {shown}/plots.svg, {shown}/report.html\n")), "{printed}");
    let svg = fs::read_to_string(out.join("plots.svg")).unwrap();
    assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n") && svg.contains(">validation loss<"), "{svg}");
    let page = fs::read_to_string(out.join("report.html")).unwrap();
    assert!(page.contains("<td>4</td>") && page.contains("steps = 4"), "{page}");

    let lines = fs::read_to_string(out.join("main.jsonl")).unwrap();
    for line in lines.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap()) {
        let step = line["step"].as_u64().unwrap();
        // An evaluation precedes its step, so it has seen the tokens of the steps before.
        let steps = if line.get("lr").is_some() { step + 1 } else { step };
        assert_eq!(line["tokens"], steps * 32);
        assert!(line["time"].as_f64().unwrap() > 1.7e9);
    }
    let [first] = &event_files(&out)[..] else { panic!("expected one event file") };
    let written = records(first);
    assert_eq!(written.len(), 1 + lines.lines().count());
    assert!(contains(&written[0], "brain.Event:2") && contains(&written[1], "eval/loss"));
    assert!(contains(written.last().unwrap(), "eval/loss") && contains(&written[2], "train/gradient_norm"));

    // The next file begins with the step at which the run was resumed.
    train(&out, "6", &["--resume", "--force-resume"]);
    let [_, second] = &event_files(&out)[..] else { panic!("expected two event files") };
    let written = records(second);
    let session = [&b"\x10\x04"[..], b"\x3a\x02\x08\x01"].concat();
    assert!(written[1].ends_with(&session), "{:?}", written[1]);
    // The evaluation before that step is repeated, since TensorBoard has discarded it. It was made by the first run.
    assert!(contains(&written[2], "eval/loss") && contains(&written[3], "train/loss"));
    let validation = lines.lines().last().unwrap();
    let time = serde_json::from_str::<serde_json::Value>(validation).unwrap()["time"].as_f64().unwrap();
    assert_eq!(written[2][1..9], time.to_le_bytes());
    assert_eq!(written.len(), 2 + 1 + 2 + 1);
}

#[test]
fn a_run_whose_plots_cannot_be_written_ends_with_a_warning() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("report.html")).unwrap();
    fs::write(dir.path().join(".llm-rs-run"), "").unwrap();
    let printed = train(dir.path(), "1", &[]);
    assert!(printed.contains("warning: no plots: cannot write ") && printed.contains("final train loss"), "{printed}");
    assert!(!printed.contains("plots: /"), "{printed}");
}

#[test]
fn plots_of_several_runs_are_written_in_each_format() {
    let dir = tempfile::tempdir().unwrap();
    let log = |name: &str, loss: f64| {
        let path = dir.path().join(name);
        fs::create_dir(&path).unwrap();
        let line = |i: u32| format!("s:{i} trl:{:.4} lr:0.0003 norm:1.5\n", loss - f64::from(i) / 20.0);
        fs::write(
            path.join("main.log"),
            (0..50).map(line).collect::<String>() + "s:50 tel:3.0\ns:50 eval:0.3\ns:51 tr",
        )
        .unwrap();
        path
    };
    let (a, b) = (log("first", 6.0), log("second", 5.0));
    let file = |name: &str| dir.path().join(name);
    let named = format!("other={}", b.display());
    let plot = |more: &[&str]| succeed(&[&["plot", text(&a), &named], more].concat());
    let printed = plot(&["--out", text(&file("p.svg")), "--html", text(&file("p.html")), "--reference", "gpt2-124m"]);
    assert_eq!(printed, format!("wrote {0}/p.svg\nwrote {0}/p.html\n", dir.path().display()));
    let svg = fs::read_to_string(file("p.svg")).unwrap();
    for text in [">first<", ">other<", "GPT-2 124M: 3.425", "HellaSwag accuracy"] {
        assert!(svg.contains(text), "{text}: {svg}");
    }
    plot(&["--out", text(&file("p.PNG")), "--metrics", "loss,norm", "--log-x", "--log-y", "--smooth", "0"]);
    assert!(fs::read(file("p.PNG")).unwrap().starts_with(b"\x89PNG\r\n"));
    plot(&["--out", text(&file("t.svg")), "--x", "tokens", "--tokens-per-step", "524288"]);
    assert!(fs::read_to_string(file("t.svg")).unwrap().contains(">25M<"));

    for (arguments, expected) in [
        (vec!["--out", "p.jpg"], "p.jpg: expected a name that ends in .svg, .png or .html"),
        (vec!["--html", "p.svg"], "--html: expected a name that ends in .html, found p.svg"),
        (vec!["--x", "time"], "main.log: expected step times for --x time, found none; use --x steps"),
        (
            vec!["--x", "tokens"],
            "main.log: expected token counts for --x tokens, found none; state them with --tokens-per-step",
        ),
        (vec!["--metrics", "speed"], "tokens per second: expected values in a log, found none"),
        (vec!["--reference", "gpt4"], "expected gpt2-124m, gpt2-350m"),
        (vec!["--smooth", "1"], "expected a number of at least 0 and below 1"),
        (vec!["--live"], "--live: expected a terminal, found a file or pipe; use --out FILE"),
        (vec!["no-such-run"], "no-such-run: expected the directory of a run or a log file, found nothing"),
    ] {
        fail(&[&["plot", text(&a)], &arguments[..]].concat(), &[expected]);
    }

    // A damaged log is drawn, with a warning.
    fs::write(a.join("main.log"), "s:0 trl:5.0\ngarbage\ns:1 trl:4.0\n").unwrap();
    let output = crate::common::llm_rs(&["plot", text(&a), "--out", text(&file("d.svg"))]);
    let warning = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && warning.contains("main.log: 1 damaged line was left out"), "{warning}");
}

#[test]
fn logs_are_exported() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("run");
    train(&out, "2", &[]);
    let printed = succeed(&["log", text(&out)]);
    assert!(printed.contains("\n    steps                    2\n"), "{printed}");
    let table = succeed(&["log", text(&out), "--csv"]);
    let rows: Vec<Vec<&str>> = table.lines().map(|line| line.split(',').collect()).collect();
    assert_eq!((rows.len(), rows[0][4], rows[0][10]), (4, "loss", "val_loss"));
    // The row after the last step has a validation loss alone.
    assert!(
        rows[3][..3] == ["run", "2", "64"] && rows[3][4].is_empty() && rows[3][10].parse::<f64>().is_ok(),
        "{table}"
    );
    let file = dir.path().join("table.csv");
    succeed(&["log", text(&out), "--csv", text(&file)]);
    assert_eq!(fs::read_to_string(&file).unwrap(), table);
    // A log that is named after --csv is not overwritten.
    let log = out.join("main.log");
    let before = fs::read(&log).unwrap();
    fail(&["log", "--csv", text(&log), text(&out)], &["name the runs before --csv"]);
    assert_eq!(fs::read(&log).unwrap(), before);

    let events = dir.path().join("events");
    succeed(&["log", text(&out), "--tensorboard", text(&events)]);
    let written = records(&event_files(&events.join("run"))[0]);
    assert_eq!(written.len(), 1 + String::from_utf8(before).unwrap().lines().count());
}

#[test]
fn quiet_runs_print_results_and_json_runs_print_records() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("run");
    let printed = train(&out, "2", &["--json"]);
    assert_eq!(printed, fs::read_to_string(out.join("main.jsonl")).unwrap());
    assert_eq!(printed.lines().count(), 4);
    let run = ["train", "--device", "cpu", "--sample-every", "0", "--steps", "2", "--out", "none", "--quiet"];
    let printed = succeed(&[&run, TINY].concat());
    assert!(printed.starts_with("final train loss ") && printed.ends_with("model: not saved\n"), "{printed}");
    fail(&["train", "--quiet", "--json"], &["cannot be used with"]);
}

#[test]
fn completions_and_manual_pages_name_every_command() {
    for shell in ["bash", "zsh", "fish"] {
        let script = succeed(&["completions", shell]);
        for word in ["tensorboard", "determinism", "tinyshakespeare"] {
            assert!(script.contains(word), "{shell}: {word}");
        }
    }
    let dir = tempfile::tempdir().unwrap();
    let pages = dir.path().join("man1");
    succeed(&["man", text(&pages)]);
    for name in ["llm-rs.1", "llm-rs-train.1", "llm-rs-plot.1", "llm-rs-data-text.1"] {
        let page = fs::read_to_string(pages.join(name)).unwrap();
        assert!(page.contains(".TH") && page.contains(".SH SYNOPSIS"), "{name}: {page}");
    }
    assert!(fs::read_to_string(pages.join("llm-rs-train.1")).unwrap().contains("event files for TensorBoard"));
}
