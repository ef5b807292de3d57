//! Renders many conversations for training, in a few processes.

use super::renderer::{Purpose, Renderer};
use super::{ChatTemplate, TemplateError};
use data::conversations::{Render, RenderError, Rendered};
use serde_json::value::RawValue;
use std::sync::{Mutex, PoisonError};

/// The default template: a start token, the role, the content and an end token for each message.
const CHATML: &str = include_str!("chatml.jinja");

/// Returns the source of a built-in template and the special tokens that it needs.
pub fn default_template(name: &str) -> Option<(&'static str, [&'static str; 2])> {
    (name == "chatml").then_some((CHATML, ["<|im_start|>", "<|im_end|>"]))
}

/// Renders conversations, each thread in a process of its own.
#[derive(Debug)]
pub struct Training<'a> {
    template: &'a ChatTemplate,
    /// The processes that no thread uses.
    idle: Mutex<Vec<Renderer>>,
}

impl<'a> Training<'a> {
    /// Creates a renderer. Processes are started when they are needed.
    pub fn new(template: &'a ChatTemplate) -> Self {
        Self { template, idle: Mutex::default() }
    }

    fn idle(&self) -> Option<Renderer> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop()
    }
}

impl Render for Training<'_> {
    fn render(&self, values: &str) -> Result<Rendered, RenderError> {
        let values: &RawValue = serde_json::from_str(values).map_err(|error| RenderError::Failed(error.into()))?;
        let mut renderer =
            self.idle().map_or_else(|| Renderer::start(self.template), Ok).map_err(RenderError::Failed)?;
        // After an error, the process has ended.
        let rendered = renderer
            .render(Purpose::Training, &values)
            .map_err(|error| RenderError::Failed(self.template.unusable(&error).into()))?;
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(renderer);
        match rendered {
            Ok(super::Rendered { text, turns, marks_turns }) => {
                let turns = turns.into_iter().map(|(start, end)| start..end).collect();
                Ok(Rendered { text, turns, is_exact: marks_turns })
            }
            Err(TemplateError::Rejected(reason)) => Err(RenderError::Rejected(reason)),
            Err(error @ TemplateError::Unusable(_)) => Err(RenderError::Failed(error.into())),
        }
    }
}
