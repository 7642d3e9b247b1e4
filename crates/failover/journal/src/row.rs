//! How one send is kept: what a journal is generic over.

use unbroken_types::{SendFlags, SendOpcode, SendWr, Sge};

/// A send as a journal keeps it. Almost every send has one scatter/gather entry and no operands:
/// then its row has all of it. What others have besides lies beside the ring ([`Marks::beside`]).
///
/// [`PlainRow`] is the one of tests and of the simulator. Over a provider the row *is* the
/// provider's work request, so that a post copies it once.
pub trait SendRow: Clone {
    /// A row that nothing was written to.
    const EMPTY: Self;

    /// Writes what every send has (number, opcode, flags, immediate, remote address and key), the
    /// only entry of its list, where it has one, and what is noted of it.
    fn write(&mut self, wr: &SendWr<'_>, sge: Sge, marks: Marks);

    /// The send as it was posted, as far as the row has it: with that entry, and without operands.
    fn wr(&self) -> SendWr<'_>;

    /// The number that the application gave it.
    fn wr_id(&self) -> u64;

    /// What it does.
    fn opcode(&self) -> SendOpcode;

    /// The flags that the application gave it.
    fn flags(&self) -> SendFlags;

    /// What the journal notes of it.
    fn marks(&self) -> &Marks;

    /// The same, to be changed.
    fn marks_mut(&mut self) -> &mut Marks;
}

/// What a journal notes of a send.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Marks {
    /// Entries of its list, or bytes of its inline data, that lie beside the ring.
    pub count: u16,
    /// It has such.
    pub beside: bool,
    /// Some packet of it may have left.
    pub started: bool,
    /// The peer has executed it.
    pub executed: bool,
}

impl Marks {
    /// Those of a send that its row has all of, and that the provider is given at once.
    pub const USUAL: Marks = Marks { count: 0, beside: false, started: true, executed: false };
}

/// A send in one cache line.
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
