//! The book against a model: the plainest statement of what each call means.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use proptest::prelude::*;
use rustix::io::Errno;

use super::book::{Action, Answer, CloneSpec, LEASE, Refusal, TicketBook};

type Book = TicketBook<u32, u32>;
type Act = Action<u32, u32>;

const NOW: Duration = Duration::from_secs(1000);

fn errno(action: &Act) -> Option<(u32, Errno)> {
    match action {
        Action::Answer(reply, Answer::Error(refusal)) => Some((*reply, refusal.errno)),
        _ => None,
    }
}

fn errnos(actions: &[Act]) -> Vec<(u32, Errno)> {
    actions.iter().filter_map(errno).collect()
}

/// A book with ticket 1 of `count` workers, all running.
fn running(cpus: u32, count: u32, hierarchical: bool) -> (Book, Vec<CloneSpec>) {
    let mut book = Book::new(cpus);
    let Action::Allocate { ticket: 1, vms } = book.request(1, count, hierarchical)[0] else {
        panic!("allocate")
    };
    book.allocated(1, Ok(vms), NOW);
    let Action::StartClones { vms, .. } = book.clone_vm(2, 1).remove(0) else { panic!("start") };
    for vm in &vms {
        assert_eq!(book.vm_running(1, vm.vmid), []);
    }
    let answer = Action::Answer(2, Answer::Ok { value: u64::from(count) });
    assert_eq!(book.cloned(1), [answer]);
    (book, vms)
}

fn ended(actions: &[Act]) -> Option<Vec<(u32, Option<&str>)>> {
    actions.iter().find_map(|action| match action {
        Action::Answer(_, Answer::Ended { workers }) => {
            Some(workers.iter().map(|w| (w.vmid, w.error.as_deref())).collect())
        }
        _ => None,
    })
}

#[test]
fn a_hierarchical_ticket_puts_a_worker_on_each_vcpu_and_the_rest_on_the_last_vm() {
    let (_, vms) = running(4, 10, true);
    let expected = [(1, 4), (5, 4), (9, 2)].map(|(vmid, workers)| CloneSpec { vmid, workers });
    assert_eq!(vms, expected);
    let (_, vms) = running(4, 2, false);
    assert_eq!(vms, [1, 2].map(|vmid| CloneSpec { vmid, workers: 1 }));
}

#[test]
fn what_was_granted_may_be_less_than_what_was_asked() {
    let mut book = Book::new(2);
    assert_eq!(book.request(1, 7, true), [Action::Allocate { ticket: 1, vms: 4 }]);
    let answer = Action::Answer(1, Answer::Ticket { ticket: 1, granted: 6 });
    assert_eq!(book.allocated(1, Ok(3), NOW), [answer]);
    book.request(2, 1, false);
    assert_eq!(errnos(&book.allocated(2, Ok(0), NOW)), [(2, Errno::NOMEM)]);
    book.request(3, 1, false);
    let refusal = Refusal::new(Errno::AGAIN, "quota");
    assert_eq!(errnos(&book.allocated(3, Err(refusal), NOW)), [(3, Errno::AGAIN)]);
    assert_eq!(errnos(&book.request(4, 0, false)), [(4, Errno::INVAL)]);
}

#[test]
fn a_ticket_is_cloned_once_and_is_stale_after_it_was_discarded() {
    let (mut book, _) = running(1, 1, false);
    assert_eq!(errnos(&book.clone_vm(3, 1)), [(3, Errno::INVAL)]);
    assert_eq!(errnos(&book.clone_vm(3, 99)), [(3, Errno::INVAL)]);
    book.exit(4, 1, 1, 1, None);
    assert_eq!(ended(&book.join(5, 1)), Some(vec![(1, None)]));
    for actions in [book.clone_vm(6, 1), book.join(6, 1), book.kill(6, 1), book.receive(6, 1, None)]
    {
        assert_eq!(errnos(&actions), [(6, Errno::STALE)]);
    }
}

#[test]
fn an_unused_ticket_expires_and_gives_its_places_back() {
    let mut book = Book::new(1);
    book.request(1, 2, false);
    assert_eq!(book.next_expiry(), None);
    book.allocated(1, Ok(2), NOW);
    assert_eq!(book.next_expiry(), Some(NOW + LEASE));
    assert_eq!(book.expire(NOW + LEASE - Duration::from_nanos(1)), []);
    assert_eq!(book.expire(NOW + LEASE), [Action::Release { ticket: 1 }]);
    assert_eq!(errnos(&book.clone_vm(2, 1)), [(2, Errno::STALE)]);
}

