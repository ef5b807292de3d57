//! The evaluation bundle of CORE, as `data core` and `eval core` read it.

use crate::kinds::Kinds;
use data::core_tasks::Bundle;
use std::path::{Path, PathBuf};
use tokenizer::Tokenizer;

const LIST: &str = "\
icl_tasks:
-
  label: facts
  dataset_uri: facts.jsonl
  num_fewshot: [0]
  icl_task_type: multiple_choice
-
  label: pronouns
  dataset_uri: pronouns.jsonl
  num_fewshot: [1]
  icl_task_type: schema
-
  label: words
  dataset_uri: words.jsonl
  num_fewshot: [0]
  icl_task_type: language_modeling
";
const TABLE: &str = "Eval Task,#shots,Random baseline\nfacts,0,25\npronouns,1,50\nwords,0,0\n";
const FACTS: &str = "{\"query\": \"Snow is\", \"choices\": [\"white\", \"black\"], \"gold\": 1}\n";
const PRONOUNS: &str = "{\"context_options\": [\"Ann\", \"Lea\"], \"continuation\": \"slept.\", \"gold\": 0}\n";
const WORDS: &str = "{\"context\": \"One, two,\", \"continuation\": \"three\"}\n";

/// Writes a bundle in which `find`, which occurs once in `file`, is replaced.
fn bundle(kinds: &Kinds, file: &str, find: &str, replace: &str) -> PathBuf {
    for (name, text) in [
        ("core.yaml", LIST.to_owned()),
        ("eval_meta_data.csv", TABLE.to_owned()),
        ("eval_data/facts.jsonl", FACTS.repeat(3)),
        ("eval_data/pronouns.jsonl", PRONOUNS.repeat(3)),
        ("eval_data/words.jsonl", WORDS.repeat(3)),
    ] {
        let changed = if name == file { text.replacen(find, replace, 1) } else { text.clone() };
        assert!(name != file || changed != text, "{file}: {find}");
        kinds.file(&format!("bundle/{name}"), changed.as_bytes());
    }
    kinds.path("bundle")
}

/// Reads everything in a bundle, and tokenizes it for a model with a context of 16 tokens.
fn read(directory: &Path) -> anyhow::Result<()> {
    let bundle = Bundle::open(directory, None)?;
    bundle.check()?;
    for task in &bundle.tasks {
        let questions = task.questions(None)?;
        for index in 0..questions.len() {
            questions.encode(index, &Tokenizer::gpt2(), 16)?;
        }
    }
    Ok(())
}

