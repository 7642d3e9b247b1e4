//! When to look at the kernel's tables, and what to do when that goes wrong (THORN-ML §5.2).
//!
//! A round is: dump all tables, compare, apply the difference in batches. Notifications only start
//! rounds; what they say is not believed, since they may be lost, late or out of order.
//!
//! | state | what happens | next |
//! | --- | --- | --- |
//! | waiting | a notification; or `resync_us` since the last round | dumping, after `settle_us`, so that a storm is one round |
//! | dumping | a table has come | the next table; after the last one: waiting if all is right, else applying |
//! | dumping | the table changed meanwhile (NLM_F_DUMP_INTR) | the same table again; after [`MAX_DUMPS`] times waiting, for `retry_us` |
//! | applying | a batch is done | the next batch; after the last one a round that checks |
//! | applying | an operation failed | the others are carried out, but no filter of an action that could not be made; then waiting for `retry_us`, twice as long after each failure, at most `resync_us` |
//! | dumping, applying | no answer for `reply_us` | waiting for `retry_us`; the answer is ignored if it comes |
//!
//! A notification that comes during a round starts another one after it. Rounds that find work
//! again and again (somebody undoes it) come slower and slower, down to one in `resync_us`. Nothing
//! is remembered from one round to the next, so a restart is a round.

use std::collections::BTreeSet;

use crate::diff::{diff, Plan};
use crate::model::{Action, ActionId, FdbEntry, Filter, Link, Op, Rules, Settings, Tables};
use crate::mutants::left_out;
use crate::wanted::wanted;

/// A table is asked for this often before the round is given up.
pub const MAX_DUMPS: u32 = 8;
/// The most operations in one batch.
pub const BATCH_OPS: usize = 2048;
/// Rounds with work in a row that are not slowed down: one works, one checks, one has met a change
/// on the way.
const FAST_ROUNDS: u32 = 3;

/// Times, in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// From a notification to the dump.
    pub settle_us: u64,
    /// After a failure.
    pub retry_us: u64,
    /// The longest wait for an answer.
    pub reply_us: u64,
    /// Between two rounds at most.
    pub resync_us: u64,
}

impl Default for Timing {
    fn default() -> Timing {
        Timing { settle_us: 500, retry_us: 100_000, reply_us: 5_000_000, resync_us: 10_000_000 }
    }
}

/// A table of the kernel, in the order in which they are asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Table {
    /// Devices.
    Links,
    /// Forwarding entries.
    Fdb,
    /// Devices that are ready for filters.
    Clsact,
    /// Filters of those devices.
    Filters,
    /// Shared actions.
    Actions,
}

const TABLES: [Table; 5] =
    [Table::Links, Table::Fdb, Table::Clsact, Table::Filters, Table::Actions];

/// What the shell is to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// Dump a table and give it to [`Reconciler::dumped`] with the number.
    Dump(u64, Table),
    /// Carry out all operations in order, also behind one that fails, and give the outcome to
    /// [`Reconciler::applied`] with the number.
    Apply(u64, Vec<Op>),
}

/// What the kernel tells by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// Something in one of the tables has changed.
    Changed,
    /// Notifications were lost (ENOBUFS).
    Overrun,
}

/// A table, or why there is none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Dump {
    /// [`Table::Links`].
    Links(Vec<Link>),
    /// [`Table::Fdb`].
    Fdb(Vec<FdbEntry>),
    /// [`Table::Clsact`].
    Clsact(Vec<u32>),
    /// [`Table::Filters`].
    Filters(Vec<Filter>),
    /// [`Table::Actions`].
    Actions(Vec<Action>),
    /// The table changed while it was read, so that what came is no state that ever was.
    Interrupted(Box<Dump>),
    /// The kernel gave an error.
    Failed(String),
}

/// What is known from the last rounds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Status {
    /// Destinations on other hosts.
    pub destinations: usize,
    /// Filters that should exist.
    pub wanted: usize,
    /// Filters of ours that exist, as of the last dump.
    pub present: usize,
    /// Those among them that a NIC has taken.
    pub in_hw: usize,
    /// Rules that have no place because all our numbers are taken.
    pub no_place: usize,
    /// Rounds that were finished.
    pub rounds: u64,
    /// Operations that were asked for.
    pub operations: u64,
    /// Operations and dumps that failed.
    pub failures: u64,
    /// The last failure.
    pub last_failure: Option<String>,
    /// Times that notifications were lost.
    pub overruns: u64,
    /// When all was right for the last time.
    pub right_at_us: Option<u64>,
    /// From the first sign of the last change to when all was right.
    pub convergence_us: Option<u64>,
}

