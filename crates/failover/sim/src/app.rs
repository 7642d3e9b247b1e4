//! The application at one end of a logical QP, and what it is owed.
//!
//! It sends numbered messages with patterns of their own, checks everything that completes, and
//! then overwrites what the transport must no longer touch: a data buffer whose send completed, a
//! receive buffer, the target of a WRITE that is known to have run. Whatever is read or written
//! there afterwards is found by the peer's check of the pattern, or by the last look at the memory.
//! So these invariants are checked here, in every schedule:
//! 1. every signalled send WR completes once, in order; every receive at most once, in order; each
//!    two-sided send consumes one;
//! 2. when a WC is delivered, the memory that it speaks of is right, and nothing changes it
//!    afterwards;
//! 3. WRITEs of the peer become visible in their order: while one is not complete, nothing of those
//!    behind it is there;
//! 4. of a request that is wrong, see [`crate::own`], the error comes at its place, flushes behind
//!    it, and nothing behind it has run.

mod errors;

use crate::memory::{first_word, Area, HostMemory, KEY};
use crate::own::Mistake;
use crate::plan::{Msg, Plan};
use unbroken_types::{SendFlags, SendOpcode, SendWr, Sge, Wc, WcFlags, WcOpcode, WcStatus};

/// Immediate data of a message.
fn imm_of(index: usize) -> u32 {
    0xabcd_0000 | index as u32
}

/// The name of the pattern of a message: `from` is the host that sends it.
fn pattern(from: usize, qp: usize, index: usize) -> u64 {
    ((from as u64) << 60) | ((qp as u64) << 50) | ((index as u64 + 1) << 24)
}

/// The name of the pattern that an application leaves behind where it is done.
fn done_pattern(host: usize, qp: usize, area: Area, index: usize) -> u64 {
    (1 << 63)
        | ((host as u64) << 60)
        | ((qp as u64) << 50)
        | ((area as u64) << 48)
        | ((index as u64 + 1) << 24)
}

/// A key that nobody has.
const NO_KEY: u32 = KEY + 1;

/// What every atomic adds to what it finds, by whatever operation.
const ADDED: u64 = 0x1_0000_0001;

/// What has become of the WRs of one queue.
#[derive(Debug, Default, Clone)]
struct Queue {
    posted: usize,
    done: usize,
    /// Of these, with success: none that is behind an error.
    good: usize,
    /// The first error, then flushes.
    failed: bool,
}

/// One end of a logical QP, seen by the application.
#[derive(Debug)]
pub struct App {
    host: usize,
    qp: usize,
    msgs: Vec<Msg>,
    /// Which messages of the peer consume a receive.
    consuming: Vec<usize>,
    /// Their lengths.
    lens: Vec<u32>,
    /// The lengths of those messages of the peer that are WRITEs.
    writes: Vec<Option<u32>>,
    credit: usize,
    sq_depth: usize,
    /// Receives are shared: those that nobody used do not come back as flushed.
    srq: bool,
    sends: Queue,
    recvs: Queue,
    /// The QP has failed: nothing more is posted.
    stopped: bool,
    /// The peer's WRITEs whose targets here are known to be final: all before this one.
    final_writes: usize,
    /// All before this one have been there in full.
    placed_writes: usize,
    /// What is wrong on this QP.
    own: Option<errors::Own>,
    /// A process is killed in this schedule.
    crash: bool,
}

