//! Ids: what `struct rdma_cm_id` is to the kernel.

use crate::abi::ConnParam;
use crate::ports::Taken;
use std::collections::{BTreeSet, HashMap};
use std::net::{IpAddr, SocketAddr};
use unbroken_cm::{ConnId, PortSpace};
use unbroken_runtime::ProcessName;

/// Ids of a process: librdmacm has no room for more.
const MAX_IDS: usize = 65_536;

/// How far an id is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Progress {
    /// It has no address.
    Idle,
    Bound,
    /// It waits for the way to an address.
    AddressQuery,
    AddressResolved,
    RouteResolved,
    Listening,
    /// It has a connection, or had one.
    Connecting,
}

/// The way from a port of ours to a peer's.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Route {
    pub(crate) nic: usize,
    pub(crate) port: u8,
    pub(crate) sgid_index: u8,
    pub(crate) sgid: [u8; 16],
    /// Zeros while nobody is named.
    pub(crate) dgid: [u8; 16],
    /// The code of the MTU.
    pub(crate) mtu: u8,
}

/// What the QP of a connection is to be brought to.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Agreed {
    pub(crate) dest_qpn: u32,
    pub(crate) rq_psn: u32,
    pub(crate) sq_psn: u32,
    pub(crate) responder_resources: u8,
    pub(crate) initiator_depth: u8,
    pub(crate) retry_count: u8,
    pub(crate) rnr_retry_count: u8,
    pub(crate) timeout: u8,
    /// Both ends have said what they have.
    pub(crate) complete: bool,
}

/// An id.
pub(crate) struct Id {
    /// What the program calls it; 0 until it has said so.
    pub(crate) uid: u64,
    /// The channel that its events go to.
    pub(crate) channel: u64,
    pub(crate) space: PortSpace,
    pub(crate) progress: Progress,
    pub(crate) source: Option<SocketAddr>,
    pub(crate) destination: Option<SocketAddr>,
    /// The NIC's address that the destination stands for.
    pub(crate) target: Option<IpAddr>,
    pub(crate) route: Option<Route>,
    pub(crate) taken: Option<Taken>,
    pub(crate) connection: Option<ConnId>,
    /// The process at the other end, where it shares the runtime folder.
    pub(crate) peer: Option<ProcessName>,
    pub(crate) agreed: Agreed,
    /// What the program has connected or accepted with.
    pub(crate) param: ConnParam,
    /// The id that listened for it, while the program has not been told.
    pub(crate) listener: Option<u32>,
    /// Requests that the program may leave waiting, and those that wait.
    pub(crate) backlog: u32,
    pub(crate) waiting: u32,
    /// Events that the program was given.
    pub(crate) reported: u32,
    /// IPv6 alone: its wildcard stands for no IPv4 address.
    pub(crate) only_v6: bool,
    /// The program has chosen the ACK timeout.
    pub(crate) ack_timeout: Option<u8>,
    pub(crate) traffic_class: u8,
}

impl Id {
    pub(crate) fn new(uid: u64, channel: u64, space: PortSpace) -> Id {
        Id {
            uid,
            channel,
            space,
            progress: Progress::Idle,
            source: None,
            destination: None,
            target: None,
            route: None,
            taken: None,
            connection: None,
            peer: None,
            agreed: Agreed::default(),
            param: ConnParam::default(),
            listener: None,
            backlog: 0,
            waiting: 0,
            reported: 0,
            only_v6: false,
            ack_timeout: None,
            traffic_class: 0,
        }
    }

    /// Its QP is one for datagrams.
    pub(crate) fn is_datagram(&self) -> bool {
        matches!(self.space, PortSpace::Udp | PortSpace::Ipoib)
    }

    /// Whether it listens at that address, which is its own (2), or one of those that it stands for
    /// (1); 0: it does not.
    pub(crate) fn listens_at(&self, space: PortSpace, port: u16, ip: IpAddr) -> u8 {
        let Some(source) = self.source else { return 0 };
        if self.progress != Progress::Listening || self.space != space || source.port() != port {
            return 0;
        }
        let own = source.ip().to_canonical();
        match own {
            own if own == ip.to_canonical() => 2,
            IpAddr::V4(own) if own.is_unspecified() || own.is_loopback_of_this_host() => {
                u8::from(ip.to_canonical().is_ipv4())
            }
            IpAddr::V6(own) if own.is_unspecified() => {
                u8::from(ip.to_canonical().is_ipv6() || !self.only_v6)
            }
            IpAddr::V6(own) if own.is_loopback() => 1,
            _ => 0,
        }
    }
}

