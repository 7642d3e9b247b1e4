//! What fails, by the names that people use: a NIC, a switch, a rail, a pod, a part of the spines.

use std::fmt;
use std::str::FromStr;

use unbroken_schedule::cost::Clos;

use crate::cluster::{Cluster, Loss};
use crate::Error;

/// What fails. Leaves (ToRs) are counted pod by pod, and by rail within a pod.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Outage {
    /// A NIC, a port of one, or a part of what a NIC carries.
    Nic(Loss),
    /// A leaf: that NIC, or that port of it, of all hosts of a pod.
    Leaf {
        /// Its number.
        number: usize,
        /// The plane, where NICs have several ports.
        port: Option<usize>,
    },
    /// A rail: that NIC, or that port of it, of all hosts.
    Rail {
        /// Its number.
        number: usize,
        /// The plane, where NICs have several ports.
        port: Option<usize>,
    },
    /// All leaves of a pod.
    Pod(usize),
    /// Of the spines so many percent are left.
    Spines(u8),
    /// Of the cores above pods so many percent are left.
    Cores(u8),
}

/// What is left of switches above leaves, in parts of what they carry.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SwitchesLeft {
    /// Of the spines.
    pub spines: f64,
    /// Of the cores, where there are any.
    pub cores: f64,
}

impl Default for SwitchesLeft {
    /// All of them.
    fn default() -> SwitchesLeft {
        SwitchesLeft { spines: 1.0, cores: 1.0 }
    }
}

impl SwitchesLeft {
    /// The switches that are left.
    pub fn of(self, clos: Clos) -> Clos {
        Clos {
            oversubscription: clos.oversubscription / self.spines,
            core_oversubscription: clos.core_oversubscription.map(|core| core / self.cores),
            ..clos
        }
    }
}

/// How an outage is written.
const RIGHT: &str = "host3/nic2, host3/nic2/port1, host3/nic2=25%, tor3, rail2, pod1, spine=75% \
                     and core=50% are right";

impl FromStr for Outage {
    type Err = Error;

    fn from_str(text: &str) -> Result<Outage, Error> {
        if text.starts_with("host") {
            return text.parse().map(Outage::Nic);
        }
        let wrong = || Error::value("fail", "what fails", format!("'{text}'"), RIGHT);
        if let Some((part, left)) = text.split_once('=') {
            let left = left.strip_suffix('%').and_then(|left| left.parse::<u8>().ok());
            let left = left.filter(|left| (1..=99).contains(left));
            return match (part, left) {
                ("spine", Some(left)) => Ok(Outage::Spines(left)),
                ("core", Some(left)) => Ok(Outage::Cores(left)),
                _ => Err(wrong()),
            };
        }
        let (switch, port) = match text.split_once('/') {
            None => (text, None),
            Some((switch, port)) => {
                let port = port.strip_prefix("port").and_then(|port| port.parse().ok());
                (switch, Some(port.ok_or_else(wrong)?))
            }
        };
        let number = |word: &str| switch.strip_prefix(word)?.parse::<usize>().ok();
        match (number("tor"), number("rail"), number("pod"), port) {
            (Some(number), ..) => Ok(Outage::Leaf { number, port }),
            (_, Some(number), ..) => Ok(Outage::Rail { number, port }),
            (.., Some(number), None) => Ok(Outage::Pod(number)),
            _ => Err(wrong()),
        }
    }
}

impl fmt::Display for Outage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let port = match self {
            Outage::Nic(loss) => return loss.fmt(f),
            Outage::Pod(number) => return write!(f, "pod{number}"),
            Outage::Spines(left) => return write!(f, "spine={left}%"),
            Outage::Cores(left) => return write!(f, "core={left}%"),
            Outage::Leaf { number, port } => {
                write!(f, "tor{number}")?;
                port
            }
            Outage::Rail { number, port } => {
                write!(f, "rail{number}")?;
                port
            }
        };
        port.map_or(Ok(()), |port| write!(f, "/port{port}"))
    }
}

impl Cluster {
    /// Pods, also where all hosts are in one.
    pub fn pods(&self) -> usize {
        self.hosts.div_ceil(self.hosts_of_pod())
    }

    /// Hosts of a pod, but the last may have fewer.
    pub fn hosts_of_pod(&self) -> usize {
        match self.pod_hosts {
            0 => self.hosts,
            hosts => hosts,
        }
    }

