//! Ranks other than rank 0: finding rank 0 and connecting to it.

use super::secret::{Nonce, Side};
use super::{
    Applicant, Attempt, Candidate, Connected, HELLO_TIMEOUT, Hello, Host, PROTOCOL, RETRY_INTERVAL, ReceiveError,
    Reply, Secret, receive_json, send_json, send_text,
};
use crate::fault::Fault;
use crate::tcp_group::Connection;
use anyhow::{Result, bail};
use std::io;
use std::net::SocketAddr;
use std::time::Duration;
use system::net::{TcpStream, resolve};
use system::{thread, time};

/// Additional time for the reply of rank 0, so that its reason for a refusal arrives.
const REPLY_MARGIN: Duration = Duration::from_secs(5);

/// How long a server that is not rank 0 of this run may answer at the address before the rendezvous fails. The port of a run
/// that has just ended is free by then.
pub const UNKNOWN_SERVER_TIMEOUT: Duration = Duration::from_secs(5);

/// Results of the attempts at each candidate address, for the error message.
struct Findings {
    unreachable: String,
    silent: Option<String>,
    unknown: Option<String>,
}

impl Attempt<'_> {
    /// Connects to rank 0 at one of the addresses that `candidates` returns.
    /// `fixed` means that the candidates never change. `place` names them in messages.
    pub fn connect_to_rank_0(
        &self,
        place: &str,
        fixed: bool,
        candidates: impl Fn() -> Result<Vec<Candidate>>,
    ) -> Result<Connected> {
        let start = time::now();
        let mut findings =
            Findings { unreachable: "no address was found there".to_owned(), silent: None, unknown: None };
        let mut unknown_since = None;
        loop {
            // Rank 0 may still appear if an address is unreachable or if the candidates may change.
            let (mut found_unknown, mut may_appear) = (false, !fixed);
            for Candidate { address, run, secret } in candidates()? {
                let sockets = match resolve(&address) {
                    Ok(sockets) => sockets,
                    Err(error) => {
                        (findings.unreachable, may_appear) = (format!("{address}: {error}"), true);
                        continue;
                    }
                };
                for socket in sockets {
                    match self.request(socket, run.clone(), secret.as_ref()) {
                        Ok((stream, Reply::Accepted { local_rank })) => {
                            return self.group(vec![Connection { peer: "rank 0".to_owned(), stream }], local_rank);
                        }
                        Ok((_, Reply::Refused { text, recoverable })) => {
                            bail!(Fault::ReportedByRank0 { text, recoverable })
                        }
                        Ok((_, Reply::OtherRun)) => {
                            (found_unknown, findings.unknown) =
                                (true, Some(format!("{address} is rank 0 of another run")));
                        }
                        Ok((_, _)) => {
                            findings.silent = Some(format!("the server at {address} sent an invalid reply"));
                        }
                        Err(error) => {
                            let text = error.describe(&address);
                            match error {
                                RequestError::Unreachable(_) => (findings.unreachable, may_appear) = (text, true),
                                RequestError::NoReply(_) => findings.silent = Some(text),
                                RequestError::Secret(_) | RequestError::UnknownServer(_) => {
                                    (found_unknown, findings.unknown) = (true, Some(text));
                                }
                            }
                        }
                    }
                }
            }
            let now = time::now();
            if may_appear {
                unknown_since = None;
            } else if found_unknown {
                unknown_since.get_or_insert(now);
            }
            if now >= self.deadline || unknown_since.is_some_and(|since| now - since >= UNKNOWN_SERVER_TIMEOUT) {
                bail!(self.not_found(place, now - start, &findings));
            }
            thread::sleep(RETRY_INTERVAL);
        }
    }

    fn not_found(&self, place: &str, waited: Duration, findings: &Findings) -> Fault {
        let (found, fix) = match findings.unknown.as_ref().or(findings.silent.as_ref()) {
            Some(found) => (
                found,
                "see the output of rank 0; if the address belongs to another program, give all ranks another one with \
                 --rendezvous tcp://HOST:PORT",
            ),
            None => (
                &findings.unreachable,
                "check that rank 0 is running and reachable; ranks on several hosts need --rendezvous",
            ),
        };
        self.absent(format!(
            "rank {} of {}: expected rank 0 at {place} within {:.0} s, found none ({found}); {fix}",
            self.world.rank,
            self.world.world_size,
            waited.as_secs_f64()
        ))
    }

    /// Asks rank 0 to join, and returns its final reply.
    fn request(
        &self,
        address: SocketAddr,
        run: String,
        secret: Option<&Secret>,
    ) -> Result<(TcpStream, Reply), RequestError> {
        let (stream, reply) = self.introduce(address, run, secret, None)?;
        let reply = match reply {
            Ok(Reply::Wait) => receive_within(&stream, self.timeouts.rendezvous + REPLY_MARGIN),
            reply => reply,
        };
        match reply {
            Ok(reply) => Ok((stream, reply)),
            Err(ReceiveError::Unknown(data)) => Err(RequestError::UnknownServer(data)),
            Err(ReceiveError::Io(error)) => Err(RequestError::NoReply(match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => "does not reply".to_owned(),
                io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => {
                    "closes the connection without a reply".to_owned()
                }
                _ => format!("does not reply: {error}"),
            })),
        }
    }

    /// Connects to a server, sends [`Hello`], exchanges proofs if there is a secret, and returns the reply.
    pub(super) fn introduce(
        &self,
        address: SocketAddr,
        run: String,
        secret: Option<&Secret>,
        applicant: Option<Applicant>,
    ) -> Result<(TcpStream, Result<Reply, ReceiveError>), RequestError> {
        let limit =
            |timeout: Duration| timeout.min(self.deadline.saturating_duration_since(time::now())).max(RETRY_INTERVAL);
        let stream = TcpStream::connect_timeout(&address, limit(HELLO_TIMEOUT)).map_err(RequestError::Unreachable)?;
        // TCP may connect a socket to itself if nothing listens on an ephemeral port.
        if is_self_connected(&stream) {
            return Err(RequestError::Unreachable(io::ErrorKind::ConnectionRefused.into()));
        }
        let hello = Hello {
            protocol: PROTOCOL.to_owned(),
            run,
            rank: self.world.rank,
            world_size: self.world.world_size,
            host: Host::here(),
            process: system::process::id(),
            nonce: Nonce::random().map_err(|error| RequestError::NoReply(format!("received nothing: {error:#}")))?,
            applicant,
        };
        let hello = serde_json::to_vec(&hello).map_err(|error| RequestError::NoReply(error.to_string()))?;
        // If the server has closed the connection, it may have sent a message before. The error appears when reading.
        let _ = send_text(&stream, &hello);
        let reply = match receive_within(&stream, limit(2 * HELLO_TIMEOUT)) {
            Ok(Reply::Challenge { nonce, proof }) => {
                let Some(secret) = secret else {
                    return Err(RequestError::Secret(format!(
                        "asks for the secret of the run; set {} to the same text on all ranks, or give --rendezvous-secret FILE",
                        super::secret::VARIABLE
                    )));
                };
                if !secret.verifies(Side::Rank0, &hello, nonce, &proof) {
                    return Err(RequestError::Secret("has a different secret from this rank".to_owned()));
                }
                let proof = secret
                    .prove(Side::OtherRank, &hello, nonce)
                    .map_err(|error| RequestError::Secret(format!("received no proof: {error:#}")))?;
                let _ = send_json(&stream, &proof);
                receive_within(&stream, limit(2 * HELLO_TIMEOUT))
            }
            Ok(Reply::Wait | Reply::Accepted { .. } | Reply::Waiting { .. } | Reply::Assigned(_))
                if secret.is_some() =>
            {
                return Err(RequestError::Secret("did not prove that it knows the secret of this rank".to_owned()));
            }
            first => first,
        };
        Ok((stream, reply))
    }
}

