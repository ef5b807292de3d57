//! Storage of the optimizer state beside bf16 parameters, for every optimizer: its types, and the writing of weights in them.
//!
//! An engine that stores f32 has moments in f32 and no master weights, whatever is selected.

use super::decoder::{Decoder, Training};
use super::params::Param;
use super::sharding::Store;
use engine::ops::Master;
use engine::tensor::{DType, Tensor};
use engine::{Engine, Result};
use gpu::remainder;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::ops::Range;
use std::str::FromStr;

/// Storage of the f32 master weights of bf16 parameters. The numbers 0 and 1 are llm.c's (`-w`). Files contain `false`, `true` or
/// `"remainder"`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "Setting", try_from = "Setting")]
pub enum MasterWeights {
    /// None: updates are rounded stochastically to bf16.
    None,
    /// A copy in f32.
    #[default]
    F32,
    /// 16-bit remainders, which are exact ([`gpu::remainder`]).
    Remainder,
}

/// The forms of [`MasterWeights`] in a file.
#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum Setting {
    Switch(bool),
    Number(u8),
    Name(String),
}

impl From<MasterWeights> for Setting {
    fn from(masters: MasterWeights) -> Self {
        match masters {
            MasterWeights::None => Self::Switch(false),
            MasterWeights::F32 => Self::Switch(true),
            MasterWeights::Remainder => Self::Name(masters.to_string()),
        }
    }
}

impl TryFrom<Setting> for MasterWeights {
    type Error = &'static str;

    fn try_from(setting: Setting) -> Result<Self, Self::Error> {
        match setting {
            Setting::Switch(on) => Ok(on.into()),
            Setting::Number(number) => number.to_string().parse(),
            Setting::Name(name) => name.parse(),
        }
    }
}

impl From<bool> for MasterWeights {
    fn from(f32_copy: bool) -> Self {
        if f32_copy { Self::F32 } else { Self::None }
    }
}

impl FromStr for MasterWeights {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "0" | "false" | "off" | "none" => Ok(Self::None),
            "1" | "true" | "on" | "f32" => Ok(Self::F32),
            "2" | "remainder" => Ok(Self::Remainder),
            _ => Err("expected 0 (none), 1 (f32) or 2 (remainder)"),
        }
    }
}

impl fmt::Display for MasterWeights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "none",
            Self::F32 => "f32",
            Self::Remainder => "remainder",
        })
    }
}

/// Storage type of the optimizer's moments: AdamW's m and v, and Muon's momentum.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Moments {
    /// f32
    #[default]
    F32,
    /// bf16, rounded stochastically
    Bf16,
    /// 8 bits, rounded stochastically; eight neighbors share an exponent (AdamW only)
    #[value(name = "8bit")]
    #[serde(rename = "8bit")]
    EightBit,
}

impl Moments {
    /// Returns the types of m and v in an engine that stores `float`.
    pub(super) const fn dtypes(self, float: DType) -> [DType; 2] {
        match (self, float) {
            (Self::EightBit, DType::Bf16) => [DType::Block8 { signed: true }, DType::Block8 { signed: false }],
            (Self::Bf16, _) => [float; 2],
            (Self::F32 | Self::EightBit, _) => [DType::F32; 2],
        }
    }

    /// Returns the name: `f32`, `bf16` or `8bit`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::EightBit => "8bit",
        }
    }

    /// Reports whether this is the default, which files leave out.
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

/// The part of a weight that a tensor stores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    /// The weight, rounded to nearest if the tensor is bf16.
    Whole,
    /// The parameter of [`remainder::split`].
    Upper,
    /// The remainder of [`remainder::split`].
    Remainder,
}

/// A destination of f32 or bf16 weights that are read from a file.
#[derive(Clone, Copy, Debug)]
pub struct WeightStore<'a> {
    store: Store<'a>,
    part: Part,
}

impl<'a> WeightStore<'a> {
    /// Creates a destination that receives the values themselves, for example moments.
    pub fn whole(store: Store<'a>) -> Self {
        Self { store, part: Part::Whole }
    }

