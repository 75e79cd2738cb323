use std::collections::BTreeMap;
use std::time::Duration;

use proptest::prelude::*;

use super::*;

fn host(id: u64) -> HostId {
    HostId::new(id).expect("not 0")
}

fn print(byte: u8) -> Fingerprint {
    Fingerprint::from_bytes([byte; 32])
}

fn at(s: u64) -> Now {
    Now { monotonic: Duration::from_secs(s), unix_s: 1_000_000 + s }
}

fn after(ms: u64) -> Now {
    Now { monotonic: Duration::from_millis(ms), unix_s: 1_000_000 }
}

fn alone(id: u64, name: &str) -> Membership {
    let byte = u8::try_from(id % 250).expect("small");
    Membership::alone(host(id), name, &format!("{name}:1"), print(byte)).expect("good")
}

/// A book of host 1 with hosts 2 to `n`.
fn book(n: u64) -> Membership {
    let mut it = alone(1, "h1");
    for id in 2..=n {
        let byte = u8::try_from(id).expect("small");
        it.admit(host(id), &format!("h{id}"), &format!("h{id}:1"), print(byte), at(0))
            .expect("room");
    }
    it
}

/// The same book, as another of its members has it.
fn book_of(book: &Membership, id: u64) -> Membership {
    let entry = book.get(host(id)).expect("known").clone();
    let mut it = Membership::of(entry, BTreeMap::new());
    let entries: Vec<Entry> = book.entries().cloned().collect();
    it.merge(&entries, at(0)).expect("good");
    it
}

/// A heartbeat from one to the other, and its answer.
fn exchange(from: &mut Membership, to: &mut Membership, now: Now) -> Result<(), HeartbeatError> {
    let sent = from.heartbeat_to(to.own(), None);
    let (answer, _) = to.on_heartbeat(from.own(), &sent, None, now)?;
    from.on_answer(to.own(), &answer, now)?;
    Ok(())
}

#[test]
fn hosts_come_and_go_and_errors_name_them() {
    let mut book = book(3);
    let error = book.admit(host(9), "h2", "x:1", print(9), at(0)).expect_err("taken");
    assert_eq!(error.to_string(), "host `h2` is in the cluster already, as 0000000000000002");
    let error = book.admit(host(2), "new", "x:1", print(9), at(0)).expect_err("taken");
    assert_eq!(error.to_string(), "host id 0000000000000002 is in the cluster already, as `h2`");
    assert_eq!(book.find("h3").expect("there").id, host(3));
    assert_eq!(book.find("0000000000000003").expect("there").id, host(3));
    let error = book.find("h9").expect_err("no such host").to_string();
    assert_eq!(error, "no host `h9` in the cluster");

    assert_eq!(book.drain(host(2), at(1)), Ok(true));
    assert_eq!(book.drain(host(2), at(1)), Ok(false));
    assert_eq!(book.activate(host(2), at(1)), Ok(true));
    book.leave(host(2), at(2)).expect("a member");
    assert_eq!(book.members().count(), 2);
    for error in [
        book.find("h2").expect_err("left"),
        book.find("0000000000000002").expect_err("left"),
        book.drain(host(2), at(3)).expect_err("left"),
    ] {
        assert_eq!(error.to_string(), "host `h2` (0000000000000002) has left the cluster");
    }
    assert_eq!(book.member_by_fingerprint(print(2)), None);
    assert!(book.admit(host(2), "h2", "x:1", print(9), at(0)).is_err(), "an id is used once");
    book.admit(host(4), "h2", "x:1", print(9), at(4)).expect("the name is free again");
    assert_eq!(book.find("h2").expect("there").id, host(4));
}

#[test]
fn silence_makes_a_host_suspect_and_then_gone() {
    let mut book = book(2);
    let mut other = book_of(&book, 2);
    book.begin(after(1000));
    assert_eq!(book.liveness(host(1), after(1000)), Liveness::Alive);
    assert_eq!(book.liveness(host(2), after(1000)), Liveness::Suspect, "not heard yet");
    assert_eq!(book.liveness(host(2), after(16_000)), Liveness::Gone, "never heard");
    assert_eq!(book.liveness(host(9), after(1000)), Liveness::Gone, "no member");
    exchange(&mut other, &mut book, after(20_000)).expect("members");
    assert_eq!(book.liveness(host(2), after(23_499)), Liveness::Alive);
    assert_eq!(book.silent_for(host(2), after(23_499)), Some(Duration::from_millis(3499)));
    assert_eq!(book.liveness(host(2), after(23_500)), Liveness::Suspect);
    assert_eq!(book.liveness(host(2), after(35_000)), Liveness::Gone);
    exchange(&mut other, &mut book, after(40_000)).expect("members");
    assert_eq!(book.liveness(host(2), after(40_000)), Liveness::Alive, "back again");
    book.leave(host(2), after(40_000)).expect("a member");
    assert_eq!(book.liveness(host(2), after(40_000)), Liveness::Gone);
}

