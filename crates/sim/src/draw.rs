//! The table as a picture.

use std::fmt::Write as _;

use crate::table::Row;

/// Of a chart, in pixels; around it is room for words.
const WIDTH: f64 = 420.0;
const HEIGHT: f64 = 260.0;
const MARGIN: f64 = 60.0;

const COLOURS: [(&str, &str); 3] =
    [("unicast", "#b3452c"), ("multicast", "#2c6fb3"), ("swarm", "#2c9a57")];

/// When the last clone is through, and what the parent's host sends over what one host gets, against the number of hosts; both axes are
/// logarithmic. Dashed: the fluid model.
pub fn svg(rows: &[Row]) -> String {
    let (width, height) = (2.0 * (WIDTH + 2.0 * MARGIN), HEIGHT + 2.0 * MARGIN);
    let mut svg = String::new();
    let _ = writeln!(
        svg,
        r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">"#
    ); // to a string: can't fail
    let seconds = |ms: u64| ms as f64 / 1000.0;
    let done = |row: &Row| seconds(row.completion_ms);
    let model = |row: &Row| seconds(row.model_ms);
    chart(&mut svg, rows, 0.0, "last clone through, seconds", &[(&done, ""), (&model, "6 4")]);
    let sent = |row: &Row| row.origin_sent_over_one;
    let title = "sent by the parent's host, over what one gets";
    chart(&mut svg, rows, WIDTH + 2.0 * MARGIN, title, &[(&sent, "")]);
    svg.push_str("</svg>\n");
    svg
}

/// A value of a row, and how its line is dashed.
type Line<'a> = (&'a dyn Fn(&Row) -> f64, &'a str);

fn chart(svg: &mut String, rows: &[Row], left: f64, title: &str, lines: &[Line<'_>]) {
    let values = || rows.iter().flat_map(|row| lines.iter().map(|(value, _)| value(row)));
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
    for value in [low, (low * high).sqrt(), high] {
        let at = y(value);
        let _ = writeln!(
            svg,
            r#"<text x="{:.0}" y="{at:.0}" text-anchor="end">{value:.2}</text>"#,
            start - 6.0
        );
    }
    let mut named: Vec<usize> = rows.iter().map(|row| row.hosts).collect();
    named.sort_unstable();
    named.dedup();
    for hosts in named {
        let (at, under) = (x(hosts), bottom + 16.0);
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
        for (value, dashes) in lines {
            let points = its.iter().map(|row| format!("{:.1},{:.1}", x(row.hosts), y(value(row))));
            let points = points.collect::<Vec<_>>().join(" ");
            let _ = writeln!(
                svg,
                r#"<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dashes}"/>"#
            );
        }
        let (under, over) = (bottom + 36.0, start + 100.0 * at as f64);
        let _ =
            writeln!(svg, r#"<text x="{over:.0}" y="{under:.0}" fill="{colour}">{mode}</text>"#);
    }
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;
    use std::time::Duration;

    use super::*;
    use crate::scenario::{Mode, Scenario};
    use crate::table::table;
    use crate::trace::Trace;

    #[test]
    fn each_mode_has_its_lines_and_the_models() {
        let trace = Rc::new(Trace::database(512, Duration::from_millis(10)));
        let scenario = |mode, hosts| Scenario::new(mode, 512, hosts, &trace);
        let rows = table(&[1, 4], &Mode::ALL, scenario, |_| {}).expect("valid");
        let svg = svg(&rows);
        assert_eq!((svg.matches("<polyline").count(), svg.matches("\"6 4\"").count()), (9, 3));
        assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n") && !svg.contains("NaN"));
    }
}
