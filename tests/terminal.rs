//! The program in a terminal of 40 columns: progress bars, colors and help. `script` of util-linux provides the terminal.

use crate::common::{llm_rs, succeed};
use std::fs;
use std::io::{Read, Write};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

const COLUMNS: usize = 40;
/// A command that takes longer than the delay after which bars appear.
const LONG: &str = "simulate --seeds 20";

/// Runs the program in a terminal and returns everything that it writes there.
fn in_terminal(args: &str, no_color: Option<&str>) -> String {
    let program = env!("CARGO_BIN_EXE_llm-rs");
    let mut script = Command::new("script");
    script.args(["-qec", &format!("stty cols {COLUMNS} rows 24; exec {program} {args}"), "/dev/null"]);
    script.env("TERM", "xterm").env_remove("NO_COLOR").envs(no_color.map(|value| ("NO_COLOR", value)));
    String::from_utf8(script.output().expect("script is installed").stdout).unwrap()
}

/// Returns the lines that were on the screen at some time, without escape sequences.
fn shown(written: &str) -> Vec<String> {
    let mut lines = Vec::new();
    for line in written.split(['\r', '\n']) {
        let mut parts = line.split("\x1b[");
        let first = parts.next().unwrap_or_default().to_owned();
        let after_escape = |part: &str| {
            let end = part.find(|c: char| c.is_ascii_alphabetic()).map_or(part.len(), |at| at + 1);
            part[end..].to_owned()
        };
        lines.push(parts.map(after_escape).fold(first, |line, part| line + &part));
    }
    lines
}

/// Whether an escape sequence sets a color. A bar, which slow work shows, has others that erase the line.
fn sets_color(written: &str) -> bool {
    written
        .split("\x1b[")
        .skip(1)
        .any(|part| part.trim_start_matches(|c: char| c.is_ascii_digit() || c == ';').starts_with('m'))
}

fn is_bar(line: &str) -> bool {
    line.contains("% | ") && line.trim_end().ends_with(" left")
}

#[test]
fn long_work_shows_the_time_left_and_leaves_its_result() {
    let lines = shown(&in_terminal(LONG, None));
    let bars: Vec<&String> = lines.iter().filter(|line| is_bar(line)).collect();
    assert!(!bars.is_empty() && bars.iter().all(|bar| bar.starts_with("seeds ")), "{lines:?}");
    assert!(bars.iter().all(|bar| bar.len() <= COLUMNS), "{bars:?}");
    assert!(bars.iter().any(|bar| bar.trim_end().ends_with("s left")), "no time left: {bars:?}");
    let result = lines.iter().position(|line| line.starts_with("| all | 20 | ")).expect("the result is printed");
    assert!(!lines[result..].iter().any(|line| is_bar(line)), "{lines:?}");
}

#[test]
fn quiet_json_and_piped_commands_show_no_bars() {
    let quiet = shown(&in_terminal(&format!("{LONG} --quiet"), None));
    assert!(quiet.iter().any(|line| line.starts_with("| all | 20 | ")) && !quiet.iter().any(|line| is_bar(line)));
    let json: serde_json::Value = serde_json::from_str(&in_terminal(&format!("{LONG} --json"), None)).unwrap();
    let all = json.as_array().unwrap().last().unwrap();
    assert_eq!((&all["fault"], &all["seeds"]), (&"all".into(), &20.into()));
    let piped = llm_rs(&LONG.split(' ').collect::<Vec<_>>());
    assert!(piped.status.success() && piped.stderr.is_empty(), "{}", String::from_utf8_lossy(&piped.stderr));
}

#[test]
fn colors_need_a_terminal_without_no_color() {
    for args in ["doctor", "selftest swiglu --small", "data check /nowhere.bin", "train --no-such-flag", "--help"] {
        let colors = |no_color| sets_color(&in_terminal(args, no_color));
        assert!(colors(None) && colors(Some("")) && !colors(Some("1")), "{args}");
        let piped = llm_rs(&args.split(' ').collect::<Vec<_>>());
        assert!(![piped.stdout, piped.stderr].concat().contains(&b'\x1b'), "{args}");
    }
}

