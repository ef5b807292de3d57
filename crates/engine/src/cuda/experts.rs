//! Mixtures of experts: the router, and the copies between the order of tokens and that of experts.

use super::executor::EmulatedGpu;
use super::quantize::quantize;
use super::{Cuda, Float, MatmulBackend, shared_bytes};
use crate::gemm::GroupOperands;
use crate::ops::{
    ChoiceGradients, Combine, Dispatch, Fp8Format, Groups, Quantize, Route, RouteBackward, Router, RouterScores,
};
use crate::tensor::{DType, Tensor};
use crate::{Result, Workload};
use anyhow::ensure;
use cuda_std::{E4m3, E5m2, Fp8, Global, GlobalMut};
use gpu::experts::{self as kernels, BackwardSizes, Local, MAX_EXPERTS};
use gpu::quantize::{tile_and_maxima, transpose_grid};

/// Maximum number of experts of a token: the lanes of a warp.
const MAX_ACTIVE: usize = 32;

/// Returns the 32-bit words of scratch memory.
pub(super) fn scratch(workload: &Workload) -> usize {
    workload.router.map_or(0, |router| kernels::chunks(workload.routed_tokens * router.active) * router.count)
}

/// Checks that there are kernels for the experts of a model.
pub(super) fn check<T: Float>(workload: &Workload, gpu: EmulatedGpu) -> Result<()> {
    let Some(router) = workload.router else { return Ok(()) };
    check_router(router)?;
    ensure!(
        T::DTYPE == DType::Bf16 && gpu.hopper && gpu.matmul != MatmulBackend::Cublaslt,
        "experts: expected the bf16 kernels of a Hopper GPU, found {} {}; use --precision bf16 and --matmul auto, or --device cpu",
        T::DTYPE.name(),
        if gpu.hopper { "with --matmul cublaslt" } else { "on another GPU" }
    );
    Ok(())
}

fn check_router(Router { count, active, .. }: Router) -> Result<()> {
    ensure!(
        count <= MAX_EXPERTS && (1..=count.min(MAX_ACTIVE)).contains(&active),
        "experts: expected at most {MAX_EXPERTS}, and at most {MAX_ACTIVE} for each token, found {count} and {active}; use --device cpu"
    );
    Ok(())
}

/// Returns the router as kernels take it.
fn router_of(Router { count, active, scores, normalized, .. }: Router) -> kernels::Router {
    kernels::Router {
        experts: count as u32,
        active: active as u32,
        sigmoid: u32::from(scores == RouterScores::Sigmoid),
        normalized: u32::from(normalized),
    }
}

/// Calls the instance of a kernel that has room for this number of experts.
macro_rules! instance {
    ($kernel:ident::<$t:ty>($experts:expr; $($argument:expr),* $(,)?)) => {
        match $experts {
            ..=32 => kernels::$kernel::<$t, 1>($($argument),*),
            ..=64 => kernels::$kernel::<$t, 2>($($argument),*),
            ..=128 => kernels::$kernel::<$t, 4>($($argument),*),
            ..=256 => kernels::$kernel::<$t, 8>($($argument),*),
            _ => kernels::$kernel::<$t, 16>($($argument),*),
        }
    };
}

impl<T: Float> Cuda<T> {
    /// Returns the address of words that kernels take as unsigned.
    fn words(&self, name: &str, tensor: Tensor, len: usize) -> Result<GlobalMut<u32>> {
        Ok(GlobalMut::from_address(self.arena.address::<i32>(name, tensor, len)?.addr() as u64))
    }

    /// Returns the end of the last group's rows, of `rows` rows in expert order.
    pub(super) fn end_of_groups(&self, Groups { layout, count }: Groups, rows: usize) -> Result<Global<u32>> {
        Ok(self.words("groups", layout, kernels::Groups { count, rows }.words())?.reader().skip(count))
    }

