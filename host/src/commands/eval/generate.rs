//! `eval generate`: the accuracy of generated answers.

use super::STANDARD_OUTPUT;
use crate::chat_template::{ChatTemplate, Message};
use crate::commands::generation::{Loaded, check_prompt, divisor, end_tokens, load, tokenizer_of};
use crate::commands::json;
use crate::commands::resources::{Hardware, open_with_adapters};
use crate::evaluate::exact_match::{self, Ask, Question};
use crate::generate::{Finish, Request, TextStream, generate};
use crate::output::{self, Kind, Mark};
use crate::terminal::{self, counted};
use crate::values::{count, non_negative, seed, whole_number};
use anyhow::{Context, Result, bail, ensure};
use engine::ops::SlotSampling;
use interchange::ModelSource;
use serde::Serialize;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;
use system::progress::{self, Unit};
use tokenizer::Tokenizer;

/// Generate answers to the questions of a file, and compute how many are correct
///
/// A line of FILE is a JSON object: question and answer, as in GSM8K; prompt and answer; or messages, whose last message is the reference.
/// A reference with #### is a number: the answer's number after its last ####, or its last number, must be equal. Any other reference must
/// be equal as text.
#[derive(Debug, clap::Args)]
pub struct Generate {
    /// Run, model file or Hugging Face directory
    #[arg(value_name = "MODEL")]
    model: PathBuf,

    /// Questions, one JSON object per line
    #[arg(value_name = "FILE")]
    file: PathBuf,

    /// Add low-rank adapters to the model: a directory of PEFT, or a run with --lora-rank
    #[arg(long, value_name = "DIR")]
    lora: Option<PathBuf>,

    /// Use only the first N questions [default: all]
    #[arg(long, value_name = "N", value_parser = count)]
    max: Option<usize>,

    /// Put K solved examples before each question: the first of --shots-from, or the first of FILE, which are not evaluated then
    #[arg(long, value_name = "K", default_value = "0", value_parser = whole_number)]
    shots: usize,

    /// File with the examples of --shots
    #[arg(long, value_name = "FILE", requires = "shots")]
    shots_from: Option<PathBuf>,

    /// Maximum number of tokens in an answer
    #[arg(short = 'g', long, value_name = "N", default_value = "512", value_parser = count)]
    tokens: usize,

    /// End an answer before this string; may be repeated [default: an empty line if the model has no chat template]
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,

    /// Number of answers to each question. The accuracy is their mean, and pass@K counts questions with a correct one
    #[arg(long, value_name = "K", default_value = "1", value_parser = count)]
    samples: usize,

    /// Divides the logits; 0 always takes the most likely token
    #[arg(long, value_name = "X", default_value = "0", value_parser = non_negative)]
    temperature: f32,

    /// Seed of the random numbers. Answer i uses seed + i
    #[arg(long, value_name = "N", default_value = "1337", value_parser = seed)]
    seed: u32,

    /// Tokenizer: gpt2, bytes, or a tokenizer.json or tokenizer.model [default: the tokenizer next to the model, or the built-in one with
    /// the model's vocabulary size]
    #[arg(long, value_name = "NAME|FILE")]
    tokenizer: Option<String>,

    /// Answers that are generated at a time
    #[arg(short, long, value_name = "B", default_value = "64", value_parser = count)]
    batch: usize,

    /// Also write each question with the answers of the model to this file, as JSON lines
    #[arg(short, long, value_name = "FILE")]
    out: Option<PathBuf>,

    /// Also write the results to this file as JSON. Without FILE, print JSON instead of text
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = STANDARD_OUTPUT)]
    json: Option<PathBuf>,

    #[command(flatten)]
    hardware: Hardware,
}

/// The files that the command writes.
const RESULTS: Kind =
    Kind { name: "results of eval generate", mark: Mark::Keys(&["model", "version", "machine", "pass"]) };
const ANSWERS: Kind = Kind { name: "answers of eval generate", mark: Mark::Start(&[b"{\"line\":"]) };

/// The end of an answer of a model without a chat template, and the text between examples.
const EMPTY_LINE: &str = "\n\n";

/// The results, as they are written to JSON.
#[derive(Debug, Serialize)]
struct Results {
    model: String,
    data: String,
    version: &'static str,
    machine: String,
    precision: &'static str,
    questions: usize,
    /// Answers to each question.
    samples: usize,
    /// Correct answers.
    correct: usize,
    /// Fraction of answers that are correct.
    accuracy: f64,
    /// Fraction of questions with a correct answer.
    pass: f64,
    /// Generated tokens.
    tokens: usize,
    seconds: f64,
}

/// A question and its answers, as they are written to a line of JSON.
#[derive(Serialize)]
struct AnswerLine<'a> {
    line: usize,
    /// The text that the model read.
    prompt: &'a str,
    reference: &'a str,
    answers: Vec<Answer>,
}

