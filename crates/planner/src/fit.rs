//! Fits the bus bandwidth to a measured sweep, by least squares of the relative error.
//!
//! A sweep launches some collectives at once and divides the time of all by their number. So the time of one is
//!
//! ```text
//! max(launch, overhead / repetitions + latency + bytes over the bus / bandwidth)
//! ```
//!
//! The host needs `launch` to launch one, and `overhead` passes before the first one starts. Neither counts in a training step, where
//! the host launches ahead of the GPU. The latency is NCCL's ([`links`](crate::links)).

use crate::cluster::Members;
use crate::links::{Operation, fastest};
use crate::measured::{Point, Sweep};
use anyhow::{Context, Result};
use serde::Serialize;

/// The fit of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Fitted {
    /// The operation.
    pub operation: Operation,
    /// Bus bandwidth in bytes per second.
    pub bandwidth: f64,
    /// Seconds that the host needs to launch one.
    pub launch: f64,
    /// Seconds before the first one starts.
    pub overhead: f64,
    /// Median of the relative errors.
    pub median_error: f64,
    /// Largest relative error.
    pub largest_error: f64,
}

/// Rounds after which the choice of protocols does not change any more.
const ROUNDS: usize = 100;

/// Fits every operation of a sweep over the ranks `members`.
pub fn fit(sweep: &Sweep, members: Members) -> Result<[Fitted; 3]> {
    let mut all = Vec::new();
    for operation in Operation::MEASURED {
        let points: Vec<Point> = sweep.points.iter().filter(|point| point.operation == operation).copied().collect();
        let mut fitted = fit_points(&points, operation, members).with_context(|| {
            let (file, name, count) = (sweep.file.display(), operation.name(), points.len());
            format!("{file}: expected times of {name} that grow with the size, found {count} sizes without growth; measure up to 1G")
        })?;
        let error = |point: &Point| (fitted.predict(point, members) / point.seconds - 1.0).abs();
        let mut errors: Vec<f64> = points.iter().map(error).collect();
        errors.sort_by(f64::total_cmp);
        (fitted.median_error, fitted.largest_error) = (errors[errors.len() / 2], errors[errors.len() - 1]);
        all.push(fitted);
    }
    all.try_into().ok().context("one fit for each operation")
}

impl Fitted {
    /// Returns the time of a point without the limit of launches.
    fn on_the_bus(&self, point: &Point, members: Members) -> f64 {
        let terms = fastest(self.operation, point.bytes, members, self.bandwidth);
        self.overhead / point.repetitions + terms.seconds(self.bandwidth)
    }

    fn predict(&self, point: &Point, members: Members) -> f64 {
        self.on_the_bus(point, members).max(self.launch)
    }
}

/// Returns the fit, or `None` if no positive bandwidth fits.
///
/// For a given set of points that launches do not limit, and for given protocols, the time is linear in the overhead and in
/// 1 / bandwidth. Both sets follow from the fit, so they alternate.
fn fit_points(points: &[Point], operation: Operation, members: Members) -> Option<Fitted> {
    let largest = points.iter().max_by(|a, b| a.bytes.total_cmp(&b.bytes))?;
    let launch = points.iter().map(|point| point.seconds).fold(f64::INFINITY, f64::min);
    let bandwidth = largest.bytes * operation.bus_factor(members.ranks) / largest.seconds;
    let mut fitted = Fitted { operation, bandwidth, launch, overhead: 0.0, median_error: 0.0, largest_error: 0.0 };
    for _ in 0..ROUNDS {
        let (slow, launched): (Vec<&Point>, Vec<&Point>) =
            points.iter().partition(|point| fitted.on_the_bus(point, members) > fitted.launch);
        let next = fitted.refit(&slow, &launched, members)?;
        let settled = next == fitted;
        fitted = next;
        if settled {
            break;
        }
    }
    Some(fitted)
}

