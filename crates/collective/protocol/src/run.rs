//! One rank's program, while it runs: which steps are ready, which messages of which lanes are on
//! their way.
//!
//! A step is ready when those that it names are done. A ready step that computes is done at once. A
//! ready send waits for its turn: messages of a lane leave in order, and no more than its room of
//! them ([`room`]) before the receiver has used the first. A message that comes before its receive
//! is ready is laid aside, in memory of its own; with its room that memory is bounded, and nothing
//! on a stream ever waits for what comes behind it.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use unbroken_schedule::{Path, Program, Slice, Work};

use crate::consent::Consent;
use crate::frame::{Header, MEMORY};
use crate::Rank;

/// Messages of a lane that may be on their way to a receiver that is not ready, at least and at
/// most; between, as many as its bytes hold. What is on its way must last until the first is used
/// and that is known, also where messages are short, and where one sender is ahead of others whose
/// messages are reduced with its own.
const ROOM: std::ops::RangeInclusive<u32> = 2..=64;
/// Bytes of a lane, at least and at most; between, its share of what may lie aside at a rank.
const ROOM_BYTES: std::ops::RangeInclusive<u64> = 256 << 10..=2 << 20;
const ASIDE_BYTES: u64 = 64 << 20;

/// How many messages of a lane may be on their way, if the longest has so many bytes and a rank has
/// so many paths to others.
pub(crate) fn room(longest_bytes: u64, paths: u64) -> u32 {
    let share = (ASIDE_BYTES / paths.max(1)).clamp(*ROOM_BYTES.start(), *ROOM_BYTES.end());
    let fit = share / longest_bytes.max(1);
    fit.clamp((*ROOM.start()).into(), (*ROOM.end()).into()) as u32
}

/// A lane of the program.
#[derive(Debug)]
pub(crate) struct Lane {
    pub(crate) peer: Rank,
    pub(crate) stream: u8,
    /// Its position among those from the one rank to the other: how both call it.
    pub(crate) number: u16,
    pub(crate) outgoing: bool,
    /// Its steps, by message.
    steps: Vec<u32>,
    /// The message that is sent or received next.
    message: u32,
    /// Bytes of it that were sent or received.
    offset: u64,
    /// Messages that the receiver has used, and how many more may be on their way.
    used: u32,
    room: u32,
    /// It stands in line for its turn.
    queued: bool,
}

/// Where a message's bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// Into a slice: `into`.
    Store(Slice),
    /// Into a slice, reduced with another: `with ⊕ message`.
    Reduce {
        /// The operand.
        with: Slice,
        /// Where the result goes.
        into: Slice,
    },
    /// Aside, until the receive is ready.
    Aside,
}

/// A part of a message that is to be sent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    pub(crate) lane: u16,
    pub(crate) message: u32,
    pub(crate) data: Slice,
    pub(crate) offset: u64,
    pub(crate) len: u32,
    pub(crate) total: u64,
}

/// What is done with a part of a message that came.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Taken {
    pub(crate) lane: u32,
    pub(crate) message: u32,
    pub(crate) target: Target,
    /// The step that is done with it.
    pub(crate) done: Option<u32>,
}

/// What a step that has become ready asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ready {
    /// To be done at once.
    Local(u32),
    /// The lane stands in line to send.
    Send(u32),
    /// This much of a message lies aside and is wanted now.
    Fetch { lane: u32, message: u32, target: Target, bytes: u64, done: Option<u32> },
    /// Nothing yet.
    Wait,
}

/// A program that runs.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) number: u64,
    pub(crate) digest: u64,
    /// Of operations between two ranks, which of them is meant.
    pub(crate) tag: u64,
    /// Each pair of ranks has a count of its own, which the other may see otherwise.
    pub(crate) has_pairs: bool,
    /// What is to be agreed to before it is over.
    pub(crate) consent: Option<Consent>,
    program: Arc<Program>,
    element: u64,
    waits: Vec<u32>,
    /// The steps that wait for each, one behind the other; where each begins.
    dependents: Vec<u32>,
    begins: Vec<u32>,
    pub(crate) lanes: Vec<Lane>,
    /// Each step's message on its lane.
    messages: Vec<u32>,
    left: usize,
    /// By peer, direction and number.
    names: HashMap<(Rank, bool, u16), u32>,
}

