#!/usr/bin/env python3
"""The planted faults that Triton can express, for ConSan and triton-viz.

    triton_faults.py consan OUTPUT [--jobs 16] [--seconds 240] [--faults LIST]    on a machine with a Hopper GPU
    triton_faults.py viz OUTPUT [--faults LIST]                                   on a CPU, with triton-viz
    triton_faults.py compile                        compiles the kernels for sm_90a with ConSan, without a GPU

OUTPUT is a table in Markdown. LIST is the output of `planted-faults list`: a second table counts the faults by what the emulator reports.
Needs PyTorch, Triton 3.6 and a C compiler. The kernels have the names of those in kernels/ and of crates/cuda_std/tests/emulator/hopper.rs (Planted,
Misuse, Stage, OneOfTwo). The compiler of Triton places barriers within a partition of warps, fences of the asynchronous proxy, and the
waits for accumulators, so faults that leave them out cannot be expressed. Each run is a process of its own: a report of ConSan is a
failed assertion, after which CUDA cannot be used.
"""

import argparse
import os
import re
import signal
import sys
import tempfile
import time

if sys.argv[1:2] in (["consan"], ["compile"]):
    os.environ.update(TRITON_INSTRUMENTATION_MODE="consan", CUDA_LAUNCH_BLOCKING="1", TRITON_ALWAYS_COMPILE="1")

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import ampere, hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

STAGE = gl.constexpr(256)
CHUNKS = gl.constexpr(5)
COPY_LAYOUT = gl.constexpr(gl.BlockedLayout([4], [32], [2], [0]))


@gluon.jit
def copy_chunk(stages, inp, index, CHUNK: gl.constexpr, FAULT: gl.constexpr):
    stage: gl.constexpr = (CHUNK - 1) % 2 if FAULT == "RefillsCurrentStage" and CHUNK > 0 else CHUNK % 2
    if FAULT == "NoCommit" and CHUNK > 0:
        ampere.async_copy.commit_group()
    end: gl.constexpr = STAGE if CHUNK < CHUNKS or FAULT == "BeyondLastChunk" else 0
    ampere.async_copy.async_copy_global_to_shared(stages.index(stage), inp + CHUNK * STAGE + index, mask=index < end)
    if FAULT != "NoCommit" or CHUNK == 0:
        ampere.async_copy.commit_group()
    if FAULT == "StoresToStageInFlight":
        stages.index(stage).store(gl.zeros([STAGE], gl.float32, COPY_LAYOUT))


@gluon.jit
def read_chunk(stages, inp, index, CHUNK: gl.constexpr, FAULT: gl.constexpr):
    has_next: gl.constexpr = CHUNK + 1 < CHUNKS or FAULT == "BeyondLastChunk" or FAULT == "NeverWaitsForLast"
    if has_next:
        copy_chunk(stages, inp, index, CHUNK + 1, FAULT)
    if FAULT == "WaitsForOneTooFew":
        ampere.async_copy.wait_group(2)
    elif FAULT == "NoWait":
        pass
    elif has_next or FAULT == "LastWaitAsOthers":
        ampere.async_copy.wait_group(1)
    else:
        ampere.async_copy.wait_group(0)
    return stages.index((CHUNK + 1) % 2 if FAULT == "ReadsOtherStage" else CHUNK % 2).load(COPY_LAYOUT)


