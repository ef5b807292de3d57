//! Text generation with a KV cache, against recomputing the whole text for every token.

use engine::cpu::Cpu;
use engine::cuda::{EmulatedGpu, Precision, emulated};
use engine::ops::{Activation, QkNormScope, RotaryPairs, RouterScores, SlotSampling};
use engine::{Engine, Result};
use host::generate::{Finish, Request, Scheduler, generate};
use host::sample::{self, Sampling};
use model::descriptor::{Additions, Biases, Experts, Normalization, Positions, QkNorm, Rotary, Windows};
use model::{Decoder, Descriptor, Generator, Param, PlanOptions, Unsharded, WeightFormat, init};
use std::collections::HashMap;
use std::sync::Arc;

/// Returns a small model of every architecture. Kernels of attention need heads of at least 64 channels.
fn models() -> Vec<(&'static str, Descriptor)> {
    let gpt2 = Descriptor::gpt2(2, 2, 128, 48, 70).unwrap();
    let rotary = |pairs| Positions::Rotary(Rotary { theta: 10_000.0, scaling: None, pairs });
    let llama = Descriptor {
        heads: 4,
        kv_heads: 2,
        head_size: 64,
        mlp_channels: 72,
        norm: Normalization::RmsNorm { eps: 1e-5, weights: true },
        positions: rotary(RotaryPairs::HalfSplit),
        activation: Activation::SwiGlu,
        biases: Biases::None,
        tied: false,
        ..gpt2
    };
    let norm = |weights, gain| Some(QkNorm { eps: 1e-6, weights, gain, scope: QkNormScope::Head });
    let qwen2 = Descriptor { biases: Biases::Qkv, heads: 6, tied: true, ..llama };
    let qwen3 = Descriptor { qk_norm: norm(true, 1.0), head_size: 80, ..llama };
    let modern = Descriptor {
        norm: Normalization::RmsNorm { eps: 1e-6, weights: false },
        qk_norm: norm(false, 1.2),
        activation: Activation::ReluSquared,
        embedding_norm: true,
        softcap: Some(15.0),
        heads: 2,
        kv_heads: 2,
        ..llama
    };
    let all_heads = qwen3.qk_norm.map(|norm| QkNorm { scope: QkNormScope::AllHeads, ..norm });
    let windows = |size, pattern: &str| Some(Windows { size, pattern: pattern.parse().unwrap() });
    let interleaved = Descriptor { positions: rotary(RotaryPairs::Interleaved), kv_heads: 1, ..llama };
    [
        ("gpt2", gpt2),
        ("llama", llama),
        ("qwen2", qwen2),
        ("qwen3", qwen3),
        ("qwen3 with a norm of all heads", Descriptor { qk_norm: all_heads, ..qwen3 }),
        ("modern", modern),
        ("interleaved", interleaved),
        ("geglu", Descriptor { activation: Activation::GeGlu, ..llama }),
        ("gpt2 with windows", Descriptor { windows: windows(4, "SS"), ..gpt2 }),
        ("qwen3 with windows", Descriptor { windows: windows(3, "SL"), ..qwen3 }),
        ("nanochat", Descriptor { additions: Additions::ALL, windows: windows(5, "SL"), ..modern }),
        ("qwen3 with value embeddings", Descriptor { additions: "value-embeddings".parse().unwrap(), ..qwen3 }),
        ("gpt2 with additions", Descriptor { additions: "residual-scales,smear,backout".parse().unwrap(), ..gpt2 }),
    ]
    .map(|(name, descriptor)| (name, descriptor.checked().unwrap()))
    .to_vec()
}

/// Returns [`models`], and those that only the CPU engine computes.
fn models_on_the_cpu() -> Vec<(&'static str, Descriptor)> {
    let mut models = models();
    let (_, qwen3) = models[3];
    let experts = Experts {
        count: 5,
        active: 2,
        scores: RouterScores::Softmax,
        normalized: true,
        bias: false,
        shared_channels: 0,
        aux_loss: 0.0,
        z_loss: 0.0,
    };
    let sigmoid =
        Experts { scores: RouterScores::Sigmoid, normalized: false, bias: true, shared_channels: 40, ..experts };
    let all_heads = qwen3.qk_norm.map(|norm| QkNorm { scope: QkNormScope::AllHeads, ..norm });
    models.push(("experts", Descriptor { experts: Some(experts), ..qwen3 }));
    models.push((
        "experts beside an MLP",
        Descriptor { experts: Some(sigmoid), qk_norm: all_heads, ..qwen3 }.checked().unwrap(),
    ));
    models
}

