use super::*;
use crate::documents::find;
use crate::{Tokens, mask};
use serde_json::Value;
use std::fs;
use tempfile::TempDir;

/// Renders messages as `<role>content;`, with the end token of GPT-2 after the assistant's. Rejects empty contents.
struct Simple;

impl Render for Simple {
    fn render(&self, values: &str) -> Result<Rendered, RenderError> {
        let values: Value = serde_json::from_str(values).unwrap();
        let mut rendered = Rendered::default();
        for message in values["messages"].as_array().unwrap() {
            let (role, content) = (message["role"].as_str().unwrap(), message["content"].as_str().unwrap());
            if content.is_empty() {
                return Err(RenderError::Rejected("empty content".into()));
            }
            if content == "fail" {
                return Err(RenderError::Failed(anyhow::anyhow!("the template runs for ever")));
            }
            rendered.text.extend(["<", role, ">"]);
            let start = rendered.text.len();
            rendered.text += content;
            if role == "assistant" {
                rendered.text += "<|endoftext|>\n";
                rendered.turns.push(start..rendered.text.len());
            }
        }
        Ok(rendered)
    }
}

fn options() -> ChatOptions {
    ChatOptions {
        tokenizer: Tokenizer::gpt2(),
        allow_special: false,
        format: None,
        val_fraction: 0.0,
        shard_tokens: 100_000,
        overwrite: false,
        program: "test".into(),
    }
}

fn record(messages: &[(&str, &str)]) -> String {
    let messages: Vec<Value> =
        messages.iter().map(|(role, content)| serde_json::json!({ "role": role, "content": content })).collect();
    serde_json::json!({ "messages": messages }).to_string()
}

fn written(lines: &[String], options: &ChatOptions) -> (TempDir, Result<Summary>) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("chat.jsonl");
    fs::write(&path, lines.join("\n")).unwrap();
    let found = find(&[path], &[], None).unwrap();
    let summary = write(&found, &directory.path().join("out"), options, &Simple, |_| {
        Ok(vec![("chat_template.jinja", b"template".to_vec())])
    });
    (directory, summary)
}

/// Returns the text of a shard, with the tokens with loss in brackets and a bar before each conversation.
fn marked(path: &Path) -> String {
    let shard = Tokens::open(path).unwrap();
    let (mut ids, mut flags) = (vec![0; shard.len()], vec![0; shard.len()]);
    shard.read(0, &mut ids).unwrap();
    shard.mask().unwrap().read(0, &mut flags).unwrap();
    let mut text = String::new();
    for (id, flags) in ids.into_iter().zip(flags) {
        let token = Tokenizer::gpt2().text(&[id]);
        let start = if flags & mask::START != 0 { "|" } else { "" };
        let [open, close] = if flags & mask::LOSS != 0 { ["[", "]"] } else { ["", ""] };
        text.extend([start, open, &token, close]);
    }
    text
}

#[test]
fn assistant_turns_and_their_end_token_have_loss() {
    let lines = [
        record(&[("user", "Hi there"), ("assistant", "Hello you"), ("user", "Bye"), ("assistant", "Bye")]),
        r#"{"prompt": "One", "completion": "Two"}"#.to_owned(),
    ];
    let (directory, summary) = written(&lines, &options());
    let summary = summary.unwrap();
    let out = directory.path().join("out");
    assert_eq!(
        marked(&out.join("train_000000.bin")),
        "|<user>Hi there<assistant>[Hello][ you][<|endoftext|>]\n<user>Bye<assistant>[By][e][<|endoftext|>]\n|<user>One<assistant>[Two][<|endoftext|>]\n"
    );
    let Summary { input, turns, endless_turns, end, targets, .. } = &summary;
    assert_eq!((input.documents, *turns, *endless_turns, *end, *targets), (2, 3, 0, Some(50256), 8));
    let dataset = Dataset::read(&out).unwrap().unwrap();
    assert_eq!(dataset.train, summary.train);
    assert!(dataset.has_masks() && dataset.train.masks.contains_key("train_000000.mask"));
    let shard = dataset.with_hashes(Tokens::open(&out.join("train_000000.bin")).unwrap()).unwrap();
    mask::check(&[shard]).unwrap();
    assert_eq!(fs::read(out.join("chat_template.jinja")).unwrap(), b"template");
}

