//! Pages as they are sent: zeros as a number, the rest as it is or compressed, if that pays.
//!
//! The server and the client decide together whether it does. The server knows how much smaller
//! bytes get: [`Packer`] tries ever more seldom while they don't. The client knows how long answers
//! take, either way. Its `Choice` requests what is best on this link between these processors, and
//! tries the other now and then, since links and loads change.

use crate::proto::{Form, Head, PAGE, ProtoError, Run, decode_runs, wrong};

/// Compressed bytes are sent if they are at most this many eighths of the others: less is not worth
/// unpacking them.
const WORTH_EIGHTHS: usize = 7;
/// After bytes that did not get smaller, up to this many answers are sent without a try.
const SKIP_MAX: u32 = 64;

/// The pages of an answer, ready to be sent.
#[derive(Debug)]
pub(crate) struct Packed<'a> {
    pub(crate) form: Form,
    pub(crate) runs: Vec<Run>,
    /// In pieces, to be sent one after the other.
    pub(crate) bytes: Vec<&'a [u8]>,
    pub(crate) zero_pages: u64,
}

impl Packed<'_> {
    pub(crate) fn len(&self) -> usize {
        self.bytes.iter().map(|piece| piece.len()).sum()
    }
}

/// What one connection knows of how well its pages compress.
#[derive(Debug, Default)]
pub(crate) struct Packer {
    compressed: Vec<u8>,
    /// Pages that are to be compressed together, if they don't lie together.
    gathered: Vec<u8>,
    /// Tries in a row that failed.
    in_vain: u32,
    /// Answers to go without a try.
    skip: u32,
}

impl Packer {
    /// `pages` as they are to be sent.
    pub(crate) fn pack<'a>(&'a mut self, pages: &'a [u8], may_compress: bool) -> Packed<'a> {
        let mut runs: Vec<Run> = Vec::new();
        let mut bytes: Vec<&[u8]> = Vec::new();
        let mut zero_pages = 0;
        let whole = pages.as_chunks::<PAGE>().0;
        for same in whole.chunk_by(|a, b| is_zero(a) == is_zero(b)) {
            // Of at most 512 pages.
            let count = u16::try_from(same.len()).unwrap_or(u16::MAX);
            if is_zero(&same[0]) {
                zero_pages += u64::from(count);
                runs.push(Run::Zero(count));
            } else {
                runs.push(Run::Bytes(count));
                bytes.push(same.as_flattened());
            }
        }
        let mut packed = Packed { form: Form::Raw, runs, bytes, zero_pages };
        if may_compress && !packed.bytes.is_empty() && self.compress(&packed) {
            packed.form = Form::Lz4;
            packed.bytes = vec![self.compressed.as_slice()];
        }
        packed
    }

    /// → whether `compressed` is worth being sent instead.
    fn compress(&mut self, packed: &Packed<'_>) -> bool {
        if self.skip > 0 {
            self.skip -= 1;
            return false;
        }
        let raw = match packed.bytes.as_slice() {
            [one] => *one,
            pieces => {
                self.gathered.clear();
                pieces.iter().for_each(|piece| self.gathered.extend_from_slice(piece));
                self.gathered.as_slice()
            }
        };
        self.compressed.resize(lz4_flex::block::get_maximum_output_size(raw.len()), 0);
        let worth = raw.len() / 8 * WORTH_EIGHTHS;
        match lz4_flex::block::compress_into(raw, &mut self.compressed) {
            Ok(len) if len <= worth => {
                self.compressed.truncate(len);
                self.in_vain = 0;
                true
            }
            _ => {
                self.in_vain += 1;
                self.skip = (1 << self.in_vain.min(SKIP_MAX.ilog2())) - 1;
                false
            }
        }
    }

    /// Keep no more memory than answers need that VMs wait for.
    pub(crate) fn shrink(&mut self, bytes: usize) {
        shrink(&mut self.compressed, bytes);
        shrink(&mut self.gathered, bytes);
    }
}

/// Give back what of a buffer goes beyond `bytes`.
pub(crate) fn shrink(buffer: &mut Vec<u8>, bytes: usize) {
    buffer.truncate(bytes);
    buffer.shrink_to(bytes);
}

fn is_zero(page: &[u8; PAGE]) -> bool {
    // The first bytes tell of most pages; the rest as one comparison, which is quick also in a
    // debug build.
    page[..16] == [0; 16] && *page == [0; PAGE]
}

/// Memory that reading answers takes, kept from one to the next.
#[derive(Debug, Default)]
pub struct Scratch {
    runs: Vec<u8>,
    packed: Vec<u8>,
    raw: Vec<u8>,
}

