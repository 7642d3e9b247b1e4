//! `unbroken coll`: collective operations that outlive NICs.

mod bench;
mod id_file;
mod numbers;
mod status;

pub(crate) use bench::bench;
pub(crate) use status::status;

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, Subcommand, ValueEnum};
use unbroken_coll::{DataType, Form, ReduceOp};
use unbroken_fabric::Runtime;
use unbroken_units::read;

/// `unbroken coll …`
#[derive(Subcommand)]
pub(crate) enum CollCommand {
    /// Measure collective operations, and check their results
    #[command(after_help = "Examples:
  unbroken coll bench --hosts a,b                         # both ranks, one process each
  unbroken coll bench --hosts a,b,c --op all-gather --min 1M --max 64M
  unbroken coll bench --hosts a,b --max 16M --min 16M --for 10s & sleep 3; unbroken fault set 'nic \
a/0 dead'
  unbroken coll bench --rank 0 --ranks 2 --host a --id-file ~/id &     # each rank by itself
  unbroken coll bench --rank 1 --ranks 2 --host b --id-file ~/id
  UNBROKEN_NICS=10.0.0.1 unbroken coll bench --rank 0 --ranks 2 --address 10.0.0.1 --id-file \
/shared/id    # between real interfaces

Times are of one operation, until the last rank has it done; sizes are those of the larger buffer; \
bandwidths as nccl-tests has them:
size by time, and that times what a NIC carries for each byte of it.")]
    Bench(Box<BenchArgs>),
    /// Show communicators: what NICs carry, what was lost, where it was found to be
    Status {
        /// One JSON array
        #[arg(long)]
        json: bool,
    },
}

/// Where communicators of a runtime folder have their status sockets.
fn status_folder(runtime: &Runtime) -> PathBuf {
    runtime.path().join("coll")
}

/// The operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Op {
    AllReduce,
    ReduceScatter,
    AllGather,
    Broadcast,
    Reduce,
    AllToAll,
    SendRecv,
    Barrier,
}

/// The type of elements.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Type {
    F32,
    F64,
    F16,
    Bf16,
    I32,
    I64,
    U8,
}

impl Type {
    pub(crate) fn data(self) -> DataType {
        match self {
            Type::F32 => DataType::F32,
            Type::F64 => DataType::F64,
            Type::F16 => DataType::F16,
            Type::Bf16 => DataType::Bf16,
            Type::I32 => DataType::I32,
            Type::I64 => DataType::I64,
            Type::U8 => DataType::U8,
        }
    }
}

/// How elements are reduced.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum By {
    Sum,
    Min,
    Max,
    Avg,
}

impl By {
    pub(crate) fn op(self) -> ReduceOp {
        match self {
            By::Sum => ReduceOp::Sum,
            By::Min => ReduceOp::Min,
            By::Max => ReduceOp::Max,
            By::Avg => ReduceOp::Avg,
        }
    }
}