impl App {
    /// The application at `host` of logical QP `qp`; fills its data.
    pub fn new(
        host: usize,
        qp: usize,
        whole: &Plan,
        sq_depth: usize,
        memory: &[HostMemory; 2],
    ) -> App {
        let plan = &whole.qps[qp];
        let own = whole.own.clone().filter(|own| own.qp == qp);
        let peers = &plan.msgs[1 - host];
        let consuming: Vec<usize> =
            (0..peers.len()).filter(|&k| peers[k].opcode.consumes_receive()).collect();
        let lens = consuming.iter().map(|&k| peers[k].len).collect();
        let is_write = |m: &Msg| matches!(m.opcode, SendOpcode::Write | SendOpcode::WriteImm);
        let writes = peers.iter().map(|m| is_write(m).then_some(m.len)).collect();
        let msgs = plan.msgs[host].clone();
        for (k, m) in msgs.iter().enumerate() {
            let (at, area) = match m.opcode {
                op if op.awaits_data() => (1 - host, Area::Remote),
                _ => (host, Area::Local),
            };
            memory[at].fill(memory[at].address(qp, area, k), m.len, pattern(host, qp, k));
        }
        App {
            host,
            qp,
            msgs,
            consuming,
            lens,
            writes,
            credit: plan.credit[host] as usize,
            sq_depth,
            srq: plan.srq[host],
            sends: Queue::default(),
            recvs: Queue::default(),
            stopped: false,
            final_writes: 0,
            placed_writes: 0,
            own: own.map(|own| errors::Own::new(own, host, whole.spares_path(qp))),
            crash: whole.crash,
        }
    }

    /// The messages.
    pub fn msgs(&self) -> &[Msg] {
        &self.msgs
    }

    /// Whether all is done, with success or not.
    pub fn finished(&self, peer: &App) -> bool {
        let flushed = self.srq || self.recvs.done == self.recvs.posted;
        // Of what has failed at the peer alone nobody tells the receives here.
        let cut_off = peer.got_own_error()
            && (flushed || !peer.own.as_ref().is_some_and(|own| own.error.ends_peer()));
        let over = self.gave_up() || self.failed() || self.ended_by_own();
        self.sends_finished()
            && (self.recvs.done == self.consuming.len() || over && flushed || cut_off)
    }

    /// Whether all sends are done, with success or not.
    pub fn sends_finished(&self) -> bool {
        // When it failed, an unsignalled send may have completed with nobody left to say so.
        let silent = |k: usize| !self.msgs[k].flags.contains(SendFlags::SIGNALED);
        self.sends.done == self.msgs.len()
            || (self.gave_up() && (self.sends.done..self.sends.posted).all(silent))
    }

    /// Whether it posts no more. What it posts to a QP that has ended by its own mistake must be
    /// flushed.
    fn gave_up(&self) -> bool {
        self.stopped || (self.sends.failed && !self.ended_by_own())
    }

    /// The QP has failed: nothing more is posted.
    pub fn stop(&mut self) {
        self.stopped = true;
    }

    /// Receives posted that have not completed.
    pub fn receives_left(&self) -> usize {
        self.recvs.posted - self.recvs.done
    }

    /// Whether an error was delivered.
    pub fn failed(&self) -> bool {
        self.sends.failed || self.recvs.failed
    }

    /// Sends posted, and not known to be complete.
    pub fn outstanding(&self) -> usize {
        self.sends.posted - self.sends.done
    }

    /// The next send to post, if the send queue has room.
    pub fn next_send(&mut self, memory: &HostMemory) -> Option<Post> {
        let k = self.sends.posted;
        if self.gave_up() || k == self.msgs.len() || self.outstanding() >= self.sq_depth {
            return None;
        }
        self.sends.posted += 1;
        let m = self.msgs[k];
        let addr = memory.address(self.qp, Area::Local, k);
        let inline = m.flags.contains(SendFlags::INLINE).then(|| memory.copy(addr, m.len));
        let found = first_word(pattern(self.host, self.qp, k));
        let mut post = Post {
            index: k,
            msg: m,
            sges: Post::entries(addr, m.len),
            inline,
            remote_addr: 0,
            rkey: KEY,
            displaced: 0,
            found,
        };
        match self.wrong_with_send(k) {
            Some(Mistake::RemoteKey) => post.rkey = NO_KEY,
            Some(Mistake::Misaligned) => post.displaced = 4,
            Some(Mistake::LocalKey) => post.sges.last_mut().expect("an entry").lkey = NO_KEY,
            _ => {}
        }
        Some(post)
    }

