//! Questions that are answered by generation, and the comparison of an answer with the reference.
//!
//! A file has one JSON object per line: `question` and `answer`, as in GSM8K; `prompt` and `answer`; or `messages`, a conversation whose
//! last message is the reference.
//!
//! A reference with `####` is a number, as in GSM8K: the number after it. The number of an answer is the one after its last `####`, or
//! its last number if there is no `####` with one. Any other reference is compared as text, without white space around it.

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;
use std::path::Path;

/// The mark before the result of a calculation.
const MARK: &str = "####";

/// A message of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Turn {
    /// `system`, `user` or `assistant`.
    pub role: String,
    /// Text.
    pub content: String,
}

/// How a question is asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ask {
    /// A question, which a model without a chat template reads as `Question: …` and `Answer:`.
    Question(String),
    /// A text to continue.
    Prompt(String),
    /// A conversation up to the answer.
    Messages(Vec<Turn>),
}

/// A question with its reference.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Question {
    /// Line in its file, from 1.
    pub line: usize,
    /// The question.
    pub ask: Ask,
    /// The correct answer, with its calculation if it has one.
    pub answer: String,
    reference: Reference,
}

/// The text that an answer must contain.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Reference {
    Number(String),
    Text(String),
}

#[derive(Deserialize)]
struct Line {
    question: Option<String>,
    prompt: Option<String>,
    messages: Option<Vec<Turn>>,
    answer: Option<String>,
}

/// Reads the questions of a file.
pub fn read(path: &Path) -> Result<Vec<Question>> {
    let name = path.display();
    let text = bounded_file::read_to_string(path, bounded_file::TEXT).with_context(|| format!("cannot read {name}"))?;
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let read = |(i, line)| parse(i + 1, line).with_context(|| format!("{name}, line {}", i + 1));
    let questions = lines.map(read).collect::<Result<Vec<_>>>()?;
    ensure!(!questions.is_empty(), "{name}: expected one question per line, found none");
    Ok(questions)
}

fn parse(number: usize, line: &str) -> Result<Question> {
    let line: Line = serde_json::from_str(line).context("expected a JSON object with texts")?;
    let with_answer = || line.answer.context("expected the field 'answer', found none");
    let (ask, answer) = match (line.question, line.prompt, line.messages) {
        (Some(question), None, None) => (Ask::Question(question), with_answer()?),
        (None, Some(prompt), None) => (Ask::Prompt(prompt), with_answer()?),
        (None, None, Some(mut messages)) => {
            let last = messages.pop().filter(|last| last.role == "assistant" && !messages.is_empty());
            let last = last.context(
                "messages: expected a conversation that ends with a message of assistant, found another one",
            )?;
            (Ask::Messages(messages), last.content)
        }
        _ => bail!("expected one of the fields 'question', 'prompt' and 'messages', found none or several"),
    };
    let reference = if let Some((_, after)) = answer.rsplit_once(MARK) {
        let number = first_number(after);
        Reference::Number(number.with_context(|| format!("answer: expected a number after {MARK}, found none"))?)
    } else {
        ensure!(!answer.trim().is_empty(), "answer: expected text, found none");
        Reference::Text(answer.trim().to_owned())
    };
    Ok(Question { line: number, ask, answer, reference })
}

impl Question {
    /// Returns the part of an answer that is compared with the reference.
    pub fn extract(&self, answer: &str) -> Option<String> {
        match &self.reference {
            Reference::Number(_) => {
                let marked = answer.rsplit_once(MARK).and_then(|(_, after)| first_number(after));
                marked.or_else(|| numbers(answer).last())
            }
            Reference::Text(_) => Some(answer.trim().to_owned()),
        }
    }

    /// Returns whether an extracted answer is correct.
    pub fn accepts(&self, extracted: Option<&str>) -> bool {
        match (&self.reference, extracted) {
            (Reference::Text(text), Some(found)) => text == found,
            (Reference::Number(number), Some(found)) => match (number.parse::<f64>(), found.parse::<f64>()) {
                (Ok(number), Ok(found)) => number.total_cmp(&found).is_eq(),
                _ => number == found,
            },
            (_, None) => false,
        }
    }

    /// Returns the reference, as `extract` returns answers.
    pub fn reference(&self) -> &str {
        match &self.reference {
            Reference::Number(text) | Reference::Text(text) => text,
        }
    }
}

fn first_number(text: &str) -> Option<String> {
    numbers(text).next()
}

