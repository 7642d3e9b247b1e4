//! UDP sockets of a NIC: one that receives, a few that send.
//!
//! All are non-blocking, close-on-exec, and bound to the NIC's address. The receiving one owns port
//! `4791 + slot`: binding it is how a process claims a slot of the NIC, and the kernel frees it
//! when the process ends. It takes runs of equal segments in one piece (UDP_GRO), and says how many
//! datagrams found it full (SO_RXQ_OVFL). The sending ones set don't-fragment, so that the kernel
//! gives every datagram IP id 0 and counts up through the segments of one GSO send: the ICRC covers
//! the id. (A connected socket would save the kernel a look-up, but counts ids from a random
//! number.)

mod control;

pub(crate) use control::Marks;

use control::Control;
use std::io;
use std::mem::{size_of, zeroed, MaybeUninit};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use unbroken_wire::ROCE_PORT;

/// Slots of a NIC: processes that may have it open at once.
pub(crate) const SLOTS: u16 = 256;
/// Receive buffer asked for, in bytes.
const RCVBUF: libc::c_int = 8 << 20;
/// Send buffer asked for, in bytes.
const SNDBUF: libc::c_int = 4 << 20;
/// Datagrams (or runs of segments) taken in one system call.
pub(crate) const RX_DATAGRAMS: usize = 8;
/// The longest datagram or run of segments.
const RX_BYTES: usize = 65_536;

const UDP_GRO: libc::c_int = 104;

/// A socket address as the kernel wants it.
#[derive(Clone, Copy)]
pub(crate) struct RawAddr {
    storage: libc::sockaddr_in6,
    len: libc::socklen_t,
}

impl RawAddr {
    /// No address yet, with room for one.
    pub(crate) fn empty() -> RawAddr {
        // SAFETY: sockaddr_in6 is plain integers, for which zero is valid.
        RawAddr { storage: unsafe { zeroed() }, len: size_of::<libc::sockaddr_in6>() as _ }
    }

    pub(crate) fn new(addr: SocketAddr) -> RawAddr {
        let mut raw = RawAddr::empty();
        match addr {
            SocketAddr::V4(a) => {
                let v4 = libc::sockaddr_in {
                    sin_family: libc::AF_INET as _,
                    sin_port: a.port().to_be(),
                    sin_addr: libc::in_addr { s_addr: u32::from(*a.ip()).to_be() },
                    sin_zero: [0; 8],
                };
                // SAFETY: sockaddr_in is smaller than sockaddr_in6, needs no more alignment, and
                // both are plain integers.
                unsafe { (&raw mut raw.storage).cast::<libc::sockaddr_in>().write(v4) };
                raw.len = size_of::<libc::sockaddr_in>() as _;
            }
            SocketAddr::V6(a) => {
                raw.storage.sin6_family = libc::AF_INET6 as _;
                raw.storage.sin6_port = a.port().to_be();
                raw.storage.sin6_addr.s6_addr = a.ip().octets();
                raw.storage.sin6_scope_id = a.scope_id();
            }
        }
        raw
    }

    /// The address that the kernel filled in; `None` for families other than IP.
    pub(crate) fn get(&self) -> Option<SocketAddr> {
        match i32::from(self.storage.sin6_family) {
            libc::AF_INET => {
                // SAFETY: the family says that the kernel wrote a sockaddr_in, which fits (see
                // `new`).
                let v4 = unsafe { (&raw const self.storage).cast::<libc::sockaddr_in>().read() };
                let ip = Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr));
                Some(SocketAddrV4::new(ip, u16::from_be(v4.sin_port)).into())
            }
            libc::AF_INET6 => {
                let ip = Ipv6Addr::from(self.storage.sin6_addr.s6_addr);
                Some(
                    SocketAddrV6::new(
                        ip,
                        u16::from_be(self.storage.sin6_port),
                        0,
                        self.storage.sin6_scope_id,
                    )
                    .into(),
                )
            }
            _ => None,
        }
    }
}

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

fn set_option(
    fd: RawFd,
    level: libc::c_int,
    name: libc::c_int,
    value: libc::c_int,
) -> io::Result<()> {
    // SAFETY: the option's value is a live local int of the length given.
    check(unsafe {
        libc::setsockopt(fd, level, name, (&raw const value).cast(), size_of::<libc::c_int>() as _)
    })
    .map(|_| ())
}

