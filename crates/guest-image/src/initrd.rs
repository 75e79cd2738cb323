//! Puts the initrd together: the agent as `/init`, the modules it loads, the places it mounts
//! things.
//!
//! Not compressed: QEMU hands the 2.5 MB to the guest by DMA. With gzip or zstd a boot under TCG
//! took as much CPU time as without (3.1 to 3.4 s to the agent's first word, whichever).

use std::fs::File;
use std::io::{self, BufWriter};
use std::path::Path;

use crate::cpio::Archive;
use crate::kernel::Modules;

/// Write the initrd to the new file `to`; every entry gets the time stamp `epoch_s`.
pub(crate) fn write(to: &Path, agent: &[u8], modules: &Modules, epoch_s: u32) -> io::Result<()> {
    let mut archive = Archive::new(BufWriter::new(File::create(to)?), epoch_s);
    for folder in ["dev", "proc", "sys", "run", "newroot", "modules"] {
        archive.folder(folder, 0o755)?;
    }
    archive.char_device("dev/console", 0o600, (5, 1))?;
    archive.char_device("dev/null", 0o666, (1, 3))?;
    archive.file("init", 0o755, agent)?;
    let for_pmem = modules.for_pmem.as_deref().unwrap_or_default();
    for module in modules.always.iter().chain(for_pmem) {
        archive.file(&format!("modules/{}", module.file_name), 0o644, &module.data)?;
    }
    for (list, modules) in [("modules/order", &modules.always[..]), ("modules/pmem", for_pmem)] {
        let names: String =
            modules.iter().map(|module| format!("{}\n", module.file_name)).collect();
        archive.file(list, 0o644, names.as_bytes())?;
    }
    archive.finish()?.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()
}
