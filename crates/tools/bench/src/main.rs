//! `unbroken-bench`: measures softnic and shift beside their peers, in one run.
//!
//! A figure alone says little on a shared machine, so every bench runs interleaved with what it is
//! compared to (A B B A), many times for a short while. Some machines change between two speeds
//! within seconds (their cores share a cache now, and now they do not), so it is not the medians
//! that are compared, which may be of different speeds: the ratio is the median of the rounds'
//! ratios, and has an interval. Peers are bare UDP ([`udp_bw`], [`udp_lat`]), one TCP stream of
//! iperf3, the same program without failover, ISA-L ([`codes`]). `unbroken-bench run` (called by
//! `make bench`) runs all and writes `benches/results/latest.json`. The baselines are commands of
//! their own, so that a figure can be looked at alone.
//!
//! Failure cases: a program that is not installed or a run that fails is told and its entries are
//! missing; the exit status is then
//! 1. A bar that is missed is only shown, as is a run of a switch that breaks off.
#![forbid(unsafe_code)]

mod calls;
mod codes;
mod collectives;
mod figures;
mod many;
mod peers;
mod report;
mod result;
mod sdr;
mod suite;
mod switches;
mod udp_bw;
mod udp_lat;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, Subcommand};
use result::Result;

#[derive(Parser)]
#[command(name = "unbroken-bench", about = "Measures Unbroken beside its peers")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// All benches, interleaved; a table, and a file of results
    Run {
        /// The `unbroken` command (its library lies beside it)
        #[arg(long, default_value = "target/release/unbroken")]
        unbroken: PathBuf,
        /// Where the programs of tests/c are, compiled
        #[arg(long, default_value = "target/tests-c")]
        programs: PathBuf,
        /// Where the results go
        #[arg(long, default_value = "benches/results/latest.json")]
        out: PathBuf,
        /// Interleaved rounds; the median of the rounds' ratios counts
        #[arg(long, default_value_t = 9, value_parser = clap::value_parser!(u32).range(1..=100))]
        rounds: u32,
        /// Runs in which a NIC dies
        #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(0..=1000))]
        switches: u32,
        /// A Python that has torch, for collectives beside gloo
        #[arg(long)]
        python: Option<PathBuf>,
    },
    /// Collectives alone: beside gloo, and where NICs limit them and one is lost
    Collectives {
        /// The `unbroken` command
        #[arg(long, default_value = "target/release/unbroken")]
        unbroken: PathBuf,
        /// A Python that has torch, for gloo
        #[arg(long)]
        python: Option<PathBuf>,
        /// Interleaved rounds, three at most
        #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=3))]
        rounds: u32,
    },
    /// Switches of one QP whose NIC dies, alone
    Switch {
        /// The `unbroken` command
        #[arg(long, default_value = "target/release/unbroken")]
        unbroken: PathBuf,
        /// Runs in which a NIC dies
        #[arg(long, default_value_t = 20)]
        runs: u32,
    },
    /// What failover costs while nothing fails, alone: calls and bandwidth with and without it, on
    /// both kinds of devices
    Failover {
        /// The `unbroken` command
        #[arg(long, default_value = "target/release/unbroken")]
        unbroken: PathBuf,
        /// Where the programs of tests/c are, compiled
        #[arg(long, default_value = "target/tests-c")]
        programs: PathBuf,
        /// Interleaved rounds; the median of the rounds' ratios counts
        #[arg(long, default_value_t = 9, value_parser = clap::value_parser!(u32).range(1..=100))]
        rounds: u32,
    },
    /// The figures of the papers, as far as this machine can play them
    Figures {
        /// Where they go
        #[arg(long, default_value = "docs/figures")]
        out: PathBuf,
        /// Only these, by their names (sdr-3, shift-7, edge-latency …) or those of their papers
        /// (sdr, shift, edge, coll, apm), with commas
        #[arg(long, value_delimiter = ',')]
        only: Vec<String>,
        /// Measures nothing: draws what was measured before again, from the JSON files beside the
        /// pictures
        #[arg(long, conflicts_with = "only")]
        redraw: bool,
        /// The `unbroken` command
        #[arg(long, default_value = "target/release/unbroken")]
        unbroken: PathBuf,
        /// Where the programs of tests/c are, compiled
        #[arg(long, default_value = "target/tests-c")]
        programs: PathBuf,
        /// A Python that has torch, for SHIFT's Figure 10 and THORN-ML's 9 and 10
        #[arg(long)]
        python: Option<PathBuf>,
    },
    /// Erasure codes on one core, alone
    Codes {
        /// Interleaved rounds; the median of the rounds' ratios counts
        #[arg(long, default_value_t = 9, value_parser = clap::value_parser!(u32).range(1..=100))]
        rounds: u32,
    },
    /// SDR alone: bitmaps with a stub device, reliable writes beside RC
    Sdr {
        /// Rounds; the median counts
        #[arg(long, default_value_t = 9, value_parser = clap::value_parser!(u32).range(1..=100))]
        rounds: u32,
    },
    /// Bandwidth of bare GSO/GRO UDP between two processes
    UdpBw {
        /// How long
        #[arg(long, default_value_t = 2.0)]
        seconds: f64,
        /// How much is in flight, in runs of 60 KiB [default: what is best of 2, 4, 8, 16, 32 and
        /// 64]
        #[arg(long)]
        window: Option<u32>,
        /// Which sides copy the payload from or to a buffer of 1 MiB
        #[arg(long, default_value = "none")]
        touch: udp_bw::Touch,
    },
    /// Half round trip of bare UDP with the datagrams of an RDMA ping-pong
    UdpLat {
        /// Messages
        #[arg(long, default_value_t = 50_000)]
        count: u32,
        /// How the sides wait
        #[arg(long, default_value = "busy")]
        wait: udp_lat::Wait,
        /// No datagrams besides the messages
        #[arg(long)]
        plain: bool,
    },
    /// The receiving process of udp-bw
    #[command(hide = true)]
    UdpBwReceiver {
        #[arg(long)]
        touch: udp_bw::Touch,
    },
    /// The answering process of udp-lat
    #[command(hide = true)]
    UdpLatEcho {
        #[arg(long)]
        wait: udp_lat::Wait,
        #[arg(long)]
        plain: bool,
    },
}

