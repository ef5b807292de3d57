//! Runs kernels with planted faults on the first GPU, each with the inputs of its test in the emulator.
//!
//! `planted-faults list` prints the kernels and their faults. `planted-faults run KERNEL FAULT,… [LAUNCHES]` runs a kernel with each of
//! the faults, or with `Correct`, and prints `FAULT right` or `FAULT wrong`. The program ends at a CUDA error. If a launch does not end, it
//! prints `hang` and must be killed.
//! Environment: `POISON=1` fills uninitialized buffers with 0xff, and `HANG_SECONDS` (2) is the time after which a launch hangs.

use cuda_builder::ModuleChoice;
use cuda_driver::{DeviceMemory, Error, Function, Gpu, LaunchConfig, Module, Stream};
use cuda_std::GlobalMut;
use cuda_std::emulate::Memory;
use cuda_std::launch::Launch;
use planted_faults_kernels::{BETWEEN_BLOCKS, CORRECT, Kernel, WITHIN_A_BLOCK};
use std::cell::OnceCell;
use std::ffi::c_void;
use std::process::ExitCode;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

include!(concat!(env!("OUT_DIR"), "/kernels.rs"));

const USAGE: &str = "usage: planted-faults list | planted-faults run KERNEL FAULT,… [LAUNCHES]";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let done = match arguments[..] {
        ["list"] => {
            list();
            Ok(())
        }
        ["run", kernel, faults] => run(kernel, faults, "1"),
        ["run", kernel, faults, launches] => run(kernel, faults, launches),
        _ => Err(USAGE.to_owned()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Prints a line for each fault: where its race is, the kernel, the fault, what the emulator finds, and the description.
fn list() {
    for (place, kernels) in [("between", &BETWEEN_BLOCKS[..]), ("within", &WITHIN_A_BLOCK[..])] {
        for kernel in kernels {
            for fault in kernel.faults {
                println!("{place}\t{}\t{}\t{:?}\t{}: {}", kernel.id, fault.name, fault.found, kernel.name, fault.text);
            }
        }
    }
}

/// Number of completed launches.
static COMPLETED: AtomicU32 = AtomicU32::new(0);

/// Time for all launches of a fault. A GPU that other processes use may need seconds for a few launches.
const RUN: Duration = Duration::from_secs(2);

/// Runs a kernel with each of `faults` until its results are wrong, at most `launches` times and for about two seconds.
fn run(kernel: &str, faults: &str, launches: &str) -> Result<(), String> {
    let launches: u32 =
        launches.parse().map_err(|_| format!("LAUNCHES: expected a number, found {launches}; {USAGE}"))?;
    let faults = faults.split(',').map(|name| Ok((name, find(kernel, name)?))).collect::<Result<Vec<_>, String>>()?;
    let device = Device::open().map_err(|error| error.to_string())?;
    println!("started");
    let seconds = std::env::var("HANG_SECONDS").ok().and_then(|seconds| seconds.parse().ok()).unwrap_or(2.0);
    thread::spawn(move || report_hang(Duration::from_secs_f64(seconds)));
    for (name, (kernel, fault)) in faults {
        let is_right = run_fault(&device, kernel, fault, launches)?;
        println!("{name} {}", if is_right { "right" } else { "wrong" });
    }
    Ok(())
}

/// Returns whether the results of all launches are right.
fn run_fault(device: &Device, kernel: &Kernel, fault: u32, launches: u32) -> Result<bool, String> {
    let on_gpu = |launch: &Launch, memory: &mut Memory, blocks: u32, shared: usize| {
        if let Err(error) = device.launch(launch, memory, blocks, shared) {
            // The context is lost, and `kernel.run` returns reports of the emulator only.
            println!("error: {error}");
            std::process::exit(1);
        }
        COMPLETED.fetch_add(1, Ordering::Relaxed);
        Ok(())
    };
    let start = Instant::now();
    for _ in 0..launches {
        if !(kernel.run)(fault, &on_gpu).map_err(|report| report.to_string())? {
            return Ok(false);
        }
        if start.elapsed() > RUN {
            break;
        }
    }
    Ok(true)
}

/// Prints `hang` if no launch completes within `limit`.
fn report_hang(limit: Duration) {
    let (mut completed, mut since) = (COMPLETED.load(Ordering::Relaxed), Instant::now());
    loop {
        thread::sleep(Duration::from_millis(50));
        let now = COMPLETED.load(Ordering::Relaxed);
        if now != completed {
            (completed, since) = (now, Instant::now());
        } else if since.elapsed() > limit {
            println!("hang");
            return;
        }
    }
}

fn find(kernel: &str, fault: &str) -> Result<(&'static Kernel, u32), String> {
    let mut kernels = BETWEEN_BLOCKS.into_iter().chain(WITHIN_A_BLOCK);
    let unknown = |what: &str| format!("{what}: expected a name that `planted-faults list` prints; {USAGE}");
    let kernel = kernels.find(|other| other.id == kernel).ok_or_else(|| unknown(kernel))?;
    if fault == "Correct" {
        return Ok((kernel, CORRECT));
    }
    let planted = kernel.faults.iter().find(|planted| planted.name == fault).ok_or_else(|| unknown(fault))?;
    Ok((kernel, planted.number))
}

struct Device {
    gpu: Gpu,
    stream: Stream,
    module: Module,
    function: OnceCell<Function>,
    poisons: bool,
}

impl Device {
    fn open() -> Result<Self, Error> {
        let gpu = Gpu::open(0)?;
        let capability = gpu.info().compute_capability;
        let choice = ModuleChoice::newest(MODULES, capability, None).ok_or_else(|| Error::NoCode {
            gpu: gpu.info().name.clone(),
            capability,
            found: MODULES_MISSING.unwrap_or("other architectures").to_owned(),
        })?;
        Ok(Self {
            stream: Stream::new(&gpu)?,
            module: Module::load(&gpu, "planted faults", choice.image())?,
            function: OnceCell::new(),
            poisons: std::env::var("POISON").is_ok_and(|value| value == "1"),
            gpu,
        })
    }

    /// Runs a launch of the emulator on the GPU, and copies the results to `memory`. Each buffer has an allocation of its own, so that
    /// tools see accesses beyond its end.
    fn launch(&self, launch: &Launch, memory: &mut Memory, blocks: u32, shared: usize) -> Result<(), Error> {
        let mut copies = Vec::new();
        for (address, contents, is_initialized) in memory.buffers() {
            let copy = DeviceMemory::new(&self.gpu, contents.len())?;
            if is_initialized || self.poisons {
                // SAFETY: the allocation has the length of the contents. The copy completes before they change.
                unsafe { self.stream.upload(copy.address(), contents)? };
                self.stream.synchronize()?;
            }
            copies.push((address, contents.len(), is_initialized, copy));
        }
        let load = || self.module.function(launch.name()).expect("the module has all kernels");
        let function = self.function.get_or_init(load);
        let config = LaunchConfig { grid: [blocks, 1, 1], block: launch.block(), shared_bytes: shared as u32 };
        launch.with_arguments(|arguments| {
            let mut views: Vec<u64> = Vec::new();
            for argument in arguments.iter() {
                // SAFETY: each argument is in a line of 64 bytes with zeros behind it.
                let value = unsafe { argument.cast::<u64>().read() };
                views.push(copies.iter().find(|copy| copy.0 == value).map_or(value, |copy| copy.3.address()));
            }
            let mut pointers: Vec<*mut c_void> = views.iter_mut().map(|view| (&raw mut *view).cast()).collect();
            // SAFETY: the arguments are those of the launch, with the addresses of copies on the GPU. A fault may access other memory:
            // this program ends then.
            unsafe { function.launch(&self.stream, &config, &mut pointers) }
        })?;
        self.stream.synchronize()?;
        for (address, bytes, is_initialized, copy) in copies {
            // Kernels write their results over zeros. A download of uninitialized bytes would be a report of initcheck.
            if is_initialized {
                let mut results = vec![0u8; bytes];
                // SAFETY: the allocation has the length of the vector, which is not used before the copy has completed.
                unsafe { self.stream.download(&mut results, copy.address())? };
                self.stream.synchronize()?;
                memory.write(GlobalMut::from_address(address), &results).expect("a buffer of this memory");
            }
        }
        Ok(())
    }
}
