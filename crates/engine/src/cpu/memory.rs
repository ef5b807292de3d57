//! Available host memory.

use anyhow::{Context, Result};
use rustix::process::Resource;
use std::fs;

/// Address space for everything but tensors when the process has a limit: code, stacks of threads, buffers of readers.
const RESERVED_ADDRESSES: usize = 256 << 20;

/// Returns the bytes that can be allocated without swapping: the minimum of the kernel's estimate, the control group's
/// remaining limit and the limit of the process's address space (`ulimit -v`). Returns `usize::MAX` where none is known (not
/// Linux).
pub fn free() -> usize {
    let available = fs::read_to_string("/proc/meminfo").ok().and_then(|text| available(&text));
    let group = fs::read_to_string("/sys/fs/cgroup/memory.max")
        .ok()
        .zip(fs::read_to_string("/sys/fs/cgroup/memory.current").ok())
        .and_then(|(max, current)| allowed(&max, &current));
    available.unwrap_or(usize::MAX).min(group.unwrap_or(usize::MAX)).min(addresses())
}

/// Returns the address space that is left for tensors.
fn addresses() -> usize {
    let Some(limit) = rustix::process::getrlimit(Resource::As).current else { return usize::MAX };
    let statm = fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let used = statm.split_whitespace().next().and_then(|pages| pages.parse::<usize>().ok()).unwrap_or(0);
    let used = used.saturating_mul(rustix::param::page_size());
    usize::try_from(limit).unwrap_or(usize::MAX).saturating_sub(used).saturating_sub(RESERVED_ADDRESSES)
}

/// Allocates zeros, or fails if the memory is not available.
pub(super) fn zeros<T: bytemuck::Zeroable>(len: usize) -> Result<Vec<T>> {
    bytemuck::allocation::try_zeroed_vec(len).ok().with_context(|| {
        format!("memory: cannot allocate {} MiB; use a smaller model, batch or sequence", (len * size_of::<T>()) >> 20)
    })
}

/// Returns the `MemAvailable:   12345 kB` of /proc/meminfo in bytes.
fn available(meminfo: &str) -> Option<usize> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.split_whitespace().next()?.parse::<usize>().ok()?.checked_mul(1024)
}

/// Returns the remaining bytes of a control group's limit; `max` means no limit.
fn allowed(max: &str, current: &str) -> Option<usize> {
    let max = max.trim().parse::<usize>().ok()?;
    Some(max.saturating_sub(current.trim().parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_allocation_that_fails_is_an_error() {
        assert!(zeros::<f32>(1000).unwrap().iter().all(|&x| x == 0.0));
        let error = zeros::<f32>(usize::MAX / 8).unwrap_err().to_string();
        assert!(error.starts_with("memory: cannot allocate "), "{error}");
    }

    #[test]
    fn available_memory_is_parsed_from_linux_files() {
        let meminfo = "MemTotal:       24683964 kB\nMemFree:        1 kB\nMemAvailable:   23000000 kB\n";
        assert_eq!(available(meminfo), Some(23_000_000 * 1024));
        assert_eq!(available("MemTotal: 5 kB"), None);
        assert_eq!(allowed("1000\n", "400\n"), Some(600));
        assert_eq!(allowed("1000\n", "4000\n"), Some(0));
        assert_eq!(allowed("max\n", "400\n"), None);
    }
}