impl Run {
    pub(crate) fn new(
        number: u64,
        digest: u64,
        me: Rank,
        element: u64,
        paths: u64,
        program: Arc<Program>,
    ) -> Run {
        let mut numbers: Vec<usize> = (0..program.lanes.len()).collect();
        numbers.sort_by_key(|k| program.lanes[*k]);
        let mut lanes: Vec<Lane> = Vec::new();
        for lane in &program.lanes {
            let outgoing = lane.from == me;
            let stream = match lane.path {
                Path::Memory => MEMORY,
                Path::Nics { from, .. } => from as u8,
            };
            lanes.push(Lane {
                peer: if outgoing { lane.to } else { lane.from },
                stream,
                number: 0,
                outgoing,
                steps: Vec::new(),
                message: 0,
                offset: 0,
                used: 0,
                room: 0,
                queued: false,
            });
        }
        let mut last = (usize::MAX, false, 0u16);
        numbers.sort_by_key(|k| (lanes[*k].peer, lanes[*k].outgoing, program.lanes[*k]));
        for k in numbers {
            let lane = &mut lanes[k];
            let same = (last.0, last.1) == (lane.peer, lane.outgoing);
            lane.number = if same { last.2 + 1 } else { 0 };
            last = (lane.peer, lane.outgoing, lane.number);
        }
        let names = lanes
            .iter()
            .enumerate()
            .map(|(k, l)| ((l.peer, l.outgoing, l.number), k as u32))
            .collect();
        let count = program.steps.len();
        let (mut begins, mut messages) = (vec![0u32; count + 1], vec![0; count]);
        for (k, step) in program.steps.iter().enumerate() {
            step.after.iter().for_each(|before| begins[*before as usize + 1] += 1);
            if let Some(lane) = step.work.lane() {
                let steps = &mut lanes[lane as usize].steps;
                messages[k] = steps.len() as u32;
                steps.push(k as u32);
            }
        }
        for lane in &mut lanes {
            let longest = lane
                .steps
                .iter()
                .map(|step| program.steps[*step as usize].work.len() * element)
                .max();
            lane.room = room(longest.unwrap_or(0), paths);
        }
        (0..count).for_each(|k| begins[k + 1] += begins[k]);
        let mut at = begins.clone();
        let mut dependents = vec![0; begins[count] as usize];
        for (k, step) in program.steps.iter().enumerate() {
            for before in &step.after {
                dependents[at[*before as usize] as usize] = k as u32;
                at[*before as usize] += 1;
            }
        }
        let waits = program.steps.iter().map(|s| s.after.len() as u32).collect();
        Run {
            number,
            digest,
            tag: 0,
            has_pairs: false,
            consent: None,
            element,
            waits,
            dependents,
            begins,
            lanes,
            messages,
            left: count,
            names,
            program,
        }
    }

    /// The steps that wait for nothing.
    pub(crate) fn first(&self) -> Vec<u32> {
        (0..self.waits.len() as u32).filter(|k| self.waits[*k as usize] == 0).collect()
    }

    pub(crate) fn is_done(&self) -> bool {
        self.left == 0 && self.consent.as_ref().is_none_or(Consent::is_agreed)
    }

    /// Whether nothing of it has come.
    pub(crate) fn is_untouched(&self) -> bool {
        let came = |lane: &Lane| !lane.outgoing && (lane.message, lane.offset) != (0, 0);
        !self.lanes.iter().any(came) && self.consent.as_ref().is_none_or(Consent::is_untouched)
    }

    /// Bytes of an element.
    pub(crate) fn element(&self) -> u64 {
        self.element
    }

    /// A rank whose message, or whose word that it has used one, is waited for.
    pub(crate) fn waits_for(&self) -> Option<Rank> {
        let open = |lane: &&Lane| (lane.message as usize) < lane.steps.len();
        let receives = self.lanes.iter().filter(open).find(|lane| !lane.outgoing);
        let lane = receives.or_else(|| self.lanes.iter().find(open)).map(|lane| lane.peer);
        lane.or_else(|| self.consent.as_ref()?.waits_for())
    }

