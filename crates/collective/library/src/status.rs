//! What others may know of a communicator: a snapshot, and the socket that shows it.
//!
//! The socket lies in a folder that the options name; who connects gets one JSON object and the end
//! of the stream. It is answered by the thread out of band, which waits for no operation: what has
//! changed is written down where it happens.

use std::collections::{BTreeMap, VecDeque};
use std::io::{Read, Write};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use unbroken_collective_protocol::frame::{CROSS, OUT_OF_BAND};
use unbroken_collective_protocol::picture::Picture;
use unbroken_collective_protocol::{Failure, Note, Rank};
use unbroken_log::{tell, Level, Part};
use unbroken_runtime::{bind_in, connect_in};
use unbroken_schedule::Form;

use crate::error::{io, Result};

/// Happenings that are remembered.
const EVENTS: usize = 256;
/// Kinds and lengths of operations that are remembered.
const KINDS: usize = 32;
/// A client that does not read within this is dropped.
const WRITE_TIMEOUT: Duration = Duration::from_millis(100);

/// How long nobody is answered where there is no descriptor for it.
const RESTS: Duration = Duration::from_millis(500);
/// How long one that is asked may take to answer, and how much it may say.
const ASKS: Duration = Duration::from_secs(2);
const MAX_ANSWER_BYTES: u64 = 16 << 20;

/// Something that has happened to a communicator.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq)]
pub struct Happening {
    /// When, in seconds since it was made.
    pub after_s: f64,
    /// What: where a failure is, that a NIC is well again, that operations are planned anew.
    pub what: String,
}

/// What has happened to a communicator's paths.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Operations that were done.
    pub operations: u64,
    /// Paths that have failed.
    pub failures: u64,
    /// Streams that went on elsewhere.
    pub moves: u64,
    /// Frames that were sent again.
    pub again: u64,
}

/// A stream that is not on its own rail.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub struct Away {
    /// The rank that it goes to.
    pub to: Rank,
    /// Its own rail.
    pub stream: u8,
    /// The rail that carries it; 62 for NICs of different rails, 61 for the connections out of
    /// band.
    pub over: u8,
}

impl Away {
    /// What carries it, in words.
    pub fn over_in_words(&self) -> String {
        match self.over {
            CROSS => "NICs of different rails".into(),
            OUT_OF_BAND => "no NIC: it goes out of band, slowly".into(),
            rail => format!("NIC {rail}"),
        }
    }
}

/// How operations of one kind and length are done.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Way {
    pub(crate) form: Form,
    pub(crate) operation: &'static str,
    pub(crate) bytes: u64,
    pub(crate) plan: String,
    pub(crate) estimate_us: f64,
}

/// Operations of one kind and length: how they are done, and what that takes.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
pub struct Done {
    /// The operation.
    pub operation: String,
    /// Bytes of the vector.
    pub bytes: u64,
    /// How it is done now, in words.
    pub plan: String,
    /// How often it was done so.
    pub count: u64,
    /// What it should take, in µs; 0 where that is not known.
    pub estimate_us: f64,
    /// What it takes, in µs: a mean in which the last one counts an eighth.
    pub took_us: f64,
    /// The least that it took so, in µs.
    pub least_us: f64,
}

/// What operations are planned with, as far as it was measured.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
pub struct Measured {
    /// What a well NIC carries, in Mbit/s; 0 while nothing was measured.
    pub nic_mbps: u32,
    /// How long a message takes, in µs; 0 while nothing was measured.
    pub alpha_us: f64,
    /// NICs that carry less, and how many percent of a well one: `0/1` is rail 1 of host 0.
    pub slow: Vec<(String, u8)>,
}

/// A communicator, as one of its ranks sees it.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
pub struct Snapshot {
    /// The process.
    pub pid: u32,
    /// The rank.
    pub rank: Rank,
    /// How many there are.
    pub ranks: usize,
    /// The host of each rank, counted from 0.
    pub hosts: Vec<u32>,
    /// What has happened to paths.
    pub counters: Counters,
    /// The shape of the last operation of all ranks ([`Form`]); empty before the first.
    #[serde(default)]
    pub shape: String,
    /// How many operations of all ranks had each shape.
    #[serde(default)]
    pub shapes: BTreeMap<String, u64>,
    /// Bytes that this rank has sent over each rail; the last is the memory of its host.
    pub sent_bytes: Vec<u64>,
    /// NICs that operations are planned without: `0/1` is rail 1 of host 0.
    pub down: Vec<String>,
    /// What operations are planned with.
    pub measured: Measured,
    /// Operations of late, by kind and length.
    pub done: Vec<Done>,
    /// Streams that are not on their own rail.
    pub away: Vec<Away>,
    /// What has happened lately, the oldest first.
    pub happened: VecDeque<Happening>,
    /// Why it is broken, if it is.
    pub broken: Option<String>,
}

