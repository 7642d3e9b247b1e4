//! What the engine does for the agreement of its ranks ([`crate::consent`]).

use crate::consent::Told;
use crate::engine::Engine;
use crate::frame::{FrameKind, Header};
use crate::run::Run;

impl Engine {
    /// Puts what a rank tells others of an operation in line.
    pub(crate) fn say(&mut self, run: &Run, told: Vec<Told>) {
        for (peer, direction, sum) in told {
            let at = self.index(self.rails_to(peer).start);
            self.peers[peer].outgoing[at].control.push_back(Header {
                kind: FrameKind::Agrees,
                seq: 0,
                operation: run.number,
                digest: run.digest,
                lane: 0,
                message: direction,
                offset: sum,
                total: 0,
                len: 0,
                tag: run.tag,
            });
        }
    }
}
