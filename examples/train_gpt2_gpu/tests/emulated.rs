//! Runs the kernels, and training steps of whole models, in the emulator. Every memory access is checked. GEMMs run on the CPU.

#[path = "../train_gpt2_gpu.rs"]
#[allow(dead_code, reason = "the tests call a part of the program")]
mod program;

use cublaslt::StridedBatch;
use cuda_std::emulate::{Memory, Pod};
use cuda_std::launch::Launch;
use cuda_std::{Global, GlobalMut};
use gpu::matmul::gemm::GemmLayout;
use program::{Device, Files, GemmCall, Result, Tensor};
use std::fs;
use std::path::{Path, PathBuf};
use train_gpt2_kernels as kernels;

// ---------------------------------------------------------------------------------------------------------------------------------
// Kernels

/// Returns `n` random numbers in [-1, 1), with a seed.
fn random(seed: u64, n: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / 8_388_608.0 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

/// Asserts that two vectors agree up to 1e-5 of the largest expected value.
#[track_caller]
fn assert_close(name: &str, found: &[f32], expected: &[f64]) {
    assert_eq!(found.len(), expected.len(), "{name}");
    let largest = expected.iter().fold(1e-3, |max: f64, x| max.max(x.abs()));
    for (i, (&found, &expected)) in found.iter().zip(expected).enumerate() {
        assert!((f64::from(found) - expected).abs() <= 1e-5 * largest, "{name}[{i}]: {found}, expected {expected}");
    }
}

/// Runs a kernel with all accesses checked.
#[track_caller]
fn emulate(memory: &mut Memory, launch: &Launch, grid: [usize; 3]) {
    let grid = grid.map(|blocks| blocks as u32);
    launch.emulate_checked(memory, grid, launch.shared_bytes()).unwrap_or_else(|report| panic!("{report}"));
}

fn threads(n: usize) -> [usize; 3] {
    [n.div_ceil(kernels::THREADS), 1, 1]
}

fn warps(rows: usize) -> [usize; 3] {
    [rows.div_ceil(kernels::WARPS), 1, 1]
}

fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().copied().map(f64::from).collect()
}

/// (B, T, C) with rows that are aligned to 16 bytes, and others; more and less than a block.
const SHAPES: [(usize, usize, usize); 5] = [(1, 1, 1), (2, 3, 5), (2, 5, 8), (3, 7, 130), (1, 9, 260)];

#[test]
fn encoder_forward_adds_embeddings() {
    for (b, t, c) in SHAPES {
        let (v, mut memory) = (7, Memory::new());
        let tokens: Vec<u16> = (0..b * t).map(|i| (i * 5 % v) as u16).collect();
        let (wte, wpe) = (random(1, v * c), random(2, (t + 1) * c));
        let out = memory.output("out", b * t * c);
        let (ids, wte_view, wpe_view) =
            (memory.input("tokens", &tokens), memory.input("wte", &wte), memory.input("wpe", &wpe));
        let launch = kernels::encoder_forward(out, ids, wte_view, wpe_view, (b * t) as u32, t as u32, c as u32);
        emulate(&mut memory, &launch, threads(b * t * c.div_ceil(4)));
        let expected: Vec<f64> = (0..b * t * c)
            .map(|i| f64::from(wte[usize::from(tokens[i / c]) * c + i % c]) + f64::from(wpe[i / c % t * c + i % c]))
            .collect();
        assert_close("out", &memory.read(out), &expected);
    }
}

