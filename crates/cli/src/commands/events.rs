//! `vmfork events`: what happens on a host, one line each, over any number of connections.
//!
//! ```text
//!   connect ──► read ──► print ─┐        lost, or the daemon ended its stream
//!      ▲          ▲─────────────┘                      │
//!      └──────────── pause, with the last cursor ◄─────┘
//! ```
//!
//! Promises: each event is printed once. What the daemon could not keep is a warning.

use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow};
use hyper::Method;
use serde_json::Value;
use vmfork_api::{ErrorCode, Event, GapCause, Happening};

use crate::client::{Client, QUICK, Query, empty};
use crate::config::{EventsConfig, Global};
use crate::failure::{ApiError, Exit, HintExt as _, is_stdout_closed};
use crate::format::{millis, plural, printable, utc};
use crate::printer::state_word;
use crate::start::ensure;

/// Without a byte for this long, the connection is lost: three heartbeats of the daemon.
const SILENCE: Duration = Duration::from_secs(45);
/// Pauses between two connections, doubled from the first to the last.
const PAUSE_FIRST: Duration = Duration::from_millis(250);
const PAUSE_LAST: Duration = Duration::from_secs(5);
/// How long no daemon may answer. A restart takes a second.
const RECONNECT_BOUND: Duration = Duration::from_secs(60);
/// Largest event. A fork with the most clones has 150 KiB.
const BLOCK_BYTES_MAX: usize = 16 << 20;

pub(super) async fn run(global: &Global, config: EventsConfig) -> anyhow::Result<Exit> {
    ensure(global).await?;
    let mut reader = Reader { global, config, contact: Contact::default() };
    let mut has_begun = false;
    loop {
        let lost = match reader.read().await {
            Ok(()) if !reader.config.follow => return Ok(Exit::Done),
            Ok(()) => anyhow!("the daemon has ended"),
            Err(error) if is_stdout_closed(&error) => return Err(error),
            // What it refuses, it refuses again.
            Err(error) if error.is::<ApiError>() && !reader.contact.may_return(&error) => {
                return Err(error);
            }
            Err(error) if !has_begun && !reader.contact.has_heard => return Err(error),
            Err(error) => error,
        };
        let Some(pause) = reader.contact.lost(Instant::now()) else {
            if lost.is::<ApiError>() {
                return Err(lost);
            }
            let seconds = RECONNECT_BOUND.as_secs();
            return Err(lost)
                .context(format!("no daemon answers for {seconds} s"))
                .hint(format!("continue with `vmfork events{}`", reader.config.resume()));
        };
        has_begun = true;
        reader.global.printer.detail(&format!("connecting again: {lost:#}"));
        tokio::time::sleep(pause).await;
    }
}

/// When the daemon was lost, and how long to wait for it.
#[derive(Debug)]
struct Contact {
    /// Whether it has ever sent something.
    has_heard: bool,
    /// When a connection was lost since the daemon last sent something.
    lost_since: Option<Instant>,
    pause: Duration,
}

impl Default for Contact {
    fn default() -> Self {
        Self { has_heard: false, lost_since: None, pause: PAUSE_FIRST }
    }
}

impl Contact {
    fn heard(&mut self) {
        *self = Self { has_heard: true, ..Self::default() };
    }

    /// Whether the daemon may take this reader again, which it has refused: the reader's lost
    /// connection still has a place until the daemon finds out.
    fn may_return(&self, error: &anyhow::Error) -> bool {
        let refused = error.downcast_ref::<ApiError>();
        self.has_heard && refused.is_some_and(|error| error.0.code == ErrorCode::NoCapacity)
    }

    /// A connection was lost. → how long to wait for the next; `None`: it has been too long. The
    /// time since the last byte does not count: printing may have taken most of it.
    fn lost(&mut self, now: Instant) -> Option<Duration> {
        let since = *self.lost_since.get_or_insert(now);
        let pause = self.pause;
        self.pause = (pause * 2).min(PAUSE_LAST);
        (now.duration_since(since) <= RECONNECT_BOUND).then_some(pause)
    }
}

struct Reader<'a> {
    global: &'a Global,
    config: EventsConfig,
    contact: Contact,
}

