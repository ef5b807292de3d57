//! Initialization, digests and reads of memory, and operations that are rejected.

use data::{Geometry, Loader, Prefetch, Tokens};
use engine::cuda::{EmulatedGpu, Precision, emulated};
use engine::ops::{AttentionShape, MatmulForward, MatmulShape, NormBackward, NormForward};
use engine::plan::{Group, Plan};
use engine::tensor::{DType, Tensor};
use engine::{BatchLayout, Engine, Workload};

/// Returns an engine with one tensor of `len` elements.
fn with_tensor(precision: Precision, len: usize, dtype: DType) -> (Box<dyn Engine>, Tensor) {
    let mut engine = emulated(EmulatedGpu::new(false), precision, None, false);
    let mut plan = Plan::new();
    let tensor = plan.add(Group::Activations, "x", &[len], dtype);
    engine.allocate(&plan).unwrap();
    (engine, tensor)
}

/// Elements before the first and after the last packet are hashed by the host.
#[test]
fn digests_are_those_of_the_bytes() {
    let mut engine = emulated(EmulatedGpu::new(false), Precision::Bf16, None, true);
    let mut plan = Plan::new();
    let dtypes = [DType::F32, DType::Bf16, DType::I32, DType::Fp8];
    let tensors = dtypes.map(|dtype| plan.add(Group::Activations, dtype.name(), &[5003], dtype));
    let attention = AttentionShape { b: 1, t: 64, heads: 1, kv_heads: 1, head_size: 64 };
    let workload = Workload {
        attention,
        channels: 64,
        linear_layers: vec![(128, 32)],
        mlp_channels: 128,
        router: None,
        routed_tokens: 0,
        qk_norm: None,
        padded_vocab: 128,
        parameters: 5003,
        norm_tensors: 1,
        update_ranges: 0,
        training: true,
    };
    engine.plan(&mut plan, &workload);
    engine.allocate(&plan).unwrap();
    for tensor in tensors {
        let size = tensor.dtype.bytes();
        let bytes: Vec<u8> = (0..tensor.bytes()).map(|i| (i * i % 251 + i % 5) as u8).collect();
        engine.write_bytes(tensor, &bytes).unwrap();
        for (start, len) in [(0, 5003), (1, 5001), (16 / size - 1, 3), (3, 1), (7, 4000), (16, 0)] {
            let found = engine.digest(tensor.slice(start, len), 11).unwrap();
            let expected = engine::digest::of_bytes(&bytes[start * size..][..len * size], size, 11);
            assert_eq!(found, expected, "{} {start} {len}", tensor.dtype.name());
        }
    }
}

#[test]
fn memory_is_zero_initialized_and_bf16_rounds_to_nearest_even() {
    let (mut engine, tensor) = with_tensor(Precision::Bf16, 4, DType::Bf16);
    assert_eq!(engine.read(tensor).unwrap(), [0.0; 4]);
    // 1 + 2^-8 and 1 + 3 * 2^-8 are halfway between two bf16 values.
    engine.write(tensor, &[1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0, -2.5, 1e-3]).unwrap();
    assert_eq!(engine.read(tensor).unwrap(), [1.0, 1.015625, -2.5, half::bf16::from_f32(1e-3).to_f32()]);
    engine.zero(tensor.slice(1, 2)).unwrap();
    assert_eq!(engine.read(tensor).unwrap()[1..3], [0.0, 0.0]);
}

#[test]
fn asynchronous_read_returns_the_values_at_the_time_of_the_call() {
    let (mut engine, tensor) = with_tensor(Precision::Fp32, 2, DType::F32);
    engine.write(tensor, &[1.0, 2.0]).unwrap();
    let first = engine.read_async(tensor).unwrap();
    engine.write(tensor, &[3.0, 4.0]).unwrap();
    let second = engine.read_async(tensor).unwrap();
    assert_eq!(engine.wait(second).unwrap().values, [3.0, 4.0]);
    assert_eq!(engine.wait(first).unwrap().values, [1.0, 2.0]);
    let (mut other, tensor) = with_tensor(Precision::Fp32, 2, DType::F32);
    let read = other.read_async(tensor).unwrap();
    assert_eq!(engine.wait(read).unwrap_err().to_string(), "read 1 is not pending");
}

