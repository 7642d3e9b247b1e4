//! What a person can change from a screen: faults of the emulated network, and drains.

use std::fmt;

use serde::Deserialize;
use unbroken_fabric::{Fault, Runtime, Schedule, Selector};
use unbroken_runtime::Drains;

use crate::error::{ObserveError, Result};
use crate::status::{fabric, nics, whole_nic};

/// The longest fault that is read, in bytes.
const MAX_WORDS: usize = 200;

/// A change, as a screen or a page asks for it.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(tag = "action", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Action {
    /// Sets a fault in the emulated network, in the words of `unbroken fault set`.
    SetFault {
        /// `nic a/0 dead`.
        fault: String,
    },
    /// Clears faults of the emulated network, in the words of `unbroken fault clear`.
    ClearFault {
        /// A fault, or its first words; empty for all.
        fault: String,
    },
    /// Has all queue pairs leave a NIC.
    Drain {
        /// The NIC, `a/0`.
        nic: String,
    },
    /// Takes a drained NIC back.
    Undrain {
        /// The NIC, `a/0`.
        nic: String,
    },
}

impl fmt::Display for Action {
    /// As the command that does the same.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Action::SetFault { fault } => write!(f, "unbroken fault set '{fault}'"),
            Action::ClearFault { fault } if fault.is_empty() => write!(f, "unbroken fault clear"),
            Action::ClearFault { fault } => write!(f, "unbroken fault clear '{fault}'"),
            Action::Drain { nic } => write!(f, "unbroken nic drain {nic}"),
            Action::Undrain { nic } => write!(f, "unbroken nic undrain {nic}"),
        }
    }
}

impl Action {
    /// Carries it out, waits for nothing, and says what was done. Errors: words that mean no fault,
    /// a NIC that is not there, no emulated network in the folder.
    pub fn carry_out(&self, runtime: &Runtime) -> Result<String> {
        let words = match self {
            Action::SetFault { fault } | Action::ClearFault { fault } => fault,
            Action::Drain { nic } | Action::Undrain { nic } => nic,
        };
        if words.len() > MAX_WORDS {
            return Err(ObserveError::Input(format!("longer than {MAX_WORDS} bytes")));
        }
        match self {
            Action::SetFault { fault } => {
                let parsed: Fault = fault.parse()?;
                emulated(runtime)?.schedule(&parsed, &Schedule::default())?;
                Ok(format!("set: {fault}"))
            }
            Action::ClearFault { fault } => {
                let selector: Option<Selector> =
                    Some(fault).filter(|f| !f.trim().is_empty()).map(|f| f.parse()).transpose()?;
                let cleared = emulated(runtime)?.clear(selector.as_ref())?;
                Ok(format!("cleared: {} faults", cleared.len()))
            }
            Action::Drain { nic } => drain(runtime, nic, true),
            Action::Undrain { nic } => drain(runtime, nic, false),
        }
    }
}

fn emulated(runtime: &Runtime) -> Result<unbroken_fabric::Fabric> {
    fabric(runtime)?.ok_or_else(|| {
        let why = "there is no emulated network in this folder; faults are set in one only";
        ObserveError::Input(why.into())
    })
}

fn drain(runtime: &Runtime, nic: &str, drained: bool) -> Result<String> {
    let known = nics(runtime, fabric(runtime)?.as_ref(), &[])?.nics;
    let name = whole_nic(nic);
    if drained && !known.iter().any(|n| whole_nic(&n.nic) == name) {
        let names: Vec<&str> = known.iter().map(|n| n.nic.as_str()).collect();
        let why = format!("there is no NIC '{nic}'; there are: {}", names.join(", "));
        return Err(ObserveError::Input(why));
    }
    let is_new = Drains::of(runtime)
        .set(&name, drained)
        .map_err(|e| ObserveError::io(runtime.path().display(), e))?;
    Ok(match (drained, is_new) {
        (true, true) => format!("{name} is being drained"),
        (true, false) => format!("{name} was drained already"),
        (false, true) => format!("{name} is used again"),
        (false, false) => format!("{name} was not drained"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use unbroken_fabric::{Fabric, NicKind, Shape};

    #[test]
    fn actions_read_back_and_name_their_command() {
        let text = r#"{"action":"set-fault","fault":"nic a/0 dead"}"#;
        let action: Action = serde_json::from_str(text).unwrap();
        assert_eq!(action.to_string(), "unbroken fault set 'nic a/0 dead'");
        for wrong in [r#"{"action":"reset"}"#, r#"{"action":"drain","nic":"a/0","x":1}"#, "{}"] {
            assert!(serde_json::from_str::<Action>(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn what_is_wrong_changes_nothing_and_is_named() {
        let dir = tempfile::tempdir_in(Runtime::temporary_root()).unwrap();
        let runtime = Runtime::at(dir.path()).unwrap();
        let fault = || "nic a/0 dead".to_owned();
        let said = Action::SetFault { fault: fault() }.carry_out(&runtime).unwrap_err();
        assert!(said.to_string().contains("no emulated network"), "{said}");
        let shape = Shape { kind: NicKind::default(), ..Shape::of(0, &["a", "b"], 2) };
        let fabric = Fabric::create(&runtime, &shape).unwrap();
        for wrong in ["", "nic a/9 dead", "rm -rf", &"x".repeat(1000)] {
            let action = Action::SetFault { fault: wrong.into() };
            assert!(action.carry_out(&runtime).is_err(), "{wrong}");
        }
        let said = Action::Drain { nic: "a/7".into() }.carry_out(&runtime).unwrap_err();
        assert!(said.to_string().contains("there are: a/0, a/1, b/0, b/1"), "{said}");
        assert!(fabric.list().is_empty());
        Action::SetFault { fault: fault() }.carry_out(&runtime).unwrap();
        assert_eq!(fabric.list().len(), 1);
        Action::ClearFault { fault: String::new() }.carry_out(&runtime).unwrap();
        assert!(fabric.list().is_empty());
        assert!(Action::Drain { nic: "a/0".into() }.carry_out(&runtime).unwrap().contains("being"));
        let said = Action::Undrain { nic: "a/0".into() }.carry_out(&runtime).unwrap();
        assert!(said.contains("used again"), "{said}");
    }
}
