//! Paths to a peer and the streams on them: the part of an [`Engine`] that makes, loses and
//! remakes. The table is at the head of the crate.

use std::collections::VecDeque;

use crate::engine::Engine;
use crate::env::{Env, Note};
use crate::frame::{Header, CROSS, MEMORY, OUT_OF_BAND};
use crate::message::Message;
use crate::meter::{Meter, OnWay};
use crate::mutants::left_out;
use crate::pieces::Pieces;
use crate::stream::{Rx, Tx};
use crate::{Failure, Rank};

/// A path that is Down is first tried again after this, and each time after twice as long, up to
/// the longest.
const FIRST_RETRY_US: u64 = 20_000;
const LAST_RETRY_US: u64 = 1_000_000;
/// Ranks that have been apart for so long use the connections out of band.
const LAST_RESORT_US: u64 = 300_000;
/// Paths besides those of rails and memory (`detours`).
pub(crate) const DETOURS: usize = 2;
/// A path that has been Up for so long begins again with the first.
const STEADY_US: u64 = 5_000_000;

/// Where a path is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Never made.
    Idle,
    /// Made here; the other end was asked.
    Offered,
    /// Made here, connected; the other end is told.
    Accepted,
    /// Connected at both ends; a test is on its way.
    Testing,
    /// It carries.
    Up,
    /// It failed. `heard`: the other end is closed, too.
    Down {
        /// See there.
        heard: bool,
    },
}

/// A path to a peer, over one rail, through memory, or a detour.
#[derive(Clone, Debug)]
pub struct Path {
    /// Where it is.
    pub state: State,
    /// Which life.
    pub life: u32,
    /// This rank's NIC, if it goes over one: its rail's, but for `CROSS`.
    pub(crate) nic: u8,
    /// Posted and not complete.
    pub posted: u32,
    /// The bytes of each of these.
    pub(crate) bytes: OnWay,
    pub(crate) meter: Meter,
    retry_us: u64,
    wait_us: u64,
    up_since_us: u64,
}

impl Path {
    /// Whether it is to be made now, if it is wanted.
    pub(crate) fn is_due(&self, now_us: u64) -> bool {
        match self.state {
            State::Idle => true,
            State::Down { heard } => heard && now_us >= self.retry_us,
            _ => false,
        }
    }
}

/// What a stream to a peer waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Standing {
    /// A path. It goes on at this frame; at the first that was not posted if there is none.
    Unassigned(Option<u64>),
    /// The count of the receiver, whose path it was on.
    Halted(u8),
    /// Nothing.
    Carried,
}

/// A stream to a peer.
#[derive(Debug)]
pub(crate) struct Outgoing {
    pub(crate) tx: Tx,
    pub(crate) standing: Standing,
    /// Frames without data that are to be sent, but for their numbers: of messages that were used
    /// of lanes that come from the peer, and of agreement.
    pub(crate) control: VecDeque<Header>,
}

/// All that goes on with another rank.
#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) paths: Vec<Path>,
    pub(crate) outgoing: Vec<Outgoing>,
    pub(crate) incoming: Vec<Rx>,
    /// Paths were asked for.
    pub(crate) wanted: bool,
    /// Since when no path is Up, while something waits for one.
    parted_us: Option<u64>,
    /// Since when no rail joins the two.
    pub(crate) apart_us: Option<u64>,
    /// What goes out of band.
    pub(crate) pieces: Pieces,
}

impl Peer {
    pub(crate) fn new(rails: usize, slots: u64) -> Peer {
        let path = Path {
            state: State::Idle,
            life: 0,
            nic: 0,
            posted: 0,
            bytes: OnWay::default(),
            meter: Meter::default(),
            retry_us: 0,
            wait_us: FIRST_RETRY_US,
            up_since_us: 0,
        };
        let out = || Outgoing {
            tx: Tx::new(slots),
            standing: Standing::Unassigned(None),
            control: VecDeque::new(),
        };
        let mut paths = vec![path; rails + 1 + DETOURS];
        paths[..rails].iter_mut().enumerate().for_each(|(rail, path)| path.nic = rail as u8);
        Peer {
            paths,
            outgoing: (0..=rails).map(|_| out()).collect(),
            incoming: vec![Rx::new(slots); rails + 1],
            wanted: false,
            parted_us: None,
            apart_us: None,
            pieces: Pieces::default(),
        }
    }