/// Receives a reply that begins to arrive within a time.
fn receive_within(stream: &TcpStream, timeout: Duration) -> Result<Reply, ReceiveError> {
    stream.set_read_timeout(Some(timeout)).map_err(ReceiveError::Io)?;
    receive_json(stream)
}

/// Why a request to join was not answered.
pub(super) enum RequestError {
    /// No connection could be made.
    Unreachable(io::Error),
    /// The connection was made but no reply arrived. A proxy may accept connections before rank 0 listens.
    NoReply(String),
    /// The server is rank 0 of the run by name, but does not know the secret of this rank.
    Secret(String),
    /// The reply is from another program. Contains its beginning.
    UnknownServer(String),
}

impl RequestError {
    /// Describes what was found at an address.
    pub(super) fn describe(&self, address: &str) -> String {
        match self {
            Self::Unreachable(error) => format!("{address}: {error}"),
            Self::NoReply(problem) | Self::Secret(problem) => format!("the server at {address} {problem}"),
            Self::UnknownServer(data) => format!("another program listens at {address} and sent {data:?}"),
        }
    }
}

fn is_self_connected(stream: &TcpStream) -> bool {
    matches!((stream.local_addr(), stream.peer_addr()), (Ok(local), Ok(peer)) if local == peer)
}
