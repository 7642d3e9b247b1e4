//! RDMA verbs for Rust programs that keep running when NICs, ports, cables and switches fail.
//!
//! A [`Host`] has NICs; a [`Nic`] makes protection domains and completion queues; a [`Pd`]
//! registers memory ([`Region`]) and makes queue pairs ([`Qp`]). What is posted, what completes and
//! what a completion promises are those of libibverbs. A QP is *logical* unless it is asked to be
//! plain ([`QpOptions::plain`]): when its NIC or path fails, it goes on over others, and comes back
//! (docs/guide/failover.md).
//!
//! ```no_run
//! # fn main() -> unbroken::Result<()> {
//! let host = unbroken::Host::from_env()?; // as `unbroken run` has set it
//! let nic = host.open(0)?;
//! let (pd, cq) = (nic.alloc_pd()?, nic.create_cq(64)?);
//! let region = pd.register(4096)?;
//! let qp = pd.create_qp(&cq, &unbroken::QpOptions::default())?;
//! println!("my address: {}", qp.address());
//! let peer: unbroken::QpAddress = std::env::args().nth(1).unwrap_or_default().parse()?;
//! qp.connect(&peer)?;
//! qp.send(1, &region, 0..8)?;
//! while cq.poll(4)?.is_empty() {}
//! # Ok(())
//! # }
//! ```
//!
//! Several hosts of the emulated network may live in one process ([`Host::emulated`]): that is how
//! tests have both ends at hand. Objects hold what they need: a NIC is closed when the last of them
//! is gone.
#![forbid(unsafe_code)]

mod address;
mod events;
mod immediate;
mod keys;
mod qp;
mod region;
mod uc;
pub mod words;

pub use address::QpAddress;
pub use events::Events;
pub use keys::{Key, Window};
pub use qp::{Qp, QpOptions};
pub use region::{Region, RemoteRegion};
pub use uc::{UcOptions, UcQp};
pub use unbroken_types::{
    Access, Gid, QpCaps, QpState, SendFlags, SendOpcode, Sge, Wc, WcOpcode, WcStatus,
};
#[doc(hidden)]
pub use unbroken_verbs::handles;
pub use unbroken_verbs::{
    Capabilities, Error, IndirectEntry, RecvWr, Result, SendBatch, SendWr, SharedWords,
};

use std::net::IpAddr;
use std::path::Path;
use std::sync::{Arc, Weak};
use unbroken_shift::front;
use unbroken_types::PdHandle;

/// The NICs of a host, and what looks after the QPs on them.
#[derive(Clone)]
pub struct Host(Arc<front::System>);

impl Host {
    /// The host that the environment names, as `unbroken run` sets it.
    pub fn from_env() -> Result<Host> {
        Ok(Host(Arc::new(unbroken_nics::from_env()?)))
    }

    /// A host of the emulated network of a runtime folder.
    pub fn emulated(runtime: &Path, name: &str) -> Result<Host> {
        Ok(Host(Arc::new(unbroken_nics::of_host(runtime, name)?)))
    }

    /// The host that the environment names, with its NICs as they are: failover supplies nothing
    /// that they lack, and hides nothing that they have, such as the memory windows of plain ones.
    /// For programs whose QPs are plain.
    pub fn bare_from_env() -> Result<Host> {
        Ok(Host(Arc::new(unbroken_nics::bare_from_env()?)))
    }

    /// The same of a host of the emulated network of a runtime folder.
    pub fn bare(runtime: &Path, name: &str) -> Result<Host> {
        Ok(Host(Arc::new(unbroken_nics::bare(runtime, name)?)))
    }

    /// NICs at addresses of this machine's interfaces; processes that share the runtime folder find
    /// each other.
    pub fn at(runtime: &Path, addresses: &[IpAddr]) -> Result<Host> {
        Ok(Host(Arc::new(unbroken_nics::at(runtime, addresses)?)))
    }

    /// The same host, without holding it open.
    pub fn downgrade(&self) -> WeakHost {
        WeakHost(Arc::downgrade(&self.0))
    }

    /// How many NICs it has.
    pub fn nic_count(&self) -> usize {
        self.0.devices().len()
    }

    /// Opens a NIC, counted from 0.
    pub fn open(&self, nic: usize) -> Result<Nic> {
        Ok(Nic(Arc::new(Opened { context: self.0.open(nic)?, _host: self.clone() })))
    }
}

/// A [`Host`] that is there as long as others hold it, or a NIC of it.
#[derive(Clone)]
pub struct WeakHost(Weak<front::System>);

impl WeakHost {
    /// The host, if anybody holds it.
    pub fn upgrade(&self) -> Option<Host> {
        self.0.upgrade().map(Host)
    }
}

struct Opened {
    context: Arc<front::Context>,
    _host: Host,
}

impl Drop for Opened {
    fn drop(&mut self) {
        // It fails only in a forked child, which has nothing to close.
        let _ = self.context.close();
    }
}

/// An open NIC: where its QPs are at first, and come back to.
#[derive(Clone)]
pub struct Nic(Arc<Opened>);

impl Nic {
    fn context(&self) -> &Arc<front::Context> {
        &self.0.context
    }

    /// Its address.
    pub fn gid(&self) -> Gid {
        self.context().gid()
    }

    /// Makes a protection domain.
    pub fn alloc_pd(&self) -> Result<Pd> {
        Ok(Pd(Arc::new(Domain { handle: self.context().alloc_pd()?, nic: self.clone() })))
    }

    /// Makes a completion queue.
    pub fn create_cq(&self, entries: u32) -> Result<Cq> {
        Ok(Cq(self.context().create_cq(entries, None)?))
    }
}

struct Domain {
    handle: PdHandle,
    nic: Nic,
}

impl Drop for Domain {
    fn drop(&mut self) {
        // Whatever uses it holds it, so that it is free now.
        let _ = self.nic.context().dealloc_pd(self.handle);
    }
}

/// A protection domain: memory and QPs that may work on it.
#[derive(Clone)]
pub struct Pd(Arc<Domain>);

impl Pd {
    /// Registers `bytes` of fresh memory for everything that the network can do.
    pub fn register(&self, bytes: usize) -> Result<Region> {
        Region::new(self, bytes, Access::LOCAL_WRITE.with(Access::REMOTE))
    }

    /// Registers fresh memory with certain rights.
    pub fn register_with(&self, bytes: usize, access: Access) -> Result<Region> {
        Region::new(self, bytes, access)
    }

    /// Makes an RC queue pair whose completions come to `cq`.
    pub fn create_qp(&self, cq: &Cq, options: &QpOptions) -> Result<Qp> {
        Qp::new(self, cq, options)
    }
}

/// A completion queue.
#[derive(Clone)]
pub struct Cq(Arc<unbroken_verbs::Cq>);

impl Cq {
    /// Takes up to `most` completions that are there; waits for nothing. The polling thread drives
    /// the NICs.
    pub fn poll(&self, most: usize) -> Result<Vec<Wc>> {
        let mut wcs = vec![Wc::default(); most];
        let n = self.0.poll(&mut wcs)?;
        wcs.truncate(n);
        Ok(wcs)
    }

    /// The same into a slice: without allocation.
    pub fn poll_into(&self, wcs: &mut [Wc]) -> Result<usize> {
        self.0.poll(wcs)
    }
}
