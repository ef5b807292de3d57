//! Memory errors, which show the kernels that compute an operation.

use engine::cuda::{EmulatedGpu, MatmulBackend, Precision, emulated};
use engine::ops::{
    Activation, ActivationForward, ActivationInput, EncoderForward, Epilogue, MatmulBackward, MatmulForward,
    MatmulShape, Sum,
};
use engine::plan::{Group, Plan};
use engine::tensor::{DType, Tensor};
use engine::{BatchLayout, Engine, GeluFusion};

/// Returns a checked engine and tensors with these names, lengths and types. The first 8 elements of each tensor are
/// initialized.
fn checked(tensors: &[(&str, usize, DType)]) -> (Box<dyn Engine>, Vec<Tensor>) {
    let mut engine = emulated(EmulatedGpu::new(false), Precision::Fp32, None, true);
    let mut plan = Plan::new();
    let mut add = |&(name, len, dtype)| plan.add(Group::Activations, name, &[len], dtype);
    let tensors: Vec<_> = tensors.iter().map(&mut add).collect();
    engine.allocate(&plan).unwrap();
    for tensor in &tensors {
        match tensor.dtype {
            DType::I32 => engine.write_i32(tensor.slice(0, 8), &[37; 8]).unwrap(),
            _ => engine.write(tensor.slice(0, 8), &[1.0; 8]).unwrap(),
        }
    }
    (engine, tensors)
}

#[test]
fn memory_errors_name_the_tensor() {
    let f32 = DType::F32;
    let (mut engine, x) = checked(&[("out", 16, f32), ("a", 16, f32), ("b", 8, f32)]);
    let text = engine.run(Sum { out: x[2].slice(0, 1), values: x[1] }).unwrap_err().to_string();
    assert!(text.contains("uninitialized read: read of 4 bytes at a + 32"), "{text}");
    let text = engine.read(x[0]).unwrap_err().to_string();
    assert_eq!(text, "out + 32 was never written");

    // A token outside the vocabulary reads beyond wte, even though another tensor is allocated there.
    let layout = BatchLayout::new(1, 8);
    let (mut engine, x) = checked(&[("batch", layout.words(), DType::I32), ("wte", 8, f32), ("wpe", 64, f32)]);
    engine.write(x[2], &[0.0; 64]).unwrap();
    let text = engine
        .run(EncoderForward { out: x[2], batch: x[0], layout, wte: x[1], wpe: Some(x[2]), c: 8 })
        .unwrap_err()
        .to_string();
    assert!(text.contains("out-of-bounds access") && text.contains("wte + 1184, which has 32 bytes"), "{text}");

    let (mut engine, x) = checked(&[("out", 16, f32), ("inp", 16, f32), ("weight", 16, f32)]);
    let shape = MatmulShape { rows: 4, c: 4, oc: 4 };
    let text = format!("{:#}", engine.run(MatmulForward::new([x[0], x[1], x[2]], shape)).unwrap_err());
    assert!(text.starts_with("GEMM 4x4x4 NT f32") && text.ends_with("a: inp + 32 was never written"), "{text}");
}

/// The backend that computes a matmul reports that an operand was never written, which identifies it.
#[test]
fn matmuls_use_the_selected_backend() {
    let backend = |matmul, hopper, shape: MatmulShape| {
        let gpu = EmulatedGpu { hopper, matmul, ..EmulatedGpu::default() };
        let mut engine = emulated(gpu, Precision::Bf16, None, true);
        let mut plan = Plan::new();
        let mut add = |name: &str, len| plan.add(Group::Activations, name, &[len], DType::Bf16);
        let MatmulShape { rows, c, oc } = shape;
        let (out, inp, weight) = (add("out", rows * oc), add("inp", rows * c), add("weight", oc * c));
        engine.allocate(&plan).unwrap();
        let text = format!("{:#}", engine.run(MatmulForward::new([out, inp, weight], shape)).unwrap_err());
        let found = ["kernel matmul_", "GEMM", "no kernel computes"].map(|part| text.contains(part));
        found.iter().position(|found| *found).unwrap_or_else(|| panic!("{text}"))
    };
    let (rust_kernel, cublaslt, none) = (0, 1, 2);
    let shape = MatmulShape { rows: 5, c: 16, oc: 24 };
    for matmul in [MatmulBackend::Rust, MatmulBackend::Auto] {
        assert_eq!(backend(matmul, true, shape), rust_kernel);
    }
    assert_eq!(backend(MatmulBackend::Cublaslt, true, shape), cublaslt);
    assert_eq!(backend(MatmulBackend::Auto, false, shape), cublaslt);
    // TMA requires row sizes that are multiples of 16 bytes.
    for shape in [MatmulShape { c: 12, ..shape }, MatmulShape { oc: 12, ..shape }] {
        assert_eq!(backend(MatmulBackend::Auto, true, shape), cublaslt);
        assert_eq!(backend(MatmulBackend::Rust, true, shape), none);
    }
}

