//! The objects of C programs.

use unbroken::handles::{Table, Wrong};

use crate::communicator::Communicator;
use crate::completions::Completions;
use crate::error::Error;
use crate::request::Request;

impl From<Wrong> for Error {
    fn from(wrong: Wrong) -> Error {
        Error::Refused(wrong.to_string())
    }
}

pub(super) static COMMS: Table<Communicator> = Table::new("communicator", "ubcollCommInitRank");
pub(super) static REQUESTS: Table<Request> =
    Table::new("request", "an operation whose request is not NULL");
pub(super) static QUEUES: Table<Completions> = Table::new("completion queue", "ubcollQueueCreate");
