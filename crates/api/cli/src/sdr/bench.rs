//! `unbroken sdr bench`: a client that writes, and a server in a process of its own that reads.
//!
//! The two tell each other how to connect through the server's standard input and output, one line
//! each. The client keeps so many writes in flight, and a write's time counts from its call to its
//! end: all bytes are in their place, and the client knows it.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use clap::Args;
use serde::Serialize;
use unbroken_fabric::Runtime;
use unbroken_sdr::{Memory, Transfer};

use super::end::{failed, End};
use super::{power_of_two, rate, wanted, Wanted};
use crate::args::time::parse_time;
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
    /// NICs that the channels are on, by turns
    #[arg(long, default_value = "0", value_delimiter = ',')]
    pub(super) nics: Vec<usize>,
    /// Messages in flight
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub(super) in_flight: u32,
    /// Messages in all
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..))]
    messages: u32,
    /// Send at this rate; without one as fast as the NIC takes it, and what the receiver cannot
    /// take is lost
    #[arg(long, value_parser = rate)]
    pub(super) rate: Option<u64>,
    /// A message must be written in this time
    #[arg(long, default_value = "20s", value_parser = parse_time)]
    pub(super) deadline: Duration,
    /// For so long a packet may be on its way: so long an id of a message rests
    #[arg(long, default_value = "100ms", value_parser = parse_time)]
    pub(super) lifetime: Duration,
    /// Check every byte
    #[arg(long)]
    verify: bool,
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
    verified: bool,
}

fn check(args: &BenchArgs) -> Result {
    if args.size == 0 {
        return Err(Failure::Text("--size 0: a message has at least one byte".into()));
    }
    let memory = args.size.saturating_mul(args.in_flight.into());
    if memory > 4 << 30 {
        return Err(Failure::Text(format!(
            "{} messages of {} bytes in flight need {memory} bytes at each end; at most 4G is right",
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

fn line(from: &mut impl BufRead, who: &str) -> Result<String> {
    let mut text = String::new();
    match from.read_line(&mut text) {
        Ok(0) | Err(_) => Err(Failure::Text(format!("{who} has ended before the bench was over"))),
        Ok(_) => Ok(text),
    }
}

/// The end that reads: its information to standard output, the peer's from standard input, and at
/// the end what it counted.
pub(super) fn serve(runtime: &Runtime, args: &BenchArgs) -> Result {
    check(args)?;
    let end = End::new(runtime, &args.to, args)?;
    print(&format!("{}\n", hex(&end.qp.info())))?;
    let mut input = std::io::stdin().lock();
    let peer = unhex(&line(&mut input, "the client")?)
        .ok_or_else(|| Failure::Text("the client's line is none".into()))?;
    end.qp.connect(&peer).map_err(failed)?;
    let into =
        end.context.register((args.size * u64::from(args.in_flight)) as usize).map_err(failed)?;
    let mut waiting: VecDeque<(u32, Transfer)> = VecDeque::new();
    let mut posted = 0;
    print("ready\n")?;
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
    // The client hears of a failure by itself.
    let (counts, network) = (end.reliable.counts(), end.qp.counters());
    let numbers =
        [counts.recovered, network.late, network.duplicates, network.under_runs, network.packets];
    let numbers: Vec<String> = numbers.iter().map(u64::to_string).collect();
    print(&format!("{}\n", numbers.join(" ")))?;
    // Until the client has heard the last answer, too.
    let _ = line(&mut input, "the client");
    Ok(())
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

/// The server's process.
struct Server {
    child: Child,
    said: BufReader<std::process::ChildStdout>,
}

impl Server {
    fn start(runtime: &Runtime) -> Result<Server> {
        let program =
            std::env::current_exe().map_err(|e| Failure::io("cannot find this command", e))?;
        // The same words, but for the command.
        let mut words: Vec<_> = std::env::args_os().skip(1).collect();
        if let Some(word) = words.iter_mut().find(|word| *word == "bench") {
            *word = "bench-end".into();
        }
        let mut child = Command::new(program)
            .args(words)
            .env("UNBROKEN_RUNTIME", runtime.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|e| Failure::io("cannot start the server", e))?;
        let said = child
            .stdout
            .take()
            .map(BufReader::new)
            .ok_or_else(|| Failure::Text("no pipe".into()))?;
        Ok(Server { child, said })
    }

    fn hear(&mut self) -> Result<String> {
        line(&mut self.said, "the server")
    }

    fn say(&mut self, text: &str) -> Result {
        let pipe = self.child.stdin.as_mut().ok_or_else(|| Failure::Text("no pipe".into()))?;
        writeln!(pipe, "{text}").map_err(|e| Failure::io("cannot write to the server", e))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs the bench.
pub(super) fn bench(runtime: &Runtime, args: &BenchArgs) -> Result {
    check(args)?;
    let end = End::new(runtime, &args.from, args)?;
    let mut server = Server::start(runtime)?;
    let peer =
        unhex(&server.hear()?).ok_or_else(|| Failure::Text("the server's line is none".into()))?;
    end.qp.connect(&peer).map_err(failed)?;
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
        "{} messages of {} in {}: {}, {:.0} packets/s\n\
         a message takes {} in the mean, {} for 99 of 100; round trip {}\n\
         {} chunks sent, {} of them again, {} recovered from parity; {} packets came too late, {} twice; {} under-runs\n",
        r.messages,
        show::with_prefix(r.message_bytes as f64, 1024.0) + "iB",
        show::time_s(r.seconds),
        show::rate_bps(r.gbit_per_s * 1e9),
        r.packets_per_s,
        show::time_s(r.mean_us / 1e6),
        show::time_s(r.p99_us / 1e6),
        r.rtt_us.map_or("not measured".into(), |us| show::time_s(us as f64 / 1e6)),
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

    #[test]
    fn patterns_differ() {
        assert_eq!(pattern(3, 13).len(), 13);
        assert_ne!(pattern(3, 64), pattern(4, 64));
    }
}
