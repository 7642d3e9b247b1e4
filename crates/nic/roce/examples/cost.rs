//! What a packet costs beside copying and system calls: nanoseconds a packet of 1 MiB WRITEs at MTU
//! 4096.

use std::hint::black_box;
use std::time::Instant;
use unbroken_roce::*;
use unbroken_types::PdHandle;
use unbroken_types::*;
use unbroken_wire::{Packet, MAX_HEADER};

struct Nothing;

impl Memory for Nothing {
    fn check(&self, _: PdHandle, _: u32, _: u64, _: u64, _: Access) -> Result<(), MemError> {
        Ok(())
    }
    fn write(&self, _: PdHandle, _: u32, _: u64, data: &[u8], _: Access) -> Result<(), MemError> {
        black_box(data);
        Ok(())
    }
    fn read(&self, _: PdHandle, _: u32, _: u64, _: &mut [u8], _: Access) -> Result<(), MemError> {
        Ok(())
    }
    fn atomic(&self, _: PdHandle, _: u32, _: u64, _: AtomicOp) -> Result<u64, MemError> {
        Ok(0)
    }
}

impl Completions for Nothing {
    fn send(&mut self, wc: Wc) {
        black_box(wc);
    }
    fn recv(&mut self, wc: Wc, _: bool) {
        black_box(wc);
    }
}

/// Keeps headers and the lengths of payloads.
struct Headers(Vec<(HeaderBytes, usize, usize)>);

type HeaderBytes = [u8; MAX_HEADER];

impl PacketSink for Headers {
    fn push(&mut self, header: &[u8], payload: Payload<'_>) -> Result<(), SinkError> {
        let mut bytes = [0; MAX_HEADER];
        bytes[..header.len()].copy_from_slice(header);
        self.0.push((bytes, header.len(), payload.len()));
        Ok(())
    }
}

impl Headers {
    /// Hands all packets to a QP, with payloads of zeros.
    fn deliver(&mut self, qp: &mut RcQp, buf: &mut [u8]) {
        for (header, len, payload) in self.0.drain(..) {
            buf[..len].copy_from_slice(&header[..len]);
            let packet = Packet::parse(&buf[..len + payload]).expect("own packets parse");
            qp.handle_packet(0, &packet, &Nothing, &mut Nothing);
        }
    }
}

fn qp(qpn: u32) -> RcQp {
    let caps = QpCaps {
        max_send_wr: 128,
        max_recv_wr: 128,
        max_send_sge: 1,
        max_recv_sge: 1,
        max_inline_data: 0,
    };
    let mut qp = RcQp::new(RcConfig {
        qpn,
        wc_qpn: qpn,
        caps,
        pd: PdHandle(1),
        suspend_on_error: true,
        sq_sig_all: true,
        cwnd_max_packets: 256,
    });
    qp.set_selective(true);
    let d = RcModify::default();
    let all = Some(Access(15));
    for m in [
        RcModify { state: Some(QpState::Init), access: all, ..d },
        RcModify {
            state: Some(QpState::Rtr),
            dest_qpn: Some(1),
            rq_psn: Some(0),
            mtu: Some(Mtu::B4096),
            max_dest_rd_atomic: Some(1),
            min_rnr_timer: Some(12),
            ..d
        },
        RcModify {
            state: Some(QpState::Rts),
            sq_psn: Some(0),
            timeout: Some(14),
            retry_cnt: Some(7),
            rnr_retry: Some(7),
            max_rd_atomic: Some(1),
            ..d
        },
    ] {
        qp.modify(&m, &mut Nothing).expect("a legal transition");
    }
    qp
}

fn main() {
    let (mut a, mut b) = (qp(1), qp(2));
    let sges = [Sge { addr: 0, length: 1 << 20, lkey: 1 }];
    let wr = SendWr {
        wr_id: 1,
        opcode: SendOpcode::Write,
        flags: SendFlags::SIGNALED,
        rkey: 1,
        sges: &sges,
        ..SendWr::default()
    };
    let (mut send_ns, mut recv_ns, mut ack_ns, mut packets) = (0u128, 0u128, 0u128, 0u128);
    let mut sink = Headers(Vec::with_capacity(512));
    let mut buf = vec![0; MAX_HEADER + 4096];
    for _ in 0..4000 {
        a.post_send(&wr, &mut Nothing).expect("room");
        while a.progress().outstanding_sends > 0 {
            let begin = Instant::now();
            a.poll_transmit(0, &mut sink, &mut Nothing);
            send_ns += begin.elapsed().as_nanos();
            packets += sink.0.len() as u128;
            let begin = Instant::now();
            sink.deliver(&mut b, &mut buf);
            recv_ns += begin.elapsed().as_nanos();
            let begin = Instant::now();
            b.poll_transmit(0, &mut sink, &mut Nothing);
            sink.deliver(&mut a, &mut buf);
            ack_ns += begin.elapsed().as_nanos();
        }
    }
    println!(
        "{packets} packets: {} ns to send, {} ns to receive, {} ns of its acknowledgement",
        send_ns / packets,
        recv_ns / packets,
        ack_ns / packets
    );
}
