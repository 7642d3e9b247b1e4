//! Random exchanges of two ends, and whether they came about.

use super::*;

/// What one end does in a random exchange.
#[derive(Clone, Debug)]
pub struct Op {
    pub opcode: SendOpcode,
    pub len: usize,
    pub flags: SendFlags,
    pub inline: bool,
    /// Offsets of its data at the source and at the destination.
    pub src: usize,
    pub dst: usize,
    /// Which receive of the peer it takes.
    pub recv: Option<usize>,
    /// Where the scatter/gather list is cut.
    pub cut: usize,
}

/// A random exchange of both ends: what is to be posted and what has been.
pub struct Script {
    pub ops: [Vec<Op>; 2],
    posted: [usize; 2],
    posted_recvs: [usize; 2],
    /// Receives of each end in order: offset and length, and what fills them.
    pub recvs: [Vec<(usize, usize)>; 2],
}

impl Script {
    /// Lays out memory for `kinds` of each end (opcode, length, three random numbers).
    /// `opcodes` 5 leaves atomics out.
    pub fn new(pair: &mut Pair, kinds: [&[(u8, usize, u32)]; 2], opcodes: u32) -> Script {
        // Sizes of the regions of each end so far.
        let mut used = [[0usize; 5]; 2];
        let mut take = |end: usize, region: usize, len: usize| {
            let at = used[end][region];
            used[end][region] += len;
            at
        };
        let mut recvs = [vec![], vec![]];
        let ops = [0usize, 1].map(|end| {
            let peer = 1 - end;
            let build = |&(kind, len, r): &(u8, usize, u32)| {
                let opcode = SendOpcode::from_code(kind as u32 % opcodes).unwrap();
                let len = if opcode.is_atomic() { 8 } else { len };
                let mut flags = SendFlags(r & 7); // FENCE, SIGNALED, SOLICITED
                let inline = r & 8 != 0 && len <= 64 && !opcode.awaits_data();
                if inline {
                    flags = flags.with(SendFlags::INLINE);
                }
                let (src, dst) = match opcode {
                    SendOpcode::Read => (take(peer, 2, len), take(end, 3, len)),
                    SendOpcode::CmpSwap | SendOpcode::FetchAdd => {
                        (take(peer, 4, 8), take(end, 3, 8))
                    }
                    SendOpcode::Write | SendOpcode::WriteImm => {
                        (take(end, 0, len), take(peer, 1, len))
                    }
                    _ => (take(end, 0, len), take(peer, 3, len + (r as usize >> 8) % 9)),
                };
                let recv = opcode.consumes_receive().then(|| {
                    let room = if opcode == SendOpcode::WriteImm {
                        0
                    } else {
                        len + (r as usize >> 8) % 9
                    };
                    recvs[peer].push((dst, room));
                    recvs[peer].len() - 1
                });
                Op { opcode, len, flags, inline, src, dst, recv, cut: (r >> 12) as usize }
            };
            kinds[end].iter().map(build).collect()
        });
        for (end, used) in pair.ends.iter().zip(used) {
            for (key, len) in [SRC, WRITABLE, READABLE, DST, COUNTERS].into_iter().zip(used) {
                let fill = matches!(key, SRC | READABLE);
                let bytes =
                    (0..len).map(|_| if fill { pair.rng.next() as u8 } else { 0 }).collect();
                let access = end.mem.regions.borrow()[&key].access;
                end.mem.add(key, access, bytes);
            }
        }
        Script { ops, posted: [0; 2], posted_recvs: [0; 2], recvs }
    }

