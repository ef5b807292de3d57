//! The part of OpenAI's API that the server implements: requests, and the JSON of responses.

use super::error::ApiError;
use crate::commands::generation::SamplingSettings;
use crate::generate::Finish;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::fmt::Display;

/// Maximum number of texts in one request.
const MAX_TEXTS: usize = 64;
/// Maximum number of stop strings in a request, and their maximum length in bytes.
const MAX_STOPS: usize = 16;
const MAX_STOP_BYTES: usize = 1024;
/// The maximum number of log probabilities for each token of a response, as in vLLM.
const MAX_LOGPROBS: usize = 20;
/// Tokens of a completion unless the request says otherwise, as in OpenAI's API.
const DEFAULT_TOKENS: usize = 16;
/// Fields that would change the result in a way that the server does not implement. Null and `false` have no effect.
const NOT_IMPLEMENTED: [&str; 25] = [
    "suffix",
    "best_of",
    "top_logprobs",
    "logit_bias",
    "frequency_penalty",
    "presence_penalty",
    "tools",
    "functions",
    "audio",
    "modalities",
    // Extensions of vLLM.
    "min_tokens",
    "stop_token_ids",
    "bad_words",
    "allowed_token_ids",
    "use_beam_search",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "prompt_logprobs",
    "include_stop_str_in_output",
    "typical_p",
    "chat_template_kwargs",
    "continue_final_message",
];
/// More fields that are not implemented. Their default is `true`, so `false` is refused.
const TRUE_BY_DEFAULT: [&str; 2] = ["add_generation_prompt", "add_special_tokens"];

/// The input that a model continues.
#[derive(Clone, Debug, PartialEq)]
pub enum Prompt {
    /// A document that begins with this text.
    Text(String),
    /// Exactly these tokens.
    Tokens(Vec<u32>),
    /// A conversation, for the chat template of the model: role and content.
    Messages(Vec<(String, String)>),
    /// The text of a conversation, with special tokens.
    Conversation(String),
}

/// A request for texts.
#[derive(Clone, Debug)]
pub struct Completion {
    /// At least one.
    pub prompts: Vec<Prompt>,
    /// Number of texts for each prompt.
    pub n: usize,
    /// Maximum number of tokens in each text; `None`: as many as the context holds.
    pub tokens: Option<usize>,
    /// How tokens are chosen. Settings that are absent are those of the model.
    pub sampling: SamplingSettings,
    /// Seed of the first text; `None`: a random one.
    pub seed: Option<u32>,
    /// Strings before which a text ends.
    pub stops: Vec<String>,
    /// Whether the token that ends a text is ignored.
    pub ignore_end: bool,
    /// Whether the text contains the prompt.
    pub echo: bool,
    /// If set, the response is a stream of server-sent events.
    pub stream: Option<StreamOptions>,
    /// If set, the response has the log probability of each token, and of this number of the most likely tokens at its place.
    pub logprobs: Option<usize>,
    /// If set, only the last tokens of a prompt are read: this number, or as many as the context holds.
    pub truncate: Option<Truncate>,
}

/// Number of tokens to keep of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Truncate {
    /// Keeps as many tokens as the context holds.
    Context,
    /// Keeps at most this number, which is not 0.
    Tokens(usize),
}

/// Number of tokens of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of all prompts.
    pub prompt: usize,
    /// Those of them that were not computed again.
    pub cached: usize,
    /// Tokens of all texts.
    pub completion: usize,
}

#[derive(Deserialize)]
struct Body {
    prompt: Option<Value>,
    messages: Option<Value>,
    n: Option<usize>,
    max_tokens: Option<usize>,
    max_completion_tokens: Option<usize>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    top_k: Option<i64>,
    min_p: Option<f32>,
    repetition_penalty: Option<f32>,
    seed: Option<i64>,
    stop: Option<Stop>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    echo: Option<bool>,
    logprobs: Option<Value>,
    ignore_eos: Option<bool>,
    truncate_prompt_tokens: Option<i64>,
    response_format: Option<Value>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Stop {
    One(String),
    Several(Vec<String>),
}

/// How a response is streamed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct StreamOptions {
    /// Whether the stream ends with the number of tokens.
    #[serde(default)]
    pub include_usage: bool,
}

