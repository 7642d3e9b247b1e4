//! The operations.

use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::Arc;

use unbroken_schedule::{Counts, DataType, Matrix, Operation, ReduceOp};

use super::comm::{counts, rank_of};
use super::group::{ask, is_open};
use super::table::{COMMS, REQUESTS};
use super::{code, put, refuse, Code};
use crate::channel::ALL;
use crate::communicator::Communicator;
use crate::error::{Error, Result};
use crate::group::Entry;
use crate::operands::Spans;
use crate::span::Span;

/// `UBCOLL_ANY_SOURCE`
const ANY_SOURCE: i32 = -1;

/// `ubcollDataType_t`, by number.
const TYPES: [DataType; 12] = [
    DataType::I8,
    DataType::U8,
    DataType::I32,
    DataType::U32,
    DataType::I64,
    DataType::U64,
    DataType::F16,
    DataType::F32,
    DataType::F64,
    DataType::Bf16,
    DataType::I16,
    DataType::U16,
];

/// `ubcollRedOp_t`, by number.
const OPS: [ReduceOp; 8] = [
    ReduceOp::Sum,
    ReduceOp::Product,
    ReduceOp::Max,
    ReduceOp::Min,
    ReduceOp::Avg,
    ReduceOp::BitAnd,
    ReduceOp::BitOr,
    ReduceOp::BitXor,
];

fn data(number: i32) -> Result<DataType> {
    let found = usize::try_from(number).ok().and_then(|k| TYPES.get(k)).copied();
    found.ok_or_else(|| {
        Error::Refused(format!("type {number}; ubcollInt8 (0) to ubcollUint16 (11) is right"))
    })
}

fn reduction(number: i32) -> Result<ReduceOp> {
    let found = usize::try_from(number).ok().and_then(|k| OPS.get(k)).copied();
    found.ok_or_else(|| {
        Error::Refused(format!("reduction {number}; ubcollSum (0) to ubcollBitXor (7) is right"))
    })
}

/// So many elements in bytes.
fn bytes(count: u64, data: DataType) -> Result<usize> {
    let bytes = count.checked_mul(data.bytes()).and_then(|bytes| isize::try_from(bytes).ok());
    let of =
        || Error::Refused(format!("{count} elements of {data:?} are more than memory can have"));
    bytes.map(|bytes| bytes as usize).ok_or_else(of)
}

/// A buffer of a program.
fn span(at: *const c_void, bytes: usize, name: &str) -> Result<Span> {
    if at.is_null() && bytes > 0 {
        return refuse(format!("{name} is NULL; an address of {bytes} bytes is right"));
    }
    if !at.is_null() && at.addr().checked_add(bytes).is_none() {
        return refuse(format!("{name} of {bytes} bytes at {at:?} goes beyond the end of memory"));
    }
    Ok(Span::at(at.cast_mut().cast(), bytes))
}

/// What a program gives to an operation: pointers, and where in the larger buffer the smaller one
/// lies in place.
struct Given {
    send: *const c_void,
    recv: *mut c_void,
    /// Bytes at each, as this rank needs them.
    send_bytes: usize,
    recv_bytes: usize,
    /// In place, how far the smaller one is behind the beginning of the larger.
    offset: usize,
}

impl Given {
    /// The buffers, in place where they are what NCCL calls in place.
    fn spans(self) -> Result<Spans> {
        let send = span(self.send, self.send_bytes, "sendbuff")?;
        let recv = span(self.recv, self.recv_bytes, "recvbuff")?;
        let (large, small) = if send.len() > recv.len() { (&send, &recv) } else { (&recv, &send) };
        let behind = large.range().start.checked_add(self.offset);
        let in_place = !small.is_empty() && behind == Some(small.range().start);
        if !in_place {
            return Ok(Spans { input: send, output: recv, in_place: false });
        }
        let output = if send.len() > recv.len() { send } else { recv };
        Ok(Spans { input: Span::EMPTY, output, in_place: true })
    }
}

/// An operation of all ranks, once its arguments are found to make sense.
fn all(
    comm: *mut c_void,
    request: *mut *mut c_void,
    make: impl FnOnce(&Communicator) -> Result<(Operation, DataType, Spans)>,
) -> Code {
    code(|| {
        let entry = COMMS.get(comm).map_err(Error::from).and_then(|comm: Arc<Communicator>| {
            let (operation, data, spans) = make(&comm)?;
            comm.admit(ALL, &operation, data, &spans)?;
            Ok(Entry { comm, channel: ALL, tag: 0, operation, data, spans, memory: None })
        });
        // SAFETY: the program gives NULL, or what coll.h says; it keeps the memory as coll.h says.
        unsafe { ask(entry, request) }
    })
}

