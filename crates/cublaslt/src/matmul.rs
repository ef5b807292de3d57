//! The description of a matmul.

use crate::result::{Error, Result};
use crate::sys;
use std::fmt;

/// The storage type of a matmul's matrices. Sums are computed in f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Element {
    /// 16-bit floats with 8 exponent bits.
    Bf16,
    /// 32-bit floats.
    F32,
    /// 32-bit floats in memory, multiplied on tensor cores with 10-bit mantissas.
    Tf32,
    /// 8-bit floats in A and B, which are transposed and not transposed; everything else is bf16. Each matrix has a scale.
    Fp8(Fp8),
}

/// The types of A and B in FP8, and how their products are accumulated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fp8 {
    /// Whether A is E5M2, not E4M3.
    pub a_e5m2: bool,
    /// Whether B is E5M2, not E4M3.
    pub b_e5m2: bool,
    /// Whether tensor cores may accumulate over all of K with the fewer bits of their own accumulators.
    pub fast_accumulation: bool,
}

impl Element {
    /// Returns the type of D, bias and aux.
    pub(crate) fn raw(self) -> i32 {
        match self {
            Self::Bf16 | Self::Fp8(_) => sys::R_16BF,
            Self::F32 | Self::Tf32 => sys::R_32F,
        }
    }

    /// Returns the types of A and B.
    pub(crate) fn raw_operands(self) -> [i32; 2] {
        let fp8 = |e5m2| if e5m2 { sys::R_8F_E5M2 } else { sys::R_8F_E4M3 };
        match self {
            Self::Fp8(Fp8 { a_e5m2, b_e5m2, .. }) => [a_e5m2, b_e5m2].map(fp8),
            _ => [self.raw(); 2],
        }
    }
}

/// The operation that is fused into a matmul before the result is stored. GELU is the tanh approximation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Epilogue {
    /// D = A · B (+ C)
    None,
    /// D = A · B + bias (m) (+ C)
    Bias,
    /// aux (m, n) = A · B + bias (m); D = gelu(aux)
    GeluAuxBias,
    /// D = A · B ⊙ gelu'(aux (m, n))
    DGelu,
}

impl Epilogue {
    /// Returns cuBLASLt's value.
    pub(crate) fn raw(self) -> u32 {
        match self {
            Self::None => sys::EPILOGUE_DEFAULT,
            Self::Bias => sys::EPILOGUE_BIAS,
            Self::GeluAuxBias => sys::EPILOGUE_GELU_AUX_BIAS,
            Self::DGelu => sys::EPILOGUE_DGELU,
        }
    }

    pub(crate) fn uses_bias(self) -> bool {
        matches!(self, Self::Bias | Self::GeluAuxBias)
    }

    pub(crate) fn uses_aux(self) -> bool {
        matches!(self, Self::GeluAuxBias | Self::DGelu)
    }
}

/// The matmul D (m, n) = op(A) (m, k) · op(B) (k, n). Matrices are column-major and contiguous.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(clippy::struct_excessive_bools, reason = "the properties of a matmul are independent")]
pub struct Problem {
    /// Rows of op(A) and D.
    pub m: usize,
    /// Columns of op(B) and D.
    pub n: usize,
    /// Columns of op(A) and rows of op(B).
    pub k: usize,
    /// Whether op transposes A, which is then stored as (k, m).
    pub transpose_a: bool,
    /// Whether op transposes B, which is then stored as (n, k).
    pub transpose_b: bool,
    /// The storage type of all matrices but D.
    pub element: Element,
    /// The fused operation.
    pub epilogue: Epilogue,
    /// Whether C is added to the result, which includes the bias.
    pub accumulate: bool,
    /// The storage type of D if it is not `element`. [`Element::F32`] is the only other one.
    pub output: Option<Element>,
    /// Whether the operands are batches of matrices. The number of matrices is not part of the problem: each number uses
    /// the same algorithm, so that the result for a matrix does not depend on the rest of its batch.
    pub batched: bool,
}

impl Problem {
    /// Returns the storage type of D.
    pub(crate) fn stored(&self) -> Element {
        self.output.unwrap_or(self.element)
    }
}

/// The factors of a matmul that accumulates: D = alpha · A · B + beta · C. Algorithms do not depend on them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scale {
    /// Factor of A · B.
    pub alpha: f32,
    /// Factor of C.
    pub beta: f32,
}

/// The matrices of a batched matmul: their number, and the elements from the start of one to that of the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Batch {
    /// The number of matrices.
    pub count: usize,
    /// The stride of A.
    pub a: usize,
    /// The stride of B.
    pub b: usize,
    /// The stride of C and D.
    pub d: usize,
}

impl Batch {
    /// Strides are multiples of this many elements, so that all matrices of a batch have the alignment of the first.
    pub const ALIGNMENT: usize = 128;
}

