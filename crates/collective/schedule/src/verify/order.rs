//! What the order of steps guarantees: no races, no deadlock.

use std::collections::{BTreeMap, HashMap};

use super::Flaw;
use crate::{Buffer, Lane, Program, Schedule, Work};

/// The two ends of every message, by rank and step, lane by lane in order.
pub type Messages = BTreeMap<Lane, Vec<[(usize, usize); 2]>>;

/// One end of a message: rank, step, elements.
type End = (usize, usize, u64);

/// Pairs sends with receives.
pub fn match_messages(schedule: &Schedule) -> Result<Messages, Flaw> {
    let mut ends: BTreeMap<Lane, [Vec<End>; 2]> = BTreeMap::new();
    for (rank, program) in schedule.programs.iter().enumerate() {
        for (number, step) in program.steps.iter().enumerate() {
            if let Some(lane) = step.work.lane() {
                let end = usize::from(!matches!(step.work, Work::Send { .. }));
                let of_lane = ends.entry(program.lanes[lane as usize]).or_default();
                of_lane[end].push((rank, number, step.work.len()));
            }
        }
    }
    let mut messages = Messages::new();
    for (lane, [sends, receives]) in ends {
        if sends.len() != receives.len() {
            return Err(Flaw::Unmatched { lane, sends: sends.len(), receives: receives.len() });
        }
        if let Some(message) = (0..sends.len()).find(|m| sends[*m].2 != receives[*m].2) {
            return Err(Flaw::Lengths {
                lane,
                message,
                sent: sends[message].2,
                received: receives[message].2,
            });
        }
        let pairs = sends.iter().zip(&receives).map(|(s, r)| [(s.0, s.1), (r.0, r.1)]);
        messages.insert(lane, pairs.collect());
    }
    Ok(messages)
}

/// Whether all steps of a rank that touch the same elements, one of them writing, are ordered by
/// what they wait for.
pub(super) fn check_races(rank: usize, program: &Program) -> Result<(), Flaw> {
    let before = Before::new(program);
    let mut touched: HashMap<Buffer, Vec<(u64, u64, usize, bool)>> = HashMap::new();
    for (number, step) in program.steps.iter().enumerate() {
        let reads = step.work.reads().into_iter().flatten().map(|s| (s, false));
        for (slice, writes) in reads.chain(step.work.writes().map(|s| (s, true))) {
            touched.entry(slice.buffer).or_default().push((
                slice.start,
                slice.start + slice.len,
                number,
                writes,
            ));
        }
    }
    for mut of_buffer in touched.into_values() {
        of_buffer.sort_unstable();
        for (i, &(_, end, a, a_writes)) in of_buffer.iter().enumerate() {
            let meeting = of_buffer[i + 1..].iter().take_while(|other| other.0 < end);
            for &(_, _, b, b_writes) in meeting {
                let (first, second) = (a.min(b), a.max(b));
                if (a_writes || b_writes) && first != second && !before.is_before(first, second) {
                    return Err(Flaw::Race { rank, first, second });
                }
            }
        }
    }
    Ok(())
}

/// Which steps are done before which: what they wait for, and what that waits for.
struct Before {
    words: usize,
    bits: Vec<u64>,
}

impl Before {
    fn new(program: &Program) -> Before {
        let steps = program.steps.len();
        let words = steps.div_ceil(64);
        let mut bits = vec![0u64; steps * words];
        for (number, step) in program.steps.iter().enumerate() {
            let (earlier, rest) = bits.split_at_mut(number * words);
            let own = &mut rest[..words];
            for before in step.after.iter().map(|b| *b as usize) {
                let theirs = &earlier[before * words..][..words];
                own.iter_mut().zip(theirs).for_each(|(a, b)| *a |= b);
                own[before / 64] |= 1 << (before % 64);
            }
        }
        Before { words, bits }
    }

    fn is_before(&self, first: usize, second: usize) -> bool {
        self.bits[second * self.words + first / 64] >> (first % 64) & 1 == 1
    }
}

/// Whether it ends, if lanes have room for one message. No step ever takes back what made another
/// one ready, so all orders end or none does: it is enough that nothing waits for itself.
pub(super) fn check_progress(
    schedule: &Schedule,
    messages: &Messages,
    in_order: bool,
) -> Result<(), Flaw> {
    let mut first = vec![0];
    for program in &schedule.programs {
        first.push(first[first.len() - 1] + program.steps.len());
    }
    let steps = first[first.len() - 1];
    let id = |(rank, step): (usize, usize)| first[rank] + step;
    let mut next: Vec<Vec<usize>> = vec![Vec::new(); steps];
    let mut waits = vec![0usize; steps];
    let mut edge = |before: usize, after: usize| {
        next[before].push(after);
        waits[after] += 1;
    };
    for (rank, program) in schedule.programs.iter().enumerate() {
        for (number, step) in program.steps.iter().enumerate() {
            step.after
                .iter()
                .for_each(|before| edge(id((rank, *before as usize)), id((rank, number))));
            if in_order && number > 0 {
                edge(id((rank, number - 1)), id((rank, number)));
            }
        }
    }
    for pairs in messages.values() {
        for (at, [send, receive]) in pairs.iter().enumerate() {
            edge(id(*send), id(*receive));
            if let Some([next_send, next_receive]) = pairs.get(at + 1) {
                edge(id(*receive), id(*next_send));
                edge(id(*receive), id(*next_receive));
            }
        }
    }
    let mut ready: Vec<usize> = (0..steps).filter(|s| waits[*s] == 0).collect();
    while let Some(step) = ready.pop() {
        for after in std::mem::take(&mut next[step]) {
            waits[after] -= 1;
            if waits[after] == 0 {
                ready.push(after);
            }
        }
    }
    match waits.iter().position(|w| *w > 0) {
        None => Ok(()),
        Some(stuck) => {
            let rank = first.partition_point(|f| *f <= stuck) - 1;
            Err(Flaw::Stuck { rank, step: stuck - first[rank], in_order })
        }
    }
}
