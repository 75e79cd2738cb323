//! `vmfork snapshot inspect` and `profile show`.

use vmfork_api::{
    Compression, ImageRole, ProfileInfo, Progress, Snapshot, SnapshotDetail, SnapshotImage,
    SnapshotState,
};

use super::route;
use crate::commands::inspect::{PAGE_BYTES, pages, section};
use crate::commands::run::accel_word;
use crate::config::Global;
use crate::failure::Exit;
use crate::format;
use crate::printer::{Field, render_table};
use crate::start::reach;

pub(super) async fn inspect(global: &Global, name: &str) -> anyhow::Result<Exit> {
    let client = reach(global).await?;
    let detail: SnapshotDetail = client.get(route(name, "")).await?;
    if global.printer.json {
        global.printer.document(&detail)?;
    } else {
        global.printer.data(&render(&detail))?;
    }
    Ok(Exit::Done)
}

pub(super) async fn profile(global: &Global, name: &str) -> anyhow::Result<Exit> {
    let client = reach(global).await?;
    let profile: ProfileInfo = client.get(route(name, "/profile")).await?;
    if global.printer.json {
        global.printer.with_schema(&profile)?;
    } else {
        global.printer.data(&render_profile(&profile))?;
    }
    Ok(Exit::Done)
}

/// Its state, with the progress if there is one: `writing 42%`.
pub(super) fn state(snapshot: &Snapshot) -> String {
    let Progress { done_bytes, total_bytes } = snapshot.progress;
    let word = match snapshot.state {
        SnapshotState::Writing => "writing",
        SnapshotState::Pulling => "pulling",
        SnapshotState::Ready => return "ready".to_owned(),
        SnapshotState::Failed => return "failed".to_owned(),
    };
    // Before the first byte is counted, or after the last: it is at something that has no measure.
    if done_bytes >= total_bytes {
        return word.to_owned();
    }
    let percent = u128::from(done_bytes) * 100 / u128::from(total_bytes);
    format!("{word} {percent}%")
}

/// `210 MiB of 512 MiB as 64 MiB, 12.5 % of its memory`, with the disks' sizes if there are any.
pub(super) fn stored(snapshot: &Snapshot) -> String {
    let memory_bytes = match snapshot.disk_only {
        true => 0,
        false => snapshot.memory_mib.saturating_mul(1 << 20),
    };
    let all_bytes = memory_bytes.saturating_add(snapshot.disk_bytes);
    let of_what = match (snapshot.disk_only, snapshot.disk_bytes) {
        (true, _) => "disks",
        (false, 0) => "memory",
        _ => "memory and disks",
    };
    let mut text = format!(
        "{} of {} as {}, {} of its {of_what}",
        format::size(snapshot.own_bytes),
        format::size(all_bytes),
        format::size(snapshot.stored_bytes),
        format::percent(snapshot.stored_bytes, all_bytes)
    );
    if snapshot.shared_bytes != 0 {
        let shared = format::size(snapshot.shared_bytes);
        text.push_str(&format!("; {shared} more were in the store already"));
    }
    if let Some(base) = &snapshot.base {
        text.push_str(&format!("; the rest is as in `{}`", format::printable(base)));
    }
    text
}

