//! Matrix product for `sm_90a`: out (M, N) = a (M, K) · b (N, K)^T, bf16 with f32 accumulation.
//!
//! A persistent block per multiprocessor walks over 128 x 256 tiles of the output. One warpgroup only issues TMA loads
//! (the producer); two multiply, each 64 rows of the tile (the consumers). Their 64 x 256 accumulators are 128 registers a
//! thread, so the producer gives its own away. A ring of four stages of (128 + 256) x 64 operands fills 192 KB of shared
//! memory. Edges need no code: TMA reads zeros and drops writes past the end of a tensor.
//!
//! With CLUSTER = 2 two blocks work on tiles above each other: each loads half of the columns' operand for both, which
//! halves the traffic from L2 for it.

use cuda_std::hopper::mbarrier::MBarriers;
use cuda_std::hopper::wgmma::Accumulators;
use cuda_std::hopper::{self, MBarrier, SwizzledTile, TensorMap, cluster, tma, wgmma};
use cuda_std::shared::Layout;
use cuda_std::{Global, kernel, thread, warp};

/// Rows of `a`, and of the output, per tile.
pub const TILE_M: u32 = 128;
/// Rows of `b`, columns of the output, per tile.
pub const TILE_N: u32 = 256;
const TILE_K: u32 = 64;
const STAGES: u32 = 4;
/// Rows of operands a stage holds: `a`'s, then `b`'s.
const STAGE_ROWS: usize = (TILE_M + TILE_N) as usize;
const STAGE_BYTES: u32 = SwizzledTile::<STAGE_ROWS>::BYTES;
/// Tiles above each other that are worked on before moving to the next columns, so that operands stay in L2.
const GROUP: u32 = 16;
const WARPGROUP: u32 = 128;

/// Box of the tensor map of `a`, and of the output: (rows, columns). `b`'s is (`TILE_N` / CLUSTER, 64).
pub const A_BOX: (u32, u32) = (TILE_M, TILE_K);
pub const OUT_BOX: (u32, u32) = (64, 64);

#[derive(Clone, Copy)]
struct Shared {
    ring: SwizzledTile<{ STAGE_ROWS * STAGES as usize }>,
    /// For each consumer 64 x 128 of the output, as two tiles of 64 columns.
    out: SwizzledTile<256>,
    /// Stage i holds operands.
    full: MBarriers,
    /// Stage i may be overwritten.
    empty: MBarriers,
}

fn shared(layout: &mut Layout) -> Shared {
    Shared {
        ring: layout.swizzled(),
        out: layout.swizzled(),
        full: layout.mbarriers(STAGES as usize),
        empty: layout.mbarriers(STAGES as usize),
    }
}

/// Dynamic shared memory of a block.
pub fn shared_bytes() -> usize {
    let mut layout = Layout::new();
    shared(&mut layout);
    layout.bytes()
}

/// A place in the ring of stages; the parity flips each time round.
#[derive(Clone, Copy)]
struct Place {
    stage: u32,
    parity: u32,
}

impl Place {
    #[inline(always)]
    fn advance(&mut self) {
        self.stage += 1;
        if self.stage == STAGES {
            self.stage = 0;
            self.parity ^= 1;
        }
    }
}

/// Row and column of output tile `t`, in tiles: down a group of rows, then to the next column.
#[inline(always)]
fn tile_at(t: u32, tiles_m: u32, tiles_n: u32) -> (u32, u32) {
    let group = t / (GROUP * tiles_n);
    let within = t - group * GROUP * tiles_n;
    let height = (tiles_m - group * GROUP).min(GROUP);
    (group * GROUP + within % height, within / height)
}

/// Blocks as many as fit the GPU at once (a multiple of CLUSTER), 1-D. The maps are of a (M, K), b (N, K), out (M, N).
#[kernel(threads = 384, blocks_per_sm = 1, arch = "sm_90a", instances(c1 = <1>, c2 = <2>))]
pub fn matmul_wgmma<const CLUSTER: u32>(
    a: Global<TensorMap>,
    b: Global<TensorMap>,
    out: Global<TensorMap>,
    m: u32,
    n: u32,
    k: u32,
) {
    let shared = shared(&mut Layout::new());
    let rank = if CLUSTER == 1 { 0 } else { cluster::block_rank() };
    if thread::thread_idx_x() == 0 {
        a.prefetch();
        b.prefetch();
        out.prefetch();
        for stage in 0..STAGES {
            shared.full.at(stage).init(1);
            shared.empty.at(stage).init(2 * CLUSTER);
        }
        MBarrier::fence_init();
        hopper::fence_async_proxy();
    }
    if CLUSTER == 1 {
        thread::sync_threads();
    } else {
        cluster::sync();
    }

    // A cluster takes CLUSTER tiles above each other.
    let tiles_m = m.div_ceil(TILE_M * CLUSTER);
    let tiles_n = n.div_ceil(TILE_N);
    let steps = k.div_ceil(TILE_K);
    let first = thread::block_idx_x() / CLUSTER;
    let stride = thread::grid_dim_x() / CLUSTER;

    let role = warp::shuffle(thread::thread_idx_x() / WARPGROUP, 0);
    if role == 0 {
        hopper::give_registers::<40>();
        if thread::thread_idx_x() == 0 {
            let mut place = Place { stage: 0, parity: 1 };
            let mut t = first;
            while t < tiles_m * tiles_n {
                let (row, column) = tile_at(t, tiles_m, tiles_n);
                let (y_a, y_b) = ((row * CLUSTER + rank) * TILE_M, column * TILE_N);
                let mut step = 0;
                while step < steps {
                    shared.empty.at(place.stage).wait(place.parity);
                    load_stage::<CLUSTER>(shared, place.stage, a, b, step * TILE_K, y_a, y_b, rank);
                    place.advance();
                    step += 1;
                }
                t += stride;
            }
        }
    } else {
        hopper::take_registers::<232>();
        let consumer = role - 1;
        let mut place = Place { stage: 0, parity: 0 };
        let mut t = first;
        while t < tiles_m * tiles_n {
            let (row, column) = tile_at(t, tiles_m, tiles_n);
            let mut d = multiply::<CLUSTER>(shared, consumer, steps, &mut place);
            let (x, y) = (column * TILE_N, (row * CLUSTER + rank) * TILE_M + consumer * 64);
            write_out(shared, consumer, &mut d, out, x, y);
            t += stride;
        }
        if thread::thread_idx_x().is_multiple_of(WARPGROUP) {
            tma::wait_stores();
        }
    }
    if CLUSTER > 1 {
        // A block must not end while its neighbour may still write into its shared memory.
        cluster::sync();
    }
}

