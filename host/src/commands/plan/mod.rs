//! `plan`: predicts memory, communication and speed of training on a cluster.

mod connections;
mod print;

use super::bench::table::Json;
use super::json;
use super::resources::{Fp8Flags, StructureFlags};
use super::train::DEFAULT_SEQ;
use crate::values::{count, fraction, level, zero_stage};
use anyhow::{Context, Result, bail};
use connections::Connections;
use distributed::ShardGroups;
use engine::open::{Precision, planning_engine};
use interchange::ModelSource;
use model::{Descriptor, MasterWeights, Moments, Optimizer, Recompute};
use planner::compute::Assumptions;
use planner::measured::{MeasuredStep, Storage};
use planner::quantity::{arithmetic_rate, bandwidth, bytes};
use planner::{Cluster, Planned, Request, schedule, search};
use serde_json::json;
use std::path::{Path, PathBuf};

const COMPUTE: &str = "Compute";
const SETTINGS: &str = "Settings to compare";

/// Predict memory, communication and speed on a cluster for each ZeRO stage, shard size, micro-batch and recomputation level
///
/// Pass measurements of your GPU: `bench step --json` with --measured, and `bench collectives --json` with --collectives. Values without a
/// measurement are assumed, and the output lists them.
#[derive(Clone, Debug, clap::Args)]
pub struct Plan {
    /// Model size, for example d12, d24 or llama3:8b; or a model file (.bin) or directory, as in `train`
    #[arg(short = 'e', long, value_name = "NAME|FILE|DIR", default_value = "d12")]
    model: String,
    /// Number of GPUs
    #[arg(long, value_name = "N", value_parser = count)]
    gpus: usize,
    /// GPUs per node [default: 8, or all if there are fewer]
    #[arg(long, value_name = "N", value_parser = count)]
    gpus_per_node: Option<usize>,
    /// Bus bandwidth between the GPUs of a node, such as 450GB/s
    #[arg(long, value_name = "RATE", value_parser = bandwidth)]
    intra: Option<f64>,
    /// Bandwidth between nodes for each GPU, such as 50GB/s or 400Gb/s
    #[arg(long, value_name = "RATE", value_parser = bandwidth)]
    inter: Option<f64>,
    /// Files of `bench collectives --json`, measured on one node or on several. They replace --intra or --inter
    #[arg(long, value_name = "FILE", num_args = 1..)]
    collectives: Vec<PathBuf>,
    /// Memory of a GPU, such as 80GB or 80GiB
    #[arg(long, value_name = "SIZE", default_value = "80GB", value_parser = bytes)]
    hbm: usize,

    /// Tokens in a sequence [default: 1024, or the model's maximum if that is smaller]
    #[arg(short = 't', long, value_parser = count)]
    seq: Option<usize>,
    /// Tokens in a step over all GPUs [default: one micro-batch on each GPU]
    #[arg(short = 'd', long, value_name = "TOKENS", value_parser = count)]
    total_batch: Option<usize>,
    /// Steps of a run, to predict its time
    #[arg(short = 'x', long, value_name = "N", value_parser = count)]
    steps: Option<usize>,

    /// Sequences in a micro-batch, separated by commas
    #[arg(short, long, value_delimiter = ',', default_value = "1,2,4,8,16,32,64", value_parser = count, help_heading = SETTINGS)]
    batch: Vec<usize>,
    /// Recomputation levels, separated by commas
    #[arg(short, long, value_delimiter = ',', default_value = "0,1,2,3", value_parser = level::<Recompute>, help_heading = SETTINGS)]
    recompute: Vec<Recompute>,
    /// ZeRO stages, separated by commas
    #[arg(short = 'z', long, value_delimiter = ',', default_value = "0,1,2,3", value_parser = zero_stage, help_heading = SETTINGS)]
    zero_stage: Vec<u8>,
    /// Numbers of ranks that shard together, separated by commas [default: the GPUs of one node, and all GPUs]
    #[arg(long, value_name = "N", value_delimiter = ',', value_parser = count, help_heading = SETTINGS)]
    shard_size: Vec<usize>,
    /// The ranks of a shard group share the experts, as in `train`
    #[arg(long, help_heading = SETTINGS)]
    expert_parallel: bool,

    /// Optimizer of the layers' matrices, as in `train`
    #[arg(long, value_enum, default_value = "adamw", help_heading = COMPUTE)]
    optimizer: Optimizer,
    /// Storage of f32 master weights, as in `train`
    #[arg(short = 'w', long, value_name = "0|1|2", default_value = "1", help_heading = COMPUTE)]
    master_weights: MasterWeights,
    /// Type of the optimizer's moments, as in `train`
    #[arg(long, value_name = "TYPE", value_enum, default_value = "f32", help_heading = COMPUTE)]
    moments: Moments,
    /// Number format of weights and activations
    #[arg(long, value_enum, default_value = "bf16", help_heading = COMPUTE)]
    precision: Precision,
    #[command(flatten)]
    structure: StructureFlags,
    #[command(flatten)]
    fp8: Fp8Flags,
    /// Files of `bench step --json` on one GPU
    #[arg(long, value_name = "FILE", num_args = 1.., help_heading = COMPUTE)]
    measured: Vec<PathBuf>,
    /// Without measurements: model FLOPs utilization of a GPU while it computes
    #[arg(long, value_name = "FRACTION", default_value = "0.5", value_parser = utilization, help_heading = COMPUTE)]
    mfu: f64,
    /// Peak throughput of a GPU, from which the MFU is also computed
    #[arg(long, value_name = "RATE", default_value = "989TFLOPS", value_parser = arithmetic_rate, help_heading = COMPUTE)]
    peak: f64,
    /// Without measurements: memory bandwidth of a GPU
    #[arg(long, value_name = "RATE", default_value = "3.35TB/s", value_parser = bandwidth, help_heading = COMPUTE)]
    memory_bandwidth: f64,
    /// Seconds that kernels lose while they overlap with one second of a collective; the default was measured on two H200s
    #[arg(long, value_name = "FACTOR", default_value_t = schedule::SLOWDOWN, value_parser = slowdown, help_heading = COMPUTE)]
    slowdown: f64,

