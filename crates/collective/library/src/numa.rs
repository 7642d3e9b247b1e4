//! NUMA nodes of ranks and NICs, and what the link between nodes carries.
//!
//! A rank reaches a NIC of another node over the link between the nodes, or through a rank over
//! there, which forwards (`unbroken_schedule`, `relay`; R²CCL §5.1). Nodes are the system's: those
//! of the NICs' devices, and of the processors that the rank may run on. What the link carries is
//! nowhere to be read, so that nobody forwards before a program or a person says it.

use std::path::Path;

use rustix::thread::{sched_getaffinity, CpuSet};
use serde::{Deserialize, Serialize};
use unbroken::Host;
use unbroken_environment as environment;
use unbroken_schedule::Host as HostShape;

use crate::error::{Error, Result};

const NODES: &str = "/sys/devices/system/node";
/// Nodes past that are not looked at.
const MOST_NODES: u8 = u8::MAX;

/// What is known of the NUMA nodes of a rank's host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Numa {
    /// The node that this rank's memory (or its GPU) is attached to. `None`: that of the processors
    /// that it may run on, if they are of one node.
    pub node: Option<u8>,
    /// The node of each NIC; empty: the system's.
    pub nics: Vec<u8>,
    /// What the link between nodes carries, in each direction, in Mbit/s. `None`: as much as is
    /// asked of it, so that ranks use NICs of other nodes by themselves.
    pub cross_mbps: Option<u32>,
    /// What a rank sends to others of its host through memory (or NVLink), in Mbit/s. `None`: as
    /// much as is asked.
    pub memory_mbps: Option<u32>,
}

impl Numa {
    /// With what the environment says of the link and of memory.
    pub fn from_env() -> Result<Numa> {
        let rate = |name| -> Result<Option<u32>> {
            let text = environment::text(name);
            let rate = text.map(|text| unbroken_units::read::rate(text.trim())).transpose();
            let bps = rate.map_err(|why| Error::Refused(format!("{name}: {why}")))?;
            Ok(bps.map(|bps| u32::try_from(bps / 1_000_000).unwrap_or(u32::MAX).max(1)))
        };
        Ok(Numa {
            cross_mbps: rate(environment::COLL_CROSS_NUMA_RATE)?,
            memory_mbps: rate(environment::COLL_MEMORY_RATE)?,
            ..Numa::default()
        })
    }
}

/// What a rank says of the nodes of its host.
#[derive(Serialize, Deserialize, Clone, Debug, Default)]
pub(crate) struct Nodes {
    /// Its own; `None`: not known, or several.
    node: Option<u8>,
    nics: Vec<Option<u8>>,
    cross_mbps: Option<u32>,
    memory_mbps: Option<u32>,
}

impl Nodes {
    /// As the options say, and where they do not, the system.
    pub(crate) fn of(host: &Host, numa: &Numa) -> Result<Nodes> {
        let count = host.nic_count();
        let nics = match numa.nics.len() {
            0 => (0..count).map(|nic| host.numa_node(nic)).collect(),
            given if given == count => numa.nics.iter().copied().map(Some).collect(),
            given => {
                return Err(Error::Refused(format!(
                    "NUMA nodes of {given} NICs; the host has {count}"
                )));
            }
        };
        let node = numa.node.or_else(|| own_node(Path::new(NODES)));
        Ok(Nodes { node, nics, cross_mbps: numa.cross_mbps, memory_mbps: numa.memory_mbps })
    }
}

/// Puts the nodes of a host's NICs and the rates of its links into its shape, and gives the node of
/// each of its ranks. Of a host on which one is not known, all are 0.
pub(crate) fn place(shape: &mut HostShape, ranks: &[&Nodes]) -> Vec<u8> {
    let Some(first) = ranks.first() else { return Vec::new() };
    shape.cross_numa_mbps = first.cross_mbps.unwrap_or(u32::MAX);
    shape.memory_mbps = first.memory_mbps.unwrap_or(u32::MAX);
    let own: Option<Vec<u8>> = ranks.iter().map(|rank| rank.node).collect();
    let of_nics = first.nics.iter().take(shape.nics.len());
    let nics: Option<Vec<u8>> = of_nics.copied().collect();
    match (own, nics) {
        (Some(own), Some(nics)) if nics.len() == shape.nics.len() => {
            shape.nics.iter_mut().zip(nics).for_each(|(nic, node)| nic.numa = node);
            own
        }
        _ => vec![0; ranks.len()],
    }
}

/// The node of all processors that this thread may run on. `None`: they are of several, or the
/// system does not say.
fn own_node(nodes: &Path) -> Option<u8> {
    let allowed = sched_getaffinity(None).ok()?;
    let holds = |node: &u8| {
        let list = std::fs::read_to_string(nodes.join(format!("node{node}/cpulist")));
        list.ok().is_some_and(|list| holds_all(&list, &allowed))
    };
    (0..MOST_NODES).take_while(|node| nodes.join(format!("node{node}")).exists()).find(holds)
}

/// Whether a list as the kernel writes it (`0-3,8`) has all of these processors.
fn holds_all(list: &str, cpus: &CpuSet) -> bool {
    let ranges: Option<Vec<(usize, usize)>> = list
        .trim()
        .split(',')
        .filter(|range| !range.is_empty())
        .map(|range| {
            let (from, to) = range.split_once('-').unwrap_or((range, range));
            Some((from.parse().ok()?, to.parse().ok()?))
        })
        .collect();
    ranges.is_some_and(|ranges| {
        let listed = |cpu| ranges.iter().any(|(from, to)| (*from..=*to).contains(&cpu));
        (0..CpuSet::MAX_CPU).filter(|cpu| cpus.is_set(*cpu)).all(listed)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use unbroken_schedule::Nic;

    fn nodes(node: Option<u8>, nics: &[Option<u8>]) -> Nodes {
        Nodes { node, nics: nics.to_vec(), cross_mbps: Some(7), memory_mbps: None }
    }

    #[test]
    fn a_host_has_nodes_where_all_are_known() {
        let known = [nodes(Some(1), &[Some(0), Some(1)]), nodes(Some(0), &[Some(0), Some(1)])];
        let mut shape = HostShape::new(2, Nic::new(100));
        assert_eq!(place(&mut shape, &known.each_ref()), [1, 0]);
        assert_eq!(shape.nics.iter().map(|nic| nic.numa).collect::<Vec<_>>(), [0, 1]);
        assert_eq!((shape.cross_numa_mbps, shape.memory_mbps), (7, u32::MAX));
        for unknown in [nodes(None, &[Some(0), Some(1)]), nodes(Some(1), &[Some(1), None])] {
            let mut shape = HostShape::new(2, Nic::new(100));
            assert_eq!(place(&mut shape, &[&unknown, &known[0]]), [0, 0]);
            assert!(shape.nics.iter().all(|nic| nic.numa == 0));
        }
    }

    #[test]
    fn a_node_is_that_of_all_processors() {
        let mut cpus = CpuSet::new();
        [1, 8].into_iter().for_each(|cpu| cpus.set(cpu));
        assert!(holds_all("0-3,8\n", &cpus) && holds_all("1,8", &cpus));
        for list in ["0-3", "8", "", "a-b,1,8"] {
            assert!(!holds_all(list, &cpus), "{list}");
        }
    }
}
