//! What a client says before its first request.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use crate::handshake::{Export, OPTION_BYTES_MAX};
use crate::wire::{self, Fields, hello, info, option, reply};

/// How long the server may take for each of its answers.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Most replies to one option.
const REPLIES_MAX: usize = 16;

/// A server that this client can't talk to.
#[derive(Debug, thiserror::Error)]
pub enum GreetError {
    #[error("the connection")]
    Socket(#[from] io::Error),
    #[error("it is no NBD server with a fixed newstyle handshake")]
    Style,
    #[error("a reply to an option does not begin like one")]
    Reply,
    #[error("a reply to an option has {len} bytes, at most {OPTION_BYTES_MAX} are taken")]
    Length { len: u32 },
    #[error("the server has no export `{name}`")]
    Export { name: String },
    #[error("the server has no structured replies, or tells no allocation")]
    Features,
}

/// Take the export of that name. Replies are structured then, and the allocation can be asked.
pub(super) fn greet(socket: &UnixStream, name: &str) -> Result<Export, GreetError> {
    socket.set_read_timeout(Some(TIMEOUT))?;
    socket.set_write_timeout(Some(TIMEOUT))?;
    let found = talk(socket, name)?;
    socket.set_read_timeout(None)?;
    socket.set_write_timeout(None)?;
    Ok(found)
}

fn talk(mut socket: impl Read + Write, name: &str) -> Result<Export, GreetError> {
    let mut greeting = [0; 18];
    socket.read_exact(&mut greeting)?;
    let mut fields = Fields(&greeting);
    let magics = (fields.u64(), fields.u64());
    let flags = fields.u16().unwrap_or(0);
    let is_known = magics == (Some(wire::NBDMAGIC), Some(wire::IHAVEOPT));
    let wanted = hello::FIXED_NEWSTYLE | hello::NO_ZEROES;
    if !is_known || flags & wanted != wanted {
        return Err(GreetError::Style);
    }
    let name_len = u32::try_from(name.len()).unwrap_or(u32::MAX).to_be_bytes();
    let allocation = b"base:allocation";
    let context = [&name_len[..], name.as_bytes(), &1_u32.to_be_bytes(), &15_u32.to_be_bytes()];
    let context = [&context.concat()[..], allocation].concat();
    let wishes = [&1_u16.to_be_bytes()[..], &info::DESCRIPTION.to_be_bytes()].concat();
    let go = [&name_len[..], name.as_bytes(), &wishes].concat();
    let asked = [
        &u32::from(wanted).to_be_bytes()[..],
        &wire::option(option::STRUCTURED_REPLY, &[]),
        &wire::option(option::SET_META_CONTEXT, &context),
        &wire::option(option::GO, &go),
    ];
    socket.write_all(&asked.concat())?;
    let mut has_allocation = false;
    let structured = replies(&mut socket, option::STRUCTURED_REPLY, &mut |_, _| {})?;
    let context = replies(&mut socket, option::SET_META_CONTEXT, &mut |kind, _| {
        has_allocation |= kind == reply::META_CONTEXT;
    })?;
    let (mut export, mut description) = (None, String::new());
    let gone =
        replies(&mut socket, option::GO, &mut |kind, mut content| match (kind, content.u16()) {
            (reply::INFO, Some(info::EXPORT)) => export = content.u64().zip(content.u16()),
            (reply::INFO, Some(info::DESCRIPTION)) => {
                description = String::from_utf8_lossy(content.0).into_owned();
            }
            _ => {}
        })?;
    match export {
        Some((size_bytes, flags)) if gone && structured && context && has_allocation => {
            Ok(Export::told(name, description, size_bytes, flags))
        }
        Some(_) if gone => Err(GreetError::Features),
        _ => Err(GreetError::Export { name: name.to_owned() }),
    }
}

/// All replies to an option. → whether it was accepted.
fn replies(
    socket: &mut impl Read,
    option: u32,
    told: &mut dyn FnMut(u32, Fields<'_>),
) -> Result<bool, GreetError> {
    for _ in 0..REPLIES_MAX {
        let mut head = [0; 20];
        socket.read_exact(&mut head)?;
        let mut fields = Fields(&head);
        let (magic, of) = (fields.u64(), fields.u32());
        let (kind, len) = (fields.u32().unwrap_or(0), fields.u32().unwrap_or(0));
        if magic != Some(wire::OPTION_REPLY) || of != Some(option) {
            return Err(GreetError::Reply);
        }
        if len > OPTION_BYTES_MAX {
            return Err(GreetError::Length { len });
        }
        let mut content = vec![0; len as usize];
        socket.read_exact(&mut content)?;
        match kind {
            reply::ACK => return Ok(true),
            kind if kind & reply::ERROR != 0 => return Ok(false),
            kind => told(kind, Fields(&content)),
        }
    }
    Err(GreetError::Reply)
}
