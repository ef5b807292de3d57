//! Parses JSON: the messages of cargo.
//!
//! `serde_json` would be compiled a second time for build scripts, and the device build would start after it.

use std::ops::Index;

/// A JSON value. Absent members and elements are `Null`.
#[derive(Debug, PartialEq)]
pub enum Value {
    Null,
    Bool(bool),
    Number(f64),
    String(String),
    Array(Vec<Value>),
    Object(Vec<(String, Value)>),
}

impl Value {
    /// Parses a text that consists of one value. Returns `None` if it is not valid JSON.
    pub fn parse(text: &str) -> Option<Self> {
        let mut parser = Parser { rest: text };
        let value = parser.value()?;
        parser.skip_spaces();
        parser.rest.is_empty().then_some(value)
    }

    /// Returns the text of a string.
    pub fn as_str(&self) -> Option<&str> {
        if let Self::String(text) = self { Some(text) } else { None }
    }

    /// Returns a number without its fraction.
    pub fn as_u64(&self) -> Option<u64> {
        if let Self::Number(number) = self { Some(*number as u64) } else { None }
    }

    /// Returns the elements of an array.
    pub fn as_array(&self) -> Option<&[Self]> {
        if let Self::Array(elements) = self { Some(elements) } else { None }
    }
}

impl Index<&str> for Value {
    type Output = Self;

    fn index(&self, key: &str) -> &Self {
        let Self::Object(members) = self else { return &Self::Null };
        members.iter().find(|(name, _)| name == key).map_or(&Self::Null, |(_, value)| value)
    }
}

impl Index<usize> for Value {
    type Output = Self;

    fn index(&self, index: usize) -> &Self {
        self.as_array().and_then(|elements| elements.get(index)).unwrap_or(&Self::Null)
    }
}

struct Parser<'a> {
    rest: &'a str,
}

impl Parser<'_> {
    fn skip_spaces(&mut self) {
        self.rest = self.rest.trim_start_matches([' ', '\t', '\n', '\r']);
    }

    /// Skips spaces and then `token`. Returns whether it was there.
    fn skip(&mut self, token: &str) -> bool {
        self.skip_spaces();
        let after = self.rest.strip_prefix(token);
        self.rest = after.unwrap_or(self.rest);
        after.is_some()
    }

    fn value(&mut self) -> Option<Value> {
        self.skip_spaces();
        match self.rest.chars().next()? {
            '"' => self.string().map(Value::String),
            '[' => self.list("[", "]", Self::value).map(Value::Array),
            '{' => self.list("{", "}", Self::member).map(Value::Object),
            _ if self.skip("null") => Some(Value::Null),
            _ if self.skip("true") => Some(Value::Bool(true)),
            _ if self.skip("false") => Some(Value::Bool(false)),
            _ => self.number(),
        }
    }

    fn number(&mut self) -> Option<Value> {
        let is_part = |c: char| c.is_ascii_digit() || matches!(c, '-' | '+' | '.' | 'e' | 'E');
        let end = self.rest.find(|c| !is_part(c)).unwrap_or(self.rest.len());
        let (number, rest) = self.rest.split_at(end);
        self.rest = rest;
        number.parse().ok().map(Value::Number)
    }

    /// Parses elements that are separated by commas.
    fn list<T>(&mut self, open: &str, close: &str, element: fn(&mut Self) -> Option<T>) -> Option<Vec<T>> {
        let mut elements = Vec::new();
        if !self.skip(open) {
            return None;
        }
        if self.skip(close) {
            return Some(elements);
        }
        loop {
            elements.push(element(self)?);
            if self.skip(close) {
                return Some(elements);
            }
            if !self.skip(",") {
                return None;
            }
        }
    }

    fn member(&mut self) -> Option<(String, Value)> {
        let name = self.string()?;
        if self.skip(":") { Some((name, self.value()?)) } else { None }
    }

    fn string(&mut self) -> Option<String> {
        if !self.skip("\"") {
            return None;
        }
        let mut text = String::new();
        loop {
            let end = self.rest.find(['"', '\\'])?;
            text.push_str(&self.rest[..end]);
            let is_escape = self.rest.as_bytes()[end] == b'\\';
            self.rest = &self.rest[end + 1..];
            if !is_escape {
                return Some(text);
            }
            text.push(self.escape()?);
        }
    }

    /// Parses an escape sequence after its backslash.
    fn escape(&mut self) -> Option<char> {
        let kind = self.rest.chars().next()?;
        self.rest = &self.rest[kind.len_utf8()..];
        match kind {
            '"' | '\\' | '/' => Some(kind),
            'b' => Some('\u{8}'),
            'f' => Some('\u{c}'),
            'n' => Some('\n'),
            'r' => Some('\r'),
            't' => Some('\t'),
            'u' => {
                let first = self.code_unit()?;
                if !(0xd800..0xdc00).contains(&first) {
                    return char::from_u32(first);
                }
                // A surrogate pair.
                self.rest = self.rest.strip_prefix("\\u")?;
                let second = self.code_unit()?.checked_sub(0xdc00)?;
                char::from_u32(0x10000 + ((first - 0xd800) << 10) + second)
            }
            _ => None,
        }
    }

    fn code_unit(&mut self) -> Option<u32> {
        let digits = self.rest.get(..4)?;
        self.rest = &self.rest[4..];
        u32::from_str_radix(digits, 16).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_and_elements_are_found() {
        let value = Value::parse(r#" {"a": [1, -2.5e1, {"b": "c"}], "d": {}, "e": [], "f": true, "g": null } "#);
        let value = value.expect("the text is valid");
        assert_eq!(value["a"][0].as_u64(), Some(1));
        assert_eq!(value["a"][1], Value::Number(-25.0));
        assert_eq!(value["a"][2]["b"].as_str(), Some("c"));
        assert_eq!(value["a"].as_array().map(<[Value]>::len), Some(3));
        assert_eq!([&value["d"], &value["e"]], [&Value::Object(vec![]), &Value::Array(vec![])]);
        assert_eq!([&value["f"], &value["g"]], [&Value::Bool(true), &Value::Null]);
        assert_eq!([&value["x"], &value["a"][9], &value["a"]["b"], &value[0]], [&Value::Null; 4]);
    }

    #[test]
    fn escape_sequences_are_replaced() {
        let value = Value::parse(r#""\"\\\/\b\f\n\r\t \u00e9 \ud83d\ude00 é""#);
        assert_eq!(value, Some(Value::String("\"\\/\u{8}\u{c}\n\r\t é 😀 é".into())));
    }

    #[test]
    fn invalid_texts_are_rejected() {
        for text in [
            "",
            "{",
            "[1",
            "[1,]",
            "{\"a\"}",
            "{\"a\":}",
            "\"a",
            "\"\\x\"",
            "\"\\u12\"",
            "\"\\ud800\"",
            "1 2",
            "nul",
            "-",
        ] {
            assert_eq!(Value::parse(text), None, "{text}");
        }
    }
}