/// The device addresses of a matmul's matrices. All are multiples of 16.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Operands {
    /// The address of A.
    pub a: u64,
    /// The address of B.
    pub b: u64,
    /// The address of D.
    pub d: u64,
    /// The address of C, stored as D, for a matmul that accumulates. `None` if C is D.
    pub c: Option<u64>,
    /// The bias, for epilogues that use it.
    pub bias: Option<u64>,
    /// The GELU input (m, n) with leading dimension m, for epilogues that use it.
    pub aux: Option<u64>,
    /// The factors of a matmul that accumulates. `None` if both are 1.
    pub scale: Option<Scale>,
    /// The matrices of a batched matmul.
    pub batch: Option<Batch>,
    /// The addresses of the scales of A and B, each one f32, for FP8. `None` if both are 1.
    pub fp8_scales: Option<[u64; 2]>,
}

impl Operands {
    /// Returns the alignment in bytes, at most 256, of A, B, D together with C, bias and aux. An absent operand has 0. An
    /// algorithm may rely on these.
    pub fn alignments(&self) -> [u32; 5] {
        let alignment = |address: u64| 1 << address.trailing_zeros().min(8);
        [
            alignment(self.a),
            alignment(self.b),
            alignment(self.d | self.c.unwrap_or(0)),
            self.bias.map_or(0, alignment),
            self.aux.map_or(0, alignment),
        ]
    }

