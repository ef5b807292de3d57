//! Named buffers for a checked launch.

use super::shadow::Shadow;
use crate::global::{Global, GlobalMut};
use bytemuck::Pod;
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::{fmt, slice};

/// Device memory of [`emulate_checked`](crate::launch::Launch::emulate_checked): named buffers, of which every byte knows
/// whether it was ever written. Buffers stay where they are, and their views valid, as long as the memory lives.
#[derive(Default)]
pub struct Memory {
    pub(super) buffers: Vec<Buffer>,
}

impl Memory {
    pub fn new() -> Self {
        Self::default()
    }

    /// A buffer that no kernel may write, with these contents.
    pub fn input<T: Pod>(&mut self, name: &str, values: &[T]) -> Global<T> {
        Global::new(self.add(name, size_of_val(values), Some(bytemuck::cast_slice(values)), false).cast())
    }

    /// A buffer with these contents.
    pub fn buffer<T: Pod>(&mut self, name: &str, values: &[T]) -> GlobalMut<T> {
        GlobalMut::new(self.add(name, size_of_val(values), Some(bytemuck::cast_slice(values)), true).cast())
    }

    /// A buffer of `len` elements that nobody has written yet; reading it before that is a fault.
    pub fn output<T: Pod>(&mut self, name: &str, len: usize) -> GlobalMut<T> {
        GlobalMut::new(self.add(name, len * size_of::<T>(), None, true).cast())
    }

    /// A buffer of zeros.
    pub fn zeroed<T: Pod>(&mut self, name: &str, len: usize) -> GlobalMut<T> {
        let bytes = len * size_of::<T>();
        GlobalMut::new(self.add(name, bytes, Some(&vec![0; bytes]), true).cast())
    }

    /// Writes `values` from where `view` begins, as a host's copy does: to inputs, too.
    ///
    /// # Errors
    /// If they do not lie in one of these buffers.
    pub fn write<T: Pod>(&mut self, view: GlobalMut<T>, values: &[T]) -> Result<(), HostAccess> {
        let bytes: &[u8] = bytemuck::cast_slice(values);
        let (buffer, offset) = self.inside(view.0.addr(), bytes.len())?;
        let buffer = &mut self.buffers[buffer];
        buffer.contents_mut()[offset..][..bytes.len()].copy_from_slice(bytes);
        buffer.shadow.set_written(offset, bytes.len());
        Ok(())
    }

    /// The `len` elements from where `view` begins.
    ///
    /// # Errors
    /// If they do not lie in one of these buffers, or one was never written.
    pub fn slice<T: Pod>(&self, view: Global<T>, len: usize) -> Result<&[T], HostAccess> {
        let bytes = len * size_of::<T>();
        let (buffer, offset) = self.inside(view.0.addr(), bytes)?;
        let buffer = &self.buffers[buffer];
        if let Some(byte) = buffer.shadow.first_unwritten(offset, bytes) {
            return Err(HostAccess(format!("{} + {byte} was never written", buffer.name)));
        }
        Ok(bytemuck::cast_slice(&buffer.contents()[offset..][..bytes]))
    }

    /// What the buffer holds from where `view` begins to its end.
    ///
    /// # Panics
    /// If the view is of none of these buffers, or an element was never written.
    pub fn read<T: Pod>(&self, view: GlobalMut<T>) -> Vec<T> {
        let (buffer, offset) = self.place(view.0.addr()).expect("a view of one of this memory's buffers");
        let len = (self.buffers[buffer].bytes - offset) / size_of::<T>();
        self.slice(view.reader(), len).unwrap_or_else(|error| panic!("{error}")).to_vec()
    }

    /// The buffer that an address lies in, or is the end of, and its offset there.
    fn place(&self, address: usize) -> Option<(usize, usize)> {
        let buffer = self.buffers.partition_point(|b| b.start() <= address).checked_sub(1)?;
        let offset = address - self.buffers[buffer].start();
        (offset <= self.buffers[buffer].bytes).then_some((buffer, offset))
    }

