//! A program under construction: steps are added in order, and what each must wait for follows from
//! what it touches.

use std::collections::{BTreeMap, HashMap};

use crate::{Buffer, Lane, Program, Slice, Step, Work};

/// Copies of each piece of scratch memory, used in turn by successive chunks, so that so many
/// chunks are under way at once.
const SCRATCH_COPIES: u64 = 3;

/// One rank's program.
#[derive(Debug, Default)]
pub(crate) struct Builder {
    program: Program,
    lanes: HashMap<Lane, u32>,
    hazards: BTreeMap<Buffer, Hazards>,
    /// Where scratch memory for a purpose begins.
    scratch: HashMap<(usize, u8), Region>,
    copy: u64,
    /// By step: the last step that waits for it by way of another.
    implied: Vec<u32>,
}

/// Copies of scratch memory for one purpose, of so many elements each.
#[derive(Clone, Copy, Debug)]
struct Region {
    start: u64,
    room: u64,
}

impl Builder {
    /// A program that has so many elements of scratch memory for itself, from 0.
    pub fn new(reserved: u64) -> Builder {
        Builder {
            program: Program { scratch: reserved, ..Program::default() },
            ..Builder::default()
        }
    }

    /// What follows belongs to this chunk.
    pub fn begin_chunk(&mut self, chunk: u64) {
        self.copy = chunk % SCRATCH_COPIES;
    }

    /// Scratch memory for some purpose: the same for all chunks, which have at most `room`
    /// elements, but that chunks which follow each other have different copies of it. Where there
    /// is not enough room after all, it is found elsewhere.
    pub fn scratch(&mut self, purpose: (usize, u8), room: u64, len: u64) -> Slice {
        let total = &mut self.program.scratch;
        let mut fresh = |room: u64| {
            *total += room * SCRATCH_COPIES;
            Region { start: *total - room * SCRATCH_COPIES, room }
        };
        let region = self.scratch.entry(purpose).or_insert_with(|| fresh(room));
        if region.room < len {
            *region = fresh(len);
        }
        Slice { buffer: Buffer::Scratch, start: region.start + region.room * self.copy, len }
    }

    /// The number of a lane.
    pub fn lane(&mut self, lane: Lane) -> u32 {
        let lanes = &mut self.program.lanes;
        *self.lanes.entry(lane).or_insert_with(|| {
            lanes.push(lane);
            (lanes.len() - 1) as u32
        })
    }

    /// Adds a step, unless it is empty.
    pub fn step(&mut self, work: Work) {
        if work.is_empty() {
            return;
        }
        let number = self.program.steps.len() as u32;
        let mut after = Vec::new();
        for slice in work.reads().into_iter().flatten() {
            self.hazards.entry(slice.buffer).or_default().read(slice, number, &mut after);
        }
        if let Some(slice) = work.writes() {
            self.hazards.entry(slice.buffer).or_default().write(slice, number, &mut after);
        }
        after.sort_unstable();
        after.dedup();
        after.retain(|step| *step != number);
        // what another of them waits for in any case need not be named
        self.implied.resize(number as usize, 0);
        for before in after.iter().flat_map(|step| &self.program.steps[*step as usize].after) {
            self.implied[*before as usize] = number;
        }
        after.retain(|step| self.implied[*step as usize] != number);
        self.program.steps.push(Step { work, after });
    }

    /// The program.
    pub fn finish(self) -> Program {
        self.program
    }
}

/// Who touched which elements last.
#[derive(Debug, Default)]
struct Hazards {
    /// By their first element; they do not overlap.
    runs: BTreeMap<u64, Run>,
}

/// Elements with the same history.
#[derive(Clone, Debug)]
struct Run {
    end: u64,
    /// The last step that wrote them.
    writer: Option<u32>,
    /// The steps that have read them since.
    readers: Vec<u32>,
}

impl Hazards {
    /// Cuts the run around `at` in two.
    fn cut(&mut self, at: u64) {
        if let Some((_, run)) = self.runs.range_mut(..at).next_back() {
            if run.end > at {
                let rest = run.clone();
                run.end = at;
                self.runs.insert(at, rest);
            }
        }
    }

