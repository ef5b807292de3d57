//! Connections, routes, and the checks before a request is read.

use super::error::ApiError;
use super::openai::{Completion, CompletionChoice, Header, Prompt, StreamOptions, Usage};
use super::queue::{Event, Queue};
use super::stall::StallTimeout;
use super::worker::SharedStatus;
use crate::chat_template::{ChatTemplate, Message, TemplateError};
use axum::Router;
use axum::body::Body;
use axum::extract::{Path as UrlPath, Request, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use futures_util::{StreamExt, stream};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use serde_json::{Value, json};
use std::convert::Infallible;
use std::future::ready;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::net::TcpListener;
use tokio::sync::mpsc::Receiver;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::spawn_blocking;
use tokio::time::{interval, timeout};

/// Largest body of a request in bytes.
pub const MAX_BYTES: usize = 1 << 20;
/// Largest body that is read to its end, without keeping it, before it is refused. Most clients read the response only after they have
/// sent the whole body, and see a reset connection instead of the error if the server stops reading.
const MAX_DISCARDED_BYTES: usize = 64 << 20;
/// Maximum number of open connections. Further connections wait until one is closed.
const MAX_CONNECTIONS: usize = 512;
/// Maximum number of pages that follow a run at the same time.
pub const MAX_PAGES: usize = 64;
/// Largest head of a request in bytes.
const MAX_HEAD_BYTES: usize = 64 << 10;
/// Time for the head of a request, which is also the longest idle time of a connection, and for the body.
const READ_TIMEOUT: Duration = Duration::from_secs(20);
/// Time without progress after which a client that does not read is disconnected.
const WRITE_TIMEOUT: Duration = Duration::from_secs(30);
/// Time between two lines that keep the connection of a page open.
const HEARTBEAT: Duration = Duration::from_secs(10);

const PAGE: &str = include_str!("page.html");
const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");
const MARKDOWN: &str = include_str!("markdown.js");

/// The part of the content security policy that allows nothing but the server itself.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; \
     form-action 'none'; frame-ancestors 'none'";

/// State that all handlers of requests share.
pub struct Server {
    /// The requests that wait for the model.
    pub queue: Arc<Queue>,
    /// State of the model.
    pub status: SharedStatus,
    /// The directory with the chat template, if there is one.
    pub directory: PathBuf,
    /// Name of the model in responses.
    pub model: String,
    /// The token that clients must send, if any.
    pub token: Option<String>,
    /// Maximum duration of a request.
    pub timeout: Duration,
    /// The newest events of the page: the run, and the state of model and machine.
    pub events: [watch::Receiver<Arc<str>>; 2],
    /// Limits the pages.
    pub pages: Arc<Semaphore>,
    /// Number of responses.
    pub responses: AtomicU64,
}

type Shared = Arc<Server>;

impl Server {
    /// Returns the header of the next response.
    fn header(&self, chat: bool) -> Header {
        let created = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let number = self.responses.fetch_add(1, Ordering::Relaxed);
        let id = format!("{}-{created:x}-{number}", if chat { "chatcmpl" } else { "cmpl" });
        Header { id, created, model: self.model.clone(), chat }
    }
}

/// Returns the routes.
fn routes(server: Shared) -> Router {
    let api = Router::new()
        .route("/events", get(events))
        .route("/v1/models", get(models))
        .route("/v1/models/{*id}", get(model))
        .route("/v1/completions", post(|state: State<Shared>, request: Request| complete(state, request, false)))
        .route("/v1/chat/completions", post(|state: State<Shared>, request: Request| complete(state, request, true)))
        .layer(middleware::from_fn_with_state(Arc::clone(&server), require_token));
    Router::new()
        .route("/", get(|| asset(PAGE, "text/html; charset=utf-8")))
        .route("/page.css", get(|| asset(STYLE, "text/css; charset=utf-8")))
        .route("/figure.css", get(async || ([(header::CONTENT_TYPE, "text/css")], metrics::svg::dark_mode())))
        .route("/page.js", get(|| asset(SCRIPT, "text/javascript; charset=utf-8")))
        .route("/markdown.js", get(|| asset(MARKDOWN, "text/javascript; charset=utf-8")))
        .route("/tooltip.js", get(|| asset(metrics::report::TOOLTIP, "text/javascript; charset=utf-8")))
        .route("/health", get(health))
        .route("/live", get(|| asset("ok\n", "text/plain")))
        .merge(api)
        .fallback(async || ApiError::not_found())
        .method_not_allowed_fallback(async || ApiError::method())
        .layer(middleware::from_fn_with_state(Arc::clone(&server), check_host))
        .layer(middleware::map_response(add_headers))
        .with_state(server)
}

fn asset(text: &'static str, kind: &'static str) -> impl Future<Output = Response> {
    ready(([(header::CONTENT_TYPE, kind)], text).into_response())
}

/// Adds the headers of all responses.
async fn add_headers(mut response: Response) -> Response {
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(header::REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

/// Refuses requests with an unknown host name, if there is no token. A page of another site could otherwise read from this server
/// by pointing its own name to this machine (DNS rebinding).
async fn check_host(State(server): State<Shared>, request: Request, next: Next) -> Response {
    let host = request.headers().get(header::HOST).and_then(|host| host.to_str().ok()).unwrap_or_default();
    if server.token.is_none() && !is_local(host) {
        return ApiError::forbidden_host(host).into_response();
    }
    next.run(request).await
}

/// Returns whether a `Host` names this machine: localhost or an address, with or without a port.
fn is_local(host: &str) -> bool {
    let without_port = match host.rsplit_once(':') {
        Some((name, port)) if port.parse::<u16>().is_ok() && (!name.contains(':') || name.starts_with('[')) => name,
        _ => host,
    };
    let address = without_port.trim_start_matches('[').trim_end_matches(']');
    without_port.eq_ignore_ascii_case("localhost") || address.parse::<IpAddr>().is_ok()
}

/// Refuses requests without the token of the server.
async fn require_token(State(server): State<Shared>, request: Request, next: Next) -> Response {
    if let Some(token) = &server.token {
        let header = request.headers().get(header::AUTHORIZATION);
        let sent = header.and_then(|header| header.as_bytes().strip_prefix(b"Bearer "));
        if !sent.is_some_and(|sent| equal(token.as_bytes(), sent)) {
            let found = match (header, sent) {
                (None, _) => "no such header",
                (_, None) => "another scheme",
                _ => "another token",
            };
            return ApiError::unauthorized(found).into_response();
        }
    }
    next.run(request).await
}

/// Compares a token in a time that does not depend on its contents.
fn equal(token: &[u8], sent: &[u8]) -> bool {
    let difference = token.iter().zip(sent).fold(0, |difference, (a, b)| difference | (a ^ b));
    token.len() == sent.len() && std::hint::black_box(difference) == 0
}

fn json_response(value: &Value) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], value.to_string()).into_response()
}

