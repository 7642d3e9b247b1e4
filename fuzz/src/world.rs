//! What a fuzzed input does: packets from outside, steps of time and posts, on two live RC QPs and
//! a UD QP.
//!
//! An input is a list of commands: a byte of kind, a byte that means what the kind says, and for
//! packets two bytes of length and the bytes. After each input the memory that nobody may write
//! must be what it was, and every WR must complete exactly once.

#[path = "../../crates/nic/roce/tests/common/mod.rs"]
mod common;

use common::*;
use unbroken_roce::*;
use unbroken_types::*;
use unbroken_wire::{strip_icrc, IcrcFlow, Packet};

const REGION: usize = 2048;
/// Receives and READs go to the first part of DST; the rest must stay as it is.
const LANDING: usize = 1536;
const MAX_COMMANDS: usize = 64;

/// Kinds of commands; others wrap around.
pub mod kind {
    pub const PACKET: u8 = 0;
    pub const STEP: u8 = 1;
    pub const POST: u8 = 2;
    pub const RECV: u8 = 3;
    pub const DATAGRAM: u8 = 4;
    pub const RAW: u8 = 5;
    pub const COUNT: u8 = 6;
}

struct World {
    pair: Pair,
    ud: UdQp,
    ud_mem: VecMemory,
    ud_wcs: Wcs,
    posted: [[u64; 2]; 2],
}

fn memory(mem: &VecMemory) {
    let write = Access::REMOTE_WRITE.with(Access::LOCAL_WRITE);
    mem.add(SRC, Access::NONE, vec![1; REGION]);
    mem.add(WRITABLE, write, vec![2; REGION]);
    mem.add(READABLE, Access::REMOTE_READ, vec![3; REGION]);
    mem.add(DST, Access::LOCAL_WRITE, vec![4; REGION]);
}

impl World {
    fn new(selective: [bool; 2]) -> World {
        let mut pair = Pair::new(1, Faults::default(), Mtu::B256, false);
        pair.set_selective(selective);
        pair.ends.iter().for_each(|e| memory(&e.mem));
        let mut ud_wcs = Wcs::default();
        let mut ud = UdQp::new(UdConfig {
            qpn: 3,
            wc_qpn: 3,
            caps: caps(),
            pd: PD,
            sq_sig_all: true,
            mtu: Mtu::B256,
            suspend_on_error: false,
            moved: false,
        });
        for (state, qkey, sq_psn) in [
            (QpState::Init, Some(0x1111_1111), None),
            (QpState::Rtr, None, None),
            (QpState::Rts, None, Some(0)),
        ] {
            ud.modify(&UdModify { state: Some(state), qkey, sq_psn }, &mut ud_wcs)
                .expect("a legal transition");
        }
        let ud_mem = VecMemory::default();
        memory(&ud_mem);
        World { pair, ud, ud_mem, ud_wcs, posted: [[0; 2]; 2] }
    }

    fn packet(&mut self, to: usize, bytes: &[u8], fix_psn: bool) {
        let mut bytes = bytes.to_vec();
        if fix_psn && bytes.len() >= 12 {
            // A PSN near what is expected, else most inputs would end there.
            let base = self.pair.ends[to].qp.attrs();
            let base = if bytes[0] & 0x1f >= 0x0d { base.sq_psn } else { base.rq_psn }.unwrap_or(0);
            let psn = base.wrapping_add(u32::from_be_bytes([0, 0, 0, bytes[11] % 64]));
            bytes[9..12].copy_from_slice(&psn.to_be_bytes()[1..]);
        }
        if let Ok(packet) = Packet::parse(&bytes) {
            let End { qp, mem, wcs, .. } = &mut self.pair.ends[to];
            qp.handle_packet(self.pair.now_us, &packet, mem, wcs);
        }
    }

    fn post(&mut self, end: usize, how: u8) {
        let len = [0, 1, 256, 700, 1500][how as usize / 8 % 5];
        let opcode = SendOpcode::from_code(how as u32 % 5).expect("0 to 4 are opcodes");
        let (local, remote) =
            if opcode == SendOpcode::Read { (DST, READABLE) } else { (SRC, WRITABLE) };
        let sges = [sge(local, 0, len / 2), sge(local, len / 2, len - len / 2)];
        let wr_id = self.posted[end][0];
        let send = SendWr { remote_addr: va(remote, 0), rkey: remote, ..wr(wr_id, opcode, &sges) };
        let End { qp, wcs, .. } = &mut self.pair.ends[end];
        if qp.post_send(&send, wcs).is_ok() {
            self.posted[end][0] += 1;
        }
    }

