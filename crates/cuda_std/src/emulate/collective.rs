//! The rendezvous: the lanes of a warp deposit words and see everybody's; whole warps meet at barriers.
//!
//! Warp-wide operations take every lane of the warp, at the same source line. Barriers are arrived at by whole warps
//! (`bar.sync` and `bar.arrive` are `.aligned`).

use super::LANES;
use super::block::{Block, fail, suspend, with};
use super::hopper::catch_early;
use super::report::{Fault, Line, Site, ranges};
use std::fmt;
use std::panic::Location;

/// What a lane brings to a rendezvous and takes from it.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub struct Slot(pub [u32; 16]);

pub type Slots = [Slot; LANES];

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    Shuffle,
    Ballot,
    SyncWarp,
    LdMatrix,
    StMatrix,
    Mma,
    SyncThreads,
    SyncNamed { id: u32, threads: u32 },
    ArriveNamed { id: u32, threads: u32 },
    MBarrier { offset: u32, parity: u32 },
    WgmmaWait,
    ClusterSync,
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Shuffle => f.write_str("a warp shuffle"),
            Self::Ballot => f.write_str("a warp vote"),
            Self::SyncWarp => f.write_str("warp::sync"),
            Self::LdMatrix => f.write_str("a fragment load (ldmatrix)"),
            Self::StMatrix => f.write_str("a fragment store (stmatrix)"),
            Self::Mma => f.write_str("mma"),
            Self::SyncThreads => f.write_str("sync_threads"),
            Self::SyncNamed { id, threads } => write!(f, "sync_named({id}, {threads})"),
            Self::ArriveNamed { id, threads } => write!(f, "arrive_named({id}, {threads})"),
            Self::MBarrier { offset, parity } => {
                write!(f, "wait({parity}) of the memory barrier at shared memory + {offset}")
            }
            Self::WgmmaWait => f.write_str("wgmma::wait"),
            Self::ClusterSync => f.write_str("cluster::sync"),
        }
    }
}

/// Where a thread is stopped.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Wait {
    pub operation: Operation,
    pub at: Site,
}

impl Wait {
    /// As `==`, but the same call is one address first.
    #[inline]
    fn same(self, other: Self) -> bool {
        self.operation == other.operation && (std::ptr::eq(self.at, other.at) || self.at == other.at)
    }
}

pub struct Warp {
    /// Lanes that exist; one bit per lane here and below.
    lanes: u32,
    ready: u32,
    arrived: u32,
    pub finished: u32,
    meeting: Option<Wait>,
    /// Which of the two sets of slots is being filled. A lane can be one rendezvous ahead of another that has yet to
    /// read what the last one gave, never two.
    turn: usize,
    slots: [Slots; 2],
}

impl Warp {
    pub fn new(lanes: usize) -> Self {
        let lanes = u32::MAX >> (LANES - lanes);
        let slots = [[Slot([0; 16]); LANES]; 2];
        Self { lanes, ready: 0, arrived: 0, finished: 0, meeting: None, turn: 0, slots }
    }

    pub fn start(&mut self) {
        (self.ready, self.arrived, self.finished, self.meeting) = (self.lanes, 0, 0, None);
    }

    #[inline]
    pub fn next_ready(&mut self) -> Option<usize> {
        let lane = self.ready.trailing_zeros();
        self.ready &= self.ready.wrapping_sub(1);
        (lane < LANES as u32).then_some(lane as usize)
    }

    #[inline]
    pub fn wake(&mut self, lane: usize) {
        self.ready |= 1 << lane;
    }

    /// Notes that `lane` came; whether it was the last one.
    #[inline]
    fn arrive(&mut self, lane: usize, wait: Wait) -> Result<bool, Wait> {
        match self.meeting {
            Some(meeting) if !meeting.same(wait) => return Err(meeting),
            _ => self.meeting = Some(wait),
        }
        self.arrived |= 1 << lane;
        let complete = self.arrived == self.lanes;
        if complete {
            (self.arrived, self.meeting) = (0, None);
        }
        Ok(complete)
    }
}

#[cold]
fn diverged(wait: Wait, meeting: Wait) -> ! {
    let others = with(|block| {
        let (warp, _) = block.place();
        let arrived = block.warps[warp].arrived;
        (0..LANES).filter(|lane| arrived >> lane & 1 != 0).map(|lane| warp * LANES + lane).collect::<Vec<_>>()
    });
    let message = format!(
        "is in {} at {} while threads {} of its warp wait in {} at {}; every lane must take part in both",
        wait.operation,
        Line(wait.at),
        ranges(&others),
        meeting.operation,
        Line(meeting.at)
    );
    fail(Fault::Divergence, wait.at, Some(meeting.at), message)
}

/// Every lane of the warp deposits; the last to come completes; then each takes its result.
#[inline]
pub fn collective<R>(
    wait: Wait,
    deposit: impl FnOnce(&mut Slot),
    complete: impl FnOnce(&mut Slots),
    result: impl FnOnce(&Slots, usize) -> R,
) -> R {
    let arrival = with(|block| {
        let (index, lane) = block.place();
        let warp = &mut block.warps[index];
        let turn = warp.turn;
        deposit(&mut warp.slots[turn][lane]);
        let last = warp.arrive(lane, wait)?;
        if last {
            complete(&mut warp.slots[turn]);
            warp.turn ^= 1;
            warp.ready |= warp.lanes & !(1 << lane);
            if let (Operation::SyncWarp, Some(checker)) = (wait.operation, &mut block.checker) {
                checker.warp_synced(index);
            }
        } else {
            block.wait(wait);
        }
        Ok((last, turn))
    });
    let (last, turn) = match arrival {
        Ok(arrival) => arrival,
        Err(meeting) => diverged(wait, meeting),
    };
    if !last {
        suspend();
    }
    with(|block| {
        let (warp, lane) = block.place();
        result(&block.warps[warp].slots[turn], lane)
    })
}