    /// Posts what fits, now and then.
    pub fn post(&mut self, pair: &mut Pair) {
        for end in 0..2 {
            let End { qp, wcs, mem, .. } = &mut pair.ends[end];
            while self.posted_recvs[end] < self.recvs[end].len() && pair.rng.chance(700) {
                let (at, len) = self.recvs[end][self.posted_recvs[end]];
                let cut = len / 3;
                let sges = [sge(DST, at, cut), sge(DST, at + cut, len - cut)];
                let sges = if len == 0 { &sges[..0] } else { &sges[..] };
                match qp.post_recv(&RecvWr { wr_id: self.posted_recvs[end] as u64, sges }, wcs) {
                    Ok(()) => self.posted_recvs[end] += 1,
                    Err(e) => {
                        assert_eq!(e, PostError::QueueFull(16));
                        break;
                    }
                }
            }
            while self.posted[end] < self.ops[end].len() && pair.rng.chance(800) {
                let i = self.posted[end];
                let op = &self.ops[end][i];
                let cut = op.cut % (op.len + 1);
                let (key, at) = if op.opcode.awaits_data() { (DST, op.dst) } else { (SRC, op.src) };
                let sges = [sge(key, at, cut), sge(key, at + cut, op.len - cut)];
                let data = mem.bytes(SRC);
                let (remote_addr, rkey) = match op.opcode {
                    SendOpcode::Read => (va(READABLE, op.src), READABLE),
                    SendOpcode::CmpSwap | SendOpcode::FetchAdd => (va(COUNTERS, op.src), COUNTERS),
                    _ => (va(WRITABLE, op.dst), WRITABLE),
                };
                let wr = SendWr {
                    flags: op.flags,
                    imm_data: i as u32 ^ 0x5555,
                    remote_addr,
                    rkey,
                    // A counter begins with 0, and each has one atomic: 0 becomes 5 + i.
                    compare_add: if op.opcode == SendOpcode::FetchAdd { 5 + i as u64 } else { 0 },
                    swap: 5 + i as u64,
                    inline_data: op.inline.then(|| &data[op.src..op.src + op.len]),
                    ..wr(i as u64, op.opcode, &sges)
                };
                match qp.post_send(&wr, wcs) {
                    Ok(()) => self.posted[end] += 1,
                    Err(e) => {
                        assert_eq!(e, PostError::QueueFull(16));
                        break;
                    }
                }
            }
        }
    }

    pub fn all_posted(&self) -> bool {
        (0..2).all(|e| {
            self.posted[e] == self.ops[e].len() && self.posted_recvs[e] == self.recvs[e].len()
        })
    }

    /// Whether everything is complete at both ends.
    pub fn done(&self, pair: &Pair) -> bool {
        let idle = |e: &End| {
            let p = e.qp.progress();
            p.outstanding_sends == 0 && p.outstanding_recvs == 0
        };
        self.all_posted() && pair.ends.iter().all(idle)
    }

    /// Checks completions and memory against what was asked.
    pub fn check(&self, pair: &Pair) {
        for end in 0..2 {
            let peer = 1 - end;
            let signalled = |(_, op): &(usize, &Op)| op.flags.contains(SendFlags::SIGNALED);
            let want: Vec<u64> =
                self.ops[end].iter().enumerate().filter(signalled).map(|(i, _)| i as u64).collect();
            let sends = &pair.ends[end].wcs.sends;
            assert!(sends.iter().all(|w| w.status == 0), "{sends:?}");
            assert_eq!(
                sends.iter().map(|w| w.wr_id).collect::<Vec<_>>(),
                want,
                "send completions of end {end}"
            );

            let takers = self.ops[peer].iter().enumerate().filter(|(_, op)| op.recv.is_some());
            let recvs = &pair.ends[end].wcs.recvs;
            assert_eq!(recvs.len(), self.recvs[end].len());
            for ((n, (wc, solicited)), (i, op)) in recvs.iter().enumerate().zip(takers) {
                let imm = matches!(op.opcode, SendOpcode::SendImm | SendOpcode::WriteImm);
                assert_eq!((wc.wr_id, wc.status, wc.byte_len as usize), (n as u64, 0, op.len));
                assert_eq!(wc.wc_flags & WcFlags::WITH_IMM != 0, imm);
                assert!(!imm || wc.imm_data == i as u32 ^ 0x5555);
                assert_eq!(*solicited, op.flags.contains(SendFlags::SOLICITED));
            }
            for (i, op) in self.ops[end].iter().enumerate() {
                let (from, to) = match op.opcode {
                    SendOpcode::CmpSwap | SendOpcode::FetchAdd => {
                        let counter = &pair.ends[peer].mem.bytes(COUNTERS)[op.src..op.src + 8];
                        assert_eq!(
                            counter,
                            (5 + i as u64).to_ne_bytes(),
                            "{op:?} did not run once"
                        );
                        (vec![0; op.src + 8], pair.ends[end].mem.bytes(DST))
                    }
                    SendOpcode::Read => {
                        (pair.ends[peer].mem.bytes(READABLE), pair.ends[end].mem.bytes(DST))
                    }
                    SendOpcode::Write | SendOpcode::WriteImm => {
                        (pair.ends[end].mem.bytes(SRC), pair.ends[peer].mem.bytes(WRITABLE))
                    }
                    _ => (pair.ends[end].mem.bytes(SRC), pair.ends[peer].mem.bytes(DST)),
                };
                assert!(
                    from[op.src..op.src + op.len] == to[op.dst..op.dst + op.len],
                    "bytes of {op:?}"
                );
            }
        }
    }
}
