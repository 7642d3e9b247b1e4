//! What `{:?}` shows of the types of this crate: what a log needs, and no contents of memory.

use std::fmt::{Debug, Formatter, Result};

use crate::{
    Context, ContextOptions, CpuWorkers, Kick, Memory, Qp, Recv, Reliable, Running, Send, Transfer,
};

impl Debug for ContextOptions {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        f.debug_struct("ContextOptions")
            .field("nics", &self.nics)
            .field("channels", &self.channels)
            .field("max_qps", &self.max_qps)
            .finish_non_exhaustive()
    }
}

impl Debug for Context {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        f.debug_struct("Context")
            .field("channels", &self.channels())
            .field("protection", &self.protection())
            .finish_non_exhaustive()
    }
}

impl Debug for Qp {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        f.debug_struct("Qp").field("counters", &self.counters()).finish_non_exhaustive()
    }
}

impl Debug for Memory {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        f.debug_struct("Memory")
            .field("addr", &self.addr())
            .field("len", &self.len())
            .finish_non_exhaustive()
    }
}

impl Debug for Recv {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        f.debug_struct("Recv")
            .field("number", &self.number())
            .field("progress", &self.progress())
            .finish_non_exhaustive()
    }
}

impl Debug for Send {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        f.debug_struct("Send").field("number", &self.number()).finish_non_exhaustive()
    }
}

impl Debug for Reliable {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        f.debug_struct("Reliable")
            .field("rtt", &self.rtt())
            .field("loss", &self.loss())
            .finish_non_exhaustive()
    }
}

impl Debug for Transfer {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        f.debug_struct("Transfer").field("outcome", &self.poll()).finish_non_exhaustive()
    }
}

impl Debug for Running {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        f.debug_struct("Running").finish_non_exhaustive()
    }
}

impl Debug for CpuWorkers {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        f.debug_struct("CpuWorkers").finish_non_exhaustive()
    }
}

impl Debug for Kick {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        f.debug_struct("Kick").finish_non_exhaustive()
    }
}
