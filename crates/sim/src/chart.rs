//! Charts of curves, as SVG.

use std::fmt::Write as _;

/// Of a chart, in pixels; around it is room for words.
const WIDTH: f64 = 420.0;
pub(crate) const HEIGHT: f64 = 260.0;
pub(crate) const MARGIN: f64 = 60.0;
/// From one chart to the next.
pub(crate) const PITCH: f64 = WIDTH + 2.0 * MARGIN;

const FONT: f64 = 12.0;
/// Width of a letter, on average, and a little more: this much is left for words.
const LETTER: f64 = 7.0;
/// Of a line that shows what its dashes mean.
const SAMPLE: f64 = 28.0;
/// Most points of a curve. Of more, some are left out.
const POINTS_MAX: usize = 400;
/// A linear axis has about this many steps.
const STEPS: f64 = 5.0;

/// Of what is the same for all.
pub(crate) const GREY: &str = "#777";

/// How values lie on an axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scale {
    /// From 0 on.
    Linear,
    Logarithmic,
}

/// A curve. One point is drawn as a dot.
#[derive(Debug, Clone)]
pub(crate) struct Curve {
    pub(crate) colour: &'static str,
    /// As SVG has them; empty: none.
    pub(crate) dashes: &'static str,
    pub(crate) points: Vec<(f64, f64)>,
}

/// A chart with its legend.
#[derive(Debug, Clone)]
pub(crate) struct Chart {
    pub(crate) title: String,
    pub(crate) x: Scale,
    pub(crate) y: Scale,
    pub(crate) curves: Vec<Curve>,
    /// What colours mean, and what dashes mean.
    pub(crate) colours: Vec<(&'static str, &'static str)>,
    pub(crate) dashes: Vec<(&'static str, &'static str)>,
}

/// Charts side by side.
pub(crate) fn svg(charts: &[Chart]) -> String {
    let (width, height) = (charts.len() as f64 * PITCH, HEIGHT + 2.0 * MARGIN);
    let mut svg = String::new();
    let _ = writeln!(
        svg,
        r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="{FONT}" fill="{GREY}">"#
    ); // to a string: can't fail
    for (at, chart) in charts.iter().enumerate() {
        chart.draw(&mut svg, at as f64 * PITCH);
    }
    svg.push_str("</svg>\n");
    svg
}

/// An axis: the least and the greatest value on it.
#[derive(Debug, Clone, Copy)]
struct Axis {
    scale: Scale,
    low: f64,
    high: f64,
}

impl Axis {
    fn over(scale: Scale, values: impl Iterator<Item = f64>) -> Self {
        let (low, high) = match scale {
            Scale::Linear => values
                .fold((0.0, f64::MIN_POSITIVE), |(low, high), value: f64| (low, value.max(high))),
            Scale::Logarithmic => values.fold((f64::MAX, f64::MIN), |(low, high), value: f64| {
                (low.min(value.max(0.01)), high.max(value))
            }),
        };
        Self { scale, low, high }
    }

    /// From 0 to 1.
    fn place(self, value: f64) -> f64 {
        let (over, span) = match self.scale {
            Scale::Linear => (value - self.low, self.high - self.low),
            Scale::Logarithmic => ((value.max(0.01) / self.low).ln(), (self.high / self.low).ln()),
        };
        if span > 0.0 { over / span } else { 0.5 }
    }

    /// Values that are named.
    fn ticks(self) -> Vec<f64> {
        match self.scale {
            Scale::Linear => {
                let step = step(self.high / STEPS);
                let values = (0..10_u32).map(|at| f64::from(at) * step);
                values.take_while(|value| *value <= self.high).collect()
            }
            Scale::Logarithmic if self.high > self.low => {
                vec![self.low, (self.low * self.high).sqrt(), self.high]
            }
            Scale::Logarithmic => vec![self.low],
        }
    }

    fn name(self, value: f64) -> String {
        let digits = match self.scale {
            Scale::Linear if step(self.high / STEPS) >= 1.0 => 0,
            _ if value < 100.0 => 2,
            _ => 0,
        };
        format!("{value:.digits$}")
    }
}