    /// The next receive to post: its id and where its data goes.
    pub fn next_recv(&mut self, memory: &HostMemory, max_len: u32) -> Option<(u64, Vec<Sge>)> {
        let j = self.recvs.posted;
        if self.gave_up()
            || j == self.consuming.len()
            || j - self.recvs.done >= self.credit
            || self.withholds(j)
        {
            return None;
        }
        self.recvs.posted += 1;
        let addr = memory.address(self.qp, Area::Recv, j);
        let wrong = self.wrong_with_receive(j);
        let len = if wrong == Some(Mistake::ShortReceive) { self.lens[j] - 1 } else { max_len };
        let mut sges = Post::entries(addr, len);
        if wrong == Some(Mistake::ReceiveKey) {
            sges[0].lkey = NO_KEY;
        }
        Some((j as u64, sges))
    }

    /// A WC of the send queue.
    pub fn on_send_wc(
        &mut self,
        wc: &Wc,
        memory: &[HostMemory; 2],
        peer: &mut App,
    ) -> Result<(), String> {
        let k = wc.wr_id as usize;
        let at = format!("qp {} host {}: send WC {k} status {}", self.qp, self.host, wc.status);
        if k < self.sends.done || k >= self.sends.posted {
            return Err(format!(
                "{at}: {} are done, {} posted",
                self.sends.done, self.sends.posted
            ));
        }
        if wc.status != WcStatus::Success as u32 {
            return self
                .on_send_error(k, wc.status, memory, peer)
                .map_err(|e| format!("{at}: {e}"));
        }
        if self.sends.failed {
            return Err(format!("{at}: success behind an error"));
        }
        if !self.msgs[k].flags.contains(SendFlags::SIGNALED) {
            return Err(format!("{at}: a success that nobody asked for"));
        }
        if let Some(skipped) =
            (self.sends.done..k).find(|&i| self.msgs[i].flags.contains(SendFlags::SIGNALED))
        {
            return Err(format!("{at}: {skipped} has not completed"));
        }
        for i in self.sends.done..=k {
            self.complete(i, memory, peer).map_err(|e| format!("{at}: message {i}: {e}"))?;
        }
        (self.sends.done, self.sends.good) = (k + 1, k + 1);
        Ok(())
    }

    fn on_send_error(
        &mut self,
        k: usize,
        status: u32,
        memory: &[HostMemory; 2],
        peer: &mut App,
    ) -> Result<(), String> {
        let flush = WcStatus::WrFlushErr as u32;
        if self.sends.failed && (status != flush || k != self.sends.done) {
            return Err(format!("after an error, a flush of {} is due", self.sends.done));
        }
        if let Some(skipped) =
            (self.sends.done..k).find(|&i| self.msgs[i].flags.contains(SendFlags::SIGNALED))
        {
            return Err(format!("{skipped} has not completed"));
        }
        if !self.sends.failed {
            self.first_send_error(k, status, memory, peer)?;
        }
        self.sends.failed = true;
        self.sends.done = k + 1;
        Ok(())
    }

    /// Message `k` has completed with success: is it where it should be? Then leave nothing to send
    /// again.
    fn complete(
        &mut self,
        k: usize,
        memory: &[HostMemory; 2],
        peer: &mut App,
    ) -> Result<(), String> {
        let (m, qp, here) = (self.msgs[k], self.qp, self.host);
        let local = memory[here].address(qp, Area::Local, k);
        if m.opcode.awaits_data() && !memory[here].holds(local, m.len, pattern(here, qp, k)) {
            return Err(format!("{:?} brought other data", m.opcode));
        }
        if m.opcode.is_atomic() && self.runs(k, memory) != Some(1) {
            return Err("the atomic has not run once".into());
        }
        if m.opcode.consumes_receive() {
            let received = peer.consuming[..peer.recvs.done].binary_search(&k).is_ok();
            if !received && !peer.failed() && !peer.stopped {
                return Err("complete, but the peer has no WC".into());
            }
        }
        if matches!(m.opcode, SendOpcode::Write | SendOpcode::WriteImm) {
            peer.settle_writes(k + 1, memory)?;
        }
        memory[here].fill(local, m.len, done_pattern(here, qp, Area::Local, k));
        Ok(())
    }

