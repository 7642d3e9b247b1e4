//! Operations that are begun together: all of them, or, where one does not make sense, none.
//!
//! Whatever is begun goes on by itself, so that operations of several communicators, or a send and
//! a receive that two ranks begin in different orders, never wait for each other. A group adds that
//! nothing is begun before everything was checked.

use std::borrow::Borrow;

use unbroken_collective_protocol::Rank;
use unbroken_schedule::{DataType, Operation};

use crate::channel::ALL;
use crate::communicator::Communicator;
use crate::error::Result;
use crate::operands::{Buffers, Spans};
use crate::request::{Memory, Request};

/// An operation that makes sense, and where it is to be done.
pub(crate) struct Entry<C> {
    pub(crate) comm: C,
    pub(crate) channel: u32,
    /// Of operations between two ranks, what sends and receives are matched by.
    pub(crate) tag: u64,
    pub(crate) operation: Operation,
    pub(crate) data: DataType,
    pub(crate) spans: Spans,
    pub(crate) memory: Option<Memory>,
}

/// Begins all, if there is room for all.
pub(crate) fn begin<C: Borrow<Communicator>>(entries: Vec<Entry<C>>) -> Result<Vec<Request>> {
    for (k, entry) in entries.iter().enumerate() {
        let comm = entry.comm.borrow();
        let same = |other: &&Entry<C>| {
            std::ptr::eq(other.comm.borrow(), comm) && other.channel == entry.channel
        };
        // Each is there when the last of its channel is looked at.
        comm.room(entry.channel, entries[..=k].iter().filter(same).count())?;
    }
    let of = |e: Entry<C>| {
        let comm = e.comm.borrow();
        comm.roused(comm.enqueue(e.channel, e.tag, e.operation, e.data, e.spans, e.memory))
    };
    entries.into_iter().map(of).collect()
}

/// Operations that are to be begun together, on one communicator or several.
#[derive(Default)]
pub struct Group<'a> {
    entries: Vec<Entry<&'a Communicator>>,
}

impl<'a> Group<'a> {
    /// Nothing yet.
    pub fn new() -> Group<'a> {
        Group::default()
    }

    fn push(
        &mut self,
        comm: &'a Communicator,
        channel: u32,
        tag: u64,
        operation: Operation,
        data: DataType,
        mut memory: Memory,
    ) -> Result<()> {
        let spans = Spans::of(match &mut memory {
            Memory::Apart { input, output } => Buffers::Apart { input, output },
            Memory::InPlace(all) => Buffers::InPlace(all),
        });
        comm.admit(channel, &operation, data, &spans)?;
        self.entries.push(Entry {
            comm,
            channel,
            tag,
            operation,
            data,
            spans,
            memory: Some(memory),
        });
        Ok(())
    }

    /// An operation of all ranks, as [`Communicator::begin`].
    pub fn add(
        &mut self,
        comm: &'a Communicator,
        operation: Operation,
        data: DataType,
        memory: Memory,
    ) -> Result<()> {
        self.push(comm, ALL, 0, operation, data, memory)
    }

    /// As [`Communicator::begin_send`].
    pub fn send(
        &mut self,
        comm: &'a Communicator,
        data: DataType,
        to: Rank,
        bytes: Vec<u8>,
    ) -> Result<()> {
        let (channel, operation) = comm.transfer(comm.rank(), to, data, bytes.len())?;
        self.push(
            comm,
            channel,
            0,
            operation,
            data,
            Memory::Apart { input: bytes, output: Vec::new() },
        )
    }

    /// As [`Communicator::begin_recv`].
    pub fn recv(
        &mut self,
        comm: &'a Communicator,
        data: DataType,
        from: Rank,
        bytes: Vec<u8>,
    ) -> Result<()> {
        let (channel, operation) = comm.transfer(from, comm.rank(), data, bytes.len())?;
        self.push(
            comm,
            channel,
            0,
            operation,
            data,
            Memory::Apart { input: Vec::new(), output: bytes },
        )
    }

    /// Begins all, in the order in which they were added.
    pub fn begin(self) -> Result<Vec<Request>> {
        begin(self.entries)
    }

    /// Begins all and waits for all; their memory.
    pub fn run(self) -> Result<Vec<Memory>> {
        Request::wait_all(self.begin()?)
    }
}
