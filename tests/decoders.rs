//! The program with Llama, Qwen and nanochat's shape, small and on a CPU: training, resuming, export to transformers and to llm.c.

use crate::common::{fail, overridden, succeed, text};
use std::fs;
use std::path::{Path, PathBuf};

/// The flags of a small model of each family.
const MODELS: [&str; 7] = [
    "--model llama3:1b --layers 2 --channels 32 --heads 4 --kv-heads 2 --ffn 56",
    "--model qwen2.5:0.5b --layers 2 --channels 32 --heads 4 --kv-heads 2 --ffn 56",
    "--model qwen3:0.6b --layers 2 --channels 32 --heads 4 --kv-heads 2 --head-size 16",
    "--model qwen3:30b-a3b --layers 2 --channels 32 --heads 4 --kv-heads 2 --head-size 16 --ffn 24 --experts 5 --active-experts 2",
    "--model olmoe:1b-7b --layers 2 --channels 32 --heads 4 --ffn 16 --experts 6 --active-experts 3",
    "--model modern:d2 --channels 32 --heads 2",
    "--model nanochat:d2 --channels 32 --heads 2 --window 9",
];

/// Trains on the built-in text, with batches of 2 x 16 tokens.
fn train(model: &str, out: &Path, steps: &str, more: &[&str]) -> String {
    let batch = ["--batch", "2", "--seq", "16", "--device", "cpu", "--val-every", "0", "--sample-every", "0"];
    let run =
        ["--steps", steps, "--checkpoint-every", "2", "--out", text(out), "--schedule", "constant", "--lr", "0.01"];
    let model: Vec<&str> = model.split(' ').collect();
    succeed(&[&["train"], &overridden(&[&model[..], &batch, &run].concat(), more)[..]].concat())
}

fn model_file(run: &Path, step: usize) -> PathBuf {
    run.join(checkpoint::directory::decoder_name(step))
}

/// Returns the validation loss that `eval` prints.
fn loss(model: &Path, tokens: &Path) -> f64 {
    let args = ["eval", "--model", text(model), "--val", text(tokens), "-m", "4", "--batch", "2", "--seq", "16"];
    let printed = succeed(&[&args[..], &["--device", "cpu"]].concat());
    printed.split(' ').nth(2).unwrap().parse().unwrap()
}

fn write_tokens(path: &Path) {
    let ids: Vec<u16> = (0..600).map(|i| b"to be, or not to be; "[i % 21].into()).collect();
    data::tokens::write(path, &ids, data::tokens::Width::U16).unwrap();
}

#[test]
fn runs_resume_with_the_same_bits_and_sample() {
    for model in MODELS {
        let dir = tempfile::tempdir().unwrap();
        let (whole, resumed) = (dir.path().join("whole"), dir.path().join("resumed"));
        train(model, &whole, "4", &[]);
        fs::create_dir(&resumed).unwrap();
        for entry in fs::read_dir(&whole).unwrap() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            if !name.contains("00000004") {
                fs::copy(whole.join(&name), resumed.join(&name)).unwrap();
            }
        }
        train(model, &resumed, "4", &["--resume"]);
        let bytes = |run: &Path, step| fs::read(model_file(run, step)).unwrap();
        assert_ne!(bytes(&whole, 2), bytes(&whole, 4), "{model:?}");
        assert_eq!(bytes(&whole, 4), bytes(&resumed, 4), "{model:?}");
        let state = |run: &Path| fs::read(run.join(checkpoint::directory::state_name(4, 0))).unwrap();
        assert_eq!(state(&whole), state(&resumed), "{model:?}");
        // The tensors are readable by any program for safetensors.
        let file = bytes(&whole, 4);
        let tensors = safetensors::SafeTensors::deserialize(&file).unwrap();
        assert_eq!(tensors.tensor("attprojw").unwrap().shape()[0], 2, "{model:?}");
        // Resuming with other layers is an error that names both shapes.
        let other = ["train", "--resume", "--out", text(&whole), "--layers", "3", "--heads", "2", "--channels", "32"];
        fail(&[&other[..], &["--device", "cpu", "--seq", "16"]].concat(), &["expected a model with 3 layers, 2 heads"]);
        let args = ["sample", "--model", text(&whole), "--prompt", "to be", "-g", "8", "--temperature", "0"];
        succeed(&[&args[..], &["--device", "cpu"]].concat());
    }
}

