//! The progress of a snapshot that is being written or pulled, and a note if that is cancelled.

use std::convert::Infallible;
use std::time::Duration;

use indicatif::ProgressBar;
use tokio::time::sleep;
use vmfork_api::SnapshotState;

use super::find;
use crate::client::Client;
use crate::printer::Printer;

const PROGRESS_INTERVAL: Duration = Duration::from_millis(250);

/// Shows the progress while it is polled. `doing`: "Writing", "Pulling".
pub(super) async fn show(client: &Client<'_>, name: &str, doing: &str) -> Infallible {
    let printer = &client.global.printer;
    if !printer.shows_progress() {
        return std::future::pending().await;
    }
    let message = format!("{doing} `{name}`");
    let spinner = printer.spinner(message.clone());
    let mut bar: Option<ProgressBar> = None;
    loop {
        sleep(PROGRESS_INTERVAL).await;
        // Not there yet, or there no more: the request itself tells why.
        let Ok(Some(detail)) = find(client, name).await else { continue };
        let (state, progress) = (detail.snapshot.state, detail.snapshot.progress);
        if !matches!(state, SnapshotState::Writing | SnapshotState::Pulling)
            || progress.total_bytes == 0
        {
            continue;
        }
        let bar = bar.get_or_insert_with(|| {
            spinner.finish_and_clear();
            printer.bytes(Some(progress.total_bytes), message.clone())
        });
        bar.set_length(progress.total_bytes);
        bar.set_position(progress.done_bytes.min(progress.total_bytes));
    }
}

/// Says that what was waited for is given up, if it is dropped before it is [`GivingUp::over`]:
/// Ctrl-C ends a command by dropping what it does.
#[derive(Debug)]
pub(super) struct GivingUp<'a> {
    printer: &'a Printer,
    text: Option<String>,
}

impl<'a> GivingUp<'a> {
    pub(super) fn new(printer: &'a Printer, text: String) -> Self {
        Self { printer, text: Some(text) }
    }

    pub(super) fn over(mut self) {
        self.text = None;
    }
}

impl Drop for GivingUp<'_> {
    fn drop(&mut self) {
        if let Some(text) = self.text.take() {
            self.printer.note(&text);
        }
    }
}