fn get_option(fd: RawFd, level: libc::c_int, name: libc::c_int) -> io::Result<libc::c_int> {
    let mut value: libc::c_int = 0;
    let mut len = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: value and length are live locals of matching size.
    check(unsafe { libc::getsockopt(fd, level, name, (&raw mut value).cast(), &raw mut len) })?;
    Ok(value)
}

/// A descriptor that a forked child closes.
struct Fd(OwnedFd);

impl Fd {
    fn new(fd: OwnedFd) -> Fd {
        unbroken_process::close_in_child(fd.as_raw_fd());
        Fd(fd)
    }
}

impl Drop for Fd {
    fn drop(&mut self) {
        unbroken_process::keep_in_child(self.0.as_raw_fd());
    }
}

/// A non-blocking UDP socket bound to an address; gives the port too.
fn bound(ip: IpAddr, port: u16) -> io::Result<(Fd, u16)> {
    let family = if ip.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    // SAFETY: no pointers.
    let fd = check(unsafe {
        libc::socket(family, libc::SOCK_DGRAM | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC, 0)
    })?;
    // SAFETY: `fd` was just made and is owned by nobody else.
    let fd = Fd::new(unsafe { OwnedFd::from_raw_fd(fd) });
    let addr = RawAddr::new(SocketAddr::new(ip, port));
    // SAFETY: a live address of its own length.
    check(unsafe { libc::bind(fd.0.as_raw_fd(), (&raw const addr.storage).cast(), addr.len) })?;
    let mut got = RawAddr::empty();
    // SAFETY: a live buffer of the length given.
    check(unsafe {
        libc::getsockname(fd.0.as_raw_fd(), (&raw mut got.storage).cast(), &raw mut got.len)
    })?;
    let port = got.get().map_or(port, |a| a.port());
    Ok((fd, port))
}

/// The receiving socket: a slot of the NIC.
pub(crate) struct RxSocket {
    fd: Fd,
    slot: u16,
    rcvbuf: usize,
}

impl RxSocket {
    /// Claims the first free slot of the NIC, on all its ports; gives a socket for each.
    pub(crate) fn claim(ips: &[IpAddr]) -> io::Result<Vec<RxSocket>> {
        for slot in 0..SLOTS {
            match ips.iter().map(|ip| bound(*ip, ROCE_PORT + slot)).collect::<io::Result<Vec<_>>>()
            {
                Ok(all) => {
                    return all.into_iter().map(|(fd, _)| RxSocket::configure(fd, slot)).collect()
                }
                Err(e) if e.kind() == io::ErrorKind::AddrInUse => continue,
                Err(e) => return Err(e),
            }
        }
        Err(io::Error::new(
            io::ErrorKind::AddrInUse,
            format!(
                "{SLOTS} processes have it open already (UDP ports {ROCE_PORT} to {})",
                ROCE_PORT + SLOTS - 1
            ),
        ))
    }

    fn configure(fd: Fd, slot: u16) -> io::Result<RxSocket> {
        let raw = fd.0.as_raw_fd();
        if set_option(raw, libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, RCVBUF).is_err() {
            set_option(raw, libc::SOL_SOCKET, libc::SO_RCVBUF, RCVBUF)?;
        }
        // Without GRO segments arrive one by one, which is slower and not wrong.
        let _ = set_option(raw, libc::SOL_UDP, UDP_GRO, 1);
        // Without it datagrams that find no room are lost uncounted.
        let _ = set_option(raw, libc::SOL_SOCKET, libc::SO_RXQ_OVFL, 1);
        // The kernel doubles what is asked for, for its own bookkeeping.
        let rcvbuf = get_option(raw, libc::SOL_SOCKET, libc::SO_RCVBUF)? as usize / 2;
        Ok(RxSocket { fd, slot, rcvbuf })
    }

    /// From now on each datagram comes with its marks. Where that cannot be, it has the usual ones.
    pub(crate) fn tell_marks(&self, ip: IpAddr) {
        let (level, names) = match ip {
            IpAddr::V4(_) => (libc::IPPROTO_IP, [libc::IP_RECVTOS, libc::IP_RECVTTL]),
            IpAddr::V6(_) => (libc::IPPROTO_IPV6, [libc::IPV6_RECVTCLASS, libc::IPV6_RECVHOPLIMIT]),
        };
        for name in names {
            let _ = set_option(self.as_raw_fd(), level, name, 1);
        }
    }

    pub(crate) fn slot(&self) -> u16 {
        self.slot
    }

