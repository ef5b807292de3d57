//! Rendezvous: connects the processes of a run. All other ranks connect to rank 0.
//!
//! There are three ways to find rank 0. With `--rendezvous tcp://host:port` the address is given. With
//! `--rendezvous file:///shared/dir` rank 0 writes its address into a file of that directory. On a single host all ranks try
//! a few ports, which are derived from the launcher's name of the job.
//!
//! Each rank sends a `Hello` message. Rank 0 accepts all ranks once all have connected, or refuses all with the reason. The `run`
//! identifier keeps processes of other runs out and makes rendezvous files of earlier runs harmless. With a [`Secret`], rank 0 and the
//! other rank then prove to each other that they know it:
//!
//! ```text
//! rank → rank 0   Hello with a nonce
//! rank 0 → rank   Challenge: nonce, proof of rank 0
//! rank → rank 0   proof of the rank
//! rank 0 → rank   Wait, later Accepted or Refused
//! ```

mod client;
pub mod elastic;
mod handshake;
mod secret;

pub use secret::Secret;

use super::fault::Fault;
use super::launcher::World;
use super::tcp_group::{Connection, TcpGroup};
use anyhow::{Context, bail};
use elastic::{Applicant, Assignment};
use engine::Result;
use handshake::Handshakes;
use secret::{Nonce, Proof, random_text};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::fs;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, UdpSocket};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::{Duration, Instant};
use system::net::{TcpListener, TcpStream};
use system::{process, thread, time};
use xxhash_rust::xxh3::xxh3_64;

/// The value of `--rendezvous`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// `host:port` of rank 0.
    Tcp(String),
    /// A directory that is shared by all ranks.
    File(PathBuf),
}

impl FromStr for Endpoint {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let expected =
            || "expected tcp://HOST:PORT of rank 0, or file:///DIR of a directory that all ranks share".to_owned();
        if let Some(address) = text.strip_prefix("tcp://") {
            let port =
                address.rsplit_once(':').filter(|(host, _)| !host.is_empty()).map(|(_, port)| port.parse::<u16>());
            return if matches!(port, Some(Ok(1..))) { Ok(Self::Tcp(address.to_owned())) } else { Err(expected()) };
        }
        let path = text.strip_prefix("file://").map(PathBuf::from).filter(|path| path.is_absolute());
        path.map(Self::File).ok_or_else(expected)
    }
}

/// Ports for runs on a single host. The range lies below the ephemeral ports of common systems.
const PORTS: Range<u16> = 10_000..32_000;

/// Number of ports of a run on a single host. Rank 0 listens on the first free one, the other ranks try all.
const PORTS_PER_RUN: u16 = 4;

/// Interval between two attempts to connect to rank 0.
const RETRY_INTERVAL: Duration = Duration::from_millis(50);

/// Time that a new connection may take to introduce itself and to prove that it knows the secret.
const HELLO_TIMEOUT: Duration = Duration::from_secs(3);

/// Name and version of the rendezvous protocol.
const PROTOCOL: &str = "llm.rs ranks 6";
const PROTOCOL_PREFIX: &str = "llm.rs ranks ";

/// Largest message of the rendezvous protocol.
const MAX_MESSAGE_BYTES: usize = 64 << 10;

/// The activity that messages name until all ranks are connected.
const ACTIVITY: &str = "the rendezvous";

/// The first message of a rank to rank 0.
#[derive(Debug, Serialize, Deserialize)]
struct Hello {
    protocol: String,
    run: String,
    rank: usize,
    world_size: usize,
    host: Host,
    process: u32,
    /// Earlier versions of the program send none.
    #[serde(default)]
    nonce: Nonce,
    /// The rank has no part in the run yet: see [`elastic`].
    #[serde(default)]
    applicant: Option<Applicant>,
}

/// A message of rank 0 to another rank.
#[derive(Debug, Serialize, Deserialize)]
enum Reply {
    /// Rank 0 knows the secret, and the rank must prove that it knows it too.
    Challenge { nonce: Nonce, proof: Proof },
    /// The rank must wait for another reply until all ranks have connected.
    Wait,
    /// The rank is part of the run. Its index on its host is `local_rank`.
    Accepted { local_rank: usize },
    /// The run ends.
    Refused { text: String, recoverable: bool },
    /// Rank 0 belongs to another run.
    OtherRun,
    /// The applicant must wait, while a run is in progress or until enough ranks have come.
    Waiting { running: bool, finished: bool },
    /// The applicant has a part in the run.
    Assigned(Box<Assignment>),
    /// The applicant cannot be part of the run.
    Rejected { text: String },
}

