//! Labels: keys with values that users give VMs and stored snapshots, to find them again.
//!
//! Clones inherit the labels of their parent, and VMs those of the snapshot that they are started
//! from. A request's own labels are added, and replace those of the same key.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fmt;
use std::str::FromStr;

use serde::de::{Error as _, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use utoipa::openapi::schema::{
    AdditionalProperties, ArrayBuilder, ObjectBuilder, Schema, SchemaType, Type,
};
use utoipa::openapi::{Ref, RefOr};
use utoipa::{PartialSchema, ToSchema};

/// Most labels of one VM or snapshot.
pub const LABELS_MAX: usize = 64;
/// Most bytes of a key.
pub const LABEL_KEY_BYTES_MAX: usize = 63;
/// Most characters of a value.
pub const LABEL_VALUE_CHARS_MAX: usize = 255;

const KEY_PATTERN: &str = "^[A-Za-z0-9][A-Za-z0-9._/-]{0,62}$";
const VALUE_PATTERN: &str = r"^[^\x00-\x1f\x7f-\x9f]{0,255}$";

/// A label or a filter that can't be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LabelError {
    #[error("label `{text}`: it has the form KEY=VALUE")]
    Form { text: String },
    #[error(
        "label `{key}`: a key has 1 to 63 of a-z A-Z 0-9 . _ / -, starting with a letter or digit"
    )]
    Key { key: String },
    #[error("label `{key}`: a value has at most 255 characters, and no control characters")]
    Value { key: String },
    #[error("label `{key}` is given twice")]
    Twice { key: String },
    #[error("{count} labels: there can be at most {LABELS_MAX}")]
    Many { count: usize },
}

/// Labels by key.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct Labels(BTreeMap<String, String>);

impl Labels {
    /// Labels as typed: `KEY=VALUE` each.
    ///
    /// # Errors
    /// One is not of that form, or there are too many, or two of one key.
    pub fn parse<'a>(texts: impl IntoIterator<Item = &'a str>) -> Result<Self, LabelError> {
        let mut labels = Self::default();
        for text in texts {
            let form = || LabelError::Form { text: text.to_owned() };
            let (key, value) = text.split_once('=').ok_or_else(form)?;
            labels.insert(key.to_owned(), value.to_owned())?;
        }
        Ok(labels)
    }

    fn insert(&mut self, key: String, value: String) -> Result<(), LabelError> {
        if !key_is_valid(&key) {
            return Err(LabelError::Key { key });
        }
        if !value_is_valid(&value) {
            return Err(LabelError::Value { key });
        }
        match self.0.entry(key) {
            Entry::Occupied(entry) => Err(LabelError::Twice { key: entry.key().clone() }),
            Entry::Vacant(entry) => {
                entry.insert(value);
                self.check_count()
            }
        }
    }

    fn check_count(&self) -> Result<(), LabelError> {
        let count = self.0.len();
        if count > LABELS_MAX { Err(LabelError::Many { count }) } else { Ok(()) }
    }

    /// These, with `own` added: what a clone has whose fork names labels.
    ///
    /// # Errors
    /// There are too many then.
    pub fn with(&self, own: &Self) -> Result<Self, LabelError> {
        let mut all = self.clone();
        all.0.extend(own.0.iter().map(|(key, value)| (key.clone(), value.clone())));
        all.check_count()?;
        Ok(all)
    }

    /// The value of a key.
    pub fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key).map(String::as_str)
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// All, by key.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(key, value)| (key.as_str(), value.as_str()))
    }
}

/// `KEY=VALUE` each, separated by blanks.
impl fmt::Display for Labels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (key, value)) in self.iter().enumerate() {
            let separator = if index == 0 { "" } else { " " };
            write!(f, "{separator}{key}={value}")?;
        }
        Ok(())
    }
}

impl<'de> Deserialize<'de> for Labels {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Reader;

