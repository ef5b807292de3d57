//! A scan with decoupled look-back in which the lanes of a warp poll 32 predecessors.

use crate::faults;
#[cfg(not(target_arch = "nvptx64"))]
use crate::{Memory, Report, Run};
use cuda_std::{Global, GlobalMut, fence, kernel, warp};

/// Elements of a tile: one for each lane.
const TILE: usize = 32;
const TILES: usize = 72;
const AGGREGATE: u32 = 1;
const PREFIX: u32 = 2;

faults! {
    const LOOK_BACK = "warp-parallel look-back", run_look_back;
    LookBack {
        NoWriterFence = Race "no fence between a value and its flag",
        NoReaderFence = Race "no fence between a flag and its value",
        WriterFenceOfBlock = Race "fence of block scope between a value and its flag",
        ReaderFenceOfBlock = Race "fence of block scope between a flag and its value",
        ReaderFenceOfLaneZero = Race "only lane 0 fences after the flags",
        FlagBeforeValue = Race "the flag is set before the value",
        ValuesInPlace = Race "the prefix replaces the aggregate in place",
        LanesNotSynchronized = Race "the last lane writes the value and lane 0 sets the flag, without warp::sync",
        AddsAllLanes = Wrong "the sum includes the lanes beyond the nearest prefix",
        FarthestPrefix = Wrong "the sum goes to the farthest prefix instead of the nearest",
        WindowTooShort = Wrong "the window moves by 31 tiles",
        WindowNotMoved = Wrong "the window does not move, and its sum is added again",
        PollsBeyondStart = OutOfBounds "lanes poll tiles before the first",
        SkipsUnready = Wrong "a tile without a flag counts as zero",
        TicketOfEachLane = Livelock "each lane takes a ticket",
        PublishesExclusive = Wrong "the exclusive prefix is published",
        AggregateAsPrefix = Uninitialized "the aggregate is published as a prefix",
        FlagOfNextTile = Race "the flag of the next tile is set",
    }
}

#[kernel(threads = 32)]
fn look_back(
    out: GlobalMut<u32>,
    flags: GlobalMut<u32>,
    aggregates: GlobalMut<u32>,
    prefixes: GlobalMut<u32>,
    tickets: GlobalMut<u32>,
    inp: Global<u32>,
    fault: u32,
) {
    let is = |planted: LookBack| fault == planted as u32;
    let lane = warp::lane() as usize;
    let ticket = if lane == 0 || is(LookBack::TicketOfEachLane) { tickets.fetch_add(0, 1) } else { 0 };
    let tile = warp::shuffle(ticket, 0) as usize;
    if tile >= TILES {
        return;
    }
    let value = inp.at(tile * TILE + lane);
    let mut inclusive = value;
    for step in [1, 2, 4, 8, 16] {
        let other = warp::shuffle_up(inclusive, step);
        inclusive += if lane >= step as usize { other } else { 0 };
    }
    let total = warp::shuffle(inclusive, 31);
    let publish = |values: GlobalMut<u32>, value: u32, flag: u32| {
        let values = if is(LookBack::ValuesInPlace) { aggregates } else { values };
        let set_flag = || flags.store_relaxed(tile + usize::from(is(LookBack::FlagOfNextTile)), flag);
        let writer = if is(LookBack::LanesNotSynchronized) { 31 } else { 0 };
        if lane == 0 && is(LookBack::FlagBeforeValue) {
            fence::device();
            set_flag();
        }
        if lane == writer {
            values.set(tile, value);
        }
        if lane == 0 {
            if is(LookBack::WriterFenceOfBlock) {
                fence::block();
            } else if !is(LookBack::NoWriterFence) {
                fence::device();
            }
            set_flag();
        }
    };
    let mut prefix = 0;
    if tile > 0 {
        publish(aggregates, total, if is(LookBack::AggregateAsPrefix) { PREFIX } else { AGGREGATE });
        let mut end = tile;
        while end > 0 {
            let (mut flag, mut found) = (PREFIX, 0);
            if lane < end || is(LookBack::PollsBeyondStart) {
                let other = end.wrapping_sub(1 + lane);
                flag = flags.load_relaxed(other);
                while flag == 0 && !is(LookBack::SkipsUnready) {
                    flag = flags.load_relaxed(other);
                }
                if is(LookBack::ReaderFenceOfBlock) {
                    fence::block();
                } else if !(is(LookBack::NoReaderFence) || is(LookBack::ReaderFenceOfLaneZero) && lane > 0) {
                    fence::device();
                }
                found = match flag {
                    0 => 0,
                    PREFIX if !is(LookBack::ValuesInPlace) => prefixes.at(other),
                    _ => aggregates.at(other),
                };
            }
            let ready = warp::ballot(flag == PREFIX);
            let nearest =
                if is(LookBack::FarthestPrefix) { ready.checked_ilog2().unwrap_or(32) } else { ready.trailing_zeros() };
            let is_added = lane as u32 <= nearest || is(LookBack::AddsAllLanes);
            prefix += warp::reduce(if is_added { found } else { 0 }, |a, b| a + b);
            if ready != 0 {
                break;
            }
            end -= match () {
                () if is(LookBack::WindowTooShort) => 31,
                () if is(LookBack::WindowNotMoved) => 0,
                () => 32,
            };
        }
    }
    publish(prefixes, prefix + if is(LookBack::PublishesExclusive) { 0 } else { total }, PREFIX);
    out.set(tile * TILE + lane, prefix + inclusive - value);
}

#[cfg(not(target_arch = "nvptx64"))]
fn run_look_back(fault: u32, run: Run<'_>) -> Result<bool, Report> {
    let values: Vec<u32> = (0..TILES * TILE).map(|i| (i * 7919 % 13) as u32).collect();
    let mut memory = Memory::new();
    let out = memory.zeroed("out", TILES * TILE);
    let (flags, tickets) = (memory.zeroed("flags", TILES + 1), memory.zeroed("tickets", 1));
    let (aggregates, prefixes) = (memory.output("aggregates", TILES + 1), memory.output("prefixes", TILES + 1));
    let inp = memory.input("inp", &values);
    run(&look_back(out, flags, aggregates, prefixes, tickets, inp, fault), &mut memory, TILES as u32, 0)?;
    let mut sum = 0;
    let expected = values.iter().map(|value| {
        sum += value;
        sum - value
    });
    Ok(memory.read(out).into_iter().eq(expected))
}