/// The host of a process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Host {
    name: String,
    /// The boot id of the kernel, which distinguishes hosts of the same name.
    boot: String,
}

impl Host {
    fn here() -> Self {
        let read = |path: &str| fs::read_to_string(path).map(|text| text.trim().to_owned()).unwrap_or_default();
        Self { name: read("/proc/sys/kernel/hostname"), boot: read("/proc/sys/kernel/random/boot_id") }
    }
}

/// The contents of a rendezvous file, written by rank 0.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct RendezvousFile {
    run: String,
    host: Host,
    port: u16,
    /// Addresses of rank 0 that may be reachable from other hosts.
    addresses: Vec<String>,
    /// The secret, unless all ranks already know one. Only the owner of the file can read it.
    secret: Option<Secret>,
}

/// Timeouts of the rendezvous and of the resulting group.
#[derive(Clone, Copy, Debug)]
pub struct Timeouts {
    /// Time until all ranks must have connected.
    pub rendezvous: Duration,
    /// Time that a rank may take between collectives later on.
    pub step: Duration,
}

/// The result of a successful rendezvous.
pub struct Connected {
    /// The connections between all ranks.
    pub group: TcpGroup,
    /// Index of this rank among the ranks of its host.
    pub local_rank: usize,
}

/// A rendezvous in progress.
struct Attempt<'a> {
    world: &'a World,
    timeouts: Timeouts,
    deadline: Instant,
    secret: Option<Secret>,
    /// Whether the ranks can meet again, without those that do not come.
    may_restart: bool,
}

/// A place where rank 0 may listen.
struct Candidate {
    address: String,
    /// Identifier of the run.
    run: String,
    /// The secret, if it was found together with the address.
    secret: Option<Secret>,
}

/// Connects this process to all other ranks. Without an endpoint all ranks must be on one host. With a secret, only processes that
/// know it can join.
pub fn connect(
    world: &World,
    endpoint: Option<&Endpoint>,
    secret: Option<Secret>,
    timeouts: Timeouts,
) -> Result<Connected> {
    let attempt = Attempt { world, timeouts, deadline: time::now() + timeouts.rendezvous, secret, may_restart: false };
    let job = world.job.as_deref().unwrap_or_default();
    match endpoint {
        Some(Endpoint::Tcp(address)) if world.rank == 0 => {
            let listener = Listener::bind(address)?;
            if attempt.secret.is_none() && !listener.is_local() {
                process::print_error(&open_to_anyone(address));
            }
            attempt.accept_all(&listener, attempt.secret.as_ref(), job)
        }
        Some(Endpoint::Tcp(address)) => {
            let candidates = || {
                Ok(vec![Candidate { address: address.clone(), run: job.to_owned(), secret: attempt.secret.clone() }])
            };
            attempt.connect_to_rank_0(&format!("tcp://{address}"), true, candidates)
        }
        Some(Endpoint::File(directory)) => attempt.connect_by_file(directory, job),
        None => attempt.connect_on_one_host(),
    }
}

/// Returns the ports of a run on a single host.
fn ports_of_run(run: &str) -> Range<u16> {
    let first = PORTS.start + (xxh3_64(run.as_bytes()) % u64::from(PORTS.end - PORTS.start - PORTS_PER_RUN + 1)) as u16;
    first..first + PORTS_PER_RUN
}

