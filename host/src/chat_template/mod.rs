//! Chat templates of Hugging Face directories: Jinja templates that turn messages into the text that a model reads.
//!
//! A template is a program of the model's author. [`ChatTemplate::render`] and [`Training`] run it in processes with limits
//! ([`renderer`]).

mod date;
pub mod renderer;
mod training;

pub use training::{Training, default_template};

use anyhow::Result;
use data::conversations::Json;
use interchange::{ModelSource, companions};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Enumerator, Kwargs, Object};
use minijinja::{Environment, Error, ErrorKind, context, filters};
use renderer::{Purpose, Renderer};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The maximum work of a template: an instruction costs 1, and so do 64 bytes of text. Templates in use need a few thousand for a message.
const MAX_FUEL: u64 = 5_000_000;

/// A message of a conversation.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Message {
    role: String,
    content: String,
}

impl Message {
    /// Creates a message of `system`, `user` or `assistant`.
    pub fn new(role: &str, content: &str) -> Self {
        Self { role: role.to_owned(), content: content.to_owned() }
    }

    /// Returns the text.
    pub fn into_content(self) -> String {
        self.content
    }

    /// Returns whether the model has written the message.
    pub fn is_answer(&self) -> bool {
        self.role == "assistant"
    }
}

/// The reason why a template gives no text.
#[derive(Clone, Debug, thiserror::Error, Serialize, Deserialize)]
pub enum TemplateError {
    /// The template calls `raise_exception`, or does not know how to handle the messages.
    #[error("the chat template rejects the conversation: {0}")]
    Rejected(String),
    /// The template is not valid, or exceeds a limit.
    #[error("{0}")]
    Unusable(String),
}

/// The template of a model. It has not been compiled.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ChatTemplate {
    /// The file of the template, for errors.
    path: String,
    source: String,
    /// The special tokens that the template names.
    bos_token: String,
    eos_token: String,
}

impl ChatTemplate {
    /// Returns the template of a model, or that of the model from which a run started.
    pub fn of(source: &ModelSource) -> Result<Option<Self>> {
        Self::first(&source.settings())
    }

    /// Returns the template of the directory of a model or of a run.
    pub fn in_directory(directory: &Path) -> Result<Option<Self>> {
        Self::first(&[directory.to_owned(), directory.join(companions::DIRECTORY)])
    }

    fn first(directories: &[PathBuf]) -> Result<Option<Self>> {
        directories.iter().find_map(|directory| Self::find(directory).transpose()).transpose()
    }

    /// Returns the template in the directory of a model: `chat_template.jinja`, or that of `tokenizer_config.json`. `None` if there is
    /// none.
    fn find(directory: &Path) -> Result<Option<Self>> {
        let config = companions::tokenizer_config(directory)?;
        let template = companions::chat_template(directory, &config)?;
        Ok(template.map(|(path, source)| Self::new(&path, source, &config)))
    }

    /// Creates a template. `path` is its file, for errors, and `config` is the `tokenizer_config.json` with the special tokens that it
    /// names.
    pub fn new(path: &Path, source: String, config: &Value) -> Self {
        let token = |name: &str| match &config[name] {
            Value::Object(token) => token.get("content").and_then(Value::as_str).unwrap_or_default().to_owned(),
            token => token.as_str().unwrap_or_default().to_owned(),
        };
        let path = path.display().to_string();
        Self { path, source, bos_token: token("bos_token"), eos_token: token("eos_token") }
    }

    /// Returns the source.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Returns the text of a conversation, up to the beginning of the model's answer.
    pub fn render(&self, messages: &[&Message]) -> Result<String, TemplateError> {
        let values = json!({ "messages": messages });
        let rendered = Renderer::start(self).and_then(|mut renderer| renderer.render(Purpose::Answer, &values));
        rendered.unwrap_or_else(|error| Err(self.unusable(&error))).map(|rendered| rendered.text)
    }

    fn unusable(&self, error: &anyhow::Error) -> TemplateError {
        TemplateError::Unusable(format!("{}: {error:#}", self.path))
    }

    /// Fails if the template is not valid. It may reject a conversation without messages.
    pub fn check(&self) -> Result<(), TemplateError> {
        match self.render(&[]) {
            Err(error @ TemplateError::Unusable(_)) => Err(error),
            Ok(_) | Err(TemplateError::Rejected(_)) => Ok(()),
        }
    }
}

