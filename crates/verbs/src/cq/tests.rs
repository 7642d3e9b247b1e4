use super::*;
use crate::HeldEvents;

#[test]
fn a_queue_that_is_resized_keeps_what_waits_in_order() {
    let cq = Cq::new(4, None);
    let push = |wr_id| cq.push(Wc { wr_id, ..Wc::default() }, false);
    let take = |n: usize| {
        let mut out = vec![Wc::default(); n];
        let got = cq.take(&mut out).unwrap();
        out[..got].iter().map(|wc| wc.wr_id).collect::<Vec<_>>()
    };
    (0..3).for_each(push);
    assert_eq!(take(2), [0, 1]);
    (3..6).for_each(push); // around the ring's end
    assert_eq!(cq.resize(3).unwrap_err().errno(), libc::EINVAL);
    assert_eq!(cq.capacity(), 4);
    cq.resize(5).unwrap();
    assert_eq!(cq.capacity(), 8);
    (6..10).for_each(push);
    assert_eq!(take(20), [2, 3, 4, 5, 6, 7, 8, 9]);
    cq.resize(1).unwrap();
    (10..11).for_each(push);
    assert_eq!((cq.capacity(), take(9)), (1, vec![10]));
    (11..13).for_each(push);
    assert!(cq.overrun());
}

/// A queue with a driver that notes whom it is to remind, if it says that it does.
fn reminded(by_driver: bool) -> (Arc<Cq>, Arc<CompChannel>, Arc<Reminds>) {
    let channel = CompChannel::new().unwrap();
    let cq = Cq::new(8, Some(channel.clone()));
    let reminds = Arc::new(Reminds(by_driver, Mutex::default()));
    cq.attach(&(reminds.clone() as Arc<dyn Driver>));
    (cq, channel, reminds)
}

struct Reminds(bool, Mutex<Vec<(Weak<Cq>, u64)>>);

impl Reminds {
    fn remind(&self) {
        let list = std::mem::take(&mut *self.1.lock().unwrap());
        list.iter().for_each(|(cq, owed_for)| cq.upgrade().unwrap().remind(Some(*owed_for)));
    }
}

impl Driver for Reminds {
    fn drive(&self) {}
    fn remind_later(&self, cq: &Weak<Cq>, owed_for: u64) -> bool {
        if self.0 {
            self.1.lock().unwrap().push((cq.clone(), owed_for));
        }
        self.0
    }
}

#[test]
fn what_has_come_since_the_last_event_raises_one_when_the_queue_is_armed_and_not_polled() {
    for by_driver in [true, false] {
        let (cq, channel, driver) = reminded(by_driver);
        let push = |qp_num, solicited| cq.push(Wc { qp_num, ..Wc::default() }, solicited);
        let take = |n: usize| cq.take(&mut vec![Wc::default(); n]).unwrap();
        let armed = |solicited| {
            cq.req_notify(solicited);
            driver.remind();
            let raised = channel.has_events();
            if raised {
                channel.get_event().unwrap();
            }
            assert!(!channel.has_events());
            raised
        };
        assert!(!armed(false), "nothing is there");
        push(1, false);
        channel.get_event().unwrap();
        assert!(!armed(false), "it has raised its event, polled or not");
        push(1, false);
        channel.get_event().unwrap();
        push(1, false);
        assert_eq!(take(2), 2);
        assert!(armed(false), "the third came after the event");
        push(1, false);
        assert!(!channel.has_events(), "the event disarmed it");
        assert_eq!(take(8), 2);
        assert!(!armed(true), "all are polled");
        push(1, false);
        assert!(!channel.has_events() && !armed(true), "it is not solicited");
        assert!(armed(false), "... but is one of any");
        push(1, true);
        push(2, false);
        cq.purge(1);
        assert!(armed(false), "one waits that came after the event, whatever its number");
        cq.purge(2);
        assert!(!armed(false), "nothing waits");
    }
}

