//! Tokenizers: text to token ids and back.
//!
//! GPT-2's encoding and plain bytes are built in. [`Tokenizer::open`] reads Hugging Face's `tokenizer.json`, GPT-2's `vocab.json`
//! with `merges.txt`, and Llama 3's `tokenizer.model`. [`stored`] finds the tokenizer of a model or a data set in its directory. Token files do not belong here.

#![warn(missing_docs)]

mod bpe;
pub mod byte_level;
mod classes;
pub mod hub;
mod json_file;
mod matcher;
mod ranks;
mod split;
pub mod stored;
mod tiktoken_file;
mod tiktoken_pickle;
pub mod train;
mod vocab_and_merges;

pub use json_file::{byte_level_bpe, pattern as split_pattern};
pub use ranks::merges_of_ranks;
pub use split::Pattern;

use anyhow::{Context, Result, bail, ensure};
use bpe::Bpe;
use json_file::ByteLevel;
use matcher::{Matcher, Part};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::ops::{Deref, Range};
use std::path::Path;
use std::sync::{Arc, LazyLock};
use tokenizers::ModelWrapper;
use xxhash_rust::xxh3::Xxh3;

/// Vocabulary size of GPT-2's encoding.
pub const GPT2_VOCAB: usize = 50257;

/// Vocabulary size of the byte-level encoding.
pub const BYTE_VOCAB: usize = 256;

/// GPT-2's special token, which precedes each document.
const END_OF_TEXT: &str = "<|endoftext|>";

/// Special tokens that may precede each document, the preferred one first.
const DOCUMENT_TOKENS: [&str; 16] = [
    END_OF_TEXT,
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<s>",
    "</s>",
    // nanochat, Gemma, DeepSeek, BERT and others.
    "<|bos|>",
    "<bos>",
    "<｜begin▁of▁sentence｜>",
    "<|startoftext|>",
    "[BOS]",
    "[CLS]",
    "<|eos|>",
    "<eos>",
    "<｜end▁of▁sentence｜>",
    "[EOS]",
    "[SEP]",
];

/// A mapping between text and token ids. Clones share the vocabulary.
#[derive(Clone, Debug)]
pub struct Tokenizer(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    name: String,
    encoding: Encoding,
    special: Matcher,
    vocab: usize,
    document: u32,
    /// Hash of the vocabulary.
    fingerprint: u64,
    /// `None` for the built-in encodings.
    file: Option<File>,
    /// Probability with which the file says to leave out merges.
    dropout: f32,
}

/// The file of a tokenizer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct File {
    /// The standard name of its format: `tokenizer.json` or `tokenizer.model`.
    pub name: &'static str,
    /// The contents.
    pub bytes: Vec<u8>,
}

#[derive(Debug)]
enum Encoding {
    Bytes,
    ByteLevel(ByteLevelRef),
    HuggingFace(Box<HuggingFace>),
}

/// An encoding of the `tokenizers` crate.
#[derive(Debug)]
struct HuggingFace {
    /// Encodes special tokens in the text as ordinary text.
    plain: tokenizers::Tokenizer,
    /// Finds special tokens. They may take the spaces around them, and text after one may differ from text at the beginning.
    with_special: tokenizers::Tokenizer,
}

/// A token with a text of its own, which ordinary text never produces.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Special {
    /// The text that stands for the token, such as `<|endoftext|>`.
    pub text: String,
    /// The id.
    pub id: u32,
}

/// The identity of a tokenizer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// `gpt2`, `bytes`, or the name of the file.
    pub name: String,
    /// Number of ids.
    pub vocab: usize,
    /// Hash of the vocabulary: xxh3 of each id and its bytes, as 16 hexadecimal digits.
    pub fingerprint: String,
}

impl Identity {
    /// Reports whether both tokenizers have the same vocabulary. The names, which may be paths, are not compared.
    pub fn has_vocabulary_of(&self, other: &Self) -> bool {
        (self.vocab, &self.fingerprint) == (other.vocab, &other.fingerprint)
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({} tokens, hash {})", self.name, self.vocab, self.fingerprint)
    }
}

