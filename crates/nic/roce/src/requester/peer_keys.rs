//! Remote keys that are other ones on the peer's NIC than the application has.
//!
//! A work request keeps the key that it was posted with, so that a later life can translate it
//! anew. What its packets carry is looked up once, when it begins: what is sent again is the same.

use super::Requester;
use crate::io::PeerKeys;
use crate::sq::{SendRing, Wqe};
use std::sync::Arc;
use unbroken_types::SendOpcode;

#[derive(Clone)]
pub(super) struct Translated {
    keys: Arc<dyn PeerKeys>,
    /// What the entries that have PSNs name to the peer, by their slots.
    on_wire: Box<[u32]>,
}

fn names_memory(opcode: SendOpcode) -> bool {
    use SendOpcode::{CmpSwap, FetchAdd, Read, Write, WriteImm};
    matches!(opcode, Write | WriteImm | Read | CmpSwap | FetchAdd)
}

impl Translated {
    fn of(ring: &SendRing, keys: Arc<dyn PeerKeys>) -> Translated {
        Translated { keys, on_wire: vec![0; ring.slots()].into() }
    }

    /// Has the entry name what the peer knows. False: that is not known yet.
    fn begin(&mut self, ring: &SendRing, index: u64) -> bool {
        let wqe = ring.get(index);
        if wqe.executed || !names_memory(wqe.opcode) {
            return true;
        }
        let Some(key) = self.keys.key(wqe.rkey) else { return false };
        self.on_wire[ring.slot(index)] = key;
        true
    }
}

impl Requester {
    /// What is begun from now on has these keys; none: those of the application.
    pub(crate) fn set_peer_keys(&mut self, keys: Option<Arc<dyn PeerKeys>>) {
        self.translated = keys.map(|keys| Box::new(Translated::of(&self.ring, keys)));
    }

    /// Whether it is known what the entry at `cur`, which is to begin, names to the peer.
    #[inline]
    pub(super) fn is_named(&mut self) -> bool {
        let (ring, cur) = (&self.ring, self.cur);
        self.translated.as_mut().is_none_or(|translated| translated.begin(ring, cur))
    }

    /// An entry that has PSNs, as its packets name it.
    #[inline]
    pub(super) fn on_wire(&self, index: u64) -> Wqe {
        let mut wqe = *self.ring.get(index);
        if let Some(translated) = self.translated.as_ref().filter(|_| names_memory(wqe.opcode)) {
            wqe.rkey = translated.on_wire[self.ring.slot(index)];
        }
        wqe
    }
}
