//! `serve` as clients use it: the page, completions in OpenAI's format, and clients that misbehave.

use crate::common::runs::signal;
use crate::common::{fail, overridden, succeed, text};
use serde_json::{Value, json};
use std::fs;
use std::io::{BufRead, BufReader, Lines, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{scope, sleep};
use std::time::{Duration, Instant};
use tempfile::TempDir;
use ureq::Agent;

/// Trains a small model of bytes for `steps` steps.
fn train(out: &Path, steps: &str, more: &[&str]) {
    let model = ["--layers", "1", "--channels", "32", "--heads", "2", "--seq", "64", "--batch", "2", "--steps", steps];
    let run = ["--lr", "0.01", "--warmup", "0", "--val-every", "2", "--sample-every", "3", "--out", text(out)];
    succeed(&[&["train", "--device", "cpu"], &overridden(&[&model[..], &run].concat(), more)[..]].concat());
}

/// A running server, which ends with the test.
struct Server {
    child: Child,
    /// The output of the server.
    lines: Lines<BufReader<ChildStdout>>,
    address: String,
    token: Option<String>,
    agent: Agent,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Server {
    fn start(path: &Path, more: &[&str]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_llm-rs"));
        command.args(["serve", text(path), "--device", "cpu", "--port", "0"]).args(more);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let page = lines.next().unwrap().unwrap();
        let url = page.split_once("http://").unwrap().1;
        let (address, fragment) = url.split_once('/').unwrap();
        let token = fragment.strip_prefix("#token=").map(str::to_owned);
        let config = Agent::config_builder().http_status_as_error(false).timeout_global(Some(Duration::from_mins(2)));
        Self { child, lines, address: address.to_owned(), token, agent: config.build().into() }
    }

    fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    fn get(&self, path: &str) -> (u16, String) {
        let mut response = self.agent.get(self.url(path)).call().unwrap();
        (response.status().as_u16(), response.body_mut().read_to_string().unwrap())
    }

    /// Posts JSON and returns status and body.
    fn post(&self, path: &str, body: &str) -> (u16, String) {
        let mut request = self.agent.post(self.url(path)).header("content-type", "application/json");
        if let Some(token) = &self.token {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        let mut response = request.send(body).unwrap();
        (response.status().as_u16(), response.body_mut().read_to_string().unwrap())
    }

    fn complete(&self, body: &Value) -> Value {
        let (status, text) = self.post("/v1/completions", &body.to_string());
        assert_eq!(status, 200, "{text}");
        serde_json::from_str(&text).unwrap()
    }

    /// Starts a connection and sends bytes on it.
    fn connect(&self, bytes: &[u8]) -> TcpStream {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_mins(1))).unwrap();
        // The server may answer and close before it has read everything.
        let _ = stream.write_all(bytes);
        stream
    }

    /// Sends bytes on a connection of its own and returns the status line and the rest of the response.
    fn raw(&self, bytes: &[u8]) -> String {
        rest(self.connect(bytes))
    }

    /// Returns the next event of this name.
    fn event(&self, name: &str, accept: impl Fn(&Value) -> bool) -> Value {
        let response = self.agent.get(self.url("/events")).call().unwrap();
        let mut lines = BufReader::new(response.into_body().into_reader()).lines().map(Result::unwrap);
        loop {
            let line = lines.next().unwrap();
            if line == format!("event: {name}") {
                let data = lines.next().unwrap();
                let value: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
                if accept(&value) {
                    return value;
                }
            }
        }
    }

    fn resident_bytes(&self) -> usize {
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim().trim_end_matches(" kB").trim().parse::<usize>().unwrap() << 10
    }
}

/// Returns what the server sends until it closes the connection.
fn rest(mut stream: TcpStream) -> String {
    let mut response = Vec::new();
    let _ = stream.read_to_end(&mut response);
    String::from_utf8_lossy(&response).into_owned()
}

/// Returns a request for a completion as a client sends it.
fn request(body: &str) -> Vec<u8> {
    let length = body.len();
    let head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n";
    format!("{head}Content-Length: {length}\r\n\r\n{body}").into_bytes()
}

fn trained() -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    train(&run, "6", &[]);
    (dir, run)
}

