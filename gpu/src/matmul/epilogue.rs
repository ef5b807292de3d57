//! What happens to sums on their way to memory, 64 x 64 at a time: through shared memory, in and out by TMA.

use super::mainloop::Sums;
use super::pingpong::{Shared, WARPGROUP, Write, is_first};
use super::tiles::{Item, Tile};
use crate::gelu;
use core::marker::PhantomData;
use cuda_std::element::{pack_pair, unpack_pair};
use cuda_std::hopper::{self, SwizzledTile, TensorMap, tma};
use cuda_std::{Global, bf16, thread, warp};

/// out and second (M, N) = f(sums + bias (N), aux (M, N))
pub trait Epilogue: 'static {
    /// Adds a bias.
    const BIAS: bool = false;
    /// Loads aux.
    const AUX: bool = false;
    /// Stores a second output.
    const SECOND: bool = false;

    /// Of two sums beside each other, and of aux there if it is loaded: the pair of out, and that of the second output if there
    /// is one.
    #[inline(always)]
    fn apply([even, odd]: [f32; 2], _aux: [f32; 2]) -> [u32; 2] {
        [pack_pair(even, odd), 0]
    }
}

/// out = a · b
pub struct Plain;
/// out = a · b + bias
pub struct Bias;
/// out = aux + a · b + bias
pub struct BiasResidual;
/// second = a · b + bias; out = gelu(second), of the sum as it was rounded: out can be had again from second.
pub struct BiasGelu;
/// out = a · b ⊙ gelu'(aux)
pub struct GeluBackward;
/// The same; second = gelu(aux)
pub struct GeluBackwardAndGelu;
/// out = aux + a · b; aux may be out.
pub struct Accumulate;

impl Epilogue for Plain {}

impl Epilogue for Bias {
    const BIAS: bool = true;
}

impl Epilogue for BiasGelu {
    const BIAS: bool = true;
    const SECOND: bool = true;

    #[inline(always)]
    fn apply([even, odd]: [f32; 2], _: [f32; 2]) -> [u32; 2] {
        let rounded = pack_pair(even, odd);
        let [even, odd] = unpack_pair(rounded);
        [pack_pair(gelu::gelu(even), gelu::gelu(odd)), rounded]
    }
}

impl Epilogue for Accumulate {
    const AUX: bool = true;

    #[inline(always)]
    fn apply(sums: [f32; 2], aux: [f32; 2]) -> [u32; 2] {
        [pack_pair(aux[0] + sums[0], aux[1] + sums[1]), 0]
    }
}

impl Epilogue for BiasResidual {
    const BIAS: bool = true;
    const AUX: bool = true;

    #[inline(always)]
    fn apply(sums: [f32; 2], aux: [f32; 2]) -> [u32; 2] {
        Accumulate::apply(sums, aux)
    }
}

impl Epilogue for GeluBackward {
    const AUX: bool = true;

    #[inline(always)]
    fn apply(sums: [f32; 2], aux: [f32; 2]) -> [u32; 2] {
        [pack_pair(sums[0] * gelu::slope(aux[0]), sums[1] * gelu::slope(aux[1])), 0]
    }
}

impl Epilogue for GeluBackwardAndGelu {
    const AUX: bool = true;
    const SECOND: bool = true;

    #[inline(always)]
    fn apply(sums: [f32; 2], aux: [f32; 2]) -> [u32; 2] {
        let [even, even_slope] = gelu::gelu_and_slope(aux[0]);
        let [odd, odd_slope] = gelu::gelu_and_slope(aux[1]);
        [pack_pair(sums[0] * even_slope, sums[1] * odd_slope), pack_pair(even, odd)]
    }
}

pub const BOX: u32 = 64;
/// Boxes that a piece of 64 x 64 takes.
const fn boxes<E: Epilogue>() -> u32 {
    1 + E::SECOND as u32
}

/// Pieces of a consumer's rows of a tile.
const fn pieces<T: Tile>() -> u32 {
    T::CONSUMER_ROWS / BOX * (T::COLUMNS / BOX)
}

/// Pieces that have room at a time: if it can be, as many that their number divides that of a tile's pieces, for then each piece has
/// its place in every tile.
const fn slots<E: Epilogue, T: Tile>() -> u32 {
    let most = T::BOXES / boxes::<E>();
    if pieces::<T>().is_multiple_of(most) || !pieces::<T>().is_multiple_of(most - 1) { most } else { most - 1 }
}

/// Where a tile goes.
#[derive(Clone, Copy)]
pub struct Target {
    pub out: Global<TensorMap>,
    pub aux: Global<TensorMap>,
    pub second: Global<TensorMap>,
    pub bias: Global<bf16>,
    /// Columns of the output.
    pub n: u32,
}

/// A consumer's way of writing its tiles.
pub struct Writer<E, T> {
    shared: Shared,
    target: Target,
    consumer: u32,
    /// Tiles written.
    round: u32,
    kind: PhantomData<(E, T)>,
}

impl<E: Epilogue, T: Tile> Write<T> for Writer<E, T> {
    #[inline(always)]
    fn prepare(&self, Item { row, column, .. }: Item) {
        if E::AUX && is_first() {
            tma::wait_stores_read();
            for piece in 0..slots::<E, T>() {
                self.load_aux(piece, row, column);
            }
        }
    }

    #[inline(always)]
    fn write(&mut self, d: &Sums<T::Sums>, Item { row, column, .. }: Item) {
        self.write_columns::<0>(d, row, column);
        self.write_columns::<1>(d, row, column);
        if T::COLUMNS > 128 {
            self.write_columns::<2>(d, row, column);
        }
        if T::COLUMNS > 192 {
            self.write_columns::<3>(d, row, column);
        }
        if T::COLUMNS > 256 {
            self.write_columns::<4>(d, row, column);
        }
        self.round += 1;
    }

