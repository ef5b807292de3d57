//! Sizes and rates with units. A unit is required, and its case matters: `400Gb/s` are bits, `50GB/s` are bytes.

/// Decimal and binary prefixes of bytes.
const BYTES: [(&str, f64); 9] = [
    ("B", 1.0),
    ("kB", 1e3),
    ("MB", 1e6),
    ("GB", 1e9),
    ("TB", 1e12),
    ("KiB", 1024.0),
    ("MiB", 1_048_576.0),
    ("GiB", 1_073_741_824.0),
    ("TiB", 1_099_511_627_776.0),
];

const BITS: [(&str, f64); 3] = [("Mb", 1e6 / 8.0), ("Gb", 1e9 / 8.0), ("Tb", 1e12 / 8.0)];

/// Returns a positive number and its unit.
fn number(text: &str) -> Option<(f64, &str)> {
    let end = text.find(|c: char| !(c.is_ascii_digit() || c == '.'))?;
    let (digits, unit) = text.split_at(end);
    // Rejects `.5` and `5.`, which `parse` accepts.
    let plain = digits.starts_with(|c: char| c.is_ascii_digit()) && digits.ends_with(|c: char| c.is_ascii_digit());
    let number: f64 = digits.parse().ok().filter(|_| plain)?;
    (number > 0.0 && number.is_finite()).then_some((number, unit))
}

fn scaled(text: &str, units: &[(&str, f64)]) -> Option<f64> {
    let (number, unit) = number(text)?;
    let (_, factor) = units.iter().find(|(name, _)| *name == unit)?;
    Some(number * factor)
}

/// Parses a size, such as `80GB` or `80GiB`, and returns bytes.
pub fn bytes(text: &str) -> Result<usize, String> {
    let size = scaled(text, &BYTES).filter(|bytes| (1.0..1e18).contains(bytes));
    size.map(|bytes| bytes as usize).ok_or_else(|| "expected a size with its unit, such as 80GB or 80GiB".to_owned())
}

/// Parses a bandwidth, such as `450GB/s` or `400Gb/s`, and returns bytes per second.
pub fn bandwidth(text: &str) -> Result<f64, String> {
    let rate = text.strip_suffix("/s").and_then(|amount| scaled(amount, &[&BYTES[..], &BITS].concat()));
    rate.ok_or_else(|| "expected a bandwidth with its unit, such as 450GB/s or 400Gb/s".to_owned())
}

/// Parses an arithmetic rate, such as `989TFLOPS`, and returns FLOPs per second.
pub fn arithmetic_rate(text: &str) -> Result<f64, String> {
    let rate = scaled(text, &[("GFLOPS", 1e9), ("TFLOPS", 1e12), ("PFLOPS", 1e15)]);
    rate.ok_or_else(|| "expected a rate with its unit, such as 989TFLOPS".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_decimal_binary_or_bits() {
        assert_eq!((bytes("80GB"), bytes("80GiB")), (Ok(80_000_000_000), Ok(85_899_345_920)));
        assert_eq!((bytes("1.5kB"), bytes("141GB")), (Ok(1500), Ok(141_000_000_000)));
        assert_eq!((bandwidth("450GB/s"), bandwidth("400Gb/s")), (Ok(450e9), Ok(50e9)));
        assert_eq!(bandwidth("3.2Tb/s"), Ok(400e9));
        assert_eq!(arithmetic_rate("989TFLOPS"), Ok(989e12));
    }

    #[test]
    fn other_texts_are_rejected() {
        for text in ["", "80", "GB", "-80GB", "80 GB", "80gb", "80Gb", "80G", "0GB", "8e1GB", ".5GB", "5.GB", "1.2.3GB"]
        {
            assert!(bytes(text).unwrap_err().contains("such as 80GB"), "{text}");
        }
        for text in ["", "450GB", "450", "450GB/S", "450Gbps", "0GB/s", "infGB/s", "NaNGB/s", "50GB/s/s"] {
            assert!(bandwidth(text).unwrap_err().contains("such as 450GB/s"), "{text}");
        }
        for text in ["989", "989TFLOP", "989TFLOPs", "1e3TFLOPS"] {
            assert!(arithmetic_rate(text).unwrap_err().contains("such as 989TFLOPS"), "{text}");
        }
    }
}
