//! The weights that an optimizer kernel updates, in each form in which a model stores them.
//!
//! * f32 master weights beside parameters, which are copies of them.
//! * Parameters alone: `masters` is null.
//! * bf16 parameters with 16-bit remainders, which together are f32 master weights ([`crate::remainder`]). `masters` holds
//!   the remainders.
//!
//! bf16 parameters of the first two forms are rounded stochastically ([`crate::noise`]).
//!
//! A kernel tests for null itself ([`exist`]), as [`crate::adamw`] does.

use crate::noise::{self, Stream};
use crate::remainder;
use cuda_std::{Element, GlobalMut, device};

/// A form of master weights, named by the element type of a kernel's `masters`, which is not null here.
pub trait Master: Copy + Send + Sync + 'static {
    /// Whether `masters` may be null.
    const OPTIONAL: bool;

    /// Reads the weight of element `i`.
    fn at<T: Element>(masters: GlobalMut<Self>, params: GlobalMut<T>, i: usize) -> f32;

    /// Reads the weights of elements `i` to `i` + 3.
    fn four<T: Element>(masters: GlobalMut<Self>, params: GlobalMut<T>, i: usize) -> [f32; 4];

    /// Writes the new weight of element `i`, except its parameter.
    fn set(masters: GlobalMut<Self>, i: usize, new: f32);

    /// Writes the new weights of elements `i` to `i` + 3, except their parameters.
    fn set_four(masters: GlobalMut<Self>, i: usize, new: [f32; 4]);

    /// Returns the parameter of the weight `new` of element `i`, also if there are no master weights.
    fn param<T: Element>(new: f32, i: usize, seed: u32) -> T;

    /// Returns the parameters of the weights `new` of elements `i` to `i` + 3, also if there are no master weights.
    fn params<T: Element>(new: [f32; 4], i: usize, seed: u32) -> [f32; 4];
}

/// Returns whether there are master weights.
///
/// The answer is a constant for remainders. With a test for null, they would be loaded in a branch, after the other loads of a
/// thread have arrived.
#[inline(always)]
pub fn exist<W: Master>(masters: GlobalMut<W>) -> bool {
    !W::OPTIONAL || !masters.is_null()
}

/// f32 master weights.
#[device]
impl Master for f32 {
    const OPTIONAL: bool = true;

    #[track_caller]
    fn at<T: Element>(masters: GlobalMut<Self>, _: GlobalMut<T>, i: usize) -> f32 {
        masters.at(i)
    }

    #[track_caller]
    fn four<T: Element>(masters: GlobalMut<Self>, _: GlobalMut<T>, i: usize) -> [f32; 4] {
        masters.four(i)
    }

    #[track_caller]
    fn set(masters: GlobalMut<Self>, i: usize, new: f32) {
        masters.set(i, new);
    }

    #[track_caller]
    fn set_four(masters: GlobalMut<Self>, i: usize, new: [f32; 4]) {
        masters.set_four(i, new);
    }

    fn param<T: Element>(new: f32, i: usize, seed: u32) -> T {
        noise::round(Stream::Params, new, i, seed)
    }

    fn params<T: Element>(new: [f32; 4], i: usize, seed: u32) -> [f32; 4] {
        noise::round_four::<T>(Stream::Params, new, i, seed)
    }
}

/// Remainders of bf16 parameters.
#[device]
impl Master for u16 {
    const OPTIONAL: bool = false;

    #[track_caller]
    fn at<T: Element>(remainders: GlobalMut<Self>, params: GlobalMut<T>, i: usize) -> f32 {
        remainder::join(params.at(i).to_f32(), remainders.at(i))
    }

    #[track_caller]
    fn four<T: Element>(remainders: GlobalMut<Self>, params: GlobalMut<T>, i: usize) -> [f32; 4] {
        let (params, remainders) = (params.four(i), remainders.four(i));
        core::array::from_fn(|k| remainder::join(params[k], remainders[k]))
    }

    #[track_caller]
    fn set(remainders: GlobalMut<Self>, i: usize, new: f32) {
        remainders.set(i, remainder::split(new).1);
    }

    #[track_caller]
    fn set_four(remainders: GlobalMut<Self>, i: usize, new: [f32; 4]) {
        remainders.set_four(i, new.map(|weight| remainder::split(weight).1));
    }

    fn param<T: Element>(new: f32, _: usize, _: u32) -> T {
        T::from_f32(remainder::split(new).0)
    }

    fn params<T: Element>(new: [f32; 4], _: usize, _: u32) -> [f32; 4] {
        new.map(|weight| remainder::split(weight).0)
    }
}
