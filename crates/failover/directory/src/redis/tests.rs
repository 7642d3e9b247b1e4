//! The directory over a model of a server: here the protocol, in a time of its own.

mod thread;

use super::book::{Book, State};
use super::command::{Connect, QpName, Reply, Store};
use super::fake::Fake;
use super::own::{Entry, ENDED};
use crate::directory::QpEntry;
use crate::record::{MovedQp, NicRecord, ProcessRecord, QpRecord};
use crate::News;
use unbroken_types::Gid;

const LEASE_MS: u64 = 60_000;

fn gid(n: u8) -> Gid {
    Gid::from_ip([10, 0, 1, n].into())
}

fn record(control_qpn: u32) -> ProcessRecord {
    let nic = |index: u32| NicRecord {
        index,
        gid: gid(index as u8),
        address: gid(50 + index as u8),
        control_qpn,
        key_set: 1,
        lid: 0,
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
            book: Book::new("p", LEASE_MS, [number; 32], number.into()),
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
        let qp = QpRecord { process: incarnation, qp: QpEntry::new(incarnation, 3) };
        assert!(self
            .book
            .own
            .set(Entry::Process(incarnation), record(1).encode(incarnation).unwrap()));
        assert!(self.book.own.set(Entry::Qp(QpName::new(gid(1), qpn)), qp.encode().to_vec()));
    }

    /// What it finds now, or `None`: nobody, or no answer.
    fn finds(&mut self, qpn: u32) -> Option<u64> {
        let qp = QpName::new(gid(1), qpn);
        assert!(self.book.known.ask_qp(qp));
        self.run();
        self.book.known.qp(&qp)?.unwrap().map(|r| r.qp.incarnation)
    }

    fn process(&mut self, incarnation: u64) -> Option<Option<ProcessRecord>> {
        self.book.known.process(incarnation, self.now_ms)
    }

    /// The UD QPs of others that have moved, as it is shown them.
    fn shown(&mut self) -> usize {
        let now = self.book.now(self.now_ms);
        self.book.known.moved(now);
        self.run();
        self.book.known.moved(self.book.now(self.now_ms)).len()
    }

    /// A UD QP of the process with that incarnation has moved.
    fn moves(&mut self, incarnation: u64, n: u8) {
        let value = moved(n).encode(incarnation).to_vec();
        assert!(self.book.own.set(Entry::Moved(QpName::new(gid(n), 5)), value));
    }

    fn heard(&mut self, news: &News) -> usize {
        self.news.iter().filter(|n| *n == news).count()
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
    assert_eq!(b.process(11).unwrap(), Some(record(1)));
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
    assert!(b.process(11).unwrap().is_some(), "who knows it goes on knowing it");
    // It was only stopped.
    a.run();
    assert_eq!(b.finds(5), Some(11));
}

#[test]
fn who_ends_says_so() {
    let server = Fake::default();
    let (mut a, mut b) = (Process::new(&server, 1), Process::new(&server, 2));
    a.enter(11, 5);
    a.moves(11, 1);
    a.run();
    assert_eq!(b.finds(5), Some(11));
    assert_eq!((b.shown(), b.heard(&News::Moved)), (1, 1));
    a.book.close();
    assert!(!a.book.closed());
    a.run();
    assert!(a.book.closed());
    pass(&server, 1000, &mut [&mut b]);
    b.run();
    b.run();
    assert_eq!(b.process(11), Some(None), "it has heard of it by itself");
    assert_eq!((b.shown(), b.heard(&News::Moved)), (0, 2));
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
        p.news.retain(|news| !matches!(news, News::Answered(_)));
        assert_eq!(p.news, [News::Lost("gone".into())], "told once");
        assert_eq!(p.book.state, State::Down("gone".into()));
    }
    assert_eq!(b.book.known.qp(&QpName::new(gid(1), 5)), None);
    assert_eq!(b.process(11), Some(Some(record(1))));
    server.data().away = None;
    b.run();
    assert_eq!(b.process(11), Some(Some(record(1))), "that it is not there says nothing");
    assert_eq!(b.heard(&News::Back), 1);
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
    for (fields, _) in server.data().tables.values_mut() {
        fields.values_mut().for_each(|value| *value = b"garbage".to_vec());
    }
    assert!(b.book.known.ask_qp(QpName::new(gid(1), 5)));
    b.book.known.process_changed(11);
    b.run();
    assert_eq!(b.book.known.qp(&QpName::new(gid(1), 5)), Some(Err(7)));
    assert_eq!(b.process(11), Some(Some(record(1))), "what was right is kept");
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

/// A server that has another thousand changes each time that it is asked is asked once a second,
/// after as many times as a log is long.
#[test]
fn a_log_of_changes_without_end_is_read_in_turns() {
    let server = Fake::default();
    let mut a = Process::new(&server, 1);
    a.run();
    a.now_ms += 1001;
    let line = |n: usize| (format!("{n}-0"), vec![0]);
    let lines: Vec<_> = (0..super::command::MAX_LINES).map(line).collect();
    let mut rounds = 0;
    while let Some(round) = a.book.next(a.now_ms) {
        rounds += 1;
        assert!(rounds < 100, "it never rests");
        let mut replies = a.store.as_mut().unwrap().run(&round.commands).unwrap();
        for reply in &mut replies {
            if let Reply::Lines(_) = reply {
                *reply = Reply::Lines(lines.clone());
            }
        }
        a.book.answer(a.now_ms, &round, &replies).unwrap();
    }
    assert!((10..30).contains(&rounds), "{rounds}");
    assert!(a.book.deadline_ms() > a.now_ms);
}

#[test]
fn what_the_dead_left_in_the_table_of_moved_qps_is_not_shown_and_swept_out() {
    let server = Fake::default();
    let (mut a, mut b) = (Process::new(&server, 1), Process::new(&server, 2));
    for (p, n) in [(&mut a, 1), (&mut b, 2)] {
        p.enter(n.into(), n.into());
        p.moves(n.into(), n);
        p.run();
    }
    let fields = || {
        server
            .data()
            .tables
            .iter()
            .filter(|(name, _)| name.ends_with(":moved"))
            .map(|(_, (fields, _))| fields.len() - 1)
            .sum::<usize>()
    };
    assert_eq!((b.shown(), fields()), (2, 2));
    pass(&server, LEASE_MS + 1, &mut [&mut b]);
    b.run();
    b.run();
    assert_eq!((b.shown(), fields()), (2, 2), "its process may have lost its entry just now");
    let mut c = Process::new(&server, 3);
    assert_eq!((c.shown(), fields()), (1, 2), "who has never seen it never does");
    for _ in 0..3 {
        pass(&server, LEASE_MS, &mut [&mut b]);
        b.run();
        assert_eq!(b.shown(), 1);
    }
    assert_eq!(fields(), 1);
}

/// The server's clock jumps, in either direction, by hours or within a lease. Nothing of the living
/// is hidden or taken out, and within two seconds all can be found again.
#[test]
fn a_step_of_the_servers_clock_hides_nobody() {
    for step_ms in [-3_600_000, -1000, 1000, LEASE_MS as i64 + 1, 10 * LEASE_MS as i64] {
        let server = Fake::default();
        server.data().time_ms = 100_000_000;
        let (mut a, mut b) = (Process::new(&server, 1), Process::new(&server, 2));
        for (p, n) in [(&mut a, 1), (&mut b, 2)] {
            p.enter(n.into(), n.into());
            p.moves(n.into(), n);
            p.run();
        }
        assert_eq!(b.shown(), 2);
        let time_ms = server.data().time_ms;
        server.data().time_ms = time_ms.checked_add_signed(step_ms).unwrap();
        for second in 0..200 {
            assert_eq!(b.shown(), 2, "{step_ms} ms, {second} s");
            pass(&server, 1000, &mut [&mut a, &mut b]);
            a.run();
            b.run();
            if second > 0 {
                assert_eq!(b.finds(1), Some(1), "{step_ms} ms, {second} s");
                let mut c = Process::new(&server, 3);
                assert_eq!((c.finds(1), c.shown()), (Some(1), 2), "{step_ms} ms, {second} s");
            }
        }
    }
}

/// A process ends a QP while the server cannot be reached, and another one gets its number. That
/// the first takes its entry out, whenever that is, is nothing to the second.
#[test]
fn who_takes_out_a_qp_late_takes_out_its_own_alone() {
    let server = Fake::default();
    let (mut a, mut b, mut c) =
        (Process::new(&server, 1), Process::new(&server, 2), Process::new(&server, 3));
    a.enter(11, 5);
    a.run();
    assert_eq!(c.finds(5), Some(11));
    a.book.own.remove(Entry::Qp(QpName::new(gid(1), 5)));
    b.enter(22, 5);
    b.run();
    assert_eq!(c.finds(5), Some(22));
    a.run();
    assert_eq!(c.finds(5), Some(22));
    assert!(a.book.own.settled());
}

/// The answer that is under way may be older than what it is about.
#[test]
fn an_answer_is_younger_than_its_question() {
    let server = Fake::default();
    let (mut a, mut b) = (Process::new(&server, 1), Process::new(&server, 2));
    a.enter(11, 5);
    a.run();
    assert_eq!(b.finds(5), Some(11));
    let qp = QpName::new(gid(1), 5);
    assert!(b.book.known.ask_qp(qp));
    assert!(b.book.known.qp(&qp).is_none(), "what was known before is none");
    let round = b.book.next(b.now_ms).unwrap();
    let replies = b.store.as_mut().unwrap().run(&round.commands).unwrap();
    // Another process has the number now, and a QP is connected to it.
    a.book.own.remove(Entry::Qp(qp));
    a.run();
    assert!(b.book.known.ask_qp(qp));
    b.book.answer(b.now_ms, &round, &replies).unwrap();
    assert!(b.book.known.qp(&qp).is_none(), "nor is what was under way");
    b.run();
    assert_eq!(b.book.known.qp(&qp), Some(Ok(None)));
}

/// More QPs are looked up than are known at a time: those that nobody has looked at yet are kept.
#[test]
fn what_others_wait_for_is_not_forgotten() {
    let server = Fake::default();
    let mut b = Process::new(&server, 2);
    let name = |qpn| QpName::new(gid(1), qpn);
    let ask = |b: &mut Process, qpns: std::ops::Range<u32>, look: bool| {
        for qpn in qpns {
            assert!(b.book.known.ask_qp(name(qpn)));
            if qpn % 4096 == 4095 {
                b.run();
            }
            if look && qpn % 4096 == 4095 {
                (qpn - 4095..=qpn).for_each(|qpn| assert!(b.book.known.qp(&name(qpn)).is_some()));
            }
        }
    };
    ask(&mut b, 0..4096, false);
    ask(&mut b, 4096..40 * 4096, true);
    let awaited = (0..4096).filter(|qpn| b.book.known.qp(&name(*qpn)).is_some()).count();
    assert_eq!(awaited, 4096);
    // All of them unseen: the oldest make room.
    ask(&mut b, 0..40 * 4096, false);
    let known = (0..40 * 4096).filter(|qpn| b.book.known.qp(&name(*qpn)).is_some()).count();
    assert!((8192..=16_384).contains(&known), "{known}");
    assert!(b.book.known.qp(&name(40 * 4096 - 1)).is_some(), "the youngest are kept");
}

/// QPs come and go for hours while the server is away: that uses no room, nor any memory.
#[test]
fn what_is_taken_out_while_the_server_is_away_uses_no_room() {
    let mut own = super::own::Own::new(1);
    let name = |qpn| Entry::Qp(QpName::new(gid(1), qpn));
    for qpn in 0..100 {
        assert!(own.set(name(qpn), vec![1]));
        assert_eq!(own.take(), Some(name(qpn)));
    }
    own.written(&(0..100).map(name).collect::<Vec<_>>());
    // As many as fit into all names of QPs; of some the server knows.
    for qpn in 0..1_500_000 {
        assert!(own.set(name(qpn), vec![2]), "{qpn}");
        own.remove(name(qpn));
    }
    assert!(own.queued() < 5000, "{} wait", own.queued());
    let mut left: Vec<_> = std::iter::from_fn(|| own.take()).collect();
    left.sort();
    assert_eq!(left, (0..100).map(name).collect::<Vec<_>>(), "those are to be taken out there");
    own.written(&left);
    assert_eq!((own.settled(), own.take()), (true, None));
    // One that changes for ever is in the queue once.
    for n in 0..100_000u32 {
        assert!(own.set(name(1), n.to_le_bytes().to_vec()));
    }
    assert!(own.queued() < 5000, "{} wait", own.queued());
}

/// A cluster that starts at once: all enter themselves and four QPs, and look four of their
/// neighbours' up. Each needs few round trips, whatever comes first.
#[test]
fn a_thousand_clients_find_each_other_within_few_rounds() {
    const CLIENTS: u64 = 1000;
    const QPS: u32 = 4;
    let server = Fake::default();
    let mut all: Vec<_> = (0..CLIENTS).map(|_| Process::new(&server, 1)).collect();
    let qpn = |client: u64, n: u32| (client % CLIENTS) as u32 * QPS + n;
    for (client, p) in (0..CLIENTS).zip(&mut all) {
        p.book = Book::new("p", LEASE_MS, [client as u8; 32], client);
        (0..QPS).for_each(|n| p.enter(client + 1, qpn(client, n)));
        for n in 0..QPS {
            assert!(p.book.known.ask_qp(QpName::new(gid(1), qpn(client + 1, n))));
        }
    }
    for _ in 0..2 {
        all.iter_mut().for_each(Process::run);
        let again = |(client, p): (u64, &mut Process)| {
            for n in 0..QPS {
                let qp = QpName::new(gid(1), qpn(client + 1, n));
                if p.book.known.qp(&qp) == Some(Ok(None)) {
                    assert!(p.book.known.ask_qp(qp));
                }
            }
        };
        (0..CLIENTS).zip(&mut all).for_each(again);
    }
    for (client, p) in (0..CLIENTS).zip(&mut all) {
        for n in 0..QPS {
            let qp = QpName::new(gid(1), qpn(client + 1, n));
            let found = p.book.known.qp(&qp).unwrap().unwrap().unwrap();
            assert_eq!(found.qp.incarnation, (client + 1) % CLIENTS + 1);
            assert_eq!(p.process(found.qp.incarnation), Some(Some(record(1))));
        }
    }
    let rounds = server.data().rounds;
    assert!(rounds as u64 <= 8 * CLIENTS, "{rounds} rounds for {CLIENTS} clients");
}
