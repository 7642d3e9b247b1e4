//! Formulas for how long ways of doing an operation take.

use crate::cost::Costs;
use crate::paper::{self, Division};
use crate::rerank::shared_mbps;
use crate::reshape;
use crate::split::Parts;
use crate::{Choice, Collective, Fabric, Grouping, Matrix, Operation, Owners, Shape, Topology};

use super::Estimate;

/// Numbers of chunks that are considered.
const CHUNKS: [u64; 8] = [1, 2, 4, 8, 16, 32, 64, 128];
/// Chunks are not made shorter than this, in bytes.
const LEAST_CHUNK_BYTES: u64 = 4 << 10;
/// Nor longer than this, if that many chunks are allowed: a chunk is what is sent again after a
/// failure.
const MOST_CHUNK_BYTES: u64 = 4 << 20;

/// Pieces of a message that is divided among NICs are about as long as this at least, in bytes;
/// those of hosts that own less than others are shorter, down to a packet. A message that is not
/// divided has one NIC to itself while others wait.
const PIECE_BYTES: u64 = 16 << 10;

/// How many messages a NIC has in turn for each of its own channel's, where everything goes
/// through owners and a NIC is lost (`tests/planner.rs`).
const IN_TURN: f64 = 1.5;

/// Chunks are all divided where a shard has so many of them at least.
const DIVIDED_CHUNKS: u64 = 4;

/// Where all is reduced before anything is spread, several hosts do not come to the middle
/// together: NICs of some wait for so long, in parts of what they carry. (Without chunks, three
/// hosts reach half of what their NICs carry, with eight or more five sixths and up.)
const SKEW: f64 = 0.5;

/// What an operation asks of hosts, whatever the way.
pub(super) struct Estimator<'t> {
    topology: &'t Topology,
    collective: &'t Collective,
    costs: &'t Costs,
    /// Bytes of the vector, or of a pairwise operation those of the busiest host.
    bytes: f64,
    /// The hosts that take part, and what each of them can exchange with the others.
    hosts: Vec<usize>,
    hosts_mbps: Vec<u64>,
}

/// What a way asks of the busiest host.
struct Demand {
    /// Time that its NICs are busy with bytes, in µs.
    nics_us: f64,
    /// Time that the memory of its busiest rank is.
    memory_us: f64,
    /// Messages between hosts that come behind each other: once, and again for each further chunk.
    levels: f64,
    levels_per_chunk: f64,
    /// Messages that its busiest NIC sends for each chunk.
    messages: f64,
    /// Time that a chunk of all is under way and its NICs are not all busy, in parts of `nics_us`.
    ragged: f64,
    /// Its first and last chunks are short.
    ramped: bool,
}

impl Demand {
    /// How long chunks are beside each other ([`Plan::chunk`]).
    fn parts(&self, chunks: u64) -> Parts {
        match self.ramped {
            true => Parts::Ramp(chunks),
            false => Parts::Equal(chunks),
        }
    }
}

