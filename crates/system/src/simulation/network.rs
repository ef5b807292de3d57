//! The simulated network: TCP connections between processes of one world.
//!
//! An address is its port: all processes are reachable at every address. A write becomes a packet that arrives after a delay, in the
//! order of its connection. A connection that was closed by one side is reset when data arrives there, as by an operating system.

use super::{Action, State, Task, current, killed};
use crate::net::{ListenerOperations, StreamOperations, TcpStream};
use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr};
use std::time::Duration;

/// Delay of a packet without faults, at most.
const LATENCY: Duration = Duration::from_micros(200);

/// Time after which TCP first repeats a lost packet. It doubles with each further loss.
const RETRANSMISSION: Duration = Duration::from_millis(200);

/// First port that is assigned to a listener without one, and to clients.
const EPHEMERAL: u16 = 40_000;

pub(super) struct Network {
    listeners: Vec<ListenerState>,
    sockets: Vec<SocketState>,
    ports: u16,
    /// Additional delay of a packet, at most.
    pub delay: Duration,
    /// One of this many packets is lost and repeated; 0: none.
    pub drop_one_in: u32,
    /// Bytes of one direction of a connection that are not read yet. A write waits for space.
    pub window: usize,
}

impl Default for Network {
    fn default() -> Self {
        let (listeners, sockets) = (Vec::new(), Vec::new());
        Self { listeners, sockets, ports: 0, delay: Duration::ZERO, drop_one_in: 0, window: 256 << 10 }
    }
}

struct ListenerState {
    process: usize,
    port: u16,
    nonblocking: bool,
    open: bool,
    backlog: VecDeque<usize>,
    key: u64,
}

/// One end of a connection. The ends of a connection have the numbers 2 i and 2 i + 1.
#[expect(clippy::struct_excessive_bools, reason = "independent properties, as of a real socket")]
struct SocketState {
    process: usize,
    port: u16,
    handles: usize,
    nonblocking: bool,
    read_timeout: Option<Duration>,
    write_timeout: Option<Duration>,
    received: VecDeque<u8>,
    /// Bytes on the way to this end.
    in_flight: usize,
    /// The arrival of the last packet on the way to this end.
    last_arrival: Duration,
    /// The other end sends nothing more.
    ended: bool,
    reset: bool,
    read_shut: bool,
    write_shut: bool,
    closed: bool,
    /// Woken when something arrives at this end, or when the other end has read.
    key: u64,
}

/// A packet on its way.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Packet {
    to: usize,
    content: Content,
}

#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Content {
    /// A new connection for a listener.
    Connect(usize),
    Data(Vec<u8>),
    End,
    Reset,
}

impl State {
    /// Sends a packet to an end of a connection.
    fn send(&mut self, to: usize, content: Content) {
        let [from, receiver] = [to ^ 1, to].map(|end| self.network.sockets[end].process);
        if [from, receiver].iter().any(|&process| self.processes[process].lost) {
            return;
        }
        let mut delay = self.random.up_to(LATENCY);
        let longest = self.network.delay;
        delay += self.random.up_to(longest);
        let mut timeout = RETRANSMISSION;
        while self.network.drop_one_in > 0 && self.random.below(self.network.drop_one_in.into()) == 0 {
            delay += timeout;
            timeout *= 2;
        }
        let mut arrival = self.now + delay;
        // TCP repeats the packet until the processes can reach each other, less and less often.
        for process in [from, receiver] {
            let until = self.processes[process].isolated_until;
            let waited = until.saturating_sub(self.now);
            if !waited.is_zero() {
                arrival = arrival.max(until + self.random.up_to(waited));
            }
        }
        let socket = &mut self.network.sockets[to];
        socket.last_arrival = arrival.max(socket.last_arrival + Duration::from_nanos(1));
        let at = socket.last_arrival;
        self.push(at, Action::Deliver(Packet { to, content }));
    }

