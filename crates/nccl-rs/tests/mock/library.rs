// A mock of the CUDA driver and NCCL. Device memory is host memory, and ranks are threads of one process. Each call runs later
// on another thread; until then the communicator is in progress.
#![expect(non_snake_case, reason = "these are NCCL's names")]
use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::ffi::{c_char, c_void};
use std::sync::atomic::{AtomicI32, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::Duration;

macro_rules! succeed { ($($name:ident)*) => { $(#[unsafe(no_mangle)] pub extern "C" fn $name() -> u32 { 0 })* } }
succeed! { cuInit cuDeviceGet cuCtxSetCurrent cuDevicePrimaryCtxRelease_v2 cuStreamDestroy_v2 cuStreamSynchronize }
#[unsafe(no_mangle)] pub unsafe extern "C" fn cuDeviceGetCount(n: *mut i32) -> u32 { unsafe { *n = 1 }; 0 }
#[unsafe(no_mangle)] pub unsafe extern "C" fn cuDeviceGetName(n: *mut u8, _: i32, _: i32) -> u32 { unsafe { *n = b'x' }; 0 }
#[unsafe(no_mangle)] pub unsafe extern "C" fn cuDeviceTotalMem_v2(n: *mut usize, _: i32) -> u32 { unsafe { *n = 1 << 30 }; 0 }
#[unsafe(no_mangle)] pub unsafe extern "C" fn cuDeviceGetAttribute(n: *mut i32, _: i32, _: i32) -> u32 { unsafe { *n = 1 }; 0 }
#[unsafe(no_mangle)] pub unsafe extern "C" fn cuDevicePrimaryCtxRetain(c: *mut usize, _: i32) -> u32 { unsafe { *c = 1 }; 0 }
#[unsafe(no_mangle)] pub unsafe extern "C" fn cuStreamCreateWithPriority(s: *mut usize, _: u32, _: i32) -> u32 { unsafe { *s = STREAM }; 0 }
const STREAM: usize = 0x57;

#[unsafe(no_mangle)] pub unsafe extern "C" fn ncclGetVersion(n: *mut i32) -> i32 { unsafe { *n = if cfg!(old) { 21706 } else { 21805 } }; 0 }

#[repr(C)] #[derive(Clone, Copy)] pub struct Id([u8; 128]);
#[unsafe(no_mangle)] pub unsafe extern "C" fn ncclGetUniqueId(id: *mut Id) -> i32 {
    static NEXT: AtomicI32 = AtomicI32::new(1);
    let mut bytes = [7; 128];
    bytes[124..].copy_from_slice(&NEXT.fetch_add(1, SeqCst).to_le_bytes());
    unsafe { *id = Id(bytes) };
    0
}

#[repr(C)] pub struct Config { size: usize, magic: u32, version: u32, blocking: i32, cga: i32, min: i32, max: i32, net: *const u8, split: i32, padding: i32 }

/// The state shared by the ranks of one identifier.
#[derive(Default)] struct Meeting { state: Mutex<State>, changed: Condvar }
#[derive(Default)] struct State { given: HashMap<usize, Call>, done: u64, mail: HashMap<(usize, usize), VecDeque<Vec<f32>>> }
#[derive(Clone)] struct Call { name: &'static str, send: usize, recv: usize, count: usize, dtype: i32, op: i32 }

pub struct Comm { id: [u8; 128], splits: AtomicI32, rank: usize, ranks: usize, meeting: Arc<Meeting>, pending: Arc<AtomicI32>, status: Arc<AtomicI32>, last: Arc<Mutex<()>> }

fn meetings() -> &'static Mutex<HashMap<[u8; 128], Arc<Meeting>>> {
    static ALL: std::sync::OnceLock<Mutex<HashMap<[u8; 128], Arc<Meeting>>>> = std::sync::OnceLock::new();
    ALL.get_or_init(Mutex::default)
}

unsafe fn get(address: usize, i: usize, dtype: i32) -> f32 {
    match dtype {
        7 => unsafe { *(address as *const f32).add(i) },
        9 => f32::from_bits(u32::from(unsafe { *(address as *const u16).add(i) }) << 16),
        _ => panic!("type {dtype}"),
    }
}
unsafe fn put(address: usize, i: usize, dtype: i32, value: f32) {
    match dtype {
        7 => unsafe { *(address as *mut f32).add(i) = value },
        _ => unsafe { *(address as *mut u16).add(i) = (value.to_bits() >> 16) as u16 },
    }
}

impl Meeting {
    /// Blocks until all ranks have made the call. The last rank computes the results of all.
    fn join(&self, rank: usize, ranks: usize, call: Call) {
        let mut state = self.state.lock().unwrap();
        let round = state.done;
        state.given.insert(rank, call);
        if state.given.len() == ranks {
            let calls: Vec<Call> = (0..ranks).map(|r| state.given[&r].clone()).collect();
            state.given.clear();
            unsafe { compute(&calls) };
            state.done += 1;
            self.changed.notify_all();
            return;
        }
        drop(self.changed.wait_while(state, |state| state.done == round).unwrap());
    }
}

impl Meeting {
    /// Leaves the sent values for the receiver, or waits for those of the sender. `op` is the other rank.
    fn transfer(&self, rank: usize, Call { name, send, recv, count, dtype, op }: Call) {
        let mut state = self.state.lock().unwrap();
        if name == "send" {
            let values = (0..count).map(|i| unsafe { get(send, i, dtype) }).collect();
            state.mail.entry((rank, op as usize)).or_default().push_back(values);
            return self.changed.notify_all();
        }
        let from = (op as usize, rank);
        let is_empty = |state: &mut State| state.mail.get(&from).is_none_or(VecDeque::is_empty);
        let mut state = self.changed.wait_while(state, is_empty).unwrap();
        let values = state.mail.get_mut(&from).unwrap().pop_front().unwrap();
        assert_eq!(values.len(), count);
        for (i, value) in values.into_iter().enumerate() {
            unsafe { put(recv, i, dtype, value) };
        }
    }
}

unsafe fn compute(calls: &[Call]) {
    let Call { name, count, dtype, op, .. } = calls[0];
    let ranks = calls.len();
    let read = |rank: usize, i: usize| unsafe { get(calls[rank].send, i, dtype) };
    let reduced = |i: usize| {
        let sum: f32 = (0..ranks).map(|r| read(r, i)).sum();
        if op == 2 { return (0..ranks).map(|r| read(r, i)).fold(f32::MIN, f32::max) }
        if op == 4 { sum / ranks as f32 } else { sum }
    };
    let results: Vec<Vec<f32>> = (0..ranks).map(|rank| match name {
        "all_reduce" => (0..count).map(reduced).collect(),
        "reduce_scatter" => (rank * count..(rank + 1) * count).map(reduced).collect(),
        "all_gather" => (0..ranks).flat_map(|r| (0..count).map(move |i| (r, i))).map(|(r, i)| read(r, i)).collect(),
        "broadcast" => (0..count).map(|i| read(op as usize, i)).collect(),
        _ => Vec::new(),
    }).collect();
    for (call, values) in calls.iter().zip(results) {
        for (i, value) in values.into_iter().enumerate() {
            unsafe { put(call.recv, i, dtype, value) };
        }
    }
}

thread_local! { static GROUP: RefCell<Option<Vec<(usize, Call)>>> = const { RefCell::new(None) }; }

/// Runs the calls in order on another thread.
unsafe fn later(comm: usize, mut calls: Vec<Call>) -> i32 {
    // The transfers of a group do not wait for each other.
    calls.sort_by_key(|call| call.name != "send");
    let comm = unsafe { &*(comm as *const Comm) };
    let Comm { rank, ranks, .. } = *comm;
    let (meeting, pending, status, last) = (comm.meeting.clone(), comm.pending.clone(), comm.status.clone(), comm.last.clone());
    pending.fetch_add(1, SeqCst);
    let fails_later = calls.iter().any(|call| call.count == 17);
    thread::spawn(move || {
        let order = last.lock().unwrap();
        thread::sleep(Duration::from_millis(2));
        for call in calls {
            match call.name {
                _ if call.count == 13 => status.store(6, SeqCst),
                "send" | "recv" => meeting.transfer(rank, call),
                _ => meeting.join(rank, ranks, call),
            }
        }
        drop(order);
        pending.fetch_sub(1, SeqCst);
        // A network failure, long after the call has returned.
        if fails_later { thread::sleep(Duration::from_millis(50)); status.store(6, SeqCst) }
    });
    7
}
unsafe fn collective(comm: usize, call: Call, stream: usize) -> i32 {
    if stream != STREAM { return 4 }
    let noted = GROUP.with_borrow_mut(|group| group.as_mut().map(|calls| calls.push((comm, call.clone()))).is_some());
    if noted { 0 } else { unsafe { later(comm, vec![call]) } }
}

unsafe fn is_non_blocking(config: *const Config) -> bool {
    let Config { size, magic, version, blocking, cga, min, max, net, split, padding } = unsafe { config.read() };
    let open = [cga, min, max, split, padding];
    (size, magic, version, blocking) == (48, 0xcafebeef, 21800, 0) && net.is_null() && open == [i32::MIN; 5]
}
fn new_comm(id: [u8; 128], rank: usize, ranks: usize) -> *mut Comm {
    let meeting = meetings().lock().unwrap().entry(id).or_default().clone();
    let new = Comm { id, splits: AtomicI32::new(0), rank, ranks, meeting, pending: Arc::default(), status: Arc::default(), last: Arc::default() };
    Box::into_raw(Box::new(new))
}

/// The keys of the ranks that have joined a split, by its identifier.
static SPLITS: Mutex<Option<HashMap<[u8; 128], Vec<i32>>>> = Mutex::new(None);
/// Writes the new communicator on another thread, while the old one is in progress, as NCCL does.
#[unsafe(no_mangle)] pub unsafe extern "C" fn ncclCommSplit(comm: usize, color: i32, key: i32, new: usize, config: *mut Config) -> i32 {
    if !unsafe { is_non_blocking(config) } || color < 0 { return 4 }
    let parent = unsafe { &*(comm as *const Comm) };
    let mut id = parent.id;
    id[100..104].copy_from_slice(&(1 + parent.splits.fetch_add(1, SeqCst)).to_le_bytes());
    id[104..108].copy_from_slice(&color.to_le_bytes());
    SPLITS.lock().unwrap().get_or_insert_default().entry(id).or_default().push(key);
    let Comm { rank, ranks, .. } = *parent;
    let (meeting, pending) = (parent.meeting.clone(), parent.pending.clone());
    pending.fetch_add(1, SeqCst);
    thread::spawn(move || {
        meeting.join(rank, ranks, Call { name: "split", send: 0, recv: 0, count: 0, dtype: 7, op: 0 });
        thread::sleep(Duration::from_millis(5));
        let mut keys = SPLITS.lock().unwrap().as_ref().unwrap()[&id].clone();
        keys.sort_unstable();
        let raw = new_comm(id, keys.iter().position(|k| *k == key).unwrap(), keys.len());
        unsafe { *(new as *mut *mut Comm) = raw };
        pending.fetch_sub(1, SeqCst);
    });
    7
}
#[unsafe(no_mangle)] pub unsafe extern "C" fn ncclCommInitRankConfig(comm: *mut *mut c_void, ranks: i32, id: Id, rank: i32, config: *mut Config) -> i32 {
    if !unsafe { is_non_blocking(config) } { return 4 }
    let raw = new_comm(id.0, rank as usize, ranks as usize);
    unsafe { *comm = raw.cast() };
    unsafe { later(raw as usize, vec![Call { name: "init", send: 0, recv: 0, count: 0, dtype: 7, op: 0 }]) }
}
#[unsafe(no_mangle)] pub unsafe extern "C" fn ncclCommGetAsyncError(comm: usize, state: *mut i32) -> i32 {
    let comm = unsafe { &*(comm as *const Comm) };
    let failed = comm.status.load(SeqCst);
    unsafe { *state = if failed != 0 { failed } else if comm.pending.load(SeqCst) > 0 { 7 } else { 0 } };
    0
}
#[unsafe(no_mangle)] pub extern "C" fn ncclGetLastError(_: usize) -> *const c_char { c"the mock fails at 13\n".as_ptr() }
#[unsafe(no_mangle)] pub unsafe extern "C" fn ncclCommFinalize(comm: usize) -> i32 {
    unsafe { later(comm, vec![Call { name: "finalize", send: 0, recv: 0, count: 0, dtype: 7, op: 0 }]) }
}
static ENDED: [AtomicI32; 2] = [AtomicI32::new(0), AtomicI32::new(0)];
#[unsafe(no_mangle)] pub extern "C" fn ncclCommDestroy(_: usize) -> i32 { ENDED[0].fetch_add(1, SeqCst); 0 }
#[unsafe(no_mangle)] pub extern "C" fn ncclCommAbort(_: usize) -> i32 { ENDED[1].fetch_add(1, SeqCst); 0 }
/// Returns the number of destroyed (0) or aborted (1) communicators.
#[unsafe(no_mangle)] pub extern "C" fn mockEnded(i: usize) -> i32 { ENDED[i].load(SeqCst) }

