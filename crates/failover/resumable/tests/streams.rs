//! Streams of SEND, WRITE, WRITE with immediate and READ, both ways, over NICs that fail at random
//! points: data, order and counts are right.

mod common;

use common::mock::Net;
use common::{connect, exchange_keys, send_wr, switch, End, Host, Rng, NICS};
use std::sync::Arc;
use unbroken_types::{SendFlags, SendOpcode, Sge, Wc, WcStatus};
use unbroken_verbs::{Error, RecvWr, SendWr};

/// Messages of each end, and bytes of each.
const COUNT: usize = 60;
const LEN: usize = 24;
/// Where what an end sends lies, what its peer writes to, what its receives and its READs bring;
/// slot by slot.
const AREAS: [usize; 4] = [0, COUNT * LEN, 2 * COUNT * LEN, 3 * COUNT * LEN];
const BYTES: usize = 4 * COUNT * LEN;
const STEPS: usize = 20_000;

#[derive(Clone, Copy)]
struct Message {
    opcode: SendOpcode,
    signaled: bool,
    inline: bool,
}

/// The program at one end.
struct Program {
    messages: Vec<Message>,
    posted: usize,
    /// Everything before this is known to be done.
    done: usize,
    recvs_posted: usize,
    recvs_done: usize,
}

fn pattern(host: usize, i: usize) -> Vec<u8> {
    (0..LEN).map(|k| (host * 101 + i * 7 + k + 1) as u8).collect()
}

impl Program {
    fn new(rng: &mut Rng) -> Program {
        use SendOpcode::{Read, Send, Write, WriteImm};
        let message = |i: usize, rng: &mut Rng| {
            let opcode = [Send, Write, WriteImm, Read, Write][rng.below(5) as usize];
            let inline = rng.one_in(4) && opcode != Read;
            Message { opcode, signaled: i % 5 == 4 || i + 1 == COUNT || rng.one_in(2), inline }
        };
        let messages = (0..COUNT).map(|i| message(i, rng)).collect();
        Program { messages, posted: 0, done: 0, recvs_posted: 0, recvs_done: 0 }
    }

    fn consumers(&self) -> Vec<usize> {
        (0..COUNT).filter(|i| self.messages[*i].opcode.consumes_receive()).collect()
    }

    fn post(&mut self, host: usize, hosts: &[Host; 2], end: &End) -> Result<(), Error> {
        if self.posted == COUNT {
            return Ok(());
        }
        let (i, m) = (self.posted, self.messages[self.posted]);
        let area = if m.opcode == SendOpcode::Read { AREAS[3] } else { AREAS[0] };
        let half = LEN / 2;
        let sges = [
            hosts[host].sge(area + i * LEN, half),
            hosts[host].sge(area + i * LEN + half, LEN - half),
        ];
        let inline = pattern(host, i);
        let mut wr = SendWr {
            imm_data: i as u32,
            remote_addr: hosts[1 - host]
                .addr(AREAS[if m.opcode == SendOpcode::Read { 0 } else { 1 }] + i * LEN),
            rkey: hosts[1 - host].keys.rkey,
            ..send_wr(i as u64, m.opcode, m.signaled, &sges)
        };
        if m.inline {
            // 16 bytes may go inline.
            wr.flags = wr.flags.with(SendFlags::INLINE);
            (wr.sges, wr.inline_data) = (&[], Some(&inline[..16]));
        }
        end.qp.post_send(&wr)?;
        self.posted += 1;
        Ok(())
    }

    fn post_recv(&mut self, host: &Host, end: &End) -> Result<(), Error> {
        if self.recvs_posted == COUNT {
            return Ok(());
        }
        let i = self.recvs_posted;
        let sges: [Sge; 1] = [host.sge(AREAS[2] + i * LEN, LEN)];
        let wr = RecvWr { wr_id: 1000 + i as u64, sges: &sges };
        match &end.srq {
            Some(srq) => srq.post(&wr)?,
            None => end.qp.post_recv(&wr)?,
        }
        self.recvs_posted += 1;
        Ok(())
    }

    /// A completion of this end, which is that of `host`; `peer` is the other program.
    fn complete(&mut self, wc: &Wc, host: usize, hosts: &[Host; 2], peer: &Program) {
        assert_eq!(wc.status, WcStatus::Success as u32, "{wc:?}");
        if wc.wr_id >= 1000 {
            assert_eq!(wc.wr_id, 1000 + self.recvs_done as u64, "receives complete in order, once");
            let from = peer.consumers()[self.recvs_done];
            let m = peer.messages[from];
            self.recvs_done += 1;
            let at = match m.opcode {
                SendOpcode::Send => AREAS[2] + (wc.wr_id as usize - 1000) * LEN,
                _ => AREAS[1] + from * LEN,
            };
            let len = if m.inline { 16 } else { LEN };
            assert_eq!(hosts[host].bytes(at, len), pattern(1 - host, from)[..len]);
            return;
        }
        let i = wc.wr_id as usize;
        let next = (self.done..COUNT).find(|k| self.messages[*k].signaled);
        assert_eq!(Some(i), next, "sends complete in order, once");
        for k in self.done..=i {
            let m = self.messages[k];
            let len = if m.inline { 16 } else { LEN };
            match m.opcode {
                SendOpcode::Write => {
                    assert_eq!(
                        hosts[1 - host].bytes(AREAS[1] + k * LEN, len),
                        pattern(host, k)[..len]
                    );
                }
                SendOpcode::Read => {
                    assert_eq!(hosts[host].bytes(AREAS[3] + k * LEN, LEN), pattern(1 - host, k))
                }
                _ => {}
            }
        }
        self.done = i + 1;
    }

