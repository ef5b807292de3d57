//! The pixels of characters.

use super::{Area, Mask};
use crate::drawing::Point;
use ab_glyph_rasterizer::{Point as Corner, Rasterizer, point};
use ttf_parser::{Face, GlyphId, OutlineBuilder};

/// Returns the coverage by a glyph at a position of its baseline, with `scale` pixels for each unit of the font. `None` for a space.
pub fn mask(font: &Face, glyph: GlyphId, (x, y): Point, scale: f64) -> Option<Mask> {
    let bounds = font.glyph_bounding_box(glyph)?;
    let [left, right] = [bounds.x_min, bounds.x_max].map(|edge| x + f64::from(edge) * scale);
    let [top, bottom] = [bounds.y_max, bounds.y_min].map(|edge| y - f64::from(edge) * scale);
    let mut mask = Mask::new(Area::around((left, top), (right, bottom)));
    let start = point(0.0, 0.0);
    let mut outline = Outline {
        rasterizer: Rasterizer::new(mask.area.width(), mask.area.height()),
        origin: (x - mask.area.left as f64, y - mask.area.top as f64),
        scale,
        first: start,
        last: start,
    };
    font.outline_glyph(glyph, &mut outline)?;
    outline.rasterizer.for_each_pixel(|at, coverage| mask.coverage[at] = coverage.min(1.0));
    Some(mask)
}

/// Passes the outline of a glyph to a rasterizer.
struct Outline {
    rasterizer: Rasterizer,
    /// Position of the glyph in the rasterizer.
    origin: Point,
    scale: f64,
    /// Beginning of the contour, and its end until now.
    first: Corner,
    last: Corner,
}

impl Outline {
    fn place(&self, x: f32, y: f32) -> Corner {
        let (left, baseline) = self.origin;
        point((left + f64::from(x) * self.scale) as f32, (baseline - f64::from(y) * self.scale) as f32)
    }
}

impl OutlineBuilder for Outline {
    fn move_to(&mut self, x: f32, y: f32) {
        self.first = self.place(x, y);
        self.last = self.first;
    }

    fn line_to(&mut self, x: f32, y: f32) {
        let to = self.place(x, y);
        self.rasterizer.draw_line(self.last, to);
        self.last = to;
    }

    fn quad_to(&mut self, x1: f32, y1: f32, x: f32, y: f32) {
        let to = self.place(x, y);
        self.rasterizer.draw_quad(self.last, self.place(x1, y1), to);
        self.last = to;
    }

    fn curve_to(&mut self, x1: f32, y1: f32, x2: f32, y2: f32, x: f32, y: f32) {
        let to = self.place(x, y);
        self.rasterizer.draw_cubic(self.last, self.place(x1, y1), self.place(x2, y2), to);
        self.last = to;
    }

    fn close(&mut self) {
        self.rasterizer.draw_line(self.last, self.first);
        self.last = self.first;
    }
}
