//! Measurements of communication: `bench step` and `scripts/scaling`.

use crate::world::{PERMANENT, World, free_endpoint, output_text, program, script, wait_for_all};
use serde_json::Value;
use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

#[test]
fn bench_step_measures_the_time_spent_waiting_for_other_ranks() {
    let world = World::new();
    let (json, trace) = (world.path("step.json"), world.path("trace.json"));
    let steps = |ranks: &str| {
        let mut bench = world.bare(&script("several_gpus"));
        bench.arg(ranks).arg(program()).args("bench step --device cpu -e d6 -b 1 -t 16 -a 2 -x 3 --json".split(' '));
        let output = bench.arg(&json).arg("--trace").arg(&trace).output().unwrap();
        let (printed, errors) = output_text(&output);
        assert!(output.status.success(), "{printed}{errors}");
        let json: Value = serde_json::from_slice(&fs::read(&json).unwrap()).unwrap();
        (printed, json)
    };
    let (printed, single) = steps("1");
    assert!(printed.starts_with("step: ") && printed.lines().count() == 3, "{printed}");
    assert!(printed.contains("\nmemory: "), "{printed}");
    assert!(printed.contains("\nupdate alone: ") && single["update_ms"][0].as_f64().unwrap() > 0.0, "{printed}");
    assert!(single["waiting_ms"].is_null());
    let (printed, two) = steps("2");
    // The CPU waits for each of six layers, the embeddings and the loss, and twice for everything so far.
    assert_eq!((&two["ranks"], &two["waits"]), (&2.into(), &10.into()));
    let step = two["step_ms"][0].as_f64().unwrap();
    let waiting = two["waiting_ms"].as_array().unwrap();
    assert_eq!(waiting.len(), 2);
    assert!(waiting.iter().all(|ms| ms.as_f64().unwrap() > 0.05 * step), "{two}");
    assert!(printed.contains("2 ranks, connected by TCP") && printed.contains("in 10 places"), "{printed}");
    let tokens = two["tokens_per_second"].as_f64().unwrap() * step / 1e3;
    assert!((tokens - 64.0).abs() < 1e-6, "{tokens}");
    assert!(two["single_rank_step_ms"].as_f64().unwrap() > 0.0);
    assert_trace_is_complete(&serde_json::from_slice(&fs::read(&trace).unwrap()).unwrap());
    // Ranks with different settings are refused.
    let endpoint = free_endpoint();
    let rank = |rank: &str, t: &str| {
        let mut bench = world.bare(program());
        bench.args("bench step --device cpu -e d6 -b 1 --world-size 2".split(' '));
        bench.args(["-t", t, "--rank", rank, "--rendezvous", &endpoint]).spawn().unwrap()
    };
    let outputs = wait_for_all([rank("0", "16"), rank("1", "32")]);
    let errors = output_text(&outputs[0]).1;
    assert!(
        errors.contains("expected --seq 16 as on rank 0, found 32") && outputs[1].status.code() == Some(PERMANENT),
        "{errors}"
    );
}

#[test]
fn bench_collectives_measures_every_size_on_all_ranks() {
    let world = World::new();
    let json = world.path("collectives.json");
    let run = |ranks: &str, more: &[&str]| {
        let mut bench = world.bare(&script("several_gpus"));
        bench
            .arg(ranks)
            .arg(program())
            .args("bench collectives --device cpu --min-bytes 1K --json".split(' '))
            .arg(&json);
        bench.args(more).output().unwrap()
    };
    let output = run("3", &["--max-bytes", "5K"]);
    let (printed, errors) = output_text(&output);
    assert!(output.status.success() && printed.contains("3 ranks, connected by TCP"), "{printed}{errors}");
    let json: Value = serde_json::from_slice(&fs::read(&json).unwrap()).unwrap();
    let rows = json["rows"].as_array().unwrap();
    // 1, 2 and 4 KiB, in multiples of three elements.
    let sizes: Vec<_> = rows.iter().map(|row| row["bytes"].as_f64().unwrap() as u64).collect();
    assert_eq!(sizes, [1032, 2052, 4104].repeat(3), "{json}");
    for row in rows {
        let rate = row["bytes"].as_f64().unwrap() / row["us"].as_f64().unwrap() / 1e3;
        let factor = if row["operation"] == "all-reduce" { 4.0 / 3.0 } else { 2.0 / 3.0 };
        assert!((row["algorithm_gb_per_second"].as_f64().unwrap() / rate - 1.0).abs() < 1e-6, "{row}");
        assert!((row["bus_gb_per_second"].as_f64().unwrap() / (factor * rate) - 1.0).abs() < 1e-6, "{row}");
    }
    let output = run("1", &[]);
    assert!(output_text(&output).1.contains("expected two or more ranks, found one"), "{output:?}");
    let output = run("2", &["--max-bytes", "512"]);
    assert!(
        output_text(&output).1.contains("--max-bytes: expected at least --min-bytes (1024), found 512"),
        "{output:?}"
    );
}

