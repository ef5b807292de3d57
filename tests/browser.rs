//! The page of `serve` in headless Chromium, with real clicks and keys. `scripts/setup` installs Chromium. If it is not installed or
//! cannot start, as in some sandboxes, the tests print the reason and are skipped.
//!
//! `SCREENSHOTS=DIR` stores what the browser shows.

use crate::common::{succeed, text};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Lines, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread::{sleep, spawn};
use std::time::{Duration, Instant};
use std::{env, fs};
use tempfile::TempDir;
use tungstenite::{Message, WebSocket, client};

/// A process that ends with the test.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A page of a browser, controlled through the Chrome DevTools protocol.
struct Browser {
    socket: WebSocket<TcpStream>,
    commands: u64,
    /// Messages of the console and errors.
    complaints: Vec<String>,
    _process: Process,
    _profile: TempDir,
}

impl Browser {
    /// Starts Chromium, or prints why it cannot start.
    fn start() -> Option<Self> {
        match Self::try_start() {
            Ok(browser) => Some(browser),
            Err(reason) => {
                println!("skipped: {reason}");
                None
            }
        }
    }

    /// Starts Chromium, or returns the reason why it is not installed or ends at once.
    fn try_start() -> Result<Self, String> {
        let profile = tempfile::tempdir().unwrap();
        let mut command = Command::new("chromium");
        // Chromium's sandbox needs privileges that containers lack. The page comes from this test.
        command.args([
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--remote-debugging-port=0",
        ]);
        command.arg(format!("--user-data-dir={}", profile.path().display())).arg("about:blank");
        let child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn();
        let mut child = child.map_err(|error| format!("chromium: {error}; scripts/setup installs it"))?;
        let lines = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
        let process = Process(child);
        let (sender, received) = channel();
        // All output is read: Chromium would otherwise wait once the pipe is full.
        spawn(move || lines.for_each(|line| drop(sender.send(line))));
        let (mut output, prefix) = (Vec::new(), "DevTools listening on ws://");
        let address = loop {
            let line = match received.recv_timeout(Duration::from_mins(1)) {
                Ok(line) => line,
                Err(RecvTimeoutError::Disconnected) => return Err(format!("chromium cannot start: {output:#?}")),
                Err(RecvTimeoutError::Timeout) => panic!("chromium does not start: {output:#?}"),
            };
            if let Some(url) = line.strip_prefix(prefix) {
                break url.split('/').next().unwrap().to_owned();
            }
            output.push(line);
        };
        let list =
            ureq::get(format!("http://{address}/json/list")).call().unwrap().body_mut().read_to_string().unwrap();
        let list: Value = serde_json::from_str(&list).unwrap();
        let page = list.as_array().unwrap().iter().find(|target| target["type"] == "page").expect("a page");
        let stream = TcpStream::connect(&address).unwrap();
        stream.set_read_timeout(Some(Duration::from_mins(1))).unwrap();
        let (socket, _) = client(page["webSocketDebuggerUrl"].as_str().unwrap(), stream).unwrap();
        let mut browser = Self { socket, commands: 0, complaints: Vec::new(), _process: process, _profile: profile };
        for domain in ["Page", "Runtime", "Log"] {
            browser.call(&format!("{domain}.enable"), json!({}));
        }
        Ok(browser)
    }

    /// Runs a command of the protocol and returns its result.
    fn call(&mut self, method: &str, params: Value) -> Value {
        self.commands += 1;
        let mut command = json!({ "id": self.commands, "method": method });
        command["params"] = params;
        self.socket.send(Message::text(command.to_string())).unwrap();
        loop {
            let message = self.socket.read().unwrap();
            let Ok(message) = message.to_text().map(|text| serde_json::from_str::<Value>(text).unwrap_or_default())
            else {
                continue;
            };
            if message["id"] == self.commands {
                assert!(message.get("error").is_none(), "{method}: {message}");
                return message["result"].clone();
            }
            let method = message["method"].as_str().unwrap_or_default();
            if ["Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"].contains(&method) {
                self.complaints.push(message["params"].to_string());
            }
        }
    }

