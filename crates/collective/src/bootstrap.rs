//! How the ranks of a communicator find each other.
//!
//! One process, mostly that of rank 0, opens a [`Bootstrap`] and hands its [`Id`] to all ranks by whatever means the job has. Each rank connects, shows the
//! secret in the id, says who it is, and is told of all others once all are there. A secret of another job, a rank twice, other settings: refused,
//! with an error that says so; those who wait go on waiting. When it is over the socket is closed.

use std::fmt;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::str::FromStr;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::error::{io, Error, Result};
use crate::line::reach;

/// The most bytes of what is said.
const MAX_LINE: u64 = 1 << 20;
/// How long one who has connected may take to speak.
const SPEAKS: Duration = Duration::from_secs(2);
/// How often the socket is looked at.
const LOOK: Duration = Duration::from_millis(2);
/// What both ends must be of.
const VERSION: u32 = 1;
/// Bytes of a secret.
pub(crate) const SECRET_BYTES: usize = 16;

/// What ranks of a job know it by: where its [`Bootstrap`] is, and a secret. As text: `127.0.0.1:4711/` and 32 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Id {
    address: SocketAddr,
    pub(crate) secret: [u8; SECRET_BYTES],
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
                "`{text}` is no id of a communicator: an address with a port, `/` and 32 hexadecimal digits, as `Bootstrap::id` gives it"
            ))
        })
    }
}

/// What a rank says of itself.
#[derive(Serialize, Deserialize, Clone, Debug)]
pub(crate) struct Hello {
    version: u32,
    secret: [u8; SECRET_BYTES],
    pub(crate) rank: usize,
    pub(crate) ranks: usize,
    /// Ranks with the same are on one host.
    pub(crate) host: String,
    /// What each of its NICs carries, in Mbit/s.
    pub(crate) nics_mbps: Vec<u32>,
    /// Where others reach it out of band.
    pub(crate) address: SocketAddr,
    /// What all must have alike.
    pub(crate) settings: String,
}

/// What it is told.
#[derive(Serialize, Deserialize, Debug)]
enum Answer {
    Refused(String),
    All(Vec<Hello>),
}

/// A new secret.
pub(crate) fn draw() -> Result<[u8; SECRET_BYTES]> {
    let mut secret = [0; SECRET_BYTES];
    rustix::rand::getrandom(&mut secret, rustix::rand::GetRandomFlags::empty())
        .map_err(|e| io("draw a secret")(e.into()))?;
    Ok(secret)
}

/// Where the ranks of one communicator meet.
pub struct Bootstrap {
    id: Id,
}

impl Bootstrap {
    /// Listens at an address (port 0: any), until all ranks have come or `patience` is over.
    pub fn listen(address: SocketAddr, patience: Duration) -> Result<Bootstrap> {
        let listener = TcpListener::bind(address).map_err(io(format!("listen at {address}")))?;
        listener.set_nonblocking(true).map_err(io("bootstrap socket"))?;
        let address = listener.local_addr().map_err(io("bootstrap socket"))?;
        let secret = draw()?;
        let id = Id { address, secret };
        let meeting = Meeting { secret, waiting: Vec::new(), expected: None };
        std::thread::Builder::new()
            .name("coll-meet".into())
            .spawn(move || meeting.hold(&listener, patience))
            .map_err(io("start the bootstrap's thread"))?;
        Ok(Bootstrap { id })
    }

    /// What to give to all ranks.
    pub fn id(&self) -> Id {
        self.id
    }
}

/// The ranks that have come.
struct Meeting {
    secret: [u8; SECRET_BYTES],
    waiting: Vec<(Hello, TcpStream)>,
    /// What the first one has said of what all must have alike.
    expected: Option<(usize, String)>,
}

impl Meeting {
    fn hold(mut self, listener: &TcpListener, patience: Duration) {
        let began = Instant::now();
        while began.elapsed() < patience {
            match listener.accept() {
                Ok((stream, _)) => self.welcome(stream),
                Err(_) => std::thread::sleep(LOOK),
            }
            if self.expected.as_ref().is_some_and(|(ranks, _)| self.waiting.len() == *ranks) {
                self.waiting.sort_by_key(|(hello, _)| hello.rank);
                let all: Vec<Hello> = self.waiting.iter().map(|(hello, _)| hello.clone()).collect();
                return self.tell_all(&Answer::All(all));
            }
        }
        let ranks = self.expected.as_ref().map_or(0, |(ranks, _)| *ranks);
        let missing = (0..ranks).find(|rank| self.waiting.iter().all(|(hello, _)| hello.rank != *rank));
        let what = format!("rank {} of {ranks} has not come within {} s", missing.unwrap_or(0), patience.as_secs());
        self.tell_all(&Answer::Refused(what));
    }

    fn tell_all(self, answer: &Answer) {
        for (_, mut stream) in self.waiting {
            // One that has gone will be missed soon enough.
            let _ = say(&mut stream, answer);
        }
    }

    fn welcome(&mut self, stream: TcpStream) {
        let mut stream = stream;
        let prepared = stream.set_nonblocking(false).and_then(|()| stream.set_read_timeout(Some(SPEAKS)));
        let Ok(hello) = prepared.map_err(io("")).and_then(|()| hear::<Hello>(&stream)) else { return };
        match self.refuse(&hello) {
            Some(why) => {
                let _ = say(&mut stream, &Answer::Refused(why));
            }
            None => {
                self.expected.get_or_insert((hello.ranks, hello.settings.clone()));
                self.waiting.push((hello, stream));
            }
        }
    }

