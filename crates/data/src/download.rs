//! Downloads of files, which resume after an interruption and are checked.
//!
//! A download fills `FILE.partial`, which becomes `FILE` when it is complete and has the right size and checksum.

mod huggingface;
#[cfg(test)]
mod tests;

pub use huggingface::files as huggingface_files;

use anyhow::{Context, Error, Result, anyhow, bail, ensure};
use sha2::{Digest, Sha256};
use std::ffi::OsString;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;
use system::progress::{self, Progress, Unit};
use ureq::http::{Response, StatusCode, header};
use ureq::{Agent, Body};

/// Number of consecutive attempts without any new bytes before a download fails.
const ATTEMPTS: u32 = 4;
/// Pause before the second attempt. It doubles with each attempt.
const PAUSE: Duration = Duration::from_secs(1);
const TIMEOUT: Duration = Duration::from_mins(1);

/// A file to download.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Remote {
    /// Address.
    pub url: String,
    /// Size, if it is known.
    pub bytes: Option<u64>,
    /// SHA-256 in hexadecimal, if it is known.
    pub sha256: Option<String>,
}

impl Remote {
    /// Creates a remote file with a known SHA-256.
    pub fn with_sha256(url: &str, sha256: &str) -> Self {
        Self { url: url.to_owned(), bytes: None, sha256: Some(sha256.to_owned()) }
    }

    /// Returns the name of the file.
    pub fn name(&self) -> &str {
        self.url.rsplit('/').next().unwrap_or_default()
    }
}

/// Downloads a file to `to`, unless it exists. An earlier, interrupted download is resumed.
///
/// `from` is the value of `--from` in error messages, `FILE` or `DIR`.
pub fn file(remote: &Remote, to: &Path, from: &str) -> Result<()> {
    with_pause(remote, to, PAUSE).with_context(|| without_network(&remote.url, from))
}

fn without_network(url: &str, from: &str) -> String {
    format!("cannot download {url}; without a network connection, pass a local copy with --from {from}")
}

fn with_pause(remote: &Remote, to: &Path, pause: Duration) -> Result<()> {
    if fs::metadata(to).is_ok_and(|found| found.is_file() && remote.bytes.is_none_or(|bytes| bytes == found.len())) {
        return Ok(());
    }
    atomic_file::create_directory(atomic_file::parent(to))?;
    let partial = partial_path(to);
    let cannot_write = || format!("cannot write {}", partial.display());
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false);
    let mut file = options.open(&partial).with_context(cannot_write)?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            bail!("{}: expected one download of this file, found another process; wait for it", partial.display())
        }
        Err(TryLockError::Error(error)) => return Err(error).with_context(cannot_write),
    }
    let fetched = fetch(remote, &mut file, pause);
    let size = file.metadata().with_context(cannot_write)?.len();
    if size == 0 && fetched.is_err() {
        fs::remove_file(&partial).with_context(cannot_write)?;
    }
    fetched.with_context(|| match size {
        0 => "nothing was received".to_owned(),
        _ => format!("{size} bytes are kept in {}; the same command resumes the download", partial.display()),
    })?;
    if let Err(error) = verify(remote, &mut file, size) {
        fs::remove_file(&partial).with_context(cannot_write)?;
        return Err(error);
    }
    file.sync_all().with_context(cannot_write)?;
    fs::rename(&partial, to).with_context(|| format!("cannot write {}", to.display()))
}

/// Returns the path of an incomplete download.
fn partial_path(to: &Path) -> PathBuf {
    let mut name = OsString::from(to);
    name.push(".partial");
    name.into()
}

/// The reason why an attempt failed.
enum Failure {
    /// Another attempt may succeed.
    Transient(Error),
    Permanent(Error),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Permanent(error)
    }
}

/// Downloads the rest of a file, with several attempts.
fn fetch(remote: &Remote, file: &mut File, pause: Duration) -> Result<()> {
    let agent = agent(TIMEOUT);
    let mut attempt = 1;
    loop {
        let start = file.metadata()?.len();
        if start > 0 && remote.bytes == Some(start) {
            return Ok(());
        }
        match try_fetch(&agent, remote, file, start) {
            Ok(()) => return Ok(()),
            Err(Failure::Permanent(error)) => return Err(error),
            Err(Failure::Transient(error)) => {
                let end = file.metadata()?.len();
                if end > start {
                    attempt = 1;
                } else if attempt == ATTEMPTS {
                    return Err(error);
                }
                thread::sleep(pause * (1 << (attempt - 1)));
                attempt += 1;
            }
        }
    }
}

/// Returns a client that fails if it receives nothing for the time `timeout`.
fn agent(timeout: Duration) -> Agent {
    let config = Agent::config_builder()
        .http_status_as_error(false)
        .timeout_connect(Some(timeout))
        .timeout_recv_response(Some(timeout))
        .timeout_per_read(Some(timeout));
    config.build().new_agent()
}

