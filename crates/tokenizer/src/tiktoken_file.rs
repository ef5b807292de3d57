//! Llama 3's `tokenizer.model`: one token per line, as base64 and decimal rank.

use crate::Special;
use crate::bpe::Bpe;
use crate::split::Pattern;
use anyhow::{Context, Result, bail, ensure};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;

/// Number of ids after the ranks that Llama 3 reserves for special tokens.
const RESERVED: usize = 256;

/// Number of ranks of Llama 3. A custom encoding with its split pattern may have fewer.
const LLAMA3: usize = 128_000;

/// Encodings with another split pattern or other special tokens, by their number of ranks.
const OTHER_ENCODINGS: [(usize, &str, &str); 5] = [
    (50_256, "r50k_base", "pass --tokenizer gpt2, which is this encoding"),
    (100_256, "cl100k_base", CONVERT),
    (151_643, "Qwen", CONVERT),
    (199_998, "o200k_base", CONVERT),
    (200_000, "Llama 4", CONVERT),
];
const CONVERT: &str = "pass a tokenizer.json of this encoding";

/// Parses the file. `name` names it in errors.
pub fn parse(name: &str, text: &str) -> Result<(Bpe, Vec<Special>)> {
    let mut tokens = Vec::new();
    for (i, line) in text.lines().enumerate() {
        let at = || format!("{name}:{}", i + 1);
        if line.is_empty() {
            continue;
        }
        let Some((token, rank)) = line.split_once(' ') else {
            bail!("{}: expected a base64 token, a space and a rank, found {line:?}", at());
        };
        let bytes =
            BASE64_STANDARD.decode(token).with_context(|| format!("{}: expected base64, found {token:?}", at()))?;
        let rank: usize = rank.parse().with_context(|| format!("{}: expected a rank, found {rank:?}", at()))?;
        ensure!(
            rank == tokens.len(),
            "{}: expected rank {}, the number of the tokens before it, found {rank}",
            at(),
            tokens.len()
        );
        tokens.push(bytes.into_boxed_slice());
    }
    if let Some((ranks, other, fix)) = OTHER_ENCODINGS.into_iter().find(|(ranks, ..)| *ranks == tokens.len()) {
        bail!("{name}: expected the {LLAMA3} ranks of Llama 3, found {ranks}, those of {other}; {fix}");
    }
    let ranks = tokens.len();
    ensure!(ranks <= LLAMA3, "{name}: expected at most the {LLAMA3} ranks of Llama 3, found {ranks}; {CONVERT}");
    let first = tokens.len() as u32;
    let bpe = Bpe::new(Pattern::Llama3, tokens).with_context(|| format!("{name}: not a tokenizer"))?;
    Ok((
        bpe,
        special_tokens().into_iter().enumerate().map(|(i, text)| Special { text, id: first + i as u32 }).collect(),
    ))
}

/// Returns Llama 3's special tokens in the order of their ids
/// ([tokenizer.py](https://github.com/meta-llama/llama3/blob/main/llama/tokenizer.py)).
fn special_tokens() -> Vec<String> {
    let named = [
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|reserved_special_token_0|>",
        "<|reserved_special_token_1|>",
        "<|reserved_special_token_2|>",
        "<|reserved_special_token_3|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|reserved_special_token_4|>",
        "<|eot_id|>",
    ];
    let named = named.map(str::to_owned);
    let reserved = (5..).map(|i| format!("<|reserved_special_token_{i}|>"));
    named.into_iter().chain(reserved).take(RESERVED).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file() -> String {
        let bytes = (0..=255u8).map(|byte| vec![byte]);
        let tokens = bytes.chain([b"he".to_vec(), b"ll".to_vec(), b"hell".to_vec()]);
        let line = |(rank, token): (usize, Vec<u8>)| format!("{} {rank}\n", BASE64_STANDARD.encode(token));
        tokens.enumerate().map(line).collect()
    }

    #[test]
    fn ranks_and_special_tokens_are_read() {
        let (bpe, special) = parse("tokenizer.model", &file()).unwrap();
        let mut ids = Vec::new();
        bpe.encode("hello", &mut ids);
        assert_eq!(ids, [258, u32::from(b'o')]);
        assert_eq!(special.len(), 256);
        let id = |text: &str| special.iter().find(|token| token.text == text).unwrap().id - 259;
        assert_eq!((id("<|begin_of_text|>"), id("<|eot_id|>"), id("<|reserved_special_token_250|>")), (0, 9, 255));
    }

    #[test]
    fn encodings_with_another_pattern_are_errors() {
        let token = |rank: u32| [&rank.to_le_bytes()[..], &[0]].concat();
        let line = |rank: u32| format!("{} {rank}", BASE64_STANDARD.encode(token(rank)));
        let lines = |ranks: u32| (0..ranks).map(line).collect::<Vec<_>>().join("\n");
        let error = format!("{:#}", parse("t.model", &lines(50_256)).unwrap_err());
        assert!(
            error.contains("t.model: expected the 128000 ranks of Llama 3, found 50256, those of r50k_base"),
            "{error}"
        );
        assert!(error.contains("--tokenizer gpt2"), "{error}");
        let error = format!("{:#}", parse("t.model", &lines(100_256)).unwrap_err());
        assert!(error.contains("those of cl100k_base; pass a tokenizer.json"), "{error}");
        let error = format!("{:#}", parse("t.model", &lines(200_000)).unwrap_err());
        assert!(error.contains("those of Llama 4; pass a tokenizer.json"), "{error}");
        let error = format!("{:#}", parse("t.model", &lines(163_584)).unwrap_err());
        assert!(error.contains("at most the 128000 ranks of Llama 3, found 163584; pass"), "{error}");
    }

    #[test]
    fn damaged_lines_are_errors_that_name_the_line() {
        let error = |text: &str| format!("{:#}", parse("t.model", text).unwrap_err());
        assert!(error("YQ==").contains("t.model:1: expected a base64 token, a space and a rank"));
        assert!(error("YQ== 0\n?? 1").contains("t.model:2: expected base64"));
        assert!(error("YQ== x").contains("t.model:1: expected a rank, found \"x\""));
        assert!(error("YQ== 3").contains("expected rank 0, the number of the tokens before it, found 3"));
        assert!(error("YQ== 0").contains("none for byte 0"));
    }
}
