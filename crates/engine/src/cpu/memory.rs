//! Available host memory.

use std::fs;

/// Returns the bytes that can be allocated without swapping: the minimum of the kernel's estimate and the control group's
/// remaining limit. Returns `usize::MAX` where neither is known (not Linux).
pub(super) fn free() -> usize {
    let available = fs::read_to_string("/proc/meminfo").ok().and_then(|text| available(&text));
    let group = fs::read_to_string("/sys/fs/cgroup/memory.max")
        .ok()
        .zip(fs::read_to_string("/sys/fs/cgroup/memory.current").ok())
        .and_then(|(max, current)| allowed(&max, &current));
    available.unwrap_or(usize::MAX).min(group.unwrap_or(usize::MAX))
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
    fn available_memory_is_parsed_from_linux_files() {
        let meminfo = "MemTotal:       24683964 kB\nMemFree:        1 kB\nMemAvailable:   23000000 kB\n";
        assert_eq!(available(meminfo), Some(23_000_000 * 1024));
        assert_eq!(available("MemTotal: 5 kB"), None);
        assert_eq!(allowed("1000\n", "400\n"), Some(600));
        assert_eq!(allowed("1000\n", "4000\n"), Some(0));
        assert_eq!(allowed("max\n", "400\n"), None);
    }
}
