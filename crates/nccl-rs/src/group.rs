//! Groups of collectives.

use crate::communicator::Communicator;
use crate::library::library;
use crate::result::{Error, Result, check};
use crate::sys;
use std::cell::Cell;

thread_local! {
    static OPEN: Cell<bool> = const { Cell::new(false) };
}

/// Returns whether the calling thread has started a group.
pub(crate) fn is_open() -> bool {
    OPEN.get()
}

/// Queues the collectives that `calls` makes on `communicator` as one kernel, without waiting between them. Groups cannot be
/// nested.
pub fn group<E: From<Error>>(communicator: &Communicator, calls: impl FnOnce() -> Result<(), E>) -> Result<(), E> {
    let nccl = &library()?.functions;
    if is_open() {
        return Err(Error::Operand { call: "ncclGroupStart", what: "groups cannot be nested".into() }.into());
    }
    // SAFETY: the call takes no arguments.
    check(unsafe { (nccl.group_start)() }, "ncclGroupStart", "")?;
    OPEN.set(true);
    let outcome = calls();
    OPEN.set(false);
    // SAFETY: this thread started a group, which must end even if not all calls were made.
    let status = unsafe { (nccl.group_end)() };
    outcome?;
    if status != sys::IN_PROGRESS {
        check(status, "ncclGroupEnd", "")?;
    }
    Ok(communicator.wait("ncclGroupEnd")?)
}
