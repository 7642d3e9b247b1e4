//! The 32 bits of immediate data that each packet carries: which message, which packet of it, and a
//! fragment of the user's own immediate.

/// How the immediate is split, from its highest bits on: message id, packet offset, user's
/// fragment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Split {
    id_bits: u8,
    offset_bits: u8,
    user_bits: u8,
}

/// Why a split is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "an immediate of {id} + {offset} + {user} bits; right are 32 in all, 1 to 16 for the message, \
     1 to 30 for the packet, and 0, 1, 2, 4 or 8 for the user, such as 10 + 18 + 4"
)]
pub struct SplitError {
    id: u8,
    offset: u8,
    user: u8,
}

/// The fields of an immediate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fields {
    /// The message's slot.
    pub slot: u32,
    /// The packet's place in its message.
    pub offset: u32,
    /// A fragment of the user's immediate.
    pub user: u32,
}

impl Default for Split {
    /// The paper's: 1,024 messages of 2^18 packets, and the user's immediate in eight parts.
    fn default() -> Split {
        Split { id_bits: 10, offset_bits: 18, user_bits: 4 }
    }
}

impl Split {
    /// So many bits for each.
    ///
    /// # Errors
    /// Where they are not 32 in all, or one of them is out of its range.
    pub fn new(id: u8, offset: u8, user: u8) -> Result<Split, SplitError> {
        let sum = u32::from(id) + u32::from(offset) + u32::from(user);
        let fits = sum == 32
            && (1..=16).contains(&id)
            && (1..=30).contains(&offset)
            && matches!(user, 0 | 1 | 2 | 4 | 8);
        match fits {
            true => Ok(Split { id_bits: id, offset_bits: offset, user_bits: user }),
            false => Err(SplitError { id, offset, user }),
        }
    }

    /// Bits for the message, the packet and the user.
    pub fn bits(self) -> [u8; 3] {
        [self.id_bits, self.offset_bits, self.user_bits]
    }

    /// Messages that can be told apart.
    pub fn messages(self) -> u32 {
        1 << self.id_bits
    }

    /// Packets of the longest message.
    pub fn packets(self) -> u32 {
        1 << self.offset_bits
    }

    /// Into how many parts the user's 32 bits are cut; 0 where the split has no room for any.
    pub fn fragments(self) -> u32 {
        match self.user_bits {
            0 => 0,
            bits => 32 / u32::from(bits),
        }
    }

    /// The immediate of a packet. Fields that are too large are cut off.
    #[inline]
    pub fn pack(self, fields: Fields) -> u32 {
        let low = |value: u32, bits: u8| u64::from(value) & ((1 << bits) - 1);
        let all = low(fields.slot, self.id_bits) << (self.offset_bits + self.user_bits)
            | low(fields.offset, self.offset_bits) << self.user_bits
            | low(fields.user, self.user_bits);
        all as u32
    }

    /// The fields of an immediate.
    #[inline]
    pub fn unpack(self, imm: u32) -> Fields {
        let wide = u64::from(imm);
        let low = |value: u64, bits: u8| (value & ((1 << bits) - 1)) as u32;
        Fields {
            slot: (wide >> (self.offset_bits + self.user_bits)) as u32,
            offset: low(wide >> self.user_bits, self.offset_bits),
            user: low(wide, self.user_bits),
        }
    }

    /// The fragment of the user's immediate that the packet at an offset carries: that of its
    /// offset modulo the number of fragments.
    pub fn fragment(self, imm: u32, offset: u32) -> u32 {
        match self.fragments() {
            0 => 0,
            n => imm >> (offset % n * u32::from(self.user_bits)) & ((1 << self.user_bits) - 1),
        }
    }

    /// A fragment, moved to its place in the user's immediate.
    #[inline]
    pub fn place(self, fragment: u32, offset: u32) -> u32 {
        match self.fragments() {
            0 => 0,
            n => fragment << (offset % n * u32::from(self.user_bits)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_papers_split() {
        let split = Split::default();
        assert_eq!((split.messages(), split.packets(), split.fragments()), (1024, 1 << 18, 8));
        assert_eq!(split.pack(Fields { slot: 1, offset: 2, user: 3 }), 1 << 22 | 2 << 4 | 3);
    }

    #[test]
    fn what_is_packed_comes_out_and_an_immediate_is_its_fragments() {
        for (id, offset, user) in [(10, 18, 4), (8, 22, 2), (16, 16, 0), (1, 30, 1), (8, 16, 8)] {
            let split = Split::new(id, offset, user).unwrap();
            let fields = Fields {
                slot: split.messages() - 1,
                offset: split.packets() - 2,
                user: split.fragment(!0, 0),
            };
            assert_eq!(split.unpack(split.pack(fields)), fields, "{split:?}");
            let imm = 0x9abc_def1;
            let got = (5..5 + split.fragments())
                .fold(0, |all, at| all | split.place(split.fragment(imm, at), at));
            assert_eq!(got, if user == 0 { 0 } else { imm }, "{split:?}");
        }
    }

    #[test]
    fn a_wrong_split_is_refused() {
        for (id, offset, user) in
            [(10, 18, 3), (17, 11, 4), (0, 28, 4), (1, 31, 0), (255, 255, 34), (13, 16, 3)]
        {
            let error = Split::new(id, offset, user).unwrap_err().to_string();
            assert!(error.contains("10 + 18 + 4"), "{error}");
        }
    }
}