    pub(super) fn deliver(&mut self, Packet { to, content }: Packet) {
        let [lost, other_lost] = [to, to ^ 1].map(|end| self.processes[self.network.sockets[end].process].lost);
        if lost || other_lost {
            return;
        }
        let socket = &mut self.network.sockets[to];
        let key = socket.key;
        match content {
            Content::Connect(listener) => {
                if self.network.listeners[listener].open {
                    self.network.listeners[listener].backlog.push_back(to);
                    let key = self.network.listeners[listener].key;
                    self.wake(key);
                } else {
                    self.send(to ^ 1, Content::Reset);
                }
            }
            Content::Data(bytes) => {
                socket.in_flight -= bytes.len();
                if socket.closed || socket.read_shut {
                    self.send(to ^ 1, Content::Reset);
                } else if !socket.reset {
                    socket.received.extend(bytes);
                }
            }
            Content::End => socket.ended = true,
            Content::Reset => self.reset(to),
        }
        self.wake(key);
    }

    /// Resets an end of a connection. Whether data that has arrived can still be read depends on the operating system.
    fn reset(&mut self, end: usize) {
        let keeps_data = self.random.below(2) == 0;
        let socket = &mut self.network.sockets[end];
        socket.reset = true;
        if !keeps_data {
            socket.received.clear();
        }
        let key = socket.key;
        self.wake(key);
    }

    /// Resets a connection that is open on both ends. Returns false if there is none.
    pub(super) fn reset_any_connection(&mut self) -> bool {
        let is_open = |end: usize| {
            let socket = &self.network.sockets[end];
            !socket.closed && !socket.reset
        };
        let open: Vec<usize> =
            (0..self.network.sockets.len()).step_by(2).filter(|&end| is_open(end) && is_open(end + 1)).collect();
        if open.is_empty() {
            return false;
        }
        let end = self.random.choose(&open);
        self.reset(end);
        self.reset(end + 1);
        true
    }

    /// Closes an end for good, as the operating system does when its last handle is closed.
    fn close_socket(&mut self, end: usize) {
        let socket = &mut self.network.sockets[end];
        if std::mem::replace(&mut socket.closed, true) {
            return;
        }
        let unread = !socket.received.is_empty();
        let ended = std::mem::replace(&mut socket.write_shut, true);
        let (reset, key) = (socket.reset, socket.key);
        if !reset && (unread || !ended) {
            self.send(end ^ 1, if unread { Content::Reset } else { Content::End });
        }
        self.wake(key);
    }

    /// Closes all sockets of a process that has ended.
    pub(super) fn close_connections(&mut self, process: usize) {
        for i in 0..self.network.listeners.len() {
            if self.network.listeners[i].process == process {
                self.close_listener(i);
            }
        }
        for end in 0..self.network.sockets.len() {
            if self.network.sockets[end].process == process {
                self.close_socket(end);
            }
        }
    }

    fn close_listener(&mut self, listener: usize) {
        let listener = &mut self.network.listeners[listener];
        listener.open = false;
        for end in std::mem::take(&mut listener.backlog) {
            self.close_socket(end);
        }
    }

    fn add_socket(&mut self, process: usize, port: u16) -> usize {
        let key = self.new_key();
        self.network.sockets.push(SocketState {
            process,
            port,
            handles: 0,
            nonblocking: false,
            read_timeout: None,
            write_timeout: None,
            received: VecDeque::new(),
            in_flight: 0,
            last_arrival: Duration::ZERO,
            ended: false,
            reset: false,
            read_shut: false,
            write_shut: false,
            closed: false,
            key,
        });
        self.network.sockets.len() - 1
    }

    fn new_port(&mut self) -> u16 {
        self.network.ports = (self.network.ports + 1) % (u16::MAX - EPHEMERAL);
        EPHEMERAL + self.network.ports
    }
}

fn address(port: u16) -> SocketAddr {
    (IpAddr::from(Ipv4Addr::LOCALHOST), port).into()
}

