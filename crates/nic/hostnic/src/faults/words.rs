//! Faults of devices of the machine in words: `nic mlx5_0 dead`, `refuse mlx5_0 ENOMEM`.
//!
//! Where they mean the same they are the words of the emulated network. What a fault shows can be
//! read back.

use std::fmt;
use std::str::FromStr;
use unbroken_verbs::{Error, Result};

/// Bytes of a device's name, as the kernel bounds it.
const MAX_NAME_BYTES: usize = 63;

/// A form of a fault, for help and errors.
pub struct DeviceFaultForm {
    /// An example, which is a fault.
    pub example: &'static str,
    /// What it does.
    pub does: &'static str,
}

/// The forms of all faults of devices.
pub const DEVICE_FAULT_FORMS: &[DeviceFaultForm] = &[
    DeviceFaultForm {
        example: "nic mlx5_0 dead",
        does: "posts and control verbs fail, nothing more completes, a device-fatal event",
    },
    DeviceFaultForm {
        example: "nic mlx5_0 down",
        does: "a port-down event, queue pairs fail, datagrams are lost; then a port-up event",
    },
    DeviceFaultForm { example: "refuse mlx5_0 ENOMEM", does: "posts are refused with that errno" },
    DeviceFaultForm { example: "swallow mlx5_0", does: "completions of sends are lost" },
    DeviceFaultForm {
        example: "wqe-error mlx5_0",
        does: "the next send that completes fails its queue pair, with LOC_QP_OP_ERR",
    },
    DeviceFaultForm {
        example: "wqe-error mlx5_0 RETRY_EXC_ERR",
        does: "the same with another status",
    },
    DeviceFaultForm {
        example: "event mlx5_0 PORT_ERR",
        does: "the asynchronous event is raised, and the device works on",
    },
    DeviceFaultForm {
        example: "link mlx5_0 down",
        does: "its network interface goes down, for all that use it, until `fault clear` (root)",
    },
    DeviceFaultForm {
        example: "cable rxe0 cut",
        does: "a software device: its interface loses all, for all that use it, until \
               `fault clear` (root)",
    },
];

/// What completions can be made to say, and its number.
const STATUSES: &[(&str, u32)] = &[
    ("LOC_LEN_ERR", 1),
    ("LOC_QP_OP_ERR", 2),
    ("LOC_PROT_ERR", 4),
    ("WR_FLUSH_ERR", 5),
    ("BAD_RESP_ERR", 7),
    ("LOC_ACCESS_ERR", 8),
    ("REM_INV_REQ_ERR", 9),
    ("REM_ACCESS_ERR", 10),
    ("REM_OP_ERR", 11),
    ("RETRY_EXC_ERR", 12),
    ("RNR_RETRY_EXC_ERR", 13),
    ("REM_ABORT_ERR", 16),
    ("FATAL_ERR", 19),
    ("RESP_TIMEOUT_ERR", 20),
    ("GENERAL_ERR", 21),
];
/// What a completion says where nothing else is asked for.
const LOC_QP_OP_ERR: u32 = 2;

/// What posts can be refused with.
const ERRNOS: &[(&str, i32)] = &[
    ("EAGAIN", libc::EAGAIN),
    ("EBUSY", libc::EBUSY),
    ("EFAULT", libc::EFAULT),
    ("EINVAL", libc::EINVAL),
    ("EIO", libc::EIO),
    ("ENODEV", libc::ENODEV),
    ("ENOMEM", libc::ENOMEM),
    ("EPERM", libc::EPERM),
];

/// Asynchronous events that can be raised, by their number in `enum ibv_event_type`.
const EVENTS: &[(&str, i32)] = &[
    ("CQ_ERR", 0),
    ("QP_FATAL", 1),
    ("QP_REQ_ERR", 2),
    ("QP_ACCESS_ERR", 3),
    ("COMM_EST", 4),
    ("SQ_DRAINED", 5),
    ("PATH_MIG", 6),
    ("PATH_MIG_ERR", 7),
    ("DEVICE_FATAL", 8),
    ("PORT_ACTIVE", 9),
    ("PORT_ERR", 10),
    ("LID_CHANGE", 11),
    ("PKEY_CHANGE", 12),
    ("SM_CHANGE", 13),
    ("QP_LAST_WQE_REACHED", 16),
    ("CLIENT_REREGISTER", 17),
    ("GID_CHANGE", 18),
];