/// What is measured.
#[derive(Args, Clone, Debug)]
pub(crate) struct BenchArgs {
    /// Hosts of the emulated network, one rank on each (a host may be named again); all ranks are
    /// started, and rank 0 prints
    #[arg(long, value_name = "HOST,…", value_delimiter = ',',
        conflicts_with_all = ["rank", "ranks", "host", "id_file"])]
    pub(crate) hosts: Vec<String>,
    /// This rank
    #[arg(long, requires_all = ["ranks", "id_file"])]
    pub(crate) rank: Option<usize>,
    /// How many ranks there are
    #[arg(long)]
    pub(crate) ranks: Option<usize>,
    /// The host of the emulated network [default: as `unbroken run` has set it]
    #[arg(long)]
    pub(crate) host: Option<String>,
    /// The file that rank 0 writes the communicator's id to, and the others read it from; it holds
    /// the job's secret, and has mode 600
    #[arg(long, value_name = "FILE")]
    pub(crate) id_file: Option<PathBuf>,
    /// The address of this machine at which other ranks reach this one [default:
    /// UNBROKEN_COLL_ADDRESS, else 127.0.0.1]
    #[arg(long, value_name = "IP", conflicts_with = "hosts")]
    pub(crate) address: Option<IpAddr>,
    /// The operation
    #[arg(long, value_enum, default_value = "all-reduce")]
    pub(crate) op: Op,
    /// The type of elements
    #[arg(long = "type", value_enum, default_value = "f32")]
    pub(crate) data: Type,
    /// How they are reduced
    #[arg(long, value_enum, default_value = "sum")]
    pub(crate) reduce: By,
    /// The root
    #[arg(long, default_value_t = 0)]
    pub(crate) root: usize,
    /// The smallest size, in whole elements: at least one in each rank's block
    #[arg(long, value_name = "SIZE", default_value = "8", value_parser = bytes)]
    pub(crate) min: u64,
    /// The largest
    #[arg(long, value_name = "SIZE", default_value = "1M", value_parser = bytes)]
    pub(crate) max: u64,
    /// From one size to the next
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u64).range(2..))]
    pub(crate) factor: u64,
    /// Operations of each size
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) iterations: u32,
    /// Go on with each size for this long instead
    #[arg(long = "for", value_name = "TIME", value_parser = time)]
    pub(crate) lasts: Option<Duration>,
    /// Only for as long as this file exists, and no longer than --for says
    #[arg(long = "while", value_name = "FILE", requires = "lasts")]
    pub(crate) while_file: Option<PathBuf>,
    /// Operations that are not counted, of each size
    #[arg(long, default_value_t = 3)]
    pub(crate) warmup: u32,
    /// Check the result of every operation, not of the last alone
    #[arg(long)]
    pub(crate) check_all: bool,
    /// Queue pairs that fail over by themselves (SHIFT) beneath
    #[arg(long)]
    pub(crate) logical: bool,
    /// Reduce as suits the plan: results may differ by rounding when NICs are lost
    #[arg(long)]
    pub(crate) any_order: bool,
    /// The shape, where the NICs that are up allow it [default: the planner chooses]; all but
    /// one-shot, direct and stars need --any-order
    #[arg(
        long,
        value_name = "NAME",
        value_parser = PossibleValuesParser::new(Form::ALL.map(Form::name))
            .try_map(|name| name.parse::<Form>())
    )]
    pub(crate) shape: Option<Form>,
    /// Keep the plan when NICs are lost: what one carried goes over one other, and not over all
    /// (R²CCL's hot repair alone)
    #[arg(long)]
    pub(crate) no_balance: bool,
    /// Plan with --nic-mbps for good, and not with what NICs are seen to carry
    #[arg(long)]
    pub(crate) no_measure: bool,
    /// What each NIC carries, in Mbit/s, for the choice of a plan, until it was measured
    #[arg(long, value_name = "MBPS", default_value_t = 100_000,
        value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) nic_mbps: u32,
    /// How long an operation may stand still before it is an error
    #[arg(long, value_name = "TIME", default_value = "20s", value_parser = time)]
    pub(crate) timeout: Duration,
    /// How long ranks wait for each other at the beginning
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = time)]
    pub(crate) patience: Duration,
    /// Started by another of these commands, whose pid this is: ends with it
    #[arg(long, hide = true)]
    pub(crate) parent: Option<u32>,
    /// One JSON object a line
    #[arg(long)]
    pub(crate) json: bool,
    /// With --json: what each operation took, of the first 100,000
    #[arg(long, requires = "json")]
    pub(crate) each: bool,
}

/// A time that is more than none.
fn time(text: &str) -> Result<Duration, String> {
    match crate::args::duration(text)? {
        Duration::ZERO => Err(format!("'{text}' is no time at all: 1ms or more is right")),
        time => Ok(time),
    }
}

/// The largest buffer.
const MOST_BYTES: u64 = 1 << 30;

/// A size of a buffer.
fn bytes(text: &str) -> Result<u64, String> {
    match read::size(text)? {
        bytes if bytes <= MOST_BYTES => Ok(bytes),
        _ => Err(format!("'{text}' is more than is measured: 1G at most")),
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn sizes_are_those_of_all_commands() {
        assert_eq!(
            ["8", "64K", "1MiB", "1G", "1kB"].map(super::bytes),
            [Ok(8), Ok(65536), Ok(1 << 20), Ok(1 << 30), Ok(1000)]
        );
        for bad in ["", "x", "2G", "1KK", "-1", "0"] {
            assert!(super::bytes(bad).is_err(), "{bad}");
        }
    }
}