/// Trains a model that is large enough for requests of a minute. Returns also the body of such a request.
fn trained_for_long_texts() -> (TempDir, PathBuf, Value) {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    let large = ["--layers", "4", "--channels", "256", "--seq", "1024", "--batch", "1"];
    train(&run, "1", &[&large[..], &["--sample-every", "0", "--val-every", "0"]].concat());
    let body = json!({ "prompt": vec!["abc"; 64], "max_tokens": 1000, "ignore_eos": true });
    (dir, run, body)
}

/// Returns the names, lengths and times of a directory and its files.
fn files(dir: &Path) -> Vec<(String, u64, std::time::SystemTime)> {
    let mut found: Vec<_> = fs::read_dir(dir)
        .unwrap()
        .map(|entry| {
            let entry = entry.unwrap();
            let metadata = entry.metadata().unwrap();
            (entry.file_name().into_string().unwrap(), metadata.len(), metadata.modified().unwrap())
        })
        .collect();
    // A file that is created and removed changes the time of the directory.
    found.push((".".to_owned(), 0, dir.metadata().unwrap().modified().unwrap()));
    found.sort();
    found
}

/// Returns what `sample` prints.
fn sample(run: &Path, prompt: &str, more: &[&str]) -> String {
    succeed(&[&["sample", "--device", "cpu", "--model", text(run), "--prompt", prompt], more].concat())
}

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
    assert_eq!(response["usage"], json!({ "prompt_tokens": 6, "completion_tokens": 20, "total_tokens": 26 }));

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
    // The run continues: the page and the model follow.
    train(&run, "40", &["--resume", "--force-resume"]);
    server.event("run", |shown| shown["cells"][0] == json!(["steps", "40"]));
    let newer = server.complete(&body);
    server.event("status", |state| loaded("00000040", state));
    assert_ne!(first["choices"], newer["choices"]);
}

#[test]
fn no_request_is_lost_under_load() {
    let (_dir, run) = trained();
    let server = Server::start(&run, &["--queue", "16"]);
    server.complete(&json!({ "prompt": "a" }));
    let (next, completed, refused) = (AtomicUsize::new(0), AtomicUsize::new(0), AtomicUsize::new(0));
    scope(|scope| {
        for _ in 0..64 {
            scope.spawn(|| {
                while next.fetch_add(1, Ordering::Relaxed) < 1000 {
                    // A client that is refused tries again, as OpenAI's client does.
                    loop {
                        let body = json!({ "prompt": "to be", "max_tokens": 3, "temperature": 0 }).to_string();
                        let (status, text) = server.post("/v1/completions", &body);
                        if status == 200 {
                            let response: Value = serde_json::from_str(&text).unwrap();
                            assert_eq!(response["usage"]["completion_tokens"], 3);
                            completed.fetch_add(1, Ordering::Relaxed);
                            break;
                        }
                        let error: Value = serde_json::from_str(&text).unwrap();
                        assert_eq!((status, &error["error"]["type"]), (429, &"rate_limit_error".into()), "{text}");
                        assert_eq!(
                            error["error"]["message"],
                            "16 requests are waiting, which is the limit; try again later"
                        );
                        refused.fetch_add(1, Ordering::Relaxed);
                        sleep(Duration::from_millis(20));
                    }
                }
            });
        }
    });
    assert_eq!(completed.into_inner(), 1000);
    // 64 clients exceed 4 slots and 16 places in the queue.
    assert!(refused.into_inner() > 0);
}

#[test]
fn disconnected_clients_release_their_slots() {
    let (_dir, run, body) = trained_for_long_texts();
    let server = Server::start(&run, &["--slots", "2", "--queue", "64"]);
    let short = json!({ "prompt": "a", "max_tokens": 1 });
    server.complete(&short);
    let mut long = body;
    long["stream"] = true.into();
    let long = request(&long.to_string());
    // Of each round, one request gets the slots and the others wait. They would take several minutes altogether.
    for round in 0..6 {
        let mut first = server.connect(&long);
        let mut status = [0; 12];
        first.read_exact(&mut status).unwrap();
        assert_eq!(&status, b"HTTP/1.1 200", "round {round}");
        let _waiting: Vec<TcpStream> = (0..4).map(|_| server.connect(&long)).collect();
    }
    let began = Instant::now();
    server.complete(&short);
    let free = |state: &Value| (&state["model"]["active"], &state["queued"]) == (&Value::from(0), &Value::from(0));
    server.event("status", |state| !state["model"]["loaded"].is_null() && free(state));
    assert!(began.elapsed() < Duration::from_secs(10), "slots and queue were free after {:?}", began.elapsed());
}

