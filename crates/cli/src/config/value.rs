//! Single values: names, sizes, times.

use std::time::Duration;

use vmfork_api::{
    DiskSource, LabelError, LabelFilter, Labels, NAME_BYTES_MAX, NewDisk, ResizeRequest, Root,
    TTL_MS_MAX, TTL_MS_MIN, disk, name_is_valid,
};

use super::misuse;
use crate::failure::Misuse;

/// Longest time that any option takes: a week. Keeps sums far from overflow.
const TIME_MAX: Duration = Duration::from_secs(7 * 86_400);

/// How many VMs can be started by one request (see `vmfork-api`).
const COUNT_MAX: u32 = 1024;

pub(super) fn name(name: String, what: &str) -> Result<String, Misuse> {
    if name_is_valid(&name) {
        return Ok(name);
    }
    misuse(format!(
        "`{}` is not a valid {what}: use 1 to {NAME_BYTES_MAX} of a-z A-Z 0-9 . _ -, starting with a \
         letter or digit",
        crate::format::printable(&name)
    ))
}

/// How many VMs are to be started together, and their names if any were given: as many, and no two
/// alike. `what` are they.
pub(super) fn several(
    count: Option<u32>,
    names: Vec<String>,
    what: &str,
) -> Result<(u32, Option<Vec<String>>), Misuse> {
    let given = u32::try_from(names.len()).unwrap_or(u32::MAX);
    let count = count.unwrap_or(given.max(1));
    if !(1..=COUNT_MAX).contains(&count) {
        return misuse(format!("{count} {what}s: out of range; use 1 to {COUNT_MAX}"));
    }
    if given != 0 && given != count {
        return misuse(format!(
            "{given} names for {count} {what}s: give one name for each, or none"
        ));
    }
    let names = names
        .into_iter()
        .map(|n| name(n, &format!("{what}'s name")))
        .collect::<Result<Vec<_>, _>>()?;
    let mut sorted: Vec<&String> = names.iter().collect();
    sorted.sort();
    if let Some(twice) = sorted.windows(2).find(|pair| pair[0] == pair[1]) {
        return misuse(format!("duplicate name `{}`: each name must be unique", twice[0]));
    }
    Ok((count, (!names.is_empty()).then_some(names)))
}

/// `KEY=VALUE` each.
pub(super) fn labels(texts: &[String]) -> Result<Labels, Misuse> {
    Labels::parse(texts.iter().map(String::as_str))
        .or_else(|error| misuse(format!("--label: {error}")))
}

/// `NAME=SOURCE` each. A file's path is of the folder that the command is called in.
pub(super) fn disks(texts: &[String], root: Option<Root>) -> Result<Vec<NewDisk>, Misuse> {
    let refused = |error| Misuse(format!("--disk: {error}"));
    let mut disks: Vec<NewDisk> =
        texts.iter().map(|text| text.parse()).collect::<Result<_, _>>().map_err(refused)?;
    for disk in &mut disks {
        if let DiskSource::File { path, .. } = &mut disk.source {
            *path = absolute(path);
        }
    }
    NewDisk::check(&disks, root).map_err(refused)?;
    Ok(disks)
}

/// Where a store is, as typed.
pub(super) fn location(location: String) -> Result<String, Misuse> {
    if location.is_empty() {
        return misuse("the location is empty; use s3://BUCKET/PREFIX or a folder");
    }
    Ok(location)
}

/// A path of the folder that the command is called in; as it is, if that can't be said.
pub(super) fn absolute(path: &str) -> String {
    let absolute = std::path::absolute(path).ok();
    let text = absolute.and_then(|path| path.into_os_string().into_string().ok());
    text.unwrap_or_else(|| path.to_owned())
}

/// The size that a disk is to have from now on. `what` is the command.
pub(super) fn new_size(what: &str, text: &str) -> Result<ResizeRequest, Misuse> {
    let Some(size_bytes) = disk::parse_size(text) else {
        let text = crate::format::printable(text);
        return misuse(format!("{what} {text}: not a size; write it as 512M, 10G or 1T"));
    };
    let request = ResizeRequest { size_bytes };
    request.check().map_err(|error| Misuse(format!("{what} {text}: {error}")))?;
    Ok(request)
}

/// The size of the root's own disk, if one is given.
pub(super) fn root_bytes(root: Option<Root>, text: Option<&str>) -> Result<Option<u64>, Misuse> {
    let Some(text) = text else { return Ok(None) };
    let Some(bytes) = disk::parse_size(text) else {
        return misuse(format!("--root-size {text}: not a size; write it as 512M, 10G or 1T"));
    };
    let checked = disk::root_disk(root, Some(bytes));
    checked.or_else(|error| misuse(format!("--root-size {text}: {error}")))?;
    Ok(Some(bytes))
}

/// `KEY` or `KEY=VALUE` each.
pub(super) fn filters(texts: &[String]) -> Result<Vec<LabelFilter>, Misuse> {
    let parsed = texts.iter().map(|text| text.parse()).collect::<Result<_, LabelError>>();
    parsed.or_else(|error| misuse(format!("--label: {error}")))
}

