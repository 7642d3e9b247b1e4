//! Addresses: bind, resolve, query, options.

use super::State;
use crate::abi::{any_like, write_address, Answer, Query, Result};
use crate::ids::{Id, Loopback, Progress, Route};
use crate::ports::Scope;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use unbroken_cm::PortSpace;
use unbroken_nics::{OwnPort, Place};
use unbroken_types::GidType;

/// Ports that ids get which do not ask for one, as the kernel's.
const EPHEMERAL: std::ops::Range<u16> = 32_768..61_000;
/// Ports that are tried.
const TRIES: usize = 64;
/// The default partition.
const PKEY: u16 = 0xffff;
/// No limit of the rate; 100 Gbit/s, as ports tell it.
const RATE: u8 = 16;
const PACKET_LIFE_TIME: u8 = 16;
const HOP_LIMIT: u8 = 64;

const ADDR_RESOLVED: u32 = 0;
const ADDR_ERROR: u32 = 1;
const ROUTE_RESOLVED: u32 = 2;

impl State {
    /// Binds an id to an address. EADDRNOTAVAIL: it is not this host's; ENODEV: it is no NIC's;
    /// EADDRINUSE: the port is another's.
    pub(super) fn bind(&mut self, number: u32, address: SocketAddr) -> Result<()> {
        let id = self.ids.get(number).ok_or(libc::ENOENT)?;
        if id.progress != Progress::Idle {
            return Err(libc::EINVAL);
        }
        let ip = address.ip().to_canonical();
        let route = match self.own_address(ip)? {
            Some(port) => Some(self.route_from(&port)?),
            None => None,
        };
        let scope = match (is_own(ip), address) {
            (false, _) => Scope::One(ip),
            (true, SocketAddr::V4(_)) => Scope::V4,
            (true, SocketAddr::V6(_)) if id.only_v6 => Scope::V6,
            (true, SocketAddr::V6(_)) => Scope::All,
        };
        let space = id.space;
        let (port, taken) = match address.port() {
            0 => self.take_any_port(space, scope)?,
            port => (port, self.ports.take(space, port, scope)?),
        };
        let id = self.ids.get_mut(number).ok_or(libc::ENOENT)?;
        id.source = Some(SocketAddr::new(address.ip(), port));
        (id.taken, id.route, id.progress) = (Some(taken), route, Progress::Bound);
        Ok(())
    }

    /// The port of ours with this address; `None` for an address that stands for all.
    fn own_address(&self, ip: IpAddr) -> Result<Option<OwnPort>> {
        if is_own(ip) {
            return Ok(None);
        }
        if let Some(port) = self.network.own_port(ip) {
            return Ok(Some(port));
        }
        match UdpSocket::bind(SocketAddr::new(ip, 0)) {
            Ok(_) => Err(libc::ENODEV),
            Err(_) => Err(libc::EADDRNOTAVAIL),
        }
    }

    fn take_any_port(
        &mut self,
        space: PortSpace,
        scope: Scope,
    ) -> Result<(u16, crate::ports::Taken)> {
        for _ in 0..TRIES {
            let port = self.any_port();
            match self.ports.take(space, port, scope) {
                Err(libc::EADDRINUSE) => continue,
                taken => return taken.map(|taken| (port, taken)),
            }
        }
        Err(libc::EADDRNOTAVAIL)
    }

    fn any_port(&mut self) -> u16 {
        let offset = self.next_port % EPHEMERAL.len() as u16;
        self.next_port = (offset + 1) % EPHEMERAL.len() as u16;
        EPHEMERAL.start + offset
    }

    /// What is known of the way from a port of ours.
    pub(super) fn route_from(&self, port: &OwnPort) -> Result<Route> {
        let context = self.transport.context(port.nic).ok_or(libc::ENODEV)?;
        let attr = context.port(port.port).map_err(|e| e.errno())?;
        let sgid = self.network.gid(port.ip);
        let leads = |kind| matches!(kind, GidType::Infiniband | GidType::RoceV2);
        let index = attr.gids.iter().position(|e| e.gid == sgid && leads(e.kind));
        Ok(Route {
            nic: port.nic,
            port: port.port,
            sgid_index: index.ok_or(libc::ENODEV)? as u8,
            sgid: sgid.0,
            dgid: [0; 16],
            mtu: attr.active_mtu as u8,
        })
    }

