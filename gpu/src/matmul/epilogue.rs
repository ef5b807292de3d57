//! What happens to sums on their way to memory, 64 x 64 at a time: through shared memory, in and out by TMA.

use super::mainloop::Sums;
use super::pingpong::{Shared, TILE_M, WARPGROUP, is_first};
use cuda_std::element::{pack_pair, unpack_pair};
use cuda_std::hopper::wgmma::Accumulators;
use cuda_std::hopper::{self, SwizzledTile, TensorMap, tma};
use cuda_std::{Global, bf16, math, thread, warp};

/// out = f(sums + bias (N), aux (M, N))
pub trait Epilogue: 'static {
    /// Adds a bias.
    const BIAS: bool = false;
    /// Stores the sums with their bias to aux.
    const WRITES_AUX: bool = false;
    /// Loads aux.
    const READS_AUX: bool = false;

    fn apply(sum: f32, aux: f32) -> f32;
}

/// out = a · b
pub struct Plain;
/// out = a · b + bias
pub struct Bias;
/// aux = a · b + bias; out = gelu(aux), of the sum before it is rounded.
pub struct BiasGelu;
/// out = a · b ⊙ gelu'(aux)
pub struct GeluBackward;

impl Epilogue for Plain {
    #[inline(always)]
    fn apply(sum: f32, _: f32) -> f32 {
        sum
    }
}

impl Epilogue for Bias {
    const BIAS: bool = true;

    #[inline(always)]
    fn apply(sum: f32, _: f32) -> f32 {
        sum
    }
}

const SCALE: f32 = 0.797_884_6; // sqrt(2 / pi)
const CUBIC: f32 = 0.044_715;

/// (1 + tanh(SCALE (x + CUBIC x³))) / 2 as 1 / (1 + e^(-2 SCALE (x + CUBIC x³))), x² given: exact to a few units in the
/// last place also where it is tiny, which 1 + tanh is not.
#[inline(always)]
fn half_one_plus_tanh(x: f32, square: f32) -> f32 {
    const LINEAR: f32 = -2.0 * SCALE * core::f32::consts::LOG2_E;
    math::recip(1.0 + math::exp2(x * math::fma(square, LINEAR * CUBIC, LINEAR)))
}

impl Epilogue for BiasGelu {
    const BIAS: bool = true;
    const WRITES_AUX: bool = true;

    #[inline(always)]
    fn apply(sum: f32, _: f32) -> f32 {
        sum * half_one_plus_tanh(sum, sum * sum)
    }
}

impl Epilogue for GeluBackward {
    const READS_AUX: bool = true;

    #[inline(always)]
    fn apply(sum: f32, x: f32) -> f32 {
        // Bounded, since infinity times the 0 that the sigmoid's slope is by then would be NaN.
        let square = (x * x).min(1e6);
        let s = half_one_plus_tanh(x, square);
        let slope = x * math::fma(-s, s, s);
        sum * math::fma(slope, math::fma(square, 6.0 * SCALE * CUBIC, 2.0 * SCALE), s)
    }
}

/// Boxes of 64 x 64 in shared memory for each consumer.
pub const BOXES: u32 = 4;
pub const BOX: u32 = 64;
/// Boxes that a piece of 64 x 64 takes.
const fn boxes<E: Epilogue>() -> u32 {
    1 + E::WRITES_AUX as u32
}

/// Pieces of a tile.
const fn pieces<A: Accumulators>() -> u32 {
    TILE_M / BOX * (A::COLUMNS / BOX)
}

/// Pieces that have room at a time: as many that their number divides that of a tile's pieces.
pub const fn slots<A: Accumulators, E: Epilogue>() -> u32 {
    let most = BOXES / boxes::<E>();
    if pieces::<A>().is_multiple_of(most) { most } else { most - 1 }
}

/// Where a tile goes.
#[derive(Clone, Copy)]
pub struct Target {
    pub out: Global<TensorMap>,
    pub aux: Global<TensorMap>,
    pub bias: Global<bf16>,
    /// Columns of the output.
    pub n: u32,
}

/// A consumer's way of writing its tiles.
pub struct Writer {
    pub shared: Shared,
    pub target: Target,
    pub consumer: u32,
    /// Tiles written.
    pub round: u32,
}

impl Writer {
    #[inline(always)]
    fn sync(&self) {
        thread::sync_named(1 + self.consumer, WARPGROUP);
    }

    #[inline(always)]
    fn slot<E: Epilogue>(&self, slot: u32) -> SwizzledTile<64> {
        self.shared.boxes.rows::<64>((self.consumer * BOXES + slot * boxes::<E>()) * BOX)
    }

    /// Starts loading what the first pieces of the tile at (`row`, `column`) need.
    #[inline(always)]
    pub fn prepare<A: Accumulators, E: Epilogue>(&self, row: u32, column: u32) {
        if E::READS_AUX && is_first() {
            tma::wait_stores_read();
            for piece in 0..slots::<A, E>() {
                self.load_aux::<A, E>(piece, row, column);
            }
        }
    }