        impl<'de> Visitor<'de> for Reader {
            type Value = Labels;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of strings")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Labels, A::Error> {
                let mut labels = Labels::default();
                while let Some((key, value)) = map.next_entry()? {
                    labels.insert(key, value).map_err(A::Error::custom)?;
                }
                Ok(labels)
            }
        }

        deserializer.deserialize_map(Reader)
    }
}

fn key_is_valid(key: &str) -> bool {
    let is_more = |byte: u8| byte.is_ascii_alphanumeric() || b"._/-".contains(&byte);
    key.len() <= LABEL_KEY_BYTES_MAX
        && key.starts_with(|first: char| first.is_ascii_alphanumeric())
        && key.bytes().all(is_more)
}

fn value_is_valid(value: &str) -> bool {
    value.chars().count() <= LABEL_VALUE_CHARS_MAX && !value.chars().any(char::is_control)
}

/// What a list is filtered by: `KEY` (there is such a label) or `KEY=VALUE`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LabelFilter {
    key: String,
    value: Option<String>,
}

impl LabelFilter {
    pub fn matches(&self, labels: &Labels) -> bool {
        match (labels.get(&self.key), &self.value) {
            (Some(found), Some(wanted)) => found == wanted,
            (found, None) => found.is_some(),
            (None, Some(_)) => false,
        }
    }
}

/// Whether labels match all of `filters`.
pub fn match_all(filters: &[LabelFilter], labels: &Labels) -> bool {
    filters.iter().all(|filter| filter.matches(labels))
}

impl FromStr for LabelFilter {
    type Err = LabelError;

    fn from_str(text: &str) -> Result<Self, LabelError> {
        let (key, value) = match text.split_once('=') {
            Some((key, value)) => (key, Some(value)),
            None => (text, None),
        };
        if !key_is_valid(key) {
            return Err(LabelError::Key { key: key.to_owned() });
        }
        if value.is_some_and(|value| !value_is_valid(value)) {
            return Err(LabelError::Value { key: key.to_owned() });
        }
        Ok(Self { key: key.to_owned(), value: value.map(ToOwned::to_owned) })
    }
}

impl fmt::Display for LabelFilter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.key)?;
        self.value.as_ref().map_or(Ok(()), |value| write!(f, "={value}"))
    }
}

fn string(pattern: &str, description: &str) -> ObjectBuilder {
    ObjectBuilder::new()
        .schema_type(SchemaType::Type(Type::String))
        .pattern(Some(pattern))
        .description(Some(description))
}

impl PartialSchema for Labels {
    fn schema() -> RefOr<Schema> {
        ObjectBuilder::new()
            .property_names(Some(string(KEY_PATTERN, "The key of a label.")))
            .additional_properties(Some(AdditionalProperties::RefOr(
                string(VALUE_PATTERN, "Its value.").into(),
            )))
            .max_properties(Some(LABELS_MAX))
            .description(Some("Labels: at most 64 keys with their values."))
            .into()
    }
}

impl ToSchema for Labels {
    fn name() -> Cow<'static, str> {
        "Labels".into()
    }
}

impl PartialSchema for LabelFilter {
    fn schema() -> RefOr<Schema> {
        let pattern = r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,62}(?:=[^\x00-\x1f\x7f-\x9f]{0,255})?$";
        string(pattern, "`KEY` or `KEY=VALUE`.").into()
    }
}

impl ToSchema for LabelFilter {
    fn name() -> Cow<'static, str> {
        "LabelFilter".into()
    }
}

/// For the OpenAPI document: the parameter `label` of lists.
#[derive(Debug)]
pub enum LabelFilters {}

impl PartialSchema for LabelFilters {
    fn schema() -> RefOr<Schema> {
        ArrayBuilder::new().items(Ref::from_schema_name("LabelFilter")).into()
    }
}

