//! The date for `strftime_now` of chat templates, in UTC.

use chrono::{DateTime, Utc};
use std::fmt::Write;

/// Returns the time by the format of C's `strftime`. `None` if the format has a directive that does not exist.
pub fn now(format: &str) -> Option<String> {
    formatted(format, Utc::now())
}

fn formatted(format: &str, time: DateTime<Utc>) -> Option<String> {
    let mut text = String::new();
    write!(text, "{}", time.format(format)).ok()?;
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_are_those_of_strftime() {
        let all = "%Y-%m-%d %H:%M:%S %A %a %B %b %y %j %I %p %-d %-m %e %F %T %%";
        for (time, expected) in [
            (0, "1970-01-01 00:00:00 Thursday Thu January Jan 70 001 12 AM 1 1  1 1970-01-01 00:00:00 %"),
            (951_782_400, "2000-02-29 00:00:00 Tuesday Tue February Feb 00 060 12 AM 29 2 29 2000-02-29 00:00:00 %"),
            (1_735_660_799, "2024-12-31 15:59:59 Tuesday Tue December Dec 24 366 03 PM 31 12 31 2024-12-31 15:59:59 %"),
        ] {
            assert_eq!(formatted(all, DateTime::from_timestamp(time, 0).unwrap()).unwrap(), expected);
        }
        assert_eq!(now("%Q"), None);
        assert_eq!(now("%"), None);
        assert_eq!(now("%Y").unwrap().len(), 4);
    }
}
