//! The measurements of a rank, its last report, and the reports that rank 0 has received.

use crate::meter::{Alpha, Meter};
use crate::picture::{Confirmed, Picture, Report};
use crate::Rank;

/// The measurements and reports of an engine.
#[derive(Debug, Default)]
pub(crate) struct Rates {
    /// By rail.
    pub(crate) rails: Vec<Meter>,
    /// The windows of rails that are too slow for as many frames as others.
    pub(crate) windows: Vec<u32>,
    pub(crate) alpha: Alpha,
    pub(crate) said: Report,
    pub(crate) said_us: u64,
    /// At rank 0: the report of each rank.
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

    /// Stores a report. Reports of ranks that do not exist are ignored.
    pub(crate) fn take_down(&mut self, report: Report) {
        if let Some(of_rank) = self.heard.get_mut(report.rank) {
            *of_rank = Some(report);
            self.fresh = true;
        }
    }
}