    /// Finds the port of ours that leads to an address. What comes of it is an event.
    pub(super) fn resolve(
        &mut self,
        number: u32,
        source: Option<SocketAddr>,
        destination: SocketAddr,
    ) -> Result<()> {
        let progress = self.ids.get(number).ok_or(libc::ENOENT)?.progress;
        match (progress, source) {
            (Progress::Idle, Some(source)) => self.bind(number, source)?,
            (Progress::Idle, None) => {
                // Only this process knows the port: nobody else can be asked for it.
                let mut source = any_like(destination);
                source.set_port(self.any_port());
                let id = self.ids.get_mut(number).ok_or(libc::ENOENT)?;
                (id.source, id.progress) = (Some(source), Progress::Bound);
            }
            (Progress::Bound, _) => {}
            _ => return Err(libc::EINVAL),
        }
        let id = self.ids.get_mut(number).ok_or(libc::ENOENT)?;
        id.progress = Progress::AddressQuery;
        let known = !is_own(destination.ip()) || {
            let (space, port) = (id.space, destination.port());
            self.listener_behind_loopback(space, port).is_some()
        };
        match known {
            true => self.resolved(number, destination),
            false => self.wait_for_host(number, destination),
        }
        Ok(())
    }

    /// Tells a program the way to an address, or that there is none.
    pub(super) fn resolved(&mut self, number: u32, destination: SocketAddr) {
        let found = self.find_route(number, destination);
        let Some(id) = self.ids.get_mut(number) else { return };
        let (event, status) = match found {
            Ok((route, from, target)) => {
                let port = id.source.map_or(0, |source| source.port());
                id.source = Some(SocketAddr::new(from, port));
                (id.destination, id.route) = (Some(destination), Some(route));
                id.target = Some(target);
                id.progress = Progress::AddressResolved;
                (ADDR_RESOLVED, 0)
            }
            Err(errno) => {
                // The program may ask for another address.
                id.progress = Progress::Bound;
                (ADDR_ERROR, -errno)
            }
        };
        self.tell_plain(number, event, status);
    }

    /// The way to an address, the address that it begins at, and the NIC's address at its end.
    fn find_route(&self, number: u32, destination: SocketAddr) -> Result<(Route, IpAddr, IpAddr)> {
        let id = self.ids.get(number).ok_or(libc::ENOENT)?;
        let ip = destination.ip().to_canonical();
        let ip = match is_own(ip) {
            true => self.behind_loopback(id.space, destination.port()).ok_or(libc::ENODEV)?,
            false => ip,
        };
        let place = self.network.locate(ip).ok_or_else(|| nobody(ip))?;
        let bound = id.route.map(|route| (route.nic, route.port));
        let port = match bound {
            Some((nic, port)) => {
                let own = self.network.own().iter();
                own.copied().find(|own| (own.nic, own.port) == (nic, port))
            }
            None => self.choose_port(ip, &place),
        };
        let port = port.ok_or(libc::ENODEV)?;
        let dgid = self.network.gid(ip);
        let route = Route { dgid: dgid.0, ..self.route_from(&port)? };
        // The source is told in the family of the destination.
        let from = match (destination.ip(), port.ip) {
            (IpAddr::V6(_), IpAddr::V4(v4)) => v4.to_ipv6_mapped().into(),
            (_, ip) => ip,
        };
        Ok((route, from, ip))
    }

    /// The address of a NIC that stands behind the loopback address: of the host that listens at
    /// that port, this one first. The hosts of an emulated network share that address, for TCP, too.
    fn behind_loopback(&self, space: PortSpace, port: u16) -> Option<IpAddr> {
        let listener = self.listener_behind_loopback(space, port);
        listener.or_else(|| self.network.address(self.network.host(), self.working()?.nic))
    }

    /// The same; `None` if nobody listens.
    pub(super) fn listener_behind_loopback(&self, space: PortSpace, port: u16) -> Option<IpAddr> {
        let nic = self.working()?.nic;
        self.network.hosts().into_iter().find_map(|host| {
            let ip = self.network.address(&host, nic)?;
            self.ports.listener(&host, space, port, ip).map(|_| ip)
        })
    }

