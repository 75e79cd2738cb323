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
    metrics.add_sourced(Sourced::Forged, 1);
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
        r#"vmfork_transfer_events_total{event="forged"} 1"#,
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
