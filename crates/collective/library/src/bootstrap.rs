//! How the ranks of a communicator find each other.
//!
//! One process, mostly that of rank 0, opens a [`Bootstrap`] and env its [`Id`] to all ranks by
//! whatever means the job has. Each rank connects, proves that it knows the secret in the id
//! ([`crate::auth`]), says who it is, and is told of all others once all are there. A secret of
//! another job, a rank twice, other settings: refused, with an error that says so; those who wait
//! go on waiting, each for as long as it has said itself.

use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;
use std::time::{Duration, Instant};

use rustix::event::{poll, PollFd, Timespec};
use serde::{Deserialize, Serialize};

use crate::acceptor;
use crate::auth::{draw, frame, meeting_seat, Caller, Denied, Seals, Secret, ServiceName};
use crate::auth::{GREETING_BYTES, SECRET_BYTES, VERDICT_BYTES};
use crate::conn::Conn;
use crate::error::{io, Error, Result};
use crate::line::reach;
use crate::numa::Nodes;

/// The most bytes that a rank says of itself, and that it is told.
pub(crate) const MAX_HELLO_BYTES: usize = 128 << 10;
const MAX_ANSWER_BYTES: usize = 64 << 20;
/// What a rank waits beyond its patience, to be told who has not come.
const MARGIN: Duration = Duration::from_secs(2);
/// How long to wait before another attempt at the bootstrap, where it had no room.
const PAUSE: Duration = Duration::from_millis(50);
/// How often one that waits looks whether its own process can be called at all.
const LOOKS: Duration = Duration::from_secs(1);
/// The longest that a rank may wait for others: a century.
const MOST_PATIENCE: Duration = Duration::from_secs(100 * 365 * 86_400);

/// What ranks of a job know it by: where its [`Bootstrap`] is, and a secret. As text:
/// `127.0.0.1:4711/` and 32 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Id {
    address: SocketAddr,
    pub(crate) secret: Secret,
}

impl fmt::Display for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/", self.address)?;
        self.secret.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl FromStr for Id {
    type Err = Error;

    fn from_str(text: &str) -> Result<Id> {
        let parsed = || {
            let (address, hex) = text.trim().rsplit_once('/')?;
            let mut secret = [0; SECRET_BYTES];
            if hex.len() != 2 * SECRET_BYTES || !hex.is_ascii() {
                return None;
            }
            for (k, byte) in secret.iter_mut().enumerate() {
                *byte = u8::from_str_radix(&hex[2 * k..2 * k + 2], 16).ok()?;
            }
            Some(Id { address: address.parse().ok()?, secret })
        };
        parsed().ok_or_else(|| {
            Error::Bootstrap(format!(
                "`{text}` is no id of a communicator: an address with a port, `/` and 32 \
                 hexadecimal digits, as `Bootstrap::id` gives it"
            ))
        })
    }
}

/// What a rank says of itself.
#[derive(Serialize, Deserialize, Clone, Debug)]
pub(crate) struct Hello {
    pub(crate) rank: usize,
    pub(crate) ranks: usize,
    /// Ranks with the same are on one host, and share its memory.
    pub(crate) host: String,
    /// What each of its NICs carries, in Mbit/s.
    pub(crate) nics_mbps: Vec<u32>,
    /// NUMA nodes of its host.
    pub(crate) nodes: Nodes,
    /// Where others reach it out of band.
    pub(crate) address: SocketAddr,
    /// Its service there.
    pub(crate) service: ServiceName,
    /// What all must have alike.
    pub(crate) settings: String,
    /// How long it waits for the others.
    pub(crate) patience_ms: u64,
}

/// What it is told.
#[derive(Serialize, Deserialize, Debug)]
enum Answer {
    Refused(String),
    All(Vec<Hello>),
}

/// Where the ranks of one communicator meet.
pub struct Bootstrap {
    id: Id,
}

impl Bootstrap {
    /// Listens at an address (port 0: any), until all ranks have come. `patience` is how long the
    /// first of them may take, or the next where all that have come have gone again; a rank that
    /// has come waits for as long as it says itself ([`crate::Options::patience`]).
    pub fn listen(address: SocketAddr, patience: Duration) -> Result<Bootstrap> {
        let secret = draw()?;
        let address = acceptor::hold(address, Meeting::new(secret, patience))?;
        Ok(Bootstrap { id: Id { address, secret } })
    }