/// Passes weights to `write` that make logits far from uniform: random ones times 5, for norms and biases as well.
fn random(descriptor: &Descriptor, mut write: impl FnMut(Param, usize, &[f32]) -> Result<()>) {
    init::generate(descriptor, 42, |param, layer, values| {
        let noise = |i: usize| gpu::noise::squirrel5(i as u32, (layer * 31 + param as usize) as u32) as f32 / 4e9 - 0.5;
        let random = descriptor.init == model::descriptor::Init::DepthScaled || !param.is_matrix();
        let value = |(i, &v): (usize, &f32)| if random { v + 0.5 * noise(i) } else { 5.0 * v };
        let values: Vec<f32> = values.iter().enumerate().map(value).collect();
        write(param, layer, &values)
    })
    .unwrap();
}

fn load(model: &Decoder, engine: &mut dyn Engine) {
    random(&model.descriptor, |param, layer, values| engine.write(model.layout.of(model.params, param, layer), values));
}

fn generator(descriptor: Descriptor, slots: usize, capacity: usize, engine: &mut dyn Engine) -> Generator {
    let (generator, plan) = Generator::plan(descriptor, slots, capacity, WeightFormat::Float, engine).unwrap();
    engine.allocate(&plan).unwrap();
    load(&generator.decoder, engine);
    generator
}

const GREEDY: SlotSampling = SlotSampling::GREEDY;

fn request(prompt: &[u32], tokens: usize, seed: u32, sampling: SlotSampling) -> Request {
    Request { prompt: prompt.to_vec(), tokens, seed, sampling, ends: Vec::new() }
}

/// Returns the tokens of each request.
fn texts(
    generator: &Generator,
    engine: &mut dyn Engine,
    requests: &[Request],
    run_ahead: bool,
) -> Result<Vec<Vec<u32>>> {
    let mut texts = vec![Vec::new(); requests.len()];
    generate(generator, engine, requests, run_ahead, &mut |i, token| {
        texts[i].push(token);
        Ok(true)
    })?;
    Ok(texts)
}

/// Returns the most likely tokens after `prompt`, computing the whole text for each of them.
fn recomputed(descriptor: Descriptor, engine: &mut dyn Engine, prompt: &[u32], tokens: usize) -> Vec<u32> {
    let (model, plan) = Decoder::plan(descriptor, PlanOptions::inference(1, descriptor.max_seq_len), engine);
    engine.allocate(&plan).unwrap();
    load(&model, engine);
    let sampling = Sampling { top_k: 0, temperature: 0.0, seed: 0 };
    let mut out = Vec::new();
    sample::generate(&model, engine, &mut Unsharded, prompt, tokens, sampling, |token| {
        out.push(token);
        Ok(())
    })
    .unwrap();
    out
}

const PROMPT: [u32; 5] = [3, 69, 14, 15, 9];

#[test]
fn greedy_text_on_the_cpu_is_that_of_recomputing_every_token() {
    for (name, descriptor) in models_on_the_cpu() {
        let expected = recomputed(descriptor, &mut Cpu::new(), &PROMPT, 40);
        assert!(expected.iter().any(|token| *token != expected[0]), "{name}: {expected:?}");
        let mut engine = Cpu::new();
        let generator = generator(descriptor, 1, 48, &mut engine);
        let got = texts(&generator, &mut engine, &[request(&PROMPT, 40, 0, GREEDY)], false).unwrap();
        assert_eq!(got, [expected], "{name}");
    }
}

#[test]
fn greedy_text_on_the_gpu_is_that_of_recomputing_every_token() {
    for (name, descriptor) in models() {
        // With 4 SMs attention has one split, with 64 several. Hopper computes a step in one launch.
        for (sm_count, hopper, prompt) in [(4, false, &PROMPT[..]), (64, false, &PROMPT[..1]), (3, true, &PROMPT[..])] {
            let expected = recomputed(descriptor, &mut Cpu::new(), prompt, 8);
            let gpu = EmulatedGpu { sm_count, ..EmulatedGpu::new(hopper) };
            let mut engine = emulated(gpu, Precision::Fp32, None, false);
            assert_eq!(recomputed(descriptor, &mut *engine, prompt, 2), expected[..2], "{name}");
            let generator = generator(descriptor, 1, 48, &mut *engine);
            let got = texts(&generator, &mut *engine, &[request(prompt, 8, 0, GREEDY)], true).unwrap();
            assert_eq!(got, [expected], "{name}");
        }
    }
}

