//! One connection, or one question for a service of datagrams.

use crate::mad::Mad;
use crate::manager::Peer;
use crate::message::{Message, Rep, Req};

/// Names a connection of this process, and is its name on the wire. Drawn at random: a stranger who
/// wants to end a connection has to know it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
pub struct ConnId(pub u32);

/// How far a connection is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum State {
    /// Our REQ is on its way.
    ReqSent,
    /// The peer has accepted, and the program has not answered.
    RepReceived,
    /// The peer asks, and the program has not answered.
    ReqReceived,
    /// Our REP is on its way.
    RepSent,
    /// Both ends know that it is there.
    Established,
    /// Our DREQ is on its way.
    DreqSent,
    /// It is over; its packets may still be on their way.
    Timewait,
    /// Our question is on its way.
    SidrReqSent,
    /// A question that the program has not answered.
    SidrReqReceived,
    /// The question is answered.
    SidrDone,
    /// It has failed, and waits for the program to let go of it.
    Over,
}

/// What a connection is asked for with. The names, times and retries of the request are filled in.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Connect {
    /// Where the peer can be reached; the first is tried first.
    pub peers: Vec<Peer>,
    /// The NIC of ours that it begins at.
    pub via: usize,
    /// The request.
    pub req: Box<Req>,
}

/// What a request is accepted with. The names of the reply, and its first PSN, which is that of the
/// request, are filled in.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Reply {
    /// The reply.
    pub rep: Box<Rep>,
}

pub(crate) struct Connection {
    pub(crate) state: State,
    /// The peer's name for it; `None` until that has said it.
    pub(crate) remote_id: Option<u32>,
    /// The peer's channel adapter and QP, once they are known.
    pub(crate) remote_guid: u64,
    pub(crate) remote_qpn: u32,
    pub(crate) local_qpn: u32,
    pub(crate) transaction: u64,
    pub(crate) starting_psn: u32,
    /// The service of a question.
    pub(crate) service_id: u64,
    pub(crate) peers: Vec<Peer>,
    pub(crate) via: usize,
    /// What is sent again until it is answered, or when its message comes twice.
    pub(crate) last: Option<Mad>,
    pub(crate) attempts: u32,
    /// How long one attempt is waited for.
    pub(crate) wait_us: u64,
    pub(crate) deadline_us: Option<u64>,
    /// The program still wants to hear of it.
    pub(crate) owned: bool,
    /// The program has been told of the end.
    pub(crate) told_end: bool,
}

impl Connection {
    pub(crate) fn new(state: State, transaction: u64, peers: Vec<Peer>, via: usize) -> Connection {
        Connection {
            state,
            remote_id: None,
            remote_guid: 0,
            remote_qpn: 0,
            local_qpn: 0,
            transaction,
            starting_psn: 0,
            service_id: 0,
            peers,
            via,
            last: None,
            attempts: 0,
            wait_us: 0,
            deadline_us: None,
            owned: true,
            told_end: false,
        }
    }

    /// Where the present attempt goes.
    pub(crate) fn peer(&self) -> Option<Peer> {
        let count = self.peers.len();
        (count > 0).then(|| self.peers[self.attempts as usize % count])
    }

    /// The peer has sent from there: answers go there first.
    pub(crate) fn heard_from(&mut self, from: Peer, via: usize) {
        self.via = via;
        match self.peers.iter().position(|peer| *peer == from) {
            Some(i) => self.peers.swap(0, i),
            None if self.peers.is_empty() => self.peers.push(from),
            // The list stays bounded: another address of the peer takes the place of the last.
            None => {
                let last = self.peers.len() - 1;
                self.peers[last] = from;
                self.peers.swap(0, last);
            }
        }
        self.attempts = 0;
    }

    /// What is sent next takes the way of the present attempt first.
    pub(crate) fn go_on_from_here(&mut self) {
        let attempts = std::mem::take(&mut self.attempts) as usize;
        self.via = self.via.wrapping_add(attempts);
        let count = self.peers.len().max(1);
        self.peers.rotate_left(attempts % count);
    }

    pub(crate) fn mad(&self, message: Message) -> Mad {
        Mad { transaction: self.transaction, message }
    }

    /// Its names are those of the message.
    pub(crate) fn is_of(&self, remote_id: u32) -> bool {
        self.remote_id.is_none_or(|id| id == remote_id)
    }
}
