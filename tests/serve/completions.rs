//! Completions in OpenAI's format.

use super::{Server, files, sample, train, trained};
use crate::common::text;
use serde_json::{Value, json};
use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

#[test]
fn completions_equal_those_of_sample() {
    let (_dir, run) = trained();
    let before = files(&run);
    let server = Server::start(&run, &["--slots", "3"]);
    assert_eq!(server.token, None);
    let sampled = |more: &[&str]| {
        let printed = sample(&run, "to be", &[&["-g", "20"], more].concat());
        printed.strip_prefix("to be").unwrap().trim_end_matches('\n').to_owned()
    };
    let greedy = sampled(&["--temperature", "0"]);
    let body = json!({ "prompt": "to be", "max_tokens": 20, "temperature": 0 });
    let response = server.complete(&body);
    let choice = &response["choices"][0];
    assert_eq!(
        (choice["text"].as_str().unwrap().trim_end_matches('\n'), &choice["finish_reason"]),
        (&*greedy, &"length".into())
    );
    assert_eq!((&response["object"], &response["model"]), (&"text_completion".into(), &"run".into()));
    let usage = &response["usage"];
    assert_eq!([&usage["prompt_tokens"], &usage["completion_tokens"], &usage["total_tokens"]], [6, 20, 26]);
    assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], 0);

    // Several prompts and texts, more than there are slots; choices are in order of the prompts. Text i has seed + i.
    let body = json!({ "prompt": ["to be", "x"], "n": 2, "max_tokens": 20, "seed": 7, "top_k": 5, "echo": true });
    let choices = server.complete(&body)["choices"].as_array().unwrap().clone();
    assert_eq!(choices.len(), 4);
    let second = sampled(&["--seed", "8", "--top-k", "5"]);
    assert_eq!(choices[1]["text"].as_str().unwrap().trim_end_matches('\n'), format!("to be{second}"));
    assert!(choices[3]["text"].as_str().unwrap().starts_with('x'));
    // Token ids are used as they are: the document token is the client's.
    let ids: Vec<u8> = b"\nto be".to_vec();
    let of_ids = server.complete(&json!({ "prompt": ids, "max_tokens": 20, "temperature": 0 }));
    assert_eq!(of_ids["choices"][0]["text"], choice["text"]);

    // A stream has the same text in parts, an end, the usage and a last line.
    let streamed = json!({ "prompt": "to be", "max_tokens": 20, "temperature": 0, "stream": true,
        "stream_options": { "include_usage": true } });
    let (status, events) = server.post("/v1/completions", &streamed.to_string());
    assert_eq!(status, 200);
    let mut lines: Vec<&str> =
        events.split_terminator("\n\n").map(|line| line.strip_prefix("data: ").unwrap()).collect();
    assert_eq!(lines.pop(), Some("[DONE]"));
    let mut parts: Vec<Value> = lines.iter().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(parts.pop().unwrap()["usage"]["completion_tokens"], 20);
    assert_eq!(parts.last().unwrap()["choices"][0]["finish_reason"], "length");
    let joined: String = parts.iter().map(|part| part["choices"][0]["text"].as_str().unwrap()).collect();
    assert!(parts.len() > 10 && joined == choice["text"], "{events}");

    // A stop string.
    let stop: String = greedy.chars().skip(3).take(2).collect();
    let stopped = server.complete(&json!({ "prompt": "to be", "max_tokens": 20, "temperature": 0, "stop": [stop] }));
    assert_eq!(stopped["choices"][0]["finish_reason"], "stop");
    assert_eq!(stopped["choices"][0]["text"], greedy[..greedy.find(&stop).unwrap()]);

    // Without a chat template, a conversation is an error that names the other path.
    let chat =
        json!({ "messages": [{ "role": "user", "content": "to be" }], "max_tokens": 5, "temperature": 0 }).to_string();
    let (status, error) = server.post("/v1/chat/completions", &chat);
    assert!(status == 400 && error.contains("use /v1/completions"), "{error}");
    assert_eq!(files(&run), before, "the server must not write to the run");
    drop(server);

    fs::write(
        run.join("chat_template.jinja"),
        "\n{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}a:",
    )
    .unwrap();
    let server = Server::start(&run, &[]);
    let (status, response) = server.post("/v1/chat/completions", &chat);
    let response: Value = serde_json::from_str(&response).unwrap();
    let expected = sample(&run, "u:to be;a:", &["-g", "5", "--temperature", "0"]);
    let message = &response["choices"][0]["message"];
    assert_eq!((status, &message["role"]), (200, &"assistant".into()));
    assert_eq!(format!("u:to be;a:{}\n", message["content"].as_str().unwrap()), expected);
}

