//! Each fault by the files of a machine that has it.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tempfile::TempDir;
use unbroken_nics::Reach;

use super::backups::{backups, command, is_usable, paths, Sent};
use super::machine::{devices, Device, Node, Roots};
use super::report::{Level, Line};
use super::{devices as checks, of_each_device, system};

/// `0000:0000:0000:0000:0000:ffff:0a00:0001`: as the kernel writes 10.0.0.1.
const IPV4: &str = "0000:0000:0000:0000:0000:ffff:0a00:0001";
const LINK_LOCAL: &str = "fe80:0000:0000:0000:0e42:a1ff:fe00:0001";
const IPV6: &str = "fd00:0000:0000:0000:0000:0000:0000:0001";
const V1: &str = "IB/RoCE v1";
const V2: &str = "RoCE v2";
/// What a port with one IPv4 address has.
const USUAL: &[(&str, &str)] = &[(LINK_LOCAL, V1), (LINK_LOCAL, V2), (IPV4, V1), (IPV4, V2)];

/// A machine in a folder.
struct Machine {
    folder: TempDir,
    roots: Roots,
}

impl Machine {
    fn new() -> Machine {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().canonicalize().unwrap();
        let at = |name| root.join(name);
        let roots = Roots { sys: at("sys"), dev: at("dev"), proc: at("proc"), boot: at("boot") };
        Machine { folder, roots }
    }

    fn write(&self, path: impl AsRef<Path>, text: &str) {
        let path = self.folder.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, format!("{text}\n")).unwrap();
    }

    /// A healthy device `mlx5_N` with the interface `ethN`, behind a bridge of its own.
    fn add(&self, n: u8, numa_node: u8, gids: &[(&str, &str)]) {
        let pci = format!("sys/devices/pci0000:{n:02}/0000:{n:02}:01.0/0000:{n:02}:00.0");
        for (name, text) in [
            ("numa_node", numa_node.to_string().as_str()),
            ("current_link_speed", "16.0 GT/s PCIe"),
            ("max_link_speed", "16.0 GT/s PCIe"),
            ("current_link_width", "8"),
            ("max_link_width", "16"),
        ] {
            self.write(format!("{pci}/{name}"), text);
        }
        let device = format!("sys/class/infiniband/mlx5_{n}");
        self.write(format!("{device}/node_type"), "1: CA");
        symlink(self.folder.path().join(&pci), self.folder.path().join(&device).join("device"))
            .unwrap();
        let port = format!("{device}/ports/1");
        for (name, text) in [
            ("state", "4: ACTIVE"),
            ("phys_state", "5: LinkUp"),
            ("link_layer", "Ethernet"),
            ("rate", "100 Gb/sec (4X EDR)"),
        ] {
            self.write(format!("{port}/{name}"), text);
        }
        for (i, (gid, kind)) in gids.iter().enumerate() {
            self.write(format!("{port}/gids/{i}"), gid);
            self.write(format!("{port}/gid_attrs/types/{i}"), kind);
            self.write(format!("{port}/gid_attrs/ndevs/{i}"), &format!("eth{n}"));
        }
        self.write(format!("sys/class/infiniband_verbs/uverbs{n}/ibdev"), &format!("mlx5_{n}"));
        self.write(format!("dev/infiniband/uverbs{n}"), "");
    }

    /// A port's file.
    fn port(&self, n: u8, name: &str, text: &str) {
        self.write(format!("sys/class/infiniband/mlx5_{n}/ports/1/{name}"), text);
    }

    fn devices(&self) -> Vec<Device> {
        devices(&self.roots)
    }

    /// What is said of all its devices, which libibverbs opens.
    fn lines(&self) -> Vec<Line> {
        let devices = self.devices();
        of_each_device(&self.roots, &devices, &all_open(&devices))
    }

    fn problems(&self) -> Vec<Line> {
        self.lines().into_iter().filter(|line| line.level == Level::Problem).collect()
    }
}

fn all_open(devices: &[Device]) -> Vec<(String, Result<(), String>)> {
    devices.iter().map(|device| (device.name.clone(), Ok(()))).collect()
}

