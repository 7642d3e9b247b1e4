//! An open context of a device, and what it tells of the device.

use crate::library::{check, null_error, text, Library};
use crate::Object;
use std::ffi::c_int;
use std::mem::zeroed;
use std::os::fd::RawFd;
use std::ptr::null_mut;
use std::sync::OnceLock;
use unbroken_types::{Gid, GidType, LinkLayer, Mtu};
use unbroken_verbs::abi::*;
use unbroken_verbs::{DeviceAttr, Error, GidEntry, PortAttr, PortState, Result};

/// GIDs of a port that are looked at: as many as an address handle can name.
pub const MAX_GIDS: c_int = 256;
/// What programs may send inline, at most; a provider that has less refuses the QP.
const MAX_INLINE_BYTES: u32 = 512;

/// A context of libibverbs; closed when nothing uses it any more.
pub(crate) struct Context {
    pub(crate) library: &'static Library,
    pub(crate) raw: Object<ibv_context>,
    pub(crate) name: String,
    /// Host order.
    pub(crate) node_guid: u64,
    /// InfiniBand or RoCE: it has the GIDs and queue pairs that failover needs.
    pub(crate) is_channel_adapter: bool,
    /// What [`Context::resizes_cqs`] has found.
    resizes_cqs: OnceLock<bool>,
}

/// A port as its device tells it, word for word.
#[derive(Clone, Copy)]
pub struct PortView(pub ibv_port_attr);

impl Context {
    /// The device of that name, opened anew.
    pub(crate) fn open(name: &str) -> Result<Context> {
        let found = Context::open_each(|other| other == name)?.pop();
        found.map(|(_, opened)| opened).unwrap_or_else(|| {
            Err(Error::new(libc::EIO, format!("the kernel has no RDMA device {name} at present")))
        })
    }

    /// The devices that libibverbs lists and that are wanted, by name, each opened, or why it
    /// cannot be.
    ///
    /// All at the same time: drivers take milliseconds for each, and programs wait.
    pub(crate) fn open_each(
        wanted: impl Fn(&str) -> bool,
    ) -> Result<Vec<(String, Result<Context>)>> {
        let library = Library::get()?;
        let mut count = 0;
        // SAFETY: the count is a live local.
        let list = unsafe { library.get_device_list(&mut count) };
        if list.is_null() {
            return Err(null_error("ibv_get_device_list"));
        }
        let devices = (0..count.max(0) as usize).map(|i| {
            // SAFETY: the list has `count` devices, which live until it is freed.
            let device = unsafe { *list.add(i) };
            // SAFETY: as above; the name is an array inside.
            (text(unsafe { &(*device).name }), Object(device))
        });
        let devices: Vec<_> = devices.filter(|(name, _)| wanted(name)).collect();
        let names: Vec<String> = devices.iter().map(|(name, _)| name.clone()).collect();
        let opened = unbroken_process::at_once(devices.into_iter().map(|(name, device)| {
            // SAFETY: a device of the list, which is freed when all of this is done.
            move || unsafe { Context::of(library, device, name) }
        }));
        let panicked = || Err(Error::new(libc::EIO, "opening it has panicked"));
        let found = names.into_iter().zip(opened.into_iter().map(|it| it.unwrap_or_else(panicked)));
        let found = found.collect();
        // SAFETY: the list, once; open contexts keep their devices.
        unsafe { library.free_device_list(list) };
        Ok(found)
    }

    /// # Safety
    /// `device` is of a list that has not been freed.
    unsafe fn of(
        library: &'static Library,
        Object(device): Object<ibv_device>,
        name: String,
    ) -> Result<Context> {
        // SAFETY: promised by the caller.
        let (raw, guid, kind) = unsafe {
            (library.open_device(device), library.get_device_guid(device), (*device).node_type)
        };
        if raw.is_null() {
            return Err(null_error(&format!("{name}: ibv_open_device")));
        }
        Ok(Context {
            library,
            raw: Object(raw),
            name,
            node_guid: u64::from_be(guid),
            is_channel_adapter: kind == IBV_NODE_CA,
            resizes_cqs: OnceLock::new(),
        })
    }

