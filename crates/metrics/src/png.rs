//! Draws a figure as PNG, with light colors. Texts use an embedded font, so the pixels are the same on every machine.

mod glyph;
mod stroke;

use crate::drawing::{Anchor, Color, Drawing, Element, Point};
use anyhow::{Context, Result};
use flate2::write::ZlibEncoder;
use flate2::{Compression, Crc};
use std::io::{self, Write};
use ttf_parser::{Face, GlyphId};

/// Latin, Greek, Cyrillic, digits and symbols of DejaVu Sans. `font/LICENSE` holds its license.
const FONT: &[u8] = include_bytes!("../font/DejaVuSans-subset.ttf");
/// Name of the embedded font.
pub const FONT_FAMILY: &str = "DejaVu Sans";

/// A text near the beginning of every file of [`render`].
pub const MARK: &str = "tEXtSoftware\0llm-rs";

/// Draws a figure of this width and height with `scale` pixels for each unit, and returns the bytes of a PNG file.
pub fn render(drawing: &Drawing, (width, height): (f64, f64), scale: f64) -> Result<Vec<u8>> {
    let (width, height) = ((width * scale).round() as usize, (height * scale).round() as usize);
    let font = Face::parse(FONT, 0).context("the embedded font is damaged")?;
    let mut canvas = Canvas { width, pixels: vec![rgb(Color::Paper); width * height], scale, font };
    canvas.draw(drawing, Area { left: 0, top: 0, right: width as isize, bottom: height as isize });
    encode((width, height), &canvas.pixels).context("cannot encode the figure as PNG")
}

/// Returns the color on a light background.
fn rgb(color: Color) -> [u8; 3] {
    let digits = u32::from_str_radix(&color.light()[1..], 16).expect("colors are hexadecimal numbers");
    [16, 8, 0].map(|shift| (digits >> shift) as u8)
}

/// A rectangle of whole pixels. It is empty if its right end is not greater than its left end, for example.
#[derive(Clone, Copy)]
struct Area {
    left: isize,
    top: isize,
    right: isize,
    bottom: isize,
}

impl Area {
    /// Returns the smallest area with a rectangle of these corners.
    fn around((left, top): Point, (right, bottom): Point) -> Self {
        let [left, top] = [left, top].map(|edge| edge.floor() as isize);
        let [right, bottom] = [right, bottom].map(|edge| edge.ceil() as isize);
        Self { left, top, right, bottom }
    }

    /// Returns the part of this area that is in another one.
    fn within(self, other: Self) -> Self {
        Self {
            left: self.left.max(other.left),
            top: self.top.max(other.top),
            right: self.right.min(other.right),
            bottom: self.bottom.min(other.bottom),
        }
    }

    fn width(self) -> usize {
        usize::try_from(self.right.saturating_sub(self.left)).unwrap_or(0)
    }

    fn height(self) -> usize {
        usize::try_from(self.bottom.saturating_sub(self.top)).unwrap_or(0)
    }
}

/// The coverage of pixels by a shape, from 0 to 1.
struct Mask {
    area: Area,
    coverage: Vec<f32>,
}

impl Mask {
    fn new(area: Area) -> Self {
        Self { area, coverage: vec![0.0; area.width() * area.height()] }
    }

    /// Adds a shape to the pixels of one row from `left` to `right`. `coverage` gets the center of a pixel. Shapes that overlap do
    /// not add up.
    fn add_row(&mut self, y: isize, (left, right): (f64, f64), coverage: impl Fn(f64, f64) -> f64) {
        let row = (y - self.area.top) as usize * self.area.width();
        let columns = (left.floor() as isize).max(self.area.left)..(right.ceil() as isize).min(self.area.right);
        for x in columns {
            let pixel = &mut self.coverage[row + (x - self.area.left) as usize];
            *pixel = pixel.max(coverage(x as f64 + 0.5, y as f64 + 0.5).clamp(0.0, 1.0) as f32);
        }
    }

    /// Adds a shape to all pixels.
    fn add(&mut self, coverage: impl Fn(f64, f64) -> f64) {
        for y in self.area.top..self.area.bottom {
            self.add_row(y, (self.area.left as f64, self.area.right as f64), &coverage);
        }
    }
}

/// Returns the length of the part of a pixel at `center` that is between `low` and `high`.
fn overlap(low: f64, high: f64, center: f64) -> f64 {
    (high.min(center + 0.5) - low.max(center - 0.5)).clamp(0.0, 1.0)
}

struct Canvas {
    width: usize,
    pixels: Vec<[u8; 3]>,
    /// Pixels for each unit.
    scale: f64,
    font: Face<'static>,
}

