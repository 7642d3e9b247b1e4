//! Random exchanges over a bad network, and over QPs that die in mid-stream.

use crate::common::script::*;
use crate::common::*;
use proptest::prelude::*;
use unbroken_roce::*;
use unbroken_types::*;

type Kinds = Vec<(u8, usize, u32)>;

fn kinds(max_len: usize) -> impl Strategy<Value = Kinds> {
    let len = prop_oneof![2 => 0..200usize, 2 => 0..9000usize, 1 => 0..=max_len];
    proptest::collection::vec((any::<u8>(), len, any::<u32>()), 0..40)
}

fn mtus() -> impl Strategy<Value = Mtu> {
    (1..=5u32).prop_map(|c| Mtu::from_code(c).unwrap())
}

fn faults() -> impl Strategy<Value = Faults> {
    let rate = || prop_oneof![Just(0u64), 0..30u64, 0..120u64];
    (rate(), rate(), rate()).prop_map(|(loss, duplicate, reorder)| Faults {
        loss,
        duplicate,
        reorder,
    })
}

/// Ends that differ are rare, and must work.
fn selective() -> impl Strategy<Value = [bool; 2]> {
    prop_oneof![4 => Just([true; 2]), 2 => Just([false; 2]), 1 => Just([true, false]), 1 => Just([false, true])]
}

fn run_script(pair: &mut Pair, script: &mut Script) {
    for _ in 0..300_000 {
        script.post(pair);
        if !pair.step() && script.done(pair) {
            return;
        }
        for end in &pair.ends {
            assert_eq!(end.qp.state(), QpState::Rts, "{:?}", end.wcs.sends.last());
        }
    }
    panic!("no end: {:?} {:?}", pair.ends[0].qp.progress(), pair.ends[1].qp.progress());
}

/// Both ends are cut from each other at a random point and go on with fresh QPs; says how many WRs
/// are sent again.
fn switch(pair: &mut Pair, counts: &mut [(u64, u64); 2], mtu: Mtu) -> u32 {
    let life = pair.life + 1;
    pair.life = life;
    let psn = [pair.rng.next() as u32 & PSN_MASK, pair.rng.next() as u32 & PSN_MASK];
    let mut backlogs = vec![];
    for (end, count) in pair.ends.iter_mut().zip(counts.iter_mut()) {
        if pair.rng.chance(500) {
            end.qp.network_failure(WcStatus::FatalErr, &mut end.wcs);
            assert_eq!(end.qp.failure(), Some(WcStatus::FatalErr));
        }
        let backlog = end.qp.quiesce();
        count.0 += backlog.executed.all;
        count.1 += backlog.completed.all;
        backlogs.push(backlog);
    }
    let mut replayed = 0;
    for i in 0..2 {
        let (qpn, peer) = (100 * life + i as u32, 100 * life + 1 - i as u32);
        let mut qp = RcQp::new(config(qpn, true));
        let wcs = &mut pair.ends[i].wcs;
        qp.modify(&init(), wcs).unwrap();
        let peer_done = counts[1 - i].0 - counts[i].1;
        assert!(!backlogs[i].unsafe_to_replay(PeerDone::Messages(peer_done)));
        let replay = backlogs[i].mark_executed(PeerDone::Messages(peer_done));
        qp.adopt(&backlogs[i]).unwrap();
        assert_eq!(
            replay.marked, peer_done,
            "the peer cannot have executed what is not outstanding"
        );
        replayed += replay.replayed;
        connect(&mut qp, wcs, peer, psn[i], psn[1 - i], mtu);
        qp.set_selective(pair.selective[i]);
        pair.ends[i].qp = qp;
    }
    replayed
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn every_message_once_in_order_intact(
        seed: u64, mtu in mtus(), faults in faults(), a in kinds(65_536), b in kinds(65_536), room in 1..80u64,
        selective in selective(),
    ) {
        let mut pair = Pair::new(seed, faults, mtu, false);
        pair.room = room;
        pair.set_selective(selective);
        let mut script = Script::new(&mut pair, [&a, &b], 7);
        run_script(&mut pair, &mut script);
        script.check(&pair);
    }

    #[test]
    fn a_stream_goes_on_over_other_qps(
        seed: u64, mtu in mtus(), faults in faults(), a in kinds(20_000), b in kinds(20_000),
        cuts in proptest::collection::vec(1..400u64, 1..6), selective in selective(),
    ) {
        let mut pair = Pair::new(seed, faults, mtu, true);
        pair.set_selective(selective);
        let mut script = Script::new(&mut pair, [&a, &b], 5);
        let mut counts = [(0, 0); 2];
        for cut in cuts {
            let until = pair.pushed + cut;
            for _ in 0..100_000 {
                script.post(&mut pair);
                if !pair.step() && script.done(&pair) || pair.pushed >= until {
                    break;
                }
            }
            switch(&mut pair, &mut counts, mtu);
        }
        run_script(&mut pair, &mut script);
        script.check(&pair);
    }
}