    /// The first port of ours that works, or else the first.
    fn working(&self) -> Option<OwnPort> {
        let own = self.network.own();
        own.iter().find(|own| self.network.works(own)).or(own.first()).copied()
    }

    /// Chooses a port of ours that leads there, on the same rail if there is one. Its NIC must work,
    /// or must have carried connections of this program: the program creates all its connections in
    /// the protection domain of one device, and their queue pairs fail over to other NICs.
    fn choose_port(&self, ip: IpAddr, place: &Place) -> Option<OwnPort> {
        let Place::Host(_, rail) = place else {
            let own = self.network.own();
            let like = |port: &&OwnPort| port.ip.is_ipv4() == ip.is_ipv4();
            return self.network.route(ip).or_else(|| own.iter().find(like).copied());
        };
        let own: Vec<OwnPort> =
            self.network.own().iter().filter(|p| p.port == 1).copied().collect();
        let count = own.len().max(1);
        let in_turn = || (0..count).filter_map(|step| own.get((rail + step) % count)).copied();
        let usable = |port: &OwnPort| self.used.contains(&port.nic) || self.network.works(port);
        in_turn().find(usable).or_else(|| in_turn().next())
    }

    /// There is one way to each peer, which is known already.
    pub(super) fn resolve_route(&mut self, number: u32) -> Result<()> {
        let id = self.ids.get_mut(number).ok_or(libc::ENOENT)?;
        if id.progress != Progress::AddressResolved {
            return Err(libc::EINVAL);
        }
        id.progress = Progress::RouteResolved;
        self.tell_plain(number, ROUTE_RESOLVED, 0);
        Ok(())
    }

    /// `struct rdma_ucm_query_route_resp`.
    pub(super) fn query_route(&self, number: u32) -> Result<Vec<u8>> {
        let id = self.ids.get(number).ok_or(libc::ENOENT)?;
        let out = Answer::default().u64(self.guid(id));
        let out = match &id.route {
            Some(route) => path_record(out, route, id.traffic_class),
            None => out.field(&[], 64),
        };
        let paths = u32::from(has_path(id));
        let out = out.field(&[], 64).sockaddr_in6(id.source).sockaddr_in6(id.destination);
        let (nic, port) = id.route.map_or((0, 0), |route| (route.nic, route.port));
        Ok(out.u32(paths).u8s(&[port, 0, 0, 0]).u32(nic as u32).u32(0).0)
    }

    /// `struct rdma_ucm_query_addr_resp`, or `rdma_ucm_query_path_resp`.
    pub(super) fn query(&self, number: u32, what: Query) -> Result<Vec<u8>> {
        let id = self.ids.get(number).ok_or(libc::ENOENT)?;
        if what == Query::Path {
            let paths = u32::from(has_path(id));
            let out = Answer::default().u32(paths).u32(0);
            return Ok(match id.route.as_ref().filter(|_| paths > 0) {
                Some(route) => wire_path(out, route, id.traffic_class).0,
                None => out.0,
            });
        }
        let addresses = match what {
            Query::Gid => [
                sockaddr_ib(id.route.map(|route| route.sgid)),
                sockaddr_ib(id.route.map(|route| route.dgid)),
            ],
            _ => [write_address(id.source), write_address(id.destination)],
        };
        let (nic, port) = id.route.map_or((0, 0), |route| (route.nic, route.port));
        let out = Answer::default().u64(self.guid(id)).u8s(&[port, 0]).u16(PKEY.to_be());
        let out = out.u16(addresses[0].len() as u16).u16(addresses[1].len() as u16);
        Ok(out.storage(&addresses[0]).storage(&addresses[1]).u32(nic as u32).u32(0).0)
    }

    /// The node GUID of an id's device, in network order; 0 where it has none.
    fn guid(&self, id: &Id) -> u64 {
        let device = id.route.and_then(|route| self.system.devices().get(route.nic));
        device.map_or(0, |device| device.node_guid.to_be())
    }

