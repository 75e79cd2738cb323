//! Page tables, and homes of blocks, that other hosts send.

use vmfork_image::wire::{self, Limits};
use vmfork_image::{ImageId, ImageName};

/// Few enough pages that a table with a run of all of them, and one with none, are quick to make.
const LIMITS: Limits = Limits { pages_max: 1 << 22, names_max: 64, runs_max: 1 << 12 };

/// Bytes that are a table are its only encoding, and the table that is made of them says the same.
pub fn run(data: &[u8]) {
    if let Ok(homes) = wire::decode_homes(data, LIMITS) {
        let each = homes.runs().flat_map(|(_, blocks, home)| (0..blocks).map(move |_| home));
        assert_eq!(wire::encode_homes(each), data);
    }
    let Ok(table) = wire::decode(data, LIMITS) else { return };
    assert_eq!(table.runs().map(|(run, _)| run.len()).sum::<u64>(), table.pages());
    // Here an image's number is the place of its name.
    let names = table.names();
    let id = |name: ImageName| ImageId::new(names.iter().position(|n| *n == name)? as u64 + 1);
    let made = table.to_table(id).expect("every name has a place");
    let name = |id: ImageId| names[usize::try_from(id.get() - 1).expect("small")];
    assert_eq!(wire::encode(&made, name), data);
}

pub fn seeds() -> Vec<Vec<u8>> {
    let name = |n: u8| [n, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, n, 0, 0, 0];
    let two = [&name(1)[..], &name(2)].concat();
    vec![
        [&b"VFPT\x01\x80\x10\x02"[..], &two, b"\x04\x80\x08\x01\x08\0\x78\x02\x80\x07\x01"]
            .concat(),
        b"VFPT\x01\0\0\0".to_vec(),
        [&b"VFBH\x01\x06\x02"[..], &two, b"\x03\x03\x01\x02\x02\x01\0"].concat(),
    ]
}
