//! The connections of the cluster: given bandwidths, or measured sweeps.

use anyhow::{Context, Result, ensure};
use planner::cluster::Members;
use planner::fit::{Fitted, fit};
use planner::measured::Sweep;
use planner::{Cluster, Links};
use serde::Serialize;
use std::path::{Path, PathBuf};

/// The connections that the flags describe.
pub struct Given<'a> {
    pub intra: Option<f64>,
    pub inter: Option<f64>,
    pub sweeps: &'a [PathBuf],
}

/// The connections, and where they come from.
#[derive(Clone, Debug, Serialize)]
pub struct Connections {
    pub links: Links,
    /// Whether nodes have several GPUs, and whether there are several nodes.
    #[serde(skip)]
    pub used: [bool; 2],
    pub intra_fit: Option<SweepFit>,
    pub inter_fit: Option<SweepFit>,
}

/// A sweep to which bandwidths were fitted.
#[derive(Clone, Debug, Serialize)]
pub struct SweepFit {
    pub file: PathBuf,
    pub machine: String,
    pub members: Members,
    pub operations: [Fitted; 3],
}

impl SweepFit {
    /// Returns the largest median error of an operation.
    pub fn median_error(&self) -> f64 {
        self.operations.iter().map(|fitted| fitted.median_error).fold(0.0, f64::max)
    }
}

impl Connections {
    /// Fits the sweeps. A sweep of more ranks than a node has replaces `--inter`, any other `--intra`.
    pub fn new(given: &Given, cluster: Cluster) -> Result<Self> {
        let (mut intra_fit, mut inter_fit) = (None, None);
        for file in given.sweeps {
            let sweep = Sweep::read(file).context("--collectives")?;
            let several_nodes = sweep.ranks > cluster.gpus_per_node;
            let per_node = if several_nodes { cluster.gpus_per_node } else { sweep.ranks };
            ensure!(
                sweep.ranks.is_multiple_of(per_node),
                "--collectives {}: expected full nodes of {per_node} GPUs, found {} ranks; set --gpus-per-node",
                file.display(),
                sweep.ranks
            );
            let members = Cluster::new(sweep.ranks, per_node)?.world();
            let operations = fit(&sweep, members).context("--collectives")?;
            let fitted = SweepFit { file: file.clone(), machine: sweep.machine, members, operations };
            let place = if several_nodes { &mut inter_fit } else { &mut intra_fit };
            ensure!(
                place.is_none(),
                "--collectives {}: expected one sweep inside a node and one between nodes, found two of the same kind; omit one",
                file.display()
            );
            *place = Some(fitted);
        }
        let used = [cluster.gpus_per_node > 1, cluster.gpus > cluster.gpus_per_node];
        let intra = bandwidths(("--intra", "450GB/s"), given.intra, intra_fit.as_ref(), used[0])?;
        let inter = bandwidths(("--inter", "400Gb/s"), given.inter, inter_fit.as_ref(), used[1])?;
        Ok(Self { links: Links { intra, inter }, used, intra_fit, inter_fit })
    }
}

fn bandwidths(
    (flag, example): (&str, &str),
    given: Option<f64>,
    fitted: Option<&SweepFit>,
    used: bool,
) -> Result<[f64; 3]> {
    ensure!(
        given.is_none() || fitted.is_none(),
        "{flag}: expected either this flag or a sweep, found both; omit this flag, or {} from --collectives",
        fitted.map_or(Path::new(""), |fitted| &fitted.file).display()
    );
    if let Some(fitted) = fitted {
        // Between nodes, the ranks of a node share what was measured.
        let share = if fitted.members.spans_nodes() { fitted.members.per_node as f64 } else { 1.0 };
        return Ok(fitted.operations.map(|operation| operation.bandwidth / share));
    }
    let missing =
        || format!("{flag}: expected a bandwidth, found none; add {flag} {example}, or a sweep with --collectives");
    // Without connections there are no collectives.
    let unused = Some(f64::MAX).filter(|_| !used);
    given.or(unused).map(|bandwidth| [bandwidth; 3]).with_context(missing)
}
