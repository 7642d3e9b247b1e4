//! The cable of a software device (rxe, siw) is cut: whatever its network interface would send or
//! receive is lost, without a word to anybody.
//!
//! Two chains of nftables at the interface itself do that, in a table that has the device's name,
//! so that it can be taken away when the device is gone. What comes in is dropped. What goes out is
//! addressed to the interface's own Ethernet address, which nobody takes, and a switch does not
//! hand on: were it dropped, the sender would be told (rxe then sends again for ever, and no retry
//! is counted). A NIC that sends its packets itself never asks the kernel, and is refused.

use super::link::interface_of_link;
use crate::counters::SYSFS;
use std::fs;
use std::io::{self, Read, Write};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};
use unbroken_verbs::{Error, Result};

/// For so long nft is waited for.
const LONGEST: Duration = Duration::from_secs(10);
const LONGEST_MESSAGE_BYTES: u64 = 4096;

/// Cuts the cable of a device. EOPNOTSUPP where it sends past the kernel.
pub(super) fn cut(device: &str) -> Result<()> {
    let interface = interface_of_link(device)?;
    if !is_software(&Path::new(SYSFS).join(device)) {
        return Err(Error::unsupported(format!(
            "'{device}' sends its packets itself, past the kernel, which can drop none of them; \
             right is 'nic {device} down', or a port of its switch that is set down"
        )));
    }
    if !is_plain(&interface) {
        return Err(Error::invalid(format!(
            "nft takes the name of the interface '{interface}' for something else; rename it"
        )));
    }
    let address = fs::read_to_string(Path::new("/sys/class/net").join(&interface).join("address"));
    let address = address.unwrap_or_default();
    if !is_ethernet(address.trim()) {
        return Err(Error::unsupported(format!(
            "the interface '{interface}' has no Ethernet address; its cable cannot be cut from here"
        )));
    }
    nft(&rules(device, &interface, address.trim()))
}

/// Whether it is cut, by whomever.
pub(super) fn is_cut(device: &str) -> bool {
    let list = ["list", "table", "netdev", &table(device)];
    let mut nft = Command::new("nft");
    nft.args(list).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    nft.spawn().and_then(|mut child| end_of(&mut child)).is_ok_and(|status| status.success())
}

/// Whether it is an Ethernet address that is somebody's.
fn is_ethernet(address: &str) -> bool {
    let bytes: Vec<Option<u8>> =
        address.split(':').map(|byte| u8::from_str_radix(byte, 16).ok()).collect();
    bytes.len() == 6 && bytes.iter().all(Option::is_some) && bytes.iter().any(|b| *b != Some(0))
}

/// Whether nftables takes an interface's name as it is: a `*` at its end would stand for others.
fn is_plain(interface: &str) -> bool {
    interface.bytes().all(|b| b.is_ascii_alphanumeric() || b"_-.@+".contains(&b))
}

/// Mends it. One that is not cut is mended.
pub(super) fn mend(device: &str) -> Result<()> {
    let table = table(device);
    nft(&format!("add table netdev {table}\ndelete table netdev {table}\n"))
}

/// Whether the kernel sends a device's packets by a network interface. rxe says by which one; a
/// device that is on no bus (siw on a bridge, a veth or a VLAN) has no other way.
fn is_software(device: &Path) -> bool {
    device.join("parent").exists() || !device.join("device").exists()
}

/// The names of devices are names of nftables, too, behind a letter.
fn table(device: &str) -> String {
    format!("unbroken_cable_{device}")
}

/// The table anew. It is there as a whole or not at all.
fn rules(device: &str, interface: &str, address: &str) -> String {
    let table = table(device);
    let chain = |hook: &str, rule: &str| {
        let at = format!("type filter hook {hook} device \"{interface}\" priority -500");
        format!(
            "add chain netdev {table} {hook} {{ {at}; }}\nadd rule netdev {table} {hook} {rule}\n"
        )
    };
    format!(
        "add table netdev {table}\ndelete table netdev {table}\nadd table netdev {table}\n{}{}",
        chain("ingress", "drop"),
        chain("egress", &format!("ether daddr set {address}"))
    )
}

