//! Writes SVG elements. Colors are attributes for renderers without CSS, and classes that a style sheet replaces in dark mode.

use crate::png::FONT_FAMILY;
use std::fmt::Write;

/// The role of a color.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Color {
    /// The background.
    Paper,
    /// Titles.
    Ink,
    /// Labels of axes, and frames.
    Muted,
    /// Grid lines.
    Grid,
    /// The curves of a run, by its number.
    Run(usize),
}

/// Colors of curves on a light and on a dark background. Their order maximizes the contrast of neighbors, also for readers with
/// deuteranopia.
const RUNS: [(&str, &str); 8] = [
    ("#1f6fd6", "#6aa9ff"),
    ("#d9480f", "#ff8f5e"),
    ("#0b8a5c", "#3fcf97"),
    ("#9c36b5", "#e08cf0"),
    ("#a87400", "#f0bd45"),
    ("#c2255c", "#ff7fa8"),
    ("#087f8c", "#45c9d6"),
    ("#5a6675", "#aab5c3"),
];

impl Color {
    fn light(self) -> &'static str {
        match self {
            Self::Paper => "#ffffff",
            Self::Ink => "#1b1f24",
            Self::Muted => "#59636e",
            Self::Grid => "#e4e8ec",
            Self::Run(run) => RUNS[run % RUNS.len()].0,
        }
    }

    fn dark(self) -> &'static str {
        match self {
            Self::Paper => "#11151a",
            Self::Ink => "#f0f3f6",
            Self::Muted => "#a3adb8",
            Self::Grid => "#2b323a",
            Self::Run(run) => RUNS[run % RUNS.len()].1,
        }
    }

    fn class(self) -> String {
        match self {
            Self::Paper => "paper".to_owned(),
            Self::Ink => "ink".to_owned(),
            Self::Muted => "muted".to_owned(),
            Self::Grid => "grid".to_owned(),
            Self::Run(run) => format!("run{}", run % RUNS.len()),
        }
    }
}

/// Returns the style sheet for dark mode, for a page or a file whose reader supports CSS.
pub fn dark_mode() -> String {
    let roles =
        [Color::Paper, Color::Ink, Color::Muted, Color::Grid].into_iter().chain((0..RUNS.len()).map(Color::Run));
    let mut rules = String::new();
    for color in roles {
        let _ = write!(rules, ".{0}-s{{stroke:{1}}}.{0}-f{{fill:{1}}}", color.class(), color.dark());
    }
    format!("@media(prefers-color-scheme:dark){{{rules}}}")
}

/// The dashes of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dash {
    /// A solid line.
    Solid,
    /// Long dashes.
    Dashed,
    /// Dots.
    Dotted,
}

/// The look of a line.
#[derive(Clone, Copy, Debug)]
pub struct Stroke {
    /// Color.
    pub color: Color,
    /// Width in pixels.
    pub width: f64,
    /// Opacity from 0 to 1.
    pub opacity: f64,
    /// Dashes.
    pub dash: Dash,
}

impl Stroke {
    /// Returns a solid, opaque line.
    pub const fn solid(color: Color, width: f64) -> Self {
        Self { color, width, opacity: 1.0, dash: Dash::Solid }
    }

