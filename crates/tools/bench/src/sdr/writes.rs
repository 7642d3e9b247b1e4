//! Reliable writes and writes over RC between two hosts of the emulated network, both in this
//! process.

use std::time::{Duration, Instant};

use unbroken::{Cq, Host, QpOptions as RcOptions, Region};
use unbroken_fabric::{Fabric, Runtime};
use unbroken_sdr::{Attr, Context, ContextOptions, Memory, QpOptions, Reliable, ReliableOptions};

use crate::Result;

/// A sample takes about so long.
const SAMPLE: Duration = Duration::from_millis(400);
const PATIENCE: Duration = Duration::from_secs(20);

/// What is written.
#[derive(Clone, Copy, Debug)]
pub struct Setting {
    /// Bytes of a message.
    pub bytes: u64,
    /// Bytes of a chunk, as a power of two.
    pub chunk_log2: u8,
    /// Messages in flight.
    pub in_flight: usize,
    /// Channels.
    pub channels: u8,
}

impl Default for Setting {
    fn default() -> Setting {
        Setting { bytes: 512 << 10, chunk_log2: 16, in_flight: 16, channels: 1 }
    }
}

/// Two ends, with a pair of RC and one of SDR.
pub struct Pair {
    setting: Setting,
    sdr: (Reliable, Reliable),
    memory: (Memory, Memory),
    rc: unbroken::Qp,
    rc_cq: Cq,
    rc_memory: (Region, Region),
    _peer: (unbroken::Qp, Context, Context),
    fabric: Fabric,
    _folder: Folder,
}

/// A runtime folder for as long as it is needed.
struct Folder(std::path::PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        // It may be gone already.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

impl Pair {
    /// Connects them.
    pub fn new(setting: &Setting) -> Result<Pair> {
        let s = *setting;
        let root = if std::path::Path::new("/dev/shm").is_dir() { "/dev/shm" } else { "/tmp" };
        static NUMBER: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let folder =
            Folder(format!("{root}/unbroken-bench-{}-{number}", std::process::id()).into());
        let [a, b] = ["a", "b"].map(|name| Host::emulated(&folder.0, name));
        let (a, b) = (a?, b?);
        let options = |channels| ContextOptions { channels, ..ContextOptions::default() };
        let (ca, cb) =
            (Context::open(&a, &options(s.channels))?, Context::open(&b, &options(s.channels))?);
        let message_log2 =
            s.bytes.next_power_of_two().trailing_zeros().max(s.chunk_log2.into()) as u8;
        let messages_log2 = (2 * s.in_flight).next_power_of_two().trailing_zeros() as u8;
        let attr = Attr {
            chunk_log2: s.chunk_log2,
            in_flight_log2: message_log2 + messages_log2,
            messages_log2,
            channels: s.channels,
            generations: 16,
            packet_lifetime_us: 10_000,
            ..Attr::default()
        };
        let options = QpOptions { attr, ..QpOptions::default() };
        let (qa, qb) = (ca.create_qp(&options)?, cb.create_qp(&options)?);
        qa.connect(&qb.info())?;
        qb.connect(&qa.info())?;
        let reliable =
            ReliableOptions { first_rtt: Duration::from_millis(20), ..ReliableOptions::default() };
        let sdr = (Reliable::new(&qa, &reliable)?, Reliable::new(&qb, &reliable)?);
        let bytes = s.bytes as usize * s.in_flight;
        let memory = (ca.register(bytes)?, cb.register(bytes)?);
        let (nic, peer) = (a.open(0)?, b.open(0)?);
        let (pd, peer_pd) = (nic.alloc_pd()?, peer.alloc_pd()?);
        let (rc_cq, peer_cq) = (nic.create_cq(64)?, peer.create_cq(64)?);
        let options = RcOptions::default().with_plain(true);
        let (rc, far) = (pd.create_qp(&rc_cq, &options)?, peer_pd.create_qp(&peer_cq, &options)?);
        rc.connect(&far.address())?;
        far.connect(&rc.address())?;
        let rc_memory = (pd.register(bytes)?, peer_pd.register(bytes)?);
        let fabric = Fabric::open(&Runtime::at(&folder.0)?)?;
        Ok(Pair {
            setting: s,
            sdr,
            memory,
            rc,
            rc_cq,
            rc_memory,
            _peer: (far, ca, cb),
            fabric,
            _folder: folder,
        })
    }

    /// Bounds the network to so many Gbit/s.
    pub fn limit(&self, gbps: f64) -> Result<()> {
        let fault = format!("rate a/0 {:.0}Mbit tx", gbps * 1000.0);
        self.fabric.set(&fault.parse()?, None)?;
        Ok(())
    }

    /// Gbit/s of reliable writes.
    pub fn sdr_gbps(&self) -> Result<f64> {
        let (s, began) = (self.setting, Instant::now());
        let (mut waiting, mut done, mut begun) = (std::collections::VecDeque::new(), 0u64, 0usize);
        while began.elapsed() < SAMPLE || !waiting.is_empty() {
            while waiting.len() < s.in_flight && began.elapsed() < SAMPLE {
                let at = (begun % s.in_flight) as u64 * s.bytes;
                let read = self.sdr.1.read(&self.memory.1, at, s.bytes)?;
                waiting.push_back((self.sdr.0.write(&self.memory.0, at, s.bytes)?, read));
                begun += 1;
            }
            let Some((write, read)) = waiting.pop_front() else { break };
            done += write.wait(PATIENCE)?;
            read.wait(PATIENCE)?;
        }
        Ok(8e-9 * done as f64 / began.elapsed().as_secs_f64())
    }

    /// Gbit/s of writes over RC.
    pub fn rc_gbps(&self) -> Result<f64> {
        let (s, began) = (self.setting, Instant::now());
        let remote = self.rc_memory.1.remote();
        let (mut posted, mut done) = (0usize, 0usize);
        while began.elapsed() < SAMPLE || done < posted {
            while posted < done + s.in_flight && began.elapsed() < SAMPLE {
                let at = posted % s.in_flight * s.bytes as usize;
                self.rc.write(
                    posted as u64,
                    &self.rc_memory.0,
                    at..at + s.bytes as usize,
                    (&remote, at as u64),
                )?;
                posted += 1;
            }
            done += self.rc_cq.poll(16)?.len();
            if began.elapsed() > PATIENCE {
                return Err("writes over RC do not end".into());
            }
        }
        Ok(8e-9 * (done as u64 * s.bytes) as f64 / began.elapsed().as_secs_f64())
    }
}