impl Canvas {
    /// Draws the part of a drawing that is in an area of the canvas.
    fn draw(&mut self, drawing: &Drawing, clip: Area) {
        let scale = self.scale;
        let pixel = |(x, y): Point| (x * scale, y * scale);
        let corners = |at: Point, size: (f64, f64)| (pixel(at), pixel((at.0 + size.0, at.1 + size.1)));
        for element in &drawing.elements {
            match element {
                Element::Text { at, anchor, size, color, content } => {
                    self.text(pixel(*at), *anchor, size * scale, *color, content, clip);
                }
                Element::Line { from, to, stroke } => {
                    let mask = stroke::mask(&[*from, *to], *stroke, false, scale, clip);
                    self.paint(&mask, stroke.color, stroke.opacity, clip);
                }
                Element::Curve { points, stroke } => {
                    let mask = stroke::mask(points, *stroke, true, scale, clip);
                    self.paint(&mask, stroke.color, stroke.opacity, clip);
                }
                Element::Dot { at, radius, color } => {
                    let ((x, y), radius) = (pixel(*at), radius * scale);
                    let reach = radius + 1.0;
                    let area = Area::around((x - reach, y - reach), (x + reach, y + reach));
                    let mut mask = Mask::new(area.within(clip));
                    mask.add(|column, row| radius + 0.5 - (column - x).hypot(row - y));
                    self.paint(&mask, *color, 1.0, clip);
                }
                Element::Rectangle { at, size, color } => {
                    let (low, high) = corners(*at, *size);
                    let mut mask = Mask::new(Area::around(low, high).within(clip));
                    mask.add(|x, y| overlap(low.0, high.0, x) * overlap(low.1, high.1, y));
                    self.paint(&mask, *color, 1.0, clip);
                }
                Element::Clipped { at, size, content } => {
                    let (low, high) = corners(*at, *size);
                    self.draw(content, Area::around(low, high).within(clip));
                }
            }
        }
    }

    /// Blends a color into the pixels of `clip` that a mask covers.
    fn paint(&mut self, mask: &Mask, color: Color, opacity: f64, clip: Area) {
        let color = rgb(color);
        let visible = mask.area.within(clip);
        if visible.width() == 0 {
            return;
        }
        for y in visible.top..visible.bottom {
            let covered = (y - mask.area.top) as usize * mask.area.width() + (visible.left - mask.area.left) as usize;
            let painted = y as usize * self.width + visible.left as usize;
            let width = visible.width();
            let pixels = &mut self.pixels[painted..][..width];
            for (pixel, coverage) in pixels.iter_mut().zip(&mask.coverage[covered..][..width]) {
                let alpha = coverage * opacity as f32;
                for (channel, color) in pixel.iter_mut().zip(color) {
                    *channel = (f32::from(*channel) * (1.0 - alpha) + f32::from(color) * alpha).round() as u8;
                }
            }
        }
    }

    /// Draws a text at a baseline. A character that the font lacks becomes a question mark.
    fn text(&mut self, (x, y): Point, anchor: Anchor, size: f64, color: Color, text: &str, clip: Area) {
        let find = |c: char| self.font.glyph_index(if c.is_whitespace() { ' ' } else { c });
        let glyph = |c: char| find(c).or_else(|| find('?')).unwrap_or_default();
        let glyphs: Vec<GlyphId> = text.chars().map(glyph).collect();
        let scale = size / f64::from(self.font.units_per_em());
        let advance = |glyph: GlyphId| f64::from(self.font.glyph_hor_advance(glyph).unwrap_or(0)) * scale;
        let mut starts = Vec::new();
        let mut width = 0.0;
        for &glyph in &glyphs {
            starts.push(width);
            width += advance(glyph);
        }
        let left = match anchor {
            Anchor::Start => x,
            Anchor::Middle => x - width / 2.0,
            Anchor::End => x - width,
        };
        for (glyph, start) in glyphs.into_iter().zip(starts) {
            if let Some(mask) = glyph::mask(&self.font, glyph, (left + start, y), scale) {
                self.paint(&mask, color, 1.0, clip);
            }
        }
    }
}

/// Returns a PNG file of the pixels (W3C, "Portable Network Graphics Specification").
fn encode((width, height): (usize, usize), pixels: &[[u8; 3]]) -> io::Result<Vec<u8>> {
    let mut png = b"\x89PNG\r\n\x1a\n".to_vec();
    let mut chunk = |kind: &[u8; 4], data: &[u8]| {
        let mut crc = Crc::new();
        crc.update(kind);
        crc.update(data);
        png.extend([&(data.len() as u32).to_be_bytes(), &kind[..], data, &crc.sum().to_be_bytes()].concat());
    };
    let mut header = [width, height].map(|length| (length as u32).to_be_bytes()).concat();
    // 8 bits, RGB, and the only methods of compression, filtering and interlacing.
    header.extend([8, 2, 0, 0, 0]);
    chunk(b"IHDR", &header);
    chunk(b"tEXt", &MARK.as_bytes()[4..]);
    let mut data = ZlibEncoder::new(Vec::new(), Compression::default());
    for row in pixels.chunks_exact(width) {
        // The row is stored without a filter: most pixels have the color of the one before.
        data.write_all(&[0])?;
        data.write_all(row.as_flattened())?;
    }
    chunk(b"IDAT", &data.finish()?);
    chunk(b"IEND", &[]);
    Ok(png)
}

#[cfg(test)]
mod tests;
