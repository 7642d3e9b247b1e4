//! Sizes, times, rates and probabilities as people write and read them.
//!
//! [`read`] takes quantities with their units (`64K`, `20ms`, `400Gbit/s`) from command lines and
//! configurations; what is wrong gets a sentence that names the input and says what would be
//! right. [`show`] writes them for people, with few digits, or exactly, so that what is shown can
//! be read again. [`text`] makes what others wrote safe to show.
#![forbid(unsafe_code)]

pub mod read;
pub mod show;
pub mod text;