@gluon.jit
def pipeline(out, inp, FAULT: gl.constexpr):
    """Adds elements of chunks of the input. The next chunk is copied while the current one is read."""
    stages = gl.allocate_shared_memory(gl.float32, [2, STAGE], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    index = gl.arange(0, STAGE, COPY_LAYOUT)
    total = gl.zeros([STAGE], gl.float32, COPY_LAYOUT)
    copy_chunk(stages, inp, index, 0, FAULT)
    for chunk in gl.static_range(CHUNKS):
        total += read_chunk(stages, inp, index, chunk, FAULT)
    gl.store(out + index, total)


def run_pipeline(fault, device):
    inp = torch.arange(5 * 256, dtype=torch.float32, device=device)
    out = torch.zeros(256, device=device)
    pipeline[(1, )](out, inp, FAULT=fault, num_warps=2)
    return torch.equal(out, inp.view(5, 256).sum(0))


SLOTS = gl.constexpr(2)
ROUNDS = gl.constexpr(6)
WORDS = gl.constexpr(128)
SLOT_LAYOUT = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def write_slot(values, full, empty, inp, ROUND: gl.constexpr, FAULT: gl.constexpr):
    slot: gl.constexpr = ROUND % SLOTS
    parity: gl.constexpr = ROUND // SLOTS % 2
    index = gl.arange(0, WORDS, SLOT_LAYOUT)
    if ROUND >= SLOTS and FAULT != "NoWaitForEmpty":
        mbarrier.wait(empty.index(slot), parity if FAULT == "EmptyParityWrong" else 1 - parity)
    for half in gl.static_range(2):
        word = gl.load(inp + (2 * ROUND + half) * WORDS + index)
        if FAULT == "ArrivesBeforeWrite":
            mbarrier.arrive(full.index(slot), count=1)
        values.index(2 * slot + half).store(word)
        if FAULT != "ArrivesBeforeWrite":
            mbarrier.arrive(full.index(slot), count=1)


@gluon.jit
def read_slot(values, full, empty, out, ROUND: gl.constexpr, FAULT: gl.constexpr):
    slot: gl.constexpr = ROUND % SLOTS
    parity: gl.constexpr = ROUND // SLOTS % 2
    index = gl.arange(0, WORDS, SLOT_LAYOUT)
    mbarrier.wait(full.index(slot), 0 if FAULT == "ParityNotFlipped" else ROUND % 2 if FAULT == "ParityOfRound" else parity)
    if FAULT == "ArrivesBeforeRead":
        mbarrier.arrive(empty.index(slot), count=1)
    first = values.index(2 * slot).load(SLOT_LAYOUT)
    second = values.index(2 * slot + 1).load(SLOT_LAYOUT)
    gl.store(out + 2 * ROUND * WORDS + index, first)
    gl.store(out + (2 * ROUND + 1) * WORDS + index, second)
    if FAULT != "ArrivesBeforeRead":
        mbarrier.arrive(empty.index(slot), count=1)


@gluon.jit
def write_slots(values, full, empty, inp, FAULT: gl.constexpr):
    for round in gl.static_range(ROUNDS):
        write_slot(values, full, empty, inp, round, FAULT)


@gluon.jit
def read_slots(values, full, empty, out, FAULT: gl.constexpr):
    for round in gl.static_range(ROUNDS):
        read_slot(values, full, empty, out, round, FAULT)


@gluon.jit
def mbarriers(out, inp, FAULT: gl.constexpr):
    """A partition of warps writes the two halves of a slot, and arrives after each. Another one reads both."""
    values = gl.allocate_shared_memory(gl.int32, [2 * SLOTS, WORDS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    arrivals: gl.constexpr = 3 if FAULT == "OneArrivalTooMany" else 1 if FAULT == "OneArrivalTooFew" else 2
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=arrivals)
        mbarrier.init(empty.index(slot), count=1)
    gl.warp_specialize([(read_slots, (values, full, empty, out, FAULT)),
                        (write_slots, (values, full, empty, inp, FAULT))], [4], [32])


def run_mbarriers(fault, device):
    inp = torch.arange(12 * 128, dtype=torch.int32, device=device)
    out = torch.zeros_like(inp)
    mbarriers[(1, )](out, inp, FAULT=fault, num_warps=4)
    return torch.equal(out, inp)


SIDE = gl.constexpr(64)


@gluon.jit
def index_of(LAYOUT: gl.constexpr):
    """Returns the index of each element of a tile."""
    rows = gl.arange(0, SIDE, gl.SliceLayout(1, LAYOUT))
    return rows[:, None] * SIDE + gl.arange(0, SIDE, gl.SliceLayout(0, LAYOUT))[None, :]


@gluon.jit
def planted(inp, out, sink, FAULT: gl.constexpr):
    """Loads a tile by TMA, adds 1, and stores it by TMA."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    tile = gl.allocate_shared_memory(gl.float16, [SIDE, SIDE], inp.layout)
    barriers = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    index = index_of(layout)
    barrier = barriers.index(0)
    # ConSan does not compile a kernel that initializes no barrier at all.
    mbarrier.init(barriers.index(1 if FAULT == "NotInitialized" else 0), count=1)
    if FAULT != "NobodyArrives":
        mbarrier.expect(barrier, SIDE * SIDE * 2 + (16 if FAULT == "TooFewBytes" else 0))
    if FAULT == "ArrivesTwice":
        mbarrier.arrive(barrier, count=1)
    tma.async_copy_global_to_shared(inp, [0, 0], barrier, tile)
    if FAULT == "ReadBeforeWait":
        gl.store(sink + index, tile.load(layout))
    if FAULT != "NobodyWaits":
        mbarrier.wait(barrier, 0)
        tile.store(tile.load(layout) + 1.0)
        hopper.fence_async_shared()
        tma.async_copy_shared_to_global(out, [0, 0], tile)
        if FAULT == "StoreOverwritten":
            tile.store(gl.zeros([SIDE, SIDE], gl.float16, layout))
        if FAULT != "StoreNotWaited":
            tma.store_wait(0)


@gluon.jit
def one_of_two(inp, out, sink, FAULT: gl.constexpr):
    """Loads two tiles by TMA, each with its own barrier, and reads the second."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    tiles = gl.allocate_shared_memory(gl.float16, [2, SIDE, SIDE], inp.layout)
    barriers = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    index = index_of(layout)
    for i in gl.static_range(2):
        mbarrier.init(barriers.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.expect(barriers.index(i), SIDE * SIDE * 2)
        tma.async_copy_global_to_shared(inp, [0, 0], barriers.index(i), tiles.index(i))
    mbarrier.wait(barriers.index(0), 0)
    if FAULT != "WaitsForOne":
        mbarrier.wait(barriers.index(1), 0)
    gl.store(sink + index, tiles.index(1).load(layout))
    if FAULT == "WaitsForOne":
        mbarrier.wait(barriers.index(1), 0)


def tiles_of(device, rows=64):
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    inp = torch.arange(rows * 64, device=device).remainder(64).to(torch.float16).view(rows, 64)
    out = torch.zeros_like(inp)
    descriptor = gluon.nvidia.hopper.TensorDescriptor.from_tensor
    return inp, out, descriptor(inp, [64, 64], layout), descriptor(out, [64, 64], layout)


def run_planted(fault, device):
    inp, out, inp_map, out_map = tiles_of(device)
    planted[(1, )](inp_map, out_map, torch.zeros_like(inp), FAULT=fault, num_warps=4)
    return torch.equal(out, inp + 1)


def run_one_of_two(fault, device):
    inp, out, inp_map, out_map = tiles_of(device)
    one_of_two[(1, )](inp_map, out_map, out, FAULT=fault, num_warps=4)
    return torch.equal(out, inp)


@gluon.jit
def misuse(inp, out, FAULT: gl.constexpr):
    """Multiplies a tile by itself, with wgmma."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    tile = gl.allocate_shared_memory(gl.float16, [SIDE, SIDE], inp.layout)
    barrier = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(barrier, count=1)
    mbarrier.expect(barrier, SIDE * SIDE * 2)
    tma.async_copy_global_to_shared(inp, [0, 0], barrier, tile)
    mbarrier.wait(barrier, 0)
    acc = hopper.warpgroup_mma(tile, tile, gl.zeros([SIDE, SIDE], gl.float32, layout), is_async=True)
    if FAULT != "NeverWaited":
        acc = hopper.warpgroup_mma_wait(0, deps=(acc, ))
        gl.store(out + index_of(layout), acc)


def run_misuse(fault, device):
    inp, _, inp_map, _ = tiles_of(device)
    out = torch.zeros(64, 64, device=device)
    misuse[(1, )](inp_map, out, FAULT=fault, num_warps=4)
    return torch.equal(out, inp.float() @ inp.float())


@gluon.jit
def load_stage(inp, tile, full, empty):
    for round in gl.static_range(3):
        mbarrier.wait(empty, (round + 1) % 2)
        mbarrier.expect(full, SIDE * SIDE * 2)
        tma.async_copy_global_to_shared(inp, [SIDE * round, 0], full, tile)


@gluon.jit
def multiply_stage(out, tile, full, empty, FAULT: gl.constexpr):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    first = gl.zeros([SIDE, SIDE], gl.float32, layout)
    second = gl.zeros([SIDE, SIDE], gl.float32, layout)
    for round in gl.static_range(3):
        mbarrier.wait(full, round % 2)
        one = hopper.warpgroup_mma(tile, tile, first, is_async=True)
        two = hopper.warpgroup_mma(tile, tile, second, is_async=True)
        if FAULT == "ReleasedBeforeWait":
            mbarrier.arrive(empty, count=1)
        if FAULT == "ReleasedAfterFirst":
            first = hopper.warpgroup_mma_wait(1, deps=(one, ))
            mbarrier.arrive(empty, count=1)
            second = hopper.warpgroup_mma_wait(0, deps=(two, ))
        else:
            first, second = hopper.warpgroup_mma_wait(0, deps=(one, two))
        if FAULT == "Correct":
            mbarrier.arrive(empty, count=1)
    index = index_of(layout)
    gl.store(out + index, first + second)


@gluon.jit
def stage(inp, out, FAULT: gl.constexpr):
    """A partition of warps loads three tiles into one stage, another one issues two wgmma for each."""
    tile = gl.allocate_shared_memory(gl.float16, [SIDE, SIDE], inp.layout)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    mbarrier.init(empty, count=1)
    gl.warp_specialize([(multiply_stage, (out, tile, full, empty, FAULT)),
                        (load_stage, (inp, tile, full, empty))], [4], [32])


def run_stage(fault, device):
    inp, _, inp_map, _ = tiles_of(device, 3 * 64)
    out = torch.zeros(64, 64, device=device)
    stage[(1, )](inp_map, out, FAULT=fault, num_warps=4)
    return torch.equal(out, sum(2 * tile.float() @ tile.float() for tile in inp.view(3, 64, 64)))


@triton.jit
def last_block(out, partial, arrived, inp, FAULT: tl.constexpr, COLUMNS: tl.constexpr, BLOCKS: tl.constexpr):
    """Sums the columns of a matrix. The last block to arrive adds the partial sums of all blocks."""
    t = tl.arange(0, COLUMNS)
    block = tl.program_id(0)
    value = tl.load(inp + 2 * block * COLUMNS + t) + tl.load(inp + (2 * block + 1) * COLUMNS + t)
    if FAULT != "TicketBeforeData":
        tl.store(partial + block * COLUMNS + t, value)
    if FAULT == "NoWriterFence":
        ticket = tl.atomic_add(arrived, 1, sem="acquire")
    elif FAULT == "NoReaderFence":
        ticket = tl.atomic_add(arrived, 1, sem="release")
    elif FAULT == "WriterFenceOfBlock":
        ticket = tl.atomic_add(arrived, 1, sem="acq_rel", scope="cta")
    elif FAULT == "PlainCounter":
        ticket = tl.load(arrived)
        tl.store(arrived, ticket + 1)
    else:
        ticket = tl.atomic_add(arrived, 1, sem="acq_rel")
    if FAULT == "TicketBeforeData":
        tl.store(partial + block * COLUMNS + t, value)
    if FAULT == "ResetByFirst":
        if ticket == 0:
            tl.atomic_xchg(arrived, 0, sem="relaxed")
    if FAULT == "LastIsNumberOfBlocks":
        is_last = ticket == BLOCKS
    elif FAULT == "LastIsOneTooEarly":
        is_last = ticket == BLOCKS - 2
    elif FAULT == "LastBlockByNumber":
        is_last = block == BLOCKS - 1
    else:
        is_last = ticket == BLOCKS - 1
    if is_last:
        total = tl.zeros([COLUMNS], tl.int32)
        for b in range(BLOCKS):
            total += tl.load(partial + b * COLUMNS + t)
        tl.store(out + t, total)
        if FAULT != "CounterNotReset" and FAULT != "ResetByFirst":
            tl.atomic_xchg(arrived, 0, sem="relaxed")


def run_last_block(fault, device, kernel=None):
    out, arrived = torch.zeros(64, dtype=torch.int32, device=device), torch.zeros(1, dtype=torch.int32, device=device)
    right = True
    for launch in range(2):
        partial = torch.full((6 * 64, ), -1, dtype=torch.int32, device=device)
        inp = (torch.arange(12 * 64, dtype=torch.int32, device=device) * 7919 % 101) + launch
        (kernel or last_block)[(6, )](out, partial, arrived, inp, FAULT=fault, COLUMNS=64, BLOCKS=6)
        right = right and torch.equal(out, inp.view(12, 64).sum(0, dtype=torch.int32))
    return right


@triton.jit
def histogram(bins, inp, FAULT: tl.constexpr, COUNT: tl.constexpr):
    """Counts values, with atomics in global memory."""
    value = tl.load(inp + tl.program_id(0) * COUNT + tl.arange(0, COUNT))
    if FAULT == "BeyondLastBin":
        tl.atomic_add(bins + value + 1, 1)
    elif FAULT == "NonatomicMerge":
        count = tl.histogram(value, 64)
        bin = tl.arange(0, 64)
        tl.store(bins + bin, tl.load(bins + bin) + count)
    elif FAULT == "MergesHalf":
        tl.atomic_add(bins + value, 1, mask=value < 32)
    else:
        tl.atomic_add(bins + value, 1)


def run_histogram(fault, device, kernel=None):
    inp = (torch.arange(1024, dtype=torch.int32, device=device) * 7919 % 4093) % 64
    bins = torch.zeros(64, dtype=torch.int32, device=device)
    (kernel or histogram)[(4, )](bins, inp, FAULT=fault, COUNT=256)
    return torch.equal(bins.cpu().long(), torch.bincount(inp.cpu().long(), minlength=64))


@triton.jit
def chunks(out, inp, FAULT: tl.constexpr, STAGE: tl.constexpr, CHUNKS: tl.constexpr):
    """Adds elements of chunks of the input, whose copies the compiler schedules."""
    index = tl.arange(0, STAGE)
    total = tl.zeros([STAGE], tl.float32)
    for chunk in range(CHUNKS + 1 if FAULT == "BeyondLastChunk" else CHUNKS):
        total += tl.load(inp + chunk * STAGE + index)
    tl.store(out + index, total)


def run_chunks(fault, device, kernel=None):
    inp = torch.arange(5 * 256, dtype=torch.float32, device=device)
    out = torch.zeros(256, device=device)
    (kernel or chunks)[(1, )](out, inp, FAULT=fault, STAGE=256, CHUNKS=5)
    return torch.equal(out, inp.view(5, 256).sum(0))


@triton.jit
def tile_bytes(out, inp, FAULT: tl.constexpr, THREADS: tl.constexpr):
    """Writes bytes at their mirrored positions."""
    t = tl.arange(0, THREADS)
    byte = (tl.load(inp + t) // 2).to(tl.int8)
    at = THREADS - 1 - t
    if FAULT == "BeyondLastByte":
        tl.store(out + at + 1, byte)
    elif FAULT == "GlobalByteTwice":
        tl.store(out + at % 63, byte)
    elif FAULT == "UnwrittenByte":
        tl.store(out + at, byte, mask=t < THREADS - 1)
    else:
        tl.store(out + at, byte)


def run_bytes(fault, device, kernel=None):
    inp = torch.arange(64, dtype=torch.int32, device=device) * 37 % 256
    out = torch.full((64, ), -1, dtype=torch.int8, device=device)
    (kernel or tile_bytes)[(1, )](out, inp, FAULT=fault, THREADS=64)
    return torch.equal(out, (inp.flip(0) // 2).to(torch.int8))


# Kernel: where its faults are planted, how to run it, whether ConSan and triton-viz can, and its faults.
KERNELS = {
    "Pipeline": ("within", run_pipeline, "consan", "WaitsForOneTooFew NoWait LastWaitAsOthers NoCommit ReadsOtherStage "
                 "RefillsCurrentStage BeyondLastChunk StoresToStageInFlight NeverWaitsForLast"),
    "Barriers": ("within", run_mbarriers, "consan", "NoWaitForEmpty ArrivesBeforeWrite ArrivesBeforeRead ParityNotFlipped "
                 "ParityOfRound EmptyParityWrong OneArrivalTooMany OneArrivalTooFew"),
    "Planted": ("hopper", run_planted, "consan", "TooFewBytes NotInitialized ArrivesTwice ReadBeforeWait NobodyWaits "
                "StoreNotWaited StoreOverwritten NobodyArrives"),
    "OneOfTwo": ("hopper", run_one_of_two, "consan", "WaitsForOne"),
    "Misuse": ("hopper", run_misuse, "consan", "NeverWaited"),
    "Stage": ("hopper", run_stage, "consan", "ReleasedBeforeWait ReleasedAfterFirst"),
    "LastBlock": ("between", run_last_block, "consan viz", "NoWriterFence NoReaderFence WriterFenceOfBlock TicketBeforeData "
                  "LastIsNumberOfBlocks LastIsOneTooEarly CounterNotReset ResetByFirst PlainCounter LastBlockByNumber"),
    "Histogram": ("between", run_histogram, "consan viz", "BeyondLastBin NonatomicMerge MergesHalf"),
    "Chunks": ("within", run_chunks, "viz", "BeyondLastChunk"),
    "Bytes": ("within", run_bytes, "viz", "BeyondLastByte GlobalByteTwice UnwrittenByte"),
}
JIT = {"LastBlock": last_block, "Histogram": histogram, "Chunks": chunks, "Bytes": tile_bytes}


def allocate(size, alignment, stream):
    """ConSan keeps its state in global memory."""
    return torch.zeros(size, dtype=torch.int8, device="cuda")


def run_consan(kernel, fault):
    triton.set_allocator(allocate)
    right = KERNELS[kernel][1](fault, "cuda")
    torch.cuda.synchronize()
    return "right" if right else "wrong"


def run_viz(kernel, fault):
    import triton_viz
    from triton_viz.clients import Sanitizer
    sanitizer = Sanitizer(abort_on_error=False)
    KERNELS[kernel][1](fault, "cpu", triton_viz.trace(client=sanitizer)(JIT[kernel]))
    for record in sanitizer.records:
        print("report: out-of-bounds access of", getattr(record, "tensor_name", None) or "a tensor")
    return "checked"  # The sanitizer executes symbolically: there are no results.


def child(run, kernel, fault, output):
    """Runs a fault in a forked process, whose output goes to a file."""
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    try:
        print(run(kernel, fault), flush=True)
    except BaseException as error:
        print(f"error: {type(error).__name__}: {str(error)[:300]}", flush=True)
    os._exit(0)


MESSAGE = re.compile(r"(?:[Aa]ssertion `?(?:failed: )?)?(Buffer being accessed has outstanding \w+|Accessing buffer with pending access[^`\n]*"
                     r"|Barrier is being reused[^`\n]*|Deadlock detected[^`\n]*|[Bb]arrier[^`\n]*not initialized[^`\n]*"
                     r"|report: [^\n]*|Assertion[^\n]*)")


def run_all(tool, run, jobs, limit, seconds):
    """Returns what `run` printed for each fault: (kernel, fault, report, result)."""
    waiting = [(kernel, fault) for kernel, (_, _, tools, faults) in KERNELS.items() if tool in tools.split()
               for fault in ["Correct", *faults.split()]]
    running, results, end = [], [], time.monotonic() + seconds
    while waiting or running:
        while waiting and len(running) < jobs and time.monotonic() < end:
            kernel, fault = waiting.pop(0)
            output = tempfile.TemporaryFile()
            running.append((child(run, kernel, fault, output), kernel, fault, output, time.monotonic()))
        if time.monotonic() > end:
            results.extend((kernel, fault, "", "not run") for kernel, fault in waiting)
            waiting = []
        time.sleep(0.05)
        for item in list(running):
            pid, kernel, fault, output, start = item
            ended = os.waitpid(pid, os.WNOHANG)[0] == pid
            killed = not ended and (time.monotonic() - start > limit or time.monotonic() > end)
            if killed:
                try:
                    os.killpg(pid, signal.SIGKILL)
                except ProcessLookupError:
                    os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            if ended or killed:
                running.remove(item)
                text = os.pread(output.fileno(), 1 << 20, 0).decode(errors="replace")
                match = MESSAGE.search(text)
                last = [line for line in text.splitlines() if line in ("right", "wrong", "checked") or line.startswith("error: ")]
                result = "hang" if killed else last[-1] if last else "died: " + text[-200:]
                results.append((kernel, fault, match[1] if match else "", result))
    order = [(kernel, fault) for kernel, (_, _, _, faults) in KERNELS.items() for fault in ["Correct", *faults.split()]]
    return sorted(results, key=lambda result: order.index(result[:2]))


def by_kind(results, path):
    """Returns the reports and results by the place of the fault and what the emulator reports."""
    kinds = {}
    if path:
        with open(path) as file:
            kinds = {tuple(line.split("\t")[1:3]): line.split("\t")[3] for line in file}
    groups = {}
    for kernel, fault, report, result in results:
        kind = kinds.get((kernel.replace("Chunks", "Pipeline"), fault), "Correct" if fault == "Correct" else "")
        groups.setdefault((KERNELS[kernel][0], kind), []).append((report, result))
    return groups


def compile_all():
    """Compiles each kernel of Gluon, so that errors show on a machine without a GPU."""
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    tile = f"tensordesc<fp16[64, 64],{layout!r}>"
    signatures = {
        "Pipeline": (pipeline, ["*fp32", "*fp32"], 2), "Barriers": (mbarriers, ["*i32", "*i32"], 4),
        "Planted": (planted, [tile, tile, "*fp16"], 4), "OneOfTwo": (one_of_two, [tile, tile, "*fp16"], 4),
        "Misuse": (misuse, [tile, "*fp32"], 4), "Stage": (stage, [tile, "*fp32"], 4),
    }
    for name, (kernel, types, warps) in signatures.items():
        for fault in ["Correct", *KERNELS[name][3].split()]:
            signature = dict(zip(kernel.arg_names, [*types, "constexpr"]))
            start = time.monotonic()
            try:
                triton.compile(GluonASTSource(kernel, signature, {"FAULT": fault}), target=GPUTarget("cuda", 90, 32),
                               options={"num_warps": warps, "instrumentation_mode": "consan"})
                print(f"{name} {fault}: compiled in {time.monotonic() - start:.1f} s", flush=True)
            except Exception as error:
                print(f"{name} {fault}: {type(error).__name__}: {error}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tool", choices=["consan", "viz", "compile"])
    parser.add_argument("output", nargs="?")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--faults")
    options = parser.parse_args()
    if options.tool == "compile":
        compile_all()
        return
    # A hang is reported by ConSan itself. The limit includes the compilation.
    run, limit = (run_consan, 60) if options.tool == "consan" else (run_viz, 60)
    results = run_all(options.tool, run, options.jobs, limit, options.seconds)
    lines = ["| place | kernel | fault | report | result |", "|---|---|---|---|---|"]
    for kernel, fault, report, result in results:
        cells = [KERNELS[kernel][0], kernel, fault, report or "none", " ".join(result.split())[:200]]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    lines += ["", "| place | the emulator reports | faults run | reported | wrong, hang or error without a report |", "|---|---|---|---|---|"]
    for (place, kind), of in sorted(by_kind(results, options.faults).items()):
        reported = sum(bool(report) for report, _ in of)
        others = sum(not report and result not in ("right", "checked") for report, result in of)
        lines.append(f"| {place} | {kind} | {len(of)} | {reported} | {others} |")
    text = "\n".join(lines) + "\n"
    print(text)
    if options.output:
        with open(options.output, "w") as file:
            file.write(text)


main()
