//! One seeded run: a reconciler, a kernel, EVPN, somebody else who uses tc, and everything that can
//! go wrong between them.

use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;

use unbroken_edge_rules::{
    ActionId, ActionKind, ActionSpec, Command, Dump, Event, FdbEntry, Mac, Match, Mutation,
    Offload, Op, Own, Reconciler, Settings, Table, Tenant, Timing,
};

use crate::kernel::{Kernel, KernelAction, KernelFilter};
use crate::rng::Rng;

pub const TIMING: Timing =
    Timing { settle_us: 1_000, retry_us: 20_000, reply_us: 200_000, resync_us: 2_000_000 };
/// Disturbances happen within this time.
const DISTURBED_US: u64 = 8_000_000;
const DISTURBANCES: u64 = 25;
/// A round's own time beside the waits that its timing names.
const ROUND_US: u64 = 400_000;
/// Longer than any round: rules of destinations that have been there that long must not go away.
const OLD_US: u64 = 1_500_000;
/// Destinations that nothing ever happens to, at each tenant.
const STABLE: u8 = 3;

pub fn settings(mutation: Mutation, offload: Offload) -> Settings {
    let tenant = |vni: u32, ports: &[&str]| Tenant {
        vni,
        anchor: format!("vni{vni}"),
        ports: ports.iter().map(|p| (*p).to_owned()).collect(),
    };
    Settings {
        loopback: Ipv4Addr::new(10, 255, 0, 1),
        port: 4789,
        vtep: "vtep".into(),
        tenants: vec![tenant(100, &["rep0", "rep1"]), tenant(200, &["rep2"])],
        offload,
        own: Own { priority: 7, handles: 0x100..0x180, indexes: 0x100..0x140 },
        mutation,
    }
}

pub fn mac(last: u8) -> Mac {
    Mac([2, 0, 0, 0, 0, last])
}

fn host(number: u64) -> Ipv4Addr {
    Ipv4Addr::new(10, 255, 0, 2 + (number % 5) as u8)
}

enum Happening {
    Disturb,
    Notify(Event),
    /// The second half of a dump is read; with the number, the first half and the generation of
    /// that time.
    DumpEnds(u64, Box<(Table, Kernel)>),
    /// The second half of a batch is carried out, with the failures of the first.
    ApplyEnds(u64, Vec<Op>, usize, Vec<(usize, String)>),
    Dumped(u64, Box<Dump>),
    Applied(u64, Vec<(usize, String)>),
    /// EVPN puts the entries of a device that was made again.
    Relearn(Vec<(String, Mac, Ipv4Addr)>),
}

pub struct World {
    rng: Rng,
    pub kernel: Kernel,
    settings: Settings,
    reconciler: Reconciler,
    now: u64,
    sequence: u64,
    queue: BTreeMap<(u64, u64), Happening>,
    /// Since when the devices and the table of a tenant have stood.
    since: u64,
    /// Answers may be lost, batches may end half-way.
    faulty: bool,
    /// Answers of older daemons are not delivered.
    epoch: u64,
    writes: u64,
    pub problems: Vec<String>,
}

impl World {
    pub fn new(seed: u64, mutation: Mutation) -> World {
        let mut rng = Rng(seed);
        let offload = [Offload::SkipHw, Offload::Both, Offload::SkipSw][rng.below(3) as usize];
        let settings = settings(mutation, offload);
        let mut kernel = Kernel::default();
        for name in ["lo", "rep0", "rep1", "rep2", "vni100", "vni200", "vtep", "other"] {
            kernel.add_link(name);
        }
        let mut world = World {
            rng,
            reconciler: Reconciler::new(settings.clone(), TIMING, 0),
            kernel,
            settings,
            now: 0,
            sequence: 0,
            queue: BTreeMap::new(),
            since: 0,
            faulty: true,
            epoch: 0,
            writes: 0,
            problems: Vec::new(),
        };
        for (anchor, n) in [("vni100", 0), ("vni200", 1)] {
            for i in 0..STABLE {
                world.learn(anchor, mac(i), host(u64::from(i) + n));
            }
        }
        let other = world.kernel.ifindex("other").unwrap_or_default();
        world.kernel.clsact.insert(other);
        for _ in 0..4 {
            world.foreign_adds();
        }
        for _ in 0..DISTURBANCES {
            let at = world.rng.below(DISTURBED_US);
            world.at(at, Happening::Disturb);
        }
        world
    }

    fn at(&mut self, time: u64, what: Happening) {
        self.sequence += 1;
        self.queue.insert((time, self.sequence), what);
    }

    fn after(&mut self, most_us: u64, what: Happening) {
        let delay = self.rng.below(most_us) + 1;
        self.at(self.now + delay, what);
    }

