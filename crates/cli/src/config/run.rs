//! The options of `vmfork run`. Only the daemon may know whether NAME is an image or a snapshot, so
//! the options are read as both, and the error of the wrong reading is dropped.

use std::time::Duration;

use vmfork_api::disk::RootDevice;
use vmfork_api::{Accel, Prefetch, Root, RunRequest, StartRequest};

use super::{misuse, value};
use crate::args::{RawAccel, RawPrefetch, RawRoot, RawRootDevice, RawRun};
use crate::failure::Misuse;

/// The daemon's own bounds, where a request names none (see `vmfork-api`).
const BOOT_TIMEOUT_DEFAULT: Duration = Duration::from_secs(720);
const START_TIMEOUT_DEFAULT: Duration = Duration::from_secs(60);

const CPUS_MAX: u32 = 64;

/// `--hydrate` without a rate: more than any store gives.
const UNLIMITED_MIB_PER_S: u32 = u32::MAX;

#[derive(Debug)]
pub(crate) enum RunConfig {
    Image(BootConfig),
    Snapshot(StartConfig),
    /// Whichever `name` is, if the options fit that.
    ByName {
        name: String,
        image: Result<BootConfig, Misuse>,
        snapshot: Result<StartConfig, Misuse>,
    },
}

/// A VM from an image.
#[derive(Debug)]
pub(crate) struct BootConfig {
    pub(crate) request: RunRequest,
    /// How long the daemon may take for it.
    pub(crate) bound: Duration,
}

/// VMs from a stored snapshot.
#[derive(Debug)]
pub(crate) struct StartConfig {
    pub(crate) snapshot: String,
    pub(crate) request: StartRequest,
    /// How long the daemon may take for it.
    pub(crate) bound: Duration,
}

pub(super) fn run(raw: RawRun) -> Result<RunConfig, Misuse> {
    let name = value::name(raw.name.clone(), "name of an image or a snapshot")?;
    let (insists_on_image, insists_on_snapshot) = (raw.image, raw.snapshot);
    let (of_images, of_snapshots) = (of_images(&raw), of_snapshots(&raw));
    let (boot, start) = (boot(&name, &raw)?, start(&name, raw)?);
    let image = match of_snapshots.as_slice() {
        [] => Ok(boot),
        given => {
            misuse(format!("run: `{name}` is an image, but {} for snapshots only", are(given)))
        }
    };
    let snapshot = match of_images.as_slice() {
        [] if start.bound.is_zero() => misuse(format!(
            "--timeout 0: `{name}` is a snapshot, and no VM can be ready in time; use a longer time"
        )),
        [] => Ok(start),
        given => misuse(format!(
            "run: `{name}` is a snapshot, but {} for images only; a snapshot fixes the memory, the \
             vCPUs, the accelerator and the disks of its VMs",
            are(given)
        )),
    };
    match (image, snapshot) {
        (image, _) if insists_on_image => Ok(RunConfig::Image(image?)),
        (_, snapshot) if insists_on_snapshot => Ok(RunConfig::Snapshot(snapshot?)),
        (Err(_), Err(_)) if !of_images.is_empty() => misuse(format!(
            "run: {} for images only, {} for snapshots only",
            are(&of_images),
            are(&of_snapshots)
        )),
        (image, snapshot) => Ok(RunConfig::ByName { name, image, snapshot }),
    }
}

/// The given options that apply to images only.
fn of_images(raw: &RawRun) -> Vec<&'static str> {
    let given = [
        (raw.memory.is_some(), "--memory"),
        (raw.cpus.is_some(), "--cpus"),
        (raw.accel.is_some(), "--accel"),
        (!raw.disks.is_empty(), "--disk"),
        (raw.root.is_some(), "--root"),
        (raw.root_size.is_some(), "--root-size"),
        (raw.root_device.is_some(), "--root-device"),
    ];
    given.into_iter().filter_map(|(is_given, option)| is_given.then_some(option)).collect()
}

