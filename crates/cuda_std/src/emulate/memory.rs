//! Named buffers for checked launches.

use super::shadow::Shadow;
use crate::global::{Global, GlobalMut};
use crate::slice::{EMULATOR, GlobalSlice, GlobalSliceMut};
use bytemuck::Pod;
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::{fmt, slice};

/// Device memory for [`emulate_checked`](crate::launch::Launch::emulate_checked): named buffers that track which bytes
/// are initialized. Buffers do not move, so their views stay valid for the lifetime of the memory.
#[derive(Default)]
pub struct Memory {
    pub(super) buffers: Vec<Buffer>,
}

impl Memory {
    /// Creates a memory without buffers.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a read-only buffer that contains `values`.
    pub fn input<T: Pod>(&mut self, name: &str, values: &[T]) -> Global<T> {
        Global::new(self.add::<T>(name, size_of_val(values), Some(bytemuck::cast_slice(values)), false).cast())
    }

    /// Adds a writable buffer that contains `values`.
    pub fn buffer<T: Pod>(&mut self, name: &str, values: &[T]) -> GlobalMut<T> {
        GlobalMut::new(self.add::<T>(name, size_of_val(values), Some(bytemuck::cast_slice(values)), true).cast())
    }

    /// Adds an uninitialized writable buffer of `len` elements. Reading an element before it is written is a fault.
    pub fn output<T: Pod>(&mut self, name: &str, len: usize) -> GlobalMut<T> {
        GlobalMut::new(self.add::<T>(name, len * size_of::<T>(), None, true).cast())
    }

    /// Adds a writable buffer of `len` elements filled with zeros.
    pub fn zeroed<T: Pod>(&mut self, name: &str, len: usize) -> GlobalMut<T> {
        let bytes = len * size_of::<T>();
        GlobalMut::new(self.add::<T>(name, bytes, Some(&vec![0; bytes]), true).cast())
    }

    /// Adds a read-only buffer that contains `values`, for a checked kernel.
    pub fn input_slice<T: Pod>(&mut self, name: &str, values: &[T]) -> GlobalSlice<'static, T> {
        // SAFETY: only an emulated launch accepts views of the emulator, and it checks each access.
        unsafe { GlobalSlice::from_parts(self.input(name, values), values.len(), EMULATOR) }
    }

    /// Adds a writable buffer that contains `values`, for a checked kernel.
    pub fn buffer_slice<T: Pod>(&mut self, name: &str, values: &[T]) -> GlobalSliceMut<'static, T> {
        // SAFETY: see `input_slice`.
        unsafe { GlobalSliceMut::from_parts(self.buffer(name, values), values.len(), EMULATOR) }
    }

    /// Adds an uninitialized writable buffer of `len` elements, for a checked kernel. A GPU's buffers contain zeros, but reading an
    /// element before it is written is a fault here.
    pub fn output_slice<T: Pod>(&mut self, name: &str, len: usize) -> GlobalSliceMut<'static, T> {
        // SAFETY: see `input_slice`.
        unsafe { GlobalSliceMut::from_parts(self.output(name, len), len, EMULATOR) }
    }

    /// Adds a writable buffer of `len` elements filled with zeros, for a checked kernel.
    pub fn zeroed_slice<T: Pod>(&mut self, name: &str, len: usize) -> GlobalSliceMut<'static, T> {
        // SAFETY: see `input_slice`.
        unsafe { GlobalSliceMut::from_parts(self.zeroed(name, len), len, EMULATOR) }
    }

    /// Returns the elements of a buffer of a checked kernel.
    ///
    /// # Panics
    /// If the view does not belong to one of these buffers, or if an element was never written.
    pub fn read_slice<T: Pod>(&self, view: GlobalSliceMut<'_, T>) -> Vec<T> {
        self.read(view.view())
    }

    /// Copies `values` from the host to the start of `view`. Read-only buffers can be written as well.
    ///
    /// # Errors
    /// If the destination is not inside one of these buffers.
    pub fn write<T: Pod>(&mut self, view: GlobalMut<T>, values: &[T]) -> Result<(), HostAccess> {
        let bytes: &[u8] = bytemuck::cast_slice(values);
        let (buffer, offset) = self.locate_range(view.0.addr(), bytes.len())?;
        let buffer = &mut self.buffers[buffer];
        buffer.contents_mut()[offset..][..bytes.len()].copy_from_slice(bytes);
        buffer.shadow.set_written(offset, bytes.len());
        Ok(())
    }

    /// Returns the `len` elements from the start of `view`.
    ///
    /// # Errors
    /// If they are not inside one of these buffers, or if one was never written.
    pub fn slice<T: Pod>(&self, view: Global<T>, len: usize) -> Result<&[T], HostAccess> {
        let bytes = len * size_of::<T>();
        let (buffer, offset) = self.locate_range(view.0.addr(), bytes)?;
        let buffer = &self.buffers[buffer];
        if let Some(byte) = buffer.shadow.first_unwritten(offset, bytes) {
            return Err(HostAccess(format!("{} + {byte} was never written", buffer.name)));
        }
        Ok(bytemuck::cast_slice(&buffer.contents()[offset..][..bytes]))
    }

    /// Returns the elements from the start of `view` to the end of its buffer.
    ///
    /// # Panics
    /// If the view does not belong to one of these buffers, or if an element was never written.
    pub fn read<T: Pod>(&self, view: GlobalMut<T>) -> Vec<T> {
        let (buffer, offset) = self.locate(view.0.addr()).expect("the view must belong to a buffer of this memory");
        let len = (self.buffers[buffer].bytes - offset) / size_of::<T>();
        self.slice(view.reader(), len).unwrap_or_else(|error| panic!("{error}")).to_vec()
    }

    /// Returns the address of the first byte of each buffer, its contents, and whether they are initialized: what a launch on a GPU with
    /// the same arguments needs.
    pub fn buffers(&self) -> impl Iterator<Item = (u64, &[u8], bool)> {
        self.buffers.iter().map(|buffer| {
            let is_initialized = buffer.shadow.first_unwritten(0, buffer.bytes).is_none();
            (buffer.start() as u64, buffer.contents(), is_initialized)
        })
    }

    /// Returns a copy of the contents of the writable buffers.
    pub(super) fn contents(&self) -> Contents {
        let writable = self.buffers.iter().filter(|buffer| buffer.writable);
        Contents(writable.map(|buffer| (buffer.contents().to_vec(), buffer.shadow.written().to_vec())).collect())
    }

    /// Restores the contents of the writable buffers.
    pub(super) fn restore(&mut self, contents: &Contents) {
        let writable = self.buffers.iter_mut().filter(|buffer| buffer.writable);
        for (buffer, (bytes, written)) in writable.zip(&contents.0) {
            buffer.contents_mut().copy_from_slice(bytes);
            buffer.shadow.restore_written(written);
        }
    }

    /// Returns the index of the buffer that contains or ends at `address`, and the offset of the address in it.
    fn locate(&self, address: usize) -> Option<(usize, usize)> {
        let buffer = self.buffers.partition_point(|b| b.start() <= address).checked_sub(1)?;
        let offset = address - self.buffers[buffer].start();
        (offset <= self.buffers[buffer].bytes).then_some((buffer, offset))
    }

    /// Same as [`locate`](Self::locate), for a range of `bytes` bytes that must be inside the buffer.
    fn locate_range(&self, address: usize, bytes: usize) -> Result<(usize, usize), HostAccess> {
        let Some((buffer, offset)) = self.locate(address) else {
            return Err(HostAccess(format!("{bytes} bytes at {address:#x}, which is in no buffer")));
        };
        let Buffer { bytes: size, name, .. } = &self.buffers[buffer];
        if offset + bytes > *size {
            return Err(HostAccess(format!("{bytes} bytes at {name} + {offset}, which has {size} bytes")));
        }
        Ok((buffer, offset))
    }

    /// Adds a buffer of elements of type `T`.
    fn add<T>(&mut self, name: &str, bytes: usize, values: Option<&[u8]>, writable: bool) -> *mut u8 {
        let mut buffer = Buffer::new(name, bytes, values, writable);
        buffer.element = size_of::<T>().max(1);
        let pointer = buffer.pointer();
        let index = self.buffers.partition_point(|b| b.start() < buffer.start());
        self.buffers.insert(index, buffer);
        pointer
    }
}

