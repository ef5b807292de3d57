//! Runs that train low-rank adapters, and the commands that read them.

use crate::common::runs::{World, entries};
use std::fs;
use std::path::Path;
use std::process::Command;

fn llm_rs(world: &World, arguments: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_llm-rs"));
    let output = command.current_dir(world.dir.path()).env("RAYON_NUM_THREADS", "1").args(arguments).output().unwrap();
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{arguments:?}: {text}");
    text
}

fn error(world: &World, arguments: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_llm-rs"));
    let output = command.current_dir(world.dir.path()).args(arguments).output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "{arguments:?}: {text}");
    text.lines().find(|line| line.starts_with("error: ")).unwrap_or_default().to_owned()
}

/// Returns the loss that `eval` prints.
fn loss(world: &World, model: &[&str]) -> String {
    let arguments =
        [&["eval"], model, &["--val", "val_*.bin", "--seq", "16", "--batch", "2", "--device", "cpu"]].concat();
    let text = llm_rs(world, &arguments);
    text.split(" | ").next().unwrap().lines().last().unwrap().to_owned()
}

const LORA: [&str; 8] = ["--lora-rank", "3", "--lora-targets", "qkv,mlp", "--steps", "12", "--lr", "0.03"];

#[test]
fn adapters_are_trained_resumed_merged_and_exported() {
    let world = World::new();
    let printed = world.succeed("whole", &[&LORA[..], &["--keep", "0"]].concat());
    assert!(printed.contains("adapters of rank 3 (alpha 6, q,k,v,up,gate,fcproj)"), "{printed}");

    // An interrupted run has the same bits.
    world.succeed("parts", &[&LORA[..], &["--keep", "0"]].concat());
    for name in entries(&world.path("parts")) {
        if name.contains("00000012") || name.contains("00000009") {
            fs::remove_file(world.path("parts").join(name)).unwrap();
        }
    }
    world.succeed("parts", &[&LORA[..], &["--keep", "0", "--resume"]].concat());
    for name in ["model_00000012.safetensors", "state_00000012_00000.bin"] {
        let [found, expected] = ["parts", "whole"].map(|run| fs::read(world.path(run).join(name)).unwrap());
        assert!(found == expected, "{name}");
    }

    // The run, its export for PEFT and the merged model are the same model, and not the one from which the run started.
    llm_rs(&world, &["export", "--format", "hf", "whole", "peft"]);
    assert!(world.path("peft").join("adapter_config.json").is_file());
    llm_rs(&world, &["export", "--format", "hf", "--merge", "whole", "merged"]);
    llm_rs(&world, &["export", "--format", "llmc", "whole", "merged.bin"]);
    let expected = loss(&world, &["whole"]);
    assert_ne!(expected, loss(&world, &["tiny.bin"]));
    for model in
        [&["peft"][..], &["merged"], &["merged.bin"], &["tiny.bin", "--lora", "peft"], &["tiny.bin", "--lora", "whole"]]
    {
        assert_eq!(loss(&world, model), expected, "{model:?}");
    }
    // Answers are those of the merged model, too.
    fs::write(world.path("questions.jsonl"), "{\"prompt\": \"one\", \"answer\": \"two\"}\n").unwrap();
    let vocab: serde_json::Map<_, _> =
        (0..97).map(|i| (if i == 0 { "<s>".to_owned() } else { format!("t{i}") }, i.into())).collect();
    let model = serde_json::json!({ "type": "WordLevel", "vocab": vocab, "unk_token": "<s>" });
    let mut end = serde_json::json!({ "id": 0, "content": "<s>", "special": true });
    for name in ["single_word", "lstrip", "rstrip", "normalized"] {
        end[name] = false.into();
    }
    let tokenizer = serde_json::json!({ "version": "1.0", "added_tokens": [end], "model": model });
    fs::write(world.path("tokenizer.json"), tokenizer.to_string()).unwrap();
    let answer = |model: &[&str]| {
        let file = ["--tokenizer", "tokenizer.json", "questions.jsonl"];
        let rest = [&file[..], &["-g", "6", "--out", "answers.jsonl", "--device", "cpu"]].concat();
        llm_rs(&world, &[&["eval", "generate"], model, &rest].concat());
        fs::read_to_string(world.path("answers.jsonl")).unwrap()
    };
    let expected = answer(&["merged.bin"]);
    assert_ne!(expected, answer(&["tiny.bin"]));
    assert_eq!(expected, answer(&["--lora", "whole", "tiny.bin"]));
    // Adapters continue from PEFT's directory; a learning rate of 0 changes nothing.
    let more = ["--lora", "peft", "--steps", "1", "--lr", "0", "--weight-decay", "0"];
    world.succeed("again", &more);
    llm_rs(&world, &["export", "--format", "hf", "again", "peft-again"]);
    let tensors = |run: &str| fs::read(world.path(run).join("adapter_model.safetensors")).unwrap();
    assert!(tensors("peft") == tensors("peft-again"));
}

