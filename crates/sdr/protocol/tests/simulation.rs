//! Thousands of writes in virtual time, every byte checked; and the proofs that the checks can
//! fail.

mod world;

use std::collections::BTreeMap;
use unbroken_erasure::Code;
use unbroken_sdr_model::choose::Objective;
use unbroken_sdr_model::Scheme;
use unbroken_sdr_protocol::adapt::Choice;
use unbroken_sdr_protocol::attr::Attr;
use unbroken_sdr_protocol::board::Mutation;
use unbroken_sdr_protocol::reliable::{Config, Failure};
use world::*;

const MESSAGE: u64 = 4096;
/// Buffers of the receiver, which are used by turns.
const BUFFERS: u64 = 12;
const MARK: u8 = 0xee;

fn attr() -> Attr {
    Attr {
        chunk_log2: 7,
        in_flight_log2: 15,
        messages_log2: 3,
        mtu_bytes: 64,
        channels: 2,
        generations: 4,
        packet_lifetime_us: 250_000,
        ..Attr::default()
    }
}

fn config(injection_ns: u64) -> Config {
    Config { parity_chunks: 16, injection_ns, first_rtt_us: 20_000, least_rto_us: 200 }
}

fn schemes() -> [Scheme; 4] {
    [
        Scheme::SrRto,
        Scheme::SrNack,
        Scheme::Ec(Code::mds(8, 4).unwrap()),
        Scheme::Ec(Code::xor(8, 4).unwrap()),
    ]
}

fn pattern(id: u64, bytes: u64) -> Vec<u8> {
    let mut lots = Lots(id.wrapping_mul(77) + 5);
    (0..bytes).map(|_| lots.draw() as u8).collect()
}

/// What went wrong, if anything did. Not a panic: mutants must be caught by it.
type Checked = Result<World, String>;

/// Writes `count` messages from end 0 to end 1. A buffer whose message is complete is the
/// program's: it is marked, and the mark must be there when it is posted again.
fn play(
    seed: u64,
    count: u64,
    choice: Choice,
    conditions: Conditions,
    mutation: Option<Mutation>,
) -> Checked {
    let w = World::new(seed, attr(), injecting(conditions), conditions, mutation);
    play_in(w, seed, count, choice)
}

/// At the rate of the link.
fn injecting(conditions: Conditions) -> Config {
    config(128 * conditions.byte_ns + 2 * 64 * conditions.byte_ns)
}

fn play_in(mut w: World, seed: u64, count: u64, choice: Choice) -> Checked {
    let mut lots = Lots(seed + 1);
    let sizes: Vec<u64> = (0..count)
        .map(|_| if lots.chance(0.3) { MESSAGE } else { lots.below(MESSAGE + 1) })
        .collect();
    let (mut posted, mut written, mut read, mut sent) = (0u64, 0u64, 0u64, 0u64);
    let mut free: Vec<u64> = (0..BUFFERS).rev().collect();
    let mut of_read = BTreeMap::new();
    w.ends[1].below.memory[..(BUFFERS * MESSAGE) as usize].fill(MARK);
    let forever = u64::MAX / 2;
    while read < count || sent < count {
        while posted < count && !free.is_empty() {
            let buffer = free.remove(lots.below(free.len() as u64) as usize);
            let at = (buffer * MESSAGE) as usize;
            if w.ends[1].below.memory[at..at + MESSAGE as usize].iter().any(|byte| *byte != MARK) {
                return Err(format!("buffer {buffer} has changed after its message was complete"));
            }
            let (buf, receive) =
                (w.buffer(buffer * MESSAGE), sizes[posted as usize].max(lots.below(MESSAGE + 1)));
            let id = w.ends[1].reliable.read(&buf, 0, receive, forever).unwrap();
            of_read.insert(id, buffer);
            posted += 1;
        }
        while written < count && written < sent + 8 {
            let at = written % 16 * MESSAGE;
            let bytes = pattern(written, sizes[written as usize]);
            w.ends[0].below.memory[at as usize..at as usize + bytes.len()].copy_from_slice(&bytes);
            let buf = w.buffer(at);
            w.ends[0].reliable.write(&buf, 0, bytes.len() as u64, choice, forever).unwrap();
            written += 1;
        }
        (0..2).for_each(|end| w.run(end));
        loop {
            if !w.step() {
                return Err("nothing goes on".into());
            }
            if w.now_us > 4_000_000_000 {
                return Err("more than an hour".into());
            }
            let mut news = false;
            while let Some(event) = w.ends[0].reliable.poll_event() {
                event.result.map_err(|e| format!("write {}: {e}", event.id))?;
                sent += 1;
                news = true;
            }
            while let Some(event) = w.ends[1].reliable.poll_event() {
                let bytes = event.result.map_err(|e| format!("read {}: {e}", event.id))?;
                let buffer = of_read.remove(&event.id).unwrap();
                let at = (buffer * MESSAGE) as usize;
                let got = &mut w.ends[1].below.memory[at..at + MESSAGE as usize];
                if bytes != sizes[event.id as usize]
                    || got[..bytes as usize] != pattern(event.id, bytes)
                {
                    return Err(format!("message {} has wrong bytes", event.id));
                }
                if got[bytes as usize..].iter().any(|byte| *byte != MARK) {
                    return Err(format!("message {} was written beyond its end", event.id));
                }
                got.fill(MARK);
                free.push(buffer);
                read += 1;
                news = true;
            }
            if news {
                break;
            }
        }
    }
    Ok(w)
}

