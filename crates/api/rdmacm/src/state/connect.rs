//! Connections: listen, connect, accept, reject, disconnect.

use super::State;
use crate::abi::{ConnParam, Result};
use crate::ids::{Agreed, Id, Progress, Route};
use crate::qp;
use std::net::IpAddr;
use unbroken_cm::{
    service_id, CmError, Connect, IpHeader, Path, Peer, PortSpace, Reason, Rep, Reply, Req,
    SidrRep, SidrReq, IP_HEADER_BYTES,
};
use unbroken_nics::Place;
use unbroken_runtime::{now_us, ProcessName};

/// Requests that may wait for a program that asks for no limit, and the most that one may ask for.
const MAX_BACKLOG: u32 = 1024;
/// How long a QP waits for an acknowledgement: 4.096 µs · 2^14 = 67 ms. As perftest has it: a
/// longer one would only have failover wait.
const ACK_TIMEOUT: u8 = 14;
const PKEY: u16 = 0xffff;
/// The QP of management datagrams of a NIC.
const QP1: u32 = 1;
const COMMUNICATION_ESTABLISHED: u32 = 4;
/// Service types of connections.
const RC: u8 = 0;

/// What an error of the CM is to programs.
fn errno(e: CmError) -> i32 {
    match e {
        CmError::Full => libc::ENOMEM,
        CmError::Unknown | CmError::State(_) | CmError::TooLong { .. } | CmError::NoPeer => {
            libc::EINVAL
        }
    }
}

/// Who answers at an address.
pub(super) enum Answerer {
    /// Nobody listens there.
    Nobody,
    /// A CM at these addresses, and its process, where that is known.
    At(Vec<Peer>, Option<ProcessName>),
}

impl State {
    pub(super) fn listen(&mut self, number: u32, backlog: u32) -> Result<()> {
        let id = self.ids.get(number).ok_or(libc::ENOENT)?;
        if id.progress == Progress::Idle {
            let any = std::net::SocketAddr::new(std::net::Ipv4Addr::UNSPECIFIED.into(), 0);
            self.bind(number, any)?;
        }
        let id = self.ids.get_mut(number).ok_or(libc::ENOENT)?;
        if id.progress != Progress::Bound {
            return Err(libc::EINVAL);
        }
        let taken = id.taken.as_ref().ok_or(libc::EINVAL)?;
        self.ports.listen(taken)?;
        id.progress = Progress::Listening;
        id.backlog = if (1..MAX_BACKLOG).contains(&backlog) { backlog } else { MAX_BACKLOG };
        self.hear_the_early();
        Ok(())
    }

    /// Who answers at an address and port.
    fn answerer(&self, space: PortSpace, ip: IpAddr, port: u16) -> Answerer {
        let (host, rail) = match self.network.locate(ip) {
            Some(Place::Host(host, rail)) => (host, rail),
            Some(Place::Beyond) => {
                let gid = self.network.gid(ip).0;
                return Answerer::At(vec![Peer { gid, qpn: QP1 }], None);
            }
            None => return Answerer::Nobody,
        };
        let Some(process) = self.ports.listener(&host, space, port, ip) else {
            return Answerer::Nobody;
        };
        let mut addresses = self.ports.addresses(process);
        // The NIC that was named, then those behind it.
        let first = addresses.iter().position(|(nic, _)| *nic == rail).unwrap_or(0);
        addresses.rotate_left(first);
        Answerer::At(addresses.into_iter().map(|(_, peer)| peer).collect(), Some(process))
    }

    pub(super) fn connect(&mut self, number: u32, param: &ConnParam) -> Result<()> {
        let id = self.ids.get(number).ok_or(libc::ENOENT)?;
        if id.progress != Progress::RouteResolved || !param.valid {
            return Err(libc::EINVAL);
        }
        let room = match id.is_datagram() {
            true => SidrReq::PRIVATE_BYTES,
            false => Req::PRIVATE_BYTES,
        };
        if param.private.len() > room - IP_HEADER_BYTES {
            return Err(libc::EINVAL);
        }
        let timeout = id.ack_timeout.unwrap_or(ACK_TIMEOUT);
        let starting_psn = self.next_random() & 0x00ff_ffff;
        let id = self.ids.get_mut(number).ok_or(libc::ENOENT)?;
        (id.progress, id.param) = (Progress::Connecting, param.clone());
        id.agreed = Agreed { rq_psn: starting_psn, timeout, ..Agreed::default() };
        match self.request(number) {
            Err(errno) => {
                // The program may try again, with less private data for one.
                let id = self.ids.get_mut(number).ok_or(libc::ENOENT)?;
                id.progress = Progress::RouteResolved;
                Err(errno)
            }
            Ok(true) => Ok(()),
            Ok(false) => {
                self.wait_for_listener(number);
                Ok(())
            }
        }
    }

