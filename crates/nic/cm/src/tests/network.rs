//! Two ends over a network that loses, doubles and delays messages.

use crate::mutants::Mutation;
use crate::*;
use proptest::prelude::*;
use std::collections::BTreeMap;

const CONFIG: Config = Config {
    response_timeout: 10,
    max_retries: 15,
    service_timeout: 12,
    timewait_us: 1_000_000,
    seed: 1,
};

/// What the network does with a datagram.
#[derive(Clone, Copy, Debug)]
enum Fate {
    Arrives { after_us: u64 },
    Lost,
    Doubled { after_us: u64, again_us: u64 },
}

fn address(end: usize) -> Peer {
    Peer { gid: [end as u8 + 1; 16], qpn: 1 }
}

/// To which end a datagram flies.
type Flying = (usize, Box<[u8; MAD_BYTES]>);

/// Two ends and what is between them.
struct World {
    now_us: u64,
    ends: [Cm; 2],
    events: [Vec<(ConnId, Event)>; 2],
    /// What is on its way, by time of arrival.
    flying: BTreeMap<(u64, u64), Flying>,
    fates: Vec<Fate>,
    sent: usize,
    /// Each end accepts what it is asked, and establishes what it is answered.
    polite: bool,
}

impl World {
    fn new(fates: Vec<Fate>) -> World {
        let ends = [1, 2].map(|seed| Cm::new(Config { seed, ..CONFIG }));
        let (events, flying) = ([Vec::new(), Vec::new()], BTreeMap::new());
        World { now_us: 0, ends, events, flying, fates, sent: 0, polite: true }
    }

    fn connect(&mut self, from: usize) -> ConnId {
        let req = Req {
            service_id: service_id(PortSpace::Tcp, 7),
            local_guid: from as u64 + 1,
            local_qpn: 100 + from as u32,
            starting_psn: 55,
            ..Req::default()
        };
        let connect = Connect { peers: vec![address(1 - from)], via: 0, req: Box::new(req) };
        let id = self.ends[from].connect(self.now_us, connect).unwrap();
        self.flush();
        id
    }

    fn accept(&mut self, end: usize, id: ConnId) {
        let rep = Rep { local_qpn: 200 + end as u32, ..Rep::default() };
        let rep = Box::new(Rep { local_guid: end as u64 + 1, ..rep });
        self.ends[end].accept(self.now_us, id, Reply { rep }).unwrap();
    }

    fn flush(&mut self) {
        for end in 0..2 {
            while let Some(output) = self.ends[end].next_output() {
                match output {
                    Output::Send { bytes, .. } => self.send(end, bytes),
                    Output::Event(id, event) => self.on_event(end, id, event),
                }
            }
        }
    }

    fn on_event(&mut self, end: usize, id: ConnId, event: Event) {
        self.events[end].push((id, event.clone()));
        if !self.polite {
            return;
        }
        match event {
            Event::Request { .. } => self.accept(end, id),
            Event::Response(_) => self.ends[end].establish(self.now_us, id).unwrap(),
            Event::SidrRequest { .. } => {
                let rep = SidrRep { qpn: 7, ..SidrRep::default() };
                self.ends[end].answer(self.now_us, id, rep).unwrap();
            }
            _ => {}
        }
    }

    fn send(&mut self, from: usize, bytes: Box<[u8; MAD_BYTES]>) {
        let fate = self.fates.get(self.sent).copied().unwrap_or(Fate::Arrives { after_us: 10 });
        self.sent += 1;
        let mut fly = |after_us: u64| {
            let key = (self.now_us + after_us, self.flying.len() as u64 + self.sent as u64 * 1000);
            self.flying.insert(key, (1 - from, bytes.clone()));
        };
        match fate {
            Fate::Arrives { after_us } => fly(after_us),
            Fate::Lost => {}
            Fate::Doubled { after_us, again_us } => {
                fly(after_us);
                fly(again_us);
            }
        }
    }

    /// Lets time pass until nothing is left to do, or `until_us`.
    fn run(&mut self, until_us: u64) {
        loop {
            let arrival = self.flying.keys().next().map(|(at, _)| *at);
            let deadlines = self.ends.iter().filter_map(Cm::next_deadline_us);
            let Some(next) = deadlines.chain(arrival).min().filter(|at| *at <= until_us) else {
                self.now_us = until_us;
                return;
            };
            self.now_us = self.now_us.max(next);
            while let Some(first) = self.flying.first_entry() {
                if first.key().0 > self.now_us {
                    break;
                }
                let (to, bytes) = first.remove();
                self.ends[to].handle(self.now_us, address(1 - to), 0, &bytes[..]);
            }
            self.ends.iter_mut().for_each(|end| end.tick(self.now_us));
            self.flush();
        }
    }

