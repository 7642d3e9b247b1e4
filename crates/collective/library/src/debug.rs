//! What `{:?}` shows of the types of this crate: what a log needs, no contents of memory, and no
//! secret.

use std::fmt::{Debug, Formatter, Result};

use crate::{Bootstrap, Buffers, Communicator, Group, Request};

impl Debug for Bootstrap {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        f.debug_struct("Bootstrap").finish_non_exhaustive()
    }
}

impl Debug for Communicator {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        f.debug_struct("Communicator")
            .field("rank", &self.rank())
            .field("ranks", &self.ranks())
            .field("failure", &self.failure())
            .finish_non_exhaustive()
    }
}

impl Debug for Group<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        f.debug_struct("Group").finish_non_exhaustive()
    }
}

impl Debug for Request {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        f.debug_struct("Request").field("source", &self.source()).finish_non_exhaustive()
    }
}

impl Debug for Buffers<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        match self {
            Buffers::Apart { input, output } => f
                .debug_struct("Apart")
                .field("input_bytes", &input.len())
                .field("output_bytes", &output.len())
                .finish(),
            Buffers::InPlace(buffer) => {
                f.debug_struct("InPlace").field("bytes", &buffer.len()).finish()
            }
        }
    }
}
