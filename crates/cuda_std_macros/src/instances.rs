//! The instances of a generic kernel: `axes(…)`, `instances(…)` and `select(…)` of `#[kernel]`.
//!
//! An entry of `instances` is a Cartesian product of lists. Each of its instances has one alternative from every list. The generic
//! arguments and the parts of the name are in the order of the lists:
//!
//! ```text
//! axes(tile = [small = Tile64, large = Tile128]),
//! instances([bf16 = bf16, f32 = f32] * tile, half = <f16, Tile64>)
//! ```

use proc_macro2::{Group, TokenStream, TokenTree};
use quote::{ToTokens, format_ident};
use syn::parse::{Parse, ParseStream};
use syn::punctuated::Punctuated;
use syn::{
    AngleBracketedGenericArguments, Error, Expr, GenericArgument, GenericParam, Generics, Ident, LitInt, Token, Type,
    token,
};

/// One instance of a kernel.
#[derive(Clone)]
pub struct Instance {
    /// The part of the entry point's name after that of the kernel. `None` if it is empty.
    suffix: Option<Ident>,
    /// The generic arguments.
    pub arguments: Vec<GenericArgument>,
    pub blocks_per_sm: Option<u32>,
}

/// The alternatives of one list in a product, each a part of an instance.
pub type Alternatives = Vec<Instance>;

impl Parse for Instance {
    fn parse(input: ParseStream) -> syn::Result<Self> {
        let suffix = if input.peek(Token![_]) {
            input.parse::<Token![_]>()?;
            None
        } else {
            Some(input.parse::<Ident>()?)
        };
        input.parse::<Token![=]>()?;
        let arguments = if input.peek(Token![<]) {
            input.parse::<AngleBracketedGenericArguments>()?.args.into_iter().collect()
        } else {
            vec![input.parse()?]
        };
        let mut blocks_per_sm = None;
        if input.peek(token::Paren) {
            let content;
            syn::parenthesized!(content in input);
            let key: Ident = content.parse()?;
            if key != "blocks_per_sm" {
                return Err(Error::new(key.span(), format!("instance option: expected blocks_per_sm, found `{key}`")));
            }
            content.parse::<Token![=]>()?;
            blocks_per_sm = Some(content.parse::<LitInt>()?.base10_parse()?);
        }
        Ok(Self { suffix, arguments, blocks_per_sm })
    }
}

impl Instance {
    /// Returns the name of the entry point.
    pub fn entry(&self, kernel: &Ident) -> Ident {
        self.suffix.as_ref().map_or_else(|| kernel.clone(), |suffix| format_ident!("{kernel}_{suffix}"))
    }

