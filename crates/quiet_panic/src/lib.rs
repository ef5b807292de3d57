//! Turns the panics of a dependency into errors, without the message that a panic prints. The crates `parquet` and
//! `tokenizers` panic for some damaged files.

#![warn(missing_docs)]

use std::cell::Cell;
use std::panic::{self, AssertUnwindSafe, catch_unwind};
use std::sync::Once;

thread_local! {
    /// Set while a panic on this thread becomes an error.
    static CATCHING: Cell<bool> = const { Cell::new(false) };
}

/// Calls `f` and returns `None` if it panics. Such a panic prints nothing; all others print their message as before.
pub fn catch<T>(f: impl FnOnce() -> T) -> Option<T> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let print = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if !CATCHING.get() {
                print(info);
            }
        }));
    });
    let before = CATCHING.replace(true);
    let result = catch_unwind(AssertUnwindSafe(f));
    CATCHING.set(before);
    result.ok()
}
