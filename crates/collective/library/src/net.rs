//! NICs, queue pairs and slots: what the paths and streams of engines are made of. *Peers* are
//! numbered through all engines: a peer here is one rank in one of them.
//!
//! Each NIC has a protection domain and a completion queue. A path over it is a plain (or logical)
//! queue pair with receives that have no memory: every one is used by a notice, and posted again
//! when that is polled. Slots of a peer are one memory for all rails, registered with each NIC, so
//! that a stream can go on over any of them. A NIC that cannot make a queue pair, as one that was
//! dead, is opened anew.

use std::collections::HashMap;

use unbroken::{Host, Qp, QpAddress, QpCaps, QpOptions, RemoteRegion, Wc, WcOpcode, WcStatus};
use unbroken_collective_protocol::frame::{Notice, HEADER_BYTES, MEMORY, OUT_OF_BAND};
use unbroken_collective_protocol::{ProbeId, Rank, Slot};

use crate::adapter::{
    cq_entries, is_want, rights, Adapter, Area, Link, Ties, Use, RECEIVES, SENDS,
};
use crate::memory::MemoryPath;

/// Completions that are taken at one time.
const BATCH: usize = 32;
/// What a test of a path writes: keys are tried, too.
const TEST_BYTES: usize = 64;

/// What a work request was.
const FRAME: u64 = 1 << 32;
const NOTICE: u64 = 2 << 32;
const TEST: u64 = 3 << 32;
const RECEIVE: u64 = 4 << 32;

/// How queue pairs are to be.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) logical: bool,
    pub(crate) slots: u64,
    pub(crate) payload: u32,
    pub(crate) ack_timeout: u8,
    pub(crate) retries: u8,
}

impl Shape {
    fn options(&self, sends: u32, receives: u32) -> QpOptions {
        let (max_send_wr, max_recv_wr) = (sends, receives);
        let caps = QpCaps {
            max_send_wr,
            max_recv_wr,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: 0,
        };
        QpOptions::default()
            .with_caps(caps)
            .with_plain(true)
            .with_access(rights())
            .with_timeout(self.ack_timeout)
            .with_retry_cnt(self.retries)
    }
}

/// What has come over a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum News {
    Notice(u32),
    Sent(Option<u8>),
    Tested,
    Failed,
    Probed(ProbeId, bool),
}

/// The NICs of this rank and all that it has with others.
pub(crate) struct Net {
    host: Host,
    shape: Shape,
    rails: u8,
    /// Of each NIC's queue.
    cq_entries: u32,
    adapters: Vec<Option<Adapter>>,
    ties: Vec<Ties>,
    /// Paths through memory that were made, and need no test.
    tested: Vec<Rank>,
    /// Queue pairs of probes, with their rails.
    probes: HashMap<ProbeId, (u8, Qp)>,
    /// How often NICs were opened anew.
    openings: u64,
    /// By rail; memory behind them.
    sent_bytes: Vec<u64>,
}

impl Net {
    /// Opens the NICs; one that is dead now is opened when it is needed. That this process has too
    /// little for them is an error.
    pub(crate) fn new(host: Host, rails: u8, ranks: usize, shape: Shape) -> unbroken::Result<Net> {
        let cq_entries = cq_entries(ranks);
        let adapters = (0..rails).map(|rail| match Adapter::open(&host, rail, 0, cq_entries) {
            Err(e) if is_want(e.errno()) => Err(e),
            opened => Ok(opened.ok()),
        });
        let adapters = adapters.collect::<unbroken::Result<_>>()?;
        Ok(Net {
            host,
            shape,
            rails,
            cq_entries,
            adapters,
            ties: Vec::new(),
            tested: Vec::new(),
            probes: HashMap::new(),
            openings: 0,
            sent_bytes: vec![0; usize::from(rails) + 1],
        })
    }

    /// Makes room for so many peers more, and gives the first one's number here.
    pub(crate) fn more(&mut self, peers: usize) -> usize {
        let first = self.ties.len();
        self.ties.resize_with(first + peers, Ties::default);
        first
    }

    fn slot_bytes(&self) -> usize {
        self.shape.payload as usize + HEADER_BYTES
    }

    /// Bytes of all slots of a peer. Behind them is what tests of paths write.
    fn area_bytes(&self) -> usize {
        usize::from(self.rails) * self.shape.slots as usize * self.slot_bytes()
    }

