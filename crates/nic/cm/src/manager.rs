//! All connections of a process.
//!
//! What is sent again until it is answered, who answers, and what becomes of it:
//!
//! | state | sends again | answer | without one |
//! | --- | --- | --- | --- |
//! | `ReqSent` | REQ | REP, REJ; MRA gives more time | [`Event::Unreachable`] |
//! | `RepSent` | REP | RTU, REJ, DREQ | [`Event::Unreachable`] |
//! | `DreqSent` | DREQ | DREP, DREQ | [`Event::Disconnected`] |
//! | `SidrReqSent` | SIDR_REQ | SIDR_REP | [`Event::Unreachable`] |
//!
//! A message that comes twice is answered twice and told once. Each attempt goes to the next
//! address of the peer, from the next NIC of ours: so a path that is dead costs one attempt.

mod inbound;

use crate::connection::{ConnId, Connect, Connection, Reply, State};
use crate::mad::{Mad, MAD_BYTES};
use crate::message::{
    Disconnect, Message, Rej, Rejected, Rep, Req, Rtu, SidrRep, SidrReq, SidrStatus,
};
use crate::mutants::{left_out, Mutation};
use crate::reason::Reason;
use std::collections::{BTreeSet, HashMap, VecDeque};
use thiserror::Error;

/// Connections of a process, those that end included.
pub const MAX_CONNECTIONS: usize = 65_536;
/// Addresses of a peer that are tried.
const MAX_PEERS: usize = 16;

/// The address of a CM: a GID and the QP there that takes management datagrams.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
pub struct Peer {
    /// The NIC.
    pub gid: [u8; 16],
    /// The QP: 1, where one CM serves the whole NIC.
    pub qpn: u32,
}

/// Times and numbers.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// How long an answer is waited for, as the code of the specification: 4.096 µs · 2^code.
    pub response_timeout: u8,
    /// How often a message is sent again: at most 15.
    pub max_retries: u8,
    /// How much longer the peer is asked to wait while the program has not answered, as a code.
    pub service_timeout: u8,
    /// How long a connection that is over keeps its name.
    pub timewait_us: u64,
    /// Seed of the names.
    pub seed: u64,
}

/// What a code of the specification says: 4.096 µs · 2^code.
fn code_us(code: u8) -> u64 {
    (4096u64 << code.min(31)) / 1000
}

/// What is to be done.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Output {
    /// A datagram is to be sent.
    Send {
        /// From this NIC, or where it does not work from another.
        via: usize,
        /// Whither.
        to: Peer,
        /// The datagram.
        bytes: Box<[u8; MAD_BYTES]>,
    },
    /// The program is to hear of this.
    Event(ConnId, Event),
}

/// What happened to a connection.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Event {
    /// A peer asks for one, through that NIC.
    Request {
        /// The request.
        req: Box<Req>,
        /// The NIC of ours.
        via: usize,
        /// Who asks.
        from: Peer,
    },
    /// The peer has accepted; [`Cm::establish`] is the answer.
    Response(Box<Rep>),
    /// It is there.
    Established,
    /// It is rejected.
    Rejected(Rej),
    /// The peer has not answered.
    Unreachable,
    /// It has ended.
    Disconnected {
        /// The peer has not said so.
        timed_out: bool,
    },
    /// Its packets are gone, so its QP may be used again.
    TimewaitExit,
    /// A peer asks for a service of datagrams.
    SidrRequest {
        /// The question.
        req: SidrReq,
        /// The NIC of ours.
        via: usize,
        /// Who asks.
        from: Peer,
    },
    /// The answer to our question.
    SidrReply(SidrRep),
}

/// Why a call was refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum CmError {
    /// There is no such connection.
    #[error("no such connection")]
    Unknown,
    /// The connection is not where that can be done.
    #[error("the connection is in state {0:?}")]
    State(State),
    /// Private data are longer than their field.
    #[error("{len} bytes of private data: at most {most} are possible")]
    TooLong {
        /// Their length.
        len: usize,
        /// That of the field.
        most: usize,
    },
    /// There are as many connections as there can be.
    #[error("{MAX_CONNECTIONS} connections exist already")]
    Full,
    /// The peer has no address.
    #[error("the peer has no address")]
    NoPeer,
}

