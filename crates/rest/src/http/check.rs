//! What a request may say. Checked here once; below the REST layer it is relied on.

use std::collections::HashSet;
use std::time::Duration;

use vmfork_api::{
    AttachRequest, DiskSource, ErrorBody, ExecRequest, ForkRequest, KillRequest, NAME_BYTES_MAX,
    NewDisk, ResizeRequest, RunRequest, SnapshotRequest, StartRequest, TTL_MS_MAX, TTL_MS_MIN,
    VolumeRequest, VolumeSource, disk, name_is_valid,
};

use super::error::bad_request;

/// No wait that a request asks for may be longer.
const TIMEOUT_MAX: Duration = Duration::from_secs(24 * 3600);
/// Arguments and environment of a program, all in all. They go to the guest in one frame of 64 KiB,
/// as JSON, with room for what quoting adds to ordinary text.
const EXEC_BYTES_MAX: usize = 48 * 1024;
/// Linux' PATH_MAX.
const PATH_BYTES_MAX: usize = 4096;
const ID_DIGITS: usize = 16;

type Checked = Result<(), ErrorBody>;

/// `what` is "VM", "image", "snapshot" or "volume".
pub(super) fn name(what: &str, name: &str) -> Checked {
    if name_is_valid(name) {
        return Ok(());
    }
    Err(bad_request(format!("`{}` can't be the name of a {what}", name.escape_debug())).remedy(
        format!(
            "a name is 1 to {NAME_BYTES_MAX} of a-z A-Z 0-9 . _ -, the first a letter or digit"
        ),
    ))
}

/// The ID of a disk.
pub(super) fn disk_id(id: &str) -> Checked {
    let digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    if (1..=ID_DIGITS).contains(&id.len()) && id.bytes().all(digit) && !id.starts_with('0') {
        return Ok(());
    }
    let text = format!("`{}` is no ID of a disk", id.escape_debug());
    Err(bad_request(text).remedy("`vmfork disk ls` and GET /v1/disks list the IDs"))
}

/// A name that a VM is to get: it must not be taken for an id later.
fn new_name(new: &str) -> Checked {
    name("VM", new)?;
    if new.len() == ID_DIGITS && new.bytes().all(|b| b.is_ascii_hexdigit()) {
        return Err(bad_request(format!("`{new}` can't be the name of a VM: it looks like an id"))
            .remedy("choose a name that is not 16 hex digits"));
    }
    Ok(())
}

fn timeout(field: &str, value_ms: Option<u64>) -> Checked {
    match value_ms {
        Some(ms) if Duration::from_millis(ms) > TIMEOUT_MAX => Err(bad_request(format!(
            "`{field}` is {ms}; at most {} (a day) can be waited",
            TIMEOUT_MAX.as_millis()
        ))),
        _ => Ok(()),
    }
}

fn within(field: &str, value: Option<u64>, min: u64, max: u64) -> Checked {
    match value {
        Some(value) if !(min..=max).contains(&value) => {
            Err(bad_request(format!("`{field}` is {value}; it must be {min} to {max}")))
        }
        _ => Ok(()),
    }
}

/// How long a VM may live.
pub(super) fn ttl(ttl_ms: Option<u64>) -> Checked {
    within("ttl_ms", ttl_ms, TTL_MS_MIN, TTL_MS_MAX)
}

pub(super) fn run(request: &RunRequest) -> Checked {
    ttl(request.ttl_ms)?;
    name("image", &request.image)?;
    request.name.as_deref().map_or(Ok(()), new_name)?;
    within("memory_mib", request.memory_mib, 64, 262_144)?;
    if let Some(odd) = request.memory_mib.filter(|mib| mib % 2 == 1) {
        return Err(bad_request(format!("`memory_mib` is {odd}; it must be even")));
    }
    within("cpus", request.cpus.map(u64::from), 1, 64)?;
    disk::root_disk(request.root, request.root_bytes)
        .map_err(|error| bad_request(error.to_string()))?;
    NewDisk::check(&request.disks, request.root).map_err(|error| bad_request(error.to_string()))?;
    for disk in &request.disks {
        match &disk.source {
            DiskSource::Image { image } => name("image", image)?,
            DiskSource::Volume { volume } => name("volume", volume)?,
            DiskSource::Snapshot { snapshot, .. } => name("snapshot", snapshot)?,
            DiskSource::Blank { .. }
            | DiskSource::File { .. }
            | DiskSource::Object { .. }
            | DiskSource::Empty {} => {}
        }
    }
    timeout("boot_timeout_ms", request.boot_timeout_ms)
}

