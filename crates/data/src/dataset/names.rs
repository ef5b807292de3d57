//! The file names of shards, which are llm.c's.

/// The names of the shards of a data set: `[NAME_]{train,val}[_NNNNNN].bin`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShardNames {
    /// Name of the data set; empty for `data text`.
    pub data_set: &'static str,
    /// Whether the names contain a number. Otherwise, each split is one file.
    pub numbered: bool,
}

impl ShardNames {
    /// The names of `data text`.
    pub const TEXT: Self = Self { data_set: "", numbered: true };
    /// The names of Tiny Shakespeare.
    pub const TINY_SHAKESPEARE: Self = Self { data_set: "tiny_shakespeare", numbered: false };
    /// The names of TinyStories.
    pub const TINY_STORIES: Self = Self { data_set: "TinyStories", numbered: false };
    /// The names of FineWeb.
    pub const FINEWEB: Self = Self { data_set: "fineweb", numbered: true };
    /// The names of FineWeb-Edu.
    pub const EDU_FINEWEB: Self = Self { data_set: "edu_fineweb", numbered: true };

    /// The names of ClimbMix.
    pub const CLIMBMIX: Self = Self { data_set: "climbmix", numbered: true };

    const ALL: [Self; 6] =
        [Self::TEXT, Self::TINY_SHAKESPEARE, Self::TINY_STORIES, Self::FINEWEB, Self::EDU_FINEWEB, Self::CLIMBMIX];

    /// Returns the data set of a shard. Returns `None` for other file names, such as `hellaswag_val.bin` and `train.bin`.
    pub fn of_shard(file: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|names| {
            let split = file.strip_suffix(".bin").and_then(|stem| stem.strip_prefix(&names.prefix()));
            let number = split.and_then(|rest| rest.strip_prefix("train").or_else(|| rest.strip_prefix("val")));
            number.is_some_and(|number| match number.strip_prefix('_') {
                Some(digits) if names.numbered => digits.len() >= 6 && digits.bytes().all(|b| b.is_ascii_digit()),
                _ => number.is_empty() && !names.numbered,
            })
        })
    }

    /// Returns the file name of a shard. `split` is `train` or `val`.
    pub fn file(self, split: &str, number: usize) -> String {
        self.with_number(split, &format!("{number:06}"))
    }

    /// Returns a glob pattern for the shards of a split.
    pub fn pattern(self, split: &str) -> String {
        self.with_number(split, "*")
    }

    fn with_number(self, split: &str, number: &str) -> String {
        let prefix = self.prefix();
        if self.numbered { format!("{prefix}{split}_{number}.bin") } else { format!("{prefix}{split}.bin") }
    }

    fn prefix(self) -> String {
        if self.data_set.is_empty() { String::new() } else { format!("{}_", self.data_set) }
    }
}
