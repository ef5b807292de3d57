//! Whether the ranks belong together: one program, the same settings and data, a GPU for each.

use crate::fingerprint::{self, Shard};
use crate::sidecar::Identity;
use anyhow::{Context, bail};
use distributed::fault::Fault;
use distributed::star::Star;
use engine::Result;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::fs::File;
use std::io::Read;
use xxhash_rust::xxh3::Xxh3;

/// What a rank says of itself.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Facts {
    /// Of the program's file.
    build: String,
    config: Map<String, Value>,
    train: Vec<Shard>,
    val: Option<Vec<Shard>>,
    /// The GPU's own number, unlike any other's in the world.
    gpu: Option<String>,
    /// What connects GPUs, or why it cannot; nothing where there are none.
    nccl: Option<String>,
}

impl Facts {
    pub fn new(identity: &Identity, gpu: Option<String>) -> Result<Self> {
        let Identity { config, train, val, .. } = identity.clone();
        Ok(Self { train, val, ..Self::of_settings(config, gpu)? })
    }

    /// Of ranks that read no data.
    pub fn of_settings(config: Map<String, Value>, gpu: Option<String>) -> Result<Self> {
        let version = || nccl_rs::find().map_or_else(|error| error.to_string(), |(_, version)| version.to_string());
        let nccl = gpu.is_some().then(version);
        Ok(Self { build: build()?, config, train: Vec::new(), val: None, gpu, nccl })
    }

    /// What of `other` is not as here.
    fn difference(&self, other: &Self) -> Option<String> {
        if self.build != other.build {
            let (a, b) = (&self.build, &other.build);
            return Some(format!("runs another build of the program, {b}, than rank 0, {a}: install one on all hosts"));
        }
        let mut keys: Vec<&String> = self.config.keys().chain(other.config.keys()).collect();
        keys.retain(|key| self.config.get(*key) != other.config.get(*key));
        if let Some(key) = keys.first() {
            let tell = |config: &Map<String, Value>| match config.get(*key) {
                None => "none".to_owned(),
                Some(Value::String(text)) => text.clone(),
                Some(value) => value.to_string(),
            };
            let (a, b) = (tell(&self.config), tell(&other.config));
            return Some(format!("has --{key} {b}, rank 0 has {a}: start all ranks with the same flags"));
        }
        if self.nccl != other.nccl {
            let [a, b] = [self, other].map(|facts| facts.nccl.as_deref().unwrap_or("none"));
            return Some(format!(
                "has NCCL {b}, rank 0 has {a}: install one on all hosts, or set LD_LIBRARY_PATH to it"
            ));
        }
        let data = |what, a: &[Shard], b: &[Shard]| {
            fingerprint::difference(a, b).map(|difference| {
                format!(
                    "reads other {what} data than rank 0: there it {difference} here; give all ranks the same files"
                )
            })
        };
        data("training", &self.train, &other.train)
            .or_else(|| data("validation", self.val.as_deref().unwrap_or(&[]), other.val.as_deref().unwrap_or(&[])))
    }
}

/// A hash of the file of this program.
fn build() -> Result<String> {
    let cannot = "cannot read this program's own file, to compare it with that of other ranks";
    let mut file = std::env::current_exe().and_then(File::open).context(cannot)?;
    let (mut hash, mut buffer) = (Xxh3::new(), vec![0; 1 << 20]);
    loop {
        match file.read(&mut buffer).context(cannot)? {
            0 => return Ok(format!("{:016x}", hash.digest())),
            n => hash.update(&buffer[..n]),
        }
    }
}

/// Compares all ranks with rank 0, and their GPUs with each other. What does not fit ends the run on all.
pub fn agree(star: &mut Star, facts: &Facts) -> Result<()> {
    let all = star.gather(&serde_json::to_vec(facts)?)?;
    let all: Vec<Facts> = all.iter().map(|facts| serde_json::from_slice(facts)).collect::<Result<_, _>>()?;
    if let Some(text) = disagreement(star, &all) {
        bail!(Fault::Start(text));
    }
    // Nobody goes on before rank 0 has found nothing.
    star.any(false).map(|_| ())
}

