//! The device: plain verbs ([`Device`], [`DeviceQp`]), and what some devices can do beyond them
//! ([`Capabilities`]).
//!
//! *Plain verbs.* A failed QP goes to ERR and flushes; protection domains, keys, CQs and SRQs
//! belong to their device; sends are posted in RTS; a dying device may accept a post and flush it
//! late, or refuse it with any errno.
//!
//! *Holding.* A [`ResumableQp`] made with `suspend_on_error` is the building block of a logical QP.
//! When the network or the NIC fails it, it stops and keeps its work requests: no flush completions
//! appear. The device tells so by [`DeviceEvent::QpFailed`]. Whoever holds it then either calls
//! [`ResumableQp::quiesce`] and moves the [`Backlog`] to a QP of another device, or
//! [`ResumableQp::fail`], which completes everything with the original error as a plain QP would
//! have done. Errors that are the application's own (access, length, protection, RNR) are delivered
//! as on any QP. Where a device cannot do that, it is done above it, by a journal.

use crate::abi::{ibv_qp, PostRecv, PostSend};
use crate::{
    Backlog, Carrier, CompChannel, Cq, Error, Lane, LimitHook, ListResult, OverrunHook, PortAttr,
    RcModify, RecvWr, RemoteKeys, Result, SendBatch, SendWr, Srq, SrqAttr, Translation,
};
use std::os::fd::RawFd;
use std::sync::Arc;
use unbroken_types::{
    Access, Gid, PathAttr, PdHandle, Progress, QpCaps, QpState, QpType, UdDest, WcStatus,
};

/// Keys of a registered region.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MrKeys {
    /// For local scatter/gather entries.
    pub lkey: u32,
    /// For the peer.
    pub rkey: u32,
}

/// What `ibv_rereg_mr` changes of a region; `None` leaves it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct MrChange {
    /// Address and length. The network then knows the region by this address, or from 0 on if it is
    /// zero-based.
    pub range: Option<(u64, u64)>,
    /// Protection domain.
    pub pd: Option<PdHandle>,
    /// Rights.
    pub access: Option<Access>,
}

/// A piece of an indirect key: `len` bytes at `addr` of a region, or `len` bytes of nothing (the
/// null region's key).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct IndirectEntry {
    /// The region's local key.
    pub lkey: u32,
    /// Where in the region, as the region counts.
    pub addr: u64,
    /// Bytes.
    pub len: u64,
}

/// Types of memory windows (`enum ibv_mw_type`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WindowType {
    /// For every QP of its protection domain; the device chooses its keys.
    One = 1,
    /// For the QP that bound it; the application chooses the lower eight bits of its keys.
    Two = 2,
}

