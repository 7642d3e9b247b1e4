//! `unbroken coll bench`: sizes, times, bandwidths, checked results.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde::Serialize;
use unbroken_coll::{
    Bootstrap, Buffers, Communicator, DataType, Folding, Form, Numa, Options, ReduceOp,
};
use unbroken_fabric::{Fabric, Runtime};

use super::numbers::Numbers;
use super::{id_file, status_folder, BenchArgs, Op};
use crate::child;
use crate::output::{print, print_json, Failure, Result};

/// Descriptors that are as many as a rank can use.
const MOST_DESCRIPTORS: u64 = 1 << 16;
/// The most operations whose times are kept.
const MOST_TIMES: usize = 100_000;

/// The exit status of a rank that failed before it met the others.
const NOT_MET: u8 = 3;
/// How often it is looked which ranks have ended.
const LOOK: Duration = Duration::from_millis(20);

/// A line of the result.
#[derive(Serialize)]
struct Line {
    op: String,
    #[serde(rename = "type")]
    data: String,
    bytes: u64,
    iterations: u32,
    time_us: f64,
    longest_us: f64,
    /// What each took, if that is asked for.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    times_us: Vec<f64>,
    algbw_gbps: f64,
    busbw_gbps: f64,
    /// Bytes that were wrong, at this rank.
    wrong: u64,
    failures: u64,
    moves: u64,
    again: u64,
    /// What has happened so far.
    happened: Vec<String>,
    /// The shape of the last operation.
    shape: String,
}

/// Measures, as one rank or as all.
pub(crate) fn bench(runtime: &Runtime, args: &BenchArgs) -> Result {
    check_shape(args)?;
    check_numbers(args).map_err(Failure::Text)?;
    match args.rank {
        Some(rank) => {
            child::end_with(args.parent)?;
            one(runtime, args, rank)
        }
        None if args.hosts.len() < 2 => Err(Failure::Text(
            "name two hosts at least (--hosts a,b), or this rank (--rank, --ranks, --id-file)"
                .into(),
        )),
        None => all(runtime, args),
    }
}

/// An operation without the shape that is asked for would be measured in another.
fn check_shape(args: &BenchArgs) -> Result {
    let Some(shape) = args.shape else { return Ok(()) };
    let nothing = Numbers {
        op: args.op,
        data: args.data.data(),
        reduce: args.reduce.op(),
        rank: 0,
        ranks: 2,
        root: 0,
        count: 0,
    };
    let operation = nothing.operation();
    if shape.takes(&operation) {
        return Ok(());
    }
    let right: Vec<&str> =
        Form::ALL.into_iter().filter(|s| s.takes(&operation)).map(Form::name).collect();
    Err(Failure::Text(format!(
        "--shape {shape}: {} cannot have it; right is {}",
        operation.name(),
        right.join(", ")
    )))
}

/// Arguments that do not fit together.
fn check_numbers(args: &BenchArgs) -> std::result::Result<(), String> {
    let ranks = if args.hosts.is_empty() { args.ranks } else { Some(args.hosts.len()) };
    if let Some(ranks) = ranks {
        let last = match ranks.checked_sub(1) {
            Some(last) => last,
            None => return Err("--ranks 0: there is one rank at least".into()),
        };
        for (name, number) in [("--rank", args.rank), ("--root", Some(args.root))] {
            if let Some(number) = number.filter(|number| *number > last) {
                return Err(format!(
                    "{name} {number}: ranks are counted from 0, so of {ranks} the last is {last}"
                ));
            }
        }
    }
    match args.min > args.max && args.op != Op::Barrier {
        true => Err(format!(
            "--min {} is more than --max {}: sizes go up from the one to the other",
            args.min, args.max
        )),
        false => Ok(()),
    }
}