    /// Checks that the operands fit `problem`. cuBLASLt would reject some violations without a reason, and access invalid
    /// memory for others.
    pub fn validate(&self, problem: &Problem) -> Result<()> {
        let fail = |what: String| Err(Error::Operand { problem: problem.to_string(), what });
        let named = [
            ("A", Some(self.a)),
            ("B", Some(self.b)),
            ("C", self.c),
            ("D", Some(self.d)),
            ("bias", self.bias),
            ("aux", self.aux),
        ];
        for (name, address) in named {
            if let Some(address) = address
                && (address == 0 || !address.is_multiple_of(16))
            {
                return fail(format!("address of {name}: expected a nonzero multiple of 16, found {address:#x}"));
            }
        }
        for (what, uses, given) in [
            ("bias", problem.epilogue.uses_bias(), self.bias.is_some()),
            ("aux", problem.epilogue.uses_aux(), self.aux.is_some()),
        ] {
            if uses != given {
                let (expected, found) = if uses { ("an address", "none") } else { ("none", "an address") };
                return fail(format!("{what}: expected {expected} for this epilogue, found {found}"));
            }
        }
        if self.c.is_some() && !problem.accumulate {
            return fail("C: expected none for a matmul that does not accumulate, found an address".into());
        }
        if self.scale.is_some() && !problem.accumulate {
            return fail("scale: expected none for a matmul that does not accumulate, found factors".into());
        }
        if self.batch.is_some() != problem.batched {
            let (expected, found) = if problem.batched { ("strides", "none") } else { ("none", "strides") };
            return fail(format!("batch: expected {expected}, found {found}"));
        }
        if let Some(Batch { a, b, d, .. }) = self.batch {
            let strides = [a, b, d];
            let fits = |(stride, len): (usize, usize)| stride >= len && stride.is_multiple_of(Batch::ALIGNMENT);
            let Problem { m, n, k, .. } = *problem;
            if !strides.into_iter().zip([m * k, k * n, m * n]).all(fits) {
                let alignment = Batch::ALIGNMENT;
                return fail(format!(
                    "strides: expected multiples of {alignment} that cover the matrices, found {strides:?}"
                ));
            }
        }
        if let Element::Fp8(_) = problem.element {
            let aligned = problem.m.is_multiple_of(16) && problem.k.is_multiple_of(16);
            if !(problem.transpose_a && !problem.transpose_b && aligned) {
                return fail("FP8: expected A transposed, B not transposed, and m and k multiples of 16".into());
            }
        } else if self.fp8_scales.is_some() {
            return fail("fp8_scales: expected none for this type, found addresses".into());
        }
        if problem.epilogue.uses_aux() && !problem.m.is_multiple_of(8) {
            return fail(format!("m: expected a multiple of 8 for a GELU epilogue, found {}", problem.m));
        }
        Ok(())
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let op = |transposed| if transposed { "^T" } else { "" };
        let (m, n, k) = (self.m, self.n, self.k);
        write!(f, "{m}x{n} = {m}x{k} A{} · {k}x{n} B{}", op(self.transpose_a), op(self.transpose_b))?;
        write!(f, ", {:?}, epilogue {:?}", self.element, self.epilogue)?;
        if self.accumulate {
            write!(f, ", accumulated")?;
        }
        if let Some(output) = self.output {
            write!(f, " in {output:?}")?;
        }
        if self.batched {
            write!(f, ", batched")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FORWARD: Problem = Problem {
        m: 2304,
        n: 256,
        k: 768,
        transpose_a: true,
        transpose_b: false,
        element: Element::Bf16,
        epilogue: Epilogue::Bias,
        accumulate: false,
        output: None,
        batched: false,
    };
    const OPERANDS: Operands = Operands { a: 0x1000, b: 0x2010, d: 0x3020, bias: Some(0x4040), ..NULL };
    const NULL: Operands =
        Operands { a: 0, b: 0, d: 0, c: None, bias: None, aux: None, scale: None, batch: None, fp8_scales: None };

    fn validation_error(problem: Problem, operands: Operands) -> String {
        operands.validate(&problem).unwrap_err().to_string()
    }

    #[test]
    fn alignment_is_the_lowest_set_bit_up_to_256() {
        assert_eq!(OPERANDS.alignments(), [256, 16, 32, 64, 0]);
        assert_eq!(Operands { c: Some(0x5010), ..OPERANDS }.alignments(), [256, 16, 16, 64, 0], "C and D together");
        assert_eq!(Operands { c: Some(0x5040), ..OPERANDS }.alignments(), OPERANDS.alignments());
    }

    #[test]
    fn operands_must_fit_the_epilogue() {
        OPERANDS.validate(&FORWARD).unwrap();
        let bias = "bias: expected an address for this epilogue, found none";
        assert!(validation_error(FORWARD, Operands { bias: None, ..OPERANDS }).ends_with(bias));
        let gelu = Problem { epilogue: Epilogue::DGelu, ..FORWARD };
        assert!(validation_error(gelu, OPERANDS).ends_with("bias: expected none for this epilogue, found an address"));
        let aux = "aux: expected an address for this epilogue, found none";
        assert!(validation_error(gelu, Operands { bias: None, ..OPERANDS }).ends_with(aux));
        let aux = Operands { bias: None, aux: Some(0x5000), ..OPERANDS };
        aux.validate(&gelu).unwrap();
        assert!(validation_error(Problem { m: 2300, ..gelu }, aux).contains("multiple of 8"));
        let residual = Operands { c: Some(0x5000), ..OPERANDS };
        residual.validate(&Problem { accumulate: true, ..FORWARD }).unwrap();
        assert!(validation_error(FORWARD, residual).contains("C: expected none for a matmul that does not accumulate"));
        let fp8 = Fp8 { a_e5m2: false, b_e5m2: true, fast_accumulation: true };
        let fp8 = Problem { element: Element::Fp8(fp8), ..FORWARD };
        let scaled = Operands { fp8_scales: Some([0x100, 0x200]), ..OPERANDS };
        scaled.validate(&fp8).unwrap();
        assert!(validation_error(FORWARD, scaled).contains("fp8_scales: expected none"));
        assert!(validation_error(Problem { transpose_a: false, ..fp8 }, scaled).contains("expected A transposed"));
        assert!(validation_error(Problem { k: 72, ..fp8 }, scaled).contains("multiples of 16"));
        let scaled = Operands { scale: Some(Scale { alpha: 0.5, beta: 2.0 }), ..OPERANDS };
        assert!(
            validation_error(FORWARD, scaled).contains("scale: expected none for a matmul that does not accumulate")
        );
        scaled.validate(&Problem { accumulate: true, ..FORWARD }).unwrap();
        assert!(validation_error(FORWARD, Operands { c: Some(0x5008), ..OPERANDS }).contains("address of C"));
        let batched = Problem { batched: true, ..FORWARD };
        let strides = Batch { count: 3, a: 2304 * 768, b: 256 * 768, d: 2304 * 256 };
        Operands { batch: Some(strides), ..OPERANDS }.validate(&batched).unwrap();
        assert!(validation_error(batched, OPERANDS).ends_with("batch: expected strides, found none"));
        assert!(
            validation_error(FORWARD, Operands { batch: Some(strides), ..OPERANDS }).contains("batch: expected none")
        );
        for wrong in [Batch { a: 2304 * 768 - 128, ..strides }, Batch { d: 2304 * 256 + 64, ..strides }] {
            let text = validation_error(batched, Operands { batch: Some(wrong), ..OPERANDS });
            assert!(text.contains("strides: expected multiples of 128"), "{text}");
        }
        assert!(validation_error(FORWARD, Operands { b: 0x2008, ..OPERANDS }).contains("address of B"));
        assert!(validation_error(FORWARD, Operands { d: 0, ..OPERANDS }).contains("address of D"));
    }

    #[test]
    fn display_gives_shape_type_and_epilogue() {
        let text = Problem { accumulate: true, ..FORWARD }.to_string();
        assert_eq!(text, "2304x256 = 2304x768 A^T · 768x256 B, Bf16, epilogue Bias, accumulated");
        let text = Problem { accumulate: true, output: Some(Element::F32), ..FORWARD }.to_string();
        assert!(text.ends_with("epilogue Bias, accumulated in F32"), "{text}");
    }
}
