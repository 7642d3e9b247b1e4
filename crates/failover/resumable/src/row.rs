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

/// Flags that a send may have and be usual.
const USUAL_FLAGS: u32 = SendFlags::FENCE.0 | SendFlags::SIGNALED.0 | SendFlags::SOLICITED.0;
/// Opcodes up to this one, as C has them, need no more than a row.
const LAST_USUAL: u32 = SendOpcode::Read as u32;
/// A bit for each of them that consumes a receive of the peer.
const CONSUMERS: u32 = 1 << SendOpcode::WriteImm as u32
    | 1 << SendOpcode::Send as u32
    | 1 << SendOpcode::SendImm as u32;

/// Whether a row has all of a request, or will where its only entry is inline data.
#[inline(always)]
pub(crate) fn is_usual(wr: &ibv_send_wr) -> bool {
    let others = wr.send_flags & !(USUAL_FLAGS | SendFlags::INLINE.0);
    wr.opcode as u32 <= LAST_USUAL && others == 0 && wr.num_sge == 1
}

/// Whether a request asks for its data to be copied.
#[inline(always)]
pub(crate) fn is_inline(wr: &ibv_send_wr) -> bool {
    wr.send_flags & SendFlags::INLINE.0 != 0
}

/// 1 where a usual request consumes a receive of the peer.
#[inline(always)]
pub(crate) fn consumes_receive(wr: &ibv_send_wr) -> u32 {
    CONSUMERS >> wr.opcode as u32 & 1
}

/// Whether a completion was asked for.
#[inline(always)]
pub(crate) fn is_signaled(wr: &ibv_send_wr) -> bool {
    wr.send_flags & SendFlags::SIGNALED.0 != 0
}

impl ProviderRow {
    /// Copies a usual request of the program, under that number, the last of its list. False: its
    /// only entry is longer than a message, and the row is to be written anew.
    ///
    /// # Safety
    /// The request has one entry, which is there.
    #[inline(always)]
    pub(crate) unsafe fn copy(&mut self, number: u64, wr: &ibv_send_wr) -> bool {
        // SAFETY: promised by the caller.
        self.sge = unsafe { *wr.sg_list };
        self.copy_head(number, wr);
        self.marks = Marks::USUAL;
        u64::from(self.sge.length) <= MAX_MESSAGE_BYTES
    }

    /// The same of one whose data was copied.
    pub(crate) fn copy_inline(&mut self, number: u64, wr: &ibv_send_wr, data: Sge) {
        self.sge = data;
        self.copy_head(number, wr);
        self.marks = Marks { count: data.length as u16, beside: true, ..Marks::USUAL };
    }

    #[inline(always)]
    fn copy_head(&mut self, number: u64, wr: &ibv_send_wr) {
        let head = &mut self.head;
        (head.wr_id, head.next) = (number, null_mut());
        (head.sg_list, head.num_sge) = (&raw mut self.sge, 1);
        (head.opcode, head.send_flags, head.imm_data) = (wr.opcode, wr.send_flags, wr.imm_data);
        head.wr = wr.wr;
        self.wr_id = wr.wr_id;
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
        marks: Marks { count: 0, beside: false, started: false, executed: false },
    };

    #[inline(always)]
    fn write(&mut self, wr: &SendWr<'_>, sge: Sge, marks: Marks) {
        self.head.opcode = wr.opcode as c_int;
        (self.head.send_flags, self.head.imm_data) = (wr.flags.0, wr.imm_data);
        self.head.wr.rdma = ibv_wr_rdma { remote_addr: wr.remote_addr, rkey: wr.rkey };
        (self.sge, self.wr_id, self.marks) = (sge, wr.wr_id, marks);
    }

    fn wr(&self) -> SendWr<'_> {
        // SAFETY: written as such, or as a SEND's, for which the program may have written anything
        // or nothing: integers, none of which its opcode reads.
        let rdma = unsafe { self.head.wr.rdma };
        SendWr {
            wr_id: self.wr_id,
            opcode: self.opcode(),
            flags: self.flags(),
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
        // Written from one, or where it was found to be a usual one.
        SendOpcode::from_code(self.head.opcode as u32).unwrap_or(SendOpcode::Write)
    }

    #[inline]
    fn flags(&self) -> SendFlags {
        SendFlags(self.head.send_flags)
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