#[test]
fn encoder_backward_adds_to_rows_of_tokens_and_positions() {
    for (b, t, c) in SHAPES {
        let (v, mut memory) = (7, Memory::new());
        let tokens: Vec<u16> = (0..b * t).map(|i| (i * i % v) as u16).collect();
        let mut order: Vec<u32> = (0..tokens.len() as u32).collect();
        order.sort_by_key(|&i| tokens[i as usize]);
        let sorted: Vec<u16> = order.iter().map(|&i| tokens[i as usize]).collect();
        let mut starts: Vec<u32> = (0..sorted.len())
            .filter(|&i| i == 0 || sorted[i] != sorted[i - 1])
            .map(|i| i as u32)
            .chain([sorted.len() as u32])
            .collect();
        let distinct = starts.len() - 1;
        starts.resize(b * t + 1, 0);
        let (dout, old_wte, old_wpe) = (random(1, b * t * c), random(2, v * c), random(3, t * c));
        let (dwte, dwpe) = (memory.buffer("dwte", &old_wte), memory.buffer("dwpe", &old_wpe));
        let dout_view = memory.input("dout", &dout);
        let ids = memory.input("tokens", &tokens);
        let (order, starts) = (memory.input("order", &order), memory.input("starts", &starts));
        let launch = kernels::wte_backward(dwte, dout_view, ids, order, starts, c as u32);
        emulate(&mut memory, &launch, [distinct, c.div_ceil(kernels::THREADS), 1]);
        let launch = kernels::wpe_backward(dwpe, dout_view, b as u32, t as u32, c as u32);
        emulate(&mut memory, &launch, threads((t * c).div_ceil(4)));
        let (mut expected_wte, mut expected_wpe) = (wide(&old_wte), wide(&old_wpe));
        for (i, &dout) in dout.iter().enumerate() {
            expected_wte[usize::from(tokens[i / c]) * c + i % c] += f64::from(dout);
            expected_wpe[i / c % t * c + i % c] += f64::from(dout);
        }
        assert_close("dwte", &memory.read(dwte), &expected_wte);
        assert_close("dwpe", &memory.read(dwpe), &expected_wpe);
    }
}

/// Returns the mean and 1 / standard deviation of a row.
fn stats(x: &[f32]) -> [f64; 2] {
    let n = x.len() as f64;
    let mean = wide(x).iter().sum::<f64>() / n;
    let variance = wide(x).iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n;
    [mean, 1.0 / (variance + 1e-5).sqrt()]
}

#[test]
fn layernorm_forward_normalizes_rows() {
    for (b, t, c) in SHAPES {
        let (rows, mut memory) = (b * t, Memory::new());
        let (inp, weight, bias) = (random(1, rows * c), random(2, c), random(3, c));
        let (out, mean, rstd) =
            (memory.output("out", rows * c), memory.output("mean", rows), memory.output("rstd", rows));
        let (x, w, b) = (memory.input("inp", &inp), memory.input("weight", &weight), memory.input("bias", &bias));
        let launch = kernels::layernorm_forward(out, mean, rstd, x, w, b, rows as u32, c as u32);
        emulate(&mut memory, &launch, warps(rows));
        let stats: Vec<_> = inp.chunks(c).map(stats).collect();
        let expected: Vec<f64> = (0..rows * c)
            .map(|i| {
                let [mean, rstd] = stats[i / c];
                (f64::from(inp[i]) - mean) * rstd * f64::from(weight[i % c]) + f64::from(bias[i % c])
            })
            .collect();
        assert_close("out", &memory.read(out), &expected);
        assert_close("mean", &memory.read(mean), &stats.iter().map(|stats| stats[0]).collect::<Vec<_>>());
        assert_close("rstd", &memory.read(rstd), &stats.iter().map(|stats| stats[1]).collect::<Vec<_>>());
    }
}