impl Attempt<'_> {
    fn connect_on_one_host(&self) -> Result<Connected> {
        let world = self.world;
        if !world.may_be_one_host() {
            bail!(Fault::Startup(format!(
                "--rendezvous: expected an address, because the {} ranks are on several hosts, found none; give \
                 --rendezvous tcp://HOST:PORT of rank 0, or file:///DIR",
                world.world_size
            )));
        }
        // Without a name of the job, the parent process identifies the run.
        let parent = std::os::unix::process::parent_id();
        let run = world.job.clone().unwrap_or_else(|| format!("children of {parent}"));
        let ports = ports_of_run(&run);
        let addresses = || ports.clone().map(|port| format!("127.0.0.1:{port}"));
        if world.rank == 0 {
            let free = addresses().find_map(|address| Listener::bind(&address).ok());
            let listener = free.map_or_else(|| Listener::bind(&format!("127.0.0.1:{}", ports.start)), Ok)?;
            return self.accept_all(&listener, self.secret.as_ref(), &run);
        }
        let candidate = |address| Candidate { address, run: run.clone(), secret: self.secret.clone() };
        let candidates = || Ok(addresses().map(candidate).collect());
        let place = format!("127.0.0.1, ports {} to {}", ports.start, ports.end - 1);
        self.connect_to_rank_0(&place, true, candidates)
    }

    fn connect_by_file(&self, directory: &Path, job: &str) -> Result<Connected> {
        // Runs with different job names use different files of one directory.
        let path = directory.join(format!("rendezvous-{:016x}.json", xxh3_64(job.as_bytes())));
        if self.world.rank > 0 {
            let candidates = || {
                let found = RendezvousFile::read(&path)?;
                Ok(found.map_or(Vec::new(), |found| found.candidates(self.secret.as_ref())))
            };
            return self.connect_to_rank_0(&path.display().to_string(), false, candidates);
        }
        let listener = Listener::bind("0.0.0.0:0")?;
        let run = format!("{job} {} {}", system::process::id(), system::time::since_epoch().as_nanos());
        let created = if self.secret.is_none() { Some(Secret::random()?) } else { None };
        let contents = RendezvousFile::new(run.clone(), listener.socket.local_addr()?.port(), created.clone());
        atomic_file::write_private(&path, |file| Ok(serde_json::to_writer(file, &contents)?))
            .context("--rendezvous")?;
        let connected = self.accept_all(&listener, self.secret.as_ref().or(created.as_ref()), &run);
        // A file that cannot be removed is harmless: its run identifier belongs to this run.
        let _ = system::fs::remove_file(&path);
        connected
    }

    /// Rank 0: accepts all other ranks once all have connected.
    fn accept_all(&self, listener: &Listener, secret: Option<&Secret>, run: &str) -> Result<Connected> {
        listener.socket.set_nonblocking(true)?;
        let mut clients: Vec<Client> = Vec::new();
        if let Some(fault) = self.collect_clients(listener, secret, run, &mut clients)? {
            for client in &clients {
                let reply = Reply::Refused { text: fault.to_string(), recoverable: fault.is_recoverable() };
                let _ = send_json(&client.stream, &reply);
            }
            bail!(fault);
        }
        clients.sort_by_key(|client| client.hello.rank);
        let here = Host::here();
        let mut connections = Vec::new();
        for (i, client) in clients.iter().enumerate() {
            let host = &client.hello.host;
            let lower_ranks = clients[..i].iter().map(|client| &client.hello.host).chain([&here]);
            let local_rank = lower_ranks.filter(|other| *other == host).count();
            let peer = client.name();
            send_json(&client.stream, &Reply::Accepted { local_rank })
                .map_err(|_| Fault::Disconnected { peer: peer.clone(), activity: ACTIVITY.to_owned() })?;
            connections.push(Connection { peer, stream: client.stream.try_clone()? });
        }
        self.group(connections, 0)
    }

    /// Waits for all other ranks. Returns the fault if the run cannot start.
    fn collect_clients(
        &self,
        listener: &Listener,
        secret: Option<&Secret>,
        run: &str,
        clients: &mut Vec<Client>,
    ) -> Result<Option<Fault>> {
        let mut handshakes = Handshakes::new(secret.cloned(), run.to_owned());
        loop {
            if let Some(client) = clients.iter().find(|client| client.is_disconnected()) {
                return Ok(Some(Fault::Disconnected { peer: client.name(), activity: ACTIVITY.to_owned() }));
            }
            if clients.len() + 1 == self.world.world_size {
                return Ok(None);
            }
            if time::now() >= self.deadline {
                return Ok(Some(self.absent(self.missing_ranks(clients, listener.note.as_deref()))));
            }
            match listener.socket.accept() {
                Ok(stream) => handshakes.begin(stream),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => thread::sleep(RETRY_INTERVAL / 5),
                // The connection was reset before it was accepted.
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(error) => return Err(error).context("cannot accept connections of the other ranks"),
            }
            // A connection without a valid Hello, or without a proof, comes from an unknown program and is ignored.
            let Some(client) = handshakes.next() else { continue };
            let problem = self.problem_with(clients, &client);
            // A client that has already disconnected may connect again, so it is ignored.
            if send_json(&client.stream, &Reply::Wait).is_err() {
                continue;
            }
            clients.push(client);
            if let Some(text) = problem {
                return Ok(Some(Fault::Startup(text)));
            }
        }
    }

    /// Returns the fault if ranks do not come.
    fn absent(&self, text: String) -> Fault {
        if self.may_restart { Fault::Absent(text) } else { Fault::Startup(text) }
    }

    fn missing_ranks(&self, clients: &[Client], note: Option<&str>) -> String {
        let world_size = self.world.world_size;
        let connected = |rank: &usize| *rank == 0 || clients.iter().any(|client| client.hello.rank == *rank);
        let list = |ranks: Vec<usize>| {
            let plural = if ranks.len() == 1 { "" } else { "s" };
            format!("rank{plural} {}", ranks.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "))
        };
        let (connected, missing): (Vec<_>, Vec<_>) = (0..world_size).partition(connected);
        format!(
            "rendezvous: expected {world_size} ranks within {:.0} s, found {} ({}), missing {}; see the output of the missing \
             ranks, check that they can reach rank 0{}, or increase --rendezvous-timeout",
            self.timeouts.rendezvous.as_secs_f64(),
            connected.len(),
            list(connected),
            list(missing),
            note.map(|note| format!(" ({note})")).unwrap_or_default(),
        )
    }

    /// Returns why a client cannot be part of this run.
    fn problem_with(&self, clients: &[Client], client: &Client) -> Option<String> {
        let Hello { rank, world_size, .. } = client.hello;
        let name = client.name();
        if client.hello.protocol != PROTOCOL {
            return Some(format!(
                "{name}: expected the same version of the program as on rank 0, found another; install one version on all \
                 hosts"
            ));
        }
        if world_size != self.world.world_size {
            return Some(format!(
                "{name}: expected world size {} as on rank 0, found {world_size}; start all ranks with the same world size",
                self.world.world_size
            ));
        }
        if let Some(other) = clients.iter().find(|other| other.hello.rank == rank) {
            return Some(format!(
                "rank {rank}: expected one process, found two, {} and {name}; give each process its own rank",
                other.name()
            ));
        }
        (rank == 0 || rank >= world_size).then(|| {
            format!(
                "{name}: expected a rank from 1 to {}, found {rank}; give each process its own rank",
                world_size - 1
            )
        })
    }

    /// Creates the group from the connections of all ranks. The launcher's local rank overrides `local_rank`.
    fn group(&self, connections: Vec<Connection>, local_rank: usize) -> Result<Connected> {
        let World { rank, world_size, .. } = *self.world;
        let group = TcpGroup::new(rank, world_size, connections, self.timeouts.step)?.start_watchdog()?;
        Ok(Connected { group, local_rank: self.world.local_rank.unwrap_or(local_rank) })
    }
}