/// What befalls a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Harm {
    /// It does nothing more, and says so.
    Dead,
    /// Its port is down.
    Down,
    /// Posts are refused with this errno.
    Refuse(i32),
    /// Completions of sends are lost.
    Swallow,
    /// The next send that completes does so with this status, and fails its queue pair.
    WqeError(u32),
    /// This asynchronous event is raised.
    Event(i32),
    /// Its network interface is down, for all that use it.
    LinkDown,
    /// Its network interface loses all that it would send and receive, for all that use it.
    CableCut,
}

impl Harm {
    /// Whether it strikes once each time that it falls due, instead of holding for a time.
    pub fn strikes(self) -> bool {
        matches!(self, Harm::WqeError(_) | Harm::Event(_))
    }

    /// Whether it befalls the network interface, and so is no program's: it is there at once, and
    /// until it is cleared.
    pub fn is_of_interface(self) -> bool {
        matches!(self, Harm::LinkDown | Harm::CableCut)
    }
}

/// A fault of a device of the machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceFault {
    /// The device, by its name.
    pub device: String,
    /// What befalls it.
    pub harm: Harm,
}

fn name_of<T: Copy + PartialEq>(table: &[(&'static str, T)], value: T) -> &'static str {
    table.iter().find(|(_, other)| *other == value).map_or("?", |(name, _)| name)
}

/// The number that a name has in a table, whatever libibverbs' prefix it is given with.
fn find<T: Copy>(table: &[(&str, T)], what: &str, word: &str) -> Result<T> {
    let bare = ["IBV_WC_", "IBV_EVENT_"].iter().find_map(|prefix| word.strip_prefix(prefix));
    let bare = bare.unwrap_or(word);
    let found = table.iter().find(|(name, _)| name.eq_ignore_ascii_case(bare));
    found.map(|(_, value)| *value).ok_or_else(|| {
        let names: Vec<&str> = table.iter().map(|(name, _)| *name).collect();
        Error::invalid(format!("'{word}' is not {what}; right is one of {}", names.join(", ")))
    })
}

/// Whether it can be the name of a device.
pub(crate) fn is_device_name(name: &str) -> bool {
    let fits = |b: u8| b.is_ascii_alphanumeric() || b"_-.".contains(&b);
    (1..=MAX_NAME_BYTES).contains(&name.len()) && name.bytes().all(fits)
}

fn forms() -> String {
    let forms = DEVICE_FAULT_FORMS.iter().map(|form| format!("'{}'", form.example));
    forms.collect::<Vec<_>>().join(", ")
}

impl fmt::Display for DeviceFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let device = &self.device;
        match self.harm {
            Harm::Dead => write!(f, "nic {device} dead"),
            Harm::Down => write!(f, "nic {device} down"),
            Harm::Refuse(errno) => write!(f, "refuse {device} {}", name_of(ERRNOS, errno)),
            Harm::Swallow => write!(f, "swallow {device}"),
            Harm::WqeError(LOC_QP_OP_ERR) => write!(f, "wqe-error {device}"),
            Harm::WqeError(status) => {
                write!(f, "wqe-error {device} {}", name_of(STATUSES, status))
            }
            Harm::Event(kind) => write!(f, "event {device} {}", name_of(EVENTS, kind)),
            Harm::LinkDown => write!(f, "link {device} down"),
            Harm::CableCut => write!(f, "cable {device} cut"),
        }
    }
}

impl FromStr for DeviceFault {
    type Err = Error;

    fn from_str(text: &str) -> Result<DeviceFault> {
        let wrong = |what: String| Error::invalid(format!("fault '{text}': {what}"));
        let words: Vec<&str> = text.split_whitespace().collect();
        let (device, harm) = match words[..] {
            ["nic", device, "dead"] => (device, Harm::Dead),
            ["nic", device, "down"] => (device, Harm::Down),
            ["nic", _, state] => {
                return Err(wrong(format!("a device can be 'dead' or 'down', not '{state}'")))
            }
            ["link", device, "down"] => (device, Harm::LinkDown),
            ["link", _, state] => {
                return Err(wrong(format!("a link can be 'down', not '{state}'")))
            }
            ["cable", device, "cut"] => (device, Harm::CableCut),
            ["cable", _, state] => {
                return Err(wrong(format!("a cable of a device can be 'cut', not '{state}'")))
            }
            ["refuse", device, errno] => {
                (device, Harm::Refuse(find(ERRNOS, "an errno of posts", errno)?))
            }
            ["swallow", device] => (device, Harm::Swallow),
            ["wqe-error", device] => (device, Harm::WqeError(LOC_QP_OP_ERR)),
            ["wqe-error", device, status] => {
                (device, Harm::WqeError(find(STATUSES, "a status of completions", status)?))
            }
            ["event", device, kind] => {
                (device, Harm::Event(find(EVENTS, "an asynchronous event", kind)?))
            }
            _ => return Err(wrong(format!("faults of devices are {}", forms()))),
        };
        if !is_device_name(device) {
            return Err(wrong(format!(
                "'{device}' is not the name of a device, as `ibv_devices` lists them"
            )));
        }
        Ok(DeviceFault { device: device.to_owned(), harm })
    }
}

impl DeviceFault {
    /// Whether a text names it: a whole fault, or its first words (`nic mlx5_0`: dead and down).
    pub fn is_named_by(&self, text: &str) -> bool {
        let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
        let whole = self.to_string();
        text.split(' ').count() > 1
            && whole.strip_prefix(&text).is_some_and(|r| r.is_empty() || r.starts_with(' '))
    }

    /// Whether the words of a text are those of a fault of a device, or its first words: then the
    /// name of that.
    pub fn device_in(text: &str) -> Option<&str> {
        let mut words = text.split_whitespace();
        let known = ["nic", "link", "cable", "refuse", "swallow", "wqe-error", "event"]
            .contains(&words.next()?);
        words.next().filter(|name| known && is_device_name(name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_is_read_and_shown_alike() {
        for form in DEVICE_FAULT_FORMS {
            let fault: DeviceFault = form.example.parse().unwrap();
            assert_eq!(fault.to_string(), form.example);
            let device = form.example.split(' ').nth(1);
            assert_eq!(DeviceFault::device_in(form.example), device);
        }
        let fault: DeviceFault = " event  rxe0 IBV_EVENT_PORT_ACTIVE ".parse().unwrap();
        assert_eq!(fault.to_string(), "event rxe0 PORT_ACTIVE");
        let fault: DeviceFault = "wqe-error rxe0 IBV_WC_LOC_QP_OP_ERR".parse().unwrap();
        assert_eq!(fault.to_string(), "wqe-error rxe0");
    }

    #[test]
    fn the_pages_know_every_form() {
        for page in ["reference/faults.md", "guide/hardware.md"] {
            let path = format!("{}/../../../docs/{page}", env!("CARGO_MANIFEST_DIR"));
            let text = std::fs::read_to_string(path).unwrap();
            for form in DEVICE_FAULT_FORMS {
                let row = format!("`{}", form.example);
                let known = text.lines().any(|line| line.starts_with("| ") && line.contains(&row));
                assert!(known, "docs/{page} has no row with `{}`", form.example);
            }
        }
    }

    #[test]
    fn errors_say_what_is_right() {
        for (text, hint) in [
            ("", "faults of devices are 'nic mlx5_0 dead'"),
            ("nic mlx5_0", "faults of devices are"),
            ("nic mlx5_0 ded", "not 'ded'"),
            ("cable rxe0 loose", "not 'loose'"),
            ("nic a/0 dead", "'a/0' is not the name of a device"),
            ("link mlx5_0 up", "not 'up'"),
            ("refuse mlx5_0 EWHAT", "right is one of EAGAIN, "),
            ("wqe-error mlx5_0 BAD", "LOC_QP_OP_ERR"),
            ("event mlx5_0 FIRE", "PORT_ERR"),
            ("swallow mlx5_0 now", "faults of devices are"),
            ("nic \u{7}x dead", "not the name of a device"),
        ] {
            let error = text.parse::<DeviceFault>().unwrap_err().to_string();
            assert!(error.contains(hint), "{text}: {error}");
        }
    }

    #[test]
    fn first_words_name_faults() {
        let fault: DeviceFault = "nic mlx5_0 dead".parse().unwrap();
        assert!(fault.is_named_by("nic mlx5_0") && fault.is_named_by(" nic  mlx5_0 dead"));
        for other in ["", "nic", "nic mlx5_0 down", "nic mlx5", "refuse mlx5_0"] {
            assert!(!fault.is_named_by(other), "{other}");
        }
        assert_eq!(DeviceFault::device_in("nic a/0 dead"), None);
        assert_eq!(DeviceFault::device_in("delay rail0 5ms"), None);
    }
}