    #[inline(always)]
    fn load_aux<A: Accumulators, E: Epilogue>(&self, piece: u32, row: u32, column: u32) {
        let slot = piece % slots::<A, E>();
        let full = self.shared.aux_full.at(self.consumer * BOXES + slot);
        full.arrive_expecting(SwizzledTile::<64>::BYTES);
        self.slot::<E>(slot).load(self.target.aux, column + piece / 2 * BOX, row + piece % 2 * BOX, full);
    }

    /// Writes the tile at (`row`, `column`).
    #[inline(always)]
    pub fn write<A: Accumulators, E: Epilogue>(&mut self, d: &Sums<A>, row: u32, column: u32) {
        self.write_columns::<A, E, 0>(d, row, column);
        self.write_columns::<A, E, 1>(d, row, column);
        if A::COLUMNS > 128 {
            self.write_columns::<A, E, 2>(d, row, column);
        }
        self.round += 1;
    }

    #[inline(always)]
    fn write_columns<A: Accumulators, E: Epilogue, const BLOCK: u32>(&self, d: &Sums<A>, row: u32, column: u32) {
        let mut bias = [[0.0; 2]; 8];
        if E::BIAS {
            let first = column + BLOCK * BOX + warp::lane() % 4 * 2;
            for j in 0..8 {
                let at = first + j as u32 * 8;
                if at < self.target.n {
                    bias[j] = self.target.bias.pair(at as usize);
                }
            }
        }
        self.write_piece::<A, E, BLOCK, 0>(&d.upper, &bias, row, column);
        self.write_piece::<A, E, BLOCK, 1>(&d.lower, &bias, row, column);
    }

    #[inline(always)]
    fn write_piece<A: Accumulators, E: Epilogue, const BLOCK: u32, const HALF: u32>(
        &self,
        d: &A,
        bias: &[[f32; 2]; 8],
        row: u32,
        column: u32,
    ) {
        let (piece, slots) = (BLOCK * 2 + HALF, slots::<A, E>());
        let slot = piece % slots;
        let aux = self.slot::<E>(slot);
        let out = if E::WRITES_AUX { aux.same_shape_after(1) } else { aux };
        if E::READS_AUX {
            let times = self.round * (pieces::<A>() / slots) + piece / slots;
            self.shared.aux_full.at(self.consumer * BOXES + slot).wait(times % 2);
        } else {
            if is_first() {
                wait_for_slot::<A, E>();
            }
            self.sync();
        }
        let first_row = thread::thread_idx_x() % WARPGROUP / 32 * 16;
        // The lane's row for stmatrix: matrices 0 and 1 are rows 0..8 and 8..16 of the left piece, 2 and 3 of the right.
        let (lane_row, lane_piece) = (first_row + warp::lane() % 16, warp::lane() / 16);
        for quarter in 0..4 {
            let mut x = [0.0; 8];
            for i in 0..8 {
                x[i] = d[(BLOCK as usize * 8 + quarter * 2) * 4 + i] + bias[quarter * 2 + i / 4][i % 2];
            }
            let mut other = [0.0; 8];
            if E::READS_AUX {
                let words = aux.left(first_row, quarter as u32);
                for i in 0..4 {
                    [other[2 * i], other[2 * i + 1]] = unpack_pair(words[i]);
                }
            }
            let at = quarter as u32 * 2 + lane_piece;
            if E::WRITES_AUX {
                aux.store_matrices(lane_row, at, packed(&x));
            }
            for i in 0..8 {
                x[i] = E::apply(x[i], other[i]);
            }
            out.store_matrices(lane_row, at, packed(&x));
        }
        hopper::fence_async_proxy();
        self.sync();
        if is_first() {
            let (x, y) = (column + BLOCK * BOX, row + HALF * BOX);
            if E::WRITES_AUX {
                aux.store(self.target.aux, x, y);
            }
            out.store(self.target.out, x, y);
            tma::commit_stores();
            if E::READS_AUX && piece > 0 && piece - 1 + slots < pieces::<A>() {
                tma::wait_stores_read_but::<1>();
                self.load_aux::<A, E>(piece - 1 + slots, row, column);
            }
        }
    }
}

/// Waits until the stores of the piece that had the next slot have read it.
#[inline(always)]
fn wait_for_slot<A: Accumulators, E: Epilogue>() {
    match slots::<A, E>() {
        2 => tma::wait_stores_read_but::<1>(),
        3 => tma::wait_stores_read_but::<2>(),
        _ => tma::wait_stores_read_but::<3>(),
    }
}

#[inline(always)]
fn packed(x: &[f32; 8]) -> [u32; 4] {
    [pack_pair(x[0], x[1]), pack_pair(x[2], x[3]), pack_pair(x[4], x[5]), pack_pair(x[6], x[7])]
}
