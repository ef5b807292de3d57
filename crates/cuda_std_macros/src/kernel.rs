//! Expansion of `#[kernel]`.

use proc_macro2::{Span, TokenStream, TokenTree};
use quote::{ToTokens, format_ident, quote};
use syn::ext::IdentExt;
use syn::parse::{Parse, ParseStream};
use syn::punctuated::Punctuated;
use syn::{
    Attribute, Error, Expr, FnArg, GenericParam, Generics, Ident, ItemFn, LitInt, LitStr, Meta, Pat, Signature, Token,
    Type,
};

use crate::checked::{Parameter, signature};
use crate::instances::{
    Alternatives, Constant, Instance, Selection, parameter, parse_axes, parse_instances, substitute,
};

/// Set by `CudaBuilder::allow_unchecked` when it compiles a device crate. Its flags change then, too, so that cargo expands again.
const UNCHECKED_VARIABLE: &str = "CUDA_BUILDER_UNCHECKED";

/// Prefix of the names of the functions that tell `cuda_builder` the shared memory of a kernel. The crate has it too.
const SHARED_BYTES: &str = "__cuda_shared_bytes_";

/// Arguments of `#[kernel(…)]`.
#[derive(Default)]
struct KernelAttributes {
    threads: Option<[u32; 3]>,
    blocks_per_sm: Option<u32>,
    arch: Option<String>,
    requires: Option<String>,
    axes: Vec<(Ident, Alternatives)>,
    instances: Vec<Instance>,
    /// The constants by which the host selects an instance at run time.
    select: Selection,
    /// The function that defines the layout of shared memory.
    shared: Option<Expr>,
    /// The signature of a checked kernel.
    checked: Option<u64>,
}

/// The block size: `256`, `(16, 16)` or `(8, 8, 4)`.
struct Threads([u32; 3]);

impl Parse for Threads {
    fn parse(input: ParseStream) -> syn::Result<Self> {
        if !input.peek(syn::token::Paren) {
            let number: LitInt = input.parse().map_err(|error| {
                let message = "block size: expected a number, (X, Y) or (X, Y, Z), found another expression; write literals, which a \
                               constant of the crate can repeat";
                Error::new(error.span(), message)
            })?;
            return Self::checked([number.base10_parse()?, 1, 1], number.span());
        }
        let content;
        let span = syn::parenthesized!(content in input).span.join();
        let numbers = Punctuated::<LitInt, Token![,]>::parse_terminated(&content)?;
        let mut extent = [1; 3];
        if !(1..=3).contains(&numbers.len()) {
            return Err(Error::new(span, "block size: expected one to three extents"));
        }
        for (extent, number) in extent.iter_mut().zip(&numbers) {
            *extent = number.base10_parse()?;
        }
        Self::checked(extent, span)
    }
}

impl Threads {
    /// Returns the block size if GPUs support it.
    fn checked(extent: [u32; 3], span: Span) -> syn::Result<Self> {
        let threads: u64 = extent.iter().map(|&extent| u64::from(extent)).fold(1, u64::saturating_mul);
        if !(1..=1024).contains(&threads) {
            let message = format!(
                "block size: expected 1 to 1024 threads, found {threads}; use another size and number of blocks"
            );
            return Err(Error::new(span, message));
        }
        if extent[2] > 64 {
            let found = extent[2];
            return Err(Error::new(
                span,
                format!("block size: expected at most 64 threads in z, found {found}; use x or y"),
            ));
        }
        Ok(Self(extent))
    }
}

impl Parse for KernelAttributes {
    fn parse(input: ParseStream) -> syn::Result<Self> {
        let mut options = Self::default();
        let mut seen: Vec<Ident> = Vec::new();
        while !input.is_empty() {
            let key: Ident = input.parse()?;
            if seen.contains(&key) {
                return Err(Error::new(
                    key.span(),
                    format!("kernel option: expected `{key}` once, found it again; remove one"),
                ));
            }
            seen.push(key.clone());
            if key == "instances" || key == "axes" || key == "select" {
                let content;
                syn::parenthesized!(content in input);
                if key == "axes" {
                    options.axes = parse_axes(&content)?;
                } else if key == "instances" {
                    options.instances = parse_instances(&content, &options.axes)?;
                } else {
                    options.select = content.parse()?;
                }
            } else if key == "checked" {
                options.checked = Some(0);
            } else {
                input.parse::<Token![=]>()?;
                if key == "arch" {
                    options.arch = Some(input.parse::<LitStr>()?.value());
                } else if key == "requires" {
                    options.requires = Some(input.parse::<LitStr>()?.value());
                } else if key == "shared" {
                    options.shared = Some(input.parse::<Expr>()?);
                } else if key == "threads" {
                    options.threads = Some(input.parse::<Threads>()?.0);
                } else if key == "blocks_per_sm" {
                    options.blocks_per_sm = Some(input.parse::<LitInt>()?.base10_parse()?);
                } else {
                    let known = "threads, blocks_per_sm, shared, checked, requires, arch, axes, instances or select";
                    return Err(Error::new(key.span(), format!("kernel option: expected {known}, found `{key}`")));
                }
            }
            if !input.is_empty() {
                input.parse::<Token![,]>()?;
            }
        }
        Ok(options)
    }
}

