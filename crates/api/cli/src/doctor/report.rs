//! What `unbroken doctor` says: lines for people, and the same as JSON.

use serde::Serialize;

/// How a line is meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Level {
    /// As it should be.
    Ok,
    /// Worth knowing; programs can be protected.
    Note,
    /// Keeps programs from being protected.
    Problem,
}

/// What one check has found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Line {
    pub(crate) level: Level,
    /// The name of the check; it stays the same between versions.
    pub(crate) check: &'static str,
    /// What was looked at, where there are several: a device, or two.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(crate) subject: String,
    pub(crate) text: String,
    /// What to do about it.
    #[serde(rename = "do", skip_serializing_if = "Option::is_none")]
    pub(crate) remedy: Option<String>,
}

impl Line {
    fn new(level: Level, check: &'static str, text: impl Into<String>) -> Line {
        Line { level, check, subject: String::new(), text: text.into(), remedy: None }
    }

    pub(crate) fn ok(check: &'static str, text: impl Into<String>) -> Line {
        Line::new(Level::Ok, check, text)
    }

    pub(crate) fn note(check: &'static str, text: impl Into<String>) -> Line {
        Line::new(Level::Note, check, text)
    }

    pub(crate) fn problem(
        check: &'static str,
        text: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Line {
        Line::new(Level::Problem, check, text).and_do(remedy)
    }

    /// Of a device, or of two.
    pub(crate) fn of(self, subject: impl Into<String>) -> Line {
        Line { subject: subject.into(), ..self }
    }

    /// With what to do.
    pub(crate) fn and_do(self, remedy: impl Into<String>) -> Line {
        Line { remedy: Some(remedy.into()), ..self }
    }

    fn text(&self) -> String {
        let level = match self.level {
            Level::Ok => "ok",
            Level::Note => "note",
            Level::Problem => "PROBLEM",
        };
        let gap = if self.subject.is_empty() { "" } else { " " };
        let mut text = format!("{level:<8} {}{gap}{}: {}\n", self.subject, self.check, self.text);
        if let Some(remedy) = &self.remedy {
            text += &format!("{:<8}   do: {remedy}\n", "");
        }
        text
    }
}

/// All that is said.
#[derive(Serialize)]
pub(crate) struct Report {
    /// The version of this command.
    pub(crate) version: &'static str,
    /// How many lines are problems.
    pub(crate) problems: usize,
    pub(crate) lines: Vec<Line>,
    /// What to run, where there are two devices that programs can use.
    pub(crate) command: Option<String>,
}

impl Report {
    pub(crate) fn new(lines: Vec<Line>, command: Option<String>) -> Report {
        let problems = lines.iter().filter(|line| line.level == Level::Problem).count();
        Report { version: env!("CARGO_PKG_VERSION"), problems, lines, command }
    }

    /// For people.
    pub(crate) fn text(&self) -> String {
        let lines: String = self.lines.iter().map(Line::text).collect();
        let count = match self.problems {
            0 => "No problem found.".to_string(),
            1 => "1 problem found.".to_string(),
            n => format!("{n} problems found."),
        };
        let run = match &self.command {
            Some(command) if self.problems == 0 => format!("Run programs so:\n  {command}\n"),
            Some(command) => format!("When they are solved:\n  {command}\n"),
            None => "Programs need two devices that work. Without any: `unbroken demo`.\n".into(),
        };
        format!("unbroken {} doctor\n{lines}\n{count}\n{run}", self.version)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_say_what_to_do() {
        let lines = vec![
            Line::ok("kernel", "Linux 6.1"),
            Line::problem("port", "it is DOWN", "plug the cable in").of("mlx5_0"),
        ];
        let report = Report::new(lines, Some("unbroken run".into()));
        let text = report.text();
        assert!(text.contains("ok       kernel: Linux 6.1\n"), "{text}");
        assert!(
            text.contains("PROBLEM  mlx5_0 port: it is DOWN\n           do: plug the cable in\n"),
            "{text}"
        );
        assert!(
            text.ends_with("1 problem found.\nWhen they are solved:\n  unbroken run\n"),
            "{text}"
        );
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(
            (&json["problems"], &json["lines"][1]["level"], &json["lines"][1]["do"]),
            (&1.into(), &"problem".into(), &"plug the cable in".into())
        );
        assert!(json["lines"][0].get("do").is_none());
    }
}