fn render(detail: &SnapshotDetail) -> String {
    let snapshot = &detail.snapshot;
    let or_none = |text: &Option<String>| text.clone().unwrap_or_else(|| "-".to_owned());
    let names = |names: &[String]| match names {
        [] => "-".to_owned(),
        names => names.join(" "),
    };
    let mut at = state(snapshot);
    if let Some(remote) = &snapshot.remote {
        at = format!("{at}, from {remote}");
    }
    if let Some(reason) = &snapshot.reason {
        at = format!("{at}: {reason}");
    }
    let compression = match detail.compression {
        Compression::None => "as they are",
        Compression::Zstd => "zstd",
    };
    let profile = &detail.profile;
    let mut fields: Vec<(&str, String)> = vec![
        ("name", snapshot.name.clone()),
        ("id", or_none(&snapshot.id)),
        ("state", at),
        ("image", snapshot.image.clone()),
        ("base", or_none(&snapshot.base)),
        ("deltas of it", names(&detail.dependants)),
        ("vms", names(&detail.vm_names)),
        ("age", format::age_since(snapshot.created_unix_ms)),
        ("paused for", format::millis(detail.pause_ms)),
        (
            "machine",
            format!(
                "{}, {}, {}",
                format::plural(u64::from(snapshot.cpus), "vCPU"),
                format::size(snapshot.memory_mib.saturating_mul(1 << 20)),
                accel_word(snapshot.accel)
            ),
        ),
        ("taken on", format!("QEMU {}, {}, {}", detail.qemu_version, detail.machine, detail.cpu)),
        ("guest kernel", or_none(&detail.guest_kernel)),
        ("stored", stored(snapshot)),
        ("chunks", format!("of {}, {compression}", format::plural(detail.chunk_pages, "page"))),
        ("own", pages(detail.own_pages)),
        ("zero", pages(detail.zero_pages)),
        ("profile", summary(profile)),
    ];
    if snapshot.disk_only {
        // Of a memory.
        fields.retain(|(name, _)| *name != "profile");
        fields.push(("starts", "by a boot: it has the disks alone".to_owned()));
    }
    fields.extend(detail.images.iter().map(|of_it| ("holds", image(of_it))));
    if !snapshot.labels.is_empty() {
        let at = fields.iter().position(|(name, _)| *name == "vms").unwrap_or(fields.len());
        fields.insert(at, ("labels", snapshot.labels.to_string()));
    }
    for (_, value) in &mut fields {
        *value = format::printable(value);
    }
    section("", &fields)
}

/// `memory, 512 MiB: 53,760 own and 1 zero pages, a delta on \`cold\``.
fn image(image: &SnapshotImage) -> String {
    let role = match (image.role, &image.device) {
        (ImageRole::Memory, _) => "memory".to_owned(),
        (ImageRole::Disk, device) => {
            format!("disk {}", device.as_deref().unwrap_or("without a name"))
        }
    };
    let mut text = format!(
        "{role}, {}: {} own and {} zero pages",
        format::size(image.bytes),
        format::count(image.own_pages),
        format::count(image.zero_pages)
    );
    if let Some(base) = &image.base {
        text.push_str(&format!(", a delta on `{base}`"));
    }
    text
}

fn summary(profile: &ProfileInfo) -> String {
    let recording = if profile.recording { ", one more is being recorded" } else { "" };
    format!(
        "{} from {}{recording}",
        pages(profile.working_set_pages),
        format::plural(u64::from(profile.runs), "run")
    )
}

fn render_profile(profile: &ProfileInfo) -> String {
    let fields = [
        ("runs", format::count(u64::from(profile.runs))),
        ("working set", pages(profile.working_set_pages)),
        ("stored", format::size(profile.working_set_bytes)),
        ("recording", if profile.recording { "yes" } else { "no" }.to_owned()),
    ];
    let mut text = section("", &fields);
    if profile.clusters.is_empty() {
        return text;
    }
    let rows = profile.clusters.iter().map(|cluster| {
        vec![
            Field::Figure(format!("{:#x}", cluster.first_page.saturating_mul(PAGE_BYTES))),
            Field::Figure(format::count(cluster.pages)),
            Field::Figure(format!("{:.2}", cluster.frequency)),
            Field::Figure(format::millis(cluster.first_access_ms)),
        ]
    });
    text.push('\n');
    text.push_str(&render_table(
        &["ADDRESS", "PAGES", "FREQUENCY", "TOUCHED AFTER"],
        rows.collect(),
        false,
    ));
    text
}

#[cfg(test)]
pub(super) mod tests {
    use vmfork_api::{Accel, ProfileCluster};

    use super::*;

    pub(in super::super) fn detail(name: &str) -> SnapshotDetail {
        SnapshotDetail {
            schema: vmfork_api::SCHEMA.to_owned(),
            snapshot: Snapshot {
                name: name.to_owned(),
                id: Some("0".repeat(32)),
                state: SnapshotState::Ready,
                reason: None,
                created_unix_ms: 0,
                image: "debian".to_owned(),
                memory_mib: 512,
                disk_only: false,
                disk_bytes: 0,
                cpus: 1,
                accel: Accel::Tcg,
                base: None,
                own_bytes: 210 << 20,
                stored_bytes: 64 << 20,
                shared_bytes: 0,
                progress: Progress::default(),
                vms: 0,
                remote: None,
                labels: vmfork_api::Labels::default(),
            },
            qemu_version: "7.2.22".to_owned(),
            machine: "pc-q35-7.2".to_owned(),
            cpu: "max".to_owned(),
            guest_kernel: None,
            pause_ms: 3.42,
            compression: Compression::Zstd,
            chunk_pages: 64,
            own_pages: 53_760,
            zero_pages: 1,
            images: Vec::new(),
            dependants: Vec::new(),
            vm_names: Vec::new(),
            profile: ProfileInfo::default(),
        }
    }

