//! The command line.

pub(crate) mod time;

use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, Subcommand};
use time::parse_time;
use unbroken_fabric::{DeviceKind, FAULT_FORMS};
use unbroken_types::{LinkLayer, Mtu};

/// Keeps RDMA programs running when a NIC, a port, a cable or a switch fails.
#[derive(Parser)]
#[command(
    name = "unbroken",
    version,
    after_help = "Two hosts of the emulated network, a failure, and what happened:
  unbroken run --host b -- ib_write_bw -d unb0 -D 10 &
  unbroken run --host a -- ib_write_bw -d unb0 -D 10 127.0.0.1 &
  unbroken fault set 'nic a/0 dead' --at 3s
  unbroken events"
)]
pub(crate) struct Args {
    /// The runtime folder (fabric, directory, logs) [default: $UNBROKEN_RUNTIME, else
    /// $XDG_RUNTIME_DIR/unbroken, else /dev/shm/unbroken-<uid>]
    #[arg(long, global = true, value_name = "FOLDER")]
    pub(crate) runtime: Option<PathBuf>,
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Subcommand)]
pub(crate) enum Command {
    /// Run a program on a host of the emulated network, or on NICs at given addresses
    #[command(after_help = "Examples:
  unbroken run -- ibv_devinfo
  unbroken run --host b -- ib_send_bw -d unb0
  unbroken run --nics 10.0.0.1,10.0.1.1 -- ib_send_bw -d unb0 10.0.0.2
  unbroken run --no-failover -- ib_send_bw -d unb0 127.0.0.1
  UNBROKEN_DIRECTORY_PASSWORD_FILE=~/.redis-password \\
  unbroken run --nics 10.0.0.1,10.0.1.1 --directory redis://me@10.9.0.1 -- ib_send_bw -d unb0

The NICs are the devices unb0, unb1, … of the program.")]
    Run(RunArgs),
    /// Make, show or remove the emulated network
    #[command(
        after_help = "Without any command there is a fabric of hosts a to d with four NICs each."
    )]
    Fabric {
        #[command(subcommand)]
        command: FabricCommand,
    },
    /// Set, clear or list faults of the emulated network
    #[command(after_help = faults())]
    Fault {
        #[command(subcommand)]
        command: FaultCommand,
    },
    /// Leave a NIC by choice, with nothing lost, and take it back
    #[command(after_help = "Examples:
  unbroken nic drain a/0
  unbroken nic undrain a/0

Queue pairs come back to the NIC that they were connected on, once it is steady: a second after it is back, longer if it failed often.
UNBROKEN_FAILBACK=0 in a program's environment leaves them where they are. UNBROKEN_MAP=0:1,2 sends those of NIC 0 to NIC 1, else to NIC 2,
and nowhere else; without it they are spread over all others.")]
    Nic {
        #[command(subcommand)]
        command: NicCommand,
    },
    /// Collective operations that go on when NICs fail
    Coll {
        #[command(subcommand)]
        command: crate::coll::CollCommand,
    },
    /// Show NICs with their counters, and logical QPs with their paths
    Status {
        /// One JSON object
        #[arg(long)]
        json: bool,
    },
    /// Show what happened: faults, switches, failures
    #[command(after_help = "Examples:
  unbroken events --follow
  unbroken events --json | jq 'select(.event == \"switch\") | .switch_us'")]
    Events {
        /// One JSON object a line
        #[arg(long)]
        json: bool,
        /// Go on with what happens from now on, until interrupted
        #[arg(long, short)]
        follow: bool,
    },
    /// One device over two uplinks: set a host up for it, or try it out
    Edge {
        #[command(subcommand)]
        command: crate::edge::EdgeCommand,
    },
    /// Which reliability scheme for a lossy long link, and what to expect of it
    Model(crate::model::ModelArgs),
    /// Reliable writes over lossy links, measured; and what a way loses
    Sdr(crate::sdr::SdrArgs),
    /// Show an RDMA program outliving the death of its NIC, with figures, and the same without
    /// failover
    #[command(
        after_help = "Needs perftest (ib_write_bw) and a C compiler; it has a fabric of its own."
    )]
    Demo(crate::demo::DemoArgs),
}

