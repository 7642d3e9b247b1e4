//! The adaptive choice without a rate: how long a chunk takes is measured, so parity has its price
//! where writes wait for the injection, and is taken where they wait for the way.

mod world;

use unbroken_sdr_model::choose::Objective;
use unbroken_sdr_protocol::adapt::Choice;
use unbroken_sdr_protocol::attr::Attr;
use unbroken_sdr_protocol::reliable::{Config, Counts};
use world::*;

const CHUNKS: u64 = 32;
const MESSAGE: u64 = CHUNKS * 128;
/// A chunk of two packets, each with 64 bytes of headers.
const CHUNK_NS: u64 = 4 * 64 * 20;

/// Writes so many messages without a rate, 16 at once, and gives what was counted and the time of
/// a chunk that was measured.
fn play(seed: u64, count: u64, conditions: Conditions) -> (Counts, Option<u64>) {
    let attr = Attr {
        chunk_log2: 7,
        in_flight_log2: 18,
        messages_log2: 6,
        mtu_bytes: 64,
        channels: 1,
        generations: 4,
        packet_lifetime_us: 20_000,
        ..Attr::default()
    };
    let config =
        Config { parity_chunks: 32, injection_ns: 0, first_rtt_us: 20_000, least_rto_us: 2_000 };
    let mut w = World::new(seed, attr, config, conditions, None);
    let (mut begun, mut ended, forever) = (0, 0, u64::MAX / 2);
    while ended < count {
        while begun < count && begun < ended + 16 {
            let buffer = w.buffer(begun % 16 * MESSAGE);
            w.ends[1].reliable.read(&buffer, 0, MESSAGE, forever).unwrap();
            let choice = Choice::Adaptive(Objective::Mean);
            w.ends[0].reliable.write(&buffer, 0, MESSAGE, choice, forever).unwrap();
            begun += 1;
        }
        (0..2).for_each(|end| w.run(end));
        let before = ended;
        while ended == before {
            assert!(w.step(), "seed {seed}: nothing goes on");
            assert!(w.now_us < 1_000_000_000, "seed {seed}: not in time");
            while let Some(event) = w.ends[0].reliable.poll_event() {
                event.result.unwrap();
                ended += 1;
            }
        }
    }
    (w.ends[0].reliable.counts(), w.ends[0].reliable.injection_ns())
}

const FAST: Conditions = Conditions { byte_ns: 20, rtt_us: 200, ..FAIR };

/// A short way, 16 writes at once: nothing but what is lost is sent beside the data.
#[test]
fn parity_that_is_not_needed_is_not_sent_where_writes_wait_for_the_injection() {
    for seed in 1..=10 {
        for loss in [0.0, 0.001, 0.01] {
            let (counts, ns) = play(seed, 400, Conditions { loss, ..FAST });
            let needed = 400.0 * CHUNKS as f64 / (1.0 - loss) / (1.0 - loss);
            let share = counts.chunks as f64 / needed;
            let off = ns.unwrap() as f64 / CHUNK_NS as f64;
            assert!(share < 1.05, "seed {seed}, loss {loss}: {share}, {counts:?}");
            assert!((0.8..1.25).contains(&off), "seed {seed}, loss {loss}: {ns:?} ns");
        }
    }
}

/// A long way, on which a loss costs more than all parity.
#[test]
fn parity_is_sent_where_writes_wait_for_the_way() {
    for seed in 1..=10 {
        let (counts, _) = play(seed, 400, Conditions { loss: 0.01, rtt_us: 50_000, ..FAST });
        assert!(counts.coded > 200, "seed {seed}: {counts:?}");
    }
}