/// Protection domains and memory regions. Devices that share one (all softnics of a process do)
/// accept each other's keys.
pub trait MemoryDomain: Send + Sync {
    /// Makes a protection domain.
    fn alloc_pd(&self) -> Result<PdHandle>;
    /// Ends a protection domain; EBUSY while something uses it.
    fn dealloc_pd(&self, pd: PdHandle) -> Result<()>;
    /// Counts a user of a protection domain (a QP, an SRQ; regions count themselves); EINVAL where
    /// there is no such domain.
    fn use_pd(&self, pd: PdHandle) -> Result<()>;
    /// Takes back one [`MemoryDomain::use_pd`].
    fn unuse_pd(&self, pd: PdHandle);
    /// Registers `len` bytes at `addr`, which the network knows as `iova`, or from 0 on with
    /// [`Access::ZERO_BASED`].
    fn reg_mr(
        &self,
        pd: PdHandle,
        addr: u64,
        len: u64,
        iova: u64,
        access: Access,
    ) -> Result<MrKeys>;
    /// Registers `len` bytes from `offset` on of what is behind a dma-buf's descriptor (a GPU's
    /// memory), which the network knows as `iova`. The descriptor stays the caller's. EOPNOTSUPP
    /// where the device has no dma-bufs; EBADF where it has, and the descriptor is none.
    fn reg_dmabuf_mr(
        &self,
        _pd: PdHandle,
        _fd: RawFd,
        _offset: u64,
        _len: u64,
        _iova: u64,
        _access: Access,
    ) -> Result<MrKeys> {
        Err(Error::unsupported("regions of dma-bufs are not there on this device"))
    }
    /// Changes a region; its keys stay. When it returns, nothing from the network touches what it
    /// was before. An error changes nothing.
    fn rereg_mr(&self, lkey: u32, change: &MrChange) -> Result<()>;
    /// Ends a region, a null region or an indirect key; EBUSY while windows are bound to it. When
    /// it returns, nothing from the network touches the memory any more, on any device of the
    /// domain.
    fn dereg_mr(&self, lkey: u32) -> Result<()>;
    /// Makes a null region and gives its local key: at any address, what is written is dropped and
    /// what is read is zero.
    fn alloc_null_mr(&self, pd: PdHandle) -> Result<u32>;
    /// Makes a key whose bytes, from `iova` on, are those of the entries one behind the other. A
    /// peer needs the rights in `access`; the entries' regions must be of the same domain and allow
    /// local use. A region that is deregistered takes its entries out of use: what touches them
    /// fails. Ended by [`MemoryDomain::dereg_mr`].
    fn create_indirect(
        &self,
        pd: PdHandle,
        iova: u64,
        entries: &[IndirectEntry],
        access: Access,
    ) -> Result<MrKeys>;
    /// Replaces an entry of an indirect key, while packets arrive, by one that is not longer than
    /// the place that the key was made with; the rest of the place is then nobody's: what touches
    /// it fails. When it returns, nothing from the network touches what the old entry named by this
    /// key any more.
    fn update_entry(&self, key: u32, index: u32, entry: &IndirectEntry) -> Result<()>;
    /// Makes a memory window, not bound yet, and gives the key that it has. It is bound by a WR
    /// ([`unbroken_types::MwBind`]).
    fn alloc_window(&self, pd: PdHandle, kind: WindowType) -> Result<u32>;
    /// Ends a window, bound or not, whatever its key is by now.
    fn dealloc_window(&self, rkey: u32) -> Result<()>;
}

/// What a device tells its owner without being asked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DeviceEvent {
    /// The device is gone (IBV_EVENT_DEVICE_FATAL). It does not come back under this handle; it may
    /// be opened again.
    Fatal,
    /// This port, from 1, lost its link (IBV_EVENT_PORT_ERR).
    PortDown(u8),
    /// This port has its link again, or a dead device can be opened again (IBV_EVENT_PORT_ACTIVE).
    PortActive(u8),
    /// Something of this port, from 1, has changed.
    PortChanged(u8, PortEvent),
    /// A QP made with `suspend_on_error` stopped, for this network-class reason.
    QpFailed {
        /// Its QPN on the device.
        qpn: u32,
        /// What a plain QP would have reported.
        status: WcStatus,
    },
    /// Something has come for a QP made with `suspend_on_error` that its owner finds by
    /// [`ResumableQp::progress`]: the program may poll nothing until it hears of it.
    QpChanged {
        /// Its QPN on the device.
        qpn: u32,
    },
    /// A CQ of the device has lost completions: [`Device::find_overruns`] says whose.
    CqOverran,
    /// A datagram came from a UD QP that has moved, nobody knows from where: the table of
    /// [`crate::UdAliases`] is to be read again.
    UnknownSender,
    /// An asynchronous event of a QP.
    Qp {
        /// Its QPN on the device.
        qpn: u32,
        /// Which.
        event: QpEvent,
    },
}

/// Asynchronous events of a port that mean nothing to failover (`enum ibv_event_type`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum PortEvent {
    /// IBV_EVENT_PORT_ACTIVE, of a port that failover does not use.
    Active = 9,
    /// IBV_EVENT_PORT_ERR, of such a port.
    Error = 10,
    /// IBV_EVENT_LID_CHANGE.
    LidChange = 11,
    /// IBV_EVENT_PKEY_CHANGE.
    PkeyChange = 12,
    /// IBV_EVENT_SM_CHANGE.
    SmChange = 13,
    /// IBV_EVENT_CLIENT_REREGISTER.
    ClientReregister = 17,
    /// IBV_EVENT_GID_CHANGE.
    GidChange = 18,
}

