//! Token and position embedding, and its gradient.

use super::file;
use crate::registry::{Family, Kernel};
use crate::session::{Session, Tolerance, blocks, shared_bytes};
use crate::values::tokens;
use anyhow::Result;
use cuda_std::{Element, Global, GlobalMut, bf16};
use kernels_gpu::encoder;
use std::sync::Arc;

pub const FAMILY: Family = Family {
    name: "encoder",
    problem: "out (B, T, C) = wte at the token + wpe at the position, and the gradients of wte and wpe.",
    kernels: &[
        Kernel::new(
            12,
            "encoder_naive",
            file!("encoder/naive.rs"),
            "One thread for each element of the output.",
            |s| {
                let Forward { out, tokens, wte, wpe, sizes } = forward(s)?;
                let Sizes { positions, t, c } = sizes;
                let launch = encoder::naive::encoder_naive(out, tokens, wte, wpe, positions as u32, t as u32, c as u32);
                s.launch(launch, blocks(positions * c, 256), 0);
                Ok(())
            },
        ),
        Kernel::new(13, "encoder_packets", file!("encoder/packets.rs"), "Eight channels for each thread.", |s| {
            let Forward { out, tokens, wte, wpe, sizes } = forward(s)?;
            let Sizes { positions, t, c } = sizes;
            let launch = encoder::packets::encoder_packets(out, tokens, wte, wpe, positions as u32, t as u32, c as u32);
            s.launch(launch, blocks(positions * c, 256 * 8), 0);
            Ok(())
        }),
        Kernel::new(
            14,
            "encoder_production",
            "gpu/src/encoder.rs",
            "A warp for each row: the token is loaded once, and no division remains.",
            |s| {
                let Forward { out, tokens, wte, wpe, sizes } = forward(s)?;
                let Sizes { positions, t, c } = sizes;
                let (rows, t, c) = (positions as u32, t as u32, c as u32);
                let launch = gpu::encoder::encoder_forward::<bf16, true>(out, tokens, wte, wpe, rows, t, c);
                s.launch(launch, [gpu::encoder::encoder_forward_grid(positions), 1, 1], 0);
                Ok(())
            },
        ),
        Kernel::new(
            15,
            "encoder_backward_atomic",
            file!("encoder/backward_atomic.rs"),
            "Atomic additions to the rows of the tokens; the result depends on their order.",
            |s| {
                let Backward { dwte, dwpe, dout, tokens, sizes, .. } = backward::<f32>(s)?;
                let Sizes { positions, t, c } = sizes;
                let (rows, t, channels) = (positions as u32, t as u32, c as u32);
                let launch =
                    encoder::backward_atomic::encoder_backward_atomic(dwte, dwpe, dout, tokens, rows, t, channels);
                s.launch(launch, blocks(positions * c, 256), 0);
                Ok(())
            },
        ),
        Kernel::new(
            16,
            "encoder_backward_sorted",
            file!("encoder/backward_sorted.rs"),
            "Sorted tokens make each row the sum of a run, which one block adds up: no atomics.",
            |s| {
                let Backward { dwte, dwpe, dout, order, sorted, sizes, .. } = backward::<bf16>(s)?;
                let Sizes { positions, t, c } = sizes;
                let (rows, channels, batch) = (positions as u32, c as u32, (positions / t) as u32);
                let launch = encoder::backward_sorted::encoder_backward_runs(dwte, dout, order, sorted, rows, channels);
                s.launch(launch, [rows, 1, 1], 0);
                let launch =
                    encoder::backward_sorted::encoder_backward_positions(dwpe, dout, batch, t as u32, channels);
                s.launch(launch, blocks(t * c, 128), 0);
                Ok(())
            },
        ),
        Kernel::new(
            17,
            "encoder_backward_production",
            "gpu/src/encoder.rs",
            "Chunks of equal length balance the load; a second kernel adds runs that cross chunks.",
            backward_production,
        ),
    ],
};

#[derive(Clone, Copy)]
struct Sizes {
    /// B T.
    positions: usize,
    t: usize,
    c: usize,
}

/// Returns the sizes and V.
fn sizes(s: &Session) -> (Sizes, usize) {
    let Sizes { positions, t, c } =
        s.pick(Sizes { positions: 3 * 40, t: 40, c: 72 }, Sizes { positions: 64 * 1024, t: 1024, c: 768 });
    (Sizes { positions, t, c }, s.pick(50, 50257))
}

struct Forward {
    out: GlobalMut<bf16>,
    tokens: Global<i32>,
    wte: Global<bf16>,
    wpe: Global<bf16>,
    sizes: Sizes,
}

