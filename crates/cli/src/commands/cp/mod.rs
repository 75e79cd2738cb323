//! `vmfork cp`: files through the daemon's file routes, folders as a tar stream through `tar` in
//! the guest.
//!
//! A target that is a folder gets the source into it, as with `cp`.

mod file;
mod folder;
mod pipe;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use serde::Serialize;

use super::exec;
use crate::client::{Client, Query};
use crate::config::{CpConfig, Global, Place};
use crate::failure::{Exit, HintExt as _, Misuse};
use crate::format;
use crate::start::reach;

/// For a look at the guest's files.
const LOOK_BOUND: Duration = Duration::from_secs(15);

pub(super) async fn run(global: &Global, config: CpConfig) -> anyhow::Result<Exit> {
    let client = &reach(global).await?;
    match (config.from, config.to) {
        (Place::Guest { vm, path }, to) => {
            let folder = is_guest_folder(client, &vm, &path).await?;
            match (folder, to) {
                (false, Place::Stream) => file::print(client, &vm, &path).await,
                (false, Place::Here(to)) => file::fetch(client, &vm, &path, to).await,
                (true, Place::Here(to)) => folder::fetch(client, &vm, &path, to).await,
                (true, Place::Stream) => Err(anyhow!("`{vm}:{path}` is a folder"))
                    .hint(format!("use `vmfork exec {vm} -- tar -c -C {path} .` for an archive")),
                (_, Place::Guest { .. }) => Err(misplaced()),
            }
        }
        (Place::Here(from), Place::Guest { vm, path }) => {
            let metadata = tokio::fs::metadata(&from)
                .await
                .with_context(|| format!("read {}", from.display()))?;
            let inside = is_guest_folder(client, &vm, &path).await?;
            if metadata.is_dir() {
                return folder::store(client, from, &vm, &path, inside).await;
            }
            let name = from.file_name().and_then(|name| name.to_str());
            file::store(client, Some(&from), &vm, &target(path, inside, name)?).await
        }
        (_, Place::Guest { vm, path }) => {
            let inside = is_guest_folder(client, &vm, &path).await?;
            file::store(client, None, &vm, &target(path, inside, None)?).await
        }
        (Place::Here(_) | Place::Stream, Place::Here(_) | Place::Stream) => Err(misplaced()),
    }
}

/// [`crate::config`] lets no such pair through.
fn misplaced() -> anyhow::Error {
    Misuse("cp: exactly one side must be in a VM; write it as VM:PATH".to_owned()).into()
}

/// Where in the guest a file goes.
fn target(path: String, is_folder: bool, name: Option<&str>) -> anyhow::Result<String> {
    if !is_folder && !path.ends_with('/') {
        return Ok(path);
    }
    let name =
        name.ok_or_else(|| anyhow!("`{path}` is a folder")).hint("name the file to write")?;
    Ok(format!("{}/{name}", path.trim_end_matches('/')))
}

/// Asks `test` in the guest. A guest that has none is taken to be asked for a file, and the
/// transfer itself tells what is wrong; a VM that is not there is told here.
async fn is_guest_folder(client: &Client<'_>, vm: &str, path: &str) -> anyhow::Result<bool> {
    match exec::ask(client, vm, &["test", "-d", path], LOOK_BOUND).await {
        Ok((code, _)) => Ok(code == 0),
        Err(_) => {
            client.get::<vmfork_api::VmDetail>(Query::new(format!("/v1/vms/{vm}"))).await?;
            Ok(false)
        }
    }
}

#[derive(Serialize)]
struct Copied<'a> {
    from: &'a str,
    to: &'a str,
    size_bytes: u64,
}

fn report(client: &Client<'_>, from: &str, to: &str, size_bytes: u64) -> anyhow::Result<Exit> {
    let printer = &client.global.printer;
    if printer.json {
        printer.with_schema(&Copied { from, to, size_bytes })?;
    } else {
        printer.note(&format!("Copied {} from {from} to {to}", format::size(size_bytes)));
    }
    Ok(Exit::Done)
}

/// The last part of a guest's path, to name a copy here. Nothing that leaves the folder.
fn guest_file_name(path: &str) -> anyhow::Result<PathBuf> {
    match path.trim_end_matches('/').rsplit('/').next() {
        Some(name) if !matches!(name, "" | "." | "..") => Ok(PathBuf::from(name)),
        _ => Err(anyhow!("`{path}` does not end in a file name")).hint("name the target file"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_goes_into_a_folder_under_its_own_name() {
        assert_eq!(target("/tmp/x".into(), false, Some("a")).unwrap(), "/tmp/x");
        assert_eq!(target("/tmp".into(), true, Some("a")).unwrap(), "/tmp/a");
        assert_eq!(target("/new/".into(), false, Some("a")).unwrap(), "/new/a");
        assert_eq!(target("/".into(), true, Some("a")).unwrap(), "/a");
        assert!(target("/tmp".into(), true, None).is_err());
    }

    #[test]
    fn a_guests_path_names_no_folder_above_ours() {
        assert_eq!(guest_file_name("/etc/hosts").unwrap(), PathBuf::from("hosts"));
        assert_eq!(guest_file_name("dir/").unwrap(), PathBuf::from("dir"));
        for bad in ["/", "..", "/a/..", "/a/."] {
            assert!(guest_file_name(bad).is_err(), "{bad}");
        }
    }
}