/// Asynchronous events of a QP (`enum ibv_event_type`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum QpEvent {
    /// IBV_EVENT_QP_FATAL.
    Fatal = 1,
    /// IBV_EVENT_QP_REQ_ERR.
    RequestError = 2,
    /// IBV_EVENT_QP_ACCESS_ERR.
    AccessError = 3,
    /// IBV_EVENT_COMM_EST.
    CommEstablished = 4,
    /// IBV_EVENT_SQ_DRAINED.
    SqDrained = 5,
    /// IBV_EVENT_PATH_MIG.
    PathMigrated = 6,
    /// IBV_EVENT_PATH_MIG_ERR.
    PathMigrationFailed = 7,
    /// IBV_EVENT_QP_LAST_WQE_REACHED.
    LastWqeReached = 16,
}

/// Where a device's events go. Called with the device's locks held: it may queue and wake, never
/// call back into the device.
pub trait EventSink: Send + Sync {
    /// Takes an event of the device of that index.
    fn event(&self, device: usize, event: DeviceEvent);
}

/// How to make a QP.
#[derive(Clone)]
pub struct QpInit {
    /// Transport.
    pub qp_type: QpType,
    /// Queue sizes.
    pub caps: QpCaps,
    /// Protection domain.
    pub pd: PdHandle,
    /// Completions of sends.
    pub send_cq: Arc<Cq>,
    /// Completions of receives.
    pub recv_cq: Arc<Cq>,
    /// Where receives are taken from, in place of a queue of its own; the sizes of that do not
    /// count then.
    pub srq: Option<Arc<Srq>>,
    /// Every send makes a WC.
    pub sq_sig_all: bool,
    /// Stop and keep the work requests on a failure of the network, see the module's text.
    pub suspend_on_error: bool,
    /// The QPN that WCs carry; the QP's own if none.
    pub wc_qpn: Option<u32>,
    /// UD: it is a later life of a QP, whose peers know it by this GID and the QPN `wc_qpn`;
    /// datagrams to it show this destination.
    pub home: Option<Gid>,
    /// The NIC, by its index, whose contexts' local keys its work requests have; its own if none.
    /// Where keys are good on every NIC it says nothing.
    pub local_keys_of: Option<u8>,
    /// It carries messages of failover itself, which are not counted as data of the application.
    pub control: bool,
    /// It is made ahead of its use: nobody polls for it and it is lent no receive of an SRQ before
    /// [`ResumableQp::adopt`].
    pub standby: bool,
    /// The way of posts to what carries the logical QP whose life it is; none of a QP that posts
    /// reach by [`DeviceQp`] alone.
    pub lane: Option<Arc<Lane>>,
    /// UD: it takes management datagrams, so its number is that which peers send them to, where no
    /// other of the process has it.
    pub management: bool,
}

/// A change of a QP; `None` leaves a field as it is.
#[derive(Clone, Debug, Default)]
pub struct QpModify {
    /// The transport's attributes.
    pub rc: RcModify,
    /// UD: the key that datagrams must carry.
    pub qkey: Option<u32>,
    /// To SQD: whether there is to be an event when the send queue is drained.
    pub sqd_notify: Option<bool>,
    /// The port that packets leave through, from 1; 1 at first. As in verbs it is a value of its
    /// own, set before there is a path.
    pub port: Option<u8>,
    /// RC and UC: the path to the peer (at RTR), which replaces all of the one before. Packets
    /// leave through `port`, whatever this says.
    pub path: Option<PathAttr>,
    /// RC: the alternate path; its local ACK timeout is [`RcModify::alternate`]. Both are given, or
    /// neither.
    pub alternate: Option<PathAttr>,
    /// UC: the network loses what a receiver has no room or no receive for, as a real one does.
    /// Both ends say so, or neither. Only an emulated network knows anything else.
    pub lossy: Option<bool>,
}

