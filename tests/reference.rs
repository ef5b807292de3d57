//! References that other programs have computed, in safetensors files.

use safetensors::SafeTensors;
use std::fs;
use std::path::Path;

/// The values of a reference.
pub struct Reference(Vec<u8>);

impl Reference {
    pub fn read(path: &Path) -> Self {
        Self(fs::read(path).unwrap())
    }

    pub fn floats(&self, name: &str) -> Vec<f32> {
        let file = SafeTensors::deserialize(&self.0).unwrap();
        let data = file.tensor(name).unwrap_or_else(|error| panic!("{name}: {error}")).data().to_vec();
        data.as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect()
    }

    pub fn ints(&self, name: &str) -> Vec<i32> {
        self.floats(name).into_iter().map(|bits| bits.to_bits().cast_signed()).collect()
    }
}

/// Asserts that values agree within 1e-5 of the largest expected value.
#[track_caller]
pub fn assert_close(name: &str, found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len(), "{name}");
    let scale = expected.iter().fold(0.0f32, |max, x| max.max(x.abs()));
    let worst = found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(worst <= 1e-5 * scale, "{name}: largest difference {worst}, largest value {scale}");
}
