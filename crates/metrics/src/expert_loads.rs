//! The loads of experts: how many tokens the router of a layer gives each of them.

use serde::{Deserialize, Serialize};

/// Statistics of the loads in each layer of a model with experts. They are those of one micro-batch of rank 0.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ExpertLoads {
    /// The largest load of an expert divided by the mean load, rounded to three digits after the point. 1 is an even division.
    pub max_load: Vec<f32>,
    /// Number of experts without a token.
    pub unused: Vec<u32>,
}

impl ExpertLoads {
    /// Returns the statistics of the loads of all experts in each layer.
    pub fn of(loads: &[Vec<u32>]) -> Self {
        let relative = |of_layer: &Vec<u32>| {
            let sum: u32 = of_layer.iter().sum();
            let max = of_layer.iter().max().map_or(0.0, |&max| f64::from(max) * of_layer.len() as f64);
            ((1e3 * max / f64::from(sum.max(1))).round() / 1e3) as f32
        };
        let unused = |of_layer: &Vec<u32>| of_layer.iter().filter(|load| **load == 0).count() as u32;
        Self { max_load: loads.iter().map(relative).collect(), unused: loads.iter().map(unused).collect() }
    }

    /// Returns the mean of the largest loads over the layers.
    pub fn mean(&self) -> f32 {
        self.max_load.iter().sum::<f32>() / self.max_load.len() as f32
    }

    /// Returns the largest load of the worst layer.
    pub fn worst(&self) -> f32 {
        self.max_load.iter().copied().fold(f32::NAN, f32::max)
    }

    /// Returns the number of experts without a token in all layers.
    pub fn all_unused(&self) -> u32 {
        self.unused.iter().fold(0, |sum, unused| sum.saturating_add(*unused))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loads_are_relative_to_their_mean() {
        let loads = ExpertLoads::of(&[vec![3, 3, 3], vec![9, 0, 0], vec![0, 6, 3], vec![2, 2, 3]]);
        let expected = ExpertLoads { max_load: vec![1.0, 3.0, 2.0, 1.286], unused: vec![0, 2, 1, 0] };
        assert_eq!(loads, expected);
        assert!((loads.mean() - 1.8215).abs() < 1e-6);
        assert_eq!((loads.worst(), loads.all_unused()), (3.0, 3));
        assert_eq!(ExpertLoads::of(&[vec![0; 3]]).max_load, [0.0]);
    }
}
