//! A schedule in virtual time.
//!
//! A message flows at the rate that its share of two resources gives it: the sender's NIC and the
//! receiver's, or the memory of the two ranks. Rates are max-min fair, with weights as [`Sharing`]
//! says: no message can have more without another having less that has no more for its weight.
//! Steps in a rank's own memory take no time.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

use super::{Costs, Links, Sharing};
use crate::verify::{messages, Flaw};
use crate::{Path, Schedule, Topology};

/// How long the schedule takes, in µs, if all ranks begin at once; or the step that it never comes
/// to.
pub fn time(schedule: &Schedule, topology: &Topology, costs: &Costs) -> Result<f64, Flaw> {
    let mut fluid = Fluid::new(schedule, topology, costs)?;
    fluid.run();
    match fluid.steps.iter().position(|s| !s.done) {
        None => Ok(fluid.now_us),
        Some(id) => {
            let rank = fluid.first.partition_point(|first| *first <= id) - 1;
            Err(Flaw::Stuck { rank, step: id - fluid.first[rank], in_order: false })
        }
    }
}

/// A step of any rank.
#[derive(Default)]
struct State {
    waits: usize,
    ready: bool,
    done: bool,
    dependents: Vec<usize>,
    /// The message that it is an end of, and whether it is its receiver.
    message: Option<(usize, bool)>,
}

/// A message.
struct Message {
    lane: usize,
    send: usize,
    receive: usize,
    /// What is left to flow, in bits.
    left_bits: f64,
    /// Its part of what it shares.
    weight: f64,
    arrived: bool,
}

/// A stream of messages.
struct Stream {
    resources: [usize; 2],
    alpha_us: f64,
    messages: Vec<usize>,
    /// Messages that have begun, that have flowed, that have been received.
    begun: usize,
    flowed: usize,
    received: usize,
}

struct Fluid {
    /// Where the steps of each rank begin.
    first: Vec<usize>,
    steps: Vec<State>,
    messages: Vec<Message>,
    lanes: Vec<Stream>,
    /// What each resource carries, in Mbit/s, which is bits in a µs.
    capacity: Vec<f64>,
    flowing: Vec<usize>,
    /// When messages arrive.
    arrivals: BinaryHeap<Reverse<(Time, usize)>>,
    now_us: f64,
    room: usize,
    /// Steps that have just been done.
    fresh: Vec<usize>,
}

#[derive(Clone, Copy, PartialEq)]
struct Time(f64);

impl Eq for Time {}

impl PartialOrd for Time {
    fn partial_cmp(&self, other: &Time) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Time {
    fn cmp(&self, other: &Time) -> Ordering {
        self.0.total_cmp(&other.0)
    }
}

impl Fluid {
    fn new(schedule: &Schedule, topology: &Topology, costs: &Costs) -> Result<Fluid, Flaw> {
        let mut first = vec![0];
        let mut steps: Vec<State> = Vec::new();
        for program in &schedule.programs {
            let base = steps.len();
            steps.extend(
                program.steps.iter().map(|s| State { waits: s.after.len(), ..State::default() }),
            );
            for (number, step) in program.steps.iter().enumerate() {
                step.after.iter().for_each(|before| {
                    steps[base + *before as usize].dependents.push(base + number)
                });
            }
            first.push(steps.len());
        }
        let links = Links::new(topology);
        let mut fluid = Fluid {
            first,
            steps,
            messages: Vec::new(),
            lanes: Vec::new(),
            capacity: links.capacity.clone(),
            flowing: Vec::new(),
            arrivals: BinaryHeap::new(),
            now_us: 0.0,
            room: costs.room.max(1),
            fresh: Vec::new(),
        };
        for (lane, pairs) in messages(schedule)? {
            let ends = links.ends(topology, (lane.from, lane.to), lane.path);
            let least = ends.map(|r| fluid.capacity[r]).into_iter().fold(f64::INFINITY, f64::min);
            let (alpha_us, own_us) = match lane.path {
                Path::Memory => (costs.memory_alpha_us, 0.0),
                Path::Nics { .. } => (costs.nic_alpha_us, costs.message_us),
            };
            let mut stream = Stream {
                resources: ends,
                alpha_us,
                messages: Vec::new(),
                begun: 0,
                flowed: 0,
                received: 0,
            };
            for [(from, step), (to, other)] in pairs {
                let (send, receive) = (fluid.first[from] + step, fluid.first[to] + other);
                let bits = schedule.programs[from].steps[step].work.len()
                    * schedule.collective.data().bytes()
                    * 8;
                fluid.steps[send].message = Some((fluid.messages.len(), false));
                fluid.steps[receive].message = Some((fluid.messages.len(), true));
                stream.messages.push(fluid.messages.len());
                let left_bits = bits as f64 + own_us * least;
                let weight = if costs.sharing == Sharing::ByMessage { left_bits } else { 1.0 };
                let lane = fluid.lanes.len();
                fluid.messages.push(Message {
                    lane,
                    send,
                    receive,
                    left_bits,
                    weight,
                    arrived: false,
                });
            }
            fluid.lanes.push(stream);
        }
        Ok(fluid)
    }