/// Loopback addresses that no emulated network uses.
pub(crate) trait Loopback {
    /// Whether it is the address that programs name their own host by.
    fn is_loopback_of_this_host(&self) -> bool;
}

impl Loopback for std::net::Ipv4Addr {
    fn is_loopback_of_this_host(&self) -> bool {
        // The emulated network is made of the others.
        *self == std::net::Ipv4Addr::LOCALHOST
    }
}

impl Loopback for IpAddr {
    fn is_loopback_of_this_host(&self) -> bool {
        match self.to_canonical() {
            IpAddr::V4(v4) => v4.is_loopback_of_this_host(),
            IpAddr::V6(v6) => v6.is_loopback(),
        }
    }
}

/// The ids of a process. A number is the lowest that is free, as the kernel gives them: librdmacm
/// keeps them in a table.
#[derive(Default)]
pub(crate) struct Ids {
    all: HashMap<u32, Id>,
    free: BTreeSet<u32>,
    by_connection: HashMap<ConnId, u32>,
}

impl Ids {
    /// Adds an id; ENOMEM where there are too many.
    pub(crate) fn add(&mut self, id: Id) -> Result<u32, i32> {
        if self.all.len() >= MAX_IDS {
            return Err(libc::ENOMEM);
        }
        let number = self.free.pop_first().unwrap_or(self.all.len() as u32);
        self.all.insert(number, id);
        Ok(number)
    }

    pub(crate) fn get(&self, number: u32) -> Option<&Id> {
        self.all.get(&number)
    }

    pub(crate) fn get_mut(&mut self, number: u32) -> Option<&mut Id> {
        self.all.get_mut(&number)
    }

    pub(crate) fn remove(&mut self, number: u32) -> Option<Id> {
        let id = self.all.remove(&number)?;
        if let Some(connection) = id.connection {
            self.by_connection.remove(&connection);
        }
        self.free.insert(number);
        Some(id)
    }

    /// The connection of an id.
    pub(crate) fn connect(&mut self, number: u32, connection: ConnId) {
        if let Some(id) = self.all.get_mut(&number) {
            if let Some(old) = id.connection.replace(connection) {
                self.by_connection.remove(&old);
            }
            self.by_connection.insert(connection, number);
        }
    }

    pub(crate) fn of_connection(&self, connection: ConnId) -> Option<u32> {
        self.by_connection.get(&connection).copied()
    }

    /// The id that listens there.
    pub(crate) fn listener(&self, space: PortSpace, port: u16, ip: IpAddr) -> Option<u32> {
        let match_of = |(number, id): (&u32, &Id)| (id.listens_at(space, port, ip), *number);
        self.all.iter().map(match_of).filter(|(how, _)| *how > 0).max().map(|(_, n)| n)
    }

    /// Whether one has something.
    pub(crate) fn any(&self, has: impl Fn(&Id) -> bool) -> bool {
        self.all.values().any(has)
    }

    /// The numbers of those that have something.
    pub(crate) fn those(&self, has: impl Fn(&Id) -> bool) -> Vec<u32> {
        self.all.iter().filter(|(_, id)| has(id)).map(|(number, _)| *number).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_used_again() {
        let mut ids = Ids::default();
        let add = || Id::new(1, 1, PortSpace::Tcp);
        let numbers: Vec<u32> = (0..3).map(|_| ids.add(add()).unwrap()).collect();
        assert_eq!(numbers, [0, 1, 2]);
        ids.remove(1);
        assert_eq!((ids.add(add()), ids.add(add())), (Ok(1), Ok(3)));
    }

    #[test]
    fn the_listener_of_an_address_goes_before_one_of_all() {
        let mut ids = Ids::default();
        let mut listen = |address: &str, only_v6| {
            let mut id = Id::new(1, 1, PortSpace::Tcp);
            id.progress = Progress::Listening;
            id.source = Some(address.parse().unwrap());
            id.only_v6 = only_v6;
            ids.add(id).unwrap()
        };
        let all = listen("0.0.0.0:7", false);
        let one = listen("127.5.1.0:7", false);
        let six = listen("[::]:8", false);
        listen("[::]:9", true);
        let find = |port, ip: &str| ids.listener(PortSpace::Tcp, port, ip.parse().unwrap());
        assert_eq!(find(7, "127.5.1.0"), Some(one));
        assert_eq!(find(7, "127.5.1.1"), Some(all));
        assert_eq!(find(7, "fd00::1"), None);
        assert_eq!((find(8, "127.5.1.1"), find(8, "fd00::1")), (Some(six), Some(six)));
        assert_eq!(find(9, "127.5.1.1"), None);
        assert_eq!(ids.listener(PortSpace::Udp, 7, "127.5.1.0".parse().unwrap()), None);
    }
}
