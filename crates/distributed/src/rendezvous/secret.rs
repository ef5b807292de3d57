//! The secret of a run. Rank 0 and each other rank prove to each other that they know it, without sending it.
//!
//! A proof is an HMAC-SHA256 of the message with which a rank introduces itself and of a random number (nonce) that the other side
//! chose. It cannot be repeated in another connection. Later messages are neither encrypted nor authenticated.

use anyhow::{Context, Result, ensure};
use hmac::{Hmac, KeyInit, Mac};
use serde::{Deserialize, Serialize};
use sha2::Sha256;
use std::env;
use std::ffi::OsString;
use std::fmt::{self, Write};
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// The environment variable with the secret.
pub const VARIABLE: &str = "LLM_RS_SECRET";

/// Minimum number of bytes in a secret. An attacker who observes a proof could guess a shorter one.
const MIN_BYTES: usize = 16;

/// Largest size of a file with a secret.
const MAX_BYTES: u64 = 4096;

/// The secret that all ranks of a run know.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Secret(String);

/// Prints no part of the secret.
impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

/// A random number that is used once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Nonce([u8; 32]);

impl Nonce {
    pub fn random() -> Result<Self> {
        let mut bytes = [0; 32];
        system::random::fill(&mut bytes).context("cannot draw a random number")?;
        Ok(Self(bytes))
    }
}

/// The side that proves that it knows the secret. A proof of one side is not a proof of the other.
#[derive(Clone, Copy, Debug)]
pub(super) enum Side {
    Rank0,
    OtherRank,
}

/// The proof of one side: its HMAC.
pub(super) type Proof = Vec<u8>;

impl Secret {
    /// Creates a secret from text. White space around it does not count.
    pub fn new(text: &str) -> Result<Self> {
        let text = text.trim();
        ensure!(
            text.len() >= MIN_BYTES,
            "expected at least {MIN_BYTES} bytes, found {}; create one with `openssl rand -hex 32`",
            text.len()
        );
        Ok(Self(text.to_owned()))
    }

    /// Reads the secret from a file that only its owner can read.
    pub fn from_file(path: &Path) -> Result<Self> {
        let name = path.display();
        let file = bounded_file::open(path).with_context(|| format!("cannot open {name}"))?;
        let mode = file.metadata().with_context(|| format!("cannot read {name}"))?.mode();
        let others = mode & 0o077;
        ensure!(
            others == 0,
            "{name}: expected a file that only its owner can read, found mode {:03o}; run `chmod 600 {name}`",
            mode & 0o777
        );
        let mut text = String::new();
        let read = file.take(MAX_BYTES + 1).read_to_string(&mut text).with_context(|| format!("cannot read {name}"))?;
        // The first bytes of a larger file may be the same in every file of its kind.
        ensure!(
            read as u64 <= MAX_BYTES,
            "{name}: expected at most {MAX_BYTES} bytes, found more; create a secret with `openssl rand -hex 32`"
        );
        Self::new(&text).with_context(|| name.to_string())
    }

    /// Returns the secret of the environment variable, if it is set. Text that is not a secret is an error, because the run would
    /// otherwise have none.
    pub fn from_environment() -> Result<Option<Self>> {
        Self::from_variable(env::var_os(VARIABLE))
    }

    fn from_variable(text: Option<OsString>) -> Result<Option<Self>> {
        let Some(text) = text else { return Ok(None) };
        ensure!(
            !text.is_empty(),
            "{VARIABLE}: expected at least {MIN_BYTES} bytes, found none; create a secret with `openssl rand -hex 32`, or unset the \
             variable"
        );
        let text = text.to_str().with_context(|| {
            format!(
                "{VARIABLE}: expected text in UTF-8, found other bytes; create a secret with `openssl rand -hex 32`"
            )
        })?;
        ensure!(
            text.len() as u64 <= MAX_BYTES,
            "{VARIABLE}: expected at most {MAX_BYTES} bytes, found {}; create a secret with `openssl rand -hex 32`",
            text.len()
        );
        Self::new(text).map(Some).context(VARIABLE)
    }

    /// Creates a random secret.
    pub fn random() -> Result<Self> {
        random_text().map(Self)
    }

