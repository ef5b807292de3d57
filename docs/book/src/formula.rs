//! Conversion of formulas for the HTML book: LaTeX becomes MathML, which browsers show without scripts.

use anyhow::{Result, anyhow, bail, ensure};
use pulldown_cmark::{CodeBlockKind, Event, Options, Parser, Tag};
use pulldown_latex::config::DisplayMode;
use pulldown_latex::{Parser as Latex, RenderConfig, Storage, push_mathml};

/// Converts the formulas of a chapter to MathML, and its links to files outside of the book by `address`.
///
/// # Errors
/// A formula is wrong, or GitHub would show it wrong.
pub fn convert(text: &str, address: impl Fn(&str) -> String) -> Result<String> {
    let mut out = String::with_capacity(2 * text.len());
    let mut end = 0;
    for (event, range) in Parser::new_ext(text, Options::ENABLE_MATH | Options::ENABLE_TABLES).into_offset_iter() {
        let replacement = match event {
            Event::InlineMath(latex) => {
                let quoted = latex.strip_prefix('`').and_then(|latex| latex.strip_suffix('`'));
                ensure!(
                    quoted.is_some() || is_plain(&latex),
                    "${latex}$: expected $`…`$, because GitHub reads a part of this formula as Markdown"
                );
                mathml(quoted.unwrap_or(&latex), DisplayMode::Inline)?
            }
            Event::DisplayMath(latex) => {
                bail!("$${latex}$$: expected a code block of the language math, because GitHub reads this as Markdown")
            }
            Event::Start(Tag::CodeBlock(CodeBlockKind::Fenced(language))) if &*language == "math" => {
                let lines: Vec<_> = text[range.clone()].lines().filter(|line| !line.starts_with("```")).collect();
                mathml(&lines.join("\n"), DisplayMode::Block)?
            }
            Event::Start(Tag::Link { dest_url, .. }) if dest_url.starts_with("../") => {
                text[range.clone()].replacen(&format!("({dest_url})"), &format!("({})", address(&dest_url)), 1)
            }
            _ => continue,
        };
        out += &text[end..range.start];
        out += &replacement;
        end = range.end;
    }
    Ok(out + &text[end..])
}

/// Returns true if Markdown leaves a formula as it is, also if a later formula could end an emphasis that begins in it.
fn is_plain(latex: &str) -> bool {
    let with_end = format!("{latex} a_{{");
    let parts: Vec<_> = Parser::new(&with_end)
        .filter_map(|event| match event {
            Event::Text(text) => Some(text.into_string()),
            _ => None,
        })
        .collect();
    parts.concat() == with_end
}

fn mathml(latex: &str, display_mode: DisplayMode) -> Result<String> {
    let storage = Storage::new();
    let events: Vec<_> = Latex::new(latex, &storage)
        .collect::<Result<_, _>>()
        .map_err(|error| anyhow!("{latex}: expected a formula in LaTeX, found: {error}"))?;
    let mut html = String::new();
    let config = RenderConfig { display_mode, ..RenderConfig::default() };
    push_mathml(&mut html, events.into_iter().map(Ok::<_, std::convert::Infallible>), config)?;
    // Markdown still parses the text between the tags.
    let escaped: String = html
        .chars()
        .map(|c| match c {
            '*' | '_' | '`' | '[' | ']' | '|' | '\\' | '~' => format!("&#{};", u32::from(c)),
            '\n' => " ".to_owned(),
            c => c.to_string(),
        })
        .collect();
    Ok(match display_mode {
        DisplayMode::Inline => escaped,
        DisplayMode::Block => format!("<div class=\"formula\">{escaped}</div>\n"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn converted(text: &str) -> Result<String> {
        convert(text, |link| format!("https://x/{}", link.trim_start_matches("../")))
    }

    #[test]
    fn formulas_become_mathml_outside_code() {
        let html = converted("a $|x_1|$ b `$c$`\n\n```\n$d$\n```\n").unwrap();
        assert!(html.starts_with("a <math") && html.contains("<msub>") && html.contains("&#124;"), "{html}");
        assert!(html.ends_with("</math> b `$c$`\n\n```\n$d$\n```\n"), "{html}");
        let html = converted("a $`b \\, c`$\n\n```math\nd \\,\ne\n```\n\nf").unwrap();
        assert!(html.starts_with("a <math") && html.contains("\n\n<div class=\"formula\"><math"), "{html}");
        assert!(html.ends_with("</math></div>\n\n\nf") && !html.contains("&#96;"), "{html}");
    }

    #[test]
    fn formulas_that_are_wrong_here_or_on_github_are_errors() {
        for (text, expected) in [
            ("$\\nothing{1}$", "\\nothing{1}: expected a formula in LaTeX"),
            ("$a \\, b$", "$a \\, b$: expected $`…`$"),
            ("$\\hat{x}_1$ and $y_{2}$", "$\\hat{x}_1$: expected $`…`$"),
            ("$$a$$", "$$a$$: expected a code block"),
        ] {
            let error = converted(text).unwrap_err().to_string();
            assert!(error.starts_with(expected), "{error}");
        }
    }

    #[test]
    fn links_out_of_the_book_become_addresses() {
        let html = converted("[a **b**](../../../gpu/lib.rs) [c](d.md)").unwrap();
        assert_eq!(html, "[a **b**](https://x/gpu/lib.rs) [c](d.md)");
    }
}
