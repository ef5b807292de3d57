//! Detection of faulty hardware: a bit of one output flips, and the run ends with the operation, the layer and the GPU.

use crate::common::runs::{Results, World, entries};
use std::fs;
use std::process::Output;

/// Runs with a flipped bit: `STEP:RANK:OUTPUT:ELEMENT:BIT`.
fn flipped(world: &World, out: &str, flip: &str, more: &[&str]) -> Output {
    let verify = ["--verify-every", "4", "--steps", "12", "--checkpoint-every", "2"];
    world.command(out, &[&verify[..], more].concat()).env("LLM_RS_FLIP_BIT", flip).output().unwrap()
}

/// Returns the error of a run that has ended with the exit code of a permanent failure.
fn error(output: &Output) -> String {
    let err = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{}{err}", String::from_utf8_lossy(&output.stdout));
    let found: Vec<&str> = err.lines().filter(|line| line.starts_with("error: ")).collect();
    assert_eq!(found.len(), 1, "{err}");
    found[0].to_owned()
}

/// Indices among the tensors that a micro-batch of the tiny model writes, and what they are.
const PLACES: [(usize, &str); 10] = [
    (0, "`out` of EncoderForward in the embeddings"),
    (1, "`out` of NormForward in layer 0"),
    (4, "`out` of MatmulForward in layer 0"),
    (5, "`out` of AttentionForward in layer 0"),
    (6, "`lse` of AttentionForward in layer 0"),
    (12, "`preactivation` of MatmulForward in layer 0"),
    (18, "`out` of AttentionForward in layer 1"),
    (30, "`out` of MatmulForward in the head"),
    (45, "Backward in layer 1"),
    (60, "Backward in layer 0"),
];

#[test]
fn a_flipped_bit_is_detected_at_each_of_ten_places() {
    let world = World::new();
    for (i, (output, place)) in PLACES.into_iter().enumerate() {
        let (element, bit) = (37 * i + 5, 3 * i % 32);
        let out = format!("out{i}");
        let error = error(&flipped(&world, &out, &format!("8:0:{output}:{element}:{bit}"), &[]));
        println!("{error}");
        for part in
            ["step 9 of 12: faulty hardware: micro-batch of rank 0", place, &format!("(tensor {output} of "), "CPU"]
        {
            assert!(error.contains(part), "expected {part:?}: {error}");
        }
        assert!(error.contains("0 of 2 repetitions gave the same bits as the first computation"), "{error}");
        // Step 4 was verified: its checkpoint is good.
        assert!(error.contains("model_00000004.bin of step 4"), "{error}");
        let done: Vec<String> =
            entries(&world.path(&out)).into_iter().filter(|name| name.starts_with("DONE_")).collect();
        assert_eq!(
            done,
            ["DONE_00000004", "DONE_00000006", "DONE_00000008"],
            "no later checkpoint, and the verified one"
        );
    }
}

#[test]
fn a_run_with_verification_has_the_results_of_one_without() {
    let world = World::new();
    world.succeed("plain", &[]);
    world.succeed("verified", &["--verify-every", "3"]);
    Results::read(&world.path("verified"), 40).assert_equals(&Results::read(&world.path("plain"), 40), "verified");
}

#[test]
fn a_resume_keeps_the_checkpoint_before_the_last_verification() {
    let world = World::new();
    let flags = ["--verify-every", "10", "--checkpoint-every", "4", "--keep", "1", "--steps", "15"];
    world.succeed("run", &flags);
    world.succeed("run", &[&flags[..], &["--resume"]].concat());
    let done: Vec<String> = entries(&world.path("run")).into_iter().filter(|name| name.starts_with("DONE_")).collect();
    assert_eq!(done, ["DONE_00000008", "DONE_00000015"]);
}

#[test]
fn a_step_that_is_not_verified_has_no_flipped_bit_and_a_malformed_one_is_an_error() {
    let world = World::new();
    let output = flipped(&world, "late", "9:0:6:5:3", &[]);
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    let malformed = flipped(&world, "malformed", "9:0:6", &[]);
    assert_eq!(malformed.status.code(), Some(1));
    assert!(
        String::from_utf8_lossy(&malformed.stderr).contains("LLM_RS_FLIP_BIT: expected STEP:RANK:OUTPUT:ELEMENT:BIT")
    );
}

fn hashes(world: &World, out: &str) -> Vec<String> {
    let log = fs::read_to_string(world.path(out).join("main.jsonl")).unwrap();
    // Without the time.
    let record = |line: &str| line.split_once(",\"time\"").map(|(record, _)| record.to_owned());
    log.lines().filter(|line| line.contains("\"hashes\"")).filter_map(record).collect()
}

#[test]
fn hashes_are_logged_and_are_those_of_a_resumed_run() {
    let world = World::new();
    world.succeed("whole", &["--hash-every", "5"]);
    let whole = hashes(&world, "whole");
    assert_eq!(whole.len(), 8, "{whole:?}");
    assert!(whole[0].starts_with("{\"step\":5,\"hashes\":{\"m f32\":\"") && whole[0].contains("\"params f32\":\""));
    assert!((1..8).all(|i| whole[i] != whole[i - 1]));
    let parts = ["--hash-every", "5", "--keep", "0", "--checkpoint-every", "3"];
    world.succeed("parts", &parts);
    // The checkpoints after step 21 are gone, as if the run had been killed.
    for name in entries(&world.path("parts")).iter().filter(|name| name.as_str() > "DONE_00000021") {
        if name.starts_with("DONE_") {
            fs::remove_file(world.path("parts").join(name)).unwrap();
        }
    }
    world.succeed("parts", &[&parts[..], &["--resume"]].concat());
    assert_eq!(hashes(&world, "parts"), whole);
}

#[test]
fn a_checkpoint_whose_values_differ_from_its_hashes_is_refused() {
    let world = World::new();
    world.succeed("out", &["--steps", "6"]);
    let path = world.path("out").join("run_00000006.json");
    let text = fs::read_to_string(&path).unwrap();
    let sidecar: serde_json::Value = serde_json::from_str(&text).unwrap();
    let hash = sidecar["run"]["progress"]["hashes"]["m f32"].as_str().unwrap().to_owned();
    // The checksum of the file is that of its text, so that only a program that knows the format can replace the hash.
    let run = text[text.find("\"run\": ").unwrap() + 7..].trim_end().strip_suffix('}').unwrap().trim_end();
    let other = run.replace(&hash, "0123456789abcdef");
    let sum = |text: &str| format!("{:016x}", xxhash_rust::xxh3::xxh3_64(text.as_bytes()));
    assert!(text.contains(&sum(run)));
    fs::write(&path, text.replace(run, &other).replace(&sum(run), &sum(&other))).unwrap();
    world.fail("out", &["--steps", "6", "--resume"], &["m f32 of the checkpoint of step 6", "0123456789abcdef", &hash]);
}
