//! The serial console of one VM: one reader of QEMU's socket, any number of onlookers.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use bytes::Bytes;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::{broadcast, mpsc, watch};

use super::log::Log;
use vmfork_control::ConsoleSession;

const INPUT_PIECES: usize = 64;
const OUTPUT_PIECES: usize = 1024;
const READ_BYTES: usize = 16 << 10;

/// Handle of a console.
#[derive(Debug)]
pub struct Console {
    input: mpsc::Sender<Bytes>,
    output: broadcast::Sender<Bytes>,
    /// While true, what is typed waits: nothing may reach QEMU during a freeze.
    held: watch::Sender<bool>,
}

impl Console {
    /// Take over QEMU's socket. What comes goes to the log and to who looks on.
    ///
    /// # Errors
    /// The socket can't be used.
    pub fn start(serial: OwnedFd, log: Arc<Log>) -> io::Result<Self> {
        let stream = std::os::unix::net::UnixStream::from(serial);
        stream.set_nonblocking(true)?;
        let (mut reader, mut writer) = UnixStream::from_std(stream)?.into_split();
        let (input, mut input_rx) = mpsc::channel::<Bytes>(INPUT_PIECES);
        let (output, _) = broadcast::channel(OUTPUT_PIECES);
        let (held, mut held_rx) = watch::channel(false);
        let to_onlookers = output.clone();
        tokio::spawn(async move {
            let mut buffer = vec![0; READ_BYTES];
            while let Ok(read) = reader.read(&mut buffer).await {
                if read == 0 {
                    break;
                }
                let piece = Bytes::copy_from_slice(&buffer[..read]);
                log.append(piece.clone());
                let _no_onlooker = to_onlookers.send(piece);
            }
        });
        tokio::spawn(async move {
            while let Some(piece) = input_rx.recv().await {
                if held_rx.wait_for(|held| !held).await.is_err()
                    || writer.write_all(&piece).await.is_err()
                {
                    return;
                }
            }
        });
        Ok(Self { input, output, held })
    }

    /// Hold back what is typed, until the result is dropped.
    pub fn hold(&self) -> HeldConsole<'_> {
        self.held.send_replace(true);
        HeldConsole { console: self }
    }

    /// Look on, and type.
    pub fn attach(&self) -> ConsoleSession {
        let mut from = self.output.subscribe();
        let (tx, output) = mpsc::channel(64);
        tokio::spawn(async move {
            loop {
                match from.recv().await {
                    Ok(piece) => {
                        if tx.send(piece).await.is_err() {
                            return;
                        }
                    }
                    Err(broadcast::error::RecvError::Lagged(_)) => {}
                    Err(broadcast::error::RecvError::Closed) => return,
                }
            }
        });
        ConsoleSession { input: self.input.clone(), output }
    }
}

/// While it lives, nothing that is typed reaches QEMU.
#[derive(Debug)]
pub struct HeldConsole<'a> {
    console: &'a Console,
}

impl Drop for HeldConsole<'_> {
    fn drop(&mut self) {
        self.console.held.send_replace(false);
    }
}
