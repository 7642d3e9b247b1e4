//! What the kernel shows of a device: its network interface, and how its bytes are counted.

use std::path::{Path, PathBuf};
use unbroken_verbs::DeviceCounters;

/// Where the kernel shows its RDMA devices.
pub(crate) const SYSFS: &str = "/sys/class/infiniband";

/// The network interface behind a device, where the kernel names one.
pub(crate) fn interface_of(device: &str) -> Option<String> {
    let file = Path::new(SYSFS).join(device).join("ports/1/gid_attrs/ndevs/0");
    let text = std::fs::read_to_string(file).ok()?;
    Some(text.trim().to_owned()).filter(|name| !name.is_empty())
}

/// A device that is none of InfiniBand or RoCE: it lacks the GIDs or the queue pairs that failover
/// needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OtherDevice {
    /// Its name.
    pub name: String,
    /// What it is, for people.
    pub kind: &'static str,
}

/// Those devices that the kernel has, by their names.
pub fn other_devices() -> Vec<OtherDevice> {
    others_in(Path::new(SYSFS))
}

fn others_in(folder: &Path) -> Vec<OtherDevice> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let other = |entry: std::fs::DirEntry| {
        let node_type = std::fs::read_to_string(entry.path().join("node_type")).unwrap_or_default();
        let kind = kind_of(node_type.trim())?;
        Some(OtherDevice { name: entry.file_name().to_string_lossy().into_owned(), kind })
    };
    let mut found: Vec<OtherDevice> = entries.flatten().filter_map(other).collect();
    found.sort_unstable_by(|a, b| a.name.cmp(&b.name));
    found
}

/// What a device is by the kernel's word, `4: RNIC`; none for a channel adapter, and where the word
/// is missing.
fn kind_of(node_type: &str) -> Option<&'static str> {
    match node_type.split_once(':')?.0.trim() {
        "1" | "2" | "3" => None,
        "4" => Some("iWARP"),
        "5" | "6" => Some("usNIC"),
        // EFA is one.
        _ => Some("a device of its own kind"),
    }
}

/// How many devices the kernel has.
pub(crate) fn device_count() -> usize {
    std::fs::read_dir(SYSFS).map_or(0, |entries| entries.flatten().count())
}

/// Where a device's bytes are counted.
pub(crate) struct CounterFiles {
    tx: PathBuf,
    rx: PathBuf,
    /// Bytes in a unit of the files.
    unit_bytes: u64,
    first: DeviceCounters,
}

impl CounterFiles {
    /// The port's own counters, which are in words of four bytes; where it has none, those of the
    /// network interface behind.
    pub(crate) fn of(device: &str) -> CounterFiles {
        let port = Path::new(SYSFS).join(device).join("ports/1/counters");
        let (tx, rx, unit_bytes) = match (port.join("port_xmit_data"), interface_of(device)) {
            (file, Some(interface)) if !file.exists() => {
                let folder = Path::new("/sys/class/net").join(interface).join("statistics");
                (folder.join("tx_bytes"), folder.join("rx_bytes"), 1)
            }
            (file, _) => (file, port.join("port_rcv_data"), 4),
        };
        let mut files = CounterFiles { tx, rx, unit_bytes, first: DeviceCounters::default() };
        files.first = files.read();
        files
    }

    /// Since the device was opened.
    pub(crate) fn read(&self) -> DeviceCounters {
        let number = |file: &Path| {
            let text = std::fs::read_to_string(file).unwrap_or_default();
            text.trim().parse::<u64>().unwrap_or(0).saturating_mul(self.unit_bytes)
        };
        DeviceCounters {
            tx_bytes: number(&self.tx).saturating_sub(self.first.tx_bytes),
            rx_bytes: number(&self.rx).saturating_sub(self.first.rx_bytes),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_channel_adapter_is_told_by_the_kind_of_node() {
        let folder = tempfile::tempdir().unwrap();
        let devices = [
            ("siw1", "4: RNIC\n"),
            ("mlx5_0", "1: CA\n"),
            ("siw0", "4: RNIC\n"),
            ("rdmap0s6", "7: <unknown>\n"),
        ];
        for (name, kind) in devices {
            std::fs::create_dir(folder.path().join(name)).unwrap();
            std::fs::write(folder.path().join(name).join("node_type"), kind).unwrap();
        }
        std::fs::create_dir(folder.path().join("strange")).unwrap();
        let found: Vec<(String, &str)> =
            others_in(folder.path()).into_iter().map(|d| (d.name, d.kind)).collect();
        let wanted =
            [("rdmap0s6", "a device of its own kind"), ("siw0", "iWARP"), ("siw1", "iWARP")];
        assert_eq!(found, wanted.map(|(name, kind)| (name.to_owned(), kind)));
        assert!(others_in(Path::new("/no/such/folder")).is_empty());
    }
}
