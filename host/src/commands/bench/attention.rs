//! `bench attention`: times causal attention, forward and backward.

use super::table::{Cell, Column, Json, Spread, Table};
use crate::commands::resources::Hardware;
use crate::values::count;
use anyhow::{Context, bail, ensure};
use engine::Result;
use engine::ops::AttentionShape;
use std::str::FromStr;
use system::progress::{self, Unit};
use verify::selftest::{Case, DocumentLengths, MaskedAttention, attention};

/// Time causal attention, forward and backward. Rates do not count FLOPs on masked elements
#[derive(Clone, Debug, clap::Args)]
pub struct Attention {
    /// Batch, heads, sequence length, head size, and key-value heads (default: NH); may be repeated
    #[arg(short, long = "shape", value_name = "B,NH,T,HS[,KV]", default_values = DEFAULT)]
    shapes: Vec<AttentionCase>,

    /// Mean length of documents, which have random lengths; a query attends only to its own document
    #[arg(long, value_name = "MEAN", value_parser = count)]
    documents: Option<usize>,

    /// Number of keys that a query attends to at most
    #[arg(long, value_name = "W", value_parser = count)]
    window: Option<usize>,

    #[command(flatten)]
    hardware: Hardware,

    #[command(flatten)]
    pub(super) json: Json,
}

/// d12 with 64 sequences; longer sequences; larger heads.
const DEFAULT: [&str; 3] = ["64,12,1024,64", "16,12,4096,64", "16,16,4096,128"];

const COLUMNS: &[Column] = &[
    Column::text("shape", "shape", 24),
    Column::text("operation", "operation, kernels indented", 44),
    Column::number("us", "us", 9, 1),
    Column::number("us_least", "min", 9, 1),
    Column::number("us_most", "max", 9, 1),
    Column::number("tflops", "TFLOP/s", 8, 0),
    Column::number("tflops_least", "min", 8, 0),
    Column::number("tflops_most", "max", 8, 0),
];

#[derive(Clone, Copy, Debug)]
struct AttentionCase(AttentionShape);

impl FromStr for AttentionCase {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let expected = || {
            let example = DEFAULT[0];
            format!("expected B,NH,T,HS or B,NH,T,HS,KV with a divisor KV of NH, such as {example}, found {text:?}")
        };
        let numbers = text.split(',').map(|number| number.trim().parse::<usize>());
        let numbers = numbers.collect::<Result<Vec<_>, _>>().with_context(expected)?;
        let (b, heads, t, head_size, kv_heads) = match numbers[..] {
            [b, heads, t, head_size] => (b, heads, t, head_size, heads),
            [b, heads, t, head_size, kv_heads] => (b, heads, t, head_size, kv_heads),
            _ => bail!(expected()),
        };
        ensure!([b, heads, t, head_size, kv_heads].iter().all(|&extent| extent > 0), expected());
        ensure!(heads.is_multiple_of(kv_heads), expected());
        Ok(Self(AttentionShape { b, t, heads, kv_heads, head_size }))
    }
}

pub fn run(options: &Attention) -> Result<()> {
    let engine = &mut *options.hardware.open_quietly()?;
    let mut table = Table::new("attention", COLUMNS, engine, &options.json);
    table.print_heading()?;
    let documents = options.documents.map(DocumentLengths::Random);
    let masked = |&AttentionCase(shape): &_| MaskedAttention { shape, documents, window: options.window };
    let cases: Vec<Case> = options.shapes.iter().map(masked).flat_map(|case| attention(&case)).collect();
    let progress = progress::start("timing", Unit::Count, cases.len() as u64);
    for case in cases {
        let speed = case.time(engine)?;
        progress.add(1);
        table.row(&cells(&case, case.operation, Spread::of(speed.samples), case.work.flops))?;
        if speed.kernels.len() > 1 {
            for (name, samples) in speed.kernels {
                table.row(&cells(&case, &format!("  {name}"), Spread::of(samples), 0))?;
            }
        }
    }
    table.finish_rows()
}

/// Returns the cells of a row. Kernels of an operation have no rate of their own: their `flops` is 0.
fn cells(case: &Case, operation: &str, seconds: Spread, flops: usize) -> [Cell; 8] {
    let rate = |seconds: f64| Cell::from((flops > 0).then(|| flops as f64 / seconds / 1e12));
    let us = |seconds: f64| Cell::from(1e6 * seconds);
    [
        case.shape.as_str().into(),
        operation.into(),
        us(seconds.median),
        us(seconds.least),
        us(seconds.most),
        rate(seconds.median),
        rate(seconds.most),
        rate(seconds.least),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shape_is_four_positive_numbers_and_optional_key_value_heads() {
        let AttentionCase(heads) = "2, 3,100,64".parse().unwrap();
        assert_eq!((heads.b, heads.heads, heads.kv_heads, heads.t, heads.head_size), (2, 3, 3, 100, 64));
        let AttentionCase(grouped) = "2,6,100,64,3".parse().unwrap();
        assert_eq!((grouped.heads, grouped.kv_heads), (6, 3));
        for text in ["", "1,2,3", "1,2,3,4,5", "1,2,3,4,0", "1,2,3,4,2,1", "1,2,0,64", "1,2,x,64", "-1,2,3,64"] {
            let error = text.parse::<AttentionCase>().unwrap_err();
            assert!(format!("{error:#}").contains("expected B,NH,T,HS"), "{text:?}: {error:#}");
        }
    }

    #[test]
    fn flops_count_half_of_all_query_key_pairs() {
        let [forward, backward] =
            attention(&AttentionShape { b: 2, t: 100, heads: 3, kv_heads: 3, head_size: 64 }.into());
        // Two GEMMs forward and five backward, each with 2 FLOPs per pair and channel.
        assert_eq!(forward.work.flops, 2 * 2 * 2 * 3 * 100 * 100 / 2 * 64);
        assert_eq!(backward.work.flops, 5 * forward.work.flops / 2);
    }
}
