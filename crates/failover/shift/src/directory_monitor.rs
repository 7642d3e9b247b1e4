//! The directory of this process, and what it reports by itself.
//!
//! Which directory it is, the environment says (`UNBROKEN_DIRECTORY`). That a server is lost, or
//! back, goes into the event log, and that one has never answered goes to stderr too: queue pairs
//! that are connected lose nothing meanwhile, and those that are to be connected are protected when
//! it is back.

use crate::lock::lock;
use crate::log_lines::tell_event;
use crate::worker_queue::{Job, WorkerQueue};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, Weak};
use unbroken_directory::{Directory, DirectoryError, News, Settings, Surroundings};
use unbroken_events::{Event, EventLog, What};
use unbroken_process::PerProcess;
use unbroken_runtime::Runtime;
use unbroken_verbs::{Error, Result};

/// Embedded directories that are open: one serves all hosts of this process, as it can be opened
/// only once.
static EMBEDDED: PerProcess<Mutex<Vec<OpenDirectory>>> = PerProcess::new();
type OpenDirectory = (PathBuf, Weak<dyn Directory>);

/// Opens the directory. A wrong setting is an error; a server that does not answer is none.
pub(crate) fn open(
    runtime: &Runtime,
    host: String,
    queue: Arc<WorkerQueue>,
) -> Result<Arc<dyn Directory>> {
    let settings = Settings::from_env().map_err(refused)?;
    if !matches!(settings, Settings::Lmdb) {
        return connect(&settings, runtime, host, queue);
    }
    let mut open = lock(EMBEDDED.get());
    open.retain(|(_, directory)| directory.strong_count() > 0);
    let known = open
        .iter()
        .find(|(path, _)| path == runtime.path())
        .and_then(|(_, directory)| directory.upgrade());
    if let Some(directory) = known {
        return Ok(directory);
    }
    let directory = connect(&settings, runtime, host, queue)?;
    open.push((runtime.path().to_path_buf(), Arc::downgrade(&directory)));
    Ok(directory)
}

fn refused(e: DirectoryError) -> Error {
    Error::new(libc::EIO, e.to_string())
}

/// A directory that has never answered is most often named wrongly: that is told on stderr, once.
fn warn(error: DirectoryError) {
    unbroken_log::complain(format_args!("{error}"));
    unbroken_log::complain(format_args!(
        "while that is so, queue pairs that are connected are not protected"
    ));
}

fn record(log: &EventLog, what: What) {
    // The log is a report.
    let _ = log.emit(&Event::now(what));
}

fn connect(
    settings: &Settings,
    runtime: &Runtime,
    host: String,
    queue: Arc<WorkerQueue>,
) -> Result<Arc<dyn Directory>> {
    let log = EventLog::open(runtime);
    let url = match settings {
        Settings::Redis(settings) => settings.to_string(),
        Settings::Lmdb => String::new(),
    };
    let news = move |news| {
        let what = match news {
            News::Answered(names) => return queue.put(Job::Answered(names)),
            News::Refused(why) => return queue.put(Job::Refused(why)),
            News::Moved => return queue.put(Job::ReadAliases),
            News::Entered => return queue.put(Job::TellMoved),
            News::Unreachable(why) => {
                warn(DirectoryError::Unreachable { url: url.clone(), why: why.clone() });
                // Of which `warn` has told everybody.
                return record(&log, What::DirectoryLost { host: host.clone(), why });
            }
            News::Lost(why) => What::DirectoryLost { host: host.clone(), why },
            News::Back => {
                queue.put(Job::AskAgain);
                What::DirectoryBack { host: host.clone() }
            }
        };
        tell_event(&what);
        record(&log, what);
    };
    let surroundings = Surroundings {
        spawn: |name, body| unbroken_process::spawn(name, body).map(drop),
        news: Box::new(news),
    };
    Ok(unbroken_directory::open(settings, runtime, surroundings).map_err(refused)?.into())
}
