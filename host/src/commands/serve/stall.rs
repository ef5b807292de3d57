//! A stream whose writes fail when the other side stops reading.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep};

/// Fails a write that makes no progress for some time. Reads have no limit.
#[derive(Debug)]
pub struct StallTimeout<S> {
    stream: S,
    limit: Duration,
    timer: Pin<Box<Sleep>>,
    /// Whether a write is waiting.
    waiting: bool,
}

impl<S> StallTimeout<S> {
    /// Limits the writes of a stream.
    pub fn new(stream: S, limit: Duration) -> Self {
        Self { stream, limit, timer: Box::pin(sleep(limit)), waiting: false }
    }

    /// Passes the result of a write on. Fails once writes have waited for too long.
    fn limited<T>(&mut self, context: &mut Context<'_>, result: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if result.is_ready() {
            self.waiting = false;
            return result;
        }
        if !self.waiting {
            self.waiting = true;
            self.timer.as_mut().reset(Instant::now() + self.limit);
        }
        ready!(self.timer.as_mut().poll(context));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for StallTimeout<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for StallTimeout<S> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.limited(context, result)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let result = Pin::new(&mut self.stream).poll_flush(context);
        self.limited(context, result)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let result = Pin::new(&mut self.stream).poll_shutdown(context);
        self.limited(context, result)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

    #[tokio::test]
    async fn writes_fail_when_nobody_reads() {
        let (near, mut far) = duplex(4);
        let mut near = StallTimeout::new(near, Duration::from_millis(50));
        near.write_all(b"abcd").await.unwrap();
        let mut read = [0; 4];
        far.read_exact(&mut read).await.unwrap();
        near.write_all(b"efgh").await.unwrap();
        let error = near.write_all(b"i").await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }
}
