//! TCP connections.

use crate::simulation;
use std::fmt::Debug;
use std::io::{self, Read, Write};
use std::net::{self, Shutdown, SocketAddr, ToSocketAddrs};
use std::ops::Deref;
use std::time::Duration;

/// A TCP connection, of the operating system or of a simulated network.
#[derive(Debug)]
pub struct TcpStream(Box<dyn StreamOperations>);

/// The operations of a [`TcpStream`].
pub trait StreamOperations: Debug + Send + Sync {
    /// Returns another handle of the connection.
    fn try_clone(&self) -> io::Result<TcpStream>;

    /// Selects whether calls fail instead of waiting.
    fn set_nonblocking(&self, nonblocking: bool) -> io::Result<()>;

    /// Sets the time that a read may wait. `None`: for ever.
    fn set_read_timeout(&self, timeout: Option<Duration>) -> io::Result<()>;

    /// Sets the time that a write may wait. `None`: for ever.
    fn set_write_timeout(&self, timeout: Option<Duration>) -> io::Result<()>;

    /// Selects whether small messages are sent immediately.
    fn set_nodelay(&self, nodelay: bool) -> io::Result<()>;

    /// Closes one or both directions, for all handles.
    fn shutdown(&self, how: Shutdown) -> io::Result<()>;

    /// Reads bytes that a later read returns again.
    fn peek(&self, buffer: &mut [u8]) -> io::Result<usize>;

    /// Reads bytes, like [`Read::read`].
    fn receive(&self, buffer: &mut [u8]) -> io::Result<usize>;

    /// Writes bytes, like [`Write::write`].
    fn send(&self, bytes: &[u8]) -> io::Result<usize>;

    /// Returns the address of this end.
    fn local_addr(&self) -> io::Result<SocketAddr>;

    /// Returns the address of the other end.
    fn peer_addr(&self) -> io::Result<SocketAddr>;
}

/// A listening TCP socket, of the operating system or of a simulated network.
#[derive(Debug)]
pub struct TcpListener(Box<dyn ListenerOperations>);

/// The operations of a [`TcpListener`].
pub trait ListenerOperations: Debug + Send + Sync {
    /// Accepts a connection.
    fn accept(&self) -> io::Result<TcpStream>;

    /// Selects whether [`accept`](Self::accept) fails instead of waiting.
    fn set_nonblocking(&self, nonblocking: bool) -> io::Result<()>;

    /// Returns the address of the socket.
    fn local_addr(&self) -> io::Result<SocketAddr>;
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
        Ok(Self(match simulation::current() {
            Some(task) => {
                let address = resolve(address)?.first().copied().ok_or(io::ErrorKind::InvalidInput)?;
                Box::new(task.bind(address)?)
            }
            None => Box::new(net::TcpListener::bind(address)?),
        }))
    }
}

impl TcpStream {
    pub(crate) fn new(stream: impl StreamOperations + 'static) -> Self {
        Self(Box::new(stream))
    }

    /// Connects to an address.
    pub fn connect_timeout(address: &SocketAddr, timeout: Duration) -> io::Result<Self> {
        match simulation::current() {
            Some(task) => Ok(Self::new(task.connect(*address, timeout)?)),
            None => Ok(Self::new(net::TcpStream::connect_timeout(address, timeout)?)),
        }
    }
}

impl ListenerOperations for net::TcpListener {
    fn accept(&self) -> io::Result<TcpStream> {
        Ok(TcpStream::new(Self::accept(self)?.0))
    }

    fn set_nonblocking(&self, nonblocking: bool) -> io::Result<()> {
        Self::set_nonblocking(self, nonblocking)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        Self::local_addr(self)
    }
}

impl StreamOperations for net::TcpStream {
    fn try_clone(&self) -> io::Result<TcpStream> {
        Ok(TcpStream::new(Self::try_clone(self)?))
    }

    fn set_nonblocking(&self, nonblocking: bool) -> io::Result<()> {
        Self::set_nonblocking(self, nonblocking)
    }

    fn set_read_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        Self::set_read_timeout(self, timeout)
    }

    fn set_write_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        Self::set_write_timeout(self, timeout)
    }

    fn set_nodelay(&self, nodelay: bool) -> io::Result<()> {
        Self::set_nodelay(self, nodelay)
    }

    fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        Self::shutdown(self, how)
    }

    fn peek(&self, buffer: &mut [u8]) -> io::Result<usize> {
        Self::peek(self, buffer)
    }

    fn receive(mut self: &Self, buffer: &mut [u8]) -> io::Result<usize> {
        self.read(buffer)
    }

    fn send(mut self: &Self, bytes: &[u8]) -> io::Result<usize> {
        self.write(bytes)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        Self::local_addr(self)
    }

    fn peer_addr(&self) -> io::Result<SocketAddr> {
        Self::peer_addr(self)
    }
}

impl Deref for TcpListener {
    type Target = dyn ListenerOperations;

    fn deref(&self) -> &Self::Target {
        &*self.0
    }
}

impl Deref for TcpStream {
    type Target = dyn StreamOperations;

    fn deref(&self) -> &Self::Target {
        &*self.0
    }
}

impl Read for &TcpStream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.receive(buffer)
    }
}

impl Read for TcpStream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        (&*self).read(buffer)
    }
}

impl Write for &TcpStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.send(bytes)
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
