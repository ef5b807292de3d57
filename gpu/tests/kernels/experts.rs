//! The choice of experts and the order of experts against a sequential reference, and gradients of the router against differences.

use crate::common::{Tolerance, assert_close, noise, quantized, read, rounded, run, shared_bytes, wide};
use bytemuck::Pod;
use cuda_std::emulate::Memory;
use cuda_std::launch::Launch;
use cuda_std::{E4m3, E5m2, Fp8, Global, GlobalMut, bf16};
use gpu::experts::{self, BackwardSizes, ENTRIES, GROUP_BLOCK, Groups, Local, Router};
use gpu::quantize::{tile_and_maxima, transpose_grid};

tests! {
    kernels of "experts";
    for both types: experts_match_reference, biases_change_only_the_choice, gradients_of_biases_are_exact,
        not_a_number_is_the_smallest_logit, rows_are_copied_and_summed,
        gradients_of_logits_match_differences;
    once: chunks_have_a_common_order, rows_are_quantized;
}

/// Tokens, experts, and experts of a token.
const SHAPES: [[usize; 3]; 7] =
    [[1, 1, 1], [5, 4, 2], [130, 8, 2], [70, 33, 3], [40, 128, 8], [9, 200, 32], [33, 512, 10]];

fn router([experts, active]: [usize; 2], sigmoid: bool, normalized: bool) -> Router {
    let [experts, active, sigmoid, normalized] =
        [experts, active, usize::from(sigmoid), usize::from(normalized)].map(|x| x as u32);
    Router { experts, active, sigmoid, normalized }
}

/// Returns all experts, and parts of them.
fn parts(count: usize) -> Vec<Local> {
    let part = |first: usize, count: usize| Local { first: first as u32, count: count as u32 };
    if count == 1 {
        vec![all(count)]
    } else {
        vec![all(count), part(0, 1), part(count / 3, count / 2), part(count / 2, count - count / 2)]
    }
}

/// Returns all experts.
fn all(count: usize) -> Local {
    Local { first: 0, count: count as u32 }
}

/// Returns the layout of the groups of local experts.
fn layout_of(rows: usize, router: Router, local: Local) -> Groups {
    Groups::new(local.count as usize, rows * router.active.min(local.count) as usize)
}

/// Returns an instance of a kernel that has room for this number of experts.
macro_rules! instance {
    ($kernel:ident::<$t:ty>($experts:expr, $($argument:expr),* $(,)?)) => {
        match $experts {
            ..=32 => experts::$kernel::<$t, 1>($($argument),*),
            ..=64 => experts::$kernel::<$t, 2>($($argument),*),
            ..=128 => experts::$kernel::<$t, 4>($($argument),*),
            ..=256 => experts::$kernel::<$t, 8>($($argument),*),
            _ => experts::$kernel::<$t, 16>($($argument),*),
        }
    };
}

/// Returns logits of which many are equal.
fn logits(rows: usize, count: usize, seed: u32) -> Vec<f64> {
    noise(rows * count, seed).iter().map(|x| (x * 12.0).round() / 4.0).collect()
}

/// The results of routing.
#[derive(Debug, PartialEq)]
struct Routed {
    experts: Vec<i32>,
    weights: Vec<f64>,
    positions: Vec<i32>,
    sources: Vec<i32>,
    groups: Vec<u32>,
    loads: Vec<u32>,
}

/// Routes in the emulator. The bias is empty if there is none.
fn route<T: Tolerance>(logits: &[f64], bias: &[f64], rows: usize, router: Router, local: Local, fewest: u32) -> Routed {
    let (count, entries) = (router.experts as usize, rows * router.active as usize);
    let layout = layout_of(rows, router, local);
    let mut memory = Memory::new();
    let logits = memory.input("logits", &rounded::<T>(logits));
    let bias = if bias.is_empty() { Global::null() } else { memory.input("bias", &rounded::<T>(bias)) };
    let (ids, weights) = (memory.output::<i32>("experts", entries), memory.output("weights", entries));
    let launch = instance!(route_choose::<T>(count, ids, weights, logits, bias, rows as u32, router));
    run(&mut memory, &launch, experts::route_choose_grid(rows), 0);
    let (positions, sources) = (memory.output("positions", entries), memory.output("sources", layout.rows));
    let (groups, loads) = (memory.output("groups", layout.words()), memory.output("loads", count));
    order(&mut memory, [ids, positions, sources], [groups, loads], layout, (entries, router.experts, local), fewest);
    Routed {
        experts: memory.read(ids),
        weights: read(&memory, weights),
        positions: memory.read(positions),
        sources: memory.read(sources),
        groups: memory.read(groups),
        loads: memory.read(loads),
    }
}

