//! The thread that owns the model: it loads the newest checkpoint when it is first needed, and generates the texts of all requests.

use super::error::ApiError;
use super::identity::{Identity, is_run};
use super::latency::{Latencies, Timeline};
use super::logprobs::{Scored, logprobs};
use super::openai::{Completion, Prompt, Truncate, Usage};
use super::queue::{Event, Job, Queue};
use crate::chat_template::ChatTemplate;
use crate::commands::generation::{Loaded, context, default_sampling, end_tokens, load, tokenizer_of};
use crate::commands::resources::Hardware;
use crate::commands::resources::open_with_adapters;
use crate::generate::{Finish, Request, Scheduler, TextStream};
use anyhow::{Context, Result};
use checkpoint::resume::{newest_model_file, newest_model_path};
use engine::ops::SlotSampling;
use interchange::ModelSource;
use serde::Serialize;
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokenizer::Tokenizer;
use tokio::sync::mpsc::error::TrySendError;

/// Time between two searches for a newer checkpoint.
const CHECK_INTERVAL: Duration = Duration::from_millis(500);
/// Time for which requests in progress may postpone a newer checkpoint. After it, no request begins that would end after them.
const MAX_POSTPONEMENT: Duration = Duration::from_secs(30);
/// Time after which the server tries whether a model that could not be used can be, unless the files change before.
const FAILURE_INTERVAL: Duration = Duration::from_secs(30);
/// Maximum time over which the speed is measured.
const SPEED_INTERVAL: Duration = Duration::from_secs(1);

/// How to load and use the model.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The directory of a run, a model file or a Hugging Face directory.
    pub path: PathBuf,
    /// Directory of the adapters of --lora.
    pub lora: Option<PathBuf>,
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
        context(source, self.context).0
    }
}

/// The properties of the model that the page shows.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Status {
    /// File or directory of the loaded model.
    pub loaded: Option<String>,
    /// Whether the model has a chat template; unknown before there is a checkpoint.
    pub chat: Option<bool>,
    /// How tokens are chosen unless a request says otherwise, by the names of requests.
    pub sampling: Option<Value>,
    /// Why the model cannot be used.
    pub error: Option<String>,
    /// Texts in progress.
    pub active: usize,
    /// Texts that can be generated at a time.
    pub slots: usize,
    /// Maximum number of tokens in a prompt and its completion.
    pub context: Option<usize>,
    /// Tokens generated per second, measured over a second or until all texts have ended. 0 before the first text.
    pub tokens_per_second: f64,
    /// Median time of the last texts from the arrival of a request to its first token.
    pub first_token_ms: Option<f64>,
    /// Median time of the last texts between two tokens.
    pub token_ms: Option<f64>,
}

impl Status {
    /// Returns the status before a model is loaded.
    pub fn new(settings: &Settings, opened: &Result<(ModelSource, Tokenizer)>) -> Self {
        let source = opened.as_ref().ok().map(|(source, _)| source);
        Self {
            chat: source.map(has_template),
            sampling: source.and_then(|source| default_sampling(source).ok()).map(settings_of),
            context: source.map(|source| settings.capacity(source)),
            error: opened.as_ref().err().map(|error| format!("{error:#}")),
            slots: settings.slots,
            ..Self::default()
        }
    }
}

/// The status, shared with the thread.
pub type SharedStatus = Arc<Mutex<Status>>;

/// Returns settings by the names of requests.
fn settings_of(sampling: SlotSampling) -> Value {
    let SlotSampling { repetition_penalty, temperature, top_k, top_p, min_p } = sampling;
    // The decimal that the user wrote, not the digits of the nearest f64.
    let number = |x: f32| json!(x.to_string().parse::<f64>().unwrap_or_default());
    let mut settings = json!({ "top_k": top_k });
    for (name, value) in
        [("temperature", temperature), ("top_p", top_p), ("min_p", min_p), ("repetition_penalty", repetition_penalty)]
    {
        settings[name] = number(value);
    }
    settings
}

/// Returns whether a model has a chat template. Requests report that it is not valid.
fn has_template(source: &ModelSource) -> bool {
    ChatTemplate::of(source).is_ok_and(|template| template.is_some())
}

/// Opens the model and its tokenizer. The checksum of a checkpoint is not verified, and no tensor is read.
pub fn open(settings: &Settings) -> Result<(ModelSource, Tokenizer)> {
    let path = &settings.path;
    let file = if is_run(path) { newest_model_path(path)? } else { None };
    open_path(file.as_ref().unwrap_or(path), settings)
}

