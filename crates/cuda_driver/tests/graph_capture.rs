//! Stream capture with a mock driver. A capture becomes a graph or an error, and each handle is destroyed once.

mod common;

use common::build;
use cuda_driver::{Gpu, Stream};

const ONE_GPU: &str = include_str!("common/one_gpu.rs");

/// Handles are numbers. The mock logs each call that creates, uses or destroys one. Every second capture fails.
const SOURCE: &str = r#"
use std::sync::Mutex;
static LOG: Mutex<(usize, String)> = Mutex::new((0, String::new()));
fn log(what: &str, handle: usize) -> u32 { LOG.lock().unwrap().1.push_str(&format!("{what} {handle}\n")); 0 }
unsafe fn make(what: &str, to: *mut usize) -> u32 {
    let handle = { let mut log = LOG.lock().unwrap(); log.0 += 1; log.0 };
    unsafe { *to = handle };
    log(what, handle)
}
#[unsafe(no_mangle)] pub unsafe extern "C" fn take_log(to: *mut u8, room: usize) -> usize {
    let text = std::mem::take(&mut LOG.lock().unwrap().1);
    assert!(text.len() <= room);
    unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), to, text.len()) };
    text.len()
}
#[unsafe(no_mangle)] pub unsafe extern "C" fn cuStreamCreateWithPriority(to: *mut usize, flags: u32, priority: i32) -> u32 {
    assert_eq!((flags, priority), (1, 0), "a non-blocking stream of default priority");
    unsafe { make("stream", to) }
}
#[unsafe(no_mangle)] pub extern "C" fn cuStreamDestroy_v2(stream: usize) -> u32 { log("destroy stream", stream) }
#[unsafe(no_mangle)] pub extern "C" fn cuStreamBeginCapture_v2(stream: usize, mode: u32) -> u32 { assert_eq!(mode, 1); log("begin", stream) }
#[unsafe(no_mangle)] pub unsafe extern "C" fn cuStreamEndCapture(_: usize, to: *mut usize) -> u32 {
    static ENDS: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);
    if ENDS.fetch_add(1, std::sync::atomic::Ordering::Relaxed) % 2 == 1 { return log("fail", 0) + 901 }
    unsafe { make("graph", to) }
}
#[unsafe(no_mangle)] pub extern "C" fn cuGraphDestroy(graph: usize) -> u32 { log("destroy graph", graph) }
#[unsafe(no_mangle)] pub unsafe extern "C" fn cuGraphInstantiateWithFlags(to: *mut usize, graph: usize, flags: u64) -> u32 {
    assert_eq!(flags, 0); log("instantiate", graph); unsafe { make("exec", to) }
}
#[unsafe(no_mangle)] pub extern "C" fn cuGraphUpload(exec: usize, stream: usize) -> u32 { log("upload", exec); log("on", stream) }
#[unsafe(no_mangle)] pub extern "C" fn cuGraphLaunch(exec: usize, stream: usize) -> u32 { log("launch", exec); log("on", stream) }
#[unsafe(no_mangle)] pub extern "C" fn cuGraphExecDestroy(exec: usize) -> u32 { log("destroy exec", exec) }
"#;

#[test]
fn a_capture_becomes_a_graph_or_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let path = build(dir.path(), &[ONE_GPU, SOURCE].concat());
    cuda_driver::load_from(&path).unwrap();
    // SAFETY: the library is already loaded.
    let library = unsafe { libloading::Library::new(&path) }.unwrap();
    // SAFETY: the mock defines the function with this signature.
    let take = unsafe { library.get::<unsafe extern "C" fn(*mut u8, usize) -> usize>(b"take_log") }.unwrap();
    let log = || {
        let mut bytes = vec![0; 4096];
        // SAFETY: the buffer has `bytes.len()` bytes.
        let len = unsafe { take(bytes.as_mut_ptr(), bytes.len()) };
        String::from_utf8(bytes[..len].to_vec()).unwrap().lines().map(str::to_owned).collect::<Vec<_>>()
    };

    let gpu = Gpu::open(0).unwrap();
    let stream = Stream::new(&gpu).unwrap();
    stream.begin_capture().unwrap();
    let graph = stream.end_capture().unwrap();
    let mut exec = graph.instantiate().unwrap();
    drop(graph);
    exec.upload(&stream).unwrap();
    for _ in 0..2 {
        // SAFETY: the captured work accesses no memory.
        unsafe { exec.launch(&stream) }.unwrap();
    }
    let launch = ["launch 3", "on 1"];
    let made = ["stream 1", "begin 1", "graph 2", "instantiate 2", "exec 3", "destroy graph 2", "upload 3", "on 1"];
    assert_eq!(log(), [&made[..], &launch, &launch].concat());

    // The driver reports that the capture failed, and creates no graph.
    stream.begin_capture().unwrap();
    let error = stream.end_capture().err().unwrap();
    assert_eq!(error.code(), Some(901));
    assert!(error.to_string().starts_with("cuStreamEndCapture: "), "{error}");
    assert_eq!(log(), ["begin 1", "fail 0"]);

    drop((exec, stream));
    assert_eq!(log(), ["destroy exec 3", "destroy stream 1"]);
}