impl Reader<'_> {
    /// One connection, to its end. Moves the place to continue from.
    async fn read(&mut self) -> anyhow::Result<()> {
        let client = Client::unchecked(self.global);
        let query = self.query();
        let mut answer = client.send(Method::GET, &query, empty(), QUICK).await?;
        let mut blocks = Blocks::default();
        while let Some(chunk) = answer.chunk(Some(SILENCE)).await.context("read the events")? {
            self.contact.heard();
            blocks.push(&chunk)?;
            while let Some(block) = blocks.next()? {
                if let Some(data) = &block.data {
                    self.print(data)?;
                }
                // After it was printed: what was not is told again.
                if let Some(id) = block.id {
                    self.config.after = Some(id);
                }
            }
        }
        Ok(())
    }

    fn query(&self) -> Query {
        let config = &self.config;
        let mut query = Query::new("/v1/events");
        if let Some(after) = &config.after {
            query = query.with("after", after);
        }
        if !config.kinds.is_empty() {
            let kinds: Vec<&str> = config.kinds.iter().map(|kind| kind.word()).collect();
            query = query.with("kind", &kinds.join(","));
        }
        if let Some(vm) = &config.vm {
            query = query.with("vm", vm);
        }
        if config.follow { query } else { query.with("follow", "false") }
    }

    fn print(&self, data: &str) -> anyhow::Result<()> {
        let event: Value = serde_json::from_str(data).context("an event is malformed")?;
        let known = serde_json::from_value::<Event>(event.clone()).ok();
        if let Some(Happening::Gap { cause, lost }) = known.as_ref().map(|event| &event.what) {
            self.global.printer.warn(&gap(*cause, *lost));
            if !self.global.printer.json {
                return Ok(());
            }
        }
        match known {
            _ if self.global.printer.json => self.global.printer.document_line(&event),
            Some(event) => self.global.printer.line(&line(&event)),
            // Of a newer daemon.
            None => self.global.printer.line(&printable(data)),
        }
    }
}

fn gap(cause: GapCause, lost: u64) -> String {
    let events = plural(lost, "event");
    match (cause, lost) {
        (GapCause::Overflow, _) => format!("{events} lost: they were not read in time"),
        (GapCause::Restarted, 0) => {
            "the daemon was restarted: events of the earlier one may be lost, and its VMs have ended"
                .to_owned()
        }
        (GapCause::Restarted, _) => format!(
            "the daemon was restarted: {events} of this one and perhaps some of the earlier one are \
             lost, and its VMs have ended"
        ),
    }
}

/// An event for people: when, what, of what, and more.
fn line(event: &Event) -> String {
    let (subject, more) = match &event.what {
        Happening::VmStarted { vm } => {
            let of = match (&vm.parent, &vm.snapshot) {
                (Some(parent), _) => format!("clone of {parent}"),
                (None, Some(snapshot)) => format!("from snapshot {snapshot}"),
                (None, None) => String::new(),
            };
            (vm.name.as_str(), of)
        }
        Happening::VmForked { vm, requested, granted, pause_ms, clones } => {
            let names: Vec<&str> = clones.iter().map(|clone| clone.name.as_str()).collect();
            let pause = millis(*pause_ms);
            let names = names.join(" ");
            (vm.name.as_str(), format!("{granted} of {requested} clones, pause {pause}: {names}"))
        }
        Happening::VmReady { vm, ready_ms } => {
            (vm.name.as_str(), format!("after {}", millis(*ready_ms)))
        }
        Happening::VmPaused { vm } | Happening::VmResumed { vm } => {
            (vm.name.as_str(), String::new())
        }
        Happening::VmEnded { vm, state, reason, .. } => {
            (vm.name.as_str(), format!("{}: {reason}", state_word(*state)))
        }
        Happening::SnapshotStored { snapshot } | Happening::SnapshotRemoved { snapshot } => {
            let of = snapshot.vm.as_ref().map_or(String::new(), |vm| format!("of {}", vm.name));
            (snapshot.name.as_str(), of)
        }
        Happening::HostJoined { host }
        | Happening::HostSilent { host }
        | Happening::HostReturned { host } => (host.name.as_str(), host.address.clone()),
        Happening::HostGone { host, cause } => {
            (host.name.as_str(), format!("{cause:?}").to_lowercase())
        }
        Happening::Gap { cause, lost } => ("", gap(*cause, *lost)),
    };
    let (time, kind) = (utc(event.time_unix_ms), event.what.kind().word());
    let text = format!("{time}  {kind:<16}  {subject}  {more}");
    printable(text.trim_end())
}

/// One server-sent event, or what else stands between two empty lines.
#[derive(Debug, Default, PartialEq, Eq)]
struct Block {
    id: Option<String>,
    data: Option<String>,
}

/// Cuts a stream of bytes into blocks.
#[derive(Debug, Default)]
struct Blocks {
    bytes: Vec<u8>,
    /// Up to where no end of a block begins.
    searched: usize,
}

impl Blocks {
    fn push(&mut self, chunk: &[u8]) -> anyhow::Result<()> {
        if self.bytes.len() + chunk.len() > BLOCK_BYTES_MAX {
            return Err(anyhow!("an event of more than {BLOCK_BYTES_MAX} bytes"));
        }
        self.bytes.extend_from_slice(chunk);
        Ok(())
    }

