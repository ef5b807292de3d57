//! A deterministic simulation of several processes over a network, a disk and a clock.
//!
//! Each thread of a simulated process is a thread of this process, but only one of them runs at a time. It runs until it waits: for a
//! message, a lock, a file operation, or time. Then the seed chooses the next thread that can run. If none can, the clock jumps to the
//! next event. So the seed determines every interleaving, delay and fault, and the same seed repeats a run exactly. Computing takes no
//! simulated time. Threads that were not started through this crate (a thread pool, a prefetching thread) must not call it; a simulated
//! thread waits for them in real time.
//!
//! The network has TCP's guarantees: bytes of a connection arrive in order or not at all. Lost and reordered packets therefore appear
//! as delays. The disk has those of POSIX and no more ([`disk`]).

pub(crate) mod channel;
pub mod disk;
mod network;
mod random;

pub use disk::Disk;
pub use random::Random;

use crate::thread::HandleOperations;
use network::{Network, Packet};
use std::any::Any;
use std::cell::RefCell;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fmt;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// The directory that is the root of the simulated disk.
pub const ROOT: &str = "/simulated";

/// Simulated time after which a simulation that has not ended is stopped.
const TIME_LIMIT: Duration = Duration::from_hours(12);

/// Number of operations after which a simulation that has not ended is stopped.
const OPERATION_LIMIT: u64 = 20_000_000;

thread_local! {
    static CURRENT: RefCell<Option<Task>> = const { RefCell::new(None) };
}

/// Returns the simulated thread that this thread is, if any.
pub(crate) fn current() -> Option<Task> {
    CURRENT.try_with(|current| current.borrow().clone()).ok().flatten()
}

/// A fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// A process is killed. The operating system closes its connections and releases its locks.
    Kill(usize),
    /// The host of a process fails. Nothing arrives from there any more, not even the end of connections.
    LoseHost(usize),
    /// A process does not run for this long. Its connections remain.
    Freeze(usize, Duration),
    /// From now on, each operation of a process takes up to this much longer.
    Slow(usize, Duration),
    /// Nothing arrives from or at a process for this long. TCP repeats the packets afterwards.
    Isolate(usize, Duration),
    /// A connection is reset.
    ResetConnection,
    /// From now on, each packet takes up to this much longer.
    Delay(Duration),
    /// From now on, one of this many packets is lost and repeated.
    Drop(u32),
    /// From now on, a connection holds this many bytes that were not read.
    SmallSockets(usize),
    /// All processes end. Each change of the disk that was not synced is lost, or torn, or not.
    PowerLoss,
    /// The disk has space for this many more bytes.
    DiskFull(u64),
    /// The disk has space again.
    DiskHasSpace,
    /// This many of the next writes and syncs fail.
    DiskErrors(u32),
    /// From now on, each disk operation takes up to this long.
    SlowDisk(Duration),
}

/// The moment of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trigger {
    /// Time since the start of the simulation.
    Time(Duration),
    /// Number of operations of all processes on network and disk.
    Operation(u64),
    /// Number of operations on the disk.
    DiskOperation(u64),
}

/// How a process ended.
#[derive(Debug)]
pub enum End<R> {
    /// Its main function returned.
    Returned(R),
    /// It exited with a code.
    Exited(u8),
    /// It was killed, by a fault or because the simulation was stopped.
    Killed,
    /// Its main function panicked.
    Panicked(String),
}

/// A simulated process that has ended.
#[derive(Debug)]
pub struct Ended<R> {
    /// How it ended.
    pub end: End<R>,
    /// Simulated time of its end.
    pub at: Duration,
    /// Lines of its standard output, with their times.
    pub output: Vec<(Duration, String)>,
    /// Lines of its standard error.
    pub errors: Vec<String>,
}

/// Why a simulation was stopped before its processes ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stopped {
    /// All threads waited for ever.
    Deadlock,
    /// It took too much simulated time or too many operations.
    Limit,
}

/// A simulated world: a clock, a network, a disk, and the processes on it.
#[derive(Clone, Debug)]
pub struct Simulation(Arc<World>);

struct World {
    state: Mutex<State>,
    /// The real time that is the start of the simulated time.
    base: Instant,
    /// Wakes the thread that runs the simulation.
    all_ended: Condvar,
}