/// By what a message that comes twice is known.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Remote {
    /// A peer's channel adapter and its name for the connection.
    Connection(u64, u32),
    /// A question's name and service.
    Question(u32, u64),
}

/// The communication manager of a process.
pub struct Cm {
    config: Config,
    connections: HashMap<u32, Connection>,
    /// Connections that peers have asked for.
    by_remote: HashMap<Remote, u32>,
    /// Connections that stand, by the peer's channel adapter and QP.
    by_qp: HashMap<(u64, u32), u32>,
    deadlines: BTreeSet<(u64, u32)>,
    outputs: VecDeque<Output>,
    random: u64,
    pub(crate) mutation: Mutation,
}

impl Cm {
    /// A manager without connections.
    pub fn new(config: Config) -> Cm {
        Cm {
            config,
            connections: HashMap::new(),
            by_remote: HashMap::new(),
            by_qp: HashMap::new(),
            deadlines: BTreeSet::new(),
            outputs: VecDeque::new(),
            random: config.seed,
            mutation: Mutation::None,
        }
    }

    /// Asks for a connection.
    pub fn connect(&mut self, now_us: u64, connect: Connect) -> Result<ConnId, CmError> {
        let Connect { peers, via, mut req } = connect;
        check_private(&req.private, Req::PRIVATE_BYTES)?;
        let (id, mut c) = self.begin(State::ReqSent, peers, via)?;
        req.local_id = id;
        req.remote_response_timeout = self.config.response_timeout;
        req.local_response_timeout = self.config.response_timeout;
        req.max_cm_retries = self.config.max_retries;
        c.local_qpn = req.local_qpn;
        c.starting_psn = req.starting_psn;
        c.last = Some(c.mad(Message::Req(req)));
        c.wait_us = code_us(self.config.response_timeout);
        self.connections.insert(id, c);
        self.send_last(now_us, id, true);
        Ok(ConnId(id))
    }

    /// Asks for a service of datagrams.
    pub fn ask(
        &mut self,
        now_us: u64,
        peers: Vec<Peer>,
        via: usize,
        mut req: SidrReq,
    ) -> Result<ConnId, CmError> {
        check_private(&req.private, SidrReq::PRIVATE_BYTES)?;
        let (id, mut c) = self.begin(State::SidrReqSent, peers, via)?;
        req.request_id = id;
        c.last = Some(c.mad(Message::SidrReq(req)));
        c.wait_us = code_us(self.config.response_timeout);
        self.connections.insert(id, c);
        self.send_last(now_us, id, true);
        Ok(ConnId(id))
    }

    fn begin(
        &mut self,
        state: State,
        mut peers: Vec<Peer>,
        via: usize,
    ) -> Result<(u32, Connection), CmError> {
        if peers.is_empty() {
            return Err(CmError::NoPeer);
        }
        peers.truncate(MAX_PEERS);
        let id = self.fresh_id()?;
        let transaction = u64::from(id) << 32 | self.next_random() & 0xffff_ffff;
        Ok((id, Connection::new(state, transaction, peers, via)))
    }

    /// Accepts a request.
    pub fn accept(&mut self, now_us: u64, id: ConnId, reply: Reply) -> Result<(), CmError> {
        let Reply { mut rep } = reply;
        check_private(&rep.private, Rep::PRIVATE_BYTES)?;
        let wait_us = code_us(self.config.response_timeout);
        let c = self.in_state(id, &[State::ReqReceived])?;
        (rep.local_id, rep.remote_id) = (id.0, c.remote_id.unwrap_or(0));
        rep.starting_psn = c.starting_psn;
        c.local_qpn = rep.local_qpn;
        c.last = Some(c.mad(Message::Rep(rep)));
        (c.state, c.wait_us, c.attempts) = (State::RepSent, wait_us, 0);
        let qp = (c.remote_guid, c.remote_qpn);
        self.by_qp.insert(qp, id.0);
        self.send_last(now_us, id.0, true);
        Ok(())
    }

