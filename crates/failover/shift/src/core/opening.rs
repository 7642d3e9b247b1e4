//! The NICs of a process, as they are opened, die and are opened again; and the physical QPs that
//! are made on them.

use super::{lock, Core};
use crate::control::ControlEndpoint;
use crate::plain::Plain;
use crate::worker;
use std::sync::Arc;
use unbroken_verbs::{Device, HoldingQp, QpInit, Result};

/// Numbers of QPs that have moved away which may be met in a row when one is made.
const MAX_TAKEN: usize = 1024;

impl Core {
    /// The open device of NIC `i`; opens it if need be. The first such call begins to protect this
    /// process.
    pub(crate) fn open_device(self: &Arc<Self>, i: usize) -> Result<Arc<dyn Device>> {
        let device = self.device_or_open(i);
        self.worker.get_or_init(|| {
            self.open_all();
            match worker::spawn(self) {
                Ok(()) => true,
                Err(e) => {
                    self.complain("no thread for failover: queue pairs are not protected", &e);
                    false
                }
            }
        });
        device
    }

    fn device_or_open(&self, i: usize) -> Result<Arc<dyn Device>> {
        let mut slot = lock(&self.slots[i]);
        if let Some(d) = &slot.device {
            return Ok(d.clone());
        }
        let d = self.nics.open(i, self.sink.clone())?;
        slot.device = Some(d.clone());
        Ok(d)
    }

    /// Opens every NIC, so that it can be a backup, and tells the directory. In the caller's thread
    /// and not in the background: a program may overwrite the C library's functions for memory as
    /// soon as this returns (`spawn` in softnic's `background`).
    fn open_all(&self) {
        for nic in (0..self.nic_count()).filter(|_| self.failover) {
            if let Err(e) = self.open_endpoint(nic) {
                // A NIC that is dead now is opened when it is healed.
                self.complain(&format!("{} cannot be a backup", self.nic_name(nic)), &e);
            }
        }
        self.publish_process();
        self.settle();
    }

    /// The device of NIC `i` if it is open and alive.
    pub(crate) fn device(&self, i: usize) -> Option<Arc<dyn Device>> {
        lock(self.slots.get(i)?).device.clone().filter(|d| d.alive())
    }

    /// Whether NIC `i` can carry protected QPs now: packets can leave by it.
    pub(crate) fn usable(&self, i: usize) -> bool {
        self.holds(i) && self.device(i).is_some_and(|d| d.usable())
    }

    /// The NICs in the order in which they stand in for NIC `i`, itself first.
    pub(super) fn ring(&self, i: usize) -> impl Iterator<Item = usize> {
        let count = self.nic_count();
        (0..count).map(move |k| (i + k) % count)
    }

    /// The NIC that works in the place of NIC `i`, if failover is on and there is one.
    pub(crate) fn stands_in(&self, i: usize) -> Option<usize> {
        self.ring(i).skip(1).filter(|_| self.failover && self.holds(i)).find(|j| self.usable(*j))
    }

    /// Makes a physical QP on NIC `i`, or, if that is dead and the QP may be anywhere, on one that
    /// stands in for it. Its number is no other logical QP's of NIC `i`, nor of its own NIC: one
    /// that has moved keeps its number.
    pub(crate) fn make_qp(
        &self,
        i: usize,
        init: &QpInit,
        anywhere: bool,
    ) -> Result<(usize, Arc<dyn HoldingQp>)> {
        let error =
            match self.device_or_open(i).and_then(|device| self.make_qp_on(&device, i, i, init)) {
                Err(e) if anywhere && e.errno() == libc::EIO => e,
                made => return made.map(|qp| (i, qp)),
            };
        for j in self.ring(i).skip(1) {
            let Some(device) = self.device(j).filter(|_| self.usable(j)) else { continue };
            match self.make_qp_on(&device, j, i, init) {
                Err(e) if e.errno() == libc::EIO => {}
                made => return made.map(|qp| (j, qp)),
            }
        }
        Err(error)
    }

    /// Makes a physical QP on NIC `at`, for a logical QP whose default NIC is `default`.
    pub(crate) fn make_qp_on(
        &self,
        device: &Arc<dyn Device>,
        at: usize,
        default: usize,
        init: &QpInit,
    ) -> Result<Arc<dyn HoldingQp>> {
        let mut taken = Vec::new();
        loop {
            let qp = match self.holds(at) {
                true => device.create_holding_qp(init)?,
                false => Arc::new(Plain(device.create_qp(init)?)),
            };
            let qpn = qp.qpn();
            if taken.len() >= MAX_TAKEN
                || (self.qp((at, qpn)).is_none() && self.qp((default, qpn)).is_none())
            {
                return Ok(qp);
            }
            // It is kept until another is found, so that the number is not given out again.
            taken.push(qp);
        }
    }

    /// Forgets a dead device.
    pub(crate) fn drop_device(&self, i: usize) {
        let endpoints = {
            let mut slot = lock(&self.slots[i]);
            if slot.device.as_ref().is_some_and(|d| d.alive()) {
                return; // healed and opened again already
            }
            slot.device = None;
            std::mem::take(&mut slot.endpoints)
        };
        endpoints.iter().for_each(|endpoint| endpoint.close());
    }

    /// The control endpoint of NIC `i`, if it is open.
    pub(crate) fn endpoint(&self, i: usize) -> Option<Arc<ControlEndpoint>> {
        self.endpoint_on(i, 0)
    }

    /// The control endpoint on that lane.
    pub(crate) fn endpoint_on(&self, i: usize, lane: u8) -> Option<Arc<ControlEndpoint>> {
        lock(self.slots.get(i)?).endpoints.get(usize::from(lane)).cloned()
    }

    /// Opens NIC `i` with its control endpoints, unless that is done. One whose QPs cannot be moved
    /// has no use for it.
    pub(crate) fn open_endpoint(&self, i: usize) -> Result<()> {
        let device = self.device_or_open(i)?;
        let mut slot = lock(&self.slots[i]);
        if !slot.endpoints.is_empty() || !self.holds(i) {
            return Ok(());
        }
        let mut endpoints = Vec::new();
        for port in 1..=self.port_count(i) {
            match ControlEndpoint::open(&device, port, self.control_pd, &self.channel) {
                Ok(endpoint) => endpoints.push(Arc::new(endpoint)),
                Err(e) => {
                    endpoints.iter().for_each(|endpoint| endpoint.close());
                    return Err(e);
                }
            }
        }
        slot.endpoints = endpoints;
        Ok(())
    }
}