/// `sample` and other servers do the same.
#[test]
fn special_tokens_in_a_prompt_become_their_ids() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    train(&run, "1", &["--tokenizer", "gpt2", "--val-every", "0", "--sample-every", "0"]);
    let server = Server::start(&run, &[]);
    let prompt = "a<|endoftext|>b";
    let response = server.complete(&json!({ "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": true }));
    // A token begins the document of the prompt.
    assert_eq!(response["usage"]["prompt_tokens"], 4);
    let text = response["choices"][0]["text"].as_str().unwrap();
    assert_eq!(format!("{prompt}{text}\n"), sample(&run, prompt, &["-g", "8", "--temperature", "0", "--ignore-end"]));
}

#[test]
fn requests_that_are_wrong_have_clear_errors() {
    let (_dir, run) = trained();
    let server = Server::start(&run, &[]);
    let error = |path: &str, body: &str| {
        let (status, text) = server.post(path, body);
        let value: Value = serde_json::from_str(&text).unwrap_or_else(|_| panic!("{text}"));
        (status, value["error"]["message"].as_str().unwrap().to_owned())
    };
    let completions = |body: &str, status: u16, part: &str| {
        let found = error("/v1/completions", body);
        assert!(found.0 == status && found.1.contains(part), "{body:.60}: {found:?}");
    };
    completions("{", 400, "expected JSON");
    completions("[]", 400, "JSON object");
    completions(&"[".repeat(100_000), 400, "expected JSON");
    completions(&json!({ "prompt": [300] }).to_string(), 400, "below 256, found 300");
    let long = json!({ "prompt": "x".repeat(64) }).to_string();
    completions(&long, 400, "prompt: expected at most 64 tokens, the size of the context, found 65");
    let truncated = json!({ "prompt": "x".repeat(64), "truncate_prompt_tokens": 10, "max_tokens": 1 });
    assert_eq!(server.complete(&truncated)["usage"]["prompt_tokens"], 10);
    // A text ends when the context is full: all tokens but the last one have a place in it.
    let full = server.complete(&json!({ "prompt": "x", "max_tokens": 1000 }));
    let ending = ["finish_reason", "stop_reason"].map(|name| &full["choices"][0][name]);
    assert_eq!((&full["usage"]["total_tokens"], ending), (&65.into(), [&"length".into(), &"context_full".into()]));
    completions(
        &json!({ "temperature": -1 }).to_string(),
        400,
        "temperature: expected a number from 0 to 100, found -1",
    );
    completions(&json!({ "prompt": 5 }).to_string(), 400, "or of arrays of token ids, found a number");
    completions(&json!({ "logprobs": 21 }).to_string(), 400, "logprobs: expected a whole number from 0 to 20");
    assert_eq!(error("/v1/nothing", "{}").0, 404);
    assert_eq!(server.get("/v1/completions").0, 405);
    // Nothing of the run or of the machine can be read.
    for path in
        ["/main.jsonl", "/../../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/page.js/../main.jsonl", "//etc/passwd"]
    {
        let response =
            server.raw(format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").as_bytes());
        assert!(response.starts_with("HTTP/1.1 404"), "{path}: {response}");
    }
    let with = |headers: &str| {
        server.raw(format!("POST /v1/completions HTTP/1.1\r\n{headers}Connection: close\r\n\r\n").as_bytes())
    };
    let response = with("Host: localhost\r\nContent-Type: text/plain\r\nContent-Length: 0\r\n");
    assert!(response.starts_with("HTTP/1.1 415") && response.contains("expected application/json"), "{response}");
    // The name of another site, which points to this machine.
    assert!(with("Host: evil.example\r\nContent-Length: 0\r\n").starts_with("HTTP/1.1 403"));
}

#[test]
fn hostile_chat_templates_fail_alone() {
    let (_dir, run) = trained();
    let server = Server::start(&run, &[]);
    let body = json!({ "prompt": "a", "max_tokens": 2 });
    server.complete(&body);
    let chat = json!({ "messages": [{ "role": "user", "content": "to be" }], "max_tokens": 2 }).to_string();
    let cycle = "{% set ns = namespace() %}{% set ns.x = [ns] %}";
    let nested = "{% set ns = namespace(x=[]) %}{% for i in range(99) %}{% for j in range(999) %}{% set ns.x = [ns.x] %}{% endfor %}{% endfor %}";
    for template in [
        format!("{cycle}{{{{ ns }}}}"),
        format!("{cycle}{{{{ ns|tojson }}}}"),
        format!("{cycle}{{{{ ns|pprint }}}}"),
        format!("{cycle}{{{{ ns.x|join('') ~ 'a' }}}}"),
        format!("{nested}{{{{ ns.x|tojson }}}}"),
        "{% for i in range(10000) %}{% for j in range(10000) %}{% for k in range(10000) %}{% endfor %}{% endfor %}{% endfor %}".into(),
        "{% set ns = namespace(s='x') %}{% for i in range(64) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}".into(),
        "{{ 'x' * 99999999 * 99999999 }}".into(),
        "{{ ('a' * 1000000).replace('a', 'b' * 1000000) }}".into(),
        "{% set s = 'a' * 9999999 %}{% for i in range(9999) %}{% for j in range(9999) %}{{ s.count('b') }}{% endfor %}{% endfor %}".into(),
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}".into(),
        "{{ 'x'|indent(9999999999, true) }}".into(),
        "{{ '%9999999999d'|format(1) }}".into(),
        "{{ '{:>9999999999}'.format(1) }}".into(),
        format!("{{{{ {}1{} }}}}", "(".repeat(100_000), ")".repeat(100_000)),
        format!("{{{{ 1{} }}}}", "+1".repeat(100_000)),
        format!("{{{{ x{} }}}}", ".x".repeat(100_000)),
        "{% if true %}".repeat(50_000),
    ] {
        fs::write(run.join("chat_template.jinja"), &template).unwrap();
        let began = Instant::now();
        let (status, error) = server.post("/v1/chat/completions", &chat);
        assert!(status == 500 || status == 400, "{template:.150}: {status}: {error:.300}");
        assert!(error.contains("chat template") && error.len() < 2000, "{template:.150}: {error:.3000}");
        // Two seconds of processor time.
        assert!(began.elapsed() < Duration::from_secs(20), "{template:.150}: {:?}", began.elapsed());
        server.complete(&body);
    }
    assert!(server.resident_bytes() < 200 << 20);
    fs::write(run.join("chat_template.jinja"), "{{ messages[0].content }}").unwrap();
    assert_eq!(server.post("/v1/chat/completions", &chat).0, 200);
}

