//! The regions of a NIC's contexts, found by either key.

use super::Mr;
use std::collections::HashMap;
use std::sync::Arc;
use unbroken_verbs::MrKeys;

/// What rxe gives in place of a remote key where peers may do nothing with a region.
const NO_KEY: u32 = 0;

/// Regions by the keys that the application has.
#[derive(Default)]
pub(super) struct Space {
    pub(super) by_lkey: HashMap<u32, Arc<Mr>>,
    /// The local key of each remote one.
    lkeys: HashMap<u32, u32>,
}

impl Space {
    pub(super) fn by_rkey(&self, rkey: u32) -> Option<&Arc<Mr>> {
        self.by_lkey.get(self.lkeys.get(&rkey)?)
    }

    /// Whether no other region has one of the keys.
    pub(super) fn is_free(&self, keys: MrKeys) -> bool {
        !self.by_lkey.contains_key(&keys.lkey) && !self.lkeys.contains_key(&keys.rkey)
    }

    pub(super) fn insert(&mut self, mr: Arc<Mr>) {
        if mr.keys.rkey != NO_KEY {
            self.lkeys.insert(mr.keys.rkey, mr.keys.lkey);
        }
        self.by_lkey.insert(mr.keys.lkey, mr);
    }

    pub(super) fn remove(&mut self, lkey: u32) {
        if let Some(mr) = self.by_lkey.remove(&lkey) {
            self.lkeys.remove(&mr.keys.rkey);
        }
    }
}