    /// Whether this rank and the peer have no rail in common: all paths of rails have failed.
    pub(crate) fn is_apart(&self, rails: usize) -> bool {
        let lost = |state: State, life: u32| match state {
            State::Down { .. } => true,
            State::Idle | State::Up => false,
            // The first time it is waited for.
            State::Offered | State::Accepted | State::Testing => life > 1,
        };
        self.wanted && self.paths[..rails].iter().all(|path| lost(path.state, path.life))
    }

    /// Whether streams go out of band if no NIC carries them.
    pub(crate) fn is_at_last_resort(&self, now_us: u64) -> bool {
        self.apart_us.is_some_and(|since_us| now_us >= since_us + LAST_RESORT_US)
    }
}

impl Engine {
    /// The rails that join this rank to a peer: those of both hosts, or memory.
    pub(crate) fn rails_to(&self, peer: Rank) -> std::ops::Range<u8> {
        match self.config.hosts[peer] == self.config.hosts[self.config.me] {
            true => MEMORY..MEMORY + 1,
            false => 0..self.config.rails,
        }
    }

    /// Sees to it that there are paths to a peer.
    pub(crate) fn want_paths(&mut self, peer: Rank, env: &mut impl Env) {
        if std::mem::replace(&mut self.peers[peer].wanted, true) {
            return;
        }
        if self.config.me > peer {
            return env.tell(peer, &Message::Want);
        }
        for rail in self.rails_to(peer) {
            self.offer(peer, rail, env);
        }
    }

    /// Makes this end of a path and asks the peer for the other.
    pub(crate) fn offer(&mut self, peer: Rank, rail: u8, env: &mut impl Env) {
        let at = self.index(rail);
        let life = self.peers[peer].paths[at].life + 1;
        let nics = match rail {
            CROSS => self.cross_nics(peer, life, env),
            _ => [self.peers[peer].paths[at].nic; 2],
        };
        let path = &mut self.peers[peer].paths[at];
        (path.life, path.nic) = (life, nics[0]);
        match env.open(peer, rail, nics[0]) {
            Some(address) => {
                path.state = State::Offered;
                env.tell(peer, &Message::Offer { rail, life, nics, address });
            }
            None => {
                // The other end need not wait for it.
                self.set_down(peer, rail, true);
                self.say_closed(peer, rail, env);
                if rail < self.config.rails {
                    self.trace(peer, rail, env);
                }
            }
        }
    }

    /// The lower rank has made its end of a path, of this life.
    pub(crate) fn on_offer(
        &mut self,
        peer: Rank,
        (rail, life): (u8, u32),
        nics: [u8; 2],
        address: &[u8],
        env: &mut impl Env,
    ) {
        let at = self.index(rail);
        let path = &self.peers[peer].paths[at];
        if peer >= self.config.me || life <= path.life {
            return;
        }
        if !matches!(path.state, State::Idle | State::Down { .. }) {
            // A new life while this end believes in the old one: its end was said before, in order.
            return self.broke(peer, 1, env);
        }
        let nic = nics[1];
        if nic >= self.config.rails.max(1) || (rail < self.config.rails && nic != rail) {
            return self.broke(peer, 15, env);
        }
        self.peers[peer].wanted = true;
        (self.peers[peer].paths[at].life, self.peers[peer].paths[at].nic) = (life, nic);
        let mine = env.open(peer, rail, nic);
        let connected = mine.is_some() && (rail == OUT_OF_BAND || env.connect(peer, rail, address));
        match mine.filter(|_| connected) {
            Some(address) => {
                self.peers[peer].paths[at].state = State::Accepted;
                env.tell(peer, &Message::Accept { rail, life, address });
            }
            None => {
                env.close(peer, rail);
                self.set_down(peer, rail, true);
                self.say_closed(peer, rail, env);
            }
        }
    }

    pub(crate) fn on_accept(
        &mut self,
        peer: Rank,
        rail: u8,
        life: u32,
        address: &[u8],
        env: &mut impl Env,
    ) {
        let at = self.index(rail);
        let path = &mut self.peers[peer].paths[at];
        if (path.state, path.life) != (State::Offered, life) {
            return;
        }
        path.state = State::Testing;
        if rail == OUT_OF_BAND {
            // The answer has come by the same way.
            return self.on_tested(peer, rail, env);
        }
        if !env.connect(peer, rail, address) || !env.test(peer, rail) {
            self.fail_path(peer, rail, env);
        }
    }

    /// The test of a path came back.
    pub fn on_tested(&mut self, peer: Rank, rail: u8, env: &mut impl Env) {
        let at = self.index(rail);
        let path = &self.peers[peer].paths[at];
        if path.state == State::Testing {
            env.tell(peer, &Message::Carries { rail, life: path.life });
            self.set_up(peer, rail, env);
        }
    }