#[test]
fn join_waits_for_every_worker_and_tells_who_failed() {
    let (mut book, _) = running(2, 4, true);
    assert_eq!(book.join(10, 1), []);
    assert_eq!(book.exit(11, 1, 1, 1, None).len(), 1);
    let last = book.exit(12, 1, 1, 2, Some("exit status 3".into()));
    assert_eq!(last[1], Action::KillVm { ticket: 1, vmid: 1 });
    // Its QEMU is gone then, which is no news of any worker.
    assert_eq!(book.vm_ended(1, 1, "ended"), []);
    let actions = book.vm_ended(1, 3, "QEMU died");
    let (three, four) = ((3, Some("QEMU died")), (4, Some("QEMU died")));
    let expected = vec![(1, None), (2, Some("exit status 3")), three, four];
    assert_eq!(ended(&actions), Some(expected));
}

#[test]
fn kill_ends_vms_before_it_answers_anybody() {
    let (mut book, _) = running(1, 3, false);
    book.exit(9, 1, 2, 2, None);
    book.join(10, 1);
    book.receive(11, 1, Some(1));
    let actions = book.kill(12, 1);
    let kills = [1, 3].map(|vmid| Action::KillVm { ticket: 1, vmid });
    assert_eq!(actions[..2], kills);
    assert_eq!(errnos(&actions), [(11, Errno::PIPE)]);
    let expected = vec![(1, Some("killed")), (2, None), (3, Some("killed"))];
    assert_eq!(ended(&actions), Some(expected));
    assert_eq!(actions.len(), 5);
    // A clone that comes up only now must go.
    assert_eq!(book.vm_running(1, 3), [Action::KillVm { ticket: 1, vmid: 3 }]);
    assert_eq!(book.vm_ended(1, 3, "killed"), []);
}

#[test]
fn clones_that_did_not_start_are_failed_workers_and_no_clone_at_all_is_an_error() {
    let mut book = Book::new(1);
    book.request(1, 2, false);
    book.allocated(1, Ok(2), NOW);
    book.clone_vm(2, 1);
    // The first one is done before the second is even known to have failed.
    book.vm_running(1, 1);
    book.exit(3, 1, 1, 1, None);
    assert_eq!(book.join(4, 1), []);
    assert_eq!(book.vm_ended(1, 2, "no memory"), []);
    let actions = book.cloned(1);
    assert_eq!(actions[0], Action::Answer(2, Answer::Ok { value: 1 }));
    assert_eq!(ended(&actions), Some(vec![(1, None), (2, Some("no memory"))]));

    book.request(5, 1, false);
    book.allocated(2, Ok(1), NOW);
    book.clone_vm(6, 2);
    book.vm_ended(2, 1, "no memory");
    assert_eq!(errnos(&book.cloned(2)), [(6, Errno::IO)]);
    assert_eq!(errnos(&book.join(7, 2)), [(7, Errno::STALE)]);
}

#[test]
fn a_fork_that_failed_as_a_whole_leaves_the_ticket_usable() {
    let mut book = Book::new(1);
    book.request(1, 2, false);
    book.allocated(1, Ok(2), NOW);
    book.clone_vm(2, 1);
    let refusal = Refusal::new(Errno::AGAIN, "the guest did not prepare");
    assert_eq!(errnos(&book.clone_failed(1, refusal, NOW)), [(2, Errno::AGAIN)]);
    assert!(matches!(book.clone_vm(3, 1)[..], [Action::StartClones { ticket: 1, .. }]));
}

