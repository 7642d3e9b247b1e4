//! The command line.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, Subcommand};
use unbroken_fabric::{DeviceKind, FAULT_FORMS};
use unbroken_nics::{DeviceFaultForm, DEVICE_FAULT_FORMS};
use unbroken_types::{LinkLayer, Mtu};
use unbroken_units::read;

/// Keeps RDMA programs running when a NIC, a port, a cable or a switch fails.
#[derive(Parser)]
#[command(
    name = "unbroken",
    version,
    max_term_width = crate::help::COLUMNS,
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
    /// Run a program on this machine's RDMA devices, or on a host of the emulated network
    #[command(after_help = "Examples:
  unbroken run -- ibv_devinfo
  unbroken run --host b -- ib_send_bw -d unb0
  unbroken run --devices mlx5_0,mlx5_1 -- ib_send_bw -d mlx5_0 10.0.0.2
  unbroken run --devices mlx5_0,mlx5_1 --faults -- ib_send_bw -d mlx5_0 10.0.0.2
  unbroken run --nics 10.0.0.1,10.0.1.1 -- ib_send_bw -d unb0 10.0.0.2
  unbroken run --no-failover -- ib_send_bw -d unb0 127.0.0.1
  UNBROKEN_DIRECTORY_PASSWORD_FILE=~/.redis-password \\
  unbroken run --nics 10.0.0.1,10.0.1.1 --directory redis://me@10.9.0.1 -- ib_send_bw -d unb0

The NICs of a host, and those at addresses, are the devices unb0, unb1, … of the program; devices of
the machine keep their names. Without any of the options: the machine's devices where it has some,
else host a.")]
    Run(RunArgs),
    /// Make, show or remove the emulated network
    #[command(
        after_help = "Without any command there is a fabric of hosts a to d with four NICs each."
    )]
    Fabric {
        #[command(subcommand)]
        command: FabricCommand,
    },
    /// Set, clear or list faults of the emulated network, or of this machine's devices
    #[command(after_help = faults())]
    Fault {
        #[command(subcommand)]
        command: FaultCommand,
    },
    /// Leave a NIC by choice, with nothing lost, and take it back
    #[command(after_help = "Examples:
  unbroken nic drain a/0
  unbroken nic undrain a/0

Queue pairs come back to the NIC that they were connected on, once it is steady: a second after it \
is back, longer if it failed often.
UNBROKEN_FAILBACK=0 in a program's environment leaves them where they are. UNBROKEN_MAP=0:1,2 \
sends those of NIC 0 to NIC 1, else to NIC 2,
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
    /// One verdict: healthy, degraded but survived, or failed; also by exit status
    #[command(after_help = crate::health::AFTER)]
    Health(crate::health::HealthArgs),
    /// Metrics for Prometheus: on stdout, into a file, or over HTTP
    #[command(after_help = crate::metrics::AFTER)]
    Metrics(crate::metrics::MetricsArgs),
    /// Send switches to a collector of OpenTelemetry, as traces
    #[command(after_help = crate::traces::AFTER)]
    Traces(crate::traces::TracesArgs),
    /// Watch NICs, queue pairs and events live; keys set faults and drain NICs
    #[command(after_help = crate::top::AFTER)]
    Top(crate::top::TopArgs),
    /// Serve a page that shows the same: topology, throughput, events, queue pairs
    #[command(after_help = crate::web::AFTER)]
    Web(crate::web::WebArgs),
    /// Write one page about what happened to jobs: what failed, what it cost, what to do
    #[command(after_help = crate::report::AFTER)]
    Report(crate::report::ReportArgs),
    /// Show what happened: faults, switches, failures
    #[command(after_help = "Examples:
  unbroken events --follow
  unbroken events --clear
  unbroken events --json | jq 'select(.event == \"switch\") | .switch_us'")]
    Events {
        /// One JSON object a line
        #[arg(long)]
        json: bool,
        /// Go on with what happens from now on, until interrupted
        #[arg(long, short)]
        follow: bool,
        /// Empty the log and end
        #[arg(long, conflicts_with_all = ["json", "follow"])]
        clear: bool,
    },
    /// Look at this machine's RDMA devices and say what keeps programs from being protected
    #[command(after_help = "Examples:
  unbroken doctor
  unbroken doctor --devices mlx5_0,mlx5_1
  unbroken doctor --json | jq '.lines[] | select(.level == \"problem\")'

