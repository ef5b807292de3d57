//! How the processes of a run meet: all others connect to rank 0.
//!
//! Where rank 0 is, they know from `--rendezvous tcp://host:port`, or from a file that rank 0 writes into the directory of
//! `--rendezvous file:///shared/dir`, or, on one host, by a few ports that follow from the launcher's name of the job. Each says
//! who it is; rank 0 lets them in once all have come, or refuses all with the reason. A process of another run is not let in,
//! and a file of an earlier run leads to nobody: run and file have a name that is compared.

mod join;

use super::fault::Fault;
use super::launcher::World;
use super::star::{Link, Star};
use anyhow::{Context, bail};
use engine::Result;
use join::join;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::fs;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream, UdpSocket};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::thread::sleep;
use std::time::{Duration, Instant};
use xxhash_rust::xxh3::xxh3_64;

/// `--rendezvous`
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// `host:port` of rank 0.
    Tcp(String),
    /// A directory that all ranks see.
    File(PathBuf),
}

impl FromStr for Place {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let expected =
            || "expected tcp://HOST:PORT of rank 0, or file:///DIR of a directory that all ranks see".to_owned();
        if let Some(address) = text.strip_prefix("tcp://") {
            let port =
                address.rsplit_once(':').filter(|(host, _)| !host.is_empty()).map(|(_, port)| port.parse::<u16>());
            return if matches!(port, Some(Ok(1..))) { Ok(Self::Tcp(address.to_owned())) } else { Err(expected()) };
        }
        let path = text.strip_prefix("file://").map(PathBuf::from).filter(|path| path.is_absolute());
        path.map(Self::File).ok_or_else(expected)
    }
}

/// Ports for runs of one host: below those that systems give to connections.
const PORTS: Range<u16> = 10_000..32_000;

/// Of these a run has so many: rank 0 takes the first that is free, the others look at all.
const PORTS_OF_RUN: u16 = 4;

/// How long between two tries to find rank 0.
const PAUSE: Duration = Duration::from_millis(50);

/// How long somebody who has connected may take to say who he is.
const INTRODUCTION: Duration = Duration::from_secs(3);

/// A process of another program does not know this; its end is the version of what is said.
const GREETING: &str = "llm.rs ranks 3";
const ANY_VERSION: &str = "llm.rs ranks ";

/// Of an introduction or an answer.
const MOST_BYTES: usize = 64 << 10;

/// What a process says of itself.
#[derive(Debug, Serialize, Deserialize)]
struct Hello {
    greeting: String,
    run: String,
    rank: usize,
    ranks: usize,
    host: Host,
    process: u32,
}

#[derive(Debug, Serialize, Deserialize)]
enum Answer {
    /// To be followed by another, once all have come.
    Wait,
    /// Which rank of its host it is.
    Welcome { local_rank: usize },
    /// The run ends, and whether another try may help.
    Refused { text: String, lost: bool },
    /// Try elsewhere: this is another run.
    OtherRun,
}

/// Where a process is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Host {
    name: String,
    /// Of the kernel since it started: tells hosts of one name apart.
    boot: String,
}

impl Host {
    fn here() -> Self {
        let read = |path: &str| fs::read_to_string(path).map(|text| text.trim().to_owned()).unwrap_or_default();
        Self { name: read("/proc/sys/kernel/hostname"), boot: read("/proc/sys/kernel/random/boot_id") }
    }
}

/// What rank 0 leaves in a directory.
#[derive(Debug, Serialize, Deserialize)]
struct Notice {
    run: String,
    host: Host,
    port: u16,
    /// Where it may be reached from other hosts.
    addresses: Vec<String>,
}

/// All ranks, met.
pub struct Met {
    pub star: Star,
    pub local_rank: usize,
}

