//! The PCI devices of the tree.

use super::{link, make_folder, pci_folder, pci_names, put};
use std::fs;
use std::io;
use std::path::Path;
use unbroken_nics::NicInfo;
use unbroken_types::LinkLayer;

/// Of devices that no vendor made: PCI has no id for them, and real ones would have programs ask
/// for a vendor's driver.
const VENDOR: &str = "0x554e";
const DEVICE: &str = "0x0001";

/// Makes the PCI device of a NIC, and the links that lead to it.
pub(super) fn device(root: &Path, i: usize, nic: &NicInfo) -> io::Result<()> {
    let sys = root.join("sys");
    let (bus, name) = pci_names(i);
    let folder = sys.join(pci_folder(i));
    let buses = [
        sys.join("bus/pci/devices"),
        sys.join("class/pci_bus"),
        sys.join(format!("devices/pci{bus}/pci_bus/{bus}")),
    ];
    for folder in buses.iter().chain([&folder]) {
        make_folder(folder)?;
    }
    link(&buses[0].join(&name), &format!("../../../{}", pci_folder(i)))?;
    link(&buses[1].join(&bus), &format!("../../devices/pci{bus}/pci_bus/{bus}"))?;
    link(&folder.join("subsystem"), "../../../bus/pci")?;
    // Network controllers: Ethernet, or InfiniBand.
    let class = match nic.link_layer {
        LinkLayer::Ethernet => "0x020000",
        LinkLayer::Infiniband => "0x020700",
    };
    let near = Near::of(nic.numa_node);
    let ids = [VENDOR, DEVICE].map(|id| id.trim_start_matches("0x").to_uppercase());
    let uevent = format!(
        "PCI_CLASS={}\nPCI_ID={}:{}\nPCI_SUBSYS_ID={}:{}\nPCI_SLOT_NAME={name}",
        class.trim_start_matches("0x0"),
        ids[0],
        ids[1],
        ids[0],
        ids[1]
    );
    let files = [
        ("vendor", VENDOR),
        ("device", DEVICE),
        ("subsystem_vendor", VENDOR),
        ("subsystem_device", DEVICE),
        ("class", class),
        ("revision", "0x00"),
        ("enable", "1"),
        ("numa_node", &near.numa_node),
        ("local_cpulist", &near.cpu_list),
        ("local_cpus", &near.cpu_map),
        ("uevent", &uevent),
        // Those of the rate that ports tell, 100 Gbit/s.
        ("current_link_speed", "16.0 GT/s PCIe"),
        ("max_link_speed", "16.0 GT/s PCIe"),
        ("current_link_width", "16"),
        ("max_link_width", "16"),
    ];
    for (file, text) in files {
        put(&folder.join(file), &format!("{text}\n"))?;
    }
    let (net, interface) = (folder.join("net"), Path::new("/sys/class/net").join(&nic.interface));
    // The loopback interface is no device: programs that found it here would connect by its
    // address, with librdmacm.
    match nic.link_layer {
        LinkLayer::Ethernet if interface.join("device").exists() => {
            make_folder(&net)?;
            link(&net.join(&nic.interface), &interface.to_string_lossy())
        }
        _ if net.exists() => fs::remove_dir_all(&net),
        _ => Ok(()),
    }
}

/// What is near to a NIC.
struct Near {
    numa_node: String,
    cpu_list: String,
    cpu_map: String,
}

impl Near {
    /// The CPUs of a node; of the only node where there is one, as the loopback interface is not a
    /// device and has none; else all, with node -1 as the kernel says it.
    fn of(numa_node: Option<u32>) -> Near {
        let nodes = Path::new("/sys/devices/system/node");
        let read = |path: &Path| fs::read_to_string(path).ok().map(|text| text.trim().to_owned());
        let only = || (read(&nodes.join("online"))?.as_str() == "0").then_some(0);
        let known = numa_node.or_else(only).and_then(|node| {
            let folder = nodes.join(format!("node{node}"));
            Some((node, read(&folder.join("cpulist"))?, read(&folder.join("cpumap"))?))
        });
        if let Some((node, cpu_list, cpu_map)) = known {
            return Near { numa_node: node.to_string(), cpu_list, cpu_map };
        }
        let online =
            read(Path::new("/sys/devices/system/cpu/online")).unwrap_or_else(|| "0".to_owned());
        // Of one range from 0, as nearly all machines have it.
        let last: u32 = online.rsplit(['-', ',']).next().and_then(|n| n.parse().ok()).unwrap_or(0);
        Near { numa_node: "-1".to_owned(), cpu_list: online, cpu_map: cpu_map(last + 1) }
    }
}

/// The first CPUs as a mask, in groups of 32 as the kernel writes them.
fn cpu_map(cpus: u32) -> String {
    let groups = cpus.div_ceil(32).max(1);
    let group = |g: u32| match cpus - g * 32 {
        n if n >= 32 => "ffffffff".to_owned(),
        n if g + 1 == groups && groups == 1 => format!("{:x}", (1u64 << n) - 1),
        n => format!("{:08x}", (1u64 << n) - 1),
    };
    (0..groups).rev().map(group).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks_are_written_as_by_the_kernel() {
        assert_eq!([1, 2, 32].map(cpu_map), ["1", "3", "ffffffff"]);
        assert_eq!(cpu_map(40), "000000ff,ffffffff");
        assert_eq!(cpu_map(64), "ffffffff,ffffffff");
    }

    #[test]
    fn a_node_that_is_not_there_is_not_named() {
        let near = Near::of(Some(4_000));
        assert_eq!(near.numa_node, "-1");
        assert!(!near.cpu_list.is_empty() && !near.cpu_map.is_empty());
    }
}