Exit status: 0 if all is well, 1 if something keeps programs from being protected, 2 for a wrong \
command line.
It changes nothing. The text can be pasted into an issue; it has addresses and device names, and \
no password.")]
    Doctor(crate::doctor::DoctorArgs),
    /// Take the whole runtime folder away, damaged or not: fabric, faults, directory, log, counters
    #[command(
        after_help = "Only what Unbroken has made is removed: a folder that has anything else \
stays as it is.
No link is followed."
    )]
    Reset {
        /// Also while programs use it
        #[arg(long)]
        force: bool,
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
    /// What a lost NIC costs collectives and a training job, on a cluster as given
    #[command(after_help = crate::simulate::PLAN_AFTER)]
    Plan(crate::simulate::PlanArgs),
    /// Training jobs and serving on clusters that lose NICs: at given times, at random, over a
    /// month
    Simulate(crate::simulate::SimulateArgs),
    /// Show an RDMA program outliving the death of its NIC, with figures, and the same without
    /// failover
    #[command(after_help = "Example:
  unbroken demo --out /tmp/demo

It has a fabric of its own and needs no hardware and no root. ib_write_bw (Debian
package perftest) is the program whose NIC dies; where it is not installed, the
program that checks every message takes its place.")]
    Demo(crate::demo::DemoArgs),
    /// Give containers the NICs of the emulated network, by the Container Device Interface
    Cdi {
        #[command(subcommand)]
        command: crate::cdi::CdiCommand,
    },
    /// Print what a shell needs to complete this command line
    #[command(after_help = "Examples:
  unbroken completions bash > ~/.local/share/bash-completion/completions/unbroken
  source <(unbroken completions zsh)
  unbroken completions fish > ~/.config/fish/completions/unbroken.fish

The packages and `make install` have put them into place already.")]
    Completions {
        /// The shell
        #[arg(value_name = "SHELL", value_parser = ["bash", "zsh", "fish"])]
        shell: String,
    },
}

#[derive(clap::Args)]
pub(crate) struct RunArgs {
    /// RDMA devices of this machine, with commas, as `ibv_devices` lists them, or all: they stand
    /// in for each other [default: $UNBROKEN_DEVICES]
    #[arg(long, value_name = "NAMES", conflicts_with_all = ["host", "nics"])]
    pub(crate) devices: Option<String>,
    /// The host of the emulated network whose NICs the program gets [default: $UNBROKEN_HOST]
    #[arg(long, value_name = "NAME")]
    pub(crate) host: Option<String>,
    /// Addresses of network interfaces, with commas: they are the NICs, without an emulated network
    /// [default: $UNBROKEN_NICS]
    #[arg(long, value_name = "ADDRESSES", conflicts_with = "host")]
    pub(crate) nics: Option<String>,
    /// What the NICs at these addresses can do: full, or plain, as an RNIC can (in the emulated
    /// network, fabric up says it) [default: full]
    #[arg(
        long,
        value_name = "NAME", conflicts_with = "host",
        value_parser = unbroken_fabric::device_kind
    )]
    pub(crate) device: Option<DeviceKind>,
    /// Where processes find each other: a Redis server for those of several machines
    /// (redis://[USER@]HOST[:PORT][/DB], then ?prefix=NAME or ?lease=SECONDS or both with &),
    /// what sentinels or a cluster know (redis+sentinel://HOST,…/MASTER,
    /// redis+cluster://HOST,…), each as rediss… over TLS; or lmdb, in the runtime folder
    /// [default: $UNBROKEN_DIRECTORY, else lmdb]
    #[arg(long, value_name = "URL")]
    pub(crate) directory: Option<String>,
    /// Let `unbroken fault set` set faults on these devices, as the program meets them
    #[arg(long, conflicts_with_all = ["host", "nics", "no_failover"])]
    pub(crate) faults: bool,
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
        /// The NIC, as `unbroken status` and faults name it: a port's name means all of its NIC
        nic: String,
        /// How long to wait
        #[arg(long, default_value = "30s", value_name = "TIME", value_parser = duration)]
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

The settings are kept in fabric.toml in the runtime folder, where single NICs may be given \
others.")]
    Up {
        /// The names of the hosts, with commas
        #[arg(long, value_delimiter = ',', default_value = "a,b,c,d", value_name = "NAMES")]
        hosts: Vec<String>,
        /// NICs of each host
        #[arg(long, default_value_t = 4, value_name = "COUNT")]
        nics: u8,
        /// What the ports say they are attached to: ethernet or infiniband (with LIDs; the wire is
        /// RoCEv2 all the same)
        #[arg(
            long,
            default_value = "ethernet", value_name = "NAME",
            value_parser = unbroken_fabric::link_layer
        )]
        link_layer: LinkLayer,
        /// The MTU of the ports: 256, 512, 1024, 2048 or 4096
        #[arg(long, default_value = "4096", value_name = "BYTES", value_parser = parse_mtu)]
        mtu: Mtu,
        /// Ports of each NIC: 1 or 2
        #[arg(long, default_value = "1", value_name = "COUNT", value_parser = parse_ports)]
        ports: u8,
        /// What NICs can do: full (all that softnic can) or plain (what an RNIC can: no QP holds
        /// its work, nothing is shared between NICs)
        #[arg(
            long,
            default_value = "full", value_name = "NAME",
            value_parser = unbroken_fabric::device_kind
        )]
        device: DeviceKind,
    },
    /// Join a network of several machines, over real interfaces
    #[command(after_help = "Examples:
  unbroken fabric join --address 10.0.0.1,10.0.1.1 --directory redis://lab
  unbroken fabric join --address 10.0.0.2,10.0.1.2 --directory redis://lab \
      --password-file ~/.redis-password

