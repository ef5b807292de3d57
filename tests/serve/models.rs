//! The page, and the models that the server follows.

use super::{Server, request, sample, train, trained};
use crate::common::{succeed, text};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

#[test]
fn the_page_follows_the_run_and_the_newest_checkpoint() {
    let (_dir, run) = trained();
    let server = Server::start(&run, &[]);
    let (status, page) = server.get("/");
    assert!(status == 200 && page.contains("<textarea"), "{page}");
    for asset in ["page.css", "page.js", "figure.css", "tooltip.js"] {
        assert!(page.contains(&format!("\"{asset}\"")) && server.get(&format!("/{asset}")).0 == 200, "{asset}");
    }
    let shown = server.event("run", |_| true);
    assert_eq!((&shown["name"], &shown["cells"][0]), (&"run".into(), &json!(["steps", "6"])));
    let figures = shown["figures"].as_array().unwrap();
    let valid = |figure: &Value| figure["svg"].as_str().unwrap().starts_with("<svg ") && figure["panels"].is_array();
    assert!(figures.len() == 2 && figures.iter().all(valid));
    let samples = shown["samples"].as_array().unwrap();
    assert!(samples.len() == 2 && samples[0]["step"] == 6 && samples[1]["step"] == 3, "{samples:?}");
    let state = server.event("status", |_| true);
    assert_eq!((&state["model"]["loaded"], &state["model"]["slots"]), (&Value::Null, &4.into()));
    assert!(state["memory"][0].as_u64() < state["memory"][1].as_u64());

    let body = json!({ "prompt": "to be", "seed": 5, "max_tokens": 40 });
    let first = server.complete(&body);
    let loaded = |step: &str, state: &Value| state["model"]["loaded"].as_str().is_some_and(|path| path.contains(step));
    let state = server.event("status", |state| loaded("00000006", state));
    assert!(state["model"]["tokens_per_second"].as_f64().unwrap() > 10.0, "{state}");
    assert!(state["model"]["first_token_ms"].as_f64() > state["model"]["token_ms"].as_f64(), "{state}");
    // The run continues: the page and the model follow.
    train(&run, "40", &["--resume", "--force-resume"]);
    server.event("run", |shown| shown["cells"][0] == json!(["steps", "40"]));
    let newer = server.complete(&body);
    server.event("status", |state| loaded("00000040", state));
    assert_ne!(first["choices"], newer["choices"]);
}

#[test]
fn a_run_without_a_checkpoint_has_curves_but_no_completions() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("main.log"), "s:0 trl:5 lr:0.1 norm:1\ns:1 trl:4 lr:0.1 norm:1\n").unwrap();
    let server = Server::start(dir.path(), &[]);
    assert_eq!(server.event("run", |_| true)["cells"][0], json!(["steps", "2"]));
    let (status, error) = server.post("/v1/completions", "{}");
    assert!(status == 503 && error.contains("checkpoint"), "{error}");
    let state = server.event("status", |state| !state["model"]["error"].is_null());
    assert!(state["model"]["error"].as_str().unwrap().contains("checkpoint"));
}

#[test]
fn every_model_of_a_run_is_sampled_exported_and_served() {
    let dir = tempfile::tempdir().unwrap();
    for (name, sizes) in [
        ("modern:d12", &[][..]),
        ("llama3:1b", &["--kv-heads", "1", "--ffn", "64"]),
        ("qwen3:0.6b", &["--kv-heads", "1", "--head-size", "16", "--ffn", "64"]),
    ] {
        let run = dir.path().join(name.split(':').next().unwrap());
        let model = ["--model", name, "--layers", "1", "--channels", "32", "--heads", "2", "--seq", "64"];
        let rest = ["--batch", "2", "--steps", "2", "--sample-every", "0", "--val-every", "0", "--out", text(&run)];
        let printed = succeed(&[&["train", "--device", "cpu"], &model[..], sizes, &rest].concat());
        // The suggested command names the model file.
        let next = printed.lines().find_map(|line| line.strip_prefix("next: ")).unwrap();
        let words = shlex::split(next).unwrap();
        // It may begin with `cargo run`.
        let words: Vec<&str> = words.iter().map(String::as_str).skip_while(|word| *word != "sample").collect();
        let file = *words.iter().find(|word| word.ends_with(".safetensors")).unwrap();
        let sampled = succeed(&[&words[..], &["--device", "cpu", "-g", "5", "--temperature", "0"]].concat());
        let prompt = words[words.iter().position(|word| *word == "--prompt").unwrap() + 1];
        let greedy = ["-g", "5", "--temperature", "0"];
        let of = |model: &str| sample(Path::new(model), prompt, &greedy);
        assert_eq!([&of(text(&run)), &of(file)], [&sampled; 2], "{name}");
        let exported = dir.path().join(name.replace(':', "_"));
        if name != "modern:d12" {
            succeed(&["export", "--format", "hf", file, text(&exported)]);
        }
        let tuning = ["--seq", "64", "--batch", "1", "--steps", "1", "--out", "none"];
        succeed(&[&["train", "--device", "cpu", "--model", file], &tuning[..]].concat());

        fs::write(run.join("chat_template.jinja"), "{% for m in messages %}{{ m.content }}{% endfor %}").unwrap();
        for path in [&run, Path::new(file)] {
            let server = Server::start(path, &[]);
            let body = json!({ "prompt": prompt, "max_tokens": 5, "temperature": 0 });
            let text = server.complete(&body)["choices"][0]["text"].as_str().unwrap().to_owned();
            assert_eq!(format!("{prompt}{text}\n"), sampled, "{name}");
            let chat = json!({ "messages": [{ "role": "user", "content": "a" }], "max_tokens": 5 }).to_string();
            assert_eq!(server.post("/v1/chat/completions", &chat).0, 200, "{name}");
        }
    }
}

