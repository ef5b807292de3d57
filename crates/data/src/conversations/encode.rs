//! The tokens of a conversation, and their flags.

use super::record::Conversation;
use super::{Reason, Render, RenderError, Skip};
use crate::mask::{LOSS, START};
use anyhow::{Result, ensure};
use std::collections::HashSet;
use std::ops::Range;
use tokenizer::Tokenizer;

/// A character inside of each special token in a message. It is no character of Unicode, so no text needs it. The two that follow mark the
/// turns of the assistant while the template is rendered.
const BREAK: char = '\u{fdd0}';
const RESERVED: [char; 3] = [BREAK, '\u{fdd1}', '\u{fdd2}'];

/// A conversation as tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Encoded {
    pub ids: Vec<u32>,
    /// The flags of each token.
    pub flags: Vec<u8>,
    /// Bytes of text.
    pub bytes: usize,
    /// Special tokens in messages that are ordinary text.
    pub plain_special: usize,
    /// For each turn of the assistant with a token, the special token that ends it.
    pub ends: Vec<Option<u32>>,
}

impl Encoded {
    /// Returns the number of tokens with loss.
    pub fn targets(&self) -> usize {
        self.flags.iter().filter(|&&flags| u32::from(flags) & LOSS != 0).count()
    }
}

/// Turns records into tokens.
pub struct Encoder<'a> {
    tokenizer: &'a Tokenizer,
    allow_special: bool,
    renderer: &'a dyn Render,
    special: HashSet<u32>,
}

impl<'a> Encoder<'a> {
    pub fn new(tokenizer: &'a Tokenizer, allow_special: bool, renderer: &'a dyn Render) -> Self {
        let special = tokenizer.special().iter().map(|token| token.id).collect();
        Self { tokenizer, allow_special, renderer, special }
    }

    /// Encodes a record.
    pub fn encode(&self, record: &str) -> Result<Result<Encoded, Skip>> {
        let mut conversation = match Conversation::read(record)? {
            Ok(conversation) => conversation,
            Err(skip) => return Ok(Err(skip)),
        };
        let plain_special = match self.break_special(&mut conversation) {
            Ok(plain_special) => plain_special,
            Err(skip) => return Ok(Err(skip)),
        };
        let rendered = match self.renderer.render(&conversation.to_json()?) {
            Ok(rendered) => rendered,
            Err(RenderError::Rejected(reason)) => return Ok(Err(Reason::Rejected.because(reason))),
            Err(RenderError::Failed(error)) => return Err(error),
        };
        let (text, broken) = without_breaks(&rendered.text);
        // Positions in the text without the characters that broke special tokens.
        let shifted = |at: usize| at - BREAK.len_utf8() * rendered.text[..at].matches(BREAK).count();
        let turns: Vec<_> = rendered.turns.iter().map(|turn| shifted(turn.start)..shifted(turn.end)).collect();
        let encoded = self.tokens(&text, &broken, &turns, rendered.is_exact)?;
        if encoded.targets() == 0 {
            return Ok(Err(Reason::NoTarget.because("found no text of the assistant".into())));
        }
        Ok(Ok(Encoded { bytes: text.len(), plain_special, ..encoded }))
    }

    /// Breaks the special tokens in messages, so that they are found in the rendered text. Returns their number.
    fn break_special(&self, conversation: &mut Conversation) -> Result<usize, Skip> {
        let (mut reserved, mut unbreakable, mut count) = (false, None, 0);
        conversation.for_each_text(&mut |text| {
            reserved |= text.contains(RESERVED);
            if self.allow_special {
                return;
            }
            let mut broken = String::new();
            let mut copied = 0;
            self.tokenizer.find_special(text, |token| {
                let first = text[token.clone()].chars().next().map_or(0, char::len_utf8);
                if !self.tokenizer.breaks_special() || first == token.len() {
                    unbreakable.get_or_insert_with(|| text[token.clone()].to_owned());
                }
                broken += &text[copied..token.start + first];
                broken.push(BREAK);
                copied = token.start + first;
                count += 1;
            });
            if copied > 0 {
                *text = broken + &text[copied..];
            }
        });
        if reserved {
            return Err(Reason::Reserved.because("found one of them".into()));
        }
        match unbreakable {
            Some(token) => Err(Reason::Special.because(format!("found {token}"))),
            None => Ok(count),
        }
    }

    fn tokens(&self, text: &str, broken: &[usize], turns: &[Range<usize>], is_exact: bool) -> Result<Encoded> {
        let tokens = self.tokenizer.encode_with_ranges(text, broken)?;
        let mut encoded = Encoded { ids: tokens.iter().map(|(id, _)| *id).collect(), ..Encoded::default() };
        let highest = encoded.ids.iter().max().copied().unwrap_or(0) as usize;
        ensure!(
            highest < self.tokenizer.vocab(),
            "{}: expected ids below {}, found {highest}; check the tokenizer",
            self.tokenizer,
            self.tokenizer.vocab()
        );
        encoded.flags = vec![0; tokens.len()];
        for turn in turns {
            let mut end = turn.end;
            // A token has loss if its text overlaps the turn. transformers has the same rule.
            let overlaps = |range: &Range<usize>| range.start < turn.end && range.end > turn.start;
            if !is_exact {
                let is_end = |(id, range): &&(u32, Range<usize>)| self.special.contains(id) && overlaps(range);
                let last = tokens.iter().rfind(is_end).map(|(_, range)| range.end);
                end = last.filter(|&last| last <= end && text[last..end].trim().is_empty()).unwrap_or(end);
            }
            let mut last = None;
            for (i, (id, range)) in tokens.iter().enumerate() {
                // The first token of a conversation is no target.
                if i > 0 && overlaps(range) && range.start < end {
                    encoded.flags[i] = LOSS as u8;
                    last = Some(*id);
                }
            }
            encoded.ends.extend(last.map(|id| Some(id).filter(|id| self.special.contains(id))));
        }
        if let Some(first) = encoded.flags.first_mut() {
            *first = START as u8;
        }
        Ok(encoded)
    }
}

/// Removes the characters that break special tokens. Returns the text and their positions.
fn without_breaks(text: &str) -> (String, Vec<usize>) {
    let (mut plain, mut broken) = (String::with_capacity(text.len()), Vec::new());
    for (i, part) in text.split(BREAK).enumerate() {
        if i > 0 {
            broken.push(plain.len());
        }
        plain += part;
    }
    (plain, broken)
}