impl Scratch {
    /// Keep no more memory than answers need that VMs wait for.
    pub(crate) fn shrink(&mut self, bytes: usize) {
        for buffer in [&mut self.packed, &mut self.raw] {
            shrink(buffer, bytes);
        }
    }
}

/// Reads the pages of an answer with head `head` into `out`, which is as long as what was
/// requested. `read` gives what follows the head, piece by piece. → the runs that they came in.
///
/// # Errors
/// Those of `read`, or what came is something else.
pub fn receive<E: From<ProtoError>>(
    head: &Head,
    out: &mut [u8],
    scratch: &mut Scratch,
    mut read: impl FnMut(&mut [u8]) -> Result<(), E>,
) -> Result<Vec<Run>, E> {
    scratch.runs.resize(usize::from(head.runs) * 2, 0);
    read(&mut scratch.runs)?;
    let runs = decode_runs(&scratch.runs, (out.len() / PAGE) as u64)?;
    let sent = runs.iter().filter(|run| matches!(run, Run::Bytes(_)));
    let raw_len: usize = sent.map(|run| usize::from(run.pages()) * PAGE).sum();
    // No more than pages have: the head was checked.
    let len = usize::try_from(head.bytes).unwrap_or(usize::MAX).min(out.len());
    match head.form {
        Form::Raw if len != raw_len => {
            wrong::<()>(format!(
                "{len} bytes, where those of {} pages were to come",
                raw_len / PAGE
            ))?;
        }
        Form::Raw => scatter(&runs, out, read)?,
        Form::Lz4 => {
            scratch.packed.resize(len, 0);
            read(&mut scratch.packed)?;
            if let [Run::Bytes(_)] = runs.as_slice() {
                unpack(&scratch.packed, out)?;
            } else {
                scratch.raw.resize(raw_len, 0);
                unpack(&scratch.packed, &mut scratch.raw)?;
                let mut rest = scratch.raw.as_slice();
                scatter(&runs, out, |part| {
                    let (front, after) = rest.split_at(part.len());
                    part.copy_from_slice(front);
                    rest = after;
                    Ok::<_, E>(())
                })?;
            }
        }
    }
    Ok(runs)
}

/// Zeros where runs are zeros, and what `read` gives where they are not.
fn scatter<E>(
    runs: &[Run],
    out: &mut [u8],
    mut read: impl FnMut(&mut [u8]) -> Result<(), E>,
) -> Result<(), E> {
    let mut rest = out;
    for run in runs {
        let (part, after) = rest.split_at_mut(usize::from(run.pages()) * PAGE);
        match run {
            Run::Zero(_) => part.fill(0),
            Run::Bytes(_) => read(part)?,
        }
        rest = after;
    }
    Ok(())
}

