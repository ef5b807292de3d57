//! Exercises of the book. The tests of an exercise fail until it is solved:
//!
//! ```console
//! cargo test --release -p exercises --test NAME -- --ignored
//! ```
//!
//! `solutions/` has a solution of each; `cargo test -p exercises` runs the same tests with the solutions.

#![warn(missing_docs)]
// The parameters of an unsolved function are unused.
#![allow(unused_variables, clippy::needless_pass_by_value)]

/// The solutions, with the same names and signatures as the exercises.
pub mod solutions {}

/// Defines the tests of an exercise, which call `solution::…`: once with the exercise, ignored by default, and once with the solution.
/// Under CI (`CI=true`), another test requires that each of them fails for the unsolved exercise.
#[macro_export]
macro_rules! tests {
    ($exercise:ident: { $($(#[$attribute:meta])* fn $name:ident() $body:block)+ }) => {
        mod exercise {
            #[allow(unused_imports)]
            use super::*;
            use $crate::$exercise as solution;
            $($(#[$attribute])* #[test] #[ignore = "fails until the exercise is solved"] fn $name() $body)+

            #[test]
            fn fails_until_solved() {
                if std::env::var_os("CI").is_none() {
                    return;
                }
                $(assert!(std::panic::catch_unwind($name).is_err(), "{}: expected a failure, found success", stringify!($name));)+
            }
        }
        mod solved {
            #[allow(unused_imports)]
            use super::*;
            use $crate::solutions::$exercise as solution;
            $($(#[$attribute])* #[test] fn $name() $body)+
        }
    };
}
