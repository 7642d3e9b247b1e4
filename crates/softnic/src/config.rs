//! Which NICs a process has.

use std::net::IpAddr;
use unbroken_fabric::Runtime;
use unbroken_verbs::{Error, Result};

/// NICs of a process.
pub(crate) const MAX_NICS: usize = 64;

/// Where the NICs of a process are.
#[derive(Clone, Debug)]
pub struct Config {
    /// The runtime folder: fabric, counters.
    pub runtime: Runtime,
    /// The NICs.
    pub nics: NicSource,
}

/// Which NICs there are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NicSource {
    /// Those of a host of the emulated network.
    Host(String),
    /// Addresses of real interfaces. No fabric is opened: faults are real ones.
    Addresses(Vec<IpAddr>),
}

impl Config {
    /// The NICs of a host of the emulated network.
    pub fn host(runtime: Runtime, host: &str) -> Config {
        Config { runtime, nics: NicSource::Host(host.to_owned()) }
    }

    /// What the environment says: `UNBROKEN_RUNTIME`, and `UNBROKEN_NICS` (addresses, with commas) or `UNBROKEN_HOST` (default `a`).
    pub fn from_env() -> Result<Config> {
        let runtime = Runtime::open().map_err(|e| Error::invalid(e.to_string()))?;
        let nics = match (variable("UNBROKEN_NICS"), variable("UNBROKEN_HOST")) {
            (Some(list), _) => NicSource::Addresses(parse_addresses(&list)?),
            (None, host) => NicSource::Host(host.unwrap_or_else(|| "a".to_owned())),
        };
        Ok(Config { runtime, nics })
    }
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|v| !v.trim().is_empty())
}

fn parse_addresses(list: &str) -> Result<Vec<IpAddr>> {
    let mut addrs = Vec::new();
    for word in list.split(',').map(str::trim) {
        let addr: IpAddr = word.parse().map_err(|_| {
            Error::invalid(format!(
                "UNBROKEN_NICS: '{word}' is not an IP address; addresses of interfaces, with commas, are right"
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses() {
        assert_eq!(parse_addresses("10.0.0.1, fd00::2").unwrap().len(), 2);
        assert!(parse_addresses("10.0.0.1,eth0").unwrap_err().to_string().contains("'eth0'"));
        assert!(parse_addresses("10.0.0.1,10.0.0.1").unwrap_err().to_string().contains("twice"));
    }
}
