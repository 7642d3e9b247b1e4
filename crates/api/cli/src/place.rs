//! The runtime folder of a command: made by what needs one, only looked at by what shows something.

use std::path::PathBuf;
use std::time::Duration;

use unbroken_environment as environment;
use unbroken_fabric::{Fabric, NicPage, Runtime, RuntimeError};
use unbroken_observe::{fabric, presence};
use unbroken_runtime::reset;

use crate::output::{print, wait, Failure, Result};

/// How often a folder that is not there yet is looked for.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// The runtime folder that is meant, by `--runtime` or the environment.
pub(crate) struct Place(Option<PathBuf>);

impl Place {
    /// As `--runtime` says, if it does.
    pub(crate) fn of(named: Option<PathBuf>) -> Place {
        Place(named)
    }

    /// The folder, made if it is missing.
    pub(crate) fn make(&self) -> Result<Runtime> {
        Ok(match &self.0 {
            Some(path) => Runtime::at(path)?,
            None => Runtime::open()?,
        })
    }

    /// The folder as it is; none where nothing has been made yet.
    pub(crate) fn look(&self) -> Result<Option<Runtime>> {
        Ok(self.look_closely()?)
    }

    /// The folder as [`Place::look`] finds it, with what is wrong with it.
    pub(crate) fn look_closely(&self) -> std::result::Result<Option<Runtime>, RuntimeError> {
        Runtime::look(self.0.as_deref())
    }

    /// The folder, where a NIC was named: there are none before one has been made.
    pub(crate) fn look_for_nics(&self) -> Result<Runtime> {
        self.look()?.ok_or_else(|| {
            Failure::Text(format!("no NIC has been opened yet in {}", self.path().display()))
        })
    }

    /// The folder, for who goes on looking at it.
    pub(crate) fn look_where_something_is(&self) -> Result<Runtime> {
        self.look()?.ok_or_else(|| {
            Failure::Text(format!(
                "{}: nothing has run here yet; the first program makes it, and so does `unbroken \
                 fabric up`",
                self.path().display()
            ))
        })
    }

    /// The folder, waited for where nothing has made it yet.
    pub(crate) fn wait(&self) -> Result<Runtime> {
        loop {
            match self.look()? {
                Some(runtime) => return Ok(runtime),
                None => wait(LOOK_AGAIN)?,
            }
        }
    }

    /// Its name.
    pub(crate) fn path(&self) -> PathBuf {
        let named = || environment::text(environment::RUNTIME).map(PathBuf::from);
        self.0.clone().or_else(named).unwrap_or_else(Runtime::default_path)
    }

    /// Its fabric, if it has one; to look makes none.
    pub(crate) fn fabric(&self) -> Result<Option<Fabric>> {
        Ok(self.look()?.map_or(Ok(None), |runtime| fabric(&runtime))?)
    }

    /// Its fabric, or what to do where it has none.
    pub(crate) fn fabric_or_error(&self) -> Result<Fabric> {
        self.fabric()?.ok_or_else(|| {
            Failure::Text(format!(
                "there is no fabric in {}; `unbroken fabric up` makes one, and so does the first \
                 program",
                self.path().display()
            ))
        })
    }
}

/// The pids of the programs that use NICs of a runtime folder.
pub(crate) fn programs(runtime: &Runtime) -> Result<Vec<u32>> {
    let presence = presence(runtime)?;
    let mut users = Vec::new();
    for addr in NicPage::addresses(runtime)? {
        // What is no page is nobody's NIC; `unbroken status` names it.
        users.extend(NicPage::open(runtime, addr).iter().flat_map(|page| page.users(&presence)));
    }
    users.sort_unstable();
    users.dedup();
    Ok(users.iter().map(|user| user.pid).collect())
}

/// `unbroken reset`: the folder goes, damaged or not.
pub(crate) fn take_away(place: &Place, force: bool) -> Result {
    let path = place.path();
    let real = path.canonicalize().ok();
    if !reset(&path, force).map_err(|e| Failure::Text(e.to_string()))? {
        return print(&format!("{} is not there\n", path.display()));
    }
    if let Some(real) = real {
        // Else it is found out by whoever needs addresses.
        let _ = Fabric::forget(&real);
    }
    print(&format!("{} is gone\n", path.display()))
}