#[derive(clap::Args)]
pub(crate) struct RunArgs {
    /// The host whose NICs the program gets [default: $UNBROKEN_HOST, else a]
    #[arg(long, value_name = "NAME")]
    pub(crate) host: Option<String>,
    /// Addresses of network interfaces, with commas: they are the NICs, without an emulated network
    #[arg(long, value_name = "ADDRESSES", conflicts_with = "host")]
    pub(crate) nics: Option<String>,
    /// What the NICs at these addresses can do: full, or plain, as an RNIC can (in the emulated
    /// network, fabric up says it) [default: full]
    #[arg(long, value_name = "NAME", requires = "nics", value_parser = unbroken_fabric::device_kind)]
    pub(crate) device: Option<DeviceKind>,
    /// Where processes find each other: a Redis server
    /// (redis://[USER@]HOST[:PORT][/DB][?prefix=NAME&lease=SECONDS], rediss://… over TLS) for those
    /// of several machines, or lmdb, in the runtime folder [default: $UNBROKEN_DIRECTORY, else
    /// lmdb]
    #[arg(long, value_name = "URL")]
    pub(crate) directory: Option<String>,
    /// Let failures reach the program
    #[arg(long)]
    pub(crate) no_failover: bool,
    /// The library [default: libunbroken.so beside this program, or in ../lib, ../lib64 or
    /// the multiarch folder of ../lib]
    #[arg(long, value_name = "PATH")]
    pub(crate) lib: Option<PathBuf>,
    /// The program and its arguments
    #[arg(
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "PROGRAM ARGS"
    )]
    pub(crate) program: Vec<std::ffi::OsString>,
}

#[derive(Subcommand)]
pub(crate) enum NicCommand {
    /// Have all queue pairs leave a NIC, and wait until they have
    Drain {
        /// The NIC, as `unbroken status` names it
        nic: String,
        /// How long to wait
        #[arg(long, default_value = "30s", value_name = "TIME", value_parser = parse_time)]
        wait: Duration,
    },
    /// Use a drained NIC again
    Undrain {
        /// The NIC
        nic: String,
    },
}

#[derive(Subcommand)]
pub(crate) enum FabricCommand {
    /// Make a fabric
    #[command(after_help = "Examples:
  unbroken fabric up --hosts left,right --nics 2
  unbroken fabric up --link-layer infiniband --mtu 2048
  unbroken fabric up --ports 2
  unbroken fabric up --device plain

The settings are kept in fabric.toml in the runtime folder, where single NICs may be given others.")]
    Up {
        /// The names of the hosts, with commas
        #[arg(long, value_delimiter = ',', default_value = "a,b,c,d", value_name = "NAMES")]
        hosts: Vec<String>,
        /// NICs of each host
        #[arg(long, default_value_t = 4, value_name = "COUNT")]
        nics: u8,
        /// What the ports say they are attached to: ethernet or infiniband (with LIDs; the wire is
        /// RoCEv2 all the same)
        #[arg(long, default_value = "ethernet", value_name = "NAME", value_parser = unbroken_fabric::link_layer)]
        link_layer: LinkLayer,
        /// The MTU of the ports: 256, 512, 1024, 2048 or 4096
        #[arg(long, default_value = "4096", value_name = "BYTES", value_parser = parse_mtu)]
        mtu: Mtu,
        /// Ports of each NIC: 1 or 2
        #[arg(long, default_value = "1", value_name = "COUNT", value_parser = parse_ports)]
        ports: u8,
        /// What NICs can do: full (all that softnic can) or plain (what an RNIC can: no QP holds
        /// its work, nothing is shared between NICs)
        #[arg(long, default_value = "full", value_name = "NAME", value_parser = unbroken_fabric::device_kind)]
        device: DeviceKind,
    },
    /// Show hosts, NICs, addresses and states
    Show {
        /// One JSON object
        #[arg(long)]
        json: bool,
    },
    /// Remove the fabric, its faults and counters
    Down {
        /// Also while programs use it
        #[arg(long)]
        force: bool,
    },
}

