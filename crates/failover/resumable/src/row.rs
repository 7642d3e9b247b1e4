//! The row of a journal that is the provider's work request: a post copies the program's request
//! there once, and the provider reads the row.
//!
//! Of C's `ibv_send_wr` a row has all up to the operands. What lies behind (a memory window's
//! binding, the header of a segmented packet) belongs to opcodes that no journal records; a provider
//! that copies the whole structure finds the row's own fields there.

use std::ffi::c_int;
use std::mem::{offset_of, MaybeUninit};
use std::ptr::null_mut;
use unbroken_journal::{Marks, SendRow};
use unbroken_types::{SendFlags, SendOpcode, SendWr, Sge, MAX_MESSAGE_BYTES};
use unbroken_verbs::abi::{ibv_send_wr, ibv_wr_part, ibv_wr_rdma};

/// The head of an `ibv_send_wr`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Head {
    wr_id: u64,
    next: *mut ibv_send_wr,
    sg_list: *mut Sge,
    num_sge: c_int,
    opcode: c_int,
    send_flags: u32,
    imm_data: u32,
    wr: ibv_wr_part,
    qp_type: u32,
}

/// See the module's text.
#[repr(C, align(64))]
#[derive(Clone)]
pub(crate) struct ProviderRow {
    head: Head,
    sge: Sge,
    /// The program's.
    wr_id: u64,
    flags: SendFlags,
    opcode: SendOpcode,
    marks: Marks,
}

const _: () = {
    assert!(size_of::<ProviderRow>() >= size_of::<ibv_send_wr>());
    assert!(offset_of!(ProviderRow, head) == 0);
    assert!(offset_of!(Head, next) == offset_of!(ibv_send_wr, next));
    assert!(offset_of!(Head, sg_list) == offset_of!(ibv_send_wr, sg_list));
    assert!(offset_of!(Head, num_sge) == offset_of!(ibv_send_wr, num_sge));
    assert!(offset_of!(Head, opcode) == offset_of!(ibv_send_wr, opcode));
    assert!(offset_of!(Head, send_flags) == offset_of!(ibv_send_wr, send_flags));
    assert!(offset_of!(Head, imm_data) == offset_of!(ibv_send_wr, imm_data));
    assert!(offset_of!(Head, wr) == offset_of!(ibv_send_wr, wr));
    assert!(offset_of!(Head, qp_type) == offset_of!(ibv_send_wr, qp_type));
};

// SAFETY: its pointers lead into the row itself and to others of its ring; they are used by who
// writes it, under the lock that everything of the ring is changed under.
unsafe impl Send for ProviderRow {}
// SAFETY: as above: nothing is reached through a shared row.
unsafe impl Sync for ProviderRow {}

/// What the journal counts of a send.
#[derive(Clone, Copy)]
pub(crate) struct Taken {
    pub(crate) consumes_receive: bool,
    pub(crate) signaled: bool,
}

/// Flags that a send may have and be usual.
const USUAL_FLAGS: u32 = SendFlags::FENCE.0 | SendFlags::SIGNALED.0 | SendFlags::SOLICITED.0;
/// Opcodes up to this one, as C has them, need no more than a row: WRITE, WRITE with immediate,
/// SEND, SEND with immediate, READ.
const LAST_USUAL: u32 = SendOpcode::Read as u32;
/// A bit for each of them that consumes a receive of the peer.
const CONSUMERS: u32 = 1 << SendOpcode::WriteImm as u32
    | 1 << SendOpcode::Send as u32
    | 1 << SendOpcode::SendImm as u32;

/// Whether the row has all of a request, or its one entry is inline data.
#[inline(always)]
pub(crate) fn is_usual(wr: &ibv_send_wr, inline: bool) -> bool {
    let flags = if inline { USUAL_FLAGS | SendFlags::INLINE.0 } else { USUAL_FLAGS };
    wr.opcode as u32 <= LAST_USUAL && wr.send_flags & !flags == 0 && wr.num_sge == 1
}

/// Whether a request asks for its data to be copied.
#[inline(always)]
pub(crate) fn is_inline(wr: &ibv_send_wr) -> bool {
    wr.send_flags & SendFlags::INLINE.0 != 0
}