    fn count(&self, end: usize, of: impl Fn(&Event) -> bool) -> usize {
        self.events[end].iter().filter(|(_, event)| of(event)).count()
    }

    fn request(&self, end: usize) -> ConnId {
        let is_request = |event: &Event| matches!(event, Event::Request { .. });
        self.events[end].iter().find(|(_, event)| is_request(event)).unwrap().0
    }
}

const HOUR_US: u64 = 3_600_000_000;

fn is_end(event: &Event) -> bool {
    matches!(event, Event::Disconnected { .. })
}

#[test]
fn a_connection_comes_and_goes() {
    let mut w = World::new(Vec::new());
    let id = w.connect(0);
    w.run(1000);
    assert_eq!(w.ends[0].state(id), Some(State::Established));
    let other = w.request(1);
    assert_eq!(w.ends[1].state(other), Some(State::Established));
    assert_eq!(w.sent, 3, "REQ, REP, RTU");
    let Event::Response(rep) = &w.events[0][0].1 else { panic!("{:?}", w.events[0]) };
    assert_eq!((rep.starting_psn, rep.local_qpn), (55, 201), "the PSN is the request's");
    w.ends[0].disconnect(w.now_us, id).unwrap();
    w.flush();
    w.run(HOUR_US);
    for end in 0..2 {
        assert_eq!(w.count(end, is_end), 1);
        assert_eq!(w.count(end, |event| *event == Event::TimewaitExit), 1);
        assert_eq!(w.ends[end].count(), 0, "nothing is kept");
    }
    assert_eq!(w.sent, 5, "and DREQ, DREP");
}

#[test]
fn nobody_who_answers_is_unreachable() {
    let mut w = World::new(vec![Fate::Lost; 100]);
    let id = w.connect(0);
    w.run(HOUR_US);
    assert_eq!((w.sent, w.count(0, |event| *event == Event::Unreachable)), (16, 1));
    assert_eq!(w.ends[0].state(id), Some(State::Over));
    w.ends[0].destroy(w.now_us, id);
    assert_eq!(w.ends[0].count(), 0);
}

#[test]
fn attempts_go_to_each_address_in_turn_from_each_nic() {
    let mut cm = Cm::new(CONFIG);
    let peers = vec![address(1), address(2)];
    cm.connect(0, Connect { peers, via: 3, req: Box::default() }).unwrap();
    let mut tried = Vec::new();
    for _ in 0..4 {
        while let Some(Output::Send { via, to, .. }) = cm.next_output() {
            tried.push((via, to));
        }
        cm.tick(cm.next_deadline_us().unwrap());
    }
    let [one, two] = [address(1), address(2)];
    assert_eq!(tried, [(3, one), (4, two), (5, one), (6, two)]);
}

#[test]
fn a_program_that_takes_its_time_is_waited_for() {
    let mut w = World::new(Vec::new());
    w.polite = false;
    let id = w.connect(0);
    // Sixteen attempts would have passed.
    w.run(20 * 4_200);
    assert_eq!(w.ends[0].state(id), Some(State::ReqSent));
    assert_eq!(w.count(1, |event| matches!(event, Event::Request { .. })), 1);
    let other = w.request(1);
    w.accept(1, other);
    w.flush();
    w.run(w.now_us + 1000);
    assert_eq!(w.ends[0].state(id), Some(State::RepReceived));
    // The same for an end that takes its time with the RTU.
    w.run(w.now_us + 20 * 4_200);
    w.ends[0].establish(w.now_us, id).unwrap();
    w.flush();
    w.run(w.now_us + 1000);
    assert_eq!(w.ends[1].state(other), Some(State::Established));
    assert_eq!(w.count(0, |event| matches!(event, Event::Response(_))), 1);
}

