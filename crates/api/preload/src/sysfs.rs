//! The tree that answers for `/sys/class/infiniband`, `/sys/class/infiniband_verbs` and
//! `/dev/infiniband`.
//!
//! It lies in the runtime folder, one for each set of NICs, and is made (or brought up to date)
//! when a program first asks for one of its paths. Processes of one host share it and write the
//! same into it; each file is replaced as a whole, so nobody reads half. Each device hangs on a PCI
//! device of its own, as an RNIC's does: programs look at its path to know what is near to it
//! (NCCL, UCX), and some end where there is none. The PCI domain is one that no firmware gives
//! (0xfab0), so no path of the tree is that of a device of this machine. The state of a port is
//! written anew at each look into the tree, as it changes.
//!
//! ```text
//! /sys/devices/pcifab0:00/fab0:00:01.0/                  vendor, class, numa_node, local_cpulist, …, subsystem -> /sys/bus/pci, net/eth0 of a real one
//!                                      infiniband/unb0/             device -> ../../../fab0:00:01.0
//!                                      infiniband_verbs/uverbs0/    the same
//! /sys/class/infiniband/unb0            -> the first
//! /sys/class/infiniband_verbs/uverbs0   -> the second
//! /sys/bus/pci/devices/fab0:00:01.0     -> the PCI device
//! /sys/class/pci_bus/fab0:00            -> /sys/devices/pcifab0:00/pci_bus/fab0:00
//! ```

mod pci;

use crate::query::table_len;
use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{symlink, DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use unbroken_nics::{inventory, Inventory, NicInfo, PortInfo};
use unbroken_types::{GidType, LinkLayer};
use unbroken_verbs::GidEntry;

/// Kernel ABI of uverbs, as `infiniband_verbs/abi_version` says it.
const ABI: &str = "6\n";

/// Ports that a device may have.
const MAX_PORTS: usize = 2;

/// The folder that stands for `/`, without a slash at its end; `None` where there are no NICs or it
/// cannot be made.
pub fn root() -> Option<&'static [u8]> {
    static ROOT: OnceLock<Option<PathBuf>> = OnceLock::new();
    let inventory = inventory().ok()?;
    let root = ROOT.get_or_init(|| {
        let tree = inventory.runtime.join("sysfs");
        let root = tree.join(&inventory.key);
        let made =
            make_folder(&tree).and_then(|()| check(&tree)).and_then(|()| make(&root, &inventory));
        // The names that programs get back by realpath begin where this ends.
        made.ok().and_then(|()| root.canonicalize().ok())
    });
    let root = root.as_ref()?;
    let _ = write_states(root, &inventory);
    Some(root.as_os_str().as_bytes())
}

/// Writes a file as a whole, if it is not already so.
fn put(path: &Path, text: &str) -> io::Result<()> {
    if fs::read_to_string(path).is_ok_and(|old| old == text) {
        return Ok(());
    }
    // A name of one's own: a pid may be another's, too, in another PID namespace.
    let mut name = [0; 8];
    rustix::rand::getrandom(&mut name, rustix::rand::GetRandomFlags::empty())?;
    let fresh = path.with_extension(format!("{:016x}.tmp", u64::from_ne_bytes(name)));
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&fresh)?;
    file.write_all(text.as_bytes())?;
    fs::rename(&fresh, path)
}

/// Makes a folder and those that lead to it, for this user alone whatever the umask.
fn make_folder(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(path)
}

/// An error where others may write into the tree: it is read by all programs of this user.
fn check(tree: &Path) -> io::Result<()> {
    match fs::symlink_metadata(tree)?.mode() & 0o022 {
        0 => Ok(()),
        _ => Err(io::Error::other("others may write into it")),
    }
}

/// Makes a link, if it is not already there.
fn link(at: &Path, to: &str) -> io::Result<()> {
    match symlink(to, at) {
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        done => done,
    }
}

