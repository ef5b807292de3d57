//! Token and position embedding against sums in f64.

use crate::common::{
    Tolerance, assert_close, assert_same, for_all, integers, noise, read, rounded, run, shared_bytes, wide,
};
use bytemuck::bytes_of;
use cuda_std::emulate::Memory;
use cuda_std::{Global, GlobalMut};
use gpu::encoder::{
    WteSizes, encoder_backward_chunk, encoder_backward_partials, encoder_backward_rest, encoder_backward_rest_grid,
    encoder_backward_rest_shared, encoder_backward_wte, encoder_backward_wte_grid, encoder_forward,
    encoder_forward_grid,
};
use gpu::noise::round_packet;
use proptest::collection::vec;

const VOCABULARY: usize = 11;

tests! {
    kernels of "encoder.rs";
    for both types: forward_matches_reference, forward_of_random_tokens_matches_reference, dwpe_matches_reference,
        dwpe_of_random_shapes_matches_reference, forward_without_positions_copies_rows,
        backward_without_positions_has_the_same_dwte, dwte_matches_reference, dwte_of_random_tokens_matches_reference,
        chunks_fill_the_sms, rounding_depends_on_the_seed, rounding_is_unbiased, nan_stays_in_its_element;
}

/// Integers, whose sums are exact in f32.
fn integer_tensor<T: Tolerance>(len: usize, seed: u32) -> Vec<T> {
    rounded(&integers(len, seed))
}

/// `more` is the number of rows of wpe in excess of T.
fn check_forward<T: Tolerance>(tokens: &[i32], sequence: usize, channels: usize, more: usize) {
    let n = tokens.len();
    let wte = rounded::<T>(&noise(VOCABULARY * channels, 1));
    let wpe = rounded::<T>(&noise((sequence + more) * channels, 2));
    let mut memory = Memory::new();
    let out = memory.output::<T>("out", n * channels);
    let launch = encoder_forward::<T, true>(
        out,
        memory.input("tokens", tokens),
        memory.input("wte", &wte),
        memory.input("wpe", &wpe),
        n as u32,
        sequence as u32,
        channels as u32,
    );
    run(&mut memory, &launch, encoder_forward_grid(n), 0);
    let want = |i: usize| {
        let (position, c) = (i / channels, i % channels);
        let sum =
            wte[tokens[position] as usize * channels + c].to_f32() + wpe[position % sequence * channels + c].to_f32();
        f64::from(T::nearest(sum))
    };
    assert_same("out", &read(&memory, out), &(0..n * channels).map(want).collect::<Vec<_>>());
}

fn forward_matches_reference<T: Tolerance>() {
    for (batch, sequence, channels) in [(1, 1, 8), (3, 5, 80), (1, 63, 160), (3, 21, 264), (2, 7, 1040)] {
        let tokens: Vec<_> = (0..batch * sequence).map(|i| (i * 5 % VOCABULARY) as i32).collect();
        check_forward::<T>(&tokens, sequence, channels, batch % 2);
    }
}

/// Without positions each row of out is one of wte, bit for bit, NaN included.
fn forward_without_positions_copies_rows<T: Tolerance>() {
    for (positions, sequence, channels) in [(1, 1, 8), (63, 21, 80), (9, 3, 264), (14, 7, 1040)] {
        let tokens: Vec<_> = (0..positions).map(|i| (i * 5 % VOCABULARY) as i32).collect();
        let mut wte = rounded::<T>(&noise(VOCABULARY * channels, 1));
        (wte[0], wte[channels - 1]) = (T::from_f32(f32::NAN), T::from_f32(f32::INFINITY));
        let mut memory = Memory::new();
        let out = memory.output::<T>("out", positions * channels);
        let (n, t, c) = (positions as u32, sequence as u32, channels as u32);
        let wpe = Global::new(std::ptr::null());
        let (tokens_in, wte_in) = (memory.input("tokens", &tokens), memory.input("wte", &wte));
        let launch = encoder_forward::<T, false>(out, tokens_in, wte_in, wpe, n, t, c);
        run(&mut memory, &launch, encoder_forward_grid(positions), 0);
        let want: Vec<_> = tokens.iter().flat_map(|&token| &wte[token as usize * channels..][..channels]).collect();
        assert!(memory.read(out).iter().zip(want).all(|(got, want)| bytes_of(got) == bytes_of(want)));
    }
}

fn forward_of_random_tokens_matches_reference<T: Tolerance>() {
    let tokens = vec(0..VOCABULARY as i32, 1..100);
    for_all(32, (tokens, 1..5usize, 1..80usize, 0..3usize), |(mut tokens, batch, packets, more)| {
        let sequence = tokens.len().div_ceil(batch);
        tokens.resize(batch * sequence, 7);
        check_forward::<T>(&tokens, sequence, packets * T::PACKET, more);
    });
}