const LOSSES: [f64; 6] = [0.0, 1e-3, 1e-2, 3e-2, 5e-2, 0.1];

/// 0 to 10 % of loss, alone and in bursts; reordering; duplication; round trips from 0 to 100 ms:
/// for each scheme thousands of messages.
#[test]
fn every_byte_is_in_its_place_whatever_the_network_does() {
    for (s, scheme) in schemes().into_iter().enumerate() {
        let (mut messages, mut late, mut repeated, mut recovered) = (0, 0, 0, 0);
        for (l, loss) in LOSSES.into_iter().enumerate() {
            for (r, rtt_us) in [0, 1_000, 100_000].into_iter().enumerate() {
                for burst in [1.0, 6.0] {
                    let conditions = Conditions {
                        loss,
                        burst,
                        duplicate: 0.01,
                        late: 0.05,
                        late_us: 5_000,
                        rtt_us,
                        byte_ns: 10,
                    };
                    let seed = (s * 1000 + l * 100 + r * 10) as u64 + burst as u64;
                    let w = play(seed, 150, Choice::Fixed(scheme), conditions, None)
                        .unwrap_or_else(|e| panic!("{scheme} {conditions:?} seed {seed}: {e}"));
                    messages += 150;
                    late += w.ends[1].below.late;
                    repeated += w.ends[0].reliable.counts().repeated;
                    recovered += w.ends[1].reliable.counts().recovered;
                    assert_eq!(w.ends[1].below.outside, 0);
                }
            }
        }
        println!(
            "{scheme}: {messages} messages, {repeated} chunks again, {recovered} recovered, {late} \
             packets late"
        );
        assert!(messages >= 5000 && late > 0 && repeated > 0);
        assert_eq!(recovered > 0, matches!(scheme, Scheme::Ec(_)));
    }
}

/// Conditions in which many packets are very late, but none later than its lifetime, and messages
/// are complete long before.
const STORM: Conditions = Conditions {
    loss: 0.02,
    burst: 1.0,
    duplicate: 0.1,
    late: 0.2,
    late_us: 100_000,
    rtt_us: 1_000,
    byte_ns: 10,
};

#[test]
fn late_packets_never_change_a_reposted_buffer() {
    for seed in 0..4 {
        assert!(late_packets(seed, None).unwrap() > 100, "packets were late");
    }
}

/// How many packets were late in a storm; an error where they changed something.
fn late_packets(seed: u64, mutation: Option<Mutation>) -> Result<u64, String> {
    let choice = Choice::Fixed(Scheme::Ec(Code::mds(8, 4).unwrap()));
    play(seed, 300, choice, STORM, mutation).map(|w| w.ends[1].below.late)
}

#[test]
#[cfg(feature = "mutants")]
fn each_rule_against_late_packets_that_is_left_out_is_noticed() {
    for mutation in [Mutation::KeyStays, Mutation::AnyGeneration, Mutation::NoLifetime] {
        let caught: Vec<String> =
            (0..4).filter_map(|seed| late_packets(seed, Some(mutation)).err()).collect();
        println!("{mutation:?}: {caught:?}");
        assert!(!caught.is_empty(), "nobody notices {mutation:?}");
    }
}

