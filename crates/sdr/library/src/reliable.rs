//! Reliable writes on a queue pair: the hands of [`unbroken_sdr_protocol::reliable`].
//!
//! Everything runs in the polls of the first channel's worker, under one lock; users' threads take
//! it to begin a write or a read, and to look whether it has ended. Parity alone is made without
//! it ([`crate::encoding`]), where there are cores to spare.

use crate::clock::now_us;
use crate::encoding::{Encoded, Job};
use crate::memory::Memory;
use crate::qp::{Core, Qp, Upper};
use crate::{lock, Error, Result};
use std::collections::HashMap;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};
use unbroken_erasure::{Backend, ChunkSet, Code, Kernel};
use unbroken_log::{tell, Level, Part};
use unbroken_sdr_model::Scheme;
use unbroken_sdr_protocol::adapt::Choice;
use unbroken_sdr_protocol::control::Control;
use unbroken_sdr_protocol::packets::{Local, Piece};
use unbroken_sdr_protocol::reliable::{
    Area, Config, Counts, Encoding, Event, Failure, Refused, Sdr,
};
use unbroken_sdr_protocol::sends::Status;

/// How writes are made reliable.
#[derive(Clone, Copy, Debug)]
pub struct ReliableOptions {
    /// How the scheme of a write is found.
    pub choice: Choice,
    /// The most parity beside a message, as a share of its chunks: what both ends have room for. 0:
    /// no codes. Both ends have the same.
    pub parity: f64,
    /// Writes leave at this rate; 0: as fast as the NICs take them, which loses much where the
    /// receiver is slower.
    pub rate_bps: u64,
    /// The round trip, until one has been measured.
    pub first_rtt: Duration,
    /// The least retransmission timeout: above what a busy receiver's thread waits for a core.
    pub least_rto: Duration,
    /// How long a write or a read may take.
    pub deadline: Duration,
    /// The most memory for parity, in messages, of writes and reads each.
    pub scratch_messages: usize,
}

impl Default for ReliableOptions {
    /// Selective Repeat with NACKs, no parity, no rate, ten seconds.
    fn default() -> ReliableOptions {
        ReliableOptions {
            choice: Choice::Fixed(Scheme::SrNack),
            parity: 0.0,
            rate_bps: 0,
            first_rtt: Duration::from_millis(50),
            least_rto: Duration::from_millis(5),
            deadline: Duration::from_secs(10),
            scratch_messages: 64,
        }
    }
}

/// The engine looks at its bitmaps no more often than this, if there is no news.
const LOOK_US: u64 = 20;
/// To have less encoded aside costs more than it takes: some 20 µs.
const LEAST_ASIDE_BYTES: u64 = 256 << 10;
/// Chunks that may wait in a channel's queue.
const BACKLOG: usize = 8;

struct State {
    engine: unbroken_sdr_protocol::reliable::Reliable<Memory>,
    scratch: Vec<Memory>,
    /// What has ended and nobody has asked for; of a write or a read that nobody waits for it is
    /// dropped.
    ended: HashMap<(bool, u64), Option<std::result::Result<u64, Failure>>>,
    look_us: u64,
}

struct Engine {
    state: Mutex<State>,
    news: Condvar,
    /// What has been encoded aside.
    encoded: Arc<Encoded>,
    /// Parity is made aside.
    aside: bool,
    scratch_most: usize,
    backend: Kernel,
}

/// Reliable writes over a queue pair, which is theirs from now on.
#[derive(Clone)]
pub struct Reliable {
    qp: Qp,
    engine: Arc<Engine>,
    options: ReliableOptions,
}

impl Reliable {
    /// Makes a queue pair carry reliable writes.
    ///
    /// # Errors
    /// One that carries them already; more parity than a message holds.
    pub fn new(qp: &Qp, options: &ReliableOptions) -> Result<Reliable> {
        let layout = qp.0.layout;
        if !(0.0..=1.0).contains(&options.parity) {
            return Err(Error::wrong(format!(
                "parity of {} of a message; 0 to 1 is right",
                options.parity
            )));
        }
        let chunk_bits = f64::from(layout.chunk_bytes) * 8e9;
        let config = Config {
            parity_chunks: (f64::from(layout.chunks) * options.parity).ceil() as u32,
            injection_ns: if options.rate_bps == 0 {
                0
            } else {
                (chunk_bits / options.rate_bps as f64) as u64
            },
            first_rtt_us: options.first_rtt.as_micros() as u64,
            least_rto_us: options.least_rto.as_micros() as u64,
        };
        let engine = Arc::new(Engine {
            state: Mutex::new(State {
                engine: unbroken_sdr_protocol::reliable::Reliable::new(&layout, config),
                scratch: Vec::new(),
                ended: HashMap::new(),
                look_us: 0,
            }),
            news: Condvar::new(),
            encoded: Arc::new(Encoded::new(qp.0.shared.works[0].clone())),
            aside: qp.0.shared.workers.spare() > 0,
            scratch_most: 2 * options.scratch_messages,
            backend: Kernel::best(),
        });
        let upper: Arc<dyn Upper> = engine.clone();
        qp.0.upper
            .set(upper)
            .map_err(|_| Error::wrong("the queue pair carries reliable writes already"))?;
        Ok(Reliable { qp: qp.clone(), engine, options: *options })
    }

