//! `unbroken sdr bench`: a client that writes, and a server in a process of its own that reads.
//!
//! The two tell each other how to connect, one line each: through the server's standard input and
//! output, or, between machines, over a TCP connection. The client keeps so many writes in flight,
//! and a write's time counts from its call to its end: all bytes are in their place, and the client
//! knows it.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use clap::Args;
use serde::Serialize;
use unbroken_fabric::Runtime;
use unbroken_sdr::{Memory, Transfer};

use super::end::{failed, End, Nics};
use super::peer::{Agreed, Peer};
use super::{power_of_two, wanted, Wanted};
use crate::child;
use crate::output::{print, print_json, Failure, Result};
use unbroken_units::{read, show};

#[derive(Args, Clone)]
pub(crate) struct BenchArgs {
    /// sr-rto, sr-nack, mds:K,M, xor:K,M, or adaptive
    #[arg(long, default_value = "sr-nack", value_parser = wanted)]
    pub(super) scheme: Wanted,
    /// Bytes of a message
    #[arg(long, default_value = "1M", value_parser = read::size)]
    pub(super) size: u64,
    /// Bytes of a chunk, as a power of two
    #[arg(long, default_value = "64K", value_parser = power_of_two)]
    pub(super) chunk: u8,
    /// Bytes of a packet, from 64 to 4096
    #[arg(long, default_value = "4K", value_parser = power_of_two)]
    pub(super) mtu: u8,
    /// Channels, each with a worker
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=64))]
    pub(super) channels: u8,
    /// NICs that the channels are on, by turns, counted from 0 [default: 0, or all at --address]
    #[arg(long, value_delimiter = ',')]
    pub(super) nics: Vec<usize>,
    /// Messages in flight
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub(super) in_flight: u32,
    /// Messages in all
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) messages: u32,
    /// Send at this rate; without one as fast as the NIC takes it, and what the receiver cannot
    /// take is lost
    #[arg(long, value_parser = read::rate)]
    pub(super) rate: Option<u64>,
    /// A message must be written in this time
    #[arg(long, default_value = "20s", value_parser = crate::args::duration)]
    pub(super) deadline: Duration,
    /// For so long a packet may be on its way: so long an id of a message rests
    #[arg(long, default_value = "100ms", value_parser = crate::args::duration)]
    pub(super) lifetime: Duration,
    /// Check every byte
    #[arg(long)]
    pub(super) verify: bool,
    /// Between interfaces of machines: this end is written to. It waits at this address for the
    /// other end, which says how all is done
    #[arg(long, value_name = "ADDRESS:PORT", conflicts_with = "connect")]
    listen: Option<SocketAddr>,
    /// Between interfaces of machines: this end writes to the one that listens there
    #[arg(long, value_name = "ADDRESS:PORT")]
    connect: Option<SocketAddr>,
    /// Addresses of interfaces of this machine, which are its NICs, with --listen or --connect
    /// [default: the RDMA devices of `unbroken run --devices`, else the interface over which the
    /// ends reach each other]
    #[arg(long, value_name = "ADDRESS", value_delimiter = ',')]
    address: Vec<IpAddr>,
    /// How long --listen waits for the other end
    #[arg(long = "for", default_value = "10m", value_parser = crate::args::duration)]
    lasts: Duration,
    /// Started by another of these commands, whose pid this is: ends with it
    #[arg(long, hide = true)]
    parent: Option<u32>,
    /// The host that writes
    #[arg(long, default_value = "a")]
    from: String,
    /// The host that is written to
    #[arg(long, default_value = "b")]
    to: String,
    /// One JSON object
    #[arg(long)]
    json: bool,
}

/// What was measured. Names and units stay; more may come.
#[derive(Serialize)]
struct Report {
    scheme: String,
    message_bytes: u64,
    chunk_bytes: u64,
    mtu_bytes: u64,
    channels: u8,
    in_flight: u32,
    messages: u32,
    seconds: f64,
    gbit_per_s: f64,
    messages_per_s: f64,
    packets_per_s: f64,
    mean_us: f64,
    p99_us: f64,
    chunks_sent: u64,
    chunks_repeated: u64,
    chunks_recovered: u64,
    packets_late: u64,
    packets_duplicate: u64,
    under_runs: u64,
    rtt_us: Option<u64>,
    segments_coded: u64,
    injection_gbit_per_s: Option<f64>,
    verified: bool,
}