    /// Whether a protection domain and a CQ can be made: of a device that is being reset neither
    /// can.
    pub(crate) fn makes_queues(&self) -> bool {
        // SAFETY: an open context; what is made is ended at once, and only what was made.
        unsafe {
            let pd = self.library.alloc_pd(self.raw());
            let cq = self.library.create_cq(self.raw(), 1, null_mut(), null_mut(), 0);
            let made = !pd.is_null() && !cq.is_null();
            if !cq.is_null() {
                self.library.destroy_cq(cq);
            }
            if !pd.is_null() {
                self.library.dealloc_pd(pd);
            }
            made
        }
    }

    /// Whether the provider can change the size of a CQ: asked once, with one that is not used.
    pub(crate) fn resizes_cqs(&self) -> bool {
        *self.resizes_cqs.get_or_init(|| {
            // SAFETY: an open context; the CQ is ended at once, if there is one.
            unsafe {
                let cq = self.library.create_cq(self.raw(), 1, null_mut(), null_mut(), 0);
                if cq.is_null() {
                    return true; // the next will say why
                }
                let done = self.library.resize_cq(cq, (*cq).cqe.saturating_add(1)) == 0;
                self.library.destroy_cq(cq);
                done
            }
        })
    }

    pub(crate) fn raw(&self) -> *mut ibv_context {
        self.raw.0
    }

    /// Readable while asynchronous events wait.
    pub(crate) fn async_fd(&self) -> RawFd {
        // SAFETY: an open context; the field never changes.
        unsafe { (*self.raw()).async_fd }
    }

    /// The device's attributes as libibverbs tells them.
    pub(crate) fn device_attr(&self) -> Result<ibv_device_attr> {
        // SAFETY: plain integers and characters.
        let mut attr: ibv_device_attr = unsafe { zeroed() };
        // SAFETY: an open context and a live local.
        check("ibv_query_device", unsafe { self.library.query_device(self.raw(), &mut attr) })?;
        Ok(attr)
    }

    /// Limits and identity.
    pub(crate) fn attr(&self) -> Result<DeviceAttr> {
        let a = self.device_attr()?;
        let count = |n: c_int| u32::try_from(n).unwrap_or(0);
        Ok(DeviceAttr {
            fw_ver: text(&a.fw_ver),
            node_guid: self.node_guid,
            vendor_id: a.vendor_id,
            vendor_part_id: a.vendor_part_id,
            hw_ver: a.hw_ver,
            max_mr_size: a.max_mr_size,
            max_qp: count(a.max_qp),
            max_qp_wr: count(a.max_qp_wr),
            max_sge: count(a.max_sge),
            max_cq: count(a.max_cq),
            max_cqe: count(a.max_cqe),
            max_mr: count(a.max_mr),
            max_mw: count(a.max_mw),
            max_pd: count(a.max_pd),
            max_qp_rd_atom: count(a.max_qp_rd_atom).min(count(a.max_qp_init_rd_atom)),
            max_srq: count(a.max_srq),
            max_srq_wr: count(a.max_srq_wr),
            max_srq_sge: count(a.max_srq_sge),
            atomics: a.atomic_cap != 0,
            max_ah: count(a.max_ah),
            phys_port_cnt: a.phys_port_cnt,
            max_inline_data: MAX_INLINE_BYTES,
        })
    }

    /// A port, word for word.
    pub(crate) fn port_view(&self, port: u8) -> Result<PortView> {
        // SAFETY: plain integers.
        let mut attr: ibv_port_attr = unsafe { zeroed() };
        let size = size_of::<ibv_port_attr>();
        // SAFETY: an open context, a live local and its size.
        let code = match unsafe { verbs_of(self.raw()) }.and_then(|v| v.query_port) {
            Some(query) => {
                // SAFETY: as above.
                crate::inside::enter(|| unsafe { query(self.raw(), port, &mut attr, size) })
            }
            // SAFETY: as above; writes less than the structure has.
            None => unsafe { self.library.query_port(self.raw(), port, &mut attr) },
        };
        check(&format!("{}: ibv_query_port({port})", self.name), code)?;
        Ok(PortView(attr))
    }

