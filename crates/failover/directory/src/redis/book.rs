//! The protocol with the server, without I/O: what to ask in which round, and what the answers
//! mean.
//!
//! The thread ([`super::thread`]) connects, then runs rounds: [`Book::next`] gives commands,
//! [`Book::answer`] takes the answers. One round is under way at a time, so everything that waits
//! meanwhile goes together in the next.
//!
//! ```text
//! starting ── connected, greeted ──> up ── trouble ──> down(why) ── connected, greeted ──> up
//! starting ── trouble ──> down(why)
//! ```
//!
//! *Greeting*: the key is claimed (it is made by whoever is first) and read, and the server's time.
//! A process that has a key keeps it, and claims it again for a server that has lost it. Being
//! greeted, everything is entered again, and whatever is known is asked for again.
//!
//! *Every second*: the key is claimed again, and this process's entry is read, which shows whether
//! the server has lost its data without a word, or let entries expire since its clock has jumped:
//! then everything is entered again. And the log of changes is read, in which processes that change
//! (a NIC has died, or is healed) say so.
//!
//! *Every quarter of a lease* everything is entered again.
//!
//! The server's clock decides nothing but where reading the log begins.

use sha2::{Digest, Sha256};

use super::command::{Command, Names, QpName, Reply, KEPT_LINES, MAX_LINES, TABLE};
use super::known::{Known, Now};
use super::own::{Entry, Own, ENDED};
use crate::directory::News;
use crate::record::{decode_key, encode_key, MovedQp, KEY_BYTES, VERSION};

/// Entries, and things to ask of each kind, in one round: thousands of QPs that are connected at a
/// time cost few round trips.
const BATCH: usize = 1024;
/// Entries of dead processes that are taken out at a time.
const MAX_LEFT_BEHIND: usize = 4096;
/// How often changes are asked for.
const CHANGES_MS: u64 = 1000;
/// Parts of the log of changes that are read in a row.
const MAX_PARTS: usize = KEPT_LINES / MAX_LINES + 2;
/// Changes of that age are read at the beginning.
const CHANGES_BEFORE_MS: u64 = 1000;

/// What the server is for those who wait for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// It has not answered yet.
    Starting,
    /// It answers.
    Up,
    /// It does not, for this reason.
    Down(String),
}

/// What an answer is to.
#[derive(Debug)]
enum About {
    Claim,
    Key,
    Time,
    Written,
    Qp(QpName),
    Process(u64),
    /// Whether the owner of an entry in a table has an entry of its own.
    Owner(u64),
    /// Whether this process's entry is there.
    Own,
    Moved,
    Listeners,
    Changes,
}

/// Commands that go together.
#[derive(Debug)]
pub(crate) struct Round {
    pub(crate) commands: Vec<Command>,
    about: Vec<About>,
    entries: Vec<Entry>,
    /// There is a UD QP among them that has moved.
    moves: bool,
    number: u64,
}

impl Round {
    fn add(&mut self, about: About, command: Command) {
        self.commands.push(command);
        self.about.push(about);
    }
}

/// See the module's text.
pub(crate) struct Book {
    prefix: String,
    lease_ms: u64,
    pub(crate) state: State,
    /// The server is connected, and has been greeted since.
    greeted: bool,
    key: Option<[u8; KEY_BYTES]>,
    /// The key, if this process is the first.
    candidate: [u8; KEY_BYTES],
    names: Names,
    pub(crate) own: Own,
    pub(crate) known: Known,
    rounds: u64,
    renew_at_ms: u64,
    changes_at_ms: u64,
    /// The last change that was read.
    changes_id: String,
    /// Parts of the log of changes that were read in a row, each of them full.
    parts_read: usize,
    /// The server has another key than this process: it had lost this one, and somebody was
    /// quicker.
    foreign: bool,
    /// What dead processes have left in tables, whose entries do not expire by themselves.
    left_behind: Vec<(String, Vec<u8>)>,
    /// This process ends.
    closing: bool,
}

impl Book {
    /// `owner` tells this process's entries from those of others.
    pub(crate) fn new(prefix: &str, lease_ms: u64, candidate: [u8; KEY_BYTES], owner: u64) -> Book {
        Book {
            prefix: prefix.into(),
            lease_ms,
            state: State::Starting,
            greeted: false,
            key: None,
            candidate,
            names: Names::new(prefix, ""),
            own: Own::new(owner),
            known: Known::default(),
            rounds: 0,
            renew_at_ms: 0,
            changes_at_ms: 0,
            changes_id: String::new(),
            parts_read: 0,
            foreign: false,
            left_behind: Vec::new(),
            closing: false,
        }
    }

    pub(crate) fn key(&self) -> Option<[u8; KEY_BYTES]> {
        self.key
    }

    /// The last round that has begun.
    pub(crate) fn rounds(&self) -> u64 {
        self.rounds
    }

    /// This process ends: everything is taken out.
    pub(crate) fn close(&mut self) {
        self.closing = true;
        self.own.remove_all();
    }