    /// Evaluates an expression of JavaScript.
    fn evaluate(&mut self, expression: &str) -> Value {
        let result = self.call("Runtime.evaluate", json!({ "expression": expression, "returnByValue": true }));
        assert!(result.get("exceptionDetails").is_none(), "{expression}: {result}");
        result["result"]["value"].clone()
    }

    fn wait_until(&mut self, expression: &str) {
        let began = Instant::now();
        while self.evaluate(expression) != true {
            let shown = self.evaluate("document.body.innerText");
            assert!(began.elapsed() < Duration::from_mins(1), "{expression}: {shown}: {:?}", self.complaints);
            sleep(Duration::from_millis(50));
        }
    }

    /// Opens a page in a window of this size.
    fn open(&mut self, url: &str, [width, height]: [u32; 2], dark: bool) {
        let size = json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600 });
        self.call("Emulation.setDeviceMetricsOverride", size);
        let scheme = json!({ "name": "prefers-color-scheme", "value": if dark { "dark" } else { "light" } });
        self.call("Emulation.setEmulatedMedia", json!({ "features": [scheme] }));
        self.call("Page.navigate", json!({ "url": url }));
        self.wait_until("document.readyState === 'complete' && location.href !== 'about:blank'");
    }

    /// Clicks with the mouse on the middle of an element, again if the element moved meanwhile: events of the server change
    /// the height of what is above it.
    fn click(&mut self, selector: &str) {
        let element = format!("document.querySelector({})", json!(selector));
        self.evaluate(&format!(
            "(() => {{ window.pressed = false; \
               {element}.addEventListener('pointerdown', () => {{ window.pressed = true; }}, {{ once: true }}); }})()"
        ));
        let began = Instant::now();
        while self.evaluate("window.pressed") != true {
            assert!(began.elapsed() < Duration::from_mins(1), "{selector} cannot be clicked");
            let place = self.evaluate(&format!(
                "(() => {{ {element}.scrollIntoView({{ block: 'center' }}); const r = {element}.getBoundingClientRect(); \
                   return [r.x + r.width / 2, r.y + r.height / 2]; }})()"
            ));
            for kind in ["mousePressed", "mouseReleased"] {
                let event = json!({ "type": kind, "x": place[0], "y": place[1], "button": "left", "clickCount": 1 });
                self.call("Input.dispatchMouseEvent", event);
            }
        }
    }

    /// Presses and releases a key. `text` is what the key writes.
    fn key(&mut self, key: &str, code: u32, text: &str) {
        for (kind, text) in [("keyDown", text), ("keyUp", "")] {
            let event = json!({ "type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code, "text": text });
            self.call("Input.dispatchKeyEvent", event);
        }
    }

    /// Types text where the focus is.
    fn write(&mut self, text: &str) {
        self.call("Input.insertText", json!({ "text": text }));
    }

    /// Stores a screenshot in the directory of `SCREENSHOTS`. Returns the number of its bytes.
    fn screenshot(&mut self, name: &str) -> usize {
        let image = self.call("Page.captureScreenshot", json!({ "format": "png" }));
        let png = STANDARD.decode(image["data"].as_str().unwrap()).unwrap();
        assert!(png.starts_with(b"\x89PNG"));
        if let Some(directory) = env::var_os("SCREENSHOTS") {
            fs::write(Path::new(&directory).join(name), &png).unwrap();
        }
        png.len()
    }
}

/// Starts a server for a run and returns the address of its page.
fn serve(run: &Path, more: &[&str]) -> (Process, Lines<BufReader<ChildStdout>>, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_llm-rs"));
    command.args(["serve", text(run), "--device", "cpu", "--port", "0"]).args(more);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let line = lines.next().unwrap().unwrap();
    (Process(child), lines, line["page:".len()..].trim().to_owned())
}

/// Starts requests that take about a minute together. They end when they are dropped.
fn occupy(url: &str) -> Vec<TcpStream> {
    let address = url.trim_start_matches("http://").trim_end_matches('/');
    let body = json!({ "prompt": vec!["a"; 64], "max_tokens": 60, "ignore_eos": true }).to_string();
    let head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n";
    let start = || {
        let mut client = TcpStream::connect(address).unwrap();
        write!(client, "{head}Content-Length: {}\r\n\r\n{body}", body.len()).unwrap();
        client
    };
    (0..40).map(|_| start()).collect()
}

#[test]
fn a_visitor_sees_the_run_and_talks_to_the_model() {
    let Some(mut browser) = Browser::start() else { return };
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("shakespeare");
    let model = ["--layers", "1", "--channels", "32", "--heads", "2", "--seq", "64", "--batch", "2"];
    let rest = ["--lr", "0.01", "--warmup", "4", "--val-every", "5", "--sample-every", "20", "--out", text(&run)];
    let train = |steps: &str, more: &[&str]| {
        succeed(&[&["train", "--device", "cpu", "--steps", steps], &model[..], &rest, more].concat())
    };
    train("40", &[]);
    let (_server, _lines, url) = serve(&run, &["--slots", "1"]);

    browser.open(&url, [1280, 900], false);
    browser.wait_until("document.querySelector('#figure svg') !== null && document.title === 'shakespeare'");
    assert_eq!(browser.evaluate("document.querySelector('#cells dd').textContent"), "40");
    assert_eq!(browser.evaluate("document.querySelectorAll('#sample-list pre').length > 0"), true);
    // The values under the pointer.
    let place = browser.evaluate(
        "(() => { const r = document.querySelector('#figure svg').getBoundingClientRect(); return [r.x + r.width / 2, r.y + 150]; })()",
    );
    browser.call("Input.dispatchMouseEvent", json!({ "type": "mouseMoved", "x": place[0], "y": place[1] }));
    browser.wait_until("/step/.test(document.querySelector('.tip:not([hidden])')?.textContent ?? '')");

    // A message, sent with a click. The model has no chat template, so it continues the text.
    browser.click("#prompt");
    browser.write("To be, or");
    browser.click("#send");
    browser.wait_until("document.querySelector('.message.model .text')?.textContent.length > 50");
    browser.wait_until("!document.querySelector('#send').disabled");
    assert_eq!(browser.evaluate("document.querySelector('.message.user .text').textContent"), "To be, or");
    assert!(browser.screenshot("serve.png") > 20_000);

    // The number of tokens is a setting. The message is sent with the keyboard.
    browser.click("#sampling summary");
    browser
        .evaluate("(() => { const field = document.querySelector('#max_tokens'); field.focus(); field.select(); })()");
    browser.write("5");
    browser.wait_until("document.querySelector('#max_tokens').value === '5'");
    browser.click("#prompt");
    browser.write("or not");
    browser.key("Enter", 13, "\r");
    browser.wait_until("document.querySelectorAll('.message.model').length === 2");
    browser.wait_until("!document.querySelector('#send').disabled");
    let second = browser.evaluate("document.querySelectorAll('.message.model .text')[1].textContent");
    assert!((1..=5).contains(&second.as_str().unwrap().chars().count()), "{second}");

    // While other clients occupy the model, Escape stops a message that waits. It is not answered later.
    let others = occupy(&url);
    browser.wait_until("/waiting requests[1-9]/.test(document.querySelector('#machine').textContent)");
    browser.write("to be");
    browser.key("Enter", 13, "\r");
    browser.wait_until("!document.querySelector('#stop').disabled");
    browser.key("Escape", 27, "");
    browser.wait_until("!document.querySelector('#send').disabled");
    drop(others);
    browser.wait_until("/waiting requests0/.test(document.querySelector('#machine').textContent)");
    assert_eq!(browser.evaluate("document.querySelectorAll('.message.user').length"), 2);
    assert_eq!(browser.evaluate("document.querySelectorAll('.message.model').length"), 2);
    assert_eq!(browser.evaluate("document.querySelector('#prompt').value"), "to be");
    assert_eq!(browser.evaluate("document.querySelector('#base').hidden"), false);
    browser.click("#new");
    assert_eq!(browser.evaluate("document.querySelector('#messages').children.length"), 0);
    assert_eq!(browser.evaluate("document.activeElement.id"), "prompt");

    // The run continues while the page is open.
    train("60", &["--resume", "--force-resume"]);
    browser.wait_until("document.querySelector('#cells dd').textContent === '60'");

    // A phone in dark mode. Nothing is wider than the screen.
    browser.open(&url, [390, 844], true);
    browser.wait_until("document.querySelector('#figure svg') !== null");
    assert_eq!(browser.evaluate("document.documentElement.scrollWidth <= 390"), true);
    assert_eq!(browser.evaluate("document.querySelector('#figure svg').viewBox.baseVal.width"), 380);
    assert_eq!(browser.evaluate("getComputedStyle(document.body).backgroundColor"), "rgb(17, 21, 26)");
    assert!(browser.screenshot("serve_phone.png") > 10_000);
    assert_eq!(browser.complaints, Vec::<String>::new());
}

#[test]
fn the_page_says_that_the_context_is_full() {
    let Some(mut browser) = Browser::start() else { return };
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    let model = ["--layers", "1", "--channels", "32", "--heads", "2", "--seq", "64", "--batch", "2", "--steps", "2"];
    succeed(&[&["train", "--device", "cpu", "--val-every", "0"], &model[..], &["--out", text(&run)]].concat());
    fs::write(run.join("chat_template.jinja"), "{% for m in messages %}{{ m.content }}{% endfor %}").unwrap();
    let (_server, _lines, url) = serve(&run, &[]);
    browser.open(&url, [800, 600], false);
    browser.wait_until("document.querySelector('#connection').textContent === 'connected'");
    browser.click("#prompt");
    browser.write(&"x".repeat(63));
    browser.click("#send");
    browser
        .wait_until("/context of 64 tokens is full/.test(document.querySelector('.message.note')?.textContent ?? '')");
    assert_eq!(browser.complaints, Vec::<String>::new());
}

/// Trains a model with a chat template and opens its page.
fn open_chat(
    browser: &mut Browser,
    directory: &Path,
    size: [u32; 2],
    dark: bool,
) -> (Process, Lines<BufReader<ChildStdout>>) {
    let run = directory.join("run");
    let model = ["--layers", "1", "--channels", "32", "--heads", "2", "--seq", "64", "--batch", "2", "--steps", "2"];
    succeed(&[&["train", "--device", "cpu", "--val-every", "0"], &model[..], &["--out", text(&run)]].concat());
    fs::write(run.join("chat_template.jinja"), "{% for m in messages %}{{ m.content }}{% endfor %}").unwrap();
    let (server, lines, url) = serve(&run, &[]);
    browser.open(&url, size, dark);
    browser.wait_until("document.querySelector('#connection').textContent === 'connected'");
    (server, lines)
}

/// Lets the page receive `window.answer` in parts of seven characters instead of answers of the model, and keep what it sent.
const OTHER_ANSWERS: &str = r"(() => { const real = fetch; window.sent = []; window.fetch = async (url, options) => {
    if (!String(url).includes('completions')) return real(url, options);
    window.sent.push(JSON.parse(options.body));
    const part = (content) => `data: ${JSON.stringify({ choices: [{ index: 0, delta: { content } }] })}\n\n`;
    return new Response(window.answer.match(/[^]{1,7}/g).map(part).join('') + 'data: [DONE]\n\n');
}; })()";

