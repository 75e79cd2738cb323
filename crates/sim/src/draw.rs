//! The table as a picture.

use crate::chart::{self, Chart, Curve, GREY, Scale};
use crate::table::Row;

const COLOURS: [(&str, &str); 3] =
    [("unicast", "#b3452c"), ("multicast", "#2c6fb3"), ("swarm", "#2c9a57")];

const MIB: f64 = (1 << 20) as f64;

/// What a line shows of a row.
struct Line<'a> {
    value: &'a dyn Fn(&Row) -> f64,
    name: &'static str,
    dashes: &'static str,
    /// Each mode has its own.
    by_mode: bool,
}

/// Against the number of hosts: when the last clone is through; what the parent's host sends over
/// what one host gets; and the bytes per host. All axes are logarithmic. The values of the
/// model are in each that it covers.
pub fn svg(rows: &[Row]) -> String {
    let line = |value, name, dashes| Line { value, name, dashes, by_mode: true };
    let seconds = |ms: u64| ms as f64 / 1000.0;
    let done = |row: &Row| seconds(row.completion_ms);
    let model = |row: &Row| seconds(row.model_ms);
    let lines = [line(&done, "simulated", ""), line(&model, "model", "6 4")];
    let time = chart(rows, "last clone through, seconds", &lines);
    let over_one = |row: &Row| row.origin_sent_over_one;
    let lines = [line(&over_one, "", "")];
    let origin = chart(rows, "sent by the parent's host, over what one gets", &lines);
    let mib = |bytes: u64| bytes as f64 / MIB;
    let got = |row: &Row| mib(row.received_bytes);
    let sent = |row: &Row| mib(row.peer_sent_bytes);
    let origin_sent = |row: &Row| mib(row.origin_sent_bytes);
    let need = |row: &Row| mib(row.need_bytes);
    let lines = [
        line(&got, "gets", ""),
        line(&sent, "sends", "2 3"),
        line(&origin_sent, "parent's host sends", "10 3"),
        Line { by_mode: false, ..line(&need, "model: needs", "6 4") },
    ];
    let bytes = chart(rows, "bytes per host, MiB", &lines);
    chart::svg(&[time, origin, bytes])
}

fn chart(rows: &[Row], title: &str, lines: &[Line<'_>]) -> Chart {
    let curve = |rows: Vec<&Row>, colour, line: &Line<'_>| {
        let points = rows.iter().map(|row| (row.hosts as f64, (line.value)(row))).collect();
        Curve { colour, dashes: line.dashes, points }
    };
    let (mut curves, mut colours) = (Vec::new(), Vec::new());
    for (mode, colour) in COLOURS {
        let its = || rows.iter().filter(|row| row.mode == mode);
        if its().next().is_none() {
            continue;
        }
        let lines = lines.iter().filter(|line| line.by_mode);
        curves.extend(lines.map(|line| curve(its().collect(), colour, line)));
        colours.push((mode, colour));
    }
    for line in lines.iter().filter(|line| !line.by_mode) {
        let mut its: Vec<&Row> = rows.iter().collect();
        its.sort_by_key(|row| row.hosts);
        its.dedup_by_key(|row| row.hosts);
        curves.push(curve(its, GREY, line));
    }
    let dashes = lines.iter().map(|line| (line.name, line.dashes)).collect();
    let (x, y) = (Scale::Logarithmic, Scale::Logarithmic);
    Chart { title: title.to_owned(), x, y, curves, colours, dashes }
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;
    use std::time::Duration;

    use super::*;
    use crate::chart::{HEIGHT, MARGIN, PITCH, attribute, words_apart};
    use crate::scenario::{Mode, Scenario};
    use crate::table::table;
    use crate::trace::Trace;

    /// The heights of lines of a colour and with dashes, in the chart that begins `left`; from the
    /// fewest hosts to the most.
    fn heights(svg: &str, left: f64, colour: &str, dashes: &str) -> Vec<f64> {
        let is_it = |line: &&str| {
            attribute(line, "stroke") == Some(colour)
                && attribute(line, "stroke-dasharray") == Some(dashes)
        };
        let points = svg.lines().filter(|line| line.starts_with("<polyline")).filter(is_it);
        let points = points.map(|line| {
            let points = attribute(line, "points").expect("points").split(' ');
            let points = points.map(|point| point.split_once(',').expect("two numbers"));
            points.map(|(x, y)| (x.parse().expect("x"), y.parse().expect("y"))).collect()
        });
        let within = |points: &Vec<(f64, f64)>| {
            points[0].0 >= left && points[0].0 < left + PITCH && points[0].1 <= MARGIN + HEIGHT
        };
        points.filter(within).flatten().map(|(_, y)| y).collect()
    }

    #[test]
    fn each_mode_has_its_lines_and_the_models() {
        let trace = Rc::new(Trace::database(512, Duration::from_millis(10)));
        let scenario = |mode, hosts| Scenario::new(mode, 512, hosts, &trace);
        let rows = table(&[1, 4], &Mode::ALL, scenario, |_| {}).expect("valid");
        let svg = svg(&rows);
        assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n") && !svg.contains("NaN"));
        for (_, colour) in COLOURS {
            for (left, dashes) in [(0.0, ""), (0.0, "6 4"), (PITCH, "")] {
                assert_eq!(heights(&svg, left, colour, dashes).len(), 2, "{colour} {dashes}");
            }
            for dashes in ["", "2 3", "10 3"] {
                assert_eq!(heights(&svg, 2.0 * PITCH, colour, dashes).len(), 2, "{dashes}");
            }
        }
        let bytes = |colour, dashes| heights(&svg, 2.0 * PITCH, colour, dashes);
        let [(_, unicast), (_, multicast), (_, swarm)] = COLOURS;
        // The more, the less far from the top. By unicast the parent's host sends the most of all …
        assert_eq!(bytes(unicast, "10 3")[1], MARGIN);
        assert!(bytes(unicast, "10 3")[1] < bytes(swarm, "10 3")[1]);
        // … and only in a swarm hosts send what others get.
        let quarter = HEIGHT / 4.0;
        assert!(bytes(swarm, "2 3")[1] + quarter < bytes(unicast, "2 3")[1]);
        assert!(bytes(swarm, "2 3")[1] + quarter < bytes(multicast, "2 3")[1]);
        // What the model says that each needs is what each gets, but for what else is said.
        let need = bytes(GREY, "6 4");
        assert!(need.len() == 2 && need[0] == need[1]);
        for (_, colour) in COLOURS {
            let got = bytes(colour, "");
            assert!(need.iter().zip(&got).all(|(need, got)| (need - got).abs() < 5.0), "{got:?}");
        }
    }

    #[test]
    fn no_words_lie_on_others() {
        let trace = Rc::new(Trace::database(64, Duration::from_millis(10)));
        let scenario = |mode, hosts| Scenario::new(mode, 64, hosts, &trace);
        let hosts = [1, 2, 3, 4, 8, 16, 17, 18, 32];
        let rows = table(&hosts, &Mode::ALL, scenario, |_| {}).expect("valid");
        // As many as there may be, though nothing is simulated for that long here.
        let more = [64, 128, 129, 256, 512, 1000, 1024].into_iter();
        let more = more.map(|hosts| crate::Row { hosts, ..rows[0].clone() });
        let rows: Vec<_> = rows.iter().cloned().chain(more).collect();
        let svg = svg(&rows);
        let words = words_apart(&svg, 3);
        assert!(words.iter().any(|word| word == "1"), "{words:?}");
        assert!(words.len() > 30, "{words:?}");
    }
}
