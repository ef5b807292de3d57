//! The NVIDIA GPUs of the machine that builds.

use std::path::Path;
use std::process::Command;

use crate::module::arch_number;

/// Files that exist on a machine with an NVIDIA GPU and its driver: on Linux, and on WSL.
const DEVICES: [&str; 2] = ["/dev/nvidiactl", "/dev/dxg"];

/// Returns whether this machine has an NVIDIA GPU.
pub fn exist() -> bool {
    DEVICES.iter().any(|device| Path::new(device).exists())
}

/// Returns the compute capability of each GPU of this machine, such as 90: none without a GPU, and `None` if it is unknown.
pub fn local() -> Option<Vec<u32>> {
    if !exist() {
        return Some(Vec::new());
    }
    let query = ["--query-gpu=compute_cap", "--format=csv,noheader"];
    let output = Command::new("nvidia-smi").args(query).output().ok().filter(|output| output.status.success())?;
    capabilities(&String::from_utf8_lossy(&output.stdout))
}

/// Parses lines such as `9.0`.
fn capabilities(text: &str) -> Option<Vec<u32>> {
    let capability = |line: &str| {
        let (major, minor) = line.trim().split_once('.')?;
        Some(10 * major.parse::<u32>().ok()? + minor.parse::<u32>().ok()?)
    };
    let capabilities = text.lines().map(capability).collect::<Option<Vec<_>>>()?;
    (!capabilities.is_empty()).then_some(capabilities)
}

/// Returns the architectures of `archs` that are the newest ones for a GPU, in their order. All of them if the GPUs are unknown, or if one
/// of them can run none.
pub fn archs_for<'a>(archs: &[&'a str], gpus: Option<&[u32]>) -> Vec<&'a str> {
    let newest = |gpu: u32| {
        // Code for an architecture with a suffix runs on no later one.
        let runs = |arch: &str| match arch_number(arch) {
            Some(number) if arch.ends_with(['a', 'f']) => number == gpu,
            number => number.is_some_and(|number| number <= gpu),
        };
        archs.iter().copied().filter(|arch| runs(arch)).max_by_key(|arch| arch_number(arch))
    };
    let wanted = gpus.and_then(|gpus| gpus.iter().map(|&gpu| newest(gpu)).collect::<Option<Vec<_>>>());
    archs.iter().copied().filter(|arch| wanted.as_ref().is_none_or(|wanted| wanted.contains(arch))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_gpu_selects_its_newest_architecture() {
        let archs = ["sm_80", "sm_89", "sm_90a"];
        let select = |gpus: Option<&[u32]>| archs_for(&archs, gpus);
        assert!(select(Some(&[])).is_empty());
        assert_eq!(select(Some(&[90, 90])), ["sm_90a"]);
        assert_eq!(select(Some(&[86])), ["sm_80"]);
        assert_eq!(select(Some(&[80, 90])), ["sm_80", "sm_90a"]);
        // Code for sm_90a runs on compute capability 9.0 only.
        for gpu in [89, 100, 120] {
            assert_eq!(select(Some(&[gpu])), ["sm_89"], "{gpu}");
        }
        for all in [Some(&[80, 89, 90][..]), Some(&[75]), None] {
            assert_eq!(select(all), archs, "{all:?}");
        }
    }

    #[test]
    fn capabilities_that_cannot_be_parsed_are_unknown() {
        assert_eq!(capabilities("9.0\n8.6\n"), Some(vec![90, 86]));
        for text in ["", "[N/A]\n", "9.0\nno devices"] {
            assert_eq!(capabilities(text), None, "{text}");
        }
    }
}