#[test]
fn each_gets_a_heartbeat_in_its_turn_and_the_gone_seldom() {
    let mut book = book(4);
    let mut other = book_of(&book, 2);
    book.begin(after(0));
    assert_eq!(book.due(after(0), 2), [host(2), host(3)], "no more than asked for");
    assert_eq!(book.due(after(1), 9), [host(4)], "then the rest");
    assert_eq!(book.due(after(1), 9), []);
    assert_eq!(book.next_due(after(1)), Some(Duration::from_secs(1)));
    let mut sent = [0; 5];
    for ms in (0..100_000).step_by(100) {
        if ms % 1000 == 0 {
            exchange(&mut other, &mut book, after(ms)).expect("members");
        }
        for id in book.due(after(ms), 9) {
            sent[usize::try_from(id.get()).expect("small")] += 1;
        }
    }
    assert_eq!(sent[1], 0, "not itself");
    assert!((98..=101).contains(&sent[2]), "{sent:?}");
    // 15 until they were gone, then every ten seconds.
    assert!((21..=26).contains(&sent[3]) && sent[3] == sent[4], "{sent:?}");
}

#[test]
fn a_heartbeat_carries_entries_only_where_books_differ() {
    let mut first = book(3);
    let mut second = book_of(&first, 2);
    assert_eq!(first.digest(), second.digest());
    exchange(&mut first, &mut second, at(1)).expect("members");
    let small = first.heartbeat_to(host(2), Some(Room { memory_bytes: 1, vcpus: 2 }));
    assert!(small.entries.is_empty());
    assert!(serde_json::to_vec(&small).expect("plain").len() < 120);

    first.drain(host(3), at(2)).expect("a member");
    assert_eq!(first.due(at(2), 9), [host(2), host(3)], "news goes at once");
    let news = first.heartbeat_to(host(2), None);
    assert_eq!(news.entries.len(), 3);
    let (answer, merged) = second.on_heartbeat(host(1), &news, None, at(2)).expect("a member");
    assert_eq!(merged.changed, BTreeSet::from([host(3)]));
    assert!(answer.entries.is_empty(), "they agree now");
    first.on_answer(host(2), &answer, at(2)).expect("a member");
    assert_eq!(first.due(at(2), 9), [], "nothing to add");

    // The other way: the answer carries them.
    second.activate(host(3), at(3)).expect("a member");
    let sent = first.heartbeat_to(host(2), None);
    assert!(sent.entries.is_empty());
    let (answer, _) = second.on_heartbeat(host(1), &sent, None, at(3)).expect("a member");
    assert_eq!(answer.entries.len(), 3);
    let merged = first.on_answer(host(2), &answer, at(3)).expect("a member");
    assert_eq!(merged.changed, BTreeSet::from([host(3)]));
}

#[test]
fn who_is_no_member_is_not_listened_to() {
    let mut first = book(3);
    let mut second = book_of(&first, 2);
    first.leave(host(2), at(1)).expect("a member");
    let error = exchange(&mut second, &mut first, at(2)).expect_err("it has left");
    assert_eq!(error.to_string(), "host 0000000000000002 is no member of this cluster");
    let own = first.heartbeat_to(host(3), None);
    assert!(first.on_heartbeat(host(1), &own, None, at(2)).is_err(), "not even itself");
}

#[test]
fn who_leaves_tells_everybody_and_then_is_silent() {
    let mut first = book(3);
    let mut second = book_of(&first, 2);
    let mut third = book_of(&first, 3);
    exchange(&mut first, &mut second, at(1)).expect("members");
    first.leave(host(1), at(2)).expect("a member");
    assert_eq!(first.due(at(2), 9), [host(2), host(3)]);
    exchange(&mut first, &mut second, at(2)).expect("they take the farewell");
    exchange(&mut first, &mut third, at(2)).expect("they take the farewell");
    // The third did not know that the first knew it: one more exchange tells.
    for ms in 3..10 {
        for id in first.due(at(ms), 9) {
            let other = if id == host(2) { &mut second } else { &mut third };
            // It may be refused by now; then it knows.
            let _ = exchange(&mut first, other, at(ms));
        }
    }
    assert!(second.member(host(1)).is_none() && third.member(host(1)).is_none());
    assert!(first.has_left());
}