    /// A port, counted from 1.
    pub(crate) fn port(&self, port: u8) -> Result<PortAttr> {
        let PortView(a) = self.port_view(port)?;
        let link_layer = match a.link_layer {
            1 => LinkLayer::Infiniband,
            _ => LinkLayer::Ethernet,
        };
        Ok(PortAttr {
            state: if a.state == PortState::Active as c_int {
                PortState::Active
            } else {
                PortState::Down
            },
            max_mtu: Mtu::from_code(a.max_mtu as u32).unwrap_or(Mtu::B1024),
            active_mtu: Mtu::from_code(a.active_mtu as u32).unwrap_or(Mtu::B1024),
            gids: self.gids(port, link_layer, a.gid_tbl_len.min(MAX_GIDS)),
            max_msg_sz: a.max_msg_sz,
            link_layer,
            lid: a.lid,
            lmc: a.lmc,
            sm_lid: a.sm_lid,
        })
    }

    /// The GIDs of a port, index by index; empty ones keep their place.
    fn gids(&self, port: u8, layer: LinkLayer, len: c_int) -> Vec<GidEntry> {
        let mut gids: Vec<GidEntry> =
            (0..len).map(|index| self.gid_entry(port, layer, index)).collect();
        while gids.last().is_some_and(|entry| entry.gid == Gid::default()) {
            gids.pop();
        }
        gids
    }

    /// The GID at an index of a port's table, if there is one.
    pub fn gid(&self, port: u8, index: u8) -> Option<Gid> {
        // Of which type it is is not asked for here.
        let gid = self.gid_entry(port, LinkLayer::Ethernet, index.into()).gid;
        Some(gid).filter(|gid| *gid != Gid::default())
    }

    fn gid_entry(&self, port: u8, layer: LinkLayer, index: c_int) -> GidEntry {
        let mut gid = ibv_gid { raw: [0; 16] };
        let mut kind = 0;
        // SAFETY: an open context and a live local.
        let found = unsafe { self.library.query_gid(self.raw(), port, index, &mut gid) == 0 };
        // SAFETY: all bytes are there, whichever part was written.
        let mut gid = if found { Gid(unsafe { gid.raw }) } else { Gid::default() };
        // SAFETY: as above. Most entries of a table are empty, and need no second question.
        let typed = gid != Gid::default()
            && unsafe { self.library.query_gid_type(self.raw(), port, index as u32, &mut kind) }
                == 0;
        if !typed {
            gid = Gid::default();
        }
        let kind = match (layer, kind) {
            (LinkLayer::Infiniband, _) => GidType::Infiniband,
            (_, IBV_GID_TYPE_SYSFS_ROCE_V2) => GidType::RoceV2,
            _ => GidType::RoceV1,
        };
        GidEntry { gid, kind }
    }
}

/// The extended verbs around a context, where it has them. Those that this version of the library
/// does not know are empty in what is given.
///
/// # Safety
/// `context` is open.
unsafe fn verbs_of(context: *mut ibv_context) -> Option<verbs_context> {
    // SAFETY: promised by the caller.
    if unsafe { (*context).abi_compat } as usize != usize::MAX {
        return None;
    }
    let offset = std::mem::offset_of!(verbs_context, context);
    // SAFETY: the context lies in a verbs_context, whose last fields are the same in all versions.
    let known = unsafe {
        *context.cast::<u8>().sub(offset - std::mem::offset_of!(verbs_context, sz)).cast::<usize>()
    };
    let known = known.min(size_of::<verbs_context>());
    // SAFETY: integers, null pointers, empty slots.
    let mut verbs: verbs_context = unsafe { zeroed() };
    let skipped = size_of::<verbs_context>() - known;
    // SAFETY: the structure grows downward: its last `known` bytes are there, and are plain data.
    unsafe {
        let end = context.cast::<u8>().sub(offset).add(skipped);
        (&raw mut verbs).cast::<u8>().add(skipped).copy_from_nonoverlapping(end, known);
    }
    Some(verbs)
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: everything that was made of it is gone: each object holds the context.
        unsafe { self.library.close_device(self.raw()) };
    }
}