    /// The next whole block.
    fn next(&mut self) -> anyhow::Result<Option<Block>> {
        let rest = self.bytes.get(self.searched..).unwrap_or_default();
        let Some(at) = rest.windows(2).position(|two| two == b"\n\n") else {
            self.searched = self.bytes.len().saturating_sub(1);
            return Ok(None);
        };
        let taken: Vec<u8> = self.bytes.drain(..self.searched + at + 2).collect();
        self.searched = 0;
        let text = String::from_utf8(taken).context("an event is not text")?;
        let mut block = Block::default();
        for line in text.lines() {
            if let Some(id) = line.strip_prefix("id: ") {
                block.id = Some(id.to_owned());
            } else if let Some(data) = line.strip_prefix("data: ") {
                block.data = Some(data.to_owned());
            }
        }
        Ok(Some(block))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_cut_wherever_the_chunks_end() {
        let stream = "retry: 1000\nid: a-1\n\n: heartbeat\nid: a-2\n\nid: a-3\ndata: {\"ü\"}\n\nid";
        let expected = [
            Block { id: Some("a-1".to_owned()), data: None },
            Block { id: Some("a-2".to_owned()), data: None },
            Block { id: Some("a-3".to_owned()), data: Some("{\"ü\"}".to_owned()) },
        ];
        for size in 1..=stream.len() {
            let (mut blocks, mut found) = (Blocks::default(), Vec::new());
            for chunk in stream.as_bytes().chunks(size) {
                blocks.push(chunk).expect("small");
                while let Some(block) = blocks.next().expect("text") {
                    found.push(block);
                }
            }
            assert_eq!(found, expected, "{size}");
        }
        assert!(Blocks::default().push(&vec![b'x'; BLOCK_BYTES_MAX + 1]).is_err());
    }

    #[test]
    fn a_minute_without_a_daemon_is_counted_from_the_loss() {
        let (mut now, mut contact) = (Instant::now(), Contact::default());
        for _ in 0..2 {
            contact.heard();
            // Printing takes long, and meanwhile the daemon closes the stream.
            now += Duration::from_secs(90);
            assert_eq!(contact.lost(now), Some(PAUSE_FIRST));
        }
        let lost = now;
        let mut pauses = vec![PAUSE_FIRST];
        while let Some(pause) = contact.lost(now) {
            pauses.push(pause);
            now += pause;
        }
        assert!(now - lost > RECONNECT_BOUND && now - lost < RECONNECT_BOUND + 2 * PAUSE_LAST);
        assert_eq!((pauses.get(1), pauses.last()), (Some(&(2 * PAUSE_FIRST)), Some(&PAUSE_LAST)));
    }

    #[test]
    fn only_a_reader_that_had_a_place_waits_for_one() {
        let error = |code| anyhow::Error::new(ApiError(vmfork_api::ErrorBody::new(code, "read")));
        let mut contact = Contact::default();
        assert!(!contact.may_return(&error(ErrorCode::NoCapacity)));
        contact.heard();
        assert!(contact.may_return(&error(ErrorCode::NoCapacity)));
        assert!(!contact.may_return(&error(ErrorCode::BadRequest)));
        assert!(!contact.may_return(&anyhow!("it ended")));
    }

    #[test]
    fn a_line_says_when_what_and_of_what() {
        let event = |what: &str| {
            let json = format!(r#"{{"cursor": "x", "time_unix_ms": 1764055799123, {what}}}"#);
            line(&serde_json::from_str(&json).unwrap_or_else(|error| panic!("{error}: {json}")))
        };
        let vm = r#""vm": {"id": "aa", "name": "web", "family": "aa"}"#;
        assert_eq!(
            event(&format!(
                r#""kind": "vm.ended", {vm}, "state": "failed", "reason": "out\u001b of memory", "end": "out_of_memory""#
            )),
            "2025-11-25T07:29:59.123Z  vm.ended          web  failed: out\u{fffd} of memory"
        );
        assert_eq!(
            event(&format!(r#""kind": "vm.paused", {vm}"#)),
            "2025-11-25T07:29:59.123Z  vm.paused         web"
        );
        assert_eq!(
            event(&format!(
                r#""kind": "vm.forked", {vm}, "requested": 3, "granted": 2, "pause_ms": 4.5,
                   "clones": [{{"id": "ab", "name": "web.1"}}, {{"id": "ac", "name": "web.2"}}]"#
            )),
            "2025-11-25T07:29:59.123Z  vm.forked         web  2 of 3 clones, pause 4.5 ms: web.1 web.2"
        );
        assert_eq!(
            event(
                r#""kind": "host.gone", "host": {"id": "1", "name": "h2", "address": "x:1"}, "cause": "left""#
            ),
            "2025-11-25T07:29:59.123Z  host.gone         h2  left"
        );
    }
}