/// What `ibv_query_qp` asks.
#[derive(Clone, Debug, Default)]
pub struct QpSnapshot {
    /// All attributes with their present values.
    pub attrs: QpModify,
    /// Queue sizes.
    pub caps: QpCaps,
    /// In SQD: the send queue has not come to its rest yet.
    pub sq_draining: bool,
}

/// Traffic of one device in this process since it was opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct DeviceCounters {
    /// Bytes sent, headers included.
    pub tx_bytes: u64,
    /// Bytes received, headers included.
    pub rx_bytes: u64,
}

/// What a device can do beyond plain verbs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Capabilities {
    /// Its QPs hold their work on a failure and count exactly: [`Device::create_holding_qp`].
    pub holds: bool,
    /// Protection domains, keys, CQs and SRQs are the process's: those of one such device are good
    /// on every other.
    pub shared_objects: bool,
    /// Indirect keys: [`MemoryDomain::create_indirect`].
    pub indirect_keys: bool,
    /// Memory windows: [`MemoryDomain::alloc_window`].
    pub windows: bool,
    /// Not all of its QPs can invalidate a key ([`SendOpcode::LocalInv`]; rxe has that for RC alone):
    /// a window is taken off what it is bound to by freeing it, which any device can.
    ///
    /// [`SendOpcode::LocalInv`]: unbroken_types::SendOpcode::LocalInv
    pub frees_windows: bool,
    /// To make, change or destroy a QP takes its firmware's or its kernel's time: what a switch
    /// needs is better made ahead ([`QpInit::standby`]).
    pub slow_control: bool,
}

/// A NIC.
pub trait Device: Send + Sync {
    /// What it can do beyond plain verbs.
    fn capabilities(&self) -> Capabilities;
    /// Its name in events and status: `a/0` in a fabric, the address elsewhere.
    fn name(&self) -> &str;
    /// The GID by which peers reach port 1.
    fn gid(&self) -> Gid;
    /// Its index in the port's table.
    fn gid_index(&self) -> u8;
    /// Whether a peer can be named as one to send to over that path; EINVAL where it cannot. That
    /// packets get there is not said by this.
    fn check_path(&self, path: &PathAttr) -> Result<()>;
    /// State and addresses of a port, counted from 1.
    fn port(&self, port: u8) -> Result<PortAttr>;
    /// Whether the device still works at all (not fatal).
    fn alive(&self) -> bool;
    /// Whether the kernel has taken it away, and may wait until it is closed.
    fn removed(&self) -> bool {
        false
    }
    /// Whether a packet sent now through port 1 could leave: alive and that port up.
    fn usable(&self) -> bool;
    /// Takes in what has arrived so far, in the caller's thread, and waits for whoever is at work
    /// on the device: when it returns, nothing that had arrived before the call waits unseen
    /// because threads had no core. A device that works by itself has nothing to do.
    fn drain(&self);
    /// Looks for CQs that have overrun where nobody polls, and for messages that the limit of an SRQ
    /// counts. To be called now and then; it costs nothing where no CQ can overrun unseen and no
    /// limit is armed, as on devices that complete in the program's own CQs.
    fn find_overruns(&self) {}
    /// PDs and MRs.
    fn memory(&self) -> Arc<dyn MemoryDomain>;
    /// Makes a completion channel. Only CQs of this device raise events there, unless its objects
    /// are shared.
    fn create_channel(&self) -> Result<Arc<CompChannel>>;
    /// Makes a completion queue, with a channel or without. Only QPs of this device complete there,
    /// unless its objects are shared.
    fn create_cq(
        &self,
        entries: u32,
        channel: Option<Arc<CompChannel>>,
        on_overrun: OverrunHook,
    ) -> Result<Arc<Cq>>;