#[test]
fn every_recompute_level_gives_the_same_bits() {
    for model in MODELS {
        let dir = tempfile::tempdir().unwrap();
        let files = ["0", "1", "2", "3"].map(|level| {
            let run = dir.path().join(level);
            train(model, &run, "2", &["--recompute", level]);
            fs::read(model_file(&run, 2)).unwrap()
        });
        assert!(files.iter().all(|file| *file == files[0]), "{model:?}");
    }
}

#[test]
fn hugging_face_directories_keep_every_bit() {
    for model in MODELS {
        let dir = tempfile::tempdir().unwrap();
        let (run, hf, again) = (dir.path().join("run"), dir.path().join("hf"), dir.path().join("again"));
        let tokens = dir.path().join("tokens.bin");
        write_tokens(&tokens);
        train(model, &run, "2", &[]);
        succeed(&["export", "--format", "hf", text(&run), text(&hf)]);
        succeed(&["export", "--format", "hf", text(&hf), text(&again)]);
        let weights = |directory: &Path| fs::read(directory.join("model.safetensors")).unwrap();
        assert_eq!(weights(&hf), weights(&again), "{model:?}");
        assert_eq!(loss(&run, &tokens).to_bits(), loss(&hf, &tokens).to_bits(), "{model:?}");
    }
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    train(MODELS[0], &run, "2", &["--additions", "smear"]);
    let out = dir.path().join("hf");
    fail(
        &["export", "--format", "hf", text(&run), text(&out)],
        &["found LlamaForCausalLM with the additions smear, for which no class exists"],
    );
    assert!(!out.exists());
}

/// Each expert of a model that starts from a dense one is a copy of its MLP.
#[test]
fn experts_from_a_dense_model_compute_what_it_computes() {
    let dir = tempfile::tempdir().unwrap();
    let [dense, run, tuned, hf, tokens] =
        ["dense", "run", "tuned", "hf", "tokens.bin"].map(|name| dir.path().join(name));
    write_tokens(&tokens);
    train(MODELS[2], &dense, "4", &[]);
    let experts = format!("--model {} --experts 4 --active-experts 2", text(&dense));
    // Without a learning rate, the weights do not change.
    let printed = train(&experts, &run, "2", &["--lr", "0"]);
    assert!(printed.contains("2 of 4 experts of 256 channels"), "{printed}");
    let [of_dense, of_experts] = [&dense, &run].map(|model| loss(model, &tokens));
    assert!((of_dense - of_experts).abs() < 2e-6, "{of_dense} {of_experts}");
    train(&experts, &tuned, "4", &[]);
    train(&experts, &tuned, "4", &["--resume"]);
    assert!(loss(&tuned, &tokens) < of_dense);
    succeed(&["export", "--format", "hf", text(&tuned), text(&hf)]);
    let config: serde_json::Value = serde_json::from_slice(&fs::read(hf.join("config.json")).unwrap()).unwrap();
    assert_eq!(config["architectures"][0], "Qwen3MoeForCausalLM");
    assert_eq!(loss(&hf, &tokens).to_bits(), loss(&tuned, &tokens).to_bits());
    let with = |model: &Path| {
        let args = ["train", "--model", text(model), "--experts", "4", "--active-experts", "2", "--seq", "16"];
        args.map(str::to_owned)
    };
    let twice = with(&run);
    fail(&twice.each_ref().map(String::as_str), &["--experts: expected a model without experts, found one with"]);
}

#[test]
fn muon_trains_experts() {
    let dir = tempfile::tempdir().unwrap();
    let printed = train(MODELS[3], dir.path(), "40", &["--optimizer", "muon", "--muon-variance", "--lr", "0.003"]);
    assert!(printed.contains("Muon for the layers' matrices"), "{printed}");
    let log = fs::read_to_string(dir.path().join("main.jsonl")).unwrap();
    let value = |line: &str| serde_json::from_str::<serde_json::Value>(line).unwrap()["loss"].as_f64();
    let losses: Vec<f64> = log.lines().filter_map(value).collect();
    let mean = |losses: &[f64]| losses.iter().sum::<f64>() / losses.len() as f64;
    assert!(losses.len() == 40 && mean(&losses[30..]) < 0.85 * losses[0], "{losses:?}");
}

