//! Model FLOPs utilisation by llm.c's formula, and what each GPU could do at best.

use crate::engine::Peak;
use crate::tensor::DType;

/// Share of the peak that a rate of tokens makes use of.
pub fn mfu(flops_per_token: usize, tokens_per_second: f64, peak: &Peak) -> f64 {
    flops_per_token as f64 * tokens_per_second / (peak.tflops * 1e12)
}

/// A generation's reference chip; others scale with their tensor cores and clock.
struct Family {
    /// `None`: no such matrix unit.
    tf32: Option<f64>,
    bf16: Option<f64>,
    cores: f64,
    mhz: f64,
    cores_per_multiprocessor: u32,
}

const VOLTA: Family = Family { tf32: Some(125.0), bf16: None, cores: 640.0, mhz: 1530.0, cores_per_multiprocessor: 8 };
const AMPERE_DATACENTER: Family =
    Family { tf32: Some(156.0), bf16: Some(312.0), cores: 432.0, mhz: 1410.0, cores_per_multiprocessor: 4 };
const AMPERE: Family =
    Family { tf32: Some(40.0), bf16: Some(80.0), cores: 336.0, mhz: 1860.0, cores_per_multiprocessor: 4 };
const HOPPER: Family =
    Family { tf32: Some(378.0), bf16: Some(756.0), cores: 456.0, mhz: 1620.0, cores_per_multiprocessor: 4 };
const ADA: Family =
    Family { tf32: Some(82.6), bf16: Some(165.2), cores: 512.0, mhz: 2520.0, cores_per_multiprocessor: 4 };
/// From B200's 2250 dense bf16 TFLOP/s: 148 multiprocessors at 1965 MHz.
const BLACKWELL_DATACENTER: Family =
    Family { tf32: Some(1125.0), bf16: Some(2250.0), cores: 592.0, mhz: 1965.0, cores_per_multiprocessor: 4 };

/// (name as the driver gives it, family, tensor cores, MHz).
const GPUS: &[(&str, &Family, f64, f64)] = &[
    ("Tesla V100-SXM2-16GB", &VOLTA, 640.0, 1530.0),
    ("Tesla V100-PCIE-32GB", &VOLTA, 640.0, 1530.0),
    ("NVIDIA A100-PCIE-40GB", &AMPERE_DATACENTER, 432.0, 1410.0),
    ("NVIDIA A100-PCIE-80GB", &AMPERE_DATACENTER, 432.0, 1410.0),
    ("NVIDIA A100 80GB PCIe", &AMPERE_DATACENTER, 432.0, 1410.0),
    ("NVIDIA A100-SXM4-40GB", &AMPERE_DATACENTER, 432.0, 1410.0),
    ("NVIDIA A100-SXM4-80GB", &AMPERE_DATACENTER, 432.0, 1410.0),
    ("NVIDIA RTX A2000", &AMPERE, 104.0, 1200.0),
    ("NVIDIA RTX A4000", &AMPERE, 192.0, 1560.0),
    ("NVIDIA RTX A4500", &AMPERE, 224.0, 1650.0),
    ("NVIDIA RTX A5000", &AMPERE, 256.0, 1695.0),
    ("NVIDIA RTX A5500", &AMPERE, 320.0, 1770.0),
    ("NVIDIA RTX A6000", &AMPERE, 336.0, 1800.0),
    ("NVIDIA GeForce RTX 3090 Ti", &AMPERE, 336.0, 1860.0),
    ("NVIDIA GeForce RTX 3090", &AMPERE, 328.0, 1695.0),
    ("NVIDIA GeForce RTX 3080 Ti", &AMPERE, 320.0, 1665.0),
    ("NVIDIA GeForce RTX 3080", &AMPERE, 272.0, 1710.0),
    ("NVIDIA GeForce RTX 3070 Ti", &AMPERE, 192.0, 1770.0),
    ("NVIDIA GeForce RTX 3070", &AMPERE, 184.0, 1725.0),
    ("NVIDIA GeForce RTX 3060 Ti", &AMPERE, 152.0, 1665.0),
    ("NVIDIA GeForce RTX 3060", &AMPERE, 112.0, 1777.0),
    ("NVIDIA RTX A2000 ADA", &ADA, 88.0, 2130.0),
    ("NVIDIA RTX A4000 ADA", &ADA, 192.0, 2175.0),
    ("NVIDIA RTX A4500 ADA", &ADA, 224.0, 2580.0),
    ("NVIDIA RTX A5000 ADA", &ADA, 400.0, 2550.0),
    ("NVIDIA RTX A5880 ADA", &ADA, 440.0, 2460.0),
    ("NVIDIA RTX A6000 ADA", &ADA, 568.0, 2505.0),
    ("NVIDIA GeForce RTX 4090", &ADA, 512.0, 2520.0),
    ("NVIDIA GeForce RTX 4080 SUPER", &ADA, 320.0, 2550.0),
    ("NVIDIA GeForce RTX 4080", &ADA, 304.0, 2505.0),
    ("NVIDIA GeForce RTX 4070 Ti SUPER", &ADA, 264.0, 2610.0),
    ("NVIDIA GeForce RTX 4070 Ti", &ADA, 240.0, 2610.0),
    ("NVIDIA GeForce RTX 4070 SUPER", &ADA, 224.0, 2475.0),
    ("NVIDIA GeForce RTX 4070", &ADA, 184.0, 2475.0),
    ("NVIDIA GeForce RTX 4060 Ti", &ADA, 136.0, 2535.0),
    ("NVIDIA GeForce RTX 4060", &ADA, 96.0, 2460.0),
    ("NVIDIA H100 PCIe", &HOPPER, 456.0, 1620.0),
    ("NVIDIA H100 80GB HBM3", &HOPPER, 528.0, 1830.0),
    // The H100's compute with more memory.
    ("NVIDIA H200", &HOPPER, 528.0, 1830.0),
];

