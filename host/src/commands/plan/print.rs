//! Output of `plan`.

use super::connections::{Connections, SweepFit};
use super::{NOT_SAVED, Plan};
use crate::commands::bench::table::{Cell, Column, Table};
use crate::terminal;
use anyhow::Result;
use planner::compute::Source;
use planner::{Planned, Request, search};

const SETTINGS: &[Column] = &[
    Column::text("mark", "", 2),
    Column::number("zero_stage", "zero", 4, 0),
    Column::number("shard_size", "shard", 5, 0),
    Column::number("batch", "batch", 5, 0),
    Column::number("micro_batches", "micro", 5, 0),
    Column::number("recompute", "rec", 3, 0),
    Column::number("gib", "GiB", 7, 1),
    Column::number("step_ms", "step ms", 9, 1),
    Column::number("tokens_per_second", "tokens/s", 10, 0),
    Column::number("mfu", "MFU %", 5, 1),
    Column::number("waiting", "wait %", 6, 1),
    Column::text("bottleneck", "limit", 10),
];

const COLLECTIVES: &[Column] = &[
    Column::text("part", "collectives of a step", 24),
    Column::text("operation", "", 14),
    Column::number("ranks", "ranks", 5, 0),
    Column::number("times", "times", 6, 0),
    Column::number("mb", "MB", 8, 2),
    Column::number("ms", "ms each", 8, 3),
    Column::number("waiting", "wait ms", 8, 2),
];

fn row(name: &str, value: &str) -> Result<()> {
    terminal::line(&format!("{name:<20} {value}"))
}

/// Returns bytes in GiB.
pub fn gib(bytes: usize) -> String {
    format!("{:.1}", bytes as f64 / (1u64 << 30) as f64)
}

/// Returns the flags of `train` that select a setting.
pub fn flags(planned: &Planned) -> String {
    let Planned { zero_stage, shard_size, expert_parallel, batch, recompute, .. } = planned;
    let shard = if *shard_size > 1 { format!(" --shard-size {shard_size}") } else { String::new() };
    let experts = if *expert_parallel { " --expert-parallel" } else { "" };
    format!("--zero-stage {zero_stage}{shard}{experts} --batch {batch} --recompute {}", u8::from(*recompute))
}

/// Prints what is planned, and what is measured or assumed.
pub fn header(options: &Plan, request: &Request, connections: &Connections, planned: &[Planned]) -> Result<()> {
    let (descriptor, cluster) = (request.descriptor, request.cluster);
    row("model", &format!("{}, {} parameters", options.model, descriptor.parameters()))?;
    let nodes = cluster.gpus / cluster.gpus_per_node;
    row(
        "cluster",
        &format!("{} GPUs, {nodes} x {}, {} GiB each", cluster.gpus, cluster.gpus_per_node, gib(request.hbm)),
    )?;
    let step = match request.total_batch {
        Some(tokens) => format!("{tokens} tokens in sequences of {}", request.seq),
        None => format!("one micro-batch on each GPU, sequences of {}", request.seq),
    };
    row("step", &step)?;
    for (i, step) in request.measured.iter().enumerate() {
        let name = if i == 0 { "compute" } else { "" };
        row(name, &format!("{} ({})", step.file.display(), step.machine))?;
    }
    for (name, used, fit) in [
        ("inside a node", connections.used[0], &connections.intra_fit),
        ("between nodes", connections.used[1], &connections.inter_fit),
    ] {
        if let (true, Some(fit)) = (used, fit) {
            row(name, &fitted(fit))?;
        }
    }
    for (i, assumption) in assumptions(request, connections, planned).iter().enumerate() {
        row(if i == 0 { "assumed" } else { "" }, assumption)?;
    }
    terminal::line("")
}

fn fitted(fit: &SweepFit) -> String {
    let rates = fit.operations.map(|operation| format!("{:.0}", operation.bandwidth / 1e9)).join(", ");
    let (file, error) = (fit.file.display(), 100.0 * fit.median_error());
    format!("{rates} GB/s (all-reduce, reduce-scatter, all-gather): {file}, {error:.0} % error")
}