fn model_object(server: &Server) -> Value {
    json!({ "id": server.model, "object": "model", "created": 0, "owned_by": "llm.rs" })
}

async fn models(State(server): State<Shared>) -> Response {
    json_response(&json!({ "object": "list", "data": [model_object(&server)] }))
}

async fn model(State(server): State<Shared>, UrlPath(id): UrlPath<String>) -> Result<Response, ApiError> {
    if id == server.model {
        Ok(json_response(&model_object(&server)))
    } else {
        Err(ApiError::unknown_model(&server.model, &id))
    }
}

/// Reports whether requests can be answered: a model is loaded, or nothing is known that prevents loading it.
async fn health(State(server): State<Shared>) -> Result<Response, ApiError> {
    let status = server.status.lock().unwrap_or_else(PoisonError::into_inner);
    match &status.error {
        Some(error) if status.loaded.is_none() => Err(ApiError::unavailable(error.clone())),
        _ => Ok(([(header::CONTENT_TYPE, "text/plain")], "ok\n").into_response()),
    }
}

/// Answers `/v1/completions` and `/v1/chat/completions`.
async fn complete(State(server): State<Shared>, request: Request, chat: bool) -> Result<Response, ApiError> {
    let kind = request.headers().get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    // A form of another site cannot send this type without asking first.
    if !kind.split(';').next().is_some_and(|kind| kind.trim().eq_ignore_ascii_case("application/json")) {
        return Err(ApiError::not_json(kind));
    }
    let body = body(request).await?;
    let mut completion = Completion::parse(&body, chat)?;
    if let [Prompt::Messages(messages)] = &mut completion.prompts[..] {
        let text = conversation(&server, std::mem::take(messages)).await?;
        completion.prompts = vec![Prompt::Conversation(text)];
    }
    let (stream, texts) = (completion.stream, completion.texts());
    let events = server.queue.push(completion, server.timeout)?;
    let header = server.header(chat);
    let seconds = server.timeout.as_secs();
    match stream {
        Some(options) => stream_response(events, header, options, texts, seconds).await,
        None => response(events, &header, texts, seconds).await,
    }
}

