//! Tensor maps: descriptors with which the TMA unit of compute capability 9.0 addresses boxes of a tensor.

use super::sys;
use crate::Error;
use crate::error::{Result, check};
use std::ffi::c_int;

/// The type of a tensor's elements. The values are those of `CUtensorMapDataType`.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ElementType {
    /// Bytes.
    U8 = 0,
    /// 32-bit floats.
    F32 = 7,
    /// 16-bit floats with 8 exponent bits.
    Bf16 = 9,
}

impl ElementType {
    fn bytes(self) -> u64 {
        match self {
            Self::U8 => 1,
            Self::F32 => 4,
            Self::Bf16 => 2,
        }
    }
}

/// The span within which 16-byte units are permuted in shared memory, so that a column's units lie in different banks.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Swizzle {
    /// No permutation.
    None = 0,
    /// 32 bytes.
    B32 = 1,
    /// 64 bytes.
    B64 = 2,
    /// 128 bytes.
    B128 = 3,
}

/// The unit in which loads fetch data into L2.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum L2Promotion {
    /// The hardware's default.
    None = 0,
    /// 64 bytes.
    B64 = 1,
    /// 128 bytes.
    B128 = 2,
    /// 256 bytes.
    B256 = 3,
}

/// A tensor map. A kernel takes it by value (64-byte aligned) or from device memory.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorMap(sys::CUtensorMap);

impl TensorMap {
    /// Encodes the map of a tensor of 1 to 5 dimensions in device memory at `base` (16-byte aligned). The contiguous
    /// dimension comes first.
    ///
    /// - `extents`: the tensor's sizes in elements.
    /// - `strides`: the distances in bytes between consecutive indices of every dimension but the first. They are multiples
    ///   of 16 below 2^40.
    /// - `tile`: the sizes in elements, at most 256, of the box that one copy moves. Its innermost row is a multiple of 16
    ///   bytes, and no longer than the swizzle span.
    ///
    /// Elements outside the tensor read as zero.
    pub fn tiled<const RANK: usize>(
        element: ElementType,
        base: sys::CUdeviceptr,
        extents: [u64; RANK],
        strides: &[u64],
        tile: [u32; RANK],
        swizzle: Swizzle,
        l2: L2Promotion,
    ) -> Result<Self> {
        const { assert!(RANK >= 1 && RANK <= 5) };
        validate(element, base, &extents, strides, &tile, swizzle)?;
        let mut map = sys::CUtensorMap([0; 16]);
        let steps = [1_u32; RANK];
        // SAFETY: each array has RANK entries (strides one less, as validated). The call does not access memory at the base.
        let code = unsafe {
            sys::cuTensorMapEncodeTiled(
                &raw mut map,
                element as c_int,
                RANK as u32,
                std::ptr::without_provenance_mut(base as usize),
                extents.as_ptr(),
                strides.as_ptr(),
                tile.as_ptr(),
                steps.as_ptr(),
                0,
                swizzle as c_int,
                l2 as c_int,
                0,
            )
        };
        check(code, || {
            format!("cuTensorMapEncodeTiled({element:?} {extents:?}, strides {strides:?}, box {tile:?}, {swizzle:?})")
        })?;
        Ok(Self(map))
    }

    /// Returns the map's 128 bytes as words.
    pub fn as_words(&self) -> &[u64; 16] {
        &self.0.0
    }
}

/// Checks the driver's rules. The driver itself returns one code for a violation of any of them.
fn validate(
    element: ElementType,
    base: u64,
    extents: &[u64],
    strides: &[u64],
    tile: &[u32],
    swizzle: Swizzle,
) -> Result<()> {
    let fail = |what: String| Err(Error::TensorMap(what));
    if !base.is_multiple_of(16) {
        return fail(format!("base address: expected a multiple of 16, found {base:#x}"));
    }
    if strides.len() + 1 != extents.len() {
        return fail(format!(
            "strides: expected {} for {} dimensions, found {}",
            extents.len() - 1,
            extents.len(),
            strides.len()
        ));
    }
    if let Some(stride) = strides.iter().find(|s| !s.is_multiple_of(16) || **s >= 1 << 40) {
        return fail(format!("stride in bytes: expected a multiple of 16 below 2^40, found {stride}"));
    }
    if let Some(extent) = extents.iter().find(|e| **e == 0 || **e > 1 << 32) {
        return fail(format!("extent: expected 1 to 2^32, found {extent}"));
    }
    if let Some(side) = tile.iter().find(|s| **s == 0 || **s > 256) {
        return fail(format!("box side: expected 1 to 256, found {side}"));
    }
    let row = u64::from(tile[0]) * element.bytes();
    let span = match swizzle {
        Swizzle::None => u64::MAX,
        Swizzle::B32 => 32,
        Swizzle::B64 => 64,
        Swizzle::B128 => 128,
    };
    if !row.is_multiple_of(16) || row > span {
        return fail(format!(
            "box row in bytes: expected a multiple of 16 within the span of {swizzle:?}, found {row}"
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(base: u64, stride: u64, tile: [u32; 2], swizzle: Swizzle) -> String {
        TensorMap::tiled(ElementType::Bf16, base, [1024, 512], &[stride], tile, swizzle, L2Promotion::B256)
            .unwrap_err()
            .to_string()
    }

    #[test]
    fn errors_name_the_violated_rule() {
        assert!(map(8, 2048, [64, 64], Swizzle::B128).contains("16, found 0x8"));
        assert!(map(16, 2044, [64, 64], Swizzle::B128).contains("2^40, found 2044"));
        assert!(map(16, 2048, [64, 512], Swizzle::B128).contains("256, found 512"));
        assert!(map(16, 2048, [128, 64], Swizzle::B128).contains("B128, found 256"));
        assert!(map(16, 2048, [20, 64], Swizzle::None).contains("None, found 40"));
    }

    #[test]
    fn valid_shapes_reach_the_driver() {
        // No driver is loaded in this process, so the encoding call itself fails.
        assert!(map(16, 2048, [64, 64], Swizzle::B128).contains("cuTensorMapEncodeTiled(Bf16 [1024, 512]"));
    }
}
