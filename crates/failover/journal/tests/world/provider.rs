//! A provider, and chance.

use std::collections::VecDeque;
use unbroken_types::{Wc, WcStatus};

pub struct Rng(pub u64);

impl Rng {
    pub fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) % n
    }

    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}

pub struct InQueue {
    pub wr_id: u64,
    pub signaled: bool,
    pub sent: usize,
    pub executed: bool,
}

#[derive(Default)]
pub struct Provider {
    pub sends: VecDeque<InQueue>,
    pub recvs: VecDeque<u64>,
    pub in_error: bool,
    pub send_cq: VecDeque<Wc>,
    pub recv_cq: VecDeque<Wc>,
    /// Which errors and flushes come: drawn for each.
    flushes: Option<(Flushes, Rng)>,
}

/// What a provider in error tells.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Flushes {
    All,
    Some,
    None,
}

impl Provider {
    pub fn new(flushes: Flushes, seed: u64) -> Provider {
        Provider { flushes: Some((flushes, Rng(seed | 1))), ..Provider::default() }
    }

    pub fn tells(&mut self, status: WcStatus) -> bool {
        status == WcStatus::Success
            || match &mut self.flushes {
                None | Some((Flushes::All, _)) => true,
                Some((Flushes::Some, rng)) => rng.below(3) > 0,
                Some((Flushes::None, _)) => false,
            }
    }

    pub fn send_wc(&mut self, wr_id: u64, status: WcStatus) {
        if !self.tells(status) {
            return;
        }
        self.send_cq.push_back(Wc { wr_id, status: status as u32, qp_num: 7, ..Wc::default() });
    }

    pub fn recv_wc(&mut self, wr_id: u64, status: WcStatus, imm_data: u32) {
        if !self.tells(status) {
            return;
        }
        self.recv_cq.push_back(Wc {
            wr_id,
            status: status as u32,
            qp_num: 7,
            imm_data,
            ..Wc::default()
        });
    }

    /// The oldest send fails with this, the oldest receive with that, and all else is flushed.
    pub fn fail(&mut self, first: WcStatus, first_recv: WcStatus) {
        self.in_error = true;
        let (mut status, mut recv_status) = (first, first_recv);
        for e in std::mem::take(&mut self.sends) {
            self.send_wc(e.wr_id, std::mem::replace(&mut status, WcStatus::WrFlushErr));
        }
        for wr_id in std::mem::take(&mut self.recvs) {
            self.recv_wc(wr_id, std::mem::replace(&mut recv_status, WcStatus::WrFlushErr), 0);
        }
    }
}
