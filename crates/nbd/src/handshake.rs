//! What is said before the first request: which export, and in what form replies come.
//!
//! ```text
//!   greeting ─► client's flags ─► option ─► option ─► … ─► GO or EXPORT_NAME ─► requests
//!                                    │
//!                                    └─► ABORT, or what can't be right ─► end
//! ```
//!
//! Promises: whatever a client sends, no more is kept of it than [`OPTION_BYTES_MAX`]. A client
//! gets an export by its exact name only, and learns of none but those that it may have.
//!
//! Left to others: sockets and time ([`crate::serve`]). No I/O.

use crate::wire::{self, Fields, can, hello, info, option, reply};

/// Longest content of an option: a name has at most 4096 bytes.
pub const OPTION_BYTES_MAX: u32 = 8192;
/// Most options of one connection. QEMU's client sends four.
const OPTIONS_MAX: u32 = 64;
/// Longest text in the protocol.
const DESCRIPTION_BYTES_MAX: usize = 4096;
/// The number of the one meta context.
const CONTEXT: u32 = 1;
const ALLOCATION: &[u8] = b"base:allocation";

/// What a client may connect to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Export {
    pub name: String,
    /// What people are told of it. A client that comes back knows by it whether it is the same.
    /// Empty: there is none. At most 4096 bytes are sent.
    pub description: String,
    pub size_bytes: u64,
    pub read_only: bool,
    /// A flush makes writes more durable than they are when they are answered. If not, none is
    /// offered, and clients need not ask for any.
    pub flushes: bool,
}

impl Export {
    /// What a server told a client of it.
    pub(crate) fn told(name: &str, description: String, size_bytes: u64, flags: u16) -> Self {
        let has = |flag| flags & flag != 0;
        let (read_only, flushes) = (has(can::READ_ONLY), has(can::FLUSH));
        Self { name: name.to_owned(), description, size_bytes, read_only, flushes }
    }

    fn flags(&self) -> u16 {
        let writable = can::TRIM | can::WRITE_ZEROES | can::FAST_ZERO;
        let flushes = if self.flushes { can::FLUSH | can::FUA } else { 0 };
        can::HAS_FLAGS | if self.read_only { can::READ_ONLY } else { writable | flushes }
    }
}

/// Smallest and best request, in bytes. The smallest is what firmware and old partition tables
/// want, the best a page.
pub(crate) const BLOCK_BYTES_MIN: u32 = 512;
pub(crate) const BLOCK_BYTES_BEST: u32 = 4096;
/// Largest request, in bytes.
pub const BLOCK_BYTES_MAX: u32 = 2 << 20;

/// In what form the client wants its replies.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Agreed {
    /// Reads are answered in chunks.
    pub structured: bool,
    /// `BLOCK_STATUS` may be asked, of `base:allocation`.
    pub allocation: bool,
}

/// A client that breaks the protocol. The connection ends.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Flaw {
    #[error("the client knows no fixed newstyle handshake (flags {flags:#x})")]
    Flags { flags: u32 },
    #[error("an option begins with {magic:#018x}")]
    OptionMagic { magic: u64 },
    #[error("an option of {len} bytes, at most {OPTION_BYTES_MAX} are taken")]
    OptionLength { len: u32 },
    #[error("more than {OPTIONS_MAX} options")]
    Options,
    /// The option that names it has no reply for this.
    #[error("the export `{name}` is not there")]
    Export { name: String },
    #[error("a request does not begin like one")]
    RequestMagic,
    #[error("a write of {len} bytes, at most {BLOCK_BYTES_MAX} are taken")]
    WriteLength { len: u32 },
}

/// What follows the bytes that were taken.
#[derive(Debug, PartialEq, Eq)]
pub enum Step<'a> {
    /// Send this, and take on.
    More(Vec<u8>),
    /// Send this. Requests for this export come next.
    Begin(Vec<u8>, &'a Export, Agreed),
    /// Send this, and end.
    End(Vec<u8>),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Flags,
    Head,
    Content { option: u32, len: u32 },
}

/// One client's handshake.
#[derive(Debug)]
pub struct Handshake<'a> {
    exports: &'a [Export],
    state: State,
    no_zeroes: bool,
    structured: bool,
    /// Of which export `base:allocation` was chosen.
    allocation: Option<&'a str>,
    options: u32,
}

