//! Rendezvous of a run that may continue with fewer ranks (`--min-ranks`).
//!
//! Any rank may be lost, so that no process has a fixed part. The processes that wait for the run to start or to restart are
//! applicants. One of them leads: the one that locks the rendezvous file, or that listens at the address of `tcp://`. The others
//! connect to it. When all have come, or after the timeout, it selects the ranks of the run, numbers them, and tells each of them where
//! the new rank 0 listens. They then connect to it as in a run with a fixed number of ranks.
//!
//! ```text
//! applicant → leader   Hello with the address at which the applicant listens, and the proofs of the secret
//! leader → applicant   Waiting, each second; later Assigned, Refused or Rejected
//! ```
//!
//! Rank 0 takes the lock of the run ([`RunLock`]) before it accepts the other ranks. While it is held, applicants wait. The leader
//! gives up its part when the run has the lock. So a late process finds either a leader that gathers applicants or a run in progress.

mod members;
mod run_lock;

pub use members::{Members, WorldSizes};
pub use run_lock::{RunFiles, RunLock};

use super::handshake::Handshakes;
use super::secret::Secret;
use super::{
    Attempt, Candidate, Client, Connected, Endpoint, Hello, Host, Listener, PROTOCOL, RETRY_INTERVAL, RendezvousFile,
    Reply, Timeouts, listen_error, open_to_anyone, random_text, receive_json, send_json,
};
use crate::fault::Fault;
use crate::launcher::World;
use anyhow::{Context, Result, bail};
use run_lock::{Status, Watch};
use serde::{Deserialize, Serialize};
use std::io::{self, BufWriter};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use system::fs::{File, create_dir_all};
use system::net::{TcpListener, TcpStream, resolve};
use system::{process, thread, time};
use xxhash_rust::xxh3::xxh3_64;

/// Time between two messages of the leader to each applicant.
const SIGN_OF_LIFE: Duration = Duration::from_secs(1);

/// A leader without any message for this long is lost.
const SILENCE: Duration = Duration::from_secs(10);

/// Time that a message may take to arrive completely.
const MESSAGE_TIMEOUT: Duration = Duration::from_secs(5);

/// Time between two looks at the other processes while a run is in progress.
const IDLE_INTERVAL: Duration = Duration::from_millis(100);

/// Maximum time that a process waits for its part.
const FOREVER: Duration = Duration::from_hours(24 * 365);

/// The settings of an elastic run besides those of the rendezvous.
pub struct Elastic<'a> {
    /// The directory of the run, which all ranks share. Its path is the same for all of them.
    pub directory: &'a Path,
    /// The possible world sizes.
    pub sizes: WorldSizes,
    /// The files of the run.
    pub files: &'a dyn RunFiles,
}

/// The part of this process in a run.
pub struct Joined {
    /// The connections to the other ranks, or `None` if there are none.
    pub connected: Option<Connected>,
    /// The ranks of the run.
    pub members: Members,
    /// The lock of the run, on rank 0. It must be kept until the run has ended.
    pub lock: Option<RunLock>,
}

/// The data that an applicant sends to the leader besides its rank and host.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Applicant {
    sizes: WorldSizes,
    /// The address at which this process listens if it becomes rank 0.
    port: u16,
    addresses: Vec<String>,
}

/// The part of an applicant in the run.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Assignment {
    rank: usize,
    members: Members,
    /// The address at which rank 0 listens.
    rank_0: RendezvousFile,
}

/// How the wait for a part has ended.
enum Outcome {
    /// This process has a part. The secret is that of the rendezvous.
    Assigned(Box<Assignment>, Option<Secret>),
    /// The run has completed all steps without this process.
    Finished,
    /// There is no leader, for this reason.
    NoLeader(String),
}

/// The place at which applicants find the leader.
enum Place {
    Address(String),
    /// The path of the rendezvous file, without extension.
    File(PathBuf),
}

/// The leader's right to lead, until dropped.
struct Seat {
    listener: Listener,
    /// Identifies this rendezvous.
    run: String,
    secret: Option<Secret>,
    /// The locked file next to the rendezvous file.
    _lock: Option<File>,
}

