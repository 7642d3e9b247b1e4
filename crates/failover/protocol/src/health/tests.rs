//! Paths that answer, late, now and then or never, in steps of a millisecond.

use super::*;
use crate::slots::SlotPath;
use crate::Mutation;

const fn path(local: u8, remote: u8) -> SlotPath {
    SlotPath { local, remote }
}

const A: SlotPath = path(0, 0);
const B: SlotPath = path(1, 1);

/// Runs in steps of 1 ms from `from_ms`; `answers(ms, path)` says how long an answer takes, if one
/// comes. Gives the verdicts with their times in ms.
fn run(
    h: &mut PeerHealth,
    from_ms: u64,
    to_ms: u64,
    answers: impl Fn(u64, SlotPath) -> Option<u64>,
) -> Vec<(u64, SlotPath, Verdict)> {
    let (mut flying, mut said) = (Vec::new(), Vec::new());
    for ms in from_ms..to_ms {
        let now_us = ms * 1_000;
        flying.retain(|&(at_ms, path, sequence)| {
            if at_ms <= ms {
                h.handle_answer(now_us, path, sequence);
            }
            at_ms > ms
        });
        if h.poll_timeout().is_some_and(|at| at <= now_us) {
            h.handle_timeout(now_us);
        }
        while let Some((PortPath { path, .. }, sequence)) = h.poll_probe(now_us) {
            flying.extend(answers(ms, path).map(|takes| (ms + takes, path, sequence)));
        }
        said.extend(
            std::iter::from_fn(|| h.poll_verdict())
                .map(|(port_path, verdict)| (ms, port_path.path, verdict)),
        );
    }
    said
}

fn two_paths() -> PeerHealth {
    let mut h = PeerHealth::new(HealthConfig::default());
    h.add(A);
    h.add(B);
    h
}

#[test]
fn a_dead_path_is_found_within_a_round_if_another_answers() {
    let mut h = two_paths();
    assert_eq!(h.ask(0, A, 0), Answer::Asked);
    let said = run(&mut h, 0, 200, |_, p| (p == B).then_some(1));
    assert_eq!(said, [(45, A, Verdict::Dead)]);
    assert!(h.is_dead(A) && !h.is_dead(B));
    assert_eq!(h.ask(200_000, A, 0), Answer::Dead);
}

#[test]
fn a_path_that_answers_lives_and_nobody_is_probed_further() {
    let mut h = two_paths();
    h.ask(0, A, 0);
    assert_eq!(run(&mut h, 0, 2, |_, _| Some(1)), [(1, A, Verdict::Alive)]);
    assert_eq!(h.poll_timeout(), None, "the round ends with its last question");
    assert_eq!(run(&mut h, 2, 300, |_, _| Some(1)), []);
    assert_eq!(h.ask(300_000, A, 299_000), Answer::Asked, "that was long ago");
}

/// A path that fails ten times a second has to be well for a minute; one that failed once, for a
/// second.
#[test]
fn a_path_is_steady_again_after_a_time_that_grows_with_its_failures() {
    let mut h = two_paths();
    assert!(h.is_steady(0, A), "it has never failed");
    assert!(!h.is_steady(0, path(5, 5)), "there is none");
    h.set_nic(0, 0, false);
    assert!(!h.is_steady(10_000, A) && h.is_steady(10_000, B));
    h.set_nic(20_000, 0, true);
    run(&mut h, 20, 100, |_, _| Some(1));
    assert!(!h.is_steady(1_019_999, A) && h.is_steady(1_020_000, A));
    // By silence: a verdict of dead, then an answer.
    h.ask(2_000_000, A, 2_000_000);
    run(&mut h, 2_000, 2_600, |ms, p| (p == B || ms > 2_200).then_some(1));
    assert!(!h.is_dead(A));
    let steady_ms = (2_600..10_000).find(|ms| h.is_steady(ms * 1_000, A)).unwrap();
    assert!((4_200..4_600).contains(&steady_ms), "two seconds after it answered: {steady_ms}");
    for i in 0..600 {
        h.set_nic(10_000_000 + i * 100_000, 0, false);
        h.set_nic(10_050_000 + i * 100_000, 0, true);
    }
    run(&mut h, 69_951, 70_100, |_, _| Some(1));
    assert!(!h.is_steady(129_000_000, A) && h.is_steady(130_000_000, A));
    // What was long ago is forgotten.
    h.set_nic(400_000_000, 0, false);
    h.set_nic(400_000_000, 0, true);
    run(&mut h, 400_000, 400_100, |_, _| Some(1));
    assert!(h.is_steady(401_000_000, A));
}