/// Requests of different lengths, more than slots, with equal prompts among them.
fn requests(sampling: SlotSampling) -> Vec<Request> {
    let prompts: [&[u32]; 6] = [&PROMPT, &[7], &PROMPT, &[1, 2, 3, 4, 5, 6, 7, 8, 9], &[69], &PROMPT[..3]];
    let requests = prompts.into_iter().zip([9, 3, 7, 5, 0, 6]).enumerate();
    requests.map(|(i, (prompt, tokens))| request(prompt, tokens, i as u32, sampling)).collect()
}

#[test]
fn texts_do_not_depend_on_the_batch_or_on_running_ahead() {
    let sampled = SlotSampling { temperature: 0.9, top_k: 40, top_p: 0.95, min_p: 0.01, repetition_penalty: 1.1 };
    for (name, descriptor) in models_on_the_cpu() {
        for sampling in [GREEDY, sampled] {
            let requests = requests(sampling);
            let mut alone = Vec::new();
            for request in &requests {
                let mut engine = Cpu::new();
                let generator = generator(descriptor, 1, 48, &mut engine);
                alone.extend(texts(&generator, &mut engine, std::slice::from_ref(request), false).unwrap());
            }
            assert_eq!(alone.iter().map(Vec::len).collect::<Vec<_>>(), [9, 3, 7, 5, 0, 6]);
            for (slots, run_ahead) in [(1, true), (3, false), (20, true)] {
                let mut engine = Cpu::new();
                let generator = generator(descriptor, slots, 48, &mut engine);
                let got = texts(&generator, &mut engine, &requests, run_ahead).unwrap();
                assert_eq!(got, alone, "{name}, {slots} slots");
            }
        }
    }
}

/// Every kernel, with all accesses checked. Sampled tokens have the same random numbers on every engine.
#[test]
fn batches_on_the_gpu_match_the_cpu_without_memory_errors() {
    let sampled = SlotSampling { temperature: 0.7, top_k: 40, top_p: 0.98, min_p: 0.001, repetition_penalty: 1.1 };
    for (name, descriptor) in models() {
        // Checked kernels are slow, so prompts and texts are short.
        let short =
            |r: Request| Request { prompt: r.prompt[..r.prompt.len().min(3)].to_vec(), tokens: r.tokens.min(2), ..r };
        let requests: Vec<_> = requests(sampled).into_iter().take(3).map(short).collect();
        let mut engine = Cpu::new();
        let on_cpu = generator(descriptor, 3, 48, &mut engine);
        let expected = texts(&on_cpu, &mut engine, &requests, false).unwrap();
        for (slots, hopper) in [(2, false), (20, true)] {
            let mut engine = emulated(EmulatedGpu::new(hopper), Precision::Fp32, None, true);
            let generator = generator(descriptor, slots, 48, &mut *engine);
            let got = texts(&generator, &mut *engine, &requests, true).unwrap();
            assert_eq!(got, expected, "{name}, {slots} slots");
        }
    }
}

/// bf16 rounds, so texts may differ where two tokens are about equally likely; the logits of the first step are close.
#[test]
fn logits_in_bf16_are_close_to_those_of_the_cpu() {
    for (name, descriptor) in models() {
        let mut engine = Cpu::new();
        let expected = generator(descriptor, 1, 48, &mut engine);
        texts(&expected, &mut engine, &[request(&PROMPT, 1, 0, GREEDY)], false).unwrap();
        let expected = engine.read(expected.logits()).unwrap();
        let scale = expected.iter().fold(0.0f32, |most, x| most.max(x.abs()));
        for slots in [1, 20] {
            let mut engine = emulated(EmulatedGpu::new(true), Precision::Bf16, None, true);
            let generator = generator(descriptor, slots, 48, &mut *engine);
            texts(&generator, &mut *engine, &[request(&PROMPT, 1, 0, GREEDY)], false).unwrap();
            let got = engine.read(generator.logits()).unwrap();
            let worst = got.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(worst < 0.05 * scale, "{name}, {slots} slots: {worst} of {scale}");
        }
    }
}

/// Rounds to E4M3 numbers times the smallest power of two with which none saturates.
fn in_fp8(values: &[f32]) -> Vec<f32> {
    let largest = values.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
    let scale = (largest / 448.0).log2().ceil().exp2();
    let rounded = |x: f32| {
        let quantum = x.abs().log2().floor().max(-6.0).exp2() / 8.0;
        (x / quantum).round_ties_even() * quantum
    };
    values.iter().map(|&x| rounded(half::bf16::from_f32(x).to_f32() / scale) * scale).collect()
}