/// An applicant.
struct Waiting<'a> {
    world: &'a World,
    elastic: &'a Elastic<'a>,
    timeouts: Timeouts,
    secret: Option<Secret>,
    /// The name of the run: the absolute path of its directory.
    name: String,
    place: Place,
    /// Accepts the other ranks if this process becomes rank 0.
    listener: Listener,
}

/// Waits until this process is part of the run. Returns `None` if the run completes all its steps without this process.
pub fn connect(
    world: &World,
    endpoint: Option<&Endpoint>,
    secret: Option<Secret>,
    timeouts: Timeouts,
    elastic: &Elastic<'_>,
) -> Result<Option<Joined>> {
    elastic.sizes.check(world.world_size).map_err(Fault::Startup)?;
    create_dir_all(elastic.directory).map_err(|error| {
        Fault::Startup(format!(
            "{}: expected a directory that all ranks share, found an error when it was created: {error}; choose another --out",
            elastic.directory.display()
        ))
    })?;
    let name = std::path::absolute(elastic.directory).unwrap_or_else(|_| elastic.directory.to_owned());
    let name = name.display().to_string();
    let waiting = Waiting {
        world,
        elastic,
        timeouts,
        secret,
        place: Place::new(endpoint, elastic.directory, &name),
        name,
        listener: Listener::bind("0.0.0.0:0")?,
    };
    let mut watch = Watch::new(elastic.directory, elastic.files, world.rank, timeouts.rendezvous);
    let mut alone_since = None;
    loop {
        let status = watch.status()?;
        if status == Status::Finished {
            process::print_error(&format!(
                "note: rank {}: the run in {} has completed all its steps; there is nothing left to do",
                world.rank,
                elastic.directory.display()
            ));
            return Ok(None);
        }
        let seat = waiting.place.lead(&waiting.name, world.rank, waiting.secret.as_ref())?;
        // The seat is kept until this process has joined: then the run has its lock.
        let outcome = match &seat {
            Some(seat) => waiting.lead(seat, &mut watch)?,
            None => waiting.apply(&mut watch, &mut alone_since)?,
        };
        match outcome {
            Outcome::Assigned(assignment, secret) => return waiting.join(*assignment, secret).map(Some),
            Outcome::Finished => {}
            Outcome::NoLeader(_) if status == Status::Running => alone_since = None,
            Outcome::NoLeader(found) => {
                let waited = time::now() - *alone_since.get_or_insert(time::now());
                if waited > timeouts.rendezvous {
                    bail!(waiting.no_leader(&found, waited));
                }
            }
        }
        thread::sleep(RETRY_INTERVAL);
    }
}

impl Place {
    /// Without an endpoint, the processes meet in the directory of the run.
    fn new(endpoint: Option<&Endpoint>, directory: &Path, name: &str) -> Self {
        match endpoint {
            Some(Endpoint::Tcp(address)) => Self::Address(address.clone()),
            // Several runs may use one directory.
            Some(Endpoint::File(shared)) => {
                Self::File(shared.join(format!("rendezvous-{:016x}", xxh3_64(name.as_bytes()))))
            }
            None => Self::File(directory.join("rendezvous")),
        }
    }

