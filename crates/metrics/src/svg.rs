//! Writes a figure as SVG. Colors are attributes for renderers without CSS, and classes that a style sheet replaces in dark mode.

use crate::drawing::{Anchor, Color, Drawing, Element, RUNS, Stroke, parts};
use crate::png::FONT_FAMILY;
use std::fmt::Write;

/// A text near the beginning of every file of [`document`].
pub const MARK: &str = "font-family=\"DejaVu Sans, Verdana, sans-serif\" role=\"img\"";

/// Returns the name of a color's class.
fn class(color: Color) -> String {
    match color {
        Color::Paper => "paper".to_owned(),
        Color::Ink => "ink".to_owned(),
        Color::Muted => "muted".to_owned(),
        Color::Grid => "grid".to_owned(),
        Color::Run(run) => format!("run{}", run % RUNS.len()),
    }
}

/// Returns the style sheet for dark mode, for a page or a file whose reader supports CSS.
pub fn dark_mode() -> String {
    let roles =
        [Color::Paper, Color::Ink, Color::Muted, Color::Grid].into_iter().chain((0..RUNS.len()).map(Color::Run));
    let mut rules = String::new();
    for color in roles {
        let _ = write!(rules, ".{0}-s{{stroke:{1}}}.{0}-f{{fill:{1}}}", class(color), color.dark());
    }
    format!("@media(prefers-color-scheme:dark){{{rules}}}")
}

/// Returns the attributes of a filled element.
fn fill(color: Color) -> String {
    format!(r#"class="{}-f" fill="{}""#, class(color), color.light())
}

/// Returns the attributes of a line.
fn stroke_attributes(stroke: Stroke) -> String {
    let Stroke { color, width, opacity, dash } = stroke;
    let mut text =
        format!(r#"class="{}-s" stroke="{}" stroke-width="{width}" fill="none""#, class(color), color.light());
    if opacity < 1.0 {
        let _ = write!(text, r#" stroke-opacity="{opacity}""#);
    }
    if let Some((dash, gap)) = dash.lengths() {
        let _ = write!(text, r#" stroke-dasharray="{dash} {gap}""#);
    }
    text
}

/// Returns the path of a curve: empty if all points are NaN.
fn path(points: &[(f64, f64)]) -> String {
    let mut path = String::new();
    for part in parts(points) {
        for (i, (x, y)) in part.iter().enumerate() {
            let _ = write!(path, "{}{x:.1} {y:.1}", if i == 0 { 'M' } else { 'L' });
        }
        if part.len() == 1 {
            path.push_str("h0");
        }
    }
    path
}

/// Writes the elements of a drawing, one on each line. `clips` counts the elements that are clipped. Their ids begin with `prefix`.
fn write_elements(out: &mut String, drawing: &Drawing, prefix: &str, clips: &mut usize) {
    for element in &drawing.elements {
        // Writing to a string cannot fail.
        let _ = match element {
            Element::Text { at: (x, y), anchor, size, color, content } => {
                let anchor = match anchor {
                    Anchor::Start => "start",
                    Anchor::Middle => "middle",
                    Anchor::End => "end",
                };
                writeln!(
                    out,
                    r#"<text x="{x:.1}" y="{y:.1}" text-anchor="{anchor}" font-size="{size}" {}>{}</text>"#,
                    fill(*color),
                    escape(content)
                )
            }
            Element::Line { from: (x1, y1), to: (x2, y2), stroke } => {
                writeln!(out, r#"<path d="M{x1:.1} {y1:.1}L{x2:.1} {y2:.1}" {}/>"#, stroke_attributes(*stroke))
            }
            Element::Curve { points, stroke } => match path(points) {
                path if path.is_empty() => Ok(()),
                path => writeln!(
                    out,
                    r#"<path d="{path}" {} stroke-linejoin="round" stroke-linecap="round"/>"#,
                    stroke_attributes(*stroke)
                ),
            },
            Element::Dot { at: (x, y), radius, color } => {
                writeln!(out, r#"<circle cx="{x:.1}" cy="{y:.1}" r="{radius}" {}/>"#, fill(*color))
            }
            Element::Rectangle { at: (x, y), size: (width, height), color } => {
                writeln!(
                    out,
                    r#"<rect x="{x:.1}" y="{y:.1}" width="{width:.1}" height="{height:.1}" {}/>"#,
                    fill(*color)
                )
            }
            Element::Clipped { at: (x, y), size: (width, height), content } => {
                let id = format!("{prefix}-{clips}");
                *clips += 1;
                let _ = write!(
                    out,
                    "<clipPath id=\"clip{id}\"><rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\"/></clipPath>\n\
                     <g clip-path=\"url(#clip{id})\">\n"
                );
                write_elements(out, content, prefix, clips);
                writeln!(out, "</g>")
            }
        };
    }
}

/// Returns an SVG file of this width and height with a background. `description` is for screen readers. With `dark`, viewers that
/// support CSS show it with dark colors in dark mode.
pub fn document(drawing: &Drawing, (width, height): (f64, f64), description: &str, dark: bool) -> String {
    let style = if dark { format!("<style>{}</style>\n", dark_mode()) } else { String::new() };
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} {height}\" \
         font-family=\"{FONT_FAMILY}, Verdana, sans-serif\" role=\"img\" aria-label=\"{}\">\n{style}",
        escape(description),
    );
    let mut paper = Drawing::default();
    paper.rectangle((0.0, 0.0), (width, height), Color::Paper);
    // A page may contain figures of several widths.
    let (prefix, mut clips) = (format!("{width:.0}"), 0);
    write_elements(&mut svg, &paper, &prefix, &mut clips);
    write_elements(&mut svg, drawing, &prefix, &mut clips);
    svg + "</svg>\n"
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_escaped() {
        assert_eq!(escape("a<b>&\"'\u{1}\u{7f}\n"), "a&lt;b&gt;&amp;&quot;&#39;\u{fffd}\u{fffd}\n");
    }

    #[test]
    fn curves_have_gaps_at_nan() {
        let svg = |points: &[(f64, f64)]| {
            let mut drawing = Drawing::default();
            drawing.curve(points, Stroke::solid(Color::Run(8), 1.0));
            let mut svg = String::new();
            write_elements(&mut svg, &drawing, "0", &mut 0);
            svg
        };
        let curve = svg(&[(0.0, 1.0), (1.0, 2.0), (2.0, f64::NAN), (3.0, 4.0)]);
        assert!(curve.contains(r#"d="M0.0 1.0L1.0 2.0M3.0 4.0h0""#) && curve.contains("run0-s"));
        assert_eq!(svg(&[(f64::NAN, 1.0)]), "");
    }
}