/// Has nftables carry out a script, all of it or nothing.
fn nft(script: &str) -> Result<()> {
    let run = || -> io::Result<(ExitStatus, String)> {
        let mut child = Command::new("nft")
            .args(["-f", "-"])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()?;
        let mut stdin = child.stdin.take();
        let written = stdin.as_mut().map_or(Ok(()), |stdin| stdin.write_all(script.as_bytes()));
        drop(stdin);
        // One that has ended before it read all says why.
        let (status, mut said) = (end_of(&mut child)?, Vec::new());
        if status.success() {
            written?;
        }
        if let Some(stderr) = child.stderr.take() {
            stderr.take(LONGEST_MESSAGE_BYTES).read_to_end(&mut said)?;
        }
        Ok((status, String::from_utf8_lossy(&said).into_owned()))
    };
    let (status, said) = run().map_err(|e| match e.kind() {
        io::ErrorKind::NotFound => Error::new(
            libc::ENOENT,
            "a cable is cut by `nft`, which is not there (`apt install nftables`)",
        ),
        _ => Error::os("nft cannot be run", &e),
    })?;
    if status.success() {
        return Ok(());
    }
    let said = said.lines().next().unwrap_or("it says nothing").trim();
    Err(Error::new(
        libc::EPERM,
        format!("nft refuses the rules, which take root and a kernel from 5.16 on: {said}"),
    ))
}

/// Waits for a program's end; one that takes too long (as nft does where the kernel's lock of
/// rules is held) is ended.
fn end_of(child: &mut Child) -> io::Result<ExitStatus> {
    let deadline = Instant::now() + LONGEST;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        if Instant::now() > deadline {
            child.kill()?;
            child.wait()?;
            let why = format!("no end after {} s", LONGEST.as_secs());
            return Err(io::Error::new(io::ErrorKind::TimedOut, why));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ways_of_the_interface_are_lost_in_a_table_of_the_device() {
        let rules = rules("rxe-0.1", "eth0", "02:00:00:00:00:01");
        let lost = [("ingress", "drop"), ("egress", "ether daddr set 02:00:00:00:00:01")];
        for (hook, rule) in lost {
            let chain = format!(
                "add chain netdev unbroken_cable_rxe-0.1 {hook} {{ type filter hook {hook} device \
                 \"eth0\" priority -500; }}"
            );
            let drop = format!("add rule netdev unbroken_cable_rxe-0.1 {hook} {rule}");
            assert!(rules.lines().any(|line| line == chain), "{rules}");
            assert!(rules.lines().any(|line| line == drop), "{rules}");
        }
    }

    #[test]
    fn no_interface_is_cut_but_the_one_that_is_named() {
        assert!(["eth0", "br-0_1.20", "veth@x+"].into_iter().all(is_plain));
        assert!(!["eth*", "a\"b", "a\\", "a;b", "ü"].into_iter().any(is_plain));
    }

    #[test]
    fn addresses_are_those_of_ethernet() {
        assert!(is_ethernet("52:54:00:ab:cd:0f"));
        let infiniband = ["00"; 20].join(":");
        for other in ["", "00:00:00:00:00:00", "52:54:00:ab:cd", "x2:54:00:ab:cd:0f", &infiniband] {
            assert!(!is_ethernet(other), "{other}");
        }
    }

    #[test]
    fn devices_that_send_past_the_kernel_are_told_from_others() {
        let folder = tempfile::tempdir().unwrap();
        for (name, files, software) in [
            ("rxe0", &["parent", "device"][..], true),
            ("siw0", &[], true),
            ("mlx5_0", &["device"], false),
        ] {
            let device = folder.path().join(name);
            std::fs::create_dir(&device).unwrap();
            files.iter().for_each(|file| std::fs::write(device.join(file), "").unwrap());
            assert_eq!(is_software(&device), software, "{name}");
        }
    }
}
