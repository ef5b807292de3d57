//! The formats of conversations: OpenAI's `messages`, ShareGPT's `conversations`, and pairs of a prompt and a completion.

use super::json::Json;
use super::{Reason, Skip};
use crate::documents::{list_names, not_an_object};
use anyhow::{Result, anyhow};

/// The fields that are read of a record.
pub const FIELDS: [&str; 5] = ["messages", "conversations", "prompt", "completion", "tools"];

/// The roles that templates know.
const ROLES: [&str; 4] = ["system", "user", "assistant", "tool"];

/// ShareGPT's names of roles.
const SHARE_GPT_ROLES: [(&str, &str); 5] = [
    ("human", "user"),
    ("gpt", "assistant"),
    ("model", "assistant"),
    ("observation", "tool"),
    ("function_response", "tool"),
];

/// A conversation for a chat template.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Conversation {
    /// Objects with `role`, `content` as text, and the other fields of the record.
    pub messages: Vec<Json>,
    /// Descriptions of functions that the assistant may call.
    pub tools: Option<Json>,
}

impl Conversation {
    /// Reads a record. An error means that it is not a JSON object.
    pub fn read(record: &str) -> Result<Result<Self, Skip>> {
        let json: Json = serde_json::from_str(record).map_err(|error| not_an_object(record, &error))?;
        if !matches!(json, Json::Object(_)) {
            return Err(anyhow!("expected a JSON object, found {}; check --format", json.kind()));
        }
        Ok(Self::of_object(&json))
    }

    fn of_object(record: &Json) -> Result<Self, Skip> {
        let field = |name: &str| record.get(name).filter(|value| **value != Json::Null);
        let messages = match (field("messages").or(field("conversations")), field("prompt"), field("completion")) {
            (Some(messages), ..) => messages_of(messages)?,
            (None, Some(prompt), Some(completion)) => {
                [side(prompt, "prompt", "user")?, side(completion, "completion", "assistant")?].concat()
            }
            _ => return Err(Reason::Format.because(format!("found {}", record.names()))),
        };
        if messages.is_empty() {
            return Err(Reason::Empty.because("found no messages".into()));
        }
        if !messages.iter().any(|message| message.get("role").and_then(Json::as_str) == Some("assistant")) {
            return Err(Reason::NoAssistant.because(format!("found {} messages of other roles", messages.len())));
        }
        // Columns of parquet files have the tools as text.
        let tools = field("tools").map(parsed).filter(|tools| *tools != Json::Array(Vec::new()));
        Ok(Self { messages, tools })
    }

    /// Returns the values of a template, as JSON.
    pub fn to_json(&self) -> Result<String> {
        let fields = [("messages", Some(Json::Array(self.messages.clone()))), ("tools", self.tools.clone())];
        let fields = fields.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?)));
        Ok(serde_json::to_string(&Json::Object(fields.collect()))?)
    }

    /// Calls `change` for each text.
    pub fn for_each_text(&mut self, change: &mut dyn FnMut(&mut String)) {
        // The names of fields are those of the format.
        for message in &mut self.messages {
            let Json::Object(fields) = message else { continue };
            for (_, value) in fields {
                value.for_each_text(change);
            }
        }
        self.tools.iter_mut().for_each(|tools| tools.for_each_text(change));
    }
}

/// Returns the value that a text contains as JSON, or the value itself.
fn parsed(value: &Json) -> Json {
    value.as_str().and_then(|text| serde_json::from_str(text).ok()).unwrap_or_else(|| value.clone())
}

/// Returns the messages of a prompt or a completion: a list, or the text of one message.
fn side(value: &Json, name: &str, role: &str) -> Result<Vec<Json>, Skip> {
    match value {
        Json::String(text) => Ok(vec![message_with(role, text.clone(), Vec::new())]),
        Json::Array(_) => messages_of(value),
        other => Err(Reason::Content
            .because(format!("expected a string or a list of messages as {name}, found {}", other.kind()))),
    }
}

fn messages_of(value: &Json) -> Result<Vec<Json>, Skip> {
    let value = parsed(value);
    let Json::Array(messages) = &value else {
        return Err(Reason::Content.because(format!("expected a list of messages, found {}", value.kind())));
    };
    messages.iter().enumerate().map(|(i, message)| message_of(i + 1, message)).collect()
}

/// Returns a message with a known role and text as its content.
fn message_of(number: usize, message: &Json) -> Result<Json, Skip> {
    let Json::Object(fields) = message else {
        return Err(Reason::Content.because(format!("message {number}: expected an object, found {}", message.kind())));
    };
    let role = message.get("role").or(message.get("from"));
    let named = role.and_then(Json::as_str).and_then(|role| {
        let of_share_gpt = SHARE_GPT_ROLES.iter().find(|(name, _)| *name == role).map(|(_, role)| *role);
        ROLES.into_iter().find(|known| *known == role).or(of_share_gpt)
    });
    let Some(named) = named else {
        let found = role.map_or_else(|| "none".to_owned(), |role| role.as_str().unwrap_or(role.kind()).to_owned());
        return Err(Reason::Role.because(format!("message {number}: found role {}", list_names([found].iter()))));
    };
    let found = message.get("content").or(message.get("value")).unwrap_or(&Json::Null);
    let content = match found {
        Json::String(text) => Some(text.clone()),
        Json::Array(parts) => {
            let text = |part: &Json| {
                let is_text = part.get("type").and_then(Json::as_str) == Some("text");
                part.get("text").and_then(Json::as_str).filter(|_| is_text).map(str::to_owned)
            };
            parts.iter().map(text).collect()
        }
        // The assistant calls functions.
        Json::Null if message.get("tool_calls").is_some_and(|calls| *calls != Json::Null) => Some(String::new()),
        _ => None,
    };
    let Some(content) = content else {
        let found = if matches!(found, Json::Array(_)) { "parts of other types" } else { found.kind() };
        return Err(
            Reason::Content.because(format!("message {number}: expected a text or parts of type text, found {found}"))
        );
    };
    let is_other = |name: &str| !["role", "content", "from", "value"].contains(&name);
    let others = fields.iter().filter(|(name, value)| is_other(name) && *value != Json::Null).cloned();
    Ok(message_with(named, content, others.map(with_arguments).collect()))
}

