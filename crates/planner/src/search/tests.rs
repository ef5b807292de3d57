//! Tests of the settings, their order, and the best one.

use super::*;
use engine::open::planning_engine;
use model::{MasterWeights, Moments, Optimizer};

const LEVELS: [Recompute; 2] = [Recompute::Nothing, Recompute::Layers];

/// GPT-2 with 124M parameters on two nodes of four GPUs.
fn request() -> Request {
    Request {
        descriptor: Descriptor::gpt2(12, 12, 768, 1024, 50257).unwrap(),
        cluster: Cluster::new(8, 4).unwrap(),
        links: Links::new(450e9, 50e9),
        slowdown: schedule::SLOWDOWN,
        hbm: 80_000_000_000,
        seq: 1024,
        total_batch: None,
        batches: vec![4, 16],
        recompute: LEVELS.to_vec(),
        stages: vec![0, 1, 2, 3],
        shard_sizes: vec![2, 8],
        expert_parallel: false,
        precision: Precision::Bf16,
        fp8: None,
        storage: Storage { optimizer: Optimizer::AdamW, master_weights: MasterWeights::F32, moments: Moments::F32 },
        measured: Vec::new(),
        assumptions: Assumptions { mfu: 0.5, peak: 989.4e12, memory_bandwidth: 3e12 },
    }
}

fn plan(request: &Request) -> Vec<Planned> {
    request.plan(&mut *planning_engine(request.precision)).unwrap()
}

fn error_of(request: &Request) -> String {
    request.plan(&mut *planning_engine(request.precision)).unwrap_err().to_string()
}

/// A setting whose plan does not matter.
fn planned(group: (u8, usize), tokens_per_second: f64, fits: bool, bytes: usize) -> Planned {
    let memory = Memory {
        parameters: 0,
        gradients: 0,
        optimizer: 0,
        activations: 0,
        workspace: 0,
        batch: 0,
        planned: bytes,
        reserved: 0,
        total: bytes,
    };
    Planned {
        zero_stage: group.0,
        shard_size: group.1,
        expert_parallel: false,
        batch: 1,
        micro_batches: 1,
        recompute: Recompute::Nothing,
        total_batch: 1,
        memory,
        fits,
        source: Source::Assumed,
        timeline: Timeline::default(),
        tokens_per_second,
        mfu: 0.0,
        bottleneck: if fits { Bottleneck::Compute } else { Bottleneck::Memory },
    }
}

#[test]
fn every_setting_is_planned_once_and_in_order() {
    // A shard of one rank is stage 0, which has no shards.
    let mut request = Request { shard_sizes: vec![1, 2, 8], ..request() };
    let found: Vec<_> =
        plan(&request).iter().map(|of| (of.zero_stage, of.shard_size, of.batch, of.recompute)).collect();
    let mut expected = Vec::new();
    for (stage, shard_size) in [(0, 1), (1, 2), (1, 8), (2, 2), (2, 8), (3, 2), (3, 8)] {
        for batch in [4, 16] {
            expected.extend(LEVELS.map(|level| (stage, shard_size, batch, level)));
        }
    }
    assert_eq!(found, expected);
    request.stages = vec![0];
    assert_eq!(plan(&request).len(), 4);
}

