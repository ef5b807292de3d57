//! The thread that owns the model: it loads the newest checkpoint when it is first needed, and generates the texts of all requests.

use super::error::ApiError;
use super::openai::{Completion, Prompt, Truncate, Usage};
use super::queue::{Event, Job, Queue};
use crate::commands::chat::template::{ChatTemplate, Message};
use crate::commands::generation::{Loaded, end_tokens, load, tokenizer_of};
use crate::commands::resources::Hardware;
use crate::generate::{Finish, Request, Scheduler, TextStream};
use anyhow::{Context, Result};
use checkpoint::resume::newest_model_file;
use interchange::ModelSource;
use serde::Serialize;
use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokenizer::Tokenizer;
use tokio::sync::mpsc::error::TrySendError;

/// Longest context unless `--context` says otherwise.
const DEFAULT_CONTEXT: usize = 8192;
/// Time between two searches for a newer checkpoint.
const CHECK_INTERVAL: Duration = Duration::from_secs(2);
/// Longest time over which the speed is measured.
const SPEED_INTERVAL: Duration = Duration::from_secs(1);

/// How to load and use the model.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The directory of a run, a model file or a Hugging Face directory.
    pub path: PathBuf,
    /// `--tokenizer`.
    pub tokenizer: Option<String>,
    /// `--context`: most tokens of a prompt and its text.
    pub context: Option<usize>,
    /// `--slots`: texts that are generated at a time.
    pub slots: usize,
    /// Device and precision.
    pub hardware: Hardware,
}

impl Settings {
    /// Returns the most tokens of a prompt and its text.
    fn capacity(&self, source: &ModelSource) -> usize {
        source.descriptor().max_seq_len.min(self.context.unwrap_or(DEFAULT_CONTEXT))
    }
}

/// The properties of the model that the page shows.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Status {
    /// File or directory of the loaded model.
    pub loaded: Option<String>,
    /// Whether the model has a chat template; unknown before there is a checkpoint.
    pub chat: Option<bool>,
    /// Why the model cannot be used.
    pub error: Option<String>,
    /// Texts in progress.
    pub active: usize,
    /// Texts that can be generated at a time.
    pub slots: usize,
    /// Most tokens of a prompt and its text.
    pub context: Option<usize>,
    /// Tokens generated per second, measured over a second or until all texts have ended. 0 before the first text.
    pub tokens_per_second: f64,
}

impl Status {
    /// Returns the status before a model is loaded.
    pub fn new(settings: &Settings) -> Self {
        // Loading the model reports errors.
        let source = model_file(&settings.path).and_then(|file| ModelSource::open(&file)).ok();
        let template = source.as_ref().and_then(|source| ChatTemplate::of(source).ok());
        Self {
            chat: template.map(|template| template.is_some()),
            context: source.map(|source| settings.capacity(&source)),
            slots: settings.slots,
            ..Self::default()
        }
    }
}

/// The status, shared with the thread.
pub type SharedStatus = Arc<Mutex<Status>>;

/// A model that is ready.
struct Model {
    file: PathBuf,
    loaded: Loaded,
    scheduler: Scheduler,
    tokenizer: Tokenizer,
    ends: Vec<u32>,
    template: Option<ChatTemplate>,
    vocab: usize,
}

/// A text that waits for a slot or is in one.
struct Text {
    id: usize,
    job: usize,
    index: usize,
    request: Request,
    stream: TextStream,
}

/// A request in progress.
struct Running {
    id: usize,
    job: Job,
    /// Choices that have not ended.
    left: usize,
    usage: Usage,
}

/// The state of the thread.
pub struct Worker {
    settings: Settings,
    queue: Arc<Queue>,
    status: SharedStatus,
    model: Option<Model>,
    running: Vec<Running>,
    /// Texts without a slot, in order.
    waiting: VecDeque<Text>,
    active: Vec<Text>,
    next_id: usize,
    checked: Instant,
    /// Whether a newer checkpoint waits for the texts in progress.
    outdated: bool,
    measured: (Instant, usize),
}

impl Worker {
    /// Creates the state without a model.
    pub fn new(settings: Settings, queue: Arc<Queue>, status: SharedStatus) -> Self {
        let now = Instant::now();
        Self {
            settings,
            queue,
            status,
            model: None,
            running: Vec::new(),
            waiting: VecDeque::new(),
            active: Vec::new(),
            next_id: 0,
            checked: now,
            outdated: false,
            measured: (now, 0),
        }
    }

