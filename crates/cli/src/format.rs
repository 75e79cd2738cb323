//! Figures as people read them: sizes, ages, counts, durations. JSON never goes through here.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// A size in binary units, with at most one decimal and at most four digits: `512 MiB`, `1.5 GiB`.
pub(crate) fn size(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    // Tenths of a unit, so that no floating point can round 1023.96 up to "1024.0".
    let mut unit = 0;
    let mut scale = 1024_u128;
    while unit + 1 < UNITS.len() && u128::from(bytes) * 2 >= scale * 2 * 1024 - scale {
        unit += 1;
        scale *= 1024;
    }
    let tenths = (u128::from(bytes) * 10 + scale / 2) / scale;
    if tenths.is_multiple_of(10) || tenths >= 1000 {
        format!("{} {}", (u128::from(bytes) + scale / 2) / scale, UNITS[unit])
    } else {
        format!("{}.{} {}", tenths / 10, tenths % 10, UNITS[unit])
    }
}

/// A count with a comma after every third digit: `9,812`.
pub(crate) fn count(n: u64) -> String {
    let digits = n.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// An age in its largest one or two units: `12s`, `4m`, `3h`, `2d`.
pub(crate) fn age(age: Duration) -> String {
    match age.as_secs() {
        s @ 0..=119 => format!("{s}s"),
        s @ 120..=7_199 => format!("{}m", s / 60),
        s @ 7_200..=172_799 => format!("{}h", s / 3600),
        s => format!("{}d", s / 86_400),
    }
}

/// The age of what was made at `unix_ms`, now. A clock that stepped back gives zero.
pub(crate) fn age_since(unix_ms: u64) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    age(now.saturating_sub(Duration::from_millis(unix_ms)))
}

/// An instant by the calendar, in UTC, to the millisecond.
pub(crate) fn utc(unix_ms: u64) -> String {
    let (seconds, ms) = (unix_ms / 1000, unix_ms % 1000);
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    // Years from March on, so that the leap day is the last; from 0000-03-01, 719,468 days before.
    let since = days + 719_468;
    let (era, day) = (since / 146_097, since % 146_097);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (month, carry) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    let year = year + era * 400 + carry;
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{ms:03}Z")
}

/// A duration given in milliseconds, with two or three digits that say something: `3.4 ms`, `31
/// ms`, `1.25 s`, `2m05s`.
pub(crate) fn millis(ms: f64) -> String {
    if !ms.is_finite() || ms < 0.0 {
        return "-".to_owned();
    }
    if ms < 9.95 {
        format!("{ms:.1} ms")
    } else if ms < 999.5 {
        format!("{ms:.0} ms")
    } else if ms < 59_995.0 {
        format!("{:.2} s", ms / 1000.0)
    } else {
        let seconds = Duration::from_secs_f64((ms / 1000.0).min(1e9)).as_secs();
        format!("{}m{:02}s", seconds / 60, seconds % 60)
    }
}

/// A part of a whole, with one decimal below a hundred: `12.5 %`. `-` where there is no whole.
pub(crate) fn percent(part: u64, whole: u64) -> String {
    if whole == 0 {
        return "-".to_owned();
    }
    let tenths = (u128::from(part) * 1000 + u128::from(whole) / 2) / u128::from(whole);
    if tenths == 0 && part != 0 {
        "< 0.1 %".to_owned()
    } else if tenths >= 1000 || tenths.is_multiple_of(10) {
        format!("{} %", tenths / 10)
    } else {
        format!("{}.{} %", tenths / 10, tenths % 10)
    }
}

/// `1 vCPU`, `2 vCPUs`.
pub(crate) fn plural(n: u64, one: &str) -> String {
    if n == 1 { format!("1 {one}") } else { format!("{} {one}s", count(n)) }
}

/// Removes what a guest could use to play with the reader's terminal.
pub(crate) fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_stay_short_and_never_read_1024() {
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1 KiB"),
            (1536, "1.5 KiB"),
            (512 << 20, "512 MiB"),
            ((1 << 20) - 1, "1 MiB"),
            ((1 << 30) - 1, "1 GiB"),
            (1023 << 20, "1023 MiB"),
            (10 << 30, "10 GiB"),
            ((2 << 30) + (300 << 20), "2.3 GiB"),
            (u64::MAX, "16 EiB"),
        ] {
            assert_eq!(size(bytes), text, "{bytes}");
        }
    }

    #[test]
    fn counts_are_grouped_in_threes() {
        for (n, text) in
            [(0, "0"), (999, "999"), (1000, "1,000"), (9812, "9,812"), (1_234_567, "1,234,567")]
        {
            assert_eq!(count(n), text);
        }
    }

    #[test]
    fn ages_use_the_unit_that_says_most() {
        for (seconds, text) in
            [(0, "0s"), (12, "12s"), (119, "119s"), (120, "2m"), (7200, "2h"), (172_800, "2d")]
        {
            assert_eq!(age(Duration::from_secs(seconds)), text);
        }
        assert_eq!(age_since(u64::MAX), "0s");
    }

    #[test]
    fn instants_are_those_of_the_calendar() {
        for (unix_s, text) in [
            (0, "1970-01-01T00:00:00.007Z"),
            (951_782_400, "2000-02-29T00:00:00.007Z"),
            (951_868_799, "2000-02-29T23:59:59.007Z"),
            (1_735_689_599, "2024-12-31T23:59:59.007Z"),
            (1_740_787_200, "2025-03-01T00:00:00.007Z"),
            (4_107_542_400, "2100-03-01T00:00:00.007Z"),
        ] {
            assert_eq!(utc(unix_s * 1000 + 7), text);
        }
    }

    #[test]
    fn durations_have_no_more_digits_than_they_mean() {
        for (ms, text) in [
            (3.44, "3.4 ms"),
            (9.96, "10 ms"),
            (31.2, "31 ms"),
            (999.6, "1.00 s"),
            (1250.0, "1.25 s"),
            (125_000.0, "2m05s"),
            (f64::NAN, "-"),
        ] {
            assert_eq!(millis(ms), text, "{ms}");
        }
    }

    #[test]
    fn parts_of_a_whole_have_one_decimal_at_most() {
        for (part, whole, text) in [
            (0, 9, "0 %"),
            (1, 8, "12.5 %"),
            (1, 3, "33.3 %"),
            (1, 10_000, "< 0.1 %"),
            (9, 9, "100 %"),
            (10, 3, "333 %"),
            (u64::MAX, u64::MAX, "100 %"),
            (1, 0, "-"),
        ] {
            assert_eq!(percent(part, whole), text);
        }
    }

    #[test]
    fn escape_sequences_do_not_reach_the_terminal() {
        assert_eq!(printable("a\u{1b}[2Jb\n"), "a\u{fffd}[2Jb\u{fffd}");
    }
}