/// A peer that asks for time has been reached, so what is said next goes the same way.
#[test]
fn a_connection_ends_by_the_nic_that_its_peer_was_heard_through() {
    let mut world = World::new(Vec::new());
    let asker = world.connect(0);
    let (_, (_, bytes)) = world.flying.pop_first().unwrap();
    let cm = &mut world.ends[1];
    cm.handle(0, address(0), 0, &bytes[..]);
    let Some(Output::Event(id, _)) = cm.next_output() else { panic!() };
    cm.accept(0, id, Reply { rep: Box::new(Rep::default()) }).unwrap();
    let via = |output| match output {
        Some(Output::Send { via, .. }) => via,
        other => panic!("{other:?}"),
    };
    assert_eq!(via(cm.next_output()), 0);
    let again_us = cm.next_deadline_us().unwrap();
    cm.tick(again_us);
    assert_eq!(via(cm.next_output()), 1, "the next NIC");
    let mra = Mra {
        local_id: asker.0,
        remote_id: id.0,
        received: 1,
        service_timeout: 12,
        private: Vec::new(),
    };
    let mad = Mad { transaction: 1, message: Message::Mra(mra) };
    cm.handle(again_us, address(0), 0, &mad.encode());
    cm.disconnect(again_us, id).unwrap();
    assert_eq!(via(cm.next_output()), 0);
}

#[test]
fn a_rejection_has_its_reason_and_data() {
    for lost in [0, 1] {
        let mut w =
            World::new([vec![Fate::Arrives { after_us: 1 }], vec![Fate::Lost; lost]].concat());
        w.polite = false;
        let id = w.connect(0);
        w.run(10);
        let other = w.request(1);
        w.ends[1].reject(w.now_us, other, Reason::CONSUMER, b"no").unwrap();
        w.ends[1].destroy(w.now_us, other);
        w.flush();
        w.run(100_000);
        let rejected = w.events[0].iter().find_map(|(_, event)| match event {
            Event::Rejected(rej) => Some(rej.clone()),
            _ => None,
        });
        let rej = rejected.unwrap();
        assert_eq!(
            (rej.reason, &rej.private[..3], rej.private.len()),
            (Reason(28), &b"no\0"[..], 148)
        );
        assert_eq!(w.ends[0].state(id), Some(State::Over));
        w.run(HOUR_US);
        assert_eq!(w.ends[1].count(), 0);
    }
}

#[test]
fn a_request_that_is_dropped_comes_again() {
    let mut w = World::new(Vec::new());
    w.polite = false;
    w.connect(0);
    w.run(100);
    let other = w.request(1);
    w.ends[1].drop_request(other);
    w.run(10_000);
    assert_eq!(w.count(1, |event| matches!(event, Event::Request { .. })), 2);
}

#[test]
fn requests_that_cross_are_two_connections() {
    let mut w = World::new(Vec::new());
    let ids = [w.connect(0), w.connect(1)];
    w.run(10_000);
    for (end, id) in ids.into_iter().enumerate() {
        assert_eq!(w.ends[end].state(id), Some(State::Established));
        assert_eq!(w.count(end, |event| *event == Event::Established), 1);
        assert_eq!(w.ends[end].count(), 2);
    }
}

#[test]
fn a_qp_that_is_connected_is_not_connected_once_more() {
    let mut w = World::new(Vec::new());
    w.connect(0);
    w.run(1000);
    let again = w.connect(0);
    w.run(w.now_us + 1000);
    let is_stale = |event: &Event| match event {
        Event::Rejected(rej) => rej.reason == Reason::STALE_CONNECTION,
        _ => false,
    };
    assert_eq!(w.count(0, is_stale), 1);
    assert_eq!(w.ends[0].state(again), Some(State::Over));
}

#[test]
fn strangers_change_nothing() {
    let mut w = World::new(Vec::new());
    let id = w.connect(0);
    w.run(1000);
    let remote = w.request(1).0;
    let private = Vec::new();
    let wrong = [
        Message::Dreq(Disconnect {
            local_id: 5,
            remote_id: id.0,
            remote_qpn: 100,
            private: private.clone(),
        }),
        Message::Dreq(Disconnect {
            local_id: remote,
            remote_id: id.0,
            remote_qpn: 9,
            private: private.clone(),
        }),
        Message::Drep(Rtu { local_id: remote, remote_id: id.0, private: private.clone() }),
        Message::Rej(Rej {
            local_id: 0,
            remote_id: id.0,
            rejected: Rejected::Req,
            reason: Reason::CONSUMER,
            information: Vec::new(),
            private,
        }),
    ];
    for message in wrong {
        let mad = Mad { transaction: 1, message }.encode();
        w.ends[0].handle(w.now_us, address(1), 0, &mad);
        assert_eq!(w.ends[0].state(id), Some(State::Established));
    }
}

