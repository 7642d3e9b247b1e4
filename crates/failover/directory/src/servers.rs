//! Which servers a Redis URL names: one, the sentinels that know it, or nodes of a cluster.
//!
//! ```text
//! redis://HOST[:6379]
//! redis+sentinel://HOST[:26379],HOST[:26379]/MASTER      who is asked where the master is
//! redis+cluster://HOST[:6379],HOST[:6379]                nodes; the right one is found by them
//! ```
//!
//! `rediss` in place of `redis` is TLS.

use std::fmt;

use url::{Host, Url};

use crate::error::Result;
use crate::settings::{decode, wrong, RIGHT};

/// Servers that a URL names at most: they are asked one after the other.
const MAX_SERVERS: usize = 16;
const SERVER_PORT: u16 = 6379;
const SENTINEL_PORT: u16 = 26_379;

/// Where a server is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    /// Its name or IP address.
    pub host: String,
    /// Its TCP port.
    pub port: u16,
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.host.contains(':') {
            true => write!(f, "[{}]:{}", self.host, self.port),
            false => write!(f, "{}:{}", self.host, self.port),
        }
    }
}

/// The servers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Servers {
    /// One.
    One(Address),
    /// Sentinels, which are asked in this order where the master is.
    Sentinels {
        /// The sentinels.
        sentinels: Vec<Address>,
        /// What they call the master.
        master: String,
    },
    /// Nodes of a cluster. All keys are on one of its masters, to which any node leads.
    Cluster(Vec<Address>),
}

impl Servers {
    /// What a URL's scheme says besides `redis` or `rediss`.
    pub(crate) fn suffix(&self) -> &'static str {
        match self {
            Servers::One(_) => "",
            Servers::Sentinels { .. } => "+sentinel",
            Servers::Cluster(_) => "+cluster",
        }
    }

    /// Those that the URL names.
    pub(crate) fn named(&self) -> &[Address] {
        match self {
            Servers::One(address) => std::slice::from_ref(address),
            Servers::Sentinels { sentinels: named, .. } | Servers::Cluster(named) => named,
        }
    }
}

/// Which servers a URL has by its scheme.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    One,
    Sentinels,
    Cluster,
}

/// Takes a URL apart: its servers; the same URL as it would be of the first of them alone, without
/// the sentinels' name of the master.
pub(crate) fn split(text: &str) -> Result<(Servers, Url)> {
    let (scheme, rest) = text.split_once("://").unwrap_or((text, ""));
    let (base, kind) = match scheme.split_once('+') {
        None => (scheme, Kind::One),
        Some((base, "sentinel")) => (base, Kind::Sentinels),
        Some((base, "cluster")) => (base, Kind::Cluster),
        Some((_, other)) => {
            let right = "redis://, redis+sentinel:// and redis+cluster:// are right";
            return Err(wrong(&format!("begins with '+{other}'"), right));
        }
    };
    if kind == Kind::One {
        let url = Url::parse(text).map_err(|e| wrong(&format!("is no URL ({e})"), RIGHT))?;
        return Ok((Servers::One(address(&url, SERVER_PORT)?), url));
    }
    let (authority, tail) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
    let (login, hosts) = match authority.rsplit_once('@') {
        Some((login, hosts)) => (format!("{login}@"), hosts),
        None => (String::new(), authority),
    };
    let port = if kind == Kind::Sentinels { SENTINEL_PORT } else { SERVER_PORT };
    let named: Vec<Address> =
        hosts.split(',').map(|host| one(host, port)).collect::<Result<_>>()?;
    if named.len() > MAX_SERVERS {
        let right = format!("1 to {MAX_SERVERS} are right");
        return Err(wrong(&format!("names {} servers", named.len()), &right));
    }
    let whole = format!("{base}://{login}{}{tail}", named[0]);
    let mut url = Url::parse(&whole).map_err(|e| wrong(&format!("is no URL ({e})"), RIGHT))?;
    if kind == Kind::Cluster {
        return Ok((Servers::Cluster(named), url));
    }
    let path = url.path().trim_matches('/').to_owned();
    let (master, db) = path.split_once('/').unwrap_or((&path, ""));
    if master.is_empty() {
        let right = "redis+sentinel://HOST,HOST/MASTER is right";
        return Err(wrong("names no master", right));
    }
    let master = decode(master, "name of the master")?;
    url.set_path(db);
    Ok((Servers::Sentinels { sentinels: named, master }, url))
}

/// A server of a list.
fn one(text: &str, port: u16) -> Result<Address> {
    let url = Url::parse(&format!("redis://{text}"));
    let url = url.map_err(|e| wrong(&format!("has the server '{text}' ({e})"), RIGHT))?;
    address(&url, port)
}

fn address(url: &Url, port: u16) -> Result<Address> {
    let host = match url.host() {
        Some(Host::Domain(name)) if !name.is_empty() => decode(name, "host")?,
        Some(Host::Ipv4(addr)) => addr.to_string(),
        Some(Host::Ipv6(addr)) => addr.to_string(),
        _ => return Err(wrong("names no host", RIGHT)),
    };
    Ok(Address { host, port: url.port().unwrap_or(port) })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(host: &str, port: u16) -> Address {
        Address { host: host.into(), port }
    }

    #[test]
    fn servers_are_those_of_the_url() {
        let servers = |text| split(text).unwrap().0;
        assert_eq!(servers("redis://h"), Servers::One(at("h", 6379)));
        assert_eq!(
            servers("redis+sentinel://me:pw@a,[fd00::1]:5,10.0.0.1/lab%201/3?lease=9"),
            Servers::Sentinels {
                sentinels: vec![at("a", 26379), at("fd00::1", 5), at("10.0.0.1", 26379)],
                master: "lab 1".into()
            }
        );
        assert_eq!(
            servers("rediss+cluster://a:7000,b"),
            Servers::Cluster(vec![at("a", 7000), at("b", 6379)])
        );
        let (_, url) = split("rediss+sentinel://me:pw@a,b/lab/3?lease=9").unwrap();
        assert_eq!(url.as_str(), "rediss://me:pw@a:26379/3?lease=9");
        let (_, url) = split("redis+cluster://[fd00::1],b?prefix=x").unwrap();
        assert_eq!(url.as_str(), "redis://[fd00::1]:6379?prefix=x");
    }

    #[test]
    fn what_is_wrong_is_named_with_what_is_right() {
        let many = format!("redis+cluster://{}", vec!["h"; 17].join(","));
        for (text, what, right) in [
            ("redis+ring://h", "'+ring'", "redis+sentinel://"),
            ("redis+sentinel://a,b", "no master", "/MASTER"),
            ("redis+sentinel://a,,b/lab", "no host", "redis://"),
            ("redis+cluster://", "no host", "redis://"),
            ("redis+cluster://a:x", "the server 'a:x'", "redis://"),
            (&many, "17 servers", "1 to 16"),
        ] {
            let error = split(text).unwrap_err().to_string();
            assert!(error.contains(what) && error.contains(right), "{text}: {error}");
        }
    }
}
