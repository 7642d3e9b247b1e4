//! How the two ends of a connection name themselves to each other.

use std::fmt;
use std::str::FromStr;
use unbroken_types::{Gid, MAX_QPN, PSN_MASK};
use unbroken_verbs::Error;

/// What a peer needs to connect: GID, QPN and the first PSN. As text: 32 hexadecimal digits, the
/// QPN and the PSN, with slashes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QpAddress {
    /// The GID of the NIC that the queue pair was made on.
    pub gid: Gid,
    /// The logical QPN.
    pub qpn: u32,
    /// The first PSN of the queue pair's requests.
    pub psn: u32,
}

impl fmt::Display for QpAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.gid.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))?;
        write!(f, "/{:06x}/{:06x}", self.qpn, self.psn)
    }
}

impl FromStr for QpAddress {
    type Err = Error;

    fn from_str(text: &str) -> Result<QpAddress, Error> {
        let parsed = || {
            let (gid, rest) = text.trim().split_once('/')?;
            let (qpn, psn) = rest.split_once('/')?;
            if gid.len() != 32 || !gid.is_ascii() {
                return None;
            }
            let mut bytes = [0; 16];
            for (i, byte) in bytes.iter_mut().enumerate() {
                *byte = u8::from_str_radix(&gid[2 * i..2 * i + 2], 16).ok()?;
            }
            let number = |text: &str, max| u32::from_str_radix(text, 16).ok().filter(|n| *n <= max);
            Some(QpAddress {
                gid: Gid(bytes),
                qpn: number(qpn, MAX_QPN)?,
                psn: number(psn, PSN_MASK)?,
            })
        };
        parsed().ok_or_else(|| {
            Error::invalid(format!(
                "`{text}` is no address of a queue pair: GID/QPN/PSN in hexadecimal, as \
                 `QpAddress` prints it"
            ))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_its_text() {
        let address = QpAddress { gid: Gid([0xab; 16]), qpn: 0x10_0001, psn: 5 };
        assert_eq!(address.to_string().parse::<QpAddress>().unwrap(), address);
        for bad in [
            "",
            "x",
            "ab/1/2",
            "abababababababababababababababab/1",
            "abababababababababababababababab/1/1000000",
        ] {
            assert!(
                bad.parse::<QpAddress>().unwrap_err().to_string().contains("no address"),
                "{bad}"
            );
        }
    }
}
