//! The date for `strftime_now` of chat templates, in UTC.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const WEEKDAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

/// Returns the time by the format of C's `strftime`. `None` if the format has a directive that is not implemented.
pub fn now(format: &str) -> Option<String> {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
    formatted(format, since.as_secs())
}

/// Returns a Unix time in seconds by the format of C's `strftime`. `%-d` is a number without zeros before it, as in glibc.
fn formatted(format: &str, time: u64) -> Option<String> {
    let (days, seconds) = (time / 86_400, time % 86_400);
    let (year, month, day, day_of_year) = civil(days);
    let (hour, minute, second) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    let (month_name, weekday) = (MONTHS[month as usize - 1], WEEKDAYS[((days + 4) % 7) as usize]);
    let mut text = String::new();
    let mut characters = format.chars();
    while let Some(character) = characters.next() {
        if character != '%' {
            text.push(character);
            continue;
        }
        let mut directive = characters.next()?;
        let padded = directive != '-';
        if !padded {
            directive = characters.next()?;
        }
        let number = |value: u64, width: usize| if padded { format!("{value:0width$}") } else { value.to_string() };
        text += &match directive {
            'Y' => year.to_string(),
            'y' => number(year % 100, 2),
            'm' => number(month, 2),
            'd' => number(day, 2),
            'e' => format!("{day:2}"),
            'j' => number(day_of_year, 3),
            'H' => number(hour, 2),
            'I' => number((hour + 11) % 12 + 1, 2),
            'M' => number(minute, 2),
            'S' => number(second, 2),
            'p' => if hour < 12 { "AM" } else { "PM" }.to_owned(),
            'B' => month_name.to_owned(),
            'b' | 'h' => month_name[..3].to_owned(),
            'A' => weekday.to_owned(),
            'a' => weekday[..3].to_owned(),
            'F' => formatted("%Y-%m-%d", time)?,
            'T' => formatted("%H:%M:%S", time)?,
            '%' => "%".to_owned(),
            _ => return None,
        };
    }
    Some(text)
}

/// Returns year, month, day and day of the year, from 1, of a number of days since 1970.
fn civil(mut days: u64) -> (u64, u64, u64, u64) {
    let is_leap = |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let mut year = 1970;
    while days >= 365 + u64::from(is_leap(year)) {
        days -= 365 + u64::from(is_leap(year));
        year += 1;
    }
    let day_of_year = days + 1;
    let february = 28 + u64::from(is_leap(year));
    let mut month = 1;
    for length in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31] {
        if days < length {
            break;
        }
        days -= length;
        month += 1;
    }
    (year, month, days + 1, day_of_year)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_strftime() {
        let all = "%Y-%m-%d %H:%M:%S %A %a %B %b %y %j %I %p %-d %-m %e %F %T %%";
        for (time, expected) in [
            (0, "1970-01-01 00:00:00 Thursday Thu January Jan 70 001 12 AM 1 1  1 1970-01-01 00:00:00 %"),
            (951_782_400, "2000-02-29 00:00:00 Tuesday Tue February Feb 00 060 12 AM 29 2 29 2000-02-29 00:00:00 %"),
            (1_735_660_799, "2024-12-31 15:59:59 Tuesday Tue December Dec 24 366 03 PM 31 12 31 2024-12-31 15:59:59 %"),
            (4_107_542_400, "2100-03-01 00:00:00 Monday Mon March Mar 00 060 12 AM 1 3  1 2100-03-01 00:00:00 %"),
        ] {
            assert_eq!(formatted(all, time).unwrap(), expected);
        }
        assert_eq!(formatted("%Q", 0), None);
        assert_eq!(formatted("%", 0), None);
        assert!(now("%Y").unwrap() >= "2024".to_owned());
    }
}