    #[test]
    fn progress_is_shown_only_while_there_is_some() {
        let mut snapshot = detail("warm").snapshot;
        assert_eq!(state(&snapshot), "ready");
        for (done_bytes, total_bytes, text) in [
            (0, 0, "writing"),
            (0, 9, "writing 0%"),
            (42, 100, "writing 42%"),
            (999, 1000, "writing 99%"),
            (9, 9, "writing"),
            (u64::MAX - 1, u64::MAX, "writing 99%"),
        ] {
            snapshot.state = SnapshotState::Writing;
            snapshot.progress = Progress { done_bytes, total_bytes };
            assert_eq!(state(&snapshot), text);
        }
    }

    #[test]
    fn a_delta_says_whose_and_what_it_shares() {
        let mut snapshot = detail("warm").snapshot;
        snapshot.base = Some("cold".to_owned());
        snapshot.shared_bytes = 5 << 20;
        assert_eq!(
            stored(&snapshot),
            "210 MiB of 512 MiB as 64 MiB, 12.5 % of its memory; 5 MiB more were in the store \
             already; the rest is as in `cold`"
        );
        snapshot.disk_bytes = 512 << 20;
        let text = stored(&snapshot);
        assert!(
            text.starts_with("210 MiB of 1 GiB as 64 MiB, 6.3 % of its memory and disks;"),
            "{text}"
        );
        snapshot.disk_bytes = 0;
        // What is damaged has no memory that is known.
        snapshot.memory_mib = 0;
        assert!(stored(&snapshot).contains("- of its memory"));
    }

    #[test]
    fn each_image_has_a_line() {
        let mut detail = detail("warm");
        let memory = SnapshotImage {
            role: ImageRole::Memory,
            device: None,
            bytes: 512 << 20,
            page_bytes: 4096,
            own_pages: 53_760,
            zero_pages: 1,
            stored_bytes: 64 << 20,
            shared_bytes: 0,
            base: Some("cold".to_owned()),
            root: "0".repeat(64),
        };
        let disk = SnapshotImage {
            role: ImageRole::Disk,
            device: Some("data".to_owned()),
            base: None,
            ..memory.clone()
        };
        detail.images = vec![memory, disk];
        let text = render(&detail);
        for line in [
            "memory, 512 MiB: 53,760 own and 1 zero pages, a delta on `cold`",
            "disk data, 512 MiB: 53,760 own and 1 zero pages",
        ] {
            assert!(text.lines().any(|found| found.ends_with(line)), "{line} in {text}");
        }
    }

    #[test]
    fn what_others_wrote_does_not_play_with_the_terminal() {
        let mut detail = detail("warm");
        detail.snapshot.reason = Some("bad\u{1b}[2J".to_owned());
        detail.cpu = "\u{7}".to_owned();
        let text = render(&detail);
        assert!(text.chars().all(|c| c == '\n' || !c.is_control()), "{text:?}");
    }

    #[test]
    fn a_profile_lists_its_clusters_by_guest_address() {
        let mut profile = ProfileInfo { runs: 2, working_set_pages: 512, ..ProfileInfo::default() };
        assert!(!render_profile(&profile).contains("ADDRESS"));
        profile.clusters.push(ProfileCluster {
            first_page: 16,
            pages: 512,
            frequency: 0.75,
            first_access_ms: 1.26,
        });
        assert_eq!(
            render_profile(&profile),
            "runs         2\n\
             working set  512 pages (2 MiB)\n\
             stored       0 B\n\
             recording    no\n\
             \n\
             ADDRESS  PAGES  FREQUENCY  TOUCHED AFTER\n\
             0x10000    512       0.75         1.3 ms\n"
        );
    }
}