/// Computes the order of experts in the emulator.
fn order(
    memory: &mut Memory,
    [ids, positions, sources]: [GlobalMut<i32>; 3],
    [groups, loads]: [GlobalMut<u32>; 2],
    layout: Groups,
    (entries, count, local): (usize, u32, Local),
    fewest: u32,
) {
    let (chunks, shared) = (experts::chunks(entries) as u32, shared_bytes(experts::shared));
    let (entries, p) = (entries as u32, layout.rows as u32);
    let counts = memory.output("counts", (chunks * count) as usize);
    let mut step = |launch: &Launch, grid| run(memory, launch, grid, shared);
    step(&experts::route_count(counts, ids.reader(), entries, count), chunks);
    step(&experts::route_groups(groups, loads, counts, sources, chunks, count, local, p, fewest), 1);
    let (ids, counts, groups) = (ids.reader(), counts.reader(), groups.reader());
    let place = experts::route_place(positions, sources, ids, counts, groups, entries, count, local);
    step(&place, chunks);
}

/// Returns the weights of all experts: their scores.
fn scores(logits: &[f64], sigmoid: bool) -> Vec<f64> {
    if sigmoid {
        return logits.iter().map(|x| 1.0 / (1.0 + (-x).exp())).collect();
    }
    let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = logits.iter().map(|x| (x - max).exp()).sum();
    logits.iter().map(|x| (x - max).exp() / sum).collect()
}

/// Returns the weights of the chosen experts.
fn weights(logits: &[f64], chosen: &[i32], router: Router) -> Vec<f64> {
    let scores = scores(logits, router.sigmoid == 1);
    let scores: Vec<_> = chosen.iter().map(|&expert| scores[expert as usize]).collect();
    let sum = if router.normalized == 1 { scores.iter().sum() } else { 1.0 };
    scores.iter().map(|score| score / sum).collect()
}

/// Routes sequentially.
fn reference(logits: &[f64], bias: &[f64], router: Router, local: Local, fewest: u32) -> Routed {
    let (count, active) = (router.experts as usize, router.active as usize);
    let rows = logits.len() / count;
    let layout = layout_of(rows, router, local);
    let (mut chosen, mut all_weights, mut of_expert) = (Vec::new(), Vec::new(), vec![Vec::new(); count]);
    for (row, logits) in logits.chunks(count).enumerate() {
        let scores = scores(logits, router.sigmoid == 1);
        let biased: Vec<_> = scores.iter().zip(bias).map(|(score, bias)| score + bias).collect();
        let numbers = if bias.is_empty() { logits } else { &biased };
        let mut sorted: Vec<_> = (0..count).collect();
        sorted.sort_by(|&a, &b| numbers[b].total_cmp(&numbers[a]));
        for (choice, &expert) in sorted[..active].iter().enumerate() {
            of_expert[expert].push(row * active + choice);
        }
        let of_row: Vec<_> = sorted[..active].iter().map(|&expert| expert as i32).collect();
        all_weights.extend(weights(logits, &of_row, router));
        chosen.extend(of_row);
    }
    let loads = of_expert.iter().map(|entries| entries.len() as u32).collect();
    let of_local = &of_expert[local.first as usize..][..local.count as usize];
    let (mut positions, mut sources) = (vec![-1; rows * active], Vec::new());
    let (mut starts, mut blocks) = (vec![0], Vec::new());
    for (expert, entries) in of_local.iter().enumerate() {
        for &entry in entries {
            positions[entry] = sources.len() as i32;
            sources.push(entry as i32);
        }
        let end = (starts[expert] as usize + entries.len().max(fewest as usize)).next_multiple_of(GROUP_BLOCK);
        sources.resize(end, -1);
        blocks.resize(end / GROUP_BLOCK, expert as u32);
        starts.push(end as u32);
    }
    sources.resize(layout.rows, -1);
    blocks.resize(layout.rows / GROUP_BLOCK, 0);
    let sizes = of_local.iter().map(|entries| entries.len() as u32);
    let groups = starts.iter().copied().chain(sizes).chain(blocks).collect();
    Routed { experts: chosen, weights: all_weights, positions, sources, groups, loads }
}

