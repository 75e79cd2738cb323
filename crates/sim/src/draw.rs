//! The table as a picture.

use std::fmt::Write as _;

use crate::table::Row;

/// Of a chart, in pixels; around it is room for words.
const WIDTH: f64 = 420.0;
const HEIGHT: f64 = 260.0;
const MARGIN: f64 = 60.0;
/// From one chart to the next.
const PITCH: f64 = WIDTH + 2.0 * MARGIN;

const FONT: f64 = 12.0;
/// Width of a letter, on average, and a little more: this much is left for words.
const LETTER: f64 = 7.0;
/// Of a line that shows what its dashes mean.
const SAMPLE: f64 = 28.0;

const COLOURS: [(&str, &str); 3] =
    [("unicast", "#b3452c"), ("multicast", "#2c6fb3"), ("swarm", "#2c9a57")];
/// Of what is the same for all.
const GREY: &str = "#777";

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
    let (width, height) = (3.0 * PITCH, HEIGHT + 2.0 * MARGIN);
    let mut svg = String::new();
    let _ = writeln!(
        svg,
        r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="{FONT}">"#
    ); // to a string: can't fail
    let line = |value, name, dashes| Line { value, name, dashes, by_mode: true };
    let seconds = |ms: u64| ms as f64 / 1000.0;
    let done = |row: &Row| seconds(row.completion_ms);
    let model = |row: &Row| seconds(row.model_ms);
    let lines = [line(&done, "simulated", ""), line(&model, "model", "6 4")];
    chart(&mut svg, rows, 0.0, "last clone through, seconds", &lines);
    let over_one = |row: &Row| row.origin_sent_over_one;
    let lines = [line(&over_one, "", "")];
    chart(&mut svg, rows, PITCH, "sent by the parent's host, over what one gets", &lines);
    let mib = |bytes: u64| bytes as f64 / MIB;
    let got = |row: &Row| mib(row.received_bytes);
    let sent = |row: &Row| mib(row.peer_sent_bytes);
    let origin = |row: &Row| mib(row.origin_sent_bytes);
    let need = |row: &Row| mib(row.need_bytes);
    let lines = [
        line(&got, "gets", ""),
        line(&sent, "sends", "2 3"),
        line(&origin, "parent's host sends", "10 3"),
        Line { by_mode: false, ..line(&need, "model: needs", "6 4") },
    ];
    chart(&mut svg, rows, 2.0 * PITCH, "bytes per host, MiB", &lines);
    svg.push_str("</svg>\n");
    svg
}

