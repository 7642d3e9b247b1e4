use super::*;
use proptest::prelude::*;
use unbroken_types::PathAttr;

const SETTINGS: Settings = Settings {
    manual: false,
    respecify: true,
    load_timeout_us: 1_000_000,
    migrate_timeout_us: 500_000,
};
const QP: Id = 7;

fn path(port: u8, to: u16) -> Path {
    Path { attr: PathAttr { port, dlid: to, ..PathAttr::default() }, timeout: 14 }
}

fn told(state: PathMigState, primary: Path, alternate: Option<Path>) -> Observed {
    Observed { broken: false, state, primary, alternate }
}

/// A machine with a queue pair on port 1, with alternate paths from port 2 and, less good, from
/// port 1 to elsewhere.
fn machine(settings: Settings) -> Machine {
    let mut m = Machine::new(settings);
    m.add(QP, told(PathMigState::Migrated, path(1, 1), None), 0).unwrap();
    m.specify(QP, &[path(2, 2), path(1, 2)]).unwrap();
    m
}

fn state(m: &Machine) -> State {
    m.info(QP).unwrap().state
}

fn kinds(m: &mut Machine) -> Vec<Kind> {
    std::iter::from_fn(|| m.take_event()).map(|e| e.kind).collect()
}

fn arm(m: &mut Machine, now_us: u64) -> Path {
    let to = m.begin_load(QP, now_us).unwrap();
    m.loaded(QP, now_us);
    m.observed(QP, told(PathMigState::Armed, m.info(QP).unwrap().primary, Some(to)), now_us);
    assert_eq!(state(m), State::Armed);
    assert_eq!(kinds(m), [Kind::Armed]);
    to
}

#[test]
fn a_path_is_loaded_migrated_to_and_another_loaded_by_itself() {
    let mut m = machine(SETTINGS);
    assert_eq!(arm(&mut m, 0), path(2, 2));
    m.begin_migrate(QP, 10).unwrap();
    assert_eq!(state(&m), State::Migrating);
    m.migrated(QP, 20);
    assert_eq!(kinds(&mut m), [Kind::Migrated { asked: true }]);
    let info = m.info(QP).unwrap();
    assert_eq!(
        (info.state, info.primary, info.loaded, info.migrations),
        (State::Unloaded, path(2, 2), None, 1)
    );
    assert_eq!(m.due(20), [], "the peer is to hear of it first");
    assert_eq!(m.due(20 + SETTLE_US), [Action::Query(QP)]);
    m.observed(QP, told(PathMigState::Migrated, path(2, 2), None), 20 + SETTLE_US);
    assert_eq!(m.due(21 + SETTLE_US), [Action::Load(QP, path(1, 1))]);
    m.loaded(QP, 30);
    assert_eq!(state(&m), State::Rearm);
}

#[test]
fn with_manual_nothing_is_loaded_by_itself() {
    let mut m = machine(Settings { manual: true, ..SETTINGS });
    arm(&mut m, 0);
    m.migrated(QP, 20);
    m.port(1, false, 30);
    m.port(1, true, 40);
    assert_eq!(m.due(40 + SETTLE_US), [Action::Query(QP)]);
    m.observed(QP, told(PathMigState::Migrated, path(2, 2), None), 40 + SETTLE_US);
    assert_eq!(m.due(u64::MAX / 2), []);
    assert_eq!(state(&m), State::Unloaded);
}

#[test]
fn queries_follow_after_pauses_that_grow_until_it_is_armed() {
    let mut m = machine(SETTINGS);
    m.begin_load(QP, 0).unwrap();
    m.loaded(QP, 0);
    let (mut times, mut now_us) = (Vec::new(), 0);
    while times.len() < 12 {
        now_us = m.next_us().unwrap();
        assert_eq!(m.due(now_us), [Action::Query(QP)]);
        times.push(now_us);
        m.observed(QP, told(PathMigState::Rearm, path(1, 1), Some(path(2, 2))), now_us);
    }
    let pauses: Vec<u64> = times.windows(2).map(|w| w[1] - w[0]).collect();
    assert!(times[0] == 50 && pauses.windows(2).all(|w| w[0] <= w[1]), "{times:?}");
    assert_eq!(pauses.last(), Some(&20_000));
    m.observed(QP, told(PathMigState::Armed, path(1, 1), Some(path(2, 2))), now_us);
    assert_eq!((kinds(&mut m), m.next_us()), (vec![Kind::Armed], None));
}

