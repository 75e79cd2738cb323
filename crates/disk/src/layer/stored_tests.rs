use std::path::Path;

use rustix::fs::{MemfdFlags, SealFlags};

use super::super::folder::Keep;
use super::super::map::CHUNK_PAGES;
use super::*;
use crate::background::Background;
use crate::space::{DiskSet, Floor};

const PAGE: usize = 4096;

fn layer(path: &Path, set: &Arc<DiskSet>) -> StoredLayer {
    let files = LayerFiles::create(path, CHUNK_PAGES * 2).expect("files");
    let rubbish = Arc::new(Background::start("rubbish").expect("a thread"));
    let folder = LayerFolder::new(path.to_owned(), Arc::<Keep>::default(), rubbish);
    let floor = Floor::new(File::open(path).expect("a folder"), 0);
    let charge = Charge::new(Arc::clone(set), Arc::new(floor), 0);
    let id = ImageId::new(1).expect("not 0");
    StoredLayer::new((id, id), files, folder, charge)
}

/// A file in memory that can be sealed against changes.
fn sealable(len: u64) -> File {
    let fd = rustix::fs::memfd_create("layer", MemfdFlags::ALLOW_SEALING).expect("a file");
    let file = File::from(fd);
    file.set_len(len).expect("sized");
    file
}

/// Four pages, two in each of two stripes.
fn both() -> PageRange {
    PageRange::new(PageIdx(CHUNK_PAGES - 2), 4).expect("small")
}

#[test]
fn of_a_write_that_fails_in_its_second_part_the_first_stays_on_the_account() {
    let folder = tempfile::tempdir().expect("a folder");
    let set = DiskSet::new(None);
    let mut layer = layer(folder.path(), &set);
    // The map's file takes what the first stripe says, and nothing of the second.
    let mut short = sealable(PAGE as u64 + CHUNK_BYTES);
    rustix::fs::fcntl_add_seals(&short, SealFlags::GROW).expect("sealed");
    layer.files.swap(true, &mut short);
    layer.write(both(), &[7; 4 * PAGE]).expect_err("the second stripe");
    assert_eq!(layer.map().written(both()), 2);
    assert_eq!(set.used_bytes(), 2 * PAGE as u64);
    layer.zero(both()).expect_err("the second stripe");
    assert_eq!((layer.map().written(both()), set.used_bytes()), (0, 0));
}

#[test]
fn pages_whose_space_can_not_be_given_back_are_off_the_account() {
    let folder = tempfile::tempdir().expect("a folder");
    let set = DiskSet::new(None);
    let mut layer = layer(folder.path(), &set);
    let mut sealed = sealable(both().end().byte_offset());
    layer.files.swap(false, &mut sealed);
    layer.write(both(), &[7; 4 * PAGE]).expect("written");
    layer.files.swap(false, &mut sealed);
    rustix::fs::fcntl_add_seals(&sealed, SealFlags::WRITE).expect("sealed");
    layer.files.swap(false, &mut sealed);
    assert_eq!(set.used_bytes(), 4 * PAGE as u64);
    layer.zero(both()).expect_err("no hole can be made");
    assert_eq!((layer.map().written(both()), set.used_bytes()), (0, 0));
}

#[test]
fn after_a_sync_that_failed_no_later_one_says_that_all_is_well() {
    let folder = tempfile::tempdir().expect("a folder");
    let set = DiskSet::new(None);
    std::fs::write(folder.path().join("note"), "").expect("written");
    let mut layer = layer(folder.path(), &set);
    layer.sync().expect("synced");
    // A device that can't be synced.
    let mut bad = File::open("/dev/null").expect("a device");
    layer.files.swap(false, &mut bad);
    layer.sync().expect_err("the medium");
    // The medium tells it once.
    layer.files.swap(false, &mut bad);
    layer.files.sync().expect("the medium has forgotten it");
    layer.sync().expect_err("what was written may be lost");
    layer.grown(1 << 30).expect("grown").sync().expect_err("it is the same layer");
}