/// What a model may write to harm a reader.
const HOSTILE: &str = r#"# Title <script>window.harmed = 1</script>

<img src=x onerror="window.harmed = 1"> <iframe srcdoc="<script>parent.harmed = 1</script>"></iframe>

[a](javascript:window.harmed=1) [b](JaVaScRiPt:alert(1)) [c](data:text/html,<script>1</script>) [d](https://example.com/?q=1)
![pixel](http://example.invalid/pixel.png) <https://example.org> [e](  vbscript:x ) [f](file:///etc/passwd) [g]("><script>1</script>)

| a | b | <b>c</b> |
|---|:-:|---|
| 1 | **2** | `<script>window.harmed = 1</script>` |

- one
  - **two** *three*
> quote

```html"><script>window.harmed = 1</script>
</code></pre><script>window.harmed = 1</script>
"#;

#[test]
fn answers_of_a_hostile_model_do_no_harm() {
    let Some(mut browser) = Browser::start() else { return };
    let dir = tempfile::tempdir().unwrap();
    for (size, dark) in [([390, 844], true), ([1280, 900], false)] {
        let _server = open_chat(&mut browser, dir.path(), size, dark);
        browser.evaluate(OTHER_ANSWERS);
        let columns = "| a ".repeat(200) + "|\n" + &"|---".repeat(200) + "|\n" + &"| cell ".repeat(200) + "|\n";
        let rows = "| a | b |\n|---|---|\n".to_owned() + &"| 1 | 2 |\n".repeat(2000);
        let nested = "> ".repeat(500) + &"[".repeat(5000) + &"*a ".repeat(5000) + &"`".repeat(3001);
        for answer in [HOSTILE.to_owned(), columns + "\n" + &rows, nested] {
            browser.evaluate(&format!("window.answer = {}", json!(answer)));
            browser.click("#prompt");
            browser.write("<b>hello</b>");
            browser.click("#send");
            browser.wait_until(
                "!document.querySelector('#send').disabled && document.querySelector('#prompt').value === ''",
            );
        }
        browser.wait_until("document.querySelectorAll('.message.model').length === 3");
        assert_eq!(browser.evaluate("typeof window.harmed"), "undefined");
        let forbidden =
            "#messages :is(script, img, iframe, object, embed, style, link, form, input, [onerror], [srcdoc], [src])";
        assert_eq!(browser.evaluate(&format!("document.querySelectorAll({}).length", json!(forbidden))), 0);
        let links = "[...document.querySelectorAll('#messages a')].map((a) => a.href)";
        let expected = json!(["https://example.com/?q=1", "http://example.invalid/pixel.png", "https://example.org/"]);
        assert_eq!(browser.evaluate(links), expected);
        assert_eq!(
            browser.evaluate("[...document.querySelectorAll('#messages a')].every((a) => a.rel.includes('noopener') && a.rel.includes('noreferrer'))"),
            true
        );
        // An unclosed block of code ends with the answer. Its language is text, too.
        let code = "document.querySelector('.message.model .code code').textContent";
        assert_eq!(browser.evaluate(code), "</code></pre><script>window.harmed = 1</script>\n");
        assert_eq!(
            browser.evaluate("document.querySelector('.code-bar span').textContent"),
            "html\"><script>window.harmed"
        );
        assert_eq!(
            browser.evaluate("document.querySelector('.message.model h3').textContent"),
            "Title <script>window.harmed = 1</script>"
        );
        assert_eq!(browser.evaluate("document.querySelector('.message.model li li strong').textContent"), "two");
        assert_eq!(browser.evaluate("document.querySelector('.message.model blockquote').textContent"), "quote");
        assert_eq!(browser.evaluate("document.querySelectorAll('.message.model td').length >= 3 + 64 + 4000"), true);
        assert_eq!(browser.evaluate("document.querySelector('.message.user .text').textContent"), "<b>hello</b>");
        assert_eq!(browser.evaluate("document.documentElement.scrollWidth <= innerWidth"), true);
        assert!(browser.screenshot(&format!("chat_{}.png", size[0])) > 10_000);
        assert_eq!(browser.complaints, Vec::<String>::new());
        // The page does not see the end of its server.
        browser.call("Page.navigate", json!({ "url": "about:blank" }));
        fs::remove_dir_all(dir.path().join("run")).unwrap();
    }
}

