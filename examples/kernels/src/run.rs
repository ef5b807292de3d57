//! The commands: list, run and check.

use crate::device::{Ceilings, Device, Measurement};
use crate::families::attention;
use crate::registry::{self, FAMILIES, Family, Kernel};
use crate::session::{Session, Verified};
use anyhow::{Context, Result, bail, ensure};
use cuda_std::emulate::Report;
use rayon::iter::{IntoParallelRefIterator, ParallelIterator};
use serde::{Deserialize, Serialize};
use std::io::Write;
use std::path::{Path, PathBuf};

/// GPU kernels from naive to fast: run one on a GPU or in the emulator, check its result, and compare it with the roofline
///
/// Exit codes: 0 success, 1 an error or a wrong result, 2 invalid arguments, 3 the emulator reported a fault in a kernel.
#[derive(Debug, clap::Parser)]
#[command(name = "kernels", version)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// List the kernels with their ideas and source files
    List {
        /// Print the tables of the README instead
        #[arg(long)]
        markdown: bool,
    },
    /// Run kernels, check their results and, on a GPU, compare their times with the roofline, cuBLASLt and cuDNN
    Run(Run),
    /// Run kernels in the emulator with every memory access checked; those with a planted fault must be reported
    Check {
        /// Numbers, names or families [default: all kernels]
        #[arg(value_name = "KERNEL")]
        kernels: Vec<String>,
    },
}

#[derive(Debug, clap::Args)]
struct Run {
    /// Numbers, names or families, or all, which leaves out those with a planted fault
    #[arg(value_name = "KERNEL", required = true)]
    kernels: Vec<String>,
    /// Device to run on. Kernels with a planted fault always run in the emulator
    #[arg(long, value_enum, default_value_t)]
    device: DeviceChoice,
    /// Write the results to a JSON file as well
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Compare attention with the times of cuDNN in this file, which `examples/kernels/cudnn.py` writes on the same machine
    #[arg(long, value_name = "FILE")]
    cudnn: Option<PathBuf>,
}

#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, clap::ValueEnum)]
enum DeviceChoice {
    /// A GPU if there is one, otherwise the emulator
    #[default]
    Auto,
    /// The emulator, with small arrays and every memory access checked
    Cpu,
    /// The first GPU, with arrays of a size that training uses
    Cuda,
}

/// A result of `run`, as written to JSON.
#[derive(Serialize)]
struct Row {
    number: u32,
    name: &'static str,
    family: &'static str,
    idea: &'static str,
    source: &'static str,
    /// Number of elements of the results that were checked.
    checked: usize,
    /// The largest error as a fraction of the allowed one.
    error: f64,
    #[serde(skip_serializing_if = "Option::is_none", flatten)]
    times: Option<Times>,
}

/// The part of a row that a GPU adds.
#[derive(Serialize)]
struct Times {
    us: f64,
    us_least: f64,
    us_most: f64,
    bytes: usize,
    flops: usize,
    bound: &'static str,
    percent_of_roofline: f64,
    /// cuBLASLt or cuDNN, if it has the operation.
    #[serde(skip_serializing_if = "Option::is_none")]
    library: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    percent_of_library: Option<f64>,
}

/// The times of cuDNN's attention through PyTorch, at the sizes of this program.
#[derive(Clone, Deserialize)]
struct Cudnn {
    /// The name of the GPU.
    machine: String,
    /// B, NH, T and HS.
    shape: [usize; 4],
    attention_us: f64,
    attention_backward_us: f64,
}

impl Cudnn {
    fn read(path: &Path, machine: &str) -> Result<Self> {
        let name = path.display();
        let text = std::fs::read_to_string(path).with_context(|| format!("--cudnn: cannot read {name}"))?;
        let times: Self = serde_json::from_str(&text)
            .with_context(|| format!("--cudnn {name}: expected the output of examples/kernels/cudnn.py"))?;
        let found = &times.machine;
        ensure!(
            found == machine,
            "--cudnn {name}: expected times on {machine}, found {found}; run cudnn.py on this machine"
        );
        let (found, expected) = (times.shape, attention::TIMED_SHAPE);
        ensure!(
            found == expected,
            "--cudnn {name}: expected times of B, NH, T, HS = {expected:?}, found {found:?}; run cudnn.py again"
        );
        Ok(times)
    }

    /// Returns the seconds of the operation of a family.
    fn seconds(&self, family: &str) -> Option<f64> {
        match family {
            "attention" => Some(self.attention_us / 1e6),
            "attention_backward" => Some(self.attention_backward_us / 1e6),
            _ => None,
        }
    }
}

/// The JSON of `run`.
#[derive(Serialize)]
struct Results {
    bench: &'static str,
    version: &'static str,
    machine: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    copy_gbs: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    gemm_tflops: Option<f64>,
    rows: Vec<Row>,
}