#[derive(Serialize)]
struct Answer {
    text: String,
    /// The part that is compared with the reference.
    extracted: Option<String>,
    correct: bool,
    tokens: usize,
    finish_reason: &'static str,
}

/// Prints the accuracy.
pub fn run(args: &Generate) -> Result<()> {
    let json = args.json.as_deref().filter(|path| *path != Path::new(STANDARD_OUTPUT));
    json.map_or(Ok(()), |path| output::check(path, RESULTS))?;
    args.out.as_deref().map_or(Ok(()), |path| output::check(path, ANSWERS))?;
    output::check_distinct(json, args.out.as_deref())?;
    let is_greedy = divisor(args.temperature) <= 0.0;
    ensure!(
        args.samples == 1 || !is_greedy,
        "--samples {}: expected a --temperature above 0, found 0, with which all answers are equal",
        args.samples
    );
    let source = open_with_adapters(&args.model, args.lora.as_deref())?;
    let tokenizer = tokenizer_of(&source, args.tokenizer.as_deref())?;
    let template = ChatTemplate::of(&source)?;
    template.as_ref().map_or(Ok(()), ChatTemplate::check)?;
    let (examples, questions) = args.questions()?;
    let texts: Vec<String> = questions
        .iter()
        .map(|question| {
            let text = render(question, &examples, template.as_ref());
            text.with_context(|| format!("{}, line {}", args.file.display(), question.line))
        })
        .collect::<Result<_>>()?;
    let prompts = texts.iter().map(|text| encode(text, &tokenizer, template.is_some(), source.descriptor().vocab));
    let prompts = prompts.collect::<Result<Vec<_>>>()?;
    let stops =
        if args.stop.is_empty() && template.is_none() { vec![EMPTY_LINE.to_owned()] } else { args.stop.clone() };
    let results = args.evaluate(source, &tokenizer, (&questions, &texts, &prompts), &stops)?;
    let Results { questions, samples, correct, accuracy, pass, tokens, seconds, .. } = &results;
    let rate = *tokens as f64 / seconds;
    terminal::note(&format!(
        "generated {} in {seconds:.2} s: {rate:.1} tokens/s, prompts included",
        counted(*tokens, "token")
    ))?;
    if args.json.as_deref() == Some(Path::new(STANDARD_OUTPUT)) {
        return json::print(&results);
    }
    terminal::line(&format!("accuracy: {correct}/{} = {accuracy:.6}", questions * samples))?;
    if *samples > 1 {
        let passed = (pass * *questions as f64).round();
        terminal::line(&format!("pass@{samples}: {passed}/{questions} = {pass:.6}"))?;
    }
    json.map_or(Ok(()), |path| json::write(path, &results))
}

impl Generate {
    /// Returns the examples and the questions.
    fn questions(&self) -> Result<(Vec<Question>, Vec<Question>)> {
        let mut questions = exact_match::read(&self.file)?;
        let source = self.shots_from.as_ref().unwrap_or(&self.file);
        let mut examples = match &self.shots_from {
            Some(path) => exact_match::read(path)?,
            None => questions.drain(..self.shots.min(questions.len())).collect(),
        };
        let found = examples.len();
        ensure!(
            found >= self.shots && !questions.is_empty(),
            "--shots {}: expected as many questions in {}{}, found {found}",
            self.shots,
            source.display(),
            if self.shots_from.is_none() { " and others to evaluate" } else { "" }
        );
        examples.truncate(self.shots);
        questions.truncate(self.max.unwrap_or(usize::MAX));
        Ok((examples, questions))
    }

