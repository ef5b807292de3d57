//! Parsers of flag values. Each error states the expected value; clap adds the flag and the value found.

use data::mixture::Packing;

/// Largest accepted count. Files store steps and tokens in 31 bits, and the product of two such counts does not overflow.
const MAX_COUNT: usize = i32::MAX as usize;

/// Parses a whole number from 1 to 2^31 - 1.
pub fn count(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(n) if (1..=MAX_COUNT).contains(&n) => Ok(n),
        _ => Err(format!("expected a whole number from 1 to {MAX_COUNT}")),
    }
}

/// Parses a whole number of at least 0.
pub fn whole_number(text: &str) -> Result<usize, &'static str> {
    text.parse().map_err(|_| "expected a whole number of at least 0")
}

/// Parses a number of bytes, which may be larger than a [`count`].
pub fn bytes(text: &str) -> Result<usize, &'static str> {
    text.parse().ok().filter(|&n| n > 0).ok_or("expected a whole number of at least 1")
}

/// Parses a seed of a random number generator.
pub fn seed(text: &str) -> Result<u32, String> {
    text.parse().map_err(|_| format!("expected a whole number from 0 to {}", u32::MAX))
}

/// Parses a finite number of at least 0.
pub fn non_negative(text: &str) -> Result<f32, &'static str> {
    match text.parse::<f32>() {
        Ok(x) if x.is_finite() && x >= 0.0 => Ok(x),
        _ => Err("expected a finite number of at least 0"),
    }
}

/// Parses a finite number above 0.
pub fn positive(text: &str) -> Result<f32, &'static str> {
    match text.parse::<f32>() {
        Ok(x) if x.is_finite() && x > 0.0 => Ok(x),
        _ => Err("expected a finite number above 0"),
    }
}

/// Parses a probability from 0 to 1.
pub fn probability(text: &str) -> Result<f32, &'static str> {
    match text.parse::<f32>() {
        Ok(x) if (0.0..=1.0).contains(&x) => Ok(x),
        _ => Err("expected a number from 0 to 1"),
    }
}

/// Parses a fraction from 0 to 1.
pub fn fraction(text: &str) -> Result<f64, &'static str> {
    match text.parse::<f64>() {
        Ok(x) if (0.0..=1.0).contains(&x) => Ok(x),
        _ => Err("expected a number from 0 to 1"),
    }
}

/// Parses a fraction from 0 to 1 as an f32.
pub fn fraction_f32(text: &str) -> Result<f32, &'static str> {
    match text.parse::<f32>() {
        Ok(x) if (0.0..=1.0).contains(&x) => Ok(x),
        _ => Err("expected a number from 0 to 1"),
    }
}

/// Parses a decay of a momentum: a number of at least 0 and below 1.
pub fn momentum(text: &str) -> Result<f32, &'static str> {
    match text.parse::<f32>() {
        Ok(x) if (0.0..1.0).contains(&x) => Ok(x),
        _ => Err("expected a number of at least 0 and below 1"),
    }
}

/// Parses a switch: 0 or 1, or their names.
pub fn switch(text: &str) -> Result<bool, &'static str> {
    match text {
        "1" | "true" | "on" => Ok(true),
        "0" | "false" | "off" => Ok(false),
        _ => Err("expected 1 (true, on) or 0 (false, off)"),
    }
}

/// The value of `--resume`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resume {
    /// Start a new run.
    No,
    /// Resume from a checkpoint, which must exist.
    Required,
    /// Resume from a checkpoint if there is one, otherwise start a new run.
    Auto,
}

/// Parses the value of `--resume`. 1 means `auto`, as in llm.c.
pub fn resume(text: &str) -> Result<Resume, &'static str> {
    match text {
        "required" => Ok(Resume::Required),
        "auto" => Ok(Resume::Auto),
        _ => match switch(text) {
            Ok(true) => Ok(Resume::Auto),
            Ok(false) => Ok(Resume::No),
            Err(_) => {
                Err("expected required (a checkpoint must exist), auto or 1 (start a new run if there is none), or 0")
            }
        },
    }
}

/// Parses the value of `--packing`.
pub fn packing(text: &str) -> Result<Packing, &'static str> {
    match text {
        "stream" => Ok(Packing::Stream),
        "best-fit" => Ok(Packing::BestFit),
        "pad" => Ok(Packing::Pad),
        _ => Err("expected stream, best-fit or pad"),
    }
}

/// Parses a numbered level, such as 0, 1 or 2.
pub fn level<L: TryFrom<u8, Error = &'static str>>(text: &str) -> Result<L, &'static str> {
    // No type has a level 255, so text that is not a number yields the same error as a level out of range.
    L::try_from(text.parse().unwrap_or(u8::MAX))
}

/// Parses a ZeRO stage.
pub fn zero_stage(text: &str) -> Result<u8, &'static str> {
    match text.parse() {
        Ok(stage @ 0..=3) => Ok(stage),
        _ => Err("expected 0, 1, 2 or 3"),
    }
}

/// Parses an interval in steps. 0 means never, and so does llm.c's -1.
pub fn interval(text: &str) -> Result<usize, &'static str> {
    if text == "-1" {
        return Ok(0);
    }
    text.parse().map_err(|_| "expected a whole number of at least 0 (0: never)")
}

/// A number of steps or batches, or all that the data set holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Count {
    /// The number that the data set holds.
    All,
    /// Exactly this many.
    Some(usize),
}

/// Parses a positive number, or -1 for all.
pub fn count_or_all(text: &str) -> Result<Count, String> {
    if text == "-1" {
        return Ok(Count::All);
    }
    count(text).map(Count::Some).map_err(|expected| expected + ", or -1 for all")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_outside_the_allowed_range_are_rejected() {
        for text in ["0", "-1", "1.5", "", "2147483648"] {
            assert_eq!(count(text).unwrap_err(), "expected a whole number from 1 to 2147483647", "{text}");
        }
        for text in ["-1", "nan", "inf", "-inf", "much", ""] {
            assert_eq!(non_negative(text), Err("expected a finite number of at least 0"), "{text}");
        }
        for text in ["-0.1", "1.1", "nan"] {
            assert!(fraction(text).is_err() && fraction_f32(text).is_err(), "{text}");
        }
        for text in ["-0.1", "1", "nan", "x"] {
            assert_eq!(momentum(text), Err("expected a number of at least 0 and below 1"), "{text}");
        }
        assert_eq!(
            ["0", "1", "auto", "required"].map(|text| resume(text).unwrap()),
            [Resume::No, Resume::Auto, Resume::Auto, Resume::Required]
        );
        assert!(resume("yes").is_err());
        assert_eq!((momentum("0"), momentum("0.95")), (Ok(0.0), Ok(0.95)));
        assert_eq!((zero_stage("3"), zero_stage("4").is_err()), (Ok(3), true));
    }

    #[test]
    fn minus_one_means_never_or_all() {
        assert_eq!((interval("-1"), interval("0"), interval("20")), (Ok(0), Ok(0), Ok(20)));
        assert!(interval("-2").is_err());
        assert_eq!((count_or_all("-1"), count_or_all("7")), (Ok(Count::All), Ok(Count::Some(7))));
        assert!(count_or_all("-2").unwrap_err().ends_with("or -1 for all"));
    }
}