/// The characters around the turns of the assistant in a rendered text. They are no characters of Unicode, so no text needs them.
const TURN_START: char = '\u{fdd1}';
const TURN_END: char = '\u{fdd2}';

/// The text of a conversation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rendered {
    /// The text.
    pub text: String,
    /// The turns of the assistant: their starts and ends in bytes. Only for [`Purpose::Training`].
    pub turns: Vec<(usize, usize)>,
    /// Whether the template marks the turns with `{% generation %}`.
    pub marks_turns: bool,
}

/// A template that has been compiled, in this process, without limits of memory, stack and time.
pub struct Compiled<'a> {
    template: &'a ChatTemplate,
    environment: Environment<'static>,
    marks_turns: bool,
}

impl<'a> Compiled<'a> {
    /// Compiles a template.
    pub fn new(template: &'a ChatTemplate) -> Result<Self, TemplateError> {
        let invalid = |error: Error| {
            TemplateError::Unusable(format!(
                "{}: expected a valid chat template, found an error: {error}",
                template.path
            ))
        };
        let mut environment = environment().map_err(invalid)?;
        let (source, marks_turns) = with_generation_filter(&template.source);
        environment.add_template_owned("chat", source).map_err(invalid)?;
        Ok(Self { template, environment, marks_turns })
    }

    /// Renders a conversation. `values` has the messages, and may have tools.
    pub fn render(&self, purpose: Purpose, values: &minijinja::Value) -> Result<Rendered, TemplateError> {
        let messages = values.get_attr("messages").and_then(|messages| messages.try_iter());
        let messages: Vec<_> = messages.map_err(|error| TemplateError::Rejected(error.to_string()))?.collect();
        let tools = values.get_attr("tools").unwrap_or_default();
        let text = |messages: &[minijinja::Value], prompts| self.text(messages, &tools, prompts);
        match purpose {
            Purpose::Answer => {
                let (text, _) = without_marks(&text(&messages, true)?);
                Ok(Rendered { text, ..Rendered::default() })
            }
            Purpose::Training if self.marks_turns => {
                let (text, turns) = without_marks(&text(&messages, false)?);
                Ok(Rendered { text, turns, marks_turns: true })
            }
            Purpose::Training => {
                let whole = text(&messages, false)?;
                let mut turns = Vec::new();
                for (i, _) in messages.iter().enumerate().filter(|(_, message)| is_of_assistant(message)) {
                    let (before, after) = (text(&messages[..i], true)?, text(&messages[..=i], false)?);
                    if !after.starts_with(&before) || !whole.starts_with(&after) {
                        return Err(self.ambiguous(i, messages.len(), &before, &after, &whole));
                    }
                    turns.push((before.len(), after.len()));
                }
                Ok(Rendered { text: whole, turns, marks_turns: false })
            }
        }
    }

    fn text(
        &self,
        messages: &[minijinja::Value],
        tools: &minijinja::Value,
        add_generation_prompt: bool,
    ) -> Result<String, TemplateError> {
        let ChatTemplate { path, bos_token, eos_token, .. } = self.template;
        let values = context! { messages, tools, bos_token, eos_token, add_generation_prompt };
        let rendered = self.environment.get_template("chat").and_then(|template| template.render(values));
        rendered.map_err(|error| match error.kind() {
            ErrorKind::OutOfFuel => TemplateError::Unusable(format!(
                "{path}: expected a chat template of at most {MAX_FUEL} steps, found more; send shorter messages, or use another template"
            )),
            _ => TemplateError::Rejected(error.to_string()),
        })
    }

    /// Returns the error for a template whose text of the first messages is not the beginning of its text of all.
    fn ambiguous(&self, message: usize, of: usize, before: &str, after: &str, whole: &str) -> TemplateError {
        let (short, long) = if after.starts_with(before) { (after, whole) } else { (before, after) };
        let same = short.bytes().zip(long.bytes()).take_while(|(a, b)| a == b).count();
        let from = |text: &str| {
            let start = text.floor_char_boundary(same);
            text[start..].chars().take(20).collect::<String>()
        };
        TemplateError::Unusable(format!(
            "{}: expected a template whose text of the first messages is the beginning of its text of more messages, found {:?} instead \
             of {:?} at message {} of {of}, so the tokens of the assistant are unknown; mark the assistant's turns in the template with \
             {{% generation %}} and {{% endgeneration %}}, and pass it with --chat-template FILE",
            self.template.path,
            from(long),
            from(short),
            message + 1
        ))
    }
}

