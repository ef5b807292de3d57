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