/// Checks the trace of a step of d6 with two micro-batches on two ranks.
fn assert_trace_is_complete(trace: &Value) {
    let events = trace["traceEvents"].as_array().unwrap();
    for rank in 0..2 {
        let of_rank = || events.iter().filter(|event| event["pid"] == rank);
        let named = |kind: &str| {
            let names = of_rank().filter(|event| event["name"] == kind).map(|event| event["args"]["name"].clone());
            names.collect::<Vec<_>>()
        };
        assert!(named("process_name")[0].as_str().unwrap().starts_with(&format!("rank {rank}: CPU")), "{trace}");
        assert_eq!(named("thread_name"), ["compute", "communication"]);
        let times = |name: &str| of_rank().filter(|event| event["name"] == name).count();
        // Four linear layers in each of six layers, for each micro-batch, and the head.
        assert_eq!((times("AttentionForward"), times("AttentionBackward"), times("AdamWUpdate")), (12, 12, 1));
        assert!(times("MatmulForward") >= 48 && times("MatmulBackward") >= 48, "{trace}");
        // The gradients of six layers and of the embeddings, and the loss.
        assert_eq!(times("all-reduce"), 8);
        for stream in 0..2 {
            let work: Vec<_> = of_rank().filter(|event| event["ph"] == "X" && event["tid"] == stream).collect();
            let time = |event: &Value, key: &str| event[key].as_f64().unwrap();
            for pair in work.windows(2) {
                assert!(time(pair[1], "ts") >= time(pair[0], "ts") + time(pair[0], "dur") - 1e-3, "{pair:?}");
            }
            assert!(work.iter().all(|event| time(event, "ts") >= 0.0 && time(event, "dur") >= 0.0), "{trace}");
        }
    }
}

/// Runs `scripts/scaling` on the CPU. Returns its exit code, its output and its JSON file.
fn scaling(world: &World, more: &str) -> (Option<i32>, String, Value) {
    let mut scaling = world.bare(&script("scaling"));
    scaling.arg(program()).args("--text text.txt --device cpu --gpus 2 --model d6 --batch 2 --seq 8".split(' '));
    scaling.args(
        "--tokens 32 --agree-tokens 32 --agree-steps 6 --lr 1e-4 --warmup 5 --copies 2 --json scaling.json".split(' '),
    );
    scaling.args(more.split(' '));
    let output = scaling.env("TMPDIR", world.dir.path()).output().unwrap();
    let json = fs::read(world.path("scaling.json")).unwrap();
    (output.status.code(), output_text(&output).0, serde_json::from_slice(&json).unwrap())
}

fn number(value: &Value, key: &str) -> f64 {
    value[key].as_f64().unwrap()
}