impl ProviderRow {
    /// Writes a usual request of the program, under that number, the last of its list. None: it is
    /// too long.
    #[inline(always)]
    pub(crate) fn write(&mut self, number: u64, wr: &ibv_send_wr, sge: Sge) -> Option<Taken> {
        if u64::from(sge.length) > MAX_MESSAGE_BYTES {
            return None;
        }
        let opcode = wr.opcode as u32;
        self.sge = sge;
        self.head = Head {
            wr_id: number,
            next: null_mut(),
            sg_list: &raw mut self.sge,
            num_sge: 1,
            opcode: wr.opcode,
            send_flags: wr.send_flags,
            imm_data: wr.imm_data,
            wr: wr.wr,
            qp_type: 0,
        };
        self.wr_id = wr.wr_id;
        self.flags = SendFlags(wr.send_flags);
        self.opcode = SendOpcode::from_code(opcode).unwrap_or(SendOpcode::Write);
        self.marks = Marks::USUAL;
        Some(Taken {
            consumes_receive: CONSUMERS >> opcode & 1 != 0,
            signaled: wr.send_flags & SendFlags::SIGNALED.0 != 0,
        })
    }

    /// The data of the request lies there, beside the row.
    pub(crate) fn set_inline(&mut self, data: *const u8, bytes: u16) {
        self.marks = Marks { count: bytes, beside: true, ..Marks::USUAL };
        self.sge = Sge { addr: data as u64, length: bytes.into(), lkey: 0 };
    }

    /// What the provider is given.
    #[inline(always)]
    pub(crate) fn raw(&mut self) -> *mut ibv_send_wr {
        std::ptr::from_mut(self).cast()
    }
}

impl SendRow for ProviderRow {
    const EMPTY: ProviderRow = ProviderRow {
        head: Head {
            wr_id: 0,
            next: null_mut(),
            sg_list: null_mut(),
            num_sge: 0,
            opcode: 0,
            send_flags: 0,
            imm_data: 0,
            // SAFETY: integers, of which any may be zero.
            wr: unsafe { MaybeUninit::zeroed().assume_init() },
            qp_type: 0,
        },
        sge: Sge { addr: 0, length: 0, lkey: 0 },
        wr_id: 0,
        flags: SendFlags(0),
        opcode: SendOpcode::Send,
        marks: Marks { count: 0, beside: false, started: false, executed: false },
    };

    fn of(wr: &SendWr<'_>) -> ProviderRow {
        let rdma = ibv_wr_rdma { remote_addr: wr.remote_addr, rkey: wr.rkey };
        let mut row = ProviderRow::EMPTY;
        row.head.imm_data = wr.imm_data;
        row.head.wr.rdma = rdma;
        (row.wr_id, row.flags, row.opcode) = (wr.wr_id, wr.flags, wr.opcode);
        row
    }

    fn set_sge(&mut self, sge: Sge) {
        self.sge = sge;
    }

    fn wr(&self) -> SendWr<'_> {
        // SAFETY: written as such, or as a SEND's, for which the program may have written anything
        // or nothing: integers, none of which its opcode reads.
        let rdma = unsafe { self.head.wr.rdma };
        SendWr {
            wr_id: self.wr_id,
            opcode: self.opcode,
            flags: self.flags,
            imm_data: self.head.imm_data,
            remote_addr: rdma.remote_addr,
            rkey: rdma.rkey,
            compare_add: 0,
            swap: 0,
            sges: std::slice::from_ref(&self.sge),
            inline_data: None,
            ud: None,
        }
    }

    #[inline]
    fn wr_id(&self) -> u64 {
        self.wr_id
    }

    #[inline]
    fn opcode(&self) -> SendOpcode {
        self.opcode
    }

    #[inline]
    fn flags(&self) -> SendFlags {
        self.flags
    }

    #[inline]
    fn marks(&self) -> &Marks {
        &self.marks
    }

    #[inline]
    fn marks_mut(&mut self) -> &mut Marks {
        &mut self.marks
    }
}