    /// How often atomic `k` has run, by what is in the peer's memory; `None` where it is something
    /// else.
    fn runs(&self, k: usize, memory: &[HostMemory; 2]) -> Option<u64> {
        let there = &memory[1 - self.host];
        let changed = there
            .word(there.address(self.qp, Area::Remote, k))
            .wrapping_sub(first_word(pattern(self.host, self.qp, k)));
        changed.is_multiple_of(ADDED).then_some(changed / ADDED)
    }

    /// All WRITEs of the peer before message `end` are known to have run: check their targets, then
    /// overwrite them.
    fn settle_writes(&mut self, end: usize, memory: &[HostMemory; 2]) -> Result<(), String> {
        let (qp, here) = (self.qp, self.host);
        for k in self.final_writes..end {
            let Some(len) = self.writes[k] else { continue };
            let at = memory[here].address(qp, Area::Remote, k);
            if !memory[here].holds(at, len, pattern(1 - here, qp, k)) {
                return Err(format!("the target of WRITE {k} holds other data"));
            }
            memory[here].fill(at, len, done_pattern(here, qp, Area::Remote, k));
        }
        self.final_writes = self.final_writes.max(end);
        Ok(())
    }

    /// Whether WRITEs of the peer, as far as they have come, have come in their order: programs
    /// poll the last byte of what they await.
    pub fn check_order(&mut self, memory: &HostMemory) -> Result<(), String> {
        let (qp, from) = (self.qp, 1 - self.host);
        let at = |k: usize| memory.address(qp, Area::Remote, k);
        let mut writes = (self.placed_writes.max(self.final_writes)..self.writes.len())
            .filter_map(|k| Some((k, self.writes[k]?)));
        let missing =
            writes.by_ref().find(|&(k, len)| !memory.holds(at(k), len, pattern(from, qp, k)));
        self.placed_writes = missing.map_or(self.writes.len(), |(k, _)| k);
        match writes.find(|&(k, len)| !memory.is_untouched(at(k), len)) {
            Some((k, _)) => Err(format!(
                "qp {qp} host {}: WRITE {k} shows before {}",
                self.host, self.placed_writes
            )),
            None => Ok(()),
        }
    }

    /// A WC of the receive queue.
    pub fn on_recv_wc(
        &mut self,
        wc: &Wc,
        memory: &[HostMemory; 2],
        peer: &App,
    ) -> Result<(), String> {
        let j = wc.wr_id as usize;
        let at = format!("qp {} host {}: receive WC {j} status {}", self.qp, self.host, wc.status);
        if j != self.recvs.done || j >= self.recvs.posted {
            return Err(format!("{at}: {} is due, {} posted", self.recvs.done, self.recvs.posted));
        }
        self.recvs.done += 1;
        if wc.status != WcStatus::Success as u32 {
            let first = !std::mem::replace(&mut self.recvs.failed, true);
            return match first {
                true => self.first_recv_error(j, wc).map_err(|e| format!("{at}: {e}")),
                false if wc.status == WcStatus::WrFlushErr as u32 => Ok(()),
                false => Err(format!("{at}: not a flush")),
            };
        }
        if self.recvs.failed {
            return Err(format!("{at}: success behind an error"));
        }
        self.recvs.good += 1;
        self.check_received(j, wc, memory, peer).map_err(|e| format!("{at}: {e}"))
    }

