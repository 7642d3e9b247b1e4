//! Automatic path migration over plain verbs, in three modules: alternate path specification, path
//! loading, path migration; and an asynchronous thread that hears of migrations, specifies paths
//! again and loads them. After *Automatic Path Migration over InfiniBand: Early Experiences*
//! (Vishnu, Mamidala, Narravula, Panda). It works on any device that has
//! `IBV_DEVICE_AUTO_PATH_MIG`; nothing of Unbroken need be beneath.
//!
//! ```text
//!   c.rs       include/unbroken/apm.h: handles, errors, lists of queue pairs
//!   thread.rs  the context's asynchronous events, and time
//!   handle.rs  a device context and its queue pairs: locks, verbs, callbacks
//!   machine    what state each queue pair is in and what is to be done: no I/O, time is handed in
//!   path.rs    paths, and which are chosen: both ends choose alike
//!   verbs.rs   the process's libibverbs
//! ```
//!
//! libibverbs has an event for MIGRATED, and none for ARMED. So it is the library's thread that
//! asks, after pauses that grow, and tells the program by an event of its own; a device that does
//! have an event for it is asked when that comes.
//!
//! What the library cannot know is whether a path is whole beyond its own port: nothing in verbs
//! probes it. A path is *healthy* while its port is up. The peer's ports are the peer's to watch,
//! and to tell (`UNBAPM_EVENT_RESPECIFIED`).
#![warn(missing_debug_implementations)]

mod c;
mod error;
mod handle;
pub mod machine;
pub mod path;
mod thread;
mod verbs;
