//! Parses the resources that `ptxas -v` reports.

use std::collections::BTreeMap;

use crate::module::Resources;

/// How to avoid local memory, which holds arrays that are indexed at run time.
pub const LOCAL_MEMORY_FIX: &str = "index arrays by constants, or unroll the loops that index them (gpu_println! and functions of libm such as math::sin need it)";

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
    /// Returns a warning if the function spills registers or uses local memory.
    pub(crate) fn warning(&self) -> Option<String> {
        let Self { stack, spill_stores, spill_loads, registers, .. } = *self;
        if spill_stores + spill_loads > 0 {
            Some(format!(
                "spills at {registers} registers: {spill_stores} bytes stored, {spill_loads} bytes loaded per thread; \
                 allow more registers (fewer threads or blocks_per_sm) or keep fewer live values"
            ))
        } else if stack > 0 {
            Some(format!("uses {stack} bytes of local memory per thread; {LOCAL_MEMORY_FIX}"))
        } else {
            None
        }
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
        let warning = |name: &str| report.functions[name].warning();
        assert!(warning("matmul").is_some_and(|text| text.contains("spills at 168 registers")));
        assert!(warning("helper").is_some_and(|text| text.contains("40 bytes of local memory")));
        assert_eq!(warning("copy"), None);
    }
}