/// The next greater of 1, 2, 5, 10 and so on.
fn step(least: f64) -> f64 {
    let decade = 10.0_f64.powf(least.log10().floor());
    let of = [1.0, 2.0, 5.0].into_iter().find(|of| of * decade >= least);
    of.unwrap_or(10.0) * decade
}

impl Chart {
    fn draw(&self, svg: &mut String, left: f64) {
        let points = || self.curves.iter().flat_map(|curve| curve.points.iter());
        let x_axis = Axis::over(self.x, points().map(|(x, _)| *x));
        let y_axis = Axis::over(self.y, points().map(|(_, y)| *y));
        let x = |value: f64| left + MARGIN + WIDTH * x_axis.place(value);
        let y = |value: f64| MARGIN + HEIGHT * (1.0 - y_axis.place(value));
        let (bottom, right, start) = (MARGIN + HEIGHT, left + MARGIN + WIDTH, left + MARGIN);
        let _ = writeln!(
            svg,
            r##"<text x="{start}" y="{:.0}" font-weight="600">{}</text><path d="M{start} {MARGIN}V{bottom}H{right}" fill="none" stroke="#888"/>"##,
            MARGIN - 24.0,
            self.title
        );
        for value in y_axis.ticks() {
            let (at, beside, name) = (y(value), start - 6.0, y_axis.name(value));
            let _ = writeln!(
                svg,
                r#"<text x="{beside:.0}" y="{at:.0}" text-anchor="end">{name}</text>"#
            );
        }
        // Where points are, or at even steps.
        let mut named: Vec<f64> = match self.x {
            Scale::Linear => x_axis.ticks(),
            Scale::Logarithmic => points().map(|(x, _)| *x).collect(),
        };
        named.sort_by(f64::total_cmp);
        named.dedup();
        let mut free_from = f64::MIN;
        for value in named {
            let (at, under, name) = (x(value), bottom + 16.0, trimmed(x_axis.name(value)));
            let half = name.len() as f64 * LETTER / 2.0;
            if at - half < free_from {
                continue; // as far as there is room
            }
            free_from = at + half + LETTER;
            let _ = writeln!(
                svg,
                r#"<text x="{at:.0}" y="{under:.0}" text-anchor="middle">{name}</text>"#
            );
        }
        for curve in &self.curves {
            let every = curve.points.len().div_ceil(POINTS_MAX).max(1);
            let last = curve.points.len().saturating_sub(1);
            let kept = curve.points.iter().enumerate();
            let kept = kept.filter(|(at, _)| at % every == 0 || *at == last);
            polyline(svg, kept.map(|(_, point)| (x(point.0), y(point.1))), curve);
        }
        self.legend(svg, start, bottom);
    }

    /// A line of text for each curve: where it is highest, and where it ends.
    pub(crate) fn summary(&self) -> Vec<String> {
        let name = |names: &[(&'static str, &'static str)], of: &str| {
            names.iter().find(|(_, value)| *value == of).map_or("", |(name, _)| *name)
        };
        let curve = |curve: &Curve| {
            let highest = curve.points.iter().max_by(|a, b| a.1.total_cmp(&b.1))?;
            let last = curve.points.last()?;
            Some(format!(
                "{}, {}, {}: highest {:.2} at {:.2}, last {:.2} at {:.2}",
                self.title,
                name(&self.colours, curve.colour),
                name(&self.dashes, curve.dashes),
                highest.1,
                highest.0,
                last.1,
                last.0
            ))
        };
        self.curves.iter().filter_map(curve).collect()
    }