#[test]
fn many_that_wait_do_not_query_more() {
    let mut m = Machine::new(SETTINGS);
    for id in 0..4096 {
        m.add(id, told(PathMigState::Migrated, path(1, 1), None), 0).unwrap();
        m.specify(id, &[path(2, 2)]).unwrap();
        m.begin_load(id, 0).unwrap();
        m.loaded(id, 0);
    }
    let (mut queries, mut from_us) = (0, 0);
    for now_us in (0..20_000_000).step_by(1000) {
        let actions = m.due(now_us);
        assert!(actions.len() <= MAX_ACTIONS);
        for action in actions {
            let Action::Query(id) = action else { continue };
            m.observed(id, told(PathMigState::Rearm, path(1, 1), Some(path(2, 2))), now_us);
            queries += u64::from(now_us >= 10_000_000);
        }
        from_us = now_us;
    }
    assert!(
        queries > 0 && queries <= 11 * QUERIES_PER_SECOND,
        "{queries} in the last ten seconds of {from_us} us"
    );
}

#[test]
fn one_that_is_late_is_told_once_and_still_waited_for() {
    let mut m = machine(SETTINGS);
    m.begin_load(QP, 0).unwrap();
    m.loaded(QP, 0);
    for now_us in (0..3_000_000).step_by(10_000) {
        if m.due(now_us) == [Action::Query(QP)] {
            m.observed(QP, told(PathMigState::Rearm, path(1, 1), Some(path(2, 2))), now_us);
        }
    }
    assert_eq!((kinds(&mut m), state(&m)), (vec![Kind::LoadLate], State::Rearm));
    m.observed(QP, told(PathMigState::Armed, path(1, 1), Some(path(2, 2))), 3_000_000);
    assert_eq!(kinds(&mut m), [Kind::Armed]);
}

#[test]
fn a_migration_that_does_not_come_fails_in_time() {
    let mut m = machine(SETTINGS);
    arm(&mut m, 0);
    m.begin_migrate(QP, 0).unwrap();
    m.due(SETTINGS.migrate_timeout_us);
    assert_eq!((kinds(&mut m), state(&m)), (vec![Kind::MigrationFailed], State::Armed));
}

#[test]
fn a_migration_that_a_query_showed_is_not_counted_again_by_its_event() {
    let mut m = machine(SETTINGS);
    arm(&mut m, 0);
    m.begin_migrate(QP, 10).unwrap();
    m.observed(QP, told(PathMigState::Migrated, path(2, 2), None), 20);
    assert_eq!(kinds(&mut m), [Kind::Migrated { asked: true }]);
    // The event comes when the next path is armed.
    assert_eq!(arm(&mut m, 30), path(1, 1));
    m.migrated(QP, 40);
    assert_eq!(m.due(40), [Action::Query(QP)]);
    m.observed(QP, told(PathMigState::Armed, path(2, 2), Some(path(1, 1))), 50);
    assert_eq!((kinds(&mut m), state(&m)), (vec![], State::Armed));
    // The next event is news.
    m.migrated(QP, 60);
    assert_eq!(kinds(&mut m), [Kind::Migrated { asked: false }]);
    assert_eq!(m.info(QP).unwrap().migrations, 2);
}

#[test]
fn an_unhealthy_alternate_is_respecified_and_the_better_one_comes_back_when_its_port_is_steady() {
    let mut m = machine(SETTINGS);
    arm(&mut m, 0);
    m.port(2, false, 100);
    assert_eq!(kinds(&mut m), [Kind::Unhealthy]);
    assert_eq!(m.due(100), [Action::Load(QP, path(1, 2))]);
    assert_eq!(kinds(&mut m), [Kind::Respecified]);
    m.loaded(QP, 110);
    m.observed(QP, told(PathMigState::Armed, path(1, 1), Some(path(1, 2))), 120);
    m.port(2, true, 200);
    m.port(2, false, 300);
    m.port(2, true, 400);
    assert_eq!(m.due(200 + STEADY_US), [], "it was down since");
    assert_eq!(m.due(400 + STEADY_US), [Action::Load(QP, path(2, 2))]);
    assert_eq!(kinds(&mut m), [Kind::Armed, Kind::Respecified]);
}

#[test]
fn an_alternate_without_another_stays_and_is_healthy_again() {
    let mut m = machine(SETTINGS);
    m.specify(QP, &[path(2, 2)]).unwrap();
    arm(&mut m, 0);
    m.port(2, false, 100);
    assert_eq!(m.due(200_000), []);
    assert!(!m.info(QP).unwrap().healthy);
    m.port(2, true, 300_000);
    assert_eq!(kinds(&mut m), [Kind::Unhealthy, Kind::Healthy]);
    assert_eq!((m.due(u64::MAX / 2), state(&m)), (vec![], State::Armed));
}

