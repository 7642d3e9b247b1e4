//! Whether one device reaches another over the network: a queue pair between the two, and a message
//! over it, with plain verbs.

use crate::{HostNics, Wanted};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};
use unbroken_types::{Access, Mtu, PathAttr, PdHandle, QpCaps, QpState, QpType, Sge, Wc, WcStatus};
use unbroken_verbs::{
    Cq, Device, DeviceEvent, DeviceQp, EventSink, QpInit, QpModify, RcModify, RecvWr, Result,
    SendWr,
};

/// What is sent.
const MESSAGE_BYTES: usize = 64;
/// What the receiver's memory has before.
const BEFORE: u8 = 0;
/// Local ACK timeout, 4.096 µs · 2^14 = 67 ms, and retries: an end that does not answer is told
/// within the 2 s that callers wait, also by devices that wait four times as long.
const TIMEOUT_CODE: u8 = 14;
const RETRIES: u8 = 3;
/// Between two polls.
const POLL_EVERY: Duration = Duration::from_micros(200);
/// The first PSN of each direction.
const FIRST_PSN: u32 = 0x10;

/// What came of sending from one device to another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reach {
    /// The device that sent.
    pub from: String,
    /// The device that was sent to.
    pub to: String,
    /// The time until the message was acknowledged, or why it was not.
    pub took: std::result::Result<Duration, String>,
}

/// Sends from each of these devices of the machine to each other one, waiting at most `limit` for
/// each. An error where one cannot be used at all.
pub fn reach_each_other(names: &[String], limit: Duration) -> Result<Vec<Reach>> {
    let nics = HostNics::new(&Wanted::Named(names.to_vec()), None)?;
    let open = |i| nics.open(i, Arc::new(NoEvents) as Arc<dyn EventSink>, false);
    let devices: Vec<Arc<dyn Device>> = (0..nics.count()).map(open).collect::<Result<_>>()?;
    let pairs = devices.iter().flat_map(|from| devices.iter().map(move |to| (from, to)));
    let reach = |(from, to): (&Arc<dyn Device>, &Arc<dyn Device>)| Reach {
        from: from.name().to_owned(),
        to: to.name().to_owned(),
        took: reach(from, to, limit),
    };
    Ok(pairs.filter(|(from, to)| !Arc::ptr_eq(from, to)).map(reach).collect())
}

/// Events are not waited for: a queue pair that fails completes its send with an error.
struct NoEvents;

impl EventSink for NoEvents {
    fn event(&self, _: usize, _: DeviceEvent) {}
}

/// Sends a message from one device to another over a queue pair of type RC, and waits for it at
/// most `limit`. The time that it took, or in words why it did not arrive.
pub fn reach(
    from: &Arc<dyn Device>,
    to: &Arc<dyn Device>,
    limit: Duration,
) -> std::result::Result<Duration, String> {
    for device in [from, to] {
        if !device.usable() {
            return Err(format!("port 1 of {} is not active", device.name()));
        }
    }
    let here = End::new(from)?;
    let there = End::new(to)?;
    let mtu = mtu_of(from, to)?;
    here.connect(&there, mtu)?;
    there.connect(&here, mtu)?;
    for (i, byte) in here.memory.iter().enumerate() {
        byte.store(i as u8 + 1, Ordering::Relaxed);
    }
    there.post_recv()?;
    let start = Instant::now();
    here.post_send()?;
    let arrived = wait(&here, &there, start + limit)?;
    let same = here.bytes() == there.bytes();
    match same {
        true => Ok(arrived.saturating_duration_since(start)),
        false => Err("other bytes arrived than were sent".to_owned()),
    }
}

/// When both ends have completed; in words why they have not.
fn wait(
    here: &End<'_>,
    there: &End<'_>,
    deadline: Instant,
) -> std::result::Result<Instant, String> {
    let (mut sent, mut received) = (false, false);
    loop {
        sent |= here.completed("the send")?;
        received |= there.completed("the receive")?;
        let now = Instant::now();
        if sent && received {
            return Ok(now);
        }
        if now >= deadline {
            return Err(match sent {
                true => "it was acknowledged, and its receive did not complete in time",
                false => "it was not acknowledged in time",
            }
            .to_owned());
        }
        std::thread::sleep(POLL_EVERY);
    }
}

