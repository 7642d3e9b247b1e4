//! The kernel over rtnetlink: notifications, whole tables, operations on tc rules, and routes.
//!
//! One socket is subscribed to notifications and only says that something has changed, or that
//! notifications were lost. The other asks and is answered. Both are plain blocking sockets with
//! deadlines: what the reconciler has to know (a torn dump, a message for each failed operation) is
//! what asynchronous wrappers hide.

mod policies;
mod routes;
mod rules;
mod tables;

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Error, ErrorKind};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use netlink_packet_core::{
    NetlinkHeader, NetlinkMessage, NetlinkPayload, NLM_F_ACK, NLM_F_DUMP, NLM_F_DUMP_INTR,
    NLM_F_REQUEST,
};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_sys::{protocols::NETLINK_ROUTE, Socket, SocketAddr};
use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::net::netdevice::{index_to_name, name_to_index};
pub use unbroken_edge_rules::Dump;
use unbroken_edge_rules::{Op, Settings, Table};

use crate::routes::{difference, Policy, RouteSet, Routes, FRR, OURS};

/// RTNLGRP_LINK, _NEIGH, _TC, _IPV4_ROUTE, _IPV4_RULE.
const GROUPS: [u32; 5] = [1, 3, 4, 7, 8];
/// RTNLGRP_TUNNEL, which is missing in old kernels.
const TUNNELS: u32 = 35;
const BUFFER_BYTES: usize = 4 << 20;
/// Operations that are sent before their answers are read; more answers would not fit into the
/// socket.
const WINDOW: usize = 64;
const ANSWER: Duration = Duration::from_secs(5);
const LARGEST: usize = 1 << 16;
/// How the kernel's EEXIST begins as text.
const EXISTS: &str = "File exists";
const NLMSG_ALIGN: usize = 4;
/// Where a message about a route has its protocol: in struct rtmsg, behind struct nlmsghdr.
const PROTOCOL: usize = 16 + 5;
/// How often routes are read that change meanwhile; then what was read must do, and their
/// notifications ask for another look.
const TRIES: usize = 3;

/// What was heard since the last look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Heard {
    /// Devices, forwarding entries or rules have changed.
    pub tables: bool,
    /// Routes have changed.
    pub routes: bool,
    /// Of them some of bgpd's.
    pub bgp: bool,
    /// Of them some of our own.
    pub own: bool,
    /// Rules that lead to tables of routes have changed.
    pub policies: bool,
    /// Notifications were lost.
    pub overrun: bool,
}

/// The socket of notifications.
pub struct Notifications(Socket);

impl Notifications {
    /// Subscribes.
    pub fn open() -> Result<Notifications, Error> {
        let mut socket = Socket::new(NETLINK_ROUTE)?;
        socket.bind_auto()?;
        socket.set_rx_buf_sz(BUFFER_BYTES as u32)?;
        for group in GROUPS {
            socket.add_membership(group)?;
        }
        let _ = socket.add_membership(TUNNELS);
        socket.set_non_blocking(true)?;
        Ok(Notifications(socket))
    }

    /// Reads all there is. What it says is not looked at, beyond its kind.
    pub fn drain(&mut self) -> Result<Heard, Error> {
        let mut heard = Heard::default();
        let mut buffer = Vec::with_capacity(LARGEST);
        loop {
            buffer.clear();
            match self.0.recv(&mut buffer, 0) {
                Ok(_) => {
                    // struct nlmsghdr: length, type
                    match buffer.get(4..6).map_or(0, |b| u16::from_ne_bytes([b[0], b[1]])) {
                        // RTM_NEWROUTE to RTM_GETROUTE
                        24..=26 => {
                            heard.routes = true;
                            let protocol = buffer.get(PROTOCOL).copied();
                            heard.bgp |= protocol == Some(FRR.protocol);
                            heard.own |= protocol == Some(OURS);
                        }
                        // RTM_NEWRULE to RTM_GETRULE
                        32..=34 => heard.policies = true,
                        _ => heard.tables = true,
                    }
                }
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(heard),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if e.raw_os_error() == Some(rustix::io::Errno::NOBUFS.raw_os_error()) => {
                    (heard.overrun, heard.tables) = (true, true);
                    (heard.routes, heard.policies) = (true, true);
                }
                Err(e) => return Err(e),
            }
        }
    }
}

impl AsFd for Notifications {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// The socket of questions.
pub struct Kernel {
    socket: Socket,
    sequence: u32,
    /// The devices that filters can be attached to, as of the last dump of them.
    clsact: Vec<u32>,
}

impl Kernel {
    /// Opens it.
    pub fn open() -> Result<Kernel, Error> {
        let mut socket = Socket::new(NETLINK_ROUTE)?;
        socket.bind_auto()?;
        socket.connect(&SocketAddr::new(0, 0))?;
        socket.set_rx_buf_sz(BUFFER_BYTES as u32)?;
        // Answers to operations need not repeat the operation.
        let _ = socket.set_cap_ack(true);
        socket.set_non_blocking(true)?;
        Ok(Kernel { socket, sequence: 0, clsact: Vec::new() })
    }

