//! The commands of `/dev/infiniband/rdma_cm` (`rdma/rdma_user_cm.h`) as bytes: what programs write,
//! and what they read in answer.
//!
//! Numbers are in the processor's order, except where the header says `__be`.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};
use unbroken_cm::{PortSpace, Reason};

/// `RDMA_MAX_PRIVATE_DATA`.
pub(crate) const MAX_PRIVATE: usize = 256;
const HEADER_BYTES: usize = 8;
const SOCKADDR_IN6_BYTES: usize = 28;
const STORAGE_BYTES: usize = 128;

/// The number of an error of C.
pub type Errno = i32;
pub(crate) type Result<T> = std::result::Result<T, Errno>;

/// Where an answer goes, and how much of it fits there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Out {
    pub(crate) at: u64,
    pub(crate) room: usize,
}

/// What a connection is asked for, or accepted, with (`struct rdma_ucm_conn_param`).
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct ConnParam {
    pub(crate) qp_num: u32,
    pub(crate) qkey: u32,
    pub(crate) private: Vec<u8>,
    pub(crate) srq: bool,
    pub(crate) responder_resources: u8,
    pub(crate) initiator_depth: u8,
    pub(crate) flow_control: bool,
    pub(crate) retry_count: u8,
    pub(crate) rnr_retry_count: u8,
    pub(crate) valid: bool,
}

/// What `RDMA_USER_CM_CMD_QUERY` asks for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Query {
    Address,
    Path,
    Gid,
}

/// A command.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Command {
    CreateId { out: Out, uid: u64, space: PortSpace },
    DestroyId { out: Out, id: u32 },
    Bind { id: u32, address: SocketAddr },
    Resolve { id: u32, source: Option<SocketAddr>, destination: SocketAddr },
    ResolveRoute { id: u32 },
    QueryRoute { out: Out, id: u32 },
    Query { out: Out, id: u32, what: Query },
    Connect { id: u32, param: ConnParam },
    Listen { id: u32, backlog: u32 },
    Accept { id: u32, uid: u64, param: ConnParam },
    Reject { id: u32, reason: Reason, private: Vec<u8> },
    Disconnect { id: u32 },
    InitQpAttr { out: Out, id: u32, state: u32 },
    GetEvent { out: Out },
    SetOption { id: u32, level: u32, name: u32, value: (u64, usize) },
    Notify { id: u32, event: u32 },
    JoinMulticast { out: Out, id: u32, uid: u64, address: SocketAddr },
    LeaveMulticast { out: Out, id: u32 },
    MigrateId { out: Out, id: u32, from_fd: i32 },
}

/// The body of a command.
struct Body<'a>(&'a [u8]);

impl Body<'_> {
    fn array<const N: usize>(&self, at: usize) -> Result<[u8; N]> {
        let bytes = self.0.get(at..at + N).ok_or(libc::EINVAL)?;
        bytes.try_into().map_err(|_| libc::EINVAL)
    }

    fn u8(&self, at: usize) -> Result<u8> {
        self.array::<1>(at).map(|[byte]| byte)
    }

    fn u16(&self, at: usize) -> Result<u16> {
        self.array(at).map(u16::from_ne_bytes)
    }

    fn u32(&self, at: usize) -> Result<u32> {
        self.array(at).map(u32::from_ne_bytes)
    }

    fn u64(&self, at: usize) -> Result<u64> {
        self.array(at).map(u64::from_ne_bytes)
    }

    fn private(&self, at: usize, len: u8) -> Result<Vec<u8>> {
        self.0.get(at..at + usize::from(len)).map(<[u8]>::to_vec).ok_or(libc::EINVAL)
    }

    fn conn_param(&self, at: usize) -> Result<ConnParam> {
        let end = at + 8 + MAX_PRIVATE;
        Ok(ConnParam {
            qp_num: self.u32(at)? & 0x00ff_ffff,
            qkey: self.u32(at + 4)?,
            private: self.private(at + 8, self.u8(end)?)?,
            srq: self.u8(end + 1)? != 0,
            responder_resources: self.u8(end + 2)?,
            initiator_depth: self.u8(end + 3)?,
            flow_control: self.u8(end + 4)? != 0,
            retry_count: self.u8(end + 5)?.min(7),
            rnr_retry_count: self.u8(end + 6)?.min(7),
            valid: self.u8(end + 7)? != 0,
        })
    }

    /// An address in `len` bytes; `None` where its family is 0.
    fn address(&self, at: usize, len: usize) -> Result<Option<SocketAddr>> {
        let bytes = self.0.get(at..at + len).ok_or(libc::EINVAL)?;
        read_address(bytes)
    }
}