fn only(lines: Vec<Line>) -> Line {
    let [line] = &lines[..] else { panic!("{lines:#?}") };
    line.clone()
}

fn remedy(line: &Line) -> &str {
    line.remedy.as_deref().unwrap_or_default()
}

#[test]
fn a_good_machine_has_no_problem_and_gets_its_command_line() {
    let machine = Machine::new();
    machine.add(0, 0, USUAL);
    machine.add(1, 0, USUAL);
    machine.add(2, 1, USUAL);
    assert_eq!(machine.problems(), []);
    let devices = machine.devices();
    let usable: Vec<&Device> = devices.iter().collect();
    assert!(devices.iter().all(|d| is_usable(d, &all_open(&devices))));
    let lines = machine.lines();
    let of = |check: &str| lines.iter().find(|line| line.check == check).unwrap();
    assert!(of("gid").text.starts_with("index 3 is 10.0.0.1, RoCE v2 IPv4"), "{:?}", of("gid"));
    assert!(of("gid").text.contains("2 RoCE v1, 1 RoCE v2 link-local, 1 RoCE v2 IPv4"));
    assert!(remedy(of("gid")).contains("perftest: -x 3"));
    let pci = &of("pci").text;
    assert!(pci.contains("0000:00:00.0, NUMA node 0, 16.0 GT/s PCIe x8 of"), "{pci}");
    assert!(of("pfc and ecn").text.contains("PFC: not readable"), "{:?}", of("pfc and ecn"));
    let order = backups(&usable);
    assert_eq!(order[0].text, "the nearest first: mlx5_1, mlx5_2 (other NUMA node)");
    assert_eq!(
        command(&usable).unwrap(),
        "unbroken run --devices mlx5_0,mlx5_1,mlx5_2 -- ib_write_bw -d mlx5_0 -x 3 PEER"
    );
    assert_eq!(command(&usable[..1]), None);
}

#[test]
fn a_nic_that_is_down_is_named() {
    let machine = Machine::new();
    machine.add(0, 0, USUAL);
    machine.port(0, "state", "1: DOWN");
    machine.port(0, "phys_state", "3: Disabled");
    let line = only(machine.problems());
    assert_eq!((line.check, line.subject.as_str()), ("port", "mlx5_0"));
    assert!(line.text.contains("DOWN, physically Disabled"), "{line:?}");
    assert_eq!(remedy(&line), "`ip link set eth0 up`");
    machine.port(0, "phys_state", "2: Polling");
    assert!(remedy(&only(machine.problems())).contains("cable"));
    let devices = machine.devices();
    assert!(!is_usable(&devices[0], &all_open(&devices)));
    // A port of InfiniBand without a subnet manager.
    machine.port(0, "link_layer", "InfiniBand");
    machine.port(0, "state", "2: INIT");
    assert_eq!(remedy(&only(machine.problems())), "start a subnet manager");
}

#[test]
fn a_wrong_type_of_gid_is_named() {
    let machine = Machine::new();
    machine.add(0, 0, &[(LINK_LOCAL, V1), (IPV4, V1)]);
    let line = only(machine.problems());
    assert_eq!((line.check, line.subject.as_str()), ("gid", "mlx5_0"));
    assert!(line.text.contains("RoCE v1 GIDs alone"), "{line:?}");
    assert!(remedy(&line).contains("ip addr add ADDRESS/24 dev eth0"), "{line:?}");
    let devices = machine.devices();
    assert!(!is_usable(&devices[0], &all_open(&devices)));

    let none = Machine::new();
    none.add(0, 0, &[]);
    assert!(only(none.problems()).text.contains("no GID"));

    let local = Machine::new();
    local.add(0, 0, &[(LINK_LOCAL, V1), (LINK_LOCAL, V2)]);
    assert_eq!(local.problems(), []);
    let lines = local.lines();
    let gid = lines.iter().find(|line| line.check == "gid").unwrap();
    assert!(gid.level == Level::Note && gid.text.contains("link-local"), "{gid:?}");
}

