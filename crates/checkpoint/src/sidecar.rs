//! Sidecar files (`run_SSSSSSSS.json`): the parts of a checkpoint that the formats of llm.c cannot store.
//!
//! The file contains a checksum of itself.

use super::Progress;
use super::fingerprint::ShardFingerprint;
use anyhow::{Context, Result, ensure};
use data::mixture::State;
use engine::Algorithms;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use serde_json::{Map, Value};
use std::io::{Read, Write};
use std::path::Path;
use system::progress::{self, Unit};
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

const VERSION: u32 = 1;

/// The contents of a sidecar file.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Sidecar {
    /// Number of completed optimizer steps.
    pub step: usize,
    /// Program, settings and data of the run.
    pub identity: Identity,
    /// Statistics of the run so far.
    pub progress: Progress,
    /// State of the training data of a mixture.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mixture: Option<State>,
    /// The GEMM algorithms chosen by tuning.
    pub algorithms: Option<Algorithms>,
    /// The other files of the checkpoint.
    pub files: Vec<FileChecksum>,
}

/// The program, settings and data of a run. They do not change between its first and its last step.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Identity {
    /// Name and version of the program.
    pub program: String,
    /// Description of the engine, for example `NVIDIA H200, sm_90a`.
    pub engine: String,
    /// The settings by their keys in `config.toml`. They are compared with those of other versions of the program, which may have other
    /// keys.
    pub config: Map<String, Value>,
    /// Fingerprints of the training data.
    pub train: Vec<ShardFingerprint>,
    /// Fingerprints of the validation data.
    pub val: Option<Vec<ShardFingerprint>>,
    /// Number of ranks that share the data.
    #[serde(default = "one")]
    pub ranks: usize,
}

const fn one() -> usize {
    1
}

impl Identity {
    /// Creates the identity of a run with these settings and data.
    pub fn new(
        config: Map<String, Value>,
        engine: String,
        train: Vec<ShardFingerprint>,
        val: Option<Vec<ShardFingerprint>>,
        ranks: usize,
    ) -> Self {
        let program = concat!("host ", env!("CARGO_PKG_VERSION")).to_owned();
        Self { program, engine, config, train, val, ranks }
    }
}

/// Size and checksum of a file of the checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileChecksum {
    /// File name without its directory.
    pub name: String,
    /// Size of the file.
    pub bytes: u64,
    /// XXH3 hash of its contents, in hexadecimal.
    pub xxh3: String,
}

/// The file format: the JSON text of a [`Sidecar`] and its checksum.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SidecarFile {
    version: u32,
    xxh3: String,
    run: Box<RawValue>,
}

/// Formats a checksum as in the sidecar file.
pub fn format_checksum(sum: u64) -> String {
    format!("{sum:016x}")
}

impl Sidecar {
    /// Writes the file.
    pub fn write(&self, out: &mut impl Write) -> Result<()> {
        let run = RawValue::from_string(serde_json::to_string_pretty(self)?)?;
        let sealed = SidecarFile { version: VERSION, xxh3: format_checksum(xxh3_64(run.get().as_bytes())), run };
        serde_json::to_writer_pretty(&mut *out, &sealed)?;
        Ok(writeln!(out)?)
    }

    /// Reads a file and verifies its checksum.
    pub fn read(path: &Path) -> Result<Self> {
        let text = bounded_file::read(path, bounded_file::DESCRIPTION)
            .with_context(|| format!("cannot read {}", path.display()))?;
        Self::parse(&text).with_context(|| format!("{} is damaged", path.display()))
    }

    /// Parses the contents of a file and verifies its checksum.
    pub fn parse(text: &[u8]) -> Result<Self> {
        let SidecarFile { version, xxh3, run } = serde_json::from_slice(text)?;
        ensure!(version == VERSION, "expected version {VERSION}, found {version}");
        let found = format_checksum(xxh3_64(run.get().as_bytes()));
        ensure!(found == xxh3, "expected checksum {xxh3}, found {found}");
        let mut run: Self = serde_json::from_str(run.get())?;
        // Versions of the program without this setting always shuffled.
        run.identity.config.entry("shuffle").or_insert(true.into());
        // Versions without this setting had no other optimizer.
        run.identity.config.entry("optimizer").or_insert("adamw".into());
        Ok(run)
    }
}

impl FileChecksum {
    /// Reads the whole file and verifies its size and checksum.
    pub fn verify(&self, directory: &Path) -> Result<()> {
        let path = directory.join(&self.name);
        let name = path.display();
        let mut file = bounded_file::open_of_run(&path).with_context(|| format!("cannot open {name}"))?;
        let size = file.size().with_context(|| format!("cannot read {name}"))?;
        ensure!(size == self.bytes, "{name} is damaged: expected {} bytes, found {size}", self.bytes);
        let progress = progress::start("verifying checkpoint", Unit::Bytes, size);
        let (mut hash, mut buffer) = (Xxh3::new(), vec![0; 1 << 20]);
        loop {
            let n = file.read(&mut buffer).with_context(|| format!("cannot read {name}"))?;
            if n == 0 {
                break;
            }
            hash.update(&buffer[..n]);
            progress.add(n as u64);
        }
        let found = format_checksum(hash.digest());
        ensure!(found == self.xxh3, "{name} is damaged: expected checksum {}, found {found}", self.xxh3);
        Ok(())
    }
}