impl fmt::Debug for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("World").finish_non_exhaustive()
    }
}

struct State {
    now: Duration,
    random: Random,
    /// The task that runs.
    running: Option<usize>,
    /// Whether [`Simulation::run`] lets tasks run.
    started: bool,
    tasks: Vec<TaskState>,
    processes: Vec<Process>,
    events: BinaryHeap<Reverse<Event>>,
    /// Number of events so far, which orders events of the same time.
    event_count: u64,
    next_key: u64,
    network: Network,
    disk: Disk,
    faults: Vec<(Trigger, Fault)>,
    /// The faults that have occurred, with their times.
    occurred: Vec<(Duration, Fault)>,
    operations: u64,
    disk_operations: u64,
    /// Random bytes of ranks, such as nonces. They do not change the order of tasks.
    random_bytes: Random,
    /// Numbers that [`Task::next_number`] has returned.
    numbers: u64,
    /// Hash of the order in which tasks ran, with their times.
    trace: u64,
    stopped: Option<Stopped>,
}

struct TaskState {
    process: usize,
    status: Status,
    /// Wakes the thread of the task.
    turn: Arc<Condvar>,
    /// Number of waits so far. A timer of an earlier wait has no effect.
    waits: u64,
    /// The key of the threads that the end of the task wakes.
    key: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Status {
    Ready,
    Waiting(u64),
    Finished,
}

struct Process {
    alive: bool,
    /// Whether its host has failed.
    lost: bool,
    frozen_until: Duration,
    isolated_until: Duration,
    slow: Duration,
    exit_code: Option<u8>,
    ended_at: Option<Duration>,
    output: Vec<(Duration, String)>,
    errors: Vec<String>,
}

#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Event {
    at: Duration,
    number: u64,
    action: Action,
}

#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Action {
    /// Ends a wait of a task.
    Wake {
        task: usize,
        wait: u64,
    },
    Deliver(Packet),
    Fault(usize),
    /// Does nothing: a frozen process can run again.
    Thaw,
}

/// The payload of the panic that ends the threads of a killed process.
struct Killed;

/// Ends a process when its main function has ended: a process has no other threads then.
struct EndOfMain {
    world: Arc<World>,
    process: usize,
}

impl Drop for EndOfMain {
    fn drop(&mut self) {
        self.world.lock().end_process(self.process, false);
    }
}

/// The error of operations while the threads of a killed process end.
fn killed() -> io::Error {
    io::Error::other("the process was killed")
}

type Guard<'a> = MutexGuard<'a, State>;

impl Simulation {
    /// Creates a world without processes. The seed determines everything that happens in it.
    pub fn new(seed: u64) -> Self {
        Self::with_disk(seed, Disk::default())
    }

    /// Creates a world with the disk of an earlier one.
    pub fn with_disk(seed: u64, disk: Disk) -> Self {
        let state = State {
            now: Duration::ZERO,
            random: Random::new(seed),
            running: None,
            started: false,
            tasks: Vec::new(),
            processes: Vec::new(),
            events: BinaryHeap::new(),
            event_count: 0,
            next_key: 0,
            network: Network::default(),
            disk,
            faults: Vec::new(),
            occurred: Vec::new(),
            operations: 0,
            disk_operations: 0,
            random_bytes: Random::new(!seed),
            numbers: 0,
            trace: 0,
            stopped: None,
        };
        Self(Arc::new(World { state: Mutex::new(state), base: Instant::now(), all_ended: Condvar::new() }))
    }

    /// Schedules a fault. Processes are numbered from 0.
    pub fn schedule(&self, trigger: Trigger, fault: Fault) {
        let mut state = self.0.lock();
        let index = state.faults.len();
        state.faults.push((trigger, fault));
        if let Trigger::Time(at) = trigger {
            state.push(at, Action::Fault(index));
        }
    }