/// As in `ibv_rc_pingpong -e -t`, which ends at an event without a completion: the second of two
/// comes after the first's event was raised, and is polled after arming.
#[test]
fn what_was_there_before_the_arming_and_is_polled_after_it_raises_no_event() {
    let (cq, channel, driver) = reminded(true);
    let push = || cq.push(Wc::default(), false);
    let take = |n: usize| cq.take(&mut vec![Wc::default(); n]).unwrap();
    cq.req_notify(false);
    push();
    channel.get_event().unwrap();
    push();
    cq.req_notify(false);
    assert_eq!((take(1), take(8)), (1, 1));
    driver.remind();
    assert!(!channel.has_events());
    push();
    assert!(channel.has_events(), "it stayed armed");
    channel.get_event().unwrap();
    assert_eq!(take(8), 1);
    // Who takes some only, and then waits, has the event for the others: when it waits, and by its
    // descriptor.
    for waits in [true, false] {
        push();
        push();
        cq.req_notify(false);
        assert_eq!((take(1), channel.has_events()), (1, false));
        if !waits {
            driver.remind();
            assert!(channel.has_events());
        }
        channel.get_event().unwrap();
        driver.remind();
        assert!(!channel.has_events(), "one event for one arming");
        assert_eq!(take(8), 1);
    }
    // A reminder of an earlier arming comes before the program polls after a later one.
    push();
    cq.req_notify(false);
    let earlier = std::mem::take(&mut *driver.1.lock().unwrap());
    assert_eq!((take(1), earlier.len()), (1, 1));
    push();
    channel.get_event().unwrap();
    push();
    cq.req_notify(false);
    earlier.iter().for_each(|(cq, owed_for)| cq.upgrade().unwrap().remind(Some(*owed_for)));
    assert!(!channel.has_events());
    cq.req_notify(false);
    assert_eq!(driver.1.lock().unwrap().len(), 1, "armed twice, it owes what it owed");
    driver.remind();
    assert!(channel.has_events());
}

/// The program gets an event, arms the queue, and has no core for a while: until the next
/// completion has come, or until it is reminded of one that came before. It polls, and takes with
/// the first completion none that a second event was raised for.
#[test]
fn a_poll_leaves_what_an_event_waits_for() {
    for came_before in [false, true] {
        let (cq, channel, driver) = reminded(true);
        let push = || cq.push(Wc::default(), false);
        let next = || cq.take_before_event(&mut Wc::default()).unwrap();
        cq.req_notify(false);
        push();
        channel.get_event().unwrap();
        if came_before {
            push();
        }
        cq.req_notify(false);
        match came_before {
            true => driver.remind(),
            false => push(),
        }
        assert!(channel.has_events());
        assert_eq!((cq.take(&mut [Wc::default()]).unwrap(), next()), (1, 0));
        channel.get_event().unwrap();
        assert_eq!(next(), 1, "once it has the event it takes all");
        push();
        cq.req_notify(false);
        push();
        push();
        assert_eq!((next(), next(), cq.take(&mut [Wc::default(); 4]).unwrap()), (1, 0, 2));
    }
}

/// A device holds events back until it has brought all that it has: they count as there.
#[test]
fn an_event_that_is_held_back_is_waited_for_too() {
    let channel = CompChannel::new().unwrap();
    let cq = Cq::new(8, Some(channel.clone()));
    let next = || cq.take_before_event(&mut Wc::default()).unwrap();
    cq.req_notify(false);
    let held = HeldEvents::new();
    cq.push(Wc::default(), false);
    assert_eq!((channel.has_events(), next()), (false, 0));
    drop(held);
    assert_eq!((channel.has_events(), next()), (true, 0));
    channel.get_event().unwrap();
    assert_eq!(next(), 1);
}

/// A driver with a queue of its own, in which something comes when it is armed, and was before if
/// so said.
struct Arms(Mutex<Vec<bool>>, Arc<Cq>, bool);