#[test]
fn conversations_are_edited_answered_again_and_kept() {
    let Some(mut browser) = Browser::start() else { return };
    let dir = tempfile::tempdir().unwrap();
    let _server = open_chat(&mut browser, dir.path(), [1000, 900], false);
    let url = browser.evaluate("location.href").as_str().unwrap().to_owned();
    browser.evaluate(OTHER_ANSWERS);
    let texts = "[...document.querySelectorAll('.message .text')].map((text) => text.textContent)";
    let answered = "!document.querySelector('#send').disabled";
    browser.click("#instructions summary");
    browser.click("#system");
    browser.write("Be brief.");
    for (message, answer) in [("one", "first"), ("two", "second")] {
        browser.evaluate(&format!("window.answer = {}", json!(answer)));
        browser.click("#prompt");
        browser.write(message);
        browser.key("Enter", 13, "\r");
        browser
            .wait_until(&format!("{answered} && document.querySelector('#messages').textContent.includes('{answer}')"));
    }
    assert_eq!(browser.evaluate(texts), json!(["one", "first", "two", "second"]));
    let message = |role: &str, content: &str| json!({ "role": role, "content": content });
    let system = message("system", "Be brief.");
    assert_eq!(
        browser.evaluate("window.sent[1].messages"),
        json!([system, message("user", "one"), message("assistant", "first"), message("user", "two")])
    );
    assert_eq!(browser.evaluate("'temperature' in window.sent[1]"), false);
    // Another answer, and another message, which replaces those after it. Both with the keyboard.
    let press = |browser: &mut Browser, name: &str, i: usize| {
        browser.evaluate(&format!(
            "[...document.querySelectorAll('.actions button')].filter((b) => b.textContent === '{name}')[{i}].focus()"
        ));
        browser.key("Enter", 13, "\r");
    };
    browser.evaluate("window.answer = 'third'");
    press(&mut browser, "Regenerate", 1);
    browser.wait_until(&format!("{answered} && document.querySelector('#messages').textContent.includes('third')"));
    assert_eq!(browser.evaluate(texts), json!(["one", "first", "two", "third"]));
    browser.evaluate("window.answer = 'fourth'");
    press(&mut browser, "Edit", 0);
    browser.wait_until("document.activeElement.tagName === 'TEXTAREA' && document.activeElement.value === 'one'");
    assert!(
        browser
            .evaluate("document.querySelector('.edit p').textContent")
            .as_str()
            .unwrap()
            .contains("3 later messages")
    );
    browser.write(" more");
    browser.key("Enter", 13, "\r");
    browser.wait_until(&format!("{answered} && document.querySelector('#messages').textContent.includes('fourth')"));
    assert_eq!(browser.evaluate(texts), json!(["one more", "fourth"]));
    // A second conversation, and the list of both. The page shows the last one again when it is loaded again.
    browser.click("#new");
    browser.click("#prompt");
    browser.write("other");
    browser.click("#send");
    browser.wait_until(&format!("{answered} && document.querySelectorAll('.message.model').length === 1"));
    browser.evaluate("document.querySelector('.talks details').open = true");
    browser.click("#rename");
    browser.write("My talk");
    browser.key("Enter", 13, "\r");
    browser.wait_until("document.querySelector('#talks').selectedOptions[0].textContent === 'My talk'");
    browser.open("about:blank#", [1000, 900], false);
    browser.open(&url, [1000, 900], false);
    browser.wait_until("document.querySelector('#connection').textContent === 'connected'");
    assert_eq!(browser.evaluate(texts), json!(["other", "fourth"]));
    assert_eq!(
        browser.evaluate("[...document.querySelector('#talks').options].map((option) => option.textContent)"),
        json!(["My talk", "one more"])
    );
    let choose = "(() => { const list = document.querySelector('#talks'); list.value = list.options[1].value; list.dispatchEvent(new Event('change')); })()";
    browser.evaluate(choose);
    assert_eq!(browser.evaluate(texts), json!(["one more", "fourth"]));
    assert_eq!(browser.evaluate("document.querySelector('#system').value"), "Be brief.");
    browser.evaluate("window.confirm = () => true; document.querySelector('#delete').click()");
    assert_eq!(browser.evaluate(texts), json!(["other", "fourth"]));
    assert_eq!(browser.evaluate("document.querySelector('#talks').options.length"), 1);
    // The export is what `messages` of the API expects.
    browser.evaluate(
        "(() => { URL.createObjectURL = (blob) => { blob.text().then((text) => { window.exported = text; }); return '#'; }; })()",
    );
    browser.evaluate("document.querySelector('#export').click()");
    browser.wait_until("window.exported !== undefined");
    assert_eq!(
        browser.evaluate("JSON.parse(window.exported)"),
        json!({ "messages": [message("user", "other"), message("assistant", "fourth")] })
    );
    assert_eq!(browser.complaints, Vec::<String>::new());
}

