use super::*;
use crate::drawing::{Dash, Stroke};
use flate2::read::ZlibDecoder;
use std::io::Read;
use std::time::{Duration, Instant};

/// Draws with two pixels for each unit. Returns the rows of the PNG file.
fn drawn(size: (f64, f64), draw: impl FnOnce(&mut Drawing)) -> Vec<Vec<[u8; 3]>> {
    let mut drawing = Drawing::default();
    draw(&mut drawing);
    decode(&render(&drawing, size, 2.0).unwrap())
}

/// Decodes the files that [`encode`] writes.
fn decode(png: &[u8]) -> Vec<Vec<[u8; 3]>> {
    let (signature, mut rest) = png.split_at(8);
    assert_eq!(signature, b"\x89PNG\r\n\x1a\n");
    let mut chunks = Vec::new();
    while !rest.is_empty() {
        let length = u32::from_be_bytes(rest[..4].try_into().unwrap()) as usize;
        let mut crc = Crc::new();
        crc.update(&rest[4..8 + length]);
        assert_eq!(rest[8 + length..12 + length], crc.sum().to_be_bytes());
        chunks.push((&rest[4..8], &rest[8..8 + length]));
        rest = &rest[12 + length..];
    }
    let [(b"IHDR", header), (b"tEXt", text), (b"IDAT", data), (b"IEND", [])] = chunks[..] else { panic!("{chunks:?}") };
    assert!(text.starts_with(b"Software\0"), "{text:?}");
    assert_eq!(header[8..], [8, 2, 0, 0, 0]);
    let [width, height] = [0, 4].map(|at| u32::from_be_bytes(header[at..at + 4].try_into().unwrap()) as usize);
    let mut rows = Vec::new();
    ZlibDecoder::new(data).read_to_end(&mut rows).unwrap();
    assert_eq!(rows.len(), height * (1 + 3 * width));
    let row = |row: &[u8]| row[1..].chunks(3).map(|pixel| pixel.try_into().unwrap()).collect();
    rows.chunks(1 + 3 * width).map(row).collect()
}

/// Returns the area of the pixels by their darkness, in units.
fn ink(rows: &[Vec<[u8; 3]>], color: Color) -> f64 {
    let full = 255.0 - f64::from(rgb(color)[0]);
    rows.iter().flatten().map(|pixel| (255.0 - f64::from(pixel[0])) / full).sum::<f64>() / 4.0
}

fn text_ink(text: &str) -> f64 {
    ink(&drawn((200.0, 30.0), |d| d.text((5.0, 20.0), Anchor::Start, 12.0, Color::Ink, text)), Color::Ink)
}

#[test]
fn texts_are_drawn_with_the_embedded_font() {
    assert!(text_ink("").abs() < 1e-9 && text_ink(" \t\n").abs() < 1e-9);
    let (short, long) = (text_ink("loss"), text_ink("loss, ÄÖÜ, потеря, …"));
    assert!(short > 20.0 && long > 3.0 * short, "{short} {long}");
}

#[test]
fn characters_without_a_glyph_are_question_marks() {
    let expected = text_ink("?");
    assert!(expected > 5.0);
    for text in ["語", "🚀", "\u{1}", "\u{202e}", "\u{10ffff}"] {
        assert!((text_ink(text) - expected).abs() < 1e-9, "{text:?}");
    }
    // Combining characters, right-to-left text and a long text.
    text_ink("e\u{301} שלום مرحبا");
    text_ink(&"W\u{10ffff}".repeat(5000));
}

#[test]
fn texts_have_the_width_of_the_layout() {
    let text = "training loss (EMA 0.9) 1.31M e-4 % gpqy|[]";
    let rows = drawn((500.0, 30.0), |d| d.text((250.0, 20.0), Anchor::Middle, 12.0, Color::Ink, text));
    let inked: Vec<usize> = (0..1000).filter(|&x| rows.iter().any(|row| row[x] != [255; 3])).collect();
    let (first, last) = (inked[0] as f64 / 2.0, *inked.last().unwrap() as f64 / 2.0);
    let expected = crate::drawing::text_width(text, 12.0);
    assert!((last - first - expected).abs() < 4.0 && (first + last - 500.0).abs() < 4.0, "{first} {last} {expected}");
    let end = drawn((500.0, 30.0), |d| d.text((250.0, 20.0), Anchor::End, 12.0, Color::Ink, text));
    assert!(end.iter().all(|row| row[502..].iter().all(|pixel| *pixel == [255; 3])));
}

