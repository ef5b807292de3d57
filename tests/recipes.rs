//! The recipes in `configs/`, and the script that runs one of them from the data to a chat.

use crate::common::hub::{Defect, Hub, pages};
use crate::common::{succeed, text};
use data::tokens;
use serde_json::json;
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Settings of llm.c's scripts: `run_gpt2_124M.sh` and so on.
struct Recipe {
    file: &'static str,
    model: &'static str,
    batch: &'static str,
    learning_rate: &'static str,
    steps: usize,
}

const RECIPES: [Recipe; 5] = [
    Recipe {
        file: "gpt2-124m.toml",
        model: "d12",
        batch: "64 x 1024 tokens x 8 = 524288 per step",
        learning_rate: "cosine, peak 6.00e-4, warmup 700 steps, final 0.00e0",
        steps: 18_865,
    },
    Recipe {
        file: "gpt2-1558m.toml",
        model: "d48",
        batch: "16 x 1024 tokens x 64 = 1048576 per step",
        learning_rate: "cosine, peak 6.00e-4, warmup 700 steps, final 6.00e-5",
        steps: 32_000,
    },
    Recipe {
        file: "gpt2-350m.toml",
        model: "d24",
        batch: "64 x 1024 tokens x 8 = 524288 per step",
        learning_rate: "cosine, peak 3.00e-4, warmup 700 steps, final 0.00e0",
        steps: 60_000,
    },
    Recipe {
        file: "gpt2-774m.toml",
        model: "d36",
        batch: "32 x 1024 tokens x 16 = 524288 per step",
        learning_rate: "cosine, peak 2.50e-4, warmup 700 steps, final 0.00e0",
        steps: 286_102,
    },
    Recipe {
        file: "gpt3-125m.toml",
        model: "gpt3:c768",
        batch: "32 x 2048 tokens x 8 = 524288 per step",
        learning_rate: "cosine, peak 6.00e-4, warmup 700 steps, final 6.00e-5",
        steps: 572_204,
    },
];

/// The files of the recipe of nanochat's model, which has its own settings.
const SPEEDRUN: [&str; 3] = ["nanochat.jinja", "speedrun-chat.toml", "speedrun-d24.toml"];

fn configs() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs")
}

/// Returns the value of a row of the table that `train` prints first.
fn row<'a>(printed: &'a str, name: &str) -> &'a str {
    let row = printed.lines().find_map(|line| line.strip_prefix(&format!("{name:<20} ")));
    row.unwrap_or_else(|| panic!("no row {name}: {printed}"))
}

/// Asserts that the memory that a recipe states is the planned one. Returns it.
fn assert_memory(recipe: &Path, printed: &str) -> String {
    let planned = printed.lines().find_map(|line| line.strip_prefix("planned: ")).unwrap();
    let planned: f64 = planned.split(' ').next().unwrap().parse().unwrap();
    let comments = fs::read_to_string(recipe).unwrap();
    let stated = comments.lines().find_map(|line| line.strip_prefix("# Memory, one GPU:   ")).unwrap();
    assert_eq!(stated, format!("{planned:.1} GiB"), "{}", recipe.display());
    stated.to_owned()
}

#[test]
fn the_speedrun_has_the_settings_of_nanochat() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("run");
    let plan = |file: &str| {
        let path = configs().join(file);
        // The model of the tuning is the run of the pretraining, which does not exist.
        let run = ["train", "--config", text(&path), "--model", "nanochat:d24", "--out", text(&out)];
        let printed = succeed(&[&run[..], &["--device", "cuda", "--dry-run"]].concat());
        assert_eq!(row(&printed, "batch"), "16 x 2048 tokens x 32 = 1048576 per step", "{file}");
        assert_memory(&path, &printed);
        printed
    };
    let pretraining = plan("speedrun-d24.toml");
    assert_eq!(row(&pretraining, "steps"), "5568");
    assert!(row(&pretraining, "matmuls").starts_with("fp8 in the layers and the head"), "{pretraining}");
    assert!(row(&pretraining, "optimizer").starts_with("Muon for the layers' matrices, peak 2.83e-2, momentum 0.97; "));
    assert!(row(&pretraining, "learning rate").starts_with("trapezoidal, warmdown 0.65 of the steps, "));
    assert_eq!(row(&pretraining, "weight decay, clip"), "0.059738424, inf");
    assert_eq!(row(&pretraining, "validation"), "every 250 steps, 160 batches");
    let tuning = plan("speedrun-chat.toml");
    assert!(row(&tuning, "matmuls").starts_with("bf16"), "{tuning}");
    assert!(row(&tuning, "optimizer").starts_with("Muon for the layers' matrices, peak 1.60e-2, "), "{tuning}");
    assert!(row(&tuning, "learning rate").starts_with("trapezoidal, warmdown 0.5 of the steps, "), "{tuning}");
    assert!(!out.exists());
}