#[test]
fn messages_wait_for_receivers_and_receivers_for_messages() {
    let (mut book, _) = running(1, 2, false);
    let incoming = |vmid, message| Answer::Incoming { vmid, message };
    book.send(10, 1, 1, 1, 100);
    book.send(11, 1, 2, 2, 200);
    book.send(12, 1, 1, 1, 101);
    assert_eq!(book.receive(13, 1, Some(2)), [Action::Answer(13, incoming(2, 200))]);
    assert_eq!(book.receive(14, 1, None), [Action::Answer(14, incoming(1, 100))]);
    assert_eq!(book.receive(15, 1, Some(2)), []);
    assert_eq!(book.receive(16, 1, None), [Action::Answer(16, incoming(1, 101))]);
    assert_eq!(book.receive(17, 1, None), []);
    // The first in the line whom it suits gets it.
    let actions = book.send(18, 1, 1, 1, 102);
    assert_eq!(actions[1], Action::Answer(17, incoming(1, 102)));
    book.receive(19, 1, None);
    book.abandon(|reply| *reply == 15);
    let actions = book.send(20, 1, 2, 2, 201);
    assert_eq!(actions[1], Action::Answer(19, incoming(2, 201)));
    // Ended, but not drained; then both.
    book.send(21, 1, 1, 1, 103);
    book.exit(22, 1, 1, 1, None);
    assert_eq!(book.receive(23, 1, Some(1)), [Action::Answer(23, incoming(1, 103))]);
    assert_eq!(errnos(&book.receive(24, 1, Some(1))), [(24, Errno::PIPE)]);
    assert_eq!(book.receive(25, 1, None), []);
    assert_eq!(errnos(&book.vm_ended(1, 2, "killed")), [(25, Errno::PIPE)]);
    assert_eq!(errnos(&book.send(26, 1, 2, 2, 202)), [(26, Errno::PIPE)]);
    assert_eq!(errnos(&book.send(27, 1, 2, 1, 1)), [(27, Errno::INVAL)]);
    assert_eq!(errnos(&book.receive(28, 1, Some(3))), [(28, Errno::INVAL)]);
}

#[test]
fn clones_outlive_their_parent_and_end_when_their_last_worker_has() {
    let (mut book, _) = running(2, 2, true);
    book.request(5, 1, false);
    book.allocated(2, Ok(1), NOW);
    book.send(10, 1, 1, 1, 100);
    assert_eq!(book.parent_ended(), [Action::Release { ticket: 2 }]);
    assert_eq!(errnos(&book.send(11, 1, 1, 1, 101)), [(11, Errno::PIPE)]);
    assert!(book.has_workers());
    assert_eq!(book.exit(12, 1, 1, 1, None).len(), 1);
    let last = book.exit(13, 1, 1, 2, None);
    assert_eq!(last[1], Action::KillVm { ticket: 1, vmid: 1 });
    assert!(!book.has_workers());
}

#[test]
fn a_clones_book_never_takes_its_parents_ticket_for_its_own() {
    let first = (1 << 32) + 1;
    let mut of_clone = Book::numbered_from(2, first);
    assert_eq!(errnos(&of_clone.join(1, 1)), [(1, Errno::STALE)]);
    assert_eq!(of_clone.request(2, 1, false), [Action::Allocate { ticket: first, vms: 1 }]);
    assert_eq!(errnos(&of_clone.clone_vm(3, 1)), [(3, Errno::STALE)]);
}

/// What may happen to a running ticket.
#[derive(Debug, Clone)]
enum Op {
    Send(u32),
    Receive(Option<u32>),
    Exit(u32),
    VmEnded(u32),
    Join,
    Abandon(u32),
    Kill,
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let vmid = 1u32..6;
    let op = prop_oneof![
        6 => vmid.clone().prop_map(Op::Send),
        5 => prop::option::of(vmid.clone()).prop_map(Op::Receive),
        2 => vmid.clone().prop_map(Op::Exit),
        1 => vmid.prop_map(Op::VmEnded),
        1 => Just(Op::Join),
        2 => (0u32..60).prop_map(Op::Abandon),
        1 => Just(Op::Kill),
    ];
    prop::collection::vec(op, 0..60)
}

/// Says what each call means by searching lists.
#[derive(Default)]
struct Model {
    alive: BTreeSet<u32>,
    queue: Vec<(u32, u32)>,
    receivers: Vec<(u32, Option<u32>)>,
    joins: Vec<u32>,
    discarded: bool,
    /// What each request was answered with, in a word.
    answers: BTreeMap<u32, String>,
}

impl Model {
    fn say(&mut self, reply: u32, answer: impl Into<String>) {
        assert!(self.answers.insert(reply, answer.into()).is_none());
    }

