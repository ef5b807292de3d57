//! Formulas and links to source files: LaTeX becomes MathML, which browsers show without scripts.

use crate::directive::Sources;
use anyhow::{Result, anyhow};
use pulldown_cmark::{Event, Options, Parser, Tag};
use pulldown_latex::config::DisplayMode;
use pulldown_latex::{Parser as Latex, RenderConfig, Storage, push_mathml};

/// Converts `$…$` and `$$…$$` to MathML, and `repo:` links to addresses.
pub fn convert(text: &str, sources: &Sources) -> Result<String> {
    let mut out = String::with_capacity(2 * text.len());
    let mut end = 0;
    for (event, range) in Parser::new_ext(text, Options::ENABLE_MATH | Options::ENABLE_TABLES).into_offset_iter() {
        let replacement = match event {
            Event::InlineMath(latex) => mathml(&latex, DisplayMode::Inline)?,
            Event::DisplayMath(latex) => mathml(&latex, DisplayMode::Block)?,
            Event::Start(Tag::Link { dest_url, .. }) => {
                let Some(path) = dest_url.strip_prefix("repo:") else { continue };
                text[range.clone()].replacen(&format!("(repo:{path})"), &format!("({})", sources.address(path)?), 1)
            }
            _ => continue,
        };
        out += &text[end..range.start];
        out += &replacement;
        end = range.end;
    }
    Ok(out + &text[end..])
}

fn mathml(latex: &str, display_mode: DisplayMode) -> Result<String> {
    let storage = Storage::new();
    let events: Vec<_> = Latex::new(latex, &storage)
        .collect::<Result<_, _>>()
        .map_err(|error| anyhow!("${latex}$: expected a formula in LaTeX, found: {error}"))?;
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
        DisplayMode::Block => format!("<div class=\"formula\">{escaped}</div>"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn converted(text: &str) -> Result<String> {
        convert(text, &Sources::new(crate::build::repository_root().unwrap(), "https://x".into()))
    }

    #[test]
    fn formulas_become_mathml_outside_code() {
        let html = converted("a $|x_1|$ b `$c$`\n\n```\n$d$\n```\n").unwrap();
        assert!(html.starts_with("a <math") && html.contains("<msub>") && html.contains("&#124;"), "{html}");
        assert!(html.ends_with("</math> b `$c$`\n\n```\n$d$\n```\n"), "{html}");
    }

    #[test]
    fn a_wrong_formula_is_an_error() {
        assert!(converted("$\\nothing{1}$").unwrap_err().to_string().starts_with("$\\nothing{1}$: expected"));
    }

    #[test]
    fn links_to_sources_become_addresses() {
        assert_eq!(converted("[a **b**](repo:gpu/src/lib.rs) c").unwrap(), "[a **b**](https://x/gpu/src/lib.rs) c");
        let error = converted("[a](repo:gpu/src/nothing.rs)").unwrap_err().to_string();
        assert!(error.starts_with("repo:gpu/src/nothing.rs: expected"), "{error}");
        let error = format!("{:#}", converted("[a](repo:docs/testing.md#nothing)").unwrap_err());
        assert!(error.contains("expected a heading #nothing"), "{error}");
    }
}
