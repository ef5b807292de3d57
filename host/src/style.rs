//! Colors of terminal output.

use std::env;
use std::io::IsTerminal;

/// The meaning of a colored text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tone {
    /// Everything is as required: green.
    Good,
    /// Something deserves attention: yellow.
    Warning,
    /// Something has failed or is missing: red.
    Bad,
}

/// Returns whether texts for `output` are colored: it is a terminal that supports colors, and `NO_COLOR` is not set.
pub fn is_colored(output: &impl IsTerminal) -> bool {
    output.is_terminal() && allows_colors(env::var("NO_COLOR").ok().as_deref(), env::var("TERM").ok().as_deref())
}

/// Applies <https://no-color.org>: any value of `NO_COLOR` that is not empty turns colors off.
fn allows_colors(no_color: Option<&str>, term: Option<&str>) -> bool {
    no_color.is_none_or(str::is_empty) && term != Some("dumb")
}

/// Colors a text if `colored` is set.
pub fn paint(text: &str, tone: Tone, colored: bool) -> String {
    let code = match tone {
        Tone::Good => 32,
        Tone::Warning => 33,
        Tone::Bad => 31,
    };
    if colored { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_color_and_dumb_terminals_turn_colors_off() {
        assert!(allows_colors(None, Some("xterm")) && allows_colors(Some(""), None));
        assert!(!allows_colors(Some("1"), Some("xterm")) && !allows_colors(None, Some("dumb")));
        assert_eq!(paint("ok", Tone::Good, false), "ok");
        assert_eq!(paint("ok", Tone::Good, true), "\x1b[32mok\x1b[0m");
    }
}
