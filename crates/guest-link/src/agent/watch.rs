//! Notices that a guest's agent has gone while its VM lives on.
//!
//! QEMU keeps the host's end of the agent's port open whatever happens in the guest, so the link
//! alone would never tell. But QEMU says when the guest closes its end (`VSERPORT_CHANGE`), as the
//! kernel does for an agent that ended in whatever way. A guest that is stopped, frozen or slow
//! closes nothing.

use std::time::Duration;

use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::RecvError;
use vmfork_qemu::AGENT_DEVICE;
use vmfork_qemu::qmp::Event;

use super::error::CloseReason;
use super::link::AgentLink;

/// A guest that powers off takes its agent along. Its end may take this long and still be the
/// reported reason.
pub const SETTLE: Duration = Duration::from_millis(if cfg!(test) { 50 } else { 3000 });

/// Waits until the link has ended, and says why; ends it if the guest closes the agent's port.
/// `is_up`: whether the agent has ever answered. Before that its port may come and go.
pub async fn lost(
    link: &AgentLink,
    events: Receiver<Event>,
    is_up: impl Fn() -> bool,
) -> CloseReason {
    tokio::select! {
        reason = link.closed() => return reason,
        () = port_closed(events, is_up) => {}
    }
    tokio::time::sleep(SETTLE).await;
    link.give_up(CloseReason::AgentGone);
    link.closed().await
}

async fn port_closed(mut events: Receiver<Event>, is_up: impl Fn() -> bool) {
    loop {
        match events.recv().await {
            Ok(event) if says_closed(&event) && is_up() => return,
            Ok(_) | Err(RecvError::Lagged(_)) => {}
            // QEMU has gone, and the link will say so.
            Err(RecvError::Closed) => std::future::pending().await,
        }
    }
}

fn says_closed(event: &Event) -> bool {
    let open = event.data.get("open").and_then(serde_json::Value::as_bool);
    event.name == "VSERPORT_CHANGE" && event.text("id") == Some(AGENT_DEVICE) && open == Some(false)
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use tokio::sync::broadcast;
    use tokio::time::timeout;
    use vmfork_agent_proto::{ToGuest, ToHost};
    use vmfork_api::ExecRequest;

    use super::*;
    use crate::testing::{SOON, link};
    use vmfork_control::ExecOutput;

    fn port(id: &str, open: bool) -> Event {
        let data = json!({ "id": id, "open": open });
        Event { name: "VSERPORT_CHANGE".to_owned(), data, time_us: 0 }
    }

    #[tokio::test]
    async fn programs_under_way_end_with_an_error_when_the_guest_closes_the_agents_port() {
        let (link, mut guest, _requests) = link();
        let exec = ExecRequest { argv: vec!["cat".to_owned()], ..ExecRequest::default() };
        let starter = async {
            let (channel, message) = guest.hear().await;
            assert!(matches!(message, ToGuest::Exec { .. }), "{message:?}");
            guest.say(channel, &ToHost::Started { pid: 1 }).await;
        };
        let (session, ()) = tokio::join!(link.exec(exec.clone(), SOON), starter);
        let mut session = session.expect("it runs");
        let (qemu, events) = broadcast::channel(4);
        for event in [port(AGENT_DEVICE, true), port("another", false), port(AGENT_DEVICE, false)] {
            qemu.send(event).expect("somebody listens");
        }
        let reason = timeout(SOON, lost(&link, events, || true)).await.expect("noticed");
        assert_eq!(reason, CloseReason::AgentGone);
        let last = timeout(SOON, session.output.recv()).await.expect("in time");
        let Some(ExecOutput::Error(error)) = last else { panic!("{last:?}") };
        assert_eq!(
            error.to_string(),
            "run `cat`: no connection to the guest's agent: it has ended, or closed its port"
        );
        assert!(error.remedy.expect("a remedy").contains("vmfork logs"));
        // And a later caller gets the answer at once.
        link.exec(exec, SOON).await.expect_err("there is no agent");
    }

    #[tokio::test]
    async fn a_port_that_closes_while_the_guest_boots_means_nothing() {
        let (link, _guest, _requests) = link();
        let (qemu, events) = broadcast::channel(4);
        qemu.send(port(AGENT_DEVICE, false)).expect("somebody listens");
        timeout(4 * SETTLE, lost(&link, events, || false)).await.expect_err("nothing is lost");
        assert_eq!(link.closed_now(), None);
    }
}
