//! `vmfork ttl`: changes when a VM ends by itself.

use vmfork_api::{Ttl, TtlReply, TtlRequest};

use crate::client::Query;
use crate::config::Global;
use crate::failure::Exit;
use crate::start::reach;

/// Seconds of a day.
const DAY_S: u64 = 86_400;

pub(super) async fn run(global: &Global, vm: &str, request: &TtlRequest) -> anyhow::Result<Exit> {
    let client = reach(global).await?;
    let reply: TtlReply = client.put(Query::new(format!("/v1/vms/{vm}/ttl")), request).await?;
    if global.printer.json {
        global.printer.document(&reply)?;
    } else {
        global.printer.note(&summary(&reply));
    }
    Ok(Exit::Done)
}

fn summary(reply: &TtlReply) -> String {
    match &reply.ttl {
        Some(ttl) => format!("`{}` ends in {}", reply.vm, left(ttl)),
        None => format!("`{}` does not end by itself", reply.vm),
    }
}

/// The time left until a VM ends, in its largest two units: `45s`, `1m30s`, `2h05m`, `1d03h`.
fn left(ttl: &Ttl) -> String {
    let seconds = ttl.left_ms / 1000;
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / DAY_S);
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{minutes}m{:02}s", seconds % 60),
        3600..DAY_S => format!("{hours}h{:02}m", minutes % 60),
        _ => format!("{days}d{:02}h", hours % 24),
    }
}

/// An instant as a date and a time of day in UTC.
fn utc(unix_ms: u64) -> String {
    let seconds = unix_ms / 1000;
    // Days since 1 March of the year 0: a leap day is the last day of such a year.
    let days = seconds / DAY_S + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let leaps = day_of_era / 1460 - day_of_era / 36_524 + day_of_era / 146_096;
    let year_of_era = (day_of_era - leaps) / 365;
    let day_of_year = day_of_era + year_of_era / 100 - 365 * year_of_era - year_of_era / 4;
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    let time = seconds % DAY_S;
    let (hour, minute, second) = (time / 3600, time / 60 % 60, time % 60);
    format!("{year}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02} UTC")
}

/// When a VM ends, and whose bound that is.
pub(super) fn line(ttl: Option<&Ttl>) -> String {
    let Some(ttl) = ttl else { return "never".to_owned() };
    let at = utc(ttl.expires_unix_ms);
    let of = ttl.inherited_from.as_ref().map(|id| format!(", inherited from {id}"));
    format!("in {} ({at}{})", left(ttl), of.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_left_and_dates_read_as_people_write_them() {
        let left = |seconds: u64| {
            left(&Ttl { expires_unix_ms: 0, left_ms: seconds * 1000 + 999, inherited_from: None })
        };
        for (seconds, text) in
            [(0, "0s"), (59, "59s"), (3599, "59m59s"), (7500, "2h05m"), (97_200, "1d03h")]
        {
            assert_eq!(left(seconds), text);
        }
        for (unix_s, text) in [
            (0, "1970-01-01 00:00:00 UTC"),
            (951_782_399, "2000-02-28 23:59:59 UTC"),
            (951_782_400, "2000-02-29 00:00:00 UTC"),
            (1_735_689_599, "2024-12-31 23:59:59 UTC"),
            (4_107_542_400, "2100-03-01 00:00:00 UTC"),
        ] {
            assert_eq!(utc(unix_s * 1000), text);
        }
    }

    #[test]
    fn the_line_tells_when_and_by_whose_bound() {
        let mut ttl =
            Ttl { expires_unix_ms: 1_700_000_000_000, left_ms: 90_000, inherited_from: None };
        assert_eq!(line(Some(&ttl)), "in 1m30s (2023-11-14 22:13:20 UTC)");
        ttl.inherited_from = Some("00000000000000aa".to_owned());
        let text = line(Some(&ttl));
        assert!(text.ends_with("UTC, inherited from 00000000000000aa)"), "{text}");
        assert_eq!(line(None), "never");
        let reply = TtlReply { schema: String::new(), vm: "web".to_owned(), ttl: None };
        assert_eq!(summary(&reply), "`web` does not end by itself");
        assert_eq!(summary(&TtlReply { ttl: Some(ttl), ..reply }), "`web` ends in 1m30s");
    }
}