/// NICs of a PCI bus, whose devices are numbered from 1 to 31.
const NICS_PER_BUS: usize = 16;

/// The bus of a NIC, and its PCI device there.
fn pci_names(i: usize) -> (String, String) {
    let bus = format!("fab0:{:02x}", i / NICS_PER_BUS * NICS_PER_BUS);
    let device = format!("{bus}:{:02x}.0", i % NICS_PER_BUS + 1);
    (bus, device)
}

/// The folder of a NIC's PCI device below `/sys`.
fn pci_folder(i: usize) -> String {
    let (bus, device) = pci_names(i);
    format!("devices/pci{bus}/{device}")
}

fn device_folder(root: &Path, i: usize) -> PathBuf {
    root.join(format!("sys/{}/infiniband/unb{i}", pci_folder(i)))
}

fn make(root: &Path, inventory: &Inventory) -> io::Result<()> {
    let classes = ["infiniband", "infiniband_verbs"].map(|c| root.join("sys/class").join(c));
    let dev = root.join("dev/infiniband");
    for folder in classes.iter().chain([&dev]) {
        make_folder(folder)?;
    }
    put(&classes[1].join("abi_version"), ABI)?;
    // That it is there; `open` of it is answered by `crate::cm`.
    link(&dev.join("rdma_cm"), "/dev/null")?;
    for (i, nic) in inventory.nics.iter().enumerate() {
        device(&device_folder(root, i), nic)?;
        let (pci, (_, pci_device)) = (pci_folder(i), pci_names(i));
        pci::device(root, i, nic)?;
        let to_pci = format!("../../../{pci_device}");
        link(&device_folder(root, i).join("device"), &to_pci)?;
        link(&classes[0].join(format!("unb{i}")), &format!("../../{pci}/infiniband/unb{i}"))?;
        let uverbs = root.join(format!("sys/{pci}/infiniband_verbs/uverbs{i}"));
        make_folder(&uverbs)?;
        link(&uverbs.join("device"), &to_pci)?;
        put(&uverbs.join("ibdev"), &format!("unb{i}\n"))?;
        put(&uverbs.join("abi_version"), "1\n")?;
        put(&uverbs.join("dev"), &format!("231:{}\n", 192 + i))?;
        link(
            &classes[1].join(format!("uverbs{i}")),
            &format!("../../{pci}/infiniband_verbs/uverbs{i}"),
        )?;
        // Programs want a character device that may be opened; what they do with it goes through
        // us.
        link(&dev.join(format!("uverbs{i}")), "/dev/null")?;
    }
    // NICs of a larger fabric that was here before.
    for i in inventory.nics.len().. {
        if fs::remove_file(classes[0].join(format!("unb{i}"))).is_err() {
            break;
        }
        let _ = fs::remove_file(classes[1].join(format!("uverbs{i}")));
        let _ = fs::remove_file(dev.join(format!("uverbs{i}")));
        let _ = fs::remove_file(root.join("sys/bus/pci/devices").join(pci_names(i).1));
        let _ = fs::remove_dir_all(root.join("sys").join(pci_folder(i)));
    }
    Ok(())
}

/// Four groups of four hexadecimal digits.
fn guid(guid: u64) -> String {
    let g = |shift: u32| guid >> shift & 0xffff;
    format!("{:04x}:{:04x}:{:04x}:{:04x}", g(48), g(32), g(16), g(0))
}