    /// Nothing more will be done.
    pub(crate) fn closed(&self) -> bool {
        self.closing && (self.state != State::Up || self.own.settled())
    }

    /// There is a connection.
    pub(crate) fn connected(&mut self) {
        self.greeted = false;
    }

    /// The connection is lost, or there is none.
    pub(crate) fn trouble(&mut self, why: &str) -> Option<News> {
        self.known.lost();
        let down = State::Down(why.into());
        let told = self.state == down;
        self.state = down;
        let news = if self.key.is_some() { News::Lost } else { News::Unreachable };
        (!told).then(|| news(why.into()))
    }

    /// When [`Book::next`] has something to do, if nothing is asked for until then.
    pub(crate) fn deadline_ms(&self) -> u64 {
        self.changes_at_ms.min(self.renew_at_ms)
    }

    /// The next round, if there is something to do.
    pub(crate) fn next(&mut self, now_ms: u64) -> Option<Round> {
        let mut round = Round {
            commands: Vec::new(),
            about: Vec::new(),
            entries: Vec::new(),
            moves: false,
            number: self.rounds + 1,
        };
        if !self.greeted {
            self.claim(&mut round);
            round.add(About::Time, Command::Time);
        } else {
            self.write(&mut round, now_ms);
            self.ask(&mut round);
            if self.changes_at_ms <= now_ms && !self.closing {
                self.changes_at_ms = now_ms + CHANGES_MS;
                self.claim(&mut round);
                let own = self.own.processes().map(|(incarnation, _)| incarnation).next();
                if let Some(own) = own.filter(|i| self.own.is_written(Entry::Process(*i))) {
                    round.add(About::Own, Command::Get(self.names.process(own)));
                }
                self.known.ask_missing();
                let (name, id) = (self.names.changes(), self.changes_id.clone());
                round.add(About::Changes, Command::Since { name, id });
            }
        }
        if round.commands.is_empty() {
            return None;
        }
        self.rounds = round.number;
        Some(round)
    }

    fn claim(&self, round: &mut Round) {
        let (name, key) = (Names::key(&self.prefix), self.key.unwrap_or(self.candidate));
        round.add(
            About::Claim,
            Command::Claim { name: name.clone(), value: encode_key(&key).to_vec() },
        );
        round.add(About::Key, Command::Get(name));
    }

    fn write(&mut self, round: &mut Round, now_ms: u64) {
        if self.renew_at_ms <= now_ms {
            self.renew_at_ms = now_ms + self.lease_ms / 4;
            self.own.repeat(false);
        }
        while round.entries.len() < BATCH {
            let Some(entry) = self.own.take() else { break };
            round.entries.push(entry);
            round.moves |= self.own.has_moved(entry);
            for command in self.own.commands(entry, &self.names, self.lease_ms) {
                round.add(About::Written, command);
            }
        }
    }

    fn ask(&mut self, round: &mut Round) {
        let (qps, processes) = self.known.take(BATCH);
        for qp in qps {
            round.add(About::Qp(qp), Command::Fields(self.names.qp(&qp)));
        }
        for owner in self.known.take_owners(BATCH) {
            round.add(About::Owner(owner), Command::Get(self.names.process(owner)));
        }
        for incarnation in processes {
            round.add(About::Process(incarnation), Command::Get(self.names.process(incarnation)));
        }
        for (name, field) in self.left_behind.drain(..self.left_behind.len().min(BATCH)) {
            round.add(About::Written, Command::DeleteField { name, field });
        }
        if self.known.take_listeners() {
            round.add(About::Listeners, Command::Fields(self.names.listeners()));
        }
        if self.known.take_moved() {
            round.add(About::Moved, Command::Fields(self.names.moved()));
        }
    }

