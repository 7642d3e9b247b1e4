//! Collective operations of two ranks: beside gloo, over the loopback and where NICs limit both,
//! and what is kept of their speed where NICs limit them and one is lost.
//!
//! Where NICs limit, gloo has two network namespaces whose link carries as much as all NICs of a
//! host together, with packets as large. The last is R²CCL's evaluation, scaled (its Figures 15 and
//! 16 are `make figures ONLY=coll`): two hosts with eight NICs each, whose rates together are a
//! part of what this machine carries, so that NICs are what limits; one NIC dies in mid-stream, and
//! the settled speed is compared with that of the same run where none does.
//!
//! Failure cases: a wrong result or a program that fails is an error. Without a Python that has
//! torch, gloo is left out, and that is said; without root it has no link of its own, and that is
//! said too.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use serde::Deserialize;
use unbroken_fabric::Shape;
use unbroken_runtime::DEFAULT_VARIABLE;
use unbroken_testkit::{Lab, Running};

use crate::report::{median, Better, Entry};
use crate::Result;

const NICS: u8 = 8;
/// The rate of each, where they limit: slow enough for two cores to carry the packets of 16 NICs.
const RATE_MBPS: u32 = 64;
/// A NIC dies so long after the beginning; the second half of the run is what counts.
const DIES: Duration = Duration::from_millis(1500);
const SECONDS: f64 = 4.0;
const LIMIT: Duration = Duration::from_secs(120);
/// Rounds at most: one takes a minute.
const MOST_ROUNDS: u32 = 3;
/// Of what is left of eight NICs when one is lost, this share is to be kept.
const KEPT: f64 = 0.97 * 7.0 / 8.0;
const STALLS: usize = 5;
const GLOO: &str = "benches/coll/gloo.py";
const LARGE: u64 = 64 << 20;
/// Where NICs limit: half a second.
const LIMITED: u64 = 32 << 20;

/// What `unbroken coll bench` says.
#[derive(Deserialize)]
struct Said {
    time_us: f64,
    longest_us: f64,
    #[serde(default)]
    times_us: Vec<f64>,
    algbw_gbps: f64,
    busbw_gbps: f64,
    wrong: u64,
}

/// A run of it.
#[derive(Clone, Copy)]
struct Run {
    op: &'static str,
    bytes: u64,
    /// So many operations, or as many as fit into a time.
    iterations: Option<u32>,
    rate_mbps: Option<u32>,
    dies: bool,
}

impl Run {
    fn words(&self) -> Vec<String> {
        let bytes = self.bytes;
        let mut words =
            format!("coll bench --hosts a,b --op {} --min {bytes} --max {bytes} --json", self.op);
        match self.iterations {
            Some(iterations) => words += &format!(" --iterations {iterations}"),
            None => words += &format!(" --for {SECONDS}s --each"),
        }
        if let Some(rate) = self.rate_mbps {
            words += &format!(" --nic-mbps {rate}");
        }
        words.split(' ').map(String::from).collect()
    }

    fn command(&self) -> String {
        let fault = if self.dies { "; unbroken fault set 'nic a/0 dead' --at 1500ms" } else { "" };
        let rate = self.rate_mbps.map_or(String::new(), |rate| {
            format!("each NIC: unbroken fault set 'rate … {rate}Mbit'; ")
        });
        format!("{rate}unbroken {}{fault}", self.words().join(" "))
    }

    fn run(&self, unbroken: &Path) -> Result<Said> {
        let lab = Lab::with_shape(unbroken, &Shape::of(0, &["a", "b"], NICS))?;
        let call = |words: &[&str]| -> Result<()> {
            let done = Command::new(unbroken)
                .env(DEFAULT_VARIABLE, lab.runtime().path())
                .args(words)
                .output()?;
            match done.status.success() {
                true => Ok(()),
                false => Err(format!(
                    "unbroken {}: {}",
                    words.join(" "),
                    String::from_utf8_lossy(&done.stderr)
                )
                .into()),
            }
        };
        if let Some(rate) = self.rate_mbps {
            for nic in 0..NICS {
                for host in ["a", "b"] {
                    call(&["fault", "set", &format!("rate {host}/{nic} {rate}Mbit")])?;
                }
            }
        }
        let mut command = Command::new(unbroken);
        command.env(DEFAULT_VARIABLE, lab.runtime().path()).args(self.words());
        let mut running =
            Running::start(command, "unbroken coll bench", lab.folder().join("bench.log"))?;
        if self.dies {
            call(&["fault", "set", "nic a/0 dead", "--at", &format!("{}ms", DIES.as_millis())])?;
        }
        running.succeed(LIMIT)?;
        let output = running.output();
        let line = output
            .lines()
            .find(|line| line.starts_with('{'))
            .ok_or_else(|| format!("no result in:\n{output}"))?;
        let said: Said = serde_json::from_str(line)?;
        match said.wrong {
            0 => Ok(said),
            wrong => Err(format!("{}: {wrong} bytes are wrong", self.command()).into()),
        }
    }
}