#[test]
fn layernorm_backward_adds_gradients() {
    // 300 rows are three chunks.
    for (rows, c) in [(1, 1), (6, 5), (10, 132), (300, 33)] {
        let mut memory = Memory::new();
        let (inp, dout, weight, old) = (random(1, rows * c), random(2, rows * c), random(3, c), random(4, rows * c));
        let stats: Vec<_> = inp.chunks(c).map(stats).collect();
        let part = |which: usize| stats.iter().map(|stats| stats[which] as f32).collect::<Vec<_>>();
        let (mean, rstd) = (memory.input("mean", &part(0)), memory.input("rstd", &part(1)));
        let (x, d, w) = (memory.input("inp", &inp), memory.input("dout", &dout), memory.input("weight", &weight));
        let dinp = memory.buffer("dinp", &old);
        let launch = kernels::layernorm_backward_input(dinp, d, x, w, mean, rstd, rows as u32, c as u32);
        emulate(&mut memory, &launch, warps(rows));

        let chunks = rows.div_ceil(kernels::CHUNK);
        let partials = memory.output("partials", 2 * chunks * c);
        let launch = kernels::layernorm_backward_params(partials, d, x, mean, rstd, rows as u32, c as u32);
        emulate(&mut memory, &launch, [c.div_ceil(kernels::COLUMNS), chunks, 1]);
        let (dweight, dbias) = (memory.buffer("dweight", &weight), memory.buffer("dbias", &weight));
        for (which, out) in [dweight, dbias].into_iter().enumerate() {
            let partials = partials.reader().skip(which * chunks * c);
            let launch = kernels::add_partials(out, partials, chunks as u32, c as u32);
            emulate(&mut memory, &launch, threads(c));
        }

        let (mut expected, mut expected_w, mut expected_b) = (wide(&old), wide(&weight), wide(&weight));
        for row in 0..rows {
            let [mean, rstd] = stats[row];
            let n = |j: usize| (f64::from(inp[row * c + j]) - mean) * rstd;
            let dn = |j: usize| f64::from(dout[row * c + j]) * f64::from(weight[j]);
            let mean_dn = (0..c).map(dn).sum::<f64>() / c as f64;
            let mean_dn_n = (0..c).map(|j| dn(j) * n(j)).sum::<f64>() / c as f64;
            for j in 0..c {
                expected[row * c + j] += (dn(j) - mean_dn - n(j) * mean_dn_n) * rstd;
                expected_w[j] += f64::from(dout[row * c + j]) * n(j);
                expected_b[j] += f64::from(dout[row * c + j]);
            }
        }
        assert_close("dinp", &memory.read(dinp), &expected);
        assert_close("dweight", &memory.read(dweight), &expected_w);
        assert_close("dbias", &memory.read(dbias), &expected_b);
    }
}

#[test]
fn column_sums_are_added() {
    for (rows, columns) in [(1, 1), (9, 31), (130, 65), (257, 33)] {
        let mut memory = Memory::new();
        let (inp, old) = (random(1, rows * columns), random(2, columns));
        let chunks = rows.div_ceil(kernels::CHUNK);
        let (x, partials) = (memory.input("inp", &inp), memory.output("partials", chunks * columns));
        let launch = kernels::column_sums(partials, x, rows as u32, columns as u32);
        emulate(&mut memory, &launch, [columns.div_ceil(kernels::COLUMNS), chunks, 1]);
        let out = memory.buffer("out", &old);
        let launch = kernels::add_partials(out, partials.reader(), chunks as u32, columns as u32);
        emulate(&mut memory, &launch, threads(columns));
        let mut expected = wide(&old);
        inp.iter().enumerate().for_each(|(i, &x)| expected[i % columns] += f64::from(x));
        assert_close("out", &memory.read(out), &expected);
    }
}

#[test]
fn permute_and_unpermute_change_the_layout_of_heads() {
    for (b, t, parts, nh, hs) in [(1, 1usize, 1, 1, 1), (2, 3, 3, 2, 5), (2, 5, 1, 3, 8), (1, 4, 3, 2, 68)] {
        let (mut memory, stride) = (Memory::new(), (t * hs).next_multiple_of(128));
        let heads = kernels::Heads {
            b: b as u32,
            t: t as u32,
            parts: parts as u32,
            nh: nh as u32,
            hs: hs as u32,
            stride: stride as u32,
        };
        let inp = random(1, b * t * parts * nh * hs);
        let (x, permuted) = (memory.input("inp", &inp), memory.zeroed::<f32>("permuted", parts * b * nh * stride));
        let grid = threads(b * t * parts * nh * hs.div_ceil(4));
        emulate(&mut memory, &kernels::permute(permuted, x, heads), grid);
        let mut expected = vec![0.0; parts * b * nh * stride];
        for (i, &x) in inp.iter().enumerate() {
            let (d, h, part) = (i % hs, i / hs % nh, i / hs / nh % parts);
            let (t2, b2) = (i / hs / nh / parts % t, i / hs / nh / parts / t);
            expected[((part * b + b2) * nh + h) * stride + t2 * hs + d] = f64::from(x);
        }
        assert_close("permuted", &memory.read(permuted), &expected);
        let back = memory.output("back", inp.len());
        emulate(&mut memory, &kernels::unpermute(back, permuted.reader(), heads), grid);
        assert_eq!(memory.read(back), inp);
    }
}