/// A text of a response.
#[derive(Clone, Debug, Default)]
pub struct CompletionChoice {
    /// The text so far.
    pub text: String,
    /// Why the text has ended.
    pub finish: Option<Finish>,
    /// Its log probabilities, if the request asks for them.
    pub logprobs: Value,
}

impl Completion {
    /// Returns the number of texts.
    pub fn texts(&self) -> usize {
        self.n * self.prompts.len()
    }

    /// Reads the body of a request to `/v1/completions`, or of one to `/v1/chat/completions` if `chat` is set.
    pub fn parse(body: &[u8], chat: bool) -> Result<Self, ApiError> {
        let value: Value = serde_json::from_slice(body)
            .map_err(|error| ApiError::invalid(None, format!("body: expected JSON, found an error: {error}")))?;
        let Value::Object(fields) = &value else {
            return Err(ApiError::invalid(None, format!("body: expected a JSON object, found {}", kind(&value))));
        };
        // Implemented for completions only.
        let completions_only = chat.then_some(["echo", "logprobs"]).into_iter().flatten();
        for name in NOT_IMPLEMENTED.into_iter().chain(TRUE_BY_DEFAULT).chain(completions_only) {
            let effect = fields.get(name).is_some_and(|value| match value {
                Value::Bool(value) if TRUE_BY_DEFAULT.contains(&name) => !value,
                Value::Null | Value::Bool(false) => false,
                Value::Number(number) => match name {
                    // 0 asks for the probability of the chosen token.
                    "logprobs" | "prompt_logprobs" => true,
                    "best_of" | "typical_p" => number.as_f64() != Some(1.0),
                    _ => number.as_f64() != Some(0.0),
                },
                Value::Array(list) => !list.is_empty() && *list != ["text"],
                // Any JSON schema has an effect.
                Value::Object(object) => !object.is_empty() || name == "guided_json",
                Value::Bool(true) | Value::String(_) => true,
            });
            if effect {
                return Err(ApiError::invalid(
                    Some(name),
                    format!("{name}: expected its default, because other values are not implemented; omit it"),
                ));
            }
        }
        let body: Body = Body::deserialize(&value).map_err(|error| wrong_type(fields, &error))?;
        let format = body.response_format.as_ref().unwrap_or(&Value::Null);
        let text_format = format.is_null() || format["type"] == "text";
        check("response_format", text_format, "{\"type\": \"text\"}", format)?;
        let prompts = if chat { vec![messages(body.messages.as_ref())?] } else { prompts(body.prompt.as_ref())? };
        let n = body.n.unwrap_or(1);
        let texts = n.saturating_mul(prompts.len());
        check("n", n >= 1 && texts <= MAX_TEXTS, "1 to 64 texts in one request", texts)?;
        let default = if chat { None } else { Some(DEFAULT_TOKENS) };
        let tokens = body.max_completion_tokens.or(body.max_tokens).or(default);
        let echo = body.echo.unwrap_or(false) && !chat;
        check("max_tokens", tokens != Some(0) || echo, "at least 1, or 0 with echo", 0)?;
        let seed = body.seed.map(|seed| seed as u32);
        let stream = body.stream.unwrap_or(false).then(|| body.stream_options.unwrap_or_default());
        Ok(Self {
            prompts,
            n,
            tokens,
            sampling: body.sampling()?,
            seed,
            stops: body.stops()?,
            ignore_end: body.ignore_eos.unwrap_or(false),
            echo,
            logprobs: body.logprobs(stream.is_some())?,
            stream,
            truncate: body.truncate()?,
        })
    }
}

