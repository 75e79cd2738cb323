//! `--quota USER=vms:N,memory:SIZE,cores:N,disk:SIZE`.

use std::fs;
use std::io;

use vmfork_cluster::allocate::{Amount, Bounds};

use super::{DiskBounds, User};

/// A quota that can't be. The text names the flag.
#[derive(Debug, thiserror::Error)]
pub enum QuotaError {
    #[error("--quota {text}: it has the form USER=vms:N,memory:SIZE,cores:N,disk:SIZE")]
    Form { text: String },
    #[error(
        "--quota {text}: `{what}` is none of vms:N, memory:SIZE (like 8G or 512M), cores:N and disk:SIZE"
    )]
    Part { text: String, what: String },
    #[error("--quota {text}: {what} is there twice")]
    Twice { text: String, what: String },
    #[error(
        "--quota {text}: no such user here; any user goes by number, `default` is all others, `token` who comes over TCP"
    )]
    NoUser { text: String },
    #[error("--quota {text}: read /etc/passwd")]
    Users {
        text: String,
        #[source]
        source: io::Error,
    },
}

/// What each of `flags` says, together: of all hosts, and of the disks of this one.
///
/// # Errors
/// One of them says nothing, or two the same.
pub fn bounds(flags: &[String]) -> Result<(Bounds, DiskBounds), QuotaError> {
    bounds_by(flags, || fs::read_to_string("/etc/passwd"))
}

/// `10G`, as in a flag.
pub fn size(text: &str) -> Option<u64> {
    bytes(text)
}

fn bounds_by(
    flags: &[String],
    passwd: impl Fn() -> io::Result<String>,
) -> Result<(Bounds, DiskBounds), QuotaError> {
    let (mut bounds, mut disks) = (Bounds::default(), DiskBounds::default());
    let mut has_default = false;
    for text in flags {
        let (user, parts) =
            text.split_once('=').ok_or_else(|| QuotaError::Form { text: text.clone() })?;
        let (amount, disk_bytes) = amount(text, parts)?;
        let before = if user == "default" {
            (bounds.default, disks.default_bytes) = (amount, disk_bytes);
            std::mem::replace(&mut has_default, true)
        } else {
            let user = find(text, user, &passwd)?;
            disks.users.insert(user, disk_bytes);
            bounds.users.insert(user.to_string(), amount).is_some()
        };
        if before {
            return Err(QuotaError::Twice { text: text.clone(), what: format!("user `{user}`") });
        }
    }
    Ok((bounds, disks))
}

fn find(
    text: &str,
    user: &str,
    passwd: impl Fn() -> io::Result<String>,
) -> Result<User, QuotaError> {
    if user == "token" {
        return Ok(User::Token);
    }
    if let Ok(uid) = user.parse() {
        return Ok(User::Uid(uid));
    }
    let passwd = passwd().map_err(|source| QuotaError::Users { text: text.to_owned(), source })?;
    // As passwd(5) says: `name:password:uid:…`, a line each.
    let uid = passwd.lines().find_map(|line| {
        let mut fields = line.split(':');
        (fields.next() == Some(user)).then(|| fields.nth(1)?.parse().ok())?
    });
    uid.map(User::Uid).ok_or_else(|| QuotaError::NoUser { text: text.to_owned() })
}

/// → and what its disks may hold.
fn amount(text: &str, parts: &str) -> Result<(Amount, Option<u64>), QuotaError> {
    let (mut amount, mut disk_bytes) = (Amount::ALL, None);
    let mut seen = Vec::new();
    for part in parts.split(',') {
        let bad = || QuotaError::Part { text: text.to_owned(), what: part.to_owned() };
        let (what, value) = part.split_once(':').ok_or_else(bad)?;
        match what {
            "vms" => amount.vms = value.parse().map_err(|_| bad())?,
            "memory" => amount.room.memory_bytes = bytes(value).ok_or_else(bad)?,
            "cores" => amount.room.vcpus = value.parse().map_err(|_| bad())?,
            "disk" => disk_bytes = Some(bytes(value).ok_or_else(bad)?),
            _ => return Err(bad()),
        }
        if seen.contains(&what) {
            return Err(QuotaError::Twice { text: text.to_owned(), what: format!("`{what}`") });
        }
        seen.push(what);
    }
    Ok((amount, disk_bytes))
}

