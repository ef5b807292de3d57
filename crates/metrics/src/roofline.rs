//! A roofline figure (Williams et al., 2009, "Roofline: an insightful visual performance model") from the JSON of
//! `bench kernels --json`.
//!
//! The roof is what the machine reached in the same run: the bandwidth of a copy, and the rate of a large GEMM. Operations with
//! FLOPs are dots at FLOPs per byte and FLOPs per second. Below, every operation has a bar: its percentage of the rate that limits
//! it. FLOPs of memory-bound operations are not counted, so these have a bar only.

use crate::axis::{AxisScale, Unit};
use crate::drawing::{Anchor, Color, Dash, Drawing, Stroke, shorten, text_width};
use crate::figure::{DEFAULT_WIDTH, LABEL, MARGIN, TITLE, WIDE_HEIGHT};
use crate::png;
use crate::svg::document;
use anyhow::{Context, Result, ensure};
use serde::Deserialize;

const ROW_HEIGHT: f64 = 19.0;
/// Maximum number of operations in a figure. The longest ones are kept.
const MAX_OPERATIONS: usize = 200;
/// Percentage at the right end of the bars.
const MAX_PERCENT: f64 = 120.0;

/// The JSON of `bench kernels`.
#[derive(Clone, Debug, Deserialize)]
pub struct Roofline {
    /// Must be `kernels`.
    bench: String,
    machine: String,
    precision: String,
    copy_gbs: f64,
    product_tflops: f64,
    rows: Vec<Row>,
}

/// An operation.
#[derive(Clone, Debug, Deserialize)]
struct Row {
    model: String,
    operation: String,
    shape: String,
    us: f64,
    tflops: Option<f64>,
    flop_per_byte: Option<f64>,
    percent_of_copy: Option<f64>,
    percent_of_product: Option<f64>,
}

impl Row {
    /// Returns the percentage of the rate that limits the operation, and the name of that rate.
    fn percentage(&self) -> Option<(f64, &'static str)> {
        let of_gemm = self.percent_of_product.map(|percent| (percent, "GEMM"));
        of_gemm.or(self.percent_of_copy.map(|percent| (percent, "copy")))
    }

    /// Returns FLOPs per byte and TFLOP/s.
    fn point(&self) -> Option<(f64, f64)> {
        self.flop_per_byte.zip(self.tflops).filter(|(x, y)| *x > 0.0 && *y > 0.0)
    }
}

impl Roofline {
    /// Parses the JSON. `name` names it in errors.
    pub fn parse(name: &str, text: &[u8]) -> Result<Self> {
        let expected =
            || format!("{name}: expected the JSON of `bench kernels --json FILE`; measure again with this version");
        let mut all: Self = serde_json::from_slice(text).with_context(expected)?;
        ensure!(all.bench == "kernels", "{}: this file is of `bench {}`", expected(), all.bench);
        let rates = [all.copy_gbs, all.product_tflops];
        ensure!(
            rates.iter().all(|rate| rate.is_normal() && *rate > 0.0),
            "{name}: copy_gbs and product_tflops: expected positive numbers, found {rates:?}"
        );
        // Kernels of an operation are indented.
        all.rows.retain(|row| {
            row.us > 0.0 && row.percentage().is_some() && !row.operation.starts_with(' ') && !row.model.is_empty()
        });
        ensure!(!all.rows.is_empty(), "{name}: expected an operation with a rate, found none; choose other operations");
        all.rows.sort_by(|a, b| b.us.total_cmp(&a.us));
        all.rows.truncate(MAX_OPERATIONS);
        let order: Vec<String> = all.models().into_iter().map(str::to_owned).collect();
        let place = |row: &Row| order.iter().position(|model| *model == row.model);
        all.rows.sort_by_key(place);
        Ok(all)
    }

    /// Returns the models, that of the longest operation first.
    fn models(&self) -> Vec<&str> {
        let mut models: Vec<&str> = Vec::new();
        for row in &self.rows {
            if !models.contains(&row.model.as_str()) {
                models.push(&row.model);
            }
        }
        models
    }

