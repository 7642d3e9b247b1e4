//! The directory with its thread.

use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use super::super::fake::Fake;
use super::super::Redis;
use super::{gid, moved, record};
use crate::record::encode_key;
use crate::settings::Settings;
use crate::{Directory, DirectoryError, Found, News, QpEntry, Surroundings};

const PATIENCE: Duration = Duration::from_secs(20);

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

/// What a look-up gives as soon as there is an answer.
fn found(directory: &Redis, qpn: u32) -> Result<Option<(u64, u32)>, DirectoryError> {
    let (mut found, start) = (directory.ask_qp(gid(1), qpn)?, Instant::now());
    while found == Found::Later {
        assert!(start.elapsed() < PATIENCE, "no answer about {qpn}");
        std::thread::sleep(Duration::from_millis(1));
        found = directory.answer_qp(gid(1), qpn)?;
    }
    Ok(match found {
        Found::Peer { qp, .. } => Some((qp.incarnation, qp.connection)),
        _ => None,
    })
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
    wait("both have the key", || a.key().is_some() && a.key() == b.key());
    a.publish_process(11, &record(1)).unwrap();
    a.publish_qp(gid(1), 5, QpEntry::new(11, 3)).unwrap();
    assert_eq!(a.lookup_qp(gid(1), 5).unwrap(), Some((11, 3)), "one's own is known at once");
    a.settle(PATIENCE);
    let unknown = b.lookup_qp(gid(1), 5).unwrap_err().to_string();
    assert!(unknown.contains("redis://fake") && unknown.contains("not answered"), "{unknown}");
    assert_eq!(found(&b, 5).unwrap(), Some((11, 3)));
    assert_eq!(b.lookup_process(11).unwrap(), Some(record(1)));
    assert_eq!(b.processes().unwrap(), [(11, record(1))]);
    assert_eq!(found(&b, 6).unwrap(), None);
    // A reset under a gate: the next but one look-up has it, and none waits.
    a.publish_qp(gid(1), 5, QpEntry::new(11, 4)).unwrap();
    wait("the next connection", || b.lookup_qp(gid(1), 5).unwrap() == Some((11, 4)));
    drop(a);
    wait("its end", || b.lookup_process(11).unwrap().is_none());
    assert_eq!(found(&b, 5).unwrap(), None);
}

/// However slow the server is, nobody waits but who ends, and that for a bounded time. What was put
/// down is done in the end, in few rounds.
#[test]
fn a_slow_server_holds_nobody_up() {
    let server = Fake::default();
    server.data().delay = Duration::from_millis(700);
    let start = Instant::now();
    let ((a, _), (b, b_news)) = (open(&server), open(&server));
    a.publish_process(11, &record(1)).unwrap();
    for qpn in 0..64 {
        a.publish_qp(gid(1), qpn, QpEntry::new(11, 0)).unwrap();
        assert_eq!(b.ask_qp(gid(1), qpn).unwrap(), Found::Later);
        assert_eq!(b.answer_qp(gid(1), qpn).unwrap(), Found::Later);
        assert!(b.lookup_qp(gid(1), qpn).is_err());
        b.publish_qp(gid(2), qpn, QpEntry::new(22, 0)).unwrap();
        b.unpublish_qp(gid(2), qpn).unwrap();
    }
    b.publish_process(22, &record(2)).unwrap();
    b.publish_moved(&[moved(9)]).unwrap();
    assert_eq!(b.moved().unwrap(), [moved(9)]);
    assert!(start.elapsed() < Duration::from_millis(700), "{:?}", start.elapsed());
    let mut answered = 0;
    while answered < 64 {
        if let News::Answered(names) = b_news.recv_timeout(PATIENCE).unwrap() {
            answered += names.len();
        }
    }
    wait("all are found", || {
        let is_found = |qpn: &u32| match b.answer_qp(gid(1), *qpn).unwrap() {
            Found::Nobody => b.ask_qp(gid(1), *qpn).unwrap() != Found::Later,
            found => matches!(found, Found::Peer { qp, .. } if qp.incarnation == 11),
        };
        (0..64).filter(is_found).count() == 64
    });
    assert!(server.data().rounds < 20, "{} rounds", server.data().rounds);
    let start = Instant::now();
    b.close();
    assert!(start.elapsed() < Duration::from_millis(650), "the end took {:?}", start.elapsed());
    server.data().delay = Duration::ZERO;
}

#[test]
fn while_it_is_known_to_be_away_nobody_waits_and_all_is_well_afterwards() {
    let server = Fake::default();
    server.data().away = Some("away for the test".into());
    let ((a, a_news), (b, _)) = (open(&server), open(&server));
    assert_eq!(a.key(), None);
    wait("it is known", || b.ask_qp(gid(1), 0).is_err());
    let start = Instant::now();
    a.publish_process(11, &record(1)).unwrap();
    for qpn in 0..200 {
        a.publish_qp(gid(1), qpn, QpEntry::new(11, 0)).unwrap();
        a.settle(PATIENCE);
        assert!(b.ask_qp(gid(1), qpn).is_err());
        let why = b.lookup_qp(gid(1), qpn).unwrap_err().to_string();
        assert!(why.contains("away for the test"), "{why}");
    }
    assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
    let never = News::Unreachable("away for the test".into());
    assert_eq!(a_news.recv_timeout(PATIENCE).unwrap(), never);
    server.data().away = None;
    assert_eq!(a_news.recv_timeout(PATIENCE).unwrap(), News::Back);
    wait("the other is there, too", || b.key().is_some());
    wait("everything is entered", || server.data().names(":qp:").len() == 200);
    assert_eq!(found(&b, 199).unwrap(), Some((11, 0)));
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
                    a.publish_qp(gid(1), qpn, QpEntry::new(11, 0)).unwrap();
                    a.settle(PATIENCE);
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
    assert!(a.ask_qp(gid(1), 1).is_err() && a.answer_qp(gid(1), 1).is_err());
    a.settle(PATIENCE);
    a.close();
    drop(lock);
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
    b.settle(PATIENCE);
    c.settle(PATIENCE);
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
        server.data().tables.values().filter(|(fields, _)| !fields.is_empty()).count() == 2
    });
    wait("it is heard of again", || b.moved().unwrap() == [moved(1)]);
}
