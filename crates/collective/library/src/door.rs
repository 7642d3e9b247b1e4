//! Where others reach this process out of band: one socket and one thread for each address,
//! whatever number of communicators.
//!
//! All who call are greeted together, by one thread that waits for none of them. Nothing is read of
//! a caller but a knock of fixed length ([`crate::auth`]) until it has proved that it knows the
//! secret of the *seat* it names: a rank of a communicator, which is handed the connection
//! ([`Lobby`]), or a meeting of ranks ([`Meeting`]), which this thread holds. A caller has
//! [`GREETS`] for all of that; of [`MAX_STRANGERS`] that have not, the oldest makes room for the
//! next. A caller that was closed upon before it had its verdict tries again.
//!
//! Without a descriptor for a caller the thread accepts nobody for a while, longer and longer, and
//! says so at all seats.
//!
//! The door is there as long as it has seats, and is opened anew when one is wanted after that, or
//! in a forked child.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use rustix::event::{poll, PollFd, PollFlags, Timespec};

use crate::auth::{draw, frame, refusal, Called, Seals, SeatName, Secret, KNOCK_BYTES};
use crate::bootstrap::{Meeting, Told, MAX_HELLO_BYTES};
use crate::conn::{Conn, Waker};
use crate::error::{io, Result};
use crate::limits::descriptors;

/// How long a caller may take to prove itself, and one of those who meet to say who it is.
pub(crate) const GREETS: Duration = Duration::from_secs(10);
/// How long one may take to take in what it is told.
const TAKES: Duration = Duration::from_secs(10);
/// Callers that have not proved themselves.
const MAX_STRANGERS: usize = 256;
/// Callers that are accepted between looks at the others.
const MAX_ACCEPTS: usize = 64;
/// Connections that a rank has not taken yet.
const MAX_ARRIVALS: usize = 4096;
/// How long nobody is accepted where there is no descriptor for it.
const SHORTEST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// After so long it is no passing thing.
const STARVES: Duration = Duration::from_secs(3);
/// How long the thread sleeps without any deadline.
const RESTS: Duration = Duration::from_secs(60);

/// A caller that is who it says.
pub(crate) struct Arrival {
    pub(crate) stream: TcpStream,
    pub(crate) rank: usize,
    pub(crate) seals: Box<Seals>,
}

/// Where those who have come for a rank wait until it takes them.
pub(crate) struct Lobby {
    arrived: Mutex<Vec<Arrival>>,
    /// Why others may have been kept out.
    trouble: Mutex<Option<String>>,
    pub(crate) waker: Arc<Waker>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Lobby {
    /// Those who have come since.
    pub(crate) fn take(&self) -> Vec<Arrival> {
        std::mem::take(&mut locked(&self.arrived))
    }

    /// What has kept others out since, if anything has.
    pub(crate) fn trouble(&self) -> Option<String> {
        locked(&self.trouble).take()
    }

    /// `false`: there is no room.
    pub(crate) fn put(&self, arrival: Arrival) -> bool {
        let mut arrived = locked(&self.arrived);
        if arrived.len() >= MAX_ARRIVALS {
            return false;
        }
        arrived.push(arrival);
        self.waker.wake();
        true
    }
}

/// Whom callers may speak to.
enum Seat {
    Rank(Secret, Arc<Lobby>),
    Meeting(Meeting),
}

impl Seat {
    fn secret(&self) -> &Secret {
        match self {
            Seat::Rank(secret, _) => secret,
            Seat::Meeting(meeting) => meeting.secret(),
        }
    }
}

#[derive(Default)]
struct Seats {
    all: HashMap<SeatName, Seat>,
    /// Nobody looks any more.
    closed: bool,
}

/// What a door's thread shares with those who sit behind it.
struct Door {
    address: SocketAddr,
    /// The process whose thread it is.
    pid: u32,
    seats: Mutex<Seats>,
    waker: Waker,
}

/// The doors of this process with a port of the system's choice.
static DOORS: Mutex<Vec<(IpAddr, Weak<Door>)>> = Mutex::new(Vec::new());

impl Door {
    /// Opens one, with somebody behind it.
    fn open(at: SocketAddr, name: SeatName, seat: Seat) -> Result<Arc<Door>> {
        let listener = TcpListener::bind(at).map_err(io(format!("listen at {at}")))?;
        listener.set_nonblocking(true).map_err(io("a socket out of band"))?;
        let address = listener.local_addr().map_err(io("a socket out of band"))?;
        let seats = Seats { all: HashMap::from([(name, seat)]), closed: false };
        let (pid, waker) = (std::process::id(), Waker::new()?);
        let door = Arc::new(Door { address, pid, seats: Mutex::new(seats), waker });
        let keeper = Keeper {
            listener,
            door: door.clone(),
            guests: Vec::new(),
            next: 0,
            pause: Pause::default(),
        };
        std::thread::Builder::new()
            .name("coll-door".into())
            .spawn(move || keeper.run())
            .map_err(io("start the thread out of band"))?;
        Ok(door)
    }

