//! Chat templates of Hugging Face directories: Jinja templates that turn messages into the text that a model reads.
//!
//! A template is a program of the model's author. [`ChatTemplate::render`] runs it in a process with limits ([`renderer`]).

use super::{date, renderer};
use anyhow::Result;
use interchange::{ModelSource, companions};
use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, Error, ErrorKind, context};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::path::{Path, PathBuf};

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
#[derive(Debug, thiserror::Error, Serialize, Deserialize)]
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

    fn new(path: &Path, source: String, config: &Value) -> Self {
        let token = |name: &str| match &config[name] {
            Value::Object(token) => token.get("content").and_then(Value::as_str).unwrap_or_default().to_owned(),
            token => token.as_str().unwrap_or_default().to_owned(),
        };
        let path = path.display().to_string();
        Self { path, source, bos_token: token("bos_token"), eos_token: token("eos_token") }
    }

    /// Returns the text of a conversation, up to the beginning of the model's answer.
    pub fn render(&self, messages: &[&Message]) -> Result<String, TemplateError> {
        let rendered = renderer::render(self, messages);
        rendered.unwrap_or_else(|error| Err(TemplateError::Unusable(format!("{}: {error:#}", self.path))))
    }

    /// Fails if the template is not valid. It may reject a conversation without messages.
    pub fn check(&self) -> Result<(), TemplateError> {
        match self.render(&[]) {
            Err(error @ TemplateError::Unusable(_)) => Err(error),
            Ok(_) | Err(TemplateError::Rejected(_)) => Ok(()),
        }
    }

    /// Does the work of [`render`](Self::render) in this process, without limits of memory, stack and time.
    pub(super) fn render_here(&self, messages: &[Message]) -> Result<String, TemplateError> {
        let invalid = |error: Error| {
            TemplateError::Unusable(format!("{}: expected a valid chat template, found an error: {error}", self.path))
        };
        let mut environment = environment().map_err(invalid)?;
        environment.add_template_owned("chat", without_generation(&self.source)).map_err(invalid)?;
        let template = environment.get_template("chat").map_err(invalid)?;
        let message = |m: &Message| context! { role => m.role.clone(), content => m.content.clone() };
        let messages: Vec<minijinja::Value> = messages.iter().map(message).collect();
        let (bos_token, eos_token) = (self.bos_token.clone(), self.eos_token.clone());
        let values = context! { messages => messages, bos_token, eos_token, add_generation_prompt => true };
        template.render(values).map_err(|error| match error.kind() {
            ErrorKind::OutOfFuel => TemplateError::Unusable(format!(
                "{}: expected a chat template of at most {MAX_FUEL} steps, found more; send shorter messages, or use another template",
                self.path
            )),
            _ => TemplateError::Rejected(error.to_string()),
        })
    }
}

/// Returns what templates may use.
fn environment() -> Result<Environment<'static>, Error> {
    let mut environment = Environment::new();
    environment.set_fuel(Some(MAX_FUEL));
    // As in transformers.
    environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.add_function("raise_exception", |message: String| -> Result<String, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message))
    });
    environment.add_function("strftime_now", |format: String| -> Result<String, Error> {
        let unknown = || format!("strftime_now: expected directives of a date or time, found {format}");
        date::now(&format).ok_or_else(|| Error::new(ErrorKind::InvalidOperation, unknown()))
    });
    Ok(environment)
}

/// Returns a template without the blocks `{% generation %}` of transformers. They mark the tokens of the assistant for training, and
/// do not change the text.
fn without_generation(source: &str) -> String {
    let mut text = String::new();
    let mut rest = source;
    while let Some((before, tag)) = rest.split_once("{%") {
        text += before;
        text += "{%";
        let start = tag.len() - tag.trim_start_matches(['-', '+']).trim_start().len();
        let word = tag[start..].split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or_default();
        let replacement = match word {
            "generation" => "if true",
            "endgeneration" => "endif",
            other => other,
        };
        text += &tag[..start];
        text += replacement;
        rest = &tag[start + word.len()..];
    }
    text + rest
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

    fn render(source: &str, config: &Value, messages: &[(&str, &str)]) -> Result<String, TemplateError> {
        let messages: Vec<Message> = messages.iter().map(|(role, content)| Message::new(role, content)).collect();
        ChatTemplate::new(Path::new("chat.jinja"), source.to_owned(), config).render_here(&messages)
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
        let find = || ChatTemplate::find(dir.path()).map(|found| found.map(|found| found.render_here(&[]).unwrap()));
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