#[test]
fn an_index_behind_empty_entries_is_the_ports_own() {
    let machine = Machine::new();
    machine.add(0, 0, &[]);
    let empty = "0000:0000:0000:0000:0000:0000:0000:0000";
    for i in 0..16 {
        machine.port(0, &format!("gids/{i}"), empty);
    }
    machine.port(0, "gids/5", IPV4);
    machine.port(0, "gid_attrs/types/5", V2);
    let devices = machine.devices();
    assert_eq!(devices[0].port().unwrap().chosen().unwrap().1, 5);
    assert_eq!(devices[0].port().unwrap().gids.len(), 6);
}

#[test]
fn a_device_that_programs_cannot_open_is_named() {
    let machine = Machine::new();
    machine.add(0, 0, USUAL);
    let node = machine.folder.path().join("dev/infiniband/uverbs0");
    fs::remove_file(&node).unwrap();
    let line = only(machine.problems());
    assert!(line.check == "open" && line.text.contains("uverbs0 is not there"), "{line:?}");
    assert!(remedy(&line).contains("docker: `--device"), "{line:?}");
    fs::remove_file(machine.roots.sys.join("class/infiniband_verbs/uverbs0/ibdev")).unwrap();
    assert_eq!(remedy(&only(machine.problems())), "`modprobe ib_uverbs`");
    let mut device = machine.devices().remove(0);
    device.node = Node::Refused(PathBuf::from("/dev/x"), "Permission denied".into());
    let line = checks::opens(&device, &[]);
    assert!(line.text.contains("Permission denied") && remedy(&line).contains("udev"), "{line:?}");
    device.node = Node::Opens(PathBuf::from("/dev/x"));
    assert!(remedy(&checks::opens(&device, &[])).contains("ibverbs-providers"));
    let refused = [("mlx5_0".to_owned(), Err("no memory".to_owned()))];
    assert!(checks::opens(&device, &refused).text.contains("no memory"));
    assert!(!is_usable(&device, &refused));
}

#[test]
fn devices_that_are_not_there_are_named() {
    let (none, lines) = checks::choose(Machine::new().devices(), None);
    assert!(none.is_empty());
    assert!(only(lines).text.contains("no RDMA device in /sys/class/infiniband"));
    let machine = Machine::new();
    machine.add(0, 0, USUAL);
    let (_, lines) = checks::choose(machine.devices(), None);
    assert!(only(lines).text.contains("mlx5_0 alone"));
    machine.add(1, 0, USUAL);
    let named = ["mlx5_1", "mlx5_7", "mlx5_0"].map(String::from);
    let (chosen, lines) = checks::choose(machine.devices(), Some(&named));
    assert_eq!(chosen.iter().map(|d| &d.name[..]).collect::<Vec<_>>(), ["mlx5_1", "mlx5_0"]);
    assert_eq!((lines[0].level, lines[1].level), (Level::Ok, Level::Problem));
    assert!(lines[1].text.contains("it has mlx5_0, mlx5_1"), "{lines:?}");
    // iWARP, which nothing protects.
    machine.write("sys/class/infiniband/mlx5_1/node_type", "4: RNIC");
    let (chosen, lines) = checks::choose(machine.devices(), None);
    assert_eq!((chosen.len(), lines.len()), (1, 2));
}

