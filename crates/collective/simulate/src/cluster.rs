//! Clusters: hosts that are alike, and what is lost of them.

use serde::{Deserialize, Serialize};
use unbroken_schedule::cost::Clos;
use unbroken_schedule::{Fabric, Health, Host, Nic, Topology, MAX_NICS, MAX_RANKS};

use crate::Error;

/// Hosts that are alike, and the switches between them. What stands in a TOML file has these names;
/// what does not stand there has the values of [`Cluster::default`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Cluster {
    /// Hosts. GPUs that share NVLink are one host: a rack of 72 GPUs is one.
    pub hosts: usize,
    /// GPUs of a host.
    pub gpus: usize,
    /// NICs of a host, each on a rail of its own.
    pub nics: usize,
    /// What a NIC carries in each direction, in Mbit/s.
    pub nic_mbps: u32,
    /// What a GPU sends to others of its host, and what it receives, in Mbit/s.
    pub nvlink_mbps: u32,
    /// Ports of a NIC, each to switches of its own (planes): 1 or 2. A lost port takes its part of
    /// the NIC along.
    pub planes: usize,
    /// Whether spines join rails; else a NIC reaches those of its own rail alone.
    pub spines: bool,
    /// 2 (leaves, spines) or 3 (leaves, spines of a pod, cores).
    pub tiers: usize,
    /// Hosts of a pod, that share leaves; 0: all.
    pub pod_hosts: usize,
    /// By how much leaves are oversubscribed; 1: not.
    pub oversubscription: f64,
    /// By how much the spines of pods are; 1: not.
    pub core_oversubscription: f64,
}

impl Default for Cluster {
    /// 64 servers with eight A100 and eight NICs of 200 Gbit/s: R²CCL §8.1. Each of the GPUs has
    /// 600 GB/s of NVLink, both directions together.
    fn default() -> Cluster {
        Cluster {
            hosts: 64,
            gpus: 8,
            nics: 8,
            nic_mbps: 200_000,
            nvlink_mbps: 2_400_000,
            planes: 1,
            spines: true,
            tiers: 2,
            pod_hosts: 0,
            oversubscription: 1.0,
            core_oversubscription: 1.0,
        }
    }
}

/// A NIC, or a port of one, that is lost, or a NIC that carries less than others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Loss {
    /// The host.
    pub host: usize,
    /// The NIC.
    pub nic: usize,
    /// One port alone.
    pub port: Option<usize>,
    /// The NIC is slow: it carries so many percent of its rate, 1 to 99.
    pub left: Option<u8>,
}

impl std::fmt::Display for Loss {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "host{}/nic{}", self.host, self.nic)?;
        self.port.map_or(Ok(()), |port| write!(f, "/port{port}"))?;
        self.left.map_or(Ok(()), |left| write!(f, "={left}%"))
    }
}

impl std::str::FromStr for Loss {
    type Err = Error;

    /// `host3/nic2`, `host3/nic2/port1`, `host3/nic2=25%`.
    fn from_str(text: &str) -> Result<Loss, Error> {
        if let Some((nic, left)) = text.split_once('=') {
            let loss = nic.parse::<Loss>()?;
            let percent = left.strip_suffix('%').and_then(|left| left.parse().ok());
            return match percent.filter(|left| (1..=99).contains(left)) {
                Some(left) if loss.port.is_none() => Ok(Loss { left: Some(left), ..loss }),
                _ => Err(Error::value(
                    "fail",
                    "a slow NIC",
                    format!("'{text}'"),
                    "host3/nic2=25% is right, with 1 to 99",
                )),
            };
        }
        let number = |part: Option<&str>, word: &str| -> Option<usize> {
            part?.strip_prefix(word)?.parse().ok()
        };
        let mut parts = text.split('/');
        let (host, nic) = (number(parts.next(), "host"), number(parts.next(), "nic"));
        let port = parts.next();
        let (of_port, rest) = (number(port, "port"), parts.next());
        match (host, nic) {
            (Some(host), Some(nic)) if rest.is_none() && port.is_some() == of_port.is_some() => {
                Ok(Loss { host, nic, port: of_port, left: None })
            }
            _ => {
                let right = "host3/nic2 is right";
                Err(Error::value("fail", "a lost NIC", format!("'{text}'"), right))
            }
        }
    }
}

impl Cluster {
    /// Whether the numbers make sense.
    pub fn check(&self) -> Result<(), Error> {
        let within = |argument, what, given: usize, most: usize| match (1..=most).contains(&given) {
            true => Ok(()),
            false => Err(Error::value(argument, what, given, format!("1 to {most} are right"))),
        };
        within("nics", "NICs of a host", self.nics, MAX_NICS)?;
        within("gpus", "GPUs of a host", self.gpus, MAX_RANKS)?;
        within("hosts", "hosts", self.hosts, MAX_RANKS / self.gpus)?;
        within("planes", "planes", self.planes, 2)?;
        if !(2..=3).contains(&self.tiers) {
            return Err(Error::value("tiers", "tiers", self.tiers, "2 and 3 are right"));
        }
        let factors = [
            ("oversubscription", self.oversubscription),
            ("core-oversubscription", self.core_oversubscription),
        ];
        for (argument, factor) in factors {
            if !(factor.is_finite() && factor >= 1.0) {
                let right = "1 (none) and more are right";
                return Err(Error::value(argument, "oversubscription", factor, right));
            }
        }
        let rates = [
            ("nic-rate", "the rate of NICs", self.nic_mbps),
            ("nvlink-rate", "NVLink", self.nvlink_mbps),
        ];
        match rates.into_iter().find(|(.., mbps)| *mbps == 0) {
            Some((argument, what, _)) => Err(Error::value(argument, what, 0, "more is right")),
            None => Ok(()),
        }
    }

