//! Chat templates of Hugging Face directories: Jinja templates that turn messages into the text that a model reads.

use super::date;
use anyhow::{Context, Result, anyhow, bail};
use interchange::{ModelSource, companions};
use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, Error, ErrorKind, context};
use serde_json::Value;
use std::path::Path;

/// A message of a conversation.
#[derive(Clone, Debug)]
pub struct Message {
    role: String,
    content: String,
}

impl Message {
    /// Creates a message of `system`, `user` or `assistant`.
    pub fn new(role: &str, content: &str) -> Self {
        Self { role: role.to_owned(), content: content.to_owned() }
    }
}

/// The template of a model.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    /// The special tokens that the template names.
    bos_token: String,
    eos_token: String,
}

impl ChatTemplate {
    /// Returns the template of a model, or that of the model from which a run started.
    pub fn of(source: &ModelSource) -> Result<Option<Self>> {
        source.settings().iter().find_map(|directory| Self::find(directory).transpose()).transpose()
    }

    /// Returns the template in the directory of a model: `chat_template.jinja`, or that of `tokenizer_config.json`. `None` if there is
    /// none.
    fn find(directory: &Path) -> Result<Option<Self>> {
        let config = companions::tokenizer_config(directory)?;
        let Some((path, source)) = companions::chat_template(directory, &config)? else { return Ok(None) };
        Self::new(&source, &config).with_context(|| format!("{}: not a valid chat template", path.display())).map(Some)
    }

    fn new(source: &str, config: &Value) -> Result<Self> {
        let mut environment = Environment::new();
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
        let source = without_generation(source);
        environment.add_template_owned("chat", source).map_err(|error| anyhow!("{error}"))?;
        let token = |name: &str| match &config[name] {
            Value::Object(token) => token.get("content").and_then(Value::as_str).unwrap_or_default().to_owned(),
            token => token.as_str().unwrap_or_default().to_owned(),
        };
        Ok(Self { environment, bos_token: token("bos_token"), eos_token: token("eos_token") })
    }

    /// Returns the text of a conversation, up to the beginning of the model's answer.
    pub fn render(&self, messages: &[&Message]) -> Result<String> {
        let Self { environment, bos_token, eos_token } = self;
        let template = environment.get_template("chat").map_err(|error| anyhow!("{error}"))?;
        let message = |m: &&Message| context! { role => m.role.clone(), content => m.content.clone() };
        let messages: Vec<minijinja::Value> = messages.iter().map(message).collect();
        let (bos_token, eos_token) = (bos_token.clone(), eos_token.clone());
        let values = context! { messages => messages, bos_token, eos_token, add_generation_prompt => true };
        match template.render(values) {
            Ok(text) => Ok(text),
            Err(error) => bail!("the chat template rejects the conversation: {error}"),
        }
    }
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

    fn render(source: &str, config: &Value, messages: &[(&str, &str)]) -> Result<String> {
        let messages: Vec<Message> = messages.iter().map(|(role, content)| Message::new(role, content)).collect();
        ChatTemplate::new(source, config)?.render(&messages.iter().collect::<Vec<_>>())
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
        let find = || ChatTemplate::find(dir.path()).map(|found| found.map(|found| found.render(&[]).unwrap()));
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