    /// Runs a process per function until all have ended.
    pub fn run<R: Send + 'static>(&self, mains: Vec<Box<dyn FnOnce() -> R + Send>>) -> io::Result<Vec<Ended<R>>> {
        let first = self.0.lock().processes.len();
        let mut handles = Vec::new();
        for (i, main) in mains.into_iter().enumerate() {
            let mut state = self.0.lock();
            state.processes.push(Process::new());
            drop(state);
            let world = self.0.clone();
            let run = move || {
                let _end = EndOfMain { world, process: first + i };
                main()
            };
            handles.push(World::spawn(&self.0, first + i, format!("process {i}"), run)?);
        }
        let mut state = self.0.lock();
        state.started = true;
        state.pick();
        state.notify_running();
        while state.tasks.iter().any(|task| task.status != Status::Finished) {
            state = self.0.all_ended.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.started = false;
        drop(state);
        let ended = handles.into_iter().enumerate().map(|(i, handle)| {
            let result = handle.take_result();
            let mut state = self.0.lock();
            let process = &mut state.processes[first + i];
            let end = match (result, process.exit_code) {
                (_, Some(code)) => End::Exited(code),
                (Some(Ok(result)), None) => End::Returned(result),
                (Some(Err(panic)), None) if !panic.is::<Killed>() => End::Panicked(panic_text(&*panic)),
                _ => End::Killed,
            };
            let (output, errors) = (std::mem::take(&mut process.output), std::mem::take(&mut process.errors));
            Ended { end, at: process.ended_at.unwrap_or_default(), output, errors }
        });
        Ok(ended.collect())
    }

    /// Returns the faults that have occurred, with their times.
    pub fn occurred(&self) -> Vec<(Duration, Fault)> {
        self.0.lock().occurred.clone()
    }

    /// Returns the simulated time.
    pub fn now(&self) -> Duration {
        self.0.lock().now
    }

    /// Returns the numbers of operations so far: all, and those on the disk.
    pub fn operations(&self) -> (u64, u64) {
        let state = self.0.lock();
        (state.operations, state.disk_operations)
    }

    /// Returns a hash of everything that has happened: which thread ran when.
    pub fn trace(&self) -> u64 {
        self.0.lock().trace
    }

    /// Returns why the simulation was stopped before its processes ended.
    pub fn stopped(&self) -> Option<Stopped> {
        self.0.lock().stopped
    }

    /// Returns the disk. No process may be running.
    pub fn into_disk(self) -> Disk {
        std::mem::take(&mut self.0.lock().disk)
    }
}

fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "a panic without a message".to_owned())
}

impl World {
    fn lock(&self) -> Guard<'_> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a thread of a process. It does not run before another one waits.
    fn spawn<T: Send + 'static>(
        world: &Arc<Self>,
        process: usize,
        name: String,
        run: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<TaskHandle<T>> {
        let mut state = world.lock();
        let (id, key) = (state.tasks.len(), state.new_key());
        let turn = Arc::new(Condvar::new());
        state.tasks.push(TaskState { process, status: Status::Ready, turn, waits: 0, key });
        drop(state);
        let result = Arc::new(Mutex::new(None));
        let handle = TaskHandle { id, key, result: result.clone(), world: world.clone() };
        let task = Task { world: world.clone(), id, process };
        let body = move || {
            CURRENT.with(|current| *current.borrow_mut() = Some(task.clone()));
            let outcome = catch_unwind(AssertUnwindSafe(|| {
                // A process that was killed meanwhile does not run.
                drop(task.wait_for_turn(task.world.lock()));
                drop(task.enter());
                run()
            }));
            *result.lock().unwrap_or_else(PoisonError::into_inner) = Some(outcome);
            CURRENT.with(|current| *current.borrow_mut() = None);
            task.finish();
        };
        let spawned = thread::Builder::new().name(name).spawn(body);
        if let Err(error) = spawned {
            world.lock().tasks[id].status = Status::Finished;
            return Err(error);
        }
        Ok(handle)
    }
}

impl Process {
    fn new() -> Self {
        Self {
            alive: true,
            lost: false,
            frozen_until: Duration::ZERO,
            isolated_until: Duration::ZERO,
            slow: Duration::ZERO,
            exit_code: None,
            ended_at: None,
            output: Vec::new(),
            errors: Vec::new(),
        }
    }
}

impl State {
    fn new_key(&mut self) -> u64 {
        self.next_key += 1;
        self.next_key
    }