    /// Answers a question for a service of datagrams.
    pub fn answer(&mut self, now_us: u64, id: ConnId, mut rep: SidrRep) -> Result<(), CmError> {
        check_private(&rep.private, SidrRep::PRIVATE_BYTES)?;
        let timewait_us = self.config.timewait_us;
        let c = self.in_state(id, &[State::SidrReqReceived])?;
        (rep.request_id, rep.service_id) = (c.remote_id.unwrap_or(0), c.service_id);
        c.last = Some(c.mad(Message::SidrRep(rep)));
        c.state = State::SidrDone;
        self.send_last(now_us, id.0, false);
        self.set_deadline(id.0, Some(now_us + timewait_us));
        Ok(())
    }

    /// Rejects a request, or a reply.
    pub fn reject(
        &mut self,
        now_us: u64,
        id: ConnId,
        reason: Reason,
        private: &[u8],
    ) -> Result<(), CmError> {
        check_private(private, Rej::PRIVATE_BYTES)?;
        let waits = [State::ReqReceived, State::RepReceived, State::SidrReqReceived];
        let state = self.in_state(id, &waits)?.state;
        if state == State::SidrReqReceived {
            let (status, private) = (SidrStatus::REJECTED, private.to_vec());
            return self.answer(now_us, id, SidrRep { status, private, ..SidrRep::default() });
        }
        self.send_reject(id.0, reason, private);
        self.finish(now_us, id.0);
        Ok(())
    }

    fn send_reject(&mut self, id: u32, reason: Reason, private: &[u8]) {
        let Some(c) = self.connections.get_mut(&id) else { return };
        let rejected = match c.state {
            State::ReqReceived | State::RepSent => Rejected::Req,
            State::RepReceived => Rejected::Rep,
            _ => Rejected::Other,
        };
        let rej = Rej {
            local_id: id,
            remote_id: c.remote_id.unwrap_or(0),
            rejected,
            reason,
            information: Vec::new(),
            private: private.to_vec(),
        };
        c.last = Some(c.mad(Message::Rej(rej)));
        self.send_now(id);
    }

    /// The program has brought its QP to where it can send: says so to the peer.
    pub fn establish(&mut self, now_us: u64, id: ConnId) -> Result<(), CmError> {
        let c = self.in_state(id, &[State::RepReceived])?;
        let (local_id, remote_id) = (id.0, c.remote_id.unwrap_or(0));
        c.last = Some(c.mad(Message::Rtu(Rtu { local_id, remote_id, private: Vec::new() })));
        c.state = State::Established;
        self.send_last(now_us, id.0, false);
        Ok(())
    }

    /// The QP of a connection whose RTU has not come has received something: so the peer is there.
    pub fn notify(&mut self, id: ConnId) -> Result<(), CmError> {
        let c = self.in_state(id, &[State::RepSent, State::Established])?;
        if c.state == State::RepSent {
            c.state = State::Established;
            self.set_deadline(id.0, None);
            self.tell(id.0, Event::Established);
        }
        Ok(())
    }

    /// Ends a connection.
    pub fn disconnect(&mut self, now_us: u64, id: ConnId) -> Result<(), CmError> {
        let stands = [State::Established, State::RepSent, State::RepReceived];
        // The peer was first: it has its answer, and the program has been told.
        let over = [State::DreqSent, State::Timewait];
        let c = self.in_state(id, &[stands.as_slice(), &over].concat())?;
        if over.contains(&c.state) {
            return Ok(());
        }
        self.send_dreq(now_us, id.0);
        Ok(())
    }

    fn send_dreq(&mut self, now_us: u64, id: u32) {
        let wait_us = code_us(self.config.response_timeout);
        let Some(c) = self.connections.get_mut(&id) else { return };
        let (remote_id, remote_qpn) = (c.remote_id.unwrap_or(0), c.remote_qpn);
        let dreq = Disconnect { local_id: id, remote_id, remote_qpn, private: Vec::new() };
        c.last = Some(c.mad(Message::Dreq(dreq)));
        c.go_on_from_here();
        (c.state, c.wait_us) = (State::DreqSent, wait_us);
        self.send_last(now_us, id, true);
    }