#[test]
fn a_model_that_is_replaced_under_its_path_is_loaded_again() {
    let (dir, run) = trained();
    let exported = dir.path().join("exported");
    let export = |more: &[&str]| succeed(&[&["export", "--format", "hf", text(&run), text(&exported)], more].concat());
    export(&[]);
    let servers = [Server::start(&run, &[]), Server::start(&exported, &[])];
    // Two models may give the same text, but not the same probabilities.
    let body = json!({ "prompt": "to be", "max_tokens": 20, "temperature": 0, "logprobs": 1 });
    let texts = || {
        servers.each_ref().map(|server| {
            let choice = server.complete(&body)["choices"][0].clone();
            (choice["text"].clone(), choice["logprobs"]["token_logprobs"].clone())
        })
    };
    let before = texts();
    assert_eq!(before[0], before[1]);
    // While there is no model, the old one remains.
    fs::remove_dir_all(&run).unwrap();
    assert_eq!(texts(), before);
    train(&run, "6", &["--lr", "0.04"]);
    export(&["--overwrite"]);
    let after = texts();
    let sampled = sample(&run, "to be", &["-g", "20", "--temperature", "0"]);
    assert_eq!(format!("to be{}\n", after[0].0.as_str().unwrap()), sampled);
    assert!(after[0] == after[1] && after[0] != before[0], "{after:?}");
    // A damaged checkpoint does not replace the model.
    let file = run.join("model_00000006.bin");
    let good = fs::read(&file).unwrap();
    fs::write(&file, &good[..good.len() / 2]).unwrap();
    assert_eq!(texts(), after);
    let error = servers[0].event("status", |state| !state["model"]["error"].is_null());
    assert!(error["model"]["error"].as_str().unwrap().contains("the newer model cannot be used"), "{error}");
    assert_eq!(servers[0].get("/health").0, 200);
}

#[test]
fn requests_do_not_wait_for_a_newer_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    // This model takes longer texts than those of its training.
    let sizes = ["--layers", "4", "--channels", "256", "--heads", "4", "--kv-heads", "2", "--ffn", "512"];
    let rest = ["--sample-every", "0", "--val-every", "0", "--keep", "0"];
    let model = [&["--model", "llama3:1b"], &sizes[..], &rest].concat();
    train(&run, "1", &model);
    train(&run, "2", &[&model[..], &["--resume", "--force-resume"]].concat());
    let [done, hidden] = ["DONE_00000002", "hidden"].map(|name| run.join(name));
    fs::rename(&done, &hidden).unwrap();
    let server = Server::start(&run, &["--slots", "2"]);
    let short = json!({ "prompt": "a", "max_tokens": 1 });
    server.complete(&short);
    // The response is sent when the text is complete.
    let body = json!({ "prompt": "a", "max_tokens": 8000, "ignore_eos": true }).to_string();
    let long = server.connect(&request(&body));
    server.event("status", |state| state["model"]["active"] == 1);
    fs::rename(&hidden, &done).unwrap();
    // The server looks for a newer checkpoint meanwhile.
    sleep(Duration::from_millis(2200));
    server.complete(&short);
    long.set_nonblocking(true).unwrap();
    let response = long.peek(&mut [0]);
    assert!(response.is_err(), "the short text has to be complete before the long one");
    drop(long);
    // Without a text in progress, the next request loads the newer one.
    server.event("status", |state| state["model"]["active"] == 0);
    server.complete(&short);
    server.event("status", |state| state["model"]["loaded"].as_str().is_some_and(|path| path.contains("00000002")));
}