    fn hmac(&self, side: Side, hello: &[u8], Nonce(nonce): Nonce) -> Result<Hmac<Sha256>> {
        let mut hmac = Hmac::<Sha256>::new_from_slice(self.0.as_bytes()).context("cannot use the secret as a key")?;
        hmac.update(match side {
            Side::Rank0 => b"llm.rs rank 0 ",
            Side::OtherRank => b"llm.rs a rank ",
        });
        // The first parts have fixed lengths, so that no other message has the same bytes.
        hmac.update(&nonce);
        hmac.update(hello);
        Ok(hmac)
    }

    /// Returns the proof of a side for a connection that began with `hello`. `nonce` is that of rank 0; the one of the other rank is
    /// part of `hello`.
    pub(super) fn prove(&self, side: Side, hello: &[u8], nonce: Nonce) -> Result<Proof> {
        Ok(self.hmac(side, hello, nonce)?.finalize().into_bytes().to_vec())
    }

    /// Returns whether a proof is that of a side that knows this secret. Takes the same time for every wrong proof.
    pub(super) fn verifies(&self, side: Side, hello: &[u8], nonce: Nonce, proof: &[u8]) -> bool {
        self.hmac(side, hello, nonce).is_ok_and(|hmac| hmac.verify_slice(proof).is_ok())
    }
}

/// Returns random hexadecimal digits.
pub(super) fn random_text() -> Result<String> {
    let Nonce(bytes) = Nonce::random()?;
    let mut text = String::with_capacity(2 * bytes.len());
    for byte in bytes {
        write!(text, "{byte:02x}")?;
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::ffi::OsStringExt;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_proof_holds_for_one_secret_side_message_and_nonce() {
        let [secret, other] = ["0123456789abcdef", "0123456789abcdeg"].map(|text| Secret::new(text).unwrap());
        let [nonce, later] = [(); 2].map(|()| Nonce::random().unwrap());
        let proof = secret.prove(Side::OtherRank, b"rank 1", nonce).unwrap();
        assert!(secret.verifies(Side::OtherRank, b"rank 1", nonce, &proof));
        assert!(!other.verifies(Side::OtherRank, b"rank 1", nonce, &proof));
        assert!(!secret.verifies(Side::Rank0, b"rank 1", nonce, &proof));
        assert!(!secret.verifies(Side::OtherRank, b"rank 2", nonce, &proof));
        assert!(!secret.verifies(Side::OtherRank, b"rank 1", later, &proof));
        assert!(!secret.verifies(Side::OtherRank, b"rank 1", nonce, &proof[..31]));
        assert!(!secret.verifies(Side::OtherRank, b"rank 1", nonce, &[]));
    }

    #[test]
    fn secrets_are_long_and_private() {
        assert!(Secret::new("  too short  ").unwrap_err().to_string().contains("expected at least 16 bytes, found 9"));
        assert_eq!(format!("{:?}", Secret::random().unwrap()), "Secret");
        assert_ne!(Secret::random().unwrap(), Secret::random().unwrap());
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("secret");
        fs::write(&path, "0123456789abcdef\n").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        let error = Secret::from_file(&path).unwrap_err().to_string();
        assert!(error.contains("found mode 644; run `chmod 600 "), "{error}");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        assert_eq!(Secret::from_file(&path).unwrap(), Secret::new("0123456789abcdef").unwrap());
        fs::File::options().append(true).open(&path).unwrap().set_len(8 << 30).unwrap();
        let error = Secret::from_file(&path).unwrap_err().to_string();
        assert!(error.contains("expected at most 4096 bytes, found more"), "{error}");
    }

    #[test]
    fn a_variable_that_is_no_secret_is_an_error() {
        let secret = |bytes: &[u8]| Secret::from_variable(Some(OsString::from_vec(bytes.to_vec())));
        assert_eq!(Secret::from_variable(None).unwrap(), None);
        assert_eq!(secret(b"0123456789abcdef\n").unwrap(), Some(Secret::new("0123456789abcdef").unwrap()));
        for (bytes, part) in [
            (&b""[..], "LLM_RS_SECRET: expected at least 16 bytes, found none; "),
            (b"too short", "LLM_RS_SECRET: expected at least 16 bytes, found 9; "),
            (b"0123456789abcdef\xff", "LLM_RS_SECRET: expected text in UTF-8, found other bytes; "),
            (&[b'a'; 5000], "LLM_RS_SECRET: expected at most 4096 bytes, found 5000; "),
        ] {
            let error = format!("{:#}", secret(bytes).unwrap_err());
            assert!(error.starts_with(part), "{error}");
        }
    }
}