/// Returns a model with weights in FP8, and one with a head of its own whose weights have the same values.
fn models_in_fp8(descriptor: Descriptor) -> [impl Fn(usize, &mut dyn Engine) -> Generator; 2] {
    let mut all = HashMap::new();
    random(&descriptor, |param, layer, values| {
        all.insert((param, layer), values.to_vec());
        Ok(())
    });
    let head = if descriptor.tied { Param::Wte } else { Param::LmHead };
    all.insert((Param::LmHead, 0), all[&(head, 0)].clone());
    let all = Arc::new(all);
    let untied = Descriptor { tied: false, ..descriptor };
    [(descriptor, WeightFormat::Fp8), (untied, WeightFormat::Float)].map(|(descriptor, weights)| {
        let all = all.clone();
        move |slots: usize, engine: &mut dyn Engine| {
            let (generator, plan) = Generator::plan(descriptor, slots, 48, weights, engine).unwrap();
            engine.allocate(&plan).unwrap();
            let model = &generator.decoder;
            for (param, layer) in model.layout.file_order() {
                let values = &all[&(param, layer)];
                let is_rounded = param.kind().is_linear() || param == Param::LmHead;
                let values = if is_rounded { in_fp8(values) } else { values.clone() };
                engine.write(model.layout.of(model.params, param, layer), &values).unwrap();
            }
            for (param, layer) in model.weights_in_fp8() {
                model.write_in_fp8(engine, param, layer, &all[&(param, layer)]).unwrap();
            }
            generator
        }
    })
}

/// Prompts, steps and logits with weights in FP8 are those of a model with the rounded weights.
#[test]
fn weights_in_fp8_give_the_text_of_rounded_weights() {
    for (name, descriptor) in models() {
        let descriptor = Descriptor { mlp_channels: 80, ..descriptor };
        let requests = [request(&PROMPT, 20, 0, GREEDY), request(&PROMPT[..2], 6, 0, GREEDY)];
        let [fp8, rounded] = models_in_fp8(descriptor);
        let text = |generator: &Generator, engine: &mut dyn Engine| texts(generator, engine, &requests, false).unwrap();
        let (mut engine, mut other) = (Cpu::new(), Cpu::new());
        let (on_cpu, expected) = (fp8(2, &mut engine), rounded(2, &mut other));
        let expected_text = text(&expected, &mut other);
        assert_eq!(text(&on_cpu, &mut engine), expected_text, "{name}");
        let losses = |generator: &Generator, engine: &mut dyn Engine| {
            let mut losses = Vec::new();
            generator.score(engine, &[1, 20, 3, 69, 8, 9, 4], &mut |_, loss| losses.push(loss)).unwrap();
            losses
        };
        let (got, want) = (losses(&on_cpu, &mut engine), losses(&expected, &mut other));
        assert!(got.iter().zip(&want).all(|(a, b)| (a - b).abs() < 1e-4), "{name}: {got:?}, expected {want:?}");
        if !["gpt2", "llama"].contains(&name) {
            continue;
        }
        // Separate kernels, and a step in one launch. bf16 rounds, so only the first tokens are certain to be equal.
        let expected = expected_text.iter().map(|text| text[..6].to_vec()).collect::<Vec<_>>();
        let requests = requests.map(|request| Request { tokens: 6, ..request });
        for hopper in [false, true] {
            let gpu = EmulatedGpu { sm_count: if hopper { 3 } else { 4 }, fp8: true, ..EmulatedGpu::new(hopper) };
            let mut engine = emulated(gpu, Precision::Fp8, None, false);
            let generator = fp8(2, &mut *engine);
            assert_eq!(texts(&generator, &mut *engine, &requests, true).unwrap(), expected, "{name}, {hopper}");
        }
    }
}

/// The logits of the first step are close to those of the CPU, also with more slots than a kernel has rows.
#[test]
fn logits_with_weights_in_fp8_are_close_to_those_of_the_cpu() {
    for (name, descriptor) in models() {
        let [fp8, _] = models_in_fp8(Descriptor { mlp_channels: 80, ..descriptor });
        let mut engine = Cpu::new();
        let logits = |generator: &Generator, engine: &mut dyn Engine| {
            texts(generator, engine, &[request(&PROMPT, 1, 0, GREEDY)], false).unwrap();
            engine.read(generator.logits().slice(0, descriptor.padded_vocab())).unwrap()
        };
        let expected = logits(&fp8(1, &mut engine), &mut engine);
        let scale = expected.iter().fold(0.0f32, |most, x| most.max(x.abs()));
        for (slots, hopper) in [(1, true), (1, false), (20, true)] {
            let gpu = EmulatedGpu { fp8: true, ..EmulatedGpu::new(hopper) };
            let mut engine = emulated(gpu, Precision::Fp8, None, true);
            let got = logits(&fp8(slots, &mut *engine), &mut *engine);
            let worst = got.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(worst < 0.05 * scale, "{name}, {slots} slots: {worst} of {scale}");
        }
    }
}

