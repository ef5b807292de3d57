//! Checks before the first step that all ranks have the same program, settings and data, and that each has its own GPU.

use crate::fingerprint::{self, ShardFingerprint};
use crate::sidecar::Identity;
use anyhow::{Context, bail};
use distributed::fault::Fault;
use distributed::tcp_group::TcpGroup;
use engine::Result;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::fs::File;
use std::io::Read;
use std::sync::OnceLock;
use xxhash_rust::xxh3::Xxh3;

/// The properties of a rank that are compared.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RankInfo {
    /// Hash of the program file.
    build: String,
    config: Map<String, Value>,
    train: Vec<ShardFingerprint>,
    val: Option<Vec<ShardFingerprint>>,
    /// UUID of the GPU.
    gpu: Option<String>,
    /// Version of NCCL, or why it cannot be loaded. `None` without a GPU.
    nccl: Option<String>,
}

impl RankInfo {
    /// Returns the properties of this rank. `gpu` is the UUID of its GPU.
    pub fn new(identity: &Identity, gpu: Option<String>) -> Result<Self> {
        let Identity { config, train, val, .. } = identity.clone();
        Ok(Self { train, val, ..Self::without_data(config, gpu)? })
    }

    /// Returns the properties of a rank that reads no data.
    pub fn without_data(config: Map<String, Value>, gpu: Option<String>) -> Result<Self> {
        let version = || nccl_rs::find().map_or_else(|error| error.to_string(), |(_, version)| version.to_string());
        let nccl = gpu.is_some().then(version);
        Ok(Self { build: build_hash()?, config, train: Vec::new(), val: None, gpu, nccl })
    }

    /// Describes the first difference of `other` from `self`, which is rank 0.
    fn difference(&self, other: &Self) -> Option<String> {
        if self.build != other.build {
            let (a, b) = (&self.build, &other.build);
            return Some(format!("expected program build {a} as on rank 0, found {b}; install one build on all hosts"));
        }
        let mut keys: Vec<&String> = self.config.keys().chain(other.config.keys()).collect();
        keys.retain(|key| self.config.get(*key) != other.config.get(*key));
        if let Some(key) = keys.first() {
            let value = |config: &Map<String, Value>| match config.get(*key) {
                None => "none".to_owned(),
                Some(Value::String(text)) => text.clone(),
                Some(value) => value.to_string(),
            };
            let (a, b) = (value(&self.config), value(&other.config));
            return Some(format!("expected --{key} {a} as on rank 0, found {b}; start all ranks with the same flags"));
        }
        if self.nccl != other.nccl {
            let [a, b] = [self, other].map(|facts| facts.nccl.as_deref().unwrap_or("none"));
            return Some(format!(
                "expected NCCL {a} as on rank 0, found {b}; install one version on all hosts, or set LD_LIBRARY_PATH"
            ));
        }
        let data = |what, a: &[ShardFingerprint], b: &[ShardFingerprint]| {
            fingerprint::difference(a, b).map(|[a, b]| {
                format!("expected {what} data {a} as on rank 0, found {b}; give all ranks the same files")
            })
        };
        data("training", &self.train, &other.train)
            .or_else(|| data("validation", self.val.as_deref().unwrap_or(&[]), other.val.as_deref().unwrap_or(&[])))
    }
}

/// Returns a hash of the program file, which is read once.
fn build_hash() -> Result<String> {
    static HASH: OnceLock<String> = OnceLock::new();
    if let Some(hash) = HASH.get() {
        return Ok(hash.clone());
    }
    let cannot = "cannot read the program file to compare it with that of other ranks";
    let mut file = std::env::current_exe().and_then(File::open).context(cannot)?;
    let (mut hash, mut buffer) = (Xxh3::new(), vec![0; 1 << 20]);
    loop {
        match file.read(&mut buffer).context(cannot)? {
            0 => return Ok(HASH.get_or_init(|| format!("{:016x}", hash.digest())).clone()),
            n => hash.update(&buffer[..n]),
        }
    }
}

/// Compares all ranks with rank 0, and checks that no two ranks have the same GPU. A mismatch ends the run on all ranks.
pub fn check_ranks(group: &mut TcpGroup, info: &RankInfo) -> Result<()> {
    let all = group.gather(&serde_json::to_vec(info)?)?;
    let all: Vec<RankInfo> = all.iter().map(|info| serde_json::from_slice(info)).collect::<Result<_, _>>()?;
    if let Some(text) = mismatch(group, &all) {
        bail!(Fault::Startup(text));
    }
    // No rank continues before rank 0 has compared all ranks.
    group.any_rank(false).map(|_| ())
}