#[test]
fn help_of_every_command_fits() {
    for args in [
        "",
        "train",
        "sweep",
        "eval",
        "data text",
        "data check",
        "tokenizer train",
        "bench step",
        "selftest",
        "verify",
        "simulate",
    ] {
        for line in shown(&in_terminal(&format!("{args} --help"), Some("1"))) {
            // Usage, example commands and addresses are not wrapped.
            let may_be_long = ["Usage: ", "llm-rs ", "http", "  --", "    "].iter().any(|text| line.contains(text));
            assert!(line.len() <= COLUMNS || may_be_long, "{args}: {line}");
        }
    }
    let help = in_terminal("data text --help", Some("1"));
    assert!(help.contains("Directory for the shards"), "{help}");
}

#[test]
fn doctor_begins_with_its_verdict() {
    let json: serde_json::Value = serde_json::from_str(&succeed(&["doctor", "--json"])).unwrap();
    let text = succeed(&["doctor"]);
    assert!(text.starts_with(&format!("{}\n", json["verdict"].as_str().unwrap())), "{text}");
    assert_eq!(json["ready_for_gpu"], text.starts_with("Ready to train on a GPU."));
    assert!(
        json["findings"].as_array().unwrap().iter().all(|finding| text.contains(finding["detail"].as_str().unwrap()))
    );
}

#[test]
fn selftest_prints_json() {
    let json: serde_json::Value = serde_json::from_str(&succeed(&["selftest", "swiglu", "--small", "--json"])).unwrap();
    let cases = json["cases"].as_array().unwrap();
    assert!(!cases.is_empty() && json["passed"] == cases.len() && json["failed"] == 0, "{json}");
    for case in cases {
        let name = format!("{} {}", case["operation"], case["shape"]);
        assert!(name.contains("swiglu") && case["okay"] == true, "{case}");
        assert!(case["tensors"][0]["max_rel_error"].as_f64() <= case["tensors"][0]["allowed"].as_f64(), "{case}");
    }
}

#[test]
fn the_live_plot_obeys_keys_and_restores_the_terminal() {
    let directory = tempfile::tempdir().unwrap();
    let log = directory.path().join("main.log");
    let lines = (0..50).map(|i| format!("s:{i} trl:{} lr:1 norm:1\n", 10.0 - f64::from(i) / 10.0));
    fs::write(&log, lines.collect::<String>()).unwrap();
    let program = env!("CARGO_BIN_EXE_llm-rs");
    for keys in ["yxsq", "\u{1b}[A\u{3}", "q"] {
        let mut script = Command::new("script");
        let command = format!("stty cols {COLUMNS} rows 24; {program} plot --live {}; stty -a", log.display());
        script.args(["-qec", &command, "/dev/null"]).env("TERM", "xterm").stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut script = script.spawn().expect("script is installed");
        // Keys that come before the program has changed the terminal would be echoed.
        let mut written = Vec::new();
        let mut output = script.stdout.take().unwrap();
        while !String::from_utf8_lossy(&written).contains("q quit") {
            let mut bytes = [0; 4096];
            let length = output.read(&mut bytes).unwrap();
            assert!(length > 0, "{}", String::from_utf8_lossy(&written));
            written.extend(&bytes[..length]);
        }
        let mut input = script.stdin.take().unwrap();
        for key in keys.split_inclusive('A') {
            input.write_all(key.as_bytes()).unwrap();
            thread::sleep(Duration::from_millis(100));
        }
        output.read_to_end(&mut written).unwrap();
        assert!(script.wait().unwrap().success());
        let written = String::from_utf8(written).unwrap();
        let (shown, after) = written.rsplit_once("\x1b[?1049l").expect("the screen of before is shown again");
        let is_dot = |c: char| ('\u{2801}'..='\u{28ff}').contains(&c);
        assert!(shown.starts_with("\x1b[?1049h") && shown.contains(is_dot), "{shown}");
        assert!(
            after.contains("step 50 | train 5.25") && after.contains(" echo ") && after.contains(" icanon"),
            "{after}"
        );
    }
}