    /// Writes bytes into the peer's next read.
    ///
    /// # Errors
    /// [`Error::Retry`] where too many wait; bytes that are not inside.
    pub fn write(&self, memory: &Memory, offset: u64, bytes: u64) -> Result<Transfer> {
        self.write_by(memory, offset, bytes, self.options.choice)
    }

    /// Writes bytes into the peer's next read by another choice of a scheme than that of the
    /// options.
    ///
    /// # Errors
    /// As [`Reliable::write`].
    pub fn write_by(
        &self,
        memory: &Memory,
        offset: u64,
        bytes: u64,
        choice: Choice,
    ) -> Result<Transfer> {
        self.begin(true, memory, (offset, bytes), choice)
    }

    /// Takes the peer's next write.
    ///
    /// # Errors
    /// As [`Reliable::write`].
    pub fn read(&self, memory: &Memory, offset: u64, bytes: u64) -> Result<Transfer> {
        self.begin(false, memory, (offset, bytes), self.options.choice)
    }

    fn begin(
        &self,
        write: bool,
        memory: &Memory,
        (offset, bytes): (u64, u64),
        choice: Choice,
    ) -> Result<Transfer> {
        if !memory.has(memory.addr().saturating_add(offset), bytes) {
            return Err(Error::wrong(format!(
                "{bytes} bytes at {offset} of memory that has {}",
                memory.len()
            )));
        }
        let deadline_us = now_us() + self.options.deadline.as_micros() as u64;
        let mut state = lock(&self.engine.state);
        let id = match write {
            true => state.engine.write(memory, offset, bytes, choice, deadline_us),
            false => state.engine.read(memory, offset, bytes, deadline_us),
        };
        let id = id.ok_or_else(|| Error::retry("too many writes or reads wait for their turn"))?;
        state.ended.insert((write, id), None);
        state.look_us = 0;
        drop(state);
        self.qp.0.kick_all();
        Ok(Transfer { engine: self.engine.clone(), key: (write, id) })
    }

    /// The round trip, if one has been measured.
    pub fn rtt(&self) -> Option<Duration> {
        lock(&self.engine.state).engine.rtt_us().map(Duration::from_micros)
    }

    /// Probability that a chunk is lost, as far as is known.
    pub fn loss(&self) -> f64 {
        lock(&self.engine.state).engine.estimate.loss()
    }

    /// The rate at which chunks are injected: as it was given, or as it was measured, if it was.
    pub fn injection_bps(&self) -> Option<f64> {
        let ns = lock(&self.engine.state).engine.injection_ns()?;
        Some(f64::from(self.qp.0.layout.chunk_bytes) * 8e9 / ns as f64)
    }

    /// What has been counted.
    pub fn counts(&self) -> Counts {
        lock(&self.engine.state).engine.counts()
    }
}

/// A write or a read that may be under way. Dropping it does not end it.
pub struct Transfer {
    engine: Arc<Engine>,
    key: (bool, u64),
}

impl Transfer {
    /// Its bytes, once it has ended well.
    ///
    /// # Errors
    /// Why it has failed.
    pub fn poll(&self) -> Result<Option<u64>> {
        let state = lock(&self.engine.state);
        match state.ended.get(&self.key) {
            Some(Some(Ok(bytes))) => Ok(Some(*bytes)),
            Some(Some(Err(failure))) => Err(Error::wrong(failure)),
            _ => Ok(None),
        }
    }

    /// Waits for its end, for so long at most.
    ///
    /// # Errors
    /// Why it has failed; [`Error::Retry`]: it has not ended yet.
    pub fn wait(&self, most: Duration) -> Result<u64> {
        let until = Instant::now() + most;
        let mut state = lock(&self.engine.state);
        loop {
            match state.ended.get(&self.key) {
                Some(Some(Ok(bytes))) => return Ok(*bytes),
                Some(Some(Err(failure))) => return Err(Error::wrong(failure)),
                _ => {}
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Error::retry(format!("not ended after {most:?}")));
            }
            state = self
                .engine
                .news
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        lock(&self.engine.state).ended.remove(&self.key);
    }
}

impl Upper for Engine {
    fn hear(&self, core: &Core, message: &Control, now_us: u64) {
        let mut state = lock(&self.state);
        let State { engine, scratch, .. } = &mut *state;
        engine.hear(now_us, message, &mut Below { core, scratch, of: self });
        self.tell(&mut state);
    }

    fn tick(&self, core: &Core, now_us: u64, news: bool) -> Option<u64> {
        let mut state = lock(&self.state);
        if !news && now_us < state.look_us {
            return Some(state.look_us);
        }
        let State { engine, scratch, .. } = &mut *state;
        let next_us = engine.tick(now_us, &mut Below { core, scratch, of: self });
        self.tell(&mut state);
        state.look_us = now_us + LOOK_US;
        next_us.map(|next_us| next_us.max(now_us + LOOK_US))
    }
}