#[test]
fn weights_in_fp8_need_a_gpu_with_fp8_and_multiples_of_16() {
    let plan = |descriptor, engine: &mut dyn Engine| {
        Generator::plan(descriptor, 1, 48, WeightFormat::Fp8, engine).map(|(_, plan)| plan.bytes())
    };
    let descriptor = models()[0].1;
    for (hopper, precision) in [(false, Precision::Bf16), (true, Precision::Fp32)] {
        let mut engine = emulated(EmulatedGpu::new(hopper), precision, None, false);
        let error = plan(descriptor, &mut *engine).unwrap_err().to_string();
        assert!(error.starts_with("--precision fp8: expected a GPU of compute capability 8.9 or later"), "{error}");
    }
    let odd = Descriptor { mlp_channels: 72, ..models()[1].1 };
    let error = plan(odd, &mut Cpu::new()).unwrap_err().to_string();
    assert!(
        error.starts_with("--precision fp8: fcprojw: expected multiples of 16 rows and columns, found 128 x 72"),
        "{error}"
    );
    // One byte instead of two for each weight of a layer. The head has one byte more. One weight is converted at a time.
    let large = Descriptor::gpt2(24, 16, 1024, 64, 1000).unwrap();
    let mut engine = emulated(EmulatedGpu::new(true), Precision::Fp8, None, false);
    let in_bf16 = Generator::plan(large, 1, 48, WeightFormat::Float, &mut *engine).unwrap().1.bytes();
    let [linear, widest] = [24 * 12, 4].map(|weights| weights * 1024 * 1024);
    let saved = in_bf16 - plan(large, &mut *engine).unwrap();
    let expected = linear - 2 * widest - large.padded_vocab() * 1024;
    assert!(saved.abs_diff(expected) < 10_000, "{saved}, expected {expected}");
}

/// A text that exceeds the cache continues from its newest half.
#[test]
fn long_texts_continue_in_a_new_window() {
    let (_, descriptor) = models()[1];
    let window = |prompt: &[u32], capacity, tokens, run_ahead| {
        let mut engine = Cpu::new();
        let generator = generator(descriptor, 1, capacity, &mut engine);
        texts(&generator, &mut engine, &[request(prompt, tokens, 0, GREEDY)], run_ahead).unwrap().remove(0)
    };
    let text = window(&PROMPT, 16, 40, false);
    assert_eq!(text, window(&PROMPT, 16, 40, true));
    // The cache is full after 16 tokens of text, so the 13th new token follows the 17 tokens before it, of which 8 remain.
    let whole = [&PROMPT[..], &text].concat();
    assert_eq!(window(&whole[..16], 48, 1, false), whole[16..17]);
    assert_eq!(window(&whole[9..17], 48, 9, false), whole[17..26]);
    // A prompt beyond the cache is read from its newest half.
    let prompt: Vec<u32> = (0..30).collect();
    assert_eq!(window(&prompt, 16, 5, false), window(&prompt[22..], 48, 5, false));
    assert_eq!(window(&PROMPT, 1, 3, true).len(), 3);
}

#[test]
fn texts_end_at_an_end_token_or_when_the_receiver_stops() {
    let (_, descriptor) = models()[0];
    let mut engine = Cpu::new();
    let generator = generator(descriptor, 2, 48, &mut engine);
    let greedy = texts(&generator, &mut engine, &[request(&PROMPT, 20, 0, GREEDY)], false).unwrap().remove(0);
    let end = greedy[4];
    let first = greedy.iter().position(|token| *token == end).unwrap();
    for run_ahead in [false, true] {
        let ending = Request { ends: vec![end], ..request(&PROMPT, 20, 0, GREEDY) };
        let requests = [ending, request(&PROMPT, 20, 0, GREEDY), request(&PROMPT, 2, 0, GREEDY)];
        let mut got = vec![Vec::new(); 3];
        let finishes = generate(&generator, &mut engine, &requests, run_ahead, &mut |i, token| {
            got[i].push(token);
            Ok(i != 1 || got[1].len() < 3)
        });
        assert_eq!(finishes.unwrap(), [Finish::EndOfText(end), Finish::Stop, Finish::Length]);
        assert_eq!(got, [&greedy[..first], &greedy[..3], &greedy[..2]]);
    }
}

