//! Channels, and locks that a thread may hold while it waits for something else.

use crate::simulation::WaitKey;
use std::collections::VecDeque;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvError, RecvTimeoutError, SendError, TryRecvError};
use std::sync::{Arc, Mutex as StdMutex, MutexGuard as StdGuard, PoisonError, TryLockError};
use std::time::Duration;

/// Returns the two ends of a channel without a limit.
pub fn channel<T>() -> (Sender<T>, Receiver<T>) {
    if let Some(key) = WaitKey::new() {
        let queue = StdMutex::new(VecDeque::new());
        let shared = Arc::new(Shared { queue, senders: AtomicUsize::new(1), received: AtomicBool::new(true), key });
        return (Sender(Sending::Simulated(shared.clone())), Receiver(Receiving::Simulated(shared)));
    }
    let (sender, receiver) = mpsc::channel();
    (Sender(Sending::Real(sender)), Receiver(Receiving::Real(receiver)))
}

/// A simulated channel.
#[derive(Debug)]
struct Shared<T> {
    queue: StdMutex<VecDeque<T>>,
    senders: AtomicUsize,
    /// Whether the receiver exists.
    received: AtomicBool,
    key: WaitKey,
}

/// The sending end of a channel.
#[derive(Debug)]
pub struct Sender<T>(Sending<T>);

#[derive(Debug)]
enum Sending<T> {
    Real(mpsc::Sender<T>),
    Simulated(Arc<Shared<T>>),
}

/// The receiving end of a channel.
#[derive(Debug)]
pub struct Receiver<T>(Receiving<T>);

#[derive(Debug)]
enum Receiving<T> {
    Real(mpsc::Receiver<T>),
    Simulated(Arc<Shared<T>>),
}

impl<T> Sender<T> {
    /// Sends a value. Fails if the receiver no longer exists.
    pub fn send(&self, value: T) -> Result<(), SendError<T>> {
        match &self.0 {
            Sending::Real(sender) => sender.send(value),
            Sending::Simulated(shared) => {
                if !shared.received.load(Ordering::Relaxed) {
                    return Err(SendError(value));
                }
                ignore_poison(shared.queue.lock()).push_back(value);
                shared.key.wake();
                Ok(())
            }
        }
    }
}

impl<T> Clone for Sender<T> {
    fn clone(&self) -> Self {
        Self(match &self.0 {
            Sending::Real(sender) => Sending::Real(sender.clone()),
            Sending::Simulated(shared) => {
                shared.senders.fetch_add(1, Ordering::Relaxed);
                Sending::Simulated(shared.clone())
            }
        })
    }
}

impl<T> Drop for Sending<T> {
    fn drop(&mut self) {
        if let Self::Simulated(shared) = self
            && shared.senders.fetch_sub(1, Ordering::Relaxed) == 1
        {
            shared.key.wake();
        }
    }
}

impl<T> Receiver<T> {
    /// Receives a value. Waits until there is one.
    pub fn recv(&self) -> Result<T, RecvError> {
        match &self.0 {
            Receiving::Real(receiver) => receiver.recv(),
            Receiving::Simulated(shared) => shared.receive(None).map_err(|_| RecvError),
        }
    }

    /// Receives a value. Waits at most `timeout`.
    pub fn recv_timeout(&self, timeout: Duration) -> Result<T, RecvTimeoutError> {
        match &self.0 {
            Receiving::Real(receiver) => receiver.recv_timeout(timeout),
            Receiving::Simulated(shared) => shared.receive(Some(timeout)),
        }
    }

    /// Receives a value if there is one.
    pub fn try_recv(&self) -> Result<T, TryRecvError> {
        match &self.0 {
            Receiving::Real(receiver) => receiver.try_recv(),
            Receiving::Simulated(shared) => shared.poll().map_err(|error| match error {
                RecvTimeoutError::Timeout => TryRecvError::Empty,
                RecvTimeoutError::Disconnected => TryRecvError::Disconnected,
            }),
        }
    }
}

impl<T> Drop for Receiving<T> {
    fn drop(&mut self) {
        if let Self::Simulated(shared) = self {
            shared.received.store(false, Ordering::Relaxed);
            // The values may own connections, which close now.
            let values = std::mem::take(&mut *ignore_poison(shared.queue.lock()));
            drop(values);
        }
    }
}

impl<T> Shared<T> {
    fn poll(&self) -> Result<T, RecvTimeoutError> {
        match ignore_poison(self.queue.lock()).pop_front() {
            Some(value) => Ok(value),
            None if self.senders.load(Ordering::Relaxed) == 0 => Err(RecvTimeoutError::Disconnected),
            None => Err(RecvTimeoutError::Timeout),
        }
    }

    fn receive(&self, timeout: Option<Duration>) -> Result<T, RecvTimeoutError> {
        self.key
            .wait_until(timeout, || match self.poll() {
                Err(RecvTimeoutError::Timeout) => None,
                outcome => Some(outcome),
            })
            .unwrap_or(Err(RecvTimeoutError::Timeout))
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