/// `500ms`, `30s`, `2m`, `1h`, `1d`, or a plain number of seconds; decimals are fine.
pub(super) fn time(text: &str, option: &str) -> Result<Duration, Misuse> {
    let seconds = seconds(text, option)?;
    if seconds > TIME_MAX.as_secs_f64() {
        return misuse(format!("{option} {text}: longer than a week; use at most 168h"));
    }
    Ok(Duration::from_secs_f64(seconds))
}

/// How long a VM may live, in ms.
pub(super) fn ttl(text: &str, option: &str) -> Result<u64, Misuse> {
    let seconds = seconds(text, option)?;
    // Out of every range, where the product is too large to be counted.
    let ttl_ms = Duration::try_from_secs_f64(seconds).map_or(u64::MAX, millis);
    if !(TTL_MS_MIN..=TTL_MS_MAX).contains(&ttl_ms) {
        return misuse(format!("{option} {text}: out of range; use 1s to 365d"));
    }
    Ok(ttl_ms)
}

fn seconds(text: &str, option: &str) -> Result<f64, Misuse> {
    let split = text.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let scale = match unit {
        "ms" => 0.001,
        "" | "s" => 1.0,
        "m" | "min" => 60.0,
        "h" => 3600.0,
        "d" => 86_400.0,
        _ => {
            return misuse(format!("{option} {text}: unknown unit `{unit}`; use ms, s, m, h or d"));
        }
    };
    match number.parse::<f64>() {
        Ok(number) if number >= 0.0 && number.is_finite() => Ok(number * scale),
        _ => misuse(format!("{option} {text}: not a time; write it as 500ms, 30s or 2m")),
    }
}

pub(super) fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// Guest memory in MiB: `512`, `512M`, `512MiB`, `2G`, `1.5G`.
pub(super) fn memory_mib(text: &str) -> Result<u64, Misuse> {
    let bad = || Misuse(format!("--memory {text}: not a size; write it as 512, 512M or 2G"));
    let split = text.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let scale = match unit.to_ascii_lowercase().as_str() {
        "" | "m" | "mb" | "mib" => 1_u64,
        "g" | "gb" | "gib" => 1024,
        "t" | "tb" | "tib" => 1024 * 1024,
        _ => return Err(bad()),
    };
    // Whole MiB only, so the fraction is exact: at most four decimals of a GiB can give one.
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if fraction.len() > 6 || !fraction.bytes().all(|b| b.is_ascii_digit()) {
        return Err(bad());
    }
    let whole: u64 = whole.parse().map_err(|_| bad())?;
    let mut mib = whole.checked_mul(scale).ok_or_else(bad)?;
    if !fraction.is_empty() {
        let digits: u64 = fraction.parse().map_err(|_| bad())?;
        let divisor = fraction.bytes().fold(1_u64, |product, _| product * 10);
        if !(digits * scale).is_multiple_of(divisor) {
            return misuse(format!("--memory {text}: not a whole number of MiB; round it"));
        }
        mib += digits * scale / divisor;
    }
    if !(64..=262_144).contains(&mib) || !mib.is_multiple_of(2) {
        return misuse(format!(
            "--memory {text}: out of range; use 64 MiB to 262144 MiB (256 GiB), in steps of 2 MiB"
        ));
    }
    Ok(mib)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_read_in_the_usual_spellings_and_limits() {
        for (text, mib) in [
            ("64", 64),
            ("512M", 512),
            ("512MiB", 512),
            ("2G", 2048),
            ("1.5g", 1536),
            ("0.25T", 262_144),
        ] {
            assert_eq!(memory_mib(text).unwrap(), mib, "{text}");
        }
        for text in ["", "M", "63", "65", "0.3G", "512G", "-5", "1e3", "5Q", "99999999999999999999"]
        {
            assert!(memory_mib(text).is_err(), "{text}");
        }
    }

    #[test]
    fn times_are_read_with_units_and_bounds() {
        for (text, ms) in
            [("500ms", 500), ("30", 30_000), ("30s", 30_000), ("1.5m", 90_000), ("0", 0)]
        {
            assert_eq!(millis(time(text, "--timeout").unwrap()), ms, "{text}");
        }
        for text in ["", "s", "-1s", "nan", "inf", "5 weeks", "1000h"] {
            assert!(time(text, "--timeout").is_err(), "{text}");
        }
    }

    #[test]
    fn vms_live_for_a_second_to_a_year() {
        for (text, ms) in [("1s", 1000), ("90", 90_000), ("15m", 900_000), ("365d", TTL_MS_MAX)] {
            assert_eq!(ttl(text, "--ttl").unwrap(), ms, "{text}");
        }
        for text in ["999ms", "0", "366d", "1e300d", "-1s", "2w", "none"] {
            assert!(ttl(text, "--ttl").is_err(), "{text}");
        }
    }
}