    /// [`Self::create_cq`] whose events come by that completion vector, counted from 0 and modulo
    /// as many as the device has: which CPU takes its interrupts. Ignored where there are none.
    fn create_cq_on(
        &self,
        _vector: u32,
        entries: u32,
        channel: Option<Arc<CompChannel>>,
        on_overrun: OverrunHook,
    ) -> Result<Arc<Cq>> {
        self.create_cq(entries, channel, on_overrun)
    }
    /// Makes a shared receive queue. Only QPs of this device take from it, unless its objects are
    /// shared.
    fn create_srq(&self, pd: PdHandle, sizes: SrqAttr, on_limit: LimitHook) -> Result<Arc<Srq>>;
    /// Makes a QP. One that is to hold its work comes from [`Device::create_holding_qp`].
    fn create_qp(&self, init: &QpInit) -> Result<Arc<dyn DeviceQp>>;
    /// Makes a QP that can be stopped and moved, where the device can ([`Capabilities::holds`]);
    /// EOPNOTSUPP elsewhere.
    fn create_holding_qp(&self, init: &QpInit) -> Result<Arc<dyn ResumableQp>>;
    /// Traffic so far.
    fn counters(&self) -> DeviceCounters;
    /// What has been left and still has to end.
    fn leftovers(&self) -> Leftovers {
        Leftovers::default()
    }
}

/// What a device has of QPs that nobody uses any more.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Leftovers {
    /// Commands, such as the end of a QP, that the device has not answered yet.
    pub unanswered: u32,
    /// QPs that the device refused to destroy. They are kept until the process ends.
    pub undestroyed: u32,
    /// It has not answered a command for so long that it counts as one that does not.
    pub is_stuck: bool,
}

