//! Reliable writes over the emulated network as it is: with loss, delay, duplicates, reordering,
//! and NICs that die.

mod common;

use common::*;
use std::time::{Duration, Instant};
use unbroken_sdr::{
    Attr, Choice, Code, Memory, Objective, Qp, QpOptions, Reliable, ReliableOptions, Scheme,
};

fn attr(channels: u8) -> Attr {
    Attr {
        chunk_log2: 12,
        in_flight_log2: 22,
        messages_log2: 4,
        mtu_bytes: 4096,
        channels,
        generations: 8,
        packet_lifetime_us: 200_000,
        ..Attr::default()
    }
}

fn schemes() -> [Choice; 5] {
    let fixed = [
        Scheme::SrRto,
        Scheme::SrNack,
        Scheme::Ec(Code::mds(32, 8).unwrap()),
        Scheme::Ec(Code::xor(32, 8).unwrap()),
    ];
    let [a, b, c, d] = fixed.map(Choice::Fixed);
    [a, b, c, d, Choice::Adaptive(Objective::Mean)]
}

struct Ends {
    a: Reliable,
    b: Reliable,
    from: Memory,
    into: Memory,
    qps: (Qp, Qp),
}

const BYTES: usize = 200_000;
const AT_ONCE: usize = 4;

fn ends(w: &World, channels: u8, options: &ReliableOptions) -> Ends {
    let qps = w.pair(&QpOptions { attr: attr(channels), ..QpOptions::default() });
    let [a, b] = [&qps.0, &qps.1].map(|qp| Reliable::new(qp, options).unwrap());
    Ends {
        a,
        b,
        from: w.a.register(AT_ONCE * BYTES).unwrap(),
        into: w.b.register(AT_ONCE * BYTES).unwrap(),
        qps,
    }
}

fn options(choice: Choice) -> ReliableOptions {
    let deadline = Duration::from_secs(20);
    // Slow enough for receivers on a busy machine: what is lost is what the test asks for, more or
    // less.
    ReliableOptions {
        choice,
        parity: 0.5,
        rate_bps: 400_000_000,
        deadline,
        ..ReliableOptions::default()
    }
}

/// Writes so many messages, some at once, and checks every byte.
#[track_caller]
fn traffic(e: &Ends, rounds: usize) {
    for round in 0..rounds {
        let sizes: Vec<usize> =
            (0..AT_ONCE).map(|i| 1 + (round * 7919 + i * 104_729) % BYTES).collect();
        let data: Vec<_> = sizes
            .iter()
            .map(|bytes| pattern(*bytes, (round * AT_ONCE) as u64 + *bytes as u64))
            .collect();
        let begin = |i: usize| {
            let at = i * BYTES;
            e.from.write(at, &data[i]).unwrap();
            let read = e.b.read(&e.into, at as u64, BYTES as u64).unwrap();
            (e.a.write(&e.from, at as u64, sizes[i] as u64).unwrap(), read)
        };
        let transfers: Vec<_> = (0..AT_ONCE).map(begin).collect();
        for (i, (write, read)) in transfers.iter().enumerate() {
            let bytes = sizes[i] as u64;
            assert_eq!(
                (write.wait(PATIENCE).unwrap(), read.wait(PATIENCE).unwrap()),
                (bytes, bytes)
            );
            assert!(
                e.into.read(i * BYTES, sizes[i]).unwrap() == data[i],
                "round {round}, message {i}"
            );
        }
    }
}

#[test]
fn writes_arrive_whatever_the_network_does() {
    let of = |kind| schemes().into_iter().map(move |choice| (kind, choice));
    // On NICs with windows alone, whose keys the schemes know nothing of, two of them.
    let with_windows =
        [Nics::Masked, Nics::Plain].into_iter().flat_map(|kind| of(kind).skip(1).take(2));
    for (kind, choice) in of(Nics::Full).chain(with_windows) {
        let w = World::of(kind, 1, &[0]);
        let e = ends(&w, 1, &options(choice));
        traffic(&e, 5);
        for faults in [
            &["loss a/0 1% tx"][..],
            &["loss a/0 10% tx", "loss b/0 10% tx"],
            &["burst-loss a/0 5% burst=8 tx"],
            &["reorder a/0 5% by=2ms tx", "duplicate a/0 5% tx"],
            &["delay a/0 20ms tx", "loss a/0 2% tx"],
        ] {
            faults.iter().for_each(|fault| w.fault(fault));
            traffic(&e, 5);
            w.clear();
        }
        let (counts, network) = (e.a.counts(), e.qps.1.counters());
        println!(
            "{kind:?}, {choice:?}: {counts:?}, {:?}, {network:?}, {:?}",
            e.b.counts(),
            e.a.rtt()
        );
        assert_eq!((counts.written, network.outside, network.strangers), (120, 0, 0));
        assert!(counts.repeated + e.b.counts().recovered > 0, "nothing was lost");
    }
}

