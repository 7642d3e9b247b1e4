//! Serving while NICs are lost: what must hold whatever the model, the load and the strategy are.

use unbroken_simulate::cluster::Loss;
use unbroken_simulate::inference::arrivals::{trace, Pattern, Request, Stream};
use unbroken_simulate::inference::handling::{Handling, Times};
use unbroken_simulate::inference::model::Llm;
use unbroken_simulate::inference::results::{Outcome, Quantiles};
use unbroken_simulate::inference::serving::Serving;
use unbroken_simulate::inference::{Service, When};

const LOST: [Loss; 1] = [Loss { host: 0, nic: 3, port: None, left: None }];
const AT: Option<When> = Some(When::Second(50.0));

fn service(name: &str, disaggregated: bool, lost: &[Loss]) -> Service {
    let new = Serving::new(Llm::named(name).unwrap(), disaggregated);
    // 405B fits on one host with a byte for a weight
    let weight_bytes = if disaggregated { 1.0 } else { 2.0 };
    Service::new(Serving { weight_bytes, ..new }, lost).unwrap()
}

fn stream(pattern: Pattern, rate: f64) -> Stream {
    Stream { pattern, rate, lasts_s: 100.0, prompt: 2000, output: 256 }
}

fn run(service: &Service, stream: &Stream, handling: Handling, when: Option<When>) -> Outcome {
    let of = |replica| stream.requests(1, replica).unwrap();
    service.run((&of(0), &of(1)), handling, Times::default(), when).unwrap()
}

fn settings() -> Vec<(Service, f64)> {
    let of = |name, disaggregated, rate| (service(name, disaggregated, &LOST), rate);
    // parts of prompts that keep stages evenly busy
    let even = service("llama-3.1-405b", false, &LOST).serving().clone();
    let even = Serving { budget: 512, ..even };
    vec![
        of("llama-3.1-70b", false, 4.0),
        of("llama-3.1-70b", true, 4.0),
        of("llama-3.1-405b", false, 1.0),
        of("llama-3.1-405b", true, 1.0),
        (Service::new(even, &LOST).unwrap(), 1.0),
    ]
}

/// Every request ends, or is counted as lost; and none is lost but where nothing is done.
#[test]
fn every_request_ends_or_is_lost() {
    for (service, rate) in settings() {
        for host in [0, 1] {
            let lost = [Loss { host, nic: 0, port: None, left: None }];
            let service = Service::new(service.serving().clone(), &lost).unwrap();
            for factor in [0.1, 1.0, 4.0] {
                let stream = stream(Pattern::Poisson, rate * factor);
                let count = stream.requests(1, 0).unwrap().len();
                for handling in Handling::ALL {
                    let outcome = run(&service, &stream, handling, AT);
                    assert_eq!(outcome.requests, count);
                    assert_eq!(outcome.finished + outcome.lost, count);
                    assert_eq!(outcome.lost > 0, handling == Handling::None, "{outcome:?}");
                    assert_eq!(outcome.failed_at_s, Some(50.0));
                }
            }
        }
    }
}

/// Where [`all`] has times per token.
const TPOT: usize = 1;

fn all(outcome: &Outcome) -> [Quantiles; 3] {
    [outcome.ttft_s.unwrap(), outcome.tpot_s.unwrap(), outcome.latency_s.unwrap()]
}

/// Without a failure strategies are the same, but for what copies of the KV cache cost.
#[test]
fn without_a_failure_strategies_are_the_same() {
    for (service, rate) in settings() {
        let stream = stream(Pattern::Poisson, rate);
        let healthy = run(&service, &stream, Handling::None, None);
        for handling in Handling::ALL {
            let outcome = run(&service, &stream, handling, None);
            if handling != Handling::DejaVu {
                assert_eq!(outcome, healthy);
                continue;
            }
            for (copied, alone) in all(&outcome).into_iter().zip(all(&healthy)) {
                let more = copied.mean / alone.mean;
                assert!((0.998..1.02).contains(&more), "{more}");
            }
        }
    }
}

/// Batches that fall together by chance may be a little better than others: 2 %. Where more
/// requests come than are answered, those that wait for a restart are answered when no more come,
/// and then have each token sooner; but none of them ends sooner.
#[test]
fn a_failure_is_never_better_than_none() {
    for (service, rate) in settings() {
        for (pattern, factor) in [
            (Pattern::Fixed, 0.2),
            (Pattern::Poisson, 0.5),
            (Pattern::Poisson, 1.0),
            (Pattern::Poisson, 4.0),
        ] {
            let stream = stream(pattern, rate * factor);
            let healthy = all(&run(&service, &stream, Handling::None, None));
            for handling in Handling::ALL.into_iter().filter(|h| *h != Handling::None) {
                let failed = all(&run(&service, &stream, handling, AT));
                for (at, (failed, healthy)) in failed.iter().zip(&healthy).enumerate() {
                    if factor > 1.0 && at == TPOT {
                        continue;
                    }
                    let of = |q: &Quantiles| [q.p50, q.p95, q.p99, q.mean, q.most];
                    for (failed, healthy) in of(failed).into_iter().zip(of(healthy)) {
                        assert!(failed >= healthy * 0.98, "{handling:?}: {failed} {healthy}");
                    }
                }
            }
        }
    }
}

