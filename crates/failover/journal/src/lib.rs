//! The journal of a QP on a device that has only plain verbs: what such a device cannot give back
//! when a QP fails is kept here.
//!
//! A [`Journal`] sits between the application's view of one physical QP and the *provider*, the
//! device that carries it. Work requests are recorded as they are posted; the provider is given
//! each under a number of the journal's own ([`Slot`]). Completions come back under these numbers,
//! and leave as the application's: in order, once, unsignalled sends without one. When the network
//! fails the QP, the provider flushes everything; the journal lets nothing of that through, and the
//! owner takes what is outstanding to another QP as a [`Backlog`](unbroken_types::Backlog), as it
//! would from a QP that can hold its work by itself.
//!
//! It is a state machine without I/O: the owner posts, polls, and tells it what came of that.
//!
//! Files: `journal` posts and has the states, `sends` is the ring of sends, `row` is what a journal
//! keeps of one (a journal is generic over it), `completion` handles a WC, `usual` has the short
//! ways of posts and completions, `stop` stops a QP, `slot` has the numbers.
#![forbid(unsafe_code)]

mod completion;
mod journal;
mod mutants;
mod phase;
mod row;
mod sends;
mod slot;
mod stop;
mod usual;

pub use journal::{Config, Journal, Posted};
#[doc(hidden)]
pub use mutants::Mutation;
pub use row::{Marks, PlainRow, SendRow};
pub use slot::{Queue, Slot};
pub use stop::Step;
