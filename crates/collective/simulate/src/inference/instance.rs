//! An instance: what waits, what is admitted, and which pass comes next.

use std::collections::VecDeque;

use super::arrivals::Request;
use super::serving::Serving;

/// How far a request has come.
#[derive(Clone, Debug, Default)]
pub(super) struct Progress {
    /// Tokens that its KV cache has.
    pub context: u32,
    /// Tokens that were made since it began, or began again.
    pub made: u32,
    /// Whether a pass has it now.
    pub flying: bool,
    /// Tokens that its client has seen.
    pub shown: u32,
    /// When it saw the first.
    pub first_s: Option<f64>,
    /// When it saw the last.
    pub end_s: Option<f64>,
}

impl Progress {
    /// It has to begin again.
    pub fn reset(&mut self) {
        (self.context, self.made, self.flying) = (0, 0, false);
    }

    /// Tokens that are known and not in the KV cache.
    fn left(&self, request: &Request) -> u32 {
        request.prompt + self.made - self.context
    }

    /// Whether the next token can be made.
    pub fn is_complete(&self, request: &Request) -> bool {
        self.left(request) == 0
    }
}

/// What an instance does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// Prompts and answers.
    Whole,
    /// Prompts.
    Prefill,
    /// Answers.
    Decode,
}

impl Role {
    /// Tokens of the KV cache that a request has for itself here.
    pub fn claim(self, request: &Request) -> u64 {
        let answer = if self == Role::Prefill { 0 } else { request.output };
        u64::from(request.prompt) + u64::from(answer)
    }
}

/// Requests of a pass, with their new tokens.
pub(super) type Parts = Vec<(usize, u32)>;

/// A pass that is under way.
pub(super) struct Pass {
    /// Its number.
    pub number: u64,
    /// What it has.
    pub parts: Parts,
    /// When it ends.
    pub end_s: f64,
}

/// An instance.
pub(super) struct Instance {
    /// What it does.
    pub role: Role,
    /// Whether it is in service.
    pub up: bool,
    /// Requests that are not admitted, in order. With prefill and decode apart, the KV caches of
    /// those that wait for the latter have arrived.
    pub waiting: VecDeque<usize>,
    /// Admitted ones, in order.
    pub running: Vec<usize>,
    /// Passes under way, in order.
    pub passes: VecDeque<Pass>,
    /// By stage: when it has done what it was given.
    pub free_s: Vec<f64>,
    /// When it is looked at again.
    pub wake_s: Option<f64>,
    /// Tokens for which the KV cache has room.
    pub room: u64,
}

impl Instance {
    /// An idle one.
    pub fn new(role: Role, serving: &Serving) -> Instance {
        Instance {
            role,
            up: true,
            waiting: VecDeque::new(),
            running: Vec::new(),
            passes: VecDeque::new(),
            free_s: vec![0.0; serving.pipeline],
            wake_s: None,
            room: serving.kv_room(),
        }
    }

    /// What the next pass has: of all requests that generate a stage's part, then prompts as far as
    /// the budget goes, admitted ones first.
    pub fn compose(
        &mut self,
        serving: &Serving,
        requests: &[Request],
        progress: &mut [Progress],
    ) -> Parts {
        let decode = self.role == Role::Decode;
        let generates = |p: &Progress| decode || p.made > 0;
        let all = self.running.iter().filter(|r| generates(&progress[**r])).count();
        let mut share = all.div_ceil(serving.pipeline);
        let (mut budget, mut parts) = (serving.budget, Parts::new());
        for request in &self.running {
            let p = &mut progress[*request];
            if share > 0 && budget > 0 && !p.flying && generates(p) {
                (share, budget, p.flying) = (share - 1, budget - 1, true);
                parts.push((*request, 1));
            }
        }
        let mut prompt = |request: usize, progress: &mut [Progress], budget: &mut u32| {
            let p = &mut progress[request];
            let new = p.left(&requests[request]).min(*budget);
            *budget -= new;
            p.flying = true;
            parts.push((request, new));
        };
        for request in &self.running {
            let p = &progress[*request];
            if budget > 0 && !p.flying && !generates(p) {
                prompt(*request, progress, &mut budget);
            }
        }
        while budget > 0 && self.running.len() < serving.sequences {
            let Some(request) = self.waiting.front().copied() else { break };
            // room for an answer was taken before its KV cache was sent
            let needs = if decode { 0 } else { self.role.claim(&requests[request]) };
            if needs > self.room {
                break;
            }
            self.room -= needs;
            self.waiting.pop_front();
            self.running.push(request);
            prompt(request, progress, &mut budget);
        }
        parts
    }

