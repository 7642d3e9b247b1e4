//! A figure of SDR-RDMA's, and what is published of it.

use serde::{Deserialize, Serialize};
use unbroken_chart::Figure;

/// A value that the paper's text gives, and ours.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Published {
    /// The figure it belongs to.
    pub figure: u32,
    /// What it is.
    pub what: String,
    /// As the paper has it.
    pub published: String,
    /// With its loss read as that of a packet.
    pub per_packet: String,
    /// With its loss read as that of a chunk.
    pub per_chunk: String,
}

/// A figure and what is published of it.
pub struct Drawing {
    pub figure: Figure,
    pub published: Vec<Published>,
}
