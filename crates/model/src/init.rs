//! Initial weights, bit-identical to PyTorch's from the same seed.

use super::descriptor::Init;
use super::params::{Output, ParamKind};
use super::{Decoder, Descriptor, Param};
use anyhow::Result;
use engine::Engine;
use engine::ops::Master;
use rng::Mt19937;
use system::progress::{self, Unit};

/// Default seed of the initial weights.
pub const SEED: u32 = 42;

/// Standard deviation of the weights of [`Init::Gpt2`] and [`Init::Normal`], before residual projections are scaled down.
const STD: f32 = 0.02;

/// Standard deviations of [`Init::DepthScaled`] and [`Init::Nanochat`].
const WTE_STD: f32 = 0.8;
const HEAD_STD: f32 = 0.001;
/// Factor of the MLP's first layer.
const FC_FACTOR: f32 = 0.4;
/// Bound of the weights of gates, which are not negative.
const LARGEST_GATE: f32 = 0.02;

/// Generates the initial values of every parameter and passes them to `write`, one tensor of one layer at a time. `values` holds the
/// whole tensor, including zeros for the padded rows of the vocabulary. An error of `write` ends the generation.
///
/// Matrices and embeddings are distributed as [`Init`] states, gates uniformly in 0 to 0.02. Weights of norms are 1, biases 0, factors as
/// in nanochat. The adapters of a linear layer of C inputs have a uniformly distributed A in ±C^-1/2, as PEFT's `reset_lora_parameters`,
/// and a B of 0.
pub fn generate(
    descriptor: &Descriptor,
    seed: u32,
    mut write: impl FnMut(Param, usize, &[f32]) -> Result<()>,
) -> Result<()> {
    let drawn = matrices(descriptor).map(|(_, _, values, _)| values as u64);
    let progress = progress::start("initializing weights", Unit::Count, drawn.sum());
    let mut rng = Mt19937::new(seed);
    let mut buffer = Vec::new();
    for (param, layer, values, std) in matrices(descriptor) {
        buffer.clear();
        buffer.resize(param.len(descriptor), 0.0);
        match (param.kind(), descriptor.adapters) {
            (ParamKind::AdapterA, Some(adapters)) => {
                let columns = param.shape(descriptor).1;
                for adapter in buffer.chunks_mut(adapters.padded_rank() * columns) {
                    let drawn = adapter[..adapters.rank * columns].iter_mut();
                    drawn.for_each(|value| *value = (2.0 * rng.next_f32() - 1.0) * std);
                }
            }
            (ParamKind::Gate, _) => {
                for value in &mut buffer {
                    *value = rng.next_f32() * LARGEST_GATE;
                }
            }
            (kind, _)
                if descriptor.init == Init::Nanochat
                    && !matches!(kind, ParamKind::TokenEmbedding | ParamKind::Head) =>
            {
                let bound = 3f32.sqrt() * std;
                buffer[..values].iter_mut().for_each(|value| *value = (2.0 * rng.next_f32() - 1.0) * bound);
            }
            _ => rng.normal(&mut buffer[..values], std),
        }
        write(param, layer, &buffer)?;
        progress.add(buffer.len() as u64);
    }
    let vectors = descriptor.params().filter(|param| !param.is_matrix());
    for param in vectors {
        for layer in param.layers(descriptor) {
            let value = match param.kind() {
                ParamKind::NormWeight => 1.0,
                ParamKind::Factor => first_factor(descriptor, param, layer),
                _ => 0.0,
            };
            write(param, layer, &vec![value; param.len(descriptor)])?;
        }
    }
    Ok(())
}

/// Returns nanochat's initial value of a factor. The two factors of a layer decrease with depth.
fn first_factor(d: &Descriptor, param: Param, layer: usize) -> f32 {
    let depth = layer as f32 / (d.layers - 1).max(1) as f32;
    match param {
        Param::ResidualScale => 1.15 - 0.10 * depth,
        Param::EmbeddingScale => 0.20 - 0.15 * depth,
        Param::BackoutScale => 0.2,
        _ => 0.0,
    }
}

impl Decoder {
    /// Writes the initial weights of a fresh model to the parts that this rank keeps.
    pub fn initialize(&self, engine: &mut dyn Engine, seed: u32) -> Result<()> {
        let params = self.param_store();
        let in_fp8 = self.weights_in_fp8();
        generate(&self.descriptor, seed, |param, layer, values| {
            if in_fp8.contains(&(param, layer)) {
                self.write_in_fp8(engine, param, layer, values)?;
            }
            if self.layout.holds(param) { params.write(engine, param, layer, values) } else { Ok(()) }
        })?;
        // Master weights start from the rounded weights, as in llm.c.
        let masters = match self.training.map(|training| training.master) {
            Some(Master::F32(masters)) => self.state_store(masters),
            Some(Master::Remainder(remainders)) => return engine.zero(remainders),
            Some(Master::None) | None => return Ok(()),
        };
        if !self.zero.shards_optimizer() {
            return engine.cast(masters.all(), self.params);
        }
        self.layout.units().try_for_each(|unit| engine.cast(masters.own(unit), params.own(unit)))
    }
}