    /// Returns the number of a row's color.
    fn color(&self, row: &Row) -> Color {
        Color::Run(self.models().iter().position(|model| *model == row.model).unwrap_or(0))
    }

    fn title(&self) -> String {
        format!("Roofline of {}, {}", self.machine, self.precision)
    }

    /// Draws the figure. Returns it with its width and height.
    fn draw(&self) -> (Drawing, (f64, f64)) {
        let mut body = Drawing::default();
        let mut y = MARGIN + TITLE;
        let title = self.title();
        body.text((MARGIN, y), Anchor::Start, TITLE, Color::Ink, &shorten(&title, TITLE, DEFAULT_WIDTH - 2.0 * MARGIN));
        y += 22.0;
        let mut x = MARGIN;
        for (i, model) in self.models().into_iter().enumerate() {
            let name = shorten(model, 12.0, 300.0);
            body.dot((x + 5.0, y - 4.0), 4.0, Color::Run(i));
            body.text((x + 14.0, y), Anchor::Start, 12.0, Color::Ink, &name);
            x += 32.0 + text_width(&name, 12.0);
        }
        y += 10.0;
        if self.rows.iter().any(|row| row.point().is_some()) {
            self.roof(&mut body, y);
            y += WIDE_HEIGHT;
        }
        y = self.bars(&mut body, y + 24.0);
        (body, (DEFAULT_WIDTH, y + MARGIN))
    }

    /// Returns an SVG file. With `dark`, viewers that support CSS show it with dark colors in dark mode.
    pub fn to_svg(&self, dark: bool) -> String {
        let (body, size) = self.draw();
        document(&body, size, &self.title(), dark)
    }

    /// Returns a PNG file of twice the resolution of the SVG, with light colors.
    pub fn to_png(&self) -> Result<Vec<u8>> {
        let (body, size) = self.draw();
        png::render(&body, size, 2.0)
    }

    /// Draws the roof and the operations that have FLOPs, from `top` on.
    fn roof(&self, body: &mut Drawing, top: f64) {
        let points = || self.rows.iter().filter_map(Row::point);
        let bandwidth = self.copy_gbs / 1e3;
        let ridge = self.product_tflops / bandwidth;
        let least = points().map(|(x, _)| x).fold(ridge, f64::min);
        let most = points().map(|(x, _)| x).fold(ridge, f64::max);
        let horizontal = AxisScale::new(least, most, true).padded(0.08, 0.08);
        let low = points().map(|(_, y)| y).fold(bandwidth * horizontal.low, f64::min);
        let high = points().map(|(_, y)| y).fold(self.product_tflops, f64::max);
        let vertical = AxisScale::new(low, high, true).padded(0.02, 0.08);
        let (x0, y0, w, h) = (MARGIN + 46.0, top + 20.0, DEFAULT_WIDTH - 2.0 * MARGIN - 60.0, WIDE_HEIGHT - 60.0);
        let place = |(x, y): (f64, f64)| (x0 + w * horizontal.position(x), y0 + h * (1.0 - vertical.position(y)));
        body.text((x0 - 40.0, top + 10.0), Anchor::Start, LABEL, Color::Muted, "TFLOP/s");
        for tick in vertical.ticks(6, Unit::Number) {
            let y = y0 + h * (1.0 - tick.at);
            body.line((x0, y), (x0 + w, y), Stroke::solid(Color::Grid, if tick.label.is_empty() { 0.5 } else { 1.0 }));
            body.text((x0 - 7.0, y + 4.0), Anchor::End, LABEL, Color::Muted, &tick.label);
        }
        for tick in horizontal.ticks(10, Unit::Number) {
            let x = x0 + w * tick.at;
            body.line(
                (x, y0 + h),
                (x, y0 + h + if tick.label.is_empty() { 3.0 } else { 5.0 }),
                Stroke::solid(Color::Muted, 1.0),
            );
            body.text((x, y0 + h + 17.0), Anchor::Middle, LABEL, Color::Muted, &tick.label);
        }
        body.line((x0, y0 + h), (x0 + w, y0 + h), Stroke::solid(Color::Muted, 1.0));
        body.text((x0 + w / 2.0, y0 + h + 33.0), Anchor::Middle, LABEL, Color::Muted, "FLOPs per byte");
        let mut inside = Drawing::default();
        let corner = (ridge, self.product_tflops);
        let roof =
            [(horizontal.low, bandwidth * horizontal.low), corner, (horizontal.high, self.product_tflops)].map(place);
        inside.curve(&roof, Stroke { dash: Dash::Dashed, ..Stroke::solid(Color::Muted, 1.6) });
        for (i, row) in self.rows.iter().enumerate() {
            let Some(at) = row.point().map(place) else { continue };
            inside.dot(at, 4.0, self.color(row));
            inside.text((at.0 + 6.0, at.1 + 4.0), Anchor::Start, 9.0, Color::Muted, &(i + 1).to_string());
        }
        body.clipped((x0 - 4.0, y0 - 14.0), (w + 30.0, h + 18.0), inside);
        let (corner_x, corner_y) = place(corner);
        let rate = format!("GEMM: {:.0} TFLOP/s; copy: {:.0} GB/s", self.product_tflops, self.copy_gbs);
        let inner = corner_x.clamp(x0 + text_width(&rate, LABEL) + 10.0, x0 + w);
        body.text((inner, corner_y - 9.0), Anchor::End, LABEL, Color::Muted, &rate);
    }