    /// Bytes of packets that the socket holds.
    pub(crate) fn rcvbuf(&self) -> usize {
        self.rcvbuf
    }
}

impl AsRawFd for RxSocket {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.0.as_raw_fd()
    }
}

/// A sending socket with a port of its own.
pub(crate) struct TxSocket {
    fd: Fd,
    addr: SocketAddr,
}

impl TxSocket {
    pub(crate) fn new(ip: IpAddr) -> io::Result<TxSocket> {
        let (fd, port) = bound(ip, 0)?;
        let raw = fd.0.as_raw_fd();
        if ip.is_ipv4() {
            set_option(raw, libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, libc::IP_PMTUDISC_DO)?;
        } else {
            set_option(raw, libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER, libc::IPV6_PMTUDISC_DO)?;
        }
        if set_option(raw, libc::SOL_SOCKET, libc::SO_SNDBUFFORCE, SNDBUF).is_err() {
            set_option(raw, libc::SOL_SOCKET, libc::SO_SNDBUF, SNDBUF)?;
        }
        Ok(TxSocket { fd, addr: SocketAddr::new(ip, port) })
    }

    /// Where its packets come from.
    pub(crate) fn addr(&self) -> SocketAddr {
        self.addr
    }
}

impl AsRawFd for TxSocket {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.0.as_raw_fd()
    }
}

/// A datagram, or a run of segments from one sender that the kernel put together.
pub(crate) struct Datagram<'a> {
    pub(crate) src: SocketAddr,
    /// Bytes of each segment; the last may be shorter.
    pub(crate) segment: usize,
    pub(crate) bytes: &'a [u8],
    /// See [`RxSocket::tell_marks`].
    pub(crate) marks: Marks,
}

/// Buffers for receiving.
pub(crate) struct RxRing {
    bytes: Box<[u8]>,
    names: [RawAddr; RX_DATAGRAMS],
    /// Room for UDP_GRO, SO_RXQ_OVFL once something was lost, and two marks.
    controls: [[Control; 4]; RX_DATAGRAMS],
    got: [Got; RX_DATAGRAMS],
    /// How many to ask for next.
    ask: usize,
    full: bool,
    may_have_more: bool,
    /// Datagrams that found the socket full, as the kernel counts them, and as [`RxRing::overruns`]
    /// last said.
    lost: u32,
    told: u32,
}

#[derive(Clone, Copy)]
struct Got {
    bytes: usize,
    segment: usize,
    marks: Marks,
}

impl RxRing {
    pub(crate) fn new() -> RxRing {
        RxRing {
            bytes: vec![0; RX_DATAGRAMS * RX_BYTES].into_boxed_slice(),
            names: [RawAddr::empty(); RX_DATAGRAMS],
            controls: [[Control::empty(); 4]; RX_DATAGRAMS],
            got: [Got { bytes: 0, segment: 0, marks: Marks::default() }; RX_DATAGRAMS],
            ask: 1,
            full: false,
            may_have_more: false,
            lost: 0,
            told: 0,
        }
    }