/// Ranks that share experts keep fewer parameters, and activations with room for the tokens of all of them.
#[test]
fn ranks_that_share_experts_are_planned_with_their_exchange() {
    let descriptor: Descriptor = "modern-moe:d4".parse().unwrap();
    // 64 experts divide among 2 and 8 ranks, but not among 6.
    let apart = Request { descriptor, cluster: Cluster::new(24, 8).unwrap(), shard_sizes: vec![2, 6, 8], ..request() };
    let shared = Request { expert_parallel: true, ..apart.clone() };
    let (shared, apart) = (plan(&shared), plan(&apart));
    let layouts: Vec<_> = shared.iter().map(|of| (of.zero_stage, of.shard_size)).collect();
    assert!((1..=3).all(|stage| layouts.contains(&(stage, 2)) && layouts.contains(&(stage, 8))), "{layouts:?}");
    assert!(layouts.iter().all(|(stage, size)| *stage > 0 && *size != 6), "{layouts:?}");
    for of in &shared {
        let same = |other: &&Planned| other.is_like(of) && (other.batch, other.recompute) == (of.batch, of.recompute);
        let other = apart.iter().find(same).unwrap();
        let [found, before] = [of, other].map(|planned| planned.memory);
        assert!(found.gradients < before.gradients && found.activations > before.activations, "{of:?}");
        let times = |planned: &Planned, part| {
            planned.timeline.collectives.iter().filter(|of| of.part == part).map(|of| of.times).sum::<f64>()
        };
        // Each layer gathers and sums in both passes, and a recomputed one gathers again.
        let expected = 4.0 * if of.recompute == Recompute::Nothing { 4.0 } else { 5.0 };
        assert!((times(of, "tokens") - expected).abs() < 1e-9 && times(other, "tokens") == 0.0, "{:?}", of.timeline);
    }
    let error = error_of(&Request {
        expert_parallel: true,
        shard_sizes: vec![6],
        cluster: Cluster::new(24, 8).unwrap(),
        descriptor,
        ..request()
    });
    assert!(error.contains("that the 6 ranks of a shard group divide, found 64"), "{error}");
    let error = error_of(&Request { expert_parallel: true, stages: vec![0], ..request() });
    assert!(error.starts_with("--expert-parallel: expected a --zero-stage from 1 to 3"), "{error}");
}

#[test]
fn micro_batches_divide_the_total_batch() {
    let tokens = 1024 * 8;
    let total = Request { total_batch: Some(12 * tokens), batches: vec![3, 4, 8, 12, 24], ..request() };
    let found = plan(&total);
    // 8 x 1024 tokens of each GPU are not a part of 12 x 1024, and 24 x 1024 are more.
    for batch in [3, 4, 12] {
        let of: Vec<_> = found.iter().filter(|of| of.batch == batch).collect();
        assert_eq!(of.len(), found.len() / 3);
        assert!(of.iter().all(|of| of.micro_batches == 12 / batch && of.total_batch == 12 * tokens));
    }
    let each = plan(&request());
    assert!(each.iter().all(|of| of.micro_batches == 1 && of.total_batch == of.batch * tokens));
    let error = error_of(&Request { total_batch: Some(2 * tokens), ..request() });
    let expected = "--total-batch 16384: expected a multiple of --batch x --seq x --gpus, at least 32768, found another number; use";
    assert!(error.starts_with(expected), "{error}");
}

#[test]
fn a_setting_fits_if_all_of_its_memory_fits() {
    let all = plan(&request());
    assert!(all.iter().all(|of| of.fits && of.memory.total == of.memory.planned + of.memory.reserved));
    let largest = all.iter().map(|of| of.memory.total).max().unwrap();
    let limited = |hbm| plan(&Request { hbm, ..request() });
    assert!(limited(largest).iter().all(|of| of.fits));
    for of in limited(largest - 1) {
        assert_eq!(of.fits, of.memory.total < largest);
        assert!(of.fits || of.bottleneck == Bottleneck::Memory);
    }
    let none = limited(1);
    assert!(none.iter().all(|of| !of.fits && of.bottleneck == Bottleneck::Memory));
    assert_eq!(best(&none), None);
}

fn fastest(planned: &[Planned]) -> f64 {
    planned.iter().map(|of| of.tokens_per_second).fold(0.0, f64::max)
}

