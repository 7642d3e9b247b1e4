//! The part of an [`Engine`] that measures rates and reports them to rank 0, which combines them
//! into the picture with which all ranks plan ([`crate::views`]).
//!
//! | event | any rank | rank 0 |
//! | --- | --- | --- |
//! | something posted is complete | its rail's, its path's meter | the same |
//! | time, and rates are others than were said | `Measured`, to the father | takes it down |
//! | `Measured` | hands it on to the father | takes it down |
//! | time, and something was taken down | | a picture; `Propose` if it is news |

use crate::engine::{Config, Engine};
use crate::env::Env;
use crate::message::Message;
use crate::meter::Meter;
use crate::paths::State;
use crate::picture::{is_slow, Picture, Report};
use crate::rates::Rates;
use crate::tree;
use crate::Rank;

/// The shortest interval between reports of a rank.
const REPORTS_US: u64 = 100_000;

/// The frames in flight on a rail that is slower than others take at most this time. Otherwise an
/// acknowledgement that waits behind as much data would count as lost. Two frames to each rank are
/// always allowed: one is in transit while the other is acknowledged.
const ON_WAY_US: u64 = 20_000;
const MORE_FRAMES: u32 = 2;

impl Engine {
    /// Records a post over a path to a peer; a notice has no bytes.
    pub(crate) fn measure_post(&mut self, peer: Rank, at: usize, bytes: u32) {
        let now_us = self.now_us;
        if at >= self.rates.rails.len() {
            // A detour, which nothing is planned with.
            return;
        }
        let path = &mut self.peers[peer].paths[at];
        path.bytes.posted(now_us, bytes);
        if bytes > 0 {
            path.meter.posted(now_us);
            self.rates.rails[at].posted(now_us);
        }
    }

    /// Records that a path has failed, and its frames in flight are lost.
    pub(crate) fn measure_loss(&mut self, peer: Rank, at: usize) {
        let path = &mut self.peers[peer].paths[at];
        let frames = path.bytes.clear();
        path.meter.lost(frames);
        if let Some(rail) = self.rates.rails.get_mut(at) {
            rail.lost(frames);
        }
    }

    /// The window of a rail, if it is slower than others.
    fn short_window(&self, at: usize) -> Option<u32> {
        self.rates.windows.get(at).copied().filter(|window| *window < self.config.window)
    }

    /// Whether the window of a rail is full.
    ///
    /// In a small window, only frames count. Acknowledgements on such a rail wait for a long time,
    /// so credit messages, which also wait for theirs, would occupy most of the window.
    pub(crate) fn is_full(&self, at: usize) -> bool {
        match self.short_window(at) {
            Some(window) => self.rates.rails[at].frames() >= window,
            None => self.on_way[at] >= self.config.window,
        }
    }

    /// Whether a peer occupies half of the window of a rail.
    pub(crate) fn has_half(&self, peer: Rank, at: usize) -> bool {
        let path = &self.peers[peer].paths[at];
        match self.short_window(at) {
            Some(window) => path.meter.frames() >= window.div_ceil(2),
            None => path.posted >= self.config.window.div_ceil(2),
        }
    }

    /// Records the completion of the oldest post over a path.
    pub(crate) fn measure(&mut self, peer: Rank, rail: u8) {
        if rail >= self.config.rails {
            return;
        }
        let (at, now_us) = (self.index(rail), self.now_us);
        let path = &mut self.peers[peer].paths[at];
        let Some((bytes, took_us)) = path.bytes.complete(now_us) else { return };
        if let Some(us) = took_us {
            self.rates.alpha.took(us);
        }
        if bytes > 0 {
            let alpha_us = self.rates.alpha.us();
            path.meter.sent(now_us, bytes, alpha_us);
            self.rates.rails[at].sent(now_us, bytes, alpha_us);
        }
    }

    fn report(&self) -> Report {
        let paths = self.peers.iter().enumerate().flat_map(|(peer, of)| {
            let known = of.paths.iter().enumerate().filter(|(_, path)| path.meter.mbps() > 0);
            known.map(move |(rail, path)| (peer as u32, rail as u8, path.meter.mbps()))
        });
        Report {
            rank: self.config.me,
            alpha_ns: self.rates.alpha.ns(),
            rails_mbps: self.rates.rails.iter().map(Meter::mbps).collect(),
            paths: paths.collect(),
        }
    }

    /// Handles a report.
    pub(crate) fn on_measured(&mut self, report: &Report, env: &mut impl Env) {
        match tree::father(self.config.me) {
            Some(father) => env.tell(father, &Message::Measured(report.clone())),
            None => self.rates.take_down(report.clone()),
        }
    }

    /// Reports measurements that have changed.
    pub(crate) fn tend_rates(&mut self, env: &mut impl Env) {
        let early = self.now_us < self.rates.said_us + REPORTS_US;
        if !self.config.measure || early || self.has_anyone_left() {
            return;
        }
        self.rates.said_us = self.now_us;
        self.set_windows();
        let report = self.report();
        if report.is_news(&self.rates.said) {
            self.rates.said = report.clone();
            self.on_measured(&report, env);
        }
    }

    fn set_windows(&mut self) {
        let payload = u64::from(self.config.payload);
        let Rates { rails, windows, .. } = &mut self.rates;
        let up = |at: usize| {
            self.peers.iter().filter(|peer| peer.paths[at].state == State::Up).count() as u32
        };
        let best = rails.iter().map(Meter::mbps).max().unwrap_or(0);
        for (at, (rail, window)) in rails.iter().zip(windows).enumerate() {
            let mbps = rail.mbps();
            let frames = u64::from(mbps) * ON_WAY_US / 8 / payload;
            let frames = u32::try_from(frames).unwrap_or(u32::MAX);
            let slow = mbps > 0 && is_slow(mbps.into(), best.into());
            *window = if slow { frames.saturating_add(MORE_FRAMES * up(at)) } else { u32::MAX };
        }
    }

    /// At rank 0: whether all ranks have reported.
    pub(crate) fn has_measured_all(&self) -> bool {
        self.rates.heard.iter().all(Option::is_some)
    }

    /// At rank 0: the picture from all reports, with these NICs down.
    pub(crate) fn measured_picture(&mut self, down: &[u64]) -> Picture {
        if std::mem::take(&mut self.rates.fresh) {
            let Config { hosts, rails, .. } = &self.config;
            self.rates.measured = Picture::of(hosts, *rails, &self.rates.heard);
        }
        let picture = self.rates.confirmed.of(self.now_us, &self.rates.measured);
        Picture { down: down.to_vec(), ..picture }
    }
}
