//! Panics, which are defects of the program: users see one error line, and no backtrace.

use std::panic::{self, PanicHookInfo};

/// Passes the text of each panic to `report`, instead of printing a message and a backtrace.
pub fn report_to(report: impl Fn(&str) + Send + Sync + 'static) {
    panic::set_hook(Box::new(move |info| report(&text(info))));
}

fn text(info: &PanicHookInfo) -> String {
    let payload = info.payload();
    let message =
        payload.downcast_ref::<&str>().copied().or_else(|| payload.downcast_ref::<String>().map(|text| &**text));
    let message = message.unwrap_or("a value without text").split_whitespace().collect::<Vec<_>>().join(" ");
    let place = info.location().map_or("an unknown place".to_owned(), ToString::to_string);
    format!(
        "internal error: panic at {place}: {message}; please report it with the command line, and resume the run with --resume"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex};
    use std::thread;

    #[test]
    fn a_panic_is_one_line() {
        let texts = Arc::new(Mutex::new(Vec::new()));
        let before = panic::take_hook();
        let reported = texts.clone();
        report_to(move |text| reported.lock().unwrap().push(text.to_owned()));
        for panics in [|| panic!("two\nlines"), || panic!("{}", 3)] {
            assert!(thread::spawn(panics).join().is_err());
        }
        panic::set_hook(before);
        let texts = texts.lock().unwrap().clone();
        for (found, message) in [(&texts[0], "two lines"), (&texts[1], "3")] {
            let expected =
                format!(": {message}; please report it with the command line, and resume the run with --resume");
            assert!(found.starts_with("internal error: panic at host/src/panics.rs:"), "{found}");
            assert!(found.ends_with(&expected), "{found}");
        }
    }
}
