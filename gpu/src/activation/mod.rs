//! Activation functions: their values, their gradients, and elementwise kernels.
//!
//! Each function has one file and one implementation of [`ActivationFunction`]. GEMM epilogues, quantizing kernels, text
//! generation and the CPU engine take both from there, so the fused and the unfused result are bit-identical. A new
//! function is a file and a line of `functions!`.
//!
//! A gated function has two inputs: up and gate. Its preactivation (rows, 2 F) has up in the first F columns and gate in
//! the others.
//!
//! Memory traffic of the kernels in elements per element of out: 2 forward and 3 backward, 3 and 5 for a gated function.

mod geglu;
mod gelu;
mod relu_squared;
mod swiglu;

pub use geglu::GeGlu;
pub use gelu::Gelu;
pub use relu_squared::ReluSquared;
pub use swiglu::SwiGlu;
pub(crate) use swiglu::sigmoid;

use cuda_std::{Element, Global, GlobalMut, Packet, kernel, thread};

/// An activation function of one or two numbers.
pub trait ActivationFunction: 'static {
    /// The function.
    const ACTIVATION: Activation;
    /// Number of inputs: 2 if the function is gated.
    const INPUTS: usize = 1;

    /// Returns the output. The inputs are x and 0, or up and gate.
    fn value(inputs: [f32; 2]) -> f32;

    /// Returns the gradients of the inputs, given that of the output.
    fn gradients(dout: f32, inputs: [f32; 2]) -> [f32; 2];

    /// Returns [`gradients`](Self::gradients) and [`value`](Self::value), with the same bits.
    #[inline(always)]
    fn gradients_and_value(dout: f32, inputs: [f32; 2]) -> ([f32; 2], f32) {
        (Self::gradients(dout, inputs), Self::value(inputs))
    }

    /// Returns the output by the functions of the standard library, if it takes any. The CPU engine uses it.
    #[cfg(not(target_arch = "nvptx64"))]
    fn reference_value(inputs: [f32; 2]) -> f32 {
        Self::value(inputs)
    }

    /// Returns the gradients of the inputs by the functions of the standard library, if they take any.
    #[cfg(not(target_arch = "nvptx64"))]
    fn reference_gradients(dout: f32, inputs: [f32; 2]) -> [f32; 2] {
        Self::gradients(dout, inputs)
    }
}

/// Work that is compiled for each activation function.
#[cfg(not(target_arch = "nvptx64"))]
pub trait Visitor {
    /// The result.
    type Output;
    /// Does the work with the function `A`.
    fn visit<A: ActivationFunction>(self) -> Self::Output;
}