fn of_snapshots(raw: &RawRun) -> Vec<&'static str> {
    let given = [
        (raw.count.is_some(), "-n"),
        (raw.names.len() > 1, "several --name"),
        (raw.all_or_nothing, "--all-or-nothing"),
        (raw.force, "--force"),
        (raw.prefetch.is_some(), "--prefetch"),
        (raw.hydrate.is_some(), "--hydrate"),
    ];
    given.into_iter().filter_map(|(is_given, option)| is_given.then_some(option)).collect()
}

/// `-n is`, `-n and --force are`.
fn are(options: &[&str]) -> String {
    match options {
        [one] => format!("{one} is"),
        several => format!("{} are", several.join(" and ")),
    }
}

fn boot(name: &str, raw: &RawRun) -> Result<BootConfig, Misuse> {
    if let Some(cpus) = raw.cpus.filter(|cpus| !(1..=CPUS_MAX).contains(cpus)) {
        return misuse(format!("--cpus {cpus}: out of range; use 1 to {CPUS_MAX}"));
    }
    let timeout = timeout(raw)?;
    let root = raw.root.map(|root| match root {
        RawRoot::Overlay => Root::Overlay,
        RawRoot::Tmpfs => Root::Tmpfs,
        RawRoot::Disk => Root::Disk,
    });
    let request = RunRequest {
        image: name.to_owned(),
        name: raw.names.first().cloned(),
        memory_mib: raw.memory.as_deref().map(value::memory_mib).transpose()?,
        cpus: raw.cpus,
        accel: raw.accel.map(|accel| match accel {
            RawAccel::Kvm => Accel::Kvm,
            RawAccel::Tcg => Accel::Tcg,
        }),
        boot_timeout_ms: timeout.map(value::millis),
        labels: value::labels(&raw.labels)?,
        ttl_ms: ttl(raw)?,
        disks: value::disks(&raw.disks, root)?,
        root,
        root_bytes: value::root_bytes(root, raw.root_size.as_deref())?,
        root_device: raw.root_device.map(|device| match device {
            RawRootDevice::Pmem => RootDevice::Pmem,
            RawRootDevice::Block => RootDevice::Block,
        }),
    };
    Ok(BootConfig { request, bound: timeout.unwrap_or(BOOT_TIMEOUT_DEFAULT) })
}

fn start(name: &str, raw: RawRun) -> Result<StartConfig, Misuse> {
    let (timeout, ttl_ms) = (timeout(&raw)?, ttl(&raw)?);
    let (count, names) = value::several(raw.count, raw.names, "VM")?;
    let request = StartRequest {
        count,
        names,
        all_or_nothing: raw.all_or_nothing,
        force: raw.force,
        prefetch: match raw.prefetch {
            Some(RawPrefetch::None) => Prefetch::None,
            Some(RawPrefetch::Demand) => Prefetch::Demand,
            Some(RawPrefetch::WorkingSet) => Prefetch::WorkingSet,
            Some(RawPrefetch::All) | None => Prefetch::All,
        },
        hydrate_mib_per_s: raw.hydrate.map_or(0, |rate| rate.unwrap_or(UNLIMITED_MIB_PER_S)),
        timeout_ms: timeout.map(value::millis),
        labels: value::labels(&raw.labels)?,
        ttl_ms,
    };
    let bound = timeout.unwrap_or(START_TIMEOUT_DEFAULT);
    Ok(StartConfig { snapshot: name.to_owned(), request, bound })
}

fn ttl(raw: &RawRun) -> Result<Option<u64>, Misuse> {
    raw.ttl.as_deref().map(|text| value::ttl(text, "--ttl")).transpose()
}