/// The contents of buffers, and which bytes of them are initialized.
#[derive(Clone, PartialEq)]
pub struct Contents(Vec<(Vec<u8>, Vec<u64>)>);

/// Error of an invalid access by the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostAccess(String);

impl fmt::Display for HostAccess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for HostAccess {}

/// A buffer between two guard zones of its own size, at least 64 KiB each. An out-of-bounds access usually hits a guard
/// zone, so the report can name the buffer. The zones are never touched and so use no physical memory.
pub struct Buffer {
    pub name: String,
    allocation: *mut u8,
    layout: Layout,
    /// Offset of the buffer in the allocation. The buffer is aligned to 256 bytes, like those of `cuMemAlloc`.
    offset: usize,
    pub bytes: usize,
    /// Size of an element in bytes, for reports.
    pub element: usize,
    pub writable: bool,
    pub shadow: Shadow,
}

// SAFETY: the buffer owns its allocation.
unsafe impl Send for Buffer {}
// SAFETY: a shared reference gives only read access.
unsafe impl Sync for Buffer {}

impl Buffer {
    fn new(name: &str, bytes: usize, values: Option<&[u8]>, writable: bool) -> Self {
        let zone = bytes.next_multiple_of(256).max(64 << 10);
        // The system allocator returns fresh zeroed pages without touching them for alignments up to its own.
        let layout =
            Layout::from_size_align(bytes + 2 * zone + 256, 16).expect("the buffer must fit into the address space");
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
        Self { name: name.to_owned(), allocation, layout, offset, bytes, element: 1, writable, shadow }
    }

    fn pointer(&self) -> *mut u8 {
        self.allocation.wrapping_add(self.offset)
    }

    pub fn start(&self) -> usize {
        self.pointer().addr()
    }

    /// Returns whether `address` is in this buffer or its guard zones.
    pub fn near(&self, address: usize) -> bool {
        (self.allocation.addr()..self.allocation.addr() + self.layout.size()).contains(&address)
    }

    fn contents_mut(&mut self) -> &mut [u8] {
        // SAFETY: the bytes are initialized in `new`, and kernels write them only while the memory is borrowed mutably.
        unsafe { slice::from_raw_parts_mut(self.pointer(), self.bytes) }
    }

    pub fn contents(&self) -> &[u8] {
        // SAFETY: the bytes are initialized in `new`, and kernels write them only while the memory is borrowed mutably.
        unsafe { slice::from_raw_parts(self.pointer(), self.bytes) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout.
        unsafe { dealloc(self.allocation, self.layout) }
    }
}