#[test]
#[ignore = "slow: scripts/nightly runs it"]
fn scaling_prints_one_table_and_respects_its_time_limit() {
    if Command::new("python3").arg("--version").output().is_err() {
        println!("skipped: python3 is not available");
        return;
    }
    let world = World::new();
    let words = |i: usize| ["the quick brown fox ", "jumps over ", "a lazy dog.\n"][i * i % 7 % 3];
    fs::write(world.path("text.txt"), (0..2000).map(words).collect::<String>()).unwrap();
    let (code, printed, json) = scaling(&world, "--steps 2 weak agree");
    assert_eq!(code, Some(0), "{printed}");
    let [one, two] = [&json["runs"][0], &json["runs"][1]];
    assert_eq!(
        (&one["gpus"], &one["tokens"], &two["gpus"], &two["tokens"]),
        (&1.into(), &32.into(), &2.into(), &64.into())
    );
    let share = number(two, "tokens_per_second") / number(one, "tokens_per_second") / 2.0 * 100.0;
    assert!((number(two, "percent") - share).abs() < 1e-6 && number(two, "start_seconds") > 0.0, "{json}");
    assert!(printed.contains("\n| weak | d6 | 2 | 2 | 64 | "), "{printed}");
    for (key, runs) in [
        ("gpus", &["1 GPU", "2 GPUs"][..]),
        ("rounding", &["at once", "2 batches"][..]),
        ("stages", &["stage 0", "stage 1", "stage 2", "stage 3"][..]),
    ] {
        check_agreement(&json["agree"][key], runs, &printed);
    }
    check_tolerance_and_short_text(&world);

    let start = Instant::now();
    let (code, printed, _) = scaling(&world, "--steps 100000 --limit 8 strong");
    assert!(code == Some(1) && printed.contains("WRONG: strong did not fit into 8 s"), "{printed}");
    assert!(start.elapsed() < Duration::from_secs(20));
    // All processes have ended.
    let here =
        |process: fs::DirEntry| fs::read_link(process.path().join("cwd")).is_ok_and(|cwd| cwd == world.dir.path());
    assert!(!fs::read_dir("/proc").unwrap().flatten().any(here));
}

/// Checks the losses and differences of one comparison against the printed table.
fn check_agreement(comparison: &Value, runs: &[&str], printed: &str) {
    let (first, largest) = (number(comparison, "first_difference"), number(comparison, "largest_difference"));
    assert!(first < 1e-6 && largest < 1e-4, "{comparison}");
    let losses = |run: &&str| {
        let losses = comparison["losses"][run].as_array().unwrap();
        losses.iter().map(|loss| loss.as_f64().unwrap()).collect::<Vec<_>>()
    };
    let table: Vec<_> = runs.iter().map(losses).collect();
    assert!(table.iter().all(|losses| losses.len() == 6 && losses[5] < losses[0] - 0.1), "{comparison}");
    let difference = |step: usize| {
        let of_step = || table.iter().map(|losses| losses[step]);
        (of_step().fold(f64::MIN, f64::max) - of_step().fold(f64::MAX, f64::min)) / table[0][step]
    };
    let worst = (0..6).map(difference).fold(0.0, f64::max);
    assert_eq!((largest, first), (worst, difference(0)));
    let at = usize::try_from(comparison["at_step"].as_u64().unwrap()).unwrap();
    assert_eq!(difference(at - 1).to_bits(), worst.to_bits());
    // The table has every fifth step and the last one.
    for step in [1, 5, 6] {
        let row: Vec<_> = table.iter().map(|losses| format!("{:13.6}", losses[step - 1])).collect();
        assert!(printed.contains(&format!("        {step:4} {}   ", row.concat())), "{step}: {printed}");
    }
    assert!(!printed.contains(&format!("        {:4} {:13.6}", 2, table[0][1])), "{printed}");
}

/// Checks that a negative tolerance fails, and that a text that is too short is repeated.
fn check_tolerance_and_short_text(world: &World) {
    let text = "the quick brown fox jumps over a lazy dog, and another one\n".repeat(4);
    fs::write(world.path("short.txt"), text).unwrap();
    let (code, printed, json) = scaling(world, "--agree-within -1 --text short.txt --gpus 1 agree");
    assert!(code == Some(1) && printed.contains("WRONG: 32 tokens a step, 1 GPU: losses differ by 0.0"), "{printed}");
    assert!(json["agree"]["stages"].is_null() && json["agree"]["gpus"]["losses"]["2 GPUs"].is_null(), "{json}");
    let line = printed.lines().find_map(|line| line.split_once("parts: agree; ")).unwrap().1;
    let (tokens, times) = line.split_once(" tokens, the text ").unwrap();
    let (tokens, times) =
        (tokens.parse::<usize>().unwrap(), times.split_once(' ').unwrap().0.parse::<usize>().unwrap());
    assert!(times > 2 && tokens > 6 * 32 && tokens / times * (times - 1) <= 6 * 32, "{printed}");
}
