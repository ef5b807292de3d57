//! Peak tensor-core rates of GPUs, for the model FLOPs utilization (MFU).

use crate::Peak;
use crate::tensor::DType;
use cuda_driver::DeviceInfo;

/// Tensor cores and boost clock (MHz) by device name, from NVIDIA's data sheets. The device's own maximum clock is often higher.
const KNOWN: &[(&str, u32, u32)] = &[
    ("NVIDIA A100-PCIE-40GB", 432, 1410),
    ("NVIDIA A100-PCIE-80GB", 432, 1410),
    ("NVIDIA A100 80GB PCIe", 432, 1410),
    ("NVIDIA A100-SXM4-40GB", 432, 1410),
    ("NVIDIA A100-SXM4-80GB", 432, 1410),
    ("NVIDIA RTX A2000", 104, 1200),
    ("NVIDIA RTX A4000", 192, 1560),
    ("NVIDIA RTX A4500", 224, 1650),
    ("NVIDIA RTX A5000", 256, 1695),
    ("NVIDIA RTX A5500", 320, 1770),
    ("NVIDIA RTX A6000", 336, 1800),
    ("NVIDIA GeForce RTX 3090 Ti", 336, 1860),
    ("NVIDIA GeForce RTX 3090", 328, 1695),
    ("NVIDIA GeForce RTX 3080 Ti", 320, 1665),
    ("NVIDIA GeForce RTX 3080", 272, 1710),
    ("NVIDIA GeForce RTX 3070 Ti", 192, 1770),
    ("NVIDIA GeForce RTX 3070", 184, 1725),
    ("NVIDIA GeForce RTX 3060 Ti", 152, 1665),
    ("NVIDIA GeForce RTX 3060", 112, 1777),
    ("NVIDIA RTX A2000 ADA", 88, 2130),
    ("NVIDIA RTX A4000 ADA", 192, 2175),
    ("NVIDIA RTX A4500 ADA", 224, 2580),
    ("NVIDIA RTX A5000 ADA", 400, 2550),
    ("NVIDIA RTX A5880 ADA", 440, 2460),
    ("NVIDIA RTX A6000 ADA", 568, 2505),
    ("NVIDIA GeForce RTX 4090", 512, 2520),
    ("NVIDIA GeForce RTX 4080 SUPER", 320, 2550),
    ("NVIDIA GeForce RTX 4080", 304, 2505),
    ("NVIDIA GeForce RTX 4070 Ti SUPER", 264, 2610),
    ("NVIDIA GeForce RTX 4070 Ti", 240, 2610),
    ("NVIDIA GeForce RTX 4070 SUPER", 224, 2475),
    ("NVIDIA GeForce RTX 4070", 184, 2475),
    ("NVIDIA GeForce RTX 4060 Ti", 136, 2535),
    ("NVIDIA GeForce RTX 4060", 96, 2460),
    ("NVIDIA H100 PCIe", 456, 1620),
    ("NVIDIA H100 80GB HBM3", 528, 1830),
    ("NVIDIA H200", 528, 1830),
];

/// Tensor cores of an SM, since Volta.
const CORES_PER_SM: u32 = 4;

/// Returns the dense bf16 FLOPs per cycle of one tensor core with f32 accumulation.
fn flops_per_cycle(compute_capability: (u32, u32)) -> Option<u32> {
    match compute_capability {
        (8, 0) => Some(512),
        (8 | 12, _) => Some(128),
        (9, _) => Some(1024),
        (10, _) => Some(2048),
        _ => None,
    }
}

/// Returns the peak rate for a storage type, or `None` for an unknown architecture.
pub fn peak(info: &DeviceInfo, dtype: DType) -> Option<Peak> {
    let known = KNOWN.iter().find(|(name, ..)| *name == info.name);
    let (cores, mhz) = match known {
        Some(&(_, cores, mhz)) => (cores, f64::from(mhz)),
        None => (info.sm_count * CORES_PER_SM, f64::from(info.clock_khz) / 1e3),
    };
    // TF32 runs at half the rate. Plain f32 does not use tensor cores; like llm.c, it is compared with TF32's peak.
    let share = if dtype == DType::Bf16 { 1.0 } else { 0.5 };
    let flops = f64::from(flops_per_cycle(info.compute_capability)?);
    Some(Peak { tflops: f64::from(cores) * mhz * 1e6 * flops * share / 1e12, estimated: known.is_none() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(name: &str, compute_capability: (u32, u32), sm_count: u32, clock_khz: u32) -> DeviceInfo {
        DeviceInfo {
            index: 0,
            name: name.into(),
            pci_bus_id: "00000000:01:00.0".into(),
            compute_capability,
            sm_count,
            clock_khz,
            memory_clock_khz: 0,
            memory_bus_bits: 0,
            memory_bytes: 0,
            l2_bytes: 0,
            shared_per_block: 0,
            shared_per_sm: 0,
            registers_per_sm: 0,
            threads_per_sm: 0,
        }
    }

    #[test]
    fn known_gpus_have_their_data_sheet_rates() {
        for (name, cc, bf16) in [
            ("NVIDIA A100-SXM4-80GB", (8, 0), 311.9),
            ("NVIDIA H100 80GB HBM3", (9, 0), 989.4),
            ("NVIDIA H100 PCIe", (9, 0), 756.4),
            ("NVIDIA H200", (9, 0), 989.4),
            ("NVIDIA GeForce RTX 4090", (8, 9), 165.2),
            ("NVIDIA GeForce RTX 3090 Ti", (8, 6), 80.0),
        ] {
            let found = peak(&gpu(name, cc, 1, 1), DType::Bf16).unwrap();
            assert!((found.tflops - bf16).abs() < 0.1 && !found.estimated, "{name}: {found:?}");
            assert!((peak(&gpu(name, cc, 1, 1), DType::F32).unwrap().tflops - bf16 / 2.0).abs() < 0.1);
        }
    }

    #[test]
    fn unknown_gpus_have_estimated_rates() {
        let found = peak(&gpu("NVIDIA H900", (9, 0), 132, 1_830_000), DType::Bf16).unwrap();
        assert!((found.tflops - 989.4).abs() < 0.1 && found.estimated, "{found:?}");
        assert!(peak(&gpu("NVIDIA Z1", (99, 0), 132, 1_830_000), DType::Bf16).is_none());
    }
}