impl Body {
    fn sampling(&self) -> Result<SamplingSettings, ApiError> {
        let Self { temperature, top_p, min_p, repetition_penalty, .. } = *self;
        let within = |name, value: Option<f32>, most: f32, expected: &str| {
            value.map_or(Ok(()), |value| check(name, (0.0..=most).contains(&value), expected, value))
        };
        within("temperature", temperature, 100.0, "a number from 0 to 100")?;
        within("top_p", top_p, 1.0, "a number from 0 to 1")?;
        within("min_p", min_p, 1.0, "a number from 0 to 1")?;
        if let Some(penalty) = repetition_penalty {
            check("repetition_penalty", penalty > 0.0 && penalty.is_finite(), "a finite number above 0", penalty)?;
        }
        // Other servers write -1 for all tokens.
        let top_k = self.top_k.map(|top_k| i32::try_from(top_k.max(0)).unwrap_or(i32::MAX));
        Ok(SamplingSettings { temperature, top_k, top_p, min_p, repetition_penalty })
    }

    fn truncate(&self) -> Result<Option<Truncate>, ApiError> {
        let Some(tokens) = self.truncate_prompt_tokens else { return Ok(None) };
        check("truncate_prompt_tokens", tokens == -1 || tokens > 0, "-1 or a positive number", tokens)?;
        Ok(Some(usize::try_from(tokens).map_or(Truncate::Context, Truncate::Tokens)))
    }

    fn logprobs(&self, stream: bool) -> Result<Option<usize>, ApiError> {
        let value = match &self.logprobs {
            None | Some(Value::Null | Value::Bool(false)) => return Ok(None),
            Some(value) => value,
        };
        let top = value.as_u64().and_then(|top| usize::try_from(top).ok()).filter(|top| *top <= MAX_LOGPROBS);
        check("logprobs", top.is_some(), "a whole number from 0 to 20", value)?;
        check("logprobs", !stream, "a request without stream", "one with stream; omit one of the two")?;
        Ok(top)
    }

    fn stops(&self) -> Result<Vec<String>, ApiError> {
        let stops = match &self.stop {
            None => Vec::new(),
            Some(Stop::One(stop)) => vec![stop.clone()],
            Some(Stop::Several(stops)) => stops.clone(),
        };
        let longest = stops.iter().map(String::len).max().unwrap_or(0);
        let valid = stops.len() <= MAX_STOPS && longest <= MAX_STOP_BYTES;
        let found = format!("{} strings of up to {longest} bytes", stops.len());
        check("stop", valid, "at most 16 strings of up to 1024 bytes", found)?;
        Ok(stops)
    }
}

fn check(name: &'static str, valid: bool, expected: &str, found: impl Display) -> Result<(), ApiError> {
    if valid {
        return Ok(());
    }
    // A precision would add digits to a number.
    let found = found.to_string();
    Err(ApiError::invalid(Some(name), format!("{name}: expected {expected}, found {found:.200}")))
}

/// Fields of [`Body`] with a type, and what they expect.
const TYPES: [(&str, &str); 15] = [
    ("n", "a whole number"),
    ("max_tokens", "a whole number"),
    ("max_completion_tokens", "a whole number"),
    ("temperature", "a number"),
    ("top_p", "a number"),
    ("top_k", "a whole number"),
    ("min_p", "a number"),
    ("repetition_penalty", "a number"),
    ("seed", "a whole number"),
    ("stop", "a string or an array of strings"),
    ("stream", "true or false"),
    ("stream_options", "an object"),
    ("echo", "true or false"),
    ("ignore_eos", "true or false"),
    ("truncate_prompt_tokens", "a whole number"),
];

