//! Makes the root file system from a folder, without mounting anything.

use std::fs::File;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::base::{check_room, tool_error};
use crate::error::BuildError;
use crate::process::{self, Cancel};
use crate::remedy::AtPath as _;
use crate::tree::Size;

const MKE2FS_MAX: Duration = Duration::from_secs(900);
/// Same UUID and hash seed in every image, so that equal trees give equal bytes as far as mke2fs
/// allows. One VM sees only one such file system. (The bytes still differ a little: mke2fs 1.47.0
/// writes inode change times and takes folders in the host's order.)
const UUID: &str = "766d666f-726b-4000-8000-726f6f746673";
const INODE_BYTES: u64 = 256;
/// Superblocks, bitmaps, folders that hash larger than on the host.
const SLACK_BYTES: u64 = 8 << 20;

/// Make `to` from the tree in `from`, which measured `size`.
///
/// It has no journal and no checksums, since it is only read. It has a few free inodes and blocks:
/// without a reserve mke2fs fails, and in a sparse file a reserve costs nothing.
pub(crate) fn write(
    from: &Path,
    to: &Path,
    size: Size,
    epoch_s: i64,
    cancel: &Cancel,
) -> Result<(), BuildError> {
    let inodes = size.inodes + size.inodes / 64 + 64;
    let content_bytes = size.bytes + inodes * INODE_BYTES;
    let bytes = (content_bytes + content_bytes / 32 + SLACK_BYTES).next_multiple_of(1 << 20);
    check_room(to.parent().unwrap_or(Path::new(".")), bytes)?;
    File::create(to).and_then(|f| f.set_len(bytes)).map_err(BuildError::io("make", to))?;
    let mut command = Command::new("mke2fs");
    command
        .env("E2FSPROGS_FAKE_TIME", epoch_s.to_string())
        .args(["-q", "-F", "-t", "ext4", "-b", "4096", "-m", "0", "-L", "vmfork-root"])
        .args(["-O", "^has_journal,^resize_inode,^metadata_csum,^64bit"])
        .args(["-I", &INODE_BYTES.to_string(), "-N", &inodes.to_string(), "-U", UUID])
        .args(["-E", &format!("hash_seed={UUID},root_owner=0:0,nodiscard")])
        .arg("-d")
        .arg(from)
        .arg(to);
    process::run(command, cancel, MKE2FS_MAX, &mut |_| {})
        .map_err(|e| tool_error("make the root file system", e, to, bytes))
}
