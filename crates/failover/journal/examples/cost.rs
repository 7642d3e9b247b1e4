//! What the journal costs a work request: posts and completes as many as it is told, so that two
//! runs under an instruction counter, one with none, give the cost of one.
//!
//! usage: cost COUNT [post]     at most 32,768 where they are only posted (as in: valgrind
//! --tool=callgrind --callgrind-out-file=/dev/null target/release/examples/cost 100000)

use std::hint::black_box;
use unbroken_journal::{Config, Journal, Mutation, Posted};
use unbroken_types::{Completions, QpCaps, SendFlags, SendOpcode, SendWr, Sge, Wc};

struct Last(Wc);

impl Completions for Last {
    fn send(&mut self, wc: Wc) {
        self.0 = wc;
    }
    fn recv(&mut self, wc: Wc, _: bool) {
        self.0 = wc;
    }
}

fn main() {
    let count: u64 = std::env::args().nth(1).and_then(|n| n.parse().ok()).unwrap_or(0);
    let only_post = std::env::args().nth(2).is_some();
    let caps = QpCaps {
        max_send_wr: 32_768,
        max_recv_wr: 128,
        max_send_sge: 2,
        max_recv_sge: 1,
        max_inline_data: 0,
    };
    let config = Config {
        caps,
        wc_qpn: 1,
        sq_sig_all: false,
        shared_receives: false,
        mutation: Mutation::None,
    };
    let mut journal: Journal = Journal::new(config);
    journal.open();
    journal.start();
    let mut last = Last(Wc::default());
    let sges = [Sge { addr: 1, length: 64, lkey: 1 }];
    for wr_id in 0..count {
        let wr = SendWr {
            wr_id,
            opcode: SendOpcode::Write,
            flags: SendFlags::SIGNALED,
            remote_addr: 8,
            rkey: 1,
            sges: &sges,
            ..SendWr::default()
        };
        let posted = journal.post_send(black_box(&wr), &mut last);
        if let (Ok(Posted::Give(number)), false) = (black_box(posted), only_post) {
            journal.handle_wc(1, black_box(&Wc { wr_id: number, ..Wc::default() }), &mut last);
        }
    }
    assert!(count == 0 || only_post || black_box(last).0.wr_id == count - 1);
}