fn disagreement(star: &Star, all: &[Facts]) -> Option<String> {
    let zero = all.first()?;
    for (rank, facts) in all.iter().enumerate() {
        if let Some(difference) = zero.difference(facts) {
            return Some(format!("{} {difference}", star.who(rank)));
        }
        let shared =
            facts.gpu.as_ref().and_then(|gpu| all[..rank].iter().position(|other| other.gpu.as_ref() == Some(gpu)));
        if let Some(other) = shared {
            return Some(format!(
                "{} and {} have one GPU, {}: start no more ranks on a host than it has GPUs, and let each see all of them or \
                 one of its own (CUDA_VISIBLE_DEVICES, --local-rank)",
                star.who(other),
                star.who(rank),
                facts.gpu.as_deref().unwrap_or_default()
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

    fn facts() -> Facts {
        let Value::Object(config) = json!({"lr": 0.001, "out": "run"}) else { unreachable!() };
        let shard = Shard { name: "train_0.bin".into(), tokens: 900, xxh3: "ab".into() };
        Facts { build: build().unwrap(), config, train: vec![shard], val: None, gpu: None, nccl: None }
    }

    /// What each of three ranks hears.
    fn outcome(of: impl Fn(usize, &mut Facts) + Sync) -> Vec<Option<String>> {
        let of = &of;
        thread::scope(|scope| {
            let stars = Star::in_process(3, Duration::from_secs(20)).unwrap();
            let agreed = move |mut star: Star| {
                let mut facts = facts();
                of(star.rank, &mut facts);
                agree(&mut star, &facts).err().map(|error| star.give_up(error).to_string())
            };
            let threads: Vec<_> = stars.into_iter().map(|star| scope.spawn(move || agreed(star))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    #[test]
    fn ranks_that_are_alike_agree() {
        assert_eq!(outcome(|_, _| {}), [None, None, None]);
        assert_eq!(outcome(|rank, facts| facts.gpu = Some(format!("GPU-{rank}"))), [None, None, None]);
    }

    type Change = fn(&mut Facts);

    #[test]
    fn what_differs_is_named_with_its_rank_on_all() {
        let changes: [(Change, &str); 6] = [
            (|f| f.nccl = Some("2.18.5".into()), "rank 2 has NCCL 2.18.5, rank 0 has none: install one on all hosts"),
            (|f| f.build = "0".into(), "rank 2 runs another build of the program, 0, than rank 0"),
            (|f| drop(f.config.insert("lr".into(), json!(0.1))), "rank 2 has --lr 0.1, rank 0 has 0.001: start all"),
            (|f| drop(f.config.remove("out")), "rank 2 has --out none, rank 0 has run: start all ranks"),
            (
                |f| f.train[0].tokens = 800,
                "rank 2 reads other training data than rank 0: there it was train_0.bin (900",
            ),
            (|f| f.val = Some(f.train.clone()), "rank 2 reads other validation data than rank 0"),
        ];
        for (change, expected) in changes {
            let texts = outcome(|rank, facts| {
                if rank == 2 {
                    change(facts);
                }
            });
            assert!(texts[0].as_ref().unwrap().starts_with(expected), "{texts:?}");
            assert!(texts.iter().all(|text| *text == texts[0]), "{texts:?}");
        }
    }

    #[test]
    fn a_gpu_has_one_rank() {
        let texts = outcome(|rank, facts| facts.gpu = Some(format!("GPU-{}", rank.min(1))));
        let expected = "rank 1 and rank 2 have one GPU, GPU-1: start no more ranks on a host than it has GPUs";
        assert!(texts[0].as_ref().unwrap().starts_with(expected) && texts[1] == texts[0], "{texts:?}");
    }
}
