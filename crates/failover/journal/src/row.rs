//! The row of one send. A journal is generic over it.

use unbroken_types::{SendFlags, SendOpcode, SendWr, Sge};

/// A recorded send. Almost every send has one scatter/gather entry and no operands, and fits its row.
/// More entries, inline data and operands lie beside the ring ([`Marks::beside`]).
///
/// Tests and the simulator use [`PlainRow`]. Over a provider, the row *is* the provider's work
/// request, so a post copies it once.
pub trait SendRow: Clone {
    /// An unused row.
    const EMPTY: Self;

    /// Records a send: its number, opcode, flags, immediate, remote address and key, its single
    /// scatter/gather entry (zeros if the list lies beside), and the journal's marks.
    fn write(&mut self, wr: &SendWr<'_>, sge: Sge, marks: Marks);

    /// The send as posted, with the row's single entry and without operands.
    fn wr(&self) -> SendWr<'_>;

    /// The application's `wr_id`.
    fn wr_id(&self) -> u64;

    /// The opcode.
    fn opcode(&self) -> SendOpcode;

    /// The application's send flags.
    fn flags(&self) -> SendFlags;

    /// The journal's marks.
    fn marks(&self) -> &Marks;

    /// The journal's marks, mutable.
    fn marks_mut(&mut self) -> &mut Marks;
}

/// The state of a send that only the journal knows.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Marks {
    /// Scatter/gather entries, or bytes of inline data, that lie beside the ring.
    pub count: u16,
    /// The entries or the inline data lie beside the ring.
    pub beside: bool,
    /// A packet of the send may have left.
    pub started: bool,
    /// The peer has executed the send.
    pub executed: bool,
}

impl Marks {
    /// A send that fits its row and goes to the provider at once.
    pub const USUAL: Marks = Marks { count: 0, beside: false, started: true, executed: false };
}

/// A row of one cache line.
#[derive(Clone, Copy)]
pub struct PlainRow {
    wr_id: u64,
    remote_addr: u64,
    sge: Sge,
    rkey: u32,
    imm_data: u32,
    flags: SendFlags,
    opcode: SendOpcode,
    marks: Marks,
}

const _: () = assert!(size_of::<PlainRow>() <= 64);

impl SendRow for PlainRow {
    const EMPTY: PlainRow = PlainRow {
        wr_id: 0,
        remote_addr: 0,
        sge: Sge { addr: 0, length: 0, lkey: 0 },
        rkey: 0,
        imm_data: 0,
        flags: SendFlags(0),
        opcode: SendOpcode::Send,
        marks: Marks { count: 0, beside: false, started: false, executed: false },
    };

    #[inline(always)]
    fn write(&mut self, wr: &SendWr<'_>, sge: Sge, marks: Marks) {
        *self = PlainRow {
            wr_id: wr.wr_id,
            remote_addr: wr.remote_addr,
            sge,
            rkey: wr.rkey,
            imm_data: wr.imm_data,
            flags: wr.flags,
            opcode: wr.opcode,
            marks,
        };
    }

    fn wr(&self) -> SendWr<'_> {
        SendWr {
            wr_id: self.wr_id,
            opcode: self.opcode,
            flags: self.flags,
            imm_data: self.imm_data,
            remote_addr: self.remote_addr,
            rkey: self.rkey,
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