#[test]
fn a_connection_that_is_unknown_is_ended_at_once() {
    let mut cm = Cm::new(CONFIG);
    let dreq = Disconnect { local_id: 5, remote_id: 6, remote_qpn: 7, private: Vec::new() };
    let mad = Mad { transaction: 9, message: Message::Dreq(dreq) };
    cm.handle(0, address(1), 0, &mad.encode());
    let Some(Output::Send { to, bytes, .. }) = cm.next_output() else { panic!() };
    let answer = Mad::parse(&bytes[..]).unwrap();
    assert_eq!((to, answer.transaction), (address(1), 9));
    assert!(matches!(answer.message, Message::Drep(Rtu { local_id: 6, remote_id: 5, .. })));
}

#[test]
fn alternate_paths_are_not_loaded() {
    let mut w = World::new(Vec::new());
    let id = w.connect(0);
    w.run(1000);
    let lap = Lap { local_id: w.request(1).0, remote_id: id.0 };
    let mad = Mad { transaction: 3, message: Message::Lap(lap) };
    w.ends[0].handle(w.now_us, address(1), 0, &mad.encode());
    let Some(Output::Send { bytes, .. }) = w.ends[0].next_output() else { panic!() };
    let Message::Apr(apr) = Mad::parse(&bytes[..]).unwrap().message else { panic!() };
    assert_eq!(apr.status, 2);
}

#[test]
fn private_data_fit_into_their_fields() {
    let mut cm = Cm::new(CONFIG);
    let connect = |len: usize| Connect {
        peers: vec![address(1)],
        via: 0,
        req: Box::new(Req { private: vec![0; len], ..Req::default() }),
    };
    assert!(cm.connect(0, connect(92)).is_ok());
    assert_eq!(cm.connect(0, connect(93)), Err(CmError::TooLong { len: 93, most: 92 }));
}

#[test]
fn a_peer_whose_process_is_gone_has_disconnected() {
    let mut w = World::new(Vec::new());
    let id = w.connect(0);
    w.run(1000);
    w.ends[0].peer_died(w.now_us, id);
    w.ends[0].peer_died(w.now_us, id);
    w.flush();
    assert_eq!(w.count(0, is_end), 1);
}

/// Whether all goes as it should where this rule is left out.
fn is_right_without(mutation: Mutation) -> bool {
    let arrives = |after_us| Fate::Arrives { after_us };
    // The request comes again when the connection stands, and once more when it is over; a reply, a
    // DREQ and its answer are lost once.
    let late = Fate::Doubled { after_us: 10, again_us: 60_000 };
    let fates = [late, Fate::Lost, arrives(10), arrives(10), arrives(10), Fate::Lost, Fate::Lost];
    let mut w = World::new(fates.to_vec());
    w.ends.iter_mut().for_each(|end| end.mutation = mutation);
    let id = w.connect(0);
    w.run(30_000);
    let is_request = |event: &Event| matches!(event, Event::Request { .. });
    let Some(other) = w.events[1].iter().find(|(_, event)| is_request(event)) else { return false };
    let other = other.0;
    let stranger = Disconnect { local_id: 5, remote_id: id.0, remote_qpn: 100, private: vec![] };
    let mad = Mad { transaction: 1, message: Message::Dreq(stranger) };
    w.ends[0].handle(w.now_us, address(1), 0, &mad.encode());
    w.flush();
    let stands = |end: usize, id| w.ends[end].state(id) == Some(State::Established);
    if !stands(0, id) || !stands(1, other) {
        return false;
    }
    if w.ends[0].disconnect(w.now_us, id).is_err() {
        return false;
    }
    w.flush();
    w.run(HOUR_US);
    let once = |end: usize| w.count(end, is_end) == 1;
    let told = w.events[0].iter().any(|(_, e)| *e == Event::Disconnected { timed_out: false });
    w.count(1, is_request) == 1 && once(0) && once(1) && told && w.ends[1].count() == 0
}

#[test]
fn every_rule_that_is_left_out_is_noticed() {
    use Mutation::{BelieveStrangers, ForgetAtOnce, NoDrep, None, SendOnce, TellTwice};
    assert!(is_right_without(None));
    for mutation in [TellTwice, SendOnce, BelieveStrangers, ForgetAtOnce, NoDrep] {
        assert!(!is_right_without(mutation), "{mutation:?}");
    }
}

/// The end that accepted lets go while the RTU is on its way, and its first word of that is lost.
#[test]
fn who_lets_go_of_what_it_accepted_is_heard() {
    let arrives = |after_us| Fate::Arrives { after_us };
    let mut w = World::new(vec![arrives(0), arrives(0), arrives(20_000), Fate::Lost]);
    let id = w.connect(0);
    w.run(1_000);
    assert_eq!(w.ends[0].state(id), Some(State::Established));
    let accepted = w.request(1);
    assert_eq!(w.ends[1].state(accepted), Some(State::RepSent));
    w.ends[1].destroy(w.now_us, accepted);
    w.flush();
    w.run(HOUR_US);
    let ended = |state: Option<State>| state.is_none_or(|state| state == State::Over);
    assert!(ended(w.ends[0].state(id)) && w.ends[1].count() == 0);
}