fn main() -> ExitCode {
    match act(Cli::parse().command) {
        Ok(code) => code,
        Err(e) => {
            eprintln!("unbroken-bench: {e}");
            ExitCode::FAILURE
        }
    }
}

fn act(command: Command) -> Result<ExitCode> {
    match command {
        Command::Run { unbroken, programs, out, rounds, switches, python } => {
            return suite::run(&unbroken, &programs, &out, (rounds, switches), python.as_deref())
        }
        Command::Collectives { unbroken, python, rounds } => {
            println!(
                "\n{}",
                report::table(&collectives::run(
                    &suite::found(&unbroken)?,
                    python.as_deref(),
                    rounds
                )?)
            )
        }
        Command::Switch { unbroken, runs } => return suite::only_switches(&unbroken, runs),
        Command::Failover { unbroken, programs, rounds } => {
            return suite::only_failover(&unbroken, &programs, rounds)
        }
        Command::Figures { out, redraw: true, .. } => figures::redraw(&out)?,
        Command::Figures { out, only, unbroken, programs, python, redraw: false } => {
            let training =
                python.map(|python| (python, PathBuf::from("tests/torch/checkpointed.py")));
            figures::draw(&out, &only, &figures::Tools { unbroken, programs, training })?;
        }
        Command::Codes { rounds } => println!("\n{}", report::table(&codes::run(rounds)?)),
        Command::Sdr { rounds } => println!("\n{}", report::table(&sdr::run(rounds)?)),
        Command::UdpBw { seconds, window, touch } => {
            let window = window.map_or_else(|| udp_bw::best_window(touch), Ok)?;
            let figure =
                udp_bw::measure(Duration::try_from_secs_f64(seconds)?, Some(window), touch)?;
            println!(
                "{:.2} Gbit/s with {window} runs in flight, {} runs lost",
                figure.gbps, figure.lost
            );
        }
        Command::UdpLat { count, wait, plain } => {
            let figure = udp_lat::measure(count, wait, plain)?;
            println!(
                "{:.2} us typical, {:.2} us 99th percentile (half round trip)",
                figure.typical_us, figure.p99_us
            );
        }
        Command::UdpBwReceiver { touch } => udp_bw::receive(touch)?,
        Command::UdpLatEcho { wait, plain } => udp_lat::echo(wait, plain)?,
    }
    Ok(ExitCode::SUCCESS)
}
