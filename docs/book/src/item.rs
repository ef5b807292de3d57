//! Finds an item of a Rust file, so that the book shows it as it is compiled.

use anyhow::{Context, Result, ensure};
use syn::spanned::Spanned;
use syn::{ImplItem, Item, Type};

/// Returns the lines of an item with its documentation and attributes, and without common indentation.
///
/// `name` is that of a function, type, constant, trait or macro, `Type::method`, or `macro!` for its only use outside of functions.
pub fn find(source: &str, name: &str) -> Result<String> {
    let file = syn::parse_file(source).context("expected a Rust file")?;
    let mut spans = Vec::new();
    collect(&file.items, name, &mut spans);
    ensure!(!spans.is_empty(), "expected an item {name}, found none");
    ensure!(spans.len() == 1, "expected one item {name}, found {}", spans.len());
    let (first, last) = spans[0];
    let lines: Vec<_> = source.lines().skip(first - 1).take(last + 1 - first).collect();
    let indent = lines.iter().filter(|line| !line.trim().is_empty()).map(|line| line.len() - line.trim_start().len());
    let indent = indent.min().unwrap_or(0);
    Ok(lines.iter().map(|line| line.get(indent..).unwrap_or_default().to_owned() + "\n").collect())
}

/// Collects the first and last lines of the items with that name, also in modules except those of tests.
fn collect(items: &[Item], name: &str, spans: &mut Vec<(usize, usize)>) {
    let (of, method) = name.split_once("::").map_or((None, name), |(of, method)| (Some(of), method));
    let mut add = |node: &dyn Spanned| spans.push((node.span().start().line, node.span().end().line));
    for item in items {
        let ident = match item {
            Item::Const(item) => &item.ident,
            Item::Enum(item) => &item.ident,
            Item::Fn(item) => &item.sig.ident,
            Item::Macro(syn::ItemMacro { ident: Some(ident), .. }) => ident,
            Item::Static(item) => &item.ident,
            Item::Struct(item) => &item.ident,
            Item::Trait(item) => &item.ident,
            Item::Type(item) => &item.ident,
            Item::Macro(call) if name.strip_suffix('!').is_some_and(|name| call.mac.path.is_ident(name)) => {
                add(item);
                continue;
            }
            _ => continue,
        };
        if of.is_none() && ident == name {
            add(item);
        }
    }
    for item in items {
        match item {
            Item::Mod(module) if module.ident != "tests" => {
                if let Some((_, items)) = &module.content {
                    collect(items, name, spans);
                }
            }
            Item::Impl(block) if of.is_some_and(|of| is_named(&block.self_ty, of)) => {
                for item in &block.items {
                    if let ImplItem::Fn(function) = item
                        && function.sig.ident == method
                    {
                        spans.push((function.span().start().line, function.span().end().line));
                    }
                }
            }
            _ => {}
        }
    }
}

fn is_named(of: &Type, name: &str) -> bool {
    matches!(of, Type::Path(path) if path.path.segments.last().is_some_and(|segment| segment.ident == name))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: &str = "//! A file.\n\n/// Adds.\n#[inline]\nfn add() {\n    1;\n}\n\nstruct A<T>(T);\n\nimpl<T> A<T> {\n    /// Gets.\n    fn get(&self) {\n        2;\n    }\n}\n";

    #[test]
    fn items_have_their_documentation_and_attributes() {
        assert_eq!(find(SOURCE, "add").unwrap(), "/// Adds.\n#[inline]\nfn add() {\n    1;\n}\n");
    }

    #[test]
    fn methods_lose_their_indentation() {
        assert_eq!(find(SOURCE, "A::get").unwrap(), "/// Gets.\nfn get(&self) {\n    2;\n}\n");
    }

    #[test]
    fn a_missing_item_is_an_error() {
        assert_eq!(find(SOURCE, "get").unwrap_err().to_string(), "expected an item get, found none");
    }
}
