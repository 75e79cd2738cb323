//! The log against a model that forgets nothing.

use proptest::prelude::*;
use vmfork_events::{Cursor, Limits, Log, Read};

const EPOCH: u64 = 0xfeed;

#[derive(Debug, Clone)]
enum Step {
    Push {
        bytes: usize,
    },
    /// Reader `reader` reads at most `max` events.
    Read {
        reader: usize,
        max: usize,
    },
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => (0_usize..40).prop_map(|bytes| Step::Push { bytes }),
        2 => (0_usize..3, 1_usize..6).prop_map(|(reader, max)| Step::Read { reader, max }),
    ]
}

/// What a reader was given: each number once, in order, as an event or as lost.
#[derive(Debug)]
struct Reader {
    cursor: Cursor,
    accounted_for: u64,
}

/// The oldest number that must be held: with all of its successors it fits into the limits.
fn first_held(sizes: &[usize], limits: Limits) -> u64 {
    let (mut count, mut bytes) = (0, 0);
    for size in sizes.iter().rev() {
        if count + 1 > limits.events_max || bytes + size > limits.bytes_max {
            break;
        }
        count += 1;
        bytes += size;
    }
    sizes.len() as u64 - count as u64 + 1
}

proptest! {
    #[test]
    fn each_event_is_read_once_in_order_or_told_as_lost(
        events_max in 0_usize..8,
        bytes_max in 0_usize..120,
        steps in prop::collection::vec(step(), 0..120),
    ) {
        let limits = Limits { events_max, bytes_max };
        let mut log = Log::new(EPOCH, limits);
        let mut sizes: Vec<usize> = Vec::new();
        let start = log.newest();
        let mut readers = [0; 3].map(|_| Reader { cursor: start, accounted_for: 0 });
        for step in steps {
            match step {
                Step::Push { bytes } => {
                    let next = log.next();
                    let pushed = log.push((sizes.len() as u64 + 1, bytes), bytes);
                    sizes.push(bytes);
                    prop_assert_eq!((pushed, pushed.seq), (next, sizes.len() as u64));
                }
                Step::Read { reader, max } => {
                    let reader = &mut readers[reader];
                    let first = first_held(&sizes, limits);
                    match log.read(reader.cursor, max) {
                        Read::Events(events) => {
                            prop_assert!(reader.accounted_for + 1 >= first);
                            let left = sizes.len() as u64 - reader.accounted_for;
                            prop_assert_eq!(events.len() as u64, left.min(max as u64));
                            for (cursor, (number, bytes)) in events {
                                prop_assert_eq!(*number, reader.accounted_for + 1);
                                let at = usize::try_from(*number - 1).expect("few");
                                prop_assert_eq!(*bytes, sizes[at]);
                                prop_assert_eq!(cursor, Cursor { epoch: EPOCH, seq: *number });
                                *reader = Reader { cursor, accounted_for: *number };
                            }
                        }
                        Read::Gap { lost_from, lost_to, resume } => {
                            prop_assert_eq!(lost_from, reader.accounted_for + 1);
                            prop_assert_eq!(lost_to, first - 1);
                            prop_assert!(lost_from <= lost_to);
                            prop_assert_eq!(resume.seq, lost_to);
                            *reader = Reader { cursor: resume, accounted_for: lost_to };
                        }
                        other => prop_assert!(false, "{other:?}"),
                    }
                }
            }
            let held = sizes.len() as u64 + 1 - first_held(&sizes, limits);
            prop_assert_eq!(log.newest().seq - log.start().seq, held);
            prop_assert!(held <= events_max as u64 && log.bytes() <= bytes_max);
            let held = usize::try_from(held).expect("few");
            prop_assert_eq!(log.bytes(), sizes[sizes.len() - held..].iter().sum::<usize>());
        }
    }

    #[test]
    fn only_what_a_log_gave_out_is_a_place_in_it(epoch: u64, seq: u64, pushed in 0_u64..20) {
        let mut log = Log::new(EPOCH, Limits { events_max: 4, bytes_max: 100 });
        for _ in 0..pushed {
            log.push((), 1);
        }
        let text = Cursor { epoch, seq }.to_string();
        let cursor: Cursor = text.parse().expect("as it was printed");
        let resume = log.start();
        match log.read(cursor, 1) {
            Read::OtherEpoch { lost, resume: at } => {
                prop_assert!(epoch != EPOCH && at == resume && lost == resume.seq);
            }
            Read::Ahead { newest } => prop_assert!(epoch == EPOCH && seq > pushed && newest.seq == pushed),
            _ => prop_assert!(epoch == EPOCH && seq <= pushed),
        }
    }
}