    pub(crate) fn work(&self, step: u32) -> Work {
        self.program.steps[step as usize].work
    }

    /// A step is done; adds those that are ready now to `ready`.
    pub(crate) fn finish(&mut self, step: u32, ready: &mut VecDeque<u32>) {
        self.left -= 1;
        let range = self.begins[step as usize] as usize..self.begins[step as usize + 1] as usize;
        for next in &self.dependents[range] {
            let waits = &mut self.waits[*next as usize];
            *waits -= 1;
            if *waits == 0 {
                ready.push_back(*next);
            }
        }
    }

    /// What a step that is ready asks for.
    pub(crate) fn on_ready(&mut self, step: u32) -> Ready {
        let work = self.work(step);
        let Some(number) = work.lane() else { return Ready::Local(step) };
        if let Work::Send { .. } = work {
            return if self.enqueue(number) { Ready::Send(number) } else { Ready::Wait };
        }
        let message = self.messages[step as usize];
        let lane = &self.lanes[number as usize];
        let (bytes, done) = match message.cmp(&lane.message) {
            std::cmp::Ordering::Less => (work.len() * self.element, Some(step)),
            std::cmp::Ordering::Equal => (lane.offset, None),
            std::cmp::Ordering::Greater => (0, None),
        };
        if bytes == 0 {
            return Ready::Wait;
        }
        Ready::Fetch { lane: number, message, target: target(&work), bytes, done }
    }

    /// Puts a lane in line if its next message may leave and it does not stand there.
    pub(crate) fn enqueue(&mut self, number: u32) -> bool {
        let lane = &self.lanes[number as usize];
        let ready = lane
            .steps
            .get(lane.message as usize)
            .is_some_and(|step| self.waits[*step as usize] == 0);
        let may = lane.outgoing && !lane.queued && ready && lane.message < lane.used + lane.room;
        self.lanes[number as usize].queued |= may;
        may
    }

    /// The next part of a lane's message, of at most so many bytes. The lane stands in line.
    pub(crate) fn part(&self, number: u32, room: u32) -> Part {
        let lane = &self.lanes[number as usize];
        let work = self.work(lane.steps[lane.message as usize]);
        let data = work.reads()[0].expect("a send reads");
        let total = data.len * self.element;
        let len = (total - lane.offset).min(u64::from(room)) as u32;
        Part { lane: lane.number, message: lane.message, data, offset: lane.offset, len, total }
    }

    /// The part was sent. The step that is done with it, whose lane stands in line no more.
    pub(crate) fn was_sent(&mut self, number: u32, part: &Part) -> Option<u32> {
        let lane = &mut self.lanes[number as usize];
        lane.offset += u64::from(part.len);
        if lane.offset < part.total {
            return None;
        }
        lane.offset = 0;
        lane.message += 1;
        lane.queued = false;
        Some(lane.steps[part.message as usize])
    }

    /// The lane that a peer calls by a number.
    fn find(&self, peer: Rank, outgoing: bool, number: u16) -> Option<u32> {
        self.names.get(&(peer, outgoing, number)).copied()
    }

    /// A part of a message has come. `None`: it is none that the program expects.
    pub(crate) fn take(&mut self, peer: Rank, header: &Header) -> Option<Taken> {
        let number = self.find(peer, false, header.lane)?;
        let lane = &self.lanes[number as usize];
        let step = *lane.steps.get(header.message as usize)?;
        let work = self.work(step);
        let total = work.len() * self.element;
        let fits =
            (header.message, header.offset, header.total) == (lane.message, lane.offset, total);
        if !fits || header.len == 0 || header.offset + u64::from(header.len) > total {
            return None;
        }
        let ready = self.waits[step as usize] == 0;
        let lane = &mut self.lanes[number as usize];
        lane.offset += u64::from(header.len);
        let complete = lane.offset == total;
        if complete {
            lane.offset = 0;
            lane.message += 1;
        }
        let target = if ready { target(&work) } else { Target::Aside };
        let done = (complete && ready).then_some(step);
        Some(Taken { lane: number, message: header.message, target, done })
    }