/// Meets the other ranks within `timeout`. Later, a rank from which nothing comes for as long as `patience` is given up.
pub fn meet(world: &World, place: Option<&Place>, timeout: Duration, patience: Duration) -> Result<Met> {
    let deadline = Instant::now() + timeout;
    let parent = std::os::unix::process::parent_id();
    let job = world.job.clone().unwrap_or_default();
    match place {
        Some(Place::Tcp(address)) if world.rank == 0 => {
            wait_for_all(world, &Ear::at(address)?, &job, timeout, deadline, patience)
        }
        Some(Place::Tcp(address)) => {
            let look = || Ok(vec![(address.clone(), job.clone())]);
            join(world, &format!("tcp://{address}"), true, look, timeout, deadline, patience)
        }
        Some(Place::File(directory)) => in_directory(world, directory, &job, timeout, deadline, patience),
        None => {
            if !world.may_be_one_host() {
                bail!(Fault::Start(format!(
                    "the {} ranks are on several hosts: give --rendezvous tcp://HOST:PORT of rank 0, or file:///DIR",
                    world.ranks
                )));
            }
            // Without a name of the job, what started all ranks of it.
            let run = world.job.clone().unwrap_or_else(|| format!("children of {parent}"));
            let ports = ports_of(&run);
            let addresses = || ports.clone().map(|port| format!("127.0.0.1:{port}"));
            if world.rank == 0 {
                let free = addresses().find_map(|address| Ear::at(&address).ok());
                let ear = free.map_or_else(|| Ear::at(&format!("127.0.0.1:{}", ports.start)), Ok)?;
                wait_for_all(world, &ear, &run, timeout, deadline, patience)
            } else {
                let look = || Ok(addresses().map(|address| (address, run.clone())).collect());
                let place = format!("127.0.0.1, ports {} to {}", ports.start, ports.end - 1);
                join(world, &place, true, look, timeout, deadline, patience)
            }
        }
    }
}

/// Where the ranks of a run on one host meet.
fn ports_of(run: &str) -> Range<u16> {
    let first = PORTS.start + (xxh3_64(run.as_bytes()) % u64::from(PORTS.end - PORTS.start - PORTS_OF_RUN + 1)) as u16;
    first..first + PORTS_OF_RUN
}

fn in_directory(
    world: &World,
    directory: &Path,
    job: &str,
    timeout: Duration,
    deadline: Instant,
    patience: Duration,
) -> Result<Met> {
    // Runs of different names do not meet even in one directory.
    let path = directory.join(format!("rendezvous-{:016x}.json", xxh3_64(job.as_bytes())));
    if world.rank > 0 {
        let look = || Ok(Notice::read(&path)?.map_or(Vec::new(), Notice::leads));
        return join(world, &path.display().to_string(), false, look, timeout, deadline, patience);
    }
    let ear = Ear::at("0.0.0.0:0")?;
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    let run = format!("{job} {} {}", std::process::id(), now.as_nanos());
    let notice = Notice::new(run.clone(), ear.listener.local_addr()?.port());
    atomic_file::write(&path, |file| Ok(serde_json::to_writer(file, &notice)?)).context("--rendezvous")?;
    let met = wait_for_all(world, &ear, &run, timeout, deadline, patience);
    // Nobody needs it any more; what cannot be removed leads to nobody.
    let _ = fs::remove_file(&path);
    met
}

impl Notice {
    fn new(run: String, port: u16) -> Self {
        let host = Host::here();
        let mut addresses = vec![host.name.clone()];
        // No packet is sent: the system says which of its addresses leads outside.
        let outside = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).and_then(|socket| {
            socket.connect((Ipv4Addr::new(192, 0, 2, 1), 9))?;
            socket.local_addr()
        });
        addresses.extend(outside.ok().map(|address| address.ip().to_string()));
        Self { run, host, port, addresses }
    }

    /// The notice, if there is one that is whole.
    fn read(path: &Path) -> Result<Option<Self>> {
        match fs::read(path) {
            Ok(text) => Ok(serde_json::from_slice(&text).ok()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error).with_context(|| format!("--rendezvous: cannot read {}", path.display())),
        }
    }

    /// Where to try, and the run to ask for.
    fn leads(self) -> Vec<(String, String)> {
        let Self { run, host, port, addresses } = self;
        let near = (host.boot == Host::here().boot).then(|| "127.0.0.1".to_owned());
        near.into_iter().chain(addresses).map(|address| (format!("{address}:{port}"), run.clone())).collect()
    }
}

