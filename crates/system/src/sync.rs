//! Channels, and locks that a thread may hold while it waits for something else.

use crate::simulation::{WaitKey, channel as simulated};
use std::fmt::Debug;
use std::ops::{Deref, DerefMut};
use std::sync::mpsc::{self, RecvError, RecvTimeoutError, SendError, TryRecvError};
use std::sync::{Mutex as StdMutex, MutexGuard as StdGuard, PoisonError, TryLockError};
use std::time::Duration;

/// The sending end of a channel.
pub type Sender<T> = Box<dyn SenderOperations<T>>;

/// The receiving end of a channel.
pub type Receiver<T> = Box<dyn ReceiverOperations<T>>;

/// The operations of a [`Sender`].
pub trait SenderOperations<T>: Debug + Send + Sync {
    /// Sends a value. Fails if the receiver no longer exists.
    fn send(&self, value: T) -> Result<(), SendError<T>>;

    /// Returns another sender of the channel.
    fn another(&self) -> Sender<T>;
}

/// The operations of a [`Receiver`].
pub trait ReceiverOperations<T>: Debug + Send {
    /// Receives a value. Waits until there is one.
    fn recv(&self) -> Result<T, RecvError>;

    /// Receives a value. Waits at most `timeout`.
    fn recv_timeout(&self, timeout: Duration) -> Result<T, RecvTimeoutError>;

    /// Receives a value if there is one.
    fn try_recv(&self) -> Result<T, TryRecvError>;
}

/// Returns the two ends of a channel without a limit.
pub fn channel<T: Send + 'static>() -> (Sender<T>, Receiver<T>) {
    let (sender, receiver) = mpsc::channel();
    match WaitKey::new() {
        Some(key) => simulated::new(sender, receiver, key),
        None => (Box::new(sender), Box::new(receiver)),
    }
}

impl<T> Clone for Sender<T> {
    fn clone(&self) -> Self {
        self.another()
    }
}

impl<T: Send + 'static> SenderOperations<T> for mpsc::Sender<T> {
    fn send(&self, value: T) -> Result<(), SendError<T>> {
        Self::send(self, value)
    }

    fn another(&self) -> Sender<T> {
        Box::new(self.clone())
    }
}

impl<T: Send> ReceiverOperations<T> for mpsc::Receiver<T> {
    fn recv(&self) -> Result<T, RecvError> {
        Self::recv(self)
    }

    fn recv_timeout(&self, timeout: Duration) -> Result<T, RecvTimeoutError> {
        Self::recv_timeout(self, timeout)
    }

    fn try_recv(&self) -> Result<T, TryRecvError> {
        Self::try_recv(self)
    }
}

/// A lock. A panic of its holder does not poison it: the data must be consistent at all times.
#[derive(Debug)]
pub struct Mutex<T> {
    value: StdMutex<T>,
    /// In a simulation, what waiting tasks wait for.
    key: Option<WaitKey>,
}

/// A held [`Mutex`].
#[derive(Debug)]
pub struct MutexGuard<'a, T> {
    /// `None` only while the guard is dropped.
    guard: Option<StdGuard<'a, T>>,
    key: Option<&'a WaitKey>,
}

impl<T> Mutex<T> {
    /// Creates a lock.
    pub fn new(value: T) -> Self {
        Self { value: StdMutex::new(value), key: WaitKey::new() }
    }

    /// Waits until the lock is free, and takes it.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        let guard = match &self.key {
            // A thread of a killed process may hold it; it is about to end.
            Some(key) => key.wait_to_the_end(|| self.try_std()),
            _ => None,
        };
        let guard = guard.unwrap_or_else(|| ignore_poison(self.value.lock()));
        MutexGuard { guard: Some(guard), key: self.key.as_ref() }
    }

    /// Takes the lock if it is free.
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        Some(MutexGuard { guard: Some(self.try_std()?), key: self.key.as_ref() })
    }

    fn try_std(&self) -> Option<StdGuard<'_, T>> {
        match self.value.try_lock() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.guard.as_ref().expect("held until dropped")
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.guard.as_mut().expect("held until dropped")
    }
}

impl<T> Drop for MutexGuard<'_, T> {
    fn drop(&mut self) {
        self.guard = None;
        if let Some(key) = self.key {
            key.wake();
        }
    }
}

fn ignore_poison<T>(result: Result<T, PoisonError<T>>) -> T {
    result.unwrap_or_else(PoisonError::into_inner)
}