/// Where the batch that begins at `start` ends. New actions are in a batch before the filters: when
/// one of them could not be made, since somebody has just taken its number, a filter would be bound
/// to an action of somebody else.
fn batch_end(ops: &[Op], start: usize) -> usize {
    let prepares =
        |op: &Op| matches!(op, Op::AddClsact { .. } | Op::AddAction { .. } | Op::EditAction { .. });
    let most = ops.len().min(start + BATCH_OPS);
    match ops[start..most].iter().position(|op| !prepares(op)) {
        Some(0) | None => most,
        Some(length) => start + length,
    }
}

#[derive(Debug)]
enum State {
    /// For a round that begins at this time.
    Waiting(u64),
    /// For the table with this place among [`TABLES`], asked for this often.
    Dumping { table: usize, tries: u32, asked: bool },
    /// For the outcome of the batch that ends at this place.
    Applying { ops: Vec<Op>, done: usize, asked: usize, failed: bool },
}

/// Keeps the rules as they should be.
#[derive(Debug)]
pub struct Reconciler {
    settings: Settings,
    timing: Timing,
    state: State,
    tables: Tables,
    rules: Rules,
    /// The number of the last command; older answers are ignored.
    number: u64,
    /// No answer after this is waited for.
    reply_by_us: u64,
    /// Something happened since the round began.
    dirty: bool,
    /// When the first sign of what is being worked on came.
    since_us: Option<u64>,
    /// Rounds with work in a row.
    busy_rounds: u32,
    /// Failed rounds in a row.
    failed_rounds: u32,
    status: Status,
}

impl Reconciler {
    /// Begins with a round at once.
    pub fn new(settings: Settings, timing: Timing, now_us: u64) -> Reconciler {
        Reconciler {
            settings,
            timing,
            state: State::Waiting(now_us),
            tables: Tables::default(),
            rules: Rules::default(),
            number: 0,
            reply_by_us: u64::MAX,
            dirty: false,
            since_us: Some(now_us),
            busy_rounds: 0,
            failed_rounds: 0,
            status: Status::default(),
        }
    }

    /// What is known.
    pub fn status(&self) -> &Status {
        &self.status
    }

    /// A notification came.
    pub fn event(&mut self, now_us: u64, event: Event) {
        if event == Event::Overrun {
            self.status.overruns += 1;
        }
        self.since_us.get_or_insert(now_us);
        self.dirty = true;
        if let State::Waiting(at) = &mut self.state {
            // A wait after a failure, or because somebody undoes our work, is not cut short.
            if self.failed_rounds == 0 && self.busy_rounds < FAST_ROUNDS {
                *at = (*at).min(now_us.saturating_add(self.timing.settle_us));
            }
        }
    }

    /// When [`Reconciler::poll`] is to be called again if nothing happens.
    pub fn deadline_us(&self) -> u64 {
        match self.state {
            State::Waiting(at) => at,
            _ => self.reply_by_us,
        }
    }

    /// The next thing to do, if it is time for one. To be asked until there is none.
    pub fn poll(&mut self, now_us: u64) -> Option<Command> {
        if let State::Waiting(at) = self.state {
            if now_us < at {
                return None;
            }
            self.dirty = false;
            self.state = State::Dumping { table: 0, tries: 0, asked: false };
        }
        let number = self.number + 1;
        let command = match &mut self.state {
            State::Dumping { table, tries, asked } if !*asked => {
                *asked = true;
                *tries += 1;
                Command::Dump(number, TABLES[*table])
            }
            State::Applying { ops, done, asked, .. } if *asked == *done => {
                *asked = batch_end(ops, *done);
                self.status.operations += (*asked - *done) as u64;
                Command::Apply(number, ops[*done..*asked].to_vec())
            }
            State::Waiting(_) => return None,
            _ if now_us < self.reply_by_us || left_out!(self.settings.mutation, NoTimeout) => {
                return None
            }
            _ => {
                self.fail(now_us, format!("no answer for {} ms", self.timing.reply_us / 1000));
                return None;
            }
        };
        self.number = number;
        self.reply_by_us = now_us.saturating_add(self.timing.reply_us);
        Some(command)
    }

