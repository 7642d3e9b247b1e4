//! What the CM tells, and what programs are told of it.

use super::State;
use crate::abi::{Answer, MAX_PRIVATE};
use crate::channel::Queued;
use crate::ids::{Id, Loopback, Progress, Route};
use crate::qp;
use std::net::SocketAddr;
use unbroken_cm::{
    ConnId, Event, IpHeader, Peer, PortSpace, Reason, Rep, Req, SidrRep, SidrReq, SidrStatus,
    IP_HEADER_BYTES,
};
use unbroken_nics::OwnPort;
use unbroken_runtime::now_us;

const CONNECT_REQUEST: u32 = 4;
const CONNECT_RESPONSE: u32 = 5;
const UNREACHABLE: u32 = 7;
const REJECTED: u32 = 8;
const ESTABLISHED: u32 = 9;
const DISCONNECTED: u32 = 10;
const TIMEWAIT_EXIT: u32 = 15;

/// What an event has beside its number.
#[derive(Default)]
struct Told<'a> {
    status: i32,
    private: &'a [u8],
    qp_num: u32,
    qkey: u32,
    srq: bool,
    responder_resources: u8,
    initiator_depth: u8,
    flow_control: bool,
    retry_count: u8,
    rnr_retry_count: u8,
    listener: Option<u32>,
}

/// A request, and the id that listens for it.
struct Asked {
    listener: u32,
    space: PortSpace,
    port: u16,
    header: IpHeader,
}

/// `struct rdma_ucm_event_resp`.
fn event_bytes(number: u32, id: &Id, uid: u64, event: u32, told: &Told<'_>) -> Vec<u8> {
    let out = Answer::default().u64(uid).u32(number).u32(event).u32(told.status as u32);
    let out = out.u32(told.qp_num).u32(told.qkey);
    let len = told.private.len().min(MAX_PRIVATE - 1);
    let out = if id.is_datagram() {
        let nowhere =
            Route { nic: 0, port: 0, sgid_index: 0, sgid: [0; 16], dgid: [0; 16], mtu: 0 };
        let route = id.route.unwrap_or(nowhere);
        let out = qp::address_vector(out, &route, id.traffic_class);
        out.field(&told.private[..len], MAX_PRIVATE).u8s(&[len as u8]).field(&[], 7)
    } else {
        let out = out.field(&told.private[..len], MAX_PRIVATE);
        let numbers = [
            len as u8,
            told.srq.into(),
            told.responder_resources,
            told.initiator_depth,
            told.flow_control.into(),
            told.retry_count,
            told.rnr_retry_count,
            1,
        ];
        out.u8s(&numbers).field(&[], 32)
    };
    out.u32(0).u64(0).0
}

impl State {
    /// Tells the program of an id something.
    fn tell(&mut self, number: u32, event: u32, told: &Told<'_>) -> bool {
        let Some(id) = self.ids.get(number) else { return false };
        let (uid, channel) = match told.listener {
            Some(listener) => match self.ids.get(listener) {
                Some(listener) => (listener.uid, listener.channel),
                None => return false,
            },
            None => (id.uid, id.channel),
        };
        // Before it has accepted a request, the program has no name for the id.
        if uid == 0 {
            return false;
        }
        let bytes = event_bytes(number, id, uid, event, told);
        let queued = Queued { id: number, listener: told.listener, bytes };
        self.queue(channel, queued)
    }

    pub(super) fn tell_plain(&mut self, number: u32, event: u32, status: i32) {
        self.tell(number, event, &Told { status, ..Told::default() });
    }

    /// A request was refused before it was sent.
    pub(super) fn tell_refused(&mut self, number: u32, reason: Reason) {
        let datagram = self.ids.get(number).is_some_and(Id::is_datagram);
        let (event, status) = match datagram {
            true => (UNREACHABLE, SidrStatus::UNSUPPORTED.0.into()),
            false => (REJECTED, reason.0.into()),
        };
        self.tell_plain(number, event, status);
    }

    /// The CM tells something.
    pub(super) fn on_event(&mut self, connection: ConnId, event: Event) {
        if matches!(event, Event::Request { .. } | Event::SidrRequest { .. }) {
            return self.on_asked(connection, event, None);
        }
        let Some(number) = self.ids.of_connection(connection) else { return };
        match event {
            Event::Response(rep) => self.on_response(number, &rep),
            Event::Established => self.tell_plain(number, ESTABLISHED, 0),
            Event::Rejected(rej) => {
                let status = rej.reason.0.into();
                let told = Told { status, private: &rej.private, ..Told::default() };
                self.tell(number, REJECTED, &told);
            }
            Event::Unreachable => self.tell_plain(number, UNREACHABLE, -libc::ETIMEDOUT),
            Event::Disconnected { timed_out } => {
                let status = if timed_out { -libc::ETIMEDOUT } else { 0 };
                if let Some(id) = self.ids.get_mut(number) {
                    id.peer = None;
                }
                self.tell_plain(number, DISCONNECTED, status);
            }
            Event::TimewaitExit => self.tell_plain(number, TIMEWAIT_EXIT, 0),
            Event::SidrReply(rep) => self.on_answer(number, &rep),
            Event::Request { .. } | Event::SidrRequest { .. } => {}
        }
    }

    fn on_response(&mut self, number: u32, rep: &Rep) {
        if let Some(id) = self.ids.get_mut(number) {
            id.agree_to_reply(rep);
        }
        let told = Told {
            private: &rep.private,
            qp_num: rep.local_qpn,
            srq: rep.srq,
            responder_resources: rep.initiator_depth,
            initiator_depth: rep.responder_resources,
            flow_control: rep.flow_control,
            rnr_retry_count: rep.rnr_retry_count,
            ..Told::default()
        };
        self.tell(number, CONNECT_RESPONSE, &told);
    }