#[test]
fn a_host_that_was_removed_accepts_it() {
    let mut first = book(2);
    let mut second = book_of(&first, 2);
    first.leave(host(2), at(1)).expect("a member");
    let entries: Vec<Entry> = first.entries().cloned().collect();
    let merged = second.merge(&entries, at(2)).expect("good");
    assert!(merged.removed && second.has_left());
    assert!(!second.merge(&entries, at(2)).expect("good").removed, "told once");
}

#[test]
fn a_removal_stands_whatever_else_was_said_meanwhile() {
    let mut first = book(3);
    let mut second = book_of(&first, 2);
    first.leave(host(3), at(1)).expect("a member");
    for s in 1..5 {
        second.drain(host(3), at(s)).expect("a member, there");
        second.activate(host(3), at(s)).expect("a member, there");
    }
    for s in 5..8 {
        exchange(&mut second, &mut first, at(s)).expect("members");
    }
    assert!(first.member(host(3)).is_none() && second.member(host(3)).is_none());
}

#[test]
fn of_itself_a_host_knows_best() {
    let mut first = book(2);
    let mut second = book_of(&first, 2);
    // It listens elsewhere after a start, with a book that lacks what was said of it since.
    first.drain(host(2), at(1)).expect("a member");
    first.activate(host(2), at(1)).expect("a member");
    first.drain(host(2), at(1)).expect("a member");
    assert_eq!(second.set_own_address("elsewhere:2", at(2)), Ok(true));
    assert_eq!(second.set_own_address("elsewhere:2", at(2)), Ok(false));
    for s in 3..6 {
        exchange(&mut second, &mut first, at(s)).expect("members");
    }
    let known = first.get(host(2)).expect("there");
    assert_eq!((known.address.as_str(), known.state), ("elsewhere:2", HostState::Draining));
    assert_eq!(first.digest(), second.digest());
    // A forged certificate for it, from a member that errs.
    let mut forged = known.clone();
    forged.fingerprint = print(99);
    forged.incarnation += 10;
    first.merge(&[forged], at(7)).expect("can't be told from right");
    for s in 8..11 {
        exchange(&mut second, &mut first, at(s)).expect("members");
    }
    assert_eq!(first.get(host(2)).expect("there").fingerprint, print(2));
}

#[test]
fn of_two_of_one_name_the_higher_id_gets_another() {
    // Admitted on both sides of a partition.
    let mut first = book(2);
    let mut second = book_of(&first, 2);
    first.admit(host(5), "new", "x:1", print(5), at(1)).expect("free");
    second.admit(host(6), "new", "y:1", print(6), at(1)).expect("free");
    let mut fifth = book_of(&first, 5);
    let mut sixth = book_of(&second, 6);
    for s in 2..4 {
        exchange(&mut first, &mut second, at(s)).expect("members");
    }
    let error = first.find("new").expect_err("two").to_string();
    assert!(error.ends_with("0000000000000005, 0000000000000006"), "{error}");
    for s in 4..10 {
        exchange(&mut fifth, &mut first, at(s)).expect("members");
        exchange(&mut first, &mut second, at(s)).expect("members");
        exchange(&mut sixth, &mut second, at(s)).expect("members");
    }
    for book in [&first, &second, &fifth, &sixth] {
        assert_eq!(book.find("new").expect("one").id, host(5));
        assert_eq!(book.find("new-0000").expect("one").id, host(6));
        assert_eq!(book.digest(), first.digest());
    }
}

#[test]
fn what_can_not_be_is_not_taken_and_changes_nothing() {
    let mut first = book(2);
    let before = first.to_json();
    let good = Entry { id: host(3), ..first.get(host(2)).expect("there").clone() };
    let bad = Entry { id: host(4), name: "b b".into(), ..good.clone() };
    let error = first.merge(&[good.clone(), bad], at(1)).expect_err("one is bad");
    assert!(error.to_string().contains("0000000000000004"), "{error}");
    let many: Vec<Entry> = (0..HOSTS_MAX as u64)
        .map(|n| Entry { id: host(100 + n), name: format!("n{n}"), ..good.clone() })
        .collect();
    let error = first.merge(&many, at(1)).expect_err("too many").to_string();
    assert!(error.starts_with("4098 hosts"), "{error}");
    assert_eq!(first.to_json(), before);
    first.merge(&many[..HOSTS_MAX - 2], at(1)).expect("just as many as may be");
    let full = first.admit(host(7), "h7", "x:1", print(7), at(1));
    assert_eq!(full, Err(MemberError::Full));
}