    /// Tries to become the leader for the run `name`. Returns `None` if another process leads, or only processes of another host
    /// can.
    fn lead(&self, name: &str, rank: usize, known: Option<&Secret>) -> Result<Option<Seat>> {
        let path = match self {
            Self::File(path) => path,
            Self::Address(address) => {
                let listener = match TcpListener::bind(address) {
                    Ok(socket) => Listener { socket, note: None },
                    // Rank 0 may be on the host of the address, which knows itself by another one.
                    Err(error) if error.kind() == io::ErrorKind::AddrNotAvailable && rank == 0 => {
                        match Listener::bind(address) {
                            Ok(listener) => listener,
                            Err(_) => return Ok(None),
                        }
                    }
                    Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                        bail!(listen_error(address, &error))
                    }
                    Err(_) => return Ok(None),
                };
                if known.is_none() && !listener.is_local() {
                    process::print_error(&open_to_anyone(address));
                }
                return Ok(Some(Seat { listener, run: name.to_owned(), secret: known.cloned(), _lock: None }));
            }
        };
        let Some(lock) = run_lock::try_lock(&path.with_extension("lock"))? else { return Ok(None) };
        let listener = Listener::bind("0.0.0.0:0")?;
        let run = random_text()?;
        let created = if known.is_none() { Some(Secret::random()?) } else { None };
        let contents = RendezvousFile::new(run.clone(), listener.socket.local_addr()?.port(), created.clone());
        let write = |file: &mut BufWriter<File>| Ok(serde_json::to_writer(file, &contents)?);
        match atomic_file::write_private(&path.with_extension("json"), write) {
            Ok(()) => {}
            // A run that begins in this directory removes all temporary files. The next attempt finds it in progress.
            Err(error) if is_not_found(&error) => return Ok(None),
            Err(error) => return Err(error.context("--rendezvous")),
        }
        Ok(Some(Seat { listener, run, secret: known.cloned().or(created), _lock: Some(lock) }))
    }

    /// Returns where the leader may listen.
    fn candidates(&self, name: &str, known: Option<&Secret>) -> Result<Vec<Candidate>> {
        match self {
            Self::Address(address) => {
                Ok(vec![Candidate { address: address.clone(), run: name.to_owned(), secret: known.cloned() }])
            }
            Self::File(path) => {
                let found = RendezvousFile::read(&path.with_extension("json"))?;
                Ok(found.map_or(Vec::new(), |found| found.candidates(known)))
            }
        }
    }
}

