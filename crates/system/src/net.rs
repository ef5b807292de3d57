//! TCP connections.

use crate::simulation::{self, Listener, Setting, Socket};
use std::io::{self, Read, Write};
use std::net::{self, Shutdown, SocketAddr, ToSocketAddrs};
use std::time::Duration;

/// A TCP connection.
#[derive(Debug)]
pub struct TcpStream(Stream);

#[derive(Debug)]
enum Stream {
    Real(net::TcpStream),
    Simulated(Socket),
}

/// A listening TCP socket.
#[derive(Debug)]
pub struct TcpListener(Listening);

#[derive(Debug)]
enum Listening {
    Real(net::TcpListener),
    Simulated(Listener),
}

/// Returns the addresses of `host:port`. In a simulation, there are no names.
pub fn resolve(address: &str) -> io::Result<Vec<SocketAddr>> {
    if simulation::current().is_some() {
        let parsed = address.parse().map_err(|_| io::Error::other("failed to look up the name"));
        return parsed.map(|address| vec![address]);
    }
    Ok(address.to_socket_addrs()?.collect())
}

impl TcpListener {
    /// Listens at `host:port`. With port 0, the system chooses one.
    pub fn bind(address: &str) -> io::Result<Self> {
        match simulation::current() {
            Some(task) => {
                let address = resolve(address)?.first().copied().ok_or(io::ErrorKind::InvalidInput)?;
                Ok(Self(Listening::Simulated(task.bind(address)?)))
            }
            None => Ok(Self(Listening::Real(net::TcpListener::bind(address)?))),
        }
    }

    /// Accepts a connection.
    pub fn accept(&self) -> io::Result<TcpStream> {
        match &self.0 {
            Listening::Real(listener) => Ok(TcpStream(Stream::Real(listener.accept()?.0))),
            Listening::Simulated(listener) => Ok(TcpStream(Stream::Simulated(listener.accept()?))),
        }
    }

    /// Selects whether [`accept`](Self::accept) fails instead of waiting.
    pub fn set_nonblocking(&self, nonblocking: bool) -> io::Result<()> {
        match &self.0 {
            Listening::Real(listener) => listener.set_nonblocking(nonblocking),
            Listening::Simulated(listener) => listener.set_nonblocking(nonblocking),
        }
    }

    /// Returns the address of the socket.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        match &self.0 {
            Listening::Real(listener) => listener.local_addr(),
            Listening::Simulated(listener) => listener.local_addr(),
        }
    }
}

impl TcpStream {
    /// Connects to an address.
    pub fn connect_timeout(address: &SocketAddr, timeout: Duration) -> io::Result<Self> {
        match simulation::current() {
            Some(task) => Ok(Self(Stream::Simulated(task.connect(*address, timeout)?))),
            None => Ok(Self(Stream::Real(net::TcpStream::connect_timeout(address, timeout)?))),
        }
    }

    /// Returns another handle of the connection.
    pub fn try_clone(&self) -> io::Result<Self> {
        match &self.0 {
            Stream::Real(stream) => Ok(Self(Stream::Real(stream.try_clone()?))),
            Stream::Simulated(socket) => Ok(Self(Stream::Simulated(socket.try_clone()?))),
        }
    }

    fn set(&self, setting: &Setting) -> io::Result<()> {
        match (&self.0, setting) {
            (Stream::Simulated(socket), setting) => socket.set(setting),
            (Stream::Real(stream), Setting::Nonblocking(nonblocking)) => stream.set_nonblocking(*nonblocking),
            (Stream::Real(stream), Setting::ReadTimeout(timeout)) => stream.set_read_timeout(*timeout),
            (Stream::Real(stream), Setting::WriteTimeout(timeout)) => stream.set_write_timeout(*timeout),
        }
    }

    /// Selects whether calls fail instead of waiting.
    pub fn set_nonblocking(&self, nonblocking: bool) -> io::Result<()> {
        self.set(&Setting::Nonblocking(nonblocking))
    }

    /// Sets the time that a read may wait. `None`: for ever.
    pub fn set_read_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        self.set(&Setting::ReadTimeout(timeout))
    }

    /// Sets the time that a write may wait. `None`: for ever.
    pub fn set_write_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        self.set(&Setting::WriteTimeout(timeout))
    }

    /// Selects whether small messages are sent immediately.
    pub fn set_nodelay(&self, nodelay: bool) -> io::Result<()> {
        match &self.0 {
            Stream::Real(stream) => stream.set_nodelay(nodelay),
            Stream::Simulated(_) => Ok(()),
        }
    }

    /// Closes one or both directions, for all handles.
    pub fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        match &self.0 {
            Stream::Real(stream) => stream.shutdown(how),
            Stream::Simulated(socket) => socket.shutdown(how),
        }
    }

    /// Reads bytes that a later read returns again.
    pub fn peek(&self, buffer: &mut [u8]) -> io::Result<usize> {
        match &self.0 {
            Stream::Real(stream) => stream.peek(buffer),
            Stream::Simulated(socket) => socket.read(buffer, true),
        }
    }

    /// Returns the address of this end.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        match &self.0 {
            Stream::Real(stream) => stream.local_addr(),
            Stream::Simulated(socket) => socket.address(true),
        }
    }

    /// Returns the address of the other end.
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        match &self.0 {
            Stream::Real(stream) => stream.peer_addr(),
            Stream::Simulated(socket) => socket.address(false),
        }
    }
}

impl Read for &TcpStream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match &self.0 {
            Stream::Real(stream) => (&*stream).read(buffer),
            Stream::Simulated(socket) => socket.read(buffer, false),
        }
    }
}

impl Read for TcpStream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        (&*self).read(buffer)
    }
}

impl Write for &TcpStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match &self.0 {
            Stream::Real(stream) => (&*stream).write(bytes),
            Stream::Simulated(socket) => socket.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Write for TcpStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        (&*self).write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