impl From<&Tokenizer> for Identity {
    fn from(tokenizer: &Tokenizer) -> Self {
        tokenizer.identity()
    }
}

/// A byte-level encoding. GPT-2's is created at its first use, which takes 50 ms.
#[derive(Debug)]
enum ByteLevelRef {
    Gpt2,
    Own(Box<ByteLevel>),
}

impl Deref for ByteLevelRef {
    type Target = ByteLevel;

    fn deref(&self) -> &ByteLevel {
        match self {
            Self::Gpt2 => &GPT2,
            Self::Own(encoding) => encoding,
        }
    }
}

static GPT2: LazyLock<ByteLevel> = LazyLock::new(|| {
    let bpe = Bpe::new(Pattern::Gpt2, gpt2_tokens()).expect("GPT-2's vocabulary is a byte-level encoding");
    ByteLevel::new(bpe).expect("there are no added tokens")
});

/// GPT-2's merges: the ids of two tokens, each a u16 in little-endian order.
const GPT2_MERGES: &[u8] = include_bytes!("../data/gpt2_merges.bin");

/// Returns the bytes of GPT-2's tokens: single bytes in the order of its alphabet, printable ones first, and then the merges.
fn gpt2_tokens() -> Vec<Box<[u8]>> {
    let mut tokens: Vec<Box<[u8]>> = byte_level::alphabet().map(|byte| Box::from([byte])).collect();
    for merge in GPT2_MERGES.as_chunks::<4>().0 {
        let [left, right] = [[merge[0], merge[1]], [merge[2], merge[3]]].map(|id| usize::from(u16::from_le_bytes(id)));
        tokens.push([&*tokens[left], &*tokens[right]].concat().into());
    }
    tokens
}

/// The hash of GPT-2's vocabulary.
const GPT2_FINGERPRINT: u64 = 0x649f48594584c1c6;

impl Tokenizer {
    /// Returns GPT-2's encoding: 50,257 tokens.
    pub fn gpt2() -> Self {
        let special = vec![Special { text: END_OF_TEXT.into(), id: GPT2_VOCAB as u32 - 1 }];
        Self::new("gpt2", Encoding::ByteLevel(ByteLevelRef::Gpt2), special, GPT2_VOCAB, None)
            .expect("the special token precedes documents")
    }

    /// Returns the byte-level encoding: the id of a byte is its value. A newline precedes each document.
    pub fn bytes() -> Self {
        Self::new("bytes", Encoding::Bytes, Vec::new(), BYTE_VOCAB, None).expect("a newline precedes documents")
    }

    /// Returns the built-in tokenizer of a model with this vocabulary size.
    pub fn of_vocab(vocab: usize) -> Result<Self> {
        match vocab {
            GPT2_VOCAB => Ok(Self::gpt2()),
            BYTE_VOCAB => Ok(Self::bytes()),
            _ => bail!(
                "no built-in tokenizer has {vocab} tokens: expected {GPT2_VOCAB} (GPT-2) or {BYTE_VOCAB} (bytes); pass the \
                 model's tokenizer with --tokenizer FILE"
            ),
        }
    }

    /// Returns the tokenizer that a user names: `gpt2`, `bytes`, or the path of a file or a directory for [`open`](Self::open).
    pub fn named(name: &str) -> Result<Self> {
        match name {
            "gpt2" => Ok(Self::gpt2()),
            "bytes" => Ok(Self::bytes()),
            path => Self::open(Path::new(path)),
        }
    }

