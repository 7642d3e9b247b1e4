//! Journals under random interleavings of posts, completions, failures and stops, life after life,
//! against what really happened.
//!
//! The provider here is as plain as a device can be: one that fails is in ERR and flushes, all or
//! some or nothing; each of its CQs is polled when it pleases the seed, and what was executed may
//! never be acknowledged. The peer is a list of what was executed, and how often.

#[path = "world/provider.rs"]
mod provider;

use provider::{Flushes, InQueue, Provider, Rng};
use unbroken_journal::{Config, Journal, Mutation, Queue, Slot, Step};
use unbroken_types::{
    Completions, Messages, PeerDone, QpCaps, QpState, SendBatch, SendFlags, SendOpcode, SendWr, Wc,
    WcStatus,
};

const CAPS: QpCaps = QpCaps {
    max_send_wr: 9,
    max_recv_wr: 5,
    max_send_sge: 2,
    max_recv_sge: 1,
    max_inline_data: 16,
};
const QPN: u32 = 0x1234;
/// Sends and receives of a program, and messages that come for it.
const WORK: usize = 40;
const STEPS: usize = 4000;

type Outcome<T = ()> = Result<T, String>;

macro_rules! ensure {
    ($cond:expr, $($text:tt)*) => { if !$cond { return Err(format!($($text)*)); } };
}

#[path = "world/program.rs"]
mod program;

/// A send of the program, and what became of it.
struct Sent {
    opcode: SendOpcode,
    signaled: bool,
    executed: u32,
    /// Its WC, if one has come.
    status: Option<u32>,
}

#[derive(Default)]
struct Out(Vec<(bool, Wc)>);

impl Completions for Out {
    fn send(&mut self, wc: Wc) {
        self.0.push((true, wc));
    }
    fn recv(&mut self, wc: Wc, _: bool) {
        self.0.push((false, wc));
    }
}

/// How a run goes.
#[derive(Clone, Copy, Debug)]
struct Plan {
    seed: u64,
    /// The peer counts all that it has executed; else the receives that it has used.
    exact: bool,
    sig_all: bool,
    /// Once in a run the program makes a mistake.
    mistake: bool,
    /// In a run without mistakes, what is told of a QP that fails.
    flushes: Flushes,
    mutation: Mutation,
}

struct World {
    plan: Plan,
    rng: Rng,
    journal: Journal,
    provider: Provider,
    now_us: u64,
    sent: Vec<Sent>,
    posted_recvs: u64,
    done_recvs: u64,
    /// Messages for the program: the next that the peer sends, and the next that the program waits
    /// for.
    peer_next: u32,
    wanted: u32,
    completed: Messages,
    consumed: u64,
    /// The provider has failed, and the journal is not stopped yet.
    failed: bool,
    stopping: bool,
    told: bool,
    lives: u32,
    late_successes: u32,
    destroyed: u32,
    /// A WRITE or SEND ran more than once.
    mistake_made: bool,
    ended: bool,
}

struct Pair<'a>([SendWr<'a>; 2]);

impl SendBatch for Pair<'_> {
    fn count(&self) -> usize {
        2
    }
    fn wr(&self, index: usize) -> SendWr<'_> {
        self.0[index]
    }
}

impl World {
    fn new(plan: Plan) -> World {
        let mut world = World {
            plan,
            rng: Rng(plan.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1),
            journal: World::journal(plan),
            provider: Provider::new(plan.flushes, plan.seed),
            now_us: 0,
            sent: Vec::new(),
            posted_recvs: 0,
            done_recvs: 0,
            peer_next: 0,
            wanted: 0,
            completed: Messages::default(),
            consumed: 0,
            failed: false,
            stopping: false,
            told: false,
            lives: 1,
            late_successes: 0,
            destroyed: 0,
            mistake_made: false,
            ended: false,
        };
        world.journal.open();
        world.journal.start();
        world
    }

    fn journal(plan: Plan) -> Journal {
        Journal::new(Config {
            caps: CAPS,
            wc_qpn: QPN,
            sq_sig_all: plan.sig_all,
            shared_receives: false,
            mutation: plan.mutation,
        })
    }

    fn makes_wc(&self, i: usize) -> bool {
        self.plan.sig_all || self.sent[i].signaled
    }

    // ---- the provider and the peer ----

