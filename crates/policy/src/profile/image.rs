//! Profiles of one image: one for each workload that VMs of it run.
//!
//! As bytes, with numbers in little endian:
//!
//! | bytes | |
//! |---|---|
//! | 8 | `VMFWORK` and 0 |
//! | 4 | version: 1 |
//! | 4 | *n*, workloads |
//! | | *n* times, in order of names: a name, after its length (2); a profile, after its length (4) |
//! | 4 | CRC-32 of all before |

use std::collections::BTreeMap;

use super::codec::{Reader, crc32};
use super::{Profile, ProfileError};
use crate::Recording;

const MAGIC: [u8; 8] = *b"VMFWORK\0";
const VERSION: u32 = 1;
/// Most workloads of an image.
const WORKLOADS_MAX: usize = 16;
/// A label's value has 255 characters.
const NAME_BYTES_MAX: u16 = 1020;
/// So that no profile has more than 512 kB, with 7 bytes for each cluster (vmTorrent, §4.2).
const CLUSTERS_MAX: usize = 73_000;

/// What VMs touch of an image, workload by workload.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ImageProfiles {
    by_workload: BTreeMap<String, Profile>,
}

impl ImageProfiles {
    /// None yet.
    pub const fn new() -> Self {
        Self { by_workload: BTreeMap::new() }
    }

    /// By name of the workload.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &Profile)> {
        self.by_workload.iter().map(|(name, profile)| (name.as_str(), profile))
    }

    /// Of one workload.
    pub fn get(&self, workload: &str) -> Option<&Profile> {
        self.by_workload.get(workload)
    }

    /// Recordings that were merged, of all workloads.
    pub fn runs(&self) -> u32 {
        self.by_workload.values().fold(0, |runs, profile| runs.saturating_add(profile.runs()))
    }

    /// Forget one workload. → whether it was known.
    pub fn remove(&mut self, workload: &str) -> bool {
        self.by_workload.remove(workload).is_some()
    }

    /// Add what a VM has touched that ran this workload. The image has `pages` pages, which count
    /// in clusters of `cluster_pages`. Of too many workloads, the one with the fewest runs is
    /// forgotten.
    ///
    /// # Errors
    /// The sizes make no profile, or the name has no or more than 1020 bytes.
    pub fn learn(
        &mut self,
        workload: &str,
        (pages, cluster_pages): (u64, u64),
        recording: &Recording,
    ) -> Result<(), ProfileError> {
        check_name(workload, 0)?;
        let new = Profile::new(pages, cluster_pages)?;
        let fits =
            |known: &Profile| (known.pages(), known.cluster_pages()) == (pages, cluster_pages);
        let profile = self.by_workload.entry(workload.to_owned()).or_insert_with(|| new.clone());
        if !fits(profile) {
            *profile = new;
        }
        profile.merge(recording);
        profile.keep_most_frequent(CLUSTERS_MAX);
        while self.by_workload.len() > WORKLOADS_MAX {
            let others = self.by_workload.iter().filter(|(name, _)| *name != workload);
            let least = others.min_by_key(|(_, profile)| profile.runs());
            let Some(name) = least.map(|(name, _)| name.clone()) else { break };
            self.by_workload.remove(&name);
        }
        Ok(())
    }

    /// As bytes, which [`ImageProfiles::decode`] reads; the same for equal ones.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::from(MAGIC);
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend(length(self.by_workload.len()));
        for (name, profile) in &self.by_workload {
            bytes.extend(u16::try_from(name.len()).unwrap_or(u16::MAX).to_le_bytes());
            bytes.extend(name.as_bytes());
            let profile = profile.encode();
            bytes.extend(length(profile.len()));
            bytes.extend(profile);
        }
        bytes.extend(crc32(&bytes).to_le_bytes());
        bytes
    }

    /// Reads what [`ImageProfiles::encode`] wrote. Takes memory for what is there, not for what
    /// the bytes say there is.
    ///
    /// # Errors
    /// If the bytes are anything else: what, and where.
    pub fn decode(bytes: &[u8]) -> Result<Self, ProfileError> {
        let mut reader = Reader::begin(bytes, MAGIC, VERSION)?;
        let at = reader.at();
        let count = u32::from_le_bytes(reader.array("the number of workloads")?);
        if count as usize > WORKLOADS_MAX {
            let (what, why) = ("the number of workloads", "is more than an image has");
            return Err(ProfileError::Value { at, what, value: count.into(), why });
        }
        let mut by_workload = BTreeMap::new();
        for _ in 0..count {
            let at = reader.at();
            let len = u16::from_le_bytes(reader.array("a name's length")?);
            let name = std::str::from_utf8(reader.take(len.into(), "a workload's name")?);
            let name = name.map_err(|_not_text| not_a_name(at, len))?.to_owned();
            check_name(&name, at)?;
            if by_workload.last_key_value().is_some_and(|(last, _)| *last >= name) {
                return Err(not_a_name(at, len));
            }
            let len = u32::from_le_bytes(reader.array("a profile's length")?);
            let profile = Profile::decode(reader.take(len as usize, "a workload's profile")?)?;
            by_workload.insert(name, profile);
        }
        reader.end()?;
        Ok(Self { by_workload })
    }
}

