use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::VmState;

/// Something that happened on a host. Events of one daemon have no gaps: one that a reader lost is
/// told as a `gap`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Event {
    /// The place after this event: give it back as `?after=` to continue from here.
    pub cursor: String,
    /// By the host's clock, which may be set back. The order of events is that of their cursors.
    pub time_unix_ms: u64,
    #[serde(flatten)]
    pub what: Happening,
}

/// What happened.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "kind")]
pub enum Happening {
    /// A VM is listed, and starts: from an image, from a snapshot or as a clone.
    #[serde(rename = "vm.started")]
    VmStarted { vm: EventVm },
    /// A fork is over, and these clones of the VM are ready. Not told if the fork failed.
    #[serde(rename = "vm.forked")]
    VmForked {
        /// The parent.
        vm: EventVm,
        requested: u32,
        /// How many clones were ready.
        granted: u32,
        /// How long the parent's vCPUs stood still, in ms.
        pause_ms: f64,
        /// Those that were ready, by number.
        clones: Vec<EventClone>,
    },
    /// A VM's agent has answered, or it has none and its start is over.
    #[serde(rename = "vm.ready")]
    VmReady {
        vm: EventVm,
        /// Since its start, in ms.
        ready_ms: f64,
    },
    /// A client has paused a VM: its vCPUs stand still.
    #[serde(rename = "vm.paused")]
    VmPaused { vm: EventVm },
    /// A client has resumed a paused VM. Not told if the VM ends while it is paused.
    #[serde(rename = "vm.resumed")]
    VmResumed { vm: EventVm },
    /// A VM has ended. No event of its own start, readiness or pause follows.
    #[serde(rename = "vm.ended")]
    VmEnded {
        vm: EventVm,
        /// `exited` or `failed`.
        state: VmState,
        /// In words.
        reason: String,
        end: VmEnd,
    },
    /// A snapshot is in the store: it was taken, imported or pulled, and can be started.
    #[serde(rename = "snapshot.stored")]
    SnapshotStored { snapshot: EventSnapshot },
    /// A stored snapshot was removed.
    #[serde(rename = "snapshot.removed")]
    SnapshotRemoved { snapshot: EventSnapshot },
    /// A host became a member of the cluster, as this host sees it.
    #[serde(rename = "host.joined")]
    HostJoined { host: EventHost },
    /// This host has not heard another member for 3.5 s: it gets nothing new.
    #[serde(rename = "host.silent")]
    HostSilent { host: EventHost },
    /// A member that was silent or gone is heard again.
    #[serde(rename = "host.returned")]
    HostReturned { host: EventHost },
    /// A member was silent for 15 s, so that what runs there counts as lost; or it has left.
    #[serde(rename = "host.gone")]
    HostGone { host: EventHost, cause: HostGoneCause },
    /// The reader lost events: they left the window before it read them, or the daemon was
    /// restarted. What they told is to be looked up, as by `GET /v1/vms`.
    #[serde(rename = "gap")]
    Gap {
        cause: GapCause,
        /// How many events of this daemon were lost, of any kind. The number of an earlier daemon's
        /// is unknown.
        lost: u64,
    },
}

/// A VM in an event.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EventVm {
    pub id: String,
    pub name: String,
    /// The id of the root of its family.
    pub family: String,
    /// The id of the VM that it was forked from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<String>,
    /// The stored snapshot that it, or the root of its family, was started from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<String>,
}

/// A clone in a fork's event.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EventClone {
    pub id: String,
    pub name: String,
    /// The host that it was started on, in a cluster.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
}

/// A stored snapshot in an event.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EventSnapshot {
    pub name: String,
    /// The VM that it was taken of on this host. In `snapshot.stored` only, and absent if the
    /// snapshot was imported or pulled. A filter by VM does not pass `snapshot.removed`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vm: Option<EventVm>,
}

/// A host in an event.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EventHost {
    pub id: String,
    pub name: String,
    pub address: String,
}

/// How a VM ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum VmEnd {
    /// Powered off, or `sf_exit`.
    Exited,
    /// On request.
    Killed,
    /// Its time to live was over.
    Expired,
    /// QEMU died.
    QemuDied,
    /// No source had a page.
    PageLost,
    /// The agent did not answer in time, or refused.
    Guest,
    /// Killed by its memory limit.
    OutOfMemory,
    /// Anything else.
    Fault,
}

/// Why a host counts as gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum HostGoneCause {
    /// It was not heard for too long. It may return.
    Silent,
    /// It has left the cluster, or was removed from it.
    Left,
}

/// Why a reader lost events.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum GapCause {
    /// It read too slowly, or came back too late.
    Overflow,
    /// The cursor is of an earlier life of the daemon. VMs end with their daemon.
    Restarted,
}

/// The word of each kind of event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub enum EventKind {
    #[serde(rename = "vm.started")]
    VmStarted,
    #[serde(rename = "vm.forked")]
    VmForked,
    #[serde(rename = "vm.ready")]
    VmReady,
    #[serde(rename = "vm.paused")]
    VmPaused,
    #[serde(rename = "vm.resumed")]
    VmResumed,
    #[serde(rename = "vm.ended")]
    VmEnded,
    #[serde(rename = "snapshot.stored")]
    SnapshotStored,
    #[serde(rename = "snapshot.removed")]
    SnapshotRemoved,
    #[serde(rename = "host.joined")]
    HostJoined,
    #[serde(rename = "host.silent")]
    HostSilent,
    #[serde(rename = "host.returned")]
    HostReturned,
    #[serde(rename = "host.gone")]
    HostGone,
    #[serde(rename = "gap")]
    Gap,
}

