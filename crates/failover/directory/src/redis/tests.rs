//! The directory over a model of a server: first the protocol in a time of its own, then with its
//! thread.

use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use super::book::{Book, State};
use super::command::{Connect, QpName, Reply, Store};
use super::fake::Fake;
use super::own::{Entry, ENDED};
use super::Redis;
use crate::record::{encode_key, MovedQp, NicRecord, ProcessRecord, QpRecord};
use crate::settings::Settings;
use crate::{Directory, News, Surroundings};
use unbroken_types::Gid;

const LEASE_MS: u64 = 60_000;
const PATIENCE: Duration = Duration::from_secs(20);

fn gid(n: u8) -> Gid {
    Gid::from_ip([10, 0, 1, n].into())
}

fn record(control_qpn: u32) -> ProcessRecord {
    let nic = |index: u32| NicRecord {
        index,
        gid: gid(index as u8),
        control_qpn,
        key_set: 1,
        name: format!("a/{index}"),
        further_ports: vec![],
    };
    ProcessRecord { pid: 7, nics: (0..2).map(nic).collect() }
}

fn moved(n: u8) -> MovedQp {
    MovedQp { known: (gid(n), 5), now: (gid(n + 1), 6), shown: gid(n) }
}

/// A process, by its book alone.
struct Process {
    book: Book,
    server: Fake,
    store: Option<Box<dyn Store>>,
    now_ms: u64,
    news: Vec<News>,
}

impl Process {
    /// One that has its clock at another time than the server and all others.
    fn new(server: &Fake, number: u8) -> Process {
        Process {
            book: Book::new("p", LEASE_MS, [number; 32]),
            server: server.clone(),
            store: None,
            now_ms: 1000 * u64::from(number),
            news: Vec::new(),
        }
    }

    /// Does all that is due.
    fn run(&mut self) {
        for _ in 0..1000 {
            if self.store.is_none() {
                match self.server.connect() {
                    Ok(store) => {
                        self.store = Some(store);
                        self.book.connected();
                    }
                    Err(why) => return self.news.extend(self.book.trouble(&why)),
                }
            }
            let Some(round) = self.book.next(self.now_ms) else {
                return assert!(!self.book.pending());
            };
            let replies = self.store.as_mut().unwrap().run(&round.commands);
            match replies.and_then(|replies| self.book.answer(self.now_ms, &round, &replies)) {
                Ok(news) => self.news.extend(news),
                Err(why) => {
                    self.store = None;
                    self.news.extend(self.book.trouble(&why));
                }
            }
        }
        panic!("it never rests");
    }

    fn enter(&mut self, incarnation: u64, qpn: u32) {
        let qp = QpRecord { process: incarnation, incarnation, connection: 3 };
        assert!(self
            .book
            .own
            .set(Entry::Process(incarnation), record(1).encode(incarnation).unwrap()));
        assert!(self.book.own.set(Entry::Qp(QpName::new(gid(1), qpn)), qp.encode().to_vec()));
    }

    fn finds(&mut self, qpn: u32) -> Option<u64> {
        let (qp, since) = (QpName::new(gid(1), qpn), self.book.rounds());
        assert!(self.book.known.ask_qp(qp));
        self.run();
        self.book
            .known
            .answered(&qp, since)
            .then(|| self.book.known.qp(&qp).unwrap().unwrap())?
            .map(|r| r.incarnation)
    }
}

/// Time passes for the server and these.
fn pass(server: &Fake, ms: u64, processes: &mut [&mut Process]) {
    server.data().time_ms += ms;
    processes.iter_mut().for_each(|p| p.now_ms += ms);
}

#[test]
fn the_first_makes_the_key_and_all_have_it() {
    let server = Fake::default();
    let (mut a, mut b) = (Process::new(&server, 1), Process::new(&server, 2));
    assert_eq!(a.book.key(), None);
    a.run();
    b.run();
    assert_eq!((a.book.key(), b.book.key()), (Some([1; 32]), Some([1; 32])));
    a.enter(11, 5);
    a.run();
    assert_eq!(b.finds(5), Some(11));
    assert_eq!(b.book.known.process(11, b.now_ms).unwrap(), Some(record(1)));
    assert_eq!(b.finds(6), None);
}

