//! Logs of training runs: reads them, draws them, and writes them in the formats of other programs.
//!
//! * [`run`] reads `main.jsonl` of llm.rs and `main.log` of llm.rs and llm.c.
//! * [`curves`] turns the records of several runs into curves over steps, tokens or time, with smoothing.
//! * [`figure`] lays the curves out as a [`drawing`] with [`axis`] and [`references`]. [`svg`] and [`png`](mod@png) write a drawing
//!   to a file; [`report`] embeds the SVG in an HTML page. [`roofline`] draws the measurements of `bench kernels`.
//! * [`expert_loads`] are the statistics of experts in a log.
//! * [`csv`] writes a table, and [`tensorboard`] writes event files.
//!
//! The training loop writes its logs itself; nothing here depends on a model or an engine.

#![warn(missing_docs)]

pub mod axis;
pub mod csv;
pub mod curves;
pub mod drawing;
pub mod expert_loads;
pub mod figure;
pub mod png;
pub mod references;
pub mod report;
pub mod roofline;
pub mod run;
pub mod svg;
pub mod tensorboard;