#[test]
fn invalid_prompts_are_errors() {
    let (_, descriptor) = models()[0];
    let mut engine = Cpu::new();
    let generator = generator(descriptor, 1, 8, &mut engine);
    let mut error = |prompt: &[u32]| {
        texts(&generator, &mut engine, &[request(prompt, 1, 0, GREEDY)], false).unwrap_err().to_string()
    };
    assert_eq!(error(&[]), "prompt: expected at least one token, found none");
    assert_eq!(error(&[1, 70]), "prompt: expected tokens below 70, found 70");
    let too_many = Generator::plan(descriptor, 1, 49, WeightFormat::Float, &mut Cpu::new()).unwrap_err().to_string();
    assert!(too_many.contains("expected at most 48"), "{too_many}");
}

/// Random numbers that are the same in every run.
struct Random(u32);

impl Random {
    /// Returns a number below `n`.
    fn below(&mut self, n: usize) -> usize {
        self.0 += 1;
        (gpu::noise::squirrel5(self.0, 77) >> 8) as usize % n
    }

    fn tokens(&mut self, n: usize) -> Vec<u32> {
        (0..n).map(|_| self.below(70) as u32).collect()
    }
}

/// What a text became, and the tokens of its prompt that were not computed.
#[derive(Clone, Debug, Default, PartialEq)]
struct Answer {
    tokens: Vec<u32>,
    finish: Option<Finish>,
    reused: usize,
}

/// Computes texts that begin one after another, `delays` steps apart, and end when the receiver has `limits` tokens. A request with
/// the number `cancelled` is stopped from outside at that time.
fn answers(
    scheduler: &mut Scheduler,
    generator: &Generator,
    engine: &mut dyn Engine,
    requests: &[(Request, usize, usize)],
    cancelled: usize,
) -> Vec<Answer> {
    let mut answers = vec![Answer::default(); requests.len()];
    let (mut next, mut wait) = (0, requests[0].1);
    loop {
        while next < requests.len() && scheduler.has_room() && wait == 0 {
            let request = requests[next].0.clone();
            answers[next].reused = scheduler.begin(generator, engine, next, request).unwrap();
            next += 1;
            wait = requests.get(next).map_or(0, |(_, delay, _)| *delay);
        }
        wait = wait.saturating_sub(1);
        let mut tokens: Vec<_> = answers.iter_mut().map(|answer| &mut answer.tokens).collect();
        let mut finishes = Vec::new();
        let each = &mut |i: usize, token| {
            tokens[i].push(token);
            Ok(tokens[i].len() < requests[i].2 || i == cancelled)
        };
        let more = scheduler.advance(generator, engine, each, &mut |i, finish| finishes.push((i, finish))).unwrap();
        for (i, finish) in finishes {
            answers[i].finish = Some(finish);
        }
        if let Some(answer) = answers.get_mut(cancelled)
            && answer.tokens.len() >= requests[cancelled].2
        {
            scheduler.stop(generator, |i| i == cancelled);
            answer.tokens.truncate(requests[cancelled].2);
            answer.finish = Some(Finish::Stop);
        }
        if !more && next == requests.len() && wait == 0 {
            return answers;
        }
    }
}

