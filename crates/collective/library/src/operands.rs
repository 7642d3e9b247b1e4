//! The memory of the operation that runs: what the caller gave, scratch, and messages that came
//! before they were wanted.

use std::collections::HashMap;
use std::ops::Range;

use unbroken_collective_protocol::reduce;
use unbroken_collective_protocol::run::Target;
use unbroken_collective_protocol::Bytes;
use unbroken_schedule::{Buffer, Collective, DataType, Operation, ReduceOp, Slice, Work};

use crate::span::Span;

/// What is copied at one time from words to bytes on the way to a reduction: it stays in the
/// nearest cache.
const PIECE: usize = 8192;

/// What a caller gives to an operation: bytes of elements, in the machine's order.
pub enum Buffers<'a> {
    /// Input and output apart; either may be empty where a rank has none.
    Apart {
        /// What the operation is given.
        input: &'a [u8],
        /// What it gives.
        output: &'a mut [u8],
    },
    /// One buffer, as [`unbroken_schedule::Operation`] says for each.
    InPlace(&'a mut [u8]),
}

/// The same without borrows, for as long as the operation takes.
pub(crate) struct Spans {
    pub(crate) input: Span,
    /// In place, the one buffer.
    pub(crate) output: Span,
    pub(crate) in_place: bool,
}

impl Spans {
    /// Of a caller's buffers.
    pub(crate) fn of(buffers: Buffers<'_>) -> Spans {
        match buffers {
            Buffers::Apart { input, output } => {
                Spans { input: Span::of(input), output: Span::of_mut(output), in_place: false }
            }
            Buffers::InPlace(all) => {
                Spans { input: Span::EMPTY, output: Span::of_mut(all), in_place: true }
            }
        }
    }
}

/// The memory of an operation.
pub(crate) struct Operands {
    input: Span,
    output: Span,
    scratch: Vec<u8>,
    /// The one buffer is the input (ReduceScatter in place).
    is_input: bool,
    data: DataType,
    op: ReduceOp,
    aside: HashMap<(u32, u32), Vec<u8>>,
}

/// What an operation lacks.
pub(crate) fn check(collective: &Collective, rank: usize, spans: &Spans) -> Result<(), String> {
    let size = collective.data().bytes();
    let wants = |buffer| collective.buffer_len(rank, buffer) * size;
    let name = collective.operation().name();
    let short = |what: &str, wanted: u64, given: &Span| match given.len() as u64 == wanted {
        true => Ok(()),
        false => {
            Err(format!("{name}: the {what} has {} bytes; rank {rank} needs {wanted}", given.len()))
        }
    };
    if spans.in_place {
        // Where a rank of a rooted operation has a part of it only, its buffer is whichever there
        // is.
        return short("buffer", wants(Buffer::Input).max(wants(Buffer::Output)), &spans.output);
    }
    short("input", wants(Buffer::Input), &spans.input)?;
    short("output", wants(Buffer::Output), &spans.output)?;
    let (input, output) = (spans.input.range(), spans.output.range());
    if !input.is_empty()
        && !output.is_empty()
        && input.start < output.end
        && output.start < input.end
    {
        return Err(format!(
            "{name}: input and output overlap; they are apart, or it is done in place"
        ));
    }
    Ok(())
}

impl Operands {
    /// Of no operation.
    pub(crate) fn none() -> Operands {
        Operands {
            input: Span::EMPTY,
            output: Span::EMPTY,
            scratch: Vec::new(),
            is_input: false,
            data: DataType::U8,
            op: ReduceOp::Sum,
            aside: HashMap::new(),
        }
    }

    /// Of an operation whose buffers fit.
    pub(crate) fn new(
        collective: &Collective,
        rank: usize,
        scratch: u64,
        spans: Spans,
    ) -> Operands {
        let (data, op) =
            (collective.data(), collective.operation().reduce_op().unwrap_or(ReduceOp::Sum));
        let scratch = vec![0; (scratch * data.bytes()) as usize];
        // A rank that is not the root of a Reduce has input alone, whatever is in place elsewhere.
        let scatters = matches!(collective.operation(), Operation::ReduceScatter { .. });
        let is_input =
            spans.in_place && (scatters || collective.buffer_len(rank, Buffer::Input) > 0);
        let Spans { input, output, .. } = spans;
        Operands { input, output, scratch, is_input, data, op, aside: HashMap::new() }
    }

    /// The caller's memory, of an operation between two ranks of which nothing was done.
    pub(crate) fn into_spans(self) -> Spans {
        Spans { input: self.input, output: self.output, in_place: false }
    }

    fn range(&self, slice: &Slice, offset: u64, len: u64) -> Range<usize> {
        let at = (slice.start * self.data.bytes() + offset) as usize;
        at..at + len as usize
    }

    /// The caller's one buffer is meant by either name, in place.
    fn is_writable(&self, buffer: Buffer) -> bool {
        buffer == Buffer::Output || self.is_input && buffer == Buffer::Input
    }

