//! The addresses of UD QPs that have moved, as the engine sees them.

use crate::gids::gid_of;
use std::net::IpAddr;
use std::sync::Arc;
use unbroken_types::{Gid, LinkLayer};
use unbroken_verbs::aliases::{AliasMap, UdAliases};
use unbroken_verbs::{DeviceEvent, EventSink};

/// The table of the process, and the copy that the engine works with.
pub(crate) struct Aliases {
    shared: Arc<UdAliases>,
    /// The generation of `map`.
    seen: u64,
    map: Arc<AliasMap>,
    link_layer: LinkLayer,
    device: usize,
    sink: Arc<dyn EventSink>,
}

impl Aliases {
    pub(crate) fn new(
        shared: Arc<UdAliases>,
        link_layer: LinkLayer,
        device: usize,
        sink: Arc<dyn EventSink>,
    ) -> Aliases {
        Aliases { shared, seen: 0, map: Arc::default(), link_layer, device, sink }
    }

    /// Looks whether the table has changed.
    #[inline]
    pub(super) fn look(&mut self) {
        let generation = self.shared.generation();
        if generation != self.seen {
            self.seen = generation;
            self.map = self.shared.map();
        }
    }

    /// The table; `None` while nothing has moved.
    #[inline]
    pub(super) fn map(&self) -> Option<&AliasMap> {
        Some(&*self.map).filter(|map| !map.is_empty())
    }

    pub(super) fn link_layer(&self) -> LinkLayer {
        self.link_layer
    }

    /// By what address the QP is known that has moved and sent from there. `None`: we have not
    /// heard of it, and ask for news.
    #[cold]
    pub(super) fn name(&self, ip: IpAddr, qpn: u32) -> Option<(Gid, u32)> {
        let name = self.map.name((gid_of(ip, self.link_layer), qpn));
        if name.is_none() && self.shared.ask() {
            self.sink.event(self.device, DeviceEvent::UnknownSender);
        }
        name
    }
}