    fn legend(&self, svg: &mut String, start: f64, bottom: f64) {
        let (mut over, under) = (start, bottom + 34.0);
        for (name, colour) in &self.colours {
            let _ = writeln!(
                svg,
                r#"<text x="{over:.0}" y="{under:.0}" fill="{colour}">{name}</text>"#
            );
            over += (name.len() + 2) as f64 * LETTER;
        }
        let (mut over, under) = (start, bottom + 52.0);
        for (name, dashes) in self.dashes.iter().filter(|(name, _)| !name.is_empty()) {
            let sample = Curve { colour: GREY, dashes, points: Vec::new() };
            polyline(svg, [over, over + SAMPLE].map(|x| (x, under - 4.0)), &sample);
            let words = over + SAMPLE + LETTER;
            let _ = writeln!(svg, r#"<text x="{words:.0}" y="{under:.0}">{name}</text>"#);
            over = words + (name.len() + 2) as f64 * LETTER;
        }
    }
}

/// Without zeros behind the point.
fn trimmed(number: String) -> String {
    match number.contains('.') {
        true => number.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => number,
    }
}

fn polyline(svg: &mut String, points: impl IntoIterator<Item = (f64, f64)>, curve: &Curve) {
    let Curve { colour, dashes, .. } = curve;
    let points: Vec<(f64, f64)> = points.into_iter().collect();
    if let [(x, y)] = points[..] {
        let _ = writeln!(svg, r#"<circle cx="{x:.1}" cy="{y:.1}" r="4" fill="{colour}"/>"#);
        return;
    }
    let points = points.into_iter().map(|(x, y)| format!("{x:.1},{y:.1}"));
    let points = points.collect::<Vec<_>>().join(" ");
    let _ = writeln!(
        svg,
        r#"<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dashes}"/>"#
    ); // to a string: can't fail
}

/// Of an element, such as `x` of `<text x="3" …>`.
#[cfg(test)]
pub(crate) fn attribute<'a>(element: &'a str, name: &str) -> Option<&'a str> {
    element.split_once(&format!(" {name}=\""))?.1.split_once('"').map(|(value, _)| value)
}

/// Fails if words lie on others or are cut off. How many there are.
#[cfg(test)]
pub(crate) fn words_apart(svg: &str, charts: usize) -> Vec<String> {
    let mut boxes: Vec<(f64, f64, f64, String)> = Vec::new();
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
        assert!(left >= 0.0 && right <= charts as f64 * PITCH, "`{words}` is cut off");
        assert!(number("y") <= HEIGHT + 2.0 * MARGIN - 4.0, "`{words}` is cut off");
        for (other_left, other_right, y, other) in &boxes {
            let apart =
                right <= *other_left || *other_right <= left || (number("y") - y).abs() >= FONT;
            assert!(apart, "`{words}` lies on `{other}`");
        }
        boxes.push((left, right, number("y"), words.to_owned()));
    }
    boxes.into_iter().map(|(.., words)| words).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_axis_has_round_steps_and_a_curve_ends_where_it_ends() {
        for (least, wanted) in [(0.3, 0.5), (1.0, 1.0), (1.1, 2.0), (6.0, 10.0), (40.0, 50.0)] {
            assert!((step(least) - wanted).abs() < 1e-9, "{least}");
        }
        let points = (0..=1000).map(|at| (f64::from(at), f64::from(at) / 2.0)).collect();
        let curve = Curve { colour: "#123456", dashes: "", points };
        let dot = Curve { colour: "#654321", dashes: "", points: vec![(500.0, 500.0)] };
        let (x, y) = (Scale::Linear, Scale::Linear);
        let chart = Chart {
            title: "half".to_owned(),
            x,
            y,
            curves: vec![curve, dot],
            colours: vec![("one", "#123456"), ("dot", "#654321")],
            dashes: vec![("drawn", "")],
        };
        let svg = svg(&[chart]);
        let line = svg.lines().find(|line| line.contains("#123456") && line.contains("polyline"));
        let points = attribute(line.expect("a curve"), "points").expect("points");
        assert!(points.ends_with(&format!(" {:.1},{:.1}", MARGIN + WIDTH, MARGIN)), "{points}");
        assert!(points.split(' ').count() < POINTS_MAX);
        let at = format!("cx=\"{:.1}\" cy=\"{MARGIN:.1}\"", MARGIN + WIDTH / 2.0);
        assert!(svg.contains(&at), "{svg}");
        let words = words_apart(&svg, 1);
        for name in ["half", "1000", "200", "500", "one", "dot", "drawn"] {
            assert!(words.iter().any(|word| word == name), "{name}: {words:?}");
        }
    }
}