    fn evaluate(
        &self,
        source: ModelSource,
        tokenizer: &Tokenizer,
        (questions, texts, prompts): (&[Question], &[String], &[Vec<u32>]),
        stops: &[String],
    ) -> Result<Results> {
        let ends = end_tokens(tokenizer, &source)?;
        let most = source.descriptor().max_seq_len;
        let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
        let excess = prompts.iter().filter(|prompt| prompt.len() >= most).count();
        if excess > 0 {
            let prompts = counted(excess, "question");
            terminal::note(&format!(
                "note: {prompts} with examples exceed the context of {most} tokens; the model reads only the end"
            ))?;
        }
        let model = source.path().display().to_string();
        let capacity = most.min(longest.saturating_add(self.tokens));
        let sampling = SlotSampling {
            temperature: divisor(self.temperature),
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
        };
        let request = |i: usize| Request {
            prompt: prompts[i / self.samples].clone(),
            tokens: self.tokens,
            seed: self.seed.wrapping_add(i as u32),
            sampling,
            ends: ends.clone(),
        };
        let requests: Vec<Request> = (0..prompts.len() * self.samples).map(request).collect();
        let Loaded { generator, mut engine, run_ahead } =
            load(source, &self.hardware, self.batch.min(requests.len()), capacity)?;
        let stream = |request: &Request| TextStream::new(tokenizer, stops).after(&request.prompt);
        let mut streams: Vec<TextStream> = requests.iter().map(stream).collect();
        let mut generated = vec![(String::new(), 0); requests.len()];
        let start = Instant::now();
        let progress = progress::start("generating", Unit::Count, (requests.len() * self.tokens) as u64);
        let finishes = generate(&generator, &mut *engine, &requests, run_ahead, &mut |i, token| {
            progress.add(1);
            generated[i].0 += &streams[i].push(token);
            generated[i].1 += 1;
            Ok(!streams[i].stopped())
        })?;
        drop(progress);
        let seconds = start.elapsed().as_secs_f64();
        let tokens = generated.iter().map(|(_, tokens)| tokens).sum();
        let answer = |question: &Question, i: usize, finish: &Finish| {
            let (mut text, tokens) = std::mem::take(&mut generated[i]);
            text += &streams[i].finish();
            let extracted = question.extract(&text);
            let correct = question.accepts(extracted.as_deref());
            Answer { text, extracted, correct, tokens, finish_reason: finish.name() }
        };
        let lines = lines(questions, texts, &finishes, answer);
        if let Some(path) = &self.out {
            atomic_file::write(path, |file| {
                for line in &lines {
                    serde_json::to_writer(&mut *file, line)?;
                    writeln!(file)?;
                }
                Ok(())
            })?;
        }
        let of_question = |line: &AnswerLine| line.answers.iter().filter(|answer| answer.correct).count();
        let correct: usize = lines.iter().map(of_question).sum();
        let passed = lines.iter().filter(|line| of_question(line) > 0).count();
        Ok(Results {
            model,
            data: self.file.display().to_string(),
            version: env!("CARGO_PKG_VERSION"),
            machine: engine.describe(),
            precision: self.hardware.weight_format(&*engine),
            questions: questions.len(),
            samples: self.samples,
            correct,
            accuracy: correct as f64 / requests.len() as f64,
            pass: passed as f64 / questions.len() as f64,
            tokens,
            seconds,
        })
    }
}

/// Returns each question with its answers, of which `answer` returns the i-th one.
fn lines<'a>(
    questions: &'a [Question],
    texts: &'a [String],
    finishes: &[Finish],
    mut answer: impl FnMut(&Question, usize, &Finish) -> Answer,
) -> Vec<AnswerLine<'a>> {
    let samples = finishes.len() / questions.len();
    let of_question = |(i, (question, prompt)): (usize, (&'a Question, &'a String))| {
        let first = i * samples;
        let answers = (first..first + samples).map(|i| answer(question, i, &finishes[i])).collect();
        AnswerLine { line: question.line, prompt, reference: question.reference(), answers }
    };
    questions.iter().zip(texts).enumerate().map(of_question).collect()
}

/// Returns the text of a question with examples: a conversation with a chat template, else texts that are separated by empty lines.
fn render(question: &Question, examples: &[Question], template: Option<&ChatTemplate>) -> Result<String> {
    if let Some(template) = template {
        let mut messages = Vec::new();
        for example in examples {
            messages.extend(turns(&example.ask));
            messages.push(Message::new("assistant", &example.answer));
        }
        messages.extend(turns(&question.ask));
        return Ok(template.render(&messages.iter().collect::<Vec<_>>())?);
    }
    let solved = |example: &Question| {
        let text = plain(&example.ask)?;
        let separator = if text.ends_with(char::is_whitespace) { "" } else { " " };
        anyhow::Ok(format!("{text}{separator}{}{EMPTY_LINE}", example.answer.trim()))
    };
    Ok(examples.iter().map(solved).collect::<Result<String>>()? + &plain(&question.ask)?)
}

fn turns(ask: &Ask) -> Vec<Message> {
    match ask {
        Ask::Question(text) | Ask::Prompt(text) => vec![Message::new("user", text)],
        Ask::Messages(turns) => turns.iter().map(|turn| Message::new(&turn.role, &turn.content)).collect(),
    }
}

fn plain(ask: &Ask) -> Result<String> {
    match ask {
        Ask::Question(question) => Ok(format!("Question: {question}\nAnswer:")),
        Ask::Prompt(prompt) => Ok(prompt.clone()),
        Ask::Messages(_) => {
            bail!("messages: expected a model with a chat template, found none; use 'prompt' or 'question'")
        }
    }
}

/// Returns the tokens of a rendered question. A template writes the tokens that begin its text.
fn encode(text: &str, tokenizer: &Tokenizer, has_template: bool, vocab: usize) -> Result<Vec<u32>> {
    let prompt = if has_template {
        tokenizer.encode_with_special(text)?
    } else {
        let mut prompt = vec![tokenizer.document()];
        prompt.extend(tokenizer.encode(text)?);
        prompt
    };
    check_prompt(&prompt, vocab)?;
    Ok(prompt)
}
