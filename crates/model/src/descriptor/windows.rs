//! The layers in which attention has a window.

use super::{DescriptorError, MAX_WINDOW_LAYERS};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// A sliding window: in some layers, a token attends to itself and the `size - 1` tokens before it (Beltagy et al., 2020,
/// arXiv:2004.05150; `sliding_window` in transformers).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Windows {
    /// Tokens of the window, the token itself included.
    pub size: usize,
    /// The layers.
    pub pattern: WindowPattern,
}

/// The layers with a window: a letter for each layer, S if it has the window and L if it attends to all earlier tokens, as in
/// nanochat.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct WindowPattern {
    /// Bit i: layer i has the window.
    windowed: u128,
    layers: u8,
}

impl Windows {
    /// Returns the window of a layer.
    pub fn of(self, layer: usize) -> Option<usize> {
        self.pattern.has_window(layer).then_some(self.size)
    }

    pub(super) fn check(self, layers: usize) -> Result<(), DescriptorError> {
        let Self { size, pattern } = self;
        if size == 0 {
            return Err(DescriptorError::Zero("window"));
        }
        if layers > MAX_WINDOW_LAYERS {
            return Err(DescriptorError::TooMany {
                name: "layers of a model with windows",
                most: MAX_WINDOW_LAYERS,
                found: layers,
            });
        }
        if pattern.windowed == 0 {
            return Err(DescriptorError::NoWindow);
        }
        if usize::from(pattern.layers) != layers {
            return Err(DescriptorError::PatternLength { layers, pattern: pattern.to_string() });
        }
        Ok(())
    }
}

impl WindowPattern {
    /// A window in every layer.
    pub const ALL: Self = Self { windowed: 1, layers: 1 };

    /// Creates the pattern of layers, at most 128; `true` is a window.
    pub fn of_layers(layers: impl IntoIterator<Item = bool>) -> Option<Self> {
        let mut pattern = Self { windowed: 0, layers: 0 };
        for windowed in layers {
            if usize::from(pattern.layers) == MAX_WINDOW_LAYERS {
                return None;
            }
            pattern.windowed |= u128::from(windowed) << pattern.layers;
            pattern.layers += 1;
        }
        (pattern.layers > 0).then_some(pattern)
    }

    /// Reports whether a layer has the window.
    pub fn has_window(self, layer: usize) -> bool {
        layer < usize::from(self.layers) && self.windowed >> layer & 1 != 0
    }

    /// Returns the pattern, repeated or cut to that many layers.
    pub fn repeated(self, layers: usize) -> Self {
        let layers = layers.clamp(1, MAX_WINDOW_LAYERS);
        let of_layer = |layer| self.has_window(layer % usize::from(self.layers));
        Self::of_layers((0..layers).map(of_layer)).unwrap_or(self)
    }
}

impl FromStr for WindowPattern {
    type Err = DescriptorError;

    fn from_str(text: &str) -> Result<Self, DescriptorError> {
        let error = || DescriptorError::Pattern(text.to_owned());
        let letter = |letter: char| match letter {
            'S' => Ok(true),
            'L' => Ok(false),
            _ => Err(error()),
        };
        let layers = text.chars().map(letter).collect::<Result<Vec<_>, _>>()?;
        Self::of_layers(layers).ok_or_else(error)
    }
}

impl TryFrom<String> for WindowPattern {
    type Error = DescriptorError;

    fn try_from(text: String) -> Result<Self, DescriptorError> {
        text.parse()
    }
}

impl From<WindowPattern> for String {
    fn from(pattern: WindowPattern) -> Self {
        pattern.to_string()
    }
}

impl fmt::Display for WindowPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (0..usize::from(self.layers)).try_for_each(|layer| f.write_str(if self.has_window(layer) { "S" } else { "L" }))
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Descriptor, Overrides};
    use super::*;

    #[test]
    fn patterns_repeat_and_survive_their_text() {
        let pattern: WindowPattern = "SSSL".parse().unwrap();
        assert_eq!(pattern.repeated(10).to_string(), "SSSLSSSLSS");
        assert_eq!(pattern.repeated(2).to_string(), "SS");
        assert_eq!([0, 3, 4].map(|layer| pattern.has_window(layer)), [true, false, false]);
        let long = pattern.repeated(128);
        assert_eq!(long.to_string().parse(), Ok(long));
        let windows = Windows { size: 64, pattern };
        let text = serde_json::to_string(&windows).unwrap();
        assert_eq!(text, r#"{"size":64,"pattern":"SSSL"}"#);
        assert_eq!(serde_json::from_str::<Windows>(&text).unwrap(), windows);
        for text in ["", "s", "SX", &"S".repeat(129)] {
            assert_eq!(text.parse::<WindowPattern>(), Err(DescriptorError::Pattern(text.to_owned())));
        }
    }

    #[test]
    fn windows_of_a_shape() {
        let with = |name: &str, overrides| name.parse::<Descriptor>().unwrap().with(overrides);
        let none = Overrides::default();
        let window = Overrides { window: Some(256), ..none };
        let d12 = with("d12", window).unwrap();
        assert_eq!(d12.windows.unwrap().pattern.to_string(), "S".repeat(12));
        assert_eq!((d12.window(0, 1024), d12.window(0, 256)), (Some(256), None));
        assert!(!d12.is_gpt2());
        let mixed = Overrides { window_pattern: "SSSL".parse().ok(), layers: Some(6), ..window };
        let mixed = with("llama3:1b", mixed).unwrap();
        assert_eq!(mixed.windows.unwrap().pattern.to_string(), "SSSLSS");
        // 256 - 256² / 2048 = 224 keys in five layers, 512 in one.
        let all = Descriptor { windows: None, ..mixed };
        let fewer = 12 * 2048 * 5 * (512 - 224);
        assert_eq!(all.flops_per_token(1024) - mixed.flops_per_token(1024), fewer);
        assert_eq!(mixed.flops_of_documents(&[1024; 3]), mixed.flops_per_token(1024));
        // A document of 512 tokens has half of the keys of one of 1,024, but two of them have as many tokens as one.
        let halves = (2 * all.flops_per_token(512) + 2 * all.flops_per_token(1024)) / 4;
        assert!(all.flops_of_documents(&[512, 512, 1024]).abs_diff(halves) <= 1);
        // Another number of layers repeats the pattern.
        let longer = mixed.with(Overrides { layers: Some(9), ..none }).unwrap();
        assert_eq!(longer.windows.unwrap().pattern.to_string(), "SSSLSSSSS");

        let error = |overrides| with("d12", overrides).unwrap_err().to_string();
        assert_eq!(error(Overrides { window: Some(0), ..none }), "window: expected at least 1, found 0");
        let pattern = Overrides { window_pattern: "LS".parse().ok(), ..none };
        assert_eq!(error(pattern), "window pattern: expected the size of the window too, found none; add --window");
        let full = Overrides { window_pattern: "L".parse().ok(), ..window };
        assert!(error(full).starts_with("window pattern: expected a layer with a window (S), found none"));
        let deep = error(Overrides { layers: Some(129), ..window });
        assert_eq!(deep, "layers of a model with windows: expected at most 128, found 129");
    }
}