    fn run(&mut self) {
        for id in 0..self.steps.len() {
            if self.steps[id].waits == 0 {
                self.make_ready(id);
            }
        }
        self.settle();
        loop {
            let rates = self.rates();
            let flowed =
                self.flowing.iter().zip(&rates).map(|(m, rate)| self.messages[*m].left_bits / rate);
            let flowed_us = flowed.fold(f64::INFINITY, f64::min);
            let arrives_us =
                self.arrivals.peek().map_or(f64::INFINITY, |Reverse((at, _))| at.0 - self.now_us);
            let step_us = flowed_us.min(arrives_us);
            if !step_us.is_finite() {
                return;
            }
            self.now_us += step_us.max(0.0);
            self.flow(&rates, step_us.max(0.0));
            while let Some(Reverse((at, message))) = self.arrivals.peek().copied() {
                if at.0 > self.now_us * (1.0 + 1e-12) {
                    break;
                }
                self.arrivals.pop();
                self.messages[message].arrived = true;
                self.finish(self.messages[message].send);
                self.try_receive(self.messages[message].lane);
            }
            self.settle();
        }
    }

    /// Lets messages flow for some time; those that have flowed are on their way to arrive.
    fn flow(&mut self, rates: &[f64], step_us: f64) {
        let flowing = std::mem::take(&mut self.flowing);
        for (message, rate) in flowing.into_iter().zip(rates) {
            let left = &mut self.messages[message].left_bits;
            *left -= rate * step_us;
            // a thousandth of a bit is rounding
            if *left > 1e-3 {
                self.flowing.push(message);
                continue;
            }
            let lane = self.messages[message].lane;
            self.lanes[lane].flowed += 1;
            let at = Time(self.now_us + self.lanes[lane].alpha_us);
            self.arrivals.push(Reverse((at, message)));
            self.try_send(lane);
        }
    }

    fn make_ready(&mut self, id: usize) {
        self.steps[id].ready = true;
        match self.steps[id].message {
            None => self.finish(id),
            Some((message, false)) => self.try_send(self.messages[message].lane),
            Some((message, true)) => self.try_receive(self.messages[message].lane),
        }
    }

    fn finish(&mut self, id: usize) {
        if !std::mem::replace(&mut self.steps[id].done, true) {
            self.fresh.push(id);
        }
    }

    /// Makes ready what waited for steps that are done.
    fn settle(&mut self) {
        while let Some(id) = self.fresh.pop() {
            for next in std::mem::take(&mut self.steps[id].dependents) {
                self.steps[next].waits -= 1;
                if self.steps[next].waits == 0 {
                    self.make_ready(next);
                }
            }
        }
    }

    /// Begins the lane's next message if its sender is ready, the one before has flowed, and there
    /// is room.
    fn try_send(&mut self, lane: usize) {
        let Stream { begun, flowed, received, .. } = self.lanes[lane];
        let Some(message) = self.lanes[lane].messages.get(begun).copied() else { return };
        if begun == flowed
            && begun - received < self.room
            && self.steps[self.messages[message].send].ready
        {
            self.lanes[lane].begun += 1;
            self.flowing.push(message);
        }
    }

    /// Takes what has arrived on the lane, as far as its receiver is ready.
    fn try_receive(&mut self, lane: usize) {
        while let Some(message) = self.lanes[lane].messages.get(self.lanes[lane].received).copied()
        {
            let receive = self.messages[message].receive;
            if !self.messages[message].arrived || !self.steps[receive].ready {
                break;
            }
            self.lanes[lane].received += 1;
            self.finish(receive);
            self.try_send(lane);
        }
    }

    /// The rates of what flows, in bits in a µs: all rise together, by weight, and stay where one
    /// of their resources is used up.
    fn rates(&self) -> Vec<f64> {
        let resources = |f: usize| self.lanes[self.messages[self.flowing[f]].lane].resources;
        let weight = |f: usize| self.messages[self.flowing[f]].weight;
        let mut shared: Vec<Shared> = self
            .capacity
            .iter()
            .map(|left| Shared { left: *left, weight: 0.0, open: 0, users: Vec::new() })
            .collect();
        for f in 0..self.flowing.len() {
            for r in resources(f) {
                shared[r].users.push(f);
                shared[r].weight += weight(f);
                shared[r].open += 1;
            }
        }
        let mut rates = vec![f64::NAN; self.flowing.len()];
        let mut used: Vec<usize> = (0..shared.len()).filter(|r| shared[*r].open > 0).collect();
        while let Some(tightest) =
            used.iter().copied().min_by(|a, b| shared[*a].level().total_cmp(&shared[*b].level()))
        {
            let level = shared[tightest].level();
            for f in std::mem::take(&mut shared[tightest].users) {
                if rates[f].is_nan() {
                    rates[f] = level * weight(f);
                    for r in resources(f) {
                        shared[r].left -= rates[f];
                        shared[r].weight -= weight(f);
                        shared[r].open -= 1;
                    }
                }
            }
            used.retain(|r| shared[*r].open > 0);
        }
        rates
    }
}

/// A resource, while rates are found.
struct Shared {
    left: f64,
    /// Of the messages whose rates are not found, and how many they are.
    weight: f64,
    open: usize,
    users: Vec<usize>,
}

impl Shared {
    /// The rate for each unit of weight, were there no other resources.
    fn level(&self) -> f64 {
        self.left.max(0.0) / self.weight
    }
}