    fn settle(&mut self) {
        while let Some((place, message)) =
            self.receivers.iter().enumerate().find_map(|(place, (_, of))| {
                let suits = |(vmid, _): &(u32, u32)| of.is_none_or(|of| of == *vmid);
                self.queue.iter().position(suits).map(|message| (place, message))
            })
        {
            let (reply, _) = self.receivers.remove(place);
            let (vmid, message) = self.queue.remove(message);
            self.say(reply, format!("{vmid} {message}"));
        }
        let alive = self.alive.clone();
        let hopeless = |of: &Option<u32>| match of {
            None => alive.is_empty(),
            Some(of) => !alive.contains(of),
        };
        for (reply, _) in self.receivers.extract_if(.., |(_, of)| hopeless(of)).collect::<Vec<_>>()
        {
            self.say(reply, "PIPE");
        }
        if self.alive.is_empty() && !self.joins.is_empty() {
            self.discarded = true;
            for reply in std::mem::take(&mut self.joins) {
                self.say(reply, "ended");
            }
        }
    }
}

fn word(answer: Answer<u32>) -> String {
    match answer {
        Answer::Ok { .. } => "ok".to_owned(),
        Answer::Ended { .. } => "ended".to_owned(),
        Answer::Incoming { vmid, message } => format!("{vmid} {message}"),
        Answer::Error(Refusal { errno: Errno::PIPE, .. }) => "PIPE".to_owned(),
        Answer::Error(Refusal { errno: Errno::STALE, .. }) => "STALE".to_owned(),
        Answer::Error(Refusal { errno: Errno::INVAL, .. }) => "INVAL".to_owned(),
        other => panic!("{other:?}"),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]
    #[test]
    fn the_book_does_what_the_model_says(ops in ops()) {
        let (mut book, _) = running(2, 5, true);
        let mut model = Model { alive: (1..=5).collect(), ..Model::default() };
        let mut answers: BTreeMap<u32, String> = BTreeMap::new();
        for (reply, op) in (100u32..).zip(ops) {
            let vm_of = |vmid: u32| (vmid - 1) / 2 * 2 + 1;
            let actions = match op {
                Op::Send(vmid) => {
                    if model.discarded || !model.alive.contains(&vmid) {
                        model.say(reply, "PIPE");
                    } else {
                        model.say(reply, "ok");
                        model.queue.push((vmid, reply));
                        model.settle();
                    }
                    book.send(reply, 1, vm_of(vmid), vmid, reply)
                }
                Op::Receive(of) => {
                    if model.discarded {
                        model.say(reply, "STALE");
                    } else {
                        model.receivers.push((reply, of));
                        model.settle();
                    }
                    book.receive(reply, 1, of)
                }
                Op::Exit(vmid) => {
                    let known = model.alive.remove(&vmid) || model.discarded;
                    model.say(reply, if known { "ok" } else { "INVAL" });
                    model.settle();
                    book.exit(reply, 1, vm_of(vmid), vmid, None)
                }
                Op::VmEnded(vmid) => {
                    model.alive.retain(|other| vm_of(*other) != vm_of(vmid));
                    model.settle();
                    book.vm_ended(1, vm_of(vmid), "gone")
                }
                Op::Join => {
                    if model.discarded {
                        model.say(reply, "STALE");
                    } else {
                        model.joins.push(reply);
                        model.settle();
                    }
                    book.join(reply, 1)
                }
                Op::Abandon(which) => {
                    let which = 100 + which;
                    model.receivers.retain(|(reply, _)| *reply != which);
                    model.joins.retain(|reply| *reply != which);
                    book.abandon(|reply| *reply == which);
                    Vec::new()
                }
                Op::Kill => {
                    if model.discarded {
                        model.say(reply, "STALE");
                    } else {
                        model.alive.clear();
                        model.queue.clear();
                        model.joins.push(reply);
                        model.settle();
                    }
                    book.kill(reply, 1)
                }
            };
            for action in actions {
                let Action::Answer(reply, answer) = action else { continue };
                let is_first = answers.insert(reply, word(answer)).is_none();
                prop_assert!(is_first, "answered twice: {}", reply);
            }
            prop_assert_eq!(&answers, &model.answers);
        }
    }
}

#[test]
fn it_is_known_whose_messages_are_waited_for() {
    let (mut book, _) = running(1, 3, false);
    assert_eq!(book.wanted(), BTreeSet::new());
    book.receive(5, 1, Some(2));
    book.receive(6, 1, None);
    assert_eq!(book.wanted(), BTreeSet::from([(1, Some(2)), (1, None)]));
    book.send(7, 1, 2, 2, 99);
    assert_eq!(book.wanted(), BTreeSet::from([(1, None)]));
    book.abandon(|reply| *reply == 6);
    assert_eq!(book.wanted(), BTreeSet::new());
}
