//! The `unbroken` command, as a library: the program itself and the tool that writes its man pages
//! use it.
//!
//! Every subcommand works on one runtime folder (`UNBROKEN_RUNTIME` or `--runtime`) and on nothing
//! else: it talks to running programs through the files, pages and sockets in it. (`model`, `plan`
//! and `simulate` only compute.) Errors go to stderr with exit status 1 (2 for a wrong command
//! line); `run` becomes the program, or exits with 127 (not found) or 126 (cannot be run), as
//! shells do.
#![forbid(unsafe_code)]

mod args;
mod cdi;
mod child;
mod coll;
mod demo;
mod device_fault;
mod doctor;
mod edge;
mod edge_demo;
mod events;
mod fabric;
mod fault;
mod health;
mod help;
mod installed;
mod joined;
mod metrics;
mod model;
mod nic;
mod output;
mod place;
mod program;
mod report;
mod run;
mod sanitizer;
mod sdr;
mod simulate;
mod status;
mod top;
mod traces;
mod web;

use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches};
use unbroken_fabric::{Fabric, NicKind, Schedule};

use args::{Args, Command, FabricCommand, FaultCommand, NicCommand};
use output::Failure;
use place::Place;

/// The command line with all subcommands and options, for man pages and shell completions.
pub fn command_line() -> clap::Command {
    help::prepared(Args::command())
}

/// Runs the command that the process's arguments name; gives the process's exit status.
pub fn main() -> ExitCode {
    let parsed = command_line()
        .try_get_matches()
        .and_then(|mut matches| Args::from_arg_matches_mut(&mut matches));
    let args = match parsed {
        Ok(args) => args,
        // `--help` and `--version` are no mistakes.
        Err(e) if e.use_stderr() && std::env::args_os().any(|arg| arg == "health") => {
            let _ = e.print();
            if std::env::args_os().any(|arg| arg == "--json") {
                health::print_no_verdict(&e.kind().to_string());
            }
            return ExitCode::from(health::NO_VERDICT);
        }
        Err(e) => e.exit(),
    };
    // Of `health`, 1 and 2 are verdicts.
    let (error, is_json) = match &args.command {
        Command::Health(args) => (health::NO_VERDICT, args.json),
        _ => (1, false),
    };
    match execute(args) {
        Ok(()) => ExitCode::SUCCESS,
        // The reader of our output has seen enough.
        Err(Failure::ClosedPipe) => ExitCode::SUCCESS,
        Err(Failure::Told) => ExitCode::from(1),
        Err(Failure::Verdict(status)) => ExitCode::from(status),
        Err(Failure::Text(text)) => {
            if is_json {
                health::print_no_verdict(&text);
            }
            fail(error, &text)
        }
        Err(Failure::Program { status, text }) => fail(status, &text),
    }
}

fn fail(status: u8, text: &str) -> ExitCode {
    eprintln!("unbroken: {}", unbroken_units::text::shown_lines(text));
    ExitCode::from(status)
}

fn execute(args: Args) -> output::Result {
    // What does nothing is better told than done without. The doctor tells of it in its own way.
    let wrong = unbroken_environment::wrong();
    if !wrong.is_empty() && !matches!(args.command, Command::Doctor(_)) {
        return Err(wrong.join("\nunbroken: ").into());
    }
    let place = Place::of(args.runtime);
    match args.command {
        Command::Run(args) => run::run(&place.make()?, &args),
        Command::Fabric { command } => match command {
            FabricCommand::Up { hosts, nics, link_layer, mtu, ports, device } => {
                let kind = NicKind { link_layer, mtu, ports, device };
                fabric::up(&place.make()?, &hosts, nics, kind)
            }
            FabricCommand::Join { address, directory, password_file } => {
                joined::join(&place.make()?, &address, &directory, password_file.as_deref())
            }
            FabricCommand::Show { json } => fabric::show(&place, json),
            FabricCommand::Down { force } => {
                place.look()?.map_or(Ok(()), |runtime| fabric::down(&runtime, force))
            }
        },
        Command::Fault { command } => fault(&place, command),
        Command::Nic { command } => match command {
            NicCommand::Drain { nic, wait } => nic::drain(&place.look_for_nics()?, &nic, wait),
            NicCommand::Undrain { nic } => nic::undrain(&place.look_for_nics()?, &nic),
        },
        Command::Coll { command } => match command {
            coll::CollCommand::Bench(args) => coll::bench(&place.make()?, &args),
            coll::CollCommand::Status { json } => coll::status(place.look()?.as_ref(), json),
        },
        Command::Status { json } => status::status(&place, json),
        Command::Health(args) => health::run(&place, &args),
        Command::Report(args) => report::run(&place, &args),
        Command::Web(args) => web::run(&place, &args),
        Command::Traces(args) => traces::run(&place, &args),
        Command::Top(args) => top::run(&place, &args),
        Command::Metrics(args) => metrics::run(place, &args),
        Command::Events { clear: true, .. } => events::clear(&place),
        Command::Events { json, follow, clear: false } => events::events(&place, json, follow),
        Command::Doctor(args) => doctor::doctor(&place, &args),
        Command::Reset { force } => {
            // A folder that is damaged knows of no link.
            if let Ok(Some(runtime)) = place.look() {
                device_fault::mend_interfaces(&runtime)?;
            }
            place::take_away(&place, force)
        }
        Command::Edge { command } => edge::edge(command),
        Command::Demo(args) => demo::demo(&args),
        Command::Cdi { command } => cdi::cdi(&place.make()?, command),
        Command::Completions { shell } => completions(&shell),
        Command::Model(args) => model::model(&args),
        Command::Sdr(args) => sdr::sdr(&place, &args),
        Command::Plan(args) => simulate::plan(&args),
        Command::Simulate(args) => simulate::simulate(&args),
    }
}

/// `unbroken completions`.
fn completions(shell: &str) -> output::Result {
    let shell: clap_complete::Shell = shell.parse()?;
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut command_line(), "unbroken", &mut script);
    output::print(&String::from_utf8_lossy(&script))
}

fn fault(place: &Place, command: FaultCommand) -> output::Result {
    match command {
        FaultCommand::Set { fault, at, lasts, every } => {
            let when = Schedule { at: at.unwrap_or_default(), lasts, every };
            let text = fault.join(" ");
            match device_fault::is_one(&text) {
                true => device_fault::set(&place.make()?, &text, &when),
                false => fault::set(&place.make()?, &text, &when),
            }
        }
        FaultCommand::Random { seed, lasts, hosts, dry_run: true } => {
            fault::random(&place.fabric_or_error()?, seed, lasts, &hosts, true)
        }
        FaultCommand::Random { seed, lasts, hosts, dry_run: false } => {
            let runtime = place.make()?;
            fault::random(&Fabric::open(&runtime)?, seed, lasts, &hosts, false)?;
            fault::tell_who_meets_it(&runtime, Some(lasts))
        }
        FaultCommand::Clear { fault } => {
            let text = fault.join(" ");
            match place.look()?.map_or(Ok(false), |r| device_fault::clear(&r, &text))? {
                true => Ok(()),
                false => fault::clear(place.fabric()?.as_ref(), &text),
            }
        }
        FaultCommand::List { json } => {
            place.look()?.map_or(Ok(()), |runtime| device_fault::list(&runtime, json))?;
            fault::list(place.fabric()?.as_ref(), json)
        }
    }
}
