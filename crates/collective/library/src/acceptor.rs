//! Accepts the connections by which other processes reach this one out of band: one socket and one
//! thread for each address, whatever number of communicators.
//!
//! The thread waits for no caller. It reads nothing but an introduction of fixed length
//! ([`crate::auth`]) until the caller has proved that it knows the secret of the *service* it
//! names. A service is a rank of a communicator, which gets the connection ([`Arrivals`]), or a
//! meeting of ranks ([`Meeting`]), which this thread holds. A caller has [`GREETING`] for all of
//! that. At most [`MAX_UNPROVEN`] callers may be unproven: the oldest makes room for the next. A
//! caller whose connection was closed before it had its verdict tries again.
//!
//! Without a descriptor for a caller the thread accepts nobody for a while, longer and longer, and
//! reports that to all services.
//!
//! The acceptor exists as long as it has services, and is opened anew when one is wanted after
//! that, or in a forked child.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use rustix::event::{poll, PollFd, PollFlags, Timespec};

use crate::auth::{draw, frame, refusal, Called, Seals, Secret, ServiceName, INTRODUCTION_BYTES};
use crate::bootstrap::{Meeting, Told, MAX_HELLO_BYTES};
use crate::conn::{Conn, Waker};
use crate::error::{io, Result};
use crate::limits::descriptors;

