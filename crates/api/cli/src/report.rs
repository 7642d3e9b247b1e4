//! `unbroken report`.

use std::io::Write;
use std::path::{Path, PathBuf};

use unbroken_observe::report::{read, Report};
use unbroken_units::text::counted;

use crate::output::{check_replaceable, print, print_json, Failure, Result};
use crate::place::Place;

#[derive(clap::Args)]
pub(crate) struct ReportArgs {
    /// Runtime folders, folders of logs, or files: what `unbroken events --json`
    /// printed (.jsonl), what `unbroken status --json` printed (.json)
    /// [default: the runtime folder]
    #[arg(value_name = "PATH")]
    paths: Vec<PathBuf>,
    /// The file to write
    #[arg(long, short, value_name = "FILE", default_value = "unbroken-report.html")]
    output: PathBuf,
    /// One JSON object instead of the page
    #[arg(long)]
    json: bool,
}

pub(crate) const AFTER: &str = "Examples:
  unbroken report
  unbroken report logs/ -o what-happened.html
  unbroken report unbroken-123-node1.jsonl unbroken-123-node2.jsonl
  unbroken report logs/ --json | jq '.incidents[].what'

The page needs nothing else: it can be sent. A log named
unbroken-JOB-HOST.jsonl is one of that job and host, a folder named
unbroken-UID-job-JOB one of that job.";

pub(crate) fn run(place: &Place, args: &ReportArgs) -> Result {
    let mut paths = args.paths.clone();
    if paths.is_empty() {
        let runtime = place.look()?.filter(|runtime| runtime.events().exists());
        let runtime = runtime.ok_or_else(|| {
            Failure::Text(format!("{}: nothing has happened yet", place.path().display()))
        })?;
        paths.push(runtime.path().into());
    }
    let report = Report::of(&read(&paths)?);
    if args.json {
        return print_json(&Shown::of(&report));
    }
    write(&args.output, &report.html())?;
    let failed: u64 = report.jobs.iter().map(|job| job.failed).sum();
    print(&format!(
        "{}: {}, {}, {} failed for good\n",
        args.output.display(),
        counted(report.incidents.len() as u64, "failure", "failures"),
        counted(report.jobs.len() as u64, "job", "jobs"),
        counted(failed, "queue pair", "queue pairs")
    ))
}

/// Keys of JSON are strings: counts by kind and reason are lists.
#[derive(serde::Serialize)]
struct Shown<'a> {
    incidents: &'a [unbroken_observe::report::Incident],
    jobs: &'a [unbroken_observe::report::Job],
    unprotected: &'a std::collections::BTreeMap<String, u64>,
    nics: &'a [unbroken_observe::report::NicBytes],
    advice: &'a [String],
    notes: &'a [String],
}

impl Shown<'_> {
    fn of(report: &Report) -> Shown<'_> {
        Shown {
            incidents: &report.incidents,
            jobs: &report.jobs,
            unprotected: &report.unprotected,
            nics: &report.nics,
            advice: &report.advice,
            notes: &report.notes,
        }
    }
}

/// Writes the page in one step.
fn write(path: &Path, text: &str) -> Result {
    check_replaceable(path)?;
    let failed = |e| Failure::io(format!("cannot write {}", path.display()), e);
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut file =
        tempfile::Builder::new().prefix(".unbroken-").tempfile_in(folder).map_err(failed)?;
    file.write_all(text.as_bytes()).map_err(failed)?;
    file.persist(path).map_err(|e| failed(e.error))?;
    Ok(())
}