fn experts_match_reference<T: Tolerance>() {
    for (i, [rows, count, active]) in SHAPES.into_iter().enumerate() {
        for (sigmoid, normalized) in [(false, false), (false, true), (true, false), (true, true)] {
            let (router, fewest) = (router([count, active], sigmoid, normalized), u32::from(sigmoid));
            let logits = logits(rows, count, i as u32);
            for local in parts(count) {
                let got = route::<T>(&logits, &[], rows, router, local, fewest);
                let want = reference(&logits, &[], router, local, fewest);
                assert_close(&format!("{router:?}"), &got.weights, &want.weights, 1e-5, 1e-3);
                assert_eq!(
                    Routed { weights: want.weights.clone(), ..got },
                    want,
                    "{router:?}, {local:?}, {rows} tokens"
                );
            }
        }
    }
    // All tokens choose the same expert, which may not be local, and with one expert there is no other.
    for count in [1, 7] {
        let logits: Vec<_> = (0..300 * count).map(|i| if i % count == count / 2 { 2.0 } else { 1.0 }).collect();
        let router = router([count, 1], false, true);
        for local in parts(count) {
            assert_eq!(route::<T>(&logits, &[], 300, router, local, 1), reference(&logits, &[], router, local, 1));
        }
    }
}

/// Many sums of score and bias are equal, because many logits and many biases are.
fn biases_change_only_the_choice<T: Tolerance>() {
    for (i, [rows, count, active]) in SHAPES.into_iter().enumerate() {
        let bias: Vec<_> = noise(count, 90 + i as u32).iter().map(|x| (x * 4.0).round() / 16.0).collect();
        for (sigmoid, normalized) in [(false, false), (false, true), (true, false), (true, true)] {
            let router = router([count, active], sigmoid, normalized);
            let logits = logits(rows, count, i as u32);
            let local = all(count);
            let got = route::<T>(&logits, &bias, rows, router, local, 1);
            let want = reference(&logits, &bias, router, local, 1);
            assert_close(&format!("{router:?}"), &got.weights, &want.weights, 1e-5, 1e-3);
            assert_eq!(Routed { weights: want.weights.clone(), ..got }, want, "{router:?}, {rows} tokens");
            assert!(count == active || want.experts != reference(&logits, &[], router, local, 1).experts, "{router:?}");
        }
    }
    // Of equal sums, the lower expert precedes. A sum that is not a number comes last.
    let router = router([5, 4], true, false);
    let got = route::<T>(&[0.0, f64::NAN, 0.0, 0.0, 20.0], &[0.25, 9.0, 0.5, 0.25, f64::NAN], 1, router, all(5), 1);
    assert_eq!((got.experts, &got.weights[..3]), (vec![2, 0, 3, 1], &[0.5; 3][..]));
}

/// The gradient of a bias has the sign of the difference from the mean load, and is exactly 0 at the mean.
fn gradients_of_biases_are_exact<T: Tolerance>() {
    for (i, [rows, count, active]) in SHAPES.into_iter().chain([[64, 512, 8]]).enumerate() {
        let routed =
            reference(&logits(rows, count, i as u32), &[], router([count, active], false, true), all(count), 1);
        let before = wide(&rounded::<T>(&noise(count, 7).iter().map(|x| x * 2f64.powi(-42)).collect::<Vec<_>>()));
        let mut memory = Memory::new();
        let dbias = memory.buffer("dbias", &rounded::<T>(&before));
        let loads_ = memory.input("loads", &routed.loads);
        let launch = experts::route_bias_backward(dbias, loads_, (rows * active) as u32, count as u32);
        run(&mut memory, &launch, 1, 0);
        let loads = routed.loads.iter().map(|&load| f64::from(load));
        let excess = loads.map(|load| load * count as f64 - (rows * active) as f64);
        let want: Vec<_> = before.iter().zip(excess).map(|(x, excess)| x + excess * 2f64.powi(-50)).collect();
        assert_eq!(read(&memory, dbias), wide(&rounded::<T>(&want)), "{count} experts");
    }
    // Of many entries, the differences of products that exceed 24 or 32 bits are exact.
    let mean = 1 << 24;
    for loads in [[mean + 1, mean - 1, mean], [2_000_000_000, 7, 8]] {
        let (count, entries) = (loads.len(), loads.iter().sum::<u32>());
        let mut memory = Memory::new();
        let (dbias, loads_) = (memory.buffer("dbias", &[T::from_f32(0.0); 3]), memory.input("loads", &loads));
        run(&mut memory, &experts::route_bias_backward(dbias, loads_, entries, count as u32), 1, 0);
        let excess = loads.map(|load| 3.0 * f64::from(load) - f64::from(entries));
        let want = rounded::<T>(&excess.map(|excess| excess * 2f64.powi(-50)));
        assert_eq!(read(&memory, dbias), wide(&want), "{loads:?}");
    }
}

