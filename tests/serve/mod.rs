//! `serve` as clients use it.

mod clients;
mod completions;
mod models;

use crate::common::{overridden, succeed, text};
use serde_json::{Value, json};
use std::fs;
use std::io::{BufRead, BufReader, Lines, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;
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
