//! Structs in Thrift's compact protocol, as far as the checks of untrusted sizes need them
//! (<https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md>).
//!
//! Every function returns `None` if the bytes end or are not of the expected form.

use Type::{Binary, Bool, I32, Struct};

/// Type of a list.
pub const LIST: u8 = 9;
/// Type of a struct.
pub const STRUCT: u8 = 12;

/// Type of a field that the parquet crate knows.
#[derive(Clone, Copy)]
pub enum Type {
    /// A boolean, whose value is in its type.
    Bool,
    /// A 32-bit integer.
    I32,
    /// A string or bytes.
    Binary,
    /// A struct with fields of these types, from field 1. It may have more fields.
    Struct(&'static [Type]),
}

impl Type {
    /// Is `kind`, which precedes a value, this type?
    fn is(self, kind: u8) -> bool {
        match self {
            Bool => matches!(kind, 1 | 2),
            I32 => kind == 5,
            Binary => kind == 8,
            Struct(_) => kind == STRUCT,
        }
    }
}

/// Most levels of nested values that are skipped; Parquet's structs have fewer than ten.
const DEPTH: usize = 32;

/// The bytes that have not been read.
pub struct Reader<'a>(pub &'a [u8]);

impl Reader<'_> {
    /// Reads a byte.
    pub fn byte(&mut self) -> Option<u8> {
        self.0.split_off_first().copied()
    }

    /// Groups of 7 bits, the lowest first.
    fn varint(&mut self) -> Option<u64> {
        let mut value = 0;
        for shift in (0..70).step_by(7) {
            let byte = self.byte()?;
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Some(value);
            }
        }
        None
    }

    /// Reads an integer of 16 to 64 bits, which must fit into `T`.
    pub fn int<T: TryFrom<i64>>(&mut self) -> Option<T> {
        let value = self.varint()?;
        T::try_from((value >> 1) as i64 ^ -((value & 1) as i64)).ok()
    }

    /// Reads the head of a list: the number of elements, and their type. A list of
    /// booleans is refused: only the index of a column has one, and the crate skips no byte for them, so it counts to any number.
    pub fn list(&mut self) -> Option<(usize, u8)> {
        let head = self.byte()?;
        let size = match head >> 4 {
            15 => usize::try_from(self.varint()?).ok()?,
            size => size.into(),
        };
        let kind = head & 15;
        (kind > 2 || size == 0).then_some((size, kind))
    }

    /// Calls `field` with the number and type of each field of a struct; it must read the field's value.
    pub fn fields(&mut self, mut field: impl FnMut(&mut Self, i16, u8) -> Option<()>) -> Option<()> {
        let mut number = 0_i16;
        loop {
            let head = self.byte()?;
            if head == 0 {
                return Some(());
            }
            number = match head >> 4 {
                0 => self.int()?,
                difference => number.checked_add(difference.into())?,
            };
            field(self, number, head & 15)?;
        }
    }

    /// Skips the value of field `number` of a struct with fields of `types`. The crate reads a value with the type that it expects,
    /// and would take the bytes of another type for other fields.
    pub fn skip_field(&mut self, types: &[Type], number: i16, kind: u8) -> Option<()> {
        let expected = usize::try_from(number).ok().and_then(|number| types.get(number.checked_sub(1)?));
        match expected {
            Some(expected) if !expected.is(kind) => None,
            Some(Struct(types)) => self.fields(|reader, number, kind| reader.skip_field(types, number, kind)),
            _ => self.skip(kind),
        }
    }

    /// Skips a value.
    pub fn skip(&mut self, kind: u8) -> Option<()> {
        self.skip_nested(kind, DEPTH)
    }

    fn skip_nested(&mut self, kind: u8, depth: usize) -> Option<()> {
        let depth = depth.checked_sub(1)?;
        match kind {
            // A boolean, which is in its type.
            1 | 2 => {}
            3 => drop(self.byte()?),
            4..=6 => drop(self.varint()?),
            7 => drop(self.0.split_off(..8)?),
            8 => {
                let bytes = usize::try_from(self.varint()?).ok()?;
                self.0.split_off(..bytes)?;
            }
            LIST => {
                let (size, kind) = self.list()?;
                for _ in 0..size {
                    self.skip_nested(kind, depth)?;
                }
            }
            STRUCT => self.fields(|reader, _, kind| reader.skip_nested(kind, depth))?,
            _ => return None,
        }
        Some(())
    }
}
