//! Address handles of a device: made when a datagram first goes somewhere, and kept.
//!
//! Making one asks the network for the peer's link address, which takes seconds where nobody
//! answers. A program that sends a datagram waits for that, as for its own `ibv_create_ah`. What
//! carries messages of failover never does: for such a QP handles are made by threads of the device
//! ([`crate::resolver`]), and a datagram to where none is yet is refused, so that its sender says it
//! again. They are asked for ahead ([`AddressHandles::prepare`]), while everything works.
//!
//! ```text
//! unknown ──> asked ──> handle ──(older than REFRESH)──> asked, the old one is used meanwhile
//!               │          ▲
//!               └──> unreached ──(UNREACHED later)──> asked
//! ```
//!
//! Invariants: a handle is used and ended under the lock of its table only; nothing of the network
//! is waited for under it; nothing is entered after the end of the QP.

use crate::context::Context;
use crate::library::null_error;
use crate::memory::HostMemory;
use crate::resolver::{Doubt, Resolver};
use crate::{lock, Object};
use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use unbroken_types::{Gid, PathAttr, UdDest};
use unbroken_verbs::abi::{ibv_ah, ibv_ah_attr, ibv_pd};
use unbroken_verbs::{Error, Result};

/// Handles that are kept. Then the half that was not used for longest is ended: some devices (rxe)
/// look at a handle when the datagram leaves, and a datagram that waits has used one of the last.
const MOST: usize = 4096;
/// For so long an address that could not be resolved is not tried again; twice that each time where
/// threads try.
const UNREACHED: Duration = Duration::from_secs(1);
/// The peer's link address may be another after this time; who has not answered may answer by then.
const REFRESH: Duration = Duration::from_secs(10);

/// What is known of an address.
struct Known {
    handle: Option<Object<ibv_ah>>,
    /// As of then.
    since: Instant,
    /// The threads have been asked, or somebody is at it.
    asked: bool,
    /// How often it was not made, since it was last.
    failures: u32,
    /// When it was used last, or entered: in [`Handles::uses`].
    used: u64,
}

impl Known {
    fn use_at(&mut self, now: u64) -> Option<*mut ibv_ah> {
        self.used = now;
        self.handle.as_ref().map(|ah| ah.0)
    }
}

#[derive(Default)]
struct Handles {
    by_path: HashMap<PathAttr, Known>,
    /// Uses and entries so far.
    uses: u64,
    ended: bool,
}

impl Handles {
    fn fresh(&mut self, asked: bool) -> Known {
        self.uses += 1;
        Known { handle: None, since: Instant::now(), asked, failures: 0, used: self.uses }
    }

    /// Takes out the half that was not used for longest.
    fn take_old(&mut self) -> Vec<Object<ibv_ah>> {
        let mut times: Vec<u64> = self.by_path.values().map(|known| known.used).collect();
        times.sort_unstable();
        let Some(since) = times.get(times.len() / 2).copied() else { return Vec::new() };
        let old = self.by_path.extract_if(|_, known| known.used < since);
        old.filter_map(|(_, known)| known.handle).collect()
    }
}

/// What the threads need, too.
pub(crate) struct Table {
    context: Arc<Context>,
    /// The device's own.
    gid: Gid,
    pd: Object<ibv_pd>,
    /// While a handle is made its protection domain is not ended with the device.
    _memory: Arc<HostMemory>,
    handles: Mutex<Handles>,
}

/// The handles of one QP.
pub(crate) struct AddressHandles {
    table: Arc<Table>,
    /// Who makes them; none: whoever sends.
    resolver: Option<Arc<AhResolver>>,
}

/// The threads of a device that make handles.
pub(crate) type AhResolver = Resolver<(Arc<Table>, PathAttr)>;

/// Those threads, none of which is started yet.
pub(crate) fn resolver() -> Arc<AhResolver> {
    Arc::new(Resolver::new(|(table, path): (Arc<Table>, PathAttr)| {
        let made = table.make(path);
        table.enter(path, made.ok());
    }))
}

impl Table {
    /// Asks the network.
    fn make(&self, path: PathAttr) -> Result<Object<ibv_ah>> {
        if lock(&self.handles).ended {
            return Err(Error::invalid("the QP has been destroyed"));
        }
        let mut attr = ibv_ah_attr::from(&path);
        // SAFETY: a protection domain that lives as long as we do, and a live local.
        let ah = unsafe { self.context.library.create_ah(self.pd.0, &mut attr) };
        match ah.is_null() {
            true => Err(null_error(&format!("{}: no way to {}", self.context.name, path.dest_gid))),
            false => Ok(Object(ah)),
        }
    }

    /// What came of it. A handle that could not be made anew stays as it was.
    fn enter(&self, path: PathAttr, made: Option<Object<ibv_ah>>) {
        let mut handles = lock(&self.handles);
        if handles.ended {
            return made.into_iter().for_each(|ah| self.end(ah));
        }
        let fresh = handles.fresh(false);
        let known = handles.by_path.entry(path).or_insert(fresh);
        (known.since, known.asked) = (Instant::now(), false);
        known.failures = if made.is_some() { 0 } else { known.failures.saturating_add(1) };
        let old = match made {
            Some(_) => std::mem::replace(&mut known.handle, made),
            None => None,
        };
        old.into_iter().for_each(|ah| self.end(ah));
    }

