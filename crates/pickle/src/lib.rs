//! Reads Python's pickle format, in which PyTorch stores the structure of its checkpoints and tiktoken its encodings.
//!
//! A pickle is a program for a stack machine, which may call any function of Python. This reader calls none: it keeps the
//! name of the function and its arguments ([`Value::call`]). It knows the binary operations of protocols 2 to 5
//! (`pickletools.py` of Python describes them).

#![warn(missing_docs)]

use anyhow::{Context, Result, bail, ensure};

/// The position of a value in a [`Pickle`].
type Id = usize;

/// A pickle that has been read. Values refer to others by their positions, so a value may have several owners, and no value is nested
/// in memory.
#[derive(Debug)]
pub struct Pickle {
    nodes: Vec<Node>,
    root: Id,
}

#[derive(Clone, Debug)]
enum Node {
    /// None, true, false or a float.
    Other,
    Int(i64),
    Bytes(Vec<u8>),
    Text(String),
    /// A tuple, list or set.
    Sequence(Vec<Id>),
    Dict(Vec<[Id; 2]>),
    /// A class or function: its module and its name, with a dot between them.
    Global(String),
    /// The result of a call, with the items that were set afterwards.
    Object {
        function: Id,
        arguments: Id,
        items: Vec<[Id; 2]>,
        state: Option<Id>,
    },
    /// Something outside of the pickle.
    Persistent(Id),
}

/// A value of a pickle.
#[derive(Clone, Copy, Debug)]
pub struct Value<'a> {
    pickle: &'a Pickle,
    id: Id,
}

impl Pickle {
    /// Reads a pickle.
    pub fn read(bytes: &[u8]) -> Result<Self> {
        let mut machine =
            Machine { input: bytes, nodes: Vec::new(), stack: Vec::new(), marks: Vec::new(), memo: Vec::new() };
        let length = bytes.len();
        loop {
            let at = length - machine.input.len();
            let root = machine.step().with_context(|| format!("not a pickle that llm-rs reads: byte {at}"))?;
            if let Some(root) = root {
                return Ok(Self { nodes: machine.nodes, root });
            }
        }
    }

    /// Returns the value that the pickle holds.
    pub fn root(&self) -> Value<'_> {
        Value { pickle: self, id: self.root }
    }
}

impl<'a> Value<'a> {
    fn node(self) -> &'a Node {
        &self.pickle.nodes[self.id]
    }

    fn of(self, id: Id) -> Self {
        Self { id, ..self }
    }

    /// Returns a whole number.
    pub fn int(self) -> Option<i64> {
        if let Node::Int(int) = *self.node() { Some(int) } else { None }
    }

    /// Returns a text.
    pub fn text(self) -> Option<&'a str> {
        if let Node::Text(text) = self.node() { Some(text) } else { None }
    }

    /// Returns bytes.
    pub fn bytes(self) -> Option<&'a [u8]> {
        if let Node::Bytes(bytes) = self.node() { Some(bytes) } else { None }
    }

    /// Returns the name of a class or function with its module, such as `torch.FloatStorage`.
    pub fn global(self) -> Option<&'a str> {
        if let Node::Global(name) = self.node() { Some(name) } else { None }
    }

    /// Returns the elements of a tuple, list or set.
    pub fn elements(self) -> Option<Vec<Self>> {
        let Node::Sequence(ids) = self.node() else { return None };
        Some(ids.iter().map(|&id| self.of(id)).collect())
    }

    /// Returns the keys and values of a dictionary, also of an object such as `OrderedDict`.
    pub fn entries(self) -> Option<impl Iterator<Item = [Self; 2]>> {
        let (Node::Dict(items) | Node::Object { items, .. }) = self.node() else { return None };
        Some(items.iter().map(move |ids| ids.map(|id| self.of(id))))
    }

    /// Returns the value of a key of a dictionary.
    pub fn get(self, key: &str) -> Option<Self> {
        self.entries()?.find(|[found, _]| found.text() == Some(key)).map(|[_, value]| value)
    }

    /// If the value is the result of a call, returns the name of the function and the arguments.
    pub fn call(self) -> Option<(&'a str, Vec<Self>)> {
        let Node::Object { function, arguments, .. } = *self.node() else { return None };
        Some((self.of(function).global()?, self.of(arguments).elements()?))
    }

    /// Returns what an object received after its creation as its state.
    pub fn state(self) -> Option<Self> {
        if let Node::Object { state, .. } = *self.node() { state.map(|id| self.of(id)) } else { None }
    }

    /// Returns the name of something that is stored outside of the pickle, such as the elements of a tensor.
    pub fn persistent(self) -> Option<Self> {
        if let Node::Persistent(id) = *self.node() { Some(self.of(id)) } else { None }
    }
}

