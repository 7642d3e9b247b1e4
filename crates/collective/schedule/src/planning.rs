//! From a choice to a plan: checks that the choice fits, gives every part of the vector an owner,
//! and looks for a path between all who exchange something.

use std::collections::HashSet;
use std::ops::Range;

use crate::binding::{Binding, Demand};
use crate::choice::MAX_CHANNELS;
use crate::paper::{self, Division};
use crate::plan::{Owner, PARTS};
use crate::relay::Relays;
use crate::rerank::rerank_hosts;
use crate::reshape;
use crate::shape::Forest;
use crate::split::{equal, grain, split};
use crate::{
    Choice, Collective, Error, Folding, Grouping, Operation, Owners, Plan, Shape, Shard, Topology,
};

impl Plan {
    /// Checks the choice and works it out.
    pub fn new(
        topology: &Topology,
        collective: &Collective,
        choice: Choice,
    ) -> Result<Plan, Error> {
        check(topology, collective, &choice)?;
        let hosts = collective.hosts(topology);
        let most = |count: fn(&Topology, usize) -> usize| {
            hosts.iter().map(|host| count(topology, *host)).max().unwrap_or(1)
        };
        let widest = most(|t, h| t.hosts()[h].nics.len()).max(most(|t, h| t.members(h).len()));
        let channels = choice.channels.unwrap_or(widest.min(MAX_CHANNELS));
        let nodes: Vec<Vec<usize>> = match choice.grouping {
            Grouping::Hosts => {
                (0..topology.hosts().len()).map(|h| topology.members(h).to_vec()).collect()
            }
            Grouping::Ranks => (0..topology.ranks()).map(|rank| vec![rank]).collect(),
        };
        let mut node_of = vec![0; topology.ranks()];
        for (node, ranks) in nodes.iter().enumerate() {
            ranks.iter().for_each(|rank| node_of[*rank] = node);
        }
        let Forests { forests, outsiders, owners } =
            Forests::new(topology, &choice, channels, nodes.len());
        let direct = match collective.operation() {
            // others have no part in it: which rails they have lost is no matter
            Operation::SendRecv { .. } => false,
            Operation::AllToAll { .. } => true,
            _ => matches!(choice.shape, Shape::Direct | Shape::OneShot),
        };
        let owned = match (&choice.owners, choice.grouping) {
            (Owners::Equal, _) | (_, Grouping::Ranks) => vec![1; topology.hosts().len()],
            _ => owners.iter().map(|o| o.weight).collect(),
        };
        let demand = if direct { Demand::Everyone(&owned) } else { Demand::Neighbours };
        let binding = Binding::new(topology, &vec![1; channels], demand, choice.repair);
        let mut plan = Plan {
            relays: Relays::new(topology, &binding, choice.grouping),
            binding,
            topology: topology.clone(),
            collective: collective.clone(),
            choice,
            nodes,
            node_of,
            channels,
            forests,
            outsiders,
            owners,
            shards: Vec::new(),
            chunks: 1,
        };
        plan.shards = plan.make_shards();
        let longest = plan.shards.iter().map(Shard::about).max().unwrap_or(0);
        plan.chunks = plan.chunks_of(longest);
        plan.check_paths()?;
        Ok(plan)
    }

    fn make_shards(&self) -> Vec<Shard> {
        let total = self.collective.total();
        let ranks = 0..self.topology.ranks();
        let blocks = |rank: usize| (self.collective.block(rank).unwrap_or(0..0), rank);
        let mut shards = Vec::new();
        match *self.collective.operation() {
            Operation::AllReduce { .. } | Operation::Barrier => {
                self.owned_shards(total, &mut shards)
            }
            Operation::ReduceScatter { .. } | Operation::AllGather { .. } => ranks
                .map(blocks)
                .enumerate()
                .for_each(|(row, (range, rank))| self.block_shards(row, range, rank, &mut shards)),
            Operation::Broadcast { root, .. } | Operation::Reduce { root, .. } => {
                self.block_shards(0, 0..total, root, &mut shards);
            }
            Operation::AllToAll { .. } | Operation::SendRecv { .. } => {}
        }
        shards.retain(|s| !s.span.is_empty() && !s.part.is_empty());
        shards
    }

