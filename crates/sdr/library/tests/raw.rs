//! Messages with bitmaps between two hosts of the emulated network in one process.

mod common;

use common::*;
use std::time::{Duration, Instant};
use unbroken::{Capabilities, Host};
use unbroken_sdr::{Attr, Context, ContextOptions, Error, Memory, Qp, QpOptions, Recv, Send};
use unbroken_sdr_protocol::board::Mutation;

/// Bytes of a chunk, where nothing else is said.
const CHUNK: u64 = 1 << 16;

/// Waits until these chunks are whole. The network may lose packets where a receiver has no core:
/// whatever stands still is sent again.
#[track_caller]
fn deliver(
    send: &Send,
    from: &Memory,
    recv: &Recv,
    bytes: u64,
    chunks: impl Iterator<Item = u32> + Clone,
) {
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
    let (from, into) =
        (w.a.register(data.len().max(1)).unwrap(), w.b.register(receive as usize + 64).unwrap());
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
    let channels = [(1, &[0][..]), (3, &[0]), (2, &[0, 1])];
    for (kind, (channels, nics)) in
        ALL_NICS.into_iter().flat_map(|kind| channels.map(|c| (kind, c)))
    {
        let w = World::of(kind, channels, nics);
        let pair = w.pair(&QpOptions {
            attr: Attr { channels, ..Attr::default() },
            ..QpOptions::default()
        });
        for (bytes, receive) in
            [(300_000, 300_000), (1, 1), (0, 100), (70_000, 1 << 20), (1 << 20, 1 << 20)]
        {
            let data = pattern(bytes, receive);
            let got = one(&w, &pair, &data, receive);
            assert!(
                got[..bytes] == data && got[bytes..].iter().all(|b| *b == 0),
                "{kind:?}: {bytes} of {receive}"
            );
        }
        let c = pair.1.counters();
        assert_eq!((c.outside, c.strangers), (0, 0), "{c:?}");
    }
}

/// The network is as it is: what is lost stays lost, and the bitmap says which chunks that are; the
/// user sends them again.
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
    // A chunk that is sent when the network is well again shows that all before it has come, or
    // never will.
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

/// A message is completed early, its buffer posted `again` times, and then its packets come, and
/// behind them a chunk of the last receive. Gives the buffer but for that chunk, and how many
/// packets were late.
fn early(kind: Nics, again: u64, mutation: Option<Mutation>) -> (Vec<u8>, u64) {
    const BYTES: u64 = 1 << 16;
    const LAST: u64 = BYTES - 4096;
    let w = World::of(kind, 1, &[0]);
    let attr = Attr {
        chunk_log2: 12,
        messages_log2: 1,
        in_flight_log2: 17,
        generations: 2,
        ..Attr::default()
    };
    let (a, b) = w.pair(&QpOptions { attr, mutation, ..QpOptions::default() });
    let (from, into) =
        (w.a.register(BYTES as usize).unwrap(), w.b.register(BYTES as usize).unwrap());
    let mut recv = b.recv_post(&into, 0, BYTES).unwrap();
    until("clear", || a.counters().control > 0);
    w.fault("delay a/0 100ms tx");
    from.write(0, &[1; BYTES as usize]).unwrap();
    let send = a.send_post(&from, 0, BYTES, None).unwrap();
    until("the send", || send.poll().unwrap());
    for _ in 0..again {
        recv.complete().unwrap();
        recv = b.recv_post(&into, 0, BYTES).unwrap();
    }
    drop(send);
    for _ in 1..again {
        a.send_start(None).unwrap().end().unwrap();
    }
    let last = a.send_start(None).unwrap();
    let mut since = Instant::now() - PATIENCE;
    until("a chunk behind the late packets", || {
        if since.elapsed() > Duration::from_secs(1) {
            last.add(&from, LAST, BYTES - LAST, 15, 0).unwrap();
            since = Instant::now();
        }
        recv.has(15)
    });
    let (got, late) = (into.read(0, LAST as usize).unwrap(), b.counters().late);
    assert_eq!(recv.progress(), (16, 1));
    (got, late)
}

