//! Parameters of `#[kernel(checked)]`: scalars, and views that know their length.
//!
//! A view is two parameters of the entry point, a pointer and a length: LLVM infers the global address space only for pointers that are
//! parameters of their own.

use proc_macro2::{Ident, Span, TokenStream};
use quote::{ToTokens, format_ident, quote, quote_spanned};
use syn::spanned::Spanned;
use syn::{FnArg, GenericArgument, ItemFn, Lifetime, Pat, PatType, PathArguments, Type};

/// One parameter of a checked kernel.
pub struct Parameter {
    name: Ident,
    /// The type on the host, with the lifetime `'launch`.
    host: Type,
    view: Option<View>,
    declared: Type,
    /// Whether the parameter is declared `mut`.
    is_mutable: bool,
}

struct View {
    /// `GlobalSlice` or `GlobalSliceMut`.
    slice: Ident,
    /// `Global` or `GlobalMut`.
    pointer: Ident,
    element: TokenStream,
}

impl Parameter {
    /// Returns the parameters of a kernel, whose names were checked before.
    pub fn of(function: &ItemFn, names: &[Ident]) -> Vec<Self> {
        let typed = function.sig.inputs.iter().filter_map(|input| match input {
            FnArg::Typed(typed) => Some(typed),
            FnArg::Receiver(_) => None,
        });
        names.iter().cloned().zip(typed).map(|(name, typed)| Self::new(name, typed)).collect()
    }

    fn new(name: Ident, typed: &PatType) -> Self {
        let declared = (*typed.ty).clone();
        let mut host = declared.clone();
        let view = view_of(&mut host);
        let is_mutable = matches!(&*typed.pat, Pat::Ident(pattern) if pattern.mutability.is_some());
        Self { name, host, view, declared, is_mutable }
    }

    /// Returns the declared type if it is a view that knows its length.
    pub fn view(&self) -> Option<&Type> {
        self.view.as_ref().map(|_| &self.declared)
    }

    /// Returns the parameter of the host function.
    pub fn on_host(&self) -> TokenStream {
        let Self { name, host, .. } = self;
        quote!(#name: #host)
    }

    /// Returns the statement that adds the argument to `arguments` and keeps its value for the emulator.
    pub fn push(&self) -> TokenStream {
        let name = &self.name;
        let method = format_ident!("{}", if self.view.is_some() { "view" } else { "scalar" });
        quote!(let #name = arguments.#method(#name);)
    }

    /// Returns the parameters of the entry point.
    pub fn on_device(&self) -> TokenStream {
        let name = &self.name;
        if let Some(View { pointer, element, .. }) = &self.view {
            let length = format_ident!("{name}_length");
            quote!(#name: ::cuda_std::#pointer<#element>, #length: u64)
        } else {
            let declared = &self.declared;
            quote!(#name: #declared)
        }
    }

    /// Returns the statement that builds the view from the parameters of the entry point, or checks that a scalar is one. `is_body` states
    /// whether the body of the kernel follows, in which the parameter may be mutable.
    pub fn build(&self, is_body: bool) -> TokenStream {
        let (name, declared) = (&self.name, &self.declared);
        let mutable = (is_body && self.is_mutable).then(|| quote!(mut));
        if let Some(View { slice, element, .. }) = &self.view {
            let length = format_ident!("{name}_length");
            // SAFETY: the launch passes the start and the length of one range.
            quote!(let #mutable #name: #declared = unsafe { ::cuda_std::#slice::<#element>::from_parts(#name, #length) };)
        } else {
            // The check is a function of `cuda_std`: an instance would replace the name of a generic parameter here.
            let rebound = mutable.map(|mutable| quote!(let #mutable #name = #name;));
            quote_spanned! {declared.span()=>
                const _: fn(#declared) = ::cuda_std::check_scalar;
                #rebound
            }
        }
    }
}

/// Returns the view that a type names, and gives the type the lifetime `'launch`.
fn view_of(host: &mut Type) -> Option<View> {
    let Type::Path(path) = host else { return None };
    let last = path.path.segments.last_mut()?;
    let pointer = match last.ident.to_string().as_str() {
        "GlobalSlice" => "Global",
        "GlobalSliceMut" => "GlobalMut",
        _ => return None,
    };
    let PathArguments::AngleBracketed(arguments) = &mut last.arguments else { return None };
    let element =
        arguments.args.iter().find(|argument| matches!(argument, GenericArgument::Type(_)))?.to_token_stream();
    let lifetimes = arguments.args.iter().filter(|argument| matches!(argument, GenericArgument::Lifetime(_))).count();
    let launch = GenericArgument::Lifetime(Lifetime::new("'launch", Span::call_site()));
    match lifetimes {
        0 => arguments.args.insert(0, launch),
        _ => arguments.args[0] = launch,
    }
    Some(View { slice: last.ident.clone(), pointer: format_ident!("{pointer}"), element })
}

/// Returns a hash of a kernel's declaration and body, which are the same on the host and on the device if both were compiled from one
/// source. White space does not count: the compilers may print tokens differently.
pub fn signature(attribute: &TokenStream, function: &ItemFn) -> u64 {
    let text = [attribute, &function.sig.to_token_stream(), &function.block.to_token_stream()]
        .map(ToString::to_string)
        .concat();
    // FNV-1a.
    let bytes = text.bytes().filter(|byte| !byte.is_ascii_whitespace());
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}
