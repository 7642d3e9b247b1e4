//! The part of an [`Engine`] that measures what it sends, and reports it to rank 0, which makes a
//! picture of it that all plan with ([`crate::views`]).
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

/// A rank reports so often at most.
const REPORTS_US: u64 = 100_000;

/// What a rail that is slower than others has on its way takes no longer than this, so that what
/// comes back on it, and has to wait behind as much, is not taken for lost; but for two frames to
/// each rank, one of which is being carried while the other is acknowledged.
const ON_WAY_US: u64 = 20_000;
const MORE_FRAMES: u32 = 2;

impl Engine {
    /// Something was posted over a path to a peer; a notice has no bytes.
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

    /// A path has failed, and what was on its way over it is lost.
    pub(crate) fn measure_loss(&mut self, peer: Rank, at: usize) {
        let path = &mut self.peers[peer].paths[at];
        let frames = path.bytes.clear();
        path.meter.lost(frames);
        if let Some(rail) = self.rates.rails.get_mut(at) {
            rail.lost(frames);
        }
    }

    /// The window of a rail that is slower than others, if it is.
    fn short_window(&self, at: usize) -> Option<u32> {
        self.rates.windows.get(at).copied().filter(|window| *window < self.config.window)
    }

    /// Whether a rail has as much on its way as it may have.
    ///
    /// Where that is little, only frames count. What comes back over such a rail has to wait, so
    /// credit, which waits for its acknowledgement as frames do, would take most of the room.
    pub(crate) fn is_full(&self, at: usize) -> bool {
        match self.short_window(at) {
            Some(window) => self.rates.rails[at].frames() >= window,
            None => self.on_way[at] >= self.config.window,
        }
    }

    /// Whether a peer has half of what a rail may have on its way.
    pub(crate) fn has_half(&self, peer: Rank, at: usize) -> bool {
        let path = &self.peers[peer].paths[at];
        match self.short_window(at) {
            Some(window) => path.meter.frames() >= window.div_ceil(2),
            None => path.posted >= self.config.window.div_ceil(2),
        }
    }

    /// What was posted over a path is complete; it was the first of what was on its way.
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

    /// A rank has measured something.
    pub(crate) fn on_measured(&mut self, report: &Report, env: &mut impl Env) {
        match tree::father(self.config.me) {
            Some(father) => env.tell(father, &Message::Measured(report.clone())),
            None => self.rates.take_down(report.clone()),
        }
    }

    /// Reports what has changed.
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

    /// At rank 0: the picture that reports give, with this down.
    pub(crate) fn measured_picture(&mut self, down: &[u64]) -> Picture {
        if std::mem::take(&mut self.rates.fresh) {
            let Config { hosts, rails, .. } = &self.config;
            self.rates.measured = Picture::of(hosts, *rails, &self.rates.heard);
        }
        let picture = self.rates.confirmed.of(self.now_us, &self.rates.measured);
        Picture { down: down.to_vec(), ..picture }
    }
}