    /// A step reads elements: after whoever wrote them.
    fn read(&mut self, slice: Slice, step: u32, after: &mut Vec<u32>) {
        let end = slice.start + slice.len;
        self.cut(slice.start);
        self.cut(end);
        let mut fresh = Vec::new();
        let mut at = slice.start;
        for (start, run) in self.runs.range_mut(slice.start..end) {
            if *start > at {
                fresh.push((at, *start));
            }
            at = run.end;
            after.extend(run.writer);
            run.readers.push(step);
        }
        if at < end {
            fresh.push((at, end));
        }
        for (start, end) in fresh {
            self.runs.insert(start, Run { end, writer: None, readers: vec![step] });
        }
    }

    /// A step writes elements: after whoever has read them since they were written, or else whoever
    /// wrote them.
    fn write(&mut self, slice: Slice, step: u32, after: &mut Vec<u32>) {
        let end = slice.start + slice.len;
        self.cut(slice.start);
        self.cut(end);
        let old: Vec<u64> = self.runs.range(slice.start..end).map(|(start, _)| *start).collect();
        for start in old {
            let run = self.runs.remove(&start).expect("just seen");
            // a step that reads and writes the same elements has been counted as a reader
            let mut readers = run.readers.into_iter().filter(|r| *r != step).peekable();
            if readers.peek().is_none() {
                after.extend(run.writer);
            }
            after.extend(readers);
        }
        self.runs.insert(slice.start, Run { end, writer: Some(step), readers: Vec::new() });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slice(start: u64, len: u64) -> Slice {
        Slice { buffer: Buffer::Output, start, len }
    }

    fn copy(from: u64, into: u64, len: u64) -> Work {
        Work::Copy { data: slice(from, len), into: slice(into, len) }
    }

    fn after(works: &[Work]) -> Vec<Vec<u32>> {
        let mut builder = Builder::new(0);
        works.iter().for_each(|w| builder.step(*w));
        builder.finish().steps.into_iter().map(|s| s.after).collect()
    }

    #[test]
    fn steps_wait_for_what_they_touch() {
        let read_after_write = after(&[copy(0, 10, 4), copy(12, 20, 4)]);
        assert_eq!(read_after_write, [vec![], vec![0]]);
        let write_after_read = after(&[copy(0, 10, 4), copy(20, 0, 2), copy(20, 2, 2)]);
        assert_eq!(write_after_read, [vec![], vec![0], vec![0]]);
        let write_after_write = after(&[copy(0, 10, 4), copy(20, 8, 3)]);
        assert_eq!(write_after_write, [vec![], vec![0]]);
        let apart = after(&[copy(0, 10, 4), copy(4, 14, 4), copy(0, 30, 4)]);
        assert_eq!(apart, [vec![], vec![], vec![]]);
    }

    #[test]
    fn what_is_implied_is_not_named() {
        let a = slice(0, 4);
        let chain = after(&[
            copy(10, 0, 4),
            Work::Divide { data: a, by: 2 },
            copy(0, 20, 4),
            copy(30, 0, 4),
        ]);
        assert_eq!(chain, [vec![], vec![0], vec![1], vec![2]]);
    }

    #[test]
    fn empty_steps_are_left_out() {
        assert_eq!(after(&[copy(0, 10, 0)]), Vec::<Vec<u32>>::new());
    }

    #[test]
    fn scratch_memory_comes_back_after_three_chunks() {
        let mut builder = Builder::new(1);
        let mut taken = |chunk| {
            builder.begin_chunk(chunk);
            [builder.scratch((7, 0), 10, 9), builder.scratch((7, 1), 2, 2)]
        };
        let all: Vec<Slice> = (0..3).flat_map(&mut taken).collect();
        for (i, a) in all.iter().enumerate() {
            assert!(a.start >= 1 && all[i + 1..].iter().all(|b| !a.meets(b)));
        }
        assert_eq!(taken(3), all[..2]);
        let longer = builder.scratch((7, 1), 3, 3);
        assert!(all.iter().all(|s| !s.meets(&longer)));
        assert_eq!(builder.finish().scratch, 1 + 3 * (12 + 3));
    }
}
