//! Utilization, clock, power and temperature of a GPU, read through NVML, which is loaded at run time.

use anyhow::{Context, Result, anyhow};
use nvml_wrapper::bitmasks::device::ThrottleReasons;
use nvml_wrapper::enum_wrappers::device::{Clock, TemperatureSensor, TemperatureThreshold};
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};

/// A GPU opened in NVML.
pub struct GpuInfo {
    nvml: Nvml,
    /// Identifies the GPU: NVML numbers GPUs differently from CUDA.
    pci_bus_id: String,
}

impl GpuInfo {
    /// Opens GPU `index`, as numbered by the CUDA driver.
    pub fn open(index: usize) -> Result<Self> {
        let nvml = Nvml::init().map_err(|error| match error {
            NvmlError::LibloadingError(why) => {
                anyhow!("NVML: cannot load libnvidia-ml.so.1, which the NVIDIA driver installs: {why}")
            }
            error => anyhow!("NVML: {error}"),
        })?;
        let pci_bus_id = cuda_driver::device_info(index)?.pci_bus_id;
        let info = Self { nvml, pci_bus_id };
        info.device()?;
        Ok(info)
    }

    fn device(&self) -> Result<Device<'_>> {
        let device = self.nvml.device_by_pci_bus_id(&*self.pci_bus_id);
        device.with_context(|| format!("NVML: the GPU at {}", self.pci_bus_id))
    }

    /// Returns the used and the total memory in bytes.
    pub fn memory(&self) -> Result<(u64, u64)> {
        let memory = self.device()?.memory_info()?;
        Ok((memory.used, memory.total))
    }

    /// Returns the state in one line: `GPU 98 % busy | memory 45 % busy | 1755 of 1980 MHz | 690 of 700 W | 61 °C, slows at 87 |
    /// limited by power`.
    pub fn line(&self) -> Result<String> {
        Ok(ReadResult::new(&self.device()?).line())
    }

    /// Returns the energy in joules that the GPU has used since the driver was loaded, if it reports that.
    pub fn joules(&self) -> Option<f64> {
        let millijoules = self.device().ok()?.total_energy_consumption().ok()?;
        Some(millijoules as f64 / 1e3)
    }

    /// Returns the bytes of the GPU's memory that all processes use, if it reports that.
    pub fn memory_used(&self) -> Option<u64> {
        self.device().ok()?.memory_info().ok().map(|memory| memory.used)
    }
}

/// One set of measurements. A value that the GPU does not report is `None`.
#[derive(Clone, Debug, Default)]
struct ReadResult {
    /// Percentage of the last second during which a kernel ran, and during which memory was accessed.
    utilization: Option<(u32, u32)>,
    /// SM clock: current and maximum.
    mhz: Option<(u32, u32)>,
    /// Power: current and limit.
    milliwatts: Option<(u32, u32)>,
    celsius: Option<u32>,
    slowdown_celsius: Option<u32>,
    fan_percent: Option<u32>,
    throttle_reasons: Option<ThrottleReasons>,
}

impl ReadResult {
    fn new(device: &Device) -> Self {
        let fan = device.num_fans().is_ok_and(|fans| fans > 0);
        Self {
            utilization: device.utilization_rates().ok().map(|rates| (rates.gpu, rates.memory)),
            mhz: device.clock_info(Clock::SM).ok().zip(device.max_clock_info(Clock::SM).ok()),
            milliwatts: device.power_usage().ok().zip(device.enforced_power_limit().ok()),
            celsius: device.temperature(TemperatureSensor::Gpu).ok(),
            slowdown_celsius: device.temperature_threshold(TemperatureThreshold::Slowdown).ok(),
            fan_percent: if fan { device.fan_speed(0).ok() } else { None },
            throttle_reasons: device.current_throttle_reasons().ok(),
        }
    }

    fn line(&self) -> String {
        let watts = |milliwatts: u32| milliwatts.div_ceil(1000);
        let slowdown = self.slowdown_celsius.map_or(String::new(), |at| format!(", slows at {at}"));
        let parts = [
            self.utilization.map(|(gpu, memory)| format!("{gpu} % busy | memory {memory} % busy")),
            self.mhz.map(|(now, most)| format!("{now} of {most} MHz")),
            self.milliwatts.map(|(now, most)| format!("{} of {} W", watts(now), watts(most))),
            self.celsius.map(|now| format!("{now} °C{slowdown}")),
            self.fan_percent.map(|percent| format!("fan {percent} %")),
            self.throttle_reasons.map(limiting).filter(|by| !by.is_empty()).map(|by| format!("limited by {by}")),
        ];
        match parts.into_iter().flatten().collect::<Vec<_>>().join(" | ") {
            line if line.is_empty() => "GPU: NVML reports no values".to_owned(),
            line => format!("GPU {line}"),
        }
    }
}

/// Lists what limits the clock, except idleness and limits set by the user.
fn limiting(reasons: ThrottleReasons) -> String {
    let power = ThrottleReasons::SW_POWER_CAP | ThrottleReasons::HW_POWER_BRAKE_SLOWDOWN;
    let heat = ThrottleReasons::SW_THERMAL_SLOWDOWN | ThrottleReasons::HW_THERMAL_SLOWDOWN;
    let other = ThrottleReasons::HW_SLOWDOWN | ThrottleReasons::SYNC_BOOST;
    let by = [(power, "power"), (heat, "heat"), (other, "hardware")];
    by.into_iter().filter(|(bits, _)| reasons.intersects(*bits)).map(|(_, by)| by).collect::<Vec<_>>().join(" and ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_lists_only_known_values() {
        let complete = ReadResult {
            utilization: Some((98, 45)),
            mhz: Some((1755, 1980)),
            milliwatts: Some((689_001, 700_000)),
            celsius: Some(61),
            slowdown_celsius: Some(87),
            fan_percent: Some(30),
            throttle_reasons: Some(ThrottleReasons::SW_POWER_CAP | ThrottleReasons::HW_THERMAL_SLOWDOWN),
        };
        assert_eq!(
            complete.line(),
            "GPU 98 % busy | memory 45 % busy | 1755 of 1980 MHz | 690 of 700 W | 61 °C, slows at 87 | fan 30 % | \
             limited by power and heat"
        );
        let idle = Some(ThrottleReasons::GPU_IDLE | ThrottleReasons::APPLICATIONS_CLOCKS_SETTING);
        let partial = ReadResult { celsius: Some(30), throttle_reasons: idle, ..ReadResult::default() };
        assert_eq!(partial.line(), "GPU 30 °C");
        assert_eq!(ReadResult::default().line(), "GPU: NVML reports no values");
    }
}
