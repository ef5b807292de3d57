//! A detector of data races in one memory cell, with vector clocks. It is what the emulator does for every two bytes, without its
//! special cases.

/// An operation of a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A thread reads the cell.
    Read(usize),
    /// A thread writes the cell.
    Write(usize),
    /// All threads arrive and then continue.
    Barrier,
}

/// Two accesses without an order, at least one of them a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Race {
    /// The access that ran first.
    pub earlier: Event,
    /// The access that ran second.
    pub later: Event,
}

/// An access in the history of the cell, with the tick of its thread.
struct Access {
    event: Event,
    thread: usize,
    tick: u32,
}

/// Returns the first race of `threads` threads that execute `events` in this order, or `None`.
///
/// `clocks[a][b]` is the number of ticks of thread b whose accesses happen before the next access of thread a. A thread's own entry is its
/// current tick. A barrier ends a tick of each thread, and then all threads know all ticks.
pub fn find_race(threads: usize, events: &[Event]) -> Option<Race> {
    let mut clocks = vec![vec![0; threads]; threads];
    let mut history: Vec<Access> = Vec::new();
    for &event in events {
        let thread = match event {
            Event::Read(thread) | Event::Write(thread) => thread,
            Event::Barrier => {
                let ended: Vec<u32> = (0..threads).map(|thread| clocks[thread][thread] + 1).collect();
                clocks.fill(ended);
                continue;
            }
        };
        let writes = matches!(event, Event::Write(_));
        for access in &history {
            let conflicts = writes || matches!(access.event, Event::Write(_));
            let ordered = access.thread == thread || clocks[thread][access.thread] > access.tick;
            if conflicts && !ordered {
                return Some(Race { earlier: access.event, later: event });
            }
        }
        if writes {
            // An access that is ordered after this write is ordered after everything before it.
            history.clear();
        }
        history.push(Access { event, thread, tick: clocks[thread][thread] });
    }
    None
}

#[cfg(test)]
mod tests {
    use super::Event::{Barrier, Read, Write};
    use super::*;

    #[test]
    fn a_barrier_orders_write_and_read() {
        assert_eq!(find_race(2, &[Write(0), Read(1)]), Some(Race { earlier: Write(0), later: Read(1) }));
        assert_eq!(find_race(2, &[Write(0), Barrier, Read(1)]), None);
    }

    #[test]
    fn a_read_races_with_a_later_write() {
        let race = Race { earlier: Read(1), later: Write(0) };
        assert_eq!(find_race(2, &[Write(0), Barrier, Read(1), Write(0)]), Some(race));
        assert_eq!(find_race(2, &[Write(0), Barrier, Read(1), Barrier, Write(0)]), None);
    }

    /// The other order of the same program. A detector that only compares values, or that waits for a bad interleaving, would miss it.
    #[test]
    fn the_order_of_execution_does_not_matter() {
        assert!(find_race(2, &[Read(1), Write(0)]).is_some());
        assert!(find_race(2, &[Write(0), Write(1)]).is_some());
    }

    #[test]
    fn reads_do_not_race_and_a_thread_is_ordered_with_itself() {
        assert_eq!(find_race(3, &[Read(0), Read(1), Read(2)]), None);
        assert_eq!(find_race(2, &[Write(0), Read(0), Write(0)]), None);
    }

    #[test]
    fn every_reader_since_the_last_write_counts() {
        let race = Race { earlier: Read(1), later: Write(0) };
        assert_eq!(find_race(3, &[Read(1), Read(0), Write(0)]), Some(race));
    }
}