/// A simulated listening socket.
#[derive(Debug)]
pub(crate) struct Listener {
    task: Task,
    index: usize,
}

impl Task {
    pub(crate) fn bind(&self, address: SocketAddr) -> io::Result<Listener> {
        let mut state = self.operation(false)?;
        let port = if address.port() == 0 { state.new_port() } else { address.port() };
        if state.network.listeners.iter().any(|listener| listener.open && listener.port == port) {
            return Err(io::ErrorKind::AddrInUse.into());
        }
        let (index, key) = (state.network.listeners.len(), state.new_key());
        state.network.listeners.push(ListenerState {
            process: self.process,
            port,
            nonblocking: false,
            open: true,
            backlog: VecDeque::new(),
            key,
        });
        Ok(Listener { task: self.clone(), index })
    }

    pub(crate) fn connect(&self, address: SocketAddr, timeout: Duration) -> io::Result<Socket> {
        let state = self.operation(false)?;
        let find = |state: &State| {
            let mut open = state.network.listeners.iter().enumerate().filter(|(_, listener)| listener.open);
            open.find(|(_, listener)| listener.port == address.port()).map(|(i, listener)| (i, listener.process))
        };
        let silent = |state: &State, process: usize| {
            let process = &state.processes[process];
            process.lost || process.isolated_until > state.now
        };
        let found = find(&state);
        // A host that was lost and one that cannot be reached do not even refuse a connection.
        if found.is_some_and(|(_, process)| silent(&state, process)) || silent(&state, self.process) {
            drop(state);
            self.sleep(timeout);
            return Err(io::ErrorKind::TimedOut.into());
        }
        drop(state);
        let delay = { self.enter()?.random.up_to(LATENCY) };
        self.sleep(delay);
        let mut state = self.enter()?;
        let Some((listener, process)) = find(&state) else { return Err(io::ErrorKind::ConnectionRefused.into()) };
        let port = state.new_port();
        let client = state.add_socket(self.process, port);
        let server = state.add_socket(process, address.port());
        state.network.sockets[client].handles = 1;
        state.send(server, Content::Connect(listener));
        Ok(Socket { task: self.clone(), end: client })
    }
}

impl ListenerOperations for Listener {
    fn accept(&self) -> io::Result<TcpStream> {
        let task = current().ok_or_else(killed)?;
        let nonblocking = { task.operation(false)?.network.listeners[self.index].nonblocking };
        let timeout = nonblocking.then_some(Duration::ZERO);
        let end = task.poll(timeout, |state| {
            let listener = &mut state.network.listeners[self.index];
            listener.backlog.pop_front().ok_or(listener.key)
        })?;
        let end = end.ok_or(io::ErrorKind::WouldBlock)?;
        task.enter()?.network.sockets[end].handles = 1;
        Ok(TcpStream::new(Socket { task, end }))
    }

    fn set_nonblocking(&self, nonblocking: bool) -> io::Result<()> {
        self.task.enter()?.network.listeners[self.index].nonblocking = nonblocking;
        Ok(())
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(address(self.task.enter()?.network.listeners[self.index].port))
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.task.world.lock().close_listener(self.index);
    }
}

/// A handle of one end of a simulated connection.
#[derive(Debug)]
pub(crate) struct Socket {
    task: Task,
    end: usize,
}

