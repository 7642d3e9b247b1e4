//! A peer whose NIC knows its memory by other keys than the application has.

use crate::common::*;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::Arc;
use unbroken_roce::*;
use unbroken_types::*;

const OK: u32 = WcStatus::Success as u32;
/// What the application calls the peer's regions; its NIC has no such keys.
const NAMED_WRITABLE: u32 = 0xa1;
const NAMED_READABLE: u32 = 0xa2;

/// What is told of keys; 0: nothing yet.
#[derive(Default)]
struct Told {
    writable: AtomicU32,
}

impl PeerKeys for Told {
    fn key(&self, rkey: u32) -> Option<u32> {
        match rkey {
            NAMED_WRITABLE => Some(self.writable.load(Ordering::Relaxed)).filter(|key| *key != 0),
            NAMED_READABLE => Some(READABLE),
            _ => Some(0),
        }
    }
}

fn pair(faults: Faults) -> (Pair, Arc<Told>) {
    let mut pair = Pair::new(3, faults, Mtu::B256, true);
    for end in &pair.ends {
        end.mem.add(SRC, Access::NONE, vec![5; 4096]);
        end.mem.add(DST, Access::LOCAL_WRITE, vec![0; 4096]);
        end.mem.add(READABLE, Access::REMOTE_READ, vec![9; 4096]);
        end.mem.add(WRITABLE, Access::REMOTE_WRITE.with(Access::LOCAL_WRITE), vec![0; 4096]);
    }
    let told = Arc::new(Told::default());
    pair.ends[0].qp.set_peer_keys(Some(told.clone()));
    (pair, told)
}

fn named(wr_id: u64, opcode: SendOpcode, rkey: u32, sges: &[Sge]) -> SendWr<'_> {
    let key = if rkey == NAMED_READABLE { READABLE } else { WRITABLE };
    SendWr { remote_addr: va(key, 0), rkey, ..wr(wr_id, opcode, sges) }
}

#[test]
fn what_begins_waits_until_the_key_is_known() {
    let (mut p, told) = pair(Faults::default());
    let (from, to, at) = ([sge(SRC, 0, 1000)], [sge(DST, 0, 1000)], [sge(DST, 1000, 8)]);
    p.recv(1, 9, &at);
    p.post(0, &wr(1, SendOpcode::Send, &[sge(SRC, 0, 8)]));
    p.post(0, &named(2, SendOpcode::Write, NAMED_WRITABLE, &from));
    p.post(0, &named(3, SendOpcode::Read, NAMED_READABLE, &to));
    p.run();
    assert_eq!(p.statuses(0), [(1, OK)], "a SEND names no memory");
    assert_eq!(p.ends[1].mem.bytes(WRITABLE)[0], 0);
    told.writable.store(WRITABLE, Ordering::Relaxed);
    p.run();
    assert_eq!(p.statuses(0), [(1, OK), (2, OK), (3, OK)]);
    assert_eq!(p.ends[1].mem.bytes(WRITABLE)[..1000], [5; 1000]);
    assert_eq!(p.ends[0].mem.bytes(DST)[..1000], [9; 1000]);
}

#[test]
fn what_is_sent_again_names_what_it_named_at_first() {
    let (mut p, told) = pair(Faults { loss: 100, ..Faults::default() });
    told.writable.store(WRITABLE, Ordering::Relaxed);
    let (from, to) = ([sge(SRC, 0, 4096)], [sge(DST, 0, 4096)]);
    for i in 0..4 {
        p.post(0, &named(2 * i, SendOpcode::Write, NAMED_WRITABLE, &from));
        p.post(0, &named(2 * i + 1, SendOpcode::Read, NAMED_READABLE, &to));
    }
    p.run();
    assert_eq!(p.statuses(0), (0..8).map(|i| (i, OK)).collect::<Vec<_>>());
    assert_eq!(p.ends[1].mem.bytes(WRITABLE), [5; 4096]);
    assert_eq!(p.ends[0].mem.bytes(DST), [9; 4096]);
}

/// A later life has another NIC of the peer before it.
#[test]
fn what_is_taken_out_has_the_keys_of_the_application() {
    let (mut p, told) = pair(Faults::default());
    told.writable.store(WRITABLE, Ordering::Relaxed);
    p.post(0, &named(1, SendOpcode::Write, NAMED_WRITABLE, &[sge(SRC, 0, 1000)]));
    p.transmit();
    let backlog = p.ends[0].qp.quiesce();
    let rkeys: Vec<u32> = backlog.sends.iter().map(|send| send.rkey).collect();
    assert_eq!(rkeys, [NAMED_WRITABLE]);
}

#[test]
fn a_key_that_names_nothing_is_refused_by_the_peer() {
    let (mut p, _) = pair(Faults::default());
    p.post(0, &named(1, SendOpcode::Write, 0xbad, &[sge(SRC, 0, 8)]));
    p.run();
    assert_eq!(p.statuses(0), [(1, WcStatus::RemAccessErr as u32)]);
}