#[test]
fn causal_softmax_and_its_gradient_leave_the_upper_triangle() {
    for (matrices, t) in [(1, 1usize), (3, 5), (2, 12), (1, 133)] {
        let (mut memory, stride, scale) = (Memory::new(), (t * t).next_multiple_of(128), 0.3);
        let scores: Vec<f32> = random(1, matrices * stride).iter().map(|x| 100.0 * x).collect();
        let (datt, rows) = (random(2, matrices * stride), matrices * t);
        let (preatt, att) = (memory.input("preatt", &scores), memory.buffer("att", &vec![7.0; scores.len()]));
        let launch = kernels::softmax_forward(att, preatt, scale, rows as u32, t as u32, stride as u32);
        emulate(&mut memory, &launch, warps(rows));
        let (datt_view, dpreatt) = (memory.input("datt", &datt), memory.buffer("dpreatt", &vec![7.0; scores.len()]));
        let reader = att.reader();
        let launch = kernels::softmax_backward(dpreatt, datt_view, reader, scale, rows as u32, t as u32, stride as u32);
        emulate(&mut memory, &launch, warps(rows));

        let (mut expected, mut expected_d) = (vec![7.0; scores.len()], vec![7.0; scores.len()]);
        for row in 0..rows {
            let (start, len) = (row / t * stride + row % t * t, row % t + 1);
            let x = wide(&scores[start..start + len]);
            let max = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let powers: Vec<f64> = x.iter().map(|x| (f64::from(scale) * (x - max)).exp()).collect();
            let p: Vec<f64> = powers.iter().map(|power| power / powers.iter().sum::<f64>()).collect();
            let d = wide(&datt[start..start + len]);
            let dot: f64 = p.iter().zip(&d).map(|(p, d)| p * d).sum();
            for i in 0..len {
                expected[start + i] = p[i];
                expected_d[start + i] = p[i] * (d[i] - dot) * f64::from(scale);
            }
        }
        assert_close("att", &memory.read(att), &expected);
        assert_close("dpreatt", &memory.read(dpreatt), &expected_d);
    }
}

#[test]
fn elementwise_kernels_match() {
    for n in [1, 3, 1024, 1027] {
        let mut memory = Memory::new();
        let (a, b): (Vec<f32>, Vec<f32>) = (random(1, n).iter().map(|x| 4.0 * x).collect(), random(2, n));
        let (x, y) = (memory.input("a", &a), memory.input("b", &b));
        let [sum, gelu, dgelu] = ["sum", "gelu", "dgelu"].map(|name| memory.output(name, n));
        let grid = threads(n.div_ceil(4));
        emulate(&mut memory, &kernels::residual_forward(sum, x, y, n as u64), grid);
        emulate(&mut memory, &kernels::gelu_forward(gelu, x, n as u64), grid);
        emulate(&mut memory, &kernels::gelu_backward(dgelu, x, y, n as u64), grid);
        let scale = (2.0 / std::f64::consts::PI).sqrt();
        let tanh = |x: f64| (scale * (x + 0.044715 * x.powi(3))).tanh();
        let derivative = |x: f64| {
            let slope = scale * (1.0 + 3.0 * 0.044715 * x * x);
            0.5 * (1.0 + tanh(x)) + 0.5 * x * (1.0 - tanh(x).powi(2)) * slope
        };
        let pairs: Vec<_> = wide(&a).into_iter().zip(wide(&b)).collect();
        let expected = |f: &dyn Fn(f64, f64) -> f64| pairs.iter().map(|&(a, b)| f(a, b)).collect::<Vec<_>>();
        assert_close("sum", &memory.read(sum), &expected(&|a, b| a + b));
        assert_close("gelu", &memory.read(gelu), &expected(&|a, _| 0.5 * a * (1.0 + tanh(a))));
        assert_close("dgelu", &memory.read(dgelu), &expected(&|a, b| b * derivative(a)));
    }
}

