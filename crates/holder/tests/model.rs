//! The table against a plain map and the rules in words.

use std::collections::BTreeMap;
use std::rc::Rc;

use proptest::prelude::*;
use vmfork_holder::proto::{Refusal, Reply, Request};
use vmfork_holder::{Kind, Name, PeerId, Table};

#[derive(Debug, Clone)]
enum Step {
    Ask { peer: u64, request: Request, with_fd: bool },
    Gone { peer: u64 },
    Wait { ms: u64 },
}

fn name() -> impl Strategy<Value = Name> {
    prop::sample::select(vec!["a", "b", "c", "d"]).prop_map(|text| Name::new(text).expect("a name"))
}

fn request() -> impl Strategy<Value = Request> {
    prop_oneof![
        3 => (50..200u32).prop_map(|linger_ms| Request::Hello { linger_ms }),
        6 => (name(), 0..3u32, prop::collection::vec(any::<u8>(), 0..3))
            .prop_map(|(name, kind, note)| Request::Put { name, kind: Kind(kind), note }),
        4 => name().prop_map(|name| Request::Get { name }),
        4 => prop::option::of(name()).prop_map(|after| Request::List { after }),
        3 => name().prop_map(|name| Request::Drop { name }),
        1 => Just(Request::End),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        12 => (0..3u64, request(), prop::bool::weighted(0.1)).prop_map(|(peer, request, wrong)| {
            let with_fd = matches!(request, Request::Put { .. }) != wrong;
            Step::Ask { peer, request, with_fd }
        }),
        2 => (0..3u64).prop_map(|peer| Step::Gone { peer }),
        2 => (0..150u64).prop_map(|ms| Step::Wait { ms }),
    ]
}

/// What is kept, who may change it, and when it is over.
struct Model {
    map: BTreeMap<Name, (u64, Kind, Vec<u8>, u32)>,
    owner: Option<u64>,
    generation: u32,
    linger_ms: u64,
    alone_since_ms: u64,
    ended: bool,
}

impl Model {
    /// The reply, and the number of the fd that goes with it.
    fn ask(&mut self, peer: u64, request: &Request, fd: Option<u64>) -> (Reply, Option<u64>) {
        let refused = |refusal| (Reply::Refused(refusal), None);
        if fd.is_some() != matches!(request, Request::Put { .. }) {
            return refused(Refusal::WrongFd);
        }
        let open_to_all = matches!(request, Request::Hello { .. } | Request::List { .. });
        if !open_to_all && self.owner != Some(peer) {
            return refused(Refusal::NotOwner);
        }
        let entry = |name: &Name, (_, kind, note, generation): &(u64, Kind, Vec<u8>, u32)| {
            let (name, kind, note) = (name.clone(), *kind, note.clone());
            Reply::Entry { generation: *generation, name, kind, note }
        };
        match request {
            Request::Hello { linger_ms } => {
                self.generation += 1;
                self.owner = Some(peer);
                self.linger_ms = u64::from(*linger_ms);
                (Reply::Welcome { generation: self.generation }, None)
            }
            Request::Put { name, kind, note } => {
                let fd = fd.expect("checked above");
                self.map.insert(name.clone(), (fd, *kind, note.clone(), self.generation));
                (Reply::Done, None)
            }
            Request::Get { name } => match self.map.get_mut(name) {
                None => refused(Refusal::NoSuchName),
                Some(held) => {
                    held.3 = self.generation;
                    (entry(name, held), Some(held.0))
                }
            },
            Request::List { after } => {
                let next = self.map.iter().find(|(name, _)| Some(*name) > after.as_ref());
                next.map_or(refused(Refusal::NoSuchName), |(name, held)| (entry(name, held), None))
            }
            Request::Drop { name } => match self.map.remove(name) {
                None => refused(Refusal::NoSuchName),
                Some(_) => (Reply::Done, None),
            },
            Request::End => {
                self.map.clear();
                self.ended = true;
                (Reply::Done, None)
            }
        }
    }
}

proptest! {
    #[test]
    fn the_table_is_a_map_with_one_owner_that_closes_what_it_gives_up(
        steps in prop::collection::vec(step(), 0..80)
    ) {
        // An fd: its number, and a count of its copies.
        let alive = Rc::new(());
        let mut table = Table::new(0, 120);
        let mut model = Model {
            map: BTreeMap::new(),
            owner: None,
            generation: 0,
            linger_ms: 120,
            alone_since_ms: 0,
            ended: false,
        };
        let mut now_ms = 0;
        for (i, step) in (0u64..).zip(steps) {
            match step {
                Step::Ask { peer, request, with_fd } => {
                    let expected = model.ask(peer, &request, with_fd.then_some(i));
                    let fd = with_fd.then(|| (i, Rc::clone(&alive)));
                    let (reply, fd) = table.request(PeerId(peer), request, fd);
                    prop_assert_eq!((reply, fd.map(|(number, _)| *number)), expected);
                }
                Step::Gone { peer } => {
                    table.gone(PeerId(peer), now_ms);
                    if model.owner == Some(peer) {
                        (model.owner, model.alone_since_ms) = (None, now_ms);
                    }
                }
                Step::Wait { ms } => {
                    now_ms += ms;
                    table.tick(now_ms);
                    if model.owner.is_none() && now_ms >= model.alone_since_ms + model.linger_ms {
                        model.map.clear();
                        model.ended = true;
                    }
                }
            }
            prop_assert_eq!(table.has_ended(), model.ended);
            prop_assert_eq!(Rc::strong_count(&alive) - 1, model.map.len(), "an fd leaks or is lost");
            if model.ended {
                break;
            }
        }
    }
}