    fn learn(&mut self, device: &str, mac: Mac, dst: Ipv4Addr) {
        if let Some(ifindex) = self.kernel.ifindex(device) {
            self.kernel.fdb.retain(|e| !(e.ifindex == ifindex && e.mac == mac));
            self.kernel.fdb.insert(FdbEntry {
                ifindex,
                mac,
                dst: Some(dst),
                extern_learn: true,
                permanent: false,
            });
            self.kernel.generation += 1;
        }
    }

    /// The kernel tells of a change: late, out of order, or not at all.
    fn notify(&mut self) {
        match self.rng.below(10) {
            0..=2 => {}
            3 => self.after(50_000, Happening::Notify(Event::Overrun)),
            _ => self.after(50_000, Happening::Notify(Event::Changed)),
        }
    }

    /// Runs to the end and gives what is wrong.
    pub fn run(mut self) -> Vec<String> {
        self.run_until(DISTURBED_US);
        self.faulty = false;
        self.run_until(DISTURBED_US + TIMING.resync_us + TIMING.reply_us + ROUND_US);
        let (is, should) = (self.kernel.effect(), self.kernel.should(&self.settings));
        if is != should {
            let missing: Vec<_> = should.iter().filter(|(k, v)| is.get(k) != Some(v)).collect();
            let extra: Vec<_> = is.iter().filter(|(k, v)| should.get(k) != Some(v)).collect();
            let status = self.reconciler.status();
            self.problems.push(format!(
                "not converged: missing {missing:?}, too much {extra:?}; {status:?}"
            ));
        }
        let orphans = self.kernel.orphans();
        if !orphans.is_empty() {
            self.problems.push(format!("actions that nobody refers to: {orphans:?}"));
        }
        self.writes = 0;
        self.run_until(self.now + 3 * TIMING.resync_us);
        if self.writes > 0 {
            self.problems.push(format!("{} writes although all was right", self.writes));
        }
        self.problems.append(&mut self.kernel.violations);
        self.problems
    }

    fn run_until(&mut self, end: u64) {
        loop {
            while let Some(command) = self.reconciler.poll(self.now) {
                self.command(command);
            }
            let next = self.queue.keys().next().map_or(u64::MAX, |k| k.0);
            let at = next.min(self.reconciler.deadline_us());
            if at > end {
                self.now = end;
                return;
            }
            // A deadline in the past would be a loop without end.
            if at <= self.now && next > self.now {
                self.problems.push(format!("the deadline {at} is not after {}", self.now));
                self.now = end;
                return;
            }
            self.now = at.max(self.now);
            if next <= self.now {
                if let Some((_, what)) = self.queue.pop_first() {
                    self.happen(what);
                }
            }
        }
    }

    fn command(&mut self, command: Command) {
        match command {
            Command::Dump(number, table) => {
                if self.faulty && self.rng.one_in(200) {
                    return;
                }
                if self.faulty && self.rng.one_in(200) {
                    let failed = Dump::Failed("ENOMEM".into());
                    return self.after(1_000, Happening::Dumped(number, Box::new(failed)));
                }
                if self.faulty && self.rng.one_in(40) {
                    // Something happens while the table is read.
                    self.after(4_000, Happening::Disturb);
                }
                let first = Box::new((table, self.kernel.clone()));
                self.after(4_000, Happening::DumpEnds(number + (self.epoch << 32), first));
            }
            Command::Apply(number, ops) => {
                let half = self.rng.below(ops.len() as u64 + 1) as usize;
                let failures = self.apply(&ops[..half], 0);
                if self.faulty && self.rng.one_in(30) {
                    // The rest of the batch is lost, and the answer, too.
                    return;
                }
                self.after(
                    3_000,
                    Happening::ApplyEnds(number + (self.epoch << 32), ops, half, failures),
                );
            }
        }
    }

    fn happen(&mut self, what: Happening) {
        match what {
            Happening::Disturb => self.disturb(),
            Happening::Notify(event) => self.reconciler.event(self.now, event),
            Happening::Relearn(entries) => {
                for (device, mac, dst) in entries {
                    self.learn(&device, mac, dst);
                }
                self.since = self.now;
                self.notify();
            }
            Happening::DumpEnds(number, first) => {
                let dump = self.dump(first.0, &first.1);
                self.after(1_000, Happening::Dumped(number, Box::new(dump)));
            }
            Happening::ApplyEnds(number, ops, half, mut failures) => {
                failures.extend(self.apply(&ops[half..], half));
                if self.faulty && self.rng.one_in(50) {
                    return;
                }
                self.after(1_000, Happening::Applied(number, failures));
            }
            Happening::Dumped(number, dump) => {
                if number >> 32 == self.epoch {
                    self.reconciler.dumped(self.now, number & 0xFFFF_FFFF, *dump);
                }
            }
            Happening::Applied(number, failures) => {
                if number >> 32 == self.epoch {
                    self.reconciler.applied(self.now, number & 0xFFFF_FFFF, &failures);
                }
            }
        }
    }