#[test]
fn classifier_computes_losses_and_gradients() {
    for (rows, v, vp) in [(1, 1, 1), (3, 5, 7), (2, 61, 128), (2, 5001, 5004)] {
        let mut memory = Memory::new();
        let logits: Vec<f32> = random(1, rows * vp).iter().map(|x| 60.0 * x).collect();
        let targets: Vec<u16> = (0..rows).map(|row| (row * 1234 % v) as u16).collect();
        let (in_place, losses) = (memory.buffer("logits", &logits), memory.output("losses", rows));
        let ids = memory.input("targets", &targets);
        emulate(&mut memory, &kernels::classifier(in_place, losses, ids, v as u32, vp as u32), [rows, 1, 1]);
        let (mut expected, mut expected_losses) = (vec![0.0; rows * vp], Vec::new());
        for row in 0..rows {
            let x = wide(&logits[row * vp..row * vp + v]);
            let max = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = x.iter().map(|x| (x - max).exp()).sum();
            let target = usize::from(targets[row]);
            expected_losses.push(sum.ln() - (x[target] - max));
            for i in 0..v {
                let p = (x[i] - max).exp() / sum;
                expected[row * vp + i] = (p - f64::from(u8::from(i == target))) / rows as f64;
            }
        }
        assert_close("losses", &memory.read(losses), &expected_losses);
        assert_close("dlogits", &memory.read(in_place), &expected);
    }
}

#[test]
fn adamw_updates_parameters() {
    for n in [1, 6, 1025] {
        let mut memory = Memory::new();
        let (p, g, m) = (random(1, n), random(2, n), random(3, n));
        let v: Vec<f32> = random(4, n).iter().map(|x| x * x).collect();
        let settings = kernels::AdamW {
            learning_rate: 0.01,
            beta1: 0.9,
            beta2: 0.999,
            correction1: 0.271,
            correction2: 0.002997,
            eps: 1e-8,
            decay: 0.1,
        };
        let views = (memory.buffer("p", &p), memory.input("g", &g), memory.buffer("m", &m), memory.buffer("v", &v));
        let launch = kernels::adamw(views.0, views.1, views.2, views.3, settings, n as u64);
        emulate(&mut memory, &launch, threads(n.div_ceil(4)));
        let (mut expected_p, mut expected_m, mut expected_v) = (wide(&p), wide(&m), wide(&v));
        for i in 0..n {
            let g = f64::from(g[i]);
            expected_m[i] = 0.9 * expected_m[i] + 0.1 * g;
            expected_v[i] = 0.999 * expected_v[i] + 0.001 * g * g;
            let update = (expected_m[i] / 0.271) / ((expected_v[i] / 0.002997).sqrt() + 1e-8);
            expected_p[i] -= 0.01 * (update + 0.1 * expected_p[i]);
        }
        assert_close("p", &memory.read(views.0), &expected_p);
        assert_close("m", &memory.read(views.2), &expected_m);
        assert_close("v", &memory.read(views.3), &expected_v);
    }
}

// ---------------------------------------------------------------------------------------------------------------------------------
// Whole models

/// The emulator as a device of the program.
#[derive(Default)]
struct Emulated {
    memory: Memory,
}

impl Emulated {
    fn slice<T: Pod>(&self, tensor: Tensor<T>) -> Result<&[T]> {
        self.memory.slice(Global::from_address(tensor.address), tensor.len).map_err(|error| error.to_string())
    }
}

impl Device for Emulated {
    fn allocate(&mut self, bytes: usize) -> Result<u64> {
        Ok(self.memory.zeroed::<u8>("device memory", bytes).pointer().addr() as u64)
    }

    fn launch(&mut self, launch: &Launch, grid: [u32; 3]) -> Result<()> {
        launch.emulate_checked(&mut self.memory, grid, launch.shared_bytes()).map_err(|report| report.to_string())
    }

