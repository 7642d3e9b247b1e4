//! The values of the tables, as bytes. Little-endian; the first byte is the version, so that a
//! newer program can tell.
//!
//! ```text
//! QP:       0  version = 7   8  process u64   16  incarnation u64   24  connection u32
//!           28 NIC u32
//!                                                                             32 bytes
//! moved:    0  version = 7   8  process u64   16  GID now   32  QPN now u32   36  zero u32
//!           40 GID shown
//!                                                                             56 bytes
//! process:  0  version = 7   1  NICs u8    4  pid u32    8  process u64, then for each NIC:
//!           0  index u32     4  GID        20  address (a GID)    36  control QPN u32
//!           40 set of keys u16   42  LID u16     44  length of the name u8
//!           45 name (UTF-8), then number of further ports u8, and for each:
//!              GID, control QPN u32, LID u16
//! key:      0  version = 7   8  the key    40  FNV-1a of bytes 0 to 39, u64
//!                                                                             48 bytes
//! ```
//!
//! `NIC` is one more than the index of the QP's NIC in its process; 0: it is the one whose GID the
//! QP is entered under. `process` is the id of the process's presence
//! ([`unbroken_runtime::Presence`]), by which the living are told from the dead.

use crate::directory::QpEntry;
use unbroken_types::Gid;

/// Length of the directory's key.
pub const KEY_BYTES: usize = 32;

/// Most NICs of a process record.
pub const MAX_NICS: usize = 64;
/// Most ports of a NIC.
pub const MAX_PORTS: usize = 8;
/// Longest name of a NIC, in bytes.
pub const MAX_NAME: usize = 63;

/// The layout of the values.
pub(crate) const VERSION: u8 = 7;

/// A NIC of a process: where its control messages are received.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NicRecord {
    /// The index of the NIC in its process.
    pub index: u32,
    /// The GID that it is called by.
    pub gid: Gid,
    /// The GID by which it is reached, which may become another.
    pub address: Gid,
    /// The QPN of the UD control QP; 0: it has none (yet).
    pub control_qpn: u32,
    /// Which set of keys it has ([`unbroken_types::NicKey`]); 0: keys are good on all NICs of the
    /// process.
    pub key_set: u16,
    /// InfiniBand: the LID of its first port; else 0.
    pub lid: u16,
    /// Its name, `a/0`.
    pub name: String,
    /// The ports behind the first one, in their order.
    pub further_ports: Vec<PortRecord>,
}

/// A port of a NIC, behind the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortRecord {
    /// Its GID.
    pub gid: Gid,
    /// The QPN of the UD control QP on it; 0: it has none (yet).
    pub control_qpn: u32,
    /// InfiniBand: its LID; else 0.
    pub lid: u16,
}

/// Where a process can be reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessRecord {
    /// Its pid, as it sees it itself: for people.
    pub pid: u32,
    /// Its NICs.
    pub nics: Vec<NicRecord>,
}

/// The value of a QP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct QpRecord {
    pub(crate) process: u64,
    pub(crate) qp: QpEntry,
}

impl QpRecord {
    pub(crate) fn encode(&self) -> [u8; 32] {
        let mut bytes = [0; 32];
        bytes[0] = VERSION;
        let QpEntry { incarnation, connection, nic } = self.qp;
        bytes[8..16].copy_from_slice(&self.process.to_le_bytes());
        bytes[16..24].copy_from_slice(&incarnation.to_le_bytes());
        bytes[24..28].copy_from_slice(&connection.to_le_bytes());
        bytes[28..].copy_from_slice(&nic.map_or(0, |nic| nic.saturating_add(1)).to_le_bytes());
        bytes
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<QpRecord> {
        let mut rest = bytes;
        let [VERSION, 0, 0, 0, 0, 0, 0, 0] = take(&mut rest)? else {
            return None;
        };
        let process = u64::from_le_bytes(take(&mut rest)?);
        let qp = QpEntry {
            incarnation: u64::from_le_bytes(take(&mut rest)?),
            connection: u32::from_le_bytes(take(&mut rest)?),
            nic: u32::from_le_bytes(take(&mut rest)?).checked_sub(1),
        };
        rest.is_empty().then_some(QpRecord { process, qp })
    }
}

/// A UD QP that has moved from where its peers address it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MovedQp {
    /// The address that it had at first, and that peers go on using: a GID of its first NIC, and
    /// the QPN.
    pub known: (Gid, u32),
    /// The address that it has now.
    pub now: (Gid, u32),
    /// The GID that peers shall see its datagrams come from.
    pub shown: Gid,
}

