//! `data small-world`: text and conversations about a small closed world, for the guide to a model that answers.

use anyhow::{Context, Result, ensure};
use chrono::{Datelike, Days, NaiveDate};
use rng::Mt19937;
use serde_json::json;
use std::collections::HashSet;
use std::io::{Write, stdout};
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::xxh3_64;

/// Write text, conversations and questions about sums, spelling and dates: enough to train a model that answers in minutes
///
/// The files are text.txt (one statement a line, to pretrain on), chat.jsonl (conversations, to tune on) and questions.jsonl (conversations,
/// to evaluate). No last question of the latter occurs in the other two files, not even as a statement.
#[derive(Debug, clap::Args)]
pub struct SmallWorld {
    /// Directory for the files
    #[arg(short, long, value_name = "DIR", default_value = "data/small-world")]
    out: PathBuf,

    /// Number of statements
    #[arg(long, value_name = "N", default_value = "120000")]
    statements: usize,

    /// Number of conversations, of one to six questions each
    #[arg(long, value_name = "N", default_value = "12000")]
    conversations: usize,

    /// Number of questions
    #[arg(long, value_name = "N", default_value = "500")]
    questions: usize,

    /// Seed of the random numbers
    #[arg(long, value_name = "N", default_value = "42")]
    seed: u32,

    /// Replace existing files
    #[arg(long)]
    overwrite: bool,
}

/// Most questions of a conversation.
const MOST_QUESTIONS: u32 = 6;

/// One fact of this many is left for the questions.
const HELD_OUT: u64 = 8;

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const CONSONANTS: &[u8] = b"bcdfghjklmnprstvz";
const VOWELS: &[u8] = b"aeiou";

/// Dates are days of the years from 1990 to 2029.
const FIRST_YEAR: i32 = 1990;
const DAYS: u32 = 14_610;

/// A fact of the world: the question, its answer, and both as a statement.
struct Fact {
    question: String,
    answer: String,
    statement: String,
}

impl Fact {
    /// Draws a fact of one of the three kinds.
    fn draw(rng: &mut Mt19937) -> Result<Self> {
        Ok(match rng.below(3) {
            0 => {
                let [a, b] = [0; 2].map(|_: i32| rng.below(100));
                let answer = (a + b).to_string();
                Self {
                    question: format!("What is {a} plus {b}?"),
                    statement: format!("{a} plus {b} is {answer}."),
                    answer,
                }
            }
            1 => {
                let word = word(rng);
                let answer = word.chars().map(String::from).collect::<Vec<_>>().join("-");
                Self { question: format!("Spell {word}."), statement: format!("{word} is spelled {answer}."), answer }
            }
            _ => {
                let first = NaiveDate::from_ymd_opt(FIRST_YEAR, 1, 1).context("a valid date")?;
                let day = first.checked_add_days(Days::new(rng.below(DAYS).into())).context("a valid date")?;
                let (before, answer) = (written(day), written(day.succ_opt().context("a valid date")?));
                Self {
                    question: format!("Which day follows {before}?"),
                    statement: format!("{before} is followed by {answer}."),
                    answer,
                }
            }
        })
    }

    /// Reports whether the fact is left for the questions.
    fn is_held_out(&self) -> bool {
        xxh3_64(self.question.as_bytes()).is_multiple_of(HELD_OUT)
    }

    fn drawn(rng: &mut Mt19937, held_out: bool) -> Result<Self> {
        loop {
            let fact = Self::draw(rng)?;
            if fact.is_held_out() == held_out {
                return Ok(fact);
            }
        }
    }
}

/// Returns a word of one to three syllables.
fn word(rng: &mut Mt19937) -> String {
    let mut word = String::new();
    for _ in 0..=rng.below(3) {
        let mut letter = |letters: &[u8]| char::from(letters[rng.below(letters.len() as u32) as usize]);
        word.extend([letter(CONSONANTS), letter(VOWELS)]);
        if rng.below(5) < 2 {
            word.push(char::from(CONSONANTS[rng.below(CONSONANTS.len() as u32) as usize]));
        }
    }
    word
}

