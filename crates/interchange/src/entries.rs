//! JSON objects whose keys must be distinct. Readers differ in which of two equal keys they use.

use anyhow::{Result, bail};
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;

/// The entries of an object, in their order.
#[derive(Debug)]
pub struct Entries<V>(Vec<(String, V)>);

impl<V> Entries<V> {
    /// Returns the entries by key. Fails if a key occurs twice.
    pub fn distinct(self) -> Result<BTreeMap<String, V>> {
        let mut entries = BTreeMap::new();
        for (key, value) in self.0 {
            if entries.contains_key(&key) {
                bail!("{key}: expected one entry, found two; download the file again, or remove one of them");
            }
            entries.insert(key, value);
        }
        Ok(entries)
    }
}

impl<'de, V: Deserialize<'de>> Deserialize<'de> for Entries<V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(EntriesVisitor(PhantomData))
    }
}

struct EntriesVisitor<V>(PhantomData<V>);

impl<'de, V: Deserialize<'de>> Visitor<'de> for EntriesVisitor<V> {
    type Value = Entries<V>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut entries = Vec::new();
        while let Some(entry) = map.next_entry()? {
            entries.push(entry);
        }
        Ok(Entries(entries))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_keys_are_an_error() {
        let parse = |text: &str| serde_json::from_str::<Entries<u8>>(text).map_err(anyhow::Error::from)?.distinct();
        assert_eq!(parse(r#"{"b": 1, "a": 2}"#).unwrap(), [("a".to_owned(), 2), ("b".to_owned(), 1)].into());
        assert!(
            parse(r#"{"b": 1, "a": 2, "b": 1}"#).unwrap_err().to_string().contains("b: expected one entry, found two")
        );
        assert!(parse("[1]").unwrap_err().to_string().contains("expected an object"));
    }
}
