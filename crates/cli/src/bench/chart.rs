//! A chart of bars as SVG, on a logarithmic scale: times here lie three orders of magnitude apart.

use std::fmt::Write;
use std::time::Duration;

/// Bars that belong together.
pub struct Group {
    /// What was measured.
    pub name: String,
    /// Ours first.
    pub bars: Vec<Bar>,
}

/// One bar.
pub struct Bar {
    /// Whose.
    pub name: String,
    /// How long it took.
    pub time: Duration,
    /// How that is written.
    pub text: String,
}

const WIDTH: f64 = 860.0;
const LABELS: f64 = 250.0;
const FIGURES: f64 = 90.0;
const BAR: f64 = 16.0;
const GAP: f64 = 5.0;
const TITLE: f64 = 26.0;
const MARGIN: f64 = 14.0;

/// Draws it. Legible on a light and on a dark page.
pub fn draw(groups: &[Group]) -> String {
    let seconds = || groups.iter().flat_map(|group| &group.bars).map(|bar| bar.time.as_secs_f64().max(1e-9));
    // A little less than the shortest, so that it has a bar at all.
    let least = seconds().fold(f64::INFINITY, f64::min).log10() - 0.3;
    let most = seconds().fold(0.0, f64::max).log10();
    let length = |time: Duration| {
        let share = (time.as_secs_f64().max(1e-9).log10() - least) / (most - least).max(1e-9);
        share * (WIDTH - LABELS - FIGURES - 2.0 * MARGIN)
    };
    let mut body = String::new();
    let mut y = MARGIN;
    for group in groups {
        text(&mut body, MARGIN, y + 14.0, "start", "font-weight=\"bold\"", &group.name);
        y += TITLE;
        for (number, bar) in group.bars.iter().enumerate() {
            let fill = if number == 0 { "#0d9488" } else { "#94a3b8" };
            let width = length(bar.time);
            text(&mut body, LABELS - 8.0, y + 12.5, "end", "", &bar.name);
            let _ = writeln!(
                body,
                "<rect x=\"{LABELS}\" y=\"{y}\" width=\"{width:.1}\" height=\"{BAR}\" rx=\"2\" fill=\"{fill}\"/>"
            );
            text(&mut body, LABELS + width + 6.0, y + 12.5, "start", "", &bar.text);
            y += BAR + GAP;
        }
        y += GAP;
    }
    text(
        &mut body,
        MARGIN,
        y + 12.0,
        "start",
        "fill-opacity=\"0.7\"",
        "Shorter is better; the scale is logarithmic.",
    );
    let height = y + TITLE;
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" font-family=\"sans-serif\" \
         font-size=\"12\">\n<rect width=\"{WIDTH}\" height=\"{height}\" fill=\"#ffffff\"/>\n{body}</svg>\n"
    )
}

fn text(body: &mut String, x: f64, y: f64, anchor: &str, more: &str, words: &str) {
    let words = words.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('`', "");
    // Writing into a text cannot fail.
    let _ = writeln!(body, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" {more}>{words}</text>");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ours_comes_first_and_a_longer_time_has_a_longer_bar() {
        let bar = |name: &str, milliseconds| Bar {
            name: name.into(),
            time: Duration::from_millis(milliseconds),
            text: format!("{milliseconds} ms"),
        };
        let chart = draw(&[Group { name: "a < b".into(), bars: vec![bar("shoal", 2), bar("runc", 30)] }]);
        assert!(chart.contains("a &lt; b") && !chart.contains("a < b"), "{chart}");
        let widths: Vec<f64> = chart
            .lines()
            .filter(|line| line.starts_with("<rect x="))
            .filter_map(|line| line.split("width=\"").nth(1)?.split('"').next()?.parse().ok())
            .collect();
        assert!(widths[0] > 0.0 && widths[0] < widths[1], "{widths:?}");
    }
}