    fn push(&mut self, at: Duration, action: Action) {
        self.event_count += 1;
        let number = self.event_count;
        self.events.push(Reverse(Event { at, number, action }));
    }

    /// Lets the tasks run that wait for `key`.
    fn wake(&mut self, key: u64) {
        for task in &mut self.tasks {
            if task.status == Status::Waiting(key) {
                task.status = Status::Ready;
            }
        }
    }

    /// Chooses the next task. Moves the clock if none can run.
    fn pick(&mut self) {
        self.running = None;
        if !self.started {
            return;
        }
        loop {
            let now = self.now;
            let can_run = |task: &TaskState| {
                let process = &self.processes[task.process];
                task.status == Status::Ready && (process.frozen_until <= now || !process.alive)
            };
            let ready: Vec<usize> = (0..self.tasks.len()).filter(|&i| can_run(&self.tasks[i])).collect();
            if !ready.is_empty() {
                let task = ready[self.random.below(ready.len() as u64) as usize];
                self.running = Some(task);
                self.trace = random::mix(self.trace ^ random::mix(self.now.as_nanos() as u64 ^ ((task as u64) << 56)));
                return;
            }
            if self.tasks.iter().all(|task| task.status == Status::Finished) {
                return;
            }
            if self.now > TIME_LIMIT || self.operations > OPERATION_LIMIT {
                self.stop(Stopped::Limit);
                continue;
            }
            match self.events.pop() {
                Some(Reverse(event)) => self.perform(event),
                None => self.stop(Stopped::Deadlock),
            }
        }
    }

    fn stop(&mut self, why: Stopped) {
        self.stopped.get_or_insert(why);
        (0..self.processes.len()).for_each(|process| self.end_process(process, false));
    }

    fn perform(&mut self, Event { at, action, .. }: Event) {
        self.now = self.now.max(at);
        match action {
            Action::Wake { task, wait } => {
                let task = &mut self.tasks[task];
                if task.waits == wait && matches!(task.status, Status::Waiting(_)) {
                    task.status = Status::Ready;
                }
            }
            Action::Deliver(packet) => self.deliver(packet),
            Action::Fault(index) => self.inject(self.faults[index].1),
            Action::Thaw => {}
        }
    }

    fn notify_running(&self) {
        if let Some(running) = self.running {
            self.tasks[running].turn.notify_one();
        }
    }

    /// Counts an operation, and injects the faults that are due.
    fn count(&mut self, on_disk: bool) {
        self.operations += 1;
        self.disk_operations += u64::from(on_disk);
        for i in 0..self.faults.len() {
            let (trigger, fault) = self.faults[i];
            let due = match trigger {
                Trigger::Time(_) => false,
                Trigger::Operation(n) => n == self.operations,
                Trigger::DiskOperation(n) => on_disk && n == self.disk_operations,
            };
            if due {
                self.inject(fault);
            }
        }
    }

    fn inject(&mut self, fault: Fault) {
        let now = self.now;
        let alive = |state: &Self, process: usize| state.processes.get(process).is_some_and(|process| process.alive);
        match fault {
            Fault::Kill(process) | Fault::LoseHost(process) if alive(self, process) => {
                self.end_process(process, matches!(fault, Fault::LoseHost(_)));
            }
            Fault::Freeze(process, duration) if alive(self, process) => {
                self.processes[process].frozen_until = now + duration;
                self.push(now + duration, Action::Thaw);
            }
            Fault::Slow(process, delay) if alive(self, process) => self.processes[process].slow = delay,
            Fault::Isolate(process, duration) if alive(self, process) => {
                self.processes[process].isolated_until = now + duration;
            }
            Fault::ResetConnection if !self.reset_any_connection() => return,
            Fault::ResetConnection => {}
            Fault::Delay(delay) => self.network.delay = delay,
            Fault::Drop(one_in) => self.network.drop_one_in = one_in,
            Fault::SmallSockets(bytes) => self.network.window = bytes,
            Fault::PowerLoss => {
                (0..self.processes.len()).for_each(|process| self.end_process(process, true));
                let seed = self.random.next();
                self.disk.lose_power(seed);
            }
            Fault::DiskFull(bytes) => self.disk.fill_up(bytes),
            Fault::DiskHasSpace => self.disk.empty(),
            Fault::DiskErrors(count) => self.disk.fail(count),
            Fault::SlowDisk(delay) => self.disk.delay = delay,
            _ => return,
        }
        self.occurred.push((now, fault));
    }

