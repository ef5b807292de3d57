//! Many clients, and clients that disconnect, stall or misbehave.

use super::{Server, files, request, rest, trained, trained_for_long_texts};
use crate::common::runs::signal;
use crate::common::{fail, text};
use serde_json::{Value, json};
use std::fs;
use std::io::Read;
use std::net::TcpStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{scope, sleep};
use std::time::{Duration, Instant};

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
                        assert_eq!(error["error"]["message"], "the queue is full with 16 requests; try again later");
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