impl Cli {
    /// Runs the command, and writes to `out`.
    pub fn run(&self, out: &mut impl Write) -> Result<()> {
        match &self.command {
            Command::List { markdown: true } => write!(out, "{}", registry::markdown())?,
            Command::List { markdown: false } => list(out)?,
            Command::Run(options) => run(options, out)?,
            Command::Check { kernels } => check(kernels, out)?,
        }
        Ok(())
    }
}

fn list(out: &mut impl Write) -> Result<()> {
    for family in FAMILIES {
        writeln!(out, "\n{}: {}", family.name, family.problem)?;
        for Kernel { number, name, idea, source, needs, .. } in family.kernels {
            writeln!(out, "{number:>4}  {name:<36} {}\n{:42} {source}, {}", idea, "", needs.name())?;
        }
    }
    Ok(())
}

/// Returns the kernels that the words name, each once.
fn find(words: &[String]) -> Result<Vec<(Family, Kernel)>> {
    let mut kernels: Vec<(Family, Kernel)> = Vec::new();
    for word in words {
        for found in registry::find(word)? {
            if kernels.iter().all(|(_, kernel)| kernel.number != found.1.number) {
                kernels.push(found);
            }
        }
    }
    Ok(kernels)
}

/// Runs a kernel in the emulator. A fault is an error of type [`Report`].
pub fn emulate(kernel: &Kernel) -> Result<Verified> {
    let mut session = Session::emulated();
    (kernel.setup)(&mut session)?;
    session.emulate()?;
    match kernel.fault {
        Some(fault) => bail!("{}: expected the report of a planted {fault:?}, found none", kernel.name),
        None => session.verify(),
    }
}

fn run(options: &Run, out: &mut impl Write) -> Result<()> {
    let kernels = find(&options.kernels)?;
    let mut device = match options.device {
        DeviceChoice::Cpu => None,
        DeviceChoice::Cuda => Some(Device::open()?),
        DeviceChoice::Auto => match Device::open() {
            Ok(device) => Some(device),
            Err(error) => {
                writeln!(out, "no GPU: {:#}", error.root_cause())?;
                None
            }
        },
    };
    let machine = device.as_ref().map_or_else(|| "emulator".to_owned(), |device| device.name().to_owned());
    let cudnn = options.cudnn.as_deref().map(|path| Cudnn::read(path, &machine)).transpose()?;
    let ceilings = device.as_ref().map(Device::ceilings);
    let mut results = Results {
        bench: "example kernels",
        version: env!("CARGO_PKG_VERSION"),
        machine,
        copy_gbs: ceilings.map(|ceilings| ceilings.bytes / 1e9),
        gemm_tflops: ceilings.and_then(|ceilings| ceilings.flops).map(|flops| flops / 1e12),
        rows: Vec::new(),
    };
    head(out, device.as_ref())?;
    let mut failures = Vec::new();
    for (family, kernel) in kernels {
        if let Some(device) = device.as_ref().filter(|device| kernel.fault.is_none() && !device.can_run(&kernel)) {
            let (need, have) = (kernel.needs.name(), device.architecture());
            let reason = format!("skipped: needs {need} and its cubins, the loaded kernels are for {have}");
            writeln!(out, "{:>4}  {:<36} {reason}", kernel.number, kernel.name)?;
            continue;
        }
        match measure(device.as_mut(), &kernel, cudnn.as_ref().and_then(|cudnn| cudnn.seconds(family.name))) {
            Ok((Verified { elements: checked, worst: error }, times)) => {
                let Kernel { number, name, idea, source, .. } = kernel;
                let row = Row { number, name, family: family.name, idea, source, checked, error, times };
                line(out, &row)?;
                results.rows.push(row);
            }
            Err(error) => {
                writeln!(out, "{:>4}  {:<36} FAILED: {error:#}", kernel.number, kernel.name)?;
                failures.push(error.context(kernel.name));
                if device.as_ref().is_some_and(|device| !device.works()) {
                    writeln!(out, "an error of the GPU ended its context: the kernels after this one did not run")?;
                    break;
                }
            }
        }
    }
    if let Some(path) = &options.json {
        let text = serde_json::to_string_pretty(&results)?;
        atomic_file::write(path, |file| Ok(writeln!(file, "{text}")?))
            .with_context(|| format!("--json: cannot write {}", path.display()))?;
    }
    if failures.len() > 1 {
        writeln!(out, "{} kernels failed; the first:", failures.len())?;
    }
    failures.into_iter().next().map_or(Ok(()), Err)
}

/// Runs a kernel: on the GPU with times, or in the emulator, which all kernels with a planted fault use.
fn measure(device: Option<&mut Device>, kernel: &Kernel, cudnn: Option<f64>) -> Result<(Verified, Option<Times>)> {
    match device {
        Some(device) if kernel.fault.is_none() => {
            let measurement = device.measure(kernel)?;
            Ok((measurement.verified, Some(times(&measurement, cudnn))))
        }
        _ => Ok((emulate(kernel)?, None)),
    }
}

