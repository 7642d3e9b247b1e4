//! The daemon: waits for the kernel, for bfdd and for signals, and does what the reconciler says.
//!
//! Between two notifications it sleeps. It writes its status (`status.json`) when that changes, and
//! what happens to `events.jsonl`. When it is told to end it takes its rules away; when it dies its
//! rules stay and carry traffic, and the next one takes them over.

use std::collections::BTreeSet;
use std::os::fd::AsFd;
use std::time::Duration;

use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use rustix::event::{PollFd, PollFlags};
use serde_json::{json, Value};
use unbroken_edge_rules::{
    diff, Command, Event, Op, Reconciler, Rules, Settings, Table, Timing, Wanted,
};

use crate::bfd::Bfd;
use crate::command::run;
use crate::error::{EdgeError, Result};
use crate::events::{now_us, Events};
use crate::failover::{self, Failover};
use crate::folder::Folder;
use crate::frr::watch::{News, Watch};
use crate::last::{self, LastWays};
use crate::netlink::{wait, Dump, Kernel, Notifications};
use crate::policy::{self, Policies};
use crate::state::State;

/// FRR's daemons that somebody else has started are found this much later at most, and status is
/// written.
const TICK_US: u64 = 1_000_000;

/// How long rules are tried to be removed at the end.
const REMOVAL_US: u64 = 2_000_000;

/// Real-time priority with fast failover, below that of bfdd.
const PRIORITY: &str = "10";

/// Runs until SIGTERM or SIGINT. At SIGHUP it takes the configuration that is up now.
pub fn run_daemon(state: &State) -> Result<()> {
    let mut signals = SigSet::empty();
    signals.add(Signal::SIGTERM);
    signals.add(Signal::SIGINT);
    signals.add(Signal::SIGHUP);
    signals.thread_block().map_err(EdgeError::at("signals"))?;
    let signals = SignalFd::with_flags(&signals, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)
        .map_err(EdgeError::at("signals"))?;
    let _lock = state.become_daemon()?;
    let mut daemon = Daemon::open(state)?;
    loop {
        let result = daemon.run(&signals);
        match result {
            Ok(Signal::SIGHUP) => daemon = daemon.anew()?,
            _ => {
                daemon.close();
                return result.map(drop);
            }
        }
    }
}

struct Daemon {
    state: State,
    folder: Folder,
    watch: Option<Watch>,
    policies: Policies,
    settings: Option<Settings>,
    reconciler: Option<Reconciler>,
    kernel: Kernel,
    notifications: Notifications,
    bfd: Option<Bfd>,
    failover: Option<Failover>,
    last: Option<LastWays>,
    /// Destinations that have their last way only.
    on_last_way: usize,
    events: Events,
    next_tick_us: u64,
    written: Value,
    rounds: u64,
    operations: u64,
    /// Devices that were made ready for filters here.
    clsact: BTreeSet<u32>,
}

impl Daemon {
    fn open(state: &State) -> Result<Daemon> {
        let (config, taken) = state.take_config()?;
        if config.fast_failover {
            // A few milliseconds are what it is for. Where it is not allowed it is merely later.
            let _ = run(&["chrt", "-a", "-f", "-p", PRIORITY, &std::process::id().to_string()]);
        }
        let netlink = EdgeError::at("netlink");
        let settings = config.overlay();
        let timing =
            Timing { resync_us: u64::from(config.resync_s) * 1_000_000, ..Timing::default() };
        let reconciler = settings.clone().map(|s| Reconciler::new(s, timing, now_us()));
        let failover =
            config.fast_failover.then(|| Failover::open(&config, state.frr())).transpose()?;
        let last = config.frr.then(|| LastWays::open(&config, now_us())).transpose()?;
        let daemon = Daemon {
            policies: Policies::open(&config, now_us())?,
            watch: config.frr.then(|| Watch::open(state.frr())).transpose()?,
            reconciler,
            settings,
            kernel: Kernel::open().map_err(&netlink)?,
            notifications: Notifications::open().map_err(&netlink)?,
            bfd: None,
            failover,
            last,
            on_last_way: 0,
            events: Events::open(state.folder()?).map_err(EdgeError::at("events"))?,
            folder: state.folder()?,
            state: state.clone(),
            next_tick_us: 0,
            written: Value::Null,
            rounds: 0,
            operations: 0,
            clsact: BTreeSet::new(),
        };
        state.has_taken(&taken)?;
        Ok(daemon)
    }

    /// With the configuration that is up now; with the old one where that is none.
    fn anew(mut self) -> Result<Daemon> {
        let config = match self.state.config() {
            Ok(config) => config,
            Err(error) => {
                self.events.error(&error);
                return Ok(self);
            }
        };
        if self.failover.is_some() && !config.fast_failover {
            failover::close()?;
        }
        // Rules of other tenants or destinations the reconciler changes itself.
        let of_all = |settings: &Settings| Settings { tenants: Vec::new(), ..settings.clone() };
        let settings = config.overlay();
        if let Some(old) = self.settings.clone() {
            if settings.as_ref().map(of_all) != Some(of_all(&old)) {
                self.remove_rules(&old)?;
            }
        }
        let mut daemon = Daemon::open(&self.state)?;
        daemon.clsact = self.clsact;
        daemon.events.write("configuration", json!({}));
        Ok(daemon)
    }