    /// What to give to all ranks.
    pub fn id(&self) -> Id {
        self.id
    }
}

/// A pending caller of the acceptor, and what it is told.
pub(crate) type Told = (u64, Vec<u8>);

/// A rank that has come.
struct Waits {
    caller: u64,
    hello: Hello,
    until: Instant,
}

/// The ranks that have come. No I/O: the acceptor's thread has the connections.
pub(crate) struct Meeting {
    secret: Secret,
    waiting: Vec<Waits>,
    patience: Duration,
    /// How long it lasts while nobody waits.
    until: Instant,
    /// What has kept ranks out.
    trouble: Option<String>,
    met: bool,
}

fn encode(answer: &Answer) -> Vec<u8> {
    // Names, numbers and texts always have a JSON form.
    serde_json::to_vec(answer).unwrap_or_default()
}

impl Meeting {
    pub(crate) fn new(secret: Secret, patience: Duration) -> Meeting {
        let until = Instant::now() + patience.min(MOST_PATIENCE);
        Meeting { secret, waiting: Vec::new(), patience, until, trouble: None, met: false }
    }

    pub(crate) fn secret(&self) -> &Secret {
        &self.secret
    }

    pub(crate) fn service(&self) -> ServiceName {
        meeting_seat(&self.secret)
    }

    /// Ranks may have been kept out.
    pub(crate) fn trouble(&mut self, what: String) {
        self.trouble = Some(what);
    }

    /// Nobody else is to come, or nobody has.
    pub(crate) fn is_over(&self) -> bool {
        self.met || self.waiting.is_empty() && Instant::now() >= self.until
    }

    /// When to look again.
    pub(crate) fn deadline(&self) -> Instant {
        self.waiting.iter().map(|w| w.until).min().unwrap_or(self.until)
    }

    /// A rank has come.
    pub(crate) fn hear(&mut self, caller: u64, rank: usize, hello: &[u8]) -> Vec<Told> {
        let refused = |why: String| vec![(caller, encode(&Answer::Refused(why)))];
        let Ok(hello) = serde_json::from_slice::<Hello>(hello) else {
            return refused(
                "what the rank says of itself makes no sense here: use one build".into(),
            );
        };
        if let Some(why) = self.refuse(rank, &hello) {
            return refused(why);
        }
        let until = Instant::now() + Duration::from_millis(hello.patience_ms).min(MOST_PATIENCE);
        let ranks = hello.ranks;
        self.waiting.push(Waits { caller, hello, until });
        if self.waiting.len() < ranks {
            return Vec::new();
        }
        self.met = true;
        self.waiting.sort_by_key(|w| w.hello.rank);
        let all = encode(&Answer::All(self.waiting.iter().map(|w| w.hello.clone()).collect()));
        self.waiting.drain(..).map(|w| (w.caller, all.clone())).collect()
    }

    /// One that waited has gone: another may come in its place.
    pub(crate) fn gone(&mut self, caller: u64) -> Vec<Told> {
        self.waiting.retain(|w| w.caller != caller);
        self.wait_anew();
        Vec::new()
    }

    fn wait_anew(&mut self) {
        if self.waiting.is_empty() {
            self.until = self.until.max(Instant::now() + self.patience.min(MOST_PATIENCE));
        }
    }

    /// Tells those whose patience is over who has not come.
    pub(crate) fn look(&mut self, now: Instant) -> Vec<Told> {
        let here: Vec<usize> = self.waiting.iter().map(|w| w.hello.rank).collect();
        let trouble = self.trouble.as_ref().map_or(String::new(), |what| format!("; {what}"));
        let tell = |w: &Waits| {
            let missing = (0..w.hello.ranks).find(|rank| !here.contains(rank)).unwrap_or(0);
            let seconds = w.hello.patience_ms as f64 / 1e3;
            let (ranks, has) = (w.hello.ranks, "has not come within");
            let why = format!("rank {missing} of {ranks} {has} {seconds} s{trouble}");
            (w.caller, encode(&Answer::Refused(why)))
        };
        let late = self.waiting.iter().filter(|w| w.until <= now).map(tell).collect();
        self.waiting.retain(|w| w.until > now);
        late
    }

