//! Profiles, which come with snapshots from elsewhere.

use vmfork_image::PageIdx;
use vmfork_policy::Profile;

/// Bytes that are a profile are its only encoding; also with the right checksum.
pub fn run(data: &[u8]) {
    let sum = crc32(data).to_le_bytes();
    for bytes in [data, &[data, &sum].concat()] {
        let Ok(profile) = Profile::decode(bytes) else { continue };
        assert_eq!(profile.encode(), bytes);
        let pages = profile.pages();
        assert!(profile.clusters().all(|cluster| cluster.pages.end() <= PageIdx(pages)));
    }
}

/// That of Ethernet and zlib.
fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(u32::MAX, |sum, byte| {
        (0..8).fold(sum ^ u32::from(*byte), |sum, _| (sum >> 1) ^ (0xedb8_8320 * (sum & 1)))
    })
}

/// Without the checksum, which [`run`] adds.
pub fn seeds() -> Vec<Vec<u8>> {
    let mut empty = Profile::new(1000, 16).expect("a power of two").encode();
    empty.truncate(empty.len() - 4);
    let mut touched = empty.clone();
    // Of one run two clusters: the first, and one after three others, 300 ms later.
    touched[24] = 1;
    touched[28] = 2;
    touched.extend([0, 5, 1, 0, 3, 0xac, 0x02, 1, 0]);
    let seeds = vec![empty, touched];
    for seed in &seeds {
        let sum = crc32(seed).to_le_bytes();
        assert!(
            Profile::decode(&[&seed[..], &sum].concat()).is_ok(),
            "a seed that is none finds little"
        );
    }
    seeds
}
