//! The number of a process, its end, and what it prints.

use crate::simulation;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::io::{self, IsTerminal, Write, stderr, stdout};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Returns the number of this process.
pub fn id() -> u32 {
    // With as many digits for each rank.
    simulation::current().map_or_else(std::process::id, |task| 1000 + task.process() as u32)
}

/// Returns a number that this process has not got before.
pub fn next_number() -> u64 {
    static NUMBERS: AtomicU64 = AtomicU64::new(0);
    simulation::current().map_or_else(|| NUMBERS.fetch_add(1, Ordering::Relaxed), |task| task.next_number())
}

/// Exits without running destructors or exit handlers, because they may block.
pub fn exit(code: u8) -> ! {
    if let Some(task) = simulation::current() {
        task.exit(code);
    }
    signal_hook::low_level::exit(code.into())
}

/// Whether the process was started without a standard output.
static STARTED_WITHOUT_STDOUT: AtomicBool = AtomicBool::new(false);

/// Notes whether standard output is closed. A program must call it before `main`, as an entry of `.init_array`: Rust's runtime then
/// opens `/dev/null` in place of closed streams, and output would be lost without an error.
pub extern "C" fn note_closed_stdout() {
    let is_closed = rustix::io::fcntl_getfd(rustix::stdio::stdout()) == Err(Errno::BADF);
    STARTED_WITHOUT_STDOUT.store(is_closed, Ordering::Relaxed);
}

/// Writes a line to standard output. Fails if the process was started without one.
pub fn print(line: &str) -> io::Result<()> {
    if let Some(task) = simulation::current() {
        task.print(line, false);
        return Ok(());
    }
    check_stdout()?;
    writeln!(stdout(), "{line}")
}

/// Writes a line to standard output like [`print()`]. Fails with `TimedOut` if its reader reads nothing for `timeout`. A part of the
/// line may then be written.
pub fn print_within(line: &str, timeout: Duration) -> io::Result<()> {
    if simulation::current().is_some() {
        return print(line);
    }
    check_stdout()?;
    let mut stdout = stdout().lock();
    stdout.flush()?;
    write_within(rustix::stdio::stdout(), format!("{line}\n").as_bytes(), timeout)
}

fn check_stdout() -> io::Result<()> {
    if STARTED_WITHOUT_STDOUT.load(Ordering::Relaxed) { Err(Errno::BADF.into()) } else { Ok(()) }
}

/// Writes to a file descriptor. Fails with `TimedOut` if its reader reads nothing for `timeout`.
fn write_within(fd: impl AsFd, bytes: &[u8], timeout: Duration) -> io::Result<()> {
    match non_blocking_terminal(fd.as_fd()) {
        Some(terminal) => write_when_ready(terminal.as_fd(), bytes, timeout),
        None => write_when_ready(fd.as_fd(), bytes, timeout),
    }
}

/// Opens a terminal a second time, in non-blocking mode. `poll` reports a terminal as writable when one byte fits, and a longer write would
/// then block. The mode of `fd` itself stays, because other programs share it. Returns `None` if `fd` is no terminal or cannot be opened.
fn non_blocking_terminal(fd: BorrowedFd<'_>) -> Option<OwnedFd> {
    let flags = OFlags::WRONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let open = || rustix::fs::open(format!("/proc/self/fd/{}", fd.as_raw_fd()), flags, Mode::empty()).ok();
    fd.is_terminal().then(open).flatten()
}

fn write_when_ready(fd: BorrowedFd<'_>, mut bytes: &[u8], timeout: Duration) -> io::Result<()> {
    // POSIX's PIPE_BUF on Linux: a pipe that is ready takes as many bytes at once.
    const PIECE: usize = 4096;
    let mut progress = Instant::now();
    while !bytes.is_empty() {
        let left = Timespec::try_from(timeout.saturating_sub(progress.elapsed())).map_err(io::Error::other)?;
        match poll(&mut [PollFd::new(&fd, PollFlags::OUT)], Some(&left)) {
            Ok(0) => {
                let seconds = timeout.as_secs();
                return Err(io::Error::new(
                    io::ErrorKind::TimedOut,
                    format!("no data was read from it for {seconds} s"),
                ));
            }
            Ok(_) => {}
            Err(Errno::INTR) => continue,
            Err(error) => return Err(error.into()),
        }
        match rustix::io::write(fd, &bytes[..bytes.len().min(PIECE)]) {
            Ok(written) => (bytes, progress) = (&bytes[written..], Instant::now()),
            // Another process may have filled a pipe that does not block.
            Err(Errno::INTR | Errno::AGAIN) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// The terminal of standard error, for progress bars. Discards output while the terminal accepts none.
#[derive(Debug)]
pub struct Terminal {
    fd: OwnedFd,
    /// Time that the next write waits.
    patience: Duration,
    timeout: Duration,
}

impl Terminal {
    /// Opens the terminal. A write waits at most `timeout`. After a write has timed out, later ones do not wait, until one succeeds.
    /// Returns `None` if standard error is no terminal or cannot be opened.
    pub fn of_stderr(timeout: Duration) -> Option<Self> {
        Some(Self { fd: non_blocking_terminal(rustix::stdio::stderr())?, patience: timeout, timeout })
    }
}

impl Write for Terminal {
    /// Never fails, because indicatif panics on some write errors.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = write_when_ready(self.fd.as_fd(), bytes, self.patience);
        self.patience = if written.is_ok() { self.timeout } else { Duration::ZERO };
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl AsRawFd for Terminal {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

/// Returns whether standard output and standard error are terminals.
pub fn prints_to_terminal() -> bool {
    simulation::current().is_none() && stdout().is_terminal() && stderr().is_terminal()
}

/// Writes a line to standard error, which may be closed. In one piece, so that lines of several ranks do not mix.
pub fn print_error(line: &str) {
    match simulation::current() {
        Some(task) => task.print(line, true),
        None => {
            let _ = stderr().write_all(format!("{line}\n").as_bytes());
        }
    }
}

/// Writes a line to standard error like [`print_error()`]. Fails with `TimedOut` if its reader reads nothing for `timeout`. Does not wait for
/// a thread that writes to standard error.
pub fn print_error_within(line: &str, timeout: Duration) -> io::Result<()> {
    match simulation::current() {
        Some(task) => {
            task.print(line, true);
            Ok(())
        }
        None => write_within(rustix::stdio::stderr(), format!("{line}\n").as_bytes(), timeout),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::pipe::pipe;
    use std::io::Read;

    #[test]
    fn a_reader_that_stops_reading_is_an_error_after_the_timeout() {
        let (reader, writer) = pipe().unwrap();
        let line = vec![b'x'; 5000];
        let start = Instant::now();
        let timeout = Duration::from_millis(200);
        let error = (0..1000).find_map(|_| write_within(&writer, &line, timeout).err()).unwrap();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert!((timeout..Duration::from_secs(30)).contains(&start.elapsed()));
        // What was written is complete up to that point.
        drop(writer);
        let mut read = Vec::new();
        std::fs::File::from(reader).read_to_end(&mut read).unwrap();
        assert!(read.len() > 5000 && read.iter().all(|&byte| byte == b'x'), "{}", read.len());

        let (reader, writer) = pipe().unwrap();
        drop(reader);
        let error = write_within(&writer, b"x", timeout).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
    }
}