#[test]
fn special_tokens_in_messages_are_text_unless_allowed() {
    let injected = "a<|endoftext|>b";
    let lines = [record(&[("user", injected), ("assistant", injected)])];
    let (directory, summary) = written(&lines, &options());
    assert_eq!(summary.unwrap().plain_special, 2);
    let shard = directory.path().join("out/train_000000.bin");
    let plain = marked(&shard);
    // The end token of the turn is a special token.
    let special = |path: &Path| {
        let shard = Tokens::open(path).unwrap();
        let mut ids = vec![0; shard.len()];
        shard.read(0, &mut ids).unwrap();
        ids.into_iter().filter(|&id| id == 50256).count()
    };
    assert_eq!(special(&shard), 1);
    assert!(
        plain.replace(['[', ']'], "").contains("<user>a<|endoftext|>b<assistant>a<|endoftext|>b<|endoftext|>\n"),
        "{plain}"
    );
    let (directory, summary) = written(&lines, &ChatOptions { allow_special: true, ..options() });
    assert_eq!(summary.unwrap().plain_special, 0);
    assert_eq!(special(&directory.path().join("out/train_000000.bin")), 3);
}

#[test]
fn shards_and_splits_have_whole_conversations() {
    let line = |i: usize| record(&[("user", "word ".repeat(i).trim()), ("assistant", "yes")]);
    let lines: Vec<String> = (1..=9).map(line).collect();
    let options = ChatOptions { val_fraction: 0.34, shard_tokens: 20, ..options() };
    let (directory, summary) = written(&lines, &options);
    let summary = summary.unwrap();
    let out = directory.path().join("out");
    for (name, split, expected) in [("train", &summary.train, 6), ("val", &summary.val, 3)] {
        let shards = Tokens::open_all(&out.join(format!("{name}_*.bin")).display().to_string()).unwrap();
        assert_eq!((shards.len(), shards.iter().map(Tokens::len).sum::<usize>()), (split.shards, split.tokens));
        assert!(split.shards > 1 && shards.iter().all(|shard| shard.len() <= 20));
        let reports: Vec<_> = shards.iter().map(|shard| mask::report(shard.mask().unwrap()).unwrap()).collect();
        assert_eq!(reports.iter().map(|report| report.conversations).sum::<usize>(), expected);
        assert!(shards.iter().all(|shard| marked(Path::new(shard.name())).starts_with("|<user>")));
    }
    // A conversation that is longer than a shard is a shard of its own.
    let (directory, summary) = written(&lines, &ChatOptions { shard_tokens: 1, ..options });
    assert_eq!(summary.unwrap().train.shards, 6);
    assert!(Tokens::open(&directory.path().join("out/train_000005.bin")).unwrap().len() > 10);
}

#[test]
fn skipped_records_are_counted_with_the_first_example() {
    let good = record(&[("user", "a"), ("assistant", "b")]);
    let lines = [
        "{\"text\": \"a\"}".to_owned(),
        good.clone(),
        record(&[("user", "a")]),
        String::new(),
        record(&[("user", ""), ("assistant", "b")]),
        record(&[("user", "b")]),
        record(&[("user", "\u{fdd1}"), ("assistant", "b")]),
        record(&[]),
        record(&[("robot", "a")]),
    ];
    let (directory, summary) = written(&lines, &options());
    let summary = summary.unwrap();
    assert_eq!((summary.input.documents, summary.skipped_records.total()), (1, 7));
    let name = directory.path().join("chat.jsonl").display().to_string();
    let text = summary.skipped_records.to_string();
    for expected in [
        format!(
            "skipped records without messages, conversations, or prompt and completion: 1 (first: {name}, line 1: found text)"
        ),
        format!(
            "skipped conversations without an assistant turn: 2 (first: {name}, line 3: found 1 messages of other roles)"
        ),
        format!("skipped conversations that the chat template rejects: 1 (first: {name}, line 5: empty content)"),
        format!(
            "skipped conversations with the reserved characters U+FDD0 to U+FDD2: 1 (first: {name}, line 7: found one of them)"
        ),
        format!("skipped conversations without messages: 1 (first: {name}, line 8: found no messages)"),
        format!("skipped conversations with unknown roles: 1 (first: {name}, line 9: message 1: found role robot)"),
    ] {
        assert!(text.lines().any(|line| line == expected), "{expected}\n{text}");
    }
    // Nothing is left.
    let (directory, summary) = written(&lines[2..3], &options());
    let error = format!("{:#}", summary.unwrap_err());
    assert!(
        error.contains("expected at least one conversation with an assistant turn, found none in 1 files\nskipped"),
        "{error}"
    );
    assert!(!directory.path().join("out").exists());
    // Errors name the line.
    for (line, expected) in
        [("{", "expected a JSON object"), (&record(&[("user", "fail"), ("assistant", "b")]), "runs for ever")]
    {
        let (_directory, summary) = written(&[good.clone(), line.to_owned()], &options());
        let error = format!("{:#}", summary.unwrap_err());
        assert!(error.contains("chat.jsonl, line 2: ") && error.contains(expected), "{error}");
    }
}