    /// As [`place`](Self::place) of so many bytes.
    fn inside(&self, address: usize, bytes: usize) -> Result<(usize, usize), HostAccess> {
        let Some((buffer, offset)) = self.place(address) else {
            return Err(HostAccess(format!("{bytes} bytes at {address:#x}, which is in no buffer")));
        };
        let Buffer { bytes: size, name, .. } = &self.buffers[buffer];
        if offset + bytes > *size {
            return Err(HostAccess(format!("{bytes} bytes at {name} + {offset}, which has {size} bytes")));
        }
        Ok((buffer, offset))
    }

    fn add(&mut self, name: &str, bytes: usize, values: Option<&[u8]>, writable: bool) -> *mut u8 {
        let buffer = Buffer::new(name, bytes, values, writable);
        let pointer = buffer.pointer();
        let place = self.buffers.partition_point(|b| b.start() < buffer.start());
        self.buffers.insert(place, buffer);
        pointer
    }
}

/// Why the host cannot read or write there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostAccess(String);

impl fmt::Display for HostAccess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for HostAccess {}

/// A buffer between two zones of its own size, at least 64 KiB: an access that misses the buffer lands there, and is known
/// by its name, rather than in another one. The zones are never touched and so take no memory.
pub struct Buffer {
    pub name: String,
    allocation: *mut u8,
    layout: Layout,
    /// From the allocation's start to the buffer's, which is 256-byte aligned as `cuMemAlloc`'s are.
    offset: usize,
    pub bytes: usize,
    pub writable: bool,
    pub shadow: Shadow,
}

// SAFETY: the allocation is owned; whoever has the buffer has it alone.
unsafe impl Send for Buffer {}
// SAFETY: behind a shared reference it is only read.
unsafe impl Sync for Buffer {}

impl Buffer {
    fn new(name: &str, bytes: usize, values: Option<&[u8]>, writable: bool) -> Self {
        let zone = bytes.next_multiple_of(256).max(64 << 10);
        // Zeroed memory of no more than the allocator's own alignment comes untouched from the system.
        let layout = Layout::from_size_align(bytes + 2 * zone + 256, 16).expect("a buffer fits the address space");
        // SAFETY: the size is not zero.
        let allocation = unsafe { alloc_zeroed(layout) };
        if allocation.is_null() {
            handle_alloc_error(layout);
        }
        let offset = (allocation.addr() + zone).next_multiple_of(256) - allocation.addr();
        let mut shadow = Shadow::new(bytes);
        // SAFETY: `offset` is at most zone + 255, so `bytes` bytes follow it.
        let contents = unsafe { slice::from_raw_parts_mut(allocation.add(offset), bytes) };
        match values {
            Some(values) => {
                contents.copy_from_slice(values);
                shadow.set_written(0, bytes);
            }
            // NaN as f32 and as bf16.
            None => contents.fill(0xff),
        }
        Self { name: name.to_owned(), allocation, layout, offset, bytes, writable, shadow }
    }

    fn pointer(&self) -> *mut u8 {
        self.allocation.wrapping_add(self.offset)
    }

    pub fn start(&self) -> usize {
        self.pointer().addr()
    }

    /// Whether an access at `address` was meant for this buffer.
    pub fn near(&self, address: usize) -> bool {
        (self.allocation.addr()..self.allocation.addr() + self.layout.size()).contains(&address)
    }

    fn contents_mut(&mut self) -> &mut [u8] {
        // SAFETY: initialised in `new`; kernels write it only while the memory is borrowed mutably.
        unsafe { slice::from_raw_parts_mut(self.pointer(), self.bytes) }
    }

    fn contents(&self) -> &[u8] {
        // SAFETY: initialised in `new`; kernels write it only while the memory is borrowed mutably.
        unsafe { slice::from_raw_parts(self.pointer(), self.bytes) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout.
        unsafe { dealloc(self.allocation, self.layout) }
    }
}
