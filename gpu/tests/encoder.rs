//! Token and position embedding against f64 sums.

mod common;

use common::{Buffer, Tolerance, assert_close, emulate, noise, shared_bytes};
use gpu::encoder::{
    encoder_backward_partials, encoder_backward_wpe, encoder_backward_wpe_grid, encoder_backward_wte,
    encoder_backward_wte_grid, encoder_backward_wte_runs, encoder_backward_wte_runs_grid,
    encoder_backward_wte_runs_shared, encoder_forward, encoder_forward_grid,
};

const VOCABULARY: usize = 11;

for_both_types!(forward, gradient_of_positions, gradient_of_tokens, gradient_of_tokens_is_unbiased);

fn forward<T: Tolerance>() {
    for (batch, sequence, channels) in [(1, 1, 8), (3, 5, 80), (2, 7, 264)] {
        let n = batch * sequence;
        let tokens = Buffer::from_fn(n, |i| (i * 5 % VOCABULARY) as i32);
        let wte = Buffer::<T>::of(&noise(VOCABULARY * channels, 1));
        let wpe = Buffer::<T>::of(&noise(sequence * channels, 2));
        let mut out = Buffer::<T>::filled(n * channels, f32::NAN);
        let launch = encoder_forward(
            out.view_mut(),
            tokens.view(),
            wte.view(),
            wpe.view(),
            n as u32,
            sequence as u32,
            channels as u32,
        );
        emulate(&launch, encoder_forward_grid(n), 0);
        let (te, pe) = (wte.to_f64(), wpe.to_f64());
        let want: Vec<_> = (0..n * channels)
            .map(|i| {
                let (position, c) = (i / channels, i % channels);
                te[(position * 5 % VOCABULARY) * channels + c] + pe[position % sequence * channels + c]
            })
            .collect();
        assert_close("out", &out.to_f64(), &want, T::ROUNDING, 1e-3);
    }
}

fn gradient_of_positions<T: Tolerance>() {
    for (batch, sequence, channels) in [(1, 1, 8), (3, 5, 80), (9, 2, 264)] {
        let size = sequence * channels;
        let dout = Buffer::<T>::of(&noise(batch * size, 3));
        let mut dwpe = Buffer::<T>::of(&noise(size, 4));
        let mut want = dwpe.to_f64();
        for (i, d) in dout.to_f64().iter().enumerate() {
            want[i % size] += d;
        }
        let launch =
            encoder_backward_wpe(dwpe.view_mut(), dout.view(), batch as u32, sequence as u32, channels as u32, 42);
        emulate(&launch, encoder_backward_wpe_grid::<T>(sequence, channels), 0);
        assert_close("dwpe", &dwpe.to_f64(), &want, T::STEP, 1e-2);
    }
}

/// dwte after the two kernels, from zero gradients or those given.
fn run_wte<T: Tolerance>(tokens: &[i32], dout: &Buffer<T>, old: &[f64], channels: usize, seed: u32) -> Vec<f64> {
    let n = tokens.len();
    let mut order: Vec<_> = (0..n as i32).collect();
    order.sort_by_key(|&i| tokens[i as usize]);
    let tokens = Buffer::from_fn(n, |i| tokens[i]);
    let order = Buffer::from_fn(n, |i| order[i]);
    let mut dwte = Buffer::<T>::of(old);
    let mut partials = Buffer::<f32>::filled(encoder_backward_partials(n, channels), f32::NAN);
    let (n32, c32) = (n as u32, channels as u32);
    let first = encoder_backward_wte(
        dwte.view_mut(),
        partials.view_mut(),
        dout.view(),
        tokens.view(),
        order.view(),
        n32,
        c32,
        seed,
    );
    emulate(&first, encoder_backward_wte_grid::<T>(n, channels), 0);
    let second =
        encoder_backward_wte_runs(dwte.view_mut(), partials.view(), tokens.view(), order.view(), n32, c32, seed);
    let shared = shared_bytes(encoder_backward_wte_runs_shared::<T>);
    emulate(&second, encoder_backward_wte_runs_grid::<T>(n, channels), shared);
    dwte.to_f64()
}

fn gradient_of_tokens<T: Tolerance>() {
    // Runs within a chunk, to its very end, across one boundary, across many; one token alone; more than 32 chunks.
    let cases: [(&str, Vec<i32>, usize); 7] = [
        ("one position", vec![3], 8),
        ("short runs", (0..45).map(|i| i * 7 % VOCABULARY as i32).collect(), 80),
        ("runs of 32", (0..96).map(|i| i % 3).collect(), 264),
        ("runs of 31 and 33", (0..64).map(|i| i32::from(i < 33)).collect(), 80),
        ("all the same", vec![10; 333], 80),
        ("two long", (0..300).map(|i| i32::from(i % 4 == 0) * 9).collect(), 264),
        ("many chunks", (0..1400).map(|i| i32::from(i == 77) + i32::from(i % 100 == 0)).collect(), 16),
    ];
    for (name, tokens, channels) in cases {
        let dout = Buffer::<T>::of(&noise(tokens.len() * channels, 5));
        let old = Buffer::<T>::of(&noise(VOCABULARY * channels, 6)).to_f64();
        let mut want = old.clone();
        for (i, d) in dout.to_f64().iter().enumerate() {
            want[tokens[i / channels] as usize * channels + i % channels] += d;
        }
        let got = run_wte(&tokens, &dout, &old, channels, 7);
        assert_close(name, &got, &want, T::STEP, 2.0);
        assert_eq!(got, run_wte(&tokens, &dout, &old, channels, 7), "{name}: not the same again");
    }
}

/// A gradient far below the rounding step of what it is added to arrives on average.
fn gradient_of_tokens_is_unbiased<T: Tolerance>() {
    let (channels, small) = (1024, 1.0 / 1024.0);
    let dout = Buffer::<T>::filled(channels, small as f32);
    let old = vec![1.0; VOCABULARY * channels];
    let got = run_wte(&[2], &dout, &old, channels, 99);
    let moved: f64 = got[2 * channels..3 * channels].iter().map(|x| x - 1.0).sum::<f64>() / channels as f64;
    assert!((moved - small).abs() < 0.25 * small, "moved by {moved}, not {small}");
}
