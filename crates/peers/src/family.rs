//! The end of a family whose VMs are on several hosts.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use futures_util::future::join_all;
use serde::{Deserialize, Serialize};
use vmfork_api::ErrorBody;

use super::client::WORD_WAIT;
use super::context::Context;
use super::error::{CallError, ClusterError};
use super::hosts::Hosts;
use super::member::Member;
use vmfork_host::core::{Core, KILL_TIMEOUT};
use vmfork_host::error::outcome;
use vmfork_rest::http::ApiError;

pub(super) const END: &str = "/cluster/v1/families/end";

/// How often all hosts are asked. Twice is the rule: once to end all, once to find none.
const ROUNDS_MAX: u32 = 4;

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Ask {
    /// Of the VM that is ended with all that descends from it.
    id: String,
    /// For errors.
    name: String,
    grace_ms: u64,
}

/// End the part of a family that is here. → how many VMs and forks that were.
pub(super) async fn end(
    State(context): State<Context>,
    Json(ask): Json<Ask>,
) -> Result<Json<usize>, ApiError> {
    let message = format!("kill the family of `{}`", ask.name);
    let (_, core) = context.parts().map_err(|error| error.to_body(message.as_str()))?;
    let grace = Duration::from_millis(ask.grace_ms);
    let task = tokio::spawn(async move { core.kill_family(&ask.id, &ask.name, grace).await });
    Ok(Json(outcome(task, message).await?))
}

/// What came of asking others.
#[derive(Debug, Default)]
struct Asked {
    ended: usize,
    silent: Vec<String>,
    error: Option<CallError>,
}

impl Asked {
    fn add(&mut self, host: String, said: Result<usize, CallError>) {
        match said {
            Ok(ended) => self.ended += ended,
            Err(error @ CallError::Refused { .. }) => self.error = Some(error),
            Err(_) => self.silent.push(host),
        }
    }
}

impl Hosts {
    async fn ask_to_end(&self, ask: &Ask, but: &BTreeSet<String>) -> Asked {
        let there = self.there();
        let mut asked = Asked::default();
        asked.silent.extend(there.gone.into_iter().map(|entry| entry.name));
        let wait = Duration::from_millis(ask.grace_ms) + KILL_TIMEOUT * 2 + WORD_WAIT;
        let hosts = there.alive.into_iter().chain(there.suspect);
        let said = hosts.filter(|entry| !but.contains(&entry.name)).map(|entry| {
            let peer = self.peer(&entry);
            async move { (entry.name, peer.ask(END, ask, wait).await) }
        });
        for (host, said) in join_all(said).await {
            asked.add(host, said);
        }
        asked
    }
}

/// End a VM and all that descends from it, on all hosts at once. `member`: this host, if it is in a
/// cluster. → the hosts that do not answer:
/// what is there goes on.
///
/// # Errors
/// On a host that answers something of it may go on.
pub async fn end_everywhere(
    member: Option<&Member>,
    core: &Arc<Core>,
    (id, name): (&str, &str),
    grace: Duration,
) -> Result<Vec<String>, ErrorBody> {
    let Some(member) = member else {
        core.kill_family(id, name, grace).await?;
        return Ok(Vec::new());
    };
    let message = format!("kill the family of `{name}`");
    let mut silent = BTreeSet::new();
    let mut grace = grace;
    for _ in 0..ROUNDS_MAX {
        let grace_ms = u64::try_from(grace.as_millis()).unwrap_or(u64::MAX);
        let ask = Ask { id: id.to_owned(), name: name.to_owned(), grace_ms };
        let here = core.kill_family(id, name, grace);
        let (here, there) = tokio::join!(here, member.hosts.ask_to_end(&ask, &silent));
        silent.extend(there.silent);
        let ended = here? + there.ended;
        if let Some(error) = there.error {
            return Err(error.to_body(message));
        }
        // Else one host may have started something for another that had been asked already.
        if ended == 0 {
            return Ok(silent.into_iter().collect());
        }
        grace = Duration::ZERO;
    }
    Err(ClusterError::KeepsStarting.to_body(message))
}

#[cfg(test)]
mod tests {
    use vmfork_api::ErrorCode;

    use super::*;

    #[test]
    fn who_refuses_fails_it_and_who_is_silent_is_named() {
        let mut asked = Asked::default();
        asked.add("h1".to_owned(), Ok(2));
        asked.add("h2".to_owned(), Err(CallError::Late { host: "h2".to_owned(), seconds: 5 }));
        assert_eq!((asked.ended, asked.silent.as_slice()), (2, &["h2".to_owned()][..]));
        assert!(asked.error.is_none());
        let source = ErrorBody::new(ErrorCode::Timeout, "a fork goes on");
        asked.add("h3".to_owned(), Err(CallError::Refused { host: "h3".to_owned(), source }));
        assert!(asked.error.expect("refused").to_string().contains("host `h3`"));
    }
}