impl ToSchema for LabelFilters {
    fn name() -> Cow<'static, str> {
        "LabelFilters".into()
    }

    fn schemas(schemas: &mut Vec<(String, RefOr<Schema>)>) {
        schemas.push((LabelFilter::name().into(), LabelFilter::schema()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(texts: &[&str]) -> Result<Labels, LabelError> {
        Labels::parse(texts.iter().copied())
    }

    #[test]
    fn labels_are_keys_with_values() {
        let labels = parse(&["app=web", "a/b.c-d_e=", "note=a=b, c ü"]).expect("labels");
        assert_eq!(labels.get("app"), Some("web"));
        assert_eq!(labels.get("a/b.c-d_e"), Some(""));
        assert_eq!(labels.get("note"), Some("a=b, c ü"));
        assert_eq!(labels.to_string(), "a/b.c-d_e= app=web note=a=b, c ü");
        let json = serde_json::to_string(&labels).expect("json");
        assert_eq!(serde_json::from_str::<Labels>(&json).expect("the same"), labels);
    }

    #[test]
    fn what_is_no_label_is_refused_with_its_reason() {
        let long = "k".repeat(64);
        for bad in ["app", "=x", "-a=x", "a b=x", "ä=x", &format!("{long}=x")] {
            let text = parse(&[bad]).expect_err(bad).to_string();
            assert!(text.starts_with("label `"), "{text}");
        }
        let value = |value: &str| parse(&[&format!("k={value}")]);
        assert!(value(&"ü".repeat(255)).is_ok());
        assert!(value("\u{a0}").is_ok(), "the first after the control characters");
        // CSI, as terminals take it in one character.
        for bad in ["a\nb", "\u{7f}", "\u{80}", "\u{9b}2J", "\u{9f}", &"x".repeat(256)] {
            assert_eq!(value(bad), Err(LabelError::Value { key: "k".to_owned() }));
        }
        let twice = Err(LabelError::Twice { key: "a".to_owned() });
        assert_eq!(parse(&["a=1", "a=1"]), twice);
        let text = serde_json::from_str::<Labels>(r#"{"a":"1","a":"2"}"#).expect_err("twice");
        assert!(text.to_string().starts_with("label `a` is given twice"), "{text}");
        assert!(serde_json::from_str::<Labels>(r#"{"a":1}"#).is_err());
    }

    #[test]
    fn there_are_at_most_64_also_with_what_is_inherited() {
        let texts: Vec<String> = (0..65).map(|n| format!("k{n}=x")).collect();
        let of = |range: std::ops::Range<usize>| Labels::parse(texts[range].iter().map(|t| &**t));
        assert_eq!(of(0..65), Err(LabelError::Many { count: 65 }));
        let all = of(0..64).expect("64");
        assert_eq!(all.with(&of(60..64).expect("4")), Ok(all.clone()));
        assert_eq!(all.with(&of(64..65).expect("1")), Err(LabelError::Many { count: 65 }));
    }

    #[test]
    fn own_labels_replace_inherited_ones() {
        let parent = parse(&["app=web", "tier=1"]).expect("labels");
        let clone = parent.with(&parse(&["tier=2", "x=y"]).expect("labels")).expect("fit");
        assert_eq!(clone, parse(&["app=web", "tier=2", "x=y"]).expect("labels"));
    }

    #[test]
    fn filters_ask_for_a_key_or_for_its_value() {
        let labels = parse(&["app=web", "empty="]).expect("labels");
        let matches = |filters: &[&str]| {
            let filters: Vec<LabelFilter> =
                filters.iter().map(|text| text.parse().expect("a filter")).collect();
            match_all(&filters, &labels)
        };
        assert!(matches(&[]) && matches(&["app"]) && matches(&["app=web", "empty"]));
        assert!(matches(&["empty="]) && !matches(&["app="]));
        assert!(!matches(&["app=we"]) && !matches(&["app", "other"]));
        assert!("=x".parse::<LabelFilter>().is_err());
        assert_eq!("app=web".parse::<LabelFilter>().expect("one").to_string(), "app=web");
    }
}
