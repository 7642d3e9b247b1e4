//! NICs lost at random, many patterns of each number (R²CCL's Figure 10).
//!
//! Each pattern follows from the seed and its number alone. So they are computed in any order, on
//! all cores or on other machines ([`Sweep::missing`], [`Work`], [`Sweep::add`]), with the same
//! answer. With `--resume` each result is a line of a file ([`kept`]), and a sweep that was
//! interrupted goes on where it was.

mod kept;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard};

use clap::Args;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use unbroken_simulate::cluster::Cluster;
use unbroken_simulate::failures::pattern;
use unbroken_simulate::job::Job;
use unbroken_simulate::step::Simulation;
use unbroken_simulate::strategy::Strategy;

use crate::options::{cores, count, within, SubjectArgs};
use crate::{on_cores, Error, Result, Watch};
use kept::Kept;

/// Strategies that are compared.
pub const COMPARED: [Strategy; 4] = Strategy::IN_PLACE;
/// The most patterns.
const MOST: u64 = 10_000_000;

/// The question.
#[derive(Args)]
pub struct SweepArgs {
    /// How many NICs are lost: one number, or from 1-10
    #[arg(long, value_name = "COUNTS", default_value = "1-10", value_parser = counts)]
    lost: Counts,
    /// Patterns of each number
    #[arg(long, value_name = "COUNT", default_value_t = 50, value_parser = within::<1, MOST>)]
    patterns: u64,
    /// Which patterns
    #[arg(long, value_name = "NUMBER", default_value_t = 1, value_parser = count::<u64>)]
    seed: u64,
    /// Keep results in this file, and begin with those that it has
    #[arg(long, value_name = "FILE")]
    resume: Option<PathBuf>,
    /// How many cores [default: all]
    #[arg(long, value_name = "COUNT", value_parser = cores)]
    cores: Option<u16>,
    #[command(flatten)]
    subject: SubjectArgs,
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Counts {
    first: usize,
    last: usize,
}

fn counts(text: &str) -> std::result::Result<Counts, String> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    match (first.parse(), last.parse()) {
        (Ok(first), Ok(last)) if 1 <= first && first <= last => Ok(Counts { first, last }),
        _ => Err(format!("'{text}' is no number of NICs; 3 and 1-10 are right")),
    }
}

/// A result: what becomes of one pattern.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Line {
    /// How many NICs are lost.
    pub lost: usize,
    /// Its number.
    pub pattern: u64,
    /// How much longer a step takes, of each of [`COMPARED`]; missing where it cannot go on.
    pub longer: [Option<f64>; COMPARED.len()],
}

/// Some of the patterns of a number of lost NICs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Part {
    /// How many NICs are lost.
    pub lost: usize,
    /// The first.
    pub first: u64,
    /// The one behind the last.
    pub end: u64,
}

/// What patterns are of. All results follow from it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Subject {
    /// The version of this library.
    pub version: String,
    /// The cluster.
    pub cluster: Cluster,
    /// The job.
    pub job: Job,
    /// Which patterns.
    pub seed: u64,
}

/// What of a sweep is left to do.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Missing {
    /// What it is of.
    pub of: Subject,
    /// Patterns without a result.
    pub parts: Vec<Part>,
}

/// A part of a sweep, to be computed wherever this library is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Work {
    /// What it is of.
    pub of: Subject,
    /// Which patterns.
    pub part: Part,
}

impl Work {
    /// Its results, in order; on one core.
    pub fn lines(&self, watch: &Watch) -> Result<Vec<Line>> {
        let (Work { of, part }, here) = (self, env!("CARGO_PKG_VERSION"));
        if of.version != here {
            let text = format!(
                "a sweep of version {} meets version {here}; the same everywhere is right",
                of.version
            );
            return Err(Error::system(None, text));
        }
        let simulation = Simulation::new(&of.cluster, &of.job)?.with_stop(watch.stopper());
        check_lost(part.lost, simulation.cluster())?;
        if part.first >= part.end || part.end > MOST {
            let text = format!("patterns {} to {} are none of a sweep", part.first, part.end);
            return Err(Error::value("patterns", text));
        }
        watch.expect((part.end - part.first) as usize);
        let line = |number| {
            let line = of_pattern(&simulation, part.lost, of.seed, number, watch)?;
            watch.add(1);
            Ok(line)
        };
        (part.first..part.end).map(line).collect()
    }
}

