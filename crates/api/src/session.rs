use std::borrow::Cow;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fmt;

use serde::de::{Error as _, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use utoipa::openapi::schema::{AllOfBuilder, ObjectBuilder, Schema, SchemaType, Type};
use utoipa::openapi::{Ref, RefOr};
use utoipa::{PartialSchema, ToSchema};

use crate::schema::{Argv, Base64, Environment, Plain};

/// Run a program in the guest. Over `POST …/exec` stdin is whole and the output comes back whole;
/// over the WebSocket it streams.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ExecRequest {
    /// The program and its arguments; looked up in the guest's PATH.
    #[schema(value_type = Argv)]
    pub argv: Vec<String>,
    /// Added to the guest's default environment.
    #[serde(default, deserialize_with = "environment")]
    #[schema(value_type = Environment)]
    pub env: BTreeMap<String, String>,
    #[serde(default)]
    #[schema(value_type = Option<Plain>)]
    pub cwd: Option<String>,
    /// A user name in the guest; default root.
    #[serde(default)]
    #[schema(value_type = Option<Plain>)]
    pub user: Option<String>,
    /// Standard input, base64 (`POST` only).
    #[serde(default)]
    #[schema(value_type = Option<Base64>)]
    pub stdin_base64: Option<String>,
    /// Kill it after so long, in ms; default: never (WebSocket), 600000 (`POST`).
    #[serde(default)]
    #[schema(minimum = 0, maximum = 86_400_000)]
    pub timeout_ms: Option<u64>,
    /// Run it on a terminal (WebSocket only).
    #[serde(default)]
    pub tty: Option<TerminalSize>,
}

/// Variables, each given once: with two of one name it is not known which one is meant.
fn environment<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<BTreeMap<String, String>, D::Error> {
    struct Reader;

    impl<'de> Visitor<'de> for Reader {
        type Value = BTreeMap<String, String>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("an object of strings")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Self::Value, A::Error> {
            let mut variables = BTreeMap::new();
            while let Some((name, value)) = members.next_entry::<String, String>()? {
                match variables.entry(name) {
                    Entry::Occupied(entry) => {
                        let name = entry.key();
                        return Err(A::Error::custom(format_args!("`{name}` is given twice")));
                    }
                    Entry::Vacant(entry) => {
                        entry.insert(value);
                    }
                }
            }
            Ok(variables)
        }
    }

    deserializer.deserialize_map(Reader)
}

/// [`ExecRequest`] for `POST …/exec`, which has no terminal. It exists for its schema only.
#[derive(Debug)]
pub enum ExecWithoutTerminal {}

impl PartialSchema for ExecWithoutTerminal {
    fn schema() -> RefOr<Schema> {
        let no_tty = ObjectBuilder::new()
            .property("tty", ObjectBuilder::new().schema_type(SchemaType::Type(Type::Null)));
        AllOfBuilder::new().item(Ref::from_schema_name("ExecRequest")).item(no_tty).into()
    }
}

impl ToSchema for ExecWithoutTerminal {
    fn name() -> Cow<'static, str> {
        "ExecWithoutTerminal".into()
    }

    fn schemas(schemas: &mut Vec<(String, RefOr<Schema>)>) {
        schemas.push((ExecRequest::name().into(), ExecRequest::schema()));
        ExecRequest::schemas(schemas);
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TerminalSize {
    pub rows: u16,
    pub cols: u16,
    /// `TERM` in the guest; default `xterm`.
    #[serde(default)]
    pub term: Option<String>,
}

/// What `POST …/exec` answers. Output beyond 16 MiB a stream is cut, and `truncated` set.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct ExecReply {
    pub schema: String,
    /// The program's exit code; 128 + n where signal n ended it.
    pub exit_code: i32,
    pub signal: Option<i32>,
    pub timed_out: bool,
    pub stdout_base64: String,
    pub stderr_base64: String,
    pub truncated: bool,
    pub duration_ms: f64,
}

/// Text messages from the client on the exec WebSocket. The first must be `start`. Standard input
/// goes as binary messages.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ExecClientMessage {
    Start(ExecRequest),
    /// No more standard input.
    StdinEof,
    /// A signal by number, to the program's process group.
    Signal {
        signal: i32,
    },
    Resize {
        rows: u16,
        cols: u16,
    },
}

/// Text messages from the server on the exec WebSocket. Output comes as binary messages, whose
/// first byte is 1 for stdout (and the terminal), 2 for stderr. After `exited` or `error` the
/// server closes. If the client's connection ends first, the program gets SIGHUP.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ExecServerMessage {
    Started { pid: u32 },
    Exited { exit_code: i32, signal: Option<i32> },
    Error { error: crate::ErrorBody },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_variable_that_is_given_twice_is_refused_in_a_body_and_in_a_message() {
        let request = |env: &str| serde_json::from_str::<ExecRequest>(&format!("{{{env}}}"));
        let once = request(r#""argv": ["a"], "env": {"A": "1", "B": "1"}"#).expect("well formed");
        assert_eq!(once.env.len(), 2);
        assert!(request(r#""argv": ["a"]"#).expect("well formed").env.is_empty());
        let twice = r#""argv": ["a"], "env": {"A": "1", "A": "1"}"#;
        let error = request(twice).expect_err("twice").to_string();
        assert!(error.starts_with("`A` is given twice"), "{error}");
        let message = format!(r#"{{"type": "start", {twice}}}"#);
        let error = serde_json::from_str::<ExecClientMessage>(&message).expect_err("twice");
        assert!(error.to_string().starts_with("`A` is given twice"), "{error}");
    }
}