/// The link dies in mid-message: both ends say so by their deadline.
#[test]
fn a_dead_link_is_an_error_by_the_deadline() {
    for choice in schemes() {
        let w = World::new(1, &[0]);
        let deadline = Duration::from_secs(1);
        let e = ends(&w, 1, &ReliableOptions { deadline, rate_bps: 4_000_000, ..options(choice) });
        let began = Instant::now();
        let read = e.b.read(&e.into, 0, BYTES as u64).unwrap();
        let write = e.a.write(&e.from, 0, BYTES as u64).unwrap();
        until("it has begun", || e.qps.1.counters().packets > 3);
        w.fault("cable a/0 cut");
        let errors =
            [write.wait(PATIENCE), read.wait(PATIENCE)].map(|ended| ended.unwrap_err().to_string());
        assert!(errors.iter().all(|e| e.contains("deadline has passed")), "{errors:?}");
        assert!((deadline..2 * deadline).contains(&began.elapsed()), "{:?}", began.elapsed());
    }
}

/// Two channels over two NICs: one dies, or its cable is cut in silence, and every byte comes over
/// the other.
#[test]
fn with_two_nics_writes_outlive_one() {
    let faults = ["nic a/0 dead", "nic b/1 dead", "cable a/1 cut"].map(|fault| (Nics::Full, fault));
    // What is said between the ends goes over the second NIC alone then, which cannot wake a worker
    // of the first.
    let plain = ["nic a/0 dead", "nic b/0 dead", "nic b/1 dead"].map(|fault| (Nics::Plain, fault));
    for (kind, fault) in faults.into_iter().chain(plain) {
        for choice in
            [Choice::Fixed(Scheme::SrNack), Choice::Fixed(Scheme::Ec(Code::mds(32, 8).unwrap()))]
        {
            let w = World::of(kind, 2, &[0, 1]);
            let e = ends(&w, 2, &options(choice));
            traffic(&e, 2);
            let data = pattern(BYTES, 99);
            e.from.write(0, &data).unwrap();
            let before = e.qps.1.counters().packets;
            let read = e.b.read(&e.into, 0, BYTES as u64).unwrap();
            let write = e.a.write(&e.from, 0, BYTES as u64).unwrap();
            until("it has begun", || e.qps.1.counters().packets > before + 3);
            w.fault(fault);
            write
                .wait(PATIENCE)
                .unwrap_or_else(|error| panic!("{kind:?} {fault} {choice:?}: {error}"));
            read.wait(PATIENCE).unwrap();
            assert!(e.into.read(0, BYTES).unwrap() == data);
            traffic(&e, 2);
        }
    }
}

#[test]
fn wrong_use_is_refused() {
    let w = World::new(1, &[0]);
    let e = ends(&w, 1, &options(schemes()[0]));
    let says = |result: Result<String, unbroken_sdr::Error>, text: &str| {
        let error = result.unwrap_err().to_string();
        assert!(error.contains(text), "{error}");
    };
    says(Reliable::new(&e.qps.0, &options(schemes()[0])).map(|_| String::new()), "already");
    says(
        e.a.write(&e.from, 1, (AT_ONCE * BYTES) as u64).map(|_| String::new()),
        "of memory that has",
    );
    let read = e.b.read(&e.into, 0, 10).unwrap();
    let write = e.a.write(&e.from, 0, 11).unwrap();
    says(write.wait(PATIENCE).map(|_| String::new()), "longer than the peer's read");
    says(read.wait(PATIENCE).map(|_| String::new()), "longer than the peer's read");
    traffic(&e, 1);
}
