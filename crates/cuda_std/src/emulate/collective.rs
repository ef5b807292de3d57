//! Collective operations: warp-wide exchanges and hardware barriers.
//!
//! In a warp-wide operation each lane deposits words and then reads the words of all lanes. Every lane of the warp must
//! execute the operation at the same source line. Whole warps arrive at barriers (`bar.sync` and `bar.arrive` are
//! `.aligned`).

use super::LANES;
use super::access::check_accumulator_read;
use super::block::{Block, fail, suspend, with};
use super::report::{Fault, Line, Site, ranges};
use super::wait::{Operation, Wait};
use super::warp::{Barrier, Masked, Slot, Slots, Votes};
use std::panic::Location;

#[cold]
fn diverged(wait: Wait, pending: Wait) -> ! {
    let others = with(|block| {
        let (warp, _) = block.warp_and_lane();
        let arrived = block.warps[warp].arrived;
        (0..LANES).filter(|lane| arrived >> lane & 1 != 0).map(|lane| warp * LANES + lane).collect::<Vec<_>>()
    });
    let message = format!(
        "warp divergence: {} at {}, but threads {} of the same warp wait in {} at {}; all lanes must execute the same \
         warp-wide operation",
        wait.operation,
        Line(wait.at),
        ranges(&others),
        pending.operation,
        Line(pending.at)
    );
    fail(Fault::Divergence, wait.at, Some(pending.at), message)
}

/// Executes a warp-wide operation: every lane calls `deposit`, the last one to arrive also calls `complete`, and then
/// each lane reads its result.
#[inline]
pub fn collective<R>(
    wait: Wait,
    deposit: impl FnOnce(&mut Slot),
    complete: impl FnOnce(&mut Slots),
    result: impl FnOnce(&Slots, usize) -> R,
) -> R {
    let arrival = with(|block| {
        let (index, lane) = block.warp_and_lane();
        let warp = &mut block.warps[index];
        let parity = warp.parity;
        deposit(&mut warp.slots[parity][lane]);
        let last = warp.arrive(lane, wait)?;
        if last {
            complete(&mut warp.slots[parity]);
            warp.parity ^= 1;
            warp.ready |= warp.lanes & !(1 << lane);
            if let (Operation::SyncWarp, Some(checker)) = (wait.operation, &mut block.checker) {
                checker.order().warp_synced(index);
            }
        } else {
            block.wait(wait);
        }
        Ok((last, parity))
    });
    let (last, parity) = match arrival {
        Ok(arrival) => arrival,
        Err(pending) => diverged(wait, pending),
    };
    if !last {
        suspend();
    }
    with(|block| {
        let (warp, lane) = block.warp_and_lane();
        result(&block.warps[warp].slots[parity], lane)
    })
}

/// Exchanges one word per lane.
#[inline]
fn exchange<R>(wait: Wait, value: u32, result: impl FnOnce(&Slots, usize) -> R) -> R {
    collective(wait, |slot| slot.0[0] = value, |_| (), result)
}

/// Returns `value` of lane `source(lane)`.
#[inline]
#[track_caller]
fn shuffle(value: u32, source: impl FnOnce(usize) -> usize) -> u32 {
    let at = Location::caller();
    let lane = with(|block| block.warp_and_lane().1);
    let source = source(lane);
    check_accumulator_read(value, at);
    let lanes = with(|block| block.warps[block.current / LANES].lanes);
    if lanes >> source & 1 == 0 {
        let count = lanes.count_ones();
        let message = format!(
            "invalid operand: shuffle from lane {source}, which does not exist ({}); the warp has {count} lanes, so use a lane below \
             {count}, or a block size that is a multiple of {LANES}",
            Line(at)
        );
        fail(Fault::Operand, at, None, message);
    }
    exchange(Wait { operation: Operation::Shuffle, at }, value, |slots, _| slots[source].0[0])
}

#[inline]
#[track_caller]
pub fn shuffle_idx(value: u32, from: u32) -> u32 {
    shuffle(value, |_| from as usize % LANES)
}

#[inline]
#[track_caller]
pub fn shuffle_xor(value: u32, mask: u32) -> u32 {
    shuffle(value, |lane| lane ^ (mask as usize % LANES))
}

#[inline]
#[track_caller]
pub fn shuffle_down(value: u32, delta: u32) -> u32 {
    let delta = delta as usize % LANES;
    shuffle(value, |lane| if lane + delta < LANES { lane + delta } else { lane })
}