    /// Opens a `tokenizer.json` (Hugging Face), a `tokenizer.model` (Llama 3), a `tokenizer.pkl` (nanochat) or a `vocab.json` with a
    /// `merges.txt` beside it (GPT-2), or a directory that contains one of them.
    pub fn open(path: &Path) -> Result<Self> {
        if let Some(advice) = hub::advice(path) {
            bail!("{}: expected a file or a directory, found neither; {advice}", path.display());
        }
        let file = if path.is_dir() { stored::files_in(path).next() } else { Some(path.to_owned()) };
        let file = file.with_context(|| {
            format!(
                "{}: expected tokenizer.json, tokenizer.model, tokenizer.pkl, or vocab.json with merges.txt in this directory, found none",
                path.display()
            )
        })?;
        let name = file.display().to_string();
        if file.file_name().is_some_and(|name| name == vocab_and_merges::VOCAB) {
            return open_json(&name, &vocab_and_merges::to_json(&file)?);
        }
        let bytes = bounded_file::read(&file, bounded_file::TEXT).with_context(|| {
            format!(
                "cannot read the tokenizer {name}: expected gpt2, bytes, a tokenizer.json or Llama 3's tokenizer.model"
            )
        })?;
        if file.extension().is_some_and(|extension| extension == "pkl") {
            return open_json(&name, &tiktoken_pickle::to_json(&bytes).with_context(|| name.clone())?);
        }
        let text = std::str::from_utf8(&bytes).ok().with_context(|| {
            format!(
                "{name}: expected a tokenizer.json or a tiktoken file with base64 lines, found binary data; SentencePiece \
                 models are not supported: use the tokenizer.json of the model"
            )
        })?;
        // A byte order mark is not allowed in JSON, as the error will say.
        let is_json = text.trim_start_matches(|c: char| c.is_whitespace() || c == '\u{feff}').starts_with('{');
        if is_json { open_json(&name, text) } else { open_tiktoken(&name, text) }
    }

    /// Reads the contents of a `tokenizer.json`. `name` names it in messages and in its identity.
    pub fn from_json(name: &str, text: &str) -> Result<Self> {
        open_json(name, text)
    }

    fn new(name: &str, encoding: Encoding, special: Vec<Special>, vocab: usize, file: Option<File>) -> Result<Self> {
        let fingerprint = match &encoding {
            Encoding::ByteLevel(ByteLevelRef::Gpt2) => GPT2_FINGERPRINT,
            encoding => fingerprint(encoding, &special),
        };
        let named = DOCUMENT_TOKENS.iter().find_map(|text| special.iter().find(|token| token.text == *text));
        let document = match named {
            Some(token) => token.id,
            // Also if the vocabulary comes from a file, such as that of an exported model of bytes, or one with added tokens.
            None if has_only_bytes(&encoding) => u32::from(b'\n'),
            None => bail!(
                "{name}: expected a special token that precedes documents, one of {}, found {}; add one to added_tokens with \
                 \"special\": true",
                DOCUMENT_TOKENS.join(", "),
                some_of(&special)
            ),
        };
        let special =
            Matcher::new(special).with_context(|| format!("{name}: the special tokens cannot be searched"))?;
        let name = name.to_owned();
        Ok(Self(Arc::new(Inner { name, encoding, special, vocab, document, fingerprint, file, dropout: 0.0 })))
    }

    fn with_dropout(self, dropout: f32) -> Self {
        let Ok(inner) = Arc::try_unwrap(self.0) else { unreachable!("a new tokenizer has no clones") };
        Self(Arc::new(Inner { dropout, ..inner }))
    }

    /// Returns the name: `gpt2`, `bytes`, or the path of the file.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Returns the number of ids.
    pub fn vocab(&self) -> usize {
        self.0.vocab
    }

    /// Reports whether this tokenizer has all tokens of another one with the same ids, and only special tokens after them.
    pub fn extends(&self, other: &Self) -> bool {
        let old = other.vocab();
        let (kept, added): (Vec<_>, Vec<_>) = self.special().iter().partition(|token| (token.id as usize) < old);
        self.vocab() == old + added.len()
            && other.special().iter().all(|token| kept.contains(&token))
            && (0..old as u32).all(|id| self.decode(&[id]) == other.decode(&[id]))
    }

    /// Returns the token that precedes each document: `<|endoftext|>` for GPT-2, `<|begin_of_text|>` for Llama 3, a newline for
    /// bytes.
    pub fn document(&self) -> u32 {
        self.0.document
    }

    /// Returns the special tokens.
    pub fn special(&self) -> &[Special] {
        self.0.special.tokens()
    }

    /// Returns the file; `None` for the built-in encodings.
    pub fn file(&self) -> Option<&File> {
        self.0.file.as_ref()
    }