/// Returns a value for a template. Objects keep the order of their fields.
pub fn value_of(json: &Json) -> minijinja::Value {
    match json {
        Json::Null => ().into(),
        Json::Bool(value) => (*value).into(),
        Json::Number(number) => match (number.as_i64(), number.as_u64()) {
            (Some(number), _) => number.into(),
            (None, Some(number)) => number.into(),
            (None, None) => number.as_f64().unwrap_or(f64::NAN).into(),
        },
        Json::String(text) => text.as_str().into(),
        Json::Array(values) => values.iter().map(value_of).collect::<Vec<_>>().into(),
        Json::Object(fields) => {
            let fields = fields.iter().map(|(name, value)| (name.clone(), value_of(value)));
            minijinja::Value::from_object(Fields(fields.collect()))
        }
    }
}

/// The fields of an object, in their order.
#[derive(Debug)]
struct Fields(Vec<(String, minijinja::Value)>);

impl Object for Fields {
    fn get_value(self: &Arc<Self>, key: &minijinja::Value) -> Option<minijinja::Value> {
        let key = key.as_str()?;
        self.0.iter().rev().find(|(name, _)| name == key).map(|(_, value)| value.clone())
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Values(self.0.iter().map(|(name, _)| name.as_str().into()).collect())
    }
}

fn is_of_assistant(message: &minijinja::Value) -> bool {
    message.get_attr("role").is_ok_and(|role| role.as_str() == Some("assistant"))
}

/// Removes the marks of turns. Returns the text and the turns.
fn without_marks(marked: &str) -> (String, Vec<(usize, usize)>) {
    let (mut text, mut turns, mut start) = (String::with_capacity(marked.len()), Vec::new(), None);
    for part in marked.split_inclusive([TURN_START, TURN_END]) {
        text += part.trim_end_matches([TURN_START, TURN_END]);
        if part.ends_with(TURN_START) {
            start.get_or_insert(text.len());
        } else if part.ends_with(TURN_END) {
            turns.extend(start.take().map(|start| (start, text.len())));
        }
    }
    (text, turns)
}

/// Returns what templates may use.
fn environment() -> Result<Environment<'static>, Error> {
    let mut environment = Environment::new();
    environment.set_fuel(Some(MAX_FUEL));
    // As in transformers.
    environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.add_filter("tojson", tojson);
    environment.add_filter(GENERATION_FILTER, |text: String| format!("{TURN_START}{text}{TURN_END}"));
    environment.add_function("raise_exception", |message: String| -> Result<String, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message))
    });
    environment.add_function("strftime_now", |format: String| -> Result<String, Error> {
        let unknown = || format!("strftime_now: expected directives of a date or time, found {format}");
        date::now(&format).ok_or_else(|| Error::new(ErrorKind::InvalidOperation, unknown()))
    });
    Ok(environment)
}

/// Returns JSON as `tojson` of transformers does: without escapes for HTML.
fn tojson(value: &minijinja::Value, indent: Option<minijinja::Value>, args: Kwargs) -> Result<String, Error> {
    let _: Option<bool> = args.get("ensure_ascii")?;
    let escaped = filters::tojson(value, indent, args)?.to_string();
    let mut text = String::with_capacity(escaped.len());
    let mut rest = escaped.as_str();
    while let Some(at) = rest.find('\\') {
        text += &rest[..at];
        let known = [("\\u003c", '<'), ("\\u003e", '>'), ("\\u0026", '&'), ("\\u0027", '\'')];
        if let Some((sequence, c)) = known.into_iter().find(|(sequence, _)| rest[at..].starts_with(sequence)) {
            text.push(c);
            rest = &rest[at + sequence.len()..];
        } else {
            // An escape sequence begins with a backslash and an ASCII character.
            text += &rest[at..at + 2];
            rest = &rest[at + 2..];
        }
    }
    Ok(text + rest)
}

/// The filter that marks a turn of the assistant.
const GENERATION_FILTER: &str = "mark_turn";

