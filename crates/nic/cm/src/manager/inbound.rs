//! Messages that arrive.

use super::{code_us, Cm, Event, Peer, Remote};
use crate::connection::{ConnId, Connection, State};
use crate::mad::Mad;
use crate::message::{
    Apr, Disconnect, Lap, Message, Mra, Rej, Rejected, Rep, Req, Rtu, SidrRep, SidrReq,
};
use crate::mutants::left_out;
use crate::reason::Reason;

impl Cm {
    /// A datagram has arrived from there, through that NIC. What is no message of the CM, or of no
    /// connection of ours, changes nothing.
    pub fn handle(&mut self, now_us: u64, from: Peer, via: usize, bytes: &[u8]) {
        let Some(Mad { transaction, message }) = Mad::parse(bytes) else { return };
        match message {
            Message::Req(req) => self.on_req(from, via, transaction, req),
            Message::Mra(mra) => self.on_mra(now_us, from, via, &mra),
            Message::Rej(rej) => self.on_rej(now_us, rej),
            Message::Rep(rep) => self.on_rep(from, via, rep),
            Message::Rtu(rtu) => self.on_rtu(from, via, &rtu),
            Message::Dreq(dreq) => self.on_dreq(now_us, from, via, transaction, &dreq),
            Message::Drep(drep) => self.on_drep(now_us, &drep),
            Message::SidrReq(req) => self.on_sidr_req(from, via, transaction, req),
            Message::SidrRep(rep) => self.on_sidr_rep(rep),
            Message::Lap(lap) => self.on_lap(from, via, transaction, &lap),
            Message::Apr(_) => {}
        }
    }

    /// The connection that a message names, if both names are right.
    fn named(&mut self, local_id: u32, remote_id: u32) -> Option<(u32, &mut Connection)> {
        let believes = left_out!(self.mutation, BelieveStrangers);
        let c = self.connections.get_mut(&local_id)?;
        (believes || c.is_of(remote_id)).then_some((local_id, c))
    }

    fn on_req(&mut self, from: Peer, via: usize, transaction: u64, req: Box<Req>) {
        let key = Remote::Connection(req.local_guid, req.local_id);
        let known = self.by_remote.get(&key).filter(|_| !left_out!(self.mutation, TellTwice));
        if let Some(&id) = known {
            return self.on_req_again(id, from, via);
        }
        if self.by_qp.contains_key(&(req.local_guid, req.local_qpn)) {
            return self.turn_away(from, via, transaction, req.local_id);
        }
        // It is sent again, when there may be room.
        let Ok(id) = self.fresh_id() else { return };
        let mut c = Connection::new(State::ReqReceived, transaction, vec![from], via);
        c.remote_id = Some(req.local_id);
        (c.remote_guid, c.remote_qpn) = (req.local_guid, req.local_qpn);
        c.starting_psn = req.starting_psn;
        self.connections.insert(id, c);
        self.by_remote.insert(key, id);
        self.tell(id, Event::Request { req, via, from });
    }

    /// A request that is known: the peer has not heard of the answer, or there is none yet.
    fn on_req_again(&mut self, id: u32, from: Peer, via: usize) {
        let service_timeout = self.config.service_timeout;
        let Some(c) = self.connections.get_mut(&id) else { return };
        match c.state {
            State::ReqReceived => {
                c.heard_from(from, via);
                let mra = Mra {
                    local_id: id,
                    remote_id: c.remote_id.unwrap_or(0),
                    received: 0,
                    service_timeout,
                    private: Vec::new(),
                };
                let mad = c.mad(Message::Mra(mra));
                self.send(via, from, &mad);
            }
            State::RepSent => {
                c.heard_from(from, via);
                self.send_now(id);
            }
            // Rejected: says so again.
            State::Timewait if matches!(c.last, Some(Mad { message: Message::Rej(_), .. })) => {
                c.heard_from(from, via);
                self.send_now(id);
            }
            State::Timewait => {
                let (transaction, remote_id) = (c.transaction, c.remote_id.unwrap_or(0));
                self.turn_away(from, via, transaction, remote_id);
            }
            // The peer has what it asked for: this one was late.
            _ => {}
        }
    }

