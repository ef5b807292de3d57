//! What is to be multiplied.

use crate::result::{Error, Result};
use crate::sys;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Storage type of all matrices of a product; sums are in f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Element {
    Bf16,
    F32,
    /// f32 in memory, multiplied with 10-bit mantissas on tensor cores.
    Tf32,
}

impl Element {
    pub(crate) fn raw(self) -> i32 {
        match self {
            Self::Bf16 => sys::R_16BF,
            Self::F32 | Self::Tf32 => sys::R_32F,
        }
    }
}

/// What happens to a product on its way to memory. GELU is the tanh form.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Epilogue {
    /// D = A · B (+ C)
    None,
    /// D = A · B + bias (m) (+ C)
    Bias,
    /// aux (m, n) = A · B + bias (m); D = gelu(aux)
    GeluAuxBias,
    /// D = A · B ⊙ gelu'(aux (m, n))
    DGelu,
    /// As `DGelu`, and gelu (m, n) = gelu(aux). The library has none of it; for products that others compute as well.
    DGeluAndGelu,
    /// As `DGelu`, and bias (m) = row sums of D: the gradient of the bias before that GELU.
    DGeluBiasGrad,
    /// bias (m) = sums of op(A) over k; overwritten.
    BiasGradA,
    /// bias (n) = sums of op(B) over k; overwritten.
    BiasGradB,
}

impl Epilogue {
    /// `None` where the library has none of it.
    pub(crate) fn raw(self) -> Option<u32> {
        Some(match self {
            Self::DGeluAndGelu => return None,
            Self::None => sys::EPILOGUE_DEFAULT,
            Self::Bias => sys::EPILOGUE_BIAS,
            Self::GeluAuxBias => sys::EPILOGUE_GELU_AUX_BIAS,
            Self::DGelu => sys::EPILOGUE_DGELU,
            Self::DGeluBiasGrad => sys::EPILOGUE_DGELU_BGRAD,
            Self::BiasGradA => sys::EPILOGUE_BGRADA,
            Self::BiasGradB => sys::EPILOGUE_BGRADB,
        })
    }

    pub(crate) fn uses_bias(self) -> bool {
        !matches!(self, Self::None | Self::DGelu | Self::DGeluAndGelu)
    }

    pub(crate) fn uses_aux(self) -> bool {
        matches!(self, Self::GeluAuxBias | Self::DGelu | Self::DGeluAndGelu | Self::DGeluBiasGrad)
    }

    fn writes_gelu(self) -> bool {
        self == Self::DGeluAndGelu
    }
}

/// D (m, n) = op(A) (m, k) · op(B) (k, n), column-major without gaps, `batch` times at fixed distances.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Problem {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    /// Whether A is stored (k, m) and B is stored (n, k).
    pub transpose_a: bool,
    pub transpose_b: bool,
    pub element: Element,
    pub epilogue: Epilogue,
    /// Adds the product, bias included, to C.
    pub accumulate: bool,
    /// How many products; matrices of one operand follow one another without gaps.
    pub batch: usize,
    /// Storage type of D where it is not `element`; [`Element::F32`] is the only other one.
    #[serde(default)]
    pub output: Option<Element>,
}

impl Problem {
    /// Storage type of D.
    pub(crate) fn stored(&self) -> Element {
        self.output.unwrap_or(self.element)
    }
}

/// Device addresses, all multiples of 16.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Operands {
    pub a: u64,
    pub b: u64,
    pub d: u64,
    /// What a product that accumulates is added to, stored as D; `None` for what D holds.
    pub c: Option<u64>,
    /// For epilogues with a bias or its gradient.
    pub bias: Option<u64>,
    /// For GELU epilogues: (m, n), leading dimension m.
    pub aux: Option<u64>,
    /// For [`Epilogue::DGeluAndGelu`]: (m, n), leading dimension m.
    pub gelu: Option<u64>,
}

impl Operands {
    /// The largest power of two up to 256 that each address the library is given is a multiple of, C and D in one: what an
    /// algorithm may count on.
    pub fn alignments(&self) -> [u32; 5] {
        let of = |address: u64| 1 << address.trailing_zeros().min(8);
        [of(self.a), of(self.b), of(self.d | self.c.unwrap_or(0)), self.bias.map_or(0, of), self.aux.map_or(0, of)]
    }