    /// Serves requests until the queue is closed, and refuses those that are not complete then.
    pub fn run(mut self) {
        while !self.queue.is_closed() {
            if self.running.is_empty() {
                self.update(|_| ());
                let Some(job) = self.queue.pop() else { return };
                self.admit(job);
                // Neither waiting nor loading the model counts as generation.
                self.measured = (Instant::now(), 0);
            }
            if let Err(error) = self.step() {
                self.fail(&error);
            }
        }
        for running in &self.running {
            let _ = running.job.events.try_send(Event::Failed(ApiError::stopping()));
        }
    }

    fn update(&self, change: impl FnOnce(&mut Status)) {
        let mut status = self.status.lock().unwrap_or_else(PoisonError::into_inner);
        status.active = self.active.len();
        change(&mut status);
    }

    /// Fails all requests after an error of the engine. The next request loads the model again.
    fn fail(&mut self, error: &anyhow::Error) {
        let message = format!("{error:#}");
        for running in self.running.drain(..) {
            let _ = running.job.events.try_send(Event::Failed(ApiError::internal(message.clone())));
        }
        self.waiting.clear();
        self.active.clear();
        self.model = None;
        self.update(|status| {
            status.loaded = None;
            status.error = Some(message);
        });
    }

    /// Takes up a request, or answers that it is impossible.
    fn admit(&mut self, job: Job) {
        let loaded = self.ensure_model();
        let prepared = loaded.and_then(|()| {
            let model = self.model.as_ref().ok_or_else(|| ApiError::internal("no model".to_owned()))?;
            model.prepare(&job.completion)
        });
        match prepared {
            Ok((requests, prompt_tokens)) => {
                let id = self.next_id;
                let usage = Usage { prompt: prompt_tokens, completion: 0 };
                let left = requests.len();
                for (index, (echo, request)) in requests.into_iter().enumerate() {
                    if !echo.is_empty() {
                        let _ = job.events.try_send(Event::Text(index, echo));
                    }
                    let Some(model) = &self.model else { return };
                    let stream = TextStream::new(&model.tokenizer, &job.completion.stops);
                    let is_answer = matches!(job.completion.prompts[..], [Prompt::Messages(_)]);
                    let stream = if is_answer { stream } else { stream.after(&request.prompt) };
                    self.next_id += 1;
                    self.waiting.push_back(Text { id: self.next_id, job: id, index, request, stream });
                }
                self.next_id += 1;
                self.running.push(Running { id, job, left, usage });
            }
            Err(error) => {
                let _ = job.events.try_send(Event::Failed(error));
            }
        }
    }

    /// Loads the model if there is none, or if there is a newer checkpoint and no text in progress.
    fn ensure_model(&mut self) -> Result<(), ApiError> {
        if self.running.is_empty() {
            self.look_for_newer();
            if self.outdated {
                self.model = None;
            }
        }
        if self.model.is_some() {
            return Ok(());
        }
        self.outdated = false;
        // A run may delete a checkpoint while it is read.
        let loaded = Model::load(&self.settings).or_else(|_| Model::load(&self.settings));
        match loaded {
            Ok(model) => {
                self.update(|status| {
                    status.loaded = Some(model.file.display().to_string());
                    status.chat = Some(model.template.is_some());
                    status.context = Some(model.loaded.generator.capacity());
                    status.error = None;
                });
                self.model = Some(model);
                Ok(())
            }
            Err(error) => {
                let message = format!("{error:#}");
                self.update(|status| {
                    status.loaded = None;
                    status.error = Some(message.clone());
                });
                Err(ApiError::unavailable(message))
            }
        }
    }

    /// Looks for a newer checkpoint than the loaded one.
    fn look_for_newer(&mut self) {
        if self.checked.elapsed() >= CHECK_INTERVAL || self.running.is_empty() {
            self.checked = Instant::now();
            let newest = model_file(&self.settings.path);
            self.outdated = self.model.as_ref().is_some_and(|model| newest.is_ok_and(|file| file != model.file));
        }
    }