    fn recv(&mut self, end: usize, how: u8) {
        let len = [0, 1, 256, 700, LANDING][how as usize % 5];
        let wr = RecvWr { wr_id: self.posted[end][1], sges: &[sge(DST, 0, len)] };
        let End { qp, wcs, .. } = &mut self.pair.ends[end];
        if qp.post_recv(&wr, wcs).is_ok() {
            self.posted[end][1] += 1;
        }
    }

    fn datagram(&mut self, bytes: &[u8]) {
        let wr = RecvWr { wr_id: 1, sges: &[sge(DST, 0, 40 + bytes.len() % 300)] };
        let _ = self.ud.post_recv(&wr, &mut self.ud_wcs);
        if let Ok(packet) = Packet::parse(bytes) {
            let gid = Gid([0xfd; 16]);
            self.ud.handle_packet(
                &packet,
                &UdRoute { src: gid, dst: gid, ..UdRoute::default() },
                &self.ud_mem,
                &mut self.ud_wcs,
            );
        }
    }

    fn check(mut self) {
        for mem in self.pair.ends.iter().map(|e| &e.mem).chain([&self.ud_mem]) {
            assert!(mem.bytes(SRC).iter().all(|&b| b == 1), "the source of sends was written");
            assert!(mem.bytes(READABLE).iter().all(|&b| b == 3), "read-only memory was written");
            assert!(
                mem.bytes(DST)[LANDING..].iter().all(|&b| b == 4),
                "memory behind the receives was written"
            );
        }
        for (end, posted) in self.pair.ends.iter_mut().zip(self.posted) {
            let _ = (end.qp.progress(), end.qp.take_event(), end.qp.poll_timeout());
            end.qp.fail(WcStatus::FatalErr, &mut end.wcs);
            assert!(
                end.wcs.sends.iter().map(|w| w.wr_id).eq(0..posted[0]),
                "sends complete once, in order"
            );
            assert!(
                end.wcs.recvs.iter().map(|w| w.0.wr_id).eq(0..posted[1]),
                "receives complete once, in order"
            );
        }
    }
}

/// Runs one input.
pub fn run(mut input: &[u8]) {
    // Which ends know selective retransmission; nothing may depend on it.
    let last = input.last().map_or(0, |b| b & 3);
    let mut world = World::new([last & 1 == 0, last & 2 == 0]);
    for _ in 0..MAX_COMMANDS {
        let [command, arg, rest @ ..] = input else { break };
        input = rest;
        let end = (*arg & 1) as usize;
        match command % kind::COUNT {
            kind::STEP => {
                world.pair.faults.loss = (*arg as u64 & 0x1e) * 20;
                (0..=*arg >> 5).for_each(|_| {
                    world.pair.step();
                });
            }
            kind::POST => world.post(end, arg >> 1),
            kind::RECV => world.recv(end, arg >> 1),
            with_bytes => {
                let Some((len, rest)) = input.split_first_chunk::<2>() else { break };
                let (bytes, rest) =
                    rest.split_at(rest.len().min(u16::from_be_bytes(*len) as usize));
                input = rest;
                match with_bytes {
                    kind::PACKET => world.packet(end, bytes, arg & 2 != 0),
                    kind::DATAGRAM => world.datagram(bytes),
                    _ => raw(bytes),
                }
            }
        }
    }
    world.check();
}

/// A UDP payload with ICRC, as a socket would give it.
fn raw(bytes: &[u8]) {
    let ip = [127, 77, 1, 0].into();
    let flow = IcrcFlow { src_ip: ip, dst_ip: ip, src_port: 4791, dst_port: 4791 };
    for any_id in [false, true] {
        if let Some(packet) = strip_icrc(&flow, bytes, 0, any_id) {
            let _ = Packet::parse(packet);
        }
    }
}

/// The packets of an exchange of every kind between two QPs, and to which end each went.
pub fn sample_packets() -> Vec<(usize, Vec<u8>)> {
    let mut world = World::new([true; 2]);
    world.pair.tracing = true;
    world.pair.faults.loss = 50;
    for how in 0..40 {
        for end in 0..2 {
            world.recv(end, 4);
            world.post(end, how);
        }
        (0..60).for_each(|_| {
            world.pair.step();
        });
    }
    let trace = std::mem::take(&mut world.pair.trace);
    world.check();
    trace
}