    /// The program lets go of a connection. One that stands is ended; nothing more is told of it.
    pub fn destroy(&mut self, now_us: u64, id: ConnId) {
        let Some(c) = self.connections.get_mut(&id.0) else { return };
        c.owned = false;
        match c.state {
            // Of one that we have accepted, the peer may know that it stands, and its RTU is lost or
            // on its way: a DREQ is repeated until it is answered, a REJ is not.
            State::Established | State::RepSent => self.send_dreq(now_us, id.0),
            State::ReqSent => {
                self.send_reject(id.0, Reason::TIMEOUT, &[]);
                self.forget(id.0);
            }
            State::ReqReceived | State::RepReceived => {
                self.send_reject(id.0, Reason::CONSUMER, &[]);
                self.finish(now_us, id.0);
            }
            State::SidrReqReceived => {
                let rep = SidrRep { status: SidrStatus::REJECTED, ..SidrRep::default() };
                let _ = self.answer(now_us, id, rep);
            }
            State::DreqSent | State::Timewait | State::SidrDone => {}
            State::SidrReqSent | State::Over => self.forget(id.0),
        }
    }

    /// Nobody listens for what a request asks: says so, and lets go of it.
    pub fn refuse(&mut self, now_us: u64, id: ConnId) -> Result<(), CmError> {
        let state = self.in_state(id, &[State::ReqReceived, State::SidrReqReceived])?.state;
        if state == State::SidrReqReceived {
            let rep = SidrRep { status: SidrStatus::UNSUPPORTED, ..SidrRep::default() };
            self.answer(now_us, id, rep)?;
        } else {
            self.reject(now_us, id, Reason::INVALID_SERVICE_ID, &[])?;
        }
        self.destroy(now_us, id);
        Ok(())
    }

    /// A request is not wanted now: as if it had never come. The peer sends it again.
    pub fn drop_request(&mut self, id: ConnId) {
        self.forget(id.0);
    }

    /// The peer's process is gone: no message will say so.
    pub fn peer_died(&mut self, now_us: u64, id: ConnId) {
        let Some(c) = self.connections.get(&id.0) else { return };
        match c.state {
            State::Established | State::RepSent | State::DreqSent => {
                self.end(now_us, id.0, false);
            }
            _ => {}
        }
    }

    /// How far a connection is; `None` where there is none of that name.
    pub fn state(&self, id: ConnId) -> Option<State> {
        self.connections.get(&id.0).map(|c| c.state)
    }

    /// Connections, those that end included.
    pub fn count(&self) -> usize {
        self.connections.len()
    }