pub(super) fn volume(request: &VolumeRequest) -> Checked {
    name("volume", &request.name)?;
    match &request.source {
        VolumeSource::Image { image } => name("image", image)?,
        VolumeSource::Snapshot { snapshot, .. } => name("snapshot", snapshot)?,
        VolumeSource::Blank { .. } | VolumeSource::File { .. } | VolumeSource::Object { .. } => {}
    }
    request.check().map_err(|error| bad_request(error.to_string()))
}

pub(super) fn resize(request: ResizeRequest) -> Checked {
    request.check().map_err(|error| bad_request(error.to_string()))
}

pub(super) fn attach(request: &AttachRequest) -> Checked {
    name("VM", &request.vm)?;
    match &request.disk {
        Some(disk) if !disk::disk_name_is_valid(disk) => {
            Err(bad_request(format!("`{}` can't be the name of a disk", disk.escape_debug())))
        }
        _ => Ok(()),
    }
}

pub(super) fn fork(request: &ForkRequest) -> Checked {
    within("hydrate_mib_per_s", request.hydrate_mib_per_s, 0, u64::from(u32::MAX))?;
    ttl(request.ttl_ms)?;
    request.hosts.iter().flatten().try_for_each(|host| name("host", host))?;
    several(request.count, request.names.as_deref(), request.timeout_ms, "fork", "clone")
}

pub(super) fn start(request: &StartRequest) -> Checked {
    ttl(request.ttl_ms)?;
    several(request.count, request.names.as_deref(), request.timeout_ms, "start", "VM")
}

pub(super) fn snapshot(request: &SnapshotRequest) -> Checked {
    name("VM", &request.vm)?;
    name("snapshot", &request.name)?;
    timeout("record_ms", request.record_ms)
}

/// VMs that are started together; `what` are they, `done` is what is done for them.
fn several(
    count: u32,
    names: Option<&[String]>,
    timeout_ms: Option<u64>,
    done: &str,
    what: &str,
) -> Checked {
    within("count", Some(u64::from(count)), 1, 1024)?;
    timeout("timeout_ms", timeout_ms)?;
    if timeout_ms == Some(0) {
        return Err(bad_request(format!("`timeout_ms` is 0: no {done} is done in no time"))
            .remedy(format!("leave it out, or give it as many ms as the {done} may take")));
    }
    let Some(names) = names else { return Ok(()) };
    if u64::try_from(names.len()) != Ok(u64::from(count)) {
        return Err(bad_request(format!("`names` has {} names for {count} {what}s", names.len(),))
            .remedy(format!("give one name for each {what}, or none at all")));
    }
    let mut seen = HashSet::new();
    for name in names {
        new_name(name)?;
        if !seen.insert(name) {
            return Err(bad_request(format!("`names` has `{name}` twice")));
        }
    }
    Ok(())
}

pub(super) fn kill(request: &KillRequest) -> Checked {
    timeout("grace_ms", Some(request.grace_ms))
}