    /// Receives what is there, at most [`RX_DATAGRAMS`]; 0 when there is nothing (or the socket
    /// reports an error, which then is gone).
    ///
    /// A quiet socket is asked for one datagram: asking for more costs, and none is likely to
    /// follow the first.
    pub(crate) fn receive(&mut self, socket: &RxSocket) -> usize {
        let ask = self.ask;
        let mut iovs = [const { MaybeUninit::<libc::iovec>::uninit() }; RX_DATAGRAMS];
        let mut msgs = [const { MaybeUninit::<libc::mmsghdr>::uninit() }; RX_DATAGRAMS];
        for (i, chunk) in self.bytes.chunks_exact_mut(RX_BYTES).enumerate().take(ask) {
            let iov = iovs[i]
                .write(libc::iovec { iov_base: chunk.as_mut_ptr().cast(), iov_len: RX_BYTES });
            // SAFETY: integers and pointers, for which zero is valid.
            let h = &mut msgs[i].write(unsafe { zeroed() }).msg_hdr;
            h.msg_name = (&raw mut self.names[i].storage).cast();
            h.msg_namelen = size_of::<libc::sockaddr_in6>() as _;
            h.msg_iov = &raw mut *iov;
            h.msg_iovlen = 1;
            h.msg_control = (&raw mut self.controls[i]).cast();
            h.msg_controllen = size_of::<[Control; 4]>() as _;
        }
        let (fd, flags) =
            (libc::c_long::from(socket.as_raw_fd()), libc::c_long::from(libc::MSG_DONTWAIT));
        // Not libc's function, which is a point of cancellation and pays for it. SAFETY: each of
        // the first `ask` messages, which were written above, points to buffers of `self` and
        // locals that live through the call and do not overlap; no timeout is given.
        let n = unsafe {
            libc::syscall(
                libc::SYS_recvmmsg,
                fd,
                msgs.as_mut_ptr(),
                ask as libc::c_long,
                flags,
                0 as libc::c_long,
            )
        };
        let n = usize::try_from(n).unwrap_or(0);
        self.may_have_more = n == ask;
        self.full = n == ask && ask > 1;
        self.ask = if n == 0 { 1 } else { RX_DATAGRAMS };
        for (i, msg) in msgs[..n].iter().enumerate() {
            // SAFETY: the first `ask` messages have been written, and the kernel filled in no more
            // than that.
            let msg = unsafe { msg.assume_init_ref() };
            let bytes = msg.msg_len as usize;
            let (mut segment, mut marks) = (bytes.max(1), Marks::default());
            let told = msg.msg_hdr.msg_controllen.div_ceil(size_of::<Control>());
            for c in self.controls[i].iter().take(told) {
                match (c.header.cmsg_level, c.header.cmsg_type) {
                    (libc::SOL_UDP, UDP_GRO) if c.value > 0 => segment = c.value as usize,
                    (libc::SOL_SOCKET, libc::SO_RXQ_OVFL) => self.lost = c.value as u32,
                    (libc::IPPROTO_IP, libc::IP_TOS) | (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) => {
                        marks.class = c.byte()
                    }
                    (libc::IPPROTO_IP, libc::IP_TTL)
                    | (libc::IPPROTO_IPV6, libc::IPV6_HOPLIMIT) => marks.hops = c.byte(),
                    _ => {}
                }
            }
            self.got[i] = Got { bytes, segment, marks };
        }
        n
    }

    /// Datagrams that have found the socket full since the last call. One that comes in behind them
    /// brings the news.
    pub(crate) fn overruns(&mut self) -> u32 {
        let new = self.lost.wrapping_sub(self.told);
        self.told = self.lost;
        new
    }

    /// Whether the last [`RxRing::receive`] found as many as it asked for, so that there are
    /// probably more.
    pub(crate) fn full(&self) -> bool {
        self.full
    }

    /// Whether the last [`RxRing::receive`] did not find the socket empty.
    pub(crate) fn may_have_more(&self) -> bool {
        self.may_have_more
    }

    /// The `i`th datagram of the last [`RxRing::receive`].
    pub(crate) fn datagram(&self, i: usize) -> Option<Datagram<'_>> {
        let Got { bytes, segment, marks } = self.got[i];
        let src = self.names[i].get()?;
        Some(Datagram { src, segment, bytes: &self.bytes[i * RX_BYTES..][..bytes], marks })
    }
}

/// One system call's worth of a send: a datagram, or a run of segments.
#[derive(Clone, Copy)]
pub(crate) struct Message {
    pub(crate) to: RawAddr,
    /// Bytes of each segment; 0 for a single datagram.
    pub(crate) segment: u16,
    /// Where it lies in the caller's buffer.
    pub(crate) at: usize,
    pub(crate) bytes: usize,
    pub(crate) marks: Marks,
}

impl Message {
    /// Whether the address is all that the kernel is told of it.
    fn is_plain(&self) -> bool {
        self.segment == 0 && self.marks == Marks::default()
    }
}

/// Messages for one `sendmmsg`.
pub(crate) const TX_MESSAGES: usize = 64;
/// So few are not worth a `sendmmsg`.
const FEW_MESSAGES: usize = 2;

/// Sends messages out of `buffer` in order, at most [`TX_MESSAGES`]; gives how many left (at least
/// one), or the error of the first.
///
/// A few are sent one by one: `sendmmsg` costs more than the calls that it saves, and the first is
/// not to wait for the others.
pub(crate) fn send<'a>(
    socket: &TxSocket,
    messages: impl ExactSizeIterator<Item = &'a Message>,
    buffer: &[u8],
) -> io::Result<usize> {
    let fd = libc::c_long::from(socket.as_raw_fd());
    if messages.len() > FEW_MESSAGES {
        return send_many(fd, messages, buffer);
    }
    let mut sent = 0;
    for m in messages {
        let done =
            if m.is_plain() { send_datagram(fd, m, buffer) } else { send_run(fd, m, buffer) };
        match done {
            Ok(()) => sent += 1,
            // The error is that of the first message of the next call.
            Err(_) if sent > 0 => break,
            Err(e) => return Err(e),
        }
    }
    Ok(sent)
}