fn chart(svg: &mut String, rows: &[Row], left: f64, title: &str, lines: &[Line<'_>]) {
    let values = || rows.iter().flat_map(|row| lines.iter().map(|line| (line.value)(row)));
    let (low, high) = values().fold((f64::MAX, f64::MIN), |(low, high), value| {
        (low.min(value.max(0.01)), high.max(value))
    });
    let hosts = || rows.iter().map(|row| row.hosts as f64);
    let (first, last) = (hosts().fold(f64::MAX, f64::min), hosts().fold(1.0, f64::max));
    let place = |value: f64, low: f64, high: f64| {
        let span = (high / low).ln();
        if span > 0.0 { (value / low).ln() / span } else { 0.5 }
    };
    let x = |hosts: usize| left + MARGIN + WIDTH * place(hosts as f64, first, last);
    let y = |value: f64| MARGIN + HEIGHT * (1.0 - place(value.max(0.01), low, high));
    let (bottom, right) = (MARGIN + HEIGHT, left + MARGIN + WIDTH);
    let start = left + MARGIN;
    let _ = writeln!(
        svg,
        r##"<text x="{start}" y="{:.0}" font-weight="600">{title}</text><path d="M{start} {MARGIN}V{bottom}H{right}" fill="none" stroke="#888"/>"##,
        MARGIN - 24.0
    );
    for value in if high > low { vec![low, (low * high).sqrt(), high] } else { vec![low] } {
        let (at, digits) = (y(value), if value < 100.0 { 2 } else { 0 });
        let _ = writeln!(
            svg,
            r#"<text x="{:.0}" y="{at:.0}" text-anchor="end">{value:.digits$}</text>"#,
            start - 6.0
        );
    }
    let mut named: Vec<usize> = rows.iter().map(|row| row.hosts).collect();
    named.sort_unstable();
    named.dedup();
    let mut free_from = f64::MIN;
    for hosts in named {
        let (at, under) = (x(hosts), bottom + 16.0);
        let half = hosts.to_string().len() as f64 * LETTER / 2.0;
        if at - half < free_from {
            continue; // as far as there is room
        }
        free_from = at + half + LETTER;
        let _ = writeln!(
            svg,
            r#"<text x="{at:.0}" y="{under:.0}" text-anchor="middle">{hosts}</text>"#
        );
    }
    for (at, (mode, colour)) in COLOURS.iter().enumerate() {
        let its: Vec<&Row> = rows.iter().filter(|row| row.mode == *mode).collect();
        if its.is_empty() {
            continue;
        }
        for line in lines.iter().filter(|line| line.by_mode) {
            let points = its.iter().map(|row| (x(row.hosts), y((line.value)(row))));
            polyline(svg, points, colour, line.dashes);
        }
        let (under, over) = (bottom + 34.0, start + 100.0 * at as f64);
        let _ =
            writeln!(svg, r#"<text x="{over:.0}" y="{under:.0}" fill="{colour}">{mode}</text>"#);
    }
    for line in lines.iter().filter(|line| !line.by_mode) {
        let mut its: Vec<&Row> = rows.iter().collect();
        its.sort_by_key(|row| row.hosts);
        its.dedup_by_key(|row| row.hosts);
        let points = its.iter().map(|row| (x(row.hosts), y((line.value)(row))));
        polyline(svg, points, GREY, line.dashes);
    }
    let (mut over, under) = (start, bottom + 52.0);
    for Line { name, dashes, .. } in lines.iter().filter(|line| !line.name.is_empty()) {
        polyline(svg, [over, over + SAMPLE].map(|x| (x, under - 4.0)), GREY, dashes);
        let words = over + SAMPLE + LETTER;
        let _ = writeln!(svg, r#"<text x="{words:.0}" y="{under:.0}">{name}</text>"#);
        over = words + (name.len() + 2) as f64 * LETTER;
    }
}

fn polyline(
    svg: &mut String,
    points: impl IntoIterator<Item = (f64, f64)>,
    colour: &str,
    dashes: &str,
) {
    let points = points.into_iter().map(|(x, y)| format!("{x:.1},{y:.1}"));
    let points = points.collect::<Vec<_>>().join(" ");
    let _ = writeln!(
        svg,
        r#"<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dashes}"/>"#
    ); // to a string: can't fail
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;
    use std::time::Duration;

    use super::*;
    use crate::scenario::{Mode, Scenario};
    use crate::table::table;
    use crate::trace::Trace;

    /// Of an element, such as `x` of `<text x="3" …>`.
    fn attribute<'a>(element: &'a str, name: &str) -> Option<&'a str> {
        element.split_once(&format!(" {name}=\""))?.1.split_once('"').map(|(value, _)| value)
    }

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
        let mut boxes: Vec<(f64, f64, f64, &str)> = Vec::new();
        for line in svg.lines().filter(|line| line.starts_with("<text")) {
            let number = |name| attribute(line, name).expect("there").parse::<f64>().expect(name);
            let words = line.split_once('>').and_then(|(_, rest)| rest.split_once("</text>"));
            let words = words.expect("words").0;
            let width = words.len() as f64 * LETTER;
            let before = match attribute(line, "text-anchor") {
                Some("end") => width,
                Some("middle") => width / 2.0,
                _ => 0.0,
            };
            let left = number("x") - before;
            let right = left + width;
            assert!(left >= 0.0 && right <= 3.0 * PITCH, "`{words}` is cut off");
            assert!(number("y") <= HEIGHT + 2.0 * MARGIN - 4.0, "`{words}` is cut off");
            for (other_left, other_right, y, other) in &boxes {
                let apart =
                    right <= *other_left || *other_right <= left || (number("y") - y).abs() >= FONT;
                assert!(apart, "`{words}` lies on `{other}`");
            }
            boxes.push((left, right, number("y"), words));
        }
        assert!(boxes.iter().any(|(.., words)| *words == "1"), "{boxes:?}");
        assert!(boxes.len() > 30, "{boxes:?}");
    }
}