/// What is known of a GPU.
#[derive(Clone, Copy, Debug)]
pub struct Gpu<'a> {
    /// As the driver gives it.
    pub name: &'a str,
    /// Compute capability, (major, minor).
    pub capability: (u32, u32),
    pub multiprocessors: u32,
    /// Highest clock of the multiprocessors.
    pub mhz: u32,
}

/// Peak rate of matrix products in `float` (TF32 for f32). GPUs that are not in the table are estimated from their number
/// of multiprocessors and clock; `None` where their generation is not known either, or has no such matrix unit.
pub fn peak(gpu: Gpu, float: DType) -> Option<Peak> {
    let rate = |family: &Family, cores: f64, mhz: f64, estimated| {
        let base = match float {
            DType::F32 => family.tf32,
            DType::Bf16 => family.bf16,
            DType::I32 => None,
        };
        Some(Peak { tflops: base? * (cores / family.cores) * (mhz / family.mhz), estimated })
    };
    if let Some((_, family, cores, mhz)) = GPUS.iter().find(|(name, ..)| *name == gpu.name) {
        return rate(family, *cores, *mhz, false);
    }
    let family = match gpu.capability {
        (7, 0) => &VOLTA,
        (8, 0) => &AMPERE_DATACENTER,
        (8, 9) | (12, _) => &ADA,
        (8, _) => &AMPERE,
        (9, _) => &HOPPER,
        (10 | 11, _) => &BLACKWELL_DATACENTER,
        _ => return None,
    };
    rate(family, f64::from(gpu.multiprocessors * family.cores_per_multiprocessor), f64::from(gpu.mhz), true)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(name: &str, capability: (u32, u32), multiprocessors: u32, mhz: u32, float: DType) -> Option<(f64, bool)> {
        peak(Gpu { name, capability, multiprocessors, mhz }, float).map(|p| (p.tflops, p.estimated))
    }

    fn near(got: Option<(f64, bool)>, tflops: f64, estimated: bool) {
        let (t, e) = got.unwrap();
        assert!((t - tflops).abs() < 0.05 && e == estimated, "{t} {e}, expected {tflops} {estimated}");
    }

    #[test]
    fn known_gpus_have_llm_cs_peaks() {
        for name in ["NVIDIA H100 80GB HBM3", "NVIDIA H200"] {
            near(of(name, (9, 0), 132, 1980, DType::Bf16), 988.8, false);
        }
        near(of("NVIDIA H200", (9, 0), 132, 1980, DType::F32), 494.4, false);
        near(of("NVIDIA A100-SXM4-80GB", (8, 0), 108, 1410, DType::Bf16), 312.0, false);
        assert!(of("Tesla V100-SXM2-16GB", (7, 0), 80, 1530, DType::Bf16).is_none());
    }

    #[test]
    fn others_are_estimated_from_their_size_and_clock() {
        // Read as an unknown name, a known chip gets the same figure.
        near(of("H100 of a cloud", (9, 0), 132, 1830, DType::Bf16), 988.8, true);
        near(of("RTX 4090 D", (8, 9), 128, 2520, DType::Bf16), 165.2, true);
        near(of("B200", (10, 0), 148, 1965, DType::Bf16), 2250.0, true);
        assert!(of("Tesla K80", (3, 7), 13, 875, DType::F32).is_none());
    }

    #[test]
    fn utilisation_of_d12() {
        let peak = Peak { tflops: 988.8, estimated: false };
        // 803,478,528 FLOPs a token at 640,000 tokens a second.
        assert!((mfu(803_478_528, 640_000.0, &peak) - 0.520_05).abs() < 1e-4);
    }
}
