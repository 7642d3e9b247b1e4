//! The host edge: one device over two uplinks (THORN-ML).
//!
//! Makes a host's devices and its FRR from `edge.toml`, and runs the daemon that keeps the tc rules
//! as the kernel's tables want them (the decisions are in `overlay`). Everything here is about this
//! machine: files, netlink, the tools of iproute2 and FRR.
#![forbid(unsafe_code)]

mod bfd;
pub mod check;
pub mod command;
pub mod config;
pub mod daemon;
pub mod drain;
pub mod error;
mod events;
mod failover;
mod folder;
pub mod frr;
pub mod lab;
mod last;
pub mod netlink;
mod nic;
pub mod plan;
mod policy;
mod process;
mod routes;
pub mod state;
pub mod status;