    /// Gives the signal that ended it.
    fn run(&mut self, signals: &SignalFd) -> Result<Signal> {
        self.events.write("start", json!({}));
        loop {
            self.look_after_frr();
            let now = now_us();
            if now >= self.next_tick_us {
                self.tick();
                self.next_tick_us = now_us() + TICK_US;
            }
            self.reconcile()?;
            if let Some(failover) = &mut self.failover {
                if let Err(error) = failover.look(now_us()) {
                    self.events.error(&error);
                }
            }
            self.look_at_last_ways();
            match self.policies.look(now_us()) {
                Ok(0) => {}
                Ok(missing) => self.events.write("policies", json!({ "missing": missing })),
                Err(error) => self.events.error(&error),
            }
            self.wait(signals)?;
            if let Some(info) = signals.read_signal().map_err(EdgeError::at("signals"))? {
                return Signal::try_from(info.ssi_signo as i32).map_err(EdgeError::at("signals"));
            }
            let heard = self.notifications.drain().map_err(EdgeError::at("netlink"))?;
            if heard.routes {
                for (by, _) in [("bgp", heard.bgp), ("edge", heard.own)].iter().filter(|b| b.1) {
                    self.events.write("routes", json!({ "by": by }));
                }
                self.failover.iter_mut().for_each(Failover::changed);
            }
            if heard.policies {
                self.policies.changed(now_us());
            }
            if let (true, Some(reconciler)) = (heard.tables, &mut self.reconciler) {
                let event = if heard.overrun { Event::Overrun } else { Event::Changed };
                reconciler.event(now_us(), event);
            }
            self.read_bfd();
            if let (true, Some(last)) = (heard.routes || heard.tables, &mut self.last) {
                last.changed(now_us());
            }
        }
    }

    fn look_at_last_ways(&mut self) {
        let Some(last) = &mut self.last else { return };
        match last.look(now_us()) {
            Ok(Some(count)) if count != self.on_last_way => {
                self.on_last_way = count;
                self.events.write("last_way", json!({ "destinations": count }));
            }
            Ok(_) => {}
            Err(error) => self.events.error(&error),
        }
    }

    fn wait(&self, signals: &SignalFd) -> Result<()> {
        let deadlines = [
            Some(self.next_tick_us),
            self.reconciler.as_ref().map(Reconciler::deadline_us),
            self.failover.as_ref().map(Failover::deadline_us),
            self.last.as_ref().map(LastWays::deadline_us),
            self.watch.as_ref().map(Watch::deadline_us),
            Some(self.policies.deadline_us()),
        ];
        let next = deadlines.into_iter().flatten().min().unwrap_or(self.next_tick_us);
        let longest = Duration::from_micros(next.saturating_sub(now_us()));
        let signals = signals.as_fd();
        let mut files = vec![
            PollFd::new(&self.notifications, PollFlags::IN),
            PollFd::from_borrowed_fd(signals, PollFlags::IN),
        ];
        if let Some(bfd) = &self.bfd {
            files.push(PollFd::new(bfd.stream(), PollFlags::IN));
        }
        files.extend(self.watch.iter().flat_map(Watch::files));
        wait(&mut files, Some(longest)).map_err(EdgeError::at("poll"))
    }

    /// Does what the reconciler asks for until it asks for nothing.
    fn reconcile(&mut self) -> Result<()> {
        let (Some(reconciler), Some(settings)) = (&mut self.reconciler, &self.settings) else {
            return Ok(());
        };
        while let Some(command) = reconciler.poll(now_us()) {
            match command {
                Command::Dump(number, table) => {
                    let dump = self.kernel.dump(table, settings);
                    reconciler.dumped(now_us(), number, dump);
                }
                Command::Apply(number, ops) => {
                    let began = now_us();
                    let failures = match self.kernel.apply(&ops, settings) {
                        Ok(failures) => failures,
                        Err(e) => (0..ops.len()).map(|i| (i, e.to_string())).collect(),
                    };
                    for (place, op) in ops.iter().enumerate() {
                        if let (Op::AddClsact { ifindex }, false) =
                            (op, failures.iter().any(|f| f.0 == place))
                        {
                            self.clsact.insert(*ifindex);
                        }
                    }
                    let kernel_us = now_us() - began;
                    let what = json!({ "operations": ops.len(), "failures": failures.len(), "kernel_us": kernel_us });
                    self.events.write("rules", what);
                    reconciler.applied(now_us(), number, &failures);
                }
            }
        }
        let status = reconciler.status();
        if (status.rounds, status.operations) != (self.rounds, self.operations) {
            if status.operations != self.operations {
                self.events.write("reconciled", json!({ "convergence_us": status.convergence_us }));
            }
            (self.rounds, self.operations) = (status.rounds, status.operations);
        }
        Ok(())
    }