fn device(folder: &Path, nic: &NicInfo) -> io::Result<()> {
    make_folder(&folder.join("ports"))?;
    let node_guid = guid(nic.node_guid);
    let files = [
        ("node_type", "1: CA"),
        ("node_guid", &node_guid),
        ("sys_image_guid", &node_guid),
        ("node_desc", "unbroken"),
        ("fw_ver", env!("CARGO_PKG_VERSION")),
        ("hw_rev", "1"),
        ("hca_type", "unbroken"),
        // Exporters of Prometheus take a device without one for none.
        ("board_id", "UNB_0000000001"),
    ];
    for (name, text) in files {
        put(&folder.join(name), &format!("{text}\n"))?;
    }
    for (n, port) in (1..).zip(&nic.ports) {
        make_port(&folder.join(format!("ports/{n}")), nic, port)?;
    }
    // Ports of a fabric that was here before.
    for n in nic.ports.len() + 1..=MAX_PORTS {
        let _ = fs::remove_dir_all(folder.join(format!("ports/{n}")));
    }
    Ok(())
}

fn make_port(folder: &Path, nic: &NicInfo, port: &PortInfo) -> io::Result<()> {
    for part in ["gids", "gid_attrs/types", "gid_attrs/ndevs", "pkeys", "counters"] {
        make_folder(&folder.join(part))?;
    }
    let link_layer = match nic.link_layer {
        LinkLayer::Infiniband => "InfiniBand",
        LinkLayer::Ethernet => "Ethernet",
    };
    let gid_type = |entry: &GidEntry| match entry.kind {
        GidType::Infiniband | GidType::RoceV1 => "IB/RoCE v1",
        GidType::RoceV2 => "RoCE v2",
    };
    let files = [
        ("link_layer", link_layer),
        ("rate", "100 Gb/sec (4X EDR)"),
        ("lid", &format!("{:#x}", port.lid)),
        ("lid_mask_count", "0"),
        ("sm_lid", &format!("{:#x}", port.sm_lid)),
        ("sm_sl", "0"),
        ("cap_mask", "0x04010000"),
        ("pkeys/0", "0xffff"),
    ];
    for (name, text) in files {
        put(&folder.join(name), &format!("{text}\n"))?;
    }
    // An InfiniBand port belongs to no network interface.
    let interface = Some(nic.interface.as_str()).filter(|_| nic.link_layer == LinkLayer::Ethernet);
    // Empty entries of the table read as zeros, and have no attributes.
    for i in 0..table_len(&port.gids) {
        let entry = port.gids.get(i);
        let [high, low] = [0, 8].map(|at| {
            let bytes = entry.map_or([0; 16], |entry| entry.gid.0);
            u64::from_be_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
        });
        put(&folder.join(format!("gids/{i}")), &format!("{}:{}\n", guid(high), guid(low)))?;
        put_or_remove(&folder.join(format!("gid_attrs/types/{i}")), entry.map(gid_type))?;
        put_or_remove(&folder.join(format!("gid_attrs/ndevs/{i}")), entry.and(interface))?;
    }
    Ok(())
}

/// A file with this line, or none: the fabric may have been another when the tree was made.
fn put_or_remove(path: &Path, line: Option<&str>) -> io::Result<()> {
    match line {
        Some(line) => put(path, &format!("{line}\n")),
        None => match fs::remove_file(path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
            _ => Ok(()),
        },
    }
}

