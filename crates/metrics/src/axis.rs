//! Axes: linear and logarithmic scales, ticks at round values, and their labels.

/// A scale from values to positions between 0 and 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AxisScale {
    /// Value at position 0.
    pub low: f64,
    /// Value at position 1.
    pub high: f64,
    /// Whether equal distances are equal ratios.
    pub log: bool,
}

/// A tick of an axis.
#[derive(Clone, Debug, PartialEq)]
pub struct Tick {
    /// Position between 0 and 1.
    pub at: f64,
    /// Label; empty for a minor tick of a logarithmic axis.
    pub label: String,
}

/// The kind of number on an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// A number in its own unit.
    Number,
    /// A fraction, shown in percent.
    Percent,
}

/// The largest number of decades whose ticks between the powers of ten are drawn.
const MAX_DECADES_WITH_MINOR_TICKS: f64 = 6.0;

/// Largest magnitude of an end of an axis.
const MAX_LIMIT: f64 = 1e100;

impl AxisScale {
    /// Returns a scale over a range of values that is not empty: `low` and `high` are finite, and positive if `log` is set.
    ///
    /// A range of one value is widened.
    pub fn new(low: f64, high: f64, log: bool) -> Self {
        // Differences and ratios within this range are finite.
        let [low, high] = [low, high]
            .map(|end| if log { end.clamp(1.0 / MAX_LIMIT, MAX_LIMIT) } else { end.clamp(-MAX_LIMIT, MAX_LIMIT) });
        // A shorter range is a rounding error.
        if high - low > 1e-9 * low.abs().max(high.abs()) {
            return Self { low, high, log };
        }
        if log {
            return Self { low: low / 1.1, high: low * 1.1, log };
        }
        let margin = if low == 0.0 { 1.0 } else { 0.05 * low.abs() };
        Self { low: low - margin, high: low + margin, log }
    }

    /// Returns this scale with `fraction` of its length added at each end.
    pub fn padded(self, below: f64, above: f64) -> Self {
        let Self { low, high, log } = self;
        if log {
            let ratio = high / low;
            return Self { low: low / ratio.powf(below), high: high * ratio.powf(above), log };
        }
        Self { low: low - below * (high - low), high: high + above * (high - low), log }
    }

    /// Returns the position of a value: between 0 and 1 within the range, and bounded outside of it. NaN for a value without a
    /// logarithm.
    pub fn position(&self, value: f64) -> f64 {
        const FAR: f64 = 1e3;
        let position = match self.log {
            true if value > 0.0 => (value.ln() - self.low.ln()) / (self.high.ln() - self.low.ln()),
            true => f64::NAN,
            false => (value - self.low) / (self.high - self.low),
        };
        position.clamp(-FAR, FAR)
    }

    /// Returns about `count` ticks with labels, and minor ticks without labels on a logarithmic scale.
    pub fn ticks(&self, count: usize, unit: Unit) -> Vec<Tick> {
        let decades = if self.log { (self.high / self.low).log10() } else { 0.0 };
        // Within less than a decade and a half, powers of ten are too few.
        if !self.log || decades < 1.5 {
            return self.round_ticks(count.max(2), unit);
        }
        let first = self.low.log10().floor() as i32;
        let last = self.high.log10().ceil() as i32;
        let every = (decades / count.max(2) as f64).ceil().max(1.0) as i32;
        let mut ticks = Vec::new();
        for exponent in first..=last {
            let power = 10_f64.powi(exponent);
            let has_minor = decades <= MAX_DECADES_WITH_MINOR_TICKS;
            for digit in 1..=9 {
                let value = power * f64::from(digit);
                let labelled =
                    if digit == 1 { exponent % every == 0 } else { decades < 2.5 && [2, 5].contains(&digit) };
                let is_inside = value >= self.low * (1.0 - 1e-9) && value <= self.high * (1.0 + 1e-9);
                if is_inside && (labelled || has_minor) {
                    let label = if labelled { Labels::new(value, value, unit).text(value) } else { String::new() };
                    ticks.push(Tick { at: self.position(value), label });
                }
            }
        }
        ticks
    }

    /// Returns ticks at multiples of a round number.
    fn round_ticks(&self, count: usize, unit: Unit) -> Vec<Tick> {
        let rough = (self.high - self.low) / count as f64;
        let power = 10_f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 2.5, 5.0, 10.0].into_iter().map(|m| m * power).find(|step| *step >= rough * 0.999);
        let step = step.unwrap_or(power);
        let labels = Labels::new(step, self.low.abs().max(self.high.abs()), unit);
        let (first, last) = ((self.low / step - 1e-9).ceil(), (self.high / step + 1e-9).floor());
        // A range far from 0 and shorter than the precision of f64 has no ticks.
        if !(last - first).is_finite() || last - first > 100.0 {
            return Vec::new();
        }
        let values = (0..=(last - first) as usize).map(|i| (first + i as f64) * step);
        values.map(|value| Tick { at: self.position(value), label: labels.text(value) }).collect()
    }
}

/// The format of the labels of one axis: all of them have the same exponent or suffix and the same number of decimals.
struct Labels {
    divisor: f64,
    suffix: String,
    decimals: usize,
}