    fn on_answer(&mut self, number: u32, rep: &SidrRep) {
        let told =
            Told { private: &rep.private, qp_num: rep.qpn, qkey: rep.qkey, ..Told::default() };
        match rep.status {
            SidrStatus::VALID => self.tell(number, ESTABLISHED, &told),
            status => self.tell(number, UNREACHABLE, &Told { status: status.0.into(), ..told }),
        };
    }

    /// A peer asks for a connection, or a service of datagrams. `until_us`: it has waited for a
    /// listener, and may do so till then.
    pub(super) fn on_asked(&mut self, connection: ConnId, event: Event, until_us: Option<u64>) {
        let (service_id, private, via, from) = match &event {
            Event::Request { req, via, from } => (req.service_id, &req.private, *via, *from),
            Event::SidrRequest { req, via, from } => (req.service_id, &req.private, *via, *from),
            _ => return,
        };
        let Some(asked) = self.asked(service_id, private) else {
            match until_us {
                Some(until_us) => self.hold_on(connection, event, until_us),
                None if self.listens_soon(service_id, private) && self.hold(connection, event) => {}
                None => {
                    let _ = self.cm.refuse(now_us(), connection);
                }
            }
            return;
        };
        let Some(number) = self.admit(connection, &asked, via, from) else { return };
        match &event {
            Event::Request { req, .. } => self.on_request(number, connection, req),
            Event::SidrRequest { req, from, .. } => {
                self.on_question(number, connection, req, *from);
            }
            _ => {}
        }
    }

    fn on_request(&mut self, number: u32, connection: ConnId, req: &Req) {
        let Some(id) = self.ids.get_mut(number) else { return };
        id.agree_to_request(req);
        if let Some(route) = &mut id.route {
            route.dgid = req.path.local_gid;
            route.mtu = route.mtu.min(req.mtu.max(1));
        }
        id.traffic_class = req.path.traffic_class;
        let told = Told {
            private: req.private.get(IP_HEADER_BYTES..).unwrap_or_default(),
            qp_num: req.local_qpn,
            srq: req.srq,
            responder_resources: req.initiator_depth,
            initiator_depth: req.responder_resources,
            flow_control: req.flow_control,
            retry_count: req.retry_count,
            rnr_retry_count: req.rnr_retry_count,
            listener: id.listener,
            ..Told::default()
        };
        self.tell_request(number, connection, &told);
    }

    fn on_question(&mut self, number: u32, connection: ConnId, req: &SidrReq, from: Peer) {
        let Some(id) = self.ids.get_mut(number) else { return };
        if let Some(route) = &mut id.route {
            route.dgid = from.gid;
        }
        let private = req.private.get(IP_HEADER_BYTES..).unwrap_or_default();
        let told = Told { private, listener: id.listener, ..Told::default() };
        self.tell_request(number, connection, &told);
    }

    fn tell_request(&mut self, number: u32, connection: ConnId, told: &Told<'_>) {
        if self.tell(number, CONNECT_REQUEST, told) {
            return;
        }
        // The channel takes no more: the peer asks again.
        if let Some(listener) = told.listener.and_then(|listener| self.ids.get_mut(listener)) {
            listener.waiting = listener.waiting.saturating_sub(1);
        }
        self.ids.remove(number);
        self.cm.drop_request(connection);
    }

    /// Who listens for a request.
    fn asked(&self, service_id: u64, private: &[u8]) -> Option<Asked> {
        let (space, port) = PortSpace::of_service(service_id)?;
        let header = IpHeader::parse(private)?;
        let listener = self.ids.listener(space, port, header.destination)?;
        Some(Asked { listener, space, port, header })
    }

    /// Creates an id for a request if the backlog of its listener has room. Otherwise it drops the
    /// request without an answer, and the peer retransmits it.
    fn admit(&mut self, connection: ConnId, a: &Asked, via: usize, from: Peer) -> Option<u32> {
        let Asked { listener, space, port, header } = *a;
        let route = self.route_of_request(&header, via);
        let peer = self.ports.process_of(from);
        let listening = self.ids.get_mut(listener)?;
        if listening.waiting >= listening.backlog {
            self.cm.drop_request(connection);
            return None;
        }
        let mut id = Id::new(0, listening.channel, space);
        id.param.qkey = listening.param.qkey;
        id.source = Some(SocketAddr::new(header.destination, port));
        id.destination = Some(SocketAddr::new(header.source, header.port));
        (id.route, id.peer, id.listener) = (route, peer, Some(listener));
        id.progress = Progress::Connecting;
        let Ok(number) = self.ids.add(id) else {
            self.cm.drop_request(connection);
            return None;
        };
        if let Some(listening) = self.ids.get_mut(listener) {
            listening.waiting += 1;
        }
        self.ids.connect(number, connection);
        Some(number)
    }

    /// The way back: from the port that was asked for, or the NIC that the request came through.
    fn route_of_request(&self, header: &IpHeader, via: usize) -> Option<Route> {
        let ip = header.destination.to_canonical();
        let named = (!ip.is_loopback_of_this_host()).then(|| self.network.own_port(ip)).flatten();
        let through = || {
            let own = self.network.own().iter();
            own.copied().find(|port: &OwnPort| port.nic == via)
        };
        named.or_else(through).and_then(|port| self.route_from(&port).ok())
    }
}
