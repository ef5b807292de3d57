//! Tensors in files: element types, their conversion, and descriptions of new tensors.

use anyhow::Result;
use checkpoint::finite::NonFinite;
use engine::tensor::DType;
use half::{bf16, f16};

/// Elements that are converted at a time, which bounds the memory of a conversion.
pub const CHUNK: usize = 1 << 20;

/// The type of a tensor's elements in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Element {
    /// 32-bit float
    F32,
    /// bfloat16
    Bf16,
    /// IEEE 754 half precision
    F16,
}

impl Element {
    /// All types.
    pub const ALL: [Self; 3] = [Self::F32, Self::Bf16, Self::F16];

    /// Returns the size of an element in bytes.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
        }
    }

    /// Returns the name in safetensors files.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::Bf16 => "BF16",
            Self::F16 => "F16",
        }
    }

    /// Returns the type with a name in safetensors files.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|element| element.name() == name)
    }

    /// Returns the smallest storage type of the engine that holds all values of this type.
    pub const fn dtype(self) -> DType {
        match self {
            Self::Bf16 => DType::Bf16,
            Self::F32 | Self::F16 => DType::F32,
        }
    }

    /// Widens little-endian elements.
    pub fn widen(self, bytes: &[u8]) -> Vec<f32> {
        match self {
            Self::F32 => bytes.as_chunks().0.iter().map(|&b| f32::from_le_bytes(b)).collect(),
            Self::Bf16 => bytes.as_chunks().0.iter().map(|&b| bf16::from_le_bytes(b).to_f32()).collect(),
            Self::F16 => bytes.as_chunks().0.iter().map(|&b| f16::from_le_bytes(b).to_f32()).collect(),
        }
    }

    /// Checks that the elements of a tensor are finite. The error names the tensor.
    pub fn check_finite(self, bytes: &[u8], tensor: &str) -> Result<()> {
        let mut non_finite = NonFinite::default();
        match self {
            Self::F32 | Self::Bf16 => non_finite.add(bytes, self.dtype()),
            Self::F16 => {
                for chunk in bytes.chunks(CHUNK * self.bytes()) {
                    non_finite.add(&self.convert(chunk.to_vec(), DType::F32), DType::F32);
                }
            }
        }
        non_finite.check(tensor)
    }

    /// Converts little-endian elements to a storage type of the engine. Narrowing rounds to nearest, ties to even.
    pub fn convert(self, bytes: Vec<u8>, to: DType) -> Vec<u8> {
        match (self, to) {
            (Self::F32, DType::F32) | (Self::Bf16, DType::Bf16) => bytes,
            (_, DType::Bf16) => {
                self.widen(&bytes).into_iter().flat_map(|value| bf16::from_f32(value).to_le_bytes()).collect()
            }
            (_, DType::F32 | DType::I32 | DType::U16 | DType::Fp8 | DType::Block8 { .. }) => {
                self.widen(&bytes).into_iter().flat_map(f32::to_le_bytes).collect()
            }
        }
    }
}

impl From<DType> for Element {
    fn from(dtype: DType) -> Self {
        match dtype {
            DType::Bf16 => Self::Bf16,
            DType::F32 | DType::I32 | DType::U16 | DType::Fp8 | DType::Block8 { .. } => Self::F32,
        }
    }
}

/// A tensor of a new file.
#[derive(Clone, Debug)]
pub struct NewTensor {
    /// Name.
    pub name: String,
    /// Extent of each dimension, the contiguous one last.
    pub shape: Vec<usize>,
    /// Element type.
    pub element: Element,
}

impl NewTensor {
    /// Returns the size of the data in bytes.
    pub fn bytes(&self) -> u64 {
        self.shape.iter().product::<usize>() as u64 * self.element.bytes() as u64
    }
}

/// Transposes a matrix of `rows` rows with elements of `size` bytes.
pub fn transpose(matrix: &[u8], rows: usize, size: usize) -> Vec<u8> {
    match size {
        2 => transpose_chunks::<2>(matrix, rows),
        _ => transpose_chunks::<4>(matrix, rows),
    }
}

/// Side of the blocks that are transposed one after another, so that both matrices stay in the cache.
const BLOCK: usize = 32;

fn transpose_chunks<const N: usize>(matrix: &[u8], rows: usize) -> Vec<u8> {
    let from = matrix.as_chunks::<N>().0;
    let columns = from.len() / rows;
    let mut to = vec![[0; N]; from.len()];
    for top in (0..rows).step_by(BLOCK) {
        for left in (0..columns).step_by(BLOCK) {
            for column in left..columns.min(left + BLOCK) {
                for row in top..rows.min(top + BLOCK) {
                    to[column * rows + row] = from[row * columns + column];
                }
            }
        }
    }
    to.into_flattened()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matrices_are_transposed() {
        for (rows, columns) in [(1, 1), (1, 7), (5, 1), (3, 100), (33, 65), (64, 32)] {
            for size in [2, 4] {
                let element = |row: usize, column: usize| (row * 1000 + column) as u32;
                let cell = |value: u32| value.to_le_bytes()[..size].to_vec();
                let matrix: Vec<u8> =
                    (0..rows).flat_map(|r| (0..columns).flat_map(move |c| cell(element(r, c)))).collect();
                let expected: Vec<u8> =
                    (0..columns).flat_map(|c| (0..rows).flat_map(move |r| cell(element(r, c)))).collect();
                assert_eq!(transpose(&matrix, rows, size), expected, "{rows} {columns} {size}");
            }
        }
    }

    #[test]
    fn elements_are_widened_exactly_and_rounded_to_nearest_even() {
        // 1 + 2^-8 lies between two bf16 numbers; the even one is 1. 1 + 3 * 2^-8 rounds up to 1 + 2^-6.
        let f32s: Vec<u8> =
            [1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0, -2.5f32].iter().flat_map(|x| x.to_le_bytes()).collect();
        let bf16s = [0x80, 0x3f, 0x82, 0x3f, 0x20, 0xc0];
        assert_eq!(Element::F32.convert(f32s.clone(), DType::Bf16), bf16s);
        assert_eq!(Element::F32.convert(f32s.clone(), DType::F32), f32s);
        assert_eq!(Element::Bf16.widen(&bf16s), [1.0, 1.015625, -2.5]);
        assert_eq!(Element::Bf16.convert(bf16s.to_vec(), DType::Bf16), bf16s);
        // The largest number, the smallest subnormal and infinity in half precision.
        let f16s = [0xff, 0x7b, 0x01, 0x00, 0x00, 0x7c];
        assert_eq!(Element::F16.widen(&f16s), [65504.0, 2f32.powi(-24), f32::INFINITY]);
        let wide = Element::F16.convert(f16s.to_vec(), DType::F32);
        assert_eq!(wide[..4], 65504f32.to_le_bytes());
    }
}
