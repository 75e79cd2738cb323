//! `vmfork tree`: the families, drawn; in a cluster, with the host of each VM.
//!
//! A chain of forks can be as deep as its user likes, and the document nests twice per generation.
//! So it is read, and drawn, on a thread with a stack for it instead of being refused at serde's
//! limit of 128.

use anyhow::{Context as _, anyhow};
use bytes::Bytes;
use serde::Deserialize as _;
use vmfork_api::{LabelFilter, SCHEMA, TreeNode, Vm};

use super::ps::{MISSING, add_column, add_snapshots, labelled, memory_fields};
use crate::client::Query;
use crate::config::Global;
use crate::failure::Exit;
use crate::format;
use crate::printer::Field;
use crate::start::reach;

/// Enough for about 10,000 generations; the kernel backs only the pages that are touched.
const STACK_BYTES: usize = 256 << 20;

pub(super) async fn run(global: &Global, filters: &[LabelFilter]) -> anyhow::Result<Exit> {
    let client = reach(global).await?;
    let document = client.get_of_all(labelled(Query::new("/v1/tree"), filters), MISSING).await?;
    let text = String::from_utf8(document.to_vec())
        .context("the tree in the reply of the daemon is not UTF-8")?;
    let lines = deep(document).await.context("the tree in the reply of the daemon is malformed")?;
    if global.printer.json {
        global.printer.line(&format!("{{\"schema\":\"{SCHEMA}\",\"families\":{text}}}"))?;
        return Ok(Exit::Done);
    }
    let row = |(branch, vm): &(String, Vm)| {
        let mut row = vec![
            Field::Text(format!("{branch}{}", vm.name)),
            Field::Figure(vm.vmid.to_string()),
            Field::State(vm.state),
            Field::Figure(format::age_since(vm.created_unix_ms)),
        ];
        row.extend(memory_fields(vm));
        row
    };
    let mut header = vec!["VM", "VMID", "STATE", "AGE", "PRIVATE", "SHARED", "FAULTS"];
    let mut rows: Vec<Vec<Field>> = lines.iter().map(row).collect();
    let origins: Vec<Option<&str>> = lines.iter().map(|(_, vm)| vm.snapshot.as_deref()).collect();
    add_snapshots(&mut header, &mut rows, &origins);
    let hosts: Vec<Option<&str>> = lines.iter().map(|(_, vm)| vm.host.as_deref()).collect();
    add_column("HOST", &mut header, &mut rows, &hosts);
    global.printer.table(&header, rows)?;
    Ok(Exit::Done)
}

/// Reads and draws on a thread of its own.
async fn deep(document: Bytes) -> anyhow::Result<Vec<(String, Vm)>> {
    let (tx, rx) = tokio::sync::oneshot::channel();
    std::thread::Builder::new()
        .name("tree".to_owned())
        .stack_size(STACK_BYTES)
        .spawn(move || {
            let mut deserializer = serde_json::Deserializer::from_slice(&document);
            deserializer.disable_recursion_limit();
            let lines = Vec::<TreeNode>::deserialize(&mut deserializer).map(|families| {
                let mut lines = Vec::new();
                for family in families {
                    draw(family, "", "", &mut lines);
                }
                lines
            });
            let _ = tx.send(lines);
        })
        .context("start a thread")?;
    Ok(rx.await.map_err(|_| anyhow!("its reader ended early"))??)
}

/// `first` stands before the node itself, `rest` before what hangs below it.
fn draw(node: TreeNode, first: &str, rest: &str, lines: &mut Vec<(String, Vm)>) {
    lines.push((first.to_owned(), node.vm));
    let last = node.children.len().saturating_sub(1);
    for (i, child) in node.children.into_iter().enumerate() {
        let (branch, below) = if i == last { ("└─ ", "   ") } else { ("├─ ", "│  ") };
        draw(child, &format!("{rest}{branch}"), &format!("{rest}{below}"), lines);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(name: &str, children: &str) -> String {
        format!(
            r#"{{"vm":{{"id":"0","name":"{name}","image":"i","family":"0","parent":null,"vmid":0,
            "state":"running","reason":null,"accel":"tcg","cpus":1,"memory_mib":512,
            "created_unix_ms":0,"ready_ms":null,"pid":null,"clones":0,"private_bytes":0,
            "shared_bytes":0,"faults":0}},"children":[{children}]}}"#
        )
    }

    async fn drawn(families: &str) -> Vec<String> {
        let lines = deep(Bytes::from(format!("[{families}]"))).await.expect("a tree");
        lines.into_iter().map(|(branch, vm)| format!("{branch}{}", vm.name)).collect()
    }

    #[tokio::test]
    async fn branches_connect_parents_and_clones() {
        let family = [
            node("web.1", &node("web.1.1", "")),
            node("web.2", &[node("web.2.1", ""), node("web.2.2", "")].join(",")),
        ];
        let families = [node("web", &family.join(",")), node("db", "")].join(",");
        assert_eq!(
            drawn(&families).await,
            [
                "web",
                "├─ web.1",
                "│  └─ web.1.1",
                "└─ web.2",
                "   ├─ web.2.1",
                "   └─ web.2.2",
                "db",
            ]
        );
    }

    #[tokio::test]
    async fn a_chain_of_a_thousand_generations_is_read() {
        let chain = (0..1000).rev().fold(String::new(), |below, i| node(&format!("g{i}"), &below));
        assert_eq!(drawn(&chain).await.len(), 1000);
    }
}