/// Reads what a program in a terminal writes until `part` appears after `from`. Returns where it ends.
fn wait_for(output: &mut impl Read, written: &mut Vec<u8>, from: usize, part: &str) -> usize {
    loop {
        if let Some(at) = written[from..].windows(part.len()).position(|found| found == part.as_bytes()) {
            return from + at + part.len();
        }
        let mut bytes = [0; 4096];
        let length = output.read(&mut bytes).unwrap();
        assert!(length > 0, "{part}: {}", String::from_utf8_lossy(written));
        written.extend(&bytes[..length]);
    }
}

#[test]
fn a_conversation_in_a_terminal_has_a_history_and_interrupts() {
    let directory = tempfile::tempdir().unwrap();
    let [run, state] = ["run", "state"].map(|name| directory.path().join(name));
    let model = ["--layers", "1", "--channels", "32", "--heads", "2", "--seq", "32", "--batch", "2", "--steps", "1"];
    let rest = ["--val-every", "0", "--sample-every", "0", "--out", run.to_str().unwrap()];
    succeed(&[&["train", "--device", "cpu"], &model[..], &rest].concat());
    let start = || {
        let program = env!("CARGO_BIN_EXE_llm-rs");
        let mut script = Command::new("script");
        let command =
            format!("stty cols 80 rows 24; exec {program} chat --device cpu --model {} -g 100000000", run.display());
        script.args(["-qec", &command, "/dev/null"]).env("TERM", "xterm").env("XDG_STATE_HOME", &state);
        script.current_dir(directory.path()).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut script = script.spawn().expect("script is installed");
        let (input, output) = (script.stdin.take().unwrap(), script.stdout.take().unwrap());
        (script, input, output)
    };
    let (mut script, mut input, mut output) = start();
    let mut written = Vec::new();
    let at = wait_for(&mut output, &mut written, 0, "> ");
    // A pasted text of two lines is one message. Its answer, which would take hours, ends at Ctrl-C.
    input.write_all(b"\x1b[200~to be\nor not\x1b[201~\r").unwrap();
    let at = wait_for(&mut output, &mut written, at, "not");
    thread::sleep(Duration::from_millis(300));
    input.write_all(b"\x03").unwrap();
    let at = wait_for(&mut output, &mut written, at, "the answer was interrupted");
    let at = wait_for(&mut output, &mut written, at, "> ");
    input.write_all(b"/help\r").unwrap();
    let at = wait_for(&mut output, &mut written, at, "/retry        another answer");
    let at = wait_for(&mut output, &mut written, at, "> ");
    input.write_all(b"/nothing\r").unwrap();
    let at = wait_for(&mut output, &mut written, at, "/nothing: expected a command, found an unknown one");
    wait_for(&mut output, &mut written, at, "> ");
    input.write_all(b"\x04").unwrap();
    output.read_to_end(&mut written).unwrap();
    assert!(script.wait().unwrap().success());
    let history = fs::read_to_string(state.join("llm-rs/chat_history")).unwrap();
    assert!(history.contains("to be\\nor not\n/help\n/nothing\n"), "{history}");
    assert!(!directory.path().join("chat_history").exists());

    // Another conversation has the lines of this one.
    let (mut script, mut input, mut output) = start();
    let mut written = Vec::new();
    let at = wait_for(&mut output, &mut written, 0, "> ");
    input.write_all(b"\x1b[A\x1b[A").unwrap();
    wait_for(&mut output, &mut written, at, "/help");
    input.write_all(b"\x15\x03").unwrap();
    output.read_to_end(&mut written).unwrap();
    assert!(script.wait().unwrap().success());
}