/// Returns dwpe (T, C) after the backward kernels.
fn gradient_wpe<T: Tolerance>(dwpe: &[T], dout: &[T], sequence: usize, seed: u32) -> Vec<f64> {
    let channels = dwpe.len() / sequence;
    let tokens: Vec<_> = (0..dout.len() / channels).map(|i| (i % VOCABULARY) as i32).collect();
    gradients::<T, true>(&vec![T::from_f32(0.0); VOCABULARY * channels], dwpe, dout, &tokens, 16, seed).1
}

/// Returns dwte after the backward kernels.
fn gradient_wte<T: Tolerance>(dwte: &[T], dout: &[T], tokens: &[i32], chunk: usize, seed: u32) -> Vec<f64> {
    gradients::<T, true>(dwte, &vec![T::from_f32(0.0); dout.len()], dout, tokens, chunk, seed).0
}

/// Returns dwte and dwpe (T, C) after the backward kernels. Without positions, dwpe is unchanged and gives only T.
fn gradients<T: Tolerance, const POSITIONS: bool>(
    dwte: &[T],
    dwpe: &[T],
    dout: &[T],
    tokens: &[i32],
    chunk: usize,
    seed: u32,
) -> (Vec<f64>, Vec<f64>) {
    let (n, channels) = (tokens.len(), dwte.len() / VOCABULARY);
    let (batch, sequence) = (dout.len() / dwpe.len(), dwpe.len() / channels);
    let mut order: Vec<_> = (0..n as i32).collect();
    order.sort_by_key(|&i| tokens[i as usize]);
    let mut memory = Memory::new();
    let (dwte, dwpe, dout) = (memory.buffer("dwte", dwte), memory.buffer("dwpe", dwpe), memory.input("dout", dout));
    let sorted: Vec<_> = order.iter().map(|&i| tokens[i as usize]).collect();
    let (order, sorted) = (memory.input("order", &order), memory.input("sorted", &sorted));
    let partials = memory.output::<f32>("partials", encoder_backward_partials(n, channels, chunk));
    let seed = memory.input("seed", &[seed.cast_signed()]);
    let (b, t, c, length) = (batch as u32, sequence as u32, channels as u32, chunk as u32);
    let sizes = WteSizes { positions: n as u32, channels: c, chunk_len: length };
    let launch = encoder_backward_wte(dwte, partials, dout, order, sorted, seed, sizes);
    run(&mut memory, &launch, encoder_backward_wte_grid::<T>(n, channels, chunk), 0);
    let kept = if POSITIONS { dwpe } else { GlobalMut::new(std::ptr::null_mut()) };
    let partials = partials.reader();
    let launch = encoder_backward_rest::<T, POSITIONS>(dwte, kept, partials, dout, sorted, seed, b, t, c, length);
    let shared = shared_bytes(encoder_backward_rest_shared::<T>);
    run(&mut memory, &launch, encoder_backward_rest_grid::<T, POSITIONS>(batch, sequence, channels, chunk), shared);
    (read(&memory, dwte), read(&memory, dwpe))
}

/// Returns `old` with each row of `dout` added to the row of `old` that `to` returns.
fn sums<T: Tolerance>(old: &[T], dout: &[T], channels: usize, to: impl Fn(usize) -> usize) -> Vec<f64> {
    let mut sums = wide(old);
    for (i, d) in wide(dout).iter().enumerate() {
        sums[to(i / channels) * channels + i % channels] += d;
    }
    sums
}

/// One of the two values around each exact sum; to both sides if there are enough of them.
#[track_caller]
fn assert_rounded<T: Tolerance>(what: &str, got: &[f64], exact: &[f64]) {
    let (mut down, mut up) = (0, 0);
    for (i, (&g, &w)) in got.iter().zip(exact).enumerate() {
        let [low, high] = T::neighbours(w as f32).map(f64::from);
        let is = |x: f64| x.total_cmp(&g).is_eq();
        assert!(is(low) || is(high) || g.abs() + w.abs() <= 0.0, "{what}[{i}]: got {g}, want {w}");
        down += usize::from(low.abs() < high.abs() && is(low));
        up += usize::from(low.abs() < high.abs() && is(high));
    }
    assert!(down + up < 40 || down > 0 && up > 0, "{what}: {up} of {} rounded up", down + up);
}

fn check_positions<T: Tolerance>(batch: usize, sequence: usize, channels: usize, seed: u32) {
    let size = sequence * channels;
    let (dwpe, dout) = (integer_tensor::<T>(size, seed), integer_tensor::<T>(batch * size, seed + 1));
    let got = gradient_wpe(&dwpe, &dout, sequence, seed);
    assert_rounded::<T>("dwpe", &got, &sums(&dwpe, &dout, channels, |row| row % sequence));
}

