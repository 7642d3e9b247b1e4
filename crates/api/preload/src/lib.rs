//! `libunbroken.so`: being libibverbs for programs that nobody changes.
//!
//! The library is preloaded. A program (or a library of it) that is linked to libibverbs finds our
//! definitions first; one that opens libibverbs with `dlopen` and takes its functions with `dlsym`
//! or `dlvsym` is answered by [`hooks`]. All objects that a program then holds are ours, so every
//! public function that takes an object is ours, too. A few functions of libibverbs take no object
//! at all and stay with libibverbs (listed in `tests/exports.rs`).
//!
//! The way of a verb: the C function here checks pointers and masks and turns C structures into
//! plain data; `unbroken_shift::api` does the work. Before the first `ibv_get_device_list` only
//! the functions behind ours are looked up, and it is noted what stderr is, so a program that uses
//! no verbs is not touched.
//!
//! Invariants:
//! - No panic crosses into C: every function runs under [`ffi::guard`] or does nothing that can
//!   panic.
//! - Posting and polling allocate nothing and take no lock of this crate.
//! - An object is freed only after its events were acknowledged, as libibverbs promises. An event
//!   that waits names its object by a number that is never used again ([`objects::Registry`]), so
//!   an event of a destroyed object finds nothing.
//! - The caller's structures grow with versions of libibverbs: where a size is passed, no byte past
//!   it is written.
//!
//! Files use those that stand before them: `ffi` and what objects are made of (`batch`, `current`,
//! `device_memory`); `objects`; the verbs of the fast path (`post`, `builder`, `cq_poll`, `cq_ex`,
//! `srq`); `races`, which wraps them; the verbs that make objects (`cq`, `qp`, …); `device`, which
//! puts all of them into a context.

mod ah;
mod batch;
mod builder;
mod channel;
mod clock;
#[cfg(target_arch = "x86_64")]
mod cm;
mod cq;
mod cq_ex;
mod cq_poll;
mod current;
mod device;
mod device_memory;
mod dm;
mod domain;
mod ffi;
mod hooks;
mod interfaces;
mod limits;
#[cfg(target_arch = "x86_64")]
mod loader;
mod memory;
mod newer;
mod objects;
mod paths;
mod post;
mod qp;
mod qp_attr;
mod query;
mod races;
mod rates;
mod real;
mod signals;
mod srq;
mod strings;
mod sysfs;
mod unsupported;
mod window;

/// Runs when the library is loaded, before the program can put something else in place of stderr.
extern "C" fn loaded() {
    unbroken_log::note_stderr();
}

// SAFETY: the loader calls what this section has once, with arguments that `loaded` need not take;
// it makes a system call and cannot panic.
#[used]
#[link_section = ".init_array"]
static LOADED: extern "C" fn() = loaded;
/// A program's memory that was unmapped must not become ours: see [`unbroken_process::mapping`].
#[global_allocator]
static ALLOCATOR: unbroken_process::mapping::Apart = unbroken_process::mapping::Apart;
