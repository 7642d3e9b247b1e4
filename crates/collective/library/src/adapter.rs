//! A NIC that was opened, and what is made of it for a peer: queue pairs and registered slots.

use std::collections::HashMap;

use rustix::io::Errno;
use unbroken::{Access, Cq, Host, Nic, Pd, Qp, Region, RemoteRegion};
use unbroken_collective_protocol::{ProbeId, Rank};

use crate::memory::MemoryPath;

/// Receives of a queue pair; an engine posts no more than 128 notices over one before they are
/// complete.
pub(crate) const RECEIVES: u32 = 256;
/// Sends of a queue pair.
pub(crate) const SENDS: u32 = 256;
/// Completions that a NIC's queue holds at most; as many as its queue pairs can have, if they are
/// fewer.
const MAX_CQ_ENTRIES: usize = 1 << 16;
/// Of probes, and of queue pairs that were ended.
const MORE_CQ_ENTRIES: usize = 1 << 10;
/// A NIC.
pub(crate) struct Adapter {
    pub(crate) nic: Nic,
    /// Which opening of the NIC it is.
    pub(crate) opening: u64,
    /// It has been without a link: dead, perhaps, and then all that was made of it is of no use any
    /// more.
    pub(crate) stale: bool,
    pub(crate) pd: Pd,
    pub(crate) cq: Cq,
    /// What each queue pair is for.
    pub(crate) uses: HashMap<u32, Use>,
}

/// What a queue pair is for.
#[derive(Clone, Copy)]
pub(crate) enum Use {
    /// The path to a peer.
    Path(Rank, u8),
    Probe(ProbeId),
}

/// A queue pair of a path.
pub(crate) struct Link {
    pub(crate) qp: Qp,
    /// The NIC that it is of.
    pub(crate) nic: u8,
    /// The peer's slots, as this NIC's queue pair writes them.
    pub(crate) remote: Option<RemoteRegion>,
}

/// Slots to send from and slots to receive into, as one NIC knows them.
pub(crate) struct Area {
    /// The opening of the NIC that they are registered with.
    pub(crate) opening: u64,
    pub(crate) out: Region,
    pub(crate) into: Region,
}

/// What there is with a peer: queue pairs by path, slots by NIC.
#[derive(Default)]
pub(crate) struct Ties {
    pub(crate) links: HashMap<u8, Link>,
    pub(crate) areas: HashMap<u8, Area>,
    pub(crate) memory: Option<MemoryPath>,
}

/// Whether an error is one of this process, and not of a NIC.
pub(crate) fn is_want(errno: i32) -> bool {
    [Errno::MFILE, Errno::NFILE, Errno::NOMEM].iter().any(|want| want.raw_os_error() == errno)
}

/// Each rank has a path to each other of all ranks' channel, and one of their own two; one more may
/// be made before the completions of the last were polled.
pub(crate) fn cq_entries(ranks: usize) -> u32 {
    let of_rank = 4 * (SENDS + RECEIVES) as usize;
    ranks.saturating_mul(of_rank).saturating_add(MORE_CQ_ENTRIES).min(MAX_CQ_ENTRIES) as u32
}

pub(crate) fn rights() -> Access {
    Access::LOCAL_WRITE.with(Access::REMOTE)
}

impl Adapter {
    pub(crate) fn open(
        host: &Host,
        rail: u8,
        opening: u64,
        cq_entries: u32,
    ) -> unbroken::Result<Adapter> {
        let nic = host.open(rail.into())?;
        let (pd, cq) = (nic.alloc_pd()?, nic.create_cq(cq_entries)?);
        Ok(Adapter { nic, opening, stale: false, pd, cq, uses: HashMap::new() })
    }
}

impl Ties {
    /// The slots, registered with a NIC.
    pub(crate) fn area_for(&self, adapter: &Adapter, bytes: usize) -> unbroken::Result<Area> {
        let opening = adapter.opening;
        let (out, into) = match self.areas.values().next() {
            Some(area) => {
                (area.out.also(&adapter.pd, rights())?, area.into.also(&adapter.pd, rights())?)
            }
            None => (adapter.pd.register(bytes)?, adapter.pd.register(bytes)?),
        };
        Ok(Area { opening, out, into })
    }
}