/// With M, G or T, in powers of 1024.
fn bytes(text: &str) -> Option<u64> {
    let (number, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    let unit: u64 = match unit {
        "M" => 1 << 20,
        "G" => 1 << 30,
        "T" => 1 << 40,
        _ => return None,
    };
    number.parse::<u64>().ok()?.checked_mul(unit)
}

#[cfg(test)]
mod tests {
    use vmfork_cluster::Room;

    use super::*;

    fn read(flags: &[&str]) -> Result<Bounds, String> {
        let flags: Vec<String> = flags.iter().map(|flag| (*flag).to_owned()).collect();
        let passwd =
            || Ok("root:x:0:0::/:/bin/sh\nann:x:1000:100::/home/ann:\nbroken\n".to_owned());
        let read = bounds_by(&flags, passwd).map(|(bounds, _)| bounds);
        read.map_err(|error| error.to_string())
    }

    #[test]
    fn disks_have_bounds_of_their_own() {
        let flags = ["7=vms:2,disk:5G", "8=cores:1", "default=disk:512M"].map(ToOwned::to_owned);
        let (bounds, disks) = bounds_by(&flags, || Ok(String::new())).expect("well-formed");
        assert_eq!(disks.of(User::Uid(7)), Some(5 << 30));
        assert_eq!(disks.of(User::Uid(8)), None, "its own entry says nothing of disks");
        assert_eq!(disks.of(User::Token), Some(512 << 20));
        assert_eq!((bounds.of("7").vms, bounds.of("9")), (2, Amount::ALL));
        assert_eq!(DiskBounds::default().of(User::Token), None);
    }

    #[test]
    fn each_user_has_what_is_said_of_it_and_the_others_the_default() {
        let bounds =
            read(&["ann=vms:8,memory:4G", "7=cores:2", "token=vms:0", "default=memory:512M"]);
        let bounds = bounds.expect("well-formed");
        let memory = |memory_bytes| Room { memory_bytes, ..Amount::ALL.room };
        assert_eq!(bounds.of("1000"), Amount { vms: 8, room: memory(4 << 30) });
        assert_eq!(
            bounds.of("7"),
            Amount { room: Room { vcpus: 2, ..Amount::ALL.room }, ..Amount::ALL }
        );
        assert_eq!(bounds.of("token").vms, 0);
        assert_eq!(bounds.of("8"), Amount { room: memory(512 << 20), ..Amount::ALL });
        assert_eq!(read(&[]).expect("none").of("8"), Amount::ALL);
    }

    #[test]
    fn what_can_not_be_is_told_by_the_flag() {
        for (flag, why) in [
            ("ann", "form"),
            ("ann=", "none of"),
            ("ann=vms:-1", "none of"),
            ("ann=memory:4", "none of"),
            ("ann=memory:4X", "none of"),
            ("ann=memory:99999999999T", "none of"),
            ("ann=disk:4", "none of"),
            ("ann=vms:1,vms:2", "twice"),
            ("bob=vms:1", "no such user"),
        ] {
            let error = read(&[flag]).expect_err(flag);
            assert!(
                error.starts_with(&format!("--quota {flag}: ")) && error.contains(why),
                "{error}"
            );
        }
        assert!(read(&["ann=vms:1", "1000=vms:2"]).expect_err("one user").contains("twice"));
        assert!(read(&["default=vms:1", "default=vms:2"]).expect_err("twice").contains("twice"));
    }
}