    /// Dumps a table.
    pub fn dump(&mut self, table: Table, settings: &Settings) -> Dump {
        let (dump, interrupted) = match self.try_dump(table, settings) {
            Ok(both) => both,
            Err(e) => return Dump::Failed(e.to_string()),
        };
        if interrupted {
            Dump::Interrupted(Box::new(dump))
        } else {
            dump
        }
    }

    fn try_dump(&mut self, table: Table, settings: &Settings) -> Result<(Dump, bool), Error> {
        Ok(match table {
            Table::Links => {
                let (all, torn) = self.ask(tables::links_request())?;
                (Dump::Links(all.iter().filter_map(tables::link).collect()), torn)
            }
            Table::Fdb => {
                let (all, torn) = self.ask(tables::fdb_request())?;
                (Dump::Fdb(all.iter().filter_map(tables::fdb_entry).collect()), torn)
            }
            Table::Clsact => {
                let (all, torn) = self.ask(rules::clsact_request())?;
                self.clsact = all.iter().filter_map(rules::clsact).collect();
                (Dump::Clsact(self.clsact.clone()), torn)
            }
            Table::Filters => {
                let (mut filters, mut torn) = (Vec::new(), false);
                for ifindex in self.clsact.clone() {
                    let (all, also_torn) =
                        self.ask(rules::filters_request(ifindex, settings.own.priority))?;
                    torn |= also_torn;
                    filters.extend(all.iter().filter_map(rules::filter));
                }
                (Dump::Filters(filters), torn)
            }
            Table::Actions => {
                let (mut actions, mut torn) = (Vec::new(), false);
                for kind in rules::KINDS {
                    let (all, also_torn) = self.ask(rules::actions_request(kind))?;
                    torn |= also_torn;
                    all.iter().for_each(|m| rules::actions(m, &mut actions));
                }
                (Dump::Actions(actions), torn)
            }
        })
    }

    /// Carries out all operations in order, also behind one that fails; gives the failures with
    /// their places.
    pub fn apply(
        &mut self,
        ops: &[Op],
        settings: &Settings,
    ) -> Result<Vec<(usize, String)>, Error> {
        self.carry_out(ops.iter().map(|op| rules::operation(op, settings)))
    }

    /// The routes of a set that lead over gateways.
    pub fn routes(&mut self, set: &RouteSet) -> Result<Routes, Error> {
        let mut all = Vec::new();
        for _ in 0..TRIES {
            let (read, torn) = self.ask(routes::request())?;
            all = read;
            if !torn {
                break;
            }
        }
        let mut names = BTreeMap::new();
        let mut name = |index: u32| -> Option<String> {
            names.entry(index).or_insert_with(|| index_to_name(&self.socket, index).ok()).clone()
        };
        Ok(all.iter().filter_map(|message| routes::route(message, set, &mut name)).collect())
    }

    /// Makes the routes of a set these. One that fails (a device has just gone) does not stop the
    /// others. A route of somebody else's is never replaced: where it is in the way the error says
    /// so, after the others are made.
    pub fn make_routes(&mut self, set: &RouteSet, wanted: &Routes) -> Result<(), Error> {
        let present = self.routes(set)?;
        let changes = difference(wanted, &present);
        let mut index = |name: &str| name_to_index(&self.socket, name).ok();
        let messages = changes.iter().filter_map(|(to, hops)| {
            let fresh = !present.contains_key(to);
            routes::change(set, to, hops.as_ref(), fresh, &mut index).map(|m| (to, m))
        });
        let (names, messages): (Vec<_>, Vec<_>) = messages.unzip();
        let failures = self.carry_out(messages)?;
        let taken = failures.iter().find(|(_, why)| why.starts_with(EXISTS));
        match taken.and_then(|(place, _)| names.get(*place)) {
            Some(to) => Err(Error::new(
                ErrorKind::AlreadyExists,
                format!("there is a foreign route to {to} in table {}; it stays", set.table),
            )),
            None => Ok(()),
        }
    }

    /// Our rules that lead to tables of routes.
    pub(crate) fn policies(&mut self) -> Result<BTreeSet<Policy>, Error> {
        let (all, _) = self.ask(policies::request())?;
        Ok(all.iter().filter_map(policies::policy).collect())
    }