#[test]
fn health_and_models_tell_whether_requests_can_be_answered() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("my run");
    fs::create_dir(&run).unwrap();
    fs::write(run.join("main.log"), "s:0 trl:5 lr:0.1 norm:1\n").unwrap();
    let server = Server::start(&run, &[]);
    let (status, reason) = server.get("/health");
    assert!(status == 503 && reason.contains("expected") && reason.contains("checkpoint"), "{status}: {reason}");
    assert_eq!(server.get("/live"), (200, "ok\n".to_owned()));
    fs::remove_file(run.join("main.log")).unwrap();
    train(&run, "2", &[]);
    // A checkpoint makes the server ready without a request.
    let began = Instant::now();
    while server.get("/health").0 != 200 {
        assert!(began.elapsed() < Duration::from_secs(20));
        sleep(Duration::from_millis(100));
    }
    server.complete(&json!({ "prompt": "a" }));
    let id = serde_json::from_str::<Value>(&server.get("/v1/models").1).unwrap()["data"][0]["id"].clone();
    assert_eq!(id, "my run");
    let (status, model) = server.get("/v1/models/my%20run");
    assert!(status == 200 && serde_json::from_str::<Value>(&model).unwrap()["id"] == id, "{model}");
    for other in ["/v1/models/run", "/v1/models/org/my%20run"] {
        let (status, error) = server.get(other);
        assert!(status == 404 && error.contains("model_not_found"), "{error}");
    }
}

/// The files of the model from which a run started: template, settings and end tokens.
#[test]
fn a_conversation_uses_the_settings_and_the_cache() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    train(&run, "6", &[]);
    let files = run.join("hugging_face");
    fs::create_dir(&files).unwrap();
    fs::write(files.join("chat_template.jinja"), "{% for m in messages %}{{ m.role[0] }}{{ m.content }};{% endfor %}a")
        .unwrap();
    fs::write(files.join("generation_config.json"), r#"{"do_sample": false, "eos_token_id": [300]}"#).unwrap();
    let ask = |server: &Server, messages: &[Value], more: Value| {
        let mut body = json!({ "messages": messages, "max_tokens": 6 });
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let (status, text) = server.post("/v1/chat/completions", &body.to_string());
        assert_eq!(status, 200, "{text}");
        let answer: Value = serde_json::from_str(&text).unwrap();
        let usage = &answer["usage"];
        let tokens = [&usage["prompt_tokens"], &usage["prompt_tokens_details"]["cached_tokens"]];
        (answer["choices"][0]["message"]["content"].clone(), tokens.map(|tokens| tokens.as_u64().unwrap()))
    };
    let message = |role: &str, content: &Value| json!({ "role": role, "content": content });
    let server = Server::start(&run, &["--slots", "2"]);
    let status = server.event("status", |status| status["model"]["sampling"].is_object());
    assert_eq!(status["model"]["sampling"]["temperature"], 0.0);
    let mut talk = vec![message("user", &json!("to be or not to be"))];
    let (first, tokens) = ask(&server, &talk, json!({}));
    assert_eq!(tokens, [21, 0]);
    talk.extend([message("assistant", &first), message("user", &json!("or"))]);
    let (second, [prompt, cached]) = ask(&server, &talk, json!({}));
    // All but the last token of the answer, and what the template adds.
    assert!(cached >= 21 && cached < prompt, "{cached} of {prompt}");
    // The same answer from a server that has computed nothing, and with the settings in the request. Log probabilities do not use the cache.
    let fresh = Server::start(&run, &["--slots", "2"]);
    assert_eq!(ask(&fresh, &talk, json!({ "temperature": 0 })), (second, [prompt, 0]));
    let scored = |server: &Server| {
        let body = json!({ "prompt": "uto be or not to be;a", "max_tokens": 2, "echo": true, "logprobs": 2, "temperature": 0 });
        server.complete(&body)["choices"].clone()
    };
    assert_eq!(scored(&server), scored(&Server::start(&run, &["--slots", "2"])));
    // Another answer begins at the last token of the prompt. Two texts for a prompt count its tokens once.
    let (_, [prompt, cached]) = ask(&server, &talk, json!({ "temperature": 1, "n": 2 }));
    assert_eq!(cached, prompt - 1);
}