    fn execute(&mut self) -> Outcome {
        let Some(e) = self.provider.sends.iter_mut().find(|e| !e.executed) else { return Ok(()) };
        e.executed = true;
        let (i, exact) = (e.sent, self.plan.exact);
        self.sent[i].executed += 1;
        let opcode = self.sent[i].opcode;
        let again = self.sent[i].executed > 1 && opcode != SendOpcode::Read;
        ensure!(
            !again || !exact && !opcode.consumes_receive(),
            "{opcode:?} {i} was executed twice"
        );
        Ok(())
    }

    fn acknowledge(&mut self) {
        if self.provider.sends.front().is_some_and(|e| e.executed) {
            let e = self.provider.sends.pop_front().unwrap();
            if e.signaled {
                self.provider.send_wc(e.wr_id, WcStatus::Success);
            }
        }
    }

    fn message_comes(&mut self) {
        if self.peer_next < WORK as u32 && !self.provider.in_error {
            if let Some(wr_id) = self.provider.recvs.pop_front() {
                self.provider.recv_wc(wr_id, WcStatus::Success, self.peer_next);
                self.peer_next += 1;
            }
        }
    }

    fn network_fails(&mut self) {
        use WcStatus::{FatalErr, RemAbortErr, RetryExcErr, WrFlushErr};
        let first = [RetryExcErr, RemAbortErr, FatalErr, WrFlushErr][self.rng.below(4) as usize];
        self.provider.fail(first, WrFlushErr);
        self.failed = true;
    }

    fn program_errs(&mut self) -> Outcome {
        use WcStatus::{LocLenErr, RemAccessErr, WrFlushErr};
        if self.provider.sends.is_empty() || self.provider.recvs.is_empty() {
            return Ok(());
        }
        self.mistake_made = true;
        match self.rng.below(3) {
            0 => self.provider.fail(RemAccessErr, WrFlushErr),
            1 => self.provider.fail(WrFlushErr, LocLenErr),
            _ => {
                // A request of the peer did it: the device says so by an event.
                self.provider.fail(WrFlushErr, WrFlushErr);
                if self.rng.one_in(2) {
                    self.poll_some()?;
                }
                let mut out = Out::default();
                self.journal.handle_own_error(&mut out);
                self.deliver(out)?;
            }
        }
        Ok(())
    }

    fn poll_some(&mut self) -> Outcome {
        for _ in 0..self.rng.below(4) {
            let from = if self.rng.one_in(2) {
                &mut self.provider.send_cq
            } else {
                &mut self.provider.recv_cq
            };
            let Some(wc) = from.pop_front() else { continue };
            self.handle(&wc)?;
        }
        Ok(())
    }

    fn handle(&mut self, wc: &Wc) -> Outcome {
        self.late_successes += u32::from(self.stopping && wc.status == WcStatus::Success as u32);
        let mut out = Out::default();
        let (mut quick, mut usual) = (self.journal.clone(), *wc);
        let is_usual = quick.complete_usual(&mut usual);
        self.journal.handle_wc(1, wc, &mut out);
        if is_usual {
            self.check_usual(wc, &usual, &quick, &out)?;
            self.journal = quick;
        }
        self.deliver(out)
    }

    /// `complete_usual` and `handle_wc` give the same WC and leave the same journal.
    fn check_usual(&self, wc: &Wc, usual: &Wc, quick: &Journal, out: &Out) -> Outcome {
        let is_send = matches!(Slot::parse(wc.wr_id), Some(Slot::Entry(Queue::Send, _)));
        let progress = |journal: &Journal| format!("{:?}", journal.progress(QpState::Rts));
        ensure!(
            out.0 == [(is_send, *usual)] && progress(quick) == progress(&self.journal),
            "{wc:?} gives {usual:?} in place, and otherwise {:?}",
            out.0
        );
        Ok(())
    }

    fn poll_all(&mut self) -> Outcome {
        while let Some(wc) = self.provider.send_cq.pop_front() {
            self.handle(&wc)?;
        }
        while let Some(wc) = self.provider.recv_cq.pop_front() {
            self.handle(&wc)?;
        }
        Ok(())
    }

    // ---- the owner ----

