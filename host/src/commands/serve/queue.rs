//! The requests that wait for the model, and what it sends back.

use super::error::ApiError;
use super::openai::{Completion, Usage};
use crate::generate::Finish;
use serde_json::Value;
use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::mpsc::{Receiver, Sender, channel};

/// Events that wait for a client. A client that reads so slowly that more of them wait is disconnected. A GPU generates tens of
/// thousands of tokens per second, so fewer events would disconnect clients that pause for a fraction of a second.
const MAX_EVENTS: usize = 1 << 14;

/// The progress of a request.
#[derive(Debug)]
pub enum Event {
    /// New text of a choice.
    Text(usize, String),
    /// The end of a choice, with its log probabilities if the request asks for them.
    End(usize, Finish, Value),
    /// The end of all choices.
    Done(Usage),
    /// The request failed.
    Failed(ApiError),
}

/// A request that waits or runs.
#[derive(Debug)]
pub struct Job {
    /// The prompt and the settings of generation.
    pub completion: Completion,
    /// Closed once the client has disconnected.
    pub events: Sender<Event>,
    /// When the request came.
    pub received: Instant,
    /// When the client gives up.
    pub deadline: Instant,
}

impl Job {
    /// Returns whether nobody waits for the result any more.
    pub fn is_abandoned(&self) -> bool {
        self.events.is_closed() || Instant::now() >= self.deadline
    }
}

/// A queue of limited length. Requests of clients that have disconnected do not count.
#[derive(Debug)]
pub struct Queue {
    waiting: Mutex<Waiting>,
    changed: Condvar,
    limit: usize,
}

#[derive(Debug, Default)]
struct Waiting {
    jobs: VecDeque<Job>,
    /// Whether the server ends.
    closed: bool,
}

impl Queue {
    /// Creates a queue of at most `limit` waiting requests.
    pub fn new(limit: usize) -> Self {
        Self { waiting: Mutex::default(), changed: Condvar::new(), limit }
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a request and returns its events.
    pub fn push(&self, completion: Completion, timeout: Duration) -> Result<Receiver<Event>, ApiError> {
        let (events, received) = channel(MAX_EVENTS);
        let mut waiting = self.lock();
        if waiting.closed {
            return Err(ApiError::stopping());
        }
        if waiting.jobs.len() >= self.limit {
            waiting.jobs.retain(|job| !job.is_abandoned());
        }
        if waiting.jobs.len() >= self.limit {
            return Err(ApiError::busy(&format!("the queue is full with {} requests", self.limit)));
        }
        let now = Instant::now();
        waiting.jobs.push_back(Job { completion, events, received: now, deadline: now + timeout });
        self.changed.notify_one();
        Ok(received)
    }

    /// Returns the first request that `fits`, or `None` if there is none.
    pub fn try_pop(&self, fits: impl Fn(&Completion) -> bool) -> Option<Job> {
        let mut waiting = self.lock();
        waiting.jobs.retain(|job| !job.is_abandoned());
        let at = waiting.jobs.iter().position(|job| fits(&job.completion))?;
        waiting.jobs.remove(at)
    }

    /// Waits for a request. Returns `None` after `limit`, and when the server ends.
    pub fn pop(&self, limit: Duration) -> Option<Job> {
        let waiting = self.lock();
        let empty = |waiting: &mut Waiting| waiting.jobs.is_empty() && !waiting.closed;
        drop(self.changed.wait_timeout_while(waiting, limit, empty));
        self.try_pop(|_| true)
    }

    /// Returns the number of requests that wait.
    pub fn len(&self) -> usize {
        self.lock().jobs.iter().filter(|job| !job.is_abandoned()).count()
    }

    /// Refuses all requests from here on, and those that wait.
    pub fn close(&self) {
        let mut waiting = self.lock();
        waiting.closed = true;
        for job in waiting.jobs.drain(..) {
            let _ = job.events.try_send(Event::Failed(ApiError::stopping()));
        }
        self.changed.notify_all();
    }

    /// Returns whether the server ends.
    pub fn is_closed(&self) -> bool {
        self.lock().closed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn push(queue: &Queue) -> Result<Receiver<Event>, ApiError> {
        let completion = Completion::parse(b"{}", false).unwrap();
        queue.push(completion, Duration::from_mins(1))
    }

    fn pop(queue: &Queue) -> Option<Job> {
        queue.try_pop(|_| true)
    }

    #[test]
    fn requests_that_do_not_fit_keep_their_place() {
        let queue = Queue::new(4);
        let push = |tokens: usize| {
            let body = format!("{{\"max_tokens\": {tokens}}}");
            queue.push(Completion::parse(body.as_bytes(), false).unwrap(), Duration::from_mins(1)).unwrap()
        };
        let _events = [push(9), push(2), push(8), push(1)];
        let tokens = |job: Option<Job>| job.and_then(|job| job.completion.tokens);
        let short = |completion: &Completion| completion.tokens.is_some_and(|tokens| tokens < 5);
        assert_eq!([tokens(queue.try_pop(short)), tokens(queue.try_pop(short))], [Some(2), Some(1)]);
        assert!(queue.try_pop(short).is_none());
        assert_eq!([tokens(pop(&queue)), tokens(pop(&queue))], [Some(9), Some(8)]);
    }

    #[test]
    fn abandoned_requests_make_room() {
        let queue = Queue::new(2);
        let first = push(&queue).unwrap();
        let _second = push(&queue).unwrap();
        assert!(push(&queue).is_err());
        drop(first);
        assert_eq!(queue.len(), 1);
        let _third = push(&queue).unwrap();
        assert!(push(&queue).is_err());
        assert!(pop(&queue).is_some() && pop(&queue).is_some() && pop(&queue).is_none());
        let mut late = queue.push(Completion::parse(b"{}", false).unwrap(), Duration::ZERO).unwrap();
        assert!(pop(&queue).is_none() && late.try_recv().is_err());
    }

    #[test]
    fn a_closed_queue_refuses_waiting_and_new_requests() {
        let queue = Queue::new(2);
        let mut waiting = push(&queue).unwrap();
        queue.close();
        assert!(matches!(waiting.try_recv(), Ok(Event::Failed(_))));
        assert!(queue.pop(Duration::from_mins(1)).is_none() && push(&queue).is_err());
    }
}
