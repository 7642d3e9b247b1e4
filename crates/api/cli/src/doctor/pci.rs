//! The PCI device behind an RDMA device: its link, and what the bridges above it do with peers.

use std::fs;
use std::path::{Path, PathBuf};

use super::machine::text;

/// Where extended capabilities begin in the configuration space. Only root can read it from there
/// on.
const EXTENDED: usize = 0x100;
const ACS: u16 = 0x000d;
/// Offset of the control register in the capability.
const ACS_CONTROL: usize = 6;
/// P2P request redirect and P2P completion redirect.
const REDIRECT: u16 = 1 << 2 | 1 << 3;
/// Capabilities of one device; the space has room for no more.
const MAX_CAPABILITIES: usize = 960;

/// Whether the bridges above send what devices send each other up to the root complex.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Acs {
    NotReadable,
    /// No bridge does.
    Off,
    /// These do.
    Redirects(Vec<String>),
}

/// A PCI device.
#[derive(Clone, Debug)]
pub(crate) struct Pci {
    pub(crate) address: String,
    /// −1 where the machine does not say.
    pub(crate) numa_node: i32,
    /// `16.0 GT/s PCIe x16`; empty where it is not readable (virtual functions).
    pub(crate) link: String,
    /// The most that it can have.
    pub(crate) max_link: String,
    pub(crate) acs: Acs,
}

impl Pci {
    /// By a path that leads to its folder; none where it is no PCI device.
    pub(crate) fn of(path: &Path) -> Option<Pci> {
        let folder = fs::canonicalize(path).ok()?;
        let address = address(&folder)?;
        let link = |which: &str| {
            let of = |what: &str| text(&folder.join(format!("{which}_link_{what}")));
            match (of("speed"), of("width")) {
                (Some(speed), Some(width)) if width != "0" && width != "255" => {
                    format!("{speed} x{width}")
                }
                _ => String::new(),
            }
        };
        let numa_node = text(&folder.join("numa_node")).and_then(|t| t.parse().ok());
        Some(Pci {
            link: link("current"),
            max_link: link("max"),
            numa_node: numa_node.unwrap_or(-1),
            acs: acs_above(&folder),
            address,
        })
    }
}

/// The name of a folder, if it is a PCI address: `0000:3b:00.0`.
fn address(folder: &Path) -> Option<String> {
    let name = folder.file_name()?.to_str()?;
    let is_hex = |part: &str| !part.is_empty() && part.chars().all(|c| c.is_ascii_hexdigit());
    let parts: Vec<&str> = name.split([':', '.']).collect();
    (parts.len() == 4 && name.contains('.') && parts.iter().all(|part| is_hex(part)))
        .then(|| name.to_owned())
}

fn acs_above(folder: &Path) -> Acs {
    let bridges: Vec<PathBuf> =
        folder.ancestors().skip(1).take_while(|f| address(f).is_some()).map(Into::into).collect();
    let mut on = Vec::new();
    for bridge in &bridges {
        match fs::read(bridge.join("config")) {
            Ok(config) if config.len() > EXTENDED => {
                if acs_control(&config).is_some_and(|control| control & REDIRECT != 0) {
                    on.extend(address(bridge));
                }
            }
            _ => return Acs::NotReadable,
        }
    }
    if on.is_empty() {
        Acs::Off
    } else {
        Acs::Redirects(on)
    }
}

/// The ACS control register of a device, if it has one.
fn acs_control(config: &[u8]) -> Option<u16> {
    let word = |at: usize| Some(u16::from_le_bytes(config.get(at..at + 2)?.try_into().ok()?));
    let mut at = EXTENDED;
    for _ in 0..MAX_CAPABILITIES {
        // id u16, then version in 4 bits and the next one's offset in 12
        let (id, next) = (word(at)?, usize::from(word(at + 2)? >> 4));
        if id == ACS {
            return word(at + ACS_CONTROL);
        }
        if next < EXTENDED {
            return None;
        }
        at = next;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A configuration space with another capability before that of ACS.
    fn config(control: u16) -> Vec<u8> {
        let mut bytes = vec![0; 4096];
        bytes[0x100..0x104].copy_from_slice(&[0x01, 0x00, 0x02, 0x20]); // AER, next at 0x200
        bytes[0x200..0x204].copy_from_slice(&[0x0d, 0x00, 0x01, 0x00]);
        bytes[0x206..0x208].copy_from_slice(&control.to_le_bytes());
        bytes
    }

    #[test]
    fn redirection_is_read_from_the_bridges() {
        assert_eq!(acs_control(&config(0x1d)), Some(0x1d));
        assert_eq!(acs_control(&[0; 256]), None);
        let mut circle = config(0);
        circle[0x100..0x104].copy_from_slice(&[0x01, 0x00, 0x02, 0x10]);
        assert_eq!(acs_control(&circle), None, "it ends");
        let folder = tempfile::tempdir().unwrap();
        let bridge = folder.path().canonicalize().unwrap().join("pci0000:00/0000:00:01.0");
        let nic = bridge.join("0000:01:00.0");
        fs::create_dir_all(&nic).unwrap();
        assert_eq!(acs_above(&nic), Acs::NotReadable);
        fs::write(bridge.join("config"), config(0)).unwrap();
        assert_eq!(acs_above(&nic), Acs::Off);
        fs::write(bridge.join("config"), config(0x1d)).unwrap();
        assert_eq!(acs_above(&nic), Acs::Redirects(vec!["0000:00:01.0".into()]));
        // As others than root see it.
        fs::write(bridge.join("config"), &config(0x1d)[..64]).unwrap();
        assert_eq!(acs_above(&nic), Acs::NotReadable);
    }

    #[test]
    fn addresses_of_pci() {
        for (name, is) in [("0000:3b:00.0", true), ("pci0000:00", false), ("rxe0", false)] {
            assert_eq!(address(Path::new(name)).is_some(), is, "{name}");
        }
    }
}
