//! What a region is made of, so that it can be made on other NICs later.

use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use unbroken_types::{Access, PdHandle};
use unbroken_verbs::{duplicate, MemoryDomain, MrKeys, Result};

/// The descriptor of a dma-buf.
pub(super) enum Descriptor {
    /// The caller's, which may be none: the device says so.
    Caller(RawFd),
    /// Ours, for as long as the region lives.
    Kept(OwnedFd),
}

impl Descriptor {
    fn raw(&self) -> RawFd {
        match self {
            Descriptor::Caller(fd) => *fd,
            Descriptor::Kept(fd) => fd.as_raw_fd(),
        }
    }
}

/// Memory of the process, or of a device behind a dma-buf.
pub(super) enum MrSource {
    Range { addr: u64, len: u64, iova: u64 },
    Dmabuf { fd: Descriptor, offset: u64, len: u64, iova: u64 },
}

impl MrSource {
    /// Makes the region on a device.
    pub(super) fn register(
        &self,
        domain: &dyn MemoryDomain,
        pd: PdHandle,
        access: Access,
    ) -> Result<MrKeys> {
        match self {
            MrSource::Range { addr, len, iova } => domain.reg_mr(pd, *addr, *len, *iova, access),
            MrSource::Dmabuf { fd, offset, len, iova } => {
                domain.reg_dmabuf_mr(pd, fd.raw(), *offset, *len, *iova, access)
            }
        }
    }

    /// Its bytes.
    pub(super) fn len(&self) -> u64 {
        match self {
            MrSource::Range { len, .. } | MrSource::Dmabuf { len, .. } => *len,
        }
    }

    /// Whether a region of it may get other memory or rights: libibverbs changes no region of a
    /// dma-buf, and where its NIC is dead nobody else would say so.
    pub(super) fn can_change(&self) -> bool {
        matches!(self, MrSource::Range { .. })
    }

    /// The same, independent of the caller: programs close their descriptor once a region is made.
    pub(super) fn keep(&self) -> Result<MrSource> {
        Ok(match self {
            MrSource::Range { addr, len, iova } => {
                MrSource::Range { addr: *addr, len: *len, iova: *iova }
            }
            MrSource::Dmabuf { fd, offset, len, iova } => {
                let fd = Descriptor::Kept(duplicate(fd.raw())?);
                MrSource::Dmabuf { fd, offset: *offset, len: *len, iova: *iova }
            }
        })
    }
}