#[test]
fn a_book_is_read_as_it_was_written() {
    let mut first = book(4);
    first.drain(host(3), at(1)).expect("a member");
    first.leave(host(4), at(1)).expect("a member");
    let json = first.to_json();
    let read = Membership::from_json(&json).expect("as written");
    assert_eq!(read.to_json(), json);
    assert_eq!((read.own(), read.digest()), (first.own(), first.digest()));
    let text = String::from_utf8(json).expect("text");
    let twice = text.replace("\"id\": \"0000000000000003\"", "\"id\": \"0000000000000002\"");
    let error = Membership::from_json(twice.as_bytes()).expect_err("twice").to_string();
    assert_eq!(error, "it has host 0000000000000002 twice");
    let lacks = text.replace("\"own\": \"0000000000000001\"", "\"own\": \"0000000000000008\"");
    let error = Membership::from_json(lacks.as_bytes()).expect_err("lacks").to_string();
    assert_eq!(error, "it lacks this host, 0000000000000008");
}

#[test]
fn a_tombstone_stays_until_all_have_seen_that_it_is_right() {
    const WEEK_S: u64 = TOMBSTONE_S;
    let mut first = book(4);
    let mut second = book_of(&first, 2);
    let mut stale = book_of(&first, 3);
    first.leave(host(4), at(1)).expect("a member");
    exchange(&mut first, &mut second, at(2)).expect("members");
    exchange(&mut first, &mut second, at(3)).expect("members");
    assert!(!first.forget(at(WEEK_S + 10)), "host 3 has not been heard");
    // It comes back and would bring host 4 back.
    exchange(&mut stale, &mut first, at(WEEK_S + 20)).expect("members");
    assert!(first.member(host(4)).is_none());
    exchange(&mut stale, &mut first, at(WEEK_S + 21)).expect("members");
    assert!(stale.member(host(4)).is_none());
    assert!(first.forget(at(WEEK_S + 22)), "now all know");
    assert_eq!(first.get(host(4)), None);
    // Those that still have it don't bring it back as a member, nor stop agreeing.
    exchange(&mut second, &mut first, at(WEEK_S + 23)).expect("members");
    assert!(first.member(host(4)).is_none());
    assert_eq!(first.digest(), second.digest());
}

fn any_entry() -> impl Strategy<Value = Entry> {
    let state = prop_oneof![
        3 => Just(HostState::Active),
        2 => Just(HostState::Draining),
        1 => (0..3u64).prop_map(|at_unix_s| HostState::Left { at_unix_s }),
    ];
    (2..5u64, 0..3u8, 0..3u8, 0..2u8, state, 0..4u64).prop_map(
        |(id, name, address, fingerprint, state, incarnation)| Entry {
            id: host(id),
            name: format!("n{name}"),
            address: format!("a{address}:1"),
            fingerprint: print(fingerprint),
            state,
            incarnation,
        },
    )
}

fn merged(batches: &[Vec<Entry>]) -> BTreeMap<HostId, Entry> {
    let mut book = alone(1, "own");
    for batch in batches {
        book.merge(batch, at(1)).expect("all good");
    }
    book.entries().map(|entry| (entry.id, entry.clone())).collect()
}

/// What happens to hosts that may or may not hear each other.
#[derive(Debug, Clone)]
enum Step {
    Exchange(usize, usize),
    Drain(usize, u64),
    Activate(usize, u64),
    Leave(usize, u64),
    Move(usize, u8),
    Admit(usize, u8),
    Restart(usize),
    Later(u64),
    Forget(usize),
}

const NODES: usize = 4;

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let node = 0..NODES;
    let of = 1..=5u64;
    prop::collection::vec(
        prop_oneof![
            12 => (node.clone(), node.clone()).prop_map(|(a, b)| Step::Exchange(a, b)),
            1 => (node.clone(), of.clone()).prop_map(|(a, b)| Step::Drain(a, b)),
            1 => (node.clone(), of).prop_map(|(a, b)| Step::Activate(a, b)),
            1 => node.clone().prop_map(|a| Step::Leave(a, 5)),
            1 => (node.clone(), 0..3u8).prop_map(|(a, b)| Step::Move(a, b)),
            1 => (node.clone(), 0..3u8).prop_map(|(a, b)| Step::Admit(a, b)),
            1 => node.clone().prop_map(Step::Restart),
            2 => prop_oneof![Just(1), Just(TOMBSTONE_S)].prop_map(Step::Later),
            2 => node.prop_map(Step::Forget),
        ],
        1..80,
    )
}