/// The lz4 block `packed` into `out`, which it has to fill.
fn unpack(packed: &[u8], out: &mut [u8]) -> Result<(), ProtoError> {
    match lz4_flex::block::decompress_into(packed, out) {
        Ok(len) if len == out.len() => Ok(()),
        Ok(len) => {
            wrong(format!("a compressed block of {len} bytes where {} were to come", out.len()))
        }
        Err(error) => wrong(format!("a compressed block that is none: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Pages each of one kind: 0 zero, 1 of one byte, 2 at random.
    fn pages(kinds: &[u8]) -> Vec<u8> {
        let mut state = 1u64;
        let mut byte = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            state.to_be_bytes()[0]
        };
        let page = |kind: &u8| match kind {
            0 => vec![0; PAGE],
            1 => vec![7; PAGE],
            _ => (0..PAGE).map(|_| byte()).collect(),
        };
        kinds.iter().flat_map(page).collect()
    }

    /// What follows a head, as it would be read.
    fn receive_all(
        form: Form,
        runs: &[u8],
        bytes: &[u8],
        out: &mut [u8],
    ) -> Result<Vec<Run>, ProtoError> {
        let head = Head {
            sequence: 0,
            refusal: None,
            form,
            runs: u16::try_from(runs.len() / 2).expect("few"),
            bytes: u32::try_from(bytes.len()).expect("few"),
            server_us: 0,
        };
        let all = [runs, bytes].concat();
        let mut rest = all.as_slice();
        receive(&head, out, &mut Scratch::default(), |part| {
            let Some((front, after)) = rest.split_at_checked(part.len()) else {
                return wrong("no more bytes");
            };
            part.copy_from_slice(front);
            rest = after;
            Ok(())
        })
    }

    fn there_and_back(packer: &mut Packer, raw: &[u8], may_compress: bool) -> (Form, usize) {
        let packed = packer.pack(raw, may_compress);
        let runs = packed.runs.iter().flat_map(|run| run.encode()).collect::<Vec<_>>();
        let bytes = packed.bytes.concat();
        let mut out = vec![0xee; raw.len()];
        let decoded = receive_all(packed.form, &runs, &bytes, &mut out).expect("an answer");
        assert_eq!(decoded, packed.runs);
        assert!(out == raw, "other bytes");
        (packed.form, bytes.len())
    }

    #[test]
    fn zeros_take_no_bytes() {
        let mut packer = Packer::default();
        let raw = pages(&[0, 0, 2, 0, 1, 1]);
        let packed = packer.pack(&raw, false);
        assert_eq!(packed.runs, [Run::Zero(2), Run::Bytes(1), Run::Zero(1), Run::Bytes(2)]);
        assert_eq!((packed.zero_pages, packed.len()), (3, 3 * PAGE));
        assert_eq!(there_and_back(&mut packer, &pages(&[0; 512]), true), (Form::Raw, 0));
    }

    #[test]
    fn a_page_is_zero_only_if_all_of_it_is() {
        let mut raw = pages(&[0, 0]);
        raw[PAGE - 1] = 1;
        assert_eq!(Packer::default().pack(&raw, false).runs, [Run::Bytes(1), Run::Zero(1)]);
    }

    #[test]
    fn what_gets_smaller_is_compressed_if_it_may_be() {
        let mut packer = Packer::default();
        let raw = pages(&[1, 1, 0, 1]);
        assert_eq!(there_and_back(&mut packer, &raw, false), (Form::Raw, 3 * PAGE));
        let (form, len) = there_and_back(&mut packer, &raw, true);
        assert!(form == Form::Lz4 && len < 500, "{len}");
    }

    #[test]
    fn what_does_not_get_smaller_is_tried_ever_more_seldom() {
        let (mut packer, raw) = (Packer::default(), pages(&[2, 2]));
        let mut tries = 0;
        for _ in 0..1000 {
            tries += u32::from(packer.skip == 0);
            assert_eq!(there_and_back(&mut packer, &raw, true), (Form::Raw, 2 * PAGE));
        }
        assert!((10..30).contains(&tries), "{tries} tries");
        // And is compressed again when it does, after the tries that are left out.
        let good = pages(&[1]);
        let forms: Vec<_> = (0..65).map(|_| there_and_back(&mut packer, &good, true).0).collect();
        assert_eq!(forms.last(), Some(&Form::Lz4));
    }

    #[test]
    fn a_block_of_another_length_or_of_garbage_is_refused() {
        let runs = [Run::Bytes(2), Run::Zero(1)].map(Run::encode).concat();
        let mut out = vec![0; 3 * PAGE];
        let mut refused = |bytes: &[u8], form| {
            receive_all(form, &runs, bytes, &mut out).expect_err("not two pages").to_string()
        };
        assert_eq!(
            refused(&[0; PAGE], Form::Raw),
            "4096 bytes, where those of 2 pages were to come"
        );
        let short = lz4_flex::block::compress(&[7; PAGE]);
        let error = refused(&short, Form::Lz4);
        assert_eq!(error, "a compressed block of 4096 bytes where 8192 were to come");
        let long = lz4_flex::block::compress(&[7; 3 * PAGE]);
        assert!(refused(&long, Form::Lz4).starts_with("a compressed block that is none"));
        assert!(refused(&[0xff; 9], Form::Lz4).starts_with("a compressed block that is none"));
    }

    proptest! {
        #[test]
        fn pages_come_as_they_were(
            answers in prop::collection::vec(
                (prop::collection::vec(0u8..3, 1..8), any::<bool>()), 1..5),
        ) {
            let mut packer = Packer::default();
            for (kinds, may_compress) in answers {
                there_and_back(&mut packer, &pages(&kinds), may_compress);
            }
        }

        #[test]
        fn any_bytes_are_read_without_a_panic(
            runs in prop::collection::vec((0u8..4, any::<bool>()), 0..20),
            bytes: Vec<u8>,
            (lz4, pages) in any::<(bool, u8)>(),
        ) {
            let form = if lz4 { Form::Lz4 } else { Form::Raw };
            let runs: Vec<u8> =
                runs.into_iter().flat_map(|(low, zero)| [low, u8::from(zero) << 7]).collect();
            let _ = receive_all(form, &runs, &bytes, &mut vec![0; usize::from(pages) * PAGE]);
        }
    }
}
