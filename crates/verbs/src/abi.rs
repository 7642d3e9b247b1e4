//! The layouts of libibverbs' C structures, written by hand.
//!
//! Names and field order are those of `infiniband/verbs.h`; `cargo xtask abi` compares every size
//! and offset with the installed header, from the one declaration below (the macro makes the
//! structure and its table entry together, so neither can be forgotten). Structures that only carry
//! handles of verbs which this project does not have are left opaque.
//!
//! Two rules of the ABI are worth knowing:
//! - An application reaches `ibv_post_send`, `ibv_poll_cq` and other fast verbs through
//!   `ibv_context::ops`, inlined into its own code, and the extended verbs by stepping back from
//!   `ibv_context` to the [`verbs_context`] around it. That structure grows *downward*: new verbs
//!   come first, and `sz` says how many bytes it has. A caller with a newer header finds `sz` too
//!   small for the newer verbs and does without.
//! - `ibv_port_attr`, `ibv_device_attr_ex` and others grow upward, and the caller passes the size
//!   that it was compiled with.
//!
//! [`ibv_wc`] and [`ibv_sge`] are this project's own [`unbroken_types::Wc`] and
//! [`unbroken_types::Sge`].

// The names are libibverbs' own, and so is their documentation (ibv_* man pages).
#![allow(non_camel_case_types, non_snake_case, missing_docs)]

mod context;
mod device;
mod path;
mod queue;
mod work;

pub use context::*;
pub use device::*;
pub use queue::*;
pub use work::*;

/// Size of a structure and offsets of its fields, as this module has them.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    /// The C name, without `struct`.
    pub name: &'static str,
    /// Bytes.
    pub size: usize,
    /// Name and offset in bytes of each field.
    pub fields: &'static [(&'static str, usize)],
}

/// Declares C structures together with the table of their layouts.
macro_rules! abi {
    ($table:ident; $( $(#[$attr:meta])* pub struct $name:ident { $( $(#[$fattr:meta])* pub $field:ident : $ty:ty ),* $(,)? } )*) => {
        $(
            $(#[$attr])*
            #[repr(C)]
            #[derive(Clone, Copy)]
            pub struct $name { $( $(#[$fattr])* pub $field: $ty ),* }
        )*
        pub(super) const $table: &[super::Layout] = &[
            $( super::Layout {
                name: stringify!($name),
                size: core::mem::size_of::<$name>(),
                fields: &[ $( (stringify!($field), core::mem::offset_of!($name, $field)) ),* ],
            } ),*
        ];
    };
}
pub(crate) use abi;

/// All structures of this module, for the comparison with the header.
pub fn layouts() -> impl Iterator<Item = &'static Layout> {
    [device::LAYOUTS, context::LAYOUTS, queue::LAYOUTS, work::LAYOUTS].into_iter().flatten()
}
