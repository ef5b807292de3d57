//! The tokenizer follows the data and the model: from `data text` to training, checkpoints, evaluation and export.

use crate::common::{fail, llm_rs, succeed, text};
use data::Tokens;
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;
use tokenizer::byte_level;

const PLAY: &str = "All the world's a stage,\nAnd all the men and women merely players;\nThey have their exits.\n";

/// Sizes of a model that reads HellaSwag's examples.
const SHAPE: [&str; 10] = ["--layers", "1", "--heads", "2", "--channels", "8", "--batch", "2", "--seq", "256"];

/// Returns the texts of a tokenizer with `ids` ids: all bytes, pairs of letters that end in one of `seconds`, unused tokens, and
/// `<|endoftext|>`.
fn tokens(ids: usize, seconds: &str) -> Vec<String> {
    let mut tokens: Vec<String> = (0..=255).map(|byte| byte_level::character(byte).to_string()).collect();
    for first in "taws".chars() {
        tokens.extend(seconds.chars().map(|second| format!("{first}{second}")));
    }
    tokens.extend((tokens.len()..ids - 1).map(|id| format!("unused{id}")));
    tokens.push("<|endoftext|>".to_owned());
    tokens
}

/// Writes the `tokenizer.json` of [`tokens`].
fn write_tokenizer(path: &Path, ids: usize, seconds: &str) {
    let tokens = tokens(ids, seconds);
    let (special, plain) = tokens.split_last().unwrap();
    let vocab: serde_json::Map<String, Value> =
        plain.iter().enumerate().map(|(id, token)| (token.clone(), id.into())).collect();
    let pairs = plain[256..].iter().filter(|token| token.len() == 2);
    let merges: Vec<String> = pairs.map(|pair| format!("{} {}", &pair[..1], &pair[1..])).collect();
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    let file = json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null,
        "added_tokens": [{"id": ids - 1, "content": special, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true}],
        "pre_tokenizer": byte_level, "post_processor": null, "decoder": byte_level,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": merges},
    });
    fs::write(path, file.to_string()).unwrap();
}

/// A directory with text and tokenizers.
struct Fixture(TempDir);

impl Fixture {
    fn new() -> Self {
        let fixture = Self(tempfile::tempdir().unwrap());
        fs::write(fixture.at("play.txt"), PLAY.repeat(60)).unwrap();
        write_tokenizer(&fixture.at("small.json"), 300, "he");
        fixture
    }

