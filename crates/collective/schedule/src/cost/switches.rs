//! Links of a cluster: the NICs of hosts, memory within them, and switches above them.
//!
//! Switches are a Clos network of rails. Hosts are in *pods*; NIC *r* of each host of a pod is on
//! the pod's leaf *r*. What stays on a leaf crosses no other switch. The rest goes up from its leaf
//! to the spine, and down to another; with three tiers it goes through the spine of its own pod
//! and, to another pod, through the core. A tier that is oversubscribed by *x* carries an *x*-th of
//! what the NICs below it carry. Traffic is spread evenly over a tier's switches (packet spraying,
//! or enough flows), so that all links from one leaf up are one link here.

use super::Links;
use crate::{Path, Topology};

/// The switches above NICs.
#[derive(Clone, Copy, Debug, PartialEq)]
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
    pub fn is_wide(&self) -> bool {
        self.oversubscription <= 1.0 && self.core_oversubscription.is_none_or(|x| x <= 1.0)
    }
}

/// The switches above the hosts of a topology, which may be some of a cluster's.
///
/// Hosts of a pod that are not in the topology are taken to do the same as those that are: each
/// host has its part of what leads up from its leaves.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Switches {
    clos: Clos,
    /// The pod of each host; missing: the first.
    pods: Vec<usize>,
}

impl Switches {
    /// Those above some hosts of a cluster, by their numbers there, in the order of the topology.
    pub fn over(clos: Clos, hosts: impl Iterator<Item = usize>) -> Switches {
        Switches { clos, pods: hosts.map(|host| clos.pod(host)).collect() }
    }

    /// Whether nothing above the NICs can be the limit.
    pub fn is_wide(&self) -> bool {
        self.clos.is_wide()
    }

    fn pod(&self, host: usize) -> usize {
        self.pods.get(host).copied().unwrap_or(0)
    }

    /// The pods of so many hosts by number, in the order in which they come first: the same for
    /// groups of hosts to which switches are the same.
    pub fn pattern(&self, hosts: usize) -> Vec<usize> {
        if self.is_wide() {
            return vec![0; hosts];
        }
        let mut seen = Vec::new();
        (0..hosts).map(|host| numbered(&mut seen, self.pod(host))).collect()
    }
}

/// The place of a pod among those that were seen before.
fn numbered(seen: &mut Vec<usize>, pod: usize) -> usize {
    seen.iter().rposition(|other| *other == pod).unwrap_or_else(|| {
        seen.push(pod);
        seen.len() - 1
    })
}

/// All links, by number: NICs and memory as [`Links`] has them, then what leads up from leaves and
/// down to them, then the same of pods.
pub struct Network {
    /// What each carries, in Mbit/s, which is bits in a µs.
    pub capacity: Vec<f64>,
    ends: Links,
    leaves: usize,
    cores: usize,
    rails: usize,
    clos: Clos,
    /// Of each host: the place of its pod.
    pods: Vec<usize>,
    /// The pods, as the cluster counts them.
    names: Vec<usize>,
}

impl Network {
    /// The links of these hosts.
    pub fn new(topology: &Topology, switches: &Switches) -> Network {
        let ends = Links::new(topology);
        let clos = switches.clos;
        let mut capacity = ends.capacity.clone();
        let leaves = capacity.len();
        let rails = topology.hosts().iter().map(|h| h.nics.len()).max().unwrap_or(0);
        let mut names = Vec::new();
        let of_host = |host: usize| numbered(&mut names, switches.pod(host));
        let pods: Vec<usize> = (0..topology.hosts().len()).map(of_host).collect();
        let mut below = vec![0.0; names.len() * rails];
        for (pod, host) in pods.iter().zip(topology.hosts()) {
            for (rail, nic) in host.nics.iter().enumerate() {
                below[pod * rails + rail] += f64::from(nic.capacity_mbps);
            }
        }
        capacity.extend(below.iter().flat_map(|all| [all / clos.oversubscription; 2]));
        let cores = capacity.len();
        if let Some(core) = clos.core_oversubscription {
            let of_pod = |pod: &[f64]| pod.iter().sum::<f64>() / clos.oversubscription / core;
            capacity.extend(below.chunks(rails.max(1)).flat_map(|pod| [of_pod(pod); 2]));
        }
        Network { capacity, ends, leaves, cores, rails, clos, pods, names }
    }

    /// Numbers for hosts, the same for those of one pod, if it matters.
    pub(crate) fn alike(&self) -> Vec<usize> {
        match self.clos.is_wide() {
            true => vec![0; self.pods.len()],
            false => self.pods.clone(),
        }
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
            let (pod, rail) = (self.names[leaf / self.rails], leaf % self.rails);
            both(format!("pod{pod}/rail{rail}"), ["up", "down"])
        }));
        let pods = 0..(self.capacity.len() - self.cores) / 2;
        names.extend(pods.flat_map(|pod| both(format!("pod{}", self.names[pod]), ["up", "down"])));
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
        let (p, q) = (self.pods[a], self.pods[b]);
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
    use crate::{Fabric, Host, Nic};

    fn used(clos: Clos, pair: (usize, usize), nics: (usize, usize)) -> Vec<f64> {
        used_among(Switches::over(clos, 0..4), pair, nics)
    }

    fn used_among(switches: Switches, pair: (usize, usize), nics: (usize, usize)) -> Vec<f64> {
        let host = Host::new(2, Nic::new(100));
        let topology = Topology::uniform(4, 1, host, Fabric::AnyToAny).unwrap();
        let links = Network::new(&topology, &switches);
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

    /// Hosts 1, 2, 5 and 9 of a cluster with pods of four: the first two share leaves.
    #[test]
    fn hosts_of_a_group_keep_their_pods() {
        let clos = Clos { pod_hosts: 4, oversubscription: 4.0, core_oversubscription: None };
        let among = |pair| used_among(Switches::over(clos, [1, 2, 5, 9].into_iter()), pair, (1, 1));
        assert_eq!(among((0, 1)), [100.0, 100.0]);
        // two hosts of the first pod have two NICs on a leaf, the others one each
        assert_eq!(among((1, 2)), [100.0, 100.0, 50.0, 25.0]);
        assert_eq!(among((2, 3)), [100.0, 100.0, 25.0, 25.0]);
        let pattern = |hosts: [usize; 4]| Switches::over(clos, hosts.into_iter()).pattern(4);
        assert_eq!(pattern([1, 2, 5, 9]), [0, 0, 1, 2]);
        assert_eq!(pattern([1, 2, 5, 9]), pattern([12, 13, 4, 8]));
    }
}