    /// Where a slot begins, in its area.
    fn at(&self, slot: Slot) -> usize {
        let stream = usize::from(slot.stream) * self.shape.slots as usize;
        (stream + (slot.seq % self.shape.slots) as usize) * self.slot_bytes()
    }

    fn area(&self, peer: Rank) -> Option<&Area> {
        self.ties[peer].areas.values().next()
    }

    /// Puts bytes into a slot that is to be sent.
    pub(crate) fn put(&self, slot: Slot, at: usize, bytes: &[u8]) {
        if slot.stream == MEMORY {
            if let Some(memory) = &self.ties[slot.peer].memory {
                memory.put(slot.seq, at, bytes);
            }
        } else if let Some(area) = self.area(slot.peer) {
            let done = area.out.write(self.at(slot) + at, bytes);
            debug_assert!(done.is_ok(), "slots are as long as frames");
        }
    }

    /// Takes bytes from a slot that came.
    pub(crate) fn get(&self, slot: Slot, at: usize, out: &mut [u8]) {
        if slot.stream == MEMORY {
            if let Some(memory) = &self.ties[slot.peer].memory {
                memory.get(slot.seq, at, out);
            }
        } else if let Some(area) = self.area(slot.peer) {
            let done = area.into.read_into(self.at(slot) + at, out);
            debug_assert!(done.is_ok(), "slots are as long as frames");
        }
    }

    /// Reads bytes of a slot that is to be sent.
    pub(crate) fn copy_out(&self, slot: Slot, at: usize, bytes: &mut [u8]) {
        if let Some(area) = self.area(slot.peer) {
            let done = area.out.read_into(self.at(slot) + at, bytes);
            debug_assert!(done.is_ok(), "slots are as long as frames");
        }
    }

    /// Writes bytes into a slot that receives.
    pub(crate) fn copy_in(&self, slot: Slot, at: usize, bytes: &[u8]) {
        if let Some(area) = self.area(slot.peer) {
            let done = area.into.write(self.at(slot) + at, bytes);
            debug_assert!(done.is_ok(), "slots are as long as frames");
        }
    }

    /// Makes this end of a path over a NIC and gives what the other must know.
    pub(crate) fn open(&mut self, peer: Rank, path: u8, nic: u8) -> unbroken::Result<Vec<u8>> {
        if path == MEMORY {
            let (memory, path) = MemoryPath::create(self.slot_bytes(), self.shape.slots)?;
            self.ties[peer].memory = Some(memory);
            return Ok(path.into_os_string().into_encoded_bytes());
        }
        if path == OUT_OF_BAND {
            return self.make_slots(peer).map(|()| Vec::new());
        }
        // A NIC that has died is another when it is well again; it is opened anew once nothing is
        // left of the old one.
        let stale = self.adapters[usize::from(nic)].as_ref().is_none_or(|adapter| adapter.stale);
        if stale && !self.is_used(nic) {
            self.reopen(nic)?;
        }
        let made = self.make(peer, nic);
        if let (Err(_), Some(adapter)) = (&made, &mut self.adapters[usize::from(nic)]) {
            adapter.stale = true;
        }
        let (qp, into) = made?;
        let blob = format!("{} {:x} {:x} {:x}", qp.address(), into.addr, into.rkey, into.len);
        if let Some(adapter) = &mut self.adapters[usize::from(nic)] {
            adapter.uses.insert(qp.qpn(), Use::Path(peer, path));
        }
        self.ties[peer].links.insert(path, Link { qp, nic, remote: None });
        Ok(blob.into_bytes())
    }

    /// Whether there are paths over a NIC.
    fn is_used(&self, nic: u8) -> bool {
        self.ties.iter().any(|t| t.links.values().any(|link| link.nic == nic))
    }

    /// Makes the slots of a peer, if no path has needed them yet. An error where no NIC has a link.
    fn make_slots(&mut self, peer: Rank) -> unbroken::Result<()> {
        let gone = || unbroken::Error::device_gone("no NIC of this host has a link".to_string());
        let nic = (0..self.rails).find(|nic| self.has_link(*nic)).ok_or_else(gone)?;
        let bytes = self.area_bytes() + TEST_BYTES;
        let ties = &mut self.ties[peer];
        if let (true, Some(adapter)) = (ties.areas.is_empty(), &self.adapters[usize::from(nic)]) {
            let area = ties.area_for(adapter, bytes)?;
            ties.areas.insert(nic, area);
        }
        Ok(())
    }

