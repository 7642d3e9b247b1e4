//! Which code: its kind, its sizes, its id on the wire, what it recovers.

use crate::field::inverse;
use crate::{ChunkSet, CodeError, MAX_DATA, MAX_PARITY};

/// How parity follows from data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Reed–Solomon over GF(2^8) with a Cauchy matrix: any `parity` chunks may be lost.
    Mds,
    /// Parity chunk *i* is the XOR of the data chunks *j* with *j* mod `parity` = *i*: one chunk of
    /// each such group may be lost.
    Xor,
}

/// A code over `data` chunks with `parity` chunks. There are none but good ones: whoever has one
/// can encode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Code {
    kind: Kind,
    data: u8,
    parity: u8,
}

impl Code {
    /// The code of a kind with so many data and parity chunks.
    ///
    /// # Errors
    /// Where there are none, too many ([`MAX_DATA`], [`MAX_PARITY`]), or groups without data.
    pub fn new(kind: Kind, data: usize, parity: usize) -> Result<Code, CodeError> {
        if !(1..=MAX_DATA).contains(&data) {
            return Err(CodeError::Data(data));
        }
        if !(1..=MAX_PARITY).contains(&parity) {
            return Err(CodeError::Parity(parity));
        }
        if kind == Kind::Xor && parity > data {
            return Err(CodeError::Groups { data, parity });
        }
        Ok(Code { kind, data: data as u8, parity: parity as u8 })
    }

    /// [`Kind::Mds`].
    ///
    /// # Errors
    /// As [`Code::new`].
    pub fn mds(data: usize, parity: usize) -> Result<Code, CodeError> {
        Code::new(Kind::Mds, data, parity)
    }

    /// [`Kind::Xor`].
    ///
    /// # Errors
    /// As [`Code::new`].
    pub fn xor(data: usize, parity: usize) -> Result<Code, CodeError> {
        Code::new(Kind::Xor, data, parity)
    }

    /// The code of an id that came from a peer.
    ///
    /// # Errors
    /// Where it is none that [`Code::id`] gives.
    pub fn from_id(id: u32) -> Result<Code, CodeError> {
        let [0, kind, data, parity] = id.to_be_bytes() else { return Err(CodeError::Id(id)) };
        let kind = match kind {
            1 => Kind::Mds,
            2 => Kind::Xor,
            _ => return Err(CodeError::Id(id)),
        };
        Code::new(kind, data.into(), parity.into()).map_err(|_| CodeError::Id(id))
    }

    /// The code's id on the wire: kind, data chunks, parity chunks, a byte each. The same id means
    /// the same bytes, in every version.
    pub fn id(self) -> u32 {
        let kind = match self.kind {
            Kind::Mds => 1,
            Kind::Xor => 2,
        };
        u32::from_be_bytes([0, kind, self.data, self.parity])
    }

    /// The code of a last submessage that has `data` chunks only: of the same kind, with as many
    /// parity chunks as keep the ratio, rounded up. So a message of M chunks has ⌈M·m/k⌉ parity
    /// chunks.
    ///
    /// # Errors
    /// Where it would have more chunks than a full submessage, or none.
    pub fn for_last(self, data: usize) -> Result<Code, CodeError> {
        if data > self.data() {
            return Err(CodeError::Last { last: data, data: self.data() });
        }
        Code::new(self.kind, data, (data * self.parity()).div_ceil(self.data()))
            .map_err(|_| CodeError::Last { last: data, data: self.data() })
    }

    /// How parity follows from data.
    pub fn kind(self) -> Kind {
        self.kind
    }

    /// Data chunks, *k*.
    pub fn data(self) -> usize {
        self.data.into()
    }

    /// Parity chunks, *m*.
    pub fn parity(self) -> usize {
        self.parity.into()
    }

    /// All chunks.
    pub fn chunks(self) -> usize {
        self.data() + self.parity()
    }

    /// Whether all data chunks can be had although these chunks are lost.
    ///
    /// Of XOR that is so where each group has its data, or lost one chunk in all.
    pub fn recovers(self, lost: &ChunkSet) -> bool {
        let lost_data = lost.iter().filter(|&chunk| chunk < self.data()).count();
        match self.kind {
            Kind::Mds => {
                let lost_parity =
                    lost.iter().filter(|c| (self.data()..self.chunks()).contains(c)).count();
                lost_data + lost_parity <= self.parity()
            }
            Kind::Xor => (0..self.parity()).all(|group| {
                let lost_data = self.group(group).filter(|&chunk| lost.contains(chunk)).count();
                lost_data == 0 || lost_data == 1 && !lost.contains(self.data() + group)
            }),
        }
    }

