//! A folder with all below it: a tar archive on its way through `tar` in the guest.
//!
//! What comes out of a guest is a stranger's: only files, folders and links are made here, none
//! outside the target, without owners and set-user-id bits.

use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, anyhow, bail};
use bytes::Bytes;
use indicatif::ProgressBar;
use tokio::sync::mpsc;
use tokio::task::spawn_blocking;
use tokio::time::timeout;
use vmfork_api::ExecRequest;

use super::pipe::{ChannelReader, ChannelWriter, QUEUE_LEN};
use super::{LOOK_BOUND, exec, guest_file_name, report};
use crate::client::{Client, ExecEvent, ExecSession};
use crate::commands::streams::IDLE_BOUND;
use crate::failure::{Exit, HintExt as _};
use crate::printer::Printer;

/// What of the guest's complaints is kept.
const STDERR_BYTES_MAX: usize = 4096;

const CHUNK_BYTES: usize = 64 << 10;

/// A folder here to `VM:PATH`; `inside`: that is a folder already, so a new one is made in it.
pub(super) async fn store(
    client: &Client<'_>,
    from: PathBuf,
    vm: &str,
    path: &str,
    inside: bool,
) -> anyhow::Result<Exit> {
    let prefix = if inside {
        let from = std::path::absolute(&from).context("make the path of the folder absolute")?;
        PathBuf::from(from.file_name().unwrap_or(".".as_ref()))
    } else {
        make_folder(client, vm, path).await?;
        PathBuf::from(".")
    };
    let mut session = tar(client, vm, &["tar", "-x", "-f", "-", "-C", path]).await?;
    let bar = client.global.printer.bytes(None, from.display().to_string());
    let (tx, mut rx) = mpsc::channel(QUEUE_LEN);
    let source = from.clone();
    let packing = spawn_blocking(move || pack(&source, &prefix, ChannelWriter(tx)));
    let input = session.input.clone();
    let fed = bar.clone();
    let feeding = async move {
        while let Some(chunk) = rx.recv().await {
            let len = chunk.len();
            if !input.stdin(chunk).await {
                return;
            }
            fed.inc(u64::try_from(len).unwrap_or_default());
        }
        input.stdin_eof().await;
    };
    let (code, stderr) = drive(&mut session, feeding, None, &bar).await?;
    // Said first: a guest whose tar ends early is why packing broke off.
    check(code, &stderr, vm)?;
    packing
        .await
        .context("pack the folder")?
        .with_context(|| format!("read {}", from.display()))?;
    let len = bar.position();
    bar.finish_and_clear();
    report(client, &from.display().to_string(), &format!("{vm}:{path}"), len)
}

/// `VM:PATH`, a folder, to one here.
pub(super) async fn fetch(
    client: &Client<'_>,
    vm: &str,
    path: &str,
    mut to: PathBuf,
) -> anyhow::Result<Exit> {
    if to.is_dir() {
        to.push(guest_file_name(path)?);
    }
    let mut session = tar(client, vm, &["tar", "-c", "-f", "-", "-C", path, "."]).await?;
    let from = format!("{vm}:{path}");
    let bar = client.global.printer.bytes(None, from.clone());
    let (tx, rx) = mpsc::channel(QUEUE_LEN);
    let (target, printer) = (to.clone(), client.global.printer.clone());
    let unpacking = spawn_blocking(move || unpack(&target, ChannelReader::new(rx), &printer));
    session.input.stdin_eof().await;
    let (code, stderr) = drive(&mut session, async {}, Some(tx), &bar).await?;
    unpacking
        .await
        .context("unpack the folder")?
        .with_context(|| format!("write {}", to.display()))?;
    check(code, &stderr, vm)?;
    let len = bar.position();
    bar.finish_and_clear();
    report(client, &from, &to.display().to_string(), len)
}

async fn tar(client: &Client<'_>, vm: &str, argv: &[&str]) -> anyhow::Result<ExecSession> {
    let argv = argv.iter().map(|word| (*word).to_owned()).collect();
    client
        .exec(vm, ExecRequest { argv, ..Default::default() })
        .await
        .context("run `tar` in the guest, which a copy of a folder needs")
}

async fn make_folder(client: &Client<'_>, vm: &str, path: &str) -> anyhow::Result<()> {
    let (code, stderr) = exec::ask(client, vm, &["mkdir", "-p", "--", path], LOOK_BOUND).await?;
    if code != 0 {
        return Err(anyhow!("{}", crate::format::printable(stderr.trim())))
            .with_context(|| format!("create the folder `{vm}:{path}`"));
    }
    Ok(())
}

/// Sees a session to its end: feeds it, and hands its output on. Returns the exit code and stderr.
async fn drive(
    session: &mut ExecSession,
    feeding: impl Future<Output = ()>,
    mut output: Option<mpsc::Sender<Bytes>>,
    bar: &ProgressBar,
) -> anyhow::Result<(u8, Vec<u8>)> {
    tokio::pin!(feeding);
    let mut fed = false;
    let mut stderr = Vec::new();
    let mut moved = bar.position();
    loop {
        let event = tokio::select! {
            event = timeout(IDLE_BOUND, session.next()) => event,
            () = &mut feeding, if !fed => {
                fed = true;
                continue;
            }
        };
        match event {
            Ok(event) => match event? {
                ExecEvent::Stdout(bytes) => {
                    bar.inc(u64::try_from(bytes.len()).unwrap_or_default());
                    if let Some(tx) = &output
                        && tx.send(bytes).await.is_err()
                    {
                        // Unpacking has failed, and says why once the guest's tar has ended.
                        output = None;
                        if !session.input.signal(SIGTERM).await {
                            return Ok((0, stderr));
                        }
                    }
                }
                ExecEvent::Stderr(bytes) => {
                    let room = STDERR_BYTES_MAX.saturating_sub(stderr.len());
                    stderr.extend_from_slice(&bytes[..bytes.len().min(room)]);
                }
                ExecEvent::Exited(code) => return Ok((code, stderr)),
            },
            // While it is fed, silence is good.
            Err(_) if bar.position() > moved => moved = bar.position(),
            Err(_) => bail!("`tar` in the guest made no progress for {} s", IDLE_BOUND.as_secs()),
        }
    }
}