    fn reopen(&mut self, rail: u8) -> unbroken::Result<()> {
        self.openings += 1;
        self.adapters[usize::from(rail)] =
            Some(Adapter::open(&self.host, rail, self.openings, self.cq_entries)?);
        Ok(())
    }

    fn make(&mut self, peer: Rank, rail: u8) -> unbroken::Result<(Qp, RemoteRegion)> {
        let gone = || unbroken::Error::device_gone(format!("NIC {rail} is not open"));
        let adapter = self.adapters[usize::from(rail)].as_ref().ok_or_else(gone)?;
        let caps = QpCaps {
            max_send_wr: SENDS,
            max_recv_wr: RECEIVES,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: 0,
        };
        let options = QpOptions::default()
            .with_caps(caps)
            .with_plain(!self.shape.logical)
            .with_access(rights())
            .with_timeout(self.shape.ack_timeout)
            .with_retry_cnt(self.shape.retries);
        let qp = adapter.pd.create_qp(&adapter.cq, &options)?;
        // Behind the queue pair, which a dead NIC does not make: what is registered with one that
        // is dead has keys that are good nowhere when it is well.
        let bytes = self.area_bytes() + TEST_BYTES;
        let ties = &mut self.ties[peer];
        if ties.areas.get(&rail).is_none_or(|area| area.opening != adapter.opening) {
            let area = ties.area_for(adapter, bytes)?;
            ties.areas.insert(rail, area);
        }
        for _ in 0..RECEIVES {
            qp.recv_notice(RECEIVE)?;
        }
        if !self.shape.logical && !adapter.nic.has_link() {
            return Err(unbroken::Error::device_gone(format!("NIC {rail} has no link")));
        }
        Ok((qp, ties.areas[&rail].into.remote()))
    }

    /// Connects this end.
    pub(crate) fn connect(&mut self, peer: Rank, path: u8, address: &[u8]) -> unbroken::Result<()> {
        let text = std::str::from_utf8(address)
            .map_err(|_| unbroken::Error::invalid("an address that is no text"))?;
        let mut words = text.split(' ');
        let address: QpAddress = words.next().unwrap_or_default().parse()?;
        let mut number = || words.next().and_then(|w| u64::from_str_radix(w, 16).ok());
        let (Some(addr), Some(rkey), Some(len)) = (number(), number(), number()) else {
            return Err(unbroken::Error::invalid(format!("`{text}` is no address of a path")));
        };
        let Some(link) = self.ties[peer].links.get_mut(&path) else {
            return Err(unbroken::Error::invalid("a path that was not made"));
        };
        link.qp.connect(&address)?;
        link.remote = Some(RemoteRegion { addr, rkey: rkey as u32, len });
        Ok(())
    }

    /// Maps the memory that the peer has made.
    pub(crate) fn map(&mut self, peer: Rank, path: &[u8]) -> unbroken::Result<()> {
        let text = std::str::from_utf8(path)
            .map_err(|_| unbroken::Error::invalid("a path that is no text"))?;
        self.ties[peer].memory =
            Some(MemoryPath::open(text.into(), self.slot_bytes(), self.shape.slots)?);
        Ok(())
    }

    /// Bytes that were sent over each rail; the last is memory.
    pub(crate) fn sent_bytes(&self) -> &[u64] {
        &self.sent_bytes
    }

    /// Sends a slot.
    pub(crate) fn post(&mut self, slot: Slot, path: u8, bytes: u32) -> bool {
        let ties = &self.ties[slot.peer];
        if path == MEMORY {
            self.sent_bytes[usize::from(self.rails)] += u64::from(bytes);
            if let Some(memory) = &ties.memory {
                memory.post(slot.seq);
            }
            return ties.memory.is_some();
        }
        let Some(link) = ties.links.get(&path) else { return false };
        let Some(area) = ties.areas.get(&link.nic) else { return false };
        self.sent_bytes[usize::from(link.nic)] += u64::from(bytes);
        let (Some(remote), at) = (&link.remote, self.at(slot)) else { return false };
        let imm = Notice::frame(slot.stream, slot.seq).encode();
        let wr_id = FRAME | u64::from(slot.stream);
        link.qp
            .write_imm(wr_id, &area.out, at..at + bytes as usize, (remote, at as u64), imm)
            .is_ok()
    }