/// Returns the error of the first field with a value of another type. serde's error does not name the field.
fn wrong_type(fields: &Map<String, Value>, error: &serde_json::Error) -> ApiError {
    let alone = |name: &str| {
        fields.get(name).map(|value| Value::Object([(name.to_owned(), value.clone())].into_iter().collect()))
    };
    let is_wrong = |name: &str| alone(name).is_some_and(|field| Body::deserialize(field).is_err());
    match TYPES.into_iter().find(|(name, _)| is_wrong(name)) {
        Some((name, expected)) => {
            let value = &fields[name];
            let found = match value {
                Value::Number(number) => number.to_string(),
                other => kind(other).to_owned(),
            };
            ApiError::invalid(Some(name), format!("{name}: expected {expected}, found {found}"))
        }
        None => ApiError::invalid(None, format!("body: unexpected value: {error}")),
    }
}

/// Returns the kind of a JSON value, for errors.
fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(list) if list.is_empty() => "an empty array",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

/// Reads `prompt`: a string, an array of token ids, or an array of either.
fn prompts(value: Option<&Value>) -> Result<Vec<Prompt>, ApiError> {
    let error = || {
        let found = match value {
            Some(Value::Array(list)) if !list.is_empty() => "an array with other elements",
            other => other.map_or("none", kind),
        };
        let expected = "a string, an array of token ids, or an array of strings or of arrays of token ids";
        ApiError::invalid(Some("prompt"), format!("prompt: expected {expected}, found {found}"))
    };
    let tokens =
        |list: &[Value]| -> Option<Vec<u32>> { list.iter().map(|id| u32::try_from(id.as_u64()?).ok()).collect() };
    let one = |value: &Value| match value {
        Value::String(text) => Some(Prompt::Text(text.clone())),
        Value::Array(list) if !list.is_empty() => tokens(list).map(Prompt::Tokens),
        _ => None,
    };
    let prompts = match value {
        None | Some(Value::Null) => vec![Prompt::Text(String::new())],
        Some(Value::Array(list)) if list.first().is_some_and(|first| !first.is_number()) => {
            check("prompt", list.len() <= MAX_TEXTS, "at most 64 prompts", list.len())?;
            list.iter().map(one).collect::<Option<_>>().ok_or_else(error)?
        }
        Some(value) => vec![one(value).ok_or_else(error)?],
    };
    Ok(prompts)
}

/// Reads `messages`. The content of a message is a string or a list of parts of type `text`.
fn messages(value: Option<&Value>) -> Result<Prompt, ApiError> {
    let error = |what: String| ApiError::invalid(Some("messages"), format!("messages: expected {what}"));
    let list = value.and_then(Value::as_array).filter(|list| !list.is_empty());
    let found = value.map_or("none", kind);
    let list = list.ok_or_else(|| error(format!("an array of at least one message, found {found}")))?;
    let mut messages = Vec::new();
    for (i, message) in list.iter().enumerate() {
        let role = &message["role"];
        let role =
            role.as_str().ok_or_else(|| error(format!("a string as the role of message {i}, found {}", kind(role))))?;
        let content = match &message["content"] {
            Value::String(text) => Some(text.clone()),
            Value::Array(parts) if !parts.is_empty() => {
                let text = |part: &Value| (part["type"] == "text").then(|| part["text"].as_str().map(str::to_owned))?;
                parts.iter().map(text).collect::<Option<Vec<_>>>().map(|parts| parts.concat())
            }
            _ => None,
        };
        let content = content.ok_or_else(|| {
            let found = match &message["content"] {
                Value::Array(parts) if !parts.is_empty() => "parts of other types",
                other => kind(other),
            };
            error(format!("a string or parts of type text as the content of message {i}, found {found}"))
        })?;
        messages.push((role.to_owned(), content));
    }
    Ok(Prompt::Messages(messages))
}

/// The fields that all parts of a response have in common.
#[derive(Clone, Debug)]
pub struct Header {
    /// Identifies the response.
    pub id: String,
    /// Unix time in seconds.
    pub created: u64,
    /// Name of the model.
    pub model: String,
    /// Whether the response has the form of a conversation.
    pub chat: bool,
}

