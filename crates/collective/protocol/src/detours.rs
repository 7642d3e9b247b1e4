//! Paths for ranks that have no rail in common any more: the part of an [`Engine`] that keeps them
//! joined as long as each of their hosts has a NIC that is up.
//!
//! Two ranks are *apart* when all paths of their rails are Down: one host has lost some rails, the
//! other the rest. Then there are two more paths, with lives as others have:
//!
//! - `CROSS` joins a NIC of one rank with a NIC of another rail. The lower rank chooses both for
//!   each life, in turns, first among those that are not known to be down. Where switches of rails
//!   are joined, it carries; where they are not, its test fails, and it is tried again with others.
//! - `OUT_OF_BAND` goes through the connections out of band. It is made when the two have been
//!   apart for `paths::LAST_RESORT_US` and `CROSS` is not Up. It is slow, and uses the host's
//!   processors; but it is there as long as the job is, however the NICs' networks are divided.
//!   (R²CCL would send by way of a host that has both rails. That takes memory and progress of a
//!   third rank, and fails if that fails.)
//!
//! A stream leaves these for a rail, and `OUT_OF_BAND` for `CROSS`, as soon as that is Up, in the
//! same way as it goes home.
//!
//! Out of band a frame goes in pieces of [`PIECE_BYTES`], in order. The receiver says what it has
//! taken, and no more than [`MOST_ON_WAY_BYTES`] are on their way to a rank; so the connection
//! never fills up, and what else is said there is not late. Pieces of another life are dropped, and
//! so a path is quiesced as soon as an end has closed it.
//!
//! | event | sender | receiver |
//! | --- | --- | --- |
//! | a frame is posted | in line | |
//! | pump, less on its way than may be | `Piece` | |
//! | `Piece` of this life | | into the slot, unless the frame had come before; `Taken` |
//! | the last one | | as if a notice had come |
//! | `Taken` of this life | less on its way; behind the last one: the frame is complete | |

use crate::engine::Engine;
use crate::env::{Env, Slot};
use crate::frame::{Notice, CROSS, HEADER_BYTES, MEMORY, OUT_OF_BAND};
use crate::message::Message;
use crate::mutants::left_out;
use crate::paths::State;
use crate::pieces::{Pieces, Sending};
use crate::Rank;

/// Bytes of a frame in a message out of band.
const PIECE_BYTES: u32 = 32 << 10;
/// Bytes of pieces on their way to a rank.
const MOST_ON_WAY_BYTES: u32 = 128 << 10;

impl Engine {
    /// Sees to it that ranks that are apart have a path.
    pub(crate) fn tend_detours(&mut self, peer: Rank, env: &mut impl Env) {
        if self.config.hosts[peer] == self.config.hosts[self.config.me] {
            return;
        }
        let (rails, now_us) = (self.config.rails, self.now_us);
        let of = &mut self.peers[peer];
        if !of.is_apart(rails.into()) {
            of.apart_us = None;
            return;
        }
        of.apart_us.get_or_insert(now_us);
        let (cross, aside) = (self.index(CROSS), self.index(OUT_OF_BAND));
        if self.peers[peer].paths[aside].state == State::Up
            && !(0..rails).any(|rail| env.has_link(rail))
        {
            // Without a NIC this host has no part in the job any more.
            self.fail_path(peer, OUT_OF_BAND, env);
        }
        for path in [CROSS, OUT_OF_BAND] {
            let of = &self.peers[peer];
            let last = path == OUT_OF_BAND;
            let early =
                last && (!of.is_at_last_resort(now_us) || of.paths[cross].state == State::Up);
            let due = self.config.me < peer && of.paths[self.index(path)].is_due(now_us);
            if due && !early && !left_out!(self.config.mutant, NoDetour) {
                self.offer(peer, path, env);
            }
        }
        self.place_streams(peer, env);
    }

    /// The NICs that the next life of `CROSS` is to join: this rank's and the peer's.
    pub(crate) fn cross_nics(&self, peer: Rank, life: u32, env: &mut impl Env) -> [u8; 2] {
        let rails = self.config.rails;
        let (host, its) = (self.config.hosts[self.config.me], self.config.hosts[peer]);
        let linked: Vec<u8> = (0..rails).filter(|rail| env.has_link(*rail)).collect();
        let known = |near: u8, far: u8| self.is_known(host, near) || self.is_known(its, far);
        let pairs = |all: bool| -> Vec<[u8; 2]> {
            (0..rails)
                .flat_map(|far| linked.iter().map(move |near| [*near, far]))
                .filter(|[near, far]| near != far && (all || !known(*near, *far)))
                .collect()
        };
        let well = pairs(false);
        let some = if well.is_empty() { pairs(true) } else { well };
        // With none left, one that cannot be made.
        some.get(life as usize % some.len().max(1)).copied().unwrap_or([0, 0])
    }

