//! Messages with bitmaps between two hosts of the emulated network in one process.

mod common;

use common::*;
use std::time::{Duration, Instant};
use unbroken_sdk::{Attr, Error, Memory, Qp, QpOptions, Recv, Send};

/// Bytes of a chunk, where nothing else is said.
const CHUNK: u64 = 1 << 16;

/// Waits until these chunks are whole. The network may lose packets where a receiver has no core: whatever stands still is sent again.
#[track_caller]
fn deliver(send: &Send, from: &Memory, recv: &Recv, bytes: u64, chunks: impl Iterator<Item = u32> + Clone) {
    let (mut seen, mut since) = (0, Instant::now());
    until("the chunks", || {
        let whole = recv.progress().1;
        if whole != seen {
            (seen, since) = (whole, Instant::now());
        }
        let missing = chunks.clone().filter(|c| !recv.has(*c));
        if since.elapsed() > Duration::from_millis(200) {
            for chunk in missing.clone() {
                let at = u64::from(chunk) * CHUNK;
                send.add(from, at, (bytes - at).min(CHUNK), chunk, 0).unwrap();
            }
            since = Instant::now();
        }
        missing.count() == 0
    });
}

/// Sends so many bytes and waits until all has come; gives what lies at the receiver.
#[track_caller]
fn one(w: &World, pair: &(Qp, Qp), data: &[u8], receive: u64) -> Vec<u8> {
    let bytes = data.len() as u64;
    let (from, into) = (w.a.register(data.len().max(1)).unwrap(), w.b.register(receive as usize + 64).unwrap());
    from.write(0, data).unwrap();
    let recv = pair.1.recv_post(&into, 0, receive).unwrap();
    let send = pair.0.send_start(Some(0xfeed_beef)).unwrap();
    send.add(&from, 0, bytes, 0, 0).unwrap();
    deliver(&send, &from, &recv, bytes, 0..bytes.div_ceil(CHUNK).max(1) as u32);
    send.end().unwrap();
    until("the send", || send.poll().unwrap());
    until("the immediate", || recv.immediate() == Some(0xfeed_beef));
    recv.complete().unwrap();
    into.read(0, receive as usize + 64).unwrap()
}

#[test]
fn messages_are_written_and_their_bitmaps_fill() {
    for (channels, nics) in [(1, &[0][..]), (3, &[0]), (2, &[0, 1])] {
        let w = World::new(channels, nics);
        let pair = w.pair(&QpOptions { attr: Attr { channels, ..Attr::default() }, ..QpOptions::default() });
        for (bytes, receive) in [(300_000, 300_000), (1, 1), (0, 100), (70_000, 1 << 20), (1 << 20, 1 << 20)] {
            let data = pattern(bytes, receive);
            let got = one(&w, &pair, &data, receive);
            assert!(got[..bytes] == data && got[bytes..].iter().all(|b| *b == 0), "{bytes} of {receive}");
        }
        let c = pair.1.counters();
        assert_eq!((c.outside, c.strangers), (0, 0), "{c:?}");
    }
}

/// The network is as it is: what is lost stays lost, and the bitmap says which chunks that are; the user sends them again.
#[test]
fn the_bitmap_says_what_was_lost() {
    let w = World::new(1, &[0]);
    let attr = Attr { chunk_log2: 12, ..Attr::default() };
    // Slow enough for a receiver on a busy machine.
    let (a, b) = w.pair(&QpOptions { attr, rate_bps: 200_000_000, ..QpOptions::default() });
    let data = pattern(1 << 20, 5);
    let (from, into) = (w.a.register(1 << 20).unwrap(), w.b.register(1 << 20).unwrap());
    from.write(0, &data).unwrap();
    let recv = b.recv_post(&into, 0, 1 << 20).unwrap();
    until("clear", || a.counters().control > 0);
    w.fault("loss a/0 20% tx");
    let send = a.send_start(None).unwrap();
    send.add(&from, 0, 1 << 20, 0, 0).unwrap();
    until("all left", || a.counters().sent == 256);
    w.clear();
    // A chunk that is sent when the network is well again shows that all before it has come, or never will.
    send.add(&from, 0, 4096, 0, 0).unwrap();
    deliver(&send, &from, &recv, 4096, 0..1);
    let after = b.counters().packets;
    let lost: Vec<u32> = (0..256).filter(|c| !recv.has(*c)).collect();
    assert!((10..150).contains(&lost.len()), "{} lost, {after} came", lost.len());
    for chunk in &lost {
        send.add(&from, u64::from(*chunk) * 4096, 4096, *chunk, 1).unwrap();
    }
    until("what was lost", || {
        let (chunks, whole) = recv.progress();
        if whole < chunks && a.counters().sent >= 256 + lost.len() as u64 {
            let missing = (0..256).find(|c| !recv.has(*c)).unwrap_or(0);
            send.add(&from, u64::from(missing) * 4096, 4096, missing, 2).unwrap();
        }
        chunks == whole
    });
    send.end().unwrap();
    until("the send", || send.poll().unwrap());
    recv.complete().unwrap();
    assert!(into.read(0, 1 << 20).unwrap() == data);
}

