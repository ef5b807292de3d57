//! Conversion of MMLU's CSV files to multiple-choice examples, tokenized with GPT-2's encoding.
//!
//! MMLU has one file for each subject and split, `SUBJECT_test.csv` for example. A row is a question, four choices and the
//! letter of the correct choice; there is no header. Examples are rendered without demonstrations, as in llm.c's
//! `dev/data/mmlu.py`: the context is `Question: …`, an empty line and `Answer:`, and a completion is a space and the choice.

use crate::download::Remote;
use crate::multiple_choice::{COMPLETIONS, Example, MAX_EXAMPLES, gpt2_ids};
use crate::{archive, local_files};
use anyhow::{Context, Result, ensure};
use rayon::prelude::*;
use std::fmt;
use std::io::BufReader;
use std::path::{Path, PathBuf};
use system::progress::{self, Unit};

const URL: &str = "https://people.eecs.berkeley.edu/~hendrycks/data.tar";
const SHA256: &str = "bec563ba4bac1d6aaf04141cd7d1605d7a5ca833e38f994051e818489592989b";

/// Returns the address of the archive with all splits.
pub fn remote() -> Remote {
    Remote::with_sha256(URL, SHA256)
}

/// The columns of a row.
const COLUMNS: [&str; 6] = ["question", "A", "B", "C", "D", "answer"];

/// A part of MMLU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Split {
    /// Demonstrations: 5 questions of each subject.
    Dev,
    /// 1,531 questions.
    Val,
    /// The questions that accuracies are reported on: 14,042.
    Test,
}

/// Formats the name of the split's directory.
impl fmt::Display for Split {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Dev => "dev",
            Self::Val => "val",
            Self::Test => "test",
        })
    }
}

/// The examples of some files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Questions {
    /// The examples, in the order of the files.
    pub examples: Vec<Example>,
    /// The number of examples with a shortened context.
    pub shortened: usize,
}

/// Returns the files of a split, sorted by name. They may be in `from`, or in a directory named after the split in `from` or
/// `from/data`, as in the published archive. If `from` is that archive, the files are extracted into `extracted`. If it is
/// another file, it is the only one.
pub fn find(from: &Path, split: Split, extracted: &Path) -> Result<Vec<PathBuf>> {
    let (name, suffix) = (split.to_string(), format!("_{split}.csv"));
    if from.extension().is_some_and(|extension| extension == "tar") {
        let archive = from.display().to_string();
        let file = bounded_file::open(from).with_context(|| format!("cannot open {archive}"))?;
        let expected = format!("a complete .tar archive with files {name}/*{suffix}");
        let is_wanted = |path: &Path| {
            path.parent().is_some_and(|parent| parent.ends_with(&name)) && path.to_string_lossy().ends_with(&suffix)
        };
        let bytes = file.metadata().with_context(|| format!("cannot read {archive}"))?.len();
        let counted = progress::start("extracting", Unit::Bytes, bytes).count(file);
        return archive::extract(BufReader::new(counted), &archive, &expected, extracted, is_wanted);
    }
    if !from.is_dir() {
        return Ok(vec![from.to_owned()]);
    }
    for directory in [from.to_owned(), from.join(&name), from.join("data").join(&name)] {
        if !directory.is_dir() {
            continue;
        }
        let files = local_files::with_suffix(&directory, &suffix)?;
        if !files.is_empty() {
            return Ok(files);
        }
    }
    anyhow::bail!(
        "{}: expected files *{suffix} in it, in {name}/ or in data/{name}/, found none; extract data.tar of \
         https://github.com/hendrycks/test there, or pass data.tar itself",
        from.display()
    )
}

