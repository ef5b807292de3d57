//! `run_SSSSSSSS.json`: what llm.c's files have no room for, with a checksum of itself.

use super::Progress;
use super::fingerprint::Shard;
use crate::config::Config;
use anyhow::{Context, Result, ensure};
use engine::Algorithms;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use serde_json::{Map, Value};
use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::Path;
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

const VERSION: u32 = 1;

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Sidecar {
    pub step: usize,
    pub identity: Identity,
    pub progress: Progress,
    /// How matrix products were computed.
    pub algorithms: Option<Algorithms>,
    pub files: Vec<FileSum>,
}

/// What a run is: the same from its first step to its last, or it would be another run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Identity {
    pub program: String,
    /// As the engine describes itself.
    pub engine: String,
    /// [`Config`], kept so that it can be compared with that of another version of the program.
    pub config: Map<String, Value>,
    pub train: Vec<Shard>,
    pub val: Option<Vec<Shard>>,
    /// Processes that the data is shared out to.
    #[serde(default = "one")]
    pub ranks: usize,
}

const fn one() -> usize {
    1
}

impl Identity {
    pub fn new(
        config: &Config,
        engine: String,
        train: Vec<Shard>,
        val: Option<Vec<Shard>>,
        ranks: usize,
    ) -> Result<Self> {
        let program = concat!(env!("CARGO_PKG_NAME"), " ", env!("CARGO_PKG_VERSION")).to_owned();
        let Value::Object(mut config) = serde_json::to_value(config)? else {
            anyhow::bail!("the configuration is no table");
        };
        config.retain(|_, value| !value.is_null());
        Ok(Self { program, engine, config, train, val, ranks })
    }
}

/// A file of the checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileSum {
    pub name: String,
    pub bytes: u64,
    pub xxh3: String,
}

/// The file: `run` as it is written, and the checksum of that.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Sealed {
    version: u32,
    xxh3: String,
    run: Box<RawValue>,
}

pub fn hex(sum: u64) -> String {
    format!("{sum:016x}")
}

impl Sidecar {
    pub fn write(&self, out: &mut impl Write) -> Result<()> {
        let run = RawValue::from_string(serde_json::to_string_pretty(self)?)?;
        let sealed = Sealed { version: VERSION, xxh3: hex(xxh3_64(run.get().as_bytes())), run };
        serde_json::to_writer_pretty(&mut *out, &sealed)?;
        Ok(writeln!(out)?)
    }

    pub fn read(path: &Path) -> Result<Self> {
        let text = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
        Self::parse(&text).with_context(|| format!("{} is damaged", path.display()))
    }

    pub fn parse(text: &[u8]) -> Result<Self> {
        let Sealed { version, xxh3, run } = serde_json::from_slice(text)?;
        ensure!(version == VERSION, "expected version {VERSION}, found {version}");
        let found = hex(xxh3_64(run.get().as_bytes()));
        ensure!(found == xxh3, "expected checksum {xxh3}, found {found}");
        let mut run: Self = serde_json::from_str(run.get())?;
        // Before there was such a setting, data were shuffled.
        run.identity.config.entry("shuffle").or_insert(true.into());
        Ok(run)
    }
}

impl FileSum {
    /// Reads the whole file.
    pub fn check(&self, directory: &Path) -> Result<()> {
        let path = directory.join(&self.name);
        let name = path.display();
        let mut file = File::open(&path).with_context(|| format!("cannot open {name}"))?;
        let size = file.metadata().with_context(|| format!("cannot read {name}"))?.len();
        ensure!(size == self.bytes, "{name} is damaged: expected {} bytes, found {size}", self.bytes);
        let (mut hash, mut buffer) = (Xxh3::new(), vec![0; 1 << 20]);
        loop {
            let n = file.read(&mut buffer).with_context(|| format!("cannot read {name}"))?;
            if n == 0 {
                break;
            }
            hash.update(&buffer[..n]);
        }
        let found = hex(hash.digest());
        ensure!(found == self.xxh3, "{name} is damaged: expected checksum {}, found {found}", self.xxh3);
        Ok(())
    }
}