fn read_address(bytes: &[u8]) -> Result<Option<SocketAddr>> {
    let body = Body(bytes);
    let port = u16::from_be_bytes(body.array(2)?);
    match i32::from(body.u16(0)?) {
        0 => Ok(None),
        libc::AF_INET => {
            let ip = Ipv4Addr::from(body.array::<4>(4)?);
            Ok(Some(SocketAddr::new(ip.into(), port)))
        }
        libc::AF_INET6 => {
            let ip = Ipv6Addr::from(body.array::<16>(8)?);
            let scope = body.u32(24)?;
            Ok(Some(SocketAddrV6::new(ip, port, 0, scope).into()))
        }
        // AF_IB, which librdmacm asks for to see whether it is there, and does without.
        _ => Err(libc::EINVAL),
    }
}

/// An address as `struct sockaddr_in` or `sockaddr_in6`.
pub(crate) fn write_address(address: Option<SocketAddr>) -> Vec<u8> {
    let mut out = Vec::with_capacity(SOCKADDR_IN6_BYTES);
    let Some(address) = address else { return out };
    let family = match address {
        SocketAddr::V4(_) => libc::AF_INET,
        SocketAddr::V6(_) => libc::AF_INET6,
    };
    out.extend((family as u16).to_ne_bytes());
    out.extend(address.port().to_be_bytes());
    match address {
        SocketAddr::V4(v4) => {
            out.extend(v4.ip().octets());
            out.extend([0; 8]);
        }
        SocketAddr::V6(v6) => {
            out.extend(v6.flowinfo().to_ne_bytes());
            out.extend(v6.ip().octets());
            out.extend(v6.scope_id().to_ne_bytes());
        }
    }
    out
}

/// The address that stands for all of a family.
pub(crate) fn any_like(address: SocketAddr) -> SocketAddr {
    let ip: IpAddr = match address {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    SocketAddr::new(ip, 0)
}

/// An answer that is being written.
#[derive(Default)]
pub(crate) struct Answer(pub(crate) Vec<u8>);

impl Answer {
    pub(crate) fn u8s(mut self, bytes: &[u8]) -> Answer {
        self.0.extend(bytes);
        self
    }

    pub(crate) fn u16(self, value: u16) -> Answer {
        self.u8s(&value.to_ne_bytes())
    }

    pub(crate) fn u32(self, value: u32) -> Answer {
        self.u8s(&value.to_ne_bytes())
    }

    pub(crate) fn u64(self, value: u64) -> Answer {
        self.u8s(&value.to_ne_bytes())
    }

    /// Bytes in a field of that length, zeros behind them.
    pub(crate) fn field(mut self, bytes: &[u8], len: usize) -> Answer {
        let end = self.0.len() + len;
        self.0.extend(&bytes[..bytes.len().min(len)]);
        self.0.resize(end, 0);
        self
    }

    pub(crate) fn sockaddr_in6(self, address: Option<SocketAddr>) -> Answer {
        self.field(&write_address(address), SOCKADDR_IN6_BYTES)
    }

    pub(crate) fn storage(self, address: &[u8]) -> Answer {
        self.field(address, STORAGE_BYTES)
    }
}

impl Command {
    /// Reads what a program has written. EINVAL: it is no command, as the kernel has it; ENOSYS: one
    /// that an older kernel does not know.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Command> {
        let header = Body(bytes);
        let (number, len) = (header.u32(0)?, usize::from(header.u16(4)?));
        let room = usize::from(header.u16(6)?);
        let body = bytes.get(HEADER_BYTES..HEADER_BYTES + len).ok_or(libc::EINVAL)?;
        Command::read(number, room, &Body(body))
    }

    fn read(number: u32, room: usize, b: &Body<'_>) -> Result<Command> {
        let out = |at: usize| b.u64(at).map(|at| Out { at, room });
        let some = |address: Option<SocketAddr>| address.ok_or(libc::EINVAL);
        Ok(match number {
            0 => Command::CreateId {
                uid: b.u64(0)?,
                out: out(8)?,
                space: PortSpace::from_code(b.u16(16)?).ok_or(libc::EINVAL)?,
            },
            1 => Command::DestroyId { out: out(0)?, id: b.u32(8)? },
            2 => {
                Command::Bind { id: b.u32(36)?, address: some(b.address(8, SOCKADDR_IN6_BYTES)?)? }
            }
            3 => Command::Resolve {
                source: b.address(0, SOCKADDR_IN6_BYTES)?,
                destination: some(b.address(28, SOCKADDR_IN6_BYTES)?)?,
                id: b.u32(56)?,
            },
            4 => Command::ResolveRoute { id: b.u32(0)? },
            5 => Command::QueryRoute { out: out(0)?, id: b.u32(8)? },
            6 => Command::Connect { param: b.conn_param(0)?, id: b.u32(272)? },
            7 => Command::Listen { id: b.u32(0)?, backlog: b.u32(4)? },
            8 => Command::Accept { uid: b.u64(0)?, param: b.conn_param(8)?, id: b.u32(280)? },
            9 => Command::Reject {
                id: b.u32(0)?,
                private: b.private(8, b.u8(4)?)?,
                reason: reject_reason(b.u8(5)?)?,
            },
            10 => Command::Disconnect { id: b.u32(0)? },
            11 => Command::InitQpAttr { out: out(0)?, id: b.u32(8)?, state: b.u32(12)? },
            12 => Command::GetEvent { out: out(0)? },
            14 => Command::SetOption {
                value: (b.u64(0)?, b.u32(20)? as usize),
                id: b.u32(8)?,
                level: b.u32(12)?,
                name: b.u32(16)?,
            },
            15 => Command::Notify { id: b.u32(0)?, event: b.u32(4)? },
            16 => Command::JoinMulticast {
                out: out(0)?,
                uid: b.u64(8)?,
                address: some(b.address(16, SOCKADDR_IN6_BYTES)?)?,
                id: b.u32(44)?,
            },
            17 => Command::LeaveMulticast { out: out(0)?, id: b.u32(8)? },
            18 => Command::MigrateId { out: out(0)?, id: b.u32(8)?, from_fd: b.u32(12)? as i32 },
            19..=22 => Command::read_newer(number, room, b)?,
            // GET_OPTION, which no kernel has; RESOLVE_IB_SERVICE and WRITE_CM_EVENT.
            13 | 23 | 24 => return Err(libc::ENOSYS),
            _ => return Err(libc::EINVAL),
        })
    }

    /// Commands that take addresses of any family.
    fn read_newer(number: u32, room: usize, b: &Body<'_>) -> Result<Command> {
        let some = |address: Option<SocketAddr>| address.ok_or(libc::EINVAL);
        let sized = |at: usize, len: u16| match len {
            0 => Ok(None),
            _ => b.address(at, usize::from(len).clamp(16, STORAGE_BYTES)),
        };
        Ok(match number {
            19 => Command::Query {
                out: Out { at: b.u64(0)?, room },
                id: b.u32(8)?,
                what: match b.u32(12)? {
                    0 => Query::Address,
                    1 => Query::Path,
                    2 => Query::Gid,
                    _ => return Err(libc::ENOSYS),
                },
            },
            20 => Command::Bind { id: b.u32(0)?, address: some(sized(8, b.u16(4)?)?)? },
            21 => Command::Resolve {
                id: b.u32(0)?,
                source: sized(16, b.u16(8)?)?,
                destination: some(sized(144, b.u16(10)?)?)?,
            },
            _ => Command::JoinMulticast {
                out: Out { at: b.u64(0)?, room },
                uid: b.u64(8)?,
                id: b.u32(16)?,
                address: some(sized(24, b.u16(20)?)?)?,
            },
        })
    }
}