pub fn run(kinds: &mut Kinds) {
    let directory = bundle(kinds, "core.yaml", "", "# Nothing else differs.\n");
    read(&directory).unwrap();
    let mut rejects = |kind: &str, file: &str, find: &str, replace: &str, parts: &[&str]| {
        let directory = bundle(kinds, file, find, replace);
        kinds.fails(&format!("CORE, {kind}"), parts, |_| read(&directory));
    };

    let mut list = |kind: &str, find: &str, replace: &str, parts: &[&str]| {
        rejects(kind, "core.yaml", find, replace, &[parts, &["core.yaml"]].concat());
    };
    list("no YAML", "icl_tasks:", "icl_tasks: [", &["line 2"]);
    list("no list of tasks", "icl_tasks", "tasks", &["missing field `icl_tasks`"]);
    list("empty list", LIST, "icl_tasks: []\n", &["icl_tasks: expected at least one task, found none"]);
    list("missing label", "  label: facts\n", "", &["icl_tasks[0]: missing field `label`", "line 3"]);
    list(
        "unknown type",
        "schema",
        "essay",
        &["icl_task_type: unknown variant `essay`", "`language_modeling`", "line 11"],
    );
    list("number instead of a list", "[1]", "1", &["num_fewshot: invalid type: integer `1`", "line 10"]);
    list("negative number of examples", "[1]", "[-1]", &["num_fewshot", "line 10"]);
    list(
        "no number of examples",
        "[1]",
        "[]",
        &["task pronouns: num_fewshot: expected a list of one number, found an empty list"],
    );
    list("label twice", "pronouns\n", "facts\n", &["task facts: expected different labels, found it twice"]);
    list(
        "file outside",
        "words.jsonl",
        "../words.jsonl",
        &["task words: dataset_uri: expected a file in eval_data/, found ../words.jsonl"],
    );

    let mut table = |kind: &str, find: &str, replace: &str, parts: &[&str]| {
        rejects(kind, "eval_meta_data.csv", find, replace, &[parts, &["eval_meta_data.csv"]].concat());
    };
    table("no baseline", "pronouns,1,50\n", "", &["expected a row for task pronouns, found none"]);
    table("baseline in words", ",50\n", ",half\n", &["line 3", "column 'Random baseline'", "found 'half'"]);
    table("baseline of 100", ",50\n", ",100\n", &["line 3", "a percentage from 0 to below 100, found '100'"]);
    table("short row", ",1,50\n", ",1\n", &["line 3", "found ''"]);
    table("no column", "Random baseline", "Chance", &["line 1: expected the column 'Random baseline', found none"]);

    let mut line = |kind: &str, file: &str, find: &str, replace: &str, parts: &[&str]| {
        let name = format!("eval_data/{file}.jsonl");
        rejects(kind, &name, find, replace, &[parts, &[&format!("{file}.jsonl, line 1")]].concat());
    };
    line("no JSON", "facts", "{", "", &["column "]);
    line("missing field", "facts", "\"query\"", "\"question\"", &["missing field `query`"]);
    line("number as choice", "facts", "\"white\"", "7", &["invalid type: integer `7`, expected a string"]);
    line("text as gold", "facts", "1}", "\"1\"}", &["invalid type: string \"1\", expected usize"]);
    line("negative gold", "facts", "1}", "-1}", &["invalid value: integer `-1`"]);
    line("gold out of range", "facts", "1}", "2}", &["gold: expected the index of one of 2 choices, from 0, found 2"]);
    line("no choices", "facts", "[\"white\", \"black\"]", "[]", &["choices: expected at least one, found none"]);
    line(
        "no contexts",
        "pronouns",
        "[\"Ann\", \"Lea\"]",
        "[]",
        &["context_options: expected at least one, found none"],
    );
    line("context of a schema", "pronouns", "context_options", "contexts", &["missing field `context_options`"]);
    line("empty continuation", "words", "\"three\"", "\" \"", &["continuation: expected text, found none"]);
    let long = "three ".repeat(20);
    line(
        "answer longer than the context",
        "words",
        "three",
        &long,
        &["expected an answer of fewer than 16 tokens", "found 2"],
    );

    let directory = bundle(kinds, "core.yaml", "[1]", "[3]");
    kinds.fails("CORE, too few questions", &["pronouns.jsonl: expected more than 3 questions", "found 3"], |_| {
        read(&directory)
    });
    let words = bundle(kinds, "core.yaml", "[1]", "[2]").join("eval_data/words.jsonl");
    std::fs::remove_file(&words).unwrap();
    kinds.fails(
        "CORE, missing file",
        &["words.jsonl: expected the questions of task words, found no such file"],
        |_| read(&directory),
    );
    kinds.file("bundle/eval_data/words.jsonl", b"\n\n");
    kinds.fails("CORE, empty file", &["words.jsonl: expected one question per line, found none"], |_| read(&directory));
    std::fs::remove_file(directory.join("eval_meta_data.csv")).unwrap();
    kinds.fails("CORE, no table", &["cannot read", "eval_meta_data.csv, which has the accuracy of guessing"], |_| {
        read(&directory)
    });
    std::fs::remove_file(directory.join("core.yaml")).unwrap();
    kinds.fails("CORE, no list", &["cannot read", "core.yaml: expected an evaluation bundle"], |_| read(&directory));
    let nowhere = kinds.path("nowhere");
    kinds.fails("CORE, no directory", &["nowhere: expected the directory of an evaluation bundle"], |_| read(&nowhere));
}
