//! Tensor maps: how the TMA unit of compute capability 9.0 finds a box of a tensor.

use crate::error::{Result, check_with};
use crate::{Error, sys};
use std::ffi::c_int;

/// The type of a tensor's elements; values are the driver's.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ElementType {
    U8 = 0,
    F32 = 7,
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

/// How 16-byte units are permuted within rows of shared memory; the number is the span in bytes.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Swizzle {
    None = 0,
    B32 = 1,
    B64 = 2,
    B128 = 3,
}

/// How much a load brings into L2 at once.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum L2Promotion {
    None = 0,
    B64 = 1,
    B128 = 2,
    B256 = 3,
}

/// A tensor map, to be passed to a kernel by value (64-byte aligned) or through device memory.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorMap(sys::CUtensorMap);

impl TensorMap {
    /// Map of a tensor in device memory at `base` (16-byte aligned), from 1 to 5 dimensions, the contiguous one first.
    ///
    /// `extents` are its sizes in elements; `strides` the distances in bytes between consecutive indices of every
    /// dimension but the first (multiples of 16, below 2^40); `tile` the sizes in elements (at most 256) of the box that
    /// one copy moves. The box's innermost row is a multiple of 16 bytes, and no longer than the swizzle's span. What
    /// lies outside the tensor reads as zero.
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
        // SAFETY: every array has RANK entries (strides one less, as validated); the base is only encoded.
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
        check_with(code, || {
            format!("cuTensorMapEncodeTiled({element:?} {extents:?}, strides {strides:?}, box {tile:?}, {swizzle:?})")
        })?;
        Ok(Self(map))
    }

    pub fn as_words(&self) -> &[u64; 16] {
        &self.0.0
    }
}

/// The driver answers all of these with one code; say which it is.
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
        return fail(format!("the base {base:#x} is not a multiple of 16"));
    }
    if strides.len() + 1 != extents.len() {
        return fail(format!("{} dimensions need {} strides, got {}", extents.len(), extents.len() - 1, strides.len()));
    }
    if let Some(stride) = strides.iter().find(|s| !s.is_multiple_of(16) || **s >= 1 << 40) {
        return fail(format!("the stride of {stride} bytes is not a multiple of 16 below 2^40"));
    }
    if let Some(extent) = extents.iter().find(|e| **e == 0 || **e > 1 << 32) {
        return fail(format!("the extent {extent} is not in 1 ..= 2^32"));
    }
    if let Some(side) = tile.iter().find(|s| **s == 0 || **s > 256) {
        return fail(format!("the box side {side} is not in 1 ..= 256"));
    }
    let row = u64::from(tile[0]) * element.bytes();
    let span = match swizzle {
        Swizzle::None => u64::MAX,
        Swizzle::B32 => 32,
        Swizzle::B64 => 64,
        Swizzle::B128 => 128,
    };
    if !row.is_multiple_of(16) || row > span {
        return fail(format!("the box's row of {row} bytes is not a multiple of 16 within {swizzle:?}'s span"));
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
    fn says_which_rule_is_broken() {
        assert!(map(8, 2048, [64, 64], Swizzle::B128).contains("the base 0x8"));
        assert!(map(16, 2044, [64, 64], Swizzle::B128).contains("stride of 2044"));
        assert!(map(16, 2048, [64, 512], Swizzle::B128).contains("side 512"));
        assert!(map(16, 2048, [128, 64], Swizzle::B128).contains("row of 256 bytes"));
        assert!(map(16, 2048, [20, 64], Swizzle::None).contains("row of 40 bytes"));
    }

    #[test]
    fn good_shapes_reach_the_driver() {
        // No driver is loaded in this process, so the driver's own answer is what comes back.
        assert!(map(16, 2048, [64, 64], Swizzle::B128).contains("cuTensorMapEncodeTiled(Bf16 [1024, 512]"));
    }
}