    /// Returns a note for the user if the file asks for dropout of merges, which would give a text other tokens each time. Encoding
    /// ignores it.
    pub fn note(&self) -> Option<String> {
        let Inner { name, dropout, .. } = &*self.0;
        let note = || format!("note: {name}: model.dropout is {dropout}; llm-rs encodes without dropout");
        (*dropout > 0.0).then(note)
    }

    /// Returns the identity.
    pub fn identity(&self) -> Identity {
        let Inner { name, vocab, fingerprint, .. } = &*self.0;
        Identity { name: name.clone(), vocab: *vocab, fingerprint: format!("{fingerprint:016x}") }
    }

    /// Reports whether a text may be cut between these adjacent characters: the ids of the text are then those of its two
    /// parts. No special token extends across such a cut.
    pub fn divides_between(&self, before: char, after: char) -> bool {
        let divides = match &self.0.encoding {
            Encoding::Bytes => true,
            Encoding::ByteLevel(encoding) => encoding.bpe.pattern().divides_between(before, after),
            Encoding::HuggingFace(_) => false,
        };
        divides && !self.special_token_contains(before, after)
    }

    /// Reports whether a special or added token contains these characters, one after the other.
    pub fn special_token_contains(&self, before: char, after: char) -> bool {
        let added = match &self.0.encoding {
            Encoding::ByteLevel(encoding) => encoding.added.contains(before, after),
            Encoding::Bytes | Encoding::HuggingFace(_) => false,
        };
        added || self.0.special.contains(before, after)
    }