    /// Begins what fits, computes a step, and sends its texts.
    fn step(&mut self) -> Result<()> {
        self.drop_abandoned();
        self.look_for_newer();
        // Requests with another checkpoint would mix: new ones wait until the texts in progress have ended.
        while !self.outdated && self.waiting.is_empty() && self.has_room() {
            let Some(job) = self.queue.try_pop() else { break };
            self.admit(job);
        }
        let Some(Model { loaded, scheduler, .. }) = &mut self.model else { return Ok(()) };
        let Loaded { generator, engine, .. } = loaded;
        let before = self.active.len();
        while scheduler.has_room()
            && let Some(text) = self.waiting.pop_front()
        {
            scheduler.begin(generator, &mut **engine, text.id, text.request.clone())?;
            self.active.push(text);
        }
        let (active, running, generated) = (&mut self.active, &mut self.running, &mut self.measured.1);
        let mut each = |id: usize, token: u32| {
            *generated += 1;
            Ok(take(active, running, id, token))
        };
        let mut ended = Vec::new();
        scheduler.advance(generator, &mut **engine, &mut each, &mut |id, finish| ended.push((id, finish)))?;
        if self.active.len() > before {
            self.update(|_| ());
        }
        for (id, finish) in ended {
            self.end(id, finish);
        }
        let (since, tokens) = self.measured;
        if since.elapsed() >= SPEED_INTERVAL || self.running.is_empty() && tokens > 0 {
            let rate = tokens as f64 / since.elapsed().as_secs_f64();
            self.measured = (Instant::now(), 0);
            self.update(|status| status.tokens_per_second = rate);
        }
        Ok(())
    }

    fn has_room(&self) -> bool {
        self.model.as_ref().is_some_and(|model| model.scheduler.has_room())
    }

    /// Releases the slots of requests whose clients have disconnected or given up.
    fn drop_abandoned(&mut self) {
        let before = self.running.len();
        self.running.retain(|running| !running.job.is_abandoned());
        if self.running.len() == before {
            return;
        }
        let running = |job: usize| self.running.iter().any(|running| running.id == job);
        self.waiting.retain(|text| running(text.job));
        let (kept, dropped): (Vec<Text>, Vec<Text>) =
            std::mem::take(&mut self.active).into_iter().partition(|text| running(text.job));
        self.active = kept;
        if let Some(model) = &mut self.model {
            model.scheduler.stop(|id| dropped.iter().any(|text| text.id == id));
        }
        self.update(|_| ());
    }

    /// Sends the rest of a text and, after the last one of a request, the end of the request.
    fn end(&mut self, id: usize, finish: Finish) {
        let Some(at) = self.active.iter().position(|text| text.id == id) else { return };
        let Text { job, index, mut stream, .. } = self.active.remove(at);
        self.update(|_| ());
        let Some(at) = self.running.iter().position(|running| running.id == job) else { return };
        let running = &mut self.running[at];
        let rest = stream.finish();
        // A stop string may end in the text that was held back.
        let finish = if stream.stopped() { Finish::Stop } else { finish };
        if !rest.is_empty() {
            send(running, Event::Text(index, rest));
        }
        send(running, Event::End(index, finish));
        running.left -= 1;
        if running.left == 0 {
            let usage = running.usage;
            send(running, Event::Done(usage));
            self.running.remove(at);
        }
    }
}

/// Sends an event. A client that does not read is disconnected.
fn send(running: &mut Running, event: Event) {
    if let Err(TrySendError::Full(_)) = running.job.events.try_send(event) {
        running.job.deadline = Instant::now();
    }
}

/// Takes a token of a text and returns whether the text goes on.
fn take(active: &mut [Text], running: &mut [Running], id: usize, token: u32) -> bool {
    let Some(text) = active.iter_mut().find(|text| text.id == id) else { return false };
    let Some(running) = running.iter_mut().find(|running| running.id == text.job) else { return false };
    running.usage.completion += 1;
    let new = text.stream.push(token);
    if !new.is_empty() {
        send(running, Event::Text(text.index, new));
    }
    !text.stream.stopped()
}

/// Returns the file of the newest checkpoint of a run, or the path itself.
fn model_file(path: &Path) -> Result<PathBuf> {
    let is_run = path.is_dir() && !path.join("config.json").exists();
    let newest = if is_run { newest_model_file(path)? } else { None };
    Ok(newest.unwrap_or_else(|| path.to_owned()))
}

