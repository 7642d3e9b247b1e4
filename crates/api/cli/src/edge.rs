//! `unbroken edge`: sets the host edge up and takes it down, shows it, and builds a network to try
//! it in.

use std::fs::File;
use std::io::{ErrorKind, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;

use clap::Subcommand;
use unbroken_edge_daemon::drain;
use unbroken_edge_daemon::error::EdgeError;
use unbroken_edge_daemon::lab::Lab;
use unbroken_edge_daemon::state::{missing, State};

use crate::output::{self, print, Failure};

/// A configuration to begin with.
const TEMPLATE: &str = include_str!("../../../../docs/guide/edge/template.toml");

#[derive(Subcommand)]
pub(crate) enum EdgeCommand {
    /// Write a configuration to begin with; a file that is there is left as it is
    #[command(after_help = "Examples:
  unbroken edge init
  unbroken edge init --config -            to stdout")]
    Init {
        /// The file, or - for stdout
        #[arg(long, value_name = "FILE", default_value = "/etc/unbroken/edge.toml")]
        config: PathBuf,
    },
    /// Make the devices of edge.toml, start FRR and the daemon; what is right already stays, and a
    /// changed file is applied
    Up {
        /// The configuration
        #[arg(long, value_name = "FILE", default_value = "/etc/unbroken/edge.toml")]
        config: PathBuf,
        /// Show the commands and change nothing
        #[arg(long)]
        dry_run: bool,
        /// Do not start the daemon (systemd does)
        #[arg(long)]
        no_daemon: bool,
    },
    /// Show uplinks, BFD sessions, destinations and rules
    Status {
        /// The name in its configuration [default: the one that is up here]
        #[arg(long)]
        name: Option<String>,
        /// One JSON object
        #[arg(long)]
        json: bool,
    },
    /// Take an uplink out of service without losing a packet: traffic moves away at both ends, then
    /// it is shut
    Drain {
        /// The uplink's device
        device: String,
        /// Put it back into service
        #[arg(long)]
        undo: bool,
        /// The name in its configuration [default: the one that is up here]
        #[arg(long)]
        name: Option<String>,
    },
    /// Say what this machine lacks (kernel features, FRR, devices) and how to get it; changes
    /// nothing
    Check {
        /// Also check the devices of this configuration
        #[arg(long, value_name = "FILE")]
        config: Option<PathBuf>,
    },
    /// Run the daemon of an edge that is up, in the foreground
    #[command(hide = true)]
    Daemon {
        /// The name in its configuration
        #[arg(long)]
        name: Option<String>,
    },
    /// Take away exactly what `up` has made
    Down {
        /// The name in its configuration [default: the one that is up here]
        #[arg(long)]
        name: Option<String>,
    },
    /// Show RDMA traffic outliving an uplink that falls silent, and where the time went (root;
    /// needs perftest and FRR)
    Demo {
        /// Leave it to FRR alone
        #[arg(long)]
        no_fast_failover: bool,
        /// Milliseconds between two BFD packets
        #[arg(long, default_value_t = 10)]
        bfd_ms: u32,
        /// One JSON object
        #[arg(long)]
        json: bool,
    },
    /// Build a network of namespaces to try it in (root): hosts <prefix>h1…, ToR switches
    /// <prefix>t1 and <prefix>t2
    Lab {
        #[command(subcommand)]
        command: LabCommand,
    },
}

#[derive(Subcommand)]
pub(crate) enum LabCommand {
    /// Build it and set all of it up
    Up(LabArgs),
    /// Take it down
    Down(LabArgs),
}

#[derive(clap::Args)]
pub(crate) struct LabArgs {
    /// The beginning of the namespaces' names
    #[arg(long, default_value = "edge-")]
    prefix: String,
    /// How many hosts
    #[arg(long, default_value_t = 4)]
    hosts: u8,
    /// Milliseconds between two BFD packets
    #[arg(long, default_value_t = 10)]
    bfd_ms: u32,
    /// Where rules work: none, skip_hw, both or skip_sw
    #[arg(long, default_value = "none")]
    rules: String,
    /// With fast_failover
    #[arg(long)]
    fast_failover: bool,
    /// With a second tenant that has the same MAC addresses
    #[arg(long)]
    second_tenant: bool,
}

impl LabArgs {
    fn lab(self) -> Result<Lab, EdgeError> {
        let folder = Lab::folder_of(&self.prefix)?;
        let LabArgs { prefix, hosts, bfd_ms, rules, fast_failover, second_tenant } = self;
        Ok(Lab { prefix, hosts, bfd_ms, rules, fast_failover, second_tenant, folder })
    }
}

/// What changes the network is for root, and says so before it begins.
fn need_root(what: &str) -> output::Result {
    match rustix::process::geteuid().is_root() {
        true => Ok(()),
        false => {
            Err(format!("edge {what} changes the network of this machine: run it as root").into())
        }
    }
}

pub(crate) fn edge(command: EdgeCommand) -> output::Result {
    match &command {
        EdgeCommand::Up { dry_run: false, .. } => need_root("up")?,
        EdgeCommand::Drain { .. } => need_root("drain")?,
        EdgeCommand::Daemon { .. } => need_root("daemon")?,
        EdgeCommand::Down { .. } => need_root("down")?,
        EdgeCommand::Demo { .. } => need_root("demo")?,
        EdgeCommand::Lab { .. } => need_root("lab")?,
        EdgeCommand::Init { .. }
        | EdgeCommand::Up { dry_run: true, .. }
        | EdgeCommand::Status { .. }
        | EdgeCommand::Check { .. } => {}
    }
    match command {
        EdgeCommand::Init { config } => init(&config),
        EdgeCommand::Up { config, dry_run, no_daemon } => up(&config, dry_run, no_daemon),
        EdgeCommand::Status { name, json } => status(name.as_deref(), json),
        EdgeCommand::Drain { device, undo, name } => {
            let state = State::find(name.as_deref())?;
            let done =
                if undo { drain::undrain(&state, &device) } else { drain::drain(&state, &device) };
            Ok(done?)
        }
        EdgeCommand::Check { config } => check(config.as_deref()),
        EdgeCommand::Daemon { name } => {
            Ok(unbroken_edge_daemon::daemon::run_daemon(&State::find(name.as_deref())?)?)
        }
        EdgeCommand::Down { name } => down(name.as_deref()),
        EdgeCommand::Demo { no_fast_failover, bfd_ms, json } => {
            let root = unbroken_edge_daemon::state::make_root()?;
            let folder = tempfile::Builder::new()
                .prefix(".demo-")
                .permissions(std::fs::Permissions::from_mode(0o700))
                .tempdir_in(&root)
                .map_err(|e| Failure::io(root.display(), e))?;
            let lab = Lab {
                prefix: format!("demo{}", std::process::id()),
                hosts: 2,
                bfd_ms,
                rules: "none".into(),
                fast_failover: !no_fast_failover,
                second_tenant: false,
                folder: folder.path().join("lab"),
            };
            let program = std::env::current_exe().map_err(|e| Failure::io("this program", e))?;
            crate::edge_demo::demo(&lab, &program, json)
        }
        EdgeCommand::Lab { command } => {
            let program = std::env::current_exe().map_err(|e| Failure::io("this program", e))?;
            match command {
                LabCommand::Up(args) => Ok(args.lab()?.up(&program)?),
                LabCommand::Down(args) => Ok(args.lab()?.down(&program)?),
            }
        }
    }
}

/// Writes the template where nothing is yet; what is there, a link too, is not touched.
fn init(path: &std::path::Path) -> output::Result {
    if path == std::path::Path::new("-") {
        return print(TEMPLATE);
    }
    let shown = path.display();
    if let Some(folder) = path.parent().filter(|f| !f.as_os_str().is_empty()) {
        std::fs::create_dir_all(folder).map_err(|e| Failure::io(folder.display(), e))?;
    }
    let mut file = File::create_new(path).map_err(|e| match e.kind() {
        ErrorKind::AlreadyExists => format!(
            "{shown} is there already and stays as it is; --config names another, or - for stdout"
        )
        .into(),
        _ => Failure::io(&shown, e),
    })?;
    file.write_all(TEMPLATE.as_bytes()).map_err(|e| Failure::io(&shown, e))?;
    print(&format!("{shown} is written; change it, then `unbroken edge check --config {shown}`\n"))
}

fn up(path: &std::path::Path, dry_run: bool, no_daemon: bool) -> output::Result {
    let shown = path.display();
    let text = unbroken_edge_daemon::config::Config::text(path)?;
    let config =
        unbroken_edge_daemon::config::Config::parse(&text).map_err(|e| format!("{shown}: {e}"))?;
    let state = State::of(&config.name);
    let done = match dry_run {
        true => state.fits(&config).and_then(|()| missing(&config)).map(|missing| {
            let what = "and then what the devices of these NICs need, when they are there";
            (missing.steps, missing.more.then_some(what).into_iter().collect::<Vec<_>>())
        }),
        false => state.up(&text).map(|up| {
            let anew = up.frr_anew.then_some("FRR is started anew: its configuration has changed");
            let told = up.told.then_some("the daemon has taken the changed configuration");
            (up.steps, anew.into_iter().chain(told).collect())
        }),
    };
    let (steps, notes) = done.map_err(|e| format!("{shown}: {e}"))?;
    if !dry_run && !no_daemon {
        state
            .start_daemon(&std::env::current_exe().map_err(|e| Failure::io("this program", e))?)?;
    }
    let lines = steps.iter().flat_map(|s| &s.make).map(|c| c.join(" ") + "\n");
    let notes = notes.iter().map(|note| format!("# {note}\n"));
    print(&lines.chain(notes).collect::<String>())
}

fn down(name: Option<&str>) -> output::Result {
    let left = State::find(name)?.down()?;
    left.iter().for_each(|l| eprintln!("unbroken: not undone: {l}"));
    Ok(())
}

fn status(name: Option<&str>, json: bool) -> output::Result {
    let status = unbroken_edge_daemon::status::Status::read(&State::find(name)?)?;
    if json {
        return output::print_json(&status);
    }
    let head = ["uplink", "neighbour", "carrier", "bfd", "bgp"].map(String::from).to_vec();
    let row = |u: &unbroken_edge_daemon::status::Uplink| {
        vec![u.device.clone(), u.peer.to_string(), u.carrier.clone(), u.bfd.clone(), u.bgp.clone()]
    };
    let rows: Vec<Vec<String>> = [head].into_iter().chain(status.uplinks.iter().map(row)).collect();
    let daemon = status.daemon.map_or("does not run".to_owned(), |pid| format!("process {pid}"));
    let rules = match &status.rules {
        None => "rules: none are configured; the kernel's bridges and VXLAN devices carry the \
                 traffic\n"
            .to_owned(),
        Some(r) => format!(
            "rules: {} wanted, {} present, {} in hardware; {} destinations; last convergence {} \
             µs; failures {}{}\n",
            r["wanted"],
            r["present"],
            r["in_hw"],
            r["destinations"],
            r["convergence_us"],
            r["failures"],
            r["last_failure"].as_str().map(|f| format!(" (the last: {f})")).unwrap_or_default(),
        ),
    };
    let last_ways = match status.last_ways.as_slice() {
        [] => String::new(),
        kept => format!("; on their last way, BGP has none: {}", kept.join(", ")),
    };
    let destinations = format!("destinations from EVPN: {}{last_ways}\n", status.destinations);
    print(&format!(
        "{}: daemon {daemon}\n{}{destinations}{rules}",
        status.name,
        output::table(&rows)
    ))
}

fn check(config: Option<&std::path::Path>) -> output::Result {
    let findings = unbroken_edge_daemon::check::check(config);
    let line = |f: &unbroken_edge_daemon::check::Finding| match &f.missing {
        None => format!("ok       {}\n", f.what),
        Some(how) if f.needed => format!("MISSING  {}: {how}\n", f.what),
        Some(how) => format!("without  {}: {how}\n", f.what),
    };
    print(&findings.iter().map(line).collect::<String>())?;
    match findings.iter().any(|f| f.needed && f.missing.is_some()) {
        true => Err("this machine lacks something that is needed".to_owned().into()),
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_template_is_a_configuration() {
        let config = unbroken_edge_daemon::config::Config::parse(TEMPLATE).unwrap();
        assert_eq!(config.name, "host1");
    }

    #[test]
    fn a_file_that_is_there_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("etc/edge.toml");
        init(&path).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), TEMPLATE);
        std::fs::write(&path, "mine").unwrap();
        assert!(init(&path).unwrap_err().to_string().contains("stays as it is"));
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "mine");
        let link = folder.path().join("link.toml");
        std::os::unix::fs::symlink(folder.path().join("elsewhere"), &link).unwrap();
        assert!(init(&link).is_err());
        assert!(!folder.path().join("elsewhere").exists());
    }
}