#[test]
fn the_best_setting_is_the_fastest_that_fits() {
    let all = plan(&request());
    let mut sizes: Vec<usize> = all.iter().map(|of| of.memory.total).collect();
    sizes.sort_unstable();
    let mut found = Vec::new();
    for hbm in sizes {
        let planned = plan(&Request { hbm, ..request() });
        let best = &planned[best(&planned).unwrap()];
        assert!(best.fits && best.memory.total <= hbm);
        let fitting: Vec<Planned> = planned.iter().filter(|of| of.memory.total <= hbm).cloned().collect();
        assert!(best.tokens_per_second >= fastest(&fitting));
        found.push(best.tokens_per_second);
    }
    // More memory is never slower, and here it is faster in the end.
    assert!(found.is_sorted() && found[0] < found[found.len() - 1], "{found:?}");
}

#[test]
fn of_equally_fast_settings_the_first_is_the_best() {
    let settings = [
        planned((0, 1), 9.0, false, 9),
        planned((1, 8), 5.0, true, 5),
        planned((2, 8), 7.0, true, 4),
        planned((3, 8), 7.0, true, 3),
    ];
    assert_eq!(best(&settings), Some(2));
    assert_eq!((best(&settings[..1]), best(&[])), (None, None));
}

#[test]
fn each_stage_and_shard_size_has_its_fastest_or_else_its_smallest_setting() {
    let settings = [
        planned((0, 1), 9.0, false, 9),
        planned((0, 1), 8.0, false, 7),
        planned((1, 2), 5.0, true, 3),
        planned((1, 2), 6.0, true, 5),
        planned((1, 2), 9.0, false, 8),
        planned((1, 8), 4.0, true, 2),
        planned((2, 8), 3.0, true, 1),
        planned((2, 8), 2.0, true, 1),
    ];
    assert_eq!(best_of_each(&settings).unwrap(), [1, 3, 5, 6]);
    assert!(best_of_each(&[]).unwrap().is_empty());
}

#[test]
fn memory_is_the_bottleneck_if_more_of_it_would_make_the_same_stage_faster() {
    let marked = |fitting: Planned, other: Planned| {
        let mut settings = [fitting, other];
        mark_memory(&mut settings);
        settings[0].bottleneck
    };
    let of = |tokens_per_second| planned((1, 8), tokens_per_second, true, 1);
    assert_eq!(marked(of(100.0), planned((1, 8), 102.0, false, 2)), Bottleneck::Memory);
    // A gain of less than a percent, a setting that fits, another stage, and another shard size.
    for other in [
        planned((1, 8), 100.9, false, 2),
        planned((1, 8), 102.0, true, 2),
        planned((2, 8), 102.0, false, 2),
        planned((1, 4), 102.0, false, 2),
    ] {
        assert_eq!(marked(of(100.0), other), Bottleneck::Compute);
    }
    let waiting = Planned { bottleneck: Bottleneck::InterNode, ..of(100.0) };
    assert_eq!(marked(waiting, planned((1, 8), 102.0, false, 2)), Bottleneck::InterNode);
}

#[test]
fn the_longest_part_of_a_step_is_the_bottleneck() {
    let of = |compute, slowed, exposed_intra, exposed_inter| {
        bottleneck(&Timeline { compute, slowed, exposed_intra, exposed_inter, ..Timeline::default() })
    };
    assert_eq!(of(3.0, 2.0, 4.0, 4.0), Bottleneck::Compute);
    assert_eq!(of(3.0, 2.0, 6.0, 4.0), Bottleneck::IntraNode);
    assert_eq!(of(3.0, 2.0, 4.0, 6.0), Bottleneck::InterNode);
}

#[test]
fn the_same_request_gives_the_same_plan() {
    let json = || serde_json::to_string(&plan(&request())).unwrap();
    assert_eq!(json(), json());
}

#[test]
fn muon_needs_a_measured_step() {
    let storage = Storage { optimizer: Optimizer::Muon, ..request().storage };
    let error = error_of(&Request { storage, ..request() });
    assert!(error.starts_with("--optimizer muon: expected a measured step, found none; pass a file of"), "{error}");
}