impl Driver for Arms {
    fn drive(&self) {}
    fn bring(&self) {
        if self.2 {
            self.1.push(Wc::default(), true);
        }
    }
    fn arm(&self, solicited_only: bool) {
        self.0.lock().unwrap().push(solicited_only);
        self.1.push(Wc::default(), false);
    }
}

#[test]
fn what_drivers_have_and_what_comes_while_they_are_armed_raises_the_event() {
    for was_there in [false, true] {
        let channel = CompChannel::new().unwrap();
        let cq = Cq::new(4, Some(channel.clone()));
        let arms = Arc::new(Arms(Mutex::default(), cq.clone(), was_there));
        let driver: Arc<dyn Driver> = arms.clone();
        cq.attach(&driver);
        cq.fire();
        cq.req_notify(true);
        let asked = arms.0.lock().unwrap().clone();
        assert_eq!(
            (channel.has_events(), asked.len()),
            (was_there, 1),
            "the other is not solicited"
        );
        assert_eq!(cq.take(&mut [Wc::default(); 4]).unwrap(), 1 + usize::from(was_there));
        cq.fire();
        cq.fire();
        assert_eq!((channel.get_event().unwrap(), channel.has_events()), (0, false));
        cq.req_notify(false);
        assert_eq!(
            (channel.get_event().unwrap(), channel.has_events()),
            (0, false),
            "the one that came since"
        );
    }
}

#[test]
fn a_driver_that_is_attached_to_an_armed_queue_is_armed() {
    let cq = Cq::new(8, Some(CompChannel::new().unwrap()));
    let arms = [(); 3].map(|()| Arc::new(Arms(Mutex::default(), cq.clone(), false)));
    let attach = |n: usize| {
        let driver: Arc<dyn Driver> = arms[n].clone();
        cq.attach(&driver);
        cq.attach(&driver);
        arms[n].0.lock().unwrap().clone()
    };
    assert_eq!(attach(0), []);
    cq.req_notify(true);
    assert_eq!(attach(1), [true]);
    cq.req_notify(false);
    assert_eq!(attach(2), [], "it has fired");
}

/// Also where the QPs come and go in several threads, and while another one polls: only the last
/// takes its driver away.
#[test]
fn a_driver_stays_while_a_qp_completes_by_it() {
    let cq = Cq::new(4, None);
    let drivers: Vec<Arc<dyn Driver>> = (0..2)
        .map(|_| Arc::new(Arms(Mutex::default(), cq.clone(), false)) as Arc<dyn Driver>)
        .collect();
    drivers.iter().for_each(|driver| cq.attach(driver));
    let both = || cq.sole_driver().is_none();
    let ends = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !ends.load(Ordering::Relaxed) {
                cq.drive();
                assert!(both());
            }
        });
        let come_and_go = || {
            for _ in 0..1_000 {
                cq.attach(&drivers[0]);
                cq.detach(&drivers[0]);
            }
        };
        let threads = [(); 2].map(|()| scope.spawn(come_and_go));
        let ended = threads.map(|thread| thread.join());
        ends.store(true, Ordering::Relaxed);
        ended.into_iter().for_each(|end| end.unwrap());
    });
    assert!(both());
    cq.detach(&drivers[0]);
    assert!(cq.sole_driver().is_some_and(|sole| Arc::ptr_eq(&sole, &drivers[1])));
    cq.detach(&drivers[0]);
    assert!(cq.sole_driver().is_some(), "it was not there any more");
}

#[test]
fn an_overrun_is_told_once_and_said_by_every_poll() {
    let told = Arc::new(Mutex::new(Vec::new()));
    let hook = told.clone();
    let cq = Cq::with_overrun_hook(1, None, move |cookie| hook.lock().unwrap().push(cookie));
    cq.set_cookie(9);
    let push = || cq.offer(Wc { qp_num: 5, ..Wc::default() }, false);
    assert!(push() && told.lock().unwrap().is_empty());
    assert!(!push() && !push());
    assert_eq!(*told.lock().unwrap(), [9]);
    let poll = || cq.poll(&mut [Wc::default()]).unwrap_err().errno();
    assert_eq!(poll(), libc::EIO);
    cq.purge(5);
    assert_eq!((poll(), poll()), (libc::EIO, libc::EIO), "also where nothing is left in it");
}