#[no_mangle]
extern "C" fn ubcollAllReduce(
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    data_type: i32,
    op: i32,
    comm: *mut c_void,
    request: *mut *mut c_void,
) -> Code {
    all(comm, request, |_| {
        let (data, op) = (data(data_type)?, reduction(op)?);
        let each = bytes(count as u64, data)?;
        let given = Given { send, recv, send_bytes: each, recv_bytes: each, offset: 0 };
        Ok((Operation::AllReduce { op, count: count as u64 }, data, given.spans()?))
    })
}

#[no_mangle]
extern "C" fn ubcollReduce(
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    data_type: i32,
    op: i32,
    root: i32,
    comm: *mut c_void,
    request: *mut *mut c_void,
) -> Code {
    all(comm, request, |comm| {
        let (data, op, root) = (data(data_type)?, reduction(op)?, rank_of(root, "root")?);
        let each = bytes(count as u64, data)?;
        let recv_bytes = if comm.rank() == root { each } else { 0 };
        let given = Given { send, recv, send_bytes: each, recv_bytes, offset: 0 };
        Ok((Operation::Reduce { op, root, count: count as u64 }, data, given.spans()?))
    })
}

#[no_mangle]
extern "C" fn ubcollBroadcast(
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    data_type: i32,
    root: i32,
    comm: *mut c_void,
    request: *mut *mut c_void,
) -> Code {
    all(comm, request, |comm| {
        let (data, root) = (data(data_type)?, rank_of(root, "root")?);
        let each = bytes(count as u64, data)?;
        let send_bytes = if comm.rank() == root { each } else { 0 };
        let given = Given { send, recv, send_bytes, recv_bytes: each, offset: 0 };
        Ok((Operation::Broadcast { root, count: count as u64 }, data, given.spans()?))
    })
}

#[no_mangle]
extern "C" fn ubcollAllGather(
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    data_type: i32,
    comm: *mut c_void,
    request: *mut *mut c_void,
) -> Code {
    all(comm, request, |comm| {
        let data = data(data_type)?;
        let send_bytes = bytes(count as u64, data)?;
        let recv_bytes = bytes((count as u64).saturating_mul(comm.ranks() as u64), data)?;
        let given = Given { send, recv, send_bytes, recv_bytes, offset: comm.rank() * send_bytes };
        Ok((Operation::AllGather { counts: Counts::Equal(count as u64) }, data, given.spans()?))
    })
}

#[no_mangle]
extern "C" fn ubcollReduceScatter(
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    data_type: i32,
    op: i32,
    comm: *mut c_void,
    request: *mut *mut c_void,
) -> Code {
    all(comm, request, |comm| {
        let (data, op) = (data(data_type)?, reduction(op)?);
        let recv_bytes = bytes(count as u64, data)?;
        let send_bytes = bytes((count as u64).saturating_mul(comm.ranks() as u64), data)?;
        let given = Given { send, recv, send_bytes, recv_bytes, offset: comm.rank() * recv_bytes };
        Ok((
            Operation::ReduceScatter { op, counts: Counts::Equal(count as u64) },
            data,
            given.spans()?,
        ))
    })
}

#[no_mangle]
extern "C" fn ubcollAllToAll(
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    data_type: i32,
    comm: *mut c_void,
    request: *mut *mut c_void,
) -> Code {
    all(comm, request, |comm| {
        let data = data(data_type)?;
        let each = bytes((count as u64).saturating_mul(comm.ranks() as u64), data)?;
        // Never in place: what is sent would be written over before it has left.
        let spans = Spans {
            input: span(send, each, "sendbuff")?,
            output: span(recv, each, "recvbuff")?,
            in_place: false,
        };
        Ok((Operation::AllToAll { counts: Matrix::Equal(count as u64) }, data, spans))
    })
}

#[no_mangle]
extern "C" fn ubcollAllToAllv(
    send: *const c_void,
    send_counts: *const usize,
    recv: *mut c_void,
    recv_counts: *const usize,
    data_type: i32,
    comm: *mut c_void,
    request: *mut *mut c_void,
) -> Code {
    all(comm, request, |comm| {
        let (data, me, ranks) = (data(data_type)?, comm.rank(), comm.ranks());
        // SAFETY: the program gives NULL, or as many as there are ranks.
        let (out, into) = unsafe {
            (counts(send_counts, ranks, "sendcounts")?, counts(recv_counts, ranks, "recvcounts")?)
        };
        if out[me] != into[me] {
            return refuse(format!(
                "rank {me} sends itself {} elements and receives {} of them",
                out[me], into[me]
            ));
        }
        let mut matrix = vec![0; ranks * ranks];
        for peer in 0..ranks {
            matrix[me * ranks + peer] = out[peer] as u64;
            matrix[peer * ranks + me] = into[peer] as u64;
        }
        let sum = |counts: &[usize]| {
            counts.iter().fold(0u64, |sum, count| sum.saturating_add(*count as u64))
        };
        let input = span(send, bytes(sum(out), data)?, "sendbuff")?;
        let output = span(recv, bytes(sum(into), data)?, "recvbuff")?;
        let operation = Operation::AllToAll { counts: Matrix::Each(matrix.into()) };
        Ok((operation, data, Spans { input, output, in_place: false }))
    })
}