/// The stack machine.
struct Machine<'a> {
    /// The bytes after the last operation.
    input: &'a [u8],
    nodes: Vec<Node>,
    stack: Vec<Id>,
    /// Heights of the stack.
    marks: Vec<usize>,
    memo: Vec<Option<Id>>,
}

impl<'a> Machine<'a> {
    /// Executes an operation. Returns the result after the last one.
    fn step(&mut self) -> Result<Option<Id>> {
        let operation = self.number::<1>()? as u8;
        if self.push_atom(operation)? {
            return Ok(None);
        }
        match operation {
            // PROTO and FRAME
            0x80 => drop(self.number::<1>()?),
            0x95 => drop(self.number::<8>()?),
            b'.' => return self.pop().map(Some),
            b'(' => self.marks.push(self.stack.len()),
            b'0' => drop(self.pop()?),
            b'1' => drop(self.above_mark()?),
            b'2' => {
                let top = self.top()?;
                self.stack.push(top);
            }
            // TUPLE, LIST and FROZENSET
            b't' | b'l' | 0x91 => {
                let ids = self.above_mark()?;
                self.push(Node::Sequence(ids));
            }
            count @ 0x85..=0x87 => {
                let ids = self.pop_many(usize::from(count - 0x84))?;
                self.push(Node::Sequence(ids));
            }
            b'a' => {
                let id = self.pop()?;
                self.append(vec![id])?;
            }
            // APPENDS and ADDITEMS
            b'e' | 0x90 => {
                let ids = self.above_mark()?;
                self.append(ids)?;
            }
            b'}' => self.push(Node::Dict(Vec::new())),
            b'd' => {
                let items = pairs(&self.above_mark()?)?;
                self.push(Node::Dict(items));
            }
            b's' => {
                let ids = self.pop_many(2)?;
                self.set_items(&ids)?;
            }
            b'u' => {
                let ids = self.above_mark()?;
                self.set_items(&ids)?;
            }
            b'c' => {
                let [module, name] = [self.line()?, self.line()?];
                self.push(Node::Global(format!("{module}.{name}")));
            }
            // STACK_GLOBAL
            0x93 => {
                let ids = self.pop_many(2)?;
                let [Node::Text(module), Node::Text(name)] = [&self.nodes[ids[0]], &self.nodes[ids[1]]] else {
                    bail!("expected the name of a class, found another value");
                };
                let name = format!("{module}.{name}");
                self.push(Node::Global(name));
            }
            // REDUCE and NEWOBJ
            b'R' | 0x81 => {
                let ids = self.pop_many(2)?;
                self.push(Node::Object { function: ids[0], arguments: ids[1], items: Vec::new(), state: None });
            }
            b'b' => {
                let new = self.pop()?;
                let object = self.top()?;
                let Node::Object { state, .. } = &mut self.nodes[object] else {
                    bail!("expected an object, found another value");
                };
                *state = Some(new);
            }
            b'Q' => {
                let id = self.pop()?;
                self.push(Node::Persistent(id));
            }
            // BINPUT, LONG_BINPUT and MEMOIZE
            b'q' => {
                let slot = self.number::<1>()?;
                self.remember(slot)?;
            }
            b'r' => {
                let slot = self.number::<4>()?;
                self.remember(slot)?;
            }
            0x94 => self.remember(self.memo.len() as u64)?,
            b'h' => {
                let slot = self.number::<1>()?;
                self.recall(slot)?;
            }
            b'j' => {
                let slot = self.number::<4>()?;
                self.recall(slot)?;
            }
            other => bail!("unknown operation {other:#04x}"),
        }
        Ok(None)
    }