    /// The answer to [`Command::Dump`].
    pub fn dumped(&mut self, now_us: u64, number: u64, dump: Dump) {
        let State::Dumping { table, tries, asked: true } = self.state else { return };
        if number != self.number {
            return;
        }
        let dump = match dump {
            Dump::Interrupted(dump) if left_out!(self.settings.mutation, IgnoreInterrupted) => {
                *dump
            }
            other => other,
        };
        match (TABLES[table], dump) {
            (Table::Links, Dump::Links(links)) => self.tables.links = links,
            (Table::Fdb, Dump::Fdb(fdb)) => self.tables.fdb = fdb,
            (Table::Clsact, Dump::Clsact(devices)) => {
                self.rules.clsact = devices.into_iter().collect()
            }
            (Table::Filters, Dump::Filters(filters)) => self.rules.filters = filters,
            (Table::Actions, Dump::Actions(actions)) => self.rules.actions = actions,
            (_, Dump::Interrupted(_)) if tries < MAX_DUMPS => {
                self.state = State::Dumping { table, tries, asked: false };
                return;
            }
            (name, Dump::Interrupted(_)) => {
                return self
                    .fail(now_us, format!("{name:?} changed during each of {MAX_DUMPS} dumps"));
            }
            (name, Dump::Failed(error)) => {
                return self.fail(now_us, format!("dump of {name:?}: {error}"))
            }
            (name, _) => return self.fail(now_us, format!("another table came for {name:?}")),
        }
        if table + 1 < TABLES.len() {
            self.state = State::Dumping { table: table + 1, tries: 0, asked: false };
        } else {
            self.compare(now_us);
        }
    }

    fn compare(&mut self, now_us: u64) {
        let wanted = wanted(&self.settings, &self.tables);
        let Plan { ops, present, in_hw, no_place } = diff(&self.settings, &wanted, &self.rules);
        self.status.destinations = wanted.destinations;
        self.status.wanted = wanted.filters.len();
        (self.status.present, self.status.in_hw, self.status.no_place) = (present, in_hw, no_place);
        // They are large; the next round asks for them again.
        (self.tables, self.rules) = Default::default();
        if !ops.is_empty() {
            self.busy_rounds = self.busy_rounds.saturating_add(1);
            self.state = State::Applying { ops, done: 0, asked: 0, failed: false };
            return;
        }
        self.status.rounds += 1;
        (self.busy_rounds, self.failed_rounds) = (0, 0);
        self.status.right_at_us = Some(now_us);
        if let Some(since) = self.since_us.take() {
            self.status.convergence_us = Some(now_us.saturating_sub(since));
        }
        if self.dirty {
            self.since_us = Some(now_us);
            self.wait(now_us, self.timing.settle_us);
        } else {
            self.wait(now_us, self.timing.resync_us);
        }
    }

    /// The answer to [`Command::Apply`]: the operations that failed, as places in the batch with
    /// the reasons.
    pub fn applied(&mut self, now_us: u64, number: u64, failures: &[(usize, String)]) {
        let State::Applying { ops, done, asked, failed } = &mut self.state else { return };
        if number != self.number || *asked == *done {
            return;
        }
        if let Some((place, error)) = failures.first() {
            *failed = true;
            let op = ops.get(*done + *place).map(|op| format!("{op:?}")).unwrap_or_default();
            self.status.last_failure = Some(format!("{op}: {error}"));
            self.status.failures += failures.len() as u64;
        }
        let lost = failures.iter().filter_map(|(place, _)| match ops.get(*done + *place) {
            Some(Op::AddAction { id, .. }) => Some(*id),
            _ => None,
        });
        let lost: BTreeSet<ActionId> = lost.collect();
        *done = *asked;
        if !lost.is_empty() && !left_out!(self.settings.mutation, BindBlindly) {
            ops.retain(|op| !matches!(op, Op::PutFilter { actions, .. } if actions.iter().any(|a| lost.contains(a))));
        }
        if *done < ops.len() {
            return;
        }
        let failed = *failed;
        self.status.rounds += 1;
        if failed {
            self.back_off(now_us);
        } else {
            self.failed_rounds = 0;
            let slower = self.busy_rounds.saturating_sub(FAST_ROUNDS).min(32);
            self.wait(now_us, self.timing.settle_us << slower);
        }
    }

    fn fail(&mut self, now_us: u64, why: String) {
        self.status.failures += 1;
        self.status.last_failure = Some(why);
        self.back_off(now_us);
    }

    fn back_off(&mut self, now_us: u64) {
        if left_out!(self.settings.mutation, NoRetry) {
            self.state = State::Waiting(u64::MAX);
            return;
        }
        let slower = self.failed_rounds.min(32);
        self.failed_rounds = self.failed_rounds.saturating_add(1);
        self.wait(now_us, self.timing.retry_us << slower);
    }

    fn wait(&mut self, now_us: u64, time_us: u64) {
        let never = left_out!(self.settings.mutation, NoResync) && time_us >= self.timing.resync_us;
        let at = match never {
            true => u64::MAX,
            false => now_us.saturating_add(time_us.min(self.timing.resync_us)),
        };
        self.state = State::Waiting(at);
    }
}