impl Drop for Engine {
    /// Nothing reads the memory of its writes any more.
    fn drop(&mut self) {
        self.encoded.take_back();
    }
}

impl Engine {
    fn tell(&self, state: &mut State) {
        let mut any = false;
        while let Some(Event { id, write, result }) = state.engine.poll_event() {
            if let Err(failure) = &result {
                let what = if write { "write" } else { "read" };
                tell(Part::Sdr, Level::Warn, format_args!("{what} {id} has failed: {failure}"));
            }
            if let Some(end) = state.ended.get_mut(&(write, id)) {
                *end = Some(result);
                any = true;
            }
        }
        if any {
            self.news.notify_all();
        }
    }
}

/// The queue pair, as the engine sees it.
struct Below<'a> {
    core: &'a Core,
    scratch: &'a mut Vec<Memory>,
    of: &'a Engine,
}

fn refused(e: Error) -> Refused {
    match e {
        Error::Retry(_) => Refused::Later,
        e => Refused::Never(e.to_string()),
    }
}

impl Sdr for Below<'_> {
    type Buffer = Memory;

    fn recv_post(
        &mut self,
        _now_us: u64,
        area: Area<'_, Memory>,
    ) -> std::result::Result<u64, Refused> {
        self.core
            .recv_post(area.buffer, area.buffer.addr() + area.offset, area.bytes)
            .map_err(refused)
    }

    fn recv_complete(&mut self, _now_us: u64, seq: u64) -> std::result::Result<(), Refused> {
        self.core.recv_complete(seq).map_err(refused)
    }

    fn bitmap(&self, seq: u64) -> &[AtomicU64] {
        self.core.board.chunks(seq)
    }

    fn send_start(&mut self) -> std::result::Result<u64, Refused> {
        self.core.send_start(None).map_err(refused)
    }

    fn is_clear(&self, seq: u64) -> bool {
        lock(&self.core.state).sends.cleared.of(seq).is_some()
    }

    fn has_room(&self) -> bool {
        lock(&self.core.state).sends.backlog()
            < BACKLOG * usize::from(self.core.layout.attr().channels)
    }

    fn send(&mut self, seq: u64, area: Area<'_, Memory>, piece: &Piece) -> bool {
        let local = Local { addr: area.buffer.addr() + area.offset, lkey: area.buffer.lkey() };
        self.core.send_add(seq, area.buffer, &Piece { local, ..*piece }).is_ok()
    }

    fn send_stop(&mut self, seq: u64) {
        let mut state = lock(&self.core.state);
        state.sends.drop_rest(seq);
        // One that has been finished has ended.
        let _ = state.sends.end(seq);
    }

    fn send_idle(&mut self, seq: u64) -> bool {
        let idle = self.core.send_status(seq) != Status::Busy;
        if idle {
            self.core.send_forget(seq);
        }
        idle
    }

    fn say(&mut self, message: &Control) {
        self.core.say(message);
    }

    fn scratch(&mut self, bytes: u64) -> Option<Memory> {
        // Whoever still uses one holds it, too.
        let free = self
            .scratch
            .iter()
            .find(|memory| memory.len() >= bytes && Arc::strong_count(&memory.0) == 1);
        if let Some(memory) = free {
            return Some(memory.clone());
        }
        if self.scratch.len() >= self.of.scratch_most {
            return None;
        }
        let memory = self.core.shared.register(bytes as usize).ok()?;
        self.scratch.push(memory.clone());
        Some(memory)
    }

    fn encodes_aside(&self) -> bool {
        self.of.aside
    }

    fn encode(
        &mut self,
        seq: u64,
        code: Code,
        data: Area<'_, Memory>,
        parity: Area<'_, Memory>,
    ) -> Encoding {
        let (chunk_bytes, backend) = (self.core.layout.chunk_bytes as usize, self.of.backend);
        let aside = self.of.aside && data.bytes >= LEAST_ASIDE_BYTES;
        let job = Job { code, backend, chunk_bytes, data: data.into(), parity: parity.into() };
        if aside {
            self.of.encoded.have_done(seq, job, &*self.core.shared.workers)
        } else {
            job.encode();
            Encoding::Made
        }
    }

    fn encoded(&mut self) -> Option<u64> {
        self.of.encoded.next()
    }

    fn recover(
        &mut self,
        code: Code,
        data: Area<'_, Memory>,
        parity: Area<'_, Memory>,
        lost: &ChunkSet,
    ) -> bool {
        let (chunk, backend): (_, &dyn Backend) =
            (self.core.layout.chunk_bytes as usize, &self.of.backend);
        parity.buffer.with(parity.offset, parity.bytes, |parity| {
            data.buffer.with_mut(data.offset, data.bytes, |data| {
                code.recover_region(backend, data, parity, chunk, lost).is_ok()
            })
        })
    }
}