fn open_path(path: &Path, settings: &Settings) -> Result<(ModelSource, Tokenizer)> {
    let source = open_with_adapters(path, settings.lora.as_deref())?;
    let tokenizer = tokenizer_of(&source, settings.tokenizer.as_deref())?;
    Ok((source, tokenizer))
}

/// A model whose files are valid, before its tensors are read.
struct Opened {
    identity: Option<Identity>,
    source: ModelSource,
    tokenizer: Tokenizer,
    ends: Vec<u32>,
    sampling: SlotSampling,
}

/// A model that is ready.
struct Model {
    identity: Option<Identity>,
    file: PathBuf,
    loaded: Loaded,
    scheduler: Scheduler,
    tokenizer: Tokenizer,
    ends: Vec<u32>,
    /// Unless a request says otherwise.
    sampling: SlotSampling,
    has_template: bool,
    vocab: usize,
}

/// A text to generate, and what precedes and follows it.
struct Planned {
    /// Text of the prompt, if it is part of the result.
    echo: String,
    request: Request,
    scored: Option<Scored>,
    /// Whether the context holds fewer tokens than asked for.
    limited: bool,
}

/// A text that waits for a slot or is in one.
struct Text {
    id: usize,
    job: usize,
    index: usize,
    planned: Planned,
    stream: TextStream,
    generated: Vec<u32>,
    timeline: Option<Timeline>,
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
    /// When a newer checkpoint was found, which waits for the texts in progress.
    outdated: Option<Instant>,
    /// A newer checkpoint that cannot be used.
    refused: Option<Identity>,
    /// The files for which the status without a model is known, and since when.
    assessed: (Option<Identity>, Instant),
    measured: (Instant, usize),
    latencies: Latencies,
}