/// Returns the numbers of a text without the commas between their digits: an optional minus sign, digits, and an optional decimal part. A
/// minus sign counts only if no digit or letter precedes it.
fn numbers(text: &str) -> impl Iterator<Item = String> {
    let mut rest = text;
    let mut before = None;
    std::iter::from_fn(move || {
        let start = rest.find(|c: char| c.is_ascii_digit())?;
        let preceding = |text: &str| text.chars().next_back();
        let (skipped, from) = rest.split_at(start);
        let unsigned = skipped.strip_suffix('-');
        let is_negative = unsigned.is_some_and(|text| {
            let before = preceding(text).or(if text.is_empty() { before } else { None });
            !before.is_some_and(char::is_alphanumeric)
        });
        let bytes = from.as_bytes();
        let is_digit = |at: usize| bytes.get(at).is_some_and(u8::is_ascii_digit);
        let (mut end, mut has_point) = (0, false);
        // A comma or a point belongs to the number only between digits.
        while is_digit(end) || (is_digit(end + 1) && !has_point && b",.".contains(&bytes[end])) {
            has_point |= bytes[end] == b'.';
            end += 1;
        }
        let (number, after) = from.split_at(end);
        (before, rest) = (preceding(number), after);
        let sign = if is_negative { "-" } else { "" };
        Some(format!("{sign}{}", number.replace(',', "")))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn question(answer: &str) -> Question {
        parse(1, &serde_json::json!({ "question": "?", "answer": answer }).to_string()).unwrap()
    }

    #[test]
    fn numbers_have_signs_commas_and_decimals() {
        let all = |text| numbers(text).collect::<Vec<_>>();
        assert_eq!(all("$1,234.50, -3 or 4-5? x-7, 1.2.3 and 8."), ["1234.50", "-3", "4", "5", "7", "1.2", "3", "8"]);
        assert_eq!(all("-1,000,000 (−2) ½ 3, 4"), ["-1000000", "2", "3", "4"]);
        assert_eq!(all("none"), [""; 0]);
        assert_eq!(all("-0.5%"), ["-0.5"]);
    }

    #[test]
    fn the_number_after_the_mark_is_compared() {
        let question = question("He has 3 * 6 = <<3*6=18>>18 eggs.\n#### 1,018");
        assert_eq!(question.reference(), "1018");
        for (answer, extracted, correct) in [
            ("#### 1018", Some("1018"), true),
            ("It is 7.\n#### 1,018.00 dollars, or 9", Some("1018.00"), true),
            ("#### 5 #### $1,018.", Some("1018"), true),
            ("first 1018 then 5", Some("5"), false),
            ("so there are 1018", Some("1018"), true),
            ("1018 ####", Some("1018"), true),
            ("#### -1018", Some("-1018"), false),
            ("no idea", None, false),
        ] {
            assert_eq!(question.extract(answer).as_deref(), extracted, "{answer}");
            assert_eq!(question.accepts(extracted), correct, "{answer}");
        }
    }

    #[test]
    fn text_is_compared_without_white_space_around_it() {
        let question = question(" New Delhi\n");
        assert!(question.accepts(question.extract("\n New Delhi ").as_deref()));
        assert!(!question.accepts(question.extract("New Delhi.").as_deref()));
        assert!(!question.accepts(question.extract("").as_deref()));
    }

    #[test]
    fn each_form_of_a_line_is_read_and_others_are_errors() {
        let read = |line: &str| parse(1, line);
        let conversation = r#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}"#;
        let turn = Turn { role: "user".to_owned(), content: "a".to_owned() };
        assert_eq!(read(conversation).unwrap().ask, Ask::Messages(vec![turn]));
        assert_eq!(read(conversation).unwrap().reference(), "b");
        assert_eq!(read(r#"{"prompt": "a", "answer": "b", "id": 3}"#).unwrap().ask, Ask::Prompt("a".to_owned()));
        for (line, expected) in [
            ("[1]", "expected a JSON object with texts"),
            (r#"{"question": 3, "answer": "b"}"#, "expected a JSON object with texts"),
            (r#"{"question": "a"}"#, "expected the field 'answer', found none"),
            (r#"{"answer": "a"}"#, "found none or several"),
            (r#"{"question": "a", "prompt": "a", "answer": "b"}"#, "found none or several"),
            (r#"{"question": "a", "answer": " "}"#, "answer: expected text, found none"),
            (r#"{"question": "a", "answer": "x #### y"}"#, "answer: expected a number after ####, found none"),
            (r#"{"messages": []}"#, "ends with a message of assistant"),
            (r#"{"messages": [{"role": "assistant", "content": "b"}]}"#, "ends with a message of assistant"),
            (r#"{"messages": [{"role": "user", "content": "a"}]}"#, "ends with a message of assistant"),
        ] {
            let message = format!("{:#}", read(line).unwrap_err());
            assert!(message.contains(expected), "{line}: {message}");
        }
    }
}