fn mismatch(group: &TcpGroup, all: &[RankInfo]) -> Option<String> {
    let zero = all.first()?;
    for (rank, info) in all.iter().enumerate() {
        if let Some(difference) = zero.difference(info) {
            return Some(format!("{}: {difference}", group.peer_name(rank)));
        }
        let shared =
            info.gpu.as_ref().and_then(|gpu| all[..rank].iter().position(|other| other.gpu.as_ref() == Some(gpu)));
        if let Some(other) = shared {
            return Some(format!(
                "{} and {}: expected one GPU each, found the same GPU {}; start at most one rank per GPU of a host, and make \
                 all GPUs or only its own visible to each rank (CUDA_VISIBLE_DEVICES, --local-rank)",
                group.peer_name(other),
                group.peer_name(rank),
                info.gpu.as_deref().unwrap_or_default()
            ));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::thread;
    use std::time::Duration;

    fn info() -> RankInfo {
        let Value::Object(config) = json!({"lr": 0.001, "out": "run"}) else { unreachable!() };
        let shard = ShardFingerprint { name: "train_0.bin".into(), tokens: 900, xxh3: "ab".into(), mask: None };
        RankInfo { build: build_hash().unwrap(), config, train: vec![shard], val: None, gpu: None, nccl: None }
    }

    /// Compares three ranks after `change`, and returns the error message of each.
    fn errors(change: impl Fn(usize, &mut RankInfo) + Sync) -> Vec<Option<String>> {
        let change = &change;
        thread::scope(|scope| {
            let groups = TcpGroup::in_process(3, Duration::from_secs(20)).unwrap();
            let compare = move |mut group: TcpGroup| {
                let mut info = info();
                change(group.rank, &mut info);
                check_ranks(&mut group, &info).err().map(|error| group.abort_run(error).to_string())
            };
            let threads: Vec<_> = groups.into_iter().map(|group| scope.spawn(move || compare(group))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    #[test]
    fn equal_ranks_pass() {
        assert_eq!(errors(|_, _| {}), [None, None, None]);
        assert_eq!(errors(|rank, info| info.gpu = Some(format!("GPU-{rank}"))), [None, None, None]);
    }

    type Change = fn(&mut RankInfo);

    #[test]
    fn a_difference_is_reported_with_its_rank_on_all_ranks() {
        let changes: [(Change, &str); 6] = [
            (
                |f| f.nccl = Some("2.18.5".into()),
                "rank 2: expected NCCL none as on rank 0, found 2.18.5; install one version on all hosts",
            ),
            (|f| f.build = "0".into(), "rank 2: expected program build "),
            (
                |f| drop(f.config.insert("lr".into(), json!(0.1))),
                "rank 2: expected --lr 0.001 as on rank 0, found 0.1; start all",
            ),
            (|f| drop(f.config.remove("out")), "rank 2: expected --out run as on rank 0, found none; start all ranks"),
            (
                |f| f.train[0].tokens = 800,
                "rank 2: expected training data train_0.bin (900 tokens, hash ab) as on rank 0, found train_0.bin (800",
            ),
            (
                |f| f.val = Some(f.train.clone()),
                "rank 2: expected validation data 0 files with 0 tokens as on rank 0, found 1 files",
            ),
        ];
        for (change, expected) in changes {
            let texts = errors(|rank, info| {
                if rank == 2 {
                    change(info);
                }
            });
            assert!(texts[0].as_ref().unwrap().starts_with(expected), "{texts:?}");
            assert!(texts.iter().all(|text| *text == texts[0]), "{texts:?}");
        }
    }

    #[test]
    fn two_ranks_on_one_gpu_are_refused() {
        let texts = errors(|rank, info| info.gpu = Some(format!("GPU-{}", rank.min(1))));
        let expected =
            "rank 1 and rank 2: expected one GPU each, found the same GPU GPU-1; start at most one rank per GPU";
        assert!(texts[0].as_ref().unwrap().starts_with(expected) && texts[1] == texts[0], "{texts:?}");
    }
}