    pub(crate) fn on_carries(&mut self, peer: Rank, rail: u8, life: u32, env: &mut impl Env) {
        let path = &self.peers[peer].paths[self.index(rail)];
        if (path.state, path.life) == (State::Accepted, life) {
            self.set_up(peer, rail, env);
        }
    }

    fn set_up(&mut self, peer: Rank, rail: u8, env: &mut impl Env) {
        let (at, now_us) = (self.index(rail), self.now_us);
        let path = &mut self.peers[peer].paths[at];
        path.state = State::Up;
        path.up_since_us = now_us;
        env.note(&Note::Up { peer, rail, life: path.life });
        self.place_streams(peer, env);
        self.say_healed(peer, rail, env);
    }

    fn set_down(&mut self, peer: Rank, rail: u8, heard: bool) {
        let (at, now_us) = (self.index(rail), self.now_us);
        let path = &mut self.peers[peer].paths[at];
        if path.state == State::Up && now_us > path.up_since_us + STEADY_US {
            path.wait_us = FIRST_RETRY_US;
        }
        path.state = State::Down { heard };
        path.retry_us = now_us + path.wait_us;
        path.wait_us = (2 * path.wait_us).min(LAST_RETRY_US);
        let posted = std::mem::take(&mut path.posted);
        self.on_way[at] -= posted;
        self.measure_loss(peer, at);
        if rail == OUT_OF_BAND {
            self.forget_pieces(peer);
        }
    }

    fn say_closed(&mut self, peer: Rank, rail: u8, env: &mut impl Env) {
        let counts = self.peers[peer].incoming.iter().map(Rx::counts).collect();
        let life = self.peers[peer].paths[self.index(rail)].life;
        env.tell(peer, &Message::Closed { rail, life, counts });
    }

    /// A NIC of this rank's host is dead, or its port has no link: all paths over it have failed.
    pub fn fail_rail(&mut self, rail: u8, env: &mut impl Env) {
        for peer in 0..self.peers.len() {
            self.fail_path(peer, rail, env);
            if self.peers[peer].paths[self.index(CROSS)].nic == rail {
                self.fail_path(peer, CROSS, env);
            }
        }
    }

    /// This end of a path has failed.
    pub fn fail_path(&mut self, peer: Rank, rail: u8, env: &mut impl Env) {
        self.end_path(peer, rail, false, env);
    }

    fn end_path(&mut self, peer: Rank, rail: u8, told: bool, env: &mut impl Env) {
        let at = self.index(rail);
        if matches!(self.peers[peer].paths[at].state, State::Idle | State::Down { .. }) {
            return;
        }
        let path = &self.peers[peer].paths[at];
        let news = path.state == State::Up || path.life == 1;
        env.close(peer, rail);
        self.set_down(peer, rail, told);
        self.say_closed(peer, rail, env);
        if news && rail < self.config.rails {
            self.trace(peer, rail, env);
        }
        env.note(&Note::Down { peer, rail, life: self.peers[peer].paths[at].life, told });
        for out in &mut self.peers[peer].outgoing {
            if out.tx.carrier() == Some(rail) {
                out.tx.halt();
                out.standing = Standing::Halted(rail);
                if left_out!(self.config.mutant, ImpatientSender) {
                    // From the first frame that it does not know to be used.
                    out.standing = Standing::Unassigned(Some(0));
                }
            }
        }
        if left_out!(self.config.mutant, ImpatientSender) {
            self.place_streams(peer, env);
        }
    }

    /// The other end of a path is closed; it has counted what had come by then.
    pub(crate) fn on_closed(
        &mut self,
        peer: Rank,
        rail: u8,
        life: u32,
        counts: &[(u64, u64)],
        env: &mut impl Env,
    ) {
        let at = self.index(rail);
        let path = &mut self.peers[peer].paths[at];
        if peer < self.config.me
            && life > path.life
            && matches!(path.state, State::Idle | State::Down { .. })
        {
            // A life that the lower rank could not begin.
            (path.life, path.state) = (life, State::Down { heard: true });
        }
        if life != path.life || counts.len() != self.peers[peer].incoming.len() {
            return;
        }
        match &mut self.peers[peer].paths[at].state {
            State::Idle => return,
            State::Down { heard } => *heard = true,
            _ => self.end_path(peer, rail, true, env),
        }
        let mut wrong = false;
        for (out, (arrived, used)) in self.peers[peer].outgoing.iter_mut().zip(counts) {
            wrong |= out.tx.on_used(*used).is_err();
            if out.standing == Standing::Halted(rail) {
                let mine = left_out!(self.config.mutant, SendersCount);
                out.standing =
                    Standing::Unassigned(Some(if mine { out.tx.own_count() } else { *arrived }));
            }
        }
        if wrong {
            return self.broke(peer, 2, env);
        }
        self.place_streams(peer, env);
    }