fn check(args: &BenchArgs) -> Result {
    if args.size == 0 {
        return Err(Failure::Text("--size 0: a message has at least one byte".into()));
    }
    let memory = args.size.saturating_mul(args.in_flight.into());
    if memory > 4 << 30 {
        return Err(Failure::Text(format!(
            "{} messages of {} bytes in flight need {memory} bytes at each end; at most 4G is \
             right",
            args.in_flight, args.size
        )));
    }
    Ok(())
}

/// The byte of a message at an offset.
fn pattern(message: u32, bytes: usize) -> Vec<u8> {
    let mut x = u64::from(message).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let words = (0..bytes.div_ceil(8)).flat_map(|_| {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        x.to_le_bytes()
    });
    words.take(bytes).collect()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Option<Vec<u8>> {
    let text = text.trim();
    if !text.len().is_multiple_of(2) || !text.is_ascii() {
        return None;
    }
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).ok()).collect()
}

/// The end that reads, a process that the other end has started.
pub(super) fn serve(runtime: &Runtime, args: &BenchArgs) -> Result {
    child::end_with(args.parent)?;
    let (mut peer, nics) = (Peer::parent(), Nics::Of(&args.to));
    // The client hears of a failure by itself.
    read_all(End::new(runtime, nics, args)?, &mut peer, args).or(Ok(()))
}

/// The end that reads, between machines.
fn listen(runtime: &Runtime, at: SocketAddr, args: &BenchArgs) -> Result {
    let (mut peer, here) = Peer::wait_at(at, args.lasts, args.deadline)?;
    let args = Agreed::adopt(&peer.hear()?, args)?;
    let end = between_machines(runtime, here, &args)?;
    read_all(end, &mut peer, &args)
}

/// This end of two on machines of their own. It has the interfaces that `--address` names, else the
/// RDMA devices that it was started with, else the interface over which the ends reach each other.
fn between_machines(runtime: &Runtime, here: IpAddr, args: &BenchArgs) -> Result<End> {
    let nics = match args.address.is_empty() {
        false => Nics::At(&args.address),
        true if unbroken_nics::names_devices() => Nics::Devices,
        true => Nics::At(std::slice::from_ref(&here)),
    };
    End::new(runtime, nics, args)
}

/// Its information to the peer, the peer's from there, and at the end what it counted.
fn read_all(end: End, peer: &mut Peer, args: &BenchArgs) -> Result {
    check(args)?;
    peer.say(&hex(&end.qp.info()))?;
    let theirs =
        unhex(&peer.hear()?).ok_or_else(|| Failure::Text("the client's line is none".into()))?;
    end.qp.connect(&theirs).map_err(failed)?;
    let into =
        end.context.register((args.size * u64::from(args.in_flight)) as usize).map_err(failed)?;
    let mut waiting: VecDeque<(u32, Transfer)> = VecDeque::new();
    let mut posted = 0;
    peer.say("ready")?;
    let mut failure = None;
    while failure.is_none() && (posted < args.messages || !waiting.is_empty()) {
        while posted < args.messages && waiting.len() < args.in_flight as usize {
            let at = u64::from(posted % args.in_flight) * args.size;
            waiting.push_back((posted, end.reliable.read(&into, at, args.size).map_err(failed)?));
            posted += 1;
        }
        let Some((message, read)) = waiting.pop_front() else { break };
        failure = read.wait(args.deadline + Duration::from_secs(5)).err();
        if failure.is_none() && args.verify {
            verify(&into, message, args)?;
        }
    }
    let (counts, network) = (end.reliable.counts(), end.qp.counters());
    let numbers =
        [counts.recovered, network.late, network.duplicates, network.under_runs, network.packets];
    let numbers: Vec<String> = numbers.iter().map(u64::to_string).collect();
    peer.say(&numbers.join(" "))?;
    // Until the client has heard the last answer, too.
    let _ = peer.hear();
    failure.map_or(Ok(()), |e| Err(failed(e)))
}

