//! `vmfork doctor`: the checks of the daemon, and those that need none.

use std::env;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use serde::Serialize;
use vmfork_api::{Check, CheckStatus, DoctorReport, Version};

use crate::client::Query;
use crate::config::Global;
use crate::failure::{Exit, Report};
use crate::start::reach;

const VERSION: &str = env!("CARGO_PKG_VERSION");

/// What `vmfork image build` runs.
const BUILD_TOOLS: [&str; 2] = ["mmdebstrap", "mke2fs"];

#[derive(Serialize)]
struct Checks {
    checks: Vec<Check>,
}

pub(super) async fn run(global: &Global) -> anyhow::Result<Exit> {
    let spinner = global.printer.spinner("Checking the host".to_owned());
    let mut checks = Vec::new();
    match ask(global).await {
        Ok((version, report)) => {
            checks.push(daemon_check(global, &version));
            checks.extend(report.checks);
        }
        Err(error) => {
            let report = Report::of(&error);
            let mut detail = vec![report.message];
            detail.extend(report.causes);
            checks.push(Check {
                name: "daemon".to_owned(),
                status: CheckStatus::Failed,
                detail: detail.join(": ").replace('\n', "; "),
                remedy: report.hint.or_else(|| Some("see the log of the daemon".to_owned())),
            });
        }
    }
    // A check of the daemon replaces the local one of the same name.
    for check in local_checks(global) {
        if checks.iter().all(|known| known.name != check.name) {
            checks.push(check);
        }
    }
    spinner.finish_and_clear();
    let failed = checks.iter().any(|check| check.status == CheckStatus::Failed);
    if global.printer.json {
        global.printer.with_schema(&Checks { checks })?;
    } else {
        global.printer.data(&render(global, &checks))?;
    }
    Ok(if failed { Exit::Failed } else { Exit::Done })
}

async fn ask(global: &Global) -> anyhow::Result<(Version, DoctorReport)> {
    let client = reach(global).await?;
    let version = client.get(Query::new("/v1/version")).await?;
    Ok((version, client.get(Query::new("/v1/doctor")).await?))
}

fn daemon_check(global: &Global, version: &Version) -> Check {
    let detail = format!("vmforkd {} is running at {}", version.vmforkd, global.endpoint);
    if version.vmforkd == VERSION {
        return ok("daemon", detail);
    }
    Check {
        name: "daemon".to_owned(),
        status: CheckStatus::Warning,
        detail: format!("{detail}, but this is vmfork {VERSION}"),
        remedy: Some(
            "run `vmfork daemon stop`; the next command starts the new version".to_owned(),
        ),
    }
}

/// Checks that need no daemon.
fn local_checks(global: &Global) -> Vec<Check> {
    vec![qemu(), userfaultfd(), kvm(), state(global), build_tools()]
}

fn ok(name: &str, detail: impl Into<String>) -> Check {
    Check { name: name.to_owned(), status: CheckStatus::Ok, detail: detail.into(), remedy: None }
}

fn bad(status: CheckStatus, name: &str, detail: impl Into<String>, remedy: &str) -> Check {
    Check { name: name.to_owned(), status, detail: detail.into(), remedy: Some(remedy.to_owned()) }
}

fn in_path(program: &str) -> Option<String> {
    // The PATH of an ordinary user lacks the folders of administrators' programs.
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path)
        .chain(["/usr/sbin".into(), "/sbin".into()])
        .map(|folder| folder.join(program))
        .find(|path| {
            fs::metadata(path)
                .is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0)
        })
        .map(|path| path.display().to_string())
}

fn qemu() -> Check {
    match in_path("qemu-system-x86_64") {
        Some(path) => ok("qemu", path),
        None => bad(
            CheckStatus::Failed,
            "qemu",
            "no qemu-system-x86_64 in PATH",
            "apt-get install qemu-system-x86",
        ),
    }
}

fn userfaultfd() -> Check {
    if Path::new("/dev/userfaultfd").exists() {
        return ok("userfaultfd", "/dev/userfaultfd exists");
    }
    bad(
        CheckStatus::Failed,
        "userfaultfd",
        "no /dev/userfaultfd",
        "use a kernel of 6.1 or later with CONFIG_USERFAULTFD",
    )
}

fn kvm() -> Check {
    let modules = ["kvm_intel", "kvm_amd"];
    if Path::new("/dev/kvm").exists() {
        let module = |name: &str| Path::new("/sys/module").join(name).exists();
        if modules.into_iter().any(module) {
            return ok("kvm", "/dev/kvm, with hardware virtualisation");
        }
        return bad(
            CheckStatus::Warning,
            "kvm",
            "/dev/kvm exists, but neither kvm_intel nor kvm_amd is loaded: VMs run under TCG",
            "use a host with hardware virtualisation for more speed",
        );
    }
    bad(
        CheckStatus::Warning,
        "kvm",
        "no /dev/kvm: VMs run under TCG, several times slower",
        "enable virtualisation in the firmware, or nested virtualisation in the cloud",
    )
}

fn state(global: &Global) -> Check {
    let folder = &global.state_dir;
    match fs::metadata(folder) {
        Ok(metadata) if metadata.is_dir() => ok("state", format!("{}", folder.display())),
        Ok(_) => bad(
            CheckStatus::Failed,
            "state",
            format!("{} is not a folder", folder.display()),
            "set --state or VMFORK_STATE to a folder",
        ),
        Err(error) => bad(
            CheckStatus::Warning,
            "state",
            format!("{}: {error}", folder.display()),
            "the daemon creates it at its start",
        ),
    }
}

fn build_tools() -> Check {
    let missing: Vec<&str> =
        BUILD_TOOLS.into_iter().filter(|tool| in_path(tool).is_none()).collect();
    if missing.is_empty() {
        return ok("image-build", BUILD_TOOLS.join(" and "));
    }
    bad(
        CheckStatus::Warning,
        "image-build",
        format!("cannot build images: {} not found", missing.join(" and ")),
        "apt-get install mmdebstrap e2fsprogs",
    )
}

fn render(global: &Global, checks: &[Check]) -> String {
    let width = checks.iter().map(|check| check.name.len()).max().unwrap_or_default();
    let mut text = String::new();
    for check in checks {
        let word = match check.status {
            CheckStatus::Ok => "ok",
            CheckStatus::Warning => "warning",
            CheckStatus::Failed => "failed",
        };
        // Padded before it is painted, since colours have no width.
        let word = global.printer.paint_check(check.status, &format!("{word:7}"));
        let detail = crate::format::printable(&check.detail);
        text.push_str(&format!("{word}  {:width$}  {detail}\n", check.name));
        if let Some(remedy) = &check.remedy {
            let remedy = crate::format::printable(remedy);
            text.push_str(&format!("{:7}  {:width$}  remedy: {remedy}\n", "", ""));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_check_that_is_not_ok_has_one_line_of_remedy() {
        let global = Global::new(&crate::args::RawGlobal::default(), &Default::default()).unwrap();
        for check in local_checks(&global) {
            let remedy = check.remedy.as_deref();
            assert_eq!(remedy.is_none(), check.status == CheckStatus::Ok, "{check:?}");
            assert!(remedy.is_none_or(|text| !text.contains('\n')), "{check:?}");
        }
    }
}