    /// Shards whose owners can be chosen.
    fn owned_shards(&self, total: u64, shards: &mut Vec<Shard>) {
        if self.choice.shape == Shape::OneShot {
            return self.stripes(0, 0..total, 0, None, shards);
        }
        let weights: Vec<u64> = self.owners.iter().map(|o| o.weight).collect();
        let bytes = self.collective.data().bytes();
        if self.speaks_for_one_channel() {
            let bounds = split(total, &weights, grain(total, weights.len() as u64, bytes));
            for (row, owner) in self.owners.iter().enumerate() {
                let (span, channel) = (bounds[row]..bounds[row + 1], self.home_channel(row));
                shards.push(Shard {
                    span,
                    part: 0..PARTS,
                    channel,
                    row,
                    owner: owner.node,
                    forest: channel,
                    set: 0,
                    rank: None,
                });
            }
            return;
        }
        let parts = split(PARTS, &weights, 1);
        let grain = grain(total, (weights.len() * self.channels) as u64, bytes);
        for channel in 0..self.channels {
            let span = equal(&(0..total), self.channels as u64, channel as u64, grain);
            for (row, Owner { node: owner, forest, .. }) in self.owners.iter().copied().enumerate()
            {
                let (set, forest) = (forest.unwrap_or(0), forest.unwrap_or(channel));
                let (span, part) = (span.clone(), parts[row]..parts[row + 1]);
                shards.push(Shard { span, part, channel, row, owner, forest, set, rank: None });
            }
        }
        shards.sort_by_key(|s| (s.row, s.channel));
    }

    /// Shards of a rank's block.
    fn block_shards(&self, row: usize, span: Range<u64>, rank: usize, shards: &mut Vec<Shard>) {
        let owner = self.node_of[rank];
        let many = self.collective.block(rank).is_some();
        let each_has_one = self.choice.grouping == Grouping::Hosts
            && self.nodes.iter().all(|ranks| ranks.len() == self.channels());
        if many && (each_has_one || self.speaks_for_one_channel()) {
            let channel = self.topology.local(rank) % self.channels();
            let part = 0..PARTS;
            shards.push(Shard {
                span,
                part,
                channel,
                row,
                owner,
                forest: channel,
                set: 0,
                rank: Some(rank),
            });
        } else {
            self.stripes(row, span, owner, Some(rank), shards);
        }
    }

    /// A shard on every channel.
    fn stripes(
        &self,
        row: usize,
        range: Range<u64>,
        owner: usize,
        rank: Option<usize>,
        shards: &mut Vec<Shard>,
    ) {
        let channels = self.channels() as u64;
        let grain = grain(range.end - range.start, channels, self.collective.data().bytes());
        for channel in 0..self.channels() {
            let span = equal(&range, channels, channel as u64, grain);
            shards.push(Shard {
                span,
                part: 0..PARTS,
                channel,
                row,
                owner,
                forest: channel,
                set: 0,
                rank,
            });
        }
    }

    /// Whether ranks are nodes and their shards are spread evenly over channels if each has one.
    fn speaks_for_one_channel(&self) -> bool {
        self.choice.grouping == Grouping::Ranks
            && self.choice.shape != Shape::Ring
            && (0..self.topology.hosts().len())
                .all(|h| self.topology.members(h).len() >= self.channels())
    }

    /// The channel of a rank that has one.
    fn home_channel(&self, node: usize) -> usize {
        self.topology.local(self.nodes[node][0]) % self.channels()
    }