fn fate() -> impl Strategy<Value = Fate> {
    prop_oneof![
        4 => (0u64..20_000).prop_map(|after_us| Fate::Arrives { after_us }),
        2 => Just(Fate::Lost),
        2 => (0u64..20_000, 0u64..60_000)
            .prop_map(|(after_us, again_us)| Fate::Doubled { after_us, again_us }),
    ]
}

proptest! {
    /// Both ends connect to each other, then one or both disconnect, while the first messages are
    /// lost, doubled and overtaken.
    #[test]
    fn each_thing_is_told_once(
        fates in proptest::collection::vec(fate(), 0..14),
        both_connect in any::<bool>(),
        both_disconnect in any::<bool>(),
    ) {
        let mut w = World::new(fates);
        let id = w.connect(0);
        let crossing = both_connect.then(|| w.connect(1));
        w.run(5_000_000);
        prop_assert_eq!(w.ends[0].state(id), Some(State::Established));
        let other = w.request(1);
        prop_assert_eq!(w.ends[1].state(other), Some(State::Established));
        if let Some(crossing) = crossing {
            prop_assert_eq!(w.ends[1].state(crossing), Some(State::Established));
        }
        for end in 0..2 {
            let requests = w.count(end, |event| matches!(event, Event::Request { .. }));
            let asked = end == 1 || both_connect;
            prop_assert_eq!(requests, usize::from(asked));
            prop_assert_eq!(w.count(end, |event| *event == Event::Established), requests);
        }
        w.ends[0].disconnect(w.now_us, id).unwrap();
        if both_disconnect {
            w.ends[1].disconnect(w.now_us, other).unwrap();
        }
        w.flush();
        w.run(HOUR_US);
        for end in 0..2 {
            prop_assert_eq!(w.count(end, is_end), 1);
            prop_assert_eq!(w.ends[end].count(), usize::from(both_connect));
        }
    }

    /// The program lets go of a connection at any time: both ends forget it in the end.
    #[test]
    fn nothing_is_kept_for_ever(
        fates in proptest::collection::vec(fate(), 0..20),
        after_us in 0u64..60_000,
        end in 0usize..2,
    ) {
        let mut w = World::new(fates);
        let id = w.connect(0);
        w.run(after_us);
        let id = if end == 0 { Some(id) } else { w.events[1].first().map(|(id, _)| *id) };
        if let Some(id) = id {
            w.ends[end].destroy(w.now_us, id);
            w.flush();
            w.run(HOUR_US);
            prop_assert_eq!(w.ends[end].count(), 0);
            let other = &w.ends[1 - end];
            let left = w.events[1 - end].iter().filter_map(|(id, _)| other.state(*id));
            let left: Vec<State> = left.collect();
            prop_assert!(left.iter().all(|state| *state == State::Over), "{left:?}");
        }
    }

    #[test]
    fn a_question_is_answered(fates in proptest::collection::vec(fate(), 0..10)) {
        let mut w = World::new(fates);
        let req = SidrReq { service_id: 5, ..SidrReq::default() };
        let id = w.ends[0].ask(0, vec![address(1)], 0, req).unwrap();
        w.flush();
        w.run(HOUR_US);
        prop_assert_eq!(w.count(1, |event| matches!(event, Event::SidrRequest { .. })), 1);
        let answers = w.count(0, |event| matches!(event, Event::SidrReply(rep) if rep.qpn == 7));
        prop_assert_eq!(answers, 1);
        w.ends[0].destroy(w.now_us, id);
        prop_assert_eq!((w.ends[0].count(), w.ends[1].count()), (0, 0));
    }

    /// Bytes that nobody of ours has made.
    #[test]
    fn garbage_is_harmless(
        datagrams in proptest::collection::vec(
            (0x10u8..=0x1a, proptest::collection::vec(0u8..3, 232)), 0..40),
    ) {
        let mut cm = Cm::new(CONFIG);
        for (attribute, body) in datagrams {
            let mut bytes = vec![1, 7, 2, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, attribute];
            bytes.resize(24, 0);
            bytes.extend(body);
            cm.handle(0, address(1), 0, &bytes);
            while cm.next_output().is_some() {}
        }
        cm.tick(HOUR_US);
    }
}
