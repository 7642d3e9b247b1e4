//! The commands in groups, as `unbroken --help` lists them. clap has one heading for all.

use super::pack;
use clap::Command;

/// Each group, and its commands in the order in which they are listed.
const GROUPS: [(&str, &[&str]); 7] = [
    ("Begin here", &["run", "status", "demo"]),
    ("Look", &["top", "web", "events", "report", "doctor"]),
    ("Break and mend", &["fabric", "fault", "nic", "reset"]),
    ("Measure", &["coll", "sdr"]),
    ("Plan", &["plan", "simulate", "model"]),
    ("Operate", &["health", "metrics", "traces", "edge", "cdi"]),
    ("Shell", &["completions", "help"]),
];
/// Where the second column begins.
const COLUMN: usize = 15;

/// The same command line, whose help lists its commands in groups.
pub(super) fn grouped(command: Command) -> Command {
    let mut built = command.clone();
    built.build();
    let list: Vec<String> = GROUPS.iter().map(|group| listed(&built, group)).collect();
    let head = "{about-with-newline}\n{usage-heading} {usage}";
    let options = "Options:\n{options}{after-help}";
    command.help_template(format!("{head}\n\n{}\n{options}", list.join("\n")))
}

fn listed(command: &Command, (title, names): &(&str, &[&str])) -> String {
    let line = |name: &&str| {
        let found = command.get_subcommands().find(|sub| sub.get_name() == *name)?;
        let about = found.get_about()?.to_string();
        let head = format!("  {:1$}", name, COLUMN - 2);
        Some(pack(about.split(' '), &head, &" ".repeat(COLUMN), "").join("\n") + "\n")
    };
    format!("{title}:\n{}", names.iter().filter_map(line).collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_is_in_one_group() {
        let mut command = crate::command_line();
        command.build();
        let shown = command.get_subcommands().filter(|sub| !sub.is_hide_set());
        let mut there: Vec<&str> = shown.map(Command::get_name).collect();
        let mut listed: Vec<&str> = GROUPS.iter().flat_map(|(_, names)| *names).copied().collect();
        there.sort_unstable();
        listed.sort_unstable();
        assert_eq!(there, listed);
        let text = command.render_help().to_string();
        assert!(text.contains("Begin here:\n  run          Run a program"), "{text}");
        assert!(text.lines().all(|line| line.chars().count() <= super::super::COLUMNS), "{text}");
    }
}
