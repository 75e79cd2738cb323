use super::*;

#[test]
fn each_thing_said_is_in_the_text() {
    let metrics = Metrics::new();
    metrics.observe_stage(Stage::CloneIdentity, Duration::from_millis(7));
    metrics.clone_failed(ErrorCode::NoCapacity);
    metrics.vm_ended(EndReason::PageLost);
    metrics.add_faults(FaultKind::Mapped, 3);
    metrics.add_cache_filled(Source::Frozen, 65_536);
    metrics.add_waited(Place::Peer, [2, 0, 1].into_iter(), 55);
    metrics.add_transferred(
        Side::Served,
        Role::Ahead,
        Traffic { requests: 1, pages: 16, bytes: 70 },
    );
    metrics.add_sourced(Sourced::Holder, 16);
    metrics.add_sourced(Sourced::Unverified, 3);
    metrics.add_sourced(Sourced::Disk, 5);
    metrics.add_sourced(Sourced::Forged, 1);
    metrics.add_image_chunks(ImageChunk::Relayed, 4);
    metrics.add_multicast(Multicast::Pages(Side::Served, GroupPages::Lockstep), 7);
    metrics.add_multicast(Multicast::Event(Side::Asked, GroupEvent::InVain), 2);
    metrics.request("GET", "/v1/vms/{vm}", 404);
    metrics.on_scrape(|metrics| {
        metrics.set_vms(VmState::Running, 2);
        metrics.set_admissible_bytes(1 << 30);
        metrics.set_vcpus(3, 128);
    });
    let text = metrics.text();
    for line in [
        r#"vmfork_fork_stage_seconds_count{stage="clone_identity"} 1"#,
        r#"vmfork_fork_stage_seconds_bucket{le="0.0064",stage="clone_identity"} 0"#,
        r#"vmfork_fork_stage_seconds_bucket{le="0.0128",stage="clone_identity"} 1"#,
        r#"vmfork_clones_failed_total{code="no_capacity"} 1"#,
        r#"vmfork_vms_ended_total{reason="page_lost"} 1"#,
        r#"vmfork_faults_total{kind="mapped"} 3"#,
        r#"vmfork_cache_filled_bytes_total{source="frozen"} 65536"#,
        r#"vmfork_fault_wait_seconds_bucket{le="0.00002",place="peer"} 2"#,
        r#"vmfork_fault_wait_seconds_bucket{le="0.000028",place="peer"} 3"#,
        r#"vmfork_fault_wait_seconds_bucket{le="+Inf",place="peer"} 3"#,
        r#"vmfork_fault_wait_seconds_sum{place="peer"} 0.000055"#,
        r#"vmfork_transfer_pages_total{side="served",role="ahead"} 16"#,
        r#"vmfork_transfer_bytes_total{side="served",role="ahead"} 70"#,
        r#"vmfork_transfer_came_pages_total{from="holder"} 16"#,
        "vmfork_transfer_unverified_pages_total 3",
        "vmfork_transfer_disk_pages_total 5",
        r#"vmfork_transfer_events_total{event="forged"} 1"#,
        r#"vmfork_image_chunks_total{what="relayed"} 4"#,
        r#"vmfork_multicast_pages_total{side="served",what="lockstep"} 7"#,
        r#"vmfork_multicast_events_total{side="asked",what="in_vain"} 2"#,
        r#"vmfork_http_requests_total{method="GET",route="/v1/vms/{vm}",status="404"} 1"#,
        r#"vmfork_vms{state="running"} 2"#,
        "vmfork_memory_admissible_bytes 1073741824",
        "vmfork_vcpus 3",
        "vmfork_vcpus_max 128",
    ] {
        assert!(text.lines().any(|l| l == line), "no `{line}` in\n{text}");
    }
    assert!(text.ends_with("# EOF\n"));
}

#[test]
fn what_disks_did_is_in_the_text() {
    use vmfork_disk::{
        DiskExport, DiskImage, DiskServer, DiskSet, DiskSpec, DiskStore, Durability, StoreOptions,
    };
    use vmfork_nbd::Span;
    let folder = tempfile::tempdir().expect("a folder");
    let options = StoreOptions { floor_bytes: 0 };
    let store = DiskStore::open(&folder.path().join("disks"), options).expect("a store");
    let blank = DiskImage::blank(1 << 20).expect("an image");
    let (name, vm, set) = ("data".to_owned(), "web".to_owned(), DiskSet::new(None));
    let spec = DiskSpec { name, vm, size_bytes: 1 << 20, set };
    let disk = Arc::new(store.create(&spec, &blank).expect("a disk"));
    disk.write(Span { offset_bytes: 512, len_bytes: 4096 }, &[1; 4096]).expect("room");
    let metrics = Metrics::new();
    metrics.set_disks(&store.totals(), store.layer_bytes());
    metrics.set_stalled(StallReason::NoSpace, 1);
    let listener = std::os::unix::net::UnixListener::bind(folder.path().join("s"));
    let uid = rustix::process::geteuid().as_raw();
    let server = DiskServer::start(listener.expect("a socket"), uid).expect("a server");
    assert!(server.add("data", DiskExport::new(disk, Durability::Host)));
    read_a_page(&folder.path().join("s"));
    drop(server);
    metrics.set_disks(&store.totals(), store.layer_bytes());
    // What disks did stays; what they hold does not.
    metrics.set_disks(&store.totals(), store.layer_bytes());
    let text = metrics.text();
    for line in [
        "vmfork_disk_reads_total 1",
        "vmfork_disk_read_bytes_total 4096",
        "vmfork_disk_writes_total 0",
        "vmfork_disk_partial_writes_total 1",
        "vmfork_disk_reconnects_total 0",
        r#"vmfork_disk_errors_total{reason="no_space"} 0"#,
        r#"vmfork_disk_request_seconds_count{op="read"} 1"#,
        r#"vmfork_disk_request_seconds_count{op="flush"} 0"#,
        "vmfork_disk_layer_bytes 0",
        r#"vmfork_disk_stalled_vms{reason="no_space"} 1"#,
    ] {
        assert!(text.lines().any(|l| l == line), "no `{line}` in\n{text}");
    }
}

/// As a client of the old style, which needs no more than its name.
fn read_a_page(socket: &std::path::Path) {
    use std::io::{Read, Write};
    let mut socket = std::os::unix::net::UnixStream::connect(socket).expect("a server");
    socket.set_read_timeout(Some(Duration::from_secs(20))).expect("a timeout");
    // No zeros after the size.
    let hello = [&3_u32.to_be_bytes()[..], b"IHAVEOPT", &[0, 0, 0, 1, 0, 0, 0, 4], b"data"];
    socket.write_all(&hello.concat()).expect("taken");
    socket.read_exact(&mut [0; 18 + 10]).expect("its size");
    let read = [&0x2560_9513_u32.to_be_bytes()[..], &[0; 4], &[0; 8], &[0; 8], &[0, 0, 16, 0]];
    socket.write_all(&read.concat()).expect("taken");
    socket.read_exact(&mut [0; 16 + 4096]).expect("a page");
}
