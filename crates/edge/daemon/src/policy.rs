//! The rules that have the kernel look at our tables of routes (`ip rule`): made, and made again
//! when somebody has removed them, as systemd-networkd does with those that it does not know.

use std::collections::BTreeSet;

use crate::config::Config;
use crate::error::{EdgeError, Result};
use crate::netlink::Kernel;
use crate::routes::Policy;
use crate::{failover, last};

/// Somebody who removes rules removes all: one look is enough for them.
const SETTLE_US: u64 = 50_000;
/// After an error, which may last.
const RETRY_US: u64 = 250_000;

/// Those of a configuration.
pub(crate) fn wanted(config: &Config) -> BTreeSet<Policy> {
    let first = failover::TABLE;
    let all =
        config.fast_failover.then_some(Policy { priority: first, table: first, device: None });
    let backups = config.uplinks.iter().filter(|uplink| config.frr && uplink.backup);
    let backups = backups.map(|uplink| Policy {
        priority: last::PRIORITY,
        table: last::TABLE,
        device: Some(uplink.device.clone()),
    });
    all.into_iter().chain(backups).collect()
}

/// What keeps them there.
pub(crate) struct Policies {
    kernel: Kernel,
    wanted: BTreeSet<Policy>,
    resync_us: u64,
    next_look_us: u64,
}

impl Policies {
    /// Makes those that are missing, and takes away those of ours that nobody wants.
    pub(crate) fn open(config: &Config, now_us: u64) -> Result<Policies> {
        let kernel = Kernel::open().map_err(EdgeError::at("netlink"))?;
        let resync_us = u64::from(config.resync_s) * 1_000_000;
        let mut all = Policies { kernel, wanted: wanted(config), resync_us, next_look_us: now_us };
        all.look(now_us)?;
        Ok(all)
    }

    /// The next time that [`Policies::look`] has something to do.
    pub(crate) fn deadline_us(&self) -> u64 {
        self.next_look_us
    }

    /// Rules have changed.
    pub(crate) fn changed(&mut self, now_us: u64) {
        self.next_look_us = self.next_look_us.min(now_us + SETTLE_US);
    }

    /// Makes them what they should be; gives how many were missing.
    pub(crate) fn look(&mut self, now_us: u64) -> Result<usize> {
        if now_us < self.next_look_us {
            return Ok(0);
        }
        self.next_look_us = now_us + RETRY_US;
        let made = self.kernel.make_policies(&self.wanted).map_err(error)?;
        self.next_look_us = now_us + self.resync_us;
        Ok(made)
    }
}

/// Takes all of ours away.
pub(crate) fn close() -> Result<()> {
    let mut kernel = Kernel::open().map_err(error)?;
    kernel.make_policies(&BTreeSet::new()).map_err(error).map(drop)
}

fn error(error: std::io::Error) -> EdgeError {
    EdgeError::at("ip rule")(error)
}