    /// Adds a seat; gives it back where nobody looks any more.
    fn add(&self, name: SeatName, seat: Seat) -> std::result::Result<(), Seat> {
        // In a forked child somebody may hold the lock who is not there.
        if self.pid != std::process::id() {
            return Err(seat);
        }
        let mut seats = locked(&self.seats);
        if seats.closed {
            return Err(seat);
        }
        seats.all.insert(name, seat);
        drop(seats);
        self.waker.wake();
        Ok(())
    }

    /// A door of this process at an address, which has that seat.
    fn with(at: IpAddr, name: SeatName, mut seat: Seat) -> Result<Arc<Door>> {
        let mut doors = locked(&DOORS);
        doors.retain(|(_, door)| door.strong_count() > 0);
        for door in doors.iter().filter(|(ip, _)| *ip == at).filter_map(|(_, door)| door.upgrade())
        {
            match door.add(name, seat) {
                Ok(()) => return Ok(door),
                Err(back) => seat = back,
            }
        }
        let door = Door::open(SocketAddr::new(at, 0), name, seat)?;
        doors.push((at, Arc::downgrade(&door)));
        Ok(door)
    }
}

/// A rank's seat. Others can call it as long as this lives.
pub(crate) struct Chair {
    door: Arc<Door>,
    pub(crate) name: SeatName,
    pub(crate) lobby: Arc<Lobby>,
}

impl Chair {
    /// Where others reach it.
    pub(crate) fn address(&self) -> SocketAddr {
        self.door.address
    }
}

impl Drop for Chair {
    fn drop(&mut self) {
        // In a forked child neither the lock nor the thread is what it was.
        if self.door.pid == std::process::id() {
            locked(&self.door.seats).all.remove(&self.name);
            self.door.waker.wake();
        }
    }
}

/// This process has had no descriptor for any caller, though no stranger has taken one.
struct Starved {
    since: Instant,
    last: Instant,
    what: String,
}

static STARVED: Mutex<Option<Starved>> = Mutex::new(None);

/// Why nobody can call this process, if that has been so for a while.
pub(crate) fn starving() -> Option<String> {
    let starved = locked(&STARVED);
    let goes_on =
        |s: &&Starved| s.since.elapsed() > STARVES && s.last.elapsed() < 3 * LONGEST_PAUSE;
    starved.as_ref().filter(goes_on).map(|s| s.what.clone())
}

/// Takes a seat at an address of this machine.
pub(crate) fn sit(at: IpAddr, secret: Secret) -> Result<Chair> {
    let waker = Arc::new(Waker::new()?);
    let lobby = Arc::new(Lobby { arrived: Mutex::default(), trouble: Mutex::default(), waker });
    let name = draw()?;
    let door = Door::with(at, name, Seat::Rank(secret, lobby.clone()))?;
    Ok(Chair { door, name, lobby })
}

/// Has ranks meet at an address (port 0: any). Gives where.
pub(crate) fn hold(at: SocketAddr, meeting: Meeting) -> Result<SocketAddr> {
    let name = meeting.seat();
    let door = match at.port() {
        0 => Door::with(at.ip(), name, Seat::Meeting(meeting))?,
        _ => Door::open(at, name, Seat::Meeting(meeting))?,
    };
    Ok(door.address)
}

/// How long nobody is accepted.
#[derive(Default)]
struct Pause {
    until: Option<Instant>,
    next: Duration,
}

impl Pause {
    fn begin(&mut self) {
        let length = self.next.clamp(SHORTEST_PAUSE, LONGEST_PAUSE);
        (self.until, self.next) = (Some(Instant::now() + length), 2 * length);
    }
}

/// Where a caller is on its way.
enum Stage {
    Knocks(Called),
    /// It is one of those who meet, and says who it is.
    Says(SeatName, usize, Box<Seals>),
    /// It waits for the others.
    Waits(SeatName, Box<Seals>),
    /// It is being told.
    Told,
}

struct Guest {
    number: u64,
    conn: Conn,
    stage: Stage,
    until: Instant,
}

/// What becomes of a guest.
enum Fate {
    Stays,
    Goes,
    /// It is the rank's now.
    Handed(Arc<Lobby>, usize, Box<Seals>),
}

/// The thread.
struct Keeper {
    listener: TcpListener,
    door: Arc<Door>,
    guests: Vec<Guest>,
    next: u64,
    pause: Pause,
}

impl Keeper {
    fn run(mut self) {
        while !self.is_over() {
            let (knocks, ready) = self.wait();
            self.door.waker.clear();
            ready.into_iter().for_each(|number| self.serve(number));
            self.expire();
            if knocks {
                self.accept();
            }
        }
    }

