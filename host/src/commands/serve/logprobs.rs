//! Log probabilities of the tokens of a text, in the format of OpenAI's completions.

use anyhow::Result;
use engine::Engine;
use model::Generator;
use serde_json::{Map, Value, json};
use tokenizer::Tokenizer;

/// The least log probability. JSON has no infinite numbers.
const MIN_LOGPROB: f32 = -9999.0;

/// The tokens whose log probabilities are asked for.
#[derive(Clone, Copy, Debug)]
pub struct Scored {
    /// Place of the first token.
    pub first: usize,
    /// Number of the most likely tokens at each place.
    pub top: usize,
}

/// A place of a text: the log probability of its token, and the most likely tokens. `None` for the first token of a text.
type Place = Option<(f32, Vec<(u32, f32)>)>;

/// Returns the log probabilities of the tokens of `text` from `scored.first` on, before penalty and temperature.
pub fn logprobs(
    generator: &Generator,
    engine: &mut dyn Engine,
    tokenizer: &Tokenizer,
    text: &[u32],
    scored: Scored,
) -> Result<Value> {
    let softcap = generator.decoder.descriptor.softcap;
    let capped = |logit: f32| softcap.map_or(logit, |cap| cap * (logit / cap).tanh());
    let mut places: Vec<Place> = vec![None];
    generator.score(engine, text, &mut |logits, loss| {
        let token = text[places.len()];
        // The logarithm of the sum of exponentials.
        let sum = loss + capped(logits[token as usize]);
        let logprob = |logit: f32| (capped(logit) - sum).clamp(MIN_LOGPROB, 0.0);
        let top = most_likely(logits, scored.top).into_iter().map(|id| (id, logprob(logits[id as usize]))).collect();
        places.push(Some((logprob(logits[token as usize]), top)));
    })?;
    let (mut tokens, mut token_logprobs, mut top_logprobs, mut offsets) = (vec![], vec![], vec![], vec![]);
    let mut offset = 0;
    for (i, place) in places.into_iter().enumerate().take(text.len()).skip(scored.first) {
        let bytes = bytes_of(tokenizer, &text[..i], text[i]);
        offsets.push(json!(offset));
        // Characters, which are not counted by their bytes after the first one.
        offset += bytes.iter().filter(|&&byte| byte & 0xC0 != 0x80).count();
        let name = name_of(&bytes);
        let Some((logprob, top)) = place else {
            tokens.push(json!(name));
            token_logprobs.push(Value::Null);
            top_logprobs.push(Value::Null);
            continue;
        };
        let mut alternatives = Map::new();
        for (id, logprob) in top {
            // If several tokens have the same text, the most likely one counts.
            alternatives.entry(name_of(&bytes_of(tokenizer, &text[..i], id))).or_insert(json!(logprob));
        }
        alternatives.entry(name.clone()).or_insert(json!(logprob));
        tokens.push(json!(name));
        token_logprobs.push(json!(logprob));
        top_logprobs.push(Value::Object(alternatives));
    }
    Ok(
        json!({ "tokens": tokens, "token_logprobs": token_logprobs, "top_logprobs": top_logprobs, "text_offset": offsets }),
    )
}

/// Returns the `count` tokens with the largest logits, the largest first. Of equal ones, the first come first.
fn most_likely(logits: &[f32], count: usize) -> Vec<u32> {
    let mut best: Vec<u32> = Vec::with_capacity(count + 1);
    let mut least = f32::NEG_INFINITY;
    for (id, &logit) in logits.iter().enumerate() {
        if best.len() == count && (logit <= least || count == 0) {
            continue;
        }
        let at = best.partition_point(|&other| logits[other as usize] >= logit);
        best.insert(at, id as u32);
        best.truncate(count);
        least = best.last().map_or(least, |&last| logits[last as usize]);
    }
    best
}

/// Returns the bytes of a token after `before`. Some tokenizers decode the first token of a text without its space.
fn bytes_of(tokenizer: &Tokenizer, before: &[u32], token: u32) -> Vec<u8> {
    let context = &before[before.len().saturating_sub(1)..];
    let with_context = tokenizer.decode(&[context, &[token]].concat());
    let new = with_context.strip_prefix(&tokenizer.decode(context)[..]).map(<[u8]>::to_vec);
    new.unwrap_or_else(|| tokenizer.decode(&[token]))
}

/// Returns the name of a token: its text or, as in OpenAI's API, `bytes:` and escaped bytes that are not UTF-8.
fn name_of(bytes: &[u8]) -> String {
    match str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => format!("bytes:{}", bytes.escape_ascii()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_likely_tokens_are_in_order() {
        let logits = [1.0, 5.0, -2.0, 5.0, 3.0];
        assert_eq!(most_likely(&logits, 3), [1, 3, 4]);
        assert_eq!(most_likely(&logits, 1), [1]);
        assert_eq!(most_likely(&logits, 0), [0; 0]);
        assert_eq!(most_likely(&logits, 9), [1, 3, 4, 0, 2]);
    }

    #[test]
    fn bytes_that_are_no_text_are_escaped() {
        assert_eq!([name_of("é".as_bytes()), name_of(b"\xe2\x82")], ["é", "bytes:\\xe2\\x82"]);
    }
}