    /// Draws a row for each operation from `top` on. Returns the lower end.
    fn bars(&self, body: &mut Drawing, top: f64) -> f64 {
        let (name, time, bar) = (MARGIN + 30.0, 560.0, 580.0);
        let width = DEFAULT_WIDTH - MARGIN - 90.0 - bar;
        let place = |percent: f64| bar + width * percent.min(MAX_PERCENT) / MAX_PERCENT;
        body.text((name, top), Anchor::Start, LABEL, Color::Muted, "operation, shape");
        body.text((time, top), Anchor::End, LABEL, Color::Muted, "us");
        body.text((bar, top), Anchor::Start, LABEL, Color::Muted, "percentage of the rate of the copy or GEMM");
        let mut y = top + 6.0;
        let bottom = y + ROW_HEIGHT * self.rows.len() as f64;
        body.line(
            (place(100.0), y),
            (place(100.0), bottom),
            Stroke { dash: Dash::Dashed, ..Stroke::solid(Color::Muted, 1.0) },
        );
        for (i, row) in self.rows.iter().enumerate() {
            let baseline = y + 13.0;
            let (percent, of) = row.percentage().unwrap_or((0.0, ""));
            body.text((name - 8.0, baseline), Anchor::End, LABEL, Color::Muted, &(i + 1).to_string());
            let text = shorten(&format!("{}  {}", row.operation, row.shape), LABEL, time - name - 60.0);
            body.text((name, baseline), Anchor::Start, LABEL, Color::Ink, &text);
            body.text((time, baseline), Anchor::End, LABEL, Color::Ink, &format!("{:.1}", row.us));
            body.rectangle((bar, y + 4.0), (place(percent) - bar, ROW_HEIGHT - 8.0), self.color(row));
            body.text(
                (place(percent) + 6.0, baseline),
                Anchor::Start,
                LABEL,
                Color::Muted,
                &format!("{percent:.0} % of {of}"),
            );
            y += ROW_HEIGHT;
        }
        bottom
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn measured() -> Value {
        let row = |operation: &str, us: f64| json!({"model": "d12", "operation": operation, "shape": "64 x <1024>", "us": us});
        let mut copy = row("gelu_forward", 120.0);
        (copy["gbs"], copy["percent_of_copy"]) = (json!(3500.0), json!(87.5));
        let mut gemm = row("matmul_forward", 300.0);
        (gemm["tflops"], gemm["flop_per_byte"], gemm["percent_of_product"]) = (json!(640.0), json!(610.0), json!(91.4));
        let mut kernel = gemm.clone();
        kernel["operation"] = "  kernel of an operation".into();
        let mut ceiling = gemm.clone();
        ceiling["model"] = "".into();
        json!({
            "bench": "kernels", "machine": "NVIDIA H200", "precision": "bf16", "copy_gbs": 4000.0, "product_tflops": 700.0,
            "rows": [ceiling, copy, gemm, kernel, row("without a rate", 1.0)],
        })
    }

    fn parse(value: &Value) -> Result<Roofline> {
        Roofline::parse("k.json", value.to_string().as_bytes())
    }

    #[test]
    fn operations_have_a_dot_or_a_bar() {
        let roofline = parse(&measured()).unwrap();
        let svg = roofline.to_svg(true);
        for text in [
            "Roofline of NVIDIA H200, bf16",
            "GEMM: 700 TFLOP/s; copy: 4000 GB/s",
            "FLOPs per byte",
            "91 % of GEMM",
            "88 % of copy",
            "matmul_forward  64 x &lt;1024&gt;",
            "gelu_forward",
            ">600<",
        ] {
            assert!(svg.contains(text), "{text}: {svg}");
        }
        assert!(
            !svg.contains("kernel of an operation") && !svg.contains("without a rate") && !svg.contains("NaN"),
            "{svg}"
        );
        // The dot of the GEMM, and that of the legend.
        assert_eq!(svg.matches("<circle").count(), 2);
        assert!(roofline.to_png().unwrap().starts_with(b"\x89PNG"));
    }

    #[test]
    fn dots_lie_on_the_roof_if_the_rate_is_that_of_the_machine() {
        let mut value = measured();
        let at = |value: &Value| {
            let svg = parse(value).unwrap().to_svg(false);
            let circle = svg.lines().filter(|line| line.starts_with("<circle")).nth(1).unwrap().to_owned();
            let roof = svg.lines().find(|line| line.contains("stroke-dasharray")).unwrap().to_owned();
            let number = |text: &str| text.split(['"', 'L', ' ']).next().unwrap().parse::<f64>().unwrap();
            let y = number(circle.split("cy=\"").nth(1).unwrap());
            let flat: f64 = number(roof.split('L').nth(1).unwrap().split(' ').nth(1).unwrap());
            (y, flat)
        };
        let (below, roof) = at(&value);
        assert!(below > roof, "{below} {roof}");
        value["rows"][2]["tflops"] = json!(700.0);
        let (on, roof) = at(&value);
        assert!((on - roof).abs() < 0.2, "{on} {roof}");
    }

    #[test]
    fn memory_bound_operations_alone_have_no_roof() {
        let mut value = measured();
        value["rows"].as_array_mut().unwrap().remove(2);
        let svg = parse(&value).unwrap().to_svg(false);
        assert!(!svg.contains("FLOPs per byte") && svg.contains("88 % of copy"), "{svg}");
    }

    #[test]
    fn other_files_are_errors() {
        let error = |change: &dyn Fn(&mut Value)| {
            let mut value = measured();
            change(&mut value);
            format!("{:#}", parse(&value).unwrap_err())
        };
        assert!(
            error(&|v| v["bench"] = "step".into()).contains("k.json: expected the JSON of `bench kernels --json FILE`")
        );
        assert!(error(&|v| drop(v.as_object_mut().unwrap().remove("machine"))).contains("missing field `machine`"));
        assert!(error(&|v| v["copy_gbs"] = json!(0.0)).contains("expected positive numbers, found [0.0, 700.0]"));
        assert!(error(&|v| v["rows"] = json!([])).contains("expected an operation with a rate, found none"));
        assert!(format!("{:#}", Roofline::parse("x", b"{").unwrap_err()).contains("x: expected the JSON"));
    }
}
