//! What a protected UD QP has to move. It is data, below the QP; what is done with it is in the
//! parent module, above.

use crate::nics::NicTable;
use unbroken_failover_protocol::Reason;
use unbroken_runtime::now_us;
use unbroken_types::{Gid, Mtu};
use unbroken_verbs::{Backlog, QpModify, Result};

/// What a protected UD QP has beside its physical one.
pub(crate) struct Datagram {
    /// The GIDs of its first NIC's ports, by any of which peers may address it.
    pub(super) gids: Vec<Gid>,
    /// The MTU that the program knows. A NIC with a smaller one cannot carry what it posts.
    pub(super) mtu: Mtu,
    pub(super) parked: Option<Parked>,
    pub(super) moves: u32,
    /// When it came to the NIC that it is on.
    pub(super) since_us: u64,
}

/// A QP between two NICs.
pub(super) struct Parked {
    pub(super) backlog: Backlog,
    pub(super) reason: Reason,
    pub(super) since_us: u64,
}

impl Datagram {
    /// That of a QP whose default NIC is `nic`, made on NIC `at`.
    pub(crate) fn new(nics: &NicTable, nic: usize, at: usize) -> Result<Box<Datagram>> {
        let ports = 1..=nics.attr(nic).phys_port_cnt;
        let ports = ports.map(|port| nics.port(nic, port, true)).collect::<Result<Vec<_>>>()?;
        let gids =
            ports.iter().filter_map(|port| port.gids.first().map(|entry| entry.gid)).collect();
        let mtu = ports.first().map_or(Mtu::B256, |port| port.active_mtu);
        Ok(Box::new(Datagram {
            gids,
            mtu,
            parked: None,
            moves: u32::from(at != nic),
            since_us: now_us(),
        }))
    }

    /// See [`Datagram::mtu`].
    pub(crate) fn mtu(&self) -> Mtu {
        self.mtu
    }

    /// No NIC carries it now.
    pub(crate) fn parked(&self) -> bool {
        self.parked.is_some()
    }

    /// The GID that peers see its datagrams come from, and go to: that of the port that the program
    /// has chosen.
    pub(super) fn home(&self, app: &QpModify) -> Option<Gid> {
        self.gids.get(usize::from(app.port.unwrap_or(1)).saturating_sub(1)).copied()
    }
}
