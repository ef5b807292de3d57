//! `bench`: times the parts of training, text generation, and the tokenizer.

mod attention;
mod collectives;
mod gemm;
mod gemm_fp8;
mod generate;
mod kernels;
mod step;
pub mod table;
mod tokenizer;
mod trace;

use engine::Result;

/// Time the parts of a training step, text generation, or a tokenizer
#[derive(Clone, Debug, clap::Subcommand)]
pub enum Bench {
    Attention(attention::Attention),
    Collectives(collectives::Collectives),
    Gemm(gemm::Gemm),
    Generate(generate::Generate),
    Kernels(kernels::Kernels),
    Step(step::Step),
    Tokenizer(tokenizer::Tokenizer),
}

/// Runs a benchmark and prints its table.
pub fn run(bench: &Bench) -> Result<()> {
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