    /// What is lost of NICs with these outages, each NIC once, and what is left of the switches. An
    /// error names what is not there, before anything of its size is made.
    pub fn outages(&self, outages: &[Outage]) -> Result<(Vec<Loss>, SwitchesLeft), Error> {
        let mut lost: Vec<Loss> = Vec::new();
        let mut left = SwitchesLeft::default();
        for outage in outages {
            self.check_outage(outage)?;
            let pod = self.hosts_of_pod();
            match *outage {
                Outage::Nic(loss) => lost.push(loss),
                Outage::Spines(percent) => {
                    left.spines = left.spines.min(f64::from(percent) / 100.0)
                }
                Outage::Cores(percent) => left.cores = left.cores.min(f64::from(percent) / 100.0),
                Outage::Leaf { number, port } => {
                    let first = number / self.nics * pod;
                    let hosts = first..(first + pod).min(self.hosts);
                    lost.extend(hosts.map(|host| of_host(host, number % self.nics, port)));
                }
                Outage::Rail { number, port } => {
                    lost.extend((0..self.hosts).map(|host| of_host(host, number, port)));
                }
                Outage::Pod(number) => {
                    let hosts = number * pod..((number + 1) * pod).min(self.hosts);
                    let nics = |host| (0..self.nics).map(move |nic| of_host(host, nic, None));
                    lost.extend(hosts.flat_map(nics));
                }
            }
        }
        lost.sort_unstable();
        lost.dedup();
        Ok((lost, left))
    }

    fn check_outage(&self, outage: &Outage) -> Result<(), Error> {
        let ports = match self.planes {
            1 => "NICs have one port".to_string(),
            planes => format!("with port0 to port{}", planes - 1),
        };
        let has =
            |port: &Option<usize>| port.is_none_or(|port| self.planes > 1 && port < self.planes);
        let (there, right) = match outage {
            Outage::Nic(loss) => return self.check_loss(loss),
            Outage::Leaf { number, port } => {
                let leaves = self.pods() * self.nics;
                let right = format!(
                    "there are tor0 to tor{}, {} of each of {} pods; {ports}",
                    leaves - 1,
                    self.nics,
                    self.pods()
                );
                (*number < leaves && has(port), right)
            }
            Outage::Rail { number, port } => {
                let right = format!("there are rail0 to rail{}; {ports}", self.nics - 1);
                (*number < self.nics && has(port), right)
            }
            Outage::Pod(number) => {
                (*number < self.pods(), format!("there are pod0 to pod{}", self.pods() - 1))
            }
            Outage::Spines(_) => (self.spines, "rails are apart: no spine joins them".into()),
            Outage::Cores(_) => (self.tiers == 3, "cores are above three tiers (--tiers 3)".into()),
        };
        match there {
            true => Ok(()),
            false => Err(Error::Unknown { argument: "fail", name: outage.to_string(), right }),
        }
    }
}

fn of_host(host: usize, nic: usize, port: Option<usize>) -> Loss {
    Loss { host, nic, port, left: None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outages_are_read_as_they_are_shown() {
        for text in [
            "host3/nic2",
            "host3/nic2=25%",
            "tor3",
            "tor12/port1",
            "rail2",
            "rail2/port0",
            "pod1",
            "spine=75%",
            "core=50%",
        ] {
            assert_eq!(text.parse::<Outage>().unwrap().to_string(), text);
        }
        for text in ["tor", "leaf3", "spine", "spine=0%", "spine=100%", "pod1/port0", "rail2/x"] {
            let said = text.parse::<Outage>().unwrap_err().to_string();
            assert!(said.contains("tor3, rail2, pod1, spine=75%"), "{said}");
        }
    }

    #[test]
    fn switches_take_the_nics_of_their_pod_along() {
        let cluster = Cluster { hosts: 10, pod_hosts: 4, nics: 2, planes: 2, ..Cluster::default() };
        let of = |texts: &[&str]| {
            let outages: Vec<Outage> = texts.iter().map(|text| text.parse().unwrap()).collect();
            cluster.outages(&outages).map(|(lost, left)| {
                (lost.iter().map(Loss::to_string).collect::<Vec<_>>().join(" "), left)
            })
        };
        let lost = |texts: &[&str]| of(texts).unwrap().0;
        // the third pod has two hosts
        assert_eq!(lost(&["tor5"]), "host8/nic1 host9/nic1");
        assert_eq!(lost(&["tor4/port1"]), "host8/nic0/port1 host9/nic0/port1");
        assert_eq!(lost(&["rail1"]).split(' ').count(), 10);
        assert_eq!(lost(&["pod2"]).split(' ').count(), 4);
        assert_eq!(lost(&["tor5", "host9/nic1"]), "host8/nic1 host9/nic1", "each once");
        assert_eq!(of(&["spine=75%"]).unwrap().1.spines, 0.75);
        let says = |text: &str| of(&[text]).unwrap_err().to_string();
        assert_eq!(
            says("tor6"),
            "'tor6' is not there: there are tor0 to tor5, 2 of each of 3 pods; with port0 to port1"
        );
        assert!(says("rail2").contains("rail0 to rail1"));
        assert!(says("pod3").contains("pod0 to pod2"));
        assert!(says("core=50%").contains("three tiers"));
        assert!(says("tor1000000000000").contains("is not there"));
    }
}
