//! Which NICs a process has.

use crate::flush::FlushKind;
use std::net::IpAddr;
use unbroken_environment::{self as environment, text};
use unbroken_fabric::{device_kind, DeviceKind, Runtime};
use unbroken_verbs::{Error, Result};

/// The longest sleep of a NIC's background thread, where nobody asks for another. Nothing depends
/// on it: what is to be done tells its time, see [`crate::engine`].
const SLEEP_US: u64 = 1_000_000;
/// NICs of a process.
pub(crate) const MAX_NICS: usize = 64;

/// Where the NICs of a process are.
#[derive(Clone, Debug)]
pub struct Config {
    /// The runtime folder: fabric, counters.
    pub runtime: Runtime,
    /// The NICs.
    pub nics: NicSource,
    /// Plain NICs: which of the ways to die each QP has.
    pub seed: u64,
    /// Plain NICs: how their QPs flush.
    pub flush: FlushKind,
    /// For tests: the longest sleep of a NIC's background thread, in µs, on which nothing depends.
    pub longest_sleep_us: u64,
}

/// Which NICs there are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NicSource {
    /// Those of a host of the emulated network.
    Host(String),
    /// Addresses of real interfaces, and what the NICs there can do. No fabric is opened: faults
    /// are real ones.
    Addresses(Vec<IpAddr>, DeviceKind),
}

impl Config {
    /// The NICs of a host of the emulated network.
    pub fn host(runtime: Runtime, host: &str) -> Config {
        Config::of(runtime, NicSource::Host(host.to_owned()))
    }

    /// These NICs, and defaults.
    pub fn of(runtime: Runtime, nics: NicSource) -> Config {
        Config { runtime, nics, seed: 0, flush: FlushKind::Whole, longest_sleep_us: SLEEP_US }
    }

    /// NICs at addresses of real interfaces, with all that they can do.
    pub fn addresses(runtime: Runtime, addresses: &[IpAddr]) -> Config {
        Config::of(runtime, NicSource::Addresses(addresses.to_vec(), DeviceKind::Full))
    }

    /// What the environment says: `UNBROKEN_RUNTIME`, and `UNBROKEN_NICS` (addresses, with commas;
    /// `UNBROKEN_DEVICE` is what they can do) or `UNBROKEN_HOST` (default `a`);
    /// `UNBROKEN_DEVICE_SEED` and `UNBROKEN_DEVICE_FLUSH`; for tests `UNBROKEN_LONGEST_SLEEP_US`.
    pub fn from_env() -> Result<Config> {
        let runtime = Runtime::open().map_err(|e| Error::invalid(e.to_string()))?;
        let nics = match (text(environment::NICS), text(environment::HOST)) {
            (Some(list), _) => NicSource::Addresses(
                parse_addresses(&list)?,
                parse_device(text(environment::DEVICE))?,
            ),
            (None, host) => NicSource::Host(host.unwrap_or_else(|| "a".to_owned())),
        };
        let number = |name, default| parse_number(name, text(name), default);
        let seed = number(environment::DEVICE_SEED, 0)?;
        Ok(Config {
            seed,
            flush: parse_flush(text(environment::DEVICE_FLUSH))?,
            longest_sleep_us: number(environment::LONGEST_SLEEP_US, SLEEP_US)?,
            ..Config::of(runtime, nics)
        })
    }
}

fn parse_addresses(list: &str) -> Result<Vec<IpAddr>> {
    let mut addrs = Vec::new();
    for word in list.split(',').map(str::trim) {
        let addr: IpAddr = word.parse().map_err(|_| {
            Error::invalid(format!(
                "UNBROKEN_NICS: '{word}' is not an IP address; addresses of interfaces, with \
                 commas, are right"
            ))
        })?;
        if addrs.contains(&addr) {
            return Err(Error::invalid(format!("UNBROKEN_NICS: {addr} is there twice")));
        }
        addrs.push(addr);
    }
    if addrs.len() > MAX_NICS {
        return Err(Error::invalid(format!(
            "UNBROKEN_NICS: {} addresses, at most {MAX_NICS} are possible",
            addrs.len()
        )));
    }
    Ok(addrs)
}

fn parse_device(name: Option<String>) -> Result<DeviceKind> {
    name.map_or(Ok(DeviceKind::Full), |name| {
        device_kind(name.trim()).map_err(|what| Error::invalid(format!("UNBROKEN_DEVICE: {what}")))
    })
}

fn parse_flush(name: Option<String>) -> Result<FlushKind> {
    name.map_or(Ok(FlushKind::Whole), |name| {
        FlushKind::parse(name.trim())
            .map_err(|what| Error::invalid(format!("UNBROKEN_DEVICE_FLUSH: {what}")))
    })
}

fn parse_number(name: &str, text: Option<String>, default: u64) -> Result<u64> {
    text.map_or(Ok(default), |text| {
        // A time that is added to others must not be beyond all bounds.
        let number = text.trim().parse::<u32>().map(u64::from);
        number.map_err(|_| {
            Error::invalid(format!("{name}: '{text}' is not a number from 0 to {}", u32::MAX))
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_devices() {
        let text = |text: &str| Some(text.to_owned());
        assert_eq!(parse_device(None).unwrap(), DeviceKind::Full);
        assert_eq!(parse_device(text("plain")).unwrap(), DeviceKind::Plain);
        let wrong = parse_device(text("bare")).unwrap_err().to_string();
        assert_eq!(wrong, "UNBROKEN_DEVICE: device is 'bare'; 'full' and 'plain' are right");
        assert_eq!(
            (parse_number("X", None, 5).unwrap(), parse_number("X", text("7"), 5).unwrap()),
            (5, 7)
        );
        assert_eq!(
            parse_number("X", text("-1"), 5).unwrap_err().to_string(),
            "X: '-1' is not a number from 0 to 4294967295"
        );
    }

    #[test]
    fn addresses() {
        assert_eq!(parse_addresses("10.0.0.1, fd00::2").unwrap().len(), 2);
        assert!(parse_addresses("10.0.0.1,eth0").unwrap_err().to_string().contains("'eth0'"));
        assert!(parse_addresses("10.0.0.1,10.0.0.1").unwrap_err().to_string().contains("twice"));
    }
}