    fn look_for_failure(&mut self) -> Outcome {
        let looked = self.provider.send_cq.is_empty() && self.provider.recv_cq.is_empty();
        if let Some(status) = self.journal.poll_failure(looked) {
            ensure!(self.failed, "a QP that works is said to have failed: {status:?}");
            ensure!(!self.told, "it is said twice");
            self.told = true;
        }
        Ok(())
    }

    fn stop(&mut self) -> Outcome {
        self.stopping = true;
        let mut out = Out::default();
        self.now_us += 2_000;
        let step = self.journal.stop(self.now_us, &mut out);
        self.deliver(out)?;
        match step {
            Step::ToErr => {
                if !self.provider.in_error {
                    self.provider.fail(WcStatus::WrFlushErr, WcStatus::WrFlushErr);
                }
                self.journal.in_error();
                Ok(())
            }
            Step::Mark(queue) => {
                let wr_id = Slot::Marker(queue).wr_id();
                match queue {
                    Queue::Send => self.provider.send_wc(wr_id, WcStatus::WrFlushErr),
                    Queue::Recv => self.provider.recv_wc(wr_id, WcStatus::WrFlushErr, 0),
                }
                self.journal.marked(queue);
                Ok(())
            }
            Step::Wait => Ok(()),
            Step::Destroy => {
                self.poll_all()?;
                self.destroyed += 1;
                self.journal.provider_gone();
                Ok(())
            }
            Step::Done(backlog) => self.begin_life(backlog),
            Step::Ended => {
                ensure!(self.mistake_made, "it ended without a mistake");
                self.ended = true;
                Ok(())
            }
            Step::Strange => Err("the provider said nothing strange".into()),
        }
    }

    fn begin_life(&mut self, mut backlog: unbroken_types::Backlog) -> Outcome {
        self.completed += backlog.completed;
        self.consumed += backlog.executed.receives;
        ensure!(!backlog.exact, "a plain device does not count exactly");
        let mut truth = Messages::default();
        self.sent.iter().filter(|s| s.executed > 0).for_each(|s| truth.count(s.opcode));
        ensure!(
            truth.all >= self.completed.all,
            "{} completed, {} executed",
            self.completed.all,
            truth.all
        );
        let done = match self.plan.exact {
            true => PeerDone::Messages(truth.all - self.completed.all),
            false => PeerDone::Receives(truth.receives - self.completed.receives),
        };
        let ids: Vec<u64> = backlog.sends.iter().map(|e| e.wr_id).collect();
        let from = self.sent.len() - ids.len().min(self.sent.len());
        ensure!(
            ids == (from as u64..self.sent.len() as u64).collect::<Vec<_>>(),
            "the backlog has sends {ids:?}"
        );
        let recvs: Vec<u64> = backlog.recvs.iter().map(|e| e.wr_id).collect();
        ensure!(
            recvs == (self.done_recvs..self.posted_recvs).collect::<Vec<_>>(),
            "and receives {recvs:?}"
        );
        backlog.mark_executed(done);
        (self.peer_next, self.failed, self.stopping, self.told) =
            (self.consumed as u32, false, false, false);
        self.lives += 1;
        self.provider = Provider::new(self.plan.flushes, self.rng.below(u64::MAX));
        self.journal = World::journal(self.plan);
        let mut out = Out::default();
        let refused = |e| format!("adopt: {e}");
        let recvs = unbroken_types::Backlog {
            recvs: std::mem::take(&mut backlog.recvs),
            ..Default::default()
        };
        self.journal.adopt(&recvs, &mut out).map_err(refused)?;
        self.journal.open();
        while let Some(wr) = self.journal.next_recv() {
            let wr_id = wr.wr_id;
            self.journal.gave_recv();
            self.give_recv(wr_id);
        }
        self.journal.adopt(&backlog, &mut out).map_err(refused)?;
        self.journal.start();
        while let Some(wr) = self.journal.next_send(&mut out) {
            let (wr_id, sent) = (wr.wr_id, wr.remote_addr as usize / 8);
            let signaled = self.plan.sig_all || wr.flags.contains(SendFlags::SIGNALED);
            self.journal.gave_send();
            self.provider.sends.push_back(InQueue { wr_id, signaled, sent, executed: false });
        }
        self.deliver(out)
    }