/// A sweep, with the results that there are.
pub struct Sweep {
    simulation: Simulation,
    lost: Counts,
    patterns: u64,
    seed: u64,
    cores: Option<u16>,
    found: Mutex<Found>,
}

struct Found {
    lines: BTreeMap<(usize, u64), Line>,
    kept: Option<Kept>,
}

impl Sweep {
    /// Checks the question, and takes results from its file.
    pub fn open(args: &SweepArgs, watch: &Watch) -> Result<Sweep> {
        let (simulation, _) = args.subject.read(watch)?;
        check_lost(args.lost.last, simulation.cluster())?;
        let counts = (args.lost.last - args.lost.first + 1) as u64;
        if counts.saturating_mul(args.patterns) > MOST {
            let text = format!("a sweep has up to {MOST} patterns; fewer --patterns are right");
            return Err(Error::value("patterns", text));
        }
        let mut lines = BTreeMap::new();
        let head = Head::of(&simulation, args.seed);
        let wanted = |line: &Line| args.lost.has(line.lost) && line.pattern < args.patterns;
        let keep = |line: Line| {
            if wanted(&line) {
                lines.insert((line.lost, line.pattern), line);
            }
        };
        let kept = args.resume.as_deref().map(|p| Kept::open(p, &head, keep)).transpose()?;
        watch.expect((counts * args.patterns) as usize);
        watch.add(lines.len() as u64);
        Ok(Sweep {
            simulation,
            lost: args.lost,
            patterns: args.patterns,
            seed: args.seed,
            cores: args.cores,
            found: Mutex::new(Found { lines, kept }),
        })
    }

    /// What it is of.
    pub fn simulation(&self) -> &Simulation {
        &self.simulation
    }

    fn found(&self) -> MutexGuard<'_, Found> {
        self.found.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// What is left to do, in runs of patterns.
    pub fn missing(&self) -> Missing {
        let found = self.found();
        let mut parts: Vec<Part> = Vec::new();
        for lost in self.lost.first..=self.lost.last {
            let mut next = 0;
            let known = found.lines.range((lost, 0)..(lost, self.patterns)).map(|(key, _)| key.1);
            for number in known.chain([self.patterns]) {
                if next < number {
                    parts.push(Part { lost, first: next, end: number });
                }
                next = number + 1;
            }
        }
        let of = Subject {
            version: env!("CARGO_PKG_VERSION").into(),
            cluster: self.simulation.cluster().clone(),
            job: self.simulation.job().clone(),
            seed: self.seed,
        };
        Missing { of, parts }
    }

    /// Takes results that were computed elsewhere; those that are there already are left out.
    pub fn add(&self, lines: &[Line], watch: &Watch) -> Result {
        for line in lines {
            let mut found = self.found();
            if !self.lost.has(line.lost) || line.pattern >= self.patterns {
                let text = format!("pattern {} of {} is of another sweep", line.pattern, line.lost);
                return Err(Error::value("patterns", text));
            }
            if found.lines.contains_key(&(line.lost, line.pattern)) {
                continue;
            }
            if let Some(kept) = &mut found.kept {
                kept.append(line)?;
            }
            found.lines.insert((line.lost, line.pattern), *line);
            watch.add(1);
        }
        Ok(())
    }

    /// Computes here what is left to do.
    pub fn finish(&self, watch: &Watch) -> Result {
        let numbers = |part: Part| (part.first..part.end).map(move |number| (part.lost, number));
        let keys: Vec<(usize, u64)> = self.missing().parts.into_iter().flat_map(numbers).collect();
        let compute = |(lost, number): &(usize, u64)| {
            let line = of_pattern(&self.simulation, *lost, self.seed, *number, watch)?;
            self.add(&[line], watch)
        };
        on_cores(self.cores, || keys.par_iter().try_for_each(compute))?
    }