pub(super) fn exec(request: &ExecRequest) -> Checked {
    if request.argv.first().is_none_or(String::is_empty) {
        return Err(bad_request("`argv` names no program").remedy("its first element is one"));
    }
    timeout("timeout_ms", request.timeout_ms)?;
    let strings = request
        .argv
        .iter()
        .chain(request.env.iter().flat_map(|(key, value)| [key, value]))
        .chain(&request.cwd)
        .chain(&request.user);
    let mut bytes = 0;
    for string in strings {
        bytes += string.len() + 1;
        if string.contains('\0') {
            return Err(bad_request("a NUL byte in `argv`, `env`, `cwd` or `user`"));
        }
    }
    if bytes > EXEC_BYTES_MAX {
        return Err(bad_request(format!(
            "arguments and environment are {bytes} bytes; at most {EXEC_BYTES_MAX} are taken"
        ))
        .remedy("put what is long into a file (`vmfork cp`), or send it to standard input"));
    }
    if let Some(key) = request.env.keys().find(|key| key.is_empty() || key.contains('=')) {
        return Err(bad_request(format!("`{key}` can't be the name of an environment variable")));
    }
    Ok(())
}

/// A path in a guest.
pub(super) fn guest_path(path: &str) -> Checked {
    if !path.starts_with('/') {
        return Err(bad_request(format!("`path` is `{}`", path.escape_debug()))
            .remedy("give the path in the guest from the root: /…"));
    }
    if path.len() >= PATH_BYTES_MAX || path.contains('\0') {
        return Err(bad_request(format!(
            "`path` has a NUL byte, or is longer than {PATH_BYTES_MAX}"
        )));
    }
    Ok(())
}

/// `?mode=` of a file: octal, permission bits only; default 0644.
pub(super) fn mode(octal: Option<&str>) -> Result<u32, ErrorBody> {
    let Some(octal) = octal else { return Ok(0o644) };
    // `from_str_radix` takes a sign.
    let digits = (1..=5).contains(&octal.len()) && octal.bytes().all(|b| b.is_ascii_digit());
    let mode = u32::from_str_radix(octal, 8).ok();
    mode.filter(|mode| digits && *mode <= 0o7777).ok_or_else(|| {
        bad_request(format!("`mode` is `{}`", octal.escape_debug()))
            .remedy("give the permission bits in octal, like 0644")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exec_of(argv: &[&str]) -> ExecRequest {
        ExecRequest { argv: argv.iter().map(ToString::to_string).collect(), ..Default::default() }
    }

    #[test]
    fn programs_need_a_name_and_strings_that_execve_can_take() {
        assert!(exec(&exec_of(&["true"])).is_ok());
        assert!(exec(&exec_of(&["echo", ""])).is_ok());
        for bad in [&[][..], &[""], &["a\0b"], &[&*"x".repeat(EXEC_BYTES_MAX)]] {
            assert!(exec(&exec_of(bad)).is_err(), "{bad:?}");
        }
        for key in ["", "A=B"] {
            let mut request = exec_of(&["true"]);
            request.env.insert(key.into(), "x".into());
            assert!(exec(&request).is_err(), "{key:?}");
        }
    }

    #[test]
    fn modes_are_octal_permission_bits() {
        assert_eq!(mode(None).ok(), Some(0o644));
        assert_eq!(mode(Some("0755")).ok(), Some(0o755));
        assert_eq!(mode(Some("4755")).ok(), Some(0o4755));
        for bad in ["", "-1", "+644", "9", "17777", "000644", "rwx"] {
            assert!(mode(Some(bad)).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn clone_names_are_one_each_and_no_ids() {
        let fork_of = |names: &[&str], count| {
            fork(&ForkRequest {
                count,
                names: Some(names.iter().map(ToString::to_string).collect()),
                all_or_nothing: false,
                timeout_ms: None,
                place: None,
                hosts: None,
                hydrate_mib_per_s: None,
                labels: vmfork_api::Labels::default(),
                ttl_ms: None,
            })
        };
        assert!(fork_of(&["a", "b"], 2).is_ok());
        assert!(fork_of(&["a"], 2).is_err());
        assert!(fork_of(&["a", "a"], 2).is_err());
        assert!(fork_of(&["0123456789abcdef"], 1).is_err());
        assert!(fork_of(&["0123456789abcdeg"], 1).is_ok());
    }
}
