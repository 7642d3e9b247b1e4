//! What is asked can be called off.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;

use crate::Error;

/// Whether what is computed is still wanted. Its clones are the same.
#[derive(Clone, Debug, Default)]
pub struct Stop(Arc<AtomicBool>);

impl Stop {
    /// It is wanted no longer: whoever computes ends soon, with [`Error::Stopped`].
    pub fn stop(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// An error once it is wanted no longer.
    pub fn check(&self) -> Result<(), Error> {
        match self.0.load(Ordering::Relaxed) {
            true => Err(Error::Stopped),
            false => Ok(()),
        }
    }
}
