//! Ranks that do operations one after the other, in the order in which they were asked for: all
//! ranks of a communicator, or two of which one sends to the other.
//!
//! Each channel has an engine of its own, and so its own streams, numbers and plans; NICs,
//! connections out of band and the thread are the communicator's. Channel 0 is that of all ranks
//! and is there from the beginning. The one from rank *f* to rank *t* of *n* is channel `1+f*n+t`,
//! and is made at each end when it is first used or heard of. So what two ranks send each other
//! needs no other rank, and waits for no operation of all.
//!
//! An operation in the queue is a *ticket*, counted from 0. Tickets are over in their order, but
//! for receives with tags: of several that wait, the one begins whose tag has come. What the other
//! of two ranks does not take part in, since it has left, is over and *undone*, and the communicator
//! goes on.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;

use unbroken_collective_protocol::agree::{Description, Terms};
use unbroken_collective_protocol::picture::Picture;
use unbroken_collective_protocol::{views, Config, Engine, Failure, Note, Rank};
use unbroken_schedule::planner::Planned;
use unbroken_schedule::{
    Choice, Collective, Folding, Form, Grouping, Operation, Owners, Program, Topology,
};

use crate::completions::Watch;
use crate::error::Result;
use crate::operands::{Operands, Spans};
use crate::request::Memory;
use crate::status::Way;

/// Programs that are kept.
const KEPT: usize = 32;

/// The channel of all ranks.
pub(crate) const ALL: u32 = 0;

/// How both ends call the channel from one rank to another.
pub(crate) fn name(from: Rank, to: Rank, ranks: usize) -> u32 {
    (1 + from * ranks + to) as u32
}

/// Who sends to whom over a channel; of those of two ranks.
pub(crate) fn ends(name: u32, ranks: usize) -> Option<(Rank, Rank)> {
    let number = (name as usize).checked_sub(1)?;
    let (from, to) = (number / ranks, number % ranks);
    (from < ranks && from != to).then_some((from, to))
}

/// What plans are to be like, whatever there is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wish {
    pub(crate) folding: Folding,
    pub(crate) form: Option<Form>,
}

/// A program, and the view that it was planned with.
struct Kept {
    view: u32,
    collective: Collective,
    program: Arc<Program>,
    way: Arc<Way>,
}

/// An operation that waits for its turn, or has it.
struct Queued {
    ticket: u64,
    collective: Collective,
    /// What the other ranks must take it for, too.
    description: Description,
    /// Taken when it begins.
    spans: Option<Spans>,
    /// Memory of a request that was given up, for as long as the operation needs it.
    memory: Option<Memory>,
    /// Who is told when it is over.
    watch: Option<Watch>,
}

/// Why an operation is over that was not done, while the communicator goes on.
#[derive(Clone, Debug)]
pub(crate) enum Undone {
    /// It could not be begun, or was given up by this rank.
    Refused(String),
    /// The other rank does not take part in it.
    Left(Failure),
}

/// What an operation that is begun is for the engine: its number, terms, bytes of an element,
/// program.
pub(crate) type Begun = (u64, Terms, u64, Arc<Program>);

/// One end of a channel.
pub(crate) struct Channel {
    pub(crate) name: u32,
    /// Its ranks, as all know them.
    pub(crate) ranks: Vec<Rank>,
    /// Its hosts, as all know them.
    pub(crate) hosts: Vec<u32>,
    /// What there is with its rank *k* is tie `base + k`.
    pub(crate) base: usize,
    pub(crate) engine: Engine,
    pub(crate) operands: Operands,
    topology: Topology,
    programs: Vec<Kept>,
    queue: VecDeque<Queued>,
    /// Tickets that are not over: those in the queue, and those that a broken communicator gave up,
    /// which are never over.
    open: HashSet<u64>,
    /// How many in the queue have each tag.
    tags: HashMap<u64, usize>,
    /// The first in the queue has begun.
    runs: bool,
    /// How the operation that runs is done, and when it began, in µs.
    way: Option<(Arc<Way>, u64)>,
    /// Operations that this rank has begun.
    number: u64,
    /// Tickets that were given out.
    tickets: u64,
    /// Tickets that are over and were not done, and why; until somebody asks.
    undone: HashMap<u64, Undone>,
}