fn length(of: usize) -> [u8; 4] {
    u32::try_from(of).unwrap_or(u32::MAX).to_le_bytes()
}

fn not_a_name(at: usize, len: u16) -> ProfileError {
    let why = "are no workload's name, or not in order";
    ProfileError::Value { at, what: "the bytes of a name", value: len.into(), why }
}

fn check_name(name: &str, at: usize) -> Result<(), ProfileError> {
    match u16::try_from(name.len()) {
        Ok(1..=NAME_BYTES_MAX) => Ok(()),
        len => Err(not_a_name(at, len.unwrap_or(u16::MAX))),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;
    use vmfork_image::{ImageId, PageIdx, PageRange, PageTable, Source};

    use super::*;
    use crate::{Recorder, RecorderConfig};

    /// Of an image of 1,000 pages.
    fn touched(pages: impl IntoIterator<Item = u64>) -> Recording {
        let own = Source::Image(ImageId::new(1).expect("not zero"));
        let table = PageTable::uniform(1000, own);
        let mut recorder = Recorder::new(table, RecorderConfig::default());
        for (ms, page) in (1..).zip(pages) {
            let page = PageRange::new(PageIdx(page), 1).expect("small");
            recorder.observe(Duration::from_millis(ms), [page]);
        }
        recorder.finish()
    }

    fn learnt(workloads: &[(&str, u64)]) -> ImageProfiles {
        let mut profiles = ImageProfiles::new();
        for (name, page) in workloads {
            profiles.learn(name, (1000, 16), &touched([*page])).expect("learnt");
        }
        profiles
    }

    #[test]
    fn each_workload_has_a_profile_of_its_own() {
        let profiles = learnt(&[("web", 0), ("build", 500), ("web", 100)]);
        assert_eq!(profiles.runs(), 3);
        let first =
            |name| profiles.get(name).map(|it| it.clusters().next().map(|it| it.pages.start()));
        assert_eq!(first("web"), Some(Some(PageIdx(0))));
        assert_eq!(first("build"), Some(Some(PageIdx(496))));
        assert_eq!(first("other"), None);
        assert_eq!(profiles.get("web").map(Profile::runs), Some(2));
    }

    #[test]
    fn of_too_many_the_one_with_the_fewest_runs_is_forgotten() {
        let names: Vec<_> = (0..16).map(|n| format!("w{n:02}")).collect();
        let mut runs: Vec<_> = names.iter().map(|name| (name.as_str(), 1)).collect();
        runs.extend(names[1..].iter().map(|name| (name.as_str(), 2)));
        runs.push(("new", 3));
        let profiles = learnt(&runs);
        assert_eq!(profiles.iter().len(), 16);
        assert!(profiles.get("w00").is_none() && profiles.get("new").is_some());
    }

    #[test]
    fn an_image_of_another_size_begins_a_profile() {
        let mut profiles = learnt(&[("web", 900), ("web", 900)]);
        profiles.learn("web", (2000, 16), &touched([1])).expect("learnt");
        assert_eq!(profiles.get("web").map(|it| (it.runs(), it.pages())), Some((1, 2000)));
        assert!(profiles.learn("", (1000, 16), &touched([1])).is_err());
        assert!(profiles.learn("web", (1000, 3), &touched([1])).is_err());
    }

    #[test]
    fn what_is_written_is_read_and_what_is_damaged_is_refused() {
        for profiles in [ImageProfiles::new(), learnt(&[("web", 0), ("build", 500), ("x", 3)])] {
            let bytes = profiles.encode();
            assert_eq!(ImageProfiles::decode(&bytes), Ok(profiles));
            for at in 0..bytes.len() {
                assert!(ImageProfiles::decode(&bytes[..at]).is_err(), "cut at {at}");
                let mut damaged = bytes.clone();
                damaged[at] ^= 0x10;
                assert!(ImageProfiles::decode(&damaged).is_err(), "damaged at {at}");
            }
        }
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(mut bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _refused = ImageProfiles::decode(&bytes);
            bytes.splice(0..0, MAGIC.into_iter().chain(VERSION.to_le_bytes()));
            let _refused = ImageProfiles::decode(&bytes);
        }
    }
}