/// The reason that a program gives: that of consumers where it says none.
fn reject_reason(code: u8) -> Result<Reason> {
    match code {
        0 | 28 => Ok(Reason::CONSUMER),
        35 => Ok(Reason::VENDOR_OPTION),
        _ => Err(libc::EINVAL),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command(number: u32, body: &[u8]) -> Vec<u8> {
        let header = Answer::default().u32(number).u16(body.len() as u16).u16(336);
        header.u8s(body).0
    }

    #[test]
    fn what_is_no_command_is_einval() {
        for wrong in [
            vec![],
            vec![0; 7],
            command(25, &[0; 300]),
            command(u32::MAX, &[0; 300]),
            command(1, &[0; 11]),
            command(10, &[]),
        ] {
            assert_eq!(Command::parse(&wrong), Err(libc::EINVAL), "{wrong:?}");
        }
        // The header says more than was written.
        let mut short = command(10, &[0; 4]);
        short.pop();
        assert_eq!(Command::parse(&short), Err(libc::EINVAL));
        for unknown in [13, 23, 24] {
            assert_eq!(Command::parse(&command(unknown, &[0; 300])), Err(libc::ENOSYS));
        }
    }

    #[test]
    fn addresses_are_read_as_they_are_written() {
        for text in ["127.77.1.3:7174", "[fd00::1]:5"] {
            let address: SocketAddr = text.parse().unwrap();
            let bytes = Answer::default().sockaddr_in6(Some(address)).0;
            assert_eq!(read_address(&bytes), Ok(Some(address)));
        }
        assert_eq!(read_address(&[0; 28]), Ok(None));
        let mut of_infiniband = [0; 28];
        of_infiniband[0] = 27;
        assert_eq!(read_address(&of_infiniband), Err(libc::EINVAL));
    }

    #[test]
    fn any_bytes_can_be_read() {
        let mut random = 1u64;
        for number in 0..26 {
            for len in 0..340 {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let body: Vec<u8> = (0..len).map(|i| (random >> (i % 56)) as u8).collect();
                let _ = Command::parse(&command(number, &body));
            }
        }
    }
}
