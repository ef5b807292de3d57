//! Every operation against the CPU engine.

use engine::cpu::Cpu;
use engine::cuda::{EmulatedGpu, MatmulBackend, Precision, emulated};
use engine::ops::{AttentionBackward, AttentionForward, AttentionMask, AttentionShape};
use engine::plan::{Group, Plan};
use engine::tensor::DType;
use engine::{Engine, Workload};
use gpu::matmul::launch::MAX_CANDIDATE_CONFIGS;
use verify::selftest::{Case, edge_cases, fp8};

/// Checks the edge cases of the operations that `selected` accepts by name.
fn assert_cases_match(selected: impl Fn(&str) -> bool, engine: Box<dyn Engine>) {
    let fp8 = if engine.fp8_dtype().is_some() { fp8::edge_cases() } else { Vec::new() };
    let cases = edge_cases().into_iter().chain(fp8).filter(|case| case.is_supported(&*engine));
    assert_match(&cases.filter(|case| selected(case.operation)).collect::<Vec<_>>(), engine);
}

fn assert_match(cases: &[Case], mut engine: Box<dyn Engine>) {
    let (mut failures, mut reference) = (Vec::new(), Cpu::new());
    for case in cases {
        let name = format!("{} {}", case.operation, case.shape);
        match case.check(&mut *engine, &mut reference) {
            Ok(outcome) => failures.extend(
                outcome.errors.iter().filter(|(_, error)| !error.ok()).map(|error| format!("{name}: {error:?}")),
            ),
            Err(error) => failures.push(format!("{name}: {error:#}")),
        }
    }
    assert!(failures.is_empty(), "{} of {} cases:\n{}", failures.len(), cases.len(), failures.join("\n"));
}

/// Other operations have the same kernels as on Hopper.
#[test]
fn gemms_and_attention_before_hopper_match_cpu_engine() {
    let selected = |name: &str| ["matmul", "attention", "orthogonalize"].iter().any(|part| name.contains(part));
    assert_cases_match(selected, emulated(EmulatedGpu::new(false), Precision::Bf16, None, true));
}

/// Attention takes half of the time of all operations, so it has a test of its own, which runs in parallel with the others.
#[test]
fn sm_90a_attention_matches_cpu_engine() {
    let engine = emulated(EmulatedGpu::new(true), Precision::Bf16, None, true);
    assert_cases_match(|name| name.contains("attention"), engine);
}

#[test]
fn other_sm_90a_operations_match_cpu_engine() {
    let engine = emulated(EmulatedGpu::new(true), Precision::Bf16, None, true);
    assert_cases_match(|name| !name.contains("attention"), engine);
}

/// On a GPU that cannot run the kernels for sm_90a, cuBLASLt computes all GEMMs.
#[test]
fn fp8_operations_match_cpu_engine_without_kernels_for_sm_90a() {
    let gpu = EmulatedGpu { fp8: true, ..EmulatedGpu::new(false) };
    let engine = emulated(gpu, Precision::Bf16, None, true);
    let cases = fp8::edge_cases().into_iter().filter(|case| case.is_supported(&*engine));
    assert_match(&cases.collect::<Vec<_>>(), engine);
}

#[test]
#[ignore = "slow: scripts/nightly runs it"]
fn matmuls_match_cpu_engine_in_every_tile_configuration() {
    for config in 0..MAX_CANDIDATE_CONFIGS {
        let matmul = MatmulBackend::Rust;
        let gpu = EmulatedGpu { hopper: true, matmul, kernel_config: Some(config), ..EmulatedGpu::default() };
        assert_cases_match(|name| name.contains("matmul"), emulated(gpu, Precision::Bf16, None, true));
    }
}

/// Symmetric outputs have two tile configurations, others six.
#[test]
#[ignore = "slow: scripts/nightly runs it"]
fn orthogonalization_matches_cpu_engine_in_every_tile_configuration() {
    for config in 0..6 {
        let matmul = MatmulBackend::Rust;
        let gpu = EmulatedGpu { hopper: true, matmul, kernel_config: Some(config), ..EmulatedGpu::default() };
        assert_cases_match(|name| name.contains("orthogonalize"), emulated(gpu, Precision::Bf16, None, true));
    }
}

#[test]
#[ignore = "slow: scripts/nightly runs it"]
fn f32_operations_match_cpu_engine() {
    assert_cases_match(|_| true, emulated(EmulatedGpu::new(false), Precision::Fp32, None, true));
}

/// The blocks run in parallel and add to the same sums of dQ. They take the work tiles in another order in each run, and
/// wait for each other.
#[test]
fn attention_gradients_are_the_same_in_every_order_of_blocks() {
    let shape = AttentionShape { b: 1, t: 600, heads: 2, kv_heads: 1, head_size: 128 };
    let (rows, qkv_len) = (shape.t * shape.heads, shape.t * shape.packed_heads() * shape.head_size);
    let values = |len: usize| (0..len).map(|i| (i * i * 31 % 997) as f32 / 500.0 - 1.0).collect::<Vec<_>>();
    let gradients = |sm_count| {
        let gpu = EmulatedGpu { sm_count, hopper: true, ..EmulatedGpu::default() };
        let mut engine = emulated(gpu, Precision::Bf16, None, false);
        let mut plan = Plan::new();
        let mut add = |name: &str, len: usize, dtype| plan.add(Group::Activations, name, &[len], dtype);
        let n = rows * shape.head_size;
        let (qkv, dqkv) = (add("qkv", qkv_len, DType::Bf16), add("dqkv", qkv_len, DType::Bf16));
        let (out, dout) = (add("out", n, DType::Bf16), add("dout", n, DType::Bf16));
        let lse = add("lse", rows, DType::F32);
        let workload = Workload {
            attention: shape,
            channels: shape.heads * shape.head_size,
            linear_layers: vec![(128, 32)],
            mlp_channels: 128,
            router: None,
            routed_tokens: 0,
            qk_norm: None,
            padded_vocab: 128,
            parameters: 0,
            norm_tensors: 1,
            update_ranges: 0,
            training: true,
        };
        engine.plan(&mut plan, &workload);
        engine.allocate(&plan).unwrap();
        engine.write(qkv, &values(qkv_len)).unwrap();
        engine.write(dout, &values(n)).unwrap();
        engine
            .run(AttentionForward {
                out,
                lse,
                qkv,
                shape,
                first_query: 0,
                mask: AttentionMask::default(),
                quantized: None,
            })
            .unwrap();
        [0; 2].map(|_| {
            engine.run(AttentionBackward { dqkv, dout, qkv, out, lse, shape, mask: AttentionMask::default() }).unwrap();
            engine.read(dqkv).unwrap()
        })
    };
    let [want, again] = gradients(1);
    assert!(want == again);
    for sm_count in [2, 3, 7] {
        assert!(gradients(sm_count).iter().all(|found| *found == want), "{sm_count} blocks");
    }
}
