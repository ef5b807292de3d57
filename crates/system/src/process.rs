//! The number of a process, its end, and what it prints.

use crate::simulation;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::io::{self, IsTerminal, Write, stderr, stdout};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

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

/// Writes to a file descriptor whose reader may have stopped reading.
fn write_within(fd: impl AsFd, mut bytes: &[u8], timeout: Duration) -> io::Result<()> {
    // POSIX's PIPE_BUF on Linux: a pipe that is ready takes as many bytes at once.
    const PIECE: usize = 4096;
    let timeout = Timespec::try_from(timeout).map_err(io::Error::other)?;
    while !bytes.is_empty() {
        match poll(&mut [PollFd::new(&fd, PollFlags::OUT)], Some(&timeout)) {
            Ok(0) => {
                let seconds = timeout.tv_sec;
                return Err(io::Error::new(
                    io::ErrorKind::TimedOut,
                    format!("no data was read from it for {seconds} s"),
                ));
            }
            Ok(_) => {}
            Err(Errno::INTR) => continue,
            Err(error) => return Err(error.into()),
        }
        match rustix::io::write(&fd, &bytes[..bytes.len().min(PIECE)]) {
            Ok(written) => bytes = &bytes[written..],
            // Another process may have filled a pipe that does not block.
            Err(Errno::INTR | Errno::AGAIN) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
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

/// Writes a line to standard error like [`print_error()`], unless its reader reads nothing for `timeout`. Does not wait for a thread that
/// writes to standard error.
pub fn print_error_within(line: &str, timeout: Duration) {
    match simulation::current() {
        Some(task) => task.print(line, true),
        None => {
            let _ = write_within(rustix::stdio::stderr(), format!("{line}\n").as_bytes(), timeout);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::pipe::pipe;
    use std::io::Read;
    use std::time::Instant;

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
