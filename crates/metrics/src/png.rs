//! Renders a figure as PNG. Texts use an embedded font, so the pixels are the same on every machine.

use anyhow::{Context, Result};
use resvg::tiny_skia::{Pixmap, Transform};
use resvg::usvg::{Options, Tree};

/// Latin, Greek, Cyrillic, digits and symbols of DejaVu Sans. `font/LICENSE` holds its license.
const FONT: &[u8] = include_bytes!("../font/DejaVuSans-subset.ttf");
/// Name of the embedded font.
pub const FONT_FAMILY: &str = "DejaVu Sans";

/// Renders an SVG file with `scale` pixels for each unit, and returns the bytes of a PNG file.
pub fn render(svg: &str, scale: f32) -> Result<Vec<u8>> {
    let mut options = Options { font_family: FONT_FAMILY.to_owned(), ..Options::default() };
    options.fontdb_mut().load_font_data(FONT.to_vec());
    let tree = Tree::from_str(svg, &options).context("cannot render the figure")?;
    let size = tree.size().to_int_size().scale_by(scale).context("cannot render the figure: it is too large")?;
    let mut pixels = Pixmap::new(size.width(), size.height()).context("cannot render the figure: it is too large")?;
    resvg::render(&tree, Transform::from_scale(scale, scale), &mut pixels.as_mut());
    pixels.encode_png().context("cannot encode the figure as PNG")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the number of pixels that differ from a white background.
    fn inked(text: &str) -> usize {
        let svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"200\" height=\"30\" font-family=\"{FONT_FAMILY}, Verdana\">\
             <rect width=\"200\" height=\"30\" fill=\"#fff\"/><text x=\"5\" y=\"20\" font-size=\"12\">{text}</text></svg>"
        );
        let png = render(&svg, 2.0).unwrap();
        let pixels = Pixmap::decode_png(&png).unwrap();
        assert_eq!((pixels.width(), pixels.height()), (400, 60));
        pixels.pixels().iter().filter(|pixel| pixel.red() < 128).count()
    }

    #[test]
    fn texts_are_drawn_with_the_embedded_font() {
        assert_eq!(inked(""), 0);
        let (short, long) = (inked("loss"), inked("loss, ÄÖÜ, потеря, …"));
        assert!(short > 50 && long > 3 * short, "{short} {long}");
    }

    #[test]
    fn a_file_that_is_not_svg_is_an_error() {
        assert!(render("<svg", 1.0).is_err());
    }
}