#[test]
fn late_packets_change_nothing() {
    for kind in ALL_NICS {
        for again in [1, 2] {
            let (got, late) = early(kind, again, None);
            assert!(got.iter().all(|byte| *byte == 0), "{kind:?}, again {again} times");
            // All but what was lost on the way to a receiver without a core. A window drops them
            // before anybody counts them.
            assert!(
                if kind == Nics::Full { late >= 8 } else { late == 0 },
                "{kind:?}: {late} late"
            );
        }
    }
}

/// A rule that is left out is noticed by the test before.
#[test]
#[cfg(feature = "mutants")]
fn late_packets_change_a_buffer_whose_key_stays() {
    for kind in ALL_NICS {
        let (got, _) = early(kind, 1, Some(Mutation::KeyStays));
        assert!(got.contains(&1), "{kind:?}");
    }
}

/// Two slots of two generations: the fifth use has to wait for the first to be old.
#[test]
fn a_slot_rests_for_a_packet_lifetime() {
    for kind in ALL_NICS {
        let w = World::of(kind, 1, &[0]);
        let attr = Attr {
            packet_lifetime_us: 300_000,
            messages_log2: 1,
            in_flight_log2: 17,
            generations: 2,
            ..Attr::default()
        };
        let (_a, b) = w.pair(&QpOptions { attr, ..QpOptions::default() });
        let into = w.b.register(1 << 16).unwrap();
        for _ in 0..4 {
            b.recv_post(&into, 0, 1 << 16).unwrap().complete().unwrap();
        }
        assert!(
            matches!(b.recv_post(&into, 0, 1 << 16), Err(Error::Retry(why)) if why.contains("packet lifetime"))
        );
        until("an old slot", || b.recv_post(&into, 0, 1 << 16).is_ok());
    }
}

/// Each end is written to as its own NICs have it.
#[test]
fn ends_whose_nics_differ_write_to_each_other() {
    let w = World::between([Nics::Full, Nics::Masked], 2, &[0]);
    let (a, b) = w
        .pair(&QpOptions { attr: Attr { channels: 2, ..Attr::default() }, ..QpOptions::default() });
    let data = pattern(300_000, 9);
    assert!(one(&w, &(a.clone(), b.clone()), &data, 300_000)[..300_000] == data);
    let back = World { a: w.b, b: w.a, fabric: w.fabric, folder: w.folder };
    assert!(one(&back, &(b, a), &data, 300_000)[..300_000] == data);
}

/// A queue pair that cannot get rid of what it has to send changes no key in time: its channel is
/// given up, its windows are freed, and the receive ends.
#[test]
fn a_nic_that_changes_no_key_is_given_up() {
    let w = World::of(Nics::Masked, 1, &[0]);
    let (a, b) = w.pair(&QpOptions::default());
    let (mine, theirs) = (w.a.register(1 << 20).unwrap(), w.b.register(4096).unwrap());
    let _read = a.recv_post(&mine, 0, 1 << 20).unwrap();
    let recv = b.recv_post(&theirs, 0, 4096).unwrap();
    until("clear", || a.counters().control > 0 && b.counters().control > 0);
    w.fault("rate b/0 100kbit tx");
    let from = w.b.register(1 << 20).unwrap();
    let send = b.send_post(&from, 0, 1 << 20, None).unwrap();
    until("it is sending", || b.counters().sent > 100);
    let began = Instant::now();
    recv.complete().unwrap();
    // 1 MiB takes 80 s.
    assert!((4..30).contains(&began.elapsed().as_secs()), "{:?}", began.elapsed());
    until("the channel has failed", || send.poll().is_err());
    // Its memory is bound to nothing, and receives that nobody can write to are taken as ever.
    drop(theirs);
    b.recv_post(&w.b.register(4096).unwrap(), 0, 4096).unwrap().complete().unwrap();
}