impl Channel {
    pub(crate) fn new(
        name: u32,
        ranks: Vec<Rank>,
        hosts: Vec<u32>,
        base: usize,
        config: Config,
        topology: Topology,
    ) -> Channel {
        Channel {
            name,
            ranks,
            hosts,
            base,
            engine: Engine::new(config),
            operands: Operands::none(),
            topology,
            programs: Vec::new(),
            queue: VecDeque::new(),
            open: HashSet::new(),
            tags: HashMap::new(),
            runs: false,
            way: None,
            number: 0,
            tickets: 0,
            undone: HashMap::new(),
        }
    }

    /// Operations that wait or run.
    pub(crate) fn waiting(&self) -> usize {
        self.queue.len()
    }

    /// Operations that were begun.
    pub(crate) fn begun(&self) -> u64 {
        self.number
    }

    /// Queues an operation whose memory fits; its ticket.
    pub(crate) fn push(
        &mut self,
        collective: Collective,
        description: Description,
        spans: Spans,
    ) -> u64 {
        let ticket = self.tickets;
        self.tickets += 1;
        self.open.insert(ticket);
        *self.tags.entry(description.tag).or_default() += 1;
        self.queue.push_back(Queued {
            ticket,
            collective,
            description,
            spans: Some(spans),
            memory: None,
            watch: None,
        });
        ticket
    }

    /// Whether a ticket is over.
    pub(crate) fn is_over(&self, ticket: u64) -> bool {
        !self.open.contains(&ticket)
    }

    /// Why a ticket that is over was not done, if it was not; to be asked once.
    pub(crate) fn why_undone(&mut self, ticket: u64) -> Option<Undone> {
        self.undone.remove(&ticket)
    }

    fn queued(&mut self, ticket: u64) -> Option<&mut Queued> {
        // In their order, but for those that were preferred, which stand in front.
        let at = self.queue.partition_point(|queued| queued.ticket < ticket);
        let found = self.queue.get(at).is_some_and(|queued| queued.ticket == ticket);
        let at = match found {
            true => at,
            false => self.queue.iter().position(|queued| queued.ticket == ticket)?,
        };
        self.queue.get_mut(at)
    }

    /// Nobody waits for a ticket any more: its memory stays as long as the operation needs it.
    pub(crate) fn forget(&mut self, ticket: u64, memory: Option<Memory>) {
        self.undone.remove(&ticket);
        if !self.open.contains(&ticket) {
            return;
        }
        if let Some(queued) = self.queued(ticket) {
            queued.memory = memory;
        }
    }

    /// Tells when a ticket that is not over is over. One that is told already is not told again.
    pub(crate) fn watch(&mut self, ticket: u64, watch: Watch) {
        if let Some(queued) = self.queued(ticket) {
            queued.watch.get_or_insert(watch);
        }
    }

    /// The communicator is broken: nothing of what waits or runs is touched from now on, and it is
    /// never over.
    pub(crate) fn clear(&mut self) {
        self.take_all().into_iter().filter_map(|queued| queued.watch).for_each(Watch::tell);
    }

    fn take_all(&mut self) -> VecDeque<Queued> {
        self.engine.finish(false);
        self.operands = Operands::none();
        self.runs = false;
        self.tags.clear();
        std::mem::take(&mut self.queue)
    }

    /// Ends what waits or runs, from the operation that has its turn on, for a reason. Nothing of it
    /// is touched from now on.
    pub(crate) fn give_up(&mut self, why: &Undone) {
        for queued in self.take_all() {
            self.open.remove(&queued.ticket);
            self.undone.insert(queued.ticket, why.clone());
            queued.watch.into_iter().for_each(Watch::tell);
        }
    }

    /// Takes the operation that runs back, if nothing of it has come: it is not begun then. Whether
    /// none runs now.
    pub(crate) fn take_back(&mut self) -> bool {
        if self.runs && self.engine.is_untouched() {
            self.retract();
        }
        !self.runs
    }