    /// A stream's frame is to go out of band.
    pub(crate) fn post_aside(&mut self, peer: Rank, stream: u8, seq: u64, bytes: u32) {
        self.peers[peer].pieces.sending.push_back(Sending {
            stream,
            seq,
            bytes,
            said: 0,
            taken: 0,
        });
    }

    /// Nothing that was on its way out of band counts any more.
    pub(crate) fn forget_pieces(&mut self, peer: Rank) {
        self.peers[peer].pieces = Pieces::default();
    }

    /// Sends pieces, as many as may be on their way.
    pub(crate) fn pump_pieces(&mut self, peer: Rank, env: &mut impl Env) {
        let life = self.peers[peer].paths[self.index(OUT_OF_BAND)].life;
        let pieces = &mut self.peers[peer].pieces;
        for frame in &mut pieces.sending {
            while frame.said < frame.bytes {
                if pieces.on_way_bytes >= MOST_ON_WAY_BYTES {
                    return;
                }
                let (stream, seq, offset) = (frame.stream, frame.seq, frame.said);
                let len = PIECE_BYTES.min(frame.bytes - offset);
                let bytes = env.copy_out(Slot { peer, stream, seq }, offset, len);
                frame.said += len;
                pieces.on_way_bytes += len;
                let total = frame.bytes;
                let piece = Message::Piece { life, stream, seq, offset, total, bytes };
                env.tell(peer, &piece);
            }
        }
    }

    /// Whether something of this life of the path out of band counts.
    fn is_aside(&self, peer: Rank, life: u32) -> bool {
        let path = &self.peers[peer].paths[self.index(OUT_OF_BAND)];
        (path.state, path.life) == (State::Up, life)
    }

    /// A piece has come.
    pub(crate) fn on_piece(&mut self, peer: Rank, message: &Message, env: &mut impl Env) {
        let Message::Piece { life, stream, seq, offset, total, bytes } = message else { return };
        if !self.is_aside(peer, *life) {
            return;
        }
        let len = bytes.len() as u32;
        let fits = *stream < self.config.rails
            && len > 0
            && *total <= self.config.payload + HEADER_BYTES as u32
            && offset.checked_add(len).is_some_and(|end| end <= *total)
            && *offset == self.peers[peer].pieces.come;
        if !fits {
            return self.broke(peer, 12, env);
        }
        let last = offset + len == *total;
        let of = &mut self.peers[peer];
        of.pieces.come = if last { 0 } else { offset + len };
        match of.incoming[usize::from(*stream)].awaits(*seq) {
            Ok(true) => env.copy_in(Slot { peer, stream: *stream, seq: *seq }, *offset, bytes),
            // It came over another path, and was polled late.
            Ok(false) => {}
            Err(_) => return self.broke(peer, 13, env),
        }
        env.tell(peer, &Message::Taken { life: *life, bytes: len });
        if last {
            self.on_notice(peer, Notice::frame(*stream, *seq).encode(), env);
        }
    }

    /// The peer has taken a piece.
    pub(crate) fn on_taken(&mut self, peer: Rank, life: u32, bytes: u32, env: &mut impl Env) {
        if !self.is_aside(peer, life) {
            return;
        }
        let pieces = &mut self.peers[peer].pieces;
        let Some(frame) = pieces.sending.front_mut().filter(|f| bytes <= f.said - f.taken) else {
            return self.broke(peer, 14, env);
        };
        frame.taken += bytes;
        pieces.on_way_bytes -= bytes;
        self.progress += 1;
        if frame.taken == frame.bytes {
            let stream = frame.stream;
            pieces.sending.pop_front();
            self.on_sent(peer, OUT_OF_BAND, Some(stream));
        }
    }

    /// A notice has come out of band.
    pub(crate) fn on_said_notice(
        &mut self,
        peer: Rank,
        life: u32,
        notice: u32,
        env: &mut impl Env,
    ) {
        if self.is_aside(peer, life) {
            self.on_notice(peer, notice, env);
        }
    }

    /// The path that a stream should go to from the one that carries it, if one is better and Up:
    /// its own, any rail's if it has left its rails, a NIC's if it goes out of band.
    pub(crate) fn better(&self, peer: Rank, at: usize, carrier: u8) -> Option<u8> {
        let rails = usize::from(self.config.rails);
        let paths = &self.peers[peer].paths;
        let up = |path: &u8| paths[self.index(*path)].state == State::Up;
        let home = Some(at as u8).filter(up).filter(|home| *home != carrier);
        let detour = matches!(carrier, CROSS | OUT_OF_BAND);
        let ring = (0..rails).map(|k| ((at + k) % rails) as u8);
        let other = || detour.then(|| ring.clone().find(up)).flatten();
        let cross = || (carrier == OUT_OF_BAND && up(&CROSS)).then_some(CROSS);
        match carrier {
            MEMORY => None,
            _ => home.or_else(other).or_else(cross),
        }
    }
}
