//! `vmfork console`: the serial console, until Ctrl-] or the VM's end.

use anyhow::Context as _;
use bytes::Bytes;
use tokio::io::AsyncReadExt as _;

use super::outflow::Outflow;
use crate::client::{Incoming, Socket};
use crate::config::Global;
use crate::failure::Exit;
use crate::printer::{stdout_error, stdout_stream};
use crate::start::reach;
use crate::terminal::RawMode;

/// Ctrl-].
const ESCAPE: u8 = 0x1d;

pub(super) async fn run(global: &Global, vm: &str) -> anyhow::Result<Exit> {
    let client = reach(global).await?;
    let Socket { tx, mut rx } = client.open_socket(&format!("/v1/vms/{vm}/console")).await?;
    let raw = RawMode::enter().context("set the terminal up")?;
    if raw.is_some() {
        global.printer.note(&format!("Console of `{vm}`; Ctrl-] detaches\r"));
    }
    let mut stdout = Outflow::new(stdout_stream()?);
    let typing = type_into(tx, raw.is_some());
    tokio::pin!(typing);
    let mut typed = false;
    let ended = loop {
        tokio::select! {
            message = rx.next(), if !stdout.is_under_way() => match message? {
                None => break true,
                Some(Incoming::Text(text)) => stdout.push(text.into()),
                Some(Incoming::Binary(bytes)) => stdout.push(bytes),
            },
            // In parallel with the keys: Ctrl-] works even while no reader takes the output.
            written = stdout.drain(), if stdout.is_under_way() => written.map_err(stdout_error)?,
            end = &mut typing, if !typed => match end {
                Typing::Left => break false,
                Typing::Ended => typed = true,
            },
        }
    };
    drop(raw);
    global.printer.note(&if ended {
        format!("The console of `{vm}` has closed")
    } else {
        format!("\nDetached from the console of `{vm}`")
    });
    Ok(Exit::Done)
}

enum Typing {
    /// Ctrl-] was typed.
    Left,
    /// There is no more to type; there may be more to see.
    Ended,
}

async fn type_into(mut tx: crate::client::Sender, keys: bool) -> Typing {
    let mut stdin = tokio::io::stdin();
    let mut buffer = vec![0; 4096];
    loop {
        let len = match stdin.read(&mut buffer).await {
            // A terminal that ends is gone, and so is the user.
            Ok(0) | Err(_) => return if keys { Typing::Left } else { Typing::Ended },
            Ok(len) => len,
        };
        // Only a terminal has a user who may want to leave; a file's bytes are the guest's.
        let escape = buffer[..len].iter().position(|&byte| keys && byte == ESCAPE);
        let typed = &buffer[..escape.unwrap_or(len)];
        if !typed.is_empty() && tx.binary(Bytes::copy_from_slice(typed)).await.is_err() {
            return Typing::Ended;
        }
        if escape.is_some() {
            return Typing::Left;
        }
    }
}