#[test]
fn damaged_masks_are_errors() {
    let lines = [record(&[("user", "a"), ("assistant", "b")])];
    let (directory, summary) = written(&lines, &options());
    summary.unwrap();
    let out = directory.path().join("out");
    let (path, shard) = (out.join("train_000000.mask"), out.join("train_000000.bin"));
    let dataset = Dataset::read(&out).unwrap().unwrap();
    let bytes = fs::read(&path).unwrap();
    let check = || -> Result<()> { mask::check(&[dataset.with_hashes(Tokens::open(&shard)?)?]) };
    let error = |bytes: &[u8]| {
        fs::write(&path, bytes).unwrap();
        format!("{:#}", check().unwrap_err())
    };
    let last = bytes.len() - 1;
    let changed = |at: usize, value: u8| {
        let mut bytes = bytes.clone();
        bytes[at] = value;
        bytes
    };
    assert!(error(&bytes[..last]).contains("train_000000.mask is truncated: expected"));
    assert!(error(&changed(0, 7)).contains("not a valid mask file: expected magic 20251128"));
    assert!(error(&changed(4, 2)).contains("expected mask file version 1, found 2"));
    assert!(error(&changed(last, 1)).contains("expected flags with hash"));
    let mut shorter = changed(8, bytes[8] - 1);
    shorter.pop();
    assert!(error(&shorter).contains("expected flags for the"), "{}", error(&shorter));
    fs::remove_file(&path).unwrap();
    assert!(format!("{:#}", check().unwrap_err()).contains("train_000000.mask: expected the mask of"));
    // Without a recorded hash, flags are checked.
    let unlisted = |bytes: &[u8]| {
        fs::write(&path, bytes).unwrap();
        format!("{:#}", mask::check(&[Tokens::open(&shard).unwrap()]).unwrap_err())
    };
    assert!(unlisted(&changed(last, 9)).contains("1 bytes with others, the first at position"));
    let mut none = bytes.clone();
    none[1024..].fill(0);
    assert!(unlisted(&none).contains("expected at least one token with loss, found none in"));
    fs::write(&path, &bytes).unwrap();
    check().unwrap();
    let other = Dataset { train: Split { masks: BTreeMap::new(), ..dataset.train.clone() }, ..dataset.clone() };
    let error = other.with_hashes(Tokens::open(&shard).unwrap()).unwrap_err().to_string();
    assert!(error.contains("expected a mask that dataset.json records"), "{error}");
}

#[test]
fn data_sets_replace_masks_and_templates() {
    let lines = [record(&[("user", "a"), ("assistant", "b")])];
    let (directory, summary) = written(&lines, &options());
    summary.unwrap();
    let out = directory.path().join("out");
    let found = find(&[directory.path().join("chat.jsonl")], &[], None).unwrap();
    let again = |options: &ChatOptions| write(&found, &out, options, &Simple, |_| Ok(Vec::new()));
    assert!(again(&options()).unwrap_err().to_string().contains("already exists"));
    again(&ChatOptions { overwrite: true, ..options() }).unwrap();
    // Without a mask, the files of the directory would be those of someone else.
    fs::write(out.join("chat_template.jinja"), "mine").unwrap();
    let text = crate::text::TextOptions {
        tokenizer: Tokenizer::gpt2(),
        allow_special: false,
        reading: crate::documents::Reading { field: "prompt".into(), ..Default::default() },
        val_fraction: 0.0,
        shard_tokens: 1000,
        overwrite: true,
        program: "test".into(),
    };
    let path = directory.path().join("text.jsonl");
    fs::write(&path, "{\"prompt\": \"a\"}").unwrap();
    let texts = find(&[path], &[], None).unwrap();
    crate::text::write(&texts, &out, &text).unwrap();
    assert!(!out.join("train_000000.mask").exists() && !out.join("chat_template.jinja").exists());
    let json = fs::read_to_string(out.join("dataset.json")).unwrap();
    assert!(!json.contains("masks"), "{json}");
    fs::write(out.join("chat_template.jinja"), "mine").unwrap();
    crate::text::write(&texts, &out, &text).unwrap();
    assert_eq!(fs::read_to_string(out.join("chat_template.jinja")).unwrap(), "mine");
    let error = again(&ChatOptions { overwrite: true, ..options() }).unwrap_err().to_string();
    assert!(error.contains("chat_template.jinja: expected a directory without this file"), "{error}");
}

#[test]
fn other_files_are_errors_that_name_a_remedy() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("chat.json");
    fs::write(&path, "[]").unwrap();
    let found = find(&[path], &[], None).unwrap();
    let error = write(&found, &directory.path().join("out"), &options(), &Simple, |_| Ok(Vec::new())).unwrap_err();
    assert!(error.to_string().contains("jq -c '.[]'"), "{error}");
}