    /// Whether all hosts that exchange something have a path.
    fn check_paths(&self) -> Result<(), Error> {
        if self.binding.all_joined() {
            return Ok(());
        }
        let ranks = self.topology.ranks();
        let path = |a: usize, b: usize| {
            let (a, b) = (self.topology.host_of(a), self.topology.host_of(b));
            self.binding.routes(0, a, b).map(drop)
        };
        if self.collective.operation().is_pairwise() {
            let pairs = (0..ranks).flat_map(|from| (0..ranks).map(move |to| (from, to)));
            return pairs
                .filter(|(from, to)| self.collective.pair(*from, *to) > 0)
                .try_for_each(|(a, b)| path(a, b));
        }
        let mut known = HashSet::new();
        for shard in &self.shards {
            // trees are the same for all channels if hosts are nodes
            let channel = if self.choice.grouping == Grouping::Hosts { 0 } else { shard.channel };
            if !known.insert((channel, shard.row, shard.owner)) {
                continue;
            }
            for node in 0..self.nodes.len() {
                for other in self.forests[shard.forest].neighbours(shard.owner, node) {
                    path(self.nodes[node][0], self.nodes[other][0])?;
                }
            }
            let chain = self.chain(shard);
            for pair in chain.windows(2) {
                path(self.nodes[pair[0]][0], self.nodes[pair[1]][0])?;
            }
            if let (Some(last), Some(back)) = (chain.last(), self.outsiders[shard.forest].last()) {
                path(self.nodes[*last][0], self.nodes[*back][0])?;
            }
        }
        Ok(())
    }
}

/// The trees of a plan, and who owns what.
struct Forests {
    forests: Vec<Forest>,
    outsiders: Vec<Vec<usize>>,
    owners: Vec<Owner>,
}

impl Forests {
    fn new(topology: &Topology, choice: &Choice, channels: usize, nodes: usize) -> Forests {
        let hosts_mbps = topology.useful_mbps();
        let order = |channel| node_order(topology, choice, channel);
        match (choice.shape, &choice.owners) {
            (Shape::SubRings, owners) => {
                let division = Division::of(owners);
                let rings = paper::sub_rings(&hosts_mbps, &order(0), division).into_iter();
                Forests::of_rings(rings.map(|r| {
                    // who has been left out may have been the bridge of two others
                    let members = rerank_hosts(topology, &r.members);
                    (Forest::ring_with_leaves(&members, &[]), members, r.outsiders, r.weight)
                }))
            }
            (Shape::Ring, Owners::ByCapacity) => {
                let rings = reshape::rings(&hosts_mbps, &order(0)).into_iter();
                Forests::of_rings(rings.map(|r| {
                    let members = rerank_hosts(topology, &r.members);
                    (Forest::ring_with_leaves(&members, &r.leaves), members, Vec::new(), r.weight)
                }))
            }
            (shape, owners) => {
                let weights = match owners {
                    Owners::Equal => vec![1; nodes],
                    Owners::Weights(weights) => weights.clone(),
                    Owners::ByCapacity => reshape::stars(&hosts_mbps),
                };
                let owners = weights.into_iter().enumerate().map(|(node, weight)| Owner {
                    node,
                    weight,
                    forest: None,
                });
                Forests {
                    forests: (0..channels).map(|c| Forest::new(shape, order(c))).collect(),
                    outsiders: vec![Vec::new(); channels],
                    owners: owners.collect(),
                }
            }
        }
    }

    /// Several rings that all channels share; members own their ring's part in equal parts.
    fn of_rings(rings: impl Iterator<Item = (Forest, Vec<usize>, Vec<usize>, u64)>) -> Forests {
        let mut all = Forests { forests: Vec::new(), outsiders: Vec::new(), owners: Vec::new() };
        for (forest, members, outsiders, weight) in rings {
            let weight = (weight << 12) / members.len() as u64;
            let number = all.forests.len();
            all.owners.extend(members.iter().map(|node| Owner {
                node: *node,
                weight,
                forest: Some(number),
            }));
            all.forests.push(forest);
            all.outsiders.push(outsiders);
        }
        all
    }
}