/// Conversations that continue, answers that are generated again, and messages that are edited, in several slots at a time.
#[test]
fn texts_do_not_depend_on_what_earlier_texts_left_in_the_cache() {
    let sampled = SlotSampling { temperature: 0.9, top_k: 40, top_p: 0.95, min_p: 0.01, repetition_penalty: 1.1 };
    for (name, descriptor) in models() {
        let mut engine = Cpu::new();
        let fresh = generator(descriptor, 1, 48, &mut engine);
        let mut expect = |request: &Request, most: usize| {
            let mut scheduler = Scheduler::new(&fresh, &mut engine, false).unwrap();
            answers(&mut scheduler, &fresh, &mut engine, &[(request.clone(), 0, most)], usize::MAX).remove(0)
        };
        for (slots, run_ahead, prompt_part) in [(1, false, 5), (1, true, 1024), (3, false, 1024), (3, true, 5)] {
            let mut engine = Cpu::new();
            let generator = generator(descriptor, slots, 48, &mut engine);
            let mut scheduler = Scheduler::new(&generator, &mut engine, run_ahead).unwrap();
            scheduler.prompt_part = prompt_part;
            let mut random = Random(slots as u32 * 1000 + u32::from(run_ahead));
            let instructions = random.tokens(17);
            // The lengths of each conversation after its messages and answers.
            let mut talks = vec![(instructions.clone(), Vec::new()); 4];
            let (mut prompts, mut reused) = (0, 0);
            for round in 0..12 {
                let mut requests = Vec::new();
                let mut chosen = Vec::new();
                for _ in 0..=random.below(slots + 1) {
                    let i = random.below(talks.len());
                    if chosen.contains(&i) {
                        continue;
                    }
                    let (talk, turns): &mut (Vec<u32>, Vec<usize>) = &mut talks[i];
                    match random.below(4) {
                        // Another answer to the last message.
                        0 if turns.len() > 1 => talk.truncate(turns[turns.len() - 2]),
                        // Another message in place of an earlier one.
                        1 if turns.len() > 1 => {
                            turns.truncate(random.below(turns.len()));
                            talk.truncate(turns.last().copied().unwrap_or(instructions.len()));
                            talk.extend(random.tokens(3));
                        }
                        _ => {
                            let more = 1 + random.below(4);
                            talk.extend(random.tokens(more));
                        }
                    }
                    if talk.len() > 40 {
                        (*talk, *turns) = (instructions.clone(), Vec::new());
                    }
                    turns.push(talk.len());
                    let (tokens, most) = (1 + random.below(6), 1 + random.below(8));
                    let sampling = if random.below(2) == 0 { GREEDY } else { sampled };
                    let ends = random.below(3);
                    let ends = random.tokens(ends);
                    let seed = random.below(1000) as u32;
                    requests.push((Request { ends, ..request(talk, tokens, seed, sampling) }, random.below(3), most));
                    chosen.push(i);
                }
                let cancelled = if random.below(3) == 0 { 0 } else { usize::MAX };
                let got = answers(&mut scheduler, &generator, &mut engine, &requests, cancelled);
                for ((answer, (request, _, most)), i) in got.iter().zip(&requests).zip(chosen) {
                    let expected = Answer { reused: answer.reused, ..expect(request, *most) };
                    assert_eq!(answer, &expected, "{name}, {slots} slots, round {round}");
                    assert!(answer.reused < request.prompt.len());
                    prompts += request.prompt.len();
                    reused += answer.reused;
                    talks[i].0.extend(&answer.tokens);
                    let len = talks[i].0.len();
                    talks[i].1.push(len);
                }
            }
            // A full ring serves only the continuation of the text that it holds.
            let least = if descriptor.windows.is_some() { 1 } else { prompts / 2 };
            assert!(reused >= least, "{name}, {slots} slots: {reused} of {prompts} tokens");
        }
    }
}

/// A text receives a token after each part of a long prompt. A text that is stopped within its prompt leaves the parts that are complete.
#[test]
fn long_prompts_are_computed_in_parts() {
    for (name, descriptor) in models() {
        let mut engine = Cpu::new();
        let generator = generator(descriptor, 2, 48, &mut engine);
        let prompts = [Random(1).tokens(5), Random(2).tokens(20), Random(3).tokens(40)];
        let whole = texts(&generator, &mut engine, &[request(&prompts[2], 3, 0, GREEDY)], false).unwrap().remove(0);
        let mut scheduler = Scheduler::new(&generator, &mut engine, false).unwrap();
        scheduler.prompt_part = 8;
        let mut got = vec![Vec::new(); 3];
        let mut advance = |scheduler: &mut Scheduler, engine: &mut Cpu| {
            let each = &mut |i: usize, token| {
                got[i].push(token);
                Ok(true)
            };
            assert!(scheduler.advance(&generator, engine, each, &mut |_, _| ()).unwrap());
            got.clone()
        };
        let begin = |scheduler: &mut Scheduler, engine: &mut Cpu, i: usize| {
            assert!(scheduler.has_room(), "{name}");
            let request = request(&prompts[i], if i == 0 { 40 } else { 3 }, 0, GREEDY);
            scheduler.begin(&generator, engine, i, request).unwrap()
        };
        begin(&mut scheduler, &mut engine, 0);
        advance(&mut scheduler, &mut engine);
        begin(&mut scheduler, &mut engine, 1);
        for _ in 0..4 {
            advance(&mut scheduler, &mut engine);
        }
        assert_eq!(advance(&mut scheduler, &mut engine)[1].len(), 3, "{name}");
        // The slot is not idle yet: the steps of the other text would write to it.
        begin(&mut scheduler, &mut engine, 2);
        for step in 7..11 {
            assert!(!scheduler.has_room(), "{name}: the next prompt may begin with the tokens of this one");
            let got = advance(&mut scheduler, &mut engine);
            assert_eq!([got[0].len(), got[2].len()], [step, 0], "{name}");
            if step == 8 {
                scheduler.stop(&generator, |i| i == 2);
                assert_eq!(begin(&mut scheduler, &mut engine, 2), 16, "{name}");
            }
        }
        for _ in 0..2 {
            advance(&mut scheduler, &mut engine);
        }
        assert_eq!(advance(&mut scheduler, &mut engine)[2], whole, "{name}");
    }
}

