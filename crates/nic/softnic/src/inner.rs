//! What every handle of an opened NIC keeps alive.

use crate::background::Background;
use crate::shared::Shared;
use std::sync::Arc;
use unbroken_verbs::Result;

/// What every handle of a NIC keeps alive. The background thread ends with it.
pub(crate) struct Inner {
    pub(crate) shared: Arc<Shared>,
    _background: Background,
}

impl Inner {
    /// Starts the background thread.
    pub(crate) fn start(shared: Arc<Shared>) -> Result<Inner> {
        let background = Background::start(shared.clone())?;
        Ok(Inner { shared, _background: background })
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if !self.shared.process.elsewhere() {
            self.shared.lock().close(&self.shared.domain);
        }
    }
}
