//! Control messages of SDR, from peers and from strangers, to a whole end: nothing panics, nothing
//! grows without bound, and what is a message says the same bytes again.
#![no_main]

use std::collections::VecDeque;
use std::sync::atomic::AtomicU64;
use unbroken_erasure::{ChunkSet, Code};
use unbroken_sdr_model::Scheme;
use unbroken_sdr_protocol::adapt::Choice;
use unbroken_sdr_protocol::attr::{Attr, Layout};
use unbroken_sdr_protocol::clearing::{Clearance, Cleared};
use unbroken_sdr_protocol::control::{Control, Heard};
use unbroken_sdr_protocol::packets::Piece;
use unbroken_sdr_protocol::reliable::{Area, Config, Encoding, Refused, Reliable, Sdr};

const TOKEN: u64 = 7;

/// A queue pair that takes everything and loses it.
struct Nothing {
    bitmap: [AtomicU64; 1],
    next: [u64; 2],
    said: usize,
    /// Whether parity is made aside, and for which messages it is being made.
    aside: bool,
    encoding: VecDeque<u64>,
}

impl Sdr for Nothing {
    type Buffer = ();
    fn recv_post(&mut self, _: u64, _: Area<'_, ()>) -> Result<u64, Refused> {
        self.next[0] += 1;
        Ok(self.next[0] - 1)
    }
    fn recv_complete(&mut self, _: u64, _: u64) -> Result<(), Refused> {
        Ok(())
    }
    fn bitmap(&self, _: u64) -> &[AtomicU64] {
        &self.bitmap
    }
    fn send_start(&mut self) -> Result<u64, Refused> {
        self.next[1] += 1;
        Ok(self.next[1] - 1)
    }
    fn is_clear(&self, _: u64) -> bool {
        true
    }
    fn has_room(&self) -> bool {
        true
    }
    fn send(&mut self, _: u64, _: Area<'_, ()>, _: &Piece) -> bool {
        true
    }
    fn send_stop(&mut self, _: u64) {}
    fn send_idle(&mut self, _: u64) -> bool {
        true
    }
    fn say(&mut self, message: &Control) {
        assert!(
            matches!(Control::decode(&message.encode(1), 1), Heard::Message(m) if m == *message)
        );
        self.said += 1;
    }
    fn scratch(&mut self, _: u64) -> Option<()> {
        Some(())
    }
    fn encodes_aside(&self) -> bool {
        self.aside
    }
    fn encode(&mut self, seq: u64, _: Code, _: Area<'_, ()>, _: Area<'_, ()>) -> Encoding {
        if !self.aside {
            return Encoding::Made;
        }
        self.encoding.push_back(seq);
        Encoding::Aside
    }
    fn encoded(&mut self) -> Option<u64> {
        self.encoding.pop_front()
    }
    fn recover(&mut self, _: Code, _: Area<'_, ()>, _: Area<'_, ()>, _: &ChunkSet) -> bool {
        true
    }
}

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let layout = Layout::new(&Attr::default()).unwrap();
    let config = Config { parity_chunks: 16, injection_ns: 1000, ..Config::default() };
    let (mut reliable, mut below) = (
        Reliable::new(&layout, config),
        Nothing {
            bitmap: [AtomicU64::new(0x5555)],
            next: [0; 2],
            said: 0,
            aside: input.first().is_some_and(|byte| byte % 2 == 1),
            encoding: VecDeque::new(),
        },
    );
    let (mut clearance, mut cleared, mut with_keys) =
        (Clearance::default(), Cleared::default(), Cleared::default());
    with_keys.with_keys(2);
    (0..3).for_each(|bytes| clearance.posted(bytes, &[]));
    for (i, scheme) in [Scheme::SrRto, Scheme::SrNack, Scheme::Ec(Code::mds(4, 2).unwrap())]
        .into_iter()
        .enumerate()
    {
        reliable.write(&(), 0, 300_000 * i as u64, Choice::Fixed(scheme), 1 << 40);
        reliable.read(&(), 0, 1 << 20, 1 << 40);
    }
    let mut now_us = 0;
    reliable.tick(now_us, &mut below);
    // Datagrams of a length that their first byte says.
    let mut rest = input;
    while let Some((length, more)) = rest.split_first() {
        let (body, more) = more.split_at(more.len().min((*length).into()));
        rest = more;
        let mut datagram = vec![0x53, 0x44, 1];
        datagram.extend(body.first());
        datagram.extend(TOKEN.to_be_bytes());
        datagram.extend(body.get(1..).unwrap_or_default());
        now_us += 1000;
        for bytes in [&datagram[..], body] {
            if let Heard::Message(message) = Control::decode(bytes, TOKEN) {
                assert_eq!(message.encode(TOKEN), bytes);
                match &message {
                    Control::Clear { first, stamp_us, bytes, rkeys } => {
                        let _ = cleared.on_clear(*first, *stamp_us, bytes, rkeys, 16);
                        let _ = with_keys.on_clear(*first, *stamp_us, bytes, rkeys, 16);
                        clearance.poll(now_us);
                    }
                    Control::Cleared { next, stamp_us } => {
                        clearance.on_cleared(*next, *stamp_us, now_us)
                    }
                    message => reliable.hear(now_us, message, &mut below),
                }
            }
        }
        reliable.tick(now_us, &mut below);
    }
});