    /// Returns the groups of a linear layer with `rows` rows in the order of experts.
    pub(super) fn groups(&self, Groups { layout, count }: Groups, rows: usize) -> Result<GroupOperands> {
        let len = kernels::Groups { count, rows }.words();
        Ok(GroupOperands { description: self.words("groups", layout, len)?.pointer().addr() as u64, count })
    }
}

pub(super) fn route<T: Float>(cuda: &mut Cuda<T>, op: Route) -> Result<()> {
    let Route { logits, bias, experts, weights, positions, sources, groups, loads, router, trains } = op;
    check_router(router)?;
    let Router { count, active, local, .. } = router;
    let local = Local { first: local.first as u32, count: local.count as u32 };
    let rows = logits.len / count;
    let entries = rows * active;
    let layout = router.layout(rows);
    let chunks = kernels::chunks(entries) as u32;
    let scratch = cuda.scratch(chunks as usize * count)?;
    let counts = cuda.output::<f32>("counts", scratch, chunks as usize * count)?;
    let counts = GlobalMut::<u32>::from_address(counts.pointer().addr() as u64);
    let experts = cuda.output::<i32>("experts", experts, entries)?;
    let weights = cuda.output("weights", weights, entries)?;
    let (positions, sources) =
        (cuda.output("positions", positions, entries)?, cuda.output("sources", sources, layout.rows)?);
    let (groups, loads) = (cuda.words("groups", groups, layout.words())?, cuda.words("loads", loads, count)?);
    let logits = cuda.input::<T>("logits", logits, rows * count)?;
    let bias = cuda.optional_input::<T>("bias", bias, count)?;
    let (rows_32, entries, count_32, of) = (rows as u32, entries as u32, count as u32, router_of(router));
    let launch = instance!(route_choose::<T>(count; experts, weights, logits, bias, rows_32, of));
    cuda.launch(launch, [kernels::route_choose_grid(rows), 1, 1], 0)?;
    let (ids, shared) = (experts.reader(), shared_bytes(kernels::shared));
    cuda.launch(kernels::route_count(counts, ids, entries, count_32), [chunks, 1, 1], shared)?;
    let (p, fewest) = (layout.rows as u32, u32::from(trains));
    let launch = kernels::route_groups(groups, loads, counts, sources, chunks, count_32, local, p, fewest);
    cuda.launch(launch, [1; 3], shared)?;
    let (sums, described) = (counts.reader(), groups.reader());
    let launch = kernels::route_place(positions, sources, ids, sums, described, entries, count_32, local);
    cuda.launch(launch, [chunks, 1, 1], shared)
}

pub(super) fn dispatch<T: Float>(cuda: &mut Cuda<T>, op: &Dispatch) -> Result<()> {
    let Dispatch { out, inp, sources, groups, weights, c, active, fp8 } = *op;
    if let Some(quantized) = fp8
        && let Some((amax, scale)) = cuda.given_scale(&quantized)?
    {
        return match quantized.format {
            Fp8Format::E4m3 => dispatch_to_fp8::<T, E4m3>(cuda, op, &quantized, amax, scale),
            Fp8Format::E5m2 => dispatch_to_fp8::<T, E5m2>(cuda, op, &quantized, amax, scale),
        };
    }
    let (rows, p) = (inp.len / c, sources.len);
    let launch = kernels::dispatch::<T>(
        cuda.output("out", out, p * c)?,
        cuda.input("inp", inp, rows * c)?,
        cuda.input("sources", sources, p)?,
        cuda.optional_input("weights", weights, rows * active)?,
        cuda.end_of_groups(groups, p)?,
        c as u32,
        active as u32,
    );
    cuda.launch(launch, [kernels::grid(p), 1, 1], 0)?;
    fp8.map_or(Ok(()), |quantized| quantize(cuda, quantized))
}

