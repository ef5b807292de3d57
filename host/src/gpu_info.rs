//! What the GPU is doing besides computing: load, clock, power, temperature, through NVML, bound at run time.

use anyhow::{Context, Result, anyhow};
use nvml_wrapper::bitmasks::device::ThrottleReasons;
use nvml_wrapper::enum_wrappers::device::{Clock, TemperatureSensor, TemperatureThreshold};
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};

pub struct GpuInfo {
    nvml: Nvml,
    /// NVML numbers GPUs in its own order, and all of them; the bus has one for each.
    pci_bus_id: String,
}

impl GpuInfo {
    /// Of the driver's GPU `index`.
    pub fn open(index: usize) -> Result<Self> {
        let nvml = Nvml::init().map_err(|error| match error {
            NvmlError::LibloadingError(why) => anyhow!("NVML comes with the driver as libnvidia-ml.so.1: {why}"),
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

    /// One line: `GPU 98 % busy | memory 45 % busy | 1755 of 1980 MHz | 690 of 700 W | 61 °C, slows at 87 | limited by power`.
    pub fn line(&self) -> Result<String> {
        Ok(ReadResult::of(&self.device()?).line())
    }
}

/// What a GPU does not tell is `None`.
#[derive(Clone, Debug, Default)]
struct ReadResult {
    /// Percent of the last second in which a kernel ran, and in which memory was read or written.
    busy: Option<(u32, u32)>,
    /// Of the multiprocessors, now and at most.
    mhz: Option<(u32, u32)>,
    /// Now and at most.
    milliwatts: Option<(u32, u32)>,
    celsius: Option<u32>,
    slows_at_celsius: Option<u32>,
    fan_percent: Option<u32>,
    limits: Option<ThrottleReasons>,
}

impl ReadResult {
    fn of(device: &Device) -> Self {
        let fan = device.num_fans().is_ok_and(|fans| fans > 0);
        Self {
            busy: device.utilization_rates().ok().map(|busy| (busy.gpu, busy.memory)),
            mhz: device.clock_info(Clock::SM).ok().zip(device.max_clock_info(Clock::SM).ok()),
            milliwatts: device.power_usage().ok().zip(device.enforced_power_limit().ok()),
            celsius: device.temperature(TemperatureSensor::Gpu).ok(),
            slows_at_celsius: device.temperature_threshold(TemperatureThreshold::Slowdown).ok(),
            fan_percent: if fan { device.fan_speed(0).ok() } else { None },
            limits: device.current_throttle_reasons().ok(),
        }
    }

    fn line(&self) -> String {
        let watts = |milliwatts: u32| milliwatts.div_ceil(1000);
        let slows = self.slows_at_celsius.map_or(String::new(), |at| format!(", slows at {at}"));
        let parts = [
            self.busy.map(|(gpu, memory)| format!("{gpu} % busy | memory {memory} % busy")),
            self.mhz.map(|(now, most)| format!("{now} of {most} MHz")),
            self.milliwatts.map(|(now, most)| format!("{} of {} W", watts(now), watts(most))),
            self.celsius.map(|now| format!("{now} °C{slows}")),
            self.fan_percent.map(|percent| format!("fan {percent} %")),
            self.limits.map(limited).filter(|by| !by.is_empty()).map(|by| format!("limited by {by}")),
        ];
        match parts.into_iter().flatten().collect::<Vec<_>>().join(" | ") {
            line if line.is_empty() => "GPU: NVML tells nothing of it".to_owned(),
            line => format!("GPU {line}"),
        }
    }
}

/// What holds the clock down; idleness and what a user has set are no limits.
fn limited(reasons: ThrottleReasons) -> String {
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
    fn a_line_says_what_is_known() {
        let whole = ReadResult {
            busy: Some((98, 45)),
            mhz: Some((1755, 1980)),
            milliwatts: Some((689_001, 700_000)),
            celsius: Some(61),
            slows_at_celsius: Some(87),
            fan_percent: Some(30),
            limits: Some(ThrottleReasons::SW_POWER_CAP | ThrottleReasons::HW_THERMAL_SLOWDOWN),
        };
        assert_eq!(
            whole.line(),
            "GPU 98 % busy | memory 45 % busy | 1755 of 1980 MHz | 690 of 700 W | 61 °C, slows at 87 | fan 30 % | \
             limited by power and heat"
        );
        let idle = Some(ThrottleReasons::GPU_IDLE | ThrottleReasons::APPLICATIONS_CLOCKS_SETTING);
        let little = ReadResult { celsius: Some(30), limits: idle, ..ReadResult::default() };
        assert_eq!(little.line(), "GPU 30 °C");
        assert_eq!(ReadResult::default().line(), "GPU: NVML tells nothing of it");
    }
}
