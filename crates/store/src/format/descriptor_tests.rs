use proptest::prelude::*;

use super::*;

fn disk() -> Role {
    "disk:data".parse().expect("a role")
}

fn image(id: SnapshotId, role: Role, bytes: u64) -> ImageDescriptor {
    ImageDescriptor {
        bytes,
        page_bytes: PAGE_BYTES,
        chunk_pages: 64,
        compression: Compression::Zstd { level: 1 },
        base: Some(BaseRef { name: "base".into(), id: SnapshotId([2; 16]), role: role.clone() }),
        counts: Counts { own_pages: 3, stored_bytes: 5, ..Counts::default() },
        table: FileRef::of(Attempt([0xab; 8]).file(id, &role.ending(TABLE)), b"t"),
        role,
    }
}

fn descriptor() -> Descriptor {
    let id = SnapshotId([0x1f; 16]);
    Descriptor {
        schema: SCHEMA.into(),
        id,
        name: "web".into(),
        created_unix_ms: 1,
        images: vec![image(id, Role::Memory, 1 << 22), image(id, disk(), (1 << 30) + 512)],
        state: FileRef::of(Attempt([1; 8]).file(id, STATE), b"s"),
        vm: serde_json::json!({"memory_mib": 4, "text": "\",\n  \"check\": \"0\"\n}"}),
    }
}

#[test]
fn a_descriptor_reads_back_and_is_json() {
    let it = descriptor();
    let file = it.encode().expect("small");
    assert_eq!(Descriptor::decode(&file).as_ref(), Ok(&it));
    let value: serde_json::Value = serde_json::from_slice(&file).expect("JSON");
    assert_eq!(value["name"], "web");
    assert_eq!(value["id"], "1f".repeat(16));
    assert_eq!(value["check"].as_str().map(str::len), Some(64));
}

#[test]
fn every_changed_bit_and_every_cut_is_noticed() {
    let file = descriptor().encode().expect("small");
    for bit in 0..file.len() * 8 {
        let mut bad = file.clone();
        bad[bit / 8] ^= 1 << (bit % 8);
        assert!(Descriptor::decode(&bad).is_err(), "bit {bit}");
    }
    for bytes in 0..file.len() {
        assert!(Descriptor::decode(&file[..bytes]).is_err(), "{bytes}");
    }
}

/// The file of a descriptor that was changed as JSON, with the check that belongs to it.
fn rechecked(change: impl FnOnce(&mut serde_json::Value)) -> Vec<u8> {
    let file = descriptor().encode().expect("small");
    let mut value: serde_json::Value = serde_json::from_slice(&file).expect("JSON");
    value.as_object_mut().expect("an object").remove("check");
    change(&mut value);
    let mut text = serde_json::to_string_pretty(&value).expect("plain");
    text.truncate(text.len() - "\n}".len());
    text.push_str(",\n");
    let check = blake3::hash(text.as_bytes()).to_hex();
    [text.as_str(), CHECK_HEAD, check.as_str(), CHECK_TAIL].concat().into_bytes()
}

fn newer(file: &[u8]) -> String {
    match Descriptor::decode(file) {
        Err(Unreadable::Newer(what)) => what,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_newer_version_is_told_from_damage() {
    let says = "its layout is vmfork-snapshot/3, and vmfork-snapshot/2 is the newest known";
    let elsewhere = br#"{"schema": "vmfork-snapshot/3", "anything": 1}"#;
    assert!(newer(elsewhere).starts_with(says));
    let mut file = rechecked(|value| value["schema"] = "vmfork-snapshot/3".into());
    assert!(newer(&file).starts_with(says));
    // The check is there, and does not belong to it.
    file[50] ^= 1;
    assert!(matches!(Descriptor::decode(&file), Err(Unreadable::Flaw(_))));
    let foreign = rechecked(|value| value["schema"] = "other/1".into());
    assert!(matches!(Descriptor::decode(&foreign), Err(Unreadable::Flaw(_))));
}

#[test]
fn a_role_that_is_not_known_is_a_newer_versions() {
    let file = rechecked(|value| value["images"][1]["role"] = "gpu".into());
    assert_eq!(newer(&file), "it has an image of role `gpu`, which is not known here");
    // With members that are not known either.
    let file = rechecked(|value| {
        value["images"][1] = serde_json::json!({"role": "gpu", "shaders": []});
    });
    assert!(newer(&file).contains("`gpu`"));
    let file = rechecked(|value| value["images"][1]["role"] = "disk:../x".into());
    assert!(matches!(Descriptor::decode(&file), Err(Unreadable::Flaw(_))));
}

#[test]
fn the_totals_are_of_all_images_and_the_state() {
    let counts = descriptor().counts();
    assert_eq!((counts.own_pages, counts.stored_bytes), (6, 11));
    assert_eq!(descriptor().image(&disk()).map(ImageDescriptor::pages), Some((1 << 18) + 1));
    assert_eq!(descriptor().bases().count(), 2);
}

#[test]
fn a_descriptor_that_leads_elsewhere_is_refused() {
    for change in [
        |d: &mut Descriptor| d.name = "../x".into(),
        |d: &mut Descriptor| d.images[1].base.as_mut().expect("one").name = "a/b".into(),
        |d: &mut Descriptor| d.images[1].base.as_mut().expect("one").role = Role::Memory,
        |d: &mut Descriptor| d.images[0].table.file = "../../etc/passwd.table".into(),
        |d: &mut Descriptor| d.images[1].table.file = d.images[0].table.file.clone(),
        |d: &mut Descriptor| d.images[0].table.file = d.images[1].table.file.clone(),
        |d: &mut Descriptor| d.state.file = format!("{}/../x.state", d.id),
        |d: &mut Descriptor| d.state.file = format!("{}.state", d.id),
        |d: &mut Descriptor| d.state.file = d.images[0].table.file.clone(),
        |d: &mut Descriptor| {
            d.images[0].table.file = d.images[0].table.file.replace('a', "A");
        },
        |d: &mut Descriptor| d.images[1].page_bytes = 512,
        |d: &mut Descriptor| d.images[0].chunk_pages = 48,
        |d: &mut Descriptor| d.images[0].bytes = 0,
        |d: &mut Descriptor| d.images[0].bytes += 512,
        |d: &mut Descriptor| d.images[1].bytes += 1,
        |d: &mut Descriptor| d.images[1].bytes = (IMAGE_PAGES_MAX + 1) * PAGE_BYTES,
        |d: &mut Descriptor| d.images.reverse(),
        |d: &mut Descriptor| d.images.clear(),
        |d: &mut Descriptor| d.images[1] = d.images[0].clone(),
        |d: &mut Descriptor| d.schema = "other/1".into(),
    ] {
        let mut it = descriptor();
        change(&mut it);
        let file = it.encode().expect("small");
        assert!(Descriptor::decode(&file).is_err(), "{it:?}");
    }
}

proptest! {
    #[test]
    fn any_bytes_are_survived(bytes: Vec<u8>) {
        prop_assert!(Descriptor::decode(&bytes).is_err());
    }

    #[test]
    fn an_id_reads_back(bytes: [u8; 16], text in "[0-9a-g]{31,33}") {
        let id = SnapshotId(bytes);
        prop_assert_eq!(id.to_string().parse(), Ok(id));
        if let Ok(id) = text.parse::<SnapshotId>() {
            prop_assert_eq!(id.to_string(), text);
        }
    }
}