    /// Gives streams that wait for one a path, if there is one.
    pub(crate) fn place_streams(&mut self, peer: Rank, env: &mut impl Env) {
        let rails = self.config.rails;
        for at in 0..=usize::from(rails) {
            let Standing::Unassigned(arrived) = self.peers[peer].outgoing[at].standing else {
                continue;
            };
            let Some(rail) = self.choose(peer, at) else { continue };
            let out = &mut self.peers[peer].outgoing[at];
            let before = out.tx.own_count();
            if out.tx.resume(rail, arrived).is_err() {
                return self.broke(peer, 3, env);
            }
            out.standing = Standing::Carried;
            if arrived.is_some() || usize::from(rail) != at {
                let stream = self.rail(at);
                let again = before.saturating_sub(self.peers[peer].outgoing[at].tx.own_count());
                env.note(&Note::Moved { peer, stream, rail, again });
            }
        }
    }

    /// The next path of a stream's chain that is Up: its own, the next rails in a circle, detours.
    /// It waits for paths that are being made for the first time, and come before it.
    fn choose(&self, peer: Rank, at: usize) -> Option<u8> {
        let rails = usize::from(self.config.rails);
        let paths = &self.peers[peer].paths;
        if at == rails {
            return (paths[at].state == State::Up).then_some(MEMORY);
        }
        for k in (0..rails).map(|k| (at + k) % rails) {
            match paths[k].state {
                State::Up => return Some(k as u8),
                State::Idle => return None,
                _ if paths[k].life == 1 && !matches!(paths[k].state, State::Down { .. }) => {
                    return None
                }
                _ => {}
            }
        }
        let last = self.peers[peer].is_at_last_resort(self.now_us);
        [(CROSS, true), (OUT_OF_BAND, last)]
            .into_iter()
            .find(|(path, may)| *may && paths[self.index(*path)].state == State::Up)
            .map(|(path, _)| path)
    }

    /// Brings streams home whose own path is Up again, and those on detours back to a rail. One
    /// that was on its way to a path that has failed stays where it is.
    pub(crate) fn go_home(&mut self, peer: Rank, env: &mut impl Env) {
        for at in 0..usize::from(self.config.rails) {
            let stream = self.rail(at);
            let Some(carrier) = self.peers[peer].outgoing[at].tx.carrier() else { continue };
            let better = self.better(peer, at, carrier);
            let tx = &mut self.peers[peer].outgoing[at].tx;
            let Some(rail) = better else {
                if !left_out!(self.config.mutant, Homesick) {
                    tx.stay();
                }
                continue;
            };
            tx.leave();
            if tx.has_left() && tx.resume(rail, None).is_ok() {
                env.note(&Note::Moved { peer, stream, rail, again: 0 });
            }
        }
    }

    /// Tries paths again that are Down, and gives up on peers that have had none for too long while
    /// something waits.
    pub(crate) fn tend_paths(&mut self, env: &mut impl Env) {
        let now_us = self.now_us;
        for peer in 0..self.peers.len() {
            if !self.peers[peer].wanted || self.left[peer].is_some() {
                continue;
            }
            self.go_home(peer, env);
            let waits =
                |out: &Outgoing| out.standing != Standing::Carried && (!out.tx.is_drained());
            let parted = self.peers[peer].outgoing.iter().any(waits);
            match (parted, self.peers[peer].parted_us) {
                (false, _) => self.peers[peer].parted_us = None,
                (true, None) => self.peers[peer].parted_us = Some(now_us),
                (true, Some(since)) if now_us > since + self.config.timeout_us => {
                    let seconds = (self.config.timeout_us / 1_000_000) as u32;
                    return self.fail(Failure::Parted { a: self.config.me, b: peer, seconds }, env);
                }
                _ => {}
            }
            for rail in self.rails_to(peer) {
                let path = &self.peers[peer].paths[self.index(rail)];
                let begun = path.state != State::Idle;
                if begun && path.is_due(now_us) && self.config.me < peer {
                    self.offer(peer, rail, env);
                }
            }
            self.tend_detours(peer, env);
        }
    }
}