fn verify(into: &Memory, message: u32, args: &BenchArgs) -> Result {
    let at = u64::from(message % args.in_flight) * args.size;
    let got = into.read(at as usize, args.size as usize).map_err(failed)?;
    let right = pattern(message, args.size as usize);
    match got.iter().zip(&right).position(|(a, b)| a != b) {
        None => Ok(()),
        Some(byte) => Err(Failure::Text(format!("message {message} has a wrong byte at {byte}"))),
    }
}

/// Runs the bench.
pub(super) fn bench(runtime: &Runtime, args: &BenchArgs) -> Result {
    check(args)?;
    let (end, mut server) = match (args.listen, args.connect) {
        (Some(at), _) => return listen(runtime, at, args),
        (None, Some(to)) => {
            let (mut server, here) = Peer::connect(to, args.deadline)?;
            server.say(&Agreed::line(args)?)?;
            (between_machines(runtime, here, args)?, server)
        }
        (None, None) if args.address.is_empty() => {
            (End::new(runtime, Nics::Of(&args.from), args)?, Peer::start(runtime)?)
        }
        (None, None) => {
            return Err(Failure::Text(
                "--address names NICs of this machine for one end of two: with --listen \
                 ADDRESS:PORT the end that is written to, with --connect ADDRESS:PORT the one \
                 that writes"
                    .into(),
            ))
        }
    };
    let theirs =
        unhex(&server.hear()?).ok_or_else(|| Failure::Text("the server's line is none".into()))?;
    end.qp.connect(&theirs).map_err(failed)?;
    server.say(&hex(&end.qp.info()))?;
    server.hear()?;
    let from =
        end.context.register((args.size * u64::from(args.in_flight)) as usize).map_err(failed)?;
    let began = Instant::now();
    let mut times = write_all(&end, &from, args, began)?;
    let seconds = began.elapsed().as_secs_f64();
    let theirs: Vec<u64> =
        server.hear()?.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    let [recovered, late, duplicates, under_runs, _packets] = theirs[..] else {
        return Err(Failure::Text("the server did not say what it has counted".into()));
    };
    server.say("done")?;
    times.sort_by(f64::total_cmp);
    let (counts, bits) = (end.reliable.counts(), 8.0 * args.size as f64 * f64::from(args.messages));
    let report = Report {
        scheme: args.scheme.word(),
        message_bytes: args.size,
        chunk_bytes: 1 << args.chunk,
        mtu_bytes: 1 << args.mtu,
        channels: args.channels,
        in_flight: args.in_flight,
        messages: args.messages,
        seconds,
        gbit_per_s: bits / seconds / 1e9,
        messages_per_s: f64::from(args.messages) / seconds,
        packets_per_s: end.qp.counters().sent as f64 / seconds,
        mean_us: times.iter().sum::<f64>() / times.len() as f64,
        p99_us: times[(times.len() * 99 / 100).min(times.len() - 1)],
        chunks_sent: counts.chunks,
        chunks_repeated: counts.repeated,
        chunks_recovered: recovered,
        packets_late: late,
        packets_duplicate: duplicates,
        under_runs,
        rtt_us: end.reliable.rtt().map(|rtt| rtt.as_micros() as u64),
        segments_coded: counts.coded,
        injection_gbit_per_s: end.reliable.injection_bps().map(|bps| bps / 1e9),
        verified: args.verify,
    };
    if args.json {
        return print_json(&report);
    }
    print(&shown(&report))
}