/// Expands `#[kernel(attribute)] item`.
pub fn expand(attribute: &TokenStream, item: TokenStream) -> syn::Result<TokenStream> {
    let mut options: KernelAttributes = syn::parse2(attribute.clone())?;
    let function: ItemFn = syn::parse2(item)?;
    options.checked = options.checked.map(|_| signature(attribute, &function));
    let signature = &function.sig;
    let name = &signature.ident;
    let threads = options
        .threads
        .ok_or_else(|| Error::new(name.span(), "missing block size: add threads = N to #[kernel(…)]"))?;
    check_signature(signature)?;
    let generic = !signature.generics.params.is_empty();
    if generic == options.instances.is_empty() {
        let message = if generic {
            "missing instances: add instances(…) to the #[kernel(…)] of a generic function"
        } else {
            "instances(…) requires a generic function: remove it or add generic parameters"
        };
        return Err(Error::new(name.span(), message));
    }
    let arguments = argument_names(&function)?;
    if let (None, Some(view)) = (options.checked, Parameter::of(&function, &arguments).iter().find_map(Parameter::view))
    {
        let message =
            "expected Global or GlobalMut, found a view that only checked kernels have; add `checked` to #[kernel(…)]";
        return Err(Error::new_spanned(view, message));
    }
    let arch = options.arch.as_ref().map(|arch| quote!(#[cfg(any(not(target_arch = "nvptx64"), cuda_arch = #arch))]));
    let feature = options.requires.as_ref();
    let feature = feature.map(|feature| quote!(#[cfg(any(not(target_arch = "nvptx64"), cuda_feature = #feature))]));
    let arch = arch.is_some().then_some(&arch).into_iter().flatten().chain(&feature);
    let arch = Some(arch.cloned().chain([attributes(&function, &["cfg"])]).collect::<TokenStream>());

    let entries = if generic {
        let entry = |i: &Instance| device_entry(&function, &options, arch.as_ref(), threads, &i.entry(name), Some(i));
        options.instances.iter().map(entry).collect::<syn::Result<Vec<_>>>()?
    } else {
        vec![device_entry(&function, &options, arch.as_ref(), threads, &signature.ident, None)?]
    };
    let generic_body = generic.then(|| {
        let (vis, block) = (&function.vis, &function.block);
        let lints = device_lints(&function);
        quote! {
            #[cfg(target_arch = "nvptx64")]
            #lints
            #[inline(always)]
            #vis #signature #block
        }
    });
    let host = host_launch(&function, &options, threads, &arguments);
    let shared = generic.then(|| shared_items(&function, &options, &arguments));
    let select = if options.select.keys.is_empty() {
        None
    } else if generic && options.checked.is_none() {
        Some(select_items(&function, &options, threads, &arguments)?)
    } else {
        return Err(Error::new(name.span(), "select(…) requires a generic kernel that is not checked: remove it"));
    };
    Ok(quote! {
        #arch #generic_body
        #(#entries)*
        #arch #host
        #shared
        #select
    })
}

/// Returns an error for a signature that a kernel cannot have.
fn check_signature(signature: &Signature) -> syn::Result<()> {
    if !matches!(signature.output, syn::ReturnType::Default) {
        return Err(Error::new_spanned(&signature.output, "a kernel must not return a value: remove the return type"));
    }
    let (Signature { constness, asyncness, safety, abi, .. }, mut qualifiers) = (signature, TokenStream::new());
    constness.to_tokens(&mut qualifiers);
    asyncness.to_tokens(&mut qualifiers);
    safety.to_tokens(&mut qualifiers);
    abi.to_tokens(&mut qualifiers);
    if !qualifiers.is_empty() {
        let message = format!("a kernel must be a plain function: remove `{qualifiers}`");
        return Err(Error::new_spanned(qualifiers, message));
    }
    if let Some(lifetime) = signature.generics.lifetimes().next() {
        let message = "a kernel must not have lifetime parameters: leave them out, as in GlobalSlice<f32>";
        return Err(Error::new_spanned(lifetime, message));
    }
    for input in &signature.inputs {
        if let FnArg::Typed(typed) = input
            && matches!(&*typed.ty, Type::Ptr(_) | Type::Reference(_) | Type::Slice(_))
        {
            let message = "kernel parameter: expected a view or plain data, found a pointer or reference; use GlobalSlice<T> or \
                           GlobalSliceMut<T> in a checked kernel, otherwise Global<T> or GlobalMut<T>";
            return Err(Error::new_spanned(&typed.ty, message));
        }
    }
    Ok(())
}

/// Returns the attributes of a kernel whose names are in `names`. A lint may be reported for the host only, so `expect` becomes `allow`.
fn attributes(function: &ItemFn, names: &[&str]) -> TokenStream {
    let named = |attribute: &&Attribute| {
        names.iter().any(|name| attribute.path().is_ident(name)) && !names_unsafe_code(attribute)
    };
    let device = |attribute: &Attribute| match &attribute.meta {
        Meta::List(list) if list.path.is_ident("expect") => {
            let lints = &list.tokens;
            quote!(#[allow(#lints)])
        }
        _ => attribute.to_token_stream(),
    };
    function.attrs.iter().filter(named).map(device).collect()
}

/// Returns whether an attribute sets the level of the lint `unsafe_code`.
fn names_unsafe_code(attribute: &Attribute) -> bool {
    let is_name = |token| matches!(token, TokenTree::Ident(name) if name == "unsafe_code");
    matches!(&attribute.meta, Meta::List(list) if list.tokens.clone().into_iter().any(is_name))
}

/// Returns the PTX entry point of one instance and the assembly comment that passes its launch bounds to
/// `cuda_builder`.
fn device_entry(
    function: &ItemFn,
    options: &KernelAttributes,
    arch: Option<&TokenStream>,
    threads: [u32; 3],
    entry: &Ident,
    instance: Option<&Instance>,
) -> syn::Result<TokenStream> {
    let blocks_per_sm = instance.and_then(|i| i.blocks_per_sm).or(options.blocks_per_sm);
    let signature = &function.sig;
    let names = argument_names(function)?;
    let checked = options.checked.map(|_| Parameter::of(function, &names)).unwrap_or_default();
    let parameters = match options.checked {
        Some(_) => checked.iter().map(Parameter::on_device).map(|parameter| quote!(#parameter,)).collect(),
        None if instance.is_some() => immutable(&signature.inputs).to_token_stream(),
        None => signature.inputs.to_token_stream(),
    };
    let views: TokenStream = checked.iter().map(|parameter| parameter.build(instance.is_none())).collect();
    let assertion = options.checked.map(|_| {
        quote!(
            const _: () = ::cuda_std::assert_checked();
        )
    });
    let (parameters, views) = match instance {
        Some(instance) => {
            let bindings = instance.bindings(&signature.generics)?;
            (substitute(parameters, &bindings), substitute(views, &bindings))
        }
        None => (parameters, views),
    };
    let body = match instance {
        Some(instance) => {
            let (name, arguments) = (&signature.ident, instance.generics());
            quote!(#name::#arguments(#(#names),*))
        }
        None => function.block.to_token_stream(),
    };
    let threads = match threads {
        [x, 1, 1] => x.to_string(),
        [x, y, z] => format!("{x},{y},{z}"),
    };
    let mut bounds = format!("// @launch {} maxntid={threads}", entry.unraw());
    if let Some(blocks_per_sm) = blocks_per_sm {
        bounds = format!("{bounds} minctasm={blocks_per_sm}");
    }
    if let Some(signature) = options.checked {
        bounds = format!("{bounds} signature={signature:016x}");
    }
    let lints = device_lints(function);
    let unsafe_level = std::env::var_os(UNCHECKED_VARIABLE).is_none().then(|| quote!(#[deny(unsafe_code)]));
    let shared_bytes = shared_bytes_function(function, options, arch, entry, instance)?;
    Ok(quote! {
        #shared_bytes
        #arch
        #[cfg(target_arch = "nvptx64")]
        ::core::arch::global_asm!(#bounds);
        #arch
        #[cfg(target_arch = "nvptx64")]
        #[unsafe(no_mangle)]
        #[allow(improper_gpu_kernel_arg, reason = "the lint does not recognize transparent wrappers of pointers")]
        #[allow(unsafe_code, reason = "an entry point has the name of its kernel")]
        #lints
        pub unsafe extern "gpu-kernel" fn #entry(#parameters) {
            #assertion
            #views
            #unsafe_level
            let () = { #body };
        }
    })
}

/// Returns a device function that returns the bytes of shared memory of an instance. `cuda_builder` compares them with the limit of the
/// architecture and removes the function. Returns `None` if the layout depends on the kernel's arguments.
fn shared_bytes_function(
    function: &ItemFn,
    options: &KernelAttributes,
    arch: Option<&TokenStream>,
    entry: &Ident,
    instance: Option<&Instance>,
) -> syn::Result<Option<TokenStream>> {
    let Some(shared) = options.shared.as_ref().map(ToTokens::to_token_stream) else { return Ok(None) };
    if argument_names(function)?.iter().any(|argument| contains(&shared, argument)) {
        return Ok(None);
    }
    let shared = match instance {
        Some(instance) => substitute(shared, &instance.bindings(&function.sig.generics)?),
        None => shared,
    };
    let name = format_ident!("{SHARED_BYTES}{}", entry.unraw());
    Ok(Some(quote! {
        #arch
        #[cfg(target_arch = "nvptx64")]
        #[unsafe(no_mangle)]
        #[allow(unsafe_code, reason = "the builder finds the function by its name")]
        pub extern "C" fn #name() -> usize {
            let mut layout = ::cuda_std::shared::Layout::new();
            let _ = (#shared)(&mut layout);
            layout.bytes()
        }
    }))
}

/// Returns whether an identifier occurs in `tokens`.
fn contains(tokens: &TokenStream, name: &Ident) -> bool {
    tokens.clone().into_iter().any(|token| match token {
        TokenTree::Ident(ident) => ident == *name,
        TokenTree::Group(group) => contains(&group.stream(), name),
        _ => false,
    })
}

/// Returns the conditions of the items that exist on the host only.
fn on_host(function: &ItemFn) -> TokenStream {
    let conditions = attributes(function, &["cfg"]);
    quote!(#[cfg(not(target_arch = "nvptx64"))] #conditions)
}

/// The names of the items that all host functions of a generic kernel share.
struct Shared {
    /// The type that stands for the generic arguments of an instance.
    key: Ident,
    /// The function that returns the table of all instances.
    instances: Ident,
}

impl Shared {
    fn new(kernel: &Ident) -> Self {
        let kernel = kernel.unraw();
        Self { key: format_ident!("__{kernel}_key"), instances: format_ident!("__{kernel}_instances") }
    }
}

/// Returns the items of [`Shared`].
///
/// One table has all instances: in the function of each, it would take most of the build time of a device crate. The launches of a
/// checked kernel have bodies of their own.
fn shared_items(function: &ItemFn, options: &KernelAttributes, arguments: &[Ident]) -> TokenStream {
    let Shared { key, instances: table } = Shared::new(&function.sig.ident);
    let (signature, block, lints, on_host) = (&function.sig, &function.block, lints(), on_host(function));
    let inputs = &signature.inputs;
    let (generics, turbofish, predicate) = {
        let (generics, types, predicate) = signature.generics.split_for_impl();
        (generics, types.as_turbofish().to_token_stream(), predicate)
    };
    let erased = options.checked.is_none();
    let types = signature.generics.type_params().map(|p| &p.ident);
    let entries = options.instances.iter().map(|i| i.entry(&signature.ident).to_string());
    let instances: Vec<_> = options.instances.iter().map(Instance::generics).collect();
    let emulated = instances.iter().map(|arguments| {
        if erased {
            quote!(::cuda_std::emulated_instance!(emulated::#arguments))
        } else {
            quote!(::core::option::Option::None)
        }
    });
    let items = erased.then(|| {
        let indices = 0..arguments.len();
        let parameters = immutable(inputs);
        let types = parameters.iter().map(|input| match input {
            FnArg::Typed(typed) => typed.ty.to_token_stream(),
            FnArg::Receiver(receiver) => receiver.to_token_stream(),
        });
        quote! {
            ::cuda_std::emulated_items! {
                #lints
                fn body #generics (#inputs) #predicate #block
                fn emulated #generics (arguments: &[::cuda_std::launch::Argument]) #predicate {
                    body #turbofish (#(arguments[#indices].value::<#types>()),*)
                }
            }
        }
    });
    quote! {
        #on_host
        #[allow(non_camel_case_types, reason = "the name contains that of the kernel")]
        struct #key #generics (::core::marker::PhantomData<(#(#types,)*)>) #predicate;
        #on_host
        fn #table() -> &'static [::cuda_std::launch::Instance] {
            #items
            static INSTANCES: &[::cuda_std::launch::Instance] = &[#(::cuda_std::launch::Instance {
                key: ::core::any::TypeId::of::<#key #instances>(),
                entry: #entries,
                emulated: #emulated,
            }),*];
            INSTANCES
        }
    }
}

/// Returns the generic types that no key depends on.
fn independent_types(generics: &Generics, keys: &[Constant]) -> Generics {
    let is_independent = |p: &GenericParam| {
        let selected = |name| keys.iter().any(|key| key.depends_on(&name));
        matches!(p, GenericParam::Type(_)) && !parameter(p).is_ok_and(selected)
    };
    Generics { params: generics.params.iter().filter(|p| is_independent(p)).cloned().collect(), ..generics.clone() }
}

/// Returns the functions that find an instance by the keys of `select(…)`: `NAME_select`, which returns its launch, `NAME_exists`,
/// and, if `select` has values, `NAME_values`. Generic parameters that no key depends on remain parameters of these functions, unless
/// they are constants.
fn select_items(
    function: &ItemFn,
    options: &KernelAttributes,
    threads: [u32; 3],
    arguments: &[Ident],
) -> syn::Result<TokenStream> {
    let Signature { ident: name, inputs, generics, .. } = &function.sig;
    let Shared { instances: table, .. } = Shared::new(name);
    let Selection { keys, values } = &options.select;
    let kept = independent_types(generics, keys);
    let kept_types: Vec<_> = kept.type_params().map(|p| p.ident.clone()).collect();
    let key_types: Vec<_> = keys.iter().map(|key| &key.of).collect();
    let value_types: Vec<_> = values.iter().map(|value| &value.of).collect();
    let rows = options.instances.iter().map(|instance| {
        let bindings = instance.bindings(generics)?;
        let [keys, values] = [keys, values].map(|constants| {
            let of_instance = constants.iter().map(|constant| constant.of(instance, &bindings));
            of_instance.collect::<Vec<_>>()
        });
        let kept = kept_types.iter().map(|name| substitute(name.to_token_stream(), &bindings));
        Ok(quote!((::core::any::TypeId::of::<(#(#kept,)*)>(), (#(#keys,)*), (#(#values,)*))))
    });
    let rows = rows.collect::<syn::Result<Vec<_>>>()?;
    let [select, exists, values_of] = ["select", "exists", "values"].map(|suffix| format_ident!("{name}_{suffix}"));
    let find = format_ident!("__{}_find", name.unraw());
    let (kept_generics, turbofish, predicate) = {
        let (kept_generics, types, predicate) = kept.split_for_impl();
        (kept_generics, types.as_turbofish().to_token_stream(), predicate)
    };
    let (vis, lints, parameters, on_host) = (&function.vis, lints(), immutable(inputs), on_host(function));
    let documentation =
        |what: &str| format!("Returns {what} of [`{name}`] with these keys, or `None` if there is none.");
    let (of_launch, of_values) =
        (documentation("the launch of the instance"), documentation("the values of the instance"));
    let of_exists = format!("Returns true if [`{name}`] has an instance with these keys.");
    let values_of = (!values.is_empty()).then(|| {
        quote! {
            #on_host
            #[doc = #of_values]
            #vis fn #values_of #kept_generics (instance_keys: (#(#key_types,)*)) -> ::core::option::Option<(#(#value_types,)*)>
            #predicate {
                #find #turbofish (instance_keys).map(|(_, values)| values)
            }
        }
    });
    Ok(quote! {
        #on_host
        fn #find #kept_generics (instance_keys: (#(#key_types,)*))
            -> ::core::option::Option<(&'static ::cuda_std::launch::Instance, (#(#value_types,)*))>
        #predicate {
            static ROWS: &[(::core::any::TypeId, (#(#key_types,)*), (#(#value_types,)*))] = &[#(#rows),*];
            let of = ::core::any::TypeId::of::<(#(#kept_types,)*)>();
            let index = ROWS.iter().position(|row| row.0 == of && row.1 == instance_keys)?;
            ::core::option::Option::Some((&#table()[index], ROWS[index].2))
        }
        #on_host
        #[doc = #of_launch]
        #lints
        #vis fn #select #kept_generics (instance_keys: (#(#key_types,)*), #parameters)
            -> ::core::option::Option<::cuda_std::launch::Launch>
        #predicate {
            let values = vec![#(::cuda_std::launch::Argument::new(#arguments)),*];
            #find #turbofish (instance_keys)
                .map(|(instance, _)| ::cuda_std::launch::Launch::of_instance(instance, [#(#threads),*], values))
        }
        #on_host
        #[doc = #of_exists]
        #[allow(dead_code, reason = "not every program asks whether an instance exists")]
        #vis fn #exists #kept_generics (instance_keys: (#(#key_types,)*)) -> bool #predicate {
            #find #turbofish (instance_keys).is_some()
        }
        #values_of
        // Names the types for the GPU too, where their imports would be unused otherwise.
        #[cfg(target_arch = "nvptx64")]
        const _: ::core::option::Option<(#(#key_types,)* #(#value_types,)*)> = ::core::option::Option::None;
    })
}

/// Returns the host function, which has the same name, generics and parameters and returns a `Launch`.
fn host_launch(function: &ItemFn, options: &KernelAttributes, threads: [u32; 3], arguments: &[Ident]) -> TokenStream {
    let (attributes, vis, signature, block) = (&function.attrs, &function.vis, &function.sig, &function.block);
    let (name, inputs) = (&signature.ident, &signature.inputs);
    let (generics, turbofish, predicate) = {
        let (generics, types, predicate) = signature.generics.split_for_impl();
        (generics, types.as_turbofish().to_token_stream(), predicate)
    };
    let lints = lints();
    let shared_bytes = options.shared.as_ref().map_or_else(
        || quote!(0),
        |shared| {
            quote! {{
                let mut layout = ::cuda_std::shared::Layout::new();
                let _ = (#shared)(&mut layout);
                layout.bytes()
            }}
        },
    );
    let generic = !options.instances.is_empty();
    let instance = {
        let Shared { key, instances } = Shared::new(name);
        quote! {{
            let key = (::core::any::TypeId::of::<#key #turbofish>(), ::core::any::type_name::<#key #turbofish>());
            ::cuda_std::launch::instance_of(stringify!(#name), key, #instances())
        }}
    };
    let entry = if generic { quote!(#instance.entry) } else { name.unraw().to_string().to_token_stream() };
    let body = quote! {
        ::cuda_std::emulated_body! {{
            #lints
            fn body #generics (#inputs) #predicate #block
            move || body #turbofish (#(#arguments),*)
        }}
    };
    if let Some(signature) = options.checked {
        let parameters = Parameter::of(function, arguments);
        let on_host = parameters.iter().map(Parameter::on_host);
        let push = parameters.iter().map(Parameter::push);
        let others = &function.sig.generics.params;
        return quote! {
            #[cfg(not(target_arch = "nvptx64"))]
            #(#attributes)*
            #lints
            #vis fn #name<'launch, #others>(#(#on_host),*) -> ::cuda_std::launch::CheckedLaunch<'launch> #predicate {
                let mut arguments = ::cuda_std::launch::CheckedArguments::new();
                #(#push)*
                ::cuda_std::launch::CheckedLaunch::new(
                    ::cuda_std::launch::Launch::new(
                        #entry,
                        [#(#threads),*],
                        arguments.values(),
                        #body,
                    )
                    .with_shared_bytes(#shared_bytes),
                    #signature,
                    arguments,
                )
            }
        };
    }
    let shared = options.shared.as_ref().map(|_| quote!(.with_shared_bytes(#shared_bytes)));
    let parameters = immutable(inputs);
    let values = quote!(vec![#(::cuda_std::launch::Argument::new(#arguments)),*]);
    let launch = if generic {
        quote!(::cuda_std::launch::Launch::of_instance(#instance, [#(#threads),*], #values))
    } else {
        quote!(::cuda_std::launch::Launch::new(#entry, [#(#threads),*], #values, #body))
    };
    quote! {
        #[cfg(not(target_arch = "nvptx64"))]
        #(#attributes)*
        #lints
        #vis fn #name #generics (#parameters) -> ::cuda_std::launch::Launch #predicate {
            #launch #shared
        }
    }
}

/// Returns the parameters without `mut`, for a function that passes them to the body.
fn immutable(inputs: &Punctuated<FnArg, Token![,]>) -> Punctuated<FnArg, Token![,]> {
    let mut inputs = inputs.clone();
    for input in &mut inputs {
        if let FnArg::Typed(typed) = input
            && let Pat::Ident(pattern) = &mut *typed.pat
        {
            pattern.mutability = None;
        }
    }
    inputs
}

/// Returns the lint levels of the device functions that a kernel expands to. The entry point needs `unsafe` itself, and the builder sets
/// the level for the kernel's own code.
fn device_lints(function: &ItemFn) -> TokenStream {
    let (levels, lints) = (attributes(function, &["allow", "expect", "warn", "deny", "forbid"]), lints());
    quote!(#levels #lints)
}

/// Returns the exception from `too_many_arguments` for the functions that a kernel expands to.
///
/// LLVM infers the global address space only for pointers that are parameters of their own. If a kernel took its
/// pointers in a struct, its `ld.global` and `st.global` instructions would become slower generic ones.
fn lints() -> TokenStream {
    quote! {
        #[allow(clippy::too_many_arguments, reason = "pointers in a struct would lose their address space")]
    }
}

/// Returns the names of the kernel's parameters.
fn argument_names(function: &ItemFn) -> syn::Result<Vec<Ident>> {
    let name = |argument: &FnArg| match argument {
        FnArg::Typed(typed) => match &*typed.pat {
            Pat::Ident(pattern) => Ok(pattern.ident.clone()),
            other => Err(Error::new_spanned(other, "a kernel parameter must be a plain name, not a pattern")),
        },
        FnArg::Receiver(receiver) => Err(Error::new_spanned(receiver, "a kernel must be a free function without self")),
    };
    function.sig.inputs.iter().map(name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn block_sizes_are_checked() {
        let kernel = |threads: TokenStream| {
            expand(
                &quote!(threads = #threads),
                quote!(
                    fn f(a: f32) {}
                ),
            )
        };
        for valid in [quote!(1), quote!(1024), quote!((32, 32)), quote!((4, 4, 64))] {
            assert!(kernel(valid).is_ok());
        }
        for (invalid, found) in [
            (quote!(2048), "found 2048"),
            (quote!(0), "found 0"),
            (quote!((64, 32)), "found 2048"),
            (quote!((65536, 65536, 65536)), "found 281474976710656"),
            (quote!((1, 1, 128)), "at most 64 threads in z, found 128"),
        ] {
            let error = kernel(invalid).expect_err("an invalid block size").to_string();
            assert!(error.starts_with("block size: expected ") && error.contains(found), "{error}");
        }
    }

    #[test]
    fn views_with_a_length_need_a_checked_kernel() {
        let item = quote!(
            fn f(y: cuda_std::GlobalSliceMut<f32>) {}
        );
        let error = expand(&quote!(threads = 32), item.clone()).expect_err("an unchecked kernel").to_string();
        assert!(error.contains("add `checked` to #[kernel(…)]"), "{error}");
        assert!(expand(&quote!(threads = 32, checked), item).is_ok());
    }

    fn expanded(attribute: &TokenStream, item: TokenStream) -> String {
        expand(attribute, item).unwrap_or_else(|error| panic!("{error}")).to_string()
    }

    /// A generic parameter of a kernel may have any name, and its instances any arguments: a helper in the expansion with a parameter
    /// `T` would become `fn scalar<3>`.
    #[test]
    fn instances_replace_no_identifiers_of_the_expansion() {
        for argument in [quote!(3), quote!(Wrap<f32>)] {
            let text = expanded(
                &quote!(threads = 32, checked, instances(a = <#argument>)),
                quote!(
                    fn f<T: Element>(y: GlobalSliceMut<T>, n: u32) {}
                ),
            );
            assert!(!text.contains("fn scalar") && text.contains(":: cuda_std :: check_scalar"), "{text}");
        }
    }

    #[test]
    fn instances_are_products_of_alternatives() {
        let text = expanded(
            &quote!(
                threads = 32,
                axes(tile = [_ = Small, large = <Large>(blocks_per_sm = 2)]),
                instances([bf16 = bf16, f32 = f32] * tile, half = <f16, Small>),
                select(L::SIZE: u32 => bytes::<T, L>: fn() -> usize)
            ),
            quote!(
                fn f<T: Element, L: Tile>(y: GlobalMut<T>) {}
            ),
        );
        for entry in ["f_bf16 maxntid=32", "f_bf16_large maxntid=32 minctasm=2", "f_f32 ", "f_f32_large ", "f_half "] {
            assert!(text.contains(&format!("// @launch {entry}")), "{entry}: {text}");
        }
        assert!(text.contains("f :: < f32 , Large > (y)"), "{text}");
        // The element type remains a parameter: no key depends on it.
        assert!(text.contains("fn f_select < T : Element > (instance_keys : (u32 ,) , y : GlobalMut < T >)"), "{text}");
        assert!(
            text.contains(":: of :: < (f32 ,) > () , (< Large > :: SIZE ,) , (bytes :: < f32 , Large > ,))"),
            "{text}"
        );
    }

    #[test]
    fn the_builder_learns_the_shared_memory_of_each_instance() {
        let kernel = |shared: TokenStream| {
            expanded(
                &quote!(threads = 32, shared = #shared, instances(a = <f32, 64>, b = <bf16, 128>)),
                quote!(
                    fn f<T: Element, const N: usize>(y: GlobalMut<T>, rows: u32) {}
                ),
            )
        };
        let text = kernel(quote!(layout_of::<T, N>));
        for (entry, layout) in [("f_a", "layout_of :: < f32 , 64 >"), ("f_b", "layout_of :: < bf16 , 128 >")] {
            assert!(text.contains(&format!("fn __cuda_shared_bytes_{entry} ()")), "{text}");
            assert!(text.contains(&format!("({layout}) (& mut layout)")), "{text}");
        }
        // Known only at the launch.
        let text = kernel(quote!(|layout: &mut Layout| layout.array::<T>(rows as usize)));
        assert!(!text.contains("__cuda_shared_bytes"), "{text}");
    }

    #[test]
    fn mutable_parameters_are_mutable_on_the_device() {
        let text = expanded(
            &quote!(threads = 32, checked),
            quote!(
                fn f(mut y: GlobalSliceMut<f32>, mut n: u32) {}
            ),
        );
        assert!(text.contains("let mut y : GlobalSliceMut < f32 >") && text.contains("let mut n = n"), "{text}");
    }

    #[test]
    fn raw_names_lose_their_prefix() {
        let text = expanded(
            &quote!(threads = 32),
            quote!(
                fn r#match(n: u32) {}
            ),
        );
        assert!(text.contains("// @launch match maxntid=32") && text.contains("\"match\""), "{text}");
    }

    #[test]
    fn conditions_and_lint_levels_reach_the_device() {
        let item = quote!(
            #[doc = "A kernel."]
            #[cfg(feature = "half")]
            #[allow(unused_variables)]
            #[expect(unused_mut, reason = "a test")]
            #[forbid(unsafe_code)]
            fn f(n: u32) {}
        );
        let text = expanded(&quote!(threads = 32), item);
        let count = |part: &str| text.matches(part).count();
        // The assembly comment, the entry point and the host function have the condition.
        assert!(count("cfg (feature = \"half\")") >= 3, "{text}");
        // Not on the entry point, which needs unsafe code.
        assert_eq!(count("# [forbid (unsafe_code)]"), 1, "{text}");
        assert_eq!(count("# [allow (unused_variables)]"), 2, "{text}");
        assert_eq!(count("# [allow (unused_mut , reason = \"a test\")]"), 1, "{text}");
    }

    #[test]
    fn signatures_that_no_kernel_can_have_are_errors() {
        let error = |item: TokenStream| expand(&quote!(threads = 32), item).expect_err("an error").to_string();
        let plain = "a kernel must be a plain function: ";
        for (item, expected) in [
            (
                quote!(
                    async fn f(n: u32) {}
                ),
                plain,
            ),
            (
                quote!(
                    const fn f(n: u32) {}
                ),
                plain,
            ),
            (
                quote!(
                    unsafe fn f(n: u32) {}
                ),
                plain,
            ),
            (
                quote!(
                    extern "C" fn f(n: u32) {}
                ),
                plain,
            ),
            (
                quote!(
                    fn f<'a>(y: GlobalMut<f32>) {}
                ),
                "a kernel must not have lifetime parameters",
            ),
            (
                quote!(
                    fn f(y: *mut f32) {}
                ),
                "kernel parameter: expected a view or plain data, found a pointer",
            ),
            (
                quote!(
                    fn f(y: &mut [f32]) {}
                ),
                "kernel parameter: expected a view or plain data, found a pointer",
            ),
        ] {
            let error = error(item);
            assert!(error.starts_with(expected), "{error}");
        }
    }

    #[test]
    fn options_are_checked() {
        let error = |attribute: TokenStream| {
            let item = quote!(
                fn f(n: u32) {}
            );
            expand(&attribute, item).expect_err("an error").to_string()
        };
        assert!(error(quote!(threads = 32, threads = 64)).contains("expected `threads` once"));
        assert!(error(quote!(threads = N)).starts_with("block size: expected a number"));
        assert!(
            error(quote!(threads = 32, instances(a = <f32> * tile)))
                .starts_with("instances: expected an axis, found `tile`")
        );
        assert!(error(quote!(threads = 32, select(N: u32))).starts_with("select(…) requires a generic kernel"));
    }
}