/// What the system calls for sending take; not libc's functions, which are points of cancellation
/// and pay for it.
const SEND_FLAGS: libc::c_long = libc::MSG_DONTWAIT as libc::c_long;

fn result(n: libc::c_long) -> io::Result<usize> {
    usize::try_from(n).map_err(|_| io::Error::last_os_error())
}

fn send_datagram(fd: libc::c_long, m: &Message, buffer: &[u8]) -> io::Result<()> {
    let bytes = &buffer[m.at..m.at + m.bytes];
    let (to, to_len) = (&raw const m.to.storage, libc::c_long::from(m.to.len));
    // SAFETY: the bytes and the address, which the kernel only reads, live through the call.
    result(unsafe {
        libc::syscall(libc::SYS_sendto, fd, bytes.as_ptr(), bytes.len(), SEND_FLAGS, to, to_len)
    })
    .map(drop)
}

fn send_run(fd: libc::c_long, m: &Message, buffer: &[u8]) -> io::Result<()> {
    let (mut iov, mut control) = (MaybeUninit::uninit(), MaybeUninit::uninit());
    let header = header_of(m, buffer, &mut iov, &mut control);
    // SAFETY: as in `send_many`.
    result(unsafe { libc::syscall(libc::SYS_sendmsg, fd, &raw const header, SEND_FLAGS) }).map(drop)
}

fn send_many<'a>(
    fd: libc::c_long,
    messages: impl Iterator<Item = &'a Message>,
    buffer: &[u8],
) -> io::Result<usize> {
    let mut msgs = [const { MaybeUninit::<libc::mmsghdr>::uninit() }; TX_MESSAGES];
    let mut iovs = [const { MaybeUninit::uninit() }; TX_MESSAGES];
    let mut controls = [const { MaybeUninit::uninit() }; TX_MESSAGES];
    let mut count: libc::c_long = 0;
    for (m, ((msg, iov), control)) in
        messages.zip(msgs.iter_mut().zip(&mut iovs).zip(&mut controls))
    {
        msg.write(libc::mmsghdr { msg_hdr: header_of(m, buffer, iov, control), msg_len: 0 });
        count += 1;
    }
    // SAFETY: the first `count` headers were written above; addresses, control messages and the
    // buffer, which the kernel only reads, live through the call.
    result(unsafe { libc::syscall(libc::SYS_sendmmsg, fd, msgs.as_mut_ptr(), count, SEND_FLAGS) })
}

/// The header of a message, which points to it and to what is written into `iov` and `control`.
fn header_of(
    m: &Message,
    buffer: &[u8],
    iov: &mut MaybeUninit<libc::iovec>,
    control: &mut MaybeUninit<[Control; 3]>,
) -> libc::msghdr {
    let bytes = &buffer[m.at..m.at + m.bytes];
    // SAFETY: integers and pointers, for which zero is valid.
    let mut h: libc::msghdr = unsafe { zeroed() };
    h.msg_name = (&raw const m.to.storage).cast_mut().cast();
    h.msg_namelen = m.to.len;
    h.msg_iov =
        iov.write(libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() });
    h.msg_iovlen = 1;
    if m.is_plain() {
        return h;
    }
    let mut count = 0;
    let controls = control.write([Control::empty(); 3]);
    if m.marks != Marks::default() {
        let (level, class, hops) = match i32::from(m.to.storage.sin6_family) {
            libc::AF_INET => (libc::IPPROTO_IP, libc::IP_TOS, libc::IP_TTL),
            _ => (libc::IPPROTO_IPV6, libc::IPV6_TCLASS, libc::IPV6_HOPLIMIT),
        };
        controls[0] = Control::int(level, class, m.marks.class.into());
        // The kernel takes no packet that may not leave.
        controls[1] = Control::int(level, hops, m.marks.hops.max(1).into());
        count = 2;
    }
    if m.segment > 0 {
        controls[count] = Control::segment(m.segment);
        count += 1;
    }
    h.msg_control = (&raw mut *controls).cast();
    h.msg_controllen = (count * size_of::<Control>()) as _;
    h
}

#[cfg(test)]
mod tests;
