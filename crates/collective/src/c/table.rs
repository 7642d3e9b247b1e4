//! The objects of C programs.

use std::sync::Mutex;

use unbroken::handles::{Table, Wrong};

use crate::communicator::Communicator;
use crate::error::Error;
use crate::request::Request;

impl From<Wrong> for Error {
    fn from(wrong: Wrong) -> Error {
        Error::Refused(wrong.to_string())
    }
}

pub(super) static COMMS: Table<Communicator> = Table::new("communicator", "ubcollCommInitRank");
pub(super) static REQUESTS: Table<Mutex<Request>> = Table::new("request", "an operation whose request is not NULL");