impl MovedQp {
    /// The value, for the process of this id.
    pub(crate) fn encode(&self, process: u64) -> [u8; 56] {
        let mut bytes = [0; 56];
        bytes[0] = VERSION;
        bytes[8..16].copy_from_slice(&process.to_le_bytes());
        bytes[16..32].copy_from_slice(&self.now.0 .0);
        bytes[32..36].copy_from_slice(&self.now.1.to_le_bytes());
        bytes[40..].copy_from_slice(&self.shown.0);
        bytes
    }

    /// Reads an entry: the id of the process, and the QP; `None` where it is none.
    pub(crate) fn decode(mut key: &[u8], bytes: &[u8]) -> Option<(u64, MovedQp)> {
        let known = (Gid(take(&mut key)?), u32::from_be_bytes(take(&mut key)?));
        let mut rest = bytes;
        let [VERSION, 0, 0, 0, 0, 0, 0, 0] = take(&mut rest)? else {
            return None;
        };
        let process = u64::from_le_bytes(take(&mut rest)?);
        let now = (Gid(take(&mut rest)?), u32::from_le_bytes(take(&mut rest)?));
        let [0, 0, 0, 0] = take(&mut rest)? else { return None };
        let shown = Gid(take(&mut rest)?);
        (rest.is_empty() && key.is_empty()).then_some((process, MovedQp { known, now, shown }))
    }
}

impl ProcessRecord {
    /// The value as it lies in the directory, for the process of this id. The error says which
    /// limit is passed.
    #[doc(hidden)]
    pub fn encode(&self, process: u64) -> Result<Vec<u8>, String> {
        if self.nics.len() > MAX_NICS {
            return Err(format!(
                "a process has {} NICs; at most {MAX_NICS} are right",
                self.nics.len()
            ));
        }
        let mut bytes = vec![VERSION, self.nics.len() as u8, 0, 0];
        bytes.extend_from_slice(&self.pid.to_le_bytes());
        bytes.extend_from_slice(&process.to_le_bytes());
        for nic in &self.nics {
            if nic.name.len() > MAX_NAME {
                return Err(format!("the NIC name '{}' is longer than {MAX_NAME} bytes", nic.name));
            }
            bytes.extend_from_slice(&nic.index.to_le_bytes());
            bytes.extend_from_slice(&nic.gid.0);
            bytes.extend_from_slice(&nic.address.0);
            bytes.extend_from_slice(&nic.control_qpn.to_le_bytes());
            bytes.extend_from_slice(&nic.key_set.to_le_bytes());
            bytes.extend_from_slice(&nic.lid.to_le_bytes());
            bytes.push(nic.name.len() as u8);
            bytes.extend_from_slice(nic.name.as_bytes());
            if nic.further_ports.len() >= MAX_PORTS {
                return Err(format!(
                    "NIC '{}' has {} ports; at most {MAX_PORTS} are right",
                    nic.name,
                    nic.further_ports.len() + 1
                ));
            }
            bytes.push(nic.further_ports.len() as u8);
            for port in &nic.further_ports {
                bytes.extend_from_slice(&port.gid.0);
                bytes.extend_from_slice(&port.control_qpn.to_le_bytes());
                bytes.extend_from_slice(&port.lid.to_le_bytes());
            }
        }
        Ok(bytes)
    }