    /// The first half of a table as it was, the rest as it is, from the same place on: what moved
    /// across that place is missed or seen twice. Only links and forwarding entries say that they
    /// changed.
    fn dump(&self, table: Table, first: &Kernel) -> Dump {
        fn torn<T: Clone>(first: &[T], now: &[T]) -> Vec<T> {
            let place = first.len() / 2;
            first[..place].iter().chain(now.get(place..).unwrap_or_default()).cloned().collect()
        }
        fn all<T: Clone>(from: impl IntoIterator<Item = T>) -> Vec<T> {
            from.into_iter().collect()
        }
        let now = &self.kernel;
        let interrupted = |dump| match first.generation == now.generation {
            true => dump,
            false => Dump::Interrupted(Box::new(dump)),
        };
        match table {
            Table::Links => interrupted(Dump::Links(torn(&first.link_table(), &now.link_table()))),
            Table::Fdb => {
                interrupted(Dump::Fdb(torn(&all(first.fdb.clone()), &all(now.fdb.clone()))))
            }
            Table::Clsact => {
                Dump::Clsact(torn(&all(first.clsact.clone()), &all(now.clsact.clone())))
            }
            Table::Filters => Dump::Filters(torn(&first.filter_table(), &now.filter_table())),
            Table::Actions => Dump::Actions(torn(&first.action_table(), &now.action_table())),
        }
    }

    fn apply(&mut self, ops: &[Op], base: usize) -> Vec<(usize, String)> {
        let mut failures = Vec::new();
        for (place, op) in ops.iter().enumerate() {
            let before = self.guarded();
            self.writes += 1;
            if let Err(error) = self.kernel.apply(&self.settings, op) {
                failures.push((base + place, error));
            }
            for key in before.difference(&self.guarded()) {
                self.problems.push(format!(
                    "{op:?} takes away the rule of {key:?}, which is wanted all the time"
                ));
            }
            self.notify();
        }
        failures
    }

    /// Rules that are right and have long been wanted.
    fn guarded(&self) -> BTreeSet<(u32, Match)> {
        if self.now < self.since + OLD_US {
            return BTreeSet::new();
        }
        let (is, should) = (self.kernel.effect(), self.kernel.should(&self.settings));
        let stable = |m: &Match| m.mac.0[5] < STABLE;
        let right = is
            .into_iter()
            .filter(|((_, m), _)| stable(m))
            .filter(|(k, v)| should.get(k) == Some(v));
        right.map(|(k, _)| k).collect()
    }

    fn disturb(&mut self) {
        let changing = mac(STABLE + self.rng.below(8) as u8);
        let device = if self.rng.one_in(2) { "vni100" } else { "vni200" };
        let ifindex = self.kernel.ifindex(device).unwrap_or_default();
        match self.rng.below(22) {
            0..=7 => {
                let dst = host(self.rng.next());
                self.learn(device, changing, dst);
            }
            8 | 9 => {
                self.kernel.fdb.retain(|e| !(e.ifindex == ifindex && e.mac == changing));
                self.kernel.generation += 1;
            }
            10 => self.not_a_destination(ifindex, changing),
            11 | 12 => self.local(changing),
            13 => self.restart(),
            14 => self.remake(),
            15 | 16 => self.foreign_adds(),
            17 => self.foreign_removes_its_own(),
            _ => self.foreign_meddles(),
        }
        self.notify();
    }

    /// Entries that no rule is for.
    fn not_a_destination(&mut self, ifindex: u32, mac: Mac) {
        let entry =
            FdbEntry { ifindex, mac, dst: Some(host(1)), extern_learn: true, permanent: false };
        let entry = match self.rng.below(4) {
            0 => FdbEntry { mac: Mac::ZERO, ..entry },
            1 => FdbEntry { mac: Mac([1, 0, 0x5e, 0, 0, 1]), ..entry },
            2 => FdbEntry { extern_learn: false, mac: Mac([2, 0, 0, 0, 1, 1]), ..entry },
            _ => FdbEntry {
                dst: Some(self.settings.loopback),
                mac: Mac([2, 0, 0, 0, 1, 2]),
                ..entry
            },
        };
        self.kernel.fdb.insert(entry);
        self.kernel.generation += 1;
    }

    fn local(&mut self, mac: Mac) {
        let port = self
            .rng
            .pick(&["rep0", "rep1", "rep2"])
            .and_then(|p| self.kernel.ifindex(p))
            .unwrap_or_default();
        let permanent = self.rng.one_in(4);
        let entry = FdbEntry { ifindex: port, mac, dst: None, extern_learn: false, permanent };
        if !self.kernel.fdb.remove(&entry) {
            self.kernel.fdb.insert(entry);
        }
        self.kernel.generation += 1;
    }

