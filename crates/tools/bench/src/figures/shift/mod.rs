//! The figures of SHIFT (cross-NIC failover): 7, 8b, 9 and 10, and Table 2. All are measured live,
//! on softnic, with unmodified perftest, both ends on this machine; so it is their shape that can
//! be compared with the paper's, which has two servers with RNICs of 100 Gbit/s.
//!
//! What the paper's text gives is beside ours in a table and in `shift.json`. Times are bounded:
//! each run has a limit.

mod latency;
mod row;
mod stream;
mod switching;
mod tools;
mod training;
mod verbs;

use crate::Result;
pub use row::{table, Drawing, Row};
use tools::program;
pub use tools::{Tools, NO_TORCH};

type Draw = fn(&Tools) -> Result<Drawing>;

/// The number of the figure that needs PyTorch.
pub const TRAINING: &str = "10";
/// By their numbers; Figure 8's part b has its number.
pub const FIGURES: [(&str, Draw); 5] = [
    ("7", stream::figure_7),
    ("8", switching::figure_8b),
    ("9", verbs::figure_9),
    (TRAINING, training::figure_10),
    ("table2", latency::table_2),
];