    /// Reads a value: the id of the process, and its record; `None` where it is none.
    pub(crate) fn decode(bytes: &[u8]) -> Option<(u64, ProcessRecord)> {
        let mut rest = bytes;
        let [VERSION, count, 0, 0] = take(&mut rest)? else {
            return None;
        };
        let pid = u32::from_le_bytes(take(&mut rest)?);
        let process = u64::from_le_bytes(take(&mut rest)?);
        if usize::from(count) > MAX_NICS {
            return None;
        }
        let mut nics = Vec::with_capacity(usize::from(count));
        for _ in 0..count {
            let index = u32::from_le_bytes(take(&mut rest)?);
            let gid = Gid(take(&mut rest)?);
            let address = Gid(take(&mut rest)?);
            let control_qpn = u32::from_le_bytes(take(&mut rest)?);
            let key_set = u16::from_le_bytes(take(&mut rest)?);
            let lid = u16::from_le_bytes(take(&mut rest)?);
            let [length] = take(&mut rest)?;
            if usize::from(length) > MAX_NAME {
                return None;
            }
            let (name, after) = rest.split_at_checked(usize::from(length))?;
            rest = after;
            let name = std::str::from_utf8(name).ok()?.into();
            let [ports] = take(&mut rest)?;
            if usize::from(ports) >= MAX_PORTS {
                return None;
            }
            let mut port = || {
                Some(PortRecord {
                    gid: Gid(take(&mut rest)?),
                    control_qpn: u32::from_le_bytes(take(&mut rest)?),
                    lid: u16::from_le_bytes(take(&mut rest)?),
                })
            };
            let further_ports = (0..ports).map(|_| port()).collect::<Option<_>>()?;
            nics.push(NicRecord {
                index,
                gid,
                address,
                control_qpn,
                key_set,
                lid,
                name,
                further_ports,
            });
        }
        rest.is_empty().then_some((process, ProcessRecord { pid, nics }))
    }
}

fn take<const N: usize>(bytes: &mut &[u8]) -> Option<[u8; N]> {
    let (head, rest) = bytes.split_first_chunk()?;
    *bytes = rest;
    Some(*head)
}

/// The value of the directory's key. The sum shows damage, which would else be messages that nobody
/// accepts.
pub(crate) fn encode_key(key: &[u8; KEY_BYTES]) -> [u8; KEY_BYTES + 16] {
    let mut bytes = [0; KEY_BYTES + 16];
    bytes[0] = VERSION;
    bytes[8..8 + KEY_BYTES].copy_from_slice(key);
    let sum = fnv1a(&bytes[..8 + KEY_BYTES]);
    bytes[8 + KEY_BYTES..].copy_from_slice(&sum.to_le_bytes());
    bytes
}

/// Reads the value of the directory's key; `None` where it is none, or damaged.
pub(crate) fn decode_key(bytes: &[u8]) -> Option<[u8; KEY_BYTES]> {
    let mut rest = bytes;
    let [VERSION, 0, 0, 0, 0, 0, 0, 0] = take(&mut rest)? else {
        return None;
    };
    let key = take(&mut rest)?;
    (rest == fnv1a(&bytes[..8 + KEY_BYTES]).to_le_bytes()).then_some(key)
}

fn fnv1a(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(*b)).wrapping_mul(0x100_0000_01b3))
}

/// The key of a QP: GID, then the QPN in network order.
pub(crate) fn qp_key(gid: Gid, qpn: u32) -> [u8; 20] {
    let mut key = [0; 20];
    key[..16].copy_from_slice(&gid.0);
    key[16..].copy_from_slice(&qpn.to_be_bytes());
    key
}