    fn check_received(
        &mut self,
        j: usize,
        wc: &Wc,
        memory: &[HostMemory; 2],
        peer: &App,
    ) -> Result<(), String> {
        let (qp, here) = (self.qp, self.host);
        let k = self.consuming[j];
        let m = peer.msgs[k];
        if k >= peer.sends.posted {
            return Err(format!("message {k} was never sent"));
        }
        if self.is_behind_an_error(k, peer) {
            return Err(format!("message {k} is wrong, or behind one that is"));
        }
        let opcode = if m.opcode == SendOpcode::WriteImm {
            WcOpcode::RecvRdmaWithImm
        } else {
            WcOpcode::Recv
        };
        if (wc.opcode, wc.byte_len) != (opcode as u32, m.len) {
            return Err(format!(
                "opcode {} length {}, not {opcode:?} of {}",
                wc.opcode, wc.byte_len, m.len
            ));
        }
        let with_imm = wc.wc_flags & WcFlags::WITH_IMM != 0;
        if with_imm != (m.opcode != SendOpcode::Send) || (with_imm && wc.imm_data != imm_of(k)) {
            return Err(format!("immediate {with_imm} {:#x}, message {k}", wc.imm_data));
        }
        let buffer = memory[here].address(qp, Area::Recv, j);
        if m.opcode != SendOpcode::WriteImm
            && !memory[here].holds(buffer, m.len, pattern(1 - here, qp, k))
        {
            return Err(format!("the buffer does not hold message {k}"));
        }
        memory[here].fill(buffer, m.len, done_pattern(here, qp, Area::Recv, j));
        self.settle_writes(k + 1, memory)
    }

    /// The last look at the memory: what the application has left behind must still be there.
    pub fn check_memory(&self, memory: &[HostMemory; 2], peer: &App) -> Result<(), String> {
        let (qp, here) = (self.qp, self.host);
        let left = |area: Area, index: usize, len: u32| {
            let at = memory[here].address(qp, area, index);
            if memory[here].holds(at, len, done_pattern(here, qp, area, index)) {
                return Ok(());
            }
            Err(format!("qp {qp} host {here}: {area:?} {index} was changed after its WC"))
        };
        self.check_own_error(memory, peer)?;
        for k in 0..self.sends.good {
            left(Area::Local, k, self.msgs[k].len)?;
        }
        for k in (0..self.sends.posted).filter(|&k| self.msgs[k].opcode.is_atomic()) {
            let runs = self.runs(k, memory);
            if !matches!(runs, Some(0 | 1)) {
                return Err(format!("qp {qp} host {here}: atomic {k} has run {runs:?} times"));
            }
        }
        for k in 0..self.final_writes {
            if let Some(len) = self.writes[k] {
                left(Area::Remote, k, len)?;
            }
        }
        for (j, &k) in self.consuming[..self.recvs.good].iter().enumerate() {
            left(Area::Recv, j, peer.msgs[k].len)?;
        }
        Ok(())
    }
}

/// A send to be posted.
#[derive(Debug)]
pub struct Post {
    /// Its number, and its wr_id.
    pub index: usize,
    /// The message.
    pub msg: Msg,
    /// Its data.
    pub sges: Vec<Sge>,
    /// Its data, if it goes inline.
    pub inline: Option<Vec<u8>>,
    /// Where the peer keeps the target.
    pub remote_addr: u64,
    /// By which key.
    pub rkey: u32,
    /// So far beside that is what it names.
    pub displaced: u64,
    /// What an atomic is to find.
    pub found: u64,
}

impl Post {
    /// One entry, or two for what is long enough.
    fn entries(addr: u64, len: u32) -> Vec<Sge> {
        let sge = |addr, length| Sge { addr, length, lkey: KEY };
        if len > 64 {
            let first = len / 3;
            vec![sge(addr, first), sge(addr + u64::from(first), len - first)]
        } else {
            vec![sge(addr, len)]
        }
    }

    /// The WR.
    pub fn wr(&self) -> SendWr<'_> {
        SendWr {
            wr_id: self.index as u64,
            opcode: self.msg.opcode,
            flags: self.msg.flags,
            imm_data: imm_of(self.index),
            remote_addr: self.remote_addr + self.displaced,
            rkey: self.rkey,
            compare_add: if self.msg.opcode == SendOpcode::FetchAdd { ADDED } else { self.found },
            swap: self.found.wrapping_add(ADDED),
            sges: &self.sges,
            inline_data: self.inline.as_deref(),
            ud: None,
        }
    }
}
