//! The first messages of each connection to rank 0. Every connection has a thread and a time limit, so that junk, slow connections
//! and floods of them do not delay the ranks of the run.

use super::secret::{Nonce, Proof, Secret, Side};
use super::{Client, HELLO_TIMEOUT, Hello, PROTOCOL_PREFIX, Reply, receive_json, receive_text, send_json};
use std::collections::VecDeque;
use std::io::{self, Read};
use std::net::Shutdown;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use system::net::TcpStream;
use system::sync::{Receiver, Sender, channel};
use system::{thread, time};

/// Number of connections that may introduce themselves at the same time. Beyond it, the oldest is closed: a rank needs
/// milliseconds.
const MAX_PENDING: usize = 256;

/// The connections to rank 0 that have not introduced themselves yet.
pub struct Handshakes {
    secret: Option<Secret>,
    run: String,
    /// The connections in the order in which they began.
    pending: VecDeque<Pending>,
    sender: Sender<Client>,
    clients: Receiver<Client>,
}

/// A connection that a thread reads.
struct Pending {
    stream: TcpStream,
    /// Set before the thread returns a client or gives up.
    done: Arc<AtomicBool>,
}

impl Pending {
    fn is_done(&self) -> bool {
        self.done.load(Ordering::Acquire)
    }

    /// Closes the connection, unless it is that of a client.
    fn close(&self) {
        if !self.is_done() {
            let _ = self.stream.shutdown(Shutdown::Both);
        }
    }
}

impl Handshakes {
    /// Creates the handshakes of a run. With a secret, only clients that know it are returned.
    pub fn new(secret: Option<Secret>, run: String) -> Self {
        let (sender, clients) = channel();
        Self { secret, run, pending: VecDeque::new(), sender, clients }
    }

    /// Starts to read the introduction of a connection. A connection that cannot be served is closed; a rank tries again.
    pub fn begin(&mut self, stream: TcpStream) {
        self.pending.retain(|pending| !pending.is_done());
        if self.pending.len() >= MAX_PENDING
            && let Some(oldest) = self.pending.pop_front()
        {
            oldest.close();
        }
        let Ok(handle) = stream.try_clone() else { return };
        let (secret, run, sender) = (self.secret.clone(), self.run.clone(), self.sender.clone());
        let pending = Pending { stream: handle, done: Arc::default() };
        let done = pending.done.clone();
        let shake = move || {
            let hello = handshake(&stream, secret.as_ref(), &run);
            done.store(true, Ordering::Release);
            if let Some(hello) = hello {
                let client = Client { hello, stream };
                // The receiver is gone if the rendezvous has ended.
                let _ = sender.send(client);
            } else {
                // Another handle of the connection is still pending.
                let _ = stream.shutdown(Shutdown::Both);
            }
        };
        if thread::spawn("handshake", Some(256 << 10), shake).is_ok() {
            self.pending.push_back(pending);
        }
    }

    /// Returns the next client that has introduced itself.
    pub fn next(&mut self) -> Option<Client> {
        self.clients.try_recv().ok()
    }
}

impl Drop for Handshakes {
    fn drop(&mut self) {
        self.pending.iter().for_each(Pending::close);
    }
}

/// Reads from a connection until a point in time, however slowly the bytes arrive.
struct UntilDeadline<'a> {
    stream: &'a TcpStream,
    deadline: Instant,
}

impl Read for UntilDeadline<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.deadline.saturating_duration_since(time::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.stream.set_read_timeout(Some(left.max(Duration::from_millis(1))))?;
        let mut stream = self.stream;
        stream.read(buffer)
    }
}

/// Receives the introduction of a connection, and its proof if there is a secret. Returns `None` if it is not a rank of this run.
fn handshake(stream: &TcpStream, secret: Option<&Secret>, run: &str) -> Option<Hello> {
    stream.set_nonblocking(false).ok()?;
    stream.set_write_timeout(Some(HELLO_TIMEOUT)).ok()?;
    let deadline = time::now() + HELLO_TIMEOUT;
    let text = receive_text(UntilDeadline { stream, deadline }).ok()?;
    let hello: Hello = serde_json::from_slice(&text).ok()?;
    if !hello.protocol.starts_with(PROTOCOL_PREFIX) {
        return None;
    }
    if hello.run != run {
        let _ = send_json(stream, &Reply::OtherRun);
        return None;
    }
    if let Some(secret) = secret {
        let nonce = Nonce::random().ok()?;
        let challenge = Reply::Challenge { nonce, proof: secret.prove(Side::Rank0, &text, nonce).ok()? };
        send_json(stream, &challenge).ok()?;
        let proof: Proof = receive_json(UntilDeadline { stream, deadline }).ok()?;
        if !secret.verifies(Side::OtherRank, &text, nonce, &proof) {
            return None;
        }
    }
    stream.set_write_timeout(None).ok()?;
    Some(hello)
}