impl Socket {
    fn read(&self, buffer: &mut [u8], peek: bool) -> io::Result<usize> {
        let task = current().ok_or_else(killed)?;
        let timeout = {
            let state = task.operation(false)?;
            let socket = &state.network.sockets[self.end];
            if socket.nonblocking { Some(Duration::ZERO) } else { socket.read_timeout }
        };
        let read = task.poll(timeout, |state| {
            let available = state.network.sockets[self.end].received.len().min(buffer.len());
            // A read may return less than has arrived.
            let n = if available > 1 && state.random.below(8) == 0 {
                1 + state.random.below(available as u64) as usize
            } else {
                available
            };
            let socket = &mut state.network.sockets[self.end];
            if n > 0 && !socket.read_shut {
                for (to, from) in buffer.iter_mut().zip(&socket.received) {
                    *to = *from;
                }
                if !peek {
                    socket.received.drain(..n);
                    let sender = state.network.sockets[self.end ^ 1].key;
                    state.wake(sender);
                }
                return Ok(Ok(n));
            }
            if socket.reset {
                return Ok(Err(io::ErrorKind::ConnectionReset.into()));
            }
            if socket.ended || socket.read_shut || socket.closed || buffer.is_empty() {
                return Ok(Ok(0));
            }
            Err(socket.key)
        })?;
        read.unwrap_or_else(|| Err(io::ErrorKind::WouldBlock.into()))
    }

    /// Changes a setting.
    fn set(&self, change: impl FnOnce(&mut SocketState)) -> io::Result<()> {
        change(&mut self.task.enter()?.network.sockets[self.end]);
        Ok(())
    }
}

impl StreamOperations for Socket {
    fn try_clone(&self) -> io::Result<TcpStream> {
        self.task.enter()?.network.sockets[self.end].handles += 1;
        Ok(TcpStream::new(Self { task: self.task.clone(), end: self.end }))
    }

    fn set_nonblocking(&self, nonblocking: bool) -> io::Result<()> {
        self.set(|socket| socket.nonblocking = nonblocking)
    }

    fn set_read_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        self.set(|socket| socket.read_timeout = timeout)
    }

    fn set_write_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        self.set(|socket| socket.write_timeout = timeout)
    }

    fn set_nodelay(&self, _nodelay: bool) -> io::Result<()> {
        Ok(())
    }

    fn peek(&self, buffer: &mut [u8]) -> io::Result<usize> {
        self.read(buffer, true)
    }

    fn receive(&self, buffer: &mut [u8]) -> io::Result<usize> {
        self.read(buffer, false)
    }

    fn send(&self, bytes: &[u8]) -> io::Result<usize> {
        let task = current().ok_or_else(killed)?;
        let timeout = {
            let state = task.operation(false)?;
            let socket = &state.network.sockets[self.end];
            if socket.nonblocking { Some(Duration::ZERO) } else { socket.write_timeout }
        };
        let written = task.poll(timeout, |state| {
            let socket = &state.network.sockets[self.end];
            if socket.reset || socket.write_shut || socket.closed {
                return Ok(Err(io::ErrorKind::BrokenPipe.into()));
            }
            let (key, window) = (socket.key, state.network.window);
            let peer = &mut state.network.sockets[self.end ^ 1];
            let space = window.saturating_sub(peer.received.len() + peer.in_flight);
            let n = space.min(bytes.len());
            if n == 0 && !bytes.is_empty() {
                return Err(key);
            }
            peer.in_flight += n;
            state.send(self.end ^ 1, Content::Data(bytes[..n].to_vec()));
            Ok(Ok(n))
        })?;
        written.unwrap_or_else(|| Err(io::ErrorKind::WouldBlock.into()))
    }

    fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        let mut state = self.task.enter()?;
        let socket = &mut state.network.sockets[self.end];
        let key = socket.key;
        if socket.closed || socket.reset {
            return Err(io::ErrorKind::NotConnected.into());
        }
        socket.read_shut |= how != Shutdown::Write;
        if how != Shutdown::Read && !std::mem::replace(&mut socket.write_shut, true) {
            state.send(self.end ^ 1, Content::End);
        }
        state.wake(key);
        Ok(())
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(address(self.task.enter()?.network.sockets[self.end].port))
    }

    fn peer_addr(&self) -> io::Result<SocketAddr> {
        Ok(address(self.task.enter()?.network.sockets[self.end ^ 1].port))
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        let mut state = self.task.world.lock();
        let socket = &mut state.network.sockets[self.end];
        socket.handles = socket.handles.saturating_sub(1);
        if socket.handles == 0 {
            state.close_socket(self.end);
        }
    }
}