    /// Why somebody may not take part.
    fn refuse(&self, rank: usize, hello: &Hello) -> Option<String> {
        if self.waiting.iter().any(|w| w.hello.rank == hello.rank) {
            return Some(format!(
                "rank {} has come already: give each process a rank of its own",
                hello.rank
            ));
        }
        if hello.rank >= hello.ranks || hello.rank != rank {
            return Some(format!(
                "rank {} of {}: ranks are counted from 0",
                hello.rank, hello.ranks
            ));
        }
        let first = &self.waiting.first()?.hello;
        if first.ranks != hello.ranks {
            let (rank, ranks) = (hello.rank, hello.ranks);
            return Some(format!(
                "rank {rank} counts {ranks} ranks, others {}: give all the same",
                first.ranks
            ));
        }
        (first.settings != hello.settings).then(|| {
            format!(
                "rank {} has other settings ({}) than others ({}): give all the same",
                hello.rank, hello.settings, first.settings
            )
        })
    }
}

/// How an attempt to meet ended without an answer.
enum Ended {
    /// The other end had no room, perhaps: it has closed before it said anything of this rank.
    Early,
    Failed(Error),
}

fn failed(what: impl Into<String>) -> Ended {
    Ended::Failed(Error::Bootstrap(what.into()))
}

/// Meets the others.
pub(crate) fn meet(id: &Id, mut hello: Hello, patience: Duration) -> Result<Vec<Hello>> {
    hello.patience_ms = patience.min(MOST_PATIENCE).as_millis() as u64;
    let began = Instant::now();
    loop {
        let left = patience.saturating_sub(began.elapsed());
        let stream = reach(id.address, left).map_err(io(format!(
            "reach the bootstrap at {}; is the process that made the id there?",
            id.address
        )))?;
        let conn = Conn::new(stream).map_err(io("bootstrap socket"))?;
        match attend(id, &hello, conn, Instant::now() + left.min(MOST_PATIENCE) + MARGIN) {
            Ok(Answer::Refused(why)) => return Err(Error::Bootstrap(why)),
            Ok(Answer::All(all)) if all.len() == hello.ranks => return Ok(all),
            Ok(Answer::All(all)) => {
                let (told, ranks) = (all.len(), hello.ranks);
                return Err(Error::Bootstrap(format!(
                    "{told} ranks were told of, {ranks} expected"
                )));
            }
            Err(Ended::Failed(error)) => return Err(error),
            Err(Ended::Early) if began.elapsed() >= patience => {
                return Err(Error::Bootstrap(format!(
                    "the bootstrap at {} closes every connection; is it the process that made the \
                     id?",
                    id.address
                )))
            }
            Err(Ended::Early) => std::thread::sleep(PAUSE),
        }
    }
}

/// Proves itself over a connection, says who it is, and waits for what it is told.
fn attend(
    id: &Id,
    hello: &Hello,
    mut conn: Conn,
    until: Instant,
) -> std::result::Result<Answer, Ended> {
    let mut caller =
        Caller::new(id.secret, meeting_seat(&id.secret), hello.rank).map_err(Ended::Failed)?;
    let greeting = listen_for(&mut conn, GREETING_BYTES, until)?;
    let introduction =
        caller.introduction(&greeting).map_err(|denied| failed(explain(&denied, id)))?;
    conn.output().extend(introduction);
    let verdict = listen_for(&mut conn, VERDICT_BYTES, until)?;
    let Seals { mut own, mut other } =
        caller.hear(&verdict).map_err(|denied| failed(explain(&denied, id)))?;
    let said = serde_json::to_vec(hello).map_err(|e| failed(e.to_string()))?;
    let mut bytes = frame(0, &said);
    own.close(&mut bytes, 0);
    conn.output().extend(bytes);
    loop {
        match other.open(&conn.input, MAX_ANSWER_BYTES) {
            Ok(Some((_, answer, _))) => {
                return serde_json::from_slice(answer)
                    .map_err(|_| failed("the bootstrap is of another build: use one"))
            }
            Ok(None) => {}
            Err(_) => return Err(failed("what the bootstrap says was changed on its way")),
        }
        // It closes when all are there, and when one has not come in time.
        let ended = "the bootstrap has ended: all ranks were there, or one did not come; is this \
                     one there twice?";
        step(&mut conn, MAX_ANSWER_BYTES, until, || failed(ended))?;
    }
}

