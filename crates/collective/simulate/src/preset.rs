//! Servers of eight GPUs that many have, by the name of the GPU.

use std::str::FromStr;

use crate::cluster::Cluster;
use crate::error::Error;
use crate::inference::serving::Gpu;

/// A server with eight GPUs and as many NICs. Rates are those of NVIDIA's data sheets: dense BF16,
/// NVLink in one direction, the NICs of the DGX or HGX of that GPU.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Preset {
    /// The GPU.
    pub name: &'static str,
    /// What a NIC carries in each direction, in Mbit/s.
    pub nic_mbps: u32,
    /// What a GPU sends over NVLink, in Mbit/s.
    pub nvlink_mbps: u32,
    /// What a GPU computes at most, in 10¹² operations a second.
    pub peak_tflops: f64,
    /// What its memory holds, in 10⁹ bytes.
    pub memory_gb: f64,
    /// What its memory reads at most, in 10⁹ bytes a second.
    pub memory_gb_s: f64,
}

const fn preset(
    name: &'static str,
    (nic_mbps, nvlink_mbps): (u32, u32),
    peak_tflops: f64,
    (memory_gb, memory_gb_s): (f64, f64),
) -> Preset {
    Preset { name, nic_mbps, nvlink_mbps, peak_tflops, memory_gb, memory_gb_s }
}

/// All.
pub const PRESETS: [Preset; 4] = [
    preset("a100", (200_000, 2_400_000), 312.0, (80.0, 2039.0)),
    preset("h100", (400_000, 3_600_000), 989.0, (80.0, 3350.0)),
    preset("h200", (400_000, 3_600_000), 989.0, (141.0, 4800.0)),
    preset("b200", (400_000, 7_200_000), 2250.0, (180.0, 8000.0)),
];

impl Preset {
    /// A cluster of such servers.
    pub fn cluster(&self, usual: Cluster) -> Cluster {
        Cluster { nic_mbps: self.nic_mbps, nvlink_mbps: self.nvlink_mbps, ..usual }
    }

    /// Its GPU, for serving.
    pub fn gpu(&self, usual: Gpu) -> Gpu {
        Gpu {
            peak_tflops: self.peak_tflops,
            memory_gb: self.memory_gb,
            memory_gb_s: self.memory_gb_s,
            ..usual
        }
    }
}

impl FromStr for Preset {
    type Err = Error;

    fn from_str(name: &str) -> Result<Preset, Error> {
        let found = PRESETS.into_iter().find(|preset| preset.name == name.to_lowercase());
        found.ok_or_else(|| Error::Unknown {
            argument: "preset",
            name: name.into(),
            right: format!("there are {}", PRESETS.map(|preset| preset.name).join(", ")),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::Job;

    /// What stands nowhere is what these two have.
    #[test]
    fn defaults_are_presets() {
        let [a100, h100] = ["A100", "h100"].map(|name| name.parse::<Preset>().unwrap());
        assert_eq!(a100.cluster(Cluster::default()), Cluster::default());
        let job = Job::default();
        assert_eq!((a100.peak_tflops, a100.memory_gb), (job.peak_tflops, job.memory_gb));
        assert_eq!(h100.gpu(Gpu::default()), Gpu::default());
        let says = "x".parse::<Preset>().unwrap_err().to_string();
        assert_eq!(says, "'x' is not there: there are a100, h100, h200, b200");
    }
}