#[test]
fn requests_that_take_too_long_end() {
    let (_dir, run, body) = trained_for_long_texts();
    let server = Server::start(&run, &["--slots", "1", "--timeout", "2"]);
    server.complete(&json!({ "prompt": "a", "max_tokens": 1 }));
    let began = Instant::now();
    let (status, text) = server.post("/v1/completions", &body.to_string());
    assert!(
        status == 504 && text.contains("not complete within 2 s") && text.contains("--timeout"),
        "{status}: {text}"
    );
    // The status of a stream has been sent before: its last event is the error.
    let mut streamed = body;
    streamed["stream"] = true.into();
    let (status, text) = server.post("/v1/completions", &streamed.to_string());
    let last = text.trim_end().rsplit("\n\n").next().unwrap();
    assert!(status == 200 && last.contains("\"error\"") && last.contains("within 2 s"), "{status}: {last}");
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
    server.complete(&json!({ "prompt": "a", "max_tokens": 1 }));
}

#[test]
fn a_stopped_server_refuses_what_is_not_complete() {
    let (_dir, run, body) = trained_for_long_texts();
    let mut server = Server::start(&run, &["--slots", "1"]);
    server.complete(&json!({ "prompt": "a", "max_tokens": 1 }));
    let long = request(&body.to_string());
    let clients = [server.connect(&long), server.connect(&long)];
    server.event("status", |state| state["model"]["active"] == 1 && state["queued"] == 1);
    signal(&server.child, "TERM");
    for client in clients {
        let response = rest(client);
        assert!(response.starts_with("HTTP/1.1 503") && response.contains("the server is stopping"), "{response}");
    }
    assert_eq!(server.child.wait().unwrap().code(), Some(0));
    assert_eq!(server.lines.by_ref().map(Result::unwrap).last().as_deref(), Some("stopped"));
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
    completions(&long, 400, "prompt: expected at most 64 tokens, which the context holds, found 65");
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
fn clients_that_misbehave_have_clear_errors_and_take_no_memory() {
    let (dir, run) = trained();
    let token = dir.path().join("token");
    fs::write(&token, "0123456789abcdef\n").unwrap();
    let server = Server::start(&run, &["--token-file", text(&token)]);
    let run_files = files(&run);
    let valid = json!({ "prompt": "a" });
    let head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer 0123456789abcdef\r\n\
                Content-Type: application/json\r\n";
    // Heads and bodies that never end. The first bodies are kept until the server closes their connections.
    let slow = || {
        let clients = |bytes: &[u8]| (0..50).map(|_| server.connect(bytes)).collect::<Vec<_>>();
        [clients(format!("{head}Content-Length: 50\r\n\r\n{{").as_bytes()), clients(b"G")]
    };
    let kept = slow();
    let began = Instant::now();

    let large = vec![b' '; 10_000_000];
    let misbehave = || {
        let length = large.len();
        let announced =
            [format!("{head}Content-Length: {length}\r\nConnection: close\r\n\r\n").as_bytes(), &large].concat();
        let chunks = format!("{head}Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n{length:x}\r\n");
        let chunks = [chunks.as_bytes(), &large, b"\r\n0\r\n\r\n"].concat();
        for bytes in [announced, chunks] {
            let response = server.raw(&bytes);
            assert!(response.starts_with("HTTP/1.1 413") && response.contains("at most 1048576 bytes"), "{response}");
        }
        // A client that asks first sends nothing.
        let asks = format!("{head}Content-Length: {length}\r\nExpect: 100-continue\r\nConnection: close\r\n\r\n");
        assert!(server.raw(asks.as_bytes()).starts_with("HTTP/1.1 413"));
        let response =
            server.raw(format!("GET / HTTP/1.1\r\nHost: localhost\r\nX: {}\r\n\r\n", "x".repeat(1 << 20)).as_bytes());
        // The connection is closed while the head arrives, so that the response may not.
        assert!(response.is_empty() || response.starts_with("HTTP/1.1 431"), "{response}");
        for _ in 0..100 {
            assert_eq!(server.post("/v1/completions", "{\"prompt\": [[[").0, 400);
            let wrong = server.raw(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer 0\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
            assert!(wrong.starts_with("HTTP/1.1 401") && wrong.contains("found another token"), "{wrong}");
        }
        drop(slow());
        // Others are served meanwhile.
        server.complete(&valid);
    };
    misbehave();
    let before = server.resident_bytes();
    for _ in 0..20 {
        misbehave();
    }
    let grown = server.resident_bytes().saturating_sub(before);
    println!("resident: {before} bytes, grown by {grown}");
    assert!(grown < 8 << 20, "grown by {grown} bytes");

    let [bodies, heads] = kept;
    for body in bodies {
        let response = rest(body);
        assert!(response.starts_with("HTTP/1.1 408") && response.contains("within 20 s"), "{response}");
    }
    for head in heads {
        let response = rest(head);
        assert!(response.is_empty() || response.starts_with("HTTP/1.1 408"), "{response}");
    }
    assert!(began.elapsed() < Duration::from_secs(50), "{:?}", began.elapsed());
    assert_eq!(files(&run), run_files, "the server must not write to the run");
}

#[test]
fn other_addresses_require_a_token() {
    let (dir, run) = trained();
    let file = dir.path().join("token");
    fs::write(&file, "0123456789abcdef\n").unwrap();
    let mut server = Server::start(&run, &["--host", "0.0.0.0", "--token-file", text(&file)]);
    assert_eq!(server.token.as_deref(), Some("0123456789abcdef"));
    // The printed address is one that works, with that for other machines below it.
    assert!(server.address.starts_with("127.0.0.1:"), "{}", server.address);
    let elsewhere = server.lines.by_ref().take(2).last().unwrap().unwrap();
    assert!(
        elsewhere.starts_with("elsewhere:   http://") && elsewhere.ends_with("/#token=0123456789abcdef"),
        "{elsewhere}"
    );
    // The page has no secrets; what it shows has.
    assert_eq!((server.get("/").0, server.get("/events").0, server.get("/v1/models").0), (200, 401, 401));
    assert_eq!(server.post("/v1/completions", "{}").0, 200);
    for wrong in ["0123456789abcdeF", "", "0123456789abcdef0"] {
        server.token = Some(wrong.to_owned());
        let (status, error) = server.post("/v1/completions", "{}");
        assert!(status == 401 && error.contains("Bearer TOKEN"), "{error}");
    }
    drop(server);
    let random = Server::start(&run, &["--host", "0.0.0.0"]);
    assert_eq!(random.token.as_ref().map(String::len), Some(32));

    fs::write(&file, "short\n").unwrap();
    fail(&["serve", text(&run), "--token-file", text(&file)], &["--token-file", "at least 16", "found 5"]);
    fail(&["serve", text(dir.path())], &["expected", "checkpoint"]);
    let port = random.address.rsplit_once(':').unwrap().1;
    fail(&["serve", text(&run), "--port", port], &["cannot listen on 127.0.0.1", "--port"]);
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
fn no_client_prevents_the_server_from_stopping() {
    let (_dir, run, body) = trained_for_long_texts();
    let mut server = Server::start(&run, &["--slots", "1"]);
    server.complete(&json!({ "prompt": "a", "max_tokens": 1 }));
    let mut long = body;
    long["stream"] = true.into();
    // A text in progress, a client that does not read, one that has not sent its request, and idle ones beyond the limit.
    let long = request(&long.to_string());
    let mut clients = vec![server.connect(&long), server.connect(&long), server.connect(b"POST /v1/comp")];
    clients.extend((0..560).map(|_| server.connect(b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n")));
    let began = Instant::now();
    signal(&server.child, "TERM");
    while server.child.try_wait().unwrap().is_none() {
        assert!(began.elapsed() < Duration::from_secs(15), "the server has not stopped");
        sleep(Duration::from_millis(20));
    }
    drop(clients);
    assert_eq!(server.lines.by_ref().map(Result::unwrap).last().as_deref(), Some("stopped"));
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
    assert!(err.contains("note: --context 65: the longest sequence of the model has 64 tokens"), "{err}");
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