#[test]
fn shapes_have_their_area() {
    let size = (100.0, 100.0);
    let stroke = Stroke::solid(Color::Ink, 3.0);
    let area = |draw: &dyn Fn(&mut Drawing)| ink(&drawn(size, draw), Color::Ink);
    let near = |found: f64, expected: f64| assert!((found / expected - 1.0).abs() < 0.02, "{found} {expected}");
    near(area(&|d| d.rectangle((10.2, 10.7), (30.5, 40.0), Color::Ink)), 30.5 * 40.0);
    near(area(&|d| d.dot((50.3, 50.0), 20.0, Color::Ink)), 400.0 * std::f64::consts::PI);
    near(area(&|d| d.line((10.0, 20.3), (90.0, 20.3), stroke)), 80.0 * 3.0);
    near(area(&|d| d.line((10.0, 20.0), (40.0, 60.0), stroke)), 50.0 * 3.0);
    let round = 1.5 * 1.5 * std::f64::consts::PI;
    near(area(&|d| d.curve(&[(10.0, 20.0), (40.0, 60.0)], stroke)), 50.0 * 3.0 + round);
    // Parts of a curve that overlap are as dark as one.
    near(area(&|d| d.curve(&[(10.0, 20.0), (40.0, 60.0), (10.0, 20.0)], stroke)), 50.0 * 3.0 + round);
    near(area(&|d| d.curve(&[(f64::NAN, 1.0), (50.0, 50.0), (60.0, f64::NAN)], stroke)), round);
    let dashed = Stroke { dash: Dash::Dashed, ..stroke };
    near(area(&|d| d.line((5.0, 50.0), (95.0, 50.0), dashed)), 9.0 * 6.0 * 3.0);
    // The dashes continue across corners.
    near(area(&|d| d.curve(&[(10.0, 50.0), (15.0, 50.0), (18.0, 50.0)], dashed)), 6.0 * 3.0 + round);
    let faint = Stroke { opacity: 0.25, ..stroke };
    near(area(&|d| d.line((10.0, 20.0), (90.0, 20.0), faint)), 80.0 * 3.0 / 4.0);
}

#[test]
fn only_the_part_within_the_clip_is_drawn() {
    let rows = drawn((100.0, 50.0), |drawing| {
        let mut inner = Drawing::default();
        inner.curve(&[(-1e9, -1e9), (1e9, 1e9)], Stroke::solid(Color::Run(0), 4.0));
        inner.rectangle((-10.0, 30.0), (1e12, 1e12), Color::Grid);
        inner.dot((10.0, 10.0), 30.0, Color::Run(1));
        inner.text((0.0, 30.0), Anchor::Start, 40.0, Color::Ink, "WWWWWW");
        drawing.clipped((10.0, 10.0), (30.0, 30.0), inner);
    });
    for (y, row) in rows.iter().enumerate() {
        for (x, pixel) in row.iter().enumerate() {
            let inside = (20..80).contains(&x) && (20..80).contains(&y);
            assert!(inside || *pixel == [255; 3], "{x} {y}");
        }
    }
    assert_ne!(rows[70][79], [255; 3]);
    assert_ne!(rows[20][20], [255; 3]);
}

#[test]
fn curves_far_outside_take_no_longer() {
    let started = Instant::now();
    let far = |i: usize| (f64::from(i as u32 % 7) * 1e6 - 3e6, if i.is_multiple_of(2) { 1e6 } else { -1e6 });
    let points: Vec<Point> = (0..5000).map(far).collect();
    drawn((400.0, 200.0), |d| d.curve(&points, Stroke { dash: Dash::Dotted, ..Stroke::solid(Color::Ink, 1.0) }));
    assert!(started.elapsed() < Duration::from_secs(20), "{:?}", started.elapsed());
}
