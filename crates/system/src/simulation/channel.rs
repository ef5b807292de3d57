//! Channels between simulated threads: those of the standard library, and the key of the thread that waits for a value.

use super::WaitKey;
use crate::sync::{Receiver, ReceiverOperations, Sender, SenderOperations};
use std::sync::Arc;
use std::sync::mpsc::{self, RecvError, RecvTimeoutError, SendError, TryRecvError};
use std::time::Duration;

/// An end of a channel of the standard library, and the key of the receiver.
#[derive(Debug)]
struct Simulated<End, Key> {
    /// Dropped before `key`: a receiver that the last sender wakes finds the channel disconnected.
    end: End,
    key: Arc<Key>,
}

/// Wakes the receiver when the last sender is dropped.
#[derive(Debug)]
struct WakeOnDrop(Arc<WaitKey>);

impl Drop for WakeOnDrop {
    fn drop(&mut self) {
        self.0.wake();
    }
}

/// Returns the ends of a simulated channel.
pub fn new<T: Send + 'static>(
    sender: mpsc::Sender<T>,
    receiver: mpsc::Receiver<T>,
    key: WaitKey,
) -> (Sender<T>, Receiver<T>) {
    let key = Arc::new(key);
    let sender = Simulated { end: sender, key: Arc::new(WakeOnDrop(key.clone())) };
    (Box::new(sender), Box::new(Simulated { end: receiver, key }))
}

impl<T: Send + 'static> SenderOperations<T> for Simulated<mpsc::Sender<T>, WakeOnDrop> {
    fn send(&self, value: T) -> Result<(), SendError<T>> {
        self.end.send(value)?;
        self.key.0.wake();
        Ok(())
    }

    fn another(&self) -> Sender<T> {
        Box::new(Self { end: self.end.clone(), key: self.key.clone() })
    }
}

impl<T: Send> ReceiverOperations<T> for Simulated<mpsc::Receiver<T>, WaitKey> {
    fn recv(&self) -> Result<T, RecvError> {
        self.receive(None).map_err(|_| RecvError)
    }

    fn recv_timeout(&self, timeout: Duration) -> Result<T, RecvTimeoutError> {
        self.receive(Some(timeout))
    }

    fn try_recv(&self) -> Result<T, TryRecvError> {
        self.end.try_recv()
    }
}

impl<T> Simulated<mpsc::Receiver<T>, WaitKey> {
    fn receive(&self, timeout: Option<Duration>) -> Result<T, RecvTimeoutError> {
        let poll = || match self.end.try_recv() {
            Ok(value) => Some(Ok(value)),
            Err(TryRecvError::Disconnected) => Some(Err(RecvTimeoutError::Disconnected)),
            Err(TryRecvError::Empty) => None,
        };
        self.key.wait_until(timeout, poll).unwrap_or(Err(RecvTimeoutError::Timeout))
    }
}