    /// Returns the ids of plain text. Special tokens in the text are encoded as ordinary text.
    ///
    /// Fails only if a `tokenizer.json` cannot encode the text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let mut ids = Vec::with_capacity(text.len() / 3);
        self.encode_plain(text, &mut ids)?;
        Ok(ids)
    }

    /// Returns the ids of text. Special tokens in the text become their ids.
    pub fn encode_with_special(&self, text: &str) -> Result<Vec<u32>> {
        if let Encoding::HuggingFace(encoding) = &self.0.encoding {
            return self.encode_with(&encoding.with_special, text);
        }
        let mut ids = Vec::with_capacity(text.len() / 3);
        self.0.special.split(text, |part| {
            match part {
                Part::Token(id) => ids.push(id),
                Part::Text(text) => self.encode_plain(text, &mut ids)?,
            }
            Ok(())
        })?;
        Ok(ids)
    }

    /// Returns the tokens of [`encode_with_special`](Self::encode_with_special), each with the bytes of the text that it stands for. A
    /// special token around one of the positions `broken` is ordinary text. Only encodings for which
    /// [`breaks_special`](Self::breaks_special) is true support such positions.
    ///
    /// Several tokens of a character that is normalized stand for the same bytes.
    pub fn encode_with_ranges(&self, text: &str, broken: &[usize]) -> Result<Vec<(u32, Range<usize>)>> {
        if let Encoding::HuggingFace(encoding) = &self.0.encoding {
            ensure!(broken.is_empty(), "{self}: expected text without special tokens that are ordinary text");
            return self.encode_by_crate(&encoding.with_special, text);
        }
        let mut tokens = Vec::with_capacity(text.len() / 3);
        let is_broken = |range: &Range<usize>| broken.iter().any(|at| range.start < *at && *at < range.end);
        self.0.special.split_unless(text, is_broken, |part, start| {
            match part {
                Part::Token(id) => {
                    let length = self.0.special.bytes(id).map_or(0, <[u8]>::len);
                    tokens.push((id, start..start + length));
                }
                Part::Text(text) => self.add_ranges(text, start, &mut tokens)?,
            }
            Ok(())
        })?;
        Ok(tokens)
    }

    /// Reports whether [`encode_with_ranges`](Self::encode_with_ranges) can encode special tokens in parts of a text as ordinary text.
    pub fn breaks_special(&self) -> bool {
        !matches!(self.0.encoding, Encoding::HuggingFace(_))
    }

    /// Passes each special token in a text to `found`, as the bytes of its text.
    pub fn find_special(&self, text: &str, mut found: impl FnMut(Range<usize>)) {
        self.0.special.find(text, &mut found);
    }

    /// Appends the tokens of plain text that begins at `start`, each with its bytes.
    fn add_ranges(&self, text: &str, start: usize, tokens: &mut Vec<(u32, Range<usize>)>) -> Result<()> {
        let mut ids = Vec::with_capacity(text.len() / 3);
        self.encode_plain(text, &mut ids)?;
        let normalized = match &self.0.encoding {
            Encoding::ByteLevel(encoding) => encoding.normalized(text),
            Encoding::Bytes | Encoding::HuggingFace(_) => None,
        };
        let origin = |at, is_end| normalized.as_ref().map_or(at, |normalized| normalized.origin(at, is_end));
        let mut at = 0;
        for id in ids {
            let end = at + self.token_len(id);
            tokens.push((id, start + origin(at, false)..start + origin(end, true)));
            at = end;
        }
        let expected = normalized.as_ref().map_or(text.len(), json_file::Normalized::len);
        ensure!(at == expected, "{self}: expected tokens of {expected} bytes for a text, found {at} bytes");
        Ok(())
    }

    /// Returns the number of bytes of a token that is not special.
    fn token_len(&self, id: u32) -> usize {
        match &self.0.encoding {
            Encoding::ByteLevel(encoding) => encoding.bytes(id).map_or(0, <[u8]>::len),
            Encoding::Bytes | Encoding::HuggingFace(_) => 1,
        }
    }

    /// Returns the number of special tokens that [`encode_with_special`](Self::encode_with_special) finds in a text.
    pub fn count_special(&self, text: &str) -> usize {
        self.0.special.count(text)
    }

    fn encode_plain(&self, text: &str, ids: &mut Vec<u32>) -> Result<()> {
        match &self.0.encoding {
            Encoding::Bytes => ids.extend(text.bytes().map(u32::from)),
            Encoding::ByteLevel(encoding) => encoding.encode(text, ids)?,
            Encoding::HuggingFace(encoding) => ids.extend(self.encode_with(&encoding.plain, text)?),
        }
        Ok(())
    }

    /// Returns the ids of text, by the `tokenizers` crate.
    fn encode_with(&self, tokenizer: &tokenizers::Tokenizer, text: &str) -> Result<Vec<u32>> {
        if text.is_empty() {
            return Ok(Vec::new());
        }
        Ok(self.checked(|| tokenizer.encode_fast(text, false))?.get_ids().to_vec())
    }

    /// Returns the tokens of text, each with its bytes, by the `tokenizers` crate.
    fn encode_by_crate(&self, tokenizer: &tokenizers::Tokenizer, text: &str) -> Result<Vec<(u32, Range<usize>)>> {
        if text.is_empty() {
            return Ok(Vec::new());
        }
        let encoding = self.checked(|| tokenizer.encode(text, false))?;
        let ranges = encoding.get_offsets().iter().map(|&(start, end)| start..end);
        Ok(encoding.get_ids().iter().copied().zip(ranges).collect())
    }

    fn checked(
        &self,
        encode: impl FnOnce() -> tokenizers::Result<tokenizers::Encoding>,
    ) -> Result<tokenizers::Encoding> {
        let encoding = quiet_panic::catch(encode)
            .with_context(|| format!("{self} cannot encode the text: its parts are inconsistent"))?;
        encoding.map_err(|error| anyhow::anyhow!("{self} cannot encode the text: {error}"))
    }

    /// Returns the bytes of tokens, which may end inside a character. Ids outside the vocabulary, such as those of a padded
    /// vocabulary, decode to nothing.
    pub fn decode(&self, ids: &[u32]) -> Vec<u8> {
        let special = |id: u32| self.0.special.bytes(id);
        match &self.0.encoding {
            Encoding::Bytes => ids.iter().filter_map(|&id| u8::try_from(id).ok()).collect(),
            Encoding::ByteLevel(encoding) => {
                ids.iter().filter_map(|&id| encoding.bytes(id).or_else(|| special(id))).flatten().copied().collect()
            }
            Encoding::HuggingFace(encoding) if is_byte_level(&encoding.plain) => {
                let token = |id: u32| encoding.plain.id_to_token(id).map(|token| bytes_of(&token));
                let bytes = |&id: &u32| special(id).map(<[u8]>::to_vec).or_else(|| token(id));
                ids.iter().filter_map(bytes).flatten().collect()
            }
            Encoding::HuggingFace(encoding) => {
                let text = quiet_panic::catch(|| encoding.plain.decode(ids, false));
                text.and_then(tokenizers::Result::ok).unwrap_or_default().into_bytes()
            }
        }
    }

    /// Decodes tokens to text. Invalid UTF-8 becomes U+FFFD.
    pub fn text(&self, ids: &[u32]) -> String {
        String::from_utf8_lossy(&self.decode(ids)).into_owned()
    }
}