/// The script with a small model, from a server with parquet files to a chat.
#[test]
fn the_speedrun_script_goes_from_a_server_to_a_chat() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let dir = tempfile::tempdir().unwrap();
    let guide = fs::read_to_string(root.join("docs/data.md")).unwrap();
    let text = pages(&guide.split("\n\n").collect::<Vec<_>>());
    let files = ["shard_00000.parquet", "shard_00001.parquet", "shard_06542.parquet"].map(|name| (name, text.clone()));
    let hub = Hub::new(files.to_vec(), Defect::None);
    let turn = |role: &str, content: &str| json!({ "role": role, "content": content });
    let conversation = json!({ "messages": [turn("user", "Hi."), turn("assistant", "Hello.")] });
    fs::write(dir.path().join("chat.jsonl"), format!("{conversation}\n").repeat(200)).unwrap();
    fs::create_dir(dir.path().join("data")).unwrap();
    let copied = Command::new("cp")
        .arg("-r")
        .arg(root.join("tests/data/core/bundle"))
        .arg(dir.path().join("data/core"))
        .status();
    assert!(copied.unwrap().success());
    let run = || {
        let small = "--device cpu --steps 2 --batch 1 --seq 256 --total-batch 256 --val-batches 1";
        let train = format!("{small} --precision fp32 --core-max-per-task 12 --sample-every 0");
        let mut command = Command::new(root.join("scripts/speedrun"));
        command.current_dir(dir.path()).env("LLM_RS", env!("CARGO_BIN_EXE_llm-rs")).env("HF_ENDPOINT", &hub.address);
        command.envs([("GPUS", "1"), ("MODEL", "nanochat:d2"), ("RUN", "runs/try"), ("CHAT_FILES", "chat.jsonl")]);
        command.envs([("SHARDS", "2"), ("TOKENIZER_SHARDS", "1"), ("VOCAB", "512"), ("TRAIN_FLAGS", &train)]);
        command.envs([("CORE_FLAGS", "--device cpu --max-per-task 12"), ("TUNE_FLAGS", small)]);
        command.env("TALK_FLAGS", "--device cpu --tokens 4");
        let output = command.stdin(Stdio::null()).output().unwrap();
        let printed = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).concat();
        assert!(output.status.success(), "{printed}");
        printed
    };
    let printed = run();
    // data climbmix, tokenizer train, data climbmix, data chat, train, eval core, train, chat.
    assert_eq!(printed.matches("\n+ ").count(), 8, "{printed}");
    assert!(printed.contains("chat template found"), "{printed}");
    for path in ["tokenizers/climbmix/tokenizer.json", "data/climbmix/dataset.json", "runs/try/core.json"] {
        assert!(dir.path().join(path).is_file(), "{path}");
    }
    // The stages that have a result are skipped.
    let printed = run();
    assert_eq!(printed.matches("\n+ ").count(), 1, "{printed}");
}

#[test]
fn every_recipe_plans_with_the_settings_of_llm_c_and_the_memory_that_it_states() {
    let mut files: Vec<String> = fs::read_dir(configs())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name != "README.md")
        .collect();
    files.sort();
    assert_eq!(files, [&RECIPES.map(|recipe| recipe.file)[..], &SPEEDRUN].concat());
    let dir = tempfile::tempdir().unwrap();
    let (data, out) = (dir.path().join("tokens.bin"), dir.path().join("run"));
    let set = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/hellaswag.bin");
    // A sparse file, which takes almost no disk space.
    tokens::write(&data, &[0u16], tokens::Width::U16).unwrap();
    let file = fs::OpenOptions::new().write(true).open(&data).unwrap();
    let count = 1 << 21;
    file.write_all_at(&i32::to_le_bytes(count), 8).unwrap();
    file.set_len(1024 + 2 * count as u64).unwrap();
    let table = fs::read_to_string(configs().join("README.md")).unwrap();
    for Recipe { file, model, batch, learning_rate, steps } in RECIPES {
        let path = configs().join(file);
        let overrides = ["--train", text(&data), "--val", text(&data), "--hellaswag", text(&set), "--out", text(&out)];
        let run = ["train", "--config", text(&path), "--device", "cuda", "--dry-run"];
        let printed = succeed(&[&run[..], &overrides].concat());
        // Without the data, the plan is the same.
        let without_data = succeed(&[&run[..], &["--out", text(&out)]].concat());
        for name in ["model", "parameters", "batch", "learning rate", "validation"] {
            assert_eq!(row(&without_data, name), row(&printed, name), "{file}");
        }
        assert_eq!(row(&without_data, "steps"), steps.to_string(), "{file}");
        let planned = |printed: &str| printed.lines().find(|line| line.starts_with("planned: ")).unwrap().to_owned();
        assert_eq!(planned(&without_data), planned(&printed), "{file}");
        assert!(
            without_data.contains("warning: planned without data") && without_data.contains("no file matches 'data/")
        );
        assert!(row(&printed, "model").starts_with(&format!("{model}: ")), "{printed}");
        assert_eq!(row(&printed, "batch"), batch, "{file}");
        assert_eq!(row(&printed, "learning rate"), learning_rate, "{file}");
        assert_eq!(row(&printed, "weight decay, clip"), "0.1, 1", "{file}");
        assert!(row(&printed, "steps").starts_with(&format!("{steps}, ")), "{printed}");
        assert!(row(&printed, "validation").starts_with("every 250 steps"), "{printed}");
        let stated = assert_memory(&path, &printed);
        let listed = table.lines().find(|line| line.starts_with(&format!("| [{file}]({file}) |"))).unwrap();
        assert!(listed.ends_with(&format!(" {stated} |")), "{listed}");
    }
    assert!(!out.exists());
}