    /// Ends a process. Its threads end when they run next.
    fn end_process(&mut self, process: usize, lost: bool) {
        let now = self.now;
        let ended = &mut self.processes[process];
        if !std::mem::replace(&mut ended.alive, false) {
            return;
        }
        ended.lost = lost;
        ended.ended_at = Some(now);
        for task in self.tasks.iter_mut().filter(|task| task.process == process) {
            if matches!(task.status, Status::Waiting(_)) {
                task.status = Status::Ready;
            }
        }
        self.disk.release_locks(process);
        self.close_connections(process);
    }
}

/// A handle of the simulated thread that runs.
#[derive(Clone, Debug)]
pub(crate) struct Task {
    world: Arc<World>,
    id: usize,
    process: usize,
}

impl Task {
    pub fn now(&self) -> Instant {
        self.world.base + self.world.lock().now
    }

    /// Returns the time since the start of the world.
    pub fn elapsed(&self) -> Duration {
        self.world.lock().now
    }

    /// Returns the number of the process.
    pub fn process(&self) -> usize {
        self.process
    }

    /// Returns a number that no task has got before.
    pub fn next_number(&self) -> u64 {
        let mut state = self.world.lock();
        state.numbers += 1;
        state.numbers
    }

    /// Fills `bytes` with random numbers.
    pub fn fill_random(&self, bytes: &mut [u8]) {
        let mut state = self.world.lock();
        bytes.fill_with(|| state.random_bytes.next() as u8);
    }

    /// Locks the state of the world for an operation. If the process was killed, ends this thread, or fails if it is ending.
    fn enter(&self) -> io::Result<Guard<'_>> {
        let state = self.world.lock();
        self.checked(state)
    }

    fn checked<'a>(&self, state: Guard<'a>) -> io::Result<Guard<'a>> {
        if state.processes[self.process].alive {
            return Ok(state);
        }
        drop(state);
        if thread::panicking() {
            return Err(killed());
        }
        resume_unwind(Box::new(Killed))
    }

    /// Begins an operation on the network or the disk, which takes some time.
    fn operation(&self, on_disk: bool) -> io::Result<Guard<'_>> {
        let mut state = self.enter()?;
        state.count(on_disk);
        state = self.checked(state)?;
        let slow = state.processes[self.process].slow;
        let mut delay = state.random.up_to(slow);
        if on_disk {
            let disk = state.disk.delay;
            delay += state.random.up_to(disk);
        }
        // Most operations are followed by others of the same thread, as on a real machine.
        if delay.is_zero() && state.random.below(4) > 0 {
            return Ok(state);
        }
        let until = state.now + delay;
        state = self.wait(state, 0, Some(until));
        self.checked(state)
    }

    /// Waits until `key` is woken or the clock reaches `until`.
    fn wait<'a>(&'a self, mut state: Guard<'a>, key: u64, until: Option<Duration>) -> Guard<'a> {
        let task = &mut state.tasks[self.id];
        task.waits += 1;
        task.status = Status::Waiting(key);
        let wait = task.waits;
        if let Some(until) = until {
            state.push(until, Action::Wake { task: self.id, wait });
        }
        state.pick();
        state.notify_running();
        self.wait_for_turn(state)
    }

    fn wait_for_turn<'a>(&'a self, mut state: Guard<'a>) -> Guard<'a> {
        let turn = state.tasks[self.id].turn.clone();
        while state.running != Some(self.id) {
            state = turn.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state
    }

    /// Waits until `poll` returns a value. Polls again whenever the key that it names is woken. Returns `None` after `timeout`.
    fn poll<R>(
        &self,
        timeout: Option<Duration>,
        mut poll: impl FnMut(&mut State) -> Result<R, u64>,
    ) -> io::Result<Option<R>> {
        let mut state = self.enter()?;
        let until = timeout.map(|timeout| state.now.saturating_add(timeout));
        loop {
            let key = match poll(&mut state) {
                Ok(value) => return Ok(Some(value)),
                Err(key) => key,
            };
            if until.is_some_and(|until| state.now >= until) {
                return Ok(None);
            }
            state = self.wait(state, key, until);
            state = self.checked(state)?;
        }
    }

    pub fn sleep(&self, duration: Duration) {
        let Ok(state) = self.enter() else { return };
        let until = state.now.saturating_add(duration);
        drop(self.checked(self.wait(state, 0, Some(until))));
    }

    pub fn spawn<T: Send + 'static>(
        &self,
        name: String,
        run: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<TaskHandle<T>> {
        drop(self.enter()?);
        World::spawn(&self.world, self.process, name, run)
    }

    pub fn exit(&self, code: u8) -> ! {
        let mut state = self.world.lock();
        if state.processes[self.process].alive {
            state.processes[self.process].exit_code = Some(code);
            state.end_process(self.process, false);
        }
        drop(state);
        resume_unwind(Box::new(Killed))
    }

    pub fn print(&self, line: &str, to_errors: bool) {
        let mut state = self.world.lock();
        let now = state.now;
        let process = &mut state.processes[self.process];
        match (process.alive, to_errors) {
            (true, false) => process.output.push((now, line.to_owned())),
            (true, true) => process.errors.push(line.to_owned()),
            (false, _) => {}
        }
    }

    /// Ends the task and lets another one run.
    fn finish(&self) {
        let mut state = self.world.lock();
        state.tasks[self.id].status = Status::Finished;
        let key = state.tasks[self.id].key;
        state.wake(key);
        if state.running == Some(self.id) {
            state.pick();
            state.notify_running();
        }
        self.world.all_ended.notify_all();
    }
}