    /// Options of an id (`RDMA_OPTION_ID_*`), and a path that the program brings along.
    pub(super) fn set_option(
        &mut self,
        number: u32,
        level: u32,
        name: u32,
        value: &[u8],
    ) -> Result<()> {
        let id = self.ids.get_mut(number).ok_or(libc::ENOENT)?;
        let byte = || value.first().copied().filter(|_| value.len() == 1).ok_or(libc::EINVAL);
        let int = || {
            let bytes: Option<[u8; 4]> = value.try_into().ok();
            bytes.map(i32::from_ne_bytes).ok_or(libc::EINVAL)
        };
        match (level, name) {
            (0, 0) => id.traffic_class = byte()?,
            // A port is given back when its id ends: nothing lingers that could be used again.
            (0, 1) => int().map(drop)?,
            (0, 2) => id.only_v6 = int()? != 0,
            (0, 3) => id.ack_timeout = Some(byte()?.min(31)),
            (1, 0) => return self.resolve_route(number),
            _ => return Err(libc::ENOSYS),
        }
        Ok(())
    }
}

/// Whether an address stands for this host, whatever addresses it has.
fn is_own(ip: IpAddr) -> bool {
    ip.to_canonical().is_unspecified() || ip.is_loopback_of_this_host()
}

/// Why there is no way to an address that is nobody's: in a network of NICs nobody answers; beyond
/// it no NIC leads there.
fn nobody(ip: IpAddr) -> i32 {
    match ip.is_loopback() {
        true => libc::EHOSTUNREACH,
        false => libc::ENODEV,
    }
}

fn has_path(id: &Id) -> bool {
    matches!(id.progress, Progress::RouteResolved | Progress::Connecting) && id.route.is_some()
}

/// `struct ib_user_path_rec`.
fn path_record(out: Answer, route: &Route, traffic_class: u8) -> Answer {
    const EXACTLY: u8 = 2;
    out.u8s(&route.dgid)
        .u8s(&route.sgid)
        .u32(0)
        .u32(0)
        .u32(0)
        .u32(1)
        .u32(route.mtu.into())
        .u16(PKEY.to_be())
        .u8s(&[HOP_LIMIT, traffic_class, 1, 0, EXACTLY, EXACTLY, RATE, EXACTLY])
        .u8s(&[PACKET_LIFE_TIME, 0])
}

/// `struct ib_path_rec_data`: a path record as it is on the wire.
fn wire_path(out: Answer, route: &Route, traffic_class: u8) -> Answer {
    const PRIMARY_BOTH_WAYS: u32 = 1 | 2 | 4;
    const EXACTLY: u8 = 2 << 6;
    out.u32(PRIMARY_BOTH_WAYS)
        .u32(0)
        .field(&[], 8)
        .u8s(&route.dgid)
        .u8s(&route.sgid)
        .u32(0)
        .u32(u32::from(HOP_LIMIT).to_be())
        .u8s(&[traffic_class, 0x80 | 1])
        .u16(PKEY.to_be())
        .u16(0)
        .u8s(&[EXACTLY | route.mtu, EXACTLY | RATE, EXACTLY | PACKET_LIFE_TIME, 0])
        .field(&[], 6)
}

/// `struct sockaddr_ib` of a GID.
fn sockaddr_ib(gid: Option<[u8; 16]>) -> Vec<u8> {
    const AF_IB: u16 = 27;
    let gid = gid.unwrap_or_default();
    let out = Answer::default().u16(AF_IB).u16(PKEY.to_be()).u32(0).u8s(&gid);
    out.u64(0).u64(0).u64(0).0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_lie_as_the_headers_have_them() {
        let route = Route { nic: 0, port: 1, sgid_index: 0, sgid: [1; 16], dgid: [2; 16], mtu: 5 };
        let record = path_record(Answer::default(), &route, 8).0;
        assert_eq!(
            (record.len(), &record[..16], &record[16..32]),
            (64, &[2; 16][..], &[1; 16][..])
        );
        assert_eq!(record[48..], [5, 0, 0, 0, 255, 255, 64, 8, 1, 0, 2, 2, 16, 2, 16, 0][..]);
        let wire = wire_path(Answer::default(), &route, 8).0;
        assert_eq!((wire.len(), wire[8 + 8..8 + 24] == [2; 16]), (72, true));
        assert_eq!(sockaddr_ib(Some([7; 16])).len(), 48);
    }
}