impl Fitted {
    fn refit(&self, slow: &[&Point], launched: &[&Point], members: Members) -> Option<Self> {
        // Minimizes sum ((overhead / repetitions + latency + bytes / bandwidth) / seconds - 1)².
        let (mut oo, mut ob, mut bb, mut o, mut b) = (0.0, 0.0, 0.0, 0.0, 0.0);
        for point in slow {
            let terms = fastest(self.operation, point.bytes, members, self.bandwidth);
            let overhead = 1.0 / (point.repetitions * point.seconds);
            let bytes = terms.bus_bytes / point.seconds;
            let rest = 1.0 - (terms.latency + terms.fixed) / point.seconds;
            oo += overhead * overhead;
            ob += overhead * bytes;
            bb += bytes * bytes;
            o += overhead * rest;
            b += bytes * rest;
        }
        let determinant = oo * bb - ob * ob;
        let mut overhead = (o * bb - b * ob) / determinant;
        let mut inverse = (b * oo - o * ob) / determinant;
        // A negative overhead, or one size only: the bandwidth alone.
        if !(overhead > 0.0 && inverse > 0.0 && inverse.is_finite()) {
            (overhead, inverse) = (0.0, b / bb);
        }
        // Minimizes sum (launch / seconds - 1)².
        let inverses = launched.iter().map(|point| 1.0 / point.seconds);
        let squares: f64 = inverses.clone().map(|inverse| inverse * inverse).sum();
        let launch = if launched.is_empty() { 0.0 } else { inverses.sum::<f64>() / squares };
        (inverse > 0.0 && inverse.is_finite()).then_some(Self { bandwidth: 1.0 / inverse, launch, overhead, ..*self })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Cluster, Links};
    use std::path::PathBuf;

    /// A sweep of a host that launches a collective in 100 us.
    fn sweep(links: Links, members: Members, overhead: f64, noise: f64) -> Sweep {
        let mut points = Vec::new();
        for operation in Operation::MEASURED {
            for i in 0..21 {
                let bytes = f64::from(1024 << i);
                let repetitions = (f64::from(1 << 28) / bytes).clamp(2.0, 50.0);
                let seconds = links.time(operation, bytes, members).seconds + overhead / repetitions;
                let noise = if i % 2 == 0 { 1.0 + noise } else { 1.0 - noise };
                points.push(Point { operation, bytes, seconds: seconds.max(1e-4) * noise, repetitions });
            }
        }
        Sweep { file: PathBuf::from("sweep.json"), machine: String::new(), ranks: members.ranks, points }
    }

    #[test]
    fn a_fit_finds_the_bandwidths_of_a_sweep() {
        let members = Cluster::new(8, 8).unwrap().world();
        let links = Links { intra: [321e9, 300e9, 280e9], inter: [50e9; 3] };
        for overhead in [0.0, 4e-4] {
            for (fitted, expected) in
                fit(&sweep(links, members, overhead, 0.0), members).unwrap().iter().zip(links.intra)
            {
                assert!((fitted.bandwidth / expected - 1.0).abs() < 1e-6, "{fitted:?}");
                assert!(
                    (fitted.launch / 1e-4 - 1.0).abs() < 1e-6 && (fitted.overhead - overhead).abs() < 1e-9,
                    "{fitted:?}"
                );
                assert!(fitted.largest_error < 1e-6, "{fitted:?}");
            }
        }
        for (fitted, expected) in fit(&sweep(links, members, 4e-4, 0.05), members).unwrap().iter().zip(links.intra) {
            assert!((fitted.bandwidth / expected - 1.0).abs() < 0.05, "{fitted:?}");
            assert!((0.03..0.15).contains(&fitted.largest_error), "{fitted:?}");
        }
    }

    #[test]
    fn sweeps_without_a_bandwidth_are_rejected() {
        let members = Cluster::new(2, 2).unwrap().world();
        let mut none = sweep(Links::new(321e9, 50e9), members, 0.0, 0.0);
        none.points.clear();
        let error = fit(&none, members).unwrap_err().to_string();
        assert!(
            error.starts_with("sweep.json: expected times of all-reduce that grow with the size, found 0 sizes"),
            "{error}"
        );
    }
}