    /// The data chunks of a group of XOR.
    pub(crate) fn group(self, group: usize) -> impl Iterator<Item = usize> {
        (group..self.data()).step_by(self.parity())
    }

    /// What data chunk `column` is multiplied by for parity chunk `row` (MDS): `1/(x + y)`, where
    /// no *x* is a *y*, so every square part of the matrix can be inverted. The same as ISA-L's
    /// `gf_gen_cauchy1_matrix` makes.
    pub(crate) fn coefficient(self, row: usize, column: usize) -> u8 {
        inverse((self.data() + row) as u8 ^ column as u8)
    }
}

impl std::fmt::Display for Code {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let kind = match self.kind {
            Kind::Mds => "MDS",
            Kind::Xor => "XOR",
        };
        write!(f, "{kind}({}, {})", self.data, self.parity)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_for_ever() {
        assert_eq!(Code::mds(32, 8).unwrap().id(), 0x01_2008);
        assert_eq!(Code::xor(128, 32).unwrap().id(), 0x02_8020);
        assert_eq!(Code::mds(32, 8).unwrap().to_string(), "MDS(32, 8)");
    }

    #[test]
    fn ids_come_back() {
        for kind in [Kind::Mds, Kind::Xor] {
            for code in (1..=MAX_DATA)
                .flat_map(|k| (1..=MAX_PARITY).filter_map(move |m| Code::new(kind, k, m).ok()))
            {
                assert_eq!(Code::from_id(code.id()), Ok(code));
            }
        }
        for id in [
            0,
            0x01_0000,
            0x01_0001,
            0x01_8101,
            0x01_0121,
            0x02_0405,
            0x03_2008,
            0x0101_2008,
            u32::MAX,
        ] {
            assert_eq!(Code::from_id(id), Err(CodeError::Id(id)));
        }
    }

    #[test]
    fn codes_out_of_bounds_are_refused_with_what_is_right() {
        let text = |code: Result<Code, CodeError>| code.unwrap_err().to_string();
        assert_eq!(text(Code::mds(0, 1)), "0 data chunks; 1 to 128 are right");
        assert_eq!(text(Code::mds(129, 1)), "129 data chunks; 1 to 128 are right");
        assert_eq!(text(Code::mds(1, 0)), "0 parity chunks; 1 to 32 are right");
        assert_eq!(text(Code::mds(1, 33)), "33 parity chunks; 1 to 32 are right");
        assert!(text(Code::xor(4, 5)).contains("5 groups over 4 data chunks"));
        assert_eq!(
            text(Code::mds(4, 2).unwrap().for_last(5)),
            "a last submessage of 5 chunks; 1 to 4 are right"
        );
        assert_eq!(
            text(Code::mds(4, 2).unwrap().for_last(0)),
            "a last submessage of 0 chunks; 1 to 4 are right"
        );
    }

    /// The parity of a message is ⌈M·m/k⌉ chunks, however it is cut.
    #[test]
    fn last_submessages_keep_the_ratio() {
        for (k, m) in [(32, 8), (32, 7), (10, 4), (8, 8), (5, 9), (128, 32), (3, 1)] {
            let code = Code::mds(k, m).unwrap();
            for message in 1..=4 * k {
                let (full, rest) = (message / k, message % k);
                let last = code.for_last(rest).map_or(0, Code::parity);
                assert_eq!(
                    full * m + last,
                    (message * m).div_ceil(k),
                    "{message} chunks of {code}"
                );
            }
        }
        let last = Code::xor(32, 8).unwrap().for_last(3).unwrap();
        assert_eq!((last.kind(), last.data(), last.parity()), (Kind::Xor, 3, 1));
    }

    #[test]
    fn what_is_recovered_follows_from_the_kind() {
        let (mds, xor) = (Code::mds(4, 2).unwrap(), Code::xor(4, 2).unwrap());
        let lost = |chunks: &[usize]| chunks.iter().copied().collect::<ChunkSet>();
        for (chunks, by_mds, by_xor) in [
            (&[][..], true, true),
            (&[0, 1], true, true),
            (&[0, 2], true, false),
            (&[0, 4], true, false),
            (&[0, 5], true, true),
            (&[4, 5], true, true),
            (&[0, 1, 2], false, false),
            (&[0, 4, 5], false, false),
        ] {
            assert_eq!(
                (mds.recovers(&lost(chunks)), xor.recovers(&lost(chunks))),
                (by_mds, by_xor),
                "{chunks:?}"
            );
        }
    }
}
