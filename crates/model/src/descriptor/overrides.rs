//! Free shapes: a known shape with other sizes.

use super::{Additions, Descriptor, DescriptorError, Experts, WindowPattern, Windows};

/// Sizes that replace those of a known shape.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Overrides {
    /// Number of layers.
    pub layers: Option<usize>,
    /// Number of query heads.
    pub heads: Option<usize>,
    /// Number of key-value heads. By default that of the shape, or one for each head if the shape has as many.
    pub kv_heads: Option<usize>,
    /// Channels of a head. By default the channels are divided among the heads, if one of the two is replaced.
    pub head_size: Option<usize>,
    /// Number of channels.
    pub channels: Option<usize>,
    /// Channels of the MLP, or of one expert. By default 4 C, or 8 C / 3 rounded up to a multiple of 256 if gated, if the channels are
    /// replaced. Those of an expert then grow like the channels, rounded up to a multiple of 64.
    pub mlp_channels: Option<usize>,
    /// Tokens of a window of attention.
    pub window: Option<usize>,
    /// Layers with the window, repeated for all layers. By default all.
    pub window_pattern: Option<WindowPattern>,
    /// Additions of nanochat.
    pub additions: Option<Additions>,
    /// Number of experts. In a shape without experts, each is as large as its MLP.
    pub experts: Option<usize>,
    /// Number of experts of a token.
    pub active_experts: Option<usize>,
}

impl Overrides {
    /// Reports whether a size of a tensor is replaced.
    pub fn has_sizes(&self) -> bool {
        Self { window: None, window_pattern: None, additions: None, ..*self } != Self::default()
    }