/// Fills one stage with columns `x` .. `x` + 64 of the operands' rows.
#[inline(always)]
fn load_stage<const CLUSTER: u32>(
    shared: Shared,
    stage: u32,
    a: Global<TensorMap>,
    b: Global<TensorMap>,
    x: u32,
    y_a: u32,
    y_b: u32,
    rank: u32,
) {
    let full = shared.full.at(stage);
    let rows = stage * STAGE_ROWS as u32;
    full.arrive_expecting(STAGE_BYTES);
    shared.ring.rows::<128>(rows).load(a, x, y_a, full);
    if CLUSTER == 1 {
        shared.ring.rows::<256>(rows + TILE_M).load(b, x, y_b, full);
    } else {
        let part = rank * (TILE_N / CLUSTER);
        let every_block = (1 << CLUSTER) - 1;
        shared.ring.rows::<128>(rows + TILE_M + part).load_multicast(b, x, y_b + part, full, every_block);
    }
}

/// This consumer's 64 x 256 of a tile, over all of K (`steps` >= 1).
#[inline(always)]
fn multiply<const CLUSTER: u32>(shared: Shared, consumer: u32, steps: u32, place: &mut Place) -> [f32; 128] {
    let mut d = <[f32; 128]>::ZERO;
    let mut previous = place.stage;
    let mut step = 0;
    // Tested at the end: a path around the products would define accumulators outside them, and ptxas would then
    // serialise every product.
    loop {
        shared.full.at(place.stage).wait(place.parity);
        let rows = place.stage * STAGE_ROWS as u32;
        let a = shared.ring.rows::<64>(rows + consumer * 64);
        let b = shared.ring.rows::<256>(rows + TILE_M);
        wgmma::fence();
        d.product(a.operand(0), b.operand(0), step != 0);
        d.product(a.operand(1), b.operand(1), true);
        d.product(a.operand(2), b.operand(2), true);
        d.product(a.operand(3), b.operand(3), true);
        wgmma::commit();
        // With the newest group still running, the one before it is done with its stage.
        wgmma::wait::<1>();
        if step != 0 {
            release::<CLUSTER>(shared.empty.at(previous));
        }
        previous = place.stage;
        place.advance();
        step += 1;
        if step == steps {
            break;
        }
    }
    wgmma::wait::<0>();
    d.settle();
    release::<CLUSTER>(shared.empty.at(previous));
    d
}

/// Tells the producers of every block that loads into this stage that one consumer is done with it.
#[inline(always)]
fn release<const CLUSTER: u32>(empty: MBarrier) {
    let thread = thread::thread_idx_x() % WARPGROUP;
    if CLUSTER == 1 {
        if thread == 0 {
            empty.arrive();
        }
    } else if thread < CLUSTER {
        empty.arrive_at(thread);
    }
}

/// Rounds to bf16 and stores through shared memory, 128 columns at a time.
#[inline(always)]
fn write_out(shared: Shared, consumer: u32, d: &mut [f32; 128], out: Global<TensorMap>, x: u32, y: u32) {
    let thread = thread::thread_idx_x() % WARPGROUP;
    let (lane, warp) = (warp::lane(), thread / 32);
    // The lane's row for stmatrix: matrices 0 and 1 are rows 0..8 and 8..16 of the left piece, 2 and 3 of the right.
    let row = warp * 16 + lane % 16;
    let staging = shared.out.rows::<128>(consumer * 128);
    for half in 0..2 {
        if thread == 0 {
            tma::wait_stores_read();
        }
        thread::sync_named(1 + consumer, WARPGROUP);
        for pair in 0..8 {
            let i = (half * 16 + pair * 2) * 4;
            let words = [pack(d, i), pack(d, i + 2), pack(d, i + 4), pack(d, i + 6)];
            let tile = staging.rows::<64>(pair as u32 / 4 * 64);
            tile.store_matrices(row, pair as u32 % 4 * 2 + lane / 16, words);
        }
        hopper::fence_async_proxy();
        thread::sync_named(1 + consumer, WARPGROUP);
        if thread == 0 {
            let x = x + half as u32 * 128;
            staging.rows::<64>(0).store(out, x, y);
            staging.rows::<64>(64).store(out, x + 64, y);
            tma::commit_stores();
        }
    }
}

#[inline(always)]
fn pack(d: &[f32; 128], i: usize) -> u32 {
    cuda_std::element::pack_pair(d[i], d[i + 1])
}