    /// Nobody sits here any more, and nobody is being told anything.
    fn is_over(&mut self) -> bool {
        let mut seats = locked(&self.door.seats);
        seats.closed =
            seats.all.is_empty() && !self.guests.iter().any(|g| matches!(g.stage, Stage::Told));
        seats.closed
    }

    /// Until when nothing need be done.
    fn deadline(&self) -> Instant {
        let of_meeting = |seat: &Seat| match seat {
            Seat::Meeting(meeting) => Some(meeting.deadline()),
            Seat::Rank(..) => None,
        };
        let seats = locked(&self.door.seats);
        let meetings = seats.all.values().filter_map(of_meeting);
        let guests = self.guests.iter().map(|g| g.until);
        guests
            .chain(meetings)
            .chain(self.pause.until)
            .min()
            .unwrap_or_else(|| Instant::now() + RESTS)
    }

    /// Waits until there is something to do. Whether somebody wants to be accepted, and the guests
    /// that something can be done for.
    fn wait(&mut self) -> (bool, Vec<u64>) {
        let now = Instant::now();
        let most = self.deadline().saturating_duration_since(now).min(RESTS);
        self.pause.until = self.pause.until.filter(|until| *until > now);
        let open = self.pause.until.is_none();
        let mut fds = vec![PollFd::new(&self.door.waker.0, PollFlags::IN)];
        fds.extend(self.guests.iter().map(|g| PollFd::new(&g.conn.stream, g.conn.interest())));
        if open {
            fds.push(PollFd::new(&self.listener, PollFlags::IN));
        }
        // Not before the deadline, or it would be waited for again and again.
        let nanos = most.subsec_nanos().next_multiple_of(1_000_000).min(999_999_999);
        let timeout = Timespec { tv_sec: most.as_secs() as i64, tv_nsec: nanos.into() };
        if poll(&mut fds, Some(&timeout)).is_err() {
            // interrupted
            return (false, Vec::new());
        }
        let some = |fd: &PollFd<'_>| !fd.revents().is_empty();
        let knocks = open && fds.last().is_some_and(some);
        let ready = self
            .guests
            .iter()
            .zip(&fds[1..])
            .filter(|(_, fd)| some(fd))
            .map(|(guest, _)| guest.number);
        (knocks, ready.collect())
    }

    fn accept(&mut self) {
        for _ in 0..MAX_ACCEPTS {
            match self.listener.accept() {
                Ok((stream, _)) => {
                    self.pause.next = Duration::ZERO;
                    self.welcome(stream);
                }
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => return,
                // It has gone again.
                Err(e) if e.kind() == std::io::ErrorKind::ConnectionAborted => {}
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                Err(e) => return self.starve(&e),
            }
        }
    }