/// All faults with what they do.
fn faults() -> String {
    let form = |f: &unbroken_fabric::FaultForm| format!("  {:<29} {}\n", f.example, f.does);
    let forms: String = FAULT_FORMS.iter().map(form).collect();
    format!("Faults:\n{forms}{FAULTS}")
}

const FAULTS: &str = "
Those of packets are of a NIC ('a/0'), of its cable ('cable a/0') or of a switch ('rail0'), and of both directions or of
one, seen from the NIC ('loss a/0 tx 1%', 'loss a/0 rx 1%'). A switch strikes a packet once, as it enters ('rx': as it
leaves); its rate is that of each port. Several faults add up; the same one set again is replaced.
Times have us, ms, s or m; rates kbit, Mbit or Gbit.";

#[derive(Subcommand)]
pub(crate) enum FaultCommand {
    /// Set a fault
    #[command(after_help = format!("{}

Examples:
  unbroken fault set 'nic a/0 dead' --at 3s
  unbroken fault set 'cable a/0 cut' --for 500ms
  unbroken fault set 'nic a/0 down' --for 200ms --every 5s
  unbroken fault set delay rail0 25ms", faults()))]
    Set {
        /// The fault, as one word or several
        #[arg(required = true)]
        fault: Vec<String>,
        /// So long from now, like 3s, 500ms or 2m; nothing has to wait for it
        #[arg(long, value_name = "TIME", value_parser = parse_time)]
        at: Option<Duration>,
        /// For so long, each time [default: until it is cleared]
        #[arg(long = "for", value_name = "TIME", value_parser = parse_time)]
        lasts: Option<Duration>,
        /// Again and again, so long from beginning to beginning
        #[arg(long, value_name = "TIME", value_parser = parse_time)]
        every: Option<Duration>,
    },
    /// Set random faults, the same ones for the same seed, and show when they will strike
    #[command(
        after_help = "Of the faults that take a path away, one is over before the next one begins.

Examples:
  unbroken fault random --seed 7 --for 60s
  unbroken fault random --seed 7 --for 60s --hosts a,b --dry-run"
    )]
    Random {
        /// Which of the schedules
        #[arg(long, value_name = "NUMBER")]
        seed: u64,
        /// All are over by then
        #[arg(long = "for", value_name = "TIME", value_parser = parse_time)]
        lasts: Duration,
        /// The hosts whose NICs suffer, with commas [default: all]
        #[arg(long, value_delimiter = ',', value_name = "NAMES")]
        hosts: Vec<String>,
        /// Show the schedule and set nothing
        #[arg(long)]
        dry_run: bool,
    },
    /// Clear faults: those named, or all
    #[command(after_help = "Examples:
  unbroken fault clear                    all
  unbroken fault clear 'nic a/0'          dead and down
  unbroken fault clear 'nic a/0 down'     this one
  unbroken fault clear 'loss a/0'         whatever its share and direction
  unbroken fault clear 'delay cable a/0'")]
    Clear {
        /// A fault, or its first words
        fault: Vec<String>,
    },
    /// List faults, also those that are still to come
    List {
        /// One JSON object a line
        #[arg(long)]
        json: bool,
    },
}

/// An MTU in bytes.
fn parse_mtu(text: &str) -> Result<Mtu, String> {
    unbroken_fabric::mtu(text.parse().map_err(|_| format!("'{text}' is not a number of bytes"))?)
}

/// A number of ports.
fn parse_ports(text: &str) -> Result<u8, String> {
    unbroken_fabric::ports(text.parse().map_err(|_| format!("'{text}' is not a number of ports"))?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Args::command().debug_assert();
    }
}