    /// Returns the generic arguments in angle brackets.
    pub fn generics(&self) -> TokenStream {
        let arguments = &self.arguments;
        quote::quote!(<#(#arguments),*>)
    }

    /// Appends a part.
    fn with(mut self, part: &Self) -> Self {
        self.suffix = match (self.suffix, &part.suffix) {
            (Some(first), Some(second)) => Some(format_ident!("{first}_{second}")),
            (first, second) => first.or_else(|| second.clone()),
        };
        self.arguments.extend(part.arguments.iter().cloned());
        self.blocks_per_sm = part.blocks_per_sm.or(self.blocks_per_sm);
        self
    }

    /// Returns the tokens that replace each generic parameter in this instance.
    pub fn bindings(&self, generics: &Generics) -> syn::Result<Vec<(Ident, TokenStream)>> {
        let parameters = generics.params.iter().map(parameter).collect::<syn::Result<Vec<_>>>()?;
        if parameters.len() != self.arguments.len() {
            let message =
                format!("instance: expected {} generic arguments, found {}", parameters.len(), self.arguments.len());
            return Err(Error::new_spanned(self.generics(), message));
        }
        Ok(parameters.into_iter().zip(self.arguments.iter().map(ToTokens::to_token_stream)).collect())
    }
}

/// Returns the name of a type or const parameter.
pub fn parameter(parameter: &GenericParam) -> syn::Result<Ident> {
    match parameter {
        GenericParam::Type(parameter) => Ok(parameter.ident.clone()),
        GenericParam::Const(parameter) => Ok(parameter.ident.clone()),
        GenericParam::Lifetime(lifetime) => {
            Err(Error::new_spanned(lifetime, "a kernel must not have lifetime parameters"))
        }
    }
}

/// Parses the contents of `axes(…)`: named lists of alternatives.
pub fn parse_axes(input: ParseStream) -> syn::Result<Vec<(Ident, Alternatives)>> {
    let axis = |input: ParseStream| {
        let name = input.parse::<Ident>()?;
        input.parse::<Token![=]>()?;
        Ok((name, parse_alternatives(input)?))
    };
    Ok(Punctuated::<_, Token![,]>::parse_terminated_with(input, axis)?.into_iter().collect())
}

/// Parses the contents of `instances(…)`.
pub fn parse_instances(input: ParseStream, axes: &[(Ident, Alternatives)]) -> syn::Result<Vec<Instance>> {
    let mut all = Vec::new();
    while !input.is_empty() {
        let mut instances = parse_factor(input, axes)?;
        while input.peek(Token![*]) {
            input.parse::<Token![*]>()?;
            let factor = parse_factor(input, axes)?;
            let with_each = |instance: Instance| factor.iter().map(move |part| instance.clone().with(part));
            instances = instances.into_iter().flat_map(with_each).collect();
        }
        all.append(&mut instances);
        if !input.is_empty() {
            input.parse::<Token![,]>()?;
        }
    }
    Ok(all)
}

/// Parses a list of alternatives, the name of an axis, or a single alternative.
fn parse_factor(input: ParseStream, axes: &[(Ident, Alternatives)]) -> syn::Result<Alternatives> {
    if input.peek(token::Bracket) {
        return parse_alternatives(input);
    }
    if input.peek2(Token![=]) {
        return Ok(vec![input.parse()?]);
    }
    let name: Ident = input.parse()?;
    let axis = axes.iter().find(|(axis, _)| *axis == name);
    axis.map(|(_, alternatives)| alternatives.clone()).ok_or_else(|| {
        let message = format!("instances: expected an axis, found `{name}`; add it to axes(…) before instances(…)");
        Error::new(name.span(), message)
    })
}

fn parse_alternatives(input: ParseStream) -> syn::Result<Alternatives> {
    let content;
    syn::bracketed!(content in input);
    Ok(Punctuated::<Instance, Token![,]>::parse_terminated(&content)?.into_iter().collect())
}

/// The contents of `select(…)`: constants by which the host selects an instance at run time, and constants of the selected instance
/// that the host reads.
#[derive(Default)]
pub struct Selection {
    pub keys: Vec<Constant>,
    pub values: Vec<Constant>,
}

/// A constant expression of generic parameters.
pub struct Constant {
    pub value: Expr,
    pub of: Type,
}

impl Parse for Constant {
    fn parse(input: ParseStream) -> syn::Result<Self> {
        let value = input.parse()?;
        input.parse::<Token![:]>()?;
        Ok(Self { value, of: input.parse()? })
    }
}

impl Parse for Selection {
    fn parse(input: ParseStream) -> syn::Result<Self> {
        let (mut selection, mut is_value) = (Self::default(), false);
        while !input.is_empty() {
            let constants = if is_value { &mut selection.values } else { &mut selection.keys };
            constants.push(input.parse()?);
            if input.peek(Token![=>]) && !is_value {
                input.parse::<Token![=>]>()?;
                is_value = true;
            } else if !input.is_empty() {
                input.parse::<Token![,]>()?;
            }
        }
        Ok(selection)
    }
}

impl Constant {
    /// Returns whether the value depends on a generic parameter.
    pub fn depends_on(&self, parameter: &Ident) -> bool {
        contains(self.value.to_token_stream(), parameter)
    }

    /// Returns the value in one instance.
    pub fn of(&self, instance: &Instance, bindings: &[(Ident, TokenStream)]) -> TokenStream {
        let is_type = |name: &Ident| {
            let bound = bindings.iter().position(|(other, _)| other == name);
            bound.is_some_and(|i| matches!(instance.arguments[i], GenericArgument::Type(_)))
        };
        substitute(qualified(self.value.to_token_stream(), &is_type), bindings)
    }
}

fn contains(tokens: TokenStream, name: &Ident) -> bool {
    tokens.into_iter().any(|token| match token {
        TokenTree::Ident(ident) => ident == *name,
        TokenTree::Group(group) => contains(group.stream(), name),
        _ => false,
    })
}

/// Puts types before `::` in angle brackets, which an expression needs if the type has generic arguments.
fn qualified(tokens: TokenStream, is_type: &impl Fn(&Ident) -> bool) -> TokenStream {
    let mut tokens = tokens.into_iter().peekable();
    let mut result = TokenStream::new();
    while let Some(token) = tokens.next() {
        match token {
            TokenTree::Ident(ident)
                if is_type(&ident)
                    && matches!(tokens.peek(), Some(TokenTree::Punct(next)) if next.as_char() == ':') =>
            {
                result.extend(quote::quote!(<#ident>));
            }
            TokenTree::Group(group) => {
                result.extend([Group::new(group.delimiter(), qualified(group.stream(), is_type))].map(TokenTree::from));
            }
            other => result.extend([other]),
        }
    }
    result
}

/// Replaces identifiers by the tokens bound to them.
pub fn substitute(tokens: TokenStream, bindings: &[(Ident, TokenStream)]) -> TokenStream {
    tokens
        .into_iter()
        .flat_map(|token| match token {
            TokenTree::Ident(ident) => match bindings.iter().find(|(name, _)| *name == ident) {
                Some((_, replacement)) => replacement.clone(),
                None => ident.into_token_stream(),
            },
            TokenTree::Group(group) => {
                Group::new(group.delimiter(), substitute(group.stream(), bindings)).into_token_stream()
            }
            other => other.into_token_stream(),
        })
        .collect()
}