fn times(Measurement { time, work, limit, cublaslt, .. }: &Measurement, cudnn: Option<f64>) -> Times {
    let library = cublaslt.map(|seconds| ("cuBLASLt", seconds)).or(cudnn.map(|seconds| ("cuDNN", seconds)));
    Times {
        us: 1e6 * time.median,
        us_least: 1e6 * time.least,
        us_most: 1e6 * time.most,
        bytes: work.bytes,
        flops: work.flops,
        bound: limit.bound,
        percent_of_roofline: 100.0 * limit.seconds / time.median,
        library: library.map(|(name, _)| name),
        percent_of_library: library.map(|(_, seconds)| 100.0 * seconds / time.median),
    }
}

/// Prints the machine, the ceilings and the headings.
fn head(out: &mut impl Write, device: Option<&Device>) -> Result<()> {
    let Some(device) = device else {
        writeln!(out, "emulator: small arrays, every memory access checked; error is relative to the allowed one\n")?;
        return Ok(writeln!(out, "{:>4}  {:<36} {:>9} {:>7}", "", "kernel", "checked", "error")?);
    };
    let Ceilings { bytes, flops } = device.ceilings();
    writeln!(out, "{}, {} kernels", device.name(), device.architecture())?;
    writeln!(out, "copy of 1 GiB: {:.0} GB/s read and written", bytes / 1e9)?;
    match (flops, device.without_cublaslt()) {
        (Some(flops), _) => writeln!(out, "cuBLASLt, 8192 x 8192 x 8192 in bf16: {:.0} TFLOP/s", flops / 1e12)?,
        (None, reason) => {
            writeln!(out, "no cuBLASLt ({}): all kernels count as memory-bound", reason.unwrap_or_default())?;
        }
    }
    writeln!(out, "% roofline = 100 max(bytes / copy bandwidth, FLOPs / GEMM throughput) / time")?;
    writeln!(out, "% library = 100 time of cuBLASLt (GEMM) or cuDNN (attention, with --cudnn) / time\n")?;
    let headings = ["us", "GB/s", "TFLOP/s"].map(|heading| format!("{heading:>9}")).join(" ");
    writeln!(
        out,
        "{:>4}  {:<36} {headings} {:<8} {:>10} {:>10} {:>7}",
        "", "kernel", "bound", "% roofline", "% library", "error"
    )?;
    Ok(())
}

/// Prints a row.
fn line(out: &mut impl Write, Row { number, name, checked, error, times, .. }: &Row) -> Result<()> {
    let Some(Times { us, bytes, flops, bound, percent_of_roofline, percent_of_library, .. }) = times else {
        return Ok(writeln!(out, "{number:>4}  {name:<36} {checked:>9} {error:>7.3}")?);
    };
    let rate = |amount: usize, unit: f64| match amount {
        0 => format!("{:>9}", "-"),
        _ => format!("{:>9.0}", amount as f64 / us * 1e6 / unit),
    };
    let (bytes, flops) = (rate(*bytes, 1e9), rate(*flops, 1e12));
    let library = percent_of_library.map_or_else(|| "-".to_owned(), |percent| format!("{percent:.1}"));
    writeln!(
        out,
        "{number:>4}  {name:<36} {us:>9.1} {bytes} {flops} {bound:<8} {percent_of_roofline:>10.1} {library:>10} {error:>7.3}"
    )?;
    Ok(out.flush()?)
}

/// Returns the report of a kernel with a planted fault, or the outcome of its checks.
pub fn check_kernel(kernel: &Kernel) -> Result<String> {
    match (emulate(kernel), kernel.fault) {
        (Ok(Verified { elements, worst }), _) => {
            Ok(format!("ok, {elements} elements, error {worst:.3} of the allowed one"))
        }
        (Err(error), Some(fault)) => {
            let report = error.downcast_ref::<Report>().filter(|report| report.fault == fault);
            Ok(report.map(|report| format!("reported as planted: {report}")).ok_or(error)?)
        }
        (Err(error), None) => Err(error),
    }
}

fn check(words: &[String], out: &mut impl Write) -> Result<()> {
    let kernels = if words.is_empty() { registry::all().collect() } else { find(words)? };
    let outcomes: Vec<_> = kernels.par_iter().map(|(_, kernel)| check_kernel(kernel)).collect();
    let mut failed = 0;
    for ((_, kernel), outcome) in kernels.iter().zip(&outcomes) {
        let text = match outcome {
            Ok(text) => text.clone(),
            Err(error) => {
                failed += 1;
                format!("FAILED: {error:#}")
            }
        };
        writeln!(out, "{:>4}  {:<36} {text}", kernel.number, kernel.name)?;
    }
    ensure!(
        failed == 0,
        "check: expected all {} kernels to pass, found {failed} that failed; see above",
        kernels.len()
    );
    Ok(())
}
