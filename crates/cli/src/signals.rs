//! The signals that end or reach into a command.

use std::io;

use tokio::signal::unix::{Signal, SignalKind, signal};

/// Some kinds of signals, as one stream.
#[derive(Debug)]
pub(crate) struct Signals(Vec<(SignalKind, Signal)>);

impl Signals {
    /// Those that end a command.
    pub(crate) fn ending() -> io::Result<Self> {
        Self::of(&[SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()])
    }

    /// Those that `exec` hands on.
    pub(crate) fn forwarded() -> io::Result<Self> {
        Self::of(&[
            SignalKind::interrupt(),
            SignalKind::terminate(),
            SignalKind::hangup(),
            SignalKind::quit(),
            SignalKind::user_defined1(),
            SignalKind::user_defined2(),
        ])
    }

    fn of(kinds: &[SignalKind]) -> io::Result<Self> {
        kinds
            .iter()
            .map(|&kind| Ok((kind, signal(kind)?)))
            .collect::<io::Result<Vec<_>>>()
            .map(Self)
    }

    /// The next one. Can be given up and asked for again.
    pub(crate) async fn next(&mut self) -> SignalKind {
        std::future::poll_fn(|cx| {
            for (kind, signal) in &mut self.0 {
                if signal.poll_recv(cx).is_ready() {
                    return std::task::Poll::Ready(*kind);
                }
            }
            std::task::Poll::Pending
        })
        .await
    }
}
