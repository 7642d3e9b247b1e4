//! Operations from pair to pair: AllToAll and SendRecv. Turn *k*: rank *r* sends to *r + k* and
//! receives from *r − k*.
//!
//! How a pair's data is divided depends on that pair's count alone, so that ranks need not know
//! what others exchange.

use std::ops::Range;

use super::{Emitter, Flow, Take};
use crate::split::{equal, grain};
use crate::{Buffer, Slice, Stage, Work};

/// What a pair exchanges on one channel.
struct Message {
    from: usize,
    to: usize,
    channel: usize,
    /// In the sender's input.
    data: Range<u64>,
    /// In the receiver's output.
    into: Range<u64>,
    chunks: u64,
}

pub(super) fn emit(emitter: &mut Emitter) {
    let plan = emitter.plan;
    let ranks = plan.topology.ranks();
    for rank in emitter.ranks.clone() {
        let own = plan.collective.pair(rank, rank);
        let (data, into) = (place(emitter, rank, rank, true), place(emitter, rank, rank, false));
        let slice = |buffer, start| Slice { buffer, start, len: own };
        emitter.builder(rank).step(Work::Copy {
            data: slice(Buffer::Input, data),
            into: slice(Buffer::Output, into),
        });
    }
    // by turn, then channel: sends, receives
    let mut turns: Vec<[Vec<Message>; 2]> = Vec::new();
    for turn in 1..ranks {
        let mut now = [Vec::new(), Vec::new()];
        for rank in emitter.ranks.clone() {
            now[0].extend(messages(emitter, rank, (rank + turn) % ranks));
            now[1].extend(messages(emitter, (rank + ranks - turn) % ranks, rank));
        }
        turns.push(now);
    }
    let chunks = turns.iter().flatten().flatten().map(|m| m.chunks).max().unwrap_or(0);
    for chunk in 0..chunks {
        emitter.begin_chunk(chunk);
        for [sends, receives] in &turns {
            for message in sends.iter().filter(|m| chunk < m.chunks) {
                let (flow, data, _) = part(emitter, message, chunk);
                emitter.send(&flow, data);
            }
            for message in receives.iter().filter(|m| chunk < m.chunks) {
                let (flow, _, into) = part(emitter, message, chunk);
                emitter.recv(&flow, Take::Into(into));
            }
        }
    }
}

/// Where a pair's data begins, in the input of the sender or the output of the receiver.
fn place(emitter: &Emitter, from: usize, to: usize, in_input: bool) -> u64 {
    let collective = &emitter.plan.collective;
    match in_input {
        true => (0..to).map(|peer| collective.pair(from, peer)).sum(),
        false => (0..from).map(|peer| collective.pair(peer, to)).sum(),
    }
}

/// What a pair exchanges, divided among channels: as many that, if all pairs exchange the same, all
/// channels carry the same.
fn messages(emitter: &Emitter, from: usize, to: usize) -> Vec<Message> {
    let plan = emitter.plan;
    let len = plan.collective.pair(from, to);
    if len == 0 {
        return Vec::new();
    }
    let (data, into) = (place(emitter, from, to, true), place(emitter, from, to, false));
    let members = |rank: usize| plan.topology.members(plan.topology.host_of(rank)).len();
    let channels = plan.channels();
    let only_pair = matches!(plan.collective.operation(), crate::Operation::SendRecv { .. });
    let least = if only_pair { 1 } else { members(from).min(members(to)) };
    let parts = channels.div_ceil(least.min(channels));
    let first = (plan.topology.local(from) + plan.topology.local(to)) * parts;
    let grain = grain(len, parts as u64, plan.collective.data().bytes());
    (0..parts)
        .map(|k| {
            let part = equal(&(0..len), parts as u64, k as u64, grain);
            Message {
                from,
                to,
                channel: (first + k) % channels,
                chunks: plan.chunks_of(part.end - part.start),
                data: data + part.start..data + part.end,
                into: into + part.start..into + part.end,
            }
        })
        .filter(|m| !m.data.is_empty())
        .collect()
}

/// A chunk of a message: what it is, where it comes from, where it goes.
fn part(emitter: &Emitter, message: &Message, chunk: u64) -> (Flow, Slice, Slice) {
    let Message { from, to, channel, chunks, .. } = *message;
    let bytes = emitter.plan.collective.data().bytes();
    let cut = |range: &Range<u64>| {
        equal(range, chunks, chunk, grain(range.end - range.start, chunks, bytes))
    };
    let slice = |buffer, range: Range<u64>| Slice {
        buffer,
        start: range.start,
        len: range.end - range.start,
    };
    let (data, into) =
        (slice(Buffer::Input, cut(&message.data)), slice(Buffer::Output, cut(&message.into)));
    let turn = (from + to) as u64 + chunk;
    (Flow { from, to, stage: Stage::Exchange, channel, set: 0, len: data.len, turn }, data, into)
}
