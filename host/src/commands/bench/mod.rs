//! `bench`: times the parts of training, and the tokenizer.

mod attention;
mod gemm;
mod gemm_fp8;
mod kernels;
mod step;
mod table;
mod tokenizer;

use engine::Result;

/// Time the parts of a training step, or a tokenizer
#[derive(Clone, Debug, clap::Subcommand)]
pub enum Bench {
    Attention(attention::Attention),
    Gemm(gemm::Gemm),
    Kernels(kernels::Kernels),
    Step(step::Step),
    Tokenizer(tokenizer::Tokenizer),
}

/// Runs a benchmark and prints its table.
pub fn run(bench: &Bench) -> Result<()> {
    match bench {
        Bench::Attention(options) => attention::run(options),
        Bench::Gemm(options) => gemm::run(options),
        Bench::Kernels(options) => kernels::run(options),
        Bench::Step(options) => step::run(options),
        Bench::Tokenizer(options) => tokenizer::run(options),
    }
}
