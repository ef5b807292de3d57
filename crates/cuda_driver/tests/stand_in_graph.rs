//! Recordings through a stand-in driver: what is made of a capture that the driver accepts and of one that it refuses, and
//! that every handle is given back once.

mod common;

use common::build;
use cuda_driver::{Gpu, Stream};

/// Handles are numbers; a call that makes, uses or destroys one is noted with it. Every second capture comes to nothing.
const SOURCE: &str = r#"
use std::ffi::c_void;
use std::sync::Mutex;
static NOTES: Mutex<(usize, String)> = Mutex::new((0, String::new()));
fn note(what: &str, handle: usize) -> u32 { NOTES.lock().unwrap().1.push_str(&format!("{what} {handle}\n")); 0 }
unsafe fn make(what: &str, to: *mut usize) -> u32 {
    let handle = { let mut notes = NOTES.lock().unwrap(); notes.0 += 1; notes.0 };
    unsafe { *to = handle };
    note(what, handle)
}
#[unsafe(no_mangle)] pub unsafe extern "C" fn take_notes(to: *mut u8, room: usize) -> usize {
    let text = std::mem::take(&mut NOTES.lock().unwrap().1);
    assert!(text.len() <= room);
    unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), to, text.len()) };
    text.len()
}
#[unsafe(no_mangle)] pub extern "C" fn cuInit(_: u32) -> u32 { 0 }
#[unsafe(no_mangle)] pub unsafe extern "C" fn cuDeviceGetCount(count: *mut i32) -> u32 { unsafe { *count = 1 }; 0 }
#[unsafe(no_mangle)] pub unsafe extern "C" fn cuDeviceGet(device: *mut i32, _: i32) -> u32 { unsafe { *device = 0 }; 0 }
#[unsafe(no_mangle)] pub unsafe extern "C" fn cuDeviceGetName(name: *mut u8, _: i32, _: i32) -> u32 { unsafe { *name = 0 }; 0 }
#[unsafe(no_mangle)] pub unsafe extern "C" fn cuDeviceTotalMem_v2(bytes: *mut usize, _: i32) -> u32 { unsafe { *bytes = 1 }; 0 }
#[unsafe(no_mangle)] pub unsafe extern "C" fn cuDeviceGetAttribute(value: *mut i32, _: i32, _: i32) -> u32 { unsafe { *value = 9 }; 0 }
#[unsafe(no_mangle)] pub unsafe extern "C" fn cuDevicePrimaryCtxRetain(to: *mut usize, _: i32) -> u32 { unsafe { *to = 99 }; 0 }
#[unsafe(no_mangle)] pub extern "C" fn cuDevicePrimaryCtxRelease_v2(_: i32) -> u32 { 0 }
#[unsafe(no_mangle)] pub extern "C" fn cuCtxSetCurrent(_: *mut c_void) -> u32 { 0 }
#[unsafe(no_mangle)] pub unsafe extern "C" fn cuStreamCreate(to: *mut usize, _: u32) -> u32 { unsafe { make("stream", to) } }
#[unsafe(no_mangle)] pub extern "C" fn cuStreamDestroy_v2(stream: usize) -> u32 { note("destroy stream", stream) }
#[unsafe(no_mangle)] pub extern "C" fn cuStreamBeginCapture_v2(stream: usize, mode: u32) -> u32 { assert_eq!(mode, 1); note("begin", stream) }
#[unsafe(no_mangle)] pub unsafe extern "C" fn cuStreamEndCapture(_: usize, to: *mut usize) -> u32 {
    static ENDS: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);
    if ENDS.fetch_add(1, std::sync::atomic::Ordering::Relaxed) % 2 == 1 { return note("refuse", 0) + 901 }
    unsafe { make("graph", to) }
}
#[unsafe(no_mangle)] pub extern "C" fn cuGraphDestroy(graph: usize) -> u32 { note("destroy graph", graph) }
#[unsafe(no_mangle)] pub unsafe extern "C" fn cuGraphInstantiateWithFlags(to: *mut usize, graph: usize, flags: u64) -> u32 {
    assert_eq!(flags, 0); note("of", graph); unsafe { make("recording", to) }
}
#[unsafe(no_mangle)] pub extern "C" fn cuGraphUpload(recording: usize, stream: usize) -> u32 { note("upload", recording); note("on", stream) }
#[unsafe(no_mangle)] pub extern "C" fn cuGraphLaunch(recording: usize, stream: usize) -> u32 { note("launch", recording); note("on", stream) }
#[unsafe(no_mangle)] pub extern "C" fn cuGraphExecDestroy(recording: usize) -> u32 { note("destroy recording", recording) }
"#;

#[test]
fn a_capture_becomes_a_recording_or_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let path = build(dir.path(), SOURCE);
    cuda_driver::load_from(&path).unwrap();
    // SAFETY: the library is the one above, already loaded; the function has this signature.
    let library = unsafe { libloading::Library::new(&path) }.unwrap();
    // SAFETY: as above.
    let take = unsafe { library.get::<unsafe extern "C" fn(*mut u8, usize) -> usize>(b"take_notes") }.unwrap();
    let notes = || {
        let mut bytes = vec![0; 4096];
        // SAFETY: there is room for as many bytes as it is told.
        let len = unsafe { take(bytes.as_mut_ptr(), bytes.len()) };
        String::from_utf8(bytes[..len].to_vec()).unwrap().lines().map(str::to_owned).collect::<Vec<_>>()
    };

    let gpu = Gpu::open(0).unwrap();
    let stream = Stream::new(&gpu).unwrap();
    stream.begin_capture().unwrap();
    let graph = stream.end_capture().unwrap();
    let mut recording = graph.instantiate().unwrap();
    drop(graph);
    recording.upload(&stream).unwrap();
    for _ in 0..2 {
        // SAFETY: the recording names no memory.
        unsafe { recording.launch(&stream) }.unwrap();
    }
    let launch = ["launch 3", "on 1"];
    let made = ["stream 1", "begin 1", "graph 2", "of 2", "recording 3", "destroy graph 2", "upload 3", "on 1"];
    assert_eq!(notes(), [&made[..], &launch, &launch].concat());

    // The driver says that what was queued cannot be recorded; nothing is left of it.
    stream.begin_capture().unwrap();
    let error = stream.end_capture().err().unwrap();
    assert_eq!(error.code(), Some(901));
    assert!(error.to_string().starts_with("cuStreamEndCapture: "), "{error}");
    assert_eq!(notes(), ["begin 1", "refuse 0"]);

    drop((recording, stream));
    assert_eq!(notes(), ["destroy recording 3", "destroy stream 1"]);
}