/// Reads bytes as the value of each table, for the fuzzer: what is accepted must be written back to
/// the same.
#[doc(hidden)]
pub fn check_value(bytes: &[u8]) {
    if let Some((process, record)) = ProcessRecord::decode(bytes) {
        assert_eq!(record.encode(process).as_deref(), Ok(bytes));
    }
    if let Some(record) = QpRecord::decode(bytes) {
        assert_eq!(record.encode(), bytes);
    }
    if let Some(key) = decode_key(bytes) {
        assert_eq!(encode_key(&key), bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn nic() -> impl Strategy<Value = NicRecord> {
        let port = (any::<[u8; 16]>(), any::<u32>(), any::<u16>())
            .prop_map(|(gid, control_qpn, lid)| PortRecord { gid: Gid(gid), control_qpn, lid });
        let further = prop::collection::vec(port, 0..MAX_PORTS);
        let gids = any::<([u8; 16], [u8; 16])>();
        let numbers = (any::<u32>(), any::<u32>(), any::<u16>(), any::<u16>());
        (numbers, gids, "[a-z0-9/.é]{0,20}", further).prop_map(
            |((index, control_qpn, key_set, lid), (gid, address), name, further_ports)| NicRecord {
                index,
                gid: Gid(gid),
                address: Gid(address),
                control_qpn,
                key_set,
                lid,
                name,
                further_ports,
            },
        )
    }

    proptest! {
        #[test]
        fn records_round_trip(pid: u32, process: u64, incarnation: u64, nics in prop::collection::vec(nic(), 0..9)) {
            let qp = QpEntry::new(incarnation, 7);
            for nic in [None, Some(0), Some(63)] {
                let record = QpRecord { process, qp: QpEntry { nic, ..qp } };
                prop_assert_eq!(QpRecord::decode(&record.encode()), Some(record));
            }
            let gid = |n: u64| Gid([n as u8; 16]);
            let moved = MovedQp { known: (gid(incarnation), pid), now: (gid(process), !pid), shown: gid(7) };
            let (key, value) = (qp_key(moved.known.0, moved.known.1), moved.encode(process));
            prop_assert_eq!(MovedQp::decode(&key, &value), Some((process, moved)));
            prop_assert_eq!(MovedQp::decode(&key, &value[..55]), None);
            prop_assert_eq!(MovedQp::decode(&key[..19], &value), None);
            let record = ProcessRecord { pid, nics };
            let bytes = record.encode(process).unwrap();
            for cut in 0..bytes.len() {
                prop_assert_eq!(ProcessRecord::decode(&bytes[..cut]), None);
            }
            prop_assert_eq!(ProcessRecord::decode(&bytes), Some((process, record)));
        }

        #[test]
        fn garbage_is_no_record(mut bytes in prop::collection::vec(any::<u8>(), 0..200), versioned: bool) {
            if let (true, Some(first)) = (versioned, bytes.first_mut()) {
                *first = VERSION;
            }
            // Whatever comes out re-encodes to what went in.
            if let Some((process, record)) = ProcessRecord::decode(&bytes) {
                prop_assert_eq!(record.encode(process).unwrap(), bytes.clone());
            }
            if let Some((process, moved)) = MovedQp::decode(&[0; 20], &bytes) {
                prop_assert_eq!(moved.encode(process).to_vec(), bytes.clone());
            }
            if let Some(qp) = QpRecord::decode(&bytes) {
                prop_assert_eq!(qp.encode().to_vec(), bytes);
            }
        }
    }

    #[test]
    fn every_damage_of_the_key_is_seen() {
        let key = std::array::from_fn(|i| i as u8 * 7);
        let good = encode_key(&key);
        assert_eq!(decode_key(&good), Some(key));
        for bit in 0..good.len() * 8 {
            let mut bad = good;
            bad[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(decode_key(&bad), None, "bit {bit}");
        }
        assert_eq!(decode_key(&good[..47]), None);
        assert_eq!(decode_key(&[good.as_slice(), &[0]].concat()), None);
    }

    #[test]
    fn limits_are_errors() {
        let nic = NicRecord {
            index: 0,
            gid: Gid::default(),
            address: Gid::default(),
            control_qpn: 0,
            key_set: 1,
            lid: 0,
            name: "x".repeat(64),
            further_ports: vec![],
        };
        assert!(ProcessRecord { pid: 1, nics: vec![nic.clone()] }
            .encode(1)
            .unwrap_err()
            .contains("63"));
        let nic = NicRecord { name: "x".into(), ..nic };
        assert!(ProcessRecord { pid: 1, nics: vec![nic.clone(); 65] }
            .encode(1)
            .unwrap_err()
            .contains("64"));
        let further_ports =
            vec![PortRecord { gid: Gid::default(), control_qpn: 0, lid: 0 }; MAX_PORTS];
        let nic = NicRecord { further_ports, ..nic };
        assert!(ProcessRecord { pid: 1, nics: vec![nic] }
            .encode(1)
            .unwrap_err()
            .contains("at most 8"));
    }
}