/// The word each lane brought, as seen by all.
#[inline]
fn exchange<R>(wait: Wait, value: u32, result: impl FnOnce(&Slots, usize) -> R) -> R {
    collective(wait, |slot| slot.0[0] = value, |_| (), result)
}

/// `value` of the lane that `source` gives for this one.
#[inline]
#[track_caller]
fn shuffle(value: u32, source: impl FnOnce(usize) -> usize) -> u32 {
    let at = Location::caller();
    let lane = with(|block| block.place().1);
    let source = source(lane);
    catch_early(value, at);
    let lanes = with(|block| block.warps[block.current / LANES].lanes);
    if lanes >> source & 1 == 0 {
        fail(Fault::Operand, at, None, format!("shuffles from lane {source}, which its warp lacks, at {}", Line(at)));
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

#[track_caller]
pub fn sync_warp() {
    let wait = Wait { operation: Operation::SyncWarp, at: Location::caller() };
    collective(wait, |_| (), |_| (), |_, _| ());
}

/// A hardware barrier of the block.
#[derive(Default)]
pub struct Barrier {
    /// How many threads end this phase, from the first warp that came, and where it came.
    expects: Option<(u32, Site)>,
    arrived: u32,
    /// Warps to wake, one bit each.
    waiting: u32,
}

impl Barrier {
    /// What a deadlock report says of it.
    pub fn missing(&self) -> String {
        self.expects.map_or_else(String::new, |(expects, _)| {
            format!(", which lacks {} of {expects} threads", expects - self.arrived)
        })
    }
}

#[track_caller]
pub fn sync_threads() {
    let threads = with(|block| block.warps.len() * LANES);
    barrier(Operation::SyncThreads, 0, threads as u32, Location::caller());
}

#[track_caller]
pub fn sync_named(id: u32, threads: u32) {
    barrier(Operation::SyncNamed { id, threads }, id, threads, Location::caller());
}

#[track_caller]
pub fn arrive_named(id: u32, threads: u32) {
    barrier(Operation::ArriveNamed { id, threads }, id, threads, Location::caller());
}

/// What becomes of a thread that came to a barrier.
enum Outcome {
    Goes,
    Waits,
    Diverged(Wait),
    Disagrees(u32, Site),
}

fn barrier(operation: Operation, id: u32, threads: u32, at: Site) {
    let wait = Wait { operation, at };
    let named = operation != Operation::SyncThreads;
    if named && (!(1..16).contains(&id) || !threads.is_multiple_of(LANES as u32) || threads == 0) {
        let message = format!("{operation} at {}: barriers are 1 to 15, for a multiple of 32 threads", Line(at));
        fail(Fault::Operand, at, None, message);
    }
    match with(|block| arrive(block, wait, id, threads)) {
        Outcome::Goes => (),
        Outcome::Waits => suspend(),
        Outcome::Diverged(meeting) => diverged(wait, meeting),
        Outcome::Disagrees(expects, first) => {
            let message = format!(
                "{operation} at {}, but this phase of barrier {id} was begun for {expects} threads at {}",
                Line(at),
                Line(first)
            );
            fail(Fault::Operand, at, Some(first), message)
        }
    }
}

fn arrive(block: &mut Block, wait: Wait, id: u32, threads: u32) -> Outcome {
    let (warp, lane) = block.place();
    let blocking = !matches!(wait.operation, Operation::ArriveNamed { .. });
    match block.warps[warp].arrive(lane, wait) {
        Err(meeting) => return Outcome::Diverged(meeting),
        Ok(false) => {
            block.wait(wait);
            return Outcome::Waits;
        }
        Ok(true) => (),
    }
    let barrier = &mut block.barriers[id as usize];
    let (expects, first) = *barrier.expects.get_or_insert((threads, wait.at));
    if expects != threads {
        return Outcome::Disagrees(expects, first);
    }
    barrier.arrived += LANES as u32;
    if let Some(checker) = &mut block.checker {
        checker.arrived(warp, id as usize);
    }
    if blocking {
        barrier.waiting |= 1 << warp;
    } else {
        block.warps[warp].ready |= block.warps[warp].lanes & !(1 << lane);
    }
    if barrier.arrived < expects {
        block.wait(wait);
        return if blocking { Outcome::Waits } else { Outcome::Goes };
    }
    let waiting = std::mem::take(barrier).waiting;
    if let Some(checker) = &mut block.checker {
        checker.released(id as usize, waiting);
    }
    for w in (0..block.warps.len()).filter(|w| waiting >> w & 1 != 0) {
        let warp = &mut block.warps[w];
        warp.ready |= warp.lanes;
    }
    if blocking {
        block.warps[warp].ready &= !(1 << lane);
    }
    Outcome::Goes
}