impl Said {
    /// The median time of the operations in the second half of the run.
    fn settled_us(&self) -> Result<f64> {
        let half_us = self.times_us.iter().sum::<f64>() / 2.0;
        let mut passed_us = 0.0;
        let late = self.times_us.iter().skip_while(|time_us| {
            passed_us += **time_us;
            passed_us < half_us
        });
        Ok(median(&late.copied().collect::<Vec<_>>()).ok_or("no operation was timed")?)
    }

    /// The bus bandwidth of operations that take so long.
    fn gbps(&self, bytes: u64, time_us: f64) -> f64 {
        bytes as f64 * 8e-3 / time_us * self.busbw_gbps / self.algbw_gbps
    }

    /// How much longer the longest operation took than the median one.
    fn stall_ms(&self) -> f64 {
        (self.longest_us - median(&self.times_us).unwrap_or(0.0)) / 1e3
    }
}

/// All of it.
pub fn run(unbroken: &Path, python: Option<&Path>, rounds: u32) -> Result<Vec<Entry>> {
    let mut entries = Vec::new();
    match python {
        Some(python) => {
            let rounds = rounds.min(MOST_ROUNDS);
            for (bytes, iterations, what) in [(LARGE, 10, "64 MiB"), (8, 2000, "8 B")] {
                entries.extend(beside_gloo(
                    unbroken,
                    python,
                    rounds,
                    &Beside { bytes, iterations, what, mbps: None },
                )?);
            }
            match rustix::process::geteuid().is_root() {
                true => {
                    let limited = Beside {
                        bytes: LARGE,
                        iterations: 3,
                        what: "64 MiB",
                        mbps: Some(RATE_MBPS),
                    };
                    entries.extend(beside_gloo(unbroken, python, rounds, &limited)?);
                }
                false => println!(
                    "AllReduce beside gloo where NICs limit is left out: gloo's link takes root"
                ),
            }
        }
        None => println!(
            "AllReduce beside gloo is left out: there is no Python with torch; `make test-torch` \
             makes one, --python names one"
        ),
    }
    for (op, title) in [
        ("all-reduce", "AllReduce"),
        ("all-gather", "AllGather"),
        ("reduce-scatter", "ReduceScatter"),
        ("send-recv", "SendRecv"),
    ] {
        entries.extend(kept(unbroken, rounds.min(MOST_ROUNDS), op, title)?);
    }
    entries.extend(small(unbroken, rounds.min(MOST_ROUNDS))?);
    entries.extend(stall(unbroken)?);
    Ok(entries)
}

/// What is measured beside gloo.
struct Beside {
    bytes: u64,
    iterations: u32,
    what: &'static str,
    /// What each NIC carries, where they limit.
    mbps: Option<u32>,
}

fn beside_gloo(unbroken: &Path, python: &Path, rounds: u32, of: &Beside) -> Result<Option<Entry>> {
    let Beside { bytes, iterations, what, mbps } = *of;
    let ours =
        Run { op: "all-reduce", bytes, iterations: Some(iterations), rate_mbps: mbps, dies: false };
    let our_us = || -> Result<f64> { Ok(ours.run(unbroken)?.time_us) };
    let mut words = [GLOO, "--bytes", &bytes.to_string(), "--iterations", &iterations.to_string()]
        .map(String::from)
        .to_vec();
    let link_mbps = mbps.map(|mbps| mbps * u32::from(NICS));
    words.extend(link_mbps.into_iter().flat_map(|mbps| ["--mbps".to_string(), mbps.to_string()]));
    let their_us = || -> Result<f64> {
        let done = Command::new(python).args(&words).output()?;
        let text = String::from_utf8_lossy(&done.stdout).trim().to_string();
        text.parse()
            .map_err(|_| format!("{GLOO}: {text} {}", String::from_utf8_lossy(&done.stderr)).into())
    };
    let peer = link_mbps.map_or("gloo over the loopback".into(), |mbps| {
        format!("gloo over a link of {mbps} Mbit/s")
    });
    let [ours_us, theirs_us] =
        forth_and_back(&format!("{what}, us, beside {peer}"), rounds, &our_us, &their_us)?;
    // Of two ranks, the bus carries as much as the buffer has.
    let large = bytes == LARGE;
    let shown = |us: Vec<f64>| {
        if large {
            us.iter().map(|us| bytes as f64 * 8e-3 / us).collect()
        } else {
            us
        }
    };
    let (ours_all, theirs_all): (Vec<f64>, Vec<f64>) = (shown(ours_us), shown(theirs_us));
    let (unit, better) = if large { ("Gbit/s", Better::Higher) } else { ("us", Better::Lower) };
    let Some(value) = median(&ours_all) else { return Ok(None) };
    let bench = mbps.map_or("AllReduce, 2 ranks".into(), |mbps| {
        format!("AllReduce, 2 ranks, {NICS} NICs of {mbps} Mbit/s")
    });
    let entry = Entry::new(&bench, what, value, unit, better, &ours.command());
    Ok(entry.beside_rounds(&peer, &ours_all, &theirs_all).map(|entry| entry.bar(1.0)))
}