impl Header {
    fn object(&self, stream: bool, choices: &[Value]) -> Value {
        let kind = match (self.chat, stream) {
            (true, true) => "chat.completion.chunk",
            (true, false) => "chat.completion",
            (false, _) => "text_completion",
        };
        json!({ "id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices })
    }

    /// Returns a complete response with all texts.
    pub fn response(&self, texts: Vec<CompletionChoice>, usage: Usage) -> Value {
        let choice = |(index, CompletionChoice { text, finish, logprobs }): (usize, CompletionChoice)| {
            let (reason, stop_reason) = (finish.map(Finish::name), stop_reason(finish));
            let mut choice = json!({ "index": index, "finish_reason": reason, "stop_reason": stop_reason });
            choice["logprobs"] = logprobs;
            if self.chat {
                choice["message"] = json!({ "role": "assistant", "content": text, "refusal": null });
            } else {
                choice["text"] = text.into();
            }
            choice
        };
        let mut object = self.object(false, &texts.into_iter().enumerate().map(choice).collect::<Vec<_>>());
        object["usage"] = usage.object();
        object
    }

    /// Returns the part of a stream with new text of a choice. The first part of a choice of a conversation names its role.
    pub fn part(&self, index: usize, text: &str, first: bool, finish: Option<Finish>) -> Value {
        let (finish, stop_reason) = (finish.map(Finish::name), stop_reason(finish));
        let mut choice = if self.chat {
            let delta = match (first, finish) {
                (true, _) => json!({ "role": "assistant", "content": text }),
                (false, Some(_)) if text.is_empty() => json!({}),
                (false, _) => json!({ "content": text }),
            };
            json!({ "index": index, "delta": delta, "logprobs": null, "finish_reason": finish })
        } else {
            json!({ "index": index, "text": text, "logprobs": null, "finish_reason": finish })
        };
        if finish.is_some() {
            choice["stop_reason"] = stop_reason.into();
        }
        self.object(true, &[choice])
    }

    /// Returns the last part of a stream, with the number of tokens.
    pub fn usage(&self, usage: Usage) -> Value {
        let mut object = self.object(true, &[]);
        object["usage"] = usage.object();
        object
    }
}

/// Returns the extension field `stop_reason`, which tells a full context from `max_tokens`. Both have the `finish_reason` "length".
fn stop_reason(finish: Option<Finish>) -> Option<&'static str> {
    (finish == Some(Finish::Context)).then_some("context_full")
}

impl Usage {
    fn object(self) -> Value {
        let Self { prompt, cached, completion } = self;
        json!({ "prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion,
            "prompt_tokens_details": { "cached_tokens": cached } })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(body: &Value, chat: bool) -> Result<Completion, ApiError> {
        Completion::parse(body.to_string().as_bytes(), chat)
    }

    #[test]
    fn prompts_are_texts_or_tokens_or_lists_of_them() {
        let prompts = |prompt: Value| parse(&json!({ "prompt": prompt }), false).map(|request| request.prompts);
        let text = |text: &str| Prompt::Text(text.to_owned());
        assert_eq!(prompts(json!("a")).unwrap(), [text("a")]);
        assert_eq!(prompts(json!(["a", "b"])).unwrap(), [text("a"), text("b")]);
        assert_eq!(prompts(json!([1, 2])).unwrap(), [Prompt::Tokens(vec![1, 2])]);
        assert_eq!(prompts(json!([[1], [2]])).unwrap(), [Prompt::Tokens(vec![1]), Prompt::Tokens(vec![2])]);
        assert_eq!(prompts(Value::Null).unwrap(), [text("")]);
        for invalid in [json!(5), json!([]), json!([1, "a"]), json!([-1]), json!([[]]), json!({}), json!([1.5])] {
            assert_eq!(prompts(invalid.clone()).unwrap_err().param(), Some("prompt"), "{invalid}");
        }
        let many = prompts(json!(vec!["a"; 65])).unwrap_err();
        assert_eq!(many.param(), Some("prompt"));
    }

    #[test]
    fn settings_are_checked() {
        let request = parse(&json!({ "stop": "x", "top_k": -1, "seed": -1, "max_tokens": 5, "n": 2 }), false).unwrap();
        assert_eq!((request.stops, request.seed, request.tokens), (vec!["x".to_owned()], Some(u32::MAX), Some(5)));
        assert_eq!((request.sampling.top_k, request.n, request.stream), (Some(0), 2, None));
        assert_eq!(request.sampling.temperature, None);
        let request = parse(&json!({ "stream": true, "stream_options": { "include_usage": true } }), false).unwrap();
        assert_eq!((request.stream, request.tokens), (Some(StreamOptions { include_usage: true }), Some(16)));
        let truncate =
            |tokens: i64| parse(&json!({ "truncate_prompt_tokens": tokens }), false).map(|request| request.truncate);
        assert_eq!((truncate(-1).unwrap(), truncate(5).unwrap()), (Some(Truncate::Context), Some(Truncate::Tokens(5))));
        // Defaults that clients write out.
        let defaults = json!({ "frequency_penalty": 0, "logprobs": null, "best_of": 1, "tools": [], "user": "u",
            "add_special_tokens": true, "chat_template_kwargs": {}, "typical_p": 1,
            "response_format": { "type": "text" } });
        assert!(parse(&defaults, false).is_ok());
        for (name, value) in [
            ("temperature", json!(-1)),
            ("top_p", json!(1.5)),
            ("min_p", json!(2)),
            ("repetition_penalty", json!(0)),
            ("n", json!(65)),
            ("n", json!(0)),
            ("max_tokens", json!(0)),
            ("truncate_prompt_tokens", json!(0)),
            ("stop", json!(vec!["x"; 17])),
            ("stop", json!("x".repeat(1025))),
            ("presence_penalty", json!(0.5)),
            ("logprobs", json!(true)),
            ("logprobs", json!(21)),
            ("logprobs", json!(-1)),
            ("logprobs", json!("1")),
            ("add_special_tokens", json!(false)),
            ("chat_template_kwargs", json!({ "enable_thinking": false })),
            ("tools", json!([{}])),
            ("response_format", json!({ "type": "json_object" })),
        ] {
            let error = parse(&json!({ name: value }), false).unwrap_err();
            assert_eq!(error.param(), Some(name), "{value}");
        }
        assert_eq!(parse(&json!({ "logprobs": 1, "stream": true }), false).unwrap_err().param(), Some("logprobs"));
        assert_eq!(parse(&json!({ "messages": [], "logprobs": true }), true).unwrap_err().param(), Some("logprobs"));
        let scored = parse(&json!({ "max_tokens": 0, "echo": true, "logprobs": 0 }), false).unwrap();
        assert_eq!((scored.tokens, scored.logprobs), (Some(0), Some(0)));
        let message =
            |body: Value| parse(&body, false).unwrap_err().json()["error"]["message"].as_str().unwrap().to_owned();
        assert_eq!(message(json!({ "temperature": -1 })), "temperature: expected a number from 0 to 100, found -1");
        assert_eq!(message(json!({ "top_p": 1.5 })), "top_p: expected a number from 0 to 1, found 1.5");
        for body in ["", "{", "[]", "{\"n\":\"x\"}", "\u{0}"] {
            assert!(Completion::parse(body.as_bytes(), false).is_err(), "{body}");
        }
    }

    #[test]
    fn values_of_another_type_name_the_field() {
        for (name, value, expected) in [
            ("max_tokens", json!("5"), "max_tokens: expected a whole number, found a string"),
            ("max_tokens", json!(1.5), "max_tokens: expected a whole number, found 1.5"),
            ("n", json!(-1), "n: expected a whole number, found -1"),
            ("temperature", json!("x"), "temperature: expected a number, found a string"),
            ("stop", json!(5), "stop: expected a string or an array of strings, found 5"),
            ("stop", json!([5]), "stop: expected a string or an array of strings, found an array"),
            ("stream", json!("x"), "stream: expected true or false, found a string"),
            ("seed", json!(1.5), "seed: expected a whole number, found 1.5"),
            ("stream_options", json!(true), "stream_options: expected an object, found a boolean"),
        ] {
            let error = parse(&json!({ "prompt": "a", name: value }), false).unwrap_err();
            assert_eq!((error.param(), &error.json()["error"]["message"]), (Some(name), &json!(expected)));
        }
    }

    #[test]
    fn fields_of_other_servers_that_change_the_text_are_refused() {
        for (name, value) in [
            ("min_tokens", json!(5)),
            ("stop_token_ids", json!([5])),
            ("guided_json", json!({})),
            ("structured_outputs", json!({ "regex": "a" })),
        ] {
            assert_eq!(parse(&json!({ name: value }), false).unwrap_err().param(), Some(name));
        }
        let defaults = json!({ "min_tokens": 0, "stop_token_ids": [], "use_beam_search": false, "guided_json": null });
        assert!(parse(&defaults, false).is_ok());
    }

    #[test]
    fn messages_have_roles_and_texts() {
        let messages = |messages: Value| parse(&json!({ "messages": messages }), true).map(|request| request.prompts);
        let pair = |role: &str, content: &str| (role.to_owned(), content.to_owned());
        let parts = json!([{ "type": "text", "text": "a" }, { "type": "text", "text": "b" }]);
        assert_eq!(
            messages(json!([{ "role": "system", "content": "s" }, { "role": "user", "content": parts }])).unwrap(),
            [Prompt::Messages(vec![pair("system", "s"), pair("user", "ab")])]
        );
        let image = json!([{ "type": "image_url", "image_url": {} }]);
        for invalid in [
            Value::Null,
            json!([]),
            json!([{ "content": "a" }]),
            json!([{ "role": "user" }]),
            json!([{ "role": "user", "content": image }]),
        ] {
            assert_eq!(messages(invalid.clone()).unwrap_err().param(), Some("messages"), "{invalid}");
        }
        assert_eq!(parse(&json!({ "messages": [{ "role": "user", "content": "a" }] }), true).unwrap().tokens, None);
    }

    #[test]
    fn responses_have_the_form_of_openai() {
        let header = |chat| Header { id: "x-1".to_owned(), created: 5, model: "m".to_owned(), chat };
        let usage = Usage { prompt: 2, cached: 1, completion: 3 };
        let choice = |text: &str, finish| CompletionChoice {
            text: text.to_owned(),
            finish: Some(finish),
            logprobs: Value::Null,
        };
        let response = header(false).response(vec![choice("a", Finish::Length)], usage);
        assert_eq!(
            response,
            json!({ "id": "x-1", "object": "text_completion", "created": 5, "model": "m", "choices": [
                { "index": 0, "text": "a", "logprobs": null, "finish_reason": "length", "stop_reason": null }],
                "usage": { "prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5,
                    "prompt_tokens_details": { "cached_tokens": 1 } } })
        );
        let response = header(true).response(vec![choice("a", Finish::Stop)], usage);
        assert_eq!(
            (&response["object"], &response["choices"][0]["message"]["content"]),
            (&json!("chat.completion"), &json!("a"))
        );
        let part = header(true).part(1, "b", true, None);
        assert_eq!(part["choices"][0]["delta"], json!({ "role": "assistant", "content": "b" }));
        assert_eq!(part["object"], "chat.completion.chunk");
        let end = header(true).part(1, "", false, Some(Finish::EndOfText(0)));
        assert_eq!((&end["choices"][0]["delta"], &end["choices"][0]["finish_reason"]), (&json!({}), &json!("stop")));
        let full = header(true).part(1, "", false, Some(Finish::Context));
        let reasons = [&full["choices"][0]["finish_reason"], &full["choices"][0]["stop_reason"]];
        assert_eq!(reasons, ["length", "context_full"]);
        assert_eq!(header(false).part(0, "b", true, None)["choices"][0]["text"], "b");
        assert_eq!(header(false).usage(usage)["choices"], json!([]));
    }
}