    /// Bytes of a slice.
    pub(crate) fn read(&self, slice: &Slice, offset: u64, len: u64) -> &[u8] {
        let range = self.range(slice, offset, len);
        match slice.buffer {
            Buffer::Scratch => &self.scratch[range],
            buffer if self.is_writable(buffer) => &self.output[range],
            _ => &self.input[range],
        }
    }

    fn write(&mut self, slice: &Slice, offset: u64, len: u64) -> &mut [u8] {
        let range = self.range(slice, offset, len);
        match slice.buffer {
            Buffer::Scratch => &mut self.scratch[range],
            _ => &mut self.output[range],
        }
    }

    /// Gives the bytes of one slice, and of another that is apart from it, to be written.
    fn both(
        &mut self,
        from: &Slice,
        into: &Slice,
        offset: u64,
        len: u64,
        f: impl FnOnce(&[u8], &mut [u8]),
    ) {
        let (a, b) = (self.range(from, offset, len), self.range(into, offset, len));
        let (a_scratch, b_scratch) =
            (from.buffer == Buffer::Scratch, into.buffer == Buffer::Scratch);
        let a_output = !a_scratch && self.is_writable(from.buffer);
        let apart = |all: &mut [u8], f: &mut dyn FnMut(&[u8], &mut [u8])| {
            if a.start < b.start {
                let (low, high) = all.split_at_mut(b.start);
                f(&low[a.clone()], &mut high[..b.len()]);
            } else {
                let (low, high) = all.split_at_mut(a.start);
                f(&high[..a.len()], &mut low[b.clone()]);
            }
        };
        let mut f = Some(f);
        let mut once = |x: &[u8], y: &mut [u8]| {
            if let Some(f) = f.take() {
                f(x, y);
            }
        };
        match (a_scratch, a_output, b_scratch) {
            (true, _, true) => apart(&mut self.scratch, &mut once),
            (_, true, false) => apart(&mut self.output, &mut once),
            (true, _, false) => once(&self.scratch[a], &mut self.output[b]),
            (_, true, true) => once(&self.output[a], &mut self.scratch[b]),
            (_, false, true) => once(&self.input[a], &mut self.scratch[b]),
            (_, false, false) => once(&self.input[a], &mut self.output[b]),
        }
    }

    /// Takes a part of a message to where it belongs. `get` copies bytes from an offset in that
    /// part on.
    pub(crate) fn take(&mut self, to: &Bytes, get: &mut dyn FnMut(usize, &mut [u8])) {
        match to.target {
            Target::Store(into) => get(0, self.write(&into, to.offset, to.len)),
            Target::Aside => {
                let aside = self
                    .aside
                    .entry((to.lane, to.message))
                    .or_insert_with(|| vec![0; to.total as usize]);
                get(0, &mut aside[to.offset as usize..][..to.len as usize]);
            }
            Target::Reduce { with, into } if with != into => {
                let (data, op) = (self.data, self.op);
                // It commutes bit for bit: what comes goes into its place, and the operand is added
                // while that is near.
                self.both(&with, &into, to.offset, to.len, |with, into| {
                    for (k, (into, with)) in
                        into.chunks_mut(PIECE).zip(with.chunks(PIECE)).enumerate()
                    {
                        get(k * PIECE, into);
                        reduce::reduce(data, op, into, with);
                    }
                });
            }
            Target::Reduce { into, .. } => {
                let (data, op) = (self.data, self.op);
                let mut piece = [0; PIECE];
                for (k, into) in self.write(&into, to.offset, to.len).chunks_mut(PIECE).enumerate()
                {
                    let piece = &mut piece[..into.len()];
                    get(k * PIECE, piece);
                    reduce::reduce(data, op, into, piece);
                }
            }
        }
    }

    /// Takes what lies aside of a message to where it is wanted now.
    pub(crate) fn fetch(&mut self, to: &Bytes) {
        if let Some(aside) = self.aside.remove(&(to.lane, to.message)) {
            self.take(to, &mut |at, out| out.copy_from_slice(&aside[at..at + out.len()]));
        }
    }

    /// A step of this rank alone.
    pub(crate) fn compute(&mut self, work: &Work) {
        let (data, op) = (self.data, self.op);
        let len = work.len() * data.bytes();
        match *work {
            Work::Copy { data, into } => {
                self.both(&data, &into, 0, len, |from, into| into.copy_from_slice(from))
            }
            Work::Reduce { a, b, into } => {
                // It commutes bit for bit, so that the operand which is the target can be either.
                let (base, other) = if into == b { (b, a) } else { (a, b) };
                if base != into {
                    self.both(&base, &into, 0, len, |from, into| into.copy_from_slice(from));
                }
                self.both(&other, &into, 0, len, |from, into| reduce::reduce(data, op, into, from));
            }
            Work::Divide { data: slice, by } => {
                reduce::divide(data, self.write(&slice, 0, len), by)
            }
            Work::Send { .. } | Work::Recv { .. } | Work::RecvReduce { .. } => {}
        }
    }
}