fn explain(denied: &Denied, id: &Id) -> String {
    match denied {
        Denied::UnknownProtocol => {
            format!("what answers at {} is no bootstrap of this build: use one build", id.address)
        }
        Denied::Refused => format!(
            "nobody meets at {} by this id: the id is that of another job, or all ranks have come \
             already (is this one there twice?), or one did not come in time; give all ranks the \
             id of this job",
            id.address
        ),
        Denied::Impostor => {
            format!("what answers at {} does not know the secret of the id", id.address)
        }
    }
}

/// Waits for so many bytes.
fn listen_for(
    conn: &mut Conn,
    bytes: usize,
    until: Instant,
) -> std::result::Result<Vec<u8>, Ended> {
    loop {
        if let Some(taken) = conn.take(bytes) {
            return Ok(taken);
        }
        step(conn, bytes, until, || Ended::Early)?;
    }
}

/// Sends and reads what can be sent and read, and waits for more.
fn step(
    conn: &mut Conn,
    most: usize,
    until: Instant,
    ended: impl Fn() -> Ended,
) -> std::result::Result<(), Ended> {
    let before = conn.input.len();
    conn.flush().map_err(|_| ended())?;
    let lives = conn.read(most).map_err(|_| ended())?;
    if conn.input.len() > before {
        return Ok(());
    }
    if !lives {
        return Err(ended());
    }
    let left = until.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(failed(
            "the bootstrap does not answer; is the process that made the id stopped?",
        ));
    }
    if let Some(why) = acceptor::starving() {
        return Err(failed(why));
    }
    let (mut fds, left) = ([PollFd::new(&conn.stream, conn.interest())], left.min(LOOKS));
    let timeout = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
    // Interrupted: it is looked at again.
    let _ = poll(&mut fds, Some(&timeout));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::TcpStream;

    const PATIENCE: Duration = Duration::from_secs(30);

    fn hello(rank: usize, settings: &str) -> Hello {
        Hello {
            rank,
            ranks: 2,
            host: "h".into(),
            nics_mbps: vec![1],
            nodes: Nodes::default(),
            address: "127.0.0.1:1".parse().unwrap(),
            service: [0; 16],
            settings: settings.into(),
            patience_ms: 0,
        }
    }

    fn listen(patience: Duration) -> Id {
        Bootstrap::listen("127.0.0.1:0".parse().unwrap(), patience).unwrap().id()
    }

    #[test]
    fn an_id_is_its_text() {
        let id = Id { address: "[::1]:5".parse().unwrap(), secret: [0xab; SECRET_BYTES] };
        assert_eq!(id.to_string().parse::<Id>().unwrap(), id);
        for bad in ["", "x", "127.0.0.1/ab", "127.0.0.1:5/abab"] {
            assert!(bad.parse::<Id>().unwrap_err().to_string().contains("no id"), "{bad}");
        }
    }

    /// Waits until a rank is among those who wait at a bootstrap. Who asks is refused in any case.
    fn wait_for(id: &Id, rank: usize) {
        let began = Instant::now();
        while began.elapsed() < PATIENCE {
            let error = meet(id, Hello { ranks: 0, ..hello(rank, "") }, PATIENCE).unwrap_err();
            if error.to_string().contains("has come already") {
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        panic!("rank {rank} does not come");
    }

    #[test]
    fn strangers_and_doubles_are_refused_and_the_others_meet() {
        let id = listen(PATIENCE);
        let first = std::thread::spawn(move || meet(&id, hello(0, "s"), PATIENCE));
        wait_for(&id, 0);
        let says = |result: Result<Vec<Hello>>| result.unwrap_err().to_string();
        let other = Id { secret: [1; SECRET_BYTES], ..id };
        assert!(says(meet(&other, hello(1, "s"), PATIENCE)).contains("another job"));
        assert!(says(meet(&id, Hello { ranks: 3, ..hello(2, "s") }, PATIENCE))
            .contains("counts 3 ranks"));
        assert!(says(meet(&id, hello(0, "s"), PATIENCE)).contains("rank 0 has come already"));
        assert!(says(meet(&id, hello(1, "t"), PATIENCE)).contains("other settings"));
        assert_eq!(meet(&id, hello(1, "s"), PATIENCE).unwrap().len(), 2);
        assert_eq!(first.join().unwrap().unwrap()[1].rank, 1);
    }

    #[test]
    fn who_does_not_come_is_named() {
        let id = listen(PATIENCE);
        let error = meet(&id, hello(0, "s"), Duration::from_millis(100)).unwrap_err();
        assert!(error.to_string().contains("rank 1 of 2 has not come within 0.1 s"), "{error}");
    }

    /// How long a rank waits is what it says, not what the bootstrap was made with.
    #[test]
    fn a_rank_is_waited_for_longer_than_the_bootstrap_waits_for_the_first() {
        let id = listen(Duration::from_millis(500));
        let first = std::thread::spawn(move || meet(&id, hello(0, "s"), PATIENCE));
        wait_for(&id, 0);
        std::thread::sleep(Duration::from_secs(1));
        assert_eq!(meet(&id, hello(1, "s"), PATIENCE).unwrap().len(), 2);
        assert_eq!(first.join().unwrap().unwrap().len(), 2);
    }

    /// One that has gone is no reason to refuse the one that comes in its place.
    #[test]
    fn a_rank_that_ends_while_it_waits_may_come_again() {
        let id = listen(PATIENCE);
        assert!(meet(&id, hello(0, "s"), Duration::from_millis(50)).is_err());
        let again = std::thread::spawn(move || meet(&id, hello(0, "t"), PATIENCE));
        wait_for(&id, 0);
        assert_eq!(meet(&id, hello(1, "t"), PATIENCE).unwrap().len(), 2);
        assert!(again.join().unwrap().is_ok());
    }

    /// Strangers that say nothing, or a byte now and then, hold up nobody, however many they are.
    #[test]
    fn ranks_meet_among_silent_strangers() {
        let id = listen(PATIENCE);
        let strangers: Vec<TcpStream> =
            (0..300).map(|_| TcpStream::connect(id.address).unwrap()).collect();
        let first = std::thread::spawn(move || meet(&id, hello(0, "s"), PATIENCE));
        wait_for(&id, 0);
        for mut stranger in &strangers {
            // The oldest of them have been closed upon.
            let _ = stranger.write(b"?");
        }
        let began = Instant::now();
        assert_eq!(meet(&id, hello(1, "s"), PATIENCE).unwrap().len(), 2);
        assert!(
            first.join().unwrap().is_ok() && began.elapsed() < Duration::from_secs(5),
            "{:?}",
            began.elapsed()
        );
        let mut heard = Vec::new();
        let mut newest = strangers.last().unwrap();
        newest.set_read_timeout(Some(PATIENCE)).unwrap();
        // After the time that a caller has for its greeting.
        let ended = newest
            .read_to_end(&mut heard)
            .map_or_else(|e| e.kind() != std::io::ErrorKind::WouldBlock, |_| true);
        assert!(ended, "strangers do not expire");
        assert!(heard.len() <= GREETING_BYTES, "a stranger is told {heard:?}");
    }

    /// What a rank says goes over the network; the secret does not.
    #[test]
    fn the_secret_does_not_cross_the_network() {
        let id = listen(PATIENCE);
        let relay = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let seen = Id { address: relay.local_addr().unwrap(), ..id };
        let heard = std::thread::spawn(move || {
            let (near, far) = (relay.accept().unwrap().0, TcpStream::connect(id.address).unwrap());
            let pass = |mut from: TcpStream, mut to: TcpStream| {
                let (mut all, mut buffer) = (Vec::<u8>::new(), [0; 4096]);
                while let Ok(n @ 1..) = from.read(&mut buffer) {
                    all.extend(&buffer[..n]);
                    let _ = to.write_all(&buffer[..n]);
                }
                let _ = to.shutdown(std::net::Shutdown::Both);
                all
            };
            let (other_near, other_far) = (near.try_clone().unwrap(), far.try_clone().unwrap());
            let back = std::thread::spawn(move || pass(other_far, other_near));
            [pass(near, far), back.join().unwrap()]
        });
        let first = std::thread::spawn(move || meet(&seen, hello(0, "s"), PATIENCE));
        wait_for(&id, 0);
        meet(&id, hello(1, "s"), PATIENCE).unwrap();
        first.join().unwrap().unwrap();
        for all in heard.join().unwrap() {
            assert!(all.len() > 40 && !all.windows(SECRET_BYTES).any(|w| w == id.secret));
        }
    }
}