const SIGTERM: i32 = 15;

fn check(code: u8, stderr: &[u8], vm: &str) -> anyhow::Result<()> {
    if code == 0 {
        return Ok(());
    }
    let text = String::from_utf8_lossy(stderr);
    let said = match text.trim() {
        "" => "it printed no error".to_owned(),
        text => text.lines().map(crate::format::printable).collect::<Vec<_>>().join("\n"),
    };
    Err(anyhow!(said))
        .with_context(|| format!("`tar` in `{vm}` exited with status {code}"))
        .hint("check that the guest has `tar`, and that the path exists")
}

fn pack(from: &Path, prefix: &Path, to: ChannelWriter) -> std::io::Result<()> {
    let mut archive = tar::Builder::new(BufWriter::with_capacity(CHUNK_BYTES, to));
    archive.follow_symlinks(false);
    archive.append_dir_all(prefix, from)?;
    archive.into_inner()?.flush()
}

fn unpack(to: &Path, from: ChannelReader, printer: &Printer) -> std::io::Result<()> {
    std::fs::create_dir_all(to)?;
    let mut archive = tar::Archive::new(from);
    archive.set_preserve_permissions(false);
    for entry in archive.entries()? {
        let mut entry = entry?;
        let kind = entry.header().entry_type();
        let plain = kind.is_file()
            || kind.is_contiguous()
            || kind.is_gnu_sparse()
            || kind.is_dir()
            || kind.is_symlink()
            || kind.is_hard_link();
        if !plain || !entry.unpack_in(to)? {
            let name = entry.path_bytes();
            let name = crate::format::printable(&String::from_utf8_lossy(&name));
            printer.warn(&format!("skipped `{name}`: it is neither a file, a folder nor a link"));
        }
    }
    // The guest's tar pads the archive's end. Unread, that looks as if unpacking had failed.
    std::io::copy(&mut archive.into_inner(), &mut std::io::sink())?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;
    use crate::printer::Level;

    fn reader(archive: Vec<u8>) -> ChannelReader {
        let (tx, rx) = mpsc::channel(1);
        tx.try_send(Bytes::from(archive)).expect("room for one");
        ChannelReader::new(rx)
    }

    fn header(kind: tar::EntryType, mode: u32, len: u64) -> tar::Header {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(kind);
        header.set_mode(mode);
        header.set_size(len);
        header
    }

    #[test]
    fn an_archive_is_read_to_its_end_with_the_padding() {
        let mut bytes = tar::Builder::new(Vec::new()).into_inner().unwrap();
        bytes.resize(10_240, 0);
        let (tx, rx) = mpsc::channel(2);
        tx.try_send(Bytes::from(bytes)).expect("room for two");
        tx.try_send(Bytes::from(vec![0; 10_240])).expect("room for two");
        let to = tempfile::tempdir().unwrap();
        let printer = Printer::new(false, Level::Quiet, false, false);
        let unpacking =
            std::thread::spawn(move || unpack(to.path(), ChannelReader::new(rx), &printer));
        // Both are taken, and a third is waited for.
        tx.blocking_send(Bytes::from(vec![0; 10_240])).expect("it still reads");
        tx.blocking_send(Bytes::from(vec![0; 10_240])).expect("it still reads");
        tx.blocking_send(Bytes::from(vec![0; 10_240])).expect("it still reads");
        drop(tx);
        unpacking.join().unwrap().unwrap();
    }

    #[test]
    fn a_guests_archive_makes_no_devices_leaves_no_folder_and_keeps_no_setuid() {
        let mut archive = tar::Builder::new(Vec::new());
        let mut device = header(tar::EntryType::Char, 0o666, 0);
        device.set_device_major(1).unwrap();
        device.set_device_minor(3).unwrap();
        archive.append_data(&mut device, "null", std::io::empty()).unwrap();
        let mut file = header(tar::EntryType::Regular, 0o4755, 2);
        archive.append_data(&mut file, "su", &b"hi"[..]).unwrap();
        let mut link = header(tar::EntryType::Symlink, 0o777, 0);
        archive.append_link(&mut link, "out", "..").unwrap();
        let mut through = header(tar::EntryType::Regular, 0o644, 2);
        archive.append_data(&mut through, "out/evil", &b"no"[..]).unwrap();
        let bytes = archive.into_inner().unwrap();

        let outer = tempfile::tempdir().unwrap();
        let to = outer.path().join("to");
        let printer = Printer::new(false, Level::Quiet, false, false);
        let unpacked = unpack(&to, reader(bytes), &printer);
        assert!(unpacked.is_err(), "a path through a link out of the folder must fail");
        assert!(!outer.path().join("evil").exists());
        assert!(!to.join("null").exists());
        let mode = std::fs::metadata(to.join("su")).unwrap().permissions().mode();
        assert_eq!(mode & 0o7000, 0, "{mode:o}");
        assert_eq!(std::fs::read(to.join("su")).unwrap(), b"hi");
    }
}