/// The order of nodes that a channel's rings and trees have. With ranks as nodes, each channel
/// begins with another rank of each host, so that each enters and leaves hosts at other ranks.
fn node_order(topology: &Topology, choice: &Choice, channel: usize) -> Vec<usize> {
    let hosts = choice.ring.clone().unwrap_or_else(|| (0..topology.hosts().len()).collect());
    match choice.grouping {
        Grouping::Hosts => hosts,
        Grouping::Ranks => hosts
            .into_iter()
            .flat_map(|host| {
                let ranks = topology.members(host);
                (0..ranks.len()).map(move |k| ranks[(k + channel) % ranks.len()])
            })
            .collect(),
    }
}

/// Whether a choice fits.
fn check(topology: &Topology, collective: &Collective, choice: &Choice) -> Result<(), Error> {
    let count = |what, count: usize, least: usize, most: usize| match (least..=most)
        .contains(&count)
    {
        true => Ok(()),
        false => {
            Err(Error::Count { what, count: count as u64, least: least as u64, most: most as u64 })
        }
    };
    let hosts = topology.hosts().len();
    count("ranks of the collective", collective.ranks(), topology.ranks(), topology.ranks())?;
    if let Some(channels) = choice.channels {
        count("channels", channels, 1, MAX_CHANNELS)?;
    }
    let all = matches!(collective.operation(), Operation::AllReduce { .. } | Operation::Barrier);
    if choice.shape == Shape::OneShot && !all && !collective.operation().is_pairwise() {
        return Err(Error::Form {
            what: "OneShot is for AllReduce and Barrier alone",
            instead: "take Direct",
        });
    }
    if choice.shape == Shape::SubRings && (!all || choice.grouping == Grouping::Ranks) {
        return Err(Error::Form {
            what: "SubRings is for AllReduce among hosts",
            instead: "take Ring or Direct",
        });
    }
    let ordered =
        choice.folding == Folding::InOrder && collective.operation().reduce_op().is_some();
    if ordered && !matches!(choice.shape, Shape::Direct | Shape::OneShot) {
        return Err(Error::Form {
            what: "rings and trees reduce in an order of their own",
            instead: "take Direct",
        });
    }
    if ordered && choice.grouping == Grouping::Ranks && topology.ranks() > hosts {
        return Err(Error::Form {
            what: "reducing in order needs the hosts as nodes",
            instead: "take Grouping::Hosts",
        });
    }
    let nodes = if choice.grouping == Grouping::Hosts { hosts } else { topology.ranks() };
    if choice.owners != Owners::Equal && (!all || choice.shape == Shape::OneShot) {
        return Err(Error::Form {
            what: "this operation's owners are given",
            instead: "take Owners::Equal",
        });
    }
    match &choice.owners {
        Owners::Equal => {}
        Owners::Weights(_) if choice.shape == Shape::SubRings => {
            return Err(Error::Form {
                what: "SubRings have owners of their own",
                instead: "take Owners::Equal or Owners::ByCapacity",
            });
        }
        Owners::Weights(weights) => {
            count("weights of owners", weights.len(), nodes, nodes)?;
            count("owners with a weight", weights.iter().filter(|w| **w > 0).count(), 1, nodes)?;
        }
        Owners::ByCapacity => {
            let shaped = matches!(choice.shape, Shape::Direct | Shape::Ring | Shape::SubRings);
            if !shaped || choice.grouping == Grouping::Ranks {
                return Err(Error::Form {
                    what: "owners by capacity are hosts, of rings or direct",
                    instead:
                        "take Grouping::Hosts and Shape::Direct, Shape::Ring or Shape::SubRings",
                });
            }
        }
    }
    if let Some(ring) = &choice.ring {
        count("hosts of the ring", ring.len(), hosts, hosts)?;
        let mut seen = vec![false; hosts];
        for host in ring {
            match seen.get_mut(*host) {
                None => {
                    return Err(Error::Unknown { what: "host", number: *host, last: hosts - 1 })
                }
                Some(true) => {
                    return Err(Error::Form {
                        what: "a host is twice in the ring",
                        instead: "name each once",
                    })
                }
                Some(seen) => *seen = true,
            }
        }
    }
    Ok(())
}