fn not_a_number_is_the_smallest_logit<T: Tolerance>() {
    let router = router([5, 4], true, false);
    let logits = [f64::NAN, 0.5, f64::NEG_INFINITY, f64::INFINITY, f64::NAN];
    let local = Local { first: 0, count: 5 };
    assert_eq!(route::<T>(&logits, &[], 1, router, local, 1).experts, [3, 1, 2, 0]);
    let all = route::<T>(&[f64::NAN; 5], &[], 1, router, local, 1);
    assert_eq!((all.experts, all.positions), (vec![0, 1, 2, 3], vec![0, 128, 256, 384]));
}

/// The entries of more than one batch of chunks.
fn chunks_have_a_common_order() {
    let (count, entries) = (3, 18 * ENTRIES + 5);
    let ids: Vec<_> = (0..entries).map(|i| (gpu::noise::squirrel5(i as u32, 1) % 3) as i32).collect();
    let (mut memory, layout) = (Memory::new(), Groups::new(count, entries));
    let (positions, sources) = (memory.output("positions", entries), memory.output("sources", layout.rows));
    let (groups, experts) = (memory.output("groups", layout.words()), memory.buffer("experts", &ids));
    let (loads, local) = (memory.output("loads", count), Local { first: 0, count: 3 });
    order(&mut memory, [experts, positions, sources], [groups, loads], layout, (entries, 3, local), 1);
    let starts = memory.read(groups);
    let mut next = starts[..count].to_vec();
    let sources = memory.read(sources);
    for (entry, (&expert, position)) in ids.iter().zip(memory.read(positions)).enumerate() {
        assert_eq!(position as u32, next[expert as usize], "entry {entry}");
        assert_eq!(sources[position as usize], entry as i32);
        next[expert as usize] += 1;
    }
}

/// Copies rows to the order of experts and back, with and without weights.
fn rows_are_copied_and_summed<T: Tolerance>() {
    for (i, [rows, count, active]) in SHAPES.into_iter().enumerate() {
        let channels = [8, 24, 264, 520][i % 4];
        let parts = parts(count).into_iter().flat_map(|local| [(local, false), (local, true)]);
        for (local, weighted) in parts {
            let routed = reference(&logits(rows, count, 3), &[], router([count, active], false, true), local, 1);
            let (p, end) = (routed.sources.len(), routed.groups[local.count as usize] as usize);
            let mut memory = Memory::new();
            let inp = wide(&rounded::<T>(&noise(rows * channels, 1)));
            let residual = wide(&rounded::<T>(&noise(rows * channels, 2)));
            let factors: Vec<f32> = routed.weights.iter().map(|&x| x as f32).collect();
            let weights = if weighted { memory.input("weights", &factors) } else { Global::null() };
            let weight = |entry: usize| if weighted { f64::from(factors[entry]) } else { 1.0 };
            let sources = memory.input("sources", &routed.sources);
            let positions = memory.input("positions", &routed.positions);
            let groups = memory.input("groups", &routed.groups);
            let count = local.count as usize;
            let (from, sorted) = (memory.input("inp", &rounded::<T>(&inp)), memory.output("sorted", p * channels));
            let launch =
                experts::dispatch(sorted, from, sources, weights, groups.skip(count), channels as u32, active as u32);
            run(&mut memory, &launch, experts::grid(p), 0);
            let what = format!("{rows} x {channels}, {local:?}, weighted: {weighted}");
            let got = wide(memory.slice(sorted.reader(), end * channels).expect("all rows are written"));
            assert!(memory.slice(sorted.reader().skip(end * channels), 1).is_err() || end == p);
            let mut want = vec![0.0; end * channels];
            for (row, &source) in routed.sources[..end].iter().enumerate().filter(|(_, source)| **source >= 0) {
                for j in 0..channels {
                    let value = weight(source as usize) * inp[source as usize / active * channels + j];
                    want[row * channels + j] = value;
                }
            }
            assert_close(&what, &got, &want, if weighted { T::ROUNDING } else { 0.0 }, 1e-30);

            for in_place in [None, Some(false), Some(true)] {
                let out = match in_place {
                    Some(true) => memory.buffer("out", &rounded::<T>(&residual)),
                    _ => memory.output("out", rows * channels),
                };
                let before = match in_place {
                    None => GlobalMut::null(),
                    Some(false) => memory.buffer("residual", &rounded::<T>(&residual)),
                    Some(true) => out,
                };
                let launch = experts::combine(
                    out,
                    before,
                    sorted.reader(),
                    weights,
                    positions,
                    rows as u32,
                    channels as u32,
                    active as u32,
                );
                run(&mut memory, &launch, experts::grid(rows), 0);
                let mut want = if in_place.is_some() { residual.clone() } else { vec![0.0; rows * channels] };
                for (entry, &position) in routed.positions.iter().enumerate().filter(|(_, position)| **position >= 0) {
                    for j in 0..channels {
                        want[entry / active * channels + j] += weight(entry) * got[position as usize * channels + j];
                    }
                }
                assert_close(&what, &read(&memory, out), &want, T::ROUNDING + 1e-6, 1.0);
            }
        }
    }
}

