//! `vmfork ps`.

use serde::Serialize;
use vmfork_api::{HostInfo, LabelFilter, Vm};

use crate::client::{Client, Query, understood};
use crate::config::Global;
use crate::failure::Exit;
use crate::format;
use crate::printer::{Field, Level};
use crate::start::reach;

/// What follows for a list if hosts do not answer.
pub(super) const MISSING: &str = "VMs there are not shown";

#[derive(Serialize)]
pub(super) struct VmList {
    pub(super) vms: Vec<Vm>,
}

pub(super) async fn run(
    global: &Global,
    all: bool,
    filters: &[LabelFilter],
) -> anyhow::Result<Exit> {
    let client = reach(global).await?;
    let path = labelled(query(all), filters);
    let vms: Vec<Vm> = understood(&path, &client.get_of_all(path.clone(), MISSING).await?)?;
    let printer = &global.printer;
    if printer.json {
        printer.with_schema(&VmList { vms })?;
    } else if printer.level == Level::Quiet {
        // For `vmfork kill $(vmfork ps -q)`.
        printer.data(&vms.iter().map(|vm| format!("{}\n", vm.name)).collect::<String>())?;
    } else {
        let mut header = vec!["VM", "PARENT", "STATE", "AGE", "PRIVATE", "SHARED", "FAULTS"];
        let mut rows: Vec<Vec<Field>> = vms.iter().map(row).collect();
        let origins: Vec<Option<&str>> = vms.iter().map(|vm| vm.snapshot.as_deref()).collect();
        add_snapshots(&mut header, &mut rows, &origins);
        let hosts: Vec<Option<&str>> = vms.iter().map(|vm| vm.host.as_deref()).collect();
        add_column("HOST", &mut header, &mut rows, &hosts);
        printer.table(&header, rows)?;
        if all && filters.is_empty() {
            let host: HostInfo = client.get(Query::new("/v1/host")).await?;
            for vm in &host.lost {
                printer.note(&format!(
                    "lost when the previous daemon ended: {} (remove it with `vmfork rm {}`)",
                    vm.name, vm.name
                ));
            }
        }
    }
    Ok(Exit::Done)
}

pub(super) async fn list(client: &Client<'_>, all: bool) -> anyhow::Result<Vec<Vm>> {
    client.get(query(all)).await
}

fn query(all: bool) -> Query {
    let query = Query::new("/v1/vms");
    if all { query.with("all", "true") } else { query }
}

/// The same, filtered.
pub(super) fn labelled(query: Query, filters: &[LabelFilter]) -> Query {
    filters.iter().fold(query, |query, filter| query.with("label", &filter.to_string()))
}

fn row(vm: &Vm) -> Vec<Field> {
    let mut row = vec![
        Field::Text(vm.name.clone()),
        Field::Text(vm.parent.clone().unwrap_or_else(|| "-".to_owned())),
        Field::State(vm.state),
        Field::Figure(format::age_since(vm.created_unix_ms)),
    ];
    row.extend(memory_fields(vm));
    row
}

/// A column at the end with the snapshots that VMs were started from, if any was.
pub(super) fn add_snapshots(
    header: &mut Vec<&str>,
    rows: &mut [Vec<Field>],
    snapshots: &[Option<&str>],
) {
    add_column("SNAPSHOT", header, rows, snapshots);
}

/// A column at the end, if there is anything in it.
pub(super) fn add_column<'a>(
    name: &'a str,
    header: &mut Vec<&'a str>,
    rows: &mut [Vec<Field>],
    texts: &[Option<&str>],
) {
    if texts.iter().all(Option::is_none) {
        return;
    }
    header.push(name);
    for (row, text) in rows.iter_mut().zip(texts) {
        row.push(Field::Text(text.unwrap_or("-").to_owned()));
    }
}

/// Private and shared memory, and faults; an ended VM has none.
pub(super) fn memory_fields(vm: &Vm) -> [Field; 3] {
    let figure = |text: String| Field::Figure(if vm.state.has_ended() { "-".into() } else { text });
    [
        figure(format::size(vm.private_bytes)),
        figure(format::size(vm.shared_bytes)),
        figure(format::count(vm.faults)),
    ]
}
