//! A JSON document without two members of one name.
//!
//! [`Value`] keeps the last of such members. A type that refuses them cannot see them any more
//! when it reads that value, so a request with a contradiction would be accepted.

use std::fmt;

use serde::de::{Error as _, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value};

/// A parsed document. Its objects had each name once.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Document(pub(super) Value);

impl<'de> Deserialize<'de> for Document {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Reader).map(Self)
    }
}

struct Reader;

impl<'de> Visitor<'de> for Reader {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut values = Vec::new();
        while let Some(Document(value)) = items.next_element()? {
            values.push(value);
        }
        Ok(Value::Array(values))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Value, A::Error> {
        let mut object = Map::new();
        while let Some((name, Document(value))) = members.next_entry::<String, _>()? {
            if object.contains_key(&name) {
                return Err(A::Error::custom(format_args!("`{name}` is given twice")));
            }
            object.insert(name, value);
        }
        Ok(Value::Object(object))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_document_is_read_as_it_is() {
        let text = r#"{"a":[1,-2,3.5,true,null,"x"],"b":{"a":{}}}"#;
        let Document(value) = serde_json::from_str(text).expect("a document");
        assert_eq!(value.to_string(), text);
    }

    #[test]
    fn two_members_of_one_name_are_refused_at_any_depth() {
        for bad in [r#"{"a":1,"a":1}"#, r#"{"x":{"a":1.0,"b":2,"a":3}}"#, r#"[{"a":1,"a":2}]"#] {
            let error = serde_json::from_str::<Document>(bad).expect_err(bad);
            assert!(error.to_string().starts_with("`a` is given twice"), "{error}");
        }
    }
}