    /// Reports whether nothing is replaced.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

impl Descriptor {
    /// Returns the shape with other sizes.
    pub fn with(self, overrides: Overrides) -> Result<Self, DescriptorError> {
        let Overrides { layers, heads, kv_heads, head_size, channels, mlp_channels, window, window_pattern, .. } =
            overrides;
        let Overrides { additions, experts, active_experts, .. } = overrides;
        let (new_heads, new_channels) = (heads.unwrap_or(self.heads), channels.unwrap_or(self.channels));
        let new_head_size = match head_size {
            Some(head_size) => head_size,
            None if heads.is_none() && channels.is_none() => self.head_size,
            None if new_heads == 0 || !new_channels.is_multiple_of(new_heads) => {
                return Err(DescriptorError::HeadsDoNotDivide { heads: new_heads, channels: new_channels });
            }
            None => new_channels / new_heads,
        };
        let default_kv_heads = if self.kv_heads == self.heads { new_heads } else { self.kv_heads };
        let default_mlp_channels = match channels {
            None => self.mlp_channels,
            Some(c) if self.experts.is_some() => {
                c.saturating_mul(self.mlp_channels).div_ceil(self.channels).next_multiple_of(64)
            }
            Some(c) if self.activation.is_gated() => c.saturating_mul(8).div_ceil(3).next_multiple_of(256),
            Some(c) => c.saturating_mul(4),
        };
        let new_layers = layers.unwrap_or(self.layers);
        let pattern = window_pattern.or(self.windows.map(|windows| windows.pattern)).unwrap_or(WindowPattern::ALL);
        let size = window.or(self.windows.map(|windows| windows.size));
        if size.is_none() && window_pattern.is_some() {
            return Err(DescriptorError::PatternWithoutWindow);
        }
        let windows = size.map(|size| Windows { size, pattern: pattern.repeated(new_layers) });
        // Numbers beyond 32 bits exceed the limits, too.
        let narrow = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let new_experts = match (self.experts, experts.map(narrow), active_experts.map(narrow)) {
            (own, None, None) => own,
            (Some(own), count, active) => {
                Some(Experts { count: count.unwrap_or(own.count), active: active.unwrap_or(own.active), ..own })
            }
            (None, Some(count), Some(active)) => Some(Experts { count, active, ..Experts::OF_DENSE_SHAPE }),
            (None, ..) => return Err(DescriptorError::IncompleteExperts),
        };
        Self {
            layers: new_layers,
            heads: new_heads,
            kv_heads: kv_heads.unwrap_or(default_kv_heads),
            head_size: new_head_size,
            channels: new_channels,
            mlp_channels: mlp_channels.unwrap_or(default_mlp_channels),
            windows,
            additions: additions.unwrap_or(self.additions),
            experts: new_experts,
            ..self
        }
        .checked()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(name: &str, overrides: Overrides) -> Result<Descriptor, DescriptorError> {
        name.parse::<Descriptor>().unwrap().with(overrides)
    }

    #[test]
    fn sizes_that_are_not_given_follow_from_the_others() {
        let none = Overrides::default();
        for name in ["d12", "llama3:1b", "qwen3:0.6b", "modern:d12"] {
            assert_eq!(with(name, none), name.parse(), "{name}");
        }
        let overrides = Overrides { layers: Some(2), channels: Some(512), heads: Some(8), ..none };
        let gpt2 = with("d12", overrides).unwrap();
        assert_eq!(gpt2, Descriptor::gpt2(2, 8, 512, 1024, 50257).unwrap());
        let llama = with("llama3:1b", overrides).unwrap();
        assert_eq!((llama.kv_heads, llama.head_size, llama.mlp_channels, llama.layers), (8, 64, 1536, 2));
        let free = Overrides { kv_heads: Some(2), head_size: Some(128), mlp_channels: Some(960), ..overrides };
        let llama = with("llama3:1b", free).unwrap();
        assert_eq!((llama.kv_heads, llama.head_size, llama.mlp_channels), (2, 128, 960));
        assert_eq!((llama.attention_channels(), llama.qkv_channels()), (1024, 1536));
    }

    #[test]
    fn experts_replace_those_of_the_shape_or_its_mlp() {
        let none = Overrides::default();
        let overrides = Overrides { experts: Some(16), active_experts: Some(2), ..none };
        let dense = with("llama3:1b", overrides).unwrap();
        let experts = dense.experts.unwrap();
        assert_eq!((experts.count, experts.active, experts.normalized, dense.mlp_channels), (16, 2, true, 8192));
        let router = 16 * 16 * 2048;
        let mlps = |n: usize| n * 3 * 16 * 2048 * 8192;
        let [whole, one] = [dense.parameters(), with("llama3:1b", none).unwrap().parameters()];
        assert_eq!((whole - one, dense.active_parameters() - one), (router + mlps(15), router + mlps(1)));
        let olmoe = with("olmoe:1b-7b", Overrides { channels: Some(1024), experts: Some(32), ..none }).unwrap();
        let experts = olmoe.experts.unwrap();
        assert_eq!((experts.count, experts.active, experts.normalized, olmoe.mlp_channels), (32, 8, false, 512));
        let error = |name, overrides| with(name, overrides).unwrap_err().to_string();
        assert_eq!(
            error("olmoe:1b-7b", Overrides { experts: Some(4), ..none }),
            "active experts: expected at most 4, found 8"
        );
        assert_eq!(
            error("olmoe:1b-7b", Overrides { experts: Some(1025), ..none }),
            "experts: expected at most 1024, found 1025"
        );
        let text = error("llama3:1b", Overrides { experts: Some(4), ..none });
        assert!(text.starts_with("experts: expected both --experts and --active-experts"), "{text}");
        for (name, found) in [("d12", "GELU with biases"), ("modern:d12", "ReLU²")] {
            let text = error(name, overrides);
            assert!(text.starts_with("experts: expected a gated activation") && text.contains(found), "{text}");
        }
    }

    #[test]
    fn impossible_sizes_are_rejected() {
        let error = |overrides| with("llama3:1b", overrides).unwrap_err().to_string();
        let none = Overrides::default();
        assert_eq!(
            error(Overrides { kv_heads: Some(5), ..none }),
            "key-value heads: expected a divisor of the 32 heads, found 5; choose another number of either"
        );
        let text = error(Overrides { heads: Some(24), ..none });
        assert!(text.starts_with("heads: expected a divisor of the 2048 channels, found 24; choose other"), "{text}");
        assert_eq!(
            error(Overrides { head_size: Some(65), ..none }),
            "head size: expected an even number for rotary embeddings, found 65; choose another head size"
        );
        assert_eq!(error(Overrides { mlp_channels: Some(0), ..none }), "MLP channels: expected at least 1, found 0");
    }
}
