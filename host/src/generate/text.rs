//! The text of a stream of tokens, up to a stop string.

use tokenizer::Tokenizer;

/// Tokens after which an incomplete character is emitted as U+FFFD: a character has at most 4 bytes.
const MAX_TOKENS_OF_CHARACTER: usize = 4;

/// Tokens at the end of a prompt on which the text of the next token may depend.
const TOKENS_OF_PROMPT: usize = 8;

/// Converts tokens to text as they arrive. What it returns is always valid UTF-8: the tokens of an incomplete character are held back,
/// and so is text that may be the beginning of a stop string.
#[derive(Debug)]
pub struct TextStream {
    tokenizer: Tokenizer,
    stops: Vec<String>,
    /// Tokens whose text was returned last. Some tokenizers decode a token depending on the one before.
    context: Vec<u32>,
    /// Tokens of an incomplete character.
    pending: Vec<u32>,
    /// Text that may be the beginning of a stop string.
    held: String,
    stopped: bool,
}

impl TextStream {
    /// Creates a stream that ends before the first of the strings `stops`. Empty strings never stop it.
    pub fn new(tokenizer: &Tokenizer, stops: &[String]) -> Self {
        let stops = stops.iter().filter(|stop| !stop.is_empty()).cloned().collect();
        Self {
            tokenizer: tokenizer.clone(),
            stops,
            context: Vec::new(),
            pending: Vec::new(),
            held: String::new(),
            stopped: false,
        }
    }

    /// Continues a prompt. Some tokenizers decode the first token of a text without the space that it has after other text.
    pub fn after(mut self, prompt: &[u32]) -> Self {
        let is_special = |id: &u32| self.tokenizer.special().iter().any(|token| token.id == *id);
        let text = &prompt[prompt.iter().rposition(is_special).map_or(0, |last| last + 1)..];
        self.context = text[text.len().saturating_sub(TOKENS_OF_PROMPT)..].to_vec();
        self
    }

    /// Takes the next token and returns the text that is certain now.
    pub fn push(&mut self, token: u32) -> String {
        self.pending.push(token);
        self.advance(false)
    }

    /// Returns the rest of the text. Incomplete characters become U+FFFD.
    pub fn finish(&mut self) -> String {
        let text = self.advance(true);
        if self.stopped { text } else { text + &std::mem::take(&mut self.held) }
    }

    /// Reports whether the text has reached a stop string.
    pub fn stopped(&self) -> bool {
        self.stopped
    }

    fn advance(&mut self, last: bool) -> String {
        if self.stopped {
            return String::new();
        }
        let before = self.tokenizer.decode(&self.context);
        let all = self.tokenizer.decode(&[&self.context[..], &self.pending].concat());
        // Bytes that end a character differently change the text before them, which has been returned.
        let alone = if all.starts_with(&before) { Vec::new() } else { self.tokenizer.decode(&self.pending) };
        let new = all.strip_prefix(&before[..]).unwrap_or(&alone);
        let incomplete = std::str::from_utf8(new).is_err_and(|error| error.error_len().is_none())
            || new.ends_with("\u{fffd}".as_bytes());
        if incomplete && !last && self.pending.len() < MAX_TOKENS_OF_CHARACTER {
            return String::new();
        }
        self.held += &String::from_utf8_lossy(new);
        self.context = std::mem::take(&mut self.pending);
        let found = self.stops.iter().filter_map(|stop| self.held.find(stop.as_str())).min();
        if let Some(at) = found {
            self.stopped = true;
            self.held.truncate(at);
            return std::mem::take(&mut self.held);
        }
        let held = self.held_bytes();
        let rest = self.held.split_off(self.held.len() - held);
        std::mem::replace(&mut self.held, rest)
    }

