//! The ranks that are not rank 0: how they find it, and what they say of whom they find in its place.

use super::{Answer, GREETING, Heard, Hello, Host, INTRODUCTION, Met, PAUSE, hear, say};
use crate::fault::Fault;
use crate::launcher::World;
use crate::star::{Link, Star};
use anyhow::{Result, bail};
use std::io;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// How much longer than rank 0 the others wait, so that they hear its reason.
const MARGIN: Duration = Duration::from_secs(5);

/// How long somebody else must have answered in the place of rank 0 to be taken for what stays there. A run that has ended just
/// now has gone by then.
pub const STRANGERS: Duration = Duration::from_secs(5);

/// The others: find rank 0 where `look` says, introduce themselves, and wait to be let in. `fixed` if rank 0 can be nowhere else.
pub fn join(
    world: &World,
    place: &str,
    fixed: bool,
    look: impl Fn() -> Result<Vec<(String, String)>>,
    timeout: Duration,
    deadline: Instant,
    patience: Duration,
) -> Result<Met> {
    let began = Instant::now();
    let mut nobody = "nothing to be found there".to_owned();
    // That somebody else is there says more, and who.
    let (mut silent, mut stranger) = (None, None);
    let mut strangers_since = None;
    loop {
        let (mut heard_stranger, mut may_come) = (false, !fixed);
        for (address, run) in look()? {
            let sockets: Vec<_> = match address.to_socket_addrs() {
                Ok(sockets) => sockets.collect(),
                Err(error) => {
                    (nobody, may_come) = (format!("{address}: {error}"), true);
                    continue;
                }
            };
            for socket in sockets {
                let mut is_stranger = |text| (heard_stranger, stranger) = (true, Some(text));
                match ask(world, socket, run.clone(), timeout, deadline) {
                    Ok((stream, Answer::Welcome { local_rank })) => {
                        let links = vec![Link { who: "rank 0".to_owned(), stream }];
                        let star = Star::new(world.rank, world.ranks, links, patience)?.watch()?;
                        return Ok(Met { star, local_rank: world.local_rank.unwrap_or(local_rank) });
                    }
                    Ok((_, Answer::Refused { text, lost })) => bail!(Fault::Told { text, lost }),
                    Ok((_, Answer::OtherRun)) => is_stranger(format!("{address} is rank 0 of another run")),
                    Ok((_, Answer::Wait)) => silent = Some(format!("{address} answers twice in the same way")),
                    Err(Unanswered::Nobody(error)) => (nobody, may_come) = (format!("{address}: {error}"), true),
                    Err(Unanswered::Silence(what)) => silent = Some(format!("whoever listens at {address} {what}")),
                    Err(Unanswered::Stranger(said)) => {
                        is_stranger(format!("another program listens at {address}, which says {said:?}"));
                    }
                }
            }
        }
        let now = Instant::now();
        if may_come {
            strangers_since = None;
        } else if heard_stranger {
            strangers_since.get_or_insert(now);
        }
        if now >= deadline || strangers_since.is_some_and(|since| now - since >= STRANGERS) {
            let (found, mend) = match stranger.as_ref().or(silent.as_ref()) {
                Some(found) => (
                    found,
                    "look for what rank 0 said, and if that place is not its own, give all ranks another, \
                     --rendezvous tcp://HOST:PORT",
                ),
                None => {
                    (&nobody, "check that it is started and can be reached; ranks on several hosts need --rendezvous")
                }
            };
            bail!(Fault::Start(format!(
                "rank {} of {} did not find rank 0 at {place} within {:.0} s ({found}): {mend}",
                world.rank,
                world.ranks,
                (now - began).as_secs_f64()
            )));
        }
        sleep(PAUSE);
    }
}

/// Why somebody who was asked to be let in got no answer.
enum Unanswered {
    /// There is no connection.
    Nobody(io::Error),
    /// There is one, and what becomes of it. What stands between the hosts may make it before rank 0 is there.
    Silence(String),
    /// How something begins that no rank says.
    Stranger(String),
}

fn ask(
    world: &World,
    address: SocketAddr,
    run: String,
    timeout: Duration,
    deadline: Instant,
) -> Result<(TcpStream, Answer), Unanswered> {
    let within = |most: Duration| most.min(deadline.saturating_duration_since(Instant::now())).max(PAUSE);
    let stream = TcpStream::connect_timeout(&address, within(INTRODUCTION)).map_err(Unanswered::Nobody)?;
    // A system may connect a port with itself where nobody listens.
    if is_itself(&stream) {
        return Err(Unanswered::Nobody(io::ErrorKind::ConnectionRefused.into()));
    }
    let hello = Hello {
        greeting: GREETING.to_owned(),
        run,
        rank: world.rank,
        ranks: world.ranks,
        host: Host::here(),
        process: std::process::id(),
    };
    let hear_within = |time| {
        stream.set_read_timeout(Some(time)).map_err(Heard::Failed)?;
        hear(&stream)
    };
    // Who closes the connection may have said something before.
    let _ = say(&stream, &hello);
    let answered = hear_within(within(2 * INTRODUCTION)).and_then(|answer| match answer {
        Answer::Wait => hear_within(timeout + MARGIN),
        answer => Ok(answer),
    });
    match answered {
        Ok(answer) => Ok((stream, answer)),
        Err(Heard::Other(said)) => Err(Unanswered::Stranger(said)),
        Err(Heard::Failed(error)) => Err(Unanswered::Silence(match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => "does not answer".to_owned(),
            io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => {
                "closes the connection without an answer".to_owned()
            }
            _ => format!("does not answer: {error}"),
        })),
    }
}

fn is_itself(stream: &TcpStream) -> bool {
    matches!((stream.local_addr(), stream.peer_addr()), (Ok(here), Ok(there)) if here == there)
}