/// The kernel that recomputes `inp` is the first to report that its operands were never written, which identifies it.
#[test]
fn gelu_is_recomputed_by_the_kernel_that_computed_it() {
    let first_error = |matmul, hopper, precision, gelu_fusion| {
        let gpu = EmulatedGpu { hopper, matmul, ..EmulatedGpu::default() };
        let mut engine = emulated(gpu, precision, Some(gelu_fusion), true);
        let shape = MatmulShape { rows: 5, c: 32, oc: 8 };
        let MatmulShape { rows, c, oc } = shape;
        let (mut plan, float) = (Plan::new(), engine.dtype());
        let mut add = |name: &str, len: usize| plan.add(Group::Activations, name, &[len], float);
        let (dinp, inp, pre_gelu) = (add("dinp", rows * c), add("inp", rows * c), add("pre_gelu", rows * c));
        let (weight, dweight, dout) = (add("weight", oc * c), add("dweight", oc * c), add("dout", rows * oc));
        let (inp_before, weight_before) = (add("inp before", rows * oc), add("weight before", oc * c));
        let bias = add("bias before", c);
        engine.allocate(&plan).unwrap();
        engine.write(weight, &vec![1.0; oc * c]).unwrap();
        engine.write(dout, &vec![1.0; rows * oc]).unwrap();
        let forward = ActivationForward {
            inp: inp_before,
            weight: weight_before,
            bias: Some(bias),
            shape: MatmulShape { rows, c: oc, oc: c },
        };
        let activation =
            Some(ActivationInput { activation: Activation::Gelu, preactivation: pre_gelu, recompute: Some(forward) });
        format!(
            "{:#}",
            engine
                .run(MatmulBackward {
                    activation,
                    ..MatmulBackward::new(dinp, Some(dweight), [dout, inp, weight], shape)
                })
                .unwrap_err()
        )
    };
    let (auto, rust, cublaslt) = (MatmulBackend::Auto, MatmulBackend::Rust, MatmulBackend::Cublaslt);
    for (matmul, hopper, precision, fusion, expected) in [
        (auto, true, Precision::Bf16, GeluFusion::Both, "kernel matmul_ab_gelu_backward_and_value_"),
        (rust, true, Precision::Bf16, GeluFusion::Both, "kernel matmul_ab_gelu_backward_and_value_"),
        (rust, true, Precision::Bf16, GeluFusion::Forward, "kernel activation_forward_bf16_gelu"),
        (rust, true, Precision::Bf16, GeluFusion::None, "kernel activation_forward_bf16_gelu"),
        (cublaslt, true, Precision::Bf16, GeluFusion::Both, "GEMM 5x32x8 NT bf16 bias+gelu"),
        (cublaslt, true, Precision::Bf16, GeluFusion::None, "kernel activation_forward_bf16_gelu"),
        (auto, false, Precision::Bf16, GeluFusion::Both, "GEMM 5x32x8 NT bf16 bias+gelu"),
        (auto, false, Precision::Fp32, GeluFusion::None, "kernel activation_forward_f32_gelu"),
    ] {
        let found = first_error(matmul, hopper, precision, fusion);
        assert!(found.starts_with(expected), "{matmul:?} {hopper} {fusion:?}: {found}, expected {expected}");
    }
}

