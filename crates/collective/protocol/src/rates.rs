//! What a rank has measured, what it has said of it, and what rank 0 has heard.

use crate::meter::{Alpha, Meter};
use crate::picture::{Confirmed, Picture, Report};
use crate::Rank;

/// What an engine has measured and heard.
#[derive(Debug, Default)]
pub(crate) struct Rates {
    /// By rail.
    pub(crate) rails: Vec<Meter>,
    /// Frames that a rail may have on its way, where it is too slow for as many as others.
    pub(crate) windows: Vec<u32>,
    pub(crate) alpha: Alpha,
    pub(crate) said: Report,
    pub(crate) said_us: u64,
    /// At rank 0: what each rank has reported.
    pub(crate) heard: Vec<Option<Report>>,
    pub(crate) fresh: bool,
    pub(crate) measured: Picture,
    pub(crate) confirmed: Confirmed,
}

impl Rates {
    pub(crate) fn new(me: Rank, ranks: usize, rails: usize) -> Rates {
        Rates {
            rails: vec![Meter::default(); rails],
            windows: vec![u32::MAX; rails],
            heard: vec![None; if me == 0 { ranks } else { 0 }],
            ..Rates::default()
        }
    }

    /// What is taken down of a rank. One that does not exist has said nothing.
    pub(crate) fn take_down(&mut self, report: Report) {
        if let Some(of_rank) = self.heard.get_mut(report.rank) {
            *of_rank = Some(report);
            self.fresh = true;
        }
    }
}