#[test]
fn a_backup_that_is_not_reached_is_named() {
    let machine = Machine::new();
    machine.add(0, 0, USUAL);
    machine.add(1, 0, USUAL);
    let devices = machine.devices();
    let both: Vec<&Device> = devices.iter().collect();
    let reach = |from: &str, to: &str, took| Reach { from: from.into(), to: to.into(), took };
    let all = vec![
        reach("mlx5_0", "mlx5_1", Err("no answer (retries exceeded)".into())),
        reach("mlx5_1", "mlx5_0", Ok(Duration::from_micros(12))),
    ];
    let lines = paths(&both, &Sent::Done(all));
    assert_eq!(lines[0].level, Level::Problem);
    assert_eq!((lines[0].check, lines[0].subject.as_str()), ("path", "mlx5_0-mlx5_1"));
    assert!(lines[0].text.contains("no answer"), "{:?}", lines[0]);
    assert!(remedy(&lines[0]).contains("arping -I eth0"), "{:?}", lines[0]);
    assert_eq!((lines[1].level, &lines[1].text[..]), (Level::Ok, "64 bytes arrived in 12 us"));
    assert!(remedy(&lines[2]).contains("`ib_write_bw -d mlx5_0 -x 3 PEER`"), "{:?}", lines[2]);
    let too_many = paths(&both, &Sent::Done(vec![reach("mlx5_0", "mlx5_7", Err("x".into()))]));
    assert!(too_many[1].text.ends_with("not tried: mlx5_1"), "{too_many:?}");
    assert_eq!(only(paths(&both, &Sent::NotAsked)).level, Level::Note);
    assert_eq!(only(paths(&both, &Sent::Failed("busy".into()))).level, Level::Problem);
}

#[test]
fn backups_with_addresses_of_another_kind_are_named() {
    let machine = Machine::new();
    machine.add(0, 0, USUAL);
    machine.add(1, 0, &[(LINK_LOCAL, V2), (IPV6, V2)]);
    let devices = machine.devices();
    let both: Vec<&Device> = devices.iter().collect();
    let lines = backups(&both);
    let problem = only(lines.into_iter().filter(|l| l.level == Level::Problem).collect());
    assert_eq!(problem.subject, "mlx5_0-mlx5_1");
    assert!(problem.text.contains("RoCE v2 IPv4") && problem.text.contains("RoCE v2 IPv6"));
}

#[test]
fn what_is_not_readable_is_said_so() {
    let machine = Machine::new();
    machine.add(0, 0, USUAL);
    let devices = machine.devices();
    let text = |machine: &Machine| system::gpu(&machine.roots, &devices).text;
    let before = text(&machine);
    assert!(before.contains("no module for peer memory"), "{before}");
    assert!(before.contains("configuration is not readable"), "{before}");
    assert!(before.contains("ACS: not readable"), "{before}");
    machine.write("proc/sys/kernel/osrelease", "6.1.0-18-amd64");
    machine.write("boot/config-6.1.0-18-amd64", "CONFIG_DMABUF_MOVE_NOTIFY=y\nCONFIG_PCI_P2PDMA=y");
    machine.write("sys/module/nvidia_peermem/refcnt", "0");
    let after = text(&machine);
    assert!(after.contains("loaded: nvidia_peermem; dma-buf: the kernel has it"), "{after}");
    assert_eq!(system::kernel(&machine.roots).text, "Linux 6.1.0-18-amd64");
    machine.write("sys/class/net/eth0/ecn/roce_np/enable/3", "1");
    machine.write("sys/class/net/eth0/ecn/roce_np/enable/4", "0");
    let ecn = checks::congestion(&machine.roots, &devices[0]).text;
    assert!(ecn.contains("ECN priorities: receiver 3, sender not readable"), "{ecn}");
}

#[test]
fn a_bond_is_named_with_its_legs() {
    let machine = Machine::new();
    machine.add(0, 0, USUAL);
    let line = || machine.lines().into_iter().find(|line| line.check == "bond");
    assert!(line().is_none(), "an interface of its own");
    machine.write("sys/class/net/eth0/bonding/slaves", "ens1f0 ens1f1");
    for leg in ["ens1f0", "ens1f1"] {
        machine.write(format!("sys/class/net/{leg}/bonding_slave/mii_status"), "up");
    }
    let healthy = line().unwrap();
    assert_eq!(healthy.level, Level::Note);
    assert!(healthy.text.starts_with("eth0 is a bond of ens1f0 and ens1f1"), "{}", healthy.text);
    machine.write("sys/class/net/ens1f1/bonding_slave/mii_status", "down");
    let broken = line().unwrap();
    assert_eq!(broken.level, Level::Problem);
    assert!(broken.text.ends_with("ens1f1 is down, 1 of 2 carry"), "{}", broken.text);
}