    /// Whether the sender of a lane's message waits to hear that it was used; then: whom to tell,
    /// over which stream, and the lane.
    pub(crate) fn tells_used(&mut self, step: u32) -> Option<(Rank, u8, u16, u32)> {
        let number = self.work(step).lane()?;
        let lane = &mut self.lanes[number as usize];
        if lane.outgoing {
            return None;
        }
        // Receives may become ready in any order; what counts is how many are done from the first.
        lane.used += 1;
        // Half of the room is told at once; what was told before it may be all that the sender
        // needs.
        let every = lane.room / 2;
        let needs = ((lane.used + lane.room) as usize) < lane.steps.len() + every as usize;
        (lane.used.is_multiple_of(every) && needs).then_some((
            lane.peer,
            lane.stream,
            lane.number,
            lane.used,
        ))
    }

    /// The receiver has used so many messages. The lane, if it stands in line now.
    pub(crate) fn on_used(&mut self, peer: Rank, number: u16, used: u32) -> Option<Option<u32>> {
        let number = self.find(peer, true, number)?;
        let lane = &mut self.lanes[number as usize];
        if used > lane.message {
            return None;
        }
        lane.used = lane.used.max(used);
        Some(self.enqueue(number).then_some(number))
    }
}

fn target(work: &Work) -> Target {
    match *work {
        Work::RecvReduce { with, into, .. } => Target::Reduce { with, into },
        Work::Recv { into, .. } => Target::Store(into),
        _ => Target::Aside,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use unbroken_schedule::{Buffer, Lane as Way, Stage, Step};

    const ELEMENTS: u64 = 4;
    const PATHS: u64 = 16;

    /// A program of one lane to rank 1, or from it, of so many messages that wait for nothing.
    fn one_lane(outgoing: bool, messages: u32) -> Run {
        let (from, to) = if outgoing { (0, 1) } else { (1, 0) };
        let slice = |k: u32| Slice {
            buffer: Buffer::Output,
            start: u64::from(k) * ELEMENTS,
            len: ELEMENTS,
        };
        let work = |k| match outgoing {
            true => Work::Send { lane: 0, data: slice(k) },
            false => Work::Recv { lane: 0, into: slice(k) },
        };
        let steps = (0..messages).map(|k| Step { work: work(k), after: Vec::new() }).collect();
        let lanes = vec![Way {
            from,
            to,
            path: Path::Memory,
            stage: Stage::Spread,
            channel: 0,
            set: 0,
            flow: (from, to),
            route: 0,
        }];
        Run::new(0, 0, 0, 1, PATHS, Arc::new(Program { steps, lanes, scratch: 0 }))
    }

    /// Where messages are short, two of them do not bridge the time until their use is known.
    #[test]
    fn many_short_messages_are_on_their_way() {
        let of = |paths| [1, 16 << 10, 64 << 10, 4 << 20].map(|longest| room(longest, paths));
        assert_eq!(of(PATHS), [64, 64, 32, 2]);
        assert_eq!(of(100), [64, 40, 10, 2], "the more there are, the less lies aside of each");
        assert_eq!(of(10_000), [64, 16, 4, 2]);
    }

    /// However many messages there are, what the receiver tells lets the sender send all, and never
    /// more than its room ahead.
    #[test]
    fn what_is_told_lets_all_messages_go() {
        let room = room(ELEMENTS, PATHS);
        for messages in 1..400 {
            let (mut sender, mut receiver) = (one_lane(true, messages), one_lane(false, messages));
            let (mut sent, mut told) = (0, 0);
            for used in 0..messages {
                while sender.enqueue(0) {
                    let part = sender.part(0, 1024);
                    assert!(sender.was_sent(0, &part).is_some());
                    sent += 1;
                }
                assert!(
                    sent > used && sent <= used + room,
                    "{sent} of {messages} are sent, {used} used"
                );
                if let Some((.., used)) = receiver.tells_used(used) {
                    told += 1;
                    sender.on_used(1, 0, used).unwrap();
                    sender.lanes[0].queued = false;
                }
            }
            assert_eq!((sent, told), (messages, messages.saturating_sub(room).div_ceil(room / 2)));
        }
    }
}