fn dwpe_matches_reference<T: Tolerance>() {
    for (batch, sequence, channels) in [(1, 1, 8), (3, 5, 80), (9, 2, 264), (1, 63, 160), (301, 1, 240)] {
        check_positions::<T>(batch, sequence, channels, 3);
        let size = sequence * channels;
        let (dwpe, dout) = (rounded::<T>(&noise(size, 4)), rounded::<T>(&noise(batch * size, 3)));
        let want = sums(&dwpe, &dout, channels, |row| row % sequence);
        assert_close("dwpe", &gradient_wpe(&dwpe, &dout, sequence, 42), &want, T::STEP, 1.0);
    }
}

fn dwpe_of_random_shapes_matches_reference<T: Tolerance>() {
    for_all(48, (1..40usize, 1..70usize, 1..50usize, 0..99u32), |(batch, sequence, packets, seed)| {
        check_positions::<T>(batch, sequence, packets * T::PACKET, seed);
    });
}

fn check_tokens<T: Tolerance>(name: &str, tokens: &[i32], channels: usize, chunk: usize, seed: u32) {
    let (dwte, dout) = (integer_tensor(VOCABULARY * channels, seed), integer_tensor(tokens.len() * channels, seed + 1));
    let got = gradient_wte::<T>(&dwte, &dout, tokens, chunk, seed);
    assert_rounded::<T>(name, &got, &sums(&dwte, &dout, channels, |row| tokens[row] as usize));
}

fn dwte_matches_reference<T: Tolerance>() {
    // Runs inside a chunk, up to its end, across one boundary and across many; a single token; more than 32 chunks.
    let cases: [(&str, Vec<i32>, usize); 10] = [
        ("one position", vec![3], 8),
        ("63 positions", (0..63).map(|i| i * i % VOCABULARY as i32).collect(), 160),
        ("short runs", (0..45).map(|i| i * 7 % VOCABULARY as i32).collect(), 80),
        ("runs of 32", (0..96).map(|i| i % 3).collect(), 264),
        ("runs of 31 and 33", (0..64).map(|i| i32::from(i < 33)).collect(), 80),
        ("all the same", vec![10; 333], 80),
        ("two long", (0..300).map(|i| i32::from(i % 4 == 0) * 9).collect(), 264),
        ("a long one after short ones", (0..400).map(|i| if i < 70 { i % 9 } else { 10 }).collect(), 80),
        ("many chunks", (0..1400).map(|i| i32::from(i == 77) + i32::from(i % 100 == 0)).collect(), 16),
        ("one full ballot of chunks", vec![1; 33 * 32], 16),
    ];
    for (name, tokens, channels) in cases {
        for chunk in [8, 16, 28, 32] {
            check_tokens::<T>(name, &tokens, channels, chunk, 6);
        }
        let dwte = rounded::<T>(&noise(VOCABULARY * channels, 6));
        let dout = rounded::<T>(&noise(tokens.len() * channels, 5));
        let got = gradient_wte(&dwte, &dout, &tokens, 16, 7);
        let want = sums(&dwte, &dout, channels, |row| tokens[row] as usize);
        assert_close(name, &got, &want, T::STEP, 2.0);
        assert_same(&format!("{name} again"), &gradient_wte(&dwte, &dout, &tokens, 16, 7), &got);
    }
}

/// A chunk has at most as many positions as a warp has lanes, and the last wave of blocks is nearly full.
fn chunks_fill_the_sms<T: Tolerance>() {
    for (positions, channels) in [(65536, 768), (32768, 1024), (16384, 1600), (64, 768), (1, 8)] {
        let chunk = encoder_backward_chunk::<T>(positions, channels, 132);
        assert!((8..=32).contains(&chunk), "{chunk}");
        let waves = f64::from(encoder_backward_wte_grid::<T>(positions, channels, chunk)) / f64::from(4 * 132);
        assert!(positions < 100 || waves / waves.ceil() > 0.9, "{positions} x {channels}: {waves} waves");
    }
}

/// A few tokens are frequent and the others rare, as in real text.
fn dwte_of_random_tokens_matches_reference<T: Tolerance>() {
    let tokens = vec((0..VOCABULARY as i32, 0..4i32), 1..400);
    for_all(64, (tokens, 1..70usize, 1..33usize, 0..99u32), |(tokens, packets, chunk, seed)| {
        let tokens: Vec<_> = tokens.into_iter().map(|(rare, often)| if often > 1 { often } else { rare }).collect();
        check_tokens::<T>("dwte", &tokens, packets * T::PACKET, chunk, seed);
    });
}