    /// Returns the elements of a tensor that this rank keeps, and where they are.
    pub fn held(&self, param: Param, layer: usize) -> Option<(Range<usize>, Tensor)> {
        self.store.held(param, layer)
    }

    /// Writes values to a tensor that [`held`](Self::held) returned, or to a part of it.
    pub fn write(&self, engine: &mut dyn Engine, to: Tensor, values: &[f32]) -> Result<()> {
        let halves = |half: fn((f32, u16)) -> u16| -> Vec<u8> {
            values.iter().flat_map(|&value| half(remainder::split(value)).to_le_bytes()).collect()
        };
        match self.part {
            Part::Whole => engine.write(to, values),
            Part::Upper => engine.write_bytes(to, &halves(|(param, _)| (param.to_bits() >> 16) as u16)),
            Part::Remainder => engine.write_bytes(to, &halves(|(_, remainder)| remainder)),
        }
    }
}

impl Training {
    /// Returns the tensors of the optimizer state with their names. Each has the layout of the parameters, or this rank's shard of
    /// it.
    pub fn state(&self) -> Vec<(&'static str, Tensor)> {
        let master = self.master.tensor().map(|master| ("master", master));
        [("m", self.m), ("v", self.v)].into_iter().chain(master).collect()
    }
}

impl Decoder {
    /// Returns the destinations of weights: the parameters, and the master weights if there are any.
    pub fn weight_stores(&self) -> Vec<WeightStore<'_>> {
        let params = WeightStore::whole(self.param_store());
        match self.master() {
            Master::None => vec![params],
            Master::F32(_) => [params].into_iter().chain(self.master_stores()).collect(),
            Master::Remainder(_) => self.master_stores(),
        }
    }

    /// Returns the destinations of f32 master weights. They are the parameters if these are f32, and none if there are no master
    /// weights. Remainders belong to parameters that are rounded accordingly, so both are destinations.
    pub fn master_stores(&self) -> Vec<WeightStore<'_>> {
        match self.master() {
            Master::None if self.params.dtype == DType::F32 => vec![WeightStore::whole(self.param_store())],
            Master::None => Vec::new(),
            Master::F32(masters) => vec![WeightStore::whole(self.state_store(masters))],
            Master::Remainder(remainders) => vec![
                WeightStore { store: self.param_store(), part: Part::Upper },
                WeightStore { store: self.state_store(remainders), part: Part::Remainder },
            ],
        }
    }

    fn master(&self) -> Master {
        self.training.map_or(Master::None, |training| training.master)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::ValueEnum;
    use serde_json::{from_str, to_string};

    #[test]
    fn master_weights_have_numbers_names_and_the_switches_of_old_files() {
        let [none, f32, remainder] = [MasterWeights::None, MasterWeights::F32, MasterWeights::Remainder];
        for (texts, expected) in [
            (&["0", "false", "off", "none"][..], none),
            (&["1", "true", "on", "f32"], f32),
            (&["2", "remainder"], remainder),
        ] {
            assert!(texts.iter().all(|text| text.parse() == Ok(expected)), "{texts:?}");
        }
        let parsed = |text: &str| from_str::<MasterWeights>(text).map_err(|error| error.to_string());
        for (text, expected) in [("false", none), ("0", none), ("true", f32), ("1", f32), ("2", remainder)] {
            assert_eq!(parsed(text), Ok(expected), "{text}");
        }
        assert_eq!(parsed("\"remainder\""), Ok(remainder));
        assert_eq!(parsed("3").unwrap_err(), "expected 0 (none), 1 (f32) or 2 (remainder)");
        assert_eq!([none, f32, remainder].map(|it| to_string(&it).unwrap()), ["false", "true", "\"remainder\""]);
        for moments in [Moments::F32, Moments::Bf16, Moments::EightBit] {
            assert_eq!(to_string(&moments).unwrap(), format!("\"{}\"", moments.name()));
            assert_eq!(moments.to_possible_value().unwrap().get_name(), moments.name());
        }
    }
}