#[test]
fn a_round_trip_of_any_qp_answers_the_question() {
    let mut h = two_paths();
    h.ask(0, A, 0);
    h.carried(30_000, A);
    assert_eq!(h.poll_verdict(), Some((A.into(), Verdict::Alive)));
    assert_eq!(
        h.ask(31_000, A, 5_000),
        Answer::Alive,
        "a sign of life that is younger than the silence"
    );
    assert_eq!(h.ask(31_000, A, 30_500), Answer::Asked);
}

#[test]
fn a_peer_that_answers_nowhere_is_waited_for() {
    let mut h = two_paths();
    h.ask(0, A, 0);
    assert_eq!(run(&mut h, 0, 5_000, |_, _| None), []);
    let said = run(&mut h, 5_000, 6_000, |_, _| Some(1));
    assert!(matches!(said[..], [(_, A, Verdict::Alive)]), "{said:?}");
    let mut h = two_paths();
    h.ask(0, A, 0);
    assert_eq!(
        run(&mut h, 0, 11_000, |_, _| None),
        [(10_000, A, Verdict::Dead)],
        "but not for ever"
    );
}

/// A peer that has answered once or twice, and then has no core, is waited for.
#[test]
fn a_path_is_given_up_only_after_three_answers_of_others() {
    for answers in 0..=5 {
        let mut h = two_paths();
        h.ask(0, A, 0);
        let given = std::cell::Cell::new(0);
        let said = run(&mut h, 0, 5_000, |_, p| {
            (p == B && given.replace(given.get() + 1) < answers).then_some(1)
        });
        let dead = matches!(said[..], [(45..=100, A, Verdict::Dead)]);
        assert_eq!((dead, said.is_empty()), (answers >= 3, answers < 3), "{answers}: {said:?}");
    }
}

#[test]
fn a_witness_that_is_left_out_is_noticed() {
    let mutation = Mutation::NoWitness;
    let mut h = PeerHealth::new(HealthConfig { mutation, ..HealthConfig::default() });
    h.ask(0, A, 0);
    assert_eq!(run(&mut h, 0, 200, |_, _| None), [(45, A, Verdict::Dead)], "what the rule is for");
}

/// The witness answers first and the path that was asked some time later, over and over: as with a
/// peer that was stopped, or one whose cores are all taken.
#[test]
fn a_path_that_is_slower_than_its_witness_lives() {
    for (witness_ms, path_ms) in [(60, 90), (30, 200), (5, 39), (0, 19)] {
        let mut h = two_paths();
        h.ask(0, A, 0);
        let said = run(&mut h, 0, 2_000, |_, p| Some(if p == A { path_ms } else { witness_ms }));
        assert_eq!(said, [(path_ms, A, Verdict::Alive)], "{witness_ms} {path_ms}");
    }
    let mut h = two_paths();
    h.ask(0, A, 0);
    run(&mut h, 0, 900, |_, _| None);
    let said = run(&mut h, 900, 2_000, |_, p| Some(if p == A { 15 } else { 1 }));
    assert!(matches!(said[..], [(_, A, Verdict::Alive)]), "{said:?}");
}

/// The data of a path fills a queue, which its probes wait behind: its answers take longer and
/// longer, while those of a path without data come at once.
#[test]
fn a_path_whose_answers_take_long_is_waited_for() {
    let verdict = |mutation| {
        let mut h = PeerHealth::new(HealthConfig { mutation, ..HealthConfig::default() });
        h.add(A);
        h.add(B);
        h.ask(0, A, 0);
        let said = run(&mut h, 0, 100, |_, p| Some(if p == A { 30 } else { 1 }));
        assert_eq!(said, [(30, A, Verdict::Alive)]);
        h.ask(100_000, A, 100_000);
        let said = run(&mut h, 100, 300, |_, p| Some(if p == A { 90 } else { 1 }));
        (said, h)
    };
    let (said, mut h) = verdict(Mutation::None);
    assert_eq!(said, [(190, A, Verdict::Alive)]);
    // It is cut: the question lasts for as long as such a queue might.
    h.ask(300_000, A, 300_000);
    let said = run(&mut h, 300, 1_000, |_, p| (p == B).then_some(1));
    assert!(matches!(said[..], [(601..=661, A, Verdict::Dead)]), "{said:?}");
    let (said, _) = verdict(Mutation::NoQueue);
    assert_eq!(said[0], (145, A, Verdict::Dead), "the rule is left out");
}

