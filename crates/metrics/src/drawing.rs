//! The elements of a figure. A PNG file has several pixels for each unit. [`svg`](crate::svg) and [`png`](mod@crate::png) write
//! them to files.

/// A position: right and down from the upper left corner.
pub type Point = (f64, f64);

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
pub(crate) const RUNS: [(&str, &str); 8] = [
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
    /// Returns the color on a light background, as in HTML: `#rrggbb`.
    pub(crate) fn light(self) -> &'static str {
        match self {
            Self::Paper => "#ffffff",
            Self::Ink => "#1b1f24",
            Self::Muted => "#59636e",
            Self::Grid => "#e4e8ec",
            Self::Run(run) => RUNS[run % RUNS.len()].0,
        }
    }

    /// Returns the color on a dark background.
    pub(crate) fn dark(self) -> &'static str {
        match self {
            Self::Paper => "#11151a",
            Self::Ink => "#f0f3f6",
            Self::Muted => "#a3adb8",
            Self::Grid => "#2b323a",
            Self::Run(run) => RUNS[run % RUNS.len()].1,
        }
    }
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

impl Dash {
    /// Returns the lengths of a dash and of the gap after it.
    pub(crate) fn lengths(self) -> Option<(f64, f64)> {
        match self {
            Self::Solid => None,
            Self::Dashed => Some((6.0, 4.0)),
            Self::Dotted => Some((1.5, 3.0)),
        }
    }
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

/// An element of a figure.
#[derive(Clone, Debug)]
pub enum Element {
    /// A text at a baseline.
    Text {
        /// Position.
        at: Point,
        /// Side of the position.
        anchor: Anchor,
        /// Font size.
        size: f64,
        /// Color.
        color: Color,
        /// The text.
        content: String,
    },
    /// A line with flat ends.
    Line {
        /// Beginning.
        from: Point,
        /// End.
        to: Point,
        /// Look.
        stroke: Stroke,
    },
    /// A curve through points, with round ends and corners. A point that is NaN interrupts it.
    Curve {
        /// Points.
        points: Vec<Point>,
        /// Look.
        stroke: Stroke,
    },
    /// A filled circle.
    Dot {
        /// Center.
        at: Point,
        /// Radius.
        radius: f64,
        /// Color.
        color: Color,
    },
    /// A filled rectangle.
    Rectangle {
        /// Upper left corner.
        at: Point,
        /// Width and height.
        size: (f64, f64),
        /// Color.
        color: Color,
    },
    /// Elements that are clipped to a rectangle.
    Clipped {
        /// Upper left corner.
        at: Point,
        /// Width and height.
        size: (f64, f64),
        /// The elements.
        content: Drawing,
    },
}

/// Elements in the order in which they are drawn.
#[derive(Clone, Debug, Default)]
pub struct Drawing {
    /// The elements.
    pub elements: Vec<Element>,
}

impl Drawing {
    /// Adds a text at a baseline.
    pub fn text(&mut self, at: Point, anchor: Anchor, size: f64, color: Color, content: &str) {
        self.elements.push(Element::Text { at, anchor, size, color, content: content.to_owned() });
    }

    /// Adds a line.
    pub fn line(&mut self, from: Point, to: Point, stroke: Stroke) {
        self.elements.push(Element::Line { from, to, stroke });
    }

    /// Adds a curve through points. A point that is NaN interrupts the curve; a single point becomes a dot.
    pub fn curve(&mut self, points: &[Point], stroke: Stroke) {
        self.elements.push(Element::Curve { points: points.to_vec(), stroke });
    }

    /// Adds a filled circle.
    pub fn dot(&mut self, at: Point, radius: f64, color: Color) {
        self.elements.push(Element::Dot { at, radius, color });
    }

    /// Adds a filled rectangle.
    pub fn rectangle(&mut self, at: Point, size: (f64, f64), color: Color) {
        self.elements.push(Element::Rectangle { at, size, color });
    }

    /// Adds elements that are clipped to a rectangle.
    pub fn clipped(&mut self, at: Point, size: (f64, f64), content: Self) {
        self.elements.push(Element::Clipped { at, size, content });
    }
}

/// Returns the parts of a curve between points that are NaN.
pub(crate) fn parts(points: &[Point]) -> impl Iterator<Item = &[Point]> {
    points.split(|(x, y)| x.is_nan() || y.is_nan()).filter(|part| !part.is_empty())
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
    fn long_texts_are_shortened() {
        assert_eq!(shorten("short", 10.0, 100.0), "short");
        let text = shorten("a very long name of a run", 10.0, 60.0);
        assert!(text.ends_with('…') && text_width(&text, 10.0) <= 60.0 && text.starts_with("a ver"), "{text}");
    }
}
