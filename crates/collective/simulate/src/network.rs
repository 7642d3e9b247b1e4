//! Links of a cluster: the NICs of hosts, memory within them, and switches above them.
//!
//! Switches are a Clos network of rails. Hosts are in *pods*; NIC *r* of each host of a pod is on
//! the pod's leaf *r*. What stays on a leaf crosses no other switch. The rest goes up from its leaf
//! to the spine, and down to another; with three tiers it goes through the spine of its own pod
//! and, to another pod, through the core. A tier that is oversubscribed by *x* carries an *x*-th of
//! what the NICs below it carry. Traffic is spread evenly over a tier's switches (packet spraying,
//! or enough flows), so that all links from one leaf up are one link here.

use serde::{Deserialize, Serialize};
use unbroken_schedule::{cost, Path, Topology};

/// The switches above NICs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Clos {
    /// Hosts of a pod; 0: all hosts are in one.
    pub pod_hosts: usize,
    /// By how much leaves are oversubscribed; 1: not.
    pub oversubscription: f64,
    /// With a core above the spines of pods: by how much it is oversubscribed. `None`: two tiers.
    pub core_oversubscription: Option<f64>,
}

impl Default for Clos {
    /// Two tiers, nothing oversubscribed.
    fn default() -> Clos {
        Clos { pod_hosts: 0, oversubscription: 1.0, core_oversubscription: None }
    }
}

impl Clos {
    fn pod(&self, host: usize) -> usize {
        host.checked_div(self.pod_hosts).unwrap_or(0)
    }

    /// Whether nothing above the NICs can be the limit.
    fn is_wide(&self) -> bool {
        self.oversubscription <= 1.0 && self.core_oversubscription.is_none_or(|x| x <= 1.0)
    }
}

/// All links, by number: NICs and memory as [`cost::Links`] has them, then what leads up from
/// leaves and down to them, then the same of pods.
pub(crate) struct Links {
    /// What each carries, in Mbit/s, which is bits in a µs.
    pub capacity: Vec<f64>,
    ends: cost::Links,
    leaves: usize,
    cores: usize,
    rails: usize,
    clos: Clos,
}

impl Links {
    pub fn new(topology: &Topology, clos: &Clos) -> Links {
        let ends = cost::Links::new(topology);
        let mut capacity = ends.capacity.clone();
        let leaves = capacity.len();
        let rails = topology.hosts().iter().map(|h| h.nics.len()).max().unwrap_or(0);
        let pods = topology.hosts().len().checked_sub(1).map_or(0, |last| clos.pod(last) + 1);
        let mut below = vec![0.0; pods * rails];
        for (number, host) in topology.hosts().iter().enumerate() {
            for (rail, nic) in host.nics.iter().enumerate() {
                below[clos.pod(number) * rails + rail] += f64::from(nic.capacity_mbps);
            }
        }
        capacity.extend(below.iter().flat_map(|all| [all / clos.oversubscription; 2]));
        let cores = capacity.len();
        if let Some(core) = clos.core_oversubscription {
            let of_pod = |pod: &[f64]| pod.iter().sum::<f64>() / clos.oversubscription / core;
            capacity.extend(below.chunks(rails.max(1)).flat_map(|pod| [of_pod(pod); 2]));
        }
        Links { capacity, ends, leaves, cores, rails, clos: *clos }
    }

    /// Numbers for hosts, the same for those of one pod, if it matters.
    pub fn alike(&self, hosts: usize) -> Vec<usize> {
        let wide = self.clos.is_wide();
        (0..hosts).map(|host| if wide { 0 } else { self.clos.pod(host) }).collect()
    }

    /// What a path from one rank to another uses at its ends.
    pub fn ends(&self, topology: &Topology, pair: (usize, usize), path: Path) -> [usize; 2] {
        self.ends.ends(topology, pair, path)
    }

    /// Their names: `host0/nic1 out`, `rank3 in`, `pod0/rail1 up`, `pod0 down`.
    pub fn names(&self) -> Vec<String> {
        let both = |name: String, ways: [&str; 2]| ways.map(|way| format!("{name} {way}"));
        let mut names: Vec<String> = Vec::new();
        for (host, nics) in self.ends.nics().into_iter().enumerate() {
            let of_nic = |nic| both(format!("host{host}/nic{nic}"), ["out", "in"]);
            names.extend((0..nics).flat_map(of_nic));
        }
        let ranks = 0..(self.leaves - names.len()) / 2;
        names.extend(ranks.flat_map(|rank| both(format!("rank{rank}"), ["out", "in"])));
        let leaves = 0..(self.cores - self.leaves) / 2;
        names.extend(leaves.flat_map(|leaf| {
            let (pod, rail) = (leaf / self.rails, leaf % self.rails);
            both(format!("pod{pod}/rail{rail}"), ["up", "down"])
        }));
        let pods = 0..(self.capacity.len() - self.cores) / 2;
        names.extend(pods.flat_map(|pod| both(format!("pod{pod}"), ["up", "down"])));
        names
    }

    /// What a path from one rank to another uses.
    pub fn each(
        &self,
        topology: &Topology,
        pair: (usize, usize),
        path: Path,
        mut use_link: impl FnMut(usize),
    ) {
        self.ends(topology, pair, path).into_iter().for_each(&mut use_link);
        self.between(topology, pair, path, use_link);
    }

    /// What it uses between its ends; the same for all hosts of a pod.
    pub fn between(
        &self,
        topology: &Topology,
        (from, to): (usize, usize),
        path: Path,
        mut use_link: impl FnMut(usize),
    ) {
        let Path::Nics { from: out, to: into } = path else { return };
        if self.clos.is_wide() {
            return;
        }
        let (a, b) = (topology.host_of(from), topology.host_of(to));
        let (p, q) = (self.clos.pod(a), self.clos.pod(b));
        if (p, out) == (q, into) {
            return;
        }
        use_link(self.leaves + 2 * (p * self.rails + out));
        use_link(self.leaves + 2 * (q * self.rails + into) + 1);
        if p != q && self.clos.core_oversubscription.is_some() {
            use_link(self.cores + 2 * p);
            use_link(self.cores + 2 * q + 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use unbroken_schedule::{Fabric, Host, Nic};

    fn used(clos: Clos, pair: (usize, usize), nics: (usize, usize)) -> Vec<f64> {
        let host = Host::new(2, Nic::new(100));
        let topology = Topology::uniform(4, 1, host, Fabric::AnyToAny).unwrap();
        let links = Links::new(&topology, &clos);
        let mut used = Vec::new();
        let path = Path::Nics { from: nics.0, to: nics.1 };
        used.extend(links.ends(&topology, pair, path).map(|link| links.capacity[link]));
        links.between(&topology, pair, path, |link| used.push(links.capacity[link]));
        used
    }

    #[test]
    fn what_stays_on_a_leaf_crosses_no_spine() {
        let clos = Clos { pod_hosts: 2, oversubscription: 4.0, core_oversubscription: Some(2.0) };
        assert_eq!(used(clos, (0, 1), (1, 1)), [100.0, 100.0]);
        assert_eq!(used(clos, (0, 1), (1, 0)), [100.0, 100.0, 50.0, 50.0]);
        // a pod has 400 below its leaves, 100 above them, and 50 to the core
        assert_eq!(used(clos, (0, 2), (1, 1)), [100.0, 100.0, 50.0, 50.0, 50.0, 50.0]);
        assert_eq!(used(Clos::default(), (0, 3), (0, 1)), [100.0, 100.0]);
    }
}