    /// Nobody can be accepted now.
    fn starve(&mut self, error: &std::io::Error) {
        self.pause.begin();
        // They may be what takes the descriptors: half of them go.
        let strangers = self.strangers();
        (0..strangers.div_ceil(2)).for_each(|_| self.drop_oldest_stranger());
        let what = format!(
            "connections of other ranks could not be accepted: {error}{}",
            descriptors(error)
        );
        if strangers == 0 {
            let (mut starved, now) = (locked(&STARVED), Instant::now());
            let goes_on =
                starved.as_ref().filter(|s| now.duration_since(s.last) < 3 * LONGEST_PAUSE);
            let since = goes_on.map_or(now, |s| s.since);
            *starved = Some(Starved { since, last: now, what: what.clone() });
        }
        for seat in locked(&self.door.seats).all.values_mut() {
            match seat {
                Seat::Rank(_, lobby) => {
                    *locked(&lobby.trouble) = Some(what.clone());
                    lobby.waker.wake();
                }
                Seat::Meeting(meeting) => meeting.trouble(what.clone()),
            }
        }
    }

    fn at(&self, number: u64) -> Option<usize> {
        self.guests.iter().position(|g| g.number == number)
    }

    fn strangers(&self) -> usize {
        self.guests.iter().filter(|g| matches!(g.stage, Stage::Knocks(_))).count()
    }

    fn drop_oldest_stranger(&mut self) {
        if let Some(oldest) = self.guests.iter().position(|g| matches!(g.stage, Stage::Knocks(_))) {
            // In the order in which they came.
            self.guests.remove(oldest);
        }
    }

    fn welcome(&mut self, stream: TcpStream) {
        if self.strangers() >= MAX_STRANGERS {
            self.drop_oldest_stranger();
        }
        let (Ok(called), Ok(mut conn)) = (Called::new(), Conn::new(stream)) else { return };
        conn.output().extend(called.greeting());
        if conn.flush().is_ok() {
            let until = Instant::now() + GREETS;
            self.guests.push(Guest {
                number: self.next,
                conn,
                stage: Stage::Knocks(called),
                until,
            });
            self.next += 1;
        }
    }

    /// Reads from a guest, and tells it what it is to be told.
    fn serve(&mut self, number: u64) {
        // Others may have gone with one that was served before it.
        let Some(k) = self.at(number) else { return };
        match self.fate(k) {
            Fate::Stays => {}
            Fate::Goes => self.dismiss(k),
            Fate::Handed(lobby, rank, seals) => {
                let stream = self.guests.remove(k).conn.stream;
                // Who finds no room is closed upon, and its own rank notices.
                let _ = lobby.put(Arrival { stream, rank, seals });
            }
        }
    }

    fn fate(&mut self, k: usize) -> Fate {
        let guest = &mut self.guests[k];
        if guest.conn.flush().is_err() {
            return Fate::Goes;
        }
        let most = match guest.stage {
            Stage::Knocks(_) => KNOCK_BYTES,
            Stage::Says(..) => MAX_HELLO_BYTES,
            // Nothing is due from it; one byte tells that it has gone, or is no rank.
            Stage::Waits(..) | Stage::Told => 1,
        };
        let lives = matches!(guest.conn.read(most), Ok(true));
        let full = guest.conn.input.len() >= most;
        match &mut guest.stage {
            Stage::Knocks(_) if full => self.admit(k),
            Stage::Says(seat, rank, seals) => {
                match seals.other.open(&guest.conn.input, MAX_HELLO_BYTES / 2) {
                    Ok(Some((_, hello, _))) => {
                        let (seat, rank, hello) = (*seat, *rank, hello.to_vec());
                        self.heard(k, seat, rank, &hello);
                        Fate::Stays
                    }
                    Ok(None) if lives && !full => Fate::Stays,
                    _ => Fate::Goes,
                }
            }
            Stage::Told if guest.conn.unsent() > 0 && lives => Fate::Stays,
            Stage::Knocks(_) | Stage::Waits(..) if lives && !full => Fate::Stays,
            _ => Fate::Goes,
        }
    }