/// Where rank 0 listens.
struct Ear {
    listener: TcpListener,
    /// If it is not what was asked for.
    note: Option<String>,
}

impl Ear {
    fn at(address: &str) -> Result<Self> {
        let (host, port) = address.rsplit_once(':').unwrap_or((address, ""));
        match TcpListener::bind(address) {
            Ok(listener) => Ok(Self { listener, note: None }),
            // The name may be another one's for this host, as behind a translated address.
            Err(error) if error.kind() == io::ErrorKind::AddrNotAvailable => {
                let any = format!("0.0.0.0:{port}");
                let listener = TcpListener::bind(&any).map_err(|error| cannot_listen(&any, &error))?;
                Ok(Self { listener, note: Some(format!("{host} is no address of its host, {}", Host::here().name)) })
            }
            Err(error) => bail!(cannot_listen(address, &error)),
        }
    }
}

fn cannot_listen(address: &str, error: &io::Error) -> Fault {
    let mend = match error.kind() {
        io::ErrorKind::AddrInUse => {
            "another process listens there, which `ss -ltnp` may name: end it, or give all ranks another port, \
             --rendezvous tcp://HOST:PORT"
        }
        io::ErrorKind::PermissionDenied => {
            "ports below 1024 are not for every user: give all ranks another, --rendezvous tcp://HOST:PORT"
        }
        _ => "expected an address or a name of rank 0's host: give all ranks another, --rendezvous tcp://HOST:PORT",
    };
    Fault::Start(format!("rank 0 cannot listen at {address}: {error}; {mend}"))
}

/// Somebody who has said who he is.
struct Guest {
    hello: Hello,
    stream: TcpStream,
}

impl Guest {
    fn who(&self) -> String {
        let Hello { rank, host, process, .. } = &self.hello;
        format!("rank {rank} ({}, process {process})", host.name)
    }

    /// Whether the process has ended, or the connection to it. Nothing is to come from it now.
    fn is_gone(&self) -> bool {
        if self.stream.set_nonblocking(true).is_err() {
            return true;
        }
        let peeked = self.stream.peek(&mut [0]);
        let gone = match peeked {
            Ok(bytes) => bytes == 0,
            Err(error) => error.kind() != io::ErrorKind::WouldBlock,
        };
        self.stream.set_nonblocking(false).is_err() || gone
    }
}

/// Rank 0: waits until all others have come.
fn wait_for_all(
    world: &World,
    Ear { listener, note }: &Ear,
    run: &str,
    timeout: Duration,
    deadline: Instant,
    patience: Duration,
) -> Result<Met> {
    listener.set_nonblocking(true)?;
    let mut guests: Vec<Guest> = Vec::new();
    let refusal = loop {
        // Who has come waits, and says nothing.
        if let Some(guest) = guests.iter().find(|guest| guest.is_gone()) {
            break Some(Fault::Gone { who: guest.who(), during: "the ranks were meeting".to_owned() });
        }
        if guests.len() + 1 == world.ranks {
            break None;
        }
        if Instant::now() >= deadline {
            break Some(Fault::Start(never_came(world.ranks, &guests, timeout, note.as_deref())));
        }
        let stream = match listener.accept() {
            Ok((stream, _)) => stream,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                sleep(PAUSE / 5);
                continue;
            }
            Err(error) => return Err(error).context("cannot accept the other ranks"),
        };
        // Who does not say who he is, is not of this run.
        let Some(guest) = introduced(stream) else { continue };
        if guest.hello.run != run {
            let _ = say(&guest.stream, &Answer::OtherRun);
            continue;
        }
        let trouble = trouble_with(world, &guests, &guest);
        // Who is gone again does not count.
        if say(&guest.stream, &Answer::Wait).is_err() {
            continue;
        }
        guests.push(guest);
        if let Some(text) = trouble {
            break Some(Fault::Start(text));
        }
    };
    if let Some(fault) = refusal {
        for guest in &guests {
            let _ = say(&guest.stream, &Answer::Refused { text: fault.to_string(), lost: fault.is_loss() });
        }
        bail!(fault);
    }
    guests.sort_by_key(|guest| guest.hello.rank);
    let here = Host::here();
    let mut links = Vec::new();
    for (i, guest) in guests.iter().enumerate() {
        let host = &guest.hello.host;
        let before = guests[..i].iter().map(|guest| &guest.hello.host).chain([&here]);
        let local_rank = before.filter(|other| *other == host).count();
        let who = guest.who();
        say(&guest.stream, &Answer::Welcome { local_rank })
            .map_err(|_| Fault::Gone { who: who.clone(), during: "the ranks were meeting".to_owned() })?;
        links.push(Link { who, stream: guest.stream.try_clone()? });
    }
    Ok(Met { star: Star::new(0, world.ranks, links, patience)?.watch()?, local_rank: world.local_rank.unwrap_or(0) })
}