/// Rows in the order of experts have the FP8 bits of their copies in bf16.
fn rows_are_quantized() {
    check_quantized::<E4m3>();
    check_quantized::<E5m2>();
}

fn check_quantized<T: Fp8 + Pod>() {
    for (i, [rows, count, active]) in SHAPES.into_iter().enumerate() {
        let channels = [16, 48, 272, 528][i % 4];
        let routed = reference(&logits(rows, count, 3), &[], router([count, active], false, true), all(count), 1);
        let (p, end) = (routed.sources.len(), routed.groups[count] as usize);
        let factors: Vec<f32> = routed.weights.iter().map(|&x| x as f32).collect();
        for (weighted, outputs) in [(false, [true, true]), (true, [true, false]), (true, [false, true])] {
            let mut memory = Memory::new();
            let inp = rounded::<bf16>(&noise(rows * channels, 1).iter().map(|x| 300.0 * x).collect::<Vec<_>>());
            let weights = if weighted { memory.input("weights", &factors) } else { Global::null() };
            let sources = memory.input("sources", &routed.sources);
            let end_ = memory.input("groups", &routed.groups).skip(count);
            let (from, scale) = (memory.input("inp", &inp), memory.input("scale", &[0.7]));
            let (c, k) = (channels as u32, active as u32);
            let sorted = memory.output("sorted", p * channels);
            let launch = experts::dispatch(sorted, from, sources, weights, end_, c, k);
            run(&mut memory, &launch, experts::grid(p), 0);
            let copied = wide(memory.slice(sorted.reader(), end * channels).expect("all rows are written"));
            let want = quantized::reference::<T>(&copied, 0.7);

            let [out, transposed] =
                outputs.map(|used| if used { memory.output::<T>("output", p * channels) } else { GlobalMut::null() });
            // The recomputation of a tensor leaves its largest magnitude alone.
            let amax = if outputs[0] { memory.buffer("amax", &[7]) } else { GlobalMut::null() };
            let launch =
                experts::dispatch_to_fp8(out, transposed, amax, from, sources, weights, end_, scale, p as u32, c, k);
            run(&mut memory, &launch, transpose_grid(p, channels), shared_bytes(tile_and_maxima));
            let at = |memory: &Memory, out: GlobalMut<T>, i| {
                memory.slice(out.reader().skip(i), 1).ok().map(|value| value[0].to_bits())
            };
            for i in 0..p * channels {
                let (row, column) = (i / channels, i % channels);
                if outputs[0] {
                    assert_eq!(at(&memory, out, i), want.get(i).copied(), "{rows} x {channels}, {i}");
                }
                if outputs[1] {
                    let got = at(&memory, transposed, column * p + row);
                    assert_eq!(got, want.get(i).copied(), "{rows} x {channels}, {i}, transposed");
                }
            }
            if outputs[0] {
                assert_eq!(memory.read(amax)[0], quantized::largest(&copied, f32::from_bits(7)));
            }
        }
    }
}

