//! Training on several sources and on packed documents.

use crate::common::runs::{Results, entries};
use checkpoint::resume::find_newest;
use data::tokens::{self, Width};
use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output};
use tempfile::TempDir;

/// A directory with two data sets of documents as bytes. A line break is the document token.
struct Sources {
    dir: TempDir,
}

const STEPS: usize = 30;

impl Sources {
    fn new() -> Self {
        let sources = Self { dir: tempfile::tempdir().unwrap() };
        for (name, words) in [("web", ["sun", "moon", "star"]), ("code", ["let", "fn", "mut"])] {
            let document = |i: usize| -> String {
                (0..=i * i % 29).map(|j| words[(i + j * j) % 3]).collect::<Vec<_>>().join(" ") + "\n\n"
            };
            fs::write(sources.path(&format!("{name}.txt")), (0..300).map(document).collect::<String>()).unwrap();
            let text = format!("{name}.txt");
            let data = ["data", "text", &text, "--separator", "\n\n", "--tokenizer", "bytes", "--val-fraction", "0.2"];
            let output = sources.run(&[&data[..], &["--shard-tokens", "9000", "--out", name]].concat());
            assert!(output.status.success(), "{output:?}");
        }
        sources
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn run(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_llm-rs"));
        command.current_dir(self.dir.path()).env("RAYON_NUM_THREADS", "1").args(arguments);
        command.output().unwrap()
    }

    /// Runs `train` with small settings, unless `more` has them.
    fn train(&self, more: &[&str]) -> Output {
        let settings = "--device cpu --layers 1 --heads 2 --channels 16 --batch 2 --seq 16 --total-batch 64 --steps 30 --lr 0.003 \
            --val-every 10 --val-batches 3 --sample-every 0 --checkpoint-every 10 --keep 0";
        let words: Vec<&str> = settings.split_whitespace().collect();
        let pairs = words.chunks(2).filter(|pair| !more.contains(&pair[0]) && !more.contains(&"--config"));
        let settings: Vec<&str> = pairs.flatten().copied().collect();
        self.run(&[&["train"], &settings[..], more].concat())
    }

    fn succeed(&self, more: &[&str]) -> String {
        let output = self.train(more);
        let (printed, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{more:?}: {printed}{err}");
        printed.into_owned()
    }

    /// Checks that the run fails with an error line that contains all of `parts`.
    fn fail(&self, more: &[&str], parts: &[&str]) {
        let output = self.train(more);
        let err = String::from_utf8_lossy(&output.stderr);
        assert!(matches!(output.status.code(), Some(1 | 2)), "{more:?}: {output:?}");
        let line = err.lines().find(|line| line.starts_with("error: ")).unwrap_or_default();
        for part in parts {
            assert!(line.contains(part), "{more:?}: expected '{part}' in: {err}");
        }
        assert!(!String::from_utf8_lossy(&output.stdout).contains("step    1/"), "{more:?}: {output:?}");
    }

    /// Copies a run up to the checkpoint of a step.
    fn copy(&self, from: &str, step: usize, to: &str) {
        fs::create_dir(self.path(to)).unwrap();
        for name in entries(&self.path(from)) {
            let of = name.split(['_', '.']).find_map(|part| part.parse::<usize>().ok());
            if of.is_none_or(|of| of <= step) {
                fs::copy(self.path(from).join(&name), self.path(to).join(&name)).unwrap();
            }
        }
    }

    fn results(&self, run: &str) -> Results {
        Results::read(&self.path(run), STEPS)
    }
}

const BOTH: [&str; 4] = ["--train", "web/train_*.bin=0.7", "--train", "code/train_*.bin=0.3"];
const VAL: [&str; 4] = ["--val", "web/val_*.bin", "--val", "code/val_*.bin"];

#[test]
fn resumed_mixtures_have_the_bits_of_an_uninterrupted_run() {
    let sources = Sources::new();
    for packing in ["stream", "best-fit", "pad"] {
        let flags = [&BOTH[..], &VAL, &["--packing", packing]].concat();
        let with = |more: &[&'static str]| [&flags[..], more].concat();
        let printed = sources.succeed(&[&flags[..], &["--out", packing]].concat());
        for part in ["2 sources", "web: weight 70.00 %", "code: weight 30.00 %", "% of the tokens used", "cropped"] {
            assert!(printed.contains(part), "{part}: {printed}");
        }
        assert_eq!(printed.contains("% of the sequences padding"), packing == "pad", "{printed}");
        for step in [10, 20] {
            let copy = format!("{packing}-{step}");
            sources.copy(packing, step, &copy);
            let printed = sources.succeed(&[&flags[..], &["--out", &copy, "--resume"]].concat());
            assert!(printed.contains(&format!("resumed after {step} of 30 steps")), "{printed}");
            sources.results(&copy).assert_equals(&sources.results(packing), &copy);
        }
        // Another micro-batch reads the same rows, up to the order of sums.
        sources.succeed(&with(&["--batch", "4", "--out", "wide"]));
        let losses = |run: &str| -> Vec<f64> {
            sources.results(run).records.iter().filter_map(|record| record["loss"].as_f64()).collect()
        };
        let (a, b) = (losses(packing), losses("wide"));
        assert!(a.len() == STEPS && a.iter().zip(&b).all(|(a, b)| (a - b).abs() < 2e-5 * a), "{a:?} {b:?}");
        // The loss of an untrained model is that of equal probabilities, also with padding.
        assert!((a[0] - 256f64.ln()).abs() < 0.05, "{packing}: {a:?}");
        fs::remove_dir_all(sources.path("wide")).unwrap();
    }
    assert_ne!(sources.results("stream").model, sources.results("best-fit").model);
}

/// Each token of the padding is a document of its own, which no target depends on.
#[test]
fn padding_and_document_masks_go_together() {
    let sources = Sources::new();
    let flags = [&BOTH[..], &["--packing", "pad", "--document-mask", "--out", "masked"]].concat();
    sources.succeed(&flags);
    let losses: Vec<f64> =
        sources.results("masked").records.iter().filter_map(|record| record["loss"].as_f64()).collect();
    assert!(losses.len() == STEPS && losses[STEPS - 1] < losses[0] - 0.5, "{losses:?}");
}

#[test]
fn settings_with_tables_are_written_and_read() {
    let sources = Sources::new();
    sources.succeed(&[&BOTH[..], &VAL, &["--out", "run"]].concat());
    let saved = fs::read_to_string(sources.path("run/config.toml")).unwrap();
    let table = "\n[[data]]\nname = \"code\"\ntrain = \"code/train_*.bin\"\nval = \"code/val_*.bin\"\nweight = 0.3\n";
    assert!(saved.ends_with(table) && !saved.contains("\ntrain = \"web/train_*.bin\"\nshuffle"), "{saved}");
    let printed = sources.succeed(&["--config", "run/config.toml", "--resume"]);
    assert!(printed.contains("resumed after 30 of 30 steps"), "{printed}");
    sources.succeed(&["--config", "run/config.toml", "--out", "again"]);
    sources.results("again").assert_equals(&sources.results("run"), "from the file");

    let lines: Vec<_> = sources.results("run").records.into_iter().filter(|line| line["sources"].is_array()).collect();
    assert_eq!(lines.len(), 4);
    for line in &lines {
        let of = |i: usize, key: &str| line["sources"][i][key].as_f64().unwrap();
        assert_eq!(
            (line["sources"][0]["name"].as_str(), line["sources"][1]["name"].as_str()),
            (Some("web"), Some("code"))
        );
        // A byte per token, so that only document tokens make a difference.
        assert!((of(0, "bits_per_byte") * 2f64.ln() / of(0, "val_loss") - 1.0).abs() < 0.2, "{line}");
        let mean = f64::midpoint(of(0, "val_loss"), of(1, "val_loss"));
        assert!((line["val_loss"].as_f64().unwrap() - mean).abs() < 1e-9, "{line}");
    }
    // The flag replaces all tables.
    let printed = sources.succeed(&["--config", "run/config.toml", "--train", "web/train_*.bin", "--out", "web-only"]);
    assert!(printed.contains("validation data      none") && !printed.contains("sources,"), "{printed}");
    let saved = fs::read_to_string(sources.path("web-only/config.toml")).unwrap();
    assert!(saved.contains("\ntrain = \"web/train_*.bin\"\nshuffle = true") && !saved.contains("[[data]]"), "{saved}");
    sources.fail(
        &["--config", "run/config.toml", "--val", "web/val_*.bin", "--out", "x"],
        &["--val: expected --train, too"],
    );
}

#[test]
fn a_table_of_a_single_source_has_the_bits_of_the_flag() {
    let sources = Sources::new();
    sources.succeed(&["--train", "web/train_*.bin", "--val", "web/val_*.bin", "--out", "flags"]);
    let table = "[[data]]\nname = \"web\"\ntrain = \"web/train_*.bin\"\nval = \"web/val_*.bin\"\n";
    let config = fs::read_to_string(sources.path("flags/config.toml")).unwrap();
    let rest = config.split_inclusive('\n').filter(|line| !line.starts_with("train") && !line.starts_with("val ="));
    fs::write(sources.path("table.toml"), rest.collect::<String>() + table).unwrap();
    sources.succeed(&["--config", "table.toml", "--out", "table"]);
    sources.results("table").assert_equals(&sources.results("flags"), "table");
}

#[test]
fn changed_data_are_refused_without_the_flag() {
    let sources = Sources::new();
    let run = |more: &[&'static str]| [&["--out", "run"], more].concat();
    sources.succeed(&run(&[&BOTH[..], &["--steps", "10"]].concat()));
    let state = || find_newest(&sources.path("run")).unwrap().checkpoint.unwrap().step;
    let before = entries(&sources.path("run"));
    let other = ["--train", "web/train_*.bin=0.5", "--train", "code/train_*.bin=0.5", "--steps", "10"];
    let resume = |flags: &[&'static str], more: &[&'static str]| run(&[flags, &["--resume"], more].concat());
    sources.fail(&resume(&other, &[]), &["data source web had weight 0.7", "has weight 0.5", "--resume-data"]);
    let single = ["--train", "web/train_*.bin", "--steps", "10"];
    sources.fail(&resume(&single, &[]), &["checkpoint of step 10", "--resume-data"]);
    let same = [&BOTH[..], &["--steps", "10"]].concat();
    sources.fail(&resume(&same, &["--seed", "7"]), &["--seed was 42, is now 7", "--resume-data"]);
    sources.fail(
        &resume(&same, &["--packing", "best-fit"]),
        &["--packing was not given, is now best-fit", "--resume-data"],
    );
    // Other settings need the other flag.
    sources.fail(&resume(&same, &["--lr", "0.1", "--resume-data"]), &["--lr was 0.003", "--force-resume"]);
    assert_eq!((entries(&sources.path("run")), state()), (before, 10));
    for flags in [&other[..], &single, &[&same[..], &["--packing", "best-fit"]].concat()] {
        let printed = sources.succeed(&resume(flags, &["--resume-data"]));
        assert!(printed.contains("resumed after 10 of 10 steps"), "{printed}");
    }
    // With new weights, the sources continue from their counters.
    let more = ["--steps", "20", "--force-resume"];
    let printed = sources.succeed(&resume(&other[..4], &more));
    assert!(printed.contains("has weight 0.5") && printed.contains("step   20/20"), "{printed}");
    let sidecar: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(sources.path("run/run_00000020.json")).unwrap()).unwrap();
    let rows: Vec<u64> = sidecar["run"]["mixture"]["sources"]
        .as_array()
        .unwrap()
        .iter()
        .map(|source| source["rows"].as_u64().unwrap())
        .collect();
    // 40 rows of each run of 10 steps.
    assert_eq!(rows, [28 + 20, 12 + 20]);
}

#[test]
fn bad_sources_are_errors_before_the_first_step() {
    let sources = Sources::new();
    let web = ["--train", "web/train_*.bin"];
    let fail = |more: &[&str], parts: &[&str]| sources.fail(&[more, &["--out", "bad"]].concat(), parts);
    for weight in ["-1", "nan", "inf"] {
        let code = format!("code/train_*.bin={weight}");
        fail(
            &["--train", "web/train_*.bin=1", "--train", &code],
            &["data source code: expected a finite weight of at least 0"],
        );
    }
    fail(
        &["--train", "web/train_*.bin=0", "--train", "code/train_*.bin=0"],
        &["expected a weight above 0, found none"],
    );
    fail(&["--train", "web/train_*.bin=1", "--train", "code/train_*.bin"], &["data source code: expected a weight"]);
    fail(&["--train", "web/train_*.bin", "--train", "web/train_*.bin"], &["two sources with this name"]);
    fail(&["--train", "web/train_*.bin", "--train", "none/*.bin"], &["--train: no file matches 'none/*.bin'"]);

    // Another vocabulary.
    let text = "one two three four five six seven eight nine ten\n".repeat(30);
    fs::write(sources.path("gpt2.txt"), text).unwrap();
    assert!(sources.run(&["data", "text", "gpt2.txt", "--out", "gpt2"]).status.success());
    fail(&[&web[..], &["--train", "gpt2/train_*.bin"]].concat(), &["expected the tokenizer of", "found gpt2"]);

    // No separators, and only empty documents. The description is that of the other data set.
    for (name, ids) in [("plain", vec![7u16; 500]), ("empty", vec![10u16; 500])] {
        fs::create_dir(sources.path(name)).unwrap();
        tokens::write(&sources.path(name).join("train_000000.bin"), &ids, Width::U16).unwrap();
        fs::copy(sources.path("web/dataset.json"), sources.path(name).join("dataset.json")).unwrap();
        let pattern = format!("{name}/train_*.bin");
        let flags = [&web[..], &["--train", &pattern]].concat();
        let found = if name == "plain" { "found none" } else { "found only empty ones" };
        let expected = ["data source", name, "expected documents that begin with token 10", found, "--packing stream"];
        fail(&[&flags[..], &["--packing", "best-fit"]].concat(), &expected);
    }
    fail(&[&web[..], &["--packing", "tight"]].concat(), &["expected stream, best-fit or pad"]);
    fail(
        &[&web[..], &["--train", "code/train_*.bin", "--seq", "20000", "--batch", "1", "--total-batch", "20000"]]
            .concat(),
        &["expected a shard of at least 20001 tokens"],
    );
    assert!(!sources.path("bad").exists());
}

#[test]
fn bad_tables_are_errors_that_name_the_line() {
    let sources = Sources::new();
    let fail = |text: &str, parts: &[&str]| {
        fs::write(
            sources.path("run.toml"),
            format!("steps = 3000\nbatch = 2\nseq = 16\nlayers = 1\nheads = 1\nchannels = 16\n{text}"),
        )
        .unwrap();
        sources.fail(&["--config", "run.toml", "--out", "bad"], parts);
    };
    let table = |rest: &str| format!("[[data]]\nname = \"web\"\ntrain = \"web/train_*.bin\"\n{rest}\n");
    fail(&table("weights = 1"), &["run.toml, line 7: data", "weights"]);
    fail(&table("weight = nan"), &["data source web: expected a finite weight"]);
    fail(&table("max_epochs = 0"), &["max_epochs: expected at least 1, found 0"]);
    fail(&table("max_epochs = 1"), &["--steps 3000: expected at most", "max_epochs"]);
    fail("[[data]]\nname = \"web\"\n", &["web: expected train or val, found neither"]);
    fail("[[data]]\nname = \"web\"\nval = \"web/val_*.bin\"\n", &["expected a table with train, found none"]);
    fail(&format!("train = \"web/train_*.bin\"\n{}", table("")), &["expected either this key or [[data]] tables"]);
    assert!(!sources.path("bad").exists());
}

/// The first source ends after its second epoch, and the run continues with the other.
#[test]
fn an_exhausted_source_leaves_the_steps_to_the_other() {
    let sources = Sources::new();
    let tables = "[[data]]\nname = \"web\"\ntrain = \"web/train_000000.bin\"\nmax_epochs = 1\nweight = 0.9\n
        [[data]]\nname = \"code\"\ntrain = \"code/train_*.bin\"\nval = \"code/val_*.bin\"\nweight = 0.1\n";
    let settings = "device = \"cpu\"\nlayers = 1\nheads = 1\nchannels = 16\nbatch = 8\nseq = 32\nsteps = 60\nval-every = 0\nsample-every = 0\n";
    fs::write(sources.path("run.toml"), format!("{settings}{tables}")).unwrap();
    let printed = sources.succeed(&["--config", "run.toml", "--out", "run"]);
    assert!(printed.contains("1.00 epochs") && printed.contains("step   60/60"), "{printed}");
    let text = fs::read_to_string(sources.path("run/run_00000060.json")).unwrap();
    let sidecar: serde_json::Value = serde_json::from_str(&text).unwrap();
    let [web, code] = [0, 1].map(|i| sidecar["run"]["mixture"]["sources"][i].clone());
    assert!(web["exhausted"] == true && code["exhausted"] == false, "{sidecar}");
    assert_eq!(web["rows"].as_u64().unwrap() + code["rows"].as_u64().unwrap(), 480);
}