/// Returns the random tensors in generation order: tensor, layer, number of random values, standard deviation.
fn matrices(descriptor: &Descriptor) -> impl Iterator<Item = (Param, usize, usize, f32)> + use<> {
    let d = *descriptor;
    // Each of the 2 L projections adds to the variance of the residual stream.
    let residual = STD * (1.0 / (2.0 * d.layers as f32).sqrt());
    let fan_in = 1.0 / (d.channels as f32).sqrt();
    let std = move |param: Param| match (d.init, param.kind()) {
        (_, ParamKind::AdapterB) | (Init::DepthScaled | Init::Nanochat, ParamKind::Linear(_, Output::Residual)) => 0.0,
        (_, ParamKind::AdapterA) => 1.0 / (param.shape(&d).1 as f32).sqrt(),
        (Init::Gpt2, ParamKind::Linear(_, Output::Residual)) => residual,
        (Init::Gpt2 | Init::Normal, _) => STD,
        (Init::DepthScaled | Init::Nanochat, ParamKind::TokenEmbedding) => WTE_STD,
        (Init::DepthScaled | Init::Nanochat, ParamKind::Head) => HEAD_STD,
        (Init::DepthScaled | Init::Nanochat, ParamKind::Linear(_, Output::Activation)) => FC_FACTOR * fan_in,
        (Init::DepthScaled | Init::Nanochat, _) => fan_in,
    };
    let drawn = move |param: Param, layer| {
        let rows = if param.has_vocab_rows() { d.vocab } else { param.shape(&d).0 };
        let values = if std(param) == 0.0 { 0 } else { rows * param.shape(&d).1 };
        (param, layer, values, std(param))
    };
    let of_model = d.params().filter(|param| param.is_matrix());
    let embeddings = of_model.clone().filter(|param| !param.layered()).map(move |param| drawn(param, 0));
    let in_layer = move |layer| move |param: &Param| param.layered() && param.is_in_layer(&d, layer);
    let of_layer = move |layer| of_model.clone().filter(in_layer(layer)).map(move |param| drawn(param, layer));
    embeddings.chain((0..d.layers).flat_map(of_layer))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_tensor_is_written_once_with_its_distribution() {
        let descriptor = Descriptor::gpt2(3, 2, 64, 40, 200).unwrap();
        let mut seen = BTreeSet::new();
        generate(&descriptor, SEED, |param, layer, values| {
            assert!(seen.insert((param.name(), layer)), "{} of layer {layer} twice", param.name());
            assert_eq!(values.len(), param.len(&descriptor));
            let drawn = if param == Param::Wte { &values[..200 * 64] } else { values };
            assert!(values[drawn.len()..].iter().all(|x| *x == 0.0), "padding");
            let n = drawn.len() as f64;
            let mean = drawn.iter().map(|&x| f64::from(x)).sum::<f64>() / n;
            let std = (drawn.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum::<f64>() / n).sqrt();
            let (expected_mean, expected_std) = match param {
                Param::Wte | Param::Wpe | Param::Qkvw | Param::Fcw => (0.0, 0.02),
                Param::Attprojw | Param::Fcprojw => (0.0, 0.02 / 6f64.sqrt()),
                Param::Ln1w | Param::Ln2w | Param::Lnfw => (1.0, 0.0),
                _ => (0.0, 0.0),
            };
            let name = param.name();
            assert!((mean - expected_mean).abs() <= 4.0 * expected_std / n.sqrt(), "{name}: mean {mean}");
            assert!((std - expected_std).abs() <= 4.0 * expected_std / (2.0 * n).sqrt(), "{name}: deviation {std}");
            Ok(())
        })
        .unwrap();
        assert_eq!(seen.len(), 4 + 3 * 12);
    }

    #[test]
    fn the_first_weights_are_seed_42s() {
        let descriptor: Descriptor = "d6".parse().unwrap();
        let mut wte = Vec::new();
        let stop = generate(&descriptor, SEED, |param, _, values| {
            assert_eq!(param, Param::Wte);
            wte.extend_from_slice(&values[..4]);
            anyhow::bail!("enough")
        });
        assert_eq!(stop.unwrap_err().to_string(), "enough");
        let bits: Vec<u32> = wte.iter().map(|x| x.to_bits()).collect();
        assert_eq!(bits, [1025366614, 1022602552, 1016304337, 3173809148]);
    }
}
