//! Whose turn it is to send over a NIC: what one rank takes slowly does not hold up what goes to
//! another.

use std::sync::Arc;

use unbroken_collective_protocol::agree::{Description, Terms};
use unbroken_collective_protocol::frame::{Header, HEADER_BYTES};
use unbroken_collective_protocol::message::Message;
use unbroken_collective_protocol::{Bytes, Config, Engine, Env, Note, ProbeId, Rank, Slot};
use unbroken_schedule::{
    Choice, Collective, DataType, Fabric, Grouping, Host, Nic, Operation, Plan, Shape,
};
use unbroken_schedule::{Slice, Topology, Work};

const WINDOW: u32 = 8;

/// Env that take everything, and complete nothing; how many frames were posted to each rank.
#[derive(Default)]
struct Slow {
    posted: [u32; 3],
}

impl Env for Slow {
    fn stage(&mut self, _: Slot, _: &Header, _: Option<(Slice, u64, u32)>) {}

    fn header(&mut self, _: Slot) -> [u8; HEADER_BYTES] {
        [0; HEADER_BYTES]
    }

    fn take(&mut self, _: Slot, _: &Bytes) {}

    fn fetch(&mut self, _: &Bytes) {}

    fn compute(&mut self, _: &Work) {}

    fn post(&mut self, slot: Slot, _: u8, _: u32) -> bool {
        self.posted[slot.peer] += 1;
        true
    }

    fn notify(&mut self, _: Rank, _: u8, _: u32) -> bool {
        true
    }

    fn copy_out(&mut self, _: Slot, _: u32, _: u32) -> Vec<u8> {
        Vec::new()
    }
    fn copy_in(&mut self, _: Slot, _: u32, _: &[u8]) {}
    fn open(&mut self, _: Rank, _: u8, _: u8) -> Option<Vec<u8>> {
        Some(Vec::new())
    }

    fn connect(&mut self, _: Rank, _: u8, _: &[u8]) -> bool {
        true
    }

    fn test(&mut self, _: Rank, _: u8) -> bool {
        true
    }

    fn close(&mut self, _: Rank, _: u8) {}

    fn has_link(&mut self, _: u8) -> bool {
        true
    }

    fn open_probe(&mut self, _: ProbeId, _: u8) -> Option<Vec<u8>> {
        None
    }

    fn connect_probe(&mut self, _: ProbeId, _: &[u8]) -> bool {
        false
    }

    fn send_probe(&mut self, _: ProbeId) -> bool {
        false
    }

    fn close_probe(&mut self, _: ProbeId) {}

    fn tell(&mut self, _: Rank, _: &Message) {}

    fn note(&mut self, _: &Note) {}
}

/// Frames that rank 0 of so many hosts has on its way to each other rank over its only NIC, before
/// any is complete.
fn on_way(hosts: usize) -> [u32; 3] {
    let topology =
        Topology::uniform(hosts, 1, Host::new(1, Nic::new(100_000)), Fabric::RailOnly).unwrap();
    let operation = Operation::Broadcast { root: 0, count: 1 << 20 };
    let collective = Collective::new(operation, DataType::U8, false, hosts).unwrap();
    let choice = Choice::new(Shape::Direct, Grouping::Hosts);
    let program = Plan::new(&topology, &collective, choice).unwrap().program(0);
    let mut engine = Engine::new(Config {
        me: 0,
        hosts: (0..hosts as u32).collect(),
        rails: 1,
        slots: 16,
        payload: 4096,
        window: WINDOW,
        ask_us: 1_000_000,
        timeout_us: 10_000_000,
        balance: true,
        measure: false,
        mutant: None,
    });
    let mut env = Slow::default();
    let terms = Terms::of(Description::of(&collective), &collective, 0);
    engine.start(0, terms, 1, Arc::new(program), &mut env);
    for peer in 1..hosts {
        engine.on_message(
            peer,
            &Message::Accept { rail: 0, life: 1, address: Vec::new() },
            &mut env,
        );
        engine.on_tested(peer, 0, &mut env);
    }
    engine.pump(&mut env);
    env.posted
}

#[test]
fn one_that_takes_frames_slowly_leaves_room_for_others() {
    let half = WINDOW / 2;
    assert_eq!(on_way(3), [0, half, half]);
}

#[test]
fn the_only_one_has_all_of_the_window() {
    assert_eq!(on_way(2), [0, WINDOW, 0]);
}