/// The loss of a token: its weights times their gradients, and the auxiliary losses.
fn loss(logits: &[f64], chosen: &[i32], dweights: &[f64], router: Router, [aux, z]: [f64; 2], shares: &[f64]) -> f64 {
    let weighted: f64 = weights(logits, chosen, router).iter().zip(dweights).map(|(w, dw)| w * dw).sum();
    let balance: f64 = scores(logits, router.sigmoid == 1).iter().zip(shares).map(|(p, f)| p * f).sum();
    let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let log_sum = max + logits.iter().map(|x| (x - max).exp()).sum::<f64>().ln();
    weighted + aux * f64::from(router.experts) * balance + z * log_sum * log_sum
}

fn gradients_of_logits_match_differences<T: Tolerance>() {
    for (i, [rows, count, active]) in SHAPES.into_iter().enumerate() {
        let channels = [8, 40, 264][i % 3];
        for (sigmoid, normalized, losses) in [
            (false, false, [0.0, 0.0]),
            (false, true, [0.5, 0.25]),
            (true, false, [0.0, 0.125]),
            (true, true, [0.25, 0.0]),
        ] {
            let router = router([count, active], sigmoid, normalized);
            let logits = logits(rows, count, i as u32);
            // The loads of the tokens of this GPU and of others.
            let (local, tokens) = (parts(count).pop().expect("all"), rows + 3 * usize::from(sigmoid));
            let local = if normalized { Local { first: 0, count: count as u32 } } else { local };
            let routed = reference(&logits, &[], router, local, 1);
            let p = routed.sources.len();
            let mut memory = Memory::new();
            let values = |seed| wide(&rounded::<T>(&noise(p * 2 * channels, seed)));
            let (up, dup) = (values(4), values(5));
            let factors: Vec<f32> = routed.weights.iter().map(|&x| x as f32).collect();
            let [values, up_view, dup_view] =
                [&logits, &up, &dup].map(|values| memory.input("input", &rounded::<T>(values)));
            let experts_view = memory.input("experts", &routed.experts);
            let weights = memory.input("weights", &factors);
            let positions = memory.input("positions", &routed.positions);
            let loads = memory.input("loads", &routed.loads);
            let (entries, gradients) = (rows * active, memory.output("gradients", rows * active));
            let launch =
                experts::choice_gradients(gradients, positions, up_view, dup_view, entries as u32, channels as u32);
            run(&mut memory, &launch, experts::grid(entries), 0);
            let dlogits = memory.output::<T>("dlogits", rows * count);
            let sizes = BackwardSizes {
                rows: rows as u32,
                tokens: tokens as u32,
                aux_loss: losses[0] as f32,
                z_loss: losses[1] as f32,
            };
            let gradients = gradients.reader();
            let launch = instance!(route_backward::<T>(
                count,
                dlogits,
                values,
                experts_view,
                weights,
                gradients,
                loads,
                router,
                sizes
            ));
            run(&mut memory, &launch, experts::route_choose_grid(rows), 0);
            let got = read(&memory, dlogits);
            let shares: Vec<_> = routed.loads.iter().map(|&n| f64::from(n) / tokens as f64).collect();
            for row in 0..rows {
                let chosen = &routed.experts[row * active..(row + 1) * active];
                let dweights: Vec<_> = (row * active..(row + 1) * active)
                    .map(|entry| {
                        let Ok(position) = usize::try_from(routed.positions[entry]) else { return 0.0 };
                        let at = position * 2 * channels;
                        let g: f64 = (at..at + channels).map(|j| up[j] * dup[j]).sum();
                        g / routed.weights[entry]
                    })
                    .collect();
                let at = |expert: usize, step: f64| {
                    let mut moved = logits[row * count..(row + 1) * count].to_vec();
                    moved[expert] += step;
                    loss(&moved, chosen, &dweights, router, losses, &shares)
                };
                let want: Vec<_> = (0..count).map(|expert| (at(expert, 1e-5) - at(expert, -1e-5)) / 2e-5).collect();
                let what = format!("{router:?}, token {row}");
                assert_close(&what, &got[row * count..(row + 1) * count], &want, T::ROUNDING + 1e-5, 1.0);
            }
        }
    }
}