/// The same seed is the same pattern, only closer together. At random few requests meet a restart,
/// so that is looked at with equal distances.
#[test]
fn requests_wait_longer_where_more_come() {
    let cases = [
        (Pattern::Poisson, Handling::None, None),
        (Pattern::Poisson, Handling::Ours, AT),
        (Pattern::Fixed, Handling::Restart, AT),
        (Pattern::Fixed, Handling::Reroute, AT),
    ];
    for (service, rate) in settings() {
        for (pattern, handling, when) in cases {
            let mut before = [0.0; 3];
            for factor in [0.1, 0.3, 0.6, 1.0, 1.5, 2.0, 3.0] {
                let stream = Stream { lasts_s: 300.0, ..stream(pattern, rate * factor) };
                let ttft = run(&service, &stream, handling, when).ttft_s.unwrap();
                // of few requests that meet a restart, one more or less decides about p95
                let fixed = pattern == Pattern::Fixed;
                let (p95, slack) = if fixed { (0.0, 0.9) } else { (ttft.p95, 0.97) };
                let now = [ttft.p50, p95, ttft.mean];
                for (now, before) in now.into_iter().zip(before) {
                    assert!(now >= before * slack, "{handling:?} {factor}: {now} {before}");
                }
                before = now;
            }
        }
    }
}

/// One server, one request at a time, all alike: the mean wait of M/D/1 is ρ D / 2 (1 − ρ)
/// (Pollaczek and Khinchine).
#[test]
fn waiting_follows_the_formula_of_one_server() {
    let new = Serving::new(Llm::named("llama-3.1-70b").unwrap(), false);
    let serving = Serving { pipeline: 1, sequences: 1, ..new };
    let service = Service::new(serving, &[]).unwrap();
    let of = |rate, lasts_s, seed| {
        let stream = Stream { pattern: Pattern::Poisson, rate, lasts_s, prompt: 2000, output: 1 };
        let requests = stream.requests(seed, 0).unwrap();
        service.run((&requests, &[]), Handling::None, Times::default(), None).unwrap()
    };
    let one = Request { arrival_s: 0.0, prompt: 2000, output: 1 };
    let alone = service.run((&[one], &[]), Handling::None, Times::default(), None).unwrap();
    let service_s = alone.ttft_s.unwrap().mean;
    for load in [0.3, 0.6, 0.8] {
        let rate = load / service_s;
        let mean_s = of(rate, 60_000.0 / rate, 3).ttft_s.unwrap().mean;
        let expected_s = service_s * (1.0 + load / (2.0 * (1.0 - load)));
        assert!((mean_s / expected_s - 1.0).abs() < 0.03, "{load}: {mean_s} {expected_s}");
    }
}

/// A restart keeps requests waiting for its time, a switch for its own.
#[test]
fn a_failure_costs_its_time() {
    let service = service("llama-3.1-405b", false, &LOST);
    let requests = trace("49.9,2000,256\n70,2000,256\n120,2000,256").unwrap();
    let of =
        |handling, when| service.run((&requests, &[]), handling, Times::default(), when).unwrap();
    let healthy = of(Handling::None, None).latency_s.unwrap();
    // the first was under way for a tenth of a second, and begins again
    let restart = of(Handling::Restart, AT);
    let latency = restart.latency_s.unwrap();
    let longer_s = latency.most - healthy.most;
    assert!((35.0..36.0).contains(&longer_s), "{longer_s}");
    assert!(restart.ttft_s.unwrap().p50 > 15.0, "{restart:?}");
    for handling in [Handling::HotRepair, Handling::Balance, Handling::Ours] {
        let longer_s = of(handling, AT).latency_s.unwrap().most - healthy.most;
        assert!((0.4..0.45).contains(&longer_s), "{handling:?}: {longer_s}");
    }
    // with no load at all the other replica answers at once
    let longer_s = of(Handling::Reroute, AT).latency_s.unwrap().most - healthy.most;
    assert!((0.09..0.11).contains(&longer_s), "{longer_s}");
    let lost = of(Handling::None, AT);
    assert_eq!((lost.finished, lost.lost), (0, 3));
}

