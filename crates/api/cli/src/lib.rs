//! The `unbroken` command, as a library: the program itself and the tool that writes its man pages
//! use it.
//!
//! Every subcommand works on one runtime folder (`UNBROKEN_RUNTIME` or `--runtime`) and on nothing
//! else: it talks to running programs through the files, pages and sockets in it. (`model` only
//! computes.) Errors go to stderr with exit status 1 (2 for a wrong command line); `run` becomes
//! the program, or exits with 127 (not found) or 126 (cannot be run), as shells do.
#![forbid(unsafe_code)]

mod args;
mod coll;
mod demo;
mod edge;
mod edge_demo;
mod events;
mod fabric;
mod fault;
mod model;
mod nic;
mod output;
mod run;
mod sanitizer;
mod sdr;
mod status;

use std::process::ExitCode;

use clap::{CommandFactory, Parser};
use unbroken_fabric::{NicKind, Runtime, Schedule};

use args::{Args, Command, FabricCommand, FaultCommand, NicCommand};
use output::Failure;

/// The command line with all subcommands and options, for man pages and shell completions.
pub fn command_line() -> clap::Command {
    Args::command()
}

/// Runs the command that the process's arguments name; gives the process's exit status.
pub fn main() -> ExitCode {
    match execute(Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        // The reader of our output has seen enough.
        Err(Failure::ClosedPipe) => ExitCode::SUCCESS,
        Err(Failure::Text(text)) => fail(1, &text),
        Err(Failure::Program { status, text }) => fail(status, &text),
    }
}

fn fail(status: u8, text: &str) -> ExitCode {
    eprintln!("unbroken: {text}");
    ExitCode::from(status)
}

fn execute(args: Args) -> output::Result {
    // It computes, and needs no folder.
    if let Command::Model(args) = &args.command {
        return model::model(args);
    }
    let runtime = match &args.runtime {
        Some(path) => Runtime::at(path)?,
        None => Runtime::open()?,
    };
    match args.command {
        Command::Run(args) => run::run(&runtime, &args),
        Command::Fabric { command } => match command {
            FabricCommand::Up { hosts, nics, link_layer, mtu, ports, device } => {
                fabric::up(&runtime, &hosts, nics, NicKind { link_layer, mtu, ports, device })
            }
            FabricCommand::Show { json } => fabric::show(&runtime, json),
            FabricCommand::Down { force } => fabric::down(&runtime, force),
        },
        Command::Fault { command } => match command {
            FaultCommand::Set { fault, at, lasts, every } => {
                let when = Schedule { at: at.unwrap_or_default(), lasts, every };
                fault::set(&runtime, &fault.join(" "), &when)
            }
            FaultCommand::Random { seed, lasts, hosts, dry_run } => {
                fault::random(&runtime, seed, lasts, &hosts, dry_run)
            }
            FaultCommand::Clear { fault } => fault::clear(&runtime, &fault.join(" ")),
            FaultCommand::List { json } => fault::list(&runtime, json),
        },
        Command::Nic { command } => match command {
            NicCommand::Drain { nic, wait } => nic::drain(&runtime, &nic, wait),
            NicCommand::Undrain { nic } => nic::undrain(&runtime, &nic),
        },
        Command::Coll { command } => match command {
            coll::CollCommand::Bench(args) => coll::bench(&runtime, &args),
            coll::CollCommand::Status { json } => coll::status(&runtime, json),
        },
        Command::Status { json } => status::status(&runtime, json),
        Command::Events { json, follow } => events::events(&runtime, json, follow),
        Command::Edge { command } => edge::edge(command),
        Command::Demo(args) => demo::demo(&args),
        Command::Model(args) => model::model(&args),
        Command::Sdr(args) => sdr::sdr(&runtime, &args),
    }
}