/// The peer takes its witness's probe before that of the path has even left, and then has no core
/// for long.
#[test]
fn a_witness_that_was_probed_first_is_none() {
    let mut h = two_paths();
    h.ask(0, B, 0);
    let (port_path, early) = h.poll_probe(0).unwrap();
    assert_eq!(port_path, B.into());
    h.ask(0, A, 0);
    h.handle_answer(1_000, B, early);
    assert_eq!(h.poll_verdict(), Some((B.into(), Verdict::Alive)));
    let said = run(&mut h, 1, 400, |ms, p| {
        Some(if p == A { 340 - ms.min(330) } else { 339 - ms.min(330) })
    });
    assert!(matches!(said[..], [(_, A, Verdict::Alive)]), "{said:?}");
}

#[test]
fn two_of_three_probes_may_be_lost() {
    let mut h = two_paths();
    h.ask(0, A, 0);
    let said = run(&mut h, 0, 500, |ms, p| (p == B || ms > 20 && ms % 3 == 0).then_some(1));
    assert!(matches!(said[..], [(_, A, Verdict::Alive)]), "{said:?}");
}

#[test]
fn a_dead_path_is_tried_again_and_comes_back() {
    let mut h = two_paths();
    h.ask(0, A, 0);
    run(&mut h, 0, 60, |_, p| (p == B).then_some(1));
    let said = run(&mut h, 60, 20_000, |ms, p| (p == B || ms > 9_000).then_some(1));
    let [(at_ms, A, Verdict::Alive)] = said[..] else { panic!("{said:?}") };
    assert!((9_001..=10_100).contains(&at_ms), "{at_ms}");
    assert_eq!(h.ask(20_000_000, A, 20_000_000), Answer::Asked);
}

#[test]
fn a_path_of_a_dead_nic_is_no_question_and_is_asked_when_the_nic_is_back() {
    let mut h = two_paths();
    h.ask(0, A, 0);
    h.set_nic(1_000, 0, false);
    assert_eq!(h.ask(2_000, A, 0), Answer::Dead);
    assert_eq!(run(&mut h, 2, 500, |_, p| (p == B).then_some(1)), []);
    h.set_nic(500_000, 0, true);
    assert_eq!(run(&mut h, 500, 600, |_, _| Some(1)), [(501, A, Verdict::Alive)]);
}

#[test]
fn both_paths_may_be_asked_and_one_of_them_is_the_others_witness() {
    let mut h = two_paths();
    h.ask(0, A, 0);
    h.ask(0, B, 0);
    let said = run(&mut h, 0, 500, |_, p| (p == B).then_some(1));
    assert_eq!(said, [(1, B, Verdict::Alive), (45, A, Verdict::Dead)]);
}

#[test]
fn witnesses_take_turns_and_are_few() {
    let mut h = PeerHealth::new(HealthConfig::default());
    (0..8).for_each(|l| (0..8).for_each(|r| h.add(path(l, r))));
    h.ask(0, A, 0);
    let mut probed = std::collections::BTreeSet::new();
    for ms in 0..80 {
        let now_us = ms * 1_000;
        if h.poll_timeout().is_some_and(|at| at <= now_us) {
            h.handle_timeout(now_us);
        }
        let sent: Vec<_> = std::iter::from_fn(|| h.poll_probe(now_us))
            .map(|(port_path, _)| port_path.path)
            .collect();
        assert!(sent.len() <= MAX_WITNESSES + COPIES as usize);
        probed.extend(sent);
    }
    assert_eq!(probed.len(), 64);
}

#[test]
fn old_answers_and_strange_numbers_say_nothing() {
    let mut h = two_paths();
    h.ask(0, A, 0);
    let (_, first) =
        std::iter::from_fn(|| h.poll_probe(0)).find(|(port_path, _)| port_path.path == A).unwrap();
    h.handle_answer(1_000, A, first);
    assert_eq!(h.poll_verdict(), Some((A.into(), Verdict::Alive)));
    h.ask(200_000, A, 199_000);
    h.handle_answer(201_000, A, first);
    h.handle_answer(201_000, A, first.wrapping_add(7));
    assert_eq!(h.poll_verdict(), None, "a late answer to an older question");
}