impl Done {
    fn first(way: &Way, us: f64) -> Done {
        Done {
            operation: way.operation.into(),
            bytes: way.bytes,
            plan: way.plan.clone(),
            count: 1,
            estimate_us: way.estimate_us,
            took_us: us,
            least_us: us,
        }
    }
}

/// Where the snapshot is kept up to date.
#[derive(Clone)]
pub(crate) struct Board {
    shown: Arc<Mutex<Snapshot>>,
    began: Instant,
}

impl Board {
    pub(crate) fn new(rank: Rank, hosts: &[u32], rails: u8) -> Board {
        let snapshot = Snapshot {
            pid: std::process::id(),
            rank,
            ranks: hosts.len(),
            hosts: hosts.to_vec(),
            sent_bytes: vec![0; usize::from(rails) + 1],
            ..Snapshot::default()
        };
        Board { shown: Arc::new(Mutex::new(snapshot)), began: Instant::now() }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Snapshot> {
        self.shown.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An operation is done.
    pub(crate) fn done(&self, sent_bytes: &[u64]) {
        let mut shown = self.lock();
        shown.counters.operations += 1;
        shown.sent_bytes.copy_from_slice(sent_bytes);
    }

    /// An operation took so long.
    pub(crate) fn took(&self, way: &Way, us: u64) {
        let (mut shown, us) = (self.lock(), us as f64);
        let name = way.form.name();
        if shown.shape != name {
            shown.shape = name.into();
            shown.shapes.entry(name.into()).or_default();
        }
        if let Some(count) = shown.shapes.get_mut(name) {
            *count += 1;
        }
        let same = |done: &Done| done.operation == way.operation && done.bytes == way.bytes;
        match shown.done.iter_mut().find(|done| same(done)) {
            Some(done) if done.plan == way.plan => {
                done.count += 1;
                done.estimate_us = way.estimate_us;
                done.took_us += (us - done.took_us) / 8.0;
                done.least_us = done.least_us.min(us);
            }
            Some(done) => *done = Done::first(way, us),
            None => {
                if shown.done.len() == KINDS {
                    shown.done.remove(0);
                }
                shown.done.push(Done::first(way, us));
            }
        }
    }

    /// The communicator is broken.
    pub(crate) fn broken(&self, failure: &Failure) {
        let mut shown = self.lock();
        if shown.broken.is_some() {
            return;
        }
        shown.broken = Some(failure.to_string());
        let rank = shown.rank;
        drop(shown);
        tell(Part::Collective, Level::Error, format_args!("rank {rank} is broken: {failure}"));
    }

    /// Takes down what an engine notes; of all ranks, or of two.
    pub(crate) fn note(&self, note: Note, of_all: bool) {
        let mut shown = self.lock();
        let what = match note {
            Note::Up { .. } => return,
            Note::Down { .. } => {
                shown.counters.failures += 1;
                return;
            }
            Note::Moved { peer, stream, rail, again } => {
                shown.counters.moves += 1;
                shown.counters.again += again;
                let aside = |away: &Away| away.to == peer && away.over == OUT_OF_BAND;
                let known = rail != OUT_OF_BAND || !of_all || shown.away.iter().any(aside);
                shown.away.retain(|away| !of_all || (away.to, away.stream) != (peer, stream));
                if stream != rail && of_all {
                    shown.away.push(Away { to: peer, stream, over: rail });
                }
                if known {
                    return;
                }
                format!("no NIC reaches rank {peer}: what goes there goes out of band, slowly")
            }
            Note::Located(verdict) => format!("rank {} finds: {}", verdict.by, verdict.fault),
            Note::Healed(place) => format!("{place} is well again"),
            // The two count hosts in their own way; what all plan with is what is shown.
            Note::Replanned { .. } if !of_all => return,
            Note::Replanned { from, picture } => {
                let down = places(&picture.down);
                let measured = Measured::of(&picture);
                let other = down != shown.down || measured.slow != shown.measured.slow;
                (shown.down, shown.measured) = (down, measured);
                // Other rates of well NICs are nothing that has happened to anybody.
                if !other {
                    return;
                }
                let none = || String::from("none");
                let down = if shown.down.is_empty() { none() } else { shown.down.join(", ") };
                let slow = shown.measured.slow_in_words();
                let slow = slow.map_or(String::new(), |slow| format!("; slow: {slow}"));
                format!("planned anew from operation {from} on; NICs down: {down}{slow}")
            }
        };
        drop(shown);
        self.happened(what);
    }

    /// Takes down what has happened; the same again is not news.
    pub(crate) fn happened(&self, what: String) {
        let mut shown = self.lock();
        if shown.happened.len() == EVENTS {
            shown.happened.pop_front();
        }
        let (rank, told) = (shown.rank, what.clone());
        shown.happened.push_back(Happening { after_s: self.began.elapsed().as_secs_f64(), what });
        drop(shown);
        tell(Part::Collective, Level::Info, format_args!("rank {rank}: {told}"));
    }
}

impl Measured {
    fn of(picture: &Picture) -> Measured {
        let named = |(host, rail, percent): &(u32, u8, u8)| (format!("{host}/{rail}"), *percent);
        Measured {
            nic_mbps: picture.mbps,
            alpha_us: f64::from(picture.alpha_ns) / 1e3,
            slow: picture.slow.iter().map(named).collect(),
        }
    }

    /// NICs that carry less than others, if there are any.
    pub fn slow_in_words(&self) -> Option<String> {
        let words: Vec<String> =
            self.slow.iter().map(|(nic, percent)| format!("{nic} at {percent} %")).collect();
        (!words.is_empty()).then(|| words.join(", "))
    }
}

/// NICs by host and rail, from the bits of each host.
fn places(down: &[u64]) -> Vec<String> {
    let of = |(host, rails): (usize, &u64)| {
        let rails = *rails;
        (0..64).filter(move |rail| rails >> rail & 1 == 1).map(move |rail| format!("{host}/{rail}"))
    };
    down.iter().enumerate().flat_map(of).collect()
}

/// The socket.
pub(crate) struct Server {
    listener: UnixListener,
    /// Nobody is answered until then, since there was no descriptor for it.
    rests_until: Option<Instant>,
    path: PathBuf,
    board: Board,
}

impl Server {
    /// Makes it, and its folder.
    pub(crate) fn bind(folder: &Path, board: &Board) -> Result<Server> {
        let at = || format!("make the status socket in {}", folder.display());
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(io(at()))?;
        unbroken_runtime::make_folder(folder).map_err(|e| io(at())(std::io::Error::other(e)))?;
        let mut name = [0; 8];
        rustix::rand::getrandom(&mut name, rustix::rand::GetRandomFlags::empty())
            .map_err(|e| io(at())(e.into()))?;
        let name = format!("{}-{:016x}.sock", std::process::id(), u64::from_ne_bytes(name));
        let listener = bind_in(folder, &name).map_err(io(at()))?;
        Ok(Server { listener, rests_until: None, path: folder.join(name), board: board.clone() })
    }

    /// What is readable when somebody waits who can be answered.
    pub(crate) fn listens(&self) -> Option<&UnixListener> {
        self.rests_until.is_none_or(|until| until <= Instant::now()).then_some(&self.listener)
    }

    /// Answers whoever waits.
    pub(crate) fn answer(&mut self) {
        if self.listens().is_none() {
            return;
        }
        loop {
            let mut client = match self.listener.accept() {
                Ok((client, _)) => client,
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => return,
                Err(_) => {
                    self.rests_until = Some(Instant::now() + RESTS);
                    return;
                }
            };
            let snapshot = self.board.lock().clone();
            let mut answer = || -> std::io::Result<()> {
                client.set_nonblocking(false)?;
                client.set_write_timeout(Some(WRITE_TIMEOUT))?;
                client.write_all(&serde_json::to_vec(&snapshot)?)
            };
            // A client that went away is its own affair.
            let _ = answer();
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Who looks finds that nobody answers, and removes it.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// The communicators whose sockets lie in a folder, by process and rank. Sockets that nobody
/// answers are removed.
pub fn snapshots(folder: &Path) -> Result<Vec<Snapshot>> {
    let entries = match std::fs::read_dir(folder) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(io(format!("read {}", folder.display())))?,
    };
    let mut found = BTreeMap::new();
    for entry in entries {
        let path = entry.map_err(io(format!("read {}", folder.display())))?.path();
        let Some(name) = path.file_name().and_then(|name| name.to_str()) else { continue };
        match connect_in(folder, name, ASKS) {
            Ok(stream) => {
                stream.set_read_timeout(Some(ASKS)).map_err(io("status socket"))?;
                // One that ends while it is asked has nothing to show any more.
                if let Ok(snapshot) =
                    serde_json::from_reader::<_, Snapshot>(stream.take(MAX_ANSWER_BYTES))
                {
                    found.insert((snapshot.pid, snapshot.rank, path), snapshot);
                }
            }
            Err(e) if e.kind() == std::io::ErrorKind::ConnectionRefused => {
                // Its process is dead.
                let _ = std::fs::remove_file(&path);
            }
            Err(_) => {}
        }
    }
    Ok(found.into_values().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_may_have_a_long_path() {
        let folder = tempfile::tempdir().unwrap();
        let long = folder.path().join("a-long-name-of-a-folder/".repeat(6));
        let mut server = Server::bind(&long, &Board::new(1, &[0, 1], 2)).unwrap();
        let shown = std::thread::spawn(move || snapshots(&long).unwrap());
        while !shown.is_finished() {
            server.answer();
            std::thread::yield_now();
        }
        let shown = shown.join().unwrap();
        assert_eq!((shown.len(), shown[0].rank, shown[0].ranks), (1, 1, 2));
    }
}