    /// Pushes the value of an operation that uses no other values. Returns false for other operations.
    fn push_atom(&mut self, operation: u8) -> Result<bool> {
        match operation {
            b'N' | 0x88 | 0x89 => self.push(Node::Other),
            b'K' => self.push_int::<1>()?,
            b'M' => self.push_int::<2>()?,
            b'J' => {
                let int = self.number::<4>()? as u32;
                self.push(Node::Int(i64::from(int.cast_signed())));
            }
            // LONG1
            0x8a => {
                let bytes = self.counted::<1>()?;
                self.push(Node::Int(signed(bytes)?));
            }
            b'G' => {
                self.take(8)?;
                self.push(Node::Other);
            }
            // SHORT_BINUNICODE, BINUNICODE and BINUNICODE8; BINSTRING and SHORT_BINSTRING are the texts of Python 2
            0x8c | b'U' => self.push_text::<1>()?,
            b'X' | b'T' => self.push_text::<4>()?,
            0x8d => self.push_text::<8>()?,
            // SHORT_BINBYTES, BINBYTES, BINBYTES8 and BYTEARRAY8
            b'C' => self.push_bytes::<1>()?,
            b'B' => self.push_bytes::<4>()?,
            0x8e | 0x96 => self.push_bytes::<8>()?,
            // Empty tuple, list and set
            b')' | b']' | 0x8f => self.push(Node::Sequence(Vec::new())),
            _ => return Ok(false),
        }
        Ok(true)
    }

    fn take(&mut self, count: usize) -> Result<&'a [u8]> {
        let (bytes, rest) = self.input.split_at_checked(count).context("the file ends before the pickle does")?;
        self.input = rest;
        Ok(bytes)
    }

    /// Reads a number of N bytes, the lowest first.
    fn number<const N: usize>(&mut self) -> Result<u64> {
        let bytes = self.take(N)?;
        Ok(bytes.iter().rev().fold(0, |number, &byte| number << 8 | u64::from(byte)))
    }

    /// Reads a count of N bytes and that many bytes.
    fn counted<const N: usize>(&mut self) -> Result<&'a [u8]> {
        let count = self.number::<N>()?;
        self.take(usize::try_from(count)?)
    }

    fn line(&mut self) -> Result<&'a str> {
        let end = self.input.iter().position(|&byte| byte == b'\n').context("the file ends before the pickle does")?;
        let line = self.take(end + 1)?;
        Ok(std::str::from_utf8(&line[..end])?)
    }

    fn push(&mut self, node: Node) {
        self.stack.push(self.nodes.len());
        self.nodes.push(node);
    }

    fn push_int<const N: usize>(&mut self) -> Result<()> {
        let int = self.number::<N>()?;
        self.push(Node::Int(int as i64));
        Ok(())
    }

    fn push_text<const N: usize>(&mut self) -> Result<()> {
        let text = std::str::from_utf8(self.counted::<N>()?)?.to_owned();
        self.push(Node::Text(text));
        Ok(())
    }

    fn push_bytes<const N: usize>(&mut self) -> Result<()> {
        let bytes = self.counted::<N>()?.to_owned();
        self.push(Node::Bytes(bytes));
        Ok(())
    }

    /// Returns the height below which the stack belongs to an unfinished value.
    fn floor(&self) -> usize {
        self.marks.last().copied().unwrap_or(0)
    }

    fn pop(&mut self) -> Result<Id> {
        self.pop_many(1).map(|ids| ids[0])
    }

    fn pop_many(&mut self, count: usize) -> Result<Vec<Id>> {
        let start = self.stack.len().checked_sub(count).filter(|&start| start >= self.floor());
        Ok(self.stack.split_off(start.context("expected a value, found none")?))
    }

    fn top(&self) -> Result<Id> {
        let top = self.stack.last().copied().filter(|_| self.stack.len() > self.floor());
        top.context("expected a value, found none")
    }

    fn above_mark(&mut self) -> Result<Vec<Id>> {
        let start = self.marks.pop().context("expected a mark, found none")?;
        Ok(self.stack.split_off(start))
    }

    fn append(&mut self, new: Vec<Id>) -> Result<()> {
        let list = self.top()?;
        let Node::Sequence(ids) = &mut self.nodes[list] else { bail!("expected a list, found another value") };
        ids.extend(new);
        Ok(())
    }

    fn set_items(&mut self, ids: &[Id]) -> Result<()> {
        let new = pairs(ids)?;
        let dict = self.top()?;
        let (Node::Dict(items) | Node::Object { items, .. }) = &mut self.nodes[dict] else {
            bail!("expected a dictionary, found another value");
        };
        items.extend(new);
        Ok(())
    }

    fn remember(&mut self, slot: u64) -> Result<()> {
        let (slot, top) = (slot as usize, self.top()?);
        // Python numbers the slots in order.
        ensure!(slot <= self.memo.len(), "expected at most slot {}, found {slot}", self.memo.len());
        if slot == self.memo.len() {
            self.memo.push(None);
        }
        self.memo[slot] = Some(top);
        Ok(())
    }

    fn recall(&mut self, slot: u64) -> Result<()> {
        let id = self.memo.get(slot as usize).copied().flatten();
        self.stack.push(id.with_context(|| format!("expected a value in slot {slot}, found none"))?);
        Ok(())
    }
}