/// The MTU that both ports carry.
fn mtu_of(a: &Arc<dyn Device>, b: &Arc<dyn Device>) -> std::result::Result<Mtu, String> {
    let of = |device: &Arc<dyn Device>| {
        device.port(1).map(|port| port.active_mtu).map_err(|e| e.to_string())
    };
    let (a, b) = (of(a)?, of(b)?);
    Ok(if (a as u32) < b as u32 { a } else { b })
}

/// One end: a queue pair with what it needs.
struct End<'a> {
    device: &'a Arc<dyn Device>,
    memory: Box<[AtomicU8]>,
    pd: PdHandle,
    lkey: u32,
    cq: Arc<Cq>,
    qp: Arc<dyn DeviceQp>,
}

impl End<'_> {
    fn new(device: &Arc<dyn Device>) -> std::result::Result<End<'_>, String> {
        let failed = |what: &'static str| {
            let name = device.name().to_owned();
            move |e: unbroken_verbs::Error| format!("{name}: {what}: {e}")
        };
        let domain = device.memory();
        let memory: Box<[AtomicU8]> = (0..MESSAGE_BYTES).map(|_| AtomicU8::new(BEFORE)).collect();
        let cq = device.create_cq(4, None, Box::new(|_| {})).map_err(failed("no CQ"))?;
        let pd = domain.alloc_pd().map_err(failed("no protection domain"))?;
        let addr = memory.as_ptr() as u64;
        let made = domain
            .reg_mr(pd, addr, MESSAGE_BYTES as u64, addr, Access::LOCAL_WRITE)
            .map_err(failed("no memory can be registered"))
            .and_then(|keys| {
                let init = QpInit {
                    qp_type: QpType::Rc,
                    caps: QpCaps {
                        max_send_wr: 1,
                        max_recv_wr: 1,
                        max_send_sge: 1,
                        max_recv_sge: 1,
                        max_inline_data: 0,
                    },
                    pd,
                    send_cq: cq.clone(),
                    recv_cq: cq.clone(),
                    srq: None,
                    sq_sig_all: true,
                    suspend_on_error: false,
                    wc_qpn: None,
                    home: None,
                    local_keys_of: None,
                    control: false,
                    standby: false,
                    lane: None,
                    management: false,
                };
                let qp = device.create_qp(&init).map_err(failed("no queue pair"));
                qp.map(|qp| (keys.lkey, qp)).inspect_err(|_| drop(domain.dereg_mr(keys.lkey)))
            });
        let (lkey, qp) = made.inspect_err(|_| drop(domain.dealloc_pd(pd)))?;
        Ok(End { device, memory, pd, lkey, cq, qp })
    }

    fn connect(&self, peer: &End<'_>, mtu: Mtu) -> std::result::Result<(), String> {
        let to = |state| RcModify { state: Some(state), ..RcModify::default() };
        let init = RcModify { access: Some(Access::default()), ..to(QpState::Init) };
        let rtr = RcModify {
            dest_qpn: Some(peer.qp.qpn()),
            rq_psn: Some(FIRST_PSN),
            mtu: Some(mtu),
            max_dest_rd_atomic: Some(1),
            min_rnr_timer: Some(12),
            ..to(QpState::Rtr)
        };
        let rts = RcModify {
            sq_psn: Some(FIRST_PSN),
            timeout: Some(TIMEOUT_CODE),
            retry_cnt: Some(RETRIES),
            rnr_retry: Some(RETRIES),
            max_rd_atomic: Some(1),
            ..to(QpState::Rts)
        };
        let gid = peer.device.gid();
        let path = PathAttr { sgid_index: self.device.gid_index(), ..PathAttr::new(gid) };
        for (rc, path) in [(init, None), (rtr, Some(path)), (rts, None)] {
            let change = QpModify { rc, path, ..QpModify::default() };
            self.qp
                .modify(&change)
                .map_err(|e| format!("{} cannot be connected to {gid}: {e}", self.device.name()))?;
        }
        Ok(())
    }

    fn sge(&self) -> [Sge; 1] {
        let (addr, length) = (self.memory.as_ptr() as u64, MESSAGE_BYTES as u32);
        [Sge { addr, length, lkey: self.lkey }]
    }

    fn post_recv(&self) -> std::result::Result<(), String> {
        let sges = self.sge();
        let posted = self.qp.post_recv(&RecvWr { wr_id: 0, sges: &sges });
        posted.map_err(|e| format!("{}: no receive can be posted: {e}", self.device.name()))
    }

    fn post_send(&self) -> std::result::Result<(), String> {
        let sges = self.sge();
        let posted = self.qp.post_send(&SendWr { sges: &sges, ..SendWr::default() });
        posted.map_err(|e| format!("{}: no send can be posted: {e}", self.device.name()))
    }

    /// Whether its work has completed, well.
    fn completed(&self, what: &str) -> std::result::Result<bool, String> {
        let mut wcs = [Wc::default()];
        let n = self.cq.poll(&mut wcs).map_err(|e| format!("{}: {e}", self.device.name()))?;
        match wcs[0].status {
            _ if n == 0 => Ok(false),
            status if status == WcStatus::Success as u32 => Ok(true),
            status if status == WcStatus::RetryExcErr as u32 => {
                Err("no answer (retries exceeded)".to_owned())
            }
            status => {
                Err(format!("{what} of {} completed with status {status}", self.device.name()))
            }
        }
    }

    fn bytes(&self) -> Vec<u8> {
        self.memory.iter().map(|byte| byte.load(Ordering::Relaxed)).collect()
    }
}