Each machine, or pod, of the network does this once; programs need no option then. NIC n of each \
machine must reach NIC n of the others, at UDP ports 4791 to 5046. `unbroken fabric down` leaves \
it.")]
    Join {
        /// Addresses of interfaces of this machine, with commas: its NICs
        #[arg(long, value_delimiter = ',', required = true, value_name = "ADDRESSES")]
        address: Vec<std::net::IpAddr>,
        /// The directory of the network: redis://, redis+sentinel:// or redis+cluster://
        #[arg(long, value_name = "URL")]
        directory: String,
        /// A file with the password of the directory; else that which the environment names in
        /// UNBROKEN_DIRECTORY_PASSWORD_FILE
        #[arg(long, value_name = "FILE")]
        password_file: Option<PathBuf>,
    },
    /// Show hosts, NICs, addresses and states
    Show {
        /// One JSON object
        #[arg(long)]
        json: bool,
    },
    /// Remove the fabric, its faults and counters, or leave the network that was joined
    /// (`unbroken reset` removes the whole folder)
    Down {
        /// Also while programs use it
        #[arg(long)]
        force: bool,
    },
}

/// Faults of devices of the machine with what they do.
fn device_faults() -> String {
    let form = |f: &DeviceFaultForm| format!("  {:<33} {}\n", f.example, f.does);
    DEVICE_FAULT_FORMS.iter().map(form).collect()
}

/// All faults with what they do.
fn faults() -> String {
    let form = |f: &unbroken_fabric::FaultForm| format!("  {:<29} {}\n", f.example, f.does);
    let forms: String = FAULT_FORMS.iter().map(form).collect();
    let of_devices = device_faults();
    format!("Faults:\n{forms}{FAULTS}\n\n{OF_DEVICES}\n{}", of_devices.trim_end())
}

const FAULTS: &str = "
Those of packets are of a NIC ('a/0'), of its cable ('cable a/0') or of a switch ('rail0'), and of \
both directions or of
one, seen from the NIC ('loss a/0 tx 1%', 'loss a/0 rx 1%'). A switch strikes a packet once, as it \
enters ('rx': as it
leaves); its rate is that of each port. Several faults add up; the same one set again is replaced.
Times have us, ms, s or m; rates K, M or G bits a second (10Gbit or 10G).";

const OF_DEVICES: &str =
    "Of this machine's RDMA devices, under programs that `unbroken run --devices … --faults` runs:";

#[derive(Subcommand)]
pub(crate) enum FaultCommand {
    /// Set a fault
    #[command(after_help = format!("{}

Examples:
  unbroken fault set 'nic a/0 dead' --at 3s
  unbroken fault set 'cable a/0 cut' --for 500ms
  unbroken fault set 'nic a/0 down' --for 200ms --every 5s
  unbroken fault set delay rail0 25ms
  unbroken fault set 'nic mlx5_0 dead' --for 10s", faults()))]
    Set {
        /// The fault, as one word or several
        #[arg(required = true)]
        fault: Vec<String>,
        /// So long from now, like 3s, 500ms or 2m; nothing has to wait for it
        #[arg(long, value_name = "TIME", value_parser = duration)]
        at: Option<Duration>,
        /// For so long, each time [default: until it is cleared]
        #[arg(long = "for", value_name = "TIME", value_parser = duration)]
        lasts: Option<Duration>,
        /// Again and again, so long from beginning to beginning
        #[arg(long, value_name = "TIME", value_parser = duration)]
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
        #[arg(long = "for", value_name = "TIME", value_parser = duration)]
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

/// A time with its unit, as all commands read it.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    read::time_ns(text).map(Duration::from_nanos)
}

/// An MTU in bytes.
fn parse_mtu(text: &str) -> Result<Mtu, String> {
    unbroken_fabric::mtu(read::size(text)?.try_into().unwrap_or(i64::MAX))
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
