//! Reports of mistakes of first kernels name the fix. Zeroed buffers of checked kernels.

use cuda_std::emulate::{Fault, Memory};
use cuda_std::shared::Layout;
use cuda_std::{GlobalMut, GlobalSliceMut, SharedArray, block, kernel, thread};

fn scratch(layout: &mut Layout) -> SharedArray<f32> {
    layout.array(32)
}

/// Reduces over a block whose last warp has 16 lanes.
#[kernel(threads = 48, shared = scratch, checked)]
fn partial_warp(out: GlobalSliceMut<f32>) {
    out.set(thread::index_1d(), block::sum(1.0, scratch(&mut Layout::new())));
}

/// Uses shared memory that its declaration does not have.
#[kernel(threads = 32, checked)]
fn undeclared_shared(out: GlobalSliceMut<f32>) {
    out.set(thread::index_1d(), block::sum(1.0, scratch(&mut Layout::new())));
}

#[kernel(threads = 64, checked)]
fn count(counts: GlobalSliceMut<u32>) {
    counts.fetch_add(thread::index_1d() % 3, 1);
}

#[test]
fn a_shuffle_in_a_partial_warp_names_the_block_size() {
    let mut memory = Memory::new();
    let report = partial_warp(memory.output_slice("out", 48)).emulate(&mut memory, [1, 1, 1]).unwrap_err();
    let text = report.to_string();
    assert_eq!(report.fault, Fault::Operand, "{text}");
    assert!(text.contains("the warp has 16 lanes") && text.contains("a block size that is a multiple of 32"), "{text}");
}

#[test]
fn undeclared_shared_memory_names_the_option() {
    let mut memory = Memory::new();
    let report = undeclared_shared(memory.output_slice("out", 32)).emulate(&mut memory, [1, 1, 1]).unwrap_err();
    let text = report.to_string();
    assert_eq!(report.fault, Fault::OutOfBounds, "{text}");
    assert!(text.contains("but the launch has no shared memory; name its layout in #[kernel(shared = …)]"), "{text}");
}

#[test]
fn zeroed_slices_are_initialized_and_have_their_length() {
    let mut memory = Memory::new();
    let counts = memory.zeroed_slice("counts", 4);
    assert_eq!(counts.len(), 4);
    count(counts).emulate(&mut memory, [1, 1, 1]).unwrap();
    assert_eq!(memory.read_slice(counts), [22, 21, 21, 0]);
}

/// Writes to an operand that the launch does not have.
#[kernel(threads = 32)]
fn optional(out: GlobalMut<f32>) {
    out.set(3, 1.0);
}

#[test]
fn an_access_through_a_null_view_is_named() {
    let report = optional(GlobalMut::null()).emulate_checked(&mut Memory::new(), [1, 1, 1], 0).unwrap_err();
    let text = report.to_string();
    assert!(text.contains("write of 4 bytes at address 0xc, through a null view"), "{text}");
}

#[kernel(threads = 1, shared = scratch)]
fn reads_the_host(out: GlobalMut<f32>, host: GlobalMut<f32>) {
    let shared = scratch(&mut Layout::new());
    shared.set(0, 1.0);
    out.set(0, shared.at(0) + host.at(3));
}

/// The size and alignment of the allocation of 1 KiB of shared memory.
#[derive(Clone)]
#[repr(align(1024))]
struct Kilobyte([f32; 256]);

/// So many allocations like that of shared memory fill the gaps of the heap, so that some are next to it.
#[test]
fn memory_of_the_host_is_not_called_shared_memory() {
    let mut host = vec![Box::new(Kilobyte([1.0; 256])); 1024];
    for host in host.iter_mut().rev().step_by(64) {
        let (mut memory, host) = (Memory::new(), GlobalMut::new(host.0.as_mut_ptr()));
        let launch = reads_the_host(memory.output("out", 1), host);
        let report = launch.emulate_checked(&mut memory, [1, 1, 1], 128).unwrap_err();
        let text = report.to_string();
        assert_eq!(report.fault, Fault::OutOfBounds, "{text}");
        assert!(
            text.contains("read of 4 bytes at address 0x") && text.contains("in no buffer of this launch"),
            "{text}"
        );
    }
}
