//! Automatic path migration (APM) of an RC QP, as the InfiniBand specification has it (volume 1,
//! section 17.2.8): one end's part.
//!
//! Besides its *primary* path, which it uses, a QP may be given an *alternate* one. When both ends
//! are armed, either may go over to it: because its owner asks for that, or because the primary
//! path has failed. The other end sees it and follows. Sequence numbers go on, so what was on its
//! way is acknowledged or sent again as after any loss, and nothing runs twice. The alternate path
//! is then the primary one, and there is no alternate until one is given again.
//!
//! Each packet carries a bit, MigReq: set in state MIGRATED, else clear. That is all the ends tell
//! each other.
//!
//! | state | what happens | next state | what else |
//! | --- | --- | --- | --- |
//! | MIGRATED | the owner gives an alternate path | the same | it is kept |
//! | MIGRATED, ARMED, REARM | the owner asks for REARM, and there is an alternate path | REARM | announced, and the peer asked |
//! | REARM | a packet over the primary path, MigReq clear: the peer is ready, too | ARMED | announced |
//! | ARMED | the owner asks for MIGRATED | MIGRATED | *migrates*: event, announced |
//! | ARMED | retries used up, or the port of the primary path down, and the port of the alternate path up | MIGRATED | the same, and all on its way is sent again |
//! | ARMED | the same, and the port of the alternate path down | ARMED | event (failed); the QP fails as it would without an alternate path |
//! | ARMED, REARM | a packet over the alternate path, MigReq set: the peer has migrated | MIGRATED | migrates |
//! | MIGRATED | a packet over the path in use, MigReq set: the peer has followed | the same | no longer announced |
//! | ARMED | a packet over neither path, MigReq set: the peer went where we cannot follow | ARMED | event (failed), once until armed anew |
//!
//! Everything else changes nothing; in particular a packet that comes late over a path that is no
//! longer in use. What the owner may not ask for: ARMED; REARM without an alternate path; MIGRATED
//! in REARM; another alternate path in REARM or ARMED, unless with REARM.
//!
//! *Announced*: QPs without traffic would never hear of each other, so an acknowledgement is sent
//! that nobody waits for, which repeats what is known. A change is announced at once; migrating, by
//! the end that began, again after 2, 4, … ms, until the peer is seen to have followed, [`REPEATS`]
//! times at most, in case packets are lost; entering REARM [`ASKS`] times, since a peer may have no
//! core for seconds, and nobody else would ever bring the two together. In REARM it also *asks*, by
//! the AckReq bit, for which the specification has no use in an acknowledgement: the peer, whatever
//! its state, answers by one of its own, since an end that is armed already would not know that it
//! is waited for. A peer that is no softnic does neither; it says its bit with the next traffic.

use crate::responder::RcEvent;
use unbroken_types::{ModifyError, PathMigState, RcModify};

/// No MigReq bit would be news; else bit 0 stands for one that is clear, bit 1 for one that is set.
pub(crate) const NOTHING: u8 = 0;
/// How often an announcement is repeated: within 0.13 s.
const REPEATS: u8 = 6;
/// How often in REARM: within 16 s.
const ASKS: u8 = 13;
/// The time before the first repetition.
const FIRST_PAUSE_US: u64 = 2_000;

/// Which way a packet came, by the addresses of both ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Via {
    /// The path in use.
    Primary,
    /// The alternate path.
    Alternate,
    /// None of them.
    Other,
}

/// One end's state of migration.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Migration {
    state: PathMigState,
    /// The code of the local ACK timeout of the alternate path, if there is one.
    alternate: Option<u8>,
    /// That of the path that was migrated to.
    timeout: Option<u8>,
    /// The port of the alternate path is up.
    pub(crate) usable: bool,
    /// The path has changed, which the owner of the addresses does not know yet.
    pub(crate) moved: bool,
    event: Option<RcEvent>,
    /// That the peer went where we cannot follow has been told.
    refused: bool,
    /// Something has changed that is to be announced.
    news: bool,
    /// Announcements that may follow, the pause before the next, and when it is due.
    repeats: u8,
    pause_us: u64,
    announce_at_us: Option<u64>,
}

impl Migration {
    pub(crate) fn state(&self) -> PathMigState {
        self.state
    }

    pub(crate) fn alternate(&self) -> Option<u8> {
        self.alternate
    }

    /// The local ACK timeout of the path that was migrated to, by its code.
    pub(crate) fn timeout(&self) -> Option<u8> {
        self.timeout
    }

    /// The bit of all packets.
    pub(crate) fn mig_req(&self) -> bool {
        self.state == PathMigState::Migrated
    }

    /// Which MigReq bits of the peer's packets may be news, as [`NOTHING`] says.
    pub(crate) fn watched(&self) -> u8 {
        match self.state {
            PathMigState::Migrated if self.announce_at_us.is_some() || self.news => 0b10,
            PathMigState::Migrated => NOTHING,
            PathMigState::Rearm => 0b11,
            PathMigState::Armed => 0b10,
        }
    }

