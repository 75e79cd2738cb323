//! `vmfork logs`: what the guest printed, as it came.

use anyhow::Context as _;
use hyper::Method;
use serde::Serialize;
use tokio::io::AsyncWriteExt as _;

use crate::client::{QUICK, Query, empty};
use crate::config::Global;
use crate::failure::Exit;
use crate::printer::{stdout_error, stdout_stream};
use crate::start::reach;

/// Longest line that `--json` prints as one; a longer one is cut into several.
const LINE_BYTES_MAX: usize = 64 << 10;

#[derive(Serialize)]
struct Line {
    line: String,
}

pub(super) async fn run(global: &Global, vm: &str, follow: bool) -> anyhow::Result<Exit> {
    let client = reach(global).await?;
    let mut query = Query::new(format!("/v1/vms/{vm}/logs"));
    if follow {
        query = query.with("follow", "true");
    }
    let mut answer = client.send(Method::GET, &query, empty(), QUICK).await?;
    // A log that is followed may be silent for any time.
    let bound = (!follow).then_some(QUICK);
    let mut stdout = stdout_stream()?;
    let mut lines = Lines::default();
    while let Some(chunk) = answer.chunk(bound).await.context("read the log")? {
        if global.printer.json {
            for line in lines.push(&chunk) {
                global.printer.document_line(&Line { line })?;
            }
        } else {
            stdout.write_all(&chunk).await.map_err(stdout_error)?;
            stdout.flush().await.map_err(stdout_error)?;
        }
    }
    if let Some(line) = lines.finish().filter(|_| global.printer.json) {
        global.printer.document_line(&Line { line })?;
    }
    Ok(Exit::Done)
}

/// Cuts a stream of bytes into lines.
#[derive(Debug, Default)]
struct Lines {
    partial: Vec<u8>,
}

impl Lines {
    fn push(&mut self, chunk: &[u8]) -> Vec<String> {
        let mut lines = Vec::new();
        for &byte in chunk {
            if byte == b'\n' || self.partial.len() >= LINE_BYTES_MAX {
                lines.extend(self.finish().or_else(|| Some(String::new())));
            }
            if byte != b'\n' {
                self.partial.push(byte);
            }
        }
        lines
    }

    fn finish(&mut self) -> Option<String> {
        if self.partial.is_empty() {
            return None;
        }
        let bytes = std::mem::take(&mut self.partial);
        let text = String::from_utf8_lossy(&bytes);
        Some(text.strip_suffix('\r').unwrap_or(&text).to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_cut_wherever_the_chunks_end() {
        let mut lines = Lines::default();
        assert_eq!(lines.push(b"a\r\nb"), ["a"]);
        assert_eq!(lines.push(b"c\n\nd"), ["bc", ""]);
        assert_eq!(lines.finish().as_deref(), Some("d"));
        assert_eq!(lines.finish(), None);
        let long = lines.push(&vec![b'x'; LINE_BYTES_MAX + 1]);
        assert_eq!(long.len(), 1);
        assert_eq!(lines.finish().as_deref(), Some("x"));
    }
}
