//! What is seen of a runtime folder, over HTTP: metrics for Prometheus, and the page of
//! `unbroken web`.
//!
//! On the loopback interface everybody on the machine may look; elsewhere clients need a token.
//! What changes something needs a token always. See [`server`] for what is refused.
#![forbid(unsafe_code)]

mod error;
mod metrics;
mod page;
mod server;
mod source;
mod state;
mod token;

pub use error::{Result, WebError};
pub use metrics::serve_metrics;
pub use page::{serve_page, PageOptions};
pub use source::Find;
pub use token::{new_token, read_token};