impl Drop for End<'_> {
    /// The device lets go of the memory before it is freed.
    fn drop(&mut self) {
        self.qp.destroy();
        let domain = self.device.memory();
        if domain.dereg_mr(self.lkey).is_err() {
            // The device may still write there.
            std::mem::forget(std::mem::take(&mut self.memory));
        }
        let _ = domain.dealloc_pd(self.pd);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::soft;
    use unbroken_fabric::{Fabric, NicKind, Shape};
    use unbroken_runtime::Runtime;
    use unbroken_softnic::{Config, DeviceKind};

    const LIMIT: Duration = Duration::from_secs(20);

    #[test]
    fn a_message_arrives_until_the_cable_is_cut() {
        let folder = tempfile::tempdir().unwrap();
        let runtime = || Runtime::at(folder.path()).unwrap();
        let kind = NicKind { device: DeviceKind::Plain, ..NicKind::default() };
        let shape = Shape { kind, ..Shape::of(0, &["a", "b"], 2) };
        let fabric = Fabric::create(&runtime(), &shape).unwrap();
        let sets = ["a", "b"].map(|h| soft::with(Config::host(runtime(), h), false).unwrap());
        let open = |i| sets.each_ref().map(|set| set.open(i, Arc::new(NoEvents)).unwrap());
        let ([a0, b0], [a1, b1]) = (open(0), open(1));
        for (from, to) in [(&a0, &b0), (&b0, &a0), (&a1, &b1)] {
            reach(from, to, LIMIT).unwrap();
        }
        fabric.set(&"cable b/0 cut".parse().unwrap(), None).unwrap();
        let why = reach(&a0, &b0, LIMIT).unwrap_err();
        assert!(why.contains("no answer") || why.contains("not active"), "{why}");
        reach(&a1, &b1, LIMIT).unwrap();
        fabric.clear(None).unwrap();
        fabric.set(&"loss a/1 100%".parse().unwrap(), None).unwrap();
        assert_eq!(reach(&a1, &b1, LIMIT).unwrap_err(), "no answer (retries exceeded)");
        fabric.clear(None).unwrap();
        fabric.set(&"nic b/1 down".parse().unwrap(), None).unwrap();
        let start = Instant::now();
        while b1.usable() {
            assert!(start.elapsed() < LIMIT, "the port stays active");
            std::thread::sleep(Duration::from_millis(1));
        }
        let why = reach(&a1, &b1, LIMIT).unwrap_err();
        assert!(why.starts_with("port 1 of") && why.ends_with("not active"), "{why}");
    }

    #[test]
    fn a_wait_ends_at_its_limit() {
        let folder = tempfile::tempdir().unwrap();
        let runtime = || Runtime::at(folder.path()).unwrap();
        let fabric = Fabric::create(&runtime(), &Shape::of(0, &["a", "b"], 1)).unwrap();
        fabric.set(&"loss a/0 100%".parse().unwrap(), None).unwrap();
        let sets = ["a", "b"].map(|h| soft::with(Config::host(runtime(), h), false).unwrap());
        let [a, b] = sets.each_ref().map(|set| set.open(0, Arc::new(NoEvents)).unwrap());
        let why = reach(&a, &b, Duration::from_millis(1)).unwrap_err();
        assert_eq!(why, "it was not acknowledged in time");
    }
}