impl HuggingFace {
    fn new(mut with_special: tokenizers::Tokenizer) -> Self {
        with_special.set_encode_special_tokens(false);
        let mut plain = with_special.clone();
        plain.set_encode_special_tokens(true);
        Self { plain, with_special }
    }
}

impl PartialEq for Tokenizer {
    fn eq(&self, other: &Self) -> bool {
        self.0.vocab == other.0.vocab && self.0.fingerprint == other.0.fingerprint
    }
}

impl fmt::Display for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({} tokens)", self.0.name, self.0.vocab)
    }
}

/// Reports whether tokens are bytes in GPT-2's alphabet, so that each token can be decoded by itself.
fn is_byte_level(tokenizer: &tokenizers::Tokenizer) -> bool {
    matches!(tokenizer.get_decoder(), Some(tokenizers::DecoderWrapper::ByteLevel(_)))
}

/// Reports whether the tokens are the bytes, each with its value as its id.
fn has_only_bytes(encoding: &Encoding) -> bool {
    fingerprint(encoding, &[]) == fingerprint(&Encoding::Bytes, &[])
}

/// Returns the bytes of a token in a byte-level vocabulary. Added tokens may be plain text.
fn bytes_of(token: &str) -> Vec<u8> {
    byte_level::bytes(token).unwrap_or_else(|| token.as_bytes().to_vec())
}

/// Lists some special tokens for a message.
fn some_of(special: &[Special]) -> String {
    let mut listed: Vec<&str> = special.iter().take(5).map(|token| &*token.text).collect();
    if special.len() > listed.len() {
        listed.push("…");
    }
    if listed.is_empty() { "none".to_owned() } else { listed.join(", ") }
}

fn open_tiktoken(name: &str, text: &str) -> Result<Tokenizer> {
    let (bpe, special) = tiktoken_file::parse(name, text)?;
    let vocab = bpe.tokens().len() + special.len();
    let encoding = Encoding::ByteLevel(ByteLevelRef::Own(Box::new(ByteLevel::new(bpe)?)));
    let file = File { name: stored::TIKTOKEN, bytes: text.into() };
    Tokenizer::new(name, encoding, special, vocab, Some(file))
}

fn open_json(name: &str, text: &str) -> Result<Tokenizer> {
    let invalid = || format!("{name}: not a valid tokenizer.json");
    let file: AddedTokens = serde_json::from_str(text).with_context(invalid)?;
    // The tokenizers crate panics for some invalid files.
    let parsed = quiet_panic::catch(|| text.parse::<tokenizers::Tokenizer>()).with_context(invalid)?;
    let mut tokenizer = parsed.map_err(|error| anyhow::anyhow!("{}: {error}", invalid()))?;
    check_ids(&file, &tokenizer).with_context(|| name.to_owned())?;
    let dropout = remove_dropout(&mut tokenizer);
    // A data set is never truncated or padded.
    tokenizer.with_padding(None);
    tokenizer
        .with_truncation(None)
        .map_err(|error| anyhow::anyhow!("{name}: truncation cannot be disabled: {error}"))?;
    let mut special: Vec<Special> = tokenizer
        .get_added_tokens_decoder()
        .into_iter()
        .filter(|(_, token)| token.special)
        .map(|(id, token)| Special { text: token.content, id })
        .collect();
    special.sort_by_key(|token| token.id);
    // Ids may have gaps, so the vocabulary extends to the highest id.
    let highest = tokenizer.get_vocab(true).into_values().max();
    let vocab = highest.with_context(|| format!("{name}: expected a vocabulary, found none"))? as usize + 1;
    ensure!(i32::try_from(vocab).is_ok(), "{name}: expected ids below {}, found {}", i32::MAX, vocab - 1);
    let encoding = match ByteLevel::of_json(text) {
        Some(encoding) => Encoding::ByteLevel(ByteLevelRef::Own(Box::new(encoding))),
        None => Encoding::HuggingFace(Box::new(HuggingFace::new(tokenizer))),
    };
    let file = File { name: stored::JSON, bytes: text.into() };
    Ok(Tokenizer::new(name, encoding, special, vocab, Some(file))?.with_dropout(dropout))
}