    fn at(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Tokenizes the text into a directory of this name.
    fn tokenize(&self, name: &str, tokenizer: &str) {
        let (play, out) = (self.at("play.txt"), self.at(name));
        let args = ["data", "text", text(&play), "--out", text(&out), "--tokenizer", tokenizer];
        succeed(&[&args[..], &["--val-fraction", "0.3"]].concat());
    }

    /// Returns the flags that train on these data sets.
    fn train(&self, train: &str, val: &str, out: &str, more: &[&str]) -> Vec<String> {
        let shards = |name: &str, split: &str| self.at(name).join(format!("{split}_*.bin"));
        let (train, val, out) = (shards(train, "train"), shards(val, "val"), self.at(out));
        let flags = ["train", "--device", "cpu", "--train", text(&train), "--val", text(&val), "--out", text(&out)];
        [&flags[..], &["--sample-length", "8"], more].concat().into_iter().map(String::from).collect()
    }
}

fn strs(args: &[String]) -> Vec<&str> {
    args.iter().map(String::as_str).collect()
}

fn json_of(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

fn evaluated(args: &[&str]) -> Value {
    serde_json::from_str(&succeed(&[&["eval", "--device", "cpu", "--json"], args].concat())).unwrap()
}

fn sampled(model: &Path) -> String {
    succeed(&["sample", "--device", "cpu", "--model", text(model), "--prompt", "the", "-g", "8", "--temperature", "0"])
}

#[test]
fn the_tokenizer_of_the_data_goes_through_training_to_the_export() {
    let fixture = Fixture::new();
    let original = fixture.at("small.json");
    fixture.tokenize("data", text(&original));
    let file = fs::read(&original).unwrap();
    assert_eq!(fs::read(fixture.at("data/tokenizer.json")).unwrap(), file);
    // The copy is enough.
    fs::remove_file(&original).unwrap();
    let train = fixture.train("data", "data", "run", &[&SHAPE[..], &["--steps", "3"]].concat());
    let printed = succeed(&strs(&train));
    // Untrained, the model predicts the 300 tokens almost uniformly.
    let first = printed.lines().find_map(|line| line.strip_prefix("step    0/3 | val loss ")).unwrap();
    assert!((first.parse::<f64>().unwrap() - 300f64.ln()).abs() < 0.1, "{first}");
    assert!(printed.contains("generating:\n---\n"), "{printed}");
    let (run, hf, gguf) = (fixture.at("run"), fixture.at("hf"), fixture.at("model.gguf"));
    assert_eq!(fs::read(run.join("tokenizer.json")).unwrap(), file);
    assert_eq!(json_of(&run.join("tokenizer_identity.json"))["vocab"], 300);

    // Bits per byte, from the token files and the texts of the tokens.
    let val = fixture.at("data/val_*.bin");
    let flags = |model| ["--model", text(model), "--val", text(&val), "--batch", "2", "--seq", "100"];
    let model = run.join("model_00000003.bin");
    let scores = evaluated(&flags(&model));
    let targets = scores["validation"]["tokens"].as_u64().unwrap() as usize;
    let mut ids = vec![0; targets + 1];
    Tokens::open(&fixture.at("data/val_000000.bin")).unwrap().read(0, &mut ids).unwrap();
    let texts = tokens(300, "he");
    let bytes_of = |id: &u32| if *id == 299 { 0 } else { texts[*id as usize].chars().count() };
    assert!(ids.contains(&256) && targets > 400, "{targets}");
    assert_eq!(scores["validation"]["bytes"], ids[1..].iter().map(bytes_of).sum::<usize>());
    let set = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/hellaswag.bin");
    let answers = evaluated(&["--model", text(&run), "--hellaswag", text(&set)]);
    assert_eq!(answers["hellaswag"]["examples"], 4);
    // Ids of GPT-2 are not below 300.
    let unknown = fixture.at("unknown.bin");
    fs::copy(&model, &unknown).unwrap();
    fail(&["eval", "--device", "cpu", "--model", text(&unknown), "--hellaswag", text(&set)], &["tokens below 300"]);

    succeed(&["export", "--format", "hf", text(&run), text(&hf)]);
    assert_eq!(fs::read(hf.join("tokenizer.json")).unwrap(), file);
    let config = json_of(&hf.join("config.json"));
    assert_eq!((&config["vocab_size"], &config["eos_token_id"]), (&json!(300), &json!(299)));
    assert_eq!(evaluated(&flags(&hf))["validation"], scores["validation"]);
    assert_eq!(sampled(&hf), sampled(&model));
    assert!(succeed(&["export", "--format", "gguf", text(&model), text(&gguf)]).contains("tokenizer"));

    // A run that starts from the directory keeps its tokenizer, also when it is resumed without directory and data set.
    let train = fixture.train("data", "data", "tuned", &["--model", text(&hf), "-b", "2", "-t", "100", "--steps", "2"]);
    succeed(&strs(&train));
    assert_eq!(fs::read(fixture.at("tuned/tokenizer.json")).unwrap(), file);
    for name in ["hf", "data/tokenizer.json", "data/dataset.json"] {
        fs::rename(fixture.at(name), fixture.at("moved")).unwrap();
        let printed = succeed(&["train", "--config", text(&fixture.at("tuned/config.toml")), "--resume"]);
        assert!(printed.contains("resumed after 2 of 2 steps") && printed.contains(" (300 tokens)\n"), "{printed}");
        fs::rename(fixture.at("moved"), fixture.at(name)).unwrap();
    }
    assert_eq!(fs::read(fixture.at("tuned/tokenizer.json")).unwrap(), file);

    // Without the file of the tokenizer, tokens are not shown as text of GPT-2.
    fs::remove_file(fixture.at("data/tokenizer.json")).unwrap();
    let shard = fixture.at("data/val_000000.bin");
    let show = ["data", "show", text(&shard)];
    fail(&show, &["val_000000.bin: pass the tokenizer with --tokenizer", "expected the tokenizer ", "found none"]);
    let tokenizer = fixture.at("run/tokenizer.json");
    assert!(succeed(&[&show[..], &["--tokenizer", text(&tokenizer)]].concat()).contains("the"));
}

#[test]
fn runs_without_a_stored_tokenizer_resume_and_need_a_flag_for_text() {
    let fixture = Fixture::new();
    let tokenizer = fixture.at("small.json");
    fixture.tokenize("data", text(&tokenizer));
    // Earlier versions trained models with GPT-2's vocabulary on any data set.
    fs::rename(fixture.at("data/dataset.json"), fixture.at("moved")).unwrap();
    let small = [&SHAPE[..], &["--steps", "2", "--sample-every", "0"]].concat();
    succeed(&strs(&fixture.train("data", "data", "old", &small)));
    assert!(!fixture.at("old/tokenizer_identity.json").exists());
    // Without a description of the data, the flag names the tokenizer.
    let flag = [&small[..], &["--tokenizer", text(&tokenizer)]].concat();
    succeed(&strs(&fixture.train("data", "data", "named", &flag)));
    assert_eq!(json_of(&fixture.at("named/tokenizer_identity.json"))["vocab"], 300);
    assert_eq!(evaluated_vocab(&fixture.at("named"), &fixture.at("hf")), 300);

    fs::rename(fixture.at("moved"), fixture.at("data/dataset.json")).unwrap();
    let config = fixture.at("old/config.toml");
    let printed = succeed(&["train", "--config", text(&config), "--resume"]);
    assert!(printed.contains("resumed after 2 of 2 steps"), "{printed}");
    assert_eq!(evaluated_vocab(&fixture.at("old"), &fixture.at("hf-old")), 50257);

    let run = fixture.at("named");
    for name in ["tokenizer.json", "tokenizer_identity.json"] {
        fs::remove_file(run.join(name)).unwrap();
    }
    let sample = ["sample", "--device", "cpu", "--model", text(&run), "-g", "2"];
    fail(&sample, &["model_00000002.bin: expected a tokenizer.json", "found a vocabulary of 300", "--tokenizer FILE"]);
    succeed(&[&sample[..], &["--tokenizer", text(&tokenizer)]].concat());
    fail(
        &[&sample[..], &["--tokenizer", "gpt2"]].concat(),
        &["--tokenizer: expected a tokenizer with at most 300 ids"],
    );
    fs::write(run.join("tokenizer.json"), "{}").unwrap();
    fail(&sample, &["not a valid tokenizer.json", "pass another one with --tokenizer"]);
    fs::remove_file(run.join("tokenizer.json")).unwrap();

    let val = fixture.at("data/val_*.bin");
    let bytes = |more: &[&str]| {
        let flags = ["--model", text(&run), "--val", text(&val), "-b", "1", "-t", "100", "-m", "1"];
        evaluated(&[&flags[..], more].concat())["validation"]["bytes"].clone()
    };
    let known = bytes(&["--tokenizer", text(&tokenizer)]);
    assert!(known.as_u64().unwrap() > 100, "{known}");
    // The data names the tokenizer, too.
    assert_eq!(bytes(&[]), known);
    fs::remove_file(fixture.at("data/dataset.json")).unwrap();
    assert_eq!(bytes(&[]), Value::Null);
}

/// Returns the vocabulary size of an export of a model.
fn evaluated_vocab(model: &Path, out: &Path) -> u64 {
    succeed(&["export", "--format", "hf", text(model), text(out)]);
    json_of(&out.join("config.json"))["vocab_size"].as_u64().unwrap()
}

#[test]
fn different_tokenizers_are_errors_before_the_first_step() {
    let fixture = Fixture::new();
    write_tokenizer(&fixture.at("other.json"), 300, "ao");
    fixture.tokenize("small", text(&fixture.at("small.json")));
    fixture.tokenize("other", text(&fixture.at("other.json")));
    let refused = |train: &str, val: &str, more: &[&str], parts: &[&str]| {
        let more = [more, &["--steps", "1"]].concat();
        fail(&strs(&fixture.train(train, val, "refused", &more)), parts);
        assert!(!fixture.at("refused").exists());
    };
    refused(
        "small",
        "other",
        &SHAPE,
        &["other: expected the tokenizer of ", "small.json (300 tokens", "other.json (300"],
    );

    // Two tokenizers of the same size, 50,257.
    write_tokenizer(&fixture.at("foreign.json"), 50257, "he");
    fixture.tokenize("gpt2", "gpt2");
    fixture.tokenize("foreign", text(&fixture.at("foreign.json")));
    let tiny = ["--layers", "1", "--heads", "2", "--channels", "4", "--batch", "2", "--seq", "16"];
    succeed(&strs(&fixture.train("gpt2", "gpt2", "run", &[&tiny[..], &["--steps", "1"]].concat())));
    assert!(!fixture.at("run/tokenizer.json").exists());
    assert_eq!(json_of(&fixture.at("run/tokenizer_identity.json"))["name"], "gpt2");
    let [gpt2_model, foreign_model] = ["gpt2-model", "foreign-model"].map(|name| fixture.at(name));
    succeed(&["export", "--format", "hf", text(&fixture.at("run")), text(&gpt2_model)]);
    let foreign = fixture.at("foreign.json");
    let export = ["export", "--format", "hf", "--tokenizer", text(&foreign), text(&gpt2_model), text(&foreign_model)];
    succeed(&export);
    let from = |model: &PathBuf| ["--model", model.to_str().unwrap(), "-b", "2", "-t", "16"].map(str::to_owned);
    let (gpt2_flags, foreign_flags) = (from(&gpt2_model), from(&foreign_model));
    let parts =
        ["gpt2: expected tokens of ", "foreign-model/tokenizer.json (50257", "found tokens of gpt2 (50257 tokens"];
    refused("gpt2", "gpt2", &strs(&foreign_flags), &parts);
    let parts =
        ["foreign: expected tokens of ", "gpt2-model/tokenizer.json (50257", "found tokens of ", "foreign.json (50257"];
    refused("foreign", "foreign", &strs(&gpt2_flags), &parts);
    // The directory of the run states the same.
    refused("foreign", "foreign", &strs(&from(&fixture.at("run"))), &["expected tokens of gpt2 (50257"]);
    refused("foreign", "foreign", &[&tiny[..], &["--tokenizer", "gpt2"]].concat(), &["the tokenizer of --tokenizer"]);
    let val = fixture.at("foreign/val_*.bin");
    let eval = ["eval", "--device", "cpu", "--model", text(&gpt2_model), "--val", text(&val), "-b", "1", "-t", "16"];
    fail(&eval, &["foreign: expected tokens of "]);

    // Equal tokenizers are accepted, and without tokenizer files only the sizes are compared.
    let one_step = |data: &str, out: &str, flags: &[String]| {
        succeed(&strs(&fixture.train(data, data, out, &[&strs(flags)[..], &["--steps", "1"]].concat())));
        json_of(&fixture.at(out).join("tokenizer_identity.json"))["fingerprint"].clone()
    };
    let [of_gpt2, of_foreign] = ["gpt2", "foreign"]
        .map(|name| json_of(&fixture.at(name).join("dataset.json"))["tokenizer"]["fingerprint"].clone());
    assert_eq!(one_step("gpt2", "a", &gpt2_flags), of_gpt2);
    assert_eq!(one_step("foreign", "b", &foreign_flags), of_foreign);
    for name in interchange::tokenizer::FILES {
        let _ = fs::remove_file(gpt2_model.join(name));
    }
    assert_eq!(one_step("foreign", "c", &gpt2_flags), of_foreign);
}

#[test]
fn a_named_shape_has_the_vocabulary_of_the_data() {
    let fixture = Fixture::new();
    fixture.tokenize("data", text(&fixture.at("small.json")));
    let flags = ["--model", "d6", "-b", "1", "-t", "64", "--dry-run"];
    let printed = succeed(&strs(&fixture.train("data", "data", "run", &flags)));
    assert!(printed.contains("vocabulary 300"), "{printed}");
    fs::remove_file(fixture.at("data/dataset.json")).unwrap();
    let printed = succeed(&strs(&fixture.train("data", "data", "run", &flags)));
    assert!(printed.contains("vocabulary 50257"), "{printed}");
}

/// Adds files to a Hugging Face directory as chat models have them. The list of tokens that end a text contains every token.
fn make_chat_model(hf: &Path) {
    let change = |name: &str, changes: Value| {
        let mut keys = json_of(&hf.join(name));
        keys.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        fs::write(hf.join(name), keys.to_string()).unwrap();
    };
    change("config.json", json!({"eos_token_id": [116, 299], "pad_token_id": 299, "task_specific_params": {"a": 1}}));
    let all: Vec<u32> = (0..300).collect();
    change("generation_config.json", json!({"eos_token_id": all, "temperature": 0.6}));
    change("tokenizer_config.json", json!({"eos_token": "t", "chat_template": "{{ messages[0].content }}"}));
    fs::write(hf.join("special_tokens_map.json"), r#"{"eos_token": "t"}"#).unwrap();
    fs::write(hf.join("chat_template.jinja"), "{{ messages[0].content }} {{ messages[0].content }}").unwrap();
    fs::create_dir(hf.join("additional_chat_templates")).unwrap();
    fs::write(hf.join("additional_chat_templates/tool_use.jinja"), "{{ tools }}").unwrap();
}

/// Asserts that a directory has the files of [`make_chat_model`].
#[track_caller]
fn assert_chat_model(found: &Path, expected: &Path) {
    for name in [
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
        "additional_chat_templates/tool_use.jinja",
    ] {
        assert_eq!(fs::read(found.join(name)).ok(), fs::read(expected.join(name)).ok(), "{name}");
    }
    assert_eq!(json_of(&found.join("config.json")), json_of(&expected.join("config.json")));
}

/// The run directory contains everything: that of the model may be gone when the run resumes, answers and is exported.
#[test]
fn chat_templates_and_end_tokens_of_a_model_survive_fine_tuning() {
    let fixture = Fixture::new();
    fixture.tokenize("data", text(&fixture.at("small.json")));
    succeed(&strs(&fixture.train("data", "data", "base", &[&SHAPE[..], &["--steps", "1"]].concat())));
    let [hf, copy, tuned, again] = ["hf", "copy", "tuned", "again"].map(|name| fixture.at(name));
    succeed(&["export", "--format", "hf", text(&fixture.at("base")), text(&hf)]);
    make_chat_model(&hf);
    // The export of the model itself, with the sorted keys of config.json.
    succeed(&["export", "--format", "hf", text(&hf), text(&copy)]);
    let batch = ["--batch", "2", "--seq", "64", "--steps", "2"];
    let each = ["--checkpoint-every", "1", "--keep", "5"];
    let printed =
        succeed(&strs(&fixture.train("data", "data", "tuned", &[&["--model", text(&hf)], &batch[..], &each].concat())));
    // The commands that are printed next fit the model: the tokenizer of a model is that of data to fine-tune it.
    assert!(printed.contains(" chat --model ") && !printed.contains(" sample --model "), "{printed}");
    let (play, retokenized) = (fixture.at("play.txt"), fixture.at("retokenized"));
    let data = ["data", "text", text(&play), "--out", text(&retokenized), "--tokenizer", text(&hf)];
    let next = succeed(&data);
    assert!(next.contains(&format!(" --model {} --batch ", hf.display())), "{next}");
    fs::remove_dir_all(&hf).unwrap();
    assert_chat_model(&copy, &copy);
    // The run was stopped after its first step, whose checkpoint has the files, too.
    remove_step(&tuned, "00000002");
    succeed(&["train", "--config", text(&tuned.join("config.toml")), "--resume", "--device", "cpu"]);
    let first = fixture.at("first");
    succeed(&["export", "--format", "hf", text(&tuned.join("model_00000001.bin")), text(&first)]);
    assert_chat_model(&first, &copy);
    let out = fixture.at("out");
    let printed = succeed(&["export", "--format", "hf", text(&tuned), text(&out)]);
    assert!(printed.contains(&format!(" chat --model {}\n", out.display())), "{printed}");
    assert_chat_model(&out, &copy);
    let gguf = fixture.at("chat.gguf");
    succeed(&["export", "--format", "gguf", text(&tuned), text(&gguf)]);
    let bytes = fs::read(&gguf).unwrap();
    let contains = |part: &[u8]| bytes.windows(part.len()).any(|found| found == part);
    assert!(contains(b"tokenizer.chat_template") && contains(b"{{ messages[0].content }} {{ messages[0].content }}"));
    // llama.cpp has one token that ends a text: the first one of the list.
    assert!(contains(b"tokenizer.ggml.eos_token_id\x04\0\0\0\x74\0\0\0"));
    // Only an export of the same files is replaced.
    succeed(&["export", "--format", "hf", "--overwrite", text(&tuned), text(&out)]);
    fs::write(out.join("additional_chat_templates/notes.txt"), "").unwrap();
    let overwrite = ["export", "--format", "hf", "--overwrite", text(&tuned), text(&out)];
    fail(&overwrite, &["expected only files of an export, found additional_chat_templates/notes.txt"]);

    // Every token ends the text, as the generation settings say.
    let sample = ["sample", "--device", "cpu", "--model", text(&tuned), "--json", "-g", "5"];
    let line: Value = serde_json::from_str(&succeed(&sample)).unwrap();
    assert!(line["tokens"].as_array().unwrap().len() <= 1, "{line}");
    let chat = ["chat", "--device", "cpu", "--model", text(&tuned), "--system", "x"];
    let output = llm_rs(&chat);
    let err = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && err.contains("chat template found"), "{err}");

    // A run that starts from this run keeps the files, too; one with fresh weights in the same place keeps none.
    let train = |more: &[&str]| succeed(&strs(&fixture.train("data", "data", "again", &[more, &batch].concat())));
    train(&["--model", text(&tuned)]);
    let second = fixture.at("second");
    succeed(&["export", "--format", "hf", text(&again), text(&second)]);
    assert_chat_model(&second, &copy);
    remove_step(&again, "00000002");
    train(&["--layers", "1", "--heads", "2", "--channels", "8"]);
    let fresh = fixture.at("fresh");
    succeed(&["export", "--format", "hf", text(&again), text(&fresh)]);
    assert!(!fresh.join("chat_template.jinja").exists());
    assert_eq!(json_of(&fresh.join("config.json"))["eos_token_id"], 299);

    // The template that a user puts into a run precedes that of the model, in exports and in runs that start from it, too.
    let own = "{{ messages[-1].content }}";
    fs::write(tuned.join("chat_template.jinja"), own).unwrap();
    succeed(&strs(&fixture.train("data", "data", "third", &[&["--model", text(&tuned)], &batch[..]].concat())));
    for (run, name) in [("tuned", "own"), ("third", "own of third")] {
        let out = fixture.at(name);
        succeed(&["export", "--format", "hf", text(&fixture.at(run)), text(&out)]);
        assert_eq!(fs::read_to_string(out.join("chat_template.jinja")).unwrap(), own, "{run}");
        fs::copy(copy.join("chat_template.jinja"), out.join("chat_template.jinja")).unwrap();
        assert_chat_model(&out, &copy);
    }
}

/// Removes the files of a step from a run.
fn remove_step(run: &Path, step: &str) {
    for entry in fs::read_dir(run).unwrap().map(Result::unwrap) {
        if entry.file_name().to_string_lossy().contains(step) {
            fs::remove_file(entry.path()).unwrap();
        }
    }
}

/// Dropout would give other tokens each time.
#[test]
fn shards_do_not_depend_on_the_dropout_of_a_tokenizer() {
    let fixture = Fixture::new();
    let [plain, dropout] = ["small.json", "dropout.json"].map(|name| fixture.at(name));
    let mut file = json_of(&plain);
    file["model"]["dropout"] = json!(0.5);
    fs::write(&dropout, file.to_string()).unwrap();
    fixture.tokenize("plain", text(&plain));
    fixture.tokenize("dropout", text(&dropout));
    let shard = |name: &str| fs::read(fixture.at(name).join("train_000000.bin")).unwrap();
    assert!(shard("plain") == shard("dropout"));
    // A prefix as in GPT-2's options needs the tokenizers crate.
    for (name, dropout) in [("prefix", json!(null)), ("both", json!(0.5))] {
        file["model"]["dropout"] = dropout;
        file["pre_tokenizer"]["add_prefix_space"] = json!(true);
        fs::write(fixture.at("prefix.json"), file.to_string()).unwrap();
        fixture.tokenize(name, text(&fixture.at("prefix.json")));
    }
    assert!(shard("prefix") == shard("both"));
    let (play, out) = (fixture.at("play.txt"), fixture.at("noted"));
    let output = llm_rs(&["data", "text", text(&play), "--out", text(&out), "--tokenizer", text(&dropout)]);
    let err = String::from_utf8_lossy(&output.stderr);
    let note = "dropout.json: model.dropout is 0.5; llm-rs encodes without dropout";
    assert!(output.status.success() && err.contains(note), "{err}");
}
