//! Every message of a plan: what it waits for, and which links it uses. Other simulators can follow
//! it, so that what [`unbroken_schedule::cost::volumes`] says can be compared with what they say.
//!
//! # How it is read
//!
//! A message may be sent when all steps are done that the step which sends it waits for, when the
//! message before it on its lane has left all links, and when fewer than [`room`](Traffic::room)
//! messages of the lane have been sent and not received. It has left its links when they have
//! carried its bytes, and [`message_us`](LaneOf::message_us) more of the slowest; `alpha_us` later
//! it has arrived, and the step that sent it is done. It is received, and that step done, when it
//! has arrived, the message before it on its lane is received, and all steps are done that the step
//! which receives it waits for. Other steps take no time.

use serde::Serialize;
use unbroken_schedule::cost::{Costs, Network, Switches};
use unbroken_schedule::verify::{messages, Flaw};
use unbroken_schedule::{Path, Plan, Topology};

/// All that a plan sends, message by message. Links, lanes and steps are named by their position.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Traffic {
    /// What carries messages, one way each.
    pub links: Vec<LinkOf>,
    /// Streams of messages.
    pub lanes: Vec<LaneOf>,
    /// How many messages of a lane may have been sent and not received.
    pub room: usize,
    /// Lane by lane, in order: lane, bytes, the step that sends it, the step that receives it.
    pub messages: Vec<(usize, u64, usize, usize)>,
    /// For each step the steps that it waits for, of all ranks one after the other.
    pub steps: Vec<Vec<usize>>,
}

/// A link.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LinkOf {
    /// Its name.
    pub name: String,
    /// What it carries, in Mbit/s, which is bits in a µs.
    pub mbps: f64,
}

/// A stream of messages in order.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LaneOf {
    /// The links that it uses, all at once.
    pub links: Vec<usize>,
    /// From when a message has left its links until it has arrived, in µs.
    pub alpha_us: f64,
    /// How long a message keeps its slowest link busy beside its bytes, in µs.
    pub message_us: f64,
}

impl Traffic {
    /// Of a plan for this topology.
    pub fn of(
        plan: &Plan,
        topology: &Topology,
        switches: &Switches,
        costs: &Costs,
    ) -> Result<Traffic, Flaw> {
        let (schedule, links) = (plan.schedule(), Network::new(topology, switches));
        let element = schedule.collective.data().bytes();
        let (mut first, mut steps) = (Vec::new(), Vec::new());
        for program in &schedule.programs {
            let base = steps.len();
            first.push(base);
            steps.extend(program.steps.iter().map(|step| {
                step.after.iter().map(|before| base + *before as usize).collect::<Vec<_>>()
            }));
        }
        let (mut lanes, mut all) = (Vec::new(), Vec::new());
        for (lane, pairs) in messages(&schedule)? {
            let (alpha_us, message_us) = match lane.path {
                Path::Memory => (costs.memory_alpha_us, 0.0),
                Path::Nics { .. } => (costs.nic_alpha_us, costs.message_us),
            };
            let mut used = Vec::new();
            links.each(topology, (lane.from, lane.to), lane.path, |link| used.push(link));
            for [(from, send), (to, receive)] in pairs {
                let bytes = schedule.programs[from].steps[send].work.len() * element;
                all.push((lanes.len(), bytes, first[from] + send, first[to] + receive));
            }
            lanes.push(LaneOf { links: used, alpha_us, message_us });
        }
        let named = links.names().into_iter().zip(&links.capacity);
        let links = named.map(|(name, mbps)| LinkOf { name, mbps: *mbps }).collect();
        Ok(Traffic { links, lanes, room: costs.room.max(1), messages: all, steps })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::strategy::Kind;
    use unbroken_schedule::cost::Clos;
    use unbroken_schedule::{Choice, Fabric, Grouping, Host, Nic, Shape};

    #[test]
    fn every_message_names_its_links_and_its_steps() {
        let host = Host::new(2, Nic::new(100));
        let topology = Topology::uniform(4, 2, host, Fabric::AnyToAny).unwrap();
        let collective = Kind::AllReduce.of(1 << 20, 8).unwrap();
        let choice = Choice::new(Shape::Ring, Grouping::Hosts);
        let plan = Plan::new(&topology, &collective, choice).unwrap();
        let clos = Clos { pod_hosts: 2, oversubscription: 2.0, core_oversubscription: Some(2.0) };
        let switches = Switches::over(clos, 0..4);
        let traffic = Traffic::of(&plan, &topology, &switches, &Costs::default()).unwrap();
        let names = |lane: &LaneOf| -> Vec<&str> {
            lane.links.iter().map(|link| traffic.links[*link].name.as_str()).collect()
        };
        let of_lanes: Vec<Vec<&str>> = traffic.lanes.iter().map(names).collect();
        assert!(of_lanes.contains(&vec!["rank1 out", "rank0 in"]), "{of_lanes:?}");
        assert!(of_lanes.contains(&vec!["host0/nic0 out", "host1/nic0 in"]), "{of_lanes:?}");
        // what goes to another pod over the same rail crosses leaves and cores
        let far = [
            "host1/nic1 out",
            "host2/nic1 in",
            "pod0/rail1 up",
            "pod1/rail1 down",
            "pod0 up",
            "pod1 down",
        ];
        assert!(of_lanes.contains(&far.to_vec()), "{of_lanes:?}");
        let up = traffic.links.iter().find(|link| link.name == "pod0 up").unwrap();
        assert_eq!(up.mbps, 100.0);
        // each rank gets and gives the vector once within its host, and between hosts as on rings
        let sent: u64 = traffic.messages.iter().map(|m| m.1).sum();
        assert_eq!(sent, (1 << 20) * (2 * 4 + 2 * 3));
        let last = traffic.steps.len();
        assert!(traffic.messages.iter().all(|(.., from, to)| *from < last && *to < last));
    }
}
