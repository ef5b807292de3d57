//! The `#[kernel]` attribute, which compiles one function both for the GPU and for the host, and `#[device]` for what kernels call.
#![warn(missing_docs)]

mod checked;
mod device;
mod instances;
mod kernel;

use proc_macro::TokenStream;

/// Turns a function into a GPU kernel.
///
/// ```ignore
/// #[kernel(threads = 256, blocks_per_sm = 2, instances(bf16 = <bf16>, f32 = <f32>))]
/// pub fn gelu_forward<T: Element>(out: GlobalMut<T>, inp: Global<T>, n: u64) {
///     let i = thread::index_1d();
///     if i < n as usize {
///         out.set(i, T::from_f32(gelu(inp.at(i).to_f32())));
///     }
/// }
/// ```
///
/// On the device, each instance becomes a PTX entry point: `gelu_forward_bf16` and `gelu_forward_f32` in this example.
/// Without `instances`, the entry point has the name of the function. On the host, the function keeps its name,
/// generics and parameters and returns a `cuda_std::launch::Launch`, for example `gelu_forward::<bf16>(out, inp, n)`. A
/// wrong argument type is a compile error. Generic arguments without an instance cause a panic that lists the
/// instances.
///
/// Parameters are scalars, `Global` and `GlobalMut` views, and `#[repr(C)]` structs of scalars without padding, which are passed by
/// value. All parameters together have at most 4096 bytes. Views must be parameters of their own: LLVM does not infer the address space
/// of a pointer that it loads from a struct.
///
/// * `threads = N`, `threads = (X, Y)` or `threads = (X, Y, Z)`: the block size (`.maxntid`), at most 1024 threads. A kernel
///   with one dimension contains constants for the others, so it must be launched with one.
/// * `blocks_per_sm = N`: the number of blocks that must fit on an SM (`.minnctapersm`), which limits registers. An
///   instance can have its own: `instances(bf16 = <bf16>(blocks_per_sm = 2))`.
/// * `instances(…)`: entries `name = <arguments>`, or Cartesian products of lists. A product has one instance for each combination of
///   alternatives: `instances([bf16 = bf16, f32 = f32] * [small = Tile64, large = Tile128])` has four, of which the first is
///   `NAME_bf16_small = <bf16, Tile64>`. The name `_` adds nothing to the entry point's name.
/// * `axes(name = […], …)`: names a list of alternatives that several products use. It must precede `instances`.
/// * `select(KEY: TYPE, … => VALUE: TYPE, …)`: also generates `NAME_select((keys,), parameters…)`, which returns the launch of the
///   instance with these keys at run time, or `None`, `NAME_exists((keys,))`, and `NAME_values((keys,))`, which returns the values of
///   that instance. Keys and values are constant expressions of generic parameters, such as `N: u32`, `T::SHAPE: TileShape` or
///   `shared_bytes::<N>: fn() -> usize`. Type parameters in no key remain parameters of these functions.
/// * `shared = FUNCTION`: the function that defines the layout of the block's shared memory, such as `fn shared(layout: &mut Layout) ->
///   SharedArray<f32>`. The kernel calls it for the views, and the launch for the size. If the size does not depend on the kernel's
///   arguments, the device build compares it with the limit of each architecture.
/// * `checked`: a launch that needs no `unsafe`. Parameters are scalars, `GlobalSlice`s and `GlobalSliceMut`s, which are named by these
///   names. The function returns a `cuda_std::launch::CheckedLaunch`. The device crate needs the feature `checked` of `cuda_std`.
/// * `requires = "wgmma"`: compiles the entry point only for targets with these instructions: `fp8` (`sm_89` and later), `tma`
///   (`sm_90` and later), `setmaxnreg` or `wgmma` (`sm_90a`).
/// * `arch = "sm_90a"`: compiles the entry point only for this target.
///
/// `unsafe` is an error in the body on the device, unless the device crate is built with `CudaBuilder::allow_unchecked`.
#[proc_macro_attribute]
pub fn kernel(attribute: TokenStream, item: TokenStream) -> TokenStream {
    kernel::expand(&attribute.into(), item.into()).unwrap_or_else(syn::Error::into_compile_error).into()
}

/// Makes the functions of an `impl` block or a trait device functions: each that has a body becomes `#[inline(always)]`.
///
/// Kernels rely on it: values stay in registers, and loops have constant bounds. A function outside of a block takes the attribute
/// `#[inline(always)]` itself.
///
/// ```ignore
/// #[device]
/// impl Row {
///     fn first(self) -> usize {
///         self.index * self.stride
///     }
/// }
/// ```
#[proc_macro_attribute]
pub fn device(attribute: TokenStream, item: TokenStream) -> TokenStream {
    device::expand(&attribute.into(), item.into()).unwrap_or_else(syn::Error::into_compile_error).into()
}