#[test]
fn a_withdrawn_event_leaves_the_descriptor_quiet() {
    let channel = CompChannel::new().unwrap();
    for cookie in [1, 2, 1] {
        channel.raise(cookie);
    }
    channel.withdraw(1);
    assert_eq!(channel.get_event().unwrap(), 2);
    assert!(!channel.fd.take_back(), "nothing waits, and nothing is readable");
}

#[test]
fn events_are_held_while_a_device_brings_completions_and_no_longer() {
    let channel = CompChannel::new().unwrap();
    let cq = Cq::new(4, Some(channel.clone()));
    for held in [true, false] {
        cq.req_notify(false);
        let holds = held.then(crate::HeldEvents::new);
        cq.push(Wc::default(), false);
        assert_eq!(channel.has_events(), !held);
        let elsewhere = channel.clone();
        std::thread::spawn(move || elsewhere.raise(7)).join().unwrap();
        assert!(channel.has_events(), "another thread holds nothing");
        drop(holds);
        let events = [(); 2].map(|()| channel.get_event().unwrap());
        assert_eq!((events, channel.has_events()), (if held { [7, 0] } else { [0, 7] }, false));
        assert_eq!(cq.take(&mut [Wc::default(); 4]).unwrap(), 1);
    }
}

/// A device, or a driver with a queue of its own; counts what it is asked for.
#[derive(Default)]
struct Asked {
    own: Option<Arc<Cq>>,
    drives: AtomicU32,
    fetches: AtomicU32,
}

impl Driver for Asked {
    fn drive(&self) {
        self.drives.fetch_add(1, Ordering::Relaxed);
    }

    fn own_queue(&self) -> Option<Arc<Cq>> {
        self.own.clone()
    }