impl Labels {
    /// Returns the format for multiples of `step` up to `largest`.
    fn new(step: f64, largest: f64, unit: Unit) -> Self {
        let (divisor, suffix) = match (unit, largest.log10().floor()) {
            (Unit::Percent, _) => (0.01, " %".to_owned()),
            // No label has less than one digit before its point.
            (_, exponent) if exponent < -2.0 => {
                let exponent = exponent.min(step.log10().floor().max(exponent - 1.0));
                (10_f64.powf(exponent), format!("e{exponent}"))
            }
            (_, exponent) if (4.0..15.0).contains(&exponent) => {
                let group = (exponent / 3.0).floor();
                (1000_f64.powf(group), ["", "k", "M", "B", "T"][group as usize].to_owned())
            }
            (_, exponent) if exponent >= 15.0 => (10_f64.powf(exponent), format!("e{exponent}")),
            _ => (1.0, String::new()),
        };
        let scaled = step / divisor;
        let decimals = (0..6).find(|&d| {
            let shifted = scaled * 10_f64.powi(d);
            (shifted - shifted.round()).abs() < 1e-6 * shifted.max(1.0)
        });
        Self { divisor, suffix, decimals: decimals.unwrap_or(6) as usize }
    }

    fn text(&self, value: f64) -> String {
        let scaled = value / self.divisor;
        if scaled.abs() < 1e-9 {
            return if self.suffix == " %" { "0 %".to_owned() } else { "0".to_owned() };
        }
        format!("{scaled:.*}{}", self.decimals, self.suffix)
    }
}

/// Formats a count with the suffixes of the axes, such as 1.31M or 9.9B.
pub fn short_count(count: f64) -> String {
    if !count.is_finite() {
        return "unknown".to_owned();
    }
    let group = [1e12, 1e9, 1e6, 1e3].into_iter().zip(["T", "B", "M", "k"]).find(|(power, _)| count >= *power);
    match group {
        Some((power, suffix)) if count >= 1e4 => {
            let scaled = count / power;
            let decimals = if scaled < 10.0 { 2 } else { usize::from(scaled < 100.0) };
            format!("{scaled:.decimals$}{suffix}")
        }
        _ => format!("{count:.0}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(low: f64, high: f64, log: bool, count: usize) -> Vec<String> {
        let ticks = AxisScale::new(low, high, log).ticks(count, Unit::Number);
        assert!(ticks.iter().all(|tick| (-1e-6..=1.0 + 1e-6).contains(&tick.at)), "{ticks:?}");
        ticks.into_iter().map(|tick| tick.label).filter(|label| !label.is_empty()).collect()
    }

    #[test]
    fn labels_are_round_and_share_one_format() {
        assert_eq!(labels(0.0, 19_000.0, false, 4), ["0", "5k", "10k", "15k"]);
        assert_eq!(labels(0.0, 10e9, false, 4), ["0", "2.5B", "5.0B", "7.5B", "10.0B"]);
        assert_eq!(labels(3.2, 3.6, false, 4), ["3.2", "3.3", "3.4", "3.5", "3.6"]);
        assert_eq!(labels(0.0, 6e-4, false, 3), ["0", "2e-4", "4e-4", "6e-4"]);
        assert_eq!(labels(0.0, 1e-3, false, 4), ["0", "2.5e-4", "5.0e-4", "7.5e-4", "10.0e-4"]);
        assert_eq!(labels(-1.0, 1.0, false, 2), ["-1", "0", "1"]);
        assert_eq!(labels(1.0, 100.0, true, 5), ["1", "2", "5", "10", "20", "50", "100"]);
        assert_eq!(labels(1.0, 1e6, true, 6), ["1", "10", "100", "1000", "10k", "100k", "1M"]);
        assert_eq!(labels(3.0, 11.0, true, 4), ["4", "6", "8", "10"]);
        let percent: Vec<_> =
            AxisScale::new(0.25, 0.35, false).ticks(2, Unit::Percent).into_iter().map(|t| t.label).collect();
        assert_eq!(percent, ["25 %", "30 %", "35 %"]);
    }

    #[test]
    fn extreme_ranges_have_a_bounded_number_of_ticks() {
        for (low, high) in [(1e-300, 1e300), (1e300, 1.1e300), (1e15, 1e15 + 1.0), (5e-324, 1e-320), (7.0, 7.0)] {
            for log in [false, true] {
                let ticks = AxisScale::new(low, high, log).ticks(5, Unit::Number);
                assert!(ticks.len() < 110, "{low} {high} {log}: {}", ticks.len());
            }
        }
        assert!(AxisScale::new(0.0, 0.0, false).high > 0.0);
    }

    #[test]
    fn positions_follow_the_scale() {
        let log = AxisScale::new(1.0, 100.0, true);
        assert!((log.position(10.0) - 0.5).abs() < 1e-12 && log.position(0.0).is_nan());
        assert!((AxisScale::new(2.0, 4.0, false).position(3.0) - 0.5).abs() < 1e-12);
        let padded = AxisScale::new(0.0, 10.0, false).padded(0.0, 0.1);
        assert_eq!((padded.low, padded.high), (0.0, 11.0));
    }

    #[test]
    fn counts_are_short() {
        let texts = [7.0, 9999.0, 51_200.0, 1_310_000.0, 9.9e9, 150e9, f64::NAN].map(short_count);
        assert_eq!(texts, ["7", "9999", "51.2k", "1.31M", "9.90B", "150B", "unknown"]);
    }
}
