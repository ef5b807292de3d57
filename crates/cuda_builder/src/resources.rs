//! Parses the resources that `ptxas -v` reports.

use std::collections::BTreeMap;

use crate::local_memory::{Function, Variable};
use crate::module::{LaunchBounds, Resources};

/// The most registers per thread that an instruction can name.
const MAX_REGISTERS: u32 = 255;

/// 32-bit registers of an SM.
const REGISTERS_PER_SM: u32 = 65_536;

#[derive(Debug, Default)]
pub struct Report {
    /// Entry points and functions that were not inlined, by name.
    pub functions: BTreeMap<String, Resources>,
    /// Warnings of ptxas, including those about lost performance.
    pub remarks: Vec<String>,
}

/// Parses the standard error of `ptxas -v`.
pub fn parse(log: &str) -> Report {
    let mut report = Report::default();
    let mut current = String::new();
    for line in log.lines() {
        if line.contains("warning") || line.contains("Performance Loss") {
            report.remarks.push(line.split_whitespace().collect::<Vec<_>>().join(" "));
        } else if let Some((_, name)) = line.split_once("Function properties for ") {
            name.trim().clone_into(&mut current);
            report.functions.entry(current.clone()).or_default();
        } else if let Some(resources) = report.functions.get_mut(&current) {
            read_line(line, resources);
        }
    }
    report
}

fn read_line(line: &str, resources: &mut Resources) {
    let quantities = line.rsplit_once(" : ").map_or(line, |(_, quantities)| quantities);
    for quantity in quantities.split(',') {
        let quantity = quantity.trim().trim_start_matches(['U', 'u']).trim_start_matches("sed ");
        let Some((number, what)) = quantity.split_once(' ') else { continue };
        let Ok(number) = number.parse() else { continue };
        match what {
            "registers" => resources.registers = number,
            "barriers" => resources.barriers = number,
            "bytes smem" => resources.static_shared = number,
            "bytes spill stores" => resources.spill_stores = number,
            "bytes spill loads" => resources.spill_loads = number,
            "bytes stack frame" | "bytes cumulative stack size" => resources.stack = resources.stack.max(number),
            _ => {}
        }
    }
}

impl Resources {
    /// Returns a warning if the function spills registers or uses local memory. `bounds` are those of a kernel.
    pub(crate) fn warning(&self, bounds: Option<&LaunchBounds>, function: &Function) -> Option<String> {
        let Self { stack, spill_stores, spill_loads, registers, .. } = *self;
        if spill_stores + spill_loads == 0 {
            return (stack > 0).then(|| local_memory_warning(stack.into(), function));
        }
        let spills = format!(
            "spills at {registers} registers: {spill_stores} bytes stored, {spill_loads} bytes loaded per thread"
        );
        let largest = function.largest.as_ref().map(|Variable { name, place, bytes }| {
            format!("its largest variable is `{name}` ({place}) of {bytes} bytes")
        });
        let fewer = "keep fewer values live at a time";
        let fix =
            bounds.and_then(more_registers).map_or_else(|| fewer.to_owned(), |more| format!("{more}, or {fewer}"));
        let arrays = function.describe_arrays();
        let arrays = (!arrays.is_empty()).then(|| format!("it also uses local memory: {arrays}"));
        let parts: Vec<String> = [Some(spills), largest, Some(fix), arrays].into_iter().flatten().collect();
        Some(parts.join("; "))
    }
}

/// Returns a warning about a function that uses local memory but spills no registers.
fn local_memory_warning(bytes: u64, function: &Function) -> String {
    let arrays = function.describe_arrays();
    let separator = if arrays.is_empty() { "" } else { ": " };
    format!("uses {bytes} bytes of local memory per thread{separator}{arrays}")
}

/// Returns how a kernel gets more registers, or `None` if it has the most that a thread can have.
fn more_registers(bounds: &LaunchBounds) -> Option<&'static str> {
    let threads: u32 = bounds.threads.map_or(1, |threads| threads.iter().product());
    let by_threads = |blocks: u32| REGISTERS_PER_SM / threads.saturating_mul(blocks).max(1) < MAX_REGISTERS;
    match bounds {
        LaunchBounds { registers: Some(registers), .. } if *registers < MAX_REGISTERS => {
            Some("raise its limit of registers")
        }
        LaunchBounds { blocks_per_sm: Some(blocks), .. } if *blocks > 1 && by_threads(*blocks) => {
            Some("lower its blocks_per_sm or its threads")
        }
        _ if by_threads(1) => Some("lower its threads"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'matmul' for 'sm_90a'
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized in 'matmul'
ptxas info    : Function properties for matmul
    24 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 24 bytes cumulative stack size, 1024 bytes smem, 400 bytes cmem[0]
ptxas info    : Compile time = 16.915 ms
ptxas info    : Compiling entry function 'copy' for 'sm_90a'
ptxas info    : Function properties for copy
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 16 registers, used 0 barriers
ptxas info    : Function properties for helper
    40 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
";

    #[test]
    fn parses_each_quantity_of_each_function() {
        let report = parse(LOG);
        let matmul =
            Resources { registers: 168, stack: 24, spill_stores: 8, spill_loads: 12, static_shared: 1024, barriers: 1 };
        let copy = Resources { registers: 16, ..Resources::default() };
        let helper = Resources { stack: 40, ..Resources::default() };
        let expected = [("matmul", matmul), ("copy", copy), ("helper", helper)];
        assert_eq!(report.functions, expected.map(|(name, resources)| (name.to_owned(), resources)).into());
        let [remark] = &report.remarks[..] else { panic!("one remark: {:?}", report.remarks) };
        assert!(remark.contains("serialized in 'matmul'"), "{remark}");
    }

    #[test]
    fn warns_of_spills_and_local_memory() {
        let report = parse(LOG);
        let warning = |name: &str| report.functions[name].warning(None, &Function::default());
        let spills =
            "spills at 168 registers: 8 bytes stored, 12 bytes loaded per thread; keep fewer values live at a time";
        assert_eq!(warning("matmul").as_deref(), Some(spills));
        assert_eq!(warning("helper").as_deref(), Some("uses 40 bytes of local memory per thread"));
        assert_eq!(warning("copy"), None);
    }

    #[test]
    fn the_advice_about_spills_fits_the_limit_of_registers() {
        let bounds = |threads: u32, blocks_per_sm, registers| LaunchBounds {
            threads: Some([threads, 1, 1]),
            blocks_per_sm,
            registers,
        };
        assert_eq!(more_registers(&bounds(128, None, Some(32))), Some("raise its limit of registers"));
        assert_eq!(more_registers(&bounds(128, Some(4), None)), Some("lower its blocks_per_sm or its threads"));
        assert_eq!(more_registers(&bounds(512, None, None)), Some("lower its threads"));
        for most in [bounds(256, None, None), bounds(128, Some(1), None), bounds(64, None, Some(255))] {
            assert_eq!(more_registers(&most), None, "{most:?}");
        }
    }
}