    /// Why somebody may not take part.
    fn refuse(&self, hello: &Hello) -> Option<String> {
        if hello.version != VERSION {
            return Some(format!(
                "version {} of the bootstrap; version {VERSION} is here: use one build",
                hello.version
            ));
        }
        if hello.secret != self.secret {
            return Some("the id is that of another job: give all ranks the id of this one".into());
        }
        if hello.rank >= hello.ranks {
            return Some(format!("rank {} of {}: ranks are counted from 0", hello.rank, hello.ranks));
        }
        if self.waiting.iter().any(|(other, _)| other.rank == hello.rank) {
            return Some(format!("rank {} has come already: give each process a rank of its own", hello.rank));
        }
        match &self.expected {
            Some((ranks, _)) if *ranks != hello.ranks => {
                Some(format!("rank {} counts {} ranks, others {ranks}: give all the same", hello.rank, hello.ranks))
            }
            Some((_, settings)) if *settings != hello.settings => Some(format!(
                "rank {} has other settings ({}) than others ({settings}): give all the same",
                hello.rank, hello.settings
            )),
            _ => None,
        }
    }
}

/// Meets the others.
pub(crate) fn meet(id: &Id, mut hello: Hello, patience: Duration) -> Result<Vec<Hello>> {
    (hello.version, hello.secret) = (VERSION, id.secret);
    let mut stream = reach(id.address, patience)
        .map_err(io(format!("reach the bootstrap at {}; is the process that made the id there?", id.address)))?;
    stream.set_read_timeout(Some(patience + SPEAKS)).map_err(io("bootstrap socket"))?;
    say(&mut stream, &hello)?;
    match hear(&stream)? {
        Answer::Refused(why) => Err(Error::Bootstrap(why)),
        Answer::All(all) if all.len() == hello.ranks => Ok(all),
        Answer::All(all) => {
            Err(Error::Bootstrap(format!("{} ranks were told of, {} expected", all.len(), hello.ranks)))
        }
    }
}

impl Hello {
    /// Of this rank.
    pub(crate) fn new(
        rank: usize,
        ranks: usize,
        host: String,
        nics_mbps: Vec<u32>,
        address: SocketAddr,
        settings: String,
    ) -> Hello {
        Hello { version: VERSION, secret: [0; SECRET_BYTES], rank, ranks, host, nics_mbps, address, settings }
    }
}

fn say(stream: &mut TcpStream, what: &impl Serialize) -> Result<()> {
    let mut line = serde_json::to_vec(what).map_err(|e| Error::Bootstrap(e.to_string()))?;
    line.push(b'\n');
    stream.write_all(&line).map_err(io("bootstrap"))
}

fn hear<T: for<'a> Deserialize<'a>>(stream: &TcpStream) -> Result<T> {
    let mut line = Vec::new();
    let heard = BufReader::new(stream.take(MAX_LINE)).read_until(b'\n', &mut line);
    serde_json::from_slice(&line).map_err(|_| match heard {
        Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {
            Error::Bootstrap("the bootstrap does not answer; is the process that made the id stopped?".into())
        }
        // It closes when all are there, and when one has not come in time.
        _ => Error::Bootstrap(
            "the bootstrap has ended: all ranks were there, or one did not come; is this one there twice?".into(),
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello(rank: usize, settings: &str) -> Hello {
        let address = "127.0.0.1:1".parse().unwrap();
        Hello::new(rank, 2, "h".into(), vec![1], address, settings.into())
    }

    #[test]
    fn an_id_is_its_text() {
        let id = Id { address: "[::1]:5".parse().unwrap(), secret: [0xab; SECRET_BYTES] };
        assert_eq!(id.to_string().parse::<Id>().unwrap(), id);
        for bad in ["", "x", "127.0.0.1/ab", "127.0.0.1:5/abab"] {
            assert!(bad.parse::<Id>().unwrap_err().to_string().contains("no id"), "{bad}");
        }
    }

    #[test]
    fn strangers_and_doubles_are_refused_and_the_others_meet() {
        let patience = Duration::from_secs(10);
        let bootstrap = Bootstrap::listen("127.0.0.1:0".parse().unwrap(), patience).unwrap();
        let id = bootstrap.id();
        // Those who come are heard in the order in which they come.
        let mut first = TcpStream::connect(id.address).unwrap();
        say(&mut first, &Hello { version: VERSION, secret: id.secret, ..hello(0, "s") }).unwrap();
        let says = |result: Result<Vec<Hello>>| result.unwrap_err().to_string();
        let other = Id { secret: [1; SECRET_BYTES], ..id };
        assert!(says(meet(&other, hello(1, "s"), patience)).contains("another job"));
        assert!(says(meet(&id, Hello { ranks: 3, ..hello(2, "s") }, patience)).contains("counts 3 ranks"));
        assert!(says(meet(&id, hello(0, "s"), patience)).contains("rank 0 has come already"));
        assert!(says(meet(&id, hello(1, "t"), patience)).contains("other settings"));
        assert_eq!(meet(&id, hello(1, "s"), patience).unwrap().len(), 2);
        assert!(matches!(hear(&first), Ok(Answer::All(all)) if all[1].rank == 1));
    }

    #[test]
    fn who_does_not_come_is_named() {
        let bootstrap = Bootstrap::listen("127.0.0.1:0".parse().unwrap(), Duration::from_millis(100)).unwrap();
        let error = meet(&bootstrap.id(), hello(0, "s"), Duration::from_secs(10)).unwrap_err();
        assert!(error.to_string().contains("rank 1 of 2 has not come"), "{error}");
    }
}