fn timeout(raw: &RawRun) -> Result<Option<Duration>, Misuse> {
    raw.timeout.as_deref().map(|text| value::time(text, "--timeout")).transpose()
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{RawArgs, RawCommand};

    fn parse(line: &str) -> Result<RunConfig, String> {
        let words = ["vmfork", "run"].into_iter().chain(line.split(' '));
        match RawArgs::try_parse_from(words).map_err(|error| error.to_string())?.command {
            RawCommand::Run(raw) => run(raw).map_err(|error| error.to_string()),
            other => Err(format!("{other:?}")),
        }
    }

    fn as_image(line: &str) -> Result<BootConfig, String> {
        match parse(line)? {
            RunConfig::Image(boot) | RunConfig::ByName { image: Ok(boot), .. } => Ok(boot),
            RunConfig::ByName { image: Err(error), .. } => Err(error.to_string()),
            RunConfig::Snapshot(_) => Err("a snapshot".to_owned()),
        }
    }

    fn as_snapshot(line: &str) -> Result<StartConfig, String> {
        match parse(line)? {
            RunConfig::Snapshot(start) | RunConfig::ByName { snapshot: Ok(start), .. } => Ok(start),
            RunConfig::ByName { snapshot: Err(error), .. } => Err(error.to_string()),
            RunConfig::Image(_) => Err("an image".to_owned()),
        }
    }

    #[test]
    fn a_plain_run_fits_both_and_a_switch_decides() {
        assert!(as_image("web --name a --timeout 5s").is_ok());
        assert!(as_snapshot("web --name a --timeout 5s").is_ok());
        assert!(matches!(parse("web --image").unwrap(), RunConfig::Image(_)));
        assert!(matches!(parse("web --snapshot").unwrap(), RunConfig::Snapshot(_)));
        assert!(parse("web --image --snapshot").is_err());
    }

    #[test]
    fn options_of_the_other_kind_are_refused_by_name() {
        for option in ["--memory 1G", "--cpus 2", "--accel tcg"] {
            let word = option.split(' ').next().unwrap();
            for switch in ["", " --snapshot"] {
                let error = as_snapshot(&format!("warm {option}{switch}")).unwrap_err();
                assert!(error.contains("`warm` is a snapshot"), "{error}");
                assert!(error.contains(&format!("{word} is for images only")), "{error}");
            }
            assert!(as_image(&format!("warm {option}")).is_ok());
        }
        for option in ["-n 2", "--name a,b", "--all-or-nothing", "--force", "--hydrate=5"] {
            for switch in ["", " --image"] {
                let error = as_image(&format!("debian {option}{switch}")).unwrap_err();
                assert!(error.contains("`debian` is an image"), "{error}");
                assert!(error.contains("is for snapshots only"), "{error}");
            }
            assert!(as_snapshot(&format!("debian {option}")).is_ok());
        }
        assert_eq!(
            parse("web --cpus 1 -n 2 --force").unwrap_err(),
            "run: --cpus is for images only, -n and --force are for snapshots only"
        );
    }

    #[test]
    fn values_that_cannot_be_are_refused_whatever_the_name_is() {
        for bad in [
            "../x",
            "web --cpus 65",
            "web --memory 1",
            "web -n 0",
            "web -n 1025",
            "web -n 3 --name a,b",
            "web --name a,a",
            "web --name ../x",
            "web --timeout never",
            "web --prefetch some",
            "web --hydrate=-1",
        ] {
            assert!(parse(bad).is_err(), "{bad}");
        }
        assert!(as_image("web --timeout 0").is_ok());
        assert!(as_snapshot("web --timeout 0").unwrap_err().contains("can be ready"));
    }

    #[test]
    fn hydration_is_off_unless_asked_for_and_then_as_fast_as_it_goes() {
        for (line, rate) in [
            ("web", 0),
            ("web --hydrate", u32::MAX),
            ("web --hydrate 100", 100),
            ("--hydrate=100 web", 100),
            ("web --hydrate 0", 0),
        ] {
            let start = as_snapshot(line).unwrap();
            assert_eq!(start.request.hydrate_mib_per_s, rate, "{line}");
        }
    }

    #[test]
    fn names_make_up_the_count() {
        let start = as_snapshot("warm --name a,b --name c --prefetch working-set").unwrap();
        assert_eq!(start.request.count, 3);
        assert_eq!(start.request.names.unwrap(), ["a", "b", "c"]);
        assert_eq!(start.request.prefetch, Prefetch::WorkingSet);
        assert_eq!(as_snapshot("warm").unwrap().request.count, 1);
        assert_eq!(as_image("warm --name a").unwrap().request.name.as_deref(), Some("a"));
    }
}
