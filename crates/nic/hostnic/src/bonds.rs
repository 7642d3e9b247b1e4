//! Bonds behind devices, as the kernel's bonding driver shows them.
//!
//! The driver of an RNIC makes one RDMA device of a bond (`mlx5_bond_0`). When a leg fails, the device
//! loses a part of its rate, and verbs report nothing.

use std::path::Path;

/// An interface of a bond.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BondLeg {
    /// Its name.
    pub name: String,
    /// Its link is up.
    pub is_up: bool,
}

/// The legs of a bond; `None` where that interface is no bond. `sysfs` is the kernel's `/sys`.
pub fn bond_legs(sysfs: &Path, interface: &str) -> Option<Vec<BondLeg>> {
    let net = sysfs.join("class/net");
    let text = |path: &Path| std::fs::read_to_string(path).ok();
    let is_up = |leg: &str| {
        let state = text(&net.join(leg).join("bonding_slave/mii_status"));
        state.is_some_and(|state| state.trim() == "up")
    };
    let legs = text(&net.join(interface).join("bonding/slaves"))?;
    let leg = |name: &str| BondLeg { name: name.to_owned(), is_up: is_up(name) };
    Some(legs.split_whitespace().map(leg).collect())
}