proptest! {
    #[test]
    fn merging_is_commutative_associative_and_idempotent(
        batches in prop::collection::vec(prop::collection::vec(any_entry(), 0..6), 1..5),
        order in any::<prop::sample::Index>(),
    ) {
        let all = merged(&batches);
        let mut other = batches.clone();
        other.rotate_left(order.index(batches.len()));
        other.reverse();
        other.iter_mut().for_each(|batch| batch.reverse());
        prop_assert_eq!(&merged(&other), &all, "in another order");
        prop_assert_eq!(&merged(&[batches.concat()]), &all, "at once");
        let twice = [batches.clone(), batches].concat();
        prop_assert_eq!(&merged(&twice), &all, "twice");
        let of_all: Vec<Entry> = all.values().cloned().collect();
        prop_assert_eq!(&merged(&[of_all]), &all, "as a book");
    }

    #[test]
    fn who_hear_each_other_come_to_agree_and_none_comes_back(steps in steps(), admits in any::<bool>()) {
        // Hosts 1 to 4 run; 5 is in the book from the start, and is silent, as those that are
        // admitted.
        let first = book(5);
        let mut nodes: Vec<Membership> =
            (1..=NODES as u64).map(|id| book_of(&first, id)).collect();
        let mut now = at(1);
        let mut removed = BTreeSet::new();
        let mut next_id = 10;
        let talk = |nodes: &mut Vec<Membership>, a: usize, b: usize, now: Now| {
            if a != b {
                let (low, high) = nodes.split_at_mut(a.max(b));
                let (low, high) = (&mut low[a.min(b)], &mut high[0]);
                let (from, to) = if a < b { (low, high) } else { (high, low) };
                exchange(from, to, now).expect("all four are members throughout");
            }
        };
        for step in steps {
            now.monotonic += Duration::from_millis(1);
            match step {
                Step::Exchange(a, b) => talk(&mut nodes, a, b, now),
                Step::Drain(a, id) => drop(nodes[a].drain(host(id), now)),
                Step::Activate(a, id) => drop(nodes[a].activate(host(id), now)),
                Step::Leave(a, id) => {
                    if nodes[a].leave(host(id), now).is_ok() {
                        removed.insert((a, host(id)));
                    }
                }
                Step::Move(a, to) => {
                    nodes[a].set_own_address(&format!("moved{to}:1"), now).expect("good");
                }
                // No host is forgotten before all have agreed, and these never do.
                Step::Admit(..) if !admits => {}
                Step::Admit(a, name) => {
                    next_id += 1;
                    let byte = u8::try_from(next_id).expect("at most 80");
                    drop(nodes[a].admit(host(next_id), &format!("new{name}"), "x:1", print(byte), now));
                }
                Step::Restart(a) => {
                    nodes[a] = Membership::from_json(&nodes[a].to_json()).expect("as written");
                    nodes[a].begin(now);
                }
                Step::Later(s) => {
                    now.unix_s += s;
                    now.monotonic += Duration::from_secs(s);
                }
                Step::Forget(a) => {
                    nodes[a].forget(now);
                }
            }
            for (a, id) in &removed {
                prop_assert!(nodes[*a].member(*id).is_none(), "{} came back to {}", id, a);
            }
        }
        for _ in 0..4 {
            for (a, b) in [(0, 1), (1, 2), (2, 3), (3, 0), (0, 2), (1, 3)] {
                now.monotonic += Duration::from_millis(1);
                talk(&mut nodes, a, b, now);
            }
        }
        for node in &nodes {
            prop_assert_eq!(node.digest(), nodes[0].digest());
            for (_, id) in &removed {
                prop_assert!(node.member(*id).is_none(), "{} came back", id);
            }
        }
    }
}

#[test]
fn a_host_is_told_that_it_is_removed_before_it_is() {
    let first = book(3);
    let mut second = book_of(&first, 2);
    let told = first.heartbeat_of_removal(host(2), at(1)).expect("a member");
    assert!(first.member(host(2)).is_some(), "it is one until it was told");
    let (answer, merged) = second.on_heartbeat(host(1), &told, None, at(1)).expect("a member's");
    assert!(merged.removed && second.has_left());
    assert_eq!(answer.digest, told.digest, "they agree on who is left");
    let error = first.heartbeat_of_removal(host(9), at(1)).expect_err("no such host");
    assert_eq!(error.to_string(), "no host `0000000000000009` in the cluster");
}
