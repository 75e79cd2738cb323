//! Keys: which hosts may have sent a datagram, and that it is no copy of one that was heard before.

use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use vmfork_image::ImageName;
use vmfork_transfer::proto::Key;

use super::datagram::{From, HEAD_BYTES, Head, TAG_BYTES};

/// Random bytes, for keys and numbers that must not be guessable. `None`: the system has none.
pub(super) fn random<const N: usize>() -> Option<[u8; N]> {
    let mut bytes = [0; N];
    aws_lc_rs::rand::fill(&mut bytes).ok()?;
    Some(bytes)
}

/// A key that no other has. `None`: the system has no random numbers.
pub(super) fn random_key() -> Option<Key> {
    random().map(Key)
}

/// Seals datagrams of one image under one key, and opens them.
///
/// The nonce is the datagram's counter, of which no two under a key are the same: each key has one
/// side that seals. The image's name is authenticated along, and so is the head.
#[derive(Debug)]
pub(super) struct Seal {
    key: LessSafeKey,
    image: ImageName,
}

impl Seal {
    pub(super) fn new(key: &Key, image: ImageName) -> Option<Self> {
        let key = UnboundKey::new(&AES_256_GCM, &key.0).ok()?;
        Some(Self { key: LessSafeKey::new(key), image })
    }

    /// The datagram of `head` with this body. `None` does not happen to bodies of datagrams: they
    /// are short.
    pub(super) fn seal(&self, head: &Head, body: &[u8]) -> Option<Vec<u8>> {
        let mut datagram = Vec::with_capacity(HEAD_BYTES + body.len() + TAG_BYTES);
        let bytes = head.encode();
        datagram.extend(bytes);
        datagram.extend_from_slice(body);
        let sealed = &mut datagram[HEAD_BYTES..];
        let (nonce, aad) = (nonce(head), self.aad(&bytes));
        let tag = self.key.seal_in_place_separate_tag(nonce, aad, sealed).ok()?;
        datagram.extend_from_slice(tag.as_ref());
        Some(datagram)
    }

    /// The body of a datagram with this head. `None`: another program made it, or something changed
    /// it.
    pub(super) fn open<'a>(&self, head: &Head, datagram: &'a mut [u8]) -> Option<&'a [u8]> {
        let (bytes, sealed) = datagram.split_first_chunk_mut::<HEAD_BYTES>()?;
        let opened = self.key.open_in_place(nonce(head), self.aad(bytes), sealed).ok()?;
        Some(opened)
    }

    fn aad(&self, head: &[u8; HEAD_BYTES]) -> Aad<[u8; HEAD_BYTES + 16]> {
        let mut aad = [0; HEAD_BYTES + 16];
        aad[..HEAD_BYTES].copy_from_slice(head);
        aad[HEAD_BYTES..HEAD_BYTES + 8].copy_from_slice(&self.image.host.to_le_bytes());
        aad[HEAD_BYTES + 8..].copy_from_slice(&self.image.image.to_le_bytes());
        Aad::from(aad)
    }
}

fn nonce(head: &Head) -> Nonce {
    let mut nonce = [0; 12];
    nonce[0] = match head.from {
        From::Sender => 1,
        From::Listener(_) => 2,
    };
    nonce[4..].copy_from_slice(&head.counter.to_le_bytes());
    Nonce::assume_unique_for_key(nonce)
}

/// Words of the window's bitmap: datagrams may overtake each other by 64 times as many, less one
/// word's.
const WINDOW_WORDS: usize = 64;

/// Which counters were heard: each counts once, and none that is older than the window.
#[derive(Debug)]
pub(super) struct Window {
    /// Below it nothing counts.
    from: u64,
    /// One more than the highest that was heard.
    next: u64,
    words: [u64; WINDOW_WORDS],
}

impl Window {
    /// What was sealed before `from` is none of it.
    pub(super) fn new(from: u64) -> Self {
        Self { from, next: from, words: [0; WINDOW_WORDS] }
    }

    /// → whether this is the first time. Only for datagrams that were opened: a forged one must not
    /// move the window.
    pub(super) fn accept(&mut self, counter: u64) -> bool {
        let word = counter / 64;
        let newest = self.next.saturating_sub(1) / 64;
        if counter < self.from || word + WINDOW_WORDS as u64 <= newest {
            return false;
        }
        if counter >= self.next {
            // Words that the window moves onto.
            for new in (newest + 1..=word).rev().take(self.words.len()) {
                self.words[Self::place(new)] = 0;
            }
            self.next = counter.saturating_add(1);
        }
        let place = &mut self.words[Self::place(word)];
        let is_new = *place & 1 << (counter % 64) == 0;
        *place |= 1 << (counter % 64);
        is_new
    }

    fn place(word: u64) -> usize {
        usize::try_from(word % WINDOW_WORDS as u64).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;
    use vmfork_transfer::proto::KEY_BYTES;

    const IMAGE: ImageName = ImageName { host: 1, image: 2 };

    fn seal_of(byte: u8, image: ImageName) -> Seal {
        Seal::new(&Key([byte; KEY_BYTES]), image).expect("a key")
    }

    proptest! {
        #[test]
        fn a_datagram_opens_with_its_key_for_its_image_and_as_it_was(
            body in prop::collection::vec(any::<u8>(), 0..400),
            (listener, session, counter) in any::<(u16, u64, u64)>(),
            change in any::<(prop::sample::Index, u8)>(),
            cut in any::<prop::sample::Index>(),
        ) {
            let head = Head { from: From::Listener(listener), session, counter };
            let sealed = seal_of(7, IMAGE).seal(&head, &body).expect("short");
            let open = |seal: Seal| seal.open(&head, &mut sealed.clone()).map(<[u8]>::to_vec);
            prop_assert_eq!(open(seal_of(7, IMAGE)), Some(body));
            prop_assert_eq!(open(seal_of(7, ImageName { host: 1, image: 3 })), None);
            prop_assert_eq!(open(seal_of(8, IMAGE)), None);
            let (at, bits) = change;
            let mut changed = sealed.clone();
            changed[at.index(sealed.len())] ^= bits.max(1);
            let head = Head::decode(changed.first_chunk().expect("a head")).unwrap_or(head);
            prop_assert_eq!(seal_of(7, IMAGE).open(&head, &mut changed), None);
            let mut short = sealed[..cut.index(sealed.len())].to_vec();
            prop_assert_eq!(seal_of(7, IMAGE).open(&head, &mut short), None);
        }

        #[test]
        fn each_counter_counts_once_and_none_that_is_old(
            from in prop_oneof![Just(0), 0..300u64, Just(u64::MAX - 5000)],
            steps in prop::collection::vec(prop_oneof![0..100u64, 4000..5000u64], 1..300),
        ) {
            let (mut window, mut heard, mut highest) = (Window::new(from), BTreeSet::new(), 0);
            for step in steps {
                let counter = from.saturating_sub(20).saturating_add(step);
                let is_new = window.accept(counter);
                prop_assert!(!is_new || heard.insert(counter) && counter >= from, "{counter} twice");
                if counter >= from && counter.saturating_add(4032) > highest {
                    prop_assert!(is_new || heard.contains(&counter), "{counter} never");
                    heard.insert(counter);
                }
                highest = highest.max(counter);
            }
        }
    }
}