    fn gemm(&mut self, call: &GemmCall) -> Result<()> {
        let GemmCall { layout, size: [m, n, k], a, b, out, bias, accumulate, batch } = *call;
        let batch = batch.unwrap_or(StridedBatch { count: 1, a: m * k, b: k * n, out: m * n });
        // The strides of a batch are rounded up, as cuBLASLt's binding requires.
        let strides = [(batch.a, m * k), (batch.b, k * n), (batch.out, m * n)];
        assert!(batch.count == 1 || strides.iter().all(|&(stride, len)| stride >= len && stride.is_multiple_of(128)));
        assert!([a, b, out].iter().all(|tensor| tensor.address.is_multiple_of(16)));
        let (a, b) = (self.slice(a)?, self.slice(b)?);
        let bias = bias.map(|bias| self.slice(bias)).transpose()?;
        let mut result = self.slice(out)?.to_vec();
        for matrix in 0..batch.count {
            let (a, b) = (&a[matrix * batch.a..][..m * k], &b[matrix * batch.b..][..k * n]);
            let result = &mut result[matrix * batch.out..][..m * n];
            for (i, row) in result.chunks_mut(n).enumerate() {
                for (j, out) in row.iter_mut().enumerate() {
                    let a = |l: usize| if layout == GemmLayout::Tn { a[l * m + i] } else { a[i * k + l] };
                    let b = |l: usize| if layout == GemmLayout::Nt { b[j * k + l] } else { b[l * n + j] };
                    let sum = (0..k).map(|l| f64::from(a(l)) * f64::from(b(l))).sum::<f64>() as f32;
                    *out = sum + bias.map_or(0.0, |bias| bias[j]) + if accumulate { *out } else { 0.0 };
                }
            }
        }
        self.upload(out, &result)
    }

    fn upload<T: Pod>(&mut self, to: Tensor<T>, from: &[T]) -> Result<()> {
        self.memory.write(GlobalMut::from_address(to.address), from).map_err(|error| error.to_string())
    }

    fn download(&mut self, from: Tensor) -> Result<Vec<f32>> {
        self.slice(from).map(<[f32]>::to_vec)
    }

    fn zero(&mut self, tensor: Tensor) -> Result<()> {
        self.upload(tensor, &vec![0.0; tensor.len])
    }

    fn synchronize(&mut self) -> Result<()> {
        Ok(())
    }
}

fn reference(name: &str) -> String {
    format!("{}/../../tests/data/{name}", env!("CARGO_MANIFEST_DIR"))
}

/// Compares logits, gradients and ten AdamW steps with those of PyTorch (`scripts/pytorch_reference.py`).
fn compare(name: &str) -> Result<()> {
    let [model, state, losses] =
        [".bin", "_debug_state.bin", "_losses.txt"].map(|end| reference(&format!("{name}{end}")));
    assert_eq!(fs::read_to_string(&losses).unwrap().split_whitespace().count(), 10);
    program::test(&model, &state, Some(&losses), || Ok(Emulated::default()))
}

#[test]
fn the_reference_of_two_layers_is_reproduced() {
    compare("tiny").unwrap();
}

#[test]
fn the_reference_of_a_model_with_odd_sizes_is_reproduced() {
    compare("wide").unwrap();
}

#[test]
fn a_changed_weight_is_found() {
    let directory = directory("changed");
    let mut model = fs::read(reference("tiny.bin")).unwrap();
    // A weight of the second layer's qkvw, 0.02 larger.
    let at = 1024 + 4 * (128 * 48 + 20 * 48 + 4 * 48 + 3 * 48 * 48 + 1000);
    let weight = f32::from_le_bytes(model[at..at + 4].try_into().unwrap()) + 0.02;
    model[at..at + 4].copy_from_slice(&weight.to_le_bytes());
    let path = directory.join("changed.bin");
    fs::write(&path, &model).unwrap();
    let state = reference("tiny_debug_state.bin");
    let path = path.to_str().unwrap();
    let error = program::test(path, &state, Some(&reference("tiny_losses.txt")), || Ok(Emulated::default()));
    assert!(error.unwrap_err().contains("changed.bin does not compute what"));
}

