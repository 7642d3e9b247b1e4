//! What a queue pair tells its peer, as bytes for a channel of the user's.

use crate::lanes::LaneInfo;
use crate::{Error, Result};
use unbroken::{Gid, QpAddress};

/// What a peer must know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Info {
    /// The attributes that both ends must have alike.
    pub(crate) agreed: [u64; 9],
    /// Whether it sends, and whether it receives.
    pub(crate) enabled: [bool; 2],
    /// What its control messages must carry.
    pub(crate) token: u64,
    /// Where control messages go, on each of its NICs.
    pub(crate) control: Vec<QpAddress>,
    /// Whether each receive has keys of its own, which come with its clear-to-send.
    pub(crate) keyed: bool,
    /// Where packets go, by channel and generation.
    pub(crate) lanes: Vec<Vec<LaneInfo>>,
}

const MAGIC: [u8; 8] = *b"unbrsdr1";
/// Of an end whose receives have keys of their own. Who does not know them does not know this,
/// either.
const MAGIC_KEYED: [u8; 8] = *b"unbrsdr2";
const ADDRESS_BYTES: usize = 24;
/// Magic number, length, attributes, switches, token, number of control addresses.
const HEAD_BYTES: usize = 8 + 4 + 9 * 8 + 2 + 8 + 1;

impl Info {
    /// Bytes of such an info.
    pub(crate) fn bytes(rails: usize, channels: usize, generations: usize) -> usize {
        HEAD_BYTES + rails * ADDRESS_BYTES + channels * generations * (ADDRESS_BYTES + 4)
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let generations = self.lanes.first().map_or(0, Vec::len);
        let bytes = Info::bytes(self.control.len(), self.lanes.len(), generations);
        let mut out = Vec::with_capacity(bytes);
        out.extend(if self.keyed { MAGIC_KEYED } else { MAGIC });
        out.extend((bytes as u32).to_be_bytes());
        self.agreed.iter().for_each(|value| out.extend(value.to_be_bytes()));
        out.extend(self.enabled.map(u8::from));
        out.extend(self.token.to_be_bytes());
        out.push(self.control.len() as u8);
        self.control.iter().for_each(|address| put(&mut out, address));
        for lane in self.lanes.iter().flatten() {
            put(&mut out, &lane.address);
            out.extend(lane.rkey.to_be_bytes());
        }
        out
    }

    /// How long an info is, by its beginning; what it must begin with is [`Info::PREFIX_BYTES`]
    /// long.
    pub(crate) fn length(prefix: &[u8]) -> Result<usize> {
        let rest = [MAGIC, MAGIC_KEYED].iter().find_map(|magic| prefix.strip_prefix(magic));
        let length = rest.and_then(|rest| rest.first_chunk::<4>());
        let length = length.map(|bytes| u32::from_be_bytes(*bytes) as usize);
        length.filter(|bytes| (HEAD_BYTES..=1 << 20).contains(bytes)).ok_or_else(|| {
            Error::wrong(
                "this is no information of a queue pair: give what sdr_qp_info_get wrote at the \
                 peer",
            )
        })
    }

    /// What [`Info::length`] needs.
    pub(crate) const PREFIX_BYTES: usize = 12;

    /// Reads an info; the attributes are checked by `check` before anything behind them is
    /// believed.
    pub(crate) fn decode(
        bytes: &[u8],
        check: impl FnOnce(&[u64; 9]) -> Result<(usize, usize)>,
    ) -> Result<Info> {
        let wrong = || Error::wrong("the information of the peer is cut or damaged");
        if Info::length(bytes)? != bytes.len() {
            return Err(wrong());
        }
        let mut at = Info::PREFIX_BYTES;
        let mut take = |n: usize| {
            let part = bytes.get(at..at + n);
            at += n;
            part
        };
        let mut agreed = [0; 9];
        for value in &mut agreed {
            *value = number(take(8).ok_or_else(wrong)?);
        }
        let (channels, generations) = check(&agreed)?;
        let enabled = take(2).ok_or_else(wrong)?;
        let enabled = [enabled[0] != 0, enabled[1] != 0];
        let token = number(take(8).ok_or_else(wrong)?);
        let rails = take(1).ok_or_else(wrong)?[0].into();
        if Info::bytes(rails, channels, generations) != bytes.len() || rails == 0 {
            return Err(wrong());
        }
        let control = (0..rails)
            .map(|_| take(ADDRESS_BYTES).map(address))
            .collect::<Option<_>>()
            .ok_or_else(wrong)?;
        let mut lane = || {
            Some(LaneInfo { address: address(take(ADDRESS_BYTES)?), rkey: number(take(4)?) as u32 })
        };
        let mut of_channel = || (0..generations).map(|_| lane()).collect::<Option<Vec<_>>>();
        let lanes = (0..channels).map(|_| of_channel()).collect::<Option<_>>().ok_or_else(wrong)?;
        Ok(Info { agreed, enabled, token, control, keyed: bytes.starts_with(&MAGIC_KEYED), lanes })
    }
}

fn put(out: &mut Vec<u8>, address: &QpAddress) {
    out.extend(address.gid.0);
    out.extend(address.qpn.to_be_bytes());
    out.extend(address.psn.to_be_bytes());
}

fn number(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0, |all, byte| all << 8 | u64::from(*byte))
}

/// Of [`ADDRESS_BYTES`] bytes.
fn address(bytes: &[u8]) -> QpAddress {
    let mut gid = [0; 16];
    gid.copy_from_slice(&bytes[..16]);
    QpAddress {
        gid: Gid(gid),
        qpn: number(&bytes[16..20]) as u32,
        psn: number(&bytes[20..24]) as u32,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_info_is_its_bytes_and_what_is_cut_is_refused() {
        let address = QpAddress { gid: Gid([7; 16]), qpn: 0x123456, psn: 9 };
        let lane = LaneInfo { address, rkey: 0xdead_beef };
        let info = |keyed| Info {
            agreed: [1, 2, 3, 4, 5, 6, 7, 8, 9],
            enabled: [true, false],
            token: 77,
            control: vec![address; 2],
            keyed,
            lanes: vec![vec![lane; 4]; 3],
        };
        let keyed = info(true).encode();
        assert_eq!(Info::decode(&keyed, |_| Ok((3, 4))).unwrap(), info(true));
        assert!(keyed.starts_with(b"unbrsdr2"), "older ends refuse it");
        let info = info(false);
        let bytes = info.encode();
        assert_eq!(bytes.len(), Info::bytes(2, 3, 4));
        assert_eq!(Info::decode(&bytes, |_| Ok((3, 4))).unwrap(), info);
        for len in 0..bytes.len() {
            assert!(Info::decode(&bytes[..len], |_| Ok((3, 4))).is_err());
        }
        assert!(Info::decode(&bytes, |_| Ok((3, 5))).is_err());
        assert!(Info::decode(&[0; 200], |_| Ok((3, 4)))
            .unwrap_err()
            .to_string()
            .contains("sdr_qp_info_get"));
    }
}
