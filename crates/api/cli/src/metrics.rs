//! `unbroken metrics`: Prometheus text on stdout, into a file, or over HTTP.

use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use unbroken_observe::{metrics, Kind, Observer, Snapshot, KINDS};

use crate::output::{check_replaceable, print, Failure, Result};
use crate::place::Place;

#[derive(clap::Args)]
pub(crate) struct MetricsArgs {
    /// Write them to this file in one step, for node_exporter's textfile
    /// collector; its name ends in .prom
    #[arg(long, value_name = "FILE", conflicts_with = "listen")]
    textfile: Option<PathBuf>,
    /// Serve them over HTTP under /metrics, until interrupted
    #[arg(long, value_name = "ADDRESS:PORT")]
    listen: Option<std::net::SocketAddr>,
    /// Ask clients for the token in this file (Authorization: Bearer …); needed
    /// where the address is not of the loopback interface
    #[arg(long, value_name = "FILE", requires = "listen")]
    token_file: Option<PathBuf>,
    /// List the metrics that there may be, with type and meaning, and end
    #[arg(long, conflicts_with_all = ["listen", "textfile"])]
    list: bool,
}

pub(crate) const AFTER: &str = "Examples:
  unbroken metrics
  unbroken metrics --textfile /var/lib/prometheus/node-exporter/unbroken.prom
  unbroken metrics --listen 127.0.0.1:9435";

pub(crate) fn run(place: Place, args: &MetricsArgs) -> Result {
    if args.list {
        let line = |kind: &Kind| format!("{}\t{}\t{}\n", kind.name, kind.type_name(), kind.help);
        return print(&KINDS.iter().map(line).collect::<String>());
    }
    if let Some(address) = args.listen {
        // A folder that is named and not there is a mistake, told at once.
        place.look()?;
        let token = args.token_file.as_deref().map(unbroken_web::read_token).transpose();
        let token = token.map_err(|e| Failure::Text(e.to_string()))?;
        let find = Box::new(move || place.look_closely());
        return unbroken_web::serve_metrics(find, address, token, |address| {
            eprintln!("unbroken: metrics at http://{address}/metrics");
        })
        .map_err(|e| Failure::Text(e.to_string()));
    }
    let snapshot = match place.look()? {
        Some(runtime) => Observer::new(&runtime).look()?,
        None => Snapshot::default(),
    };
    let page = metrics(&snapshot);
    match &args.textfile {
        Some(path) => write_whole(path, &page),
        None => print(&page),
    }
}

/// Writes a file in one step, so that nobody reads half of it. What has its name is replaced, and a
/// link is not followed.
fn write_whole(path: &Path, text: &str) -> Result {
    if path.extension().is_none_or(|e| e != "prom") {
        let why = "node_exporter reads files alone whose names end in .prom";
        return Err(format!("{}: {why}", path.display()).into());
    }
    check_replaceable(path)?;
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let failed = |e| Failure::io(format!("cannot write {}", path.display()), e);
    let mut file =
        tempfile::Builder::new().prefix(".unbroken-").tempfile_in(folder).map_err(failed)?;
    file.write_all(text.as_bytes()).map_err(failed)?;
    // node_exporter is another user; what a file is made with, the umask takes from.
    let readable = std::fs::Permissions::from_mode(0o644);
    file.as_file().set_permissions(readable).map_err(failed)?;
    file.persist(path).map_err(|e| failed(e.error))?;
    Ok(())
}
