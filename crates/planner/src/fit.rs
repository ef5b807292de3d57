//! Fits the speed of connections to a measured sweep, by least squares of the relative error.

use crate::cluster::Members;
use crate::links::{Link, Operation, fastest};
use crate::measured::Sweep;
use anyhow::{Context, Result};
use serde::Serialize;

/// A fitted operation.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Fitted {
    /// The operation.
    pub operation: Operation,
    /// The speed of its connections.
    pub link: Link,
    /// Median of the relative errors.
    pub median_error: f64,
    /// Largest relative error.
    pub largest_error: f64,
}

/// Rounds after which the choice of protocols does not change any more.
const ROUNDS: usize = 100;

/// Fits every operation of a sweep over the ranks `members`.
pub fn fit(sweep: &Sweep, members: Members) -> Result<[Fitted; 3]> {
    let mut fitted = Vec::new();
    for operation in Operation::MEASURED {
        let points: Vec<_> = sweep.points.iter().filter(|point| point.0 == operation).map(|&(_, b, t)| (b, t)).collect();
        let link = fit_points(&points, operation, members).with_context(|| {
            let (file, name) = (sweep.file.display(), operation.name());
            format!("{file}: expected times of {name} that grow with the size, found {} sizes; measure again", points.len())
        })?;
        let mut errors: Vec<f64> = points.iter().map(|&(b, t)| error(b, t, operation, members, link)).collect();
        errors.sort_by(f64::total_cmp);
        let (median_error, largest_error) = (errors[errors.len() / 2], errors[errors.len() - 1]);
        fitted.push(Fitted { operation, link, median_error, largest_error });
    }
    fitted.try_into().ok().context("one fit for each operation")
}

fn error(bytes: f64, seconds: f64, operation: Operation, members: Members, link: Link) -> f64 {
    (fastest(operation, bytes, members, link).seconds(link) / seconds - 1.0).abs()
}

/// Returns the bandwidth and the scale of latencies, or `None` if no positive ones fit.
///
/// For given protocols the time is linear in 1 / bandwidth and in the scale. The protocols follow from both, so they alternate.
fn fit_points(points: &[(f64, f64)], operation: Operation, members: Members) -> Option<Link> {
    let &(bytes, seconds) = points.iter().max_by(|a, b| a.0.total_cmp(&b.0))?;
    let mut link = Link { bandwidth: bytes * operation.bus_factor(members.ranks) / seconds, latency_scale: 1.0 };
    for _ in 0..ROUNDS {
        // Normal equations of sum ((scale · latency + bus_bytes / bandwidth + fixed) / seconds - 1)².
        let (mut ll, mut lb, mut bb, mut l, mut b) = (0.0, 0.0, 0.0, 0.0, 0.0);
        for &(bytes, seconds) in points {
            let terms = fastest(operation, bytes, members, link);
            let (latency, bus) = (terms.latency / seconds, terms.bus_bytes / seconds);
            let rest = 1.0 - terms.fixed / seconds;
            ll += latency * latency;
            lb += latency * bus;
            bb += bus * bus;
            l += latency * rest;
            b += bus * rest;
        }
        let determinant = ll * bb - lb * lb;
        let (scale, inverse) = ((l * bb - b * lb) / determinant, (b * ll - l * lb) / determinant);
        if !(scale > 0.0 && inverse > 0.0 && scale.is_finite() && inverse.is_finite()) {
            return None;
        }
        let next = Link { bandwidth: 1.0 / inverse, latency_scale: scale };
        let settled = (next.bandwidth / link.bandwidth - 1.0).abs() + (next.latency_scale / link.latency_scale - 1.0).abs();
        link = next;
        if settled < 1e-12 {
            break;
        }
    }
    Some(link)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Cluster, Links};
    use std::path::PathBuf;

    fn sweep(links: Links, members: Members, noise: f64) -> Sweep {
        let sizes = (0..21).map(|i| f64::from(1024 << i));
        let points = Operation::MEASURED.into_iter().flat_map(|operation| {
            let time = move |bytes| links.time(operation, bytes, members).seconds;
            sizes.clone().enumerate().map(move |(i, b)| (operation, b, time(b) * if i % 2 == 0 { 1.0 + noise } else { 1.0 - noise }))
        });
        Sweep { file: PathBuf::from("sweep.json"), machine: String::new(), ranks: members.ranks, points: points.collect() }
    }

    #[test]
    fn a_fit_finds_the_connections_of_a_sweep() {
        let members = Cluster::new(8, 8).unwrap().world();
        let mut links = Links::new(321e9, 50e9);
        links.intra[1] = Link { bandwidth: 300e9, latency_scale: 1.3 };
        for fitted in fit(&sweep(links, members, 0.0), members).unwrap() {
            let expected = links.of(fitted.operation, members);
            assert!((fitted.link.bandwidth / expected.bandwidth - 1.0).abs() < 1e-6, "{fitted:?}");
            assert!((fitted.link.latency_scale / expected.latency_scale - 1.0).abs() < 1e-6, "{fitted:?}");
            assert!(fitted.largest_error < 1e-6);
        }
        for fitted in fit(&sweep(links, members, 0.05), members).unwrap() {
            let expected = links.of(fitted.operation, members);
            assert!((fitted.link.bandwidth / expected.bandwidth - 1.0).abs() < 0.05, "{fitted:?}");
            assert!((0.03..0.12).contains(&fitted.largest_error), "{fitted:?}");
        }
    }

    #[test]
    fn sweeps_without_a_bandwidth_are_rejected() {
        let members = Cluster::new(2, 2).unwrap().world();
        let mut constant = sweep(Links::new(321e9, 50e9), members, 0.0);
        constant.points.truncate(1);
        let error = fit(&constant, members).unwrap_err().to_string();
        assert!(error.starts_with("sweep.json: expected times of all-reduce that grow with the size, found 1 sizes"), "{error}");
    }
}