/// Returns the text of a conversation. A template may take its time, so neither the model nor a connection waits for it.
async fn conversation(server: &Server, messages: Vec<(String, String)>) -> Result<String, ApiError> {
    let directory = server.directory.clone();
    let render = move || {
        let Some(template) = ChatTemplate::in_directory(&directory)? else { return Ok(None) };
        let messages: Vec<Message> = messages.iter().map(|(role, content)| Message::new(role, content)).collect();
        anyhow::Ok(Some(template.render(&messages.iter().collect::<Vec<_>>())))
    };
    let rendered = spawn_blocking(render).await.map_err(|error| ApiError::internal(error.to_string()))?;
    match rendered.map_err(|error| ApiError::internal(format!("{error:#}")))? {
        Some(Ok(text)) => Ok(text),
        Some(Err(error @ TemplateError::Rejected(_))) => Err(ApiError::invalid(Some("messages"), error.to_string())),
        Some(Err(error @ TemplateError::Unusable(_))) => Err(ApiError::internal(error.to_string())),
        None => {
            let message = "messages: expected a model with a chat template, found none; use /v1/completions";
            Err(ApiError::invalid(Some("messages"), message.to_owned()))
        }
    }
}

/// Reads the body of a request of at most [`MAX_BYTES`].
async fn body(request: Request) -> Result<Vec<u8>, ApiError> {
    let headers = request.headers();
    let length = headers.get(header::CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse().ok());
    // A client that expects `100 Continue` has not sent the body yet.
    let most = if headers.contains_key(header::EXPECT) { MAX_BYTES } else { MAX_DISCARDED_BYTES };
    if length.is_some_and(|length: u64| length > most as u64) {
        return Err(ApiError::too_large(MAX_BYTES));
    }
    let mut parts = request.into_body().into_data_stream();
    let read = async {
        let (mut bytes, mut len) = (Vec::new(), 0);
        while let Some(part) = parts.next().await {
            let part = part.map_err(|error| {
                ApiError::invalid(None, format!("body: expected the complete body, found an error: {error}"))
            })?;
            len += part.len();
            if len > most {
                break;
            }
            if len <= MAX_BYTES {
                bytes.extend_from_slice(&part);
            } else {
                bytes = Vec::new();
            }
        }
        if len <= MAX_BYTES { Ok(bytes) } else { Err(ApiError::too_large(MAX_BYTES)) }
    };
    timeout(READ_TIMEOUT, read).await.unwrap_or_else(|_| Err(ApiError::slow_body(READ_TIMEOUT.as_secs())))
}

/// Collects all texts.
async fn response(
    mut events: Receiver<Event>,
    header: &Header,
    texts: usize,
    seconds: u64,
) -> Result<Response, ApiError> {
    let mut choices = vec![CompletionChoice::default(); texts];
    loop {
        match next_event(&mut events, seconds).await? {
            Event::Text(index, text) => choices[index].text += &text,
            Event::End(index, finish, logprobs) => {
                (choices[index].finish, choices[index].logprobs) = (Some(finish), logprobs);
            }
            Event::Done(usage) => return Ok(json_response(&header.response(choices, usage))),
            Event::Failed(error) => return Err(error),
        }
    }
}

/// Waits for the next event. The events end without [`Event::Done`] when the time of the request is over.
async fn next_event(events: &mut Receiver<Event>, seconds: u64) -> Result<Event, ApiError> {
    match timeout(Duration::from_secs(seconds + 1), events.recv()).await {
        Ok(Some(event)) => Ok(event),
        Ok(None) | Err(_) => Err(ApiError::timed_out(seconds)),
    }
}

/// A response that is sent while it is generated.
struct Streamed {
    events: Receiver<Event>,
    header: Header,
    options: StreamOptions,
    seconds: u64,
    /// Whether each choice has begun.
    begun: Vec<bool>,
    /// The first event, which decides about the status of the response.
    first: Option<Event>,
    ended: bool,
}

impl Streamed {
    /// Returns the next bytes of the response.
    async fn next(&mut self) -> Option<String> {
        if self.ended {
            return None;
        }
        let event = match self.first.take() {
            Some(event) => Ok(event),
            None => next_event(&mut self.events, self.seconds).await,
        };
        Some(match event {
            Ok(Event::Text(index, text)) => self.part(index, &text, None),
            Ok(Event::End(index, finish, _)) => self.part(index, "", Some(finish)),
            Ok(Event::Done(usage)) => self.end(usage),
            Ok(Event::Failed(error)) | Err(error) => {
                self.ended = true;
                line(&error.json())
            }
        })
    }

    fn part(&mut self, index: usize, text: &str, finish: Option<crate::generate::Finish>) -> String {
        let first = !std::mem::replace(&mut self.begun[index], true);
        line(&self.header.part(index, text, first, finish))
    }