/// Writes all messages, and gives their times in µs. Shows how far it is on standard error, if
/// somebody sees it.
fn write_all(end: &End, from: &Memory, args: &BenchArgs, began: Instant) -> Result<Vec<f64>> {
    let shows = !args.json && std::io::IsTerminal::is_terminal(&std::io::stderr());
    let (mut times, mut written, mut shown) = (Vec::new(), 0, began);
    let mut waiting: VecDeque<(Instant, Transfer)> = VecDeque::new();
    while times.len() < args.messages as usize {
        while written < args.messages && waiting.len() < args.in_flight as usize {
            let at = u64::from(written % args.in_flight) * args.size;
            if args.verify {
                from.write(at as usize, &pattern(written, args.size as usize)).map_err(failed)?;
            }
            waiting.push_back((
                Instant::now(),
                end.reliable.write(from, at, args.size).map_err(failed)?,
            ));
            written += 1;
        }
        let Some((begun, write)) = waiting.pop_front() else { break };
        write.wait(args.deadline + Duration::from_secs(5)).map_err(failed)?;
        times.push(begun.elapsed().as_secs_f64() * 1e6);
        if shows && shown.elapsed() > Duration::from_millis(200) {
            shown = Instant::now();
            let gbps = 8e-9 * args.size as f64 * times.len() as f64 / began.elapsed().as_secs_f64();
            eprint!("\r{} of {} messages, {gbps:.2} Gbit/s ", times.len(), args.messages);
        }
    }
    if shows {
        eprint!("\r{:60}\r", "");
    }
    Ok(times)
}

fn shown(r: &Report) -> String {
    format!(
        "{} messages of {} in {}: {}, {:.0} packets/s\na message takes {} in the mean, {} for 99 \
         of 100; round trip {}\ninjected at {}; {} segments with a code\n{} chunks sent, {} of \
         them again, {} recovered from parity; {} packets came too late, {} twice; {} under-runs\n",
        r.messages,
        show::with_prefix(r.message_bytes as f64, 1024.0) + "iB",
        show::time_s(r.seconds),
        show::rate_bps(r.gbit_per_s * 1e9),
        r.packets_per_s,
        show::time_s(r.mean_us / 1e6),
        show::time_s(r.p99_us / 1e6),
        r.rtt_us.map_or("not measured".into(), |us| show::time_s(us as f64 / 1e6)),
        r.injection_gbit_per_s.map_or("a rate not measured".into(), |g| show::rate_bps(g * 1e9)),
        r.segments_coded,
        r.chunks_sent,
        r.chunks_repeated,
        r.chunks_recovered,
        r.packets_late,
        r.packets_duplicate,
        r.under_runs,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_their_hexadecimal_digits() {
        assert_eq!(unhex(&format!("{}\n", hex(&[0, 0xff, 0x1a]))), Some(vec![0, 0xff, 0x1a]));
        assert_eq!((unhex("0"), unhex("zz"), unhex("ää")), (None, None, None));
    }

    #[derive(clap::Parser)]
    struct Words {
        #[command(flatten)]
        args: BenchArgs,
    }

    fn args(words: &[&str]) -> BenchArgs {
        <Words as clap::Parser>::parse_from([&["bench"], words].concat()).args
    }

    /// What decides how the ends are made comes from the end that connects; its own NICs each has
    /// from its own words. What is no bench of this version, or asks for too much, is refused.
    #[test]
    fn the_end_that_listens_does_as_the_other_one_says() {
        let theirs = "--scheme mds:16,8 --size 3M --chunk 16K --mtu 1K --channels 2 --in-flight 5 \
                      --messages 7 --deadline 3s --lifetime 50ms --verify --nics 3";
        let theirs = args(&theirs.split_whitespace().collect::<Vec<_>>());
        let own = args(&["--listen", "127.0.0.1:1", "--address", "127.0.0.1"]);
        let line = Agreed::line(&theirs).unwrap();
        let agreed = Agreed::adopt(&line, &own).unwrap();
        assert_eq!(Agreed::line(&agreed).unwrap(), line);
        assert_eq!((agreed.nics, agreed.address), (own.nics.clone(), own.address.clone()));
        for (from, to) in [
            ("\"version\":1", "\"version\":2"),
            ("\"channels\":2", "\"channels\":65"),
            ("\"in_flight\":5", "\"in_flight\":100000"),
            ("\"chunk\":14", "\"chunk\":63"),
            ("mds:16,8", "raid"),
            ("{", ""),
        ] {
            let wrong = line.replacen(from, to, 1);
            assert_ne!(wrong, line);
            let Err(Failure::Text(said)) = Agreed::adopt(&wrong, &own) else { panic!("{wrong}") };
            assert!(said.contains("no `unbroken sdr bench` of this version"), "{said}");
        }
    }

    #[test]
    fn patterns_differ() {
        assert_eq!(pattern(3, 13).len(), 13);
        assert_ne!(pattern(3, 64), pattern(4, 64));
    }
}