fn introduced(stream: TcpStream) -> Option<Guest> {
    stream.set_nonblocking(false).ok()?;
    stream.set_read_timeout(Some(INTRODUCTION)).ok()?;
    let hello: Hello = hear(&stream).ok()?;
    hello.greeting.starts_with(ANY_VERSION).then_some(Guest { hello, stream })
}

fn never_came(ranks: usize, guests: &[Guest], timeout: Duration, note: Option<&str>) -> String {
    let here = |rank: &usize| *rank == 0 || guests.iter().any(|guest| guest.hello.rank == *rank);
    let list = |of: Vec<usize>| of.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    let (came, missing): (Vec<_>, Vec<_>) = (0..ranks).partition(here);
    format!(
        "rank{} {} of {ranks} never came: after {:.0} s only {} here (rank{} {}); look for what {} said, check that all are \
         started and reach rank 0{}, or allow more time with --rendezvous-timeout",
        if missing.len() == 1 { "" } else { "s" },
        list(missing.clone()),
        timeout.as_secs_f64(),
        if came.len() == 1 { "1 is".to_owned() } else { format!("{} are", came.len()) },
        if came.len() == 1 { "" } else { "s" },
        list(came),
        if missing.len() == 1 { "it" } else { "they" },
        note.map(|note| format!(" ({note})")).unwrap_or_default(),
    )
}

/// Why a process that says it belongs here does not.
fn trouble_with(world: &World, guests: &[Guest], guest: &Guest) -> Option<String> {
    let Hello { rank, ranks, .. } = guest.hello;
    let who = guest.who();
    if guest.hello.greeting != GREETING {
        return Some(format!("{who} runs another version of the program than rank 0: install one on all hosts"));
    }
    if ranks != world.ranks {
        return Some(format!(
            "{who} says there are {ranks} ranks, rank 0 says {}: start all with one world size",
            world.ranks
        ));
    }
    if let Some(other) = guests.iter().find(|other| other.hello.rank == rank) {
        return Some(format!("two processes say that they are rank {rank}: {} and {who}", other.who()));
    }
    (rank == 0 || rank >= ranks).then(|| format!("{who} cannot be one of the {ranks} ranks that join rank 0"))
}

/// u32 bytes, then JSON.
fn say(mut stream: &TcpStream, what: &impl Serialize) -> io::Result<()> {
    let text = serde_json::to_vec(what)?;
    stream.write_all(&(text.len() as u32).to_le_bytes())?;
    stream.write_all(&text)
}

/// Why nothing was heard.
#[derive(Debug)]
enum Heard {
    Failed(io::Error),
    /// Something of another program, which begins so.
    Other(String),
}

fn hear<T: DeserializeOwned>(mut stream: &TcpStream) -> Result<T, Heard> {
    let other = |said: &[u8]| Heard::Other(String::from_utf8_lossy(&said[..said.len().min(40)]).into_owned());
    let mut len = [0; 4];
    stream.read_exact(&mut len).map_err(Heard::Failed)?;
    let bytes = u32::from_le_bytes(len) as usize;
    if bytes > MOST_BYTES {
        return Err(other(&len));
    }
    let mut text = vec![0; bytes];
    stream.read_exact(&mut text).map_err(Heard::Failed)?;
    serde_json::from_slice(&text).map_err(|_| other(&text))
}

#[cfg(test)]
mod tests;