/// Starts all ranks, each as a process of its own.
fn all(runtime: &Runtime, args: &BenchArgs) -> Result {
    // A wrong name is better told here than by one rank, for which the others wait.
    let fabric = Fabric::open(runtime)?;
    args.hosts.iter().try_for_each(|host| fabric.host(host).map(drop))?;
    let id_file = runtime.path().join(format!("coll-bench-{}.id", std::process::id()));
    let program = std::env::current_exe().map_err(|e| Failure::io("find this program", e))?;
    let mut given: Vec<String> = std::env::args().skip(1).collect();
    if let Some(at) = given.iter().position(|a| a == "--hosts") {
        given.drain(at..at + 2);
    }
    given.retain(|a| !a.starts_with("--hosts="));
    given.extend(child::parent_words());
    let mut ranks = Ranks(Vec::new());
    for (rank, host) in args.hosts.iter().enumerate() {
        let mut command = Command::new(&program);
        command
            .args(&given)
            .arg("--rank")
            .arg(rank.to_string())
            .arg("--ranks")
            .arg(args.hosts.len().to_string());
        command.arg("--host").arg(host).arg("--id-file").arg(&id_file);
        if rank > 0 {
            command.stdout(Stdio::null());
        }
        ranks.0.push(Some(command.spawn().map_err(|e| Failure::io("start a rank", e))?));
    }
    let failed = ranks.wait()?;
    // Rank 0 has made it, unless it failed before.
    let _ = std::fs::remove_file(&id_file);
    failed.map_or(Ok(()), |rank| {
        Err(Failure::Text(format!("rank {rank} has failed; what it said is above")))
    })
}

/// The ranks that run still; none of them is left behind.
struct Ranks(Vec<Option<Child>>);

