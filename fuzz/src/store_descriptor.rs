//! Descriptors of stored snapshots, of this layout and the first.

use vmfork_store::Descriptor;

/// What is read can be written and read again; also with the right check at the end.
pub fn run(data: &[u8]) {
    let check = format!("  \"check\": \"{}\"\n}}\n", blake3::hash(data).to_hex());
    for file in [data, &[data, check.as_bytes()].concat()] {
        let Ok(descriptor) = Descriptor::decode(file) else { continue };
        let again = descriptor.encode().expect("no longer than what was read");
        assert_eq!(Descriptor::decode(&again), Ok(descriptor));
    }
}

pub fn seeds() -> Vec<Vec<u8>> {
    let id = "1f".repeat(16);
    let file = |suffix: &str| {
        let hash = "2e".repeat(32);
        format!(r#"{{"file": "{id}-0123456789abcdef.{suffix}", "bytes": 9, "blake3": "{hash}"}}"#)
    };
    let images = ["memory", "disk:data"].map(|role| {
        let table = file(&match role.strip_prefix("disk:") {
            Some(device) => format!("disk-{device}.table"),
            None => "table".to_owned(),
        });
        format!(
            r#"{{"role": "{role}", "bytes": 8192, "page_bytes": 4096, "chunk_pages": 8,
   "compression": {{"kind": "none"}}, "base": {{"name": "base", "id": "{id}", "role": "{role}"}},
   "counts": {{"own_pages": 1, "zero_pages": 0, "chunks": 1, "stored_bytes": 5, "shared_bytes": 6}},
   "table": {table}}}"#
        )
    });
    let now = format!(
        r#"{{
  "schema": "vmfork-snapshot/2", "id": "{id}", "name": "web", "created_unix_ms": 1,
  "images": [{}], "state": {},
  "vm": {{"memory_mib": 4}},
"#,
        images.join(", "),
        file("state")
    );
    let newer = now.replace("memory", "gpu");
    let first = format!(
        r#"{{
  "schema": "vmfork-snapshot/1", "id": "{id}", "name": "web", "created_unix_ms": 1, "pages": 64,
  "page_bytes": 4096, "chunk_pages": 8, "compression": {{"kind": "zstd", "level": 1}},
  "base": {{"name": "base", "id": "{id}"}},
  "counts": {{"own_pages": 1, "zero_pages": 2, "chunks": 1, "stored_bytes": 5, "shared_bytes": 6}},
  "files": {{"table": {}, "state": {}}},
  "vm": {{"memory_mib": 4, "ratio": 1.5}},
"#,
        file("table"),
        file("state")
    );
    [now, newer, first].map(String::into_bytes).to_vec()
}