    /// Ends a handle that is in no table any more.
    fn end(&self, ah: Object<ibv_ah>) {
        // SAFETY: made by us, and used under the table's lock only.
        unsafe { self.context.library.destroy_ah(ah.0) };
    }

    fn no_way(&self, to: Gid, why: &str) -> Error {
        Error::new(libc::EHOSTUNREACH, format!("{}: no way to {to}{why}", self.context.name))
    }
}

impl AddressHandles {
    pub(crate) fn new(
        (context, gid): (&Arc<Context>, Gid),
        pd: *mut ibv_pd,
        memory: &Arc<HostMemory>,
        resolver: Option<Arc<AhResolver>>,
    ) -> AddressHandles {
        let table = Table {
            context: context.clone(),
            gid,
            pd: Object(pd),
            _memory: memory.clone(),
            handles: Mutex::default(),
        };
        AddressHandles { table: Arc::new(table), resolver }
    }

    /// Has `post` use the handle that leads to `to`, while it is certainly there.
    pub(crate) fn with<T>(
        &self,
        port: u8,
        to: &UdDest,
        post: impl FnOnce(*mut ibv_ah) -> T,
    ) -> Result<T> {
        let path = to.path(port);
        if self.ask_for(path)? {
            let made = self.table.make(path);
            let error = made.as_ref().err().cloned();
            self.table.enter(path, made.ok());
            error.map_or(Ok(()), Err)?;
        }
        let mut handles = lock(&self.table.handles);
        handles.uses += 1;
        let now = handles.uses;
        match handles.by_path.get_mut(&path).and_then(|known| known.use_at(now)) {
            Some(ah) => Ok(post(ah)),
            None => Err(self.table.no_way(to.gid, " yet: it is being looked for")),
        }
    }

    /// The threads are to make a handle, which was not made so often.
    fn ask(&self, resolver: &AhResolver, path: PathAttr, failures: u32) -> bool {
        let bits = |gid: Gid| u128::from_be_bytes(gid.0);
        let alike = (bits(self.table.gid) ^ bits(path.dest_gid)).leading_zeros();
        let doubt = Doubt { failures, distance: u128::BITS - alike };
        resolver.ask(&self.table.context.name, doubt, (self.table.clone(), path))
    }

    /// The threads are to make the handle that leads to `to`, if there is none.
    pub(crate) fn prepare(&self, port: u8, to: &UdDest) {
        if self.resolver.is_some() {
            // Nobody waits for it.
            let _ = self.ask_for(to.path(port));
        }
    }

    /// Sees to it that there is a handle, or soon is. True: the caller is to make it. An error
    /// where nobody was there a moment ago.
    fn ask_for(&self, path: PathAttr) -> Result<bool> {
        let mut handles = lock(&self.table.handles);
        let room = handles.by_path.len() < MOST;
        match (handles.by_path.get_mut(&path), &self.resolver) {
            (Some(known), None) if known.handle.is_some() => return Ok(false),
            (Some(known), None) if known.since.elapsed() < UNREACHED => {
                return Err(self.table.no_way(path.dest_gid, " a moment ago"));
            }
            (Some(known), Some(resolver)) => {
                let pause = match &known.handle {
                    Some(_) => REFRESH,
                    None => (UNREACHED * (1 << known.failures.min(4))).min(REFRESH),
                };
                let old = known.since.elapsed() >= pause;
                known.asked |= old && !known.asked && self.ask(resolver, path, known.failures);
                return Ok(false);
            }
            _ if !room => {
                handles.take_old().into_iter().for_each(|ah| self.table.end(ah));
            }
            _ => {}
        }
        let Some(resolver) = &self.resolver else { return Ok(true) };
        let asked = self.ask(resolver, path, 0);
        let fresh = handles.fresh(asked);
        handles.by_path.insert(path, fresh);
        Ok(false)
    }

    /// Ends all. The QP that used them is gone.
    pub(crate) fn clear(&self) {
        let mut handles = lock(&self.table.handles);
        handles.ended = true;
        let all: Vec<Known> = handles.by_path.drain().map(|(_, known)| known).collect();
        all.into_iter().filter_map(|known| known.handle).for_each(|ah| self.table.end(ah));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_used_last_is_kept() {
        let mut handles = Handles::default();
        let path = |flow_label| PathAttr { flow_label, ..PathAttr::default() };
        assert!(handles.take_old().is_empty());
        for label in 0..10 {
            let mut known = handles.fresh(false);
            known.handle = Some(Object(std::ptr::without_provenance_mut(1 + label as usize)));
            handles.by_path.insert(path(label), known);
        }
        let now = handles.uses + 1;
        assert!(handles.by_path.get_mut(&path(3)).unwrap().use_at(now).is_some());
        let mut old: Vec<usize> = handles.take_old().iter().map(|ah| ah.0.addr() - 1).collect();
        old.sort_unstable();
        assert_eq!(old, [0, 1, 2, 4, 5]);
        let mut kept: Vec<u32> = handles.by_path.keys().map(|path| path.flow_label).collect();
        kept.sort_unstable();
        assert_eq!(kept, [3, 6, 7, 8, 9]);
    }
}
