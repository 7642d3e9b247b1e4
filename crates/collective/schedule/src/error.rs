//! What can be wrong with a request.

use thiserror::Error;

/// Why a topology or a collective is refused. Nothing was changed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Error {
    /// Too few or too many of something.
    #[error("{count} {what}; there can be {least} to {most}")]
    Count {
        /// Of what.
        what: &'static str,
        /// How many there are.
        count: u64,
        /// The least.
        least: u64,
        /// The most.
        most: u64,
    },
    /// A number that names nothing.
    #[error("{what} {number} does not exist; the numbers are 0 to {last}")]
    Unknown {
        /// What it should name.
        what: &'static str,
        /// The number.
        number: usize,
        /// The largest that there is.
        last: usize,
    },
    /// A host without a rank.
    #[error("host {host} has no rank; leave it out of the topology")]
    Idle {
        /// The host.
        host: usize,
    },
    /// A table of counts that does not fit the ranks.
    #[error("{what}: {given} counts for {ranks} ranks; {wanted} are needed")]
    Counts {
        /// Of which operation.
        what: &'static str,
        /// How many there are.
        given: usize,
        /// The ranks.
        ranks: usize,
        /// How many there should be.
        wanted: usize,
    },
    /// More bytes than 2^62.
    #[error("{what}: the buffers would have more than 2^62 bytes")]
    TooLarge {
        /// Of which operation.
        what: &'static str,
    },
    /// Something that is not done in place.
    #[error("{what} cannot be done in place; give it a buffer for the output")]
    InPlace {
        /// The operation.
        what: &'static str,
    },
    /// Two ranks that are to exchange data have no path.
    #[error("no path between host {a} and host {b}: {why}")]
    Parted {
        /// One host.
        a: usize,
        /// The other.
        b: usize,
        /// What is missing.
        why: &'static str,
    },
    /// A form that an operation does not have.
    #[error("{what}; {instead}")]
    Form {
        /// What does not fit.
        what: &'static str,
        /// What would.
        instead: &'static str,
    },
}