/// Devices without indirect keys: a window for each message and channel, under a key of its own
/// each time.
#[test]
fn with_windows_late_packets_change_nothing_either() {
    for (seed, scheme) in schemes().into_iter().enumerate() {
        let late = with_windows(seed as u64, scheme, STORM, None)
            .unwrap_or_else(|e| panic!("{scheme}: {e}"));
        assert!(late > 100, "packets were late");
        for loss in LOSSES {
            let conditions = Conditions { loss, burst: 6.0, late: 0.05, late_us: 5_000, ..STORM };
            with_windows(seed as u64, scheme, conditions, None)
                .unwrap_or_else(|e| panic!("{scheme} {loss}: {e}"));
        }
    }
}

/// As [`late_packets`], with windows in place of indirect keys.
fn with_windows(
    seed: u64,
    scheme: Scheme,
    conditions: Conditions,
    mutation: Option<Mutation>,
) -> Result<u64, String> {
    let w = World::new(seed, attr(), injecting(conditions), conditions, mutation).with_windows();
    play_in(w, seed, 300, Choice::Fixed(scheme)).map(|w| w.ends[1].below.late)
}

#[test]
#[cfg(feature = "mutants")]
fn a_window_whose_end_is_left_out_is_noticed() {
    let ec = Scheme::Ec(Code::mds(8, 4).unwrap());
    let caught: Vec<String> = (0..4)
        .filter_map(|seed| with_windows(seed, ec, STORM, Some(Mutation::KeyStays)).err())
        .collect();
    println!("{caught:?}");
    assert!(!caught.is_empty(), "nobody notices a window that stays bound");
}

/// The way dies in mid-message: both ends say so by their deadline, and not long after it.
#[test]
fn a_link_that_dies_in_mid_message_is_an_error_by_the_deadline() {
    for scheme in schemes() {
        let conditions = Conditions { byte_ns: 1000, ..FAIR };
        let mut w = World::new(1, attr(), config(0), conditions, None);
        let (from, into) = (w.buffer(0), w.buffer(0));
        w.ends[0].reliable.write(&from, 0, MESSAGE, Choice::Fixed(scheme), 2_000_000);
        w.ends[1].reliable.read(&into, 0, MESSAGE, 3_000_000);
        (0..2).for_each(|end| w.run(end));
        while w.now_us < 4_000 {
            w.step();
        }
        w.set_conditions(Conditions { loss: 1.0, ..conditions });
        let mut ended = [None, None];
        while ended.iter().any(Option::is_none) && w.step() {
            for (end, ended) in ended.iter_mut().enumerate() {
                if let Some(event) = w.ends[end].reliable.poll_event() {
                    assert_eq!(event.result, Err(Failure::Deadline));
                    *ended = Some(w.now_us);
                }
            }
        }
        for (ended, deadline_us) in ended.iter().zip([2_000_000, 3_000_000]) {
            let at_us = ended.expect("it ends");
            assert!((deadline_us..deadline_us + 10_000).contains(&at_us), "{scheme}: {at_us}");
        }
    }
}

/// Segments, a read that is too short, and a scheme without room for its parity.
#[test]
fn what_does_not_fit_is_cut_or_refused() {
    let mut w = World::new(1, attr(), config(0), FAIR, None);
    let long = 3 * MESSAGE + 5;
    let data = pattern(9, long);
    w.ends[0].below.memory[..data.len()].copy_from_slice(&data);
    let (from, into) = (w.buffer(0), w.buffer(100_000));
    let second = Code::mds(1, 1).unwrap();
    for (bytes, receive, scheme) in [
        (long, long, Scheme::SrNack),
        (200, 100, Scheme::SrRto),
        (MESSAGE, MESSAGE, Scheme::Ec(second)),
    ] {
        w.ends[0].reliable.write(&from, 0, bytes, Choice::Fixed(scheme), 10_000_000).unwrap();
        w.ends[1].reliable.read(&into, 0, receive, 10_000_000).unwrap();
    }
    (0..2).for_each(|end| w.run(end));
    let mut results = [vec![], vec![]];
    while results.iter().any(|r| r.len() < 3) && w.step() {
        for (end, results) in results.iter_mut().enumerate() {
            while let Some(event) = w.ends[end].reliable.poll_event() {
                if event.id == 0 {
                    assert_eq!(w.ends[1].below.memory[100_000..100_000 + data.len()], data);
                }
                results.push((event.id, event.result));
            }
        }
    }
    for mut results in results {
        results.sort_by_key(|(id, _)| *id);
        assert_eq!(results, [(0, Ok(long)), (1, Err(Failure::TooLong)), (2, Err(Failure::Scheme))]);
    }
}