#[no_mangle]
extern "C" fn ubcollBarrier(comm: *mut c_void, request: *mut *mut c_void) -> Code {
    all(comm, request, |_| {
        let spans = Spans { input: Span::EMPTY, output: Span::EMPTY, in_place: false };
        Ok((Operation::Barrier, DataType::U8, spans))
    })
}

/// Elements of a program's memory.
struct Elements {
    at: *const c_void,
    count: usize,
    data_type: i32,
}

/// The other end of what two ranks do.
struct Peer {
    rank: i32,
    tag: u64,
    /// It is sent to.
    receives: bool,
}

/// Sends or receives.
fn transfer(of: Elements, peer: Peer, comm: *mut c_void, request: *mut *mut c_void) -> Code {
    code(|| {
        let entry = COMMS.get(comm).map_err(Error::from).and_then(|comm: Arc<Communicator>| {
            let (data, rank) = (data(of.data_type)?, rank_of(peer.rank, "peer")?);
            let bytes = bytes(of.count as u64, data)?;
            let buffer = span(of.at, bytes, if peer.receives { "sendbuff" } else { "recvbuff" })?;
            let (from, to) = if peer.receives { (comm.rank(), rank) } else { (rank, comm.rank()) };
            let (channel, operation) = comm.transfer(from, to, data, bytes)?;
            let (input, output) =
                if peer.receives { (buffer, Span::EMPTY) } else { (Span::EMPTY, buffer) };
            let spans = Spans { input, output, in_place: false };
            comm.admit(channel, &operation, data, &spans)?;
            Ok(Entry { comm, channel, tag: peer.tag, operation, data, spans, memory: None })
        });
        // SAFETY: the program gives NULL, or what coll.h says; it keeps the memory as coll.h says.
        unsafe { ask(entry, request) }
    })
}

#[no_mangle]
extern "C" fn ubcollSend(
    send: *const c_void,
    count: usize,
    data_type: i32,
    peer: i32,
    comm: *mut c_void,
    request: *mut *mut c_void,
) -> Code {
    ubcollSendTag(send, count, data_type, peer, 0, comm, request)
}

#[no_mangle]
extern "C" fn ubcollRecv(
    recv: *mut c_void,
    count: usize,
    data_type: i32,
    peer: i32,
    comm: *mut c_void,
    request: *mut *mut c_void,
) -> Code {
    transfer(
        Elements { at: recv, count, data_type },
        Peer { rank: peer, tag: 0, receives: false },
        comm,
        request,
    )
}

#[no_mangle]
extern "C" fn ubcollSendTag(
    send: *const c_void,
    count: usize,
    data_type: i32,
    peer: i32,
    tag: u64,
    comm: *mut c_void,
    request: *mut *mut c_void,
) -> Code {
    transfer(
        Elements { at: send, count, data_type },
        Peer { rank: peer, tag, receives: true },
        comm,
        request,
    )
}

#[no_mangle]
extern "C" fn ubcollRecvTag(
    recv: *mut c_void,
    count: usize,
    data_type: i32,
    peer: i32,
    tag: u64,
    comm: *mut c_void,
    request: *mut *mut c_void,
) -> Code {
    if peer == ANY_SOURCE {
        return recv_any(recv, count, data_type, tag, comm, request);
    }
    transfer(
        Elements { at: recv, count, data_type },
        Peer { rank: peer, tag, receives: false },
        comm,
        request,
    )
}

/// Receives from whichever rank sends first; always with a request, since only that says whose it
/// was.
fn recv_any(
    at: *mut c_void,
    count: usize,
    data_type: i32,
    tag: u64,
    comm: *mut c_void,
    request: *mut *mut c_void,
) -> Code {
    code(|| {
        let comm = COMMS.get(comm)?;
        let data = data(data_type)?;
        let bytes = bytes(count as u64, data)?;
        let into = span(at, bytes, "recvbuff")?;
        if is_open() {
            return refuse("a receive from any rank is not for groups: ask for it before or after");
        }
        // SAFETY: the program gives NULL, or what coll.h says. Checked before anything is begun.
        unsafe { put(request, "request", null_mut()) }?;
        let begun = comm.roused(comm.enqueue_any(data, tag, into, None))?;
        // SAFETY: as above.
        unsafe { put(request, "request", REQUESTS.add(begun)) }
    })
}
