//! A NIC's own protection domain.

use crate::commands::Commands;
use std::sync::Arc;
use unbroken_types::PdHandle;
use unbroken_verbs::{MemoryDomain, Result};

/// A protection domain of a NIC, for as long as the application's is there, or something on the NIC
/// is in it.
pub(crate) struct NicPd {
    domain: Arc<dyn MemoryDomain>,
    commands: Arc<Commands>,
    handle: PdHandle,
}

impl NicPd {
    pub(super) fn new(domain: Arc<dyn MemoryDomain>, commands: Arc<Commands>) -> Result<NicPd> {
        let handle = domain.alloc_pd()?;
        Ok(NicPd { domain, commands, handle })
    }

    /// Whether it belongs to that opening of its NIC.
    pub(super) fn is_of(&self, domain: &Arc<dyn MemoryDomain>) -> bool {
        Arc::ptr_eq(&self.domain, domain)
    }

    /// Its handle on the NIC.
    pub(crate) fn handle(&self) -> PdHandle {
        self.handle
    }
}

impl Drop for NicPd {
    fn drop(&mut self) {
        let (domain, handle) = (self.domain.clone(), self.handle);
        // A NIC that is dead has none any more.
        self.commands.now_or_later(move || drop(domain.dealloc_pd(handle)));
    }
}