/// Returns the largest load of an expert in each step, relative to the mean load: the mean over the layers.
fn largest_loads(run: &Path) -> Vec<f32> {
    metrics::run::RunLog::read(run).unwrap().steps.iter().map(|step| step.expert_load[0]).collect()
}

/// Biases are in the model file, the log and the settings, and runs continue with them. Other programs cannot have them.
#[test]
fn biases_of_routers_balance_experts() {
    let dir = tempfile::tempdir().unwrap();
    let [plain, biased, resumed, more] = ["plain", "biased", "resumed", "more"].map(|name| dir.path().join(name));
    // Without a learning rate, only biases change.
    let settings = ["--lr", "0", "--batch", "32", "--checkpoint-every", "20"];
    train(MODELS[3], &plain, "40", &settings);
    let with_bias = [&settings[..], &["--router-bias-rate", "0.002"]].concat();
    train(MODELS[3], &biased, "40", &with_bias);
    let mean = |loads: &[f32]| loads.iter().sum::<f32>() / loads.len() as f32;
    let [without, with] = [&plain, &biased].map(|run| mean(&largest_loads(run)[30..]));
    println!("largest load: {without} without a bias, {with} with one");
    assert!(without > 1.45 && with < 1.35, "{without} without a bias, {with} with one");

    let file = fs::read(model_file(&biased, 40)).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&file).unwrap();
    assert_eq!(tensors.tensor("routerb").unwrap().shape(), [2, 5]);
    let config = fs::read_to_string(biased.join("config.toml")).unwrap();
    assert!(config.contains("router-bias-rate = 0.002"), "{config}");
    assert!(fs::read_to_string(biased.join("report.html")).unwrap().contains("largest load of an expert / mean load"));
    let log = fs::read_to_string(biased.join("main.jsonl")).unwrap();
    let last: serde_json::Value = serde_json::from_str(log.lines().last().unwrap()).unwrap();
    assert_eq!(
        [&last["experts"]["max_load"], &last["experts"]["unused"]].map(|list| list.as_array().unwrap().len()),
        [2; 2]
    );

    fs::create_dir(&resumed).unwrap();
    for entry in fs::read_dir(&biased).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        if !name.contains("00000040") {
            fs::copy(biased.join(&name), resumed.join(&name)).unwrap();
        }
    }
    train(MODELS[3], &resumed, "40", &[&with_bias[..], &["--resume"]].concat());
    assert_eq!(fs::read(model_file(&resumed, 40)).unwrap(), file);
    let other = ["--resume", "--out", text(&resumed), "--device", "cpu", "--seq", "16", "--router-bias-rate", "0.1"];
    let model: Vec<&str> = MODELS[3].split(' ').collect();
    fail(&[&["train"], &model[..], &settings, &other].concat(), &["router-bias-rate"]);

    // Evaluation and generation choose experts by the biases, and another run continues with them.
    let tokens = dir.path().join("tokens.bin");
    write_tokens(&tokens);
    train(&format!("--model {}", text(&biased)), &more, "2", &["--lr", "0", "--router-bias-rate", "0"]);
    assert!(fs::read_to_string(more.join("config.toml")).unwrap().contains("router-bias-rate = 0.0"));
    let [before, after] = [&biased, &more].map(|run| loss(run, &tokens).to_bits());
    assert_eq!(before, after);
    succeed(&["sample", "--model", text(&biased), "--prompt", "to be", "-g", "8", "--device", "cpu"]);
    let out = dir.path().join("out");
    let found = "found biases of routers, which Qwen3MoeForCausalLM lacks; use llm-rs's model file";
    fail(&["export", "--format", "hf", text(&more), text(&out)], &[found]);
}

