//! Paths: where packets of a QP or of an address handle go, and how.

use crate::Gid;
use core::fmt;

/// The largest service level: the field has 4 bits.
pub const MAX_SL: u8 = 15;

/// The largest flow label: the field has 20 bits.
pub const MAX_FLOW_LABEL: u32 = 0x000f_ffff;

/// The largest path bits: a port has at most 128 LIDs.
pub const MAX_SRC_PATH_BITS: u8 = 127;

/// How many routers a packet may pass, where nobody has said anything else.
const HOP_LIMIT: u8 = 64;

/// A path to a peer: an address vector of verbs (`struct ibv_ah_attr`), and the P_Key that is used
/// on it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct PathAttr {
    /// The peer's address. Where the path has a LID, the GID of the port with that LID.
    pub dest_gid: Gid,
    /// The GID that packets are sent from, by its index in the table of the port.
    pub sgid_index: u8,
    /// The port of this device that it begins at, from 1.
    pub port: u8,
    /// The partition, by the index of its P_Key in the table of the port.
    pub pkey_index: u16,
    /// Service level, 0 to [`MAX_SL`].
    pub sl: u8,
    /// Packets have a global header (GRH), which holds the GIDs and the next three. Always, where
    /// the link layer is Ethernet.
    pub grh: bool,
    /// What routers keep on one way, 0 to [`MAX_FLOW_LABEL`]; 0: nothing.
    pub flow_label: u32,
    /// How many routers a packet may pass.
    pub hop_limit: u8,
    /// The class of service that routers see: DSCP (6 bits) and ECN (2 bits).
    pub traffic_class: u8,
    /// The peer's LID, where the link layer is InfiniBand; 0 for none. (On Ethernet UCX has the UDP
    /// port here that packets are to leave by.)
    pub dlid: u16,
    /// Which of the port's LIDs packets are sent from, 0 to [`MAX_SRC_PATH_BITS`].
    pub src_path_bits: u8,
    /// The most that is sent, as `enum ibv_rate` has it; 0: as much as the port can.
    pub static_rate: u8,
}

impl PathAttr {
    /// The path from port 1 and its first GID to a peer's GID, with a global header and nothing
    /// else that is wanted of it.
    pub const fn new(dest_gid: Gid) -> PathAttr {
        PathAttr {
            dest_gid,
            sgid_index: 0,
            port: 1,
            pkey_index: 0,
            sl: 0,
            grh: true,
            flow_label: 0,
            hop_limit: HOP_LIMIT,
            traffic_class: 0,
            dlid: 0,
            src_path_bits: 0,
            static_rate: 0,
        }
    }

    /// The same treatment on the path from another port and GID to another port of the peer.
    /// `dlid` is that port's LID; 0 where it has none. A path without a LID needs a global header.
    pub const fn elsewhere(self, port: u8, sgid_index: u8, dest_gid: Gid, dlid: u16) -> PathAttr {
        let grh = self.grh || dlid == 0;
        PathAttr { port, sgid_index, dest_gid, grh, dlid, src_path_bits: 0, ..self }
    }

    /// Whether all values are ones that packets can carry. What is not used is not looked at: the
    /// flow label without a global header, path bits without a LID.
    pub fn check(&self) -> Result<(), PathError> {
        let flow_label = if self.grh { self.flow_label } else { 0 };
        let src_path_bits = if self.dlid != 0 { self.src_path_bits } else { 0 };
        [
            ("port", u32::from(self.port), 1, u32::from(u8::MAX)),
            ("sl", self.sl.into(), 0, MAX_SL.into()),
            ("flow_label", flow_label, 0, MAX_FLOW_LABEL),
            ("src_path_bits", src_path_bits.into(), 0, MAX_SRC_PATH_BITS.into()),
        ]
        .into_iter()
        .find(|(_, value, least, most)| value < least || value > most)
        .map_or(Ok(()), |(field, value, least, most)| Err(PathError { field, value, least, most }))
    }
}

impl Default for PathAttr {
    /// [`PathAttr::new`] to nobody.
    fn default() -> PathAttr {
        PathAttr::new(Gid([0; 16]))
    }
}

/// A value of a path that no packet can carry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PathError {
    /// The field of [`PathAttr`].
    pub field: &'static str,
    /// Its value.
    pub value: u32,
    /// The smallest value that is possible.
    pub least: u32,
    /// The largest value that is possible.
    pub most: u32,
}

impl fmt::Display for PathError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PathError { field, value, least, most } = self;
        write!(f, "{field} {value}: {least} to {most} are possible")
    }
}

impl core::error::Error for PathError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_that_no_packet_carries_are_named() {
        let path = PathAttr::default();
        let said = |path: PathAttr| path.check().map_err(|e| e.to_string());
        let most = PathAttr {
            sl: MAX_SL,
            flow_label: MAX_FLOW_LABEL,
            dlid: 9,
            src_path_bits: MAX_SRC_PATH_BITS,
            ..path
        };
        assert_eq!((said(path), said(most)), (Ok(()), Ok(())));
        let wrong = |path| said(path).unwrap_err();
        assert_eq!(wrong(PathAttr { sl: 16, ..path }), "sl 16: 0 to 15 are possible");
        assert_eq!(wrong(PathAttr { port: 0, ..path }), "port 0: 1 to 255 are possible");
        assert_eq!(
            wrong(PathAttr { flow_label: 1 << 20, ..path }),
            "flow_label 1048576: 0 to 1048575 are possible"
        );
        assert_eq!(
            wrong(PathAttr { src_path_bits: 128, ..most }),
            "src_path_bits 128: 0 to 127 are possible"
        );
        assert_eq!(
            said(PathAttr { grh: false, flow_label: 1 << 20, src_path_bits: 128, ..path }),
            Ok(()),
            "not used"
        );
    }

    #[test]
    fn what_is_wanted_of_a_path_is_wanted_elsewhere() {
        let wanted = PathAttr {
            sl: 5,
            flow_label: 6,
            hop_limit: 7,
            traffic_class: 8,
            static_rate: 9,
            ..PathAttr::default()
        };
        let local = PathAttr { grh: false, dlid: 10, src_path_bits: 11, ..wanted };
        let to = Gid([12; 16]);
        let moved = PathAttr { port: 2, sgid_index: 3, dest_gid: to, ..wanted };
        assert_eq!(local.elsewhere(2, 3, to, 0), moved, "without a LID the GID leads there");
        assert_eq!(local.elsewhere(2, 3, to, 17), PathAttr { grh: false, dlid: 17, ..moved });
        let global = PathAttr { grh: true, ..local };
        assert_eq!(global.elsewhere(2, 3, to, 17), PathAttr { dlid: 17, ..moved });
    }
}
