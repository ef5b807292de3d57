//! `#[device]`, which makes the functions of a block device functions.

use proc_macro2::TokenStream;
use quote::ToTokens;
use syn::{Attribute, Error, ImplItem, Item, TraitItem, parse_quote};

/// Adds `#[inline(always)]` to each function with a body of an `impl` block or a trait, unless it has an attribute `inline`.
pub fn expand(attribute: &TokenStream, item: TokenStream) -> syn::Result<TokenStream> {
    if !attribute.is_empty() {
        return Err(Error::new_spanned(attribute, "#[device] takes no arguments: remove them"));
    }
    let mut item = syn::parse2(item)?;
    match &mut item {
        Item::Impl(block) => block.items.iter_mut().for_each(|item| {
            if let ImplItem::Fn(function) = item {
                inline(&mut function.attrs);
            }
        }),
        Item::Trait(block) => block.items.iter_mut().for_each(|item| match item {
            TraitItem::Fn(function) if function.default.is_some() => inline(&mut function.attrs),
            _ => {}
        }),
        other => return Err(Error::new_spanned(other, "#[device]: expected an `impl` block or a trait")),
    }
    Ok(item.into_token_stream())
}

fn inline(attributes: &mut Vec<Attribute>) {
    if !attributes.iter().any(|attribute| attribute.path().is_ident("inline")) {
        attributes.push(parse_quote!(#[inline(always)]));
    }
}

#[cfg(test)]
mod tests {
    use super::expand;
    use quote::quote;

    #[test]
    fn functions_with_bodies_are_inlined() {
        let block = quote!(impl A { const N: u32 = 1; fn f() {} #[inline] fn g() {} });
        let expected = quote!(impl A { const N: u32 = 1; #[inline(always)] fn f() {} #[inline] fn g() {} });
        assert_eq!(expand(&quote!(), block).unwrap().to_string(), expected.to_string());
        let block = quote!(
            trait A {
                fn f();
                fn g() {}
            }
        );
        let expected = quote!(
            trait A {
                fn f();
                #[inline(always)]
                fn g() {}
            }
        );
        assert_eq!(expand(&quote!(), block).unwrap().to_string(), expected.to_string());
    }

    #[test]
    fn other_items_are_refused() {
        assert!(
            expand(
                &quote!(),
                quote!(
                    fn f() {}
                )
            )
            .is_err()
        );
        assert!(expand(&quote!(always), quote!(impl A {})).is_err());
    }
}