/// Returns the pairs of keys and values.
fn pairs(ids: &[Id]) -> Result<Vec<[Id; 2]>> {
    let (pairs, rest) = ids.as_chunks();
    ensure!(rest.is_empty(), "expected a value for each key, found none for the last");
    Ok(pairs.to_vec())
}

/// Returns a number in two's complement, the lowest byte first.
fn signed(bytes: &[u8]) -> Result<i64> {
    ensure!(bytes.len() <= 8, "expected a number of at most 8 bytes, found {}", bytes.len());
    let fill = if bytes.last().is_some_and(|&byte| byte >= 0x80) { 0xff } else { 0 };
    let mut all = [fill; 8];
    all[..bytes.len()].copy_from_slice(bytes);
    Ok(i64::from_le_bytes(all))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Describes a value as Python would.
    fn describe(value: Value<'_>) -> String {
        let list = |values: Vec<Value<'_>>| values.into_iter().map(describe).collect::<Vec<_>>().join(", ");
        let dict = |value: Value<'_>| {
            let entry = |[key, value]: [Value<'_>; 2]| format!("{}: {}", describe(key), describe(value));
            value.entries().unwrap().map(entry).collect::<Vec<_>>().join(", ")
        };
        match value.node() {
            Node::Other => "other".to_owned(),
            Node::Int(int) => int.to_string(),
            Node::Bytes(bytes) => format!("{bytes:?}"),
            Node::Text(text) => format!("{text:?}"),
            Node::Sequence(_) => format!("({})", list(value.elements().unwrap())),
            Node::Dict(_) => format!("{{{}}}", dict(value)),
            Node::Global(name) => name.clone(),
            Node::Object { .. } => {
                let (function, arguments) = value.call().unwrap();
                let state = value.state().map_or_else(String::new, |state| format!(" <- {}", describe(state)));
                format!("{function}({}){{{}}}{state}", list(arguments), dict(value))
            }
            Node::Persistent(_) => format!("persistent {}", describe(value.persistent().unwrap())),
        }
    }

    fn read(bytes: &[u8]) -> Result<String> {
        Ok(describe(Pickle::read(bytes)?.root()))
    }

    #[test]
    fn values_of_python_are_read_in_each_protocol() {
        // pickle.dumps({"a": [1, -2, 300, 70000, 2**40, -2**40], "b": (None, True, 0.5), 3: b"xy"}, protocol=2 and 4)
        let expected =
            r#"{"a": (1, -2, 300, 70000, 1099511627776, -1099511627776), "b": (other, other, other), 3: BYTES}"#;
        let two = b"\x80\x02}q\x00(X\x01\x00\x00\x00aq\x01]q\x02(K\x01J\xfe\xff\xff\xffM,\x01Jp\x11\x01\x00\x8a\x06\x00\x00\x00\x00\x00\x01\x8a\x06\x00\x00\x00\x00\x00\xffeX\x01\x00\x00\x00bq\x03N\x88G?\xe0\x00\x00\x00\x00\x00\x00\x87q\x04K\x03c_codecs\nencode\nq\x05X\x02\x00\x00\x00xyq\x06X\x06\x00\x00\x00latin1q\x07\x86q\x08Rq\tu.";
        assert_eq!(read(two).unwrap(), expected.replace("BYTES", r#"_codecs.encode("xy", "latin1"){}"#));
        let four = b"\x80\x04\x95D\x00\x00\x00\x00\x00\x00\x00}\x94(\x8c\x01a\x94]\x94(K\x01J\xfe\xff\xff\xffM,\x01Jp\x11\x01\x00\x8a\x06\x00\x00\x00\x00\x00\x01\x8a\x06\x00\x00\x00\x00\x00\xffe\x8c\x01b\x94N\x88G?\xe0\x00\x00\x00\x00\x00\x00\x87\x94K\x03C\x02xy\x94u.";
        assert_eq!(read(four).unwrap(), expected.replace("BYTES", "[120, 121]"));
    }

    #[test]
    fn calls_states_and_outside_values_are_kept_and_none_is_run() {
        // class with a state: copyreg.__newobj__; then a call of os.system.
        let object = b"\x80\x04\x8c\x04main\x8c\x01C\x93)\x81}\x8c\x01xK\x01sb.";
        assert_eq!(read(object).unwrap(), r#"main.C(){} <- {"x": 1}"#);
        assert_eq!(read(b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00ls\x85R.").unwrap(), r#"os.system("ls"){}"#);
        let ordered = b"\x80\x02ccollections\nOrderedDict\n)Rq\x00(X\x01\x00\x00\x00aK\x01X\x01\x00\x00\x00bh\x00u.";
        let pickle = Pickle::read(ordered).unwrap();
        assert_eq!(pickle.root().get("a").unwrap().int(), Some(1));
        assert_eq!(pickle.root().get("b").unwrap().get("b").unwrap().get("a").unwrap().int(), Some(1));
        assert_eq!(read(b"\x80\x02X\x01\x00\x00\x000Q.").unwrap(), r#"persistent "0""#);
    }

    #[test]
    fn damage_is_an_error_that_names_the_byte() {
        for (bytes, expected) in [
            (&b""[..], "byte 0: the file ends"),
            (b"\x80\x02", "byte 2: the file ends"),
            (b"\x80\x02.", "byte 2: expected a value, found none"),
            (b"\x80\x02u.", "byte 2: expected a mark, found none"),
            (b"\x80\x02K\x01(\x85.", "byte 5: expected a value, found none"),
            (b"\x80\x02X\xff\xff\xff\xffa.", "byte 2: the file ends"),
            (b"\x80\x02h\x01.", "byte 2: expected a value in slot 1, found none"),
            (b"\x80\x02Nr\xff\xff\xff\xff.", "byte 3: expected at most slot 0, found 4294967295"),
            (b"\x80\x02}(K\x01u.", "byte 6: expected a value for each key"),
            (b"\x80\x02NK\x01a.", "byte 5: expected a list, found another value"),
            (b"\x80\x02i.", "byte 2: unknown operation 0x69"),
        ] {
            let message = format!("{:#}", read(bytes).unwrap_err());
            assert!(message.starts_with("not a pickle that llm-rs reads: ") && message.contains(expected), "{message}");
        }
    }

    #[test]
    fn deep_nesting_needs_no_stack() {
        let nested = [&b"\x80\x02)"[..], &[0x85].repeat(1_000_000), b"."].concat();
        drop(Pickle::read(&nested).unwrap());
    }
}