#[test]
fn other_frozen_weights_and_impossible_settings_are_errors() {
    let world = World::new();
    world.succeed("run", &LORA);
    let tiny = fs::read(world.path("tiny.bin")).unwrap();
    let mut changed = tiny.clone();
    let last = changed.len() - 3;
    changed[last] ^= 0x40;
    let resume = [&LORA[..], &["--resume"]].concat();
    let resumed = |weights: Option<&[u8]>, part: &str| {
        let path = world.path("tiny.bin");
        weights.map_or_else(|| fs::remove_file(&path).unwrap(), |weights| fs::write(&path, weights).unwrap());
        let before = entries(&world.path("run"));
        world.fail("run", &resume, &[part]);
        assert_eq!(entries(&world.path("run")), before);
    };
    resumed(Some(&changed), "expected the weights with which the run started, found others");
    resumed(None, "--model: cannot open model file tiny.bin");
    assert!(error(&world, &["eval", "run", "--val", "val_*.bin"]).contains("found no file or directory tiny.bin"));
    fs::write(world.path("tiny.bin"), tiny).unwrap();
    world.fail(
        "run",
        &["--steps", "12", "--lr", "0.03", "--resume"],
        &["expected --lora-rank, because the run trains adapters"],
    );
    for (more, part) in [
        (&["--lora-rank", "1000"][..], "LoRA rank: expected at most"),
        (&["--lora-rank", "2", "--optimizer", "muon"], "--lora-rank: expected --optimizer adamw, found muon"),
        (&["--lora-rank", "2", "--lora-base", "fp8"], "--lora-base fp8: expected --precision fp8"),
        (&["--lora-base", "fp8"], "--lora-base: expected --lora-rank or --lora, found neither"),
        (&["--lora-rank", "2", "--model", "d6"], "--lora-rank: expected a --model with weights, found d6"),
        (&["--lora", "nothing"], "expected adapter_config.json (a directory of PEFT) or a checkpoint with adapters"),
        (&["--lora", "tiny.bin"], "expected adapter_config.json (a directory of PEFT) or a checkpoint with adapters"),
    ] {
        world.fail("new", more, &[part]);
        assert!(!Path::new(&world.path("new")).join("main.log").exists());
    }
    assert!(
        error(&world, &["export", "--format", "hf", "--merge", "tiny.bin", "x"])
            .contains("--merge: expected a model with low-rank adapters")
    );
}

#[test]
fn frozen_weights_in_fp8_train_like_those_that_are_quantized() {
    let world = World::new();
    let fp8 = ["--precision", "fp8"];
    world.succeed("bf16", &[&LORA[..], &fp8].concat());
    world.succeed("fp8", &[&LORA[..], &fp8, &["--lora-base", "fp8"]].concat());
    let model = |run: &str| {
        let bytes = fs::read(world.path(run).join("model_00000012.safetensors")).unwrap();
        // The headers differ.
        let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        bytes[8 + header..].to_vec()
    };
    assert!(model("bf16") == model("fp8"));
}