/// Reads files in this order.
///
/// If a context with its longest completion has more than `max_tokens` tokens, the context loses tokens at its beginning.
/// llm.c requires fewer tokens than its sequence length of 1,024.
pub fn read(files: &[PathBuf], max_tokens: usize) -> Result<Questions> {
    let mut rows = Vec::new();
    for file in files {
        rows.extend(read_rows(file)?);
        ensure!(
            rows.len() <= MAX_EXAMPLES,
            "{}: expected at most {MAX_EXAMPLES} questions in all files, found {}",
            file.display(),
            rows.len()
        );
    }
    // Results keep the order of the rows, so the error of the first invalid row is reported.
    let examples: Vec<Result<(Example, bool)>> = rows
        .par_iter()
        .map(|row| row.example(max_tokens).with_context(|| format!("{}, line {}", row.file.display(), row.line)))
        .collect();
    let examples = examples.into_iter().collect::<Result<Vec<_>>>()?;
    let shortened = examples.iter().filter(|(_, shortened)| *shortened).count();
    Ok(Questions { examples: examples.into_iter().map(|(example, _)| example).collect(), shortened })
}

/// A row of a file.
struct Row<'a> {
    file: &'a Path,
    /// Line number of its beginning, from 1.
    line: u64,
    columns: csv::ByteRecord,
}

/// Reads the rows of a file, which has at least one.
fn read_rows(file: &Path) -> Result<Vec<Row<'_>>> {
    let name = file.display();
    let text = bounded_file::read(file, bounded_file::TEXT).with_context(|| format!("cannot read {name}"))?;
    // The number of columns is checked later, with a better message.
    let mut reader = csv::ReaderBuilder::new().has_headers(false).flexible(true).from_reader(&text[..]);
    let mut rows = Vec::new();
    for columns in reader.byte_records() {
        let columns = columns.with_context(|| format!("cannot read {name}"))?;
        let line = columns.position().map_or(0, |position| first_line(position, &text));
        rows.push(Row { file, line, columns });
    }
    ensure!(!rows.is_empty(), "{name}: expected at least one row, found none");
    Ok(rows)
}

/// Returns the number of the first line of a row. `position` precedes the empty lines before the row.
fn first_line(position: &csv::Position, text: &[u8]) -> u64 {
    let rest = text.get(position.byte() as usize..).unwrap_or_default();
    let empty = rest.iter().take_while(|byte| b"\r\n".contains(byte)).filter(|byte| **byte == b'\n').count();
    position.line() + empty as u64
}

impl Row<'_> {
    /// Tokenizes the row. Also returns whether the context was shortened.
    fn example(&self, max_tokens: usize) -> Result<(Example, bool)> {
        let found = self.columns.len();
        let columns = COLUMNS.join(", ");
        ensure!(found == COLUMNS.len(), "expected {} columns ({columns}), found {found}", COLUMNS.len());
        let column = |i: usize| {
            let text = str::from_utf8(&self.columns[i]);
            text.with_context(|| format!("column {}: expected UTF-8, found other bytes", COLUMNS[i]))
        };
        let question = column(0)?;
        ensure!(!question.trim().is_empty(), "column question: expected text, found none");
        let answer = column(5)?;
        let label = ["A", "B", "C", "D"].iter().position(|letter| *letter == answer);
        let label = label.with_context(|| {
            format!("column answer: expected A, B, C or D, found '{answer}' (the files have no header)")
        })?;
        let mut completions: [Vec<u32>; COMPLETIONS] = Default::default();
        for (i, completion) in completions.iter_mut().enumerate() {
            *completion = gpt2_ids(&format!(" {}", column(1 + i)?))?;
            let tokens = completion.len();
            ensure!(
                tokens < max_tokens,
                "column {}: expected a choice of fewer than {max_tokens} tokens, found {tokens}; use a larger --max-tokens",
                COLUMNS[1 + i]
            );
        }
        let mut context = gpt2_ids(&format!("Question: {question}\n\nAnswer:"))?;
        let longest = completions.iter().map(Vec::len).max().unwrap_or(0);
        let excess = (context.len() + longest).saturating_sub(max_tokens);
        context.drain(..excess);
        Ok((Example { context, completions, label }, excess > 0))
    }
}