impl Waiting<'_> {
    /// Leads the rendezvous until this process has a part.
    fn lead(&self, seat: &Seat, watch: &mut Watch<'_>) -> Result<Outcome> {
        seat.listener.socket.set_nonblocking(true)?;
        let mut handshakes = Handshakes::new(seat.secret.clone(), seat.run.clone());
        let mut applicants: Vec<Client> = Vec::new();
        let mut last_sign = time::now();
        loop {
            let status = watch.status()?;
            let sign = Reply::Waiting { running: status == Status::Running, finished: status == Status::Finished };
            if status == Status::Finished {
                for client in &applicants {
                    let _ = send_json(&client.stream, &sign);
                }
                return Ok(Outcome::Finished);
            }
            let accepted = seat.listener.socket.accept();
            let quiet = accepted.is_err();
            if let Ok(stream) = accepted {
                handshakes.begin(stream);
            }
            while let Some(client) = handshakes.next() {
                match self.problem_with(&applicants, &client) {
                    Some(text) => drop(send_json(&client.stream, &Reply::Rejected { text })),
                    None if send_json(&client.stream, &sign).is_ok() => applicants.push(client),
                    None => {}
                }
            }
            applicants.retain(|client| !client.is_disconnected());
            if time::now() - last_sign >= SIGN_OF_LIFE {
                last_sign = time::now();
                applicants.retain(|client| send_json(&client.stream, &sign).is_ok());
            }
            if let Status::Free(since) = status {
                let complete = applicants.len() + 1 == self.world.world_size;
                if complete || time::now() - since >= self.timeouts.rendezvous {
                    if let Some(assignment) = self.assign(seat, &mut applicants)? {
                        return Ok(Outcome::Assigned(Box::new(assignment), seat.secret.clone()));
                    }
                    // This process is spare. The run starts without it.
                    watch.restart();
                }
            }
            if quiet {
                thread::sleep(if status == Status::Running { IDLE_INTERVAL } else { RETRY_INTERVAL / 5 });
            }
        }
    }

    /// Returns why an applicant cannot be part of the run.
    fn problem_with(&self, applicants: &[Client], client: &Client) -> Option<String> {
        let Hello { protocol, rank, world_size, applicant, .. } = &client.hello;
        let (name, here) = (client.name(), self.world.rank);
        let Some(applicant) = applicant.as_ref().filter(|_| protocol == PROTOCOL) else {
            return Some(format!(
                "{name}: expected the same version of the program and --min-ranks as on rank {here}, found another program or no \
                 --min-ranks; start all ranks with the same program and flags"
            ));
        };
        if (*world_size, applicant.sizes) != (self.world.world_size, self.elastic.sizes) {
            let WorldSizes { min_ranks, micro_batches } = applicant.sizes;
            return Some(format!(
                "{name}: expected world size {}, --min-ranks {} and {} micro-batches in a step as on rank {here}, found {world_size}, \
                 {min_ranks} and {micro_batches}; start all ranks with the same flags",
                self.world.world_size, self.elastic.sizes.min_ranks, self.elastic.sizes.micro_batches
            ));
        }
        let other = applicants.iter().find(|other| other.hello.rank == *rank).map(Client::name);
        let other = other.or_else(|| (*rank == here).then(|| format!("process {}", system::process::id())));
        if let Some(other) = other {
            return Some(format!(
                "rank {rank}: expected one process, found two, {other} and {name}; give each process its own rank"
            ));
        }
        (rank >= world_size).then(|| {
            format!("{name}: expected a rank below {world_size}, found {rank}; give each process its own rank")
        })
    }

    /// Selects the ranks and tells the applicants. Spare ones remain in `applicants`. Returns the part of this process, or `None` if
    /// it is spare.
    fn assign(&self, seat: &Seat, applicants: &mut Vec<Client>) -> Result<Option<Assignment>> {
        let here = self.world.rank;
        let mut present: Vec<usize> = applicants.iter().map(|client| client.hello.rank).chain([here]).collect();
        present.sort_unstable();
        let selected = self.elastic.sizes.select(self.world.world_size, &present, self.timeouts.rendezvous);
        let members = match selected {
            Ok(members) => members,
            Err(text) => {
                for client in &*applicants {
                    let _ = send_json(&client.stream, &Reply::Refused { text: text.clone(), recoverable: false });
                }
                bail!(Fault::Startup(text));
            }
        };
        let first = members.ranks.first().copied().unwrap_or(here);
        let leading = applicants.iter().find(|client| client.hello.rank == first);
        let (host, address) = match leading {
            Some(client) => (client.hello.host.clone(), client.hello.applicant.clone()),
            None => (Host::here(), Some(self.applicant()?)),
        };
        let Applicant { port, addresses, .. } = address.context("an applicant without an address")?;
        let secret = if seat.secret.is_none() { Some(Secret::random()?) } else { None };
        let rank_0 = || RendezvousFile {
            run: seat.run.clone() + " run",
            host: host.clone(),
            port,
            addresses: addresses.clone(),
            secret: secret.clone(),
        };
        let part = |launched: usize| {
            let rank = members.ranks.iter().position(|&rank| rank == launched)?;
            Some(Assignment { rank, members: members.clone(), rank_0: rank_0() })
        };
        applicants.retain(|client| match part(client.hello.rank) {
            // A rank that does not receive its part is missed at the next meeting, of all ranks with rank 0.
            Some(assignment) => {
                let _ = send_json(&client.stream, &Reply::Assigned(Box::new(assignment)));
                false
            }
            None => true,
        });
        Ok(part(here))
    }

    fn applicant(&self) -> Result<Applicant> {
        let port = self.listener.socket.local_addr()?.port();
        let RendezvousFile { addresses, .. } = RendezvousFile::new(String::new(), port, None);
        Ok(Applicant { sizes: self.elastic.sizes, port, addresses })
    }

    /// Applies to the leader and waits for a part. `alone_since` is cleared when a leader answers.
    fn apply(&self, watch: &mut Watch<'_>, alone_since: &mut Option<Instant>) -> Result<Outcome> {
        let timeouts = Timeouts { rendezvous: FOREVER, ..self.timeouts };
        let attempt = Attempt {
            world: self.world,
            timeouts,
            deadline: time::now() + FOREVER,
            secret: self.secret.clone(),
            may_restart: true,
        };
        let applicant = self.applicant()?;
        let mut found = "no address was found there".to_owned();
        for Candidate { address, run, secret } in self.place.candidates(&self.name, self.secret.as_ref())? {
            let sockets: Vec<SocketAddr> = match resolve(&address) {
                Ok(sockets) => sockets,
                Err(error) => {
                    found = format!("{address}: {error}");
                    continue;
                }
            };
            for socket in sockets {
                match attempt.introduce(socket, run.clone(), secret.as_ref(), Some(applicant.clone())) {
                    Ok((stream, Ok(Reply::Waiting { running, finished }))) => {
                        *alone_since = None;
                        watch.heard(running, finished)?;
                        return wait(&stream, watch, secret);
                    }
                    Ok((_, Ok(Reply::Rejected { text }))) => bail!(Fault::Startup(text)),
                    Ok((_, Ok(_))) => found = format!("the server at {address} sent an invalid reply"),
                    Ok((_, Err(_))) => found = format!("the server at {address} does not reply"),
                    Err(error) => found = error.describe(&address),
                }
            }
        }
        Ok(Outcome::NoLeader(found))
    }

    /// Connects to the other ranks of the run.
    fn join(&self, assignment: Assignment, secret: Option<Secret>) -> Result<Joined> {
        let Assignment { rank, members, rank_0 } = assignment;
        let (host, run) = (rank_0.host.name.clone(), rank_0.run.clone());
        let local_rank = self.world.local_rank;
        let world = World { rank, world_size: members.ranks.len(), local_rank, local_world_size: None, job: None };
        let attempt = Attempt {
            world: &world,
            timeouts: self.timeouts,
            deadline: time::now() + self.timeouts.rendezvous,
            secret: None,
            may_restart: true,
        };
        let secret = secret.or_else(|| rank_0.secret.clone());
        if rank > 0 {
            let candidates = || Ok(rank_0.clone().candidates(secret.as_ref()));
            let connected = attempt.connect_to_rank_0(&format!("rank 0 on {host}"), false, candidates)?;
            return Ok(Joined { connected: Some(connected), members, lock: None });
        }
        let lock = RunLock::acquire(self.elastic.directory, &members)?;
        let connected =
            if world.world_size > 1 { Some(attempt.accept_all(&self.listener, secret.as_ref(), &run)?) } else { None };
        Ok(Joined { connected, members, lock: Some(lock) })
    }

    fn no_leader(&self, found: &str, waited: Duration) -> Fault {
        let (place, fix) = match &self.place {
            Place::Address(address) => (
                format!("tcp://{address}"),
                "only ranks on that host can lead the rendezvous: if that host has failed, start all ranks with --rendezvous \
                 file:///DIR",
            ),
            Place::File(path) => (
                path.with_extension("json").display().to_string(),
                "check that the other ranks are reachable, and end the process that has locked the file if that process is stopped",
            ),
        };
        Fault::Startup(format!(
            "rank {}: expected another rank at {place} within {:.0} s, found none ({found}); {fix}",
            self.world.rank,
            waited.as_secs_f64()
        ))
    }
}