    /// Returns the length of the longest end of the text that is the beginning of a stop string.
    fn held_bytes(&self) -> usize {
        let begins = |at: usize| self.stops.iter().any(|stop| stop.starts_with(&self.held[at..]));
        let starts = self.held.char_indices().map(|(at, _)| at);
        starts.map(|at| (at, begins(at))).find(|(_, begins)| *begins).map_or(0, |(at, _)| self.held.len() - at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn stream(tokens: &[u8], stops: &[&str]) -> (Vec<String>, bool) {
        let stops: Vec<String> = stops.iter().map(ToString::to_string).collect();
        let mut stream = TextStream::new(&Tokenizer::bytes(), &stops);
        let mut texts: Vec<String> = tokens.iter().map(|&byte| stream.push(byte.into())).collect();
        texts.push(stream.finish());
        (texts, stream.stopped())
    }

    #[test]
    fn incomplete_characters_are_held_back() {
        assert_eq!(stream("aé€😀".as_bytes(), &[]).0, ["a", "", "é", "", "", "€", "", "", "", "😀", ""]);
        // An incomplete character at the end, and bytes that begin no character.
        assert_eq!(stream(b"a\xe2\x82", &[]).0, ["a", "", "", "\u{fffd}"]);
        assert_eq!(stream(b"\xffab", &[]).0.concat(), "\u{fffd}ab");
        assert_eq!(stream(b"\xe2ab", &[]).0.concat(), "\u{fffd}ab");
    }

    /// A vocabulary of words, with the sign ▁ for a space, and of bytes.
    fn words() -> Tokenizer {
        let decoder = json!({"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}]});
        let special = json!({"id": 0, "content": "<s>", "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true});
        let vocab = json!({"<s>": 0, "▁a": 1, "b": 2, "<0xC3>": 3, "<0xA9>": 4});
        let file = json!({"version": "1.0", "truncation": null, "padding": null, "added_tokens": [special], "normalizer": null,
            "pre_tokenizer": null, "post_processor": null, "decoder": decoder, "model": {"type": "BPE", "dropout": null,
            "unk_token": null, "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": false,
            "byte_fallback": true, "vocab": vocab, "merges": []}});
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("tokenizer.json");
        std::fs::write(&path, file.to_string()).unwrap();
        Tokenizer::open(&path).unwrap()
    }

    #[test]
    fn the_first_token_after_a_prompt_keeps_its_space() {
        let text = |prompt: &[u32], tokens: &[u32]| {
            let mut stream = TextStream::new(&words(), &[]).after(prompt);
            tokens.iter().map(|&token| stream.push(token)).collect::<String>() + &stream.finish()
        };
        assert_eq!(text(&[0, 1], &[1, 2]), " ab");
        assert_eq!(text(&[1; 20], &[2, 1]), "b a");
        // A text that begins a document begins without a space.
        assert_eq!(text(&[0], &[1, 2]), "ab");
        assert_eq!(text(&[1, 0], &[1, 2]), "ab");
        assert_eq!(text(&[], &[1, 2]), "ab");
        // A byte that ends no character does not repeat the character before it.
        assert_eq!(text(&[0, 1], &[3, 4, 4, 2]), "é\u{fffd}b");
    }

    #[test]
    fn text_ends_before_a_stop_string() {
        assert_eq!(
            stream(b"one, END two", &["END"]),
            (["o", "n", "e", ",", " ", "", "", "", "", "", "", "", ""].map(String::from).to_vec(), true)
        );
        // A beginning that is not continued is text.
        assert_eq!(stream(b"aEEN EN", &["END"]).0.concat(), "aEEN EN");
        assert_eq!(stream(b"aEEN EN", &["END"]).0[..4], ["a", "", "E", ""]);
        assert_eq!(stream(b"ab|cd|", &["|", "cd"]).0.concat(), "ab");
        assert_eq!(stream(b"abc", &[""]), (["a", "b", "c", ""].map(String::from).to_vec(), false));
        assert_eq!(stream("a€".as_bytes(), &["€"]).0.concat(), "a");
    }
}