    fn retract(&mut self) {
        self.engine.retract();
        self.number -= 1;
        self.runs = false;
        let spans = std::mem::replace(&mut self.operands, Operands::none()).into_spans();
        if let Some(first) = self.queue.front_mut() {
            first.spans = Some(spans);
        }
    }

    /// How many operations this rank has begun or is to begin.
    pub(crate) fn asked_for(&self) -> u64 {
        self.current() + self.queue.len() as u64
    }

    /// Whether the operation that has its turn is done, or there is one that may begin.
    pub(crate) fn is_due(&self) -> bool {
        if self.runs {
            !self.engine.is_busy()
        } else {
            !self.queue.is_empty()
        }
    }

    /// The operation that has its turn is done, if one has: how it was done, and since when, in µs.
    pub(crate) fn end(&mut self) -> Option<(Arc<Way>, u64)> {
        if !self.runs || self.engine.is_busy() {
            return None;
        }
        self.engine.finish(true);
        self.next();
        self.way.take()
    }

    fn next(&mut self) {
        self.operands = Operands::none();
        self.runs = false;
        let Some(queued) = self.queue.pop_front() else { return };
        self.open.remove(&queued.ticket);
        if let Entry::Occupied(mut count) = self.tags.entry(queued.description.tag) {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
        queued.watch.into_iter().for_each(Watch::tell);
    }

    /// Whether several operations wait that differ in their tags, so that what comes says which of
    /// them begins.
    pub(crate) fn has_choice(&self) -> bool {
        !self.runs && self.tags.len() > 1
    }

    /// Whether an operation has begun that is not over.
    pub(crate) fn runs(&self) -> bool {
        self.runs
    }

    /// Whether an operation with that tag waits, or runs.
    pub(crate) fn waits_for(&self, tag: u64) -> bool {
        self.tags.contains_key(&tag)
    }

    /// The number of the operation that is next to begin, or runs.
    pub(crate) fn current(&self) -> u64 {
        self.number - u64::from(self.runs)
    }

    /// Something with a tag has come for which no operation has begun: the first that has this tag
    /// is next, instead of one that runs and has received nothing. Whether there is one.
    pub(crate) fn prefer(&mut self, tag: u64) -> bool {
        if !self.waits_for(tag) {
            return false;
        }
        let Some(at) = self.queue.iter().position(|queued| queued.description.tag == tag) else {
            return false;
        };
        if self.runs {
            self.retract();
        }
        if let Some(queued) = self.queue.remove(at) {
            self.queue.push_front(queued);
        }
        true
    }

    /// The next operation's turn has come: its number, what it is, and its program. `None`: there
    /// is none, or a view is being agreed on.
    pub(crate) fn begin(&mut self, now_us: u64, wish: Wish) -> Option<Begun> {
        if self.runs {
            return None;
        }
        while !self.queue.is_empty() {
            let (view, picture) = self.engine.take_up(self.number)?;
            let Queued { collective, description, .. } = self.queue.front()?;
            let (collective, description) = (collective.clone(), *description);
            match self.program(view, &picture, &collective, wish) {
                Ok((program, way)) => {
                    let spans = self.queue.front_mut()?.spans.take()?;
                    let me = self.engine.rank();
                    self.operands = Operands::new(&collective, me, program.scratch, spans);
                    self.runs = true;
                    self.way = Some((way, now_us));
                    let number = self.number;
                    self.number += 1;
                    let terms = Terms::of(description, &collective, me);
                    return Some((number, terms, collective.data().bytes(), program));
                }
                Err(error) => {
                    let ticket = self.queue.front()?.ticket;
                    self.undone.insert(ticket, Undone::Refused(error.to_string()));
                    self.next();
                }
            }
        }
        None
    }

    /// This rank's program of an operation.
    fn program(
        &mut self,
        view: u32,
        picture: &Picture,
        collective: &Collective,
        wish: Wish,
    ) -> Result<(Arc<Program>, Arc<Way>)> {
        if let Some(kept) =
            self.programs.iter().find(|kept| kept.view == view && kept.collective == *collective)
        {
            return Ok((kept.program.clone(), kept.way.clone()));
        }
        let planned = views::plan(&self.topology, picture, collective, wish.folding, wish.form)?;
        let program = Arc::new(planned.plan.program(self.engine.rank()));
        let way = Arc::new(way(collective, &planned));
        self.programs.retain(|kept| kept.view == view);
        if self.programs.len() == KEPT {
            self.programs.remove(0);
        }
        let (kept, of) = (program.clone(), way.clone());
        self.programs.push(Kept { view, collective: collective.clone(), program: kept, way: of });
        Ok((program, way))
    }

    /// What its engine notes, as all count ranks and hosts.
    pub(crate) fn renumbered(&self, note: Note) -> Note {
        match note {
            Note::Up { peer, rail, life } => Note::Up { peer: self.ranks[peer], rail, life },
            Note::Down { peer, rail, life, told } => {
                Note::Down { peer: self.ranks[peer], rail, life, told }
            }
            Note::Moved { peer, stream, rail, again } => {
                Note::Moved { peer: self.ranks[peer], stream, rail, again }
            }
            Note::Located(verdict) => Note::Located(verdict.renumbered(&self.ranks, &self.hosts)),
            Note::Healed(place) => Note::Healed(place.renumbered(&self.hosts)),
            replanned @ Note::Replanned { .. } => replanned,
        }
    }
}

/// How an operation is done, for people.
fn way(collective: &Collective, planned: &Planned) -> Way {
    let choice = planned.plan.choice();
    // Those before it were refused.
    let taken = planned.considered.iter().find(|estimate| estimate.choice == *choice);
    Way {
        operation: collective.operation().name(),
        bytes: collective.total() * collective.data().bytes(),
        form: Form::of(choice),
        plan: plan_in_words(choice, planned.plan.forwards()),
        estimate_us: known_us(taken.map(|estimate| estimate.us)),
    }
}

/// An estimate, or 0: of hosts that have no NICs in common just now, whose frames go out of band,
/// it is infinite. JSON has no word for that, and who asks for the status would get none.
fn known_us(estimate_us: Option<f64>) -> f64 {
    estimate_us.filter(|us| us.is_finite()).unwrap_or(0.0)
}

fn plan_in_words(choice: &Choice, forwards: bool) -> String {
    let form = Form::of(choice);
    let owners = match &choice.owners {
        Owners::Equal => "",
        Owners::Weights(_) => ", one owner",
        Owners::ByCapacity => ", owners by capacity",
    };
    let over = match choice.grouping {
        Grouping::Hosts => "hosts",
        Grouping::Ranks => "ranks",
    };
    let channels = choice.channels.map_or(String::new(), |count| format!(", {count} channels"));
    let chunk_kib = choice.chunk_bytes.div_ceil(1024);
    let by = if forwards { ", through ranks of other NUMA nodes" } else { "" };
    format!("{form} over {over}{owners}{channels}, chunks of {chunk_kib} KiB{by}")
}

/// The operation of a channel of two ranks: `from` is which of them sends.
pub(crate) fn transfer(from: Rank, count: u64) -> Operation {
    Operation::SendRecv { from, to: 1 - from, count }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_with_what_nobody_can_estimate_can_be_read() {
        use crate::status::{Done, Snapshot};
        for us in [None, Some(f64::INFINITY), Some(f64::NAN), Some(7.5)] {
            let done = vec![Done { estimate_us: known_us(us), ..Done::default() }];
            let text = serde_json::to_string(&Snapshot { done, ..Snapshot::default() }).unwrap();
            let read: Snapshot = serde_json::from_str(&text).unwrap();
            assert_eq!(read.done[0].estimate_us, if us == Some(7.5) { 7.5 } else { 0.0 });
        }
    }

    #[test]
    fn a_name_says_who_sends_to_whom() {
        for ranks in [2, 3, 64] {
            for (from, to) in
                (0..ranks).flat_map(|f| (0..ranks).map(move |t| (f, t))).filter(|(f, t)| f != t)
            {
                assert_eq!(ends(name(from, to, ranks), ranks), Some((from, to)));
            }
            for wrong in [ALL, name(1, 1, ranks), (ranks * ranks) as u32 + 1, u32::MAX] {
                assert_eq!(ends(wrong, ranks), None, "{wrong} of {ranks}");
            }
        }
    }
}