    /// Sends a notice alone.
    pub(crate) fn notify(&self, peer: Rank, path: u8, notice: u32) -> bool {
        let ties = &self.ties[peer];
        if path == MEMORY {
            ties.memory.iter().for_each(|memory| memory.notify(notice));
            return ties.memory.is_some();
        }
        ties.links.get(&path).is_some_and(|link| link.qp.notify(NOTICE, notice).is_ok())
    }

    /// Writes what nobody reads.
    pub(crate) fn test(&mut self, peer: Rank, path: u8) -> bool {
        if path == MEMORY {
            self.tested.push(peer);
            return true;
        }
        let at = self.area_bytes();
        let (links, areas) = (&self.ties[peer].links, &self.ties[peer].areas);
        let Some(link) = links.get(&path) else { return false };
        let Some(area) = areas.get(&link.nic) else { return false };
        let Some(remote) = &link.remote else { return false };
        link.qp.write(TEST, &area.out, at..at + TEST_BYTES, (remote, at as u64)).is_ok()
    }

    /// Ends this end of a path: a queue pair that is destroyed takes nothing in any more.
    pub(crate) fn close(&mut self, peer: Rank, path: u8) {
        if let Some(link) = self.ties[peer].links.remove(&path) {
            if let Some(adapter) = &mut self.adapters[usize::from(link.nic)] {
                adapter.uses.remove(&link.qp.qpn());
            }
            // One that has failed is there already.
            let _ = link.qp.fail();
        }
    }

    /// The rails with paths whose NIC is dead or has no link, as far as it knows itself. None where
    /// queue pairs go elsewhere by themselves.
    pub(crate) fn linkless(&mut self) -> Vec<u8> {
        if self.shape.logical {
            return Vec::new();
        }
        let linkless: Vec<u8> =
            (0..self.rails).filter(|rail| self.is_used(*rail) && !self.has_link(*rail)).collect();
        for rail in &linkless {
            self.adapters[usize::from(*rail)].iter_mut().for_each(|adapter| adapter.stale = true);
        }
        linkless
    }

    /// Makes an end of a probe: a queue pair that fails with its path, whatever carries data.
    pub(crate) fn open_probe(&mut self, probe: ProbeId, rail: u8) -> unbroken::Result<Vec<u8>> {
        let gone = || unbroken::Error::device_gone(format!("NIC {rail} is not open"));
        let options = self.shape.options(1, 1);
        let adapter = self.adapters[usize::from(rail)].as_mut().ok_or_else(gone)?;
        let qp = adapter.pd.create_qp(&adapter.cq, &options)?;
        adapter.uses.insert(qp.qpn(), Use::Probe(probe));
        let address = qp.address().to_string().into_bytes();
        self.probes.insert(probe, (rail, qp));
        Ok(address)
    }

    /// Connects it.
    pub(crate) fn connect_probe(&mut self, probe: ProbeId, address: &[u8]) -> unbroken::Result<()> {
        let address: QpAddress = String::from_utf8_lossy(address).parse()?;
        self.probes.get(&probe).map_or(Ok(()), |(_, qp)| qp.connect(&address))
    }

    /// Writes no bytes.
    pub(crate) fn send_probe(&mut self, probe: ProbeId) -> bool {
        self.probes.get(&probe).is_some_and(|(_, qp)| qp.probe(TEST).is_ok())
    }

    /// Ends it.
    pub(crate) fn close_probe(&mut self, probe: ProbeId) {
        let Some((rail, qp)) = self.probes.remove(&probe) else { return };
        if let Some(adapter) = &mut self.adapters[usize::from(rail)] {
            adapter.uses.remove(&qp.qpn());
        }
    }

    pub(crate) fn has_link(&self, rail: u8) -> bool {
        self.adapters[usize::from(rail)].as_ref().is_some_and(|adapter| adapter.nic.has_link())
    }