/// How long a caller may take to prove itself, and one of those who meet to say who it is.
pub(crate) const GREETING: Duration = Duration::from_secs(10);
/// How long one may take to take in what it is told.
const TAKING: Duration = Duration::from_secs(10);
/// Callers that have not proved themselves.
const MAX_UNPROVEN: usize = 256;
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
pub(crate) struct Arrivals {
    arrived: Mutex<Vec<Arrival>>,
    /// Why others may have been kept out.
    trouble: Mutex<Option<String>>,
    pub(crate) waker: Arc<Waker>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Arrivals {
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
enum Service {
    Rank(Secret, Arc<Arrivals>),
    Meeting(Meeting),
}

impl Service {
    fn secret(&self) -> &Secret {
        match self {
            Service::Rank(secret, _) => secret,
            Service::Meeting(meeting) => meeting.secret(),
        }
    }
}

#[derive(Default)]
struct Services {
    all: HashMap<ServiceName, Service>,
    /// Nobody looks any more.
    closed: bool,
}

/// What an acceptor's thread shares with its services.
struct Acceptor {
    address: SocketAddr,
    /// The process whose thread it is.
    pid: u32,
    services: Mutex<Services>,
    waker: Waker,
}

/// The acceptors of this process with a port of the system's choice.
static ACCEPTORS: Mutex<Vec<(IpAddr, Weak<Acceptor>)>> = Mutex::new(Vec::new());

impl Acceptor {
    /// Opens one, with somebody behind it.
    fn open(at: SocketAddr, name: ServiceName, service: Service) -> Result<Arc<Acceptor>> {
        let listener = TcpListener::bind(at).map_err(io(format!("listen at {at}")))?;
        listener.set_nonblocking(true).map_err(io("a socket out of band"))?;
        let address = listener.local_addr().map_err(io("a socket out of band"))?;
        let services = Services { all: HashMap::from([(name, service)]), closed: false };
        let (pid, waker) = (std::process::id(), Waker::new()?);
        let acceptor = Arc::new(Acceptor { address, pid, services: Mutex::new(services), waker });
        let accept_loop = AcceptLoop {
            listener,
            acceptor: acceptor.clone(),
            pending: Vec::new(),
            next: 0,
            pause: Pause::default(),
        };
        std::thread::Builder::new()
            .name("coll-acceptor".into())
            .spawn(move || accept_loop.run())
            .map_err(io("start the thread out of band"))?;
        Ok(acceptor)
    }

    /// Adds a service; gives it back where the thread has ended.
    fn add(&self, name: ServiceName, service: Service) -> std::result::Result<(), Service> {
        // In a forked child somebody may hold the lock who is not there.
        if self.pid != std::process::id() {
            return Err(service);
        }
        let mut services = locked(&self.services);
        if services.closed {
            return Err(service);
        }
        services.all.insert(name, service);
        drop(services);
        self.waker.wake();
        Ok(())
    }

    /// An acceptor of this process at an address, which has that service.
    fn with(at: IpAddr, name: ServiceName, mut service: Service) -> Result<Arc<Acceptor>> {
        let mut acceptors = locked(&ACCEPTORS);
        acceptors.retain(|(_, acceptor)| acceptor.strong_count() > 0);
        for acceptor in acceptors
            .iter()
            .filter(|(ip, _)| *ip == at)
            .filter_map(|(_, acceptor)| acceptor.upgrade())
        {
            match acceptor.add(name, service) {
                Ok(()) => return Ok(acceptor),
                Err(back) => service = back,
            }
        }
        let acceptor = Acceptor::open(SocketAddr::new(at, 0), name, service)?;
        acceptors.push((at, Arc::downgrade(&acceptor)));
        Ok(acceptor)
    }
}

/// A rank's service: others can reach it as long as this exists.
pub(crate) struct Registration {
    acceptor: Arc<Acceptor>,
    pub(crate) name: ServiceName,
    pub(crate) arrivals: Arc<Arrivals>,
}

impl Registration {
    /// Where others reach it.
    pub(crate) fn address(&self) -> SocketAddr {
        self.acceptor.address
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        // In a forked child neither the lock nor the thread is what it was.
        if self.acceptor.pid == std::process::id() {
            locked(&self.acceptor.services).all.remove(&self.name);
            self.acceptor.waker.wake();
        }
    }
}

/// This process has had no descriptor for any caller, though no unproven caller has taken one.
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

/// Adds a service for a rank, at an address of this machine.
pub(crate) fn register(at: IpAddr, secret: Secret) -> Result<Registration> {
    let waker = Arc::new(Waker::new()?);
    let arrivals =
        Arc::new(Arrivals { arrived: Mutex::default(), trouble: Mutex::default(), waker });
    let name = draw()?;
    let acceptor = Acceptor::with(at, name, Service::Rank(secret, arrivals.clone()))?;
    Ok(Registration { acceptor, name, arrivals })
}

/// Has ranks meet at an address (port 0: any). Gives where.
pub(crate) fn hold(at: SocketAddr, meeting: Meeting) -> Result<SocketAddr> {
    let name = meeting.service();
    let acceptor = match at.port() {
        0 => Acceptor::with(at.ip(), name, Service::Meeting(meeting))?,
        _ => Acceptor::open(at, name, Service::Meeting(meeting))?,
    };
    Ok(acceptor.address)
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
    Introduces(Called),
    /// It is one of those who meet, and says who it is.
    Says(ServiceName, usize, Box<Seals>),
    /// It waits for the others.
    Waits(ServiceName, Box<Seals>),
    /// It is being told.
    Told,
}

struct PendingCaller {
    number: u64,
    conn: Conn,
    stage: Stage,
    until: Instant,
}

/// What becomes of a pending caller.
enum Fate {
    Stays,
    Goes,
    /// It is the rank's now.
    Handed(Arc<Arrivals>, usize, Box<Seals>),
}

/// The thread.
struct AcceptLoop {
    listener: TcpListener,
    acceptor: Arc<Acceptor>,
    pending: Vec<PendingCaller>,
    next: u64,
    pause: Pause,
}

impl AcceptLoop {
    fn run(mut self) {
        while !self.is_over() {
            let (calls, ready) = self.wait();
            self.acceptor.waker.clear();
            ready.into_iter().for_each(|number| self.serve(number));
            self.expire();
            if calls {
                self.accept();
            }
        }
    }

    /// There is no service any more, and no caller is being told anything.
    fn is_over(&mut self) -> bool {
        let mut services = locked(&self.acceptor.services);
        services.closed =
            services.all.is_empty() && !self.pending.iter().any(|g| matches!(g.stage, Stage::Told));
        services.closed
    }

    /// Until when nothing need be done.
    fn deadline(&self) -> Instant {
        let of_meeting = |service: &Service| match service {
            Service::Meeting(meeting) => Some(meeting.deadline()),
            Service::Rank(..) => None,
        };
        let services = locked(&self.acceptor.services);
        let meetings = services.all.values().filter_map(of_meeting);
        let pending = self.pending.iter().map(|g| g.until);
        pending
            .chain(meetings)
            .chain(self.pause.until)
            .min()
            .unwrap_or_else(|| Instant::now() + RESTS)
    }

    /// Waits until there is something to do. Whether somebody wants to be accepted, and the
    /// pending callers that something can be done for.
    fn wait(&mut self) -> (bool, Vec<u64>) {
        let now = Instant::now();
        let most = self.deadline().saturating_duration_since(now).min(RESTS);
        self.pause.until = self.pause.until.filter(|until| *until > now);
        let open = self.pause.until.is_none();
        let mut fds = vec![PollFd::new(&self.acceptor.waker.0, PollFlags::IN)];
        fds.extend(self.pending.iter().map(|g| PollFd::new(&g.conn.stream, g.conn.interest())));
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
        let calls = open && fds.last().is_some_and(some);
        let ready = self
            .pending
            .iter()
            .zip(&fds[1..])
            .filter(|(_, fd)| some(fd))
            .map(|(caller, _)| caller.number);
        (calls, ready.collect())
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
        let unproven = self.unproven();
        (0..unproven.div_ceil(2)).for_each(|_| self.drop_oldest_unproven());
        let what = format!(
            "connections of other ranks could not be accepted: {error}{}",
            descriptors(error)
        );
        if unproven == 0 {
            let (mut starved, now) = (locked(&STARVED), Instant::now());
            let goes_on =
                starved.as_ref().filter(|s| now.duration_since(s.last) < 3 * LONGEST_PAUSE);
            let since = goes_on.map_or(now, |s| s.since);
            *starved = Some(Starved { since, last: now, what: what.clone() });
        }
        for service in locked(&self.acceptor.services).all.values_mut() {
            match service {
                Service::Rank(_, arrivals) => {
                    *locked(&arrivals.trouble) = Some(what.clone());
                    arrivals.waker.wake();
                }
                Service::Meeting(meeting) => meeting.trouble(what.clone()),
            }
        }
    }

    fn at(&self, number: u64) -> Option<usize> {
        self.pending.iter().position(|g| g.number == number)
    }

    fn unproven(&self) -> usize {
        self.pending.iter().filter(|g| matches!(g.stage, Stage::Introduces(_))).count()
    }

    fn drop_oldest_unproven(&mut self) {
        if let Some(oldest) =
            self.pending.iter().position(|g| matches!(g.stage, Stage::Introduces(_)))
        {
            // In the order in which they came.
            self.pending.remove(oldest);
        }
    }

    fn welcome(&mut self, stream: TcpStream) {
        if self.unproven() >= MAX_UNPROVEN {
            self.drop_oldest_unproven();
        }
        let (Ok(called), Ok(mut conn)) = (Called::new(), Conn::new(stream)) else { return };
        conn.output().extend(called.greeting());
        if conn.flush().is_ok() {
            let until = Instant::now() + GREETING;
            self.pending.push(PendingCaller {
                number: self.next,
                conn,
                stage: Stage::Introduces(called),
                until,
            });
            self.next += 1;
        }
    }

    /// Reads from a pending caller, and tells it what it is to be told.
    fn serve(&mut self, number: u64) {
        // Others may have gone with one that was served before it.
        let Some(k) = self.at(number) else { return };
        match self.fate(k) {
            Fate::Stays => {}
            Fate::Goes => self.dismiss(k),
            Fate::Handed(arrivals, rank, seals) => {
                let stream = self.pending.remove(k).conn.stream;
                // Who finds no room is closed upon, and its own rank notices.
                let _ = arrivals.put(Arrival { stream, rank, seals });
            }
        }
    }

    fn fate(&mut self, k: usize) -> Fate {
        let caller = &mut self.pending[k];
        if caller.conn.flush().is_err() {
            return Fate::Goes;
        }
        let most = match caller.stage {
            Stage::Introduces(_) => INTRODUCTION_BYTES,
            Stage::Says(..) => MAX_HELLO_BYTES,
            // Nothing is due from it; one byte tells that it has gone, or is no rank.
            Stage::Waits(..) | Stage::Told => 1,
        };
        let lives = matches!(caller.conn.read(most), Ok(true));
        let full = caller.conn.input.len() >= most;
        match &mut caller.stage {
            Stage::Introduces(_) if full => self.admit(k),
            Stage::Says(service, rank, seals) => {
                match seals.other.open(&caller.conn.input, MAX_HELLO_BYTES / 2) {
                    Ok(Some((_, hello, _))) => {
                        let (service, rank, hello) = (*service, *rank, hello.to_vec());
                        self.heard(k, service, rank, &hello);
                        Fate::Stays
                    }
                    Ok(None) if lives && !full => Fate::Stays,
                    _ => Fate::Goes,
                }
            }
            Stage::Told if caller.conn.unsent() > 0 && lives => Fate::Stays,
            Stage::Introduces(_) | Stage::Waits(..) if lives && !full => Fate::Stays,
            _ => Fate::Goes,
        }
    }

    /// Looks at an introduction.
    fn admit(&mut self, k: usize) -> Fate {
        let caller = &mut self.pending[k];
        let Stage::Introduces(called) = &caller.stage else { return Fate::Goes };
        let bytes = std::mem::take(&mut caller.conn.input);
        let Some(introduction) = called.introduction(&bytes) else { return Fate::Goes };
        let services = locked(&self.acceptor.services);
        let service = services.all.get(&introduction.service);
        let admitted =
            service.and_then(|service| Some((service, introduction.admit(service.secret())?)));
        let Some((service, (verdict, seals))) = admitted else {
            caller.conn.output().extend(refusal());
            // A few bytes, which find room.
            let _ = caller.conn.flush();
            return Fate::Goes;
        };
        caller.conn.output().extend(verdict);
        if caller.conn.flush().is_err() || caller.conn.unsent() > 0 {
            return Fate::Goes;
        }
        match service {
            Service::Rank(_, arrivals) => {
                Fate::Handed(arrivals.clone(), introduction.rank, Box::new(seals))
            }
            Service::Meeting(_) => {
                caller.until = Instant::now() + GREETING;
                caller.stage =
                    Stage::Says(introduction.service, introduction.rank, Box::new(seals));
                Fate::Stays
            }
        }
    }

    /// One of those who meet has said who it is.
    fn heard(&mut self, k: usize, service: ServiceName, rank: usize, hello: &[u8]) {
        let caller = &mut self.pending[k];
        let number = caller.number;
        if let Stage::Says(_, _, seals) = std::mem::replace(&mut caller.stage, Stage::Told) {
            caller.stage = Stage::Waits(service, seals);
            // The meeting knows how long it waits.
            caller.until = Instant::now() + Duration::from_secs(u32::MAX.into());
        }
        caller.conn.input.clear();
        self.meeting(service, |meeting| meeting.hear(number, rank, hello));
    }

    /// Lets a meeting do something, and tells those whom it tells.
    fn meeting(&mut self, name: ServiceName, act: impl FnOnce(&mut Meeting) -> Vec<Told>) {
        let mut services = locked(&self.acceptor.services);
        let Some(Service::Meeting(meeting)) = services.all.get_mut(&name) else { return };
        let told = act(meeting);
        if meeting.is_over() {
            services.all.remove(&name);
        }
        drop(services);
        // This process's own rank may end the process when it knows: the last one is told last.
        for (number, answer) in told.into_iter().rev() {
            let Some(caller) = self.pending.iter_mut().find(|g| g.number == number) else {
                continue;
            };
            let Stage::Waits(_, mut seals) = std::mem::replace(&mut caller.stage, Stage::Told)
            else {
                continue;
            };
            let mut bytes = frame(0, &answer);
            seals.own.close(&mut bytes, 0);
            caller.conn.output().extend(bytes);
            caller.until = Instant::now() + TAKING;
            // What is left goes when there is room; an error is seen then, too.
            let _ = caller.conn.flush();
        }
        self.pending.retain(|g| !matches!(g.stage, Stage::Told) || g.conn.unsent() > 0);
    }

    /// Removes a pending caller.
    fn dismiss(&mut self, k: usize) {
        let caller = self.pending.remove(k);
        if let Stage::Waits(service, _) = caller.stage {
            self.meeting(service, |meeting| meeting.gone(caller.number));
        }
    }

    /// Ends what has taken too long.
    fn expire(&mut self) {
        let now = Instant::now();
        let late: Vec<u64> =
            self.pending.iter().filter(|g| g.until <= now).map(|g| g.number).collect();
        for number in late {
            if let Some(k) = self.at(number) {
                self.dismiss(k);
            }
        }
        let due = |(name, service): (&ServiceName, &Service)| match service {
            Service::Meeting(meeting) if meeting.deadline() <= now => Some(*name),
            _ => None,
        };
        let late: Vec<ServiceName> =
            locked(&self.acceptor.services).all.iter().filter_map(due).collect();
        late.into_iter().for_each(|name| self.meeting(name, |meeting| meeting.look(now)));
    }
}

#[cfg(test)]
mod tests;