#[test]
fn an_entry_lives_by_its_lease() {
    let server = Fake::default();
    let (mut a, mut b) = (Process::new(&server, 1), Process::new(&server, 2));
    a.enter(11, 5);
    a.run();
    b.run();
    for _ in 0..10 {
        pass(&server, LEASE_MS / 3, &mut [&mut a, &mut b]);
        a.run();
    }
    assert_eq!(b.finds(5), Some(11));
    // Stopped, or killed.
    pass(&server, LEASE_MS + 1, &mut [&mut a, &mut b]);
    assert_eq!(b.finds(5), None);
    assert!(
        b.book.known.process(11, b.now_ms).unwrap().is_some(),
        "who knows it goes on knowing it"
    );
    // It was only stopped.
    a.run();
    assert_eq!(b.finds(5), Some(11));
}

#[test]
fn who_ends_says_so() {
    let server = Fake::default();
    let (mut a, mut b) = (Process::new(&server, 1), Process::new(&server, 2));
    a.enter(11, 5);
    assert!(a.book.own.set(Entry::Moved(QpName::new(gid(1), 5)), moved(1).encode(0).to_vec()));
    a.run();
    assert_eq!(b.finds(5), Some(11));
    b.book.known.moved();
    b.run();
    assert_eq!((b.book.known.moved().len(), b.news.as_slice()), (1, &[News::Moved][..]));
    a.book.close();
    assert!(!a.book.closed());
    a.run();
    assert!(a.book.closed());
    pass(&server, 1000, &mut [&mut b]);
    b.run();
    b.run();
    assert_eq!(b.book.known.process(11, b.now_ms), Some(None), "it has heard of it by itself");
    assert_eq!((b.book.known.moved().len(), b.news.len()), (0, 2));
    assert_eq!(server.data().names(":qp:"), [""; 0]);
    let left: Vec<_> = server
        .data()
        .values
        .iter()
        .filter(|(name, _)| name.contains(":process:"))
        .map(|(_, v)| v.0.clone())
        .collect();
    assert_eq!(left, [ENDED]);
}

#[test]
fn a_change_is_heard_of_within_a_second() {
    let server = Fake::default();
    let (mut a, mut b) = (Process::new(&server, 1), Process::new(&server, 2));
    a.enter(11, 5);
    a.run();
    assert_eq!(b.finds(5), Some(11));
    let of_11 = |b: &mut Process| b.book.known.process(11, 0).unwrap().unwrap().nics[0].control_qpn;
    a.book.own.set(Entry::Process(11), record(2).encode(11).unwrap());
    a.run();
    b.run();
    assert_eq!(of_11(&mut b), 1);
    pass(&server, 1000, &mut [&mut a, &mut b]);
    b.run();
    assert_eq!(of_11(&mut b), 2);
}

/// Killed and started empty: with a connection that breaks, or behind a proxy that keeps it.
#[test]
fn a_server_that_has_lost_everything_gets_it_again() {
    for breaks in [true, false] {
        let server = Fake::default();
        let (mut a, mut b) = (Process::new(&server, 1), Process::new(&server, 2));
        a.enter(11, 5);
        a.run();
        b.run();
        server.data().lose();
        if breaks {
            server.data().break_after = Some((0, false));
        }
        pass(&server, 1000, &mut [&mut a, &mut b]);
        a.run();
        assert_eq!(b.finds(5), Some(11), "breaks {breaks}");
        let mut c = Process::new(&server, 3);
        assert_eq!(c.finds(5), Some(11));
        assert_eq!(c.book.key(), Some([1; 32]), "the old key is there again");
    }
}

/// A new process was quicker than those that had the key.
#[test]
fn those_of_before_and_after_do_not_find_each_other_but_themselves() {
    let server = Fake::default();
    let (mut a, mut b, mut c) =
        (Process::new(&server, 1), Process::new(&server, 2), Process::new(&server, 3));
    a.enter(11, 5);
    a.run();
    b.run();
    server.data().lose();
    c.enter(33, 7);
    c.run();
    assert_eq!(c.book.key(), Some([3; 32]));
    pass(&server, 1000, &mut [&mut a, &mut b]);
    a.run();
    assert_eq!((b.finds(5), b.finds(7), c.finds(5), c.finds(7)), (Some(11), None, None, Some(33)));
}