#[track_caller]
pub fn ballot(predicate: bool) -> u32 {
    let complete = |slots: &mut Slots| {
        let bits = (0..LANES).fold(0, |bits, lane| bits | slots[lane].0[0] << lane);
        for slot in slots {
            slot.0[1] = bits;
        }
    };
    let wait = Wait { operation: Operation::Ballot, at: Location::caller() };
    collective(wait, |slot| slot.0[0] = u32::from(predicate), complete, |slots, lane| slots[lane].0[1])
}

#[inline]
#[track_caller]
pub fn shuffle_up(value: u32, delta: u32) -> u32 {
    let delta = delta as usize % LANES;
    shuffle(value, |lane| lane.checked_sub(delta).unwrap_or(lane))
}

/// Exchanges one word per lane and returns `result` of this lane's word and the words of the lanes that exist.
#[inline]
fn combine<R>(operation: Operation, value: u32, at: Site, result: impl FnOnce(u32, &[(usize, u32)]) -> R) -> R {
    check_accumulator_read(value, at);
    let lanes = with(|block| block.warps[block.current / LANES].lanes);
    exchange(Wait { operation, at }, value, |slots, _| {
        let mut words = [(0, 0); LANES];
        let mut count = 0;
        for lane in (0..LANES).filter(|lane| lanes >> lane & 1 != 0) {
            words[count] = (lane, slots[lane].0[0]);
            count += 1;
        }
        result(value, &words[..count])
    })
}

#[track_caller]
pub fn match_any(value: u32) -> u32 {
    combine(Operation::Match, value, Location::caller(), |value, words| {
        words.iter().filter(|(_, word)| *word == value).fold(0, |mask, (lane, _)| mask | 1 << lane)
    })
}

#[track_caller]
pub fn match_low_bits<const BITS: u32>(value: u32) -> u32 {
    match_any(value & u32::MAX >> (u32::BITS - BITS))
}

#[track_caller]
pub fn match_all(value: u32) -> bool {
    combine(Operation::Match, value, Location::caller(), |value, words| words.iter().all(|(_, word)| *word == value))
}

/// Defines reductions of integers over the warp.
macro_rules! reductions {
    ($($name:ident($type:ty) = $op:expr;)*) => {$(
        #[track_caller]
        pub fn $name(value: $type) -> $type {
            let op: fn($type, $type) -> $type = $op;
            combine(Operation::WarpReduction, value as u32, Location::caller(), |_, words| {
                words.iter().map(|(_, word)| *word as $type).reduce(op).unwrap_or(value)
            })
        }
    )*};
}

reductions! {
    reduce_add_u32(u32) = u32::wrapping_add;
    reduce_min_u32(u32) = u32::min;
    reduce_max_u32(u32) = u32::max;
    reduce_add_i32(i32) = i32::wrapping_add;
    reduce_min_i32(i32) = i32::min;
    reduce_max_i32(i32) = i32::max;
    reduce_and(u32) = |a, b| a & b;
    reduce_or(u32) = |a, b| a | b;
    reduce_xor(u32) = |a, b| a ^ b;
}

/// Executes an operation of the lanes of `mask`. Each lane gives a word and the lane `from` which it reads, and gets `result` of the
/// words of all lanes and its `from`.
#[inline]
fn masked(
    mask: u32,
    at: Site,
    (word, from): (u32, usize),
    result: impl Fn(&[u32; LANES], usize) -> u32,
    syncs: bool,
) -> u32 {
    let wait = Wait { operation: Operation::Masked { mask }, at };
    let invalid = with(|block| {
        let (warp, lane) = block.warp_and_lane();
        mask >> lane & 1 == 0 || mask & !block.warps[warp].lanes != 0
    });
    if invalid {
        let message = format!(
            "invalid operand: mask {mask:#010x}: expected lanes of this warp, including this lane ({})",
            Line(at)
        );
        fail(Fault::Operand, at, None, message);
    }
    let last = with(|block| {
        let (index, lane) = block.warp_and_lane();
        let warp = &mut block.warps[index];
        let group = warp.masked.iter().position(|group| group.wait.same(wait)).unwrap_or_else(|| {
            warp.masked.push(Masked { wait, arrived: 0, words: [0; LANES], from: [0; LANES] });
            warp.masked.len() - 1
        });
        let group_state = &mut warp.masked[group];
        group_state.arrived |= 1 << lane;
        (group_state.words[lane], group_state.from[lane]) = (word, from as u8);
        if group_state.arrived != mask {
            block.wait(wait);
            return false;
        }
        let Masked { words, from, .. } = warp.masked.swap_remove(group);
        for lane in (0..LANES).filter(|lane| mask >> lane & 1 != 0) {
            warp.masked_results[lane] = result(&words, usize::from(from[lane]));
        }
        warp.ready |= mask & !(1 << lane);
        let is_whole = mask == warp.lanes;
        match &mut block.checker {
            Some(checker) if syncs && is_whole => checker.order().warp_synced(index),
            Some(checker) if syncs => checker.order().lanes_synced(index, mask),
            _ => (),
        }
        true
    });
    if !last {
        suspend();
    }
    with(|block| {
        let (warp, lane) = block.warp_and_lane();
        block.warps[warp].masked_results[lane]
    })
}

