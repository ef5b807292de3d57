//! `serve`: a web page with the curves of a run and a chat, and completions in OpenAI's format.

mod error;
mod follow;
mod http;
mod identity;
mod latency;
mod logprobs;
mod openai;
mod queue;
mod stall;
mod worker;

use super::generation::context;
use super::resources::Hardware;
use crate::chat_template::ChatTemplate;
use crate::gpu_info::GpuInfo;
use crate::terminal;
use crate::values::count;
use anyhow::{Context, Result, bail, ensure};
use checkpoint::config;
use engine::open::{self, Device};
use follow::Follow;
use http::Server;
use queue::Queue;
use rustix::system::uname;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::io::{Write, stderr, stdout};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};
use tokio::net::TcpListener;
use tokio::runtime;
use tokio::sync::{Notify, Semaphore, watch};
use tokio::time::sleep;
use worker::{Settings, Status, Worker};

/// Minimum length of a token in bytes.
const MIN_TOKEN: usize = 16;
/// Threads that handle connections. The model has a thread of its own.
const THREADS: usize = 2;
/// Threads that wait for chat templates.
const RENDERERS: usize = 2;
/// Maximum time that a stopping server waits for the step in progress, or for a model that is being loaded.
const LAST_STEP: Duration = Duration::from_secs(3);
/// Time for sending responses after the server has stopped accepting connections and generating texts.
const LAST_RESPONSES: Duration = Duration::from_millis(200);
/// Default of --slots. A step computes all slots, so a CPU has few.
const GPU_SLOTS: usize = 16;
const CPU_SLOTS: usize = 4;

/// Show a run in the browser, and answer completions with its newest checkpoint
///
/// The page shows the curves while the run continues, and a chat with the newest checkpoint. /v1/completions and /v1/chat/completions
/// follow OpenAI's API. The server does not change the run. It loads the model when the first request arrives.
#[derive(Clone, Debug, clap::Args)]
pub struct Serve {
    /// Directory of a run, model file (.bin or .safetensors) or Hugging Face directory
    #[arg(value_name = "RUN|MODEL", default_value = ".")]
    path: PathBuf,

    /// Add low-rank adapters to the model: a directory of PEFT, or a run with --lora-rank
    #[arg(long, value_name = "DIR")]
    lora: Option<PathBuf>,

    /// Port; 0: any free port
    #[arg(long, value_name = "N", default_value = "8080")]
    port: u16,

    /// Address to listen on. Any address other than a loopback address requires a token
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    host: IpAddr,

    /// File whose first line is the token that clients must send [default: none on a loopback address, otherwise a random one]
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,

    /// Number of texts to generate at the same time [default: 16 on a GPU, 4 on the CPU]
    #[arg(long, value_name = "N", value_parser = count)]
    slots: Option<usize>,

    /// Maximum number of waiting requests. Further requests are refused
    #[arg(long, value_name = "N", default_value = "64", value_parser = count)]
    queue: usize,

    /// Maximum duration of a request in seconds, including its time in the queue
    #[arg(long, value_name = "SECONDS", default_value = "300", value_parser = count)]
    timeout: usize,

    /// Maximum number of tokens in a prompt and its completion [default: 8192, or the longest sequence of the model]
    #[arg(long, value_name = "N", value_parser = count)]
    context: Option<usize>,

    /// Tokenizer: gpt2, bytes, or a tokenizer.json or tokenizer.model [default: the tokenizer next to the model, or the built-in one with
    /// the model's vocabulary size]
    #[arg(long, value_name = "NAME|FILE")]
    tokenizer: Option<String>,

    #[command(flatten)]
    hardware: Hardware,
}

/// Serves until SIGINT or SIGTERM.
pub fn run(args: &Serve) -> Result<()> {
    let run = is_run(&args.path).then(|| args.path.clone());
    let token = args.token()?;
    let queue = Arc::new(Queue::new(args.queue));
    let name = name(&args.path);
    let on_gpu = args.hardware.device != Device::Cpu && cuda_driver::device_count().is_ok_and(|count| count > 0);
    let settings = Settings {
        path: args.path.clone(),
        lora: args.lora.clone(),
        tokenizer: args.tokenizer.clone(),
        context: args.context,
        slots: args.slots.unwrap_or(if on_gpu { GPU_SLOTS } else { CPU_SLOTS }),
        hardware: args.hardware.clone(),
    };
    let opened = worker::open(&settings);
    let status = Arc::new(Mutex::new(Status::new(&settings, &opened)));
    match opened {
        Ok((source, _)) => context(&source, args.context).1.map_or(Ok(()), |note| terminal::note(&note))?,
        // The error of a wrong path should not wait for the first request. A run may have no checkpoint yet.
        Err(error) if run.is_none() => return Err(error),
        Err(_) => {}
    }
    let directory = if args.path.is_dir() { args.path.clone() } else { atomic_file::parent(&args.path).to_owned() };
    warn_of_template(&directory)?;
    // Those of the server, and one each for the run, the model and signals. The server panics if one of its threads cannot start.
    system::thread::check(THREADS + RENDERERS + 3)?;
    let mut builder = runtime::Builder::new_multi_thread();
    let runtime = builder.worker_threads(THREADS).max_blocking_threads(RENDERERS).enable_all().build();
    let runtime = runtime.context("cannot start the threads of the server")?;
    let address = SocketAddr::new(args.host, args.port);
    let listener = runtime.block_on(TcpListener::bind(address));
    let listener = listener.with_context(|| format!("cannot listen on {address}; choose another --port or --host"))?;
    announce(&listener, token.as_deref())?;

    let ((run_events, run_state), (status_events, status_state)) =
        (watch::channel("".into()), watch::channel("".into()));
    let gpu = if on_gpu { GpuInfo::open(open::GPU).ok() } else { None };
    let follow = Follow {
        run,
        name: name.clone(),
        status: Arc::clone(&status),
        queue: Arc::clone(&queue),
        events: [run_events, status_events],
        gpu,
    };
    spawn("run", move || follow.run())?;
    let jobs = Arc::clone(&queue);
    let server = Arc::new(Server {
        queue: Arc::clone(&queue),
        status: Arc::clone(&status),
        directory,
        model: name,
        token,
        timeout: Duration::from_secs(args.timeout as u64),
        events: [run_state, status_state],
        pages: Arc::new(Semaphore::new(http::MAX_PAGES)),
        responses: AtomicU64::new(0),
    });
    // The engine stays on the thread that opens it.
    let model = spawn("model", move || Worker::new(settings, jobs, status).run())?;
    let stop = Arc::new(Notify::new());
    notify_on_signals(Arc::clone(&stop))?;
    runtime.block_on(http::serve(listener, server, async { stop.notified().await }));
    queue.close();
    let closed = Instant::now();
    while !model.is_finished() && closed.elapsed() < LAST_STEP {
        thread::sleep(Duration::from_millis(10));
    }
    // The connections have this time to send the errors of requests that are not complete.
    runtime.block_on(async { sleep(LAST_RESPONSES).await });
    runtime.shutdown_background();
    writeln!(stdout(), "stopped")?;
    if !model.is_finished() {
        // The destructors of a process must not run while the engine computes.
        stdout().flush()?;
        signal_hook::low_level::exit(0);
    }
    Ok(())
}

