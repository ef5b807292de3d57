//! `#[kernel]`: one function, two machines.

mod kernel;

use proc_macro::TokenStream;

/// Makes a kernel of a function.
///
/// ```ignore
/// #[kernel(threads = 256, blocks_per_sm = 2, instances(bf16 = <bf16>, f32 = <f32>))]
/// pub fn gelu_forward<T: Element>(out: GlobalMut<T>, inp: Global<T>, n: u64) { … }
/// ```
///
/// On the device each instance becomes the PTX entry `gelu_forward_bf16`, `gelu_forward_f32`; without `instances` the
/// entry has the function's own name. On the host the function keeps its name, generics and parameters and returns a
/// `cuda_std::launch::Launch`: `gelu_forward::<bf16>(out, inp, n)`; a wrong argument type does not compile, and generics
/// without an instance panic with the instances there are.
///
/// * `threads = N`: block size, one-dimensional; becomes the entry's `.maxntid`.
/// * `blocks_per_sm = N`: how many blocks must fit on a multiprocessor (`.minnctapersm`); caps registers.
///   An instance may have its own: `instances(bf16 = <bf16>(blocks_per_sm = 2))`.
/// * `cluster = N`: blocks per cluster in x (`.reqnctapercluster`), `sm_90`.
/// * `arch = "sm_90a"`: the entry exists only in builds for this target.
#[proc_macro_attribute]
pub fn kernel(attribute: TokenStream, item: TokenStream) -> TokenStream {
    kernel::expand(attribute.into(), item.into()).unwrap_or_else(syn::Error::into_compile_error).into()
}
