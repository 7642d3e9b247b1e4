//! `unbroken coll bench`: sizes, times, bandwidths, checked results.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde::Serialize;
use unbroken_coll::{Bootstrap, Buffers, Communicator, DataType, Folding, Options, ReduceOp};
use unbroken_fabric::Runtime;

use super::numbers::Numbers;
use super::{id_file, status_folder, BenchArgs, Op};
use crate::output::{print, print_json, Failure, Result};

/// Descriptors that are as many as a rank can use.
const MOST_DESCRIPTORS: u64 = 1 << 16;
/// The most operations whose times are kept.
const MOST_TIMES: usize = 100_000;

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
}

/// Measures, as one rank or as all.
pub(crate) fn bench(runtime: &Runtime, args: &BenchArgs) -> Result {
    match args.rank {
        Some(rank) => one(runtime, args, rank),
        None if args.hosts.len() < 2 => Err(Failure::Text(
            "name two hosts at least (--hosts a,b), or this rank (--rank, --ranks, --id-file)"
                .into(),
        )),
        None => all(runtime, args),
    }
}

/// Starts all ranks, each as a process of its own.
fn all(runtime: &Runtime, args: &BenchArgs) -> Result {
    let id_file = runtime.path().join(format!("coll-bench-{}.id", std::process::id()));
    let program = std::env::current_exe().map_err(|e| Failure::io("find this program", e))?;
    let mut given: Vec<String> = std::env::args().skip(1).collect();
    if let Some(at) = given.iter().position(|a| a == "--hosts") {
        given.drain(at..at + 2);
    }
    given.retain(|a| !a.starts_with("--hosts="));
    let mut ranks: Vec<Child> = Vec::new();
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
        ranks.push(command.spawn().map_err(|e| Failure::io("start a rank", e))?);
    }
    let mut failed = None;
    for (rank, child) in ranks.iter_mut().enumerate() {
        let status = child.wait().map_err(|e| Failure::io("wait for a rank", e))?;
        if !status.success() {
            failed = failed.or(Some(rank));
        }
    }
    // Rank 0 has made it, unless it failed before.
    let _ = std::fs::remove_file(&id_file);
    failed.map_or(Ok(()), |rank| {
        Err(Failure::Text(format!("rank {rank} has failed; what it said is above")))
    })
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
            "UNBROKEN_COLL_ADDRESS is '{text}': an IP address of this machine is right, 10.0.0.1 say"
        ))
    })
}

fn seconds(option: &str, seconds: f64) -> std::result::Result<Duration, Failure> {
    Duration::try_from_secs_f64(seconds)
        .map_err(|e| Failure::Text(format!("{option} {seconds}: {e}; seconds are right")))
}

fn one(runtime: &Runtime, args: &BenchArgs, rank: usize) -> Result {
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
    let patience = seconds("--patience", args.patience)?;
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
        nic_mbps: args.nic_mbps,
        folding: if args.any_order { Folding::Any } else { Folding::InOrder },
        timeout: seconds("--timeout", args.timeout)?,
        status_folder: Some(status_folder(runtime)),
        patience,
        ..Options::default()
    };
    let comm = Communicator::join_at(&id, rank, ranks, &host, address, options).map_err(failed)?;
    if rank == 0 {
        // The others have it.
        let _ = std::fs::remove_file(path);
        if !args.json {
            print("       bytes   iterations     time (us)  longest (us)  algbw (Gbit/s)  busbw (Gbit/s)  wrong\n")?;
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
    let mut wrong = 0;
    let mut run = |check: bool| {
        let buffers = Buffers::Apart { input: &input, output: &mut output };
        let began = Instant::now();
        comm.run(operation.clone(), data, buffers).map_err(failed)?;
        let took = began.elapsed();
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
        let last = args.seconds.is_none() && iterations + 1 >= args.iterations;
        // What the check takes is not counted.
        let took = run(last || args.check_all || args.seconds.is_some())?;
        (spent, longest, iterations) = (spent + took, longest.max(took), iterations + 1);
        // Also where nobody will print them: ranks that are started apart need not all say --each.
        if times_us.len() < MOST_TIMES {
            times_us.push(took.as_secs_f64() * 1e6);
        }
        let over = match args.seconds {
            Some(seconds) => {
                let gone = args.while_file.as_ref().is_some_and(|file| !file.exists());
                is_over(comm, gone || begun.elapsed().as_secs_f64() >= seconds)?
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