/// A message is completed early, its buffer posted again, and then the packets come.
#[test]
fn late_packets_change_nothing() {
    let w = World::new(1, &[0]);
    let attr =
        Attr { packet_lifetime_us: 300_000, messages_log2: 1, in_flight_log2: 17, generations: 2, ..Attr::default() };
    let (a, b) = w.pair(&QpOptions { attr, ..QpOptions::default() });
    let (from, into) = (w.a.register(1 << 16).unwrap(), w.b.register(1 << 16).unwrap());
    let first = b.recv_post(&into, 0, 1 << 16).unwrap();
    until("clear", || a.counters().control > 0);
    w.fault("delay a/0 100ms tx");
    from.write(0, &[1; 1 << 16]).unwrap();
    let send = a.send_post(&from, 0, 1 << 16, None).unwrap();
    until("the send", || send.poll().unwrap());
    first.complete().unwrap();
    let second = b.recv_post(&into, 0, 1 << 16).unwrap();
    // All but what was lost on the way to a receiver without a core.
    until("late packets", || b.counters().late >= 8);
    assert_eq!((second.progress(), into.read(0, 1 << 16).unwrap()), ((1, 0), vec![0; 1 << 16]));
    // Two slots of two generations: the fifth use has to wait for the first to be old.
    second.complete().unwrap();
    for _ in 0..2 {
        b.recv_post(&into, 0, 1 << 16).unwrap().complete().unwrap();
    }
    assert!(matches!(b.recv_post(&into, 0, 1 << 16), Err(Error::Retry(why)) if why.contains("packet lifetime")));
    until("an old slot", || b.recv_post(&into, 0, 1 << 16).is_ok());
}

#[test]
fn what_is_wrong_is_said() {
    let w = World::new(1, &[0]);
    let options = QpOptions::default();
    let made = |ctx: &unbroken_sdk::Context, o: QpOptions| ctx.create_qp(&o).map(drop).unwrap_err().to_string();
    let attr = |change: fn(&mut Attr)| {
        let mut attr = Attr::default();
        change(&mut attr);
        QpOptions { attr, ..options }
    };
    assert!(made(&w.a, attr(|a| a.chunk_log2 = 30)).contains("chunks of 2^30"));
    assert!(made(&w.a, attr(|a| a.channels = 2)).contains("2 channels, the context has 1"));
    assert!(made(&w.a, QpOptions { send: false, recv: false, ..options }).contains("enable one"));
    let (a, b) = (w.a.create_qp(&options).unwrap(), w.b.create_qp(&attr(|a| a.messages_log2 = 3)).unwrap());
    let error = a.connect(&b.info()).unwrap_err().to_string();
    assert!(error.contains("messages in flight (log2) is 3, ours is 4"), "{error}");
    assert!(a.connect(b"who are you").unwrap_err().to_string().contains("no information"));
    let deaf = w.b.create_qp(&QpOptions { recv: false, ..options }).unwrap();
    assert!(a.connect(&deaf.info()).unwrap_err().to_string().contains("without receives"));
    assert!(a.send_start(None).map(drop).unwrap_err().to_string().contains("not connected"));

    let (a, b) = w.pair(&options);
    let (from, into) = (w.a.register(2 << 20).unwrap(), w.b.register(2 << 20).unwrap());
    let says = |result: Result<(), Error>, text: &str| {
        let error = result.unwrap_err().to_string();
        assert!(error.contains(text), "{error}");
    };
    says(b.recv_post(&into, 1, 2 << 20).map(drop), "not inside");
    says(b.recv_post(&into, 0, 2 << 20).map(drop), "1048576 is the most");
    says(a.send_post(&from, 0, 2 << 20, None).map(drop), "1048576 is the most");
    says(a.send_post(&from, 2 << 20, 1, None).map(drop), "not inside");
    let send = a.send_start(None).unwrap();
    says(send.add(&from, 0, 4096, 16, 0), "beyond the longest message");
    let recv = b.recv_post(&into, 0, 4096).unwrap();
    says(recv.expand(1).map(drop), "chunk 1 of a receive that has 1");
    send.add(&from, 0, 4097, 0, 0).unwrap();
    let mut why = String::new();
    until("the message does not fit", || send.poll().map_err(|e| why = e.to_string()).is_err());
    assert!(why.contains("longer than the peer's receive"));
    let _posted: Vec<_> = (0..15).map(|_| b.recv_post(&into, 0, 1).unwrap()).collect();
    assert!(matches!(b.recv_post(&into, 0, 1), Err(Error::Retry(_))));
}

/// A NIC dies: what goes over the other still comes, and a queue pair without another says so.
#[test]
fn a_dead_nic_takes_its_channels_along() {
    let w = World::new(2, &[0, 1]);
    let (a, b) = w.pair(&QpOptions { attr: Attr { channels: 2, ..Attr::default() }, ..QpOptions::default() });
    let pair = (a, b);
    let data = pattern(1 << 20, 3);
    one(&w, &pair, &data, 1 << 20);
    w.fault("nic a/0 dead");
    let (from, into) = (w.a.register(1 << 20).unwrap(), w.b.register(1 << 20).unwrap());
    let recv = pair.1.recv_post(&into, 0, 1 << 20).unwrap();
    let send = pair.0.send_start(None).unwrap();
    send.add(&from, 0, 1 << 20, 0, 0).unwrap();
    deliver(&send, &from, &recv, 1 << 20, (1..16).step_by(2));
    send.end().unwrap();
    until("the send", || send.poll().unwrap());
    w.fault("nic a/1 dead");
    let mut why = String::new();
    until("an error", || {
        let send = pair.0.send_post(&from, 0, 1 << 20, None);
        why = send.and_then(|send| send.poll().map(drop)).err().map_or(String::new(), |e| e.to_string());
        why.contains("every channel")
    });
}