/// Parity is made aside and takes its time: it is sent when it is there, every byte is right, and a
/// buffer is the program's only when nobody reads it any more.
#[test]
fn parity_that_is_made_aside_is_right() {
    let code = Choice::Fixed(Scheme::Ec(Code::mds(8, 4).unwrap()));
    for most_us in [0, 100, 50_000] {
        for loss in LOSSES {
            for seed in 0..4 {
                let conditions =
                    Conditions { loss, late: 0.05, late_us: 5_000, byte_ns: 10, ..FAIR };
                let w = World::new(seed, attr(), injecting(conditions), conditions, None);
                let w = play_in(w.encoding_aside(most_us), seed, 150, code)
                    .unwrap_or_else(|e| panic!("{most_us} us, loss {loss}, seed {seed}: {e}"));
                assert!(loss < 1e-2 || w.ends[1].reliable.counts().recovered > 0);
            }
        }
    }
}

/// While the parity of a write is made, everything else goes on: its own chunks are acknowledged,
/// others are written to their end. It ends itself when its parity has been made, and not before,
/// though its deadline passes.
#[test]
fn everything_goes_on_while_parity_is_made() {
    let w = World::new(3, attr(), config(0), FAIR, None);
    let mut w = w.encoding_aside(u64::MAX / 4);
    let code = Choice::Fixed(Scheme::Ec(Code::mds(8, 4).unwrap()));
    let (from, into) = (w.buffer(0), w.buffer(100_000));
    let mut events = Vec::new();
    let begin = |w: &mut World, bytes, choice| {
        w.ends[1].reliable.read(&into, 0, bytes, 1_000_000).unwrap();
        w.ends[0].reliable.write(&from, 0, bytes, choice, 1_000_000).unwrap()
    };
    // One submessage. Its data is there and nothing is lost: the reader needs no parity.
    let slow = begin(&mut w, 8 * 128, code);
    // As many as there are slots beside it.
    for _ in 0..3 {
        let quick = begin(&mut w, MESSAGE, Choice::Fixed(Scheme::SrNack));
        (0..2).for_each(|end| w.run(end));
        while !events.iter().any(|(id, _)| *id == quick) {
            assert!(w.step() && w.now_us < 900_000, "{quick} waits");
            while let Some(event) = w.ends[0].reliable.poll_event() {
                events.push((event.id, event.result));
            }
        }
    }
    assert!(!events.iter().any(|(id, _)| *id == slow), "its buffer is still read: {events:?}");
    assert_eq!(
        w.ends[1].reliable.poll_event().map(|event| event.id),
        Some(0),
        "all of it is there"
    );
    w.make_all();
    w.run(0);
    let event = w.ends[0].reliable.poll_event();
    assert_eq!(event.map(|event| (event.id, event.result)), Some((slow, Ok(8 * 128))));
}

/// The scheme follows the conditions, and every byte is still in its place.
#[test]
fn the_adaptive_choice_changes_while_it_runs() {
    let conditions = Conditions { loss: 0.01, rtt_us: 20_000, byte_ns: 10, ..FAIR };
    let w = play(5, 400, Choice::Adaptive(Objective::Mean), conditions, None).unwrap();
    let counts = w.ends[0].reliable.counts();
    assert!(counts.coded > 100 && counts.coded < counts.written, "{counts:?}");
    let w = play(
        5,
        100,
        Choice::Adaptive(Objective::Mean),
        Conditions { loss: 0.0, ..conditions },
        None,
    )
    .unwrap();
    let quiet = w.ends[0].reliable.counts();
    println!("{counts:?}, without loss {quiet:?}");
}