fn try_fetch(agent: &Agent, remote: &Remote, file: &mut File, start: u64) -> Result<(), Failure> {
    let mut request = agent.get(&remote.url);
    if start > 0 {
        request = request.header(header::RANGE, format!("bytes={start}-"));
    }
    let response = request.call().map_err(|error| match error {
        error @ ureq::Error::BadUri(_) => Failure::Permanent(error.into()),
        error => Failure::Transient(error.into()),
    })?;
    let range = content_range(&response);
    let (start, total) = match response.status() {
        StatusCode::OK => (0, content_length(&response)),
        StatusCode::PARTIAL_CONTENT if range.start == Some(start) => (start, range.total),
        // The partial file is complete, or belongs to an older version of the file.
        StatusCode::RANGE_NOT_SATISFIABLE if start > 0 && range.total == Some(start) => return Ok(()),
        StatusCode::RANGE_NOT_SATISFIABLE | StatusCode::PARTIAL_CONTENT if start > 0 => {
            truncate(file, 0)?;
            return Err(Failure::Transient(anyhow!("the server cannot resume at byte {start}")));
        }
        status => {
            let error = anyhow!("expected status 200 (OK), found {status}");
            let is_transient = status.is_server_error() || [408, 429].contains(&status.as_u16());
            return Err(if is_transient { Failure::Transient(error) } else { Failure::Permanent(error) });
        }
    };
    if let (Some(expected), Some(total)) = (remote.bytes, total)
        && expected != total
    {
        return Err(Failure::Permanent(anyhow!("expected a file of {expected} bytes, found {total} bytes")));
    }
    truncate(file, start)?;
    receive(response, remote.name(), file, start, total)
}

/// Removes the bytes from `size` on, and moves to the end.
fn truncate(file: &mut File, size: u64) -> Result<()> {
    file.set_len(size)?;
    file.seek(SeekFrom::Start(size))?;
    Ok(())
}

/// Appends the body of a response to a file of `received` bytes.
fn receive(
    response: Response<Body>,
    name: &str,
    file: &mut File,
    mut received: u64,
    total: Option<u64>,
) -> Result<(), Failure> {
    let progress = progress::start_unbounded(name, Unit::Bytes, total.map(|total| total.saturating_sub(received)));
    let mut body = response.into_body().into_reader();
    let mut buffer = vec![0; 1 << 16];
    loop {
        let transferred = body.read(&mut buffer).context("the connection failed");
        let n = transferred.map_err(Failure::Transient)?;
        if n == 0 {
            break;
        }
        file.write_all(&buffer[..n]).map_err(|error| anyhow!("cannot write the file: {error}"))?;
        received += n as u64;
        progress.add(n as u64);
    }
    match total {
        Some(total) if received != total => {
            Err(Failure::Transient(anyhow!("the connection ended after {received} of {total} bytes")))
        }
        _ => Ok(()),
    }
}

fn content_length(response: &Response<Body>) -> Option<u64> {
    response.headers().get(header::CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

/// The header `Content-Range`: `bytes START-END/TOTAL` or `bytes */TOTAL`.
#[derive(Default)]
struct ContentRange {
    start: Option<u64>,
    total: Option<u64>,
}

fn content_range(response: &Response<Body>) -> ContentRange {
    let value = response.headers().get(header::CONTENT_RANGE).and_then(|value| value.to_str().ok());
    let Some((range, total)) = value.and_then(|value| value.strip_prefix("bytes ")?.split_once('/')) else {
        return ContentRange::default();
    };
    let start = range.split_once('-').and_then(|(start, _)| start.parse().ok());
    ContentRange { start, total: total.parse().ok() }
}

/// Checks the size and the checksum of a complete download.
fn verify(remote: &Remote, file: &mut File, size: u64) -> Result<()> {
    if let Some(expected) = remote.bytes {
        ensure!(size == expected, "expected {expected} bytes, found {size} bytes; the download was discarded");
    }
    let Some(expected) = &remote.sha256 else { return Ok(()) };
    file.seek(SeekFrom::Start(0))?;
    let found = sha256(file, &progress::start("verifying", Unit::Bytes, size))?;
    ensure!(
        found.eq_ignore_ascii_case(expected),
        "expected SHA-256 {expected}, found {found}; the download was discarded, because the file was damaged or has changed"
    );
    Ok(())
}

/// Returns the SHA-256 of the input in hexadecimal.
fn sha256(input: &mut impl Read, progress: &Progress) -> Result<String> {
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        let n = input.read(&mut buffer)?;
        progress.add(n as u64);
        if n == 0 {
            let digits = hash.finalize();
            return Ok(digits.iter().fold(String::new(), |text, byte| text + &format!("{byte:02x}")));
        }
        hash.update(&buffer[..n]);
    }
}