/// A physical QP. All methods may be called from any thread.
pub trait DeviceQp: Send + Sync {
    /// The QPN.
    fn qpn(&self) -> u32;
    /// Posts a send.
    fn post_send(&self, wr: &SendWr<'_>) -> Result<()>;
    /// Posts a send under another number than its own: whoever keeps what was posted need not copy
    /// it for that.
    fn post_send_as(&self, wr_id: u64, wr: &SendWr<'_>) -> Result<()> {
        self.post_send(&SendWr { wr_id, ..*wr })
    }
    /// Posts several sends: all or none.
    fn post_sends(&self, batch: &dyn SendBatch) -> Result<()>;
    /// Posts sends in order up to the first that cannot be posted: how many were before that one,
    /// and its error.
    fn post_list(&self, list: &[SendWr<'_>]) -> ListResult {
        for (before, wr) in list.iter().enumerate() {
            self.post_send(wr).map_err(|e| (before, e))?;
        }
        Ok(())
    }
    /// Posts a receive.
    fn post_recv(&self, wr: &RecvWr<'_>) -> Result<()>;
    /// UD, of failover's own messages: datagrams are about to go there. What is to be found out
    /// about the way is, by another thread, so that none of them waits.
    fn prepare(&self, _to: &UdDest) {}
    /// Changes state and attributes.
    fn modify(&self, change: &QpModify) -> Result<()>;
    /// Present attributes.
    fn query(&self) -> QpSnapshot;
    /// The present state. Of a device of the machine the one that was set last, where
    /// [`Self::ask_state`] asks the device.
    fn state(&self) -> QpState;
    /// The present state, as the device says it. It may take its time.
    fn ask_state(&self) -> QpState {
        self.state()
    }
    /// The provider's QP and its functions, where posts may go to them directly.
    fn raw(&self) -> Option<RawQp> {
        None
    }
    /// Ends the QP. Completions that nobody polled stay in its CQs where it is one life of a
    /// logical QP, which outlives it.
    fn destroy(&self);
}

/// A QP of a provider and its functions. Whoever calls them keeps the QP from being destroyed
/// meanwhile.
#[derive(Clone, Copy)]
pub struct RawQp {
    /// The provider's.
    pub qp: *mut ibv_qp,
    /// Posts sends.
    pub post_send: PostSend,
    /// Posts receives.
    pub post_recv: PostRecv,
}

// SAFETY: a provider's QP is good in every thread, and its functions have locks of their own.
unsafe impl Send for RawQp {}
// SAFETY: as above.
unsafe impl Sync for RawQp {}

/// A physical QP that can be stopped with exact progress, and whose work another can take over.
pub trait ResumableQp: DeviceQp {
    /// How far both halves are.
    fn progress(&self) -> Progress;
    /// [`Progress::advanced`] as of some microseconds ago, without waiting for whoever is at work
    /// on the device; `None` where it cannot be had so.
    fn pulse(&self) -> Option<u64> {
        None
    }
    /// Packets that it has taken for lost, or their answers, and sends again (not those for which
    /// the peer had no receive): with [`ResumableQp::pulse`] a measure of what its path loses.
    /// `None`: the device does not count, or not for each QP.
    fn lost(&self) -> Option<u64> {
        None
    }
    /// Goes on where it is, with all its retries: also where it has stopped because they were used
    /// up, in the same life, so that the peer knows what comes again and an atomic runs once. With
    /// `insists` it sends again soon and never gives up, until it is told to go on without. False:
    /// it cannot, and nothing has changed.
    fn go_on(&self, _insists: bool) -> bool {
        false
    }
    /// Stops the QP for ever and takes out what is outstanding. No later packet changes memory or
    /// completes a WR of it. EAGAIN: that is under way, and takes time; ask again.
    fn quiesce(&self) -> Result<Backlog>;
    /// Puts outstanding receives into a fresh QP (RESET, INIT or RTR), before one is posted to it;
    /// sends likewise, and only those that are not marked as executed are sent once it is in RTS;
    /// in SQD, those that have been started before.
    fn adopt(&self, backlog: Backlog) -> Result<()>;
    /// Changes state and attributes step by step. Nothing is sent before the last step: on its way
    /// to SQD by RTS a QP must not send what SQD holds back (above plain verbs it may, as there
    /// each step is one of its own). On an error the steps before stand.
    fn modify_all(&self, changes: &[QpModify]) -> Result<()> {
        changes.iter().try_for_each(|change| self.modify(change))
    }
    /// Sends that are posted from now on are known to be complete when they are
    /// ([`Progress::unannounced_sends`]). Nothing to do where all are.
    fn announce(&self) {}
    /// Completes the first outstanding send with `status` and flushes the rest; the QP is in the
    /// error state afterwards.
    fn fail(&self, status: WcStatus);
    /// Ends the QP, soon: nobody waits for the device. The application may end what the QP uses.
    fn retire(&self) {
        self.destroy();
    }
    /// What posts of its logical QP's lane go to. None: posts reach it by [`DeviceQp`] alone.
    fn carrier(&self) -> Option<Arc<dyn Carrier>> {
        None
    }
    /// Says by which keys the peer's memory is known on the peer's NIC that the QP is, or is about
    /// to be, connected to, where that is not the one whose keys the application has. Nothing to do
    /// where keys are good on every NIC.
    fn set_remote(&self, _remote: &RemoteNic) {}
}

/// The NIC of the peer that a QP is connected to, for the translation of remote keys.
#[derive(Clone)]
pub struct RemoteNic {
    /// What the peer has said of its keys.
    pub keys: Arc<RemoteKeys>,
    /// The NIC of the peer whose keys the application has: the default NIC of the peer's QP.
    pub default: u8,
    /// The NIC that it is connected to.
    pub nic: u8,
}

/// A key that no region has: what names no region shall fail as such, and not by chance be
/// another's.
pub const NO_REGION: u32 = 0;

impl RemoteNic {
    /// Whether its keys may be others than those that the application has.
    #[inline]
    pub fn matters(&self) -> bool {
        self.keys.matters(self.default, self.nic)
    }

    /// The key there of what the application has this key of. `None`: it is not known yet, and the
    /// peer will be asked.
    pub fn key(&self, rkey: u32) -> Option<u32> {
        if !self.matters() {
            return Some(rkey);
        }
        match self.keys.resolve(self.default, rkey, self.nic) {
            Translation::Key(rkey) => Some(rkey),
            Translation::Invalid => Some(NO_REGION),
            Translation::Wanted => None,
        }
    }
}