impl Model {
    fn load(settings: &Settings) -> Result<Self> {
        let file = model_file(&settings.path)?;
        let source = ModelSource::open(&file)?;
        let descriptor = source.descriptor();
        let tokenizer = tokenizer_of(&source, settings.tokenizer.as_deref())?;
        let ends = end_tokens(&tokenizer, &source)?;
        let template = ChatTemplate::of(&source)?;
        let capacity = settings.capacity(&source);
        let mut loaded = load(source, &settings.hardware, settings.slots, capacity)
            .with_context(|| format!("cannot load {}", file.display()))?;
        let scheduler = Scheduler::new(&loaded.generator, &mut *loaded.engine, loaded.run_ahead)?;
        Ok(Self { file, loaded, scheduler, tokenizer, ends, template, vocab: descriptor.vocab })
    }

    /// Returns the texts of a request, each with the text to echo, and the number of tokens of the prompts.
    fn prepare(&self, completion: &Completion) -> Result<(Vec<(String, Request)>, usize), ApiError> {
        let mut requests = Vec::new();
        let mut prompt_tokens = 0;
        let random = || getrandom::u32().unwrap_or(1337);
        let mut seed = completion.seed.unwrap_or_else(random);
        for prompt in &completion.prompts {
            let mut tokens = self.tokens(prompt)?;
            if let Some(truncate) = completion.truncate {
                let kept = match truncate {
                    Truncate::Context => self.loaded.generator.capacity(),
                    Truncate::Tokens(tokens) => tokens,
                };
                tokens.drain(..tokens.len().saturating_sub(kept));
            }
            prompt_tokens += tokens.len();
            let room = self.room(&tokens, completion.tokens)?;
            let echo = match (completion.echo, prompt) {
                (false, _) | (_, Prompt::Messages(_)) => String::new(),
                (true, Prompt::Text(text)) => text.clone(),
                (true, Prompt::Tokens(tokens)) => self.tokenizer.text(tokens),
            };
            for _ in 0..completion.n {
                let ends = if completion.ignore_end { Vec::new() } else { self.ends.clone() };
                let request =
                    Request { prompt: tokens.clone(), tokens: room, seed, sampling: completion.sampling, ends };
                requests.push((echo.clone(), request));
                seed = seed.wrapping_add(1);
            }
        }
        Ok((requests, prompt_tokens))
    }

    /// Returns the tokens of a prompt. A text begins a document.
    fn tokens(&self, prompt: &Prompt) -> Result<Vec<u32>, ApiError> {
        let invalid = |error: anyhow::Error| ApiError::invalid(Some("prompt"), format!("{error:#}"));
        let tokens = match prompt {
            Prompt::Text(text) => {
                let mut tokens = vec![self.tokenizer.document()];
                tokens.extend(self.tokenizer.encode(text).map_err(invalid)?);
                tokens
            }
            Prompt::Tokens(tokens) => tokens.clone(),
            Prompt::Messages(messages) => {
                let Some(template) = &self.template else {
                    let message = "messages: expected a model with a chat template, found none; use /v1/completions";
                    return Err(ApiError::invalid(Some("messages"), message.to_owned()));
                };
                let messages: Vec<Message> =
                    messages.iter().map(|(role, content)| Message::new(role, content)).collect();
                let rendered = template.render(&messages.iter().collect::<Vec<_>>());
                let text = rendered.map_err(|error| ApiError::invalid(Some("messages"), format!("{error:#}")))?;
                self.tokenizer.encode_with_special(&text).map_err(invalid)?
            }
        };
        match tokens.iter().find(|&&token| token as usize >= self.vocab) {
            Some(token) => {
                let message = format!("prompt: expected tokens below {}, found {token}", self.vocab);
                Err(ApiError::invalid(Some("prompt"), message))
            }
            None => Ok(tokens),
        }
    }

    /// Returns the number of tokens to generate after a prompt: at most `tokens`, and as many as the context holds.
    fn room(&self, prompt: &[u32], tokens: Option<usize>) -> Result<usize, ApiError> {
        let (capacity, found) = (self.loaded.generator.capacity(), prompt.len());
        if found > capacity {
            return Err(ApiError::context(format!(
                "prompt: expected at most {capacity} tokens, which the context holds, found {found}; shorten it"
            )));
        }
        // The last token of a text needs no place in the cache.
        let room = capacity + 1 - found;
        Ok(tokens.map_or(room, |tokens| tokens.min(room)))
    }
}
