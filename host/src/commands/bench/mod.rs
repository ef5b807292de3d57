//! `bench`: times the parts of training, text generation, and the tokenizer.

mod attention;
mod collectives;
mod gemm;
mod generate;
mod kernels;
mod step;
pub mod table;
mod tokenizer;
mod trace;

use crate::output;
use engine::Result;

/// Time the parts of a training step, text generation, or a tokenizer
#[derive(Clone, Debug, clap::Subcommand)]
pub enum Bench {
    Attention(attention::Attention),
    Collectives(collectives::Collectives),
    Gemm(gemm::Gemm),
    Generate(generate::Generate),
    Kernels(kernels::Kernels),
    Step(Box<step::Step>),
    Tokenizer(tokenizer::Tokenizer),
}

/// Runs a benchmark and prints its table.
pub fn run(bench: &Bench) -> Result<()> {
    check_outputs(bench)?;
    match bench {
        Bench::Attention(options) => attention::run(options),
        Bench::Collectives(options) => collectives::run(options),
        Bench::Gemm(options) => gemm::run(options),
        Bench::Generate(options) => generate::run(options),
        Bench::Kernels(options) => kernels::run(options),
        Bench::Step(options) => step::run(options),
        Bench::Tokenizer(options) => tokenizer::run(options),
    }
}

/// Fails if a file of the measurements cannot be written.
fn check_outputs(bench: &Bench) -> Result<()> {
    let json = match bench {
        Bench::Attention(options) => &options.json,
        Bench::Collectives(options) => &options.json,
        Bench::Gemm(options) => &options.json,
        Bench::Generate(options) => &options.json,
        Bench::Kernels(options) => &options.json,
        Bench::Step(options) => {
            options.trace.as_deref().map_or(Ok(()), |path| output::check(path, trace::TRACE))?;
            output::check_distinct(options.json.path(), options.trace.as_deref())?;
            &options.json
        }
        Bench::Tokenizer(_) => return Ok(()),
    };
    json.check()
}