    fn finished(&self) -> bool {
        self.done == COUNT
    }
}

/// How a post fails first on a NIC that is dying; the switch then takes all along.
fn refused(e: Error) -> bool {
    match e.errno() {
        libc::EIO => true,
        libc::ENOMEM => false, // the queue is full
        errno => panic!("errno {errno}: {e}"),
    }
}

#[derive(Default)]
struct Tally {
    switches: u32,
    posts_refused: u32,
    told: u32,
}

fn run(seed: u64, tally: &mut Tally) {
    let rng = &mut Rng::new(seed);
    let net = Net::new(seed.is_multiple_of(2));
    let threads = seed.is_multiple_of(8);
    let hosts = [Host::new(&net, 0, BYTES, threads), Host::new(&net, 1, BYTES, threads)];
    for (h, host) in hosts.iter().enumerate() {
        (0..COUNT).for_each(|i| host.fill(AREAS[0] + i * LEN, &pattern(h, i)));
    }
    let one_cq = rng.one_in(2);
    let srq = |rng: &mut Rng, host: &Host| rng.one_in(2).then(|| host.srq(8));
    let srqs = [srq(rng, &hosts[0]), srq(rng, &hosts[1])];
    let mut ends = [0, 1].map(|h| End::with_srq(&hosts[h], one_cq, None, srqs[h].clone()));
    connect(&hosts, &ends);
    let mut programs = [Program::new(rng), Program::new(rng)];
    let mut nic = 0;
    for step in 0..STEPS {
        if programs.iter().all(Program::finished) {
            let left = |h: usize| (programs[h].recvs_posted - programs[h].recvs_done) as u32;
            assert!((0..2).all(|h| ends[h].srq.as_ref().is_none_or(|srq| srq.len() == left(h))));
            return;
        }
        let h = rng.below(2) as usize;
        let mut failed = false;
        match rng.below(12) {
            0 | 1 => failed = programs[h].post(h, &hosts, &ends[h]).is_err_and(refused),
            2 => failed = programs[h].post_recv(&hosts[h], &ends[h]).is_err_and(refused),
            3..6 => net.execute(hosts[h].id(nic), ends[h].qp.qpn()),
            6..8 => net.acknowledge(hosts[h].id(nic), ends[h].qp.qpn()),
            8 => net.tell(hosts[h].id(nic), false),
            9 => poll(h, &hosts, &ends, &mut programs),
            10 => exchange_keys(&hosts, &ends),
            _ if nic + 1 < NICS && rng.one_in(12) => {
                fault(rng, &hosts, &ends, h, nic);
                // The program may go on for a while before anybody notices.
                for _ in 0..rng.below(4) {
                    for h in [0, 1] {
                        failed |= programs[h].post(h, &hosts, &ends[h]).is_err_and(refused);
                    }
                    poll(h, &hosts, &ends, &mut programs);
                }
                nic += 1;
                tally.switches += 1;
                tally.told += u32::from(hosts.iter().any(|h| !h.events.take().is_empty()));
                let tells =
                    |hosts: &[Host; 2]| hosts.iter().for_each(|h| net.tell(h.id(nic - 1), false));
                switch(&hosts, &mut ends, nic, tells);
                if rng.one_in(2) {
                    hosts.iter().for_each(|h| net.tell(h.id(nic - 1), true));
                }
            }
            _ => {}
        }
        tally.posts_refused += u32::from(failed);
        assert!(
            step + 1 < STEPS,
            "seed {seed}: not done: {:?}",
            programs.iter().map(|p| (p.posted, p.done)).collect::<Vec<_>>()
        );
    }
}

fn poll(h: usize, hosts: &[Host; 2], ends: &[End; 2], programs: &mut [Program; 2]) {
    let mut wcs = ends[h].poll(&ends[h].cq);
    if !Arc::ptr_eq(&ends[h].cq, &ends[h].recv_cq) {
        wcs.extend(ends[h].poll(&ends[h].recv_cq));
    }
    let [first, second] = programs;
    let (ours, theirs) = if h == 0 { (first, second) } else { (second, first) };
    for wc in wcs {
        assert_eq!(wc.qp_num, ends[h].qpn, "the number that the application knows");
        ours.complete(&wc, h, hosts, theirs);
    }
}

/// A NIC dies, a cable is cut and the transports give up, or one transport alone does.
fn fault(rng: &mut Rng, hosts: &[Host; 2], ends: &[End; 2], h: usize, nic: usize) {
    let net = &hosts[0].net;
    match rng.below(4) {
        0 => net.kill(hosts[h].id(nic), None),
        1 => net.kill(
            hosts[h].id(nic),
            Some([libc::EIO, libc::EINVAL, libc::ENODEV][rng.below(3) as usize]),
        ),
        2 => {
            net.cut(hosts[h].id(nic));
            (0..2)
                .filter(|i| *i == h || rng.one_in(2))
                .for_each(|i| net.time_out(hosts[i].id(nic), ends[i].qp.qpn()));
        }
        _ => net.time_out(hosts[h].id(nic), ends[h].qp.qpn()),
    }
}

#[test]
fn streams_go_on_over_another_nic_and_every_byte_is_right() {
    let mut tally = Tally::default();
    for seed in 0..300 {
        run(seed, &mut tally);
    }
    println!(
        "{} switches, {} posts refused, {} told",
        tally.switches, tally.posts_refused, tally.told
    );
    assert!(tally.switches > 300 && tally.posts_refused > 20 && tally.told > 200);
}