/// A KV cache is on its way when the NIC is lost, over NICs that are slow, to an instance that has
/// room for one.
#[test]
fn a_cache_on_its_way_is_held_or_sent_again() {
    let mut new = Serving::new(Llm::named("llama-3.1-405b").unwrap(), true);
    new.weight_bytes = 1.0;
    new.cluster.nic_mbps = 10_000;
    new.gpu.memory_gb = 56.6;
    let service = Service::new(new, &LOST).unwrap();
    let room = service.serving().kv_room();
    assert!((2256..2 * 2256).contains(&room), "{room}");
    let requests = trace("0,2000,256\n1,2000,256").unwrap();
    let of = |handling, when| {
        let run = service.run((&requests, &[]), handling, Times::default(), when);
        let outcome = run.unwrap();
        assert_eq!(outcome.lost, 0, "{handling:?}");
        outcome.latency_s.unwrap().most
    };
    let healthy_s = of(Handling::None, None);
    let first = service.run((&requests[..1], &[]), Handling::None, Times::default(), None).unwrap();
    // the cache takes 0.1 s, and a token 0.02
    let sending = Some(When::Second(first.ttft_s.unwrap().mean - 0.07));
    for handling in [Handling::HotRepair, Handling::Balance, Handling::Ours] {
        let longer_s = of(handling, sending) - healthy_s;
        assert!((0.4..0.52).contains(&longer_s), "{handling:?}: {longer_s}");
        // in the second half of the first prompt, whose cache then waits for the rest of the switch
        let longer_s = of(handling, Some(When::Second(0.2))) - healthy_s;
        assert!((0.15..0.52).contains(&longer_s), "{handling:?}: {longer_s}");
    }
    for handling in [Handling::Restart, Handling::DejaVu] {
        let longer_s = of(handling, sending) - healthy_s;
        assert!((34.0..36.0).contains(&longer_s), "{handling:?}: {longer_s}");
    }
}

/// The network alone, once all is settled.
#[test]
fn more_nics_that_are_left_are_better() {
    for (service, rate) in settings() {
        let stream = stream(Pattern::Fixed, rate * 0.1);
        let times = Times { switch_s: 0.0, ..Times::default() };
        let requests = stream.requests(1, 0).unwrap();
        let of = |handling| {
            let at = Some(When::Second(0.0));
            let outcome = service.run((&requests, &[]), handling, times, at).unwrap();
            outcome.latency_s.unwrap().mean
        };
        let [ours, balance, hot_repair] =
            [Handling::Ours, Handling::Balance, Handling::HotRepair].map(of);
        assert!(ours <= balance && balance < hot_repair, "{ours} {balance} {hot_repair}");
        let healthy = run(&service, &stream, Handling::None, None).latency_s.unwrap().mean;
        assert!(healthy < ours && ours < healthy * 1.01, "{healthy} {ours}");
    }
}

/// DéjàVu's experiment: one request, and a failure with token 800 of 1,500.
#[test]
fn a_copy_of_the_cache_saves_what_was_made() {
    for name in ["opt-66b", "bloom-176b"] {
        let service = service(name, false, &LOST);
        let one = [Request { arrival_s: 0.0, prompt: 500, output: 1500 }];
        let at = Some(When::Token(800));
        let of = |handling, when| {
            let outcome = service.run((&one, &[]), handling, Times::default(), when).unwrap();
            outcome.latency_s.unwrap().mean
        };
        let healthy = of(Handling::None, None);
        let more = |handling| of(handling, at) - healthy;
        // 800 of 1,500 tokens again
        let again = (more(Handling::Restart) - 35.0) / healthy;
        assert!((0.52..0.55).contains(&again), "{name}: {again}");
        let fetched = (more(Handling::DejaVu) - 35.0) / healthy;
        assert!((0.0..0.02).contains(&fetched), "{name}: {fetched}");
        let switched = more(Handling::Ours);
        assert!((0.4..0.45).contains(&switched), "{name}: {switched}");
        let wrong =
            service.run((&one, &[]), Handling::Ours, Times::default(), Some(When::Token(1501)));
        let says = wrong.unwrap_err().to_string();
        assert!(says.contains("is 1501; 1 to 1500 (the first answer) are right"), "{says}");
    }
}

#[test]
fn a_host_without_nics_ends_what_goes_on_in_place() {
    let all: Vec<Loss> = (0..8).map(|nic| Loss { host: 1, nic, port: None, left: None }).collect();
    let service = service("llama-3.1-70b", false, &all);
    let requests = stream(Pattern::Fixed, 1.0).requests(1, 0).unwrap();
    for handling in Handling::ALL {
        let of = |when| service.run((&requests, &[]), handling, Times::default(), when);
        assert!(of(None).is_ok());
        match of(AT) {
            Err(error) => {
                assert!(handling.in_place().is_some());
                assert!(error.to_string().contains("no path"), "{error}");
            }
            Ok(_) => assert!(handling.in_place().is_none()),
        }
    }
    let serving = Serving { pipeline: 1, ..service.serving().clone() };
    let says = Service::new(serving, &LOST).err().unwrap().to_string();
    assert!(says.contains("within a host a lost NIC costs nothing"), "{says}");
}