/// Returns a template with a filter in place of the blocks `{% generation %}` of transformers, which mark the tokens of the assistant for
/// training, and whether there are any.
fn with_generation_filter(source: &str) -> (String, bool) {
    let (mut text, mut rest, mut has_blocks) = (String::new(), source, false);
    while let Some((before, tag)) = rest.split_once("{%") {
        text += before;
        text += "{%";
        let start = tag.len() - tag.trim_start_matches(['-', '+']).trim_start().len();
        let word = tag[start..].split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or_default();
        text += &tag[..start];
        match word {
            "generation" => {
                has_blocks = true;
                text += "filter ";
                text += GENERATION_FILTER;
            }
            "endgeneration" => text += "endfilter",
            other => text += other,
        }
        rest = &tag[start + word.len()..];
    }
    (text + rest, has_blocks)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::fs;

    const CONFIG: &str = "tokenizer_config.json";
    const FILE: &str = "chat_template.jinja";

    /// The structure of the templates of Llama 3 and Qwen: loops, methods of strings, and special tokens.
    const SOURCE: &str = "{{ bos_token }}\n{%- for message in messages %}\n    {%- if message.role not in ['system', 'user', 'assistant'] %}\n        {{- raise_exception('unknown role') }}\n    {%- endif %}\n    {{- '<' + message['role'] + '>' + message.content.strip() + '\\n' }}\n{%- endfor %}\n{%- if add_generation_prompt %}\n    {{- '<assistant>' }}\n{%- endif %}";

    fn rendered(template: &ChatTemplate, purpose: Purpose, values: &Value) -> Result<Rendered, TemplateError> {
        let values: Json = serde_json::from_str(&values.to_string()).unwrap();
        Compiled::new(template)?.render(purpose, &value_of(&values))
    }

    /// Returns the text of a conversation, with its turns in brackets.
    fn turns(source: &str, messages: &[(&str, &str)]) -> Result<String, TemplateError> {
        let template = ChatTemplate::new(Path::new("chat.jinja"), source.to_owned(), &json!({ "eos_token": "</s>" }));
        let messages: Vec<Message> = messages.iter().map(|(role, content)| Message::new(role, content)).collect();
        let Rendered { mut text, turns, .. } =
            rendered(&template, Purpose::Training, &json!({ "messages": messages }))?;
        for (start, end) in turns.into_iter().rev() {
            text.insert(end, ']');
            text.insert(start, '[');
        }
        Ok(text)
    }

    fn render(source: &str, config: &Value, messages: &[(&str, &str)]) -> Result<String, TemplateError> {
        let messages: Vec<Message> = messages.iter().map(|(role, content)| Message::new(role, content)).collect();
        let template = ChatTemplate::new(Path::new("chat.jinja"), source.to_owned(), config);
        rendered(&template, Purpose::Answer, &json!({ "messages": messages })).map(|rendered| rendered.text)
    }

    #[test]
    fn messages_become_text() {
        let messages = [("system", "Be brief."), ("user", " Hello "), ("assistant", "Hi"), ("user", "Bye")];
        let want = "<s><system>Be brief.\n<user>Hello\n<assistant>Hi\n<user>Bye\n<assistant>";
        for bos in [json!("<s>"), json!({ "content": "<s>" })] {
            assert_eq!(render(SOURCE, &json!({ "bos_token": bos }), &messages).unwrap(), want);
        }
        let error = render(SOURCE, &Value::Null, &[("robot", "")]).unwrap_err().to_string();
        assert!(error.contains("rejects the conversation") && error.contains("unknown role"), "{error}");
        assert!(render("{% for %}", &Value::Null, &[]).is_err());
    }

    #[test]
    fn functions_and_blocks_of_transformers_are_known() {
        let source = "{% for message in messages %}{% if message.role == 'assistant' %}{%- generation -%} {{ message.content }} {%- endgeneration %}{% \
                      else %}{{ message.content }}{% endif %}{% endfor %}";
        assert_eq!(render(source, &Value::Null, &[("user", "a"), ("assistant", "b")]).unwrap(), "ab");
        assert_eq!(
            render("{{ 'generation' }}{% set generation = 1 %}{{ generation }}", &Value::Null, &[]).unwrap(),
            "generation1"
        );
        let date = render("{{ strftime_now('%d %b %Y') }}", &Value::Null, &[]).unwrap();
        assert!(date.len() == 11 && date.ends_with(|c: char| c.is_ascii_digit()), "{date}");
        let error = render("{{ strftime_now('%Q') }}", &Value::Null, &[]).unwrap_err().to_string();
        assert!(error.contains("expected directives of a date or time, found %Q"), "{error}");
    }

    const CONVERSATION: [(&str, &str); 4] = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")];

    #[test]
    fn turns_are_found_by_blocks_and_by_prefixes() {
        let marked = "{% for m in messages %}{{ m.role }}:{% if m.role == 'assistant' %}\n{%- generation -%}  {{ m.content }}.{% endgeneration %}\n\n{%- else %} {{ m.content }} {% endif %}{% endfor %}";
        assert_eq!(turns(marked, &CONVERSATION).unwrap(), "user: a assistant:[b.]user: c assistant:[d.]");
        assert_eq!(turns(SOURCE, &CONVERSATION).unwrap(), "<user>a\n<assistant>[b\n]<user>c\n<assistant>[d\n]");
        assert_eq!(turns(SOURCE, &[("user", "a")]).unwrap(), "<user>a\n");
        let two = [("user", "a"), ("assistant", "b"), ("assistant", "c")];
        assert_eq!(turns(SOURCE, &two).unwrap(), "<user>a\n<assistant>[b\n]<assistant>[c\n]");
    }

    #[test]
    fn templates_without_prefixes_are_ambiguous() {
        // Earlier turns lose a part of their text, as with the thoughts of Qwen 3.
        let source = "{% for m in messages %}{{ m.role }} {{ m.content }}{% if loop.last and m.role == 'assistant' %}!{% endif %} {% endfor %}{% if \
                      add_generation_prompt %}assistant {% endif %}";
        let error = turns(source, &CONVERSATION).unwrap_err().to_string();
        assert!(error.contains("at message 2 of 4") && error.contains("{% generation %}"), "{error}");
        assert!(error.contains(r#"found " user c assistant d!" instead of "! ""#), "{error}");
        assert_eq!(turns(source, &CONVERSATION[..2]).unwrap(), "user a assistant [b! ]");
        let error = turns("{{ messages[-1].content }}", &CONVERSATION).unwrap_err().to_string();
        assert!(error.contains("expected a template whose text"), "{error}");
    }

    #[test]
    fn json_has_the_order_and_the_characters_of_the_conversation() {
        let template = ChatTemplate::new(
            Path::new("chat.jinja"),
            "{{ tools | tojson }} {{ tools | tojson(ensure_ascii=False) }}".to_owned(),
            &Value::Null,
        );
        let values = r#"{"messages": [], "tools": [{"z": "<&'é\\u003c\n", "a": 1.5, "b": null}]}"#;
        let rendered = Compiled::new(&template)
            .unwrap()
            .render(Purpose::Answer, &value_of(&serde_json::from_str(values).unwrap()));
        let json = r#"[{"z": "<&'é\\u003c\n", "a": 1.5, "b": null}]"#;
        assert_eq!(rendered.unwrap().text, format!("{json} {json}"));
    }

    #[test]
    fn errors_of_templates_have_one_line() {
        let error = render("a\n{% nothing %}\nb", &Value::Null, &[]).unwrap_err().to_string();
        assert!(error.contains("unknown statement nothing") && error.lines().count() == 1, "{error}");
        let error = render("a\n{{ messages.nothing() }}\nb", &Value::Null, &[]).unwrap_err().to_string();
        assert!(error.contains("rejects the conversation") && error.lines().count() == 1, "{error}");
    }

    #[test]
    fn templates_are_found_beside_the_model() {
        let dir = tempfile::tempdir().unwrap();
        let text = |found: ChatTemplate| rendered(&found, Purpose::Answer, &json!({ "messages": [] })).unwrap().text;
        let find = || ChatTemplate::find(dir.path()).map(|found| found.map(text));
        assert_eq!(find().unwrap(), None);
        let config = |value: Value| fs::write(dir.path().join(CONFIG), value.to_string()).unwrap();
        config(json!({ "eos_token": "x" }));
        assert_eq!(find().unwrap(), None);
        config(json!({ "eos_token": "x", "chat_template": "{{ eos_token }}1" }));
        assert_eq!(find().unwrap().unwrap(), "x1");
        config(
            json!({ "chat_template": [{ "name": "tool", "template": "a" }, { "name": "default", "template": "b" }] }),
        );
        assert_eq!(find().unwrap().unwrap(), "b");
        fs::write(dir.path().join(FILE), "file").unwrap();
        assert_eq!(find().unwrap().unwrap(), "file");
        fs::write(dir.path().join(CONFIG), "{").unwrap();
        assert!(find().unwrap_err().to_string().contains("not valid JSON"));
    }
}
