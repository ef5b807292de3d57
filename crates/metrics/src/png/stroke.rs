//! The pixels of lines and curves.

use super::{Area, Mask, overlap};
use crate::drawing::{Point, Stroke, parts};

/// Returns the coverage by a curve with `scale` pixels for each unit. Ends of dashes and corners are round if `round` is set, and
/// ends are flat otherwise.
pub fn mask(points: &[Point], stroke: Stroke, round: bool, scale: f64, clip: Area) -> Mask {
    let half = stroke.width * scale / 2.0;
    let reach = half + 1.0;
    // Only what is near the visible area is drawn. Points may be far away.
    let low = (clip.left as f64 - reach, clip.top as f64 - reach);
    let high = (clip.right as f64 + reach, clip.bottom as f64 + reach);
    let mut segments = Vec::new();
    for part in parts(points) {
        let pixels: Vec<Point> = part.iter().map(|(x, y)| (x * scale, y * scale)).collect();
        let mut dashes = Dashes::new(stroke.dash.lengths().map(|(dash, gap)| (dash * scale, gap * scale)));
        match pixels[..] {
            [only] => segments.push((only, only)),
            _ => pixels
                .windows(2)
                .filter_map(|pair| cut(pair[0], pair[1], low, high))
                .for_each(|(from, to)| dashes.divide(from, to, &mut segments)),
        }
    }
    let ends = || segments.iter().flat_map(|&(from, to)| [from, to]);
    let bound = |least: fn(f64, f64) -> f64, start: f64| {
        ends().fold((start, start), |bound, (x, y)| (least(bound.0, x), least(bound.1, y)))
    };
    let (least, most) = (bound(f64::min, f64::INFINITY), bound(f64::max, f64::NEG_INFINITY));
    let area = Area::around((least.0 - reach, least.1 - reach), (most.0 + reach, most.1 + reach));
    let mut mask = Mask::new(area.within(clip));
    for (from, to) in segments {
        add_segment(&mut mask, from, to, half, round);
    }
    mask
}

/// Adds a segment with this half of the width.
fn add_segment(mask: &mut Mask, from: Point, to: Point, half: f64, round: bool) {
    let (dx, dy) = (to.0 - from.0, to.1 - from.1);
    let length = dx.hypot(dy);
    if length == 0.0 && !round {
        return;
    }
    let (cos, sin) = if length == 0.0 { (1.0, 0.0) } else { (dx / length, dy / length) };
    let coverage = |x: f64, y: f64| {
        let along = (x - from.0) * cos + (y - from.1) * sin;
        let across = (y - from.1) * cos - (x - from.0) * sin;
        if round {
            overlap(-half, half, across.hypot(along - along.clamp(0.0, length)))
        } else {
            overlap(-half, half, across) * overlap(0.0, length, along)
        }
    };
    let reach = half + 1.0;
    let rows = Area::around((0.0, from.1.min(to.1) - reach), (0.0, from.1.max(to.1) + reach)).within(Area {
        left: 0,
        right: 0,
        ..mask.area
    });
    for row in rows.top..rows.bottom {
        // The part of the segment that may reach this row. A horizontal one is infinitely far above or below a position.
        let at = |y: f64| from.0 + dx * ((y - from.1) / dy).clamp(0.0, 1.0);
        let (first, last) = (at(row as f64 - reach), at(row as f64 + 1.0 + reach));
        mask.add_row(row, (first.min(last) - reach, first.max(last) + reach), coverage);
    }
}

/// Returns the part of a segment within a rectangle (Liang and Barsky, 1984, "A new concept and method for line clipping").
fn cut(from: Point, to: Point, low: Point, high: Point) -> Option<(Point, Point)> {
    let (dx, dy) = (to.0 - from.0, to.1 - from.1);
    let (mut first, mut last) = (0.0_f64, 1.0_f64);
    for (start, step, low, high) in [(from.0, dx, low.0, high.0), (from.1, dy, low.1, high.1)] {
        // A segment along an edge is never cut by it: both are infinite, of one sign if the segment is outside.
        let (enter, leave) = ((low - start) / step, (high - start) / step);
        first = first.max(enter.min(leave));
        last = last.min(enter.max(leave));
    }
    let at = |t: f64| (from.0 + t * dx, from.1 + t * dy);
    (first <= last).then(|| (at(first), at(last)))
}

/// Divides a curve into dashes.
struct Dashes {
    /// Lengths of a dash and of a gap; `None` for a solid curve.
    lengths: Option<(f64, f64)>,
    in_gap: bool,
    /// Rest of the dash or gap.
    rest: f64,
}

impl Dashes {
    fn new(lengths: Option<(f64, f64)>) -> Self {
        Self { lengths, in_gap: false, rest: lengths.map_or(0.0, |(dash, _)| dash) }
    }

    /// Appends the dashes of a segment, which continues the segment before.
    fn divide(&mut self, from: Point, to: Point, dashes: &mut Vec<(Point, Point)>) {
        let Some((dash, gap)) = self.lengths else {
            dashes.push((from, to));
            return;
        };
        let (dx, dy) = (to.0 - from.0, to.1 - from.1);
        let length = dx.hypot(dy);
        let at = |distance: f64| (from.0 + dx * distance / length, from.1 + dy * distance / length);
        let mut start = 0.0;
        loop {
            let end = start + self.rest;
            if !self.in_gap && start < length {
                dashes.push((at(start), at(end.min(length))));
            }
            if end > length {
                self.rest = end - length;
                return;
            }
            start = end;
            self.in_gap = !self.in_gap;
            self.rest = if self.in_gap { gap } else { dash };
        }
    }
}