/// The first kernel of each pass reports that its operands were never written, which identifies it.
#[test]
fn activations_are_fused_where_a_kernel_computes_the_gemm() {
    let first_errors = |matmul, hopper, precision, activation: Activation| {
        let gpu = EmulatedGpu { hopper, matmul, ..EmulatedGpu::default() };
        let mut engine = emulated(gpu, precision, None, true);
        let shape = MatmulShape { rows: 5, c: 32, oc: 8 };
        let MatmulShape { rows, c, oc } = shape;
        let before = MatmulShape { rows, c: oc, oc: c * activation.inputs() };
        let (mut plan, float) = (Plan::new(), engine.dtype());
        let mut add = |name: &str, len: usize| plan.add(Group::Activations, name, &[len], float);
        let (dinp, inp, preactivation) =
            (add("dinp", rows * before.oc), add("inp", rows * c), add("preactivation", rows * before.oc));
        let (weight, dweight, dout) = (add("weight", oc * c), add("dweight", oc * c), add("dout", rows * oc));
        let (inp_before, weight_before) = (add("inp before", rows * oc), add("weight before", before.oc * oc));
        engine.allocate(&plan).unwrap();
        engine.write(weight, &vec![1.0; oc * c]).unwrap();
        engine.write(dout, &vec![1.0; rows * oc]).unwrap();
        let forward = ActivationForward { inp: inp_before, weight: weight_before, bias: None, shape: before };
        let epilogue = Epilogue::Activation(activation, preactivation);
        let first = MatmulForward {
            out: inp,
            inp: inp_before,
            weight: weight_before,
            bias: None,
            epilogue,
            shape: before,
            fp8: None,
            groups: None,
        };
        let first = format!("{:#}", engine.run(first).unwrap_err());
        let second = [None, Some(forward)].map(|recompute| {
            let activation = Some(ActivationInput { activation, preactivation, recompute });
            let backward =
                MatmulBackward { activation, ..MatmulBackward::new(dinp, Some(dweight), [dout, inp, weight], shape) };
            format!("{:#}", engine.run(backward).unwrap_err())
        });
        [first].into_iter().chain(second).collect::<Vec<_>>()
    };
    let (auto, rust, cublaslt) = (MatmulBackend::Auto, MatmulBackend::Rust, MatmulBackend::Cublaslt);
    let (relu, swiglu) = (Activation::ReluSquared, Activation::SwiGlu);
    let (bf16, fp32) = (Precision::Bf16, Precision::Fp32);
    let fused_relu = [
        "kernel matmul_abt_relu_squared_",
        "kernel matmul_ab_relu_squared_backward_t",
        "kernel matmul_ab_relu_squared_backward_and_value_",
    ];
    let fused_swiglu = [
        "kernel matmul_abt_swiglu_",
        "kernel matmul_ab_swiglu_backward_t",
        "kernel matmul_ab_swiglu_backward_and_value_",
    ];
    // Without fusion, the weight gradient of a SwiGLU's layer comes before the gradient of its input.
    let unfused_relu = [
        "GEMM 5x32x8 NT bf16",
        "kernel activation_backward_bf16_relu_squared",
        "kernel activation_forward_bf16_relu_squared",
    ];
    let unfused_swiglu =
        ["GEMM 5x64x8 NT bf16", "GEMM 8x32x5 TN bf16 residual", "kernel activation_forward_bf16_swiglu"];
    let f32_swiglu = ["GEMM 5x64x8 NT f32", "GEMM 8x32x5 TN f32 residual", "kernel activation_forward_f32_swiglu"];
    for (matmul, hopper, precision, activation, expected) in [
        (auto, true, bf16, relu, fused_relu),
        (rust, true, bf16, relu, fused_relu),
        (cublaslt, true, bf16, relu, unfused_relu),
        (auto, false, bf16, relu, unfused_relu),
        (auto, true, bf16, swiglu, fused_swiglu),
        (rust, true, bf16, swiglu, fused_swiglu),
        (cublaslt, true, bf16, swiglu, unfused_swiglu),
        (auto, false, bf16, swiglu, unfused_swiglu),
        (auto, true, fp32, swiglu, f32_swiglu),
    ] {
        let found = first_errors(matmul, hopper, precision, activation);
        for (found, expected) in found.iter().zip(expected) {
            assert!(found.starts_with(expected), "{matmul:?} {hopper} {activation:?}: {found}, expected {expected}");
        }
    }
}