#[test]
fn the_report_of_a_run_fits_a_phone() {
    let Some(mut browser) = Browser::start() else { return };
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join(format!("{}.log", "long-name-".repeat(12)));
    let line = |i: u32| format!("s:{i} trl:{:.4} lr:0.0003 norm:1.5\ns:{i} tel:3.0\n", 5.0 - f64::from(i) / 50.0);
    fs::write(&log, (0..100).map(line).collect::<String>()).unwrap();
    let page = dir.path().join("report.html");
    succeed(&["plot", text(&log), "--html", text(&page)]);
    for (width, shown, hidden) in [(390, "narrow", "wide"), (1280, "wide", "narrow")] {
        browser.open(&format!("file://{}", page.display()), [width, 844], false);
        assert_eq!(browser.evaluate("document.documentElement.scrollWidth <= innerWidth"), true, "{width}");
        let size = |class: &str| format!("document.querySelector('.{class} svg').getBoundingClientRect().width");
        let figure = browser.evaluate(&size(shown)).as_f64().unwrap();
        assert!(figure > 300.0 && figure <= f64::from(width), "{figure}");
        assert_eq!(browser.evaluate(&size(hidden)), 0);
        assert!(browser.screenshot(&format!("report_{width}.png")) > 5_000);
    }
    assert_eq!(browser.complaints, Vec::<String>::new());
}

#[test]
fn the_page_asks_for_the_token() {
    let Some(mut browser) = Browser::start() else { return };
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("main.log"), "s:0 trl:5 lr:0.1 norm:1\ns:1 trl:4 lr:0.1 norm:1\n").unwrap();
    let (_server, _lines, url) = serve(dir.path(), &["--host", "0.0.0.0"]);
    let (address, token) = url.split_once("#token=").unwrap();
    browser.open(address, [800, 600], false);
    browser.wait_until("!document.querySelector('#login').hidden");
    browser.click("#token");
    browser.write(token);
    browser.click("#login button");
    browser.wait_until("document.querySelector('#figure svg') !== null");
    // The token of the printed address is used and removed from it.
    browser.evaluate("sessionStorage.clear()");
    browser.open("about:blank#", [800, 600], false);
    browser.open(&format!("{address}#token={token}"), [800, 600], false);
    browser.wait_until("document.querySelector('#figure svg') !== null && location.hash === ''");
}