#[track_caller]
pub fn shuffle_masked(value: u32, from: u32, mask: u32) -> u32 {
    let (at, from) = (Location::caller(), from as usize % LANES);
    check_accumulator_read(value, at);
    if mask >> from & 1 == 0 {
        let message =
            format!("invalid operand: shuffle from lane {from}, which is not in mask {mask:#010x} ({})", Line(at));
        fail(Fault::Operand, at, None, message);
    }
    masked(mask, at, (value, from), |words, from| words[from], false)
}

#[track_caller]
pub fn ballot_masked(predicate: bool, mask: u32) -> u32 {
    let bits = |words: &[u32; LANES], _| (0..LANES).fold(0, |bits, lane| bits | words[lane] << lane);
    masked(mask, Location::caller(), (u32::from(predicate), 0), bits, false)
}

#[track_caller]
pub fn sync_masked(mask: u32) {
    masked(mask, Location::caller(), (0, 0), |_, _| 0, true);
}

/// Returns the lanes that arrive at this line before the other lanes of the warp wait, branch away for good, or end.
#[track_caller]
pub fn active_mask() -> u32 {
    let at = Location::caller();
    with(|block| {
        let (warp, lane) = block.warp_and_lane();
        block.warps[warp].active.push((lane, at));
        block.wait(Wait { operation: Operation::ActiveMask, at });
    });
    suspend();
    with(|block| {
        let (warp, lane) = block.warp_and_lane();
        block.warps[warp].masked_results[lane]
    })
}

#[track_caller]
pub fn sync_warp() {
    let wait = Wait { operation: Operation::SyncWarp, at: Location::caller() };
    collective(wait, |_| (), |_| (), |_, _| ());
}

#[track_caller]
pub fn sync_threads() {
    let threads = with(|block| block.warps.len() * LANES);
    barrier(Operation::SyncThreads, 0, threads as u32, Location::caller());
}

/// Waits at the barrier of `sync_threads` and returns the predicates of all threads there.
fn vote(operation: Operation, predicate: bool, at: Site) -> Votes {
    let threads = with(|block| {
        // No other phase of the barrier can be open: it completes only after all lanes of this warp have arrived.
        let votes = &mut block.barriers[0].votes;
        *(if predicate { &mut votes.yes } else { &mut votes.no }) += 1;
        block.warps.len() * LANES
    });
    barrier(operation, 0, threads as u32, at);
    with(|block| block.warps[block.current / LANES].votes)
}

#[track_caller]
pub fn sync_threads_or(predicate: bool) -> bool {
    vote(Operation::SyncThreadsOr, predicate, Location::caller()).yes > 0
}

#[track_caller]
pub fn sync_threads_and(predicate: bool) -> bool {
    vote(Operation::SyncThreadsAnd, predicate, Location::caller()).no == 0
}

#[track_caller]
pub fn sync_threads_count(predicate: bool) -> u32 {
    vote(Operation::SyncThreadsCount, predicate, Location::caller()).yes
}

/// Lets other threads and blocks run: the duration is a hint.
pub fn nanosleep(_ns: u32) {
    with(Block::leave);
    suspend();
}

#[track_caller]
pub fn sync_named(id: u32, threads: u32) {
    barrier(Operation::SyncNamed { id, threads }, id, threads, Location::caller());
}

