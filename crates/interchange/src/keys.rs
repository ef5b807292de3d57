//! Typed access to the keys of a `config.json`.

use anyhow::{Context, Result};
use serde_json::{Map, Value};

/// The keys of a `config.json`, or of an object in it. A null value counts as an absent key.
#[derive(Clone, Copy, Debug)]
pub struct Keys<'a>(pub &'a Map<String, Value>);

impl<'a> Keys<'a> {
    /// Returns a value, or null.
    pub fn get(&self, key: &str) -> &'a Value {
        self.0.get(key).unwrap_or(&Value::Null)
    }

    /// Returns a whole number.
    pub fn size(&self, key: &str) -> Result<usize> {
        let found = || self.0.get(key).map_or("none".to_owned(), ToString::to_string);
        self.optional_size(key)?.with_context(|| format!("{key}: expected a whole number, found {}", found()))
    }

    /// Returns a whole number if the key is present.
    pub fn optional_size(&self, key: &str) -> Result<Option<usize>> {
        let value = self.get(key);
        if value.is_null() {
            return Ok(None);
        }
        let size = value.as_u64().and_then(|size| usize::try_from(size).ok());
        size.map(Some).with_context(|| format!("{key}: expected a whole number, found {value}"))
    }

    /// Returns a number.
    pub fn float(&self, key: &str, default: f32) -> Result<f32> {
        match self.get(key) {
            Value::Null => Ok(default),
            value => {
                let float = value.as_f64().map(|float| float as f32);
                float.with_context(|| format!("{key}: expected a number, found {value}"))
            }
        }
    }

    /// Returns a flag.
    pub fn flag(&self, key: &str, default: bool) -> Result<bool> {
        match self.get(key) {
            Value::Null => Ok(default),
            value => value.as_bool().with_context(|| format!("{key}: expected true or false, found {value}")),
        }
    }
}