    /// The daemon dies, perhaps in the middle of a batch, and begins anew.
    fn restart(&mut self) {
        self.epoch += 1;
        self.queue.retain(|_, h| !matches!(h, Happening::ApplyEnds(..)));
        self.reconciler = Reconciler::new(self.settings.clone(), TIMING, self.now);
    }

    /// A device goes and comes back with another number; EVPN fills its table again a little later.
    fn remake(&mut self) {
        let Some(name) = self.rng.pick(&["rep0", "rep1", "rep2", "vni100", "vni200", "vtep"])
        else {
            return;
        };
        let Some(old) = self.kernel.ifindex(name) else { return };
        let again = self.kernel.fdb.iter().filter(|e| e.ifindex == old && e.extern_learn);
        let again = again.filter_map(|e| Some((name.to_owned(), e.mac, e.dst?))).collect();
        self.kernel.del_link(old);
        self.kernel.add_link(name);
        // Until it is filled again nothing is guarded.
        self.since = self.now + 100_000;
        self.after(100_000, Happening::Relearn(again));
    }

    fn foreign_adds(&mut self) {
        let own = self.settings.own.clone();
        let cookie = self.rng.one_in(3);
        // Numbers of ours without our cookie, or others with it: neither makes it ours.
        let index = if cookie {
            1 + self.rng.below(50) as u32
        } else {
            own.indexes.start + self.rng.below(8) as u32
        };
        let id = ActionId { kind: ActionKind::Mirred, index };
        let action = KernelAction {
            spec: Some(ActionSpec::Redirect { ifindex: 1 }),
            cookie,
            offload: Offload::Both,
            foreign: true,
        };
        self.kernel.actions.entry(id).or_insert(action);
        if self.kernel.actions[&id].foreign {
            let device = self
                .rng
                .pick(&["rep0", "rep2", "vni100", "other"])
                .and_then(|d| self.kernel.ifindex(d));
            let Some(device) = device.filter(|d| self.kernel.clsact.contains(d)) else { return };
            let cookie = self.kernel.actions[&id].cookie;
            let key = match (cookie, self.rng.below(3)) {
                (_, 0) => (device, own.priority + 1, own.handles.start + self.rng.below(8) as u32),
                (_, 1) => {
                    (device, own.priority, self.rng.below(u64::from(own.handles.start)) as u32)
                }
                // With our cookie, priority and handle it would be ours.
                (true, _) => return,
                (false, _) => (device, own.priority, own.handles.start + self.rng.below(8) as u32),
            };
            let matches = self
                .rng
                .one_in(2)
                .then_some(Match { mac: Mac([4, 0, 0, 0, 0, key.2 as u8]), tunnel: None });
            let filter =
                KernelFilter { matches, actions: vec![id], offload: Offload::Both, foreign: true };
            self.kernel.filters.entry(key).or_insert(filter);
        }
    }

    fn foreign_removes_its_own(&mut self) {
        let keys: Vec<_> =
            self.kernel.filters.iter().filter(|(_, f)| f.foreign).map(|(k, _)| *k).collect();
        if let Some(key) = self.rng.pick(&keys) {
            self.kernel.filters.remove(&key);
        }
    }

    /// Somebody removes or changes what is ours.
    fn foreign_meddles(&mut self) {
        self.since = self.now;
        let ours: Vec<_> =
            self.kernel.filters.iter().filter(|(_, f)| !f.foreign).map(|(k, _)| *k).collect();
        let actions: Vec<_> =
            self.kernel.actions.iter().filter(|(_, a)| !a.foreign).map(|(k, _)| *k).collect();
        match self.rng.below(5) {
            0 => {
                self.rng.pick(&ours).map(|k| self.kernel.filters.remove(&k));
            }
            1 => {
                let clsact: Vec<u32> = self.kernel.clsact.iter().copied().collect();
                if let Some(device) = self.rng.pick(&clsact) {
                    self.kernel.del_clsact(device);
                }
            }
            2 => {
                let new = self.rng.one_in(2).then_some(ActionSpec::Decap);
                if let Some(action) =
                    self.rng.pick(&actions).and_then(|k| self.kernel.actions.get_mut(&k))
                {
                    action.spec = new;
                }
            }
            3 => {
                if let Some(filter) =
                    self.rng.pick(&ours).and_then(|k| self.kernel.filters.get_mut(&k))
                {
                    filter.matches = None;
                }
            }
            _ => {
                let ids: Vec<_> =
                    actions.iter().filter(|a| self.kernel.bound(**a) == 0).copied().collect();
                self.rng.pick(&ids).map(|k| self.kernel.actions.remove(&k));
            }
        }
    }
}