    // What the owner asks for

    /// Whether the owner may ask for that now.
    pub(crate) fn check(&self, change: &RcModify) -> Result<(), ModifyError> {
        use PathMigState::*;
        let from = self.state;
        let why = match (change.migration, from) {
            (Some(Armed), _) => "ARMED comes by itself when both ends are in REARM: ask for REARM",
            (Some(Rearm), _) if change.alternate.or(self.alternate).is_none() => {
                "REARM needs an alternate path (IBV_QP_ALT_PATH): none is loaded, or a migration \
                 has used it"
            }
            (Some(Migrated), Rearm) => {
                "it is not armed yet: the peer has not said that it is ready"
            }
            (None | Some(Migrated), Rearm | Armed) if change.alternate.is_some() => {
                "the alternate path is in use: another one needs REARM beside it"
            }
            _ => return Ok(()),
        };
        Err(ModifyError::Migration { from, why })
    }

    /// Does what [`Migration::check`] has allowed. True: it migrates.
    pub(crate) fn change(&mut self, change: &RcModify) -> bool {
        if change.alternate.is_some() {
            (self.alternate, self.usable) = (change.alternate, true);
        }
        match change.migration {
            Some(PathMigState::Rearm) => {
                self.refused = false;
                self.enter(PathMigState::Rearm);
                false
            }
            Some(PathMigState::Migrated) if self.state == PathMigState::Armed => {
                self.migrate();
                true
            }
            _ => false,
        }
    }

    // What happens

    /// A packet has come that way. True: it migrates.
    pub(crate) fn hear(&mut self, mig_req: bool, via: Via) -> bool {
        match (self.state, mig_req, via) {
            (PathMigState::Rearm, false, Via::Primary) => self.enter(PathMigState::Armed),
            (PathMigState::Rearm | PathMigState::Armed, true, Via::Alternate) => {
                self.migrate();
                // The peer knows.
                self.repeats = 0;
                return true;
            }
            (PathMigState::Migrated, true, Via::Primary) => {
                (self.repeats, self.announce_at_us) = (0, None)
            }
            (PathMigState::Armed, true, Via::Other) if !self.refused => {
                self.refused = true;
                self.event = Some(RcEvent::MigrationFailed);
            }
            _ => {}
        }
        false
    }

    /// Retries are used up. True: it migrates instead of failing.
    pub(crate) fn fail(&mut self) -> bool {
        match (self.state, self.usable) {
            (PathMigState::Armed, true) => {
                self.migrate();
                true
            }
            (PathMigState::Armed, false) => {
                self.event = Some(RcEvent::MigrationFailed);
                false
            }
            _ => false,
        }
    }

    /// The port of the primary path is down. True: it migrates.
    pub(crate) fn lose_port(&mut self) -> bool {
        let may = self.state == PathMigState::Armed && self.usable;
        if may {
            self.migrate();
        }
        may
    }

    fn migrate(&mut self) {
        self.timeout = self.alternate.take();
        self.moved = true;
        self.event = Some(RcEvent::PathMigrated);
        self.enter(PathMigState::Migrated);
    }

    fn enter(&mut self, state: PathMigState) {
        self.state = state;
        self.news = true;
        // Whoever is in REARM asks again, so that the one who is armed need not repeat itself.
        self.repeats = match state {
            PathMigState::Armed => 0,
            PathMigState::Rearm => ASKS,
            PathMigState::Migrated => REPEATS,
        };
        (self.pause_us, self.announce_at_us) = (FIRST_PAUSE_US, None);
    }

    // What is announced

    /// Whether a change has not been announced.
    #[inline]
    pub(crate) fn has_news(&self) -> bool {
        self.news
    }

    /// A change is announced now; gives whether the peer is asked.
    pub(crate) fn announce(&mut self, now_us: u64) -> bool {
        self.news = false;
        self.repeat_later(now_us);
        self.state == PathMigState::Rearm
    }

    /// Whether an announcement is to be repeated now, and whether the peer is asked by it.
    pub(crate) fn announcement_due(&mut self, now_us: u64) -> Option<bool> {
        self.announce_at_us.filter(|at_us| *at_us <= now_us)?;
        self.repeat_later(now_us);
        Some(self.state == PathMigState::Rearm)
    }

    fn repeat_later(&mut self, now_us: u64) {
        self.announce_at_us = (self.repeats > 0).then(|| now_us + self.pause_us);
        self.repeats = self.repeats.saturating_sub(1);
        self.pause_us *= 2;
    }

    pub(crate) fn announce_at_us(&self) -> Option<u64> {
        self.announce_at_us
    }

    /// The QP has ended: nothing is announced any more. Events are.
    pub(crate) fn silence(&mut self) {
        (self.news, self.announce_at_us) = (false, None);
    }

    pub(crate) fn take_event(&mut self) -> Option<RcEvent> {
        self.event.take()
    }
}