fn message_with(role: &str, content: String, others: Vec<(String, Json)>) -> Json {
    let known = [("role".to_owned(), Json::String(role.to_owned())), ("content".to_owned(), Json::String(content))];
    Json::Object(known.into_iter().chain(others).collect())
}

/// Parses the arguments of calls of functions. They are text in OpenAI's format, and objects for templates.
fn with_arguments((name, value): (String, Json)) -> (String, Json) {
    if name != "tool_calls" {
        return (name, value);
    }
    let mut calls = parsed(&value);
    if let Json::Array(calls) = &mut calls {
        for call in calls {
            let Json::Object(fields) = call else { continue };
            // Parquet files have null for fields that other calls have.
            fields.retain(|(_, value)| *value != Json::Null);
            for (_, function) in fields.iter_mut().filter(|(name, _)| name == "function") {
                let Json::Object(fields) = function else { continue };
                for (_, arguments) in fields.iter_mut().filter(|(name, _)| name == "arguments") {
                    let object = parsed(arguments);
                    if matches!(object, Json::Object(_)) {
                        *arguments = object;
                    }
                }
            }
        }
    }
    (name, calls)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(record: &str) -> Result<String, Skip> {
        Conversation::read(record).unwrap().map(|conversation| conversation.to_json().unwrap())
    }

    #[test]
    fn formats_become_messages() {
        let expected = r#"{"messages":[{"role":"system","content":"s"},{"role":"user","content":"a"},{"role":"assistant","content":"b"}]}"#;
        for record in [
            r#"{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}"#,
            r#"{"messages": [{"content": "s", "role": "system"}, {"role": "user", "content": [{"type": "text", "text": "a"}]}, {"role": "assistant", "content": "b", "name": null}]}"#,
            r#"{"id": 7, "conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}"#,
            r#"{"messages": "[{\"role\": \"system\", \"content\": \"s\"}, {\"role\": \"user\", \"content\": \"a\"}, {\"role\": \"assistant\", \"content\": \"b\"}]", "tools": null}"#,
            r#"{"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}], "completion": "b"}"#,
        ] {
            assert_eq!(read(record).unwrap(), expected, "{record}");
        }
        let pair = r#"{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b"}]}"#;
        assert_eq!(read(r#"{"prompt": "a", "completion": "b", "messages": null}"#).unwrap(), pair);
    }

    #[test]
    fn calls_of_functions_are_kept() {
        let record = r#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": null, "tool_calls": [{"type": "function", "id": null, "function": {"name": "f", "arguments": "{\"z\": 1, \"b\": 2}"}}]}, {"role": "tool", "name": "f", "content": "3"}], "tools": "[{\"name\": \"f\"}]"}"#;
        let expected = r#"{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"","tool_calls":[{"type":"function","function":{"name":"f","arguments":{"z":1,"b":2}}}]},{"role":"tool","content":"3","name":"f"}],"tools":[{"name":"f"}]}"#;
        assert_eq!(read(record).unwrap(), expected);
    }

    #[test]
    fn other_records_have_reasons() {
        let skip = |record: &str| read(record).unwrap_err();
        for (record, reason, detail) in [
            (r#"{"text": "a", "b": 1}"#, Reason::Format, "found text, b"),
            (r#"{"prompt": "a"}"#, Reason::Format, "found prompt"),
            (r#"{"messages": []}"#, Reason::Empty, "no messages"),
            (r#"{"messages": [{"role": "user", "content": "a"}]}"#, Reason::NoAssistant, "1 messages of other roles"),
            (r#"{"messages": [{"role": "robot", "content": "a"}]}"#, Reason::Role, "message 1: found role robot"),
            (r#"{"messages": [{"content": "a"}]}"#, Reason::Role, "found role none"),
            (r#"{"messages": 5}"#, Reason::Content, "expected a list of messages, found a number"),
            (r#"{"messages": "hello"}"#, Reason::Content, "expected a list of messages, found a string"),
            (r#"{"messages": ["a"]}"#, Reason::Content, "message 1: expected an object, found a string"),
            (r#"{"messages": [{"role": "user"}]}"#, Reason::Content, "found null"),
            (r#"{"messages": [{"role": "user", "content": 5}]}"#, Reason::Content, "found a number"),
            (
                r#"{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}"#,
                Reason::Content,
                "found parts of other types",
            ),
            (
                r#"{"prompt": 1, "completion": "b"}"#,
                Reason::Content,
                "expected a string or a list of messages as prompt",
            ),
        ] {
            let found = skip(record);
            assert_eq!(found.reason, reason, "{record}");
            assert!(found.detail.contains(detail), "{record}: {}", found.detail);
        }
        for record in ["[]", "5", "{", "", r#"{"a": "\ud800"}"#] {
            let error = Conversation::read(record).unwrap_err().to_string();
            assert!(error.contains("expected a JSON object, found"), "{record}: {error}");
        }
    }
}