    fn end(&mut self, usage: Usage) -> String {
        self.ended = true;
        let usage = if self.options.include_usage { line(&self.header.usage(usage)) } else { String::new() };
        usage + "data: [DONE]\n\n"
    }
}

/// Returns a server-sent event.
fn line(value: &Value) -> String {
    format!("data: {value}\n\n")
}

async fn stream_response(
    mut events: Receiver<Event>,
    header: Header,
    options: StreamOptions,
    texts: usize,
    seconds: u64,
) -> Result<Response, ApiError> {
    let first = match next_event(&mut events, seconds).await? {
        Event::Failed(error) => return Err(error),
        event => Some(event),
    };
    let streamed = Streamed { events, header, options, seconds, begun: vec![false; texts], first, ended: false };
    let parts = stream::unfold(streamed, async |mut streamed| {
        let bytes = streamed.next().await?;
        Some((Ok::<_, Infallible>(bytes), streamed))
    });
    Ok(server_sent(Body::from_stream(parts)))
}

fn server_sent(body: Body) -> Response {
    (StatusCode::OK, [(header::CONTENT_TYPE, "text/event-stream")], body).into_response()
}

/// An open page: the events that it has yet to receive.
struct Follower {
    events: [watch::Receiver<Arc<str>>; 2],
    heartbeat: tokio::time::Interval,
    _permit: OwnedSemaphorePermit,
}

/// Sends the state of the run, the model and the machine whenever it changes.
async fn events(State(server): State<Shared>) -> Result<Response, ApiError> {
    let permit = Arc::clone(&server.pages).try_acquire_owned();
    let permit = permit.map_err(|_| ApiError::busy(&format!("the maximum of {MAX_PAGES} pages is open")))?;
    let mut events = server.events.clone();
    events.iter_mut().for_each(watch::Receiver::mark_changed);
    let follower = Follower { events, heartbeat: interval(HEARTBEAT), _permit: permit };
    let parts = stream::unfold(follower, async |mut follower| {
        let [run, status] = &mut follower.events;
        let text = tokio::select! {
            Ok(()) = run.changed() => event("run", &run.borrow_and_update().clone()),
            Ok(()) = status.changed() => event("status", &status.borrow_and_update().clone()),
            _ = follower.heartbeat.tick() => ": alive\n\n".to_owned(),
        };
        Some((Ok::<_, Infallible>(text), follower))
    });
    Ok(server_sent(Body::from_stream(parts)))
}

/// Returns an event with JSON, which contains no line breaks.
fn event(name: &str, json: &str) -> String {
    if json.is_empty() { ": nothing yet\n\n".to_owned() } else { format!("event: {name}\ndata: {json}\n\n") }
}

/// Accepts connections until `stop` completes.
pub async fn serve(listener: TcpListener, server: Shared, stop: impl Future<Output = ()>) {
    let service = TowerToHyperService::new(routes(server));
    let connections = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    tokio::pin!(stop);
    loop {
        let accept = async {
            let permit = Arc::clone(&connections).acquire_owned().await;
            (permit, listener.accept().await)
        };
        let accepted = tokio::select! {
            accepted = accept => accepted,
            () = &mut stop => return,
        };
        let (Ok(permit), Ok((stream, _))) = accepted else {
            // Too many open files, for example: connections that end make room.
            tokio::time::sleep(Duration::from_millis(50)).await;
            continue;
        };
        let _ = stream.set_nodelay(true);
        let service = service.clone();
        tokio::spawn(async move {
            let mut builder = http1::Builder::new();
            builder.timer(TokioTimer::new()).header_read_timeout(READ_TIMEOUT).max_buf_size(MAX_HEAD_BYTES);
            // Errors of a connection, such as a client that has gone, concern nobody else.
            let _ = builder.serve_connection(TokioIo::new(StallTimeout::new(stream, WRITE_TIMEOUT)), service).await;
            drop(permit);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_localhost_or_addresses() {
        for host in ["localhost", "LOCALHOST:8080", "127.0.0.1:80", "[::1]:8080", "[::1]", "192.168.0.5"] {
            assert!(is_local(host), "{host}");
        }
        for host in ["", "example.com", "example.com:8080", "localhost.example.com", "127.0.0.1.example.com", "a:b"] {
            assert!(!is_local(host), "{host}");
        }
    }

    #[test]
    fn tokens_are_compared_completely() {
        assert!(equal(b"secret", b"secret"));
        for other in ["", "secre", "secret1", "Secret", "secreT"] {
            assert!(!equal(b"secret", other.as_bytes()), "{other}");
        }
    }
}
