//! The result of everything here.

/// Errors are for people.
pub type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;