    /// Catches what the library would refuse without a reason, or read wild.
    pub fn validate(&self, problem: &Problem) -> Result<()> {
        let fail = |what: String| Err(Error::Operand { problem: problem.to_string(), what });
        let named = [
            ("A", Some(self.a)),
            ("B", Some(self.b)),
            ("C", self.c),
            ("D", Some(self.d)),
            ("bias", self.bias),
            ("aux", self.aux),
            ("gelu", self.gelu),
        ];
        for (name, address) in named {
            if let Some(address) = address
                && (address == 0 || !address.is_multiple_of(16))
            {
                return fail(format!("{name} at {address:#x} is not at a multiple of 16 bytes"));
            }
        }
        for (what, uses, given) in [
            ("bias", problem.epilogue.uses_bias(), self.bias.is_some()),
            ("auxiliary matrix", problem.epilogue.uses_aux(), self.aux.is_some()),
            ("matrix for GELU", problem.epilogue.writes_gelu(), self.gelu.is_some()),
        ] {
            if uses != given {
                return fail(format!("{what}: this epilogue takes {}", if uses { "one" } else { "none" }));
            }
        }
        if self.c.is_some() && !problem.accumulate {
            return fail("C: this product is not added to anything".into());
        }
        if problem.epilogue.uses_aux() && !problem.m.is_multiple_of(8) {
            return fail("GELU epilogues need m to be a multiple of 8".into());
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
        if self.batch != 1 {
            write!(f, ", {} times", self.batch)?;
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
        batch: 1,
        output: None,
    };
    const AT: Operands = Operands { a: 0x1000, b: 0x2010, d: 0x3020, bias: Some(0x4040), ..NOWHERE };
    const NOWHERE: Operands = Operands { a: 0, b: 0, d: 0, c: None, bias: None, aux: None, gelu: None };

    fn refusal(problem: Problem, operands: Operands) -> String {
        operands.validate(&problem).unwrap_err().to_string()
    }

    #[test]
    fn alignment_is_the_lowest_bit_up_to_256() {
        assert_eq!(AT.alignments(), [256, 16, 32, 64, 0]);
        assert_eq!(Operands { c: Some(0x5010), ..AT }.alignments(), [256, 16, 16, 64, 0], "C and D in one");
        assert_eq!(Operands { c: Some(0x5040), ..AT }.alignments(), AT.alignments());
    }

    #[test]
    fn operands_must_fit_the_epilogue() {
        AT.validate(&FORWARD).unwrap();
        assert!(refusal(FORWARD, Operands { bias: None, ..AT }).ends_with("bias: this epilogue takes one"));
        let gelu = Problem { epilogue: Epilogue::DGelu, ..FORWARD };
        assert!(refusal(gelu, AT).ends_with("bias: this epilogue takes none"));
        assert!(refusal(gelu, Operands { bias: None, ..AT }).ends_with("auxiliary matrix: this epilogue takes one"));
        let aux = Operands { bias: None, aux: Some(0x5000), ..AT };
        aux.validate(&gelu).unwrap();
        assert!(refusal(Problem { m: 2300, ..gelu }, aux).contains("multiple of 8"));
        let both = Problem { epilogue: Epilogue::DGeluAndGelu, ..FORWARD };
        assert!(refusal(both, aux).ends_with("matrix for GELU: this epilogue takes one"));
        let at = Operands { gelu: Some(0x6000), ..aux };
        at.validate(&both).unwrap();
        assert!(refusal(gelu, at).ends_with("matrix for GELU: this epilogue takes none"));
        assert!(refusal(both, Operands { gelu: Some(0x6008), ..aux }).contains("gelu at 0x6008"));
        let residual = Operands { c: Some(0x5000), ..AT };
        residual.validate(&Problem { accumulate: true, ..FORWARD }).unwrap();
        assert!(refusal(FORWARD, residual).ends_with("C: this product is not added to anything"));
        assert!(refusal(FORWARD, Operands { c: Some(0x5008), ..AT }).contains("C at 0x5008"));
        assert!(refusal(FORWARD, Operands { b: 0x2008, ..AT }).contains("B at 0x2008"));
        assert!(refusal(FORWARD, Operands { d: 0, ..AT }).contains("D at 0x0"));
    }

    #[test]
    fn a_problem_reads_as_a_product() {
        let text = Problem { accumulate: true, batch: 2, ..FORWARD }.to_string();
        assert_eq!(text, "2304x256 = 2304x768 A^T · 768x256 B, Bf16, epilogue Bias, accumulated, 2 times");
        let text = Problem { accumulate: true, output: Some(Element::F32), ..FORWARD }.to_string();
        assert!(text.ends_with("epilogue Bias, accumulated in F32"), "{text}");
    }
}