impl RendezvousFile {
    fn new(run: String, port: u16, secret: Option<Secret>) -> Self {
        let host = Host::here();
        let mut addresses = vec![host.name.clone()];
        // Connecting a UDP socket sends no packet, but it selects the local address that routes to other hosts.
        let outside = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).and_then(|socket| {
            socket.connect((Ipv4Addr::new(192, 0, 2, 1), 9))?;
            socket.local_addr()
        });
        addresses.extend(outside.ok().map(|address| address.ip().to_string()));
        // The network that connects the hosts may be another one.
        for interface in if_addrs::get_if_addrs().unwrap_or_default() {
            let (address, usable) = (interface.ip().to_string(), interface.ip().is_ipv4() && !interface.is_loopback());
            if usable && !addresses.contains(&address) {
                addresses.push(address);
            }
        }
        Self { run, host, port, addresses, secret }
    }

    /// Returns the contents of the file, or `None` if it does not exist or is incomplete.
    fn read(path: &Path) -> Result<Option<Self>> {
        match bounded_file::read(path, MAX_MESSAGE_BYTES as u64) {
            Ok(text) => Ok(serde_json::from_slice(&text).ok()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error).with_context(|| format!("--rendezvous: cannot read {}", path.display())),
        }
    }

    /// Returns the addresses to try. A secret that all ranks know replaces that of the file.
    fn candidates(self, known: Option<&Secret>) -> Vec<Candidate> {
        let Self { run, host, port, addresses, secret } = self;
        let secret = known.cloned().or(secret);
        let loopback = (host.boot == Host::here().boot).then(|| "127.0.0.1".to_owned());
        let candidate =
            |address| Candidate { address: format!("{address}:{port}"), run: run.clone(), secret: secret.clone() };
        loopback.into_iter().chain(addresses).map(candidate).collect()
    }
}