    /// Makes our rules these; gives how many were missing.
    pub(crate) fn make_policies(&mut self, wanted: &BTreeSet<Policy>) -> Result<usize, Error> {
        let present = self.policies()?;
        let missing: Vec<_> = wanted.difference(&present).collect();
        let old = present.difference(wanted).map(|policy| policies::change(policy, false));
        let new = missing.iter().map(|policy| policies::change(policy, true));
        let failures = self.carry_out(new.chain(old).collect::<Vec<_>>())?;
        match failures.into_iter().next() {
            Some((_, why)) => Err(Error::other(why)),
            None => Ok(missing.len()),
        }
    }

    /// Sends messages with their flags, some at a time; gives the failures with their places.
    fn carry_out(
        &mut self,
        all: impl IntoIterator<Item = (RouteNetlinkMessage, u16)>,
    ) -> Result<Vec<(usize, String)>, Error> {
        let (mut failures, mut before) = (Vec::new(), 0);
        let mut all = all.into_iter().peekable();
        while all.peek().is_some() {
            let first = self.sequence.wrapping_add(1);
            let (mut buffer, mut sent) = (Vec::new(), 0);
            for (message, flags) in all.by_ref().take(WINDOW) {
                self.push(&mut buffer, message, flags | NLM_F_ACK);
                sent += 1;
            }
            self.socket.send(&buffer, 0)?;
            let mut answered = 0;
            while answered < sent {
                for message in self.receive()? {
                    let NetlinkPayload::Error(error) = message.payload else { continue };
                    let place = message.header.sequence_number.wrapping_sub(first) as usize;
                    if place < sent {
                        answered += 1;
                        if error.code.is_some() {
                            failures.push((before + place, error.to_io().to_string()));
                        }
                    }
                }
            }
            before += sent;
        }
        Ok(failures)
    }

    fn push(&mut self, buffer: &mut Vec<u8>, message: RouteNetlinkMessage, flags: u16) {
        self.sequence = self.sequence.wrapping_add(1);
        let mut header = NetlinkHeader::default();
        (header.flags, header.sequence_number) = (flags | NLM_F_REQUEST, self.sequence);
        let mut whole = NetlinkMessage::new(header, NetlinkPayload::InnerMessage(message));
        whole.finalize();
        let start = buffer.len();
        buffer.resize(start + whole.buffer_len().next_multiple_of(NLMSG_ALIGN), 0);
        whole.serialize(&mut buffer[start..]);
    }

    /// Asks for a dump: all messages, and whether the table changed meanwhile.
    fn ask(
        &mut self,
        request: RouteNetlinkMessage,
    ) -> Result<(Vec<RouteNetlinkMessage>, bool), Error> {
        let mut buffer = Vec::new();
        self.push(&mut buffer, request, NLM_F_DUMP);
        self.socket.send(&buffer, 0)?;
        let (mut all, mut torn) = (Vec::new(), false);
        loop {
            for message in self.receive()? {
                if message.header.sequence_number != self.sequence {
                    continue;
                }
                torn |= message.header.flags & NLM_F_DUMP_INTR != 0;
                match message.payload {
                    NetlinkPayload::Done(_) => return Ok((all, torn)),
                    NetlinkPayload::Error(error) if error.code.is_some() => {
                        return Err(error.to_io())
                    }
                    NetlinkPayload::InnerMessage(inner) => all.push(inner),
                    _ => {}
                }
            }
        }
    }

    /// The next messages; those of others that this library cannot read are left out.
    fn receive(&mut self) -> Result<Vec<NetlinkMessage<RouteNetlinkMessage>>, Error> {
        let deadline = Instant::now() + ANSWER;
        let mut buffer = Vec::with_capacity(LARGEST);
        loop {
            match self.socket.recv(&mut buffer, 0) {
                Ok(_) => break,
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return Err(Error::new(ErrorKind::TimedOut, "the kernel does not answer"));
                    }
                    wait(&mut [PollFd::new(&self.socket, PollFlags::IN)], Some(left))?;
                }
                Err(e) => return Err(e),
            }
        }
        let (mut messages, mut rest) = (Vec::new(), &buffer[..]);
        while rest.len() >= 16 {
            let length = u32::from_ne_bytes([rest[0], rest[1], rest[2], rest[3]]) as usize;
            if length < 16 || length > rest.len() {
                break;
            }
            messages.extend(NetlinkMessage::deserialize(&rest[..length]));
            rest = &rest[length.next_multiple_of(NLMSG_ALIGN).min(rest.len())..];
        }
        Ok(messages)
    }
}

/// Waits until one of the files has something, at most for a time.
pub fn wait(files: &mut [PollFd<'_>], longest: Option<Duration>) -> Result<(), Error> {
    let time = longest
        .map(|l| Timespec { tv_sec: l.as_secs() as i64, tv_nsec: i64::from(l.subsec_nanos()) });
    match poll(files, time.as_ref()) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(e) => Err(e.into()),
    }
}
