use serde::Serialize;

use crate::PAYLOAD_BYTES_MAX;

/// Bytes of a frame's header.
pub const HEADER_BYTES: usize = 12;

/// The last frame of a stream.
pub const FLAG_END: u8 = 1;

/// What a frame's payload is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Kind {
    /// JSON, a `ToGuest` or `ToHost`.
    Message = 1,
    /// Bytes for a program's standard input.
    Stdin = 2,
    /// Bytes from a program's standard output, or from its terminal.
    Stdout = 3,
    /// Bytes from a program's standard error.
    Stderr = 4,
    /// Bytes of a file, either way.
    File = 5,
    /// Bytes of an `sf_send` (to the host) or `sf_recv` (to the guest).
    Data = 6,
}

impl Kind {
    fn from_byte(byte: u8) -> Option<Self> {
        Some(match byte {
            1 => Self::Message,
            2 => Self::Stdin,
            3 => Self::Stdout,
            4 => Self::Stderr,
            5 => Self::File,
            6 => Self::Data,
            _ => return None,
        })
    }
}

/// One frame, decoded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    pub kind: Kind,
    pub channel: u32,
    /// Whether the stream ends with this frame.
    pub end: bool,
    pub payload: Vec<u8>,
}

/// The byte stream is not one of frames. There is no way to find the next frame: close it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    #[error("frame of {length} bytes; at most {PAYLOAD_BYTES_MAX} are allowed")]
    TooLong { length: u32 },
    #[error("frame of unknown kind {kind}")]
    UnknownKind { kind: u8 },
    #[error("frame with unknown flags {flags:#x}")]
    UnknownFlags { flags: u8 },
    #[error("frame with a reserved field of {value:#x}")]
    Reserved { value: u16 },
}

/// Bytes of one frame. `payload` must not be longer than [`PAYLOAD_BYTES_MAX`].
pub fn encode(kind: Kind, channel: u32, end: bool, payload: &[u8]) -> Vec<u8> {
    assert!(payload.len() <= PAYLOAD_BYTES_MAX, "payload of {} bytes", payload.len());
    let mut out = Vec::with_capacity(HEADER_BYTES + payload.len());
    out.extend_from_slice(&u32::try_from(payload.len()).unwrap_or(u32::MAX).to_le_bytes());
    out.push(kind as u8);
    out.push(if end { FLAG_END } else { 0 });
    out.extend_from_slice(&[0, 0]);
    out.extend_from_slice(&channel.to_le_bytes());
    out.extend_from_slice(payload);
    out
}

/// Bytes of a message frame.
///
/// # Errors
/// If the message's JSON is longer than a frame may be.
pub fn encode_message<M: Serialize>(channel: u32, message: &M) -> Result<Vec<u8>, FrameError> {
    let json = serde_json::to_vec(message).unwrap_or_else(|error| {
        unreachable!("messages are plain structs with string keys: {error}")
    });
    if json.len() > PAYLOAD_BYTES_MAX {
        return Err(FrameError::TooLong { length: u32::try_from(json.len()).unwrap_or(u32::MAX) });
    }
    Ok(encode(Kind::Message, channel, false, &json))
}

/// Takes bytes as they come and gives whole frames.
#[derive(Debug, Default)]
pub struct Decoder {
    buffer: Vec<u8>,
    read: usize,
}

impl Decoder {
    pub fn new() -> Self {
        Self::default()
    }

    /// Append bytes that were read.
    pub fn push(&mut self, bytes: &[u8]) {
        if self.read > 0 {
            self.buffer.drain(..self.read);
            self.read = 0;
        }
        self.buffer.extend_from_slice(bytes);
    }

    /// The next whole frame, or `None` if more bytes are needed.
    ///
    /// # Errors
    /// The stream can't be one of frames; every later call fails too.
    pub fn next_frame(&mut self) -> Result<Option<Frame>, FrameError> {
        let bytes = &self.buffer[self.read..];
        let Some(header) = bytes.first_chunk::<HEADER_BYTES>() else { return Ok(None) };
        let [l0, l1, l2, l3, kind, flags, r0, r1, c0, c1, c2, c3] = *header;
        let length = u32::from_le_bytes([l0, l1, l2, l3]);
        let payload_bytes = usize::try_from(length).unwrap_or(usize::MAX);
        if payload_bytes > PAYLOAD_BYTES_MAX {
            return Err(FrameError::TooLong { length });
        }
        let kind_byte = kind;
        let Some(kind) = Kind::from_byte(kind) else {
            return Err(FrameError::UnknownKind { kind: kind_byte });
        };
        if flags & !FLAG_END != 0 {
            return Err(FrameError::UnknownFlags { flags });
        }
        let reserved = u16::from_le_bytes([r0, r1]);
        if reserved != 0 {
            return Err(FrameError::Reserved { value: reserved });
        }
        let Some(payload) = bytes.get(HEADER_BYTES..HEADER_BYTES + payload_bytes) else {
            return Ok(None);
        };
        let frame = Frame {
            kind,
            channel: u32::from_le_bytes([c0, c1, c2, c3]),
            end: flags & FLAG_END != 0,
            payload: payload.to_vec(),
        };
        self.read += HEADER_BYTES + payload_bytes;
        Ok(Some(frame))
    }

    /// Whether no part of a frame is held: the stream stands at a frame boundary.
    pub fn is_at_boundary(&self) -> bool {
        self.read == self.buffer.len()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn kinds() -> impl Strategy<Value = Kind> {
        (1u8..=6).prop_map(|byte| Kind::from_byte(byte).expect("in range"))
    }

    proptest! {
        #[test]
        fn frames_survive_any_split(
            frames in prop::collection::vec((kinds(), any::<u32>(), any::<bool>(), prop::collection::vec(any::<u8>(), 0..300)), 0..20),
            cuts in prop::collection::vec(1usize..64, 1..50),
        ) {
            let bytes: Vec<u8> = frames.iter().flat_map(|(k, c, e, p)| encode(*k, *c, *e, p)).collect();
            let (mut decoder, mut seen, mut rest, mut cut) = (Decoder::new(), Vec::new(), &bytes[..], cuts.iter().cycle());
            while !rest.is_empty() {
                let n = (*cut.next().expect("cycle")).min(rest.len());
                decoder.push(&rest[..n]);
                rest = &rest[n..];
                while let Some(frame) = decoder.next_frame().expect("well formed") {
                    seen.push((frame.kind, frame.channel, frame.end, frame.payload));
                }
            }
            prop_assert_eq!(seen, frames);
            prop_assert!(decoder.is_at_boundary());
        }

        #[test]
        fn any_bytes_are_frames_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
            let mut decoder = Decoder::new();
            decoder.push(&bytes);
            while let Ok(Some(_)) = decoder.next_frame() {}
        }
    }
}