    /// Rejects a request of a connection that has ended, or of a QP that is connected, without
    /// keeping anything of it.
    fn turn_away(&mut self, to: Peer, via: usize, transaction: u64, remote_id: u32) {
        let rej = Rej {
            local_id: 0,
            remote_id,
            rejected: Rejected::Req,
            reason: Reason::STALE_CONNECTION,
            information: Vec::new(),
            private: Vec::new(),
        };
        self.send(via, to, &Mad { transaction, message: Message::Rej(rej) });
    }

    fn on_mra(&mut self, now_us: u64, from: Peer, via: usize, mra: &Mra) {
        let longer_us = code_us(mra.service_timeout);
        let Some((id, c)) = self.named(mra.remote_id, mra.local_id) else { return };
        if matches!((c.state, mra.received), (State::ReqSent, 0) | (State::RepSent, 1)) {
            // Not `heard_from`: attempts are counted on, so that there is an end.
            c.via = via.wrapping_sub(c.attempts as usize);
            if let Some(i) = c.peers.iter().position(|peer| *peer == from) {
                let at = c.attempts as usize % c.peers.len();
                c.peers.swap(i, at);
            }
            let at = now_us + c.wait_us + longer_us;
            self.set_deadline(id, Some(at));
        }
    }

    fn on_rej(&mut self, now_us: u64, rej: Rej) {
        let named = match rej.local_id {
            // The peer keeps nothing of the request, so it has no name for it.
            0 => self.connections.get_mut(&rej.remote_id).map(|c| (rej.remote_id, c)),
            _ => self.named(rej.remote_id, rej.local_id),
        };
        let Some((id, c)) = named else { return };
        match c.state {
            State::ReqSent => {
                self.tell(id, Event::Rejected(rej));
                self.over(id);
            }
            // The peer gave up what it had asked for, or accepted.
            State::RepReceived | State::ReqReceived | State::RepSent if rej.local_id != 0 => {
                self.tell(id, Event::Rejected(rej));
                self.finish(now_us, id);
            }
            // It let go of a connection that we took for established.
            State::Established if rej.local_id != 0 => self.end(now_us, id, false),
            State::DreqSent if rej.local_id != 0 => self.end(now_us, id, false),
            _ => {}
        }
    }

    fn on_rep(&mut self, from: Peer, via: usize, rep: Box<Rep>) {
        let Some((id, c)) = self.named(rep.remote_id, rep.local_id) else {
            return self.on_lost_rep(from, via, &rep);
        };
        match c.state {
            State::ReqSent => {
                c.heard_from(from, via);
                c.state = State::RepReceived;
                c.remote_id = Some(rep.local_id);
                (c.remote_guid, c.remote_qpn) = (rep.local_guid, rep.local_qpn);
                self.set_deadline(id, None);
                self.tell(id, Event::Response(rep));
            }
            // The peer waits for the program's answer.
            State::RepReceived => {
                c.heard_from(from, via);
                let mra = Mra {
                    local_id: id,
                    remote_id: rep.local_id,
                    received: 1,
                    service_timeout: self.config.service_timeout,
                    private: Vec::new(),
                };
                let transaction = self.connections[&id].transaction;
                self.send(via, from, &Mad { transaction, message: Message::Mra(mra) });
            }
            // The RTU was lost.
            State::Established => {
                c.heard_from(from, via);
                self.send_now(id);
            }
            _ => {}
        }
    }

    /// A reply to a request that we have given up: the peer would send it again and again.
    fn on_lost_rep(&mut self, from: Peer, via: usize, rep: &Rep) {
        if self.connections.contains_key(&rep.remote_id) {
            return;
        }
        let rej = Rej {
            local_id: rep.remote_id,
            remote_id: rep.local_id,
            rejected: Rejected::Rep,
            reason: Reason::INVALID_COMM_ID,
            information: Vec::new(),
            private: Vec::new(),
        };
        self.send(via, from, &Mad { transaction: 0, message: Message::Rej(rej) });
    }

