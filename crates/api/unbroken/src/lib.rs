//! RDMA verbs for Rust programs that keep running when NICs, ports, cables and switches fail.
//!
//! A [`Host`] has NICs; a [`Nic`] makes protection domains and completion queues; a [`Pd`]
//! registers memory ([`Region`]) and makes queue pairs ([`Qp`]). What is posted, what completes and
//! what a completion promises are those of libibverbs. A QP is *logical* unless it is asked to be
//! plain ([`QpOptions::plain`]): when its NIC or path fails, it goes on over others, and comes back
//! (docs/guide/failover.md).
//!
//! Both ends in one process, on two hosts of the emulated network ([`Host::emulated`]):
//!
//! ```
//! use unbroken::{Host, QpOptions, WcStatus};
//!
//! # fn main() -> unbroken::Result<()> {
//! # let folder = tempfile::tempdir().expect("a temporary folder");
//! # let runtime = folder.path();
//! let [a, b] = ["a", "b"].map(|name| Host::emulated(runtime, name));
//! let (a, b) = (a?.open(0)?, b?.open(0)?);
//! let (a_pd, b_pd) = (a.alloc_pd()?, b.alloc_pd()?);
//! let (a_cq, b_cq) = (a.create_cq(64)?, b.create_cq(64)?);
//! let (from, into) = (a_pd.register(4096)?, b_pd.register(4096)?);
//!
//! // Each end takes the other's address, which it has as text from anywhere.
//! let a_qp = a_pd.create_qp(&a_cq, &QpOptions::default())?;
//! let b_qp = b_pd.create_qp(&b_cq, &QpOptions::default())?;
//! a_qp.connect(&b_qp.address().to_string().parse()?)?;
//! b_qp.connect(&a_qp.address())?;
//!
//! from.write(0, b"good day")?;
//! b_qp.recv(7, &into, 0..64)?;
//! a_qp.send(1, &from, 0..8)?;
//! let came = loop {
//!     a_cq.poll(4)?; // polling drives the NIC of this end
//!     if let [came, ..] = b_cq.poll(4)?[..] {
//!         break came;
//!     }
//! };
//! assert_eq!((came.wr_id, came.status), (7, WcStatus::Success as u32));
//! assert_eq!(into.read(0..8)?, b"good day");
//! # Ok(())
//! # }
//! ```
//!
//! A program with one end begins with [`Host::from_env`], under `unbroken run`. Objects hold what
//! they need: a NIC is closed when the last of them is gone.
#![forbid(unsafe_code)]
#![warn(missing_debug_implementations)]

mod address;
mod events;
mod immediate;
mod keys;
mod qp;
mod region;
mod standing;
mod uc;
pub mod words;

pub use address::QpAddress;
pub use events::Events;
pub use keys::{Key, Window};
pub use qp::{Qp, QpOptions};
pub use region::{Region, RemoteRegion};
pub use standing::{Path, Protection};
pub use uc::{UcOptions, UcQp};
pub use unbroken_types::{
    Access, Gid, QpCaps, QpState, SendFlags, SendOpcode, Sge, Wc, WcOpcode, WcStatus,
};
#[doc(hidden)]
pub use unbroken_verbs::handles;
pub use unbroken_verbs::{
    Capabilities, Error, ErrorKind, IndirectEntry, RecvWr, Result, SendBatch, SendWr, SharedWords,
};

use std::fmt;
use std::net::IpAddr;
use std::sync::{Arc, Weak};
use unbroken_shift::api;
use unbroken_types::PdHandle;

/// The NICs of a host, and what looks after the QPs on them.
#[derive(Clone)]
pub struct Host(Arc<api::System>);

impl Host {
    /// The host that the environment names, as `unbroken run` sets it.
    pub fn from_env() -> Result<Host> {
        Ok(Host(Arc::new(unbroken_nics::from_env()?)))
    }

    /// A host of the emulated network of a runtime folder.
    pub fn emulated(runtime: &std::path::Path, name: &str) -> Result<Host> {
        Ok(Host(Arc::new(unbroken_nics::of_host(runtime, name)?)))
    }

    /// The host that the environment names, with its NICs as they are: failover supplies nothing
    /// that they lack, and hides nothing that they have, such as the memory windows of plain ones.
    /// For programs whose QPs are plain.
    pub fn bare_from_env() -> Result<Host> {
        Ok(Host(Arc::new(unbroken_nics::bare_from_env()?)))
    }

    /// A host of the emulated network of a runtime folder, with its NICs as they are, as
    /// [`Host::bare_from_env`] has them.
    pub fn bare(runtime: &std::path::Path, name: &str) -> Result<Host> {
        Ok(Host(Arc::new(unbroken_nics::bare(runtime, name)?)))
    }

    /// NICs at addresses of this machine's interfaces; processes that share the runtime folder find
    /// each other.
    pub fn at(runtime: &std::path::Path, addresses: &[IpAddr]) -> Result<Host> {
        Ok(Host(Arc::new(unbroken_nics::at(runtime, addresses)?)))
    }

    /// NICs at addresses of this machine's interfaces, as they are, as [`Host::bare_from_env`] has
    /// them.
    pub fn bare_at(runtime: &std::path::Path, addresses: &[IpAddr]) -> Result<Host> {
        Ok(Host(Arc::new(unbroken_nics::bare_at(runtime, addresses)?)))
    }

    /// This host, without holding it open.
    pub fn downgrade(&self) -> WeakHost {
        WeakHost(Arc::downgrade(&self.0))
    }

    /// How many NICs the host has.
    pub fn nic_count(&self) -> usize {
        self.0.devices().len()
    }

    /// The NUMA node of a NIC, counted from 0. `None`: it has none, as in the emulated network, or
    /// the machine does not say.
    pub fn numa_node(&self, nic: usize) -> Option<u8> {
        self.0.numa_node(nic)
    }

    /// Opens a NIC, counted from 0.
    pub fn open(&self, nic: usize) -> Result<Nic> {
        Ok(Nic(Arc::new(Opened { context: self.0.open(nic)?, _host: self.clone() })))
    }
}

impl fmt::Debug for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Host").field("nics", &self.nic_count()).finish_non_exhaustive()
    }
}

/// A [`Host`] that is there as long as others hold it, or a NIC of it.
#[derive(Clone)]
pub struct WeakHost(Weak<api::System>);

impl WeakHost {
    /// The host, if anybody holds it.
    pub fn upgrade(&self) -> Option<Host> {
        self.0.upgrade().map(Host)
    }
}

impl fmt::Debug for WeakHost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("WeakHost").field(&self.upgrade()).finish()
    }
}

struct Opened {
    context: Arc<api::Context>,
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
    fn context(&self) -> &Arc<api::Context> {
        &self.0.context
    }

    /// The GID by which peers reach the NIC.
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

impl fmt::Debug for Nic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Nic").field("gid", &self.gid()).finish_non_exhaustive()
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

impl fmt::Debug for Pd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Domain { handle, nic } = &*self.0;
        f.debug_struct("Pd").field("handle", handle).field("nic", nic).finish()
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

    /// Takes completions that are there into a slice, without allocation, and gives their number.
    pub fn poll_into(&self, wcs: &mut [Wc]) -> Result<usize> {
        self.0.poll(wcs)
    }
}

impl fmt::Debug for Cq {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cq").finish_non_exhaustive()
    }
}