/// A window has 256 keys, which come again: each slot is used 300 times.
#[test]
fn keys_of_windows_come_again() {
    let w = World::of(Nics::Plain, 2, &[0, 1]);
    let attr = Attr {
        packet_lifetime_us: 0,
        messages_log2: 1,
        in_flight_log2: 17,
        channels: 2,
        ..Attr::default()
    };
    let pair = w.pair(&QpOptions { attr, ..QpOptions::default() });
    for round in 0..600 {
        let data = pattern(64, round);
        assert!(one(&w, &pair, &data, 64)[..64] == data, "{round}");
    }
}

/// The receiver's NIC is dead: its receives end all the same, at once, and others are still taken.
#[test]
fn receives_of_a_dead_nic_end() {
    for kind in ALL_NICS {
        let w = World::of(kind, 2, &[0, 1]);
        let (a, b) = w.pair(&QpOptions {
            attr: Attr { channels: 2, ..Attr::default() },
            ..QpOptions::default()
        });
        let into = w.b.register(1 << 20).unwrap();
        let recv = b.recv_post(&into, 0, 1 << 20).unwrap();
        w.fault("nic b/0 dead");
        recv.complete().unwrap();
        let again = b.recv_post(&into, 0, 1 << 20).unwrap();
        w.fault("nic b/1 dead");
        again.complete().unwrap();
        b.recv_post(&into, 0, 1 << 20).unwrap().complete().unwrap();
        drop(a);
    }
}

#[test]
fn what_is_wrong_is_said() {
    let w = World::new(1, &[0]);
    let options = QpOptions::default();
    let made = |ctx: &unbroken_sdr::Context, o: QpOptions| {
        ctx.create_qp(&o).map(drop).unwrap_err().to_string()
    };
    let attr = |change: fn(&mut Attr)| {
        let mut attr = Attr::default();
        change(&mut attr);
        QpOptions { attr, ..options }
    };
    assert!(made(&w.a, attr(|a| a.chunk_log2 = 30)).contains("chunks of 2^30"));
    assert!(made(&w.a, attr(|a| a.channels = 2)).contains("2 channels, the context has 1"));
    assert!(made(&w.a, QpOptions { send: false, recv: false, ..options }).contains("enable one"));
    let (a, b) =
        (w.a.create_qp(&options).unwrap(), w.b.create_qp(&attr(|a| a.messages_log2 = 3)).unwrap());
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
    for kind in ALL_NICS {
        one_nic_dies(kind);
    }
}

fn one_nic_dies(kind: Nics) {
    let w = World::of(kind, 2, &[0, 1]);
    let pair = w
        .pair(&QpOptions { attr: Attr { channels: 2, ..Attr::default() }, ..QpOptions::default() });
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
        why = send
            .and_then(|send| send.poll().map(drop))
            .err()
            .map_or(String::new(), |e| e.to_string());
        why.contains("every channel")
    });
}

/// NICs that have nothing to protect a buffer with, and one that is not connected yet.
#[test]
fn what_nics_do_not_have_is_said() {
    let w = World::of(Nics::Plain, 1, &[0]);
    let qp = w.b.create_qp(&QpOptions::default()).unwrap();
    let into = w.b.register(64).unwrap();
    assert!(qp
        .recv_post(&into, 0, 64)
        .map(drop)
        .unwrap_err()
        .to_string()
        .contains("not connected"));
    let none = ContextOptions { mask: Capabilities::default(), ..ContextOptions::default() };
    for (host, options) in [
        (Host::bare(w.folder.path(), "a").unwrap(), none),
        // With failover on, the NICs show nothing beyond what a journal can move.
        (Host::emulated(w.folder.path(), "a").unwrap(), ContextOptions::default()),
    ] {
        let error = Context::open(&host, &options).map(drop).unwrap_err().to_string();
        assert!(
            error.contains("NIC 0")
                && error.contains("memory windows")
                && error.contains("Host::bare"),
            "{error}"
        );
    }
}