/// Disables the dropout of merges and returns its probability.
fn remove_dropout(tokenizer: &mut tokenizers::Tokenizer) -> f32 {
    let ModelWrapper::BPE(bpe) = tokenizer.get_model() else { return 0.0 };
    let Some(dropout) = bpe.dropout.filter(|dropout| *dropout > 0.0) else { return 0.0 };
    let mut plain = bpe.clone();
    plain.dropout = None;
    tokenizer.with_model(plain);
    dropout
}

/// Checks that each token has an id of its own, and that added tokens have the ids in the file. The `tokenizers` crate assigns
/// other ids to added tokens that leave a gap or repeat an id.
fn check_ids(file: &AddedTokens, tokenizer: &tokenizers::Tokenizer) -> Result<()> {
    for AddedToken { id, content } in &file.added_tokens {
        if let Some(expected) = tokenizer.token_to_id(content).filter(|expected| expected != id) {
            bail!(
                "added token {content:?}: expected id {expected}, its place in the vocabulary, found {id}; repair the file"
            );
        }
    }
    let mut tokens = HashMap::new();
    for (token, id) in tokenizer.get_vocab(true) {
        if let Some(other) = tokens.insert(id, token.clone()) {
            let [first, second] = if token < other { [token, other] } else { [other, token] };
            bail!("expected one token with id {id}, found {first:?} and {second:?}; repair the file");
        }
    }
    Ok(())
}

/// The part of a tokenizer.json that [`check_ids`] compares.
#[derive(Deserialize)]
struct AddedTokens {
    #[serde(default)]
    added_tokens: Vec<AddedToken>,
}

#[derive(Deserialize)]
struct AddedToken {
    id: u32,
    content: String,
}

/// Returns a hash of all ids and their bytes.
fn fingerprint(encoding: &Encoding, special: &[Special]) -> u64 {
    let mut hash = Xxh3::new();
    let mut add = |id: u32, bytes: &[u8]| {
        hash.update(&id.to_le_bytes());
        hash.update(&(bytes.len() as u32).to_le_bytes());
        hash.update(bytes);
    };
    match encoding {
        Encoding::Bytes => (0..=255).for_each(|byte: u8| add(u32::from(byte), &[byte])),
        Encoding::ByteLevel(encoding) => {
            let added = encoding.added.tokens().iter().map(|token| token.id);
            // An added token may have a huge id.
            let ids: BTreeSet<u32> = (0..encoding.bpe.tokens().len() as u32).chain(added).collect();
            for id in ids {
                encoding.bytes(id).into_iter().for_each(|bytes| add(id, bytes));
            }
        }
        Encoding::HuggingFace(encoding) => {
            // Byte-level vocabularies store bytes as other characters; this restores them, so that the hash does not depend on
            // the file format.
            let mut tokens: Vec<(u32, String)> =
                encoding.plain.get_vocab(true).into_iter().map(|(t, id)| (id, t)).collect();
            tokens.retain(|(id, _)| !special.iter().any(|token| token.id == *id));
            tokens.sort();
            for (id, token) in &tokens {
                add(*id, &bytes_of(token));
            }
        }
    }
    for token in special {
        add(token.id, token.text.as_bytes());
    }
    hash.digest()
}

#[cfg(test)]
mod tests;