/// The number of tokens that are not computed again, in the situations of a conversation.
#[test]
fn slots_give_what_a_prompt_has_in_common_with_their_text() {
    let windows = |size| Some(Windows { size, pattern: "SL".parse().unwrap() });
    let (_, llama) = models()[1];
    let reused = |windows, slots, run_ahead, prompts: &[Vec<u32>]| -> Vec<usize> {
        let descriptor = Descriptor { windows, ..llama }.checked().unwrap();
        let mut engine = Cpu::new();
        let generator = generator(descriptor, slots, 48, &mut engine);
        let mut scheduler = Scheduler::new(&generator, &mut engine, run_ahead).unwrap();
        let begin = |prompt: &Vec<u32>| {
            let request = (request(prompt, 3, 0, GREEDY), 0, 3);
            answers(&mut scheduler, &generator, &mut engine, &[request], usize::MAX).remove(0).reused
        };
        prompts.iter().map(begin).collect()
    };
    let text = |n: usize, seed: u32| Random(seed).tokens(n);
    let first = text(20, 1);
    let mut engine = Cpu::new();
    let plain = generator(llama, 1, 48, &mut engine);
    let answer = texts(&plain, &mut engine, &[request(&first, 3, 0, GREEDY)], false).unwrap().remove(0);
    let next = [&first[..], &answer, &[5, 6]].concat();
    let edited = [&first[..18], &[1, 2, 3]].concat();
    // The last token of an answer is not in the cache, unless a step was queued ahead.
    assert_eq!(reused(None, 1, false, &[first.clone(), next.clone(), first.clone()]), [0, 22, 19]);
    assert_eq!(reused(None, 1, false, &[first.clone(), edited.clone(), next.clone()]), [0, 18, 18]);
    // Two conversations, one of which is edited in its slot. The beginning that they have in common is copied.
    let other = [&first[..16], &text(20, 2)].concat();
    assert_eq!(reused(None, 2, false, &[other.clone(), first.clone(), next.clone(), other.clone()]), [0, 16, 22, 35]);
    // Fewer tokens than it is worth.
    assert_eq!(reused(None, 1, false, &[first.clone(), [&first[..15], &[1, 2]].concat()]), [0, 0]);
    assert_eq!(reused(None, 2, false, &[vec![1, 2], vec![1, 2], vec![1, 3]]), [0, 1, 1]);
    // A ring that has been overwritten can only be continued.
    let answer = |descriptor: Descriptor| {
        let mut engine = Cpu::new();
        let plain = generator(descriptor, 1, 48, &mut engine);
        texts(&plain, &mut engine, &[request(&first, 3, 0, GREEDY)], false).unwrap().remove(0)
    };
    let windowed = Descriptor { windows: windows(8), ..llama }.checked().unwrap();
    let next = [&first[..], &answer(windowed), &[5, 6]].concat();
    assert_eq!(reused(windows(8), 1, false, &[first.clone(), next.clone(), next[..24].to_vec()]), [0, 22, 0]);
    assert_eq!(reused(windows(8), 1, false, &[first.clone(), edited, first.clone()]), [0, 0, 0]);
    assert_eq!(reused(windows(8), 1, false, &[first.clone(), first[..].to_vec()]), [0, 0]);
    // A window that the text does not fill keeps all of it.
    assert_eq!(reused(windows(40), 1, false, &[first.clone(), first]), [0, 19]);
}

/// The kernels that continue a slot, with all accesses checked.
#[test]
fn conversations_on_the_gpu_match_the_cpu_without_memory_errors() {
    // A step in one launch takes seconds in the emulator.
    let in_one_launch = ["gpt2", "llama", "qwen3 with windows", "modern"];
    for (name, descriptor) in models() {
        let run = |engine: &mut dyn Engine, slots, run_ahead| {
            let generator = generator(descriptor, slots, 48, engine);
            let mut scheduler = Scheduler::new(&generator, engine, run_ahead).unwrap();
            let mut talk = Random(5).tokens(18);
            let mut reused = 0;
            for turn in 0..2 {
                let request = (request(&talk, 2, turn, GREEDY), 0, 2);
                let answer = answers(&mut scheduler, &generator, engine, &[request], usize::MAX).remove(0);
                talk.extend(answer.tokens);
                talk.extend([turn + 3, 9]);
                reused += answer.reused;
            }
            assert!(reused >= 19, "{name}: {reused} tokens");
            talk
        };
        let expected = run(&mut Cpu::new(), 1, false);
        for (slots, hopper) in [(1, false), (2, in_one_launch.contains(&name))] {
            let mut engine = emulated(EmulatedGpu::new(hopper), Precision::Fp32, None, true);
            assert_eq!(run(&mut *engine, slots, true), expected, "{name}, {slots} slots");
        }
    }
}