#[test]
fn after_a_ports_death_it_is_loaded_when_that_is_back() {
    let mut m = machine(SETTINGS);
    m.specify(QP, &[path(2, 2)]).unwrap();
    arm(&mut m, 0);
    m.migrated(QP, 100);
    m.port(1, false, 200);
    assert_eq!(m.due(1_000_000), [Action::Query(QP)]);
    m.observed(QP, told(PathMigState::Migrated, path(2, 2), None), 1_000_000);
    assert_eq!(kinds(&mut m), [Kind::Migrated { asked: false }]);
    m.port(1, true, 2_000_000);
    assert_eq!(m.due(2_000_000 + SETTLE_US), [Action::Load(QP, path(1, 1))]);
}

#[test]
fn a_path_that_could_not_be_migrated_to_is_the_last_choice_for_a_while() {
    let mut m = machine(SETTINGS);
    arm(&mut m, 0);
    m.migration_failed(QP, 100);
    assert_eq!(m.due(100), [Action::Query(QP)]);
    m.observed(QP, told(PathMigState::Armed, path(1, 1), Some(path(2, 2))), 100);
    assert_eq!(m.due(100 + SETTLE_US), [Action::Load(QP, path(1, 2))]);
    assert_eq!(kinds(&mut m), [Kind::MigrationFailed, Kind::Respecified]);
    m.loaded(QP, 200 + SETTLE_US);
    m.observed(QP, told(PathMigState::Armed, path(1, 1), Some(path(1, 2))), 300 + SETTLE_US);
    assert_eq!(m.due(100 + SUSPECT_US), [Action::Load(QP, path(2, 2))]);
}

#[test]
fn what_the_device_refuses_is_told_and_left_until_something_changes() {
    let mut m = machine(SETTINGS);
    m.begin_load(QP, 0).unwrap();
    m.refused(QP, 22, 0);
    assert_eq!((kinds(&mut m), state(&m)), (vec![Kind::LoadFailed { errno: 22 }], State::Failed));
    assert_eq!(m.due(u64::MAX / 2), []);
    arm(&mut m, 10);
}

#[test]
fn a_queue_pair_in_error_is_told_once_and_left_alone() {
    let mut m = machine(SETTINGS);
    arm(&mut m, 0);
    let dead = Observed { broken: true, ..told(PathMigState::Armed, path(1, 1), None) };
    for now_us in [10, 20] {
        m.look(QP, now_us);
        assert_eq!(m.due(now_us), [Action::Query(QP)]);
        m.observed(QP, dead, now_us);
    }
    m.port(2, false, 30);
    m.port(2, true, 40);
    assert_eq!((kinds(&mut m), state(&m)), (vec![Kind::QpFailed], State::Failed));
    assert_eq!(m.due(u64::MAX / 2), []);
}

#[test]
fn unless_the_owner_tells_its_peer_it_is_the_best_path_or_none() {
    let mut m = machine(Settings { respecify: false, ..SETTINGS });
    arm(&mut m, 0);
    m.port(2, false, 10);
    assert_eq!((m.due(1_000_000), kinds(&mut m)), (vec![], vec![Kind::Unhealthy]));
    m.port(2, true, 2_000_000);
    assert_eq!((m.due(9_000_000), kinds(&mut m)), (vec![], vec![Kind::Healthy]));
    m.migrated(QP, 9_000_000);
    m.port(1, false, 9_000_000);
    m.observed(QP, told(PathMigState::Migrated, path(2, 2), None), 9_000_001);
    assert_eq!(m.due(20_000_000), [], "its peer, whose ports are up, would load the way back");
    assert_eq!(m.begin_load(QP, 20_000_000), Err(Refusal::Unhealthy(vec![1, 1])));
    m.port(1, true, 20_000_000);
    assert_eq!(m.due(21_000_000), [Action::Load(QP, path(1, 1))]);
}

#[test]
fn the_owner_may_place_the_path_in_use_elsewhere() {
    let mut m = machine(SETTINGS);
    m.specify(QP, &[path(2, 2), path(2, 1), path(1, 1)]).unwrap();
    arm(&mut m, 0);
    m.migrated(QP, 100);
    assert_eq!(m.due(100 + SETTLE_US), [Action::Query(QP)]);
    m.observed(QP, told(PathMigState::Migrated, path(2, 2), None), 100 + SETTLE_US);
    assert_eq!(m.due(101 + SETTLE_US), [Action::Load(QP, path(2, 1))]);
}