#[track_caller]
pub fn arrive_named(id: u32, threads: u32) {
    barrier(Operation::ArriveNamed { id, threads }, id, threads, Location::caller());
}

/// Wakes the warps that wait at a barrier if all threads that it expects have arrived. `sync_threads` does not expect warps that have
/// returned. Returns whether the barrier is complete.
fn complete(block: &mut Block, id: usize) -> bool {
    let returned = if id == 0 { LANES * block.warps.iter().filter(|warp| warp.has_returned()).count() } else { 0 };
    let barrier = &mut block.barriers[id];
    if barrier.expects.is_none_or(|(expects, _)| barrier.arrived + (returned as u32) < expects) {
        return false;
    }
    let Barrier { waiting, votes, .. } = std::mem::take(barrier);
    if let Some(checker) = &mut block.checker {
        checker.order().barrier_completed(id, waiting);
    }
    for w in (0..block.warps.len()).filter(|w| waiting >> w & 1 != 0) {
        let warp = &mut block.warps[w];
        warp.ready |= warp.lanes;
        warp.votes = votes;
    }
    true
}

/// Completes the barrier of `sync_threads` if it waits only for warps that have returned meanwhile.
pub fn warp_returned(block: &mut Block) {
    complete(block, 0);
}

/// Result of an arrival at a barrier.
enum Outcome {
    Proceed,
    Wait,
    Diverged(Wait),
    /// The first warp of this phase gave a different number of threads.
    CountMismatch(u32, Site),
    /// The first warp of this phase executes another operation, and one of the two reduces predicates.
    OperationMismatch(Operation, Site),
}

fn barrier(operation: Operation, id: u32, threads: u32, at: Site) {
    let wait = Wait { operation, at };
    let named = matches!(operation, Operation::SyncNamed { .. } | Operation::ArriveNamed { .. });
    if named && (!(1..16).contains(&id) || !threads.is_multiple_of(LANES as u32) || threads == 0) {
        let message = format!(
            "invalid operand: {operation} at {}: expected a barrier number from 1 to 15 and a positive multiple of 32 \
             threads",
            Line(at)
        );
        fail(Fault::Operand, at, None, message);
    }
    match with(|block| arrive(block, wait, id, threads)) {
        Outcome::Proceed => (),
        Outcome::Wait => suspend(),
        Outcome::Diverged(pending) => diverged(wait, pending),
        Outcome::CountMismatch(expects, first) => {
            let message = format!(
                "invalid operand: {operation} at {}, but the first warp to arrive at barrier {id} expects {expects} \
                 threads ({})",
                Line(at),
                Line(first)
            );
            fail(Fault::Operand, at, Some(first), message)
        }
        Outcome::OperationMismatch(other, first) => {
            let message = format!(
                "invalid operand: {operation} at {}, but the first warp to arrive executes {other} ({}); all warps must execute the \
                 same operation",
                Line(at),
                Line(first)
            );
            fail(Fault::Operand, at, Some(first), message)
        }
    }
}

fn arrive(block: &mut Block, wait: Wait, id: u32, threads: u32) -> Outcome {
    let (warp, lane) = block.warp_and_lane();
    let blocking = !matches!(wait.operation, Operation::ArriveNamed { .. });
    match block.warps[warp].arrive(lane, wait) {
        Err(pending) => return Outcome::Diverged(pending),
        Ok(false) => {
            block.wait(wait);
            return Outcome::Wait;
        }
        Ok(true) => (),
    }
    let barrier = &mut block.barriers[id as usize];
    let (expects, first) = *barrier.expects.get_or_insert((threads, wait.at));
    if expects != threads {
        return Outcome::CountMismatch(expects, first);
    }
    let operation = *barrier.operation.get_or_insert(wait.operation);
    if id == 0 && operation != wait.operation {
        return Outcome::OperationMismatch(operation, first);
    }
    barrier.arrived += LANES as u32;
    if let Some(checker) = &mut block.checker {
        checker.order().barrier_arrived(warp, id as usize);
    }
    if blocking {
        barrier.waiting |= 1 << warp;
    } else {
        block.warps[warp].ready |= block.warps[warp].lanes & !(1 << lane);
    }
    if !complete(block, id as usize) {
        block.wait(wait);
        return if blocking { Outcome::Wait } else { Outcome::Proceed };
    }
    if blocking {
        block.warps[warp].ready &= !(1 << lane);
    }
    Outcome::Proceed
}