#[test]
fn operations_reject_tensors_of_the_wrong_shape_or_type() {
    let (mut engine, tensor) = with_tensor(Precision::Bf16, 64, DType::Bf16);
    let shape = MatmulShape { rows: 8, c: 8, oc: 8 };
    let short = engine.run(MatmulForward::new([tensor, tensor.slice(0, 32), tensor], shape));
    assert_eq!(short.unwrap_err().to_string(), "inp: expected at least 64 elements, found 32");
    let text = engine.read_async(tensor).unwrap_err().to_string();
    assert_eq!(text, "the tensor read: expected f32, found bf16");
    let text = engine.cast(tensor, tensor).unwrap_err().to_string();
    assert_eq!(text, "cast: expected bf16 or f32, found bf16 to bf16");

    let mut elsewhere = tensor;
    elsewhere.offset = 1 << 20;
    let text = engine.zero(elsewhere).unwrap_err().to_string();
    assert!(text.contains("does not lie in the engine's memory of 128 bytes"), "{text}");

    let layout = BatchLayout::new(1, 8);
    let words = engine.host_buffer(3).unwrap();
    let text = engine.load_batch(tensor, layout, words).map(drop).unwrap_err().to_string();
    assert!(text.starts_with("load_batch: expected ") && text.ends_with(", found 3"), "{text}");
}

#[test]
fn rmsnorm_rejects_unsupported_channels_and_incomplete_weights() {
    for (precision, dtype, c, expected) in [
        (Precision::Bf16, DType::Bf16, 12, "bf16: expected a multiple of 8 channels up to 16384, found 12"),
        (Precision::Fp32, DType::F32, 8196, "f32: expected a multiple of 4 channels up to 8192, found 8196"),
    ] {
        let expected = format!("normalization in {expected}; change --channels, or use --device cpu");
        let mut engine = emulated(EmulatedGpu::new(false), precision, None, false);
        let mut plan = Plan::new();
        let x = plan.add(Group::Activations, "x", &[c], dtype);
        let rstd = plan.add(Group::Activations, "rstd", &[1], DType::F32);
        engine.allocate(&plan).unwrap();
        let forward =
            NormForward { out: x, mean: None, rstd, inp: x, weight: None, bias: None, c, eps: 1e-5, quantized: None };
        assert_eq!(engine.run(forward).unwrap_err().to_string(), expected);
        let backward = NormBackward {
            dinp: x,
            dweight: None,
            dbias: None,
            column_sums: None,
            dout: x,
            inp: x,
            weight: None,
            mean: None,
            rstd,
            c,
        };
        assert_eq!(engine.run(backward).unwrap_err().to_string(), expected);
        let dweight = Some(x.slice(0, 8));
        let text = engine.run(NormBackward { c: 8, dweight, ..backward }).unwrap_err().to_string();
        assert_eq!(text, "norm_backward: expected both weight and dweight or neither, found one");
    }
}

#[test]
fn out_of_memory_error_states_the_required_and_the_free_memory() {
    let mut plan = Plan::new();
    plan.add(Group::Activations, "huge", &[1 << 61], DType::F32);
    let text = emulated(EmulatedGpu::new(false), Precision::Fp32, None, false).allocate(&plan).unwrap_err().to_string();
    assert!(text.starts_with("GPU memory: expected 8589934592.00 GiB free, found "), "{text}");
}

/// Sampling between training steps loads smaller batches, whose buffers may be returned to the prefetcher.
#[test]
fn prefetch_continues_after_smaller_batches() {
    let tokens = (0..200).map(|i| i % 50).collect();
    let loader = Loader::new(vec![Tokens::in_memory("tokens", tokens)], Geometry::single(2, 16), 50, None).unwrap();
    let layout = loader.layout();
    let (mut engine, batch) = with_tensor(Precision::Fp32, layout.words(), DType::I32);
    let mut data = Prefetch::start(loader, &*engine).unwrap();
    for _ in 0..3 {
        data.load_next(&mut *engine, batch, 0).unwrap();
        for t in [1, 5, 9] {
            let small = BatchLayout::new(1, t);
            let words = engine.host_buffer(small.words()).unwrap();
            engine.load_batch(batch.slice(0, small.words()), small, words).unwrap();
        }
    }
    for seed in [0, 1, 7, u32::MAX, 1 << 31, 5, 6, 7] {
        data.load_next(&mut *engine, batch, seed).unwrap();
        let mut bytes = [0; 4];
        engine.read_bytes(layout.tensor(batch, layout.seed()), &mut bytes).unwrap();
        assert_eq!(u32::from_le_bytes(bytes), seed);
    }
}