#[test]
fn what_was_under_way_when_the_connection_broke_is_done_afterwards() {
    for after in [false, true] {
        for rounds in 0..6 {
            let server = Fake::default();
            let (mut a, mut b) = (Process::new(&server, 1), Process::new(&server, 2));
            server.data().break_after = Some((rounds, after));
            a.enter(11, 5);
            a.run();
            a.enter(11, 6);
            a.run();
            a.book.own.remove(Entry::Qp(QpName::new(gid(1), 5)));
            a.run();
            a.run();
            assert_eq!((b.finds(5), b.finds(6)), (None, Some(11)), "{rounds} {after}");
            assert!(a.book.own.settled());
        }
    }
}

#[test]
fn while_the_server_is_away_qps_are_unknown_and_processes_known() {
    let server = Fake::default();
    let (mut a, mut b) = (Process::new(&server, 1), Process::new(&server, 2));
    a.enter(11, 5);
    a.run();
    assert_eq!(b.finds(5), Some(11));
    server.data().away = Some("gone".into());
    server.data().lose();
    pass(&server, 1000, &mut [&mut a, &mut b]);
    for p in [&mut a, &mut b] {
        p.run();
        p.run();
        assert_eq!(p.news, [News::Lost("gone".into())], "told once");
        assert_eq!(p.book.state, State::Down("gone".into()));
    }
    assert_eq!(b.book.known.qp(&QpName::new(gid(1), 5)), None);
    assert_eq!(b.book.known.process(11, b.now_ms), Some(Some(record(1))));
    server.data().away = None;
    b.run();
    assert_eq!(
        b.book.known.process(11, b.now_ms),
        Some(Some(record(1))),
        "that it is not there says nothing"
    );
    assert_eq!(b.news.last(), Some(&News::Back));
    a.run();
    assert_eq!(b.finds(5), Some(11));
}

#[test]
fn garbage_is_an_error_and_nothing_more() {
    let server = Fake::default();
    let (mut a, mut b) = (Process::new(&server, 1), Process::new(&server, 2));
    a.enter(11, 5);
    a.run();
    assert_eq!(b.finds(5), Some(11));
    for (name, value) in &mut server.data().values {
        if !name.ends_with(":key") {
            value.0 = b"garbage".to_vec();
        }
    }
    assert!(b.book.known.ask_qp(QpName::new(gid(1), 5)));
    b.book.known.process_changed(11);
    b.run();
    assert_eq!(b.book.known.qp(&QpName::new(gid(1), 5)), Some(Err(7)));
    assert_eq!(b.book.known.process(11, b.now_ms), Some(Some(record(1))), "what was right is kept");
    server.data().values.get_mut("p:key").unwrap().0 = b"garbage".to_vec();
    let mut c = Process::new(&server, 3);
    c.store = Some(Box::new(server.clone()));
    let round = c.book.next(0).unwrap();
    let replies = c.store.as_mut().unwrap().run(&round.commands).unwrap();
    let why = c.book.answer(0, &round, &replies).unwrap_err();
    assert!(why.contains("p:key") && why.contains("redis-cli del"), "{why}");
    assert!(c.book.answer(0, &round, &replies[1..]).is_err(), "too few answers");
    let wrong: Vec<_> = replies.iter().map(|_| Reply::Done).collect();
    assert!(c.book.answer(0, &round, &wrong).is_err(), "answers to something else");
}

#[test]
fn who_listens_is_known_when_a_qp_has_moved() {
    let server = Fake::default();
    let ((a, a_news), (b, b_news), (c, _)) = (open(&server), open(&server), open(&server));
    for (directory, incarnation) in [(&a, 11), (&b, 22), (&c, 33)] {
        directory.publish_process(incarnation, &record(incarnation as u32)).unwrap();
    }
    assert!(b.moved().unwrap().is_empty(), "it listens from now on");
    b.publish_process(22, &record(23)).unwrap();
    b.settle();
    a.publish_moved(&[moved(1)]).unwrap();
    assert_eq!(a_news.recv_timeout(PATIENCE).unwrap(), News::Entered);
    assert_eq!(a.processes().unwrap(), [(11, record(11)), (22, record(23))]);
    // Told, it asks; else it asks within a second by itself.
    assert_eq!(b_news.recv_timeout(PATIENCE).unwrap(), News::Moved);
    assert_eq!(b.moved().unwrap(), [moved(1)]);
    // To say the same again is no news.
    let rounds = server.data().rounds;
    wait("a lease is renewed", || server.data().rounds > rounds + 8);
    assert!(a_news.try_recv().is_err());
    server.data().lose();
    server.data().break_after = Some((0, false));
    wait("everything is there again", || {
        server.data().tables.values().filter(|table| !table.is_empty()).count() == 2
    });
    wait("it is heard of again", || b.moved().unwrap() == [moved(1)]);
}

