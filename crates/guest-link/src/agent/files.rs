//! Files in and out of a guest.

use std::time::Duration;

use bytes::Bytes;
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;
use vmfork_agent_proto::ToGuest;
use vmfork_api::ErrorBody;

use super::command::Side;
use super::error::LinkError;
use super::link::{AgentLink, Opened};
use super::outlet::{OUTPUT_ITEMS, Outlet};
use vmfork_control::FileStream;

impl AgentLink {
    /// Open a file of the guest. `timeout` bounds the wait for its first answer; the content comes
    /// as fast as it is taken. Dropping the stream ends the transfer.
    ///
    /// # Errors
    /// `Guest` (no such file, a folder), `TooLong`, `TooManyChannels`, `Timeout`, `Closed`.
    pub async fn read_file(&self, path: &str, timeout: Duration) -> Result<FileStream, LinkError> {
        let (content_tx, content) = mpsc::channel(OUTPUT_ITEMS);
        let (opened_tx, opened_rx) = oneshot::channel();
        let side = Side::Read {
            opened: Some(opened_tx),
            content: Outlet::new(content_tx.clone(), |_kind, bytes| Ok(bytes)),
        };
        let message = ToGuest::ReadFile { path: path.to_owned() };
        let opened = self.open(format!("read `{path}`"), message, side)?;
        let info = self.answer("read_file", timeout, opened_rx).await?;
        tokio::spawn(watch_reader(opened, content_tx));
        Ok(FileStream { mode: info.mode, size_bytes: info.size_bytes, content })
    }

    /// Write a file of the guest, whole: beside `path`, and renamed over it at the end. An `Err`
    /// among the content, or dropping the future, leaves the old file as it was. `stall` bounds
    /// each wait for the guest; the content may take as long as it likes.
    ///
    /// Returns the bytes written.
    ///
    /// # Errors
    /// `Guest` (no such folder, no space), `Abandoned` by the content, `TooLong`,
    /// `TooManyChannels`, `Timeout`, `Closed`.
    pub async fn write_file(
        &self,
        path: &str,
        mode: u32,
        content: mpsc::Receiver<Result<Bytes, ErrorBody>>,
        stall: Duration,
    ) -> Result<u64, LinkError> {
        let (written_tx, mut written) = oneshot::channel();
        let side = Side::Write { written: Some(written_tx) };
        let message = ToGuest::WriteFile { path: path.to_owned(), mode };
        let opened = self.open(format!("write `{path}`"), message, side)?;
        let early = tokio::select! {
            early = &mut written => Some(early),
            passed = pass_content(&opened, content, stall) => {
                passed?;
                None
            }
        };
        match early {
            Some(outcome) => outcome.unwrap_or_else(|_closed| Err(self.why())),
            None => self.answer("write_file", stall, written).await,
        }
    }
}

/// Cancel a transfer whose reader has gone, even while nothing comes.
async fn watch_reader(mut opened: Opened, content: mpsc::Sender<Result<Bytes, ErrorBody>>) {
    tokio::select! {
        _ = &mut opened.done => {}
        () = content.closed() => {}
    }
}

async fn pass_content(
    opened: &Opened,
    mut content: mpsc::Receiver<Result<Bytes, ErrorBody>>,
    stall: Duration,
) -> Result<(), LinkError> {
    while let Some(bytes) = content.recv().await {
        let mut bytes = bytes.map_err(LinkError::Abandoned)?;
        while !bytes.is_empty() {
            // Each part by itself must make its way in time, not the whole.
            let part = bytes.split_to(bytes.len().min(64 * 1024));
            timeout(stall, opened.push(part))
                .await
                .map_err(|_elapsed| LinkError::Timeout { what: "write_file", after: stall })?;
        }
    }
    opened.push_end();
    Ok(())
}
