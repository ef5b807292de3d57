//! How the processes of a run meet: all others connect to rank 0.
//!
//! Where rank 0 is, they know from `--rendezvous tcp://host:port`, or from a file that rank 0 writes into the directory of
//! `--rendezvous file:///shared/dir`, or, on one host, by a port that follows from the launcher's name of the job. Each says
//! who it is; rank 0 lets them in once all have come, or refuses all with the reason. A process of another run is not let in,
//! and a file of an earlier run leads to nobody: run and file have a name that is compared.

use super::fault::Fault;
use super::launcher::World;
use super::star::{Link, Star};
use crate::atomic;
use crate::engine::Result;
use anyhow::{Context, bail};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::fs;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream, ToSocketAddrs, UdpSocket};
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
const PORTS: std::ops::Range<u16> = 10_000..32_000;

/// How long between two tries to find rank 0.
const PAUSE: Duration = Duration::from_millis(50);

/// How long somebody who has connected may take to say who he is.
const INTRODUCTION: Duration = Duration::from_secs(3);

/// How much longer than rank 0 the others wait, so that they hear its reason.
const MARGIN: Duration = Duration::from_secs(5);

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
            wait_for_all(world, &bind(address)?, &job, timeout, deadline, patience)
        }
        Some(Place::Tcp(address)) => {
            let look = || Ok(vec![(address.clone(), job.clone())]);
            join(world, &format!("tcp://{address}"), look, timeout, deadline, patience)
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
            let port = PORTS.start + (xxh3_64(run.as_bytes()) % u64::from(PORTS.end - PORTS.start)) as u16;
            let address = format!("127.0.0.1:{port}");
            if world.rank == 0 {
                wait_for_all(world, &bind(&address)?, &run, timeout, deadline, patience)
            } else {
                let look = || Ok(vec![(address.clone(), run.clone())]);
                join(world, &address, look, timeout, deadline, patience)
            }
        }
    }
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
        return join(world, &path.display().to_string(), look, timeout, deadline, patience);
    }
    let listener = bind("0.0.0.0:0")?;
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    let run = format!("{job} {} {}", std::process::id(), now.as_nanos());
    let notice = Notice::new(run.clone(), listener.local_addr()?.port());
    atomic::write(&path, |file| Ok(serde_json::to_writer(file, &notice)?)).context("--rendezvous")?;
    let met = wait_for_all(world, &listener, &run, timeout, deadline, patience);
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