impl<'a> Handshake<'a> {
    /// → and what to send first.
    pub fn begin(exports: &'a [Export]) -> (Self, Vec<u8>) {
        let new = Self {
            exports,
            state: State::Flags,
            no_zeroes: false,
            structured: false,
            allocation: None,
            options: 0,
        };
        (new, wire::greeting())
    }

    /// How many bytes [`Handshake::take`] wants next.
    pub fn needs(&self) -> usize {
        match self.state {
            State::Flags => 4,
            State::Head => wire::OPTION_HEAD_BYTES,
            State::Content { len, .. } => len as usize,
        }
    }

    /// Takes the next bytes, as many as it [needs](Handshake::needs).
    ///
    /// # Errors
    /// They break the protocol.
    pub fn take(&mut self, bytes: &[u8]) -> Result<Step<'a>, Flaw> {
        let mut fields = Fields(bytes);
        match self.state {
            State::Flags => {
                let flags = fields.u32().unwrap_or(0);
                let known = u32::from(hello::FIXED_NEWSTYLE | hello::NO_ZEROES);
                if flags & u32::from(hello::FIXED_NEWSTYLE) == 0 || flags & !known != 0 {
                    return Err(Flaw::Flags { flags });
                }
                self.no_zeroes = flags & u32::from(hello::NO_ZEROES) != 0;
                self.state = State::Head;
                Ok(Step::More(Vec::new()))
            }
            State::Head => {
                let magic = fields.u64().unwrap_or(0);
                let (option, len) = (fields.u32().unwrap_or(0), fields.u32().unwrap_or(0));
                self.head(magic, option, len)
            }
            State::Content { option, .. } => {
                self.state = State::Head;
                self.option(option, bytes)
            }
        }
    }

    fn head(&mut self, magic: u64, option: u32, len: u32) -> Result<Step<'a>, Flaw> {
        if magic != wire::IHAVEOPT {
            return Err(Flaw::OptionMagic { magic });
        }
        if len > OPTION_BYTES_MAX {
            return Err(Flaw::OptionLength { len });
        }
        self.options += 1;
        if self.options > OPTIONS_MAX {
            return Err(Flaw::Options);
        }
        if len == 0 {
            return self.option(option, &[]);
        }
        self.state = State::Content { option, len };
        Ok(Step::More(Vec::new()))
    }

    fn option(&mut self, option: u32, content: &[u8]) -> Result<Step<'a>, Flaw> {
        let said = |kind, content: &[u8]| wire::option_reply(option, kind, content);
        let more = |kind, content: &[u8]| Ok(Step::More(said(kind, content)));
        match option {
            option::EXPORT_NAME => self.by_name(content),
            option::ABORT => Ok(Step::End(said(reply::ACK, &[]))),
            option::LIST if !content.is_empty() => more(reply::ERR_INVALID, b"LIST has content"),
            option::LIST => {
                let mut listed = Vec::new();
                for Export { name, .. } in self.exports {
                    let len = u32::try_from(name.len()).unwrap_or(0).to_be_bytes();
                    listed.extend(said(reply::SERVER, &[&len[..], name.as_bytes()].concat()));
                }
                listed.extend(said(reply::ACK, &[]));
                Ok(Step::More(listed))
            }
            option::INFO | option::GO => Ok(self.go(option, content)),
            option::STRUCTURED_REPLY if content.is_empty() => {
                self.structured = true;
                more(reply::ACK, &[])
            }
            option::STRUCTURED_REPLY => more(reply::ERR_INVALID, b"it has content"),
            option::LIST_META_CONTEXT | option::SET_META_CONTEXT => {
                Ok(Step::More(self.contexts(option, content)))
            }
            _ => more(reply::ERR_UNSUP, b"this server does not know the option"),
        }
    }

    /// The old form of [`Handshake::go`], which has no reply for an error.
    fn by_name(&self, name: &[u8]) -> Result<Step<'a>, Flaw> {
        let Some(export) = self.find(name) else {
            return Err(Flaw::Export { name: String::from_utf8_lossy(name).into_owned() });
        };
        let mut sent = export.size_bytes.to_be_bytes().to_vec();
        sent.extend(export.flags().to_be_bytes());
        if !self.no_zeroes {
            sent.extend([0; 124]);
        }
        Ok(Step::Begin(sent, export, self.agreed(export)))
    }

    /// By its exact name: an empty one is no other's.
    fn find(&self, name: &[u8]) -> Option<&'a Export> {
        self.exports.iter().find(|export| export.name.as_bytes() == name)
    }

    fn agreed(&self, export: &Export) -> Agreed {
        let allocation = self.allocation == Some(export.name.as_str());
        Agreed { structured: self.structured, allocation }
    }

    fn go(&self, option: u32, content: &[u8]) -> Step<'a> {
        let said = |kind, content: &[u8]| wire::option_reply(option, kind, content);
        let mut fields = Fields(content);
        let parsed = fields.text().and_then(|name| {
            let count = fields.u16()?;
            let wanted = fields.bytes(usize::from(count) * 2)?;
            fields.0.is_empty().then_some((name, wanted))
        });
        let Some((name, _all_is_told_anyway)) = parsed else {
            return Step::More(said(reply::ERR_INVALID, b"it is no name with a list"));
        };
        let Some(found) = self.find(name) else {
            return Step::More(said(reply::ERR_UNKNOWN, b"no such export here"));
        };
        let export = [
            &info::EXPORT.to_be_bytes()[..],
            &found.size_bytes.to_be_bytes(),
            &found.flags().to_be_bytes(),
        ];
        let sizes = [
            &info::BLOCK_SIZE.to_be_bytes()[..],
            &BLOCK_BYTES_MIN.to_be_bytes(),
            &BLOCK_BYTES_BEST.to_be_bytes(),
            &BLOCK_BYTES_MAX.to_be_bytes(),
        ];
        let text = found.description.as_bytes();
        let text = text.get(..DESCRIPTION_BYTES_MAX).unwrap_or(text);
        let described = match text {
            [] => Vec::new(),
            text => said(reply::INFO, &[&info::DESCRIPTION.to_be_bytes()[..], text].concat()),
        };
        let sent = [
            said(reply::INFO, &export.concat()),
            said(reply::INFO, &sizes.concat()),
            described,
            said(reply::ACK, &[]),
        ];
        match option {
            option::GO => Step::Begin(sent.concat(), found, self.agreed(found)),
            _ => Step::More(sent.concat()),
        }
    }

    fn contexts(&mut self, option: u32, content: &[u8]) -> Vec<u8> {
        let said = |kind, content: &[u8]| wire::option_reply(option, kind, content);
        let sets = option == option::SET_META_CONTEXT;
        if sets {
            // A later choice replaces an earlier one, even if it fails.
            self.allocation = None;
            if !self.structured {
                return said(reply::ERR_INVALID, b"STRUCTURED_REPLY comes first");
            }
        }
        let mut fields = Fields(content);
        let (Some(name), Some(count)) = (fields.text(), fields.u32()) else {
            return said(reply::ERR_INVALID, b"it is no name with queries");
        };
        let Some(export) = self.find(name) else {
            return said(reply::ERR_UNKNOWN, b"no such export here");
        };
        // A list without queries asks for all there are.
        let mut found = !sets && count == 0;
        for _ in 0..count {
            let Some(query) = fields.text() else {
                return said(reply::ERR_TOO_BIG, b"fewer queries than it says");
            };
            found |= query == ALLOCATION || (!sets && query == b"base:");
        }
        if !fields.0.is_empty() {
            return said(reply::ERR_INVALID, b"something follows its queries");
        }
        if sets && found {
            self.allocation = Some(&export.name);
        }
        let number = if sets { CONTEXT } else { 0 };
        let context = [&number.to_be_bytes()[..], ALLOCATION].concat();
        let told = if found { said(reply::META_CONTEXT, &context) } else { Vec::new() };
        [told, said(reply::ACK, &[])].concat()
    }
}

/// The number by which a reply names `base:allocation`.
pub(crate) const fn allocation_context() -> u32 {
    CONTEXT
}

#[cfg(test)]
#[path = "handshake_tests.rs"]
mod tests;