/// A simulated thread that can be joined.
#[derive(Debug)]
pub(crate) struct TaskHandle<T> {
    id: usize,
    key: u64,
    result: Arc<Mutex<Option<thread::Result<T>>>>,
    world: Arc<World>,
}

impl<T: Send> HandleOperations<T> for TaskHandle<T> {
    fn is_finished(&self) -> bool {
        self.world.lock().tasks[self.id].status == Status::Finished
    }

    fn join(self: Box<Self>) -> thread::Result<T> {
        if let Some(task) = current() {
            let mut state = task.world.lock();
            // Threads of a killed process also wait: the other thread is about to end.
            while state.tasks[self.id].status != Status::Finished {
                state = task.wait(state, self.key, None);
                if state.processes[task.process].alive || thread::panicking() {
                    continue;
                }
                drop(state);
                resume_unwind(Box::new(Killed));
            }
        }
        self.take_result().unwrap_or_else(|| Err(Box::new(Killed)))
    }
}

impl<T> TaskHandle<T> {
    fn take_result(&self) -> Option<thread::Result<T>> {
        self.result.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// A channel or a lock that simulated threads wait for.
#[derive(Debug)]
pub(crate) struct WaitKey {
    world: Arc<World>,
    key: u64,
}

impl WaitKey {
    /// Returns a new key, or `None` outside a simulation.
    pub fn new() -> Option<Self> {
        let task = current()?;
        let key = task.world.lock().new_key();
        Some(Self { world: task.world, key })
    }

    /// Lets the threads run that wait for this key.
    pub fn wake(&self) {
        self.world.lock().wake(self.key);
    }

    /// Waits until `poll` returns a value. Returns `None` after `timeout`, or if the process was killed and this thread ends.
    pub fn wait_until<R>(&self, timeout: Option<Duration>, mut poll: impl FnMut() -> Option<R>) -> Option<R> {
        let task = current()?;
        task.poll(timeout, |_| poll().ok_or(self.key)).ok().flatten()
    }

    /// Like [`wait_until`](Self::wait_until) without a timeout, also while the threads of a killed process end.
    pub fn wait_to_the_end<R>(&self, mut poll: impl FnMut() -> Option<R>) -> Option<R> {
        let task = current()?;
        if let Ok(found) = task.poll(None, |_| poll().ok_or(self.key)) {
            return found;
        }
        let mut state = task.world.lock();
        loop {
            if let Some(found) = poll() {
                return Some(found);
            }
            state = task.wait(state, self.key, None);
        }
    }
}