fn forward(s: &mut Session) -> Result<Forward> {
    let (sizes @ Sizes { positions, t, c }, v) = sizes(s);
    let of_position = tokens("tokens", positions, v);
    let (wte, wpe) = (s.noise::<bf16>("wte", v * c, 1.0)?, s.noise::<bf16>("wpe", t * c, 1.0)?);
    let (out, tokens) = (s.output("out", positions * c)?, s.input("tokens", &of_position)?);
    // Each row of wte in use is read at least once.
    let mut distinct = of_position.clone();
    distinct.sort_unstable();
    distinct.dedup();
    s.work.bytes = 4 * positions + 2 * c * (positions + distinct.len() + t);
    let (of_token, of_place) = (wte.values, wpe.values);
    s.expect("out", out, positions * c, Tolerance::BF16, move |i| {
        let (position, channel) = (i / c, i % c);
        of_token.at(of_position[position] as usize * c + channel) + of_place.at(position % t * c + channel)
    });
    Ok(Forward { out, tokens, wte: wte.view, wpe: wpe.view, sizes })
}

struct Backward<T> {
    dwte: GlobalMut<T>,
    dwpe: GlobalMut<T>,
    dout: Global<bf16>,
    tokens: Global<i32>,
    order: Global<i32>,
    sorted: Global<i32>,
    sizes: Sizes,
}

fn backward<T: Element + bytemuck::Pod>(s: &mut Session) -> Result<Backward<T>> {
    let (sizes @ Sizes { positions, t, c }, v) = sizes(s);
    let of_position = tokens("tokens", positions, v);
    let mut order: Vec<i32> = (0..positions as i32).collect();
    order.sort_by_key(|&position| of_position[position as usize]);
    let sorted: Vec<i32> = order.iter().map(|&position| of_position[position as usize]).collect();
    let dout = s.noise::<bf16>("dout", positions * c, 1.0)?;
    let (dwte, old_dwte) = s.noisy_buffer::<T>("dwte", v * c, 1.0)?;
    let (dwpe, old_dwpe) = s.noisy_buffer::<T>("dwpe", t * c, 1.0)?;
    let (tokens, order_view) = (s.input("tokens", &of_position)?, s.input("order", &order)?);
    let sorted_view = s.input("sorted", &sorted)?;
    let mut distinct = sorted.clone();
    distinct.dedup();
    s.work.bytes = 2 * positions * c + 2 * size_of::<T>() * c * (distinct.len() + t) + 8 * positions;
    let (gradient, for_places) = (Arc::new(dout.values), sorted);
    let of_token = Arc::clone(&gradient);
    s.expect("dwte", dwte, v * c, Tolerance::BF16, move |i| {
        let (token, channel) = ((i / c) as i32, i % c);
        let run = for_places.partition_point(|&x| x < token)..for_places.partition_point(|&x| x <= token);
        old_dwte.at(i) + run.map(|k| of_token.at(order[k] as usize * c + channel)).sum::<f64>()
    });
    s.expect("dwpe", dwpe, t * c, Tolerance::BF16, move |i| {
        old_dwpe.at(i) + (0..positions / t).map(|b| gradient.at(b * t * c + i)).sum::<f64>()
    });
    Ok(Backward { dwte, dwpe, dout: dout.view, tokens, order: order_view, sorted: sorted_view, sizes })
}

fn backward_production(s: &mut Session) -> Result<()> {
    use gpu::encoder::{self, WteSizes};
    let Backward { dwte, dwpe, dout, order, sorted, sizes, .. } = backward::<bf16>(s)?;
    let Sizes { positions, t, c } = sizes;
    let chunk = encoder::encoder_backward_chunk::<bf16>(positions, c, s.sm_count());
    let partials = s.output("partials", encoder::encoder_backward_partials(positions, c, chunk))?;
    let seed = s.input("seed", &[7])?;
    let [rows, batch, sequence, channels, chunk_len] = [positions, positions / t, t, c, chunk].map(|size| size as u32);
    let wte_sizes = WteSizes { positions: rows, channels, chunk_len };
    let launch = encoder::encoder_backward_wte::<bf16>(dwte, partials, dout, order, sorted, seed, wte_sizes);
    s.launch(launch, [encoder::encoder_backward_wte_grid::<bf16>(positions, c, chunk), 1, 1], 0);
    let partials = partials.reader();
    let launch = encoder::encoder_backward_rest::<bf16, true>(
        dwte, dwpe, partials, dout, sorted, seed, batch, sequence, channels, chunk_len,
    );
    let grid = encoder::encoder_backward_rest_grid::<bf16, true>(positions / t, t, c, chunk);
    s.launch(launch, [grid, 1, 1], shared_bytes(encoder::encoder_backward_rest_shared::<bf16>));
    Ok(())
}
