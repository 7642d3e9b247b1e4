//! What is asked of the server, in our terms: so that a model of a server can stand in for one
//! ([`super::fake`]).

use unbroken_types::Gid;

/// A command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Command {
    /// The server's time, to begin to read a log near its end.
    Time,
    /// Sets a value that stays, unless there is one.
    Claim { name: String, value: Vec<u8> },
    /// Reads a value.
    Get(String),
    /// Sets a value that expires.
    Set { name: String, value: Vec<u8>, lease_ms: u64 },
    /// Makes a table of one field, in place of what was there. It expires so long afterwards.
    SetSole { name: String, field: Vec<u8>, value: Vec<u8>, lease_ms: u64 },
    /// Sets a field of a table, which expires as a whole so long after its last change, and
    /// [`TABLE`].
    SetField { name: String, field: Vec<u8>, value: Vec<u8>, lease_ms: u64 },
    /// Deletes a field of a table.
    DeleteField { name: String, field: Vec<u8> },
    /// Reads all fields of a table.
    Fields(String),
    /// Adds a line to a log, of which the older ones are forgotten.
    Announce { name: String, line: Vec<u8>, lease_ms: u64 },
    /// Reads the lines of a log behind this one; at most [`MAX_LINES`].
    Since { name: String, id: String },
}

/// A field of every table of several processes: one without it has not lost its last field by
/// removals, but as a whole, by the server.
pub(crate) const TABLE: &[u8] = b"table";
/// Lines of a log that are read at once.
pub(crate) const MAX_LINES: usize = 1000;
/// Lines of a log that are kept, more or less.
pub(crate) const KEPT_LINES: usize = 16_384;

/// The answer to a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Reply {
    /// It is done.
    Done,
    /// To [`Command::Time`], in milliseconds.
    Time(u64),
    /// To [`Command::Claim`]: it was set.
    Claimed(bool),
    /// To [`Command::Get`].
    Value(Option<Vec<u8>>),
    /// To [`Command::Fields`].
    Fields(Vec<(Vec<u8>, Vec<u8>)>),
    /// To [`Command::Since`]: the lines with their ids.
    Lines(Vec<(String, Vec<u8>)>),
}

/// A connection to a server.
pub(crate) trait Store {
    /// Runs commands and gives an answer to each, in their order, or says in words why it cannot;
    /// then the connection is of no more use.
    fn run(&mut self, commands: &[Command]) -> Result<Vec<Reply>, String>;
}

/// Makes connections.
pub(crate) trait Connect: Send {
    /// Connects, or says in words why it cannot.
    fn connect(&mut self) -> Result<Box<dyn Store>, String>;
}

/// The names of the entries. All but that of the key contain the key's id: processes that have
/// different keys (the server has lost one, and another was made) do not find each other, since
/// neither would believe what the other says.
#[derive(Clone, Debug)]
pub(crate) struct Names {
    /// Prefix and id.
    base: String,
}

impl Names {
    pub(crate) fn key(prefix: &str) -> String {
        format!("{prefix}:key")
    }

    pub(crate) fn new(prefix: &str, id: &str) -> Names {
        Names { base: format!("{prefix}:{id}") }
    }

    pub(crate) fn process(&self, incarnation: u64) -> String {
        format!("{}:process:{incarnation:016x}", self.base)
    }

    pub(crate) fn qp(&self, name: &QpName) -> String {
        format!("{}:qp:{}:{:06x}", self.base, name.gid(), name.qpn())
    }

    pub(crate) fn moved(&self) -> String {
        format!("{}:moved", self.base)
    }

    pub(crate) fn listeners(&self) -> String {
        format!("{}:listeners", self.base)
    }

    pub(crate) fn changes(&self) -> String {
        format!("{}:changes", self.base)
    }
}

/// GID and QPN, as the tables have them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct QpName(pub(crate) [u8; 20]);

impl QpName {
    pub(crate) fn new(gid: Gid, qpn: u32) -> QpName {
        QpName(crate::record::qp_key(gid, qpn))
    }

    pub(crate) fn gid(&self) -> Gid {
        Gid(std::array::from_fn(|i| self.0[i]))
    }

    pub(crate) fn qpn(&self) -> u32 {
        u32::from_be_bytes(std::array::from_fn(|i| self.0[16 + i]))
    }
}