    fn step(&mut self) -> Outcome {
        match self.rng.below(100) {
            0..20 => self.post_sends(),
            20..30 => self.post_recv(),
            30..45 => self.execute(),
            45..55 => {
                self.acknowledge();
                Ok(())
            }
            55..65 => {
                self.message_comes();
                Ok(())
            }
            65..90 => self.poll_some(),
            90..94 => self.look_for_failure(),
            94 if !self.failed && self.lives < 6 && !self.mistake_made && !self.stopping => {
                self.network_fails();
                Ok(())
            }
            95 if self.plan.mistake && !self.failed && !self.mistake_made && !self.stopping => {
                self.program_errs()
            }
            96..98
                if (self.failed || self.lives < 6) && !self.stopping && !self.journal.ended() =>
            {
                self.stop()
            }
            _ if self.stopping => self.stop(),
            _ => Ok(()),
        }
    }

    fn finished(&self) -> bool {
        let all = |i: usize| self.sent[i].status.is_some() || !self.makes_wc(i);
        self.sent.len() == WORK && (0..WORK).all(all) && self.wanted == WORK as u32
    }

    fn run(&mut self) -> Outcome {
        for step in 0..STEPS {
            self.step().map_err(|e| format!("step {step}: {e}"))?;
            if self.ended || self.finished() {
                break;
            }
            if self.failed && !self.stopping && self.rng.one_in(10) {
                self.stop()?;
            }
        }
        self.poll_all()?;
        if self.mistake_made {
            return self.check_end();
        }
        ensure!(
            self.finished(),
            "not all is done: {} sends posted, {} messages",
            self.sent.len(),
            self.wanted
        );
        let executed = self.sent.iter().enumerate().find(|(_, s)| s.executed == 0);
        ensure!(executed.is_none(), "send {:?} was lost", executed.map(|(i, _)| i));
        Ok(())
    }

    /// The program's mistake has ended the QP: everything has a WC.
    fn check_end(&mut self) -> Outcome {
        ensure!(self.ended || self.journal.ended(), "a mistake of the program did not end the QP");
        ensure!(self.journal.is_empty(), "something has no WC in a QP that ended");
        ensure!(self.sent.iter().any(|s| s.status.is_some_and(|s| s != 0)), "nothing failed");
        ensure!(
            self.done_recvs == self.posted_recvs,
            "{} of {} receives",
            self.done_recvs,
            self.posted_recvs
        );
        Ok(())
    }
}

fn plans(mutation: Mutation, seeds: u64) -> impl Iterator<Item = Plan> {
    (0..seeds).map(move |seed| Plan {
        seed,
        exact: seed % 2 == 0,
        sig_all: seed % 5 == 4,
        mistake: seed % 3 == 2,
        flushes: match seed % 9 {
            0 => Flushes::Some,
            4 => Flushes::None,
            _ => Flushes::All,
        },
        mutation,
    })
}

#[test]
fn every_send_completes_once_in_order_and_nothing_is_lost_at_any_stop() {
    let (mut lives, mut late, mut mistakes, mut destroyed) = (0, 0, 0, 0);
    for plan in plans(Mutation::None, 4000) {
        let mut world = World::new(plan);
        world.run().unwrap_or_else(|e| panic!("{plan:?}: {e}"));
        (lives, late) = (lives + world.lives, late + world.late_successes);
        mistakes += u32::from(world.mistake_made);
        destroyed += world.destroyed;
    }
    println!(
        "{lives} lives, {late} successes while stopping, {mistakes} mistakes, {destroyed} ends"
    );
    assert!(lives > 8000 && late > 1000 && mistakes > 400, "{lives} {late} {mistakes}");
    assert!(destroyed > 1000, "{destroyed} of a provider that does not flush");
}

#[test]
#[cfg(feature = "mutants")]
fn every_rule_that_is_left_out_is_noticed() {
    use Mutation::*;
    for mutation in [
        FlushLetThrough,
        NoMarker,
        UnsignaledLost,
        ExecutedEarly,
        LateSuccessLost,
        LateReceiveUncounted,
        ExecutedAgain,
        OwnErrorHeld,
        FlushTrusted,
        FlushAwaited,
        UsualTooSoon,
    ] {
        let caught = plans(mutation, 4000)
            .find_map(|plan| World::new(plan).run().err().map(|e| (plan.seed, e)));
        println!("{mutation:?}: {caught:?}");
        assert!(caught.is_some(), "{mutation:?} passes");
    }
}