/// Two measurements in turns, A B B A, and their means of each round. `what` says what is measured,
/// in which unit.
fn forth_and_back(
    what: &str,
    rounds: u32,
    a: &dyn Fn() -> Result<f64>,
    b: &dyn Fn() -> Result<f64>,
) -> Result<[Vec<f64>; 2]> {
    let mut all = [Vec::new(), Vec::new()];
    for _ in 0..rounds {
        let (a1, b1, b2, a2) = (a()?, b()?, b()?, a()?);
        all[0].push((a1 + a2) / 2.0);
        all[1].push((b1 + b2) / 2.0);
        println!("collectives, {what}: {:.2} beside {:.2}", (a1 + a2) / 2.0, (b1 + b2) / 2.0);
    }
    Ok(all)
}

/// What is kept of the bandwidth when one of eight NICs is lost.
fn kept(unbroken: &Path, rounds: u32, op: &'static str, title: &str) -> Result<Option<Entry>> {
    let of = |dies| Run { op, bytes: LIMITED, iterations: None, rate_mbps: Some(RATE_MBPS), dies };
    let gbps = |dies| -> Result<f64> {
        let said = of(dies).run(unbroken)?;
        Ok(said.gbps(LIMITED, said.settled_us()?))
    };
    let [lost, whole] = forth_and_back(
        &format!("{title}, Gbit/s, one lost beside none"),
        rounds,
        &|| gbps(true),
        &|| gbps(false),
    )?;
    let Some(value) = median(&lost) else { return Ok(None) };
    let bench = format!("{title}, 2 hosts, 8 NICs of {RATE_MBPS} Mbit/s, one lost");
    let entry = Entry::new(&bench, "32 MiB", value, "Gbit/s", Better::Higher, &of(true).command());
    Ok(entry.beside_rounds("the same, none lost", &lost, &whole).map(|entry| entry.bar(KEPT)))
}

/// What small operations take when one of eight NICs is lost.
fn small(unbroken: &Path, rounds: u32) -> Result<Option<Entry>> {
    let of = |dies| Run { op: "all-reduce", bytes: 1024, iterations: None, rate_mbps: None, dies };
    let us = |dies| of(dies).run(unbroken)?.settled_us();
    let [lost, whole] =
        forth_and_back("1 KiB, us, one lost beside none", rounds, &|| us(true), &|| us(false))?;
    let Some(value) = median(&lost) else { return Ok(None) };
    let entry = Entry::new(
        "AllReduce, 2 hosts, 8 NICs, one lost",
        "1 KiB",
        value,
        "us",
        Better::Lower,
        &of(true).command(),
    );
    Ok(entry.beside_rounds("the same, none lost", &lost, &whole).map(|entry| entry.bar(1.0 / 0.97)))
}

/// How long a running operation stands still when a NIC dies.
fn stall(unbroken: &Path) -> Result<Option<Entry>> {
    let of =
        Run { op: "all-reduce", bytes: 4 << 20, iterations: None, rate_mbps: None, dies: true };
    let mut all_ms = Vec::new();
    for _ in 0..STALLS {
        all_ms.push(of.run(unbroken)?.stall_ms());
    }
    let Some(value) = median(&all_ms) else { return Ok(None) };
    let entry = Entry::new(
        "AllReduce, NIC dies",
        "longest operation less the median one, 4 MiB",
        value,
        "ms",
        Better::Lower,
        &of.command(),
    );
    Ok(Some(entry.of_rounds(&all_ms).bar(5.0)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_counts_is_the_second_half() {
        let said = Said {
            time_us: 0.0,
            longest_us: 50.0,
            times_us: vec![10.0, 10.0, 10.0, 50.0, 20.0, 20.0, 20.0, 20.0],
            algbw_gbps: 1.0,
            busbw_gbps: 0.5,
            wrong: 0,
        };
        assert_eq!(said.settled_us().unwrap(), 20.0);
        assert_eq!((said.gbps(1000, 20.0), said.stall_ms()), (0.2, 0.03));
    }
}