fn bind(address: &str) -> Result<TcpListener> {
    let cannot = || {
        format!(
            "rank 0 cannot listen at {address}: expected a free port and an address of this host; another --rendezvous tcp://HOST:PORT may be"
        )
    };
    let any = || address.rsplit_once(':').map(|(_, port)| format!("0.0.0.0:{port}")).unwrap_or_default();
    let listener = TcpListener::bind(address).or_else(|error| match error.kind() {
        // The name is another one's for this host, as behind a translated address.
        io::ErrorKind::AddrNotAvailable => TcpListener::bind(any()),
        _ => Err(error),
    });
    listener.map_err(|error| anyhow::Error::from(Fault::Start(format!("{}: {error}", cannot()))))
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
    listener: &TcpListener,
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
            break Some(Fault::Start(never_came(world.ranks, &guests, timeout)));
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

fn never_came(ranks: usize, guests: &[Guest], timeout: Duration) -> String {
    let here = |rank: &usize| *rank == 0 || guests.iter().any(|guest| guest.hello.rank == *rank);
    let list = |of: Vec<usize>| of.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    let (came, missing): (Vec<_>, Vec<_>) = (0..ranks).partition(here);
    format!(
        "rank{} {} of {ranks} never came: after {:.0} s only {} here (rank{} {}); look for what {} said, check that all are \
         started and reach rank 0, or allow more time with --rendezvous-timeout",
        if missing.len() == 1 { "" } else { "s" },
        list(missing.clone()),
        timeout.as_secs_f64(),
        if came.len() == 1 { "1 is".to_owned() } else { format!("{} are", came.len()) },
        if came.len() == 1 { "" } else { "s" },
        list(came),
        if missing.len() == 1 { "it" } else { "they" },
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

/// The others: find rank 0 where `look` says, introduce themselves, and wait to be let in.
fn join(
    world: &World,
    place: &str,
    look: impl Fn() -> Result<Vec<(String, String)>>,
    timeout: Duration,
    deadline: Instant,
    patience: Duration,
) -> Result<Met> {
    let (mut last, mut other_run) = ("nothing to be found there".to_owned(), false);
    loop {
        for (address, run) in look()? {
            match ask(world, &address, run, timeout) {
                Ok((stream, Answer::Welcome { local_rank })) => {
                    let links = vec![Link { who: "rank 0".to_owned(), stream }];
                    let star = Star::new(world.rank, world.ranks, links, patience)?.watch()?;
                    return Ok(Met { star, local_rank: world.local_rank.unwrap_or(local_rank) });
                }
                Ok((_, Answer::Refused { text, lost })) => bail!(Fault::Told { text, lost }),
                Ok((_, Answer::OtherRun)) => (last, other_run) = (format!("{address} is rank 0 of another run"), true),
                Ok((_, Answer::Wait)) => last = format!("{address} answers twice in the same way"),
                // That somebody else is there says more.
                Err(_) if other_run => {}
                Err(error) => last = format!("{address}: {error}"),
            }
        }
        if Instant::now() >= deadline {
            bail!(Fault::Start(format!(
                "rank {} of {} did not find rank 0 at {place} within {:.0} s ({last}): check that it is started and can be \
                 reached; ranks on several hosts need --rendezvous",
                world.rank,
                world.ranks,
                timeout.as_secs_f64()
            )));
        }
        sleep(PAUSE);
    }
}

fn ask(world: &World, address: &str, run: String, timeout: Duration) -> io::Result<(TcpStream, Answer)> {
    let mut last = io::Error::other("no such host");
    for address in address.to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, INTRODUCTION) {
            // A system may connect a port with itself where nobody listens.
            Ok(stream) if is_itself(&stream) => {}
            Ok(stream) => {
                let hello = Hello {
                    greeting: GREETING.to_owned(),
                    run,
                    rank: world.rank,
                    ranks: world.ranks,
                    host: Host::here(),
                    process: std::process::id(),
                };
                say(&stream, &hello)?;
                stream.set_read_timeout(Some(2 * INTRODUCTION))?;
                let mut answer = hear(&stream)?;
                if matches!(answer, Answer::Wait) {
                    stream.set_read_timeout(Some(timeout + MARGIN))?;
                    answer = hear(&stream)?;
                }
                return Ok((stream, answer));
            }
            Err(error) => last = error,
        }
    }
    Err(last)
}

fn is_itself(stream: &TcpStream) -> bool {
    matches!((stream.local_addr(), stream.peer_addr()), (Ok(here), Ok(there)) if here == there)
}

/// u32 bytes, then JSON.
fn say(mut stream: &TcpStream, what: &impl Serialize) -> io::Result<()> {
    let text = serde_json::to_vec(what)?;
    stream.write_all(&(text.len() as u32).to_le_bytes())?;
    stream.write_all(&text)
}

fn hear<T: DeserializeOwned>(mut stream: &TcpStream) -> io::Result<T> {
    let mut len = [0; 4];
    stream.read_exact(&mut len)?;
    let len = u32::from_le_bytes(len) as usize;
    if len > MOST_BYTES {
        return Err(io::Error::other("it does not speak this program's language"));
    }
    let mut text = vec![0; len];
    stream.read_exact(&mut text)?;
    Ok(serde_json::from_slice(&text)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    const TIMEOUT: Duration = Duration::from_secs(20);
    const SHORT: Duration = Duration::from_millis(400);

    fn world(rank: usize, ranks: usize, job: &str) -> World {
        World { rank, ranks, local_rank: None, local_ranks: None, job: Some(job.to_owned()) }
    }

    /// What becomes of processes that are threads here: local rank and a sum over all, or what is said.
    fn met(worlds: Vec<World>, place: Option<&Place>, timeout: Duration) -> Vec<Result<(usize, f64), String>> {
        let meet = move |world: World| {
            let mut met = meet(&world, place, timeout, TIMEOUT).map_err(|error| format!("{error:#}"))?;
            let mut sum = [1.0 + world.rank as f64];
            met.star.sum(&mut sum).map_err(|error| error.to_string())?;
            met.star.end();
            Ok((met.local_rank, sum[0]))
        };
        thread::scope(|scope| {
            let threads: Vec<_> = worlds.into_iter().map(|world| scope.spawn(move || meet(world))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    /// A port that is free just now.
    fn tcp() -> Place {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        Place::Tcp(format!("127.0.0.1:{port}"))
    }

    #[test]
    fn places_are_parsed_or_refused_with_what_was_expected() {
        assert_eq!("tcp://node1:29400".parse(), Ok(Place::Tcp("node1:29400".to_owned())));
        assert_eq!("tcp://[::1]:5".parse(), Ok(Place::Tcp("[::1]:5".to_owned())));
        assert_eq!("file:///shared/a".parse(), Ok(Place::File("/shared/a".into())));
        for wrong in ["tcp://node1", "tcp://:1", "tcp://a:0", "tcp://a:66000", "file://here", "node:1", ""] {
            assert!(wrong.parse::<Place>().unwrap_err().contains("expected tcp://HOST:PORT"), "{wrong}");
        }
    }

    #[test]
    fn ranks_meet_in_every_place() {
        let dir = tempfile::tempdir().unwrap();
        let file = Place::File(dir.path().to_owned());
        for (i, place) in [Some(tcp()), Some(file), None].iter().enumerate() {
            // Not in the order of their ranks.
            let worlds = [2, 0, 3, 1].map(|rank| world(rank, 4, &format!("test {} {i}", std::process::id()))).to_vec();
            let met = met(worlds, place.as_ref(), TIMEOUT);
            assert_eq!(met, [2, 0, 3, 1].map(|local_rank| Ok((local_rank, 10.0))), "{place:?}");
        }
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "the notice is gone");
    }

    #[test]
    fn what_the_launcher_says_of_local_ranks_counts() {
        let worlds = vec![world(0, 2, "local"), World { local_rank: Some(5), ..world(1, 2, "local") }];
        assert_eq!(met(worlds, Some(&tcp()), TIMEOUT), [Ok((0, 3.0)), Ok((5, 3.0))]);
    }

    #[test]
    fn ranks_that_never_come_are_named_on_all() {
        let all = met(vec![world(0, 5, "few"), world(1, 5, "few"), world(3, 5, "few")], Some(&tcp()), SHORT);
        let text = "ranks 2, 4 of 5 never came: after 0 s only 3 are here (ranks 0, 1, 3); look for what they said, check that \
                    all are started and reach rank 0, or allow more time with --rendezvous-timeout";
        assert_eq!(all, [Err(text.to_owned()), Err(text.to_owned()), Err(text.to_owned())]);
        let alone = met(vec![world(0, 2, "few")], Some(&tcp()), SHORT).remove(0).unwrap_err();
        assert!(
            alone.starts_with("rank 1 of 2 never came: after 0 s only 1 is here (rank 0); look for what it said"),
            "{alone}"
        );
    }

    /// What ranks 0 and 2 of 4 hear when rank 1 greets so, and ends while rank 3 is waited for.
    fn after_a_guest(greeting: &str) -> Vec<Result<(usize, f64), String>> {
        let place = tcp();
        let Place::Tcp(address) = &place else { unreachable!() };
        thread::scope(|scope| {
            let waiting = scope.spawn(|| met(vec![world(0, 4, "ends"), world(2, 4, "ends")], Some(&place), TIMEOUT));
            thread::sleep(SHORT);
            let stream = TcpStream::connect(address).unwrap();
            let host = Host { name: "node7".to_owned(), boot: String::new() };
            let (greeting, run) = (greeting.to_owned(), "ends".to_owned());
            say(&stream, &Hello { greeting, run, rank: 1, ranks: 4, host, process: 5 }).unwrap();
            assert!(matches!(hear(&stream).unwrap(), Answer::Wait));
            drop(stream);
            waiting.join().unwrap()
        })
    }

    #[test]
    fn a_rank_that_ends_while_others_are_waited_for_is_named_on_all() {
        let text = "rank 1 (node7, process 5) has ended, or the connection to it; the ranks were meeting";
        assert_eq!(after_a_guest(GREETING), [Err(text.to_owned()), Err(text.to_owned())]);
    }

    #[test]
    fn a_rank_of_another_version_is_named_on_all() {
        let text =
            "rank 1 (node7, process 5) runs another version of the program than rank 0: install one on all hosts";
        assert_eq!(after_a_guest("llm.rs ranks 1"), [Err(text.to_owned()), Err(text.to_owned())]);
    }

    #[test]
    fn rank_0_that_never_comes_is_told_by_each() {
        for (place, why) in [(tcp(), "Connection refused"), (Place::File("/tmp".into()), "nothing to be found there")] {
            let text = met(vec![world(1, 2, "no rank 0")], Some(&place), SHORT).remove(0).unwrap_err();
            assert!(text.starts_with("rank 1 of 2 did not find rank 0 at ") && text.contains(why), "{text}");
        }
    }

    #[test]
    fn two_processes_of_one_rank_and_other_world_sizes_are_refused() {
        let all = met(vec![world(0, 3, "twice"), world(1, 3, "twice"), world(1, 3, "twice")], Some(&tcp()), TIMEOUT);
        let text = all[0].clone().unwrap_err();
        assert!(
            text.starts_with("two processes say that they are rank 1: rank 1 (") && all == vec![Err(text); 3],
            "{all:?}"
        );
        let all = met(vec![world(0, 2, "size"), world(1, 3, "size")], Some(&tcp()), TIMEOUT);
        let text = all[0].clone().unwrap_err();
        assert!(text.contains("says there are 3 ranks, rank 0 says 2") && all[1] == Err(text), "{all:?}");
    }

    #[test]
    fn runs_do_not_mix() {
        let place = tcp();
        let all = met(vec![world(0, 2, "mine"), world(1, 2, "yours")], Some(&place), SHORT);
        assert!(all[0].as_ref().unwrap_err().starts_with("rank 1 of 2 never came"), "{all:?}");
        assert!(all[1].as_ref().unwrap_err().contains("is rank 0 of another run"), "{all:?}");
        // Two runs in one directory.
        let dir = tempfile::tempdir().unwrap();
        let file = Place::File(dir.path().to_owned());
        let worlds = [(0, "a"), (0, "b"), (1, "b"), (1, "a")].map(|(rank, job)| world(rank, 2, job)).to_vec();
        assert!(met(worlds, Some(&file), TIMEOUT).iter().all(Result::is_ok));
    }

    #[test]
    fn a_notice_of_an_earlier_run_leads_to_nobody() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(format!("rendezvous-{:016x}.json", xxh3_64(b"again")));
        // Its port has another owner by now, who is of another run, or says nothing.
        let other = TcpListener::bind("127.0.0.1:0").unwrap();
        let stale = Notice::new("again 1 2".to_owned(), other.local_addr().unwrap().port());
        fs::write(&path, serde_json::to_vec(&stale).unwrap()).unwrap();
        let place = Place::File(dir.path().to_owned());
        let met = thread::scope(|scope| {
            scope.spawn(|| {
                let (stream, _) = other.accept().unwrap();
                let hello: Hello = hear(&stream).unwrap();
                assert_eq!(hello.run, "again 1 2");
                say(&stream, &Answer::OtherRun).unwrap();
            });
            let late = scope.spawn(|| met(vec![world(1, 2, "again")], Some(&place), TIMEOUT).remove(0));
            thread::sleep(SHORT);
            let first = met(vec![world(0, 2, "again")], Some(&place), TIMEOUT).remove(0);
            (first, late.join().unwrap())
        });
        assert_eq!(met, (Ok((0, 3.0)), Ok((1, 3.0))));
    }

    #[test]
    fn strangers_at_the_port_are_ignored() {
        let place = tcp();
        let Place::Tcp(address) = &place else { unreachable!() };
        let met = thread::scope(|scope| {
            let zero = scope.spawn(|| met(vec![world(0, 2, "strangers")], Some(&place), TIMEOUT).remove(0));
            let knock = || {
                (0..200)
                    .find_map(|_| {
                        thread::sleep(PAUSE / 10);
                        TcpStream::connect(address).ok()
                    })
                    .unwrap()
            };
            knock().write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
            drop(knock());
            let one = met(vec![world(1, 2, "strangers")], Some(&place), TIMEOUT).remove(0);
            (zero.join().unwrap(), one)
        });
        assert_eq!(met, (Ok((0, 3.0)), Ok((1, 3.0))));
    }

    #[test]
    fn a_port_in_use_and_several_hosts_without_a_place_are_named() {
        let used = TcpListener::bind("127.0.0.1:0").unwrap();
        let place = Place::Tcp(used.local_addr().unwrap().to_string());
        let text = met(vec![world(0, 2, "port")], Some(&place), TIMEOUT).remove(0).unwrap_err();
        assert!(text.starts_with(&format!("rank 0 cannot listen at {}", used.local_addr().unwrap())), "{text}");
        assert!(text.contains("in use"), "{text}");
        let hosts = World { local_ranks: Some(1), ..world(0, 2, "hosts") };
        let text = met(vec![hosts], None, TIMEOUT).remove(0).unwrap_err();
        assert!(text.starts_with("the 2 ranks are on several hosts: give --rendezvous tcp://HOST:PORT"), "{text}");
    }
}
