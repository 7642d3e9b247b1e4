//! `unbroken doctor`: what this machine has for protected programs, what is wrong with it, and what
//! to do about it.
//!
//! What is read is put into plain values first ([`machine`]: what the kernel shows in files); each
//! check is a function of such values that gives a [`Line`], so each fault can be tested without
//! the machine that has it. Nothing is changed. Traffic is sent only where `--devices` is given.

mod backups;
mod devices;
mod directory;
mod machine;
mod pci;
mod report;
mod system;
#[cfg(test)]
mod tests;

use std::time::Duration;

use unbroken_directory::{Redis, Settings};
use unbroken_environment as environment;
use unbroken_fabric::RuntimeError;
use unbroken_nics::{reach_each_other, HostNics, Wanted};

use self::backups::Sent;
use self::devices::{Answer, Opens};
use self::directory::Folder;
use self::machine::{Device, Roots};
use self::report::{Line, Report};
use crate::installed;
use crate::joined::Joined;
use crate::output::{print, print_json, Failure, Result};
use crate::place::Place;

/// How long a message between two devices is waited for.
const REACH_LIMIT: Duration = Duration::from_secs(2);
/// Devices that send to each other: of more, each silent pair would be waited for.
const MAX_SENDERS: usize = 8;
/// Of a wrong command line.
const USAGE: u8 = 2;

#[derive(clap::Args)]
pub(crate) struct DoctorArgs {
    /// RDMA devices of this machine, with commas, as `ibv_devices` lists them, or all: these are
    /// looked at, and 64 bytes are sent from each to each other [default: $UNBROKEN_DEVICES, else
    /// all, and nothing is sent]
    #[arg(long, value_name = "NAMES")]
    devices: Option<String>,
    /// The directory, as `unbroken run` takes it [default: $UNBROKEN_DIRECTORY, else lmdb]
    #[arg(long, value_name = "URL")]
    directory: Option<String>,
    /// One JSON object
    #[arg(long)]
    json: bool,
}

/// Looks at the machine and says what is wrong with it.
pub(crate) fn doctor(place: &Place, args: &DoctorArgs) -> Result {
    let (by, named) = match &args.devices {
        Some(named) => ("--devices", Some(named.clone())),
        None => (environment::DEVICES, environment::text(environment::DEVICES)),
    };
    let wanted = named.as_deref().map_or(Ok(Wanted::All), Wanted::parse);
    let wanted =
        wanted.map_err(|e| Failure::Program { status: USAGE, text: format!("{by}: {e}") })?;
    let report = look(place, args, &wanted);
    match args.json {
        true => print_json(&report)?,
        false => print(&report.text())?,
    }
    match report.problems {
        0 => Ok(()),
        _ => Err(Failure::Told),
    }
}

fn look(place: &Place, args: &DoctorArgs, wanted: &Wanted) -> Report {
    let roots = Roots::default();
    let names = match wanted {
        Wanted::All => None,
        Wanted::Named(names) => Some(&names[..]),
    };
    let (devices, devices_lines) = devices::choose(machine::devices(&roots), names);
    let (libibverbs, opens) = ask_libibverbs(&devices);
    let usable: Vec<&Device> =
        devices.iter().filter(|device| backups::is_usable(device, &opens)).collect();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let mut lines: Vec<Line> = environment::wrong()
        .into_iter()
        .map(|what| Line::problem("environment", what, "correct it, or unset it"))
        .collect();
    lines.extend([
        system::kernel(&roots),
        system::libibverbs(&libibverbs, &maps),
        system::library(installed::library(None).map_err(|e| e.to_string())),
        system::memlock(&system::Memlock::of_this_process(&roots.proc)),
        look_at_directory(place, args),
    ]);
    lines.extend(devices_lines);
    lines.extend(of_each_device(&roots, &devices, &opens));
    lines.extend(backups::backups(&usable));
    if !devices.is_empty() {
        let sent = send(&usable, args.devices.is_some());
        lines.extend(backups::paths(&usable, &sent));
        lines.push(system::gpu(&roots, &devices));
    }
    Report::new(lines, backups::command(&usable))
}

fn of_each_device(roots: &Roots, devices: &[Device], opens: &Opens) -> Vec<Line> {
    let of = |device: &Device| {
        let lines = [
            devices::opens(device, opens),
            devices::port(device),
            devices::gids(device),
            devices::place(device),
            devices::congestion(roots, device),
        ];
        lines.into_iter().chain(devices::bond(roots, device))
    };
    devices.iter().flat_map(of).collect()
}

/// Whether libibverbs can be used, and what it says of each device. It is not asked about devices
/// where the kernel has none.
fn ask_libibverbs(devices: &[Device]) -> (Answer, Vec<(String, Answer)>) {
    if let Err(e) = HostNics::library() {
        return (Err(e.to_string()), Vec::new());
    }
    if devices.is_empty() {
        return (Ok(()), Vec::new());
    }
    match HostNics::openable() {
        Ok(each) => {
            let each =
                each.into_iter().map(|(name, opened)| (name, opened.map_err(|e| e.to_string())));
            (Ok(()), each.collect())
        }
        Err(e) => (Err(e.to_string()), Vec::new()),
    }
}

fn look_at_directory(place: &Place, args: &DoctorArgs) -> Line {
    let joined = place.look().ok().flatten().and_then(|runtime| Joined::load(&runtime).ok()?);
    let settings = match (&args.directory, joined) {
        (Some(url), _) => Settings::parse_public(url),
        (None, Some(joined)) => joined.directory(),
        (None, None) => Settings::from_env(),
    };
    let is_there = match place.look_closely() {
        Ok(found) => Ok(found.is_some()),
        Err(RuntimeError::Missing { .. }) => Ok(false),
        Err(e) => Err(e.to_string()),
    };
    let path = place.path();
    let folder = Folder { path: &path, is_there, may_write: directory::may_write };
    directory::directory(settings.map_err(|e| e.to_string()), folder, |server| {
        Redis::probe(server).map_err(|e| e.to_string())
    })
}

fn send(usable: &[&Device], asked: bool) -> Sent {
    let first = usable.iter().take(MAX_SENDERS);
    let names: Vec<String> = first.map(|device| device.name.clone()).collect();
    match (asked, names.len()) {
        (false, _) => Sent::NotAsked,
        (true, 0 | 1) => Sent::TooFew,
        (true, _) => match reach_each_other(&names, REACH_LIMIT) {
            Ok(all) => Sent::Done(all),
            Err(e) => Sent::Failed(e.to_string()),
        },
    }
}