    /// The next thing to do, if there is one.
    pub fn next_output(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    /// When [`Cm::tick`] is to be called next.
    pub fn next_deadline_us(&self) -> Option<u64> {
        self.deadlines.first().map(|(at, _)| *at)
    }

    /// Does what is due.
    pub fn tick(&mut self, now_us: u64) {
        while let Some(&(at, id)) = self.deadlines.first() {
            if at > now_us {
                return;
            }
            self.due(now_us, id);
        }
    }

    fn due(&mut self, now_us: u64, id: u32) {
        let max_retries = u32::from(self.config.max_retries);
        let wait_us = code_us(self.config.response_timeout);
        self.set_deadline(id, None);
        let Some(c) = self.connections.get_mut(&id) else { return };
        match c.state {
            State::Timewait | State::SidrDone => {
                if c.state == State::Timewait {
                    self.tell(id, Event::TimewaitExit);
                }
                self.forget(id);
            }
            State::ReqSent | State::RepSent | State::SidrReqSent | State::DreqSent
                if c.attempts < max_retries && !left_out!(self.mutation, SendOnce) =>
            {
                c.attempts += 1;
                c.wait_us = wait_us;
                self.send_last(now_us, id, true);
            }
            State::DreqSent => self.end(now_us, id, true),
            State::ReqSent | State::RepSent | State::SidrReqSent => {
                self.tell(id, Event::Unreachable);
                if c_is_passive(self.connections.get(&id)) {
                    self.finish(now_us, id);
                } else {
                    self.over(id);
                }
            }
            _ => {}
        }
    }

    /// The connection is over: tells it once, and keeps the name for a while.
    fn end(&mut self, now_us: u64, id: u32, timed_out: bool) {
        let Some(c) = self.connections.get_mut(&id) else { return };
        let tell = !std::mem::replace(&mut c.told_end, true);
        if tell {
            self.tell(id, Event::Disconnected { timed_out });
        }
        self.finish(now_us, id);
    }

    /// Keeps the name, and what was said last, for a while.
    fn finish(&mut self, now_us: u64, id: u32) {
        let Some(c) = self.connections.get_mut(&id) else { return };
        c.state = State::Timewait;
        if left_out!(self.mutation, ForgetAtOnce) {
            return self.forget(id);
        }
        self.leave_qp(id);
        self.set_deadline(id, Some(now_us + self.config.timewait_us));
    }

    /// It has failed, and has nothing to say any more.
    fn over(&mut self, id: u32) {
        self.set_deadline(id, None);
        let Some(c) = self.connections.get_mut(&id) else { return };
        c.state = State::Over;
        if !c.owned {
            self.forget(id);
        }
    }

    fn leave_qp(&mut self, id: u32) {
        if let Some(c) = self.connections.get(&id) {
            let qp = (c.remote_guid, c.remote_qpn);
            if self.by_qp.get(&qp) == Some(&id) {
                self.by_qp.remove(&qp);
            }
        }
    }

    fn forget(&mut self, id: u32) {
        self.set_deadline(id, None);
        self.leave_qp(id);
        let Some(c) = self.connections.remove(&id) else { return };
        for key in remote_keys(&c) {
            if self.by_remote.get(&key) == Some(&id) {
                self.by_remote.remove(&key);
            }
        }
    }

    fn in_state(&mut self, id: ConnId, states: &[State]) -> Result<&mut Connection, CmError> {
        let c = self.connections.get_mut(&id.0).filter(|c| c.owned).ok_or(CmError::Unknown)?;
        match states.contains(&c.state) {
            true => Ok(c),
            false => Err(CmError::State(c.state)),
        }
    }

    fn tell(&mut self, id: u32, event: Event) {
        if self.connections.get(&id).is_some_and(|c| c.owned) {
            self.outputs.push_back(Output::Event(ConnId(id), event));
        }
    }

    /// Sends what the connection has to say, and again until it is answered.
    fn send_last(&mut self, now_us: u64, id: u32, again: bool) {
        self.send_now(id);
        let wait = self.connections.get(&id).filter(|_| again).map(|c| now_us + c.wait_us);
        self.set_deadline(id, wait);
    }

    fn send_now(&mut self, id: u32) {
        let Some(c) = self.connections.get(&id) else { return };
        if let (Some(mad), Some(to)) = (&c.last, c.peer()) {
            let via = c.via.wrapping_add(c.attempts as usize);
            let bytes = Box::new(mad.encode());
            self.outputs.push_back(Output::Send { via, to, bytes });
        }
    }

    fn send(&mut self, via: usize, to: Peer, mad: &Mad) {
        self.outputs.push_back(Output::Send { via, to, bytes: Box::new(mad.encode()) });
    }

    fn set_deadline(&mut self, id: u32, at_us: Option<u64>) {
        let Some(c) = self.connections.get_mut(&id) else { return };
        if let Some(old) = std::mem::replace(&mut c.deadline_us, at_us) {
            self.deadlines.remove(&(old, id));
        }
        if let Some(at) = at_us {
            self.deadlines.insert((at, id));
        }
    }

    fn fresh_id(&mut self) -> Result<u32, CmError> {
        if self.connections.len() >= MAX_CONNECTIONS {
            return Err(CmError::Full);
        }
        // The table is far from full, so a free name comes soon.
        loop {
            let id = self.next_random() as u32;
            if id != 0 && !self.connections.contains_key(&id) {
                return Ok(id);
            }
        }
    }

    /// SplitMix64.
    fn next_random(&mut self) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.random ^ self.random >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }
}

/// A peer asked for it: its duplicates are still to be known.
fn c_is_passive(c: Option<&Connection>) -> bool {
    c.is_some_and(|c| c.state == State::RepSent)
}

fn remote_keys(c: &Connection) -> [Remote; 2] {
    let remote_id = c.remote_id.unwrap_or(0);
    [Remote::Connection(c.remote_guid, remote_id), Remote::Question(remote_id, c.service_id)]
}

fn check_private(private: &[u8], most: usize) -> Result<(), CmError> {
    match private.len() {
        len if len > most => Err(CmError::TooLong { len, most }),
        _ => Ok(()),
    }
}
