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
    /// How many hold it. While any does, what is typed waits: nothing may reach QEMU during a
    /// freeze or a pause.
    holds: watch::Sender<usize>,
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
        let (holds, mut holds_rx) = watch::channel(0);
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
                if holds_rx.wait_for(|holds| *holds == 0).await.is_err()
                    || writer.write_all(&piece).await.is_err()
                {
                    return;
                }
            }
        });
        Ok(Self { input, output, holds })
    }

    /// Hold back what is typed, until this result and all others are dropped.
    pub fn hold(&self) -> HeldConsole {
        self.holds.send_modify(|holds| *holds += 1);
        HeldConsole { holds: self.holds.clone() }
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
pub struct HeldConsole {
    holds: watch::Sender<usize>,
}

impl Drop for HeldConsole {
    fn drop(&mut self) {
        self.holds.send_modify(|holds| *holds -= 1);
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::time::Duration;

    use super::*;
    use crate::testing::SOON;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn what_is_typed_waits_until_the_last_hold_ends() {
        let folder = tempfile::tempdir().expect("folder");
        let (ours, mut qemus) = std::os::unix::net::UnixStream::pair().expect("a pair");
        let log = Log::create(folder.path()).expect("log");
        let console = Console::start(ours.into(), log).expect("started");
        let (pause, freeze) = (console.hold(), console.hold());
        console.attach().input.send(Bytes::from_static(b"x")).await.expect("room");
        drop(freeze);
        let mut typed = [0];
        qemus.set_read_timeout(Some(Duration::from_millis(50))).expect("set");
        qemus.read(&mut typed).expect_err("the pause goes on");
        drop(pause);
        qemus.set_read_timeout(Some(SOON)).expect("set");
        tokio::task::block_in_place(|| qemus.read_exact(&mut typed)).expect("typed");
        assert_eq!(&typed, b"x");
    }
}