    fn read_bfd(&mut self) {
        let Some(bfd) = &mut self.bfd else { return };
        match bfd.read() {
            Ok(changes) => {
                for (peer, state) in changes {
                    let began = now_us();
                    self.events.write("bfd", json!({ "peer": peer, "state": state }));
                    if let Some(last) = &mut self.last {
                        last.bfd(began, peer, &state);
                    }
                    let Some(failover) = &mut self.failover else { continue };
                    match failover.bfd(began, peer, &state) {
                        Ok(0) => {}
                        Ok(routes) => {
                            let took_us = now_us() - began;
                            self.events.write(
                                "failover",
                                json!({ "peer": peer, "routes": routes, "took_us": took_us }),
                            );
                        }
                        Err(error) => self.events.error(&error),
                    }
                }
            }
            Err(error) => {
                self.events.write("bfdd", json!({ "lost": error.to_string() }));
                self.bfd = None;
                if let Some(last) = &mut self.last {
                    last.bfd_is_lost();
                }
            }
        }
    }

    /// Has what has died of FRR started again, and finds bfdd.
    fn look_after_frr(&mut self) {
        let Some(watch) = &mut self.watch else { return };
        for news in watch.look(now_us(), TICK_US) {
            match news {
                News::Ended(daemon) => self.events.write("frr", json!({ "ended": daemon })),
                News::Started(daemons) => {
                    self.events.write("frr", json!({ "started": daemons }));
                    self.next_tick_us = 0;
                }
                News::Failed(error) => self.events.error(&error),
            }
        }
    }

    /// Finds bfdd, and writes the status if it is another one.
    fn tick(&mut self) {
        if self.watch.is_some() && self.bfd.is_none() {
            self.bfd = self.state.frr().bfdd().and_then(Bfd::open).ok();
        }
        let bfd = self.bfd.as_ref().map(|b| json!(b.states)).unwrap_or_default();
        let rules = self.reconciler.as_ref().map(|r| {
            let s = r.status();
            json!({
                "destinations": s.destinations, "wanted": s.wanted, "present": s.present, "in_hw": s.in_hw,
                "no_place": s.no_place, "operations": s.operations, "failures": s.failures,
                "last_failure": s.last_failure, "overruns": s.overruns, "convergence_us": s.convergence_us,
            })
        });
        let status = json!({ "bfd": bfd, "rules": rules });
        if status != self.written {
            // Without a status the daemon is as useful; the next tick tries again.
            if self.folder.replace("status.json", &status.to_string()).is_ok() {
                self.written = status;
            }
        }
    }

    /// Takes away what is ours.
    fn close(&mut self) {
        let closed = [policy::close(), failover::close(), last::close()];
        closed.into_iter().filter_map(Result::err).for_each(|error| self.events.error(&error));
        if let Some(settings) = self.settings.clone() {
            if let Err(error) = self.remove_rules(&settings) {
                self.events.error(&error);
            }
        }
        self.events.write("end", json!({}));
    }

    fn remove_rules(&mut self, settings: &Settings) -> Result<()> {
        // A filter lets go of its actions a moment after it was removed, so they may take another
        // pass.
        let deadline = now_us() + REMOVAL_US;
        let mut first = self.remove_what_can_be(settings);
        while !matches!(first, Ok(true)) && now_us() < deadline {
            std::thread::sleep(Duration::from_millis(20));
            first = self.remove_what_can_be(settings);
        }
        let first = first.map(drop);
        let Dump::Links(links) = self.kernel.dump(Table::Links, settings) else { return first };
        for link in links.iter().filter(|l| self.clsact.contains(&l.ifindex)) {
            let nobody = |side: &str| {
                run(&["tc", "filter", "show", "dev", &link.name, side]).is_ok_and(|t| t.is_empty())
            };
            if nobody("ingress") && nobody("egress") {
                let _ = run(&["tc", "qdisc", "del", "dev", &link.name, "clsact"]);
            }
        }
        first
    }

    /// Gives whether nothing of ours is left.
    fn remove_what_can_be(&mut self, settings: &Settings) -> Result<bool> {
        let mut rules = Rules::default();
        for table in [Table::Clsact, Table::Filters, Table::Actions] {
            match self.kernel.dump(table, settings) {
                Dump::Clsact(devices) => rules.clsact = devices.into_iter().collect(),
                Dump::Filters(filters) => rules.filters = filters,
                Dump::Actions(actions) => rules.actions = actions,
                Dump::Failed(error) => return Err(EdgeError::Kernel(error)),
                _ => {}
            }
        }
        let plan = diff(settings, &Wanted::default(), &rules);
        let failures = self.kernel.apply(&plan.ops, settings).map_err(EdgeError::at("netlink"))?;
        let is_ours = |a: &&unbroken_edge_rules::Action| {
            a.cookie && settings.own.indexes.contains(&a.id.index)
        };
        // An action that a filter still holds is not among the operations.
        let waits = rules.actions.iter().filter(is_ours).count()
            > plan.ops.iter().filter(|o| matches!(o, Op::DelAction { .. })).count();
        match failures.first() {
            Some((_, error)) => Err(EdgeError::Kernel(error.clone())),
            None => Ok(!waits),
        }
    }
}