impl<'t> Estimator<'t> {
    pub fn new(
        topology: &'t Topology,
        collective: &'t Collective,
        costs: &'t Costs,
    ) -> Estimator<'t> {
        let element = collective.data().bytes();
        let elements = match collective.operation() {
            Operation::AllToAll { .. } | Operation::SendRecv { .. } => {
                busiest_pairs(topology, collective)
            }
            _ => collective.total(),
        };
        let hosts = collective.hosts(topology);
        let hosts_mbps = match (collective.operation(), &hosts[..]) {
            (Operation::SendRecv { .. }, [a, b]) => vec![topology.pair_mbps(*a, *b); 2],
            _ => topology.useful_mbps(),
        };
        let bytes = (elements * element) as f64;
        Estimator { topology, collective, costs, bytes, hosts, hosts_mbps }
    }

    /// The choice with the number of chunks that suits it.
    pub fn best_chunks(&self, choice: Choice) -> Estimate {
        let demand = self.demand(&choice);
        if matches!(self.collective.operation(), Operation::AllToAll { counts: Matrix::Each(_) }) {
            // ranks do not know the same of it, and must cut it alike
            return Estimate { us: self.time(&demand, 1.0, 2.0), choice };
        }
        let longest = self.longest_shard(&choice);
        let mut best = Estimate { choice: choice.clone(), us: f64::INFINITY };
        for chunks in CHUNKS {
            let chunk_bytes = (longest as u64).div_ceil(chunks).max(1);
            if chunks > 1 && chunk_bytes < self.least_chunk_bytes(&choice) {
                break;
            }
            if chunk_bytes > MOST_CHUNK_BYTES && chunks < CHUNKS[CHUNKS.len() - 1] {
                continue;
            }
            let us = self.time(&demand, chunks as f64, self.pieces(&choice, chunk_bytes));
            if us < best.us {
                // the division into chunks is by length, rounded up
                best = Estimate {
                    choice: Choice { chunk_bytes: chunk_bytes + 64, ..choice.clone() },
                    us,
                };
            }
        }
        best
    }

    /// Where messages are divided among NICs, chunks stay long enough for that: shorter ones would
    /// take turns, and NICs wait. Of hosts that have more peers than NICs, as many messages take
    /// turns at a time as keep all NICs busy (`tests/time.rs`). Shards that are too short for some
    /// chunks that are divided are cut all the same: one chunk after the other costs more than
    /// turns.
    fn least_chunk_bytes(&self, choice: &Choice) -> u64 {
        let divided = PIECE_BYTES * self.widest() as u64;
        let many = self.hosts.len() as f64 > self.widest();
        let short = self.longest_shard(choice) < (DIVIDED_CHUNKS * divided) as f64;
        match (choice.channels == Some(1), self.divides()) {
            (true, _) => divided,
            (false, true) if short && choice.shape == Shape::Direct => LEAST_CHUNK_BYTES,
            (false, true) if many || short => 2 * LEAST_CHUNK_BYTES,
            (false, true) => divided,
            (false, false) => LEAST_CHUNK_BYTES,
        }
    }

    /// Whether channels are spread over NICs that are not their own.
    fn divides(&self) -> bool {
        let unequal = |host: &usize| {
            let nics = &self.topology.hosts()[*host].nics;
            nics.iter().any(|nic| nic.free_mbps() != nics[0].free_mbps())
        };
        self.hosts.len() > 1 && self.hosts.iter().any(unequal)
    }

    /// How many messages the busiest NIC has for each of its own channel's: of one channel alone a
    /// piece of each, and two where a host's NICs are laid over more of another's. Where channels
    /// are spread, it has pieces of another's, too; and
    /// where rails are apart and all talk to all, those of all channels, since whoever has a NIC on
    /// the rail of the lost one uses it more. Messages too short to be divided take turns.
    fn pieces(&self, choice: &Choice, chunk_bytes: u64) -> f64 {
        let direct = matches!(choice.shape, Shape::Direct | Shape::OneShot);
        let everyone = direct && self.topology.fabric() == Fabric::RailOnly;
        match self.divides() {
            false => 1.0,
            true if choice.channels == Some(1) => match self.topology.fabric() {
                Fabric::RailOnly => 1.0,
                Fabric::AnyToAny => 2.0,
            },
            true if choice.shape == Shape::Direct && chunk_bytes < 2 * choice.divide_bytes => {
                IN_TURN
            }
            true if everyone && chunk_bytes >= 2 * choice.divide_bytes => self.widest(),
            true => 2.0,
        }
    }

    fn time(&self, demand: &Demand, chunks: f64, pieces: f64) -> f64 {
        let Costs { nic_alpha_us, memory_alpha_us, message_us, .. } = *self.costs;
        let messages = demand.messages * pieces;
        let nics = demand.nics_us + messages * message_us * chunks;
        let several = self.hosts.iter().any(|host| self.topology.members(*host).len() > 1);
        nics.max(demand.memory_us)
            + nics.min(demand.memory_us) / chunks
            + demand.ragged * demand.nics_us / demand.parts(chunks as u64).all() as f64
            + nic_alpha_us * (demand.levels + demand.levels_per_chunk * (chunks - 1.0))
            + if several { 2.0 * memory_alpha_us } else { 0.0 }
    }

    /// Bytes of the longest shard.
    fn longest_shard(&self, choice: &Choice) -> f64 {
        let nodes = match choice.grouping {
            Grouping::Hosts => self.topology.hosts().len(),
            Grouping::Ranks => self.topology.ranks(),
        } as f64;
        let channels = choice.channels.map_or(self.widest(), |c| c as f64);
        let owners = match (&choice.owners, self.collective.operation()) {
            (Owners::Weights(weights), _) => weights.iter().filter(|w| **w > 0).count() as f64,
            (_, Operation::Broadcast { .. } | Operation::Reduce { .. }) => 1.0,
            _ if choice.shape == Shape::OneShot || self.collective.operation().is_pairwise() => 1.0,
            _ => nodes,
        };
        self.bytes / channels / owners
    }

    /// The channels that a plan has by itself.
    fn widest(&self) -> f64 {
        let host = |host: &usize| {
            self.topology.hosts()[*host].nics.len().max(self.topology.members(*host).len())
        };
        self.hosts.iter().map(host).max().unwrap_or(1) as f64
    }

    /// The time that the slowest host takes to send so many vectors, in µs.
    fn slowest_us(&self, vectors: f64, choice: &Choice) -> f64 {
        if self.hosts.len() < 2 {
            return 0.0;
        }
        let host_mbps = |(host, mbps): (&usize, &u64)| {
            let nics = self.topology.hosts()[*host].nics.len().max(1) as u64;
            // messages of one channel take one NIC each, if they are too short to be divided
            let short = self.longest_shard(choice) / (nics as f64) < choice.divide_bytes as f64;
            mbps / if choice.channels == Some(1) && short { nics } else { 1 }
        };
        let least = self.hosts.iter().zip(&self.hosts_mbps).map(host_mbps).min().unwrap_or(0);
        vectors * self.bytes * 8.0 / least as f64
    }

    /// How much less than its own capacity the worst pair of neighbours on a ring has, where rails
    /// are apart.
    fn worst_neighbours(&self, choice: &Choice) -> f64 {
        let hosts = self.topology.hosts();
        if self.topology.fabric() == Fabric::AnyToAny || hosts.len() < 2 {
            return 1.0;
        }
        let order: Vec<usize> = choice.ring.clone().unwrap_or_else(|| (0..hosts.len()).collect());
        let pairs = (0..order.len())
            .map(|i| shared_mbps(self.topology, order[i], order[(i + 1) % order.len()]));
        let least = self.hosts_mbps.iter().copied().min().unwrap_or(0);
        least as f64 / pairs.min().unwrap_or(0) as f64
    }

    fn demand(&self, choice: &Choice) -> Demand {
        let n = match choice.grouping {
            Grouping::Hosts => self.topology.hosts().len(),
            Grouping::Ranks => self.topology.ranks(),
        } as f64;
        let operation = self.collective.operation();
        let all = matches!(operation, Operation::AllReduce { .. } | Operation::Barrier);
        // both ways, or one
        let ways = if all { 2.0 } else { 1.0 };
        let rooted = matches!(operation, Operation::Broadcast { .. } | Operation::Reduce { .. });
        let one_root = rooted
            || matches!(&choice.owners, Owners::Weights(w) if w.iter().filter(|w| **w > 0).count() == 1);
        let nth = (n - 1.0) / n;
        let ring = matches!(choice.shape, Shape::Ring | Shape::SubRings);
        let worst = if ring { self.worst_neighbours(choice) } else { 1.0 };
        let mut demand = Demand {
            nics_us: self.slowest_us(ways * nth, choice) * worst,
            memory_us: self.memory_us(choice, ways),
            levels: ways,
            levels_per_chunk: 0.0,
            messages: ways * (n - 1.0),
            ragged: 0.0,
            ramped: all && choice.shape == Shape::Direct,
        };
        if all && n > 2.0 && choice.shape == Shape::Direct {
            demand.ragged = SKEW;
        }
        match (choice.shape, &choice.owners) {
            _ if operation.is_pairwise() => {
                demand.nics_us = self.slowest_us(1.0, choice);
                demand.memory_us = 0.0;
            }
            (Shape::OneShot, _) => {
                demand.nics_us = self.slowest_us(n - 1.0, choice);
                demand.levels = 1.0;
                demand.messages = n - 1.0;
            }
            (Shape::Direct, Owners::ByCapacity) => {
                demand.nics_us = reshape::all_reduce_bound_us(self.bytes as u64, &self.hosts_mbps);
                demand.ragged += self.raggedness();
            }
            (Shape::Direct, _) if rooted => demand.nics_us = self.slowest_us(n - 1.0, choice),
            (Shape::Direct, _) => {}
            (Shape::Tree, _) => self.on_trees(&mut demand, choice, (n, ways), one_root),
            (Shape::Ring, Owners::ByCapacity) => {
                let bound = reshape::all_reduce_bound_us(self.bytes as u64, &self.hosts_mbps);
                demand.nics_us = bound * worst * self.unevenness();
                self.on_rings(&mut demand, ways * (n - 1.0));
            }
            (Shape::Ring, _) if rooted => {
                demand.nics_us = self.slowest_us(1.0, choice) * worst;
                demand.levels = n - 1.0;
                demand.ragged = n - 2.0;
                demand.messages = 1.0;
            }
            // on a ring of ranks most messages stay on their host
            (Shape::Ring, _) => {
                self.on_rings(
                    &mut demand,
                    ways * (n - 1.0) / n * self.topology.hosts().len() as f64,
                );
            }
            (Shape::SubRings, _) => {
                demand.nics_us = self.sub_rings_us(choice) * worst;
                self.on_rings(&mut demand, 3.0 * (n - 1.0));
            }
        }
        demand
    }

    /// On a tree a message waits for those of the sons. With one root a father carries what two
    /// sons send.
    fn on_trees(
        &self,
        demand: &mut Demand,
        choice: &Choice,
        (n, ways): (f64, f64),
        one_root: bool,
    ) {
        demand.levels = ways * f64::from((n as usize).next_power_of_two().trailing_zeros());
        let sons = if n > 2.0 { 2.0 } else { 1.0 };
        if one_root {
            demand.nics_us =
                self.slowest_us(if ways > 1.0 && n > 2.0 { 3.0 } else { sons }, choice);
            // a chunk crosses one level at a time
            demand.ragged =
                sons * demand.levels * self.slowest_us(1.0, choice) / demand.nics_us.max(1e-9);
            demand.messages = 3.0;
        } else {
            demand.levels_per_chunk = demand.levels;
            demand.nics_us *= 1.25;
        }
    }

    /// On a ring a message waits for the one that came before it at the neighbour.
    fn on_rings(&self, demand: &mut Demand, levels: f64) {
        demand.levels = levels;
        demand.levels_per_chunk = levels;
    }

    /// What stars that attain the bound take more if all is reduced before anything is spread: each
    /// half then waits for its busiest host. (A third more of it was measured.)
    fn raggedness(&self) -> f64 {
        let bound = reshape::all_reduce_bound_us(self.bytes as u64, &self.hosts_mbps);
        let owners = reshape::stars(&self.hosts_mbps);
        let (all, n) = (owners.iter().sum::<u64>() as f64, owners.len() as f64);
        let half = owners.iter().zip(&self.hosts_mbps).map(|(weight, mbps)| {
            let owned = *weight as f64 / all;
            (1.0 - owned).max((n - 1.0) * owned) * self.bytes * 8.0 / *mbps as f64
        });
        match bound > 0.0 && bound.is_finite() {
            true => 4.0 / 3.0 * (2.0 * half.fold(0.0, f64::max) / bound - 1.0),
            false => 0.0,
        }
    }

    /// What parts of unequal hosts that follow each other on rings take more than what they carry
    /// (`tests/time.rs`).
    fn unevenness(&self) -> f64 {
        let (least, most) = (self.hosts_mbps.iter().min(), self.hosts_mbps.iter().max());
        let lost =
            1.0 - least.copied().unwrap_or(0) as f64 / most.copied().unwrap_or(0).max(1) as f64;
        if self.is_uneven() {
            1.0 + lost
        } else {
            1.0
        }
    }

    fn is_uneven(&self) -> bool {
        self.hosts_mbps.len() > 2 && self.hosts_mbps.iter().any(|mbps| *mbps != self.hosts_mbps[0])
    }

    /// What the paper's rings and broadcasts carry at the busiest host.
    fn sub_rings_us(&self, choice: &Choice) -> f64 {
        let order: Vec<usize> = (0..self.hosts_mbps.len()).collect();
        let rings = paper::sub_rings(&self.hosts_mbps, &order, Division::of(&choice.owners));
        let loads = paper::loads(&rings, order.len());
        let us = loads
            .iter()
            .zip(&self.hosts_mbps)
            .map(|(load, mbps)| load * self.bytes * 8.0 / *mbps as f64);
        us.fold(0.0, f64::max)
    }

    /// The time that the busiest rank's memory is busy, in µs.
    fn memory_us(&self, choice: &Choice, ways: f64) -> f64 {
        let channels = choice.channels.map_or(self.widest(), |c| c as f64);
        let mut most = 0.0f64;
        for (host, of_host) in self.topology.hosts().iter().enumerate() {
            let ranks = self.topology.members(host).len() as f64;
            let vectors = match choice.grouping {
                // a leader gives the others what all its channels carry, and gets as much
                Grouping::Hosts => (ranks - 1.0) / ranks.min(channels) * ways,
                Grouping::Ranks if ranks > 1.0 => ways,
                Grouping::Ranks => 0.0,
            };
            most = most.max(vectors * self.bytes * 8.0 / f64::from(of_host.memory_mbps));
        }
        most
    }
}

/// Elements that the busiest host sends to others or receives from them, of pairwise operations.
fn busiest_pairs(topology: &Topology, collective: &Collective) -> u64 {
    let (hosts, ranks) = (topology.hosts().len(), topology.ranks() as u64);
    match *collective.operation() {
        Operation::AllToAll { counts: Matrix::Equal(count) } => {
            let members = (0..hosts).map(|h| topology.members(h).len() as u64);
            members.map(|m| m * (ranks - m) * count).max().unwrap_or(0)
        }
        Operation::SendRecv { from, to, count }
            if topology.host_of(from) != topology.host_of(to) =>
        {
            count
        }
        Operation::AllToAll { .. } => {
            let (mut sent, mut received) = (vec![0u64; hosts], vec![0u64; hosts]);
            for from in 0..topology.ranks() {
                for to in 0..topology.ranks() {
                    let (a, b) = (topology.host_of(from), topology.host_of(to));
                    if a != b {
                        sent[a] += collective.pair(from, to);
                        received[b] += collective.pair(from, to);
                    }
                }
            }
            sent.into_iter().chain(received).max().unwrap_or(0)
        }
        _ => 0,
    }
}