    /// Whether a lost part is there.
    pub fn check_loss(&self, loss: &Loss) -> Result<(), Error> {
        let there = loss.host < self.hosts
            && loss.nic < self.nics
            && loss.port.is_none_or(|port| self.planes > 1 && port < self.planes);
        let ports = if self.planes > 1 { ", with port0 and port1" } else { " of one port" };
        match there {
            true => Ok(()),
            false => Err(Error::Unknown {
                argument: "fail",
                name: loss.to_string(),
                right: format!(
                    "there are host0 to host{} with nic0 to nic{}{ports}",
                    self.hosts - 1,
                    self.nics - 1
                ),
            }),
        }
    }

    /// The switches.
    pub fn clos(&self) -> Clos {
        Clos {
            pod_hosts: self.pod_hosts,
            oversubscription: self.oversubscription,
            core_oversubscription: (self.tiers == 3).then_some(self.core_oversubscription),
        }
    }

    /// Some of the hosts, with what is lost, for `groups` communicators that do the same at the
    /// same time and have `ranks` ranks on each host. They are seen as one whose vector is theirs
    /// together: it has the NICs of all, and each of its ranks the memory of all of them.
    pub fn topology(
        &self,
        hosts: impl Iterator<Item = usize>,
        (ranks, groups): (usize, usize),
        lost: &[Loss],
    ) -> Result<Topology, Error> {
        let fabric = if self.spines { Fabric::AnyToAny } else { Fabric::RailOnly };
        let memory_mbps =
            (u64::from(self.nvlink_mbps) * groups as u64).min(u64::from(u32::MAX)) as u32;
        let host = Host { memory_mbps, ..Host::new(self.nics, Nic::new(self.nic_mbps)) };
        let hosts: Vec<usize> = hosts.collect();
        let mut topology = Topology::uniform(hosts.len(), ranks, host, fabric)?;
        for (number, host) in hosts.into_iter().enumerate() {
            for nic in 0..self.nics {
                let health = self.health(host, nic, lost);
                if health != Health::Up {
                    topology = topology.with_health(number, nic, health)?;
                }
            }
        }
        Ok(topology)
    }

    fn health(&self, host: usize, nic: usize, lost: &[Loss]) -> Health {
        let of_nic = || lost.iter().filter(|l| (l.host, l.nic) == (host, nic));
        let slowest = of_nic().filter_map(|l| l.left).min().unwrap_or(100);
        let mut ports: Vec<Option<usize>> =
            of_nic().filter(|l| l.left.is_none()).map(|l| l.port).collect();
        ports.sort_unstable();
        ports.dedup();
        let of_ports = match ports.len() {
            count if ports.contains(&None) || count >= self.planes => 0,
            count => 100 - 100 * count / self.planes,
        };
        match slowest.min(of_ports as u8) {
            0 => Health::Down,
            100 => Health::Up,
            left => Health::Slow(left),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn losses_are_read_as_they_are_shown() {
        for text in ["host3/nic2", "host0/nic7/port1", "host1/nic0=25%"] {
            assert_eq!(text.parse::<Loss>().unwrap().to_string(), text);
        }
        for text in ["host3", "nic2", "host3/nic", "host3/nic2/", "host3/nic2/port0/x", "h3/n2"] {
            assert!(text.parse::<Loss>().unwrap_err().to_string().contains("host3/nic2 is right"));
        }
        for text in ["host3/nic2=0%", "host3/nic2=100%", "host3/nic2=25", "host3/nic2/port0=25%"] {
            let said = text.parse::<Loss>().unwrap_err().to_string();
            assert!(said.contains("host3/nic2=25% is right"), "{said}");
        }
        let cluster = Cluster { hosts: 4, ..Cluster::default() };
        let says =
            |text: &str| cluster.check_loss(&text.parse().unwrap()).map_err(|e| e.to_string());
        assert_eq!(says("host3/nic7"), Ok(()));
        assert_eq!(
            says("host4/nic0").unwrap_err(),
            "'host4/nic0' is not there: there are host0 to host3 with nic0 to nic7 of one port"
        );
        assert!(says("host0/nic0/port0").is_err());
    }

    #[test]
    fn a_lost_port_takes_its_plane_along() {
        let cluster = Cluster { hosts: 2, planes: 2, ..Cluster::default() };
        let free = |lost: &[&str]| {
            let lost: Vec<Loss> = lost.iter().map(|l| l.parse().unwrap()).collect();
            cluster.topology(0..2, (8, 1), &lost).unwrap().hosts()[0].free_mbps()
        };
        assert_eq!(free(&[]), 1_600_000);
        assert_eq!(free(&["host0/nic1/port0"]), 1_500_000);
        assert_eq!(free(&["host0/nic1/port0", "host0/nic1/port1"]), 1_400_000);
        assert_eq!(free(&["host0/nic1", "host1/nic0"]), 1_400_000);
        assert_eq!(free(&["host0/nic1=25%"]), 1_450_000);
        assert_eq!(free(&["host0/nic1=75%", "host0/nic1/port0"]), 1_500_000);
        assert_eq!(free(&["host0/nic1=75%", "host0/nic1"]), 1_400_000);
    }

    #[test]
    fn numbers_without_sense_are_named() {
        let says = |c: Cluster| c.check().unwrap_err().to_string();
        let of = Cluster::default;
        assert_eq!(says(Cluster { nics: 65, ..of() }), "NICs of a host is 65; 1 to 64 are right");
        assert!(says(Cluster { hosts: 0, ..of() }).contains("1 to 8192"));
        assert!(says(Cluster { oversubscription: 0.5, ..of() }).contains("1 (none)"));
        assert!(says(Cluster { tiers: 4, ..of() }).contains("2 and 3"));
    }
}
