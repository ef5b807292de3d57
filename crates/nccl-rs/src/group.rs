//! Several collectives as one.

use crate::communicator::Communicator;
use crate::library::library;
use crate::result::{Error, Result, check};
use crate::sys;
use std::cell::Cell;

thread_local! {
    static OPEN: Cell<bool> = const { Cell::new(false) };
}

pub(crate) fn is_open() -> bool {
    OPEN.get()
}

/// Queues the collectives that `calls` makes on `communicator` as one: one kernel, and no waiting between them. Groups do not
/// nest.
pub fn group<E: From<Error>>(communicator: &Communicator, calls: impl FnOnce() -> Result<(), E>) -> Result<(), E> {
    let nccl = &library()?.functions;
    if is_open() {
        return Err(Error::Operand { call: "ncclGroupStart", what: "a group is open already".into() }.into());
    }
    // SAFETY: no arguments.
    check(unsafe { (nccl.group_start)() }, "ncclGroupStart", "")?;
    OPEN.set(true);
    let outcome = calls();
    OPEN.set(false);
    // SAFETY: a group was started on this thread; it must end whether or not the calls were all made.
    let status = unsafe { (nccl.group_end)() };
    outcome?;
    if status != sys::IN_PROGRESS {
        check(status, "ncclGroupEnd", "")?;
    }
    Ok(communicator.settle("ncclGroupEnd")?)
}
