//! What readers of events are told of the other hosts: who joined, fell silent, returned, is gone.
//!
//! ```text
//!   joined ──► Awaited ──heard──► Alive ──silence──► Silent ──more of it──► Gone
//!                                   ▲──────── returned ────────┴──────────────┘
//!   any of them ── left ──► forgotten
//! ```
//!
//! Promises: every change that two looks differ by is told once; a host that is gone by silence was
//! told as silent before. A decision without I/O: book and time are passed in.

use std::collections::BTreeMap;

use vmfork_api::{EventHost, Happening, HostGoneCause};
use vmfork_cluster::{Entry, HostId, Liveness, Membership, Now};

/// The members as readers know them.
#[derive(Debug, Default)]
pub(super) struct Watched(BTreeMap<HostId, Known>);

#[derive(Debug)]
struct Known {
    host: EventHost,
    stands: Stands,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stands {
    /// It was not heard yet, in the life of this daemon.
    Awaited,
    Alive,
    Silent,
    Gone,
}

impl Watched {
    /// The members of this book joined earlier: they are not told.
    pub(super) fn begin(book: &Membership) -> Self {
        let known = book.members().map(|entry| (entry.id, Known::new(entry)));
        Self(known.collect())
    }

    /// What has changed since the last look.
    pub(super) fn look(&mut self, book: &Membership, now: Now) -> Vec<Happening> {
        let mut told = Vec::new();
        self.0.retain(|id, known| {
            let stays = book.member(*id).is_some();
            if !stays {
                let host = known.host.clone();
                told.push(Happening::HostGone { host, cause: HostGoneCause::Left });
            }
            stays
        });
        for entry in book.members() {
            let known = self.0.entry(entry.id).or_insert_with(|| {
                told.push(Happening::HostJoined { host: in_event(entry) });
                Known::new(entry)
            });
            known.host = in_event(entry);
            let was_heard = entry.id == book.own() || book.silent_for(entry.id, now).is_some();
            known.look(book.liveness(entry.id, now), was_heard, &mut told);
        }
        told
    }
}

impl Known {
    fn new(entry: &Entry) -> Self {
        Self { host: in_event(entry), stands: Stands::Awaited }
    }

    fn look(&mut self, liveness: Liveness, was_heard: bool, told: &mut Vec<Happening>) {
        let stands = match liveness {
            Liveness::Alive => Stands::Alive,
            // A host that joined this moment is not silent.
            Liveness::Suspect if !was_heard => return,
            Liveness::Suspect => Stands::Silent,
            Liveness::Gone => Stands::Gone,
        };
        let before = std::mem::replace(&mut self.stands, stands);
        let host = || self.host.clone();
        match (before, stands) {
            (Stands::Silent | Stands::Gone, Stands::Alive) => {
                told.push(Happening::HostReturned { host: host() });
            }
            // It was heard, and is silent again, between two looks.
            (Stands::Gone, Stands::Silent) => {
                told.push(Happening::HostReturned { host: host() });
                told.push(Happening::HostSilent { host: host() });
            }
            (Stands::Awaited | Stands::Alive, Stands::Silent) => {
                told.push(Happening::HostSilent { host: host() });
            }
            (Stands::Awaited | Stands::Alive, Stands::Gone) => {
                told.push(Happening::HostSilent { host: host() });
                told.push(Happening::HostGone { host: host(), cause: HostGoneCause::Silent });
            }
            (Stands::Silent, Stands::Gone) => {
                told.push(Happening::HostGone { host: host(), cause: HostGoneCause::Silent });
            }
            _ => {}
        }
    }
}

fn in_event(entry: &Entry) -> EventHost {
    EventHost { id: entry.id.to_string(), name: entry.name.clone(), address: entry.address.clone() }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use vmfork_cluster::{Cluster, Fingerprint, Heartbeat};

    use super::*;

    fn at(seconds: u64) -> Now {
        Now { monotonic: Duration::from_secs(seconds), unix_s: 1_000 + seconds }
    }

    fn other() -> HostId {
        HostId::new(0xb).expect("not 0")
    }

    fn book() -> Membership {
        Cluster::init("a", "10.0.0.1:7070").expect("good").members
    }

    fn admit(book: &mut Membership, seconds: u64) {
        let shown = Fingerprint::of(&rustls::pki_types::CertificateDer::from(vec![1]));
        book.admit(other(), "b", "10.0.0.2:7070", shown, at(seconds)).expect("new");
    }

    fn hear(book: &mut Membership, seconds: u64) {
        let beat = Heartbeat { digest: book.digest(), room: None, entries: Vec::new() };
        book.on_heartbeat(other(), &beat, None, at(seconds)).expect("a member");
    }

    /// What a look tells, with the name of the host.
    fn look(watched: &mut Watched, book: &Membership, seconds: u64) -> Vec<String> {
        let told = watched.look(book, at(seconds));
        told.iter()
            .map(|what| match what {
                Happening::HostJoined { host } => format!("{} joined", host.name),
                Happening::HostSilent { host } => format!("{} silent", host.name),
                Happening::HostReturned { host } => format!("{} returned", host.name),
                Happening::HostGone { host, cause } => format!("{} gone {cause:?}", host.name),
                other => panic!("{other:?} is not of a host"),
            })
            .collect()
    }

    #[test]
    fn a_host_joins_falls_silent_is_gone_and_returns() {
        let mut book = book();
        let mut watched = Watched::begin(&book);
        assert!(look(&mut watched, &book, 0).is_empty(), "what was so before is not told");
        admit(&mut book, 1);
        assert_eq!(look(&mut watched, &book, 1), ["b joined"]);
        assert!(look(&mut watched, &book, 6).is_empty(), "it is awaited");
        hear(&mut book, 7);
        assert!(look(&mut watched, &book, 8).is_empty());
        assert_eq!(look(&mut watched, &book, 11), ["b silent"]);
        assert!(look(&mut watched, &book, 12).is_empty(), "once");
        assert_eq!(look(&mut watched, &book, 22), ["b gone Silent"]);
        assert!(look(&mut watched, &book, 60).is_empty(), "once");
        hear(&mut book, 61);
        assert_eq!(look(&mut watched, &book, 62), ["b returned"]);
        assert_eq!(look(&mut watched, &book, 90), ["b silent", "b gone Silent"]);
        hear(&mut book, 91);
        assert_eq!(look(&mut watched, &book, 96), ["b returned", "b silent"]);
    }

    #[test]
    fn a_host_that_leaves_is_gone_for_good() {
        let mut book = book();
        let mut watched = Watched::default();
        admit(&mut book, 1);
        hear(&mut book, 1);
        let mut joined = look(&mut watched, &book, 1);
        joined.sort();
        assert_eq!(joined, ["a joined", "b joined"], "a new member sees all of them join");
        book.leave(other(), at(2)).expect("a member");
        assert_eq!(look(&mut watched, &book, 2), ["b gone Left"]);
        book.leave(book.own(), at(3)).expect("a member");
        assert_eq!(look(&mut watched, &book, 3), ["a gone Left"]);
        assert!(look(&mut watched, &book, 99).is_empty());
    }

    #[test]
    fn a_member_that_is_never_heard_is_gone_in_the_end() {
        let mut book = book();
        admit(&mut book, 0);
        let mut watched = Watched::begin(&book);
        assert!(look(&mut watched, &book, 10).is_empty());
        assert_eq!(look(&mut watched, &book, 15), ["b silent", "b gone Silent"]);
    }
}
