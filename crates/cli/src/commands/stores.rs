//! What `push` and `pull` of snapshots and of images have in common.

use std::path::Path;

use anyhow::{Context as _, anyhow};
use vmfork_api::{TransferReply, TransferRequest};

use super::snapshot::quoted;
use crate::client::{Query, WHOLE};
use crate::config::{Endpoint, Global};
use crate::failure::{Exit, HintExt as _, Misuse};
use crate::format;
use crate::start::reach;

/// Have something of this name copied to another store. `push` is its route.
pub(super) async fn push(
    global: &Global,
    push: Query,
    name: &str,
    location: &str,
) -> anyhow::Result<Exit> {
    let location = placed(global, location)?;
    let client = reach(global).await?;
    let spinner = global.printer.spinner(format!("Pushing `{name}` to {location}"));
    let request = TransferRequest { location: location.clone(), wait: false };
    let reply: TransferReply = client.post(push, &request, WHOLE).await?;
    spinner.finish_and_clear();
    if global.printer.json {
        global.printer.document(&reply)?;
    } else {
        global.printer.note(&pushed(name, &location, &reply));
    }
    Ok(Exit::Done)
}

fn pushed(name: &str, location: &str, reply: &TransferReply) -> String {
    if reply.names.is_empty() {
        return format!("`{name}` is already in {location}");
    }
    format!(
        "Pushed {} to {location} in {}, {} sent",
        quoted(&reply.names),
        format::millis(reply.total_ms),
        format::size(reply.sent_bytes)
    )
}

/// The location for the daemon, which has another working folder: a relative path made absolute.
pub(super) fn placed(global: &Global, location: &str) -> anyhow::Result<String> {
    if location.contains("://") || Path::new(location).is_absolute() {
        return Ok(location.to_owned());
    }
    match &global.endpoint {
        Endpoint::Unix(_) => {
            let path = std::path::absolute(location)
                .with_context(|| format!("make the path of the folder {location} absolute"))?;
            let text = path.to_str().ok_or_else(|| {
                anyhow!("the path of the folder {} is not UTF-8; rename it", path.display())
            })?;
            Ok(text.to_owned())
        }
        Endpoint::Tcp(_) => {
            Err(Misuse(format!("{location}: a relative path has no meaning to a remote daemon")))
                .hint("use an absolute path on the daemon's host")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::RawGlobal;
    use crate::config::Environment;

    #[test]
    fn a_folder_is_named_from_the_root_and_a_bucket_as_it_is() {
        let here = Global::new(&RawGlobal::default(), &Environment::default()).unwrap();
        for given in ["s3://bucket/prefix", "/srv/store", "/srv/../store"] {
            assert_eq!(placed(&here, given).unwrap(), given);
        }
        let folder = std::env::current_dir().unwrap();
        assert_eq!(placed(&here, "store").unwrap(), folder.join("store").to_str().unwrap());
        let host = Some("tcp://127.0.0.1:7".into());
        let there =
            Global::new(&RawGlobal::default(), &Environment { host, ..Environment::default() });
        let there = there.unwrap();
        assert!(placed(&there, "s3://bucket/prefix").is_ok());
        assert!(placed(&there, "/srv/store").is_ok());
        assert!(crate::failure::is_misuse(&placed(&there, "store").unwrap_err()));
    }

    #[test]
    fn what_was_there_already_is_not_said_to_be_pushed() {
        let mut reply = TransferReply {
            schema: vmfork_api::SCHEMA.to_owned(),
            names: vec!["base".to_owned(), "warm".to_owned()],
            sent_bytes: 3 << 20,
            total_ms: 1250.0,
        };
        assert_eq!(
            pushed("warm", "/srv", &reply),
            "Pushed `base` and `warm` to /srv in 1.25 s, 3 MiB sent"
        );
        reply.names.clear();
        assert_eq!(pushed("warm", "/srv", &reply), "`warm` is already in /srv");
    }
}