/// Copies rows and quantizes them with a given scale.
fn dispatch_to_fp8<T: Float, F: Fp8>(
    cuda: &mut Cuda<T>,
    op: &Dispatch,
    quantized: &Quantize,
    amax: GlobalMut<u32>,
    scale: Global<f32>,
) -> Result<()> {
    let Dispatch { inp, sources, groups, weights, c, active, .. } = *op;
    let (rows, p) = (inp.len / c, sources.len);
    let output = |name, tensor: Option<Tensor>| {
        tensor.map_or(Ok(GlobalMut::null()), |tensor| cuda.fp8::<F>(name, tensor, p * c))
    };
    let launch = kernels::dispatch_to_fp8::<F>(
        output("out", quantized.out)?,
        output("transposed", quantized.transposed)?,
        amax,
        cuda.input("inp", inp, rows * c)?,
        cuda.input("sources", sources, p)?,
        cuda.optional_input("weights", weights, rows * active)?,
        cuda.end_of_groups(groups, p)?,
        scale,
        p as u32,
        c as u32,
        active as u32,
    );
    cuda.launch(launch, transpose_grid(p, c), shared_bytes(tile_and_maxima))
}

pub(super) fn combine<T: Float>(cuda: &mut Cuda<T>, op: Combine) -> Result<()> {
    let Combine { out, residual, inp, weights, positions, c, active } = op;
    let rows = out.len / c;
    let launch = kernels::combine::<T>(
        cuda.output("out", out, rows * c)?,
        cuda.optional_output("residual", residual, rows * c)?,
        cuda.input("inp", inp, inp.len)?,
        cuda.optional_input("weights", weights, rows * active)?,
        cuda.input("positions", positions, rows * active)?,
        rows as u32,
        c as u32,
        active as u32,
    );
    cuda.launch(launch, [kernels::grid(rows), 1, 1], 0)
}

pub(super) fn choice_gradients<T: Float>(cuda: &mut Cuda<T>, op: ChoiceGradients) -> Result<()> {
    let ChoiceGradients { out, positions, preactivation, dpreactivation, channels } = op;
    let (entries, wide) = (out.len, preactivation.len);
    let launch = kernels::choice_gradients::<T>(
        cuda.output("out", out, entries)?,
        cuda.input("positions", positions, entries)?,
        cuda.input("preactivation", preactivation, wide)?,
        cuda.input("dpreactivation", dpreactivation, wide)?,
        entries as u32,
        channels as u32,
    );
    cuda.launch(launch, [kernels::grid(entries), 1, 1], 0)
}

pub(super) fn route_backward<T: Float>(cuda: &mut Cuda<T>, op: &RouteBackward) -> Result<()> {
    let RouteBackward { dlogits, dbias, logits, experts, weights, gradients, loads, tokens, .. } = *op;
    let RouteBackward { router, aux_loss, z_loss, .. } = *op;
    check_router(router)?;
    let Router { count, active, .. } = router;
    let (rows, entries) = (logits.len / count, logits.len / count * active);
    let dlogits = cuda.output("dlogits", dlogits, rows * count)?;
    let logits: Global<T> = cuda.input("logits", logits, rows * count)?;
    let (experts, weights) = (cuda.input("experts", experts, entries)?, cuda.input("weights", weights, entries)?);
    let gradients = cuda.input("gradients", gradients, entries)?;
    let loads = cuda.words("loads", loads, count)?.reader();
    let of = router_of(router);
    let sizes = BackwardSizes { rows: rows as u32, tokens: tokens as u32, aux_loss, z_loss };
    let launch = instance!(route_backward::<T>(
        count; dlogits, logits, experts, weights, gradients, loads, of, sizes
    ));
    cuda.launch(launch, [kernels::route_choose_grid(rows), 1, 1], 0)?;
    let Some(dbias) = dbias else { return Ok(()) };
    let dbias = cuda.output::<T>("dbias", dbias, count)?;
    cuda.launch(kernels::route_bias_backward(dbias, loads, (tokens * active) as u32, count as u32), [1; 3], 0)
}