    fn on_rtu(&mut self, from: Peer, via: usize, rtu: &Rtu) {
        let Some((id, c)) = self.named(rtu.remote_id, rtu.local_id) else { return };
        if c.state == State::RepSent {
            c.heard_from(from, via);
            c.state = State::Established;
            self.set_deadline(id, None);
            self.tell(id, Event::Established);
        }
    }

    fn on_dreq(
        &mut self,
        now_us: u64,
        from: Peer,
        via: usize,
        transaction: u64,
        dreq: &Disconnect,
    ) {
        let ours = self.named(dreq.remote_id, dreq.local_id);
        let ours = ours.map(|(id, c)| (id, c.state, c.local_qpn == dreq.remote_qpn));
        // One that names a connection of ours and another QP is no message of the peer's.
        if ours.is_some_and(|(_, _, same_qp)| !same_qp) {
            return;
        }
        // Whether or not the connection is known: the peer waits for it.
        let (local_id, remote_id) = (dreq.remote_id, dreq.local_id);
        let drep = Message::Drep(Rtu { local_id, remote_id, private: Vec::new() });
        if !left_out!(self.mutation, NoDrep) {
            self.send(via, from, &Mad { transaction, message: drep });
        }
        let Some((id, state, _)) = ours else { return };
        match state {
            State::Established | State::RepSent | State::RepReceived | State::DreqSent => {
                self.end(now_us, id, false);
            }
            // The peer has accepted and let go, and its REP has not come: it is not waited for.
            State::ReqSent => {
                let rej = Rej {
                    local_id: remote_id,
                    remote_id: local_id,
                    rejected: Rejected::Req,
                    reason: Reason::CONSUMER,
                    information: Vec::new(),
                    private: Vec::new(),
                };
                self.tell(id, Event::Rejected(rej));
                self.over(id);
            }
            _ => {}
        }
    }

    fn on_drep(&mut self, now_us: u64, drep: &Rtu) {
        let Some((id, c)) = self.named(drep.remote_id, drep.local_id) else { return };
        if c.state == State::DreqSent {
            self.end(now_us, id, false);
        }
    }

    fn on_sidr_req(&mut self, from: Peer, via: usize, transaction: u64, req: SidrReq) {
        let key = Remote::Question(req.request_id, req.service_id);
        if let Some(&id) = self.by_remote.get(&key) {
            if let Some(c) = self.connections.get_mut(&id) {
                c.heard_from(from, via);
                if c.state == State::SidrDone {
                    self.send_now(id);
                }
            }
            return;
        }
        let Ok(id) = self.fresh_id() else { return };
        let mut c = Connection::new(State::SidrReqReceived, transaction, vec![from], via);
        (c.remote_id, c.service_id) = (Some(req.request_id), req.service_id);
        self.connections.insert(id, c);
        self.by_remote.insert(key, id);
        self.tell(id, Event::SidrRequest { req, via, from });
    }

    fn on_sidr_rep(&mut self, rep: SidrRep) {
        let id = rep.request_id;
        if self.state(ConnId(id)) == Some(State::SidrReqSent) {
            self.tell(id, Event::SidrReply(rep));
            self.over(id);
        }
    }

    /// No alternate path is loaded here: connections move otherwise.
    fn on_lap(&mut self, from: Peer, via: usize, transaction: u64, lap: &Lap) {
        const NOT_SUPPORTED: u8 = 2;
        if let Some((id, _)) = self.named(lap.remote_id, lap.local_id) {
            let apr = Apr { local_id: id, remote_id: lap.local_id, status: NOT_SUPPORTED };
            self.send(via, from, &Mad { transaction, message: Message::Apr(apr) });
        }
    }
}