    /// Looks at a knock.
    fn admit(&mut self, k: usize) -> Fate {
        let guest = &mut self.guests[k];
        let Stage::Knocks(called) = &guest.stage else { return Fate::Goes };
        let bytes = std::mem::take(&mut guest.conn.input);
        let Some(knock) = called.knock(&bytes) else { return Fate::Goes };
        let seats = locked(&self.door.seats);
        let seat = seats.all.get(&knock.seat);
        let admitted = seat.and_then(|seat| Some((seat, knock.admit(seat.secret())?)));
        let Some((seat, (verdict, seals))) = admitted else {
            guest.conn.output().extend(refusal());
            // A few bytes, which find room.
            let _ = guest.conn.flush();
            return Fate::Goes;
        };
        guest.conn.output().extend(verdict);
        if guest.conn.flush().is_err() || guest.conn.unsent() > 0 {
            return Fate::Goes;
        }
        match seat {
            Seat::Rank(_, lobby) => Fate::Handed(lobby.clone(), knock.rank, Box::new(seals)),
            Seat::Meeting(_) => {
                guest.until = Instant::now() + GREETS;
                guest.stage = Stage::Says(knock.seat, knock.rank, Box::new(seals));
                Fate::Stays
            }
        }
    }

    /// One of those who meet has said who it is.
    fn heard(&mut self, k: usize, seat: SeatName, rank: usize, hello: &[u8]) {
        let guest = &mut self.guests[k];
        let number = guest.number;
        if let Stage::Says(_, _, seals) = std::mem::replace(&mut guest.stage, Stage::Told) {
            guest.stage = Stage::Waits(seat, seals);
            // The meeting knows how long it waits.
            guest.until = Instant::now() + Duration::from_secs(u32::MAX.into());
        }
        guest.conn.input.clear();
        self.meeting(seat, |meeting| meeting.hear(number, rank, hello));
    }

    /// Lets a meeting do something, and tells those whom it tells.
    fn meeting(&mut self, name: SeatName, act: impl FnOnce(&mut Meeting) -> Vec<Told>) {
        let mut seats = locked(&self.door.seats);
        let Some(Seat::Meeting(meeting)) = seats.all.get_mut(&name) else { return };
        let told = act(meeting);
        if meeting.is_over() {
            seats.all.remove(&name);
        }
        drop(seats);
        // This process's own rank may end the process when it knows: the last one is told last.
        for (number, answer) in told.into_iter().rev() {
            let Some(guest) = self.guests.iter_mut().find(|g| g.number == number) else { continue };
            let Stage::Waits(_, mut seals) = std::mem::replace(&mut guest.stage, Stage::Told)
            else {
                continue;
            };
            let mut bytes = frame(0, &answer);
            seals.own.close(&mut bytes, 0);
            guest.conn.output().extend(bytes);
            guest.until = Instant::now() + TAKES;
            // What is left goes when there is room; an error is seen then, too.
            let _ = guest.conn.flush();
        }
        self.guests.retain(|g| !matches!(g.stage, Stage::Told) || g.conn.unsent() > 0);
    }

    /// A guest goes.
    fn dismiss(&mut self, k: usize) {
        let guest = self.guests.remove(k);
        if let Stage::Waits(seat, _) = guest.stage {
            self.meeting(seat, |meeting| meeting.gone(guest.number));
        }
    }

    /// Ends what has taken too long.
    fn expire(&mut self) {
        let now = Instant::now();
        let late: Vec<u64> =
            self.guests.iter().filter(|g| g.until <= now).map(|g| g.number).collect();
        for number in late {
            if let Some(k) = self.at(number) {
                self.dismiss(k);
            }
        }
        let due = |(name, seat): (&SeatName, &Seat)| match seat {
            Seat::Meeting(meeting) if meeting.deadline() <= now => Some(*name),
            _ => None,
        };
        let late: Vec<SeatName> = locked(&self.door.seats).all.iter().filter_map(due).collect();
        late.into_iter().for_each(|name| self.meeting(name, |meeting| meeting.look(now)));
    }
}

#[cfg(test)]
mod tests;
