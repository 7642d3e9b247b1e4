//! Software NICs as a [`NicSet`]: of a host of the emulated network, or at addresses of interfaces.
//!
//! Where all of them have plain verbs only, `resumable` supplies what protection needs.

use crate::logical::Logical;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use unbroken_resumable::ResumableDevice;
use unbroken_shift::{failover_is_on, NicSet, Place};
use unbroken_softnic::{Config, NicSource, SoftNics};
use unbroken_types::Gid;
use unbroken_verbs::{
    Capabilities, Device, DeviceAttr, EventSink, KeyAnswer, MemoryDomain, PortAttr, Result,
    UdAliases,
};

struct Soft {
    nics: Arc<SoftNics>,
    runtime: PathBuf,
    /// The names of the machine's interfaces that they are; none in the emulated network.
    interfaces: Vec<String>,
    /// Where the NICs have plain verbs only and their QPs are to be protected: what they lack is
    /// supplied by `resumable`.
    logical: Option<Logical>,
}

impl NicSet for Soft {
    fn count(&self) -> usize {
        self.nics.count()
    }

    fn name(&self, i: usize) -> String {
        self.nics.name(i).to_string()
    }

    fn host(&self) -> String {
        self.nics.host().to_string()
    }

    fn capabilities(&self, i: usize) -> Capabilities {
        match self.logical {
            Some(_) => ResumableDevice::CAPABILITIES,
            None => self.nics.capabilities(i),
        }
    }

    fn gid(&self, i: usize) -> Gid {
        self.nics.gid(i).unwrap_or_default()
    }

    fn first_port(&self, gid: Gid) -> Gid {
        self.nics.first_port(gid)
    }

    fn node_guid(&self, i: usize) -> u64 {
        self.nics.node_guid(i)
    }

    fn attr(&self, i: usize) -> DeviceAttr {
        let attr = self.nics.attr(i);
        match self.logical {
            Some(_) => ResumableDevice::attr(&attr),
            None => attr,
        }
    }

    fn port(&self, i: usize, port: u8, usable: bool) -> Result<PortAttr> {
        self.nics.port(i, port, usable)
    }

    fn gid_of_lid(&self, i: usize, lid: u16, _global: Option<Gid>) -> Result<Gid> {
        self.nics.gid_of_lid(i, lid)
    }

    fn open(&self, i: usize, sink: Arc<dyn EventSink>) -> Result<Arc<dyn Device>> {
        match &self.logical {
            Some(logical) => logical.open(i, sink, |sink| Ok(self.nics.open(i, sink)?)),
            None => Ok(self.nics.open(i, sink)?),
        }
    }

    fn memory(&self, i: usize) -> Arc<dyn MemoryDomain> {
        match &self.logical {
            Some(logical) => logical.memory().of(i),
            None => self.nics.memory(),
        }
    }

    fn prepare(&self, on: Vec<Vec<usize>>) {
        if let Some(logical) = &self.logical {
            logical.memory().prepare(on);
        }
    }

    fn keys(&self, i: u8, rkey: u32) -> KeyAnswer {
        let memory = self.logical.as_ref().map(|logical| logical.memory());
        memory.map_or(KeyAnswer::NoRegion, |memory| memory.answer(i.into(), rkey))
    }

    fn key_set(&self, i: usize) -> u16 {
        self.logical.as_ref().map_or(0, |logical| logical.memory().key_set(i))
    }

    fn has_foreign_keys(&self, i: usize) -> bool {
        self.logical.as_ref().is_some_and(|logical| logical.memory().is_foreign(i))
    }

    fn moves_datagrams(&self) -> bool {
        self.logical.is_none()
    }

    fn aliases(&self) -> Arc<UdAliases> {
        self.nics.aliases()
    }

    fn runtime(&self) -> PathBuf {
        self.runtime.clone()
    }

    fn place(&self, i: usize) -> Option<Place> {
        Place::of(Path::new("/sys"), self.interfaces.get(i)?)
    }
}

/// The NICs of a configuration. Where failover is on, what plain ones lack is supplied.
pub fn over(config: Config) -> Result<Box<dyn NicSet>> {
    with(config, failover_is_on())
}

/// The NICs of a configuration. `supplied`: plain ones get what protection needs and they lack.
pub fn with(config: Config, supplied: bool) -> Result<Box<dyn NicSet>> {
    let runtime = config.runtime.path().to_path_buf();
    let interfaces = match &config.nics {
        NicSource::Addresses(..) => {
            unbroken_softnic::inventory(&config)?.into_iter().map(|nic| nic.interface).collect()
        }
        NicSource::Host(_) => Vec::new(),
    };
    let nics = SoftNics::new(config)?;
    // Keys and domains of NICs of different kinds have nothing in common: there, nothing is
    // protected that is on a plain one.
    let plain = nics.count() > 0 && (0..nics.count()).all(|i| !nics.capabilities(i).holds);
    let logical = (plain && supplied).then(|| Logical::new(nics.count()));
    Ok(Box::new(Soft { nics, runtime, interfaces, logical }))
}
