//! The structures of `apm.h`.

use crate::machine::{Event, Info, Kind, State};
use crate::path::{Address, Path};
use std::ffi::{c_int, c_void};
use unbroken_types::Gid;
use unbroken_verbs::abi::{ibv_ah_attr, ibv_async_event, ibv_gid, ibv_qp};

/// `struct unbapm_path`
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct CPath {
    ah: ibv_ah_attr,
    timeout: u8,
    pkey_index: u16,
}

impl CPath {
    pub(super) fn get(&self) -> Path {
        Path::of(&self.ah, self.timeout, self.pkey_index)
    }

    fn of(path: &Path) -> CPath {
        CPath { ah: (&path.attr).into(), timeout: path.timeout, pkey_index: path.attr.pkey_index }
    }
}

/// `struct unbapm_address`
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct CAddress {
    gid: ibv_gid,
    lid: u16,
    port: u8,
    lmc: u8,
    ethernet: u8,
    active: u8,
    sgid_index: u8,
    reserved: u8,
}

impl CAddress {
    pub(super) fn get(&self) -> Address {
        // SAFETY: all bytes are there, whichever part was written.
        let gid = Gid(unsafe { self.gid.raw });
        let CAddress { lid, port, lmc, sgid_index, .. } = *self;
        Address {
            gid,
            sgid_index,
            lid,
            port,
            lmc,
            ethernet: self.ethernet != 0,
            active: self.active != 0,
        }
    }

    pub(super) fn of(a: &Address) -> CAddress {
        let gid = ibv_gid { raw: a.gid.0 };
        let (ethernet, active) = (a.ethernet.into(), a.active.into());
        CAddress {
            gid,
            lid: a.lid,
            port: a.port,
            lmc: a.lmc,
            ethernet,
            active,
            sgid_index: a.sgid_index,
            reserved: 0,
        }
    }
}

/// `struct unbapm_event`
#[repr(C)]
pub(super) struct CEvent {
    kind: c_int,
    error: c_int,
    qp: *mut ibv_qp,
    time_us: u64,
    path: CPath,
    asked: c_int,
}

impl CEvent {
    pub(super) fn of(event: &Event) -> CEvent {
        let (kind, error, asked) = match event.kind {
            Kind::Armed => (0, 0, false),
            Kind::Migrated { asked } => (1, 0, asked),
            Kind::MigrationFailed => (2, 0, false),
            Kind::Unhealthy => (3, 0, false),
            Kind::Healthy => (4, 0, false),
            Kind::Respecified => (5, 0, false),
            Kind::LoadLate => (6, 0, false),
            Kind::LoadFailed { errno } => (7, errno, false),
            Kind::QpFailed => (8, 0, false),
        };
        let (qp, path) = (crate::handle::qp(event.id), CPath::of(&event.path));
        CEvent { kind, error, qp, time_us: event.at_us, path, asked: asked.into() }
    }
}

/// `struct unbapm_info`
#[repr(C)]
pub(super) struct CInfo {
    state: State,
    loaded: c_int,
    healthy: c_int,
    paths: c_int,
    migrations: u64,
    primary: CPath,
    alternate: CPath,
}

impl CInfo {
    pub(super) fn of(info: &Info) -> CInfo {
        CInfo {
            state: info.state,
            loaded: info.loaded.is_some().into(),
            healthy: info.healthy.into(),
            paths: info.paths as c_int,
            migrations: info.migrations,
            primary: CPath::of(&info.primary),
            alternate: CPath::of(&info.loaded.unwrap_or_default()),
        }
    }
}

/// `struct unbapm_options`
#[repr(C)]
pub(super) struct COptions {
    pub(super) size: usize,
    pub(super) no_thread: c_int,
    pub(super) manual: c_int,
    pub(super) respecify: c_int,
    pub(super) gid_index: c_int,
    pub(super) armed_event: c_int,
    pub(super) load_timeout_ms: u32,
    pub(super) migrate_timeout_ms: u32,
    pub(super) on_event: Option<unsafe extern "C" fn(*mut c_void, *const CEvent)>,
    pub(super) on_other: Option<unsafe extern "C" fn(*mut c_void, *const ibv_async_event)>,
    pub(super) arg: *mut c_void,
}

impl Default for COptions {
    fn default() -> COptions {
        COptions {
            size: size_of::<COptions>(),
            no_thread: 0,
            manual: 0,
            respecify: 0,
            gid_index: 0,
            armed_event: 0,
            load_timeout_ms: 0,
            migrate_timeout_ms: 0,
            on_event: None,
            on_other: None,
            arg: std::ptr::null_mut(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;
    use unbroken_types::PathAttr;

    #[test]
    fn a_path_survives_its_way_through_c() {
        let attr = PathAttr {
            port: 2,
            pkey_index: 6,
            sl: 4,
            dlid: 17,
            static_rate: 2,
            ..PathAttr::new(Gid([7; 16]))
        };
        let path = Path { attr, timeout: 14 };
        assert_eq!(CPath::of(&path).get(), path);
        assert_eq!(CPath::of(&Path::default()).get(), Path::default());
    }

    /// The same numbers are asserted of the header in `tests/c/apm_library.c`.
    #[test]
    fn layouts_are_the_headers() {
        assert_eq!(
            (size_of::<CPath>(), offset_of!(CPath, timeout), offset_of!(CPath, pkey_index)),
            (40, 32, 34)
        );
        assert_eq!(
            (size_of::<CAddress>(), offset_of!(CAddress, lid), offset_of!(CAddress, sgid_index)),
            (24, 16, 22)
        );
        assert_eq!(
            (size_of::<CEvent>(), offset_of!(CEvent, path), offset_of!(CEvent, asked)),
            (72, 24, 64)
        );
        assert_eq!(
            (size_of::<CInfo>(), offset_of!(CInfo, migrations), offset_of!(CInfo, alternate)),
            (104, 16, 64)
        );
        assert_eq!(
            (size_of::<COptions>(), offset_of!(COptions, on_event), offset_of!(COptions, arg)),
            (64, 40, 56)
        );
    }
}