    /// Print every setting instead of the best for each stage and shard size
    #[arg(long)]
    all: bool,
    /// Print all settings as JSON
    #[arg(long, conflicts_with = "all")]
    json: bool,
}

/// Parses a fraction above 0.
fn utilization(text: &str) -> Result<f64, &'static str> {
    fraction(text).ok().filter(|x| *x > 0.0).ok_or("expected a number above 0 and at most 1")
}

fn slowdown(text: &str) -> Result<f64, &'static str> {
    let factor = text.parse().ok().filter(|x: &f64| x.is_finite() && *x >= 0.0);
    factor.ok_or("expected a finite number of at least 0")
}

/// Runs the command.
pub fn run(options: &Plan) -> Result<()> {
    let descriptor = options.descriptor()?;
    let gpus_per_node = options.gpus_per_node.unwrap_or(options.gpus.min(8));
    let cluster = Cluster::new(options.gpus, gpus_per_node)?;
    let connections = options.connections(cluster)?;
    let request = options.request(descriptor, cluster, &connections)?;
    let planned = request.plan(&mut *planning_engine(options.precision))?;
    let best = search::best(&planned);
    if options.json {
        json::print(&json!({
            "model": options.model,
            "descriptor": descriptor,
            "parameters": descriptor.parameters(),
            "seq": request.seq,
            "cluster": cluster,
            "connections": connections,
            "hbm_bytes": options.hbm,
            "slowdown": options.slowdown,
            "assumptions": print::assumptions(&request, &connections, &planned),
            "settings": planned,
            "best": best,
            "steps": options.steps,
        }))?;
    } else {
        print::header(options, &request, &connections, &planned)?;
        print::settings(&planned, best, options.all)?;
        if let Some(best) = best {
            print::details(&planned[best], options.steps)?;
        }
    }
    if best.is_none() {
        bail!(nothing_fits(&planned, options.hbm));
    }
    Ok(())
}

fn nothing_fits(planned: &[Planned], hbm: usize) -> String {
    let smallest = planned.iter().min_by_key(|planned| planned.memory.total);
    let found = smallest.map_or_else(String::new, |planned| {
        let flags = print::flags(planned);
        format!(", found at least {} GiB ({flags})", print::gib(planned.memory.total))
    });
    format!(
        "--hbm: expected a setting that fits {} GiB{found}; add a larger --shard-size, --recompute 3, --batch 1, --master-weights 2 \
         or --moments bf16",
        print::gib(hbm)
    )
}

impl Plan {
    fn descriptor(&self) -> Result<Descriptor> {
        let descriptor = match self.model.parse::<Descriptor>() {
            Ok(descriptor) => descriptor,
            Err(unknown) if !Path::new(&self.model).exists() => return Err(unknown).context("--model"),
            Err(_) => ModelSource::open(Path::new(&self.model)).context("--model")?.descriptor(),
        };
        self.structure.apply(descriptor)
    }

    fn connections(&self, cluster: Cluster) -> Result<Connections> {
        let given = connections::Given { intra: self.intra, inter: self.inter, sweeps: &self.collectives };
        Connections::new(&given, cluster)
    }

    fn request(&self, descriptor: Descriptor, cluster: Cluster, connections: &Connections) -> Result<Request> {
        let mut shard_sizes = self.shard_size.clone();
        if shard_sizes.is_empty() {
            shard_sizes = vec![cluster.gpus_per_node, cluster.gpus];
        }
        for &size in &shard_sizes {
            ShardGroups::new(cluster.gpus, size)?;
        }
        let read = |path: &PathBuf| MeasuredStep::read(path).context("--measured");
        let mut request = Request {
            descriptor,
            cluster,
            links: connections.links,
            slowdown: self.slowdown,
            hbm: self.hbm,
            seq: self.seq.unwrap_or(descriptor.max_seq_len.min(DEFAULT_SEQ)),
            total_batch: self.total_batch,
            batches: self.batch.clone(),
            recompute: self.recompute.clone(),
            stages: self.zero_stage.clone(),
            shard_sizes,
            expert_parallel: self.expert_parallel,
            precision: self.precision,
            fp8: self.fp8.resolve(self.precision)?,
            storage: Storage { optimizer: self.optimizer, master_weights: self.master_weights, moments: self.moments },
            measured: self.measured.iter().map(read).collect::<Result<_>>()?,
            assumptions: Assumptions { mfu: self.mfu, peak: self.peak, memory_bandwidth: self.memory_bandwidth },
        };
        for list in [&mut request.batches, &mut request.shard_sizes] {
            list.sort_unstable();
            list.dedup();
        }
        request.stages.sort_unstable();
        request.stages.dedup();
        request.recompute.sort_unstable();
        request.recompute.dedup();
        Ok(request)
    }
}

/// Tables of this command are not saved: `--json` prints everything.
const NOT_SAVED: fn() -> Json = Json::default;
