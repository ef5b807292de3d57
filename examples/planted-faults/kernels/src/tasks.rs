//! A queue of tasks that depend on earlier tasks. Blocks take tasks by ticket.

use crate::faults;
#[cfg(not(target_arch = "nvptx64"))]
use crate::{Memory, Report, Run};
use cuda_std::shared::Layout;
use cuda_std::{GlobalMut, SharedArray, kernel, thread};

const THREADS: usize = 64;
const BLOCKS: usize = 4;
const TASKS_COUNT: usize = 16;

faults! {
    const TASKS = "queue of dependent tasks", run_tasks;
    Tasks {
        NoWaitForSecond = Race "no wait for the second task before",
        NoWaitForThird = Race "no wait for the third task before",
        WaitsForPrevious = Race "a wait for the task before instead of the second before",
        RelaxedFlag = Race "the flag is set without a release",
        RelaxedWait = Race "the flag is read without an acquire",
        NoBarrierBeforeFlag = Race "no barrier between the result and the flag",
        NoBarrierAfterWait = Race "no barrier between the wait and the reads",
        FlagBeforeData = Race "the flag is set before the result is written",
        WaitsForLaterTask = Deadlock "a wait for a later task",
        WaitsForTwo = Deadlock "a wait for a flag of 2",
        FlagOfNextTask = Deadlock "the flag of the next task is set",
        FlagTwice = Deadlock "the flag is increased twice, and waits are for 1",
        TicketOfEachThread = Deadlock "each thread takes a ticket",
        NoBarrierAfterTicket = Race "the ticket is read from shared memory without a barrier",
        Reversed = Deadlock "the tasks are taken in reverse order",
        PlainTicket = Race "the ticket is a plain read and write",
        OneFlag = Race "one counter of finished tasks for all tasks",
        WaitByOtherWarp = Race "the second warp waits with a relaxed read, the first with an acquire",
    }
}

#[kernel(threads = 64)]
fn tasks(results: GlobalMut<u32>, flags: GlobalMut<u32>, tickets: GlobalMut<u32>, fault: u32) {
    let is = |planted: Tasks| fault == planted as u32;
    let mut layout = Layout::new();
    let ticket: SharedArray<u32> = layout.array(1);
    let t = thread::thread_idx_x() as usize;
    loop {
        if t == 0 {
            let next = if is(Tasks::PlainTicket) {
                let next = tickets.at(0);
                tickets.set(0, next + 1);
                next
            } else {
                tickets.fetch_add(0, 1)
            };
            ticket.set(0, next);
        } else if is(Tasks::TicketOfEachThread) {
            tickets.fetch_add(0, 1);
        }
        if !is(Tasks::NoBarrierAfterTicket) {
            thread::sync_threads();
        }
        let mut task = ticket.at(0) as usize;
        if task >= TASKS_COUNT {
            break;
        }
        if is(Tasks::Reversed) {
            task = TASKS_COUNT - 1 - task;
        }
        let wait = |other: usize| match () {
            () if is(Tasks::RelaxedWait) || is(Tasks::WaitByOtherWarp) && t == 32 => {
                while flags.load_relaxed(other) != 1 {}
            }
            () if is(Tasks::WaitsForTwo) => flags.acquire_wait(other, 2),
            () if is(Tasks::OneFlag) => _ = flags.acquire_wait_until(0, |count| count > other as u32),
            () => flags.acquire_wait(other, 1),
        };
        if t == 0 || is(Tasks::WaitByOtherWarp) && t == 32 {
            if task >= 2 && !is(Tasks::NoWaitForSecond) {
                wait(task - if is(Tasks::WaitsForPrevious) { 1 } else { 2 });
            }
            if task >= 3 && !is(Tasks::NoWaitForThird) {
                wait(task - 3);
            }
            if task + 1 < TASKS_COUNT && is(Tasks::WaitsForLaterTask) {
                wait(task + 1);
            }
        }
        if !is(Tasks::NoBarrierAfterWait) && !is(Tasks::WaitByOtherWarp) {
            thread::sync_threads();
        }
        // Another thread has written each result that is read.
        let read =
            |before: usize| if task >= before { results.at((task - before) * THREADS + (t + 37) % THREADS) } else { 1 };
        let sum = read(2) + read(3) + t as u32;
        let write = || results.set(task * THREADS + t, sum);
        if !is(Tasks::FlagBeforeData) {
            write();
        }
        if !is(Tasks::NoBarrierBeforeFlag) {
            thread::sync_threads();
        }
        if t == 0 {
            let flag = match () {
                () if is(Tasks::FlagOfNextTask) => task + 1,
                () if is(Tasks::OneFlag) => 0,
                () => task,
            };
            if is(Tasks::RelaxedFlag) {
                flags.fetch_add(flag, 1);
            } else {
                flags.release_add(flag, 1);
            }
            if is(Tasks::FlagTwice) {
                flags.release_add(flag, 1);
            }
        }
        if is(Tasks::FlagBeforeData) {
            write();
        }
    }
}

#[cfg(not(target_arch = "nvptx64"))]
fn run_tasks(fault: u32, run: Run<'_>) -> Result<bool, Report> {
    let mut memory = Memory::new();
    let results = memory.buffer("results", &[0; TASKS_COUNT * THREADS]);
    let (flags, tickets) = (memory.zeroed("flags", TASKS_COUNT + 1), memory.zeroed("tickets", 1));
    run(&tasks(results, flags, tickets, fault), &mut memory, BLOCKS as u32, 16)?;
    let mut expected: Vec<u32> = Vec::new();
    for i in 0..TASKS_COUNT * THREADS {
        let (task, t) = (i / THREADS, i % THREADS);
        let read =
            |before: usize| if task >= before { expected[(task - before) * THREADS + (t + 37) % THREADS] } else { 1 };
        expected.push(read(2) + read(3) + t as u32);
    }
    Ok(memory.read(results) == expected)
}