/// The server reports these errors before the first request.
#[test]
fn the_start_warns_of_a_broken_template_and_a_context_that_is_too_long() {
    let (_dir, run) = trained();
    fs::write(run.join("chat_template.jinja"), "{% for %}").unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_llm-rs"));
    command.args(["serve", text(&run), "--device", "cpu", "--port", "0", "--context", "65"]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    BufReader::new(child.stdout.take().unwrap()).lines().next().unwrap().unwrap();
    child.kill().unwrap();
    let output = child.wait_with_output().unwrap();
    let err = String::from_utf8_lossy(&output.stderr);
    assert!(err.contains("warning: ") && err.contains("chat_template.jinja: expected a valid chat template"), "{err}");
    assert!(
        err.contains("note: --context 65 is longer than the longest sequence of the model; the context is 64 tokens"),
        "{err}"
    );
}

#[test]
fn log_probabilities_are_those_of_the_harness() {
    let (_dir, run) = trained();
    let server = Server::start(&run, &["--slots", "3"]);
    // The request that lm-evaluation-harness sends for local-completions.
    let score = |prompt: Value| {
        let body = json!({ "model": "run", "prompt": prompt, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": true });
        server.complete(&body)["choices"].as_array().unwrap().clone()
    };
    let greedy = json!({ "prompt": b"\nto be", "max_tokens": 9, "temperature": 0, "logprobs": 3, "ignore_eos": true });
    let generated = server.complete(&greedy)["choices"][0].clone();
    let logprobs = &generated["logprobs"];
    let list = |value: &Value| value.as_array().unwrap().clone();
    let numbers = |value: &Value| list(value).iter().skip(1).map(|v| v.as_f64().unwrap()).collect::<Vec<f64>>();
    assert_eq!(list(&logprobs["tokens"]).len(), 9);
    assert_eq!(logprobs["text_offset"][0], 0);
    for (chosen, top) in list(&logprobs["token_logprobs"]).iter().zip(list(&logprobs["top_logprobs"])) {
        let top: Vec<f64> = top.as_object().unwrap().values().map(|value| value.as_f64().unwrap()).collect();
        let sum: f64 = top.iter().map(|logprob| logprob.exp()).sum();
        // The tokens of a greedy text are the most likely ones.
        assert!(top.iter().all(|logprob| *logprob <= chosen.as_f64().unwrap()), "{chosen} {top:?}");
        assert!((3..=4).contains(&top.len()) && sum > 0.01 && sum < 1.0 + 1e-4, "{top:?}");
    }
    // The same text as a prompt, alone and in a batch.
    let text = generated["text"].as_str().unwrap();
    if !text.contains('\u{fffd}') {
        let whole: Vec<u8> = [b"\nto be", text.as_bytes()].concat();
        let choices = score(json!([whole, [10, 65, 66], whole]));
        assert_eq!((choices.len(), &choices[0]["logprobs"]), (3, &choices[2]["logprobs"]));
        let scored = &choices[0]["logprobs"];
        assert_eq!(list(&scored["tokens"]).len(), whole.len() + 1);
        assert_eq!((&scored["token_logprobs"][0], &scored["top_logprobs"][0]), (&Value::Null, &Value::Null));
        let of_generated = &numbers(&scored["token_logprobs"])[5..14];
        let alone = list(&logprobs["token_logprobs"]);
        for (a, b) in of_generated.iter().zip(alone) {
            assert!((a - b.as_f64().unwrap()).abs() < 1e-3, "{a} {b}");
        }
        let offsets: Vec<Value> = (0..=whole.len()).map(|i| json!(i)).collect();
        assert_eq!(scored["text_offset"], json!(offsets));
        assert_eq!(choices[1]["logprobs"]["tokens"].as_array().unwrap()[..3], ["\n", "A", "B"]);
    }
    // Without new tokens. A text has no entry for the token that begins its document, which its first token follows.
    let body = json!({ "prompt": ["to be", "é"], "max_tokens": 0, "logprobs": 0, "echo": true });
    let choices = list(&server.complete(&body)["choices"]);
    assert_eq!((&choices[0]["text"], &choices[0]["finish_reason"]), (&"to be".into(), &"length".into()));
    let scored = &choices[0]["logprobs"];
    assert_eq!(scored["tokens"], json!(["t", "o", " ", "b", "e"]));
    assert!(scored["token_logprobs"][0].as_f64().unwrap() < 0.0, "{scored}");
    assert_eq!(scored["top_logprobs"][2][" "], scored["token_logprobs"][2]);
    assert_eq!(choices[1]["logprobs"]["tokens"], json!(["bytes:\\xc3", "bytes:\\xa9"]));
    assert_eq!(choices[1]["logprobs"]["text_offset"], json!([0, 1]));
    // A prompt that fills the context.
    let full = server.complete(&json!({ "prompt": vec![65; 64], "max_tokens": 1, "logprobs": 1, "echo": true }));
    assert_eq!(full["choices"][0]["logprobs"]["tokens"].as_array().unwrap().len(), 65);
}