impl EventKind {
    pub const ALL: [Self; 13] = [
        Self::VmStarted,
        Self::VmForked,
        Self::VmReady,
        Self::VmPaused,
        Self::VmResumed,
        Self::VmEnded,
        Self::SnapshotStored,
        Self::SnapshotRemoved,
        Self::HostJoined,
        Self::HostSilent,
        Self::HostReturned,
        Self::HostGone,
        Self::Gap,
    ];

    pub const fn word(self) -> &'static str {
        match self {
            Self::VmStarted => "vm.started",
            Self::VmForked => "vm.forked",
            Self::VmReady => "vm.ready",
            Self::VmPaused => "vm.paused",
            Self::VmResumed => "vm.resumed",
            Self::VmEnded => "vm.ended",
            Self::SnapshotStored => "snapshot.stored",
            Self::SnapshotRemoved => "snapshot.removed",
            Self::HostJoined => "host.joined",
            Self::HostSilent => "host.silent",
            Self::HostReturned => "host.returned",
            Self::HostGone => "host.gone",
            Self::Gap => "gap",
        }
    }

    /// The kind of that word.
    pub fn of_word(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.word() == word)
    }
}

impl Happening {
    pub const fn kind(&self) -> EventKind {
        match self {
            Self::VmStarted { .. } => EventKind::VmStarted,
            Self::VmForked { .. } => EventKind::VmForked,
            Self::VmReady { .. } => EventKind::VmReady,
            Self::VmPaused { .. } => EventKind::VmPaused,
            Self::VmResumed { .. } => EventKind::VmResumed,
            Self::VmEnded { .. } => EventKind::VmEnded,
            Self::SnapshotStored { .. } => EventKind::SnapshotStored,
            Self::SnapshotRemoved { .. } => EventKind::SnapshotRemoved,
            Self::HostJoined { .. } => EventKind::HostJoined,
            Self::HostSilent { .. } => EventKind::HostSilent,
            Self::HostReturned { .. } => EventKind::HostReturned,
            Self::HostGone { .. } => EventKind::HostGone,
            Self::Gap { .. } => EventKind::Gap,
        }
    }

    /// The VM that it is about: a fork's parent, the VM that a snapshot is taken of.
    pub const fn vm(&self) -> Option<&EventVm> {
        match self {
            Self::VmStarted { vm }
            | Self::VmForked { vm, .. }
            | Self::VmReady { vm, .. }
            | Self::VmPaused { vm }
            | Self::VmResumed { vm }
            | Self::VmEnded { vm, .. } => Some(vm),
            Self::SnapshotStored { snapshot } | Self::SnapshotRemoved { snapshot } => {
                snapshot.vm.as_ref()
            }
            _ => None,
        }
    }
}

/// What `GET /v1/events` takes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EventFilter {
    /// Of these kinds; empty: of all. A `gap` always passes.
    pub kinds: Vec<EventKind>,
    /// About the VM of this name or id.
    pub vm: Option<String>,
}

impl EventFilter {
    pub fn passes(&self, what: &Happening) -> bool {
        let kind = what.kind();
        if kind == EventKind::Gap {
            return true;
        }
        let is_about =
            |wanted: &String| what.vm().is_some_and(|vm| vm.name == *wanted || vm.id == *wanted);
        (self.kinds.is_empty() || self.kinds.contains(&kind)) && self.vm.iter().all(is_about)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vm() -> EventVm {
        EventVm {
            id: "00000000000000aa".to_owned(),
            name: "web".to_owned(),
            family: "00000000000000aa".to_owned(),
            parent: None,
            snapshot: None,
        }
    }

    #[test]
    fn an_event_is_one_flat_object() {
        let what = Happening::VmEnded {
            vm: vm(),
            state: VmState::Exited,
            reason: "killed on request".to_owned(),
            end: VmEnd::Killed,
        };
        let event = Event { cursor: "0000000000000001-7".to_owned(), time_unix_ms: 5, what };
        let json = serde_json::to_value(&event).expect("JSON");
        assert_eq!(
            json,
            serde_json::json!({
                "cursor": "0000000000000001-7", "time_unix_ms": 5, "kind": "vm.ended",
                "vm": {"id": "00000000000000aa", "name": "web", "family": "00000000000000aa"},
                "state": "exited", "reason": "killed on request", "end": "killed",
            })
        );
        assert_eq!(serde_json::from_value::<Event>(json).expect("an event"), event);
    }

    #[test]
    fn each_kind_has_the_word_of_its_events() {
        for kind in EventKind::ALL {
            let json = serde_json::to_value(kind).expect("JSON");
            assert_eq!(json, kind.word());
            assert_eq!(EventKind::of_word(kind.word()), Some(kind));
        }
        assert_eq!(EventKind::of_word("vm.frozen"), None);
        let gap = Happening::Gap { cause: GapCause::Overflow, lost: 3 };
        let json = serde_json::to_value(&gap).expect("JSON");
        assert_eq!(json, serde_json::json!({"kind": "gap", "cause": "overflow", "lost": 3}));
    }

    #[test]
    fn a_filter_never_hides_a_gap() {
        let started = Happening::VmStarted { vm: vm() };
        let gap = Happening::Gap { cause: GapCause::Restarted, lost: 0 };
        let by = |kinds: &[EventKind], vm: Option<&str>| EventFilter {
            kinds: kinds.to_vec(),
            vm: vm.map(ToOwned::to_owned),
        };
        assert!(by(&[], None).passes(&started));
        assert!(by(&[EventKind::VmStarted], Some("web")).passes(&started));
        assert!(by(&[], Some("00000000000000aa")).passes(&started));
        for other in [by(&[EventKind::VmEnded], None), by(&[], Some("web.1"))] {
            assert!(!other.passes(&started) && other.passes(&gap), "{other:?}");
        }
    }
}
