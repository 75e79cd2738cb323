//! `vmfork cluster init|token|join|ls|leave|drain|activate`.

use std::time::Duration;

use vmfork_api::{ClusterHost, ClusterInfo, ClusterToken, HostLiveness, HostState};

use crate::client::{QUICK, Query};
use crate::config::{ClusterAction, Global};
use crate::failure::Exit;
use crate::format;
use crate::printer::{Field, Printer};
use crate::start::reach;

/// Another host has to let this one in.
const JOIN_BOUND: Duration = Duration::from_secs(60);

pub(super) async fn run(global: &Global, action: ClusterAction) -> anyhow::Result<Exit> {
    let client = reach(global).await?;
    let printer = &global.printer;
    let to = |what: &str| Query::new(format!("/v1/cluster{what}"));
    let info: ClusterInfo = match action {
        ClusterAction::Token(request) => {
            let token: ClusterToken = client.post(to("/token"), &request, QUICK).await?;
            if printer.json {
                printer.document(&token)?;
            } else {
                printer.data(&format!("{}\n", token.token))?;
                printer.note(
                    "It lets one host join: run `vmfork cluster join TOKEN --address HOST:PORT` there",
                );
            }
            return Ok(Exit::Done);
        }
        ClusterAction::Init(request) => {
            let info = client.post(to(""), &request, QUICK).await?;
            warn_of_poor_name(printer, &info, "vmfork cluster init --name NAME");
            info
        }
        ClusterAction::Join(request) => {
            let info = client.post(to("/join"), &request, JOIN_BOUND).await?;
            warn_of_poor_name(printer, &info, "vmfork cluster join TOKEN --name NAME");
            info
        }
        ClusterAction::Ls => client.get(to("")).await?,
        ClusterAction::Leave(request) => client.post(to("/leave"), &request, JOIN_BOUND).await?,
        ClusterAction::Drain(request) => client.post(to("/drain"), &request, QUICK).await?,
        ClusterAction::Activate(request) => client.post(to("/activate"), &request, QUICK).await?,
    };
    if printer.json {
        printer.document(&info)?;
    } else if let Some(note) = info.note {
        printer.note(&note);
    } else if info.here.is_none() {
        printer.note("This host is in no cluster; create one with `vmfork cluster init`");
    } else {
        let header = ["HOST", "ADDRESS", "STATE", "LIVENESS", "ADMISSIBLE", "VCPUS", "ID"];
        printer.table(&header, info.hosts.iter().map(row).collect())?;
    }
    Ok(Exit::Done)
}

/// Names that installers and cloud images give to every host.
const POOR_NAMES: [&str; 8] =
    ["localhost", "vm", "host", "server", "linux", "debian", "ubuntu", "guest"];

/// Warns if the name of this host does not tell it from other hosts. `again`: the command that
/// gives it another name.
fn warn_of_poor_name(printer: &Printer, info: &ClusterInfo, again: &str) {
    let here = info.hosts.iter().find(|host| Some(&host.id) == info.here.as_ref());
    let Some((name, flaw)) = here.and_then(|here| Some((&here.name, flaw(here, &info.hosts)?)))
    else {
        return;
    };
    printer.warn(&format!("the name of this host in the cluster is `{name}`, {flaw}"));
    printer.note(&format!(
        "hint: for another name, run `vmfork cluster leave`, then `{again} --address HOST:PORT`"
    ));
}

/// What is wrong with the name of a host, if anything is.
fn flaw(here: &ClusterHost, hosts: &[ClusterHost]) -> Option<&'static str> {
    let first_label = here.name.split('.').next().unwrap_or_default().to_ascii_lowercase();
    if first_label.is_empty() || POOR_NAMES.contains(&first_label.as_str()) {
        return Some("a name that many hosts have");
    }
    let is_namesake = |other: &ClusterHost| other.id != here.id && other.name == here.name;
    hosts.iter().any(is_namesake).then_some("the name of another member too")
}

fn row(host: &ClusterHost) -> Vec<Field> {
    let state = match host.state {
        HostState::Active => "active",
        HostState::Draining => "draining",
    };
    let liveness = match host.liveness {
        HostLiveness::Here => "here",
        HostLiveness::Alive => "alive",
        HostLiveness::Suspect => "suspect",
        HostLiveness::Gone => "gone",
    };
    vec![
        Field::Text(host.name.clone()),
        Field::Text(host.address.clone()),
        Field::Text(state.to_owned()),
        Field::Text(liveness.to_owned()),
        Field::Figure(host.memory_admissible_bytes.map_or_else(|| "-".to_owned(), format::size)),
        Field::Figure(host.vcpus_admissible.map_or_else(|| "-".to_owned(), |n| n.to_string())),
        Field::Text(host.id.clone()),
    ]
}