#[unsafe(no_mangle)] pub unsafe extern "C" fn ncclAllReduce(send: usize, recv: usize, count: usize, dtype: i32, op: i32, comm: usize, stream: usize) -> i32 {
    unsafe { collective(comm, Call { name: "all_reduce", send, recv, count, dtype, op }, stream) }
}
#[unsafe(no_mangle)] pub unsafe extern "C" fn ncclReduceScatter(send: usize, recv: usize, count: usize, dtype: i32, op: i32, comm: usize, stream: usize) -> i32 {
    unsafe { collective(comm, Call { name: "reduce_scatter", send, recv, count, dtype, op }, stream) }
}
#[unsafe(no_mangle)] pub unsafe extern "C" fn ncclAllGather(send: usize, recv: usize, count: usize, dtype: i32, comm: usize, stream: usize) -> i32 {
    unsafe { collective(comm, Call { name: "all_gather", send, recv, count, dtype, op: 0 }, stream) }
}
#[unsafe(no_mangle)] pub unsafe extern "C" fn ncclBroadcast(send: usize, recv: usize, count: usize, dtype: i32, root: i32, comm: usize, stream: usize) -> i32 {
    unsafe { collective(comm, Call { name: "broadcast", send, recv, count, dtype, op: root }, stream) }
}
#[unsafe(no_mangle)] pub unsafe extern "C" fn ncclSend(send: usize, count: usize, dtype: i32, to: i32, comm: usize, stream: usize) -> i32 {
    unsafe { collective(comm, Call { name: "send", send, recv: 0, count, dtype, op: to }, stream) }
}
#[unsafe(no_mangle)] pub unsafe extern "C" fn ncclRecv(recv: usize, count: usize, dtype: i32, from: i32, comm: usize, stream: usize) -> i32 {
    unsafe { collective(comm, Call { name: "recv", send: 0, recv, count, dtype, op: from }, stream) }
}
#[unsafe(no_mangle)] pub extern "C" fn ncclGroupStart() -> i32 { GROUP.set(Some(Vec::new())); 0 }
#[unsafe(no_mangle)] pub unsafe extern "C" fn ncclGroupEnd() -> i32 {
    let calls = GROUP.take().unwrap();
    let Some((comm, _)) = calls.first().cloned() else { return 0 };
    unsafe { later(comm, calls.into_iter().map(|(_, call)| call).collect()) }
}