    fn fetch(&self) {
        self.fetches.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn a_driver_with_a_queue_of_its_own_is_asked_where_something_is_in_it() {
    let (own, app) = (Cq::new(4, None), Cq::new(4, None));
    let device = Arc::new(Asked::default());
    own.attach(&(device.clone() as Arc<dyn Driver>));
    let driver = Arc::new(Asked { own: Some(own.clone()), ..Asked::default() });
    app.attach(&(driver.clone() as Arc<dyn Driver>));
    let mut wcs = [Wc::default(); 1];
    let mut poll = |what: &str, fetches| {
        assert_eq!(app.poll(&mut wcs).unwrap(), 0);
        let count = |n: &AtomicU32| n.swap(0, Ordering::Relaxed);
        let asked = (count(&device.drives), count(&driver.drives), count(&driver.fetches));
        assert_eq!(asked, (1, 0, fetches), "{what}");
    };
    poll("nothing is there", 0);
    own.nudge(true);
    poll("it was nudged", 1);
    own.nudge(false);
    poll("... and no more", 0);
    own.push(Wc::default(), false);
    poll("something is there", 1);
}

/// A provider's queue that gives these numbers of completions, one after the other, numbered on.
#[derive(Default)]
struct Provider {
    answers: Mutex<Vec<i32>>,
    given: AtomicU32,
    polls: AtomicU32,
}

impl Source for Provider {
    fn poll(&self, out: &mut [Wc]) -> i32 {
        self.polls.fetch_add(1, Ordering::Relaxed);
        let n = self.answers.lock().unwrap().pop().unwrap_or(0);
        for wc in &mut out[..n.max(0) as usize] {
            let wr_id = self.given.fetch_add(1, Ordering::Relaxed).into();
            *wc = Wc { wr_id, ..Wc::default() };
        }
        n
    }

    fn arm(&self, _solicited_only: bool) {}

    fn resize(&self, _entries: u32) -> Result<()> {
        Ok(())
    }
}

/// Brings completions to a queue, as they come out of its own.
struct Brings {
    own: Arc<Cq>,
    app: Weak<Cq>,
    delivered: AtomicU32,
    /// How many of a batch it makes the program's in place.
    usual: AtomicU32,
}

impl Driver for Brings {
    fn drive(&self) {}

    fn own_queue(&self) -> Option<Arc<Cq>> {
        Some(self.own.clone())
    }

    fn translate(&self, wcs: &mut [Wc]) -> usize {
        let count = wcs.len().min(self.usual.load(Ordering::Relaxed) as usize);
        wcs[..count].iter_mut().for_each(|wc| wc.wr_id += 100);
        count
    }

    fn deliver(&self, wcs: &[Wc]) {
        self.delivered.fetch_add(1, Ordering::Relaxed);
        let app = self.app.upgrade().unwrap();
        assert!(app.try_turn().is_none(), "whoever delivers has the turn");
        wcs.iter().for_each(|wc| app.push(*wc, false));
    }
}

fn with_provider() -> (Arc<Cq>, Arc<Cq>, Arc<Provider>, Arc<Brings>) {
    let source = Arc::new(Provider::default());
    let hook: OverrunHook = Box::new(|_| {});
    let own = Cq::of_source(Owner::PROCESS, 4, None, hook, source.clone()).unwrap();
    let app = Cq::new(64, None);
    let (app_of_it, delivered) = (Arc::downgrade(&app), AtomicU32::new(0));
    let usual = AtomicU32::new(0);
    let driver = Arc::new(Brings { own: own.clone(), app: app_of_it, delivered, usual });
    app.attach(&(driver.clone() as Arc<dyn Driver>));
    (app, own, source, driver)
}

#[test]
fn polls_go_to_the_source_of_the_only_driver() {
    let (app, own, source, driver) = with_provider();
    let mut wcs = [Wc::default(); 3];
    let counts = || {
        let count = |n: &AtomicU32| n.swap(0, Ordering::Relaxed);
        (count(&source.polls), count(&driver.delivered))
    };
    assert_eq!(app.poll_direct(&mut wcs), Some(0));
    assert_eq!((app.poll(&mut wcs).unwrap(), counts()), (0, (2, 0)), "nothing is there");

    source.answers.lock().unwrap().extend([0, 5]);
    assert_eq!((app.poll(&mut wcs).unwrap(), counts()), (3, (1, 1)));
    assert_eq!(wcs.map(|wc| wc.wr_id), [0, 1, 2]);
    assert_eq!(app.poll_direct(&mut wcs), None, "two wait");
    assert_eq!((app.poll(&mut wcs).unwrap(), counts()), (2, (0, 0)));
    assert_eq!((wcs[0].wr_id, wcs[1].wr_id), (3, 4));

    own.nudge(true);
    assert_eq!(app.poll_direct(&mut wcs), None);
    assert_eq!(counts(), (0, 1), "a nudge is for the driver");
    own.nudge(false);

    source.answers.lock().unwrap().push(-1);
    assert_eq!((app.poll(&mut wcs).unwrap(), own.overrun()), (0, true));
}

#[test]
fn usual_completions_of_a_source_pass_the_ring_by() {
    let (app, _, source, driver) = with_provider();
    let mut wcs = [Wc::default(); 8];
    let ids = |wcs: &[Wc], n: usize| wcs[..n].iter().map(|wc| wc.wr_id).collect::<Vec<_>>();
    driver.usual.store(2, Ordering::Relaxed);
    source.answers.lock().unwrap().extend([2, 3]);
    assert_eq!(app.poll_direct(&mut wcs), Some(2));
    assert_eq!(ids(&wcs, 2), [100, 101]);
    assert_eq!(app.poll_direct(&mut wcs), None, "what was not usual is in the ring, and is next");
    assert_eq!((app.poll(&mut wcs).unwrap(), ids(&wcs, 1)), (1, vec![2]));
    assert_eq!(app.poll_direct(&mut wcs), Some(2));
    assert_eq!(ids(&wcs, 2), [103, 104]);
    // An event is counted by the ring.
    app.req_notify(false);
    source.answers.lock().unwrap().push(1);
    assert_eq!(app.poll_direct(&mut wcs), None);
    assert_eq!((app.poll(&mut wcs).unwrap(), ids(&wcs, 1)), (1, vec![5]));
}

/// While a thread waits for the turn, whoever has it may fill the ring or arm the queue.
#[test]
fn whether_the_ring_is_passed_by_is_asked_with_the_turn_held() {
    let (app, _, source, driver) = with_provider();
    driver.usual.store(1, Ordering::Relaxed);
    source.answers.lock().unwrap().extend([1, 1]);
    let turn_is_held = || app.try_turn().is_none();
    let found = app.direct.poll(&mut [Wc::default(); 1], || !turn_is_held());
    assert!(matches!(found, Found::Elsewhere));
    assert_eq!(source.polls.load(Ordering::Relaxed), 0, "nothing overtakes the ring");
    let found = app.direct.poll(&mut [Wc::default(); 1], turn_is_held);
    assert!(matches!(found, Found::Some(1)));
}

#[test]
fn what_is_taken_out_by_another_thread_is_waited_for_by_nobody_who_polls() {
    let (app, _, source, _) = with_provider();
    source.answers.lock().unwrap().push(1);
    let turn = app.turn();
    assert_eq!(app.poll_direct(&mut [Wc::default(); 1]), Some(0));
    assert_eq!(app.poll(&mut [Wc::default(); 1]).unwrap(), 0);
    assert_eq!(source.polls.load(Ordering::Relaxed), 0, "that thread delivers in order");
    drop(turn);
    assert_eq!(app.poll(&mut [Wc::default(); 1]).unwrap(), 1);
}

#[test]
fn a_source_is_polled_directly_while_its_driver_is_the_only_one() {
    let (app, _, source, driver) = with_provider();
    let driver: Arc<dyn Driver> = driver;
    let other: Arc<dyn Driver> = Arc::new(Asked::default());
    let direct = || {
        let _ = app.poll_direct(&mut [Wc::default(); 1]);
        source.polls.swap(0, Ordering::Relaxed) == 1
    };
    assert!(direct());
    app.attach(&other);
    assert!(!direct(), "two drivers");
    app.detach(&other);
    assert!(direct(), "one again");
    app.attach(&driver);
    app.detach(&driver);
    assert!(direct(), "one of its two QPs is left");
    app.detach(&driver);
    assert!(!direct(), "none");
    assert_eq!(Arc::strong_count(&source), 2, "only its own queue still has it");
}

/// Who polls such a queue takes it for empty where he is given nothing: the reason of a failure, or
/// what a program sleeps for, would stay there.
#[test]
fn a_source_is_polled_whatever_the_ring_of_its_queue_says() {
    let (_, own, source, _) = with_provider();
    let mut wcs = [Wc::default(); 3];
    own.nudge(true);
    source.answers.lock().unwrap().push(2);
    assert_eq!(own.poll(&mut wcs).unwrap(), 2, "it was nudged");
    own.nudge(false);

    own.push(Wc { wr_id: 9, ..Wc::default() }, false);
    source.answers.lock().unwrap().push(2);
    assert_eq!(own.poll(&mut wcs).unwrap(), 3, "one is in the ring");
    assert_eq!(wcs.map(|wc| wc.wr_id), [9, 2, 3]);

    own.push(Wc::default(), false);
    source.answers.lock().unwrap().push(-1);
    assert_eq!(own.poll(&mut wcs).unwrap(), 1, "what is there is given before the loss is told");
    assert_eq!(own.poll(&mut wcs).unwrap_err().errno(), libc::EIO);
}