    /// Takes what has come over all paths; at most a batch of each NIC, and as much from memory.
    pub(crate) fn poll(&mut self, came: &mut Vec<(Rank, u8, News)>) {
        let mut wcs = [Wc::default(); BATCH];
        for rail in 0..self.adapters.len() {
            let Some(adapter) = &self.adapters[rail] else { continue };
            // A queue that cannot be polled is a dead NIC's; its queue pairs fail where they are
            // posted to.
            let n = adapter.cq.poll_into(&mut wcs).unwrap_or(0);
            for wc in &wcs[..n] {
                match adapter.uses.get(&wc.qp_num) {
                    Some(Use::Path(peer, path)) => {
                        came.extend(self.news(*peer, *path, wc).map(|news| (*peer, *path, news)));
                    }
                    Some(Use::Probe(probe)) => {
                        let answered = wc.status == WcStatus::Success as u32;
                        came.push((probe.prober, rail as u8, News::Probed(*probe, answered)));
                    }
                    None => {}
                }
            }
        }
        came.extend(self.tested.drain(..).map(|peer| (peer, MEMORY, News::Tested)));
        for (peer, ties) in self.ties.iter_mut().enumerate() {
            let Some(memory) = &mut ties.memory else { continue };
            for _ in 0..BATCH {
                match memory.poll() {
                    Some(notice) => came.push((peer, MEMORY, News::Notice(notice))),
                    None => break,
                }
            }
        }
    }

    fn news(&self, peer: Rank, path: u8, wc: &Wc) -> Option<News> {
        if wc.status != WcStatus::Success as u32 {
            return Some(News::Failed);
        }
        if wc.opcode == WcOpcode::RecvRdmaWithImm as u32 {
            let link = self.ties[peer].links.get(&path)?;
            if link.qp.recv_notice(RECEIVE).is_err() {
                return Some(News::Failed);
            }
            return Some(News::Notice(u32::from_be(wc.imm_data)));
        }
        match wc.wr_id & !0xffff_ffff {
            FRAME => Some(News::Sent(Some(wc.wr_id as u8))),
            TEST => Some(News::Tested),
            _ => Some(News::Sent(None)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};
    use unbroken_fabric::{DeviceKind, Fabric, Runtime, Shape as Network};

    /// What comes at either end until something does that counts.
    fn until(nets: &mut [Net; 2], found: impl Fn(usize, News) -> bool) -> bool {
        let began = Instant::now();
        while began.elapsed() < Duration::from_secs(20) {
            for (k, net) in nets.iter_mut().enumerate() {
                let mut came = Vec::new();
                net.poll(&mut came);
                if came.iter().any(|(_, _, news)| *news == News::Failed) {
                    return false;
                }
                if came.iter().any(|(_, _, news)| found(k, *news)) {
                    return true;
                }
            }
        }
        false
    }

    /// Makes a path, of which peer 0 is the other end at both, and sends a frame each way.
    fn carries(nets: &mut [Net; 2]) -> bool {
        let slot = Slot { peer: 0, stream: 0, seq: 0 };
        let addresses = [nets[0].open(0, 0, 0).unwrap(), nets[1].open(0, 0, 0).unwrap()];
        nets[0].connect(0, 0, &addresses[1]).unwrap();
        nets[1].connect(0, 0, &addresses[0]).unwrap();
        (0..2).all(|k| {
            nets[k].post(slot, 0, 64)
                && until(nets, |at, news| at != k && matches!(news, News::Notice(_)))
        })
    }

    /// A NIC may be well again at any point of making a path anew: what was done before that is
    /// worth nothing.
    #[test]
    fn a_nic_that_was_opened_while_it_was_dead_is_good_when_it_is_well() {
        let folder = tempfile::tempdir().unwrap();
        let runtime = Runtime::at(folder.path()).unwrap();
        let mut network = Network::standard(0);
        network.kind.device = DeviceKind::Plain;
        let fabric = Fabric::create(&runtime, &network).unwrap();
        let shape = Shape { logical: false, slots: 4, payload: 4096, ack_timeout: 13, retries: 3 };
        let mut nets = ["a", "b"].map(|host| {
            let mut net =
                Net::new(Host::emulated(folder.path(), host).unwrap(), 2, 2, shape).unwrap();
            net.more(1);
            net
        });
        assert!(carries(&mut nets));
        fabric.set(&"nic a/0 dead".parse().unwrap(), None).unwrap();
        let began = Instant::now();
        while nets[0].linkless().is_empty() {
            assert!(began.elapsed() < Duration::from_secs(20), "nobody notices");
        }
        nets.iter_mut().for_each(|net| net.close(0, 0));
        assert!(nets[0].open(0, 0, 0).is_err(), "a dead NIC makes no queue pair");
        nets[0].reopen(0).unwrap();
        fabric.clear(None).unwrap();
        while nets[0].make(0, 0).is_err() {
            assert!(began.elapsed() < Duration::from_secs(20), "it is not well again");
        }
        assert!(carries(&mut nets), "what the other end writes is refused");
    }
}
