use super::arena::Arena;
use crate::Result;
use crate::ops::ScaleBlocks;
use rayon::prelude::*;

pub(super) fn scale_blocks(arena: &mut Arena, op: ScaleBlocks) -> Result<()> {
    let ScaleBlocks { values, columns, factor, ends, block_columns, kept } = op;
    let [values] = arena.split("scale_blocks", [("values", values, ends[2] * columns)])?;
    values.par_chunks_mut(columns).enumerate().for_each(|(row, values)| {
        let block = ends.iter().filter(|&&end| end <= row).count();
        for (column, value) in values.iter_mut().enumerate() {
            *value = if kept[block] && column / block_columns == block { *value * factor } else { 0.0 };
        }
    });
    Ok(())
}