/// A model without biases gets some of 0, which change nothing before the first step, in place of the load-balancing loss.
#[test]
fn biases_are_added_to_a_model_with_weights() {
    let dir = tempfile::tempdir().unwrap();
    let [run, more, tokens] = ["run", "more", "tokens.bin"].map(|name| dir.path().join(name));
    train(MODELS[4], &run, "2", &["--router-scores", "sigmoid", "--router-z-loss", "0.01"]);
    let config = fs::read_to_string(run.join("config.toml")).unwrap();
    assert!(config.contains("router-scores = \"sigmoid\"") && config.contains("router-z-loss = 0.01"), "{config}");
    write_tokens(&tokens);
    train(&format!("--model {}", text(&run)), &more, "2", &["--lr", "0", "--router-bias-rate", "1e-9"]);
    assert_eq!(loss(&run, &tokens).to_bits(), loss(&more, &tokens).to_bits());
    let file = fs::read(model_file(&more, 2)).unwrap();
    let descriptor = String::from_utf8_lossy(&file[..4096]).into_owned();
    assert!(descriptor.contains(r#"\"bias\":true"#) && descriptor.contains(r#"\"aux_loss\":0.0"#), "{descriptor}");
    let start = ["train", "--model", text(&run), "--device", "cpu", "--seq", "16", "--steps", "1", "--out", "none"];
    fail(
        &[&start[..], &["--router-scores", "sigmoid"]].concat(),
        &["--router-scores: expected a model without trained"],
    );
    fail(
        &["train", "--device", "cpu", "--router-z-loss", "0.1"],
        &["router: expected a model with experts for --router"],
    );
    let lora = ["--lora-rank", "4", "--lora-targets", "qkv", "--router-bias-rate", "0.1"];
    fail(&[&start[..], &lora].concat(), &["--lora-rank: expected no --router flags"]);
}

/// Settings without kernels or formats for experts.
#[test]
fn settings_that_experts_lack_are_errors() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    train(MODELS[3], &run, "2", &[]);
    let model: Vec<&str> = MODELS[3].split(' ').collect();
    let start = ["--batch", "2", "--seq", "16", "--steps", "1", "--device", "cpu", "--precision", "fp8"];
    let in_fp8 = [&["train"], &model[..], &start].concat();
    fail(&in_fp8, &["--precision fp8: channels of the MLP: expected a multiple of 16, found 24"]);
    let out = dir.path().join("out");
    fail(&["export", "--format", "gguf", text(&run), text(&out)], &["expected a model without experts for GGUF"]);
    fail(&["export", "--format", "llmc", text(&run), text(&out)], &["expected a model with Llama's operations"]);
    let lora = ["train", "--model", text(&run), "--lora-rank", "4", "--seq", "16", "--batch", "2", "--steps", "1"];
    let lora = [&lora[..], &["--device", "cpu"]].concat();
    fail(&[&lora[..], &["--lora-targets", "all"]].concat(), &["use --lora-targets qkv,attproj"]);
    fail(
        &[&lora[..], &["--lora-targets", "qkv,attproj", "--precision", "fp8"]].concat(),
        &["--precision fp8: adapters: expected a model without experts"],
    );
    succeed(&[&lora[..], &["--lora-targets", "qkv,attproj", "--out", text(&out)]].concat());
    fail(
        &["sample", text(&run), "--precision", "fp8", "--device", "cpu", "--prompt", "a"],
        &["--precision fp8: expected a model without experts"],
    );
}

/// The reference of transformers is trained further, and exported with the tensors of its class.
#[test]
fn nanochat_models_of_transformers_are_fine_tuned_and_exported() {
    let reference = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/transformers/nanochat");
    let dir = tempfile::tempdir().unwrap();
    let [hf, run, tuned, again] = ["hf", "run", "tuned", "again"].map(|name| dir.path().join(name));
    let tokens = dir.path().join("tokens.bin");
    let ids: Vec<u16> = (0..600).map(|i| i * 7 % 97).collect();
    data::tokens::write(&tokens, &ids, data::tokens::Width::U16).unwrap();
    succeed(&["export", "--format", "hf", text(&reference), text(&hf)]);
    let weights = |directory: &Path| fs::read(directory.join("model.safetensors")).unwrap();
    assert!(weights(&hf) == weights(&reference));
    train(&format!("--model {} --train {}", text(&reference), text(&tokens)), &run, "2", &[]);
    succeed(&["export", "--format", "hf", text(&run), text(&tuned)]);
    succeed(&["export", "--format", "hf", text(&tuned), text(&again)]);
    assert!(weights(&tuned) == weights(&again) && weights(&tuned) != weights(&reference));
    let config = |directory: &Path| -> serde_json::Value {
        serde_json::from_slice(&fs::read(directory.join("config.json")).unwrap()).unwrap()
    };
    assert_eq!(config(&tuned)["architectures"][0], "NanoChatForCausalLM");
    assert_eq!(config(&tuned), config(&hf));
    assert_eq!(loss(&run, &tokens).to_bits(), loss(&tuned, &tokens).to_bits());
    fail(
        &["export", "--format", "gguf", text(&run), text(&dir.path().join("x.gguf"))],
        &["expected an architecture that llama.cpp supports, found nanochat"],
    );
}

#[test]
fn llm_c_reads_and_writes_llama() {
    let dir = tempfile::tempdir().unwrap();
    let [run, file, hf, again] = ["run", "llama.bin", "hf", "again.bin"].map(|name| dir.path().join(name));
    let tokens = dir.path().join("tokens.bin");
    write_tokens(&tokens);
    // The 8B model has the scaling that llm.c applies.
    train("--model llama3:8b --layers 2 --channels 32 --heads 4 --kv-heads 2", &run, "2", &[]);
    succeed(&["export", "--format", "llmc", text(&run), text(&file)]);
    succeed(&["export", "--format", "hf", text(&file), text(&hf)]);
    succeed(&["export", "--format", "llmc", text(&hf), text(&again)]);
    let bytes = fs::read(&file).unwrap();
    assert_eq!(bytes, fs::read(&again).unwrap());
    let words: Vec<i32> = bytes[..48].as_chunks().0.iter().map(|&word| i32::from_le_bytes(word)).collect();
    assert_eq!(words[..8], [20240803, 3, 131_072, 256, 2, 4, 2, 32]);
    assert_eq!(words[9..], [1, 3, 1]);
    // Interleaved pairs change the order of sums, but not the model.
    let (exported, interleaved) = (loss(&hf, &tokens), loss(&file, &tokens));
    assert!((exported - interleaved).abs() < 1e-5, "{exported} {interleaved}");
    assert_eq!(loss(&run, &tokens).to_bits(), exported.to_bits());
}

#[test]
fn impossible_shapes_are_errors() {
    const HUGE: &str = "2147483647";
    let llama = ["--model", "llama3:1b"];
    let free = ["--layers", "2", "--heads", "2", "--channels", "64"];
    let llama_with = |more: &[&'static str]| [&llama[..], more].concat();
    let free_with = |more: &[&'static str]| overridden(&free, more);
    let divisor = "heads: expected a divisor of the";
    for (args, parts) in [
        (
            llama_with(&["--kv-heads", "3"]),
            &["key-value heads: expected a divisor of the 32 heads, found 3; choose"][..],
        ),
        (llama_with(&["--kv-heads", "64"]), &["key-value heads: expected a divisor of the 32 heads, found 64"]),
        (llama_with(&["--heads", "3"]), &[divisor, "2048 channels, found 3; choose other heads or channels, or set"]),
        (free_with(&["--heads", "3"]), &[divisor, "64 channels, found 3"]),
        (llama_with(&["--head-size", "63"]), &["head size: expected an even number for rotary embeddings, found 63"]),
        (llama_with(&["--channels", "96"]), &["expected an even number for rotary embeddings, found 3"]),
        (vec!["--model", "llama3:2b"], &["unknown model 'llama3:2b'", "llama3:N (1b, 3b, 8b)"]),
        (vec!["--model", "modern:d1"], &["unknown model 'modern:d1'"]),
        (vec!["--layers", "2", "--kv-heads", "1"], &["expected all three without --model"]),
        (llama_with(&["--ffn", HUGE]), &["parameters: expected at most 2199023255552", "choose smaller sizes"]),
        (llama_with(&["--channels", HUGE, "--heads", "1", "--kv-heads", "1"]), &["larger than any address space"]),
        (llama_with(&["--head-size", HUGE]), &["larger than any address space"]),
        (llama_with(&["--heads", HUGE, "--kv-heads", "1", "--head-size", "2"]), &["larger than any address space"]),
        (llama_with(&["--layers", HUGE]), &["layers: expected at most 8192, found 2147483647"]),
        (llama_with(&["--seq", "131073"]), &["--seq 131073: expected at most 131072", "max_position_embeddings"]),
        (llama_with(&["--seq", HUGE, "--batch", "2"]), &["tokens at once"]),
        (llama_with(&["--batch", HUGE]), &["tokens at once"]),
        (
            llama_with(&[
                "--layers",
                "1",
                "--channels",
                "2",
                "--heads",
                "1",
                "--kv-heads",
                "1",
                "--ffn",
                HUGE,
                "--batch",
                "2000000",
            ]),
            &["expected activations that fit into an address space"],
        ),
    ] {
        fail(&[&["train", "--device", "cpu"][..], &args].concat(), parts);
    }
    for flag in ["--layers", "--heads", "--kv-heads", "--head-size", "--channels", "--ffn", "--batch", "--seq"] {
        for value in ["0", "-1", "1.5", "many", "18446744073709551616"] {
            let flag_with_value = format!("{flag}={value}");
            let args = [&["train", "--device", "cpu"][..], &llama, &[&flag_with_value]].concat();
            fail(&args, &[flag, value]);
        }
    }
    // A benchmark has the limits of a run.
    let bench = ["bench", "step", "--device", "cpu", "-e"];
    fail(&[&bench[..], &["d12", "-t", "1025", "-b", "1"]].concat(), &["--seq 1025: expected at most 1024"]);
    fail(
        &[&bench[..], &["gpt3:c12288", "-b", "1"]].concat(),
        &["does not fit", "more than the ", "not even --batch 1 fits"],
    );
}

/// llm.c's shards of Llama have 32-bit ids (magic 20240801, version 7).
#[test]
fn every_command_reads_shards_of_32_bit_ids() {
    let dir = tempfile::tempdir().unwrap();
    let [shard, run, file] = ["wide.bin", "run", "llama.bin"].map(|name| dir.path().join(name));
    let ids: Vec<u32> = (0..200).map(|i| if i % 40 == 0 { 128_000 } else { 100_000 + i * 7 % 256 }).collect();
    data::tokens::write(&shard, &ids, data::tokens::Width::U32).unwrap();
    let head: Vec<i32> =
        fs::read(&shard).unwrap()[..12].as_chunks().0.iter().map(|&word| i32::from_le_bytes(word)).collect();
    assert_eq!(head, [20240801, 7, 200]);
    let model = "--model llama3.1:8b --layers 1 --channels 16 --heads 2 --kv-heads 1 --ffn 16";
    let data = ["--train", text(&shard), "--val", text(&shard), "--sample-every", "0"];
    let printed = train(model, &run, "2", &data);
    assert!(printed.contains("128256") && printed.contains("step"), "{printed}");
    // The vocabulary is the model's, and llm.c's model file keeps it.
    succeed(&["export", "--format", "llmc", text(&run), text(&file)]);
    let [of_run, of_file] = [&run, &file].map(|model| loss(model, &shard));
    assert!((of_run - of_file).abs() < 1e-5 && of_run > 5.0, "{of_run} {of_file}");
    // -e is llm.c's flag of the model; its default for Llama is the name of a file.
    let more = ["train", "-e", text(&file), "-i", text(&shard), "-b", "1", "-t", "8", "-x", "1", "--device", "cpu"];
    succeed(&[&more[..], &["--sample-every", "0", "-v", "0"]].concat());
    fail(&["train", "-e", "llama3.2_1B_bf16.bin", "--device", "cpu"], &["llama3.2_1B_bf16.bin", "No such file"]);
    assert!(succeed(&["data", "check", text(&shard)]).contains("5 documents in 1 file\n"));
    assert!(succeed(&["data", "show", text(&shard), "--at", "40", "--count", "2"]).contains("128000"));
    // Evaluation sets have 16-bit ids of GPT-2, which are below this vocabulary.
    let sets = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data/");
    for (flag, set) in [("--hellaswag", "hellaswag.bin"), ("--mmlu", "mmlu.bin")] {
        let set = format!("{sets}{set}");
        succeed(&["eval", "--model", text(&file), flag, &set, "--device", "cpu", "-b", "4", "-t", "64"]);
    }
    // A larger id than the model has is an error in every command.
    data::tokens::write(&shard, &[[128_256].as_slice(), &ids[1..]].concat(), data::tokens::Width::U32).unwrap();
    fail(
        &["eval", "--model", text(&file), "--val", text(&shard), "--device", "cpu", "-b", "1", "-t", "8"],
        &["128256"],
    );
    fail(&["data", "check", text(&shard)], &["found 1 problem in "]);
}
