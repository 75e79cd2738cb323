//! Lines of QMP: bytes in, [`Message`]s out. No I/O, and no panic on any bytes.
//!
//! Unknown keys, events and enum values pass through as they are. QEMU adds some with every
//! release, and one of them must not cost the connection. What isn't JSON, or is longer than
//! [`LINE_BYTES_MAX`], does cost it. Replies are matched by their order, so a lost line would give
//! every later caller a wrong answer.

use serde_json::{Map, Value};

/// Longest line that is accepted. The longest answer to a command used here is below 20 kB.
pub const LINE_BYTES_MAX: usize = 1 << 20;

/// One line from QEMU.
#[derive(Debug, Clone, PartialEq)]
pub enum Message {
    /// The first line of a connection.
    Greeting(Greeting),
    /// The oldest command that is still open has succeeded.
    Return(Value),
    /// The oldest command that is still open has failed.
    Error { class: String, desc: String },
    /// Something happened.
    Event(Event),
    /// A JSON value of a kind not known here.
    Unknown(Value),
}

/// QEMU's version, from its greeting.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Greeting {
    pub major: u64,
    pub minor: u64,
    pub micro: u64,
    /// The packager's addition, such as `Debian 1:7.2+dfsg-7`.
    pub package: String,
}

/// An asynchronous event. `data` is `Null` where QEMU sends none.
#[derive(Debug, Clone, PartialEq)]
pub struct Event {
    /// `MIGRATION`, `STOP`, `RESUME`, `SHUTDOWN`, `RESET`, `GUEST_PANICKED`, or another.
    pub name: String,
    pub data: Value,
    /// Since the Unix epoch, by QEMU's clock.
    pub time_us: u64,
}

impl Event {
    /// A string member of the event's data, as `status` of `MIGRATION` or `reason` of `SHUTDOWN`.
    pub fn text(&self, key: &str) -> Option<&str> {
        self.data.get(key).and_then(Value::as_str)
    }
}

#[derive(Debug, thiserror::Error)]
pub enum WireError {
    #[error("a QMP line is longer than {LINE_BYTES_MAX} bytes")]
    TooLong,
    #[error("a QMP line is not JSON: {head:?}")]
    NotJson {
        head: String,
        #[source]
        source: serde_json::Error,
    },
}

/// Cuts a stream of bytes into messages.
#[derive(Debug, Default)]
pub struct Decoder {
    buffer: Vec<u8>,
    /// Bytes at the front of `buffer` that were handed out already.
    consumed: usize,
    /// Up to here `buffer` is known to hold no line end.
    searched: usize,
}

impl Decoder {
    /// Add bytes as they came.
    pub fn push(&mut self, bytes: &[u8]) {
        if self.consumed > 0 {
            self.buffer.drain(..self.consumed);
            self.searched = self.searched.saturating_sub(self.consumed);
            self.consumed = 0;
        }
        self.buffer.extend_from_slice(bytes);
    }

    /// The next whole message; `None` until more bytes come. After an error the stream is of no
    /// more use.
    ///
    /// # Errors
    /// [`WireError`] for a line that is too long or isn't JSON.
    pub fn next_message(&mut self) -> Result<Option<Message>, WireError> {
        loop {
            let from = self.searched.max(self.consumed);
            let rest = self.buffer.get(from..).unwrap_or_default();
            let Some(end) = rest.iter().position(|&b| b == b'\n').map(|at| from + at) else {
                self.searched = self.buffer.len();
                if self.buffer.len() - self.consumed > LINE_BYTES_MAX {
                    return Err(WireError::TooLong);
                }
                return Ok(None);
            };
            let line = self.buffer.get(self.consumed..end).unwrap_or_default().trim_ascii();
            self.consumed = end + 1;
            self.searched = end + 1;
            if line.len() > LINE_BYTES_MAX {
                return Err(WireError::TooLong);
            }
            if !line.is_empty() {
                return parse(line).map(Some);
            }
        }
    }
}