    #[inline(always)]
    fn finish(&self) {
        if is_first() {
            tma::wait_stores();
        }
    }
}

impl<E: Epilogue, T: Tile> Writer<E, T> {
    #[inline(always)]
    pub fn new(shared: Shared, target: Target, consumer: u32) -> Self {
        Self { shared, target, consumer, round: 0, kind: PhantomData }
    }

    #[inline(always)]
    fn sync(&self) {
        thread::sync_named(1 + self.consumer, WARPGROUP);
    }

    /// The slot of a piece of the tile that is being written, and how many pieces had it before.
    #[inline(always)]
    fn place(&self, piece: u32) -> (u32, u32) {
        let (pieces, slots) = (pieces::<T>(), slots::<E, T>());
        if pieces.is_multiple_of(slots) {
            (piece % slots, self.round * (pieces / slots) + piece / slots)
        } else {
            let before = self.round * pieces + piece;
            (before % slots, before / slots)
        }
    }

    #[inline(always)]
    fn slot(&self, slot: u32) -> SwizzledTile<64> {
        self.shared.pool.rows::<64>(T::RING_ROWS + (self.consumer * T::BOXES + slot * boxes::<E>()) * BOX)
    }

    #[inline(always)]
    fn load_aux(&self, piece: u32, row: u32, column: u32) {
        let ((slot, _), halves) = (self.place(piece), T::CONSUMER_ROWS / BOX);
        let full = self.shared.aux_full.at(self.consumer * T::BOXES + slot);
        full.arrive_expecting(SwizzledTile::<64>::BYTES);
        self.slot(slot).load(self.target.aux, column + piece / halves * BOX, row + piece % halves * BOX, full);
    }

    #[inline(always)]
    fn write_columns<const BLOCK: u32>(&self, d: &Sums<T::Sums>, row: u32, column: u32) {
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
        self.write_piece::<BLOCK, 0>(&d.upper, &bias, row, column);
        if T::CONSUMER_ROWS > BOX {
            self.write_piece::<BLOCK, 1>(&d.lower, &bias, row, column);
        }
    }

    #[inline(always)]
    fn write_piece<const BLOCK: u32, const HALF: u32>(&self, d: &T::Sums, bias: &[[f32; 2]; 8], row: u32, column: u32) {
        let piece = BLOCK * (T::CONSUMER_ROWS / BOX) + HALF;
        let (slot, times) = self.place(piece);
        // out takes the place of aux, a warp what it has read itself.
        let out = self.slot(slot);
        let second = if E::SECOND { out.same_shape_after(1) } else { out };
        if E::AUX {
            self.shared.aux_full.at(self.consumer * T::BOXES + slot).wait(times % 2);
        } else {
            if is_first() {
                wait_for_slot::<E, T>();
            }
            self.sync();
        }
        let first_row = thread::thread_idx_x() % WARPGROUP / 32 * 16;
        // The lane's row for stmatrix: matrices 0 and 1 are rows 0..8 and 8..16 of the left piece, 2 and 3 of the right.
        let (lane_row, lane_piece) = (first_row + warp::lane() % 16, warp::lane() / 16);
        for quarter in 0..4 {
            // Pieces of two boxes have but two slots: what is loaded only once this piece is written is waited for.
            if E::SECOND && quarter == 2 {
                self.load_next_aux::<0>(piece, row, column);
            }
            let mut x = [0.0; 8];
            for i in 0..8 {
                x[i] = d[(BLOCK as usize * 8 + quarter * 2) * 4 + i];
                if E::BIAS {
                    x[i] += bias[quarter * 2 + i / 4][i % 2];
                }
            }
            let aux = if E::AUX { out.left(first_row, quarter as u32) } else { [0; 4] };
            let (mut words, mut second_words) = ([0; 4], [0; 4]);
            for i in 0..4 {
                [words[i], second_words[i]] = E::apply([x[2 * i], x[2 * i + 1]], unpack_pair(aux[i]));
            }
            let at = quarter as u32 * 2 + lane_piece;
            out.store_matrices(lane_row, at, words);
            if E::SECOND {
                second.store_matrices(lane_row, at, second_words);
            }
        }
        hopper::fence_async_proxy();
        self.sync();
        if is_first() {
            let (x, y) = (column + BLOCK * BOX, row + HALF * BOX);
            out.store(self.target.out, x, y);
            if E::SECOND {
                second.store(self.target.second, x, y);
            }
            tma::commit_stores();
        }
        if !E::SECOND {
            self.load_next_aux::<1>(piece, row, column);
        }
    }

    /// Beside `piece`, loads aux into the slot of the one before, which all but the `PENDING` newest stores have read.
    #[inline(always)]
    fn load_next_aux<const PENDING: u32>(&self, piece: u32, row: u32, column: u32) {
        if E::AUX && piece > 0 && piece - 1 + slots::<E, T>() < pieces::<T>() && is_first() {
            tma::wait_stores_read_but::<PENDING>();
            self.load_aux(piece - 1 + slots::<E, T>(), row, column);
        }
    }
}

/// Waits until the stores of the piece that had the next slot have read it.
#[inline(always)]
fn wait_for_slot<E: Epilogue, T: Tile>() {
    match slots::<E, T>() {
        2 => tma::wait_stores_read_but::<1>(),
        3 => tma::wait_stores_read_but::<2>(),
        _ => tma::wait_stores_read_but::<3>(),
    }
}