/// Returns whether a file was missing.
fn is_not_found(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::NotFound)
}

/// Waits for the decision of the leader.
fn wait(stream: &TcpStream, watch: &mut Watch<'_>, secret: Option<Secret>) -> Result<Outcome> {
    let lost = || Ok(Outcome::NoLeader("the process that led the rendezvous has ended".to_owned()));
    let mut last_message = time::now();
    loop {
        match has_message(stream) {
            Ok(true) => {
                last_message = time::now();
                stream.set_read_timeout(Some(MESSAGE_TIMEOUT))?;
                match receive_json(stream) {
                    Ok(Reply::Waiting { running, finished }) => {
                        if watch.heard(running, finished)? == Status::Finished {
                            return Ok(Outcome::Finished);
                        }
                    }
                    Ok(Reply::Assigned(assignment)) => return Ok(Outcome::Assigned(assignment, secret)),
                    Ok(Reply::Refused { text, recoverable }) => bail!(Fault::ReportedByRank0 { text, recoverable }),
                    _ => return lost(),
                }
            }
            Ok(false) if time::now() - last_message < SILENCE => thread::sleep(RETRY_INTERVAL),
            _ => return lost(),
        }
    }
}

/// Returns whether a message has begun to arrive. Fails if the connection was closed.
fn has_message(stream: &TcpStream) -> io::Result<bool> {
    stream.set_nonblocking(true)?;
    let peeked = stream.peek(&mut [0]);
    stream.set_nonblocking(false)?;
    match peeked {
        Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
        Ok(_) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests;