#[test]
fn what_the_dead_left_in_the_table_of_moved_qps_is_not_shown_and_swept_out() {
    let server = Fake::default();
    let (mut a, mut b) = (Process::new(&server, 1), Process::new(&server, 2));
    for (p, n) in [(&mut a, 1), (&mut b, 2)] {
        p.book.own.set(Entry::Moved(QpName::new(gid(n), 5)), moved(n).encode(0).to_vec());
        p.run();
    }
    let fields = || server.data().tables.values().map(|table| table.len()).sum::<usize>();
    let of_others = |b: &mut Process| {
        b.book.known.moved();
        b.run();
        b.book.known.moved().values().filter(|moved| moved.known.0 == gid(1)).count()
    };
    assert_eq!((of_others(&mut b), fields()), (1, 2));
    pass(&server, LEASE_MS + 1, &mut [&mut b]);
    assert_eq!((of_others(&mut b), fields()), (0, 2), "its process may have been stopped");
    pass(&server, LEASE_MS, &mut [&mut b]);
    assert_eq!((of_others(&mut b), fields()), (0, 1));
}

// --- with the thread
// -----------------------------------------------------------------------------------------------------------

fn open(server: &Fake) -> (Redis, mpsc::Receiver<News>) {
    let Settings::Redis(settings) = Settings::parse("redis://fake?lease=4").unwrap() else {
        panic!()
    };
    let (sender, news) = mpsc::channel();
    let spawn = |name: &str, body: Box<dyn FnOnce() + Send>| {
        std::thread::Builder::new().name(name.into()).spawn(body).map(drop)
    };
    let news_to = Box::new(move |news| drop(sender.send(news)));
    (
        Redis::over(Box::new(server.clone()), &settings, Surroundings { spawn, news: news_to })
            .unwrap(),
        news,
    )
}

fn wait(what: &str, condition: impl Fn() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < PATIENCE, "{what}: not so far");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn what_is_settled_is_found_and_a_look_up_never_waits() {
    let server = Fake::default();
    let ((a, _), (b, _)) = (open(&server), open(&server));
    assert_eq!(a.key(), b.key());
    a.publish_process(11, &record(1)).unwrap();
    a.publish_qp(gid(1), 5, 11, 3).unwrap();
    assert_eq!(a.lookup_qp(gid(1), 5).unwrap(), Some((11, 3)), "one's own is known at once");
    a.settle();
    let unknown = b.lookup_qp(gid(1), 5).unwrap_err().to_string();
    assert!(unknown.contains("redis://fake") && unknown.contains("not answered"), "{unknown}");
    b.fetch_qp(gid(1), 5);
    assert_eq!(b.lookup_qp(gid(1), 5).unwrap(), Some((11, 3)));
    assert_eq!(b.lookup_process(11).unwrap(), Some(record(1)));
    assert_eq!(b.processes().unwrap(), [(11, record(1))]);
    b.fetch_qp(gid(1), 6);
    assert_eq!(b.lookup_qp(gid(1), 6).unwrap(), None);
    // A reset under a gate: the next but one look-up has it, and none waits.
    a.publish_qp(gid(1), 5, 11, 4).unwrap();
    wait("the next connection", || b.lookup_qp(gid(1), 5).unwrap() == Some((11, 4)));
    drop(a);
    wait("its end", || b.lookup_process(11).unwrap().is_none());
    b.fetch_qp(gid(1), 5);
    assert_eq!(b.lookup_qp(gid(1), 5).unwrap(), None);
}