impl Serve {
    /// Returns the token of the server: that of `--token-file`, or a random one on an address that others can reach.
    fn token(&self) -> Result<Option<String>> {
        if let Some(path) = &self.token_file {
            let shown = path.display();
            let text = bounded_file::read_to_string(path, bounded_file::SETTINGS)
                .with_context(|| format!("--token-file: cannot read {shown}"))?;
            let token = text.lines().next().unwrap_or_default().trim();
            let valid = token.len() >= MIN_TOKEN && token.bytes().all(|byte| byte.is_ascii_graphic());
            ensure!(
                valid,
                "--token-file {shown}: expected at least {MIN_TOKEN} visible ASCII characters on the first line, found {}",
                token.chars().count()
            );
            return Ok(Some(token.to_owned()));
        }
        if self.host.is_loopback() {
            return Ok(None);
        }
        let mut bytes = [0_u8; 16];
        if let Err(error) = getrandom::fill(&mut bytes) {
            bail!("cannot choose a token: {error}; give one with --token-file");
        }
        Ok(Some(format!("{:032x}", u128::from_be_bytes(bytes))))
    }
}

/// Prints a warning if the chat template in a directory is not valid.
fn warn_of_template(directory: &Path) -> Result<()> {
    let template = ChatTemplate::in_directory(directory);
    if let Err(error) = template.and_then(|template| Ok(template.as_ref().map_or(Ok(()), ChatTemplate::check)?)) {
        writeln!(stderr(), "warning: {error:#}; the server answers chats with this error until the template is valid")?;
    }
    Ok(())
}

/// Prints where the server listens. If it listens on all addresses, prints this machine's address and name.
fn announce(listener: &TcpListener, token: Option<&str>) -> Result<()> {
    let mut address = listener.local_addr()?;
    let is_every = address.ip().is_unspecified();
    if is_every {
        let loopback: [IpAddr; 2] = [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()];
        address.set_ip(loopback[usize::from(address.is_ipv6())]);
    }
    let mut out = stdout();
    let fragment = token.map_or(String::new(), |token| format!("#token={token}"));
    writeln!(out, "page:        http://{address}/{fragment}")?;
    writeln!(out, "completions: http://{address}/v1")?;
    if is_every {
        let (name, port) = (uname().nodename().to_string_lossy().into_owned(), address.port());
        writeln!(out, "elsewhere:   http://{name}:{port}/{fragment}")?;
    }
    if let Some(token) = token {
        writeln!(out, "token:       {token}")?;
    }
    Ok(out.flush()?)
}

/// Returns whether a path is the directory of a run rather than that of a model.
fn is_run(path: &Path) -> bool {
    [config::FILE, "main.jsonl", "main.log"].iter().any(|name| path.join(name).is_file())
}

/// Returns the name of the model: the last part of its path.
fn name(path: &Path) -> String {
    let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    absolute.file_name().map_or_else(|| "model".to_owned(), |name| name.to_string_lossy().into_owned())
}

fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> Result<thread::JoinHandle<()>> {
    thread::Builder::new().name(name.into()).spawn(body).with_context(|| format!("cannot start the thread `{name}`"))
}

/// Notifies on the first signal. A second one ends the process.
fn notify_on_signals(stop: Arc<Notify>) -> Result<()> {
    let mut signals = Signals::new([SIGINT, SIGTERM]).context("cannot listen for signals")?;
    let listen = move || {
        let mut received = signals.forever();
        if received.next().is_some() {
            stop.notify_one();
        }
        if let Some(signal) = received.next() {
            signal_hook::low_level::exit(128 + signal);
        }
    };
    spawn("signals", listen).map(drop)
}