/// The port pairs of a pair of NICs live and die by themselves, and each is a witness for the
/// other.
#[test]
fn a_port_pair_that_is_dead_says_nothing_of_the_others() {
    let mut h = PeerHealth::new(HealthConfig::default());
    let port_pair = |port_pair| PortPath { path: A, port_pair };
    (0..2).for_each(|i| h.add(port_pair(i)));
    h.ask(0, port_pair(0), 0);
    let mut now_us = 0;
    while !h.is_dead(port_pair(0)) {
        now_us += 1_000;
        assert!(now_us < 200_000, "the dead port_pair is found");
        h.handle_timeout(now_us);
        while let Some((port_path, sequence)) = h.poll_probe(now_us) {
            if port_path.port_pair == 1 {
                h.handle_answer(now_us, port_path, sequence);
            }
        }
    }
    assert_eq!(h.poll_verdict(), Some((port_pair(0), Verdict::Dead)));
    assert!(h.may_carry(port_pair(1)) && !h.may_carry(port_pair(0)));
}

#[test]
fn a_port_that_is_down_takes_its_port_pair_along_and_no_other() {
    let mut h = PeerHealth::new(HealthConfig::default());
    let port_path = |path, port_pair| PortPath { path, port_pair };
    [port_path(A, 0), port_path(A, 1), port_path(B, 0), port_path(B, 1)]
        .into_iter()
        .for_each(|port_path| h.add(port_path));
    h.set_port(0, A.local, 1, false);
    assert!(h.may_carry(A) && !h.may_carry(port_path(A, 1)) && h.may_carry(port_path(B, 1)));
    h.set_nic(1, A.local, false);
    assert!(!h.may_carry(A) && h.may_carry(B));
    h.set_port(2, A.local, 0, true);
    assert!(h.may_carry(A) && !h.may_carry(port_path(A, 1)), "the other port is still down");
    assert!(!h.may_carry(port_path(path(5, 5), 0)), "nobody knows of it");
}

/// A failure that the peer has found counts here, once however many QPs tell of it, and the path
/// has to be steady for ever longer.
#[test]
fn a_failure_that_is_heard_of_counts_once() {
    let mut h = two_paths();
    let steady_us = HealthConfig::default().steady_us;
    (0..8).for_each(|i| h.fails(1_000 * i, A));
    assert!(!h.is_steady(7_000 + steady_us - 1, A) && h.is_steady(7_000 + steady_us, A));
    assert!(h.may_carry(A) && h.is_steady(0, B));
    h.fails(2_000_000, A);
    assert!(!h.is_steady(2_000_000 + steady_us, A) && h.is_steady(2_000_000 + 2 * steady_us, A));
}

#[test]
fn a_path_that_is_not_proven_counts_as_dead_until_it_answers() {
    let mut h = PeerHealth::new(HealthConfig::default());
    h.trust(A);
    h.add_unproven(0, A);
    h.add_unproven(0, B);
    assert!(!h.is_dead(A) && h.is_dead(B), "the program uses the first");
    let said = run(&mut h, 0, 100, |_, _| Some(3));
    assert_eq!(said, [(3, B, Verdict::Alive)], "it is probed at once");
    assert!(h.is_steady(100_000, B));
    h.add_unproven(100_000, B);
    assert!(!h.is_dead(B), "once is enough");
}

#[test]
fn a_path_that_never_answers_is_probed_ever_less_often_and_may_be_trusted() {
    let mut h = PeerHealth::new(HealthConfig::default());
    h.add_unproven(0, B);
    let probes = std::cell::Cell::new(0);
    run(&mut h, 0, 60_000, |_, _| {
        probes.set(probes.get() + 1);
        None
    });
    assert!((8..=16).contains(&probes.get()), "{} in a minute", probes.get());
    h.trust(B);
    assert!(!h.is_dead(B), "a queue pair has it as its own");
}

#[test]
fn a_path_that_has_failed_is_not_alive_because_a_program_uses_it() {
    let mut h = two_paths();
    h.ask(0, A, 0);
    run(&mut h, 0, 100, |_, p| (p == B).then_some(1));
    h.trust(A);
    assert!(h.is_dead(A), "it never answered and has failed");
}