/// Returns an empty directory that only this test uses.
fn directory(test: &str) -> PathBuf {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join(test);
    let _ = fs::remove_dir_all(&directory);
    fs::create_dir_all(&directory).unwrap();
    directory
}

/// Writes a token file and returns its path.
fn token_file(directory: &Path, name: &str, tokens: &[u16]) -> String {
    let mut header = [0u32; 256];
    (header[0], header[1], header[2]) = (20_240_520, 1, tokens.len() as u32);
    let header = header.iter().flat_map(|word| word.to_le_bytes());
    let bytes: Vec<u8> = header.chain(tokens.iter().flat_map(|token| token.to_le_bytes())).collect();
    let path = directory.join(name);
    fs::write(&path, bytes).unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn the_training_loop_runs() {
    let directory = directory("loop");
    let tokens: Vec<u16> = (0..30).map(|i| i % 7).collect();
    let files = Files {
        model: reference("tiny.bin"),
        train: token_file(&directory, "train.bin", &tokens),
        val: token_file(&directory, "val.bin", &tokens[..12]),
    };
    program::train(&files, 2, 5, || Ok((Emulated::default(), "emulator".to_owned()))).unwrap();
    let error = program::train(&files, 4, 5, || Ok((Emulated::default(), String::new()))).unwrap_err();
    assert!(error.contains("val.bin: expected more than B T = 20 tokens, found 12"), "{error}");
}

// ---------------------------------------------------------------------------------------------------------------------------------
// The program

/// Runs the program without a visible GPU, and returns its error.
fn error(arguments: &[&str], directory: &Path) -> String {
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_train_gpt2_gpu"));
    let output = command.args(arguments).current_dir(directory).env("CUDA_VISIBLE_DEVICES", "").output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(1) && error.starts_with("error: "), "{error}");
    error
}

#[test]
fn errors_name_what_is_missing() {
    let directory = directory("missing");
    let text = error(&[], &directory);
    assert!(text.contains("gpt2_124M.bin: ") && text.contains("download_starter_pack.sh"), "{text}");
    assert!(text.contains("llm-rs export --format llmc --dtype fp32"), "{text}");
    let model = reference("tiny.bin");
    let text = error(&["-t", "16", &model, "train.bin", "val.bin"], &directory);
    assert!(text.contains("train.bin: ") && text.contains("llm-rs data tinyshakespeare"), "{text}");
    let text = error(&[&model, "train.bin", "val.bin"], &directory);
    assert!(text.contains("T from 1 to 20, found B = 4, T = 1024"), "{text}");
    for arguments in [&["-b", "x"][..], &["-t"], &["a"], &["test", "a"]] {
        assert!(error(arguments, &directory).contains("expected "));
    }
}

#[test]
fn a_machine_without_a_gpu_is_referred_to_the_cpu_program() {
    let (directory, tokens) = (directory("no-gpu"), [1; 100]);
    let (train, val) = (token_file(&directory, "train.bin", &tokens), token_file(&directory, "val.bin", &tokens));
    let text = error(&["-b", "2", "-t", "8", &reference("tiny.bin"), &train, &val], &directory);
    assert!(
        text.contains("train_gpt2_gpu needs an NVIDIA GPU; on a CPU, run `cargo run --release -p train_gpt2`"),
        "{text}"
    );
}

/// The program can be read in an evening. Kernels need no `unsafe`.
#[test]
fn the_program_is_two_short_files() {
    let (program, kernels) = (include_str!("../train_gpt2_gpu.rs"), include_str!("../kernels/src/lib.rs"));
    let lines = program.lines().count() + kernels.lines().count();
    assert!(lines <= 2000, "{lines} lines");
    assert!(!kernels.contains("unsafe"));
    let (blocks, reasons) = (program.matches("unsafe {").count(), program.matches("// SAFETY: ").count());
    assert_eq!(blocks, reasons, "unsafe blocks, SAFETY comments");
}