    /// The answer, once nothing is left to do.
    pub fn report(&self) -> Report {
        let healthy = self.simulation.healthy();
        Report {
            cluster: self.simulation.cluster().clone(),
            job: self.simulation.job().clone(),
            seed: self.seed,
            step_s: healthy.total_s(),
            network_share: healthy.network_share(),
            rows: rows(&self.found().lines),
        }
    }
}

impl Counts {
    fn has(self, lost: usize) -> bool {
        (self.first..=self.last).contains(&lost)
    }
}

fn check_lost(lost: usize, cluster: &Cluster) -> Result {
    let nics = cluster.hosts * cluster.nics;
    match (1..=nics).contains(&lost) {
        true => Ok(()),
        false => {
            let text = format!("{lost} of {nics} NICs cannot be lost; up to {nics} are right");
            Err(Error::value("lost", text))
        }
    }
}

fn of_pattern(
    simulation: &Simulation,
    lost: usize,
    seed: u64,
    number: u64,
    watch: &Watch,
) -> Result<Line> {
    let nics = pattern(simulation.cluster(), lost, seed, number);
    let healthy_s = simulation.healthy().total_s();
    let longer = COMPARED.map(|strategy| {
        simulation.after(&nics, strategy).ok().map(|step| step.total_s() / healthy_s - 1.0)
    });
    // else nothing can go on only because nobody waits for it
    watch.check()?;
    Ok(Line { lost, pattern: number, longer })
}

/// What a file of results is of: its first line.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Head {
    sweep: u32,
    seed: u64,
    cluster: Cluster,
    job: Job,
    strategies: Vec<Strategy>,
}

impl Head {
    fn of(simulation: &Simulation, seed: u64) -> Head {
        let (cluster, job) = (simulation.cluster().clone(), simulation.job().clone());
        Head { sweep: 1, seed, cluster, job, strategies: COMPARED.to_vec() }
    }
}

/// The answer.
#[derive(Serialize)]
pub struct Report {
    /// The cluster.
    pub cluster: Cluster,
    /// The job.
    pub job: Job,
    /// Which patterns.
    pub seed: u64,
    /// A step while nothing is lost.
    pub step_s: f64,
    /// The part of it in which NICs are waited for.
    pub network_share: f64,
    /// For each number of lost NICs, each of [`COMPARED`].
    pub rows: Vec<Row>,
}

/// How much longer a step takes than on the healthy cluster.
#[derive(Serialize)]
pub struct Row {
    /// How many NICs are lost.
    pub lost: usize,
    /// What is done about it.
    pub strategy: Strategy,
    /// How many patterns there are.
    pub patterns: usize,
    /// Patterns with which it cannot go on.
    pub cannot: usize,
    /// The mean of the others.
    pub mean: f64,
    /// What 95 of 100 do not exceed.
    pub p95: f64,
    /// The most.
    pub most: f64,
}

fn rows(lines: &BTreeMap<(usize, u64), Line>) -> Vec<Row> {
    let mut of_count: BTreeMap<usize, Vec<&Line>> = BTreeMap::new();
    // in order, so that sums are the same whatever the order of computing was
    lines.iter().for_each(|(key, line)| of_count.entry(key.0).or_default().push(line));
    let mut rows = Vec::new();
    for (lost, lines) in &of_count {
        for (at, strategy) in COMPARED.into_iter().enumerate() {
            let mut all: Vec<f64> = lines.iter().filter_map(|l| l.longer[at]).collect();
            let mean = all.iter().sum::<f64>() / all.len().max(1) as f64;
            all.sort_by(f64::total_cmp);
            let part =
                |n: usize| all.get(n.min(all.len().saturating_sub(1))).copied().unwrap_or(0.0);
            rows.push(Row {
                lost: *lost,
                strategy,
                patterns: lines.len(),
                cannot: lines.len() - all.len(),
                mean,
                p95: part(all.len() * 95 / 100),
                most: part(all.len()),
            });
        }
    }
    rows
}

#[cfg(test)]
mod tests;