    /// Takes a request out.
    pub fn remove(&mut self, request: usize) {
        if let Some(at) = self.running.iter().position(|r| *r == request) {
            self.running.remove(at);
        }
    }

    /// Passes under way come to nothing.
    pub fn cut(&mut self, now_s: f64, progress: &mut [Progress]) {
        for (request, _) in self.passes.drain(..).flat_map(|pass| pass.parts) {
            progress[request].flying = false;
        }
        self.free_s.fill(now_s);
    }

    /// All that it has, in order; it has nothing then.
    pub fn empty(&mut self, serving: &Serving) -> Vec<usize> {
        self.room = serving.kv_room();
        self.running.drain(..).chain(self.waiting.drain(..)).collect()
    }

    /// All stands still for so long.
    pub fn hold(&mut self, now_s: f64, seconds: f64) {
        self.free_s.iter_mut().for_each(|free| *free = free.max(now_s) + seconds);
        self.passes.iter_mut().for_each(|pass| pass.end_s += seconds);
    }
}

#[cfg(test)]
mod tests {
    use super::super::model::Llm;
    use super::*;

    #[test]
    fn passes_have_answers_first_and_prompts_in_parts() {
        let model = Llm::named("llama-3.1-70b").unwrap();
        let serving = Serving { budget: 1000, ..Serving::new(model, false) }.checked().unwrap();
        let requests = [Request { arrival_s: 0.0, prompt: 600, output: 5 }; 4];
        let mut progress = vec![Progress::default(); 4];
        let mut instance = Instance::new(Role::Whole, &serving);
        instance.waiting.extend(0..3);
        let next = |instance: &mut Instance, progress: &mut Vec<Progress>| {
            instance.compose(&serving, &requests, progress)
        };
        assert_eq!(next(&mut instance, &mut progress), [(0, 600), (1, 400)]);
        // the rest of 1 waits for the pass that has it
        assert_eq!(next(&mut instance, &mut progress), [(2, 600)]);
        assert_eq!(next(&mut instance, &mut progress), []);
        for (request, new) in [(0, 600), (1, 400)] {
            progress[request].context += new;
            progress[request].flying = false;
        }
        progress[0].made = 1;
        instance.waiting.push_back(3);
        assert_eq!(next(&mut instance, &mut progress), [(0, 1), (1, 200), (3, 600)]);
        let room = instance.room;
        assert_eq!(room, serving.kv_room() - 4 * 605);
        assert_eq!(instance.empty(&serving), [0, 1, 2, 3]);
        assert_eq!(instance.room, serving.kv_room());
    }

    #[test]
    fn a_request_without_room_waits_and_so_do_those_behind_it() {
        let model = Llm::named("llama-3.1-70b").unwrap();
        let serving = Serving::new(model, false).checked().unwrap();
        let mut requests = vec![Request { arrival_s: 0.0, prompt: 600, output: 400 }; 2];
        requests.push(Request { prompt: 1, output: 1, ..requests[0] });
        let mut progress = vec![Progress::default(); 3];
        let mut instance = Instance::new(Role::Whole, &serving);
        instance.room = 1500;
        instance.waiting.extend(0..3);
        assert_eq!(instance.compose(&serving, &requests, &mut progress), [(0, 600)]);
        assert_eq!(instance.waiting, [1, 2]);
    }
}
