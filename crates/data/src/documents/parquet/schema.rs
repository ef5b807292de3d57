//! A check of the schema before the crate reads it. The crate reserves memory for the number of children that an element claims,
//! and calls itself for each level.

use super::thrift::Type::{Binary, I32, Struct};
use super::thrift::{LIST, Reader, STRUCT, Type};
use anyhow::{Context, Result, ensure};
use std::fs::File;
use std::os::unix::fs::FileExt;

/// Most levels of a schema.
const DEPTH: usize = 256;
/// The end of a file: the length of the footer, and `PAR1`.
const TAIL_BYTES: u64 = 8;
/// Types of the fields of a `SchemaElement`, from field 1.
const ELEMENT: [Type; 10] = [I32, I32, I32, Binary, I32, I32, I32, I32, I32, Struct(&[])];
/// The field with the number of children.
const CHILDREN: i16 = 5;
/// The field of `FileMetaData` with the schema: the elements of a tree, each before its children.
const SCHEMA: i16 = 2;

/// Checks the schema of a file of `size` bytes. Leaves files without a footer to the crate.
pub fn check(file: &File, size: u64) -> Result<()> {
    let mut tail = [0; TAIL_BYTES as usize];
    let Some(end) = size.checked_sub(TAIL_BYTES) else { return Ok(()) };
    file.read_exact_at(&mut tail, end)?;
    let [a, b, c, d, magic @ ..] = tail;
    let Some(start) = end.checked_sub(u32::from_le_bytes([a, b, c, d]).into()).filter(|_| &magic == b"PAR1") else {
        return Ok(());
    };
    let mut footer = vec![0; (end - start) as usize];
    file.read_exact_at(&mut footer, start)?;
    check_footer(&footer)
}

fn check_footer(footer: &[u8]) -> Result<()> {
    let mut schemas = Vec::new();
    let read = Reader(footer).fields(|reader, number, kind| {
        if number == SCHEMA {
            schemas.push(children(reader, kind)?);
            return Some(());
        }
        reader.skip(kind)
    });
    read.context("footer: expected metadata of a parquet file, found other bytes")?;
    schemas.iter().try_for_each(|children| check_tree(children))
}

/// Reads a schema. Returns the number of children of each element.
fn children(reader: &mut Reader, kind: u8) -> Option<Vec<i64>> {
    let (size, _) = reader.list().filter(|&(_, element)| (kind, element) == (LIST, STRUCT))?;
    let mut all = Vec::new();
    for _ in 0..size {
        let mut children = 0;
        reader.fields(|reader, number, kind| {
            let value = Reader(reader.0).int::<i32>();
            reader.skip_field(&ELEMENT, number, kind)?;
            if number == CHILDREN {
                children = value?.into();
            }
            Some(())
        })?;
        all.push(children);
    }
    Some(all)
}

/// Checks that the elements suffice for the children that they claim, and the number of levels.
fn check_tree(children: &[i64]) -> Result<()> {
    // The children to come, of all open elements and of each.
    let (mut all, mut open) = (0, Vec::new());
    for (i, &n) in children.iter().enumerate() {
        let left = (children.len() - i - 1) as i64;
        all = i64::max(all - 1, 0);
        ensure!(
            (0..=left - all).contains(&n),
            "schema: expected at most {} children of element {i}, found {n}",
            left - all
        );
        all += n;
        open.push(n);
        ensure!(open.len() <= DEPTH, "schema: expected at most {DEPTH} levels, found more");
        while open.pop_if(|left| *left == 0).is_some() {
            if let Some(parent) = open.last_mut() {
                *parent -= 1;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trees_of_any_form_are_valid() {
        let chain = [vec![1; DEPTH - 1], vec![0]].concat();
        for children in [&[][..], &[0], &[1, 0], &[3, 0, 2, 0, 0, 0], &[2, 1, 1, 0, 0], &chain] {
            check_tree(children).unwrap_or_else(|error| panic!("{children:?}: {error}"));
        }
    }

    #[test]
    fn children_that_do_not_exist_and_deep_trees_are_errors() {
        let chain = [vec![1; DEPTH], vec![0]].concat();
        for (children, message) in [
            (&[1][..], "at most 0 children of element 0, found 1"),
            (&[2, 1, 0], "at most 0 children of element 1, found 1"),
            (&[1, -1], "at most 0 children of element 1, found -1"),
            (&[i64::MAX, 0, 0], "at most 2 children of element 0"),
            (&chain, "at most 256 levels"),
        ] {
            let error = check_tree(children).unwrap_err().to_string();
            assert!(error.contains(message), "{children:?}: {error}");
        }
    }
}