/// Nothing but what says so waits, and that for a bounded time, however slow the server is.
#[test]
fn a_slow_server_holds_nobody_up_for_long() {
    let server = Fake::default();
    let ((a, _), (b, _)) = (open(&server), open(&server));
    a.publish_process(11, &record(1)).unwrap();
    a.publish_qp(gid(1), 5, 11, 3).unwrap();
    a.settle();
    b.fetch_qp(gid(1), 5);
    server.data().delay = Duration::from_secs(3);
    let timed = |what: &str, most: Duration, call: &dyn Fn()| {
        let start = Instant::now();
        call();
        assert!(start.elapsed() < most, "{what} took {:?}", start.elapsed());
    };
    // A round is under way, and takes its time.
    b.publish_qp(gid(2), 1, 22, 0).unwrap();
    let at_once = Duration::from_millis(900);
    timed("settle", at_once, &|| b.settle());
    timed("calls that do not wait", at_once, &|| {
        for qpn in 0..100 {
            b.publish_qp(gid(2), qpn, 22, 0).unwrap();
            let _ = b.lookup_qp(gid(1), qpn);
            assert_eq!(b.lookup_process(11).unwrap(), Some(record(1)));
            b.unpublish_qp(gid(2), qpn).unwrap();
            b.publish_moved(&[moved(9)]).unwrap();
            assert_eq!(b.moved().unwrap(), [moved(9)]);
        }
    });
    timed("fetch", Duration::from_millis(2500), &|| b.fetch_qp(gid(1), 5));
    assert!(b.lookup_qp(gid(1), 5).is_err(), "an old answer is not one to a new question");
    timed("the end", at_once, &|| b.close());
    server.data().delay = Duration::ZERO;
}

#[test]
fn while_it_is_known_to_be_away_nobody_waits_and_all_is_well_afterwards() {
    let server = Fake::default();
    server.data().away = Some("away for the test".into());
    let ((a, a_news), (b, _)) = (open(&server), open(&server));
    assert_eq!(a.key(), None);
    let start = Instant::now();
    a.publish_process(11, &record(1)).unwrap();
    for qpn in 0..200 {
        a.publish_qp(gid(1), qpn, 11, 0).unwrap();
        a.settle();
        b.fetch_qp(gid(1), qpn);
        let why = b.lookup_qp(gid(1), qpn).unwrap_err().to_string();
        assert!(why.contains("away for the test"), "{why}");
    }
    assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
    assert_eq!(a_news.recv_timeout(PATIENCE).unwrap(), News::Lost("away for the test".into()));
    server.data().away = None;
    assert_eq!(a_news.recv_timeout(PATIENCE).unwrap(), News::Back);
    wait("the other is there, too", || b.key().is_some());
    wait("everything is entered", || server.data().names(":qp:").len() == 200);
    b.fetch_qp(gid(1), 199);
    assert_eq!(b.lookup_qp(gid(1), 199).unwrap(), Some((11, 0)));
    assert_eq!(b.lookup_process(11).unwrap(), Some(record(1)));
}

/// Many threads at once, through a server that comes and goes.
#[test]
fn nothing_published_is_lost_by_a_server_that_comes_and_goes() {
    const THREADS: u32 = 4;
    const QPS: u32 = 300;
    let server = Fake::default();
    let (a, _news) = open(&server);
    a.publish_process(11, &record(1)).unwrap();
    let left = AtomicU32::new(THREADS);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (a, left) = (&a, &left);
            scope.spawn(move || {
                for qpn in (0..QPS).map(|n| n * THREADS + thread) {
                    a.publish_qp(gid(1), qpn, 11, 0).unwrap();
                    a.settle();
                    if qpn % 3 == 0 {
                        a.unpublish_qp(gid(1), qpn).unwrap();
                    }
                }
                left.fetch_sub(1, SeqCst);
            });
        }
        while left.load(SeqCst) > 0 {
            let rounds = server.data().rounds;
            let connects = server.data().connects;
            server.data().break_after = Some((5, rounds % 2 == 0));
            wait("it has broken", || server.data().connects > connects || left.load(SeqCst) == 0);
            if rounds % 4 == 0 {
                server.data().lose();
            }
        }
    });
    server.data().break_after = None;
    let kept = (THREADS * QPS - (THREADS * QPS).div_ceil(3)) as usize;
    wait("exactly what is published is there", || server.data().names(":qp:").len() == kept);
    let key = encode_key(&a.key().unwrap()).to_vec();
    assert_eq!(server.data().values["unbroken:key"].0, key);
}

#[test]
fn a_forked_child_leaves_it_alone() {
    let server = Fake::default();
    let (mut a, _news) = open(&server);
    a.pid += 1;
    assert!(a.lookup_qp(gid(1), 1).unwrap_err().to_string().contains("forked"));
    assert!(a.key().is_none());
    let lock = a.shared.lock();
    // The lock is another thread's, as it was at the fork: none of these takes it.
    a.fetch_qp(gid(1), 1);
    a.settle();
    a.close();
    drop(lock);
}