    /// Takes the answers to a round. The error says in words what is wrong with them; then there is
    /// no connection any more.
    pub(crate) fn answer(
        &mut self,
        now_ms: u64,
        round: &Round,
        replies: &[Reply],
    ) -> Result<Vec<News>, String> {
        if replies.len() != round.about.len() {
            return Err(format!(
                "the server gave {} answers to {} questions",
                replies.len(),
                round.about.len()
            ));
        }
        let (mut news, mut lost) = (Vec::new(), false);
        let now = self.now(now_ms);
        for (about, reply) in round.about.iter().zip(replies) {
            match (about, reply) {
                // The server had no key, though this process has seen one there.
                (About::Claim, Reply::Claimed(made)) => lost |= *made && self.greeted,
                (About::Key, Reply::Value(value)) => lost |= self.take_key(value.as_deref())?,
                (About::Time, Reply::Time(server_ms)) => self.greet(now_ms, *server_ms, &mut news),
                (About::Written, Reply::Done) => {}
                (About::Qp(qp), Reply::Fields(fields)) => self.known.qp_answer(*qp, fields),
                (About::Owner(owner), Reply::Value(value)) => {
                    let has = value.as_ref().is_some_and(|value| value != ENDED);
                    self.known.owner_answer(*owner, has, now);
                }
                (About::Own, Reply::Value(value)) => lost |= value.is_none(),
                (About::Process(incarnation), Reply::Value(value)) => {
                    self.known.process_answer(*incarnation, now_ms, value.as_deref());
                }
                (About::Moved, Reply::Fields(fields)) => {
                    let owner = |(name, value): &(Vec<u8>, Vec<u8>)| {
                        MovedQp::decode(name, value).map(|(owner, _)| owner)
                    };
                    self.sweep(&self.names.moved(), fields, now, owner);
                    self.known.moved_answer(fields);
                }
                (About::Listeners, Reply::Fields(fields)) => {
                    let owner = |(name, _): &(Vec<u8>, Vec<u8>)| {
                        name.as_slice().try_into().ok().map(u64::from_be_bytes)
                    };
                    self.sweep(&self.names.listeners(), fields, now, owner);
                    self.known.listeners_answer(fields);
                    news.push(News::Entered);
                }
                (About::Changes, Reply::Lines(lines)) => self.changes(lines),
                (about, reply) => {
                    return Err(format!("the server's answer about {about:?} is {reply:?}"))
                }
            }
        }
        self.own.written(&round.entries);
        if round.moves {
            self.known.ask_listeners();
        }
        if lost {
            self.own.repeat(true);
        }
        if self.known.moved_is_news(now) {
            news.push(News::Moved);
        }
        let answered = self.known.take_answered();
        if !answered.is_empty() {
            let names = answered.iter().map(|qp| (qp.gid(), qp.qpn()));
            news.push(News::Answered(names.collect()));
        }
        Ok(news)
    }

    /// Takes in the key that the server has. Gives whether it is another one than it was.
    fn take_key(&mut self, value: Option<&[u8]>) -> Result<bool, String> {
        let name = Names::key(&self.prefix);
        let value = value
            .ok_or_else(|| format!("the server does not keep what is set: {name} is not there"))?;
        let key = decode_key(value).ok_or_else(|| {
            format!(
                "{name} has {} bytes that are no key; take it out (redis-cli del {name}) or use \
                 another prefix",
                value.len()
            )
        })?;
        // Who has one keeps it: those whom it talks to have the same.
        let own = *self.key.get_or_insert(key);
        let foreign = own != key;
        let lost = foreign && !std::mem::replace(&mut self.foreign, foreign);
        // Who writes its entries otherwise is not found, and finds nobody.
        let id: String = Sha256::digest([&[VERSION], &own[..]].concat())
            .iter()
            .take(8)
            .map(|byte| format!("{byte:02x}"))
            .collect();
        self.names = Names::new(&self.prefix, &id);
        Ok(lost)
    }

    fn greet(&mut self, now_ms: u64, server_ms: u64, news: &mut Vec<News>) {
        self.greeted = true;
        self.changes_id = format!("{}-0", server_ms.saturating_sub(CHANGES_BEFORE_MS));
        (self.changes_at_ms, self.renew_at_ms) = (now_ms + CHANGES_MS, now_ms + self.lease_ms / 4);
        self.own.repeat(true);
        self.known.ask_all();
        if let State::Down(_) = std::mem::replace(&mut self.state, State::Up) {
            news.push(News::Back);
        }
    }

    fn changes(&mut self, lines: &[(String, Vec<u8>)]) {
        for (id, line) in lines {
            self.changes_id.clone_from(id);
            match <[u8; 8]>::try_from(line.as_slice()) {
                Ok(incarnation) => self.known.process_changed(u64::from_be_bytes(incarnation)),
                Err(_) => self.known.moved_changed(),
            }
        }
        // There may be more. A log without end, of a server that makes it up, gets no more rounds
        // than a log has at most.
        let is_part = lines.len() >= MAX_LINES && self.parts_read < MAX_PARTS;
        self.parts_read = if is_part { self.parts_read + 1 } else { 0 };
        if is_part {
            self.changes_at_ms = 0;
        }
    }

    /// This process's time.
    pub(crate) fn now(&self, now_ms: u64) -> Now {
        Now { ms: now_ms, lease_ms: self.lease_ms }
    }

    /// Finds what dead processes have left in a table, and what is no entry.
    fn sweep(
        &mut self,
        table: &str,
        fields: &[(Vec<u8>, Vec<u8>)],
        now: Now,
        owner: impl Fn(&(Vec<u8>, Vec<u8>)) -> Option<u64>,
    ) {
        let is_forgotten = |field: &&(Vec<u8>, Vec<u8>)| {
            field.0 != TABLE && owner(field).is_none_or(|owner| self.known.forgotten(owner, now))
        };
        // What is too much now is found again.
        let room = MAX_LEFT_BEHIND.saturating_sub(self.left_behind.len());
        let forgotten = fields.iter().filter(is_forgotten).take(room);
        let forgotten: Vec<_> =
            forgotten.map(|(field, _)| (table.to_string(), field.clone())).collect();
        self.left_behind.extend(forgotten);
    }

    /// Whether something is to be done at once.
    pub(crate) fn pending(&self) -> bool {
        !self.greeted || self.own.pending() || self.known.pending() || !self.left_behind.is_empty()
    }
}