impl Worker {
    /// Creates the state without a model.
    pub fn new(settings: Settings, queue: Arc<Queue>, status: SharedStatus) -> Self {
        let now = Instant::now();
        let assessed = (Identity::of(&settings.path).ok(), now);
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
            outdated: None,
            refused: None,
            assessed,
            measured: (now, 0),
            latencies: Latencies::default(),
        }
    }

    /// Serves requests until the queue is closed, and refuses those that are not complete then.
    pub fn run(mut self) {
        while !self.queue.is_closed() {
            if self.running.is_empty() {
                self.update(|_| ());
                let Some(job) = self.queue.pop(CHECK_INTERVAL) else {
                    self.assess();
                    continue;
                };
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
        self.unload(message);
    }

    /// Notes that there is no model because of an error.
    fn unload(&mut self, error: String) {
        self.model = None;
        self.assessed = (Identity::of(&self.settings.path).ok(), Instant::now());
        self.update(|status| {
            status.loaded = None;
            status.error = Some(error);
        });
    }

    /// Without a model, finds out whether one can be opened, if that may have changed.
    fn assess(&mut self) {
        let identity = Identity::of(&self.settings.path).ok();
        let (known, since) = &self.assessed;
        let failed = self.status.lock().unwrap_or_else(PoisonError::into_inner).error.is_some();
        let is_known = *known == identity && !(failed && since.elapsed() >= FAILURE_INTERVAL);
        if self.model.is_some() || is_known {
            return;
        }
        self.assessed = (identity, Instant::now());
        // A failure may have been a wrong checksum, which takes the time to read the whole file.
        let opened = if failed {
            Opened::open(&self.settings).map(|opened| opened.source)
        } else {
            open(&self.settings).map(|(source, _)| source)
        };
        self.update(|status| {
            status.error = opened.as_ref().err().map(|error| format!("{error:#}"));
            if let Ok(source) = &opened {
                status.chat = Some(has_template(source));
                status.sampling = default_sampling(source).ok().map(settings_of);
                status.context = Some(self.settings.capacity(source));
            }
        });
    }

    /// Starts a request, or answers that it is impossible.
    fn admit(&mut self, job: Job) {
        let loaded = self.ensure_model();
        let prepared = loaded.and_then(|()| {
            let model = self.model.as_ref().ok_or_else(|| ApiError::internal("no model".to_owned()))?;
            model.prepare(&job.completion)
        });
        match prepared {
            Ok((requests, prompt_tokens)) => {
                let id = self.next_id;
                let usage = Usage { prompt: prompt_tokens, ..Usage::default() };
                let left = requests.len();
                for (index, mut planned) in requests.into_iter().enumerate() {
                    if !planned.echo.is_empty() {
                        let _ = job.events.try_send(Event::Text(index, std::mem::take(&mut planned.echo)));
                    }
                    let Some(model) = &self.model else { return };
                    let stream = TextStream::new(&model.tokenizer, &job.completion.stops);
                    let is_answer = matches!(job.completion.prompts[..], [Prompt::Conversation(_)]);
                    let stream = if is_answer { stream } else { stream.after(&planned.request.prompt) };
                    self.next_id += 1;
                    let (id_of_text, generated) = (self.next_id, Vec::new());
                    let text = Text { id: id_of_text, job: id, index, planned, stream, generated, timeline: None };
                    self.waiting.push_back(text);
                }
                self.next_id += 1;
                self.running.push(Running { id, job, left, usage });
            }
            Err(error) => {
                let _ = job.events.try_send(Event::Failed(error));
            }
        }
    }

    /// Loads the model if there is none, or if there is a newer checkpoint and no text in progress. The old model remains if the
    /// newer files are not valid.
    fn ensure_model(&mut self) -> Result<(), ApiError> {
        if self.running.is_empty() {
            self.look_for_newer();
        }
        if self.model.is_some() && (self.outdated.is_none() || !self.running.is_empty()) {
            return Ok(());
        }
        self.outdated = None;
        // A run may delete a checkpoint while it is read.
        let opened = Opened::open(&self.settings).or_else(|_| Opened::open(&self.settings));
        let loaded = match opened {
            Err(error) if self.model.is_some() => {
                self.refused = Identity::of(&self.settings.path).ok();
                self.update(|status| status.error = Some(format!("the newer model cannot be used: {error:#}")));
                return Ok(());
            }
            Err(error) => Err(error),
            Ok(opened) => {
                // The memory may hold only one model.
                self.model = None;
                opened.load(&self.settings)
            }
        };
        match loaded {
            Ok(model) => {
                self.update(|status| {
                    status.loaded = Some(model.file.display().to_string());
                    status.chat = Some(model.has_template);
                    status.sampling = Some(settings_of(model.sampling));
                    status.context = Some(model.loaded.generator.capacity());
                    status.error = None;
                });
                self.model = Some(model);
                Ok(())
            }
            Err(error) => {
                let message = format!("{error:#}");
                self.unload(message.clone());
                Err(ApiError::unavailable(message))
            }
        }
    }

    /// Looks for a newer checkpoint than the loaded one, or other files under its path. While there are none, as when a run has been
    /// deleted, the loaded one remains.
    fn look_for_newer(&mut self) {
        let Some(model) = &self.model else { return };
        if self.checked.elapsed() < CHECK_INTERVAL && !self.running.is_empty() {
            return;
        }
        self.checked = Instant::now();
        let newest = Identity::of(&self.settings.path).ok();
        if newest.is_none() || newest == model.identity || newest == self.refused {
            self.outdated = None;
        } else {
            self.outdated.get_or_insert(self.checked);
        }
    }

    /// Returns the requests that may begin now: those that `fits` a limit of texts and tokens, or `None` for all.
    ///
    /// A newer checkpoint is loaded when no text is in progress. If there is no such time for a while, only requests begin that end
    /// before those in progress. They do not postpone the newer checkpoint further, and no other request waits for longer than it
    /// would take itself.
    fn limit(&self) -> Option<[usize; 2]> {
        let model = self.model.as_ref()?;
        self.outdated.filter(|since| since.elapsed() >= MAX_POSTPONEMENT)?;
        let left = |text: &Text| text.planned.request.tokens.saturating_sub(text.generated.len());
        let longest = self.active.iter().map(left).max().unwrap_or(0);
        Some([model.loaded.generator.slots() - model.scheduler.active(), longest])
    }

    /// Begins what fits, computes a step, and sends its texts.
    fn step(&mut self) -> Result<()> {
        self.drop_abandoned();
        self.look_for_newer();
        while self.waiting.is_empty() && self.has_room() {
            let limit = self.limit();
            let Some(job) = self.queue.try_pop(|completion| fits(completion, limit)) else { break };
            self.admit(job);
        }
        let Some(Model { loaded, scheduler, .. }) = &mut self.model else { return Ok(()) };
        let Loaded { generator, engine, .. } = loaded;
        let before = self.active.len();
        let mut ended = Vec::new();
        while ended.is_empty()
            && scheduler.has_room()
            && let Some(text) = self.waiting.pop_front()
        {
            if text.planned.request.tokens == 0 {
                // Its log probabilities take about as long as a step.
                ended.push((text.id, Finish::Length));
            } else {
                let cached = scheduler.begin(generator, &mut **engine, text.id, text.planned.request.clone())?;
                let running = self.running.iter_mut().find(|running| running.id == text.job);
                // The tokens of a prompt count once for all of its texts.
                if let Some(running) = running.filter(|running| text.index.is_multiple_of(running.job.completion.n)) {
                    running.usage.cached += cached;
                }
            }
            self.active.push(text);
        }
        let (active, running, generated) = (&mut self.active, &mut self.running, &mut self.measured.1);
        let mut each = |id: usize, token: u32| {
            *generated += 1;
            Ok(take(active, running, id, token))
        };
        scheduler.advance(generator, &mut **engine, &mut each, &mut |id, finish| ended.push((id, finish)))?;
        if self.active.len() > before {
            self.update(|_| ());
        }
        for (id, finish) in ended {
            self.end(id, finish)?;
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
            model.scheduler.stop(&model.loaded.generator, |id| dropped.iter().any(|text| text.id == id));
        }
        self.update(|_| ());
    }

    /// Sends the rest of a text and, after the last one of a request, the end of the request.
    fn end(&mut self, id: usize, finish: Finish) -> Result<()> {
        let Some(at) = self.active.iter().position(|text| text.id == id) else { return Ok(()) };
        let Text { job, index, mut stream, planned, generated, timeline, .. } = self.active.remove(at);
        let at = self.running.iter().position(|running| running.id == job);
        if let (Some(at), Some(timeline)) = (at, timeline) {
            self.latencies.add(self.running[at].job.received, timeline);
        }
        let medians = self.latencies.medians();
        self.update(|status| [status.first_token_ms, status.token_ms] = medians);
        let Some(at) = at else { return Ok(()) };
        let end = if let Finish::EndOfText(token) = finish { Some(token) } else { None };
        let logprobs = match (planned.scored, &mut self.model) {
            (Some(scored), Some(Model { loaded: Loaded { generator, engine, .. }, tokenizer, .. })) => {
                let text: Vec<u32> = planned.request.prompt.into_iter().chain(generated).chain(end).collect();
                logprobs(generator, &mut **engine, tokenizer, &text, scored)?
            }
            _ => Value::Null,
        };
        let running = &mut self.running[at];
        let rest = stream.finish();
        let finish = match finish {
            // A stop string may end in the text that was held back.
            _ if stream.stopped() => Finish::Stop,
            Finish::Length if planned.limited => Finish::Context,
            other => other,
        };
        if !rest.is_empty() {
            send(running, Event::Text(index, rest));
        }
        send(running, Event::End(index, finish, logprobs));
        running.left -= 1;
        if running.left == 0 {
            let usage = running.usage;
            send(running, Event::Done(usage));
            self.running.remove(at);
        }
        Ok(())
    }
}

/// Returns whether all texts of a request fit into a limit of texts and tokens.
fn fits(completion: &Completion, limit: Option<[usize; 2]>) -> bool {
    let within = |[texts, tokens]: [usize; 2]| {
        completion.texts() <= texts && completion.tokens.is_some_and(|asked| asked <= tokens)
    };
    limit.is_none_or(within)
}

/// Sends an event. A client that does not read is disconnected.
fn send(running: &mut Running, event: Event) {
    if let Err(TrySendError::Full(_)) = running.job.events.try_send(event) {
        running.job.deadline = Instant::now();
    }
}

/// Takes a token of a text and returns whether the text continues.
fn take(active: &mut [Text], running: &mut [Running], id: usize, token: u32) -> bool {
    let Some(text) = active.iter_mut().find(|text| text.id == id) else { return false };
    let Some(running) = running.iter_mut().find(|running| running.id == text.job) else { return false };
    running.usage.completion += 1;
    text.generated.push(token);
    Timeline::add(&mut text.timeline);
    let new = text.stream.push(token);
    if !new.is_empty() {
        send(running, Event::Text(text.index, new));
    }
    !text.stream.stopped()
}

impl Opened {
    fn open(settings: &Settings) -> Result<Self> {
        // Files that are replaced from here on are found later.
        let identity = Identity::of(&settings.path).ok();
        let path = &settings.path;
        // Verifies the checksum.
        let file = if is_run(path) { newest_model_file(path)? } else { None };
        let (source, tokenizer) = open_path(file.as_ref().unwrap_or(path), settings)?;
        let ends = end_tokens(&tokenizer, &source)?;
        let sampling = default_sampling(&source)?;
        Ok(Self { identity, source, tokenizer, ends, sampling })
    }

    fn load(self, settings: &Settings) -> Result<Model> {
        let Self { identity, source, tokenizer, ends, sampling } = self;
        let (vocab, has_template, file) = (source.descriptor().vocab, has_template(&source), source.path().to_owned());
        let capacity = settings.capacity(&source);
        let mut loaded = load(source, &settings.hardware, settings.slots, capacity)
            .with_context(|| format!("cannot load {}", file.display()))?;
        let scheduler = Scheduler::new(&loaded.generator, &mut *loaded.engine, loaded.run_ahead)?;
        Ok(Model { identity, file, loaded, scheduler, tokenizer, ends, sampling, has_template, vocab })
    }
}

impl Model {
    /// Returns the texts of a request, and the number of tokens of the prompts.
    fn prepare(&self, completion: &Completion) -> Result<(Vec<Planned>, usize), ApiError> {
        let mut requests = Vec::new();
        let mut prompt_tokens = 0;
        let random = || getrandom::u32().unwrap_or(1337);
        let mut seed = completion.seed.unwrap_or_else(random);
        for prompt in &completion.prompts {
            let mut tokens = self.tokens(prompt)?;
            // The token that begins the document of a text is not part of the text.
            let mut begins = usize::from(matches!(prompt, Prompt::Text(_)));
            if let Some(truncate) = completion.truncate {
                let kept = match truncate {
                    Truncate::Context => self.loaded.generator.capacity(),
                    Truncate::Tokens(tokens) => tokens,
                };
                let removed = tokens.len().saturating_sub(kept);
                tokens.drain(..removed);
                begins = begins.saturating_sub(removed);
            }
            prompt_tokens += tokens.len();
            let room = self.room(&tokens)?;
            let first = if completion.echo { begins } else { tokens.len() };
            let echo = match (completion.echo, prompt) {
                (false, _) | (_, Prompt::Messages(_) | Prompt::Conversation(_)) => String::new(),
                (true, Prompt::Text(text)) => text.clone(),
                (true, Prompt::Tokens(tokens)) => self.tokenizer.text(tokens),
            };
            for _ in 0..completion.n {
                let request = Request {
                    prompt: tokens.clone(),
                    tokens: completion.tokens.map_or(room, |tokens| tokens.min(room)),
                    seed,
                    sampling: completion.sampling.over(self.sampling),
                    ends: if completion.ignore_end { Vec::new() } else { self.ends.clone() },
                };
                requests.push(Planned {
                    echo: echo.clone(),
                    request,
                    scored: completion.logprobs.map(|top| Scored { first, top }),
                    limited: completion.tokens.is_none_or(|tokens| tokens > room),
                });
                seed = seed.wrapping_add(1);
            }
        }
        Ok((requests, prompt_tokens))
    }

    /// Returns the tokens of a prompt. A text begins a document, and special tokens in it become their ids, as in `sample`.
    fn tokens(&self, prompt: &Prompt) -> Result<Vec<u32>, ApiError> {
        let invalid = |error: anyhow::Error| ApiError::invalid(Some("prompt"), format!("{error:#}"));
        let tokens = match prompt {
            Prompt::Text(text) => {
                let mut tokens = vec![self.tokenizer.document()];
                tokens.extend(self.tokenizer.encode_with_special(text).map_err(invalid)?);
                tokens
            }
            Prompt::Tokens(tokens) => tokens.clone(),
            Prompt::Conversation(text) => self.tokenizer.encode_with_special(text).map_err(invalid)?,
            Prompt::Messages(_) => return Err(ApiError::internal("the conversation has no text".to_owned())),
        };
        match tokens.iter().find(|&&token| token as usize >= self.vocab) {
            Some(token) => {
                let message = format!("prompt: expected tokens below {}, found {token}", self.vocab);
                Err(ApiError::invalid(Some("prompt"), message))
            }
            None => Ok(tokens),
        }
    }

    /// Returns the number of tokens for which the context has room after a prompt.
    fn room(&self, prompt: &[u32]) -> Result<usize, ApiError> {
        let (capacity, found) = (self.loaded.generator.capacity(), prompt.len());
        if found > capacity {
            return Err(ApiError::context(format!(
                "prompt: expected at most {capacity} tokens, the size of the context, found {found}; shorten it"
            )));
        }
        // The last token of a text needs no place in the cache.
        Ok(capacity + 1 - found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_that_would_end_after_those_in_progress_do_not_fit() {
        let fits = |body: &str, limit| fits(&Completion::parse(body.as_bytes(), false).unwrap(), limit);
        assert!(fits(r#"{"max_tokens": 1000, "n": 9}"#, None));
        assert!(fits(r#"{"max_tokens": 20}"#, Some([1, 20])));
        assert!(!fits(r#"{"max_tokens": 21}"#, Some([1, 20])));
        assert!(fits(r#"{"max_tokens": 5, "n": 2}"#, Some([2, 20])));
        assert!(!fits(r#"{"max_tokens": 5, "n": 2, "prompt": ["a", "b"]}"#, Some([3, 20])));
    }
}