/// Returns what is assumed instead of measured.
pub fn assumptions(request: &Request, connections: &Connections, planned: &[Planned]) -> Vec<String> {
    let mut assumed = Vec::new();
    let has = |source| planned.iter().any(|planned| planned.source == source);
    if has(Source::Assumed) {
        let rates = request.assumptions;
        assumed.push(format!(
            "compute: {:.0} % of {:.0} TFLOPS, {:.2} TB/s; no step measured",
            100.0 * rates.mfu,
            rates.peak / 1e12,
            rates.memory_bandwidth / 1e12
        ));
    }
    if has(Source::Scaled) {
        assumed.push("~: compute scaled from another measured setting".to_owned());
    }
    let [intra, inter] = connections.used;
    if intra && connections.intra_fit.is_none() {
        assumed.push(format!("{:.0} GB/s inside a node, with NCCL's latencies", connections.links.intra[0] / 1e9));
    }
    if inter && connections.inter_fit.is_none() {
        assumed
            .push(format!("{:.0} GB/s per GPU between nodes, with NCCL's latencies", connections.links.inter[0] / 1e9));
    }
    if intra || inter {
        assumed.push(format!("kernels lose {} s per second of overlapping collectives", request.slowdown));
        assumed.push("equally fast GPUs; no data loading, checkpoints, failures".to_owned());
    }
    assumed
}

/// Prints the settings: all of them, or the best for each stage and shard size.
pub fn settings(planned: &[Planned], best: Option<usize>, all: bool) -> Result<()> {
    let shown = if all { (0..planned.len()).collect() } else { search::best_of_each(planned)? };
    let mut table = Table::of("plan", SETTINGS, "", "", &NOT_SAVED());
    table.print_heading()?;
    for index in shown {
        table.row(&cells(&planned[index], Some(index) == best))?;
    }
    let legend = match best {
        Some(_) => "* best    - does not fit",
        None => "- does not fit",
    };
    terminal::line(legend)
}

fn cells(planned: &Planned, best: bool) -> [Cell; 12] {
    let timeline = &planned.timeline;
    let scaled = if planned.source == Source::Scaled { "~" } else { "" };
    let mark = format!("{}{scaled}", if best { "*" } else { "" });
    let fits = |value: f64| if planned.fits { Cell::from(value) } else { Cell::Empty };
    [
        mark.into(),
        usize::from(planned.zero_stage).into(),
        planned.shard_size.into(),
        planned.batch.into(),
        planned.micro_batches.into(),
        usize::from(u8::from(planned.recompute)).into(),
        (planned.memory.total as f64 / (1u64 << 30) as f64).into(),
        fits(1e3 * timeline.step),
        fits(planned.tokens_per_second),
        fits(100.0 * planned.mfu),
        fits(100.0 * (timeline.exposed_intra + timeline.exposed_inter) / timeline.step),
        planned.bottleneck.name().into(),
    ]
}

/// Prints memory, times and collectives of a setting, and the time of a run of `steps` steps.
pub fn details(planned: &Planned, steps: Option<usize>) -> Result<()> {
    let Planned { memory, timeline, .. } = planned;
    terminal::line("")?;
    row("best", &flags(planned))?;
    row("tokens of a step", &planned.total_batch.to_string())?;
    let parts = [
        ("parameters", memory.parameters),
        ("gradients", memory.gradients),
        ("optimizer", memory.optimizer),
        ("activations", memory.activations),
        ("workspace", memory.workspace),
        ("batch", memory.batch),
        ("CUDA graphs, NCCL", memory.reserved),
        ("total", memory.total),
    ];
    terminal::line("memory of a GPU")?;
    for (name, bytes) in parts {
        row(&format!("  {name}"), &format!("{:>9.1} MiB", bytes as f64 / f64::from(1 << 20)))?;
    }
    terminal::line("time of a step")?;
    let communication = timeline.communication;
    let times = [
        ("computing", timeline.compute),
        ("slowed by overlap", timeline.slowed),
        ("wait inside nodes", timeline.exposed_intra),
        ("wait between nodes", timeline.exposed_inter),
        ("total", timeline.step),
    ];
    for (name, seconds) in times {
        row(&format!("  {name}"), &format!("{:>9.2} ms", 1e3 * seconds))?;
    }
    if let Some(steps) = steps {
        let minutes = steps as f64 * timeline.step / 60.0;
        row(&format!("time of {steps} steps"), &format!("{minutes:>9.1} min, without evaluations and checkpoints"))?;
    }
    if communication > 0.0 {
        let (all, hidden) = (1e3 * communication, 100.0 * timeline.hidden());
        row("collectives", &format!("{all:>9.2} ms, {hidden:.0} % hidden behind computation"))?;
        terminal::line("")?;
        let mut table = Table::of("plan", COLLECTIVES, "", "", &NOT_SAVED());
        table.print_heading()?;
        for collective in &timeline.collectives {
            table.row(&[
                collective.part.into(),
                collective.operation.name().into(),
                collective.members.ranks.into(),
                collective.times.into(),
                (collective.bytes as f64 / 1e6).into(),
                (1e3 * collective.seconds_each).into(),
                (1e3 * collective.exposed_seconds).into(),
            ])?;
        }
    }
    Ok(())
}
