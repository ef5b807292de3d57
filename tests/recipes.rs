//! The recipes in `configs/`.

use crate::common::{succeed, text};
use data::tokens;
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

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

fn configs() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs")
}

/// Returns the value of a row of the table that `train` prints first.
fn row<'a>(printed: &'a str, name: &str) -> &'a str {
    let row = printed.lines().find_map(|line| line.strip_prefix(&format!("{name:<20} ")));
    row.unwrap_or_else(|| panic!("no row {name}: {printed}"))
}

#[test]
fn every_recipe_plans_with_the_settings_of_llm_c_and_the_memory_that_it_states() {
    let mut files: Vec<String> = fs::read_dir(configs())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name != "README.md")
        .collect();
    files.sort();
    assert_eq!(files, RECIPES.map(|recipe| recipe.file));
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
        let planned = printed.lines().find_map(|line| line.strip_prefix("planned: ")).unwrap();
        let planned: f64 = planned.split(' ').next().unwrap().parse().unwrap();
        let comments = fs::read_to_string(&path).unwrap();
        let stated = comments.lines().find_map(|line| line.strip_prefix("# Memory, one GPU:   ")).unwrap();
        assert_eq!(stated, format!("{planned:.1} GiB"), "{file}");
        let listed = table.lines().find(|line| line.starts_with(&format!("| [{file}]({file}) |"))).unwrap();
        assert!(listed.ends_with(&format!(" {stated} |")), "{listed}");
    }
    assert!(!out.exists());
}