fn parse(line: &[u8]) -> Result<Message, WireError> {
    let value: Value = serde_json::from_slice(line).map_err(|source| WireError::NotJson {
        head: String::from_utf8_lossy(line).chars().take(80).collect(),
        source,
    })?;
    Ok(match value {
        Value::Object(object) => classify(object),
        other => Message::Unknown(other),
    })
}

fn classify(mut object: Map<String, Value>) -> Message {
    if let Some(value) = object.remove("return") {
        return Message::Return(value);
    }
    if let Some(error) = object.get("error") {
        let text = |key| error.get(key).and_then(Value::as_str).unwrap_or("unknown").to_owned();
        return Message::Error { class: text("class"), desc: text("desc") };
    }
    if let Some(name) = object.get("event").and_then(Value::as_str) {
        let number = |key| object.get("timestamp")?.get(key)?.as_u64();
        let time_us = number("seconds")
            .unwrap_or(0)
            .saturating_mul(1_000_000)
            .saturating_add(number("microseconds").unwrap_or(0));
        let name = name.to_owned();
        return Message::Event(Event {
            name,
            data: object.remove("data").unwrap_or(Value::Null),
            time_us,
        });
    }
    if let Some(qmp) = object.get("QMP") {
        return Message::Greeting(greeting(qmp.get("version").unwrap_or(&Value::Null)));
    }
    Message::Unknown(Value::Object(object))
}

/// From the version object that `query-version` and the greeting share. What is absent is 0 or
/// empty.
pub(crate) fn greeting(version: &Value) -> Greeting {
    let number = |key| version.get("qemu").and_then(|q| q.get(key)).and_then(Value::as_u64);
    Greeting {
        major: number("major").unwrap_or(0),
        minor: number("minor").unwrap_or(0),
        micro: number("micro").unwrap_or(0),
        package: version.get("package").and_then(Value::as_str).unwrap_or_default().to_owned(),
    }
}

