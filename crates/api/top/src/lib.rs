//! The screen of `unbroken top`.
//!
//! [`render()`] draws it and [`View::key`] takes keys; both are pure, so that tests need no
//! terminal. [`run()`] joins them to one: a thread looks at the runtime folder, another waits for
//! keys.
#![forbid(unsafe_code)]

mod history;
mod panes;
mod render;
mod run;
#[cfg(test)]
mod samples;
mod view;

pub use history::{History, Rates, KEPT};
pub use render::render;
pub use run::{run, Options};
pub use view::{shown, Next, Pane, View, PANES};