/// Declares [`Activation`] and the dispatch from its variants to the functions. Text is what users read and write.
macro_rules! functions {
    ($($(#[$doc:meta])* $function:ident = $text:literal, $name:literal;)*) => {
        /// An activation function between two linear layers.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[cfg_attr(not(target_arch = "nvptx64"), derive(serde::Serialize, serde::Deserialize))]
        pub enum Activation {
            $($(#[$doc])* #[cfg_attr(not(target_arch = "nvptx64"), serde(rename = $text))] $function,)*
        }

        impl Activation {
            /// All functions.
            pub const ALL: &[Self] = &[$(Self::$function),*];

            /// Returns the number of input columns for each output column.
            pub const fn inputs(self) -> usize {
                match self {
                    $(Self::$function => $function::INPUTS,)*
                }
            }

            /// Returns true if the function has two inputs.
            pub const fn is_gated(self) -> bool {
                self.inputs() == 2
            }

            /// Returns the name in prose.
            #[cfg(not(target_arch = "nvptx64"))]
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$function => $name,)*
                }
            }

            /// Does work with the function as a type.
            #[cfg(not(target_arch = "nvptx64"))]
            pub fn visit<V: Visitor>(self, visitor: V) -> V::Output {
                match self {
                    $(Self::$function => visitor.visit::<$function>(),)*
                }
            }

            /// Returns the number by which a kernel receives the function: from 1 on.
            #[cfg(not(target_arch = "nvptx64"))]
            pub const fn code(self) -> u32 {
                self as u32 + 1
            }
        }

        /// Returns the output of the function with the given [`code`](Activation::code).
        #[inline(always)]
        pub fn value_of(code: u32, inputs: [f32; 2]) -> f32 {
            $(
                if code == Activation::$function as u32 + 1 {
                    return $function::value(inputs);
                }
            )*
            inputs[0]
        }

        /// Returns whether the function with the given [`code`](Activation::code) is gated. 0 is the code of no function.
        #[inline(always)]
        pub const fn is_gated(code: u32) -> bool {
            false $(|| $function::INPUTS == 2 && code == Activation::$function as u32 + 1)*
        }
    };
}

functions! {
    /// gelu(x), in its tanh approximation (Hendrycks and Gimpel, 2016, arXiv:1606.08415)
    Gelu = "gelu", "GELU";
    /// max(x, 0)² (So et al., 2021, arXiv:2109.08668)
    ReluSquared = "relu-squared", "ReLU²";
    /// up · silu(gate) (Shazeer, 2020, arXiv:2002.05202)
    SwiGlu = "swi-glu", "SwiGLU";
    /// up · gelu(gate) (Shazeer, 2020, arXiv:2002.05202)
    GeGlu = "ge-glu", "GEGLU";
}

const THREADS: usize = 512;

/// Returns the grid size of both kernels for n = rows * F elements of out.
pub const fn grid<T: Element>(n: usize) -> u32 {
    n.div_ceil(THREADS * T::PACKET) as u32
}

/// Returns the indices of the calling thread's packet in out and in the preactivation, or `None` past the end.
///
/// `n` is rows * F, `columns` is F. The packet of gate begins F elements after that of up.
#[inline(always)]
fn packets<T: Element, A: ActivationFunction>(n: u64, columns: u32) -> Option<[usize; 2]> {
    let i = thread::index_1d() * T::PACKET;
    if i >= n as usize {
        return None;
    }
    if A::INPUTS == 1 {
        return Some([i, i]);
    }
    // A 32-bit division is several times cheaper than one of 64 bits.
    let row = (i / T::PACKET) as u32 / (columns / T::PACKET as u32).max(1);
    Some([i, i + row as usize * columns as usize])
}

/// Computes out (rows, F) = activation(inp (rows, F), or (rows, 2 F) if it is gated).
///
/// `n` is rows * F, a multiple of the packet, and below 2^32 packets; `columns` is F, a multiple of the packet if the
/// function is gated. One packet per thread. Grid: [`grid`].
#[kernel(
    threads = 512,
    axes(element = [bf16 = cuda_std::bf16, f32 = f32]),
    instances(element * [gelu = Gelu, relu_squared = ReluSquared, swiglu = SwiGlu, geglu = GeGlu]),
    select(A::ACTIVATION: Activation)
)]
pub fn activation_forward<T: Element, A: ActivationFunction>(out: GlobalMut<T>, inp: Global<T>, n: u64, columns: u32) {
    let Some([i, at]) = packets::<T, A>(n, columns) else { return };
    let x = inp.packet_streaming(at);
    let gate = if A::INPUTS == 1 { Packet::zero() } else { inp.packet_streaming(at + columns as usize) };
    out.set_packet(i, Packet::from_fn(|k| A::value([x.get(k), gate.get(k)])));
}

/// Computes dinp, the gradient of inp, given the gradient of out (rows, F). inp and dinp are (rows, F), or (rows, 2 F) if
/// the function is gated.
///
/// A gated function reads the gradient of out from `dout`. Otherwise dinp holds it and is overwritten, and `dout` is
/// unused. `n` and `columns` are those of [`activation_forward`]. One packet of dout per thread. Grid: [`grid`].
#[kernel(
    threads = 512,
    axes(element = [bf16 = cuda_std::bf16, f32 = f32]),
    instances(element * [gelu = Gelu, relu_squared = ReluSquared, swiglu = SwiGlu, geglu = GeGlu]),
    select(A::ACTIVATION: Activation)
)]
pub fn activation_backward<T: Element, A: ActivationFunction>(
    dinp: GlobalMut<T>,
    dout: Global<T>,
    inp: Global<T>,
    n: u64,
    columns: u32,
) {
    let Some([i, at]) = packets::<T, A>(n, columns) else { return };
    if A::INPUTS == 1 {
        let (x, dout) = (inp.packet_streaming(i), dinp.packet(i));
        dinp.set_packet(i, Packet::from_fn(|k| A::gradients(dout.get(k), [x.get(k), 0.0])[0]));
        return;
    }
    let dout = dout.packet_streaming(i);
    let (up, gate) = (inp.packet_streaming(at), inp.packet_streaming(at + columns as usize));
    let mut gradients = [[0.0; 2]; 8];
    for k in 0..T::PACKET {
        gradients[k] = A::gradients(dout.get(k), [up.get(k), gate.get(k)]);
    }
    dinp.set_packet(at, Packet::from_fn(|k| gradients[k][0]));
    dinp.set_packet(at + columns as usize, Packet::from_fn(|k| gradients[k][1]));
}
