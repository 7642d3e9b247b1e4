//! Messages and connections.

mod codec;
mod network;
