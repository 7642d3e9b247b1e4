//! Writes the man pages and the shell completions of the `unbroken` command into a folder: `man1/`
//! with a page for each subcommand, `bash/unbroken.bash`, `zsh/_unbroken` and `fish/unbroken.fish`.
//!
//! It is a program of its own, so that the command that is installed carries none of this.
#![forbid(unsafe_code)]

use std::fs;
use std::io;
use std::path::Path;
use std::process::ExitCode;

use clap_complete::Shell;

fn main() -> ExitCode {
    let Some(folder) = std::env::args_os().nth(1) else {
        eprintln!("usage: unbroken-man FOLDER");
        return ExitCode::from(2);
    };
    match write_all(Path::new(&folder)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("unbroken-man: {}: {e}", Path::new(&folder).display());
            ExitCode::FAILURE
        }
    }
}

fn write_all(folder: &Path) -> io::Result<()> {
    let pages = folder.join("man1");
    // A page of a subcommand that is gone must not be installed.
    if pages.exists() {
        fs::remove_dir_all(&pages)?;
    }
    fs::create_dir_all(&pages)?;
    // Without `help`, which would have a page that says nothing.
    let command = unbroken_cli::command_line().disable_help_subcommand(true);
    clap_mangen::generate_to(command, &pages)?;
    for (shell, name) in [(Shell::Bash, "bash"), (Shell::Zsh, "zsh"), (Shell::Fish, "fish")] {
        let place = folder.join(name);
        fs::create_dir_all(&place)?;
        clap_complete::generate_to(shell, &mut unbroken_cli::command_line(), "unbroken", &place)?;
    }
    Ok(())
}
