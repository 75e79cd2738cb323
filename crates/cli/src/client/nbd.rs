//! A connection to the daemon that speaks NBD from its first answer on.

use std::os::unix::net::UnixStream;

use anyhow::Context as _;
use hyper::client::conn::http1;
use hyper::header::{AUTHORIZATION, CONNECTION, HOST, UPGRADE};
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::io::copy_bidirectional_with_sizes;
use tokio::time::timeout;

use super::{Client, QUICK, Query, empty, http, unreachable};
use crate::failure::HintExt as _;

/// Copied at a time.
const COPY_BYTES: usize = 256 << 10;

impl Client<'_> {
    /// A socket on which the daemon speaks NBD. It lasts for as long as it is open.
    pub(crate) async fn open_nbd(&self, path: &Query) -> anyhow::Result<UnixStream> {
        let stream = super::connect(&self.global.endpoint)
            .await
            .map_err(|error| unreachable(self.global, error.into_io()))?;
        let lost = || format!("the daemon at {} does not reply", self.global.endpoint);
        let (mut sender, connection) =
            http1::handshake(TokioIo::new(stream)).await.with_context(lost)?;
        tokio::spawn(async move {
            // Its error is the request's, too.
            let _ = connection.with_upgrades().await;
        });
        let mut request = Request::builder()
            .method(Method::GET)
            .uri(path.as_str())
            .header(HOST, http::host(self.global))
            .header(CONNECTION, "upgrade")
            .header(UPGRADE, "nbd");
        if let Some(token) = &self.global.token {
            request = request.header(AUTHORIZATION, format!("Bearer {token}"));
        }
        let request = request.body(empty()).context("make the request")?;
        let response = timeout(QUICK, sender.send_request(request))
            .await
            .with_context(|| format!("no reply within {} s", QUICK.as_secs()))
            .hint("check `vmfork daemon status` and the log of the daemon")?
            .with_context(lost)?;
        if response.status() != StatusCode::SWITCHING_PROTOCOLS {
            return Err(http::failed(response).await);
        }
        let theirs = hyper::upgrade::on(response).await.with_context(lost)?;
        let (ours, end) = UnixStream::pair().context("make a pair of sockets")?;
        end.set_nonblocking(true)?;
        let mut end = tokio::net::UnixStream::from_std(end)?;
        tokio::spawn(async move {
            let mut theirs = TokioIo::new(theirs);
            // Its end is the end of both.
            let _ =
                copy_bidirectional_with_sizes(&mut end, &mut theirs, COPY_BYTES, COPY_BYTES).await;
        });
        Ok(ours)
    }
}
