//! The protocol of a communicator: how one rank's part of collective operations is done with
//! others, and goes on when NICs fail.
//!
//! Sans-I/O: an [`Engine`] is given completions, notices, messages and the time, and asks its
//! [`Env`] to move bytes. The same engine runs over queue pairs (crate `collective`) and in the
//! simulator of its tests. It stands on *plain* verbs: WRITE with immediate, queue pairs that flush
//! when they fail; failover beneath it is not needed (and does no harm).
//!
//! # Parts
//!
//! - [`frame`]: what is sent. [`stream`]: frames in order between two ranks, over whatever path.
//!   [`run`]: a program's steps and lanes.
//! - [`engine`]: an operation and its steps; `leaving`: what is in line, who takes turns;
//!   `arriving`: what has come. [`paths`]: how a path between two ranks is made, fails, and is made
//!   again. `detours`: what joins ranks that have no rail in common.
//! - [`agree`]: ranks that ask for different operations; [`consent`]: how they find out where data
//!   does not show it. [`locate`]: where a failure is.
//!   [`message`]: what is said out of band.
//! - [`views`]: what all plan with, a [`picture`] of NICs; `meter`, `rates`,
//!   `measure`: how fast they are. [`reduce`]: reductions of bytes, fast.
//!
//! # A path
//!
//! Between two ranks there is a path for each rail, or one through the memory of their host. The
//! lower rank makes it.
//!
//! | state | event | lower rank | higher rank |
//! | --- | --- | --- | --- |
//! | Idle, Down | wanted, time to try again | open; `Offer` → Offered | `Want` (once) |
//! | Idle, Down | `Offer` | | open, connect; `Accept` → Accepted, or `Closed` → Down |
//! | Offered | `Accept` | connect, test → Testing | |
//! | Testing | the test completes | `Carries` → Up | |
//! | Accepted | `Carries` | | → Up |
//! | any of these | an error, a dead NIC | close; `Closed` → Down | the same |
//! | any of these | `Closed` | close; `Closed` → Down, heard | the same |
//! | Down | `Closed` | heard | heard |
//! | Idle, Down | `Closed` of a later life: it could not be begun | | Down, heard |
//!
//! Each making of a path is a *life*, numbered by the lower rank; messages of another life are
//! ignored. A path that is Down is tried again when both ends are (heard), later and later.
//!
//! # Migration
//!
//! 1. An end that sees an error closes its queue pair, which is the point after which nothing more
//!    comes over it (*quiesced*), and says `Closed` with the counts of all streams that come to it
//!    from that peer. The other end does the same, if it has not already.
//! 2. A stream that was carried there is *halted*. When the peer's `Closed` for that life has come,
//!    it goes on at the receiver's count over the next path of its chain that is Up, or waits for
//!    one.
//! 3. When its home path is Up again, it stops, waits until all that it posted has been used, and
//!    goes home.
//!
//! # Invariants
//!
//! 1. A byte of a message is put into its place once. Frames are used in the order of their
//!    numbers, each once; duplicates are dropped.
//! 2. A slot is written again only when its receiver has done with the frame in it, and nothing of
//!    an earlier life can still write there.
//! 3. Frames of an operation that has not begun here stay in their slots; so does their sender.
//!    Nothing behind them belongs to an earlier one.
//! 4. A receiver always takes what belongs to the operation that runs: at most a lane's room of
//!    messages ([`run`]) lies aside. So streams that several lanes share never block each other.
//! 5. What ranks disagree about is not summed: a frame whose digest differs is not taken. No rank is
//!    done with an operation of all before all are known to agree to it.
//!
//! # Failure cases
//!
//! - *A second failure* on the way: the stream is halted again, at the path that it went to;
//!   nothing is lost, since frames stay in the sender's slots until they are used. When all paths
//!   of rails are Down, there are detours; when these are, too, streams wait as long as operations
//!   may stand still.
//! - *Both ends see it*: both say `Closed`, and each takes the other's for the answer.
//! - *A false alarm* costs a migration, and is otherwise harmless; the path is made again.
//! - *Silence that nobody's queue pair notices* (the receiver waits, the sender has died or waits,
//!   too): who has waited for long tells all ranks what it waits in; a process that is gone is seen
//!   by its neighbours out of band.
//! - *A process dies*: an error at all ranks that names it. *Out of band is lost*: the same; data
//!   alone is never taken for a sign of life.
//! - *A rank leaves*: before it waits for what it has begun, it says how much that is; what it sent
//!   stays good; an operation that it does not do is an error that names it.
#![forbid(unsafe_code)]

pub mod agree;
mod arriving;
mod codec;
pub mod consent;
mod consenting;
mod detours;
mod dispute;
pub mod engine;
mod env;
mod failure;
pub mod frame;
mod leaving;
pub mod locate;
mod measure;
pub mod message;
mod meter;
mod mutants;
pub mod paths;
pub mod picture;
mod pieces;
mod rates;
pub mod reduce;
pub mod run;
pub mod stream;
mod trace;
mod tree;
pub mod views;

pub use engine::{Config, Engine};
pub use env::{Bytes, Env, Note, ProbeId, Slot};
pub use failure::Failure;
#[doc(hidden)]
pub use mutants::Mutant;

/// A rank's number.
pub type Rank = usize;