#[test]
fn refusals_say_why() {
    let mut m = Machine::new(SETTINGS);
    assert_eq!(m.begin_load(QP, 0), Err(Refusal::Unknown));
    m.add(QP, told(PathMigState::Migrated, path(1, 1), None), 0).unwrap();
    assert_eq!(m.add(QP, told(PathMigState::Migrated, path(1, 1), None), 0), Err(Refusal::Twice));
    assert_eq!(m.begin_load(QP, 0), Err(Refusal::NoPath));
    assert_eq!(m.specify(QP, &[]), Err(Refusal::Paths(0)));
    assert_eq!(m.specify(QP, &[path(2, 2); MAX_PATHS]), Err(Refusal::Paths(MAX_PATHS)));
    m.specify(QP, &[path(2, 2)]).unwrap();
    assert_eq!(m.begin_migrate(QP, 0), Err(Refusal::State(State::Unloaded)));
    m.port(2, false, 0);
    assert_eq!(m.begin_load(QP, 0), Err(Refusal::Unhealthy(vec![2])));
    m.port(2, true, 0);
    m.begin_load(QP, 0).unwrap();
    assert_eq!(m.begin_load(QP, 0), Err(Refusal::State(State::Loading)));
    m.remove(QP).unwrap();
    assert_eq!((m.remove(QP), m.next_us()), (Err(Refusal::Unknown), None));
}

#[test]
fn what_the_program_has_loaded_itself_is_known() {
    let mut m = Machine::new(SETTINGS);
    m.add(QP, told(PathMigState::Armed, path(1, 1), Some(path(2, 2))), 0).unwrap();
    assert_eq!((state(&m), m.info(QP).unwrap().loaded), (State::Armed, Some(path(2, 2))));
    m.begin_migrate(QP, 0).unwrap();
}

/// The device under a machine: what the rules of `unbroken-roce`'s migration leave of one end.
struct Device {
    state: PathMigState,
    primary: Path,
    alternate: Option<Path>,
    /// Events of migrations that the machine has not been told.
    pending: u32,
    migrations: u64,
}

impl Device {
    fn migrate(&mut self) {
        if let Some(path) = self.alternate.take() {
            (self.primary, self.state) = (path, PathMigState::Migrated);
            (self.pending, self.migrations) = (self.pending + 1, self.migrations + 1);
        }
    }
}

proptest! {
    /// Whatever happens in whatever order: the machine never counts a migration twice, and when all
    /// events and answers are in, it knows what is so.
    #[test]
    fn it_knows_what_is_so(steps in prop::collection::vec((0u8..10, 0u64..200_000), 1..200)) {
        let mut m = machine(SETTINGS);
        let mut d = Device { state: PathMigState::Migrated, primary: path(1, 1), alternate: None, pending: 0, migrations: 0 };
        let (mut now_us, mut crossed) = (0, false);
        for (step, pause_us) in steps.into_iter().chain([(4, 0); 64]).chain([(9, 2_000_000); 8]) {
            now_us += pause_us;
            let mut load = None;
            match step {
                0 => load = m.begin_load(QP, now_us).ok(),
                1 => if m.begin_migrate(QP, now_us).is_ok() {
                    if d.state == PathMigState::Armed { d.migrate() } else { m.migration_refused(QP) }
                },
                2 => if d.state == PathMigState::Rearm { d.state = PathMigState::Armed },
                3 => if d.state == PathMigState::Armed { d.migrate() },
                4 => if d.pending > 0 { d.pending -= 1; m.migrated(QP, now_us) },
                5 => m.port(1 + (pause_us % 2) as u8, pause_us % 3 == 0, now_us),
                6 => m.observed(QP, told(d.state, d.primary, d.alternate), now_us),
                _ => for action in m.due(now_us) {
                    match action {
                        Action::Query(_) => m.observed(QP, told(d.state, d.primary, d.alternate), now_us),
                        Action::Load(_, to) => load = Some(to),
                    }
                },
            }
            if let Some(to) = load {
                prop_assert!(!to.is_way_of(&m.info(QP).unwrap().primary));
                crossed |= d.pending > 0 || d.state == PathMigState::Migrated && m.info(QP).unwrap().primary != d.primary;
                (d.alternate, d.state) = (Some(to), PathMigState::Rearm);
                m.loaded(QP, now_us);
            }
            prop_assert!(m.info(QP).unwrap().migrations <= d.migrations);
        }
        m.observed(QP, told(d.state, d.primary, d.alternate), now_us);
        let info = m.info(QP).unwrap();
        prop_assert_eq!(info.primary, d.primary);
        prop_assert!(info.migrations == d.migrations || crossed);
        let right = match d.state {
            PathMigState::Migrated => State::Unloaded,
            PathMigState::Rearm => State::Rearm,
            PathMigState::Armed => State::Armed,
        };
        prop_assert_eq!(info.state, right);
        let events = kinds(&mut m).iter().filter(|k| matches!(k, Kind::Migrated { .. })).count();
        prop_assert_eq!(events as u64, info.migrations);
    }
}