/// A command as it goes out. Compact on purpose: QEMU 7.2 reads its monitor one byte per turn of
/// its main loop, 4.5 µs each (measured). For the same reason there is no `id`; replies come in
/// order.
pub(crate) fn encode(command: &str, arguments: Option<&Value>) -> Vec<u8> {
    let mut object = Map::new();
    object.insert("execute".to_owned(), Value::from(command));
    if let Some(arguments) = arguments {
        object.insert("arguments".to_owned(), arguments.clone());
    }
    let mut line = Value::Object(object).to_string().into_bytes();
    line.push(b'\n');
    line
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn all(decoder: &mut Decoder) -> Vec<Message> {
        std::iter::from_fn(|| decoder.next_message().expect("valid lines")).collect()
    }

    fn one(line: &str) -> Message {
        let mut decoder = Decoder::default();
        decoder.push(line.as_bytes());
        decoder.push(b"\r\n");
        decoder.next_message().expect("valid").expect("whole")
    }

    #[test]
    fn what_qemu_says_is_understood() {
        let hello = r#"{"QMP": {"version": {"qemu": {"micro": 22, "minor": 2, "major": 7}, "package": "Debian 1:7.2"}, "capabilities": ["oob"]}}"#;
        let Message::Greeting(version) = one(hello) else { panic!("not a greeting") };
        assert_eq!((version.major, version.minor, version.micro), (7, 2, 22));
        assert_eq!(version.package, "Debian 1:7.2");

        assert_eq!(one(r#"{"return": {}}"#), Message::Return(json!({})));
        assert_eq!(
            one(r#"{"error": {"class": "GenericError", "desc": "no"}}"#),
            Message::Error { class: "GenericError".into(), desc: "no".into() }
        );
        let event = one(
            r#"{"timestamp": {"seconds": 2, "microseconds": 7}, "event": "MIGRATION", "data": {"status": "completed"}}"#,
        );
        let Message::Event(event) = event else { panic!("not an event") };
        assert_eq!((event.time_us, event.text("status")), (2_000_007, Some("completed")));
    }

    #[test]
    fn events_and_keys_of_a_later_qemu_pass_through() {
        let Message::Event(event) = one(r#"{"event": "FROBNICATED", "new-key": [1]}"#) else {
            panic!("not an event")
        };
        assert_eq!((event.name.as_str(), event.data), ("FROBNICATED", Value::Null));
        assert_eq!(one(r#"{"novel": 1}"#), Message::Unknown(json!({"novel": 1})));
        assert_eq!(one("[1]"), Message::Unknown(json!([1])));
    }

    #[test]
    fn a_line_without_end_is_refused_before_it_fills_memory() {
        let mut decoder = Decoder::default();
        let mut pushed = 0;
        let error = loop {
            decoder.push(&[b'x'; 65536]);
            pushed += 65536;
            match decoder.next_message() {
                Ok(None) => assert!(pushed <= LINE_BYTES_MAX, "bound not applied"),
                Ok(Some(message)) => panic!("{message:?} from garbage"),
                Err(error) => break error,
            }
        };
        assert!(matches!(error, WireError::TooLong));
    }

    #[test]
    fn a_deeply_nested_line_is_an_error_and_no_overflow() {
        let mut decoder = Decoder::default();
        decoder.push(&[b'['; 100_000]);
        decoder.push(b"\n");
        assert!(matches!(decoder.next_message(), Err(WireError::NotJson { .. })));
    }

    #[test]
    fn commands_are_compact() {
        assert_eq!(encode("stop", None), b"{\"execute\":\"stop\"}\n");
        let line = encode("migrate", Some(&json!({"uri": "fd:s"})));
        let back: Value = serde_json::from_slice(&line).expect("JSON");
        assert_eq!(back, json!({"execute": "migrate", "arguments": {"uri": "fd:s"}}));
        assert!(!line.contains(&b' '));
    }

    proptest! {
        /// However a stream is cut into reads, the same messages come out.
        #[test]
        fn cuts_do_not_matter(
            numbers in prop::collection::vec(any::<u32>(), 1..20),
            cuts in prop::collection::vec(1_usize..40, 1..100),
        ) {
            let stream: Vec<u8> = numbers
                .iter()
                .flat_map(|n| format!("{{\"return\": {n}}}\r\n").into_bytes())
                .collect();
            let mut decoder = Decoder::default();
            let mut got = Vec::new();
            let (mut rest, mut cuts) = (stream.as_slice(), cuts.into_iter().cycle());
            while !rest.is_empty() {
                let (head, tail) = rest.split_at(cuts.next().unwrap_or(1).min(rest.len()));
                decoder.push(head);
                got.extend(all(&mut decoder));
                rest = tail;
            }
            let want: Vec<_> = numbers.iter().map(|n| Message::Return(json!(n))).collect();
            prop_assert_eq!(got, want);
        }

        /// Any bytes: an answer or an error, and an end.
        #[test]
        fn any_bytes_are_survived(chunks in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..200), 0..20)) {
            let mut decoder = Decoder::default();
            'stream: for chunk in chunks {
                decoder.push(&chunk);
                loop {
                    match decoder.next_message() {
                        Ok(Some(_)) => {}
                        Ok(None) => break,
                        Err(_) => break 'stream,
                    }
                }
            }
        }

        /// Any JSON of the right outer form, whatever types the members have.
        #[test]
        fn wrong_types_inside_are_survived(
            key in prop::sample::select(vec!["return", "error", "event", "QMP", "timestamp"]),
            value in prop::sample::select(vec!["null", "1", "\"x\"", "[]", "{}", "{\"version\":3}", "{\"desc\":[]}", "-1e300"]),
        ) {
            let line = format!("{{\"{key}\":{value}}}\n");
            let mut decoder = Decoder::default();
            decoder.push(line.as_bytes());
            prop_assert!(decoder.next_message().expect("JSON").is_some());
        }
    }
}