/// The listening socket of rank 0.
struct Listener {
    socket: TcpListener,
    /// A hint for error messages if the socket is bound to another address than requested.
    note: Option<String>,
}

impl Listener {
    fn bind(address: &str) -> Result<Self> {
        let (host, port) = address.rsplit_once(':').unwrap_or((address, ""));
        match TcpListener::bind(address) {
            Ok(socket) => Ok(Self { socket, note: None }),
            // The host may be known by another address elsewhere, for example behind NAT.
            Err(error) if error.kind() == io::ErrorKind::AddrNotAvailable => {
                let any = format!("0.0.0.0:{port}");
                let socket = TcpListener::bind(&any).map_err(|error| listen_error(&any, &error))?;
                Ok(Self { socket, note: Some(format!("{host} is not an address of its host, {}", Host::here().name)) })
            }
            Err(error) => bail!(listen_error(address, &error)),
        }
    }
}

impl Listener {
    /// Returns whether only processes of this host can connect.
    fn is_local(&self) -> bool {
        self.socket.local_addr().is_ok_and(|address| address.ip().is_loopback())
    }
}

fn open_to_anyone(address: &str) -> String {
    format!(
        "warning: rendezvous: anyone who can reach {address} can join this run, because it has no secret; set {} to the same \
         random text on all ranks, or give --rendezvous-secret FILE",
        secret::VARIABLE
    )
}

fn listen_error(address: &str, error: &io::Error) -> Fault {
    let fix = match error.kind() {
        io::ErrorKind::AddrInUse => {
            "find the process that uses the port with `ss -ltnp` and stop it, or give all ranks another port with \
             --rendezvous tcp://HOST:PORT"
        }
        io::ErrorKind::PermissionDenied => "give all ranks a port of at least 1024 with --rendezvous tcp://HOST:PORT",
        _ => "give all ranks an address or a name of rank 0's host with --rendezvous tcp://HOST:PORT",
    };
    Fault::Startup(format!("rank 0: cannot listen on {address}: {error}; {fix}"))
}

/// A rank that has sent its [`Hello`] to rank 0.
struct Client {
    hello: Hello,
    stream: TcpStream,
}

impl Client {
    fn name(&self) -> String {
        let Hello { rank, host, process, .. } = &self.hello;
        format!("rank {rank} ({}, process {process})", host.name)
    }

    /// Returns whether the connection was closed. A waiting client sends nothing.
    fn is_disconnected(&self) -> bool {
        if self.stream.set_nonblocking(true).is_err() {
            return true;
        }
        let disconnected = match self.stream.peek(&mut [0]) {
            Ok(bytes) => bytes == 0,
            Err(error) => error.kind() != io::ErrorKind::WouldBlock,
        };
        self.stream.set_nonblocking(false).is_err() || disconnected
    }
}

/// Sends a message: u32 length, little endian, then JSON.
fn send_json(stream: impl Write, message: &impl Serialize) -> io::Result<()> {
    send_text(stream, &serde_json::to_vec(message)?)
}

fn send_text(mut stream: impl Write, text: &[u8]) -> io::Result<()> {
    stream.write_all(&(text.len() as u32).to_le_bytes())?;
    stream.write_all(text)
}

/// Why no message was received.
#[derive(Debug)]
enum ReceiveError {
    Io(io::Error),
    /// The data is from another program. Contains its beginning.
    Unknown(String),
}

fn receive_json<T: DeserializeOwned>(stream: impl Read) -> Result<T, ReceiveError> {
    let text = receive_text(stream)?;
    serde_json::from_slice(&text).map_err(|_| unknown(&text))
}

fn unknown(data: &[u8]) -> ReceiveError {
    ReceiveError::Unknown(String::from_utf8_lossy(&data[..data.len().min(40)]).into_owned())
}

fn receive_text(mut stream: impl Read) -> Result<Vec<u8>, ReceiveError> {
    let mut len = [0; 4];
    stream.read_exact(&mut len).map_err(ReceiveError::Io)?;
    let bytes = u32::from_le_bytes(len) as usize;
    if bytes > MAX_MESSAGE_BYTES {
        return Err(unknown(&len));
    }
    let mut text = vec![0; bytes];
    stream.read_exact(&mut text).map_err(ReceiveError::Io)?;
    Ok(text)
}

#[cfg(test)]
mod tests;