    fn attributes(self) -> String {
        let Self { color, width, opacity, dash } = self;
        let mut text =
            format!(r#"class="{}-s" stroke="{}" stroke-width="{width}" fill="none""#, color.class(), color.light());
        if opacity < 1.0 {
            let _ = write!(text, r#" stroke-opacity="{opacity}""#);
        }
        match dash {
            Dash::Solid => {}
            Dash::Dashed => text.push_str(r#" stroke-dasharray="6 4""#),
            Dash::Dotted => text.push_str(r#" stroke-dasharray="1.5 3""#),
        }
        text
    }
}

/// The side of its position on which a text is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Anchor {
    /// The text begins at the position.
    Start,
    /// The text is centered at the position.
    Middle,
    /// The text ends at the position.
    End,
}

/// SVG elements.
#[derive(Clone, Debug, Default)]
pub struct Svg {
    text: String,
}

impl Svg {
    /// Adds a text at a baseline.
    pub fn text(&mut self, (x, y): (f64, f64), anchor: Anchor, size: f64, color: Color, content: &str) {
        let anchor = match anchor {
            Anchor::Start => "start",
            Anchor::Middle => "middle",
            Anchor::End => "end",
        };
        self.push(&format!(
            r#"<text x="{x:.1}" y="{y:.1}" text-anchor="{anchor}" font-size="{size}" class="{}-f" fill="{}">{}</text>"#,
            color.class(),
            color.light(),
            escape(content)
        ));
    }

    /// Adds a line.
    pub fn line(&mut self, (x1, y1): (f64, f64), (x2, y2): (f64, f64), stroke: Stroke) {
        self.push(&format!(r#"<path d="M{x1:.1} {y1:.1}L{x2:.1} {y2:.1}" {}/>"#, stroke.attributes()));
    }

    /// Adds a curve through points. A point that is NaN interrupts the curve; a single point becomes a dot.
    pub fn curve(&mut self, points: &[(f64, f64)], stroke: Stroke) {
        let mut path = String::new();
        for part in points.split(|(x, y)| x.is_nan() || y.is_nan()).filter(|part| !part.is_empty()) {
            for (i, (x, y)) in part.iter().enumerate() {
                let _ = write!(path, "{}{x:.1} {y:.1}", if i == 0 { 'M' } else { 'L' });
            }
            if part.len() == 1 {
                path.push_str("h0");
            }
        }
        if !path.is_empty() {
            let attributes = stroke.attributes();
            self.push(&format!(r#"<path d="{path}" {attributes} stroke-linejoin="round" stroke-linecap="round"/>"#));
        }
    }

    /// Adds a filled circle with an outline in the background's color.
    pub fn dot(&mut self, (x, y): (f64, f64), radius: f64, color: Color) {
        self.push(&format!(
            r#"<circle cx="{x:.1}" cy="{y:.1}" r="{radius}" class="{}-f" fill="{}"/>"#,
            color.class(),
            color.light()
        ));
    }

    /// Adds a filled rectangle.
    pub fn rectangle(&mut self, (x, y): (f64, f64), (width, height): (f64, f64), color: Color) {
        self.push(&format!(
            r#"<rect x="{x:.1}" y="{y:.1}" width="{width:.1}" height="{height:.1}" class="{}-f" fill="{}"/>"#,
            color.class(),
            color.light()
        ));
    }

    /// Adds elements of which only the part within a rectangle is visible. `id` is unique in the file.
    pub fn clipped(&mut self, id: &str, (x, y): (f64, f64), (width, height): (f64, f64), content: &Self) {
        self.push(&format!(
            "<clipPath id=\"{id}\"><rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\"/></clipPath>\n\
             <g clip-path=\"url(#{id})\">\n{}</g>",
            content.text
        ));
    }

    /// Adds SVG text as it is.
    pub fn push(&mut self, element: &str) {
        self.text.push_str(element);
        self.text.push('\n');
    }

    /// Returns the elements as text.
    pub fn as_str(&self) -> &str {
        &self.text
    }
}

/// Returns an SVG file of this width and height with a background. `description` is for screen readers. With `dark`, viewers that
/// support CSS show it with dark colors in dark mode.
pub fn document(body: &Svg, (width, height): (f64, f64), description: &str, dark: bool) -> String {
    let style = if dark { format!("<style>{}</style>\n", dark_mode()) } else { String::new() };
    let mut paper = Svg::default();
    paper.rectangle((0.0, 0.0), (width, height), Color::Paper);
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} {height}\" \
         font-family=\"{FONT_FAMILY}, Verdana, sans-serif\" role=\"img\" aria-label=\"{}\">\n{style}{}{}</svg>\n",
        escape(description),
        paper.text,
        body.text,
    )
}

/// Escapes text for XML and HTML, also within quotes. Characters that XML excludes become the replacement character.
pub fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            '\t' | '\n' => escaped.push(c),
            c if c.is_control() || c == '\u{fffe}' || c == '\u{ffff}' => escaped.push('\u{fffd}'),
            c => escaped.push(c),
        }
    }
    escaped
}

/// Advance widths of DejaVu Sans for the characters from space to `~`, in thousandths of the font size.
const WIDTHS: [u16; 95] = [
    318, 401, 460, 838, 636, 950, 780, 275, 390, 390, 500, 838, 318, 361, 318, 337, 636, 636, 636, 636, 636, 636, 636,
    636, 636, 636, 337, 337, 838, 838, 838, 531, 1000, 684, 686, 698, 770, 632, 575, 775, 752, 295, 295, 656, 557, 863,
    748, 787, 603, 787, 695, 635, 611, 732, 684, 989, 685, 611, 685, 390, 337, 390, 838, 500, 500, 613, 635, 550, 635,
    615, 352, 635, 634, 278, 278, 579, 278, 974, 634, 612, 635, 635, 411, 521, 392, 634, 592, 818, 592, 592, 525, 636,
    337, 636, 838,
];

/// Returns the width of a text in the figures' font. Characters outside of ASCII are assumed to be wide.
pub fn text_width(text: &str, size: f64) -> f64 {
    let width = |c: char| WIDTHS.get((c as usize).wrapping_sub(0x20)).copied().unwrap_or(1000);
    text.chars().map(|c| f64::from(width(c))).sum::<f64>() * size / 1000.0
}

/// Shortens a text to a width by an ellipsis at its end.
pub fn shorten(text: &str, size: f64, width: f64) -> String {
    if text_width(text, size) <= width {
        return text.to_owned();
    }
    let mut kept = String::new();
    for c in text.chars() {
        if text_width(&kept, size) + text_width(&format!("{c}…"), size) > width {
            break;
        }
        kept.push(c);
    }
    kept + "…"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_escaped() {
        assert_eq!(escape("a<b>&\"'\u{1}\u{7f}\n"), "a&lt;b&gt;&amp;&quot;&#39;\u{fffd}\u{fffd}\n");
    }

    #[test]
    fn curves_have_gaps_at_nan() {
        let mut svg = Svg::default();
        let points = [(0.0, 1.0), (1.0, 2.0), (2.0, f64::NAN), (3.0, 4.0)];
        svg.curve(&points, Stroke::solid(Color::Run(8), 1.0));
        assert!(svg.as_str().contains(r#"d="M0.0 1.0L1.0 2.0M3.0 4.0h0""#) && svg.as_str().contains("run0-s"));
        let mut empty = Svg::default();
        empty.curve(&[(f64::NAN, 1.0)], Stroke::solid(Color::Ink, 1.0));
        assert_eq!(empty.as_str(), "");
    }

    #[test]
    fn long_texts_are_shortened() {
        assert_eq!(shorten("short", 10.0, 100.0), "short");
        let text = shorten("a very long name of a run", 10.0, 60.0);
        assert!(text.ends_with('…') && text_width(&text, 10.0) <= 60.0 && text.starts_with("a ver"), "{text}");
    }
}