    /// Sends the request of an id that connects. False: nobody listens there.
    pub(super) fn request(&mut self, number: u32) -> Result<bool> {
        let id = self.ids.get(number).ok_or(libc::ENOENT)?;
        let (Some(source), Some(destination), Some(ip), Some(route)) =
            (id.source, id.destination, id.target, id.route)
        else {
            return Err(libc::EINVAL);
        };
        let (space, port) = (id.space, destination.port());
        let (peers, process) = match self.answerer(space, ip, port) {
            Answerer::At(peers, process) if !peers.is_empty() => (peers, process),
            _ => return Ok(false),
        };
        let header = IpHeader { port: source.port(), source: source.ip(), destination: ip };
        let private = [&header.encode()[..], &id.param.private].concat();
        let service_id = service_id(space, port);
        let (now, via) = (now_us(), route.nic);
        let connection = match id.is_datagram() {
            true => {
                let req = SidrReq { pkey: PKEY, service_id, private, ..SidrReq::default() };
                self.cm.ask(now, peers, via, req)
            }
            false => {
                let req = Req {
                    service_id,
                    local_guid: self.system.devices().get(via).map_or(0, |d| d.node_guid),
                    starting_psn: id.agreed.rq_psn,
                    pkey: PKEY,
                    mtu: route.mtu,
                    path: request_path(&route, id.agreed.timeout, id.traffic_class),
                    private,
                    ..request(&id.param)
                };
                self.cm.connect(now, Connect { peers, via, req: Box::new(req) })
            }
        };
        let connection = connection.map_err(errno)?;
        self.ids.connect(number, connection);
        self.used.insert(via);
        if let Some(id) = self.ids.get_mut(number) {
            id.peer = process;
        }
        Ok(true)
    }

    /// The program accepts a request, or has brought its QP to where a reply wanted it.
    pub(super) fn accept(&mut self, number: u32, uid: u64, param: &ConnParam) -> Result<()> {
        use unbroken_cm::State as Connection;
        let id = self.ids.get_mut(number).ok_or(libc::ENOENT)?;
        let connection = id.connection.ok_or(libc::EINVAL)?;
        let now = now_us();
        match self.cm.state(connection) {
            Some(Connection::RepReceived) => {
                return self.cm.establish(now, connection).map_err(errno);
            }
            Some(Connection::ReqReceived | Connection::SidrReqReceived) if param.valid => {}
            _ => return Err(libc::EINVAL),
        }
        let guid = id.route.and_then(|route| self.system.devices().get(route.nic));
        let guid = guid.map_or(0, |device| device.node_guid);
        if id.is_datagram() {
            id.param = param.clone();
            let rep = SidrRep {
                qpn: param.qp_num,
                qkey: qp::qkey(id),
                private: param.private.clone(),
                ..SidrRep::default()
            };
            self.cm.answer(now, connection, rep).map_err(errno)?;
        } else {
            let rep = Rep {
                local_qpn: param.qp_num,
                responder_resources: param.responder_resources,
                initiator_depth: param.initiator_depth,
                flow_control: param.flow_control,
                rnr_retry_count: param.rnr_retry_count,
                srq: param.srq,
                local_guid: guid,
                private: param.private.clone(),
                ..Rep::default()
            };
            self.cm.accept(now, connection, Reply { rep: Box::new(rep) }).map_err(errno)?;
        }
        let id = self.ids.get_mut(number).ok_or(libc::ENOENT)?;
        (id.uid, id.param) = (uid, param.clone());
        Ok(())
    }

    pub(super) fn reject(&mut self, number: u32, reason: Reason, private: &[u8]) -> Result<()> {
        let connection = self.connection(number)?;
        self.cm.reject(now_us(), connection, reason, private).map_err(errno)
    }

    pub(super) fn disconnect(&mut self, number: u32) -> Result<()> {
        let connection = self.connection(number)?;
        self.cm.disconnect(now_us(), connection).map_err(errno)
    }

    /// The program tells of an event of its QP.
    pub(super) fn notify(&mut self, number: u32, event: u32) -> Result<()> {
        let connection = self.connection(number)?;
        match event {
            COMMUNICATION_ESTABLISHED => self.cm.notify(connection).map_err(errno),
            _ => Ok(()),
        }
    }

    fn connection(&self, number: u32) -> Result<unbroken_cm::ConnId> {
        self.ids.get(number).ok_or(libc::ENOENT)?.connection.ok_or(libc::EINVAL)
    }
}

/// What a program connects with.
fn request(param: &ConnParam) -> Req {
    Req {
        local_qpn: param.qp_num,
        responder_resources: param.responder_resources,
        initiator_depth: param.initiator_depth,
        transport: RC,
        flow_control: param.flow_control,
        retry_count: param.retry_count,
        rnr_retry_count: param.rnr_retry_count,
        srq: param.srq,
        ..Req::default()
    }
}

fn request_path(route: &Route, ack_timeout: u8, traffic_class: u8) -> Path {
    const PERMISSIVE_LID: u16 = 0xffff;
    Path {
        local_lid: PERMISSIVE_LID,
        remote_lid: PERMISSIVE_LID,
        local_gid: route.sgid,
        remote_gid: route.dgid,
        hop_limit: 64,
        traffic_class,
        ack_timeout,
        ..Path::default()
    }
}

impl Id {
    /// What a request says of the connection that it asks for.
    pub(super) fn agree_to_request(&mut self, req: &Req) {
        self.agreed = Agreed {
            dest_qpn: req.local_qpn,
            // Both ends begin where the request says.
            rq_psn: req.starting_psn,
            sq_psn: req.starting_psn,
            responder_resources: req.initiator_depth,
            initiator_depth: req.responder_resources,
            retry_count: req.retry_count,
            rnr_retry_count: req.rnr_retry_count,
            timeout: req.path.ack_timeout,
            complete: true,
        };
    }

    /// What a reply says of the connection that was asked for.
    pub(super) fn agree_to_reply(&mut self, rep: &Rep) {
        self.agreed = Agreed {
            dest_qpn: rep.local_qpn,
            sq_psn: rep.starting_psn,
            responder_resources: rep.initiator_depth,
            initiator_depth: rep.responder_resources,
            retry_count: self.param.retry_count,
            rnr_retry_count: rep.rnr_retry_count,
            complete: true,
            ..self.agreed
        };
    }
}