impl Ranks {
    /// Waits for all; gives the first one that has failed. One that fails before the ranks have met
    /// ends the others, which would wait for it in vain. Afterwards they find out by themselves,
    /// and say what they saw.
    fn wait(&mut self) -> Result<Option<usize>> {
        let mut failed = None;
        while self.0.iter().any(Option::is_some) {
            for (rank, slot) in self.0.iter_mut().enumerate() {
                let Some(child) = slot else { continue };
                let Some(status) =
                    child.try_wait().map_err(|e| Failure::io("wait for a rank", e))?
                else {
                    continue;
                };
                *slot = None;
                if !status.success() {
                    failed = failed.or(Some(rank));
                }
                if status.code() == Some(NOT_MET.into()) {
                    return Ok(Some(rank));
                }
            }
            std::thread::sleep(LOOK);
        }
        Ok(failed)
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for child in self.0.iter_mut().flatten() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn failed(error: unbroken_coll::Error) -> Failure {
    Failure::Text(error.to_string())
}

/// Where others reach this process, if `--address` does not say.
fn address_from_env(text: Option<String>) -> std::result::Result<IpAddr, Failure> {
    let Some(text) = text else {
        return Ok(Ipv4Addr::LOCALHOST.into());
    };
    text.parse().map_err(|_| {
        Failure::Text(format!(
            "UNBROKEN_COLL_ADDRESS is '{text}': an IP address of this machine is right, 10.0.0.1 \
             say"
        ))
    })
}

/// A failure before the ranks have met, with the exit status that says so to the process which
/// started this one.
fn not_met(args: &BenchArgs, failure: Failure) -> Failure {
    match failure {
        Failure::Text(text) if args.parent.is_some() => Failure::Program { status: NOT_MET, text },
        other => other,
    }
}

/// Meets the other ranks.
fn meet(runtime: &Runtime, args: &BenchArgs, rank: usize) -> Result<Communicator> {
    let (Some(ranks), Some(path)) = (args.ranks, &args.id_file) else {
        return Err(Failure::Text("--rank needs --ranks and --id-file".into()));
    };
    let host = match &args.host {
        Some(name) => unbroken::Host::emulated(runtime.path(), name),
        None => unbroken::Host::from_env(),
    };
    let host = host.map_err(|e| Failure::Text(e.to_string()))?;
    let address = match args.address {
        Some(address) => address,
        None => address_from_env(std::env::var("UNBROKEN_COLL_ADDRESS").ok())?,
    };
    let patience = args.patience;
    unbroken_coll::raise_descriptor_limit(MOST_DESCRIPTORS);
    let id = if rank == 0 {
        let id = Bootstrap::listen(SocketAddr::new(address, 0), patience).map_err(failed)?.id();
        id_file::publish(&id, path)?;
        id
    } else {
        id_file::wait_for(path, patience)?
    };
    let options = Options {
        logical: args.logical,
        balance: !args.no_balance,
        measure: !args.no_measure,
        nic_mbps: args.nic_mbps,
        numa: Numa::from_env().map_err(failed)?,
        shape: args.shape,
        folding: if args.any_order { Folding::Any } else { Folding::InOrder },
        timeout: args.timeout,
        status_folder: Some(status_folder(runtime)),
        patience,
        ..Options::default()
    };
    let comm = Communicator::join_at(&id, rank, ranks, &host, address, options).map_err(failed)?;
    if rank == 0 {
        // The others have it.
        let _ = std::fs::remove_file(path);
    }
    Ok(comm)
}

fn one(runtime: &Runtime, args: &BenchArgs, rank: usize) -> Result {
    let comm = meet(runtime, args, rank).map_err(|failure| not_met(args, failure))?;
    if rank == 0 {
        tell_size(args, comm.ranks());
        if !args.json {
            print(
                "       bytes   iterations     time (us)  longest (us)  algbw (Gbit/s)  busbw \
                 (Gbit/s)  wrong\n",
            )?;
        }
    }
    let mut bytes = args.min;
    let mut wrong = 0;
    loop {
        let line = measure(&comm, args, bytes)?;
        wrong += line.wrong;
        show(args, &line)?;
        if bytes >= args.max || args.op == Op::Barrier {
            break;
        }
        bytes = bytes.saturating_mul(args.factor).min(args.max);
    }
    comm.barrier().map_err(failed)?;
    match wrong {
        0 => Ok(()),
        wrong => Err(Failure::Text(format!("{wrong} bytes were wrong at rank {rank}"))),
    }
}

/// What is measured is said where it is not what was asked for.
fn tell_size(args: &BenchArgs, ranks: usize) {
    let smallest = Numbers::smallest(args.op, args.data.data(), ranks);
    if args.min < smallest {
        eprintln!(
            "unbroken: --min {}: one element in each block are {smallest} bytes, which is measured",
            args.min
        );
    }
}

fn show(args: &BenchArgs, line: &Line) -> Result {
    if args.json {
        return print_json(line);
    }
    print(&format!(
        "{:12} {:12} {:13.1} {:13.1} {:15.3} {:15.3} {:6}\n",
        line.bytes,
        line.iterations,
        line.time_us,
        line.longest_us,
        line.algbw_gbps,
        line.busbw_gbps,
        line.wrong
    ))
}

/// Operations of one size.
fn measure(
    comm: &Communicator,
    args: &BenchArgs,
    bytes: u64,
) -> std::result::Result<Line, Failure> {
    let data = args.data.data();
    let numbers = Numbers {
        op: args.op,
        data,
        reduce: args.reduce.op(),
        rank: comm.rank(),
        ranks: comm.ranks(),
        root: args.root,
        count: Numbers::count_for(args.op, data, bytes, comm.ranks()),
    };
    let (input, want, operation) = (numbers.input(), numbers.output(), numbers.operation());
    let mut output = vec![0xa5; want.len()];
    let (mut wrong, mut shape) = (0, String::new());
    let mut run = |check: bool| {
        let buffers = Buffers::Apart { input: &input, output: &mut output };
        let began = Instant::now();
        comm.run(operation.clone(), data, buffers).map_err(failed)?;
        let took = began.elapsed();
        shape = comm.shape();
        if check {
            wrong += output.iter().zip(&want).filter(|(a, b)| a != b).count() as u64;
            output.fill(0xa5);
        }
        Ok::<Duration, Failure>(took)
    };
    for _ in 0..args.warmup {
        run(true)?;
    }
    comm.barrier().map_err(failed)?;
    let (mut spent, mut longest, mut iterations) = (Duration::ZERO, Duration::ZERO, 0u32);
    let mut times_us = Vec::new();
    let begun = Instant::now();
    loop {
        let last = args.lasts.is_none() && iterations + 1 >= args.iterations;
        // What the check takes is not counted.
        let took = run(last || args.check_all || args.lasts.is_some())?;
        (spent, longest, iterations) = (spent + took, longest.max(took), iterations + 1);
        // Also where nobody will print them: ranks that are started apart need not all say --each.
        if times_us.len() < MOST_TIMES {
            times_us.push(took.as_secs_f64() * 1e6);
        }
        let over = match args.lasts {
            Some(lasts) => {
                let gone = args.while_file.as_ref().is_some_and(|file| !file.exists());
                is_over(comm, gone || begun.elapsed() >= lasts)?
            }
            None => last,
        };
        if over {
            break;
        }
    }
    let (time_us, longest_us) = last_of_all(comm, spent, longest, iterations, &mut times_us)?;
    let algbw_gbps = numbers.bytes() as f64 * 8.0 / time_us / 1e3;
    let counters = comm.counters();
    Ok(Line {
        op: operation.name().into(),
        data: format!("{data:?}"),
        bytes: numbers.bytes(),
        iterations,
        time_us,
        longest_us,
        times_us: if args.each { times_us } else { Vec::new() },
        algbw_gbps,
        busbw_gbps: algbw_gbps * numbers.bus_factor(),
        wrong,
        failures: counters.failures,
        moves: counters.moves,
        again: counters.again,
        happened: comm.snapshot().happened.into_iter().map(|h| h.what).collect(),
        shape,
    })
}

/// The mean and the longest time of an operation, µs, each at the rank where it took longest, and
/// so `times_us`: a sender is done before what it has sent has arrived.
fn last_of_all(
    comm: &Communicator,
    spent: Duration,
    longest: Duration,
    iterations: u32,
    times_us: &mut [f64],
) -> std::result::Result<(f64, f64), Failure> {
    let mean_us = spent.as_secs_f64() * 1e6 / f64::from(iterations.max(1));
    let of_all = [&[mean_us, longest.as_secs_f64() * 1e6], &*times_us].concat();
    let mut bytes: Vec<u8> = of_all.iter().flat_map(|us| us.to_ne_bytes()).collect();
    comm.all_reduce(DataType::F64, ReduceOp::Max, &mut bytes).map_err(failed)?;
    let mut last =
        bytes.chunks_exact(8).map(|us| f64::from_ne_bytes(us.try_into().unwrap_or_default()));
    let (mean_us, longest_us) = (last.next().unwrap_or(mean_us), last.next().unwrap_or_default());
    times_us.iter_mut().zip(last).for_each(|(mine, last)| *mine = last);
    Ok((mean_us, longest_us))
}

/// Whether any rank finds that the time is over: all must stop together.
fn is_over(comm: &Communicator, mine: bool) -> std::result::Result<bool, Failure> {
    let mut flag = [u8::from(mine)];
    comm.all_reduce(DataType::U8, ReduceOp::Max, &mut flag).map_err(failed)?;
    Ok(flag[0] > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_and_bad_ones_named() {
        assert_eq!(address_from_env(None).ok(), Some(Ipv4Addr::LOCALHOST.into()));
        assert_eq!(address_from_env(Some("10.0.0.1".into())).ok(), Some([10, 0, 0, 1].into()));
        let Err(Failure::Text(said)) = address_from_env(Some("host7".into())) else {
            panic!("a name is no address");
        };
        assert!(said.contains("UNBROKEN_COLL_ADDRESS is 'host7'"), "{said}");
    }
}