fn write_states(root: &Path, inventory: &Inventory) -> io::Result<()> {
    for (i, nic) in inventory.nics.iter().enumerate() {
        for (n, port) in (1..).zip(&nic.ports) {
            let folder = device_folder(root, i).join(format!("ports/{n}"));
            let (state, phys) =
                if port.active { ("4: ACTIVE", "5: LinkUp") } else { ("1: DOWN", "3: Disabled") };
            put(&folder.join("state"), &format!("{state}\n"))?;
            put(&folder.join("phys_state"), &format!("{phys}\n"))?;
            let c = &port.counters;
            // As in InfiniBand's counters, data are counted in words of four bytes.
            let counters = [
                ("port_xmit_data", c.tx_bytes / 4),
                ("port_rcv_data", c.rx_bytes / 4),
                ("port_xmit_packets", c.tx_packets),
                ("port_rcv_packets", c.rx_packets),
                ("port_rcv_errors", c.icrc_errors),
            ];
            for (name, value) in counters {
                put(&folder.join("counters").join(name), &format!("{value}\n"))?;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #[test]
    fn each_nic_has_a_pci_device_of_its_own() {
        let names: std::collections::HashSet<_> = (0..64).map(|i| pci_names(i).1).collect();
        assert_eq!(names.len(), 64);
        assert_eq!(pci_names(17), ("fab0:10".to_owned(), "fab0:10:02.0".to_owned()));
    }

    use super::*;
    use unbroken_nics::NicInfo;
    use unbroken_types::Gid;

    const KINDS: [GidType; 2] = [GidType::RoceV1, GidType::RoceV2];

    fn tree(nics: usize) -> Inventory {
        let nic = NicInfo {
            link_layer: LinkLayer::Ethernet,
            node_guid: 0x0255_4e00_7f4d_0100,
            interface: "lo".to_owned(),
            numa_node: None,
            ports: vec![
                PortInfo {
                    active: true,
                    gids: (1..)
                        .zip(KINDS)
                        .map(|(n, kind)| GidEntry { gid: Gid([n; 16]), kind })
                        .collect(),
                    ..PortInfo::default()
                };
                2
            ],
        };
        Inventory { runtime: PathBuf::new(), key: "a".to_owned(), nics: vec![nic; nics] }
    }

    #[test]
    fn a_tree_is_whole_and_follows_the_nics() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        for nics in [3, 1] {
            make(root, &tree(nics)).unwrap();
            write_states(root, &tree(nics)).unwrap();
            let class = root.join("sys/class/infiniband");
            assert_eq!(fs::read_dir(&class).unwrap().count(), nics);
            let read = |name: &str| fs::read_to_string(class.join("unb0").join(name)).unwrap();
            assert_eq!(read("node_guid"), "0255:4e00:7f4d:0100\n");
            assert_eq!(read("ports/1/state"), "4: ACTIVE\n");
            assert_eq!(read("ports/2/counters/port_xmit_data"), "0\n");
            assert_eq!(read("ports/1/gids/1"), "0202:0202:0202:0202:0202:0202:0202:0202\n");
            assert_eq!(read("ports/1/gids/3"), "0000:0000:0000:0000:0000:0000:0000:0000\n");
            assert_eq!(read("ports/1/gid_attrs/types/0"), "IB/RoCE v1\n");
            assert_eq!(read("ports/1/gid_attrs/types/1"), "RoCE v2\n");
            let entries =
                |part: &str| fs::read_dir(class.join("unb0/ports/1").join(part)).unwrap().count();
            assert_eq!(
                (entries("gids"), entries("gid_attrs/types"), entries("gid_attrs/ndevs")),
                (4, 2, 2)
            );
            let in_dev = fs::read_dir(root.join("dev/infiniband")).unwrap().count();
            assert_eq!(in_dev, nics + 1, "and that of rdma_cm");
            assert!(
                class.join("unb0/../../infiniband/unb0/ports").exists(),
                "as a link into /sys/devices"
            );
            let device = class.join("unb0/device").canonicalize().unwrap();
            assert!(device.ends_with("sys/devices/pcifab0:00/fab0:00:01.0"), "{device:?}");
            assert_eq!(fs::read_to_string(device.join("class")).unwrap(), "0x020000\n");
            // As NCCL finds the PCI device of a bus id, and the bus of a device.
            let by_bus =
                root.join("sys/class/pci_bus/fab0:00/../../fab0:00:01.0").canonicalize().unwrap();
            let in_bus = root.join("sys/bus/pci/devices/fab0:00:01.0").canonicalize().unwrap();
            assert_eq!((&by_bus, &in_bus), (&device, &device));
            assert!(device.join("subsystem").canonicalize().unwrap().ends_with("sys/bus/pci"));
            assert_eq!(fs::read_dir(root.join("sys/bus/pci/devices")).unwrap().count(), nics);
        }
    }
}