/// The absence of positions does not change a bit of dwte. The tokens make short runs, long runs and runs of one chunk.
fn backward_without_positions_has_the_same_dwte<T: Tolerance>() {
    for (tokens, channels) in [(vec![3], 8), (vec![1; 33 * 32], 16), ((0..96).map(|i| i % 3).collect(), 264)] {
        let dwte = rounded::<T>(&noise(VOCABULARY * channels, 6));
        let dout = rounded::<T>(&noise(tokens.len() * channels, 5));
        let dwpe = vec![T::from_f32(1.0); dout.len()];
        for chunk in [8, 28] {
            let want = gradients::<T, true>(&dwte, &dwpe, &dout, &tokens, chunk, 7).0;
            let (got, unchanged) = gradients::<T, false>(&dwte, &dwpe, &dout, &tokens, chunk, 7);
            assert_same("dwte", &got, &want);
            assert_same("dwpe", &unchanged, &wide(&dwpe));
        }
    }
}

/// The seed determines the stochastic rounding bit for bit: of runs inside a chunk, of runs across chunks, and of dwpe.
fn rounding_depends_on_the_seed<T: Tolerance>() {
    let (batch, sequence, channels) = (2, 20, 16);
    let tokens: Vec<_> = (0..batch * sequence).map(|i| if i % 2 == 0 { 1 } else { (i % VOCABULARY) as i32 }).collect();
    // The sums are exact in f32 but not representable in bf16.
    let parts = |len, seed| rounded::<T>(&integers(len, seed).iter().map(|x| x / 64.0).collect::<Vec<_>>());
    let (dwte, dwpe) = (parts(VOCABULARY * channels, 1), parts(sequence * channels, 2));
    let dout = integer_tensor::<T>(tokens.len() * channels, 3);
    let rounded = |exact: &[f64], seed: u32| -> Vec<f64> {
        let packet = |i: usize| round_packet::<T>(i, seed, |k| exact[i + k] as f32);
        (0..exact.len()).map(|i| f64::from(packet(i / T::PACKET * T::PACKET).get(i % T::PACKET))).collect()
    };
    let of_tokens = sums(&dwte, &dout, channels, |row| tokens[row] as usize);
    let of_positions = sums(&dwpe, &dout, channels, |row| row % sequence);
    for seed in [0, 7, 1 << 31, u32::MAX] {
        let (got_tokens, got_positions) = gradients::<T, true>(&dwte, &dwpe, &dout, &tokens, 8, seed);
        assert_same("dwte", &got_tokens, &rounded(&of_tokens, seed));
        assert_same("dwpe", &got_positions, &rounded(&of_positions, !seed));
    }
}

/// In expectation, adding a gradient far below the rounding step of the stored value moves it by that gradient.
fn rounding_is_unbiased<T: Tolerance>() {
    let (channels, small) = (1024, 1.0 / 1024.0);
    let dout = vec![T::from_f32(small as f32); channels];
    let ones = |rows: usize| vec![T::from_f32(1.0); rows * channels];
    let of_token = gradient_wte(&ones(VOCABULARY), &dout, &[2], 32, 99);
    for got in [&of_token[2 * channels..3 * channels], &gradient_wpe(&ones(1), &dout, 1, 99)] {
        let moved: f64 = got.iter().map(|x| x - 1.0).sum::<f64>() / channels as f64;
        assert!((moved - small).abs() < 0.25 * small, "moved by {moved}, expected {small}");
        // If values are rounded at all, each pair of a packet gets its own random bits.
        let pairs_differ = |packet: &[f64]| packet.iter().step_by(2).any(|x| x.total_cmp(&packet[0]).is_ne());
        let is_rounded = got.iter().any(|x| x.total_cmp(&got[0]).is_ne());
        assert_eq!(got.chunks(8).any(pairs_differ), is_rounded);
    }
}

fn nan_stays_in_its_element<T: Tolerance>() {
    let (sequence, channels) = (21, 80);
    let tokens: Vec<_> = (0..3 * sequence).map(|i| (i * i % VOCABULARY) as i32).collect();
    let (dwpe, dwte) = (integer_tensor(sequence * channels, 1), integer_tensor(VOCABULARY * channels, 2));
    let mut dout = integer_tensor::<T>(tokens.len() * channels, 3);
    let mut of_positions = gradient_wpe(&dwpe, &dout, sequence, 4);
    let mut of_tokens = gradient_wte(&dwte, &dout, &tokens, 16, 4);
    for (row, column, bad) in [(0, 0, f64::NAN), (40, 79, f64::INFINITY)] {
        dout[row * channels + column] = T::from_f32(bad as f32);
        of_positions[row % sequence * channels + column] = bad;
        of_tokens[tokens[row] as usize * channels + column] = bad;
    }
    assert_close("dwpe", &gradient_wpe(&dwpe, &dout, sequence, 4), &of_positions, 0.0, 0.0);
    assert_close("dwte", &gradient_wte(&dwte, &dout, &tokens, 16, 4), &of_tokens, 0.0, 0.0);
}