fn written(day: NaiveDate) -> String {
    format!("{} {} {}", day.day(), MONTHS[day.month0() as usize], day.year())
}

/// Draws the questions of a conversation. Only the last one may be `held_out`.
fn conversation(rng: &mut Mt19937, held_out: bool) -> Result<Vec<Fact>> {
    let mut facts = (0..rng.below(MOST_QUESTIONS)).map(|_| Fact::drawn(rng, false)).collect::<Result<Vec<_>>>()?;
    facts.push(Fact::drawn(rng, held_out)?);
    Ok(facts)
}

/// Returns the conversation as a line of JSON.
fn messages(facts: &[Fact]) -> String {
    let message = |role: &str, content: &str| json!({ "role": role, "content": content });
    let turn = |fact: &Fact| [message("user", &fact.question), message("assistant", &fact.answer)];
    json!({ "messages": facts.iter().flat_map(turn).collect::<Vec<_>>() }).to_string()
}

/// Writes the files.
pub fn run(args: &SmallWorld) -> Result<()> {
    let files = ["text.txt", "chat.jsonl", "questions.jsonl"].map(|name| args.out.join(name));
    for path in &files {
        ensure!(
            args.overwrite || !path.exists(),
            "{}: expected no file of this name, found one; add --overwrite, or choose another --out",
            path.display()
        );
    }
    atomic_file::create_directory(&args.out)?;
    let [text, chat, questions] = &files;
    let mut rng = Mt19937::new(args.seed);
    write(text, args.statements, |_| Ok(Fact::drawn(&mut rng, false)?.statement))?;
    write(chat, args.conversations, |_| Ok(messages(&conversation(&mut rng, false)?)))?;
    let mut asked = HashSet::new();
    write(questions, args.questions, |_| {
        loop {
            let facts = conversation(&mut rng, true)?;
            if asked.insert(facts[facts.len() - 1].question.clone()) {
                return Ok(messages(&facts));
            }
        }
    })?;
    for path in &files {
        writeln!(stdout(), "wrote {}", path.display())?;
    }
    Ok(())
}

/// Writes `lines` lines to a file.
fn write(path: &Path, lines: usize, mut line: impl FnMut(usize) -> Result<String>) -> Result<()> {
    atomic_file::write(path, |out| (0..lines).try_for_each(|i| Ok(writeln!(out, "{}", line(i)?)?)))
        .with_context(|| format!("cannot write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn facts_are_true_and_depend_on_the_seed() {
        let mut rng = Mt19937::new(1);
        let facts: Vec<Fact> = (0..3000).map(|_| Fact::draw(&mut rng).unwrap()).collect();
        for Fact { question, answer, statement } in &facts {
            let words: Vec<&str> = question.trim_end_matches(['?', '.']).split(' ').collect();
            match words[..] {
                ["What", "is", a, "plus", b] => {
                    assert_eq!(a.parse::<u32>().unwrap() + b.parse::<u32>().unwrap(), answer.parse::<u32>().unwrap());
                }
                ["Spell", word] => assert_eq!(answer.replace('-', ""), word),
                _ => assert!(statement.ends_with(&format!("is followed by {answer}."))),
            }
            assert!(statement.contains(answer));
        }
        let held_out = facts.iter().filter(|fact| fact.is_held_out()).count();
        assert!((250..500).contains(&held_out), "{held_out}");
        let day = |y, m, d| written(NaiveDate::from_ymd_opt(y, m, d).unwrap());
        assert_eq!([day(2024, 2, 29), day(1999, 12, 31)], ["29 February 2024", "31 December 1999"]);
        let first = |seed| Fact::draw(&mut Mt19937::new(seed)).unwrap().question;
        assert!(first(1) == first(1) && (2..9).any(|seed| first(seed) != first(1)));
    }
}
